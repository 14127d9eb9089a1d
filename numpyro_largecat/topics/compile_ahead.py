# SPDX-License-Identifier: Apache-2.0
"""Compiling the code of a fit beside its work, on other cores."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from numpyro_largecat.topics.collapsed import Collapsed
from numpyro_largecat.topics.document_pieces import Blocks
from numpyro_largecat.topics.passes import Priors, Problem


def compilations(
    problem: Problem, num_rows: int, priors: Priors
) -> tuple[list[Callable[[], object]], list[Callable[[], object]]]:
    """Calls that compile what visits run: for the first passes, and for those after candidates.

    Most of the time of compilation is that of ``Collapsed`` documents. For other local steps, over
    a mesh and where a number of topics is yet to be learned, code is compiled when it is needed.
    """
    local_step = problem.local_step
    if not isinstance(local_step, Collapsed) or local_step.mesh is not None:
        return [], []
    known = set[Blocks]()

    def of(a: NDArray[np.floating]) -> list[Callable[[], object]]:
        looks, sweeps = [], []
        for kind in problem.layout.for_concentration(a).kinds:
            look, sweep = local_step.compilations(num_rows, a, kind)
            looks.append(look)
            same = kind._replace(topics=min(kind.topics, len(a)))  # the code of sweeps knows
            sweeps += [] if same in known else [sweep]
            known.add(same)
        return [*sweeps, *looks]

    first = problem.candidates.first_priors(priors).topics
    return of(first), of(priors.topics) if len(priors.topics) != len(first) else []
