# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import itertools
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import lax
from numpyro import handlers
from numpyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoDelta, AutoNormal
from numpyro.infer.util import log_density
from scipy.stats import chisquare, norm

import numpyro_largecat as lc
from numpyro_largecat.proposals import DrawnClasses
from tests import reference
from tests.memory import temp_bytes

FALSE_ALARM = 1e-5  # how often a correct program fails a random check


def draw_classes(rng_key, num_categories, labels=None, num_sampled=None):
    with handlers.seed(rng_seed=rng_key):
        return lc.class_plate("classes", num_categories, labels, num_sampled).classes


@partial(jax.jit, static_argnums=(1, 3))
def draw_for_keys(keys, num_categories, labels, num_sampled):
    return jax.vmap(lambda key: draw_classes(key, num_categories, labels, num_sampled))(keys)


def draw_often(repeats, num_categories, labels, num_sampled):
    """Draw ``repeats`` subsets, under ``jit`` and ``vmap``, with traced labels."""
    keys = jax.random.split(jax.random.key(0), repeats)
    classes = draw_for_keys(keys, num_categories, labels, num_sampled)
    return np.asarray(classes.indices), np.asarray(classes.weights)


# K, labels, S
CORNERS = {
    "all labels equal": (20, [3, 3, 3, 3, 3], 4),
    "all labels distinct": (20, [5, 1, 9, 19, 0], 4),
    "some labels repeated": (20, [7, 2, 7, 2, 0], 4),
    "all others drawn": (8, [1, 6], 6),
    "fewer others than draws": (8, [1, 6], 7),
    "as many rows as classes": (7, [4, 0, 4], 4),
    "more rows than classes": (4, [0, 3, 3, 0, 0], 2),
    "every class is a label": (3, [0, 1, 2], 2),
    "two classes": (2, [1, 0], 1),
    "no labels": (12, None, 5),
    "ten million classes": (10**7, [0, 10**7 - 1, 5], 6),
}
corners = pytest.mark.parametrize(
    ("num_categories", "labels", "num_sampled"), CORNERS.values(), ids=CORNERS
)


@corners
def test_rows_and_weights(num_categories, labels, num_sampled):
    """Labels first with weight 1, padding with weight 0, then distinct others that stand for all.

    Holds for each of 40 subsets, so the sum of the weights is K in each of them.
    """
    given = None if labels is None else jnp.array(labels)
    indices, weights = draw_often(40, num_categories, given, num_sampled)
    present = sorted(set(labels or []))
    num_labels = min(len(labels or []), num_categories)
    num_others = num_categories - len(present)
    num_drawn = min(num_sampled, num_others)
    assert indices.shape == weights.shape == (40, num_labels + num_sampled)
    assert indices.dtype == np.int32
    assert weights.dtype == np.float32
    assert indices.min() >= 0
    assert indices.max() < num_categories
    live = [1.0] * len(present) + [0.0] * (num_labels - len(present))
    live += [num_others / max(num_drawn, 1)] * num_drawn + [0.0] * (num_sampled - num_drawn)
    np.testing.assert_allclose(weights, np.broadcast_to(live, weights.shape), rtol=1e-6)
    np.testing.assert_allclose(weights.sum(axis=1), num_categories, rtol=1e-6)
    for row in indices:
        assert row[: len(present)].tolist() == present
        drawn = row[num_labels : num_labels + num_drawn].tolist()
        assert len(set(drawn)) == num_drawn
        assert not set(drawn) & set(present)


def test_subset_says_what_it_is():
    classes = draw_classes(0, 20, np.array([[7, 2], [7, 9]]), 3)
    assert classes.kind == "sample"
    assert classes.num_categories == 20
    assert classes.labels.tolist() == [2, 7, 9, 20]
    assert classes.indices[:4].tolist() == [2, 7, 9, 19]  # padding repeats the last class
    assert draw_classes(0, 20, None, 3).labels.shape == (0,)


@pytest.mark.parametrize("labels", [None, np.array([3, 3])])
def test_without_num_sampled_all_classes_are_there_in_order(labels):
    classes = lc.class_plate("classes", 5, labels).classes
    assert classes.kind == "full"
    assert classes.indices.tolist() == [0, 1, 2, 3, 4]
    assert classes.weights.tolist() == [1.0] * 5
    assert classes.labels is None


@pytest.mark.parametrize(
    ("dtype", "num_categories"),
    [(np.uint8, 256), (np.int8, 300), (np.uint16, 2**16), (np.int64, 300)],
)
def test_labels_of_any_integer_type(dtype, num_categories):
    """Also of one that cannot hold K, the value that pads the labels."""
    classes = draw_classes(1, num_categories, np.array([100, 7, 7], dtype), 4)
    assert classes.labels.tolist() == [7, 100, num_categories]
    assert classes.weights.tolist() == [1.0, 1.0, 0.0] + [(num_categories - 2) / 4] * 4
    assert num_categories > classes.indices.max() >= 0


def test_float64(x64):
    classes = draw_classes(0, 10, np.array([1, 1]), 7)
    assert classes.weights.dtype == jnp.float64
    np.testing.assert_allclose(classes.weights[2:], 9 / 7, rtol=1e-15)


UNBIASED = {
    "rejection": (60, [5, 1, 5], 3),
    "permutation": (9, [5, 1, 5], 4),
    "without labels": (60, None, 3),
}


def values_of_classes(num_categories):
    return np.random.default_rng(0).normal(size=num_categories) * 3 + 1


@pytest.mark.parametrize(
    ("num_categories", "labels", "num_sampled"), UNBIASED.values(), ids=UNBIASED
)
def test_weighted_sums_are_unbiased(num_categories, labels, num_sampled):
    """The mean of 20_000 weighted sums is the sum over all classes, within its standard error.

    The standard error is the exact one of sampling without replacement.
    """
    repeats = 20_000
    given = None if labels is None else np.array(labels)
    indices, weights = draw_often(repeats, num_categories, given, num_sampled)
    f = values_of_classes(num_categories)
    others = f[reference.others_of(labels or [], num_categories)]
    n = len(others)
    variance = n**2 / num_sampled * (1 - num_sampled / n) * others.var(ddof=1)
    tolerance = norm.isf(FALSE_ALARM / 2) * math.sqrt(variance / repeats)
    estimates = (weights * f[indices]).sum(axis=1)
    assert abs(estimates.mean() - f.sum()) < tolerance
    assert tolerance < abs(f.sum()) / 10
    np.testing.assert_allclose(estimates.var(), variance, rtol=0.1)


@pytest.mark.parametrize(
    ("num_categories", "labels", "num_sampled"),
    [(7, [1, 1, 4], 2), (6, [0, 5], 3), (5, [2, 2], 4), (6, [], 2)],
)
def test_weighted_sums_are_unbiased_exactly(num_categories, labels, num_sampled):
    """Every subset of the other classes is forced in turn; the mean of their sums is the sum."""
    f = values_of_classes(num_categories)
    given = np.array(labels, np.int32) if labels else None
    subsets = itertools.combinations(reference.others_of(labels, num_categories), num_sampled)

    weight = (num_categories - len(set(labels))) / num_sampled

    @jax.vmap
    def weigh(others):
        def make():
            return lc.class_plate("classes", num_categories, given, num_sampled).classes

        drawn = DrawnClasses(others, jnp.full(num_sampled, weight))
        return handlers.substitute(make, data={"classes_rows": drawn})()

    classes = jax.jit(weigh)(jnp.array(list(subsets), jnp.int32))
    estimates = (classes.weights * f[np.asarray(classes.indices)]).sum(axis=1)
    np.testing.assert_allclose(estimates.mean(), f.sum(), rtol=1e-5)
    by_reference = reference.mean_over_subsets(
        lambda indices, weights: weights @ f[indices], labels, num_categories, num_sampled
    )
    np.testing.assert_allclose(by_reference, f.sum(), rtol=1e-12)


def test_every_subset_of_the_others_is_equally_likely():
    labels, num_categories, num_sampled = [1, 1, 4], 8, 3
    indices, _ = draw_often(20_000, num_categories, np.array(labels), num_sampled)
    others = reference.others_of(labels, num_categories)
    counts = {subset: 0 for subset in itertools.combinations(others, num_sampled)}
    for drawn in np.sort(indices[:, 3:], axis=1).tolist():
        counts[tuple(drawn)] += 1
    assert chisquare(list(counts.values())).pvalue > FALSE_ALARM


def test_traced_labels_and_scan():
    """Labels may be traced, and each step of a scan draws a subset of its own."""

    @jax.jit
    def steps(labels):
        def step(key, labels):
            key, draw_key = jax.random.split(key)
            classes = draw_classes(draw_key, 1000, labels, 5)
            return key, (classes.indices, classes.weights)

        return lax.scan(step, jax.random.key(0), labels)[1]

    indices, weights = steps(jnp.array([[3, 3], [3, 3], [8, 5]]))
    assert indices[:, :2].tolist() == [[3, 999], [3, 999], [5, 8]]
    np.testing.assert_allclose(weights[:, 0], 1)
    np.testing.assert_allclose(weights[:, 1], [0, 0, 1])
    np.testing.assert_allclose(weights[:, 2], [999 / 5, 999 / 5, 998 / 5], rtol=1e-6)
    assert set(indices[0, 2:].tolist()) != set(indices[1, 2:].tolist())


def test_bad_labels_under_jit_are_no_classes():
    """They cannot be refused there, so they are left out, and the weights still sum to K."""
    classes = jax.jit(lambda y: draw_classes(0, 10, y, 3))(jnp.array([-1, 4, 10]))
    assert classes.labels.tolist() == [4, 10, 10]
    np.testing.assert_allclose(classes.weights, [1, 0, 0, 3, 3, 3])


def test_scratch_memory_does_not_grow_with_the_classes():
    labels, key = jnp.arange(50), jax.random.key(0)

    def memory(num_categories):
        return temp_bytes(lambda key: draw_classes(key, num_categories, labels, 100), key)

    assert memory(10**7) <= memory(10**4) < 20_000  # fewer draws repeat among more classes


ERRORS = {
    "label too large": (
        dict(num_categories=10, labels=np.array([3, 10, 11]), num_sampled=2),
        ValueError,
        r"`labels` of plate 'classes' must be classes, integers in \[0, 10\); got 10 at "
        r"position 1, and 2 of 3 are out of range",
    ),
    "negative label": (
        dict(num_categories=10, labels=np.array([[3, 2], [-1, 4]]), num_sampled=2),
        ValueError,
        r"`labels` of plate 'classes'.*got -1 at position \(1, 0\), and 1 of 4",
    ),
    "bad label of a full plate": (
        dict(num_categories=10, labels=np.array([3, 10])),
        ValueError,
        "`labels` of plate 'classes'.*got 10 at position 1",
    ),
    "labels are floats": (
        dict(num_categories=10, labels=np.array([3.0]), num_sampled=2),
        TypeError,
        r"`labels` must be integers; got dtype float\d+\..*astype\(int\)",
    ),
    "labels are truth values": (
        dict(num_categories=10, labels=np.array([True]), num_sampled=2),
        TypeError,
        "`labels` must be integers; got dtype bool",
    ),
    "one class": (
        dict(num_categories=1),
        ValueError,
        "`num_categories` must be at least 2; got 1",
    ),
    "classes are a float": (
        dict(num_categories=10.0),
        TypeError,
        r"`num_categories` must be a Python int; got 10\.0 of type float",
    ),
    "classes are an array": (
        dict(num_categories=jnp.array(10)),
        TypeError,
        "`num_categories` must be a Python int, since it fixes array shapes",
    ),
    "classes are True": (
        dict(num_categories=True),
        TypeError,
        "`num_categories` must be a Python int.*got True of type bool",
    ),
    "no draws": (
        dict(num_categories=10, num_sampled=0),
        ValueError,
        "`num_sampled` must be at least 1; got 0",
    ),
    "draws are a float": (
        dict(num_categories=10, num_sampled=2.5),
        TypeError,
        r"`num_sampled` must be a Python int; got 2\.5 of type float",
    ),
    "more draws than classes without labels": (
        dict(num_categories=10, num_sampled=11),
        ValueError,
        "`num_sampled` must be at most 10 with num_categories=10; got 11. Leave it out",
    ),
    "as many draws as classes with labels": (
        dict(num_categories=10, labels=np.array([3]), num_sampled=10),
        ValueError,
        "`num_sampled` must be at most 9 with num_categories=10, since the labels are there",
    ),
}


@pytest.mark.parametrize(("kwargs", "error", "message"), ERRORS.values(), ids=ERRORS)
def test_bad_arguments_are_refused(kwargs, error, message):
    with handlers.seed(rng_seed=0), pytest.raises(error, match=message):
        lc.class_plate("classes", **kwargs)


def test_traced_counts_are_refused():
    with pytest.raises(TypeError, match="`num_sampled` must be a Python int, since it fixes"):
        jax.jit(lambda s: draw_classes(0, 10, None, s).weights)(3)


def test_drawing_without_a_key_is_refused():
    with pytest.raises(ValueError, match="plate 'classes' draws classes and needs a random key"):
        lc.class_plate("classes", 10, num_sampled=2)


def test_numpy_integers_are_counts():
    classes = draw_classes(0, np.int64(10), np.array([1]), np.int32(3))
    assert classes.num_categories == 10
    np.testing.assert_allclose(classes.weights, [1, 3, 3, 3])


# As a NumPyro plate.

LABELS = np.array([4, 2, 4])


def traced(model, *args, rng_seed=0, params=None):
    model = handlers.substitute(handlers.seed(model, rng_seed), data=params or {})
    return handlers.trace(model).get_trace(*args)


@pytest.mark.smoke
def test_sites_have_one_row_for_each_class_scaled_by_its_weight():
    def model():
        with lc.class_plate("classes", 10, LABELS, 3) as classes:
            numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
            numpyro.deterministic("weights", classes.weights)

    sites = traced(model)
    assert sites["w"]["value"].shape == (6, 2)
    np.testing.assert_array_equal(sites["w"]["scale"], sites["weights"]["value"])
    np.testing.assert_allclose(sites["w"]["scale"], [1, 1, 0, 8 / 3, 8 / 3, 8 / 3], rtol=1e-6)
    log_p, _ = log_density(handlers.seed(model, 0), (), {}, {"w": sites["w"]["value"]})
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
        traced(model)["w"]["scale"], np.array([1, 1, 0, 8 / 3, 8 / 3, 8 / 3]) / 2, rtol=1e-6
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
        return a, b, c

    a, b, c = handlers.seed(model, 0)()
    sites = traced(model)
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

    indices, value, row, shared = handlers.seed(model, 0)()
    assert value.shape == (num_categories,)  # without event_dim NumPyro slices nothing
    np.testing.assert_array_equal(row, np.outer(indices, np.ones(2)))
    assert shared.shape == (1, 2)


def test_a_parameter_with_a_wrong_number_of_rows_is_refused():
    def model():
        with lc.class_plate("classes", 10, LABELS, 3):
            numpyro.param("table", jnp.zeros(7), event_dim=0)

    message = r"param site 'table' inside plate 'classes' must have 10 rows at axis -1.*\(7,\)"
    with pytest.raises(ValueError, match=message):
        handlers.seed(model, 0)()


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


@pytest.fixture(scope="module")
def normal_guide():
    """AutoNormal of the classifier, with its plates, ready for use."""
    guide = AutoNormal(classifier, create_plates=open_classes)
    handlers.seed(guide, 0)(X, Y)
    return guide


@pytest.mark.parametrize("loss", [Trace_ELBO(), TraceMeanField_ELBO()])
def test_svi_with_create_plates_moves_only_the_rows_drawn(loss, normal_guide):
    svi = SVI(classifier, normal_guide, optax.sgd(0.1), loss)
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


def test_model_uses_the_rows_of_a_guide_with_create_plates(normal_guide):
    in_guide = handlers.trace(handlers.seed(normal_guide, 1)).get_trace(X, Y)
    model = handlers.replay(handlers.seed(classifier, 2), in_guide)
    in_model = handlers.trace(model).get_trace(X, Y)
    rows = in_guide["classes"]["value"]
    np.testing.assert_array_equal(in_model["classes"]["value"], rows)
    np.testing.assert_array_equal(in_model["classes_seen"]["value"], rows)
    np.testing.assert_allclose(in_model["w"]["scale"], in_guide["w"]["scale"])
    alone = handlers.trace(handlers.seed(classifier, 2)).get_trace(X, Y)
    assert alone["classes_seen"]["value"].tolist() != rows.tolist()


def mean_loss(loss, model, guide, params, repeats):
    keys = jax.random.split(jax.random.key(7), repeats)
    losses = jax.jit(jax.vmap(lambda key: loss.loss(key, params, model, guide, X, Y)))(keys)
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


def test_the_subsampled_kl_is_unbiased(normal_guide):
    """The mean of the weighted KL terms is the KL of all rows, within its standard error."""

    def model(x, y):
        with open_classes(x, y):
            numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))

    rng = np.random.default_rng(1)
    loc, scale = rng.normal(size=(NUM_CATEGORIES, 2)), rng.uniform(0.2, 2, (NUM_CATEGORIES, 2))
    params = {"w_auto_loc": jnp.array(loc), "w_auto_scale": jnp.array(scale)}
    mean, error = mean_loss(TraceMeanField_ELBO(), model, normal_guide, params, 20_000)
    expected = ((scale**2 + loc**2 - 1) / 2 - np.log(scale)).sum()
    assert abs(mean - expected) < norm.isf(FALSE_ALARM / 2) * error
    assert error < expected / 100


@pytest.mark.parametrize("num_categories", [NUM_CATEGORIES, len(Y) + NUM_SAMPLED])
def test_a_guide_with_rows_of_its_own_is_refused(num_categories):
    """NumPyro's SVI and AutoNormal alone; also where there are as many rows as classes."""
    svi = SVI(classifier, AutoNormal(classifier), optax.sgd(0.1), Trace_ELBO())
    message = "plate 'classes': the guide opened a plate of that name with rows of its own"
    labels = np.array([4, 2, 4, 1])
    with pytest.raises(ValueError, match=message):
        state = svi.init(jax.random.key(0), X, labels, num_categories=num_categories)
        svi.update(state, X, labels, num_categories=num_categories)


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


# Chunks of classes.


def test_a_chunk_holds_consecutive_classes():
    def make(start, size):
        with lc.class_chunk(name="classes", start=start, size=size):
            return lc.class_plate("classes", 10, LABELS, 3).classes

    classes = make(3, 4)
    assert classes.kind == "chunk"
    assert classes.indices.tolist() == [3, 4, 5, 6]
    assert classes.weights.tolist() == [1.0] * 4
    last = make(8, 4)
    assert last.indices.tolist() == [8, 9, 9, 9]
    assert last.weights.tolist() == [1.0, 1.0, 0.0, 0.0]
    assert make(0, 10).indices.tolist() == list(range(10))


def test_a_chunk_is_of_one_plate_alone():
    def model():
        return lc.class_plate("a", 10).classes.kind, lc.class_plate("b", 10).classes.kind

    assert lc.class_chunk(model, name="a", start=0, size=2)() == ("chunk", "full")


@pytest.mark.parametrize("num_sampled", [None, 3])
@pytest.mark.parametrize("size", [4, 13])
def test_chunks_add_up_to_all_classes(num_sampled, size):
    """A scan over chunks, with a traced start, gives the log density of all rows."""
    table = jnp.array(np.random.default_rng(0).normal(size=10), jnp.float32)

    def model(loc):
        with lc.class_plate("classes", 10, LABELS, num_sampled) as classes:
            w = numpyro.param("w", table, event_dim=0)
            numpyro.sample("t", dist.Normal(loc, 1), obs=w)
        numpyro.deterministic("sum", classes.weights @ classes.indices)

    @jax.jit
    def total(loc):
        def add(sums, start):
            chunk = lc.class_chunk(handlers.seed(model, 0), name="classes", start=start, size=size)
            log_p, sites = log_density(chunk, (loc,), {}, {})
            return (sums[0] + log_p, sums[1] + sites["sum"]["value"]), None

        return lax.scan(add, (0.0, 0.0), jnp.arange(0, 10, size))[0]

    log_p, sum_of_indices = total(0.5)
    np.testing.assert_allclose(log_p, norm.logpdf(table, 0.5).sum(), rtol=1e-5)
    assert sum_of_indices == 45


def test_a_chunk_of_a_guide_reads_its_rows():
    def guide():
        with lc.class_plate("classes", 30, LABELS, 3):
            loc = numpyro.param("loc", jnp.arange(30.0), event_dim=0)
            return numpyro.sample("w", dist.Delta(loc))

    chunk = lc.class_chunk(guide, name="classes", start=27, size=4)
    assert handlers.seed(chunk, 0)().tolist() == [27, 28, 29, 29]


@pytest.mark.parametrize(
    ("size", "error"), [(0, ValueError), (2.0, TypeError), (jnp.array(2), TypeError)]
)
def test_a_chunk_needs_a_size(size, error):
    with pytest.raises(error, match="`size` must be"):
        lc.class_chunk(name="classes", start=0, size=size)


# Rows of the data.


def data_model(rows=None, size=12, dim=None):
    plate = lc.data_plate("data", size, rows, dim=dim)
    with plate as rows:
        numpyro.sample("z", dist.Normal(0, 1))
        table = numpyro.param("table", 10.0 * jnp.arange(size), event_dim=0)
    return rows, table


def test_data_plate_scales_by_its_share_and_slices_parameters():
    rows, table = handlers.seed(data_model, 0)(np.array([7, 3, 7]))
    assert rows.indices.tolist() == [7, 3, 7]
    assert (rows.name, rows.size, rows.dim) == ("data", 12, -1)
    assert table.tolist() == [70, 30, 70]
    site = traced(data_model, np.array([7, 3, 7]))["z"]
    assert site["value"].shape == (3,)
    assert site["scale"] == 4


def test_a_full_data_plate_has_all_rows_in_order():
    rows, table = handlers.seed(data_model, 0)()
    assert rows.indices.tolist() == list(range(12))
    assert table.tolist() == [10.0 * n for n in range(12)]
    assert traced(data_model)["z"]["scale"] in (None, 1)


def test_a_permutation_of_all_rows_is_respected():
    rows = np.random.default_rng(0).permutation(12)
    _, table = handlers.seed(data_model, 0)(rows)
    assert table.tolist() == (10.0 * rows).tolist()
    assert traced(data_model, rows)["z"]["scale"] in (None, 1)


def test_data_plate_in_another_dimension():
    def model():
        with lc.data_plate("data", 12, np.array([7, 3]), dim=-2) as rows:
            with numpyro.plate("inner", 3):
                numpyro.sample("z", dist.Normal(0, 1))
                table = numpyro.param("table", jnp.arange(36.0).reshape(12, 3), event_dim=0)
        return rows.dim, table

    dim, table = handlers.seed(model, 0)()
    assert dim == -2
    assert table.tolist() == [[21, 22, 23], [9, 10, 11]]
    assert traced(model)["z"]["value"].shape == (2, 3)
    assert traced(model)["z"]["scale"] == 6


def test_data_plate_under_jit():
    rows = jax.jit(lambda rows: handlers.seed(data_model, 0)(rows)[1])(jnp.array([5, 1]))
    assert rows.tolist() == [50, 10]


BAD_ROWS = {
    "floats": (np.array([1.0]), TypeError, "`rows` must be integers; got dtype float"),
    "two axes": (
        np.array([[1]]),
        ValueError,
        r"`rows` of plate 'data' must have shape \(B,\).*got shape \(1, 1\)",
    ),
    "no axis": (np.array(1), ValueError, r"must have shape \(B,\).*got shape \(\)"),
    "too large": (
        np.array([1, 12]),
        ValueError,
        r"`rows` of plate 'data' must be row ids, integers in \[0, 12\); got 12 at position 1",
    ),
    "negative": (np.array([-3]), ValueError, "`rows` of plate 'data'.*got -3 at position 0"),
}


@pytest.mark.parametrize(("rows", "error", "message"), BAD_ROWS.values(), ids=BAD_ROWS)
def test_bad_rows_are_refused(rows, error, message):
    with pytest.raises(error, match=message):
        handlers.seed(data_model, 0)(rows)


@pytest.mark.parametrize(("size", "error"), [(0, ValueError), (3.0, TypeError)])
def test_data_plate_needs_a_size(size, error):
    with pytest.raises(error, match="`size` must be"):
        lc.data_plate("data", size)


def local_model(rows):
    with lc.data_plate("data", 12, rows) as rows:
        z = numpyro.sample("z", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal(z, 1), obs=rows.indices.astype(float))


def test_a_guide_with_data_rows_of_its_own_is_refused():
    svi = SVI(local_model, AutoNormal(local_model), optax.sgd(0.1), Trace_ELBO())
    with pytest.raises(ValueError, match=r"plate 'data': the guide opened.*rows of its own"):
        svi.init(jax.random.key(0), np.array([7, 3]))


def test_local_variables_of_the_rows_are_moved_with_create_plates():
    """z = 0 at the start, so its gradient is N / B times the observation, the row's id."""

    def open_rows(rows):
        return lc.data_plate("data", 12, rows)

    guide = AutoDelta(
        local_model,
        create_plates=open_rows,
        init_loc_fn=numpyro.infer.init_to_value(values={"z": jnp.zeros(2)}),
    )
    svi = SVI(local_model, guide, optax.sgd(1.0), Trace_ELBO())
    state = svi.init(jax.random.key(0), np.array([7, 3]))
    state, _ = svi.update(state, np.array([7, 3]))
    z = svi.get_params(state)["z_auto_loc"]
    np.testing.assert_allclose(z, 6 * np.array([0, 0, 0, 3, 0, 0, 0, 7, 0, 0, 0, 0]), atol=1e-5)
