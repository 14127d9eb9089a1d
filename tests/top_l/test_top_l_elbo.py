# SPDX-License-Identifier: Apache-2.0
"""TopL_ELBO is the ELBO with the L best values of each discrete site summed."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro import handlers
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal
from numpyro.primitives import mutable
from scipy.special import log_softmax, logsumexp
from scipy.stats import norm

import numpyro_largecat as lc
from numpyro_largecat.top_l import active_values
from tests import reference_top_l as reference
from tests.memory import temp_bytes
from tests.slow_cases import slow_case

N, K, D = 14, 6, 2
MARK = {"enumerate": "parallel"}
rng = np.random.default_rng(7)
X = rng.normal(size=(N, D)) * 3
LOC = rng.normal(size=(K, D)) * 3
LOGITS = rng.normal(size=K)
KEY = jax.random.key(0)


def no_guide(*args, **kwargs):
    """Nothing is left to a guide where the global quantities are parameters."""


def loss_of(num_active, model, params, *args):
    elbo = lc.TopL_ELBO(num_active)
    return jax.jit(lambda p, a: elbo.loss(KEY, p, model, no_guide, *a))(params, args)


def normal_log_density(x, loc, scale=1.0):
    return norm(loc, scale).logpdf(x).sum(-1)


def kept(weights, num_active):
    """Sum over rows (N, K) of the best L-sparse objective, by trying every support."""
    return sum(reference.best_sparse(row, num_active)[1] for row in weights)


def gaussians(x):
    """NumPyro's usual mixture with an explicit component, its parameters given."""
    loc = numpyro.param("loc", LOC)
    logits = numpyro.param("logits", LOGITS)
    with numpyro.plate("data", len(x)):
        z = numpyro.sample("z", dist.Categorical(logits=logits), infer=MARK)
        numpyro.sample("x", dist.Normal(loc[z], 1.0).to_event(1), obs=x)


GAUSSIANS = dict(loc=jnp.array(LOC), logits=jnp.array(LOGITS))
WEIGHTS = log_softmax(LOGITS) + normal_log_density(X[:, None], LOC)


@pytest.mark.smoke
@pytest.mark.parametrize("num_active", [1, 2, K])
def test_gaussian_mixture_by_hand(num_active):
    found = loss_of(num_active, gaussians, GAUSSIANS, X)
    np.testing.assert_allclose(found, -kept(WEIGHTS, num_active), rtol=1e-5)


def with_priors(x, rows=None, explicit=True, num_active=None):
    """The same with latent global quantities, and with the component summed out."""
    weights = numpyro.sample("weights", dist.Dirichlet(jnp.ones(K)))
    with numpyro.plate("components", K):
        loc = numpyro.sample("loc", dist.Normal(0, 5).expand([D]).to_event(1))
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    with lc.data_plate("data", N, rows):
        if explicit:
            z = numpyro.sample("z", dist.Categorical(weights), infer=MARK)
            numpyro.sample("x", dist.Normal(loc[z], scale).to_event(1), obs=x)
            return
        components = dist.Normal(loc, scale).to_event(1)
        numpyro.sample(
            "x", lc.TopLMixture(dist.Categorical(weights), components, num_active), obs=x
        )


def at_the_start(svi_type, model, elbo, *args):
    """SVI and its first state."""
    svi = svi_type(model, AutoNormal(lc.hide_enumerated(model)), optax.sgd(1.0), elbo)
    return svi, svi.init(jax.random.key(3), *args)


@partial(jax.jit, static_argnums=(0, 1, 2))
def first_step(svi_type, model, elbo, *args):
    """Loss and gradients at the start, in all parameters, by one program."""
    svi, state = at_the_start(svi_type, model, elbo, *args)
    before = svi.get_params(state)
    state, loss = svi.update(state, *args)
    return loss, jax.tree.map(jnp.subtract, svi.get_params(state), before)


@pytest.mark.parametrize(("svi_type", "num_active"), [slow_case(SVI, K), (lc.SubsampledSVI, 2)])
@pytest.mark.slow
def test_steps_are_those_of_the_marginal_mixture(svi_type, num_active):
    """Under Trace_ELBO with the same keys; at L = K that is exact marginalisation."""
    rows = jnp.array([3, 9, 0]) if svi_type is lc.SubsampledSVI else None
    args = (X, None) if rows is None else (X[rows], rows)
    loss, step = first_step(svi_type, with_priors, lc.TopL_ELBO(num_active), *args)
    marginal = partial(with_priors, explicit=False, num_active=num_active)
    expected, expected_step = first_step(svi_type, marginal, Trace_ELBO(), *args)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    for name, wanted in expected_step.items():
        np.testing.assert_allclose(step[name], wanted, rtol=2e-3, atol=2e-3, err_msg=name)


def test_exact_marginalisation_in_double_precision(x64):
    """Loss and all gradients against a log-sum-exp by hand."""

    def by_hand(params):
        density = dist.Normal(params["loc"], 1.0).to_event(1).log_prob(X[:, None])
        weights = jax.nn.log_softmax(params["logits"]) + density
        return -jax.nn.logsumexp(weights, axis=-1).sum()

    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), dict(loc=LOC, logits=LOGITS))
    elbo = lc.TopL_ELBO(K)
    loss = jax.value_and_grad(lambda p: elbo.loss(KEY, p, gaussians, no_guide, X))
    found, slope = jax.jit(loss)(params)
    expected, wanted = jax.jit(jax.value_and_grad(by_hand))(params)
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    for name in params:
        np.testing.assert_allclose(slope[name], wanted[name], rtol=1e-9, atol=1e-12)


def test_responsibilities_are_the_best_sparse_posterior():
    elbo = lc.TopL_ELBO(3)
    found = jax.jit(lambda p: elbo.responsibilities(KEY, p, gaussians, no_guide, X))(GAUSSIANS)
    assert list(found) == ["z"]
    z = found["z"]
    assert (z.batch_shape, z.num_categories) == ((N,), K)
    for n in range(N):
        expected = reference.best_sparse(WEIGHTS[n], 3)[0]
        np.testing.assert_allclose(z.probs[n], expected[z.indices[n]], rtol=1e-4)


def several(x, y, groups):
    """Discrete sites of 3, 2 and K values, in the same, an inner and no plate."""
    loc, rate = numpyro.param("loc"), numpyro.param("rate")
    tilt = numpyro.sample("tilt", dist.Bernoulli(0.3), infer=MARK)  # one for all
    with numpyro.plate("groups", 4, dim=-1):
        kind = numpyro.sample("kind", dist.DiscreteUniform(5, 7), infer=MARK)
        numpyro.sample("of group", dist.Normal(kind, 1.0), obs=groups)
        with numpyro.plate("members", 3, dim=-2):
            numpyro.sample("y", dist.Poisson(rate[kind - 5]), obs=y)
            z = numpyro.sample("z", dist.Categorical(logits=numpyro.param("logits")), infer=MARK)
            numpyro.sample("x", dist.Normal(loc[z], 1.0).to_event(1), obs=x)
    with numpyro.plate("others", 5):
        numpyro.sample("w", dist.Normal(2.0 * tilt, 1.0), obs=jnp.arange(5.0))


@pytest.mark.slow
def test_several_sites_in_several_plates():
    x = X[:12].reshape(3, 4, D)
    y, groups = rng.poisson(3, size=(3, 4)), rng.normal(6, 1, size=4)
    rate = np.array([1.0, 2.0, 6.0])
    params = dict(GAUSSIANS, rate=jnp.array(rate))
    active = {"tilt": 1, "kind": 2, "z": 3}
    found = loss_of(active, several, params, x, y, groups)
    others = norm(np.array([0.0, 2.0])[:, None], 1).logpdf(np.arange(5.0)).sum(-1)
    tilt = np.log([0.7, 0.3]) + others
    poisson = (y[..., None] * np.log(rate) - rate).sum(0)
    factorials = dist.Poisson(1.0).log_prob(y).sum() + y.size  # less the logs of the factorials
    kind = -np.log(3) + poisson + norm([5, 6, 7], 1).logpdf(groups[:, None])
    expected = max(tilt) + kept(kind, 2) + kept(WEIGHTS[:12], 3) + factorials
    np.testing.assert_allclose(found, -expected, rtol=1e-5)
    elbo = lc.TopL_ELBO(active)
    sites = jax.jit(lambda p: elbo.responsibilities(KEY, p, several, no_guide, x, y, groups))(
        params
    )
    assert {name: z.batch_shape for name, z in sites.items()} == {
        "tilt": (),
        "kind": (4,),
        "z": (3, 4),
    }


def test_weights_of_each_observation():
    """As topic models and gated mixtures have them: prior logits of shape (N, K)."""
    own = rng.normal(size=(N, K))

    def model(x):
        with numpyro.plate("data", N):
            z = numpyro.sample("z", dist.Categorical(logits=own), infer=MARK)
            numpyro.sample("x", dist.Normal(numpyro.param("loc")[z], 1.0).to_event(1), obs=x)

    weights = log_softmax(own, axis=-1) + normal_log_density(X[:, None], LOC)
    found = loss_of(2, model, GAUSSIANS, X)
    np.testing.assert_allclose(found, -kept(weights, 2), rtol=1e-5)


def test_subsampled_plates_scale_the_bound():
    def model(x):
        with numpyro.plate("data", N, subsample_size=5) as rows:
            z = numpyro.sample("z", dist.Categorical(logits=numpyro.param("logits")), infer=MARK)
            loc = numpyro.param("loc")
            numpyro.sample("x", dist.Normal(loc[z], 1.0).to_event(1), obs=x[rows])
            numpyro.deterministic("rows", rows)

    rows = handlers.trace(
        handlers.seed(handlers.substitute(model, GAUSSIANS), jax.random.split(KEY)[0])
    ).get_trace(jnp.array(X))["rows"]["value"]
    found = loss_of(2, model, GAUSSIANS, jnp.array(X))
    np.testing.assert_allclose(found, -N / 5 * kept(WEIGHTS[rows], 2), rtol=1e-5)


def test_latent_sites_downstream_come_from_the_guide():
    """A local continuous site between the discrete one and the data."""

    def model(x):
        with numpyro.plate("data", N):
            z = numpyro.sample("z", dist.Categorical(logits=LOGITS), infer=MARK)
            h = numpyro.sample("h", dist.Normal(jnp.array(LOC)[z, 0], 1.0))
            numpyro.sample("x", dist.Normal(h, 2.0), obs=x)

    def guide(x):
        with numpyro.plate("data", N):
            numpyro.sample("h", dist.Normal(numpyro.param("m"), 0.5))

    params = {"m": jnp.array(X[:, 0])}
    loss = jax.jit(lambda p: lc.TopL_ELBO(2).loss(KEY, p, model, guide, X[:, 1]))
    found = loss(params)
    seeded = handlers.seed(handlers.substitute(guide, params), jax.random.split(KEY)[1])
    h = np.asarray(handlers.trace(seeded).get_trace(None)["h"]["value"], np.float64)
    weights = log_softmax(LOGITS) + norm(LOC[:, 0], 1).logpdf(h[:, None])
    rest = norm(h, 2).logpdf(X[:, 1]).sum() - norm(X[:, 0], 0.5).logpdf(h).sum()
    np.testing.assert_allclose(found, -kept(weights, 2) - rest, rtol=1e-4)


def test_networks_that_do_not_broadcast():
    """Code inputs beside features, which takes values of the plate's own shape."""
    features, w = rng.normal(size=(N, 3)), rng.normal(size=(3 + K, D))
    shapes = []

    def model(x):
        with numpyro.plate("data", N):
            z = numpyro.sample("z", dist.Categorical(logits=LOGITS), infer=MARK)
            shapes.append(z.shape)
            code = jnp.concatenate([features, jax.nn.one_hot(z, K)], axis=-1)
            numpyro.sample("x", dist.Normal(jnp.tanh(code @ w), 1.0).to_event(1), obs=x)

    codes = np.concatenate(
        [np.broadcast_to(features[:, None], (N, K, 3)), np.broadcast_to(np.eye(K), (N, K, K))], -1
    )
    weights = log_softmax(LOGITS) + normal_log_density(X[:, None], np.tanh(codes @ w))
    np.testing.assert_allclose(loss_of(2, model, {}, X), -kept(weights, 2), rtol=1e-5)
    assert {(1,), (N,)} <= set(shapes)


SEEN = rng.random(N) < 0.6


@pytest.mark.parametrize("num_active", [2, K])
@pytest.mark.some_cases(1)
def test_what_is_masked_counts_nothing(num_active):
    """What depends on the discrete site, without the site and with it."""

    def model(x, both):
        with numpyro.plate("data", N):
            prior = dist.Categorical(logits=numpyro.param("logits"))
            z = numpyro.sample("z", prior.mask(SEEN) if both else prior, infer=MARK)
            with handlers.mask(mask=SEEN):
                numpyro.sample("x", dist.Normal(jnp.array(LOC)[z], 1.0).to_event(1), obs=x)

    elbo = lc.TopL_ELBO(num_active)
    loss = jax.value_and_grad(lambda p, both: elbo.loss(KEY, p, model, no_guide, X, both))
    seen = WEIGHTS[SEEN]
    posterior = sum(reference.best_sparse(row, num_active)[0] for row in seen)
    expected = len(seen) * np.exp(log_softmax(LOGITS)) - posterior
    params = {"logits": jnp.array(LOGITS)}
    for found, slope in jax.jit(lambda p: [loss(p, both) for both in (False, True)])(params):
        np.testing.assert_allclose(found, -kept(seen, num_active), rtol=1e-5)
        np.testing.assert_allclose(slope["logits"], expected, rtol=1e-4, atol=1e-5)


def test_values_that_are_known_in_part():
    """``obs_mask`` on the discrete site: some labels are there."""
    labels = rng.integers(K, size=N)

    def model(x):
        with numpyro.plate("data", N):
            prior = dist.Categorical(logits=LOGITS)
            z = numpyro.sample("z", prior, obs=labels, obs_mask=SEEN, infer=MARK)
            numpyro.sample("x", dist.Normal(jnp.array(LOC)[z], 1.0).to_event(1), obs=x)

    found = loss_of(2, model, {}, X)
    known = WEIGHTS[SEEN, labels[SEEN]].sum()
    np.testing.assert_allclose(found, -known - kept(WEIGHTS[~SEEN], 2), rtol=1e-5)


@pytest.mark.slow
def test_chunks_of_values_change_nothing(monkeypatch):
    """One value, and five, at once; also where all values are summed."""
    for size in (1, 5):
        monkeypatch.setattr(active_values, "MAX_ENTRIES", size * N * D)
        for num_active in (2, K):
            elbo = lc.TopL_ELBO(num_active)
            step = jax.value_and_grad(lambda p, e=elbo: e.loss(KEY, p, gaussians, no_guide, X))
            found, slope = jax.jit(step)(GAUSSIANS)
            np.testing.assert_allclose(found, -kept(WEIGHTS, num_active), rtol=1e-5)
            best = [reference.best_sparse(row, num_active)[0] for row in WEIGHTS]
            expected = N * np.exp(log_softmax(LOGITS)) - np.sum(best, axis=0)
            np.testing.assert_allclose(slope["logits"], expected, rtol=1e-4, atol=1e-5)


def test_values_of_probability_zero():
    """Fewer values of positive weight than are kept: none is counted twice."""
    logits = np.array([0.0, -np.inf, -np.inf, 1.0, -np.inf, -np.inf])

    def model(x):
        with numpyro.plate("data", N):
            prior = dist.CategoricalLogits(logits, validate_args=False)
            z = numpyro.sample("z", prior, infer=MARK)
            numpyro.sample("x", dist.Normal(numpyro.param("loc")[z], 1.0).to_event(1), obs=x)

    def loss(params):
        return lc.TopL_ELBO(4).loss(KEY, params, model, no_guide, X)

    found, slope = jax.jit(jax.value_and_grad(loss))({"loc": jnp.array(LOC)})
    weights = log_softmax([0.0, 1.0]) + normal_log_density(X[:, None], LOC[[0, 3]])
    np.testing.assert_allclose(found, -logsumexp(weights, axis=-1).sum(), rtol=1e-5)
    assert np.isfinite(slope["loc"]).all()


@pytest.mark.slow
def test_particles_average():
    def model(x):
        loc = numpyro.sample("loc", dist.Normal(0, 5).expand([K, D]).to_event(2))
        with numpyro.plate("data", N):
            z = numpyro.sample("z", dist.Categorical(logits=LOGITS), infer=MARK)
            numpyro.sample("x", dist.Normal(loc[z], 1.0).to_event(1), obs=x)

    def guide(x):
        numpyro.sample("loc", dist.Normal(LOC, 0.5).to_event(2))

    def loss(key, **options):
        return lc.TopL_ELBO(2, **options).loss(key, {}, model, guide, X)

    expected = np.mean([jax.jit(loss)(key) for key in jax.random.split(KEY, 2)])
    for vectorize in (True, False):
        run = jax.jit(partial(loss, num_particles=2, vectorize_particles=vectorize))
        np.testing.assert_allclose(run(KEY), expected, rtol=1e-5)


def test_without_discrete_sites_it_is_the_usual_elbo():
    model = partial(with_priors, explicit=False, num_active=2)

    @jax.jit
    def evaluate(x):
        svi, state = at_the_start(SVI, model, Trace_ELBO(), x)
        params = svi.get_params(state)
        return [e.loss(KEY, params, model, svi.guide, x) for e in (lc.TopL_ELBO(2), svi.loss)]

    losses = evaluate(X)
    np.testing.assert_allclose(*losses, rtol=1e-6)


@pytest.mark.slow
def test_mutable_state():
    def model(x):
        count = mutable("count", {"value": jnp.array(0.0)})
        count["value"] = count["value"] + 1
        gaussians(x)

    svi = SVI(model, no_guide, optax.sgd(0.0), lc.TopL_ELBO(2))
    state = svi.init(KEY, X)
    for _ in range(2):
        state, loss = jax.jit(svi.update)(state, X)
    assert state.mutable_state["count"]["value"] == 3  # the first in `init`
    np.testing.assert_allclose(loss, -kept(WEIGHTS, 2), rtol=1e-5)


@pytest.mark.slow
def test_memory_does_not_follow_the_number_of_values():
    """Neither that of a value for every observation and component, nor of its density."""

    def used(num_values):
        def loss(loc, x):
            return lc.TopL_ELBO(2).loss(KEY, {"loc": loc}, model, no_guide, x)

        def model(x):
            with numpyro.plate("data", 2000):
                prior = dist.Categorical(logits=jnp.zeros(num_values))
                z = numpyro.sample("z", prior, infer=MARK)
                numpyro.sample("x", dist.Normal(numpyro.param("loc")[z], 1.0).to_event(1), obs=x)

        return temp_bytes(jax.grad(loss), jnp.zeros((num_values, 64)), jnp.zeros((2000, 64)))

    tables = 4 * 64 * 1000 * 4
    assert used(2000) - used(1000) < tables < 2000 * 1000 * 4
