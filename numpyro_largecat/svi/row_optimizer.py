# SPDX-License-Identifier: Apache-2.0
"""Run any elementwise optimiser on some rows of its state."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from numpyro_largecat.handlers.closed_over_arrays import compiled
from numpyro_largecat.ops.table_rows import gather_rows, scatter_rows

Rows = dict[str, dict[int, Array]]  # parameter -> axis -> rows; only parameters taken by rows
RowAxes = tuple[tuple[str, tuple[int, ...]], ...]  # (parameter, its axes that are rows), by name
# States, by name, of optimisers that count all steps where a row has few of them.
OF_ALL_STEPS = {
    "MultiStepsState": "it collects gradients over steps, and rows would lose theirs",
    "ApplyEvery": "it collects gradients over steps, and rows would lose theirs",
    "ScheduleFreeState": "it averages values over all steps, and a row has its own number of "
    "them, which `lc.average_iterates` counts",
}


def gather_state(state: Any, owners: list[str | None], rows: Rows) -> Any:
    """Take the rows of every leaf that belongs to a parameter in ``rows``.

    Cost: O(rows taken).
    """
    leaves, tree = jax.tree.flatten(state)
    taken = [
        leaf if owner is None else gather_rows(leaf, rows[owner])
        for leaf, owner in zip(leaves, owners, strict=True)
    ]
    return jax.tree.unflatten(tree, taken)


def scatter_state(state: Any, new: Any, owners: list[str | None], rows: Rows) -> Any:
    """Write the rows ``new`` back into ``state``; leaves that are not by rows are replaced.

    Cost: O(rows written), if ``state`` is donated.
    """
    leaves, tree = jax.tree.flatten(state)
    written = [
        new_leaf if owner is None else scatter_rows(leaf, rows[owner], new_leaf)
        for leaf, new_leaf, owner in zip(leaves, jax.tree.leaves(new), owners, strict=True)
    ]
    return jax.tree.unflatten(tree, written)


def find_owners(optim: Any, params: Any, axes: dict[str, tuple[int, ...]]) -> list[str | None]:
    """Say for each leaf of the optimiser's state to which parameter taken by rows it belongs.

    A leaf belongs to a parameter if its shape follows the parameter's number of rows. Leaves
    such as step counts, and those of parameters taken whole, belong to none. Nothing is computed.

    Args:
        optim: A NumPyro optimiser.
        params: Parameters, or their shapes, by name.
        axes: Axes that index rows, for each parameter taken by rows.

    Raises:
        ValueError: If some leaf depends on the rows of a parameter in another way than by having
            the parameter's shape, or on the rows of several.
    """
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), params)
    base, tree = jax.tree.flatten(jax.eval_shape(optim.init, shapes))
    owners: list[str | None] = [None] * len(base)
    for name, row_axes in axes.items():
        longer = _with_rows(shapes[name], row_axes, [n + 1 for n in _sizes(shapes[name], row_axes)])
        leaves, new_tree = jax.tree.flatten(jax.eval_shape(optim.init, {**shapes, name: longer}))
        if str(new_tree) != str(tree):
            raise _not_row_wise(optim, f"the structure of its state depends on the rows of {name}")
        for i, (leaf, old) in enumerate(zip(leaves, base, strict=True)):
            if leaf.shape == old.shape:
                continue
            if leaf.shape != longer.shape or owners[i] is not None:
                kept = f"it keeps state of shape {old.shape} for parameter '{name}' of shape"
                raise _not_row_wise(optim, f"{kept} {shapes[name].shape}, which mixes rows")
            owners[i] = name
    return owners


def check_row_wise(optim: Any, params: Any, axes: dict[str, tuple[int, ...]]) -> None:
    """Refuse an optimiser whose update of some rows differs when it sees those rows alone.

    On small tables of the same kind, one update of a few rows is compared with the same update of
    the whole table, in which the other rows have zero gradient, and parameters and state that are
    NaN: what depends on them in any way shows it. Gradient clipping by global norm passes, since
    rows without gradient add nothing to the norm; trust ratios and factored moments do not.

    Cost: a few updates of tables with 4 rows.

    Raises:
        ValueError: If the updates differ, or if the optimiser applies updates only now and then or
            averages over all steps.
    """
    rng = np.random.default_rng(0)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), params)
    for name, row_axes in axes.items():
        shapes[name] = _with_rows(shapes[name], row_axes, [4] * len(row_axes))
    two: Any = np.arange(2)  # one of JAX would be an argument that the compiled program lacks
    some = {name: dict.fromkeys(row_axes, two) for name, row_axes in axes.items()}
    owners = find_owners(optim, shapes, axes)
    by_name: list[str | None] = [
        name if name in axes else None
        for name, tree in sorted(shapes.items())
        for _ in jax.tree.leaves(tree)
    ]

    def random_like(*scales: float) -> Any:
        def draw(shape: jax.ShapeDtypeStruct) -> np.ndarray:
            scaled = [scale * rng.standard_normal(shape.shape) for scale in scales]
            return np.asarray(scaled, shape.dtype)

        return jax.tree.map(draw, shapes)

    def agrees(first: Any, later_grads: Any) -> Array:
        params, grads = (jax.tree.map(lambda x, i=i: x[i], first) for i in (0, 1))
        state = optim.init(params)
        _refuse_what_counts_all_steps(optim, state)
        state = optim.update(grads, state, value=jnp.array(1.0))
        nan = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan) if _is_float(x) else x, state)
        tainted = scatter_state(nan, gather_state(state, owners, some), owners, some)

        def agree(grads: Any) -> Array:
            taken = gather_state(grads, by_name, some)
            others = jax.tree.map(jnp.zeros_like, grads)
            alone = optim.update(taken, gather_state(state, owners, some), value=jnp.array(1.0))
            among = optim.update(
                scatter_state(others, taken, by_name, some), tainted, value=jnp.array(1.0)
            )
            among = gather_state(among, owners, some)
            pairs = zip(jax.tree.leaves(alone), jax.tree.leaves(among), strict=True)
            return jnp.stack([jnp.allclose(a, b, rtol=1e-4, atol=0) for a, b in pairs]).all()

        return lax.map(agree, later_grads).all()

    given = random_like(1.0, 1.0), random_like(1e-3, 1.0, 1e4, 1e8)
    if not compiled(agrees, runs_once=True).on_its_own(*given):
        raise _not_row_wise(optim, "its update of some rows depends on other rows")


def _sizes(shape: jax.ShapeDtypeStruct, axes: tuple[int, ...]) -> list[int]:
    return [shape.shape[axis] for axis in axes]


def _with_rows(
    shape: jax.ShapeDtypeStruct, axes: tuple[int, ...], sizes: list[int]
) -> jax.ShapeDtypeStruct:
    new = list(shape.shape)
    for axis, size in zip(axes, sizes, strict=True):
        new[axis] = size
    return jax.ShapeDtypeStruct(tuple(new), shape.dtype)


def _is_float(x: Any) -> bool:
    return bool(jnp.issubdtype(jnp.result_type(x), jnp.inexact))


def _refuse_what_counts_all_steps(optim: Any, state: Any) -> None:
    found: list[str] = []

    def look(node: Any) -> bool:
        if type(node).__name__ in OF_ALL_STEPS:
            found.append(type(node).__name__)
        return False

    jax.tree.flatten(state, is_leaf=look)
    if found:
        raise _not_row_wise(optim, f"{OF_ALL_STEPS[found[0]]} ({found[0]})")


def _not_row_wise(optim: Any, reason: str) -> ValueError:
    kind = type(optim).__name__
    of_what = "made from one of optax" if kind == "_NumPyroOptim" else kind
    return ValueError(
        f"SubsampledSVI cannot run this optimiser ({of_what}) on the touched rows of "
        f"a plate: {reason}. Use an elementwise one, such as optax.adam or adagrad, also after "
        "optax.clip_by_global_norm; or numpyro.infer.SVI, which updates all rows."
    )
