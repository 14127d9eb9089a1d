# SPDX-License-Identifier: Apache-2.0
"""The observed classes of a choice, and how much each observation weighs in the model."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from numpyro_largecat.choices.choice_distribution import is_choice
from numpyro_largecat.handlers.chosen_rows import only_read
from numpyro_largecat.handlers.closed_over_arrays import compiled
from numpyro_largecat.handlers.run_model import at_feasible_values
from numpyro_largecat.handlers.sites import Sites, is_observed, scale_of, site_of_plate, unmasked
from numpyro_largecat.handlers.static_result import static_result
from numpyro_largecat.reading.bound_fit import BoundFit
from numpyro_largecat.svi.array_batches import ArrayBatches


class RowWeights(NamedTuple):
    """Which observations stand for the data: some with certainty, others as a sample."""

    weights: Array  # (...), like the choice; what their log probabilities are multiplied by
    stands_for: Array  # (...), how many each stands for in that; 1 if it is there with certainty
    axis: int = -1  # of the rows that are a sample; those of one row come together

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
    axes = []

    def look() -> tuple[Array, Array, Array]:
        sites = _sites(fit)
        if not is_observed(sites[site]):
            need = f"the model must observe choice '{site}' to be diagnosed"
            raise ValueError(f"{need}: give its classes to `fitted.on(...)`, or give `batches`.")
        stands_for, axis = _sampled(sites, site)
        axes.append(axis)
        return _observed(sites[site], stands_for)

    labels, weights, stands_for = compiled(look, runs_once=True)()
    return Observed(labels, RowWeights(weights, stands_for, axes[0]))


def _sites(fit: BoundFit) -> Sites:
    """The sites of the model, without utilities."""

    def around(model: Any) -> Any:
        return only_read(at_feasible_values(model), is_choice=is_choice)

    return fit.sites(fit.model, around=around)


def observed_in_batches(fit: BoundFit, batches: ArrayBatches, site: str) -> Observed:
    """Look at what the model observes in all rows of ``batches``, with the axis that they are on.

    Raises:
        ValueError: If the model does not observe the choice, or its rows are on no axis of it.
    """

    def first(number: int) -> BoundFit:
        return fit.followed_by(batches.take(jnp.arange(number)))

    size = batches.size
    everything = observed_choice(first(size), site)
    shape = everything.labels.shape
    axes = [axis for axis in range(-len(shape), 0) if shape[axis] == size]
    if len(axes) > 1 and size > 1:  # the one that is as long as there are rows
        fewer = static_result(lambda: _sites(first(size - 1))[site]["fn"].shape())
        axes = [axis for axis in axes if fewer[axis] == size - 1]
    if not axes:
        raise ValueError(
            f"the observations must have an axis for the {size} rows of `batches`; got shape "
            f"{shape}. Leave this part out by `num_draws=0`."
        )
    return everything._replace(rows=everything.rows._replace(axis=axes[0]))


def _sampled(sites: Any, site: str) -> tuple[float, int]:
    """How many observations of its plates one of a choice stands for; axis of the sampled rows."""
    found, axes = 1.0, {}
    for frame in sites[site]["cond_indep_stack"]:
        share = site_of_plate(frame, sites)["args"][0] / frame.size
        axes[frame.dim - sites[site]["fn"].event_dim] = share
        found *= share
    return found, max(axes, key=axes.__getitem__, default=-1)


def _observed(site: dict[str, Any], stands_for: float) -> tuple[Array, Array, Array]:
    """How the observations of a choice weigh in the model; 0 where it masks them."""
    shape = site["fn"].shape()
    weights = jnp.broadcast_to(jnp.where(unmasked(site["fn"])[1], scale_of(site), 0.0), shape)
    return jnp.broadcast_to(site["value"], shape), weights, jnp.full(shape, stands_for)
