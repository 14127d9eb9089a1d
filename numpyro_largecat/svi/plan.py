# SPDX-License-Identifier: Apache-2.0
"""What ``SubsampledSVI.init`` learns: all that a step and the loop need besides their state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import NamedSharding
from numpyro.infer.elbo import ELBO
from numpyro.infer.util import transform_fn

from numpyro_largecat.handlers.spread_tables import SpreadTable, TableAxis
from numpyro_largecat.handlers.touched_rows import TouchedRows
from numpyro_largecat.svi.iterates import Recorded
from numpyro_largecat.svi.narrow_tables import widen
from numpyro_largecat.svi.row_optimizer import RowAxes, Rows, check_row_wise, find_owners
from numpyro_largecat.svi.sharding import LeafLayout, Sharding, pin
from numpyro_largecat.svi.state import SubsampledSVIState, check_state, shapes_of
from numpyro_largecat.svi.stored_params import StoredParam


@dataclass(frozen=True, eq=False)
class Plan:
    """Model, guide and optimiser, and what their first run has shown of them; nothing changes it.

    ``recorded`` goes into compiled steps as arrays; all else of a plan is fixed in them.
    """

    model: Callable[..., Any]
    guide: Callable[..., Any]
    optim: Any  # a NumPyro optimiser
    loss: ELBO
    static_kwargs: Mapping[str, Any]  # passed to model and guide in each call
    table_dtype: Any = None  # bfloat16, or None for that which tables are made in
    sharding: Sharding | None = None  # which devices hold which rows

    # Learned by `init`; empty before.
    stored: Mapping[str, StoredParam] = field(default_factory=dict)  # all parameters, by name
    shapes: SubsampledSVIState | None = None  # of the state: shapes and dtypes for arrays
    computed: Any = None  # the same of the optimiser's state, in the dtypes that steps compute in
    recorded: Recorded = field(default_factory=dict)  # entries seen in each step
    owners: RowOwners | None = None  # whose rows the leaves of the optimiser's state hold
    layout: Any = None  # where the arrays of the state are, if they are spread over devices
    batch_plate: str | None = None  # the plate of the minibatch, if its rows are spread too

    def with_static(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """All keyword arguments of model and guide, see ``with_static``."""
        return with_static(kwargs, self.static_kwargs)

    def learned(self, stored: Mapping[str, StoredParam], optim_state: Any) -> Plan:
        """The plan after a first run that found these parameters.

        Args:
            stored: All parameters, by name.
            optim_state: Shapes of the optimiser's state, in the dtypes that steps compute in.
        """
        computed, owners = shapes_of(optim_state), self.owners
        if owners is None or computed != self.computed:
            owners = RowOwners(self.optim, computed)
        return replace(self, stored=stored, computed=computed, owners=owners)

    def with_state(self, state: SubsampledSVIState) -> Plan:
        """The plan of states that are like this one, or like these shapes."""
        plan = replace(self, shapes=shapes_of(state))
        return plan if self.sharding is None else replace(plan, layout=layout_of(plan))

    def pinned(self, state: SubsampledSVIState) -> SubsampledSVIState:
        """The state of a step that is compiled, with its arrays where they are to be."""
        kept: SubsampledSVIState = state if self.layout is None else pin(state, self.layout)
        return kept

    def seen_everywhere(self, tree: Any) -> Any:
        """Results of a compiled program that each device, and so each process, has whole."""
        if self.sharding is None:
            return tree
        where = self.sharding.everywhere
        return jax.tree.map(lambda x: lax.with_sharding_constraint(x, where), tree)

    def pinned_params(self, params: dict[str, Any]) -> dict[str, Any]:
        """Unconstrained parameters, or what has their shapes, in a compiled program."""
        if self.sharding is None:
            return params
        where = {name: self.sharding.spec(self.stored[name].plates) for name in params}
        return {
            name: jax.tree.map(lambda x, at=where[name]: lax.with_sharding_constraint(x, at), value)
            for name, value in params.items()
        }

    def fetched(self, tree: Any) -> Any:
        """Arrays outside of compiled programs, of which each process has all."""
        if self.sharding is None:
            return tree
        fetch = jax.jit(lambda x: x, out_shardings=self.sharding.everywhere)

        def is_elsewhere(x: Any) -> bool:
            return isinstance(x, jax.Array) and not x.is_fully_addressable

        return jax.tree.map(lambda x: fetch(x) if is_elsewhere(x) else x, tree)

    @property
    def spans_processes(self) -> bool:
        """Whether the steps are taken by several processes together."""
        return self.sharding is not None and self.sharding.spans_processes

    def spread_tables(self, params: Mapping[str, Any]) -> Mapping[str, Any]:
        """Parameters with those as ``SpreadTable`` whose rows are spread over devices."""
        sharding = self.sharding
        if sharding is None:
            return params

        def of_param(name: str, value: Any) -> Any:
            plates = self.stored[name].plates if name in self.stored else {}
            axes = tuple(TableAxis(a, p, sharding.axes.get(p)) for a, p in plates.items())
            if not any(axis.mesh_axis for axis in axes):
                return value
            return SpreadTable(value, sharding.mesh, axes)

        return {name: of_param(name, value) for name, value in params.items()}

    def without_padding(self, state: SubsampledSVIState) -> SubsampledSVIState:
        """A state whose tables have the rows of their plates alone."""
        if self.layout is None:
            return state
        cut: SubsampledSVIState = jax.tree.map(
            lambda x, of: of.without_padding(x), state, self.layout
        )
        return cut

    def placed(self, state: SubsampledSVIState) -> SubsampledSVIState:
        """A copy of a state with the rows of its plates alone, where its arrays are to be."""
        if self.layout is None:
            return jax.tree.map(jnp.array, state)
        return jax.tree.map(lambda x, of: of.place(x), state, self.layout)

    def pinned_batch(self, batch: tuple[Array, ...]) -> tuple[Array, ...]:
        """A batch that is drawn in a compiled step, with its rows where they are to be."""
        where = self.rows_on(0)
        if where is None:
            return batch
        return tuple(lax.with_sharding_constraint(array, where) for array in batch)

    def everywhere(self, arrays: Any) -> Any:
        """Arrays that each device needs whole, there."""
        sharding = self.sharding
        return arrays if sharding is None else jax.device_put(arrays, sharding.everywhere)

    def rows_on(self, axis: int) -> NamedSharding | None:
        """Where arrays are whose axis holds the rows of a batch; None if that is left to JAX."""
        if self.sharding is None:
            return None
        plates = {} if self.batch_plate is None else {axis: self.batch_plate}
        return self.sharding.spec(plates)

    def check_batch_size(self, size: int) -> None:
        """Refuse batches of which the devices cannot have equal parts."""
        if self.sharding is None or self.batch_plate is None:
            return
        parts = self.sharding.num_devices(self.batch_plate)
        if size % parts:
            raise ValueError(
                f"`batch_size` must be a multiple of {parts}, the number of devices on mesh axis "
                f"'{self.sharding.axes[self.batch_plate]}'; got {size}."
            )

    def check(self, state: Any) -> None:
        """Refuse what is not the state of this model and optimiser."""
        check_state(self._known_shapes(), state, self.optim)

    def _known_shapes(self) -> SubsampledSVIState:
        if self.shapes is None:
            raise RuntimeError(
                "SubsampledSVI learns the sites of model and guide in `init`: call it once before, "
                "`svi.init(rng_key, *args)` with arguments of the model, such as a minibatch, "
                "`batches.batch(0)`; or read a saved fit by `svi.load(folder, *args)`. To go on "
                "from a fit of fewer rows or classes, give its parameters, with rows for the new "
                "ones, as `init_params`, and no state."
            )
        return self.shapes

    def rows(self, touched: TouchedRows) -> Rows:
        """The rows that a step reads and writes of each parameter that it does not take whole."""
        rows = {name: param.rows(touched) for name, param in self.stored.items()}
        return {name: by_axis for name, by_axis in rows.items() if by_axis}

    def row_owners(self, rows: Rows) -> list[str | None]:
        """Whose rows each leaf of the optimiser's state holds; the optimiser is checked once.

        Raises:
            ValueError: If the optimiser mixes rows.
        """
        assert self.owners is not None
        optimised = [name for name in sorted(rows) if self.stored[name].rule is None]
        return self.owners(tuple((name, tuple(rows[name])) for name in optimised))

    def constrain(self, optimised: dict[str, Any]) -> dict[str, Any]:
        """Constrained values of parameters that the optimiser moves, stored whole."""
        constrained: dict[str, Any] = transform_fn(
            {name: self.stored[name].transform for name in optimised}, optimised
        )
        return constrained

    def params(self, state: SubsampledSVIState) -> dict[str, Any]:
        """Constrained values of all parameters, whole and wide: O(table)."""
        self._known_shapes()
        stored, computed = (self.optim.get_params(s) for s in (state.optim_state, self.computed))
        optimised = self.constrain(widen(stored, computed))
        return optimised | {name: local.value for name, local in state.local_state.items()}


def layout_of(plan: Plan) -> SubsampledSVIState:
    """Where each array of a state is to be: a leaf has the axes of the parameter that owns it."""
    assert plan.sharding is not None and plan.shapes is not None
    sharding = plan.sharding
    spread = {
        name: tuple(param.plates)
        for name, param in plan.stored.items()
        if param.rule is None and any(p in sharding.axes for p in param.plates.values())
    }

    def of_leaf(shape: Any, owner: str | None) -> LeafLayout:
        if owner is None:
            return LeafLayout(sharding.everywhere, {})
        param = plan.stored[owner]
        sizes = {axis: shape.shape[axis] - number for axis, number in param.padding.items()}
        return LeafLayout(sharding.spec(param.plates), sizes)

    shapes = plan.shapes
    leaves, tree = jax.tree.flatten(shapes.optim_state)
    owners = find_owners(plan.optim, plan.optim.get_params(plan.computed), spread)
    optim_state = jax.tree.unflatten(tree, map(of_leaf, leaves, owners))
    local_state = {
        name: jax.tree.map(lambda leaf, name=name: of_leaf(leaf, name), local)
        for name, local in shapes.local_state.items()
    }
    others = jax.tree.map(lambda leaf: of_leaf(leaf, None), shapes)
    return others._replace(optim_state=optim_state, local_state=local_state)


class RowOwners:
    """Whose rows each leaf of an optimiser's state holds; kept for each set of plates held in part.

    Args:
        optim: A NumPyro optimiser.
        optim_state: Shapes of its state.
    """

    def __init__(self, optim: Any, optim_state: Any) -> None:
        self._optim, self._optim_state = optim, optim_state
        self._known: dict[RowAxes, list[str | None]] = {}

    def __call__(self, axes: RowAxes) -> list[str | None]:
        """The parameter of each leaf, where these axes of parameters are rows of plates."""
        if axes not in self._known:
            params = self._optim.get_params(self._optim_state)
            owners = find_owners(self._optim, params, dict(axes))
            if params:  # a model may have variables of its observations alone, which have rules
                check_row_wise(self._optim, params, dict(axes))
            self._known[axes] = owners
        return self._known[axes]


def with_static(kwargs: Mapping[str, Any], static_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Join keyword arguments and those that an SVI object gives in each call; none may be in both.

    Raises:
        TypeError: With the names that are.
    """
    both = sorted(kwargs.keys() & static_kwargs.keys())
    if both:
        raise TypeError(
            f"got multiple values for the keyword arguments {both}: the SVI object passes its own "
            "to model and guide in each call. Leave them out in one place."
        )
    return {**kwargs, **static_kwargs}
