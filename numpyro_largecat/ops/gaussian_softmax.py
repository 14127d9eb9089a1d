# SPDX-License-Identifier: Apache-2.0
r"""The mean softmax of Gaussian utilities that are independent over classes.

For one class k, with the utilities of all others drawn and its own integrated out,

.. math:: E\Big[\frac{e^{\psi_k}}{\sum_j e^{\psi_j}}\Big]
    = E_{\psi_{-k}}\Big[ E_{\psi_k} \, \sigma\Big(\psi_k - \log \sum_{j \neq k} e^{\psi_j}\Big)
    \Big] .

The outer mean is over few draws: the log of a sum over many classes varies little.
"""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.scipy.special import ndtri

from numpyro_largecat.ops.hash_bits import hash_bits
from numpyro_largecat.ops.log_sums import log_add, log_sum_of_any

_REACH = 5.6  # of the trapezoidal rule, in standard deviations
_STEPS = {2.0: 0.8, 10.0: 0.4, math.inf: 0.1}  # up to a variance
_FEW = 32  # draws, whose order is found by comparing them
_MOST = 65_519  # draws of one order: a full number whose square is a 32-bit integer


def log_sums_of_draws(mean: Array, scale: Array, normals: Array) -> Array:
    r"""Log sums of exponentials over the classes for each draw, shape (T, ...).

    .. math:: \log \sum_k \exp(\mathrm{mean}_k + \mathrm{scale}_k z_{tk})

    Cost: one exponential for each draw, observation and class, in a single pass. Where that would
    overflow or underflow, with scales of some tens, it is two passes, as always in a log-sum-exp.

    Args:
        mean: Means of the utilities, shape (..., M).
        scale: Their standard deviations, of the same shape.
        normals: Standard normal draws z, shape (T, M).
    """
    high = (mean + 2 * scale).max(axis=-1, keepdims=True)
    high = jnp.where(jnp.isfinite(high), high, 0)

    def with_maxima(z: Array) -> Array:
        return jax.nn.logsumexp(mean + scale * z, axis=-1)

    z = normals.reshape(len(normals), *[1] * (mean.ndim - 1), -1)
    sums = jnp.exp(mean - high + scale * z).sum(axis=-1)
    is_kept = (sums > 0) & (sums < jnp.inf)
    is_empty = (mean == -jnp.inf).all(axis=-1)
    return lax.cond(
        (is_kept | is_empty | jnp.isnan(sums)).all(),
        lambda: jnp.log(sums) + high[..., 0],
        lambda: lax.map(with_maxima, normals),
    )


def add_log_sums(log_sums: Array, mean: Array, scale: Array, normals: Array) -> Array:
    """Add the exponentials of more classes to log sums (T, ...), see ``log_sums_of_draws``.

    Cost: that of ``log_sums_of_draws`` without the search for the largest utility, wherever what
    was found so far says how large the sums are.
    """
    shift, is_known = shift_of(log_sums)

    def anew() -> Array:
        return jnp.logaddexp(log_sums, log_sums_of_draws(mean, scale, normals))

    def from_shift() -> Array:
        z = normals.reshape(len(normals), *[1] * (mean.ndim - 1), -1)
        sums = jnp.exp(mean - shift[..., None] + scale * z).sum(axis=-1)
        is_finite = (sums < jnp.inf) | jnp.isnan(sums)
        added = jnp.logaddexp(log_sums, jnp.log(sums) + shift)
        return lax.cond(is_finite.all(), lambda: added, anew)

    return lax.cond(is_known, from_shift, anew)


def shift_of(log_sums: Array) -> tuple[Array, Array]:
    """The size (...) of log sums (T, ...), and whether it is that of all of them.

    What is too small to be represented below it is then nothing to any of the sums.
    """
    high, low = log_sums.max(axis=0), log_sums.min(axis=0)
    most = -math.log(float(jnp.finfo(log_sums.dtype).tiny)) / 3
    is_known = jnp.isnan(high) | (high - low < most)  # of infinite ones the difference is NaN
    return high, is_known.all()


@jax.jit
def log_sums_of_others(values: Array) -> Array:
    """For each of n values the log of the sum of the exponentials of the others, shape (..., n).

    The largest is kept apart: so there is no cancellation where one value is nearly all of the sum.
    """
    place = jnp.argmax(values, axis=-1, keepdims=True)
    is_largest = jnp.arange(values.shape[-1]) == place
    largest = jnp.take_along_axis(values, place, axis=-1)
    rest = log_sum_of_any(jnp.where(is_largest, -jnp.inf, values))[..., None]
    total = log_add(largest, rest)
    share = jnp.exp(jnp.where(is_largest, -jnp.inf, values) - total)  # at most 1/2
    own = total + jnp.log1p(-share)
    return jnp.where(is_largest, rest, jnp.where(total == -jnp.inf, total, own))


@jax.jit
def log_mean_sigmoid(loc: Array, variance: Array) -> Array:
    r"""Log of :math:`E \sigma(x)` for :math:`x \sim N(\mathrm{loc}, \mathrm{variance})`.

    By the trapezoidal rule around the peak of the integrand, also in the lower tail. Its error is
    below 1e-5 up to a variance of 200, 3e-4 up to 400, 0.01 at 900 and 0.1 at 2500.

    Cost: 15 evaluations for each entry where no variance is above 2, 29 up to 10, or 113.
    """
    scale = jnp.sqrt(variance)
    # sigma(x) is about min(1, exp x): under the density it peaks where x is 0, or at an end.
    peak = jnp.clip(-loc / jnp.where(scale > 0, scale, 1), 0, scale)

    def by_steps_of(step: float) -> Array:
        nodes = np.arange(-_REACH, _REACH + step / 2, step).astype(loc.dtype)
        z = peak + nodes.reshape(-1, *[1] * loc.ndim)  # as the last axis, so few take twice as long
        terms = jax.nn.log_sigmoid(loc + scale * z) - 0.5 * z**2
        return jax.nn.logsumexp(terms, axis=0) + math.log(step / math.sqrt(2 * math.pi))

    rules = [partial(by_steps_of, step) for step in _STEPS.values()]
    # Where one is not known, NaN, the others get the finest rule.
    is_above = [~(variance <= limit).all() for limit in list(_STEPS)[:-1]]
    found: Array = lax.switch(jnp.stack(is_above).sum(), rules)
    return found


@partial(jax.jit, static_argnames=("num_draws", "dtype"))
def stratified_normals(rng_key: Array, ids: Array, num_draws: int, dtype: jnp.dtype) -> Array:
    """Standard normal draws for each id, shape (num_draws,) + ids.shape, the same for equal ids.

    Of the draws for one id each is in another of as many intervals of equal probability, in random
    order, so that their mean of a function varies less (Latin hypercube sampling). Where
    ``num_draws`` is not ``full_number`` of draws, some intervals have none.
    """
    if num_draws > _MOST:
        keys, more = jax.random.split(rng_key), num_draws // 2
        halves = zip(keys, (num_draws - more, more), strict=True)
        return jnp.concatenate([stratified_normals(key, ids, n, dtype) for key, n in halves])
    exact = jnp.promote_types(dtype, jnp.float32)  # narrower types have few places in an interval
    salts = jax.random.bits(rng_key, (2, 2, num_draws, *[1] * ids.ndim), jnp.uint32)
    ids = ids.astype(jnp.uint32)
    place = hash_bits(hash_bits(ids ^ salts[0, 1]) ^ salts[1, 1])
    inside = ((place >> 9).astype(exact) + 0.5) * 2.0**-23
    in_order = _by_comparing if num_draws <= _FEW else _by_cubes
    uniform = (in_order(ids, *salts[:, 0]) + inside) / full_number(num_draws)
    return ndtri(jnp.clip(uniform, jnp.finfo(exact).tiny, 1 - jnp.finfo(exact).eps)).astype(dtype)


def full_number(num_draws: int) -> int:
    """So many draws or some more, one in each interval: above 32 a prime that is 2 modulo 3."""
    if num_draws > _MOST:
        return 2 * full_number(-(-num_draws // 2))
    number = num_draws
    while number > _FEW and not (number % 3 == 2 and _is_prime(number)):
        number += 1
    return number


def _is_prime(number: int) -> bool:
    return all(number % d for d in range(2, math.isqrt(number) + 1))


def _by_comparing(ids: Array, first: Array, second: Array) -> Array:
    """Places of the draws in a random order for each id, (T, ...)."""
    values = hash_bits(hash_bits(ids ^ first) ^ second)
    draws = jnp.arange(len(values)).reshape(-1, *[1] * ids.ndim)

    def add(found: Array, draw: Array) -> tuple[Array, None]:
        # One draw after the other: all comparisons at once take ten times as long in a loop.
        value = values[draw]
        return found + ((value < values) | ((value == values) & (draw < draws))), None

    return lax.scan(add, jnp.zeros(values.shape, jnp.int32), jnp.arange(len(values)))[0]


def _by_cubes(ids: Array, first: Array, second: Array) -> Array:
    r"""The same for many draws, by arithmetic modulo a prime P that is 2 modulo 3.

    Cubes are then all different, and draw t has the place

    .. math:: c (a (t + d)^3 + e)^3 + b \mod P

    with five random numbers of the id, of which a and c are not 0. Each two draws are equally
    likely to be in each two places, as in a random order, so that means over draws have the same
    variance. (By a line alone, c t + b, the draws of some two ids would move together.) With a sort
    of the draws of each id, predictions over 100 draws take eight times as long.
    """
    prime = full_number(len(first))
    a, b, c, d, e = hash_bits(hash_bits(ids ^ first[:5]) ^ second[:5])
    a, c = (1 + x % (prime - 1) for x in (a, c))
    b, d, e = (x % prime for x in (b, d, e))

    def cube(x: Array) -> Array:
        return x * x % prime * x % prime

    t = jnp.arange(len(first), dtype=jnp.uint32).reshape(-1, *[1] * ids.ndim)
    return (c * cube((a * cube((t + d) % prime) + e) % prime) + b) % prime
