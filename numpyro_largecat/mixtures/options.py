# SPDX-License-Identifier: Apache-2.0
"""What few fits of a mixture need to change."""

from __future__ import annotations

from dataclasses import dataclass

from numpyro_largecat.ops.step_sizes import check_step_sizes


@dataclass(frozen=True)
class Options:
    """Sizes of stochastic steps, ``(delay + t) ** -forgetting`` with t = 1, 2, ...

    Attributes:
        delay: At least 0. With 0 the first batch takes the place of all that was known.
        forgetting: In [0, 1]; steps converge above 0.5.

    Raises:
        ValueError: If a number is out of range.

    Example:
        >>> import numpyro_largecat as lc
        >>> lc.mixtures.Options(forgetting=0.7)
        Options(delay=1.0, forgetting=0.7)
    """

    delay: float = 1.0
    forgetting: float = 0.55

    def __post_init__(self) -> None:
        check_step_sizes(self.delay, self.forgetting)
