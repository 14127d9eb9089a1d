# SPDX-License-Identifier: Apache-2.0
r"""Factors of the covariances of rows of classes, of which each site may follow those before it.

Of the values of a row, those of site s are

.. math:: \theta_s = \mu_s + \sum_{t < s} B_{st} (\theta_t - \mu_t) + F_s \epsilon_s, \qquad
          \epsilon_s \sim N(0, I)

in the guide, so all together are :math:`\mu + G \epsilon` with the rows of G

.. math:: G_s = [0, \ldots, F_s, \ldots, 0] + \sum_{t < s} B_{st} G_t .
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

from numpyro_largecat.guides.correlated_normal import CorrelatedNormal
from numpyro_largecat.handlers.sites import Site, unwrapped

ValuesBySite = dict[str, Array]  # of some rows by site


def by_row(values: Array, site: Site, plate: str) -> Array:
    """Values of the shape of a site with its rows of the class plate first, shape (M, P)."""
    (frame,) = (frame for frame in site["cond_indep_stack"] if frame.name == plate)
    rows_first = jnp.moveaxis(values, frame.dim - site["fn"].event_dim, 0)
    return rows_first.reshape(rows_first.shape[0], -1)


def of_site(values: Array, site: Site, plate: str) -> Array:
    """The same (M, P) as values of the shape of the site."""
    (frame,) = (frame for frame in site["cond_indep_stack"] if frame.name == plate)
    axis, shape = frame.dim - site["fn"].event_dim, list(jnp.shape(site["value"]))
    num_rows = shape.pop(axis)
    return jnp.moveaxis(values.reshape(num_rows, *shape), 0, axis)


def own_factor(site: Site, plate: str) -> Array:
    """Factors F of the covariances of a site's values given those before it, (M, P_s, P_s)."""
    fn = unwrapped(site["fn"])
    if not isinstance(fn, CorrelatedNormal):
        sds = by_row(jnp.sqrt(site["fn"].variance), site, plate)
        return sds[..., None] * jnp.eye(sds.shape[1], dtype=sds.dtype)
    scale = by_row(fn.scale, site, plate)
    lower = fn.lower.matrix.reshape(-1, scale.shape[1], scale.shape[1])
    return scale[..., None] * (lower + jnp.eye(scale.shape[1], dtype=lower.dtype))


def row_factors(
    own: ValuesBySite, means_at: Callable[[ValuesBySite], ValuesBySite], centre: ValuesBySite
) -> Array:
    """Factors G of the covariances of all values of rows, sites one after the other, (M, P, P).

    Cost: O(P^3) for each row if it has several sites, and P evaluations of ``means_at``.

    Args:
        own: Factors F by site, in the order in which they are drawn.
        means_at: The means of sites given the values of those before them, in which they are
            affine.
        centre: Any values (M, P_s) of these.
    """
    size = sum(factor.shape[1] for factor in own.values())
    _, change = jax.linearize(means_at, centre)
    before: list[str] = []
    factors = None
    for name, factor in own.items():
        first, width = (0 if factors is None else factors.shape[1]), factor.shape[1]
        found = jnp.pad(factor, [(0, 0), (0, 0), (first, size - first - width)])
        if factors is None:
            factors = found
        else:
            follows = _derivatives(change, centre, before, name)
            found += jnp.matmul(follows, factors, precision=lax.Precision.HIGHEST)
            factors = jnp.concatenate([factors, found], axis=1)
        before.append(name)
    assert factors is not None
    return factors


def _derivatives(
    change: Callable[[ValuesBySite], ValuesBySite],
    centre: ValuesBySite,
    before: list[str],
    name: str,
) -> Array:
    """Derivatives B of the mean of one site in the values of those before it, (M, P_s, P_<s)."""

    def along(entry: Array, moved: str) -> Array:
        still = {other: jnp.zeros_like(values) for other, values in centre.items()}
        return change(still | {moved: jnp.broadcast_to(entry, centre[moved].shape)})[name]

    found = []
    for other in before:
        entries = jnp.eye(centre[other].shape[1], dtype=centre[other].dtype)
        found.append(jax.vmap(partial(along, moved=other), out_axes=-1)(entries))
    return jnp.concatenate(found, axis=-1)


def variances(slopes: Sequence[Array], factors: Array) -> Array:
    """Of what has these slopes (..., P_s) in the values of rows with these factors: (..., M).

    They are sums of squares, so that few digits cancel where values are nearly dependent. Cost:
    O(P^2) for each, in P products of matrices.
    """
    joined = jnp.concatenate(slopes, axis=-1)

    def add(total: Array, of_noise: Array) -> tuple[Array, None]:
        sds = jnp.matmul(joined, of_noise.T, precision=lax.Precision.HIGHEST)
        return total + sds**2, None

    nothing = jnp.zeros((*joined.shape[:-1], len(factors)), jnp.result_type(joined, factors))
    return lax.scan(add, nothing, jnp.moveaxis(factors, 2, 0))[0]
