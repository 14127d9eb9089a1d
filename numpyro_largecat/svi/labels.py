# SPDX-License-Identifier: Apache-2.0
"""Labels and row ids that a model gives to its plates and observes at its sites."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array

from numpyro_largecat._checks import BadDataError, check_in_range, is_concrete, refuse_entries
from numpyro_largecat._conversions import NO_ID
from numpyro_largecat.choices.choice_distribution import ChoiceDistribution
from numpyro_largecat.handlers.plate_facts import class_plates, plate_facts, rows_request
from numpyro_largecat.handlers.sites import (
    Site,
    Sites,
    base_distribution,
    is_continuous_latent,
    is_latent,
    is_observed,
    of_type,
    plates_of,
)
from numpyro_largecat.plates.row_subset import refuse_repeated_rows


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("values", "known"),
    meta_fields=("size", "meaning", "in_order", "plate", "latent", "fix"),
)
@dataclass(frozen=True)
class Labels:
    """Classes or row ids that a model was given, at a plate or an observed site."""

    values: Array  # classes or row ids, any shape
    size: int  # number of classes K, or of rows N
    meaning: str = "classes"  # what the values are, for messages
    known: Array | None = None  # the classes of a subset that can be observed, padded with K
    in_order: bool = False  # whether each value must be the one that is known in its place
    plate: str = ""  # the plate whose rows must not repeat, since it holds a latent site
    latent: str | None = None  # that site
    fix: str = ""  # what is most often wrong where they are out of range


class GivenLabels(NamedTuple):
    """All labels that a model was given."""

    labels: dict[str, Labels]  # by what has them, in words
    misread: dict[str, Array]  # whether labels are taken for columns of a subset, by a message
    unnamed: dict[str, Array]  # whether a choice lacks the classes of the plate, by a message


def labels_of(sites: Sites) -> GivenLabels:
    """Find the labels in a trace of a model.

    Raises:
        ValueError: If a site has utilities of a subset of the classes, and no ``classes``, or an
            entity plate has counts of other data than the data plate's.
    """
    found = GivenLabels({}, {}, {})
    _check_counts(sites)
    for name, site in sites.items():
        facts = plate_facts(site)
        if facts.labels is not None:
            of_entities = facts.kind == "entities"
            argument, meaning = ("ids", "entities") if of_entities else ("labels", "classes")
            found.labels[f"`{argument}` of plate '{name}'"] = Labels(
                facts.labels, site["args"][0], meaning
            )
        if facts.reads is not None:
            asked = jnp.where(facts.reads == NO_ID, 0, facts.reads)
            found.labels[f"`reads` of plate '{name}'"] = Labels(asked, site["args"][0])
        if facts.row_ids is not None:
            inside = (str(n) for n, other in sites.items() if _is_latent_inside(other, name))
            found.labels[f"`rows` of plate '{name}'"] = Labels(
                facts.row_ids, site["args"][0], "row ids", plate=name, latent=next(inside, None)
            )
        elif is_observed(site):
            _look_at_observed(name, site, sites, found)
    return found


def _check_counts(sites: Sites) -> None:
    """Refuse counts of entities that are not those of as many observations as the data has."""
    plates = of_type("plate", sites)
    ratios = {
        name: site["args"][0] / site["value"].shape[0]
        for name, site in plates.items()
        if plate_facts(site).kind == "data" or _is_plain_part(site)
    }
    for name, site in plates.items():
        known = plate_facts(site).stands_for
        if known is None or not ratios:
            continue
        if not any(abs(known - ratio) <= 1e-6 * ratio for ratio in ratios.values()):
            data, ratio = next(iter(ratios.items()))
            raise ValueError(
                f"`counts` of plate '{name}' must be of all observations: they have {known:.6g} "
                f"ids for each of the minibatch, and plate '{data}' has {ratio:.6g} rows for each. "
                "Count the same arrays that the model reads, those of the training data alone, "
                f"`lc.EntityCounts.of(size, *all_ids)`; or mend the size of plate '{data}'."
            )


def _is_plain_part(site: Site) -> bool:
    """Whether this is NumPyro's own plate with some of its rows."""
    size, subsample_size = site["args"]
    if rows_request(site) is not None:  # the helper site of a plate of ours
        return False
    return plate_facts(site).kind == "plain" and subsample_size not in (None, size)


def _is_latent_inside(site: Site, plate: str) -> bool:
    return is_latent(site) and plate in plates_of(site) and is_continuous_latent(site)


def _look_at_observed(name: str, site: Site, sites: Sites, found: GivenLabels) -> None:
    """Add what a site observes, if it is a choice, to what was found."""
    fn, value = base_distribution(site["fn"]), site["value"]
    if isinstance(fn, ChoiceDistribution):
        known, fix = None if fn.classes is None else fn.classes.labels, ""
        for plate in _subsets(sites, fn.num_categories) if fn.classes is None else ():
            fix = "Pass `classes=` from the plate."
            message = (
                f"site '{name}' has utilities of {fn.num_categories} classes, as many as plate "
                f"'{plate}' holds of its {sites[plate]['args'][0]}, and observes its labels, but "
                f"has no `classes`. {fix}"
            )
            found.unnamed[message] = _are_labels(value, fn.num_categories, sites[plate])
        found.labels[f"`obs` of site '{name}'"] = Labels(
            jnp.asarray(value),
            fn.num_categories,
            known=known,
            in_order=fn.classes is not None and fn.classes.negatives != "batch",
            fix=fix,
        )
    elif isinstance(fn, (dist.CategoricalLogits, dist.CategoricalProbs)):
        size = jnp.shape(fn.logits if isinstance(fn, dist.CategoricalLogits) else fn.probs)[-1]
        for plate in _subsets(sites, size):
            message = (
                f"site '{name}' is a Categorical of {size} outcomes, as many as plate '{plate}' "
                f"holds of its {sites[plate]['args'][0]} classes, and observes labels, which would "
                "be taken for columns of that subset. Use `lc.sample_choice`, or "
                "`lc.UtilityCategorical(utilities, classes)` with the `classes` that the plate "
                "gives."
            )
            found.misread[message] = _are_labels(value, size, sites[plate])


def _are_labels(value: Array, size: int, plate: Site) -> Array:
    """Whether these are labels of a plate and not places among ``size`` columns.

    Places are right, as a softmax written by hand may have them.
    """
    labels = plate_facts(plate).labels
    if labels is None:
        return jnp.any(jnp.asarray(value) >= size)
    return jnp.isin(jnp.asarray(value), labels).all()


def _subsets(sites: Sites, size: int) -> Iterator[str]:
    """Class plates of which a step holds this many classes for one observation, and not all."""
    for name, facts in class_plates(sites).items():
        if facts.row_weights is None:
            continue
        of_subset = (facts.row_weights.shape[0], facts.num_scored)
        if size in of_subset and size != sites[name]["args"][0]:
            yield name


def check_labels(given: GivenLabels) -> None:
    """Refuse bad labels; tracers pass, but for a choice that may lack classes.

    Raises:
        ValueError: If labels are out of range, are unknown to the class plate or are taken for
            columns, or if rows repeat; with the position and value of the first that is bad.
    """
    for message, is_wrong in given.unnamed.items():
        if not is_concrete(is_wrong) or is_wrong:
            raise ValueError(message)
    for name, found in given.labels.items():
        check_in_range(name, found.values, found.size, found.meaning)
        _check_known(name, found)
        if found.latent is not None and found.values.ndim == 1:
            refuse_repeated_rows(found.plate, found.latent, found.values)
    for message, is_wrong in given.misread.items():
        if is_concrete(is_wrong) and is_wrong:
            raise ValueError(message)


def _check_known(name: str, found: Labels) -> None:
    """Raise BadDataError at the first label that is not known; tracers pass."""
    values, known = found.values, found.known
    if known is None or not is_concrete(values) or not is_concrete(known):
        return
    need = "among the labels of the class plate"
    fix = "Give the plate the same labels: `class_plate(..., labels=y)`."
    bad = ~np.isin(np.asarray(values), np.asarray(known))
    if found.in_order and values.shape[-1:] == known.shape:
        need = "the labels of the class plate, in their order"
        bad = np.asarray(values) != np.asarray(known)
    refuse_entries(name, values, bad, need, fix, error=BadDataError)
