# SPDX-License-Identifier: Apache-2.0
"""The losses of a fit, shown while it runs, and why it ended early if it did."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable

import numpy as np

from numpyro_largecat._checks import BadDataError
from numpyro_largecat._progress_bar import progress_bar as bar_of

ELBO_MEMORY = 0.98  # weight of the past in the smoothed ELBO, per step
MOST_RECENT = 1_000  # arrays of losses that are not yet joined
NOT_FINITE = "the loss or the new parameters were not finite"


class LossLog:
    """Losses so far, shown in a progress bar, and why the fit ended early if it did."""

    def __init__(self, num_steps: int, progress_bar: bool, skip_bad_steps: bool) -> None:
        self.num_steps = num_steps
        self.skip_bad_steps = skip_bad_steps
        self.bar = bar_of(total=num_steps, disable=not progress_bar, unit="step")
        self.parts: list[np.ndarray] = []
        self.recent: list[np.ndarray] = []  # after those; an array of one loss takes 130 bytes
        self.num_taken = 0
        self.is_over = False
        self.reason: str | None = None  # of an end that is worth a warning
        self.is_last_bad = False  # whether the last loss is that of a step which ended the fit
        self.bad_batches: list[BadDataError] = []
        self.has_begun = False
        self.smoothed: float | None = None

    def __enter__(self) -> None:
        """Open the bar."""
        self.bar.set_postfix_str("starting; new code is compiled")

    def __exit__(self, *_: object) -> None:
        self.bar.close()

    def steps_to_go(self, most: int) -> int:
        """Steps to take next, at most ``most``; 0 at the end."""
        return 0 if self.is_over else max(0, min(most, self.num_steps - self.num_taken))

    def go_on(self, losses: np.ndarray) -> None:
        """Begin with the losses of earlier steps, in place of what is there."""
        self.parts, self.recent, self.num_taken, self.smoothed = [], [], 0, None
        self.bar.reset()
        self._append(losses)
        if len(losses) > self.num_steps:
            self.stop("the checkpoint has more steps than `num_steps`", len(losses))
        if np.isnan(losses[-1]) and not self.skip_bad_steps:
            self.stop(
                "there the loss or the new parameters were not finite before it was resumed. To go "
                "on in another way, pass `init_state=svi.load(folder, ...).state`",
                self.num_taken - 1,
            )

    def add(self, losses: np.ndarray) -> int:
        """Append the losses of a chunk; the first NaN ends the fit, unless it is to be skipped.

        Returns:
            How many of its steps were taken.
        """
        if not self.has_begun:  # what compiled until now says nothing of further steps
            self.has_begun = True
            self.bar.set_postfix_str("", refresh=False)
            self.bar.unpause()
        bad = np.flatnonzero(np.isnan(losses))
        num_good = len(losses)
        if bad.size and not self.skip_bad_steps:
            losses, num_good = losses[: bad[0] + 1], int(bad[0])
            self.is_last_bad = True
            self.stop(NOT_FINITE, self.num_taken + int(bad[0]))
        self._append(losses)
        return num_good

    def _append(self, losses: np.ndarray) -> None:
        self.recent.append(losses)
        if len(self.recent) == MOST_RECENT:
            self.parts.append(np.concatenate(self.recent))
            self.recent = []
        self.num_taken += len(losses)
        for loss in losses[np.isfinite(losses)]:
            kept = ELBO_MEMORY if self.smoothed is not None else 0.0
            self.smoothed = kept * (self.smoothed or 0.0) - (1 - kept) * float(loss)
        if self.smoothed is not None:
            self.bar.set_postfix_str(f"smoothed ELBO {self.smoothed:.6g}", refresh=False)
        self.bar.update(len(losses))

    def explain(self, finding: str | None) -> None:
        """Say of the last step, which was bad, what was not finite, as far as it is known."""
        what = NOT_FINITE if finding is None else f"{NOT_FINITE}: {finding}"
        self.stop(
            f"{what}. Lower the learning rate, or look for a label or a row id out of range, "
            "an observed class that is not available (-inf), or an entity that `counts` do not "
            "have",
            self.num_taken - 1,
        )

    def skip_batch(self, error: BadDataError) -> None:
        """Count a batch that was not used as a step that was skipped."""
        self.bad_batches.append(error)
        self.add(np.full(1, np.nan))

    def stop(self, reason: str, step: int) -> None:
        """End the fit before ``step``, counted from 0, with a warning."""
        self.is_over = True
        self.reason = f"SubsampledSVI.run ended at step {step} of {self.num_steps}: {reason}."

    def losses(self) -> np.ndarray:
        """All losses, one for each step."""
        parts = [*self.parts, *self.recent]
        return np.concatenate(parts) if parts else np.zeros(0)

    def say(self, text: Callable[[], str]) -> None:
        """Write a line beside the bar, if there is one; else it is not made."""
        if not self.bar.disable:
            self.bar.write(text(), file=sys.stderr)

    def warn(self) -> None:
        """Say why the fit ended early, or how many steps were skipped."""
        if self.reason is not None:
            warnings.warn(
                f"{self.reason} The result holds the state before that step.",
                RuntimeWarning,
                stacklevel=4,
            )
        skipped = int(np.isnan(self.losses()).sum())
        if self.skip_bad_steps and skipped:
            warnings.warn(
                f"SubsampledSVI.run skipped {skipped} of {self.num_taken} steps, whose loss or "
                f"gradients were not finite.{self._of_bad_batches()}",
                RuntimeWarning,
                stacklevel=4,
            )

    def _of_bad_batches(self) -> str:
        if not self.bad_batches:
            return ""
        return f" Of {len(self.bad_batches)} the batch was bad, the first: {self.bad_batches[0]}"
