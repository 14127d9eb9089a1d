# SPDX-License-Identifier: Apache-2.0
"""Rows of a plate that are all different, to see what depends on which of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array
from numpyro.distributions.transforms import biject_to
from numpyro.primitives import Messenger

from numpyro_largecat.handlers.sites import is_latent, param_options

ABOVE, BELOW = 24.0, -15.0  # all other rows; of other size, and exponentials do not overflow
PRIME = 65521  # the largest below 2**16, so that squares fit in 32 bits


class distinct_rows(Messenger):
    """Give parameters and latent values in a plate other rows, by their ids and all different.

    Rows that nothing has touched are alike, and would hide which of them a value depends on.
    Values are within their support: its free coordinates are of the order of 1; with ``size``, the
    rows of a chunk, but ``ABOVE`` for row 0 and ``BELOW`` for row ``size``, the one after the first
    chunk. The handler must be the first around model or guide, to see the rows that others have
    taken.
    """

    def __init__(self, fn: Callable[..., Any], plate: str, size: int | None = None) -> None:
        self.plate = plate
        self.size = size
        super().__init__(fn)

    def __enter__(self) -> None:
        self.num_sites = 0
        self.ids = jnp.zeros(0, jnp.int32)  # of the rows of the plate, once it is open
        self.before: dict[str, Array] = {}  # rows of latent sites as they were, (size, ...)
        self.event_dims: dict[str, int | None] = {}
        super().__enter__()

    def process_message(self, msg: dict[str, Any]) -> None:
        """Remember how many axes a row of a parameter has, which handlers that slice forget."""
        if msg["type"] == "param":
            self.event_dims[msg["name"]] = param_options(msg).event_dim

    def postprocess_message(self, msg: dict[str, Any]) -> None:
        """Replace the value of a site."""
        if msg["type"] == "plate" and msg["name"] == self.plate:
            self.ids = msg["value"]
            return
        if is_latent(msg):
            event_dim, support = msg["fn"].event_dim, msg["fn"].support
        elif msg["type"] == "param":
            event_dim = self.event_dims[msg["name"]]
            support = param_options(msg).constraint
        else:
            return
        if event_dim is None or support.is_discrete:
            return
        for frame in msg["cond_indep_stack"]:
            if frame.name == self.plate:
                axis, value = frame.dim - event_dim, msg["value"]
                if is_latent(msg) and jnp.shape(value)[axis:][:1] == self.ids.shape:
                    self.before[msg["name"]] = jnp.moveaxis(value, axis, 0)[: self.size]
                msg["value"] = self._rows(value, axis, biject_to(support))

    def _rows(self, value: Any, axis: int, transform: Any) -> Any:
        shape = jnp.shape(value)
        if len(shape) < -axis or shape[axis] != self.ids.shape[0]:
            return value  # shared by the rows
        if not jnp.issubdtype(jnp.result_type(value), jnp.floating):
            return value
        free = jnp.moveaxis(transform.inv(value), len(shape) + axis, 0)
        self.num_sites += 1
        new = self._values(free.shape[1:], self.num_sites).astype(free.dtype)
        return transform(jnp.moveaxis(new, 0, len(shape) + axis))

    def _values(self, shape: tuple[int, ...], site: int) -> Array:
        """Numbers in [-1.7, 1.7), by a quadratic hash: random keys take long to compile."""
        column = jnp.arange(math.prod(shape), dtype=jnp.uint32).reshape(shape)
        row = self.ids.astype(jnp.uint32).reshape(-1, *[1] * len(shape))
        mixed = (977 * row + 613 * column + 331 * site + 1) % PRIME
        values = 3.4 * ((mixed * mixed) % PRIME) / PRIME - 1.7
        if self.size is None:
            return values
        ends = [jnp.array(ABOVE), jnp.array(BELOW)]
        return jnp.select([row == 0, row == self.size], ends, values)
