# SPDX-License-Identifier: Apache-2.0
"""Batches of rows that are read again in each pass, and a first look at all of them."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh
from scipy.sparse import issparse

from numpyro_largecat._checks import check_count, check_shape, describe, is_concrete, not_finite
from numpyro_largecat.mixtures.conjugate_family import ConjugateFamily
from numpyro_largecat.ops.rows_by_device import num_devices, over_all_devices

ROWS_TO_CHECK = 2**14  # of an array, read at once
STACK = " The items of `x` are taken as batches; if they are rows, stack them: `np.stack(x)`."


def as_rows(data: Any) -> Any:
    """Frames and series as arrays, since their own indices are names and not places.

    Arrays stay as they are, memory maps too; what is no array is left for ``RowStream``.

    Raises:
        ValueError: If an entry is masked, since what is under the mask would be taken for data.
        TypeError: If they are sparse.
    """
    if issparse(data):
        raise TypeError(
            f"rows must be dense; got a sparse array of shape {data.shape}. Give `x.toarray()`, or "
            "batches of it that fit in memory, `[x[i : i + 1000].toarray() for i in ...]`."
        )
    if np.ma.is_masked(data):
        count = int(np.ma.getmaskarray(data).sum())
        raise ValueError(
            f"rows must have no masked entries; got {count} of {data.size}. Fill them in, or leave "
            "such rows out."
        )
    is_array = hasattr(data, "shape") and hasattr(data, "dtype") and not hasattr(data, "iloc")
    return np.asarray(data) if hasattr(data, "__array__") and not is_array else data


class RowStream:
    """Batches of an array, or of a source that gives the same batches again and again.

    An array is cut at random into batches of equal size, give or take one row, which stay as they
    are. A source is an iterable that can be iterated again, or a function that returns an iterator.
    """

    def __init__(self, data: Any, batch_size: int | None, rng: np.random.Generator) -> None:
        data = as_rows(data)
        self.source: Callable[[], Iterable[Any]] | None = None
        self.parts: list[Any] = [slice(None)]
        self.array = data
        if hasattr(data, "shape") and hasattr(data, "dtype"):
            if batch_size is not None:
                check_count("batch_size", batch_size, 1)
            if np.ndim(data) == 0 or len(data) == 0:
                raise ValueError(f"`x` must hold at least one row; got shape {np.shape(data)}.")
            if batch_size is not None and batch_size < len(data):
                order = rng.permutation(len(data))
                num_batches = -(-len(data) // batch_size)
                self.parts = [np.sort(part) for part in np.array_split(order, num_batches)]
            return
        if batch_size is not None:
            raise ValueError(
                f"`batch_size` is for an array, and {type(data).__name__} gives its own batches; "
                f"got {batch_size}."
            )
        self.source = data if callable(data) else lambda: data
        if not callable(data) and (not hasattr(data, "__iter__") or iter(data) is data):
            raise TypeError(
                "`x` must be an array, an iterable that gives the batches again in each pass, such "
                f"as a list, or a function that returns an iterator; got {describe(data)}."
            )

    def pieces(self) -> Iterator[tuple[str, int, Any]]:
        """All rows once, in order: what they are called, the number of the first, and the rows."""
        if self.source is None:
            for start in range(0, len(self.array), ROWS_TO_CHECK):
                yield "`x`", start, self.array[start : start + ROWS_TO_CHECK]
            return
        for b, batch in enumerate(self.source()):
            yield f"batch {b} of `x`", 0, batch

    def batches(self, rng: np.random.Generator | None = None) -> Iterator[tuple[int, Any]]:
        """One pass, in order; batches of an array in random order if ``rng`` is given."""
        if self.source is not None:
            yield from enumerate(self.source())
            return
        order = np.arange(len(self.parts))
        for b in order if rng is None else rng.permutation(order):
            yield int(b), self.array[self.parts[b]]


class FirstLook(NamedTuple):
    """What is known of the data before the fit."""

    num_rows: int
    sizes: tuple[int, ...]  # rows of each batch
    dtype: np.dtype  # in which the local step computes
    sample: np.ndarray  # rows drawn without replacement
    marks: tuple[int, ...]  # checksums by which the batches of a source are known again


def look_at(
    stream: RowStream, family: ConjugateFamily, num_sampled: int, rng: np.random.Generator
) -> FirstLook:
    """Read all rows once, refuse bad ones, and draw some of them.

    Cost: one reading of the data; memory for one batch and the drawn rows.
    """
    lengths, sample, keys, dtype = [], None, np.zeros(0), None
    marks: list[int] = []
    for name, start, piece in stream.pieces():
        rows = np.asarray(as_rows(piece))
        hint = STACK if stream.source is not None and rows.ndim < 2 else ""
        _check_rows(name, start, rows, None if sample is None else sample.shape[1:], hint)
        _name_errors(name, start, family, rows, hint)
        lengths.append(len(rows))
        marks.append(mark_of(rows))
        dtype = rows.dtype if dtype is None else np.promote_types(dtype, rows.dtype)
        keys = np.concatenate([keys, rng.random(len(rows))])
        sample = rows if sample is None else np.concatenate([sample, rows])
        kept = np.argpartition(keys, num_sampled)[:num_sampled] if len(keys) > num_sampled else ...
        keys, sample = keys[kept], sample[kept]
    if sample is None or dtype is None:
        raise ValueError("`x` gave no batch.")
    order = np.argsort(keys)
    sizes = lengths if stream.source is not None else [len(p) for p in _parts_of(stream)]
    computed = jax.dtypes.canonicalize_dtype(np.promote_types(dtype, np.float32))
    seen = tuple(marks) if stream.source is not None else ()
    return FirstLook(sum(lengths), tuple(sizes), np.dtype(computed), sample[order], seen)


def mark_of(rows: Any) -> int:
    """A checksum of the first and the last row: batches of rows in another order have others."""
    ends = np.asarray(rows[:: max(len(rows) - 1, 1)])
    return zlib.crc32(np.ascontiguousarray(ends).tobytes())


def _parts_of(stream: RowStream) -> list[Any]:
    return [range(len(stream.array)) if isinstance(p, slice) else p for p in stream.parts]


def _check_rows(
    name: str, start: int, rows: np.ndarray, shape: tuple[int, ...] | None, hint: str
) -> None:
    if rows.ndim == 0 or rows.shape[0] == 0:
        raise ValueError(f"{name} must hold at least one row; got shape {rows.shape}.{hint}")
    if not (np.issubdtype(rows.dtype, np.number) and np.isrealobj(rows)):
        raise TypeError(f"{name} must hold real numbers; got dtype {rows.dtype}.")
    if shape is not None:
        check_shape(name, rows, ("B", *shape), "rows like those before")
    bad = not_finite(rows)
    if bad.any():
        row, *column = (int(i) for i in np.unravel_index(int(np.argmax(bad)), rows.shape))
        where = f"row {start + row}" + (f", column {', '.join(map(str, column))}" if column else "")
        value = rows[(row, *column)]
        fix = "In float32 it is not: enable 64 bits" if np.isfinite(value) else "Leave it out"
        raise ValueError(f"{name} must be finite; got {value} at {where}. {fix}.")


def _name_errors(
    name: str, start: int, family: ConjugateFamily, rows: np.ndarray, hint: str
) -> None:
    """Let the family check rows, and say where they are if it refuses them."""
    try:
        family.check_rows(rows)
    except ValueError as error:
        raise ValueError(f"{name}, from row {start} on: {error}{hint}") from None


def padded(
    rows: Any,
    dtype: np.dtype,
    chunk: int,
    mesh: Mesh | None = None,
    offset: np.ndarray | None = None,
) -> tuple[Array, Array]:
    """Rows less ``offset`` on the devices, a multiple of ``chunk`` on each, and which are rows.

    What fills them up are copies of the last row: their features are finite, whatever the family.
    """
    x = _less(rows, offset, dtype) if mesh is None else np.asarray(_less(rows, offset, dtype))
    missing = -x.shape[0] % (chunk * num_devices(mesh))
    is_row = (np.arange(x.shape[0] + missing) < x.shape[0]).astype(dtype)
    padding = [(0, missing)] + [(0, 0)] * (x.ndim - 1)
    if missing:
        pad = jnp.pad if isinstance(x, jax.Array) else np.pad  # JAX compiles it for each shape
        x = pad(x, padding, mode="edge")
    if mesh is None:
        return jnp.asarray(x), jnp.asarray(is_row)
    return jax.device_put((x, is_row), over_all_devices(mesh))


def _less(rows: Any, offset: np.ndarray | None, dtype: np.dtype) -> Any:
    """Rows less ``offset`` in ``dtype``, rounded after it is gone where ``dtype`` is narrower."""
    if not isinstance(rows, jax.Array):
        rows = np.asarray(rows)
    elif offset is not None and is_concrete(rows) and not np.can_cast(rows.dtype, dtype):
        rows = np.asarray(rows)
    return (rows if offset is None else rows - offset).astype(dtype, copy=False)
