# SPDX-License-Identifier: Apache-2.0
"""How good predictions of the most probable classes are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import logsumexp

from numpyro_largecat._checks import check_count, check_integers, check_shape
from numpyro_largecat.reading.predictions import TopClasses


def score_predictions(
    top: TopClasses,
    obs: ArrayLike,
    log_likelihood: ArrayLike | None = None,
    *,
    mask: ArrayLike | None = None,
    at: Sequence[int] = (1, 5),
    num_bins: int = 10,
) -> dict[str, float]:
    r"""Score the most probable classes of N observations against the observed ones.

    - ``accuracy``: how often the most probable class is observed. Left out if an observation has
      several labels; see ``precision at 1`` then.
    - ``precision at n``: the share of the n most probable classes that are observed, on average.
      With one label for each observation it is at most 1 / n.
    - ``recall at n``: the share of an observation's labels that are among its n most probable
      classes, on average.
    - ``nDCG at n``: discounted gain of the n most probable, relative to the best order,
      :math:`\sum_{r \le n} \mathrm{hit}_r / \log_2(r + 1)` over
      :math:`\sum_{r \le \min(n, \text{labels})} 1 / \log_2(r + 1)`.
    - ``reciprocal rank``: the mean of 1 / rank of the most probable class that is observed, 0 where
      none of ``top`` is.
    - ``calibration error``: the distance between the probability of the most probable class and how
      often it is observed, in bins of equal count by that probability, averaged over
      observations. A calibrated model of finite data does not reach 0. Left out if an observation
      has several labels: the probabilities of a choice are of one of them, not of any.
    - ``log likelihood``: the mean of ``log_likelihood`` in nats; over draws, of the log of the mean
      probability.

    Cost: O(N num_top) for each of ``at``, and a sort of all labels.

    Args:
        top: What ``top_classes`` returns for N observations.
        obs: Observed classes, integers: shape (N,), or (N, R) for up to R labels of each
            observation, padded with -1.
        log_likelihood: What ``log_likelihood`` returns for them, shape (N,) or (num_draws, N).
        mask: Which observations count, booleans of shape (N,), as the model masks them: what it
            masks has the log likelihood 0, and any label. All of them by default.
        at: Ranks n, each in [1, num_top].
        num_bins: Bins of the calibration error, at least 1.

    Returns:
        The scores by name.

    Raises:
        ValueError: If shapes do not match, an observation has no label, a rank is more than the
            number of classes in ``top``, or ``mask`` leaves nothing.
        TypeError: If ``obs`` are not integers.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_largecat as lc
        >>> top = lc.TopClasses(jnp.array([[4, 2], [7, 1]]), jnp.log(jnp.array([[0.5, 0.4]] * 2)))
        >>> scores = lc.score_predictions(top, jnp.array([4, 1]), at=[2])
        >>> scores["accuracy"], scores["recall at 2"], scores["reciprocal rank"]
        (0.5, 1.0, 0.75)
    """
    check_integers("obs", obs)
    classes = np.asarray(top.classes)
    num_top = check_count("number of classes in `top`", int(classes.shape[-1]), 1)
    log_probs, labels = np.asarray(top.log_probs), np.asarray(obs)
    if log_likelihood is not None:
        log_likelihood = _log_predictive(log_likelihood, classes.shape[:-1])
    if mask is not None:
        is_there = _checked_mask(mask, classes.shape[:-1])
        _check_labels_of(labels, classes)
        classes, log_probs, labels = (x[is_there] for x in (classes, log_probs, labels))
        log_likelihood = None if log_likelihood is None else log_likelihood[is_there]
    labels, num_labels = _labels_and_numbers(labels, classes)
    if max(at, default=0) > num_top or min(at, default=1) < 1:
        raise ValueError(f"`at` must be ranks in [1, {num_top}], the classes in `top`; got {at}.")
    hits = _are_labels(classes, labels)
    has_one = bool((num_labels == 1).all())
    scores = {"accuracy": float(hits[..., 0].mean())} if has_one else {}
    scores |= _scores_at(at, hits, num_labels)
    first = np.where(hits.any(axis=-1), hits.argmax(axis=-1) + 1, np.inf)
    scores["reciprocal rank"] = float((1 / first).mean())
    if has_one:
        probabilities = np.exp(log_probs[..., 0])
        scores["calibration error"] = _calibration_error(probabilities, hits[..., 0], num_bins)
    if log_likelihood is not None:
        scores["log likelihood"] = float(log_likelihood.mean())
    return scores


def _checked_mask(mask: ArrayLike, shape: tuple[int, ...]) -> NDArray[np.bool_]:
    is_there = np.asarray(mask, bool)
    check_shape("`mask`", is_there, shape, "an entry for each observation")
    if not is_there.any():
        raise ValueError("`mask` leaves no observation to score.")
    return is_there


def _labels_and_numbers(
    labels: NDArray[np.integer], classes: NDArray[np.integer]
) -> tuple[NDArray[np.integer], NDArray[np.int64]]:
    """The labels of each observation in order, shape (..., R), and how many differ."""
    _check_labels_of(labels, classes)
    if labels.ndim == classes.ndim - 1:
        labels = labels[..., None]
    labels = np.sort(labels, axis=-1)
    is_new = np.diff(labels, axis=-1, prepend=-1) > 0  # a label that is given twice counts once
    num_labels = ((labels >= 0) & is_new).sum(axis=-1)
    if (num_labels == 0).any():
        raise ValueError(
            f"observation {np.argmin(num_labels)} of `obs` has no label; leave out those without, "
            "by `mask`."
        )
    return labels, num_labels


def _check_labels_of(labels: NDArray[np.integer], classes: NDArray[np.integer]) -> None:
    shapes = {classes.shape[:-1], (*classes.shape[:-1], *labels.shape[-1:])}
    if labels.shape not in shapes:
        need = "one label, or one row of labels, for each observation"
        got = f"shape {labels.shape} for predictions of shape {classes.shape}"
        raise ValueError(f"`obs` must have {need}; got {got}.")


def _scores_at(
    at: Sequence[int], hits: NDArray[np.bool_], num_labels: NDArray[np.int64]
) -> dict[str, float]:
    """What counts the first n classes, for each n, by what of them is observed, (..., num_top)."""
    discounts = 1 / np.log2(np.arange(hits.shape[-1]) + 2)
    best = np.cumsum(np.append(0, discounts))
    scores = {}
    for n in at:
        gain = (hits[..., :n] * discounts[:n]).sum(axis=-1)
        scores[f"precision at {n}"] = float(hits[..., :n].mean())
        scores[f"recall at {n}"] = float((hits[..., :n].sum(axis=-1) / num_labels).mean())
        scores[f"nDCG at {n}"] = float((gain / best[np.minimum(n, num_labels)]).mean())
    return scores


def _log_predictive(log_likelihood: ArrayLike, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """That of observations of this ``shape``; over draws, the log of the mean probability."""
    log_probs = np.asarray(log_likelihood, np.float64)
    if log_probs.ndim == len(shape) + 1:
        log_probs = logsumexp(log_probs, axis=0) - np.log(len(log_probs))
    need = "an entry for each observation, or for each draw and observation"
    check_shape("`log_likelihood`", log_probs, shape, need)
    return log_probs


def _are_labels(classes: NDArray[np.integer], labels: NDArray[np.integer]) -> NDArray[np.bool_]:
    """Whether each class (..., n) is a label (..., R) of its observation; -1 is none."""
    shape, num_top = classes.shape, classes.shape[-1]
    size = max(int(classes.max(initial=0)), int(labels.max(initial=0))) + 1
    rows = size * np.arange(classes.size // num_top, dtype=np.int64)[:, None]
    own = (rows + labels.reshape(len(rows), -1))[labels.reshape(len(rows), -1) >= 0]
    hits = np.isin(rows + classes.reshape(len(rows), num_top), own)
    return hits.reshape(shape) & (classes >= 0)


def calibration_bins(
    probabilities: ArrayLike, correct: ArrayLike, num_bins: int
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]]:
    """Mean probability, how often it came true, and the count, in bins of equal count."""
    probabilities, correct = np.ravel(probabilities), np.ravel(correct).astype(float)
    parts = np.array_split(np.argsort(probabilities, kind="stable"), num_bins)
    bins = [part for part in parts if part.size]
    predicted = np.array([probabilities[b].mean() for b in bins])
    observed = np.array([correct[b].mean() for b in bins])
    return predicted, observed, np.array([b.size for b in bins])


def _calibration_error(probabilities: ArrayLike, correct: ArrayLike, num_bins: int) -> float:
    num_bins = check_count("num_bins", num_bins, 1)
    predicted, observed, counts = calibration_bins(probabilities, correct, num_bins)
    return float(np.abs(predicted - observed) @ counts / counts.sum())
