# SPDX-License-Identifier: Apache-2.0
"""Sums of very many terms that lose no more than those of a few."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array


class LongSums(NamedTuple):
    """Arrays to which terms are added, with what rounding has taken from them.

    Reference:
        Kahan, Pracniques: further remarks on reducing truncation errors, CACM 1965.

    Example:
        >>> import jax.numpy as jnp
        >>> totals = LongSums.of((jnp.float32(1.0),))
        >>> for _ in range(10):
        ...     totals = totals.add((jnp.float32(1e-8),))
        >>> float(totals.sums[0]) > 1
        True
    """

    sums: tuple[Array, ...]
    lost: tuple[Array, ...]

    @staticmethod
    def of(start: tuple[Array, ...]) -> LongSums:
        """Sums that start there."""
        return LongSums(start, tuple(map(jnp.zeros_like, start)))

    def add(self, terms: tuple[Array, ...]) -> LongSums:
        """With a term more in each."""
        terms = tuple(x - lost for x, lost in zip(terms, self.lost, strict=True))
        sums = tuple(old + x for old, x in zip(self.sums, terms, strict=True))
        of_all = zip(sums, self.sums, terms, strict=True)
        return LongSums(sums, tuple((new - old) - x for new, old, x in of_all))
