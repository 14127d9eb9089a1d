# SPDX-License-Identifier: Apache-2.0
"""What TopL_ELBO cannot sum is refused, and never summed wrongly."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from numpyro.contrib.control_flow import scan
from numpyro.infer import SVI
from numpyro.infer.autoguide import AutoNormal
from numpyro.primitives import mutable

import numpyro_largecat as lc

N, K = 8, 3
MARK = {"enumerate": "parallel"}
X = jnp.linspace(-3, 3, N)
LOC = jnp.array([-2.0, 0.0, 2.5])
KEY = jax.random.key(0)


def component(name="z", num_values=K, **infer):
    prior = dist.Categorical(logits=jnp.zeros(num_values))
    return numpyro.sample(name, prior, infer=infer or MARK)


def data():
    return numpyro.plate("data", N)


def empty_guide(*args):
    return None


def loss(model, num_active=2, guide=empty_guide):
    return lc.TopL_ELBO(num_active).loss(KEY, {}, model, guide)


def chain():
    with data():
        a = component("a")
        b = numpyro.sample("b", dist.Categorical(logits=LOC * a[..., None]), infer=MARK)
        numpyro.sample("x", dist.Normal(LOC[b], 1), obs=X)


def both_in_one_density():
    with data():
        a, b = component("a"), component("b")
        numpyro.sample("x", dist.Normal(LOC[a] + LOC[b], 1), obs=X)


def outside_of_the_plate():
    with data():
        z = component()
    numpyro.sample("total", dist.Normal(LOC[z].sum(), 1), obs=1.0)


def part_of_an_inner_plate():
    with data():
        z = component()
        with numpyro.plate("inner", 10, subsample_size=5):
            numpyro.sample("x", dist.Normal(LOC[z], 1), obs=jnp.zeros((5, N)))


def scaled_data():
    with data():
        z = component()
        with handlers.scale(scale=0.5):
            numpyro.sample("x", dist.Normal(LOC[z], 1), obs=X)


def scale_inside_one_value():
    with data():
        z = component()
        with numpyro.plate("inner", 2), handlers.scale(scale=jnp.array([[1.0], [2.0]])):
            numpyro.sample("x", dist.Normal(LOC[z], 1), obs=jnp.zeros((2, N)))


def not_marked():
    with data():
        z = component(is_auxiliary=False)
        numpyro.sample("x", dist.Normal(LOC[z], 1), obs=X)


def endless():
    with data():
        z = numpyro.sample("z", dist.Poisson(1.0), infer=MARK)
        numpyro.sample("x", dist.Normal(z, 1), obs=X)


def one_event():
    z = numpyro.sample("z", dist.Bernoulli(0.5).expand([N]).to_event(1), infer=MARK)
    numpyro.sample("x", dist.Normal(z, 1).to_event(1), obs=X)


def no_plate():
    z = numpyro.sample("z", dist.Categorical(logits=jnp.zeros((N, K))), infer=MARK)
    numpyro.sample("x", dist.Normal(LOC[z], 1).to_event(1), obs=X)


def many_draws():
    prior = dist.Categorical(logits=jnp.zeros(K))
    z = numpyro.sample("z", prior, sample_shape=(N,), infer=MARK)
    numpyro.sample("x", dist.Normal(LOC[z], 1), obs=X)


def in_a_scan():
    def step(carry, x):
        z = component()
        numpyro.sample("x", dist.Normal(LOC[z], 1), obs=x)
        return carry, None

    scan(step, 0, X)


def choice_among_sampled_classes(num_sampled=2, elsewhere=False):
    with lc.class_plate("classes", 9, jnp.arange(N) % 4, num_sampled) as classes:
        w = numpyro.param("w", jnp.zeros(9), event_dim=0)
    with data():
        z = component()
        psi = LOC[z][..., None] * w if not elsewhere else X[:, None] * w
        numpyro.sample("y", lc.bounds.OneVsEach(psi, classes), obs=jnp.arange(N) % 4)
        numpyro.sample("x", dist.Normal(LOC[z], 1), obs=X)


def state_that_depends():
    state = mutable("state", {"value": jnp.zeros(N)})
    with data():
        z = component()
        state["value"] = LOC[z]
        numpyro.sample("x", dist.Normal(LOC[z], 1), obs=X)


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        (chain, NotImplementedError, "'b' depends on the discrete site 'a'"),
        (both_in_one_density, NotImplementedError, r"site 'x' depends on .* \['a', 'b'\]"),
        (outside_of_the_plate, NotImplementedError, "'total' .* outside of that plate"),
        (part_of_an_inner_plate, NotImplementedError, "has scale 2.0, where 'z' has scale 1.0"),
        (scaled_data, NotImplementedError, "has scale 0.5, where 'z' has scale 1.0"),
        (scale_inside_one_value, NotImplementedError, r"has scale an array .* \(2, 1\), where"),
        (not_marked, ValueError, "site 'z' is discrete and latent, and not marked"),
        (endless, NotImplementedError, "Poisson has no finite list"),
        (one_event, NotImplementedError, r"event of it has shape \(8,\)"),
        (no_plate, NotImplementedError, "axis -1 belongs to no plate"),
        (many_draws, NotImplementedError, r"`sample_shape=\(8,\)` outside of a plate"),
        (
            choice_among_sampled_classes,
            NotImplementedError,
            r"'y' depends on .* 'z', and estimates .* by a sample.*`num_sampled=None`",
        ),
        (in_a_scan, NotImplementedError, "'z' is inside of a `scan`"),
        (state_that_depends, NotImplementedError, "mutable site 'state' depends"),
    ],
)
@pytest.mark.some_cases(2)
def test_models_that_do_not_factorise_are_refused(model, error, message):
    with pytest.raises(error, match=message):
        loss(model)


@pytest.mark.slow
def test_choices_that_sum_over_all_classes_or_depend_on_no_discrete_site_are_not_refused():
    for options in ({"num_sampled": None}, {"elsewhere": True}):
        assert jnp.isfinite(loss(partial(choice_among_sampled_classes, **options)))


def test_a_guide_of_a_model_that_is_not_marked_is_refused():
    """Before NumPyro asks for funsor; also if the mark comes from further out. Data need none."""
    hidden = lc.hide_enumerated(not_marked)
    marked_outside = handlers.infer_config(hidden, lambda site: MARK)
    for model in (hidden, marked_outside):
        guide = AutoNormal(model)
        svi = SVI(not_marked, guide, numpyro.optim.Adam(0.1), lc.TopL_ELBO(2))
        with pytest.raises(ValueError, match="site 'z' is discrete and latent, and not marked"):
            svi.init(KEY)
    observed = handlers.condition(hidden, {"z": jnp.zeros(N, int)})
    assert handlers.trace(observed).get_trace()["z"]["is_observed"]


def mixture():
    with data():
        z = component()
        numpyro.sample("x", dist.Normal(LOC[z], 1), obs=X)


def test_guides_that_draw_the_discrete_site_are_refused():
    def guide():
        with data():
            component()

    with pytest.raises(NotImplementedError, match=r"the guide draws .* 'z'.*hide_enumerated"):
        loss(mixture, guide=guide)


@pytest.mark.parametrize(
    ("num_active", "error", "message"),
    [
        (0, ValueError, "`num_active` must be at least 1; got 0"),
        (4, ValueError, "at most 3, the number of values of 'z'; got 4"),
        (1.5, TypeError, "`num_active` must be a Python int"),
        ({"y": 2}, ValueError, r"the discrete sites of the model, \['z'\]; got \['y'\]"),
        ({"z": 4}, ValueError, "at most 3, the number of values of 'z'; got 4"),
    ],
)
def test_numbers_of_values(num_active, error, message):
    with pytest.raises(error, match=message):
        loss(mixture, num_active)


def reversed_order(z):
    return LOC[z][::-1]


def neighbour(z):
    return jnp.roll(LOC[z], 1)


def mean_of_all(z):
    return jnp.broadcast_to(LOC[z].mean(), (N,))


@pytest.mark.parametrize("location", [reversed_order, neighbour, mean_of_all])
@pytest.mark.slow
def test_values_at_other_places_show(location):
    """An error, or NaN under jit; at places that are drawn with a fixed key."""

    def model():
        with data():
            numpyro.sample("x", dist.Normal(location(component()), 1), obs=X)

    with pytest.raises(NotImplementedError, match="values at other places"):
        loss(model)
    assert np.isnan(jax.jit(lambda: loss(model))())


@pytest.mark.parametrize("what", ["a value of probability zero", "an outlier"])
@pytest.mark.slow
def test_values_at_other_places_show_beside_extreme_weights(what):
    """Weights of -inf or of -5e7 at some place hide no difference at the others."""
    no_first = jnp.array([-jnp.inf, 0.0, 0.0]) if what != "an outlier" else jnp.zeros(K)
    x = X.at[0].set(1e4) if what == "an outlier" else X

    def model():
        with data():
            prior = dist.CategoricalLogits(no_first, validate_args=False)
            z = numpyro.sample("z", prior, infer=MARK)
            numpyro.sample("x", dist.Normal(reversed_order(z), 1), obs=x)

    with pytest.raises(NotImplementedError, match="values at other places"):
        loss(model, K)


def test_the_shape_of_the_values_is_not_to_be_used():
    """It has axes of length one where all values are summed; that gave a number as if N were 1."""

    def model():
        with data():
            z = component()
            numpyro.sample("x", dist.Normal(LOC[z] + jnp.arange(len(z)), 1), obs=X)

    with pytest.raises(NotImplementedError, match="or on their shape"):
        loss(model, K)


@pytest.mark.parametrize("num_active", [1, K])
@pytest.mark.some_cases(1)
def test_what_depends_on_a_masked_site_is_refused(num_active):
    """Its prior is not there to weigh it with."""

    def model():
        with data():
            prior = dist.Categorical(logits=jnp.arange(3.0)).mask(jnp.arange(N) < 4)
            z = numpyro.sample("z", prior, infer=MARK)
            numpyro.sample("x", dist.Normal(LOC[z], 1), obs=X)

    with pytest.raises(NotImplementedError, match="where the discrete site is masked"):
        loss(model, num_active)


def test_weights_that_are_nan_are_not_taken_for_dependence():
    def model():
        with data():
            loc = (jnp.nan * LOC)[component()]
            numpyro.sample("x", dist.Normal(loc, 1, validate_args=False), obs=X)

    assert np.isnan(loss(model))


def test_scales_that_are_traced():
    """They must agree too; that shows as NaN, for it is not known before."""

    def total(scale_of_z, scale_of_x):
        def model():
            with data():
                with handlers.scale(scale=scale_of_z):
                    z = component()
                with handlers.scale(scale=scale_of_x):
                    numpyro.sample("x", dist.Normal(LOC[z], 1), obs=X)

        return loss(model)

    plain = loss(mixture)
    np.testing.assert_allclose(jax.jit(total)(3.0, 3.0), 3 * plain, rtol=1e-6)
    assert np.isnan(jax.jit(total)(3.0, 2.0))


@pytest.mark.slow
def test_a_weight_for_each_place():
    weights = jnp.arange(1.0, N + 1)

    def model(weights, places):
        with numpyro.plate("data", len(places)), handlers.scale(scale=weights):
            z = component()
            numpyro.sample("x", dist.Normal(LOC[z], 1), obs=X[places])

    def total(*args):
        return lc.TopL_ELBO(2).loss(KEY, {}, model, empty_guide, *args)

    repeated = np.repeat(np.arange(N), np.arange(1, N + 1))
    expected = total(jnp.ones(len(repeated)), repeated)
    np.testing.assert_allclose(total(weights, np.arange(N)), expected, rtol=1e-5)


def test_a_model_that_fails_at_any_shape_fails_with_its_own_message():
    """The look at which shapes it takes passes over it, and the next run does not."""
    looked = []

    def model():
        with data():
            z = component()
            if z.shape == (1,):
                looked.append(True)
            if looked:
                raise RuntimeError("out of paper")
            numpyro.sample("x", dist.Normal(LOC[z], 1), obs=X)

    with pytest.raises(RuntimeError, match="out of paper"):
        loss(model)
    assert looked == [True]
