# SPDX-License-Identifier: Apache-2.0
"""Documents padded to few widths, and the rows of the table that a batch touches."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from scipy.sparse import csr_array

from numpyro_largecat.data import Corpus
from numpyro_largecat.ops.topics.active_search import Effort
from numpyro_largecat.ops.topics.collapsed_documents import most_topics
from numpyro_largecat.topics import (
    Options,
    document_chunks,
    local_steps,
    passes,
    topic_table,
)
from numpyro_largecat.topics.document_chunks import (
    Shapes,
    batches_within,
    chunks_of,
    widths_of,
)
from numpyro_largecat.topics.local_steps import Collapsed
from numpyro_largecat.topics.word_prior import WordPrior
from tests.topics.corpora import (
    CORPUS,
    KEY,
    WORDS,
    K,
    V,
    fit_mean_field,
    fit_topics,
    topic_corpus,
)


def test_a_batch_touches_the_rows_of_its_words() -> None:
    """Rows of the table that do not occur in a batch stay as they are, bit by bit."""
    corpus = Corpus.from_documents([["w1", "w2"], ["w2", "w5"]], WORDS)
    local_step, shapes = Collapsed(2, Effort()), Shapes((16,), 16, 3)
    problem = passes.Problem(corpus, local_step, shapes)
    batch = document_chunks.Batch(np.array([0]), np.array([1, 2, 2]))
    table = topic_table.Table(np.random.default_rng(0).gamma(1.0, size=(V, 2)), np.float32)
    before = table.numpy().copy()
    priors = passes.Priors(jnp.full(2, 0.1), WordPrior.of(0.1, V, 2))
    summary = passes.visit_batch(problem, batch, table, priors)
    assert summary.sums.counts.shape == (3, 2)
    table.add(batch.rows, summary.sums.counts)
    changed = np.flatnonzero((table.numpy() != before).any(axis=1))
    assert changed.tolist() == [1, 2]
    np.testing.assert_allclose((table.numpy() - before).sum(), 2, rtol=1e-5)
    for keep in (0.5, 1e-8):  # below the least scale: folded into the counts
        before = table.numpy().sum()
        table.add(batch.rows, csr_array(np.ones((3, 2))), keep=keep)
        np.testing.assert_allclose(table.numpy().sum(), keep * before + 6, rtol=1e-5)


@pytest.mark.parametrize(
    ("sizes", "num_passes", "widths"),
    [
        ([3, 10], 1, (16,)),
        ([100] * 81 + [400] * 19, 1, (416,)),
        ([100] * 81 + [400] * 19, 1000, (112, 416)),
        ([10] * 90 + [100] * 81 + [400] * 19, 1000, (16, 112, 416)),
        ([130] * 100, 1000, (144,)),
        ([8] * 100 + [3000], 10, (16, 3072)),  # the longest does not make others longer
        ([0], 1, (16,)),
    ],
)
def test_a_width_must_be_worth_its_compilation(sizes, num_passes, widths) -> None:
    rows = [(np.arange(size), np.ones(size, int)) for size in sizes]
    corpus = Corpus.from_rows(rows, max(sizes) + 1)
    assert widths_of(corpus, num_passes) == widths
    shapes = Shapes(widths, 128, corpus.num_words)
    chunks = [make() for make in chunks_of(corpus, np.arange(len(sizes)), shapes)]
    assert sorted(d for chunk in chunks for d in chunk.documents) == list(range(len(sizes)))
    assert all(chunk.counts.sum() == sum(sizes[d] for d in chunk.documents) for chunk in chunks)
    numbers = [chunk.words.size * most_topics(chunk.words.shape[1]) for chunk in chunks]
    assert max(numbers) <= document_chunks.NUMBERS_OF_CHUNK
    one_size = {(shapes.documents_of(width), width) for width in widths}
    assert {chunk.words.shape for chunk in chunks} <= one_size


@pytest.mark.parametrize("warm_start", [False, True])
@pytest.mark.usefixtures("x64")
@pytest.mark.some_cases(1)
def test_code_for_short_documents_changes_nothing(warm_start, monkeypatch) -> None:
    sizes = np.diff(CORPUS.offsets)
    some = CORPUS[np.argsort(-sizes)[:80]]
    rows = [some[d] for d in range(80)]
    rows[2:] = [(words[:5], counts[:5]) for words, counts in rows[2:]]
    corpus = Corpus.from_rows(rows, CORPUS.num_words)
    fits = []
    for slots in (document_chunks.SLOTS_FOR_CODE, 0):
        monkeypatch.setattr(document_chunks, "SLOTS_FOR_CODE", slots)
        options = Options(warm_start=warm_start)
        fits.append(fit_topics(KEY, corpus, K, num_active=2, num_passes=2, options=options))
    assert [fit.shapes.widths for fit in fits] == [(32,), (16, 32)]
    np.testing.assert_allclose(fits[0].posterior, fits[1].posterior, atol=1e-9)


def rare_words_corpus(num_documents=60):
    """Documents of ten words from 2,000, so that a batch touches few rows of the table."""
    rng = np.random.default_rng(0)
    rows = [(np.sort(rng.choice(2000, 10, replace=False)), np.ones(10, int)) for _ in range(60)]
    return Corpus.from_rows(rows[:num_documents], 2000)


@pytest.mark.parametrize("make", [topic_corpus, rare_words_corpus])
@pytest.mark.slow
def test_what_is_read_from_a_fit_compiles_nothing_new(make) -> None:
    """Proportions and scores use the code of the fit, also where its batches touch few words."""
    corpus = make(60)
    fit = fit_mean_field(KEY, corpus, 3, num_passes=1, batch_size=16)
    assert (fit.shapes.num_rows < corpus.num_words) == (make is rare_words_corpus)
    programs = local_steps._solve_mean_field._cache_size()
    assert np.isfinite(fit.score(corpus)) and np.isfinite(fit.proportions(corpus)).all()
    assert local_steps._solve_mean_field._cache_size() == programs


@pytest.mark.slow
def test_candidates_share_the_code_of_the_sweeps() -> None:
    """Code for both numbers of topics is only that which looks at all of them."""
    programs = local_steps._solve_collapsed, local_steps._through_largest
    before = [program._cache_size() for program in programs]
    options = Options(num_candidates=70)
    fit = fit_topics(KEY, topic_corpus(40), 40, num_passes=4, num_active=3, options=options)
    assert len(fit.shapes.widths) == 1
    grown = [program._cache_size() - n for program, n in zip(programs, before, strict=True)]
    assert grown == [1, 2]


def test_batches_within_rows_have_all_documents() -> None:
    corpus = rare_words_corpus()
    batches = list(batches_within(corpus, 55))
    assert np.concatenate([batch.documents for batch in batches]).tolist() == list(range(60))
    for batch in batches:
        words = np.unique(corpus[batch.documents].words)
        assert len(batch.rows) == 55 and np.unique(batch.rows).tolist() == words.tolist()
    alone = list(batches_within(corpus, 4))
    assert len(alone) == 60 and {len(batch.rows) for batch in alone} == {10}
