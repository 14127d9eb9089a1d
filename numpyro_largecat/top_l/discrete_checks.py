# SPDX-License-Identifier: Apache-2.0
"""Refuse discrete sites over which the density of a model does not factorise."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from numpyro_largecat._checks import check_count, describe, fits, is_concrete
from numpyro_largecat.handlers.internals import is_of_scan
from numpyro_largecat.handlers.sites import estimates_classes, is_latent, scale_of
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
                f"the guide draws the discrete site '{name}', whose posterior TopL_ELBO finds. "
                "Hide it: `AutoNormal(lc.hide_enumerated(model))`."
            )
    for name, site in model_trace.items():
        if not is_latent(site) or not site["fn"].is_discrete:
            continue
        if not is_marked(site):
            raise not_marked(name)
        if is_of_scan(site):
            raise NotImplementedError(
                f"the discrete site '{name}' is inside of a `scan`; TopL_ELBO takes discrete sites "
                "in plates only."
            )


def check_active(num_active: int | dict[str, int], sizes: dict[str, int]) -> dict[str, int]:
    """Return the number of values to keep of each site, of which there are so many."""
    if not isinstance(num_active, dict):
        num_active = dict.fromkeys(sizes, num_active)
    if num_active.keys() != sizes.keys():
        raise ValueError(
            f"`num_active` must have the discrete sites of the model, {sorted(sizes)}; got "
            f"{sorted(num_active)}."
        )
    return {
        name: check_count("num_active", num_active[name], 1, size, f"number of values of '{name}'")
        for name, size in sizes.items()
    }


def check_dependencies(names: list[str], log_probs: dict[str, frozenset[str]]) -> None:
    """Refuse densities that depend on several discrete sites."""
    for name, known in log_probs.items():
        deps = sorted(known - {name})
        if name in names and deps:
            raise _no_product(name, f"the discrete site '{deps[0]}'")
        if len(deps) > 1:
            raise _no_product(name, f"the discrete sites {deps}")


def _no_product(name: str, others: str) -> NotImplementedError:
    return NotImplementedError(
        f"site '{name}' depends on {others}, so that their posterior does not factorise. Merge the "
        "discrete sites into one over pairs of values, `pair = sample('pair', Categorical(...))`, "
        "`a, b = pair // K, pair % K`, or use TraceEnum_ELBO."
    )


def check_plates(site: dict[str, Any], dependents: list[dict[str, Any]]) -> None:
    """Refuse dependents that are not inside of all plates of a discrete site."""
    name = site["name"]
    plates = {frame.name: frame for frame in site["cond_indep_stack"]}
    axes = {frame.dim for frame in plates.values()}
    if site["kwargs"].get("sample_shape"):
        raise NotImplementedError(
            f"the discrete site '{name}' has `sample_shape={site['kwargs']['sample_shape']}` "
            "outside of a plate. Put it into a plate of that size."
        )
    for axis, size in enumerate(reversed(site["fn"].batch_shape), start=1):
        if size > 1 and -axis not in axes:
            raise NotImplementedError(
                f"the discrete site '{name}' has batch shape {site['fn'].batch_shape}, but axis "
                f"{-axis} belongs to no plate. Put it into a plate of that size."
            )
    for other in dependents:
        missing = sorted(plates.keys() - {frame.name for frame in other["cond_indep_stack"]})
        if missing:
            raise NotImplementedError(
                f"site '{other['name']}' depends on the discrete site '{name}' but is outside of "
                f"that plate, '{missing[0]}', so that the posterior does not factorise. Move it in."
            )


def check_estimates(site: dict[str, Any], dependents: list[dict[str, Any]]) -> None:
    """Refuse dependents whose log density is an estimate by drawn classes."""
    for other in dependents:
        if estimates_classes(other["fn"]):
            raise NotImplementedError(
                f"site '{other['name']}' depends on the discrete site '{site['name']}', and "
                "estimates its log density by a sample of the classes. The bound is the log of a "
                "sum over values, of which an estimate is too high on average. Open the class "
                "plate in full, `num_sampled=None`, or let utilities not depend on "
                f"'{site['name']}'."
            )


def common_scale(site: dict[str, Any], dependents: list[dict[str, Any]]) -> Any:
    """Scale of a discrete site, which must be that of all its dependents.

    Scales that are traced cannot be compared here: the result is NaN where they differ.
    """
    scale = scale_of(site)
    for other in dependents:
        its_scale = scale_of(other)
        if its_scale is scale:
            continue
        is_known = is_concrete(scale) and is_concrete(its_scale)
        if not fits(jnp.shape(its_scale), site["fn"].batch_shape) or (
            is_known and not np.allclose(scale, its_scale)
        ):
            its, own = (describe(s) if jnp.ndim(s) else s for s in (its_scale, scale))
            raise NotImplementedError(
                f"site '{other['name']}' depends on the discrete site '{site['name']}' and has "
                f"scale {its}, where '{site['name']}' has scale {own}. The bound is the log "
                "of a sum over values, of which a scaled part is no estimate: scale both or none."
            )
        if not is_known:
            scale = jnp.where(jnp.isclose(scale, its_scale), scale, jnp.nan)
    return scale
