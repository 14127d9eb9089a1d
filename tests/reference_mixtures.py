# SPDX-License-Identifier: Apache-2.0
"""Slow and obvious mixtures: textbook posteriors, expectations and KL divergences, in loops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import stats
from scipy.special import digamma

Floats = NDArray[np.float64]
LOG_2PI = np.log(2 * np.pi)


class Component(NamedTuple):
    """One component after it has seen weighted rows, under one objective."""

    log_density: Callable[[Floats], float]  # expected, or at the estimate
    prior_term: float  # minus KL from the prior, or log of the prior's pseudo-observations


def wishart_log_det(dof: float, inverse_scale: Floats) -> float:
    """Expectation of log |Phi|."""
    size = len(inverse_scale)
    total = sum(digamma((dof + 1 - d) / 2) for d in range(1, size + 1))
    return float(total + size * np.log(2) - np.log(np.linalg.det(inverse_scale)))


def wishart_kl(dof: float, inverse_scale: Floats, dof0: float, inverse_scale0: Floats) -> float:
    """KL divergence of two Wishart densities, from their log densities at the mean.

    Their difference is linear in Phi and log |Phi|, so only the latter needs a correction.
    """
    mean = dof * np.linalg.inv(inverse_scale)
    at_mean = stats.wishart.logpdf(mean, dof, np.linalg.inv(inverse_scale))
    at_mean -= stats.wishart.logpdf(mean, dof0, np.linalg.inv(inverse_scale0))
    gap = wishart_log_det(dof, inverse_scale) - np.log(np.linalg.det(mean))
    return float(at_mean + (dof - dof0) / 2 * gap)


def dirichlet_kl(a: Floats, a0: Floats) -> float:
    """KL divergence of two Dirichlet densities, from their log densities at the mean."""
    mean = a / a.sum()
    at_mean = stats.dirichlet.logpdf(mean, a) - stats.dirichlet.logpdf(mean, a0)
    gap = digamma(a) - digamma(a.sum()) - np.log(mean)
    return float(at_mean + ((a - a0) * gap).sum())


@dataclass
class ZeroMean:
    """Gaussian with mean zero, Wishart prior."""

    covariance: Floats
    strength: float

    def learn(self, x: Floats, r: Floats, objective: str) -> Component:
        size, count = x.shape[1], r.sum()
        dof0, b0 = self.strength + size + 1, self.strength * self.covariance
        b = b0 + sum(r[n] * np.outer(x[n], x[n]) for n in range(len(x)))
        if objective == "map":
            sigma = b / (self.strength + count)
            density = stats.multivariate_normal(np.zeros(size), sigma)
            phi = np.linalg.inv(sigma)
            prior = (
                self.strength
                / 2
                * (np.log(np.linalg.det(phi)) - np.trace(phi @ b0) / self.strength)
            )
            return Component(density.logpdf, float(prior))
        dof = dof0 + count
        log_det, phi = wishart_log_det(dof, b), dof * np.linalg.inv(b)
        return Component(
            lambda row: (log_det - size * LOG_2PI - row @ phi @ row) / 2,
            -wishart_kl(dof, b, dof0, b0),
        )


@dataclass
class FullGaussian:
    """Gaussian with unknown mean and covariance, normal-Wishart prior."""

    loc: Floats
    covariance: Floats
    strength: float
    loc_strength: float

    def learn(self, x: Floats, r: Floats, objective: str) -> Component:
        size, count = x.shape[1], r.sum()
        dof0, b0, k0, m0 = (
            self.strength + size + 1,
            self.strength * self.covariance,
            self.loc_strength,
            self.loc,
        )
        k = k0 + count
        m = (k0 * m0 + sum(r[n] * x[n] for n in range(len(x)))) / k
        b = b0 + k0 * np.outer(m - m0, m - m0)
        b = b + sum(r[n] * np.outer(x[n] - m, x[n] - m) for n in range(len(x)))
        if objective == "map":
            sigma = b / (self.strength + count)
            phi = np.linalg.inv(sigma)
            prior = self.strength / 2 * np.log(np.linalg.det(phi)) - np.trace(phi @ b0) / 2
            prior -= k0 / 2 * (m - m0) @ phi @ (m - m0)
            return Component(stats.multivariate_normal(m, sigma).logpdf, float(prior))
        dof = dof0 + count
        log_det, phi = wishart_log_det(dof, b), dof * np.linalg.inv(b)
        of_mean = k0 * (m - m0) @ phi @ (m - m0) + size * (k0 / k - 1 - np.log(k0 / k))
        return Component(
            lambda row: (log_det - size * LOG_2PI - size / k - (row - m) @ phi @ (row - m)) / 2,
            float(-of_mean / 2 - wishart_kl(dof, b, dof0, b0)),
        )


@dataclass
class Diagonal:
    """Gaussian with independent columns: a ``FullGaussian`` of one column for each."""

    loc: Floats
    variance: Floats
    strength: float
    loc_strength: float

    def learn(self, x: Floats, r: Floats, objective: str) -> Component:
        columns = [
            FullGaussian(
                self.loc[d : d + 1],
                self.variance[d : d + 1, None],
                self.strength,
                self.loc_strength,
            ).learn(x[:, d : d + 1], r, objective)
            for d in range(x.shape[1])
        ]
        return Component(
            lambda row: sum(c.log_density(row[d : d + 1]) for d, c in enumerate(columns)),
            sum(c.prior_term for c in columns),
        )


@dataclass
class Multinomial:
    """Counts with a Dirichlet prior."""

    concentration: Floats

    def learn(self, x: Floats, r: Floats, objective: str) -> Component:
        a = self.concentration + sum(r[n] * x[n] for n in range(len(x)))
        if objective == "map":
            phi = a / a.sum()
            return Component(
                lambda row: float(stats.multinomial.logpmf(row, int(row.sum()), phi)),
                float((self.concentration * np.log(phi)).sum()),
            )
        expected, mean = digamma(a) - digamma(a.sum()), a / a.sum()
        return Component(
            lambda row: float(
                stats.multinomial.logpmf(row, int(row.sum()), mean)
                + row @ (expected - np.log(mean))
            ),
            -dirichlet_kl(a, self.concentration),
        )


def learn_dirichlet(concentration: float, counts: Floats, objective: str) -> tuple[Floats, float]:
    """Expected log weights, or those at the estimate, and the prior term."""
    a0 = np.full(len(counts), concentration / len(counts))
    a = a0 + counts
    if objective == "map":
        log_weights = np.log(a / a.sum())
        return log_weights, float(a0 @ log_weights)
    return digamma(a) - digamma(a.sum()), -dirichlet_kl(a, a0)


def learn_sticks(
    concentration: float, counts: Floats, objective: str, order: Any = None
) -> tuple[Floats, float]:
    """The same for K sticks of a Dirichlet process, taken in ``order``, by default by size."""
    order = np.argsort(-counts, kind="stable") if order is None else order
    log_weights, prior_term, log_left = np.zeros(len(counts)), 0.0, 0.0
    for place, k in enumerate(order):
        a, b = 1 + counts[k], concentration + counts[list(order[place + 1 :])].sum()
        if objective == "map":
            of_v, of_rest = np.log(a / (a + b)), np.log(b / (a + b))
            prior_term += of_v + concentration * of_rest
        else:
            of_v, of_rest = digamma(a) - digamma(a + b), digamma(b) - digamma(a + b)
            prior_term -= dirichlet_kl(np.array([a, b]), np.array([1, concentration]))
        log_weights[k] = log_left + of_v
        log_left += of_rest
    return log_weights, prior_term


class State(NamedTuple):
    """After a pass."""

    responsibilities: Floats  # (N, K), from the posterior before this pass
    log_weights: Floats  # (N, K), under the posterior after it
    objective: float


def coordinate_ascent(
    family: Any,
    learn_weights: Callable[[Floats, str], tuple[Floats, float]],
    x: Floats,
    r: Floats,
    num_active: int,
    objective: str,
    num_passes: int,
) -> list[State]:
    """Global steps and L-sparse local steps in turn, from responsibilities ``r``, (N, K)."""
    states = []
    for _ in range(num_passes + 1):
        weights, of_weights = learn_weights(r.sum(0), objective)
        components = [family.learn(x, r[:, k], objective) for k in range(r.shape[1])]
        w = np.array(
            [[weights[k] + c.log_density(row) for k, c in enumerate(components)] for row in x]
        )
        log_r = np.log(np.where(r > 0, r, 1))
        value = (r * (w - log_r)).sum() + of_weights + sum(c.prior_term for c in components)
        states.append(State(r, w, float(value)))
        r = sparse_responsibilities(w, num_active)
    return states[1:]


def sparse_responsibilities(log_weights: Floats, num_active: int) -> Floats:
    """Softmax over the L largest of each row, of equal ones the first."""
    r = np.zeros_like(log_weights)
    for n, row in enumerate(log_weights):
        best = np.argsort(-row, kind="stable")[:num_active]
        r[n, best] = np.exp(row[best] - row[best].max())
    return r / r.sum(1, keepdims=True)
