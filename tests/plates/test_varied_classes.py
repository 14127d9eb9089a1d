# SPDX-License-Identifier: Apache-2.0
"""Sets of classes that share some."""

from __future__ import annotations

import numpy as np
import pytest

from numpyro_largecat.plates.varied_classes import FIRST, MOVED, OTHERS, VariedClasses

SIZES = [(2, 2), (3, 2), (4, 9), (5, 4), (7, 6), (40, 30), (10**7, 512)]


@pytest.mark.parametrize(("num_categories", "size"), SIZES)
def test_sets_are_distinct_classes_that_share_some_places(num_categories, size):
    varied = VariedClasses.of(num_categories, size)
    ids = varied.runs.ids
    assert ids.shape[1] <= max(size, 2) and (ids >= 0).all() and (ids < num_categories).all()
    for own in ids:
        assert len(set(own.tolist())) == len(own)
    assert (ids[MOVED][varied.order] == ids[FIRST]).all()
    assert (ids[MOVED] != ids[FIRST]).all()
    assert varied.shared.any()
    assert (ids[OTHERS:, varied.shared] == ids[FIRST, varied.shared]).all()


ACROSS = {
    "sum": lambda b: b - b.mean(),
    "greatest": lambda b: b - b.max(),
    "least": lambda b: b - b.min(),
    "rank": lambda b: b.argsort().argsort() + 0.0,
    "first": lambda b: np.where(np.arange(len(b)) == 0, 0.0, b),
    "last": lambda b: np.where(np.arange(len(b)) == len(b) - 1, 0.0, b),
    "none": lambda b: b**2,
}


@pytest.mark.parametrize("across", ACROSS)
@pytest.mark.parametrize(("num_categories", "size"), [s for s in SIZES if s[0] > 2])
def test_what_follows_other_classes_differs(across, num_categories, size):
    varied = VariedClasses.of(num_categories, size)
    rows = np.random.default_rng(1).normal(size=10_000)

    def value(ids):
        above, below = (np.isin(ids, end) for end in varied.ends)
        return np.where(above, 24.0, np.where(below, -15.0, rows[ids % 10_000]))

    seen = np.stack([ACROSS[across](value(ids)) for ids in varied.runs.ids])
    assert bool(varied.differing(seen).any()) == (across != "none")
