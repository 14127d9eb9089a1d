# SPDX-License-Identifier: Apache-2.0
"""The table of expected tokens of words in topics, of which a batch touches a few rows."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh
from numpy.typing import NDArray
from scipy.sparse import csr_array
from scipy.special import gammaln

from numpyro_largecat._result_so_far import held_signals
from numpyro_largecat.ops.rows_by_device import num_devices, over_all_devices
from numpyro_largecat.ops.threads import at_once
from numpyro_largecat.ops.topics.presence import log_rises
from numpyro_largecat.topics.local_step import Posterior
from numpyro_largecat.topics.word_prior import WordPrior

LEAST_SCALE = 1e-6
WORDS_AT_ONCE = 1024  # whose counts stay in a cache


class Counts(NamedTuple):
    """Expected tokens of words in topics are ``scale * counts``."""

    counts: Array  # (V, K), over a mesh with some rows of zeros after them
    totals: Array  # (K,), sums over words
    scale: float


class Table:
    """Expected counts of words in topics, of which only rows are touched.

    Whatever interrupts a change, it has the counts of before or after it. Over a mesh its words are
    spread over all devices.
    """

    def __init__(
        self, counts: NDArray[np.floating], dtype: np.dtype, mesh: Mesh | None = None
    ) -> None:
        self.dtype, self.mesh = np.dtype(dtype), mesh
        self.changes = 0  # batches that were added
        self.set(counts)

    def copy(self) -> Table:
        """One that changes by itself."""
        other = Table(self.numpy(), self.dtype, self.mesh)
        other.changes = self.changes
        return other

    def set(self, counts: NDArray[np.floating]) -> None:
        """Replace all counts, (V, K), also by those of fewer topics."""
        self.place(counts, counts.sum(axis=0), 1.0)

    def place(
        self, counts: NDArray[np.floating], totals: NDArray[np.floating], scale: float
    ) -> None:
        """Take these counts, their sums over words and their scale to the devices."""
        self.shape = counts.shape
        if self.mesh is None:
            table = jnp.array(np.asarray(counts, self.dtype))
        else:
            padding = -len(counts) % num_devices(self.mesh)
            rows = np.pad(np.asarray(counts, self.dtype), ((0, padding), (0, 0)))
            table = jnp.copy(jax.device_put(rows, over_all_devices(self.mesh)))  # to be donated
        self.state = Counts(table, jnp.array(np.asarray(totals, self.dtype)), scale)

    def posterior(self, rows: NDArray[np.intp], prior: WordPrior) -> Posterior:
        """Of some words in each topic."""
        counts, totals, scale = self.state
        of_words = np.asarray(prior.rows(rows), self.dtype), np.asarray(prior.totals, self.dtype)
        words, all_words = _posterior(counts, totals, rows, of_words, scale)
        return Posterior(words, all_words, float(prior.each.min()))

    def add(
        self,
        rows: NDArray[np.intp],
        change: csr_array,
        *,
        times: float = 1.0,
        less: csr_array | None = None,
        keep: float = 1.0,
    ) -> None:
        """Keep a share of all counts, and add ``times * change - less`` to some rows.

        Cost: O(R K), but for once in a while.
        """
        counts, totals, scale = self.state
        scale *= keep
        if scale < LEAST_SCALE:
            counts, totals, scale = counts * scale, totals * scale, 1.0
        dense = np.zeros((len(rows), self.shape[1]), self.dtype)
        add_sparse(dense, np.arange(len(rows)), change, times)
        if less is not None:
            add_sparse(dense, np.arange(len(rows)), less, -1)
        with held_signals():  # the old counts are gone before the new ones are there
            counts, totals = _add(counts, totals, rows, dense, scale)
            self.state = Counts(counts, totals, scale)
            self.changes += 1

    def numpy(self) -> NDArray[np.floating]:
        """The counts, (V, K)."""
        return self.unscaled() * self.dtype.type(self.state.scale)

    def unscaled(self) -> NDArray[np.floating]:
        """The counts before they are multiplied by their scale, (V, K)."""
        return np.asarray(self.state.counts)[: self.shape[0]]


def add_sparse(
    table: NDArray[np.floating], rows: NDArray[np.intp], change: csr_array, times: float = 1
) -> None:
    """Add ``times * change`` to some rows of a table, in place; an entry is there once.

    The table is contiguous: else numbers would go to a copy.
    """
    assert table.flags.c_contiguous
    first = np.repeat(rows * table.shape[1], np.diff(change.indptr))
    table.ravel()[first + change.indices] += times * change.data


@jax.jit
def _posterior(
    counts: Array, totals: Array, rows: Array, prior: tuple[Array, Array], scale: float
) -> tuple[Array, Array]:
    of_word, of_all_words = prior
    return of_word + jnp.maximum(scale * counts[rows], 0), of_all_words + scale * totals


@partial(jax.jit, donate_argnums=(0, 1))
def _add(
    counts: Array, totals: Array, rows: Array, change: Array, scale: float
) -> tuple[Array, Array]:
    change = change / scale
    return counts.at[rows].add(change), totals + change.sum(axis=0)


def topic_term(
    counts: NDArray[np.floating], prior: WordPrior, log_absence: NDArray[np.floating]
) -> float:
    """The part of the bound that is about topics, in float64.

    With expected counts (V, K), and 0 for the log probability that there are none, it is that of
    the best q(phi), Eq. 35; with that probability phi is integrated out. Sums over all words are
    then at their means where there are any, which adds half a nat or so for each topic at most.
    """
    blocks = [slice(v, v + WORDS_AT_ONCE) for v in range(0, len(counts), WORDS_AT_ONCE)]
    of_words = at_once(*(partial(_rises_of_words, counts, prior, log_absence, b) for b in blocks))
    totals = np.maximum(counts, 0).sum(axis=0, dtype=np.float64), log_absence.sum(axis=0)
    of_all = np.broadcast_to(prior.totals, len(totals[0]))
    return sum(of_words) - _sum_of_rises(*totals, of_all, np.arange(len(of_all)))


def _rises_of_words(
    counts: NDArray[np.floating],
    prior: WordPrior,
    log_absence: NDArray[np.floating],
    block: slice,
) -> float:
    """That of a block of words, without sums over all."""
    some = np.maximum(np.asarray(counts[block], np.float64), 0)
    used = np.flatnonzero(some)
    each = prior.rows(block)
    which = np.broadcast_to(np.arange(each.size).reshape(each.shape), some.shape)
    entries = some.ravel()[used], log_absence[block].ravel()[used]
    return _sum_of_rises(*entries, each.ravel(), which.ravel()[used])


def _sum_of_rises(
    counts: NDArray[np.floating],
    log_absence: NDArray[np.floating],
    concentration: NDArray[np.floating],
    which: NDArray[np.integer],
) -> float:
    known = log_absence == 0
    if not known.any():
        return float(log_rises(counts, log_absence, concentration, which).sum())
    each = concentration[which]
    rises = gammaln(each + counts) - gammaln(each)
    rises[~known] = log_rises(counts[~known], log_absence[~known], each[~known])
    return float(rises.sum())
