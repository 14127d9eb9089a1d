# SPDX-License-Identifier: Apache-2.0
"""A fit to read, from its parameters or from what ``run`` returned."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jax.typing import ArrayLike
from numpyro.infer import SVI
from numpyro.infer.autoguide import AutoGuideList

from numpyro_largecat._checks import check_arguments, check_count, check_kind, check_shape
from numpyro_largecat._conversions import list_as_array, with_arrays
from numpyro_largecat.handlers.automatic_guides import guide_parts
from numpyro_largecat.handlers.internals import has_seen_model
from numpyro_largecat.handlers.static_arguments import with_jax_arrays
from numpyro_largecat.reading.bound_fit import BoundFit
from numpyro_largecat.reading.diagnosis import Training
from numpyro_largecat.reading.reading import Reading
from numpyro_largecat.svi.plan import with_static
from numpyro_largecat.svi.subsampled_svi import SubsampledSVI


class Fitted:
    r"""A fit to read: what it predicts, what ArviZ can show of it, and what may be wrong with it.

    ``fitted.on(...)`` takes the arguments of the model, and its methods read the fit on them:

    - ``top_classes``: the most probable classes of each observation;
    - ``log_likelihood``: the exact log probability of observed choices;
    - ``log_predictive``: the log of its mean over the posterior;
    - ``draw_choices``: draws from the posterior predictive;
    - ``to_arviz``: the posterior, and what the fit says of the data, for ArviZ;
    - ``diagnose``: what may be wrong with the fit.

    **At the centre of the guide or over draws.** Without a random key each latent site is set to
    its mean in the guide or, where the guide transforms a distribution, to the transformed mean of
    that (the median, for ``AutoNormal``). With ``rng_key`` and ``num_draws`` the latent sites are
    drawn from the guide. Equal keys and ``num_draws`` give equal draws of them in all methods,
    whatever the ``chunk_size``; but ``top_classes`` and ``log_predictive``, which need the mean
    over draws alone, draw utilities in their place where these are Gaussian, see
    ``log_predictive``. Weights that ``gaussian_weights`` declares are no latent sites: where others
    are drawn, utilities are, with the variances that the model gives for them.

    **All classes, some at a time.** The model is run on ``chunk_size`` classes after another, also
    where its plate is full. So tables with an axis for the classes must be indexed by
    ``classes.indices``, and a utility may depend on the rows of its own class and on sites outside
    of the class plate only; classes that are read by id, ``reads=`` of the plate, are there
    beside each chunk. Other class plates hold the classes of their ``labels`` or, without any, all
    of them. Data plates without ``rows`` stand for new data, of any length. The guide too is run
    for some classes, to be drawn for one after another: in the class plate its values may depend on
    a class's own rows and on what is outside. What it leaves to the model is at the centre of its
    prior, or drawn from that, in the class plate chunk by chunk.

    **Under** ``jit``. Parameters that are closed over are constants of the compiled program, so
    make them an argument where they are large:

    - ``jax.jit(lambda x: fitted.on(x).top_classes(5))`` for small tables;
    - ``jax.jit(lambda params, x: lc.Fitted(model, guide, params).on(x).top_classes(5))`` for
      large ones, called with ``fitted.params``.

    What is refused by its value, such as features that are NaN, ids out of range or utilities that
    depend on other classes, is not known there: log probabilities are then NaN, and classes -1. The
    same call outside of ``jit`` says why. There each call traces model and guide, and compiles what
    no earlier one has compiled: rows as many as before, and this or another ``Fitted``, will do.

    Cost: O(K) time for each observation and draw, and three times 128 classes at most to see that
    classes do not depend on each other; memory for ``chunk_size`` utilities for each observation
    and a chunk of each table, besides the tables. Each chunk also has the rows that are read by id,
    R of them at most. For other errors than Gumbel's each probability is an integral, see
    ``UtilityCategorical``: O(K) memory for each observation.

    Args:
        model: The model that was fitted.
        guide: Its guide. An automatic one must have run once, with labels.
        params: Parameters by name, as ``SubsampledSVI.get_params`` gives them, or loaded.
        site: Name of the choice, a site with ``UtilityCategorical`` or one of its bounds. It is
            needed where the model has several.
        plate: Name of its class plate, where the model does not tell it from others.
        chunk_size: Number of classes evaluated at once.
        progress_bar: Whether to show the chunks done.
        losses: Losses of the fit, shape (steps,), for ``to_arviz`` and ``diagnose``.

    Raises:
        ValueError: If an automatic guide has not been run yet, or ``losses`` have another shape.
            When it is read: if the model has no such site or plate, or several (what is no choice
            is predicted by NumPyro's ``Predictive``, with full plates); if a parameter is
            missing or has the rows of another plate; if the model fails on some of its classes; or,
            outside of ``jit``, if an argument of the model is not finite, or the utility of a class
            is seen to depend on which others are evaluated with it.
        TypeError: If ``params`` is no mapping.
        NotImplementedError: When it predicts, if a latent site has one value for each row of the
            training data, which new rows lack.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist, optax
        >>> import numpyro_largecat as lc
        >>> from numpyro.infer import Trace_ELBO
        >>> from numpyro.infer.autoguide import AutoNormal
        >>> def model(x, y=None):
        ...     with lc.class_plate("classes", 50, y, num_sampled=20) as classes:
        ...         w = numpyro.sample("w", dist.Normal(0, 1))
        ...     with lc.data_plate("data", 30) as rows:
        ...         lc.sample_choice("y", x[:, None] * w, classes=classes, rows=rows, obs=y)
        >>> svi = lc.SubsampledSVI(model, AutoNormal(model), optax.adam(0.1), Trace_ELBO())
        >>> x, y = jnp.ones(30), jnp.array([7, 7, 3] * 10)
        >>> result = svi.run(jax.random.key(0), 300, x, y, progress_bar=False)
        >>> fitted = lc.Fitted.from_svi(svi, result)
        >>> fitted.on(jnp.ones(2)).top_classes(2).classes.tolist()
        [[7, 3], [7, 3]]

        From parameters that were saved, with the guide that was run once:

        >>> loaded = lc.Fitted(model, svi.guide, result.params)
        >>> loaded.on(jnp.ones(2)).top_classes(2).classes.tolist()
        [[7, 3], [7, 3]]
    """

    def __init__(
        self,
        model: Callable[..., Any],
        guide: Callable[..., Any],
        params: Mapping[str, Any],
        *,
        site: str | None = None,
        plate: str | None = None,
        chunk_size: int = 4096,
        progress_bar: bool = False,
        losses: ArrayLike | None = None,
        _training: Training | None = None,  # what ``from_svi`` knows
        _static_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        check_kind("params", params, Mapping, "a dict of parameters, such as `result.params`")
        _check_guide_has_run(guide)
        self.model, self.guide = model, guide
        self.params: dict[str, Any] = with_jax_arrays(dict(params))
        self.site, self.plate = site, plate
        self.chunk_size = check_count("chunk_size", chunk_size, 1)
        self.progress_bar = progress_bar
        self.losses = _checked_losses(losses)
        self._training = (_training or Training())._replace(losses=self.losses)
        self._static_kwargs = dict(_static_kwargs or {})

    @classmethod
    def from_svi(
        cls, svi: SVI, result: Any, *, params: Mapping[str, Any] | None = None, **options: Any
    ) -> Fitted:
        """The fit of an SVI, with its losses and the static keyword arguments of its model.

        Args:
            svi: The ``SubsampledSVI`` of the fit, or NumPyro's ``SVI``.
            result: What its ``run`` returned.
            params: Parameters to read in place of the last ones, such as ``lc.averaged_params``.
                What the model keeps in ``numpyro.mutable`` sites, such as batch norms, is as it was
                at the end, unless it is given here.
            **options: ``site``, ``plate``, ``chunk_size`` and ``progress_bar`` as of ``Fitted``.

        Example:
            >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist, optax
            >>> import numpyro_largecat as lc
            >>> from numpyro.infer import Trace_ELBO
            >>> from numpyro.infer.autoguide import AutoDelta
            >>> def model(y=None, *, noise):
            ...     with lc.class_plate("classes", 4, y) as classes:
            ...         b = numpyro.sample("b", dist.Normal(0, 1))
            ...     with lc.data_plate("data", 1) as rows:
            ...         options = {"classes": classes, "rows": rows, "noise": noise}
            ...         lc.sample_choice("y", b[None], obs=y, **options)
            >>> guide = AutoDelta(model)
            >>> svi = lc.SubsampledSVI(model, guide, optax.adam(0.1), Trace_ELBO(), noise="gumbel")
            >>> result = svi.run(jax.random.key(0), 5, jnp.array([2]), progress_bar=False)
            >>> lc.Fitted.from_svi(svi, result, chunk_size=2).on().top_classes(1).classes.tolist()
            [[2]]
        """
        params = result.params if params is None else params
        params = {**(result.state.mutable_state or {}), **params}
        plan = svi.plan if isinstance(svi, SubsampledSVI) else None
        params = params if plan is None else plan.spread_tables(params)
        return cls(
            svi.model,
            svi.guide,
            params,
            losses=result.losses,
            **options,
            _training=Training(None, getattr(result, "iterates", {}), plan, result.state),
            _static_kwargs=svi.static_kwargs,
        )

    def on(self, /, *args: Any, **kwargs: Any) -> Reading:
        """The fit on these arguments of its model: what is there to be read.

        For predictions these are the arguments without the observed choices. What NumPy makes into
        arrays may stand for them: data frames, tensors, and lists of numbers that are given by
        position (a list that is given by name is left as it is).

        Raises:
            ValueError: If an array is not finite, outside of ``jit``.
        """
        args, kwargs = with_arrays((tuple(map(list_as_array, args)), kwargs))
        kwargs = with_static(kwargs, self._static_kwargs)
        check_arguments(self.model, args, kwargs)
        args, kwargs = with_jax_arrays((args, kwargs))
        fit = BoundFit(
            self.model,
            self.guide,
            self.params,
            self.site,
            self.plate,
            self.chunk_size,
            self.progress_bar,
            args,
            kwargs,
        )
        return Reading(fit, self._training)


def _check_guide_has_run(guide: Any) -> None:
    """Refuse an automatic guide that would find its sites in a model with few classes, no labels.

    Raises:
        ValueError: If a part of it has not looked at its model yet.
    """
    parts = [part for part in guide_parts(guide) if not isinstance(part, AutoGuideList)]
    if not all(has_seen_model(part) for part in parts):
        raise ValueError(
            "the guide has not been run yet. Run it once with arguments as in training, among them "
            "labels, to find its sites: `numpyro.handlers.seed(guide, 0)(x, y, rows)`."
        )


def _checked_losses(losses: Any) -> Any:
    if hasattr(losses, "losses"):
        got = type(losses).__name__
        raise ValueError(f"`losses` must have shape (steps,), as `result.losses`; got {got}.")
    if losses is not None:
        check_shape("`losses`", losses, ("steps",), "as `result.losses`")
    return losses
