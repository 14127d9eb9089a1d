# SPDX-License-Identifier: Apache-2.0
"""A state of another model or optimiser is refused, wherever one is taken."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.optim
import optax
import pytest
from numpyro.infer import Trace_ELBO

import numpyro_largecat as lc


def no_guide(*args, **kwargs):
    del args, kwargs


def softmax(y, num_categories, *, name="w", global_size=1, num_rows=4):
    """A parameter for each class, one for all, and u for each row."""
    with lc.class_plate("classes", num_categories, y, num_sampled=2) as classes:
        w = numpyro.param(name, jnp.zeros(num_categories), event_dim=0)
    b = numpyro.param("b", jnp.zeros(global_size))
    with lc.data_plate("data", num_rows, jnp.arange(4)) as rows:
        lc.sample_choice("y", w[None] + b[0] * jnp.ones((4, 1)), classes=classes, rows=rows, obs=y)


Y = np.array([0, 3, 3, 1])


def fitted(optim=None, **options):
    optim = optax.adam(0.1) if optim is None else optim
    svi = lc.SubsampledSVI(softmax, no_guide, optim, Trace_ELBO())
    args = (Y, options.pop("num_categories", 6))
    return svi, svi.init(jax.random.key(0), *args, **options), args, options


@pytest.fixture(scope="module")
def of_six():
    return fitted()


CASES = {
    "classes": (
        {"num_categories": 5},
        r"param 'w' of the state must have shape \(6,\) and dtype float32.*got \(5,\) and float32",
    ),
    "rows": ({"num_rows": 9}, r"param 'y_u' of the state must have shape \(4,\).*got \(9,\)"),
    "name": ({"name": "v"}, r"\['b', 'w', 'y_u'\]; it lacks \['w'\], and has \['v'\] besides"),
    "global": ({"global_size": 3}, r"param 'b' .*shape \(1,\).*got \(3,\)"),
    "sgd": ({"optim": optax.sgd(0.1)}, "one of this optimiser.*ScaleByAdamState.*got one made of"),
    "numpyro": ({"optim": numpyro.optim.Adam(0.1)}, "one of this optimiser.*got.*OptimizerState"),
    "momentum": (
        {"optim": optax.sgd(0.1, momentum=0.5)},
        "ScaleByAdamState.*got one made of.*TraceState",
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.some_cases(3)
def test_a_state_of_another_model_or_optimiser_is_refused(case, of_six):
    """In ``run``, ``update`` and ``evaluate``, in and out of ``jit``."""
    options, message = CASES[case]
    svi, _, args, kwargs = of_six
    other = fitted(**options)[1]
    uses = [
        lambda: svi.run(jax.random.key(0), 2, *args, init_state=other, progress_bar=False),
        lambda: jax.jit(lambda state: svi.update(state, *args))(other),
        lambda: svi.evaluate(other, *args, **kwargs),
    ]
    for use in uses:
        with pytest.raises(ValueError, match=message):
            use()


def test_numpyro_optimisers_name_their_parameters_too():
    svi = fitted(numpyro.optim.Adam(0.1))[0]
    other = fitted(numpyro.optim.Adam(0.1), name="v")[1]
    with pytest.raises(ValueError, match=r"lacks \['w'\], and has \['v'\]"):
        svi.plan.check(other)
    svi.plan.check(fitted(numpyro.optim.Adam(0.1))[1])


def test_arguments_of_another_size_than_the_state_are_refused(of_six):
    """The state is that of the last ``init``, but the plates of this step are larger."""
    svi, state, _, _ = of_six
    with pytest.raises(ValueError, match=r"param 'w' has shape \(6,\).*plate 'classes' has 7 in"):
        svi.run(jax.random.key(0), 2, Y, 7, init_state=state, progress_bar=False)


def test_a_state_of_64_bits_is_refused_without_them(of_six):
    with jax.enable_x64(True):
        wide = fitted()[1]
    svi, _, args, _ = of_six
    svi.init(jax.random.key(0), *args)
    message = "param 'b' .*dtype float32.*float64.*Go on under the `jax_enable_x64` and "
    with pytest.raises(ValueError, match=message):
        svi.run(jax.random.key(0), 2, *args, init_state=wide, progress_bar=False)


def test_a_result_is_not_its_state(of_six):
    svi, state, args, _ = of_six
    result = svi.run(jax.random.key(0), 2, *args, init_state=state, progress_bar=False)
    with pytest.raises(TypeError, match=r"`result.state` holds it; got SubsampledSVIRunResult"):
        svi.run(jax.random.key(0), 2, *args, init_state=result, progress_bar=False)


def test_a_state_of_numpy_arrays_is_taken(of_six):
    """As one that was saved to disk and read again."""
    svi, state, args, _ = of_six
    leaves, tree = jax.tree.flatten(state._replace(rng_key=None))
    saved = jax.tree.unflatten(tree, map(np.asarray, leaves))._replace(rng_key=state.rng_key)
    runs = [
        svi.run(jax.random.key(0), 2, *args, init_state=s, progress_bar=False)
        for s in (state, saved)
    ]
    np.testing.assert_array_equal(runs[0].params["w"], runs[1].params["w"])
