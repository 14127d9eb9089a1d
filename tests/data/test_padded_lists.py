# SPDX-License-Identifier: Apache-2.0
"""Lists of different lengths as one array."""

from __future__ import annotations

import numpy as np
import pytest

from numpyro_largecat.data import padded_lists


def test_each_owner_has_its_ids_in_order() -> None:
    """Padded before, so that the last columns are the last ids."""
    rng = np.random.default_rng(0)
    owners, ids = rng.integers(0, 6, 40), rng.integers(0, 1000, 40)
    lists = padded_lists(owners, ids, 7)
    for owner in range(7):
        own = ids[owners == owner]
        assert lists[owner].tolist() == [-1] * (lists.shape[1] - len(own)) + own.tolist()
    assert lists.shape[1] == np.bincount(owners).max()


def test_there_may_be_no_ids() -> None:
    assert padded_lists(np.zeros(0, int), np.zeros(0, int), 2).shape == (2, 0)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint32, np.uint64])
def test_ids_without_a_sign_are_padded_as_others(dtype) -> None:
    lists = padded_lists([0, 1, 1], np.array([7, 3, 5], dtype), 2)
    assert lists.tolist() == [[-1, 7], [3, 5]]


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        (
            ([0, 3], [1, 1], 3),
            ValueError,
            r"`owners` must be owners.*\[0, 3\).*got 3 at position 1",
        ),
        (([0, 1], [1, -1], 3), ValueError, "`ids` must be ids.*got -1 at position 1"),
        (([0, 1], [1], 3), ValueError, "`ids` must.*an id for each"),
        (([0, 1], [1.0, 2.0], 3), TypeError, "`ids` must be integers"),
        (([0, 1], [[1], [1, 2]], 3), ValueError, "`ids` must be an array, of rows of one length"),
    ],
)
def test_what_is_refused(arguments, error, message) -> None:
    with pytest.raises(error, match=message):
        padded_lists(*arguments)
