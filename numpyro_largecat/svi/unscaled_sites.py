# SPDX-License-Identifier: Apache-2.0
"""Find likelihoods of a minibatch that are not scaled to the whole data."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array

from numpyro_largecat.handlers.plate_facts import plate_facts, row_plates
from numpyro_largecat.handlers.sites import (
    Site,
    Sites,
    log_factor,
    of_type,
    param_options,
    plates_of,
    scale_of,
)


def unscaled_sites(sites: Sites, batch_size: int) -> dict[str, Array]:
    """Find observed sites in no subsampled plate, though the model needs one for a minibatch.

    It does for what ``sample_choice`` keeps for each row, and to weigh the data against latent
    sites that all minibatches share.

    Returns:
        For each such site whether it is wrong: it is not if it is scaled by hand and keeps nothing.
    """
    plates, sampled = of_type("plate", sites), of_type("sample", sites)
    classes = set(row_plates(sites))
    entities = {name for name in classes if plate_facts(plates[name]).kind == "entities"}
    params = of_type("param", sites).values()
    kept = [plates_of(site) for site in params if param_options(site).update_rule is not None]
    shared = [site for site in sampled.values() if _is_shared(site, classes, batch_size)]
    unscaled = [_is_unscaled(site, plates) for site in shared]
    found = {}
    for name, site in sampled.items():
        around = [f for f in site["cond_indep_stack"] if f.name in plates.keys() - classes]
        subsampled = any(plates[frame.name]["args"][0] != frame.size for frame in around)
        is_of_rows = not plates_of(site) & classes or _has_rows(site, classes, batch_size)
        if not site["is_observed"] or subsampled or plates_of(site) & entities or not is_of_rows:
            continue
        if plates_of(site) in kept:
            found[name] = jnp.array(True)
        elif shared:
            found[name] = jnp.stack(unscaled).any() & _is_unscaled(site, plates)
    return found


def plate_of_batch(sites: Sites, lengths: set[int]) -> tuple[int, int] | None:
    """Size of the greatest plate of data that has as many of its rows as a batch, and these."""
    plates, classes = of_type("plate", sites), set(row_plates(sites))
    frames = [frame for site in sites.values() for frame in site.get("cond_indep_stack", [])]
    of_data = [frame for frame in frames if frame.name in plates.keys() - classes]
    sizes = [(plates[frame.name]["args"][0], frame.size) for frame in of_data]
    return max((pair for pair in sizes if pair[0] != pair[1] and pair[1] in lengths), default=None)


def observed_of(site: Site) -> Array:
    """What a site observes; of a factor, which observes nothing, the factor's logarithm."""
    found = log_factor(site)
    return jnp.asarray(site["value"]) if found is None else found


def refuse_unscaled(name: str, site: Site, size: int, batch_size: int) -> None:
    """Raise for a site that ``unscaled_sites`` has found.

    Raises:
        ValueError: Always.
    """
    scale, fix = f"{size} / {batch_size}", ""
    if log_factor(site) is not None:
        fix = (
            " If its value is scaled already, take the scale out of it and put the factor inside "
            f"`with numpyro.handlers.scale(scale={scale}):`; one of the rows of a class or entity "
            "plate belongs inside that plate, without their weights."
        )
    raise ValueError(
        f"site '{name}' observes {batch_size} of the {size} rows of `batches` in each step, but is "
        f"in no plate that knows it, so it is not scaled by {scale}. Open it inside "
        f'`with lc.data_plate("data", {size}, rows) as rows:`, with `rows` the last array of each '
        f"batch.{fix}"
    )


def _is_shared(site: Site, classes: set[str], batch_size: int) -> bool:
    """Whether a site is latent, or a factor of the classes' prior, and all minibatches share it.

    A latent site of a minibatch's own has a plate, or an axis if it is in no class plate, of a
    multiple of ``batch_size``.
    """
    if site["is_observed"] and (log_factor(site) is None or not plates_of(site) & classes):
        return False
    sizes = {frame.size for frame in site["cond_indep_stack"] if frame.name not in classes}
    if not plates_of(site) & classes:
        sizes |= set(jnp.shape(site["value"]))
    return not any(size and size % batch_size == 0 for size in sizes)


def _has_rows(site: Site, classes: set[str], batch_size: int) -> bool:
    """Whether a site of class plates has an axis of a minibatch besides those of the plates.

    A factor follows from the minibatch by the rows of its classes, so that its axes alone tell: one
    of a plate that is not as long as the minibatch is something else's, such as of features.
    """
    found = log_factor(site)
    shape = list(jnp.shape(site["value"] if found is None else found))
    if found is None:
        shape = shape[: len(shape) - site["fn"].event_dim]
    for frame in site["cond_indep_stack"]:
        is_known = frame.name in classes or (found is not None and frame.size != batch_size)
        if is_known and len(shape) >= -frame.dim:
            shape[frame.dim] = 0
    return any(size and size % batch_size == 0 for size in shape)


def _is_unscaled(site: Site, plates: dict[str, Any]) -> Array:
    """Whether nothing but class plates scales a site."""
    return jnp.all(scale_of(site) == _class_weights(site, plates))


def _class_weights(site: Site, plates: dict[str, Any]) -> Array:
    """Scale that the class plates around a site give it."""
    scale = jnp.ones(())
    for frame in site["cond_indep_stack"]:
        weights = plate_facts(plates[frame.name]).row_weights if frame.name in plates else None
        if weights is not None:
            scale *= weights.reshape((-1,) + (1,) * (-1 - frame.dim))
    return scale
