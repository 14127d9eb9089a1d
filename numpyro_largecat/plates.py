# SPDX-License-Identifier: Apache-2.0
"""Plates that say which rows exist this step: a weighted subset of classes, or a minibatch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpyro
from jax import Array
from jax.typing import ArrayLike
from numpyro.primitives import Messenger, apply_stack

from numpyro_largecat._checks import (
    check_count,
    check_in_range,
    check_integers,
    is_concrete,
    widen,
)
from numpyro_largecat.ops.subsampling import draw_without_replacement, skip_labels


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("indices", "weights", "labels"),
    meta_fields=("num_categories", "kind"),
)
@dataclass(frozen=True)
class ClassSubset:
    """The classes that exist this step, as ``with lc.class_plate(...) as classes`` gives them.

    Attributes:
        indices: Class of each row of the plate, shape (M,), integers in [0, K). Use it to gather
            features of the classes.
        weights: Weight of each row, shape (M,): for any f, the sum of
            ``weights[m] * f(indices[m])`` estimates the sum of f over all K classes without bias.
            A padded row has weight 0.
        labels: The distinct labels, sorted, then padding equal to K, shape (B,); row m < B of the
            plate is class ``labels[m]``. None unless ``kind`` is "sample".
        num_categories: Number of classes K.
        kind: "full" for all K classes in order, "sample" for a weighted subset, "chunk" for
            consecutive classes chosen by ``lc.class_chunk``.

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
    kind: Literal["full", "sample", "chunk"]


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("indices",),
    meta_fields=("name", "size", "dim"),
)
@dataclass(frozen=True)
class RowSubset:
    """The rows of the data that exist this step, as ``with lc.data_plate(...) as rows`` gives them.

    Attributes:
        indices: Row ids of the minibatch, shape (B,), integers in [0, N).
        name: Name of the plate.
        size: Number of rows N of the whole data.
        dim: Batch dimension of the plate, a negative int.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_largecat as lc
        >>> lc.data_plate("data", 100, rows=jnp.array([7, 3])).rows.indices.tolist()
        [7, 3]
    """

    indices: Array
    name: str
    size: int
    dim: int


class _answer_plate(Messenger):
    """Give the plate ``name`` its indices, and tell outer handlers what they mean."""

    def __init__(self, name: str, indices: Array, meaning: dict[str, Any]) -> None:
        self.name = name
        self.indices = indices
        self.meaning = meaning
        super().__init__()

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "plate" and msg["name"] == self.name:
            msg["value"] = self.indices
            msg["kwargs"].update(self.meaning)


class _RowsSite(NamedTuple):
    """What the handlers made of a plate's helper site ``name + "_rows"``."""

    value: Array  # rows of the plate, or the part of them that is random
    shared: bool  # whether a handler gave the value, so that model and guide have the same
    is_chunk: bool  # whether `class_chunk` chose the rows


def _rows_site(
    name: str,
    size: int,
    value: Array | None,
    draw: Callable[[Array | None], Array] | None = None,
    *,
    all_rows: bool = False,
) -> _RowsSite:
    """Send the helper site of plate ``name`` through the handlers.

    NumPyro replays the plates of the guide into the model by name. A plate of ours replays this
    site too, whereas a plain plate that a guide made for itself does not: that is how rows which
    the guide drew on its own are told from rows that model and guide share.
    """
    own: list[Array] = [] if value is None else [value]

    def fn(*args: Any, rng_key: Array | None, **kwargs: Any) -> Array:
        del args, kwargs
        assert draw is not None
        own.append(draw(rng_key))
        return own[0]

    msg: dict[str, Any] = {
        "type": "plate",
        "fn": fn,
        "name": f"{name}_rows",
        "args": (size, None if value is None else value.shape[0]),
        "kwargs": {"rng_key": None, "is_helper": True, "all_rows": all_rows},
        "value": value,
        "scale": 1.0,
        "cond_indep_stack": [],
    }
    value = apply_stack(msg)["value"]
    shared = not own or value is not own[0]
    return _RowsSite(value, shared, bool(msg["kwargs"].get("is_chunk")))


class _indexed_plate(numpyro.plate):
    """A plate whose rows are given, and which slices every parameter inside it by them."""

    def __init__(
        self,
        name: str,
        size: int,
        indices: Array,
        dim: int | None,
        *,
        shared: bool,
        **meaning: Any,
    ) -> None:
        self._indices: Array
        with _answer_plate(name, indices, meaning):
            super().__init__(name, size, subsample_size=indices.shape[0], dim=dim)
        if self._indices is not indices and not shared and not meaning["full"]:
            raise ValueError(
                f"plate '{name}': the guide opened a plate of that name with rows of its own, "
                "which are not the rows of the model's plate. Fit with lc.SubsampledSVI, which "
                "gives every guide the rows of the model, or pass the guide `create_plates=`, a "
                "function that returns this plate."
            )
        self._indices = indices
        self.subsample_size = indices.shape[0]
        self._full: bool = meaning["full"]

    def postprocess_message(self, msg: dict[str, Any]) -> None:
        """Slice a parameter that is stored whole, also where the rows are a permutation."""
        if msg["type"] not in ("param", "subsample") or self._full:
            return
        event_dim = msg["kwargs"].get("event_dim")
        if event_dim is None:
            return
        axis = self.dim - event_dim
        shape = jnp.shape(msg["value"])
        if len(shape) < -axis or shape[axis] == 1:
            return
        if shape[axis] != self.size:
            raise ValueError(
                f"{msg['type']} site '{msg.get('name')}' inside plate '{self.name}' must have "
                f"{self.size} rows at axis {axis} (the plate's dim {self.dim} less event_dim "
                f"{event_dim}); got shape {shape}."
            )
        msg["value"] = jnp.take(msg["value"], self._indices, axis=axis, mode="clip")


class class_plate(_indexed_plate):
    r"""Plate over the K classes of a categorical, of which each step touches a weighted subset.

    The subset holds the distinct ``labels`` of the batch, U of them, each with weight 1, and
    ``num_sampled`` = S classes drawn uniformly without replacement from the other K - U, each with
    weight (K - U) / S. Given the labels, for any f,

    .. math:: E\Big[\sum_m \mathrm{weights}_m \, f(\mathrm{indices}_m)\Big] = \sum_{k=1}^{K} f(k),

    so likelihoods that sum over classes, and the prior and KL terms of everything inside the
    plate, are estimated without bias with one set of weights. (If fewer than S classes remain, all
    of them are taken, with weight 1.)

    Without ``labels`` the S classes are drawn from all K. Without ``num_sampled`` the plate is
    full: all K classes in order, weight 1, and likelihoods over it are exact.

    Shapes: the plate has M = B + S rows, B the number of labels. Repeated labels leave padded rows,
    which have weight 0 and repeat a valid class; nothing is written to them.

    Cost: O(S log S + B log B) time and O(S + B) memory, whatever ``num_categories``.

    Args:
        name: Name of the plate.
        num_categories: Number of classes K, a Python int of at least 2.
        labels: Classes that must be present, integers in [0, K), any shape: the labels of the
            minibatch. Under ``jit`` their values cannot be checked; a bad label then makes the log
            probability NaN.
        num_sampled: Number of other classes S, a Python int in [1, K - 1] (K without labels).
        dim: Batch dimension of the plate, negative; the rightmost free one by default.

    Raises:
        TypeError: If ``labels`` are not integers or a count is not a Python int.
        ValueError: If a count or a label is out of range, or if the guide opened a plate of the
            same name that holds other rows.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro
        >>> import numpyro_largecat as lc
        >>> labels = jnp.array([4, 2, 4])
        >>> with numpyro.handlers.seed(rng_seed=0):
        ...     with lc.class_plate("classes", 10**6, labels, num_sampled=2) as classes:
        ...         pass
        >>> classes.indices[:2].tolist(), classes.weights.tolist()
        ([2, 4], [1.0, 1.0, 0.0, 499999.0, 499999.0])

    References:
        Ruiz, Titsias, Dieng and Blei, Augment and Reduce, ICML 2018, section 2.1 ("reduce").
    """

    def __init__(
        self,
        name: str,
        num_categories: int,
        labels: ArrayLike | None = None,
        num_sampled: int | None = None,
        *,
        dim: int | None = None,
    ) -> None:
        num_categories = check_count("num_categories", num_categories, 2)
        if labels is not None:
            check_integers("labels", labels)
            check_in_range(f"`labels` of plate '{name}'", labels, num_categories, "classes")
            labels = jnp.ravel(jnp.asarray(labels))
        if num_sampled is not None:
            num_sampled = _check_num_sampled(num_sampled, num_categories, labels)
        self.classes, shared = _choose_classes(name, num_categories, labels, num_sampled)
        full = self.classes.kind == "full"
        super().__init__(
            name,
            num_categories,
            self.classes.indices,
            dim,
            shared=shared,
            full=full,
            row_weights=None if full else self.classes.weights,
            labels=labels,
        )

    def __enter__(self) -> ClassSubset:
        """Open the plate and return its ``ClassSubset``."""
        super().__enter__()
        return self.classes

    def process_message(self, msg: dict[str, Any]) -> None:
        """Scale each row by its own weight, where NumPyro's plate scales all rows alike."""
        scale = msg.get("scale")
        super().process_message(msg)
        if msg["type"] not in ("param", "sample") or self._full:
            return
        if any(frame.name == self.name for frame in msg["cond_indep_stack"]):
            weights = self.classes.weights.reshape((-1,) + (1,) * (-1 - self.dim))
            msg["scale"] = weights if scale is None else scale * weights


def _check_num_sampled(num_sampled: int, num_categories: int, labels: Array | None) -> int:
    num_sampled = check_count("num_sampled", num_sampled, 1)
    most = num_categories if labels is None else num_categories - 1
    if num_sampled > most:
        raise ValueError(
            f"`num_sampled` must be at most {most} with num_categories={num_categories}"
            f"{'' if labels is None else ', since the labels are there already'}; "
            f"got {num_sampled}. Leave it out to have all classes, exactly."
        )
    return num_sampled


def _choose_classes(
    name: str, num_categories: int, labels: Array | None, num_sampled: int | None
) -> tuple[ClassSubset, bool]:
    """Make the subset, and say whether a handler gave the random part of it."""
    if num_sampled is None:
        subset = _full_subset(num_categories)
        site = _rows_site(name, num_categories, subset.indices)
    else:
        given = jnp.zeros(0, jnp.int32) if labels is None else labels
        present, num_others = _sorted_distinct(given, num_categories)

        def draw(rng_key: Array | None) -> Array:
            if rng_key is None:
                raise ValueError(
                    f"plate '{name}' draws classes and needs a random key: run the model under "
                    "`numpyro.handlers.seed`, or leave `num_sampled` out (HMC and NUTS cannot "
                    "subsample)."
                )
            return _draw_others(rng_key, present, num_others, num_categories, num_sampled)

        site = _rows_site(name, num_categories, None, draw)
        if not site.is_chunk:
            subset = _weighted_subset(present, num_others, site.value, num_categories)
    if site.is_chunk:
        return _chunk_subset(site.value, num_categories), True
    return subset, site.shared


@partial(jax.jit, static_argnums=(3, 4))
def _draw_others(
    rng_key: Array, present: Array, num_others: Array, num_categories: int, num_sampled: int
) -> Array:
    """Draw classes that are not among the labels."""
    ranks = draw_without_replacement(
        rng_key,
        num_others,
        num_sampled,
        min_population=num_categories - min(present.shape[0], num_categories),
        max_population=num_categories,
    )
    return skip_labels(ranks, present, num_categories)


@partial(jax.jit, static_argnums=3)
def _weighted_subset(
    present: Array, num_others: Array, others: Array, num_categories: int
) -> ClassSubset:
    """Join labels, of weight 1, and drawn classes, which stand for all classes without label."""
    dtype = jnp.result_type(float)
    num_drawn = jnp.minimum(others.shape[0], num_others)
    is_drawn = jnp.arange(others.shape[0]) < num_drawn
    weight = num_others.astype(dtype) / jnp.maximum(num_drawn, 1)
    weights = [(present < num_categories).astype(dtype), jnp.where(is_drawn, weight, 0)]
    indices = jnp.concatenate([present, jnp.where(is_drawn, others, 0)])
    return ClassSubset(
        jnp.minimum(indices, num_categories - 1),
        jnp.concatenate(weights),
        present,
        num_categories,
        "sample",
    )


def _chunk_subset(classes: Array, num_categories: int) -> ClassSubset:
    weights = (classes < num_categories).astype(jnp.result_type(float))
    indices = jnp.minimum(classes, num_categories - 1)
    return ClassSubset(indices, weights, None, num_categories, "chunk")


def _full_subset(num_categories: int) -> ClassSubset:
    weights = jnp.ones(num_categories)
    indices = jnp.arange(num_categories, dtype=jnp.int32)
    return ClassSubset(indices, weights, None, num_categories, "full")


@partial(jax.jit, static_argnums=1)
def _sorted_distinct(labels: Array, num_categories: int) -> tuple[Array, Array]:
    """Sort the distinct labels in [0, K), padded with K, and count the other classes."""
    labels = widen(labels)
    valid = (labels >= 0) & (labels < num_categories)
    labels = jnp.where(valid, labels, num_categories).astype(jnp.int32)
    distinct = jnp.unique(labels, size=labels.shape[0], fill_value=num_categories)
    return distinct, num_categories - (distinct < num_categories).sum(dtype=jnp.int32)


class class_chunk(Messenger):
    """Run a model or guide on the classes [start, start + size) of one class plate.

    Everything in that plate then has rows for these classes alone, with weight 1 and no sampling,
    whatever labels and ``num_sampled`` the plate has: evaluated chunk by chunk this visits all K
    classes in bounded memory. Rows past the last class repeat it with weight 0. ``start=0`` and
    ``size=num_categories`` gives all classes at once.

    Cost: O(size).

    Args:
        fn: Model or guide; it may be left out to use the handler in a ``with`` statement.
        name: Name of the class plate.
        start: First class, an int or a traced integer scalar, so that chunks can be scanned over.
        size: Number of classes, a Python int of at least 1.

    Raises:
        ValueError: If ``size`` is less than 1.

    Example:
        >>> import numpyro_largecat as lc
        >>> with lc.class_chunk(name="classes", start=8, size=4):
        ...     classes = lc.class_plate("classes", 10).classes
        >>> classes.indices.tolist(), classes.weights.tolist()
        ([8, 9, 9, 9], [1.0, 1.0, 0.0, 0.0])
    """

    def __init__(
        self, fn: Callable[..., Any] | None = None, *, name: str, start: ArrayLike, size: int
    ) -> None:
        self.name = name
        self.start = start
        self.size = check_count("size", size, 1)
        super().__init__(fn)

    def process_message(self, msg: dict[str, Any]) -> None:
        """Answer the helper site of the class plate."""
        if msg["type"] == "plate" and msg["name"] == f"{self.name}_rows":
            msg["value"] = self.start + jnp.arange(self.size, dtype=jnp.int32)
            msg["kwargs"]["is_chunk"] = True


class data_plate(_indexed_plate):
    """Plate over the N rows of the data, whose minibatch carries its true row ids.

    NumPyro's ``plate(name, N, subsample_size=B)`` draws random ids of its own. That is right for
    the scale N / B of the likelihood, but a model which is fed minibatches from outside would keep
    per-observation state, such as the local variable of ``sample_choice``, under ids that are not
    those of its rows. This plate takes the ids from the user.

    Shapes: with ``rows`` of shape (B,) the plate has B rows and log densities inside it are scaled
    by N / B. Repeated ids are allowed; gradients of what is kept per row add up.

    Cost: O(B).

    Args:
        name: Name of the plate.
        size: Number of rows N of the whole data, a Python int.
        rows: Ids of the minibatch's rows, integers in [0, N), shape (B,). None for all N rows in
            order.
        dim: Batch dimension of the plate, negative; the rightmost free one by default.

    Raises:
        TypeError: If ``rows`` are not integers.
        ValueError: If ``rows`` has not one axis or holds an id out of range (under ``jit``, where
            ids are not known, log densities are then NaN), or if the guide opened a plate of the
            same name that holds other rows.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_largecat as lc
        >>> with lc.data_plate("data", 1000, rows=jnp.array([17, 4, 256])) as rows:
        ...     print(rows.indices)
        [ 17   4 256]
    """

    def __init__(
        self, name: str, size: int, rows: ArrayLike | None = None, *, dim: int | None = None
    ) -> None:
        size = check_count("size", size, 1)
        if rows is None:
            indices = jnp.arange(size, dtype=jnp.int32)
        else:
            check_integers("rows", rows)
            if jnp.ndim(rows) != 1:
                raise ValueError(
                    f"`rows` of plate '{name}' must have shape (B,), one id for each row of the "
                    f"minibatch; got shape {jnp.shape(rows)}."
                )
            check_in_range(f"`rows` of plate '{name}'", rows, size, "row ids")
            indices = jnp.asarray(rows, jnp.int32)
        site = _rows_site(name, size, indices, all_rows=rows is None)
        super().__init__(
            name,
            size,
            site.value,
            dim,
            shared=site.shared,
            full=rows is None,
            row_ids=None if rows is None else site.value,
        )
        self.rows = RowSubset(site.value, name, size, self.dim)

    def process_message(self, msg: dict[str, Any]) -> None:
        """Make log densities NaN if an id is out of range and could not be checked before."""
        super().process_message(msg)
        if msg["type"] == "sample" and not (self._full or is_concrete(self._indices)):
            valid = ((self._indices >= 0) & (self._indices < self.size)).all()
            scale = 1.0 if msg["scale"] is None else msg["scale"]
            msg["scale"] = jnp.where(valid, scale, jnp.nan)

    def __enter__(self) -> RowSubset:
        """Open the plate and return its ``RowSubset``."""
        super().__enter__()
        return self.rows
