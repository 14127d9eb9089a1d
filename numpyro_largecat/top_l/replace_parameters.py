# SPDX-License-Identifier: Apache-2.0
"""Copy a batch of distributions with other parameters, such as those of some components alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array
from numpyro.distributions import constraints, transforms
from numpyro.distributions.distribution import (
    ExpandedDistribution,
    Independent,
    MaskedDistribution,
    TransformedDistribution,
)

from numpyro_largecat.handlers.internals import copy_transform, mask_of

Replace = Callable[[Array, int], Array]  # of a parameter and of how many axes it has in an event

# Axes of each parameter beyond those of what the transform is applied to.
TRANSFORM_PARAMETERS: dict[type, dict[str, int]] = {
    transforms.AffineTransform: {"loc": 0, "scale": 0},
    transforms.PowerTransform: {"exponent": 0},
    transforms.LowerCholeskyAffine: {"loc": 0, "scale_tril": 1},
}
# Axes in an event of arrays that a distribution keeps besides its arguments.
DERIVED_ARRAYS = {(dist.LowRankMultivariateNormal, "_capacitance_tril"): 2}
# Their parts have other batch axes than they, or are hidden in a function.
UNEVEN = (dist.EulerMaruyama, dist.GaussianCopula, dist.MixtureSameFamily, dist.MixtureGeneral)


def replace_parameters(
    distribution: dist.Distribution, replace: Replace, batch_shape: tuple[int, ...]
) -> dist.Distribution:
    """Copy a distribution with ``replace(array, event_dim)`` in place of each of its parameters.

    The last ``event_dim`` axes of a parameter belong to one event, and what is before them
    broadcasts to the batch shape. The copy has the batch shape that is given; its parameters only
    have to broadcast to it. It does not check values.

    Args:
        distribution: Distribution, whose parameters are found as NumPyro declares them: by
            ``arg_constraints`` and ``pytree_data_fields``, inside of ``to_event``, ``expand``,
            ``mask`` and transforms too.
        replace: Function that makes the new parameters.
        batch_shape: Batch shape of the copy.

    Returns:
        The copy; ``expand`` is gone from it.

    Raises:
        NotImplementedError: If the distribution does not declare what it keeps, or not which axes
            of a parameter belong to an event.
    """
    return _distribution(distribution, replace, batch_shape, 0)


def _distribution(d: Any, replace: Replace, batch_shape: tuple[int, ...], inner: int) -> Any:
    """``inner`` counts the batch axes of ``d`` that are axes of an event further out."""
    if isinstance(d, ExpandedDistribution):
        return _distribution(d.base_dist, replace, batch_shape, inner)
    if isinstance(d, Independent):
        ndims = d.reinterpreted_batch_ndims
        base = _distribution(
            d.base_dist, replace, batch_shape + d.event_shape[:ndims], inner + ndims
        )
        return Independent(base, ndims, validate_args=False)
    if isinstance(d, MaskedDistribution):
        mask = mask_of(d)
        mask = mask if isinstance(mask, bool) else replace(mask, inner)
        return MaskedDistribution(_distribution(d.base_dist, replace, batch_shape, inner), mask)
    names = type(d).gather_pytree_data_fields(), type(d).gather_pytree_aux_fields()
    declared = {*names[0], *names[1]}
    undeclared = [n for n in d.__dict__ if n not in declared and not hasattr(type(d), n)]
    if undeclared:  # what the class has of that name is computed from the others, and cached
        raise _undeclared(d, f"declare its field `{undeclared[0]}`", undeclared[0])
    data, aux = (
        tuple(_field(d, n, value, replace, batch_shape, inner) for n, value in pairs)
        for pairs in map(zip, names, d.tree_flatten())
    )
    new = type(d).tree_unflatten(aux, data)
    dist.Distribution.__init__(new, batch_shape, d.event_shape, validate_args=False)
    return new


def _field(
    d: Any, name: str, value: Any, replace: Replace, batch_shape: tuple[int, ...], inner: int
) -> Any:
    if name == "transforms" and isinstance(d, TransformedDistribution):
        return _transforms(d, replace, inner)
    if isinstance(value, dist.Distribution):
        if isinstance(d, UNEVEN) or not type(d).__module__.startswith("numpyro.distributions."):
            raise cannot_take(d, f"its part `{name}`")
        return _distribution(value, replace, batch_shape, inner)
    if isinstance(value, constraints.Constraint):
        return jax.tree.map(lambda bound: replace(bound, inner), value)
    if all(jnp.ndim(leaf) == 0 for leaf in jax.tree.leaves(value) if hasattr(leaf, "ndim")):
        return value  # the same for all, or no parameter at all
    return replace(value, inner + _event_dim(d, name))


def _event_dim(d: Any, name: str) -> int:
    for (kind, derived), event_dim in DERIVED_ARRAYS.items():
        if isinstance(d, kind) and name == derived:
            return event_dim
    for kind in type(d).__mro__:  # a subclass may name its own arguments alone
        constraint = vars(kind).get("arg_constraints", {}).get(name)
        if constraint is not None:
            try:
                return int(constraint.event_dim)
            except NotImplementedError:
                break
    if not type(d).__module__.startswith("numpyro.distributions."):
        raise _undeclared(d, f"say which axes of its field `{name}` belong to an event", name)
    raise cannot_take(d, f"its field `{name}`")


def _undeclared(d: Any, lacks: str, name: str) -> NotImplementedError:
    return NotImplementedError(
        f"{type(d).__name__} does not {lacks}, so single components cannot be taken from it. Name "
        f"its arrays in the class's `arg_constraints = {{'{name}': constraints.real, ...}}`, with "
        "`constraints.real_vector` or the like where the last axis belongs to an event, and what "
        "is no array in `pytree_aux_fields`."
    )


def _transforms(d: Any, replace: Replace, inner: int) -> list[Any]:
    new, event_dim = [], d.base_dist.event_dim
    for transform in d.transforms:
        parameters = TRANSFORM_PARAMETERS.get(type(transform), {})
        leaves = jax.tree.leaves(transform)
        if not parameters and any(jnp.ndim(leaf) > 0 for leaf in leaves):
            raise cannot_take(d, f"the parameters of {type(transform).__name__}")
        arrays = {name: getattr(transform, name) for name in parameters}
        moved = {
            name: replace(array, inner + event_dim + parameters[name])
            for name, array in arrays.items()
            if jnp.ndim(array) > 0
        }
        new.append(copy_transform(transform, moved))
        event_dim += transform.codomain.event_dim - transform.domain.event_dim
    return new


def cannot_take(d: Any, what: str) -> NotImplementedError:
    """Return the error for distributions from which no single component can be taken."""
    return NotImplementedError(
        f"{type(d).__name__} does not say which axis of {what} runs over the components, so single "
        "components cannot be taken from it. Draw the component, `z = numpyro.sample('z', "
        "Categorical(...), infer={'enumerate': 'parallel'})`, and fit with `lc.TopL_ELBO`."
    )
