# SPDX-License-Identifier: Apache-2.0
"""Refuse models that cannot be evaluated on one chunk of classes after another."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from numpyro_largecat._checks import is_concrete
from numpyro_largecat.handlers.closed_over_arrays import run_compiled
from numpyro_largecat.ops.differing_columns import differing_columns
from numpyro_largecat.svi.following_classes import follows_classes

MOST_TOGETHER = 128  # classes in which places are looked for; what is done by place is rarely later


class RowsSeen(NamedTuple):
    """What some classes were seen to have, with rows that are all different."""

    utilities: Array  # (..., size)
    guide: dict[str, Array]  # rows of the sites in the class plate, (size, ...), by name


def rows_are_alone(
    of_classes: Callable[[ArrayLike, int, ArrayLike], RowsSeen],
    plate: str,
    chunk_size: int,
    *,
    only_guide: bool = False,
) -> Array:
    """Whether a class is the same whichever classes are evaluated with it.

    ``of_classes(start, size, seed)`` are the utilities of classes from ``start`` on, and what the
    guide has for them, with rows that are all different, see ``distinct_rows``. A chunk that starts
    one class later has its classes in other places, and the class far above all others is gone, one
    far below them is new: what is done by place, sums, extremes, ranks and rows that are read by id
    all show. What follows the seed has noise of its own, and is not compared.

    Cost: the utilities of at most 384 classes.

    Args:
        of_classes: See above.
        plate: Name of the class plate.
        chunk_size: Number of classes that are evaluated at once.
        only_guide: Whether the model sees all classes at once, and is not looked at.

    Returns:
        A boolean, which is a tracer under ``jit``.

    Raises:
        ValueError: If a class differs and its values are no tracers.
    """
    size = max(2, min(chunk_size, MOST_TOGETHER))
    starts, seeds = jnp.array([0, 1, 0]), jnp.array([0, 0, 1])

    def look(starts: Array, seeds: Array) -> RowsSeen:
        found: RowsSeen = lax.map(lambda x: of_classes(x[0], size, x[1]), (starts, seeds))
        return found

    seen = run_compiled(look, starts, seeds)
    differ = jnp.zeros((), bool)
    for name, rows in seen.guide.items():
        rows = rows.astype(jnp.promote_types(rows.dtype, jnp.result_type(float)))
        by_class = rows.reshape(3, size, -1).swapaxes(1, 2)
        differ |= _refuse(by_class, partial(_of_guide, plate, name)).any()
    if not only_guide:
        differ |= _refuse(seen.utilities, partial(_of_model, plate)).any()
    return ~differ


def _refuse(of_starts: Array, message: Callable[[int], str]) -> Array:
    """Which classes differ among three chunks, (3, ..., size), at two starts and with two seeds."""
    differ = differing_columns(*of_starts)
    if is_concrete(differ) and differ.any():
        raise ValueError(message(int(jnp.argmax(differ)) + 1))
    return differ


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
