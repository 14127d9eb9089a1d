# SPDX-License-Identifier: Apache-2.0
"""What of a log density belongs to each row of a plate."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

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
    axes_after_plates,
    is_latent,
    log_prob_of,
    mutable_values,
    of_type,
    plates_of,
    scale_of,
)

Terms = dict[str, Array]  # log densities of sites, with their scales, at each place of their batch


class RowsRead(NamedTuple):
    """The row of an entity plate that each of its ids reads."""

    row: Array  # (B,), any for an id that reads none
    are_nobody: Array  # (B,), which read none

    def in_order(self, values: Array, axis: int) -> Array:
        """Values of the rows on ``axis`` in the order in which they are read; nobody's unknown."""
        taken = jnp.take(values, self.row, axis=axis)
        of_nobody = self.are_nobody.reshape(-1, *(1,) * (values.ndim - axis - 1))
        return jnp.where(of_nobody, unknown_as(taken), taken)


@dataclass(frozen=True, eq=False)
class WeightedRows:
    """Rows of a plate that are independent of each other given what is outside of it.

    Attributes:
        plate: Name of the plate.
        num_rows: Number of rows R that are held.
        scale: What the log density of each row is multiplied by.
        is_part: Whether there are more rows than those, for which they stand.
        are_drawn: Whether the plate draws them, anew for each key.
        readers: Names of the plates of observations that read one row each.
        read: The rows of this and other entity plates that their ids read, by name.
    """

    plate: str
    num_rows: int
    scale: float
    is_part: bool
    are_drawn: bool
    readers: frozenset[str] = frozenset()
    read: dict[str, RowsRead] = field(default_factory=dict)

    def check_are_given(self) -> None:
        """Refuse rows of which nobody knows whose they are."""
        if self.are_drawn:
            raise ValueError(
                f"plate '{self.plate}' draws other rows each time. Make it an `lc.data_plate` that "
                "is given `rows`, or hold all of its rows."
            )

    def of_rows(self, sites: Sites, terms: Terms) -> Array:
        """Sum of what belongs to each row, without ``scale``, shape (R,)."""
        total = jnp.zeros(self.num_rows)
        for name, term in terms.items():
            dim, is_read = self._dim(sites[name])
            if dim is not None:
                others = [axis for axis in range(term.ndim) if axis != term.ndim + dim]
                by_row = term.sum(axis=others) / self.scale
                total = total.at[self._row_read].add(by_row) if is_read else total + by_row
        return total

    def elsewhere(self, sites: Sites, terms: Terms) -> Array:
        """Sum of what belongs to no row."""
        outside = [term.sum() for n, term in terms.items() if self._dim(sites[n])[0] is None]
        return sum(outside, start=jnp.zeros(()))

    def differ(self, sites: Sites, pairs: Terms, is_same: Array) -> Array:
        """Whether two values differ, other than of rows that are not ``is_same``, (R,)."""
        found = []
        for name, (a, b) in pairs.items():
            dim, is_read = self._dim(sites[name])
            differs = _differ(a, b)
            if dim is not None:
                same = is_same[self._row_read] if is_read else is_same
                differs &= same.reshape(-1, *(1,) * (-dim - 1))
            found.append(differs.any())
        return jnp.array(found, bool).any()

    def latent_values(self, sites: Sites) -> tuple[dict[str, Array], dict[str, Array]]:
        """Values of the latent sites in the plate, and of those outside of it, by name."""
        latent = {name: site for name, site in sites.items() if is_latent(site)}
        inside = {n: s["value"] for n, s in latent.items() if self.plate in plates_of(s)}
        return inside, {n: s["value"] for n, s in latent.items() if n not in inside}

    def choose(self, is_first: Array, site: Site, first: Array, other: Array) -> Array:
        """Values of a site with the rows of the ``first`` where ``is_first``, (R,)."""
        axes_after = -1 - axis_of(site, self.plate)
        return jnp.where(is_first.reshape(-1, *(1,) * axes_after), first, other)

    def each_from(self, draw_of_row: Array, site: Site, draws: Array) -> Array:
        """Values of a site with each row from the draw that is named for it, (R,)."""
        axes_after = -1 - axis_of(site, self.plate)
        place = jnp.broadcast_to(draw_of_row.reshape(-1, *(1,) * axes_after), draws.shape[1:])
        return jnp.take_along_axis(draws, place[None], axis=0)[0]

    def as_read(self, are_known: Array, site: Site, values: Array) -> Array:
        """Values of a site, rows of entity plates in the order of their ids.

        Those of the plate are unknown in the rows that are not ``are_known``, (R,).
        """
        if self.plate in plates_of(site):
            values = self.choose(are_known, site, values, unknown_as(values))
        for plate in plates_of(site) & self.read.keys():
            values = self.read[plate].in_order(values, values.ndim + axis_of(site, plate))
        return values

    def deterministic(self, sites: Sites) -> Sites:
        """Arrays in no plate but those of latent sites, with an axis for each of their plates."""
        latent = [plates_of(site) for site in sites.values() if is_latent(site)]
        return {
            name: site
            for name, site in of_type("deterministic", sites).items()
            if _is_array(site["value"])
            and plates_of(site) <= set().union(*latent)
            and axes_after_plates(site) >= 0
            and all(
                jnp.shape(site["value"])[axis_of(site, frame.name)] == frame.size
                for frame in site["cond_indep_stack"]
            )
        }

    def others_in_part(self, sites: Sites) -> list[str]:
        """Other plates with latent sites, of which some rows are held, or by ids."""
        own = set().union(*(plates_of(site) for site in sites.values() if is_latent(site)))
        return [
            name
            for name, plate in of_type("plate", sites).items()
            if name in own - {self.plate} and (name in self.read or _rows_for_each(plate) != 1)
        ]

    @property
    def are_all_in_order(self) -> bool:
        """Whether all rows of the plate are held, in their own order."""
        return not self.is_part and self.plate not in self.read

    def are_scaled(self, sites: Sites) -> Array:
        """Whether something of a row counts other than ``scale`` times, or 0, as that of padding.

        Or a row has only some of its observations: rows that stand for others must each come from
        one row of the data, since nothing else says how many there are.
        """
        is_scaled = []
        for site in of_type("sample", sites).values():
            if self._dim(site)[0] is not None:
                ratio = jnp.asarray(scale_of(site)) / self.scale
                is_scaled.append(((ratio != 0) & ~(jnp.abs(ratio - 1) <= 1e-4)).any())
        if self.is_part and self.plate in self.read:
            rows, are_nobody = self.read[self.plate]
            is_scaled.append((jnp.zeros(self.num_rows).at[rows].add(~are_nobody) > 1).any())
        return jnp.stack(is_scaled).any()

    @property
    def _row_read(self) -> Array:
        return self.read[self.plate].row

    def _dim(self, site: Site) -> tuple[int | None, bool]:
        """Batch dimension of what belongs to rows, and whether it is that of readers."""
        dims = _dims(site)
        if self.plate in dims:
            return dims[self.plate], False
        reading = self.readers & dims.keys()
        return (dims[min(reading)], True) if reading else (None, False)


def terms_of(sites: Sites) -> Terms:
    """What each site of a trace adds to the log density."""
    samples = of_type("sample", sites).items()
    return {name: scale_of(site) * log_prob_of(site) for name, site in samples}


def weighted_rows(plate: str, model_sites: Sites, guide_sites: Sites) -> WeightedRows:
    """Learn which rows a plate holds, and which observations read them.

    Raises:
        ValueError: If there is no such plate, or it is one of classes, or has no latent sites, if
            the guide draws these outside of it, or observations are in two plates that may read.
        NotImplementedError: If classes are sampled, or there are mutable sites.
    """
    plates = of_type("plate", model_sites)
    if plate not in plates:
        names = sorted(name for name, site in plates.items() if rows_request(site) is None)
        raise ValueError(f"`plate` must be a plate of the model, one of {names}; got '{plate}'.")
    facts, rows = plate_facts(plates[plate]), plates[plate]["value"]
    _refuse_classes(plate, model_sites, facts)
    _refuse_mutable(model_sites | guide_sites)
    _check_latent_sites(plate, model_sites, guide_sites)
    scale = _rows_for_each(plates[plate]) if facts.stands_for is None else facts.stands_for
    readers = _readers(plate, scale, facts, model_sites)
    _check_given(readers, model_sites, guide_sites)
    _check_observed(plate, readers, model_sites)
    _refuse_estimates(plate, readers, model_sites)
    are_drawn = facts.kind == "plain" and scale != 1
    return WeightedRows(plate, len(rows), scale, scale != 1, are_drawn, readers, _rows_read(plates))


def _check_latent_sites(plate: str, model_sites: Sites, guide_sites: Sites) -> None:
    latent = [n for n, s in model_sites.items() if is_latent(s) and plate in plates_of(s)]
    if not latent:
        raise ValueError(f"plate '{plate}' has no latent site, whose draws could be weighted.")
    for name in latent:
        if name not in guide_sites or plate not in plates_of(guide_sites[name]):
            raise ValueError(
                f"the guide must draw site '{name}' inside of plate '{plate}', as the model does."
            )


def _check_observed(plate: str, readers: frozenset[str], sites: Sites) -> None:
    observed = [site for site in of_type("sample", sites).values() if not is_latent(site)]
    if not any(plates_of(site) & {plate, *readers} for site in observed):
        raise ValueError(
            f"nothing that is observed is known to belong to a row of plate '{plate}'. Put it "
            f"inside; or read rows by `with lc.entity_plate('{plate}', size, ids, counts) as read` "
            "and `read.rows_of(values, ids)`, with one id in `ids` for each row of an "
            "`lc.data_plate` that what is observed is in, also where a step has all rows."
        )


def _check_given(readers: frozenset[str], model_sites: Sites, guide_sites: Sites) -> None:
    """Refuse outcomes that are drawn by the model, whose densities would count as data."""
    for name, site in model_sites.items():
        if is_latent(site) and plates_of(site) & readers and name not in guide_sites:
            raise ValueError(
                f"site '{name}' is neither observed nor drawn by the guide. Give its values, or "
                "leave its statement out where there are none: `if y is not None: ...`."
            )


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
                "whose exponentials would be weights that are too large on average. Take "
                "TraceMeanField_ELBO and `lc.AutoRowNormal(model, follow=[...])` with the learned "
                "means and scales; or, of few classes, open it in full, `num_sampled=None`."
            )


def _refuse_estimates(plate: str, readers: frozenset[str], sites: Sites) -> None:
    """Refuse likelihoods of a row that stand for others too."""
    plates = of_type("plate", sites)
    for name, site in of_type("sample", sites).items():
        within = plates_of(site)
        if not within & {plate, *readers}:
            continue
        for other in within - {plate, *readers}:
            if plate_facts(plates[other]).kind != "entities" and _rows_for_each(plates[other]) != 1:
                raise NotImplementedError(
                    f"site '{name}' is in plate '{other}' too, of which a step holds "
                    f"{len(plates[other]['value'])} of {plates[other]['args'][0]} rows, so that "
                    f"the weights of the rows of '{plate}' would be exponentials of estimates, too "
                    "large on average. Hold all rows of that plate."
                )


def _refuse_mutable(sites: Sites) -> None:
    if mutable := sorted(mutable_values(sites)):
        raise NotImplementedError(
            f"each draw would move the mutable sites {mutable}, such as batch statistics, in a way "
            "of its own. Keep them fixed, or take Trace_ELBO."
        )


def _readers(plate: str, scale: float, facts: PlateFacts, sites: Sites) -> frozenset[str]:
    """The plates of observations with one id each."""
    labels = facts.labels
    if labels is None:
        return frozenset()
    found = {
        name: plate_facts(site).kind
        for name, site in of_type("plate", sites).items()
        if rows_request(site) is None
        and plate_facts(site).kind in ("data", "plain")
        and len(site["value"]) == len(labels)
        and np.isclose(_rows_for_each(site), scale)
    }
    for name, site in of_type("sample", sites).items():
        own = plates_of(site) & found.keys()
        if len(own) > 1 and plate not in plates_of(site):
            of_data = [reader for reader in own if found[reader] == "data"]
            if len(of_data) != 1:
                raise ValueError(
                    f"site '{name}' is in the plates {sorted(own)}, which have as many rows as "
                    f"plate '{plate}' has ids. Make the one whose rows have these ids an "
                    "`lc.data_plate`."
                )
            found = {n: kind for n, kind in found.items() if n in of_data or n not in own}
    return frozenset(found)


def _rows_read(plates: Sites) -> dict[str, RowsRead]:
    """Of each entity plate with ids the row that each of them reads."""
    found = {}
    for name, site in plates.items():
        facts, rows = plate_facts(site), site["value"]
        if facts.labels is not None and facts.are_nobody is not None:
            # Of a padded row and one before it that holds the same entity, the first is meant.
            order = jnp.argsort(rows, stable=True)
            row = order[jnp.searchsorted(rows[order], facts.labels)]
            found[name] = RowsRead(row, facts.are_nobody)
    return found


def _rows_for_each(plate: Site) -> float:
    """Rows that a plate has for each that it holds."""
    return float(plate["args"][0]) / len(plate["value"])


def _dims(site: Site) -> dict[str, int]:
    """Batch dimensions of the plates of a site."""
    return {frame.name: frame.dim for frame in site["cond_indep_stack"]}


def axis_of(site: Site, plate: str) -> int:
    """The axis of a plate in the values of a site, counted from the end."""
    dims = _dims(site)
    if site["type"] == "sample":
        return dims[plate] - int(site["fn"].event_dim)
    return dims[plate] - axes_after_plates(site)


def _is_array(value: Any) -> bool:
    """Whether this is an array of numbers; random keys, for one, are none."""
    if not isinstance(value, (Array, np.ndarray, np.generic)):
        return False
    return jnp.issubdtype(value.dtype, np.number) or value.dtype == bool


def as_number(values: Any) -> Array:
    """Values of a type that has one for what is not known: booleans as integers."""
    array = jnp.asarray(values)
    has_minus_one = jnp.issubdtype(array.dtype, jnp.inexact) or jnp.issubdtype(
        array.dtype, jnp.signedinteger
    )
    return array if has_minus_one else array.astype(int)


def unknown_as(values: Array) -> Array:
    """A scalar that stands for no value, of this type: NaN or, of integers, -1."""
    is_float = jnp.issubdtype(values.dtype, jnp.inexact)
    return jnp.asarray(jnp.nan if is_float else -1, values.dtype)


def _differ(a: Array, b: Array) -> Array:
    """Where log densities of the same arithmetic differ by more than rounding."""
    gap = jnp.abs(a - b)  # infinite, or NaN, where one is not finite
    tolerance = 100 * jnp.finfo(gap.dtype).eps * (1 + jnp.minimum(jnp.abs(a), jnp.abs(b)))
    are_close = (gap <= tolerance) | (a == b) | (jnp.isnan(a) & jnp.isnan(b))
    return ~are_close
