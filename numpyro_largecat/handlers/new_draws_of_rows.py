# SPDX-License-Identifier: Apache-2.0
"""Draw the latent values of a plate's rows anew, and all else as before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax import Array, random
from numpyro.primitives import Messenger

from numpyro_largecat.handlers.sites import Site, is_latent, plates_of


class new_draws_of_rows(Messenger):
    """Draw the latent sites inside of a plate by a key of their own.

    Put it inside of ``numpyro.handlers.seed``: whatever else is drawn, by the keys of ``seed``, is
    the same whichever key the rows have.
    """

    def __init__(self, fn: Callable[..., Any], plate: str, rng_key: Array) -> None:
        self.plate = plate
        self.rng_key = rng_key
        super().__init__(fn)

    def process_message(self, msg: Site) -> None:
        """Give a site of the plate its key, before ``seed`` sees it."""
        if is_latent(msg) and msg["value"] is None and self.plate in plates_of(msg):
            self.rng_key, msg["kwargs"]["rng_key"] = random.split(self.rng_key)
