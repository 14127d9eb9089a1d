# SPDX-License-Identifier: Apache-2.0
"""Simulation-based calibration, where the posterior is known."""

from __future__ import annotations

from functools import partial

import arviz as az
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.handlers import mask, scale

import numpyro_largecat as lc

NUM_DRAWS = 99
NORMAL = {"rng_key": jax.random.key(0), "progress_bar": False}


def model(num_rows, x=None):
    mean = numpyro.sample("mean", dist.Normal(0, 1).expand([20]).to_event(1))
    with numpyro.plate("data", num_rows):
        numpyro.sample("x", dist.Normal(mean, 1).to_event(1), obs=x)


@jax.jit
def posterior(width, rng_key, made):
    """Draws of the posterior of ``mean``, with ``width`` times its standard deviation."""
    num_rows = len(made["x"])
    noise = jax.random.normal(rng_key, (NUM_DRAWS, 20))
    return {"mean": made["x"].sum(0) / (num_rows + 1) + width * noise / (num_rows + 1) ** 0.5}


@pytest.mark.parametrize("width", [1.0, 0.5])
def test_coverage_is_that_of_normal_intervals(width):
    """Central intervals hold a normal truth with the probability that |z| < width * quantile.

    FALSE_ALARM = 1e-5: 2,000 ranks that are independent, to 5 standard errors.
    """
    fit = jax.tree_util.Partial(posterior, width)
    found = lc.simulation_based_calibration(model, fit, 3, num_sets=100, **NORMAL)
    assert found.ranks["mean"].shape == (100, 20) and found.num_draws == NUM_DRAWS
    for level, narrow in ((0.5, 0.264), (0.9, 0.589)):
        share, error = found.coverage(level)["mean"]
        expected = level if width == 1 else narrow
        assert error == pytest.approx(np.sqrt(expected * (1 - expected) / 2000), rel=0.5)
        assert abs(share - expected) < 5 * np.sqrt(0.25 / 2000)
    spread, error = found.spread()["mean"]
    assert (spread > 1.2) if width < 1 else abs(spread - 1) < 5 * error
    assert "mean" in str(found).splitlines()[1]


def test_quantities_are_ranked_in_place_of_sites():
    fit = jax.tree_util.Partial(posterior, 1.0)
    found = lc.simulation_based_calibration(
        model, fit, 3, num_sets=2, quantities=lambda v, _: {"total": v["mean"].sum()}, **NORMAL
    )
    assert found.ranks.keys() == {"total"} and found.ranks["total"].shape == (2,)


def test_values_that_are_not_centred_are_ranked_with_what_they_make():
    """Draws from the prior have the ranks of the truth too."""

    @lc.not_centred
    def model(x=None):
        sd = numpyro.sample("sd", dist.HalfNormal(1))
        with lc.entity_plate("people", 3):
            w = numpyro.sample("w", dist.Normal(0, sd))
        with lc.data_plate("data", 3):
            numpyro.sample("x", dist.Normal(w, 1), obs=x)

    def fit(rng_key, made):
        assert made["x"].shape == (3,)
        drawn = numpyro.infer.Predictive(model, num_samples=9)(rng_key)
        latent = {name: drawn[name] for name in ("sd", "w_decentered")}
        of_rows = numpyro.infer.Predictive(model, latent, return_sites=["w"])
        return latent | of_rows(rng_key)

    def ratio(values, made):
        return {"is made of": values["w"] - values["sd"] * values["w_decentered"]}

    found = lc.simulation_based_calibration(model, fit, num_sets=2, **NORMAL)
    assert found.ranks["w"].shape == (2, 3)
    found = lc.simulation_based_calibration(model, fit, num_sets=2, quantities=ratio, **NORMAL)
    assert found.num_draws == 9


def test_a_quantity_of_the_data_sees_a_posterior_that_is_the_prior():
    """Ranks of the mean are uniform then (Modrák et al.); those of the log likelihood are not."""

    def prior(rng_key, made):
        return {"mean": jax.random.normal(rng_key, (NUM_DRAWS, 20))}

    def quantities(values, made):
        return values | {"fit": -((made["x"] - values["mean"]) ** 2).sum()}

    found = lc.simulation_based_calibration(
        model, prior, 3, num_sets=20, quantities=quantities, **NORMAL
    )
    spread = found.spread()
    assert abs(spread["mean"][0] - 1) < 0.2  # FALSE_ALARM = 1e-6: 400 ranks
    assert (found.ranks["fit"] == NUM_DRAWS).mean() > 0.8  # truth is the most likely


def with_factor(x=None):
    mean = numpyro.sample("mean", dist.Normal(0, 1))
    numpyro.factor("soft", -2 * (mean - 2) ** 2)
    numpyro.sample("x", dist.Normal(mean, 1), obs=x)


def with_covariates(x=None):
    z = numpyro.sample("z", dist.Normal(0, 1), obs=jnp.array(0.5))
    numpyro.factor("constant", -z)
    mean = numpyro.sample("mean", dist.Normal(0, 1))
    numpyro.sample("x", dist.Normal(mean * z, 1), obs=x)


def with_plate(x=None):
    with numpyro.plate("three", 3):
        numpyro.sample("z", dist.Normal(0, 1))


def of_a_minibatch(x=None):
    mean = numpyro.sample("mean", dist.Normal(0, 1))
    with numpyro.plate("data", 10, subsample_size=2):
        numpyro.sample("x", dist.Normal(mean, 1), obs=x)


def with_python_flow(x=None):
    """What JAX cannot trace, a covariate, and what is observed to be as drawn."""
    numpyro.sample("z", dist.Normal(0, 1), obs=jnp.array(0.5))
    mean = numpyro.sample("mean", dist.Normal(0, 1))
    numpyro.sample("twice", dist.Delta(2 * mean), obs=2 * mean)
    numpyro.sample("x", dist.Normal(float(mean) + int(mean > 0), 1), obs=x)


def test_draws_must_be_from_the_prior():
    """Factors and observations of what is drawn are refused, those of nothing drawn are not."""

    def fit(rng_key, made):
        return {"mean": jax.random.normal(rng_key, (NUM_DRAWS,))}

    run = partial(lc.simulation_based_calibration, fit=fit, num_sets=2, **NORMAL)
    for factor in (with_factor, mask(with_factor, mask=jnp.array(True))):
        with pytest.raises(ValueError, match="'soft' of the model is a factor"):
            run(factor)
    with pytest.raises(ValueError, match="'x' of the model is given what it observes"):
        run(with_covariates, x=1.0)
    with pytest.raises(ValueError, match=r"'x' of the model is drawn.*scaled by 5\. Open all"):
        run(of_a_minibatch)
    with pytest.raises(ValueError, match=r"'z' of the model is drawn.*scaled by 1 to 3\. Open"):
        run(scale(with_plate, scale=jnp.array([1.0, 2.0, 3.0])))
    for right in (with_covariates, with_python_flow):
        assert run(right).ranks["mean"].shape == (2,)
    with pytest.raises(TypeError, match="`quantities` must return values by name; got"):
        run(with_covariates, quantities=lambda values, made: values["mean"])


def test_equal_draws_are_ranked_at_random():
    """FALSE_ALARM = 1e-6: the mean of 2,000 uniform ranks on 0, ..., 9 is 4.5, error 0.064."""

    def zeros(rng_key, made):
        return {"mean": jnp.zeros((9, 20))}

    def of_zeros(num_rows):
        mean = numpyro.sample("mean", dist.Delta(jnp.zeros(20), event_dim=1))
        numpyro.sample("x", dist.Normal(mean, 1).to_event(1))

    found = lc.simulation_based_calibration(of_zeros, zeros, 1, num_sets=100, **NORMAL)
    assert abs(found.ranks["mean"].mean() - 4.5) < 5 * 0.064
    assert found.ranks["mean"].min() == 0 and found.ranks["mean"].max() == 9


def test_what_is_no_draw_of_the_model_is_refused():
    def calibrate(draws):
        def fit(*_):
            return draws

        return lc.simulation_based_calibration(model, fit, 2, num_sets=2, **NORMAL)

    with pytest.raises(TypeError, match="draws of latent sites by name"):
        calibrate(jnp.zeros((9, 20)))
    with pytest.raises(ValueError, match=r"must return 1 draws .* got \{'mean': 0\}"):
        calibrate({"mean": 0.5})
    with pytest.raises(ValueError, match=r"has \['slope'\] besides"):
        calibrate({"slope": jnp.zeros((9, 20))})
    with pytest.raises(ValueError, match=r"shape of the truth .*\(20,\); got \(3,\)"):
        calibrate({"mean": jnp.zeros((9, 3))})
    with pytest.raises(ValueError, match="'mean' must be finite"):
        calibrate({"mean": jnp.full((9, 20), jnp.nan)})
    with pytest.raises(ValueError, match="`level`"):
        lc.Calibration({"w": np.zeros((2, 3), int)}, 9).coverage(90)


def test_numbers_of_draws_must_agree():
    numbers = iter((9, 10))

    def fit(*_):
        return {"mean": jnp.zeros((next(numbers), 20))}

    with pytest.raises(ValueError, match="must return 9 draws") as raised:
        lc.simulation_based_calibration(model, fit, 2, num_sets=3, **NORMAL)
    assert raised.value.result_so_far.ranks["mean"].shape == (1, 20)


def test_ctrl_c_leaves_the_sets_that_are_done():
    calls = []

    def fit(rng_key, made):
        calls.append(made)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return posterior(1.0, rng_key, made)

    with pytest.raises(KeyboardInterrupt) as raised:
        lc.simulation_based_calibration(model, fit, 2, num_sets=5, **NORMAL)
    assert raised.value.result_so_far.ranks["mean"].shape == (2, 20)


def test_arviz_and_a_picture():
    ranks = np.random.default_rng(0).integers(0, 100, (30, 4))
    found = lc.Calibration({"w": ranks, "tau": ranks[:, 0]}, 99)
    group = found.to_arviz()["prior_sbc"]
    np.testing.assert_allclose(group["w"].values[0], (ranks + 0.5) / 100)
    if hasattr(az, "plot_ecdf_pit"):
        az.plot_ecdf_pit(found.to_arviz(), var_names=["tau"])
    ax = lc.plots.coverage(found)
    _, line, _ = ax.get_lines()
    x, y = line.get_data()
    assert y[np.isclose(x, 0.5)] == found.coverage(0.5)["w"][0]
    plt.close("all")
