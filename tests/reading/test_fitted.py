# SPDX-License-Identifier: Apache-2.0
"""What `lc.Fitted` finds, holds and refuses; what it reads is tested by the name of each method."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoDelta
from scipy.special import log_softmax

import numpyro_largecat as lc
from numpyro_largecat.reading.choice_site import find_choice
from tests.models import Frame, class_points_of, normals_of

K, N = 7, 4
X, Y, Z = np.float32([1.0, -2.0, 0.5, 3.0]), np.array([1, 2, 0, 6]), np.array([3, 3, 1, 0])
USERS = np.array([0, 5, 3, 5])


def run_guide(model, *args, **kwargs):
    guide = AutoDelta(model)
    numpyro.handlers.seed(guide, 0)(*args, **kwargs)
    return guide


def two_choices(x, users, y=None, z=None, *, equal=True):
    """Two choices over two class plates, and a third that is read by id, of as many classes."""
    with lc.class_plate("users", K, users, 1) as known:
        u = numpyro.sample("u", dist.Normal(0, 1))
    with lc.class_plate("first", K, y, 2) as first:
        v = numpyro.sample("v", dist.Normal(0, 1))
    with lc.class_plate("second", K if equal else 12, z, 2) as second:
        w = numpyro.sample("w", dist.Normal(0, 1))
    with lc.data_plate("data", N) as rows:
        x = x * u[known.place(users)]
        lc.sample_choice("y", x[:, None] * v, classes=first, rows=rows, obs=y)
        lc.sample_choice("z", x[:, None] * w, classes=second, rows=rows, obs=z)


LOCS = {"u_auto_loc": np.ones(K), "v_auto_loc": np.arange(7.0), "w_auto_loc": -np.arange(7.0)}


@pytest.mark.slow
def test_a_choice_and_its_plate_are_found_among_several():
    """By one name, also where all class plates have as many classes."""
    guide = run_guide(two_choices, X, USERS, Y, Z)

    def found(**names):
        return find_choice(lc.Fitted(two_choices, guide, LOCS, **names).on(X, USERS)._fit)[:2]

    assert found(site="y") == found(plate="first") == ("y", "first")
    assert found(site="z") == found(plate="second") == ("z", "second")
    assert found(site="y", plate="first") == ("y", "first")
    with pytest.raises(ValueError, match=r"say which choice.*\['y', 'z'\].*'first', 'second'"):
        found()
    other = lc.Fitted(two_choices, guide, LOCS, site="y", plate="second")
    with pytest.raises(ValueError, match="'y' must have `classes=` from class plate 'second'"):
        other.on(X, USERS, Y, Z).top_classes(1)
    top = lc.Fitted(two_choices, guide, LOCS, site="z").on(X, USERS).top_classes(1)
    assert top.classes[:, 0].tolist() == [0, 6, 0, 0]


@pytest.mark.slow
def test_a_choice_is_no_choice_of_a_plate_of_another_size():
    guide = run_guide(two_choices, X, USERS, Y, Z, equal=False)
    fitted = lc.Fitted(two_choices, guide, LOCS, site="z", plate="first")
    with pytest.raises(ValueError, match="say which choice"):
        fitted.on(X, USERS, equal=False).top_classes(1)


def test_what_needs_no_choice_asks_for_none():
    """ArviZ without observations, of a model with two choices and of one without."""
    guide = normals_of(users=(K, {"u": ()}), first=(K, {"v": ()}), second=(K, {"w": ()}))
    scales = {name.replace("loc", "scale"): np.ones(7) for name in LOCS}
    data = lc.Fitted(two_choices, guide, LOCS | scales).on(X, USERS, Y, Z)
    options = {"rng_key": jax.random.key(0), "num_draws": 2}
    assert set(data.to_arviz(**options)["posterior"].data_vars) == {"u", "v", "w"}

    def plain(x):
        numpyro.sample("x", dist.Normal(numpyro.sample("m", dist.Normal(0, 1)), 1), obs=x)

    def guide_of_plain(x):
        numpyro.sample("m", dist.Delta(numpyro.param("m_auto_loc", 0.0)))

    fitted = lc.Fitted(plain, guide_of_plain, {"m_auto_loc": np.array(2.0)})
    assert fitted.on(1.0).to_arviz(**options)["posterior"]["m"].values.tolist() == [[2, 2]]
    with pytest.raises(ValueError, match=r"the model has no choice to read"):
        fitted.on(1.0).top_classes()


def with_names_of_options(x, site, rows, num_top, rng_key, y=None, *, plate):
    """A model whose arguments are called as ours are."""
    with lc.class_plate(plate, K, y, 2) as classes:
        b = numpyro.sample("b", dist.Normal(0, 1))
    with lc.data_plate("data", N, rows) as rows:
        psi = (x + site + num_top + rng_key)[:, None] * b
        lc.sample_choice("y", psi, classes=classes, rows=rows, obs=y)


def test_arguments_of_the_model_are_no_options():
    names = {"x": X, "site": 0.0, "num_top": 0.0, "rng_key": 0.0, "plate": "classes"}
    guide = class_points_of(K, b=())
    fitted = lc.Fitted(with_names_of_options, guide, {"b_auto_loc": np.arange(7.0)})
    top = fitted.on(**names, rows=np.arange(N)).top_classes(1, rng_key=None)
    assert top.classes[:, 0].tolist() == [6, 0, 6, 6]


def softmax(x, y=None, rows=None, *, sign=1.0, num_sampled=2):
    with lc.class_plate("classes", K, y, num_sampled) as classes:
        b = numpyro.sample("b", dist.Normal(0, 1))
    with lc.data_plate("data", N, rows) as rows:
        lc.sample_choice("y", sign * x[:, None] * b, classes=classes, rows=rows, obs=y)


def exact(b, x, sign=1.0):
    return log_softmax(sign * np.asarray(x)[..., None] * np.asarray(b), axis=-1)


@pytest.mark.parametrize("kind", [lc.SubsampledSVI, SVI])
@pytest.mark.slow
def test_an_svi_gives_its_static_arguments_and_losses(kind):
    """NumPyro's own too, of a full plate."""
    static = {"sign": -1.0, "num_sampled": None if kind is SVI else 2}
    model = numpyro.handlers.block(softmax, hide=["y_u"]) if kind is SVI else softmax
    svi = kind(model, AutoDelta(model), optax.adam(0.1), Trace_ELBO(), **static)
    result = svi.run(jax.random.key(0), 3, X, Y, progress_bar=False)
    fitted = lc.Fitted.from_svi(svi, result, chunk_size=3)
    expected = exact(result.params["b_auto_loc"], X, -1.0)[np.arange(N), Y]
    np.testing.assert_allclose(fitted.on(X).log_likelihood(Y), expected, rtol=1e-5)
    np.testing.assert_array_equal(fitted.losses, result.losses)
    other = lc.Fitted.from_svi(svi, result, params={"b_auto_loc": jnp.zeros(K)})
    np.testing.assert_allclose(other.on(X).log_likelihood(Y), -np.log(K), rtol=1e-5)
    found = fitted.on(X, Y).diagnose(rng_key=jax.random.key(0), num_repeats=2, num_draws=0)
    names = [finding.name.split(",")[0] for finding in found.findings]
    assert ("gradient signal to noise" in names) == (kind is lc.SubsampledSVI)


@pytest.fixture(scope="module")
def guide():
    return class_points_of(K, b=())


def test_parameters_of_a_file_are_read_and_diagnosed(guide, tmp_path):
    """What the parameters alone cannot tell is left out."""
    b = np.linspace(-1, 1, K, dtype=np.float32)
    np.savez(tmp_path / "params.npz", b_auto_loc=b, y_u=np.zeros(N, np.float32))
    fitted = lc.Fitted(softmax, guide, np.load(tmp_path / "params.npz"), chunk_size=3)
    expected = exact(b, X)[np.arange(N), Y]
    np.testing.assert_allclose(fitted.on(X).log_likelihood(Y), expected, rtol=1e-5)
    found = fitted.on(X, Y).diagnose(rng_key=jax.random.key(0), num_repeats=2, num_draws=0)
    assert [f.name for f in found.findings] == [
        "exact log likelihood less bound", "classes seen, of 7", "classes seen, effectively",
    ]  # fmt: skip


def test_rows_of_any_number_under_jit_and_vmap(guide):
    """With parameters that the program closes over, and with those that it takes."""
    b = np.linspace(-1, 1, K, dtype=np.float32)
    fitted = lc.Fitted(softmax, guide, {"b_auto_loc": b, "y_u": np.zeros(N)}, chunk_size=3)
    x = np.float32([[0.3, -1.0, 2.0], [1.0, 4.0, -0.1]])
    expected = exact(b, x)
    predict = jax.jit(jax.vmap(lambda x: fitted.on(x).top_classes(K)))
    np.testing.assert_allclose(predict(x).log_probs, np.sort(expected)[..., ::-1], rtol=1e-5)

    def log_prob(b, x):
        return lc.Fitted(softmax, guide, {"b_auto_loc": b, "y_u": np.zeros(N)}).on(x)

    tables, obs = np.stack([b, -b]), np.array([0, 3, 6])
    found = jax.jit(jax.vmap(lambda b: log_prob(b, x[0]).log_likelihood(obs)))
    expected = exact(tables[:, None], x[0])[:, np.arange(3), obs]
    np.testing.assert_allclose(found(tables), expected, rtol=1e-5)


@pytest.mark.parametrize("made", [Frame, np.ndarray.tolist, jnp.asarray])
def test_what_numpy_makes_into_arrays_is_read_as_these(guide, made):
    """As training takes it; also the choices."""
    b = np.linspace(-1, 1, K, dtype=np.float32)
    fitted = lc.Fitted(softmax, guide, {"b_auto_loc": b, "y_u": np.zeros(N, np.float32)})
    new = fitted.on(made(np.asarray(X)))
    log_probs = new.log_likelihood(made(np.asarray(Y)))
    np.testing.assert_allclose(log_probs, exact(b, X)[np.arange(N), Y], rtol=1e-5)
    top = new.top_classes(1, exclude=made(np.asarray(Y)[:, None]))
    np.testing.assert_array_equal(top.classes[:, 0], [6, 0, 6, 5])


def test_arguments_that_are_no_arrays_reach_the_model_as_they_are():
    others = (None, "text", 3, 0.5, np.float32(2), np.float32, len, [1, "a"], (2, 3), {"a": [1]})
    given: list[Any] = []

    def model(*args, sizes):
        given[:] = *args, sizes
        softmax(X)

    fitted = lc.Fitted(model, class_points_of(K, b=()), {"b_auto_loc": np.zeros(K)})
    fitted.on(*others, sizes=[64, 32]).top_classes(1)
    assert given == [*others, [64, 32]]


@pytest.mark.parametrize(
    "read",
    [
        lambda new, **draws: new.top_classes(2, **draws),
        lambda new, **draws: new.log_likelihood(Y, **draws),
        lambda new, **draws: new.log_predictive(Y, **draws),
        lambda new, **draws: new.draw_choices(**draws),
        lambda new, **draws: new.to_arviz(**draws),
        lambda new, **draws: new.diagnose(rng_key=draws["rng_key"]),
    ],
)
def test_a_key_that_is_none_is_refused_with_the_way_to_make_one(guide, read):
    fitted = lc.Fitted(softmax, guide, {"b_auto_loc": np.zeros(K), "y_u": np.zeros(N)})
    with pytest.raises(TypeError, match=r"`rng_key` must be .*got 0.*`jax.random.key\(0\)`"):
        read(fitted.on(X, Y), rng_key=0, num_draws=2)


@pytest.mark.parametrize("noise", ["gumbel", "normal"])
def test_no_rows_are_read_as_no_rows(noise):
    def model(x, y=None):
        with lc.class_plate("classes", K, y) as classes:
            b = numpyro.sample("b", dist.Normal(0, 1))
        with lc.data_plate("data", N):
            psi = x[:, None] * b
            numpyro.sample("y", lc.UtilityCategorical(psi, classes, noise=noise), obs=y)

    guide, params = normals_of(classes=(K, {"b": ()})), {"b_auto_loc": np.zeros(K)}
    params["b_auto_scale"] = np.ones(K)
    new = lc.Fitted(model, guide, params, chunk_size=3).on(X[:0])
    draws = {"rng_key": jax.random.key(0), "num_draws": 5}
    for top in (new.top_classes(2), new.top_classes(2, **draws)):
        assert top.classes.shape == top.log_probs.shape == (0, 2)
    assert new.log_likelihood(Y[:0]).shape == new.log_predictive(Y[:0], **draws).shape == (0,)
    assert new.log_likelihood(Y[:0], **draws).shape == new.draw_choices(**draws).shape == (5, 0)


@pytest.mark.slow
def test_in_float64(x64):
    b = np.linspace(-1, 1, K) + 1e-12
    fitted = lc.Fitted(softmax, run_guide(softmax, X, Y), {"b_auto_loc": b, "y_u": np.zeros(N)})
    found = fitted.on(np.asarray(X, np.float64)).log_likelihood(Y)
    assert found.dtype == jnp.float64
    np.testing.assert_allclose(found, exact(b, X)[np.arange(N), Y], rtol=1e-14)


@pytest.mark.slow
def test_a_fit_with_error_guides_is_read_on_rows_that_have_no_errors():
    def model(x, y=None, rows=None):
        with lc.class_plate("classes", K, y, 2) as classes:
            b = numpyro.sample("b", dist.Normal(0, 1))
        with lc.data_plate("data", N, rows):
            error = numpyro.sample("e", lc.error_distribution("gumbel"))
            choice = lc.AugmentedCategorical(x[:, None] * b, classes, "gumbel", error=error)
            numpyro.sample("y", choice, obs=y)

    guide = lc.ErrorGuideList(model, AutoDelta, errors={"e": lc.LocalErrors()})
    svi = lc.SubsampledSVI(model, guide, optax.adam(0.1), Trace_ELBO())
    result = svi.run(jax.random.key(0), 2, X, Y, progress_bar=False)
    new = lc.Fitted.from_svi(svi, result).on(jnp.array([1.0, 2.0]))
    assert new.top_classes(2).classes.shape == (2, 2)
    assert new.log_likelihood(jnp.array([0, 1])).shape == (2,)
    data = new.to_arviz(rng_key=jax.random.key(0), num_draws=2, obs=jnp.array([0, 1]))
    assert set(data["posterior"].data_vars) == {"b"}
