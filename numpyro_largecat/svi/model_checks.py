# SPDX-License-Identifier: Apache-2.0
"""Refuse bad data before the first step."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array, lax
from jax.typing import ArrayLike
from numpyro.ops.provenance import eval_provenance

from numpyro_largecat._checks import (
    as_ids,
    check_finite,
    check_in_range,
    check_known,
    check_no_overflow,
    is_concrete,
    out_of_range,
)
from numpyro_largecat.choices.choice_distribution import ChoiceDistribution
from numpyro_largecat.handlers.closed_over_arrays import compiled
from numpyro_largecat.handlers.plate_facts import class_plates, plate_facts
from numpyro_largecat.handlers.run_model import sites_of
from numpyro_largecat.handlers.sites import (
    base_distribution,
    is_continuous_latent,
    is_latent,
    is_observed,
    plates_of,
)
from numpyro_largecat.handlers.touched_rows import TouchedRows
from numpyro_largecat.plates.row_subset import refuse_repeated_rows
from numpyro_largecat.svi.array_batches import ArrayBatches
from numpyro_largecat.svi.scale_checks import refuse_without_rows, sites_without_rows

CATEGORICALS = (dist.CategoricalLogits, dist.CategoricalProbs)


def check_arguments(model: Callable[..., Any], args: Any, kwargs: Any) -> None:
    """Refuse arrays among the arguments of the model that are not finite, or overflow, by name."""
    try:
        bound = inspect.signature(model).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):  # no signature, or one that the model itself will refuse
        bound = {**{f"argument {i}": a for i, a in enumerate(args)}, **kwargs}
    arrays = [
        (f"`{name}{jax.tree_util.keystr(path)}`", leaf)
        for name, value in bound.items()
        for path, leaf in jax.tree_util.tree_leaves_with_path(value)
        if isinstance(leaf, (np.ndarray, jax.Array, float))
    ]
    check_finite(arrays)
    check_no_overflow(arrays)


def warn_of_discrete_sites(model_trace: Any, loss: Any) -> None:
    """Warn, as NumPyro does, of latent sites that the loss cannot handle."""
    for name, site in model_trace.items():
        if not is_latent(site):
            continue
        if site["fn"].support.is_discrete and not loss.can_infer_discrete:
            warnings.warn(
                f"site '{name}' is discrete and latent, which SVI with {type(loss).__name__} does "
                "not support.",
                stacklevel=2,
            )


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("values", "known"),
    meta_fields=("size", "meaning", "plate", "latent"),
)
@dataclass(frozen=True)
class Labels:
    """Classes or row ids that a model was given, at a plate or an observed site."""

    values: Array  # classes or row ids, any shape
    size: int  # number of classes K, or of rows N
    meaning: str = "classes"  # what the values are, for messages
    known: Array | None = None  # the classes of a subset that can be observed, padded with K
    plate: str = ""  # the plate whose rows must not repeat, since it holds a latent site
    latent: str | None = None  # that site


def observed_labels(model_trace: Any) -> dict[str, Labels]:
    """Find the labels that a model gives to its class plates and observes at its sites."""
    found = {}
    for name, site in model_trace.items():
        facts = plate_facts(site)
        if facts.labels is not None:
            found[f"`labels` of plate '{name}'"] = Labels(facts.labels, site["args"][0])
        elif facts.row_ids is not None:
            latent = _latent_site(model_trace, name)
            found[f"`rows` of plate '{name}'"] = Labels(
                facts.row_ids, site["args"][0], "row ids", plate=name, latent=latent
            )
        elif is_observed(site):
            fn = base_distribution(site["fn"])
            if isinstance(fn, ChoiceDistribution):
                _refuse_forgotten_classes(name, fn, model_trace)
                known = None if fn.classes is None else fn.classes.labels
                value = jnp.asarray(site["value"])
                found[f"`obs` of site '{name}'"] = Labels(value, fn.num_categories, known=known)
    return found


def _latent_site(model_trace: Any, plate: str) -> str | None:
    """A continuous latent site inside this plate, if there is one."""
    for name, site in model_trace.items():
        if is_latent(site) and plate in plates_of(site) and is_continuous_latent(site):
            return str(name)
    return None


class _SampledPlate(NamedTuple):
    """A class plate that holds a subset in this step."""

    name: str
    num_categories: int  # number of classes K
    num_together: int  # classes of one observation: columns of utilities
    labels: Array | None


def _sampled_plates(model_trace: Any) -> list[_SampledPlate]:
    found = []
    for name, facts in class_plates(model_trace).items():
        if facts.row_weights is not None:
            labels, num_together = facts.labels, facts.row_weights.shape[0]
            if labels is not None and facts.repeats:
                num_together //= labels.shape[0]
            size = model_trace[name]["args"][0]
            found.append(_SampledPlate(name, size, num_together, labels))
    return found


def _refuse_forgotten_classes(name: str, fn: ChoiceDistribution, model_trace: Any) -> None:
    """Refuse utilities of a subset of classes that are taken for those of all."""
    for plate in _sampled_plates(model_trace) if fn.classes is None else ():
        if plate.num_together == fn.num_categories != plate.num_categories:
            raise ValueError(
                f"site '{name}' has utilities of {fn.num_categories} classes, as many as plate "
                f"'{plate.name}' holds of its {plate.num_categories}, but no `classes`. Pass "
                f"`classes=` from `with lc.class_plate('{plate.name}', ...) as classes`."
            )


def labels_as_columns(model_trace: Any) -> dict[str, Array]:
    """Find NumPyro's own categoricals over the classes that a subsampled plate holds.

    Returns:
        For each such site, under what to say of it, whether it observes labels of the plate, rather
        than their places among its columns, as a softmax written by hand may do.
    """
    found = {}
    for name, site in model_trace.items():
        fn = base_distribution(site["fn"]) if is_observed(site) else None
        if not isinstance(fn, CATEGORICALS):
            continue
        size = jnp.shape(fn.logits if isinstance(fn, dist.CategoricalLogits) else fn.probs)[-1]
        for plate in _sampled_plates(model_trace):
            if plate.num_together != size or size == plate.num_categories:
                continue
            message = (
                f"site '{name}' is a Categorical of {size} outcomes, as many as plate "
                f"'{plate.name}' holds of its {plate.num_categories} classes, and observes labels, "
                "which would be taken for columns of that subset. Use `lc.sample_choice`, or "
                "`lc.UtilityCategorical(utilities, classes)` with the `classes` that the plate "
                "gives."
            )
            value = jnp.asarray(site["value"])
            if plate.labels is None:
                found[message] = jnp.any(value >= size)
            else:
                found[message] = jnp.isin(value, plate.labels).all()
    return found


def check_columns(labels_as_columns: dict[str, Array]) -> None:
    """Refuse what ``labels_as_columns`` has found; tracers pass.

    Raises:
        ValueError: If labels are observed as columns of a subset of the classes.
    """
    for message, is_wrong in labels_as_columns.items():
        if is_concrete(is_wrong) and is_wrong:
            raise ValueError(message)


def check_labels(labels: dict[str, Labels]) -> None:
    """Refuse labels out of range or unknown to the class plate, and repeated rows; tracers pass.

    Raises:
        ValueError: With the position and value of the first bad label.
    """
    for name, found in labels.items():
        check_in_range(name, found.values, found.size, found.meaning)
        if found.known is not None:
            check_known(name, found.values, found.known)
        if found.latent is not None and found.values.ndim == 1:
            refuse_repeated_rows(found.plate, found.latent, found.values)


class _SeenLabels(NamedTuple):
    """What some chunks of rows show of labels, one entry for each chunk."""

    num_bad: Array  # labels out of range
    are_rows: Array  # whether they are the rows themselves
    unlike: Array  # ids that must not repeat, one for each row; else none


class _RowLooks:
    """A model's labels and scales on every row of ``batches``, chunk by chunk.

    Nothing else is computed, and of each chunk no more is kept than a few numbers, or ids that must
    not repeat in any other.
    """

    def __init__(
        self, model: Callable[..., Any], batches: ArrayBatches, args: Any, kwargs: Any
    ) -> None:
        self.model, self.batches, self.args, self.kwargs = model, batches, args, kwargs
        self.num_chunks = -(-batches.size // batches.batch_size)
        self.look = compiled(lambda chunks: lax.map(self._of_chunk, chunks))
        self.row_ids: dict[str, Labels] = {}  # those of data plates, without values

    def rows(self, chunk: ArrayLike) -> Array:
        """Rows of a chunk; the last one may go on past the last row."""
        return jnp.asarray(chunk) * self.batches.batch_size + jnp.arange(self.batches.batch_size)

    def sites(self, chunk: ArrayLike) -> Any:
        """The sites of the model on a chunk, whose last row fills it up."""
        rows = jnp.minimum(self.rows(chunk), self.batches.size - 1)
        args = (*self.args, *self.batches.take(rows))
        return sites_of(self.model, args, self.kwargs, touched=TouchedRows())

    def labels(self, chunk: ArrayLike) -> dict[str, Labels]:
        """The labels of a chunk."""
        return observed_labels(self.sites(chunk))

    def is_by_row(self, found: Labels) -> bool:
        """Whether labels of a chunk are one, or some, for each of its rows."""
        return found.values.shape[:1] == (self.batches.batch_size,)

    def _of_chunk(self, chunk: Array) -> tuple[dict[str, _SeenLabels], dict[str, Array]]:
        sites = self.sites(chunk)
        labels = observed_labels(sites)
        none = jnp.zeros(0, jnp.int32)
        self.row_ids = {n: replace(f, values=none) for n, f in labels.items() if f.plate}
        seen = {name: self._seen(chunk, found) for name, found in labels.items()}
        is_whole = self.batches.batch_size == self.batches.size
        return seen, {} if is_whole else sites_without_rows(sites, self.batches.batch_size)

    def _seen(self, chunk: Array, found: Labels) -> _SeenLabels:
        values, rows = as_ids(found.values), self.rows(chunk)
        bad = (values < 0) | (values >= found.size)
        none = jnp.zeros(0, jnp.int32)
        if not self.is_by_row(found):
            return _SeenLabels(bad.sum(), jnp.array(False), none)
        is_row = rows < self.batches.size
        bad &= is_row.reshape(-1, *[1] * (bad.ndim - 1))
        are_rows = ((values == rows) | ~is_row).all() if values.ndim == 1 else jnp.array(False)
        return _SeenLabels(bad.sum(), are_rows, none if found.latent is None else values)


def check_batches(model: Callable[..., Any], batches: ArrayBatches, args: Any, kwargs: Any) -> None:
    """Refuse arrays that are not finite, bad labels, and likelihoods not scaled to all rows.

    The model itself says what its labels are: its plates are opened on every row, in compiled
    chunks in which nothing but labels and scales is computed.

    Cost: O(N) time; memory for a chunk of rows, and a few numbers for each chunk; O(N log N) and an
    id for each row where these must not repeat.
    """
    check_finite((f"array {i} of `batches`", array) for i, array in enumerate(batches.arrays))
    looks = _RowLooks(model, batches, args, kwargs)
    seen, without_rows = looks.look(jnp.arange(looks.num_chunks))
    for name, found in seen.items():
        if found.num_bad.any():
            _refuse_labels(name, looks, found.num_bad)
        if name in looks.row_ids:
            _check_row_ids(name, looks.row_ids[name], found, batches)
    suspects = [name for name, is_wrong in without_rows.items() if is_wrong.all()]

    def observed(chunk: Array) -> list[Array]:
        sites = looks.sites(chunk)
        return [jnp.asarray(sites[name]["value"]) for name in suspects]

    if not suspects:
        return
    for name, inputs in zip(suspects, eval_provenance(observed, chunk=0), strict=True):
        if inputs:  # what it observes is the minibatch's own, not the same in each step
            refuse_without_rows(name, batches.size, batches.batch_size)


def _check_row_ids(name: str, ids: Labels, seen: _SeenLabels, batches: ArrayBatches) -> None:
    """Refuse a plate with another number of rows than ``batches``, or ids that must not repeat."""
    if seen.are_rows.all():
        if ids.size > batches.size:
            raise ValueError(
                f"{name} are those of `batches`, so the size of the plate must be {batches.size}, "
                f"their number of rows; got {ids.size}, which would scale the likelihood by "
                f"{ids.size} / {batches.batch_size}."
            )
    elif ids.latent is not None:
        refuse_repeated_rows(ids.plate, ids.latent, seen.unlike.ravel()[: batches.size])


def _refuse_labels(name: str, looks: _RowLooks, num_bad: Array) -> None:
    """Say which label is the first that is out of range; ``num_bad`` are in each chunk."""
    chunk = int(jnp.argmax(num_bad > 0))
    found = compiled(looks.labels)(chunk)[name]
    values, size = found.values, found.size
    if not looks.is_by_row(found):
        check_in_range(name, values, size, found.meaning)
        return
    start, num_rows = chunk * looks.batches.batch_size, looks.batches.size
    num_all = num_rows * (values.size // len(values))
    total = int(np.asarray(num_bad).sum(dtype=np.int64))
    raise out_of_range(
        name, values, size, found.meaning, num_bad=total, num_all=num_all, start=start
    )
