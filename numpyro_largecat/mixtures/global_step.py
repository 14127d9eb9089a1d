# SPDX-License-Identifier: Apache-2.0
"""Posteriors of all components from their statistics, in float64 whatever the data are."""

from __future__ import annotations

from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_largecat.mixtures.family import ConjugateFamily
from numpyro_largecat.mixtures.local_step import Globals
from numpyro_largecat.mixtures.mixing import MixingPrior

Objective = Literal["variational", "map"]


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
            f"{int(bad.sum())} of {len(bad)} components have none."
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
    """Gain of each component and of the weights, with gradients in the statistics.

    The prior is one more row of the batch. Two batches of Cholesky factors that do not wait for
    each other may block all threads of a CPU: each of jaxlib's kernels then waits for tasks that
    only the other's thread could run.
    """
    prior = family.prior()
    of_component, of_weights = family.log_normalizer, mixing.log_normalizer
    if objective == "map":
        of_component, of_weights = family.max_log_density, mixing.max_log_density
    natural = jnp.concatenate([prior + statistics.features, prior[None]])
    values, slopes = jax.vmap(jax.value_and_grad(of_component))(natural)
    value, log_weights = jax.value_and_grad(of_weights)(statistics.counts)
    gains = values[:-1]
    if objective == "variational":
        gains -= values[-1]
        value -= of_weights(jnp.zeros_like(statistics.counts))
    return gains, slopes[:-1], value, log_weights
