# SPDX-License-Identifier: Apache-2.0
"""What ``SubsampledSVI.run`` returns."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from jax import Array
from numpy.typing import NDArray

from numpyro_largecat.svi.state import SubsampledSVIState


class SubsampledSVIRunResult(NamedTuple):
    """The fields of NumPyro's ``SVIRunResult``, then how some entries of the parameters moved."""

    params: dict[str, Any]  # constrained values of all parameters, stored whole
    state: SubsampledSVIState  # the last one
    losses: Array  # (steps,), one for each step taken, NaN for the step at which a fit ended
    # Up to 1000 earlier values of a few entries of each parameter, unconstrained, for `diagnose`:
    # (iterates, entries), by parameter. Nothing where the fit ran inside a transformation.
    iterates: dict[str, NDArray[np.floating[Any]]] = {}
