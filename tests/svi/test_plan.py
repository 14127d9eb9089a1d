# SPDX-License-Identifier: Apache-2.0
"""What ``init`` learns is one object that nothing changes; and what later runs learn anew."""

from __future__ import annotations

import copy
import gc
import pickle
from dataclasses import FrozenInstanceError

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.distributions import constraints
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoDelta, AutoNormal
from numpyro.infer.initialization import init_to_value
from numpyro.infer.svi import SVIRunResult

import numpyro_largecat as lc
from tests.models import hierarchical, make_data


def svi_of(limits):
    def model():
        a = numpyro.param("a", 0.5, constraint=constraints.interval(0.0, limits["high"]))
        numpyro.factor("loss", -((a - 3.0) ** 2))

    return lc.SubsampledSVI(model, lambda: None, optax.adam(0.5), Trace_ELBO())


def test_a_plan_cannot_be_changed_and_init_makes_one_like_it():
    svi = svi_of({"high": 1.0})
    before = svi.plan
    svi.init(jax.random.key(0))
    first = svi.plan
    assert not before.stored and first.stored.keys() == {"a"}
    with pytest.raises(FrozenInstanceError):
        first.stored = {}
    svi.init(jax.random.key(1))
    assert svi.plan is not first and svi.plan.shapes == first.shapes


def test_a_later_run_sees_a_constraint_that_has_changed():
    """Its arrays have the same shapes, but its compiled loop is another."""
    limits = {"high": 1.0}
    svi = svi_of(limits)
    narrow = svi.run(jax.random.key(0), 100, progress_bar=False).params["a"]
    limits["high"] = 10.0
    wide = svi.run(jax.random.key(0), 100, progress_bar=False).params["a"]
    assert narrow <= 1
    assert jnp.abs(wide - 3) < 0.2


def of_numpyro(each):
    """Two SVI objects that share model, guide, optimiser and loss."""
    factor = {"scale": 1.0}

    def model(scale=None):
        a = numpyro.param("a", 0.5)
        numpyro.factor("loss", -factor["scale"] * (1.0 if scale is None else scale[0]) * a)

    shared = (model, lambda scale=None: None, numpyro.optim.SGD(0.1), Trace_ELBO())
    return factor, [lc.SubsampledSVI(*shared, **kwargs) for kwargs in each]


def test_a_later_run_sees_a_value_that_the_model_closes_over_and_has_changed():
    factor, (svi,) = of_numpyro(each=[{}])
    before = svi.run(jax.random.key(0), 1, progress_bar=False).losses[0]
    factor["scale"] = 100.0
    after = svi.run(jax.random.key(0), 1, progress_bar=False).losses[0]
    assert abs(after - 100 * before) < 1e-4


@pytest.mark.parametrize(("is_new", "num_sampled"), [(False, 6), (True, 7)])
def test_a_later_run_of_the_same_model_compiles_nothing(is_new, num_sampled, compiled):
    """Nor does one of another SVI object; no other test draws so many classes."""
    model, x, y = hierarchical(num_sampled), *make_data()

    def make_svi():
        return lc.SubsampledSVI(model, AutoNormal(model), optax.adam(0.01), Trace_ELBO())

    svi, batches = make_svi(), lc.ArrayBatches(x, y, batch_size=20)
    losses = []
    for seed in (0, 1):
        svi = make_svi() if is_new else svi
        num_programs = len(compiled())
        result = svi.run(jax.random.key(seed), 3, batches=batches, progress_bar=False)
        losses.append(result.losses)
    assert len(compiled()) == num_programs > 0
    assert not np.array_equal(*losses)


def test_static_arguments_may_be_arrays_of_several_svi_objects():
    each = [{"scale": jnp.array([s, 2.0])} for s in (1.0, 3.0)]
    _, both = of_numpyro(each=each)
    one, three = (svi.run(jax.random.key(0), 1, progress_bar=False).losses[0] for svi in both)
    assert abs(three - 3 * one) < 1e-5


def test_static_arguments_are_refused_a_second_time():
    _, (svi,) = of_numpyro(each=[{"scale": jnp.ones(1)}])
    with pytest.raises(TypeError, match=r"multiple values for the keyword arguments \['scale'\]"):
        svi.init(jax.random.key(0), scale=jnp.ones(1))
    result = svi.run(jax.random.key(0), 1, progress_bar=False)
    with pytest.raises(TypeError, match=r"multiple values for the keyword arguments \['scale'\]"):
        svi.update(result.state, scale=jnp.ones(1))
    with pytest.raises(TypeError, match=r"multiple values for the keyword arguments \['scale'\]"):
        lc.Fitted.from_svi(svi, result).on(scale=jnp.ones(1))


def test_nothing_of_an_svi_object_outlives_it():
    """Neither its programs nor what its model closes over."""

    def fit():
        table = jnp.ones(12_345)

        def model():
            a = numpyro.param("a", 0.5)
            numpyro.factor("loss", -a * table.sum())

        svi = lc.SubsampledSVI(model, lambda: None, optax.adam(0.5), Trace_ELBO())
        svi.run(jax.random.key(0), 2, progress_bar=False)

    fit()
    gc.collect()
    assert not [array for array in jax.live_arrays() if array.shape == (12_345,)]


def test_a_copy_of_an_svi_object_runs_like_it():
    svi = svi_of({"high": 1.0})
    first = svi.run(jax.random.key(0), 3, progress_bar=False)
    again = copy.deepcopy(svi).run(jax.random.key(0), 3, progress_bar=False)
    assert (first.losses == again.losses).all()


def test_a_result_is_one_of_numpyros_and_keeps_its_iterates():
    result = svi_of({"high": 1.0}).run(jax.random.key(0), 3, progress_bar=False)
    params, state, losses = result
    assert isinstance(result, SVIRunResult) and result.iterates["a"].shape == (3, 1)
    for again in (result._replace(losses=None), copy.copy(result), pickle.loads(dump(result))):
        assert again.iterates.keys() == {"a"} and again.params == params
    leaves = jax.tree.leaves(result)
    assert len(leaves) == len(jax.tree.leaves((params, state, losses)))


def dump(result):
    return pickle.dumps(result._replace(state=None))


@pytest.mark.parametrize("batches", [(jnp.ones((3, 2)), jnp.arange(3)), jnp.ones(3), 5, iter])
def test_batches_that_are_no_iterator_of_tuples_are_refused(batches):
    svi = svi_of({"high": 1.0})
    with pytest.raises(TypeError, match=r"`batches` must be an `lc.ArrayBatches.*; got"):
        svi.run(jax.random.key(0), 3, batches=batches, progress_bar=False)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"guide": None}, "`guide` must be a function; got None"),
        ({"loss": Trace_ELBO}, "`loss` must be a loss of NumPyro, such as `Trace_ELBO..`; got"),
    ],
)
def test_parts_of_another_kind_are_refused(change, match):
    parts = {"model": lambda: None, "guide": lambda: None, "loss": Trace_ELBO()}
    with pytest.raises(TypeError, match=match):
        lc.SubsampledSVI(**(parts | change), optim=optax.adam(0.1))


def test_parameters_in_the_place_of_a_result_are_not_saved(tmp_path):
    svi = svi_of({"high": 1.0})
    result = svi.run(jax.random.key(0), 1, progress_bar=False)
    with pytest.raises(TypeError, match="`result` must be what `run` returned; got"):
        svi.save(tmp_path / "fit", result.params)


def test_batches_among_the_arguments_of_the_model_are_refused():
    batches = lc.ArrayBatches(jnp.ones((3, 2)), batch_size=2)
    with pytest.raises(TypeError, match=r"argument 1 of the model is ArrayBatches.*batches=\.\.\."):
        svi_of({"high": 1.0}).run(jax.random.key(0), 3, jnp.ones(3), batches)


def test_a_guide_whose_plates_are_full_keeps_its_start_values():
    """NumPyro's own SVI takes the same steps with it before and after."""

    def model():
        with numpyro.plate("components", 3):
            numpyro.sample("loc", dist.Normal(0, 10))

    start = init_to_value(values={"loc": jnp.array([1.0, 9.0, 21.0])})
    guide = AutoDelta(model, init_loc_fn=start)
    optim = numpyro.optim.SGD(0.1)
    own = SVI(model, guide, optim, Trace_ELBO())
    before = own.run(jax.random.key(0), 2, progress_bar=False).losses
    lc.SubsampledSVI(model, guide, optim, Trace_ELBO()).init(jax.random.key(1))
    after = own.run(jax.random.key(0), 2, progress_bar=False).losses
    assert (before == after).all()
