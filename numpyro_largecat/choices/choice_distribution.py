# SPDX-License-Identifier: Apache-2.0
"""What all distributions over a choice share: utilities, a subset of classes, the label's place."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array, lax
from jax.typing import ArrayLike
from numpyro.distributions import constraints

from numpyro_largecat._checks import (
    check_in_range,
    check_integers,
    check_shape,
    is_concrete,
    refuse_entries,
)
from numpyro_largecat._conversions import as_float_array, as_ids, as_jax_array
from numpyro_largecat.choices.error_families import GUMBEL, ErrorFamily
from numpyro_largecat.handlers.sites import Site, base_distribution
from numpyro_largecat.ops.softmax_bound import take_row
from numpyro_largecat.plates.class_subset import ClassSubset, check_class_subset


class _UtilityVector(constraints.ParameterFreeConstraint):
    """Vectors of numbers below +inf; -inf is the utility of a class that is not available."""

    event_dim = 1

    def __call__(self, x: Any) -> Any:
        return _are_below_inf(x)


@jax.jit
def _are_below_inf(x: ArrayLike) -> Array:
    return ((x == x) & (jnp.asarray(x) < math.inf)).all(axis=-1)


utility_vector = _UtilityVector()


class ChoiceDistribution(dist.Distribution):
    """Base of distributions over K classes that are given by utilities of all or some of them.

    A subclass defines ``_log_prob(value)``, most often with ``competitors``. It lists arrays of its
    own, with one entry for each observation, in ``pytree_data_fields``, and passes them to this
    constructor as ``local``. What it computes must be linear in the weights, so that its mean over
    subsets is its value on all classes. ``num_categories`` is K.

    ``noise`` is the family of the errors whose choice the distribution describes or bounds; what
    reads a fit computes exact probabilities with it. A bound of another model than the softmax sets
    it, as an attribute of the class or of the object.

    Args:
        utilities: Utilities psi in nats, shape (..., K), or (..., M) for ``classes``; -inf for a
            class that is not available.
        classes: What ``with class_plate(...) as classes`` gives. None for all classes.
        local: Arrays with one entry for each observation, shape (...), by name, kept as attributes.
        validate_args: Also check values, outside ``jit``. Shapes are always checked.

    Raises:
        ValueError: If shapes do not fit.
        TypeError: If ``classes`` are not those of a class plate.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_largecat as lc
        >>> class Margin(lc.choices.ChoiceDistribution):
        ...     def _log_prob(self, value):
        ...         distances, weights = self.competitors(value)
        ...         return -(weights * jnp.maximum(0, 1 - distances)).sum(axis=-1)
        >>> Margin(jnp.array([0.0, 3.0, 0.5])).log_prob(0).item()  # -(0 + 4 + 1.5)
        -5.5
    """

    arg_constraints = {"utilities": utility_vector}
    pytree_data_fields: tuple[str, ...] = ("utilities", "classes")
    pytree_aux_fields: tuple[str, ...] = ()
    noise: ErrorFamily = GUMBEL

    def __init__(
        self,
        utilities: ArrayLike,
        classes: ClassSubset | None = None,
        *,
        local: dict[str, ArrayLike | None] | None = None,
        validate_args: bool | None = None,
    ) -> None:
        utilities = as_float_array(utilities)
        least = 2 if classes is None else 1
        check_shape("`utilities`", utilities, (..., "K"), "the classes last", least=least)
        if classes is not None:
            _check_classes(classes, utilities)
            utilities = classes.without_labels(utilities)
            if classes.kind == "full":
                classes = None
        batch_shape = utilities.shape[:-1]
        for name, value in (local or {}).items():
            batch_shape = _with_local(name, value, batch_shape, utilities.shape)
            setattr(self, name, None if value is None else as_jax_array(value))
        self.utilities = utilities
        self.classes = classes
        if self._validate_args if validate_args is None else validate_args:
            _check_numbers(utilities)
        super().__init__(batch_shape=batch_shape, validate_args=validate_args)

    @property
    def num_categories(self) -> int:
        """Number of classes K."""
        return self.utilities.shape[-1] if self.classes is None else self.classes.num_categories

    @property
    def is_estimate(self) -> bool:
        """Whether log densities are estimates, by a sample of the classes."""
        return self.classes is not None and self.classes.kind == "sample"

    @constraints.dependent_property(is_discrete=True, event_dim=0)
    def support(self) -> constraints.Constraint:
        """Integers in [0, K)."""
        return constraints.integer_interval(0, self.num_categories - 1)

    def log_prob(self, value: ArrayLike, intermediates: Any = None) -> Array:
        """Log probability, or its bound or estimate, of each class in ``value``."""
        del intermediates
        if self.classes is not None and self.classes.is_part:
            fix = "Read the fit by `lc.Fitted(...).on(x).log_likelihood(y)`."
            raise self._needs_all("log_prob", fix)
        check_integers("value", value)
        check_in_range("`value`", value, self.num_categories, "classes")
        return _known_log_prob(self, as_ids(value))

    def label_entries(self, value: ArrayLike) -> tuple[Array, Array]:
        """Return utilities, and for each class in ``value`` its place on their last axis.

        Shapes: utilities (..., M) and places (...), with the broadcast of ``value``'s shape and
        ``batch_shape`` in front.
        """
        shape = lax.broadcast_shapes(jnp.shape(value), self.batch_shape)
        utilities = jnp.broadcast_to(self.utilities, shape + self.utilities.shape[-1:])
        value = jnp.broadcast_to(as_ids(value), shape)
        return utilities, value if self.classes is None else self.classes.place(value)

    def competitors(self, value: ArrayLike) -> tuple[Array, Array]:
        """Return how far the class in ``value`` is above each other one, and the others' weights.

        A class of weight 0, among them the class in ``value`` itself, has distance 0. Where the
        class in ``value`` is not available the distances mean nothing, but are finite.

        Shapes: both (..., M), with the broadcast of ``value``'s shape and ``batch_shape`` in front.
        """
        utilities, rows = self.label_entries(value)
        own = take_row(utilities, rows)[..., None]
        own = jnp.where(own > -jnp.inf, own, 0)
        weights = jnp.asarray(1.0) if self.classes is None else self.classes.weights
        is_other = jnp.arange(utilities.shape[-1]) != rows[..., None]
        weights = jnp.where(is_other, weights, 0).astype(utilities.dtype)
        counts = (weights != 0) & (utilities > -jnp.inf)  # -inf is a class that is not available
        distances = jnp.where(counts, own - jnp.where(counts, utilities, 0), 0)
        return distances, jnp.where(counts, weights, 0)

    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        """Refuse to draw from a bound or an estimate."""
        del key, sample_shape
        raise NotImplementedError(
            f"{type(self).__name__} is no distribution to draw from. Draw choices from "
            "`lc.UtilityCategorical(utilities, noise=...)`, with all classes, or from a fit by "
            "`lc.Fitted(...).on(x).draw_choices(rng_key=key)`."
        )

    def _log_prob(self, value: Array) -> Array:
        raise NotImplementedError

    def _is_known(self, value: ArrayLike) -> Array:
        value = as_ids(value)
        valid = (value >= 0) & (value < self.num_categories)
        if self.classes is None:
            return valid
        return valid & self.classes.holds(value) & ~jnp.isnan(self.classes.weights).any()

    def _is_available(self, value: Array) -> Array:
        return take_row(*self.label_entries(value)) > -jnp.inf

    def _needs_all(
        self, what: str, fix: str = "Leave `num_sampled` out of the class plate."
    ) -> NotImplementedError:
        return NotImplementedError(
            f"{what} needs all classes, and the class plate holds some of them. {fix}"
        )


def _check_numbers(utilities: Array) -> None:
    """Refuse NaN and +inf, and say where; tracers pass."""
    if is_concrete(utilities):
        need = "numbers, or -inf for a class that is not available"
        fix = (
            "What the model computes is not finite there, as of a value that starts at an infinite "
            "mean, `init_to_mean` of a HalfCauchy (take `init_to_feasible`), or the direction of a "
            "row that starts at 0: `w / sqrt((w**2).sum(-1, keepdims=True) + 1e-6)`."
        )
        bad = ~(np.asarray(utilities) < math.inf)  # also inside of `jit`, where JAX's are traced
        refuse_entries("utilities", utilities, bad, need, fix)


def _check_classes(classes: ClassSubset, utilities: Array) -> None:
    check_class_subset(classes)
    if classes.labels is not None and classes.labels.shape[0] == 0:
        raise ValueError(
            "`classes` holds no labels, so a likelihood would lack the class observed. Give "
            "them to the plate, `class_plate(..., labels=y)`; to predict without labels use "
            "`lc.Fitted(...).on(x).draw_choices(rng_key=key)`; to draw from the prior leave "
            "`num_sampled` out."
        )
    need = "one column for each row of the class plate"
    if classes.negatives != "batch":
        need = "the label and its negatives, as `classes.utilities(lambda x, w: x @ w, (x,), (w,))`"
    if classes.reads is not None:
        need += " but those only read, as of `classes.scored(w)`"
    check_shape("`utilities`", utilities, (..., classes.weights.shape[-1]), need)


def _with_local(
    name: str, value: ArrayLike | None, batch_shape: tuple[int, ...], utilities: tuple[int, ...]
) -> tuple[int, ...]:
    shape = () if value is None else jnp.asarray(value).shape
    try:
        return lax.broadcast_shapes(batch_shape, shape)
    except ValueError:
        need = f"a shape that broadcasts with utilities.shape[:-1], {utilities[:-1]}"
        raise ValueError(f"`{name}` must have {need}; got shape {shape}.") from None


def is_choice(site: Site) -> bool:
    """Whether a message, or a site of a trace, is of a choice."""
    return site["type"] == "sample" and isinstance(
        base_distribution(site["fn"]), ChoiceDistribution
    )


@jax.jit
def _known_log_prob(choice: ChoiceDistribution, value: Array) -> Array:
    log_prob = jnp.where(choice._is_available(value), choice._log_prob(value), -jnp.inf)
    return jnp.where(choice._is_known(value), log_prob, jnp.nan)
