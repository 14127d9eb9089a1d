# SPDX-License-Identifier: Apache-2.0
"""Standard deviations beside those of the best Gaussian, where this is known."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer.autoguide import AutoGuideList, AutoMultivariateNormal, AutoNormal

import numpyro_largecat as lc
from numpyro_largecat.reading.guide_ratios import FreeValues, Ratios
from numpyro_largecat.reading.parts_check import PartsCheck, _small_shares, _why_no_shares
from numpyro_largecat.reading.remedies import Remedies
from numpyro_largecat.reading.spread_of_parts import draws_needed, sd_shares

PRECISION = np.array([[4.0, 3.0, 0.5], [3.0, 5.0, -1.0], [0.5, -1.0, 2.0]])
RNG = np.random.default_rng(0)


def logs(values, covariance):
    """Log densities of a guide around 0.3, and those of N(0, PRECISION^-1) over it."""
    precision = np.linalg.inv(covariance)
    guide = -0.5 * np.einsum("si,ij,sj->s", values - 0.3, precision, values - 0.3)
    return guide, -0.5 * np.einsum("si,ij,sj->s", values, PRECISION, values) - guide


@pytest.mark.parametrize("covariance", [np.diag(1 / np.diag(PRECISION)), np.linalg.inv(PRECISION)])
def test_shares_of_a_gaussian_are_exact(covariance):
    """Of a mean-field guide at its best, and of the posterior itself."""
    values = RNG.multivariate_normal(np.full(3, 0.3), covariance, 30)
    expected = np.sqrt(np.diag(covariance) / np.diag(np.linalg.inv(PRECISION)))
    np.testing.assert_allclose(sd_shares(values, *logs(values, covariance)), expected, rtol=1e-6)


def test_a_curve_that_is_no_parabola_counts_by_its_mean_curvature():
    """log p = -cosh(a), guide N(0, 1/4): the mean of its curvature cosh is exp(1/8).

    FALSE_ALARM = 1e-6.
    """
    values = 0.5 * RNG.normal(size=(20_000, 1))
    guide = -2 * values[:, 0] ** 2
    found = sd_shares(values, guide, -np.cosh(values[:, 0]) - guide)[0]
    assert found == pytest.approx(np.sqrt(0.25 * np.exp(1 / 8)), rel=0.03)


def test_what_is_not_known_is_nan():
    few = RNG.normal(size=(19, 3))
    assert np.isnan(sd_shares(few, *logs(few, np.eye(3)))).all()
    upwards = RNG.normal(size=(100, 1))
    square = upwards[:, 0] ** 2
    assert np.isnan(sd_shares(upwards, -square / 2, square)).all()
    assert np.isnan(sd_shares(np.zeros((100, 2)), np.zeros(100), np.zeros(100))).all()


N, K = 600, 4
FEATURES = np.asarray(RNG.normal(size=(N, K, 2)) + 2 * RNG.normal(size=(N, K, 1)), np.float32)
CHOICES = (FEATURES @ np.array([1.0, -1.0]) + RNG.gumbel(size=(N, K))).argmax(axis=1)


@pytest.mark.slow
def test_correlated_slopes_of_a_mean_field_guide_are_too_narrow():
    """Beside the curvature of the exact log posterior, at the standard deviations given the other.

    FALSE_ALARM = 1e-4: 200 draws.
    """

    def model(features, choices=None, rows=None):
        slopes = numpyro.sample("slopes", dist.Normal(0, 5).expand([2]).to_event(1))
        with lc.class_plate("modes", K) as modes:
            pass
        with lc.data_plate("data", N, rows):
            utilities = features[:, modes.indices] @ slopes
            numpyro.sample("y", lc.UtilityCategorical(utilities, modes), obs=choices)

    def log_joint(slopes):
        log_p = jax.nn.log_softmax(FEATURES @ slopes)[jnp.arange(N), CHOICES]
        return log_p.sum() - (slopes**2).sum() / 50

    mode = jnp.zeros(2)
    for _ in range(20):
        mode -= jnp.linalg.solve(jax.hessian(log_joint)(mode), jax.grad(log_joint)(mode))
    precision = -jax.hessian(log_joint)(mode)
    scale = jnp.diag(precision) ** -0.5
    expected = scale / jnp.diag(jnp.linalg.inv(precision)) ** 0.5
    guide = AutoNormal(model)
    numpyro.handlers.seed(guide, 0)(FEATURES[:2], CHOICES[:2], np.arange(2))
    params = {"slopes_auto_loc": mode, "slopes_auto_scale": scale}
    fitted = lc.Fitted(model, guide, params).on()
    batches = lc.ArrayBatches(FEATURES, CHOICES, batch_size=10)
    found = fitted.diagnose(rng_key=jax.random.key(0), batches=batches, num_repeats=2)
    by_name = {finding.name: finding for finding in found.findings}
    share = by_name["sd over that of the best Gaussian, slopes"]
    assert share.value == pytest.approx(float(expected.min()), abs=0.1)
    assert share.value < 0.7 and share.advice.startswith("too narrow: run longer, or give")


@pytest.mark.slow
def test_sites_too_large_to_compare_leave_the_others_their_figures():
    """Beside 300 weights of a network, 100 draws tell k, and the sd of the log of a scale."""

    def model(features, choices=None, rows=None):
        scale = numpyro.sample("scale", dist.HalfNormal(1))
        weights = numpyro.sample("weights", dist.Normal(0, 1).expand([300]).to_event(1))
        with lc.class_plate("modes", K) as modes:
            pass
        with lc.data_plate("data", N, rows):
            utilities = scale * features[:, modes.indices] @ weights[:2]
            numpyro.sample("y", lc.UtilityCategorical(utilities, modes), obs=choices)

    guide = AutoNormal(model, init_scale=0.01)
    numpyro.handlers.seed(guide, 0)(FEATURES[:2], CHOICES[:2], np.arange(2))
    params = {"scale_auto_loc": jnp.array(0.0), "scale_auto_scale": jnp.array(0.1)}
    params |= {"weights_auto_loc": jnp.zeros(300), "weights_auto_scale": jnp.full(300, 0.01)}
    fitted = lc.Fitted(model, guide, params).on(FEATURES, CHOICES, np.arange(N))
    found = fitted.diagnose(rng_key=jax.random.key(0), num_draws=100)
    names = [finding.name for finding in found.findings]
    assert "Pareto k of the small sites" in names and "sd of log scale" in names
    assert not [name for name in names if name.startswith("sd over")]


def test_shares_and_logs_say_what_to_do():
    check = PartsCheck(0.1, None, {"a": 0.5, "b": 1.5, "c": 1.0}, {"sd": 0.7, "tau": 0.1})
    own = Remedies("give one AutoMultivariateNormal", "take lc.AutoRowNormal")
    advice = {finding.name: finding.advice for finding in check.findings("", own)}
    start = "sd over that of the best Gaussian, "
    assert "AutoMultivariateNormal" in advice[f"{start}a"]
    assert advice[f"{start}b"] == "not settled: run longer" and not advice[f"{start}c"]
    assert "AutoRowNormal" in advice["sd of log sd"] and not advice["sd of log tau"]
    rows = PartsCheck(classes=np.array([0.1, 0.2]), class_shares=np.array([0.5, np.nan]))
    assert "lc.AutoRowNormal" in rows.findings("", own)[-1].advice


def normal_ratios(size, num_draws):
    """Draws of a guide that is the posterior."""
    values = np.random.default_rng(0).normal(size=(1, num_draws, size))
    log_density = -0.5 * (values**2).sum(axis=-1)
    return Ratios(np.zeros((1, num_draws)), np.zeros(1), FreeValues({"a": values}, log_density))


def test_standard_deviations_that_are_not_compared_are_told():
    """Of 20 values curvature has 231 numbers, which takes as many draws twice."""
    assert draws_needed(20) == 462
    assert _why_no_shares(normal_ratios(20, 200)) == "20 values need `num_draws=462`"
    assert "curve down" in _why_no_shares(normal_ratios(20, 462))
    assert _small_shares(normal_ratios(20, 462))["a"] == pytest.approx(1)
    unknown = normal_ratios(2, 200)
    unknown.drawn.log_density[:] = np.nan  # of sites that are too large for it
    assert _why_no_shares(unknown) == ""
    check = PartsCheck(0.1, small_shares={}, why_no_shares="20 values need `num_draws=462`")
    finding = check.findings("", Remedies("", ""))[-1]
    assert np.isnan(finding.value) and finding.advice.startswith("not told: 20 values")


def model_of_rows(x):
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    with lc.data_plate("data", 3):
        z = numpyro.sample("z", dist.Normal(0, tau))
        numpyro.sample("x", dist.Normal(z, 1), obs=x)


def test_no_guide_is_advised_that_the_fit_has():
    plain, joint = AutoNormal(model_of_rows), AutoMultivariateNormal(model_of_rows)
    assert "AutoMultivariateNormal" in Remedies.of(plain).small_sites
    assert "AutoRowNormal" in Remedies.of(plain).rows == Remedies.of(lambda: None).rows
    parts = AutoGuideList(model_of_rows)
    parts.append(AutoNormal(numpyro.handlers.block(model_of_rows, hide=["tau"])))
    parts.append(joint)
    rows = lc.AutoRowNormal(model_of_rows)
    assert "`follow`" in Remedies.of(parts).small_sites
    assert Remedies.of(parts).rows == Remedies.of(plain).rows
    assert Remedies.of(rows).small_sites == Remedies.of(rows).rows != Remedies.of(plain).rows
    assert "NUTS" in Remedies.of(lc.AutoRowNormal(model_of_rows, follow=["tau"])).rows
