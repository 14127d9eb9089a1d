# SPDX-License-Identifier: Apache-2.0
"""Run model and guide once, operation by operation or as a part of a program."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, random
from numpyro.infer import Trace_ELBO, TraceEnum_ELBO, TraceMeanField_ELBO

from numpyro_largecat.handlers.automatic_guides import free_start_values, set_up_anew
from numpyro_largecat.handlers.closed_over_arrays import compiled
from numpyro_largecat.handlers.internals import Search, search_for_start_values, trace_state_clean
from numpyro_largecat.handlers.plate_facts import plate_facts, rows_request
from numpyro_largecat.handlers.run_model import Around, as_drawn, at_feasible_values, sites_of
from numpyro_largecat.handlers.sites import Sites, is_latent, mutable_values, of_type
from numpyro_largecat.handlers.static_arguments import split_arguments
from numpyro_largecat.handlers.touched_rows import TouchedRows
from numpyro_largecat.handlers.valid_arguments import have_valid_arguments
from numpyro_largecat.svi.bad_step import explained_search
from numpyro_largecat.svi.estimated_mixtures import refuse_estimated_mixtures
from numpyro_largecat.svi.first_state import start_optimiser, unconstrained_params
from numpyro_largecat.svi.following_classes import SampledClasses, sampled_classes
from numpyro_largecat.svi.joint_guides import refuse_joint_guides
from numpyro_largecat.svi.labels import GivenLabels, check_labels, labels_of
from numpyro_largecat.svi.masked_sites import masked_sites, refuse_masked_sites
from numpyro_largecat.svi.plan import Plan
from numpyro_largecat.svi.reading_by_place import plates_that_may_be_read
from numpyro_largecat.svi.sharding import Sharding
from numpyro_largecat.svi.start_values import check_start_values
from numpyro_largecat.svi.state import SubsampledSVIState
from numpyro_largecat.svi.stored_params import StoredParam, describe_param


class Seen(NamedTuple):
    """Arrays that the run of the model has shown."""

    touched: TouchedRows
    labels: GivenLabels
    is_valid: Array  # whether all distributions have arguments that they can take
    model_key: Array


class Suspect(NamedTuple):
    """What of a model is to be looked at further, plates by runs with other rows."""

    read_plates: list[str]  # that may be read by place
    sampled: dict[str, SampledClasses]  # class plates
    params: list[str]  # of the model
    masked: list[str]  # latent sites


class Made(NamedTuple):
    """What a first run gives."""

    plan: Plan  # without the entries to record
    state: SubsampledSVIState
    seen: Seen
    suspect: Suspect


def run_both(
    plan: Plan,
    rng_key: Array,
    args: Any,
    kwargs: Any,
    given: dict[str, Any],
    are_valid: list[Array] | None = None,
) -> Made:
    """Run model and guide; learn the plan, and make the first state.

    Labels are checked as soon as they are known. Where this is the code of one program,
    ``are_valid`` takes whether start values are, and who calls it checks this and the labels.
    """
    rng_key, model_key, guide_key = random.split(rng_key, 3)
    of_model = _run_model(plan, model_key, given, args, kwargs)
    seen = of_model.seen
    if are_valid is None:
        check_labels(seen.labels)
    refuse_joint_guides(plan.guide, seen.touched, args, kwargs)
    wrapped = _compiled_search if are_valid is None else _noting(are_valid)
    explained = explained_search(plan.model, given, args, kwargs)
    with search_for_start_values(wrapped), explained:
        of_guide, is_valid = _run_guide(plan, guide_key, given, of_model, args, kwargs)
    seen = seen._replace(is_valid=seen.is_valid & is_valid)
    sites, values, mutable = (a | b for a, b in zip(of_model.found, of_guide, strict=True))
    values |= given
    kinds, suspect = of_model.kinds, of_model.suspect
    del of_model, of_guide  # tables are freed one by one
    _check_loss(plan.loss, sites, kinds)
    free_start_values(plan.guide, {n: rows_of_parts(s, seen.touched) for n, s in sites.items()})
    optimised, local_state = unconstrained_params(sites, values)
    plan = _with_batch_plate(plan, kinds, sites).learned(
        sites, jax.eval_shape(plan.optim.init, optimised)
    )
    optim_state = start_optimiser(plan, optimised, plan.rows(seen.touched))
    state = SubsampledSVIState(
        optim_state, mutable or None, rng_key, local_state, jnp.zeros((), jnp.int32)
    )
    return Made(plan.with_state(state), state, seen, suspect)


def _compiled_search(search: Search) -> Search:
    """The search as a program of its own, but where what it closes over is traced."""
    return compiled(search, runs_once=True) if trace_state_clean() else search


def _noting(are_valid: list[Array]) -> Callable[[Search], Search]:
    """Note of a search whether what it has found is valid."""

    def noting(search: Search) -> Search:
        def search_and_note(rng_key: Array) -> Any:
            found = search(rng_key)
            are_valid.append(found[1])
            return found

        return search_and_note

    return noting


def _with_batch_plate(plan: Plan, kinds: dict[str, str], sites: dict[str, StoredParam]) -> Plan:
    """Learn which plate is that of the minibatch, of those that are spread over devices."""
    if plan.sharding is None:
        return plan
    plan.sharding.check_plates(kinds)
    tables = {plate for site in sites.values() for plate in site.plates.values()}
    of_rows = [
        name
        for name in plan.sharding.axes
        if kinds[name] == "data" or (kinds[name] == "plain" and name not in tables)
    ]
    if len(of_rows) > 1:
        raise ValueError(
            f"`sharding` must name one plate of the rows of a minibatch; got {of_rows}."
        )
    return replace(plan, batch_plate=of_rows[0] if of_rows else None)


class _Found(NamedTuple):
    """What a run of model or guide has shown."""

    sites: dict[str, StoredParam]  # of its parameters
    values: dict[str, Any]  # of its parameters, constrained and whole
    mutable: dict[str, Any]  # values of its mutable sites


class _OfModel(NamedTuple):
    """What the run of the model has shown."""

    seen: Seen
    found: _Found
    suspect: Suspect
    kinds: dict[str, str]  # of all plates


def _found(sites: Sites, touched: TouchedRows, sharding: Sharding | None) -> _Found:
    params = of_type("param", sites)
    return _Found(
        {name: describe_param(site, touched, sharding) for name, site in params.items()},
        {name: site["value"] for name, site in params.items()},
        mutable_values(sites),
    )


def _run_model(
    plan: Plan, rng_key: Array, given: dict[str, Any], args: Any, kwargs: Any
) -> _OfModel:
    """Run the model, compiled."""
    arrays, static = split_arguments((args, kwargs))
    described: dict[str, StoredParam] = {}  # they are not arrays: they leave the trace on their own
    suspect = Suspect([], {}, [], [])
    kinds: dict[str, str] = {}

    def run(rng_key: Array, arrays: list[Any], given: dict[str, Any]) -> Any:
        args, kwargs = static.restore(arrays)
        touched = TouchedRows()
        how: dict[str, Any] = {"rng_key": rng_key, "params": given, "touched": touched}
        around = _checked(at_feasible_values, given)
        sites = sites_of(plan.model, args, kwargs, **how, around=around)
        _warn_of_discrete_sites(sites, plan.loss)
        refuse_estimated_mixtures(sites)
        found = _found(sites, touched, plan.sharding)
        kinds.update(_kinds_of_plates(sites))
        described.update(found.sites)
        suspect.read_plates.extend(plates_that_may_be_read(sites, arrays))
        suspect.sampled.update(sampled_classes(sites))
        suspect.params.extend(found.sites)
        suspect.masked.extend(masked_sites(sites))
        seen = Seen(touched, labels_of(sites), have_valid_arguments(sites), rng_key)
        return seen, found.values, found.mutable

    seen, values, mutable = compiled(run, runs_once=True)(rng_key, arrays, given)
    return _OfModel(seen, _Found(described, values, mutable), suspect, kinds)


def _checked(around: Around, given: dict[str, Any]) -> Around:
    return lambda fn: check_start_values(around(fn), given)


def _kinds_of_plates(sites: Sites) -> dict[str, str]:
    """The kind of each plate, without those that only choose the rows of another."""
    plates = of_type("plate", sites).items()
    return {name: plate_facts(site).kind for name, site in plates if rows_request(site) is None}


def _run_guide(
    plan: Plan, rng_key: Array, given: dict[str, Any], of_model: _OfModel, args: Any, kwargs: Any
) -> tuple[_Found, Array]:
    """Run the guide as it is, since autoguides keep what they see.

    Returns:
        What it has shown, and whether its distributions have arguments that they can take.
    """
    set_up_anew(plan.guide)
    touched = of_model.seen.touched
    around = _checked(as_drawn, given)
    how: dict[str, Any] = {"rng_key": rng_key, "params": given, "around": around}
    sites = sites_of(plan.guide, args, kwargs, touched=touched, **how)
    refuse_masked_sites(of_model.suspect.masked, sites)
    return _found(sites, touched, plan.sharding), have_valid_arguments(sites)


def _warn_of_discrete_sites(sites: Sites, loss: Any) -> None:
    """Warn, as NumPyro does, of latent sites that the loss cannot handle."""
    for name, site in sites.items():
        if not is_latent(site):
            continue
        if site["fn"].support.is_discrete and not loss.can_infer_discrete:
            what = f"site '{name}' is discrete and latent"
            kind = type(loss).__name__
            warnings.warn(f"{what}, which SVI with {kind} does not support.", stacklevel=2)


def _check_loss(loss: Any, sites: dict[str, StoredParam], kinds: dict[str, str]) -> None:
    """Refuse a loss that hides from us what its particles do to local parameters.

    Also one that puts plates of its own in the place of ours, of these kinds by name.
    """
    own = [name for name, kind in kinds.items() if kind != "plain"]
    if own and isinstance(loss, TraceEnum_ELBO):
        raise NotImplementedError(
            f"TraceEnum_ELBO runs plates of its own in the place of '{own[0]}', which then has no "
            "rows. Sum over discrete sites by `lc.TopL_ELBO(num_active)`, with as many active "
            "values as there are for the whole sum."
        )
    local = [name for name, site in sites.items() if site.rule is not None]
    if local and not isinstance(loss, (Trace_ELBO, TraceMeanField_ELBO)):
        raise NotImplementedError(
            f"the update rule of param '{local[0]}', as those of `sample_choice`, cannot run under "
            f"{type(loss).__name__}: it needs the mean over particles, Trace_ELBO "
            "or TraceMeanField_ELBO."
        )


def rows_of_parts(site: StoredParam, touched: TouchedRows) -> tuple[int, ...]:
    """Axes of a parameter that are rows of plates of which a step holds some."""
    return tuple(a for a, name in site.plates.items() if not touched.plates[name].full)
