# SPDX-License-Identifier: Apache-2.0
"""One step of SVI on gathered rows: find the rows, move local parameters, evaluate the loss."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax, random
from numpyro.handlers import replay, seed, substitute, trace

from numpyro_largecat.infer.row_optimizer import Rows, gather_state
from numpyro_largecat.infer.touched_rows import TouchedRows, share_rows
from numpyro_largecat.ops.table_rows import gather_rows, merge_values, scatter_rows

if TYPE_CHECKING:
    from numpyro_largecat.infer.subsampled_svi import SubsampledSVI


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
    """Run the model, with latent values from the prior, to learn the rows of its plates.

    Returns:
        The rows, and the trace of the model.
    """
    touched = TouchedRows()
    tables = params | {name: local.value for name, local in svi_state.local_state.items()}

    def lookup(name: str) -> Any:
        site = svi._sites.get(name)
        if site is None:
            return None
        rows = site.rows(touched)
        return site.value(gather_rows(tables[name], rows) if rows else tables[name], touched)

    def run(fn: Any, key: Array) -> Any:
        fn = substitute(seed(fn, key), data=svi_state.mutable_state or {})
        fn = share_rows(fn, touched, gathered=svi._sites.__contains__, lookup=lookup)
        return trace(fn).get_trace(*args, **kwargs)

    model_key, guide_key = random.split(random.fold_in(step_key, 0))
    model_trace = run(svi.model, model_key)
    named = {name for site in svi._sites.values() for name in site.plates.values()}
    if not named <= touched.plates.keys():  # the guide has plates of its own
        run(svi.guide, guide_key)
    return touched, model_trace


class RowStep:
    """The gathered rows of one step, with local parameters moved, and its loss."""

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
        self.moved_local = self._move_local()

    def loss(self, params: Any) -> tuple[Array, Any]:
        """Negative ELBO, and new mutable state, at unconstrained rows of the parameters."""
        elbo = self.svi.loss
        values = self._values(params, self.moved_local)
        model, guide = self._shared(self.svi.model), self._shared(self.svi.guide)
        if not jax.tree.leaves(self.mutable_state):
            loss = elbo.loss(self.step_key, values, model, guide, *self.args, **self.kwargs)
            return loss, self.mutable_state
        values |= lax.stop_gradient(self.mutable_state)
        result = elbo.loss_with_mutable_state(
            self.step_key, values, model, guide, *self.args, **self.kwargs
        )
        return result["loss"], result["mutable_state"]

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

    def _shared(self, fn: Any) -> share_rows:
        return share_rows(fn, self.touched, gathered=self.svi._sites.__contains__)

    def _values(self, params: Any, local: dict[str, LocalState]) -> dict[str, Any]:
        """Constrained values of all parameters as model and guide see them."""
        stored = params | {name: state.value for name, state in local.items()}
        return {
            name: self.svi._sites[name].value(rows, self.touched) for name, rows in stored.items()
        }

    def _move_local(self) -> dict[str, LocalState]:
        """Apply the update rules, given the statistics of this step's guide samples.

        Several estimates for one row, from particles or from repeats of the row in the batch, each
        move it on their own, and the mean of the results is kept.
        """
        if not self.local_rows:
            return {}
        num_particles = getattr(self.svi.loss, "num_particles", 1)
        if num_particles == 1:
            statistics = jax.tree.map(lambda x: x[None], self._statistics(self.step_key))
        else:
            keys = random.split(self.step_key, num_particles)
            statistics = self.svi.loss.vectorize_particles_fn(self._statistics, keys)
        return {
            name: self._move(name, local, statistics[name]) if name in statistics else local
            for name, local in self.local_rows.items()
        }

    def _statistics(self, rng_key: Array) -> dict[str, Array]:
        """Statistics for the update rules at the guide sample that the loss will draw."""
        model_key, guide_key = random.split(rng_key)
        params = self.svi.optim.get_params(self.optim_rows)
        values = self._values(params, self.local_rows) | (self.mutable_state or {})
        guide = substitute(seed(self._shared(self.svi.guide), guide_key), data=values)
        guide_trace = trace(guide).get_trace(*self.args, **self.kwargs)
        model = replay(seed(self._shared(self.svi.model), model_key), guide_trace)
        sites = trace(substitute(model, data=values)).get_trace(*self.args, **self.kwargs)
        sites |= {name: s for name, s in guide_trace.items() if s["type"] == "param"}
        return {
            name: self._check_statistic(name, sites[name]["kwargs"].get("statistic"))
            for name in self.local_rows
            if name in sites
        }

    def _check_statistic(self, name: str, statistic: Array | None) -> Array:
        shape = self._spread(name, self.local_rows[name].value).shape
        if statistic is None or jnp.shape(statistic) != shape:
            got = "none" if statistic is None else f"shape {jnp.shape(statistic)}"
            raise ValueError(
                f"param '{name}' has an update rule and must give it a `statistic=` of shape "
                f"{shape}, one entry for each row of the batch; got {got}."
            )
        return jnp.asarray(statistic)

    def _move(self, name: str, local: LocalState, statistics: Array) -> LocalState:
        site = self.svi._sites[name]
        assert site.rule is not None
        value, state = jax.tree.map(lambda x: self._spread(name, x), local)
        values, states = jax.vmap(site.rule.update, in_axes=(None, None, 0))(
            value, state, statistics
        )
        new = LocalState(values.mean(axis=0), jax.tree.map(lambda x: x.max(axis=0), states))
        return jax.tree.map(lambda x, old: self._merge(name, x, old), new, local)

    def _spread(self, name: str, stored: Array) -> Array:
        return self.svi._sites[name].spread(stored, self.touched)

    def _merge(self, name: str, entries: Array, old: Array) -> Array:
        """Undo ``_spread``, averaging entries of one stored row."""
        for axis, plate in self.svi._sites[name].plates.items():
            position = self.touched.plates[plate].position
            if position is not None:
                entries = merge_values(entries, position, axis)
        return entries.astype(old.dtype)
