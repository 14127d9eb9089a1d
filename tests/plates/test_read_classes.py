# SPDX-License-Identifier: Apache-2.0
"""A class plate that also holds classes which a model reads by id."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import pytest

import numpyro_largecat as lc

K, S = 40, 6
LABELS = np.array([4, 9, 4, 30])
READS = np.array([[9, -1, 17], [17, 39, 0]])  # a label, none, one twice, the ends


def opened(seed, reads=READS, **options):
    with numpyro.handlers.seed(rng_seed=seed):
        return lc.class_plate("words", K, LABELS, S, reads=reads, **options).classes


def test_a_class_has_one_row_whatever_it_is_there_for() -> None:
    """As a label, as one that was drawn and as one that is read; and it is found by its id."""

    @jax.jit
    @jax.vmap
    def draw(key):
        words = opened(key)
        return words.indices, words.row_weights, words.rows_of(words.indices, READS)

    drawn = map(np.asarray, draw(jax.random.split(jax.random.key(0), 30)))
    for indices, weights, rows in zip(*drawn, strict=True):
        present = indices[weights > 0]
        assert len(present) == len(set(present)) and set(present) >= {0, 4, 9, 17, 30, 39}
        np.testing.assert_array_equal(rows, np.where(READS == -1, 0, READS))


@pytest.mark.parametrize("proposal", [None, lc.FrequencyProposal(np.arange(1, K + 1))])
def test_sums_over_the_rows_are_unbiased_for_each_class(proposal) -> None:
    """By |z| < 5 of 40 classes over 4,000 draws: a correct program fails once in 40,000 times."""

    def weigh(key):
        words = opened(key, proposal=proposal)
        return jnp.zeros(K).at[words.indices].add(words.row_weights)

    keys = jax.random.split(jax.random.key(0), 4000)
    found = np.asarray(jax.jit(jax.vmap(weigh))(keys))
    error = found.std(axis=0) / np.sqrt(len(found))
    assert (np.abs(found.mean(axis=0) - 1) <= 5 * error).all()
    assert (found[:, [0, 4, 9, 17, 30, 39]] == 1).all()  # labels, and those that are read


def test_reads_change_neither_the_classes_of_the_choice_nor_their_weights() -> None:
    words, without = opened(3), opened(3, reads=None)
    np.testing.assert_array_equal(words.scored(words.indices), without.indices)
    np.testing.assert_array_equal(words.weights, without.weights)
    assert without.scored(without.indices) is without.indices


def test_ids_in_arrays_of_several_shapes_and_under_jit() -> None:
    """Ids that were not given are NaN, since their rows may not be there."""

    def rows(ids):
        words = opened(0, (READS, jnp.array([12])))
        return words.rows_of(jnp.stack([words.indices, -words.indices], 1) * 1.0, ids)

    found = jax.jit(rows)(jnp.array([12, 17, -1, 4, K, -2]))
    np.testing.assert_array_equal(found[:3], [[12, -12], [17, -17], [0, 0]])
    assert np.isnan(found[3:]).all()


def test_a_full_plate_reads_whatever_it_is_asked_for() -> None:
    words = lc.class_plate("words", K, reads=READS).classes
    assert words.indices.shape == (K,) and words.rows_of(words.indices, 31) == 31


def test_a_chunk_has_rows_of_its_own_for_what_is_read() -> None:
    """Of weight 0, so that chunks add up to all classes."""
    with lc.plates.class_chunk(name="words", start=36, size=8):
        words = opened(0)
    assert words.kind == "chunk"
    assert words.scored(words.indices).tolist() == [36, 37, 38, 39, 39, 39, 39, 39]
    assert words.row_weights.tolist() == [1.0] * 4 + [0.0] * 10
    rows = words.rows_of(words.indices, READS)
    np.testing.assert_array_equal(rows, np.where(READS == -1, 0, READS))


@pytest.mark.parametrize("bad", [K, -2, 2**32 - 1])
def test_ids_that_are_no_classes_are_refused(bad: int) -> None:
    with pytest.raises(ValueError, match=rf"`reads` of plate 'words' must be classes.*got {bad} "):
        opened(0, np.array([3, bad]))


def test_what_cannot_be_read_is_refused() -> None:
    with pytest.raises(TypeError, match="`reads` must be integers"):
        opened(0, np.array([0.5]))
    with pytest.raises(ValueError, match="`reads` of plate 'words' must not be empty"):
        opened(0, np.zeros((2, 0), int))
    with pytest.raises(ValueError, match="plate 'words': `reads` need negatives="):
        opened(0, negatives="own")
    words = opened(0)
    with pytest.raises(ValueError, match=r"`ids` must be among the ids that plate 'words' was gi"):
        words.rows_of(words.indices, np.array([17, 18]))
    with pytest.raises(ValueError, match=r"one column .* but those only read.*`classes.scored"):
        lc.UtilityCategorical(jnp.zeros((2, words.indices.shape[0])), words)
    words = opened(0, None)
    with pytest.raises(ValueError, match=r"'words' was not told which classes.*`.*reads=ids\)`"):
        words.rows_of(words.indices, READS)
