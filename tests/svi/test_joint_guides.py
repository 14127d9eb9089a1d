# SPDX-License-Identifier: Apache-2.0
"""Guides that draw all rows together, where a step holds some rows of a plate."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.handlers import block
from numpyro.infer import Trace_ELBO, autoguide
from numpyro.infer.autoguide import AutoGuideList, AutoMultivariateNormal, AutoNormal, AutoSemiDAIS

import numpyro_largecat as lc
from tests.models import NUM_CATEGORIES, make_data

X, Y = map(np.asarray, make_data())


def model(x, y=None, rows=None):
    """Two sites outside of a sampled class plate, one inside."""
    shift = numpyro.sample("shift", dist.Normal(0, 1))
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    with lc.class_plate("classes", NUM_CATEGORIES, y, 2) as classes:
        b = numpyro.sample("b", dist.Normal(shift, scale))
    with lc.data_plate("data", len(X), rows) as rows:
        lc.sample_choice("y", x[:, :1] * b, classes=classes, rows=rows, obs=y)


def only_local(x, y, rows):
    with lc.class_plate("classes", NUM_CATEGORIES, y, 2) as classes:
        b = numpyro.sample("b", dist.Normal(0, 1))
    with lc.data_plate("data", len(X), rows) as rows:
        lc.sample_choice("y", x[:, :1] * b, classes=classes, rows=rows, obs=y)


def svi_of(guide, model=model):
    return lc.SubsampledSVI(model, guide, optax.adagrad(0.05), Trace_ELBO())


def init(guide, model=model, num_rows=5):
    rows = np.arange(num_rows)
    return svi_of(guide, model).init(jax.random.key(0), X[rows], Y[rows], rows)


@pytest.mark.parametrize(
    ("name", "recommended"),
    [
        ("AutoMultivariateNormal", "AutoMultivariateNormal"),
        ("AutoLowRankMultivariateNormal", "AutoLowRankMultivariateNormal"),
        ("AutoDiagonalNormal", "AutoDiagonalNormal"),
        ("AutoIAFNormal", "AutoIAFNormal"),
        ("AutoBNAFNormal", "AutoBNAFNormal"),
        ("AutoLaplaceApproximation", "AutoMultivariateNormal"),
        ("AutoDAIS", "AutoMultivariateNormal"),
    ],
)
def test_a_joint_guide_is_refused_and_the_message_says_what_works(name, recommended):
    message = (
        rf"(?s){name} draws all rows.*site 'b' is inside plate 'classes'"
        r".*holds 7 rows, not all 12"
        r".*AutoNormal\(numpyro.handlers.block\(model, hide=\['scale', 'shift'\]\)\)"
        rf".*{recommended}\(numpyro.handlers.block\(model, hide=\['b'\]\)\)"
        r".*leave `num_sampled` out"
    )
    with pytest.raises(NotImplementedError, match=message):
        init(getattr(autoguide, name)(model))


def test_a_joint_guide_is_refused_where_the_step_has_as_many_rows_as_there_are_classes():
    """10 labels and 2 drawn classes are 12 rows, but not the 12 classes in order."""
    with pytest.raises(NotImplementedError, match="holds 12 rows, not all 12"):
        init(AutoMultivariateNormal(model), num_rows=10)


def test_a_joint_guide_of_classes_alone_has_its_own_remedy():
    with pytest.raises(NotImplementedError, match=r"Use AutoNormal\(model\) or AutoDelta\(model\)"):
        init(AutoMultivariateNormal(only_local), only_local)


def test_a_guide_by_gradients_of_local_values_is_refused_for_classes():
    def around(x, y, rows):
        only_local(x, y, rows)

    with pytest.raises(NotImplementedError, match=r"AutoSemiDAIS.*site 'b' is inside plate"):
        init(AutoSemiDAIS(around, only_local), around)


@pytest.mark.slow
@pytest.mark.parametrize("joint", ["AutoMultivariateNormal", "AutoIAFNormal"])
def test_the_guide_that_the_message_names_runs_and_predicts(joint):
    guide = AutoGuideList(model)
    guide.append(AutoNormal(block(model, hide=["scale", "shift"])))
    guide.append(getattr(autoguide, joint)(block(model, hide=["b"])))
    batches = lc.ArrayBatches(X, Y, batch_size=5)
    result = svi_of(guide).run(jax.random.key(0), 5, batches=batches, progress_bar=False)
    assert np.isfinite(result.losses).all()
    assert result.params["b_auto_loc"].shape == (NUM_CATEGORIES,)
    if joint == "AutoMultivariateNormal":
        assert result.params["auto_scale_tril"].shape == (2, 2)
        new = lc.Fitted(model, guide, result.params).on(X[:3])
        top = new.top_classes(2, rng_key=jax.random.key(1), num_draws=2)
        assert top.classes.shape == (3, 2)


@pytest.mark.slow
def test_a_joint_guide_of_a_full_plate_is_not_refused():
    def full(x, y, rows):
        with lc.class_plate("classes", NUM_CATEGORIES) as classes:
            b = numpyro.sample("b", dist.Normal(0, 1))
        with lc.data_plate("data", len(X), rows) as rows:
            lc.sample_choice("y", x[:, :1] * b, classes=classes, rows=rows, obs=y)

    svi = svi_of(AutoMultivariateNormal(full), full)
    state = svi.init(jax.random.key(0), X[:5], Y[:5], jnp.arange(5))
    expected = NUM_CATEGORIES, NUM_CATEGORIES
    assert svi.get_params(state)["auto_scale_tril"].shape == expected
