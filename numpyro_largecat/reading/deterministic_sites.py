# SPDX-License-Identifier: Apache-2.0
"""Deterministic sites of a model at draws of its latent sites, of the rows that are shown."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro.handlers import substitute
from numpyro.primitives import Messenger

from numpyro_largecat.handlers.chosen_rows import hold_rows
from numpyro_largecat.handlers.closed_over_arrays import compiled
from numpyro_largecat.handlers.run_model import at_feasible_values
from numpyro_largecat.handlers.static_result import static_result
from numpyro_largecat.ops.differing_columns import differing_columns
from numpyro_largecat.reading.bound_fit import BoundFit
from numpyro_largecat.reading.model_layout import LatentSite, ModelLayout

CHOSEN = ("classes", "entities")  # kinds of plates that can hold any rows
ELSEWHERE = 0.7  # a free coordinate of latent values that are not shown
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
        name, frames = msg["name"], msg.get("cond_indep_stack", [])
        if msg["type"] != "deterministic" or (self.names is not None and name not in self.names):
            return
        if isinstance(msg["value"], (Array, np.ndarray)):
            num_batch = max((-frame.dim for frame in frames), default=0)
            event_dim = jnp.ndim(msg["value"]) - num_batch
            if event_dim >= 0:
                self.found[name] = LatentSite(list(frames), event_dim, msg["value"])
        if self.names is not None and self.names <= self.found.keys():
            raise _AllSeen


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
        keys: tuple[Array, Array],
    ) -> DeterministicSites:
        """Look which sites there are, with the draws ``draw`` of two keys.

        Cost: two runs of the model.
        """
        whole = {n for n in layout.whole & ids.keys() if len(ids[n]) == layout.sizes[n]}
        chosen = {n: rows for n, rows in ids.items() if layout.kinds.get(n) in CHOSEN}
        none = cls(fit, layout, chosen, frozenset(whole))
        if not layout.has_deterministic:
            return none
        seen = static_result(lambda: none.values(draw(keys[0]), names=None))
        in_frames = {frame.name for site in seen.values() for frame in site.frames}
        found = replace(none, ids={name: chosen[name] for name in in_frames & chosen.keys()})
        is_known = compiled(partial(found.known, draw))(*keys)
        return replace(found, names=frozenset(name for name, known in is_known.items() if known))

    def values(self, drawn: Drawn, *, names: frozenset[str] | None, place: float = 0.0) -> Drawn:
        """The sites at these draws; latent values that are not among them are at ``place``."""
        if names is not None and not names:
            return {}
        held = self.ids.keys() | self.whole
        given = {
            name: site.value
            for name, site in drawn.items()
            if {f.name for f in site.frames} <= held
        }
        found: Drawn = {}

        def around(fn: Any) -> Any:
            fn = substitute(at_feasible_values(fn, place), data=given)
            fn = self.layout.around(hold_rows(fn, rows=self.ids))
            return _record(fn, found, None if names is None else set(names))

        with suppress(Exception):  # what ends the run, as rows that are read, changes none of these
            self.fit.sites(self.layout.model, around=around)
        return found

    def known(self, draw: Callable[[Array], Drawn], key: Array, other: Array) -> dict[str, Array]:
        """Whether each site is the same with one row more, and with other values elsewhere."""
        drawn, more = draw(key), draw(other)
        sizes = self.layout.sizes
        part = {name for name, rows in self.ids.items() if len(rows) < sizes[name]}
        extra = {name: _not_among(self.ids[name]) for name in part}
        ids = self.ids | {n: jnp.concatenate([extra[n][None], self.ids[n]]) for n in part}
        with_more = {name: _with_row(site, more[name], part) for name, site in drawn.items()}
        first = self.values(drawn, names=None)
        second = replace(self, ids=ids).values(with_more, names=None, place=ELSEWHERE)
        known = {}
        for name, site in first.items():
            axes = site.axes()
            if not axes.keys() <= ids.keys() | self.whole or name not in second:
                continue
            again = second[name].value
            for plate in axes.keys() & part:
                again = jax.lax.slice_in_dim(again, 1, None, axis=again.ndim + axes[plate])
            numbers = sizes | {plate: len(rows) for plate, rows in self.ids.items()}
            has_rows = all(site.value.shape[axis] == numbers[n] for n, axis in axes.items())
            if has_rows and again.shape == site.value.shape:
                known[name] = ~_differ(site.value, again)
        return known


def _differ(a: Array, b: Array) -> Array:
    if not jnp.issubdtype(a.dtype, jnp.floating):
        return (a != b).any()
    return differing_columns(a.reshape(1, -1), b.reshape(1, -1)).any()


def _not_among(ids: Array) -> Array:
    """The least row that is not among some."""
    places = jnp.arange(len(ids) + 1)
    return places[jnp.argmin(jnp.isin(places, ids))].astype(ids.dtype)


def _with_row(site: LatentSite, other: LatentSite, plates: set[str]) -> LatentSite:
    """With the first row of another draw in front, along the axes of these plates."""
    value, more = jnp.asarray(site.value), jnp.asarray(other.value)
    for plate, axis in site.axes().items():
        if plate in plates:
            axis += value.ndim
            front = jax.lax.slice_in_dim(more, 0, 1, axis=axis)
            value = jnp.concatenate([front, value], axis=axis)
            more = jnp.concatenate([front, more], axis=axis)
    return site._replace(value=value)
