# SPDX-License-Identifier: Apache-2.0
"""Mistakes that would give a wrong fit without an error, and what is said of them."""

from __future__ import annotations

from contextlib import ExitStack
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
from numpyro_largecat.svi.batch_checks import check_batches
from numpyro_largecat.svi.loss_log import LossLog
from numpyro_largecat.svi.run_data import RunData
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
    """A sampled softmax written by hand, and an unrelated categorical of as many outcomes."""
    by_hand = partial(sampled_softmax, logits_of, lambda classes, y: classes.place(y))
    unrelated = partial(sampled_softmax, logits_of, lambda classes, y: y % 4)
    without_labels = partial(unrelated, plate_labels=False)
    for model, y in ((by_hand, 10 + 3 * Y), (unrelated, 10 + Y), (without_labels, Y)):
        svi, state = init(model, y)
        assert svi.get_params(state)["w_auto_loc"].shape == (K,)


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


def test_a_data_plate_larger_than_the_batches_is_refused():
    def model(x, y, rows):
        with lc.class_plate("classes", K, y, 5) as classes:
            w = numpyro.sample("w", dist.Normal(0, 1))
        with lc.data_plate("data", 10 * N, rows) as rows:
            lc.sample_choice("y", x[:, None] * w, classes=classes, rows=rows, obs=y)

    batches = lc.ArrayBatches(X, Y, batch_size=4)
    with pytest.raises(ValueError, match=r"`rows` of plate 'data'.*must be 12.*got 120.*120 / 4"):
        svi_of(model).run(random.key(0), 3, batches=batches, progress_bar=False)


def test_a_data_plate_smaller_than_the_batches_is_refused():
    def model(y, rows=None):
        with lc.data_plate("data", 10, rows):
            numpyro.sample("y", dist.Normal(0, 1), obs=y)

    batches = lc.ArrayBatches(np.zeros(12, np.float32), batch_size=4)
    with pytest.raises(ValueError, match=r"in \[0, 10\); got 10 .*`batches` has 12 rows, so that"):
        check_batches(model, batches, (), {})


def forgotten_rows(plates, kept, x, y, rows):
    """Softmax regression on minibatches, inside ``plates``, with or without u kept."""
    with lc.class_plate("classes", K, y, 5) as classes:
        w = numpyro.sample("w", dist.Normal(0, 1))
    with ExitStack() as around:
        rows = [around.enter_context(plate(len(x), rows)) for plate in plates]
        if kept:
            lc.sample_choice("y", x[:, None] * w, classes=classes, rows=rows[-1], obs=y)
        else:
            numpyro.sample("y", lc.UtilityCategorical(x[:, None] * w, classes), obs=y)


def whole(size, rows):
    del size
    return lc.data_plate("data", N, rows)


def of_batch(size, rows):
    del rows
    return lc.data_plate("data", size)


def plain(size, rows):
    del rows
    return numpyro.plate("data", size)


def subsampled(size, rows):
    del rows
    return numpyro.plate("data", N, subsample_size=size)


def scaled_by(factor):
    return lambda size, rows: numpyro.handlers.scale(scale=factor)


def masked(size, rows):
    del size
    return numpyro.handlers.mask(mask=rows > 2)


@pytest.mark.parametrize(
    ("plates", "kept"),
    [
        ([of_batch], True),
        ([scaled_by(3.0), of_batch], True),  # u would still be kept by place in the batch
        ([of_batch], False),
        ([plain, masked], False),
        ([], False),
    ],
)
def test_minibatches_without_their_rows_are_refused(plates, kept):
    batches = lc.ArrayBatches(X, Y, batch_size=4)
    with pytest.raises(ValueError, match=r"site 'y' observes 4 of the 12 rows.*12, rows\) as rows"):
        check_batches(partial(forgotten_rows, plates, kept), batches, (), {})


@pytest.mark.parametrize(
    ("plates", "kept", "batch_size"),
    [
        ([whole], True, 4),
        ([scaled_by(1 / 3), whole], True, 4),  # tempered, so that the scale is 1 in all
        ([scaled_by(3.0), plain], False, 4),
        ([subsampled, masked], False, 4),
        ([of_batch], True, N),
    ],
)
def test_minibatches_scaled_in_other_ways_are_not_refused(plates, kept, batch_size):
    batches = lc.ArrayBatches(X, Y, batch_size=batch_size)
    check_batches(partial(forgotten_rows, plates, kept), batches, (), {})


def test_minibatches_are_refused_only_where_their_scale_matters():
    """It does not for parameters and the minibatch's own latent sites, nor for other data."""

    def likelihood(x, y, rows):
        with lc.class_plate("classes", K, y, 5) as classes:
            w = numpyro.param("w", jnp.zeros(K), event_dim=0)
        with numpyro.plate("data", len(x)):
            shift = numpyro.sample("shift", dist.Normal(0, 1))
            utilities = (x + shift)[:, None] * w
            numpyro.sample("y", lc.UtilityCategorical(utilities, classes), obs=y)

    def other_data(x, y, rows):
        forgotten_rows([whole], True, x, y, rows)
        a = numpyro.sample("a", dist.Normal(0, 1))
        numpyro.sample("z", dist.Normal(a, 1).expand([4]).to_event(1), obs=jnp.ones(4))

    def prior_as_a_factor(x, y, rows):
        with lc.class_plate("classes", K) as classes:
            w = lc.gaussian_weights("w", classes)
        means, variances = x[:, None] * w.loc, x[:, None] ** 2 * w.variance
        lc.sample_choice("y", means, variances=variances, obs=y)

    def prior_scaled_down(x, y, rows):
        with numpyro.handlers.scale(scale=len(x) / N):
            with lc.class_plate("classes", K, y, 5) as classes:
                w = numpyro.sample("w", dist.Normal(0, 1))
        with numpyro.plate("data", len(x)):
            numpyro.sample("y", lc.UtilityCategorical(x[:, None] * w, classes), obs=y)

    batches = lc.ArrayBatches(X, Y, batch_size=4)
    with pytest.raises(ValueError, match="site 'y' observes 4 of the 12 rows"):
        check_batches(prior_as_a_factor, batches, (), {})
    for model in (likelihood, other_data, prior_scaled_down):
        check_batches(model, batches, (), {})


def with_forgotten_plate(x, y, rows):
    forgotten_rows([whole], True, x, y, rows)
    a = numpyro.sample("a", dist.Normal(0, 1))
    numpyro.sample("z", dist.Normal(a, 1).expand([len(x)]).to_event(1), obs=x)


def with_data_of_classes(x, y, rows):
    """Each class has a price, which follows from its weight: nothing of the minibatch."""
    with lc.class_plate("classes", K, y, 5) as classes:
        w = numpyro.sample("w", dist.Normal(0, 1))
        numpyro.sample("price", dist.Normal(w, 1), obs=jnp.arange(1.0 * K)[classes.indices])
    with lc.data_plate("data", N, rows) as rows:
        lc.sample_choice("y", x[:, None] * w, classes=classes, rows=rows, obs=y)


def check_as_run(model, batches):
    """Look at batches as ``run`` does, without a fit."""
    plan, data = svi_of(model).plan, RunData((), {}, batches)
    data.check(plan, skip_bad=False)
    data.first_state(lambda *_: (plan, None), LossLog(1, False, False))


@pytest.mark.parametrize("batch_size", [4, 1])
@pytest.mark.parametrize("kind", ["arrays", "streamed", "iterator"])
def test_minibatches_of_any_kind_must_be_scaled_and_data_of_classes_need_not(kind, batch_size):
    batches = lc.StreamedBatches(X, Y, batch_size=batch_size)
    if kind == "arrays":
        batches = lc.ArrayBatches(X, Y, batch_size=batch_size)

    def given():
        return map(batches.batch, range(9)) if kind == "iterator" else batches

    check_as_run(with_data_of_classes, given())
    with pytest.raises(ValueError, match=f"site 'z' observes {batch_size} of the 12 rows"):
        check_as_run(with_forgotten_plate, given())


def masked_factor(factor):
    with numpyro.handlers.mask(mask=factor < 0):
        numpyro.factor("f", factor)


def repeated_factor(factor):
    with numpyro.plate("halves", 2):
        numpyro.factor("f", factor.sum() / 2)


FORMS = {
    "by row": partial(numpyro.factor, "f"),
    "summed": lambda factor: numpyro.factor("f", factor.sum()),
    "scaled inside": lambda factor: numpyro.factor("f", 3 * factor.sum()),
    "masked": masked_factor,
    "repeated": repeated_factor,
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["arrays", "streamed", "iterator"])
def test_factors_of_a_minibatch_must_be_scaled(kind, form):
    """Outside of all plates, also beside a site that is scaled; and by what NumPyro can see."""

    def model(around, x, y, rows):
        forgotten_rows([whole], True, x, y, rows)
        a = numpyro.sample("a", dist.Normal(0, 1))
        numpyro.factor("penalty", -(a**2))  # is of no row
        with around:
            FORMS[form](-((x - a) ** 2))

    def given():
        arrays = lc.ArrayBatches(X, Y, batch_size=4)
        streamed = lc.StreamedBatches(X, Y, batch_size=4)
        every = {"arrays": arrays, "streamed": streamed, "iterator": map(streamed.batch, range(9))}
        return every[kind]

    check_as_run(partial(model, numpyro.handlers.scale(scale=3.0)), given())
    with pytest.raises(ValueError, match=r"'f' observes 4 of the 12.*handlers.scale\(scale=12 / 4"):
        check_as_run(partial(model, ExitStack()), given())


@pytest.mark.parametrize(("batch_size", "features"), [(4, 8), (1, 3)])
def test_factors_of_classes_and_features_are_not_taken_for_rows(batch_size, features):
    """They follow from the minibatch by the rows that it touches."""

    def model(x, y, rows):
        with lc.class_plate("classes", K, y, 5, dim=-1) as classes:
            bias = lc.gaussian_weights("bias", classes)
            with numpyro.plate("features", features, dim=-2):
                w = lc.gaussian_weights("w", classes)
                numpyro.factor("ridge", -(w.loc**2))
        with lc.data_plate("data", N, rows, dim=-1) as rows:
            utilities = x[:, None] * (w.loc.sum(0) + bias.loc)
            lc.sample_choice("y", utilities, classes=classes, rows=rows, obs=y)

    batches = lc.StreamedBatches(X, Y, batch_size=batch_size)
    arrays = lc.ArrayBatches(X, Y, batch_size=batch_size)
    for given in (arrays, batches, map(batches.batch, range(9))):
        check_as_run(model, given)


def test_a_run_on_a_stream_checks_how_its_first_minibatch_is_scaled():
    batches = lc.StreamedBatches(X, Y, batch_size=4)
    for given in (batches, map(batches.batch, range(9))):
        with pytest.raises(ValueError, match="site 'z' observes 4 of the 12 rows"):
            svi_of(with_forgotten_plate).run(random.key(0), 2, batches=given, progress_bar=False)


def test_other_data_that_come_with_each_minibatch_are_not_refused():
    """A few rows that are there in each step; and all of the data, with a plate of features."""

    def with_labelled(labelled, x, rows):
        a = numpyro.sample("a", dist.Normal(0, 1))
        numpyro.factor("same", -((labelled - a) ** 2).sum())
        with numpyro.plate("labelled", 5):
            numpyro.sample("l", dist.Normal(a, 1), obs=labelled)
        with lc.data_plate("data", N, rows):
            numpyro.sample("z", dist.Normal(a, 1), obs=x)

    def of_all(x):
        a = numpyro.sample("a", dist.Normal(0, 1))
        numpyro.sample("z", dist.Normal(a, 1).expand([N]).to_event(1), obs=x)
        with numpyro.plate("features", 100, subsample_size=10) as features:
            numpyro.sample("f", dist.Normal(a, 1), obs=jnp.arange(100.0)[features])

    rows = np.array([7, 2, 1, 11])
    for model, batch in ((with_labelled, (X[:5], X[rows], rows)), (of_all, (X,))):
        check_as_run(model, iter([batch]))


class Rule:
    """Moves rows as a function says, and has the state that it is given."""

    def __init__(self, move, state=()):
        self.move, self.state = move, state

    def init(self, value):
        return self.state

    def update(self, value, state, statistic):
        return self.move(value, state)


def run_with_rule(rule):
    def model(x, y, rows):
        with lc.class_plate("classes", K, y, 5) as classes:
            w = numpyro.sample("w", dist.Normal(0, 1))
        with lc.data_plate("data", N, rows) as rows:
            how = {"classes": classes, "rows": rows, "update_rule": rule}
            lc.sample_choice("y", x[:, None] * w, obs=y, **how)

    batches = lc.ArrayBatches(X, Y, batch_size=4)
    return svi_of(model).run(random.key(0), 1, batches=batches, progress_bar=False)


@pytest.mark.parametrize(
    ("move", "error", "message"),
    [
        (lambda value, state: value, TypeError, "the moved rows and their state, a pair; got"),
        (
            lambda value, state: (value[:1], state),
            ValueError,
            r"floats \(4,\).*; got floats \(1,\) ",
        ),
        (
            lambda value, state: (value, value),
            ValueError,
            r"; got floats \(4,\), floats",
        ),
        (lambda value, state: (jnp.int32(value), state), ValueError, r"; got integers \(4,\) "),
    ],
)
def test_a_rule_must_give_what_it_got(move, error, message):
    with pytest.raises(error, match=f"`update_rule` of param 'y_u' must return .*{message}"):
        run_with_rule(Rule(move))


def test_the_state_of_a_rule_may_be_any_tree():
    """Also one whose class does not compare, such as a partial function."""
    state = jax.tree_util.Partial(jnp.add, jnp.zeros(N))
    found = run_with_rule(Rule(lambda value, state: [value + 1, state], state))
    assert (found.params["y_u"] != 0).sum() >= 4
