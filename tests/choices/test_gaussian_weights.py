# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
import re
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro import handlers
from numpyro.distributions.kl import kl_divergence
from numpyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO, init_to_feasible
from numpyro.infer.autoguide import AutoNormal
from numpyro.infer.util import log_density
from scipy.optimize import minimize

import numpyro_largecat as lc
from tests import reference

NUM_CATEGORIES, NUM_FEATURES, NUM_ROWS = 6, 2, 12
rng = np.random.default_rng(0)
X = rng.normal(size=(3, NUM_FEATURES)).astype(np.float32)
Y = np.array([4, 1, 4])
ROWS = np.array([7, 3, 10])
TABLES = {
    "w_auto_loc": rng.normal(size=(NUM_CATEGORIES, NUM_FEATURES)).astype(np.float32),
    "w_auto_scale": rng.uniform(0.2, 0.9, (NUM_CATEGORIES, NUM_FEATURES)).astype(np.float32),
    "b_auto_loc": rng.normal(size=NUM_CATEGORIES).astype(np.float32),
    "b_auto_scale": rng.uniform(0.2, 0.9, NUM_CATEGORIES).astype(np.float32),
}
U = np.linspace(0.5, 3, NUM_ROWS).astype(np.float32)
# With labels 1 and 4 of 6 classes and 5 draws the subset holds all classes, with weight 1.
EVERYTHING = NUM_CATEGORIES - 1


def no_guide(*args, **kwargs):
    del args, kwargs


def closed_form(num_sampled, num_categories=NUM_CATEGORIES, num_rows=NUM_ROWS):
    def model(x, y=None, rows=None):
        with lc.class_plate("classes", num_categories, y, num_sampled) as classes:
            w = lc.gaussian_weights("w", classes, (x.shape[1],), prior_scale=2.0)
            b = lc.gaussian_weights("b", classes, prior_loc=0.5)
        means, variances = x @ w.loc.T + b.loc, x**2 @ w.variance.T + b.variance
        with lc.data_plate("data", num_rows, rows) as rows:
            kwargs = dict(variances=variances, classes=classes, rows=rows, obs=y)
            return lc.sample_choice("y", means, **kwargs)

    return model


def trace_of(model, *args, params=None, rng_seed=0, **kwargs):
    model = handlers.substitute(handlers.seed(model, rng_seed), data=params or {})
    return handlers.trace(model).get_trace(*args, **kwargs)


def divergences():
    """Of every class: of its weights and of its intercept."""

    @jax.jit
    def of(tables):
        w = dist.Normal(tables["w_auto_loc"], tables["w_auto_scale"]).to_event(1)
        b = dist.Normal(tables["b_auto_loc"], tables["b_auto_scale"])
        prior = dist.Normal(0, 2).expand([NUM_FEATURES]).to_event(1)
        return kl_divergence(w, prior), kl_divergence(b, dist.Normal(0.5, 1))

    return jax.device_get(of(TABLES))


def moments(x=X, tables=TABLES):
    """Means and variances of the utilities of all classes."""
    means = x @ tables["w_auto_loc"].T + tables["b_auto_loc"]
    variances = x**2 @ tables["w_auto_scale"].T ** 2 + tables["b_auto_scale"] ** 2
    return means, variances


# The weights and their divergence.


@pytest.mark.smoke
def test_parameters_are_those_of_autonormal():
    """By name, shape and constraint, so that its guide of drawn weights can take them."""

    def drawn():
        with lc.class_plate("classes", NUM_CATEGORIES):
            numpyro.sample("w", dist.Normal(0, 2).expand([NUM_FEATURES]).to_event(1))
            numpyro.sample("b", dist.Normal(0.5, 1))

    def describe(model, *args):
        """Shape, constraint and event_dim of each parameter, with nothing computed."""
        found = {}

        def run():
            for name, site in trace_of(model, *args).items():
                if site["type"] == "param":
                    known = (site["kwargs"].get(key) for key in ("constraint", "event_dim"))
                    found[name] = (site["value"].shape, site["value"].dtype, *known)

        jax.eval_shape(run)
        return found

    theirs = describe(AutoNormal(drawn, init_loc_fn=init_to_feasible))
    assert describe(closed_form(None), X, Y, ROWS) == theirs
    assert set(theirs) == set(TABLES)


@pytest.mark.slow
def test_the_divergence_on_a_full_plate_is_that_of_numpyro():
    sites = trace_of(closed_form(None), X, Y, ROWS, params=TABLES)
    for name, expected in zip(("w_kl", "b_kl"), divergences(), strict=True):
        np.testing.assert_allclose(sites[name]["fn"].log_factor, -expected, rtol=1e-5)
        assert sites[name]["scale"] in (None, 1)


def test_the_divergence_on_subsets_is_unbiased():
    """Exactly: the mean over the four draws of one class beside two labels."""

    def weights_alone():
        with lc.class_plate("classes", NUM_CATEGORIES, Y, num_sampled=1) as classes:
            lc.gaussian_weights("w", classes, (NUM_FEATURES,), prior_scale=2.0)
        numpyro.deterministic("drawn", classes.indices[-1])

    @jax.jit
    @jax.vmap
    def log_densities(rng_key):
        sites = trace_of(weights_alone, params=TABLES, rng_seed=rng_key)
        value = sites["w_kl"]["fn"].log_factor * sites["w_kl"]["scale"]
        return sites["drawn"]["value"], value.sum()

    chosen, found = map(np.asarray, log_densities(jax.random.split(jax.random.key(0), 100)))
    by_draw = dict(zip(chosen.tolist(), found.tolist(), strict=True))
    assert set(by_draw) == {0, 2, 3, 5}  # one is missing in 1 of 10**12 sets of keys
    np.testing.assert_allclose(np.mean([*by_draw.values()]), -divergences()[0].sum(), rtol=1e-5)


@pytest.mark.slow
def test_a_latent_scale_of_the_prior():
    """The ELBO is that of drawn weights with an analytic divergence, for the same draw of it."""

    def hierarchical(weights):
        def model():
            scale = numpyro.sample("scale", dist.HalfNormal(1.0))
            with lc.class_plate("classes", NUM_CATEGORIES) as classes:
                weights(classes, scale)

        return model

    def declare(classes, scale):
        lc.gaussian_weights("w", classes, (NUM_FEATURES,), prior_scale=scale)

    def draw(classes, scale):
        numpyro.sample("w", dist.Normal(0, scale).expand([NUM_FEATURES]).to_event(1))

    losses = []
    for weights in (declare, draw):
        model = hierarchical(weights)
        guide = AutoNormal(model)
        svi = SVI(model, guide, optax.sgd(0.1), TraceMeanField_ELBO())
        start = {name: TABLES[name] for name in ("w_auto_loc", "w_auto_scale")}
        start |= {"scale_auto_loc": 0.3, "scale_auto_scale": 0.5}
        state = svi.init(jax.random.key(0), init_params=start)
        losses.append(svi.evaluate(state))
    np.testing.assert_allclose(*losses, rtol=1e-5)


@pytest.mark.slow
def test_plates_around_the_class_plate_and_its_dim():
    """Parameters have an axis for each plate, at its dim, of the size of the whole plate."""

    def model():
        with numpyro.plate("groups", 4, subsample_size=3, dim=-1):
            with lc.class_plate("classes", 50, Y, num_sampled=3, dim=-3) as classes:
                found.extend(
                    lc.gaussian_weights(*args) for args in (("w", classes, (2, 5)), ("b", classes))
                )

    found = []
    sites = trace_of(model)
    assert sites["w_kl"]["fn"].batch_shape == sites["b_kl"]["fn"].batch_shape == (6, 1, 3)
    w, b = found
    assert w.loc.shape == w.variance.shape == (6, 1, 3, 2, 5)
    assert b.loc.shape == (6, 1, 3)
    assert sites["w_auto_loc"]["value"].shape == (50, 1, 4, 2, 5)
    assert sites["b_auto_scale"]["value"].shape == (50, 1, 4)


def test_precision_is_that_of_jax(x64):
    def model():
        with lc.class_plate("classes", 5) as classes:
            return lc.gaussian_weights("w", classes)

    found = jax.eval_shape(handlers.seed(model, 0))
    assert {part.dtype for part in found} == {jnp.dtype(jnp.float64)}


# The choice.


def bound_of(u, row):
    """Bound of observation ``row``, whose u has the slope expm1(-u), in float64."""
    means, variances = (part[row].astype(float) for part in moments())
    label, slope = Y[row], math.expm1(-float(u))
    total = math.exp(slope**2 * variances[label] / 2)
    for k in set(range(NUM_CATEGORIES)) - {label}:
        spread = variances[k] + (1 + slope) ** 2 * variances[label]
        total += math.exp(means[k] - means[label] + spread / 2)
    return 1 - u - math.exp(-u) * total


@pytest.mark.slow
def test_on_a_subset_u_is_kept_and_follows_the_utility_of_the_observed_class():
    sites = trace_of(closed_form(EVERYTHING), X, Y, ROWS, params=TABLES | {"y_u": U})
    expected = [bound_of(u, row) for row, u in enumerate(U[ROWS])]
    np.testing.assert_allclose(sites["y"]["fn"].log_prob(Y), expected, rtol=1e-5)
    np.testing.assert_allclose(sites["y"]["fn"].slope, np.expm1(-U[ROWS]), rtol=1e-6)
    start = trace_of(closed_form(EVERYTHING), X, Y, ROWS)
    for name, expected_start in (("y_u", math.log(6)), ("w_auto_loc", 0), ("b_auto_scale", 0.1)):
        np.testing.assert_allclose(start[name]["value"], expected_start, rtol=1e-6)
    model = handlers.seed(closed_form(EVERYTHING), 0)
    log_p, _ = log_density(model, (X, Y, ROWS), {}, TABLES | {"y_u": U})
    total = NUM_ROWS / 3 * sum(expected) - sum(d.sum() for d in divergences())
    np.testing.assert_allclose(log_p, total, rtol=1e-5)


@pytest.mark.slow
def test_the_statistic_of_u_is_the_best_one_and_has_no_gradient():
    def statistic(tables):
        sites = trace_of(closed_form(EVERYTHING), X, Y, ROWS, params=tables)
        site = sites["y_u"]["kwargs"]
        assert isinstance(site["update_rule"], lc.update_rules.NaturalGradient)
        found = site["statistic"](jnp.array(U[ROWS]), jnp.zeros(3)).log_eta_hat
        return found.sum(), found

    gradient, found = jax.grad(statistic, has_aux=True)(
        {k: jnp.array(v) for k, v in TABLES.items()}
    )
    slope = np.expm1(-U[ROWS])
    expected = lc.bounds.GaussianUtilityBound(*moments(), slope=slope).optimal_u(Y)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert all((leaf == 0).all() for leaf in jax.tree.leaves(gradient))


@pytest.mark.slow
def test_gradients_take_the_slope_as_a_constant():
    """So that the parameter u, moved by other inference, gets the derivative of its bound alone."""

    def log_prob(u):
        sites = trace_of(closed_form(EVERYTHING), X, Y, ROWS, params=TABLES | {"y_u": u})
        return sites["y"]["fn"].log_prob(Y).sum()

    found = jax.grad(log_prob)(jnp.array(U))[ROWS]
    slope = np.expm1(-U[ROWS])
    best = lc.bounds.GaussianUtilityBound(*moments(), slope=slope).optimal_u(Y)
    np.testing.assert_allclose(found, np.exp(best - U[ROWS]) - 1, rtol=1e-4)


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("with_plate", [True, False])
def test_with_all_classes_the_bound_is_at_its_best_and_nothing_is_kept(with_plate):
    """Also at a slope so good that no other is better by a hundredth of a nat."""
    means, variances = moments()

    def model(obs):
        classes = lc.class_plate("classes", NUM_CATEGORIES).classes if with_plate else None
        with lc.data_plate("data", NUM_ROWS, ROWS):
            return lc.sample_choice("y", means, variances=variances, classes=classes, obs=obs)

    @jax.jit
    def run(slopes):
        sites = trace_of(model, Y)
        assert "y_u" not in sites
        others = lc.bounds.GaussianUtilityBound(means, variances, slope=slopes).log_prob(Y)
        return sites["y"]["fn"].log_prob(Y), others, trace_of(model, None)["y"]["value"]

    found, others, choices = map(np.asarray, run(np.linspace(-1, 0, 101)[:, None]))
    best = others.max(axis=0)
    assert (found <= best + 1e-5).all()
    assert (found >= best - 0.01).all()
    assert choices.shape == (3,)
    assert ((choices >= 0) & (choices < NUM_CATEGORIES)).all()


def test_predictions_are_those_of_the_means():
    fitted = lc.Fitted(closed_form(2), no_guide, TABLES | {"y_u": U}, chunk_size=4)
    found = jax.jit(lambda x: fitted.on(x).log_likelihood(Y))(X)
    expected = reference.softmax_log_probs(moments()[0], Y)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


# Fits.

FIT_ROWS, FIT_CATEGORIES = 400, 5


def fit_data():
    x = jax.random.normal(jax.random.key(1), (FIT_ROWS, NUM_FEATURES))
    w = jax.random.normal(jax.random.key(2), (FIT_CATEGORIES, NUM_FEATURES))
    return x, jax.random.categorical(jax.random.key(3), x @ w.T)


@cache
def fit_on_subsets():
    x, y = fit_data()
    model = closed_form(2, FIT_CATEGORIES, FIT_ROWS)
    rate = optax.adam(optax.exponential_decay(0.1, 1000, 0.01))
    svi = lc.SubsampledSVI(model, no_guide, rate, Trace_ELBO())
    batches = lc.ArrayBatches(x, y, batch_size=50)
    return svi.run(jax.random.key(0), 1000, batches=batches, progress_bar=False)


@cache
def fit_on_everything():
    x, y = fit_data()
    model = closed_form(None, FIT_CATEGORIES, FIT_ROWS)
    rate = optax.adam(optax.exponential_decay(0.1, 400, 0.01))
    svi = SVI(model, no_guide, rate, Trace_ELBO())
    return svi.run(jax.random.key(0), 400, x, y, progress_bar=False)


@pytest.mark.slow
def test_a_fit_on_subsets_finds_the_optimum_of_all_data_and_classes():
    """Beside the mean of all classes, which the likelihood says nothing of.

    Both have no noise from draws of the weights; the second has none at all.
    """
    found, full = fit_on_subsets(), fit_on_everything()
    assert np.mean(found.losses[-100:]) < np.mean(found.losses[:10]) - 50
    for name in ("w", "b"):
        scale = full.params[f"{name}_auto_scale"]
        np.testing.assert_allclose(found.params[f"{name}_auto_scale"], scale, rtol=0.05)
        gap = found.params[f"{name}_auto_loc"] - full.params[f"{name}_auto_loc"]
        gap = (gap - gap.mean(axis=0)) / scale
        assert np.sqrt((gap**2).mean()) < 0.3


@pytest.mark.slow
def test_posterior_means_are_close_to_the_mode_of_the_exact_posterior():
    x, y = (np.asarray(part, float) for part in fit_data())
    y = y.astype(int)

    def loss(theta):
        w, b = theta[:-FIT_CATEGORIES].reshape(FIT_CATEGORIES, -1), theta[-FIT_CATEGORIES:]
        log_prob = reference.softmax_log_probs(x @ w.T + b, y).sum()
        probabilities = np.exp(x @ w.T + b)
        probabilities /= probabilities.sum(axis=1, keepdims=True)
        residual = np.eye(FIT_CATEGORIES)[y] - probabilities
        gradient = np.append(residual.T @ x - w / 4, residual.sum(axis=0) - (b - 0.5))
        return -log_prob + (w**2).sum() / 8 + ((b - 0.5) ** 2).sum() / 2, -gradient

    found = minimize(loss, np.zeros(FIT_CATEGORIES * 3), jac=True, method="BFGS").x
    full = fit_on_everything().params
    parts = found[:-FIT_CATEGORIES].reshape(FIT_CATEGORIES, -1), found[-FIT_CATEGORIES:]
    for name, mode in zip(("w", "b"), parts, strict=True):
        gap = full[f"{name}_auto_loc"] - mode
        gap = (gap - gap.mean(axis=0)) / full[f"{name}_auto_scale"]
        assert np.abs(gap).max() < 0.3


@cache
def step_of(num_categories):
    """One donated update, not run yet, with its state."""
    model = closed_form(3, num_categories, 100)
    svi = lc.SubsampledSVI(model, no_guide, optax.adam(0.1), Trace_ELBO())
    state = jax.jit(svi.init)(jax.random.key(0), X, Y, ROWS)
    return svi, state, jax.jit(svi.update, donate_argnums=0).lower(state, X, Y, ROWS).compile()


@pytest.mark.slow
def test_a_step_makes_no_table_and_evaluates_the_classes_once():
    _, _, step = step_of(20_000)
    assert step.memory_analysis().temp_size_in_bytes < 20_000 * 4
    assert not re.findall(r"copy\(f32\[20000", step.as_text())
    # Means, variances and their gradients, and one sum over the classes' exponentials.
    assert step.as_text().count(" dot(") == 5


def test_rows_that_a_step_does_not_touch_do_not_move():
    svi, state, step = step_of(20_000)
    before = {name: np.array(value) for name, value in svi.get_params(state).items()}
    state, loss = step(jax.tree.map(jnp.copy, state), X, Y, ROWS)
    after = {name: np.array(value) for name, value in svi.get_params(state).items()}
    assert np.isfinite(loss)
    for name in TABLES:
        moved = (before[name] != after[name]).reshape(20_000, -1).any(axis=1)
        assert moved[np.unique(Y)].all()
        assert moved.sum() == 2 + 3  # the labels and the drawn classes
    assert np.flatnonzero(before["y_u"] != after["y_u"]).tolist() == sorted(ROWS)


# Bad statements.


def in_plate(classes_of=None, **kwargs):
    def model():
        with lc.class_plate("classes", NUM_CATEGORIES, Y, 2) as classes:
            lc.gaussian_weights("w", classes_of or classes, (2,), **kwargs)

    return model


def outside_all_plates():
    lc.gaussian_weights("w", lc.class_plate("classes", 5).classes)


def after_the_plate():
    with lc.class_plate("classes", 5) as classes:
        pass
    with numpyro.plate("others", 5):
        lc.gaussian_weights("w", classes)


def another_plate():
    in_plate(lc.class_plate("more", 5).classes)()


def no_tuple():
    with lc.class_plate("classes", 5) as classes:
        lc.gaussian_weights("w", classes, 3)


def choose(noise="gumbel", rows=True, variances=1.0, obs=Y):
    def model():
        with lc.class_plate("classes", NUM_CATEGORIES, Y, 2) as classes:
            means = jnp.zeros((3, len(classes.indices)))
        with lc.data_plate("data", NUM_ROWS, ROWS) as data_rows:
            given = dict(noise=noise, rows=data_rows if rows else None, obs=obs)
            spread = variances * jnp.ones_like(means) if np.ndim(variances) == 0 else variances
            lc.sample_choice("y", means, classes=classes, variances=spread, **given)

    return model


def observed_floats_of_all_classes():
    lc.sample_choice("y", jnp.zeros((3, 4)), variances=np.ones((3, 4)), obs=jnp.zeros(3))


def too_few_choices_of_all_classes():
    lc.sample_choice("y", jnp.zeros((3, 4)), variances=np.ones((3, 4)), obs=jnp.zeros(2, int))


BAD = {
    "outside all plates": (outside_all_plates, ValueError, "'w' must be inside the plate of"),
    "after the plate": (after_the_plate, ValueError, r"they are inside plates \['others'\]"),
    "another plate": (another_plate, ValueError, r"inside plates \['classes'\]"),
    "no tuple": (no_tuple, TypeError, "`event_shape` must be a tuple of Python ints.*got 3"),
    "no start": (in_plate(init_scale=0.0), ValueError, "`init_scale` must be positive; got 0.0"),
    "negative scale": (in_plate(prior_scale=-1.0), ValueError, "`prior_scale` must be positive"),
    "prior of all classes": (
        in_plate(prior_scale=np.ones((NUM_CATEGORIES, 2))),
        ValueError,
        r"of weights 'w' must broadcast to shape \(5, 2\).*got shape \(6, 2\)",
    ),
    "prior of more axes": (in_plate(prior_loc=np.ones((3, 1, 2))), ValueError, r"\(3, 1, 2\)"),
    "probit": (choose("normal"), ValueError, "site 'y': `variances` need the softmax.*got noise="),
    "no rows": (choose(rows=False), ValueError, "site 'y' keeps a local variable"),
    "nothing observed": (choose(obs=None), ValueError, "needs `obs=` while the class plate"),
    "other variances": (choose(variances=np.ones((3, 9))), ValueError, "`variances` must have"),
    "floats": (observed_floats_of_all_classes, TypeError, "`obs` must be integers"),
    "too few": (too_few_choices_of_all_classes, ValueError, "site 'y' must have one row of util"),
}


@pytest.mark.parametrize(("model", "error", "message"), BAD.values(), ids=BAD)
def test_bad_statements_are_refused(model, error, message):
    with pytest.raises(error, match=message):
        jax.eval_shape(lambda: handlers.seed(model, 0)() and None)
