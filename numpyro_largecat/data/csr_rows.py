# SPDX-License-Identifier: Apache-2.0
"""Rows of a sparse matrix that are padded as they are read."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from numpyro_largecat._checks import describe


class CsrRows:
    r"""Two sources for ``lc.StreamedBatches`` that read the rows of a sparse matrix.

    .. math:: x_{nd} = \sum_p \mathrm{values}_{np}\,[\mathrm{indices}_{np} = d]

    Rows are padded to the longest, with value 0 at index 0, in the batches alone. In a batch they
    make ``lc.SparseRows(indices, values, x.shape[1])``.

    Cost: O(1) memory, the three arrays of the matrix are not copied and may be memory maps; O(B P)
    for a batch, with the longest row P.

    Args:
        x: A ``scipy.sparse`` array in CSR form, shape (N, D). From memory maps, make it by
            ``scipy.sparse.csr_array((data, indices, indptr), shape=..., copy=False)``.

    Attributes:
        indices: Rows of features in [0, D), shape (N, P) as batches see it.
        values: Rows of values, likewise.

    Raises:
        TypeError: If ``x`` is no sparse array in CSR form.
        ValueError: If its ``indptr`` does not ascend; and where a batch is read, if a feature is
            out of range.

    Example:
        >>> import numpy as np, scipy.sparse
        >>> import numpyro_largecat as lc
        >>> x = scipy.sparse.csr_array([[0.0, 2.0, 0.0], [1.0, 0.0, 3.0], [0.0, 0.0, 0.0]])
        >>> rows = lc.data.CsrRows(x)
        >>> batches = lc.StreamedBatches(rows.indices, rows.values, np.arange(3), batch_size=2)
        >>> indices, values, y, ids = batches.batch(0)
        >>> dense = np.zeros((2, 3))
        >>> np.add.at(dense, (np.arange(2)[:, None], np.asarray(indices)), np.asarray(values))
        >>> bool((dense == x.toarray()[ids]).all())
        True
    """

    def __init__(self, x: Any) -> None:
        if getattr(x, "format", None) != "csr" or len(x.shape) != 2:
            raise TypeError(
                f"`x` must be a matrix of scipy.sparse in CSR form; got {describe(x)}. Convert it "
                "with `scipy.sparse.csr_array(x)`."
            )
        lengths = np.diff(x.indptr.astype(np.int64, copy=False))
        if x.indptr[0] != 0 or x.indptr[-1] > len(x.indices) or (lengths < 0).any():
            raise ValueError(
                f"`x.indptr` must ascend from 0 to at most the {len(x.indices)} entries; got "
                f"{describe(x.indptr)} from {x.indptr[0]} to {x.indptr[-1]}."
            )
        longest = int(lengths.max(initial=0))
        self.indices = _PaddedPart(x.indices, x.indptr, longest, x.shape[1])
        self.values = _PaddedPart(x.data, x.indptr, longest)


class _PaddedPart:
    """One of the arrays of a sparse matrix, by rows."""

    takes_rows = True  # by an array of numbers

    def __init__(
        self, part: NDArray[Any], starts: NDArray[Any], longest: int, num_features: int = 0
    ) -> None:
        self.part, self.starts, self.longest = part, starts, max(longest, 1)
        self.num_features = num_features  # of indices

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, rows: NDArray[Any]) -> NDArray[Any]:
        first, end = self.starts[rows], self.starts[rows + 1]
        places = np.arange(self.longest) + first[:, None]
        held = places < end[:, None]
        padded = np.zeros(held.shape, self.part.dtype)
        padded[held] = self.part[places[held]]
        bad = (padded < 0) | (padded >= self.num_features)
        if self.num_features and bad.any():
            row, place = (int(i) for i in np.argwhere(bad)[0])
            raise ValueError(
                f"indices of `x` must be features in [0, {self.num_features}); got "
                f"{padded[row, place]} in row {int(rows[row])}."
            )
        return padded
