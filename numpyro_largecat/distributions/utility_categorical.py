# SPDX-License-Identifier: Apache-2.0
"""The categorical of the utility view, exact or bounded on a subset of classes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array, lax
from jax.typing import ArrayLike
from numpyro.distributions import constraints

from numpyro_largecat._checks import check_in_range, check_integers, widen
from numpyro_largecat.ops.gumbel_max import gumbel_max
from numpyro_largecat.ops.softmax_bound import log_eta_hat, softmax_bound, take_row
from numpyro_largecat.plates import ClassSubset

NOISES = ("gumbel",)


class UtilityCategorical(dist.Distribution):
    r"""Categorical over K classes whose outcome is the class of highest noisy utility.

    .. math:: y = \arg\max_k (\psi_k + \varepsilon_k), \qquad \varepsilon_k \sim \phi

    With standard Gumbel noise this is the softmax. With all classes (``classes=None``, or those of
    a full class plate) ``log_prob`` is exact,

    .. math:: \log p(y \mid \psi) = \psi_y - \log \sum_{k=1}^{K} \exp \psi_k .

    With the M weighted classes of a subsampled ``class_plate`` it is an unbiased estimate of the
    Augment & Reduce bound, which has one local variable u for each observation,

    .. math:: 1 - u - e^{-u} \hat\eta, \qquad
              \hat\eta = \sum_m w_m \exp(\psi_m - \psi_y), \qquad
              E[\hat\eta] = \eta^* = \sum_k \exp(\psi_k - \psi_y).

    Given u the bound never exceeds the exact value, and equals it at u = log eta*.

    **Stateless form.** With ``u=None`` on a subset, u is log eta_hat of this very subset, and
    ``log_prob`` is ``-log(eta_hat)``. That is *biased upwards, and no bound* (Jensen's
    inequality): its expectation lies above the exact log probability, the more so the fewer
    classes are drawn. Prefer ``sample_choice``, which keeps u for each observation.

    Shapes: ``batch_shape`` is the broadcast of ``utilities.shape[:-1]`` and ``u``'s shape;
    ``event_shape`` is ().

    Cost: O(K) time and memory per observation with all classes, O(M) with a subset. ``sample``
    takes O(K) time per draw and bounded memory beside the utilities.

    Args:
        utilities: Mean utilities psi in nats, shape (..., K), or (..., M) for ``classes``.
        classes: What ``with class_plate(...) as classes`` gives. None for all classes.
        noise: Distribution of the errors: "gumbel" (softmax).
        u: Local variable log eta, shape (...), only with a subset of classes.
        validate_args: Also check values, outside ``jit``. Shapes are always checked.

    Raises:
        ValueError: If the last axis of ``utilities`` is not the number of classes, or less than 2,
            if ``u`` is given with all classes, or if ``noise`` is unknown; on ``log_prob``, if a
            value is out of range (under ``jit``, where values are not known, the log probability is
            then NaN). With a subset, the log probability of a value that is not among the labels
            given to the class plate is NaN; ``SubsampledSVI`` refuses such data.
        TypeError: On ``log_prob``, if the values are not integers.
        NotImplementedError: On ``sample`` with a subset or a chunk of the classes.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_largecat as lc
        >>> d = lc.UtilityCategorical(jnp.log(jnp.array([1.0, 2.0, 5.0])))
        >>> jnp.exp(d.log_prob(jnp.arange(3))).round(3).tolist()
        [0.125, 0.25, 0.625]

    References:
        Ruiz, Titsias, Dieng and Blei, Augment and Reduce, ICML 2018, Eq. 4 (utilities) and Eq. 8
        (bound).
    """

    arg_constraints = {"utilities": constraints.real_vector}
    pytree_data_fields = ("utilities", "classes", "u")
    pytree_aux_fields = ("noise",)
    has_enumerate_support = True

    def __init__(
        self,
        utilities: ArrayLike,
        classes: ClassSubset | None = None,
        noise: str = "gumbel",
        *,
        u: ArrayLike | None = None,
        validate_args: bool | None = None,
    ) -> None:
        if noise not in NOISES:
            raise ValueError(f"`noise` must be one of {NOISES}; got {noise!r}.")
        utilities = jnp.asarray(utilities)
        if not jnp.issubdtype(utilities.dtype, jnp.floating):
            utilities = utilities.astype(jnp.result_type(float))
        least = 2 if classes is None else 1
        if utilities.ndim < 1 or utilities.shape[-1] < least:
            raise ValueError(
                f"`utilities` must have the classes, at least {least}, on its last axis; "
                f"got shape {utilities.shape}."
            )
        if classes is not None:
            _check_classes(classes, utilities.shape)
            if classes.kind == "full":
                classes = None
        if u is not None and (classes is None or classes.kind != "sample"):
            raise ValueError(
                "`u` belongs to the bound on a subset of classes; with all classes the log "
                "probability is exact and needs none."
            )
        u_shape = () if u is None else jnp.shape(u)
        try:
            batch_shape = lax.broadcast_shapes(utilities.shape[:-1], u_shape)
        except ValueError:
            raise ValueError(
                "`u` must have one entry for each observation, a shape that broadcasts with "
                f"utilities.shape[:-1]; got u.shape={u_shape} and "
                f"utilities.shape={utilities.shape}."
            ) from None
        self.utilities = utilities
        self.classes = classes
        self.noise = noise
        self.u = None if u is None else jnp.asarray(u)
        super().__init__(batch_shape=batch_shape, validate_args=validate_args)

    @property
    def num_categories(self) -> int:
        """Number of classes K."""
        return self.utilities.shape[-1] if self.classes is None else self.classes.num_categories

    @constraints.dependent_property(is_discrete=True, event_dim=0)
    def support(self) -> constraints.Constraint:
        """Integers in [0, K)."""
        return constraints.integer_interval(0, self.num_categories - 1)

    def log_prob(self, value: ArrayLike, intermediates: Any = None) -> Array:
        """Exact log probability, or the bound's estimate, of each class in ``value``."""
        del intermediates
        self._refuse_chunk("log_prob", "Sum over the chunks with `lc.predict_choice`.")
        self._check_value(value)
        return _log_prob(self, value)

    def optimal_u(self, value: ArrayLike) -> Array:
        r"""Return log eta_hat of ``value``, the u that is best for this subset of classes.

        Shapes: the broadcast of ``value``'s shape and ``batch_shape``.

        Cost: O(M) per observation.
        """
        return _optimal_u(self, value)

    def label_utility(self, value: ArrayLike) -> Array:
        """Return the utility of each class in ``value``, shape as ``optimal_u``.

        Cost: O(M) per observation.
        """
        return _label_utility(self, value)

    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        """Draw classes as the arg max of noisy utilities, chunk of classes by chunk."""
        if self.classes is not None:
            raise NotImplementedError(
                "UtilityCategorical cannot draw a class from a subset of the classes. Evaluate the "
                "model with all of them: leave `num_sampled` out of the class plate, or wrap the "
                'model in `lc.class_chunk(model, name="...", start=0, size=num_categories)`.'
            )
        return gumbel_max(key, self.utilities, sample_shape)

    def enumerate_support(self, expand: bool = True) -> Array:
        """All classes, shape (K, 1, ..., 1), or (K,) + batch_shape if ``expand``."""
        if self.classes is not None:
            raise NotImplementedError(
                "UtilityCategorical on a subset of classes cannot be enumerated: a class outside "
                "the subset has no utility. Use a full class plate."
            )
        values = jnp.arange(self.num_categories).reshape((-1,) + (1,) * len(self.batch_shape))
        return jnp.broadcast_to(values, values.shape[:1] + self.batch_shape) if expand else values

    def entropy(self) -> Array:
        """Entropy in nats, shape ``batch_shape``; all classes are needed."""
        if self.classes is not None:
            raise NotImplementedError("The entropy needs all classes; use a full class plate.")
        log_probs = jax.nn.log_softmax(self.utilities, axis=-1)
        return -(jnp.exp(log_probs) * log_probs).sum(axis=-1)

    def _check_value(self, value: ArrayLike) -> None:
        """Refuse values that are not integers or out of range."""
        check_integers("value", value)
        check_in_range("`value`", value, self.num_categories, "classes")

    def _is_known(self, value: ArrayLike) -> Array:
        value = widen(value)
        if self.classes is None:
            return (value >= 0) & (value < self.num_categories)
        labels = self._labels
        rows = jnp.searchsorted(labels, value)
        found = labels[jnp.minimum(rows, labels.shape[0] - 1)] == value
        return found & (value >= 0) & (value < self.num_categories)

    @property
    def _labels(self) -> Array:
        assert self.classes is not None and self.classes.labels is not None
        return self.classes.labels

    def _align(self, value: ArrayLike) -> tuple[Array, Array]:
        """Broadcast values and utilities to common leading axes."""
        shape = lax.broadcast_shapes(jnp.shape(value), self.batch_shape)
        utilities = jnp.broadcast_to(self.utilities, shape + self.utilities.shape[-1:])
        return jnp.broadcast_to(widen(value), shape), utilities

    def _refuse_chunk(self, what: str, fix: str) -> None:
        if self.classes is not None and self.classes.kind == "chunk":
            raise NotImplementedError(
                f"{what} needs all classes, but the class plate holds a chunk of them. {fix}"
            )


def _check_classes(classes: ClassSubset, shape: tuple[int, ...]) -> None:
    if not isinstance(classes, ClassSubset):
        raise TypeError(
            "`classes` must be what `with lc.class_plate(...) as classes` gives; "
            f"got {type(classes).__name__}."
        )
    if shape[-1] != classes.indices.shape[-1]:
        raise ValueError(
            "`utilities` must have one column for each row of the class plate, "
            f"{classes.indices.shape[-1]}, on its last axis; got shape {shape}."
        )
    if classes.labels is not None and classes.labels.shape[0] == 0:
        raise ValueError(
            "`classes` holds no labels, so the likelihood of an observation would lack its own "
            "class. Give them to the plate, `class_plate(..., labels=y)`; to predict without "
            "labels, use `lc.predict_choice` with the name of that plate."
        )


def base_distribution(fn: Any) -> Any:
    """Return the distribution under those that expand, mask or reinterpret it."""
    while hasattr(fn, "base_dist"):
        fn = fn.base_dist
    return fn


@jax.jit
def _log_prob(choice: UtilityCategorical, value: Array) -> Array:
    if choice.u is None:
        log_prob = -_optimal_u(choice, value)
    else:
        log_prob = softmax_bound(_optimal_u(choice, value), choice.u)
    return jnp.where(choice._is_known(value), log_prob, jnp.nan)


@jax.jit
def _optimal_u(choice: UtilityCategorical, value: Array) -> Array:
    value, utilities = choice._align(value)
    if choice.classes is None:
        return log_eta_hat(utilities, value, jnp.ones(utilities.shape[-1], utilities.dtype))
    rows = jnp.searchsorted(choice._labels, value)
    return log_eta_hat(utilities, rows, choice.classes.weights)


@jax.jit
def _label_utility(choice: UtilityCategorical, value: Array) -> Array:
    value, utilities = choice._align(value)
    rows = value if choice.classes is None else jnp.searchsorted(choice._labels, value)
    return take_row(utilities, rows)
