# SPDX-License-Identifier: Apache-2.0
"""The classes that exist this step, and ways to make such a subset."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from numpyro_largecat._checks import (
    check_count,
    check_in_range,
    check_integers,
    check_kind,
    check_shape,
)
from numpyro_largecat.ops.subsampling import is_among, place_among, sorted_distinct
from numpyro_largecat.plates.rows_by_id import ReadRows, take_rows
from numpyro_largecat.plates.uniform_classes import DrawnClasses

_ROWS_FIRST = "the rows of the class plate first"


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("indices", "weights", "labels", "reads"),
    meta_fields=("num_categories", "kind", "per_observation", "name", "outer_name"),
)
@dataclass(frozen=True)
class ClassSubset:
    """The classes that exist this step, as ``with lc.class_plate(...) as classes`` gives them.

    Attributes:
        indices: Class of each row of the plate, shape (M,), integers in [0, K). Use it to gather
            features of the classes.
        weights: Weight of each class in the likelihood of an observation, on the last axis as in
            ``utilities``: shape (M,), or (1 + S,) with ``per_observation``, or without the rows
            that are only read. For any f, the sum of
            ``weights[m] * f(classes of an observation[m])`` estimates the sum of f over all K
            classes without bias. A padded row has weight 0.
        labels: The distinct labels, sorted, then padding equal to K, shape (min(B, K),), which are
            the first rows of the plate. With ``per_observation`` the labels as they were given.
            None for all classes, and for consecutive ones.
        num_categories: Number of classes K.
        kind: "full" for all K classes in order, "sample" for a weighted subset. Classes that stand
            for no others are "chunk" for those chosen by ``class_chunk``, and "labels" for the
            labels alone, as predictions read them.
        per_observation: Whether each observation has classes of its own: rows n (1 + S) to
            (n + 1) (1 + S) of the plate are those of observation n, its label first.
        name: Name of the plate.
        outer_name: Its name as handlers further out see it: ``numpyro.handlers.scope`` renames it.
        reads: What ``rows_of`` finds: the distinct ids of ``reads`` and where their rows are.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_largecat as lc
        >>> classes = lc.class_plate("classes", 5).classes
        >>> classes.kind, classes.indices.tolist()
        ('full', [0, 1, 2, 3, 4])
    """

    indices: Array
    weights: Array
    labels: Array | None
    num_categories: int
    kind: Literal["full", "sample", "chunk", "labels"]
    per_observation: bool = False
    name: str = ""
    reads: ReadRows | None = None
    outer_name: str = ""

    @property
    def is_part(self) -> bool:
        """Whether the classes stand for no others, so that sums over all classes are not known."""
        return self.kind in ("chunk", "labels")

    @property
    def row_weights(self) -> Array:
        """Weight of each row of the plate, shape (M,), as prior and KL terms have them.

        With ``per_observation`` the mean of the observations' estimates is the estimate.
        """
        if self.reads is not None:
            return self.reads.row_weights
        if not self.per_observation:
            return self.weights
        num_observations = self.indices.shape[0] // self.weights.shape[0]
        return jnp.tile(self.weights / num_observations, num_observations)

    def place(self, value: Array) -> Array:
        """Place of each class in ``value`` among the rows of the plate.

        With ``per_observation``, among the classes of its observation. Only for classes that
        ``holds`` is true of. Where all classes are there, a class is its own place.

        Cost: O(sqrt(B)) for each class.

        Raises:
            ValueError: If the plate holds consecutive classes, as predictions over it do.
            NotImplementedError: If a choice over the subset is inside of NumPyro's ``scan``.
        """
        if self.kind == "full":
            return jnp.asarray(value)
        if self.labels is None:
            raise ValueError(
                "`classes.place` has no answer while the plate holds consecutive classes, as that "
                "of a choice does in predictions. Tell the plate which classes are read by id, "
                "`lc.class_plate(..., reads=ids)`, and read `classes.rows_of(values, ids)`."
            )
        if self.per_observation:
            return jnp.zeros(jnp.shape(value), jnp.int32)
        _refuse_steps(self.labels)
        return place_among(value, self.labels)

    def holds(self, value: Array) -> Array:
        """Whether each class in ``value`` is among the labels, and so has a row of weight 1.

        With ``per_observation``, whether it is the label of its observation. Where the plate has no
        labels, whether the class is there.
        """
        if self.labels is None:
            return jnp.isin(value, self.indices)
        if self.per_observation:
            return self.labels == value
        _refuse_steps(self.labels)
        return is_among(value, self.labels)

    def rows_of(self, values: Array, ids: ArrayLike, axis: int = 0) -> Array:
        """The rows of ``values`` that belong to ``ids``, in training as in prediction.

        Where an id is -1 the row is 0.

        Shapes: (M, ...) and ids of any shape (...,) to (..., ...).

        Cost: O(size of the result), and O(sqrt(R)) for each id, of R that are read.

        Args:
            values: Values with the rows of the plate on ``axis``, as a site inside it has them.
            ids: Classes, which must be among the ``reads`` of the plate.
            axis: Axis of ``values`` that has the rows of the plate, 0 or above.

        Raises:
            ValueError: If ``values`` has not M rows on ``axis``, if an id is out of range or not
                among the ``reads`` of the plate (under ``jit``, where ids are not known, its row is
                NaN), or if the plate holds some of the classes and was given no ``reads``.
            TypeError: If ``ids`` are not integers.

        Example:
            >>> import jax.numpy as jnp
            >>> import numpyro_largecat as lc
            >>> words = lc.class_plate("words", 3).classes
            >>> words.rows_of(jnp.array([0.5, 1.5, 2.5]), jnp.array([[2, -1], [0, 2]])).tolist()
            [[2.5, 0.0], [0.5, 2.5]]
        """
        if self.reads is None and self.kind != "full":
            raise ValueError(
                f"plate '{self.name}' was not told which classes are read by id: give it the same "
                "ids, `lc.class_plate(..., reads=ids)`."
            )
        known = None if self.reads is None else self.reads.known
        num_rows = self.indices.shape[0]
        return take_rows(self.name, self.num_categories, num_rows, known, values, ids, axis)

    def scored(self, rows: Array) -> Array:
        """The first rows, of the classes that a choice is between, without those only read.

        Shapes: (M, ...) to (C, ...), C the number of ``weights``; all rows if the plate has no
        ``reads``.

        Cost: O(1), a slice.

        Raises:
            ValueError: If ``rows`` has not the M rows of the plate on its first axis.

        Example:
            >>> import jax.numpy as jnp, numpyro
            >>> import numpyro_largecat as lc
            >>> with numpyro.handlers.seed(rng_seed=0):
            ...     plate = lc.class_plate("k", 99, jnp.array([4]), 2, reads=jnp.array([7, 7, 3]))
            >>> plate.classes.indices.shape, plate.classes.scored(plate.classes.indices).shape
            ((6,), (3,))
        """
        num_rows = self.indices.shape[0]
        check_shape("`rows`", rows, (num_rows, *np.shape(rows)[1:]), _ROWS_FIRST)
        return rows if self.reads is None else rows[: self.weights.shape[0]]

    def by_observation(self, rows: Array) -> Array:
        """Give each observation the rows of its own classes.

        A model whose plate may be ``per_observation`` forms utilities such as
        ``jnp.einsum("nd,nsd->ns", x, classes.by_observation(w))``. Where the classes are shared by
        all observations, as they are in prediction, the first axis has size 1 and broadcasts.

        Shapes: (M, ...) to (B, 1 + S, ...), or to (1, M, ...) if the classes are shared.

        Cost: O(1), a reshape.

        Raises:
            ValueError: If ``rows`` has not the M rows of the plate on its first axis.

        Example:
            >>> import jax.numpy as jnp, numpyro
            >>> import numpyro_largecat as lc
            >>> with numpyro.handlers.seed(rng_seed=0):
            ...     plate = lc.class_plate("k", 9, jnp.array([4, 2]), 3, per_observation=True)
            >>> plate.classes.by_observation(plate.classes.indices)[:, 0].tolist()
            [4, 2]
        """
        num_rows = self.indices.shape[0]
        check_shape("`rows`", rows, (num_rows, *np.shape(rows)[1:]), _ROWS_FIRST)
        num_together = self.weights.shape[0] if self.per_observation else num_rows
        return rows.reshape(num_rows // num_together, num_together, *rows.shape[1:])


def _refuse_steps(labels: Array) -> None:
    """NumPyro's ``scan`` stacks what is inside the distributions of its sites, over its steps."""
    if labels.ndim != 1:
        raise NotImplementedError(
            "a choice over some of the classes cannot be inside of NumPyro's `scan`: observe it "
            f"after the scan. The labels of its classes have shape {labels.shape}."
        )


@partial(jax.jit, static_argnums=2)
def shared_subset(present: Array, others: DrawnClasses, num_categories: int) -> ClassSubset:
    """Join sorted distinct labels, of weight 1, and drawn classes, which stand for all others."""
    weights = (present < num_categories).astype(others.weights.dtype)
    indices = jnp.concatenate([present, others.classes])
    return ClassSubset(
        jnp.minimum(indices, num_categories - 1),
        jnp.concatenate([weights, others.weights]),
        present,
        num_categories,
        "sample",
    )


@partial(jax.jit, static_argnums=2)
def per_observation_subset(labels: Array, others: DrawnClasses, num_categories: int) -> ClassSubset:
    """Join each label, of weight 1, and the classes drawn for its observation, shape (B, S)."""
    indices = jnp.concatenate([labels[:, None], others.classes], axis=1)
    return ClassSubset(
        jnp.clip(indices, 0, num_categories - 1).reshape(-1),
        jnp.concatenate([jnp.ones(1, others.weights.dtype), others.weights]),
        labels,
        num_categories,
        "sample",
        per_observation=True,
    )


def labels_subset(asked: Array, num_categories: int) -> ClassSubset:
    """Hold the distinct classes among those that are asked for, and one row for all others.

    The weight of that row is NaN, unless there are no others: sums over all classes are not known.
    """
    present = sorted_distinct(asked, num_categories)[:num_categories]
    is_whole = (present < num_categories).sum() == num_categories
    others = DrawnClasses(
        jnp.full(1, num_categories - 1), jnp.where(is_whole, 0.0, jnp.full(1, jnp.nan))
    )
    return replace(shared_subset(present, others, num_categories), kind="labels")


def labels_of_each_subset(labels: Array, num_categories: int) -> ClassSubset:
    """Hold the label of each observation, and one row for all others, of weight NaN."""
    others = DrawnClasses(jnp.zeros((*labels.shape, 1), labels.dtype), jnp.full(1, jnp.nan))
    return replace(per_observation_subset(labels, others, num_categories), kind="labels")


def chunk_subset(classes: Array, num_categories: int) -> ClassSubset:
    """Hold consecutive classes; those past the last one are padding."""
    weights = (classes < num_categories).astype(jnp.result_type(float))
    indices = jnp.minimum(classes, num_categories - 1)
    return ClassSubset(indices, weights, None, num_categories, "chunk")


def full_subset(num_categories: int) -> ClassSubset:
    """Hold all classes in order."""
    weights = jnp.ones(num_categories)
    indices = jnp.arange(num_categories, dtype=jnp.int32)
    return ClassSubset(indices, weights, None, num_categories, "full")


def check_class_subset(classes: Any) -> None:
    """Raise TypeError unless ``classes`` is a ``ClassSubset``, or None for all classes."""
    if classes is not None:
        form = "what `with lc.class_plate(...) as classes:` gives"
        check_kind("classes", classes, ClassSubset, form)


def check_labels(name: str, labels: ArrayLike, num_categories: int) -> None:
    """Refuse labels of plate ``name`` that are no classes; values under ``jit`` pass."""
    check_integers("labels", labels)
    check_in_range(f"`labels` of plate '{name}'", labels, num_categories, "classes")


def check_num_sampled(num_sampled: int, num_categories: int, labels: ArrayLike | None) -> int:
    """Return the number of drawn classes as an int in range, or raise."""
    most = num_categories if labels is None else num_categories - 1
    besides = "" if labels is None else " besides a label"
    of_what = f"number of classes{besides}; leave it out to have them all"
    return check_count("num_sampled", num_sampled, 1, most, of_what)
