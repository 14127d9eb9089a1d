# SPDX-License-Identifier: Apache-2.0
"""Topics over eight emulated devices are those of one, and documents are sent nowhere."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from scipy.sparse import csr_array

import numpyro_largecat as lc
from numpyro_largecat.data import Corpus
from numpyro_largecat.ops.rows_by_device import over_all_devices
from numpyro_largecat.ops.topics.active_search import Effort
from numpyro_largecat.ops.topics.collapsed_documents import Assignments, Pieces, TopicProbs
from numpyro_largecat.ops.topics.document_fit import prepare_topics
from numpyro_largecat.topics import collapsed, mean_field, topic_table
from numpyro_largecat.topics.collapsed import Collapsed
from numpyro_largecat.topics.local_step import Documents, Given
from numpyro_largecat.topics.mean_field import MeanField
from numpyro_largecat.topics.word_prior import WordPrior
from tests.collectives import shapes_sent

if len(jax.devices()) < 8:  # on a machine whose accelerators are fewer
    pytest.skip("needs eight devices", allow_module_level=True)

V, K = 61, 40  # words, no multiple of eight, and topics, more than are active in a document
MESH = Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"))


def make_corpus() -> Corpus:
    rng = np.random.default_rng(0)
    topics = rng.dirichlet(np.full(V, 0.1), 3)
    documents = [rng.choice(V, 25, p=topics[rng.integers(3)]).astype(str) for _ in range(150)]
    return Corpus.from_documents([list(words) for words in documents])


CORPUS = make_corpus()


def fit(mesh, **options):
    arguments = {"batch_size": 60, "num_passes": 2, "num_active": 2, "progress_bar": False}
    return lc.fit_topics(jax.random.key(0), CORPUS, K, mesh=mesh, **arguments | options)


def assert_close(found, expected) -> None:
    """To the precision of the digamma and of a search that ends when it gains next to nothing."""
    np.testing.assert_allclose(found.posterior, expected.posterior, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(found.bounds, expected.bounds, rtol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("inference", ["collapsed", "mean_field"])
@pytest.mark.parametrize("method", ["memoized", "stochastic"])
def test_a_fit_is_that_of_one_device(method, inference, x64) -> None:
    options = {"method": method, "inference": inference}
    assert_close(fit(MESH, **options), fit(None, **options))


def test_a_checkpoint_with_warm_starts_goes_on_over_other_devices(tmp_path, x64) -> None:
    """Chunks of documents are others, so what is kept of each document must find its own."""
    warm = lc.topics.Options(warm_start=True, num_candidates=K)
    options = {"num_passes": 3, "options": warm}
    options["word_concentration"] = 0.1  # or it would be learned sooner in two passes than in three
    checkpoints = lc.Checkpoints(tmp_path, every_steps=1)
    fit(MESH, **options | {"num_passes": 2}, checkpoints=checkpoints)
    found = fit(None, **options, checkpoints=checkpoints, resume=True)
    assert_close(found, fit(None, **options))


@pytest.mark.slow
def test_short_documents_have_as_many_topics_on_all_devices(monkeypatch, tmp_path, x64) -> None:
    """Where long ones have more, and also if the fit goes on over other devices."""
    monkeypatch.setattr("numpyro_largecat.topics.document_pieces.NUMBERS_FOR_CODE", 0)
    rng = np.random.default_rng(0)
    lengths = [5] * 300 + [1000] * 3
    rows = [np.unique(rng.choice(1500, n, replace=False)) for n in lengths]
    corpus = Corpus.from_rows([(words, np.ones(len(words), int)) for words in rows], 1500)

    def found(mesh, num_passes=2, **options):
        arguments = {"batch_size": 32, "num_passes": num_passes, "progress_bar": False}
        return lc.fit_topics(jax.random.key(0), corpus, 60, mesh=mesh, **arguments | options)

    one = found(None)
    assert [kind.topics for kind in one.shapes.layout.kinds] == [32, 60]
    assert_close(found(MESH), one)
    checkpoints = lc.Checkpoints(tmp_path, every_steps=1)
    found(None, 1, checkpoints=checkpoints)
    again = found(MESH, checkpoints=checkpoints, resume=True)
    assert again.shapes == found(None, 1).shapes


def test_the_table_is_spread_by_words() -> None:
    counts = np.random.default_rng(0).gamma(1.0, size=(V, K)).astype(np.float32)
    one, many = (topic_table.Table(counts, np.float32, mesh) for mesh in (None, MESH))
    rows, change = np.array([0, 7, V - 1]), csr_array(np.ones((3, K)))
    for table in (one, many):
        table.add(rows, change, keep=0.5)
    held = many.state.counts
    assert held.sharding.shard_shape(held.shape) == (-(-V // MESH.size), K)
    np.testing.assert_allclose(many.numpy(), one.numpy(), rtol=1e-6)
    posteriors = [table.posterior(rows, WordPrior.of(0.1, V, K)) for table in (one, many)]
    for found, expected in zip(*posteriors, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_a_batch_sends_its_rows_of_the_table_alone() -> None:
    table = topic_table.Table(np.ones((V, K)), np.float32, MESH)
    counts, totals, scale = table.state
    rows = jnp.arange(8)
    read = topic_table._posterior.lower(
        counts, totals, rows, (jnp.full((1, 1), 0.1), jnp.full(1, 0.1 * V)), scale
    )
    assert shapes_sent(read.compile()) == [(8, K)]
    change = jnp.ones((8, K))
    write = topic_table._add.lower(counts, totals, rows, change, scale)
    assert shapes_sent(write.compile()) == []


@pytest.mark.parametrize("kind", [Collapsed, MeanField])
def test_devices_solve_for_their_own_documents(kind) -> None:
    sharding = over_all_devices(MESH)
    if kind is Collapsed:
        topics = TopicProbs(jnp.ones((V, K)), jnp.ones(K), jnp.ones(K))
        words = jnp.zeros((8, 8, 16), int)
        last = Assignments(jnp.ones((*words.shape, 2)), jnp.zeros((*words.shape, 2), int))
        pieces, last = jax.device_put((Pieces(words, words, words[..., 0]), last), sharding)
        given = Given(topics, jnp.ones(K)), True, 1
        look = collapsed._through_largest.lower(given, (pieces, last), most=32, mesh=MESH)
        largest = look.compile()
        assert shapes_sent(largest) == []
        shared, solve = Effort(), collapsed._solve_collapsed
        own, options = (largest(given, (pieces, last)), pieces), {"num_active": 2}
    else:
        words = jnp.zeros((128, 16), int)
        documents, start = jax.device_put((Documents(words, words), jnp.ones((128, K))), sharding)
        shared = prepare_topics(jnp.zeros((V, K)), jnp.ones(K)), 2, Effort()
        options, solve = {"size": K}, mean_field._solve_mean_field
        own = documents, start
    lowered = solve.lower(shared, own, mesh=MESH, **options)
    assert shapes_sent(lowered.compile()) == []
