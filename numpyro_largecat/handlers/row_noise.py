# SPDX-License-Identifier: Apache-2.0
"""The noise of latent sites where a class plate is evaluated some rows at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import Array
from jax.typing import ArrayLike
from numpyro.primitives import Messenger

from numpyro_largecat.handlers.sites import Site, plates_of

# Splitting a key in two gives what folding 0 and 1 into it gives, and classes are less than 2**31.
_APART = 2**32 - 1


def apart_from_sites(key: Array) -> Array:
    """A key that no latent site has in a run which is seeded by ``key``."""
    return jax.random.fold_in(key, _APART)


class InnerNoise(NamedTuple):
    """A key of their own for the sites inside some plates, whatever the key of the others."""

    key: Array
    plates: frozenset[str]


class row_noise(Messenger):
    """Give latent sites inside the class plate a key of their own for the first row it holds."""

    def __init__(
        self, fn: Callable[..., Any], plate: str, row: ArrayLike, noise: InnerNoise | None
    ) -> None:
        self.plate = plate
        self.row = row
        self.noise = noise
        super().__init__(fn)

    def __enter__(self) -> None:
        self.num_inner = 0
        super().__enter__()

    def process_message(self, msg: Site) -> None:
        """Change the key of a draw."""
        key = msg["kwargs"].get("rng_key") if msg["type"] == "sample" else None
        if key is None:
            return
        plates = plates_of(msg)
        if self.noise is not None and plates & self.noise.plates:
            key = jax.random.fold_in(apart_from_sites(self.noise.key), self.num_inner)
            self.num_inner += 1
        if self.plate in plates:
            key = jax.random.fold_in(key, self.row)
        msg["kwargs"]["rng_key"] = key
