# SPDX-License-Identifier: Apache-2.0
"""Refuse models that read rows of a plate by their place, where they mean those of an id."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from numpyro_largecat._checks import is_traced
from numpyro_largecat.handlers.chosen_rows import reverse_rows
from numpyro_largecat.handlers.closed_over_arrays import compiled
from numpyro_largecat.handlers.distinct_rows import distinct_rows
from numpyro_largecat.handlers.plate_facts import plate_facts
from numpyro_largecat.handlers.run_model import at_feasible_values, sites_of
from numpyro_largecat.handlers.sites import (
    Site,
    Sites,
    is_latent,
    is_observed,
    log_prob_of,
    of_type,
    plates_of,
)
from numpyro_largecat.handlers.static_arguments import with_jax_arrays
from numpyro_largecat.handlers.touched_rows import TouchedRows

LOG_DENSITY_TOLERANCE = 1e-3  # far above rounding, far below what another row changes


def plates_that_may_be_read(sites: Sites, arrays: Sequence[Any]) -> list[str]:
    """The plates of a model that hold some of their rows, and that it may read by id.

    These are its entity plates with ids and its class plates with ``reads``; and all class plates,
    if ``arrays``, the arguments of the model, have more arrays of integers than it observes or
    gives to data plates as row ids.
    """
    facts = {name: plate_facts(site) for name, site in of_type("plate", sites).items()}
    num_ids = sum(map(_are_integers, arrays))
    num_ids -= sum(known.row_ids is not None for known in facts.values())
    num_ids -= sum(is_observed(s) and _are_integers(s["value"]) for s in sites.values())
    return [
        name
        for name, known in facts.items()
        if known.row_weights is not None
        and (known.kind == "entities" or known.reads is not None or num_ids > 0)
    ]


def _are_integers(value: Any) -> bool:
    if value is None or jnp.ndim(value) == 0:  # a factor observes nothing
        return False
    return bool(jnp.issubdtype(jnp.result_type(value), jnp.integer))


def _is_discrete_in(site: Site, plates: Sequence[str]) -> bool:
    in_plates = is_latent(site) and bool(plates_of(site) & set(plates))
    return in_plates and bool(site["fn"].support.is_discrete)


def refuse_reading_by_place(
    model: Any, plates: list[str], rng_key: Array, params: dict[str, Any], args: Any, kwargs: Any
) -> None:
    """Refuse a model whose log density of an observation changes with the order of the rows.

    A plate holds rows in an order of its own, so that ``v[ids]`` gives those of other ids. Here the
    rows differ by id, and what is read or drawn comes once in the plate's order and once in the
    opposite one: what is read by ``rows_of``, or scored, is the same.

    Discrete latent rows are drawn by their place, so a model that has some is not looked at.

    Cost: two runs of the model, compiled once. Nothing is done under ``jit``.

    Raises:
        ValueError: With the site and the plates.
    """
    model = distinct_rows(model, plates)

    def log_densities(is_reversed: Array) -> dict[str, Array]:
        def around(fn: Any) -> Any:
            return reverse_rows(at_feasible_values(fn), plates, is_reversed)

        known: dict[str, Any] = {"rng_key": rng_key, "params": params, "touched": TouchedRows()}
        sites = sites_of(model, args, kwargs, **known, around=around)
        if any(_is_discrete_in(site, plates) for site in sites.values()):
            return {}
        return {  # what is observed of the rows themselves follows their order
            name: log_prob_of(site)
            for name, site in sites.items()
            if is_observed(site) and not plates_of(site) & set(plates)
        }

    if is_traced((rng_key, params, args, kwargs)):
        return
    args, kwargs = with_jax_arrays((args, kwargs))
    in_both_orders = compiled(lambda: lax.map(log_densities, jnp.array([False, True])))()
    for name, (a, b) in in_both_orders.items():
        same = (a == b) | (jnp.abs(a - b) <= LOG_DENSITY_TOLERANCE * (1 + jnp.abs(a)))
        differ = ~(same | (jnp.isnan(a) & jnp.isnan(b))).all()
        if differ:
            raise ValueError(
                f"the log density of site '{name}' depends on the order of the rows that plates "
                f"{plates} hold, which is their own: `v[ids]` gives rows of other ids. Read by id, "
                "`with lc.entity_plate(...) as read:` and `read.rows_of(v, ids)`; or, of a class "
                "plate with `reads=ids`, `classes.rows_of(w, ids)`, and `classes.scored(w)` for "
                "the classes of the choice. Take features of classes by `classes.indices`."
            )
