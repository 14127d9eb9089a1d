# SPDX-License-Identifier: Apache-2.0
"""Which parameters and latent values of a model move what, such as the prior of another site."""

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
from numpyro_largecat.handlers.sites import Site, Sites, is_latent
from numpyro_largecat.handlers.static_result import static_result


def _is_moved(site: Site) -> bool:
    return site["type"] == "param" or is_latent(site)


class _add(Messenger):
    """Add a number to each parameter and latent value, so that what depends on it shows it."""

    def __init__(self, fn: Callable[..., Any], numbers: Mapping[str, Array]) -> None:
        self.numbers = numbers
        super().__init__(fn)

    def postprocess_message(self, msg: Site) -> None:
        if _is_moved(msg):
            number = self.numbers[msg["name"]]
            msg["value"] = jax.tree.map(lambda value: _sum(value, number), msg["value"])


def _sum(value: Any, number: Array) -> Any:
    if not jnp.issubdtype(jnp.result_type(value), jnp.inexact):
        return value
    return value + number.astype(jnp.result_type(value))


def what_moves(
    model: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    parts_of: Callable[[Sites], Any],
) -> Any:
    """Which parameters and latent values of a model move parts of its sites.

    Cost: two traces of the model; nothing is computed, and no handler around sees them.

    Args:
        model: The model.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        parts_of: Function of the sites of a run, that returns a tree of arrays.

    Returns:
        That tree, with a set of names in the place of each array.
    """

    def names() -> list[str]:
        return [name for name, site in sites_of(model, args, kwargs).items() if _is_moved(site)]

    def parts(**numbers: Array) -> Any:
        return parts_of(sites_of(_add(model, numbers), args, kwargs))

    with block():
        return eval_provenance(parts, **{name: jnp.zeros(()) for name in static_result(names)})
