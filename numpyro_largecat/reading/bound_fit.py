# SPDX-License-Identifier: Apache-2.0
"""A fit, and the arguments of its model on which it is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from numpyro_largecat.handlers.run_model import sites_of
from numpyro_largecat.handlers.sites import Sites
from numpyro_largecat.handlers.touched_rows import TouchedRows


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

    def sites(
        self, fn: Callable[..., Any], touched: TouchedRows | None = None, **how: Any
    ) -> Sites:
        """The sites of model or guide with these arguments and parameters, see ``sites_of``.

        Args:
            fn: Model or guide, inside of whatever handlers must see its messages first.
            touched: The rows of its plates, where these are shared with another run.
            **how: What else ``sites_of`` takes.
        """
        touched = TouchedRows() if touched is None else touched
        return sites_of(fn, self.args, self.kwargs, params=self.params, touched=touched, **how)

    def followed_by(self, arrays: tuple[Any, ...]) -> BoundFit:
        """The same fit with these arrays after its arguments, as those of a batch come."""
        return replace(self, args=(*self.args, *arrays))
