# SPDX-License-Identifier: Apache-2.0
"""Compiling the code of a fit while its first topics are found, on other cores."""

from __future__ import annotations

from collections.abc import Callable

from numpyro_largecat.topics.collapsed import Collapsed
from numpyro_largecat.topics.document_pieces import Blocks
from numpyro_largecat.topics.problem import Priors, Problem


def compilations(problem: Problem, num_rows: int, priors: Priors) -> list[Callable[[], object]]:
    """Calls that compile what visits run, with the topics of the first passes and of the others.

    Most of the time of compilation is that of ``Collapsed`` documents. For other local steps, over
    a mesh and where a number of topics is yet to be learned, code is compiled when it is needed.
    """
    local_step = problem.local_step
    if not isinstance(local_step, Collapsed) or local_step.mesh is not None:
        return []
    first = problem.candidates.first_priors(priors).topics
    looks, sweeps = [], dict[Blocks, Callable[[], object]]()
    for a in {len(a): a for a in (first, priors.topics)}.values():
        for kind in problem.layout.for_concentration(a).kinds:
            look, sweep = local_step.compilations(num_rows, a, kind)
            looks.append(look)
            sweeps[kind._replace(topics=min(kind.topics, len(a)), num_blocks=1)] = sweep
    return [*sweeps.values(), *looks]
