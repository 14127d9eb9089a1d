# SPDX-License-Identifier: Apache-2.0
"""Calling what a run was given to call, when it is due."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from numpyro_largecat._checks import check_kind
from numpyro_largecat._result_so_far import held_signals
from numpyro_largecat.svi.callbacks import Callback, Progress
from numpyro_largecat.svi.held_out import HeldOut, Scores
from numpyro_largecat.svi.run_result import SubsampledSVIRunResult


class CallbackCalls:
    """Calls the callbacks of a run when they are due.

    Args:
        callbacks: All of them, in the order of the calls.
        held_out: What scores the fit on other rows, before they are called; None if nothing does.
        num_steps: Steps of the fit.
    """

    def __init__(self, callbacks: Any, held_out: HeldOut | None, num_steps: int) -> None:
        check_kind("callbacks", callbacks, (list, tuple), "a list of `lc.Callback(function)`")
        for i, callback in enumerate(callbacks):
            form = "`lc.Callback(function, every_steps)`"
            check_kind(f"callbacks[{i}]", callback, Callback, form)
        if held_out is not None:
            check_kind("held_out", held_out, HeldOut, "`lc.HeldOut(score, every_steps)`")
        self.callbacks, self.held_out = tuple(callbacks), held_out
        self.num_steps = num_steps
        self.scores = Scores()
        self._start_time, self._start_steps = time.monotonic(), 0
        self.last_step = 0  # the last of which all calls were made

    def __bool__(self) -> bool:
        """Whether there is anything to call."""
        return bool(self.callbacks) or self.held_out is not None

    @property
    def settings(self) -> list[int | None] | None:
        """What must be the same in a run that goes on with the scores."""
        held_out = self.held_out
        return None if held_out is None else [held_out.every_steps, held_out.patience]

    def go_on(self, num_steps: int, last_step: int, scores: Scores) -> None:
        """Begin with the scores of so many steps, of which ``last_step`` had all its calls."""
        self.scores = scores
        self._start_steps, self.last_step = num_steps, last_step

    def steps_to_go(self, num_steps: int, most: int) -> int:
        """Steps until the next call, at most ``most``."""
        every = [callback.every_steps for callback in self.callbacks]
        every += [] if self.held_out is None else [self.held_out.every_steps]
        return min([most, *(n - num_steps % n for n in every)])

    def is_patience_over(self) -> bool:
        """Whether the scores say that the fit ends."""
        patience = None if self.held_out is None else self.held_out.patience
        return patience is not None and self.scores.since_best() >= patience

    def after_steps(
        self,
        step: int,
        elbo: float | None,
        result: Callable[[], SubsampledSVIRunResult],
        copy_of_state: Callable[[], Any],
    ) -> bool:
        """Call what is due after so many steps; return whether the fit ends."""
        if step == self.last_step:
            return False
        self._score(step, result, copy_of_state)
        metrics = self._metrics(step, elbo)
        for callback in self.callbacks:
            if step % callback.every_steps == 0:
                try:
                    callback.function(Progress(step, self.num_steps, metrics, result))
                except StopIteration:
                    return True
        self.last_step = step
        return self.is_patience_over()

    def _score(
        self, step: int, result: Callable[[], Any], copy_of_state: Callable[[], Any]
    ) -> None:
        """Add a score if it is due and not there; nothing parts it from the best state."""
        held_out, scores = self.held_out, self.scores
        if held_out is None or step % held_out.every_steps or step in scores.steps[-1:]:
            return
        score = scores.checked(held_out.score(result()))
        is_kept = held_out.patience is not None and scores.is_best(score)
        best = copy_of_state() if is_kept else scores.best
        with held_signals():
            scores.add(step, score, best)

    def _metrics(self, step: int, elbo: float | None) -> dict[str, float]:
        seconds = time.monotonic() - self._start_time
        speed = (step - self._start_steps) / max(seconds, 1e-9)
        metrics = {"seconds": seconds, "steps_per_second": speed}
        if elbo is not None:
            metrics["elbo"] = elbo
        if self.scores.scores:
            metrics["held_out"] = self.scores.scores[-1]
        return metrics
