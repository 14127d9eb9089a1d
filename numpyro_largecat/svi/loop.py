# SPDX-License-Identifier: Apache-2.0
"""The loop behind ``SubsampledSVI.run``: where it begins, its steps, and what it returns."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_largecat._checks import check_count, is_traced
from numpyro_largecat._result_so_far import exit_at_sigterm, held_signals
from numpyro_largecat.data.checkpoints import Checkpoints, CheckpointWriter, has_checkpoint
from numpyro_largecat.svi.callback_calls import CallbackCalls
from numpyro_largecat.svi.compiled_steps import RunOptions, run_traced
from numpyro_largecat.svi.loss_log import LossLog
from numpyro_largecat.svi.plan import Plan
from numpyro_largecat.svi.processes import check_same_checkpoint, check_same_in_all, in_all
from numpyro_largecat.svi.run_data import RunData
from numpyro_largecat.svi.run_result import SubsampledSVIRunResult
from numpyro_largecat.svi.run_so_far import RunSoFar
from numpyro_largecat.svi.saved_run import KIND, read_run, settings_of
from numpyro_largecat.svi.state import SubsampledSVIState

Init = Callable[..., tuple[Plan, SubsampledSVIState]]  # of the arrays of a first batch


def run_loop(
    plan: Plan,
    init: Init,
    data: RunData,
    rng_key: Array,
    num_steps: int,
    *,
    progress_bar: bool,
    options: RunOptions,
    init_state: SubsampledSVIState | None,
    calls: CallbackCalls,
    checkpoints: Checkpoints | None,
    resume: bool,
    begun: Callable[[RunSoFar], None],
) -> SubsampledSVIRunResult:
    """See ``SubsampledSVI.run``.

    ``plan`` is that of ``init_state``; if there is none, ``init`` makes a plan and the first state
    from the arrays of a first batch. ``begun`` gets the run, for what is raised from then on.
    """
    num_steps = check_count("num_steps", num_steps, 1)
    traced = data.is_traced or is_traced((rng_key, init_state))
    needs_python = checkpoints is not None or bool(calls) or data.is_read
    if traced:
        _refuse_traced(needs_python)
    goes_on = _goes_on(plan, num_steps, calls, checkpoints, resume)
    settings = {}
    if checkpoints is not None:
        settings = settings_of(data.batches, rng_key, (data.args, data.kwargs)) | {
            "[every_steps, patience] of `held_out`": calls.settings
        }
    log = LossLog(num_steps, progress_bar and not traced, options.skip_bad_steps)
    run = RunSoFar(plan, log, options, calls, settings)
    begun(run)
    arguments = data.args, data.kwargs, data.drawn
    if traced:
        state = _first_state(run, data, init, init_state)
        return run_traced(run.plan, state, num_steps, arguments, options)
    writer = CheckpointWriter(checkpoints, KIND, run.reached, spans=plan.spans_processes)
    with exit_at_sigterm(checkpoints is not None), writer as run.writer, log:
        state = _first_state(run, data, init, init_state)
        if is_traced(state):  # model or guide closes over values of a transformation
            _refuse_traced(needs_python)
            return run_traced(run.plan, state, num_steps, arguments, options)
        if goes_on:
            assert checkpoints is not None
            del state  # of no use to a run that goes on from a checkpoint
            _go_on(run, data, checkpoints)
        else:
            run.state = state
        run.take_steps(data)
        if log.is_last_bad:
            run.explain_bad_step()
        log.warn()
        result = run.result()
        log.say(lambda: str(result.convergence))
        return result


def _refuse_traced(needs_python: bool) -> None:
    if needs_python:
        raise ValueError(
            "`checkpoints`, `held_out`, `callbacks` and batches that are read as steps run need a "
            "run outside of `jit`, `vmap` and the like; leave them out, with `lc.ArrayBatches` for "
            "the batches, or take this run out of the transformation."
        )


def _goes_on(
    plan: Plan, num_steps: int, calls: CallbackCalls, checkpoints: Checkpoints | None, resume: bool
) -> bool:
    """Whether a run goes on from a checkpoint; processes that make it together must agree."""
    spans = plan.spans_processes
    if spans:
        check_same_in_all(num_steps, calls, checkpoints)
    goes_on = has_checkpoint(checkpoints, resume, KIND, spans)
    if spans and checkpoints is not None:
        numbers = checkpoints.fit_folder(KIND, spans).numbers()
        check_same_checkpoint(numbers[-1] if goes_on else -1)
    return goes_on


def _first_state(
    run: RunSoFar, data: RunData, init: Init, init_state: SubsampledSVIState | None
) -> SubsampledSVIState:
    """The state to begin with. One that is given is what the run has reached, from here on."""
    if init_state is not None:
        run.plan.check(init_state)
        run.state = jax.tree.map(jnp.copy, init_state)
    data.check(run.plan, run.options.skip_bad_steps)
    state = run.state
    if state is None:
        run.plan, state = data.first_state(init, run.log)
    data.check_batch_size(run.plan)
    return state


def _go_on(run: RunSoFar, data: RunData, checkpoints: Checkpoints) -> None:
    """Take over the newest checkpoint, and do what was due at its step."""
    passed = run.log.num_taken  # batches of a stream that were bad, before the first good one
    spans = run.plan.spans_processes
    folder = checkpoints.fit_folder(KIND, spans)
    reading = partial(read_run, folder, run.plan, run.settings)
    saved = in_all(reading) if spans else reading()
    with held_signals():
        run.go_on(saved)
    data.pass_over(run.log.num_taken - passed)
    run.after_steps()
