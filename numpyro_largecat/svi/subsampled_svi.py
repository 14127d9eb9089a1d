# SPDX-License-Identifier: Apache-2.0
"""Stochastic variational inference whose step touches only the rows it needs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, random
from numpyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO
from numpyro.infer.elbo import ELBO
from numpyro.infer.svi import SVIRunResult
from numpyro.infer.util import transform_fn
from numpyro.optim import _NumPyroOptim

from numpyro_largecat.handlers.closed_over_arrays import compiled
from numpyro_largecat.handlers.guide_tables import release_initial_values, renew_initial_values
from numpyro_largecat.handlers.run_model import as_drawn, sites_of
from numpyro_largecat.handlers.sites import of_type
from numpyro_largecat.handlers.static_arguments import split_arguments
from numpyro_largecat.handlers.touched_rows import TouchedRows
from numpyro_largecat.svi.joint_guides import refuse_joint_guides
from numpyro_largecat.svi.loop import Fit
from numpyro_largecat.svi.model_checks import (
    check_arguments,
    check_columns,
    check_labels,
    labels_as_columns,
    observed_labels,
    warn_of_discrete_sites,
)
from numpyro_largecat.svi.param_sites import ParamSite, describe_param
from numpyro_largecat.svi.recorded_entries import Watched, watch_entries
from numpyro_largecat.svi.row_optimizer import (
    check_row_wise,
    find_owners,
    scatter_state,
)
from numpyro_largecat.svi.state_checks import check_plates, check_state, shapes_of
from numpyro_largecat.svi.step import (
    LocalState,
    RowStep,
    SubsampledSVIState,
    find_rows,
)


class SubsampledSVI(SVI):
    r"""SVI whose cost per step follows the rows that the step touches, not the size of its plates.

    A drop-in for ``numpyro.infer.SVI``: same constructor, ``init``, ``update``, ``stable_update``,
    ``evaluate``, ``run`` and ``get_params``, for any model with subsampled plates and any guide.
    Parameters inside a subsampled plate (those of ``AutoNormal`` and ``AutoDelta``, or any
    ``numpyro.param(..., event_dim=...)``) are stored whole, and so is their optimiser state; a
    step gathers the touched rows, differentiates the ELBO in these rows alone, runs the optimiser
    on them and writes them back. Parameters outside such plates are updated as usual by the same
    optimiser. With every plate full the steps are those of ``numpyro.infer.SVI``.

    All plates of one name share their rows, in model and guide and over particles, so
    ``AutoNormal(model)`` needs no ``create_plates``. Rows of a plain ``numpyro.plate`` that
    subsamples are drawn in O(rows), not O(size).

    **Optimisers are lazy.** Rows that a step does not touch keep their values and moments; in
    particular momentum and weight decay act on a row only when it is touched. Optimisers that mix
    rows are refused.

    **Local parameters.** A ``numpyro.param`` with ``update_rule=`` and ``statistic=``, as
    ``sample_choice`` declares it, is moved by its rule before the gradient is taken, for the rows
    of the minibatch only.

    **Autoguides** give up their tables of initial values, which are as large as the parameters: for
    another inference make a new guide.

    Cost: O(touched rows) time per step and no copy of any table, *if the state is donated*: ``run``
    does it; in a loop of your own write ``step = jax.jit(svi.update, donate_argnums=0)``, and do
    not use a state again after it was passed. Undonated, XLA copies every table in every step.
    ``init`` and ``get_params`` cost O(table).

    Args:
        model: NumPyro model.
        guide: NumPyro guide, automatic or hand-written.
        optim: Elementwise optimiser from optax or ``numpyro.optim``.
        loss: ELBO with one guide sample per particle, such as ``Trace_ELBO()`` or
            ``TraceMeanField_ELBO()``.
        **static_kwargs: Passed to model and guide in each call.

    Raises:
        ValueError: At ``init`` or the first step, if data is not finite, a label is out of range,
            or the optimiser or a constraint mixes rows of a subsampled plate.
        NotImplementedError: If the optimiser is no gradient method (``Minimize``) or the loss draws
            several samples in one guide call; at ``init``, if a parameter has an update rule and
            the loss is neither ``Trace_ELBO`` nor ``TraceMeanField_ELBO``, or if an automatic guide
            draws all rows of a subsampled plate together, as ``AutoMultivariateNormal`` does.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist, optax
        >>> from numpyro.infer import TraceMeanField_ELBO
        >>> from numpyro.infer.autoguide import AutoNormal
        >>> import numpyro_largecat as lc
        >>> def model(x, y=None, rows=None):
        ...     with lc.class_plate("classes", 1000, labels=y, num_sampled=20) as classes:
        ...         w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
        ...     with lc.data_plate("data", 300, rows) as rows:
        ...         lc.sample_choice("y", x @ w.T, classes=classes, rows=rows, obs=y)
        >>> x = jax.random.normal(jax.random.key(0), (300, 2))
        >>> y = (jnp.abs(x[:, 0]) * 100).astype(int)
        >>> svi = lc.SubsampledSVI(model, AutoNormal(model), optax.adagrad(0.1),
        ...                        TraceMeanField_ELBO())
        >>> batches = lc.ArrayBatches(x, y, batch_size=50)
        >>> result = svi.run(jax.random.key(1), 20, batches=batches, progress_bar=False)
        >>> result.params["w_auto_loc"].shape
        (1000, 2)
    """

    def __init__(
        self,
        model: Callable[..., Any],
        guide: Callable[..., Any],
        optim: Any,
        loss: ELBO,
        **static_kwargs: Any,
    ) -> None:
        if getattr(loss, "multi_sample_guide", False):
            raise NotImplementedError(
                "SubsampledSVI needs a loss with one guide sample per particle; got "
                "multi_sample_guide=True. Use `num_particles=` instead."
            )
        super().__init__(model, guide, optim, loss, **static_kwargs)
        if type(self.optim).eval_and_update is not _NumPyroOptim.eval_and_update:
            raise NotImplementedError(
                f"SubsampledSVI takes gradient steps, but {type(self.optim).__name__} evaluates "
                "the loss on its own; use numpyro.infer.SVI with it."
            )
        self._sites: dict[str, ParamSite] = {}
        self._owners: dict[Any, list[str | None]] = {}
        self._shapes: SubsampledSVIState | None = None
        self._watched: Watched = {}
        self._fit = Fit(self)

    def init(
        self, rng_key: Array, *args: Any, init_params: dict[str, Any] | None = None, **kwargs: Any
    ) -> SubsampledSVIState:
        """Make the initial state from one batch of arguments; call it outside ``jit``.

        Args:
            rng_key: A JAX random key.
            *args: Arguments of model and guide.
            init_params: Initial values of parameters, by name, in place of their own.
            **kwargs: Keyword arguments of model and guide.

        Returns:
            The initial state. Its arrays are its own, so it may be donated.

        Raises:
            ValueError: If the arguments hold NaN or infinities, or labels out of range.
        """
        check_arguments(self.model, args, kwargs)
        kwargs = {**kwargs, **self.static_kwargs}
        renew_initial_values(self.guide)
        rng_key, model_key, guide_key = random.split(rng_key, 3)
        values, mutable_state, touched = self._first_run(
            model_key, guide_key, init_params, args, kwargs
        )
        self._check_loss()
        release_initial_values(self.guide, self._sites)
        optimised, local_state = {}, {}
        for name, site in self._sites.items():
            value = _unconstrain(site, values.pop(name))
            if site.rule is not None:
                local_state[name] = LocalState(value, site.rule.init(value))
            else:
                optimised[name] = value
        self._watched = watch_entries(self._sites, optimised, touched)
        optim_state = _without_aliases(self.optim.init(optimised))
        self.constrain_fn = partial(
            transform_fn, {name: self._sites[name].transform for name in optimised}
        )
        self._owners = {}
        state = SubsampledSVIState(optim_state, mutable_state, rng_key, local_state)
        self._shapes = shapes_of(state)
        return state

    def _check_loss(self) -> None:
        """Refuse a loss that hides from us what its particles do to local parameters."""
        local = [name for name, site in self._sites.items() if site.rule is not None]
        if local and not isinstance(self.loss, (Trace_ELBO, TraceMeanField_ELBO)):
            raise NotImplementedError(
                f"the update rule of param '{local[0]}' cannot run under "
                f"{type(self.loss).__name__}: it needs a loss that is the mean over particles, "
                "Trace_ELBO or TraceMeanField_ELBO."
            )

    def _first_run(
        self,
        model_key: Array,
        guide_key: Array,
        init_params: dict[str, Any] | None,
        args: Any,
        kwargs: Any,
    ) -> tuple[dict[str, Any], dict[str, Any] | None, TouchedRows]:
        """Run model and guide once, learn their sites, and return the initial values and rows."""
        given = init_params or {}
        params: dict[str, Any] = {}
        arrays, static = split_arguments((args, kwargs))

        def run_model(model_key: Array, arrays: list[Any], given: dict[str, Any]) -> Any:
            args, kwargs = static.restore(arrays)
            touched = TouchedRows()
            sites = sites_of(
                self.model, args, kwargs, rng_key=model_key, params=given, touched=touched
            )
            warn_of_discrete_sites(sites, self.loss)
            found = of_type("param", sites)
            params.update({name: describe_param(site, touched) for name, site in found.items()})
            values = {name: site["value"] for name, site in found.items()}
            mutable = {name: site["value"] for name, site in of_type("mutable", sites).items()}
            return touched, values, mutable, observed_labels(sites), labels_as_columns(sites)

        run = compiled(run_model)
        touched, values, mutable, labels, columns = run(model_key, arrays, given)
        check_labels(labels)
        check_columns(columns)
        refuse_joint_guides(self.guide, touched, args, kwargs)
        sites = sites_of(
            self.guide,
            args,
            kwargs,
            rng_key=guide_key,
            params=given,
            touched=touched,
            around=as_drawn,  # autoguides keep what they see
        )
        found = of_type("param", sites)
        self._sites = params | {n: describe_param(site, touched) for n, site in found.items()}
        values |= {name: site["value"] for name, site in found.items()}
        mutable |= {name: site["value"] for name, site in of_type("mutable", sites).items()}
        return values | given, mutable or None, touched

    def get_params(self, svi_state: SubsampledSVIState) -> dict[str, Any]:
        """Constrained values of all parameters, stored whole.

        Parameters without a constraint are the arrays of the state itself, and so are gone when the
        state is donated: copy what must outlive it.

        Cost: O(table) time and memory.
        """
        params: dict[str, Any] = super().get_params(svi_state)
        return params | {name: local.value for name, local in svi_state.local_state.items()}

    def update(
        self,
        svi_state: SubsampledSVIState,
        *args: Any,
        forward_mode_differentiation: bool = False,
        **kwargs: Any,
    ) -> tuple[SubsampledSVIState, Array]:
        """Take one step; donate ``svi_state`` under ``jit`` to keep its cost flat.

        Args:
            svi_state: State to move.
            *args: Arguments of model and guide, such as a minibatch.
            forward_mode_differentiation: Differentiate in forward mode.
            **kwargs: Keyword arguments of model and guide.

        Returns:
            The new state and the loss, the negative ELBO, at the old one.

        Cost: O(touched rows).
        """
        return self._guarded_update(
            svi_state, args, kwargs, forward_mode_differentiation, finite_params=False
        )

    def stable_update(
        self,
        svi_state: SubsampledSVIState,
        *args: Any,
        forward_mode_differentiation: bool = False,
        **kwargs: Any,
    ) -> tuple[SubsampledSVIState, Array]:
        """Like ``update``, but keep the old parameters if loss or gradients are not finite.

        The loss returned for such a step is NaN.

        Cost: O(touched rows).
        """
        return self._guarded_update(
            svi_state, args, kwargs, forward_mode_differentiation, finite_gradients=True
        )

    def evaluate(self, svi_state: SubsampledSVIState, *args: Any, **kwargs: Any) -> Array:
        """Loss that ``update`` would report for this state and these arguments.

        Cost: O(touched rows).
        """
        step = self._gather(svi_state, args, kwargs)
        loss, _ = step.loss(self.optim.get_params(step.optim_rows))
        return loss

    def run(
        self,
        rng_key: Array,
        num_steps: int,
        *args: Any,
        batches: Any = None,
        progress_bar: bool = True,
        stable_update: bool = False,
        forward_mode_differentiation: bool = False,
        init_state: SubsampledSVIState | None = None,
        init_params: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> SVIRunResult:
        """Fit for ``num_steps`` steps in compiled loops that reuse the memory of the tables.

        The labels and float data of ``batches`` are checked, all of them, before the first step,
        and so is whether the likelihood is scaled from a minibatch to all its rows. A step whose
        loss or new parameters are not finite is not taken: the fit ends there with a RuntimeWarning
        that names the step, and the result holds the last good state (with ``stable_update`` such
        steps are skipped instead, and counted in a warning at the end; bad data that ``batches``
        holds is then no error but a warning).

        **Nothing is lost.** Whatever is raised after ``init``, by the model, by the iterator or as
        ``KeyboardInterrupt`` (Ctrl-C), has the fit up to then as its attribute ``result_so_far``:
        keep its ``params``, or go on with ``init_state=error.result_so_far.state``.

        Args:
            rng_key: A JAX random key.
            num_steps: Number of steps, at least 1.
            *args: Arguments of model and guide, the same in each step.
            batches: Minibatches whose arrays come after ``args``: ``ArrayBatches``, drawn inside
                the compiled loop, or any iterator of tuples of arrays, such as a stream from disk.
            progress_bar: Show steps, speed and a smoothed ELBO.
            stable_update: Skip steps that are not finite, and batches with bad data, and go on.
            forward_mode_differentiation: Differentiate in forward mode.
            init_state: State to go on from, as an earlier result holds it; it is copied.
            init_params: Initial values of parameters, by name.
            **kwargs: Keyword arguments of model and guide, the same in each step.

        Returns:
            NumPyro's ``SVIRunResult``: ``params``, ``state`` and ``losses``, one loss for each step
            taken (and NaN for the step at which a fit ended). Its attribute ``iterates`` holds up
            to 1000 earlier values of a few entries of each parameter, for ``diagnose``.

        Raises:
            ValueError: If ``num_steps`` is less than 1, if data or labels are refused, if what a
                model with minibatches observes is in no data plate with their ``rows``, or if
                ``init_state`` is the state of another model or optimiser.

        Cost: O(touched rows) per step; O(table) once at the start and once at the end.
        """
        return self._fit.run(
            rng_key,
            num_steps,
            args,
            kwargs,
            batches=batches,
            progress_bar=progress_bar,
            skip_bad_steps=stable_update,
            forward_mode=forward_mode_differentiation,
            init_state=init_state,
            init_params=init_params,
        )

    def _guarded_update(
        self,
        svi_state: SubsampledSVIState,
        args: Any,
        kwargs: Any,
        forward_mode: bool,
        *,
        finite_gradients: bool = False,
        finite_params: bool = True,
    ) -> tuple[SubsampledSVIState, Array]:
        """Take a step unless what must be finite is not; then keep all values, with loss NaN."""
        step = self._gather(svi_state, args, kwargs)
        params = self.optim.get_params(step.optim_rows)
        (loss, moved), grads = _value_and_grad(step.loss, params, forward_mode)
        optim_rows = self.optim.update(grads, step.optim_rows, value=loss)
        new = (optim_rows, *moved)
        if finite_gradients or finite_params:
            ok = jnp.isfinite(loss)
            ok &= _all_finite(grads) if finite_gradients else True
            ok &= _all_finite(self.optim.get_params(optim_rows)) if finite_params else True
            old = (step.optim_rows, svi_state.mutable_state, step.local_rows)
            new = jax.tree.map(partial(jnp.where, ok), new, old)
            loss = jnp.where(ok, loss, jnp.nan)
        optim_state = scatter_state(svi_state.optim_state, new[0], step.owners, step.rows)
        local_state = step.scatter_local(svi_state.local_state, new[2])
        return SubsampledSVIState(optim_state, new[1], step.next_key, local_state), loss

    def _gather(self, svi_state: SubsampledSVIState, args: Any, kwargs: Any) -> RowStep:
        """Find the rows that a step touches, and gather them."""
        self._check_state(svi_state)
        kwargs = {**kwargs, **self.static_kwargs}
        next_key, step_key = random.split(svi_state.rng_key)
        params = self.optim.get_params(svi_state.optim_state)
        touched, _ = find_rows(self, svi_state, params, step_key, args, kwargs)
        local = {name: local.value for name, local in svi_state.local_state.items()}
        check_plates(self._sites, params | local, touched)
        rows = {name: site.rows(touched) for name, site in self._sites.items()}
        rows = {name: by_axis for name, by_axis in rows.items() if by_axis}
        owners = self._row_owners(params, rows)
        return RowStep(self, touched, rows, owners, next_key, step_key, svi_state, args, kwargs)

    def _check_state(self, svi_state: Any) -> None:
        """Refuse what is not the state of this model and optimiser."""
        if self._shapes is None:
            raise RuntimeError(
                "SubsampledSVI learns the sites of model and guide in `init`: call it once before "
                "`update`, `evaluate` or `run(init_state=...)`, with arguments like theirs."
            )
        check_state(self._shapes, svi_state, self.optim)

    def _row_owners(self, params: Any, rows: Any) -> list[str | None]:
        """Whose rows each leaf of the optimiser's state holds; the optimiser is checked once."""
        axes = {name: tuple(rows[name]) for name in sorted(rows) if name in params}
        key = tuple(axes.items())
        if key not in self._owners:
            owners = find_owners(self.optim, params, axes)
            with jax.ensure_compile_time_eval():  # also when a step is being traced
                check_row_wise(self.optim, params, axes)
            self._owners[key] = owners
        return self._owners[key]


def _all_finite(tree: Any) -> Array:
    return jnp.stack([jnp.isfinite(x).all() for x in jax.tree.leaves(tree)] or [True]).all()


def _value_and_grad(
    fn: Callable[[Any], tuple[Array, Any]], params: Any, forward_mode: bool
) -> tuple[tuple[Array, Any], Any]:
    if not forward_mode:
        return jax.value_and_grad(fn, has_aux=True)(params)

    def with_value(params: Any) -> tuple[Array, tuple[Array, Any]]:
        loss, aux = fn(params)
        return loss, (loss, aux)

    grads, value = jax.jacfwd(with_value, has_aux=True)(params)
    return value, grads


def _unconstrain(site: ParamSite, value: Any) -> Any:
    """Unconstrained copy of ``value`` with strong types, in memory of its own."""

    def inverse(value: Any) -> Any:
        value = site.transform.inv(value)
        return jax.tree.map(lambda x: jnp.array(x, jnp.result_type(x), copy=True), value)

    value = jax.tree.map(lambda x: jnp.asarray(x, jnp.result_type(x)), value)
    return jax.jit(inverse)(value)


def _without_aliases(state: Any) -> Any:
    """Copy leaves that share memory with an earlier one, since a buffer can be donated once."""
    seen: set[int] = set()

    def own(leaf: Any) -> Any:
        leaf = jnp.asarray(leaf)
        if isinstance(leaf, jax.core.Tracer) or not leaf.is_fully_addressable:
            return leaf
        pointers = {shard.data.unsafe_buffer_pointer() for shard in leaf.addressable_shards}
        if pointers & seen:
            return jnp.copy(leaf)
        seen.update(pointers)
        return leaf

    return jax.tree.map(own, state)
