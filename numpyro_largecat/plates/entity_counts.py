# SPDX-License-Identifier: Apache-2.0
"""How often each entity is read by the observations of the whole data."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from numpyro_largecat._checks import check_count, check_ids_or_none, check_integers, is_concrete
from numpyro_largecat._conversions import LARGEST_ID, NO_ID


@partial(jax.tree_util.register_dataclass, data_fields=("counts",), meta_fields=("num_ids",))
@dataclass(frozen=True)
class EntityCounts:
    """How often each of U entities is read by the observations of the whole data.

    ``lc.entity_plate`` needs it to count the prior of each entity once, however often it occurs.
    Make it from all ids, once, before a fit: ``lc.EntityCounts.of(size, users)``.

    Attributes:
        counts: How often each entity is read, shape (U,), int32.
        num_ids: Number of ids of the whole data, those that are -1 too.

    Example:
        >>> import numpy as np
        >>> import numpyro_largecat as lc
        >>> lc.EntityCounts.of(4, np.array([2, 0, 2])).counts.tolist()
        [1, 0, 2, 0]
    """

    counts: Array
    num_ids: int

    @classmethod
    def of(cls, size: int, *ids: ArrayLike) -> EntityCounts:
        """Count the ids of all observations.

        Cost: O(U + number of ids), once.

        Args:
            size: Number of entities U.
            ids: The arrays of ids by which a model reads entities, each with one row for each
                observation: users, say, and the last 20 users of an item. Integers in [0, U), or
                -1 where an observation reads none.

        Raises:
            ValueError: If an id is out of range, or there are none.
            TypeError: If ids are not integers, or traced.
        """
        size = check_count("size", size, 1)
        if not ids:
            raise ValueError("`ids` must be the ids of all observations; got no array.")
        counts = np.zeros(size, np.int64)
        for given in ids:
            counts += np.bincount(_known_ids(given, size), minlength=size)
        if counts.max(initial=0) > LARGEST_ID:
            raise ValueError(f"an entity may be read {LARGEST_ID} times; got {counts.max()}.")
        with jax.ensure_compile_time_eval():
            return cls(jnp.asarray(counts, jnp.int32), sum(np.size(given) for given in ids))

    def __repr__(self) -> str:
        """Show sizes, not the table."""
        return f"EntityCounts(<{np.shape(self.counts)[0]} entities>, num_ids={self.num_ids})"


def _known_ids(ids: ArrayLike, size: int) -> np.ndarray:
    """The ids that are entities, as one axis."""
    if not is_concrete(ids):
        raise TypeError("`ids` must be known outside of `jit`: count them once, before the fit.")
    check_integers("ids", ids)
    check_ids_or_none("`ids`", ids, size, "entities")
    own = np.asarray(ids)
    return own[own != NO_ID].ravel()
