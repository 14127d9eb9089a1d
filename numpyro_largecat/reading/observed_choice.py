# SPDX-License-Identifier: Apache-2.0
"""The observed classes of a choice, and how much each observation weighs in the model."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array
from numpyro.handlers import seed, substitute, trace

from numpyro_largecat.handlers.closed_over_arrays import compiled
from numpyro_largecat.handlers.shared_rows import TouchedRows, share_rows
from numpyro_largecat.handlers.without_draws import at_feasible_values
from numpyro_largecat.reading.bound_fit import BoundFit
from numpyro_largecat.reading.only_read import only_read
from numpyro_largecat.top_l.model_run import unmasked


class RowWeights(NamedTuple):
    """Which observations stand for the data: some with certainty, others as a sample."""

    weights: Array  # (...), like the choice; the number of observations that each stands for
    is_sampled: Array  # (...), False for those that are there with certainty


class Observed(NamedTuple):
    """The observations of a choice."""

    labels: Array  # (...), like the choice
    rows: RowWeights


def observed_choice(fit: BoundFit, site: str) -> Observed:
    """Look at what the model observes; no utility is formed.

    Raises:
        ValueError: If the model does not observe the choice.
    """

    def look() -> Observed:
        shared = share_rows(substitute(seed(fit.model, 0), data=fit.params), TouchedRows())
        sites = trace(only_read(at_feasible_values(shared))).get_trace(*fit.args, **fit.kwargs)
        if not sites[site]["is_observed"]:
            raise ValueError(
                f"the model must observe choice '{site}' to be diagnosed: give `fitted.on(...)` "
                "the observed classes, as in training, or give `batches`."
            )
        return _observed(sites[site])

    return compiled(look)()


def _observed(site: dict[str, Any]) -> Observed:
    """How the observations of a choice weigh in the model; 0 where it masks them."""
    scale = 1.0 if site["scale"] is None else site["scale"]
    shape = site["fn"].shape()
    weights = jnp.broadcast_to(jnp.where(unmasked(site["fn"])[1], scale, 0.0), shape)
    return Observed(jnp.broadcast_to(site["value"], shape), RowWeights(weights, weights > 1))
