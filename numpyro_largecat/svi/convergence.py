# SPDX-License-Identifier: Apache-2.0
"""Whether a fit still rises, falls or drifts, and how noisy its steps are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from numpyro.diagnostics import split_gelman_rubin

MOST_ELBO_R_HAT = 1.05
MOST_R_HAT = 1.2
MOST_MOVED = 0.1  # posterior sds, or logs of them, from one quarter of a fit to the next
MOST_ERRORS = 3  # standard errors of what the ELBO of a level fit may seem to rise
SEGMENTS = 4  # of the last half of a fit
LEAST_LENGTH = 4  # of a segment


class Convergence(NamedTuple):
    """Three facts of the last half of a fit; prints as one line.

    Example:
        >>> import numpy as np
        >>> from numpyro_largecat.svi.convergence import Convergence
        >>> rng = np.random.default_rng(0)
        >>> losses = 100 + rng.normal(size=1_000) - 0.002 * np.arange(1_000)
        >>> print(Convergence.of(losses, {"w_auto_loc": np.arange(500.0)[:, None]}))
        the ELBO rose by 0.57 ± 0.084 % in the last quarter: run longer; w_auto_loc drifts (R-hat
        8.41): run longer; noise of a step 0.94 %
        >>> print(Convergence.of(losses[::-1], {}))
        the ELBO fell by 0.54 ± 0.092 % in the last quarter: lower the rate, or scale the features;
        noise of a step 1 %
    """

    elbo_r_hat: float  # split R-hat of the losses; NaN of too few
    rise: float  # of the mean ELBO from the third quarter to the last, as a share of it
    rise_error: float  # standard error of that
    r_hats: dict[str, float]  # median over the recorded numbers of each parameter that moved
    moved: dict[str, float]  # and by how much, from the third quarter to the last, see ``_moved``
    noise: float  # sd of the loss of one step about its trend, over its mean
    has_ended: bool = False  # whether no recorded number moved

    @classmethod
    def of(cls, losses: ArrayLike, iterates: Mapping[str, Any]) -> Convergence:
        """From the losses of all steps, and the numbers that were recorded on the way."""
        values = np.asarray(losses, np.float64)
        last_halves = {
            name: np.asarray(recorded[len(recorded) // 2 :], np.float64)
            for name, recorded in iterates.items()
        }
        r_hats, moved = {}, {}
        for name, last in last_halves.items():
            moves = np.ptp(last, axis=0) > 0
            if moves.any():
                r_hats[name] = float(np.median([_r_hat(column) for column in last.T[moves]]))
                by_entry = _moved(name, last_halves)
                if by_entry is not None:
                    moved[name] = float(np.median(by_entry[moves]))
        last = _last_half(values)
        return cls(_r_hat(last), *_rise(last), r_hats, moved, _noise(last), _has_ended(iterates))

    @property
    def elbo_falls(self) -> bool:
        """Whether the ELBO is lower than it was: a fit that more steps do not help."""
        return self.rise < -MOST_ERRORS * self.rise_error

    @property
    def elbo_rises(self) -> bool:
        """Whether the ELBO is not yet level.

        R-hat alone does not see a slow rise: the noise of single steps hides it.
        """
        if self.elbo_falls:
            return False
        return self.elbo_r_hat > MOST_ELBO_R_HAT or self.rise > MOST_ERRORS * self.rise_error

    @property
    def elbo_trend(self) -> str:
        """By how much the ELBO rose or fell, and what to do about it."""
        size, error = f"{100 * abs(self.rise):.2g}", f"{100 * self.rise_error:.2g}"
        trend = f"{'fell' if self.rise < 0 else 'rose'} by {size} ± {error} % in the last quarter"
        if self.has_ended:
            fix = "take a new optimiser, and `init_params=result.params`"
            return f"{trend}, but no number on record moved: if the rate is at 0, {fix}"
        if self.elbo_falls:
            return f"{trend}: lower the rate, or scale the features"
        return trend + ": run longer" * self.elbo_rises

    def drifts(self, name: str) -> bool:
        """Whether a parameter is not yet level.

        R-hat alone would say so of many that stand still but for a small part of their posterior
        standard deviation, since a rate that decays leaves no noise to hide it.
        """
        stands_still = self.moved.get(name, np.inf) <= MOST_MOVED
        return self.r_hats[name] > MOST_R_HAT and not stands_still

    def __str__(self) -> str:
        """One line, with what to do."""
        if np.isnan(self.elbo_r_hat):
            return "too few steps to say whether the fit has converged"
        facts = [f"the ELBO {self.elbo_trend}"]
        known = {name: value for name, value in self.r_hats.items() if not np.isnan(value)}
        if known and not self.elbo_falls:
            drifting = sorted(filter(self.drifts, known), key=known.__getitem__, reverse=True)
            facts.append("no parameter drifts" if not drifting else _of_worst(known, drifting))
        return "; ".join([*facts, f"noise of a step {100 * self.noise:.2g} %"])


def _of_worst(r_hats: Mapping[str, float], drifting: list[str]) -> str:
    """That parameters drift, of which the first does most."""
    others = f" and {len(drifting) - 1} more drift" if len(drifting) > 1 else " drifts"
    return f"{drifting[0]}{others} (R-hat {r_hats[drifting[0]]:.2f}): run longer"


def _has_ended(iterates: Mapping[str, Any]) -> bool:
    """Whether nothing moved, as where a run goes on with an optimiser whose schedule has ended."""
    enough = [values for values in iterates.values() if len(values) >= SEGMENTS * LEAST_LENGTH]
    return bool(enough) and not any(np.ptp(values, axis=0).any() for values in enough)


def _moved(name: str, last_halves: Mapping[str, NDArray[Any]]) -> NDArray[Any] | None:
    """By how much the mean of each recorded number moved from the third quarter to the last.

    It is known of the parameters that automatic guides have for a site with a ``loc`` and a
    ``scale``: of ``loc`` in posterior standard deviations, of ``scale`` in logs, and of what says
    how values depend on each other, which has no unit, as it is.

    Returns:
        The moves, one for each number; None if nothing says what is much.
    """
    site, _, what = name.rpartition("_")
    own, loc, scale = (last_halves.get(n) for n in (name, f"{site}_loc", f"{site}_scale"))
    if own is None or loc is None or scale is None or loc.shape != scale.shape or len(own) < 2:
        return None
    sd = np.logaddexp(0, scale)  # the inverse of softplus is what is optimised
    values = {"loc": loc / sd[-1], "scale": np.log(sd)}.get(what, own)
    half = len(values) // 2
    moves: NDArray[Any] = np.abs(values[-half:].mean(axis=0) - values[:half].mean(axis=0))
    return moves


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


def _rise(losses: NDArray[Any]) -> tuple[float, float]:
    """How much the mean of the second half is below that of the first, and its standard error."""
    half = len(losses) // 2
    if half < SEGMENTS * LEAST_LENGTH // 2:
        return float("nan"), float("nan")
    before, after = losses[:half].mean(), losses[-half:].mean()
    size = max(abs(after), 1e-300)
    return float((before - after) / size), _noise(losses) * float(np.sqrt(2 / half))


def _noise(losses: NDArray[Any]) -> float:
    """Half the variance of a difference is that of one loss, whatever its trend."""
    if len(losses) < 2:
        return float("nan")
    return float(np.sqrt(np.mean(np.diff(losses) ** 2) / 2) / max(abs(losses.mean()), 1e-300))
