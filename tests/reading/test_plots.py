# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pytest
from scipy.stats import binomtest

import numpyro_largecat as lc


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


def test_elbo_shows_the_negative_loss_and_its_mean_over_the_window():
    losses = np.array([9.0, 7.0, 5.0, 1.0])
    ax = lc.plots.elbo(losses, window=2)
    each, mean = ax.get_lines()
    np.testing.assert_allclose(each.get_ydata(), -losses)
    np.testing.assert_allclose(mean.get_xydata(), [[1, -8], [2, -6], [3, -3]])
    mean = lc.plots.elbo([4.0, np.nan, 2.0, np.nan, np.nan], window=2).get_lines()[1]
    np.testing.assert_allclose(mean.get_ydata(), [-4, -2, -2, np.nan])
    with pytest.raises(ValueError, match="at least one step"):
        lc.plots.elbo([])
    with pytest.raises(ValueError, match="at least one finite loss"):
        lc.plots.elbo([np.nan])


def test_a_huge_first_loss_does_not_reach_the_means_of_later_steps():
    mean = lc.plots.elbo([1e20] + [1e3] * 9, window=3).get_lines()[1]
    np.testing.assert_allclose(mean.get_ydata()[1:], -1e3)


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda: lc.plots.elbo(np.ones(3), window=0), "`window` must be at least 1; got 0"),
        (lambda: lc.plots.intervals(np.eye(2), "ab", -0.5), r"`probability` must be in \(0, 1\)"),
        (lambda: lc.plots.reliability(np.ones(3), np.ones(3), 0), "`num_bins` must be at least 1"),
        (lambda: lc.plots.accuracy_by_frequency([0], [0], [1], 0), "`num_bins` must be at least 1"),
        (lambda: lc.plots.confusion([0], [0], num_classes=1), "`num_classes` must be at least 2"),
        (lambda: lc.plots.accuracy_by_frequency([0, 1], [0, -1], [3, 1]), "`obs` .*classes of"),
        (lambda: lc.plots.confusion([0, 1], [0, 2], ["a", "b"]), r"`obs` .*integers in \[0, 2\)"),
        (lambda: lc.plots.confusion([0, -2], [0, 1]), "`predicted` .*or -1 for none"),
    ],
)
def test_numbers_out_of_range_are_refused(draw, message):
    with pytest.raises(ValueError, match=message):
        draw()


def test_intervals_span_the_central_probability():
    draws = np.stack([np.linspace(0, 1, 101), np.linspace(10, 20, 101)], axis=1)
    ax = lc.plots.intervals(draws, ["a", "b"], probability=0.8)
    segments = ax.collections[0].get_segments()
    np.testing.assert_allclose(np.array(segments)[:, :, 0], [[0.1, 0.9], [11, 19]])
    np.testing.assert_allclose(ax.get_lines()[0].get_xdata(), [0.5, 15])
    with pytest.raises(ValueError, match=r"\(num_draws, 1\), a column for .*shape \(101, 2\)"):
        lc.plots.intervals(draws, ["a"])


def test_reliability_counts_what_came_true_in_bins_of_equal_size():
    probabilities = np.array([0.9, 0.1, 0.2, 0.8, 0.95, 0.15])
    correct = np.array([True, False, True, False, True, False])
    ax = lc.plots.reliability(probabilities, correct, num_bins=2)
    points = ax.containers[0][0].get_xydata()
    np.testing.assert_allclose(points, [[0.15, 1 / 3], [(0.8 + 0.9 + 0.95) / 3, 2 / 3]])
    low, high = np.array(ax.containers[0][2][0].get_segments())[:, :, 1].T
    wilson = [binomtest(n, 3).proportion_ci(0.9545, "wilson") for n in (1, 2)]  # two errors
    np.testing.assert_allclose(low, [ci.low for ci in wilson], atol=1e-4)
    np.testing.assert_allclose(high, [ci.high for ci in wilson], atol=1e-4)
    with pytest.raises(ValueError, match="as `probabilities`"):
        lc.plots.reliability(probabilities, correct[:-1])


def test_exact_values_of_the_elbo_are_marked_and_in_sight():
    ax = lc.plots.elbo(np.linspace(9, 1, 50), window=5, exact={49: -0.5, 20: -7.0})
    np.testing.assert_allclose(ax.get_lines()[2].get_xydata(), [[20, -7], [49, -0.5]])
    assert ax.get_ylim()[1] > -0.5


def test_accuracy_is_shown_by_the_training_count_of_the_class():
    """Three classes of counts 1, 10 and 100, each in a bin."""
    obs = np.array([0, 0, 1, 1, 1, 1, 2, 2])
    predicted = np.array([1, 2, 1, 1, 1, 0, 2, 2])
    ax = lc.plots.accuracy_by_frequency(predicted, obs, np.array([1, 10, 100]), num_bins=8)
    points = ax.containers[0][0].get_xydata()
    np.testing.assert_allclose(points, [[1.5, 0], [10.5, 0.75], [100.5, 1]])
    np.testing.assert_allclose(ax.get_lines()[0].get_ydata(), 5 / 8)
    with pytest.raises(ValueError, match="as `obs`"):
        lc.plots.accuracy_by_frequency(predicted[1:], obs, np.ones(3))


def test_confusion_shows_the_classes_in_most_errors():
    """Classes 0 and 3 are confused four times, 1 is taken for 2 once, and 4 is always right."""
    obs = np.array([0, 0, 0, 3, 3, 3, 1, 4, 4])
    predicted = np.array([3, 3, 0, 0, 0, 3, 2, 4, 4])
    ax = lc.plots.confusion(predicted, obs, num_classes=2)
    assert [text.get_text() for text in ax.get_xticklabels()] == ["0", "3"]
    np.testing.assert_allclose(ax.get_images()[0].get_array(), 100 / 3 * np.array([[1, 2], [2, 1]]))
    everything = lc.plots.confusion(obs, obs)  # all are right
    np.testing.assert_allclose(everything.get_images()[0].get_array(), 100 * np.eye(4))


def test_observations_of_which_no_class_is_predicted_are_none():
    """Their id, -1, is no place in the names."""
    ax = lc.plots.confusion([-1, -1, 0], [1, 1, 0], ["a", "b", "c"])
    assert [text.get_text() for text in ax.get_xticklabels()] == ["none", "a", "b"]


def test_axes_may_be_given():
    ax = plt.subplots()[1]
    assert lc.plots.elbo([1.0], ax=ax) is ax


def test_topics_have_their_words_from_the_top_on_one_scale():
    words = [[lc.topics.TopWord("sea", 0.3), lc.topics.TopWord("ship", 0.1)], [("moon", 0.2)]] * 3
    axes = lc.plots.topics(words)
    assert [ax.get_title() for ax in axes] == [f"topic {k}" for k in range(6)]
    first, second = axes[:2]
    assert [label.get_text() for label in first.get_yticklabels()] == ["sea", "ship"]
    np.testing.assert_allclose([bar.get_width() for bar in first.patches], [0.3, 0.1])
    assert first.yaxis_inverted() and first.get_xlim() == second.get_xlim()
    unused = [ax for ax in first.figure.axes if not ax.get_visible()]
    assert len(unused) == 2
    again = lc.plots.topics(words[:2], ["one", "two"], axes[:2])
    assert again[1] is second and second.get_title() == "two"
    with pytest.raises(ValueError, match="at least one topic"):
        lc.plots.topics([])
    fit = lc.TopicFit(np.ones((1, 1)), np.ones(1), 0.1, 1, ("sea",), np.zeros(0))
    with pytest.raises(
        TypeError, match=r"lists of words, `fit\.top_words\(8\)\[:12\]`; got the fit"
    ):
        lc.plots.topics(fit)
    with pytest.raises(ValueError, match="`titles` must have one for each of the 6 topics; got 1"):
        lc.plots.topics(words, ["one"])


def test_a_map_of_classes_is_turned_and_not_stretched():
    """Points of a plane in five dimensions keep their distances; the wider axis comes first."""
    rng = np.random.default_rng(0)
    plane = rng.normal(size=(30, 2)) * [1, 4]
    turn = np.linalg.qr(rng.normal(size=(5, 5)))[0][:2]
    ax = lc.plots.class_map(plane @ turn + 7, {2: "two"}, color=np.arange(30))
    points = np.asarray(ax.collections[0].get_offsets())
    centred = plane - plane.mean(axis=0)
    np.testing.assert_allclose(points @ points.T, centred @ centred.T, atol=1e-8)
    assert points[:, 0].var() > points[:, 1].var()
    (text,) = ax.texts
    assert text.get_text() == "two"
    np.testing.assert_allclose(text.xy, points[2])
    share = points[:, 0].var() / points.var(axis=0).sum()
    assert ax.get_xlabel() == f"first component ({share:.0%} of the variance)"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((np.ones((3, 1)),), r"\(K, D\) with K and D at least 2"),
        ((np.full((3, 2), np.nan),), "`weights`.*finite"),
        ((np.eye(3), {3: "none"}), "the keys of `labels`"),
        ((np.eye(3), None, np.ones(2)), "one for each row of `weights`"),
    ],
)
def test_a_map_of_what_are_no_classes_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        lc.plots.class_map(*arguments)


def test_responsibilities_stack_the_largest_components_and_the_rest():
    """Twelve components: the nine largest of these rows by name, the others in one grey bar."""
    shares = np.zeros((2, 12))
    shares[0] = np.arange(12) / 66
    shares[1, 11] = 0.75  # a row need not sum to 1: its posterior is over L components
    ax = lc.plots.responsibilities(shares, ["a", "b"], {11: "sea"})
    names = [text.get_text() for text in ax.get_legend().get_texts()]
    assert names == ["sea", *"10 9 8 7 6 5 4 3".split(), "others"]
    widths = np.array([[bar.get_width() for bar in bars] for bars in ax.containers])
    np.testing.assert_allclose(widths[:, 0], np.append(np.arange(11, 2, -1), 3) / 66)
    np.testing.assert_allclose(widths[:, 1], np.eye(10)[0] * 0.75, atol=1e-12)
    ends = [bars[0].get_x() for bars in ax.containers][1:]
    np.testing.assert_allclose(ends, np.cumsum(widths[:-1, 0]))


@pytest.mark.parametrize(
    ("shares", "labels", "message"),
    [
        (np.ones(3) / 3, None, r"\(rows, K\)"),
        ([[0.5, -0.1]], None, "at least 0"),
        ([[0.7, 0.7]], None, "at most 1 in sum"),
        ([[0.7, 0.3]], ["a", "b"], "one for each row of `shares`"),
    ],
)
def test_shares_that_are_none_are_refused(shares, labels, message):
    with pytest.raises(ValueError, match=message):
        lc.plots.responsibilities(shares, labels)
