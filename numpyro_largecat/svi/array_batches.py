# SPDX-License-Identifier: Apache-2.0
"""Minibatches drawn from arrays inside the compiled loop."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from numpyro_largecat._checks import (
    check_count,
    check_integers,
    check_no_overflow,
    check_random_key,
    describe,
)
from numpyro_largecat._conversions import as_array
from numpyro_largecat.ops.shuffle import shuffled
from numpyro_largecat.svi.batch_order import orders_of, rows_of_step


@jax.tree_util.register_pytree_node_class
class ArrayBatches:
    """Minibatches of rows of arrays in memory, with their row ids.

    A batch is ``(array[rows], ..., rows)``: the arguments of a model such as ``model(x, y, rows)``
    whose data plate is ``lc.data_plate("data", N, rows)``.

    Batches are those of shuffled passes. In each pass, or epoch, all rows stand in a new random
    order, which is cut into batches of ``batch_size`` distinct rows. The last batch of a pass, if
    fewer rows are left for it, also holds some of the batch before: so a row comes once in a pass,
    or twice.
    Each batch, taken by itself, is drawn uniformly without replacement.

    **Which rows a batch holds follows from the seed and the number of the step alone** (and from
    JAX's setting ``jax_threefry_partitionable``). A run with ``init_state`` goes on in the order
    where the earlier run ended, and several processes can make the same batches without talking to
    each other. The key of a run has no part in it: runs whose spread is to show that of the batches
    too need a seed each.

    Cost: O(batch) per draw; no order is kept. The arrays are put on the default device once.

    Args:
        *arrays: Arrays of numbers with N rows each, shapes (N, ...), or what NumPy makes into
            arrays: a data frame gives shape (N, columns), a series (N,).
        batch_size: Rows B of a batch, a Python int in [1, N].
        seed: Seed of the orders, a Python int in [0, 2**31).

    Raises:
        TypeError: If an array holds anything but numbers, or ``batch_size`` is not a Python int.
        ValueError: If there is no array, the arrays differ in their number of rows, or
            ``batch_size`` is larger than it.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_largecat as lc
        >>> batches = lc.ArrayBatches(jnp.arange(10.0), jnp.arange(10), batch_size=3)
        >>> x, y, rows = batches.batch(0)
        >>> x.shape, bool((y == rows).all())
        ((3,), True)

        Its length is the number of batches of a pass, so that ``3 * len(batches)`` steps are three:

        >>> len(batches)
        4
        >>> of_pass = [batches.batch(step)[1] for step in range(4)]
        >>> sorted(set(jnp.concatenate(of_pass).tolist())) == list(range(10))
        True
    """

    def __init__(self, *arrays: ArrayLike, batch_size: int, seed: int = 0) -> None:
        if not arrays:
            raise ValueError("ArrayBatches needs at least one array, such as x and y.")
        arrays = tuple(_of_numbers(i, array) for i, array in enumerate(arrays))
        shapes = [jnp.shape(a) for a in arrays]
        if any(len(s) == 0 or s[0] != shapes[0][0] for s in shapes):
            raise ValueError(
                f"the arrays must have the same number of rows on their first axis; got {shapes}."
            )
        check_no_overflow((f"array {i}", array) for i, array in enumerate(arrays))
        with jax.ensure_compile_time_eval():  # made inside of `jit`, it may be kept
            self.arrays = tuple(jnp.asarray(a) for a in arrays)
            self.orders = orders_of(seed)
        self.size = shapes[0][0]
        if self.size == 0:
            raise ValueError("ArrayBatches needs arrays with rows; these have none.")
        self.batch_size = check_count("batch_size", batch_size, 1, self.size, "number of rows")

    def __len__(self) -> int:
        """Number of batches in a pass, of which the last may hold rows of the one before."""
        return -(-self.size // self.batch_size)

    @jax.jit
    def take(self, rows: Array) -> tuple[Array, ...]:
        """Return the batch that holds ``rows``, shape (B,)."""
        return (*(array[rows] for array in self.arrays), rows)

    @jax.jit
    def batch(self, step: Array | int) -> tuple[Array, ...]:
        """Return the batch of a step, an integer that counts from 0."""
        check_integers("step", step)
        return self.take(rows_of_step(self.orders, step, self.size, self.batch_size))

    @jax.jit
    def draw(self, rng_key: Array) -> tuple[Array, ...]:
        """Draw a batch that has nothing to do with the passes."""
        check_random_key(rng_key)
        return self.take(shuffled(rng_key, jnp.arange(self.batch_size), self.size))

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[int, int]]:
        """Arrays are data, sizes are static."""
        return (self.arrays, self.orders), (self.size, self.batch_size)

    @classmethod
    def tree_unflatten(cls, sizes: tuple[int, int], arrays: Any) -> ArrayBatches:
        """Undo ``tree_flatten``."""
        batches = object.__new__(cls)
        batches.arrays, batches.orders = tuple(arrays[0]), arrays[1]
        batches.size, batches.batch_size = sizes
        return batches

    def __repr__(self) -> str:
        """Show shapes, not values."""
        shapes: Any = [tuple(a.shape) for a in self.arrays]
        return f"ArrayBatches({shapes}, batch_size={self.batch_size})"


def is_real(dtype: Any) -> bool:
    """Whether values are real numbers, or true and false."""
    return any(jnp.issubdtype(dtype, kind) for kind in (jnp.integer, jnp.floating, jnp.bool_))


def _of_numbers(position: int, array: Any) -> Any:
    """Return what NumPy makes of a frame, series or list; refuse what is not made of numbers."""
    if hasattr(array, "todense"):  # of scipy.sparse, or of JAX
        raise TypeError(
            f"array {position} is sparse; give StreamedBatches the two sources of "
            "`lc.data.CsrRows(x)` in its place, which make `lc.SparseRows` in the model."
        )
    if isinstance(array, tuple) and any(np.ndim(x) for x in array):
        raise TypeError(
            f"array {position} must be one array; got {describe(array)}. Give arrays one after "
            "the other, `lc.ArrayBatches(x, y, batch_size=...)`."
        )
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(
            f"array {position} is masked; give its values, `.filled(0)`, and the mask as another "
            "array, and leave entries out by it in the model."
        )
    try:
        array = as_array(array)
    except ValueError as error:  # from NumPy, of lists of different lengths
        raise ValueError(
            f"array {position} must have rows of one length; got {describe(array)}. Pad shorter "
            "ones, of ids by `lc.data.padded_lists`."
        ) from error
    if not is_real(array.dtype):
        raise TypeError(
            f"array {position} must hold real numbers; got dtype {array.dtype}. Convert it with "
            "`.astype`, or number its values with `np.unique(values, return_inverse=True)[1]`."
        )
    return array
