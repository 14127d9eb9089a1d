# SPDX-License-Identifier: Apache-2.0
"""The first run of model and guide as one program."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array

from numpyro_largecat._checks import is_concrete, is_traced
from numpyro_largecat.handlers.closed_over_arrays import compiled
from numpyro_largecat.handlers.guides_in_a_trace import (
    Learned,
    attributes_of,
    may_learn_in_a_trace,
    restore,
    sites_of_traced_support,
)
from numpyro_largecat.handlers.internals import (
    trace_state_clean,
)
from numpyro_largecat.handlers.static_arguments import split_arguments
from numpyro_largecat.svi.labels import check_labels
from numpyro_largecat.svi.model_and_guide import Made, Suspect, rows_of_parts, run_both
from numpyro_largecat.svi.own_memory import without_aliases
from numpyro_largecat.svi.plan import Plan
from numpyro_largecat.svi.state import SubsampledSVIState


def may_be_one_program(plan: Plan, *arguments: Any) -> bool:
    """Whether nothing is traced yet, and the guide keeps nothing but what can be mended."""
    is_clean = trace_state_clean() and not is_traced(arguments)
    return is_clean and may_learn_in_a_trace(plan.guide)


def as_one_program(
    plan: Plan, rng_key: Array, args: Any, kwargs: Any, given: dict[str, Any]
) -> Made | None:
    """The first run as one program, in which no device ever has a table whole.

    What it learns besides arrays leaves the trace on its own. By itself NumPyro runs its automatic
    guides operation by operation, some fifty programs: twice the time, and 70 MB more.

    Returns:
        What was made; None if it must be made operation by operation, where the guide keeps bounds
        of supports that are arrays, where the model has mutable values, or where NumPyro is to say
        what is not valid.
    """
    arrays, static = split_arguments((args, kwargs))
    before = attributes_of(plan.guide)
    found: list[tuple[Plan, Suspect, Learned]] = []

    def run(rng_key: Array, arrays: list[Any], given: dict[str, Any]) -> Any:
        args, kwargs = static.restore(arrays)
        are_valid: list[Array] = []
        made = run_both(plan, rng_key, args, kwargs, given, are_valid)
        of_steps, state, seen, suspect = made
        _refuse_what_stays_traced(plan, state)
        tables = {n: rows_of_parts(s, seen.touched) for n, s in of_steps.stored.items()}
        learned = Learned(plan.guide, tables, keeps_all=plan.sharding is None)
        found[:] = [(of_steps, suspect, learned)]  # no array of the trace
        seen = seen._replace(is_valid=jnp.stack([seen.is_valid, *are_valid]).all())
        return of_steps.pinned(state), *of_steps.seen_everywhere((seen, learned.take_arrays()))

    try:
        state, seen, of_guide = compiled(run, runs_once=True)(rng_key, arrays, given)
        check_labels(seen.labels)
        if is_concrete(seen.is_valid) and not seen.is_valid:
            if plan.sharding is None:
                raise _NotAsOneProgram
            raise RuntimeError(
                "no valid start was found: distributions of model or guide have arguments that "
                "they cannot take, or the log density or its gradient is not finite where the "
                "guide looked. Without `mesh`, NumPyro says more."
            )
    except _NotAsOneProgram:
        restore(plan.guide, before)
        return None
    except BaseException:
        restore(plan.guide, before)
        raise
    of_steps, suspect, learned = found[0]
    learned.put_back(plan.guide, of_guide, args, kwargs)
    state = without_aliases(state, (rng_key, arrays, given, of_guide))
    return Made(of_steps, state, seen, suspect)


class _NotAsOneProgram(Exception):
    """What must be made operation by operation after all."""


def _refuse_what_stays_traced(plan: Plan, state: SubsampledSVIState) -> None:
    """Refuse supports that are arrays; and mutable values, which models change in place.

    Raises:
        _NotAsOneProgram: If the first run can be made operation by operation.
        NotImplementedError: If it cannot, over a mesh.
    """
    traced = sites_of_traced_support(plan.guide)
    if plan.sharding is None and (traced or state.mutable_state is not None):
        raise _NotAsOneProgram
    if traced:
        raise NotImplementedError(
            f"the supports of the sites {traced} have bounds that are arrays, which an automatic "
            "guide cannot keep where `mesh` has it learn its model in a compiled program. Give "
            "them scalar bounds, or guide them by hand."
        )
