# SPDX-License-Identifier: Apache-2.0
"""The first state of the optimiser and of update rules, from constrained values of parameters."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from numpyro_largecat.svi.narrow_tables import narrow_tables, widen
from numpyro_largecat.svi.own_memory import without_aliases
from numpyro_largecat.svi.plan import Plan
from numpyro_largecat.svi.row_optimizer import Rows
from numpyro_largecat.svi.sharding import with_padding
from numpyro_largecat.svi.state import RuledParam, shapes_of
from numpyro_largecat.svi.stored_params import StoredParam


def unconstrained_params(
    sites: dict[str, StoredParam], values: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, RuledParam]]:
    """The parameters that the optimiser moves, and those of update rules.

    All are in memory of their own. Each value leaves ``values`` as its copy is made.
    """
    optimised, local = {}, {}
    for name, site in sites.items():
        value = with_padding(_unconstrained(site, values.pop(name)), site.padding)
        if site.rule is None:
            optimised[name] = value
        else:
            local[name] = RuledParam(value, site.rule.init(value))
    return optimised, local


def start_optimiser(plan: Plan, params: dict[str, Any], rows: Rows) -> Any:
    """The optimiser's state, which holds these parameters; they are gone then.

    Raises:
        ValueError: If the optimiser mixes rows.
    """
    owners = plan.row_owners(rows)
    computed = shapes_of(params)
    if plan.table_dtype is not None:
        for name in rows.keys() & params.keys():  # one by one, so that few are wide at a time
            params[name] = narrow_tables(params.pop(name), [name])

    def start(params: dict[str, Any]) -> Any:  # no moment is ever made wide
        state = plan.optim.init(widen(params, computed))
        return state if plan.table_dtype is None else narrow_tables(state, owners)

    return without_aliases(jax.jit(start, donate_argnums=0)(params))


def _unconstrained(site: StoredParam, value: Any) -> Any:
    """Unconstrained copy of a value, with strong types."""

    def inverse(value: Any) -> Any:
        value = site.transform.inv(value)
        return jax.tree.map(lambda x: jnp.array(x, jnp.result_type(x), copy=True), value)

    value = jax.tree.map(lambda x: jnp.asarray(x, jnp.result_type(x)), value)
    return jax.jit(inverse)(value)
