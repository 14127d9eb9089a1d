# SPDX-License-Identifier: Apache-2.0
"""Chunks of SVI steps as compiled programs, which reuse the memory of the state."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from numpyro_largecat.handlers.closed_over_arrays import compiled
from numpyro_largecat.handlers.static_arguments import StaticArguments, split_arguments
from numpyro_largecat.svi.iterates import Recorded, recorded_values
from numpyro_largecat.svi.plan import Plan
from numpyro_largecat.svi.run_result import SubsampledSVIRunResult
from numpyro_largecat.svi.state import SubsampledSVIState
from numpyro_largecat.svi.step import take_step


class RunOptions(NamedTuple):
    """How the steps of a run are taken."""

    skip_bad_steps: bool
    forward_mode: bool


class StepForm(NamedTuple):
    """What a compiled chunk of steps is specialised to, besides its plan and shapes of arrays."""

    static: StaticArguments
    options: RunOptions
    length: int  # room for losses


class StepsTaken(NamedTuple):
    """What a chunk of steps gives."""

    state: SubsampledSVIState
    losses: Array  # (length,), NaN after the last step
    values: dict[str, Array]  # recorded entries of the parameters after each step
    last_key: Array  # key of the last step


def chunks_of_steps(plan: Plan) -> compiled:
    """Chunks of the steps of a plan.

    A chunk takes the state, whose memory it reuses, the number of steps, the entries to record and
    the arrays among the arguments of the model; it is specialised to a ``StepForm``. Model and
    guide are traced anew, since they may close over what is another in each run.
    """
    return compiled(partial(_take_steps, plan), static_argnums=(4,), donate_first=True)


def _take_steps(
    plan: Plan,
    state: SubsampledSVIState,
    count: Array,
    recorded: Recorded,
    arrays: list[Any],
    form: StepForm,
) -> StepsTaken:
    """Take up to ``count`` steps, fewer if one is bad and must not be skipped."""

    def entries(state: SubsampledSVIState) -> dict[str, Array]:
        params = (plan.optim.get_params(s) for s in (state.optim_state, plan.computed))
        return recorded_values(recorded, *params)

    def go_on(carry: tuple[Array, Array, StepsTaken]) -> Array:
        i, bad, _ = carry
        return (i < count) & ~bad

    def step(carry: tuple[Array, Array, StepsTaken]) -> tuple[Array, Array, StepsTaken]:
        i, _, (state, losses, values, _) = carry
        key = state.rng_key
        state, loss = _take_step(plan, form, state, arrays)
        bad = jnp.isnan(loss) & (not form.options.skip_bad_steps)

        def noted(all: Array, one: Array) -> Array:
            return all.at[i].set(one.astype(all.dtype))

        values = jax.tree.map(noted, values, entries(state))
        return i + 1, bad, StepsTaken(state, noted(losses, loss), values, key)

    def room(x: Any) -> Array:
        return jnp.full((form.length, *x.shape), jnp.nan)

    values = jax.tree.map(room, jax.eval_shape(entries, state))
    start = StepsTaken(state, room(jnp.zeros(())), values, state.rng_key)
    *_, (state, *others) = lax.while_loop(go_on, step, (jnp.array(0), jnp.array(False), start))
    return StepsTaken(state, *plan.seen_everywhere(others))


def run_traced(
    plan: Plan, state: SubsampledSVIState, num_steps: int, arguments: Any, options: RunOptions
) -> SubsampledSVIRunResult:
    """Take all steps under a transformation such as ``vmap``, where none can be looked at."""
    arrays, static = split_arguments(arguments)
    form = StepForm(static, options, num_steps)

    def step(state: SubsampledSVIState, _: None) -> tuple[SubsampledSVIState, Array]:
        return _take_step(plan, form, state, arrays)

    state, losses = lax.scan(step, state, None, length=num_steps)
    return SubsampledSVIRunResult(plan.params(state), state, losses)


def arguments_of_step(
    plan: Plan, static: StaticArguments, arrays: list[Any], step: ArrayLike
) -> Any:
    """The arguments and keyword arguments of the model in a step that counts from 0."""
    args, kwargs, drawn = static.restore(arrays)
    return (args if drawn is None else (*args, *plan.pinned_batch(drawn.batch(step)))), kwargs


def _take_step(
    plan: Plan, form: StepForm, state: SubsampledSVIState, arrays: list[Any]
) -> tuple[SubsampledSVIState, Array]:
    args, kwargs = arguments_of_step(plan, form.static, arrays, state.num_steps)
    skip, forward_mode = form.options
    return take_step(
        plan,
        state,
        args,
        kwargs,
        forward_mode=forward_mode,
        finite_gradients=skip,
        finite_params=True,
    )
