# SPDX-License-Identifier: Apache-2.0
"""What a model says of its plates and latent sites, whatever its guide draws them as."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from jax import Array

from numpyro_largecat.choices.choice_distribution import is_choice
from numpyro_largecat.choices.error_guides import without_errors
from numpyro_largecat.handlers.chosen_rows import RowsNeeded, only_read, without_training_rows
from numpyro_largecat.handlers.closed_over_arrays import compiled
from numpyro_largecat.handlers.plate_facts import plate_facts
from numpyro_largecat.handlers.run_model import at_feasible_values
from numpyro_largecat.handlers.sites import is_latent
from numpyro_largecat.handlers.static_result import static_result
from numpyro_largecat.handlers.touched_rows import TouchedRows
from numpyro_largecat.reading.bound_fit import BoundFit


class LatentSite(NamedTuple):
    """A latent site with its plates and the number of axes of its event."""

    frames: list[Any]
    event_dim: int
    value: Any = None

    def axes(self) -> dict[str, int]:
        """Axis of the value, from the right, of each plate."""
        return {frame.name: frame.dim - self.event_dim for frame in self.frames}


class ModelLayout(NamedTuple):
    """The plates and latent sites of a model."""

    sizes: dict[str, int]  # number of rows of each plate
    row_ids: dict[str, Array]  # rows of the data plates that were given some
    sites: dict[str, LatentSite]  # without values


def layout_of_model(fit: BoundFit) -> ModelLayout:
    """Look at a model, of which nothing but row ids is computed.

    The rows that its arguments describe may be new, unless a latent site needs those of the
    training data.
    """
    sizes: dict[str, int] = {}
    latent: dict[str, LatentSite] = {}

    def look(model: Any, in_outer: Any, params: Any) -> dict[str, Array]:
        touched = TouchedRows()
        sizes.clear()
        latent.clear()

        def around(fn: Any) -> Any:
            return in_outer(only_read(at_feasible_values(fn), is_choice=is_choice))

        sites = replace(fit, params=params).sites(model, touched, around=around)
        sizes.update({name: plate.size for name, plate in touched.plates.items()})
        latent.update({name: latent_site(s) for name, s in sites.items() if is_latent(s)})
        row_ids = {name: plate_facts(sites[name]).row_ids for name in sizes}
        return {name: ids for name, ids in row_ids.items() if ids is not None}

    model, guide = without_errors(fit.model, fit.guide)
    try:
        new_rows = partial(without_training_rows, is_choice=is_choice)
        row_ids = compiled(partial(look, model, new_rows))(fit.params)
    except RowsNeeded:
        in_guide = static_result(lambda: set(fit.sites(guide)))
        is_new = partial(_is_outcome, in_guide=in_guide)
        new_rows = partial(without_training_rows, is_choice=is_new)
        try:
            row_ids = compiled(partial(look, model, new_rows))(fit.params)
        except RowsNeeded:
            row_ids = compiled(partial(look, fit.model, lambda fn: fn))(fit.params)
    return ModelLayout(sizes, row_ids, latent)


def _is_outcome(msg: Any, in_guide: set[str]) -> bool:
    """Whether a site is what a model predicts: a choice, or what its guide does not draw."""
    return is_choice(msg) or (is_latent(msg) and msg["name"] not in in_guide)


def latent_site(site: Any) -> LatentSite:
    """The plates and the event of a site of a trace."""
    return LatentSite(list(site["cond_indep_stack"]), site["fn"].event_dim)
