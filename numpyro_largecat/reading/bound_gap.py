# SPDX-License-Identifier: Apache-2.0
"""How far the bound of a fit is below the exact log likelihood."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from jax import Array, lax

from numpyro_largecat.choices.augmented_categorical import AugmentedCategorical
from numpyro_largecat.choices.baselines.noise_contrastive import NoiseContrastive
from numpyro_largecat.choices.bounds.gaussian_utility_bound import GaussianUtilityBound
from numpyro_largecat.handlers.closed_over_arrays import run_compiled
from numpyro_largecat.handlers.run_model import at_centre, at_values_or_centre
from numpyro_largecat.handlers.sites import base_distribution
from numpyro_largecat.handlers.static_result import static_result
from numpyro_largecat.handlers.touched_rows import TouchedRows
from numpyro_largecat.reading.bound_fit import BoundFit
from numpyro_largecat.reading.chunked_utilities import ChunkedUtilities
from numpyro_largecat.reading.findings import Finding
from numpyro_largecat.reading.observed_choice import Observed
from numpyro_largecat.reading.predictions import labels_of_rows, log_likelihood

MOST_GAP = 0.05  # nats per observation
LARGE_GAP = 1.0  # whatever its error, which may be as large where few classes are all of a sum
NO_BOUNDS = AugmentedCategorical, GaussianUtilityBound, NoiseContrastive


def bound_gap(fit: BoundFit, observed: Observed, keys: Array) -> list[Finding]:
    """The gap for each observation on average, of those that are not masked.

    Both at the centre of the guide; the bound over draws of classes, one for each key. None of what
    is no bound there: Gaussian utilities have an expectation over the posterior, a latent error a
    probability given its value, and noise contrast a loss.
    """
    utilities = ChunkedUtilities.of(fit)
    if _is_no_bound(fit, utilities.site):
        return []
    bounds = np.asarray(_bounds(fit, utilities.site, keys), np.float64)
    labels, rows = observed
    exact = log_likelihood(utilities, labels_of_rows(labels, utilities), None)
    is_there = np.asarray(rows.weights) > 0
    gaps = np.where(is_there, np.asarray(exact) - bounds, 0)
    by_draw = gaps.reshape(len(keys), -1).sum(axis=1) / is_there.sum()
    gap, error = by_draw.mean(), by_draw.std(ddof=1) / len(keys) ** 0.5
    kept = {f"{utilities.site}_{suffix}" for suffix in ("u", "error")} & fit.params.keys()
    return [Finding("exact log likelihood less bound", gap, error, advice_of_gap(gap, error, kept))]


def advice_of_gap(gap: float, error: float, kept: set[str]) -> str:
    """What to do about a gap, of a fit that keeps these local variables."""
    if gap + 2 * error < -MOST_GAP:  # no bound is, so draws of the classes miss those that matter
        return "seldom drawn classes matter: raise `num_sampled`, or take a FrequencyProposal"
    if gap - 2 * error < MOST_GAP and gap < LARGE_GAP:
        return ""
    advice = "take more steps, larger minibatches, or a larger `num_sampled`"
    if kept:
        advice += f"; or `init_params` of this fit without `{min(kept)}`, which then begins anew"
    return advice


def _is_no_bound(fit: BoundFit, site: str) -> bool:
    def found() -> bool:
        choice = fit.sites(fit.model)[site]
        return isinstance(base_distribution(choice["fn"]), NO_BOUNDS)

    return static_result(found)


def _bounds(fit: BoundFit, site: str, keys: Array) -> Array:
    """The log probability of the choice at the centre of the guide, shape (T, ...)."""

    def of_draw(key: Array) -> Any:
        run = partial(fit.sites, touched=TouchedRows(), rng_key=key)
        run(fit.model)  # which rows the plates hold
        in_guide = run(fit.guide, around=at_centre)
        choice = run(fit.model, around=at_values_or_centre(in_guide))[site]
        return choice["fn"].log_prob(choice["value"])

    found: Array = run_compiled(partial(lax.map, of_draw), keys)
    return found
