# SPDX-License-Identifier: Apache-2.0
"""Refuse guides and models that cannot be evaluated on one chunk of classes after another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike
from numpyro.infer.autoguide import AutoGuideList

from numpyro_largecat._checks import is_concrete
from numpyro_largecat.infer.guide_tables import guide_parts
from numpyro_largecat.ops.finfo import finfo


def check_guide_has_run(guide: Any) -> None:
    """Refuse an automatic guide that would find its sites in a model with few classes, no labels.

    Raises:
        ValueError: If a part of it has not looked at its model yet.
    """
    parts = [part for part in guide_parts(guide) if not isinstance(part, AutoGuideList)]
    if any(part.prototype_trace is None for part in parts):
        raise ValueError(
            "the guide has not been run yet, and finds its sites in its first run. Run it once "
            "with arguments as in training, among them labels: "
            "`numpyro.handlers.seed(guide, 0)(x, y, rows)`. The parameters stay those of `params`."
        )


def check_rows_alone(
    of_pair: Callable[[ArrayLike, ArrayLike], Array], plate: str, num_categories: int
) -> None:
    """Refuse utilities of a class that depend on which other classes are evaluated with it.

    ``of_pair(start, seed)`` are the utilities (..., 2) of classes ``start`` and ``start + 1``;
    those of class 1 must be the same after class 0 and before class 2. What a model draws from the
    seed is not compared, nor are tracers.

    Cost: the utilities of six classes.

    Raises:
        ValueError: If the utilities of class 1 differ.
    """
    starts, seeds = jnp.array([0, 1, 1]), jnp.array([0, 0, 1])
    psi = lax.map(lambda pair: of_pair(*pair), (starts, seeds))
    if not is_concrete(psi):
        return
    second, first, again = np.asarray(psi[0, ..., 1]), *np.asarray(psi[1:, ..., 0])
    finite = np.abs(np.stack([first, second]).astype(np.float64))
    scale = np.max(finite, initial=0, where=np.isfinite(finite))
    rounding = np.sqrt(float(finfo(psi.dtype).eps)) * scale
    same = np.allclose(first, second, rtol=0, atol=rounding, equal_nan=True)
    if same or not np.array_equal(first, again, equal_nan=True):
        return
    gap = np.max(np.abs(first.astype(np.float64) - second))
    raise ValueError(
        f"the utility of class 1 of plate '{plate}' depends on which classes are evaluated with "
        f"it: beside class 0 it differs by up to {gap:.3g} from that beside class 2. A class plate "
        "holds some of its classes at a time, so a utility may depend on the rows of its own class "
        "and on what is outside of the plate, not on the place of a row or on sums over rows. "
        "Write a reference class as `jnp.where(classes.indices == 0, 0.0, b)`, not "
        "`b.at[0].set(0.0)`; in place of centred or normalised weights give the prior a scale of "
        "its own. If the model is fitted with a full plate, `chunk_size` of at least "
        f"{num_categories} evaluates it on all classes at once, as in the fit."
    )
