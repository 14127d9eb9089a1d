# SPDX-License-Identifier: Apache-2.0
r"""Latent values of an observation's own, outside of the class plate, that its u follows.

The best u is log(1 + r) with r the sum of exp(psi_k - psi_y) over all classes k but the label y.
Where values v of the observation move, log r moves by its derivative,

    s = sum_k q_k (d psi_k / d v - d psi_y / d v),  q_k = exp(psi_k) / sum_{j != y} exp(psi_j),

which takes a sum over all classes. A step estimates it from its own, with their weights; whatever
is kept of these estimates, the likelihood is a bound, since any u gives one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from numpyro_largecat.choices.choice_distribution import ChoiceDistribution
from numpyro_largecat.plates.class_subset import ClassSubset

Utilities = Callable[[Any], ArrayLike]  # of the values


def joined_values(name: str, values: Any, shape: tuple[int, ...]) -> Array:
    """All values of each observation, (*shape, D).

    Raises:
        ValueError: If an array has not the axes of the observations in front, or there is none.
    """
    arrays = [jnp.asarray(x) for x in jax.tree.leaves(values)]
    for array in arrays:
        if array.shape[: len(shape)] != shape:
            raise ValueError(
                f"site '{name}': `follow` must have values for each observation, arrays with axes "
                f"{shape} in front; got shape {array.shape}. Take those of an entity plate by "
                "`rows_of`, and repeat one of all observations, "
                f"`jnp.broadcast_to(b, ({', '.join(map(str, shape))}, *b.shape))`."
            )
    if not arrays:
        raise ValueError(f"site '{name}': `follow` must have an array; got {values!r}.")
    return jnp.concatenate(
        [x.reshape(*shape, math.prod(x.shape[len(shape) :])) for x in arrays], -1
    )


def estimated_slopes(
    utilities: Utilities, values: Any, classes: ClassSubset, obs: ArrayLike
) -> Array:
    """The derivative s of log r in all values, from the classes of a step, (*shape, D).

    It lies among the differences of their own derivatives, so a weight is never too large for it.
    It is 0 where no other class of the step is available.

    Cost: that of a gradient of the utilities.
    """
    values = lax.stop_gradient(values)
    found, pull_back = jax.vjp(lambda values: jnp.asarray(utilities(values)), values)
    choice = ChoiceDistribution(found, classes)
    distances, weights = choice.competitors(obs)
    log_weights = jnp.where(weights > 0, jnp.log(jnp.where(weights > 0, weights, 1)), -jnp.inf)
    shares = jax.nn.softmax(log_weights - distances, axis=-1, where=weights > 0)
    _, places = choice.label_entries(obs)
    is_own = jnp.arange(found.shape[-1]) == places[..., None]
    others = (weights > 0).any(axis=-1, keepdims=True)
    (slopes,) = pull_back(jnp.where(others, shares - is_own, 0).astype(found.dtype))
    joined = joined_values("", slopes, jnp.shape(obs))
    return lax.stop_gradient(jnp.where(jnp.isfinite(joined), joined, 0))
