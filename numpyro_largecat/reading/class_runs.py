# SPDX-License-Identifier: Apache-2.0
"""Model and guide, run with some classes alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array
from jax.typing import ArrayLike

from numpyro_largecat.choices.choice_distribution import is_choice
from numpyro_largecat.choices.error_guides import without_errors
from numpyro_largecat.handlers.chosen_rows import hold_rows, only_read, without_training_rows
from numpyro_largecat.handlers.distinct_rows import distinct_rows
from numpyro_largecat.handlers.plate_facts import helper_of, plate_facts
from numpyro_largecat.handlers.row_noise import InnerNoise, row_noise
from numpyro_largecat.handlers.run_model import (
    Around,
    as_drawn,
    at_centre,
    at_feasible_values,
    at_values_of,
    at_values_or_centre,
    sites_of,
)
from numpyro_largecat.handlers.sites import Sites, base_distribution, is_latent, plates_of
from numpyro_largecat.handlers.static_result import static_result
from numpyro_largecat.handlers.touched_rows import PlateRows, TouchedRows
from numpyro_largecat.plates.class_chunk import class_chunk
from numpyro_largecat.plates.varied_classes import Held, VariedClasses, hold_classes
from numpyro_largecat.reading.bound_fit import BoundFit
from numpyro_largecat.reading.choice_site import find_choice
from numpyro_largecat.reading.chunk_checks import RowsSeen
from numpyro_largecat.reading.rows_held import axes_of_rows, take_rows_held
from numpyro_largecat.svi.stored_params import check_params


@dataclass(frozen=True)
class ClassRuns:
    """Runs of a fitted model and its guide, each with some classes of a choice.

    With a key the latent sites are drawn from the guide: those in the class plate with noise of
    their own for each class, and all others alike, whichever the classes, so that runs with all
    of them are one draw, and a class that is read by id is the same in all of them. Without one
    they are at the centre of the guide.

    Attributes:
        fit: The fit, on arguments of its model.
        model: The model without errors of utilities.
        guide: Its guide, likewise.
        params: Parameters of both.
        site: Name of the choice.
        plate: Name of its class plate.
        num_categories: Number of classes K.
        also: Rows that other class plates hold besides those of their labels, by plate name.
    """

    fit: BoundFit
    model: Callable[..., Any]
    guide: Callable[..., Any]
    params: dict[str, Any]
    site: str
    plate: str
    num_categories: int
    also: Mapping[str, Array] | None

    @classmethod
    def of(cls, fit: BoundFit, also: Mapping[str, Array] | None) -> ClassRuns:
        """Those of the choice that is read of a fit."""
        model, guide = without_errors(fit.model, fit.guide)
        site, plate, num_categories = find_choice(fit)
        return cls(fit, model, guide, fit.params, site, plate, num_categories, also)

    def sites(self, start: ArrayLike, size: int, key: Array | None) -> Sites:
        """The sites of the model with classes [start, start + size)."""
        guide_sites, run_model = self._traces(start, size, key, TouchedRows())
        values = at_values_or_centre if key is None else at_values_of
        sites = run_model(values(guide_sites))
        check_params(self.params, guide_sites | sites)
        classes = base_distribution(sites[self.site]["fn"]).classes
        if classes is None or classes.kind != "chunk":
            need = f"`classes=` from class plate '{self.plate}'"
            raise ValueError(f"choice '{self.site}' must have {need}, to be read by chunks.")
        return sites

    def latent_sites(self, classes: Array, key: Array) -> tuple[Sites, TouchedRows]:
        """The sites of the guide, drawn, with these classes alone; and the rows of plates."""
        touched = TouchedRows()
        sites = self.run(self.model, classes[0], 1, key, touched, latent_values=at_feasible_values)
        return self._draw(classes, key, None, sites, touched), touched

    def draws_sites(self, in_plates: Callable[[set[str]], bool]) -> bool:
        """Whether the guide draws a site, rather than a point, whose plates are as asked."""

        def look() -> bool:
            return _draws(self._traces(0, 1, jax.random.key(0), TouchedRows())[0], in_plates)

        return static_result(look)

    @property
    def draws_outside(self) -> bool:
        """Whether a site outside of the class plate is drawn, by the guide or left to the model.

        Not choices, which no utility depends on.
        """

        def look() -> bool:
            drawn, run_model = self._traces(0, 1, jax.random.key(0), TouchedRows())
            sites = run_model(at_values_of(drawn))
            left = {
                name: site
                for name, site in sites.items()
                if is_latent(site) and name not in drawn and not is_choice(site)
            }
            return _draws(drawn | left, lambda plates: self.plate not in plates)

        return static_result(look)

    def traces(
        self, start: ArrayLike, size: int, key: Array, noise: InnerNoise
    ) -> tuple[Sites, Sites]:
        """The sites of guide and model with classes [start, start + size), drawn with two keys."""
        touched = TouchedRows()
        drawn, run_model = self._traces(start, size, key, touched, noise)
        model_sites = run_model(at_values_of(drawn))
        in_plate = {name: site for name, site in drawn.items() if self.plate in plates_of(site)}
        guide_sites = self.run(
            self.guide,
            start,
            size,
            key,
            touched,
            latent_values=at_values_of(in_plate),  # the others are drawn by their keys again
            noise=noise,
        )
        take_rows_held(guide_sites, model_sites, touched)
        return guide_sites, model_sites

    def of_distinct(self, varied: VariedClasses, run: Held) -> RowsSeen:
        """What is seen of a few classes alone, with rows that are all different."""
        hold = partial(hold_classes, name=self.plate, ids=run.ids, weights=run.weights)
        size = len(varied.order)
        key, touched = jax.random.fold_in(jax.random.key(0), run.noise), TouchedRows()

        def distinct(fn: Any) -> distinct_rows:
            ends = {self.plate: varied.ends}
            return distinct_rows(fn, [self.plate], size=size, ends=ends)

        def sites(fn: Any, around: Around) -> Sites:
            # Noise is by place: classes in the same places have the same in all runs.
            return self._sites_with(hold, fn, 0, key, touched, around)

        of_model = sites(distinct(self.model), at_feasible_values)
        guide = distinct(self.guide)
        drawn = sites(guide, at_centre)
        take_rows_held(drawn, of_model, touched)
        of_model = sites(distinct(self.model), at_values_or_centre(drawn))
        utilities = jnp.asarray(base_distribution(of_model[self.site]["fn"]).utilities)
        return RowsSeen(utilities, guide.before)

    def run(
        self,
        fn: Any,
        start: ArrayLike,
        size: int,
        rng_key: Array,
        touched: TouchedRows,
        *,
        latent_values: Around,
        noise: InnerNoise | None = None,
    ) -> Sites:
        """The sites of model or guide with classes [start, start + size)."""
        chunk = partial(class_chunk, name=self.plate, start=start, size=size)
        return self._sites_with(chunk, fn, start, rng_key, touched, latent_values, noise)

    def _traces(
        self,
        start: ArrayLike,
        size: int,
        key: Array | None,
        touched: TouchedRows,
        noise: InnerNoise | None = None,
    ) -> tuple[Sites, Callable[[Around], Sites]]:
        """The guide's sites with these classes, and a function that runs the model with them.

        That function takes the handler around the model that gives the latent values.
        """
        rng_key = jax.random.key(0) if key is None else key
        on_chunk = partial(self.run, start=start, size=size, rng_key=rng_key, touched=touched)
        # The model tells the plain plates of the guide, which follow its own, their rows.
        sites = on_chunk(self.model, latent_values=at_feasible_values)
        if key is not None:
            drawn = self._draw(touched.plates[self.plate].indices, key, noise, sites, touched)
        else:
            drawn = on_chunk(self.guide, latent_values=at_centre)
            take_rows_held(drawn, sites, touched)
        return drawn, lambda values: on_chunk(self.model, latent_values=values, noise=noise)

    def _sites_with(
        self,
        choose: Around,
        fn: Any,
        row: ArrayLike,
        rng_key: Array,
        touched: TouchedRows,
        latent_values: Around = as_drawn,
        noise: InnerNoise | None = None,
    ) -> Sites:
        """The sites of model or guide with the rows that the handler ``choose`` chooses."""

        def outside(fn: Any) -> Any:
            fn = row_noise(choose(fn), self.plate, row, noise)
            fn = only_read(fn, is_choice=is_choice, also=self.also)
            return latent_values(without_training_rows(fn, is_choice=is_choice))

        return sites_of(
            fn,
            self.fit.args,
            self.fit.kwargs,
            rng_key=rng_key,
            params=self.params,
            touched=touched,
            around=outside,
            is_step=False,
        )

    def _draw(
        self,
        classes: Array,
        key: Array,
        noise: InnerNoise | None,
        sites: Sites,
        touched: TouchedRows,
    ) -> Sites:
        """The sites of the guide, drawn, with these classes in its class plate.

        It is run for one class at a time, under ``vmap``, with a key of that class: the noise of a
        class is the same whichever others are there. ``sites`` are those of the model.
        """
        messages: Sites = {}
        axes: dict[str, int] = {}

        def of_class(class_id: Array) -> tuple[dict[str, Array], dict[str, Array]]:
            drawn = self._draw_class(class_id, key, noise, sites, touched)
            messages.update(drawn)
            values = {name: site["value"] for name, site in drawn.items() if is_latent(site)}
            axes.update(axes_of_rows(self.plate, values, drawn, sites))
            inside = {name: jnp.squeeze(values[name], axis) for name, axis in axes.items()}
            return inside, {name: values[name] for name in values.keys() - axes.keys()}

        inside, found = jax.vmap(of_class, out_axes=(0, None))(classes)
        self._refuse_sites_of_model(messages, sites)
        found |= {name: jnp.moveaxis(value, 0, axes[name]) for name, value in inside.items()}
        return {name: {**messages[name], "value": value} for name, value in found.items()} | {
            name: site for name, site in messages.items() if site["type"] == "param"
        }

    def _draw_class(
        self,
        class_id: Array,
        key: Array,
        noise: InnerNoise | None,
        sites: Sites,
        touched: TouchedRows,
    ) -> Sites:
        """The sites of the guide, drawn, with one class."""
        row = class_id[None]
        own = PlateRows(row, self.num_categories, False, None, row, None)
        helpers = {name: v for name, v in touched.helpers.items() if name != helper_of(self.plate)}
        known = TouchedRows(touched.plates | {self.plate: own}, helpers)
        choose = partial(hold_rows, rows={self.plate: row})
        drawn = self._sites_with(choose, self.guide, class_id, key, known, noise=noise)
        take_rows_held(drawn, sites, known)
        return drawn

    def _refuse_sites_of_model(self, drawn: Sites, sites: Sites) -> None:
        """Refuse a site that the guide leaves to the model, where this reads classes by id."""
        if plate_facts(sites[self.plate]).reads is None:
            return
        for name, site in sites.items():
            if is_latent(site) and self.plate in plates_of(site) and name not in drawn:
                raise NotImplementedError(
                    f"site '{name}' in plate '{self.plate}' is not in the guide. To be drawn, a "
                    "model that reads classes by id needs a guide of all its sites there."
                )


def _draws(sites: Sites, in_plates: Callable[[set[str]], bool]) -> bool:
    """Whether one of these, rather than a point, has plates as asked."""
    return any(
        site["type"] == "sample"
        and not isinstance(base_distribution(site["fn"]), dist.Delta)
        and in_plates(plates_of(site))
        for site in sites.values()
    )
