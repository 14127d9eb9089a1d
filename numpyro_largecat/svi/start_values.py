# SPDX-License-Identifier: Apache-2.0
"""Values that parameters are told to start at, in place of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from numpyro.handlers import block, seed
from numpyro.primitives import Messenger

from numpyro_largecat.handlers.sites import Site


class check_start_values(Messenger):
    """Refuse values of other shapes than a parameter's own, which might broadcast, and of integers.

    One row in the place of a table would make all rows one.

    Raises:
        ValueError: If a shape is another.
        TypeError: If a value is not of floats where the parameter's own is.
    """

    def __init__(self, fn: Callable[..., Any], given: Mapping[str, Any]) -> None:
        self._given = given
        super().__init__(fn)

    def process_message(self, msg: Site) -> None:
        """Compare what is given with what the statement itself starts at."""
        if msg["type"] != "param" or msg["name"] not in self._given:
            return
        own, given = _own(msg), self._given[msg["name"]]
        wanted, got = (jax.tree.map(jnp.shape, x) for x in (own, given))
        if wanted != got:
            raise ValueError(
                f"`init_params` must have param '{msg['name']}' in its own shape, {wanted}; got "
                f"{got}."
            )
        for mine, other in zip(jax.tree.leaves(own), jax.tree.leaves(given), strict=True):
            types = jnp.result_type(mine), jnp.result_type(other)
            if jnp.issubdtype(types[0], jnp.inexact) and not jnp.issubdtype(types[1], jnp.inexact):
                raise TypeError(
                    f"`init_params` must have floats for param '{msg['name']}'; got {types[1]}."
                )


def _own(msg: Site) -> Any:
    """What a statement starts at; in shapes where it is made by a key, which no handler sees."""
    if msg["args"] and not callable(msg["args"][0]):
        return msg["args"][0]
    with block(), seed(rng_seed=0):
        return jax.eval_shape(lambda: msg["fn"](*msg["args"]))
