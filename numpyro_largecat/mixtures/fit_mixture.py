# SPDX-License-Identifier: Apache-2.0
"""Conjugate learning of mixtures over minibatches: memoized and stochastic."""

from __future__ import annotations

import warnings
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from numpyro_largecat._checks import (
    check_count,
    check_key,
    check_kind,
    check_num_active,
    check_one_of,
    is_concrete,
)
from numpyro_largecat._progress_bar import progress_bar as bar_of
from numpyro_largecat._result_so_far import attach_result
from numpyro_largecat.data.checkpoints import Checkpoints, fingerprint, has_checkpoint
from numpyro_largecat.data.fit_in_progress import fit_in_progress
from numpyro_largecat.mixtures.conjugate_family import ConjugateFamily
from numpyro_largecat.mixtures.global_step import Objective, Statistics
from numpyro_largecat.mixtures.learning import Learning
from numpyro_largecat.mixtures.mixing_priors import DirichletMixing, MixingPrior
from numpyro_largecat.mixtures.mixture_fit import MixtureFit
from numpyro_largecat.mixtures.options import Options
from numpyro_largecat.mixtures.passes import Model, Step
from numpyro_largecat.mixtures.row_stream import RowStream, look_at
from numpyro_largecat.mixtures.saved_step import KIND, settings_of
from numpyro_largecat.mixtures.start_statistics import Start, num_candidates, seed_statistics
from numpyro_largecat.ops.numpy_generator import numpy_generator
from numpyro_largecat.ops.rows_by_device import mesh_of_one_process

DEFAULTS = Options()
LEAST_LEFT = 32  # units of rounding: 500 standard deviations in float32


def fit_mixture(
    rng_key: Array,
    x: Any,
    num_components: int,
    family: ConjugateFamily,
    *,
    mixing: MixingPrior | None = None,
    objective: Objective = "variational",
    num_active: int | None = None,
    method: Literal["memoized", "stochastic"] = "memoized",
    num_passes: int = 20,
    batch_size: int | None = None,
    start: Start | MixtureFit = "kmeans++",
    progress_bar: bool = True,
    options: Options = DEFAULTS,
    checkpoints: Checkpoints | None = None,
    resume: bool = False,
    mesh: Mesh | None = None,
) -> MixtureFit:
    r"""Fit a mixture of exponential families by closed-form steps with L-sparse responsibilities.

    .. math:: \pi \sim \mathrm{mixing}, \quad \theta_k \sim \mathrm{prior},
              \quad x_n \sim \sum_k \pi_k F(x_n \mid \theta_k)

    A step takes a batch. Its log weights :math:`W_{nk} = E[\log \pi_k] + E[\log F(x_n \mid
    \theta_k)]` are one product of matrices; each row keeps its L largest, and its responsibilities
    are their softmax, the best with L entries (Eq. 8). The sums :math:`N_k = \sum_n r_{nk}` and
    :math:`S_k = \sum_n r_{nk} f(x_n)` give the new posterior, ``prior + S_k``.

    **Objectives.** "variational" maximises the evidence lower bound (Eq. 3) over posteriors of
    weights and components. "map" maximises the likelihood (Eq. 4) of point estimates, penalised by
    the prior's pseudo-observations: L-sparse EM, hard EM at L = 1, and maximum likelihood where the
    prior is worth next to nothing.

    **Methods.** "memoized" keeps the sums of each batch and replaces them at the next visit.
    After the first pass no step lowers the objective, rounding aside. "stochastic" takes natural
    gradient steps with the batch's sums scaled to all N rows,

    .. math:: S \leftarrow (1 - \rho_t) S + \rho_t \frac{N}{B} S_{\mathrm{batch}}, \qquad
              \rho_t = (\mathrm{delay} + t)^{-\mathrm{forgetting}}, \quad t = 1, 2, \ldots

    With one batch of all data and forgetting = 0 both are coordinate ascent.

    What is raised during the fit, also by ``x`` or as ``KeyboardInterrupt``, has the fit after
    the last batch as its attribute ``result_so_far``, to look at or to go on from; None while the
    start is found.

    Cost: O(B K P) per step in one product, O(B L P) for the sums, and K times the cost of a
    posterior, which is computed on the device in float64 (K D^3 for full covariances). Memory: the
    batch, O(K P), chunks of rows, and for "memoized" O(K P) on the host for each batch; nothing of
    size B K or B P. The data are read once more before the fit, to check them and to draw the rows
    to start from.

    Args:
        rng_key: A JAX random key.
        x: Rows, an array of shape (N, ...), which may be memory-mapped, or a frame of numbers;
            or batches of rows: an iterable that can be iterated again in each pass, such as a list
            of arrays, or a function that returns an iterator. "memoized" needs the same batches in
            the same order.
        num_components: Number of components K, at least 1.
        family: Family of the components with its prior, such as ``lc.mixtures.GaussianFamily``.
        mixing: Prior of the mixing weights: ``lc.mixtures.DirichletMixing``, the default, with
            concentration 1, or ``lc.mixtures.StickBreaking``.
        objective: "variational" or "map".
        num_active: Components L that may share an observation, in [1, K]; None for 8, or K if that
            is less. K is the dense mixture.
        method: "memoized" or "stochastic".
        num_passes: Visits of each batch, at least 1.
        batch_size: Rows of a batch of an array, which is cut at random; None for all rows.
        start: "kmeans++", k-means++ with the family's Bregman divergence on a sample of the rows;
            "random", rows drawn uniformly; or an earlier fit of as many components, to go on from.
            Stochastic steps are then counted on from those that it took; memoized visits are none,
            so after a memoized fit they begin at t = 1.
        progress_bar: Show batches, speed and the objective.
        options: See ``lc.mixtures.Options``.
        checkpoints: Where and how often to write the fit to disk, ``lc.Checkpoints(folder)``; a
            step is a batch. They hold the sums of all batches.
        resume: Go on from the newest checkpoint, if there is one, bit by bit as if the fit had not
            been interrupted. Without it the folder must have no checkpoints.
        mesh: Devices of this process, ``jax.make_mesh(sizes, names)``, over all of which the rows
            of each batch are spread; they then sum O(K P) numbers. None for one device.

    Returns:
        A ``MixtureFit``. Its ``bounds`` are, for "memoized", the objective at the end of each pass;
        for "stochastic", the mean over a pass of estimates from its batches.

    Raises:
        ValueError: If a number is out of range, a batch is empty or has no finite row, or batches
            change from pass to pass, or a checkpoint is of other data or arguments.
        TypeError: If ``x`` is an iterator that can be read only once.
        FloatingPointError: If a component loses its posterior, as by a covariance that is no longer
            positive definite; the message names it.

    Warns:
        RuntimeWarning: If components are so far from the prior's ``loc`` that rounding has taken
            some per cent of their covariances.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import numpyro.distributions as dist
        >>> import numpyro_largecat as lc
        >>> loc = jnp.array([[-8.0, 0], [0, 8], [8, 0]])
        >>> x = dist.Normal(loc, 1).sample(jax.random.key(0), (200,)).reshape(-1, 2)
        >>> family = lc.mixtures.GaussianFamily(x.mean(0), jnp.eye(2))
        >>> fit = lc.fit_mixture(
        ...     jax.random.key(1), x, 3, family, num_passes=5, batch_size=300, progress_bar=False
        ... )
        >>> sorted(fit.components().mean.round().astype(int).tolist())
        [[-8, 0], [0, 8], [8, 0]]
        >>> fit.mixing().probs.round(2).tolist()
        [0.33, 0.33, 0.33]

    References:
        Hughes and Sudderth, Fast Learning of Clusters and Topics via Sparse Posteriors, 2016,
        arXiv:1609.07521, Eqs. 3 to 8 and section 3.4.
    """
    check_key(rng_key)
    mixing = DirichletMixing() if mixing is None else mixing
    _check_kinds(x, family, mixing, options)
    check_one_of("objective", objective, ("variational", "map"))
    check_one_of("method", method, ("memoized", "stochastic"))
    num_components = check_count("num_components", num_components, 1)
    active = check_num_active(num_active, num_components, "components")
    num_passes = check_count("num_passes", num_passes, 1)
    devices = mesh_of_one_process(mesh)
    goes_on = has_checkpoint(checkpoints, resume, KIND)
    with attach_result():
        batch_key, seed_key = jax.random.split(rng_key)
        rng = numpy_generator(batch_key)
        stream = RowStream(x, batch_size, rng)
        look = look_at(stream, family, num_candidates(num_components), rng)
        model = Model(family, mixing, objective, active, look, devices)
        first = _start_statistics(seed_key, start, family, num_components, look.sample)
        learning = Learning(
            model,
            first,
            stream,
            batch_key,
            method,
            num_passes,
            options,
            num_before=start.num_steps if isinstance(start, MixtureFit) else 0,
            settings=settings_of(rng_key, model, first, method, options),
            reached=Step(first),
            bounds=[],
        )
        if goes_on:
            assert checkpoints is not None
            learning.go_on(checkpoints)
    so_far, to_write, num_done = learning.so_far, learning.to_write, learning.num_done
    steps, total = learning.steps(), learning.total
    with (
        fit_in_progress(checkpoints, KIND, so_far, to_write, num_done) as writer,
        bar_of(steps, total=total, initial=num_done, disable=not progress_bar, unit="batch") as bar,
    ):
        for step in bar:
            learning.take(step)
            if np.isfinite(step.bound):
                bar.set_postfix_str(
                    f"objective per row {step.bound / look.num_rows:.6g}", refresh=False
                )
            writer.after_steps(learning.num_done)
        fit = learning.fit()
    _warn_of_rounding(fit)
    return fit


def _warn_of_rounding(fit: MixtureFit) -> None:
    """Warn of components of which rounding has taken some per cent."""
    with jax.enable_x64(True):
        natural = fit.family.prior() + fit.statistics
        left = np.asarray(fit.family.share_left(natural))
    bad = left < LEAST_LEFT * np.finfo(fit.dtype).eps
    if bad.any():
        k = int(np.argmin(left))
        warnings.warn(
            f"{int(bad.sum())} components are so far from the `loc` of the prior, component {k} "
            f"{left[k] ** -0.5:.0f} of its standard deviations, that their covariances are wrong "
            f"by some per cent or more in {fit.dtype}. Enable 64 bits, "
            '`jax.config.update("jax_enable_x64", True)`, before the fit.',
            RuntimeWarning,
            stacklevel=3,
        )


def _start_statistics(
    rng_key: Array,
    start: Start | MixtureFit,
    family: ConjugateFamily,
    num_components: int,
    rows: np.ndarray,
) -> Statistics:
    """Statistics before the first batch: of some ``rows``, or of an earlier fit."""
    if not isinstance(start, MixtureFit):
        return seed_statistics(rng_key, family, rows, num_components, start)
    if start.num_components != num_components:
        raise ValueError(
            f"`start` must have {num_components} components too; got {start.num_components}."
        )
    with jax.enable_x64(True):
        row = jnp.asarray(rows[:1], jnp.float64)
        old, new = (np.asarray(f.features(row)) for f in (start.family, family))
    if old.shape != new.shape or not np.allclose(old, new):
        raise ValueError(
            "`start` must be a fit whose family has the same features, such as a GaussianFamily "
            f"with the same `loc`; got {start.family!r}, for {family!r}"
            f"{_differing(start.family, family)}."
        )
    return Statistics(start.counts, start.statistics)


def _differing(old: ConjugateFamily, new: ConjugateFamily) -> str:
    """The names of hyperparameters that differ, in words."""
    before = vars(old)
    names = [n for n, x in vars(new).items() if fingerprint(before.get(n)) != fingerprint(x)]
    return f", with another {', '.join(f'`{name}`' for name in names)}" if names else ""


def _check_kinds(x: Any, family: Any, mixing: Any, options: Any) -> None:
    if not is_concrete(x):
        raise TypeError("`x` must be rows; got a tracer. Call `fit_mixture` outside `jit`.")
    families = "a ConjugateFamily, such as lc.mixtures.GaussianFamily(loc, covariance)"
    check_kind("family", family, ConjugateFamily, families)
    check_kind(
        "mixing", mixing, MixingPrior, "a MixingPrior, such as lc.mixtures.DirichletMixing(1)"
    )
    check_kind("options", options, Options, "lc.mixtures.Options(...)")
