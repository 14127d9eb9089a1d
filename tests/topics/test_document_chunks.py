# SPDX-License-Identifier: Apache-2.0
"""Documents in arrays of few shapes, and the rows of the table that a batch touches."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.sparse import csr_array

from numpyro_largecat.data import Corpus
from numpyro_largecat.ops.topics.active_search import Effort
from numpyro_largecat.ops.topics.collapsed_documents import TopicProbs
from numpyro_largecat.topics import (
    Options,
    collapsed,
    document_chunks,
    document_pieces,
    problem,
    topic_table,
    visits,
    whole_documents,
)
from numpyro_largecat.topics.collapsed import Collapsed
from numpyro_largecat.topics.document_chunks import batches_within
from numpyro_largecat.topics.document_layout import Demand
from numpyro_largecat.topics.document_pieces import Blocks, DocumentPieces
from numpyro_largecat.topics.local_step import Documents, Given
from numpyro_largecat.topics.whole_documents import WholeDocuments, widths_of
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
    local_step, layout = Collapsed(2, Effort()), DocumentPieces((Blocks(16, 2, 1, 2),))
    about = problem.Problem(corpus, local_step, layout)
    batch = document_chunks.Batch(np.array([0]), np.array([1, 2, 2]))
    table = topic_table.Table(np.random.default_rng(0).gamma(1.0, size=(V, 2)), np.float32)
    before = table.numpy().copy()
    priors = problem.Priors(jnp.full(2, 0.1), WordPrior.of(0.1, V, 2))
    summary = visits.visit_batch(about, batch, table, priors)
    assert summary.sums.counts.shape == (3, 2)
    table.add(batch.rows, summary.sums.counts)
    changed = np.flatnonzero((table.numpy() != before).any(axis=1))
    assert changed.tolist() == [1, 2]
    np.testing.assert_allclose((table.numpy() - before).sum(), 2, rtol=1e-5)
    for keep in (0.5, 1e-8):  # below the least scale: folded into the counts
        before = table.numpy().sum()
        table.add(batch.rows, csr_array(np.ones((3, 2))), keep=keep)
        np.testing.assert_allclose(table.numpy().sum(), keep * before + 6, rtol=1e-5)


def corpus_of(sizes) -> Corpus:
    """Documents of so many words, each of which is there once or twice."""
    rows = [(np.arange(size), 1 + np.arange(size) % 2) for size in sizes]
    return Corpus.from_rows(rows, max(sizes) + 1)


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
@pytest.mark.parametrize("num_devices", [1, 2])
def test_a_width_must_be_worth_its_compilation(sizes, num_passes, widths, num_devices) -> None:
    corpus = corpus_of(sizes)
    assert widths_of(corpus, num_passes) == widths
    layout = WholeDocuments(widths, 128)
    makes = layout.chunks(corpus, np.arange(len(sizes)), num_devices)
    chunks = [make() for make in makes]
    assert sorted(d for chunk in chunks for d in chunk.documents) == list(range(len(sizes)))
    for chunk in chunks:
        tokens = [corpus[d][1].sum() for d in chunk.documents]
        assert chunk.counts.sum(axis=1)[chunk.places].tolist() == tokens
        assert chunk.counts.sum() == sum(tokens)
    slots = [chunk.words.size for chunk in chunks]
    assert max(slots) <= num_devices * whole_documents.SLOTS_OF_CHUNK
    one_size = {(num_devices * layout.documents_of(width), width) for width in widths}
    assert {chunk.words.shape for chunk in chunks} <= one_size


SIZES = [[3, 10], [0], [0, 0, 5], [16] * 40, [100] * 81 + [400] * 19, [8] * 100 + [3000, 17]]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("num_devices", [1, 3])
def test_pieces_have_all_words_of_whole_documents(sizes, num_devices) -> None:
    """Each block has whole documents, in order, and few of its slots are empty."""
    corpus = corpus_of(sizes)
    layout = DocumentPieces.of(corpus, Demand(50, 5, 4, 300, 100)).over(num_devices, 50)
    chunks = [make() for make in layout.chunks(corpus, np.arange(len(sizes)), num_devices)]
    order = np.concatenate([chunk.documents for chunk in chunks])
    np.testing.assert_array_equal(order, np.argsort(-np.array(sizes), kind="stable"))
    most_blocks = {k.num_pieces: num_devices * k.num_blocks for k in layout.kinds}
    for chunk in chunks:
        shape = chunk.words.shape
        assert chunk.counts.shape == shape and shape[2] == document_pieces.SLOTS
        assert shape[0] % num_devices == 0 and shape[0] <= most_blocks[shape[1]]
        assert chunk.owners.shape == shape[:2] and (np.diff(chunk.owners) >= 0).all()
        results = np.arange(shape[0])[:, None] * shape[1] + chunk.owners
        for d, place in zip(chunk.documents, chunk.places, strict=True):
            own = chunk.counts * (results == place)[..., None]
            words, counts = corpus[d]
            assert chunk.words[own > 0].tolist() == words.tolist()
            assert own[own > 0].tolist() == counts.tolist()
        assert chunk.counts.sum() == sum(corpus[d][1].sum() for d in chunk.documents)


def test_chunks_of_a_batch_are_even() -> None:
    """A batch of 25 blocks has four chunks, none with two more than another."""
    corpus = corpus_of([16 * 8] * 400)
    layout = DocumentPieces.of(corpus, Demand(400, 5, 4, 300, 100))
    chunks = [make() for make in layout.chunks(corpus, np.arange(400))]
    used = [int((chunk.counts > 0).any(axis=(1, 2)).sum()) for chunk in chunks]
    assert sum(used) == 25 and len(used) == 4 and max(used) - min(used) <= 1


@pytest.mark.parametrize("layout", [DocumentPieces, WholeDocuments])
def test_no_documents_have_no_chunks(layout) -> None:
    corpus = corpus_of([3, 10])
    own = layout.of(corpus, Demand(50, 5, 4, 300, 100))
    assert not list(own.chunks(corpus, np.arange(0)))
    assert not list(layout.to_read(corpus[[]], 3).chunks(corpus[[]], np.arange(0)))


@pytest.mark.parametrize(
    ("sizes", "num_passes", "topics"),
    [
        ([30] * 5000 + [900] * 20, 5, [56]),
        ([30] * 5000 + [900] * 20, 1000, [32, 56]),
        ([900] * 20, 1000, [56]),
        ([30] * 5000, 1000, [32]),
        # One document is much longer than all others of its batch together.
        ([10] * 2000 + [16_000], 20, [32, 100]),
    ],
)
def test_blocks_of_short_documents_must_be_worth_their_compilation(
    sizes, num_passes, topics
) -> None:
    """Documents of 900 words have 56 topics that go on, longer ones at most the 100 there will be.

    How many is a document's own, whatever is beside it.
    """
    corpus = corpus_of(sizes)
    layout = DocumentPieces.of(corpus, Demand(500, num_passes, 4, 300, 100))
    assert [kind.topics for kind in layout.kinds] == topics
    for make in layout.chunks(corpus, np.arange(len(sizes))):
        chunk = make()
        is_long = np.array(sizes)[chunk.documents] > 512
        assert chunk.most == (topics[-1] if is_long.any() else topics[0])
        assert is_long.all() or len(topics) == 1 or not is_long.any()


def test_a_layout_holds_longer_documents_too() -> None:
    """In blocks of their own, so that no more is compiled, or padded, for the others."""
    layout = DocumentPieces.of(corpus_of([30] * 40), Demand(500, 5, 4, 300, 300))
    assert layout.with_room_for(corpus_of([30] * 400), 300) == layout
    larger = layout.with_room_for(corpus_of([5000, 30]), 300)
    assert larger.kinds == (*layout.kinds, Blocks(5000, 313, 1, 300))


def test_a_chunk_of_long_documents_has_few_blocks() -> None:
    numbers = [
        kind.num_blocks * kind.num_pieces * document_pieces.SLOTS * kind.topics
        for batch_size in (512, 20_000)
        for layout in [
            DocumentPieces.of(
                corpus_of([15] * 20_000), Demand(batch_size, 5, 4, 4500, 1500)
            ).with_room_for(corpus_of([3000] * 30 + [12_000]), 1500)
        ]
        for kind in layout.kinds
        if kind.num_blocks > 1
    ]
    assert max(numbers) <= document_pieces.NUMBERS_OF_CHUNK


def test_blocks_are_small_where_there_are_many_topics() -> None:
    """A block of 100,000 topics has the longest document, and what a cache holds if that is more.

    At 300 topics it has 128 pieces.
    """
    corpus = corpus_of([30] * 400 + [100])
    (kind,) = DocumentPieces.of(corpus, Demand(2000, 5, 1, 300, 300)).kinds
    assert kind.num_pieces == 128
    (kind,) = DocumentPieces.of(corpus, Demand(2000, 5, 1, 100_000, None)).kinds
    assert kind.num_pieces == 7


@pytest.mark.parametrize("warm_start", [False, True])
@pytest.mark.usefixtures("x64")
@pytest.mark.slow
def test_code_for_short_documents_changes_nothing(warm_start, monkeypatch) -> None:
    """Neither another width, where documents are whole, nor other pieces."""
    sizes = np.diff(CORPUS.offsets)
    some = CORPUS[np.argsort(-sizes)[:80]]
    rows = [some[d] for d in range(80)]
    rows[2:] = [(words[:5], counts[:5]) for words, counts in rows[2:]]
    corpus = Corpus.from_rows(rows, CORPUS.num_words)
    for fit, changed in (
        (fit_mean_field, (whole_documents, "SLOTS_FOR_CODE", 0)),
        (fit_topics, (document_pieces, "SLOTS", 4)),
    ):
        fits = []
        for change in ((), (changed,)):
            for attribute in change:
                monkeypatch.setattr(*attribute)
            options = Options(warm_start=warm_start)
            fits.append(fit(KEY, corpus, K, num_active=2, num_passes=2, options=options))
        assert fits[0].shapes.layout != fits[1].shapes.layout
        np.testing.assert_allclose(fits[0].posterior, fits[1].posterior, atol=1e-9)


def rare_words_corpus(num_documents=60):
    """Documents of ten words from 2,000, so that a batch touches few rows of the table."""
    rng = np.random.default_rng(0)
    rows = [(np.sort(rng.choice(2000, 10, replace=False)), np.ones(10, int)) for _ in range(60)]
    return Corpus.from_rows(rows[:num_documents], 2000)


@pytest.mark.parametrize("make", [topic_corpus, rare_words_corpus])
@pytest.mark.slow
def test_what_is_read_from_a_fit_compiles_nothing_new(make, compiled) -> None:
    """Proportions and scores use the code of the fit, also where its batches touch few words."""
    corpus = make(60)
    fit = fit_mean_field(KEY, corpus, 3, num_passes=1, batch_size=16)
    assert (fit.shapes.num_rows < corpus.num_words) == (make is rare_words_corpus)
    num_programs = compiled().count("_solve_mean_field")
    assert np.isfinite(fit.score(corpus)) and np.isfinite(fit.proportions(corpus)).all()
    assert compiled().count("_solve_mean_field") == num_programs


@pytest.mark.slow
def test_candidates_share_the_code_of_the_sweeps(compiled) -> None:
    """Code for both numbers of topics is only that which looks at all of them."""
    programs = collapsed._solve_collapsed, collapsed._through_largest
    for program in programs:  # other tests may have compiled the same
        program.clear_cache()
    options = Options(num_candidates=70)
    fit = fit_topics(KEY, topic_corpus(40), 40, num_passes=4, num_active=3, options=options)
    assert len(fit.shapes.layout.kinds) == 1
    assert [compiled().count(program.__name__) for program in programs] == [1, 2]


def test_blocks_are_solved_one_by_one(compiled) -> None:
    """The memory is that of one: a program never sees how many there are."""
    programs = collapsed._solve_collapsed, collapsed._through_largest
    for program in programs:  # other tests may have compiled the same
        program.clear_cache()
    rng, local_step = np.random.default_rng(0), Collapsed(2, Effort())
    probs = rng.dirichlet(np.ones(9), 3).T.astype(np.float32)
    given = Given(TopicProbs(probs, np.zeros(3, np.float32), np.zeros(3, np.float32)), np.ones(3))
    shape = 5, 4, document_pieces.SLOTS
    words, counts = rng.integers(0, 9, shape), rng.integers(0, 3, shape)
    owners = np.broadcast_to(np.arange(4), shape[:2])

    def fit_of(blocks: slice):
        documents = Documents(words[blocks], counts[blocks], owners[blocks])
        return local_step.solve(given, documents, None, 2)

    whole, alone = fit_of(slice(5)), [fit_of(slice(b, b + 1)) for b in range(5)]
    for found, *expected in zip(*map(jax.tree.leaves, (whole, *alone)), strict=True):
        np.testing.assert_array_equal(found, np.concatenate(expected))
    assert [compiled().count(program.__name__) for program in programs] == [1, 1]


def test_batches_within_rows_have_all_documents() -> None:
    corpus = rare_words_corpus()
    batches = list(batches_within(corpus, 55))
    assert np.concatenate([batch.documents for batch in batches]).tolist() == list(range(60))
    for batch in batches:
        words = np.unique(corpus[batch.documents].words)
        assert len(batch.rows) == 55 and np.unique(batch.rows).tolist() == words.tolist()
    alone = list(batches_within(corpus, 4))
    assert len(alone) == 60 and {len(batch.rows) for batch in alone} == {10}
