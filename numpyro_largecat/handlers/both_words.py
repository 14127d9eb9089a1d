# SPDX-License-Identifier: Apache-2.0
"""Noise of latent sites that takes half of the random bits' cost."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array
from numpyro.primitives import Messenger

from numpyro_largecat.handlers.internals import outermost
from numpyro_largecat.handlers.sites import Site, is_latent
from numpyro_largecat.ops.unrolled_threefry import unrolled_threefry

NORMALS = dist.Normal, dist.MultivariateNormal, dist.LowRankMultivariateNormal


class _BothWords(Messenger):
    """Draw the latent sites that no other handler has given a value, when all have seen them."""

    def process_message(self, msg: Site) -> None:
        """Draw the site, as NumPyro would do next."""
        if msg["value"] is None and is_latent(msg):
            kwargs = dict(msg["kwargs"])
            if _is_of_normals(msg["fn"]) and _is_threefry(kwargs["rng_key"]):
                data = jax.random.key_data(kwargs["rng_key"])
                kwargs["rng_key"] = jax.random.wrap_key_data(data, impl=unrolled_threefry)
            with jax.threefry_partitionable(False):
                msg["value"], msg["intermediates"] = msg["fn"](
                    *msg["args"], sample_intermediates=True, **kwargs
                )


def _is_of_normals(fn: Any) -> bool:
    """Whether a site is made of NumPyro's own normals; other samplers may need JAX's own keys."""
    while type(fn) not in NORMALS and hasattr(fn, "base_dist"):
        fn = fn.base_dist
    return type(fn) in NORMALS


def _is_threefry(key: Array | None) -> bool:
    """Whether it is a typed key of JAX's own Threefry."""
    if key is None or not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        return False
    return str(jax.random.key_impl(key)) == "threefry2x32"


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
