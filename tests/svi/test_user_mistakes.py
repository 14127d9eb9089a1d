# SPDX-License-Identifier: Apache-2.0
"""Mistakes that would give a wrong fit without an error, and what is said of them."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import jax.random as random
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer import Trace_ELBO
from numpyro.infer.autoguide import AutoDelta

import numpyro_largecat as lc
from tests import reference
from tests.models import class_points_of

N, K = 12, 50
X = np.random.default_rng(0).normal(size=N).astype(np.float32)
Y = np.array([3, 7, 7, 1, 9, 5, 8, 2, 6, 9, 1, 8])


def svi_of(model, optim=None, guide=None):
    optim = optax.sgd(0.1) if optim is None else optim
    guide = class_points_of(K, w=()) if guide is None else guide
    return lc.SubsampledSVI(model, guide, optim, Trace_ELBO())


def init(model, *args, guide=None):
    svi = svi_of(model, guide=guide)
    return svi, svi.init(random.key(0), *args)


def test_labels_in_a_column_are_refused():
    def model(y):
        with lc.class_plate("classes", K, y, 5) as classes:
            w = numpyro.sample("w", dist.Normal(0, 1))
        with lc.data_plate("data", N, jnp.arange(N)) as rows:
            lc.sample_choice("y", X[:, None] * w, classes=classes, rows=rows, obs=y)

    with pytest.raises(ValueError, match=r"obs.shape=\(12, 1\).*squeeze"):
        init(model, Y[:, None])


@pytest.mark.parametrize("first", [0, K - 12], ids=["labels fit", "labels do not"])
def test_a_choice_without_its_classes_gets_the_way_to_pass_them(first):
    """Whether or not the labels are below the number of classes that the plate holds."""

    def model(x, y, rows):
        with lc.class_plate("classes", K, y, 9):
            w = numpyro.sample("w", dist.Normal(0, 1))
        with lc.data_plate("data", N, rows) as rows:
            lc.sample_choice("y", x[:, None] * w, rows=rows, obs=y)

    labels = Y + first
    with pytest.raises(ValueError, match=r"has no `classes`\. Pass `classes=` from the plate"):
        init(model, X, labels, np.arange(N))
    batches = lc.ArrayBatches(X, labels, batch_size=6)
    with pytest.raises(ValueError, match="Pass `classes=` from the plate"):
        svi_of(model).run(random.key(0), 3, batches=batches, progress_bar=False)


def test_gradients_collected_over_steps_are_refused_in_either_form():
    def model(y):
        with lc.class_plate("classes", K, y, 5) as classes:
            w = numpyro.sample("w", dist.Normal(0, 1))
        with lc.data_plate("data", N, jnp.arange(N)) as rows:
            lc.sample_choice("y", X[:, None] * w, classes=classes, rows=rows, obs=y)

    collected = optax.MultiSteps(optax.adam(0.1), every_k_schedule=3)
    for optim in (collected, collected.gradient_transformation()):
        with pytest.raises(ValueError, match="collects gradients over steps"):
            svi_of(model, optim).init(random.key(0), Y)


def test_labels_that_are_true_or_false_get_the_way_to_write_them():
    def model(y):
        with lc.class_plate("classes", 2, y) as classes:
            w = numpyro.sample("w", dist.Normal(0, 1))
        with lc.data_plate("data", N, jnp.arange(N)) as rows:
            lc.sample_choice("y", X[:, None] * w, classes=classes, rows=rows, obs=y)

    with pytest.raises(TypeError, match=r"dtype bool\. Of two classes.*`array\.astype\(int\)`"):
        init(model, Y > 5)


def test_an_array_of_numpy_that_is_indexed_by_rows_gets_the_way_to_write_it():
    prices = np.arange(K, dtype=np.float32)

    def model(y, rows=None):
        with lc.class_plate("classes", K, y, 5) as classes:
            w = numpyro.sample("w", dist.Normal(prices[classes.indices], 1))
        with lc.data_plate("data", N, rows) as rows:
            lc.sample_choice("y", X[:, None] * w, classes=classes, rows=rows, obs=y)

    batches = lc.ArrayBatches(Y, batch_size=N)  # are looked at before the first step
    for begin in (
        lambda: init(model, Y),
        lambda: svi_of(model).run(random.key(0), 3, batches=batches, progress_bar=False),
    ):
        with pytest.raises(jax.errors.TracerArrayConversionError) as raised:
            begin()
        assert "`z = jnp.asarray(z)`" in " ".join(raised.value.__notes__)


@pytest.mark.parametrize("is_guide", [False, True], ids=["model", "guide"])
def test_a_table_that_meets_some_rows_gets_the_way_to_read_it(is_guide):
    table = jnp.zeros(K)

    def guide(y):
        loc = numpyro.param("loc", table)
        with numpyro.plate("classes", K):
            numpyro.sample("w", dist.Normal(loc, 1))

    def model(y):
        with lc.class_plate("classes", K, y, 5) as classes:
            w = numpyro.sample("w", dist.Normal(0, 1))
        with lc.data_plate("data", N) as rows:
            utilities = X[:, None] * (w if is_guide else w + table)
            lc.sample_choice("y", utilities, classes=classes, rows=rows, obs=y)

    with pytest.raises((TypeError, ValueError), match="ncompatible shapes") as raised:
        init(model, Y, guide=guide if is_guide else None)
    notes = " ".join(raised.value.__notes__)
    assert "in each step: 'classes' 17. Read arrays of all rows by `indices`" in notes


@pytest.mark.parametrize("rows", [None, jnp.arange(3)], ids=["all rows", "other rows"])
def test_observations_of_other_rows_than_those_of_the_plate_are_refused_by_name(rows):
    def model(x, rows=None):
        z = numpyro.sample("z", dist.Normal(0, 1))
        with lc.data_plate("data", N, rows):
            numpyro.sample("x", dist.Normal(z, 1), obs=x)

    size = N if rows is None else 3
    with pytest.raises(ValueError, match=rf"site 'x'.*\({size},\).*'data' of {size}; got \(5,\)"):
        init(model, jnp.zeros(5), rows)


def test_a_subset_of_classes_that_is_not_named_is_refused():
    def model(y):
        with lc.class_plate("classes", K, y, 5):
            w = numpyro.sample("w", dist.Normal(0, 1))
        with lc.data_plate("data", N, jnp.arange(N)) as rows:
            lc.sample_choice("y", X[:, None] * w, rows=rows, obs=y)

    with pytest.raises(ValueError, match=r"17 classes, as many as plate 'classes'.*`classes=`"):
        init(model, Y)


def test_an_unrelated_choice_of_as_many_classes_is_not_refused():
    """But for values that are not known, of which it is not known whose they are."""

    def model(y, mode):
        with lc.class_plate("classes", K, y, 4, negatives="shared") as classes:
            w = numpyro.sample("w", dist.Normal(0, 1))
        m = numpyro.sample("m", dist.Normal(0, 1).expand([5]).to_event(1))
        psi = classes.utilities(lambda x, w: x * w, (X,), (w,))
        with lc.data_plate("data", N, jnp.arange(N)) as rows:
            lc.sample_choice("y", psi, classes=classes, rows=rows, obs=y)
            lc.sample_choice("mode", X[:, None] * m, rows=rows, obs=mode)

    init(model, Y, Y % 5)
    with pytest.raises(ValueError, match=r"'mode' has utilities of 5 classes.*`classes=`"):
        jax.jit(lambda mode: init(model, Y, mode))(Y % 5)


@pytest.mark.parametrize("negatives", ["shared", "own"])
def test_labels_in_another_order_than_the_plate_s_are_refused(negatives):
    """Each observation has utilities of its own label and others."""

    def model(y):
        with lc.class_plate("classes", K, y, 4, negatives=negatives) as classes:
            w = numpyro.sample("w", dist.Normal(0, 1))
        psi = classes.utilities(lambda x, w: x * w, (X,), (w,))
        with lc.data_plate("data", N, jnp.arange(N)) as rows:
            lc.sample_choice("y", psi, classes=classes, rows=rows, obs=y[::-1])

    with pytest.raises(ValueError, match="the labels of the class plate, in their order"):
        init(model, Y)


def sampled_softmax(fn_of, obs_of, y, *, plate_labels=True, **layout):
    with lc.class_plate("classes", K, y if plate_labels else None, 5, **layout) as classes:
        w = numpyro.sample("w", dist.Normal(0, 1))
    psi = classes.utilities(lambda x, w: x * w, (X,), (w,))
    with numpyro.plate("data", N):
        numpyro.sample("y", fn_of(psi), obs=obs_of(classes, y))


def logits_of(utilities):
    return dist.Categorical(logits=utilities)


def probs_of(utilities):
    return dist.Categorical(probs=jnp.exp(utilities)).mask(Y > 2)


@pytest.mark.parametrize(
    ("fn_of", "layout"),
    [
        (logits_of, {}),
        (probs_of, {}),
        (logits_of, {"plate_labels": False}),
        (logits_of, {"negatives": "shared"}),
        (logits_of, {"negatives": "own"}),
    ],
)
def test_labels_for_columns_of_a_subset_are_refused(fn_of, layout):
    model = partial(sampled_softmax, fn_of, lambda classes, y: y, **layout)
    with pytest.raises(ValueError, match=r"'y' is a Categorical of \d+.*'classes'.*sample_choice"):
        init(model, Y)


@pytest.mark.slow
def test_places_among_the_columns_of_a_subset_are_not_refused():
    """Those of labels, in a sampled softmax written by hand; other places are of other classes."""
    by_hand = partial(sampled_softmax, logits_of, lambda classes, y: classes.place(y))
    svi, state = init(by_hand, 10 + 3 * Y)
    assert svi.get_params(state)["w_auto_loc"].shape == (K,)
    unrelated = partial(sampled_softmax, logits_of, lambda classes, y: y % 4)
    for model in (unrelated, partial(unrelated, plate_labels=False)):
        with pytest.raises(ValueError, match="site 'y', outside of it, depends on which they are"):
            init(model, 10 + Y)


def two_choices(x, y=None, z=None, rows=None):
    with lc.class_plate("many", K, y, 5) as many:
        v = numpyro.sample("v", dist.Normal(0, 1))
    with lc.class_plate("few", 7, z, 2) as few:
        w = numpyro.sample("w", dist.Normal(0, 1))
    with lc.data_plate("data", N, rows) as rows:
        lc.sample_choice("y", x[:, None] * v, classes=many, rows=rows, obs=y)
        lc.sample_choice("z", x[:, None] * w, classes=few, rows=rows, noise="normal", obs=z)


@pytest.mark.slow
def test_one_of_two_choices_is_predicted_without_labels_of_either():
    """The probit's log probabilities are those of brute force over all its classes."""
    svi, state = init(two_choices, X, Y, Y % 7, jnp.arange(N), guide=AutoDelta(two_choices))
    params = svi.get_params(state)
    new = jnp.array([0.5, -1.0])
    first = lc.Fitted(two_choices, svi.guide, params, site="y").on(new).top_classes()
    np.testing.assert_array_equal(
        first.classes[0, 0], jnp.argmax(params["v_auto_loc"]), strict=False
    )
    fitted = lc.Fitted(two_choices, svi.guide, params, plate="few", chunk_size=3)
    second = fitted.on(new).top_classes(7)
    for n in range(2):
        for k, log_prob in zip(second.classes[n], second.log_probs[n], strict=True):
            utilities = new[n] * params["w_auto_loc"]
            exact = reference.choice_log_prob(utilities, int(k), "normal")
            np.testing.assert_allclose(log_prob, exact, rtol=1e-4)


@pytest.mark.slow
def test_parameters_that_are_missing_are_named():
    svi, _ = init(two_choices, X, Y, Y % 7, jnp.arange(N), guide=AutoDelta(two_choices))
    with pytest.raises(ValueError, match=r"lacks the parameters \['v_auto_loc', 'w_auto_loc'\]"):
        lc.Fitted(two_choices, svi.guide, {}, site="y").on(X).top_classes()
    with pytest.raises(TypeError, match=r"`params` must be a dict.*result.params"):
        lc.Fitted(two_choices, svi.guide, ())


def test_a_mixture_of_choices_among_sampled_classes_is_refused():
    """The log of a sum of estimates is too high on average."""

    def model(y, num_sampled):
        with lc.class_plate("classes", K, y, num_sampled) as classes:
            w = numpyro.sample("w", dist.Normal(0, 1))
        choices = [lc.bounds.OneVsEach(sign * X[:, None] * w, classes) for sign in (1, -1)]
        segments = dist.Categorical(logits=jnp.zeros((N, 2)))
        with lc.data_plate("data", N, jnp.arange(N)):
            numpyro.sample("y", dist.MixtureGeneral(segments, choices), obs=y)

    init(model, Y, None)
    with pytest.raises(NotImplementedError, match=r"site 'y' is a mixture.*`num_sampled=None`"):
        init(model, Y, 5)
