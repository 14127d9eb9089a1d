# SPDX-License-Identifier: Apache-2.0
r"""Latent values of an observation's own, such as a user's row, that its u follows.

The best u is log(1 + r) with r the sum of exp(psi_k - psi_y) over all classes k but the label y.
Where values v of the observation move, log r moves by

    sum_k q_k d psi_k / d v - d psi_y / d v,  q_k = exp(psi_k) / sum_{j != y} exp(psi_j).

The utility of the label is at hand. The first term, the slopes, takes a sum over all classes: a
step estimates it from its own, with their weights. Whatever is kept of these estimates, the
likelihood is a bound, since any u gives one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike
from numpyro.primitives import Messenger

from numpyro_largecat._checks import why_not_taken
from numpyro_largecat.choices.choice_distribution import ChoiceDistribution
from numpyro_largecat.handlers.internals import eval_provenance
from numpyro_largecat.plates.class_subset import ClassSubset

Utilities = Callable[[Any], ArrayLike]  # of the values


class no_statements(Messenger):
    """Refuse statements of NumPyro in a function that is called several times."""

    def __init__(self, site: str) -> None:
        self._site = site
        super().__init__()

    def process_message(self, msg: dict[str, Any]) -> None:
        """Nothing may be said in here."""
        what = f"{msg['type']} statement" + (f" of '{msg['name']}'" if msg.get("name") else "")
        raise TypeError(
            f"site '{self._site}': with `follow` the function `utilities` is called several times "
            f"in a step, so it must hold no statements; got a {what}. Make it before, and use its "
            "value in the function."
        )


def check_takes_one(site: str, utilities: Utilities) -> None:
    """Refuse a function of several arguments, where values to follow are one."""
    reason = why_not_taken(utilities, None)
    if reason is not None:
        raise TypeError(
            f"site '{site}': with `follow` the function `utilities` must take one argument, all "
            "that is followed, such as `lambda values: values[0] @ w.T + values[1]`; its signature "
            f"says: {reason}."
        )


def refuse_names(site: str, values: Any) -> None:
    """Refuse names in the place of values, as a guide's ``follow`` has them."""
    if any(isinstance(x, str) for x in jax.tree.leaves(values)):
        raise TypeError(
            f"site '{site}': `follow` must have values, such as `people.rows_of(v, users)`; got "
            f"names, {values!r}."
        )


@dataclass(frozen=True, eq=False)
class OwnValues:
    """Values that an observation has of its own, and its utilities as a function of them."""

    utilities: Utilities
    values: Any  # a tree of arrays, (*shape, ...)
    joined: Array  # all of them, (*shape, D)

    @classmethod
    def of(cls, name: str, utilities: Utilities, values: Any, shape: tuple[int, ...]) -> OwnValues:
        """Check what a site was given as ``follow`` for observations of a shape.

        Raises:
            ValueError: If an array has not the axes of the observations in front, there is none, or
                the utilities do not depend on one.
            TypeError: If an array is not of floats.
        """
        leaves, treedef = jax.tree.flatten(values)
        arrays = [jnp.asarray(x) for x in leaves]
        for array in arrays:
            if array.shape[: len(shape)] != shape:
                axes = ", ".join(map(str, shape))
                raise ValueError(
                    f"site '{name}': `follow` must have values for each observation, arrays with "
                    f"axes {shape} in front; got shape {array.shape}. Take those of an entity "
                    "plate by `rows_of`, and repeat what all observations share, "
                    f"`jnp.broadcast_to(b, ({axes}, *b.shape))`."
                )
            if not jnp.issubdtype(array.dtype, jnp.floating):
                raise TypeError(f"site '{name}': `follow` must have floats; got {array.dtype}.")
        if not arrays:
            raise ValueError(f"site '{name}': `follow` must have an array; got {values!r}.")
        _check_dependence(name, lambda own: utilities(jax.tree.unflatten(treedef, own)), arrays)
        flat = [x.reshape(*shape, math.prod(x.shape[len(shape) :])) for x in arrays]
        return cls(utilities, values, jnp.concatenate(flat, axis=-1))

    def utilities_at(self, joined: Array) -> Array:
        """Utilities at other values, (*shape, D)."""
        leaves, treedef = jax.tree.flatten(self.values)
        sizes = [math.prod(jnp.shape(x)[joined.ndim - 1 :]) for x in leaves]
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        parts = jnp.split(joined, ends[:-1], axis=-1)
        shaped = [part.reshape(jnp.shape(x)) for part, x in zip(parts, leaves, strict=True)]
        return jnp.asarray(self.utilities(jax.tree.unflatten(treedef, shaped)))

    def estimated_slopes(self, classes: ClassSubset, obs: ArrayLike) -> Array:
        """The mean of d psi_k / d v over classes but the label, by q, from those of a step.

        It is one of theirs or between them, however large a weight is, and 0 where no other class
        of the step is available. (*shape, D)

        Cost: that of a gradient of the utilities.
        """
        found, pull_back = jax.vjp(self.utilities_at, lax.stop_gradient(self.joined))
        distances, weights = ChoiceDistribution(found, classes).competitors(obs)
        counts = weights > 0
        log_weights = jnp.log(jnp.where(counts, weights, 1))
        shares = jax.nn.softmax(log_weights - distances, axis=-1, where=counts)
        shares = jnp.where(counts, shares, 0)  # not NaN where there are none
        (slopes,) = pull_back(shares.astype(found.dtype))
        return lax.stop_gradient(jnp.where(jnp.isfinite(slopes), slopes, 0))


def _check_dependence(
    name: str, utilities: Callable[[list[Array]], ArrayLike], arrays: list[Array]
) -> None:
    """Refuse a function that goes around its argument, whose slopes would be 0."""
    by_place = {str(i): array for i, array in enumerate(arrays)}
    found = eval_provenance(lambda **own: utilities([own[i] for i in by_place]), **by_place)
    if unused := by_place.keys() - found:
        raise ValueError(
            f"site '{name}': `utilities` must depend on each array of `follow`, by its argument; "
            f"it does not on {len(unused)} of {len(arrays)}."
        )
