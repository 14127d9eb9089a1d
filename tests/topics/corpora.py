# SPDX-License-Identifier: Apache-2.0
"""A corpus of six topics, and fits of it without a progress bar."""

from __future__ import annotations

import itertools
from functools import cache, partial

import jax
import numpy as np
import pytest

import numpyro_largecat as lc
from numpyro_largecat.data import Corpus
from numpyro_largecat.topics import topic_table

V, K = 60, 6
WORDS = tuple(f"w{i}" for i in range(V))


def topic_corpus(num_documents=150, seed=0):
    """Documents of six topics with ten words each; a tenth of the tokens is noise."""
    rng = np.random.default_rng(seed)
    documents = []
    for _ in range(num_documents):
        frequencies = 0.9 * np.repeat(rng.dirichlet(np.full(K, 0.1)), V // K) / 10 + 0.1 / V
        tokens = rng.choice(V, size=rng.integers(20, 40), p=frequencies / frequencies.sum())
        documents.append([WORDS[t] for t in tokens])
    return Corpus.from_documents(documents, WORDS)


def fail_at(monkeypatch, stop: int) -> None:
    """Let that addition to the table fail, counted from 0, as if the disk were gone."""
    add, number = topic_table._add, itertools.count()

    def fails(*arguments):
        if next(number) == stop:
            raise OSError("the disk is gone")
        return add(*arguments)

    monkeypatch.setattr(topic_table, "_add", fails)


CORPUS = topic_corpus()
KEY = jax.random.key(0)
fit_topics = partial(lc.fit_topics, progress_bar=False)
BATCHES = {"batch_size": 50}  # three a pass: few visits, and few shapes to compile for
fit_mean_field = partial(fit_topics, inference="mean_field")
both_inferences = pytest.mark.parametrize("inference", ["collapsed", "mean_field"])


@cache
def fit_of(num_passes: int) -> lc.TopicFit:
    """Of all of the corpus, for tests that only read it."""
    return fit_topics(KEY, CORPUS, K, num_passes=num_passes, **BATCHES)
