# SPDX-License-Identifier: Apache-2.0
"""What a mixture has learned after a batch as arrays with names, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from jax import Array

from numpyro_largecat.data.checkpoints import fingerprint
from numpyro_largecat.mixtures.global_step import Statistics
from numpyro_largecat.mixtures.options import Options
from numpyro_largecat.mixtures.passes import KeptSums, Model, Step

KIND = "fit of fit_mixture"


def settings_of(
    rng_key: Array, model: Model, start: Statistics, method: str, options: Options
) -> dict[str, Any]:
    """What must be the same in a fit that goes on; JSON can hold it."""
    look = model.look
    return {
        "rng_key": fingerprint(rng_key),
        "data": [look.num_rows, str(look.dtype), fingerprint((look.sample, look.marks))],
        "sizes of batches": fingerprint(look.sizes),
        "number of components": len(start.counts),
        "family": [type(model.family).__name__, fingerprint(model.family)],
        "mixing": [type(model.mixing).__name__, fingerprint(model.mixing)],
        "objective": model.objective,
        "num_active": model.num_active,
        "start": fingerprint(start),
        "method": method,
        "options": repr(options),
    }


def arrays_of(step: Step) -> dict[str, np.ndarray]:
    """All that the next step needs, by name."""
    arrays = {f"whole {k}": v for k, v in step.statistics._asdict().items()}
    if step.total is not None:
        arrays |= {f"total {k}": v for k, v in step.total._asdict().items()}
        kept = map(np.stack, zip(*step.kept, strict=True))
        arrays |= {f"kept {k}": v for k, v in zip(KeptSums._fields, kept, strict=True)}
    return arrays


def step_of(arrays: Mapping[str, np.ndarray]) -> Step:
    """The step of which these are the arrays."""
    whole = Statistics(*(arrays[f"whole {k}"] for k in Statistics._fields))
    if "total counts" not in arrays:
        return Step(whole)
    total = Statistics(*(arrays[f"total {k}"] for k in Statistics._fields))
    kept = zip(*(arrays[f"kept {k}"] for k in KeptSums._fields), strict=True)
    return Step(whole, total=total, kept=tuple(KeptSums(*sums) for sums in kept))
