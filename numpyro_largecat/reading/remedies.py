# SPDX-License-Identifier: Apache-2.0
"""What to give a fit whose guide does not fit the model, beyond the guide that it has."""

from __future__ import annotations

from typing import Any, NamedTuple

from numpyro.infer.autoguide import AutoContinuous, AutoDiagonalNormal

from numpyro_largecat.guides.auto_row_normal import AutoRowNormal
from numpyro_largecat.handlers.automatic_guides import all_parts

_FOLLOW = "let rows `follow` the small sites, lc.AutoRowNormal(model, follow=[...])"
_OTHER = "compare with NUTS, on a part of the data"


class Remedies(NamedTuple):
    """What would widen each part of a guide."""

    small_sites: str
    rows: str

    @classmethod
    def of(cls, guide: Any) -> Remedies:
        """Of an automatic guide the next richer one; of another that which has covariances."""
        parts = list(all_parts(guide))
        row_guides = [part for part in parts if isinstance(part, AutoRowNormal)]
        if any(part.follow for part in row_guides):
            return cls(_OTHER, _OTHER)
        rows = _FOLLOW if row_guides else "take lc.AutoRowNormal"
        has_covariance = bool(row_guides) or any(
            isinstance(part, AutoContinuous) and not isinstance(part, AutoDiagonalNormal)
            for part in parts
        )
        return cls(_FOLLOW if has_covariance else "give them one AutoMultivariateNormal", rows)
