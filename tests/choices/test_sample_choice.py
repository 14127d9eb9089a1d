# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import optax
import pytest
from numpyro import handlers
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.util import log_density

import numpyro_largecat as lc
from tests import reference

# With labels 1 and 4 of 6 classes and 5 draws the subset holds all classes, with weight 1: the
# bound is then that of all classes, and nothing is random.
NUM_CATEGORIES, NUM_SAMPLED, NUM_ROWS = 6, 5, 12
TABLE = np.random.default_rng(0).normal(size=NUM_CATEGORIES).astype(np.float32)
X = np.array([1.0, -0.5, 2.0], np.float32)
Y = np.array([4, 1, 4])
ROWS = np.array([7, 3, 10])
START = math.log(NUM_CATEGORIES)  # of u


def model(x, y=None, rows=None, num_sampled=NUM_SAMPLED):
    """Utilities x_n w_k."""
    with lc.class_plate("classes", NUM_CATEGORIES, y, num_sampled) as classes:
        w = numpyro.param("w", jnp.array(TABLE), event_dim=0)
    with lc.data_plate("data", NUM_ROWS, rows) as rows:
        return lc.sample_choice("y", x[:, None] * w, classes=classes, rows=rows, obs=y)


def no_guide(*args, **kwargs):
    del args, kwargs


def bounds(u, table=TABLE):
    u = np.broadcast_to(u, X.shape)
    rows = zip(X, Y, u, strict=True)
    return np.array([reference.softmax_bound(x * table, y, u_n) for x, y, u_n in rows])


def trace_of(model, *args, params=None, **kwargs):
    model = handlers.substitute(handlers.seed(model, 0), data=params or {})
    return handlers.trace(model).get_trace(*args, **kwargs)


def run(model, *args, **kwargs):
    """What is known of each site but plates, of a run of the model in one program."""
    known = {}

    @jax.jit
    def values():
        found = {}
        for name, site in trace_of(model, *args, **kwargs).items():
            if site["type"] != "plate":
                known[name] = {what: site.get(what) for what in ("type", "is_observed")}
                known[name]["update_rule"] = site["kwargs"].get("update_rule")
                found[name] = {what: site.get(what) for what in ("value", "scale")}
                if site["type"] == "sample":
                    found[name]["fn"] = site["fn"]
        return found

    return {name: known[name] | of_site for name, of_site in values().items()}


@jax.jit
def log_probs(fn, value):
    return fn.log_prob(value)


@pytest.mark.smoke
def test_u_is_a_parameter_with_one_entry_for_each_row_of_the_data():
    """It starts at log K, is sliced to the minibatch, and gives the bound scaled by N / B."""
    u = np.linspace(0.5, 3, NUM_ROWS).astype(np.float32)
    sites = run(model, X, Y, ROWS, params={"y_u": u})
    assert sites["y_u"]["type"] == "param"
    np.testing.assert_array_equal(sites["y"]["fn"].u, u[ROWS])
    assert sites["y"]["is_observed"]
    assert sites["y"]["scale"] == NUM_ROWS / 3
    np.testing.assert_allclose(log_probs(sites["y"]["fn"], Y), bounds(u[ROWS]), rtol=1e-5)

    @jax.jit
    def density(u):
        return log_density(handlers.seed(model, 0), (X, Y, ROWS), {}, {"y_u": u})[0]

    np.testing.assert_allclose(density(u), 4 * bounds(u[ROWS]).sum(), rtol=1e-5)
    start = run(model, X, Y, ROWS)["y_u"]["value"]
    np.testing.assert_allclose(start, np.full(NUM_ROWS, START), rtol=1e-6)


def test_the_update_rule_gets_log_eta_hat_without_a_gradient():
    rule = lc.update_rules.NaturalGradient(0.6)

    def total_statistic(table):
        def model():
            with lc.class_plate("classes", NUM_CATEGORIES, Y, NUM_SAMPLED) as classes:
                w = table[classes.indices]
            with lc.data_plate("data", NUM_ROWS, ROWS) as rows:
                utilities = X[:, None] * w
                lc.sample_choice(
                    "y", utilities, classes=classes, rows=rows, update_rule=rule, obs=Y
                )

        kwargs = trace_of(model)["y_u"]["kwargs"]
        assert kwargs["update_rule"] is rule
        assert kwargs["event_dim"] == 0
        log_eta_hat = kwargs["statistic"](jnp.zeros(3), jnp.zeros(3)).log_eta_hat
        return log_eta_hat.sum(), log_eta_hat

    gradient, statistic = jax.jit(jax.grad(total_statistic, has_aux=True))(TABLE)
    expected = [math.log(reference.eta_star(x * TABLE, y)) for x, y in zip(X, Y, strict=True)]
    np.testing.assert_allclose(statistic, expected, rtol=1e-5)
    np.testing.assert_array_equal(gradient, 0)


def test_the_default_rule_is_the_natural_gradient():
    rule = run(model, X, Y, ROWS)["y_u"]["update_rule"]
    assert isinstance(rule, lc.update_rules.NaturalGradient)
    assert rule.exponent == 0.9


def test_numpyro_svi_moves_u_of_the_minibatch_only():
    """Plain SVI treats u as any parameter: a step of SGD adds rate * N / B * d bound / du."""
    svi = SVI(model, no_guide, optax.sgd(0.1), Trace_ELBO())
    state = svi.init(jax.random.key(0), X, Y, ROWS)
    assert svi.get_params(state)["y_u"].shape == (NUM_ROWS,)
    state, loss = jax.jit(svi.update)(state, X, Y, ROWS)
    np.testing.assert_allclose(loss, -4 * bounds(START).sum(), rtol=1e-5)
    expected = np.full(NUM_ROWS, START)
    eta_star = np.array([reference.eta_star(x * TABLE, y) for x, y in zip(X, Y, strict=True)])
    expected[ROWS] += 0.1 * 4 * (np.exp(-START) * eta_star - 1)
    params = svi.get_params(state)
    np.testing.assert_allclose(params["y_u"], expected, rtol=1e-5)
    in_table = np.empty(NUM_CATEGORIES)
    for k in range(NUM_CATEGORIES):
        step = 1e-5 * (np.arange(NUM_CATEGORIES) == k)
        table = TABLE.astype(float)
        in_table[k] = (bounds(START, table + step) - bounds(START, table - step)).sum() / 2e-5
    np.testing.assert_allclose(params["w"], TABLE + 0.1 * 4 * in_table, rtol=1e-3, atol=1e-5)


def test_minibatch_of_all_rows_in_another_order():
    """u is read under the rows' ids also where the plate scales nothing."""
    order = np.random.default_rng(0).permutation(NUM_ROWS)
    u = np.arange(NUM_ROWS, dtype=np.float32)
    labels = np.tile(Y, 4)
    sites = run(model, np.tile(X, 4), labels, order, params={"y_u": u})
    np.testing.assert_array_equal(sites["y"]["fn"].u, u[order])
    assert sites["y"]["scale"] in (None, 1)


@pytest.mark.parametrize("obs", [Y, None])
def test_all_classes_are_exact_and_keep_nothing(obs):
    """A full plate, or no class plate: the exact log probability, or draws; rows are not needed."""

    def full_model(classes):
        with lc.data_plate("data", NUM_ROWS, ROWS):
            return lc.sample_choice("y", X[:, None] * TABLE, classes=classes, obs=obs)

    for classes in (None, lc.class_plate("classes", NUM_CATEGORIES).classes):
        sites = run(full_model, classes)
        assert "y_u" not in sites
        assert sites["y"]["value"].shape == (3,)
        assert sites["y"]["is_observed"] == (obs is not None)
        expected = reference.softmax_log_probs(X[:, None] * TABLE, Y)
        np.testing.assert_allclose(log_probs(sites["y"]["fn"], Y), expected, rtol=1e-5)


def test_the_same_model_serves_for_training_and_exact_use():
    sites = run(model, X, Y, ROWS, num_sampled=None)
    assert "y_u" not in sites
    expected = reference.softmax_log_probs(X[:, None] * TABLE, Y)
    np.testing.assert_allclose(log_probs(sites["y"]["fn"], Y), expected, rtol=1e-5)
    drawn = run(model, X, None, ROWS, num_sampled=None)["y"]["value"]
    assert drawn.shape == (3,)
    assert ((drawn >= 0) & (drawn < NUM_CATEGORIES)).all()


def test_a_chunk_of_classes_declares_the_site_without_local_state():
    chunk = lc.plates.class_chunk(model, name="classes", start=2, size=3)
    sites = run(chunk, X, Y, ROWS)
    assert "y_u" not in sites
    np.testing.assert_allclose(sites["y"]["fn"].utilities, X[:, None] * TABLE[2:5], rtol=1e-6)


@pytest.mark.parametrize("dim", [-1, -2])
def test_nested_plates(dim):
    """Two choices for each row: u is (2, N) or (N, 2), sliced along the data plate's dim."""
    labels = np.array([[4, 1, 4], [1, 1, 4]])
    labels = labels if dim == -1 else labels.T
    utilities = np.random.default_rng(1).normal(size=(*labels.shape, NUM_CATEGORIES))
    whole = (2, NUM_ROWS) if dim == -1 else (NUM_ROWS, 2)
    u = np.random.default_rng(2).uniform(1, 3, whole).astype(np.float32)

    def nested_model():
        with lc.class_plate("classes", NUM_CATEGORIES, labels, NUM_SAMPLED) as classes:
            psi = jnp.take(jnp.array(utilities, jnp.float32), classes.indices, axis=-1)
        with lc.data_plate("data", NUM_ROWS, ROWS, dim=dim) as rows:
            with numpyro.plate("choices", 2, dim=-3 - dim):
                lc.sample_choice("y", psi, classes=classes, rows=rows, obs=labels)

    assert jax.eval_shape(lambda: trace_of(nested_model)["y_u"]["value"]).shape == whole
    sites = run(nested_model, params={"y_u": u})
    taken = np.take(u, ROWS, axis=dim)
    np.testing.assert_array_equal(sites["y"]["fn"].u, taken)
    expected = np.empty(labels.shape)
    for i in np.ndindex(labels.shape):
        expected[i] = reference.softmax_bound(utilities[i], labels[i], taken[i])
    np.testing.assert_allclose(log_probs(sites["y"]["fn"], labels), expected, rtol=1e-5)

    @jax.jit
    def density(u):
        return log_density(handlers.seed(nested_model, 0), (), {}, {"y_u": u})[0]

    np.testing.assert_allclose(density(u), 4 * expected.sum(), rtol=1e-5)


def test_u_has_the_precision_of_the_utilities(x64):
    def model():
        with lc.class_plate("classes", NUM_CATEGORIES, Y, NUM_SAMPLED) as classes:
            utilities = jnp.array(X, jnp.float64)[:, None] * jnp.array(TABLE)[classes.indices]
        with lc.data_plate("data", NUM_ROWS, ROWS) as rows:
            lc.sample_choice("y", utilities, classes=classes, rows=rows, obs=Y)

    sites = run(model)
    assert sites["y_u"]["value"].dtype == jnp.float64
    np.testing.assert_allclose(log_probs(sites["y"]["fn"], Y), bounds(START), rtol=1e-12)


def subset_and_utilities(labels=Y):
    with lc.class_plate("classes", NUM_CATEGORIES, labels, NUM_SAMPLED) as classes:
        return classes, X[:, None] * jnp.array(TABLE)[classes.indices]


def without_rows():
    classes, utilities = subset_and_utilities()
    lc.sample_choice("y", utilities, classes=classes, obs=Y)


def outside_the_plate():
    classes, utilities = subset_and_utilities()
    with lc.data_plate("data", NUM_ROWS, ROWS) as rows:
        pass
    lc.sample_choice("y", utilities, classes=classes, rows=rows, obs=Y)


def fewer_rows_than_observations():
    classes, utilities = subset_and_utilities()
    with lc.data_plate("data", NUM_ROWS, ROWS[:2]) as rows:
        lc.sample_choice("y", utilities, classes=classes, rows=rows, obs=Y)


def another_number_of_observations():
    classes, utilities = subset_and_utilities()
    with lc.data_plate("data", NUM_ROWS, ROWS) as rows:
        lc.sample_choice("y", utilities, classes=classes, rows=rows, obs=Y[:2])


def observations_on_the_wrong_axis():
    classes, utilities = subset_and_utilities()
    with lc.data_plate("data", NUM_ROWS, ROWS, dim=-2) as rows:
        lc.sample_choice("y", utilities, classes=classes, rows=rows, obs=Y)


def utilities_of_all_classes():
    classes, _ = subset_and_utilities()
    with lc.data_plate("data", NUM_ROWS, ROWS) as rows:
        lc.sample_choice("y", X[:, None] * TABLE, classes=classes, rows=rows, obs=Y)


def observed_floats():
    classes, utilities = subset_and_utilities()
    with lc.data_plate("data", NUM_ROWS, ROWS) as rows:
        lc.sample_choice("y", utilities, classes=classes, rows=rows, obs=Y.astype(np.float32))


def observed_floats_of_all_classes():
    lc.sample_choice("y", X[:, None] * TABLE, obs=Y.astype(np.float32))


def nothing_observed():
    classes, utilities = subset_and_utilities()
    with lc.data_plate("data", NUM_ROWS, ROWS) as rows:
        lc.sample_choice("y", utilities, classes=classes, rows=rows)


def observations_with_more_axes():
    classes, utilities = subset_and_utilities()
    with lc.data_plate("data", NUM_ROWS, ROWS) as rows:
        lc.sample_choice("y", utilities, classes=classes, rows=rows, obs=np.tile(Y, (3, 1)))


def observations_with_more_axes_of_all_classes():
    lc.sample_choice("y", X[:, None] * TABLE, obs=np.tile(Y, (3, 1)))


def row_ids_as_rows():
    classes, utilities = subset_and_utilities()
    with lc.data_plate("data", NUM_ROWS, ROWS):
        lc.sample_choice("y", utilities, classes=classes, rows=jnp.array(ROWS), obs=Y)


def utilities_of_no_subset_to_predict():
    with lc.class_plate("classes", NUM_CATEGORIES, num_sampled=NUM_SAMPLED) as classes:
        lc.sample_choice("y", X[:, None] * TABLE, classes=classes)


def a_plate_as_classes():
    plate = lc.class_plate("classes", NUM_CATEGORIES, Y, NUM_SAMPLED)
    lc.sample_choice("y", X[:, None] * plate.classes.indices, classes=plate, obs=Y)


def a_plate_as_classes_of_a_distribution():
    plate = lc.class_plate("classes", NUM_CATEGORIES, Y, NUM_SAMPLED)
    lc.UtilityCategorical(X[:, None] * plate.classes.indices, plate)


def with_rule(rule, noise):
    def model():
        classes, utilities = subset_and_utilities()
        with lc.data_plate("data", NUM_ROWS, ROWS) as rows:
            how = {"noise": noise, "update_rule": rule}
            lc.sample_choice("y", utilities, classes=classes, rows=rows, obs=Y, **how)

    model.__name__ = f"{type(rule).__name__}_with_{noise}"
    return model


WRONG_RULES = [
    (with_rule(rule, noise), ValueError, f"`update_rule` of site 'y' must move its '{kept}', as")
    for rule, noise, kept in (
        (lc.update_rules.GaussianNaturalGradient(), "gumbel", "u"),
        (lc.update_rules.GaussianNaturalGradient(), "logistic", "u"),
        (lc.update_rules.NaturalGradient(), "normal", "error"),
    )
]


BAD = [
    *WRONG_RULES,
    (without_rows, ValueError, "site 'y' keeps a local variable.*but has no `rows`.*data_plate"),
    (outside_the_plate, ValueError, r"site 'y' must be inside its data plate.*'data'"),
    (
        fewer_rows_than_observations,
        ValueError,
        r"site 'y' must have the 2 rows of plate 'data' at axis -1; got choices of shape \(3,\)",
    ),
    (
        another_number_of_observations,
        ValueError,
        r"site 'y' must have one row of utilities for each observation; got "
        r"obs.shape=\(2,\) and utilities.shape=\(3, 8\)",
    ),
    (observations_on_the_wrong_axis, ValueError, "must have the 3 rows of plate 'data' at axis -2"),
    (utilities_of_all_classes, ValueError, "\\(\\.\\.\\., 8\\), one column for each row"),
    (utilities_of_no_subset_to_predict, ValueError, "no labels.*predict.*`lc.Fitted.*draw_choices"),
    (observations_with_more_axes, ValueError, r"obs.shape=\(3, 3\) and \(3,\) before the classes"),
    (observations_with_more_axes_of_all_classes, ValueError, r"obs.shape=\(3, 3\) and \(3,\) bef"),
    (row_ids_as_rows, TypeError, r"`rows` must be what `with lc.data_plate\(..., rows\) as rows:`"),
    (
        a_plate_as_classes,
        TypeError,
        "`classes` must be what .* as classes:` gives; got a class_plate",
    ),
    (
        a_plate_as_classes_of_a_distribution,
        TypeError,
        "`classes` must be what .*; got a class_plate",
    ),
    (observed_floats, TypeError, "`obs` must be integers; got dtype float32"),
    (observed_floats_of_all_classes, TypeError, "must be integers; got dtype float32"),
    (nothing_observed, ValueError, "needs `obs=` while the class plate holds a subset"),
]


@pytest.mark.parametrize(("model", "error", "message"), BAD, ids=[m.__name__ for m, *_ in BAD])
def test_bad_statements_are_refused(model, error, message):
    with pytest.raises(error, match=message):
        jax.eval_shape(lambda: log_density(handlers.seed(model, 0), (), {}, {})[0])


def test_choices_that_share_utilities_without_an_axis_are_not_refused():
    """Utilities of shape (M,) or (1, M) are the same for all observations, and (B, 1, M) for T."""
    many = np.tile(Y, (3, 1))
    for utilities in (TABLE, TABLE[None], (X[:, None] * TABLE)[:, None]):
        sites = run(lambda utilities: lc.sample_choice("y", utilities, obs=many), utilities)
        assert jax.eval_shape(log_probs, sites["y"]["fn"], many).shape == (3, 3)
