# SPDX-License-Identifier: Apache-2.0
"""The first run of a model with an automatic guide: one program, and nothing kept of its trace."""

from __future__ import annotations

import copy
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer import Trace_ELBO, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoDelta, AutoGuideList, AutoNormal

import numpyro_largecat as lc
from numpyro_largecat.svi import one_program
from tests.models import NUM_CATEGORIES, hierarchical, make_data
from tests.slow_cases import slow_case

COMPILED = "/jax/core/compile/backend_compile_duration"


def of_two_parts(model):
    guide = AutoGuideList(model)
    guide.append(AutoNormal(numpyro.handlers.block(model, hide=["scale", "y"])))
    guide.append(AutoDelta(numpyro.handlers.block(model, hide=["w", "b", "y"])))
    return guide


GUIDES = {
    "normal": AutoNormal,
    "delta": AutoDelta,
    "rows": lc.AutoRowNormal,
    "parts": of_two_parts,
}


def make_svi(model, guide, loss=None):
    return lc.SubsampledSVI(model, guide, optax.adam(0.01), loss or TraceMeanField_ELBO())


def batch():
    x, y = map(np.asarray, make_data())
    return x[:8], y[:8], np.arange(8)


@pytest.fixture
def programs():
    """The seconds of each program that is compiled."""
    found = []

    def note(event, seconds, **_):
        if event == COMPILED:
            found.append(seconds)

    jax.monitoring.register_event_duration_secs_listener(note)
    yield found
    jax.monitoring.unregister_event_duration_listener(note)


def test_one_program_sets_up_an_automatic_guide(programs):
    """Others look at the classes; NumPyro alone compiles some fifty."""

    def start(num_features):
        model = hierarchical(num_features, 1_037, 1_000)
        make_svi(model, AutoNormal(model)).init(jax.random.key(0), *batch())

    start(4)  # makes keys and the like, once in a process
    programs.clear()
    start(5)
    assert len(programs) <= 4


def svi_of(name):
    model = hierarchical(4)
    loss = Trace_ELBO() if name in ("delta", "parts") else None
    return make_svi(model, GUIDES[name](model), loss)


def medians_of(guide, params):
    """In one program, which is traced each time."""
    return jax.jit(lambda params: guide.median(params))(params)


def begun(name):
    """An SVI object, its parameters, and its guide's medians and parts; its first batch is gone.

    With a check that the program leaks nothing when it is traced.
    """
    svi = svi_of(name)
    args = [jnp.asarray(array) for array in batch()]
    with jax.checking_leaks():
        params = svi.get_params(svi.init(jax.random.key(0), *args))
    medians = medians_of(svi.guide, params)
    parts = list(svi.guide) if name == "parts" else [copy.deepcopy(svi.guide)]
    for array in args:
        array.delete()
    return svi, params, medians, parts


@pytest.fixture(scope="module")
def of_normal():
    return begun("normal")


@pytest.mark.slow
@pytest.mark.parametrize("name", GUIDES)
def test_one_program_gives_what_single_operations_do(name, monkeypatch, of_normal):
    """State and readings of the guide are the same."""

    def readings(svi, params):
        guide = svi.guide
        quantiles = {} if name in ("delta", "parts") else guide.quantiles(params, [0.1, 0.9])
        draws = guide.sample_posterior(jax.random.key(1), params, sample_shape=(2,))
        return params, guide.median(params), quantiles, draws

    first, params, *_ = of_normal if name == "normal" else begun(name)
    monkeypatch.setattr(one_program, "may_learn_in_a_trace", lambda guide: False)
    second = svi_of(name)
    state = second.init(jax.random.key(0), *batch())
    found = jax.jit(partial(readings, first))(params)
    expected = jax.jit(partial(readings, second))(second.get_params(state))
    for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["normal", *map(slow_case, ["delta", "rows", "parts"])])
def test_a_guide_keeps_nothing_of_the_trace(name, request):
    """And so it can be copied."""
    *_, parts = request.getfixturevalue("of_normal") if name == "normal" else begun(name)
    for part in parts:
        assert part._init_locs
        for leaf in jax.tree.leaves([part.prototype_trace, part._init_locs]):
            assert not isinstance(leaf, jax.core.Tracer)


def test_readings_of_a_guide_do_not_ask_for_the_first_batch(of_normal):
    svi, params, medians, _ = of_normal
    np.testing.assert_array_equal(medians_of(svi.guide, params)["w"], medians["w"])


def test_a_refused_init_leaves_the_guide_as_it_was(of_normal):
    svi, params, medians, _ = of_normal
    x, y, rows = batch()
    with pytest.raises(ValueError, match="got 99"):
        svi.init(jax.random.key(0), x, np.where(rows == 0, 99, y), rows)
    np.testing.assert_array_equal(medians_of(svi.guide, params)["w"], medians["w"])


@pytest.mark.slow
def test_start_values_that_are_given_stay_with_the_caller():
    """The state may be donated, so it must not be in their memory."""
    model = hierarchical(4)
    w = jnp.full((NUM_CATEGORIES, 3), 0.25)
    for _ in range(2):
        svi = make_svi(model, AutoNormal(model))
        given = {"w_auto_loc": w}
        state = svi.init(jax.random.key(0), *batch(), init_params=given)
        np.testing.assert_array_equal(svi.get_params(state)["w_auto_loc"], w)
        jax.jit(svi.update, donate_argnums=0)(state, *batch())
    assert float(w.sum()) == 0.25 * w.size


def test_start_values_of_no_parameter_are_refused():
    model = hierarchical(4)
    svi = make_svi(model, AutoNormal(model))
    given = {"w_loc": jnp.zeros((NUM_CATEGORIES, 3))}
    with pytest.raises(ValueError, match=r"`init_params` must be.*'w_auto_loc'.*got \['w_loc'\]"):
        svi.init(jax.random.key(0), *batch(), init_params=given)


def with_prior(prior):
    """A model of one scale, which has this prior, beside rows of classes."""

    def model(x, y=None, rows=None):
        scale = numpyro.sample("scale", prior())
        with lc.class_plate("classes", NUM_CATEGORIES, y, 4) as classes:
            w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
        with lc.data_plate("data", 40, rows) as rows:
            lc.sample_choice("y", scale.sum() * x @ w.T, classes=classes, rows=rows, obs=y)

    return model


@pytest.mark.some_cases(1)
@pytest.mark.parametrize(
    ("prior", "message"),
    [
        (lambda: dist.Normal(0.0, -1.0), "Normal distribution got invalid scale parameter"),
        (lambda: dist.Gamma(jnp.array([1.0, -2.0])).to_event(1), "got invalid concentration"),
        (
            lambda: dist.LogNormal(0.0, 1.0).expand([2]).to_event(1).mask(True),
            None,
        ),
        (
            lambda: dist.MixtureSameFamily(
                dist.Categorical(jnp.array([0.7, 0.7])), dist.Normal(jnp.zeros(2), 1.0)
            ),
            "Categorical.* got invalid probs parameter",
        ),
    ],
)
def test_arguments_that_a_distribution_cannot_take_are_refused(prior, message):
    """As NumPyro does where it makes distributions one by one, outside of a program."""
    model = with_prior(prior)
    svi = make_svi(model, AutoNormal(model))
    if message is None:
        svi.init(jax.random.key(0), *batch())
        return
    with pytest.raises(ValueError, match=message):
        svi.init(jax.random.key(0), *batch())


@pytest.mark.some_cases(1)
@pytest.mark.parametrize(
    ("given", "init_scale", "argument"),
    [
        ({"w_auto_scale": -jnp.ones((NUM_CATEGORIES, 3))}, 0.1, "scale"),
        ({"w_auto_loc": jnp.full((NUM_CATEGORIES, 3), jnp.nan)}, 0.1, "loc"),
        ({}, -0.1, "scale"),
    ],
)
def test_arguments_that_the_guide_cannot_take_are_refused(given, init_scale, argument):
    model = hierarchical(4)
    svi = make_svi(model, AutoNormal(model, init_scale=init_scale))
    with pytest.raises(ValueError, match=f"Normal distribution got invalid {argument} parameter"):
        svi.init(jax.random.key(0), *batch(), init_params=given)


@pytest.mark.slow
def test_a_model_that_is_never_valid_is_refused():
    def model(x, y=None, rows=None):
        with_prior(lambda: dist.Normal(0.0, 1.0))(x, y, rows)
        numpyro.factor("never", -jnp.inf)

    with pytest.raises(RuntimeError, match="Cannot find valid initial parameters"):
        make_svi(model, AutoNormal(model)).init(jax.random.key(0), *batch())


@pytest.mark.filterwarnings("ignore:Out-of-support")
def test_what_explains_a_failed_search_does_not_replace_its_error():
    """With all latent values at 0 the model cannot be run, so that no site is named."""

    def model(x):
        s = numpyro.sample("s", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal(0, s**2, validate_args=True), obs=x)
        numpyro.factor("never", -jnp.inf)

    svi = lc.SubsampledSVI(model, AutoNormal(model), optax.adam(0.1), Trace_ELBO())
    with pytest.raises(RuntimeError, match="Cannot find valid initial parameters"):
        svi.init(jax.random.key(0), 1.0)


def test_a_model_that_is_never_valid_is_refused_over_a_mesh():
    """There NumPyro sees values of a trace alone, and says nothing."""

    def model(x, y=None, rows=None):
        with_prior(lambda: dist.Normal(0.0, 1.0))(x, y, rows)
        numpyro.factor("never", -jnp.inf)

    svi = lc.SubsampledSVI(
        model,
        AutoNormal(model),
        optax.adam(0.01),
        Trace_ELBO(),
        mesh=jax.make_mesh((1,), ("model",)),
        sharding={"classes": "model"},
    )
    with pytest.raises(RuntimeError, match="no valid start was found"):
        svi.init(jax.random.key(0), *batch())


def test_a_state_shares_no_memory_with_its_guide():
    """With a full plate both have the whole start values, and a state may be donated."""
    model = hierarchical()
    guide = AutoNormal(model)
    svi = make_svi(model, guide)
    state = svi.init(jax.random.key(0), *batch())
    kept = [guide.prototype_trace["w"]["value"], guide._init_locs["w"]]
    before = [np.array(value) for value in kept]
    overwrite = jax.jit(lambda tables: jax.tree.map(lambda x: x + 1, tables), donate_argnums=0)
    overwrite(state.optim_state)
    for value, old in zip(kept, before, strict=True):
        np.testing.assert_array_equal(value, old)


def test_bad_labels_are_named_before_anything_else():
    x, y, rows = batch()
    model = with_prior(lambda: dist.Normal(0.0, -jnp.exp(x[0, 0])))
    with pytest.raises(ValueError, match=r"`labels` of plate 'classes'.*got 99"):
        make_svi(model, AutoNormal(model)).init(
            jax.random.key(0), x, np.where(rows == 2, 99, y), rows
        )


@pytest.mark.slow
def test_bounds_that_are_arrays_are_kept_as_values():
    """A support of the trace would be of no use in the steps that follow."""
    model = with_prior(
        lambda: dist.Uniform(jnp.array([1.0, 2.0]), jnp.array([2.0, 5.0])).to_event(1)
    )
    guide = AutoNormal(model)
    svi = make_svi(model, guide)
    state = svi.init(jax.random.key(0), *batch())
    state, _ = jax.jit(svi.update)(state, *batch())
    scale = guide.median(svi.get_params(state))["scale"]
    assert ((scale > jnp.array([1.0, 2.0])) & (scale < jnp.array([2.0, 5.0]))).all()


def test_guides_that_others_have_made_are_set_up_as_numpyro_does():
    """They may keep arrays of which nothing is known."""

    class Remembers(AutoNormal):
        def _setup_prototype(self, *args, **kwargs):
            super()._setup_prototype(*args, **kwargs)
            self.first_row = args[0][0] * 2

    model = hierarchical(4)
    guide = Remembers(model)
    make_svi(model, guide).init(jax.random.key(0), *batch())
    np.testing.assert_allclose(guide.first_row, 2 * batch()[0][0])
