# SPDX-License-Identifier: Apache-2.0
"""The number of topics with the largest bound, by few trials."""

from __future__ import annotations

from collections.abc import Generator
from math import isqrt

PRECISION = 1.03  # numbers whose ratio is less are not told apart


def best_number(most: int) -> Generator[int, float, int]:
    """Ask for the bounds of some numbers of topics, and return where to go on from.

    That is the number of the largest bound from a quarter of ``most`` on, if there is one maximum,
    within 3 %, and exact up to 66. Where the quarter itself is best it is half of ``most``, since
    the maximum is below that: with far fewer topics what the others say of the documents is gone at
    once, and the bound then says little of their number.
    """
    bounds: dict[int, float] = {}
    half = (most + 1) // 2
    quarter = (half + 1) // 2
    for number in dict.fromkeys((most, half, quarter)):
        bounds[number] = yield number
    if quarter < half and _best(bounds) == quarter:
        return half
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
