# SPDX-License-Identifier: Apache-2.0
"""The utilities that a fitted model gives to all classes of a choice, one chunk at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from numpyro_largecat.choices.error_families import ErrorFamily
from numpyro_largecat.handlers.closed_over_arrays import run_compiled
from numpyro_largecat.handlers.plate_facts import plate_facts
from numpyro_largecat.handlers.row_noise import apart_from_sites
from numpyro_largecat.handlers.sites import Sites, base_distribution, of_type, unmasked
from numpyro_largecat.handlers.static_result import static_result
from numpyro_largecat.ops.gaussian_softmax import stratified_normals
from numpyro_largecat.reading.bound_fit import BoundFit
from numpyro_largecat.reading.chunk_checks import rows_are_alone
from numpyro_largecat.reading.class_runs import ClassRuns
from numpyro_largecat.reading.parts_of_classes import PartsOfClasses
from numpyro_largecat.reading.progress import count_steps

Add = Callable[["ChunkedUtilities", Any, Array], Any]  # adds what a chunk has to what was found


@dataclass(frozen=True)
class ChunkedUtilities:
    """Utilities of one chunk of classes after another: of all classes, or of those of one device.

    Attributes:
        runs: Runs of model and guide, with the classes of a chunk.
        family: Distribution of the errors.
        batch_shape: Shape of the choice.
        dims: Plate of each axis of the choice, None where an axis has none.
        dtype: Type of the utilities.
        is_masked: Whether the model masks the choice.
        has_reads: Whether the model reads classes by id besides those of a chunk.
        chunk_size: Number of classes of a chunk.
        num_chunks: Number of chunks.
        first: The first class, a scalar.
        end: The first one that is past them, a scalar.
        are_alone: Whether each class is the same whichever are evaluated with it, a boolean.
        parts: Those of the devices over which all classes are spread; None if they are not.
        tick: Called with each chunk.
    """

    runs: ClassRuns
    family: ErrorFamily
    batch_shape: tuple[int, ...]
    dims: tuple[str | None, ...]
    dtype: Any
    is_masked: bool
    has_reads: bool
    chunk_size: int
    num_chunks: int
    first: Array
    end: Array
    are_alone: Array
    parts: PartsOfClasses | None = None
    tick: Callable[[], None] = lambda: None

    @classmethod
    def of(
        cls, fit: BoundFit, also: Mapping[str, Array] | None = None, *, is_drawn: bool = False
    ) -> ChunkedUtilities:
        """Those of a fit.

        Args:
            fit: The fit, on arguments of its model.
            also: Rows that other class plates hold besides those of their labels, by plate name.
            is_drawn: Whether the latent sites will be drawn.
        """
        runs = ClassRuns.of(fit, also)
        try:
            seen, is_sampled = static_result(lambda: _look(runs))
        except (TypeError, ValueError) as error:
            _explain(runs, error)
            raise
        parts = None if seen.has_reads else PartsOfClasses.of(runs.params, runs.plate)
        num_classes = runs.num_categories if parts is None else parts.num_rows
        chunk_size = min(fit.chunk_size, num_classes)
        num_chunks = -(-num_classes // chunk_size)
        are_alone = jnp.array(True)
        has_all = num_chunks == 1 and not is_sampled  # wherever the model is run
        if not has_all or is_drawn:  # draws are of one class at a time
            sizes = runs.num_categories, chunk_size
            are_alone = rows_are_alone(runs.of_distinct, runs.plate, *sizes, only_guide=has_all)
        return cls(
            runs,
            *seen,
            chunk_size,
            num_chunks,
            first=jnp.array(0),
            end=jnp.array(runs.num_categories),
            are_alone=are_alone,
            parts=parts,
        )

    @property
    def site(self) -> str:
        """Name of the choice."""
        return self.runs.site

    @property
    def plate(self) -> str:
        """Name of its class plate."""
        return self.runs.plate

    @property
    def num_categories(self) -> int:
        """Number of classes K."""
        return self.runs.num_categories

    @property
    def has_no_rows(self) -> bool:
        """Whether there is nothing to predict, as of a frame that a filter has left empty."""
        return 0 in self.batch_shape

    @property
    def choice_plates(self) -> frozenset[str]:
        """Names of the plates that the choice is in."""
        return frozenset(name for name in self.dims if name is not None)

    def with_progress(self, num_passes: int) -> ChunkedUtilities:
        """The same with a progress bar, if one is asked for, of passes over all chunks."""
        total = num_passes * self.num_chunks
        return replace(self, tick=count_steps("chunks", total, self.runs.fit.progress_bar))

    def visit(self, add: Add, found: Any, merge: Callable[[Any, Any], Any]) -> Any:
        """Go through the chunks: ``found = add(utilities, found, chunk)``, by the chunk's number.

        Where the classes are spread over devices, each visits its own, from what is found at the
        start, and ``merge`` joins what two have found, the one with the earlier classes first.
        """

        def of_part(part: ChunkedUtilities, found: Any) -> Any:
            return lax.fori_loop(
                0, self.num_chunks, lambda chunk, found: add(part, found, chunk), found
            )

        if self.parts is None:
            return run_compiled(partial(of_part, self), found)
        return self.parts.merged(lambda *part: of_part(self._on_part(*part), found), merge)

    def _on_part(self, params: dict[str, Any], first: Array, size: int) -> ChunkedUtilities:
        """The utilities of the classes of one device."""
        return replace(
            self,
            runs=replace(self.runs, params=params),
            first=first,
            end=jnp.minimum(first + size, self.num_categories),
            parts=None,
            tick=lambda: None,
        )

    def of_chunk(self, chunk: ArrayLike, key: Array | None) -> tuple[Array, Array]:
        """Utilities (..., chunk_size), -inf past the last class, and the classes (chunk_size,).

        With a key, latent sites are drawn, and so is what utilities have of the variances that the
        model declares for them, as with ``gaussian_weights``: one normal for each class.

        The utilities are NaN where tracers could not be refused: if they depend on which classes
        are evaluated together, or if ids are out of range.
        """
        classes = self.classes_of(chunk)
        sites = self.runs.sites(classes[0], self.chunk_size, key)
        psi = self.known_utilities(sites, classes)
        if key is not None:
            variances = declared_variances(base_distribution(sites[self.site]["fn"]))
            if variances is not None:
                noise_key = apart_from_sites(apart_from_sites(key))  # the errors have the one
                normals = stratified_normals(noise_key, classes, 1, psi.dtype)[0]
                psi += (jnp.sqrt(variances) * normals).astype(psi.dtype)
        return psi, classes

    def known_utilities(self, sites: Sites, classes: Array) -> Array:
        """Utilities of a chunk by the sites of the model, as ``of_chunk`` gives them."""
        psi = base_distribution(sites[self.site]["fn"]).utilities
        psi = jnp.broadcast_to(psi, (*self.batch_shape, self.chunk_size))
        is_class = self.is_visited(classes)
        is_known = self.are_alone & _ids_in_range(sites, self.plate)
        self.tick()
        return _of_classes(psi, is_class, is_known)

    def classes_of(self, chunk: ArrayLike) -> Array:
        """Classes of a chunk; those of the last one may be K or more."""
        return self.first + jnp.asarray(chunk) * self.chunk_size + jnp.arange(self.chunk_size)

    @property
    def num_visited(self) -> int:
        """Classes of all chunks, those that fill them too."""
        num_devices = 1 if self.parts is None else -(-self.num_categories // self.parts.num_rows)
        return num_devices * self.num_chunks * self.chunk_size

    def is_visited(self, classes: Array) -> Array:
        """Which of the classes of a chunk are classes, and of this device if they are spread."""
        return classes < self.end

    def unless_masked(self, log_probs: Array) -> Array:
        """Log probabilities of choices, 0 of those that the model masks."""
        if not self.is_masked:
            return log_probs
        _, mask = unmasked(self.runs.sites(0, 2, None)[self.site]["fn"])
        return jnp.where(mask, log_probs, 0)

    def of_all_classes(self, key: Array | None) -> Array:
        """Utilities of all classes, shape (..., K); O(K) memory for each row."""

        def of_part(part: ChunkedUtilities, num_classes: int) -> Array:
            chunks = jnp.arange(self.num_chunks)
            by_chunk = lax.map(lambda chunk: part.of_chunk(chunk, key)[0], chunks)
            psi = jnp.moveaxis(by_chunk, 0, -2)
            return psi.reshape((*psi.shape[:-2], -1))[..., :num_classes]

        parts = self.parts
        if parts is None:
            return run_compiled(lambda: of_part(self, self.num_categories))
        psi = parts.joined(lambda *part: of_part(self._on_part(*part), parts.num_rows))
        return psi[..., : self.num_categories]


@jax.custom_jvp
def _of_classes(psi: Array, is_class: Array, is_known: Array) -> Array:
    """Utilities (..., M), -inf of what is no class, all NaN if they are not known.

    Only the last chunk needs that, and a pass over utilities takes as long as a fifth of their
    matrix product with 128 features. A loop of one step, or none, leaves the others where they
    are, which a branch would copy.
    """

    def mask(loop: tuple[Array, Array]) -> tuple[Array, Array]:
        return jnp.where(is_known, jnp.where(is_class, loop[0], -jnp.inf), jnp.nan), jnp.array(True)

    found, _ = lax.while_loop(lambda loop: ~loop[1], mask, (psi, is_known & is_class[-1]))
    return found


@_of_classes.defjvp
def _of_classes_jvp(primals: tuple[Array, ...], tangents: tuple[Array, ...]) -> tuple[Array, Array]:
    _, is_class, is_known = primals

    def masked(tangent: Array) -> Array:
        return jnp.where(is_known & is_class, tangent, 0)

    is_kept = is_known & is_class[-1]
    return _of_classes(*primals), lax.cond(is_kept, lambda x: x, masked, tangents[0])


def declared_variances(choice: Any) -> Array | None:
    """Variances that a model declares for its utilities, which it gives the means of."""
    return getattr(choice, "variances", None)


class _Seen(NamedTuple):
    """What a choice is, whichever classes are there; ``ChunkedUtilities`` says what each is."""

    family: ErrorFamily
    batch_shape: tuple[int, ...]
    dims: tuple[str | None, ...]
    dtype: Any
    is_masked: bool
    has_reads: bool


def _look(runs: ClassRuns) -> tuple[_Seen, bool]:
    """Run the model with two classes; also whether steps of its fit hold some of the classes."""
    sites = runs.sites(0, 2, None)
    site = sites[runs.site]
    choice = base_distribution(site["fn"])
    shape = site["fn"].shape()  # plates expand a choice whose utilities have no axis for them
    plates = {frame.dim: frame.name for frame in site["cond_indep_stack"]}
    facts = plate_facts(sites[runs.plate])
    seen = _Seen(
        choice.noise,
        shape,
        tuple(plates.get(axis) for axis in range(-len(shape), 0)),
        choice.utilities.dtype,
        is_masked=unmasked(site["fn"])[1] is not True,
        has_reads=facts.reads is not None,
    )
    return seen, facts.is_sampled


def _explain(runs: ClassRuns, error: Exception) -> None:
    """Say what is wrong if model and guide fail on a chunk of the classes, but not on all."""
    try:
        static_result(lambda: runs.sites(0, runs.num_categories, None))
    except (TypeError, ValueError):
        return  # they fail on all classes too
    raise ValueError(
        f"the model runs on all {runs.num_categories} classes of plate '{runs.plate}', but "
        "fails on two of them, and predictions evaluate some at a time. With `as classes` "
        "take those that exist, such as `x[:, classes.indices]`. It raised "
        f"{type(error).__name__}: {error}"
    ) from error


def _ids_in_range(sites: Any, plate: str) -> Array:
    """Whether the labels of other class plates, and the ids of data plates, are rows of theirs."""
    valid = jnp.array(True)
    for name, site in of_type("plate", sites).items():
        facts = plate_facts(site)
        for ids in (facts.labels, facts.row_ids) if name != plate else ():
            valid &= True if ids is None else ((ids >= 0) & (ids < site["args"][0])).all()
    return valid
