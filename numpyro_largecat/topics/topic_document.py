# SPDX-License-Identifier: Apache-2.0
"""Documents of a topic model, whose log probability is the best bound over their own variables."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array, lax, random
from jax.typing import ArrayLike
from numpyro.distributions import constraints

from numpyro_largecat._checks import (
    check_broadcasts,
    check_count,
    check_integers,
    check_num_active,
    check_shape,
    is_concrete,
)
from numpyro_largecat.data.corpus import Corpus
from numpyro_largecat.data.corpus_entries import LARGEST_COUNT
from numpyro_largecat.ops.topics.active_search import Effort
from numpyro_largecat.ops.topics.document_bound import document_bound
from numpyro_largecat.ops.topics.document_fit import DocumentFit, fit_documents, may_be_log_probs
from numpyro_largecat.ops.topics.word_topic_counts import word_topics
from numpyro_largecat.top_l.top_l_categorical import TopLCategorical

EXCESS = 0.05  # nats above 0 that rounding to bfloat16 may give to a topic's log sum


class _LogProbTables(constraints.ParameterFreeConstraint):
    """Matrices of numbers below +inf; -inf is a word that a topic does not have."""

    event_dim = 2

    def __call__(self, x: Any) -> Any:
        return ((x == x) & (x < jnp.inf)).all(axis=(-2, -1))


class DocumentPosterior(NamedTuple):
    """The best q(pi) q(z) of documents, as ``TopicDocument.posterior`` gives it.

    The assignments of an empty slot mean nothing: it has no token.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_largecat as lc
        >>> topics = jnp.log(jnp.array([[0.8, 0.1, 0.1], [0.1, 0.1, 0.8]]))
        >>> document = jnp.array([[0, 1], [2, 1], [2, 1]])
        >>> found = lc.TopicDocument(topics, 1.0, num_active=1).posterior(document)
        >>> found.assignments.mode.tolist()
        [0, 1, 1]
        >>> found.frequencies.concentration.tolist()
        [2.0, 3.0]
    """

    frequencies: dist.Dirichlet  # q(pi), batch shape (...)
    assignments: TopLCategorical  # q(z) of a token of each word, batch shape (..., U)


class TopicDocument(dist.Distribution):
    r"""Document of a topic model (LDA) at the best bound over its own latent variables.

    Tokens n of a document have topics z and words x,

    .. math:: \pi \sim \mathrm{Dirichlet}(a), \qquad z_n \sim \mathrm{Categorical}(\pi), \qquad
              \log p(x_n = v \mid z_n = k) = C_{kv},

    and ``log_prob`` is the largest bound of log p(x) with q(z) q(pi), where q(z) gives each
    distinct word at most L topics:

    .. math:: \max_{r, \theta} \; E_q\big[\log p(x, z, \pi) - \log q(z \mid r) q(\pi \mid \theta)
              \big], \qquad \lvert \{k : r_{uk} > 0\} \rvert \le L.

    It is a maximum that coordinate ascent and restarts have found, hence a bound in any case. It
    is of the tokens in an order: the multinomial coefficient of the counts is not in it.

    **Topics** may have any prior: pass ``jnp.log(phi)`` of a Dirichlet ``phi``, or
    ``jax.nn.log_softmax`` of Gaussian scores with covariates. Gradients are exact at the local
    variables found, which are constants for them (envelope theorem); only reverse mode is defined.

    Shapes: ``batch_shape`` is ``topic_log_probs.shape[:-2]`` broadcast with
    ``concentration.shape[:-1]``, and most often (); a value is a document of shape (U, 2), and
    documents (..., U, 2) may have any U, whatever ``event_shape``.

    Cost: O(K V) to read the topics; then for a document of U words O(U K) for up to thirty sweeps
    (sixty if K is at most 128), and O(U A) for each further one, with A the next of 32, 128 (for K
    from 256 on) and K above its active topics.
    A gradient adds O(U A) per document, and one array like ``topic_log_probs``. Memory is O(K) per
    document.

    Args:
        topic_log_probs: C, log probabilities of the words in each topic, shape (..., K, V). Their
            sum over words may be below 1, as of a part of the vocabulary, but not above it.
        concentration: Dirichlet concentration a of topic frequencies, positive: one number for
            each topic, shape (..., K), or the same for all. As for ``fit_topics``, and like
            scikit-learn's ``doc_topic_prior``; the paper's alpha is the sum over topics, 0.5.
        num_active: Largest number L of topics that a word of a document has, a Python int in
            [1, K]. With K it is the bound of dense mean-field inference.
        num_tokens: Length of documents that ``sample`` draws, a Python int. Under SVI leave it at
            1, or make it the U of the documents observed: NumPyro compares the two.
        max_sweeps: Largest number of sweeps until a document is done, at least 10, by tens; as
            many again where a topic was made to leave.
        tolerance: A document is done when no topic's count changes by so many tokens.
        num_restarts: Topics that are proposed to leave a document, smallest first; what does not
            raise its bound is undone.
        validate_args: Also check values, outside ``jit``. Shapes are always checked.

    Raises:
        ValueError: If shapes do not fit, ``num_active`` is not in [1, K], the probabilities of a
            topic sum to more than 1, the topics are on the last axis, a word is not in [0, V), or a
            count is negative. Under ``jit`` values are not known: a document has a log probability
            of NaN if it has such a slot, or one word whose probability is above 1, or two above 1/2
            each, in a topic; so probabilities in place of their logarithms are found.
        TypeError: If documents are not integers.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_largecat as lc
        >>> topics = jnp.log(jnp.array([[0.8, 0.1, 0.1], [0.1, 0.1, 0.8]]))
        >>> document = jnp.array([[0, 4], [1, 1], [0, 0]])  # word 0 four times, word 1 once
        >>> d = lc.TopicDocument(topics, 0.1, num_active=2)
        >>> d.log_prob(document).round(2).item()
        -4.08
        >>> d.fit(document).counts.round(1).tolist()
        [5.0, 0.0]

    References:
        Hughes and Sudderth, Fast Learning of Clusters and Topics via Sparse Posteriors, 2016,
        arXiv:1609.07521, Eqs. 9, 10, 42 to 49 and Alg. 2.
    """

    arg_constraints = {
        "topic_log_probs": _LogProbTables(),
        "concentration": constraints.positive,
    }
    support = constraints.independent(constraints.nonnegative_integer, 2)
    pytree_data_fields = ("topic_log_probs", "concentration", "_effort")
    pytree_aux_fields = ("num_active", "num_tokens")

    def __init__(
        self,
        topic_log_probs: ArrayLike,
        concentration: ArrayLike,
        num_active: int,
        *,
        num_tokens: int = 1,
        max_sweeps: int = 100,
        tolerance: float = 1e-3,
        num_restarts: int = 5,
        validate_args: bool | None = None,
    ) -> None:
        table = jnp.asarray(topic_log_probs)
        if not jnp.issubdtype(table.dtype, jnp.floating):
            table = table.astype(jnp.result_type(float))
        table = table.astype(jnp.promote_types(table.dtype, jnp.float32))  # 16 bits are too few
        need = "topics and words on its last two axes"
        check_shape("`topic_log_probs`", table, (..., "K", "V"), need, least=1)
        _check_sums(table)
        num_topics = table.shape[-2]
        concentration = jnp.asarray(concentration, table.dtype)
        whole = (*concentration.shape[:-1], num_topics)
        check_broadcasts("`concentration`", concentration, whole, "one for each topic")
        self.num_active = check_num_active(num_active, num_topics, "topics")
        self.num_tokens = check_count("num_tokens", num_tokens, 1)
        if is_concrete(max_sweeps):
            check_count("max_sweeps", max_sweeps, 10)
        self.topic_log_probs = table
        self.concentration = jnp.broadcast_to(concentration, whole)
        self._effort = Effort(max_sweeps, tolerance, num_restarts)
        batch_shape = lax.broadcast_shapes(table.shape[:-2], self.concentration.shape[:-1])
        super().__init__(batch_shape, (self.num_tokens, 2), validate_args=validate_args)

    @property
    def num_topics(self) -> int:
        """Number of topics K."""
        return self.topic_log_probs.shape[-2]

    @property
    def num_words(self) -> int:
        """Size of the vocabulary V."""
        return self.topic_log_probs.shape[-1]

    def log_prob(self, value: ArrayLike, intermediates: Any = None) -> Array:
        """Bound of each document, in nats."""
        del intermediates
        return self._over_batch(document_bound, self._check(value))

    def fit(self, value: ArrayLike) -> DocumentFit:
        """Best local variables of documents (..., U, 2): bounds (...), counts and basis (..., K).

        q(pi) is Dirichlet(concentration + counts).
        """
        return self._over_batch(fit_documents, self._check(value))

    def posterior(self, value: ArrayLike) -> DocumentPosterior:
        """q(pi) and q(z) of documents (..., U, 2), for a guide of a model that has these sites.

        They are constants: in a guide, gradients in the topics flow through the model alone.
        Topics and concentration must have no batch shape. Cost: that of ``log_prob``, and O(U A)
        per document.
        """
        if self.batch_shape:
            raise NotImplementedError(
                "`posterior` needs one set of topics and one concentration for all documents; got "
                f"shapes {self.topic_log_probs.shape} and {self.concentration.shape}."
            )
        value = self._check(value)
        fit = self.fit(value)
        words, counts = value[..., 0], value[..., 1]
        shares, topics = word_topics(
            self.topic_log_probs.T,
            self.concentration,
            words.reshape(-1, words.shape[-1]),
            counts.reshape(-1, words.shape[-1]),
            fit.basis.reshape(-1, self.num_topics),
            num_active=self.num_active,
        )
        shape = (*words.shape, self.num_active)
        # What is missing from L topics has no share; an empty slot has any topics.
        logits = jnp.where(counts[..., None] > 0, jnp.log(shares).reshape(shape), 0)
        found = fit.counts, topics.reshape(shape), logits
        topic_counts, topics, logits = lax.stop_gradient(found)
        return DocumentPosterior(
            dist.Dirichlet(lax.stop_gradient(self.concentration) + topic_counts),
            TopLCategorical(topics, logits, self.num_topics, validate_args=False),
        )

    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        """Draw documents of ``num_tokens`` tokens, one slot each; topics are made to sum to 1.

        A draw may have a word in several slots, which has the same bound as one slot with a count.
        """
        frequency_key, topic_key, word_key = random.split(key, 3)
        shape = (*sample_shape, *self.batch_shape)
        frequencies = dist.Dirichlet(self.concentration).expand(self.batch_shape)
        log_frequencies = jnp.log(frequencies.sample(frequency_key, sample_shape))
        z = random.categorical(
            topic_key, log_frequencies[..., None, :], shape=(*shape, self.num_tokens)
        )
        table = jnp.broadcast_to(
            self.topic_log_probs, (*self.batch_shape, *self.topic_log_probs.shape[-2:])
        )
        table = jax.nn.log_softmax(table, axis=-1)
        rows = _take_rows(table, z, len(self.batch_shape))
        words = random.categorical(word_key, rows)
        return jnp.stack([words, jnp.ones_like(words)], axis=-1)

    def _over_batch(self, solve: Any, value: Array) -> Any:
        """Call ``solve`` on the documents of each set of topics; NaN for what is no document."""
        words, word_counts = value[..., 0], value[..., 1]
        own = len(self.batch_shape)
        batch_shape = lax.broadcast_shapes(self.batch_shape, value.shape[:-2])
        is_checked = is_concrete(self.topic_log_probs)

        def of_documents(table: Array, concentration: Array, words: Array, counts: Array) -> Any:
            shape = words.shape[:-1]
            words, counts = (x.reshape(-1, x.shape[-1]) for x in (words, counts))
            is_slot = ((words >= 0) & (words < self.num_words) & (counts >= 0)) | (counts == 0)
            is_good = is_slot.all(axis=-1)
            words = jnp.clip(words, 0, self.num_words - 1)
            counts = jnp.maximum(counts, 0)
            if not is_checked:
                is_good &= may_be_log_probs(table.T, words, counts, EXCESS)
            found = solve(table.T, concentration, words, counts, self.num_active, self._effort)

            def or_nan(x: Array) -> Array:
                good = is_good.reshape(-1, *[1] * (x.ndim - 1))
                return jnp.where(good, x, jnp.nan).reshape(*shape, *x.shape[1:])

            return jax.tree.map(or_nan, found)

        if not own:
            return of_documents(self.topic_log_probs, self.concentration, words, word_counts)
        # Documents of one set of topics together, sets one by one.
        lead = len(batch_shape) - own
        sets = batch_shape[lead:]
        tables = jnp.broadcast_to(
            self.topic_log_probs, (*self.batch_shape, *self.topic_log_probs.shape[-2:])
        ).reshape(-1, self.num_topics, self.num_words)
        concentrations = jnp.broadcast_to(
            self.concentration, (*self.batch_shape, self.num_topics)
        ).reshape(-1, self.num_topics)
        which = jnp.arange(len(tables)).reshape(self.batch_shape)
        which = jnp.broadcast_to(which, sets).ravel()

        def split(x: Array) -> Array:
            x = jnp.broadcast_to(x, (*batch_shape, x.shape[-1]))
            return jnp.moveaxis(x.reshape(*batch_shape[:lead], -1, x.shape[-1]), lead, 0)

        def of_set(inputs: tuple[Array, Array, Array]) -> Any:
            index, words, word_counts = inputs
            return of_documents(tables[index], concentrations[index], words, word_counts)

        found = lax.map(of_set, (which, split(words), split(word_counts)))
        return jax.tree.map(
            lambda x: jnp.moveaxis(x, 0, lead).reshape(*batch_shape, *x.shape[1 + lead :]), found
        )

    def _check(self, value: ArrayLike) -> Array:
        if isinstance(value, Corpus):
            raise TypeError(
                "`value` must be an array of documents, `corpus.values()`; got a Corpus."
            )
        check_integers("value", value)
        need = "documents with word and count of each slot"
        check_shape("`value`", value, (..., "U", 2), need)
        if is_concrete(value):
            check_documents(np.asarray(value), self.num_words)
        value = jnp.asarray(value)
        if value.shape[-2] == 0:  # one empty slot
            value = jnp.zeros((*value.shape[:-2], 1, 2), value.dtype)
        return value.astype(jnp.promote_types(value.dtype, jnp.int32))


def _check_sums(table: Array) -> None:
    """Raise ValueError where a topic's probabilities sum to more than 1, or words' instead to 1."""
    if not is_concrete(table):
        return
    with jax.ensure_compile_time_eval():  # a constant may be known inside of `jit`
        log_sums, of_words = (np.asarray(_log_sums(table, axis)) for axis in (-1, -2))
    if (np.abs(of_words) <= EXCESS).all() and (log_sums < -EXCESS).any():
        raise ValueError(
            "`topic_log_probs` must have words on its last axis, (..., K, V); got shape "
            f"{table.shape}, where each column sums to 1, and not each row. Pass the transpose."
        )
    bad = log_sums > EXCESS
    if bad.any():
        place = tuple(int(i) for i in np.argwhere(bad)[0])
        raise ValueError(
            "`topic_log_probs` must be log probabilities, with a logsumexp of at most 0; got "
            f"{log_sums[place]:.4g} for topic {_name((*place, 0))}. Of probabilities pass "
            "`jnp.log(phi)`, and of scores `jax.nn.log_softmax(scores)`."
        )


@partial(jax.jit, static_argnames="axis")
def _log_sums(table: Array, axis: int) -> Array:
    return jax.nn.logsumexp(table, axis=axis)


def check_documents(value: np.ndarray, num_words: int) -> None:
    """Raise ValueError at the first slot with a bad count, or a word that does not exist."""
    words, counts = value[..., 0], value[..., 1]
    is_word = (words >= 0) & (words < num_words)
    for bad, need in (
        (counts < 0, "counts must be at least 0"),
        (counts > LARGEST_COUNT, f"counts must be at most {LARGEST_COUNT}"),
        (
            (counts > 0) & ~is_word,
            f"words, which count from 0, must be integers in [0, {num_words})",
        ),
    ):
        if bad.any():
            place = tuple(int(i) for i in np.argwhere(bad)[0])
            raise ValueError(
                f"{need}; got word {words[place]} with count {counts[place]}"
                f"{f' in document {_name(place)}' * (len(place) > 1)}, and {int(bad.sum())} slots "
                "like it."
            )


def _name(place: tuple[int, ...]) -> str:
    """Which document a slot is in."""
    return str(place[0]) if len(place) == 2 else str(place[:-1])


def _take_rows(table: Array, z: Array, num_batch_axes: int) -> Array:
    """Rows of (batch, K, V) at z of shape (sample, batch, n), (sample, batch, n, V)."""
    take = partial(jnp.take, axis=0)
    for _ in range(num_batch_axes):
        take = jax.vmap(take)
    samples = z.reshape(-1, *z.shape[-1 - num_batch_axes :])
    rows = jax.vmap(lambda z: take(table, z))(samples)
    return rows.reshape(*z.shape, table.shape[-1])
