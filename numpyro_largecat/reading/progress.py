# SPDX-License-Identifier: Apache-2.0
"""A progress bar for loops inside compiled functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from numpyro_largecat._progress_bar import progress_bar


def count_steps(unit: str, total: int, show: bool) -> Callable[[], None]:
    """Make a function that counts one step in each of its compiled calls, ``total`` in all.

    The bar opens with the first step and closes with the last, so that a compiled function may be
    called again. Without ``show`` nothing is done.
    """
    if not show:
        return lambda: None
    bar: list[Any] = []

    def advance() -> None:
        if not bar:
            bar.append(progress_bar(total=total, unit=f" {unit}"))
        bar[0].update()
        if bar[0].n == total:
            bar.pop().close()

    return lambda: jax.debug.callback(advance)
