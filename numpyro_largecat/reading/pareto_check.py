# SPDX-License-Identifier: Apache-2.0
"""Pareto k-hat of a guide: which classes and rows to look at, and what the ratios say."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from numpyro_largecat.choices.error_families import GUMBEL
from numpyro_largecat.reading.bound_fit import BoundFit
from numpyro_largecat.reading.chunked_utilities import ChunkedUtilities
from numpyro_largecat.reading.findings import Finding
from numpyro_largecat.reading.guide_ratios import (
    Ratios,
    class_ratios,
    pareto_k,
    small_site_ratios,
)
from numpyro_largecat.reading.observed_choice import Observed, RowWeights
from numpyro_largecat.svi.array_batches import ArrayBatches

NUM_CLASSES = 20
NUM_REST = 4  # draws of the rest of the latent values
MOST_NOISE = 0.5  # nats: half a standard deviation of the posterior
MOST_PARETO_K = 0.7


class ParetoCheck(NamedTuple):
    """Pareto k-hat, NaN where the rows are too few to tell."""

    small_sites: float | None = None  # None if the guide draws none
    classes: NDArray[np.float64] | None = None  # (T,); None if it draws no weights of classes

    def findings(self, if_unknown: str) -> list[Finding]:
        """Lines of a diagnosis."""
        findings = []
        if self.small_sites is not None:
            advice = _advice(
                self.small_sites, "give these sites an AutoMultivariateNormal", if_unknown
            )
            findings.append(Finding("Pareto k of the small sites", self.small_sites, None, advice))
        if self.classes is not None:
            known = self.classes[~np.isnan(self.classes)]
            k, share = float("nan"), float("nan")
            if known.size:
                k, share = float(np.median(known)), float((known > MOST_PARETO_K).mean())
            advice = _advice(k, "start the guide wider (`init_scale`)", if_unknown)
            findings += [
                Finding(f"Pareto k of {known.size} classes, median", k, None, advice),
                Finding(f"share of classes above {MOST_PARETO_K}", share),
            ]
        return findings


def pareto_of_rows(
    rng_key: Array, fit: BoundFit, observed: Observed, num_draws: int
) -> ParetoCheck:
    """Look at the guide on the rows of the arguments; at classes only if these are all rows."""
    utilities = ChunkedUtilities(fit, is_drawn=True)
    labels, rows = observed
    chosen = None
    if not rows.is_sampled.any():
        chosen = _choose_classes(rng_key, utilities.num_categories, np.asarray(labels), np.inf)
    return _pareto(rng_key, utilities, rows, chosen, num_draws)


def pareto_of_batches(
    rng_key: Array,
    fit: BoundFit,
    everything: Observed,
    num_categories: int,
    batches: ArrayBatches,
    num_draws: int,
    num_rows: int,
) -> ParetoCheck:
    """Look at the guide on all rows of some classes, and on a sample of the others.

    ``everything`` are the observations of all rows of ``batches``.
    """
    labels = np.asarray(everything.labels)
    chosen = _choose_classes(rng_key, num_categories, labels, num_rows)
    is_own = np.isin(labels, chosen)
    others = np.flatnonzero(~is_own)
    number = min(num_rows, others.size)
    rng = np.random.default_rng(np.asarray(jax.random.bits(rng_key, (4,))))
    ids = np.concatenate([np.flatnonzero(is_own), rng.choice(others, number, replace=False)])
    weights = np.where(is_own[ids], 1.0, others.size / max(number, 1))
    weights = np.where(np.asarray(everything.rows.weights)[ids] > 0, weights, 0.0)
    rows = RowWeights(jnp.asarray(weights), jnp.asarray(weights > 1))
    chosen_rows = fit.followed_by(batches.take(jnp.asarray(ids)))
    utilities = ChunkedUtilities(chosen_rows, is_drawn=True)
    return _pareto(rng_key, utilities, rows, chosen, num_draws)


def _choose_classes(
    rng_key: Array, num_categories: int, labels: NDArray[Any], most_rows: float
) -> NDArray[np.int64]:
    """Classes drawn uniformly from those that do not have too many rows."""
    counts = np.bincount(labels.ravel(), minlength=num_categories)
    classes = np.flatnonzero(counts <= most_rows)
    rng = np.random.default_rng(np.asarray(jax.random.bits(jax.random.fold_in(rng_key, 1), (4,))))
    return np.sort(rng.choice(classes, min(NUM_CLASSES, classes.size), replace=False))


def _pareto(
    rng_key: Array,
    utilities: ChunkedUtilities,
    rows: RowWeights,
    chosen: NDArray[np.int64] | None,
    num_draws: int,
) -> ParetoCheck:
    if utilities.family is not GUMBEL:
        return ParetoCheck()
    small = small_site_ratios(utilities, rows, rng_key, num_draws, NUM_REST)
    classes = None
    if chosen is not None and chosen.size:
        ids = jnp.asarray(chosen, jnp.int32)
        classes = class_ratios(utilities, rows, ids, rng_key, num_draws, NUM_REST)
    return ParetoCheck(
        None if small is None else float(_k(small)[0]), None if classes is None else _k(classes)
    )


def _k(ratios: Ratios) -> NDArray[np.float64]:
    is_known = (ratios.noise < MOST_NOISE) & np.isfinite(ratios.log_ratios).all(axis=1)
    found = np.full(len(is_known), np.nan)
    if is_known.any():
        found[is_known] = pareto_k(ratios.log_ratios[is_known])
    return found


def _advice(k: float, fix: str, if_unknown: str) -> str:
    if np.isnan(k):
        return f"too few rows to tell: {if_unknown}"
    return f"run longer, or {fix}" if k > MOST_PARETO_K else ""
