# SPDX-License-Identifier: Apache-2.0
"""Separate the arrays among a model's arguments from what a compiled function must know."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


class StaticArguments:
    """Arguments that are not arrays, and the structure that holds all of them."""

    def __init__(self, tree: Any, leaves: list[Any]) -> None:
        self.tree = tree
        self.leaves = leaves

    def __hash__(self) -> int:
        return hash(self.tree)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, StaticArguments)
            and self.tree == other.tree
            and all(
                a is b or (type(a) is type(b) and bool(a == b))
                for a, b in zip(self.leaves, other.leaves, strict=True)
            )
        )

    def restore(self, arrays: list[Any]) -> Any:
        """Put arrays and static leaves together again."""
        pairs = zip(arrays, self.leaves, strict=True)
        leaves = [static if array is None else array for array, static in pairs]
        return jax.tree.unflatten(self.tree, leaves)


def split_arguments(arguments: Any) -> tuple[list[Any], StaticArguments]:
    """Separate arrays, which a compiled loop takes as arguments, from everything else."""
    leaves, tree = jax.tree.flatten(arguments)
    arrays = [x if isinstance(x, (np.ndarray, jax.Array)) else None for x in leaves]
    static = [None if isinstance(x, (np.ndarray, jax.Array)) else x for x in leaves]
    return arrays, StaticArguments(tree, static)


def with_jax_arrays(arguments: Any) -> Any:
    """Turn NumPy arrays into JAX's, which may be indexed by classes that are traced."""
    return jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, arguments)
