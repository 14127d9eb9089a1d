# SPDX-License-Identifier: Apache-2.0
"""Free the tables of initial values that autoguides keep, which the parameters have copied."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import WeakSet

import jax
import numpy as np
from numpyro.infer.autoguide import AutoGuide, AutoGuideList

from numpyro_largecat.svi.param_sites import ParamSite

_released: WeakSet[AutoGuide] = WeakSet()


def release_initial_values(guide: Any, sites: dict[str, ParamSite]) -> None:
    """Replace initial values stored by rows with their first row, repeated without memory.

    ``AutoNormal`` and ``AutoDelta`` keep the initial location of each site, a second table as large
    as the parameter, and use no more of it than its shape once the parameter exists.
    """
    for part in guide_parts(guide):
        for name, value in getattr(part, "_init_locs", {}).items():
            site = sites.get(f"{name}_{part.prefix}_loc")
            if site is None or not site.plates or isinstance(value, jax.core.Tracer):
                continue
            first = tuple(
                slice(0, 1) if axis in site.plates else slice(None) for axis in range(value.ndim)
            )
            part._init_locs[name] = np.broadcast_to(np.asarray(value[first]), value.shape)
            _released.add(part)


def renew_initial_values(guide: Any) -> None:
    """Make guides whose initial values were released find them again at their next call."""
    for part in guide_parts(guide):
        traced = any(
            isinstance(value, jax.core.Tracer)
            for value in jax.tree.leaves(getattr(part, "_init_locs", {}))
        )
        if traced or part in _released:
            part.prototype_trace = None
            _released.discard(part)


def guide_parts(guide: Any) -> Iterator[AutoGuide]:
    """An automatic guide and all its parts; nothing of other guides."""
    if isinstance(guide, AutoGuideList):
        for part in guide:
            yield from guide_parts(part)
    if isinstance(guide, AutoGuide):
        yield guide
