# SPDX-License-Identifier: Apache-2.0
"""Noise of latent sites that takes half of the random bits' cost."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from numpyro.primitives import Messenger

from numpyro_largecat.handlers.internals import outermost
from numpyro_largecat.handlers.sites import Site, is_latent
from numpyro_largecat.ops.unrolled_threefry import unrolled_threefry


class _BothWords(Messenger):
    """Change the key of latent sites that no other handler has given a value, when all saw them."""

    def process_message(self, msg: Site) -> None:
        """Have the site drawn, as NumPyro does next, by the same cipher in fewer operations."""
        if msg["value"] is None and is_latent(msg):
            msg["kwargs"]["rng_key"] = _by_both_words(msg["kwargs"]["rng_key"])


def _by_both_words(key: Array | None) -> Array | None:
    """A key of Threefry that gives both words of each block; any other key as it is."""
    if key is None or str(jax.random.key_impl(_typed(key))) != "threefry2x32":
        return key
    return jax.random.wrap_key_data(jax.random.key_data(_typed(key)), impl=unrolled_threefry)


def _typed(key: Array) -> Array:
    is_typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    return key if is_typed else jax.random.wrap_key_data(key)


def draw_by_both_words(guide: Callable[..., Any]) -> Callable[..., Any]:
    """Let the latent sites of a guide take both words of each block of Threefry.

    JAX takes one word a block, the exclusive or of both, so that the bits of an array that is
    spread over devices need no exchange. What a step draws has the size of the touched rows, which
    no device shares out: there the other way costs half. All else that a guide draws, by keys of
    its own, stays as it is, and so does all that a model draws: that may be constants, which are
    the same in a step as outside of it.
    """

    @wraps(guide)
    def drawing(*args: Any, **kwargs: Any) -> Any:
        with outermost(_BothWords()):
            return guide(*args, **kwargs)

    return drawing
