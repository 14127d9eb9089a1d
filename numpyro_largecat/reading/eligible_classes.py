# SPDX-License-Identifier: Apache-2.0
"""Which classes may be named for each observation, such as those that a user does not have yet."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from numpyro_largecat._checks import check_ids_or_none, check_integers, check_shape
from numpyro_largecat._conversions import NO_ID, as_ids_or_none


class EligibleClasses(NamedTuple):
    """Lists of classes for each observation, padded with -1; None for no such limit."""

    exclude: Array | None  # (..., R), never named
    among: Array | None  # (..., C), alone named

    @property
    def are_all(self) -> bool:
        """Whether every class may be named."""
        return self.exclude is None and self.among is None

    @property
    def num_listed(self) -> int:
        """Classes of the lists of each observation."""
        return sum(x.shape[-1] for x in (self.exclude, self.among) if x is not None)

    def of_ids(self, values: Array, ids: Array, num_categories: int) -> Array:
        """Values (..., P) of classes with these ids, of the same shape, as ``only`` has them.

        Cost: O(P) memory for each observation, and O(P (R + C)) time.
        """
        for lists, is_named in ((self.among, True), (self.exclude, False)):
            if lists is not None:
                values = jnp.where(_are_in(ids, lists) == is_named, values, -jnp.inf)
                values = jnp.where(_are_classes(lists, num_categories), values, jnp.nan)
        return values

    def only(self, values: Array, first: Array, num_categories: int) -> Array:
        """Values (..., M) of the classes from ``first`` on, -inf for those that may not be named.

        NaN for an observation one of whose lists holds what is no class, which tracers may.

        Cost: O(R + C) for each observation, and a copy of the values.
        """
        if self.among is not None:
            place = _places(self.among, first, values.shape[-1])
            own = jnp.take_along_axis(values, jnp.minimum(place, values.shape[-1] - 1), axis=-1)
            values = _put(jnp.full_like(values, -jnp.inf), place, own)
            values = jnp.where(_are_classes(self.among, num_categories), values, jnp.nan)
        if self.exclude is not None:
            place = _places(self.exclude, first, values.shape[-1])
            values = _put(values, place, jnp.full(place.shape, -jnp.inf, values.dtype))
            values = jnp.where(_are_classes(self.exclude, num_categories), values, jnp.nan)
        return values


def eligible_classes(
    exclude: ArrayLike | None,
    among: ArrayLike | None,
    batch_shape: tuple[int, ...],
    num_categories: int,
) -> EligibleClasses:
    """Check lists of classes, see ``Fitted.on(...).top_classes``."""

    def checked(name: str, lists: ArrayLike | None) -> Array | None:
        if lists is None:
            return None
        check_integers(name, lists)
        need = "a list of classes for each observation, padded with -1"
        check_shape(f"`{name}`", lists, (*batch_shape, "R"), need)
        check_ids_or_none(f"`{name}`", lists, num_categories, "classes")
        return as_ids_or_none(lists)

    return EligibleClasses(checked("exclude", exclude), checked("among", among))


def _are_classes(lists: Array, num_categories: int) -> Array:
    """Whether each list holds classes, and -1, alone, (..., 1)."""
    return ((lists >= NO_ID) & (lists < num_categories)).all(axis=-1, keepdims=True)


def _are_in(ids: Array, lists: Array) -> Array:
    """Whether classes (..., P) are in the list (..., R) of their observation."""

    def add(found: Array, listed: Array) -> tuple[Array, None]:
        return found | (ids == listed[..., None]), None

    return lax.scan(add, jnp.zeros(ids.shape, bool), jnp.moveaxis(lists, -1, 0))[0]


def _places(lists: Array, first: Array, size: int) -> Array:
    """Place of each class of a list among ``size`` classes from ``first`` on; else ``size``."""
    place = lists - first
    return jnp.where((lists >= 0) & (place >= 0) & (place < size), place, size)


def _put(values: Array, place: Array, own: Array) -> Array:
    """Put ``own`` (..., R) into values (..., M) where ``place`` is below M."""
    flat = values.reshape(-1, values.shape[-1])
    lists = (flat.shape[0], place.shape[-1])
    rows = jnp.arange(lists[0])[:, None]
    return (
        flat.at[rows, place.reshape(lists)]
        .set(own.reshape(lists), mode="drop")
        .reshape(values.shape)
    )
