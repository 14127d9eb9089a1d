# SPDX-License-Identifier: Apache-2.0
"""Values outside of the class plate that u follows: the slopes, and what a fit gains by them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro import handlers
from numpyro.infer import TraceMeanField_ELBO

import numpyro_largecat as lc
from numpyro_largecat.choices.own_values import OwnValues
from tests.models import normals_of

# With labels 1 and 4 of 6 classes and 5 draws the subset holds all classes, with weight 1.
K, N = 6, 3
RNG = np.random.default_rng(0)
FEATURES = RNG.normal(size=(K, 2)).astype(np.float32)
Y = np.array([4, 1, 4])
ROWS = np.array([7, 3, 10])
OWN = {"b": RNG.normal(size=N).astype(np.float32), "g": RNG.normal(size=(N, 2)).astype(np.float32)}


def subset(y=Y, num_sampled=5):
    with handlers.seed(rng_seed=0), lc.class_plate("classes", K, y, num_sampled) as classes:
        return classes


def utilities_of(features, indices):
    """Those of values b and g; class 2 is not available to the first observation."""
    is_missing = (jnp.arange(N)[:, None] == 0) & (indices == 2)

    def utilities(values):
        found = jnp.exp(values["b"])[:, None] * (values["g"] @ features.T)
        return jnp.where(is_missing, -jnp.inf, found)

    return utilities


def whole(num_sampled=5, follow=True, rows=ROWS):
    def model():
        with lc.class_plate("classes", K, Y, num_sampled) as classes:
            features = numpyro.param("features", jnp.array(FEATURES), event_dim=1)
        with lc.data_plate("data", 12, rows) as kept:
            utilities, own = utilities_of(features, classes.indices), OWN
            how = {"follow": own} if follow else {}
            utilities = utilities if follow else utilities(own)
            lc.sample_choice("y", utilities, classes=classes, rows=kept, obs=Y, **how)

    return model


def test_slopes_are_the_derivatives_of_the_log_sum_over_other_classes(x64):
    """Of log sum_k exp(psi_k) over k but y, by automatic differentiation, with all classes."""
    own = jax.tree.map(jnp.float64, OWN)

    def log_rest(values):
        psi = utilities_of(FEATURES, jnp.arange(K))(values)
        others = jnp.where(jnp.arange(K) == Y[:, None], -jnp.inf, psi)
        return jax.nn.logsumexp(others, axis=1).sum()

    @jax.jit
    def both(own):
        classes = subset()
        utilities = utilities_of(jnp.asarray(FEATURES)[classes.indices], classes.indices)
        found = OwnValues.of("y", utilities, own, (N,)).estimated_slopes(classes, Y)
        return jax.grad(log_rest)(own), found

    expected, found = both(own)
    np.testing.assert_allclose(found[:, 0], expected["b"], rtol=1e-9)
    np.testing.assert_allclose(found[:, 1:], expected["g"], rtol=1e-9)


def test_slopes_are_zero_where_no_other_class_is_available():
    @jax.jit
    def slopes(own):
        classes = subset()

        def utilities(values):
            found = (values["b"] + values["g"].sum(axis=1))[:, None]
            return jnp.where(classes.indices == Y[:, None], found, -jnp.inf)

        return OwnValues.of("y", utilities, own, (N,)).estimated_slopes(classes, Y)

    np.testing.assert_array_equal(slopes(OWN), np.zeros((N, 3)))


def test_slopes_are_kept_for_each_row_of_the_data():
    """They start at 0, and the likelihood is that of an array."""
    sites = handlers.trace(handlers.seed(whole(), 0)).get_trace()
    np.testing.assert_array_equal(sites["y_slopes"]["value"], np.zeros((12, 3)))
    plain = handlers.trace(handlers.seed(whole(follow=False), 0)).get_trace()
    assert "y_slopes" not in plain
    np.testing.assert_array_equal(sites["y"]["fn"].log_prob(Y), plain["y"]["fn"].log_prob(Y))


def test_with_all_classes_nothing_is_kept():
    sites = handlers.trace(handlers.seed(whole(num_sampled=None), 0)).get_trace()
    plain = handlers.trace(handlers.seed(whole(num_sampled=None, follow=False), 0)).get_trace()
    assert sites.keys() == plain.keys()
    np.testing.assert_array_equal(sites["y"]["fn"].log_prob(Y), plain["y"]["fn"].log_prob(Y))


def with_a_statement(values):
    return numpyro.deterministic("inside", jnp.zeros((N, 8)) + values["b"][:, None])


def of_another(values):
    return jnp.zeros((N, 8)) + values["b"][:, None]


def with_a_key(values):
    del values
    return jax.random.normal(numpyro.prng_key(), (N, 8))


@pytest.mark.parametrize(
    ("utilities", "follow", "noise", "error", "message"),
    [
        (
            lambda b: b,
            None,
            "gumbel",
            TypeError,
            "with `follow` the `utilities` must be a function",
        ),
        (jnp.zeros((N, K)), OWN, "gumbel", TypeError, "got an array and `follow=...`"),
        (
            utilities_of(FEATURES, jnp.arange(K)),
            OWN,
            "normal",
            ValueError,
            "`follow` needs the softmax",
        ),
        (lambda b: jnp.zeros((N, 8)) + b, jnp.ones(()), "gumbel", ValueError, "broadcast_to"),
        (lambda b: jnp.zeros((N, 8)), (), "gumbel", ValueError, "must have an array"),
        (with_a_statement, OWN, "gumbel", TypeError, "got a deterministic statement of 'inside'"),
        (with_a_key, OWN, "gumbel", TypeError, "no statements; got a prng_key statement"),
        (lambda b: of_another(OWN), OWN, "gumbel", ValueError, "does not on 2 of 2"),
        (lambda b: jnp.zeros((N, 8)) + b, jnp.ones((N, 1), int), "gumbel", TypeError, "floats"),
        (lambda b: b @ FEATURES, ["g"], "gumbel", TypeError, r"must have values, .* got names"),
        (lambda b, g: g @ FEATURES.T, OWN, "gumbel", TypeError, "must take one argument, all that"),
    ],
    ids=[
        "no values",
        "no function",
        "normal errors",
        "not of each",
        "empty",
        "statement",
        "key",
        "values around the argument",
        "whole numbers",
        "names",
        "two arguments",
    ],
)
def test_what_cannot_be_followed_is_refused(utilities, follow, noise, error, message):
    def model():
        with lc.class_plate("classes", K, Y, 5) as classes:
            pass
        with lc.data_plate("data", 12, ROWS) as rows:
            how = {"classes": classes, "rows": rows, "noise": noise, "obs": Y}
            lc.sample_choice("y", utilities, follow=follow, **how)

    with pytest.raises(error, match=message):
        handlers.seed(model, 0)()


def test_values_are_joined_in_the_order_of_their_names_and_parted_again():
    values = {"g": jnp.ones((2, 3, 2)), "b": jnp.zeros((2, 3))}
    own = OwnValues.of("y", lambda v: v["g"] + v["b"][..., None], values, (2, 3))
    np.testing.assert_array_equal(own.joined, np.broadcast_to([0, 1, 1], (2, 3, 3)))
    np.testing.assert_array_equal(own.utilities_at(own.joined + 1), np.full((2, 3, 2), 3))


# A posterior of tastes b of all people, and of a person's own g, by features of the classes.
NUM_CLASSES, NUM_PEOPLE, NUM_CHOICES = 40, 10, 400
ALL = RNG.normal(size=(NUM_CLASSES, 2)).astype(np.float32)
PEOPLE = RNG.integers(0, NUM_PEOPLE, NUM_CHOICES)
COUNTS = lc.EntityCounts.of(NUM_PEOPLE, PEOPLE)
TASTES = np.array([0.8, -0.5]) + RNG.normal(0, 0.7, (NUM_PEOPLE, 2))
CHOICES = (TASTES[PEOPLE] @ ALL.T + RNG.gumbel(size=(NUM_CHOICES, NUM_CLASSES))).argmax(axis=1)


OF_MEANS = lc.update_rules.NaturalGradient(excess=0.0)  # whose u is of no single draw


def tastes(people, y=None, rows=None, follow=True):
    b = numpyro.sample("b", dist.Normal(0, 1).expand([2]).to_event(1))
    with lc.entity_plate("people", NUM_PEOPLE, people, COUNTS) as plate:
        g = numpyro.sample("g", dist.Normal(0, 0.7).expand([2]).to_event(1))
    with lc.class_plate("classes", NUM_CLASSES, y, 8) as classes:
        features = jnp.asarray(ALL)[classes.indices]
    own = jnp.broadcast_to(b, (*people.shape, 2)), plate.rows_of(g, people)

    def utilities(own):
        return (own[0] + own[1]) @ features.T

    with lc.data_plate("data", NUM_CHOICES, rows) as rows:
        how = {"classes": classes, "rows": rows, "obs": y, "update_rule": OF_MEANS}
        if follow:
            lc.sample_choice("y", utilities, follow=own, **how)
        else:
            lc.sample_choice("y", utilities(own), **how)


def laplace_sds():
    """Of b and g, given all else, which is what a mean-field posterior has."""

    def log_joint(values):
        b, g = values
        psi = (b + g[PEOPLE]) @ ALL.T
        chosen = jax.nn.log_softmax(psi)[jnp.arange(NUM_CHOICES), CHOICES].sum()
        return chosen - 0.5 * (b**2).sum() - 0.5 * (g**2).sum() / 0.7**2

    @jax.jit
    def derivatives(flat):
        def of(flat):
            return log_joint((flat[:2], flat[2:].reshape(NUM_PEOPLE, 2)))

        return jax.grad(of)(flat), jax.hessian(of)(flat)

    flat = np.zeros(2 + 2 * NUM_PEOPLE, np.float32)
    for _ in range(20):
        gradient, hessian = map(np.asarray, derivatives(flat))
        flat -= np.linalg.solve(hessian, gradient)
    sds = np.sqrt(-1 / np.diag(hessian))
    return sds[:2], sds[2:].reshape(NUM_PEOPLE, 2)


def fitted_sds(follow):
    def model(*args, **kwargs):
        tastes(*args, follow=follow, **kwargs)

    rate = optax.cosine_decay_schedule(0.05, 2500)
    guide = normals_of({"b": (2,)}, people=(NUM_PEOPLE, {"g": (2,)}))
    svi = lc.SubsampledSVI(model, guide, optax.adam(rate), TraceMeanField_ELBO())
    batches = lc.ArrayBatches(PEOPLE, CHOICES, batch_size=100)
    result = svi.run(jax.random.key(0), 2500, batches=batches, progress_bar=False)
    best = lc.Fitted.from_svi(svi, result).on(PEOPLE[:5]).top_classes(3)
    assert best.classes.shape == (5, 3)
    return result.params["b_auto_scale"], result.params["g_auto_scale"]


@pytest.mark.slow
@pytest.mark.parametrize(("follow", "low", "high"), [(True, 0.93, 1.07), (False, 0.5, 0.85)])
def test_a_followed_posterior_is_as_wide_as_that_of_all_classes(follow, low, high):
    """Mean sds over those of a Gaussian at the mode, one factor for each value.

    With the best slopes the bound is exact to second order in the draw; without, its curvature is
    that of the label's own distance, about twice as much.
    """
    for found, expected in zip(fitted_sds(follow), laplace_sds(), strict=True):
        assert low < float((found / expected).mean()) < high


def next_items(before, y=None, rows=None, num_sampled=8, follow=True, rule=OF_MEANS):
    """Choices by the mean of the rows that an observation reads from the table it chooses from."""
    with lc.class_plate("classes", NUM_CLASSES, y, num_sampled, reads=before) as classes:
        w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
    own, items = classes.rows_of(w, before).mean(axis=1), classes.scored(w)
    with lc.data_plate("data", NUM_CHOICES, rows) as rows:
        how = {"classes": classes, "rows": rows, "obs": y, "update_rule": rule}
        if follow:
            lc.sample_choice("y", lambda own: own @ items.T, follow=own, **how)
        else:
            lc.sample_choice("y", own @ items.T, **how)


@pytest.mark.slow
def test_rows_that_are_read_from_the_class_plate_are_followed_too():
    """The bound is 3.5 nats below that of all classes, and 16 without ``follow``.

    By default u is taken from each draw here, and the bound .3 below with and without.
    """
    truth = RNG.normal(0, 1.2, (NUM_CLASSES, 3)).astype(np.float32)
    before = RNG.integers(0, NUM_CLASSES, (NUM_CHOICES, 2))
    utilities = truth[before].mean(axis=1) @ truth.T
    chosen = (utilities + RNG.gumbel(size=utilities.shape)).argmax(axis=1)

    def loss(**how):
        def model(*args, **kwargs):
            next_items(*args, **how, **kwargs)

        guide = numpyro.infer.autoguide.AutoNormal(model, init_scale=0.1)
        rate = optax.cosine_decay_schedule(0.03, 3000)
        svi = lc.SubsampledSVI(model, guide, optax.adam(rate), TraceMeanField_ELBO())
        batches = lc.ArrayBatches(before, chosen, batch_size=100)
        known = {"batches": batches, "init_params": {"w_auto_loc": truth}, "progress_bar": False}
        return float(svi.run(jax.random.key(0), 3000, **known).losses[-500:].mean())

    exact = loss(num_sampled=None)
    unfollowed = loss(follow=False) - exact
    assert loss() - exact < 0.5 * unfollowed
    assert loss(follow=False, rule=None) - exact < 0.1 * unfollowed
