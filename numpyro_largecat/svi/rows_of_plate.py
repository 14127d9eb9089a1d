# SPDX-License-Identifier: Apache-2.0
"""What of a log density belongs to each row of a plate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_largecat.handlers.plate_facts import (
    PlateFacts,
    class_plates,
    plate_facts,
    rows_request,
)
from numpyro_largecat.handlers.sites import (
    Site,
    Sites,
    is_latent,
    log_prob_of,
    mutable_values,
    of_type,
    plates_of,
    scale_of,
)


@dataclass(frozen=True, eq=False)
class RowsOfPlate:
    """Rows of a plate that are independent of each other given what is outside of it.

    Attributes:
        plate: Name of the plate.
        num_rows: Number of rows R that are held.
        scale: What the log density of each row is multiplied by, N / B.
        readers: Name of the plate of the observations that read one row each; None if there is
            none.
        row_read: The row that each of these reads, shape (B,).
    """

    plate: str
    num_rows: int
    scale: float
    readers: str | None = None
    row_read: Array | None = None

    def log_densities(self, sites: Sites) -> tuple[Array, Array]:
        """Log density of each row, (R,), without ``scale``; and of all else, with its scales."""
        of_rows, elsewhere = jnp.zeros(self.num_rows), jnp.zeros(())
        for site in of_type("sample", sites).values():
            terms = scale_of(site) * log_prob_of(site)
            dims = {frame.name: frame.dim for frame in site["cond_indep_stack"]}
            if self.plate in dims:
                of_rows += _by_row(terms, dims[self.plate]) / self.scale
            elif self.readers in dims and self.row_read is not None:
                of_readers = _by_row(terms, dims[self.readers]) / self.scale
                of_rows = of_rows.at[self.row_read].add(of_readers)
            else:
                elsewhere += terms.sum()
        return of_rows, elsewhere

    def latent_values(self, sites: Sites) -> tuple[dict[str, Array], dict[str, Array]]:
        """Values of the latent sites in the plate, and of those outside of it, by name."""
        values = {name: site["value"] for name, site in sites.items() if is_latent(site)}
        inside = self._latent(sites).keys()
        outside = values.keys() - inside
        return {n: values[n] for n in inside}, {n: values[n] for n in outside}

    def are_scaled(self, sites: Sites) -> Array:
        """Whether a latent row counts other than ``scale`` times, or 0, as that of padding."""
        scales = [jnp.asarray(scale_of(site)) for site in self._latent(sites).values()]
        ratios = [scale / self.scale for scale in scales]
        return jnp.stack([((r != 0) & (jnp.abs(r - 1) > 1e-4)).any() for r in ratios]).any()

    def where(self, chosen: Array, site: Site, values: Array, others: Array) -> Array:
        """The ``values`` of a site in the rows that are ``chosen``, (R,), and others elsewhere."""
        dim = next(f.dim for f in site["cond_indep_stack"] if f.name == self.plate)
        axes_after = -dim - 1 + site["fn"].event_dim
        return jnp.where(chosen.reshape(-1, *(1,) * axes_after), values, others)

    def _latent(self, sites: Sites) -> Sites:
        return {n: s for n, s in sites.items() if is_latent(s) and self.plate in plates_of(s)}


def rows_of_plate(plate: str, model_sites: Sites, guide_sites: Sites) -> RowsOfPlate:
    """Learn which rows a plate holds, and which observations read them.

    Raises:
        ValueError: If there is no such plate, or it is one of classes, or has no latent sites, or
            if the guide draws these outside of it.
        NotImplementedError: If classes are sampled, or there are mutable sites.
    """
    plates = of_type("plate", model_sites)
    if plate not in plates:
        names = sorted(name for name, site in plates.items() if rows_request(site) is None)
        raise ValueError(f"`plate` must be a plate of the model, one of {names}; got '{plate}'.")
    site, facts = plates[plate], plate_facts(plates[plate])
    _refuse_classes(plate, model_sites, facts)
    _refuse_mutable(model_sites | guide_sites)
    latent = [n for n, s in model_sites.items() if is_latent(s) and plate in plates_of(s)]
    if not latent:
        raise ValueError(f"plate '{plate}' has no latent site, whose draws could be weighted.")
    for name in latent:
        if name not in guide_sites or plate not in plates_of(guide_sites[name]):
            raise ValueError(
                f"the guide must draw site '{name}' inside of plate '{plate}', as the model does."
            )
    rows = site["value"]
    scale = site["args"][0] / len(rows) if facts.stands_for is None else facts.stands_for
    readers, row_read = _readers(rows, facts, model_sites)
    _refuse_estimates(plate, readers, model_sites)
    return RowsOfPlate(plate, len(rows), scale, readers, row_read)


def _refuse_classes(plate: str, sites: Sites, facts: PlateFacts) -> None:
    if facts.kind == "classes":
        raise ValueError(
            f"`plate` must be one whose rows are independent given what is outside; those of the "
            f"class plate '{plate}' meet in each choice. Weigh the rows of people or groups."
        )
    for name, of_plate in class_plates(sites).items():
        if of_plate.is_sampled:
            raise NotImplementedError(
                f"plate '{name}' holds a sample of its classes, so that likelihoods are estimates, "
                "whose exponentials would be weights that are too large on average. Open it in "
                "full, `num_sampled=None`."
            )


def _refuse_estimates(plate: str, readers: str | None, sites: Sites) -> None:
    """Refuse likelihoods of a row that stand for others too."""
    for name, site in of_type("sample", sites).items():
        frames = {frame.name: frame.size for frame in site["cond_indep_stack"]}
        for other in frames.keys() - {plate, readers} if frames.keys() & {plate, readers} else ():
            size = sites[other]["args"][0]
            if plate_facts(sites[other]).kind != "entities" and size != frames[other]:
                raise NotImplementedError(
                    f"site '{name}' is in plate '{other}' too, of which a step holds "
                    f"{frames[other]} of {size} rows, so that the weights of the rows of "
                    f"'{plate}' would be exponentials of estimates, too large on average. Hold "
                    "all rows of that plate."
                )


def _refuse_mutable(sites: Sites) -> None:
    if mutable := sorted(mutable_values(sites)):
        raise NotImplementedError(
            f"each draw would move the mutable sites {mutable}, such as batch statistics, in a way "
            "of its own. Keep them fixed, or take Trace_ELBO."
        )


def _readers(rows: Array, facts: PlateFacts, sites: Sites) -> tuple[str | None, Array | None]:
    """The plate of the observations with one id each, and the row that each reads."""
    labels = facts.labels
    if labels is None:
        return None, None
    plates = of_type("plate", sites)
    as_long = [
        frame.name
        for site in sites.values()
        if site["type"] == "sample"
        for frame in site["cond_indep_stack"]
        if frame.size == len(labels) and plate_facts(plates[frame.name]).kind != "entities"
    ]
    of_data = [name for name in as_long if plate_facts(plates[name]).kind == "data"]
    readers = next(iter(of_data or as_long), None)
    # Of a padded row and one before it that holds the same entity, the first is meant.
    order = jnp.argsort(rows, stable=True)
    return readers, order[jnp.searchsorted(rows[order], labels)]


def _by_row(terms: Any, dim: int) -> Array:
    """Sum over all axes but one."""
    terms = jnp.asarray(terms)
    others = tuple(np.delete(np.arange(terms.ndim), terms.ndim + dim))
    return terms.sum(axis=others)
