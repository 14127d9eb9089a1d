# SPDX-License-Identifier: Apache-2.0
"""Arrays that share memory with no other, so that their buffers can be donated."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_largecat._checks import is_concrete
from numpyro_largecat.handlers.internals import addresses_of


def without_aliases(state: Any, others: Any = ()) -> Any:
    """Copy leaves that share memory with an earlier one, since a buffer can be donated once.

    Or with one of ``others``, which stay with whoever has them.
    """
    seen = {a for x in jax.tree.leaves(others) if _has_addresses(x) for a in addresses_of(x)}

    def own(leaf: Any) -> Any:
        leaf = jnp.asarray(leaf)
        if not _has_addresses(leaf):
            return leaf
        pointers = addresses_of(leaf)
        if pointers & seen:
            return jnp.copy(leaf)
        seen.update(pointers)
        return leaf

    return jax.tree.map(own, state)


def _has_addresses(leaf: Any) -> bool:
    return isinstance(leaf, Array) and is_concrete(leaf) and leaf.is_fully_addressable
