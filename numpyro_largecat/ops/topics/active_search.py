# SPDX-License-Identifier: Apache-2.0
"""The search for the best local variables of a few documents: sweeps to the end, and restarts.

Documents go through it in rounds of ten sweeps. Each is in one stage: it converges; then in every
round a topic that leaves is proposed; then it converges again, if a proposal was accepted; then it
waits for the others. So one piece of code does all, and a document's result does not depend on
those beside it.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from numpyro_largecat.ops.topics.sweeps import (
    LEAST_COUNT,
    ActiveTopics,
    Sweep,
    bound,
    num_active_topics,
    select,
    sweep,
)

SWEEPS = 10  # of a round, between two choices of each word's L topics
LEAST_GAIN = 1e-6  # of a restart, relative to the bound: above the rounding of float32
CONVERGES, PROPOSES, CONVERGES_AGAIN, WAITS = range(4)


class Effort(NamedTuple):
    """How hard to solve for a document's own variables. Code is compiled once for all values."""

    num_sweeps: int | Array = 100
    tolerance: float | Array = 0.05  # largest change in a topic's count, tokens
    num_restarts: int | Array = 5  # topics that are proposed to leave, smallest first


class Found(NamedTuple):
    """What the last sweep of each document gave."""

    bound: Array  # (B,), nats
    counts: Array  # (B, A)
    basis: Array  # (B, A), the counts that it started from


class State(NamedTuple):
    """Where each of B documents is."""

    found: Found
    counts: Array  # (B, A), where the next round starts
    best: Array  # (B, A), the best counts so far
    best_bound: Array  # (B,), of the responsibilities that gave them
    stage: Array  # (B,)
    num_rounds: Array  # (B,), of the present stage
    tried: Array  # (B, A), topics that were proposed to leave
    has_changed: Array  # (B,), by a proposal
    is_over: Array  # ()


def search(document: ActiveTopics, counts: Array, num_active: int | Array, effort: Effort) -> Found:
    """Sweep each document until it converges, propose restarts, and sweep again where that helped.

    Args:
        document: The documents, on topics that hold all active ones.
        counts: Where to start, (B, A).
        num_active: Largest number of topics of a word.
        effort: How hard to search.
    """
    num_rounds = jnp.maximum(-(-jnp.asarray(effort.num_sweeps) // SWEEPS), 1)

    def one_round(state: State) -> State:
        # When all wait, one more sweep: with topics chosen by the counts it starts from.
        is_last = (state.stage == WAITS).all()
        probs = select(document, state.counts, num_active)

        def one(_: Array, last: tuple[Array, Sweep]) -> tuple[Array, Sweep]:
            return last[1].counts, sweep(document, probs, last[1].counts)

        norm = jnp.zeros_like(document.word_counts)
        start = state.counts, Sweep(state.counts, state.counts, norm)
        basis, done = lax.fori_loop(0, jnp.where(is_last, 1, SWEEPS), one, start)
        found = Found(bound(document, done), done.counts, basis)
        state = state._replace(found=found, is_over=is_last, num_rounds=state.num_rounds + 1)
        return _next_stage(state, num_rounds, effort)

    num_docs = counts.shape[0]
    nothing = jnp.zeros(num_docs, bool)
    zeros = jnp.zeros(num_docs, counts.dtype)
    state = State(
        found=Found(zeros, counts, counts),
        counts=counts,
        best=counts,
        best_bound=zeros,
        stage=jnp.full(num_docs, CONVERGES),
        num_rounds=jnp.zeros(num_docs, int),
        tried=jnp.zeros(counts.shape, bool),
        has_changed=nothing,
        is_over=jnp.array(False),
    )
    found = lax.while_loop(lambda state: ~state.is_over, one_round, state).found
    return found._replace(basis=jnp.where(found.basis > LEAST_COUNT, found.basis, 0))


def _next_stage(state: State, num_rounds: Array, effort: Effort) -> State:
    """Keep what is better, and say where each document goes on."""
    found, stage = state.found, state.stage
    converges = (stage == CONVERGES) | (stage == CONVERGES_AGAIN)
    change = jnp.abs(found.counts - found.basis).max(axis=1)
    has_converged = converges & ((change < effort.tolerance) | (state.num_rounds >= num_rounds))
    gains = found.bound > state.best_bound + LEAST_GAIN * jnp.abs(state.best_bound)
    gains &= stage == PROPOSES
    is_kept = converges | gains
    best = jnp.where(is_kept[:, None], found.counts, state.best)
    has_changed = state.has_changed | gains
    stage = jnp.where(has_converged, stage + 1, stage)

    # The smallest topic that was not proposed yet leaves next; one topic must stay.
    is_left = (best > LEAST_COUNT) & ~state.tried
    leaves = jnp.where(is_left, best, jnp.inf).argmin(axis=1)[:, None]
    proposes = (stage == PROPOSES) & is_left.any(axis=1) & (num_active_topics(best) > 1)
    proposes &= state.tried.sum(axis=1) < effort.num_restarts
    leaves = proposes[:, None] & (jnp.arange(best.shape[1]) == leaves)
    proposes_no_more = (stage == PROPOSES) & ~proposes
    after = jnp.where(has_changed, CONVERGES_AGAIN, WAITS)
    return state._replace(
        counts=jnp.where(leaves, 0, best),
        best=best,
        best_bound=jnp.where(is_kept, found.bound, state.best_bound),
        stage=jnp.where(proposes_no_more, after, stage),
        num_rounds=jnp.where(proposes_no_more, 0, state.num_rounds),
        tried=state.tried | leaves,
        has_changed=has_changed,
    )
