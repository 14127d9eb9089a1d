# SPDX-License-Identifier: Apache-2.0
"""Slow, obvious NumPy versions of the package's equations, in float64."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np


def eta_star(utilities: Any, label: int) -> float:
    """sum_k exp(psi_k - psi_y), the label's own term included."""
    utilities = np.asarray(utilities, np.float64)
    return sum(math.exp(psi - utilities[label]) for psi in utilities)


def softmax_log_prob(utilities: Any, label: int) -> float:
    """psi_y - log sum_k exp(psi_k), for utilities that exp can hold."""
    return -math.log(eta_star(utilities, label))


def softmax_log_probs(utilities: Any, labels: Any) -> np.ndarray:
    """``softmax_log_prob`` of each row: utilities (..., K) and labels (...)."""
    result = np.empty(np.shape(labels))
    for i in np.ndindex(np.shape(labels)):
        result[i] = softmax_log_prob(np.asarray(utilities)[i], int(np.asarray(labels)[i]))
    return result


def softmax_bound(utilities: Any, label: int, u: float) -> float:
    """1 - u - exp(-u) sum_k exp(psi_k - psi_y)."""
    return 1 - u - math.exp(-u) * eta_star(utilities, label)


def weighted_eta(utilities: Any, indices: Any, weights: Any, label: int) -> float:
    """sum_m w_m exp(psi_m - psi_y), with utilities (M,) of the classes ``indices``."""
    utilities = np.asarray(utilities, np.float64)
    psi_y = next(psi for psi, k, w in zip(utilities, indices, weights, strict=True) if k == label)
    return sum(w * math.exp(psi - psi_y) for psi, w in zip(utilities, weights, strict=True))


def others_of(labels: Sequence[int], num_categories: int) -> list[int]:
    """List the classes that are not labels."""
    return [k for k in range(num_categories) if k not in set(map(int, labels))]


def weighted_subsets(
    labels: Sequence[int], num_categories: int, num_sampled: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Every subset that a class plate may draw, each as (classes, weights): labels come first."""
    present = sorted(set(map(int, labels)))
    others = others_of(labels, num_categories)
    size = min(num_sampled, len(others))
    for drawn in itertools.combinations(others, size):
        weights = [1.0] * len(present) + [len(others) / max(size, 1)] * size
        yield np.array([*present, *drawn], int), np.array(weights)


def mean_over_subsets(
    estimate: Callable[[np.ndarray, np.ndarray], Any],
    labels: Sequence[int],
    num_categories: int,
    num_sampled: int,
) -> Any:
    """Expectation of ``estimate(classes, weights)``: its mean over all equally likely subsets."""
    values = [
        estimate(classes, weights)
        for classes, weights in weighted_subsets(labels, num_categories, num_sampled)
    ]
    return sum(values) / len(values)
