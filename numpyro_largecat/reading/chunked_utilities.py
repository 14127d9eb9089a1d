# SPDX-License-Identifier: Apache-2.0
"""The utilities that a fitted model gives to all classes of a choice, one chunk at a time."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from copy import copy
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array, lax
from jax.typing import ArrayLike

from numpyro_largecat.choices.choice_distribution import is_choice
from numpyro_largecat.choices.error_families import ErrorFamily
from numpyro_largecat.choices.error_guides import without_errors
from numpyro_largecat.handlers.chosen_rows import hold_rows, only_read, without_training_rows
from numpyro_largecat.handlers.distinct_rows import distinct_rows
from numpyro_largecat.handlers.plate_facts import helper_of, plate_facts, row_plates
from numpyro_largecat.handlers.row_noise import InnerNoise, row_noise
from numpyro_largecat.handlers.run_model import (
    as_drawn,
    at_centre,
    at_feasible_values,
    at_values_of,
    sites_of,
)
from numpyro_largecat.handlers.sites import (
    Sites,
    base_distribution,
    is_latent,
    of_type,
    plates_of,
    unmasked,
)
from numpyro_largecat.handlers.touched_rows import PlateRows, TouchedRows
from numpyro_largecat.plates.class_chunk import class_chunk
from numpyro_largecat.reading.bound_fit import BoundFit
from numpyro_largecat.reading.choice_site import find_choice
from numpyro_largecat.reading.chunk_checks import RowsSeen, rows_are_alone
from numpyro_largecat.reading.parts_of_classes import PartsOfClasses
from numpyro_largecat.reading.progress import count_steps
from numpyro_largecat.svi.stored_params import check_params

Around = Callable[[Any], Any]  # puts a handler around a model or guide
Add = Callable[["ChunkedUtilities", Any, Array], Any]  # adds what a chunk has to what was found


class ChunkedUtilities:
    """Run model and guide on one chunk of classes after another.

    With a key the latent sites are drawn from the guide: those in the class plate with noise of
    their own for each class, and all others alike, whichever the chunk, so that the chunks together
    are one draw, and a class that is read by id is the same in all of them. Without one they are at
    the centre of the guide.

    Args:
        fit: The fit, on arguments of its model.
        also: Rows that other class plates hold besides those of their labels, by plate name.
        is_drawn: Whether the latent sites will be drawn.

    Attributes:
        fit: The fit.
        num_categories: Number of classes K.
        family: Distribution of the errors.
        batch_shape: Shape of the choice.
        dims: Plate of each axis of the choice, None where an axis has none.
        choice_plates: Names of these plates.
        dtype: Type of the utilities.
        has_reads: Whether the model reads classes by id besides those of a chunk.
        num_chunks: Number of chunks.
    """

    def __init__(
        self, fit: BoundFit, also: Mapping[str, Array] | None = None, *, is_drawn: bool = False
    ) -> None:
        self.fit = fit
        self.site, self.plate, self.num_categories = find_choice(fit)
        self.model, self.guide = without_errors(fit.model, fit.guide)
        self._args, self._kwargs, self._params = fit.args, fit.kwargs, fit.params
        self._also, self._progress_bar = also, fit.progress_bar
        self._tick: Callable[[], None] = lambda: None

        def look() -> tuple[ErrorFamily, tuple[int, ...], Any, bool, bool, dict[int, str]]:
            sites = self._sites(0, 2, None)
            site, has_reads = sites[self.site], plate_facts(sites[self.plate]).reads is not None
            choice = base_distribution(site["fn"])
            family, dtype = choice.noise, choice.utilities.dtype
            plates = {frame.dim: frame.name for frame in site["cond_indep_stack"]}
            is_masked = unmasked(site["fn"])[1] is not True
            # Plates expand a choice whose utilities have no axis for them.
            return family, site["fn"].shape(), dtype, has_reads, is_masked, plates

        try:
            seen = static_result(look)
        except (TypeError, ValueError) as error:
            self._explain(error)
            raise
        self.family, self.batch_shape, self.dtype, self.has_reads, self._is_masked, plates = seen
        self.choice_plates = frozenset(plates.values())
        self.dims = [plates.get(axis) for axis in range(-len(self.batch_shape), 0)]
        self._parts = None if self.has_reads else PartsOfClasses.of(self._params, self.plate)
        self._first, self._end = jnp.array(0), jnp.array(self.num_categories)
        num_classes = self.num_categories if self._parts is None else self._parts.num_rows
        self.chunk_size = min(fit.chunk_size, num_classes)
        self.num_chunks = -(-num_classes // self.chunk_size)
        self._are_alone = jnp.array(True)
        if self.num_chunks > 1 or is_drawn:  # draws are of one class at a time
            self._are_alone = rows_are_alone(
                self._of_distinct, self.plate, self.chunk_size, only_guide=self.num_chunks == 1
            )

    def with_progress(self, num_passes: int) -> ChunkedUtilities:
        """The same with a progress bar, if one is asked for, of passes over all chunks."""
        counted = copy(self)
        counted._tick = count_steps("chunks", num_passes * self.num_chunks, self._progress_bar)
        return counted

    def visit(self, add: Add, found: Any, merge: Callable[[Any, Any], Any]) -> Any:
        """Go through the chunks: ``found = add(utilities, found, chunk)``, by the chunk's number.

        Where the classes are spread over devices, each visits its own, from what is found at the
        start, and ``merge`` joins what two have found, the one with the earlier classes first.
        """

        def of_part(part: ChunkedUtilities, found: Any) -> Any:
            return lax.fori_loop(
                0, self.num_chunks, lambda chunk, found: add(part, found, chunk), found
            )

        if self._parts is None:
            return of_part(self, found)
        return self._parts.merged(lambda *part: of_part(self._on_part(*part), found), merge)

    def _on_part(self, params: dict[str, Any], first: Array, size: int) -> ChunkedUtilities:
        """The utilities of the classes of one device."""
        part = copy(self)
        part._params, part._first = params, first
        part._end = jnp.minimum(first + size, self.num_categories)
        part._parts, part._tick = None, lambda: None
        return part

    def of_chunk(self, chunk: ArrayLike, key: Array | None) -> tuple[Array, Array]:
        """Utilities (..., chunk_size), -inf past the last class, and the classes (chunk_size,).

        The utilities are NaN where tracers could not be refused: if they depend on which classes
        are evaluated together, or if ids are out of range.
        """
        classes = self.classes_of(chunk)
        sites = self._sites(classes[0], self.chunk_size, key)
        return self.known_utilities(sites, classes), classes

    def known_utilities(self, sites: Sites, classes: Array) -> Array:
        """Utilities of a chunk by the sites of the model, as ``of_chunk`` gives them."""
        psi = base_distribution(sites[self.site]["fn"]).utilities
        psi = jnp.broadcast_to(psi, (*self.batch_shape, self.chunk_size))
        is_class = classes < self._end
        is_known = self._are_alone & _ids_in_range(sites, self.plate)
        self._tick()

        def masked() -> Array:
            return jnp.where(is_known, jnp.where(is_class, psi, -jnp.inf), jnp.nan)

        # Only the last chunk is masked: a pass over utilities takes as long as a fifth of their
        # matrix product with 128 features.
        known: Array = lax.cond(is_known & is_class[-1], lambda: psi, masked)
        return known

    def classes_of(self, chunk: ArrayLike) -> Array:
        """Classes of a chunk; those of the last one may be K or more."""
        return self._first + jnp.asarray(chunk) * self.chunk_size + jnp.arange(self.chunk_size)

    @property
    def are_spread(self) -> bool:
        """Whether the classes are spread over devices; those past a device's own have -inf too."""
        return self._parts is not None

    @property
    def num_visited(self) -> int:
        """Classes of all chunks, those that fill them too."""
        num_devices = 1 if self._parts is None else -(-self.num_categories // self._parts.num_rows)
        return num_devices * self.num_chunks * self.chunk_size

    def is_visited(self, classes: Array) -> Array:
        """Which of the classes of a chunk are classes, and of this device if they are spread."""
        return classes < self._end

    def unless_masked(self, log_probs: Array) -> Array:
        """Log probabilities of choices, 0 of those that the model masks."""
        if not self._is_masked:
            return log_probs
        _, mask = unmasked(self._sites(0, 2, None)[self.site]["fn"])
        return jnp.where(mask, log_probs, 0)

    def of_all_classes(self, key: Array | None) -> Array:
        """Utilities of all classes, shape (..., K); O(K) memory for each row."""

        def of_part(part: ChunkedUtilities, num_classes: int) -> Array:
            chunks = jnp.arange(self.num_chunks)
            by_chunk = lax.map(lambda chunk: part.of_chunk(chunk, key)[0], chunks)
            psi = jnp.moveaxis(by_chunk, 0, -2)
            return psi.reshape((*psi.shape[:-2], -1))[..., :num_classes]

        if self._parts is None:
            return of_part(self, self.num_categories)
        parts = self._parts
        psi = parts.joined(lambda *part: of_part(self._on_part(*part), parts.num_rows))
        return psi[..., : self.num_categories]

    def latent_sites(self, classes: Array, key: Array) -> tuple[Sites, TouchedRows]:
        """The sites of the guide, drawn, with these classes alone; and the rows of plates."""
        touched = TouchedRows()
        sites = self.run(self.model, classes[0], 1, key, touched, latent_values=at_feasible_values)
        return self._draw(classes, key, None, sites, touched), touched

    def draws_sites(self, in_plates: Callable[[set[str]], bool]) -> bool:
        """Whether the guide draws a site, rather than a point, whose plates are as asked."""

        def look() -> bool:
            sites = self._traces(0, 1, jax.random.key(0), TouchedRows())[0]
            return any(
                site["type"] == "sample"
                and not isinstance(base_distribution(site["fn"]), dist.Delta)
                and in_plates(plates_of(site))
                for site in sites.values()
            )

        return bool(static_result(look))

    def traces(
        self, start: ArrayLike, size: int, key: Array, noise: InnerNoise
    ) -> tuple[dict[str, Any], dict[str, Any]]:
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

    def _of_distinct(self, start: ArrayLike, size: int, seed: ArrayLike) -> RowsSeen:
        """Of a few classes alone, with rows that are all different."""
        touched, distinct = TouchedRows(), partial(distinct_rows, plate=self.plate, size=size)
        run = partial(
            self.run, start=start, size=size, rng_key=jax.random.key(seed), touched=touched
        )
        sites = run(distinct(self.model), latent_values=at_feasible_values)
        guide = distinct(self.guide)
        drawn = run(guide, latent_values=at_centre)
        take_rows_held(drawn, sites, touched)
        sites = run(distinct(self.model), latent_values=at_values_of(drawn))
        utilities = jnp.asarray(base_distribution(sites[self.site]["fn"]).utilities)
        return RowsSeen(utilities, guide.before)

    def _sites(self, start: ArrayLike, size: int, key: Array | None) -> dict[str, Any]:
        """The sites with classes [start, start + size)."""
        guide_sites, run_model = self._traces(start, size, key, TouchedRows())
        sites = run_model(at_values_of(guide_sites))
        check_params(self._params, guide_sites | sites)
        classes = base_distribution(sites[self.site]["fn"]).classes
        if classes is None or classes.kind != "chunk":
            need = f"`classes=` from class plate '{self.plate}'"
            raise ValueError(f"choice '{self.site}' must have {need}, to be read by chunks.")
        return sites

    def _explain(self, error: Exception) -> None:
        """Say what is wrong if model and guide fail on a chunk of the classes, but not on all."""
        try:
            static_result(lambda: self._sites(0, self.num_categories, None))
        except (TypeError, ValueError):
            return  # they fail on all classes too
        raise ValueError(
            f"the model runs on all {self.num_categories} classes of plate '{self.plate}', but "
            "fails on two of them, and predictions evaluate some at a time. With `as classes` "
            "take those that exist, such as `x[:, classes.indices]`. It raised "
            f"{type(error).__name__}: {error}"
        ) from error

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
            fn = only_read(fn, is_choice=is_choice, also=self._also)
            return latent_values(without_training_rows(fn, is_choice=is_choice))

        return sites_of(
            fn,
            self._args,
            self._kwargs,
            rng_key=rng_key,
            params=self._params,
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
            row = class_id[None]
            own = PlateRows(row, self.num_categories, False, None, row, None)
            helpers = {
                name: v for name, v in touched.helpers.items() if name != helper_of(self.plate)
            }
            known = TouchedRows(touched.plates | {self.plate: own}, helpers)
            choose = partial(hold_rows, rows={self.plate: row})
            drawn = self._sites_with(choose, self.guide, class_id, key, known, noise=noise)
            take_rows_held(drawn, sites, known)
            messages.update(drawn)
            values = {name: site["value"] for name, site in drawn.items() if is_latent(site)}
            axes.update(_axes_of_rows(self.plate, values, drawn, sites))
            inside = {name: jnp.squeeze(values[name], axis) for name, axis in axes.items()}
            return inside, {name: values[name] for name in values.keys() - axes.keys()}

        inside, found = jax.vmap(of_class, out_axes=(0, None))(classes)
        for name, site in sites.items() if self.has_reads else ():
            if is_latent(site) and self.plate in plates_of(site) and name not in messages:
                raise NotImplementedError(
                    f"site '{name}' in plate '{self.plate}' is not in the guide. To be drawn, a "
                    "model that reads classes by id needs a guide of all its sites there."
                )
        found |= {name: jnp.moveaxis(value, 0, axes[name]) for name, value in inside.items()}
        return {name: {**messages[name], "value": value} for name, value in found.items()} | {
            name: site for name, site in messages.items() if site["type"] == "param"
        }


def _axes_of_rows(
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


def _on_rows(drawn: Any, site: Any, class_plates: Container[str], touched: TouchedRows) -> Any:
    """The rows that class plates hold, of a site that the guide draws whole, outside of them."""
    own = plates_of(drawn)
    for frame in site["cond_indep_stack"] if site["type"] == "sample" else ():
        if frame.name in class_plates and frame.name not in own:
            plate = touched.plates[frame.name]
            axis = frame.dim - site["fn"].event_dim
            drawn = {**drawn, "value": rows_of_whole(drawn, axis, plate.indices, plate.size)}
    return drawn


def rows_of_whole(drawn: Any, axis: int, rows: Array, size: int) -> Any:
    """These rows of a site's value, which the guide draws outside of their plate.

    Raises:
        ValueError: If the value has neither all ``size`` rows of the plate on ``axis``, nor these.
    """
    value = drawn["value"]
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


def _ids_in_range(sites: Any, plate: str) -> Array:
    """Whether the labels of other class plates, and the ids of data plates, are rows of theirs."""
    valid = jnp.array(True)
    for name, site in of_type("plate", sites).items():
        facts = plate_facts(site)
        for ids in (facts.labels, facts.row_ids) if name != plate else ():
            valid &= True if ids is None else ((ids >= 0) & (ids < site["args"][0])).all()
    return valid


def static_result(fn: Callable[[], Any]) -> Any:
    """What ``fn`` returns that is not an array, without computing arrays."""
    result: list[Any] = []

    def run() -> None:
        result.append(fn())

    jax.eval_shape(run)
    return result[0]
