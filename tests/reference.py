# SPDX-License-Identifier: Apache-2.0
"""Slow, obvious NumPy versions of the package's equations, in float64."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from scipy.special import log_ndtr


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


LOG_DENSITIES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "gumbel": lambda e: -e - np.exp(-e),
    "normal": lambda e: -0.5 * e**2 - 0.5 * math.log(2 * math.pi),
    "logistic": lambda e: -e - 2 * np.logaddexp(0, -e),
}
LOG_CDFS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "gumbel": lambda e: -np.exp(-e),
    "normal": log_ndtr,
    "logistic": lambda e: -np.logaddexp(0, -e),
}


def choice_log_joint(utilities: Any, label: int, noise: str, error: Any) -> Any:
    """log phi(e) + sum_{k != y} log Phi(e + psi_y - psi_k)."""
    utilities = np.asarray(utilities, np.float64)
    terms = [
        LOG_CDFS[noise](error + utilities[label] - psi)
        for k, psi in enumerate(utilities)
        if k != label
    ]
    return LOG_DENSITIES[noise](error) + sum(terms)


def choice_log_prob(utilities: Any, label: int, noise: str) -> float:
    """log of the integral of the joint over the error, on a fine grid; for moderate utilities.

    The joint is analytic and vanishes at the ends, so steps of 0.006 leave an error of 1e-11.
    """
    error = np.linspace(-40, 80, 20_001)
    with np.errstate(over="ignore"):
        joint = choice_log_joint(utilities, label, noise, error)
    highest = joint.max()
    return float(highest + np.log(np.exp(joint - highest).sum() * (error[1] - error[0])))


def log_sigmoid(x: float) -> float:
    """-log(1 + exp(-x)), also where exp overflows."""
    return -math.log1p(math.exp(-x)) if x > 0 else x - math.log1p(math.exp(x))


def one_vs_each(utilities: Any, row: int, weights: Any = None, together: Any = ()) -> float:
    """One-vs-each bound for the class in ``row``, with the rows ``together`` in one softmax."""
    weights = np.ones(len(utilities)) if weights is None else weights
    distances = float(utilities[row]) - np.asarray(utilities, np.float64)
    others = [k for k in range(len(utilities)) if k != row]
    kept = 1 + sum(math.exp(-distances[k]) for k in others if k in together)
    return -math.log(kept) + sum(
        weights[k] * log_sigmoid(distances[k]) for k in others if k not in together
    )


def bouchard_bound(utilities: Any, row: int, alpha: float, weights: Any = None) -> float:
    """psi_y - alpha - sum_k w_k log(1 + exp(psi_k - alpha))."""
    weights = np.ones(len(utilities)) if weights is None else weights
    above = np.asarray(utilities, np.float64) - alpha
    return above[row] + sum(w * log_sigmoid(-a) for w, a in zip(weights, above, strict=True))


def best_alpha(utilities: Any) -> float:
    """The alpha with sum_k sigmoid(psi_k - alpha) = 1, by bisection.

    The sigmoid of the highest utility is taken to the other side, 1 - sigmoid(x) = sigmoid(-x).
    """
    *rest, top = sorted(float(psi) for psi in utilities)
    low, high = min(rest), top + math.log(len(utilities))
    for _ in range(100):
        middle = (low + high) / 2
        total = sum(math.exp(log_sigmoid(psi - middle)) for psi in rest)
        if total > math.exp(log_sigmoid(middle - top)):
            low = middle
        else:
            high = middle
    return low


def noise_contrastive(
    utilities: Any, row: int, noise: float, log_normalizer: float = 0.0, weights: Any = None
) -> float:
    """Log odds against noise that hits each class ``noise`` times on average."""
    weights = np.ones(len(utilities)) if weights is None else weights
    log_ratios = np.asarray(utilities, np.float64) - log_normalizer - math.log(noise)
    return log_sigmoid(log_ratios[row]) + sum(
        noise * w * log_sigmoid(-a) for w, a in zip(weights, log_ratios, strict=True)
    )


def mean_over_noise(utilities: Any, label: int, num_noise: int, log_normalizer: float) -> float:
    """Textbook noise-contrastive estimation, averaged over all equally likely noise samples."""
    num_categories = len(utilities)

    def log_odds(k: int) -> float:
        noise_prob = 1 / num_categories
        return float(utilities[k]) - log_normalizer - math.log(num_noise * noise_prob)

    draws = list(itertools.product(range(num_categories), repeat=num_noise))
    in_noise = [sum(log_sigmoid(-log_odds(k)) for k in draw) for draw in draws]
    return log_sigmoid(log_odds(label)) + sum(in_noise) / len(draws)


def sampled_normalizer_log_prob(
    utilities: Any, label_row: int, sampled_rows: Any, probs: Any
) -> float:
    """psi_y - log Z_hat, with the terms of Z other than exp(psi_y) sampled and divided by probs."""
    z_hat = math.exp(utilities[label_row])
    for row, prob in zip(sampled_rows, probs, strict=True):
        z_hat += math.exp(utilities[row]) / prob
    return float(utilities[label_row]) - math.log(z_hat)
