# SPDX-License-Identifier: Apache-2.0
"""The posterior predictive by draws of utilities, beside many draws of the weights."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer.autoguide import AutoDelta, AutoGuideList, AutoMultivariateNormal, AutoNormal
from scipy.special import expit, log_softmax, logsumexp, ndtri

import numpyro_largecat as lc
from numpyro_largecat.reading.chunked_utilities import ChunkedUtilities
from numpyro_largecat.reading.gaussian_utilities import GaussianUtilities
from numpyro_largecat.reading.row_factors import variances
from tests.memory import temp_bytes
from tests.models import normals_of

K, D, N = 12, 3, 5
X = np.random.default_rng(0).normal(size=(N, D)).astype(np.float32)
Y = np.arange(N) % K
BY_HAND = normals_of(classes=(K, {"w": (D,), "b": ()}))
KEY = jax.random.key(3)


def regression(
    x,
    y=None,
    num_categories=K,
    num_sampled=2,
    width=D,
    utilities=lambda x, w, b, classes: x @ w.T + b,
):
    with lc.class_plate("classes", num_categories, y, num_sampled) as classes:
        w = numpyro.sample("w", dist.Normal(0, 1).expand([width]).to_event(1))
        b = numpyro.sample("b", dist.Normal(0, 1))
    with lc.data_plate("data", len(x)) as rows:
        psi = utilities(x, w, b, classes)
        lc.sample_choice("y", psi, classes=classes, rows=rows, obs=y)


def hierarchical(x, y=None):
    tau = numpyro.sample("tau", dist.LogNormal(0, 1))
    with lc.class_plate("classes", K, y, num_sampled=2) as classes:
        w = numpyro.sample("w", dist.Normal(0, 1).expand([D]).to_event(1))
    with lc.data_plate("data", len(x)) as rows:
        lc.sample_choice("y", tau * (x @ w.T), classes=classes, rows=rows, obs=y)


def params_of(num_categories=K, spread=0.5):
    rng = np.random.default_rng(1)
    return {
        "w_auto_loc": rng.normal(size=(num_categories, D)).astype(np.float32),
        "w_auto_scale": (spread * rng.gamma(2, 0.5, (num_categories, D))).astype(np.float32),
        "b_auto_loc": rng.normal(size=num_categories).astype(np.float32),
        "b_auto_scale": np.full(num_categories, spread, np.float32),
    }


def start(guide, x=X):
    """Run a guide once, which gives its parameters."""
    sites = numpyro.handlers.trace(numpyro.handlers.seed(guide, 0)).get_trace(x, Y)
    return {name: site["value"] for name, site in sites.items() if site["type"] == "param"}


def fitted_on(model, params, guide=BY_HAND, x=X, **options):
    return lc.Fitted(model, guide, params, **options).on(x)


def expected_log_probs(params, x, num_draws=100_000):
    """By draws of the weights, in float64: their own error is below 0.01."""
    rng, total = np.random.default_rng(2), []
    p = {name: np.asarray(value, np.float64) for name, value in params.items()}
    for _ in range(num_draws // 10_000):
        w = p["w_auto_loc"] + p["w_auto_scale"] * rng.normal(size=(10_000, K, D))
        b = p["b_auto_loc"] + p["b_auto_scale"] * rng.normal(size=(10_000, K))
        psi = np.einsum("nd,tkd->tnk", np.asarray(x, np.float64), w) + b[:, None]
        total.append(logsumexp(log_softmax(psi, axis=-1), axis=0))
    return logsumexp(total, axis=0) - np.log(num_draws)


def is_gaussian(reading):
    return GaussianUtilities.of(ChunkedUtilities.of(reading._fit, is_drawn=True)) is not None


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("chunk_size", [5, 4096])
def test_log_predictive_is_the_mean_over_draws_of_weights(chunk_size):
    """FALSE_ALARM = 1e-6: rms 0.01, of both sides together."""
    params = params_of()
    found = fitted_on(regression, params, chunk_size=chunk_size).log_predictive(
        Y, rng_key=KEY, num_draws=512
    )
    expected = expected_log_probs(params, X)[np.arange(N), Y]
    np.testing.assert_allclose(found, expected, atol=0.05)
    centre = log_softmax(X @ params["w_auto_loc"].T + params["b_auto_loc"], axis=1)
    centre = centre[np.arange(N), Y]
    assert np.abs(centre - expected).max() > 0.2  # so that the centre would not do


@pytest.mark.slow
def test_few_draws_of_many_classes_are_close():
    """FALSE_ALARM = 1e-6: the error of 8 draws is 0.02, root mean square."""
    num_categories, k = 3000, 17

    def model(x, y=None):
        regression(x, y, num_categories)

    guide = normals_of(classes=(num_categories, {"w": (D,), "b": ()}))
    new = fitted_on(model, params_of(num_categories, 0.3), guide, np.tile(X, (8, 1)))
    y = np.full(8 * N, k)
    few = new.log_predictive(y, rng_key=KEY, num_draws=8)
    many = new.log_predictive(y, rng_key=jax.random.key(4), num_draws=2000)
    assert np.sqrt(((few - many) ** 2).mean()) < 0.06


def intercepts(x, y=None, *, num_categories):
    with lc.class_plate("classes", num_categories, y, num_sampled=2) as classes:
        b = numpyro.sample("b", dist.Normal(0, 1))
    with lc.data_plate("data", len(x)) as rows:
        utilities = jnp.zeros((len(x), 1)) + b
        lc.sample_choice("y", utilities, classes=classes, rows=rows, obs=y)


def many_classes(spread):
    """A reading of 2,000 classes, and the means and standard deviations of their utilities."""
    num_categories = 2000
    rng = np.random.default_rng(1)
    loc, scale = rng.normal(size=num_categories), spread * rng.gamma(4, 0.25, num_categories)
    params = {"b_auto_loc": np.float32(loc), "b_auto_scale": np.float32(scale)}

    model = functools.partial(intercepts, num_categories=num_categories)
    guide = normals_of(classes=(num_categories, {"b": ()}))
    return functools.partial(fitted_on, model, guide=guide, chunk_size=300), params, loc, scale


def log_mean_prob(loc, scale, k, num_draws=4_000):
    """Of class k, by draws of all others and 199 quantiles of its own utility for each."""
    psi = loc + scale * np.random.default_rng(2).normal(size=(num_draws, len(loc)))
    others = logsumexp(np.delete(psi, k, axis=1), axis=1)[:, None]
    own = loc[k] + scale[k] * ndtri((np.arange(199) + 0.5) / 199)
    return np.log(expit(own - others).mean())


@pytest.mark.some_cases(1)
@pytest.mark.parametrize(("spread", "num_draws", "atol"), [(0.3, 4, 0.004), (2.0, 512, 0.3)])
def test_the_rest_of_many_classes_is_at_its_mean_where_it_hardly_varies(spread, num_draws, atol):
    """FALSE_ALARM = 1e-6: rms 0.002, of four draws of all classes 0.005; and 0.05.

    With 2 a few of all classes are most of each sum, whose mean would be off by tens of nats.
    """
    fitted, params, loc, scale = many_classes(spread)
    y = np.argsort(-loc)[:N]
    found = fitted(params).log_predictive(y, rng_key=KEY, num_draws=num_draws)
    expected = [log_mean_prob(loc, scale, k) for k in y]
    np.testing.assert_allclose(found, expected, rtol=0, atol=atol)


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("spread", [0.3, 3.0])
def test_it_is_the_same_under_jit(spread):
    fitted, params, *_ = many_classes(spread)
    y, draws = np.arange(N), {"rng_key": KEY, "num_draws": 4}

    def predict(params):
        return fitted(params).log_predictive(y, **draws), fitted(params).top_classes(3, **draws)

    for one, other in zip(
        jax.tree.leaves(predict(params)), jax.tree.leaves(jax.jit(predict)(params)), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-5)


@pytest.mark.slow
def test_top_classes_are_those_of_the_highest_predictive():
    params = params_of()
    draws = {"rng_key": KEY, "num_draws": 512}
    new = fitted_on(regression, params, chunk_size=5)
    top = new.top_classes(3, **draws)
    expected = np.sort(expected_log_probs(params, X), axis=-1)[:, ::-1][:, :3]
    np.testing.assert_allclose(top.log_probs, expected, atol=0.05)
    own = new.log_predictive(top.classes[:, 1], **draws)
    np.testing.assert_allclose(own, top.log_probs[:, 1], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_classes_that_are_far_more_uncertain_are_among_the_top():
    """Their mean exponential is 67 times that at their mean, and 2.4 times that of the others."""

    def model(x, y=None):
        with lc.class_plate("classes", 1000, y) as classes:
            b = numpyro.sample("b", dist.Normal(0, 1))
        with lc.data_plate("data", len(x)) as rows:
            lc.sample_choice("y", b, classes=classes, rows=rows, obs=y)

    loc, scale = np.zeros(1000), np.full(1000, 0.1)
    loc[:5], scale[:5] = -3, 2.9
    guide = normals_of(classes=(1000, {"b": ()}))
    new = fitted_on(model, {"b_auto_loc": loc, "b_auto_scale": scale}, guide)
    top = new.top_classes(5, rng_key=KEY, num_draws=64)
    np.testing.assert_array_equal(np.sort(top.classes[0]), np.arange(5))


@pytest.mark.slow
def test_excluded_classes_are_not_named():
    new, draws = fitted_on(regression, params_of()), {"rng_key": KEY, "num_draws": 4}
    best = new.top_classes(2, **draws)
    other = new.top_classes(1, exclude=best.classes[:, :1], **draws)
    np.testing.assert_array_equal(other.classes[:, 0], best.classes[:, 1])
    few = new.top_classes(3, among=jnp.tile(jnp.array([4, -1]), (N, 1)), **draws)
    np.testing.assert_array_equal(few.classes, [[4, -1, -1]] * N)


@pytest.mark.slow
def test_the_order_of_chunks_does_not_matter():
    found = [
        fitted_on(regression, params_of(), chunk_size=size).log_predictive(
            Y, rng_key=KEY, num_draws=4
        )
        for size in (1, 5, 12)
    ]
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5)
    np.testing.assert_allclose(found[2], found[0], rtol=1e-5)


def test_choices_that_nothing_observes_are_not_drawn_outside():
    """So draws are of utilities alone, stratified and in one pass, whatever the arguments."""
    new = fitted_on(regression, params_of())
    seen = lc.Fitted(regression, BY_HAND, params_of()).on(X, Y)
    np.testing.assert_array_equal(new.log_predictive(Y, **FEW), seen.log_predictive(Y, **FEW))
    top, expected = (on.top_classes(3, **FEW) for on in (new, seen))
    np.testing.assert_array_equal(top.log_probs, expected.log_probs)


@pytest.mark.slow
def test_what_is_drawn_outside_is_averaged_too():
    """FALSE_ALARM = 1e-6: rms 0.02."""
    params = {k: v for k, v in params_of().items() if k[0] == "w"}
    params |= {"tau_auto_loc": jnp.array(0.2), "tau_auto_scale": jnp.array(0.5)}
    guide = AutoNormal(hierarchical)
    start(guide)
    new, draws = fitted_on(hierarchical, params, guide), {"rng_key": KEY, "num_draws": 2000}
    assert is_gaussian(new)
    by_weights = new.log_likelihood(Y, **draws)
    expected = logsumexp(by_weights, axis=0) - np.log(2000)
    np.testing.assert_allclose(new.log_predictive(Y, **draws), expected, atol=0.1)


FEW = {"rng_key": KEY, "num_draws": 4}


@functools.cache
def log_predictive_of_drawn_weights():
    return fitted_on(regression, params_of()).log_predictive(Y, **FEW)


def test_declared_variances_are_integrated():
    def model(x, y=None):
        with lc.class_plate("classes", K, y, num_sampled=2) as classes:
            w = lc.gaussian_weights("w", classes, (D,))
            b = lc.gaussian_weights("b", classes)
        means, variances = x @ w.loc.T + b.loc, x**2 @ w.variance.T + b.variance
        with lc.data_plate("data", len(x)) as rows:
            lc.sample_choice("y", means, variances=variances, classes=classes, rows=rows, obs=y)

    def no_guide(*args):
        pass

    declared = lc.Fitted(model, no_guide, params_of()).on(X).log_predictive(Y, **FEW)
    np.testing.assert_allclose(declared, log_predictive_of_drawn_weights(), rtol=1e-4)


@pytest.mark.slow
def test_declared_variances_are_drawn_where_utilities_are_not_gaussian():
    """FALSE_ALARM = 1e-6: rms 0.02, of 4,000 draws; the mean alone is off by 0.5."""

    def model(x, y=None):
        with lc.class_plate("classes", K, y, num_sampled=2) as classes:
            b = lc.gaussian_weights("b", classes)
            w = numpyro.sample("w", dist.HalfNormal(1).expand([D]).to_event(1))
        means = x @ w.T + b.loc
        variances = jnp.broadcast_to(b.variance, means.shape)
        with lc.data_plate("data", len(x)) as rows:
            lc.sample_choice("y", means, variances=variances, classes=classes, rows=rows, obs=y)

    params = params_of() | {"b_auto_scale": np.full(K, 2.0, np.float32)}
    params["w_auto_scale"] = np.full((K, D), 0.3, np.float32)
    params["w_auto_loc"] /= 2
    guide = AutoNormal(model)
    start(guide)
    on = lc.Fitted(model, guide, params, chunk_size=5).on(X)
    assert not is_gaussian(on)
    draws = {"rng_key": KEY, "num_draws": 4000}
    found, top = on.log_predictive(Y, **draws), on.top_classes(3, **draws)
    rng = np.random.default_rng(2)
    w = np.exp(params["w_auto_loc"] + 0.3 * rng.normal(size=(40_000, K, D)))
    psi = np.einsum("nd,tkd->tnk", X, w)
    psi += (params["b_auto_loc"] + 2 * rng.normal(size=(40_000, K)))[:, None]
    expected = logsumexp(log_softmax(psi, axis=-1), axis=0) - np.log(40_000)
    np.testing.assert_allclose(found, expected[np.arange(N), Y], atol=0.1)
    best = np.sort(expected, axis=-1)[:, :-4:-1]
    np.testing.assert_allclose(top.log_probs, best, atol=0.1)


def exact(x, y=None):
    regression(x, y, num_sampled=None)


def _followed(model):
    del model

    def guide(x, y=None):
        with numpyro.plate("classes", K):
            w = numpyro.sample("w", dist.Normal(0, 1).expand([D]).to_event(1))
            numpyro.sample("b", dist.Normal(w.sum(-1), 1))

    return guide


def _following(model):
    return lc.AutoRowNormal(model, follow=["tau"])


STRUCTURES = {
    "mean field": (regression, AutoNormal, True),
    "a site outside": (hierarchical, AutoNormal, True),
    "correlated rows": (regression, lc.AutoRowNormal, True),
    "rows that follow a site": (hierarchical, _following, True),
    "all rows together": (exact, AutoMultivariateNormal, False),
    "points": (regression, AutoDelta, False),
    "one site follows another": (regression, _followed, False),
}


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("name", STRUCTURES)
def test_guides_that_make_utilities_gaussian(name):
    model, kind, expected = STRUCTURES[name]
    guide = kind(model)
    new = fitted_on(model, start(guide), guide)
    assert is_gaussian(new) is expected
    assert new.log_predictive(Y, rng_key=KEY, num_draws=2).shape == (N,)


def random_params(guide, x=X):
    """Random ones, so that values of a row are far from independent."""
    rng, params = np.random.default_rng(4), {}
    for name, param in start(guide, x).items():
        value = rng.normal(size=np.shape(param))
        value = 0.15 * np.exp(value / 2) if name.endswith("scale") else value
        params[name] = value.astype(np.float32)
    return params


CORRELATED = {
    "two sites": (regression, {}),
    "a site that rows follow": (hierarchical, {"follow": ["tau"]}),
    "low rank": (lambda x, y=None: regression(x, y, width=9), {"rank": 1}),
}


@functools.cache
def correlated(name):
    """A model, its parameters and guide, and data."""
    model, options = CORRELATED[name]
    x = np.random.default_rng(5).normal(size=(N, 9)) / 3 if name == "low rank" else X
    guide = lc.AutoRowNormal(model, **options)
    return model, random_params(guide, x), guide, x


@pytest.mark.slow
@pytest.mark.parametrize("name", CORRELATED)
def test_correlated_rows_are_averaged_as_their_draws_are(name):
    """FALSE_ALARM = 1e-6: rms 0.03."""
    new, draws = fitted_on(*correlated(name)), {"rng_key": KEY, "num_draws": 2000}
    assert is_gaussian(new)
    by_weights = new.log_likelihood(Y, **draws)
    expected = logsumexp(by_weights, axis=0) - np.log(2000)
    np.testing.assert_allclose(new.log_predictive(Y, **draws), expected, atol=0.15)
    top = new.top_classes(K, **draws)
    np.testing.assert_allclose(np.exp(top.log_probs).sum(axis=-1), 1, rtol=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("chunk_size", [5, 4096])
def test_variances_of_utilities_are_those_of_the_covariances(x64, chunk_size):
    guide = lc.AutoRowNormal(regression)
    params = random_params(guide)
    utilities = ChunkedUtilities.of(
        fitted_on(regression, params, guide, chunk_size=chunk_size)._fit, is_drawn=True
    )
    gaussian = GaussianUtilities.of(utilities)
    slopes = gaussian.slopes(None)

    def add(part, found, chunk):
        moments, ids = gaussian.of_chunk(part, chunk, None, slopes)
        return found.at[:, ids].set(moments.variance, mode="drop")

    found = utilities.visit(add, jnp.zeros((N, K)), jnp.maximum)
    features = np.concatenate([X, np.ones((N, 1))], axis=1)
    covariances = guide.covariances(params)["classes"]
    expected = np.einsum("np,kpq,nq->nk", features, covariances, features)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.fixture(scope="module")
def of_two_sites():
    """A fit in single precision: a fixture of a module is made before that of a test."""
    return correlated("two sites")


@pytest.mark.slow
def test_single_precision_stays_so_beside_double(of_two_sites, x64):
    found = fitted_on(*of_two_sites).log_predictive(Y, **FEW)
    assert found.dtype == jnp.float32 and np.isfinite(found).all()


def test_variances_keep_their_digits_where_values_are_nearly_dependent():
    """A slope of years, and an offset that makes up for it."""
    factors = jnp.array([[[3.0, 0.0], [-6000.0, 0.05]]])  # of a slope and an offset
    slopes = [jnp.array([[2000.0], [2000.5], [1999.0]]), jnp.ones((3, 1))]
    np.testing.assert_allclose(variances(slopes, factors)[:, 0], [0.0025, 2.2525, 9.0025])


MODELS = {
    "of both sites": (lambda x, w, b, classes: x @ w.T * b, False),
    "bent": (lambda x, w, b, classes: jnp.tanh(x @ w.T) + b, False),
    "features of classes": (lambda x, w, b, classes: (x @ w.T) * classes.indices + b, False),
    "a step": (lambda x, w, b, classes: x @ w.T + jnp.sign(b), False),
    "rounded": (lambda x, w, b, classes: x @ w.T + jnp.round(3 * b), False),
    "gradients stopped": (lambda x, w, b, classes: jax.lax.stop_gradient(x @ w.T) + b, False),
    "offsets of classes": (lambda x, w, b, classes: x @ w.T + b + 0.1 * classes.indices, True),
    "bent features": (lambda x, w, b, classes: jnp.tanh(x) @ w.T - 2 * b, True),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_whose_utilities_are_affine_in_own_rows(name):
    utilities, expected = MODELS[name]

    def model(x, y=None):
        regression(x, y, utilities=utilities)

    assert is_gaussian(fitted_on(model, params_of())) is expected


def test_under_jit_a_step_of_a_value_is_nan():
    """Which way to average is chosen before values are known."""

    def model(x, y=None):
        regression(x, y, utilities=lambda x, w, b, classes: x @ w.T + jnp.sign(b))

    @jax.jit
    def predict(params):
        return fitted_on(model, params).log_predictive(Y, **FEW)

    assert np.isnan(predict(params_of())).all()


@pytest.mark.slow
def test_a_point_among_drawn_sites_has_no_variance():
    guide = AutoGuideList(regression)
    guide.append(AutoNormal(numpyro.handlers.block(regression, hide=["b"])))
    guide.append(AutoDelta(numpyro.handlers.block(regression, hide=["w"])))
    start(guide)
    draws, params = {"rng_key": KEY, "num_draws": 8}, params_of()
    found = fitted_on(regression, params, guide).log_predictive(Y, **draws)
    sharp = params | {"b_auto_scale": np.full(K, 1e-6, np.float32)}
    np.testing.assert_allclose(
        found, fitted_on(regression, sharp).log_predictive(Y, **draws), rtol=1e-4
    )


def test_under_jit_labels_that_are_no_class_have_nan():
    @jax.jit
    def predict(params, x, y):
        return fitted_on(regression, params, x=x).log_predictive(y, **FEW)

    found = predict(params_of(), X, np.array([0, K, -1, 3, 4]))
    np.testing.assert_array_equal(np.isnan(found), [False, True, True, False, False])
    found = predict(params_of(), X, Y)
    np.testing.assert_allclose(found, log_predictive_of_drawn_weights(), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AutoNormal, lc.AutoRowNormal])
def test_memory_does_not_grow_with_the_classes(kind):
    def scratch(num_categories):
        def model(x, y=None):
            regression(x, y, num_categories)

        guide = kind(model)

        def predict(params, x):
            new = lc.Fitted(model, guide, params, chunk_size=1000).on(x)
            return new.log_predictive(Y, rng_key=KEY, num_draws=4)

        return temp_bytes(predict, random_params(guide), X)

    assert scratch(64_000) < scratch(8_000) + 64_000  # bytes; one (N, K) array takes 1,280,000


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("chunk_size", [5, 64, 100])
def test_gradients_are_those_of_the_means_and_scales(chunk_size, x64):
    """All classes are drawn, so nothing jumps: beside differences, in all directions at once.

    In both modes.
    """
    num_categories = 100
    guide = normals_of(classes=(num_categories, {"w": (D,), "b": ()}))
    model = functools.partial(regression, num_categories=num_categories)
    params = jax.tree.map(jnp.asarray, params_of(num_categories))
    y = np.array([0, 3, 63, 64, 99])  # the last of a chunk, and of all

    def total(params):
        new = lc.Fitted(model, guide, params, chunk_size=chunk_size).on(X)
        return new.log_predictive(y, rng_key=KEY, num_draws=4).sum()

    params = jax.tree.map(lambda x: jnp.asarray(x, float), params)
    grads, direction = jax.jit(jax.grad(total))(params), jax.tree.map(jnp.cos, params)
    slope = sum(jax.tree.leaves(jax.tree.map(jnp.vdot, grads, direction)))
    _, forward = jax.jit(lambda params: jax.jvp(total, (params,), (direction,)))(params)
    np.testing.assert_allclose(forward, slope, rtol=1e-6)

    def along(step):
        return total(jax.tree.map(lambda p, d: p + step * d, params, direction))

    low, high = jax.lax.map(along, jnp.array([-1e-5, 1e-5]))
    np.testing.assert_allclose(slope, (high - low) / 2e-5, rtol=1e-4)


def test_gradients_are_finite_where_a_chunk_adds_nothing():
    """The last chunk has one class, which is named; and the first is 300 nats below the others."""
    num_categories = 1001
    guide = normals_of(classes=(num_categories, {"b": ()}))
    loc = np.where(np.arange(num_categories) < 100, -300.0, 0.0)

    model = functools.partial(intercepts, num_categories=num_categories)

    def total(params):
        new = lc.Fitted(model, guide, params, chunk_size=100).on(X)
        y = np.full(N, num_categories - 1)
        return new.log_predictive(y, rng_key=KEY, num_draws=4).sum()

    scale = jnp.full(num_categories, 0.3)
    found = jax.grad(total)({"b_auto_loc": jnp.asarray(loc, jnp.float32), "b_auto_scale": scale})
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(found))
    np.testing.assert_allclose(found["b_auto_loc"].sum(), 0, atol=1e-4)  # a common shift is nothing
