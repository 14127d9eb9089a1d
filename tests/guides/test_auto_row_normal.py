# SPDX-License-Identifier: Apache-2.0
"""The guide with a covariance for each row: what it finds, where it works, what a step costs."""

from __future__ import annotations

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.handlers import block, seed, trace
from numpyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoGuideList, AutoMultivariateNormal, AutoNormal

import numpyro_largecat as lc
from tests.models import make_data

RNG = np.random.default_rng(0)
NUM_GROUPS, NUM_ROWS, NOISE = 6, 20, 0.5
FEATURES = RNG.normal(size=(NUM_GROUPS, NUM_ROWS, 2)) + 1.0  # so that they go with the constant
X = RNG.normal(size=(NUM_GROUPS, NUM_ROWS))


def lines(groups, features, x, rows=None, *, counts=None):
    """A regression in each group: two slopes and a constant, whose posterior is known."""
    with lc.entity_plate("groups", NUM_GROUPS, groups, counts) as read:
        w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
        b = numpyro.sample("b", dist.Normal(0.3, 2))
    mean = (features * read.rows_of(w, groups)).sum(-1) + read.rows_of(b, groups)
    with lc.data_plate("data", NUM_GROUPS * NUM_ROWS, rows):
        numpyro.sample("x", dist.Normal(mean, NOISE), obs=x)


def exact_posterior():
    """Means and covariances of the slopes and the constant of each group."""
    columns = np.concatenate([FEATURES, np.ones((NUM_GROUPS, NUM_ROWS, 1))], axis=-1)
    precision = np.diag([1, 1, 1 / 4]) + np.swapaxes(columns, 1, 2) @ columns / NOISE**2
    covariance = np.linalg.inv(precision)
    sums = np.array([0, 0, 0.3 / 4]) + np.einsum("gnd,gn->gd", columns, X) / NOISE**2
    return np.einsum("gde,ge->gd", covariance, sums), covariance


@pytest.mark.slow
@pytest.mark.parametrize("elbo", [Trace_ELBO, TraceMeanField_ELBO])
def test_covariances_of_rows_are_those_of_a_conjugate_model(elbo):
    """Subsampled. Mean field has the sds of one value given the others, less than half."""
    groups = np.repeat(np.arange(NUM_GROUPS), NUM_ROWS)
    counts = lc.EntityCounts.of(NUM_GROUPS, groups)

    def model(*args):
        lines(*args, counts=counts)

    batches = lc.ArrayBatches(groups, FEATURES.reshape(-1, 2), X.ravel(), batch_size=30)
    guide, optimiser = lc.AutoRowNormal(model), optax.adam(optax.cosine_decay_schedule(0.05, 5000))
    svi = lc.SubsampledSVI(model, guide, optimiser, elbo(num_particles=4))
    params = svi.run(jax.random.key(0), 5000, batches=batches, progress_bar=False).params
    mean, covariance = exact_posterior()
    sd = np.sqrt(np.einsum("gdd->gd", covariance))
    found = np.concatenate([params["w_auto_loc"], params["b_auto_loc"][:, None]], axis=1)
    assert (np.abs(found - mean) < 0.25 * sd).all()
    own = np.asarray(guide.covariances(params)["groups"])
    own_sd = np.sqrt(np.einsum("gdd->gd", own))
    np.testing.assert_allclose(own_sd, sd, rtol=0.12)
    correlation = covariance / (sd[:, :, None] * sd[:, None])
    np.testing.assert_allclose(own / (own_sd[:, :, None] * own_sd[:, None]), correlation, atol=0.1)
    assert np.abs(correlation[:, 2, :2]).max() > 0.5  # so that there is something to find


def around_a_mean(groups, x, rows=None, *, counts):
    """Groups around a mean that is learned: all Gaussian, so that the joint posterior is known."""
    mean = numpyro.sample("mean", dist.Normal(0, 1))
    with lc.entity_plate("groups", NUM_GROUPS, groups, counts) as read:
        effect = numpyro.sample("effect", dist.Normal(mean, 0.1))
    with lc.data_plate("data", NUM_GROUPS * NUM_ROWS, rows):
        numpyro.sample("x", dist.Normal(read.rows_of(effect, groups), NOISE), obs=x)


@pytest.mark.slow
def test_rows_that_follow_a_mean_have_the_posterior_of_random_effects():
    """All variances and covariances, within a tenth; without, the sd of the mean is too small."""
    groups = np.repeat(np.arange(NUM_GROUPS), NUM_ROWS)
    counts = lc.EntityCounts.of(NUM_GROUPS, groups)
    batches = lc.ArrayBatches(groups, X.ravel(), batch_size=30)
    from_data = NUM_ROWS / NOISE**2
    precision = np.zeros((NUM_GROUPS + 1,) * 2)  # of the mean and the effects
    precision[0, 1:] = precision[1:, 0] = -1 / 0.1**2
    np.fill_diagonal(precision, 1 / 0.1**2 + from_data)
    precision[0, 0] = 1 + NUM_GROUPS / 0.1**2
    exact = np.linalg.inv(precision)
    sds = {}
    for follow in ((), ("mean",)):
        model = partial(around_a_mean, counts=counts)
        guide = lc.AutoRowNormal(model, follow=follow)
        optimiser = optax.adam(optax.cosine_decay_schedule(0.05, 5000))
        svi = lc.SubsampledSVI(model, guide, optimiser, TraceMeanField_ELBO(num_particles=4))
        params = svi.run(jax.random.key(0), 5000, batches=batches, progress_bar=False).params
        covariances = guide.covariances(params)
        sds[follow] = float(covariances[None][0, 0]) ** 0.5 / exact[0, 0] ** 0.5
    assert sds[()] < 0.8
    assert sds["mean",] == pytest.approx(1, abs=0.1)
    of_groups = np.sqrt(np.asarray(covariances["groups"]).ravel() / np.diag(exact)[1:])
    np.testing.assert_allclose(of_groups, 1, atol=0.1)
    draws = guide.sample_posterior(jax.random.key(1), params, sample_shape=(4000,))
    both = np.concatenate([draws["mean"][:, None], draws["effect"]], axis=1)
    size = np.sqrt(np.outer(np.diag(exact), np.diag(exact)))
    np.testing.assert_allclose(np.cov(both.T) / size, exact / size, atol=0.2)


def dense(x):
    """Dense sites of several supports, in a plate and out of it, that the data make dependent."""
    shift = numpyro.sample("shift", dist.Normal(0, 0.4))
    with numpyro.plate("parts", 2):
        part = numpyro.sample("part", dist.Normal(0, 0.4))
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    with numpyro.plate("data", len(x)):
        numpyro.sample("x", dist.Normal(shift + part.sum(), scale), obs=x)


def fit(guide, model, *args, num_steps=3000):
    optimiser = optax.adam(optax.cosine_decay_schedule(0.05, num_steps))
    svi = SVI(model, guide, optimiser, Trace_ELBO(num_particles=8))
    return svi.run(jax.random.key(0), num_steps, *args, progress_bar=False).params


@pytest.mark.slow
def test_dense_sites_are_joint_as_in_numpyro():
    """All of them, as ``AutoMultivariateNormal`` has them."""
    x = np.random.default_rng(1).normal(1.0, 0.7, 20)
    own, whole = lc.AutoRowNormal(dense), AutoMultivariateNormal(dense)
    own_params, params = fit(own, dense, x), fit(whole, dense, x)
    tril = np.asarray(params["auto_scale_tril"])
    expected = tril @ tril.T
    found = np.asarray(own.covariances(own_params)[None])
    size = np.sqrt(np.outer(np.diag(expected), np.diag(expected)))
    np.testing.assert_allclose(found / size, expected / size, atol=0.1)
    assert abs(expected[0, 1] / size[0, 1]) > 0.3


def two_plates(users, x, y=None, rows=None, *, counts=None):
    """Users, classes and dense sites, all with several sites and several supports."""
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    shift = numpyro.sample("shift", dist.Normal(0, 1).expand([2]).to_event(1))
    with lc.entity_plate("users", 8, users, counts) as read:
        v = numpyro.sample("v", dist.Normal(0, 1).expand([2]).to_event(1))
        h = numpyro.sample("h", dist.Gamma(2.0, 2.0))
    with lc.class_plate("classes", 12, y, num_sampled=3) as classes:
        w = numpyro.sample("w", dist.Normal(shift, tau).to_event(1))
        s = numpyro.sample("s", dist.Dirichlet(jnp.ones(2)))
    with lc.data_plate("data", 40, rows) as rows:
        u = x[:, :2] + read.rows_of(v, users) * read.rows_of(h, users)[:, None]
        lc.sample_choice("y", u @ w.T + x[:, :2] @ s.T, classes=classes, rows=rows, obs=y)


def one_plate(x, y=None, rows=None):
    """Classes of two sites, and dense sites."""
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    shift = numpyro.sample("shift", dist.Normal(0, 1))
    with lc.class_plate("classes", 12, y, num_sampled=3) as classes:
        w = numpyro.sample("w", dist.Normal(shift, 1).expand([2]).to_event(1))
        b = numpyro.sample("b", dist.Normal(0, tau))
    with lc.data_plate("data", 40, rows) as rows:
        lc.sample_choice("y", x[:, :2] @ w.T + b, classes=classes, rows=rows, obs=y)


USERS = np.resize(np.arange(8), 40)
FEATURES_OF_ROWS, LABELS = (np.asarray(a) for a in make_data())


def following(model):
    return lc.AutoRowNormal(model, follow=["shift"])


def fit_classes(elbo, make_guide=following, num_steps=3):
    """A fit of few sites, which compiles in a fifth of the time of two plates."""
    svi = lc.SubsampledSVI(one_plate, make_guide(one_plate), optax.adagrad(0.1), elbo)
    batches = lc.ArrayBatches(FEATURES_OF_ROWS, LABELS, batch_size=10)
    return svi, svi.run(jax.random.key(0), num_steps, batches=batches, progress_bar=False)


SHAPES = {
    "tau": {"loc": (), "scale": ()},
    "shift": {"loc": (2,), "scale": (2,), "lower": (1,), "follow": (2, 1)},
    "v": {"loc": (8, 2), "scale": (8, 2), "lower": (8, 1), "follow": (8, 2, 2)},
    "h": {"loc": (8,), "scale": (8,), "follow": (8, 1, 4)},
    "w": {"loc": (12, 2), "scale": (12, 2), "lower": (12, 1), "follow": (12, 2, 2)},
    "s": {"loc": (12, 1), "scale": (12, 1), "follow": (12, 1, 4)},
}


@pytest.fixture(scope="module")
def two():
    counts = lc.EntityCounts.of(8, USERS)

    def model(*args):
        two_plates(*args, counts=counts)

    svi = lc.SubsampledSVI(model, following(model), optax.adagrad(0.1), TraceMeanField_ELBO())
    batches = lc.ArrayBatches(USERS, FEATURES_OF_ROWS, LABELS, batch_size=10)
    return svi, svi.run(jax.random.key(0), 30, batches=batches, progress_bar=False)


@pytest.mark.slow
def test_parameters_are_rows_of_their_plates(two):
    shapes = {k: v.shape for k, v in two[1].params.items() if "_auto_" in k}
    expected = {f"{s}_auto_{w}": x for s, of in SHAPES.items() for w, x in of.items()}
    assert shapes == expected
    assert np.isfinite(two[1].losses).all()


@pytest.mark.slow
def test_a_fit_is_read_at_its_centre_and_over_draws(two):
    fitted = lc.Fitted.from_svi(*two, chunk_size=5)
    new = fitted.on(USERS[:4], FEATURES_OF_ROWS[:4])
    draws = {"rng_key": jax.random.key(1), "num_draws": 2}
    centre, drawn = new.top_classes(2), new.top_classes(2, **draws)
    assert centre.classes.shape == drawn.classes.shape == (4, 2)
    whole = lc.Fitted.from_svi(*two).on(USERS[:4], FEATURES_OF_ROWS[:4])
    log_likelihood = new.log_likelihood(LABELS[:4], **draws)
    np.testing.assert_allclose(log_likelihood, whole.log_likelihood(LABELS[:4], **draws), 1e-5)
    posterior = new.to_arviz(rng_key=jax.random.key(2), num_draws=3)["posterior"]
    assert posterior["v"].shape == (1, 3, 8, 2)
    assert posterior["w"].shape == (1, 3, 12, 2)


@pytest.mark.slow
def test_quantiles_ascend_where_the_transform_falls() -> None:
    """Values below a bound fall with the free ones."""

    def model():
        with lc.class_plate("classes", 3):
            numpyro.sample("w", dist.TruncatedNormal(0.0, 1.0, high=0.5))

    guide = lc.AutoRowNormal(model)
    with numpyro.handlers.seed(rng_seed=0), numpyro.handlers.trace() as trace:
        guide()
    params = {name: site["value"] for name, site in trace.items() if site["type"] == "param"}
    levels = jnp.array([0.1, 0.5, 0.9])
    draws = guide.sample_posterior(jax.random.key(0), params, sample_shape=(1000,))["w"]
    found = guide.quantiles(params, levels)["w"]
    assert (jnp.diff(found, axis=0) > 0).all()
    for level, quantile in zip(levels, found, strict=True):  # within five standard errors
        np.testing.assert_allclose((draws < quantile).mean(0), level, atol=0.08)


@pytest.mark.slow
def test_draws_of_whole_tables_have_the_covariances_and_quantiles(two):
    """20,000 draws; variances within 8 of their standard errors, quantiles likewise."""
    svi, params = two[0], two[1].params
    draws = svi.guide.sample_posterior(jax.random.key(3), params, sample_shape=(20_000,))
    covariances = svi.guide.covariances(params)
    assert {k: v.shape for k, v in covariances.items()} == {
        None: (3, 3),
        "users": (8, 3, 3),
        "classes": (12, 3, 3),
    }
    free = np.concatenate([draws["v"], np.log(draws["h"])[..., None]], axis=-1)
    for user in range(8):
        expected = np.asarray(covariances["users"][user])
        size = np.sqrt(np.outer(np.diag(expected), np.diag(expected)))
        difference = np.cov(free[:, user].T) - expected
        assert (np.abs(difference) < 8 * (2 / 20_000) ** 0.5 * size).all()
    quantiles = svi.guide.quantiles(params, jnp.array([0.2, 0.5]))
    assert quantiles["s"].shape == (2, 12, 2)
    np.testing.assert_allclose((draws["h"] < quantiles["h"][0]).mean(0), 0.2, atol=0.02)
    np.testing.assert_allclose(quantiles["w"][1], svi.guide.median(params)["w"], rtol=1e-6)


@pytest.mark.slow
def test_both_losses_agree_on_average():
    """The closed form and the draw: means over 400 keys within 5 standard errors."""
    svi, result = fit_classes(TraceMeanField_ELBO())
    args = (FEATURES_OF_ROWS[:10], LABELS[:10], jnp.arange(10))
    found = []
    for elbo in (TraceMeanField_ELBO(), Trace_ELBO()):
        own = lc.SubsampledSVI(svi.model, svi.guide, svi.optim, elbo)
        state = own.init(jax.random.key(0), *args)._replace(optim_state=result.state.optim_state)
        keys = jax.random.split(jax.random.key(1), 400)
        of_key = jax.jit(lambda key, own=own, s=state: own.evaluate(s._replace(rng_key=key), *args))
        losses = np.array([of_key(key) for key in keys])
        found.append((losses.mean(), losses.std() / 20))
    (a, a_error), (b, b_error) = found
    assert abs(a - b) < 5 * np.hypot(a_error, b_error)


@pytest.mark.slow
def test_it_runs_in_float64(x64):
    result = fit_classes(Trace_ELBO(num_particles=2))[1]
    assert all(v.dtype == jnp.float64 for k, v in result.params.items() if "_auto_" in k)
    assert np.isfinite(result.losses).all()


def test_a_step_in_float64_gives_what_it_takes(x64):
    """Types alone are followed; nothing is compiled."""
    loss = Trace_ELBO(num_particles=2)
    svi = lc.SubsampledSVI(one_plate, following(one_plate), optax.adagrad(0.1), loss)
    args = (np.float64(FEATURES_OF_ROWS[:10]), LABELS[:10], np.arange(10))
    state = jax.eval_shape(lambda key: svi.init(key, *args), jax.random.key(0))
    after, loss = jax.eval_shape(lambda state: svi.update(state, *args), state)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), (after, loss)) == jax.tree.map(
        lambda x: (x.shape, x.dtype), (state, jax.ShapeDtypeStruct((), jnp.float64))
    )
    params = jax.eval_shape(svi.get_params, state)
    assert {v.dtype for k, v in params.items() if "_auto_" in k} == {jnp.dtype("float64")}


@pytest.mark.slow
def test_it_is_a_part_of_a_list():
    def make(model):
        guide = AutoGuideList(model)
        guide.append(lc.AutoRowNormal(block(model, hide=["tau", "b"]), follow=["shift"]))
        guide.append(AutoNormal(block(model, hide=["shift", "w"])))
        return guide

    result = fit_classes(Trace_ELBO(), make)[1]
    assert np.isfinite(result.losses).all()
    assert "w_auto_follow" in result.params and "b_auto_follow" not in result.params


def step_of(num_categories):
    """Compile one donated update."""

    def model(x, y, rows):
        numpyro.sample("tau", dist.HalfNormal(1.0))
        with lc.class_plate("classes", num_categories, y, 8) as classes:
            w = numpyro.sample("w", dist.Normal(0, 1).expand([4]).to_event(1))
            b = numpyro.sample("b", dist.Normal(0, 1))
        with lc.data_plate("data", 100, rows) as rows:
            lc.sample_choice("y", x @ w.T + b, classes=classes, rows=rows, obs=y)

    guide, loss = lc.AutoRowNormal(model, follow=["tau"]), TraceMeanField_ELBO()
    svi = lc.SubsampledSVI(model, guide, optax.adam(0.1), loss)
    args = (jnp.ones((16, 4)), jnp.arange(16), jnp.arange(16))
    state = jax.eval_shape(lambda key: svi.init(key, *args), jax.random.key(0))
    return jax.jit(svi.update, donate_argnums=0).lower(state, *args).compile()


@pytest.mark.slow
def test_the_cost_of_a_step_does_not_grow_with_the_classes():
    """The same scratch memory at K = 10**3 and 10**5, and no table is copied."""
    small, large = step_of(1_000), step_of(100_000)
    scratch = [step.memory_analysis().temp_size_in_bytes for step in (small, large)]
    assert scratch[0] == scratch[1]
    assert not re.findall(r"copy\(f32\[100000", large.as_text())
    flops = [step.cost_analysis()["flops"] for step in (small, large)]
    assert flops[1] == pytest.approx(flops[0], rel=0.02)


def in_two_plates():
    with numpyro.plate("features", 3, dim=-2), lc.class_plate("classes", 4):
        numpyro.sample("w", dist.Normal(0, 1))


def with_an_axis_of_no_plate():
    with lc.class_plate("classes", 4):
        numpyro.sample("w", dist.Normal(0, 1).expand([3, 4]))


def of_one_class():
    with lc.class_plate("classes", 4):
        numpyro.sample("w", dist.Normal(0, 1))


@pytest.mark.filterwarnings("ignore:Missing a plate statement:UserWarning")  # NumPyro's own word
@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        (in_two_plates, NotImplementedError, r"'w' is inside plates.*to_event.*AutoGuideList"),
        (with_an_axis_of_no_plate, ValueError, r"'w' inside plate 'classes'.*\(3, 4\).*to_event"),
        (block(of_one_class, expose=["w"]), ValueError, "is hidden by"),
    ],
    ids=["two plates", "an axis", "hidden plate"],
)
def test_what_it_cannot_draw_together_is_refused(model, error, message):
    with pytest.raises(error, match=message):
        jax.eval_shape(seed(lc.AutoRowNormal(model), 0))


def with_a_late_site():
    with lc.class_plate("classes", 4):
        numpyro.sample("w", dist.Normal(0, 1))
    numpyro.sample("late", dist.Normal(0, 1))


@pytest.mark.parametrize(
    ("follow", "message"),
    [
        ("w", r"`follow` must name dense sites that this guide draws, \['late'\]; got 'w'"),
        ("late", "'late', which the model draws after site 'w'"),
    ],
)
def test_rows_cannot_follow_rows_or_what_comes_later(follow, message):
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(seed(lc.AutoRowNormal(with_a_late_site, follow=[follow]), 0))


@pytest.mark.parametrize("init_scale", [0.0, -1.0])
def test_a_scale_that_is_not_positive_is_refused(init_scale):
    with pytest.raises(ValueError, match="`init_scale` must be positive"):
        lc.AutoRowNormal(dense, init_scale=init_scale)


def test_start_values_are_those_asked_for():
    guide = lc.AutoRowNormal(dense, init_scale=0.3)

    @jax.jit
    def values(x):
        sites = trace(seed(guide, 0)).get_trace(x)
        return {name: site["value"] for name, site in sites.items()}

    found = values(np.ones(3))
    assert found["part_auto_loc"].tolist() == [0, 0]
    np.testing.assert_allclose(found["part_auto_scale"], 0.3)
    assert not np.any(found["part_auto_follow"])


WIDTH = 8
DIRECTION = np.linspace(0.1, 0.5, WIDTH)


def along_a_direction(groups, x, rows=None, *, counts):
    """Eight values of each group, of which the data see one sum: covariances I less rank 1."""
    with lc.entity_plate("groups", NUM_GROUPS, groups, counts) as read:
        w = numpyro.sample("w", dist.Normal(0, 1).expand([WIDTH]).to_event(1))
    mean = (read.rows_of(w, groups) * DIRECTION).sum(-1)
    with lc.data_plate("data", NUM_GROUPS * NUM_ROWS, rows):
        numpyro.sample("x", dist.Normal(mean, NOISE), obs=x)


GROUPS = np.repeat(np.arange(NUM_GROUPS), NUM_ROWS)


def low_rank(rank, num_steps=1):
    model = partial(along_a_direction, counts=lc.EntityCounts.of(NUM_GROUPS, GROUPS))
    optimiser = optax.adam(optax.cosine_decay_schedule(0.05, num_steps))
    loss = TraceMeanField_ELBO(num_particles=4)
    return lc.SubsampledSVI(model, lc.AutoRowNormal(model, rank=rank), optimiser, loss)


def fit_low_rank(num_steps):
    batches = lc.ArrayBatches(GROUPS, X.ravel(), batch_size=30)
    svi = low_rank(1, num_steps)
    result = svi.run(jax.random.key(0), num_steps, batches=batches, progress_bar=False)
    return svi.guide, result.params


def shapes_of_rank(rank):
    """A guide, and the shapes of its parameters, that nothing is computed for."""
    svi = low_rank(rank)

    def start(key):
        return svi.get_params(svi.init(key, GROUPS, X.ravel()))

    return svi.guide, jax.eval_shape(start, jax.random.key(0))


@pytest.mark.slow
def test_low_rank_has_rows_of_two_narrow_matrices():
    guide, params = fit_low_rank(2)
    shapes = {name.removeprefix("w_auto_"): value.shape for name, value in params.items()}
    rows, narrow = (NUM_GROUPS, WIDTH), (NUM_GROUPS, WIDTH, 1)
    assert shapes == {"loc": rows, "scale": rows, "left": narrow, "right": narrow}
    draws = guide.sample_posterior(jax.random.key(0), params, sample_shape=(3,))
    assert draws["w"].shape == (3, *rows)


def test_low_rank_is_full_where_that_has_fewer_numbers():
    guide, params = shapes_of_rank(2)  # 32 numbers, and 28 below the diagonal
    assert params["w_auto_lower"].shape == (NUM_GROUPS, WIDTH * (WIDTH - 1) // 2)
    covariances = jax.eval_shape(guide.covariances, params)["groups"]
    assert covariances.shape == (NUM_GROUPS, WIDTH, WIDTH)


@pytest.mark.slow
def test_low_rank_finds_a_covariance_of_its_form():
    """Mean field has the sds of each value given the others."""
    guide, params = fit_low_rank(6_000)
    precision = np.eye(WIDTH) + NUM_ROWS / NOISE**2 * np.outer(DIRECTION, DIRECTION)
    exact = np.linalg.inv(precision)
    sd = np.sqrt(np.diag(exact))
    assert (1 / np.sqrt(np.diag(precision)) < 0.6 * sd).any()  # there is something to find
    found = np.asarray(guide.covariances(params)["groups"])
    found_sd = np.sqrt(np.einsum("gdd->gd", found))
    np.testing.assert_allclose(found_sd / sd, 1, atol=0.15)
    np.testing.assert_allclose(
        found / np.outer(sd, sd), np.broadcast_to(exact / np.outer(sd, sd), found.shape), atol=0.15
    )


def test_a_rank_below_one_is_refused():
    with pytest.raises(ValueError, match=r"`rank` must be .*at least 1.*got 0"):
        lc.AutoRowNormal(along_a_direction, rank=0)


def test_parameters_of_another_rank_are_refused():
    low, params = shapes_of_rank(1)
    full, others = shapes_of_rank(None)
    with pytest.raises(ValueError, match=r"they lack \['w_auto_left', 'w_auto_right'\]"):
        low.covariances(others)
    with pytest.raises(ValueError, match=r"they lack \['w_auto_lower'\].*`rank`"):
        full.quantiles(params, 0.5)


def test_priors_without_a_mean_start_at_a_median():
    """FALSE_ALARM = 1e-4: medians of 15 draws of a half Cauchy are between 0.1 and 10."""

    def horseshoe(y=None):
        with lc.class_plate("classes", 30, y, num_sampled=3) as classes:
            spread = numpyro.sample("spread", dist.HalfCauchy(1.0))
            w = numpyro.sample("w", dist.Normal(0, spread))
        with lc.data_plate("data", 2) as rows:
            lc.sample_choice("y", w[None].repeat(2, 0), classes=classes, rows=rows, obs=y)

    guide = lc.AutoRowNormal(horseshoe)
    svi = lc.SubsampledSVI(horseshoe, guide, optax.adam(0.01), TraceMeanField_ELBO())
    state = svi.init(jax.random.key(0), jnp.array([3, 7]))
    median = guide.median(svi.get_params(state))
    assert ((median["spread"] > 0.1) & (median["spread"] < 10)).all()
    assert (median["w"] == 0).all()
