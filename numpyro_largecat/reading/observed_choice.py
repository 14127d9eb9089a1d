# SPDX-License-Identifier: Apache-2.0
"""The observed classes of a choice, and how much each observation weighs in the model."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from numpyro_largecat.choices.choice_distribution import is_choice
from numpyro_largecat.handlers.chosen_rows import only_read
from numpyro_largecat.handlers.closed_over_arrays import compiled
from numpyro_largecat.handlers.run_model import at_feasible_values, sites_of
from numpyro_largecat.handlers.sites import is_observed, scale_of, site_of_plate, unmasked
from numpyro_largecat.handlers.touched_rows import TouchedRows
from numpyro_largecat.reading.bound_fit import BoundFit


class RowWeights(NamedTuple):
    """Which observations stand for the data: some with certainty, others as a sample."""

    weights: Array  # (...), like the choice; what their log probabilities are multiplied by
    stands_for: Array  # (...), how many each stands for in that; 1 if it is there with certainty

    @property
    def counts(self) -> Array:
        """How many each stands for, 0 where it weighs nothing."""
        return jnp.where(self.weights > 0, self.stands_for, 0)

    @property
    def is_sampled(self) -> Array:
        """Which are a sample of others, and count."""
        return self.counts > 1


class Observed(NamedTuple):
    """The observations of a choice."""

    labels: Array  # (...), like the choice
    rows: RowWeights


def observed_choice(fit: BoundFit, site: str) -> Observed:
    """Look at what the model observes; no utility is formed.

    Raises:
        ValueError: If the model does not observe the choice.
    """

    def around(model: Any) -> Any:
        return only_read(at_feasible_values(model), is_choice=is_choice)

    def look() -> Observed:
        known: dict[str, Any] = {"params": fit.params, "touched": TouchedRows()}
        sites = sites_of(fit.model, fit.args, fit.kwargs, **known, around=around)
        if not is_observed(sites[site]):
            need = f"the model must observe choice '{site}' to be diagnosed"
            raise ValueError(f"{need}: give its classes to `fitted.on(...)`, or give `batches`.")
        return _observed(sites[site], _stands_for(sites, site))

    return compiled(look)()


def _stands_for(sites: Any, site: str) -> float:
    """How many observations of its plates one of a choice stands for."""
    found = 1.0
    for frame in sites[site]["cond_indep_stack"]:
        found *= site_of_plate(frame, sites)["args"][0] / frame.size
    return found


def _observed(site: dict[str, Any], stands_for: float) -> Observed:
    """How the observations of a choice weigh in the model; 0 where it masks them."""
    shape = site["fn"].shape()
    weights = jnp.broadcast_to(jnp.where(unmasked(site["fn"])[1], scale_of(site), 0.0), shape)
    rows = RowWeights(weights, jnp.full(shape, stands_for))
    return Observed(jnp.broadcast_to(site["value"], shape), rows)
