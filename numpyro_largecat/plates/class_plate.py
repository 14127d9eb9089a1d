# SPDX-License-Identifier: Apache-2.0
"""Plates that say which rows exist this step: a weighted subset of classes, or a minibatch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import numpyro
from jax import Array
from jax.typing import ArrayLike
from numpyro.contrib.control_flow import scan
from numpyro.handlers import condition, infer_config
from numpyro.primitives import _PYRO_STACK, Messenger, apply_stack

from numpyro_largecat._checks import as_ids, check_count, is_concrete
from numpyro_largecat.ops.subsampling import sorted_distinct
from numpyro_largecat.plates.class_subset import (
    ClassSubset,
    RowSubset,
    check_labels,
    check_num_sampled,
    check_row_ids,
    chunk_subset,
    full_subset,
    has_repeats,
    labels_of_each_subset,
    labels_subset,
    per_observation_subset,
    shared_subset,
)
from numpyro_largecat.plates.proposals import (
    ClassProposal,
    DrawnClasses,
    draw_others,
    draw_per_observation,
)


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

    name: str  # of the plate, as handlers further out see it: `scope` renames it
    value: Any  # rows of the plate, or DrawnClasses, the part of them that is random
    shared: bool  # whether a handler gave the value, so that model and guide have the same
    is_chunk: bool  # whether `class_chunk` chose the rows
    is_read: bool  # whether rows are only read, as predictions do: log densities mean nothing
    also: Array | None  # rows that are read besides those of the labels


def _rows_site(
    name: str,
    size: int,
    value: Array | None,
    draw: Callable[[Array | None], DrawnClasses] | None = None,
    *,
    all_rows: bool = False,
    given_ids: bool = False,
) -> _RowsSite:
    """Send the helper site of plate ``name`` through the handlers.

    NumPyro replays the plates of the guide into the model by name. A plate of ours replays this
    site too, whereas a plain plate that a guide made for itself does not: that is how rows which
    the guide drew on its own are told from rows that model and guide share.
    """
    own: list[Any] = [] if value is None else [value]

    def fn(*args: Any, rng_key: Array | None, **kwargs: Any) -> Any:
        del args, kwargs
        assert draw is not None
        own.append(draw(rng_key))
        return own[0]

    msg: dict[str, Any] = {
        "type": "plate",
        "fn": fn,
        "name": f"{name}_rows",
        "args": (size, None if value is None else value.shape[0]),
        "kwargs": {
            "rng_key": None,
            "is_helper": True,
            "all_rows": all_rows,
            "given_ids": given_ids,
            "draws_classes": draw is not None,
        },
        "value": value,
        "scale": 1.0,
        "cond_indep_stack": [],
    }
    msg = apply_stack(msg)
    kwargs, result = msg["kwargs"], msg["value"]
    return _RowsSite(
        name=msg["name"].removesuffix("_rows"),
        value=result,
        shared=not own or result is not own[0],
        is_chunk=bool(kwargs.get("is_chunk")),
        is_read=bool(kwargs.get("is_read")),
        also=kwargs.get("also"),
    )


def _refuse_scan(name: str) -> None:
    """Refuse a plate that holds some of its rows inside NumPyro's ``scan``, whose steps are traced.

    Raises:
        NotImplementedError: If the body of a scan opens it.
    """
    if any(
        isinstance(handler, infer_config)
        and getattr(handler.config_fn, "__module__", None) == scan.__module__
        for handler in _PYRO_STACK
    ):
        raise NotImplementedError(
            f"plate '{name}' holds some of its rows and is opened inside of "
            "`numpyro.contrib.control_flow.scan`, where no inference can learn which. Open it "
            "before the scan, draw its sites there and use their rows in the body; observe what "
            "belongs to its rows after the scan, with the states that the scan returns."
        )


def _are_same(a: Array, b: Array) -> bool:
    """Whether two arrays of row ids are known to be equal."""
    if a is b or a.shape != b.shape:
        return a is b
    return is_concrete(a) and is_concrete(b) and bool((a == b).all())


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
        if not meaning["full"]:
            _refuse_scan(name)
        with _answer_plate(name, indices, meaning):
            super().__init__(name, size, subsample_size=indices.shape[0], dim=dim)
        if not (shared or meaning["full"] or _are_same(self._indices, indices)):
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

    Predictions evaluate the plate of the choice, a full one too, on a few consecutive classes at a
    time: index tables by ``indices``, and let utilities depend on their own class's rows and on
    sites outside.

    **Read by id.** A plate of users or items, other than that of the choice, is read as
    ``v[users.place(ids)]`` with ``labels=ids``, in training and in prediction. Its rows may repeat
    in ``ids``. In predictions it holds its labels alone, or without labels all classes, so there a
    weighted sum over it is NaN with labels and exact without.

    **Other draws.** A ``proposal`` replaces the uniform draw: ``FrequencyProposal`` draws by
    frequency, ``HeadProposal`` always takes the most frequent classes, and an object of your own
    does as ``ClassProposal`` says. Labels have weight 1 all the same, and the sums stay unbiased.

    **Classes of each observation.** By default observations share their classes, so that the labels
    of others are exact negatives for an observation, and utilities are one matrix product. With
    ``per_observation=True`` each observation n has, as in the paper, its label and S classes of its
    own, drawn from the K - 1 others, with weights 1 and (K - 1) / S in its likelihood; prior and KL
    terms take the mean over observations of these estimates. It costs more and has a higher
    variance; see ``python -m benchmarks.proposals``. The model then forms utilities by
    ``jnp.einsum("nd,nsd->ns", x, classes.by_observation(w))``.

    **What a row may depend on:** its own rows of other sites and parameters, and what is outside of
    the plate. A place or a sum over the plate is one over the classes of the step: for a reference
    class write ``jnp.where(classes.indices == 0, 0, b)``, not ``b.at[0].set(0)``.

    Shapes: the plate has M = min(B, K) + S rows, B the number of labels. Repeated labels leave
    padded rows, which have weight 0 and repeat a valid class; nothing is written to them. With a
    ``proposal`` S is the number of classes that it returns, H more for a head of H. With
    ``per_observation`` the plate has M = B (1 + S) rows, in which a class may be several times.

    Cost: O(S log S + B log B) time and O(S + B) memory, whatever ``num_categories``; a proposal
    says its own. With ``per_observation`` O(B S log S) time and O(B S) memory.

    Args:
        name: Name of the plate.
        num_categories: Number of classes K, a Python int in [2, 2**31).
        labels: Classes that must be present, integers in [0, K), any shape, (B,) with
            ``per_observation``: the labels of the minibatch. Under ``jit`` their values cannot be
            checked; a bad label then makes the log probability NaN.
        num_sampled: Number of other classes S, a Python int in [1, K - 1] (K without labels).
        proposal: How to draw the other classes, an object with the method of ``ClassProposal``.
            None draws uniformly. Not used where ``num_sampled`` is left out.
        per_observation: Whether each observation draws classes of its own.
        dim: Batch dimension of the plate, negative; the rightmost free one by default.

    Raises:
        TypeError: If ``labels`` are not integers, a count is not a Python int, or ``proposal`` has
            no method ``draw``.
        ValueError: If a count or a label is out of range, if the guide opened a plate of the same
            name that holds other rows, or if ``per_observation`` comes with a ``proposal``, without
            labels or with labels of several axes.

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
        Ruiz, Titsias, Dieng and Blei, Augment and Reduce, ICML 2018, section 2.1 ("reduce"),
        and Algorithm 1 (``per_observation``).
    """

    def __init__(
        self,
        name: str,
        num_categories: int,
        labels: ArrayLike | None = None,
        num_sampled: int | None = None,
        *,
        proposal: ClassProposal | None = None,
        per_observation: bool = False,
        dim: int | None = None,
    ) -> None:
        num_categories = check_count("num_categories", num_categories, 2)
        _check_layout(name, labels, proposal, per_observation)
        if labels is not None:
            check_labels(name, labels, num_categories)
            labels = jnp.ravel(as_ids(labels))
        if num_sampled is not None:
            num_sampled = check_num_sampled(num_sampled, num_categories, labels)
        self.classes, shared = _choose_classes(
            name, num_categories, labels, num_sampled, proposal, per_observation
        )
        full = self.classes.kind == "full"
        super().__init__(
            name,
            num_categories,
            self.classes.indices,
            dim,
            shared=shared,
            full=full,
            row_weights=None if full else self.classes.row_weights,
            repeats=self.classes.per_observation,
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
            weights = self.classes.row_weights.reshape((-1,) + (1,) * (-1 - self.dim))
            msg["scale"] = weights if scale is None else scale * weights

    def postprocess_message(self, msg: dict[str, Any]) -> None:
        """Also refuse values of sites that are those of other rows."""
        super().postprocess_message(msg)
        if msg["type"] == "sample" and not msg["is_observed"]:
            self._check_rows(msg)

    def _check_rows(self, msg: dict[str, Any]) -> None:
        """Refuse values from elsewhere, such as a guide's, of other classes than the plate's."""
        shape, axis = jnp.shape(msg["value"]), self.dim - msg["fn"].event_dim
        if len(shape) >= -axis and shape[axis] not in (1, self.subsample_size):
            raise ValueError(
                f"site '{msg['name']}' inside plate '{self.name}' must have the plate's "
                f"{self.subsample_size} rows at axis {axis}; got a value of shape {shape}, as "
                "from a guide or from draws for a plate that holds other rows. An automatic guide "
                "keeps the number of rows of its training: predict with "
                "`lc.Fitted(...).on(x).top_classes()`; or, for `numpyro.infer.Predictive`, make "
                "the guide of the model without `num_sampled` and run it once with labels, "
                "`numpyro.handlers.seed(full_guide, 0)(x, y)`: it takes the same `params`."
            )


def _check_layout(
    name: str, labels: ArrayLike | None, proposal: ClassProposal | None, per_observation: bool
) -> None:
    if proposal is not None and (isinstance(proposal, type) or not hasattr(proposal, "draw")):
        got = f"the class {proposal.__name__}" if isinstance(proposal, type) else type(proposal)
        raise TypeError(
            f"`proposal` of plate '{name}' must be an object with a method `draw`, such as "
            f"lc.FrequencyProposal(counts); got {got}."
        )
    if per_observation and proposal is not None:
        raise ValueError(
            f"plate '{name}': with per_observation=True classes are drawn uniformly; leave out "
            f"`proposal`, or share the classes; got {proposal!r}."
        )
    if per_observation and labels is not None and np.ndim(labels) != 1:
        raise ValueError(
            f"`labels` of plate '{name}' must have shape (B,) with per_observation=True; "
            f"got shape {np.shape(labels)}."
        )


def _choose_classes(
    name: str,
    num_categories: int,
    labels: Array | None,
    num_sampled: int | None,
    proposal: ClassProposal | None,
    per_observation: bool,
) -> tuple[ClassSubset, bool]:
    """Make the subset, and say whether a handler gave the random part of it."""
    if num_sampled is None:
        subset = full_subset(num_categories)
        site = _rows_site(name, num_categories, subset.indices)
    else:
        given = jnp.zeros(0, jnp.int32) if labels is None else as_ids(labels)
        distinct = sorted_distinct(given, num_categories)[:num_categories]  # K at most
        present = given if per_observation else distinct

        def draw(rng_key: Array | None) -> DrawnClasses:
            if rng_key is None:
                raise _no_key(name)
            if not per_observation:
                return draw_others(proposal, rng_key, present, num_categories, num_sampled)
            if labels is None:
                raise _no_labels(name)
            return draw_per_observation(rng_key, present, num_categories, num_sampled)

        site = _rows_site(name, num_categories, None, draw)
        if site.is_read and not site.is_chunk:
            return _read_subset(labels, site.also, num_categories, per_observation), True
        if not site.is_chunk:
            join = per_observation_subset if per_observation else shared_subset
            subset = join(present, DrawnClasses(*site.value), num_categories)
    if site.is_chunk:
        return chunk_subset(site.value, num_categories), True
    return subset, site.shared


def _read_subset(
    labels: Array | None, also: Array | None, num_categories: int, per_observation: bool
) -> ClassSubset:
    """The classes that a model asks for by its labels, or all classes."""
    if labels is None:
        return full_subset(num_categories)
    if per_observation:
        return labels_of_each_subset(labels, num_categories)
    return labels_subset(labels, also, num_categories)


def _no_key(name: str) -> ValueError:
    return ValueError(
        f"plate '{name}' draws classes and needs a random key: run the model under "
        "`numpyro.handlers.seed`, or leave `num_sampled` out (HMC and NUTS cannot subsample)."
    )


def _no_labels(name: str) -> ValueError:
    return ValueError(
        f"`labels` of plate '{name}' are needed with per_observation=True, one for each "
        "observation; got None."
    )


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


def is_latent(msg: dict[str, Any]) -> bool:
    """Whether a message is of a continuous site that nothing observes.

    What is discrete is a drawn outcome, or summed over for each row. The handler ``condition``,
    which comes after the plates, is asked what it will say.
    """
    support = msg["fn"].support
    if msg["is_observed"] or (support is not None and support.is_discrete):
        return False
    for handler in _PYRO_STACK:
        if isinstance(handler, condition):
            say = handler.condition_fn or (lambda msg, data=handler.data: data.get(msg["name"]))
            if say(msg) is not None:
                return False
    return True


class data_plate(_indexed_plate):
    """Plate over the N rows of the data, whose minibatch carries its true row ids.

    NumPyro's ``plate(name, N, subsample_size=B)`` draws random ids of its own. That is right for
    the scale N / B of the likelihood, but a model which is fed minibatches from outside would keep
    per-observation state, such as the local variable of ``sample_choice``, under ids that are not
    those of its rows. This plate takes the ids from the user.

    Shapes: with ``rows`` of shape (B,) the plate has B rows and log densities inside it are scaled
    by N / B.

    **Repeated ids** are allowed around what is observed: gradients of what is kept per row add up.
    Around a latent site, such as a value of each user read by the users of the minibatch, its prior
    and KL terms would count once for each time that its id occurs: ``SubsampledSVI`` refuses that,
    and elsewhere the log density is NaN. (So draw minibatches of rows with latent values without
    replacement.) Draw a site that is read by id in ``class_plate("users", N, labels=ids,
    num_sampled=1)`` and read it by ``place(ids)``.

    Cost: O(B).

    Args:
        name: Name of the plate.
        size: Number of rows N of the whole data, a Python int in [1, 2**31).
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
            indices = check_row_ids(name, rows, size)
        given = rows is not None
        site = _rows_site(name, size, indices, all_rows=not given, given_ids=given)
        super().__init__(
            name,
            size,
            site.value,
            dim,
            shared=site.shared,
            full=rows is None,
            row_ids=None if rows is None else site.value,
        )
        self.rows = RowSubset(site.value, site.name, size, self.dim)
        self._is_read = site.is_read

    def process_message(self, msg: dict[str, Any]) -> None:
        """Make the log density of a site NaN if ids are wrong for it."""
        super().process_message(msg)
        if msg["type"] != "sample" or self._full:
            return
        valid = ((self._indices >= 0) & (self._indices < self.size)).all()
        if not self._is_read and is_latent(msg):
            valid &= ~has_repeats(self._indices)
        scale = 1.0 if msg["scale"] is None else msg["scale"]
        msg["scale"] = jnp.where(valid, scale, jnp.nan)

    def __enter__(self) -> RowSubset:
        """Open the plate and return its ``RowSubset``."""
        super().__enter__()
        return self.rows
