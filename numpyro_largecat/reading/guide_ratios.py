# SPDX-License-Identifier: Apache-2.0
r"""How far parts of a guide are from their best values given the rest, as importance ratios.

For a part a of the latent values (the small sites, or the rows of one class) and the rest r,

.. math::
    \log w(a) = E_{q(r \mid a)}[\log p(a, r, y) - \log q(a, r)]
              = \log \frac{p(a \mid y)}{q(a)}
                - \mathrm{KL}\big(q(r \mid a) \,\|\, p(r \mid a, y)\big) + \mathrm{const},

with the same noise of r for all draws of a. If q(a) is the best factor of a mean-field guide,
:math:`q(a) \propto \exp E_{q(r)} \log p(a, r, y)`, all ratios are equal; if the guide of the rest
is exact given a, they are the importance ratios of the posterior of a.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array, lax
from jax.typing import ArrayLike
from numpy.typing import NDArray
from numpyro.distributions.transforms import ExpTransform, IndependentTransform, biject_to

from numpyro_largecat.handlers.closed_over_arrays import run_compiled
from numpyro_largecat.handlers.internals import eval_provenance
from numpyro_largecat.handlers.plate_facts import row_plates
from numpyro_largecat.handlers.row_noise import InnerNoise
from numpyro_largecat.handlers.sites import (
    base_distribution,
    is_latent,
    log_prob_of,
    plates_of,
    scale_of,
)
from numpyro_largecat.handlers.static_result import static_result
from numpyro_largecat.reading.chunked_utilities import ChunkedUtilities
from numpyro_largecat.reading.learned_rows import learned_rows
from numpyro_largecat.reading.observed_choice import Observed, RowWeights
from numpyro_largecat.reading.parts_of_classes import LogSums, merge_sums, own_utilities

MUCH_WORK = 10**10  # utilities: some seconds
FEW_DRAWS = 16  # to see how much noise the rows bring
LITTLE_MORE = 1.2  # times the most noise, since few draws do not tell it exactly
LEARNED_PRIOR = (
    "not looked at: rows that are read have a learned prior. With lc.not_centred(model) it is fixed"
)


class FreeValues(NamedTuple):
    """Free values of sites that the guide draws."""

    values: dict[str, Any]  # by site
    log_density: Any  # of all of them in the guide; NaN if some are not among the values


class Ratios(NamedTuple):
    """Log importance ratios of draws of one part of the guide."""

    log_ratios: NDArray[np.float64]  # (T, S), up to a constant in each of T parts
    noise: NDArray[np.float64]  # (T,), standard deviation in nats that the sampled rows bring
    drawn: FreeValues  # what was drawn of a part, (T, S, ...)
    positive: frozenset[str] = frozenset()  # those of them whose free values are logarithms
    why_unknown: str = ""  # if all log ratios are NaN, whatever the rows


def small_site_ratios(
    utilities: ChunkedUtilities,
    observed: Observed,
    key: Array,
    num_draws: int,
    num_rest: int,
    most_noise: float,
) -> Ratios | None:
    """Ratios of the sites outside of plates of rows and of the choice's plates; None if none is.

    They are NaN if the prior of rows that are read by id is learned: some of them are there, and so
    the log density of all is not known; and where there is much to compute, and a few draws say
    that the rows, a sample, bring more noise than ``most_noise``, in nats.

    Cost: O(num_draws * num_rest * K) time for each observation; memory of one chunk of classes and
    of ``num_draws`` log densities of it.
    """
    learned = set().union(*learned_rows(utilities.runs.fit).values())
    read, positive = _look(utilities, key)
    inner = utilities.choice_plates | {utilities.plate} | read
    if not utilities.runs.draws_sites(lambda plates: not plates & inner):
        return None
    keys = jax.random.split(jax.random.fold_in(key, 0), num_draws)
    rest = jax.random.split(jax.random.fold_in(key, 1), num_rest)
    draws = _SmallDraws(keys, inner, observed.rows.counts, jnp.asarray(observed.labels))

    def unknown(noise: NDArray[np.float64], why: str) -> Ratios:
        of_draw = partial(lax.map, lambda key: draws.at(utilities, rest[0], 0, key).drawn)
        found = run_compiled(of_draw, keys)
        found = jax.tree.map(lambda x: np.asarray(x)[None], found)
        log_ratios = np.full((1, num_draws), np.nan)
        return Ratios(log_ratios, noise, found, positive & found.values.keys(), why)

    if learned & read:
        return unknown(np.zeros(1), LEARNED_PRIOR)
    # A prior's scale does not move them: the utilities of 800 passes need not be formed.
    move_utilities = bool(
        eval_provenance(lambda key: draws.at(utilities, rest[0], 0, key).utilities, key=keys[0])
    )

    def ratios(draws: _SmallDraws) -> Ratios:
        of_rest = partial(_small_sums, utilities, draws, move_utilities)
        sums = run_compiled(partial(lax.map, of_rest), rest)
        priors, log_probs, found = jax.tree.map(lambda x: np.asarray(x)[:, None], sums)
        known = _ratios(priors, log_probs, observed.rows, found)
        return known._replace(positive=positive & found.values.keys())

    work = num_rest * num_draws * utilities.num_categories * draws.labels.size
    if move_utilities and work > MUCH_WORK and num_draws > FEW_DRAWS:
        noise = ratios(draws._replace(keys=keys[:FEW_DRAWS])).noise
        if noise[0] > LITTLE_MORE * most_noise:
            return unknown(noise, "")
    return ratios(draws)


class _SmallDraws(NamedTuple):
    """Draws of the small sites, and what they are looked at with."""

    keys: Array  # (S,)
    inner: frozenset[str]  # plates of the rest
    counts: Array  # (...), observations that each row stands for
    labels: Array  # (...)

    def at(self, part: ChunkedUtilities, rest_key: Array, chunk: ArrayLike, key: Array) -> _OneDraw:
        """One draw with one chunk of classes; sites in the plates ``inner`` by ``rest_key``."""
        classes, noise = part.classes_of(chunk), InnerNoise(rest_key, self.inner)
        sites = part.runs.traces(classes[0], part.chunk_size, key, noise)
        is_class = part.is_visited(classes)
        return _OneDraw(
            jnp.where(is_class, _row_ratios(sites, part.plate, part.chunk_size), 0),
            _sum_outside(sites, part.plate, part.choice_plates, self.counts),
            jnp.where(is_class, _utilities(sites[1][part.site]), -jnp.inf),
            _free_values(sites[0], lambda plates: not plates & self.inner, len(self.keys)),
        )


class _OneDraw(NamedTuple):
    """Log densities in the model less those in the guide, with one chunk of classes."""

    by_class: Array  # (chunk_size,), of the rows of the class plate; 0 past the last class
    outside: Array  # (), of the sites outside of class plates
    utilities: Array  # (..., chunk_size), -inf past the last class
    drawn: FreeValues  # of the small sites


def _small_sums(
    utilities: ChunkedUtilities, draws: _SmallDraws, move_utilities: bool, rest_key: Array
) -> tuple[Array, Array, FreeValues]:
    """Log priors (S,) up to a constant, log probabilities (S, ...) of labels, and what is drawn."""
    Found = tuple[Array, Array, Array]

    def of_draw(part: ChunkedUtilities, chunk: Array, key: Array) -> Found:
        by_class, _, psi, _ = draws.at(part, rest_key, chunk, key)
        if not move_utilities:
            return by_class, jnp.zeros(()), jnp.zeros(())
        own = own_utilities(psi, draws.labels, part.classes_of(chunk))
        return by_class, jax.nn.logsumexp(psi, axis=-1), own

    def add(part: ChunkedUtilities, found: Found, chunk: Array) -> Found:
        prior, log_sum, own = found
        by_class, new_log_sum, new_own = lax.map(partial(of_draw, part, chunk), draws.keys)
        # Differences are small where the sums of a table's log densities are large.
        prior += (by_class - by_class[:1]).sum(axis=1)
        return prior, jnp.logaddexp(log_sum, new_log_sum), jnp.maximum(own, new_own)

    def merge(found: Found, other: Found) -> Found:
        return found[0] + other[0], *merge_sums(found[1:], other[1:])

    num_draws = len(draws.keys)
    shape = utilities.batch_shape if move_utilities else ()
    nothing = jnp.full((num_draws, *shape), -jnp.inf, utilities.dtype)
    start = (jnp.zeros(num_draws, utilities.dtype), nothing, nothing)
    prior, log_sum, own = utilities.visit(add, start, merge)

    def of_all(key: Array) -> tuple[Array, FreeValues]:
        _, outside, _, drawn = draws.at(utilities, rest_key, 0, key)
        return outside, drawn

    outside, drawn = lax.map(of_all, draws.keys)
    return prior + outside - outside[0], own - log_sum, drawn


def _look(utilities: ChunkedUtilities, key: Array) -> tuple[frozenset[str], frozenset[str]]:
    """Plates of rows that are read, besides that of the classes; and the positive latent sites."""

    def look() -> tuple[set[str], set[str]]:
        guide_sites, sites = utilities.runs.traces(0, 1, key, InnerNoise(key, frozenset()))
        drawn = {name: site["fn"].support for name, site in guide_sites.items() if is_latent(site)}
        positive = {name for name, support in drawn.items() if _is_positive(support)}
        return set(row_plates(sites)), positive

    plates, positive = static_result(look)
    return frozenset(plates - {utilities.plate}), frozenset(positive)


def _is_positive(support: Any) -> bool:
    if support.is_discrete:
        return False
    transform = biject_to(support)
    while isinstance(transform, IndependentTransform):
        transform = transform.base_transform
    return isinstance(transform, ExpTransform)


def class_ratios(
    utilities: ChunkedUtilities,
    observed: Observed,
    classes: Array,
    key: Array,
    num_draws: int,
    num_rest: int,
) -> Ratios | None:
    """Ratios of the rows of each of T ``classes`` in the class plate; None if there is no site.

    None too if the model reads classes by id: a class then moves the utilities of others.

    Cost: for each observation O(num_rest * K) time, and O(T * num_draws * num_rest) more.
    """
    is_drawn = utilities.runs.draws_sites(lambda plates: utilities.plate in plates)
    if utilities.has_reads or not is_drawn:
        return None
    keys = jax.random.split(jax.random.fold_in(key, 0), num_draws)
    rest = jax.random.split(jax.random.fold_in(key, 1), num_rest)
    plates, labels = frozenset({utilities.plate}), jnp.asarray(observed.labels)

    def one(place: Array, key: Array, inner_key: Array) -> _OneClass:
        sites = utilities.runs.traces(classes[place], 1, key, InnerNoise(inner_key, plates))
        psi = _utilities(sites[1][utilities.site])
        drawn = _free_values(sites[0], lambda plates: utilities.plate in plates, num_draws)
        return _OneClass(psi[..., 0], _row_ratios(sites, utilities.plate, 1)[0], drawn)

    def of_rest(key: Array) -> tuple[Array, Array, FreeValues]:
        places = jnp.arange(len(classes))
        at_rest = lax.map(lambda place: one(place, key, key).utilities, places)
        others, own = _sums_without(utilities, key, InnerNoise(key, plates), labels, classes)
        here = labels == _column(classes, labels.ndim)
        own = jnp.maximum(own, jnp.where(here, at_rest, -jnp.inf).max(axis=0))

        def of_class(place: Array) -> tuple[Array, Array, FreeValues]:
            rivals = jnp.where(_column(places, labels.ndim) == place, -jnp.inf, at_rest)
            without = jnp.logaddexp(others, jax.nn.logsumexp(rivals, axis=0))
            is_own = labels == classes[place]

            def of_draw(inner_key: Array) -> tuple[Array, Array, FreeValues]:
                psi, prior, drawn = one(place, key, inner_key)
                log_prob = jnp.where(is_own, psi, own) - jnp.logaddexp(without, psi)
                return prior, log_prob, drawn

            return lax.map(of_draw, keys)

        return lax.map(of_class, places)

    sums = run_compiled(partial(lax.map, of_rest), rest)
    priors, log_probs, found = jax.tree.map(np.asarray, sums)
    return _ratios(priors, log_probs, observed.rows, found)


class _OneClass(NamedTuple):
    """What one class has in one draw."""

    utilities: Array  # (...), of the class
    log_ratio: Array  # (), its log prior less its log density in the guide
    drawn: FreeValues  # of its sites


def _free_values(sites: Any, is_part: Callable[[set[str]], bool], most: int) -> FreeValues:
    """Of the sites that the guide draws, rather than holds at a point, in plates as asked.

    Left out are discrete sites, and those of more than ``most`` numbers, such as the weights of a
    neural network.
    """
    found, log_density = {}, jnp.zeros(())
    for name, site in sites.items():
        if is_latent(site) and is_part(plates_of(site)):
            if isinstance(base_distribution(site["fn"]), dist.Delta):
                continue
            if site["fn"].support.is_discrete or jnp.size(site["value"]) > most:
                log_density += jnp.nan
                continue
            transform = biject_to(site["fn"].support)
            found[name] = transform.inv(site["value"])
            log_density += log_prob_of(site).sum()
            log_density += transform.log_abs_det_jacobian(found[name], site["value"]).sum()
    return FreeValues(found, log_density)


def pareto_k(log_ratios: NDArray[np.float64]) -> NDArray[np.float64]:
    """Pareto k-hat of log ratios, shape (T, S), by ArviZ; -inf where a row has no tail.

    References:
        Vehtari, Simpson, Gelman, Yao and Gabry, Pareto Smoothed Importance Sampling, 2024.
    """
    import arviz as az  # slow to import, so only where it is used

    log_ratios = np.array(log_ratios)
    num_tail = math.ceil(min(0.2 * log_ratios.shape[1], 3 * math.sqrt(log_ratios.shape[1])))
    tails = np.sort(log_ratios, axis=1)[:, -num_tail:]
    vary = (np.ptp(log_ratios, axis=1) >= 1e-3) & (np.ptp(tails, axis=1) > 0)
    k = np.full(len(log_ratios), -np.inf)
    if not vary.any():
        return k
    psislw: Any = getattr(az, "psislw", None)
    if psislw is not None:  # ArviZ 0.23
        k[vary] = psislw(log_ratios[vary])[1]
    else:  # it takes log likelihoods, whose inverses are the weights
        psislw = import_module("arviz_stats.base").array_stats.psislw
        k[vary] = psislw(-log_ratios[vary])[1]
    return k


def _ratios(
    priors: NDArray[Any], log_probs: NDArray[Any], rows: RowWeights, found: FreeValues
) -> Ratios:
    """Mean over the draws of the rest, and sum over observations, in float64.

    Of priors (R, T, S), log_probs (R, T, S, ...), and values (R, T, S, ...), of which the first are
    kept. The noise is that of rows, of which the choices come and go together.
    """
    drawn = jax.tree.map(lambda x: np.asarray(x[0], np.float64), found)
    weights, counts = np.atleast_1d(np.asarray(rows.weights, np.float64), np.asarray(rows.counts))
    priors = priors.mean(axis=0, dtype=np.float64)
    by_choice = log_probs.mean(axis=0, dtype=np.float64)
    if by_choice.size == priors.size and weights.size != 1:  # the same for all draws
        return Ratios(priors, np.zeros(len(priors)), drawn)
    by_choice = np.where(weights > 0, by_choice.reshape(*priors.shape, *weights.shape), 0)
    by_row = _by_row(weights * by_choice, rows.axis, 2).sum(axis=-2)
    by_row -= by_row.mean(axis=1, keepdims=True)
    stands_for = _by_row(counts, rows.axis, 0).max(axis=0)
    is_sampled = stands_for > 1
    noise, number = np.zeros(len(priors)), is_sampled.sum()
    if number > 1:
        variance = by_row[..., is_sampled].var(axis=-1, ddof=1).mean(axis=1)
        share = number / stands_for[is_sampled].sum()
        noise = np.sqrt(number * np.maximum(1 - share, 0) * variance)
    return Ratios(priors + by_row.sum(axis=-1), noise, drawn)


def _by_row(values: NDArray[Any], axis: int, num_leading: int) -> NDArray[Any]:
    """Leading axes, then all axes of the choice but that of the rows as one, then the rows."""
    moved = np.moveaxis(values, axis, -1)
    return moved.reshape(*moved.shape[:num_leading], -1, moved.shape[-1])


def _utilities(site: dict[str, Any]) -> Array:
    psi = base_distribution(site["fn"]).utilities
    return jnp.broadcast_to(psi, (*site["fn"].shape(), psi.shape[-1]))


def _column(values: Array, ndim: int) -> Array:
    return values.reshape(-1, *(1,) * ndim)


def _sums_without(
    utilities: ChunkedUtilities, key: Array, noise: InnerNoise, labels: Array, left_out: Array
) -> tuple[Array, Array]:
    """Log of the sum over all classes but these, and the utilities of the labels elsewhere."""

    def add(part: ChunkedUtilities, found: LogSums, chunk: Array) -> LogSums:
        classes = part.classes_of(chunk)
        psi = _utilities(part.runs.traces(classes[0], part.chunk_size, key, noise)[1][part.site])
        counts = part.is_visited(classes) & ~jnp.isin(classes, left_out)
        psi = jnp.where(counts, psi, -jnp.inf)
        log_sum = jnp.logaddexp(found[0], jax.nn.logsumexp(psi, axis=-1))
        return log_sum, jnp.maximum(found[1], own_utilities(psi, labels, classes))

    nothing = jnp.full(utilities.batch_shape, -jnp.inf, utilities.dtype)
    return utilities.visit(add, (nothing, nothing), merge_sums)


def _row_ratios(sites: Any, plate: str, size: int) -> Array:
    """Log density in the model less that in the guide of the first ``size`` rows of the plate."""
    total = jnp.zeros(size)
    for sign, part in ((-1, sites[0]), (1, sites[1])):
        for site in filter(is_latent, part.values()):
            for frame in site["cond_indep_stack"]:
                if frame.name == plate:
                    log_prob = log_prob_of(site) * scale_of(site)
                    log_prob = jnp.moveaxis(log_prob, frame.dim, 0)
                    total += sign * log_prob.reshape(log_prob.shape[0], -1).sum(axis=1)[:size]
    return total


def _sum_outside(sites: Any, plate: str, choice_plates: frozenset[str], counts: Array) -> Array:
    """The same for the sites outside of plates of rows.

    Those of observations are as many as these stand for. Of other such plates the rows that are
    read are there, not a weighted subset: left out.
    """
    facts = row_plates(sites[1])
    read = {name for name, known in facts.items() if known.row_weights is not None}
    total = jnp.zeros(())
    for sign, part in ((-1, sites[0]), (1, sites[1])):
        for site in filter(is_latent, part.values()):
            plates = plates_of(site)
            if not plates & {plate, *read}:
                log_prob = log_prob_of(site)
                by_row = plates & choice_plates and log_prob.shape == jnp.shape(counts)
                total += sign * (log_prob * (counts if by_row else scale_of(site))).sum()
    return total
