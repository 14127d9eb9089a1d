# SPDX-License-Identifier: Apache-2.0
"""Whether a fit still rises or drifts, and how noisy its steps are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from numpyro.diagnostics import split_gelman_rubin

MOST_ELBO_R_HAT = 1.05
MOST_R_HAT = 1.2
SEGMENTS = 4  # of the last half of a fit
LEAST_LENGTH = 4  # of a segment


class Convergence(NamedTuple):
    """Three facts of the last half of a fit; prints as one line.

    Example:
        >>> import numpy as np
        >>> from numpyro_largecat.svi.convergence import Convergence
        >>> rng = np.random.default_rng(0)
        >>> losses = 100 + rng.normal(size=1_000)
        >>> print(Convergence.of(losses, {"w_auto_loc": np.arange(500.0)[:, None]}))
        R-hat of the ELBO 1.00; of w_auto_loc 8.41: it drifts, run longer; noise of a step 0.92 %
    """

    elbo_r_hat: float  # split R-hat of the losses; NaN of too few
    r_hats: dict[str, float]  # median over the recorded numbers of each parameter that moved
    noise: float  # sd of the loss of one step about its trend, over its mean

    @classmethod
    def of(cls, losses: ArrayLike, iterates: Mapping[str, Any]) -> Convergence:
        """From the losses of all steps, and the numbers that were recorded on the way."""
        values = np.asarray(losses, np.float64)
        found = {}
        for name, recorded in iterates.items():
            last = np.asarray(recorded[len(recorded) // 2 :], np.float64)
            moved = last[:, np.ptp(last, axis=0) > 0]
            if moved.size:
                found[name] = float(np.median([_r_hat(column) for column in moved.T]))
        last = _last_half(values)
        return cls(_r_hat(last), found, _noise(last))

    @property
    def elbo_rises(self) -> bool:
        """Whether the ELBO is not yet level."""
        return self.elbo_r_hat > MOST_ELBO_R_HAT

    def drifts(self, name: str) -> bool:
        """Whether a parameter is not yet level."""
        return self.r_hats[name] > MOST_R_HAT

    def __str__(self) -> str:
        """One line, with what to do."""
        if np.isnan(self.elbo_r_hat):
            return "too few steps to say whether the fit has converged"
        rises = ": it is not level, run longer" * self.elbo_rises
        facts = [f"R-hat of the ELBO {self.elbo_r_hat:.2f}{rises}"]
        known = {name: value for name, value in self.r_hats.items() if not np.isnan(value)}
        if known:
            worst = max(known, key=known.__getitem__)
            drifts = ": it drifts, run longer" * self.drifts(worst)
            facts.append(f"of {worst} {known[worst]:.2f}{drifts}")
        return "; ".join([*facts, f"noise of a step {100 * self.noise:.2g} %"])


def _last_half(values: NDArray[Any]) -> NDArray[Any]:
    finite = values[np.isfinite(values)]
    return finite[len(finite) - round(0.5 * len(finite)) :]


def _r_hat(values: NDArray[Any]) -> float:
    """Split R-hat over segments of some values; NaN of too few, 1 where all are the same."""
    finite = values[np.isfinite(values)]
    length = len(finite) // SEGMENTS
    if length < LEAST_LENGTH:
        return float("nan")
    segments = finite[len(finite) - SEGMENTS * length :].reshape(SEGMENTS, length)
    if np.ptp(segments) == 0:
        return 1.0
    with np.errstate(divide="ignore"):  # infinite where each segment is level, at its own height
        return float(split_gelman_rubin(segments))


def _noise(losses: NDArray[Any]) -> float:
    """Half the variance of a difference is that of one loss, whatever its trend."""
    if len(losses) < 2:
        return float("nan")
    return float(np.sqrt(np.mean(np.diff(losses) ** 2) / 2) / max(abs(losses.mean()), 1e-300))
