# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_largecat.ops.double_sum.fixed_batches import (
    batch_touch_probability,
    draw_other_classes,
    fixed_batches,
)

K, S = 9, 3


def batches():
    y = jnp.array([0, 0, 1, 5, 5, 8, 2, 0, 1, 5])
    return y, fixed_batches(jax.random.key(0), y, batch_size=4, num_categories=K)


def test_every_observation_is_in_one_batch_with_its_label():
    y, made = batches()
    rows = np.asarray(made.rows)
    assert rows.shape == (3, 4)
    assert sorted(rows[rows < 10]) == list(range(10))
    labels = np.take_along_axis(np.asarray(made.labels), np.asarray(made.label_rows), axis=1)
    np.testing.assert_array_equal(labels[rows < 10], np.asarray(y)[rows[rows < 10]])
    np.testing.assert_array_equal(
        made.num_labels, [len(set(r[r < K])) for r in np.asarray(made.labels)]
    )


def test_rows_are_touched_with_their_probability():
    """FALSE_ALARM = 1e-4: 27 frequencies within 4.7 standard deviations, all drawn classes new."""
    _, made = batches()
    draw = partial(draw_other_classes, batches=made, num_sampled=S, num_categories=K)
    drawn = np.asarray(jax.vmap(draw)(jax.random.split(jax.random.key(1), 4000)))  # (T, J, S)
    counts = (drawn[..., None] == np.arange(K)).sum(2)  # (T, J, K)
    assert counts.max() == 1
    is_label = (np.asarray(made.labels)[..., None] == np.arange(K)).any(1)
    assert not counts.any(0)[is_label].any()
    expected = np.where(is_label, 0, S / (K - np.asarray(made.num_labels))[:, None])
    error = np.sqrt(expected * (1 - expected) / 4000)
    assert (abs(counts.mean(0) - expected) <= 4.7 * error).all()
    touched = batch_touch_probability(made, num_sampled=S, num_categories=K)
    np.testing.assert_allclose(touched, (is_label + expected).mean(0), rtol=1e-6)
