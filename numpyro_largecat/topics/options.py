# SPDX-License-Identifier: Apache-2.0
"""What few fits of topics need to change."""

from __future__ import annotations

from dataclasses import dataclass

from numpyro_largecat._checks import check_count
from numpyro_largecat.ops.step_sizes import check_step_sizes
from numpyro_largecat.ops.topics.active_search import Effort


@dataclass(frozen=True)
class Options:
    """How documents are solved for, and the sizes of stochastic steps.

    Attributes:
        delay: Stochastic steps have size ``(delay + t) ** -forgetting`` with t = 1, 2, ...; at
            least 0. None for the number of batches: with much less the first batches fill the
            topics with their own words.
        forgetting: In [0, 1]; steps converge above 0.5.
        warm_start: Start documents from their topic counts of the last visit, not from scratch:
            the bound then never falls, but often ends much lower. For "memoized" only.
        max_sweeps: Of a document and visit, at least 10.
        tolerance: A document is done when no topic's count changes by so many tokens.
        num_restarts: Topics that are proposed to leave a document, smallest first; what does not
            raise its bound is undone.

    Raises:
        ValueError: If a number is out of range.

    Example:
        >>> import numpyro_largecat as lc
        >>> lc.topics.Options(warm_start=True).max_sweeps
        100
    """

    delay: float | None = None
    forgetting: float = 0.65
    warm_start: bool = False
    max_sweeps: int = 100
    tolerance: float = 0.05
    num_restarts: int = 5

    def __post_init__(self) -> None:
        check_step_sizes(0 if self.delay is None else self.delay, self.forgetting)
        check_count("max_sweeps", self.max_sweeps, 10)
        check_count("num_restarts", self.num_restarts, 0)

    @property
    def effort(self) -> Effort:
        """How hard a document is solved for."""
        return Effort(self.max_sweeps, self.tolerance, self.num_restarts)
