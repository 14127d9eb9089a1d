# SPDX-License-Identifier: Apache-2.0
"""Rows whose prior is learned: whether the form that it is written in suits the data."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from numpyro_largecat.guides.not_centred import learned_priors
from numpyro_largecat.handlers.plate_facts import row_plates
from numpyro_largecat.handlers.run_model import sites_of
from numpyro_largecat.handlers.sites import is_latent, plates_of
from numpyro_largecat.handlers.static_result import static_result
from numpyro_largecat.reading.bound_fit import BoundFit
from numpyro_largecat.reading.findings import Finding

LEAST_SEEN = 0.5  # share of the rows, below which those without data outnumber the others
MANY = 10  # observations of each row, from which the centred form learns sooner
APART = "_decentered"  # ends the name of what such a site is written around


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


def learned_priors_of_classes(
    fit: BoundFit, plate: str, labels: NDArray[np.integer], num_categories: int
) -> list[Finding]:
    """A finding for each site of a class plate with a learned prior, in whichever form it is.

    Args:
        fit: The fit, on a batch.
        plate: The class plate.
        labels: The classes of the observations.
        num_categories: Number of classes.
    """
    counts = np.bincount(labels, minlength=num_categories)
    seen, median = float((counts > 0).mean()), float(np.median(counts))
    pulled = "untouched rows pull it down: lc.not_centred" * (seen < LEAST_SEEN)
    slow = "so few that the centred form learns slowly: lc.not_centred" * (median < MANY)
    found = []
    for name, plates in learned_rows(fit).items():
        if plate in plates:
            found += [
                Finding(f"share of rows seen, {name}, learned prior", seen, advice=pulled),
                Finding(
                    f"median of observations of a row, {name}, learned prior",
                    median,
                    advice="" if pulled else slow,
                ),
            ]
    advice = "so many that the centred form is better: leave out lc.not_centred" * (median >= MANY)
    return found + [
        Finding(f"median of observations of a row, {name}, not centred", median, advice=advice)
        for name in _not_centred_sites(fit, plate)
    ]


def _not_centred_sites(fit: BoundFit, plate: str) -> list[str]:
    """Sites in the plate that are written around values of a fixed prior, as NumPyro names them."""

    def names() -> list[str]:
        sites = sites_of(fit.model, fit.args, fit.kwargs)
        latent = [n for n, site in sites.items() if is_latent(site) and plate in plates_of(site)]
        return [n.removesuffix(APART) for n in latent if n.endswith(APART)]

    return static_result(names)
