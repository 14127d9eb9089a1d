# SPDX-License-Identifier: Apache-2.0
"""The bound of importance-weighted rows: its value, what reads which row, and what is refused."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import lax, random
from jax.test_util import check_grads
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoDelta, AutoNormal
from scipy.special import logsumexp
from scipy.stats import multivariate_normal

import numpyro_largecat as lc
from numpyro_largecat.svi.step import gather_step

SD, NOISE = 1.5, 0.7
PEOPLE = 5
# Of each observation, whose it is: 2, 1, 3, 1 and none.
OF_ROW = np.array([3, 0, 2, 0, 2, 1, 2])
X = np.array([0.3, -1.0, 2.0, 0.4, 1.1, -0.6, 0.2], np.float32)


def people_apart(ids, x, rows=None, size=PEOPLE, all_ids=OF_ROW, counts=None):
    """Observations around the effect of a person each."""
    counts = lc.EntityCounts.of(size, all_ids) if counts is None else counts
    with lc.entity_plate("people", size, ids, counts) as read:
        z = numpyro.sample("z", dist.Normal(0, SD))
    with lc.data_plate("data", len(all_ids), rows):
        numpyro.sample("x", dist.Normal(read.rows_of(z, ids), NOISE), obs=x)


def exact_guide(ids, x, rows=None, size=PEOPLE, all_ids=OF_ROW):
    """The exact posterior of each person: all draws have the same weight."""
    number = np.bincount(all_ids, minlength=size)
    sums = np.bincount(all_ids, X[: len(all_ids)], size)
    precision = 1 / SD**2 + number / NOISE**2
    counts = lc.EntityCounts.of(size, all_ids)
    with lc.entity_plate("people", size, ids, counts) as read:
        mean = jnp.asarray(sums / NOISE**2 / precision)[read.indices]
        sd = jnp.asarray(precision**-0.5)[read.indices]
        numpyro.sample("z", dist.Normal(mean, sd))


def log_evidence(x, groups):
    """Of observations around normal effects of their groups."""
    same = groups[:, None] == groups
    return multivariate_normal(cov=NOISE**2 * np.eye(len(x)) + SD**2 * same).logpdf(x)


def loss(model, guide, *args, num_draws=4, plate="people", key=0, params=None, **kwargs):
    """The loss outside of ``jit``."""
    elbo = lc.ImportanceWeighted_ELBO(plate, num_draws)
    return elbo.loss(random.key(key), params or {}, model, guide, *args, **kwargs)


@pytest.mark.parametrize("num_draws", [1, 3])
def test_with_the_exact_guide_it_is_the_evidence(num_draws):
    """Whoever has no observation, and rows of padding, count nothing."""
    got = -loss(people_apart, exact_guide, OF_ROW, X, num_draws=num_draws)
    np.testing.assert_allclose(got, log_evidence(X, OF_ROW), rtol=1e-5)


def test_minibatches_of_whole_people_average_to_the_evidence():
    """Three minibatches with one observation of one person each, of three."""
    ids = np.array([2, 0, 1])
    parts = [
        -loss(people_apart, exact_guide, ids[[n]], X[[n]], np.array([n]), size=4, all_ids=ids)
        for n in range(3)
    ]
    everything = log_evidence(X[:3], np.arange(3)), X[ids.argsort()]
    assert len(set(map(float, parts))) == 3
    # The guide of person e is that of its own observation.
    np.testing.assert_allclose(np.mean(parts), everything[0], rtol=1e-5)


def test_observations_of_nobody_count_as_they_do():
    """Their log density, of an effect of 0, is added whichever row they are counted with."""
    ids = np.append(OF_ROW, -1)
    x = np.append(X, np.float32(0.9))
    sums = np.bincount(OF_ROW, X, PEOPLE)
    precision = 1 / SD**2 + np.bincount(OF_ROW, minlength=PEOPLE) / NOISE**2

    def guide(ids, x, all_ids=ids):
        with lc.entity_plate("people", PEOPLE, ids, lc.EntityCounts.of(PEOPLE, all_ids)) as read:
            mean = jnp.asarray(sums / NOISE**2 / precision)[read.indices]
            numpyro.sample("z", dist.Normal(mean, jnp.asarray(precision**-0.5)[read.indices]))

    got = -loss(people_apart, guide, ids, x, all_ids=ids)
    wanted = log_evidence(X, OF_ROW) - 0.5 * (0.9 / NOISE) ** 2 - np.log(NOISE * (2 * np.pi) ** 0.5)
    np.testing.assert_allclose(got, wanted, rtol=1e-5)


def test_nobody_may_be_in_several_rows_of_a_minibatch():
    """Two minibatches, one of two people, the other of somebody and twice of nobody."""
    ids = np.array([2, 0, 1, 3, -1, -1])
    x = np.append(X[:4], np.float32([0.9, -0.3]))
    precision = 1 / SD**2 + 1 / NOISE**2
    of_person = jnp.zeros(4).at[ids[:4]].set(X[:4] / NOISE**2 / precision)

    def guide(ids_of_rows, x, rows=None, size=4, all_ids=ids):
        counts = lc.EntityCounts.of(size, all_ids)
        with lc.entity_plate("people", size, ids_of_rows, counts) as read:
            numpyro.sample("z", dist.Normal(of_person[read.indices], precision**-0.5))

    parts = [
        -loss(people_apart, guide, ids[rows], x[rows], rows, size=4, all_ids=ids)
        for rows in (np.array([0, 1, 2]), np.array([3, 4, 5]))
    ]
    nobody = -0.5 * (x[4:] / NOISE) ** 2 - np.log(NOISE * (2 * np.pi) ** 0.5)
    wanted = log_evidence(X[:4], np.arange(4)) + nobody.sum()
    np.testing.assert_allclose(np.mean(parts), wanted, rtol=1e-5)


def rows_inside(x, rows=None, num_rows=3):
    """Rows of a data plate with two measurements of each."""
    loc = numpyro.sample("loc", dist.Normal(0, 2))
    with lc.data_plate("people", num_rows, rows, dim=-2):
        z = numpyro.sample("z", dist.Normal(loc, SD))
        with numpyro.plate("twice", 2):
            numpyro.sample("x", dist.Normal(z, NOISE), obs=x)


def normal_guide(x, rows=None, num_rows=3):
    """Normals that are not the posterior."""
    numpyro.sample("loc", dist.Normal(0.4, 0.8))
    with lc.data_plate("people", num_rows, rows, dim=-2):
        scale = numpyro.param("scale", jnp.array(0.9))
        numpyro.sample("z", dist.Normal(0.2, scale))


TWICE = np.array([[0.3, 1.0], [-0.4, 0.1], [1.2, -0.8]])


def test_padding_that_is_masked_counts_nothing():
    """Of three people one has two measurements, and the others one; the guide is exact."""
    made = np.array([[True, False], [True, True], [True, False]])
    sums, number = (TWICE * made).sum(1), made.sum(1)
    precision = (1 / SD**2 + number / NOISE**2)[:, None]

    def model(x):
        with lc.data_plate("people", 3, dim=-2):
            z = numpyro.sample("z", dist.Normal(0, SD))
            with numpyro.plate("twice", 2), numpyro.handlers.mask(mask=made):
                numpyro.sample("x", dist.Normal(z, NOISE), obs=x)

    def guide(x):
        with lc.data_plate("people", 3, dim=-2):
            mean = sums[:, None] / NOISE**2 / precision
            numpyro.sample("z", dist.Normal(mean, precision**-0.5))

    wanted = log_evidence(TWICE[made], np.repeat(np.arange(3), number))
    np.testing.assert_allclose(-loss(model, guide, TWICE), wanted, rtol=1e-5)


@pytest.mark.parametrize("num_draws", [1, 2])
@pytest.mark.parametrize("batches", [[[0, 1, 2]], [[0], [1], [2]]], ids=["all", "minibatches"])
def test_the_value_is_that_of_the_equation(num_draws, batches):
    """Its mean over 40,000 keys is the integral by quadrature, within four standard errors.

    So is the mean over minibatches of one row each, with keys of their own.
    """
    nodes, weights = np.polynomial.hermite_e.hermegauss(40)
    weights = weights / weights.sum()

    def log_normal(x, mean, sd):
        return -0.5 * ((x - mean) / sd) ** 2 - np.log(sd) - 0.5 * np.log(2 * np.pi)

    def log_weight(loc, z, x):
        ratio = log_normal(z, loc, SD) - log_normal(z, 0.2, 0.9)
        return ratio + log_normal(x[0], z, NOISE) + log_normal(x[1], z, NOISE)

    wanted = 0.0
    for node, weight in zip(nodes, weights, strict=True):
        loc = 0.4 + 0.8 * node
        inner = log_normal(loc, 0, 2) - log_normal(loc, 0.4, 0.8)
        for x in TWICE:
            w = log_weight(loc, 0.2 + 0.9 * nodes, x)
            if num_draws == 1:
                inner += weights @ w
            else:
                pairs = logsumexp([w[:, None] + 0 * w, w + 0 * w[:, None]], axis=0) - np.log(2)
                inner += weights @ pairs @ weights
        wanted += weight * inner

    elbo = lc.ImportanceWeighted_ELBO("people", num_draws)

    def one(key):
        keys = random.split(key, len(batches))
        return -sum(
            elbo.loss(own, {}, rows_inside, normal_guide, TWICE[rows], np.array(rows))
            for own, rows in zip(keys, batches, strict=True)
        ) / len(batches)

    many = jax.jit(lambda keys: lax.map(one, keys, batch_size=1000))
    values = np.asarray(many(random.split(random.key(3), 40_000)))
    assert abs(values.mean() - wanted) < 4 * values.std() / 200


def test_gradients_are_those_of_the_value():
    """The checks on the way take no part in them."""
    with jax.enable_x64(True):
        value = jax.jit(lambda x: loss(rows_inside, normal_guide, TWICE, params={"scale": x}))
        check_grads(value, (jnp.array(0.9),), order=1, modes=("rev",))


def test_particles_are_draws_of_the_dense_sites():
    """Their mean, at once or one after the other, and under ``jit`` and ``vmap``."""
    args = rows_inside, normal_guide, TWICE
    single = lc.ImportanceWeighted_ELBO("people", 2)
    one = jax.jit(lambda key: single.loss(key, {}, *args))
    wanted = np.mean([one(key) for key in random.split(random.key(1), 3)])
    for vectorized in (True, False):
        elbo = lc.ImportanceWeighted_ELBO("people", 2, 3, vectorized)
        traced = jax.jit(lambda key, elbo=elbo: elbo.loss(key, {}, *args))
        np.testing.assert_allclose(traced(random.key(1)), wanted, rtol=1e-5)
        np.testing.assert_allclose(jax.vmap(traced)(random.key(1)[None])[0], wanted, rtol=1e-5)


def test_gradients_of_all_parameters_are_those_of_the_value():
    """Of constrained rows too, whose covariance and dense sites are guided by AutoRowNormal."""

    def model(x, rows=None):
        rate = numpyro.sample("rate", dist.HalfNormal(1))
        ids = np.arange(3)
        with lc.entity_plate("people", 3, ids, lc.EntityCounts.of(3, ids)) as read:
            z = numpyro.sample("z", dist.Gamma(2.0, rate))
            p = numpyro.sample("p", dist.Dirichlet(jnp.ones(2)))
        with lc.data_plate("data", 3, rows):
            mean = read.rows_of(z[:, None] * p, ids)
            numpyro.sample("x", dist.Normal(mean, NOISE).to_event(1), obs=x)

    with jax.enable_x64(True):
        guide = lc.AutoRowNormal(model, follow=["rate"])
        svi = lc.SubsampledSVI(
            model, guide, optax.sgd(1.0), lc.ImportanceWeighted_ELBO("people", 3)
        )
        state = svi.init(random.key(0), TWICE)
        step = gather_step(svi.plan, state, (TWICE,), {})
        value = jax.jit(lambda params: step.loss(params)[0])
        check_grads(value, (step.params,), order=1, modes=("rev",))


def test_it_is_a_loss_of_numpyro_too():
    """As with ``SVI``, where all rows are held."""
    svi = SVI(
        rows_inside, AutoNormal(rows_inside), optax.adam(0.05), lc.ImportanceWeighted_ELBO("people")
    )
    run = svi.run(random.key(0), 200, TWICE, progress_bar=False)
    assert run.losses[-20:].mean() < run.losses[:20].mean()


def test_subsampled_steps_in_a_scan_learn():
    """Losses fall, all that a minibatch has not are rows of the tables."""
    x = random.normal(random.key(0), (40, 2)) * 2
    guide = lc.AutoRowNormal(rows_inside)
    svi = lc.SubsampledSVI(
        rows_inside, guide, optax.adam(0.05), lc.ImportanceWeighted_ELBO("people", 4)
    )
    state = svi.init(random.key(0), x[:8], np.arange(8), num_rows=40)

    def step(state, key):
        rows = random.choice(key, 40, (8,), replace=False)
        return svi.update(state, x[rows], rows, num_rows=40)

    _, losses = lax.scan(step, state, random.split(random.key(1), 300))
    assert losses[-50:].mean() < losses[:50].mean()


def test_memory_of_a_step_does_not_grow_with_the_people():
    """The temporaries of a compiled step are the same with ten times as many."""
    sizes = []
    for size in (1_000, 10_000):
        ids = np.arange(size)
        kwargs = {"size": size, "all_ids": ids, "counts": lc.EntityCounts.of(size, ids)}
        svi = lc.SubsampledSVI(
            people_apart,
            AutoNormal(people_apart),
            optax.adam(0.1),
            lc.ImportanceWeighted_ELBO("people"),
            **kwargs,
        )
        batch = ids[:8], np.ones(8, np.float32), ids[:8]
        state = svi.init(random.key(0), *batch)
        step = jax.jit(svi.update, donate_argnums=0).lower(state, *batch).compile()
        sizes.append(step.memory_analysis().temp_size_in_bytes)
    assert sizes[0] == sizes[1]


# --- What is refused ---------------------------------------------------------------------------


def refused(model, guide, *args, **kwargs):
    """The error of a loss outside of ``jit``, which is NaN inside, as its gradient is.

    Of twenty keys, which draw halves of the rows, at least five must show it.
    """
    traced = jax.jit(
        jax.value_and_grad(
            lambda c, key: loss(*_shifted(model, c), guide, *args, key=key, **kwargs)
        )
    )
    said, num_nan = [], 0
    for key in range(20):
        value, slope = traced(0.0, key)
        assert np.isnan(value) == np.isnan(slope)
        num_nan += np.isnan(value)
        try:
            loss(model, guide, *args, key=key, **kwargs)
        except ValueError as error:
            said.append(str(error))
    assert min(num_nan, len(said)) >= 5 and len(set(said)) == 1
    return said[0]


def _shifted(model, constant):
    """The model with a factor that depends on something to be differentiated."""

    def shifted(*args, **kwargs):
        numpyro.factor("constant", jnp.asarray(constant))
        model(*args, **kwargs)

    return (shifted,)


def test_people_of_whom_observations_lack_are_refused():
    """Person 2 has three, of which the minibatch has one."""
    rows = np.array([4, 1, 3])
    said = refused(people_apart, exact_guide, OF_ROW[rows], X[rows], rows)
    assert "rows of plate 'people' has not the weight" in said


def test_a_run_of_a_refused_model_raises_at_its_first_step():
    """Nothing has been fitted then."""
    guide = AutoNormal(people_apart)
    loss = lc.ImportanceWeighted_ELBO("people")
    svi = lc.SubsampledSVI(people_apart, guide, optax.adam(0.1), loss)
    batches = lc.ArrayBatches(OF_ROW, X, batch_size=2)
    with pytest.raises(ValueError, match="something of the rows of plate 'people' has not"):
        svi.run(random.key(0), 5, batches=batches, progress_bar=False)


def test_what_was_fitted_is_kept_where_a_later_step_is_refused():
    """The fit ends with a warning that says why, in place of a general advice."""

    def model(x, is_bad):
        with numpyro.plate("people", 8):
            z = numpyro.sample("z", dist.Normal(0, 1))
            numpyro.sample("x", dist.Normal(z + is_bad[0] * z.mean(), 0.5), obs=x)

    loss = lc.ImportanceWeighted_ELBO("people", 2)
    svi = lc.SubsampledSVI(model, AutoNormal(model), optax.adam(0.1), loss)
    steps = [(np.zeros(8, np.float32), np.full(1, step >= 2, np.float32)) for step in range(4)]
    with pytest.warns(RuntimeWarning, match="at step 2 of 4: something of a row of plate 'people'"):
        run = svi.run(random.key(0), 4, batches=iter(steps), progress_bar=False)
    assert np.isfinite(run.losses[:2]).all()


@pytest.mark.parametrize("is_plain", [True, False])
def test_a_plate_whose_rows_nothing_observed_is_known_to_read_is_refused(is_plain):
    """All rows, which are taken by `z[ids]`, or read in a full entity plate."""

    def model(x):
        if is_plain:
            with numpyro.plate("people", PEOPLE):
                z = numpyro.sample("z", dist.Normal(0, SD))[OF_ROW]
        else:
            with lc.entity_plate("people", PEOPLE) as read:
                z = read.rows_of(numpyro.sample("z", dist.Normal(0, SD)), OF_ROW)
        with numpyro.plate("data", len(OF_ROW)):
            numpyro.sample("x", dist.Normal(z, NOISE), obs=x)

    svi = SVI(model, AutoNormal(model), optax.adam(0.1), lc.ImportanceWeighted_ELBO("people"))
    with pytest.raises(ValueError, match="nothing that is observed is known to belong to a row"):
        svi.run(random.key(0), 3, X, progress_bar=False)


@pytest.mark.parametrize("of_others", [lambda z: z.mean(), lambda z: z[::-1], lambda z: z.max()])
def test_observations_that_depend_on_other_rows_are_refused(of_others):
    """By a mean, by place, or by an extreme."""
    x = np.zeros(8, np.float32)

    def model(x):
        with numpyro.plate("people", 8):
            z = numpyro.sample("z", dist.Normal(0, 1))
            numpyro.sample("x", dist.Normal(z + of_others(z), 0.5), obs=x)

    assert "depends on other rows" in refused(model, AutoNormal(model), x, params=_params(model, x))


def test_what_is_outside_and_depends_on_rows_is_refused():
    """A sum that is to be near 0."""

    def model(x):
        with numpyro.plate("people", 4):
            z = numpyro.sample("z", dist.Normal(0, 1))
            numpyro.sample("x", dist.Normal(z, 0.5), obs=x)
        numpyro.factor("sum", -(z.sum() ** 2))

    assert "what is outside depends on any" in refused(
        model, AutoNormal(model), X[:4], params=_params(model, X[:4])
    )


def test_observations_of_two_people_each_are_refused():
    """They belong to no one row."""
    pairs = np.array([[0, 1], [1, 2], [2, 0]])

    def guide(x):
        with lc.entity_plate("people", 3, pairs, lc.EntityCounts.of(3, pairs)) as read:
            z = numpyro.sample("z", dist.Normal(0, 1))
        return read, z

    def model(x):
        read, z = guide(x)
        with lc.data_plate("data", 3):
            numpyro.sample("x", dist.Normal(read.rows_of(z, pairs).sum(-1), 0.5), obs=x)

    with pytest.raises(ValueError, match="with one id in `ids` for each row"):
        loss(model, guide, X[:3])


@pytest.mark.parametrize("num_rows", [2, 300])
def test_dependence_shows_beside_large_log_densities(num_rows):
    """And of two rows; a sum of squares of 100,000 observations is outside."""
    big = np.asarray(random.normal(random.key(0), (100_000,)))

    def model(x):
        with numpyro.plate("people", num_rows):
            z = numpyro.sample("z", dist.Normal(0, 1))
            numpyro.sample("x", dist.Normal(z, 0.5), obs=x)
        numpyro.factor("sum", -0.5 * (z.mean() / 0.01) ** 2)
        with numpyro.plate("others", len(big)):
            numpyro.sample("big", dist.Normal(0, 1), obs=big)

    x = np.zeros(num_rows, np.float32)
    said = refused(model, AutoNormal(model), x, params=_params(model, x))
    assert "what is outside depends on any" in said


def test_a_hard_constraint_on_all_rows_is_refused():
    """It is 0 or -inf."""

    def model(x):
        with numpyro.plate("people", 4):
            z = numpyro.sample("z", dist.Normal(0, 1))
            numpyro.sample("x", dist.Normal(z, 0.5), obs=x)
        numpyro.factor("sum", jnp.where(z.sum() > 0.6, 0.0, -jnp.inf))

    def guide(x):
        with numpyro.plate("people", 4):
            numpyro.sample("z", dist.Normal(0, 1))

    found = [loss_or_error(model, guide, X[:4], key) for key in range(40)]
    assert sum("depends on any" in str(one) for one in found) >= 8


def loss_or_error(model, guide, x, key):
    """The loss, or what is said in its place."""
    try:
        return loss(model, guide, x, key=key)
    except ValueError as error:
        return error


def test_rows_on_a_simplex_are_not_refused():
    """Drawn values that are transformed back lose all digits in float32."""

    def model(x):
        with numpyro.plate("people", 40):
            z = numpyro.sample("z", dist.Dirichlet(jnp.full(50, 0.05)))
            numpyro.sample("x", dist.Multinomial(total_count=100, probs=z), obs=x)

    x = np.full((40, 50), 2)
    guide = AutoNormal(model)
    params = _params(model, x)
    traced = jax.jit(lambda key: loss(model, guide, x, key=key, params=params))
    assert not any(np.isnan(traced(key)) for key in range(20))


def test_a_full_class_plate_as_long_as_the_minibatch_reads_no_rows():
    """Three classes, three people: their prior belongs to no row."""
    ids = np.arange(3)
    counts = lc.EntityCounts.of(3, ids)

    def sites():
        with lc.class_plate("classes", 3) as classes:
            b = numpyro.sample("b", dist.Normal(0, 1))
        with lc.entity_plate("people", 3, ids, counts) as read:
            z = numpyro.sample("z", dist.Normal(0, 1))
        return classes, b, read.rows_of(z, ids)

    def model(y):
        classes, b, z = sites()
        for name in ("first", "second"):  # two plates that read
            with numpyro.plate(name, 3):
                utilities = lc.UtilityCategorical(b + z[:, None] * np.arange(3.0), classes)
                numpyro.sample(f"y_{name}", utilities, obs=y)

    def guide(y):
        sites()

    losses = [loss(model, guide, ids, key=key) for key in range(20)]
    assert np.isfinite(losses).all()


def test_two_plates_that_may_read_need_a_data_plate():
    """As many times as people."""
    ids = np.arange(3)
    counts = lc.EntityCounts.of(3, ids)

    def guide(x):
        with lc.entity_plate("people", 3, ids, counts) as read:
            z = numpyro.sample("z", dist.Normal(0, SD))
        return read.rows_of(z, ids)

    def model(x, plate=numpyro.plate):
        z = guide(x)
        with plate("data", 3, dim=-2), numpyro.plate("times", 3):
            numpyro.sample("x", dist.Normal(z[:, None], NOISE), obs=x)

    x = np.ones((3, 3), np.float32)
    with pytest.raises(
        ValueError, match="is in the plates \\['data', 'times'\\], which have as many"
    ):
        loss(model, guide, x)
    model.__defaults__ = (lc.data_plate,)
    assert np.isfinite(loss(model, guide, x))


def test_people_in_several_rows_of_a_minibatch_are_refused():
    """Of two with 1 and 9 observations a minibatch of one does not say how many there are."""
    ids = np.repeat([0, 1], [1, 9])
    x = np.zeros(9, np.float32)
    said = refused(people_apart, exact_two, ids[1:], x, np.arange(1, 10), size=2, all_ids=ids)
    assert "has one of them in several rows" in said


def exact_two(ids, x, rows=None, size=2, all_ids=None):
    """A guide of two people."""
    with lc.entity_plate("people", size, ids, lc.EntityCounts.of(size, all_ids)):
        numpyro.sample("z", dist.Normal(0, 1))


def test_a_minibatch_in_no_data_plate_is_refused():
    """The likelihood would count for these rows alone."""
    ids = np.arange(6)
    counts = lc.EntityCounts.of(6, ids)

    def guide(some, x):
        with lc.entity_plate("people", 6, some, counts) as read:
            z = numpyro.sample("z", dist.Normal(0, 1))
        return read.rows_of(z, some)

    def model(some, x):
        z = guide(some, x)
        with numpyro.plate("data", 3):
            numpyro.sample("x", dist.Normal(z, 0.5), obs=x)

    with pytest.raises(ValueError, match="data_plate` that what is observed is in"):
        loss(model, guide, ids[:3], X[:3])


def test_a_guide_of_rows_that_depend_on_each_other_is_refused():
    """Each row is drawn around the one before."""

    def model(x):
        with numpyro.plate("people", 4):
            z = numpyro.sample("z", dist.Normal(0, 1))
            numpyro.sample("x", dist.Normal(z, 0.5), obs=x)

    class Chain(dist.Distribution):
        support = dist.constraints.real
        reparametrized_params = ()

        def __init__(self):
            super().__init__(batch_shape=(4,))

        def sample(self, key, sample_shape=()):
            return jnp.cumsum(random.normal(key, (*sample_shape, 4)), axis=-1)

        def log_prob(self, value):
            return dist.Normal(0, 1).log_prob(jnp.diff(value, prepend=0))

    def guide(x):
        with numpyro.plate("people", 4):
            numpyro.sample("z", Chain())

    assert "the guide draws rows" in refused(model, guide, X[:4])


def test_a_guide_whose_dense_sites_follow_rows_is_refused():
    """These would not be the same for all draws."""

    def guide(x, rows=None, num_rows=3):
        with lc.data_plate("people", num_rows, rows, dim=-2):
            z = numpyro.sample("z", dist.Normal(0.2, 0.9))
        numpyro.sample("loc", dist.Normal(z.mean(), 0.8))

    assert "the guide draws rows" in refused(rows_inside, guide, TWICE)


def test_a_handler_that_scales_rows_is_refused():
    """The weights would be of another power; around the observations alone too."""

    def scaled_observations(x):
        with lc.data_plate("people", 3, dim=-2):
            z = numpyro.sample("z", dist.Normal(0, SD))
            with numpyro.plate("twice", 2), numpyro.handlers.scale(scale=2.0):
                numpyro.sample("x", dist.Normal(z, NOISE), obs=x)

    def guide(x):
        with lc.data_plate("people", 3, dim=-2):
            numpyro.sample("z", dist.Normal(0, 1))

    scaled = numpyro.handlers.scale(rows_inside, scale=0.5)
    assert "a handler `scale` is around" in refused(scaled, normal_guide, TWICE)
    assert "a handler `scale` is around" in refused(scaled_observations, guide, TWICE)


def test_sampled_classes_are_refused():
    """The exponential of an estimate is too large on average."""

    def sites(y):
        with lc.class_plate("classes", 50, labels=y, num_sampled=5) as classes:
            w = numpyro.sample("w", dist.Normal(0, 1))
        with lc.data_plate("people", 4):
            z = numpyro.sample("z", dist.Normal(0, 1))
        return classes, z[:, None] * w

    def model(y):
        classes, utilities = sites(y)
        with lc.data_plate("people", 4):
            numpyro.sample("y", lc.UtilityCategorical(utilities, classes), obs=y)

    with pytest.raises(NotImplementedError, match="plate 'classes' holds a sample of its classes"):
        loss(model, sites, np.arange(4))


def test_the_rows_of_a_class_plate_are_refused():
    """Classes meet in each choice."""

    def model(x):
        with lc.class_plate("people", 4):
            w = numpyro.sample("w", dist.Normal(0, 1))
        numpyro.sample("x", dist.Normal(w.sum(), 1), obs=x)

    with pytest.raises(ValueError, match="must be one whose rows are independent"):
        loss(model, AutoNormal(model), 0.3, params=_params(model, 0.3))


def test_a_part_of_the_measurements_of_a_row_is_refused():
    """They would stand for others, in an exponential."""

    def model(x):
        with numpyro.plate("people", 3, dim=-2):
            z = numpyro.sample("z", dist.Normal(0, SD))
            with numpyro.plate("many", 10, subsample_size=2):
                numpyro.sample("x", dist.Normal(z, NOISE), obs=x)

    def guide(x):
        with numpyro.plate("people", 3, dim=-2):
            numpyro.sample("z", dist.Normal(0, 1))

    with pytest.raises(
        NotImplementedError, match="in plate 'many' too, of which a step holds 2 of"
    ):
        loss(model, guide, TWICE)


def test_a_guide_that_draws_rows_outside_of_their_plate_is_refused():
    """They have no densities of their own then."""

    def guide(x):
        numpyro.sample("loc", dist.Normal(0, 1))
        numpyro.sample("z", dist.Normal(jnp.zeros((3, 1)), 1).to_event(2))

    with pytest.raises(ValueError, match="must draw site 'z' inside of plate 'people'"):
        loss(rows_inside, guide, TWICE)


def test_mutable_sites_are_refused():
    """Each draw would move them in a way of its own."""

    def model(x):
        numpyro.primitives.mutable("seen", 0)
        rows_inside(x)

    with pytest.raises(NotImplementedError, match="the mutable sites \\['seen'\\]"):
        loss(model, normal_guide, TWICE)


@pytest.mark.parametrize(
    ("plate", "num_draws", "error", "match"),
    [
        ("persons", 2, ValueError, "one of \\['people', 'twice'\\]; got 'persons'"),
        ("twice", 2, ValueError, "plate 'twice' has no latent site"),
        ("people", 0, ValueError, "`num_draws` must be at least 1"),
        (3, 2, TypeError, "`plate` must be the name of the one plate"),
    ],
)
def test_arguments_are_checked(plate, num_draws, error, match):
    """The plate, its sites and the number of draws."""
    with pytest.raises(error, match=match):
        loss(rows_inside, normal_guide, TWICE, plate=plate, num_draws=num_draws)


def _params(model, *args):
    """Start values of AutoNormal's parameters."""
    svi = SVI(model, AutoNormal(model), optax.adam(0.1), Trace_ELBO())
    return svi.get_params(svi.init(random.key(0), *args))


def test_a_point_estimate_of_rows_has_draws_all_alike():
    """Then the bound is the ELBO, at any number of draws."""
    guide = AutoDelta(rows_inside)
    svi = SVI(rows_inside, guide, optax.adam(0.1), Trace_ELBO())
    params = svi.get_params(svi.init(random.key(0), TWICE))
    usual = Trace_ELBO().loss(random.key(0), params, rows_inside, guide, TWICE)
    np.testing.assert_allclose(loss(rows_inside, guide, TWICE, params=params), usual, rtol=1e-5)
