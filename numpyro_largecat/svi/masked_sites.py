# SPDX-License-Identifier: Apache-2.0
"""Refuse latent sites whose prior is masked where their guide is not."""

from __future__ import annotations

from collections.abc import Collection

import numpyro.distributions as dist

from numpyro_largecat.handlers.sites import Sites, base_distribution, is_latent, unmasked


def masked_sites(sites: Sites) -> list[str]:
    """The latent sites of a model whose prior counts only where a mask says so."""
    return [name for name, s in sites.items() if is_latent(s) and unmasked(s["fn"])[1] is not True]


def refuse_masked_sites(masked: Collection[str], guide_sites: Sites) -> None:
    """Refuse those of them that the guide draws whatever the mask.

    Such a site adds the entropy of its guide to the ELBO, and no prior holds it: the wider the
    guide gets, the higher the ELBO is, without end. A point has no entropy, and passes; so does a
    value that is made of a joint draw of several sites, which does not show here.

    Raises:
        ValueError: With the site, and where the mask belongs.
    """
    for name in masked:
        site = guide_sites.get(name)
        if site is None or isinstance(base_distribution(site["fn"]), dist.Delta):
            continue
        if unmasked(site["fn"])[1] is True:
            raise ValueError(
                f"latent site '{name}' is inside of a mask in the model, but not in the guide: "
                "where its prior is masked its guide grows wider without end, and the ELBO is no "
                "bound. Put what is observed alone inside of `numpyro.handlers.mask`; rows of "
                "which nothing is seen then follow their prior."
            )
