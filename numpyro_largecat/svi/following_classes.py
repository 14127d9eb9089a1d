# SPDX-License-Identifier: Apache-2.0
"""Refuse models in which something follows which classes a step happens to hold."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from numpyro_largecat._checks import is_concrete, is_traced
from numpyro_largecat.choices.choice_distribution import is_choice
from numpyro_largecat.handlers.closed_over_arrays import compiled
from numpyro_largecat.handlers.distinct_rows import distinct_rows
from numpyro_largecat.handlers.plate_facts import class_plates
from numpyro_largecat.handlers.run_model import at_feasible_values, sites_of
from numpyro_largecat.handlers.sites import Sites, base_distribution, log_prob_of
from numpyro_largecat.handlers.static_arguments import with_jax_arrays
from numpyro_largecat.handlers.touched_rows import TouchedRows
from numpyro_largecat.plates.varied_classes import Held, VariedClasses, hold_classes

MOST_TOGETHER = 512  # classes that are looked at
FEW_PAIRS = 2**18  # of observations and classes, which may be looked at whatever a step has


class SampledClasses(NamedTuple):
    """A class plate of which a step holds a sample."""

    num_categories: int
    num_seen: int  # of those that it holds, as many as are looked at


def sampled_classes(sites: Sites) -> dict[str, SampledClasses]:
    """The class plates of a model of which a step holds a sample, by name."""
    choices = [base_distribution(site["fn"]) for site in sites.values() if is_choice(site)]
    shapes = [choice.utilities.shape for choice in choices] or [(1, 1)]
    num_pairs = max(FEW_PAIRS, *map(math.prod, shapes))
    num_rows = max(1, *(math.prod(shape[:-1]) for shape in shapes))
    most = min(MOST_TOGETHER, max(8, num_pairs // num_rows))
    return {
        name: SampledClasses(sites[name]["args"][0], min(len(facts.row_weights), most))
        for name, facts in class_plates(sites).items()
        if facts.is_sampled and facts.row_weights is not None
    }


def refuse_following_classes(
    model: Any,
    plates: dict[str, SampledClasses],
    rng_key: Array,
    params: dict[str, Any],
    args: Any,
    kwargs: Any,
) -> None:
    """Refuse a model in which a class, or what is outside, changes with the classes that are drawn.

    Each step draws others, so a utility with ``b - b.mean()`` or ``price / price.min()`` would be
    another in each of them, and so would a ``numpyro.factor`` of ``b.sum()``. The model is run
    with classes among different others, see ``VariedClasses``; their rows are all different. The
    utilities of each class must be the same, and so must log densities of its sites, utilities over
    other plates, and log densities of sites outside of the plate, unless these follow the weights
    of the classes too. Models that cannot be run so, nor read, are not looked at.

    Cost: seven runs of the model, on at most ``MOST_TOGETHER`` classes and as many pairs as a step
    has, or ``FEW_PAIRS``; compiled once. Nothing is done under ``jit``; readings refuse such
    utilities there.

    Args:
        model: The model.
        plates: The class plates to look at.
        rng_key: Key of what the model draws.
        params: Values of its parameters.
        args: Arguments of the model.
        kwargs: Its keyword arguments.

    Raises:
        ValueError: With the plate, the site and a class.
    """
    if is_traced((rng_key, params, args, kwargs)):
        return
    args, kwargs = with_jax_arrays((args, kwargs))
    for plate, size in plates.items():
        varied = VariedClasses.of(*size)
        seen = partial(_seen, model, rng_key, params, args, kwargs, plate, varied)
        over, inside, elsewhere = _differing(seen, varied)
        each = f"each step holds other classes of plate '{plate}', and "
        fix = "leave `num_sampled` out, to have all classes in each step."
        for site, differ in over.items():
            if is_concrete(differ) and np.asarray(differ).any():
                what = follows_classes(plate, varied.class_id(differ))
                raise ValueError(f"{each}of choice '{site}' {what} Or {fix}")
        for site, differ in inside.items():
            if is_concrete(differ) and np.asarray(differ).any():
                raise ValueError(
                    f"{each}the log density of site '{site}' for class {varied.class_id(differ)} "
                    f"depends on which they are. It may depend on that class's row alone; or {fix}"
                )
        for site, differs in elsewhere.items():
            if is_concrete(differs) and differs:
                raise ValueError(
                    f"{each}site '{site}', outside of it, depends on which they are. A sum over "
                    "all classes is estimated by `(classes.weights * b).sum()`, in a "
                    f"`numpyro.factor` that is linear in it; or {fix}"
                )


class _Seen(NamedTuple):
    """What a run of a model has."""

    over: dict[str, Array]  # utilities over the plate (..., M), of each choice
    inside: dict[str, Array]  # log densities of sites in the plate (..., M)
    elsewhere: dict[str, Array]  # utilities over other plates, and log densities of sites outside


def _differing(
    seen: Callable[[Held], _Seen], varied: VariedClasses
) -> tuple[dict[str, Array], dict[str, Array], dict[str, Array]]:
    """Which classes differ, of each choice and site of the plate, and which other sites."""

    def look(runs: Held) -> Any:
        over, inside, elsewhere = lax.map(seen, runs)
        return (
            {site: varied.differing(of_runs) for site, of_runs in over.items()},
            {site: varied.differing(of_runs) for site, of_runs in inside.items()},
            {site: varied.differs_elsewhere(of_runs) for site, of_runs in elsewhere.items()},
        )

    try:
        found: tuple[Any, Any, Any] = compiled(look, runs_once=True)(varied.runs)
    except _CannotRun:
        return {}, {}, {}
    return found


class _CannotRun(Exception):
    """Steps alone can run the model, as one with a `u` of its own or with assertions of shapes."""


def _seen(
    model: Any,
    rng_key: Array,
    params: dict[str, Any],
    args: Any,
    kwargs: Any,
    plate: str,
    varied: VariedClasses,
    run: Held,
) -> _Seen:
    def around(fn: Any) -> Any:
        fn = hold_classes(fn, name=plate, ids=run.ids, weights=run.weights)
        return at_feasible_values(fn)

    distinct = distinct_rows(model, None, ends={plate: varied.ends}, dense_too=True)
    key = jax.random.fold_in(rng_key, run.noise)
    known: dict[str, Any] = {"rng_key": key, "params": params, "touched": TouchedRows()}
    try:
        sites = sites_of(distinct, args, kwargs, **known, around=around, is_step=False)
    except Exception as error:  # whatever a model raises that was made for steps
        raise _CannotRun from error
    found = _Seen({}, {}, {})
    for name, site in sites.items():
        if site["type"] != "sample":
            continue
        is_over, num_own = False, 0
        if is_choice(site):
            choice = base_distribution(site["fn"])
            is_over = choice.classes is not None and choice.classes.kind == "chunk"
            values, num_own = choice.utilities, 1  # the last axis has the classes of the choice
        else:
            values = log_prob_of(site)
        axes = [f.dim - num_own for f in site["cond_indep_stack"] if f.name == plate]
        if axes and values.ndim >= -axes[0]:
            by_class = jnp.moveaxis(values, axes[0], -1)
            found.inside[name] = by_class[..., : len(varied.order)]
        elif not axes:
            (found.over if is_over else found.elsewhere)[name] = values
    return found


def follows_classes(plate: str, class_id: int) -> str:
    """Say that utilities follow other classes, and how to write what they most often mean."""
    return (
        f"the utility of class {class_id} of plate '{plate}' depends on "
        "which classes are evaluated with it. It may depend on its own row and on what is "
        "outside of the plate, not on the place of a row, sums or extremes over rows, weights of "
        "classes, or rows read by id. Utilities need no normalisation, and no correction for how "
        "classes are drawn. "
        "Write a reference class as `jnp.where(classes.indices == 0, 0.0, b)`; in place of "
        "centred weights give the prior a scale; read rows by id by `classes.rows_of`, of a "
        "plate with `reads=ids`; take extremes of features over all classes, before the plate."
    )
