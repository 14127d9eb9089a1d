# SPDX-License-Identifier: Apache-2.0
"""The loop behind ``SubsampledSVI.run``: compiled chunks of steps that reuse their memory."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax, random
from numpyro.infer.svi import SVIRunResult
from tqdm.auto import tqdm

from numpyro_largecat._checks import BadDataError, check_count
from numpyro_largecat._result_so_far import attach_result, handled_signals, held_signals
from numpyro_largecat.handlers.closed_over_arrays import compiled
from numpyro_largecat.handlers.static_arguments import StaticArguments, split_arguments
from numpyro_largecat.svi.array_batches import ArrayBatches
from numpyro_largecat.svi.model_checks import check_arguments, check_batches
from numpyro_largecat.svi.recorded_entries import (
    IterateLog,
    RecordedResult,
    Watched,
    take_entries,
)
from numpyro_largecat.svi.step import SubsampledSVIState

if TYPE_CHECKING:
    from numpyro_largecat.svi.subsampled_svi import SubsampledSVI

MAX_CHUNK = 100  # steps of one compiled loop, between two looks at the losses
MOST_TRIES = 100  # draws of a first batch, where bad data is skipped
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
        self._chunk = compiled(self._run_chunk, static_argnums=(4,), donate_first=True)

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
        given = rng_key, init_state, args, kwargs, drawn
        is_traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(given))
        log = _LossLog(num_steps, progress_bar and not is_traced, skip_bad_steps)
        so_far = _SoFar(self.svi, log)
        with attach_result(so_far.interrupted), log:
            if init_state is not None:
                self.svi._check_state(init_state)
                state = jax.tree.map(jnp.copy, init_state)
                so_far.state = None if is_traced else state
            if drawn is not None:
                self._check_batches(drawn, args, kwargs, skip_bad_steps)
            if init_state is None:
                state, first = self._start(rng_key, args, drawn, stream, init_params, kwargs, log)
                stream = None if stream is None else chain([first], stream)
            if is_traced:
                return self._run_traced(
                    state, num_steps, (args, kwargs, drawn), skip_bad_steps, forward_mode
                )
            so_far.state = state
            if stream is None:
                self._take_chunks(so_far, (args, kwargs, drawn), forward_mode)
            else:
                self._take_batches(so_far, stream, args, kwargs, forward_mode)
            log.warn()
            return so_far.result()

    def _check_batches(self, drawn: ArrayBatches, args: Any, kwargs: Any, skip: bool) -> None:
        if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((drawn, args))):
            return
        try:
            check_batches(self.svi.model, drawn, args, {**kwargs, **self.svi.static_kwargs})
        except BadDataError as error:
            if not skip:
                raise
            warnings.warn(
                f"{error} Steps that draw such rows are skipped.", RuntimeWarning, stacklevel=4
            )

    def _start(
        self,
        rng_key: Array,
        args: Any,
        drawn: ArrayBatches | None,
        stream: Iterator[Any] | None,
        init_params: dict[str, Any] | None,
        kwargs: Any,
        log: _LossLog,
    ) -> tuple[SubsampledSVIState, Any]:
        """The initial state, and the batch that it was made from: the first good one."""
        bad: BadDataError | None = None
        for batch in islice(_first_batches(rng_key, drawn, stream), log.num_steps):
            try:
                state = self.svi.init(rng_key, *args, *batch, init_params=init_params, **kwargs)
            except BadDataError as error:
                if not log.skip_bad_steps:
                    raise
                bad = error
                if stream is not None:
                    log.skip_batch(error)
            else:
                return state, batch
        raise bad or ValueError("`batches` gave no batch.")

    def _take_chunks(self, so_far: _SoFar, arguments: Any, forward_mode: bool) -> None:
        """Take steps on the same arguments, many in each compiled loop."""
        log = so_far.log
        arrays, static = split_arguments(arguments)
        options = _Options(static, MAX_CHUNK, log.skip_bad_steps, forward_mode)
        chunk = self._chunk.program(so_far.state, 0, self.svi._watched, arrays, options)
        while count := log.steps_to_go(MAX_CHUNK):
            so_far.take(chunk, count, arrays)

    def _take_batches(
        self, so_far: _SoFar, stream: Iterator[Any], args: Any, kwargs: Any, forward_mode: bool
    ) -> None:
        """Take a step on each batch of a stream; one that is bad ends the fit, or is skipped."""
        log = so_far.log
        steps: dict[Any, Any] = {}
        while log.steps_to_go(1):
            batch = next(stream, None)
            if batch is None:
                log.stop("`batches` gave no further batch", log.num_taken)
                return
            try:
                check_arguments(self.svi.model, (*args, *batch), kwargs)
            except BadDataError as error:
                if log.skip_bad_steps:
                    log.skip_batch(error)
                else:
                    log.stop(str(error).rstrip("."), log.num_taken)
                continue
            arrays, static = split_arguments(((*args, *batch), kwargs, None))
            options = _Options(static, 1, log.skip_bad_steps, forward_mode)
            form = options, tuple(None if x is None else jax.typeof(x) for x in arrays)
            if form not in steps:
                steps[form] = self._chunk.program(
                    so_far.state, 0, self.svi._watched, arrays, options
                )
            so_far.take(steps[form], 1, arrays)

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


def _first_batches(
    rng_key: Array, drawn: ArrayBatches | None, stream: Iterator[Any] | None
) -> Iterator[Any]:
    """Batches to make the initial state from: the first that is good is taken."""
    if stream is not None:
        return stream
    if drawn is None:
        return iter([()])
    keys = (random.fold_in(rng_key, BATCH_STREAM + i) for i in range(MOST_TRIES))
    return map(drawn.draw, keys)


class _SoFar:
    """What a fit has reached: always a state that is there, and the losses that belong to it."""

    state: SubsampledSVIState | None = None  # until `init` has made one

    def __init__(self, svi: SubsampledSVI, log: _LossLog) -> None:
        self.svi = svi
        self.log = log
        self.iterates = IterateLog()
        self.signals = handled_signals()

    def take(self, chunk: Any, count: int, arrays: list[Any]) -> None:
        """Take ``count`` steps; no signal can part the new state from its losses.

        The state is replaced when the steps are known to have run.
        """
        with held_signals(self.signals):
            state, losses, values = chunk(self.state, count, self.svi._watched, arrays)
            losses = np.array(losses)[:count]  # a copy: a view would keep the device's buffer
            self.state = state
            self.iterates.add(values, self.log.add(losses))

    def result(self) -> RecordedResult:
        """The result, as ``run`` returns it."""
        assert self.state is not None
        return self._with_params(self.svi.get_params(self.state))

    def interrupted(self) -> tuple[RecordedResult, str] | None:
        """The result, and how far it came. Without memory for ``params``, these are left out."""
        if self.state is None:
            return None
        progress = f"{self.log.num_taken} of {self.log.num_steps} steps"
        if any(leaf.is_deleted() for leaf in jax.tree.leaves(self.state)):
            progress += "; its state is gone, in memory that a compiled step had been given"
            return self._with_params({}), progress
        try:
            return self.result(), progress
        except (RuntimeError, MemoryError) as error:
            progress += f"; its `params` cannot be computed ({error}), but its `state` is there"
            return self._with_params({}), progress

    def _with_params(self, params: dict[str, Any]) -> RecordedResult:
        result = RecordedResult(params, self.state, jnp.asarray(self.log.losses()))
        result.iterates = self.iterates.iterates()
        return result


class _LossLog:
    """Losses so far, shown in a progress bar, and why the fit ended early if it did."""

    def __init__(self, num_steps: int, progress_bar: bool, skip_bad_steps: bool) -> None:
        self.num_steps = num_steps
        self.skip_bad_steps = skip_bad_steps
        self.bar = tqdm(total=num_steps, disable=not progress_bar, unit="step")
        self.parts: list[np.ndarray] = []
        self.num_taken = 0
        self.reason: str | None = None
        self.bad_batches: list[BadDataError] = []
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

    def skip_batch(self, error: BadDataError) -> None:
        """Count a batch that was not used as a step that was skipped."""
        self.bad_batches.append(error)
        self.add(np.full(1, np.nan))

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
                f"gradients were not finite.{self._of_bad_batches()}",
                RuntimeWarning,
                stacklevel=4,
            )

    def _of_bad_batches(self) -> str:
        if not self.bad_batches:
            return ""
        return f" Of {len(self.bad_batches)} the batch was bad, the first: {self.bad_batches[0]}"
