# SPDX-License-Identifier: Apache-2.0
"""What a run of ``SubsampledSVI`` has reached, and the steps that take it further."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_largecat._checks import BadDataError, UnsuitedModelError, check_arguments
from numpyro_largecat._result_so_far import handled_signals, held_signals
from numpyro_largecat.data.checkpoints import CheckpointWriter, Reached
from numpyro_largecat.handlers.closed_over_arrays import compiled
from numpyro_largecat.handlers.static_arguments import StaticArguments, split_arguments
from numpyro_largecat.svi.bad_step import first_not_finite
from numpyro_largecat.svi.callback_calls import CallbackCalls
from numpyro_largecat.svi.compiled_steps import (
    RunOptions,
    StepForm,
    StepsTaken,
    arguments_of_step,
    chunks_of_steps,
)
from numpyro_largecat.svi.iterates import IterateLog
from numpyro_largecat.svi.loss_log import LossLog
from numpyro_largecat.svi.plan import Plan
from numpyro_largecat.svi.processes import is_over_in_any
from numpyro_largecat.svi.run_data import RunData, refuse_empty
from numpyro_largecat.svi.run_result import SubsampledSVIRunResult
from numpyro_largecat.svi.saved_run import SavedRun, as_reached
from numpyro_largecat.svi.state import SubsampledSVIState
from numpyro_largecat.svi.streamed_batches import StreamedBatches

MAX_CHUNK = 100  # steps of one compiled loop, between two looks at the losses
CHUNK_SECONDS = 1.0  # that it may take, since signals wait until its end
STEPS_TOGETHER = 10  # of each chunk of several processes, which must take equally many


class RunSoFar:
    """What a run has reached: always a state that is there, and the losses that belong to it."""

    writer: CheckpointWriter  # that of the block in which steps are taken
    arguments: tuple[StaticArguments, list[Any]]  # of the last steps
    last_key: Array  # of the last step

    def __init__(
        self,
        plan: Plan,
        log: LossLog,
        options: RunOptions,
        calls: CallbackCalls,
        settings: Mapping[str, Any],
    ) -> None:
        self.plan = plan
        self.log = log
        self.options = options
        self.calls = calls
        self.settings = settings  # what must be the same in a run that goes on
        self.state: SubsampledSVIState | None = None  # until `init` has made one
        self.begun: tuple[int, StepsTaken] | None = None  # steps that run, and how many
        self.iterates = IterateLog()
        self.signals: tuple[int, ...] = ()  # that wait while steps run
        # Steps of a chunk that lasts as long as it may.
        self.pace = STEPS_TOGETHER if plan.spans_processes else 1

    def take_steps(self, data: RunData) -> None:
        """Take the steps that are left."""
        self.signals = handled_signals()  # SIGTERM has a handler only while a fit runs
        if data.read is not None:
            self.take_stacks(data.read, data.args, data.kwargs)
        elif data.stream is not None:
            self.take_batches(data.stream, data.args, data.kwargs)
        else:
            self.take_chunks((data.args, data.kwargs, self.plan.everywhere(data.drawn)))

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
                refuse_empty(batch)
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
        most = self.writer.steps_to_go(self.log.num_taken, most)
        return self.log.steps_to_go(most)

    def _chunk(self, arrays: list[Any], static: StaticArguments, length: int) -> Any:
        """The compiled program of a chunk of at most ``length`` steps."""
        form = StepForm(static, self.options, length)
        return self._chunks.program(self.state, 0, self.plan.recorded, arrays, form)

    @cached_property
    def _chunks(self) -> compiled:
        """Of the plan, which is the same in all steps."""
        return chunks_of_steps(self.plan)

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
        """Say what the step that ended the fit was given, or has made, that is not finite.

        Raises:
            UnsuitedModelError: If the loss is not for the model and no step has been taken.
        """
        assert self.state is not None
        args, kwargs = arguments_of_step(self.plan, *self.arguments, self.state.num_steps - 1)
        args, kwargs = self.plan.fetched((args, kwargs))
        before = self.state._replace(rng_key=self.last_key)
        forward_mode = self.options.forward_mode
        try:
            check_arguments(self.plan.model, args, kwargs)
            found = first_not_finite(self.plan, before, args, kwargs, forward_mode=forward_mode)
        except (BadDataError, UnsuitedModelError) as error:
            if isinstance(error, UnsuitedModelError) and self.log.num_taken == 1:
                raise
            self.log.stop(str(error).rstrip("."), self.log.num_taken - 1)
            return
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
        self.writer.after_steps(log.num_taken)

    def _copy_of_state(self) -> Any:
        return jax.tree.map(jnp.copy, self.state)

    def go_on(self, saved: SavedRun) -> None:
        """Take over what a checkpoint holds."""
        place = saved.place
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
        stacklevel=6,
    )
