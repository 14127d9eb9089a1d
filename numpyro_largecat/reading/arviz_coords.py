# SPDX-License-Identifier: Apache-2.0
"""Names of dimensions, and labels along them, as ArviZ shows them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from numpyro_largecat.reading.model_layout import LatentSite
from numpyro_largecat.reading.shown_rows import ShownRows


def dims_of(name: str, site: LatentSite, dims: Mapping[str, Sequence[str]]) -> list[str]:
    """Names of the axes of a site: its plates, then its event."""
    event_dim = site.event_dim
    num_batch = jnp.ndim(site.value) - event_dim
    plates = {frame.dim: frame.name for frame in site.frames}
    batch = [plates.get(i - num_batch, f"{name}_batch_{i}") for i in range(num_batch)]
    event = list(dims.get(name, [f"{name}_dim_{i}" for i in range(event_dim)]))
    if len(event) != event_dim:
        need = f"its {event_dim} event dimensions"
        raise ValueError(f"`dims` of site '{name}' must name {need}; got {event}.")
    return batch + event


def lengths_of(
    site_dims: Mapping[str, list[str]],
    shapes: dict[str, tuple[int, ...]],
    dims: Mapping[str, Sequence[str]],
) -> dict[str, set[int]]:
    """Lengths of each dimension; none of those that are named for sites which are left out."""
    lengths: dict[str, set[int]] = {dim: set() for names in dims.values() for dim in names}
    for name, shape in shapes.items():
        default = [f"{name}_dim_{i}" for i in range(len(shape))]
        for dim, length in zip(site_dims.get(name, default), shape, strict=False):
            lengths.setdefault(dim, set()).add(length)
    return lengths


def refuse_unknown_dims(dims: Mapping[str, Sequence[str]], known: set[str]) -> None:
    """Refuse dimensions of what is no site of the model or guide, and no constant."""
    unknown = sorted(dims.keys() - known)
    if unknown:
        raise ValueError(
            "`dims` must have names of sites that are shown, or of `constant_data`, "
            f"{sorted(known)}; got {unknown}. Axes of plates have the plate's name already."
        )


def refuse_two_readings(
    given: dict[str, NDArray[Any]], sizes: dict[str, int], by_id: dict[str, Array]
) -> None:
    """Refuse labels that may be those of all rows in order, or of the rows as they are named."""
    for name, rows in by_id.items():
        in_order = np.arange(sizes[name])
        if len(given.get(name, ())) == len(rows) == sizes[name] and (rows != in_order).any():
            raise ValueError(
                f"`coords['{name}']` may be of all rows in order, or of those of "
                f"`rows['{name}']` in another. Give `rows` by label, and `coords` of all rows."
            )


def labels_of_shown(
    given: dict[str, NDArray[Any]],
    sizes: dict[str, int],
    shown: ShownRows,
    lengths: dict[str, set[int]],
) -> dict[str, NDArray[Any]]:
    """Labels of the rows shown, by default their ids, and of the other dimensions."""
    ids = shown.ids | shown.observed
    others = lengths.keys() - sizes.keys()
    if not given.keys() <= sizes.keys() | others:
        raise ValueError(
            f"`coords` names {sorted(given.keys() - sizes.keys() - others)}; the plates are "
            f"{sorted(sizes)}, and the other dimensions {sorted(others)}."
        )
    for name, labels in given.items():
        allowed = {len(ids[name])} if name in ids else lengths.get(name, set())
        if name in ids and name not in shown.new:
            allowed |= {sizes[name]}
        if allowed and len(labels) not in allowed:
            need = " or ".join(map(str, sorted(allowed)))
            each = f"one for each row{' or row shown' * (len(allowed) > 1)}"
            got = f"got {len(labels)}"
            raise ValueError(f"`coords['{name}']` must have {need} labels, {each}; {got}.")
    found = dict(given)
    for name, rows in ids.items():
        labels = given.get(name, np.asarray(rows))
        is_whole = name in given and name not in shown.new and len(labels) == sizes[name]
        found[name] = labels[np.asarray(rows)] if is_whole else labels
    return found
