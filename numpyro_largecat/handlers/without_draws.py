# SPDX-License-Identifier: Apache-2.0
"""Run models and guides at latent values that need no random draw."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array
from numpyro.distributions.transforms import biject_to
from numpyro.handlers import substitute
from numpyro.infer.util import helpful_support_errors


def at_feasible_values(fn: Any) -> substitute:
    """Run ``fn`` with the image of zero at continuous latent sites, without drawing anything.

    This also serves for improper priors, which cannot be drawn from.
    """

    def feasible(msg: dict[str, Any]) -> Any:
        if msg["type"] != "sample" or msg["is_observed"] or msg["fn"].support.is_discrete:
            return None
        with helpful_support_errors(msg):
            transform = biject_to(msg["fn"].support)
        shape = msg["fn"].shape(msg["kwargs"].get("sample_shape", ()))
        return transform(jnp.zeros(transform.inverse_shape(shape)))

    return substitute(fn, substitute_fn=feasible)


def at_centre(guide: Callable[..., Any]) -> substitute:
    """Run a guide with each latent site at the centre of its distribution.

    The centre is the mean or, of a transformed distribution, the transformed mean.

    Raises:
        NotImplementedError: If a distribution has no mean, or is discrete.
    """

    def centre(msg: dict[str, Any]) -> Any:
        if msg["type"] != "sample" or msg["is_observed"]:
            return None
        if msg["fn"].support.is_discrete:
            raise NotImplementedError(f"site '{msg['name']}' is discrete and has no centre.")
        return _centre(msg["fn"])

    return substitute(guide, substitute_fn=centre)


def _centre(fn: Any) -> Array:
    if isinstance(fn, dist.TransformedDistribution):
        value = _centre(fn.base_dist)
        for transform in fn.transforms:
            value = transform(value)
        return value
    if isinstance(fn, dist.ExpandedDistribution):
        return jnp.broadcast_to(_centre(fn.base_dist), fn.batch_shape + fn.event_shape)
    if isinstance(fn, (dist.Independent, dist.MaskedDistribution)):
        return _centre(fn.base_dist)
    return fn.mean
