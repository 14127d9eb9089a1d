# SPDX-License-Identifier: Apache-2.0
"""What the label of an observation is compared with: the batch's classes, shared or own ones."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import norm

import numpyro_largecat as lc
from numpyro_largecat.plates.frequency_proposal import FrequencyProposal
from tests.memory import temp_bytes
from tests.plates.many_draws import (
    FALSE_ALARM,
    LABELS,
    K,
    assert_means,
    draw_classes,
    draw_often,
    draw_once,
    weight_of_each_class,
)

COUNTS = np.array([100, 40, 10, 1, 3, 20, 2, 7, 1])
LAYOUTS = {
    "batch": {},
    "shared": {"negatives": "shared"},
    "shared, by frequency": {"negatives": "shared", "proposal": FrequencyProposal(COUNTS)},
    "own": {"negatives": "own"},
}
layouts = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)


@pytest.mark.parametrize("num_sampled", [1, 5])
@layouts
@pytest.mark.some_cases(4)
def test_the_mean_weight_of_each_class_is_one(layout, num_sampled):
    """For each observation, whose label always has weight one, and for prior and KL terms."""
    labels = np.array(list(LABELS.values()))
    drawn = jax.device_get(draw_often(labels, num_sampled, 4000, **layout))

    @jax.jit
    @jax.vmap
    @jax.vmap
    def of_plate(classes):
        return weight_of_each_class(classes.indices, classes.row_weights)

    @jax.jit
    def of_observations(labels, drawn):
        def of_draw(classes):
            def total(k):
                psi = classes.utilities(lambda y, i: (i == k) + 0.0, (labels,), (classes.indices,))
                counts = classes.without_labels(psi) > -jnp.inf
                return jnp.where(counts, psi, 0) @ classes.weights

            return jax.vmap(total, out_axes=1)(jnp.arange(K))

        return jax.vmap(of_draw)(drawn)

    assert_means(of_plate(drawn), 1, axis=1)
    for n, own in enumerate(labels):
        weights = of_observations(own, jax.tree.map(lambda x, n=n: x[n], drawn))
        assert weights.shape == (4000, 4, K)
        assert_means(weights, 1)
        np.testing.assert_allclose(np.asarray(weights)[:, np.arange(4), own], 1, rtol=1e-6)


def test_shared_negatives_may_be_labels_and_then_have_their_row():
    """Of 500 draws of four from nine, some have a label; none is there twice with a weight."""
    drawn = draw_often([[4, 2, 4]], 4, 500, negatives="shared")
    rows, weights = np.asarray(drawn.indices)[0], np.asarray(drawn.row_weights)[0]
    is_label = np.isin(rows[:, 3:], [2, 4])
    assert 0 < is_label.mean() < 1
    assert (weights[:, 3:][is_label] == 0).all()
    assert (np.asarray(drawn.shared.drawn_rows)[0][is_label] < 2).all()
    for own, weight in zip(rows, weights, strict=True):
        assert len(set(own[weight > 0])) == (weight > 0).sum()


@pytest.mark.parametrize("num_sampled", [2, K - 1])
def test_own_negatives_are_the_label_and_distinct_others(num_sampled):
    labels = np.array(LABELS["repeated"])
    drawn = draw_often([labels], num_sampled, 100, negatives="own")
    assert drawn.weights.shape == (1, 100, 1 + num_sampled)
    weights = np.asarray(drawn.weights)
    np.testing.assert_allclose(weights[..., 0], 1)
    np.testing.assert_allclose(weights[..., 1:], (K - 1) / num_sampled, rtol=1e-6)
    sets = np.asarray(drawn.indices).reshape(100, 4, 1 + num_sampled)
    assert (sets[..., 0] == labels).all()
    assert all(len(set(row)) == 1 + num_sampled for row in sets.reshape(-1, 1 + num_sampled))


def test_own_negatives_are_drawn_independently():
    """Of 2000 pairs of sets of one draw each from 8, about one in eight is equal."""
    drawn = draw_often([[4, 4]], 1, 2000, negatives="own")
    others = np.asarray(drawn.indices)[0].reshape(2000, 2, 2)[..., 1]
    equal = (others[:, 0] == others[:, 1]).mean()
    error = np.sqrt(1 / 8 * 7 / 8 / 2000)
    assert abs(equal - 1 / 8) < norm.isf(FALSE_ALARM / 2) * error


@pytest.mark.parametrize("negatives", ["shared", "own"])
def test_place_and_holds_are_those_of_the_observation(negatives):
    classes = draw_once(0, np.array([4, 2, 4]), 3, negatives=negatives)
    assert classes.kind == "sample"
    assert classes.place(jnp.array([4, 2, 4])).tolist() == [0, 0, 0]
    assert classes.holds(jnp.array([4, 4, 2])).tolist() == [True, False, False]


@pytest.mark.parametrize("negatives", ["shared", "own"])
def test_a_label_that_the_observation_does_not_have_is_nan(negatives):
    labels = np.array([3, 1, 0, 7])

    @jax.jit
    def log_prob(value):
        classes = draw_classes(0, labels, 3, negatives=negatives)
        return lc.UtilityCategorical(jnp.zeros((4, 4)), classes, u=2.5).log_prob(value)

    log_probs = log_prob(np.array([3, 1, 5, 7]))
    assert np.isnan(log_probs).tolist() == [False, False, True, False]


# Utilities of pairs.


@pytest.mark.parametrize("layout", [None, *LAYOUTS])
def test_utilities_are_those_of_the_pairs(layout):
    """Trees of observations and rows, and a value from outside; all classes, and each layout."""
    labels = np.array([4, 2, 4, 0])
    known = {} if layout is None else LAYOUTS[layout]
    x = {"x": np.arange(8, dtype=np.float32).reshape(4, 2)}
    w, b = np.sin(np.arange(2 * K)).reshape(K, 2), np.cos(np.arange(K))

    @jax.jit
    def utilities_and_ids(x, w, b, shift):
        classes = draw_classes(1, labels, None if layout is None else 3, **known)
        psi = classes.utilities(
            lambda x, row: x["x"] @ row["w"] + row["b"] + shift,
            (x,),
            ({"w": w[classes.indices], "b": b[classes.indices]},),
        )
        ids = classes.utilities(lambda x, k: k, (x["x"],), (classes.indices,))
        assert psi.shape == ids.shape == (4, classes.weights.shape[0])
        return psi, ids

    psi, ids = map(np.asarray, utilities_and_ids(x, w, b, 0.5))
    expected = np.take_along_axis(x["x"] @ w.T + b + 0.5, ids, axis=1)
    np.testing.assert_allclose(psi, expected, rtol=1e-5)
    if "negatives" in known:
        assert ids[:, 0].tolist() == labels.tolist()


def test_a_shared_negative_that_is_the_label_is_no_alternative():
    """All nine classes are drawn, so each label meets itself, and the bound is that of all."""
    labels = np.array([4, 2, 4])

    @jax.jit
    def bound(labels):
        classes = draw_classes(0, labels, K - 1, negatives="shared", proposal=EveryClass())
        psi = classes.utilities(lambda y, k: jnp.sin(k + 0.0), (labels,), (classes.indices,))
        return lc.UtilityCategorical(psi, classes, u=1.0).log_prob(labels)

    whole = np.sin(np.arange(K))
    eta = np.exp(whole - whole[labels][:, None]).sum(axis=1)
    np.testing.assert_allclose(bound(labels), -np.exp(-1.0) * eta, rtol=1e-5)


class EveryClass:
    """Draw all classes, each with weight 1."""

    def draw(self, rng_key, labels, num_categories, num_sampled):
        assert labels.shape == (0,)  # none is taken
        return jnp.arange(num_categories), jnp.ones(num_categories)


def test_shared_negatives_take_one_small_product():
    """Counted operations: the product is of B and S rows, not of B and B + S."""
    num_observations, num_sampled, num_features = 200, 20, 64
    labels = np.arange(num_observations)
    x = jax.ShapeDtypeStruct((num_observations, num_features), jnp.float32)

    def operations(negatives):
        def utilities(x, key):
            options = {"negatives": negatives, "num_categories": 10**6}
            classes = draw_classes(key, labels, num_sampled, **options)
            w = jnp.sin(classes.indices[:, None] * jnp.ones(num_features))
            return classes.utilities(jnp.dot, (x,), (w,))

        compiled = jax.jit(utilities).lower(x, jax.random.key(0)).compile()
        return compiled.cost_analysis()["flops"]

    more = 2 * num_observations * num_observations * num_features
    assert operations("batch") - operations("shared") > 0.8 * more


def test_memory_does_not_grow_with_the_classes():
    def bytes_at(num_categories):
        def weights(key, labels):
            options = {"negatives": "shared", "num_categories": num_categories}
            return draw_classes(key, labels, 20, **options).row_weights

        return temp_bytes(weights, jax.random.key(0), jnp.arange(50))

    assert bytes_at(10**3) == bytes_at(10**6)


# What is refused.

X4, ROWS = np.zeros((4, 2), np.float32), np.zeros((K, 2), np.float32)
ERRORS = {
    "a name of no layout": (
        lambda: draw_classes(0, np.array([4]), 3, negatives="none"),
        '`negatives` of plate \'classes\' must be "batch", "shared" or "own"; got \'none\'',
    ),
    "a proposal for each observation": (
        lambda: draw_classes(
            0, np.array([4]), 3, proposal=FrequencyProposal(COUNTS), negatives="own"
        ),
        'with negatives="own" classes are drawn uniformly; leave out `proposal`',
    ),
    "shared ones without labels": (
        lambda: draw_classes(0, None, 3, negatives="shared"),
        "`labels` of plate 'classes' are needed with negatives=\"shared\"",
    ),
    "own ones without labels": (
        lambda: draw_classes(0, None, 3, negatives="own"),
        "`labels` of plate 'classes' are needed with negatives=\"own\"",
    ),
    "labels of two axes": (
        lambda: draw_classes(0, np.array([[4]]), 3, negatives="shared"),
        r"`labels` of plate 'classes' must have shape \(B,\).*got shape \(1, 1\)",
    ),
    "rows of other classes": (
        lambda: draw_classes(0, None, None).utilities(jnp.dot, (X4,), (ROWS[:4],)),
        r"`rows` must have shape \(9, 2\), the rows of the class plate first; got shape \(4, 2\)",
    ),
    "more observations than labels": (
        lambda: draw_classes(0, np.arange(3), 2, negatives="shared").utilities(
            jnp.dot, (X4,), (ROWS[:5],)
        ),
        r"`observations` must have shape \(3, 2\), an entry for each observation first",
    ),
    "no observations": (
        lambda: draw_classes(0, None, None).utilities(lambda w: w[0], (), (ROWS,)),
        r"`observations` must have an array .* got \(\)",
    ),
    "an observation without an axis": (
        lambda: draw_classes(0, None, None).utilities(lambda x, w: x * w[0], (1.0,), (ROWS,)),
        r"`observations` must have shape \(1,\), an entry for each .* got shape \(\)",
    ),
    "no scalar": (
        lambda: draw_classes(0, None, None).utilities(lambda x, w: x * w, (X4,), (ROWS,)),
        r"`function\(observation, row\)` must have shape \(\), .* got shape \(2,\)",
    ),
    "shared ones without a label": (
        lambda: draw_classes(0, np.zeros(0, int), 3, negatives="own"),
        r"`labels` of plate 'classes' are needed with negatives=\"own\".*got shape \(0,\)",
    ),
    "utilities of one observation for all": (
        lambda: lc.UtilityCategorical(
            np.zeros((1, 4)), draw_classes(0, np.arange(3), 3, negatives="own")
        ),
        r"`utilities` must have shape \(..., 3, 4\), a row for each label",
    ),
    "utilities of all rows": (
        lambda: lc.UtilityCategorical(
            X4 @ ROWS[:7].T, draw_classes(0, np.arange(4), 3, negatives="shared")
        ),
        r"\(..., 4\), the label and its negatives, as `classes.utilities\(lambda x, w: x @ w",
    ),
    "whether it holds all rows": (
        lambda: (c := draw_classes(0, np.arange(4), 3, negatives="own")).holds(c.indices),
        r"`value` must have shape \(..., 4\), a class for each label of the plate; got shape",
    ),
    "utilities of the whole batch": (
        lambda: lc.UtilityCategorical(
            np.zeros((2, 4)), draw_classes(0, np.arange(3), 3, negatives="shared")
        ),
        r"`utilities` must have shape \(..., 3, 4\), a row for each label",
    ),
}


@pytest.mark.parametrize(("make", "message"), ERRORS.values(), ids=ERRORS)
def test_bad_arguments_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(make)
