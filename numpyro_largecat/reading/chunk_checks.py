# SPDX-License-Identifier: Apache-2.0
"""Refuse models that cannot be evaluated on one chunk of classes after another."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from numpyro_largecat._checks import is_concrete
from numpyro_largecat.handlers.closed_over_arrays import run_compiled
from numpyro_largecat.plates.varied_classes import Held, VariedClasses
from numpyro_largecat.svi.following_classes import follows_classes

MOST_TOGETHER = 128  # classes that are looked at


class RowsSeen(NamedTuple):
    """What some classes were seen to have, with rows that are all different."""

    utilities: Array  # (..., size)
    guide: dict[str, Array]  # rows of the sites in the class plate, (size, ...), by name


def rows_are_alone(
    of_classes: Callable[[VariedClasses, Held], RowsSeen],
    plate: str,
    num_categories: int,
    chunk_size: int,
    *,
    only_guide: bool = False,
) -> Array:
    """Whether a class is the same whichever classes are evaluated with it.

    Cost: the utilities of at most 7 x 128 classes.

    Args:
        of_classes: What a model has for the classes of a run, and its guide, with rows that are all
            different.
        plate: Name of the class plate.
        num_categories: Number of classes K.
        chunk_size: Number of classes that are evaluated at once.
        only_guide: Whether the model sees all classes at once, and is not looked at.

    Returns:
        A boolean, which is a tracer under ``jit``.

    Raises:
        ValueError: If a class differs and its values are no tracers.
    """
    varied = VariedClasses.of(num_categories, min(chunk_size, MOST_TOGETHER))

    def look(runs: Held) -> tuple[Array, dict[str, Array]]:
        seen = lax.map(partial(of_classes, varied), runs)
        guide = {name: varied.differing(_by_class(rows)) for name, rows in seen.guide.items()}
        return varied.differing(seen.utilities), guide

    in_model, in_guide = run_compiled(look, varied.runs)
    differ = jnp.zeros((), bool)
    for name, of_site in in_guide.items():
        differ |= _refuse(of_site, varied, partial(_of_guide, plate, name))
    if not only_guide:
        differ |= _refuse(in_model, varied, partial(_of_model, plate))
    return ~differ


def _by_class(rows: Array) -> Array:
    """Rows (runs, size, ...) as numbers, with the classes last."""
    rows = rows.astype(jnp.promote_types(rows.dtype, jnp.result_type(float)))
    return rows.reshape(*rows.shape[:2], -1).swapaxes(1, 2)


def _refuse(differ: Array, varied: VariedClasses, message: Callable[[int], str]) -> Array:
    """Whether a class differs."""
    if is_concrete(differ) and differ.any():
        raise ValueError(message(varied.class_id(differ)))
    return differ.any()


def _of_model(plate: str, class_id: int) -> str:
    fix = "Or, after a fit with a full plate, set `chunk_size` to the number of classes."
    return f"{follows_classes(plate, class_id)} {fix}"


def _of_guide(plate: str, site: str, class_id: int) -> str:
    return (
        f"site '{site}' of the guide has a value for class {class_id} of plate '{plate}' that "
        "depends on which classes are there with it. In the plate a guide may use a class's own "
        "rows and what is outside; move centring, sums over rows and what is done by place into "
        "the model, or draw the site outside of the plate, for all classes."
    )
