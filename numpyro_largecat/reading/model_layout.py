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
from numpyro_largecat.handlers.run_model import Around, at_feasible_values
from numpyro_largecat.handlers.sites import is_latent, of_type
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
    kinds: dict[str, str]  # of each plate
    whole: set[str]  # NumPyro's own plates that are open in full
    row_ids: dict[str, Array]  # rows of the data plates that were given some
    sites: dict[str, LatentSite]  # without values
    has_deterministic: bool
    model: Any  # as it was run
    around: Around  # the handler around it


def layout_of_model(fit: BoundFit) -> ModelLayout:
    """Look at a model, of which nothing but row ids is computed.

    The rows that its arguments describe may be new, unless a latent site needs those of the
    training data.
    """
    found: list[ModelLayout] = []

    def look(model: Any, in_outer: Around, params: Any) -> dict[str, Array]:
        touched = TouchedRows()

        def reads(fn: Any) -> Any:
            return in_outer(only_read(fn, is_choice=is_choice))

        def around(fn: Any) -> Any:
            return reads(at_feasible_values(fn))

        sites = replace(fit, params=params).sites(model, touched, around=around)
        sizes = {name: plate.size for name, plate in touched.plates.items()}
        facts = {name: plate_facts(sites[name]) for name in sizes}
        kinds: dict[str, str] = {name: known.kind for name, known in facts.items()}
        plain = {name for name, kind in kinds.items() if kind == "plain"}
        whole = {name for name in plain if len(sites[name]["value"]) == sizes[name]}
        latent = {name: latent_site(s) for name, s in sites.items() if is_latent(s)}
        computes = bool(of_type("deterministic", sites))
        found[:] = [ModelLayout(sizes, kinds, whole, {}, latent, computes, model, reads)]
        return {name: f.row_ids for name, f in facts.items() if f.row_ids is not None}

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
    return found[0]._replace(row_ids=row_ids)


def _is_outcome(msg: Any, in_guide: set[str]) -> bool:
    """Whether a site is what a model predicts: a choice, or what its guide does not draw."""
    return is_choice(msg) or (is_latent(msg) and msg["name"] not in in_guide)


def latent_site(site: Any) -> LatentSite:
    """The plates and the event of a site of a trace."""
    return LatentSite(list(site["cond_indep_stack"]), site["fn"].event_dim)
