# SPDX-License-Identifier: Apache-2.0
"""Lists of different lengths as one array."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from numpyro_largecat._checks import check_count, check_in_range, check_integers, check_shape


def padded_lists(owners: ArrayLike, ids: ArrayLike, num_owners: int) -> NDArray[np.integer]:
    """Collect the ids of each owner, such as the items of each user, in rows padded with -1.

    So histories are read, and classes left out of ``top_classes``. The ids of an owner keep their
    order; take ``[:, -20:]`` of ids sorted by time, and their padding comes first.

    Shapes: ``owners`` (N,) and ``ids`` (N,) to (num_owners, R) for at most R ids of an owner.

    Cost: O(N log N + num_owners R). One owner with far more ids than the others costs much.

    Args:
        owners: Who has each id, integers in [0, num_owners).
        ids: Integers, 0 or above.
        num_owners: Number of owners.

    Raises:
        TypeError: If owners or ids are not integers.
        ValueError: If their shapes differ, or one is out of range.

    Example:
        >>> from numpyro_largecat.data import padded_lists
        >>> padded_lists([2, 0, 2], [7, 5, 3], num_owners=3).tolist()
        [[-1, 5], [-1, -1], [7, 3]]
    """
    num_owners = check_count("num_owners", num_owners, 1)
    check_integers("owners", owners)
    check_integers("ids", ids)
    check_shape("`owners`", owners, ("N",), "the owner of each id")
    check_shape("`ids`", ids, np.shape(owners), "an id for each of the owners")
    check_in_range("`owners`", owners, num_owners, "owners")
    own, values = np.asarray(owners), np.asarray(ids)
    values = values.astype(np.int64) if values.dtype.kind == "u" else values  # to hold -1
    check_in_range("`ids`", values, int(values.max(initial=0)) + 1, "ids")
    order = np.argsort(own, kind="stable")
    own, values = own[order], values[order]
    counts = np.bincount(own, minlength=num_owners)
    longest = int(counts.max())
    place = np.arange(len(own)) - (np.cumsum(counts) - counts)[own]
    lists = np.full((num_owners, longest), -1, values.dtype)
    lists[own, longest - counts[own] + place] = values
    return lists
