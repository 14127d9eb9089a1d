# SPDX-License-Identifier: Apache-2.0
"""Whether the shape of a parameter fits the plates that it is in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from numpyro_largecat.handlers.sites import param_options, rows_are_taken
from numpyro_largecat.handlers.touched_rows import PlateRows


def check_param_rows(
    msg: dict[str, Any], plates: Mapping[str, PlateRows], *, is_step: bool = True
) -> None:
    """Refuse a parameter that has not the rows of a plate, or does not say on which axis.

    Args:
        msg: Message of a ``numpyro.param`` statement.
        plates: The plates of the step, by name.
        is_step: Whether the plates have the rows of a step, and a parameter with as many entries
            is taken for one of these. Where a fit is read it has as many as some chunk by chance.

    Raises:
        ValueError: With the parameter, the plate and the ``event_dim`` to give.
    """
    name, value, event_dim = msg["name"], msg["value"], param_options(msg).event_dim
    if rows_are_taken(msg) or not jax.tree_util.all_leaves([value]):
        return
    shape = jnp.shape(value)
    for frame in msg["cond_indep_stack"]:
        plate = plates.get(frame.name)
        if plate is None:  # hidden by a handler
            continue
        where = f"param '{name}' inside plate '{frame.name}'"
        axis = None if event_dim is None else frame.dim - event_dim
        if axis is not None and len(shape) >= -axis:
            if shape[axis] not in (1, plate.size):
                raise ValueError(
                    f"{where} must have {plate.size} rows at axis {axis} (the plate's dim "
                    f"{frame.dim} less event_dim={event_dim}); got shape {shape}. Give it a row "
                    "for each row of the whole plate."
                )
        elif not plate.full and plate.size in shape:
            rows_axis = shape.index(plate.size)
            fits = max(0, len(shape) - rows_axis + frame.dim)
            raise ValueError(
                f"{where} has shape {shape}, with {plate.size} entries at axis {rows_axis}, but "
                f"event_dim={event_dim} does not make it that axis, and the plate holds "
                f"{plate.indices.shape[0]} rows in this step. If they are its rows, write "
                f"`numpyro.param(..., event_dim={fits})`; if all rows share it, declare it "
                "outside of the plate."
            )
        elif plate.weights is not None and shape[:1] == plate.indices.shape and is_step:
            raise ValueError(
                f"{where} has shape {shape}, an entry for each of the {shape[0]} rows of a step, "
                f"other classes in the next. Give it all {plate.size} rows, and "
                f"event_dim={max(0, len(shape) + frame.dim)}; or, if all rows share it, declare it "
                "outside of the plate."
            )
