# SPDX-License-Identifier: Apache-2.0
"""The loop behind ``SubsampledSVI.run``: steps in chunks, and what is due between them."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_largecat._checks import BadDataError, check_arguments, check_count, describe
from numpyro_largecat._result_so_far import (
    attach_result,
    exit_at_sigterm,
    handled_signals,
    held_signals,
)
from numpyro_largecat.data.checkpoints import (
    Checkpoints,
    CheckpointWriter,
    Reached,
    has_checkpoint,
)
from numpyro_largecat.handlers.static_arguments import StaticArguments, split_arguments
from numpyro_largecat.svi.array_batches import ArrayBatches
from numpyro_largecat.svi.bad_step import first_not_finite
from numpyro_largecat.svi.batch_checks import check_batches
from numpyro_largecat.svi.callback_calls import CallbackCalls
from numpyro_largecat.svi.compiled_steps import (
    CompiledSteps,
    RunOptions,
    StepForm,
    StepsTaken,
    arguments_of_step,
    run_traced,
)
from numpyro_largecat.svi.iterates import IterateLog
from numpyro_largecat.svi.loss_log import LossLog
from numpyro_largecat.svi.plan import Plan
from numpyro_largecat.svi.processes import (
    check_same_checkpoint,
    check_same_in_all,
    in_all,
    is_over_in_any,
)
from numpyro_largecat.svi.run_result import SubsampledSVIRunResult
from numpyro_largecat.svi.saved_run import (
    KIND,
    SavedRun,
    as_reached,
    read_run,
    settings_of,
)
from numpyro_largecat.svi.state import SubsampledSVIState
from numpyro_largecat.svi.streamed_batches import StreamedBatches

MAX_CHUNK = 100  # steps of one compiled loop, between two looks at the losses
CHUNK_SECONDS = 1.0  # that it may take, since signals wait until its end
STEPS_TOGETHER = (
    10  # of each chunk where processes take steps together, and so must take equal ones
)
MOST_TRIES = 100  # draws of a first batch, where bad data is skipped


def run_loop(
    steps: CompiledSteps,
    plan: Plan,
    init: Callable[..., tuple[Plan, SubsampledSVIState]],
    rng_key: Array,
    num_steps: int,
    args: Any,
    kwargs: Any,
    *,
    batches: Any,
    progress_bar: bool,
    options: RunOptions,
    init_state: SubsampledSVIState | None,
    calls: CallbackCalls,
    checkpoints: Checkpoints | None,
    resume: bool,
) -> SubsampledSVIRunResult:
    """See ``SubsampledSVI.run``.

    ``plan`` is that of ``init_state``; if there is none, ``init`` makes a plan and the first state
    from the arrays of a first batch.
    """
    num_steps = check_count("num_steps", num_steps, 1)
    drawn = batches if isinstance(batches, ArrayBatches) else None
    read = batches if isinstance(batches, StreamedBatches) else None
    has_place = batches is None or drawn is not None or read is not None
    stream = None if has_place else _stream_of(batches)
    is_traced = _is_traced((rng_key, init_state, args, kwargs, drawn))
    if is_traced and (checkpoints is not None or calls):
        raise ValueError(
            "`checkpoints`, `held_out` and `callbacks` need a run outside of `jit`, `vmap` and the "
            "like; leave them out, or take this run out of the transformation."
        )
    spans = plan.spans_processes
    if spans:
        check_same_in_all(num_steps, calls, checkpoints)
    has_saved = has_checkpoint(checkpoints, resume, KIND, spans)
    if spans and checkpoints is not None:
        numbers = checkpoints.fit_folder(KIND, spans).numbers()
        check_same_checkpoint(numbers[-1] if has_saved else -1)
    log = LossLog(num_steps, progress_bar and not is_traced, options.skip_bad_steps)
    with exit_at_sigterm(checkpoints is not None), ExitStack() as until_end:
        run = _Run(steps, plan, log, options, calls)
        until_end.enter_context(attach_result(run.interrupted))
        until_end.enter_context(log)
        if checkpoints is not None:
            run.settings = settings_of(batches, rng_key, (args, kwargs)) | {
                "[every_steps, patience] of `held_out`": calls.settings
            }
            run.writer = CheckpointWriter(checkpoints, KIND, run.reached, spans=spans)
            until_end.enter_context(run.writer)
        state = init_state
        if init_state is not None:
            plan.check(init_state)
            state = jax.tree.map(jnp.copy, init_state)
            run.state = None if is_traced else state
        if drawn is not None and not _is_traced((drawn, args)):
            _check_batches(plan, drawn, args, kwargs, options.skip_bad_steps)
        if state is None:
            candidates = islice(_first_batches(drawn or read, stream), num_steps)
            made, first = _first_good(init, candidates, log, are_steps=stream is not None)
            run.plan, state = made
            del made  # a run that goes on from a checkpoint has no use for this state
            stream = None if stream is None else chain([first], stream)
        if checkpoints is not None and has_saved:
            del state
            passed = log.num_taken  # batches of the stream that were bad, before the first good one
            folder = checkpoints.fit_folder(KIND, spans)
            reading = partial(read_run, folder, run.plan, run.settings)
            saved = in_all(reading) if spans else reading()
            with held_signals():
                run.go_on(saved)
            state = saved.state
            stream = None if stream is None else islice(stream, log.num_taken - passed, None)
        if drawn is not None or read is not None:
            run.plan.check_batch_size(batches.batch_size)
        if is_traced:
            return run_traced(run.plan, state, num_steps, (args, kwargs, drawn), options)
        run.state = state
        if has_saved:
            run.after_steps()  # what was interrupted at the step of the checkpoint
        if read is not None:
            run.take_stacks(read, args, kwargs)
        elif stream is None:
            run.take_chunks((args, kwargs, run.plan.everywhere(drawn)))
        else:
            run.take_batches(stream, args, kwargs)
        if log.is_last_bad:
            run.explain_bad_step()
        log.warn()
        result = run.result()
        log.say(lambda: str(result.convergence))
        return result


class _Run:
    """What a run has reached: always a state that is there, and the losses that belong to it."""

    state: SubsampledSVIState | None = None  # until `init` has made one
    writer: CheckpointWriter | None = None
    settings: Mapping[str, Any] = {}  # what must be the same in a run that goes on
    pace = 1  # steps of a chunk that lasts as long as it may
    begun: tuple[int, StepsTaken] | None = None  # steps that run, and how many
    arguments: tuple[StaticArguments, list[Any]]  # of the last steps
    last_key: Array  # of the last step

    def __init__(
        self,
        steps: CompiledSteps,
        plan: Plan,
        log: LossLog,
        options: RunOptions,
        calls: CallbackCalls,
    ) -> None:
        self.steps = steps
        self.plan = plan
        self.log = log
        self.options = options
        self.calls = calls
        self.iterates = IterateLog()
        self.signals = handled_signals()
        if plan.spans_processes:
            self.pace = STEPS_TOGETHER

    def take_chunks(self, arguments: Any) -> None:
        """Take steps on the same arguments, many in each compiled loop."""
        arrays, static = split_arguments(arguments)
        chunk = self._chunk(arrays, static, MAX_CHUNK)
        while count := self._steps_to_go(self.pace):
            self._take(chunk, count, arrays, static)

    def take_stacks(self, batches: StreamedBatches, args: Any, kwargs: Any) -> None:
        """Take steps on batches that a thread reads meanwhile, some in each compiled loop."""
        assert self.state is not None
        chunk = None
        first = int(self.state.num_steps)
        to_go = self.log.steps_to_go(self.log.num_steps)
        with closing(batches.stacks(first, to_go, self.plan.rows_on(1))) as stacks:
            while self._steps_to_go(1):
                stack = next(stacks)
                arrays, static = split_arguments((args, kwargs, stack))
                chunk = chunk or self._chunk(arrays, static, MAX_CHUNK)
                left = batches.num_in_stack
                while left and (count := self._steps_to_go(min(left, self.pace))):
                    self._take(chunk, count, arrays, static)
                    left -= count

    def take_batches(self, stream: Iterator[Any], args: Any, kwargs: Any) -> None:
        """Take a step on each batch of a stream; one that is bad ends the fit, or is skipped."""
        log = self.log
        steps: dict[Any, Any] = {}
        batch = next(stream, None) if log.steps_to_go(1) else None
        while log.steps_to_go(1):
            if batch is None:
                log.stop("`batches` gave no further batch", log.num_taken)
                return
            try:
                check_arguments(self.plan.model, (*args, *batch), kwargs)
            except BadDataError as error:
                if log.skip_bad_steps:
                    log.skip_batch(error)
                    self.after_steps()
                    batch = next(stream, None) if log.steps_to_go(1) else None
                else:
                    log.stop(str(error).rstrip("."), log.num_taken)
                continue
            arrays, static = split_arguments(((*args, *batch), kwargs, None))
            form = static, tuple(None if x is None else jax.typeof(x) for x in arrays)
            if form not in steps:
                steps[form] = self._chunk(arrays, static, 1)
                if len(steps) == 2:
                    _warn_of_another_form(log.num_taken, *(arrays for _, arrays in steps))
            self._begin(steps[form], 1, arrays, static)
            try:  # read the next batch while the step runs
                batch = next(stream, None) if log.steps_to_go(2) == 2 else None
            finally:
                self.finish()
            self.after_steps()

    def _steps_to_go(self, most: int) -> int:
        most = self.calls.steps_to_go(self.log.num_taken, most)
        if self.writer is not None:
            most = self.writer.steps_to_go(self.log.num_taken, most)
        return self.log.steps_to_go(most)

    def _chunk(self, arrays: list[Any], static: StaticArguments, length: int) -> Any:
        """The compiled program of a chunk of at most ``length`` steps."""
        form = StepForm(static, self.options, length)
        loop = self.steps.of(self.plan)
        return loop.program(self.state, 0, self.plan.recorded, arrays, form)

    def _take(self, chunk: Any, count: int, arrays: list[Any], static: StaticArguments) -> None:
        start = time.monotonic()
        self._begin(chunk, count, arrays, static)
        self.finish()
        seconds = max(time.monotonic() - start, 1e-9)
        if not self.plan.spans_processes:
            self.pace = max(1, min(MAX_CHUNK, int(CHUNK_SECONDS * count / seconds)))
        self.after_steps()

    def _begin(self, chunk: Any, count: int, arrays: list[Any], static: StaticArguments) -> None:
        """Let ``count`` steps run, which take the memory of the state."""
        with held_signals(self.signals):
            self.begun = count, chunk(self.state, count, self.plan.recorded, arrays)
            self.arguments = static, arrays

    def finish(self) -> None:
        """Wait for the steps that have begun; no signal can part their state from their losses.

        The state is replaced when they are known to have run.
        """
        with held_signals(self.signals):
            if self.begun is None:
                return
            (count, taken), self.begun = self.begun, None
            losses = np.array(taken.losses)[:count]  # a copy: a view would keep the buffer
            self.state, self.last_key = taken.state, taken.last_key
            self.iterates.add(taken.values, self.log.add(losses))

    def explain_bad_step(self) -> None:
        """Say what the step that ended the fit was given, or has made, that is not finite."""
        assert self.state is not None
        args, kwargs = arguments_of_step(self.plan, *self.arguments, self.state.num_steps - 1)
        args, kwargs = self.plan.fetched((args, kwargs))
        try:
            check_arguments(self.plan.model, args, kwargs)
        except BadDataError as error:
            self.log.stop(str(error).rstrip("."), self.log.num_taken - 1)
            return
        before = self.state._replace(rng_key=self.last_key)
        forward_mode = self.options.forward_mode
        try:
            found = first_not_finite(self.plan, before, args, kwargs, forward_mode=forward_mode)
        except Exception as error:  # the fit ends in good order, whatever keeps us from its reason
            found = f"what it was could not be looked for ({type(error).__name__}: {error})"
        self.log.explain(found)

    def after_steps(self) -> None:
        """Do what is due between steps: scores, callbacks, a checkpoint."""
        log = self.log
        if self.calls and not log.is_over:
            what = log.num_taken, log.smoothed, self.last, self._copy_of_state
            log.is_over = self.calls.after_steps(*what)
            if self.plan.spans_processes:
                log.is_over = is_over_in_any(log.is_over)
            if log.is_over and self.calls.scores.are_all_nan():
                log.stop("`held_out` gave NaN alone", log.num_taken)
        if self.writer is not None:
            self.writer.after_steps(log.num_taken)

    def _copy_of_state(self) -> Any:
        return jax.tree.map(jnp.copy, self.state)

    def go_on(self, saved: SavedRun) -> None:
        """Take over what a checkpoint holds."""
        place = saved.place
        assert self.writer is not None
        self.plan = replace(self.plan, recorded=saved.recorded)
        self.log.go_on(saved.losses)
        self.iterates.go_on(saved.iterates, place["num_recorded"])
        self.writer.go_on(len(saved.losses))
        self.calls.go_on(len(saved.losses), place["last_called"], saved.scores)
        self.log.is_over |= self.calls.is_patience_over()
        self.state = saved.state

    def reached(self) -> Reached | None:
        """What a checkpoint holds; None before the first step, or if the state is gone."""
        self.finish()
        losses = self.log.losses()
        if self.state is None or not len(losses) or self._is_gone():
            return None
        place = {
            "last_called": self.calls.last_step,
            "num_recorded": self.iterates.num_steps,
        }
        iterates, scores = self.iterates.iterates(), self.calls.scores
        saved = SavedRun(self.state, losses, iterates, scores, self.plan.recorded, place)
        return as_reached(self.plan, saved, self.settings)

    def _is_gone(self) -> bool:
        return any(leaf.is_deleted() for leaf in jax.tree.leaves(self.state))

    def result(self) -> SubsampledSVIRunResult:
        """The result, as ``run`` returns it: of the best held-out score if it may stop by that."""
        best = self.calls.scores.best
        return self.last() if best is None else self._of(best, self.plan.params(best))

    def last(self) -> SubsampledSVIRunResult:
        """The result after the last step."""
        assert self.state is not None
        return self._of(self.state, self.plan.params(self.state))

    def interrupted(self) -> tuple[SubsampledSVIRunResult, str] | None:
        """The last result, without ``params`` if there is no memory for them; how far it came."""
        self.finish()
        if self.state is None:
            return None
        progress = f"{self.log.num_taken} of {self.log.num_steps} steps"
        if self._is_gone():
            progress += "; its state is gone, in memory that a compiled step had been given"
            return self._of(self.state, {}), progress
        try:
            return self.last(), progress
        except (RuntimeError, MemoryError) as error:
            progress += f"; its `params` cannot be computed ({error}), but its `state` is there"
            return self._of(self.state, {}), progress

    def _of(self, state: Any, params: dict[str, Any]) -> SubsampledSVIRunResult:
        losses, iterates = jnp.asarray(self.log.losses()), self.iterates.iterates()
        scores = self.calls.scores.of_result()
        return SubsampledSVIRunResult(params, state, losses, iterates, scores)


def _warn_of_another_form(step: int, first: Any, other: Any) -> None:
    """Say that a batch is compiled for, with the first array that is another."""
    pairs = zip(first, other, strict=False)
    differs = [f"{b} after {a}" for a, b in pairs if a != b] or ["none of the arrays"]
    warnings.warn(
        f"the batch of step {step} has arrays of other shapes or types than those before, first "
        f"{differs[0]}. It is compiled for, as each new form is. Give batches of one size, such as "
        "those of `lc.StreamedBatches`, or leave out the last of a pass. This is said once.",
        RuntimeWarning,
        stacklevel=5,
    )


def _stream_of(batches: Any) -> Iterator[Any]:
    """The batches of an iterator, each a tuple of arrays.

    Raises:
        TypeError: If there is no iterator, or when a batch is no tuple.
    """
    fix = (
        "`batches` must be an `lc.ArrayBatches(x, y, batch_size=...)`, `lc.StreamedBatches`, or an "
        "iterator of tuples of arrays, whose arrays come after the arguments of the model"
    )
    if callable(batches) or not hasattr(batches, "__iter__"):
        raise TypeError(f"{fix}; got {describe(batches)}.")

    def checked(batch: Any) -> Any:
        if not isinstance(batch, tuple | list):
            raise TypeError(f"{fix}; got a batch that is {describe(batch)}.")
        return batch

    return map(checked, batches)


def _is_traced(tree: Any) -> bool:
    return any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(tree))


def _check_batches(plan: Plan, drawn: ArrayBatches, args: Any, kwargs: Any, skip: bool) -> None:
    try:
        check_batches(plan.model, drawn, args, plan.with_static(kwargs))
    except BadDataError as error:
        if not skip:
            raise
        warnings.warn(
            f"{error} Steps that draw such rows are skipped.", RuntimeWarning, stacklevel=4
        )


def _first_batches(
    drawn: ArrayBatches | StreamedBatches | None, stream: Iterator[Any] | None
) -> Iterator[Any]:
    """Batches to make the initial state from."""
    if stream is not None:
        return stream
    if drawn is None:
        return iter([()])
    return map(drawn.batch, range(MOST_TRIES))


def _first_good(
    init: Callable[..., tuple[Plan, SubsampledSVIState]],
    batches: Iterator[Any],
    log: LossLog,
    *,
    are_steps: bool,
) -> tuple[tuple[Plan, SubsampledSVIState], Any]:
    """What ``init`` makes of the first good batch, and that batch.

    Bad ones before it are skipped if bad steps are; those of a stream are steps that were skipped.
    """
    bad: BadDataError | None = None
    for batch in batches:
        try:
            return init(*batch), batch
        except BadDataError as error:
            if not log.skip_bad_steps:
                raise
            bad = error
            if are_steps:
                log.skip_batch(error)
    raise bad or ValueError("`batches` gave no batch.")
