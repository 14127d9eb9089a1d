# SPDX-License-Identifier: Apache-2.0
"""What few fits of topics need to change."""

from __future__ import annotations

from dataclasses import dataclass

from numpyro_largecat._checks import check_count
from numpyro_largecat.ops.step_sizes import check_step_sizes
from numpyro_largecat.ops.topics.active_search import Effort

MOST_SWEEPS = {"collapsed": 10, "mean_field": 100}


@dataclass(frozen=True)
class Options:
    """How documents are solved for, and the sizes of stochastic steps.

    Attributes:
        delay: Stochastic steps have size ``(delay + t) ** -forgetting`` with t = 1, 2, ...; at
            least 0. None for the number of batches: with much less the first batches fill the
            topics with their own words.
        forgetting: In [0, 1]; steps converge above 0.5.
        warm_start: Start documents from what their last visit found, not from scratch. None for
            collapsed inference alone, which keeps that anyhow: it is sooner done, and as good. With
            "mean_field" the bound then never falls, but often ends much lower. For "memoized" only.
        max_sweeps: Of a document and visit, at least 10; a third as many again once words have L
            topics, and with "mean_field" as many again if a topic was made to leave. None for 10
            with "collapsed", and 100 with "mean_field".
        tolerance: A document is done when no topic's count changes by so many tokens.
        num_candidates: Topics of the first two passes (of the first half, where there are fewer
            than four), at least K; then those remain that the others are mixtures of, so that, if
            documents tell them apart, a topic is seldom there twice or not at all. Topics whose
            prior favours some words stay. K for none; None for K where topics go on from a fit,
            for 4 K else, and where the number of topics is learned for 300, or one for each
            document with words. With K "mean_field" mixes topics from most keys, also of documents
            that are easy to tell apart.
        num_restarts: Topics that are proposed to leave a document, smallest first; what does not
            raise its bound is undone. For "mean_field" only.

    Raises:
        ValueError: If a number is out of range.

    Example:
        >>> import numpyro_largecat as lc
        >>> lc.topics.Options(max_sweeps=50).max_sweeps
        50
    """

    delay: float | None = None
    forgetting: float = 0.65
    warm_start: bool | None = None
    max_sweeps: int | None = None
    tolerance: float = 0.05
    num_candidates: int | None = None
    num_restarts: int = 5

    def __post_init__(self) -> None:
        check_step_sizes(0 if self.delay is None else self.delay, self.forgetting)
        if self.max_sweeps is not None:
            check_count("max_sweeps", self.max_sweeps, 10)
        if self.num_candidates is not None:
            check_count("num_candidates", self.num_candidates, 1)
        check_count("num_restarts", self.num_restarts, 0)

    def effort(self, inference: str) -> Effort:
        """How hard a document is solved for."""
        most = MOST_SWEEPS[inference] if self.max_sweeps is None else self.max_sweeps
        return Effort(most, self.tolerance, self.num_restarts)
