# SPDX-License-Identifier: Apache-2.0
"""Refuse ``ArrayBatches`` of which some later minibatch would fail, before the first step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

from numpyro_largecat._checks import (
    BadDataError,
    check_finite,
    check_in_range,
    describe_bad,
    is_traced,
)
from numpyro_largecat._conversions import as_ids
from numpyro_largecat.handlers.closed_over_arrays import compiled
from numpyro_largecat.handlers.internals import eval_provenance
from numpyro_largecat.handlers.run_model import sites_of
from numpyro_largecat.handlers.sites import Sites, log_factor
from numpyro_largecat.handlers.touched_rows import TouchedRows
from numpyro_largecat.plates.row_subset import refuse_repeated_rows
from numpyro_largecat.svi.array_batches import ArrayBatches
from numpyro_largecat.svi.labels import Labels, labels_of
from numpyro_largecat.svi.unscaled_sites import (
    observed_of,
    plate_of_batch,
    refuse_unscaled,
    unscaled_sites,
)


class _SeenLabels(NamedTuple):
    """What some chunks of rows show of labels, one entry for each chunk."""

    num_bad: Array  # labels out of range
    are_rows: Array  # whether they are the rows themselves
    unlike: Array  # ids that must not repeat, one for each row; else none


class RowLooks:
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

    def sites(self, chunk: ArrayLike) -> Sites:
        """The sites of the model on a chunk, whose last row fills it up."""
        rows = jnp.minimum(self.rows(chunk), self.batches.size - 1)
        args = (*self.args, *self.batches.take(rows))
        return sites_of(self.model, args, self.kwargs, touched=TouchedRows())

    def labels(self, chunk: ArrayLike) -> dict[str, Labels]:
        """The labels of a chunk."""
        return labels_of(self.sites(chunk)).labels

    def is_by_row(self, found: Labels) -> bool:
        """Whether labels of a chunk are one, or some, for each of its rows."""
        return found.values.shape[:1] == (self.batches.batch_size,)

    def _of_chunk(self, chunk: Array) -> tuple[dict[str, _SeenLabels], dict[str, Array]]:
        sites = self.sites(chunk)
        labels = labels_of(sites).labels
        none = jnp.zeros(0, jnp.int32)
        self.row_ids = {n: replace(f, values=none) for n, f in labels.items() if f.plate}
        seen = {name: self._seen(chunk, found) for name, found in labels.items()}
        is_whole = self.batches.batch_size == self.batches.size
        return seen, {} if is_whole else unscaled_sites(sites, self.batches.batch_size)

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
    looks = RowLooks(model, batches, args, kwargs)
    seen, unscaled = looks.look(jnp.arange(looks.num_chunks))
    if is_traced((seen, unscaled)):
        return  # the model closes over values of a transformation, which are not known
    for name, found in seen.items():
        if found.num_bad.any():
            _refuse_labels(name, looks, found.num_bad)
        if name in looks.row_ids:
            _check_row_ids(name, looks.row_ids[name], found, batches)
    suspects = [name for name, is_wrong in unscaled.items() if is_wrong.all()]
    _refuse_what_is_of_the_batch(suspects, looks.sites, 0, batches.size, batches.batch_size)


def check_scale(
    model: Callable[..., Any],
    batch: tuple[Any, ...],
    args: Any,
    kwargs: Any,
    sizes: tuple[int, int] | None,
) -> None:
    """Refuse likelihoods that are not scaled from one batch to all rows.

    ``sizes`` are the numbers of all rows and of those of a batch, whose arrays are all by row.
    If None, they are taken from a data plate that holds as many rows as some array of the batch;
    without one nothing is checked. What has no axis of so many rows, and is no factor of such an
    array, is then other data that comes with each batch.

    Cost: two runs of the model on the batch, of which nothing but scales is computed.
    """
    leaves, form = jax.tree.flatten(batch)
    lengths = {np.shape(leaf)[0] for leaf in leaves if np.ndim(leaf)}
    seen: list[tuple[int, int] | None] = []

    def sites_with(leaves: dict[int, Any]) -> Sites:
        batch = jax.tree.unflatten(form, [leaves[i] for i in range(len(leaves))])
        return sites_of(model, (*args, *batch), kwargs, touched=TouchedRows())

    def unscaled(leaves: dict[int, Any]) -> dict[str, Array]:
        sites = sites_with(leaves)
        known = plate_of_batch(sites, lengths) if sizes is None else sizes
        seen[:] = [known]
        if known is None or known[0] == known[1]:
            return {}
        found = unscaled_sites(sites, known[1])
        if sizes is not None:
            return found
        return {
            name: is_wrong
            for name, is_wrong in found.items()
            if log_factor(sites[name]) is not None or known[1] in np.shape(sites[name]["value"])
        }

    every = dict(enumerate(leaves))
    found = compiled(unscaled)(every)
    suspects = [name for name, is_wrong in found.items() if is_wrong]
    if seen[0] is not None:
        by_row = {i: x for i, x in every.items() if np.shape(x)[:1] == (seen[0][1],)}
        _refuse_what_is_of_the_batch(suspects, lambda x: sites_with(every | x), by_row, *seen[0])


def _refuse_what_is_of_the_batch(
    suspects: list[str], sites: Callable[[Any], Sites], batch: Any, size: int, batch_size: int
) -> None:
    """Refuse those of the suspects that observe what follows from the batch."""
    found: Sites = {}

    def observed(batch: Any) -> list[Array]:
        found.update(sites(batch))
        return [observed_of(found[name]) for name in suspects]

    if not suspects:
        return
    for name, inputs in zip(suspects, eval_provenance(observed, batch=batch), strict=True):
        if inputs:  # it is not the same in each step
            refuse_unscaled(name, found[name], size, batch_size)


def _check_row_ids(name: str, ids: Labels, seen: _SeenLabels, batches: ArrayBatches) -> None:
    """Refuse a plate with another number of rows than ``batches``, or ids that must not repeat."""
    if seen.are_rows.all():
        if ids.size > batches.size:
            scale = f"{ids.size} / {batches.batch_size}"
            raise ValueError(
                f"{name} are those of `batches`, so the size of the plate must be {batches.size}; "
                f"got {ids.size}, which would scale the likelihood by {scale}."
            )
    elif ids.latent is not None:
        refuse_repeated_rows(ids.plate, ids.latent, seen.unlike.ravel()[: batches.size])


def _refuse_labels(name: str, looks: RowLooks, num_bad: Array) -> None:
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
    bad, need = (values < 0) | (values >= size), f"{found.meaning}, integers in [0, {size})"
    fix = found.fix
    if name in looks.row_ids and num_rows > size:
        fix = f"`batches` has {num_rows} rows, so that must be the size of the plate."
    text = describe_bad(name, values, bad, need, total, num_all, start=start, fix=fix)
    raise BadDataError(text)
