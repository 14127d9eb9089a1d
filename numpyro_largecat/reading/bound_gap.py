# SPDX-License-Identifier: Apache-2.0
"""How far the bound of a fit is below the exact log likelihood."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from jax import Array, lax
from numpyro.handlers import replay, seed, substitute, trace

from numpyro_largecat.handlers.shared_rows import TouchedRows, share_rows
from numpyro_largecat.handlers.without_draws import at_centre, at_feasible_values
from numpyro_largecat.reading.bound_fit import BoundFit
from numpyro_largecat.reading.chunked_utilities import ChunkedUtilities
from numpyro_largecat.reading.findings import Finding
from numpyro_largecat.reading.observed_choice import Observed
from numpyro_largecat.reading.predictions import labels_of_rows, log_likelihood

MOST_GAP = 0.05  # nats per observation


def bound_gap(fit: BoundFit, observed: Observed, keys: Array) -> Finding:
    """The gap for each observation on average, of those that are not masked.

    Both at the centre of the guide; the bound over draws of classes, one for each key.
    """
    utilities = ChunkedUtilities(fit)
    bounds = np.asarray(_bounds(fit, utilities.site, keys), np.float64)
    labels, rows = observed
    exact = log_likelihood(utilities, labels_of_rows(labels, utilities), None)
    is_there = np.asarray(rows.weights) > 0
    gaps = np.where(is_there, np.asarray(exact) - bounds, 0)
    by_draw = gaps.reshape(len(keys), -1).sum(axis=1) / is_there.sum()
    gap, error = by_draw.mean(), by_draw.std(ddof=1) / len(keys) ** 0.5
    lags = gap - 2 * error > MOST_GAP
    advice = "visit rows more often, or take a tighter bound" if lags else ""
    return Finding("exact log likelihood less bound", gap, error, advice)


def _bounds(fit: BoundFit, site: str, keys: Array) -> Array:
    """The log probability of the choice at the centre of the guide, shape (T, ...)."""

    def of_draw(key: Array) -> Any:
        touched = TouchedRows()

        def run(fn: Callable[..., Any]) -> Any:
            return substitute(seed(share_rows(fn, touched), key), data=fit.params)

        trace(at_feasible_values(run(fit.model))).get_trace(*fit.args, **fit.kwargs)
        guide_sites = trace(at_centre(run(fit.guide))).get_trace(*fit.args, **fit.kwargs)
        model = replay(run(fit.model), guide_sites)
        choice = trace(model).get_trace(*fit.args, **fit.kwargs)[site]
        return choice["fn"].log_prob(choice["value"])

    return lax.map(of_draw, keys)
