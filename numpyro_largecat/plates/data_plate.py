# SPDX-License-Identifier: Apache-2.0
"""Plate over the rows of the data, of which a step holds a minibatch."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax.typing import ArrayLike

from numpyro_largecat._checks import check_count
from numpyro_largecat.handlers.plate_facts import PlateFacts, ask_for_rows
from numpyro_largecat.handlers.sites import is_continuous_latent, scale_of
from numpyro_largecat.plates.indexed_plate import indexed_plate, refuse_chain
from numpyro_largecat.plates.row_subset import RowSubset, check_row_ids, has_repeats


class data_plate(indexed_plate):
    """Plate over the N rows of the data, whose minibatch carries its true row ids.

    NumPyro's ``plate(name, N, subsample_size=B)`` draws random ids of its own. That is right for
    the scale N / B of the likelihood, but a model which is fed minibatches from outside would keep
    per-observation state, such as the local variable of ``sample_choice``, under ids that are not
    those of its rows. This plate takes the ids from the user.

    Shapes: with ``rows`` of shape (B,) the plate has B rows and log densities inside it are scaled
    by N / B.

    **Repeated ids** are allowed around what is observed: gradients of what is kept per row add up.
    Around a latent site, such as a value of each user read by the users of the minibatch, its prior
    and KL terms would count once for each time that its id occurs: ``SubsampledSVI`` refuses that,
    and elsewhere the log density is NaN. (So draw minibatches of rows with latent values without
    replacement.) A site that is read by ids which repeat belongs in an ``entity_plate``.

    Cost: O(B).

    Args:
        name: Name of the plate.
        size: Number of rows N of the whole data, a Python int in [1, 2**31).
        rows: Ids of the minibatch's rows, integers in [0, N), shape (B,). None for all N rows in
            order.
        dim: Batch dimension of the plate, negative; the rightmost free one by default.

    Raises:
        TypeError: If ``rows`` are not integers.
        ValueError: If ``rows`` has not one axis or holds an id out of range (under ``jit``, where
            ids are not known, log densities are then NaN), or if the guide opened a plate of the
            same name that holds other rows; or in HMC and NUTS, if it holds some of the rows.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_largecat as lc
        >>> with lc.data_plate("data", 1000, rows=jnp.array([17, 4, 256])) as rows:
        ...     print(rows.indices)
        [ 17   4 256]
    """

    def __init__(
        self, name: str, size: int, rows: ArrayLike | None = None, *, dim: int | None = None
    ) -> None:
        size = check_count("size", size, 1)
        if rows is None:
            ids = jnp.arange(size, dtype=jnp.int32)
            reply = ask_for_rows(name, size, ids, source="all rows")
        else:
            ids = check_row_ids(name, rows, size)
            reply = ask_for_rows(name, size, ids, source="given rows")
        is_chosen = reply.request.is_chosen
        facts = PlateFacts(
            "data",
            is_full=rows is None and not is_chosen,
            is_distinct=is_chosen,
            row_ids=None if rows is None else reply.value,
        )
        super().__init__(name, size, reply.value, dim, is_shared=reply.is_shared, facts=facts)
        self.rows = RowSubset(reply.value, reply.plate, size, self.dim)
        self._is_read = reply.request.is_read

    def process_message(self, msg: dict[str, Any]) -> None:
        """Make the log density of a site NaN if ids are wrong for it."""
        super().process_message(msg)
        if msg["type"] != "sample" or self._is_full:
            return
        if self.subsample_size != self.size:
            refuse_chain(self.name, f"{self.subsample_size} of {self.size} rows")
        valid = ((self._indices >= 0) & (self._indices < self.size)).all()
        if not self._is_read and is_continuous_latent(msg):
            valid &= ~has_repeats(self._indices)
        msg["scale"] = jnp.where(valid, scale_of(msg), jnp.nan)

    def __enter__(self) -> RowSubset:
        """Open the plate and return its ``RowSubset``."""
        super().__enter__()
        return self.rows
