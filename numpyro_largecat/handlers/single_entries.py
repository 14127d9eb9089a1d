# SPDX-License-Identifier: Apache-2.0
"""Single entries of a function's result, without computing the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_largecat.handlers.internals import Literal, run_equation

ELEMENTWISE = frozenset(
    "add add_any sub mul div neg max min exp log log1p expm1 tanh logistic sqrt integer_pow "
    "convert_element_type select_n copy eq ne gt ge lt le not and or".split()
)
CALLS = frozenset(("jit", "pjit", "closed_call"))


def single_entries(fn: Callable[[], dict[str, tuple[Array, Array]]]) -> dict[str, Array]:
    r"""Evaluate ``values[..., entry]`` at the cost of these entries, where the operations allow it.

    .. math:: \mathrm{result}_n = \mathrm{values}_{n,\, \mathrm{entry}_n}, \qquad
              (\mathrm{values}, \mathrm{entry}) = \mathrm{fn}()

    Element-wise operations, broadcasts, transposes, joins and matrix products of the last steps of
    ``fn`` are done for these entries alone: of the product of (N, D) and (D, M) only N inner
    products remain, N for each of the arrays that are joined. What comes before, and other
    operations, are computed whole.

    This reads the traced program, since a model forms its utilities as it likes and there is no
    statement that could ask it for the utility of one class of each observation.

    Cost: O(N D) in place of O(N M D), for linear utilities.

    Args:
        fn: Function of no arguments that returns pairs of values, shapes (..., M), and integers in
            [0, M), shapes (...).

    Returns:
        The entry of each pair, shapes (...).
    """
    jaxpr, shapes = jax.make_jaxpr(fn, return_shape=True)()
    consts = [_Node(jax.typeof(x), value=x) for x in jaxpr.consts]
    nodes = _graph(jaxpr.jaxpr, consts, [])
    pairs = jax.tree.unflatten(jax.tree.structure(shapes), nodes)
    taken = {}
    for name, (values, entry) in pairs.items():
        rows = jnp.asarray(entry.whole())
        taken[name] = _entries(values, (*jnp.indices(rows.shape), rows), {})
    return taken


@dataclass(eq=False)
class _Step:
    """One operation of a traced function, done once and only if it is needed."""

    eqn: Any
    inputs: list[_Node]
    results: list[Any] | None = None

    def result(self, i: int) -> Any:
        if self.results is None:
            self.results = run_equation(self.eqn, [node.whole() for node in self.inputs])
        return self.results[i]


@dataclass(eq=False)
class _Node:
    """One array of a traced function: known, or result ``position`` of a step."""

    aval: Any  # shape and dtype
    value: Any = None
    step: _Step | None = None
    position: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        return self.aval.shape

    def whole(self) -> Any:
        return self.value if self.step is None else self.step.result(self.position)


def _graph(jaxpr: Any, consts: list[_Node], inputs: list[_Node]) -> list[_Node]:
    """Link the arrays of ``jaxpr`` and of the functions that it calls."""
    known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *inputs], strict=True))

    def read(atom: Any) -> _Node:
        if isinstance(atom, Literal):
            return _Node(atom.aval, value=atom.val)
        return known[atom]

    for eqn in jaxpr.eqns:
        arguments = [read(atom) for atom in eqn.invars]
        if eqn.primitive.name in CALLS:
            inner = eqn.params["jaxpr" if "jaxpr" in eqn.params else "call_jaxpr"]
            constants = [_Node(jax.typeof(x), value=x) for x in inner.consts]
            results = _graph(inner.jaxpr, constants, arguments)
        else:
            step = _Step(eqn, arguments)
            results = [_Node(var.aval, step=step, position=i) for i, var in enumerate(eqn.outvars)]
        known.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


Index = tuple[Array, ...]  # one array of positions for each axis, all of the result's shape
Done = dict[Any, tuple[Index, Array]]  # what was asked for, and the entries there


def _entries(node: _Node, index: Index, done: Done) -> Array:
    """Entry ``index`` of ``node``; ``done`` remembers what was asked for before."""
    key = (id(node), *map(id, index))
    if key not in done:
        done[key] = index, _new_entries(node, index, done)  # what is kept alive has an id alone
    return done[key][1]


def _new_entries(node: _Node, index: Index, done: Done) -> Array:
    if node.step is None:
        return jnp.asarray(node.value)[index]
    eqn, inputs = node.step.eqn, node.step.inputs
    name = eqn.primitive.name
    if name in ELEMENTWISE:
        values = [_entries(x, _unspread(x, index), done) if x.shape else x.whole() for x in inputs]
        return run_equation(eqn, values)[0]
    if name == "transpose":
        axes = np.argsort(eqn.params["permutation"])
        return _entries(inputs[0], tuple(index[axis] for axis in axes), done)
    if name == "broadcast_in_dim":
        axes = eqn.params["broadcast_dimensions"]
        spread = _unspread(inputs[0], tuple(index[axis] for axis in axes))
        return jnp.broadcast_to(_entries(inputs[0], spread, done), index[0].shape)
    if name == "concatenate":
        return _of_parts(inputs, eqn.params["dimension"], index, done)
    if name == "dot_general":
        return _inner_products(node, index)
    return node.whole()[index]


def _of_parts(parts: list[_Node], axis: int, index: Index, done: Done) -> Array:
    """Entries of arrays that stand one after the other on ``axis``."""
    found, place = None, index[axis]
    for part in parts:
        size = part.shape[axis]
        inside = (*index[:axis], jnp.clip(place, 0, size - 1), *index[axis + 1 :])
        entries = _entries(part, inside, done)
        found = entries if found is None else jnp.where(place >= 0, entries, found)
        place = place - size
    assert found is not None
    return found


def _unspread(node: _Node, index: Index) -> Index:
    """Index of an operand whose axes of size 1 stand for any size."""
    sizes = zip(node.shape, index, strict=True)
    return tuple(jnp.zeros_like(rows) if size == 1 else rows for size, rows in sizes)


def _inner_products(node: _Node, index: Index) -> Array:
    """Entries of a product of arrays, the inner product of one row of each."""
    assert node.step is not None
    (contracted, batch), inputs = node.step.eqn.params["dimension_numbers"], node.step.inputs
    free = [
        [axis for axis in range(len(x.shape)) if axis not in (*c, *b)]
        for x, c, b in zip(inputs, contracted, batch, strict=True)
    ]
    num_batch, num_left = len(batch[0]), len(free[0])
    parts = index[:num_batch], index[num_batch:][:num_left], index[num_batch + num_left :]
    left, right = (
        jnp.transpose(x.whole(), (*b, *f, *c))[(*parts[0], *own)]
        for x, b, f, c, own in zip(inputs, batch, free, contracted, parts[1:], strict=True)
    )
    # A vector has no rows: it broadcasts.
    summed = tuple(range(-len(contracted[0]), 0))
    kind = node.aval.dtype  # operands may be narrower
    return (left.astype(kind) * right.astype(kind)).sum(axis=summed)
