# SPDX-License-Identifier: Apache-2.0
"""Which priors of a model are learned: those that other latent values or parameters move."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from numpyro.handlers import block
from numpyro.primitives import Messenger

from numpyro_largecat.handlers.internals import eval_provenance
from numpyro_largecat.handlers.run_model import sites_of
from numpyro_largecat.handlers.sites import Site, is_latent


class _add(Messenger):
    """Add a number to all parameters and latent values, so that what depends on them shows it."""

    def __init__(self, fn: Callable[..., Any], number: Array) -> None:
        self.number = number
        super().__init__(fn)

    def postprocess_message(self, msg: Site) -> None:
        if msg["type"] == "param" or is_latent(msg):
            msg["value"] = jax.tree.map(self._sum, msg["value"])

    def _sum(self, value: Any) -> Any:
        if not jnp.issubdtype(jnp.result_type(value), jnp.inexact):
            return value
        return value + self.number.astype(jnp.result_type(value))


def learned_parts(
    model: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    parts_of: Callable[[dict[str, Site]], Any],
) -> Any:
    """Which parts of the sites of a model depend on latent values or parameters of others.

    Cost: one trace of the model; nothing is computed, and no handler around sees it.

    Args:
        model: The model.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        parts_of: Function of the sites of a run, that returns a tree of arrays.

    Returns:
        That tree, with a bool in the place of each array.
    """

    def parts(number: Array) -> Any:
        return parts_of(sites_of(_add(model, number), args, kwargs))

    with block():
        found = eval_provenance(parts, number=jnp.zeros(()))
    return jax.tree.map(bool, found, is_leaf=lambda x: isinstance(x, frozenset))
