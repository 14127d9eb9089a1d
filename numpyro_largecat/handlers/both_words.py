# SPDX-License-Identifier: Apache-2.0
"""Noise of latent sites that takes half of the random bits' cost."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import jax
from numpyro.primitives import Messenger

from numpyro_largecat.handlers.internals import outermost
from numpyro_largecat.handlers.sites import Site, is_latent


class _BothWords(Messenger):
    """Draw the latent sites that no other handler has given a value, when all have seen them."""

    def process_message(self, msg: Site) -> None:
        """Draw the site, as NumPyro would do next."""
        if msg["value"] is None and is_latent(msg):
            with jax.threefry_partitionable(False):
                msg["value"], msg["intermediates"] = msg["fn"](
                    *msg["args"], sample_intermediates=True, **msg["kwargs"]
                )


def draw_by_both_words(guide: Callable[..., Any]) -> Callable[..., Any]:
    """Let the latent sites of a guide take both words of each block of Threefry.

    JAX takes one word a block, the exclusive or of both, so that the bits of an array that is
    spread over devices need no exchange. What a step draws has the size of the touched rows, which
    no device shares out: there the other way costs half, a tenth of a step. All else that a guide
    draws, by keys of its own, stays as it is, and so does all that a model draws: that may be
    constants, which are the same in a step as outside of it.
    """

    @wraps(guide)
    def drawing(*args: Any, **kwargs: Any) -> Any:
        with outermost(_BothWords()):
            return guide(*args, **kwargs)

    return drawing
