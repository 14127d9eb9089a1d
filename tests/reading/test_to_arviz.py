# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
import xarray as xr
from numpyro.infer import TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoMultivariateNormal, AutoNormal
from numpyro.infer.svi import SVIRunResult

import numpyro_largecat as lc
from tests.models import class_points_of, normals_of
from tests.slow_cases import slow_case

NUM_CATEGORIES = 5000


@pytest.fixture(scope="module")
def fitted():
    def model(x, y, rows=None):
        scale = numpyro.sample("scale", dist.HalfNormal(1))
        with lc.class_plate("classes", NUM_CATEGORIES, y, num_sampled=4) as classes:
            w = numpyro.sample("w", dist.Normal(0, scale).expand([2]).to_event(1))
        with numpyro.plate("groups", 3):
            numpyro.sample("g", dist.Normal(0, 1))
        with lc.data_plate("data", 3, rows) as rows:
            lc.sample_choice("y", x @ w.T, classes=classes, rows=rows, obs=y)

    normals = normals_of(classes=(NUM_CATEGORIES, {"w": (2,)}), groups=(3, {"g": ()}))

    def guide(*args, **kwargs):
        loc = numpyro.param("scale_auto_loc", np.zeros(()))
        numpyro.sample("scale", dist.LogNormal(loc, 1))
        normals()

    params = {"scale_auto_loc": np.zeros(())}
    for name, shape in (("w", (NUM_CATEGORIES, 2)), ("g", (3,))):
        params |= {f"{name}_auto_loc": np.zeros(shape), f"{name}_auto_scale": np.ones(shape)}
    for part, values in (("loc", [5.0, -7.0]), ("scale", [0.5, 2.0])):
        params[f"w_auto_{part}"][4321] = values
    return lc.Fitted(model, guide, params, losses=np.array([3.0, 2.0, 1.0]))


def convert(fitted, **kwargs):
    new = fitted.on(np.ones((3, 2)), np.array([4, 4321, 4]))
    return new.to_arviz(**{"rng_key": jax.random.key(1), "num_draws": 2000} | kwargs)


@pytest.mark.slow
@pytest.mark.smoke
def test_draws_of_the_named_rows_have_the_guides_moments(fitted):
    data = convert(
        fitted,
        rows={"classes": [4321, 17]},
        coords={"classes": ["label", "other"], "feature": ["a", "b"]},
        dims={"w": ["feature"]},
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
    np.testing.assert_allclose(data["constant_data"]["elbo"], [-3, -2, -1])


@pytest.mark.slow
def test_large_tables_are_left_out_unless_named_and_small_plates_are_whole(fitted):
    data = convert(fitted, num_draws=3)
    assert set(data["posterior"].data_vars) == {"scale", "g"}
    assert data["posterior"]["g"].dims == ("chain", "draw", "groups")


def test_netcdf_round_trip(fitted, tmp_path):
    import arviz as az

    data = convert(fitted, rows={"classes": [4, 17]}, num_draws=5)
    lc.save_netcdf(data, tmp_path / "fit.nc")
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
    with pytest.raises(ValueError, match=r"`dims` must have names of sites.*'w'.*got \['W'\]"):
        convert(fitted, rows={"classes": [1]}, dims={"W": ["feature"]})
    with pytest.raises(ValueError, match=r"`coords` names \['class'\].*'classes'.*'w_dim_0'"):
        convert(fitted, rows={"classes": [1]}, coords={"class": ["a"]})
    with pytest.raises(ValueError, match=r"`coords\['classes'\]` must have 1 or 5000.*got 2"):
        convert(fitted, rows={"classes": [1]}, coords={"classes": ["a", "b"]})
    with pytest.raises(ValueError, match=r"`coords\['feature'\]` must have 2 labels.*got 1"):
        named = {"dims": {"w": ["feature"]}, "coords": {"feature": ["a"]}}
        convert(fitted, rows={"classes": [1]}, **named)
    for losses, got in ((SVIRunResult({}, None, jnp.ones(3)), "SVIRunResult"), (1.0, r"\(\)")):
        with pytest.raises(
            ValueError, match=rf"must have shape \(steps,\).*`result.losses`.*{got}"
        ):
            lc.Fitted(fitted.model, fitted.guide, fitted.params, losses=losses)


def test_labels_that_may_be_read_in_two_ways_are_refused():
    """All rows are shown in another order: the labels may be in that order or in their own."""

    def model(y=None):
        with lc.class_plate("classes", 3, y) as classes:
            b = numpyro.sample("b", dist.Normal(0, 1))
        with numpyro.plate("data", 1):
            numpyro.sample("y", lc.UtilityCategorical(b[None], classes), obs=y)

    guide = normals_of(classes=(3, {"b": ()}))
    params = {"b_auto_loc": np.arange(3.0), "b_auto_scale": np.full(3, 1e-3)}

    def convert(rows):
        options = {"rows": {"classes": rows}, "coords": {"classes": ["zero", "one", "two"]}}
        key, new = jax.random.key(1), lc.Fitted(model, guide, params).on()
        return new.to_arviz(rng_key=key, num_draws=5, **options)

    with pytest.raises(ValueError, match=r"`coords\['classes'\]`.*Give `rows` by label"):
        convert([2, 0, 1])
    b = convert(["two", "zero", "one"])["posterior"]["b"].mean(("chain", "draw"))
    np.testing.assert_allclose(b.sel(classes=["zero", "one", "two"]), [0, 1, 2], atol=0.01)


def test_parameters_of_another_fit_are_refused(fitted):
    other = lc.Fitted(fitted.model, fitted.guide, {"scale_auto_loc": jnp.zeros(())})
    with pytest.raises(ValueError, match=r"`params` lacks the parameters.*w_auto_loc"):
        other.on(jnp.ones((3, 2)), jnp.array([4, 4321, 4])).to_arviz(rng_key=jax.random.key(1))


def test_an_empty_posterior_is_refused():
    def model(y):
        with lc.class_plate("classes", NUM_CATEGORIES, y, num_sampled=4):
            numpyro.sample("w", dist.Normal(0, 1))

    guide, y = class_points_of(NUM_CATEGORIES, w=()), jnp.array([1, 2])
    params = {"w_auto_loc": jnp.ones(NUM_CATEGORIES)}
    with pytest.raises(ValueError, match=r"no latent site to show.*'classes': 5000"):
        lc.Fitted(model, guide, params).on(y).to_arviz(rng_key=jax.random.key(1))


def test_rows_are_named_of_a_plate_that_has_latent_sites():
    """Not of the larger one of the data."""

    def model(y):
        with lc.class_plate("classes", NUM_CATEGORIES, y, num_sampled=4) as classes:
            b = numpyro.sample("b", dist.Normal(0, 1))
        with lc.data_plate("data", 2 * NUM_CATEGORIES) as rows:
            lc.sample_choice("y", b[None], classes=classes, rows=rows, obs=y)

    y = jnp.zeros(2 * NUM_CATEGORIES, int)
    params = {"b_auto_loc": jnp.zeros(NUM_CATEGORIES)}
    with pytest.raises(ValueError, match=r"`rows={'classes': \[0, 1\]}`"):
        lc.Fitted(model, class_points_of(NUM_CATEGORIES, b=()), params).on(y).to_arviz(
            rng_key=jax.random.key(1)
        )


# With the observed choices.

FEW, MANY_ROWS = 6, 200


@pytest.fixture(scope="module")
def small():
    """A small model, with N rows and all classes in a chunk or in several, and a guide of it."""
    x = jax.random.normal(jax.random.key(1), (MANY_ROWS, 2))
    w = 1.5 * jax.random.normal(jax.random.key(2), (FEW, 2))
    y = jax.random.categorical(jax.random.key(3), x @ w.T)

    def model(x, y=None):
        scale = numpyro.sample("scale", dist.HalfNormal(1))
        with lc.class_plate("classes", FEW) as classes:
            w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
        with numpyro.plate("data", len(x)):
            psi = scale * x @ w.T
            numpyro.sample("y", lc.UtilityCategorical(psi, classes), obs=y)

    def guide(x, y=None):
        loc = numpyro.param("scale_loc", 0.0)
        numpyro.sample("scale", dist.LogNormal(loc, 0.1))
        with numpyro.plate("classes", FEW):
            loc = numpyro.param("w_loc", jnp.zeros((FEW, 2)), event_dim=1)
            numpyro.sample("w", dist.Normal(loc, 0.3).to_event(1))

    return lc.Fitted(model, guide, {"scale_loc": jnp.array(0.1), "w_loc": w}), x, y


@pytest.mark.slow
@pytest.mark.parametrize("chunk_size", [4, 1024])
def test_log_likelihoods_are_those_of_the_draws_shown(small, chunk_size):
    fitted, x, y = small
    fitted = lc.Fitted(fitted.model, fitted.guide, fitted.params, chunk_size=chunk_size)
    data = fitted.on(x).to_arviz(rng_key=jax.random.key(1), obs=y, num_draws=7)
    w, scale = (np.asarray(data["posterior"][name])[0] for name in ("w", "scale"))
    psi = scale[:, None, None] * np.asarray(x) @ w.transpose(0, 2, 1)
    expected = np.asarray(jax.nn.log_softmax(psi))[:, np.arange(MANY_ROWS), y]
    assert data["log_likelihood"]["y"].dims == ("chain", "draw", "data")
    np.testing.assert_allclose(data["log_likelihood"]["y"][0], expected, atol=1e-5)
    assert data["posterior_predictive"]["y"].shape == (1, 7, MANY_ROWS)
    np.testing.assert_array_equal(data["observed_data"]["y"], y)


@pytest.mark.slow
def test_loo_agrees_with_nuts(small):
    """Within a standard error of the estimate; mean-field draws are too narrow, and a bit worse."""
    import arviz as az
    from numpyro.infer import MCMC, NUTS

    model, x, y = small[0].model, *small[1:]
    svi = lc.SubsampledSVI(
        model, AutoNormal(model, init_scale=0.3), optax.adam(0.02), TraceMeanField_ELBO()
    )
    result = svi.run(jax.random.key(0), 2000, x, y, progress_bar=False)
    data = lc.Fitted.from_svi(svi, result).on(x).to_arviz(rng_key=jax.random.key(1), obs=y)
    mcmc = MCMC(NUTS(model), num_warmup=300, num_samples=500, progress_bar=False)
    mcmc.run(jax.random.key(2), x, y)
    draws = mcmc.get_samples()
    psi = draws["scale"][:, None, None] * x @ draws["w"].transpose(0, 2, 1)
    log_probs = np.asarray(jax.nn.log_softmax(psi))[:, np.arange(MANY_ROWS), y]
    exact = {"posterior": {"scale": draws["scale"][None]}, "log_likelihood": {"y": log_probs[None]}}
    major = int(az.__version__.split(".")[0])
    exact = az.from_dict(exact) if major else az.from_dict(**exact)
    found = [az.loo(d, pointwise=True) for d in (data, exact)]
    points = [np.asarray(f.elpd_i if major else f.loo_i) for f in found]
    gap = points[0] - points[1]
    assert abs(gap.sum()) < np.std(points[1]) * MANY_ROWS**0.5
    assert np.corrcoef(points)[0, 1] > 0.98


@pytest.mark.slow
def test_classes_by_label_or_the_most_frequent(fitted):
    names = np.array([f"class {k}" for k in range(NUM_CATEGORIES)])
    options = {"rng_key": jax.random.key(1), "num_draws": 2, "coords": {"classes": names}}
    x = jnp.ones((3, 2))
    new = fitted.on(x, None)
    data = new.to_arviz(rows={"classes": ["class 7", "class 4999"]}, **options)
    assert data["posterior"]["w"].coords["classes"].values.tolist() == ["class 7", "class 4999"]
    obs = jnp.array([4, 4321, 4])
    options |= {"constant_data": {"x": x}, "dims": {"x": ["data", "f"]}}
    data = new.to_arviz(obs=obs, **options)
    assert data["posterior"]["w"].coords["classes"].values.tolist() == ["class 4", "class 4321"]
    assert data["constant_data"]["x"].dims == ("data", "f")
    with pytest.raises(ValueError, match=r"`rows\['classes'\]` names rows by label.*\['nope'\]"):
        new.to_arviz(rows={"classes": ["nope"]}, **options)
    with pytest.raises(ValueError, match="It has 0"):
        new.to_arviz(rng_key=jax.random.key(1), rows={"classes": ["nope"]})


@pytest.mark.parametrize(
    ("rows", "coords", "shown"),
    [
        (None, None, [0, 1, 2, 3, 4]),
        slow_case(None, list("abcde"), list("abcde")),
        slow_case(jnp.array([2, 0, 1, 1, 2]), None, [2, 0, 1, 1, 2]),
        (jnp.array([2, 0, 1, 1, 2]), list("abc"), list("cabbc")),
    ],
)
@pytest.mark.slow
def test_observations_may_be_others_than_those_of_the_fit(fitted, rows, coords, shown):
    obs = jnp.array([4, 4321, 4, 0, 1])
    new = fitted.on(jnp.ones((5, 2)), None, rows)
    draws = {"rng_key": jax.random.key(1), "num_draws": 2}
    data = new.to_arviz(obs=obs, coords={"data": coords} if coords else None, **draws)
    for group in ("log_likelihood", "posterior_predictive", "observed_data"):
        assert data[group]["y"].shape[-1] == 5
        assert data[group]["y"].coords["data"].values.tolist() == shown
    if coords is None:
        expected = new.log_likelihood(obs, **draws)
        np.testing.assert_allclose(data["log_likelihood"]["y"][0], expected, rtol=1e-5)
    if rows is None:
        with pytest.raises(ValueError, match=r"`coords\['data'\]` must have 5 labels.*got 3"):
            new.to_arviz(obs=obs, coords={"data": list("abc")}, **draws)
    with pytest.raises(ValueError, match=r"`rows` names rows of plate 'data'.*Leave it out"):
        new.to_arviz(obs=obs, rows={"data": [0]}, **draws)


@pytest.mark.slow
@pytest.mark.parametrize("chunk_size", [2, 1024])
def test_rows_of_a_site_are_those_named_also_if_the_guide_draws_it_whole(chunk_size):
    """As AutoMultivariateNormal does, whose sites are in no plate."""

    def model(x, y=None):
        slope = numpyro.sample("slope", dist.Normal(0, 1))
        with lc.class_plate("modes", 3) as modes:
            w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
        with numpyro.plate("data", len(x)):
            numpyro.sample("y", lc.UtilityCategorical(slope * x @ w.T, modes), obs=y)

    x, y, w = jnp.array([[1.0, 2.0], [-1.0, 0.5]]), jnp.array([0, 2]), jnp.arange(6.0)
    guide = AutoMultivariateNormal(model)
    numpyro.handlers.seed(guide, 0)(x, y)
    params = {"auto_loc": jnp.append(1.0, w), "auto_scale_tril": 1e-6 * jnp.eye(7)}
    new = lc.Fitted(model, guide, params, chunk_size=chunk_size).on(x)
    options = {"rows": {"modes": ["c", "a"]}, "coords": {"modes": list("abc")}, "num_draws": 2}
    for obs in (None, y):
        data = new.to_arviz(rng_key=jax.random.key(1), obs=obs, **options)
        found = data["posterior"]["w"]
        assert found.dims == ("chain", "draw", "modes", "w_dim_0")
        assert found.coords["modes"].values.tolist() == ["c", "a"]
        np.testing.assert_allclose(found[0, 0], w.reshape(3, 2)[jnp.array([2, 0])], atol=1e-4)
    expected = jax.nn.log_softmax(x @ w.reshape(3, 2).T)[jnp.arange(2), y]
    np.testing.assert_allclose(data["log_likelihood"]["y"][0, 0], expected, atol=1e-4)


def test_predictions_of_rows_that_share_their_utilities_are_drawn_apart():
    """FALSE_ALARM = 1e-6: 20 equal pairs of draws from 6 classes that are as probable."""

    def model(y=None):
        with lc.class_plate("classes", 6, y, 2) as classes:
            b = numpyro.sample("b", dist.Normal(0, 1))
        with lc.data_plate("data", 2) as rows:
            lc.sample_choice("y", b[None], classes=classes, rows=rows, obs=y)

    guide, obs = class_points_of(6, b=()), jnp.array([2, 0])
    new = lc.Fitted(model, guide, {"b_auto_loc": jnp.zeros(6)}).on()
    data = new.to_arviz(rng_key=jax.random.key(0), obs=obs, num_draws=20)
    drawn = data["posterior_predictive"]["y"].values
    assert drawn.shape == (1, 20, 2)
    assert (drawn[..., 0] != drawn[..., 1]).any()


@pytest.mark.slow
def test_rows_of_all_plates_are_drawn_as_the_likelihood_has_them():
    """Also those of the observations, and of a plate beside the classes."""
    groups = jnp.array([0, 1, 2, 1])

    def model(y=None, rows=None):
        with numpyro.plate("groups", 3):
            slope = numpyro.sample("slope", dist.Normal(0, 1))
        with lc.class_plate("classes", 6, y, 2) as classes:
            w = numpyro.sample("w", dist.Normal(0, 1))
        with lc.data_plate("data", 4, rows) as rows:
            z = numpyro.sample("z", dist.Normal(0, 1))
            psi = (z + slope[groups[rows.indices]])[:, None] * w
            lc.sample_choice("y", psi, classes=classes, rows=rows, obs=y)

    guide, obs, ids = AutoNormal(model), jnp.array([5, 0]), jnp.array([3, 0])
    numpyro.handlers.seed(guide, 0)(jnp.zeros(4, int), jnp.arange(4))
    params = {}
    for name, size in (("slope", 3), ("w", 6), ("z", 4)):
        params |= {f"{name}_auto_loc": jnp.zeros(size), f"{name}_auto_scale": jnp.ones(size)}
    new = lc.Fitted(model, guide, params, chunk_size=4).on(None, ids)
    data = new.to_arviz(rng_key=jax.random.key(0), obs=obs, num_draws=3)
    slope, w, z = (data["posterior"][name].values[0] for name in ("slope", "w", "z"))
    psi = (z + slope[:, groups[ids]])[..., None] * w[:, None]
    expected = jax.nn.log_softmax(psi)[:, jnp.arange(2), obs]
    np.testing.assert_allclose(data["log_likelihood"]["y"][0], expected, atol=1e-5)


@pytest.mark.slow
def test_zarr_round_trip(small, tmp_path):
    fitted, x, y = small
    data = fitted.on(x).to_arviz(rng_key=jax.random.key(1), obs=y, num_draws=3)
    tree = data.to_datatree() if hasattr(data, "to_datatree") else data  # ArviZ 0.23 or 1
    tree.to_zarr(str(tmp_path / "fit.zarr"), consolidated=False)
    back = xr.open_datatree(str(tmp_path / "fit.zarr"), engine="zarr", consolidated=False)
    for group, name in (("posterior", "w"), ("log_likelihood", "y"), ("observed_data", "y")):
        np.testing.assert_array_equal(back[group][name], data[group][name])


def test_tables_are_no_constants_of_compiled_programs():
    """Two rows of 20,000 are shown, and memory follows these."""

    def model(y=None):
        with lc.class_plate("classes", 20_000, y, 2) as classes:
            w = numpyro.sample("w", dist.Normal(0, 1).expand([4]).to_event(1))
        with lc.data_plate("data", 2) as rows:
            lc.sample_choice("y", w.sum(-1)[None], classes=classes, rows=rows, obs=y)

    guide, obs = class_points_of(20_000, w=(4,)), jnp.array([2, 0])
    new = lc.Fitted(model, guide, {"w_auto_loc": jnp.zeros((20_000, 4))}).on()
    options = {"rng_key": jax.random.key(0), "rows": {"classes": [7, 3]}, "num_draws": 2}
    before = jax.config.jax_captured_constants_warn_bytes
    jax.config.update("jax_captured_constants_warn_bytes", 100_000)  # JAX warns of larger ones
    try:
        for choice in ({}, {"obs": obs}):
            assert new.to_arviz(**options, **choice)["posterior"]["w"].shape == (1, 2, 2, 4)
    finally:
        jax.config.update("jax_captured_constants_warn_bytes", before)
