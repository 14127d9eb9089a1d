# SPDX-License-Identifier: Apache-2.0
"""What of a start or step was not finite: the first parameter, site or gradient, and its row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_largecat.handlers.closed_over_arrays import compiled
from numpyro_largecat.handlers.run_model import (
    Around,
    as_drawn,
    at_feasible_values,
    sites_of,
)
from numpyro_largecat.handlers.sites import Site, log_prob_of
from numpyro_largecat.handlers.static_arguments import split_arguments
from numpyro_largecat.handlers.touched_rows import TouchedRows
from numpyro_largecat.svi.importance_weighted_elbo import ImportanceWeighted_ELBO
from numpyro_largecat.svi.plan import Plan
from numpyro_largecat.svi.state import SubsampledSVIState
from numpyro_largecat.svi.step import gather_step, value_and_grad


class _Look(NamedTuple):
    """Where an array is not finite."""

    bad: Array  # one axis for each plate
    value: Array  # the first that is not finite
    rows: list[Array]  # of each plate, the row of each entry of ``bad``


def first_not_finite(
    plan: Plan, state: SubsampledSVIState, args: Any, kwargs: Any, *, forward_mode: bool
) -> str | None:
    """Say what is the first thing in a step that is not finite; None if everything is.

    Things are looked at in the order in which a step makes them: parameters, what the guide draws,
    log densities, gradients, new parameters. With several particles the first is looked at.

    Cost: that of a step and of compiling it.

    Args:
        plan: That of the fit.
        state: The state before the step, with its key.
        args: Arguments of the step, with its batch.
        kwargs: Its keyword arguments.
        forward_mode: Whether gradients are taken in forward mode.

    Raises:
        UnsuitedModelError: If the loss is NaN because it refuses what it finds.
    """
    if isinstance(plan.loss, ImportanceWeighted_ELBO):
        loss = copy(plan.loss)
        loss.num_draws = 1  # what it refuses does not depend on how many there are
        step = gather_step(replace(plan, loss=loss), state, args, kwargs)
        step.loss(step.params)  # outside of ``jit``, where it says why
    arrays, static = split_arguments((args, kwargs))
    described: list[tuple[str, list[str]]] = []  # strings leave the trace on their own

    def look(state: SubsampledSVIState, arrays: list[Any]) -> list[_Look]:
        args, kwargs = static.restore(arrays)
        looks = _looks(plan, state, args, kwargs, forward_mode)
        described[:] = [(what, plates) for what, plates, _ in looks]
        return plan.seen_everywhere([found for _, _, found in looks])

    looks = compiled(look)(state, arrays)
    for (what, plates), found in zip(described, looks, strict=True):
        if found.bad.any():
            return f"{what} is {found.value}{_where(plates, found)}"
    return None


@contextmanager
def explained_search(
    model: Callable[..., Any], params: Mapping[str, Any], args: Any, kwargs: Any
) -> Iterator[None]:
    """Add to NumPyro's error that no start is valid which site of the model is why.

    Args:
        model: The model.
        params: Values of parameters, by name; the others start at their own.
        args: Its arguments.
        kwargs: Its keyword arguments.
    """
    try:
        yield
    except RuntimeError as error:
        if "valid initial parameters" in str(error):
            for note in _why_no_start(model, params, args, kwargs):
                error.add_note(note)
        raise


def _why_no_start(
    model: Callable[..., Any], params: Mapping[str, Any], args: Any, kwargs: Any
) -> list[str]:
    """Sites that are not finite at 0 and at values of the prior: one alone may be a bad place."""
    looks = (at_feasible_values, as_drawn)
    try:
        at_zero, drawn = (_not_finite(model, params, args, kwargs, around) for around in looks)
    except Exception:  # of the model at such values, as with a scale of 0: it explains nothing
        return []
    return [
        f"With all free latent values at 0 {at_zero[name]}, and at values of the prior it is not "
        "finite either. Look for an observed class that is not available (-inf), or data that are "
        "not finite or outside of the support."
        for name in at_zero
        if name in drawn
    ]


def _not_finite(
    model: Callable[..., Any], params: Mapping[str, Any], args: Any, kwargs: Any, around: Around
) -> dict[str, str]:
    """What is said of each site whose log density is not finite at some latent values."""
    touched, said = TouchedRows(), {}
    sites = sites_of(model, args, kwargs, params=params, touched=touched, around=around)
    for name, site in sites.items():
        if site["type"] == "sample":
            density = "the model's log density"
            what, plates, found = _of_site(density, site, log_prob_of(site), 0, touched)
            if found.bad.any():
                said[name] = f"{what} is {found.value}{_where(plates, found)}"
    return said


def _looks(
    plan: Plan, state: SubsampledSVIState, args: Any, kwargs: Any, forward_mode: bool
) -> list[tuple[str, list[str], _Look]]:
    """Names of things, of the plates whose rows they have, and where they are not finite."""
    step = gather_step(plan, state, args, kwargs)
    touched = step.loss.touched
    looks: list[tuple[str, list[str], _Look]] = []

    def add_params(what: str, params: Mapping[str, Any]) -> None:
        for name, value in params.items():
            for leaf in jax.tree.leaves(value):
                looks.append(_of_param(plan, f"{what} '{name}'", name, leaf, touched))

    add_params("the parameter", step.params)
    guide_sites, model_sites = step.loss.sites(step.params)
    for site in guide_sites.values():
        if site["type"] == "sample" and jnp.issubdtype(jnp.result_type(site["value"]), float):
            event_dim = site["fn"].event_dim
            looks.append(_of_site("what the guide draws", site, site["value"], event_dim, touched))
    for sites, whose in ((model_sites, "model"), (guide_sites, "guide")):
        for site in sites.values():
            if site["type"] == "sample":
                what = f"the {whose}'s log density"
                looks.append(_of_site(what, site, log_prob_of(site), 0, touched))
    (loss, _), grads = value_and_grad(step.loss, step.params, forward_mode)
    add_params("the gradient of parameter", grads)
    moved = plan.optim.get_params(plan.optim.update(grads, step.optim_rows, value=loss))
    add_params("after the step, the parameter", moved)
    return looks


def _of_param(
    plan: Plan, what: str, name: str, leaf: Array, touched: TouchedRows
) -> tuple[str, list[str], _Look]:
    axes = plan.stored[name].plates
    rows = {axis: touched.plates[plate].stored for axis, plate in axes.items()}
    return what, *_look(leaf, axes, rows)


def _of_site(
    what: str, site: Site, values: Any, event_dim: int, touched: TouchedRows
) -> tuple[str, list[str], _Look]:
    values = jnp.asarray(values)
    axes = {values.ndim - event_dim + f.dim: f.name for f in site["cond_indep_stack"]}
    axes = {axis: name for axis, name in axes.items() if axis >= 0 and name in touched.plates}
    rows = {axis: touched.plates[name].indices for axis, name in axes.items()}
    return f"{what} at site '{site['name']}'", *_look(values, axes, rows)


def _look(
    values: Array, axes: Mapping[int, str], rows: Mapping[int, Array]
) -> tuple[list[str], _Look]:
    """Where values are not finite, by the rows of those axes that have an entry for each."""
    kept = [a for a in sorted(axes) if values.ndim > a and values.shape[a] == len(rows[a])]
    bad = ~jnp.isfinite(values)
    value = values.ravel()[jnp.argmax(bad)]
    others = tuple(a for a in range(values.ndim) if a not in kept)
    return [axes[a] for a in kept], _Look(bad.any(axis=others), value, [rows[a] for a in kept])


def _where(plates: list[str], found: _Look) -> str:
    """The first entry by its rows, and how many more there are."""
    if not plates:
        return ""
    first, *others = np.argwhere(np.asarray(found.bad))
    places = zip(plates, found.rows, first, strict=True)
    text = " and ".join(f"row {int(rows[i])} of plate '{name}'" for name, rows, i in places)
    return f" in {text}" + (f" ({len(others)} more are not finite)" if others else "")
