# SPDX-License-Identifier: Apache-2.0
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

import numpyro_largecat as lc

NUM_CATEGORIES = 5000


@pytest.fixture(scope="module")
def fitted():
    y, x = jnp.array([4, 4321, 4]), jnp.ones((3, 2))

    def model(x, y):
        scale = numpyro.sample("scale", dist.HalfNormal(1))
        with lc.class_plate("classes", NUM_CATEGORIES, y, num_sampled=4) as classes:
            w = numpyro.sample("w", dist.Normal(0, scale).expand([2]).to_event(1))
        with numpyro.plate("groups", 3):
            numpyro.sample("g", dist.Normal(0, 1))
        with lc.data_plate("data", 3) as rows:
            lc.sample_choice("y", x @ w.T, classes=classes, rows=rows, obs=y)

    guide = AutoNormal(model)
    svi = lc.SubsampledSVI(model, guide, optax.adagrad(0.01), TraceMeanField_ELBO())
    result = svi.run(jax.random.key(0), 3, x, y, progress_bar=False)
    return model, guide, result, x, y


def convert(fitted, **kwargs):
    model, guide, result, x, y = fitted
    kwargs.setdefault("num_draws", 2000)
    return lc.to_arviz(jax.random.key(1), model, guide, result.params, x, y, **kwargs)


@pytest.mark.smoke
def test_draws_of_the_named_rows_have_the_guides_moments(fitted):
    params = fitted[2].params
    params["w_auto_loc"] = params["w_auto_loc"].at[4321].set(jnp.array([5.0, -7.0]))
    params["w_auto_scale"] = params["w_auto_scale"].at[4321].set(jnp.array([0.5, 2.0]))
    data = convert(
        fitted,
        rows={"classes": [4321, 17]},
        coords={"classes": ["label", "other"], "feature": ["a", "b"]},
        dims={"w": ["feature"]},
        losses=fitted[2].losses,
    )
    w = data["posterior"]["w"]
    assert w.dims == ("chain", "draw", "classes", "feature")
    assert w.shape == (1, 2000, 2, 2)
    drawn = np.asarray(w.sel(classes="label"))[0]
    # 5 standard errors: a correct program fails with probability below 1e-5
    assert (np.abs(drawn.mean(axis=0) - [5, -7]) < 5 * np.array([0.5, 2.0]) / 2000**0.5).all()
    np.testing.assert_allclose(drawn.std(axis=0), [0.5, 2.0], rtol=0.1)
    assert abs(np.corrcoef(drawn.T)[0, 1]) < 0.12
    assert set(data["posterior"].data_vars) == {"w", "scale", "g"}
    assert (np.asarray(data["posterior"]["scale"]) > 0).all()
    np.testing.assert_allclose(data["constant_data"]["elbo"], -np.asarray(fitted[2].losses))


def test_large_tables_are_left_out_unless_named_and_small_plates_are_whole(fitted):
    data = convert(fitted, num_draws=3)
    assert set(data["posterior"].data_vars) == {"scale", "g"}
    assert data["posterior"]["g"].dims == ("chain", "draw", "groups")


def test_netcdf_round_trip(fitted, tmp_path):
    import arviz as az

    data = convert(fitted, rows={"classes": [4, 17]}, num_draws=5, losses=fitted[2].losses)
    data.to_netcdf(str(tmp_path / "fit.nc"))
    back = az.from_netcdf(str(tmp_path / "fit.nc"))
    for name in ("w", "scale"):
        np.testing.assert_array_equal(back["posterior"][name], data["posterior"][name])
    assert back["posterior"]["w"].coords["classes"].values.tolist() == [4, 17]


def test_summary_needs_no_reshaping(fitted):
    import arviz as az

    data = convert(fitted, rows={"classes": [4]}, num_draws=50)
    table = az.summary(data, kind="stats")
    assert "w[4, 0]" in table.index and "scale" in table.index


def test_bad_rows_and_dims_are_described(fitted):
    with pytest.raises(ValueError, match=r"`rows` names plate 'nope'.*'classes'"):
        convert(fitted, rows={"nope": [1]})
    with pytest.raises(ValueError, match=r"`rows\['classes'\]`.*got 5000 at position 1"):
        convert(fitted, rows={"classes": [1, 5000]})
    with pytest.raises(ValueError, match="`dims` of site 'w' must name its 1 event dimensions"):
        convert(fitted, rows={"classes": [1]}, dims={"w": ["a", "b"]})


def test_parameters_of_another_fit_are_refused(fitted):
    model, guide, _, x, y = fitted
    with pytest.raises(ValueError, match=r"`params` lacks the parameters.*w_auto_loc"):
        lc.to_arviz(jax.random.key(1), model, guide, {"scale_auto_loc": jnp.zeros(())}, x, y)


def test_an_empty_posterior_is_refused():
    def model(y):
        with lc.class_plate("classes", NUM_CATEGORIES, y, num_sampled=4):
            numpyro.sample("w", dist.Normal(0, 1))

    guide = AutoNormal(model)
    svi = lc.SubsampledSVI(model, guide, optax.sgd(0.1), TraceMeanField_ELBO())
    params = svi.get_params(svi.init(jax.random.key(0), jnp.array([1, 2])))
    with pytest.raises(ValueError, match=r"no latent site to show.*'classes': 5000"):
        lc.to_arviz(jax.random.key(1), model, guide, params, jnp.array([1, 2]))
