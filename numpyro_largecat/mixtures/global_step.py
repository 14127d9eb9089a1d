# SPDX-License-Identifier: Apache-2.0
"""Posteriors of all components from their statistics, in float64 whatever the data are."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from numpyro_largecat.mixtures.conjugate_family import ConjugateFamily
from numpyro_largecat.mixtures.local_step import Globals
from numpyro_largecat.mixtures.mixing_priors import MixingPrior

Objective = Literal["variational", "map"]
TOGETHER = 4  # components whose posteriors are computed at once


class Statistics(NamedTuple):
    """Sums over the data for each component, in float64 on the host."""

    counts: np.ndarray  # (K,), N_k
    features: np.ndarray  # (K, P), weighted sums of features


class GlobalStep(NamedTuple):
    """Posterior expectations, and what they add to the bound."""

    expectations: np.ndarray  # (K, P), gradient of A or G
    log_weights: np.ndarray  # (K,), gradient of A or G of the mixing weights
    gain: float  # A(prior + S) - A(prior), or G(prior + S), over all components and the weights

    def parameters(self, dtype: np.dtype) -> Globals:
        """What the local step needs, in the type of the data."""
        return Globals(jnp.asarray(self.expectations, dtype), jnp.asarray(self.log_weights, dtype))

    def prior_term(self, statistics: Statistics) -> float:
        """Minus the KL of the posterior from the prior, or the log prior density of the estimate.

        It is the gain less the expected log likelihood of the statistics themselves.
        """
        inner = np.vdot(self.expectations, statistics.features)
        return self.gain - float(inner + self.log_weights @ statistics.counts)


def global_step(
    family: ConjugateFamily, mixing: MixingPrior, statistics: Statistics, objective: Objective
) -> GlobalStep:
    """Maximise the bound in all global factors, given the statistics; Eqs. 3 and 4.

    Cost: K times that of A or G and its gradient, K D^3 for full covariances; no row is looked at.

    Raises:
        FloatingPointError: If the posterior of a component does not exist; the message names it.
    """
    with jax.enable_x64(True):
        values, expectations, mixing_value, log_weights = _potentials(
            family, mixing, statistics, objective
        )
        values, expectations = np.asarray(values), np.asarray(expectations)
        log_weights, mixing_value = np.asarray(log_weights), float(mixing_value)
    bad = ~(np.isfinite(values) & np.isfinite(expectations).all(1))
    if bad.any():
        first = int(np.argmax(bad))
        raise FloatingPointError(
            f"component {first}, with {statistics.counts[first]:.6g} of "
            f"{statistics.counts.sum():.6g} observations, has no posterior: {family.failure}. "
            f"{int(bad.sum())} of {len(bad)} have none."
        )
    if not (np.isfinite(mixing_value) and np.isfinite(log_weights).all()):
        raise FloatingPointError(
            f"the mixing weights of {mixing!r} have no posterior; counts are from "
            f"{statistics.counts.min():.6g} to {statistics.counts.max():.6g}."
        )
    return GlobalStep(expectations, log_weights, float(values.sum()) + mixing_value)


@partial(jax.jit, static_argnames="objective")
def _potentials(
    family: ConjugateFamily, mixing: MixingPrior, statistics: Statistics, objective: Objective
) -> tuple[Array, Array, Array, Array]:
    """Gain of each component and of the weights, with gradients in the statistics."""
    prior = family.prior()
    of_component, of_weights = family.log_normalizer, mixing.log_normalizer
    if objective == "map":
        of_component, of_weights = family.max_log_density, mixing.max_log_density
    num_components = len(statistics.counts)
    values, slopes = map_in_groups(
        jax.value_and_grad(of_component),
        jnp.concatenate([prior[None], prior + statistics.features]),
    )
    value, log_weights = jax.value_and_grad(of_weights)(statistics.counts)
    gains = values[1:]
    if objective == "variational":
        gains -= values[0]
        value -= of_weights(jnp.zeros(num_components, value.dtype))
    return gains, slopes[1:], value, log_weights


def map_in_groups(function: Callable[[Array], Any], natural: Array) -> Any:
    """Apply a function to each row, a few together: their matrices should stay in the cache.

    Groups are all of one size and follow each other. A family may use LAPACK, and two batches of
    its factors at once may block all threads of a CPU, since each waits for tasks in their pool.
    """
    size = min(TOGETHER, len(natural))
    padded = jnp.pad(natural, [(0, -len(natural) % size), (0, 0)], mode="edge")
    results = lax.map(jax.vmap(function), padded.reshape(-1, size, natural.shape[1]))
    return jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:])[: len(natural)], results)
