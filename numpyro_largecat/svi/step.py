# SPDX-License-Identifier: Apache-2.0
"""One step of SVI on gathered rows: find the rows, move local parameters, evaluate the loss."""

from __future__ import annotations

from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax, random
from numpyro.handlers import replay

from numpyro_largecat.handlers.entries import take_entries
from numpyro_largecat.handlers.run_model import at_centre, sites_of
from numpyro_largecat.handlers.shared_rows import share_rows
from numpyro_largecat.handlers.sites import Sites, param_options
from numpyro_largecat.handlers.touched_rows import TouchedRows
from numpyro_largecat.ops.table_rows import gather_rows, scatter_rows
from numpyro_largecat.svi.row_optimizer import Rows, gather_state

if TYPE_CHECKING:
    from numpyro_largecat.svi.subsampled_svi import SubsampledSVI


ROW_STREAM = 0x726F7773  # keeps the keys of plates apart from those that `split` makes


class LocalState(NamedTuple):
    """A parameter that an update rule moves, and what the rule remembers of it."""

    value: Array  # one row for each row of its plate
    rule_state: Any  # pytree of arrays of the same shape


class SubsampledSVIState(NamedTuple):
    """State of ``SubsampledSVI``: the fields of NumPyro's ``SVIState``, then local parameters."""

    optim_state: Any  # optimiser's state; holds the unconstrained parameters, stored whole
    mutable_state: Any  # values of `numpyro.mutable` sites, or None
    rng_key: Array  # key of the next step
    local_state: dict[str, LocalState]  # parameters with an `update_rule`, by name


def find_rows(
    svi: SubsampledSVI,
    svi_state: SubsampledSVIState,
    params: Any,
    step_key: Array,
    args: Any,
    kwargs: Any,
) -> tuple[TouchedRows, Any]:
    """Run the model, at any feasible latent values, to learn the rows of its plates.

    Returns:
        The rows, and the trace of the model.
    """
    touched = TouchedRows()
    tables = params | {name: local.value for name, local in svi_state.local_state.items()}

    def lookup(msg: dict[str, Any]) -> Any:
        name = msg["name"]
        site = svi._sites.get(name)
        if site is None:
            return None
        rows = site.rows(touched)
        return site.value(gather_rows(tables[name], rows) if rows else tables[name], touched)

    def run(fn: Any, key: Array) -> Any:
        fn = share_rows(fn, touched, gathered=svi._sites.__contains__, lookup=lookup)
        return sites_of(fn, args, kwargs, rng_key=key, params=svi_state.mutable_state)

    model_key, guide_key = random.split(random.fold_in(step_key, ROW_STREAM))
    model_trace = run(svi.model, model_key)
    named = {name for site in svi._sites.values() for name in site.plates.values()}
    if not named <= touched.plates.keys():  # the guide has plates of its own
        run(svi.guide, guide_key)
    return touched, model_trace


class RowStep:
    """The gathered rows of one step, and the loss as a function of them."""

    def __init__(
        self,
        svi: SubsampledSVI,
        touched: TouchedRows,
        rows: Rows,
        owners: list[str | None],
        next_key: Array,
        step_key: Array,
        svi_state: SubsampledSVIState,
        args: Any,
        kwargs: Any,
    ) -> None:
        self.svi = svi
        self.touched = touched
        self.rows = rows
        self.owners = owners
        self.next_key = next_key
        self.step_key = step_key
        self.mutable_state = svi_state.mutable_state
        self.args = args
        self.kwargs = kwargs
        self.optim_rows = gather_state(svi_state.optim_state, owners, rows)
        self.local_rows = {
            name: jax.tree.map(lambda table, name=name: self._gather(name, table), local)
            for name, local in svi_state.local_state.items()
        }
        self.at_centre = self._followed_at_centre() if self.local_rows else {}

    def loss(self, params: Any) -> tuple[Array, tuple[Any, dict[str, LocalState]]]:
        """Negative ELBO at unconstrained rows of the parameters.

        Local parameters are moved by their rules on the way, before the likelihood uses them. Each
        particle moves them on its own, and the mean of the results is kept.

        Returns:
            The loss; and the new mutable state and the moved rows of the local parameters.
        """
        sites = self.svi._sites
        values = {name: sites[name].value(rows, self.touched) for name, rows in params.items()}
        elbo = self.svi.loss
        if not self.local_rows or elbo.num_particles == 1:
            return self._particle(elbo, self.step_key, values)
        single = copy(elbo)
        single.num_particles = 1
        keys = random.split(self.step_key, elbo.num_particles)
        losses, (mutable_state, moved) = elbo.vectorize_particles_fn(
            lambda key: self._particle(single, key, values), keys
        )
        moved = jax.tree.map(lambda x, old: _mean(x).astype(old.dtype), moved, self.local_rows)
        return losses.mean(), (jax.tree.map(lambda x: x[0], mutable_state), moved)

    def _particle(
        self, elbo: Any, rng_key: Array, values: dict[str, Any]
    ) -> tuple[Array, tuple[Any, dict[str, LocalState]]]:
        moved = dict(self.local_rows)

        def shared(fn: Any) -> share_rows:
            lookup = partial(self._move_local, moved)
            return share_rows(
                fn, self.touched, gathered=self.svi._sites.__contains__, lookup=lookup
            )

        model, guide = shared(self.svi.model), shared(self.svi.guide)
        if not jax.tree.leaves(self.mutable_state):
            loss = elbo.loss(rng_key, values, model, guide, *self.args, **self.kwargs)
            return loss, (self.mutable_state, moved)
        values = values | lax.stop_gradient(self.mutable_state)
        result = elbo.loss_with_mutable_state(
            rng_key, values, model, guide, *self.args, **self.kwargs
        )
        return result["loss"], (result["mutable_state"], moved)

    def _move_local(self, moved: dict[str, LocalState], msg: dict[str, Any]) -> Array | None:
        """Value of a local parameter for its ``numpyro.param`` statement, moved by its rule."""
        name = msg["name"]
        if name not in self.local_rows:
            return None
        site = self.svi._sites[name]
        assert site.rule is not None
        value, state = jax.tree.map(lambda x: self._spread(name, x), self.local_rows[name])
        _, _, _, statistic, follow = param_options(msg)
        if not callable(statistic):
            raise TypeError(
                f"param '{name}' has an update rule and must give it a `statistic=`, a function of "
                f"the parameter and of its shift in this step; got {statistic!r}."
            )
        shift = jnp.zeros_like(value)
        if name in self.at_centre:
            # Constant for the gradient: the centre moves with the draw, so that only the distance
            # counts, and a parameter that lags must not push the latent values through it.
            drawn = jnp.take_along_axis(
                lax.stop_gradient(follow.values), follow.entry[..., None], axis=-1
            )
            shift = follow.shift(value, drawn[..., 0] - self.at_centre[name])
        new = LocalState(*site.rule.update(value, state, lambda value: statistic(value, shift)))
        new = lax.stop_gradient(new)
        moved[name] = jax.tree.map(lambda x: site.merge(x, self.touched), new)
        return new.value + shift

    def _followed_at_centre(self) -> dict[str, Array]:
        """What local parameters follow, at the centre of the guide; nothing if it has none."""
        params = self.svi.optim.get_params(self.optim_rows)
        values = {n: self.svi._sites[n].value(rows, self.touched) for n, rows in params.items()}
        values |= {n: self._spread(n, local.value) for n, local in self.local_rows.items()}
        values |= self.mutable_state or {}

        def run(fn: Any, around: Any) -> Sites:
            fn = share_rows(fn, self.touched, gathered=self.svi._sites.__contains__)
            run_with: dict[str, Any] = {
                "rng_key": self.step_key,
                "params": values,
                "around": around,
            }
            return sites_of(fn, self.args, self.kwargs, **run_with)

        try:
            guide_sites = run(self.svi.guide, at_centre)
        except NotImplementedError:
            return {}

        def followed() -> dict[str, tuple[Array, Array]]:
            sites = run(self.svi.model, partial(replay, trace=guide_sites))
            found = {name: param_options(sites[name]).follow for name in self.local_rows}
            return {name: (f.values, f.entry) for name, f in found.items() if f is not None}

        return take_entries(followed)

    def _spread(self, name: str, stored: Array) -> Array:
        return self.svi._sites[name].spread(stored, self.touched)

    def scatter_local(
        self, local_state: dict[str, LocalState], moved: dict[str, LocalState]
    ) -> dict[str, LocalState]:
        """Write moved rows back into the tables of the local parameters."""

        def write(name: str, table: Array, new: Array) -> Array:
            return scatter_rows(table, self.rows[name], new) if name in self.rows else new

        return {
            name: jax.tree.map(lambda t, new, name=name: write(name, t, new), local, moved[name])
            for name, local in local_state.items()
        }

    def _gather(self, name: str, table: Array) -> Array:
        return gather_rows(table, self.rows[name]) if name in self.rows else table


def _mean(values: Array) -> Array:
    """Mean over particles; the largest of integers, such as counts of visits."""
    is_integer = jnp.issubdtype(values.dtype, jnp.integer)
    return values.max(axis=0) if is_integer else values.mean(axis=0)
