# SPDX-License-Identifier: Apache-2.0
"""The choice of topics among candidates."""

from __future__ import annotations

import numpy as np

from numpyro_largecat._result_so_far import held_signals
from numpyro_largecat.ops.topics.spanning_topics import spanning_topics
from numpyro_largecat.topics.memory import Memory
from numpyro_largecat.topics.problem import Priors, Problem


def choose_topics(memory: Memory, num_topics: int, problem: Problem, *, num_added: int = 0) -> None:
    """Of the candidates keep those that the others are mixtures of.

    Those whose prior favours some words stay. Tokens of topics that leave are of none until their
    documents are visited again. Of concentrations that were given for each topic the largest is
    then that of the topic with most tokens, and so on. ``num_added`` passes follow before there is
    a choice once more; 0 if there is none.
    """
    counts, (topics, words) = memory.table.numpy(), memory.priors
    own = words.favouring_topics
    spanning = spanning_topics(counts, words.as_given, num_topics, own.tolist())
    kept = np.full(num_topics, -1)
    kept[own] = own  # these keep their numbers
    free, is_other = np.flatnonzero(kept < 0), ~np.isin(spanning.topics, own)
    others, given = spanning.topics[is_other], problem.concentration
    if given is not None:
        free = free[np.argsort(-given[free], kind="stable")]
        others = others[np.argsort(-spanning.tokens[is_other], kind="stable")]
    kept[free] = others
    found = topics[kept] * (topics.sum() / topics[kept].sum()) if given is None else given
    with held_signals():
        memory.priors = Priors(found, words.of_topics(kept))
        forget_own = not problem.local_step.always_keeps
        memory.keep(kept, counts[:, kept], forget_own=forget_own)
        memory.next_choice = memory.next_choice + num_added if num_added else -1
        memory.num_added += num_added
