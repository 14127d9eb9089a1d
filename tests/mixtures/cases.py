# SPDX-License-Identifier: Apache-2.0
"""The families that all tests of conjugate learning run through, with their references."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array
from jax.scipy.special import gammaln
from numpy.typing import NDArray
from scipy import stats

import numpyro_largecat as lc
from numpyro_largecat.mixtures.global_step import Statistics
from tests import reference_mixtures as reference


class PoissonFamily(lc.mixtures.ConjugateFamily):
    """A user's own family: Poisson counts, shape (N,), with a Gamma prior."""

    def __init__(self, concentration: float, rate: float) -> None:
        self.concentration, self.rate = float(concentration), float(rate)

    def prior(self) -> Array:
        return jnp.stack([jnp.asarray(self.rate), jnp.asarray(self.concentration)])

    def features(self, x: Array) -> Array:
        return jnp.stack([jnp.ones_like(x), x], axis=-1)

    def log_base(self, x: Array) -> Array:
        return -gammaln(x + 1)

    def log_normalizer(self, natural: Array) -> Array:
        return gammaln(natural[1]) - natural[1] * jnp.log(natural[0])

    def max_log_density(self, natural: Array) -> Array:
        return natural[1] * jnp.log(natural[1] / natural[0]) - natural[1]

    def components(self, natural: Array) -> dist.Distribution:
        return dist.Poisson(natural[:, 1] / natural[:, 0])


class Poisson(NamedTuple):
    """Its reference."""

    concentration: float
    rate: float

    def learn(
        self, x: reference.Floats, r: reference.Floats, objective: str
    ) -> reference.Component:
        a0, b0 = self.concentration, self.rate
        a, b = a0 + r @ x, b0 + r.sum()
        mean, expected_log = a / b, reference.digamma(a) - np.log(b)
        if objective == "map":
            prior = a0 * np.log(mean) - b0 * mean
            return reference.Component(lambda row: float(stats.poisson.logpmf(row, mean)), prior)
        at_mean = stats.gamma.logpdf(mean, a, scale=1 / b) - stats.gamma.logpdf(
            mean, a0, scale=1 / b0
        )
        kl = at_mean + (a - a0) * (expected_log - np.log(mean))
        return reference.Component(
            lambda row: float(
                stats.poisson.logpmf(row, mean) + row * (expected_log - np.log(mean))
            ),
            -float(kl),
        )


class Case(NamedTuple):
    """A family, its reference, and rows that it may have made."""

    family: lc.mixtures.ConjugateFamily
    reference: Any
    x: NDArray[np.float64]  # (60, ...)


COVARIANCE = np.array([[1.0, 0.3], [0.3, 0.5]])
LOC = np.array([0.5, -1.0])


def _rows() -> dict[str, NDArray[np.float64]]:
    random = np.random.default_rng(0)
    centres = np.array([[0, 0], [4, 1], [-3, 3], [1, -4]])
    points = centres.repeat(15, axis=0) + random.normal(size=(60, 2))
    scales = np.array([0.3, 1, 3, 9]).repeat(15)[:, None]
    probs = random.dirichlet(np.full(5, 0.5), 4).repeat(15, axis=0)
    return {
        "points": points,
        "scaled": scales * random.normal(size=(60, 2)) @ np.linalg.cholesky(COVARIANCE).T,
        "counts": np.array([random.multinomial(m, p) for m, p in enumerate(probs)], float),
        "rates": random.poisson(np.array([1.0, 5, 20, 60]).repeat(15)).astype(float),
    }


ROWS = _rows()
CASES = {
    "zero mean": Case(
        lc.mixtures.ZeroMeanGaussianFamily(COVARIANCE, 1.5),
        reference.ZeroMean(COVARIANCE, 1.5),
        ROWS["scaled"],
    ),
    "gaussian": Case(
        lc.mixtures.GaussianFamily(LOC, COVARIANCE, 1.5, 0.2),
        reference.FullGaussian(LOC, COVARIANCE, 1.5, 0.2),
        ROWS["points"],
    ),
    "diagonal": Case(
        lc.mixtures.DiagonalGaussianFamily(LOC, np.diag(COVARIANCE), 1.5, 0.2),
        reference.Diagonal(LOC, np.diag(COVARIANCE), 1.5, 0.2),
        ROWS["points"],
    ),
    "multinomial": Case(
        lc.mixtures.MultinomialFamily(np.array([0.3, 0.5, 1, 2, 0.1])),
        reference.Multinomial(np.array([0.3, 0.5, 1, 2, 0.1])),
        ROWS["counts"],
    ),
    "poisson": Case(PoissonFamily(1.5, 0.2), Poisson(1.5, 0.2), ROWS["rates"]),
}
MIXING = {
    "dirichlet": (
        lc.mixtures.DirichletMixing(2.0),
        lambda n, o: reference.learn_dirichlet(2.0, n, o),
    ),
    "sticks": (lc.mixtures.StickBreaking(2.0), lambda n, o: reference.learn_sticks(2.0, n, o)),
}


def one_hot(num_rows: int, num_components: int) -> NDArray[np.float64]:
    """Rows dealt to components in turn."""
    return np.eye(num_components)[np.arange(num_rows) % num_components]


def natural_parameters(family: lc.mixtures.ConjugateFamily, x: Any, r: Any) -> Array:
    """Of the posterior given responsibilities (N, K), in float64."""
    features = family.features(jnp.asarray(x))
    return family.prior() + jnp.asarray(r).T @ features


def summed(family: lc.mixtures.ConjugateFamily, x: Any, r: Any) -> Statistics:
    """Statistics of responsibilities (N, K)."""
    with jax.enable_x64(True):
        features = np.asarray(family.features(jnp.asarray(x)))
    return Statistics(np.asarray(r).sum(0), np.asarray(r).T @ features)
