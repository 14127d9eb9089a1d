# SPDX-License-Identifier: Apache-2.0
"""A fit, and the arguments of its model on which it is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class BoundFit:
    """What each reading of a fit needs; its input was checked by ``Fitted``."""

    model: Callable[..., Any]
    guide: Callable[..., Any]
    params: dict[str, Any]
    site: str | None  # name of the choice; None where it is found
    plate: str | None  # name of its class plate
    chunk_size: int  # classes evaluated at once
    progress_bar: bool
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def followed_by(self, arrays: tuple[Any, ...]) -> BoundFit:
        """The same fit with these arrays after its arguments, as those of a batch come."""
        return replace(self, args=(*self.args, *arrays))
