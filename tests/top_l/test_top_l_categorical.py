# SPDX-License-Identifier: Apache-2.0
"""A categorical that stores L of K outcomes is the dense one with the others at zero."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax.test_util import check_grads
from numpyro import handlers
from numpyro.distributions.kl import kl_divergence
from scipy.special import log_softmax
from scipy.stats import chisquare

import numpyro_largecat as lc
from tests.memory import temp_bytes

FALSE_ALARM = 1e-5
NUM_CATEGORIES = 6
INDICES = np.array([[4, 0, 2], [5, 1, 3]])
LOGITS = np.array([[0.3, -1.0, 2.0], [1.0, 0.0, -np.inf]], np.float32)
VALUES = np.arange(NUM_CATEGORIES)[:, None]


def dense_log_probs():
    """Log probabilities of all outcomes, shape (6, 2)."""
    table = np.full((NUM_CATEGORIES, 2), -np.inf)
    for n in range(2):
        table[INDICES[n], n] = log_softmax(LOGITS[n].astype(np.float64))
    return table


def make(indices=INDICES, logits=LOGITS, **options):
    return lc.TopLCategorical(indices, logits, NUM_CATEGORIES, **options)


@pytest.mark.smoke
def test_log_prob_of_every_outcome():
    d = make()
    assert (d.batch_shape, d.event_shape) == ((2,), ())
    np.testing.assert_allclose(d.log_prob(VALUES), dense_log_probs(), rtol=1e-5)
    np.testing.assert_allclose(jnp.exp(d.log_prob(VALUES)).sum(0), 1, rtol=1e-6)


def test_the_order_of_the_stored_outcomes_changes_nothing():
    order = np.array([2, 0, 1])
    d = make(INDICES[:, order], LOGITS[:, order])
    np.testing.assert_allclose(d.log_prob(VALUES), dense_log_probs(), rtol=1e-5)


def test_entropy_and_kl_are_those_of_the_dense_one():
    table = np.exp(dense_log_probs())
    log_table = np.log(np.where(table > 0, table, 1))
    entropy = -(table * log_table).sum(0)
    np.testing.assert_allclose(make().entropy(), entropy, rtol=1e-5)
    q = np.random.default_rng(1).dirichlet(np.ones(NUM_CATEGORIES), size=2)
    expected = (table * (log_table - np.log(q.T))).sum(0)
    logits = np.log(q) + 3  # any constant may be added
    for other in (dist.Categorical(probs=q), dist.Categorical(logits=logits)):
        np.testing.assert_allclose(kl_divergence(make(), other), expected, rtol=1e-5)
        np.testing.assert_allclose(kl_divergence(make(), other.expand((4, 2)))[3], expected, 1e-5)
    shared = (table * (log_table - np.log(q[0])[:, None])).sum(0)
    found = kl_divergence(make(), dist.Categorical(probs=q[0]))
    np.testing.assert_allclose(found, shared, rtol=1e-5)
    found = kl_divergence(make().expand((2, 2)), dist.Categorical(logits=logits[0]))
    np.testing.assert_allclose(found, [shared, shared], rtol=1e-5)


def test_kl_is_infinite_only_where_mass_is_lost():
    missing = np.array([1, 1, 0, 1, 1, 1]) / 5  # outcome 2, which the first stores
    found = kl_divergence(make(), dist.Categorical(probs=missing))
    np.testing.assert_array_equal(np.isinf(found), [True, False])
    never = np.array([1, 1, 1, 0, 1, 1]) / 5  # outcome 3, of weight zero in the second
    assert np.isfinite(kl_divergence(make(), dist.Categorical(probs=never))).all()


def test_kl_to_other_outcomes_is_refused():
    """A table that is too short would be read at places that it does not have."""
    for other in (dist.Categorical(probs=np.ones(4) / 4), dist.Categorical(logits=np.zeros(4))):
        with pytest.raises(
            ValueError, match=r"\(\.\.\., 6\), .* the TopLCategorical; got shape \(4,\)"
        ):
            kl_divergence(make(), other)


def test_draws_follow_the_probabilities():
    """A correct sampler fails with probability FALSE_ALARM: chi-squared, two batch entries."""
    draws = make().sample(jax.random.key(3), (4000,))
    assert draws.shape == (4000, 2)
    for n in range(2):
        counts = np.bincount(draws[:, n], minlength=NUM_CATEGORIES)
        expected = 4000 * np.exp(dense_log_probs()[:, n])
        stored = expected > 0
        assert counts[~stored].sum() == 0
        assert chisquare(counts[stored], expected[stored]).pvalue > FALSE_ALARM / 2


def test_mode_probs_and_support():
    d = make()
    np.testing.assert_array_equal(d.mode, [2, 5])
    np.testing.assert_allclose(d.probs.sum(-1), 1, rtol=1e-6)
    assert d.support(jnp.array([0, 5, 6, -1])).tolist() == [True, True, False, False]
    assert d.support.is_discrete
    assert np.isnan(d.mean).all()
    assert np.isnan(d.variance).all()


@pytest.mark.slow
def test_batches_of_indices_and_logits_broadcast():
    d = lc.TopLCategorical(INDICES[0], np.zeros((3, 1, 3)), NUM_CATEGORIES)
    assert d.batch_shape == (3, 1)
    assert d.sample(jax.random.key(0), (5,)).shape == (5, 3, 1)
    assert d.entropy().shape == d.mode.shape == d.log_prob(2).shape == (3, 1)
    assert kl_divergence(d, dist.Categorical(probs=np.ones(6) / 6)).shape == (3, 1)


@pytest.mark.slow
def test_gradients_agree_with_finite_differences(x64):
    q = dist.Categorical(logits=np.arange(6.0))

    def total(logits):
        d = make(logits=logits)
        return d.log_prob(np.array([2, 5])).sum() + (d.entropy() + kl_divergence(d, q)).sum()

    check_grads(total, (jnp.array(LOGITS).at[1, 2].set(-0.5),), order=1, modes=["rev"])


def test_weights_of_zero_and_missing_outcomes_give_finite_gradients():
    def total(logits):
        d = make(logits=logits)
        log_prob = d.log_prob(np.array([1, 3]))  # not stored, and of weight zero
        uniform = dist.Categorical(probs=np.ones(6) / 6)
        return (jnp.exp(log_prob) + d.entropy() + kl_divergence(d, uniform)).sum()

    assert np.isfinite(jax.grad(total)(jnp.array(LOGITS))).all()


def test_cost_does_not_follow_the_number_of_categories():
    def all_of_it(num_categories, indices, logits, key):
        d = lc.TopLCategorical(indices, logits, num_categories)
        return d.log_prob(indices[:, 0]) + d.entropy() + d.sample(key)

    args = jnp.zeros((100, 4), int), jnp.zeros((100, 4)), jax.random.key(0)
    small, large = (temp_bytes(partial(all_of_it, k), *args) for k in (10, 10**9))
    assert small == large


def test_in_a_model():
    """As prior of a site, and as what a discrete site is conditioned on."""

    def model():
        with numpyro.plate("data", 2):
            return numpyro.sample("z", make())

    sites = handlers.trace(handlers.seed(model, 0)).get_trace()
    assert all(z in row for z, row in zip(sites["z"]["value"], INDICES, strict=True))


@pytest.mark.parametrize(
    ("indices", "logits", "num_categories", "error", "message"),
    [
        ([2, 2], np.zeros(2), 9, ValueError, "must be distinct .* got 2 at position 1"),
        ([[1, 2], [9, 0]], np.zeros(2), 9, ValueError, r"got 9 at position \(1, 0\)"),
        ([-1, 0], np.zeros(2), 9, ValueError, "got -1 at position 0"),
        ([1, 2], [0.0, np.nan], 9, ValueError, "got nan at position 1"),
        ([1, 2], [np.inf, 0.0], 9, ValueError, "got inf at position 0"),
        ([1, 2], np.zeros(3), 9, ValueError, "must have the same last axis"),
        (1, 0.0, 9, ValueError, "must have the same last axis"),
        ([1, 0, 2], np.zeros(3), 2, ValueError, "from one to `num_categories` outcomes, 2"),
        (np.zeros((3, 0), int), np.zeros((3, 0)), 2, ValueError, "from one to `num_categories`"),
        ([0], np.zeros(1), 0, ValueError, "`num_categories` must be at least 1"),
        ([0], np.zeros(1), 2.0, TypeError, "`num_categories` must be a Python int"),
        ([0.0], np.zeros(1), 2, TypeError, "`indices` must be integers"),
        ([0], np.zeros(1, int), 2, TypeError, "`logits` must be floats"),
    ],
)
def test_bad_input_is_refused(indices, logits, num_categories, error, message):
    with pytest.raises(error, match=message):
        lc.TopLCategorical(np.array(indices), np.array(logits), num_categories)


def test_what_cannot_be_looked_at_under_jit():
    """Repeated outcomes add up; one that is out of range makes everything NaN."""
    find = jax.jit(lambda i: make(i, np.zeros(2)).log_prob(np.array([3, 4])))
    np.testing.assert_allclose(find(np.array([3, 3])), [0, -np.inf])
    np.testing.assert_array_equal(find(np.array([3, 6])), np.nan)
    entropy = jax.jit(lambda i: make(i, np.zeros(2)).entropy())
    np.testing.assert_allclose(entropy(np.array([3, 3])), np.log(2), rtol=1e-6)
    assert np.isnan(entropy(np.array([-1, 3])))


def test_a_repeated_outcome_adds_up_if_values_are_not_checked():
    d = make(np.array([3, 3]), np.zeros(2), validate_args=False)
    np.testing.assert_allclose(d.log_prob(3), 0, atol=1e-6)


def test_enumeration_is_refused():
    with pytest.raises(NotImplementedError, match="sum over `indices` with the weights `probs`"):
        make().enumerate_support()
