# SPDX-License-Identifier: Apache-2.0
"""Minibatches of data that are not in memory, read while steps run."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding
from numpy.typing import NDArray

from numpyro_largecat._checks import check_count, check_integers, describe
from numpyro_largecat.svi.array_batches import is_real
from numpyro_largecat.svi.batch_order import orders_of, rows_of_step

STACK_BYTES = 2**24  # of the batches that are read and moved to the device at once
MOST_IN_STACK = 100
NUM_AHEAD = 2  # stacks that are read before they are needed


class StreamedBatches:
    """Minibatches of rows that are read from disk, or from wherever they are, while steps run.

    They are **the batches of ``ArrayBatches``** with the same ``batch_size`` and ``seed``, bit by
    bit: shuffled passes, in which the rows of a batch follow from the seed and the number of the
    step alone. A run goes on from a checkpoint at the batch where it was, without reading those
    before. The arguments of the model are ``(source[rows], ..., rows)``, and as many for one source
    as the tuples have values which it gives for a row.

    A source is anything with a length and ``[]``:

    - an array, a memory map (``np.load(path, mmap_mode="r")``), an array of h5py or zarr, or
      ``lc.data.Shards`` of them: rows are read by ``source[rows]`` with ascending integers;
    - the two parts of an ``lc.data.CsrRows``, for a sparse matrix;
    - anything else, such as a dataset of your own: ``source[i]`` gives the i-th row, an array or a
      tuple of arrays.

    Numbers of 64 bits become those of 32, unless JAX is set to 64. Values are not checked before
    the fit, which would read all of the data: a row that is not finite, or a label out of range,
    ends the fit at its step, and the warning says what is wrong with the batch.

    Cost: some batches, of 16 MB together or one, are read at once by a thread in the background and
    put on the device; memory for three times that. Nothing of size N.

    Args:
        *sources: Sources of N rows each.
        batch_size: Rows B of a batch, a Python int in [1, N].
        seed: Seed of the orders, a Python int in [0, 2**31).

    Raises:
        TypeError: If a source has no length or no ``[]``, or rows that are no numbers, such as
            dicts.
        ValueError: If the sources differ in their number of rows, or ``batch_size`` is larger.

    Example:
        >>> import tempfile
        >>> import numpy as np
        >>> import numpyro_largecat as lc
        >>> path = tempfile.mkdtemp() + "/x.npy"
        >>> np.save(path, np.arange(20.0).reshape(10, 2))
        >>> x, y = np.load(path, mmap_mode="r"), np.arange(10)
        >>> batches = lc.StreamedBatches(x, y, batch_size=4)
        >>> [array.shape for array in batches.batch(0)]
        [(4, 2), (4,), (4,)]
        >>> of_arrays = lc.ArrayBatches(x, y, batch_size=4)
        >>> all(bool((batches.batch(t)[0] == of_arrays.batch(t)[0]).all()) for t in range(7))
        True
        >>> len(batches)  # of a pass
        3
    """

    def __init__(self, *sources: Any, batch_size: int, seed: int = 0) -> None:
        if not sources:
            raise ValueError("StreamedBatches needs at least one source, such as x and y.")
        self.sources = tuple(_source(i, source) for i, source in enumerate(sources))
        sizes = [_length(source) or 0 for source in self.sources]
        if len(set(sizes)) > 1:
            raise ValueError(f"the sources must have the same number of rows; got {sizes}.")
        self.size = sizes[0]
        self.batch_size = check_count("batch_size", batch_size, 1, self.size, "number of rows")
        self.orders = orders_of(seed)
        first = self._read(np.zeros(1, np.int64))
        for i, row in enumerate(first):
            if not is_real(row.dtype):
                raise TypeError(f"array {i} of a batch must hold real numbers; got {row.dtype}.")
        self._dtypes = [row.dtype for row in first]
        row_bytes = sum(row.nbytes for row in first)
        in_stack = STACK_BYTES // max(1, self.batch_size * row_bytes)
        self.num_in_stack = max(1, min(MOST_IN_STACK, in_stack))

    def __len__(self) -> int:
        """Number of batches in a pass, of which the last may hold rows of the one before."""
        return -(-self.size // self.batch_size)

    def batch(self, step: int) -> tuple[Array, ...]:
        """Return the batch of a step, an integer that counts from 0."""
        check_integers("step", step)
        return self._stack(int(step), 1, 1, None).batch(step)

    def stacks(
        self, first_step: int, num_steps: int, where: NamedSharding | None = None
    ) -> Generator[BatchStack, None, None]:
        """The batches of some steps, a stack at a time; read ahead in a thread.

        What reading raises is raised when its batches are asked for. Close the iterator to end the
        thread; what it is reading is read to its end, but not waited for.

        Args:
            first_step: The first of the steps.
            num_steps: Their number.
            where: How the rows of a stack, on its second axis, are spread over devices. A process
                reads those of its own devices alone.
        """
        # A thread has JAX's settings of the process, not those of a `with` block.
        enabled = jnp.result_type(float) == jnp.float64

        def read(step: int) -> BatchStack:
            with jax.enable_x64(enabled):
                return self._stack(step, self.num_in_stack, first_step + num_steps - step, where)

        thread, ahead = ThreadPoolExecutor(1, "batches"), deque[Any]()
        try:
            for step in range(first_step, first_step + num_steps, self.num_in_stack):
                ahead.append(thread.submit(read, step))
                if len(ahead) > NUM_AHEAD:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
        finally:
            thread.shutdown(wait=all(future.done() for future in ahead), cancel_futures=True)

    def _stack(
        self, step: int, num_batches: int, num_read: int, where: NamedSharding | None
    ) -> BatchStack:
        """Batches from a step on, of which the first so many are read and the others are 0.

        All stacks have one shape, for which the steps are compiled.
        """
        rows = np.asarray(self._rows(step, num_batches))
        here = _columns_here(rows.shape, where)
        arrays = []
        for part in self._checked(rows[:num_read, here].ravel()):
            array = np.zeros((*rows.shape, *part.shape[1:]), part.dtype)
            array[:num_read, here] = part.reshape(-1, len(here), *array.shape[2:])
            arrays.append(_placed(array, where))
        return BatchStack((*arrays, _placed(rows, where)), jnp.asarray(step, jnp.int32))

    def _rows(self, step: int, num_batches: int) -> Array:
        return _rows_of_steps(self.orders, step, num_batches, self.size, self.batch_size)

    def _read(self, rows: NDArray[Any]) -> list[NDArray[Any]]:
        """Rows of each source, read in ascending order."""
        ascending, places = np.unique(rows, return_inverse=True)
        found = [source[ascending] for source in self.sources]
        arrays = chain.from_iterable(x if isinstance(x, tuple) else (x,) for x in found)
        return [np.asarray(array)[places] for array in arrays]

    def _checked(self, rows: NDArray[Any]) -> list[NDArray[Any]]:
        """Rows of each source, of the type that its first row has."""
        found = self._read(rows)
        for i, (array, dtype) in enumerate(zip(found, self._dtypes, strict=True)):
            if array.dtype != dtype:
                raise TypeError(
                    f"array {i} of a batch must have rows of one dtype; row 0 has {dtype}, and "
                    f"some of rows {rows.min()} to {rows.max()} {array.dtype}."
                )
        return found

    def __repr__(self) -> str:
        """Show sizes, not values."""
        return (
            f"StreamedBatches({len(self.sources)} sources of {self.size} rows, "
            f"batch_size={self.batch_size})"
        )


@jax.tree_util.register_pytree_node_class
class BatchStack:
    """The batches of consecutive steps, for a compiled loop."""

    def __init__(self, arrays: tuple[Array, ...], first_step: Array) -> None:
        self.arrays, self.first_step = arrays, first_step

    def batch(self, step: Array | int) -> tuple[Array, ...]:
        """Return the batch of a step that is here."""
        place = jnp.asarray(step) - self.first_step
        return tuple(array[place] for array in self.arrays)

    def tree_flatten(self) -> tuple[Any, None]:
        """All is data."""
        return (self.arrays, self.first_step), None

    @classmethod
    def tree_unflatten(cls, _: None, children: Any) -> BatchStack:
        """Undo ``tree_flatten``."""
        return cls(*children)


@partial(jax.jit, static_argnums=(2, 3, 4))
def _rows_of_steps(orders: Array, step: int, num_batches: int, size: int, batch_size: int) -> Array:
    """Rows of consecutive batches, (num_batches, batch_size)."""
    steps = jnp.asarray(step) + jnp.arange(num_batches)
    return jax.vmap(lambda t: rows_of_step(orders, t, size, batch_size))(steps)


def _columns_here(shape: tuple[int, ...], where: NamedSharding | None) -> NDArray[Any]:
    """The rows of batches, on the second axis, that the devices of this process hold."""
    columns = np.arange(shape[1])
    if where is None:
        return columns
    held = where.addressable_devices_indices_map(shape).values()
    return np.unique(np.concatenate([columns[index[1]] for index in held if index is not None]))


def _placed(array: NDArray[Any], where: NamedSharding | None) -> Array:
    if where is None:
        return jnp.asarray(array)
    dtype = jnp.asarray(array[:0]).dtype  # of 32 bits, unless JAX is set to 64
    return jax.make_array_from_callback(
        array.shape, where, lambda index: array[index].astype(dtype)
    )


class _ItemByItem:
    """A source whose ``[]`` takes one integer, and may give a tuple of arrays."""

    def __init__(self, source: Any, position: int) -> None:
        self._source, self._position = source, position

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, rows: NDArray[Any]) -> NDArray[Any] | tuple[NDArray[Any], ...]:
        found = [self._source[int(row)] for row in rows]
        if isinstance(found[0], Mapping):
            raise TypeError(
                f"source {self._position} must give arrays or tuples of arrays, the arguments of "
                f"the model in their order; its rows are dicts of {sorted(found[0])}. Map them, as "
                "by `lambda row: (row['x'], row['y'])`."
            )
        if isinstance(found[0], tuple):
            return tuple(map(_stacked, zip(*found, strict=True)))
        return _stacked(found)


def _stacked(rows: Iterable[Any]) -> NDArray[Any]:
    return np.stack([np.asarray(row) for row in rows])


def _length(source: Any) -> int | None:
    """Number of rows; None if there are none to be counted."""
    shape = getattr(source, "shape", None)
    if shape:  # arrays of zarr have no `len`
        return int(shape[0])
    return len(source) if hasattr(source, "__len__") and shape is None else None


def _source(position: int, source: Any) -> Any:
    """A source whose ``[]`` takes ascending integers.

    Raises:
        TypeError: If it has no length or no rows.
    """
    if hasattr(source, "tocsr"):
        raise TypeError(
            f"source {position} must not be sparse; got {describe(source)}. Pass the two "
            "sources of `rows = lc.data.CsrRows(source)`: `rows.indices` and `rows.values`."
        )
    if hasattr(source, "iloc"):  # a frame, whose own indices are names and not places
        return np.asarray(source)
    size = _length(source)
    if size is None or not hasattr(source, "__getitem__") or isinstance(source, (dict, str)):
        raise TypeError(
            f"source {position} must have a length and rows by number, such as an array, a memory "
            f"map or a dataset; got {describe(source)}."
        )
    if size == 0:
        raise ValueError(f"source {position} must have a row; it is empty.")
    takes_rows = hasattr(source, "shape") or getattr(source, "takes_rows", False)
    return source if takes_rows else _ItemByItem(source, position)
