# SPDX-License-Identifier: Apache-2.0
"""Rows of a plate that are all different, to see what depends on which of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray
from numpyro.distributions.transforms import biject_to
from numpyro.primitives import Messenger

from numpyro_largecat.handlers.plate_facts import rows_request
from numpyro_largecat.handlers.sites import is_latent, param_options

ABOVE, BELOW = 24.0, -15.0  # all other rows; of other size, and exponentials do not overflow
PRIME = 65521  # the largest below 2**16, so that squares fit in 32 bits


class distinct_rows(Messenger):
    """Give parameters and latent values in some plates other rows, by their ids and all different.

    Rows that nothing has touched are alike, and would hide which of them a value depends on.
    Values are within their support: its free coordinates are of the order of 1, but ``ABOVE`` and
    ``BELOW`` for a few rows. The handler must be the first around model or guide, to see the rows
    that others have taken.

    Args:
        fn: Model or guide.
        plates: Names of the plates, None for all. Of a site that is in several each pair of rows
            has its own.
        size: How many rows are remembered as they were; None for all.
        ends: Of plates, by name, rows that are far above all others, and rows far below.
        dense_too: Whether latent sites outside of the plates have other values too, as where
            nothing is fitted and many would be 0.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        plates: Sequence[str] | None,
        *,
        size: int | None = None,
        ends: Mapping[str, tuple[NDArray[np.integer], NDArray[np.integer]]] = {},
        dense_too: bool = False,
    ) -> None:
        self.plates = plates
        self.size = size
        self.ends = ends
        self.dense_too = dense_too
        super().__init__(fn)

    def __enter__(self) -> None:
        self.num_sites = 0
        self.ids: dict[str, Array] = {}  # of the rows of each plate that is open
        self.before: dict[str, Array] = {}  # rows of latent sites as they were, (size, ...)
        self.event_dims: dict[str, int | None] = {}
        super().__enter__()

    def process_message(self, msg: dict[str, Any]) -> None:
        """Remember how many axes a row of a parameter has, which handlers that slice forget."""
        if msg["type"] == "param":
            self.event_dims[msg["name"]] = param_options(msg).event_dim

    def postprocess_message(self, msg: dict[str, Any]) -> None:
        """Replace the value of a site."""
        if msg["type"] == "plate" and rows_request(msg) is None:
            if self.plates is None or msg["name"] in self.plates:
                self.ids[msg["name"]] = msg["value"]
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
        rows, shape = {}, jnp.shape(msg["value"])
        for frame in msg["cond_indep_stack"]:
            axis = len(shape) + frame.dim - event_dim
            if frame.name in self.ids and axis >= 0:
                if shape[axis] == len(self.ids[frame.name]):  # else rows share it
                    rows[axis] = frame.name
        if not rows and not (self.dense_too and is_latent(msg)):
            return
        if not jnp.issubdtype(jnp.result_type(msg["value"]), jnp.floating):
            return
        if rows and is_latent(msg):
            self.before[msg["name"]] = jnp.moveaxis(msg["value"], min(rows), 0)[: self.size]
        transform = biject_to(support)
        free = transform.inv(msg["value"])
        self.num_sites += 1
        new = self._values(jnp.shape(free), rows, self.num_sites)
        msg["value"] = transform(new.astype(free.dtype))

    def _values(self, shape: tuple[int, ...], rows: dict[int, str], site: int) -> Array:
        """Numbers that follow the rows, which are those of the plates along some axes."""
        others = [1 if axis in rows else size for axis, size in enumerate(shape)]
        mixed = 613 * jnp.arange(math.prod(others), dtype=jnp.uint32).reshape(others)
        mixed = mixed + np.uint32(331 * site + 1)
        along = {}
        for place, (axis, plate) in enumerate(rows.items()):
            axes = [i for i in range(len(shape)) if i != axis]
            along[plate] = jnp.expand_dims(self.ids[plate], axes)
            mixed = mixed + np.uint32(977 + 174 * place) * along[plate].astype(jnp.uint32)
        values = scattered(mixed)
        for plate in along.keys() & self.ends.keys():
            ends = self.ends[plate]
            is_end = [(along[plate][..., None] == ids).any(axis=-1) for ids in ends]
            values = jnp.select(is_end, [jnp.array(ABOVE), jnp.array(BELOW)], values)
        return jnp.broadcast_to(values, shape)


def scattered(integers: Array) -> Array:
    """Numbers in [-1.7, 1.7), by a quadratic hash: random keys take long to compile."""
    mixed = integers.astype(jnp.uint32) % np.uint32(PRIME)
    return 3.4 * ((mixed * mixed) % np.uint32(PRIME)) / PRIME - 1.7
