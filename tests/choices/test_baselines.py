# SPDX-License-Identifier: Apache-2.0
"""Noise-contrastive estimation, and importance sampling of the softmax's normaliser.

The tests that they share with the bounds are in ``test_bounds.py``.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import numpyro_largecat as lc
from numpyro_largecat.choices.baselines.noise_contrastive import NoiseContrastive
from tests import reference

rng = np.random.default_rng(0)
UTILITIES = rng.normal(size=4) * 2
COUNTS = np.array([1, 2, 5, 40])


@pytest.mark.parametrize("num_noise", [1, 2, 4])
@pytest.mark.parametrize("log_normalizer", [0.0, 1.7])
def test_noise_contrastive_is_the_textbooks_mean_over_all_noise_samples(
    num_noise, log_normalizer, x64
):
    @jax.jit
    def log_prob(utilities, log_normalizer):
        d = NoiseContrastive(utilities, num_noise=num_noise, log_normalizer=log_normalizer)
        return d.log_prob(jnp.arange(4))

    found = log_prob(UTILITIES, log_normalizer)
    expected = [
        reference.mean_over_noise(UTILITIES, y, num_noise, log_normalizer) for y in range(4)
    ]
    np.testing.assert_allclose(found, expected, rtol=1e-12)


@pytest.mark.parametrize("num_noise", [1, 30])
def test_maximum_is_that_of_the_likelihood_where_the_model_can_normalise_itself(num_noise, x64):
    """With free utilities these are log (N_k / N), normaliser included: the gradient is 0."""
    probs = COUNTS / COUNTS.sum()

    def total(psi, log_normalizer):
        d = NoiseContrastive(psi, num_noise=num_noise, log_normalizer=log_normalizer)
        return probs @ d.log_prob(jnp.arange(4))

    gradient = jax.jit(jax.grad(total, argnums=(0, 1)))
    for log_normalizer in (0.0, 2.0):
        in_psi, in_normalizer = gradient(np.log(probs) + log_normalizer, log_normalizer)
        np.testing.assert_allclose(in_psi, 0, atol=1e-12)
        np.testing.assert_allclose(in_normalizer, 0, atol=1e-12)
    in_psi, _ = gradient(np.log(probs) + 0.1, 0.0)
    assert (np.abs(in_psi) > 1e-4).all()


def test_gradient_tends_to_that_of_the_unnormalised_likelihood_with_more_noise(x64):
    """In b of utilities (b, b, 0), which cannot normalise themselves, so that noise matters."""
    probs = jnp.array([0.2, 0.5, 0.3])

    def slope(log_prob, b):
        return jax.grad(lambda b: probs @ log_prob(b * jnp.array([1.0, 1.0, 0.0])))(b)

    @jax.jit
    def slopes(b):
        found = [
            slope(lambda psi, s=s: NoiseContrastive(psi, num_noise=s).log_prob(jnp.arange(3)), b)
            for s in (1, 10, 100, 10**9)
        ]
        return found, slope(lambda psi: psi - jnp.exp(psi).sum(), b)

    contrastive, limit = slopes(-0.7)
    gaps = [abs(float(x) - float(limit)) for x in contrastive]
    assert gaps[0] > 0.1
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[-1] < 1e-8


LABELS = np.array([2, 5])
INDICES = jnp.array([2, 5, 0, 7, 9])
WEIGHTS = jnp.array([1.0, 1.0, 8 / 3, 8 / 3, 8 / 3])
SUBSET = lc.plates.ClassSubset(
    INDICES, WEIGHTS, jnp.array(LABELS), num_categories=10, kind="sample"
)


def test_stateless_choice_is_importance_sampling_of_the_normaliser():
    """Its value is psi_y - log Z_hat, its gradient that of the self-normalised weights."""
    psi = rng.normal(size=5).astype(np.float32)
    value, gradient = jax.jit(
        jax.value_and_grad(lambda psi: lc.UtilityCategorical(psi, SUBSET).log_prob(5))
    )(psi)
    # Class 2, the other label of the batch, is surely among the samples.
    expected = reference.sampled_normalizer_log_prob(psi, 1, [0, 2, 3, 4], [1.0] + 3 * [3 / 8])
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    ratios = np.asarray(WEIGHTS) * np.exp(psi)
    expected = (np.arange(5) == 1) - ratios / ratios.sum()
    np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-6)
