# SPDX-License-Identifier: Apache-2.0
"""The bound of documents at their best local variables, with derivatives by the envelope theorem.

At a maximum over responsibilities r and frequencies theta, the derivative of the bound in
anything else is that with r and theta held:

    d bound / d C[v, k]  = sum_u c[u] r[u, k] where word u is v
    d bound / d a[k]     = digamma(sum a) - digamma(a[k])
                           - digamma(sum a + sum c) + digamma(a[k] + N[k])

r depends on nothing but the counts of the last sweep, which are kept; so the backward pass is one
sweep over active topics.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.custom_batching import custom_vmap

from numpyro_largecat.ops.topics.active_search import Effort
from numpyro_largecat.ops.topics.document_fit import DocumentFit, fit_documents
from numpyro_largecat.ops.topics.gamma_rises import digamma_rise
from numpyro_largecat.ops.topics.word_topic_counts import word_topic_counts


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def document_bound(
    log_probs: Array,
    concentration: Array,
    words: Array,
    word_counts: Array,
    num_active: int,
    effort: Effort,
) -> Array:
    """Best bound of each document found, (N,); arguments as for ``fit_documents``."""
    return _fit(num_active)(log_probs, concentration, words, word_counts, effort).bound


def _forward(
    log_probs: Array,
    concentration: Array,
    words: Array,
    word_counts: Array,
    num_active: int,
    effort: Effort,
) -> tuple[Array, tuple[Any, ...]]:
    log_probs, concentration = _once(log_probs), _once(concentration)
    fit = _fit(num_active)(log_probs, concentration, words, word_counts, effort)
    return fit.bound, (log_probs, concentration, words, word_counts, fit.counts, fit.basis)


def _backward(num_active: int, kept: tuple[Any, ...], cotangent: Array) -> tuple[Any, ...]:
    log_probs, concentration, words, word_counts, counts, basis = kept
    of_topics = _statistics(num_active)(
        log_probs, concentration, words, word_counts, basis, cotangent
    )
    total = concentration.sum()
    shared = -digamma_rise(total, word_counts.sum(axis=1))
    own = digamma_rise(concentration, counts)  # 0 for topics that left
    of_concentration = (cotangent * shared).sum() + cotangent @ own
    return of_topics, of_concentration, None, None, None


document_bound.defvjp(_forward, _backward)


@jax.custom_jvp
def _once(x: Array) -> Array:
    """What the bound is differentiated in, which is done once."""
    return x


@_once.defjvp
def _once_jvp(primals: Any, tangents: Any) -> Any:
    del primals, tangents
    raise NotImplementedError(
        "TopicDocument has first derivatives alone, in reverse mode; a Hessian, as for "
        "AutoLaplaceApproximation, is not defined. Take another guide, such as "
        "AutoMultivariateNormal, or NUTS."
    )


def _fit(num_active: int) -> Any:
    @custom_vmap
    def fit(
        log_probs: Array, concentration: Array, words: Array, word_counts: Array, effort: Effort
    ) -> DocumentFit:
        return fit_documents(log_probs, concentration, words, word_counts, num_active, effort)

    @fit.def_vmap
    def over(axis_size: int, is_batched: Any, *args: Any) -> tuple[DocumentFit, Any]:
        log_probs, concentration, words, word_counts, effort = args
        shared = not any(jax.tree.leaves((is_batched[0], is_batched[1], is_batched[4])))
        if not shared:
            return _one_by_one(fit, axis_size, is_batched, args)
        # Topics in common: these are more documents, and blocks of them are solved as ever.
        words, word_counts = (
            x if batched else jnp.broadcast_to(x, (axis_size, *x.shape))
            for x, batched in zip((words, word_counts), is_batched[2:4], strict=True)
        )
        flat = (x.reshape(-1, x.shape[-1]) for x in (words, word_counts))
        found = fit(log_probs, concentration, *flat, effort)
        found = jax.tree.map(lambda x: x.reshape(axis_size, -1, *x.shape[1:]), found)
        return found, jax.tree.map(lambda _: True, found)

    return fit


def _statistics(num_active: int) -> Any:
    @custom_vmap
    def statistics(*args: Array) -> Array:
        *documents, scale = args
        return word_topic_counts(*documents, num_active=num_active, scale=scale)

    @statistics.def_vmap
    def over(axis_size: int, is_batched: Any, *args: Any) -> tuple[Array, Any]:
        return _one_by_one(statistics, axis_size, is_batched, args)

    return statistics


def _one_by_one(solve: Any, axis_size: int, is_batched: Any, args: Any) -> tuple[Any, Any]:
    """Map in a loop: under ``vmap`` the branches that adapt to documents would all be taken."""
    del axis_size
    leaves, structure = jax.tree.flatten(args)
    batched = jax.tree.leaves(is_batched)

    def one(mapped: list[Array]) -> Any:
        rest = iter(mapped)
        every = [next(rest) if b else x for x, b in zip(leaves, batched, strict=True)]
        return solve(*jax.tree.unflatten(structure, every))

    found = lax.map(one, [x for x, b in zip(leaves, batched, strict=True) if b])
    return found, jax.tree.map(lambda _: True, found)
