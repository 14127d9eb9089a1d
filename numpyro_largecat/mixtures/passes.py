# SPDX-License-Identifier: Apache-2.0
"""Passes over the batches of a mixture's data: memoized and stochastic."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh

from numpyro_largecat.mixtures.conjugate_family import ConjugateFamily
from numpyro_largecat.mixtures.global_step import GlobalStep, Objective, Statistics, global_step
from numpyro_largecat.mixtures.local_step import BatchSums, chunk_rows, sum_batch
from numpyro_largecat.mixtures.mixing_priors import MixingPrior
from numpyro_largecat.mixtures.options import Options
from numpyro_largecat.mixtures.row_stream import FirstLook, RowStream, as_rows, mark_of, padded
from numpyro_largecat.ops.numpy_generator import numpy_generator
from numpyro_largecat.ops.rows_by_device import num_devices
from numpyro_largecat.ops.step_sizes import step_size


class Model(NamedTuple):
    """All that a step needs besides its batch and the statistics so far."""

    family: ConjugateFamily
    mixing: MixingPrior
    objective: Objective
    num_active: int
    look: FirstLook
    mesh: Mesh | None = None  # of devices, over which the rows of a batch are spread

    def global_step(self, statistics: Statistics) -> GlobalStep:
        """Posterior from statistics."""
        return global_step(self.family, self.mixing, statistics, self.objective)

    def sum_batch(self, rows: Any, posterior: GlobalStep) -> BatchSums:
        """Local step of a batch, and its sums."""
        num_components, num_features = posterior.expectations.shape
        rows_of_device = -(-len(rows) // num_devices(self.mesh))
        chunk = chunk_rows(rows_of_device, num_features, num_components)
        family, offset = self.family.without_offset()
        x, is_row = padded(as_rows(rows), self.look.dtype, chunk, self.mesh, offset)
        options = {"num_active": self.num_active, "chunk": chunk, "mesh": self.mesh}
        return sum_batch(family, x, is_row, posterior.parameters(self.look.dtype), **options)


class KeptSums(NamedTuple):
    """Sums of a batch at its last visit."""

    counts: np.ndarray  # (K,)
    features: np.ndarray  # (K, P)
    local: np.ndarray  # (), the part of the bound that is the batch's own


class Step(NamedTuple):
    """State after a batch, with all that the next one needs."""

    statistics: Statistics
    bound: float = np.nan  # the objective, or an estimate; NaN before all batches are seen
    total: Statistics | None = None  # memoized: of the batches that were seen
    kept: tuple[KeptSums, ...] = ()  # memoized: of each of them


def memoized_steps(
    model: Model,
    start: Statistics,
    stream: RowStream,
    num_passes: int,
    reached: Step | None = None,
    num_done: int = 0,
) -> Iterator[Step]:
    """Coordinate ascent over batches, whose sums are kept; goes on where ``reached`` is given.

    In the first pass ``start`` stands for the rows that are not yet seen, with their share of its
    weight; so a component that no row of the first batches belongs to is still there for others.
    """
    nothing = Statistics(np.zeros_like(start.counts), np.zeros_like(start.features))
    whole, _, total, kept = Step(start, total=nothing) if reached is None else reached
    assert total is not None
    posterior = model.global_step(whole)
    sizes, num_rows = model.look.sizes, model.look.num_rows
    for b, rows in _batches_to_go(model.look, stream, num_passes, num_done, same_rows=True):
        new = _kept(jax.tree.map(np.asarray, model.sum_batch(rows, posterior)))
        counts, features = total.counts + new.counts, total.features + new.features
        if b < len(kept):
            counts, features = counts - kept[b].counts, features - kept[b].features
        total = whole = Statistics(np.maximum(counts, 0), features)
        kept = (*kept[:b], new, *kept[b + 1 :])
        if len(kept) < len(sizes):
            whole = _mixed(total, 1 - sum(sizes[: len(kept)]) / num_rows, start)
        posterior = model.global_step(whole)
        bound = posterior.gain + sum(float(sums.local) for sums in kept)
        yield Step(whole, bound if len(kept) == len(sizes) else np.nan, total, kept)


def _kept(sums: BatchSums) -> KeptSums:
    local = np.array(_total(sums.entropies) + _total(sums.log_bases))
    return KeptSums(np.asarray(sums.counts), np.asarray(sums.statistics), local)


def stochastic_steps(
    model: Model,
    start: Statistics,
    stream: RowStream,
    num_passes: int,
    options: Options,
    rng_key: Array,
    num_before: int = 0,
    num_done: int = 0,
) -> Iterator[Step]:
    """Natural gradient steps with decreasing sizes; goes on from ``start`` after ``num_done``.

    ``num_before`` steps were taken by an earlier fit. The order of the batches is a function of the
    key and the number of the pass.
    """
    statistics, times = start, itertools.count(num_before + num_done + 1)
    posterior = model.global_step(statistics)
    for _, rows in _batches_to_go(model.look, stream, num_passes, num_done, rng_key):
        scale = model.look.num_rows / len(rows)
        size = step_size(next(times), options.delay, options.forgetting)
        new = jax.tree.map(np.asarray, model.sum_batch(rows, posterior))
        local = scale * (_total(new.bounds) + _total(new.log_bases))
        bound = posterior.prior_term(statistics) + local
        kept = Statistics((1 - size) * statistics.counts, (1 - size) * statistics.features)
        statistics = _mixed(kept, size * scale, new)
        posterior = model.global_step(statistics)
        yield Step(statistics, bound)


def _batches_to_go(
    look: FirstLook,
    stream: RowStream,
    num_passes: int,
    num_done: int,
    rng_key: Array | None = None,
    *,
    same_rows: bool = False,
) -> Iterator[tuple[int, Any]]:
    """The batches of all passes but those that were done."""
    first, place = divmod(num_done, len(look.sizes))
    for visit in range(first, num_passes):
        key = None if rng_key is None else jax.random.fold_in(rng_key, visit)
        batches = stream.batches(None if key is None else numpy_generator(key))
        checked = _checked(batches, look, visit, same_rows=same_rows)
        yield from itertools.islice(checked, place, None)
        place = 0


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
