# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.metrics import ndcg_score, top_k_accuracy_score

import numpyro_largecat as lc

N, K = 60, 12


def predictions(num_top=K):
    rng = np.random.default_rng(0)
    probabilities = rng.dirichlet(np.full(K, 0.5), size=N)
    order = np.argsort(-probabilities, axis=1)[:, :num_top]
    log_probs = np.log(np.take_along_axis(probabilities, order, 1))
    return probabilities, lc.TopClasses(jnp.array(order), jnp.array(log_probs))


def test_scores_of_one_label_are_those_of_scikit_learn():
    probabilities, top = predictions()
    y = np.random.default_rng(1).integers(0, K, N)
    scores = lc.score_predictions(top, y, np.log(probabilities[np.arange(N), y]), at=[1, 3, K - 1])
    for n in (1, 3, K - 1):
        hits = top_k_accuracy_score(y, probabilities, k=n, labels=np.arange(K))
        assert scores[f"precision at {n}"] == pytest.approx(hits / n)
        expected = ndcg_score(np.eye(K)[y], probabilities, k=n)
        assert scores[f"nDCG at {n}"] == pytest.approx(expected)
    assert scores["accuracy"] == scores["precision at 1"]
    expected = np.log(probabilities[np.arange(N), y]).mean()
    assert scores["log likelihood"] == pytest.approx(expected)


def test_scores_of_several_labels_are_those_of_scikit_learn():
    probabilities, top = predictions()
    rng = np.random.default_rng(1)
    labels = np.array([rng.permutation(K)[:3] for _ in range(N)])
    labels[::2, 2] = -1
    labels[1::2, 2] = labels[1::2, 0]  # given twice
    relevant = np.zeros((N, K + 1))
    np.put_along_axis(relevant, labels, 1, axis=1)  # padding goes to the last column
    relevant = relevant[:, :K]
    scores = lc.score_predictions(top, labels, at=[4])
    in_order = np.take_along_axis(relevant, np.asarray(top.classes), 1)
    assert scores["precision at 4"] == pytest.approx(in_order[:, :4].mean())
    assert scores["nDCG at 4"] == pytest.approx(ndcg_score(relevant, probabilities, k=4))
    recall = in_order[:, :4].sum(1) / relevant.sum(1)
    assert scores["recall at 4"] == pytest.approx(recall.mean())
    ranks = in_order.argmax(1) + 1
    assert scores["reciprocal rank"] == pytest.approx((1 / ranks).mean())


def test_of_several_labels_nothing_is_said_that_belongs_to_one():
    _, top = predictions()
    pairs = np.stack([np.zeros(N, int), np.ones(N, int)], axis=1)
    of_one, of_two = (lc.score_predictions(top, y) for y in (pairs[:, :1], pairs))
    assert of_one.keys() - of_two.keys() == {"accuracy", "calibration error"}


def test_classes_that_are_none_are_no_hits():
    """Where a list of candidates was short; nor is a label of the observation before."""
    top = lc.TopClasses(jnp.array([[2, -1], [-1, -1]]), jnp.array([[-0.1, -jnp.inf]] * 2))
    scores = lc.score_predictions(top, np.array([[2, 3], [0, 3]]), at=[1, 2])
    assert scores["recall at 1"] * 2 == scores["reciprocal rank"] == 0.5
    assert scores["recall at 2"] == 0.25


def test_the_log_likelihood_over_draws_is_that_of_the_mean_probability():
    _, top = predictions(2)
    log_probs = np.log(np.random.default_rng(2).uniform(size=(5, N)))
    scores = lc.score_predictions(top, np.zeros(N, int), log_probs, at=[])
    assert scores["log likelihood"] == pytest.approx(np.log(np.exp(log_probs).mean(0)).mean())


@pytest.mark.parametrize("num_draws", [None, 4])
def test_what_is_masked_does_not_count(num_draws):
    """Whatever its label, also -1; as if it were not there."""
    rng = np.random.default_rng(3)
    _, top = predictions()
    labels, mask = rng.integers(0, K, N), rng.uniform(size=N) < 0.6
    log_probs = np.log(rng.uniform(size=(N,) if num_draws is None else (num_draws, N)))
    some = lc.TopClasses(top.classes[mask], top.log_probs[mask])
    expected = lc.score_predictions(some, labels[mask], log_probs[..., mask], at=[2])
    in_rows = lc.TopClasses(*(x.reshape(2, N // 2, -1) for x in top))
    with_none = np.where(mask, labels, -1).reshape(2, -1)
    log_probs = log_probs.reshape(*log_probs.shape[:-1], 2, -1)
    found = lc.score_predictions(in_rows, with_none, log_probs, mask=mask.reshape(2, -1), at=[2])
    assert found == pytest.approx(expected)
    with pytest.raises(ValueError, match="`mask` leaves no observation"):
        lc.score_predictions(top, labels, mask=np.zeros(N, bool))
    with pytest.raises(ValueError, match="`mask` must have shape"):
        lc.score_predictions(top, labels, mask=mask[:-1])


def test_the_calibration_error_of_bins():
    """Two bins: 0.2 and 0.9 predicted, one half and three quarters true."""
    probabilities = np.repeat([0.2, 0.9], 4)
    top = lc.TopClasses(jnp.zeros((8, 1), int), jnp.log(probabilities)[:, None])
    obs = np.array([0, 0, 1, 1, 0, 0, 0, 1])
    error = lc.score_predictions(top, obs, at=[], num_bins=2)["calibration error"]
    assert error == pytest.approx((0.3 + 0.15) / 2, rel=1e-5)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"obs": np.zeros(3, int)}, ValueError, "`obs` must have one label.*shape \\(3,\\)"),
        ({"obs": np.zeros(N)}, TypeError, "`obs`"),
        ({"obs": np.full((N, 2), -1)}, ValueError, "observation 0 of `obs` has no label"),
        ({"at": [3]}, ValueError, "`at` must be ranks in \\[1, 2\\]"),
        (
            {"log_likelihood": np.zeros(3)},
            ValueError,
            "`log_likelihood` must have shape \\(60,\\), an entry for",
        ),
        ({"num_bins": 0}, ValueError, "num_bins"),
    ],
)
def test_bad_arguments_are_refused(arguments, error, message):
    _, top = predictions(2)
    with pytest.raises(error, match=message):
        lc.score_predictions(top, **{"obs": np.zeros(N, int), "at": [1]} | arguments)
