# SPDX-License-Identifier: Apache-2.0
"""Refuse discrete sites over which the density of a model does not factorise."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from numpyro_largecat._checks import check_count, is_concrete
from numpyro_largecat.handlers.internals import is_of_scan
from numpyro_largecat.handlers.sites import is_latent
from numpyro_largecat.top_l.marked_sites import is_marked

MARK = "infer={'enumerate': 'parallel'}"


def not_marked(name: str) -> ValueError:
    """The error of a discrete latent site without a mark."""
    return ValueError(
        f"site '{name}' is discrete and latent, and not marked to be enumerated. Mark it in the "
        f"model: `numpyro.sample('{name}', ..., {MARK})`."
    )


def check_marks(model_trace: dict[str, Any], guide_trace: dict[str, Any]) -> None:
    """Refuse discrete latent sites that are not marked, or that the guide draws."""
    for name, site in guide_trace.items():
        if is_latent(site) and site["fn"].is_discrete:
            raise NotImplementedError(
                f"the guide draws the discrete site '{name}', but TopL_ELBO finds the posterior of "
                "discrete sites itself. Leave it out of the guide; for an automatic guide, hide "
                "it: `AutoNormal(lc.hide_enumerated(model))`."
            )
    for name, site in model_trace.items():
        if not is_latent(site) or not site["fn"].is_discrete:
            continue
        if not is_marked(site):
            raise not_marked(name)
        if is_of_scan(site):
            raise NotImplementedError(
                f"the discrete site '{name}' is inside of a `scan`, where it would have a value at "
                "each step: TopL_ELBO takes discrete sites in plates only."
            )


def check_active(num_active: int | dict[str, int], sizes: dict[str, int]) -> dict[str, int]:
    """Return the number of values to keep of each site, of which there are so many."""
    if isinstance(num_active, dict):
        if num_active.keys() != sizes.keys():
            raise ValueError(
                f"`num_active` must have the discrete sites of the model, {sorted(sizes)}; got "
                f"{sorted(num_active)}."
            )
        given = num_active
    else:
        given = dict.fromkeys(sizes, num_active)
    for name, size in sizes.items():
        if check_count("num_active", given[name], 1) > size:
            raise ValueError(
                f"`num_active` must be at most the number of values of site '{name}', {size}; got "
                f"{given[name]}. Give each site its own: `num_active={{'{name}': {size}, ...}}`."
            )
    return dict(given)


def check_dependencies(names: list[str], log_probs: dict[str, frozenset[str]]) -> None:
    """Refuse densities that depend on several discrete sites."""
    for name, known in log_probs.items():
        deps = sorted(known - {name})
        if name in names and deps:
            raise NotImplementedError(
                f"the discrete site '{name}' depends on the discrete site '{deps[0]}': their "
                "posterior does not factorise, and TopL_ELBO does not take chains of discrete "
                "sites. Merge them into one site over pairs of values, or use TraceEnum_ELBO."
            )
        if len(deps) > 1:
            raise NotImplementedError(
                f"the density of site '{name}' depends on the discrete sites {deps}, so that their "
                "posterior does not factorise. Merge them into one site over pairs of values, for "
                "example `pair = sample('pair', Categorical(...))`, `a, b = pair // K, pair % K`."
            )


def check_plates(site: dict[str, Any], dependents: list[dict[str, Any]]) -> None:
    """Refuse dependents that are not inside of all plates of a discrete site."""
    name = site["name"]
    plates = {frame.name: frame for frame in site["cond_indep_stack"]}
    axes = {frame.dim for frame in plates.values()}
    if site["kwargs"].get("sample_shape"):
        raise NotImplementedError(
            f"the discrete site '{name}' has `sample_shape={site['kwargs']['sample_shape']}` "
            "outside of a plate. Put the site into a plate of that size instead."
        )
    for axis, size in enumerate(reversed(site["fn"].batch_shape), start=1):
        if size > 1 and -axis not in axes:
            raise NotImplementedError(
                f"the discrete site '{name}' has batch shape {site['fn'].batch_shape}, but axis "
                f"{-axis} belongs to no plate. Put the site into a plate of that size."
            )
    for other in dependents:
        missing = sorted(plates.keys() - {frame.name for frame in other["cond_indep_stack"]})
        if missing:
            raise NotImplementedError(
                f"site '{other['name']}' depends on the discrete site '{name}' in plate "
                f"'{missing[0]}', but is outside of that plate, so that it depends on all of "
                f"'{name}' at once and the posterior does not factorise. Move it into the plate."
            )


def common_scale(site: dict[str, Any], dependents: list[dict[str, Any]]) -> Any:
    """Scale of a discrete site, which must be that of all its dependents.

    Scales that are traced cannot be compared here: the result is NaN where they differ.
    """
    scale = 1.0 if site["scale"] is None else site["scale"]
    for other in dependents:
        its_scale = 1.0 if other["scale"] is None else other["scale"]
        if its_scale is scale:
            continue
        _check_axes(site, other, its_scale)
        if not (is_concrete(scale) and is_concrete(its_scale)):
            scale = jnp.where(jnp.isclose(scale, its_scale), scale, jnp.nan)
        elif not np.allclose(scale, its_scale):
            raise NotImplementedError(
                f"site '{other['name']}' depends on the discrete site '{site['name']}' and has "
                f"scale {its_scale}, where '{site['name']}' has scale {scale}. The bound is the "
                "log of a sum over values, of which a scaled part is no estimate: inside one "
                f"'{site['name']}' use all rows of a plate, and scale both sites or none."
            )
    return scale


def _check_axes(site: dict[str, Any], other: dict[str, Any], scale: Any) -> None:
    batch_shape = site["fn"].batch_shape
    try:
        fits = jnp.broadcast_shapes(jnp.shape(scale), batch_shape) == batch_shape
    except ValueError:
        fits = False
    if not fits:
        raise NotImplementedError(
            f"site '{other['name']}' depends on the discrete site '{site['name']}' and has a scale "
            f"of shape {jnp.shape(scale)}, which differs inside one '{site['name']}' (batch shape "
            f"{batch_shape}). Give both sites one scale, of that shape."
        )
