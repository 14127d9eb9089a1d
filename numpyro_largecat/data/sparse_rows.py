# SPDX-License-Identifier: Apache-2.0
"""Rows of sparse features in arrays of fixed shape."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike


class SparseRows(NamedTuple):
    r"""Features of N observations, of which at most P are not zero in each row.

    .. math:: x_{nd} = \sum_p \mathrm{values}_{np}\,[\mathrm{indices}_{np} = d]

    Rows with fewer entries are padded with value 0 at index 0.

    Example:
        >>> import scipy.sparse
        >>> import numpyro_largecat as lc
        >>> x = lc.SparseRows.from_scipy(scipy.sparse.csr_array([[0.0, 2.0, 0.0], [1.0, 0.0, 3.0]]))
        >>> x.indices.tolist(), x.values.tolist(), x.num_features
        ([[1, 0], [0, 2]], [[2.0, 0.0], [1.0, 3.0]], 3)
    """

    indices: ArrayLike  # (N, P), features in [0, num_features)
    values: ArrayLike  # (N, P)
    num_features: int  # D

    @classmethod
    def from_scipy(cls, x: Any) -> SparseRows:
        """Pad the rows of a ``scipy.sparse`` array; repeated entries add up.

        Cost: O(N P) with the longest row P. One row that is far longer than the others costs much.
        """
        x = x.tocsr(copy=True)
        x.sum_duplicates()
        counts = np.diff(x.indptr)
        row = np.repeat(np.arange(x.shape[0]), counts)
        place = np.arange(x.nnz) - x.indptr[row]
        shape = (x.shape[0], int(max(counts.max(initial=0), 1)))
        indices, values = np.zeros(shape, np.int32), np.zeros(shape, x.data.dtype)
        indices[row, place], values[row, place] = x.indices, x.data
        return cls(indices, values, x.shape[1])

    def utilities(self, w: Array) -> Array:
        """``x @ w.T`` for w of shape (K, D), shape (N, K), NaN in rows with an index out of range.

        Cost: O(N P K).
        """
        indices = jnp.asarray(self.indices)
        indices = jnp.where(indices < 0, self.num_features, indices)  # not from the end
        taken = jnp.take(w, indices, axis=1, mode="fill", fill_value=jnp.nan)  # (K, N, P)
        return jnp.einsum("knp,np->nk", taken, jnp.asarray(self.values))
