# SPDX-License-Identifier: Apache-2.0
"""Slow, obvious NumPy versions of L-sparse posteriors and mixtures, in float64."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from scipy.special import logsumexp


def objective(q: Any, log_weights: Any) -> float:
    """Local bound sum_k q_k W_k - q_k log q_k (Eq. 5); an outcome with q_k = 0 adds nothing."""
    return sum(p * (w - math.log(p)) for p, w in zip(q, log_weights, strict=True) if p > 0)


def supports(num_categories: int, size: int) -> Iterator[tuple[int, ...]]:
    """Every set of ``size`` outcomes."""
    return itertools.combinations(range(num_categories), size)


def on_support(support: Any, log_weights: Any) -> np.ndarray:
    """Best q that has mass on ``support`` alone."""
    log_weights = np.asarray(log_weights, np.float64)
    q = np.zeros(len(log_weights))
    total = logsumexp([log_weights[k] for k in support])
    for k in support:
        q[k] = math.exp(log_weights[k] - total)
    return q


def best_sparse(log_weights: Any, num_active: int) -> tuple[np.ndarray, float]:
    """Best q with ``num_active`` outcomes and its objective, by trying every support (Eq. 8)."""
    candidates = [on_support(s, log_weights) for s in supports(len(log_weights), num_active)]
    values = [objective(q, log_weights) for q in candidates]
    return candidates[int(np.argmax(values))], max(values)


def mixture_bound(log_prior: Any, log_densities: Any, num_active: int) -> np.ndarray:
    """Bound of each observation: ``log_prior`` (..., K) and ``log_densities`` (N, K)."""
    weights = np.asarray(log_prior, np.float64) + np.asarray(log_densities, np.float64)
    return np.array([best_sparse(row, num_active)[1] for row in weights])


def finite_difference(fn: Callable[[np.ndarray], float], x: Any, step: float = 1e-5) -> np.ndarray:
    """Central differences of ``fn`` in each entry of ``x``."""
    x = np.asarray(x, np.float64)
    slope = np.zeros(x.shape)
    for i in np.ndindex(x.shape):
        moved = [x.copy(), x.copy()]
        moved[0][i] += step
        moved[1][i] -= step
        slope[i] = (fn(moved[0]) - fn(moved[1])) / (2 * step)
    return slope
