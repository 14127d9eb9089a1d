# SPDX-License-Identifier: Apache-2.0
"""Learned priors of rows, written around values of a fixed prior."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.handlers import condition, seed, substitute, trace
from numpyro.infer import TraceMeanField_ELBO

import numpyro_largecat as lc
from tests.models import make_data

K = 6


def shapes_of(model, *args):
    """Sites of a model, by name, of which nothing is computed."""
    found = {}

    def look():
        for name, site in trace(seed(model, 0)).get_trace(*args).items():
            found[name] = site["type"], jax.tree.map(jnp.shape, site["value"])

    jax.eval_shape(look)
    return found


def weights(prior):
    """Rows with this prior, a function of a learned location and scale."""

    def model():
        loc = numpyro.param("loc", jnp.array(0.3))
        scale = numpyro.sample("scale", dist.LogNormal(0, 1))
        with lc.class_plate("classes", K):
            w = numpyro.sample("w", prior(loc, scale))
        numpyro.factor("data", -(w**2).sum())

    return model


FAMILIES = {
    "normal": dist.Normal,
    "Laplace": dist.Laplace,
    "logistic": dist.Logistic,
    "Gumbel": dist.Gumbel,
    "Cauchy": dist.Cauchy,
    "Student": lambda loc, scale: dist.StudentT(4.0, loc, scale),
    "two features": lambda loc, scale: dist.Normal(loc, scale * jnp.array([1.0, 3.0])).to_event(1),
    "multivariate": lambda loc, scale: dist.MultivariateNormal(
        loc * jnp.ones(2), scale_tril=scale * jnp.array([[1.0, 0.0], [0.7, 2.0]])
    ),
}


@pytest.mark.parametrize("prior", FAMILIES.values(), ids=FAMILIES)
@pytest.mark.some_cases(3)
def test_the_value_has_the_prior_of_the_model(prior):
    """Its log density is that of z and a constant, which both integrals being 1 determines."""
    model = weights(prior)
    values = {"scale": jnp.array(1.7), "loc": jnp.array(-0.4)}
    sites = trace(substitute(seed(lc.not_centred(model), 1), values)).get_trace()
    z, w = sites["w_decentered"], sites["w"]
    assert (z["type"], w["type"]) == ("sample", "deterministic")
    fn = prior(values["loc"], values["scale"]).expand((K,))
    difference = fn.log_prob(w["value"]) - z["fn"].log_prob(z["value"])
    np.testing.assert_allclose(difference, difference[0], rtol=1e-4)


def several(groups):
    """Priors that are learned and fixed, in plates of rows and outside."""
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    dense = numpyro.sample("dense", dist.Normal(0, tau))
    with lc.class_plate("classes", K):
        fixed = numpyro.sample("fixed", dist.Normal(1, 2))
        own = numpyro.sample("own", dist.HalfCauchy(1))
        horseshoe = numpyro.sample("horseshoe", dist.Normal(0, own * tau))
        grouped = numpyro.sample("grouped", dist.Normal(dense * groups, 1))
        numpyro.sample("of_nothing_else", dist.Normal(dense, tau))
    numpyro.factor("data", (fixed + horseshoe * grouped).sum())


def test_only_learned_priors_of_rows_are_written_anew():
    shapes = shapes_of(lc.not_centred(several), jnp.arange(K) % 2)
    latent = [name for name, (kind, _) in shapes.items() if kind == "sample"]
    names = ["tau", "dense", "fixed", "own", "horseshoe_decentered", "grouped_decentered"]
    assert latent == [*names, "of_nothing_else_decentered", "data"]


def groups(x=None, y=None, rows=None):
    """Groups whose measurements, and the classes that these choose, are observed or drawn."""
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with lc.entity_plate("groups", 3):
        z = numpyro.sample("z", dist.Normal(mu, 1))
    with lc.class_plate("classes", K, y, None if y is None else 2) as classes:
        w = numpyro.sample("w", dist.Normal(0, jnp.exp(mu)))
    with lc.data_plate("data", 3, rows) as rows:
        x = numpyro.sample("x", dist.Normal(z, 1), obs=x)
        lc.sample_choice("y", x[:, None] * w, classes=classes, rows=rows, obs=y)


def test_a_look_at_the_prior_changes_nothing_of_what_is_observed_later():
    """In draws from the prior x is a row like others, and y has no such form."""
    data = jnp.zeros(3), jnp.arange(3)
    looked, fresh = lc.not_centred(groups), lc.not_centred(groups)
    of_prior, of_data = shapes_of(looked), shapes_of(fresh, *data)
    assert shapes_of(looked, *data) == of_data
    latent = {name for name, (kind, _) in of_data.items() if kind == "sample"}
    assert latent == {"mu", "z_decentered", "w_decentered", "x", "y"}
    assert of_prior["y"][0] == "sample" and of_prior["x"][0] == "deterministic"
    assert shapes_of(fresh)["x"][0] == "sample"


def test_rows_are_written_anew_where_nothing_is_observed():
    """As where a model ends before its likelihood, or a guide draws what it has fitted."""

    def model(y=None):
        tau = numpyro.sample("tau", dist.HalfNormal(1.0))
        with lc.class_plate("classes", K):
            w = numpyro.sample("w", dist.Normal(0, tau))
        if y is not None:
            numpyro.factor("data", -(w**2).sum())

    for arguments in ((), (1,)):
        shapes = shapes_of(lc.not_centred(model), *arguments)
        assert "w_decentered" in shapes and shapes["w"][0] == "deterministic"


def test_what_a_handler_observes_stays_as_it_is():
    values = {"x": jnp.full(3, 5.0)}
    shapes = shapes_of(condition(lc.not_centred(groups), values))
    assert shapes["x"][0] == "sample" and "x_decentered" not in shapes
    assert "z_decentered" in shapes


@pytest.mark.parametrize(
    ("prior", "message"),
    [
        (lambda loc, scale: dist.HalfNormal(scale), r"'w' is learned and is a HalfNormal"),
        (lambda loc, scale: dist.LogNormal(loc, scale), r"is a LogNormal.*`jnp.exp` of a Normal"),
        (lambda loc, scale: dist.StudentT(scale, 0, 1), r"`df` of site 'w' is learned"),
    ],
    ids=["half normal", "lognormal", "degrees of freedom"],
)
def test_learned_priors_that_have_no_such_form_are_refused(prior, message):
    with pytest.raises(NotImplementedError, match=message):
        shapes_of(lc.not_centred(weights(prior)))


def loss_at(model, tau):
    """Loss of a guide at its start, where all is known but the scale."""
    guide = lc.AutoRowNormal(model)
    start = trace(seed(guide, 0)).get_trace()
    params = {k: s["value"] for k, s in start.items() if s["type"] == "param"}
    loss = TraceMeanField_ELBO().loss(
        jax.random.key(0), params | {"tau": jnp.array(tau)}, model, guide
    )
    return float(loss)


@pytest.mark.slow
def test_divergences_do_not_depend_on_the_scale():
    """Centred they are least where the scale is the guide's sd at its start, 0.1."""

    def model():
        tau = numpyro.param("tau", jnp.array(1.0))
        with lc.class_plate("classes", K):
            w = numpyro.sample("w", dist.Normal(0, tau).expand([2]).to_event(1))
        numpyro.factor("nothing", 0.0 * w.sum())

    scales = (0.05, 0.1, 1.0, 10.0)
    centred = [loss_at(model, tau) for tau in scales]
    assert centred[1] == pytest.approx(0, abs=1e-4)
    assert min(centred[0], *centred[2:]) > 1
    free = [loss_at(lc.not_centred(model), tau) for tau in scales]
    np.testing.assert_allclose(free, free[0], rtol=1e-6)


X, Y = make_data()
NUM_CLASSES = 100


def regression(x, y=None, rows=None):
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    with lc.class_plate("classes", NUM_CLASSES, y, num_sampled=3) as classes:
        w = numpyro.sample("w", dist.Normal(0, tau).expand([3]).to_event(1))
        b = numpyro.sample("b", dist.Normal(0.5, 2))
    with lc.data_plate("data", len(X), rows) as rows:
        lc.sample_choice("y", x @ w.T + b, classes=classes, rows=rows, obs=y)


@pytest.mark.slow
def test_a_fit_is_read_on_new_rows():
    """As many as there are, of whose priors nothing is to be learned anew."""
    model = lc.not_centred(regression)
    guide = lc.AutoRowNormal(model, follow=["tau"])
    svi = lc.SubsampledSVI(model, guide, optax.adam(0.01), TraceMeanField_ELBO())
    batches = lc.ArrayBatches(X, Y, batch_size=5)
    result = svi.run(jax.random.key(0), 3, batches=batches, progress_bar=False)
    assert result.params["w_decentered_auto_loc"].shape == (NUM_CLASSES, 3)
    top = lc.Fitted.from_svi(svi, result).on(X[:2]).top_classes(2)
    assert top.classes.shape == (2, 2)
    draws = guide.sample_posterior(jax.random.key(0), result.params, sample_shape=(2,))
    assert draws["w_decentered"].shape == (2, NUM_CLASSES, 3)
