# SPDX-License-Identifier: Apache-2.0
"""The scorer of recommendations, and the reader of who took what."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from benchmarks import two_sided_quality as quality
from benchmarks.readers.interactions import Interactions, read_interactions


def test_interactions_are_read_as_pairs(tmp_path: Path) -> None:
    """Plain or compressed; a user may have no item."""
    text = b"0 5 7\n2\n1 5\n"
    plain, packed = tmp_path / "a.txt", tmp_path / "a.gz"
    plain.write_bytes(text)
    packed.write_bytes(gzip.compress(text))
    for path in (plain, packed):
        pairs = read_interactions(path)
        assert pairs.users.tolist() == [0, 0, 1] and pairs.items.tolist() == [5, 7, 5]


@pytest.mark.parametrize("bad", [b"0 -1", b"0 1.5", b"a 1", b"0 99999999999"])
def test_what_is_no_number_is_refused(tmp_path: Path, bad: bytes) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"0 1\n" + bad + b"\n")
    with pytest.raises(ValueError, match="line 2: need whole numbers from 0 on"):
        read_interactions(path)


def test_scores_are_those_of_a_loop() -> None:
    """Over users one by one: items that a user has are not recommended."""
    rng = np.random.default_rng(0)
    pairs = np.unique(rng.integers(0, [40, 60], (600, 2)), axis=0)
    parts = rng.permutation(len(pairs)) < 400
    train, scored = (Interactions(*pairs[part].T.astype(np.int32)) for part in (parts, ~parts))
    problem = quality.Problem(train, scored, 40, 60)
    tables = quality.Tables(*(rng.normal(size=shape) for shape in ((40, 3), (60, 3), (60,))))
    log_probs, recalls = [], []
    for user in range(40):
        wanted = scored.items[scored.users == user]
        psi = tables.w @ tables.v[user] + tables.b
        log_probs += list(psi[wanted] - np.log(np.exp(psi).sum()))
        psi[train.items[train.users == user]] = -np.inf
        if len(wanted):
            recalls.append(np.isin(wanted, np.argsort(-psi)[:20]).mean())
    scores = quality.score_tables(tables, problem)
    assert scores.log_likelihood == pytest.approx(np.mean(log_probs))
    assert scores.recall == pytest.approx(np.mean(recalls))
    assert scores.recall_error == pytest.approx(np.std(recalls) / np.sqrt(len(recalls)))
