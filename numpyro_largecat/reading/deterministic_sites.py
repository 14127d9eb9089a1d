# SPDX-License-Identifier: Apache-2.0
"""Deterministic sites of a model at draws of its latent sites, of the rows that are shown."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any
from zlib import crc32

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro.distributions.transforms import biject_to
from numpyro.primitives import Messenger

from numpyro_largecat.handlers.chosen_rows import hold_rows
from numpyro_largecat.handlers.closed_over_arrays import compiled
from numpyro_largecat.handlers.distinct_rows import PRIME, scattered
from numpyro_largecat.handlers.sites import axes_after_plates, is_latent
from numpyro_largecat.handlers.static_result import static_result
from numpyro_largecat.ops.differing_columns import differing_columns
from numpyro_largecat.reading.bound_fit import BoundFit
from numpyro_largecat.reading.model_layout import LatentSite, ModelLayout

CHOSEN = ("classes", "entities")  # kinds of plates that can hold any rows
FAR = 12.0  # free coordinates of rows that are added
# Of runs that must give the same: spread and centre of what is not shown, and signs of such rows.
LOOKS = ((1.0, 0.0, ()), (3.0, 5.0, (1, 1, -1)), (0.5, -5.0, (-1, -1, 1)))
Drawn = dict[str, LatentSite]


class _AllSeen(Exception):
    """No statement is left that anyone asks for."""


class _record(Messenger):
    """Keep deterministic sites, and leave the model when those that are named are there."""

    def __init__(self, fn: Any, found: Drawn, names: set[str] | None) -> None:
        self.found = found
        self.names = names
        super().__init__(fn)

    def postprocess_message(self, msg: dict[str, Any]) -> None:
        """Keep the value, with its plates."""
        name = msg["name"]
        if msg["type"] != "deterministic" or (self.names is not None and name not in self.names):
            return
        if isinstance(msg["value"], (Array, np.ndarray)):
            event_dim, frames = axes_after_plates(msg), list(msg["cond_indep_stack"])
            if event_dim >= 0:
                self.found[name] = LatentSite(frames, event_dim, msg["value"])
        if self.names is not None and self.names <= self.found.keys():
            raise _AllSeen


class Scattered(Messenger):
    """Give latent sites values: those that are shown, and others that are all different.

    Args:
        fn: The model.
        given: Values of sites, of the rows that are shown.
        look: Which of ``LOOKS`` the others are of.
        part: Plates that hold rows besides, before those shown, as many as ``look`` has signs.
    """

    def __init__(self, fn: Any, given: dict[str, Any], look: int, part: set[str]) -> None:
        self.given = given
        self.look = look
        self.part = part
        super().__init__(fn)

    def process_message(self, msg: dict[str, Any]) -> None:
        """Give a value, where it is continuous."""
        if not is_latent(msg) or msg["fn"].support.is_discrete:
            return
        name, fn = msg["name"], msg["fn"]
        frames = [f for f in msg["cond_indep_stack"] if f.name in self.part]
        axes = {frame.dim + len(fn.batch_shape) for frame in frames}
        if name in self.given and not axes:
            msg["value"] = self.given[name]
            return
        spread, centre, signs = LOOKS[self.look]
        transform = biject_to(fn.support)
        shape = transform.inverse_shape(fn.shape(msg["kwargs"].get("sample_shape", ())))
        integers = jnp.arange(math.prod(shape), dtype=jnp.uint32).reshape(shape)
        salt = np.uint32(crc32(f"{name} {self.look}".encode()) % PRIME)
        free = centre + spread * scattered(613 * integers + salt)
        value = transform(_with_ends(free, axes, signs))
        if name in self.given:
            shown = [slice(None)] * value.ndim
            for axis in axes:
                shown[axis] = slice(len(signs), None)
            value = value.at[tuple(shown)].set(self.given[name])
        msg["value"] = value


def _with_ends(free: Array, axes: set[int], signs: tuple[int, ...]) -> Array:
    """With the first rows along some axes far above all others, or far below."""
    for axis in axes:
        others = [i for i in range(free.ndim) if i != axis]
        row = jnp.expand_dims(jnp.arange(free.shape[axis]), others)
        for place, sign in enumerate(signs):
            free = jnp.where(row == place, sign * FAR, free)
    return free


@dataclass(frozen=True)
class DeterministicSites:
    """Those that the rows shown are enough to know.

    A site is left out if it is in a plate that is not shown, or in one of data; if it changes with
    rows or latent values that are not shown; or if the model reads rows by id before it, from a
    plate whose rows are chosen.

    Attributes:
        fit: The fit, on arguments of its model.
        layout: Its plates and latent sites.
        ids: Rows of class and entity plates, which are chosen.
        whole: Other plates, which the model opens whole and of which all rows are shown.
        names: Names of the sites.
    """

    fit: BoundFit
    layout: ModelLayout
    ids: dict[str, Array]
    whole: frozenset[str]
    names: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls,
        fit: BoundFit,
        layout: ModelLayout,
        ids: Mapping[str, Array],
        draw: Callable[[Array], Drawn],
        key: Array,
    ) -> DeterministicSites:
        """Look which sites there are, with the draw ``draw`` of a key.

        Cost: four runs of the model.
        """
        whole = {n for n in layout.whole & ids.keys() if len(ids[n]) == layout.sizes[n]}
        chosen = {n: rows for n, rows in ids.items() if layout.kinds.get(n) in CHOSEN}
        none = cls(fit, layout, chosen, frozenset(whole))
        if not layout.has_deterministic:
            return none
        seen = static_result(lambda: none.values(draw(key), names=None))
        in_frames = {frame.name for site in seen.values() for frame in site.frames}
        found = replace(none, ids={name: chosen[name] for name in in_frames & chosen.keys()})
        is_known = compiled(lambda key: found.known(draw(key)))(key)
        return replace(found, names=frozenset(name for name, known in is_known.items() if known))

    def values(
        self,
        drawn: Drawn,
        *,
        names: frozenset[str] | None,
        look: int = 0,
        part: Set[str] = frozenset(),
    ) -> Drawn:
        """The sites at these draws; all other latent values are made up, in one of ``LOOKS``.

        The plates ``part`` hold more rows than are drawn.
        """
        if names is not None and not names:
            return {}
        held = self.ids.keys() | self.whole
        given = {n: site.value for n, site in drawn.items() if site.axes().keys() <= held}
        found: Drawn = {}

        def around(fn: Any) -> Any:
            fn = hold_rows(Scattered(fn, given, look, set(part)), rows=self.ids)
            return _record(self.layout.around(fn), found, None if names is None else set(names))

        with suppress(Exception):  # what ends the run, as rows that are read, changes none of these
            self.fit.sites(self.layout.model, around=around, rng_key=look)
        return found

    def known(self, drawn: Drawn) -> dict[str, Array]:
        """Whether each site is the same with more rows, and with other values elsewhere."""
        sizes = self.layout.sizes
        numbers = sizes | {plate: len(rows) for plate, rows in self.ids.items()}
        part = {name for name, rows in self.ids.items() if len(rows) < sizes[name]}
        first = self.values(drawn, names=None)
        known = {}
        for name, site in first.items():
            axes, shape = site.axes(), site.value.shape
            if axes.keys() <= self.ids.keys() | self.whole:
                if all(shape[axis] == numbers[plate] for plate, axis in axes.items()):
                    known[name] = jnp.array(True)
        for look in range(1, len(LOOKS)):
            num_more = len(LOOKS[look][2])
            ids = {n: _with_others(self.ids[n], num_more, sizes[n]) for n in part}
            wider = replace(self, ids=self.ids | ids)
            again = wider.values(drawn, names=None, look=look, part=part)
            for name in list(known):
                site = first[name]
                shown = again.get(name)
                value = None if shown is None else _without_more(shown, part, num_more)
                if value is None or value.shape != site.value.shape:
                    del known[name]
                else:
                    known[name] &= ~_differ(site.value, value)
        return known


def _without_more(site: LatentSite, part: set[str], num_more: int) -> Array:
    value = site.value
    for plate in site.axes().keys() & part:
        axis = value.ndim + site.axes()[plate]
        value = jax.lax.slice_in_dim(value, min(num_more, value.shape[axis]), None, axis=axis)
    return jnp.asarray(value)


def _differ(a: Array, b: Array) -> Array:
    if not jnp.issubdtype(a.dtype, jnp.floating):
        return (a != b).any()
    return differing_columns(a.reshape(1, -1), b.reshape(1, -1)).any()


def _with_others(ids: Array, number: int, size: int) -> Array:
    """The least ``number`` rows that are not among some, and these; where there are so many."""
    places = jnp.arange(len(ids) + number)
    others = jnp.argsort(jnp.isin(places, ids) | (places >= size), stable=True)[:number]
    return jnp.concatenate([others.astype(ids.dtype), ids])
