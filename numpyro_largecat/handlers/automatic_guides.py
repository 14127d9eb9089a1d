# SPDX-License-Identifier: Apache-2.0
"""The start values that autoguides keep: the one place that makes and frees them.

``AutoNormal`` and ``AutoDelta`` keep the start value of each site, a second table as large as the
parameter that is made from it. Once the parameter exists they need no more of it than its shape.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from numpyro.infer.autoguide import AutoDelta, AutoGuide, AutoGuideList, AutoNormal

from numpyro_largecat.handlers.internals import forget_model, learn_supports_late, start_values

OF_START_VALUES = (AutoDelta, AutoGuideList, AutoNormal)  # they keep no other arrays


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


def may_learn_in_a_trace(guide: Any) -> bool:
    """Whether ``after_trace`` mends all that a guide, and each part of it, keeps of a trace."""
    parts = list(_all_parts(guide))
    return bool(parts) and all(map(_keeps_start_values_alone, parts))


def _keeps_start_values_alone(part: Any) -> bool:
    ours = type(part).__module__.partition(".")[0] == __name__.partition(".")[0]
    return isinstance(part, AutoGuide) and (ours or type(part) in OF_START_VALUES)


def traced_start_values(guide: Any, row_axes: Mapping[str, tuple[int, ...]]) -> list[Any]:
    """Start values that a guide keeps of the trace that is being made, but those stored by rows."""
    return [
        {
            name: value
            for name, value in start_values(part).items()
            if isinstance(value, jax.core.Tracer)
            and not row_axes.get(f"{name}_{part.prefix}_loc", ())
        }
        for part in guide_parts(guide)
    ]


def after_trace(guide: Any, values: list[Any], args: Any, kwargs: Any) -> None:
    """Rid a guide of what it keeps of a trace that is over.

    Start values become ``values``, those of ``traced_start_values``; of tables the shape alone is
    left, zeros repeated without memory. What brings latent values into their supports, which
    ``median`` and ``quantiles`` do, closes over the traced arguments: it is made anew from ``args``
    and ``kwargs`` when it is first asked for.
    """
    for part, known in zip(guide_parts(guide), values, strict=True):
        start = start_values(part)
        for name, value in start.items():
            if isinstance(value, jax.core.Tracer):
                zeros = np.broadcast_to(np.zeros((), value.dtype), value.shape)
                start[name] = known.get(name, zeros)
        learn_supports_late(part, args, kwargs)


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


def guide_parts(guide: Any) -> Iterator[AutoGuide]:
    """An automatic guide and all its parts; nothing of other guides."""
    return (part for part in _all_parts(guide) if isinstance(part, AutoGuide))


def _all_parts(guide: Any) -> Iterator[Any]:
    if isinstance(guide, AutoGuideList):
        for part in guide:
            yield from _all_parts(part)
    yield guide
