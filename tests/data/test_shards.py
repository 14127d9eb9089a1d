# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import numpy as np
import pytest

from numpyro_largecat.data import Shards

PARTS = [np.arange(6).reshape(3, 2), np.zeros((0, 2), int), np.arange(6, 14).reshape(4, 2)]


@pytest.mark.parametrize("rows", [[], [0], [2, 3], [0, 1, 2, 3, 4, 5, 6], [6], [1, 5]])
def test_rows_are_those_of_the_whole(rows) -> None:
    whole = np.concatenate(PARTS)
    np.testing.assert_array_equal(Shards(PARTS)[np.array(rows, int)], whole[rows])
    assert len(Shards(PARTS)) == len(whole)


@pytest.mark.parametrize(
    ("parts", "match"),
    [
        ([], "at least one array"),
        ([np.zeros((2, 3)), np.zeros((2, 4))], "shard 1"),
        ([np.zeros(2), np.zeros(2, np.float32)], "shard 1 must have dtype float64; got float32"),
    ],
)
def test_arrays_that_do_not_go_together_are_refused(parts, match) -> None:
    with pytest.raises(ValueError, match=match):
        Shards(parts)
