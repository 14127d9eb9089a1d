# SPDX-License-Identifier: Apache-2.0
"""Discrete sites that are marked to be enumerated, and their values."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array

from numpyro_largecat.handlers.sites import is_latent, unmasked, without_expand


def is_marked(site: dict[str, Any]) -> bool:
    """Whether a message, or a site of a trace, is a latent site that is to be enumerated."""
    return is_latent(site) and site["infer"].get("enumerate") == "parallel"


def first_value(site: dict[str, Any]) -> Array:
    """First value of a discrete site, at every place of its batch."""
    return jnp.broadcast_to(support_of(site)[0], site["fn"].batch_shape)


def support_of(site: dict[str, Any]) -> Array:
    """All values of a discrete site, shape (K,)."""
    fn, name = site["fn"], site["name"]
    if fn.event_shape:
        raise NotImplementedError(
            f"site '{name}' is marked to be enumerated, and one event of it has shape "
            f"{fn.event_shape}. Put it into a plate instead of `to_event`."
        )
    fn = without_expand(unmasked(fn)[0])
    if not fn.has_enumerate_support:
        kind = type(fn).__name__
        raise NotImplementedError(
            f"site '{name}' is marked to be enumerated; {kind} has no finite list of values."
        )
    return jnp.asarray(fn.enumerate_support(expand=False)).reshape(-1)
