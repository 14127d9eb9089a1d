# SPDX-License-Identifier: Apache-2.0
"""Rows of features of a linear model, dense or sparse, in the form that a step reads."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from numpyro_largecat._checks import (
    check_count,
    check_finite,
    check_in_range,
    check_integers,
    check_shape,
)
from numpyro_largecat._conversions import as_ids
from numpyro_largecat.data.sparse_rows import SparseRows


class FeatureRows(Protocol):
    """Rows of x, in one of two forms."""

    def take(self, i: Array) -> FeatureRows:
        """Row i."""

    def product(self, w: Array, k: Array) -> Array:
        """``x @ w[k]`` for one row x."""

    def add(self, w: Array, k: Array, keep: Array | None, add: Array) -> Array:
        """Table with ``keep * w[k] + add * x`` in row k, for one row x."""

    def utilities(self, w: Array) -> Array:
        """``x @ w.T``."""

    def squared_norms(self) -> Array:
        """Of each row."""

    def take_batches(self, ids: Array) -> FeatureRows:
        """Rows ``ids``, of shape (J, B); zeros for padding."""

    def dense(self, num_features: int) -> Array:
        """All features of each row."""


class DenseRows(NamedTuple):
    """All features of each row."""

    x: Array  # (N, D), or (D,) for one row

    def take(self, i: Array) -> DenseRows:
        """Row i."""
        return DenseRows(take_one(self.x, i))

    def product(self, w: Array, k: Array) -> Array:
        """``x @ w[k]`` for one row x."""
        return self.x @ take_one(w, k)

    def add(self, w: Array, k: Array, keep: Array | None, add: Array) -> Array:
        """Table with ``keep * w[k] + add * x`` in row k, for one row x."""
        if keep is not None:
            w = lax.dynamic_update_index_in_dim(w, keep * take_one(w, k), k, 0)
        return w.at[k].add(add * self.x, mode="promise_in_bounds")

    def utilities(self, w: Array) -> Array:
        """``x @ w.T``."""
        return self.x @ w.T

    def squared_norms(self) -> Array:
        """Of each row."""
        return jnp.square(self.x).sum(1)

    def take_batches(self, ids: Array) -> DenseRows:
        """Rows ``ids``, of shape (J, B); zeros for padding."""
        return DenseRows(_rows_or_zeros(self.x, ids))

    def dense(self, num_features: int) -> Array:
        """All features of each row."""
        del num_features
        return self.x


class PaddedRows(NamedTuple):
    """The features that are present in each row, each once, padded with value 0."""

    indices: Array  # (N, P), or (P,) for one row
    values: Array

    def take(self, i: Array) -> PaddedRows:
        """Row i."""
        return PaddedRows(take_one(self.indices, i), take_one(self.values, i))

    def product(self, w: Array, k: Array) -> Array:
        """``x @ w[k]`` for one row x."""
        return self.values @ w.at[k, self.indices].get(mode="promise_in_bounds")

    def add(self, w: Array, k: Array, keep: Array | None, add: Array) -> Array:
        """Table with ``keep * w[k] + add * x`` in row k, for one row x."""
        if keep is not None:
            w = lax.dynamic_update_index_in_dim(w, keep * take_one(w, k), k, 0)
        return w.at[k, self.indices].add(add * self.values, mode="promise_in_bounds")

    def utilities(self, w: Array) -> Array:
        """``x @ w.T``."""
        return SparseRows(self.indices, self.values, w.shape[1]).utilities(w)

    def squared_norms(self) -> Array:
        """Of each row."""
        return jnp.square(self.values).sum(1)

    def take_batches(self, ids: Array) -> PaddedRows:
        """Rows ``ids``, of shape (J, B); zeros for padding."""
        return PaddedRows(_rows_or_zeros(self.indices, ids), _rows_or_zeros(self.values, ids))

    def dense(self, num_features: int) -> Array:
        """All features of each row."""
        empty = jnp.zeros((len(self.values), num_features), self.values.dtype)
        return empty.at[jnp.arange(len(self.values))[:, None], self.indices].add(self.values)


def take_one(table: Array, i: Array) -> Array:
    """Row i of a table."""
    return lax.dynamic_index_in_dim(table, i, 0, keepdims=False)


def _rows_or_zeros(table: Array, ids: Array) -> Array:
    return table.at[ids].get(mode="fill", fill_value=0)


def dense_rows(x: Any) -> DenseRows:
    """Check features given as a dense array."""
    return DenseRows(_as_floats("x", x))


def padded_rows(x: SparseRows) -> PaddedRows:
    """Check features given as sparse rows."""
    check_integers("x.indices", x.indices)
    check_shape("`x.values`", x.values, np.shape(x.indices), "as `x.indices`")
    check_in_range("`x.indices`", x.indices, x.num_features, "columns of x")
    indices = jnp.asarray(x.indices, jnp.int32)
    return PaddedRows(*_add_repeats(indices, _as_floats("x.values", x.values)))


@jax.jit
def _add_repeats(indices: Array, values: Array) -> tuple[Array, Array]:
    """Put the sum of the values of a repeated index at its first place, and 0 at the others.

    The norm of a row is that of its values only if no feature is there twice.
    """
    order = jnp.argsort(indices, axis=1)
    in_order = jnp.take_along_axis(indices, order, axis=1)
    is_first = jnp.diff(in_order, axis=1, prepend=-1) != 0
    place = jnp.cumsum(is_first, axis=1) - 1
    row = jnp.arange(len(values))[:, None]
    sums = jnp.zeros_like(values).at[row, place].add(jnp.take_along_axis(values, order, axis=1))
    return in_order, jnp.where(is_first, jnp.take_along_axis(sums, place, axis=1), 0)


def _as_floats(name: str, values: Any) -> Array:
    check_shape(f"`{name}`", values, ("N", "D"), "a row for each observation", least=1)
    floats = jnp.asarray(values)
    if not jnp.issubdtype(floats.dtype, jnp.floating):
        floats = floats.astype(jnp.result_type(float))
    check_finite([(f"`{name}`", floats)])
    return floats


def check_data(x: Any, y: Any, num_categories: Any) -> tuple[FeatureRows, int, Array]:
    """Rows of x, the number of its features, and labels as int32, or raise."""
    check_count("num_categories", num_categories, 2)
    features: FeatureRows
    if isinstance(x, SparseRows):
        features, num_features = padded_rows(x), x.num_features
        num_rows = len(features.values)
    else:
        if callable(x):
            raise TypeError(
                "`x` must be an array or SparseRows; got a function. For a network use "
                "`lc.SubsampledSVI`, with the same rule as `update_rule=` of `lc.sample_choice`."
            )
        if hasattr(x, "tocsr"):
            raise TypeError("`x` must be dense or SparseRows; use `lc.SparseRows.from_scipy(x)`.")
        features = dense_rows(x)
        num_rows, num_features = features.x.shape
    check_integers("y", y)
    check_shape("`y`", y, (num_rows,), "a label for each row of `x`")
    check_in_range("`y`", y, num_categories, "labels")
    return features, num_features, as_ids(y)
