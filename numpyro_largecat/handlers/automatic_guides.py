# SPDX-License-Identifier: Apache-2.0
"""Automatic guides of NumPyro: their parts, and the start values that they keep.

``AutoNormal`` and ``AutoDelta`` keep the start value of each site, a second table as large as the
parameter that is made from it. Once the parameter exists they need no more of it than its shape.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from numpyro.infer.autoguide import AutoGuide, AutoGuideList

from numpyro_largecat.handlers.internals import forget_model, start_values


def set_up_anew(guide: Any) -> None:
    """Make an automatic guide and its parts learn their model anew at the next call."""
    for part in guide_parts(guide):
        forget_model(part)


def free_start_values(guide: Any, row_axes: Mapping[str, tuple[int, ...]]) -> None:
    """Keep of start values that are stored by rows the shape alone: row 0, repeated without memory.

    Args:
        guide: A guide whose parameters exist.
        row_axes: Axes of each parameter that are rows of plates, by name.
    """
    for part in guide_parts(guide):
        known = start_values(part)
        for name, value in known.items():
            axes = row_axes.get(f"{name}_{part.prefix}_loc", ())
            if axes and not isinstance(value, jax.core.Tracer):
                first = tuple(slice(1 if axis in axes else None) for axis in range(value.ndim))
                known[name] = np.broadcast_to(np.asarray(value[first]), value.shape)


def guide_parts(guide: Any) -> Iterator[AutoGuide]:
    """An automatic guide and all its parts; nothing of other guides."""
    return (part for part in all_parts(guide) if isinstance(part, AutoGuide))


def all_parts(guide: Any) -> Iterator[Any]:
    """A guide and all its parts, automatic or not."""
    if isinstance(guide, AutoGuideList):
        for part in guide:
            yield from all_parts(part)
    yield guide
