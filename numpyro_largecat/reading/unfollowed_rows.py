# SPDX-License-Identifier: Apache-2.0
"""Rows of entity plates that move the utilities of a choice, and that its u does not follow."""

from __future__ import annotations

from typing import Any

import numpyro.distributions as dist

from numpyro_largecat.handlers.plate_facts import row_plates
from numpyro_largecat.handlers.run_model import sites_of
from numpyro_largecat.handlers.sites import (
    Site,
    base_distribution,
    is_continuous_latent,
    is_latent,
    plates_of,
)
from numpyro_largecat.handlers.touched_rows import TouchedRows
from numpyro_largecat.reading.bound_fit import BoundFit
from numpyro_largecat.reading.findings import Finding
from numpyro_largecat.reading.static_result import static_result


def unfollowed_rows(fit: BoundFit, choice: str) -> list[Finding]:
    """A finding for each site of an entity plate, if u of a choice is kept and follows no values.

    None of points, which have no width. Sites that the choice does not depend on are among them.

    Cost: a trace of model and guide; nothing is computed.
    """
    if f"{choice}_u" not in fit.params or f"{choice}_slopes" in fit.params:
        return []

    def names() -> list[str]:
        known: dict[str, Any] = {"params": fit.params, "touched": TouchedRows()}
        sites = sites_of(fit.model, fit.args, fit.kwargs, **known)
        entities = {name for name, facts in row_plates(sites).items() if facts.kind == "entities"}
        found = [
            name
            for name, site in sites.items()
            if is_latent(site) and is_continuous_latent(site) and plates_of(site) & entities
        ]
        if not found:
            return []
        guide = sites_of(fit.guide, fit.args, fit.kwargs, **known)
        return [name for name in found if not _is_point(guide.get(name))]

    advice = "its sds may be 0.7 of what they should be: `sample_choice(..., follow=)`"
    return [
        Finding(f"values that u follows, {name}", 0.0, advice=advice)
        for name in static_result(names)
    ]


def _is_point(site: Site | None) -> bool:
    """Whether a guide has no width for a site, or not this site."""
    return site is None or isinstance(base_distribution(site["fn"]), dist.Delta)
