# SPDX-License-Identifier: Apache-2.0
"""Predictions over all classes from the user's own model and guide, chunk of classes by chunk."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from numpyro_largecat._checks import as_ids, check_count, check_in_range, check_integers
from numpyro_largecat.choices.error_families import GUMBEL
from numpyro_largecat.ops.choice_quadrature import choice_log_prob
from numpyro_largecat.ops.noisy_max import draw_gumbel
from numpyro_largecat.ops.running_top import RunningTop
from numpyro_largecat.ops.softmax_bound import take_row
from numpyro_largecat.reading.chunked_utilities import ChunkedUtilities
from numpyro_largecat.reading.progress import count_steps


class TopClasses(NamedTuple):
    """The most probable classes of each observation.

    Example:
        >>> import numpyro_largecat as lc
        >>> lc.TopClasses._fields
        ('classes', 'log_probs')
    """

    classes: Array  # (..., num_top), best first
    log_probs: Array  # (..., num_top), in nats, normalised over all K classes


def top_classes(
    model: Callable[..., Any],
    guide: Callable[..., Any],
    params: dict[str, Any],
    *args: Any,
    num_top: int = 10,
    rng_key: Array | None = None,
    num_draws: int | None = None,
    site: str = "y",
    plate: str = "classes",
    chunk_size: int = 4096,
    progress_bar: bool = False,
    **kwargs: Any,
) -> TopClasses:
    r"""Find the most probable classes of new observations, exactly, over all K.

    **At the centre of the guide**, without ``num_draws``: each latent site is set to its mean in
    the guide or, where the guide transforms a distribution, to the transformed mean of that (the
    median, for ``AutoNormal``). With the utilities psi there

    .. math:: p(k) = \exp \psi_k \Big/ \sum_{j=1}^{K} \exp \psi_j ,

    where the sum is accumulated over chunks of classes. **Over draws** from the guide, with
    ``num_draws``, it is the mean of this probability over T draws, the posterior predictive.

    For other errors than Gumbel's each probability is an integral, see ``UtilityCategorical``. The
    order at the centre is that of the utilities; over draws the 4 ``num_top`` classes with the
    highest mean softmax are tried, and the best of these returned. That takes 4 ``num_top``
    integrals for each row and draw: some 80 s for 200 rows, 20 draws, the 5 best classes and
    K = 6,000.

    The model is run on ``chunk_size`` classes at a time, also where its plate is full, so tables
    with an axis for the classes must be indexed by ``classes.indices``, and a utility may depend on
    the rows of its own class and on sites outside of the class plate only. Other class plates hold
    the classes of their ``labels`` or, without any, all of them; read them by ``place``.

    Data plates without ``rows`` stand for new data, of any length. The function is pure, so it can
    be compiled: ``jax.jit(functools.partial(lc.top_classes, model, guide, num_top=5))``. What is
    refused by its value, such as features that are NaN, ids out of range or utilities that depend
    on other classes, is not known there: log probabilities are then NaN, and classes -1. The same
    call outside of ``jit`` says why.

    Shapes: ``...`` is the batch shape of the site.

    Cost: O(K) time per row, 2 T times that with draws, and three times 128 classes at most to see
    that classes do not depend on each other; memory for ``chunk_size`` utilities per row and a
    chunk of each table, besides the tables. For other errors O(K) memory per row, and O(K) time for
    each probability. Outside of ``jit`` each call is compiled anew.

    Args:
        model: The model that was fitted.
        guide: Its guide.
        params: Parameters, as ``SubsampledSVI.get_params`` gives them.
        *args: Arguments of the model, without observed choices.
        num_top: Number of most probable classes, in [1, K].
        rng_key: A JAX random key, for draws.
        num_draws: Number of draws T from the guide. None for its centre.
        site: Name of the choice, a site over ``plate`` with ``UtilityCategorical`` or one of its
            bounds.
        plate: Name of its class plate.
        chunk_size: Number of classes evaluated at once.
        progress_bar: Whether to show the chunks done.
        **kwargs: Keyword arguments of the model.

    Raises:
        ValueError: If the model has no such site or plate, a parameter is missing or has the rows
            of another plate, an automatic guide has not been run yet, ``num_top`` is out of range,
            or of ``rng_key`` and ``num_draws`` only one is given; if the model fails on some of
            its classes; or, outside ``jit``, if an argument of the model is not finite, or the
            utility of a class is seen to depend on which others are evaluated with it.
        TypeError: If ``params`` is not a dict.
        NotImplementedError: If a latent site has one value for each row of the training data, which
            new rows lack.

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
        >>> params = svi.run(jax.random.key(0), 300, x, y, progress_bar=False).params
        >>> lc.top_classes(model, svi.guide, params, jnp.ones(2), num_top=2).classes.tolist()
        [[7, 3], [7, 3]]
        >>> draws = {"rng_key": jax.random.key(1), "num_draws": 50}
        >>> lc.top_classes(model, svi.guide, params, jnp.ones(2), num_top=2, **draws).classes[0]
        Array([7, 3], dtype=int32)
    """
    utilities = ChunkedUtilities(model, guide, params, args, kwargs, site, plate, chunk_size)
    num_top = check_count("num_top", num_top, 1)
    if num_top > utilities.num_categories:
        raise ValueError(
            f"`num_top` must be at most the number of classes, {utilities.num_categories}; got "
            f"{num_top}."
        )
    keys = _draw_keys(rng_key, num_draws)
    if keys is None and utilities.family is GUMBEL:
        tick = count_steps("chunks", utilities.num_chunks, progress_bar)
        return _at_centre(utilities, num_top, tick)
    if keys is None:
        psi = utilities.of_all_classes(None)
        _, classes = lax.top_k(psi, num_top)
        return _known_classes(classes.astype(jnp.int32), _log_probs(utilities, psi, classes))
    tick = count_steps("chunks", 2 * len(keys) * utilities.num_chunks, progress_bar)
    if utilities.family is GUMBEL:
        return _over_draws(utilities, keys, num_top, tick)
    tried = _over_draws(utilities, keys, min(4 * num_top, utilities.num_categories), tick).classes

    def of_draw(key: Array) -> Array:
        return _log_probs(utilities, utilities.of_all_classes(key), tried)

    log_probs = jax.nn.logsumexp(lax.map(of_draw, keys), axis=0) - jnp.log(len(keys))
    best, place = lax.top_k(log_probs, num_top)
    return _known_classes(jnp.take_along_axis(tried, place, axis=-1), best)


def log_likelihood(
    model: Callable[..., Any],
    guide: Callable[..., Any],
    params: dict[str, Any],
    *args: Any,
    obs: ArrayLike,
    rng_key: Array | None = None,
    num_draws: int | None = None,
    site: str = "y",
    plate: str = "classes",
    chunk_size: int = 1024,
    progress_bar: bool = False,
    **kwargs: Any,
) -> Array:
    r"""Exact log probability of observed choices, over all K classes.

    .. math:: \log p(y \mid x, \theta) = \psi_y - \log \sum_{k=1}^{K} \exp \psi_k ,

    or the integral of other errors, with theta the centre of the guide, or each of ``num_draws``
    draws. The log of the mean over draws, ``logsumexp(result, 0) - log(num_draws)``, is the log
    predictive density.

    Shapes: (...) at the centre, (num_draws, ...) over draws, for choices of shape ``...``.

    Cost: O(K) time per row and draw, and memory as ``top_classes``.

    Args:
        model: The model that was fitted.
        guide: Its guide.
        params: Parameters, as ``SubsampledSVI.get_params`` gives them.
        *args: Arguments of the model, without observed choices.
        obs: Observed classes, integers in [0, K), shape (...).
        rng_key: A JAX random key, for draws. Equal keys, ``num_draws`` and ``chunk_size`` give
            equal draws here, in ``top_classes`` and in ``draw_choices``.
        num_draws: Number of draws from the guide. None for its centre.
        site: See ``top_classes``.
        plate: See ``top_classes``.
        chunk_size: Number of classes evaluated at once.
        progress_bar: Whether to show the chunks done.
        **kwargs: Keyword arguments of the model.

    Raises:
        ValueError: As ``top_classes``, and if ``obs`` has another shape than the choice or is out
            of range (under ``jit``, where values are not known, the log probability is then NaN).
        TypeError: If ``params`` is not a dict, or ``obs`` are not integers.
        NotImplementedError: As ``top_classes``.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> import numpyro_largecat as lc
        >>> from numpyro.infer.autoguide import AutoDelta
        >>> def model(y=None):
        ...     with lc.class_plate("classes", 4, y, num_sampled=2) as classes:
        ...         b = numpyro.sample("b", dist.Normal(0, 1))
        ...     with lc.data_plate("data", 1) as rows:
        ...         lc.sample_choice("y", b[None], classes=classes, rows=rows, obs=y)
        >>> guide = AutoDelta(model)
        >>> params = {"b_auto_loc": jnp.zeros(4)}
        >>> _ = numpyro.handlers.seed(guide, 0)(jnp.array([2]))
        >>> jnp.exp(lc.log_likelihood(model, guide, params, obs=jnp.array([2]))).round(4).tolist()
        [0.25]
    """
    utilities = ChunkedUtilities(model, guide, params, args, kwargs, site, plate, chunk_size)
    return log_likelihood_of(utilities, obs, _draw_keys(rng_key, num_draws), progress_bar)


def log_likelihood_of(
    utilities: ChunkedUtilities, obs: ArrayLike, keys: Array | None, progress_bar: bool
) -> Array:
    """Log probabilities of observed classes, for each key, or at the centre of the guide."""
    labels = labels_of_rows(obs, utilities)
    num_passes = 1 if keys is None else len(keys)
    tick = count_steps("chunks", num_passes * utilities.num_chunks, progress_bar)

    def of_draw(key: Array | None) -> Array:
        if utilities.family is not GUMBEL:
            log_probs = _log_prob(utilities, utilities.of_all_classes(key), labels)
        else:
            log_sum, observed = _normaliser(utilities, key, labels, tick)
            log_probs = observed - log_sum
        is_class = (labels >= 0) & (labels < utilities.num_categories)
        return jnp.where(is_class, log_probs, jnp.nan)

    return of_draw(None) if keys is None else lax.map(of_draw, keys)


def draw_choices(
    rng_key: Array,
    model: Callable[..., Any],
    guide: Callable[..., Any],
    params: dict[str, Any],
    *args: Any,
    num_draws: int = 100,
    site: str = "y",
    plate: str = "classes",
    chunk_size: int = 4096,
    progress_bar: bool = False,
    **kwargs: Any,
) -> Array:
    r"""Draw choices from the posterior predictive, over all K classes.

    Each of ``num_draws`` draws takes the latent sites from the guide, and then the class of highest
    noisy utility, ``argmax_k (psi_k + error_k)``, chunk of classes by chunk.

    Shapes: (num_draws, ...), for choices of shape ``...``; int32, and -1 where ``top_classes`` has
    no class.

    Cost: O(K) time per row and draw, and memory as ``top_classes`` for all errors.

    Args:
        rng_key: A JAX random key.
        model: The model that was fitted.
        guide: Its guide.
        params: Parameters, as ``SubsampledSVI.get_params`` gives them.
        *args: Arguments of the model, without observed choices.
        num_draws: Number of draws, at least 1.
        site: See ``top_classes``.
        plate: See ``top_classes``.
        chunk_size: Number of classes evaluated at once.
        progress_bar: Whether to show the chunks done.
        **kwargs: Keyword arguments of the model.

    Raises:
        ValueError: As ``top_classes``.
        TypeError: If ``params`` is not a dict.
        NotImplementedError: As ``top_classes``.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> import numpyro_largecat as lc
        >>> from numpyro.infer.autoguide import AutoDelta
        >>> def model(y=None):
        ...     with lc.class_plate("classes", 4, y, num_sampled=2) as classes:
        ...         b = numpyro.sample("b", dist.Normal(0, 1))
        ...     with lc.data_plate("data", 1) as rows:
        ...         lc.sample_choice("y", b[None], classes=classes, rows=rows, obs=y)
        >>> guide = AutoDelta(model)
        >>> _ = numpyro.handlers.seed(guide, 0)(jnp.array([2]))
        >>> params = {"b_auto_loc": jnp.array([0.0, 0.0, 20.0, 0.0])}
        >>> lc.draw_choices(jax.random.key(1), model, guide, params, num_draws=3).tolist()
        [[2], [2], [2]]
    """
    utilities = ChunkedUtilities(model, guide, params, args, kwargs, site, plate, chunk_size)
    keys = _draw_keys(rng_key, num_draws)
    assert keys is not None
    return draw_choices_of(utilities, keys, utilities.batch_shape, progress_bar)


def draw_choices_of(
    utilities: ChunkedUtilities, keys: Array, shape: tuple[int, ...], progress_bar: bool
) -> Array:
    """Draw a class for each key and observation; ``shape`` may repeat rows of the utilities."""
    tick = count_steps("chunks", len(keys) * utilities.num_chunks, progress_bar)
    draw_noise = draw_gumbel if utilities.family is GUMBEL else utilities.family.sample

    def of_draw(key: Array) -> Array:
        noise_key = jax.random.fold_in(key, 1)  # the latent sites are drawn from `key` itself

        def visit(chunk: Array, best: RunningTop) -> RunningTop:
            psi, classes = utilities.of_chunk(chunk, key)
            noise = draw_noise(jax.random.fold_in(noise_key, chunk), (*shape, psi.shape[-1]))
            tick()
            return best.include(psi + noise.astype(psi.dtype), classes[0])

        start = RunningTop.start(shape, 1, utilities.chunk_size, utilities.dtype)
        top = lax.fori_loop(0, utilities.num_chunks, visit, start)
        values, classes = top.finish()
        return _known_classes(classes, values).classes[..., 0]

    return lax.map(of_draw, keys)


def _draw_keys(rng_key: Array | None, num_draws: int | None) -> Array | None:
    """One key for each draw, or None for the centre of the guide."""
    if (rng_key is None) != (num_draws is None):
        raise ValueError(
            "`rng_key` and `num_draws` belong together: give both to average over draws from the "
            "guide, or neither for its centre."
        )
    if rng_key is None or num_draws is None:
        return None
    return jax.random.split(rng_key, check_count("num_draws", num_draws, 1))


def labels_of_rows(obs: ArrayLike, utilities: ChunkedUtilities) -> Array:
    """Labels with the shape of the choice; a model of one row may stand for many."""
    check_integers("obs", obs)
    check_in_range("`obs`", obs, utilities.num_categories, "classes")
    shape, batch_shape = jnp.shape(obs), utilities.batch_shape
    fits = len(shape) == len(batch_shape) and all(
        b in (1, o) for b, o in zip(batch_shape, shape, strict=True)
    )
    if not fits:
        raise ValueError(
            "`obs` must have one class for each row that the model's arguments describe, shape "
            f"{batch_shape}; got shape {shape}."
        )
    return as_ids(obs)


def _at_centre(utilities: ChunkedUtilities, num_top: int, tick: Callable[[], None]) -> TopClasses:
    """Find the normaliser and the highest utilities in one pass."""

    def visit(chunk: Array, best: tuple[Array, RunningTop]) -> tuple[Array, RunningTop]:
        psi, classes = utilities.of_chunk(chunk, None)
        tick()
        log_sum = jnp.logaddexp(best[0], jax.nn.logsumexp(psi, axis=-1))
        return log_sum, best[1].include(psi, classes[0])

    nothing = jnp.full(utilities.batch_shape, -jnp.inf, utilities.dtype)
    start = _no_classes(utilities, num_top)
    log_sum, top = lax.fori_loop(0, utilities.num_chunks, visit, (nothing, start))
    values, classes = top.finish()
    return _known_classes(classes, values - log_sum[..., None])


def _known_classes(classes: Array, log_probs: Array) -> TopClasses:
    """Class -1 where the log probability is NaN, so that no class is taken for the best."""
    return TopClasses(jnp.where(jnp.isnan(log_probs), -1, classes), log_probs)


def _no_classes(utilities: ChunkedUtilities, num_top: int) -> RunningTop:
    return RunningTop.start(utilities.batch_shape, num_top, utilities.chunk_size, utilities.dtype)


def _over_draws(
    utilities: ChunkedUtilities, keys: Array, num_top: int, tick: Callable[[], None]
) -> TopClasses:
    """Find the normalisers of all draws first, and then the mean probabilities of each chunk."""
    log_sums = lax.map(lambda key: _normaliser(utilities, key, None, tick)[0], keys)

    def visit(chunk: Array, best: RunningTop) -> RunningTop:
        def add(total: Array, draw: tuple[Array, Array]) -> tuple[Array, None]:
            key, log_sum = draw
            psi, _ = utilities.of_chunk(chunk, key)
            tick()
            return jnp.logaddexp(total, psi - log_sum[..., None]), None

        shape = (*utilities.batch_shape, utilities.chunk_size)
        nothing = jnp.full(shape, -jnp.inf, utilities.dtype)
        total, _ = lax.scan(add, nothing, (keys, log_sums))
        return best.include(total, utilities.classes_of(chunk)[0])

    start = _no_classes(utilities, num_top)
    top = lax.fori_loop(0, utilities.num_chunks, visit, start)
    values, classes = top.finish()
    return _known_classes(classes, values - jnp.log(len(keys)))


def _normaliser(
    utilities: ChunkedUtilities, key: Array | None, labels: Array | None, tick: Callable[[], None]
) -> tuple[Array, Array]:
    """Log of the sum of exp(utility) over all classes, and the utilities of the labels."""

    def visit(chunk: Array, found: tuple[Array, Array]) -> tuple[Array, Array]:
        log_sum, observed = found
        psi, classes = utilities.of_chunk(chunk, key)
        tick()
        if labels is not None:
            place = labels - classes[0]
            inside = (place >= 0) & (place < psi.shape[-1])
            psi_of_rows = jnp.broadcast_to(psi, (*labels.shape, psi.shape[-1]))
            observed = jnp.where(inside, take_row(psi_of_rows, place), observed)
        return jnp.logaddexp(log_sum, jax.nn.logsumexp(psi, axis=-1)), observed

    nothing = jnp.full(utilities.batch_shape, -jnp.inf, utilities.dtype)
    shape = utilities.batch_shape if labels is None else labels.shape
    start = nothing, jnp.full(shape, -jnp.inf, utilities.dtype)
    return lax.fori_loop(0, utilities.num_chunks, visit, start)


def _log_prob(utilities: ChunkedUtilities, psi: Array, labels: Array) -> Array:
    family = utilities.family
    return choice_log_prob(psi, labels, family.log_prob, family.log_cdf)


def _log_probs(utilities: ChunkedUtilities, psi: Array, classes: Array) -> Array:
    """Log probabilities of ``classes``, shape (..., n), one of the n after the other."""
    by_rank = lax.map(partial(_log_prob, utilities, psi), jnp.moveaxis(classes, -1, 0))
    return jnp.moveaxis(by_rank, 0, -1)
