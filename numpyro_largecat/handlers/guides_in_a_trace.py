# SPDX-License-Identifier: Apache-2.0
"""Automatic guides that learn their model while a program is traced: nothing of it may stay."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro.infer.autoguide import AutoDelta, AutoGuide, AutoGuideList, AutoNormal

from numpyro_largecat.handlers.automatic_guides import all_parts, guide_parts
from numpyro_largecat.handlers.internals import LetGo, let_go, take_back

_Attached = Callable[[list[Array]], Any]  # a value with these arrays in place of traced ones
OF_START_VALUES = (AutoDelta, AutoGuideList, AutoNormal)  # they keep no other arrays


def may_learn_in_a_trace(guide: Any) -> bool:
    """Whether ``Learned`` takes all that a guide, and each part of it, keeps of a trace."""
    parts = list(all_parts(guide))
    return bool(parts) and all(map(_keeps_start_values_alone, parts))


def _keeps_start_values_alone(part: Any) -> bool:
    ours = type(part).__module__.partition(".")[0] == __name__.partition(".")[0]
    return isinstance(part, AutoGuide) and (ours or type(part) in OF_START_VALUES)


class Learned:
    """What an automatic guide has learned of its model in a trace, taken out of the guide.

    A trace must not be there any more when it is over. Its arrays, ``take_arrays()``, are results
    of the compiled program, and what is not an array waits here for them.

    Args:
        guide: The guide, which knows nothing of its model from here on.
        row_axes: Axes of each parameter that are rows of plates, by name. Of start values that are
            stored by rows only the shape is kept: zeros, repeated without memory.
        keeps_all: Whether to keep all arrays of the sites; else the values of parameters alone, and
            of the others the shape.
    """

    def __init__(
        self, guide: Any, row_axes: Mapping[str, tuple[int, ...]], *, keeps_all: bool
    ) -> None:
        self._arrays: list[Array] = []  # of the trace, to be results of the program
        self._parts: list[tuple[_Attached | None, _Attached | None]] = []
        for part in guide_parts(guide):
            sites, start = let_go(part)
            if sites is None:  # a list of ours, whose parts alone have seen the model
                self._parts.append((None, None))
                continue
            if start is not None:
                start = {
                    name: _shape_alone(x) if row_axes.get(f"{name}_{part.prefix}_loc") else x
                    for name, x in start.items()
                }
            if not keeps_all:
                of_params = ("param", "mutable")
                sites = {n: s if s["type"] in of_params else _shapes(s) for n, s in sites.items()}
            by_name = {name: self._detached(_without_functions(s)) for name, s in sites.items()}
            own = None if start is None else self._detached(start)
            self._parts.append((_together(by_name), own))

    def take_arrays(self) -> list[Array]:
        """The traced arrays, which are not kept."""
        arrays, self._arrays = self._arrays, []
        return arrays

    def put_back(self, guide: Any, arrays: list[Array], args: Any, kwargs: Any) -> None:
        """Give the guide what it had learned, with these arrays and arguments of the model."""
        for part, (sites, start) in zip(guide_parts(guide), self._parts, strict=True):
            if sites is not None:
                learned = LetGo(sites(arrays), None if start is None else start(arrays))
                take_back(part, learned, args, kwargs)

    def _detached(self, values: Mapping[str, Any]) -> _Attached:
        """Note the traced arrays in some values; return what puts others in their place.

        One value by one, since their order has a meaning, and those without such arrays stay.
        """
        return _together({name: self._of_one(value) for name, value in values.items()})

    def _of_one(self, value: Any) -> _Attached:
        leaves, structure = jax.tree.flatten(value)
        places = {}
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, jax.core.Tracer):
                places[i] = len(self._arrays)
                self._arrays.append(leaf)
                leaves[i] = None
        if not places:
            return lambda arrays: value

        def attached(arrays: list[Array]) -> Any:
            found = [arrays[places[i]] if i in places else leaf for i, leaf in enumerate(leaves)]
            return jax.tree.unflatten(structure, found)

        return attached


def _together(parts: dict[str, _Attached]) -> _Attached:
    return lambda arrays: {name: part(arrays) for name, part in parts.items()}


def _without_functions(site: Any) -> Any:
    """A site without functions, which may close over arrays; guides ask for those of samples."""
    return site if site["type"] == "sample" else {**site, "fn": None, "kwargs": {}}


def _shapes(site: Any) -> Any:
    """A site with zeros in place of traced arrays, and without traced keys."""
    return jax.tree.map(_shape_alone, site)


def _shape_alone(value: Any) -> Any:
    if not isinstance(value, jax.core.Tracer):
        return value
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return None
    return np.broadcast_to(np.zeros((), value.dtype), value.shape)


def attributes_of(guide: Any) -> list[dict[str, Any]]:
    """What each part of a guide is made of, to be put back by ``restore``."""
    return [dict(vars(part)) for part in guide_parts(guide)]


def restore(guide: Any, attributes: list[dict[str, Any]]) -> None:
    """Make a guide what it was before."""
    for part, known in zip(guide_parts(guide), attributes, strict=True):
        vars(part).clear()
        vars(part).update(known)


def sites_of_traced_support(guide: Any) -> list[str]:
    """Sites whose support an automatic guide keeps as arrays of a trace that is over."""
    return sorted(
        {
            name
            for part in guide_parts(guide)
            for name, site in (part.prototype_trace or {}).items()
            if site["type"] == "sample" and not site["is_observed"]
            for leaf in jax.tree.leaves(site["fn"].support)
            if isinstance(leaf, jax.core.Tracer)
        }
    )
