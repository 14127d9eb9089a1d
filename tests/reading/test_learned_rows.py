# SPDX-License-Identifier: Apache-2.0
"""Learned priors of rows, as a diagnosis sees them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer.autoguide import AutoNormal

import numpyro_largecat as lc
from numpyro_largecat.reading.learned_rows import learned_priors_of_classes, learned_rows
from tests.models import NUM_CATEGORIES, hierarchical, make_data

X, Y = make_data()
ROWS = jnp.arange(len(Y))


def bound(model, *args):
    return lc.Fitted(model, lambda *_: None, {}).on(*args)._fit


def test_a_learned_prior_of_rows_is_told_from_a_fixed_one():
    fit = bound(hierarchical(num_sampled=4), X, Y, ROWS)
    assert learned_rows(fit) == {"w": {"classes"}}
    assert learned_rows(bound(lc.not_centred(hierarchical(num_sampled=4)), X, Y, ROWS)) == {}


@pytest.mark.parametrize("is_centred", [True, False])
def test_the_form_of_a_learned_prior_is_judged_by_the_data(is_centred):
    """By how many classes occur at all, and how often each does."""
    model = hierarchical(num_sampled=4)
    fit = bound(model if is_centred else lc.not_centred(model), X, Y, ROWS)
    size = NUM_CATEGORIES

    def found(labels, plate="classes"):
        return learned_priors_of_classes(fit, plate, np.asarray(labels), size)

    *one_share, one_class = found(np.zeros(20 * size, int))
    *all_share, all_classes = found(np.arange(size))
    *often_share, often = found(np.tile(np.arange(size), 10))
    *_, few_often = found(np.tile(np.arange(size // 3), 100))
    assert found([0], "another") == []
    if is_centred:
        (share,) = one_share
        assert share.value == 1 / size and share.advice.endswith("lc.not_centred")
        assert not one_class.advice  # once is enough
        assert not all_share[0].advice and not often_share[0].advice
        assert all_classes.value == 1 and all_classes.advice.endswith("lc.not_centred")
        assert often.value == 10 and not often.advice
    else:
        assert all_classes.value == 1 and not all_classes.advice
        assert few_often.value == 0 and not few_often.advice
        assert often.value == 10 and often.advice.endswith("leave out lc.not_centred")


@pytest.mark.slow
@pytest.mark.parametrize("is_learned", [False, True])
def test_small_sites_beside_entities_are_looked_at_as_far_as_they_are_known(is_learned):
    """Of entities a minibatch has some; with a learned prior that of the others is not known."""
    counts = lc.EntityCounts.of(NUM_CATEGORIES, np.asarray(Y))

    def model(x, y=None, rows=None):
        sd = numpyro.sample("sd", dist.LogNormal(0, 1))
        with lc.entity_plate("users", NUM_CATEGORIES, y, counts) as read:
            z = numpyro.sample("z", dist.Normal(0, sd if is_learned else 1.0))
        with lc.class_plate("classes", 3) as classes:
            pass
        own = read.rows_of(z, y)[:, None] * (1 if is_learned else sd)
        with lc.data_plate("data", len(Y), rows):
            utilities = own * x[:, classes.indices]
            numpyro.sample("c", lc.UtilityCategorical(utilities, classes), obs=y % 3)

    guide = AutoNormal(model)
    numpyro.handlers.seed(guide, 0)(X[:3], Y[:3], ROWS[:3])
    params = {"sd_auto_loc": jnp.array(0.0), "sd_auto_scale": jnp.array(0.6)}
    params |= {"z_auto_loc": jnp.zeros(NUM_CATEGORIES), "z_auto_scale": jnp.ones(NUM_CATEGORIES)}
    found = (
        lc.Fitted(model, guide, params)
        .on(X, Y, ROWS)
        .diagnose(rng_key=jax.random.key(0), num_repeats=2)
    )
    by_name = {finding.name: finding for finding in found.findings}
    pareto_k = by_name["Pareto k of the small sites"]
    assert np.isnan(pareto_k.value) == ("lc.not_centred" in pareto_k.advice) == is_learned
    assert ("sd over that of the best Gaussian, sd" in by_name) is not is_learned
    assert by_name["sd of log sd"].value == pytest.approx(0.6, rel=0.25)  # of 200 draws
    assert by_name["sd of log sd"].advice
