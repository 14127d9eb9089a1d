# SPDX-License-Identifier: Apache-2.0
"""Which rows of each plate ArviZ is shown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike
from numpy.typing import NDArray

from numpyro_largecat._checks import check_in_range, check_integers
from numpyro_largecat.reading.chunked_utilities import ChunkedUtilities
from numpyro_largecat.reading.model_layout import ModelLayout
from numpyro_largecat.reading.predictions import labels_of_rows

SMALL_PLATE = 1000  # plates of at most this many rows are shown whole
NUM_FREQUENT = 10  # classes that are shown of a larger plate where none is named


class ShownRows(NamedTuple):
    """Rows by plate."""

    ids: dict[str, Array]  # whose latent values are drawn
    observed: dict[str, Array]  # those of the observations, in the plates of the choice
    new: set[str]  # plates of observations that are no rows of the training data


def named_rows(
    rows: Mapping[str, Any], sizes: dict[str, int], labels: dict[str, NDArray[Any]]
) -> dict[str, Array]:
    """Ids of the rows that are named by id or by label."""
    return {name: _ids_of(name, given, sizes, labels) for name, given in rows.items()}


def small_plates(sizes: dict[str, int]) -> dict[str, int]:
    """The plates that are shown whole, and their sizes."""
    return {name: size for name, size in sizes.items() if size <= SMALL_PLATE}


def rows_to_show(named: dict[str, Array], layout: ModelLayout) -> ShownRows:
    """Without observations: small plates, unless some of their rows are named, and those named."""
    small = {name: jnp.arange(size) for name, size in small_plates(layout.sizes).items()}
    return ShownRows(small | named, {}, set())


def rows_to_show_with(
    obs: ArrayLike, choice: ChunkedUtilities, named: dict[str, Array], layout: ModelLayout
) -> ShownRows:
    """With observations also theirs, and the classes that are most frequent among them."""
    shape = labels_of_rows(obs, choice).shape
    observed = _observed_rows(shape, choice, layout, named)
    sizes = layout.sizes
    new = {n for n, i in observed.items() if n not in layout.row_ids and len(i) != sizes[n]}
    if choice.num_categories > SMALL_PLATE and choice.plate not in named:
        named = named | {choice.plate: _most_frequent(obs, NUM_FREQUENT)}
    small = {
        name: observed.get(name, jnp.arange(size))
        for name, size in small_plates(sizes).items()
        if name not in new
    }
    return ShownRows(small | named, observed, new)


def _ids_of(name: str, given: Any, sizes: dict[str, int], labels: dict[str, NDArray[Any]]) -> Array:
    """Row ids of plate ``name``, of which rows are given by id or by label."""
    if name not in sizes:
        plates = sorted(sizes)
        raise ValueError(f"`rows` names plate '{name}', but the plates of the model are {plates}.")
    wanted = np.asarray(given)
    if are_labels(wanted):
        known = labels.get(name, np.empty(0, wanted.dtype))
        places = np.flatnonzero(np.isin(known, wanted))  # no table of all labels
        found = {label: i for i, label in zip(places.tolist(), known[places].tolist(), strict=True)}
        unknown = [label for label in wanted.tolist() if label not in found]
        if len(known) != sizes[name] or unknown or len(found) != len(places):
            what = f", without {unknown[:3]}" if unknown else ", some of them twice"
            raise ValueError(
                f"`rows['{name}']` names rows by label, for which `coords['{name}']` must have all "
                f"{sizes[name]} labels, each once. It has {len(known)}{what}."
            )
        wanted = np.array([found[label] for label in wanted.tolist()])
    check_integers(f"rows[{name!r}]", wanted)
    check_in_range(f"`rows[{name!r}]`", wanted, sizes[name], "row ids")
    return jnp.asarray(wanted)


def _most_frequent(obs: ArrayLike, number: int) -> Array:
    classes, counts = np.unique(np.asarray(obs), return_counts=True)
    return jnp.asarray(np.sort(classes[np.argsort(-counts, kind="stable")[:number]]))


def _observed_rows(
    shape: tuple[int, ...], chosen: ChunkedUtilities, layout: ModelLayout, named: dict[str, Array]
) -> dict[str, Array]:
    """Row ids of the observations in each plate of the choice; 0, 1, ... where none are given."""
    found = {}
    for name, number in zip(chosen.dims, shape, strict=True):
        if name is None:
            continue
        if name in named:
            raise ValueError(
                f"`rows` names rows of plate '{name}', and with `obs` they are those of the "
                "model's arguments. Leave it out."
            )
        found[name] = layout.row_ids.get(name, jnp.arange(number))
    return found


def are_labels(given: Any) -> bool:
    """Whether rows are given by label."""
    return np.asarray(given).dtype.kind in "OUS"
