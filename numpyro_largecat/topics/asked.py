# SPDX-License-Identifier: Apache-2.0
"""What ``fit_topics`` is asked for, with its defaults."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from numpyro_largecat._checks import check_count, check_kind, check_num_active, check_one_of
from numpyro_largecat.topics.inference import INFERENCE
from numpyro_largecat.topics.options import Options
from numpyro_largecat.topics.topic_fit import TopicFit

BATCH_SIZE = 512
FEW_DOCUMENTS, LEAST_BATCHES = 1000, 15  # of so few documents there are so many
PASSES, PASSES_WITH_STEP = 8, 5


class Asked(NamedTuple):
    """The arguments of ``fit_topics`` that say what is fitted and how.

    None where a default follows from other arguments, until ``checked`` and ``with_num_active``.
    """

    num_topics: int | Literal["learned"]
    concentration: Any
    word_concentration: Any
    num_active: Any
    inference: Literal["collapsed", "mean_field"]
    method: Literal["memoized", "stochastic"]
    num_passes: Any
    batch_size: Any
    start: Any
    prior: TopicFit | None
    options: Options

    def checked(self, num_documents: int) -> Asked:
        """The same with default numbers of passes and of documents in a batch.

        Raises:
            ValueError: If one of these arguments is out of range.
            TypeError: If ``options`` are none.
        """
        num_topics, options = self.num_topics, self.options
        if isinstance(num_topics, str):
            check_one_of("num_topics", num_topics, ("learned",), or_else=" or a number")
        else:
            num_topics = check_count("num_topics", num_topics, 1)
        check_one_of("inference", self.inference, tuple(INFERENCE))
        check_kind("options", options, Options, "lc.topics.Options(...)")
        check_one_of("method", self.method, ("memoized", "stochastic"))
        if options.warm_start and self.method != "memoized":
            raise ValueError("`warm_start` needs `method='memoized'`, which keeps what it visited.")
        asked = self._replace(num_topics=num_topics)
        num_passes, batch_size = self.num_passes, self.batch_size
        return asked._replace(
            num_passes=(
                asked._default_passes()
                if num_passes is None
                else check_count("num_passes", num_passes, 1)
            ),
            batch_size=(
                _default_batch_size(num_documents)
                if batch_size is None
                else check_count("batch_size", batch_size, 1)
            ),
        )

    def with_num_active(self, num_topics: int) -> Asked:
        """The same with the number of topics of a word, of so many topics."""
        return self._replace(num_active=check_num_active(self.num_active, num_topics, "topics"))

    @property
    def goes_on(self) -> bool:
        """Whether topics are those of an earlier fit at first."""
        return self.prior is not None or isinstance(self.start, TopicFit)

    @property
    def is_warm(self) -> bool:
        """Whether documents start from their last visit; by default only collapsed ones do."""
        is_warm = self.options.warm_start
        return self.inference == "collapsed" if is_warm is None else is_warm

    def _default_passes(self) -> int:
        """Fewer where a longer step spares some of them, see ``passes``."""
        is_chosen = self.num_topics not in ("learned", self.options.num_candidates)
        is_collapsed = self.inference == "collapsed" and self.method == "memoized"
        return PASSES_WITH_STEP if is_collapsed and is_chosen and not self.goes_on else PASSES


def _default_batch_size(num_documents: int) -> int:
    if num_documents >= FEW_DOCUMENTS:
        return BATCH_SIZE
    return max(1, -(-num_documents // LEAST_BATCHES))
