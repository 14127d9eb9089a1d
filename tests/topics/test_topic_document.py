# SPDX-License-Identifier: Apache-2.0
"""Documents as a distribution: shapes, gradients by the envelope theorem, use in models."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal
from numpyro.infer.util import log_density

import numpyro_largecat as lc
from numpyro_largecat.data import Corpus
from tests import reference_topics as reference
from tests.memory import temp_bytes
from tests.slow_cases import slow_case

rng = np.random.default_rng(0)
K, V, U = 5, 12, 7
TOPICS = np.log(rng.dirichlet(np.full(V, 0.3), size=K) + 1e-4)
DOCUMENTS = np.stack(
    [np.stack([rng.permutation(V)[:U], rng.integers(0, 5, size=U)], axis=-1) for _ in range(6)]
)
CONCENTRATION = np.linspace(0.1, 0.5, K)
EXACT = dict(max_sweeps=3000, tolerance=1e-12, num_restarts=0)


def bounds(topics, concentration, num_active=K):
    """The reference's bound of each document, at its optimum."""
    return np.array(
        [
            reference.solve_document(
                topics.T[document[:, 0]],
                document[:, 1],
                concentration,
                num_active=num_active,
                num_sweeps=300,
            )[2][-1]
            for document in DOCUMENTS
        ]
    )


@pytest.mark.usefixtures("x64")
@pytest.mark.slow
def test_gradient_is_that_of_the_optimised_bound() -> None:
    """Finite differences through the whole optimisation, in topics and in concentrations."""

    def total(topics, concentration):
        return lc.TopicDocument(topics, concentration, K, **EXACT).log_prob(DOCUMENTS).sum()

    gradients = jax.jit(jax.value_and_grad(total, argnums=(0, 1)))
    value, (of_topics, of_concentration) = gradients(TOPICS, CONCENTRATION)
    assert value == pytest.approx(bounds(TOPICS, CONCENTRATION).sum(), abs=1e-6)
    size = 1e-5
    for k, v in ((0, 3), (4, 0)):
        step = np.zeros((K, V))
        step[k, v] = size
        above, below = (bounds(TOPICS + s * step, CONCENTRATION).sum() for s in (1, -1))
        assert of_topics[k, v] == pytest.approx((above - below) / (2 * size), abs=1e-4)
    for k in range(K):
        step = size * np.eye(K)[k]
        above, below = (bounds(TOPICS, CONCENTRATION + s * step).sum() for s in (1, -1))
        assert of_concentration[k] == pytest.approx((above - below) / (2 * size), abs=1e-4)


@pytest.mark.usefixtures("x64")
def test_gradient_of_a_sparse_bound() -> None:
    """With two topics a word, the gradient has the responsibilities, weighted by cotangents."""
    weights = rng.uniform(size=6)

    @jax.jit
    @jax.value_and_grad
    def total(topics):
        return weights @ lc.TopicDocument(topics, CONCENTRATION, 2, **EXACT).log_prob(DOCUMENTS)

    value, gradient = total(TOPICS)
    size = 1e-6
    direction = rng.normal(size=(K, V))
    above, below = (float(total(TOPICS + s * size * direction)[0]) for s in (1, -1))
    assert np.vdot(np.asarray(gradient), direction) == pytest.approx(
        (above - below) / (2 * size), rel=1e-4
    )
    expected = sum(w * d[d[:, 0] == 7, 1].sum() for w, d in zip(weights, DOCUMENTS, strict=True))
    assert np.asarray(gradient)[:, 7].sum() == pytest.approx(float(expected))  # tokens of word 7
    assert value < 0


SETS = np.stack([TOPICS, TOPICS[::-1] - 0.5])


@jax.jit
def bound_of_one(topics, concentration, document):
    return lc.TopicDocument(topics, concentration, 3).log_prob(document)


@jax.jit
def two_bounds(d, value):
    return d.log_prob(value), d.fit(value).bound


@pytest.mark.parametrize(
    ("topics", "concentration", "value", "shape"),
    [
        (TOPICS, 0.2, DOCUMENTS[0], ()),
        (TOPICS, CONCENTRATION, DOCUMENTS.reshape(2, 3, U, 2), (2, 3)),
        (SETS, 0.2, DOCUMENTS[0], (2,)),
        (SETS, CONCENTRATION, DOCUMENTS.reshape(3, 2, U, 2), (3, 2)),
        (TOPICS, np.ones((3, 1, K)), DOCUMENTS[:2], (3, 2)),
    ],
)
@pytest.mark.some_cases(1)
def test_shapes_broadcast(topics, concentration, value, shape) -> None:
    """As other distributions: each document under each set of topics by itself is the same."""
    d = lc.TopicDocument(topics, concentration, 3)
    found, fitted = two_bounds(d, value)
    assert found.shape == shape == fitted.shape
    concentrations = np.broadcast_to(concentration, (*d.batch_shape, K))
    tables = np.broadcast_to(topics, (*d.batch_shape, K, V))
    for index in np.ndindex(shape):
        own = tuple(
            i if n > 1 else 0
            for i, n in zip(index[len(shape) - len(d.batch_shape) :], d.batch_shape, strict=True)
        )
        document = np.broadcast_to(value, (*shape, U, 2))[index]
        one = bound_of_one(tables[own], concentrations[own], document)
        np.testing.assert_allclose(found[index], one, rtol=1e-5)


@pytest.mark.slow
def test_gradient_under_vmap_is_that_of_each() -> None:
    """Over documents, and over topics."""

    def value(topics, document):
        return lc.TopicDocument(topics, CONCENTRATION, 3).log_prob(document)

    topics, documents = jnp.asarray(TOPICS), DOCUMENTS[:2]
    of_one = jax.jit(jax.grad(value))
    each = [of_one(topics, document) for document in documents]
    assert np.abs(each[0] - each[1]).max() > 1
    for axes, tables in (((None, 0), topics), ((0, 0), jnp.stack([topics] * 2))):
        found = jax.jit(jax.vmap(jax.grad(value), axes))(tables, documents)
        np.testing.assert_allclose(found, each, atol=1e-4)


@pytest.mark.parametrize("scale", [1e3, 1e5, 1e7])
def test_large_concentrations_have_no_fewer_digits(scale: float) -> None:
    """Frequencies are then those of the prior's mean; float64 shows how nearly, and the slope."""
    topics = np.random.default_rng(0).dirichlet(np.ones(30), 3)
    mean = np.array([1, 2, 3]) / 6
    words, counts = np.arange(20), np.full(20, 2)
    num_tokens = counts.sum()

    def log_prob(scale):
        document = lc.TopicDocument(jnp.log(jnp.array(topics)), scale * jnp.array(mean), 3)
        return document.log_prob(jnp.array(np.stack([words, counts], axis=-1)))

    found = [np.asarray(x) for x in jax.value_and_grad(log_prob)(scale)]
    with jax.enable_x64(True):
        exact = [np.asarray(x) for x in jax.value_and_grad(log_prob)(scale)]
    limit = (counts * np.log(mean @ topics)[words]).sum()
    assert abs(exact[0] - limit) < num_tokens**2 / scale
    assert abs(found[0] - exact[0]) < 1e-6 * num_tokens * np.log(scale)
    assert abs(found[1] - exact[1]) < 2e-6 * num_tokens / scale


def test_one_topic_has_a_closed_form() -> None:
    """All tokens are its own, whatever the prior; topics in 16 bits are widened."""
    topic = jnp.asarray(TOPICS[:1], jnp.bfloat16)
    found = jax.jit(lambda topic: lc.TopicDocument(topic, 0.3, 1).fit(DOCUMENTS))(topic)
    words, counts = DOCUMENTS[..., 0], DOCUMENTS[..., 1]
    expected = (counts * np.asarray(topic, np.float32)[0, words]).sum(axis=1)
    np.testing.assert_allclose(found.bound, expected, rtol=1e-5)
    np.testing.assert_allclose(np.asarray(found.counts)[:, 0], counts.sum(axis=1), rtol=1e-6)


def test_draws_have_the_words_of_the_topics() -> None:
    """Frequencies of words over 20,000 tokens, at 5.5 standard errors of independent documents.

    FALSE_ALARM = 1e-6.
    """
    d = lc.TopicDocument(TOPICS, CONCENTRATION * 10, 3, num_tokens=5)
    draws = np.asarray(jax.jit(lambda key: d.sample(key, (4000,)))(jax.random.key(0)))
    assert draws.shape == (4000, 5, 2) and (draws[..., 1] == 1).all()
    probs = np.exp(TOPICS) / np.exp(TOPICS).sum(axis=1, keepdims=True)
    expected = CONCENTRATION / CONCENTRATION.sum() @ probs
    shares = (draws[..., 0, None] == np.arange(V)).mean(axis=1)  # (4000, V), one row a document
    errors = shares.std(axis=0) / np.sqrt(4000)
    assert (np.abs(shares.mean(axis=0) - expected) < 5.5 * errors).all()
    assert (np.asarray(jax.jit(d.log_prob)(draws[:3])) < 0).all()


def model(documents, size=None, num_active=2):
    """Topics with a Dirichlet prior and a learned concentration."""
    with numpyro.plate("topics", 2):
        phi = numpyro.sample("phi", dist.Dirichlet(jnp.full(6, 0.5)))
    alpha = numpyro.sample("alpha", dist.Gamma(2.0, 4.0))
    with numpyro.plate("documents", len(documents), subsample_size=size) as index:
        likelihood = lc.TopicDocument(jnp.log(phi), alpha, num_active)
        numpyro.sample("document", likelihood, obs=documents[index])


def logistic_normal(documents, size=None):
    """Topics whose scores are Gaussian."""
    with numpyro.plate("topics", 2):
        scores = numpyro.sample("scores", dist.Normal(0, 2).expand([6]).to_event(1))
    with numpyro.plate("documents", len(documents), subsample_size=size) as index:
        likelihood = lc.TopicDocument(jax.nn.log_softmax(scores), 0.1, 2)
        numpyro.sample("document", likelihood, obs=documents[index])


def two_kinds_of_documents():
    """Thirty documents of words 0 to 2, or of words 3 to 5."""
    kinds = rng.integers(2, size=30)
    counts = rng.integers(1, 6, size=(30, 3))
    words = np.arange(3) + 3 * kinds[:, None]
    return jnp.asarray(np.stack([words, counts], axis=-1))


@pytest.mark.slow
@pytest.mark.parametrize(("make", "size"), [(model, 10), (logistic_normal, None)])
def test_svi_finds_the_topics(make, size) -> None:
    """With an autoguide and ``jit``, on all documents and on minibatches."""
    documents = two_kinds_of_documents()
    guide = AutoNormal(make)
    svi = SVI(make, guide, numpyro.optim.Adam(0.2), Trace_ELBO())
    result = svi.run(jax.random.key(1), 120, documents, size=size, progress_bar=False)
    median = guide.median(result.params)
    found = median["phi"] if "phi" in median else jax.nn.softmax(median["scores"])
    first = np.sort(np.asarray(found[:, :3].sum(axis=1)))
    assert first[0] < 0.15 and first[1] > 0.85
    assert result.losses[-20:].mean() < result.losses[:20].mean()


PHI = np.exp(TOPICS[:2, :6]) / np.exp(TOPICS[:2, :6]).sum(axis=1, keepdims=True)


def test_gradient_of_a_models_density_on_a_minibatch() -> None:
    """As SVI takes it, under ``jit``: the likelihood of ten of thirty documents counts thrice."""
    documents, rows = two_kinds_of_documents(), jnp.arange(10) * 3

    def density(phi, alpha):
        on_rows = handlers.substitute(handlers.seed(model, 0), {"documents": rows})
        return log_density(on_rows, (documents, 10), {}, {"phi": phi, "alpha": alpha})[0]

    def expected(phi, alpha):
        likelihood = lc.TopicDocument(jnp.log(phi), alpha, 2).log_prob(documents[rows]).sum()
        prior = dist.Dirichlet(jnp.full(6, 0.5)).log_prob(phi).sum()
        return 3 * likelihood + prior + dist.Gamma(2.0, 4.0).log_prob(alpha)

    both = jax.jit(
        lambda *args: [jax.value_and_grad(f, (0, 1))(*args) for f in (density, expected)]
    )
    found, right = both(jnp.asarray(PHI, jnp.float32), jnp.array(0.3))
    assert np.abs(found[1][0]).max() > 10
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), found, right)


@pytest.mark.slow
def test_subsampled_log_density_is_scaled() -> None:
    """A plate over ten of thirty documents counts each three times."""
    documents = two_kinds_of_documents()
    values = {"phi": jnp.asarray(PHI), "alpha": jnp.array(0.3)}
    traced = handlers.trace(handlers.seed(handlers.substitute(model, values), 0))
    site = traced.get_trace(documents, size=10)["document"]
    assert site["scale"] == 3 and site["fn"].log_prob(site["value"]).shape == (10,)


def test_a_corpus_in_place_of_documents_is_refused() -> None:
    """With two words each its documents have the shape of an array of words and counts."""
    corpus = Corpus.from_documents([["a", "b"]])
    with pytest.raises(TypeError, match=r"`corpus.values\(\)`; got a Corpus"):
        lc.TopicDocument(np.log(np.full((1, 2), 0.5)), 1.0, 1).log_prob(corpus)


def test_a_huge_concentration_gives_documents_of_even_frequencies() -> None:
    """Then tokens are independent, of the mean of the topics."""
    topics = np.log([[0.7, 0.3], [0.1, 0.9]])
    document = np.array([[0, 2], [1, 1]])
    found = lc.TopicDocument(topics, 1e25, 2).log_prob(document)
    assert found == pytest.approx(2 * np.log(0.4) + np.log(0.6), abs=1e-4)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(num_active=6), ValueError, "at most 5"),
        (dict(num_active=0), ValueError, "at least 1"),
        (dict(concentration=np.ones(3)), ValueError, r"shape \(5,\), one for each topic"),
        (dict(topic_log_probs=np.ones(3)), ValueError, "last two axes"),
        (dict(max_sweeps=3), ValueError, "at least 10"),
    ],
)
def test_bad_arguments_are_refused(change, error, message) -> None:
    arguments = dict(topic_log_probs=TOPICS, concentration=0.1, num_active=2) | change
    with pytest.raises(error, match=message):
        lc.TopicDocument(**arguments)


@pytest.mark.parametrize(
    ("topics", "place"),
    [
        (np.exp(TOPICS), "0"),
        (TOPICS + 1.0 * (np.arange(K)[:, None] == 3), "3"),
        (np.stack([TOPICS, np.exp(TOPICS)]), r"\(1, 0\)"),
    ],
)
def test_topics_that_are_no_log_probabilities_are_refused(topics, place) -> None:
    """Probabilities, and scores, by mistake."""
    with pytest.raises(ValueError, match=rf"log probabilities.* for topic {place}\. .*jnp\.log"):
        lc.TopicDocument(topics, 0.1, 2)


def test_probabilities_have_no_bound_under_jit() -> None:
    """NaN from all methods, and for sets under ``vmap``; a constant is refused."""
    found = jax.jit(lambda phi: lc.TopicDocument(phi, 0.1, 2).log_prob(DOCUMENTS))
    assert np.isnan(found(np.exp(TOPICS))).all() and np.isfinite(found(TOPICS)).all()
    of_each = jax.jit(
        jax.vmap(jax.vmap(lambda phi, x: lc.TopicDocument(phi, 0.1, 2).log_prob(x), (None, 0)))
    )
    sets = np.stack([TOPICS, np.exp(TOPICS)]), np.stack([DOCUMENTS, DOCUMENTS])
    assert np.isnan(of_each(*sets)).all(axis=1).tolist() == [False, True]
    counts = jax.jit(lambda phi: lc.TopicDocument(phi, 0.1, 2).fit(DOCUMENTS).counts)
    assert np.isnan(counts(np.exp(TOPICS))).all()
    known = jnp.asarray(sets[0][1])
    with pytest.raises(ValueError, match="log probabilities"):
        jax.jit(lambda: lc.TopicDocument(known, 0.1, 2).log_prob(DOCUMENTS))()


@pytest.mark.slow
def test_a_topic_of_one_word_has_a_bound_under_jit() -> None:
    """Though the word has many slots, and a probability that is rounded above 1."""
    topic = jnp.log(jnp.array([[1.0 + 1e-6, 0.0]]))
    document = jnp.array([[0, 1], [0, 2], [1, 0]])
    found = jax.jit(lambda c: lc.TopicDocument(c, 0.1, 1).log_prob(document))(topic)
    assert found == pytest.approx(0, abs=1e-4)


def test_topics_on_the_last_axis_are_refused() -> None:
    """A table of (V, K); under ``jit`` it has no row for most words."""
    table = jax.nn.log_softmax(TOPICS, axis=1).T
    with pytest.raises(ValueError, match=r"\(\.\.\., K, V\); got shape \(12, 5\), .* transpose"):
        lc.TopicDocument(table, 0.1, 2)
    with pytest.raises(ValueError, match="transpose"):
        lc.TopicDocument(jnp.stack([table, table]), 0.1, 2)
    log_prob = jax.jit(lambda table, x: lc.TopicDocument(table, 0.1, 2).log_prob(x))
    assert ((DOCUMENTS[..., 0] >= K) & (DOCUMENTS[..., 1] > 0)).any(axis=1).all()
    assert jnp.isnan(log_prob(table, DOCUMENTS)).all()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.some_cases(1)
def test_rounded_topics_are_log_probabilities(dtype: str) -> None:
    """Softmaxes over 100,000 words, where all are rounded up; and a part of the vocabulary."""
    scores = jnp.stack([jnp.zeros(10**5), 30 * jnp.sin(jnp.arange(10**5))])
    table = jax.nn.log_softmax(scores).astype(dtype)
    assert lc.TopicDocument(table, 0.1, 1).num_words == 10**5
    assert lc.TopicDocument(table[:, :7], 0.1, 1).num_words == 7


def test_bad_documents_are_refused() -> None:
    """The message says which document, which word and which count; under jit they are NaN."""
    d = lc.TopicDocument(TOPICS, 0.1, 2)
    outside, negative = DOCUMENTS.copy(), DOCUMENTS.copy()
    outside[3, 2] = V, 1
    negative[4, 1, 1] = -2
    with pytest.raises(ValueError, match=r"integers in \[0, 12\).*got word 12 .* document 3"):
        d.log_prob(outside)
    with pytest.raises(ValueError, match=r"count -2 in document 4"):
        d.log_prob(negative)
    for large in (2**32 + 3, 2**31):
        with pytest.raises(ValueError, match=rf"at most \d+; got word 1 with count {large},"):
            d.log_prob(np.array([[1, large]]))
    with pytest.raises(TypeError, match="must be integers"):
        d.log_prob(DOCUMENTS.astype(float))
    with pytest.raises(ValueError, match=r"shape \(\.\.\., U, 2\)"):
        d.log_prob(DOCUMENTS[..., 0])
    for bad, row in ((outside, 3), (negative, 4)):
        found = np.asarray(jax.jit(d.log_prob)(bad))
        assert np.flatnonzero(np.isnan(found)).tolist() == [row]


def test_second_derivatives_are_refused() -> None:
    def log_prob(concentration):
        return lc.TopicDocument(TOPICS, concentration, 2).log_prob(DOCUMENTS).sum()

    for twice in (jax.hessian(log_prob), jax.jacrev(jax.grad(log_prob))):
        with pytest.raises(NotImplementedError, match="first derivatives alone"):
            jax.jit(twice)(0.5)


def test_a_word_that_no_topic_has_is_impossible() -> None:
    """log_prob is -inf, the gradient is finite, and other documents do not notice."""
    topics = TOPICS.copy()
    topics[:, 4] = -np.inf
    documents = DOCUMENTS.copy()
    documents[:, :, 0] = [0, 1, 2, 3, 5, 6, 7]
    documents[1, 0] = 4, 2
    found, gradient = jax.jit(
        jax.value_and_grad(
            lambda topics: (
                (bounds := lc.TopicDocument(topics, 0.1, 2).log_prob(documents)).sum(),
                bounds,
            ),
            has_aux=True,
        )
    )(topics)
    assert found[1][1] == -np.inf and np.isfinite(np.delete(found[1], 1)).all()
    assert np.isfinite(gradient).all() and not gradient[:, 4].any()


@pytest.mark.slow
def test_memory_of_a_gradient_follows_the_topics_table() -> None:
    """Not documents times words times topics."""

    def gradient(num_docs):
        def total(topics, documents):
            return lc.TopicDocument(topics, 0.01, 4).log_prob(documents).sum()

        shapes = ((60, 500), jnp.float32), ((num_docs, 40, 2), jnp.int32)
        return temp_bytes(jax.grad(total), *(jax.ShapeDtypeStruct(*s) for s in shapes))

    extra = gradient(512) - gradient(64)
    assert extra < 0.2 * 448 * 40 * 60 * 4


@pytest.mark.parametrize("num_active", [2, slow_case(K)])
@pytest.mark.slow
def test_guide_of_frequencies_and_assignments_has_the_bound(num_active: int) -> None:
    """A model with the sites pi and z and this guide: the ELBO is ``log_prob``, by enough draws.

    4,000 draws at 5.5 standard errors; FALSE_ALARM = 1e-7.
    """
    tokens = np.array([[0, 1, 2, 3, 7, 7, 5], [4, 4, 4, 2, 9, 10, 11]])
    documents = np.stack([tokens, np.ones_like(tokens)], axis=-1)
    log_probs = jnp.asarray(TOPICS)
    likelihood = lc.TopicDocument(log_probs, CONCENTRATION, num_active, tolerance=1e-5)
    found = likelihood.posterior(documents)
    assert found.assignments.indices.shape == (2, 7, num_active)

    def with_sites():
        with numpyro.plate("documents", 2, dim=-2):
            pi = numpyro.sample("pi", dist.Dirichlet(jnp.asarray(CONCENTRATION)))
            with numpyro.plate("tokens", 7, dim=-1):
                z = numpyro.sample("z", dist.Categorical(probs=pi))
                logits = jax.nn.log_softmax(log_probs, axis=-1)[z]
                numpyro.sample("x", dist.Categorical(logits=logits), obs=jnp.asarray(tokens))

    def guide():
        with numpyro.plate("documents", 2, dim=-2):
            frequencies = dist.Dirichlet(found.frequencies.concentration[:, None])
            numpyro.sample("pi", frequencies)
            with numpyro.plate("tokens", 7, dim=-1):
                numpyro.sample("z", found.assignments)

    loss = jax.jit(jax.vmap(lambda key: Trace_ELBO().loss(key, {}, with_sites, guide)))
    draws = -np.asarray(loss(jax.random.split(jax.random.key(0), 4000)))
    normalizers = jax.nn.logsumexp(log_probs, axis=1)  # these topics sum to a little above 1
    assert np.ptp(normalizers) < 2e-3
    expected = float(likelihood.log_prob(documents).sum()) - 14 * float(normalizers.mean())
    error = draws.std() / np.sqrt(len(draws))
    assert abs(draws.mean() - expected) < 5.5 * error + 0.02


@pytest.mark.slow
@pytest.mark.parametrize("num_active", [16, 40])
def test_topics_of_a_word_are_all_different(num_active: int) -> None:
    """Also where a document has fewer, or a slot no word; their probabilities are then 0."""
    topics = np.full((64, 12), -40.0)
    topics[np.arange(12), np.arange(12)] = 0.0  # twelve topics have a word each
    topics[12:, 11] = 0.0  # and the others one that no document has
    documents = np.array([[[0, 3], [1, 2], [5, 0]], [[7, 1], [0, 0], [0, 0]]])
    found = lc.TopicDocument(jnp.asarray(topics), 0.1, num_active).posterior(documents)
    ids = np.sort(np.asarray(found.assignments.indices), axis=-1)
    assert ids.shape == (2, 3, num_active) and (np.diff(ids, axis=-1) > 0).all()
    np.testing.assert_array_equal(found.assignments.mode[0, :2], [0, 1])


def test_posterior_needs_one_set_of_topics() -> None:
    with pytest.raises(NotImplementedError, match="one set of topics"):
        lc.TopicDocument(SETS, 0.1, 2).posterior(DOCUMENTS[:2])
    per_document = lc.TopicDocument(SETS[0], jnp.full((2, SETS.shape[1]), 0.1), 2)
    with pytest.raises(NotImplementedError, match="one concentration for all documents"):
        per_document.posterior(DOCUMENTS[:2])


def test_a_document_without_slots_is_empty() -> None:
    likelihood = lc.TopicDocument(SETS[0], 0.1, 2)
    assert likelihood.log_prob(jnp.zeros((3, 0, 2), int)).tolist() == [0.0] * 3
