# SPDX-License-Identifier: Apache-2.0
"""Rows of a sparse matrix, in memory or on disk, are those of the dense one."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse

import numpyro_largecat as lc
from numpyro_largecat.data import CsrRows

DENSE = np.random.default_rng(0).standard_normal((9, 5))
X = scipy.sparse.csr_array(np.where(DENSE > 0.5, DENSE, 0))


def on_disk(x, path):
    """The matrix with its parts in memory maps."""
    parts = []
    for name in ("data", "indices", "indptr"):
        np.save(path / f"{name}.npy", getattr(x, name))
        parts.append(np.load(path / f"{name}.npy", mmap_mode="r"))
    return scipy.sparse.csr_array(tuple(parts), shape=x.shape, copy=False)


@pytest.mark.parametrize("rows", [[], [3], [0, 2, 8], list(range(9))])
@pytest.mark.parametrize("place", [lambda x, path: x, on_disk])
def test_rows_are_those_of_the_dense_matrix(rows, place, tmp_path) -> None:
    of, rows = CsrRows(place(X, tmp_path)), np.array(rows, int)
    dense = np.zeros((len(rows), 5))
    np.add.at(dense, (np.arange(len(rows))[:, None], of.indices[rows]), of.values[rows])
    np.testing.assert_array_equal(dense, X.toarray()[rows])
    assert len(of.indices) == len(of.values) == 9


def test_batches_make_the_utilities_of_the_whole() -> None:
    w = np.random.default_rng(1).standard_normal((4, 5)).astype(np.float32)
    of = CsrRows(X.astype(np.float32))
    indices, values, rows = lc.StreamedBatches(of.indices, of.values, batch_size=4).batch(1)
    found = lc.SparseRows(indices, values, 5).utilities(w)
    np.testing.assert_allclose(found, (X @ w.T)[np.asarray(rows)], rtol=1e-5, atol=1e-6)


def test_a_matrix_without_entries_has_rows_of_zeros() -> None:
    of = CsrRows(scipy.sparse.csr_array((3, 5)))
    np.testing.assert_array_equal(of.values[np.arange(3)], np.zeros((3, 1)))


@pytest.mark.parametrize("index", [-1, 5])
def test_features_out_of_range_are_refused_where_they_are_read(index) -> None:
    indices = np.array([0, 1, index, 2])
    x = scipy.sparse.csr_array((np.ones(4), indices, [0, 1, 3, 4]), shape=(3, 5))
    batches = lc.StreamedBatches(CsrRows(x).indices, batch_size=3)
    with pytest.raises(ValueError, match=rf"in \[0, 5\); got {index} in row 1"):
        batches.batch(0)
    rows = lc.SparseRows(np.array([[0, 1], [index, 2]]), np.ones((2, 2)), 5)
    found = rows.utilities(jnp.ones((4, 5)))
    assert jnp.isnan(found[1]).all() and (found[0] == 2).all()


def test_rows_that_do_not_ascend_are_refused() -> None:
    x = scipy.sparse.csr_array((np.ones(3), np.arange(3), [0, 3, 3]), shape=(2, 3))
    x.indptr[:] = 0, 3, 1
    with pytest.raises(ValueError, match=r"`x.indptr` must ascend from 0 to at most the 3 entries"):
        CsrRows(x)


@pytest.mark.parametrize("x", [np.ones((2, 3)), X.tocsc(), [1, 2]])
def test_what_is_not_in_csr_form_is_refused(x) -> None:
    with pytest.raises(TypeError, match=r"CSR form; got .*Convert it"):
        CsrRows(x)
