# SPDX-License-Identifier: Apache-2.0
"""Refuse guides that draw all rows together where a step holds some rows of a plate."""

from __future__ import annotations

from typing import Any

from numpyro.infer.autoguide import (
    AutoContinuous,
    AutoDAIS,
    AutoGuide,
    AutoLaplaceApproximation,
    AutoSemiDAIS,
)

from numpyro_largecat.handlers.automatic_guides import guide_parts
from numpyro_largecat.handlers.run_model import sites_of
from numpyro_largecat.handlers.sites import is_latent
from numpyro_largecat.handlers.static_result import static_result
from numpyro_largecat.handlers.touched_rows import PlateRows, TouchedRows

# They take gradients of a model of their own, or their draws need more than parameters.
NOT_FOR_PARTS = (AutoDAIS, AutoLaplaceApproximation, AutoSemiDAIS)


def refuse_joint_guides(guide: Any, touched: TouchedRows, args: Any, kwargs: Any) -> None:
    """Refuse automatic guides over the joint of sites of which a step holds some rows.

    Cost: one trace of the model for each such guide; nothing is computed.

    Raises:
        NotImplementedError: With the guide, the site, its plate and guides that work.
    """
    for part in guide_parts(guide):
        if isinstance(part, (AutoContinuous, AutoSemiDAIS)):
            plates = _plates_of_sites(part, touched, args, kwargs)
            subsets = {name: plate for name, plate in plates.items() if plate is not None}
            if subsets:
                raise _needs_all_rows(part, subsets, sorted(plates.keys() - subsets.keys()))


def _plates_of_sites(
    part: AutoGuide, touched: TouchedRows, args: Any, kwargs: Any
) -> dict[str, tuple[str, PlateRows] | None]:
    """Latent sites of a guide, each with a plate that holds some of its rows, or None."""

    def look() -> dict[str, tuple[str, PlateRows] | None]:
        found: dict[str, tuple[str, PlateRows] | None] = {}
        for name, site in sites_of(part.model, args, kwargs).items():
            if not is_latent(site):
                continue
            found[name] = None
            for frame in site["cond_indep_stack"]:
                rows = touched.plates.get(frame.name)  # None if hidden by a handler
                if rows is not None and _is_subset(part, rows):
                    found[name] = frame.name, rows
        return found

    return static_result(look)


def _is_subset(part: AutoGuide, rows: PlateRows) -> bool:
    # AutoSemiDAIS is made for rows of the data, but its classes would not be those of the step.
    is_local = isinstance(part, AutoSemiDAIS) and rows.weights is None
    return not rows.full and not is_local


def _needs_all_rows(
    part: AutoGuide, subsets: dict[str, tuple[str, PlateRows]], outside: list[str]
) -> NotImplementedError:
    site, (plate, rows) = next(iter(subsets.items()))
    name = type(part).__name__
    if outside:
        joint = "AutoMultivariateNormal" if isinstance(part, NOT_FOR_PARTS) else name
        fix = (
            "Use it, or another joint guide, for the other sites alone:\n\n"
            "    guide = AutoGuideList(model)\n"
            f"    guide.append(AutoNormal(numpyro.handlers.block(model, hide={outside})))\n"
            f"    guide.append({joint}(numpyro.handlers.block(model, hide={sorted(subsets)})))\n\n"
        )
    else:
        fix = "Use AutoNormal(model) or AutoDelta(model), whose parameters are rows. "
    return NotImplementedError(
        f"{name} draws all rows of its sites together, and site '{site}' is inside plate "
        f"'{plate}', of which a step holds {rows.indices.shape[0]} rows, not all {rows.size}. "
        "lc.AutoRowNormal(model) draws the values of each row together, and those of no row. "
        f"{fix}"
        "Or hold all rows in each step: leave `num_sampled` out, or `rows` or `subsample_size`."
    )
