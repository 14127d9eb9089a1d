# SPDX-License-Identifier: Apache-2.0
"""A categorical over K outcomes of which only L carry mass."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array, lax, random
from jax.typing import ArrayLike
from numpyro.distributions import constraints
from numpyro.distributions.kl import kl_divergence
from numpyro.distributions.util import validate_sample

from numpyro_largecat._checks import (
    check_count,
    check_distinct,
    check_in_range,
    check_integers,
    check_log_weights,
    check_shape,
)
from numpyro_largecat._conversions import as_ids, as_jax_array
from numpyro_largecat.ops.top_l import log_sum, take_last


class TopLCategorical(dist.Distribution):
    r"""Categorical over K outcomes that stores L of them; the others have probability zero.

    With stored outcomes i and probabilities ``w = softmax(logits)``,

    .. math:: P(z = k) = \sum_{l=1}^{L} w_l \, [i_l = k].

    It is the posterior of the component of an observation under an L-sparse mixture
    (``TopLMixture.responsibilities``), and may be used as any distribution over integers. Its
    L outcomes differ between the entries of a batch, so it cannot be enumerated: sum over
    ``indices`` with the weights ``probs``.

    The stored outcomes must be distinct and in [0, K). Outside ``jit`` others are refused. Under
    ``jit``, where they cannot be looked at, ``log_prob`` adds up the weights of an outcome that
    repeats, ``entropy`` and the KL divergence take repeated ones for different outcomes, and all
    three are NaN where an outcome is out of range.

    Shapes: ``batch_shape`` is the broadcast of ``indices.shape[:-1]`` and ``logits.shape[:-1]``;
    ``event_shape`` is ().

    Cost: O(L) time and memory for each sample, log_prob, entropy or KL divergence, whatever K;
    ``kl_divergence(self, Categorical(logits=...))`` sums the K logits of the other once.

    Args:
        indices: Stored outcomes i, distinct integers in [0, num_categories), shape (..., L).
        logits: Unnormalised log weights in nats, shape (..., L). -inf is a weight of zero.
        num_categories: Number of outcomes K, a Python int of at least L.
        validate_args: False to leave values unchecked; under ``jit`` they always are. Shapes are
            always checked.

    Raises:
        ValueError: If the last axes of ``indices`` and ``logits`` differ, are empty or longer than
            K; or, with its position, if an index is out of range or repeats, or if a logit is NaN
            or +inf.
        TypeError: If ``indices`` are not integers, ``logits`` are not floats, or
            ``num_categories`` is no Python int.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_largecat as lc
        >>> z = lc.TopLCategorical(jnp.array([2, 7]), jnp.zeros(2), num_categories=10**6)
        >>> jnp.exp(z.log_prob(jnp.array([2, 7, 8]))).tolist()
        [0.5, 0.5, 0.0]
        >>> round(z.entropy().item(), 4)  # log 2
        0.6931

    References:
        Hughes and Sudderth, Fast Learning of Clusters and Topics via Sparse Posteriors, 2016,
        Eq. 8.
    """

    arg_constraints = {
        "indices": constraints.dependent(is_discrete=True, event_dim=1),
        "logits": constraints.dependent(is_discrete=False, event_dim=1),
    }
    pytree_data_fields = ("indices", "logits")
    pytree_aux_fields = ("num_categories",)

    def __init__(
        self,
        indices: ArrayLike,
        logits: ArrayLike,
        num_categories: int,
        *,
        validate_args: bool | None = None,
    ) -> None:
        check_integers("indices", indices)
        self.indices = as_ids(indices)
        self.logits = as_jax_array(logits)
        self.num_categories = check_count("num_categories", num_categories, 1)
        shapes = self.indices.shape, self.logits.shape
        if not all(shapes) or shapes[0][-1] != shapes[1][-1]:
            raise ValueError(
                "`indices` and `logits` must have the same last axis, the stored outcomes; "
                f"got indices.shape={shapes[0]} and logits.shape={shapes[1]}."
            )
        if not 1 <= shapes[0][-1] <= self.num_categories:
            raise ValueError(
                "`indices` must hold from one to `num_categories` outcomes, "
                f"{self.num_categories}, which differ; got shape {shapes[0]}."
            )
        if validate_args is not False:
            check_in_range("`indices`", self.indices, self.num_categories, "outcomes")
            check_distinct("`indices`", self.indices)
            check_log_weights("`logits`", self.logits)
        batch_shape = lax.broadcast_shapes(shapes[0][:-1], shapes[1][:-1])
        super().__init__(batch_shape=batch_shape, validate_args=validate_args)

    @constraints.dependent_property(is_discrete=True, event_dim=0)
    def support(self) -> constraints.Constraint:
        """Integers in [0, K), those of probability zero among them."""
        return constraints.integer_interval(0, self.num_categories - 1)

    @property
    def log_probs(self) -> Array:
        """Log probabilities of the stored outcomes, shape (..., L)."""
        log_probs = jax.nn.log_softmax(self.logits, axis=-1)
        return jnp.where(self._is_known, log_probs, jnp.nan)

    @property
    def probs(self) -> Array:
        """Probabilities of the stored outcomes, shape (..., L)."""
        return jnp.exp(self.log_probs)

    @property
    def mode(self) -> Array:
        """The outcome of highest probability, shape ``batch_shape``."""
        best = jnp.argmax(self.logits, axis=-1)
        return self._outcome(jnp.broadcast_to(best, self.batch_shape))

    @property
    def mean(self) -> Array:
        """NaN, as for any categorical: outcomes have no order."""
        return jnp.full(self.batch_shape, jnp.nan, self.logits.dtype)

    @property
    def variance(self) -> Array:
        """NaN, as ``mean``."""
        return self.mean

    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        """Draw outcomes, shape ``sample_shape + batch_shape``."""
        shape = sample_shape + self.batch_shape
        return self._outcome(random.categorical(key, self.logits, shape=shape))

    @validate_sample
    def log_prob(self, value: ArrayLike, intermediates: Any = None) -> Array:
        """Log probability of each outcome in ``value``; -inf if it is not stored."""
        del intermediates
        is_value = self.indices == as_ids(value)[..., None]
        log_prob = log_sum(jnp.where(is_value, self.log_probs, -jnp.inf))
        return jnp.where(self._is_known[..., 0], log_prob, jnp.nan)

    def entropy(self) -> Array:
        """Entropy in nats, shape ``batch_shape``."""
        return self._expectation(-self.log_probs)

    def enumerate_support(self, expand: bool = True) -> Array:
        """Refuse: the stored outcomes differ between the entries of a batch."""
        raise NotImplementedError(
            "TopLCategorical cannot be enumerated: sum over `indices` with the weights `probs`."
        )

    @property
    def _is_known(self) -> Array:
        indices = self.indices
        is_known = (indices >= 0) & (indices < self.num_categories)
        return is_known.all(axis=-1, keepdims=True)

    def _outcome(self, place: Array) -> Array:
        indices = jnp.broadcast_to(self.indices, place.shape + self.indices.shape[-1:])
        return jnp.take_along_axis(indices, place[..., None], axis=-1)[..., 0]

    def _expectation(self, values: Array) -> Array:
        """Sum of ``values`` (..., L) of the stored outcomes; a weight of zero counts nothing."""
        log_probs = self.log_probs
        terms = jnp.exp(log_probs) * jnp.where(jnp.isneginf(log_probs), 0, values)
        return terms.sum(axis=-1)


@kl_divergence.register(TopLCategorical, dist.CategoricalProbs)
def _kl_to_probs(p: TopLCategorical, q: dist.CategoricalProbs) -> Array:
    _check_same_outcomes(p, q.probs)
    return p._expectation(p.log_probs - jnp.log(take_last(q.probs, p.indices)))


@kl_divergence.register(TopLCategorical, dist.CategoricalLogits)
def _kl_to_logits(p: TopLCategorical, q: dist.CategoricalLogits) -> Array:
    _check_same_outcomes(p, q.logits)
    log_total = jax.nn.logsumexp(q.logits, axis=-1, keepdims=True)
    return p._expectation(p.log_probs - (take_last(q.logits, p.indices) - log_total))


def _check_same_outcomes(p: TopLCategorical, table: Array) -> None:
    need = "the other categorical with the outcomes of the TopLCategorical"
    check_shape("`probs`", table, (..., p.num_categories), need)
