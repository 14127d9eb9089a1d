# SPDX-License-Identifier: Apache-2.0
"""Whether the ELBO still rises and parameters still drift, by split R-hat of what a fit kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from jax.typing import ArrayLike
from numpyro.diagnostics import split_gelman_rubin

from numpyro_largecat.reading.findings import Finding

MOST_R_HAT = 1.05
MOST_DRIFT = 1.2
SEGMENTS = 4  # of the last half of the losses


def elbo_convergence(losses: ArrayLike) -> Finding:
    """R-hat of the last half of the losses."""
    r_hat = _r_hat(np.asarray(losses), part=0.5)
    return Finding("R-hat of the ELBO", r_hat, advice="run longer" * (r_hat > MOST_R_HAT))


def parameter_convergence(iterates: Mapping[str, Any]) -> dict[str, Finding]:
    """Median R-hat of the recorded numbers of each parameter that moved in the last half."""
    found = {}
    for name, values in iterates.items():
        last = values[len(values) // 2 :]
        moved = last[:, np.ptp(last, axis=0) > 0].astype(np.float64)
        if moved.size:
            r_hat = float(np.median([_r_hat(column, part=1.0) for column in moved.T]))
            advice = "drifts: run longer, or average_iterates" * (r_hat > MOST_DRIFT)
            found[name] = Finding(f"R-hat of {name}", r_hat, advice=advice)
    return found


def _r_hat(values: np.ndarray, part: float) -> float:
    """Split R-hat over segments of the last part of some values; NaN of too few."""
    finite = values[np.isfinite(values)]
    last = finite[len(finite) - round(part * len(finite)) :]
    length = len(last) // SEGMENTS
    if length < 4:
        return float("nan")
    segments = last[len(last) - SEGMENTS * length :].reshape(SEGMENTS, length)
    return float(split_gelman_rubin(segments))
