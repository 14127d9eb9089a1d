# SPDX-License-Identifier: Apache-2.0
"""One step of SVI: find the rows that it touches, gather them, move them and write them back."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, random

from numpyro_largecat.handlers.run_model import sites_of
from numpyro_largecat.handlers.shared_rows import share_rows
from numpyro_largecat.handlers.touched_rows import TouchedRows
from numpyro_largecat.ops.table_rows import gather_rows, scatter_rows
from numpyro_largecat.svi.narrow_tables import narrow, widen
from numpyro_largecat.svi.plan import Plan
from numpyro_largecat.svi.row_loss import RowLoss
from numpyro_largecat.svi.row_optimizer import Rows, gather_state, scatter_state
from numpyro_largecat.svi.state import RuledParam, SubsampledSVIState

ROW_STREAM = 0x726F7773  # keeps the keys of plates apart from those that `split` makes


class GatheredStep(NamedTuple):
    """The rows of one step, and the loss as a function of them."""

    rows: Rows  # of parameters that are not taken whole
    owners: list[str | None]  # whose rows the leaves of the optimiser's state hold
    optim_rows: Any  # the optimiser's state for these rows
    params: dict[str, Any]  # unconstrained rows of the parameters that the optimiser moves
    loss: RowLoss
    next_key: Array


def gather_step(plan: Plan, state: SubsampledSVIState, args: Any, kwargs: Any) -> GatheredStep:
    """Find the rows that a step touches, and gather them.

    Raises:
        ValueError: If the state is one of another model or optimiser, or the optimiser mixes rows.
    """
    plan.check(state)
    kwargs = plan.with_static(kwargs)
    next_key, step_key = random.split(state.rng_key)
    touched = _find_rows(plan, state, step_key, args, kwargs)
    rows = plan.rows(touched)
    owners = plan.row_owners(rows)
    optim_rows = widen(gather_state(state.optim_state, owners, rows), plan.computed)
    params = plan.optim.get_params(optim_rows)
    local_rows = {
        name: jax.tree.map(lambda table, name=name: gather_rows(table, rows[name]), local)
        if name in rows
        else local
        for name, local in state.local_state.items()
    }
    loss = RowLoss(plan, touched, step_key, args, kwargs, state.mutable_state, local_rows)
    return GatheredStep(rows, owners, optim_rows, params, loss, next_key)


def take_step(
    plan: Plan,
    state: SubsampledSVIState,
    args: Any,
    kwargs: Any,
    *,
    forward_mode: bool = False,
    finite_gradients: bool = False,
    finite_params: bool = False,
) -> tuple[SubsampledSVIState, Array]:
    """Take a step unless what must be finite is not; then keep all values, with loss NaN.

    Cost: O(touched rows), if ``state`` is donated.

    Returns:
        The new state, and the loss at the old one.
    """
    step = gather_step(plan, state, args, kwargs)
    (loss, aside), grads = value_and_grad(step.loss, step.params, forward_mode)
    optim_rows = plan.optim.update(grads, step.optim_rows, value=loss)
    new = (optim_rows, *aside)
    if finite_gradients or finite_params:
        ok = jnp.isfinite(loss)
        ok &= _all_finite(grads) if finite_gradients else True
        ok &= _all_finite(plan.optim.get_params(optim_rows)) if finite_params else True
        old = (step.optim_rows, state.mutable_state, step.loss.local_rows)
        new = jax.tree.map(partial(jnp.where, ok), new, old)
        loss = jnp.where(ok, loss, jnp.nan)
    stored_rows = narrow(new[0], state.optim_state, state.rng_key)
    optim_state = scatter_state(state.optim_state, stored_rows, step.owners, step.rows)
    local_state = _scatter_local(state.local_state, new[2], step.rows)
    num_steps = state.num_steps + 1
    moved = SubsampledSVIState(optim_state, new[1], step.next_key, local_state, num_steps)
    return plan.pinned(moved), loss


def _find_rows(
    plan: Plan, state: SubsampledSVIState, step_key: Array, args: Any, kwargs: Any
) -> TouchedRows:
    """Run the model, at any feasible latent values, to learn the rows of its plates."""
    touched = TouchedRows()
    local = {name: local.value for name, local in state.local_state.items()}
    tables = plan.optim.get_params(state.optim_state) | local
    computed = plan.optim.get_params(plan.computed) | local

    def lookup(msg: dict[str, Any]) -> Any:
        name = msg["name"]
        param = plan.stored.get(name)
        if param is None:
            return None
        rows = param.rows(touched)
        taken = jax.tree.map(lambda x: gather_rows(x, rows) if rows else x, tables[name])
        return param.value(widen(taken, computed[name]), touched)

    def run(fn: Any, key: Array) -> None:
        fn = share_rows(fn, touched, gathered=plan.stored.__contains__, lookup=lookup)
        sites_of(fn, args, kwargs, rng_key=key, params=state.mutable_state)

    model_key, guide_key = random.split(random.fold_in(step_key, ROW_STREAM))
    run(plan.model, model_key)
    named = {name for param in plan.stored.values() for name in param.plates.values()}
    if not named <= touched.plates.keys():  # the guide has plates of its own
        run(plan.guide, guide_key)
    for name, param in plan.stored.items():
        for table in jax.tree.leaves(tables[name])[:1]:  # none where all of a network is random
            param.check_size(name, jnp.shape(table), touched)
    return touched


def _scatter_local(
    local_state: dict[str, RuledParam], moved: dict[str, RuledParam], rows: Rows
) -> dict[str, RuledParam]:
    """Write moved rows back into the tables of the local parameters."""

    def write(name: str, table: Array, new: Array) -> Array:
        return scatter_rows(table, rows[name], new) if name in rows else new

    return {
        name: jax.tree.map(partial(write, name), local, moved[name])
        for name, local in local_state.items()
    }


def _all_finite(tree: Any) -> Array:
    return jnp.stack([jnp.isfinite(x).all() for x in jax.tree.leaves(tree)] or [True]).all()


def value_and_grad(
    fn: Callable[[Any], tuple[Array, Any]], params: Any, forward_mode: bool
) -> tuple[tuple[Array, Any], Any]:
    """The value of a loss with what it returns besides, and its gradient."""
    if not forward_mode:
        return jax.value_and_grad(fn, has_aux=True)(params)

    def with_value(params: Any) -> tuple[Array, tuple[Array, Any]]:
        loss, aux = fn(params)
        return loss, (loss, aux)

    grads, value = jax.jacfwd(with_value, has_aux=True)(params)
    return value, grads
