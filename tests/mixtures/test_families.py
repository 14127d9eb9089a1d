# SPDX-License-Identifier: Apache-2.0
"""Families of components: posteriors, expectations, estimates and normalisers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import numpyro_largecat as lc
from numpyro_largecat.ops.symmetric import log_det, pack, unpack
from tests.mixtures.cases import CASES, COVARIANCE, LOC, natural_parameters, one_hot

FALSE_ALARM = 1e-6  # how often a correct program would fail the random test


def log_evidence(name: str, family: Any, x: np.ndarray) -> float:
    """Log density of one row under the prior, from SciPy."""
    size = np.size(x)
    if name == "zero mean":
        dof = family.strength + 2
        return stats.multivariate_t.logpdf(x, shape=family.strength * COVARIANCE / dof, df=dof)
    if name == "gaussian":
        dof, k = family.strength + 2, family.loc_strength
        shape = family.strength * COVARIANCE * (k + 1) / (k * dof)
        return stats.multivariate_t.logpdf(x, LOC, shape, df=dof)
    if name == "diagonal":
        dof, k = family.strength + 2, family.loc_strength
        scale = np.sqrt(family.strength * np.diag(COVARIANCE) * (k + 1) / (k * dof))
        return stats.t.logpdf(x, dof, LOC, scale).sum()
    if name == "multinomial":
        return stats.dirichlet_multinomial.logpmf(x.astype(int), family.concentration, int(x.sum()))
    assert size == 1
    p = family.rate / (1 + family.rate)
    return stats.nbinom.logpmf(x, family.concentration, p)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("x64")
def test_the_normaliser_gives_the_evidence(name: str) -> None:
    """A(prior + f(x)) - A(prior) + log h(x) is the log density of x, parameters integrated out."""
    family, _, x = CASES[name]
    x = x[::7]

    @jax.jit
    def evidence(rows: Any) -> Any:
        prior = family.prior()
        gain = jax.vmap(family.log_normalizer)(prior + family.features(rows))
        return gain - family.log_normalizer(prior) + family.log_base(rows)

    found = evidence(jnp.asarray(x))
    np.testing.assert_allclose(found, [log_evidence(name, family, row) for row in x], rtol=1e-9)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("objective", ["variational", "map"])
@pytest.mark.usefixtures("x64")
def test_gradients_are_the_expectations_of_textbooks(name: str, objective: str) -> None:
    """f(x) . grad A and f(x) . grad G are expected log densities and those at the estimate."""
    family, reference, x = CASES[name]
    r = one_hot(len(x), 3) * np.linspace(0.1, 1, len(x))[:, None]
    potential = family.log_normalizer if objective == "variational" else family.max_log_density

    @jax.jit
    def log_densities(x: Any, rows: Any) -> Any:
        slopes = jax.vmap(jax.grad(potential))(natural_parameters(family, x, r))
        return family.features(rows) @ slopes.T + family.log_base(rows)[:, None]

    found = log_densities(x, x[::11])
    learnt = [reference.learn(x, r[:, k], objective) for k in range(3)]
    wanted = [[component.log_density(row) for component in learnt] for row in x[::11]]
    np.testing.assert_allclose(found, wanted, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("x64")
@pytest.mark.some_cases(2)
def test_components_are_the_estimates(name: str) -> None:
    """The log density of the NumPyro components is f(x) . grad G + log h(x)."""
    family, _, x = CASES[name]
    if name == "multinomial":
        family, x = (
            lc.mixtures.MultinomialFamily(family.concentration, total_count=7),
            x[x.sum(1) == 7],
        )

    @jax.jit
    def both(rows: Any) -> tuple[Any, Any]:
        natural = natural_parameters(family, rows, one_hot(len(x), 3))
        slopes = jax.vmap(jax.grad(family.max_log_density))(natural)
        log_densities = family.features(rows) @ slopes.T + family.log_base(rows)[:, None]
        return family.components(natural).log_prob(rows[:, None]), log_densities

    found, wanted = both(jnp.asarray(x))
    np.testing.assert_allclose(found, wanted, rtol=1e-9)


@pytest.mark.parametrize("name", ["zero mean", "gaussian", "diagonal"])
@pytest.mark.usefixtures("x64")
@pytest.mark.some_cases(1)
def test_expected_log_density_agrees_with_draws_of_the_posterior(name: str) -> None:
    """A mean over draws from SciPy lies within five standard errors; fails with ``FALSE_ALARM``."""
    family, _, x = CASES[name]
    natural = natural_parameters(family, x, one_hot(len(x), 4)[:, :1])[0]
    row, random, num_draws = x[3], np.random.default_rng(1), 4000
    posterior = family.posterior(natural)
    if name == "diagonal":
        shape = (num_draws, 2)
        tau = random.gamma(posterior.concentration, 1 / posterior.rate, shape)
        mean = random.normal(posterior.loc, 1 / np.sqrt(posterior.loc_strength * tau))
        logs = stats.norm.logpdf(row, mean, 1 / np.sqrt(tau)).sum(1)
    else:
        scale = np.linalg.inv(posterior.inverse_scale)
        phi = stats.wishart.rvs(float(posterior.dof), scale, num_draws, random)
        sigma = np.linalg.inv(phi)
        gap = np.broadcast_to(row, (num_draws, 2))
        if name == "gaussian":
            noise = np.linalg.cholesky(sigma / posterior.loc_strength) @ random.normal(
                size=(num_draws, 2, 1)
            )
            gap = gap - posterior.loc - noise[..., 0]
        square = np.einsum("nd,nde,ne->n", gap, phi, gap)
        logs = 0.5 * (np.linalg.slogdet(phi)[1] - square) - np.log(2 * np.pi)
    features = family.features(jnp.asarray(row[None]))
    expected = features @ jax.jit(jax.grad(family.log_normalizer))(natural)
    found = expected[0] + family.log_base(jnp.asarray(row[None]))[0]
    assert abs(logs.mean() - found) < 5 * logs.std() / num_draws**0.5


@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("x64")
def test_potentials_are_convex(name: str) -> None:
    """So G is a maximum over parameters, and the divergence of k-means++ is not negative."""
    family, _, x = CASES[name]

    @jax.jit
    def potentials(rows: Any) -> Any:
        natural = family.prior() + family.features(rows)
        both = (family.log_normalizer, family.max_log_density)
        return natural, [jax.vmap(jax.value_and_grad(potential))(natural) for potential in both]

    natural, found = jax.tree.map(np.asarray, potentials(x[::5]))
    differ = (natural[None] != natural[:, None]).any(-1)
    assert differ.sum() > 100
    for values, slopes in found:
        steps = natural[None] - natural[:, None]
        gap = values[None] - values[:, None] - np.einsum("bap,bp->ba", steps, slopes)
        assert (gap > -1e-9).all()
        assert (gap[differ] > 1e-6).all()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("x64")
def test_weighted_sum_is_that_of_the_features(name: str) -> None:
    family, _, x = CASES[name]
    weights = np.linspace(0, 1, len(x))
    both = jax.jit(lambda rows: (family.weighted_sum(rows, weights), family.features(rows)))
    found, features = both(x)
    np.testing.assert_allclose(found, weights @ np.asarray(features), rtol=1e-12, atol=1e-9)


def test_a_prior_of_next_to_no_weight_gives_maximum_likelihood() -> None:
    """The estimate is then the mean and covariance of the rows themselves."""
    x = CASES["gaussian"].x
    family, one = lc.mixtures.GaussianFamily(LOC, COVARIANCE, 1e-9, 1e-9), np.ones((len(x), 1))
    estimate = jax.jit(lambda x: family.components(natural_parameters(family, x, one)))
    found = estimate(x)
    np.testing.assert_allclose(found.mean[0], x.mean(0), rtol=1e-4)
    np.testing.assert_allclose(found.covariance_matrix[0], np.cov(x.T, ddof=0), rtol=1e-4)


@pytest.mark.usefixtures("x64")
def test_symmetric_matrices_and_their_log_determinant() -> None:
    """Packing is undone; the gradient of log |A| is its inverse; no inverse is NaN."""
    matrix = np.array([[2.0, 0.5, 0.1], [0.5, 1.0, 0.2], [0.1, 0.2, 3.0]])
    np.testing.assert_array_equal(unpack(pack(matrix)), matrix)
    np.testing.assert_allclose(log_det(jnp.asarray(matrix)), np.linalg.slogdet(matrix)[1])
    gradient = jax.grad(lambda m: log_det(m))(jnp.asarray(matrix))
    np.testing.assert_allclose(gradient, np.linalg.inv(matrix), atol=1e-12)
    assert jnp.isnan(log_det(-jnp.asarray(matrix)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: lc.mixtures.ZeroMeanGaussianFamily(np.ones((2, 2))),
            "positive definite; got a matrix with",
        ),
        (lambda: lc.mixtures.ZeroMeanGaussianFamily(np.ones((2, 3))), "square matrix"),
        (
            lambda: lc.mixtures.ZeroMeanGaussianFamily([[1.0, 0.5], [0, 1]]),
            r"got 0.5 at \(0, 1\) and 0 at",
        ),
        (lambda: lc.mixtures.ZeroMeanGaussianFamily(np.eye(2), 0.0), "`strength` must be positive"),
        (
            lambda: lc.mixtures.GaussianFamily([0.0, np.nan], np.eye(2)),
            "`loc` must be finite; got nan at",
        ),
        (
            lambda: lc.mixtures.GaussianFamily(np.zeros(3), np.eye(2)),
            r"shape \(2,\), a number for each column",
        ),
        (
            lambda: lc.mixtures.GaussianFamily(np.zeros(2), np.eye(2), 1, -1),
            "`loc_strength` must be positive",
        ),
        (
            lambda: lc.mixtures.DiagonalGaussianFamily(np.zeros(2), [1.0, 0]),
            "`variance` must be positive",
        ),
        (lambda: lc.mixtures.MultinomialFamily(1.0), "for each outcome"),
        (lambda: lc.mixtures.MultinomialFamily([1.0, 0.0]), "`concentration` must be positive"),
        (
            lambda: lc.mixtures.MultinomialFamily([1.0], total_count=0),
            "`total_count` must be at least 1",
        ),
        (
            lambda: lc.mixtures.MultinomialFamily([1.0, 1]).components(jnp.ones((1, 2))),
            "needs a total count",
        ),
        (lambda: lc.mixtures.DirichletMixing(0.0), "`concentration` must be positive"),
        (
            lambda: lc.mixtures.DirichletMixing(np.ones(3)),
            r"one number, the sum of .* shape \(3,\)",
        ),
        (lambda: lc.mixtures.StickBreaking([1.0, 2.0]), r"`concentration` must be one number"),
        (
            lambda: lc.mixtures.ZeroMeanGaussianFamily(np.eye(2), np.ones(2)),
            "`strength` must be one number",
        ),
        (lambda: lc.mixtures.StickBreaking([1.0]), r"must be one number, .* got shape \(1,\)"),
        (lambda: lc.mixtures.StickBreaking(-1.0), "`concentration` must be positive"),
    ],
)
def test_bad_priors_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
