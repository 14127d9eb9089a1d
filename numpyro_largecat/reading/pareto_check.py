# SPDX-License-Identifier: Apache-2.0
"""Pareto k-hat of a guide: which classes and rows to look at, and what the ratios say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from numpyro_largecat.choices.error_families import GUMBEL
from numpyro_largecat.handlers.chunk_noise import InnerNoise
from numpyro_largecat.handlers.closed_over_arrays import compiled
from numpyro_largecat.reading.chunked_utilities import ChunkedUtilities
from numpyro_largecat.reading.guide_ratios import (
    Ratios,
    RowWeights,
    class_ratios,
    pareto_k,
    rows_of_site,
    small_site_ratios,
)
from numpyro_largecat.svi.array_batches import ArrayBatches

NUM_CLASSES = 20
NUM_REST = 4  # draws of the rest of the latent values
MOST_NOISE = 0.5  # nats: half a standard deviation of the posterior


class ParetoCheck(NamedTuple):
    """Pareto k-hat, NaN where the rows are too few to tell."""

    small_sites: float | None  # None if the guide draws none
    classes: NDArray[np.float64] | None  # (T,); None if the guide draws no weights of classes


class Fitted(NamedTuple):
    """A model and its guide, and how to evaluate them chunk by chunk."""

    model: Callable[..., Any]
    guide: Callable[..., Any]
    params: dict[str, Any]
    kwargs: dict[str, Any]
    site: str
    plate: str
    chunk_size: int

    def utilities(self, args: tuple[Any, ...]) -> ChunkedUtilities:
        """The model on these arguments."""
        model, guide, params, kwargs, site, plate, chunk_size = self
        return ChunkedUtilities(model, guide, params, args, kwargs, site, plate, chunk_size)

    def observed(self, args: tuple[Any, ...]) -> tuple[Array, RowWeights]:
        """Observed classes, and how much each weighs in the model; no utility is formed."""

        def look(args: tuple[Any, ...]) -> tuple[Array, RowWeights]:
            utilities, key = self.utilities(args), jax.random.key(0)
            site = utilities.traces(0, 1, key, InnerNoise(key, frozenset()))[1][self.site]
            rows = rows_of_site(site)
            return jnp.broadcast_to(site["value"], rows.weights.shape), rows

        return compiled(look)(args)


def check_rows(
    rng_key: Array, fitted: Fitted, args: tuple[Any, ...], num_draws: int
) -> ParetoCheck | None:
    """Look at the guide with the rows in ``args``; at classes only if these are all rows."""
    labels, rows = fitted.observed(args)
    utilities = fitted.utilities(args)
    if utilities.family is not GUMBEL:
        return None
    chosen = None
    if not rows.is_sampled.any():
        chosen = _choose_classes(rng_key, utilities.num_categories, np.asarray(labels), np.inf)
    return _check(rng_key, utilities, rows, chosen, num_draws)


def check_batches(
    rng_key: Array,
    fitted: Fitted,
    args: tuple[Any, ...],
    batches: ArrayBatches,
    num_draws: int,
    num_rows: int,
) -> ParetoCheck | None:
    """Look at the guide with all rows of some classes, and with a sample of the others."""
    rows = jnp.arange(1)
    num_categories = fitted.utilities((*args, *batches.take(rows))).num_categories
    labels = np.asarray(fitted.observed((*args, *batches.take(jnp.arange(batches.size))))[0])
    chosen = _choose_classes(rng_key, num_categories, labels, num_rows)
    is_own = np.isin(labels, chosen)
    others = np.flatnonzero(~is_own)
    number = min(num_rows, others.size)
    rng = np.random.default_rng(np.asarray(jax.random.bits(rng_key, (4,))))
    ids = np.concatenate([np.flatnonzero(is_own), rng.choice(others, number, replace=False)])
    weights = np.where(is_own[ids], 1.0, others.size / max(number, 1))
    all_args = (*args, *batches.take(jnp.asarray(ids)))
    in_model = fitted.observed(all_args)[1].weights  # 0 where the model masks a row
    rows_of_all = RowWeights(jnp.where(in_model > 0, weights, 0.0), jnp.asarray(weights > 1))
    utilities = fitted.utilities(all_args)
    if utilities.family is not GUMBEL:
        return None
    return _check(rng_key, utilities, rows_of_all, chosen, num_draws)


def _choose_classes(
    rng_key: Array, num_categories: int, labels: NDArray[Any], most_rows: float
) -> NDArray[np.int64]:
    """Classes drawn uniformly from those that do not have too many rows."""
    counts = np.bincount(labels.ravel(), minlength=num_categories)
    classes = np.flatnonzero(counts <= most_rows)
    rng = np.random.default_rng(np.asarray(jax.random.bits(jax.random.fold_in(rng_key, 1), (4,))))
    return np.sort(rng.choice(classes, min(NUM_CLASSES, classes.size), replace=False))


def _check(
    rng_key: Array,
    utilities: ChunkedUtilities,
    rows: RowWeights,
    chosen: NDArray[np.int64] | None,
    num_draws: int,
) -> ParetoCheck:
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
