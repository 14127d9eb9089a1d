# SPDX-License-Identifier: Apache-2.0
"""Class plates around sites and parameters, and under NumPyro's own SVI."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro import handlers
from numpyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoNormal
from numpyro.infer.util import log_density
from scipy.stats import norm

import numpyro_largecat as lc
from tests import reference

FALSE_ALARM = 1e-5  # how often a correct program fails a random check
LABELS = np.array([4, 2, 4])


def traced(model):
    """The sites of a run of the model in one program: their values and scales."""

    @jax.jit
    def run():
        sites = handlers.trace(handlers.seed(model, 0)).get_trace()
        return {
            name: {what: site.get(what) for what in ("value", "scale")}
            for name, site in sites.items()
            if site["type"] != "plate"
        }

    return jax.device_get(run())


@pytest.mark.smoke
def test_sites_have_one_row_for_each_class_scaled_by_its_weight():
    def model():
        with lc.class_plate("classes", 10, LABELS, 3) as classes:
            numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
            numpyro.deterministic("weights", classes.weights)

    sites = traced(model)
    assert sites["w"]["value"].shape == (6, 2)
    np.testing.assert_array_equal(sites["w"]["scale"], sites["weights"]["value"])
    np.testing.assert_allclose(sites["w"]["scale"], [1, 1, 0, 3, 3, 2], rtol=1e-6)
    log_p = jax.jit(lambda w: log_density(handlers.seed(model, 0), (), {}, {"w": w})[0])(
        sites["w"]["value"]
    )
    log_p_rows = norm.logpdf(sites["w"]["value"]).sum(axis=1)
    np.testing.assert_allclose(log_p, log_p_rows @ sites["w"]["scale"], rtol=1e-5)


def test_a_full_plate_scales_nothing():
    def model():
        with lc.class_plate("classes", 10, LABELS):
            numpyro.sample("w", dist.Normal(0, 1))

    site = traced(model)["w"]
    assert site["value"].shape == (10,)
    assert site["scale"] is None or site["scale"] == 1


@pytest.mark.parametrize("outside", [True, False])
def test_scale_handler_multiplies_the_weights(outside):
    def model():
        with handlers.scale(scale=0.5 if outside else 1.0):
            with lc.class_plate("classes", 10, LABELS, 3):
                with handlers.scale(scale=1.0 if outside else 0.5):
                    numpyro.sample("w", dist.Normal(0, 1))

    np.testing.assert_allclose(
        traced(model)["w"]["scale"], np.array([1, 1, 0, 3, 3, 2]) / 2, rtol=1e-6
    )


@pytest.mark.parametrize(("class_dim", "class_plate_is_outer"), [(-1, True), (-2, False)])
def test_nested_in_a_plate_that_subsamples(class_dim, class_plate_is_outer):
    """Weights go along the class plate's dim and are multiplied by the other plate's 6 / 3."""

    def model():
        classes = lc.class_plate("classes", 10, LABELS, 3, dim=class_dim)
        groups = numpyro.plate("groups", 6, subsample_size=3, dim=-3 - class_dim)
        outer, inner = (classes, groups) if class_plate_is_outer else (groups, classes)
        with outer, inner:
            numpyro.sample("w", dist.Normal(0, 1))
            numpyro.deterministic("weights", classes.classes.weights)

    sites = traced(model)
    weights = np.asarray(sites["weights"]["value"])
    expected = 2 * (weights[:, None] if class_dim == -2 else weights)
    shape = (6, 3) if class_dim == -2 else (3, 6)
    assert sites["w"]["value"].shape == shape
    np.testing.assert_allclose(
        np.broadcast_to(sites["w"]["scale"], shape), np.broadcast_to(expected, shape), rtol=1e-6
    )


def test_several_class_plates_in_one_model():
    """Side by side they draw subsets of their own; nested, their weights multiply."""

    def model():
        with lc.class_plate("a", 1000, LABELS, 3, dim=-2) as a:
            numpyro.sample("w", dist.Normal(0, 1))
            with lc.class_plate("b", 1000, np.array([7]), 4, dim=-1) as b:
                numpyro.sample("v", dist.Normal(0, 1))
        with lc.class_plate("c", 1000, LABELS, 3) as c:
            numpyro.sample("u", dist.Normal(0, 1))
        numpyro.deterministic("classes", (a, b, c))

    sites = traced(model)
    a, b, c = sites["classes"]["value"]
    assert sites["w"]["value"].shape == (6, 1)
    assert sites["v"]["value"].shape == (6, 5)
    assert sites["u"]["value"].shape == (6,)
    np.testing.assert_allclose(sites["w"]["scale"], a.weights[:, None])
    np.testing.assert_allclose(sites["v"]["scale"], np.outer(a.weights, b.weights), rtol=1e-6)
    np.testing.assert_allclose(sites["u"]["scale"], c.weights)
    assert a.indices[:2].tolist() == c.indices[:2].tolist() == [2, 4]
    assert set(a.indices[3:].tolist()) != set(c.indices[3:].tolist())


@pytest.mark.parametrize(
    ("num_categories", "labels", "num_sampled"),
    [(9, [4, 2, 4], 3), (6, [4, 2, 4], 3), (5, [1] * 4, 3)],
)
def test_parameters_are_sliced_by_the_rows(num_categories, labels, num_sampled):
    """Also where the plate has as many rows as classes, in another order, or more."""

    def model():
        with lc.class_plate("classes", num_categories, np.array(labels), num_sampled) as classes:
            value = numpyro.param("table", lambda _: 10.0 * jnp.arange(num_categories))
            row = numpyro.param(
                "rows", jnp.outer(jnp.arange(num_categories), jnp.ones(2)), event_dim=1
            )
            col = numpyro.param("shared", jnp.ones((1, 2)), event_dim=1)
        return classes.indices, value, row, col

    indices, value, row, shared = jax.jit(handlers.seed(model, 0))()
    assert value.shape == (num_categories,)  # without event_dim NumPyro slices nothing
    np.testing.assert_array_equal(row, np.outer(indices, np.ones(2)))
    assert shared.shape == (1, 2)


def test_a_parameter_with_a_wrong_number_of_rows_is_refused():
    def model():
        with lc.class_plate("classes", 10, LABELS, 3):
            numpyro.param("table", jnp.zeros(7), event_dim=0)

    message = r"param site 'table' inside plate 'classes' must have 10 rows at axis -1.*\(7,\)"
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(handlers.seed(model, 0))


# Under NumPyro's own SVI.

NUM_CATEGORIES, NUM_SAMPLED = 30, 5
X = np.random.default_rng(0).normal(size=(4, 2)).astype(np.float32)
Y = np.array([4, 20, 4, 11])


def open_classes(x=X, y=Y, num_categories=NUM_CATEGORIES):
    del x
    return lc.class_plate("classes", num_categories, y, NUM_SAMPLED)


def classifier(x, y=None, num_categories=NUM_CATEGORIES):
    """One weight vector for each class; u is fixed, so the likelihood is linear in the sums."""
    with open_classes(x, y, num_categories) as classes:
        w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
    numpyro.deterministic("classes_seen", classes.indices)
    u = None if classes.kind == "full" else jnp.full(len(x), 3.0)
    with numpyro.plate("data", len(x)):
        numpyro.sample("y", lc.UtilityCategorical(x @ w.T, classes, u=u), obs=y)


def normal_guide():
    """AutoNormal of the classifier, with its plates; it keeps what it has been started with."""
    return AutoNormal(classifier, create_plates=open_classes)


@pytest.mark.parametrize("loss", [Trace_ELBO(), TraceMeanField_ELBO()])
@pytest.mark.slow
def test_svi_with_create_plates_moves_only_the_rows_drawn(loss):
    svi = SVI(classifier, normal_guide(), optax.sgd(0.1), loss)
    state = svi.init(jax.random.key(0), X, Y)
    before = svi.get_params(state)
    state, value = jax.jit(svi.update)(state, X, Y)
    after = svi.get_params(state)
    assert math.isfinite(value)
    for name in ("w_auto_loc", "w_auto_scale"):
        assert after[name].shape == (NUM_CATEGORIES, 2)
        moved = np.flatnonzero((before[name] != after[name]).any(axis=1))
        assert {4, 11, 20} <= set(moved.tolist())
        assert len(moved) == 3 + NUM_SAMPLED


def test_model_uses_the_rows_of_a_guide_with_create_plates():
    @jax.jit
    def run():
        in_guide = handlers.trace(handlers.seed(normal_guide(), 1)).get_trace(X, Y)
        model = handlers.replay(handlers.seed(classifier, 2), in_guide)
        in_model = handlers.trace(model).get_trace(X, Y)
        alone = handlers.trace(handlers.seed(classifier, 2)).get_trace(X, Y)
        rows = [sites["classes"]["value"] for sites in (in_guide, in_model)]
        seen = [sites["classes_seen"]["value"] for sites in (in_model, alone)]
        return rows, seen, [sites["w"]["scale"] for sites in (in_guide, in_model)]

    (rows, in_model), (seen, alone), scales = jax.device_get(run())
    np.testing.assert_array_equal(in_model, rows)
    np.testing.assert_array_equal(seen, rows)
    np.testing.assert_allclose(*scales)
    assert alone.tolist() != rows.tolist()


def mean_loss(loss, model, guide, params, repeats):
    @jax.jit
    def losses_of(key):
        keys = jax.random.split(key, repeats)
        return jax.vmap(lambda key: loss.loss(key, params, model, guide, X, Y))(keys)

    losses = np.asarray(losses_of(jax.random.key(7)))
    return float(losses.mean()), float(losses.std()) / math.sqrt(repeats)


def test_the_subsampled_elbo_is_unbiased():
    """Its mean over 20_000 subsets is the ELBO of all classes, within its standard error."""
    w = np.random.default_rng(1).normal(size=(NUM_CATEGORIES, 2)).astype(np.float32)

    def guide(x, y):
        with open_classes(x, y):
            rows = numpyro.param("loc", jnp.array(w), event_dim=1)
            numpyro.sample("w", dist.Delta(rows, event_dim=1))

    mean, error = mean_loss(Trace_ELBO(), classifier, guide, {}, 20_000)
    bounds = [reference.softmax_bound(w @ x, y, 3.0) for x, y in zip(X, Y, strict=True)]
    expected = -(norm.logpdf(w).sum() + sum(bounds))
    assert abs(mean - expected) < norm.isf(FALSE_ALARM / 2) * error
    assert error < abs(expected) / 500


def test_the_subsampled_kl_is_unbiased():
    """The mean of the weighted KL terms is the KL of all rows, within its standard error."""

    def model(x, y):
        with open_classes(x, y):
            numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))

    rng = np.random.default_rng(1)
    loc, scale = rng.normal(size=(NUM_CATEGORIES, 2)), rng.uniform(0.2, 2, (NUM_CATEGORIES, 2))
    params = {"w_auto_loc": jnp.array(loc), "w_auto_scale": jnp.array(scale)}
    mean, error = mean_loss(TraceMeanField_ELBO(), model, normal_guide(), params, 20_000)
    expected = ((scale**2 + loc**2 - 1) / 2 - np.log(scale)).sum()
    assert abs(mean - expected) < norm.isf(FALSE_ALARM / 2) * error
    assert error < expected / 100


@pytest.mark.parametrize("num_categories", [NUM_CATEGORIES, len(Y) + NUM_SAMPLED])
def test_a_guide_with_rows_of_its_own_is_refused(num_categories):
    """NumPyro's SVI and AutoNormal alone; also where there are as many rows as classes."""
    svi = SVI(classifier, AutoNormal(classifier), optax.sgd(0.1), Trace_ELBO())
    message = "plate 'classes': the guide opened a plate of that name with rows of its own"
    labels = np.array([4, 2, 4, 1])

    def step(key):
        state = svi.init(key, X, labels, num_categories=num_categories)
        return svi.update(state, X, labels, num_categories=num_categories)

    with pytest.raises(ValueError, match=message):
        jax.eval_shape(step, jax.random.key(0))


@pytest.mark.slow
def test_a_full_plate_goes_with_a_plain_plate_in_the_guide():
    """The loss is then that of all classes, exactly."""
    w = np.random.default_rng(1).normal(size=(NUM_CATEGORIES, 2)).astype(np.float32)

    def model(x, y):
        with lc.class_plate("classes", NUM_CATEGORIES, y) as classes:
            w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
        with numpyro.plate("data", len(x)):
            numpyro.sample("y", lc.UtilityCategorical(x @ w.T, classes), obs=y)

    def guide(x, y):
        with numpyro.plate("classes", NUM_CATEGORIES):
            numpyro.sample("w", dist.Delta(w, event_dim=1))

    loss = Trace_ELBO().loss(jax.random.key(0), {}, model, guide, X, Y)
    expected = -(norm.logpdf(w).sum() + reference.softmax_log_probs(X @ w.T, Y).sum())
    np.testing.assert_allclose(loss, expected, rtol=1e-5)


@pytest.mark.parametrize("num_categories", [9, 20])
@pytest.mark.parametrize("handler", [handlers.condition, handlers.do, handlers.substitute])
def test_a_whole_table_in_the_place_of_rows_is_refused(handler, num_categories):
    """Also of nine classes, as many as four labels and five drawn ones: it would go by place."""

    def model():
        with lc.class_plate("classes", num_categories, np.array([4, 2, 4, 1]), 5):
            numpyro.sample("w", dist.Normal(0, 1))

    given = handler(model, data={"w": jnp.arange(1.0 * num_categories)})
    with pytest.raises(ValueError, match=r"gets a value of shape .* from a handler"):
        log_density(handlers.seed(given, 0), (), {}, {})
    with pytest.raises(ValueError, match=r"gets a value of shape .* from a handler"):
        Trace_ELBO().loss(jax.random.key(0), {}, given, model)  # with the rows that a guide drew
