# SPDX-License-Identifier: Apache-2.0
"""Learn the plan of a fit, and make its first state."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_largecat._checks import check_arguments
from numpyro_largecat.svi.following_classes import refuse_following_classes
from numpyro_largecat.svi.iterates import choose_entries
from numpyro_largecat.svi.model_and_guide import Made, run_both
from numpyro_largecat.svi.one_program import as_one_program, may_be_one_program
from numpyro_largecat.svi.plan import Plan
from numpyro_largecat.svi.reading_by_place import refuse_reading_by_place
from numpyro_largecat.svi.state import SubsampledSVIState


def first_run(
    plan: Plan, rng_key: Array, args: Any, kwargs: Any, init_params: dict[str, Any] | None
) -> tuple[Plan, SubsampledSVIState]:
    """See ``SubsampledSVI.init``; the state's arrays are its own, so that it may be donated."""
    check_arguments(plan.model, args, kwargs)
    kwargs = plan.with_static(kwargs)
    given = init_params or {}
    made = None
    if plan.sharding is not None or may_be_one_program(plan, rng_key, args, kwargs, given):
        made = as_one_program(plan, rng_key, args, kwargs, given)
    if made is None:
        made = run_both(plan, rng_key, args, kwargs, given)
    _check_names(given, made.plan)
    key, suspect = made.seen.model_key, made.suspect
    if suspect.read_plates:
        refuse_reading_by_place(plan.model, suspect.read_plates, key, given, args, kwargs)
    params = given | _values_outside_of_plates(made) | (made.state.mutable_state or {})
    refuse_following_classes(plan.model, suspect.sampled, key, params, args, kwargs)
    shapes = plan.optim.get_params(made.plan.computed)
    recorded = choose_entries(made.plan.stored, shapes, made.seen.touched)
    return replace(made.plan, recorded=recorded), made.state


def _values_outside_of_plates(made: Made) -> dict[str, Any]:
    """Parameters outside of plates, moved slightly from their start values.

    One that is 0 would hide what it multiplies.
    """
    stored = made.plan.optim.get_params(made.state.optim_state)
    params = {name: made.plan.stored[name] for name in made.suspect.params if name in stored}
    return {
        name: of.transform(jax.tree.map(_moved, stored[name]))
        for name, of in params.items()
        if not of.plates
    }


def _moved(x: Array) -> Array:
    return x + 0.1 * jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape)


def _check_names(given: dict[str, Any], plan: Plan) -> None:
    """Refuse start values of what is no parameter, which nothing would read."""
    unknown = sorted(given.keys() - plan.stored.keys())
    if unknown:
        raise ValueError(
            f"`init_params` must be parameters of model or guide, {sorted(plan.stored)}; got "
            f"{unknown}. Correct these, or leave them out."
        )
