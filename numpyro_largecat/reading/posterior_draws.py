# SPDX-License-Identifier: Apache-2.0
"""Draws of latent sites from the guide, of the rows that are shown alone."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import Array

from numpyro_largecat.choices.choice_distribution import is_choice
from numpyro_largecat.choices.error_guides import without_errors
from numpyro_largecat.handlers.chosen_rows import hold_rows, without_training_rows
from numpyro_largecat.handlers.sites import is_latent, plates_of
from numpyro_largecat.handlers.touched_rows import PlateRows
from numpyro_largecat.reading.bound_fit import BoundFit
from numpyro_largecat.reading.chunked_utilities import ChunkedUtilities
from numpyro_largecat.reading.model_layout import LatentSite, ModelLayout, latent_site
from numpyro_largecat.reading.rows_held import rows_of_whole
from numpyro_largecat.reading.shown_rows import ShownRows
from numpyro_largecat.svi.stored_params import check_params


def draw_sites(
    fit: BoundFit,
    layout: ModelLayout,
    shown: ShownRows,
    choice: ChunkedUtilities | None,
    rng_key: Array,
) -> dict[str, LatentSite]:
    """One draw of the latent sites whose plates are all shown, at the rows shown.

    Those that the log likelihood of a choice depends on are drawn as it draws them.
    """
    guide = fit.guide
    if shown.new:  # they have no errors
        guide = without_training_rows(without_errors(fit.model, guide)[1], is_choice=is_choice)
    sites = _guide_sites(rng_key, fit, guide, shown.ids, layout)
    if choice is not None:
        sites |= _sites_of_choice(rng_key, choice, shown.ids, sites)
    return sites


def _guide_sites(
    rng_key: Array, fit: BoundFit, guide: Any, ids: dict[str, Array], layout: ModelLayout
) -> dict[str, LatentSite]:
    """Draw the sites of the guide alone."""
    sites = fit.sites(guide, rng_key=rng_key, around=partial(hold_rows, rows=ids))
    check_params(fit.params, sites)
    found = {}
    for name, drawn in sites.items():
        if not is_latent(drawn):
            continue
        site = layout.sites.get(name, latent_site(drawn))
        if drawn["infer"].get("is_auxiliary") or not site.axes().keys() <= ids.keys():
            continue
        own = plates_of(drawn)
        for plate, axis in site.axes().items():
            if plate not in own:  # a joint guide draws the site in no plate
                value = rows_of_whole(drawn, axis, ids[plate], layout.sizes[plate])
                drawn = {**drawn, "value": value}
        found[name] = site._replace(value=drawn["value"])
    return found


def _sites_of_choice(
    rng_key: Array, choice: ChunkedUtilities, ids: dict[str, Array], shown: dict[str, LatentSite]
) -> dict[str, LatentSite]:
    """The draws that ``log_likelihood`` uses, of the rows shown."""
    sites, touched = choice.runs.latent_sites(ids[choice.plate], rng_key)
    found = {}
    for name in shown.keys() & sites.keys():
        axes, value = shown[name].axes(), sites[name]["value"]
        others = [n for n in axes if n != choice.plate and n not in choice.choice_plates]
        held = {plate: touched.plates[plate] for plate in others}
        if not all(rows.full or _are_labels_of_all(rows) for rows in held.values()):
            continue  # rows that are drawn, or in no order
        for plate, rows in held.items():
            place = jnp.searchsorted(rows.indices, ids[plate])
            value = jnp.take(value, place, axis=axes[plate])
        found[name] = shown[name]._replace(value=value)
    return found


def _are_labels_of_all(rows: PlateRows) -> bool:
    """Whether the rows are those of a class plate which all observations share, in order."""
    return rows.weights is not None and rows.position is None
