# SPDX-License-Identifier: Apache-2.0
"""Refuse models that cannot be evaluated on one chunk of classes after another."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from numpyro_largecat._checks import is_concrete
from numpyro_largecat.handlers.closed_over_arrays import run_compiled

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
    differ = _differ_by_start(of_starts)
    if is_concrete(differ) and differ.any():
        raise ValueError(message(int(jnp.argmax(differ)) + 1))
    return differ


def _of_model(plate: str, class_id: int) -> str:
    return (
        f"the utility of class {class_id} of plate '{plate}' depends on "
        "which classes are evaluated with it. It may depend on its own row and on what is "
        "outside of the plate, not on the place of a row, sums over rows, or rows read by id. "
        "Write a reference class as `jnp.where(classes.indices == 0, 0.0, b)`; in place of "
        "centred weights give the prior a scale; read rows by id by `classes.rows_of`, of a "
        "plate with `reads=ids`; or, after a fit with a full plate, set `chunk_size` to the "
        "number of classes."
    )


def _of_guide(plate: str, site: str, class_id: int) -> str:
    return (
        f"site '{site}' of the guide has a value for class {class_id} of plate '{plate}' that "
        "depends on which classes are there with it. In the plate a guide may use a class's own "
        "rows and what is outside; move centring, sums over rows and what is done by place into "
        "the model, or draw the site outside of the plate, for all classes."
    )


@jax.jit
def _differ_by_start(of_starts: Array) -> Array:
    first, later, again = of_starts
    is_fixed = ((first == again) | (jnp.isnan(first) & jnp.isnan(again))).all()
    return _differ(first[..., 1:], later[..., :-1]) & is_fixed


def _differ(a: Array, b: Array) -> Array:
    """Which classes, on the last axis, have utilities that differ by more than rounding.

    Rounding follows the largest utility of an observation, whose offset may be large.
    """
    size = jnp.where(jnp.isfinite(a), jnp.abs(a), 0)
    near = jnp.abs(a - b) <= 200 * jnp.finfo(a.dtype).eps * size.max(axis=-1, keepdims=True)
    same = near | (a == b) | (jnp.isnan(a) & jnp.isnan(b))
    return ~same.reshape(-1, a.shape[-1]).all(axis=0)
