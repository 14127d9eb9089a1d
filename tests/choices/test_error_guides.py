# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.handlers import block
from numpyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoGuideList, AutoNormal

import numpyro_largecat as lc
from numpyro_largecat.choices.error_families import FAMILIES
from numpyro_largecat.choices.error_guides import without_errors
from numpyro_largecat.choices.error_posteriors import POSTERIORS
from tests import reference
from tests.models import NUM_CATEGORIES, NUM_FEATURES, NUM_ROWS, make_data
from tests.slow_cases import slow_case

FALSE_ALARM = 1e-5  # how often a correct program fails the one comparison of a mean
STANDARD_ERRORS = 4.5
ROWS = jnp.array([11, 0, 25])
UTILITIES = np.random.default_rng(0).normal(size=(4, 7)) * 1.5
LABELS = np.array([2, 0, 6, 2])


def given_utilities(noise, utilities=UTILITIES):
    """Choices with known utilities, whose errors are the only latent sites."""

    def model(y):
        with lc.data_plate("data", len(utilities)):
            error = numpyro.sample("y_error", lc.error_distribution(noise))
            choice = lc.AugmentedCategorical(jnp.array(utilities), noise=noise, error=error)
            numpyro.sample("y", choice, obs=y)

    return model


def known_weights(noise, num_sampled=4):
    """Choices in minibatches, on a subset of the classes, with known utilities of the classes."""
    table = jnp.linspace(-1, 1, NUM_CATEGORIES)

    def model(y, rows=None):
        with lc.class_plate("classes", NUM_CATEGORIES, y, num_sampled) as classes:
            pass
        with lc.data_plate("data", NUM_ROWS, rows):
            error = numpyro.sample("y_error", lc.error_distribution(noise))
            choice = lc.AugmentedCategorical(table[classes.indices], classes, noise, error=error)
            numpyro.sample("y", choice, obs=y)

    return model


def fit(svi_class, model, guide, *args, steps, loss=None, optim=None, **kwargs):
    svi = svi_class(model, guide, optim or optax.adam(0.05), loss or TraceMeanField_ELBO())
    return svi.run(jax.random.key(0), steps, *args, progress_bar=False, **kwargs)


def quadrature_elbo(utilities, label, noise, family, loc, scale):
    """E_q[log p(y, error) - log q(error)] on a fine grid."""
    error = np.linspace(-15, 30, 20_001)
    log_q = np.asarray(POSTERIORS[family](loc, scale).log_prob(error))
    joint = reference.choice_log_joint(utilities, label, noise, error)
    q = np.exp(log_q) * (error[1] - error[0])
    return (q * np.where(q > 0, joint - log_q, 0)).sum()


# Local errors.


@pytest.mark.slow
@pytest.mark.smoke
@pytest.mark.parametrize("loss", [Trace_ELBO, TraceMeanField_ELBO])
def test_the_exact_posterior_of_gumbel_errors_gives_the_softmax_without_variance(loss, x64):
    model = given_utilities("gumbel")
    guide = lc.ErrorGuideList(model, None, errors={"y_error": lc.LocalErrors("gumbel")})
    exact = reference.softmax_log_probs(UTILITIES, LABELS)
    params = {"y_error_auto_loc": jnp.array(-exact), "y_error_auto_scale": jnp.ones(4)}
    keys = jax.random.split(jax.random.key(0), 20)
    guide_key = jax.random.key(1)
    with numpyro.handlers.seed(rng_seed=guide_key):
        guide(LABELS)
    losses = jax.jit(jax.vmap(lambda key: loss().loss(key, params, model, guide, LABELS)))(keys)
    np.testing.assert_allclose(-losses, np.full(20, exact.sum()), rtol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("noise", "family"), [("normal", "normal"), ("normal", "gumbel"), ("logistic", "gumbel")]
)
def test_fitted_local_errors_are_just_below_the_exact_log_probability(noise, family, x64):
    model = given_utilities(noise)
    guide = lc.ErrorGuideList(model, None, errors={"y_error": lc.LocalErrors(family)})
    steps = optax.adam(optax.exponential_decay(0.1, 300, 0.3))
    loss = Trace_ELBO(num_particles=30)
    params = fit(SVI, model, guide, LABELS, steps=900, loss=loss, optim=steps).params
    exact = np.array(
        [reference.choice_log_prob(psi, k, noise) for psi, k in zip(UTILITIES, LABELS, strict=True)]
    )
    entries = zip(
        UTILITIES, LABELS, params["y_error_auto_loc"], params["y_error_auto_scale"], strict=True
    )
    elbo = [quadrature_elbo(psi, k, noise, family, loc, scale) for psi, k, loc, scale in entries]
    gaps = exact - np.array(elbo)
    assert (gaps > 0).all()
    assert (gaps < (0.07 if (noise, family) == ("normal", "gumbel") else 0.05)).all()


@pytest.mark.slow
def test_only_the_rows_of_the_minibatch_move():
    """Of a batch of another size than the first one, out of order."""
    _, y = make_data()
    model = known_weights("logistic")
    guide = lc.ErrorGuideList(model, None, errors={"y_error": lc.LocalErrors("normal", 0.7)})
    svi = lc.SubsampledSVI(model, guide, optax.adam(0.1), TraceMeanField_ELBO())
    state = svi.init(jax.random.key(0), y[ROWS], ROWS)
    start = svi.get_params(state)
    np.testing.assert_allclose(start["y_error_auto_scale"], np.full(NUM_ROWS, 0.7), rtol=1e-5)
    rows = jnp.array([8, 30, 3, 9])
    state, loss = jax.jit(svi.update)(state, y[rows], rows)
    assert np.isfinite(loss)
    after = svi.get_params(state)
    for name in ("y_error_auto_loc", "y_error_auto_scale"):
        assert np.flatnonzero(after[name] != start[name]).tolist() == [3, 8, 9, 30]


@pytest.mark.parametrize("noise", sorted(FAMILIES))
def test_errors_start_where_one_of_k_exceeds_them(noise):
    guide = lc.choices.AutoError(given_utilities(noise), "y_error")
    with numpyro.handlers.trace() as sites, numpyro.handlers.seed(rng_seed=0):
        guide(LABELS)
    log_cdf = reference.LOG_CDFS[noise](np.asarray(sites["y_error_auto_loc"]["value"]))
    np.testing.assert_allclose(np.exp(log_cdf), np.full(4, 1 - 1 / 7), rtol=1e-4)


@pytest.mark.slow
def test_errors_of_sequences_have_a_row_for_each_position():
    y = jnp.array([[1, 2], [0, 2], [2, 2]])

    def model(y, rows):
        with lc.data_plate("data", 9, rows, dim=-2), numpyro.plate("position", 2, dim=-1):
            error = numpyro.sample("y_error", lc.error_distribution("logistic"))
            choice = lc.AugmentedCategorical(jnp.zeros((3, 2, 4)), noise="logistic", error=error)
            numpyro.sample("y", choice, obs=y)

    guide = lc.ErrorGuideList(model, None, errors={"y_error": lc.LocalErrors()})
    result = fit(lc.SubsampledSVI, model, guide, y, jnp.array([4, 0, 7]), steps=2)
    loc = np.asarray(result.params["y_error_auto_loc"])
    assert loc.shape == (9, 2)
    assert np.flatnonzero((loc != loc[1, 0]).all(axis=1)).tolist() == [0, 4, 7]


def test_an_error_with_an_event_axis():
    def model():
        with numpyro.plate("cells", 5):
            prior = lc.error_distribution("normal").expand([2]).to_event(1)
            error = numpyro.sample("y_error", prior)
            choice = lc.AugmentedCategorical(jnp.zeros((5, 2, 3)), noise="normal", error=error)
            numpyro.sample("y", choice.to_event(1), obs=jnp.zeros((5, 2), int))

    guide = lc.ErrorGuideList(model, None, errors={"y_error": lc.LocalErrors()})
    with numpyro.handlers.trace() as sites, numpyro.handlers.seed(rng_seed=0):
        guide()
    assert sites["y_error"]["fn"].event_shape == (2,)
    assert sites["y_error_auto_loc"]["value"].shape == (5, 2)


@pytest.mark.slow
def test_the_elbo_on_subsets_has_the_full_one_as_its_mean(x64):
    """Under Gumbel(u, 1) that is the closed form of the softmax bound."""
    labels, num_categories = np.array([3, 8]), 12
    table = 0.3 * np.random.default_rng(3).normal(size=num_categories)

    def model():
        with lc.class_plate("classes", num_categories, labels, num_sampled=4) as classes:
            pass
        with lc.data_plate("data", 2):
            error = numpyro.sample("y_error", lc.error_distribution("gumbel"))
            utilities = jnp.array(table)[classes.indices]
            choice = lc.AugmentedCategorical(utilities, classes, "gumbel", error=error)
            numpyro.sample("y", choice, obs=labels)

    guide = lc.ErrorGuideList(model, None, errors={"y_error": lc.LocalErrors("gumbel")})
    svi = lc.SubsampledSVI(model, guide, optax.sgd(0.0), Trace_ELBO())
    u = {"y_error_auto_loc": jnp.array([2.0, 3.5]), "y_error_auto_scale": jnp.ones(2)}
    state = svi.init(jax.random.key(0), init_params=u)
    keys = jax.random.split(jax.random.key(1), 4000)
    elbos = -jax.jit(jax.vmap(lambda key: svi.evaluate(state._replace(rng_key=key))))(keys)
    expected = sum(
        reference.softmax_bound(table, k, u) for k, u in zip(labels, (2.0, 3.5), strict=True)
    )
    standard_error = elbos.std(ddof=1) / math.sqrt(len(keys))
    assert abs(elbos.mean() - expected) < STANDARD_ERRORS * standard_error
    assert standard_error < 0.1


# Amortised errors.


@pytest.mark.slow
@pytest.mark.parametrize("network", [(16,), "own"])
def test_amortised_errors_learn(network, x64):
    """Their ELBO comes within 0.05 nats of the exact one, which a shared q misses by over 0.2."""
    x, _ = make_data(num_rows=50)
    table = np.random.default_rng(4).normal(size=(NUM_CATEGORIES, NUM_FEATURES))
    utilities = np.asarray(x) @ table.T
    y = jax.random.categorical(jax.random.key(5), jnp.array(utilities))
    exact = reference.softmax_log_probs(utilities, y).mean()

    def own(features):
        slope = numpyro.param("slope", jnp.zeros((features.shape[-1], 2)))
        return features @ slope

    def features(y):
        log_sum = jax.nn.logsumexp(jnp.array(utilities), axis=-1)
        own_utility = jnp.take_along_axis(jnp.array(utilities), y[:, None], axis=-1)[:, 0]
        return jnp.stack([jnp.ones(50), log_sum, own_utility], axis=-1)

    errors = lc.AmortizedErrors(features, own if network == "own" else network)
    model = given_utilities("gumbel", utilities)
    guide = lc.ErrorGuideList(model, None, errors={"y_error": errors})
    loss = Trace_ELBO(num_particles=10)
    steps = optax.adam(optax.exponential_decay(0.05, 200, 0.5))
    result = fit(SVI, model, guide, y, steps=700, loss=loss, optim=steps)
    elbo = -np.asarray(result.losses) / 50
    assert elbo[:10].mean() < exact - 0.2
    assert exact - 0.05 < elbo[-50:].mean() < exact + 0.005
    names = (
        {"slope"}
        if network == "own"
        else {f"y_error_auto_{w}{i}" for w in ("weight", "bias") for i in (0, 1)}
    )
    assert set(result.params) == names


# Whole guides.


@pytest.mark.slow
def test_two_choices_with_errors_of_different_families():
    """Hierarchical, with classes of their own; one error has rows, the other a network."""
    x = jnp.array([0.5, -1.0, 1.5])
    y1, y2 = jnp.array([3, 1, 3]), jnp.array([400, 7, 9])

    def model(y1, y2, rows):
        scale = numpyro.sample("scale", dist.HalfNormal(1.0))
        with lc.class_plate("first", 5, y1, num_sampled=2) as first:
            a = numpyro.sample("a", dist.Normal(0, scale))
        with lc.class_plate("second", 500, y2, num_sampled=40) as second:
            b = numpyro.sample("b", dist.Normal(0, scale))
        with lc.data_plate("data", 20, rows):
            e1 = numpyro.sample("e1", lc.error_distribution("gumbel"))
            e2 = numpyro.sample("e2", lc.error_distribution("logistic"))
            psi = numpyro.deterministic("psi", x[:, None] * a)
            numpyro.sample("y1", lc.AugmentedCategorical(psi, first, "gumbel", error=e1), obs=y1)
            choice = lc.AugmentedCategorical(x[:, None] + b, second, "logistic", error=e2)
            numpyro.sample("y2", choice, obs=y2)

    def features(y1, y2, rows):
        return jnp.stack([y1, y2 / 100], axis=-1)

    errors = {"e1": lc.LocalErrors("normal"), "e2": lc.AmortizedErrors(features, (4,))}
    guide = lc.ErrorGuideList(model, partial(AutoNormal, init_scale=0.05), errors=errors)
    rows = jnp.array([11, 0, 4])
    result = fit(lc.SubsampledSVI, model, guide, y1, y2, rows, steps=300)
    assert np.isfinite(result.losses).all()
    assert result.losses[-50:].mean() < result.losses[:20].mean() - 10
    loc = np.asarray(result.params["e1_auto_loc"])
    untouched = np.setdiff1d(np.arange(20), rows)
    start = dist.Gumbel().icdf(1 - 1 / 5)
    np.testing.assert_allclose(loc[untouched], np.full(17, start), rtol=1e-4)
    assert (loc[rows] != loc[untouched[0]]).all()
    assert result.params["e2_auto_weight0"].shape == (2, 4)
    assert set(guide.median(result.params)) == {"scale", "a", "b", "e1"}
    draws = guide[2].sample_posterior(
        jax.random.key(0), result.params, y1[:2], y2[:2], rows[:2], sample_shape=(6,)
    )
    assert draws["e2"].shape == (6, 2)


@pytest.mark.slow
def test_predictions_need_no_errors():
    """Of rows that have none, from the model and guide with their errors hidden."""
    model = known_weights("gumbel")
    guide = lc.ErrorGuideList(model, None, errors={"y_error": lc.LocalErrors()})
    found = lc.Fitted(*without_errors(model, guide), {}).on(None).top_classes(3)
    assert found.classes.tolist() == [[11, 10, 9]]  # one row, which stands for any number
    table = np.linspace(-1, 1, NUM_CATEGORIES)
    expected = [reference.softmax_log_prob(table, k) for k in (11, 10, 9)]
    np.testing.assert_allclose(found.log_probs, [expected], rtol=1e-5)
    other = AutoNormal(model)
    assert without_errors(model, other) == (model, other)


@pytest.mark.slow
def test_a_part_for_numpyros_list():
    """In a list put together by hand, with a prefix of its own."""

    def model(y):
        slope = numpyro.sample("slope", dist.Normal(0, 1))
        with numpyro.plate("data", 4):
            error = numpyro.sample("y_error", lc.error_distribution("logistic"))
            utilities = slope * jnp.array(UTILITIES)
            choice = lc.AugmentedCategorical(utilities, noise="logistic", error=error)
            numpyro.sample("y", choice, obs=y)

    guide = AutoGuideList(model)
    guide.append(AutoNormal(block(model, hide=["y_error"])))
    guide.append(lc.choices.AutoError(model, "y_error", prefix="mine"))
    with numpyro.handlers.trace() as sites, numpyro.handlers.seed(rng_seed=0):
        assert set(guide(LABELS)) == {"slope", "y_error"}
    params = {name: site["value"] for name, site in sites.items() if site["type"] == "param"}
    assert {"y_error_mine_loc", "y_error_mine_scale"} < params.keys()
    assert set(guide.median(params)) == {"slope", "y_error"}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gumbel", slow_case("logistic"), slow_case("normal")])
def test_draws_medians_and_quantiles_are_those_of_the_parameters(family, x64):
    model = given_utilities("normal")
    guide = lc.ErrorGuideList(model, None, errors={"y_error": lc.LocalErrors(family)})
    params = {
        "y_error_auto_loc": jnp.array([0.0, 1.0, 2.0, 3.0]),
        "y_error_auto_scale": jnp.array([0.5, 1.0, 2.0, 3.0]),
    }
    with numpyro.handlers.seed(rng_seed=0):
        guide(LABELS)
    q = POSTERIORS[family](params["y_error_auto_loc"], params["y_error_auto_scale"])
    np.testing.assert_allclose(q.cdf(guide.median(params)["y_error"]), np.full(4, 0.5), rtol=1e-9)
    quantiles = guide.quantiles(params, [0.1, 0.9])["y_error"]
    np.testing.assert_allclose(q.cdf(quantiles), [[0.1] * 4, [0.9] * 4], rtol=1e-9)
    draws = guide.sample_posterior(jax.random.key(0), params, sample_shape=(4000,))["y_error"]
    uniform = np.asarray(q.cdf(draws))  # means of 4000 uniform numbers, six times
    assert np.abs(uniform.mean(axis=0) - 0.5).max() < 6 * math.sqrt(1 / 12 / 4000)


# Errors.


BAD = {
    "unknown family": (lambda: lc.LocalErrors("cauchy"), "`family` must be one of .*got 'cauchy'"),
    "scale": (
        lambda: lc.LocalErrors(init_scale=0.0),
        "`init_scale` must be in \\(0, inf\\); got 0.0",
    ),
    "scale of a network": (
        lambda: lc.AmortizedErrors(lambda y: y, init_scale=-1.0),
        "`init_scale` must be in \\(0, inf\\); got -1.0",
    ),
    "sizes": (
        lambda: lc.AmortizedErrors(lambda y: y, (8, 0)),
        r"`network\[1\]` must be at least 1",
    ),
    "no errors": (
        lambda: lc.ErrorGuideList(given_utilities("normal"), None, errors={}),
        "`errors` must have a posterior for an error site",
    ),
}


@pytest.mark.parametrize(("make", "message"), BAD.values(), ids=BAD)
def test_bad_arguments_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def without_choice(y):
    numpyro.sample("y_error", dist.Normal())


def of_two_families(y):
    error = numpyro.sample("y_error", lc.error_distribution("logistic"))
    choice = lc.AugmentedCategorical(jnp.zeros(5), noise="normal", error=error)
    numpyro.sample("y", choice, obs=y[0])


BAD_RUNS = {
    "unknown site": (
        lc.choices.AutoError(given_utilities("normal"), "error"),
        r"`site` must name a latent site.*got 'error', and the latent sites are \['y_error'\]",
    ),
    "no choice": (
        lc.choices.AutoError(without_choice, "y_error"),
        "must be the `error=` of a site",
    ),
    "another family": (
        lc.choices.AutoError(of_two_families, "y_error"),
        r"whose `noise` is normal \(Normal\); got Logistic",
    ),
    "rows of features": (
        lc.choices.AutoError(
            given_utilities("normal"), "y_error", lc.AmortizedErrors(lambda y: jnp.ones((3, 2)))
        ),
        r"must have shape \(4,\), .*; got shape \(3,\)",
    ),
    "output of the network": (
        lc.choices.AutoError(
            given_utilities("normal"),
            "y_error",
            lc.AmortizedErrors(lambda y: jnp.ones((4, 2)), lambda features: features[:, 0]),
        ),
        r"`network` must .* two numbers .* of shape \(4, 2\); got shape \(4,\)",
    ),
}


@pytest.mark.parametrize(("guide", "message"), BAD_RUNS.values(), ids=BAD_RUNS)
def test_sites_and_shapes_that_do_not_fit_are_refused(guide, message):
    with pytest.raises(ValueError, match=message), numpyro.handlers.seed(rng_seed=0):
        guide(LABELS)


def test_a_guide_that_was_not_run_has_no_posterior():
    guide = lc.choices.AutoError(given_utilities("normal"), "y_error")
    with pytest.raises(RuntimeError, match="has not been run yet"):
        guide.median({})
