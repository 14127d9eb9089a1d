# SPDX-License-Identifier: Apache-2.0
"""Draws of classes whose cost follows the draws, not the number of classes."""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from numpyro_largecat._conversions import as_ids

WIDEST = 32  # of more labels, compare with blocks of them first


@partial(jax.jit, static_argnames=("population", "num_draws"))
def draw_without_replacement(rng_key: Array, population: int, num_draws: int) -> Array:
    """Draw ``num_draws`` distinct integers, uniformly, from [0, population).

    Every subset of that size is equally likely: the result is the first ``num_draws`` distinct
    members of a sequence of independent draws, and since relabelling the population relabels the
    result, no subset can be favoured. Where the population is less than three times the draws, so
    that the sequence would be long, a random permutation of it is cut instead.

    Cost: O(n log n) time and O(n) memory for n draws, whatever the population.

    Args:
        rng_key: A JAX random key.
        population: Number of members, a Python int.
        num_draws: Number of draws, a Python int from 1 to ``population``.

    Returns:
        Distinct integers in no particular order, shape (num_draws,), int32.
    """
    if population < 3 * num_draws:
        return jax.random.permutation(rng_key, population)[:num_draws].astype(jnp.int32)
    return _draw_by_rejection(rng_key, population, num_draws)


def _draw_by_rejection(rng_key: Array, population: int, num_draws: int) -> Array:
    length = _length_with_enough_distinct(num_draws, population)

    def redraw(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        rng_key, _, _ = state
        rng_key, draw_key = jax.random.split(rng_key)
        draws = draw_integers(draw_key, length, jnp.asarray(population))
        is_new = ~_repeats_an_earlier_one(draws)
        num_distinct = jnp.cumsum(is_new)
        place = jnp.where(is_new, num_distinct - 1, num_draws)
        distinct = jnp.zeros(num_draws, jnp.int32).at[place].set(draws, mode="drop")
        return rng_key, distinct, num_distinct[-1]

    # Sequences with too few distinct members are thrown away whole: that favours none either.
    start = (rng_key, jnp.zeros(num_draws, jnp.int32), jnp.array(0))
    _, draws, _ = lax.while_loop(lambda state: state[2] < num_draws, redraw, start)
    return draws


def _length_with_enough_distinct(num_draws: int, population: int) -> int:
    """Length of a sequence of draws that rarely has less than ``num_draws`` distinct ones."""
    repeats = num_draws**2 / (2 * population)
    return num_draws + math.ceil(1.5 * repeats + 5 * math.sqrt(repeats) + 2)


def _repeats_an_earlier_one(values: Array) -> Array:
    order = jnp.argsort(values, stable=True)
    ordered = values[order]
    same_as_previous = jnp.concatenate([jnp.zeros(1, bool), ordered[1:] == ordered[:-1]])
    return jnp.zeros(values.shape, bool).at[order].set(same_as_previous, unique_indices=True)


def draw_from_intervals(
    rng_key: Array, population: Array | int, num_draws: int
) -> tuple[Array, Array]:
    r"""Draw one integer from each of ``num_draws`` intervals that make up [0, population).

    The members are a circle that is cut at a random place into intervals of population /
    num_draws members, rounded up for the first and down for the others. A member that is drawn
    stands for its interval: with weights

    .. math:: w_s = \lfloor P / S \rfloor + [s < P \bmod S],

    sums over the population are unbiased, whatever the place of the cut. On average over orders of
    the members their variance is that of draws without replacement if all intervals have one
    length; else it is more by a factor of at most 1.08 from P = 2 S on, and 2 below. In any order
    it is at most that of as many draws with replacement, but for the lengths, and it is less where
    neighbours are alike. From S = 2 on any two members may be drawn together, close ones rarely. If
    the population is less than the draws, all of it comes first, with weight 1, and then draws of
    weight 0.

    Cost: O(S): no sort, and no loop.

    Args:
        rng_key: A JAX random key.
        population: Number of members P, an int or an integer scalar that may be traced.
        num_draws: Number of draws S, a Python int.

    Returns:
        Distinct integers, but where the weight is 0, and integer weights; shapes (S,), int32.
    """
    population = jnp.asarray(population, jnp.int32)
    least, rest = jnp.divmod(population, num_draws)
    place = jnp.arange(num_draws, dtype=jnp.int32)
    lengths = least + (place < rest)
    starts = place * least + jnp.minimum(place, rest)
    drawn = draw_integers(rng_key, num_draws + 1, jnp.append(lengths, population))
    cut = drawn[-1]
    members = starts + drawn[:-1]
    beyond = population - cut  # the sum itself may be too large for its type
    return jnp.where(members < beyond, members + cut, members - beyond), lengths


def skip_labels(ranks: Array, labels: Array, num_categories: int) -> Array:
    """Turn ranks among the classes that are not labels into class ids.

    With sorted distinct labels l_0 < l_1 < ..., exactly ``l_j - j`` of the other classes come
    before l_j, so the class of rank r is ``r + #{j : l_j - j <= r}``.

    Args:
        ranks: Ranks in [0, num_categories - U), shape (S,).
        labels: U sorted distinct labels, then padding equal to ``num_categories``, shape (B,).
        num_categories: Number of classes K.

    Returns:
        Class ids that are not labels, shape (S,).
    """
    others_before = jnp.where(
        labels < num_categories, labels - jnp.arange(labels.shape[0]), num_categories
    )
    return ranks + place_among(ranks + 1, others_before)


@partial(jax.jit, static_argnames="num_categories")
def sorted_distinct(classes: Array, num_categories: int) -> Array:
    """Sort the distinct ``classes`` and pad them with ``num_categories``.

    Those out of [0, num_categories) are left out. Cost: O(B log B).

    Args:
        classes: Integers of any type, shape (B,).
        num_categories: Number of classes K.

    Returns:
        Shape (B,), int32.
    """
    classes = as_ids(classes)
    valid = (classes >= 0) & (classes < num_categories)
    ordered = jnp.sort(jnp.where(valid, classes, num_categories).astype(jnp.int32))
    is_repeat = jnp.append(False, ordered[1:] == ordered[:-1])[: len(ordered)]
    return jnp.sort(jnp.where(is_repeat, num_categories, ordered))  # of one array: fast


@jax.jit
def place_among(values: Array, labels: Array) -> Array:
    """Number of the sorted ``labels`` that are less than each value.

    Each value is compared with the last label of each of some blocks, then with those of the parts
    of one block, and so on; there are so many levels that at most ``WIDEST`` labels are compared at
    each. A binary search would take a loop, and what depends on a loop is computed again wherever
    it stands again in a program, the exponentials of the utilities for one.

    Cost: O(log B) time for each value, and memory for at most ``WIDEST`` comparisons.
    """
    num_labels = labels.shape[0]
    num_levels = max(1, math.ceil(math.log(max(num_labels, 1), WIDEST)))
    width = math.ceil(num_labels ** (1 / num_levels))
    values = jnp.asarray(values)[..., None]

    def place(labels: Array) -> Array:
        if len(labels) <= width:
            return (labels < values).sum(axis=-1)
        padding = (0, -len(labels) % width)
        blocks = jnp.pad(labels, padding, constant_values=np.iinfo(labels.dtype).max)
        blocks = blocks.reshape(-1, width)
        block = jnp.minimum(place(blocks[:, -1]), len(blocks) - 1)
        return block * width + (blocks[block] < values).sum(axis=-1)

    return jnp.minimum(place(labels), num_labels).astype(jnp.int32)


def is_among(classes: Array, labels: Array) -> Array:
    """Whether each of ``classes`` is one of the sorted ``labels``, shape (B,).

    Cost: O(log B) for each class.
    """
    if labels.shape[0] == 0:
        return jnp.zeros(jnp.shape(classes), bool)
    place = place_among(classes, labels)
    return labels[jnp.minimum(place, labels.shape[0] - 1)] == classes


@partial(jax.jit, static_argnames="num_draws")
def draw_by_mass(rng_key: Array, ends: Array, labels: Array, num_draws: int) -> tuple[Array, Array]:
    r"""Draw in proportion to integer masses, with repeats, classes that are not labels.

    Class k is the integers [ends[k - 1], ends[k]), ``mass[k]`` of them. From each of S intervals of
    the integers that are not of labels one is drawn, and stands for its interval: with

    .. math:: w_s = \mathrm{length}_s / \mathrm{mass}_{k_s}

    sums over the classes are unbiased. Integers have no rounding, so this is exact also with ten
    million classes in float32. If all classes are labels, the draws are arbitrary.

    Cost: O(B + S log(B K)) time for S draws.

    Args:
        rng_key: A JAX random key.
        ends: Cumulative masses, increasing integers from 1 to at most 2**31 - 1, shape (K,), int32.
        labels: Sorted distinct labels, then padding equal to K, shape (B,).
        num_draws: Number of draws S, a Python int.

    Returns:
        Classes, int32, and their weights, 0 if all classes are labels; shapes (S,).
    """
    rest = ends[-1] - mass_of(labels, ends).sum(dtype=jnp.int32)
    ranks, lengths = draw_from_intervals(rng_key, rest, num_draws)
    classes = class_at_rank(ranks, ends, labels)
    mass = mass_of(classes, ends).astype(jnp.result_type(float))
    return classes, lengths / jnp.maximum(mass, 1)


def draw_integers(rng_key: Array, num_draws: int, size: Array) -> Array:
    """Draw integers in [0, size) with replacement, all equally likely to one in 2**32.

    The size is one for all draws, or one for each, of shape (num_draws,).

    ``jax.random.randint`` takes 32 random bits modulo ``size``, so that with a size near 2**31 some
    integers are half as likely again as others. Here 64 random bits are a fraction of ``size``.

    Returns:
        Shape (num_draws,), int32; 0 where ``size`` is 0.
    """
    size = size.astype(jnp.uint32)
    upper, lower = jax.random.bits(rng_key, (2, num_draws), jnp.uint32)
    from_lower = _upper_half(lower, size)
    carry = upper * size > ~from_lower  # the sum of both would pass 2**32
    return (_upper_half(upper, size) + carry).astype(jnp.int32)


def _upper_half(a: Array, b: Array) -> Array:
    """Bits 32 to 63 of the product of two 32-bit integers."""
    a1, a0, b1, b0 = a >> 16, a & 0xFFFF, b >> 16, b & 0xFFFF
    middle = a1 * b0 + ((a0 * b0) >> 16)  # below 2**32
    return a1 * b1 + (middle >> 16) + (((middle & 0xFFFF) + a0 * b1) >> 16)


def mass_of(classes: Array, ends: Array) -> Array:
    """Mass of each class, 0 for one that is K or more."""
    upper = ends.at[classes].get(mode="clip")
    return jnp.where(classes < ends.shape[0], upper - _start_of(classes, ends), 0)


def class_at_rank(ranks: Array, ends: Array, labels: Array) -> Array:
    """Turn ranks among the integers that are not of labels into the classes that own them.

    As in ``skip_labels``, but label l_j takes ``mass[l_j]`` integers in place of one.

    Args:
        ranks: Integers in [0, rest), shape (S,).
        ends: Cumulative masses, shape (K,).
        labels: Sorted distinct labels, then padding equal to K, shape (B,).

    Returns:
        Classes that are not labels, shape (S,), int32.
    """
    passed = jnp.cumsum(mass_of(labels, ends), dtype=jnp.int32)
    passed = jnp.concatenate([jnp.zeros(1, jnp.int32), passed])  # of the labels before each one
    is_label = labels < ends.shape[0]
    others_before = jnp.where(is_label, _start_of(labels, ends) - passed[:-1], ends[-1])
    num_before = jnp.searchsorted(others_before, ranks, side="right")
    integers = ranks + passed[num_before]
    classes = jnp.searchsorted(ends, integers, side="right")
    return classes.astype(jnp.int32)


def _start_of(classes: Array, ends: Array) -> Array:
    return jnp.where(classes > 0, ends.at[classes - 1].get(mode="clip"), 0)
