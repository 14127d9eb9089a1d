# SPDX-License-Identifier: Apache-2.0
"""Latent values that move the utilities of a choice, and that its u does not follow."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array
from numpyro.handlers import substitute

from numpyro_largecat.choices.update_rules import NaturalGradient
from numpyro_largecat.handlers.internals import eval_provenance
from numpyro_largecat.handlers.plate_facts import row_plates
from numpyro_largecat.handlers.run_model import Around, at_feasible_values
from numpyro_largecat.handlers.sites import (
    Site,
    base_distribution,
    is_continuous_latent,
    is_latent,
    param_options,
    plates_of,
)
from numpyro_largecat.handlers.static_result import static_result
from numpyro_largecat.handlers.touched_rows import TouchedRows
from numpyro_largecat.reading.bound_fit import BoundFit
from numpyro_largecat.reading.findings import Finding

LEAST_SHARE = 0.7  # of u that is of the draw of a step: sds are 0.9 of what they should be


def unfollowed_values(fit: BoundFit, choice: str, state: Any) -> list[Finding]:
    """A finding for each site that moves the utilities of a choice around the values to follow.

    It has the share of u that is taken from the draw of each step, on average over observations
    that have been visited; NaN if the state of a ``NaturalGradient`` that says so is not known, and
    0 with any other rule. There is none of rows of class plates, of which u follows the label's, of
    what the guide moves these rows with, as ``AutoRowNormal(follow=)`` does, and of points, which
    have no width.

    Args:
        fit: The fit, on a batch.
        choice: Name of the choice.
        state: The last state of the fit; None if it is not known.

    Cost: traces of model and guide, and O(N) for what is kept of the observations.
    """
    name = f"{choice}_u"
    if name not in fit.params:
        return []
    share = _share_of_draws(fit, name, state)
    advice = "sds may be 0.7 to 0.9 of what they should be: `sample_choice(..., follow=)`"
    advice *= share < LEAST_SHARE
    group = "share of draws that u follows"
    return [
        Finding(f"{group}, {site}", share, advice=advice, group=group)
        for site in _sites_around(fit, name)
    ]


def _sites_around(fit: BoundFit, name: str) -> list[str]:
    """Sites that have a width in the guide and move the utilities while the values are held."""
    touched = TouchedRows()  # of the model, then given to the guide
    sites, guide_sites = static_result(
        lambda: (fit.sites(fit.model, touched), fit.sites(fit.guide, touched))
    )
    facts = row_plates(sites)
    of_classes = {plate for plate, known in facts.items() if known.kind == "classes"}
    values = {
        site: jax.ShapeDtypeStruct(jnp.shape(found["value"]), jnp.result_type(found["value"]))
        for site, found in sites.items()
        if is_latent(found) and is_continuous_latent(found) and not plates_of(found) & of_classes
        if not _is_point(guide_sites.get(site))
    }

    def around(values: dict[str, Any]) -> Around:
        def given(msg: Site) -> Any:
            return values.get(msg["name"])

        return lambda fn: substitute(at_feasible_values(fn), substitute_fn=given)

    def utilities(**values: Any) -> Any:
        sites = fit.sites(fit.model, around=around(values))
        followed = param_options(sites[name]).follow
        if followed.own is None:
            return followed.values
        return followed.own.values_at(jnp.zeros_like(followed.own.drawn))

    def guide_of_rows(**values: Any) -> Any:
        found = fit.sites(fit.guide, touched, around=around(values))
        rows = [site for site in found.values() if plates_of(site) & of_classes]
        return [jax.tree.leaves(site["fn"]) for site in rows if is_latent(site)]

    if not values:
        return []
    moved_with_rows = frozenset().union(
        *jax.tree.leaves(
            eval_provenance(guide_of_rows, **values), is_leaf=lambda x: isinstance(x, frozenset)
        )
    )
    return sorted(eval_provenance(utilities, **values) - moved_with_rows)


def _is_point(site: Site | None) -> bool:
    """Whether a guide has no width for a site, or not this site."""
    return site is None or isinstance(base_distribution(site["fn"]), dist.Delta)


def _share_of_draws(fit: BoundFit, name: str, state: Any) -> float:
    rule = static_result(lambda: param_options(fit.sites(fit.model)[name]).update_rule)
    if not isinstance(rule, NaturalGradient):
        return 0.0
    if state is None:
        return math.nan
    return float(_mean_step_size(rule, state.local_state[name].rule_state))


@partial(jax.jit, static_argnums=0)
def _mean_step_size(rule: NaturalGradient, kept: Any) -> Array:
    """Of the observations that have been visited; 0 if none has been."""
    is_visited = kept.visits > 0
    number = jnp.maximum(is_visited.sum(), 1)
    return jnp.where(is_visited, rule.step_sizes(kept), 0).sum() / number
