# SPDX-License-Identifier: Apache-2.0
"""What SVI must know of a parameter: its transform, and which of its axes are rows of plates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from numpyro.distributions import constraints
from numpyro.distributions.transforms import Transform, biject_to

from numpyro_largecat._checks import check_kind
from numpyro_largecat.choices.update_rules import UpdateRule
from numpyro_largecat.handlers.internals import helpful_support_errors
from numpyro_largecat.handlers.sites import of_type, param_options
from numpyro_largecat.handlers.touched_rows import PlateRows, TouchedRows
from numpyro_largecat.ops.table_rows import merge_values
from numpyro_largecat.svi.sharding import Sharding


class StoredParam(NamedTuple):
    """A parameter as the first run of model and guide shows it."""

    transform: Transform  # from unconstrained to constrained values
    plates: dict[int, str]  # axis, from the left, to the plate whose rows it holds
    rule: UpdateRule | None  # moves the parameter in place of the optimiser
    padding: Mapping[int, int] = {}  # rows past the last of a plate, of axes that have some

    def rows(self, touched: TouchedRows) -> dict[int, Array]:
        """Rows that this step reads and writes along each axis that is not taken whole."""
        plates = {axis: touched.plates[name] for axis, name in self.plates.items()}
        return {
            axis: _past_padding(plate, self.padding.get(axis, 0))
            for axis, plate in plates.items()
            if not plate.full or axis in self.padding
        }

    def spread(self, stored: Any, touched: TouchedRows) -> Any:
        """Repeat stored rows for the entries of their plates, where rows may repeat."""
        for axis, name in self.plates.items():
            position = touched.plates[name].position
            if position is not None:
                stored = jnp.take(stored, position, axis=axis)
        return stored

    def merge(self, entries: Array, touched: TouchedRows) -> Array:
        """Undo ``spread``, averaging the entries of one stored row."""
        for axis, name in self.plates.items():
            position = touched.plates[name].position
            if position is not None:
                entries = merge_values(entries, position, axis)
        return entries

    def value(self, stored: Any, touched: TouchedRows) -> Any:
        """Constrained value as the model sees it, from unconstrained stored rows."""
        return self.spread(self.transform(stored), touched)

    def check_size(self, name: str, shape: tuple[int, ...], touched: TouchedRows) -> None:
        """Refuse a stored parameter whose rows are not as many as those of its plates in this step.

        Raises:
            ValueError: With the parameter and its plate.
        """
        for axis, plate in self.plates.items():
            size, held = touched.plates[plate].size, shape[axis] - self.padding.get(axis, 0)
            if held != size:
                raise ValueError(
                    f"param '{name}' has shape {shape} in the state, with {held} rows at "
                    f"axis {axis}, but its plate '{plate}' has {size} in this step."
                )


def _past_padding(plate: PlateRows, padding: int) -> Array:
    """Rows of a plate; what stands for none is past the end of the table, not a row of padding."""
    if not padding:
        return plate.stored
    return jnp.where(plate.stored < plate.size, plate.stored, plate.size + padding)


def describe_param(
    site: dict[str, Any], touched: TouchedRows, sharding: Sharding | None
) -> StoredParam:
    """Read the message of a ``numpyro.param`` statement whose value is whole.

    Raises:
        ValueError: If a constraint acts across the rows of a plate.
        TypeError: If ``update_rule=`` is not one.
    """
    name = site["name"]
    constraint, event_dim, rule, *_ = param_options(site)
    with helpful_support_errors(site):
        transform = biject_to(constraint)
    plates: dict[int, str] = {}
    if event_dim is not None:
        shape = jnp.shape(site["value"])
        for frame in site["cond_indep_stack"]:
            axis = len(shape) + frame.dim - event_dim
            if axis >= 0 and shape[axis] != 1:
                plates[axis] = frame.name
        if plates and transform.codomain.event_dim > event_dim:
            raise ValueError(
                f"param '{name}' has constraint {constraint}, which acts on the last "
                f"{transform.codomain.event_dim} axes, but event_dim={event_dim}: it would mix "
                f"rows of plate '{next(iter(plates.values()))}'. Give it a larger event_dim."
            )
        if plates and any(jnp.ndim(leaf) for leaf in jax.tree.leaves(constraint)):
            raise ValueError(
                f"param '{name}' has constraint {constraint}, whose bounds are arrays that do not "
                f"follow the rows of plate '{next(iter(plates.values()))}'. Use scalar bounds."
            )
    if rule is not None:
        form = "an object with the methods `init` and `update`"
        check_kind(f"update_rule of param '{name}'", rule, UpdateRule, form)
    if rule is not None and constraint is not constraints.real:
        raise ValueError(
            f"param '{name}' has an update rule, so its constraint must be real; got {constraint}."
        )
    padding = {
        axis: number
        for axis, plate in plates.items()
        if sharding is not None and (number := sharding.padding(plate, touched.plates[plate].size))
    }
    return StoredParam(transform, dict(sorted(plates.items())), rule, padding)


def check_params(params: dict[str, Any], sites: dict[str, Any]) -> None:
    """Refuse ``params`` that lack a parameter, or a mutable value, of a model or guide."""
    missing = sorted(of_type("param", sites).keys() - params.keys())
    if missing:
        raise ValueError(
            f"`params` lacks the parameters {missing} of model and guide; it has {sorted(params)}. "
            "Pass `result.params`."
        )
    mutable = {n for n, site in of_type("mutable", sites).items() if jax.tree.leaves(site["value"])}
    if mutable - params.keys():
        raise ValueError(
            f"`params` lacks the values of mutable sites, {sorted(mutable - params.keys())}, which "
            "would start anew. Pass `{**result.params, **result.state.mutable_state}`, or read the "
            "fit by `lc.Fitted.from_svi(svi, result)`."
        )
