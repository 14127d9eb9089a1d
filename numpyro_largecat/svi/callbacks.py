# SPDX-License-Identifier: Apache-2.0
"""Functions that are called while ``SubsampledSVI.run`` fits."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from numpyro_largecat._checks import check_count, describe
from numpyro_largecat.svi.run_result import SubsampledSVIRunResult


@dataclass
class Progress:
    """What a callback sees of a fit.

    Attributes:
        step: Steps so far.
        num_steps: Steps of the whole fit.
        metrics: ``elbo``, smoothed over about 50 steps; ``seconds`` since the fit began or went on,
            ``steps_per_second`` in these, and ``held_out``, the last held-out score if there is
            one. A callback may add to them for the callbacks after it.
        result: Returns the fit so far, as ``run`` will; O(tables). Its ``state`` lives until the
            next step only, which reuses the memory: copy what you keep.

    Example:
        >>> import numpyro_largecat as lc
        >>> progress = lc.Progress(100, 500, {"elbo": -3.5}, result=lambda: None)
        >>> progress.metrics["share"] = progress.step / progress.num_steps
        >>> progress.metrics
        {'elbo': -3.5, 'share': 0.2}
    """

    step: int
    num_steps: int
    metrics: dict[str, float]
    result: Callable[[], SubsampledSVIRunResult]


@dataclass(frozen=True)
class Callback:
    """A function that ``SubsampledSVI.run`` calls while it fits, between two steps.

    If it raises ``StopIteration`` the fit ends there, and ``run`` returns it; if it goes on from a
    checkpoint, it is asked again at that step. What else it raises leaves ``run``, with
    ``result_so_far``.

    Args:
        function: Takes a ``lc.Progress``; what it returns is not used.
        every_steps: It is called after each multiple of so many steps, at least 1. What was
            interrupted is called again when the fit goes on from a checkpoint.

    Example:
        >>> import jax, numpyro, optax
        >>> import numpyro_largecat as lc
        >>> from numpyro.infer import Trace_ELBO
        >>> def model():
        ...     a = numpyro.param("a", 0.0)
        ...     numpyro.factor("loss", -((a - 1) ** 2))
        >>> svi = lc.SubsampledSVI(model, lambda: None, optax.adam(0.1), Trace_ELBO())
        >>> def show(progress):
        ...     print(progress.step, round(float(progress.result().params["a"]), 1))
        >>> callbacks = [lc.Callback(show, every_steps=50)]
        >>> result = svi.run(jax.random.key(0), 100, callbacks=callbacks, progress_bar=False)
        50 1.0
        100 1.0
    """

    function: Callable[[Progress], Any]
    every_steps: int = 100

    def __post_init__(self) -> None:
        check_count("every_steps", self.every_steps, 1)
        if not callable(self.function):
            raise TypeError(f"`function` must be callable; got {describe(self.function)}.")


class JsonLines:
    """A function for ``Callback`` that appends the metrics to a file, one JSON object a line.

    A fit that goes on after its process was killed writes the steps since the last checkpoint
    again.

    Args:
        path: The file. Its folder must be there.

    Example:
        >>> import json, pathlib, tempfile
        >>> import numpyro_largecat as lc
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "metrics.jsonl"
        >>> write = lc.Callback(lc.JsonLines(path), every_steps=100)
        >>> write.function(lc.Progress(100, 500, {"elbo": -3.5}, result=lambda: None))
        >>> json.loads(path.read_text())
        {'step': 100, 'elbo': -3.5}
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = Path(path)

    def __call__(self, progress: Progress) -> None:
        """Append a line."""
        metrics = {k: v if math.isfinite(v) else None for k, v in progress.metrics.items()}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": progress.step, **metrics}) + "\n")
