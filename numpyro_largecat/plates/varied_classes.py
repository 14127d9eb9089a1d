# SPDX-License-Identifier: Apache-2.0
"""Classes among different others, to see whether each is the same whichever are with it."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray
from numpyro.primitives import Messenger

from numpyro_largecat.handlers.plate_facts import choose_rows, plate_of, rows_request
from numpyro_largecat.ops.differing_columns import differing_columns

FIRST, NOISY, WEIGHED, MOVED, OTHERS = 0, 1, 2, 3, 4  # runs; from the last on with other classes
NUM_OTHERS = 3
SHARED = 4  # one of so many classes of the first run is in all others
ENDS = 16  # of so many that are not one is far above or below


class hold_classes(Messenger):
    """Make a class plate hold these classes, as ``class_chunk`` does, with weights of their own.

    Args:
        fn: Model or guide.
        name: Name of the class plate.
        ids: Distinct classes, shape (M,).
        weights: Their weights, shape (M,).
    """

    def __init__(self, fn: Any, *, name: str, ids: Array, weights: Array) -> None:
        self.name = name
        self.ids = ids
        self.weights = weights
        super().__init__(fn)

    def process_message(self, msg: dict[str, Any]) -> None:
        """Answer the helper site of the class plate."""
        if rows_request(msg) is not None and plate_of(msg) == self.name:
            choose_rows(msg, self.ids, weights=self.weights)


class Held(NamedTuple):
    """What a run of a model holds; of all runs, with one more axis in front."""

    ids: Any  # (M,)
    weights: Any  # (M,)
    noise: Any  # (), a seed


class VariedClasses(NamedTuple):
    """Sets of M of the K classes, in which some are in the same places, and others are not.

    The first set comes again with other noise, with other weights, and in another order; then come
    sets with other classes beside those that all share. The first has rows that are far above all
    others, and so has one of these; another has some far below. So sums, extremes, ranks and rows
    that are read by place all show, and what has noise of its own for each place does not.
    """

    runs: Held
    order: NDArray[np.intp]  # (M,), where the classes of the first run are in the moved one
    shared: NDArray[np.bool_]  # (M,), whether all runs but that have the class in the same place
    ends: tuple[NDArray[np.integer], NDArray[np.integer]]  # classes whose rows are to be far above
    # all others, and far below

    @classmethod
    def of(cls, num_categories: int, size: int) -> VariedClasses:
        """Sets of at most ``size`` classes, and not of all where there are more than two.

        Cost: O(size).
        """
        size = max(2, min(size, num_categories - 1))
        num_shared = max(1, size // SHARED)
        num_own = size - num_shared
        rng = np.random.default_rng(0)
        most = num_shared + num_own * (1 + NUM_OTHERS)
        number = min(num_categories, most)
        ids = rng.choice(num_categories, number, replace=False).astype(np.int32)
        places = rng.permutation(size)
        sets = np.empty((1 + NUM_OTHERS, size), np.int32)
        sets[:, places[:num_shared]] = ids[:num_shared]
        own = np.arange((1 + NUM_OTHERS) * num_own).reshape(-1, num_own) % (number - num_shared)
        sets[:, places[num_shared:]] = ids[num_shared:][own]
        order = np.roll(np.arange(size), -1)
        moved = np.empty_like(sets[0])
        moved[order] = sets[0]
        weights = np.ones((OTHERS + NUM_OTHERS, size))
        weights[WEIGHED] = rng.uniform(0.5, 2.0, size)
        noise = np.zeros(len(weights), np.int32)
        noise[NOISY] = 1
        ids_of_runs = np.stack([sets[0], sets[0], sets[0], moved, *sets[1:]])
        first, second, third = ids[num_shared:][own][:3]
        num_ends = max(1, num_own // ENDS)
        above, below = (
            np.setdiff1d(a, b)[:num_ends] for a, b in ((first, second), (second, first))
        )
        if number == most:  # of few classes all sets would have some
            above = np.append(above, third[:num_ends])
        is_shared = np.isin(np.arange(size), places[:num_shared])
        return cls(Held(ids_of_runs, weights, noise), order, is_shared, (above, below))

    def differing(self, seen: Array) -> Array:
        """Whether each class of the first set is another in any run, shape (M,).

        Args:
            seen: What the runs have for their classes, (runs, ..., M).
        """
        differ = differing_columns(seen[FIRST], seen[WEIGHED])
        is_fixed = ~differing_columns(seen[FIRST], seen[NOISY]).any()
        differ |= differing_columns(seen[FIRST], seen[MOVED][..., self.order]) & is_fixed
        for run in range(OTHERS, OTHERS + NUM_OTHERS):
            differ |= differing_columns(seen[FIRST], seen[run]) & self.shared
        return differ

    def differs_elsewhere(self, seen: Array) -> Array:
        """Whether values that are not of these classes follow which are there, and no weights.

        What follows the weights may be an estimate of a sum over all classes.

        Args:
            seen: The values in each run, (runs, ...).
        """
        values = seen.reshape(len(seen), 1, -1)
        if not values.size:
            return jnp.array(False)
        follows = [
            differing_columns(values[FIRST], values[run]).any()
            for run in range(OTHERS, OTHERS + NUM_OTHERS)
        ]
        return jnp.stack(follows).any() & ~differing_columns(values[FIRST], values[WEIGHED]).any()

    def class_id(self, differ: Array) -> int:
        """The first class that differs."""
        return int(self.runs.ids[FIRST, int(np.argmax(differ))])
