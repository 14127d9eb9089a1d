# SPDX-License-Identifier: Apache-2.0
"""Whether the ELBO still rises and parameters still drift, as findings."""

from __future__ import annotations

import numpy as np

from numpyro_largecat.reading.findings import Finding
from numpyro_largecat.svi.convergence import Convergence


def elbo_convergence(convergence: Convergence) -> Finding:
    """R-hat of the last half of the losses."""
    found = convergence
    is_well = not (found.elbo_rises or found.elbo_falls or found.has_ended)
    advice = "" if is_well else f"it {found.elbo_trend}"
    return Finding("R-hat of the ELBO", found.elbo_r_hat, advice=advice)


def parameter_convergence(convergence: Convergence) -> dict[str, Finding]:
    """Median R-hat of the recorded numbers of each parameter that moved in the last half.

    The highest come first.
    """
    r_hats = sorted(convergence.r_hats.items(), key=lambda item: -np.nan_to_num(item[1]))
    return {
        name: Finding(
            f"R-hat of {name}",
            r_hat,
            advice="drifts: run longer, or average_iterates" * convergence.drifts(name),
            group="R-hat",
        )
        for name, r_hat in r_hats
    }
