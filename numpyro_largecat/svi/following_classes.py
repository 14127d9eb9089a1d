# SPDX-License-Identifier: Apache-2.0
"""Refuse models in which a class is another one when other classes are there with it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import Array, lax

from numpyro_largecat._checks import is_concrete
from numpyro_largecat.choices.choice_distribution import is_choice
from numpyro_largecat.handlers.closed_over_arrays import run_compiled
from numpyro_largecat.handlers.distinct_rows import distinct_rows
from numpyro_largecat.handlers.plate_facts import class_plates
from numpyro_largecat.handlers.run_model import at_feasible_values, sites_of
from numpyro_largecat.handlers.sites import Sites, base_distribution
from numpyro_largecat.handlers.touched_rows import TouchedRows
from numpyro_largecat.ops.differing_columns import differing_columns
from numpyro_largecat.plates.class_chunk import class_chunk

MOST_TOGETHER = 512  # classes that are looked at; a step of few observations holds no more


def sampled_classes(sites: Sites) -> dict[str, int]:
    """How many classes a step holds, of each class plate that draws them for a choice."""
    over = {name: facts for name, facts in class_plates(sites).items() if facts.is_sampled}
    if not any(is_choice(site) for site in sites.values()):
        return {}
    return {
        name: len(facts.row_weights)
        for name, facts in over.items()
        if facts.row_weights is not None
    }


def refuse_following_classes(
    model: Any,
    num_classes: dict[str, int],
    rng_key: Array,
    params: dict[str, Any],
    args: Any,
    kwargs: Any,
) -> None:
    """Refuse a model whose utility of a class changes with the classes that a step draws.

    Each step draws others, so ``b - b.mean()`` or ``b.at[0].set(0)`` would be something else in
    each of them, and nothing that can be read. The model is run on as many consecutive classes as a
    step holds, and again on those that start one later; rows are all different. See
    ``differing_columns``. Models that cannot be run so, nor read, are not looked at.

    Cost: three runs of the model, on at most ``MOST_TOGETHER`` classes, compiled once. Nothing is
    done under ``jit``; readings refuse such a fit there.

    Args:
        model: The model.
        num_classes: How many classes a step holds, by class plate.
        rng_key: Key of what the model draws.
        params: Values of parameters that are given.
        args: Arguments of the model.
        kwargs: Its keyword arguments.

    Raises:
        ValueError: With the plate, the choice and a class.
    """
    if not all(map(is_concrete, jax.tree.leaves((rng_key, params, args, kwargs)))):
        return
    for plate, held in num_classes.items():
        size = max(2, min(held, MOST_TOGETHER))
        utilities = partial(_utilities, model, rng_key, params, args, kwargs, plate, size)
        for site, differ in _differing(utilities).items():
            if differ.any():
                raise ValueError(
                    f"each step holds other classes of plate '{plate}', and of choice '{site}' "
                    + follows_classes(plate, int(differ.argmax()) + 1)
                    + " Or leave `num_sampled` out, to have all classes in each step."
                )


def _differing(utilities: Callable[[Array, Array], dict[str, Array]]) -> dict[str, Array]:
    """Which classes differ, of each choice."""

    def look(runs: Array) -> dict[str, Array]:
        seen = lax.map(lambda run: utilities(*run), runs)
        return {site: differing_columns(*of_runs) for site, of_runs in seen.items()}

    try:
        found: dict[str, Array] = run_compiled(look, np.array([[0, 0], [1, 0], [0, 1]]))
    except (TypeError, ValueError):  # steps alone can run it, as a model with a `u` of its own
        return {}
    return found


def _utilities(
    model: Any,
    rng_key: Array,
    params: dict[str, Any],
    args: Any,
    kwargs: Any,
    plate: str,
    size: int,
    start: Array,
    noise: Array,
) -> dict[str, Array]:
    """Those of classes from ``start`` on, of each choice over the plate; ``noise`` is a seed."""

    def around(fn: Any) -> Any:
        return at_feasible_values(class_chunk(fn, name=plate, start=start, size=size))

    distinct = distinct_rows(model, [plate], size, dense_too=True)
    key = jax.random.fold_in(rng_key, noise)
    known: dict[str, Any] = {"rng_key": key, "params": params, "touched": TouchedRows()}
    sites = sites_of(distinct, args, kwargs, **known, around=around, is_step=False)
    choices = {n: base_distribution(s["fn"]) for n, s in sites.items() if is_choice(s)}
    return {name: fn.utilities for name, fn in choices.items() if _is_over_chunk(fn)}


def _is_over_chunk(fn: Any) -> bool:
    return fn.classes is not None and fn.classes.kind == "chunk"


def follows_classes(plate: str, class_id: int) -> str:
    """Say that utilities follow other classes, and how to write what they most often mean."""
    return (
        f"the utility of class {class_id} of plate '{plate}' depends on "
        "which classes are evaluated with it. It may depend on its own row and on what is "
        "outside of the plate, not on the place of a row, sums over rows, or rows read by id. "
        "Write a reference class as `jnp.where(classes.indices == 0, 0.0, b)`; in place of "
        "centred weights give the prior a scale; read rows by id by `classes.rows_of`, of a "
        "plate with `reads=ids`."
    )
