# SPDX-License-Identifier: Apache-2.0
"""Whether parts of a guide cover the model: which to look at, and what their ratios say."""

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
from numpyro_largecat.reading.remedies import Remedies
from numpyro_largecat.reading.spread_of_parts import draws_needed, sd_shares
from numpyro_largecat.svi.array_batches import ArrayBatches

NUM_CLASSES = 20
NUM_REST = 4  # draws of the rest of the latent values
MOST_NOISE = 0.5  # nats: half a standard deviation of the posterior
MOST_PARETO_K = 0.7
MOST_LOG_SD = 0.5  # of a positive value: its 95 percent interval spans a factor of 7
LEAST_SHARE = 0.8  # of a standard deviation
SHARE = "sd over that of the best Gaussian"


class PartsCheck(NamedTuple):
    """Pareto k-hat and spread of parts of the guide, NaN where the rows are too few to tell."""

    small_sites: float | None = None  # k; None if the guide draws none
    classes: NDArray[np.float64] | None = None  # k (T,); None if it draws no weights of classes
    small_shares: dict[str, float] | None = None  # least share of the sd, by site
    log_sds: dict[str, float] | None = None  # greatest sd of the log of positive sites, by site
    class_shares: NDArray[np.float64] | None = None  # of the sd (T,), mean over a row
    why_unknown: str = ""  # of the small sites, if it is not that the rows are few
    why_no_shares: str = ""  # of the small sites, if their k is known
    small_noise: float = 0.0  # nats that the sampled rows bring into the ratios of the small sites
    rows_needed: int | None = None  # for the small sites, where the rows are sampled and too few
    num_rows: int = 0  # of the data, where they are

    def of_weighted_rows(self) -> PartsCheck:
        """Without what compares small sites with the model at rows of one draw each.

        Where the loss weighs rows, small sites have what these leave open too.
        """
        if self.small_sites is None:
            return self
        why = "not told where the loss weighs draws of rows, as ImportanceWeighted_ELBO"
        unknown = self._replace(small_sites=np.nan, small_shares=None, why_no_shares="")
        return unknown._replace(why_unknown=why)

    def findings(self, if_unknown: str, remedies: Remedies) -> list[Finding]:
        """Lines of a diagnosis."""
        findings = []
        if self.small_sites is not None:
            needed = self.rows_needed
            enough = if_unknown if needed is None else f"give `num_rows={needed}` or more"
            if needed is not None and 2 * needed > self.num_rows:
                enough = f"`num_rows={needed}` would do, which is most of all {self.num_rows}"
            advice = self.why_unknown or _advice(self.small_sites, remedies.small_sites, enough)
            findings.append(Finding("Pareto k of the small sites", self.small_sites, None, advice))
        for name, share in (self.small_shares or {}).items():
            fix = "give what moves all classes as `follow` of `sample_choice`; or "
            advice = _advice_of_share(share, fix + remedies.small_sites)
            findings.append(Finding(f"{SHARE}, {name}", share, None, advice))
        if self.why_no_shares:
            advice = f"not told: {self.why_no_shares}"
            findings.append(Finding(f"{SHARE}, small sites", np.nan, None, advice))
        for name, log_sd in (self.log_sds or {}).items():
            advice = (
                "may be 0: if it is a scale of rows, see ImportanceWeighted_ELBO and AutoRowNormal"
                * (log_sd > MOST_LOG_SD)
            )
            findings.append(Finding(f"sd of log {name}", log_sd, None, advice))
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
        shares = np.array([]) if self.class_shares is None else self.class_shares
        shares = shares[~np.isnan(shares)]
        if shares.size:
            share = float(np.median(shares))
            advice = _advice_of_share(share, remedies.rows)
            findings.append(Finding(f"{SHARE}, {shares.size} classes", share, None, advice))
        return findings


def check_on_rows(rng_key: Array, fit: BoundFit, observed: Observed, num_draws: int) -> PartsCheck:
    """Look at the guide on the rows of the arguments; at classes only if these are all rows."""
    utilities = ChunkedUtilities.of(fit, is_drawn=True)
    chosen, labels = None, np.asarray(observed.labels)
    if not observed.rows.is_sampled.any():
        chosen = _choose_classes(rng_key, utilities.num_categories, labels, np.inf)
    return _check(rng_key, utilities, observed, chosen, num_draws)


def check_on_batches(
    rng_key: Array,
    fit: BoundFit,
    everything: Observed,
    num_categories: int,
    batches: ArrayBatches,
    num_draws: int,
    num_rows: int,
) -> PartsCheck:
    """Look at the guide on all rows of some classes, and on a sample of the others.

    ``everything`` are the observations of all rows of ``batches``, see ``observed_in_batches``.
    """
    labels, weights = np.asarray(everything.labels), np.asarray(everything.rows.weights)
    axis = everything.rows.axis
    chosen = _choose_classes(rng_key, num_categories, labels, num_rows)
    by_row = np.moveaxis(labels, axis, 0).reshape(batches.size, -1)
    is_own = np.asarray(np.isin(by_row, chosen).any(axis=1))
    others = np.flatnonzero(~is_own)
    number = min(num_rows, others.size)
    rng = np.random.default_rng(np.asarray(jax.random.bits(rng_key, (4,))))
    ids = np.concatenate([np.flatnonzero(is_own), rng.choice(others, number, replace=False)])
    of_rows = np.where(is_own[ids], 1.0, others.size / max(number, 1))
    weights = np.take(weights, ids, axis)
    along = np.moveaxis(of_rows.reshape(-1, *[1] * (labels.ndim - 1)), 0, axis)
    stands_for = np.broadcast_to(along, weights.shape)
    rows = RowWeights(jnp.asarray(stands_for * weights), jnp.asarray(stands_for), axis)
    chosen_rows = fit.followed_by(batches.take(jnp.asarray(ids)))
    utilities = ChunkedUtilities.of(chosen_rows, is_drawn=True)
    own = Observed(jnp.asarray(np.take(labels, ids, axis)), rows)
    found = _check(rng_key, utilities, own, chosen, num_draws)
    needed = _rows_needed(found.small_noise, number, others.size)
    return found._replace(rows_needed=needed if needed > number else None, num_rows=batches.size)


def _rows_needed(noise: float, number: int, num_others: int) -> int:
    """Of so many rows, from a sample's noise, how many bring noise that is less than the most.

    Its square goes with 1 / n - 1 / N, as that of the sum of N from n.
    """
    if not noise >= MOST_NOISE or number == 0:
        return number
    least = (0.9 * MOST_NOISE / noise) ** 2 * (1 / number - 1 / num_others)
    return int(np.ceil(1 / (1 / num_others + least)))


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
    observed: Observed,
    chosen: NDArray[np.int64] | None,
    num_draws: int,
) -> PartsCheck:
    if utilities.family is not GUMBEL:
        return PartsCheck()
    small = small_site_ratios(utilities, observed, rng_key, num_draws, NUM_REST, MOST_NOISE)
    found = PartsCheck()
    if small is not None:
        log_sds = {
            name: float(small.drawn.values[name][0].std(axis=0).max()) for name in small.positive
        }
        k, of_sites = float(_k(small)[0]), _small_shares(small)
        why = "" if of_sites or np.isnan(k) else _why_no_shares(small)
        found = PartsCheck(
            k, None, of_sites, log_sds, None, small.why_unknown, why, float(small.noise[0])
        )
    if chosen is not None and chosen.size:
        ids = jnp.asarray(chosen, jnp.int32)
        classes = class_ratios(utilities, observed, ids, rng_key, num_draws, NUM_REST)
        if classes is not None:
            shares = np.array([part.mean() if part.size else np.nan for part in _shares(classes)])
            found = found._replace(classes=_k(classes), class_shares=shares)
    return found


def _shares(ratios: Ratios) -> list[NDArray[np.float64]]:
    """Standard deviations over those of the best Gaussian, (d,) for each part; NaN if unknown."""
    log_ratios, noise, (by_site, log_guide), *_ = ratios
    values = [np.empty((*log_ratios.shape, 0))]
    values += [value.reshape(*log_ratios.shape, -1) for value in by_site.values()]
    parts = zip(np.concatenate(values, axis=-1), log_guide, log_ratios, strict=True)
    is_known = (noise < MOST_NOISE) & np.isfinite(log_ratios + log_guide).all(axis=1)
    return [
        sd_shares(*part) if known else np.full(part[0].shape[1], np.nan)
        for part, known in zip(parts, is_known, strict=True)
    ]


def _small_shares(ratios: Ratios) -> dict[str, float]:
    """The least share of each site, of the values that are known."""
    (shares,) = _shares(ratios)
    values = ratios.drawn.values
    ends = np.cumsum([value[0, 0].size for value in values.values()], dtype=int)
    by_site = dict(zip(values, np.split(shares, ends), strict=False))  # the last part is empty
    return {name: float(of.min()) for name, of in by_site.items() if not np.isnan(of).any()}


def _why_no_shares(ratios: Ratios) -> str:
    """Why standard deviations are not compared; nothing of sites that are too large for it."""
    values, log_guide = ratios.drawn
    num_draws = ratios.log_ratios.shape[1]
    size = sum(value[0, 0].size for value in values.values())
    if not size or np.isnan(log_guide).any():
        return ""
    if num_draws < draws_needed(size):
        return f"{size} values need `num_draws={draws_needed(size)}`"
    return f"the model is not seen to curve down in all of {size} directions: give more `num_draws`"


def _k(ratios: Ratios) -> NDArray[np.float64]:
    is_known = (ratios.noise < MOST_NOISE) & np.isfinite(ratios.log_ratios).all(axis=1)
    found = np.full(len(is_known), np.nan)
    if is_known.any():
        found[is_known] = pareto_k(ratios.log_ratios[is_known])
    return found


def _advice_of_share(share: float, fix: str) -> str:
    if share < LEAST_SHARE:
        return f"too narrow: run longer, or {fix}"
    return "not settled: run longer" if share > 1 / LEAST_SHARE else ""


def _advice(k: float, fix: str, if_unknown: str) -> str:
    if np.isnan(k):
        return f"too few rows to tell: {if_unknown}"
    return f"run longer, or {fix}" if k > MOST_PARETO_K else ""
