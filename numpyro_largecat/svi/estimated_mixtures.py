# SPDX-License-Identifier: Apache-2.0
"""Refuse mixtures of choices that a class plate estimates by drawn classes."""

from __future__ import annotations

from numpyro.distributions.mixtures import MixtureGeneral

from numpyro_largecat.handlers.sites import Sites, base_distribution, estimates_classes, of_type


def refuse_estimated_mixtures(sites: Sites) -> None:
    """Refuse the log of a sum over components, of which an estimate is too high on average.

    (``MixtureSameFamily`` itself refuses a choice, whose support has a parameter.)

    Raises:
        NotImplementedError: With the site.
    """
    for name, site in of_type("sample", sites).items():
        fn = base_distribution(site["fn"])
        if not isinstance(fn, MixtureGeneral):
            continue
        if any(map(estimates_classes, fn.component_distributions)):
            raise NotImplementedError(
                f"site '{name}' is a mixture of choices that sum over a sample of the classes, "
                "which is right on average; the log of a sum over components is not. Open the "
                "class plate in full, `num_sampled=None`."
            )
