# SPDX-License-Identifier: Apache-2.0
"""The classes that exist this step, as a class plate gives them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from numpyro_largecat._checks import check_kind, check_shape
from numpyro_largecat.ops.subsampling import is_among, place_among
from numpyro_largecat.plates.rows_by_id import ReadRows, take_rows

_ROWS_FIRST = "the rows of the class plate first"
# What an observation's label is compared with, see ``class_plate``.
Negatives = Literal["batch", "shared", "own"]


class SharedNegatives(NamedTuple):
    """The drawn classes that all observations share, each beside the label of its own."""

    label_rows: Array  # (B,), rows of the labels of the observations
    drawn_rows: Array  # (S,), rows of the drawn classes, those of labels where they are labels
    row_weights: Array  # (M,), weights of all rows of the plate in prior and KL terms


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("indices", "weights", "labels", "reads", "shared"),
    meta_fields=("num_categories", "kind", "negatives", "name", "outer_name"),
)
@dataclass(frozen=True)
class ClassSubset:
    """The classes that exist this step, as ``with lc.class_plate(...) as classes`` gives them.

    Attributes:
        indices: Class of each row of the plate, shape (M,), integers in [0, K). Use it to gather
            features of the classes.
        weights: Weight of each class in the likelihood of an observation, on the last axis as in
            ``utilities``: shape (M,), without the rows that are only read, or (1 + S,) with
            "shared" or "own" ``negatives``, the label first. For any f, the sum of
            ``weights[m] * f(classes of an observation[m])`` estimates the sum of f over all K
            classes without bias; a shared negative that is the label of an observation does not
            count there. A padded row has weight 0.
        labels: The distinct labels, sorted, then padding equal to K, shape (min(B, K),), which are
            the first rows of the plate. With "shared" or "own" ``negatives`` the labels as they
            were given. None for all classes, and for consecutive ones.
        num_categories: Number of classes K.
        kind: "full" for all K classes in order, "sample" for a weighted subset. Classes that stand
            for no others are "chunk" for those chosen by ``class_chunk``, and "labels" for the
            labels alone, as predictions read them.
        negatives: What the label of an observation is compared with, see ``class_plate``. With
            "own" ones rows n (1 + S) to (n + 1) (1 + S) of the plate are those of observation n,
            its label first.
        name: Name of the plate.
        outer_name: Its name as handlers further out see it: ``numpyro.handlers.scope`` renames it.
        reads: What ``rows_of`` finds: the distinct ids of ``reads`` and where their rows are.
        shared: Where the rows of labels and of shared negatives are.

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
    negatives: Negatives = "batch"
    name: str = ""
    reads: ReadRows | None = None
    shared: SharedNegatives | None = None
    outer_name: str = ""

    @property
    def is_part(self) -> bool:
        """Whether the classes stand for no others, so that sums over all classes are not known."""
        return self.kind in ("chunk", "labels")

    @property
    def first_drawn(self) -> int:
        """Number of labels on the last axis of ``weights``, which come before the drawn classes."""
        assert self.labels is not None
        return self.labels.shape[0] if self.negatives == "batch" else 1

    @property
    def row_weights(self) -> Array:
        """Weight of each row of the plate, shape (M,), as prior and KL terms have them.

        With negatives of their own the mean of the observations' estimates is the estimate.
        """
        if self.reads is not None:
            return self.reads.row_weights
        if self.shared is not None:
            return self.shared.row_weights
        if self.negatives != "own":
            return self.weights
        num_observations = self.indices.shape[0] // self.weights.shape[0]
        return jnp.tile(self.weights / num_observations, num_observations)

    def place(self, value: Array) -> Array:
        """Place of each class in ``value`` among the columns of the utilities.

        They are the rows of the plate, or those of one observation, its label first. Only for
        classes that ``holds`` is true of. Where all classes are there, a class is its own place.

        Cost: O(log B) for each class.

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
        _refuse_steps(self.labels)
        if self.negatives != "batch":
            return jnp.zeros(jnp.shape(value), jnp.int32)
        return place_among(value, self.labels)

    def holds(self, value: Array) -> Array:
        """Whether each class in ``value`` is among the labels, and so has a row of weight 1.

        With "shared" or "own" ``negatives``, whether it is the label of its observation, (..., B).
        Where the plate has no labels, whether the class is there.

        Raises:
            ValueError: If with "shared" or "own" ``negatives`` there is no class for each label.
            NotImplementedError: If a choice over the subset is inside of NumPyro's ``scan``.
        """
        if self.labels is None:
            return jnp.isin(value, self.indices)
        _refuse_steps(self.labels)
        if self.negatives != "batch":
            size = self.labels.shape[0]
            check_shape("`value`", value, (..., size), "a class for each label of the plate")
            return self.labels == value
        return is_among(value, self.labels)

    def rows_of(self, values: Array, ids: ArrayLike, axis: int = 0) -> Array:
        """The rows of ``values`` that belong to ``ids``, in training as in prediction.

        Where an id is -1 the row is 0.

        Shapes: (M, ...) and ids of any shape (...,) to (..., ...).

        Cost: O(size of the result), and O(log R) for each id, of R that are read.

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

    def utilities(
        self, function: Callable[..., Any], observations: Sequence[Any], rows: Sequence[Any]
    ) -> Array:
        r"""Evaluate utilities of the pairs of an observation and a class that a step asks for.

        .. math:: \psi_{nm} = \mathrm{function}(\mathrm{observations}_n, \mathrm{rows}_m)

        The plate knows the pairs: all of them with "batch" ``negatives``, with all classes, and in
        predictions; the label and the negatives of each observation with others. A model that says
        what the utility of one pair is can therefore be fitted with any ``negatives``.

        Shapes: (B, C), C the number of ``weights``; the label is first with "shared" and "own".

        Cost: that of these pairs, B C. Where the function is an inner product and a sum, pairs with
        classes that observations share are one matrix product.

        Args:
            function: Utility of one class for one observation, a scalar, in nats: a function of the
                entries of ``observations`` without their first axis, and then of those of ``rows``
                without theirs. It may read values from outside that have neither axis.
            observations: Arrays (or trees of arrays) with an observation on each entry of the first
                axis, (B, ...).
            rows: Arrays (or trees) with the M rows of the plate on their first axis, as sites in
                the plate and ``indices`` have them.

        Raises:
            ValueError: If ``rows`` have not the M rows of the plate first, ``observations`` not one
                entry for each label of the plate, or the function gives no scalar.

        Example:
            >>> import jax.numpy as jnp
            >>> import numpyro_largecat as lc
            >>> classes = lc.class_plate("classes", 3).classes
            >>> x, w, b = jnp.ones((4, 2)), jnp.eye(3, 2), jnp.arange(3.0)
            >>> classes.utilities(lambda x, w, b: x @ w + b, (x,), (w, b))[0].tolist()
            [1.0, 2.0, 2.0]
        """
        num_observations = self._check_pairs(observations, rows)
        in_axes = (*(0 for _ in observations), *(None for _ in rows))
        per_observation = jax.vmap(_scalar(function), in_axes)
        over_rows = (*(None for _ in observations), *(0 for _ in rows))
        if self.negatives == "batch":
            scored = jax.tree.map(self.scored, tuple(rows))
            return jax.vmap(per_observation, over_rows, out_axes=1)(*observations, *scored)
        if self.shared is None:
            shape = (num_observations, self.weights.shape[0])
            own = jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), tuple(rows))
            of_one = jax.vmap(_scalar(function), over_rows)
            return jax.vmap(of_one)(*observations, *own)
        labels, drawn = (
            jax.tree.map(lambda x, place=place: x[place], tuple(rows))
            for place in (self.shared.label_rows, self.shared.drawn_rows)
        )
        of_labels = jax.vmap(_scalar(function))(*observations, *labels)
        of_drawn = jax.vmap(per_observation, over_rows, out_axes=1)(*observations, *drawn)
        return jnp.concatenate([of_labels[:, None], of_drawn], axis=1)

    def _check_pairs(self, observations: Sequence[Any], rows: Sequence[Any]) -> int:
        """Check the axes of ``utilities``; return the number of observations."""
        leaves = jax.tree.leaves(tuple(observations))
        if not leaves:
            raise ValueError(
                "`observations` must have an array with an entry for each observation, such as the "
                f"features or `jnp.arange(B)`; got {observations!r}."
            )
        for name, value, size in (
            *(("rows", value, self.indices.shape[0]) for value in jax.tree.leaves(tuple(rows))),
            *(("observations", value, self._num_observations(leaves)) for value in leaves),
        ):
            first = _ROWS_FIRST if name == "rows" else "an entry for each observation first"
            check_shape(f"`{name}`", value, (size, *np.shape(value)[1:]), first)
        return self._num_observations(leaves)

    def _num_observations(self, observations: Sequence[Any]) -> int:
        """Number of labels of the plate, or of entries of the first array."""
        if self.negatives != "batch" and self.labels is not None:
            return self.labels.shape[0]
        return np.shape(observations[0])[0] if np.ndim(observations[0]) else 1

    def without_labels(self, utilities: Array) -> Array:
        """Take a shared negative that is an observation's label from its alternatives, by -inf.

        A likelihood of your own needs it with "shared" ``negatives``, as our choices do it.

        Shapes: (..., B, 1 + S), as they come.

        Raises:
            ValueError: If with "shared" or "own" ``negatives`` there is no row of utilities for
                each label.
        """
        if self.negatives == "batch" or self.labels is None:
            return utilities
        wanted = (..., self.labels.shape[0], self.weights.shape[0])
        check_shape("`utilities`", utilities, wanted, "a row for each label of the class plate")
        if self.shared is None:
            return utilities
        is_label = self.shared.drawn_rows == self.shared.label_rows[:, None]
        is_own = jnp.pad(is_label, ((0, 0), (1, 0)))  # but for the label's own column
        return jnp.where(is_own, -jnp.inf, utilities)


def _scalar(function: Callable[..., Any]) -> Callable[..., Array]:
    """Refuse a function whose value is no scalar."""

    def checked(*arguments: Any) -> Array:
        utility = jnp.asarray(function(*arguments))
        check_shape("`function(observation, row)`", utility, (), "the utility of one class")
        return utility

    return checked


def _refuse_steps(labels: Array) -> None:
    """NumPyro's ``scan`` stacks what is inside the distributions of its sites, over its steps."""
    if labels.ndim != 1:
        raise NotImplementedError(
            "a choice over some of the classes cannot be inside of NumPyro's `scan`: observe it "
            f"after the scan. The labels of its classes have shape {labels.shape}."
        )


def check_class_subset(classes: Any) -> None:
    """Raise TypeError unless ``classes`` is a ``ClassSubset``, or None for all classes."""
    if classes is not None:
        form = "what `with lc.class_plate(...) as classes:` gives"
        check_kind("classes", classes, ClassSubset, form)
