# SPDX-License-Identifier: Apache-2.0
"""Rows whose prior is learned, and of which a step touches few."""

from __future__ import annotations

from numpyro_largecat.guides.not_centred import learned_priors
from numpyro_largecat.handlers.plate_facts import row_plates
from numpyro_largecat.handlers.run_model import sites_of
from numpyro_largecat.handlers.sites import plates_of
from numpyro_largecat.handlers.static_result import static_result
from numpyro_largecat.reading.bound_fit import BoundFit
from numpyro_largecat.reading.findings import Finding

LEAST_SEEN = 0.5  # share of the rows, below which those without data outnumber the others


def learned_rows(fit: BoundFit) -> dict[str, set[str]]:
    """Sites whose prior other latent values or parameters move, and their plates of rows.

    Cost: two traces of the model; nothing is computed.
    """
    learned = learned_priors(fit.model, fit.args, fit.kwargs)
    names = [name for name, (parts, _) in learned.items() if any(parts)]

    def plates() -> dict[str, set[str]]:
        sites = sites_of(fit.model, fit.args, fit.kwargs)
        return {name: plates_of(sites[name]) & row_plates(sites).keys() for name in names}

    found: dict[str, set[str]] = static_result(plates)
    return found


def centred_priors(fit: BoundFit, plate: str, share_seen: float) -> list[Finding]:
    """A finding for each site of a class plate whose learned prior is written around its scale.

    Args:
        fit: The fit, on a batch.
        plate: The class plate.
        share_seen: Share of its classes that any observation has.
    """
    advice = "untouched rows pull it down: lc.not_centred" * (share_seen < LEAST_SEEN)
    return [
        Finding(f"share of rows seen, {name}, learned prior", share_seen, advice=advice)
        for name, plates in learned_rows(fit).items()
        if plate in plates
    ]
