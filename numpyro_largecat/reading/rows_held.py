# SPDX-License-Identifier: Apache-2.0
"""The rows of plates in what a guide draws, which may draw a site whole, outside of its plates."""

from __future__ import annotations

from collections.abc import Container

import jax.numpy as jnp
from jax import Array

from numpyro_largecat.handlers.plate_facts import row_plates
from numpyro_largecat.handlers.sites import Site, Sites, plates_of
from numpyro_largecat.handlers.touched_rows import TouchedRows


def axes_of_rows(
    plate: str, values: dict[str, Array], drawn: Sites, sites: Sites
) -> dict[str, int]:
    """Axis of the rows of the class plate in the value of each site that has one.

    The guide may draw a site in other plates than the model has it in, or outside of all.
    """
    axes = {}
    for name, value in values.items():
        for site in (sites.get(name, drawn[name]), drawn[name]):  # the guide's own, if it has one
            for frame in site["cond_indep_stack"]:
                axis = frame.dim - site["fn"].event_dim
                if frame.name == plate and jnp.ndim(value) >= -axis:
                    axes[name] = axis
    return axes


def take_rows_held(drawn: Sites, sites: Sites, touched: TouchedRows) -> None:
    """Let the sites that the guide draws whole, outside of plates, have the rows they hold."""
    in_model = row_plates(sites)
    for name in drawn.keys() & sites.keys():
        drawn[name] = _on_rows(drawn[name], sites[name], in_model, touched)


def _on_rows(drawn: Site, site: Site, class_plates: Container[str], touched: TouchedRows) -> Site:
    """The rows that class plates hold, of a site that the guide draws whole, outside of them."""
    own = plates_of(drawn)
    for frame in site["cond_indep_stack"] if site["type"] == "sample" else ():
        if frame.name in class_plates and frame.name not in own:
            plate = touched.plates[frame.name]
            axis = frame.dim - site["fn"].event_dim
            drawn = {**drawn, "value": rows_of_whole(drawn, axis, plate.indices, plate.size)}
    return drawn


def rows_of_whole(drawn: Site, axis: int, rows: Array, size: int) -> Array:
    """These rows of a site's value, which the guide draws outside of their plate.

    Raises:
        ValueError: If the value has neither all ``size`` rows of the plate on ``axis``, nor these.
    """
    value: Array = drawn["value"]
    shape = jnp.shape(value)
    if len(shape) < -axis or shape[axis] == 1:
        return value
    if shape[axis] == size:
        return jnp.take(value, rows, axis=axis, mode="clip")
    if shape[axis] != rows.shape[0]:
        raise ValueError(
            f"the guide draws site '{drawn['name']}' outside of the model's plate for it, so it "
            f"must have all {size} rows at axis {axis}; got shape {shape}."
        )
    return value
