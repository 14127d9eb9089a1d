# SPDX-License-Identifier: Apache-2.0
"""Refuse guides and models that cannot be evaluated on one chunk of classes after another."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike
from numpyro.distributions import constraints
from numpyro.distributions.transforms import biject_to
from numpyro.infer.autoguide import AutoGuideList
from numpyro.primitives import Messenger

from numpyro_largecat._checks import is_concrete
from numpyro_largecat.infer.guide_tables import guide_parts
from numpyro_largecat.ops.finfo import finfo

MOST_TOGETHER = 128  # classes in which places are looked for; what is done by place is seldom later


def check_guide_has_run(guide: Any) -> None:
    """Refuse an automatic guide that would find its sites in a model with few classes, no labels.

    Raises:
        ValueError: If a part of it has not looked at its model yet.
    """
    parts = [part for part in guide_parts(guide) if not isinstance(part, AutoGuideList)]
    if any(part.prototype_trace is None for part in parts):
        raise ValueError(
            "the guide has not been run yet, and finds its sites in its first run. Run it once "
            "with arguments as in training, among them labels: "
            "`numpyro.handlers.seed(guide, 0)(x, y, rows)`. The parameters stay those of `params`."
        )


def rows_are_alone(
    of_classes: Callable[[ArrayLike, int, ArrayLike], Array], plate: str, chunk_size: int
) -> Array:
    """Whether the utility of a class is the same whichever classes are evaluated with it.

    ``of_classes(start, size, seed)`` are the utilities (..., size) of classes from ``start`` on, at
    values that tell all rows apart, see ``moved_rows``. Those of class 1 must be the same after
    class 0 and before class 2, which shows sums over the classes and rows that are read by id; and
    those of the first classes of a chunk the same when it starts one class later, which shows
    places. What a model draws from the seed is not compared.

    Cost: the utilities of at most 262 classes.

    Returns:
        A boolean, which is a tracer under ``jit``.

    Raises:
        ValueError: If the utilities of a class differ and are no tracers.
    """
    starts, seeds = jnp.array([0, 1, 1]), jnp.array([0, 0, 1])
    pairs = lax.map(lambda pair: of_classes(pair[0], 2, pair[1]), (starts, seeds))
    first, noise = pairs[1, ..., 0], pairs[2, ..., 0]
    differ = _differ(pairs[0, ..., 1:], first[..., None])
    if chunk_size > 2:
        size = min(chunk_size, MOST_TOGETHER)
        chunks = lax.map(lambda start: of_classes(start, size, 0), jnp.array([0, 1]))
        later = _differ(chunks[0, ..., 2:], chunks[1, ..., 1:-1])
        differ = jnp.concatenate([differ, later])
    differ &= ((first == noise) | (jnp.isnan(first) & jnp.isnan(noise))).all()
    if is_concrete(differ) and differ.any():
        raise ValueError(
            f"the utility of class {int(jnp.argmax(differ)) + 1} of plate '{plate}' depends on "
            "which classes are evaluated with it. A class plate holds some of its classes at a "
            "time, so a utility may depend on the rows of its own class and on what is outside of "
            "the plate, not on the place of a row, on sums over rows, or on rows that are read by "
            "id. Write a reference class as `jnp.where(classes.indices == 0, 0.0, b)`, not "
            "`b.at[0].set(0.0)`; in place of centred or normalised weights give the prior a scale "
            "of its own; read rows by id, such as those of a history, from a class plate of their "
            "own. If the model is fitted with a full plate, a `chunk_size` of at least the number "
            "of classes evaluates it on all of them at once, as in the fit."
        )
    return ~differ.any()


def _differ(a: Array, b: Array) -> Array:
    """Which classes, on the last axis, have utilities that differ by more than rounding."""
    size = jnp.maximum(jnp.abs(a), jnp.abs(b))
    scale = jnp.max(jnp.where(jnp.isfinite(size), size, 0), initial=0)
    near = jnp.abs(a - b) <= jnp.sqrt(finfo(a.dtype).eps) * scale
    same = near | (a == b) | (jnp.isnan(a) & jnp.isnan(b))
    return ~same.reshape(-1, a.shape[-1]).all(axis=0)


class moved_rows(Messenger):
    """Move parameters and latent values in a class plate, by noise of each class.

    Rows that nothing has touched are alike, and would hide which of them a utility depends on.
    Values move within their support. The handler must be the first around model or guide, to see
    the rows that others have taken.
    """

    def __init__(self, fn: Callable[..., Any], plate: str, classes: Array) -> None:
        self.plate = plate
        self.classes = classes
        super().__init__(fn)

    def __enter__(self) -> None:
        self.num_moved = 0
        self.event_dims: dict[str, int | None] = {}
        super().__enter__()

    def process_message(self, msg: dict[str, Any]) -> None:
        """Remember how many axes a row of a parameter has, which handlers that slice forget."""
        if msg["type"] == "param":
            self.event_dims[msg["name"]] = msg["kwargs"].get("event_dim")

    def postprocess_message(self, msg: dict[str, Any]) -> None:
        """Move the value of a site."""
        if msg["type"] == "sample" and not msg["is_observed"]:
            event_dim, support = msg["fn"].event_dim, msg["fn"].support
        elif msg["type"] == "param":
            event_dim = self.event_dims[msg["name"]]
            support = msg["kwargs"].get("constraint", constraints.real)
        else:
            return
        if event_dim is None or support.is_discrete:
            return
        for frame in msg["cond_indep_stack"]:
            if frame.name == self.plate:
                msg["value"] = self._moved(msg["value"], frame.dim - event_dim, biject_to(support))

    def _moved(self, value: Any, axis: int, transform: Any) -> Any:
        shape = jnp.shape(value)
        if len(shape) < -axis or shape[axis] != self.classes.shape[0]:
            return value  # shared by the classes
        free = jnp.moveaxis(transform.inv(value), len(shape) + axis, 0)
        key = jax.random.fold_in(jax.random.key(0), self.num_moved)
        self.num_moved += 1
        keys = jax.vmap(partial(jax.random.fold_in, key))(self.classes)
        noise = jax.vmap(lambda key: jax.random.normal(key, free.shape[1:], free.dtype))(keys)
        return transform(jnp.moveaxis(free + noise, 0, len(shape) + axis))
