# SPDX-License-Identifier: Apache-2.0
"""Passes over the batches of a mixture's data: memoized and stochastic."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from numpyro_largecat.mixtures.conjugate_family import ConjugateFamily
from numpyro_largecat.mixtures.global_step import GlobalStep, Objective, Statistics, global_step
from numpyro_largecat.mixtures.local_step import BatchSums, chunk_rows, sum_batch
from numpyro_largecat.mixtures.mixing_priors import MixingPrior
from numpyro_largecat.mixtures.options import Options
from numpyro_largecat.mixtures.row_stream import FirstLook, RowStream, as_rows, mark_of, padded
from numpyro_largecat.ops.step_sizes import step_size


class Model(NamedTuple):
    """All that a step needs besides its batch and the statistics so far."""

    family: ConjugateFamily
    mixing: MixingPrior
    objective: Objective
    num_active: int
    look: FirstLook

    def global_step(self, statistics: Statistics) -> GlobalStep:
        """Posterior from statistics."""
        return global_step(self.family, self.mixing, statistics, self.objective)

    def sum_batch(self, rows: Any, posterior: GlobalStep) -> BatchSums:
        """Local step of a batch, and its sums."""
        num_components, num_features = posterior.expectations.shape
        chunk = chunk_rows(len(rows), num_features, num_components)
        x, is_row = padded(rows, self.look.dtype, chunk)
        parameters = posterior.parameters(self.look.dtype)
        return sum_batch(
            self.family, x, is_row, parameters, num_active=self.num_active, chunk=chunk
        )


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
    kept: list[BatchSums | None] = [None] * len(model.look.sizes)
    for visit in range(num_passes):
        for b, rows in _checked(stream.batches(), model.look, visit, same_rows=True):
            new = jax.tree.map(np.asarray, model.sum_batch(rows, posterior))
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
    options: Options,
    rng: np.random.Generator,
    num_steps: int = 0,
) -> Iterator[Step]:
    """Natural gradient steps with decreasing sizes, of which ``num_steps`` were taken before."""
    statistics, steps = start, itertools.count(num_steps + 1)
    posterior = model.global_step(statistics)
    for visit in range(num_passes):
        for _, rows in _checked(stream.batches(rng), model.look, visit):
            scale = model.look.num_rows / len(rows)
            size = step_size(next(steps), options.delay, options.forgetting)
            new = jax.tree.map(np.asarray, model.sum_batch(rows, posterior))
            local = scale * (_total(new.bounds) + _total(new.log_bases))
            bound = posterior.prior_term(statistics) + local
            kept = Statistics((1 - size) * statistics.counts, (1 - size) * statistics.features)
            statistics = _mixed(kept, size * scale, new)
            posterior = model.global_step(statistics)
            yield Step(statistics, bound)


def _mixed(statistics: Statistics, weight: float, more: Statistics | BatchSums) -> Statistics:
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
            had = sizes[b] if b < len(sizes) else "no"
            raise _others(f"batch {b} of pass {visit} has {len(rows)} rows, and had {had} rows")
        if same_rows and look.marks and mark_of(as_rows(rows)) != look.marks[b]:
            fix = 'Do not shuffle them, or use method="stochastic".'
            raise _others(f"batch {b} of pass {visit} has other rows than", fix)
        yield b, rows
        count += 1
    if count < len(sizes):
        raise _others(f"pass {visit} ended after {count} batches, and there were {len(sizes)}")


def _others(what: str, fix: str = "") -> ValueError:
    return ValueError(f"`x` must give the same batches in each pass; {what} before the fit. {fix}")
