# SPDX-License-Identifier: Apache-2.0
"""The state of ``SubsampledSVI``, and the refusal of the state of another model or optimiser."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_largecat._checks import check_kind
from numpyro_largecat.handlers.internals import OptimizerState


class RuledParam(NamedTuple):
    """A parameter that an update rule moves, and what the rule remembers of it."""

    value: Array  # one row for each row of its plate
    rule_state: Any  # pytree of arrays with the same rows


class SubsampledSVIState(NamedTuple):
    """State of ``SubsampledSVI``: the fields of NumPyro's ``SVIState``, then two of our own."""

    optim_state: Any  # optimiser's state; holds the unconstrained parameters, stored whole
    mutable_state: Any  # values of `numpyro.mutable` sites, or None
    rng_key: Array  # key of the next step
    local_state: dict[str, RuledParam]  # parameters with an `update_rule`, by name
    num_steps: Array  # steps so far, also those that were skipped; says which batch comes next


def shapes_of(tree: Any) -> Any:
    """A tree with shapes and dtypes for arrays."""

    def shape(leaf: Any) -> jax.ShapeDtypeStruct:
        # `result_type` alone would hide that an array has 64 bits where these are not enabled.
        dtype = leaf.dtype if isinstance(leaf, jax.Array) else jnp.result_type(leaf)
        return jax.ShapeDtypeStruct(jnp.shape(leaf), dtype)

    return jax.tree.map(shape, tree)


def check_state(expected: SubsampledSVIState, state: Any, optim: Any) -> None:
    """Refuse a state whose parameters or optimiser are not those of the last ``init``.

    Cost: O(arrays of the state); no array is looked into.

    Args:
        expected: What ``shapes_of`` made of the state of that ``init``.
        state: The state to check.
        optim: The optimiser, a NumPyro one.

    Raises:
        ValueError: With the first parameter, or part of the optimiser's state, that differs.
        TypeError: If it is no state of ``SubsampledSVI``.
    """
    form = "a SubsampledSVIState, as `init` and `update` return and `result.state` holds it"
    check_kind("state", state, SubsampledSVIState, form)
    wanted = expected.optim_state, expected.local_state
    found = shapes_of((state.optim_state, state.local_state))
    wanted_names, found_names = (_param_names(o) | local.keys() for o, local in (wanted, found))
    if wanted_names != found_names:
        raise ValueError(
            f"the state must hold the parameters of model and guide, {sorted(wanted_names)}; it "
            f"lacks {sorted(wanted_names - found_names)}, and has "
            f"{sorted(found_names - wanted_names)} besides. If the model has changed, call `init`."
        )
    structures: list[Any] = [jax.tree.structure(wanted), jax.tree.structure(found)]
    if structures[0] != structures[1]:
        raise ValueError(
            "the state must be one of this optimiser and these update rules, made of "
            f"{_parts(wanted)}; got one made of {_parts(found)}. Start anew from its parameters, "
            "`run(..., init_params=result.params)`."
        )
    # Not in `eval_shape`, which makes 32 bits of 64.
    _check_leaves("param", *(optim.get_params(o) for o, _ in (wanted, found)))
    _check_leaves("param", wanted[1], found[1])
    _check_leaves("state of the optimiser at", wanted[0], found[0])


def _check_leaves(what: str, wanted: Any, found: Any) -> None:
    wanted_leaves = jax.tree_util.tree_leaves_with_path(wanted)
    for (path, want), got in zip(wanted_leaves, jax.tree.leaves(found), strict=True):
        if (want.shape, want.dtype) == (got.shape, got.dtype):
            continue
        name = f"'{path[0].key}'" if what == "param" else jax.tree_util.keystr(path)
        types = "`jax_enable_x64` and `table_dtype`"
        own = types if want.shape == got.shape else "sizes of the arguments"
        raise ValueError(
            f"{what} {name} of the state must have shape {want.shape} and dtype {want.dtype}; got "
            f"{got.shape} and {got.dtype}. Go on under the {own} of its `init`."
        )


def _param_names(optim_state: Any) -> set[str]:
    """Names of parameters, and of parts of those that are trees themselves."""
    names: set[str] = set()
    packed = jax.tree.leaves(optim_state, is_leaf=lambda x: isinstance(x, OptimizerState))
    for node in packed:
        if isinstance(node, OptimizerState):
            params = jax.tree.unflatten(node.tree_def, range(node.tree_def.num_leaves))
            names |= _dict_keys(params)
    return names | _dict_keys(optim_state)


def _dict_keys(tree: Any) -> set[str]:
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    return {
        str(key.key) for path in paths for key in path if isinstance(key, jax.tree_util.DictKey)
    }


def type_names(tree: Any) -> list[str]:
    """The types in a state of shapes, other than Python's own, in order."""
    kinds: list[str] = []

    def look(node: Any) -> bool:
        if not isinstance(node, jax.ShapeDtypeStruct) and type(node) not in (dict, tuple, list):
            kinds.append(type(node).__name__)
        return False

    jax.tree.leaves(tree, is_leaf=look)
    return kinds


def _parts(tree: Any) -> str:
    num_arrays = len(jax.tree.leaves(tree))
    return f"{', '.join(type_names(tree)) or 'no types'} and {num_arrays} arrays"
