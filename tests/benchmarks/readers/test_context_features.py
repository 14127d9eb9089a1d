# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import numpy as np
import pytest

from benchmarks.readers.context_features import context_features, next_token_classification


def random_contexts(num_tokens=30, num_categories=20, size=3000):
    """The class is mostly a function of the nearest token and a little of the second."""
    rng = np.random.default_rng(0)
    contexts = rng.integers(num_tokens, size=(size, 3))
    noise = rng.integers(num_categories, size=size)
    labels = (contexts[:, 0] * 7 + contexts[:, 1] % 2) % num_categories
    return contexts, np.where(rng.random(size) < 0.2, noise, labels)


def features(contexts, labels, contexts_test, num_features=24):
    return context_features(
        contexts, labels, contexts_test, num_tokens=30, num_categories=20, num_features=num_features
    )


def test_training_columns_are_standardised():
    contexts, labels = random_contexts()
    x, _ = features(contexts, labels, contexts[:5])
    assert x.dtype == np.float32
    np.testing.assert_allclose(x.mean(axis=0), 0, atol=1e-4)
    np.testing.assert_allclose(x.std(axis=0), 1, atol=1e-3)


def test_the_same_context_has_the_same_features_in_train_and_test():
    contexts, labels = random_contexts()
    x_train, x_test = features(contexts, labels, contexts[100:200])
    np.testing.assert_array_equal(x_train[100:200], x_test)


def test_test_contexts_do_not_change_the_training_features():
    contexts, labels = random_contexts()
    first, _ = features(contexts, labels, contexts[:10])
    second, _ = features(contexts, labels, contexts[10:500])
    np.testing.assert_allclose(first, second, atol=1e-4)


def test_each_position_has_its_own_columns_and_the_nearest_the_most():
    """Changing the token at one position changes exactly that position's columns."""
    contexts, labels = random_contexts()
    changed = np.tile([[0, 0, 0]], (4, 1))
    changed[np.arange(1, 4), np.arange(3)] = 1
    _, x = features(contexts, labels, changed)
    blocks = [np.flatnonzero(np.any(x[p + 1 : p + 2] != x[:1], axis=0)) for p in range(3)]
    assert np.concatenate(blocks).tolist() == list(range(24))
    assert [len(block) for block in blocks] == [11, 8, 5]


def test_default_split_of_128_columns():
    rng = np.random.default_rng(0)
    contexts, labels = rng.integers(90, size=(4000, 3)), rng.integers(80, size=4000)
    x, _ = context_features(contexts, labels, contexts[:1], num_tokens=90, num_categories=80)
    changed = contexts[:1].repeat(4, axis=0)
    changed[np.arange(1, 4), np.arange(3)] = (contexts[0] + 1) % 90
    _, x_test = context_features(contexts, labels, changed, num_tokens=90, num_categories=80)
    assert x.shape == (4000, 128)
    assert np.count_nonzero(x_test[1:] != x_test[:1], axis=1).tolist() == [63, 43, 22]


def test_tokens_with_the_same_successors_have_the_same_features():
    """Tokens 0 and 1 are followed by the same classes, token 1 three times as often."""
    contexts, labels = random_contexts()
    contexts = contexts[:, :1]
    as_zero = contexts[:, 0] == 0
    keep = contexts[:, 0] != 1
    contexts = np.concatenate([contexts[keep], *[contexts[as_zero] + 1] * 3])
    labels = np.concatenate([labels[keep], *[labels[as_zero]] * 3])
    _, x = features(contexts, labels, np.array([[0], [1], [2]]), num_features=8)
    np.testing.assert_allclose(x[0], x[1], atol=1e-4)
    assert np.abs(x[0] - x[2]).max() > 0.1


def test_a_linear_model_of_the_features_predicts_held_out_classes():
    """Least squares on the features is right far more often than the most frequent class."""
    contexts, labels = random_contexts()
    train, test = slice(0, 2500), slice(2500, None)
    x_train, x_test = features(contexts[train], labels[train], contexts[test])
    weights = np.linalg.lstsq(x_train, np.eye(20)[labels[train]], rcond=None)[0]
    correct = np.mean(np.argmax(x_test @ weights, axis=1) == labels[test])
    most_frequent = np.mean(labels[test] == np.bincount(labels[train]).argmax())
    assert correct > most_frequent + 0.2


def test_an_unseen_token_has_finite_features():
    contexts, labels = random_contexts()
    seen = contexts.max(axis=1) < 29
    _, x = features(contexts[seen], labels[seen], np.full((1, 3), 29))
    assert np.isfinite(x).all()


@pytest.mark.parametrize("num_features", [3, 5])
def test_too_few_features_is_an_error(num_features):
    contexts, labels = random_contexts()
    with pytest.raises(ValueError, match=rf"`num_features` must be at least 6.*got {num_features}"):
        features(contexts, labels, contexts, num_features)


def test_too_many_features_for_the_classes_is_an_error():
    contexts, labels = random_contexts()
    with pytest.raises(ValueError, match=r"`num_features`.*classes \(20\); got 29 columns"):
        features(contexts, labels, contexts, 60)


def test_more_features_than_the_rank_is_an_error():
    contexts, labels = random_contexts()
    with pytest.raises(ValueError, match="lower rank"):
        features(np.minimum(contexts, 3), labels, contexts, 24)


def test_shapes_that_do_not_fit_are_an_error():
    contexts, labels = random_contexts()
    with pytest.raises(ValueError, match=r"`contexts_train`.*\(3000, 3\), \(2999,\)"):
        features(contexts, labels[1:], contexts)


def test_places_without_a_class_are_dropped_and_rare_tokens_stay_in_contexts():
    """`x` is rare: it is no label, but the observation after it is kept."""
    train = [list("abcabdacbd" * 3 + "xab"), list("ba")]
    data = next_token_classification(train, [list("axby")], min_count=2, num_features=6)
    assert data.class_names == ("a", "b", "c", "d")
    assert len(data.y_train) == 34
    assert data.y_train[-4:].tolist() == [0, 1, 1, 0]
    assert data.y_test.tolist() == [0, 1]


def test_contexts_start_afresh_with_each_sequence():
    """The first observation of every sequence has the same features, whatever came before."""
    train = [list("abcabdacbd" * 3), list("dab"), list("cab")]
    data = next_token_classification(train, [list("ab"), list("da")], min_count=1, num_features=6)
    np.testing.assert_array_equal(data.x_test[0], data.x_test[2])
    np.testing.assert_array_equal(data.x_train[[30, 33]], data.x_test[[0, 2]])
    assert np.any(data.x_test[0] != data.x_test[1])
