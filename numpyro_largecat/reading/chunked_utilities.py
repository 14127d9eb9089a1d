# SPDX-License-Identifier: Apache-2.0
"""The utilities that a fitted model gives to all classes of a choice, one chunk at a time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array, lax
from jax.typing import ArrayLike
from numpyro import handlers
from numpyro.handlers import replay, substitute, trace

from numpyro_largecat._checks import check_arguments, check_count
from numpyro_largecat.choices.choice_distribution import ChoiceDistribution, is_choice
from numpyro_largecat.choices.error_families import GUMBEL, ErrorFamily
from numpyro_largecat.choices.error_guides import without_errors
from numpyro_largecat.handlers.chosen_rows import only_read, without_training_rows
from numpyro_largecat.handlers.chunk_noise import InnerNoise, noise_of_chunk
from numpyro_largecat.handlers.plate_facts import class_plates, plate_facts
from numpyro_largecat.handlers.run_model import at_centre, at_feasible_values, sites_of
from numpyro_largecat.handlers.shared_rows import share_rows
from numpyro_largecat.handlers.sites import base_distribution, of_type, plates_of
from numpyro_largecat.handlers.static_arguments import with_jax_arrays
from numpyro_largecat.handlers.touched_rows import TouchedRows
from numpyro_largecat.plates.class_chunk import class_chunk
from numpyro_largecat.reading.chunk_checks import check_guide_has_run, distinct_rows, rows_are_alone
from numpyro_largecat.svi.stored_params import check_params


class ChunkedUtilities:
    """Run model and guide on one chunk of classes after another.

    With a key the latent sites are drawn from the guide: those in the class plate with noise of
    their own in each chunk, and all others alike, whichever the chunk, so that the chunks together
    are one draw. Without one they are at the centre of the guide.

    Args:
        model: The model that was fitted.
        guide: Its guide.
        params: Their parameters.
        args: Positional arguments of the model.
        kwargs: Keyword arguments of the model.
        site: Name of the choice.
        plate: Name of its class plate.
        chunk_size: Number of classes in a chunk; fewer if there are fewer classes.
        also: Rows that other class plates hold besides those of their labels, by plate name.

    Attributes:
        num_categories: Number of classes K.
        family: Distribution of the errors.
        batch_shape: Shape of the choice.
        dims: Plate of each axis of the choice, None where an axis has none.
        choice_plates: Names of these plates.
        dtype: Type of the utilities.
        num_chunks: Number of chunks.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        guide: Callable[..., Any],
        params: dict[str, Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        site: str,
        plate: str,
        chunk_size: int,
        also: Mapping[str, Array] | None = None,
    ) -> None:
        if not isinstance(params, dict):
            raise TypeError(
                "`params` must be a dict of the fit's parameters, such as `result.params`; "
                f"got {type(params).__name__}."
            )
        check_arguments(model, args, kwargs)
        self._model, self._guide = without_errors(model, guide)
        self._args, self._kwargs = with_jax_arrays((args, kwargs))
        self._params, self.site, self.plate, self._also = params, site, plate, also
        chunk_size = check_count("chunk_size", chunk_size, 1)

        def look() -> tuple[int, ErrorFamily, tuple[int, ...], Any, dict[int, str]]:
            sites, num_categories = self._sites(0, 2, None)
            choice = base_distribution(sites[site]["fn"])
            family, dtype = getattr(choice, "noise", GUMBEL), choice.utilities.dtype
            plates = {frame.dim: frame.name for frame in sites[site]["cond_indep_stack"]}
            # Plates expand a choice whose utilities have no axis for them.
            return num_categories, family, sites[site]["fn"].shape(), dtype, plates

        check_guide_has_run(guide)
        try:
            seen = _static_result(look)
        except (TypeError, ValueError) as error:
            self._explain(error)
            raise
        self.num_categories, self.family, self.batch_shape, self.dtype, plates = seen
        self.choice_plates = frozenset(plates.values())
        self.dims = [plates.get(axis) for axis in range(-len(self.batch_shape), 0)]
        self.chunk_size = min(chunk_size, self.num_categories)
        self.num_chunks = -(-self.num_categories // self.chunk_size)
        self._are_alone = jnp.array(True)
        if self.num_chunks > 1:
            self._are_alone = rows_are_alone(self._of_distinct, plate, self.chunk_size)

    def of_chunk(self, chunk: ArrayLike, key: Array | None) -> tuple[Array, Array]:
        """Utilities (..., chunk_size), -inf past the last class, and the classes (chunk_size,).

        The utilities are NaN where tracers could not be refused: if they depend on which classes
        are evaluated together, or if ids are out of range.
        """
        classes = self.classes_of(chunk)
        sites, _ = self._sites(classes[0], self.chunk_size, key)
        psi = base_distribution(sites[self.site]["fn"]).utilities
        psi = jnp.broadcast_to(psi, (*self.batch_shape, self.chunk_size))
        is_class = classes < self.num_categories
        is_whole = self.num_categories % self.chunk_size == 0 or is_class[-1]
        is_known = self._are_alone & _ids_in_range(sites, self.plate)

        def masked() -> Array:
            return jnp.where(is_known, jnp.where(is_class, psi, -jnp.inf), jnp.nan)

        # Only the last chunk is masked: a pass over utilities takes as long as a fifth of their
        # matrix product with 128 features.
        return lax.cond(is_known & is_whole, lambda: psi, masked), classes

    def classes_of(self, chunk: ArrayLike) -> Array:
        """Classes of a chunk; those of the last one may be K or more."""
        return jnp.asarray(chunk) * self.chunk_size + jnp.arange(self.chunk_size)

    def of_all_classes(self, key: Array | None) -> Array:
        """Utilities of all classes, shape (..., K); O(K) memory for each row."""
        chunks = jnp.arange(self.num_chunks)
        by_chunk = lax.map(lambda chunk: self.of_chunk(chunk, key)[0], chunks)
        psi = jnp.moveaxis(by_chunk, 0, -2)
        return psi.reshape((*psi.shape[:-2], -1))[..., : self.num_categories]

    def latent_sites(self, chunk: ArrayLike, key: Array) -> tuple[dict[str, Any], TouchedRows]:
        """The sites of the guide, drawn, with the classes of a chunk; and the rows of plates."""
        touched = TouchedRows()
        start = self.classes_of(chunk)[0]
        return self._traces(start, self.chunk_size, key, touched)[0], touched

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

        return bool(_static_result(look))

    def traces(
        self, start: ArrayLike, size: int, key: Array, noise: InnerNoise
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """The sites of guide and model with classes [start, start + size), drawn with two keys."""
        guide_sites, model = self._traces(start, size, key, TouchedRows(), noise)
        return guide_sites, self._replayed(model, guide_sites)

    def _replayed(self, model: Any, guide_sites: dict[str, Any]) -> dict[str, Any]:
        return trace(replay(model, guide_sites)).get_trace(*self._args, **self._kwargs)

    def _of_distinct(self, start: ArrayLike, size: int, seed: ArrayLike) -> Array:
        """Utilities of a few classes alone, with rows that are all different."""
        touched = TouchedRows()
        classes = jnp.asarray(start) + jnp.arange(size)
        around = partial(distinct_rows, plate=self.plate, classes=classes)
        guide_sites, model = self._traces(start, size, None, touched, seed=seed, around=around)
        sites = self._replayed(model, guide_sites)
        return jnp.asarray(base_distribution(sites[self.site]["fn"]).utilities)

    def _sites(self, start: ArrayLike, size: int, key: Array | None) -> tuple[dict[str, Any], int]:
        """The sites with classes [start, start + size), and the number of all classes."""
        touched = TouchedRows()
        guide_sites, model = self._traces(start, size, key, touched)
        sites = self._replayed(model, guide_sites)
        check_params(self._params, guide_sites | sites)
        _check_plate(sites, self.plate)
        _check_choice(sites, self.site, self.plate)
        return sites, touched.plates[self.plate].size

    def _explain(self, error: Exception) -> None:
        """Say what is wrong if the model fails on a chunk of its classes, but not on all."""

        def look() -> int:
            run: dict[str, Any] = {"params": self._params, "touched": TouchedRows()}
            sites = sites_of(self._model, self._args, self._kwargs, **run, around=_read_alone)
            _check_plate(sites, self.plate)
            return int(sites[self.plate]["args"][0])

        try:
            num_categories = _static_result(look)
            _static_result(lambda: self._sites(0, num_categories, None))
        except UnknownClassPlate as unknown:
            raise unknown from error
        except (TypeError, ValueError):
            return  # it fails on all classes too
        raise ValueError(
            f"the model runs on all {num_categories} classes of plate '{self.plate}', but fails on "
            "two of them. Predictions evaluate it on some classes at a time, also where its plate "
            "is full: with `as classes`, take from tables with an axis for the classes those that "
            f"exist, such as `x[:, classes.indices]`. It raised {type(error).__name__}: {error}"
        ) from error

    def _traces(
        self,
        start: ArrayLike,
        size: int,
        key: Array | None,
        touched: TouchedRows,
        noise: InnerNoise | None = None,
        seed: ArrayLike = 0,
        around: Callable[[Any], Any] = lambda fn: fn,
    ) -> tuple[dict[str, Any], Any]:
        """The guide's sites with these classes, and the model to run with them.

        Without a key ``seed`` moves what the model draws beside the sites of the guide. The handler
        ``around`` comes first around model and guide.
        """
        rng_key = jax.random.key(seed) if key is None else key

        def on_chunk(fn: Any) -> Any:
            fn = share_rows(around(fn), touched)
            fn = class_chunk(fn, name=self.plate, start=start, size=size)
            fn = noise_of_chunk(handlers.seed(fn, rng_key), self.plate, start, noise)
            fn = only_read(substitute(fn, data=self._params), is_choice=is_choice, also=self._also)
            return without_training_rows(fn, is_choice=is_choice)

        model, guide = on_chunk(self._model), on_chunk(self._guide)
        # The model tells the plain plates of the guide, which follow its own, their rows.
        sites = trace(at_feasible_values(model)).get_trace(*self._args, **self._kwargs)
        guide = at_centre(guide) if key is None else guide
        drawn = trace(guide).get_trace(*self._args, **self._kwargs)
        in_model = class_plates(sites)
        for name in drawn.keys() & sites.keys():
            drawn[name] = _on_rows(drawn[name], sites[name], in_model, touched)
        return drawn, model


def _on_rows(drawn: Any, site: Any, class_plates: Collection[str], touched: TouchedRows) -> Any:
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
            f"the guide draws site '{drawn['name']}' outside of the model's plate for it, so that "
            f"it must have all {size} rows at axis {axis}; got shape {shape}."
        )
    return value


class UnknownClassPlate(ValueError):
    """The model has no class plate of that name."""


def _ids_in_range(sites: Any, plate: str) -> Array:
    """Whether the labels of other class plates, and the ids of data plates, are rows of theirs."""
    valid = jnp.array(True)
    for name, site in of_type("plate", sites).items():
        facts = plate_facts(site)
        for ids in (facts.labels, facts.row_ids) if name != plate else ():
            valid &= True if ids is None else ((ids >= 0) & (ids < site["args"][0])).all()
    return valid


def _check_plate(sites: Any, plate: str) -> None:
    names = list(class_plates(sites))
    if plate not in names:
        raise UnknownClassPlate(
            f"`plate` must name a class plate of the model; got '{plate}', and the model's class "
            f"plates are {names}."
        )


def _check_choice(sites: Any, site: str, plate: str) -> None:
    fn = base_distribution(sites[site]["fn"]) if site in sites else None
    if not isinstance(fn, ChoiceDistribution) or fn.classes is None:
        choices = [name for name, s in sites.items() if is_choice(s)]
        raise ValueError(
            f"`site` must name a UtilityCategorical site over class plate '{plate}', with "
            f"`classes=` from that plate; got '{site}', and the choices of the model are "
            f"{choices}."
        )


def _read_alone(model: Any) -> Any:
    """Run a model at any latent values, with new rows of the data."""
    model = only_read(at_feasible_values(model), is_choice=is_choice)
    return without_training_rows(model, is_choice=is_choice)


def _static_result(fn: Callable[[], Any]) -> Any:
    """What ``fn`` returns that is not an array, without computing arrays."""
    result: list[Any] = []

    def run() -> None:
        result.append(fn())

    jax.eval_shape(run)
    return result[0]
