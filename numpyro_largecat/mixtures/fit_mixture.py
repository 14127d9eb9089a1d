# SPDX-License-Identifier: Apache-2.0
"""Conjugate learning of mixtures over minibatches: memoized and stochastic."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from tqdm.auto import tqdm

from numpyro_largecat._checks import check_count, check_key, describe, is_concrete
from numpyro_largecat._result_so_far import attach_result, held_signals
from numpyro_largecat.mixtures.family import ConjugateFamily
from numpyro_largecat.mixtures.global_step import GlobalStep, Objective, Statistics, global_step
from numpyro_largecat.mixtures.local_step import Summary, chunk_rows, summarize
from numpyro_largecat.mixtures.mixing import DirichletMixing, MixingPrior
from numpyro_largecat.mixtures.mixture_fit import MixtureFit, check_active
from numpyro_largecat.mixtures.row_stream import (
    FirstLook,
    RowStream,
    as_array,
    look_at,
    mark_of,
    padded,
)
from numpyro_largecat.mixtures.seeding import Start, num_candidates, seed_statistics
from numpyro_largecat.ops.step_sizes import check_step_sizes, step_size

Algorithm = Literal["memoized", "stochastic"]
DEFAULT_ACTIVE = 8


def fit_mixture(
    rng_key: Array,
    data: Any,
    family: ConjugateFamily,
    num_components: int,
    *,
    num_active: int | None = None,
    mixing: MixingPrior | None = None,
    objective: Objective = "variational",
    algorithm: Algorithm = "memoized",
    batch_size: int | None = None,
    num_passes: int = 20,
    start: Start | MixtureFit = "kmeans++",
    delay: float = 1.0,
    forgetting: float = 0.55,
    progress_bar: bool = True,
) -> MixtureFit:
    r"""Fit a mixture of exponential families by closed-form steps with L-sparse responsibilities.

    .. math:: \pi \sim \mathrm{mixing}, \quad \theta_k \sim \mathrm{prior},
              \quad x_n \sim \sum_k \pi_k F(x_n \mid \theta_k)

    A step takes a batch. Its log weights :math:`W_{nk} = E[\log \pi_k] + E[\log F(x_n \mid
    \theta_k)]` are one product of matrices; each row keeps its L largest, and its responsibilities
    are their softmax, the best with L entries (Eq. 8). The sums :math:`N_k = \sum_n r_{nk}` and
    :math:`S_k = \sum_n r_{nk} f(x_n)` give the new posterior, ``prior + S_k``.

    **Objectives.** "variational" maximises the evidence lower bound (Eq. 3) over posteriors of
    weights and components. "map" maximises the likelihood (Eq. 4) of point estimates, penalised by
    the prior's pseudo-observations: L-sparse EM, hard EM at L = 1, and maximum likelihood where the
    prior is worth next to nothing.

    **Algorithms.** "memoized" keeps the sums of each batch and replaces them at the next visit.
    After the first pass no step lowers the objective, rounding aside. "stochastic" takes natural
    gradient steps with the batch's sums scaled to all N rows,

    .. math:: S \leftarrow (1 - \rho_t) S + \rho_t \frac{N}{B} S_{\mathrm{batch}}, \qquad
              \rho_t = (\mathrm{delay} + t)^{-\mathrm{forgetting}}, \quad t = 1, 2, \ldots

    With one batch of all data and forgetting = 0 both are coordinate ascent.

    What is raised during the fit, also by ``data`` or as ``KeyboardInterrupt``, has the fit after
    the last batch as its attribute ``result_so_far``, to look at or to go on from.

    Cost: O(B K P) per step in one product, O(B L P) for the sums, and K times the cost of a
    posterior, which is computed on the device in float64 (K D^3 for full covariances). Memory: the
    batch, O(K P), chunks of rows, and for "memoized" O(K P) on the host for each batch; nothing of
    size B K or B P. The data are read once more before the fit, to check them and to draw the rows
    to start from.

    Args:
        rng_key: A JAX random key.
        data: Rows, an array of shape (N, ...), which may be memory-mapped, or a frame of numbers;
            or batches of rows: an iterable that can be iterated again in each pass, such as a list
            of arrays, or a function that returns an iterator. "memoized" needs the same batches in
            the same order.
        family: Family of the components with its prior, such as ``lc.GaussianFamily``.
        num_components: Number of components K, at least 1.
        num_active: Components L that may share an observation, in [1, K]; by default 8, or K where
            that is smaller. K is the dense mixture.
        mixing: ``lc.DirichletMixing`` (the default, with concentration 1) or ``lc.StickBreaking``.
        objective: "variational" or "map".
        algorithm: "memoized" or "stochastic".
        batch_size: Rows of a batch of an array, which is cut at random; all by default.
        num_passes: Visits of each batch, at least 1.
        start: "kmeans++", k-means++ with the family's Bregman divergence on a sample of the rows;
            "random", rows drawn uniformly; or an earlier fit of as many components, to go on.
        delay: Of the stochastic step sizes, at least 0. With 0 the first batch takes the place of
            all that was known; to go on from a fit add the number of steps it took.
        forgetting: Of the stochastic step sizes, in [0, 1]; steps converge above 0.5.
        progress_bar: Show batches, speed and the objective.

    Returns:
        A ``MixtureFit``. Its ``bounds`` are, for "memoized", the objective at the end of each pass;
        for "stochastic", the mean over a pass of estimates from its batches.

    Raises:
        ValueError: If a number is out of range, a batch is empty or has no finite row, or batches
            change from pass to pass.
        TypeError: If ``data`` is an iterator that can be read only once.
        FloatingPointError: If a component loses its posterior, as by a covariance that is no longer
            positive definite; the message names it.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import numpyro.distributions as dist
        >>> import numpyro_largecat as lc
        >>> loc = jnp.array([[-8.0, 0], [0, 8], [8, 0]])
        >>> x = dist.Normal(loc, 1).sample(jax.random.key(0), (200,)).reshape(-1, 2)
        >>> family = lc.GaussianFamily(x.mean(0), jnp.eye(2))
        >>> fit = lc.fit_mixture(
        ...     jax.random.key(1), x, family, 3, batch_size=300, num_passes=5, progress_bar=False
        ... )
        >>> sorted(fit.components().mean.round().astype(int).tolist())
        [[-8, 0], [0, 8], [8, 0]]
        >>> fit.mixing().probs.round(2).tolist()
        [0.33, 0.33, 0.33]

    References:
        Hughes and Sudderth, Fast Learning of Clusters and Topics via Sparse Posteriors, 2016,
        arXiv:1609.07521, Eqs. 3 to 8 and section 3.4.
    """
    check_key("rng_key", rng_key)
    if not is_concrete(data):
        raise TypeError(
            "`data` must be rows outside of compiled code, since batches are read in a loop; got a "
            "tracer. Call `fit_mixture` outside `jit`, `vmap` and `grad`."
        )
    mixing = DirichletMixing() if mixing is None else mixing
    _check_choices(family, mixing, objective, algorithm, start)
    check_step_sizes(delay, forgetting)
    num_components = check_count("num_components", num_components, 1)
    default = min(DEFAULT_ACTIVE, num_components)
    active = check_active(default if num_active is None else num_active, num_components)
    num_passes = check_count("num_passes", num_passes, 1)
    batch_key, seed_key = jax.random.split(rng_key)
    rng = np.random.default_rng(np.asarray(jax.random.bits(batch_key, (4,))).tolist())
    stream = RowStream(data, batch_size, rng)
    candidates = num_candidates(num_components)
    model = mixture_model(family, mixing, objective, active, stream, rng, candidates)
    if isinstance(start, MixtureFit):
        first = _statistics_of(start, family, num_components, model.look.sample[:1])
    else:
        first = seed_statistics(seed_key, family, model.look.sample, num_components, start)
    if algorithm == "memoized":
        steps = memoized_steps(model, first, stream, num_passes)
    else:
        steps = stochastic_steps(model, first, stream, num_passes, delay, forgetting, rng)
    num_batches = len(model.look.sizes)
    total = num_passes * num_batches
    statistics = first
    bounds: list[float] = []

    def fit() -> MixtureFit:
        whole_passes = len(bounds) // num_batches * num_batches
        by_pass = np.reshape(bounds[:whole_passes], (-1, num_batches))
        by_pass = by_pass[:, -1] if algorithm == "memoized" else by_pass.mean(1)
        return model.fit(statistics, by_pass)

    with (
        attach_result(lambda: (fit(), f"{len(bounds)} of {total} batches")),
        tqdm(steps, total=total, disable=not progress_bar, unit="batch") as bar,
    ):
        for step in bar:
            with held_signals():
                statistics = step.statistics
                bounds.append(step.bound)
            if np.isfinite(step.bound):
                bar.set_postfix_str(f"objective per row {step.bound / model.look.num_rows:.6g}")
        return fit()


class Model(NamedTuple):
    """All that a step needs beside its batch and the statistics so far."""

    family: ConjugateFamily
    mixing: MixingPrior
    objective: Objective
    num_active: int
    look: FirstLook

    def global_step(self, statistics: Statistics) -> GlobalStep:
        """Posterior from statistics."""
        return global_step(self.family, self.mixing, statistics, self.objective)

    def summary(self, rows: Any, posterior: GlobalStep) -> Summary:
        """Local step and sums of a batch."""
        num_components, num_features = posterior.expectations.shape
        chunk = chunk_rows(len(rows), num_features, num_components)
        x, is_row = padded(rows, self.look.dtype, chunk)
        parameters = posterior.parameters(self.look.dtype)
        return summarize(
            self.family, x, is_row, parameters, num_active=self.num_active, chunk=chunk
        )

    def fit(self, statistics: Statistics, bounds: np.ndarray) -> MixtureFit:
        """The result."""
        return MixtureFit(
            self.family,
            self.mixing,
            self.objective,
            self.num_active,
            statistics.counts,
            statistics.features,
            bounds,
            self.look.dtype,
        )


def mixture_model(
    family: ConjugateFamily,
    mixing: MixingPrior,
    objective: Objective,
    num_active: int,
    stream: RowStream,
    rng: np.random.Generator,
    num_sampled: int = 1,
) -> Model:
    """Look at all rows, and put together what a step needs."""
    look = look_at(stream, family, num_sampled, rng)
    return Model(family, mixing, objective, num_active, look)


class Step(NamedTuple):
    """State after a batch."""

    statistics: Statistics
    bound: float  # the objective, or an estimate of it; NaN before all batches are seen


def memoized_steps(
    model: Model, start: Statistics, stream: RowStream, num_passes: int
) -> Iterator[Step]:
    """Coordinate ascent over batches, whose sums are kept.

    In the first pass ``start`` stands for the rows that are not yet seen, with their share of its
    weight; so a component that no row of the first batches belongs to is still there for others.
    """
    posterior = model.global_step(start)
    total = Statistics(np.zeros_like(start.counts), np.zeros_like(start.features))
    kept: list[Summary | None] = [None] * len(model.look.sizes)
    for visit in range(num_passes):
        for b, rows in _checked(stream.batches(), model.look, visit, same_rows=True):
            new = jax.tree.map(np.asarray, model.summary(rows, posterior))
            counts, features = total.counts + new.counts, total.features + new.statistics
            if (old := kept[b]) is not None:
                counts, features = counts - old.counts, features - old.statistics
            total, kept[b] = Statistics(np.maximum(counts, 0), features), new
            seen = [s for s in kept if s is not None]
            if len(seen) < len(kept):
                unseen = 1 - sum(model.look.sizes[: len(seen)]) / model.look.num_rows
                whole = _mixed(total, unseen, start)
                posterior = model.global_step(whole)
                yield Step(whole, np.nan)
                continue
            posterior = model.global_step(total)
            local = sum(_total(s.entropies) + _total(s.log_bases) for s in seen)
            yield Step(total, posterior.gain + local)


def stochastic_steps(
    model: Model,
    start: Statistics,
    stream: RowStream,
    num_passes: int,
    delay: float,
    forgetting: float,
    rng: np.random.Generator,
) -> Iterator[Step]:
    """Natural gradient steps with decreasing sizes."""
    statistics, steps = start, itertools.count(1)
    posterior = model.global_step(statistics)
    for visit in range(num_passes):
        for _, rows in _checked(stream.batches(rng), model.look, visit):
            scale = model.look.num_rows / len(rows)
            size = step_size(next(steps), delay, forgetting)
            new = jax.tree.map(np.asarray, model.summary(rows, posterior))
            local = scale * (_total(new.bounds) + _total(new.log_bases))
            bound = posterior.prior_term(statistics) + local
            kept = Statistics((1 - size) * statistics.counts, (1 - size) * statistics.features)
            statistics = _mixed(kept, size * scale, new)
            posterior = model.global_step(statistics)
            yield Step(statistics, bound)


def _mixed(statistics: Statistics, weight: float, more: Statistics | Summary) -> Statistics:
    """Add weighted sums of counts and features."""
    counts, features = more[0], more[1]
    return Statistics(
        statistics.counts + weight * counts.astype(float),
        statistics.features + weight * features.astype(float),
    )


def _total(values: Any) -> float:
    return float(np.sum(values, dtype=np.float64))


def _checked(
    batches: Iterator[tuple[int, Any]], look: FirstLook, visit: int, *, same_rows: bool = False
) -> Iterator[tuple[int, Any]]:
    """Refuse batches that are not those of the first look."""
    count, sizes = 0, look.sizes
    for b, rows in batches:
        if b >= len(sizes) or len(rows) != sizes[b]:
            known = sizes[b] if b < len(sizes) else "no"
            raise ValueError(
                f"`data` must give the same batches in each pass; batch {b} of pass {visit} has "
                f"{len(rows)} rows, and had {known} rows before the fit."
            )
        if same_rows and look.marks and mark_of(as_array(rows)) != look.marks[b]:
            raise ValueError(
                f"`data` must give the same batches in each pass, whose sums are kept; batch {b} "
                f"of pass {visit} has other rows than before the fit. Do not shuffle them anew, or "
                'use algorithm="stochastic".'
            )
        yield b, rows
        count += 1
    if count < len(sizes):
        raise ValueError(
            f"`data` must give the same batches in each pass; pass {visit} ended after {count} "
            f"batches, and there were {len(sizes)} before the fit."
        )


def _statistics_of(
    fit: MixtureFit, family: ConjugateFamily, num_components: int, row: np.ndarray
) -> Statistics:
    """Statistics of an earlier fit, if its features are the same; ``row`` is one row of data."""
    if fit.num_components != num_components:
        raise ValueError(
            f"`start` must be a fit with as many components; got {fit.num_components}, for "
            f"{num_components}."
        )
    old, new = (f.features(jnp.asarray(row, fit.dtype)) for f in (fit.family, family))
    if old.shape != new.shape or not jnp.allclose(old, new):
        raise ValueError(
            "`start` must be a fit whose family has the same features, such as a GaussianFamily "
            f"with the same `loc`; got {fit.family!r}, for {family!r}."
        )
    return Statistics(fit.counts, fit.statistics)


def _check_choices(family: Any, mixing: Any, objective: Any, algorithm: Any, start: Any) -> None:
    if not isinstance(family, ConjugateFamily):
        raise TypeError(
            "`family` must be an instance of a ConjugateFamily, such as lc.GaussianFamily(loc, "
            f"covariance); got {describe(family)}."
        )
    if not isinstance(mixing, MixingPrior):
        raise TypeError(
            "`mixing` must be an instance of a MixingPrior, such as lc.DirichletMixing(1.0); got "
            f"{describe(mixing)}."
        )
    for name, value, known in (
        ("objective", objective, ("variational", "map")),
        ("algorithm", algorithm, ("memoized", "stochastic")),
        ("start", start, ("kmeans++", "random", "an earlier fit")),
    ):
        if name == "start" and isinstance(value, MixtureFit):
            continue
        if not isinstance(value, str) or value not in known[:2]:
            raise ValueError(f"`{name}` must be one of {', '.join(known)}; got {describe(value)}.")
