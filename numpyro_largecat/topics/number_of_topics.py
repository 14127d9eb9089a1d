# SPDX-License-Identifier: Apache-2.0
"""The number of topics with the largest bound, by few trials."""

from __future__ import annotations

from collections.abc import Generator
from math import isqrt

PATIENCE = 2  # halvings without a larger bound, after which there are too few topics
PRECISION = 1.03  # numbers whose ratio is less are not told apart


def best_number(most: int) -> Generator[int, float, int]:
    """Ask for the bounds of some numbers from 1 to ``most``, and return that of the largest.

    Halves the number until its bound has fallen twice, and then divides the gaps beside the best,
    in proportion, until they are below 3 %. That is the maximum, if there is one alone, and exact
    up to 66.
    """
    bounds: dict[int, float] = {}
    number, since_best = most, 0
    while number and since_best < PATIENCE:
        bounds[number] = yield number
        since_best = 0 if _best(bounds) == number else since_best + 1
        number //= 2
    while gaps := _gaps(bounds):
        for number in gaps:
            bounds[number] = yield number
    return _best(bounds)


def _best(bounds: dict[int, float]) -> int:
    """Of the largest bound; of equal ones the smallest number."""
    return min(bounds, key=lambda number: (-bounds[number], number))


def _gaps(bounds: dict[int, float]) -> list[int]:
    """Numbers in the middle between the best and those known beside it."""
    best, known = _best(bounds), sorted(bounds)
    place = known.index(best)
    sides = [(known[i], known[i + 1]) for i in (place - 1, place) if 0 <= i < len(known) - 1]
    middles = [max(isqrt(a * b), a + 1) for a, b in sides]
    wide = zip(middles, sides, strict=True)
    return sorted({m for m, (a, b) in wide if m < b and b > PRECISION * a})
