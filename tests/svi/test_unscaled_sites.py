# SPDX-License-Identifier: Apache-2.0
"""Minibatches must be scaled to all rows, where their scale matters, or they are refused."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial

import jax.numpy as jnp
import jax.random as random
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer import Trace_ELBO

import numpyro_largecat as lc
from numpyro_largecat.svi.batch_checks import check_batches
from numpyro_largecat.svi.loss_log import LossLog
from numpyro_largecat.svi.run_data import RunData
from tests.models import class_points_of

N, K = 12, 50
X = np.random.default_rng(0).normal(size=N).astype(np.float32)
Y = np.array([3, 7, 7, 1, 9, 5, 8, 2, 6, 9, 1, 8])


def svi_of(model):
    return lc.SubsampledSVI(model, class_points_of(K, w=()), optax.sgd(0.1), Trace_ELBO())


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
