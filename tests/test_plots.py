# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pytest

import numpyro_largecat as lc


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


def test_elbo_shows_the_negative_loss_and_its_mean_over_the_window():
    losses = np.array([9.0, 7.0, 5.0, 1.0])
    ax = lc.plot_elbo(losses, window=2)
    each, mean = ax.get_lines()
    np.testing.assert_allclose(each.get_ydata(), -losses)
    np.testing.assert_allclose(mean.get_xydata(), [[1, -8], [2, -6], [3, -3]])
    with pytest.raises(ValueError, match="at least one step"):
        lc.plot_elbo([])


def test_intervals_span_the_central_probability():
    draws = np.stack([np.linspace(0, 1, 101), np.linspace(10, 20, 101)], axis=1)
    ax = lc.plot_intervals(draws, ["a", "b"], probability=0.8)
    segments = ax.collections[0].get_segments()
    np.testing.assert_allclose(np.array(segments)[:, :, 0], [[0.1, 0.9], [11, 19]])
    np.testing.assert_allclose(ax.get_lines()[0].get_xdata(), [0.5, 15])
    with pytest.raises(ValueError, match=r"shape \(101, 2\) and 1 labels"):
        lc.plot_intervals(draws, ["a"])


def test_reliability_counts_what_came_true_in_bins_of_equal_size():
    probabilities = np.array([0.9, 0.1, 0.2, 0.8, 0.95, 0.15])
    correct = np.array([True, False, True, False, True, False])
    ax = lc.plot_reliability(probabilities, correct, num_bins=2)
    points = ax.containers[0][0].get_xydata()
    np.testing.assert_allclose(points, [[0.15, 1 / 3], [(0.8 + 0.9 + 0.95) / 3, 2 / 3]])
    with pytest.raises(ValueError, match="same shape"):
        lc.plot_reliability(probabilities, correct[:-1])


def test_axes_may_be_given():
    ax = plt.subplots()[1]
    assert lc.plot_elbo([1.0], ax=ax) is ax
