# SPDX-License-Identifier: Apache-2.0
"""What guards a fit while it runs: its result so far, its checkpoints, and SIGTERM."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from numpyro_largecat._result_so_far import attach_result, exit_at_sigterm
from numpyro_largecat.data.checkpoints import Checkpoints, CheckpointWriter, Reached


@contextmanager
def fit_in_progress(
    checkpoints: Checkpoints | None,
    kind: str,
    result_so_far: Callable[[], tuple[Any, str] | None],
    reached: Callable[[], Reached | None],
    num_steps: int = 0,
) -> Iterator[CheckpointWriter]:
    """Lose nothing of the fit in a ``with`` block, which gets the writer of its checkpoints.

    Whatever is raised has the result so far, and what was reached is on disk before: see
    ``attach_result`` and ``CheckpointWriter``, whose arguments these are. With checkpoints, SIGTERM
    raises too.
    """
    with (
        exit_at_sigterm(checkpoints is not None),
        attach_result(result_so_far),
        CheckpointWriter(checkpoints, kind, reached, num_steps) as writer,
    ):
        yield writer
