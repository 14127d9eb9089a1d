# SPDX-License-Identifier: Apache-2.0
"""The loop behind ``SubsampledSVI.run``: compiled chunks of steps that reuse their memory."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax, random
from numpyro.infer.svi import SVIRunResult
from tqdm.auto import tqdm

from numpyro_largecat._checks import check_count
from numpyro_largecat.infer.batches import ArrayBatches
from numpyro_largecat.infer.model_checks import check_arguments, check_batches
from numpyro_largecat.infer.row_step import SubsampledSVIState
from numpyro_largecat.infer.static_arguments import StaticArguments, split_arguments
from numpyro_largecat.infer.watched_entries import (
    IterateLog,
    RecordedResult,
    Watched,
    take_entries,
)

if TYPE_CHECKING:
    from numpyro_largecat.infer.subsampled_svi import SubsampledSVI

MAX_CHUNK = 100  # steps of one compiled loop, between two looks at the losses
BATCH_STREAM = 0x6D696E69  # keeps the keys of batches apart from those that `split` makes
ELBO_MEMORY = 0.98  # weight of the past in the smoothed ELBO, per step


class _Options(NamedTuple):
    """What a compiled loop is specialised to, beside the shapes of its arrays."""

    static: StaticArguments
    length: int  # room for losses
    skip_bad_steps: bool
    forward_mode: bool


class Fit:
    """Runs an SVI object; compiled loops are kept for later runs with the same structure."""

    def __init__(self, svi: SubsampledSVI) -> None:
        self.svi = svi
        self._chunk = jax.jit(self._run_chunk, static_argnums=4, donate_argnums=0)

    def run(
        self,
        rng_key: Array,
        num_steps: int,
        args: Any,
        kwargs: Any,
        *,
        batches: Any,
        progress_bar: bool,
        skip_bad_steps: bool,
        forward_mode: bool,
        init_state: SubsampledSVIState | None,
        init_params: dict[str, Any] | None,
    ) -> SVIRunResult:
        """See ``SubsampledSVI.run``."""
        num_steps = check_count("num_steps", num_steps, 1)
        drawn = batches if isinstance(batches, ArrayBatches) else None
        stream = None if batches is None or drawn is not None else iter(batches)
        first: Any = ()
        if drawn is not None:
            if not any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((drawn, args))):
                check_batches(self.svi.model, drawn, args, {**kwargs, **self.svi.static_kwargs})
            first = drawn.draw(random.fold_in(rng_key, BATCH_STREAM))
        elif stream is not None:
            first = next(stream, None)
            if first is None:
                raise ValueError("`batches` gave no batch.")
        if init_state is None:
            state = self.svi.init(rng_key, *args, *first, init_params=init_params, **kwargs)
        else:
            state = jax.tree.map(jnp.copy, init_state)
        if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((state, args, kwargs))):
            return self._run_traced(
                state, num_steps, (args, kwargs, drawn), skip_bad_steps, forward_mode
            )
        log = _LossLog(num_steps, progress_bar, skip_bad_steps)
        iterates, entries = IterateLog(), self.svi._watched
        with log:
            if stream is None:
                arrays, static = split_arguments((args, kwargs, drawn))
                options = _Options(static, MAX_CHUNK, skip_bad_steps, forward_mode)
                while count := log.steps_to_go(MAX_CHUNK):
                    state, losses, values = self._chunk(state, count, entries, arrays, options)
                    iterates.add(values, log.add(np.asarray(losses)[:count]))
            else:
                for batch in self._good_batches(first, stream, args, kwargs, log):
                    arrays, static = split_arguments(((*args, *batch), kwargs, None))
                    options = _Options(static, 1, skip_bad_steps, forward_mode)
                    state, losses, values = self._chunk(state, 1, entries, arrays, options)
                    iterates.add(values, log.add(np.asarray(losses)))
        log.warn()
        result = RecordedResult(self.svi.get_params(state), state, jnp.asarray(log.losses()))
        result.iterates = iterates.iterates()
        return result

    def _good_batches(
        self, batch: Any, stream: Iterator[Any], args: Any, kwargs: Any, log: _LossLog
    ) -> Iterator[Any]:
        """Batches until enough steps are taken; a bad one ends the fit, not the work done."""
        while log.steps_to_go(1):
            if batch is None:
                log.stop("`batches` gave no further batch", log.num_taken)
                return
            try:
                check_arguments(self.svi.model, (*args, *batch), kwargs)
            except ValueError as error:
                log.stop(str(error).rstrip("."), log.num_taken)
                return
            yield batch
            batch = next(stream, None) if log.steps_to_go(1) else None

    def _run_chunk(
        self,
        state: SubsampledSVIState,
        count: Array,
        entries: Watched,
        arrays: list[Any],
        options: _Options,
    ) -> tuple[SubsampledSVIState, Array, dict[str, Array]]:
        """Take up to ``count`` steps, fewer if one is bad and must not be skipped.

        Returns:
            The state, and the losses and the ``entries`` of the parameters after each step.
        """

        def watched(state: SubsampledSVIState) -> dict[str, Array]:
            return take_entries(entries, self.svi.optim.get_params(state.optim_state))

        def go_on(loop: tuple[Array, Array, Any, Any]) -> Array:
            i, bad, _, _ = loop
            return (i < count) & ~bad

        def step(loop: tuple[Array, Array, Any, Any]) -> tuple[Array, Array, Any, Any]:
            i, _, state, seen = loop
            state, loss = self._step(state, arrays, options)
            bad = jnp.isnan(loss) & (not options.skip_bad_steps)
            now = (loss, watched(state))
            seen = jax.tree.map(lambda all, one: all.at[i].set(one.astype(all.dtype)), seen, now)
            return i + 1, bad, state, seen

        def room(x: Any) -> Array:
            return jnp.full((options.length, *x.shape), jnp.nan)

        seen = room(jnp.zeros(())), jax.tree.map(room, jax.eval_shape(watched, state))
        start = (jnp.array(0), jnp.array(False), state, seen)
        _, _, state, (losses, values) = lax.while_loop(go_on, step, start)
        return state, losses, values

    def _run_traced(
        self,
        state: SubsampledSVIState,
        num_steps: int,
        arguments: Any,
        skip_bad_steps: bool,
        forward_mode: bool,
    ) -> SVIRunResult:
        """Take all steps under a transformation such as ``vmap``, where none can be looked at."""
        arrays, static = split_arguments(arguments)
        options = _Options(static, num_steps, skip_bad_steps, forward_mode)

        def step(state: SubsampledSVIState, _: None) -> tuple[SubsampledSVIState, Array]:
            return self._step(state, arrays, options)

        state, losses = lax.scan(step, state, None, length=num_steps)
        return SVIRunResult(self.svi.get_params(state), state, losses)

    def _step(
        self, state: SubsampledSVIState, arrays: list[Any], options: _Options
    ) -> tuple[SubsampledSVIState, Array]:
        args, kwargs, drawn = options.static.restore(arrays)
        if drawn is not None:
            args = (*args, *drawn.draw(random.fold_in(state.rng_key, BATCH_STREAM)))
        return self.svi._guarded_update(
            state, args, kwargs, options.forward_mode, finite_gradients=options.skip_bad_steps
        )


class _LossLog:
    """Losses so far, shown in a progress bar, and why the fit ended early if it did."""

    def __init__(self, num_steps: int, progress_bar: bool, skip_bad_steps: bool) -> None:
        self.num_steps = num_steps
        self.skip_bad_steps = skip_bad_steps
        self.bar = tqdm(total=num_steps, disable=not progress_bar, unit="step")
        self.parts: list[np.ndarray] = []
        self.num_taken = 0
        self.reason: str | None = None
        self.smoothed: float | None = None

    def __enter__(self) -> None:
        """Open the bar."""

    def __exit__(self, *_: object) -> None:
        self.bar.close()

    def steps_to_go(self, most: int) -> int:
        """Steps to take next, at most ``most``; 0 at the end."""
        return 0 if self.reason else min(most, self.num_steps - self.num_taken)

    def add(self, losses: np.ndarray) -> int:
        """Append the losses of a chunk; the first NaN ends the fit, unless it is to be skipped.

        Returns:
            How many of its steps were taken.
        """
        bad = np.flatnonzero(np.isnan(losses))
        num_good = len(losses)
        if bad.size and not self.skip_bad_steps:
            losses, num_good = losses[: bad[0] + 1], int(bad[0])
            self.stop(
                "the loss or the new parameters were not finite. Lower the learning rate, or look "
                "for a label out of range, or an observed class that is not available (-inf)",
                self.num_taken + int(bad[0]),
            )
        self.parts.append(losses)
        self.num_taken += len(losses)
        self.bar.update(len(losses))
        for loss in losses[np.isfinite(losses)]:
            kept = ELBO_MEMORY if self.smoothed is not None else 0.0
            self.smoothed = kept * (self.smoothed or 0.0) - (1 - kept) * float(loss)
        if self.smoothed is not None:
            self.bar.set_postfix_str(f"smoothed ELBO {self.smoothed:.6g}")
        return num_good

    def stop(self, reason: str, step: int) -> None:
        """End the fit before ``step``, counted from 0."""
        self.reason = f"SubsampledSVI.run ended at step {step} of {self.num_steps}: {reason}."

    def losses(self) -> np.ndarray:
        """All losses, one for each step."""
        return np.concatenate(self.parts) if self.parts else np.zeros(0)

    def warn(self) -> None:
        """Say why the fit ended early, or how many steps were skipped."""
        if self.reason is not None:
            warnings.warn(
                f"{self.reason} The result holds the state before that step.",
                RuntimeWarning,
                stacklevel=4,
            )
        skipped = int(np.isnan(self.losses()).sum())
        if self.skip_bad_steps and skipped:
            warnings.warn(
                f"SubsampledSVI.run skipped {skipped} of {self.num_taken} steps, whose loss or "
                "gradients were not finite.",
                RuntimeWarning,
                stacklevel=4,
            )
