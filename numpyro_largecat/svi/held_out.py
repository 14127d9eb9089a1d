# SPDX-License-Identifier: Apache-2.0
"""Held-out scores while ``SubsampledSVI.run`` fits, and early stops by them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from numpyro_largecat._checks import check_count, describe
from numpyro_largecat.svi.run_result import SubsampledSVIRunResult


@dataclass(frozen=True)
class HeldOut:
    """A held-out score while ``SubsampledSVI.run`` fits, and where to stop by it.

    Args:
        score: Takes the fit so far, a result as ``run`` returns it, and gives a number; more is
            better, such as a mean log likelihood of observations that are not in the fit.
        every_steps: It is called after each multiple of so many steps, at least 1.
        patience: End the fit after so many scores, at least 1, in a row that are none better than
            the best; the result is then that of the best score. None to take all steps, and return
            the last.

    The scores are in ``result.scores``. Checkpoints hold them, and the best state.

    Cost: what ``score`` takes, and O(tables) to make the result; with ``patience`` memory for
    another state.

    Raises:
        ValueError: If a number is out of range.

    Example:
        >>> import jax, numpyro, optax
        >>> import numpyro_largecat as lc
        >>> from numpyro.infer import Trace_ELBO
        >>> def model():
        ...     a = numpyro.param("a", 0.0)
        ...     numpyro.factor("loss", -((a - 1) ** 2))
        >>> svi = lc.SubsampledSVI(model, lambda: None, optax.adam(0.1), Trace_ELBO())
        >>> def score(result):  # in a real fit, of held-out data
        ...     return -abs(result.params["a"] - 0.5)
        >>> held_out = lc.HeldOut(score, every_steps=1, patience=3)
        >>> result = svi.run(jax.random.key(0), 100, held_out=held_out, progress_bar=False)
        >>> len(result.losses), int(result.scores["step"][result.scores["score"].argmax()])
        (8, 5)
        >>> round(float(result.params["a"]), 1)
        0.5
    """

    score: Callable[[SubsampledSVIRunResult], Any]
    every_steps: int = 1_000
    patience: int | None = None

    def __post_init__(self) -> None:
        check_count("every_steps", self.every_steps, 1)
        if self.patience is not None:
            check_count("patience", self.patience, 1)
        if not callable(self.score):
            raise TypeError(f"`score` must be callable; got {describe(self.score)}.")


@dataclass
class Scores:
    """Held-out scores so far, and the state of the best."""

    steps: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    best: Any = None  # a state, kept if the fit may stop early

    def checked(self, score: Any) -> float:
        """A score as a float.

        Raises:
            TypeError: If it is no number.
        """
        if np.ndim(score) or not isinstance(np.asarray(score).item(), (int, float)):
            raise TypeError(f"`score` of HeldOut must return a number; got {describe(score)}.")
        return float(score)

    def is_best(self, score: float) -> bool:
        """Whether it is better than all before."""
        known = [s for s in self.scores if s == s]
        return score == score and (not known or score > max(known))

    def add(self, step: int, score: float, best: Any) -> None:
        """Append a score; ``best`` is the state of the best one now."""
        self.steps.append(step)
        self.scores.append(score)
        self.best = best

    def since_best(self) -> int:
        """Scores after the best one."""
        known = np.array(self.scores)
        if self.are_all_nan() or not len(known):
            return len(known)
        return len(known) - 1 - int(np.nanargmax(known))

    def are_all_nan(self) -> bool:
        """Whether there are scores, and none is a number."""
        return bool(self.scores) and bool(np.isnan(self.scores).all())

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Steps and scores."""
        return {"step": np.array(self.steps, np.int64), "score": np.array(self.scores, np.float64)}

    def of_result(self) -> dict[str, NDArray[Any]]:
        """The same, as a result has them: empty without any."""
        return self.arrays() if self.steps else {}
