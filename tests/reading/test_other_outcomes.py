# SPDX-License-Identifier: Apache-2.0
"""Fits of models whose outcome is no choice: what can be read of them, and what is refused."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer import TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoNormal
from scipy.special import log_softmax

import numpyro_largecat as lc
from tests.models import class_points_of

N, GROUPS = 40, np.resize(np.arange(8), 40)
COUNTS = lc.EntityCounts.of(8, GROUPS)


def random_effects(groups, x=None, rows=None):
    mean = numpyro.sample("mean", dist.Normal(0, 5))
    with lc.entity_plate("groups", 8, groups, COUNTS) as read:
        v = numpyro.sample("v", dist.Normal(mean, 1))
    with lc.data_plate("data", N, rows):
        numpyro.sample("x", dist.Normal(read.rows_of(v, groups), 0.5), obs=x)


@pytest.fixture(scope="module")
def fitted():
    guide = AutoNormal(random_effects)
    numpyro.handlers.seed(guide, 0)(GROUPS[:5], np.zeros(5), np.arange(5))
    params = {"v_auto_loc": jnp.arange(8.0), "v_auto_scale": jnp.full(8, 0.1)}
    params |= {"mean_auto_loc": jnp.zeros(()), "mean_auto_scale": jnp.ones(())}
    return lc.Fitted(random_effects, guide, params)


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("num_rows", [1, 3, N])
def test_arviz_shows_the_posterior_whatever_rows_there_are(fitted, num_rows: int) -> None:
    """New rows too, and groups that these do not read."""
    data = fitted.on(GROUPS[:num_rows]).to_arviz(rng_key=jax.random.key(0), num_draws=50)
    assert set(data["posterior"].data_vars) == {"mean", "v"}
    v = data["posterior"]["v"].values
    assert v.shape == (1, 50, 8)
    np.testing.assert_allclose(v.mean((0, 1)), np.arange(8), atol=0.08)  # 5.6 standard errors


def test_a_diagnosis_looks_at_the_steps_of_any_fit(fitted) -> None:
    """Those of a fit that has hardly begun still rise; of parameters alone nothing is known."""
    guide = AutoNormal(random_effects)
    svi = lc.SubsampledSVI(random_effects, guide, optax.adam(0.05), TraceMeanField_ELBO())
    x = np.random.default_rng(0).normal(GROUPS, 0.5).astype(np.float32)
    batches = lc.ArrayBatches(GROUPS, x, batch_size=N)
    result = svi.run(jax.random.key(0), 60, batches=batches, progress_bar=False)
    on_nothing = lc.Fitted.from_svi(svi, result).on()
    found = on_nothing.diagnose(rng_key=jax.random.key(1), batches=batches, num_repeats=5)
    by_name = {finding.name: finding for finding in found.findings}
    assert "run longer" in by_name["R-hat of the ELBO"].advice
    signals = [f for f in found.findings if f.group == "gradient signal to noise"]
    assert len(signals) == 4 and max(signal.value for signal in signals) > 1
    with pytest.raises(ValueError, match="the model has no choice to read"):
        fitted.on(GROUPS, x, np.arange(N)).diagnose(rng_key=jax.random.key(1))


def test_a_parameter_that_rows_share_may_be_declared_inside_their_plate() -> None:
    """It has no `event_dim`, so it is no row of the training data."""

    def model(x, y=None, rows=None):
        with lc.class_plate("classes", 5, y) as classes:
            b = numpyro.sample("b", dist.Normal(0, 1))
        with lc.data_plate("data", N) as rows:
            psi = numpyro.param("slope", 2.0) * x[:, None] * b
            lc.sample_choice("y", psi, classes=classes, rows=rows, obs=y)

    loc, guide = np.arange(5.0), class_points_of(5, b=())
    params = {"b_auto_loc": loc, "slope": np.array(3.0)}
    found = lc.Fitted(model, guide, params).on(np.ones(2)).log_likelihood(np.array([1, 4]))
    np.testing.assert_allclose(found, log_softmax(3 * loc)[[1, 4]], rtol=1e-5)


def test_names_in_place_of_ids_are_refused_with_what_makes_ids(fitted) -> None:
    for names in (np.array(["a", "b"]), np.array(["a", None])):
        with pytest.raises(TypeError, match=r"`groups` must be an array of numbers.*np.unique\("):
            fitted.on(names)


def test_predictions_of_what_is_no_choice_name_the_tools_for_it(fitted) -> None:
    """Whether the outcome is given or not."""
    with pytest.raises(NotImplementedError, match=r"site 'x'.*predicted by NumPyro's `Predictive`"):
        fitted.on(GROUPS[:5]).log_likelihood(np.zeros(5))
    given = fitted.on(GROUPS[:5], np.zeros(5), np.arange(5))
    with pytest.raises(ValueError, match=r"the model has no choice to read.*`Predictive`"):
        given.top_classes(2)
    with pytest.raises(ValueError, match=r"the model has no choice to read.*`Predictive`"):
        given.diagnose(rng_key=jax.random.key(0))
