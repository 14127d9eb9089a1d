# SPDX-License-Identifier: Apache-2.0
"""Stochastic variational inference whose step touches only the rows it needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from os import PathLike
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh
from numpyro.infer import SVI
from numpyro.infer.elbo import ELBO

from numpyro_largecat._checks import check_kind, check_random_key, describe
from numpyro_largecat._result_so_far import attach_result
from numpyro_largecat.data.checkpoints import Checkpoints
from numpyro_largecat.data.parts_of_fits import fit_folder
from numpyro_largecat.handlers.internals import takes_gradient_steps
from numpyro_largecat.svi.callback_calls import CallbackCalls
from numpyro_largecat.svi.callbacks import Callback
from numpyro_largecat.svi.compiled_steps import RunOptions
from numpyro_largecat.svi.first_run import first_run
from numpyro_largecat.svi.held_out import HeldOut, Scores
from numpyro_largecat.svi.loop import run_loop
from numpyro_largecat.svi.narrow_tables import check_table_dtype
from numpyro_largecat.svi.plan import Plan
from numpyro_largecat.svi.processes import in_all
from numpyro_largecat.svi.run_data import RunData
from numpyro_largecat.svi.run_result import SubsampledSVIRunResult
from numpyro_largecat.svi.run_so_far import RunSoFar
from numpyro_largecat.svi.saved_run import KIND, SavedRun, read_run, write_run
from numpyro_largecat.svi.sharding import Sharding
from numpyro_largecat.svi.state import SubsampledSVIState
from numpyro_largecat.svi.step import gather_step, take_step


class SubsampledSVI(SVI):
    r"""SVI whose cost per step follows the rows that the step touches, not the size of its plates.

    A drop-in for ``numpyro.infer.SVI``: same constructor, ``init``, ``update``, ``stable_update``,
    ``evaluate``, ``run`` and ``get_params``, for any model with subsampled plates and any guide.
    Parameters inside a subsampled plate (those of ``AutoNormal`` and ``AutoDelta``, or any
    ``numpyro.param(..., event_dim=...)``) are stored whole, and so is their optimiser state; a
    step gathers the touched rows, differentiates the ELBO in these rows alone, runs the optimiser
    on them and writes them back. Parameters outside such plates are updated as usual by the same
    optimiser. With every plate full the steps are those of ``numpyro.infer.SVI``, but for the bits
    of their noise: a step takes both words of each block of Threefry, as all of JAX does with
    ``jax.threefry_partitionable(False)``, under which the noise is the same too.

    All plates of one name share their rows, in model and guide and over particles, so
    ``AutoNormal(model)`` needs no ``create_plates``. Rows of a plain ``numpyro.plate`` that
    subsamples are drawn in O(rows), not O(size).

    **Optimisers are lazy.** Rows that a step does not touch keep their values and moments; in
    particular momentum and weight decay act on a row only when it is touched. Optimisers that mix
    rows are refused.

    **Local parameters.** A ``numpyro.param`` with ``update_rule=`` and ``statistic=``, as
    ``sample_choice`` declares it, is moved by its rule before the gradient is taken, for the rows
    of the minibatch only.

    **Tables in half the memory.** With ``table_dtype=jnp.bfloat16`` the tables of plates of which a
    step holds some rows, parameters and optimiser's state alike, are stored in bfloat16, as 16-bit
    integers. Steps compute in the type that they were made in, and round rows up or down at random
    as they write them, so that steps too small for 8 bits of precision are not lost on average. The
    start values are made in float32, and so are the copies that ``get_params`` and
    ``result.params`` are. Parameters with an update rule, and those outside of such plates, are
    stored as they are.

    **Tables over several devices.** With ``mesh`` and ``sharding`` the rows of these plates are
    spread over the devices of an axis of the mesh: each holds its part of the parameters, of the
    optimiser's state and of what is kept per row, from the first moment on, and computes with its
    part of a minibatch from ``ArrayBatches`` or ``StreamedBatches``. Devices send each other the
    rows that a step touches, and nothing that grows with a plate of which it holds some. The fit is
    that of one device up to rounding. Where the rows of a plate are not a multiple of the number of
    devices, tables in the state and in ``params`` have rows past its last, which mean nothing.

    **Autoguides** belong to the SVI object. Each ``init`` sets them up anew, from its own key and
    arguments, and frees their start values of tables of which a step holds some rows, as
    large as the parameters, once the state holds them. For another inference make a new guide.

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
        table_dtype: ``jnp.bfloat16`` to store tables in half the memory of float32. None stores
            them in the type that they are made in.
        mesh: Devices, a ``jax.make_mesh(sizes, names)``; with ``sharding``.
        sharding: For plates of the model by name, the axis of ``mesh`` over which their rows are
            spread, such as ``{"classes": "model", "data": "batch"}``. None leaves all to JAX.
        **static_kwargs: Passed to model and guide in each call.

    Attributes:
        plan: What the last ``init`` has learned. Nothing changes it: each ``init`` makes another.

    Raises:
        ValueError: If ``sharding`` names no axis of ``mesh``, or no plate (at ``init``); at
            ``init``, if data is not finite, a label is out of range, the optimiser or
            a constraint mixes rows of a subsampled plate, or the utility of a class follows the
            other classes that a step draws.
        NotImplementedError: If the optimiser is no gradient method (``Minimize``) or the loss draws
            several samples in one guide call; at ``init``, if a parameter has an update rule and
            the loss is neither ``Trace_ELBO`` nor ``TraceMeanField_ELBO``, if the loss is
            ``TraceEnum_ELBO`` and the model has a plate of ours, or if an automatic guide draws all
            rows of a subsampled plate together, as ``AutoMultivariateNormal`` does.

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
        *,
        table_dtype: Any = None,
        mesh: Mesh | None = None,
        sharding: Mapping[str, str] | None = None,
        **static_kwargs: Any,
    ) -> None:
        for name, fn in (("model", model), ("guide", guide)):
            if not callable(fn):
                raise TypeError(f"`{name}` must be a function; got {describe(fn)}.")
        check_kind("loss", loss, ELBO, "a loss of NumPyro, such as `Trace_ELBO()`")
        check_table_dtype(table_dtype)
        if getattr(loss, "multi_sample_guide", False):
            raise NotImplementedError(
                "SubsampledSVI needs a loss with one guide sample per particle; got "
                "multi_sample_guide=True. Use `num_particles=`."
            )
        if hasattr(optim, "gradient_transformation"):  # `optax.MultiSteps`, which is none itself
            optim = optim.gradient_transformation()
        super().__init__(model, guide, optim, loss, **static_kwargs)
        if not takes_gradient_steps(self.optim):
            raise NotImplementedError(
                f"SubsampledSVI takes gradient steps; {type(self.optim).__name__} evaluates the "
                "loss on its own. Use it with numpyro.infer.SVI."
            )
        self.plan = Plan(
            self.model,
            self.guide,
            self.optim,
            self.loss,
            self.static_kwargs,
            table_dtype,
            Sharding.of(mesh, sharding),
        )

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
            ValueError: If the arguments hold NaN or infinities, or labels out of range, if the
                optimiser or a constraint mixes rows of a subsampled plate, or if utilities follow
                the other classes that a step draws.
        """
        check_random_key(rng_key)
        self.plan, state = first_run(self.plan, rng_key, args, kwargs, init_params)
        self.constrain_fn = self.plan.constrain
        return state

    def get_params(self, svi_state: SubsampledSVIState) -> dict[str, Any]:
        """Constrained values of all parameters, stored whole.

        Parameters without a constraint are the arrays of the state itself, and so are gone when the
        state is donated: copy what must outlive it.

        Cost: O(table) time and memory.
        """
        return self.plan.params(svi_state)

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
        forward_mode = forward_mode_differentiation
        return take_step(self.plan, svi_state, args, kwargs, forward_mode=forward_mode)

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
        forward_mode = forward_mode_differentiation
        return take_step(
            self.plan,
            svi_state,
            args,
            kwargs,
            forward_mode=forward_mode,
            finite_gradients=True,
            finite_params=True,
        )

    def evaluate(self, svi_state: SubsampledSVIState, *args: Any, **kwargs: Any) -> Array:
        """Loss that ``update`` would report for this state and these arguments.

        Cost: O(touched rows).
        """
        step = gather_step(self.plan, svi_state, args, kwargs)
        return step.loss(step.params)[0]

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
        held_out: HeldOut | None = None,
        callbacks: Sequence[Callback] = (),
        checkpoints: Checkpoints | None = None,
        resume: bool = False,
        **kwargs: Any,
    ) -> SubsampledSVIRunResult:
        """Fit for ``num_steps`` steps in compiled loops that reuse the memory of the tables.

        The labels and float data of ``ArrayBatches`` are checked, all of them, before the first
        step; and of any ``batches`` whether the likelihood is scaled from a minibatch to all rows,
        as many as there are or, of an iterator, as a data plate of the model says. A step whose
        loss or new parameters are not finite is not taken: the fit ends there with a RuntimeWarning
        that names the step, and the argument, parameter, site or gradient with its row that is the
        first not to be finite; the result holds the last good state (with ``stable_update`` such
        steps are skipped instead, and counted in a warning at the end; bad data that ``batches``
        holds is then no error but a warning).

        **Nothing is lost.** Whatever is raised, by the model, by the iterator or as
        ``KeyboardInterrupt`` (Ctrl-C), has the fit up to then as its attribute ``result_so_far``:
        keep its ``params``, or go on with ``init_state=error.result_so_far.state``. It is None
        before there is a first state, as while model and guide are run once.

        **In** ``jit``, ``vmap`` **and the like** all steps are one program, and a step that is not
        finite has the loss NaN and changes nothing. Batches are those of ``ArrayBatches``, and
        there are no callbacks, checkpoints and held-out scores.

        Args:
            rng_key: A JAX random key, of all that is drawn but the minibatches of ``ArrayBatches``,
                which have a seed.
            num_steps: Number of steps, at least 1. Passes over the data, or epochs, are
                ``num_passes * len(batches)`` steps.
            *args: Arguments of model and guide, the same in each step.
            batches: Minibatches whose arrays come after ``args``: ``ArrayBatches``, drawn inside
                the compiled loop; ``StreamedBatches``, read from disk while steps run; or any
                iterator of tuples of arrays (or of tensors in the memory of the CPU, or of frames),
                of which each new shape is compiled for, and which is asked for the next batch while
                a step runs. It must last for all steps.
            progress_bar: Show steps, speed and a smoothed ELBO; and at the end, in one line,
                whether the fit has converged, ``result.convergence``.
            stable_update: Skip steps that are not finite, and batches with bad data, and go on.
            forward_mode_differentiation: Differentiate in forward mode.
            init_state: State to go on from, as an earlier result holds it; it is copied. It has a
                key of its own, which is used in place of ``rng_key``.
            init_params: Initial values of parameters, by name.
            held_out: A held-out score every so often, and where to stop by it, ``HeldOut(score)``.
            callbacks: Functions to call every so often, each in a ``Callback(function)``.
            checkpoints: Where and how often to write the fit to disk, ``Checkpoints(folder)``.
            resume: Go on from the newest checkpoint, if there is one, bit by bit as if the run had
                not been interrupted; ``num_steps`` and the losses count from its beginning. The
                batches of a stream are taken from its beginning too, and those of the steps that
                were taken are passed over. Without it the folder must have no checkpoints.
            **kwargs: Keyword arguments of model and guide, the same in each step.

        Returns:
            A named tuple with the fields of NumPyro's ``SVIRunResult``, ``params``, ``state`` and
            ``losses``, one loss for each step taken (and NaN for the step at which a fit ended),
            ``iterates``, up to 1000 earlier values of a few entries of each parameter, for
            ``diagnose``, ``scores``, those of ``held_out``, and ``convergence``, whether ELBO and
            parameters are level: ``.elbo_rises``, ``.r_hats``, ``.drifts(name)``. With a
            ``patience`` of ``held_out``, ``params`` and ``state`` are those of the best score.

        Raises:
            ValueError: If ``num_steps`` is less than 1, if data or labels are refused, if what a
                model with minibatches observes is in no data plate with their ``rows``, or if
                ``init_state`` is the state of another model or optimiser.

        Cost: O(touched rows) per step; O(table) once at the start and once at the end.
        """

        def init(*batch: Any) -> tuple[Plan, SubsampledSVIState]:
            state = self.init(rng_key, *args, *batch, init_params=init_params, **kwargs)
            return self.plan, state

        begun: list[RunSoFar] = []  # this run, once there is something to be kept
        with attach_result(lambda: begun[0].interrupted() if begun else None):
            if init_state is None:
                check_random_key(rng_key)
            return run_loop(
                self.plan,
                init,
                RunData(args, kwargs, batches),
                rng_key,
                num_steps,
                progress_bar=progress_bar,
                options=RunOptions(stable_update, forward_mode_differentiation),
                init_state=init_state,
                calls=CallbackCalls(callbacks, held_out, num_steps),
                checkpoints=checkpoints,
                resume=resume,
                begun=begun.append,
            )

    def save(self, folder: str | PathLike[str], result: SubsampledSVIRunResult) -> None:
        """Write a fit whole into a folder, by Orbax: all that ``load`` needs besides the code.

        That is parameters, optimiser's state, what is kept per row, the random key, the position in
        the data, losses, the names and sizes of plates, and versions. The new fit takes the place
        of one that is there, which stays if it cannot be written.

        Cost: O(state) time and disk.

        Args:
            folder: A folder for this fit alone, which is made if it is not there.
            result: What ``run`` returned, or ``result_so_far`` of an exception.

        Raises:
            OSError: If the folder cannot be written.
            ValueError: If the folder holds anything but fits, or the state is that of another
                model.
        """
        check_kind("result", result, SubsampledSVIRunResult, "what `run` returned")
        self.plan.check(result.state)
        iterates = {name: np.asarray(values) for name, values in result.iterates.items()}
        scores = Scores(*(np.asarray(of).tolist() for of in result.scores.values()))
        run = SavedRun(result.state, np.asarray(result.losses), iterates, scores)
        write_run(fit_folder(folder, KIND, spans=self.plan.spans_processes), self.plan, run)

    def load(
        self, folder: str | PathLike[str], *args: Any, **kwargs: Any
    ) -> SubsampledSVIRunResult:
        """Read the newest fit that ``save`` or a checkpoint wrote, of this model and guide.

        The result is as ``run`` returned it: ``lc.Fitted.from_svi(svi, result)`` reads it, and
        ``run(..., init_state=result.state)`` goes on. Model and guide are run once, as ``init``
        does, to see that the fit is theirs.

        Cost: O(state) time; memory for twice the state.

        Args:
            folder: The folder.
            *args: Arguments of model and guide: any batch of the shapes that the fit had, with
                labels, and with ``rows`` if the model has a data plate. Its numbers have no part in
                the fit.
            **kwargs: Keyword arguments of model and guide.

        Raises:
            FileNotFoundError: If there is no fit in the folder.
            ValueError: If the fit is damaged, or of another model, guide or optimiser, with what
                differs.

        Example:
            >>> import tempfile, jax, numpyro, optax
            >>> import numpyro_largecat as lc
            >>> from numpyro.infer import Trace_ELBO
            >>> def model():
            ...     a = numpyro.param("a", 0.0)
            ...     numpyro.factor("loss", -((a - 1) ** 2))
            >>> def make_svi():
            ...     return lc.SubsampledSVI(model, lambda: None, optax.adam(0.1), Trace_ELBO())
            >>> svi, folder = make_svi(), tempfile.mkdtemp()
            >>> result = svi.run(jax.random.key(0), 100, progress_bar=False)
            >>> svi.save(folder, result)
            >>> loaded = make_svi().load(folder)  # in another process, say
            >>> bool(loaded.params["a"] == result.params["a"]), len(loaded.losses)
            (True, 100)
        """
        fits = fit_folder(folder, KIND, spans=self.plan.spans_processes)
        if not fits.numbers():  # before `init`, which takes long
            raise FileNotFoundError(f"{fits.path} has no saved fit.")
        try:
            self.init(jax.random.key(0), *args, **kwargs)
        except (TypeError, ValueError) as error:
            error.add_note(
                "`load` runs the model as the fit did: pass a batch as it had, with labels and "
                "row ids, such as `svi.load(folder, x[:2], y[:2], rows=np.arange(2))`."
            )
            raise
        reading = partial(read_run, fits, self.plan)
        saved = in_all(reading) if self.plan.spans_processes else reading()
        state = saved.state if saved.scores.best is None else saved.scores.best
        others = saved.iterates, saved.scores.of_result()
        params = self.get_params(state)
        return SubsampledSVIRunResult(params, state, jnp.asarray(saved.losses), *others)
