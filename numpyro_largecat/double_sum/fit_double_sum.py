# SPDX-License-Identifier: Apache-2.0
"""Fit the weights of a linear softmax by tiny unbiased steps, in one compiled loop."""

from __future__ import annotations

from typing import Any

import jax
from jax import Array
from jax.typing import ArrayLike

from numpyro_largecat._checks import check_count, check_interval, check_key, check_kind, check_shape
from numpyro_largecat._progress_bar import progress_bar as bar_of
from numpyro_largecat._result_so_far import attach_result
from numpyro_largecat.data.checkpoints import (
    Checkpoints,
    fingerprint,
    has_checkpoint,
    read_checkpoint,
)
from numpyro_largecat.data.fit_in_progress import fit_in_progress
from numpyro_largecat.data.sparse_rows import SparseRows
from numpyro_largecat.double_sum.double_sum_fit import DoubleSumFit
from numpyro_largecat.double_sum.feature_rows import FeatureRows, check_data
from numpyro_largecat.double_sum.learning import AfterPass, Learning, Linear
from numpyro_largecat.double_sum.rules import DoubleSumRule, ImplicitSGD, step_sizes

KIND = "fit of fit_double_sum"


def fit_double_sum(
    rng_key: Array,
    x: ArrayLike | SparseRows,
    y: ArrayLike,
    num_categories: int,
    rule: DoubleSumRule,
    *,
    ridge: float = 0.0,
    num_passes: int = 50,
    batch_size: int = 1,
    num_sampled: int = 1,
    start: DoubleSumFit | None = None,
    progress_bar: bool = True,
    record_losses: bool = False,
    checkpoints: Checkpoints | None = None,
    resume: bool = False,
) -> DoubleSumFit:
    r"""Maximise the softmax likelihood with linear utilities, one observation and class at a time.

    .. math:: L(w) = \sum_{i=1}^N \Big(x_i^\top w_{y_i} - \log\sum_{k=1}^K e^{x_i^\top w_k}\Big)
              - \frac{\mathrm{ridge}}{2} \sum_{k} \|w_k\|^2

    Each step takes one observation i and one other class k, uniformly, and moves ``u[i]``, ``w[k]``
    and ``w[y[i]]`` by ``rule`` on

    .. math:: f_{ik} = N \big(u_i + e^{-u_i} + (K - 1)\, e^{x_i^\top (w_k - w_{y_i}) - u_i}\big)
              + \frac{\mathrm{ridge}}{2} \big(\beta_{y_i} \|w_{y_i}\|^2 + \beta_k \|w_k\|^2\big),

    whose mean over i and k, minimised in u, is N - L. :math:`\beta_j = N / (n_j + (N - n_j) / (K -
    1))`, with :math:`n_j` observations of class j, is the inverse of the probability that a step
    touches row j. So the optimum is the maximum of the likelihood, or with a ridge that of the
    posterior under ``Normal(0, ridge**-0.5)`` weights. It starts at w = 0, u = log K.

    **Minibatches.** With ``ImplicitSGD``, a step may take ``batch_size`` observations, all their
    labels, and ``num_sampled`` other classes with the weight (K - U) / num_sampled for U distinct
    labels. The minibatches are drawn once and stay as they are, so that the probability of each row
    is known.

    A pass visits each observation once, in a random order. Utilities must be ``x @ w.T``; for an
    intercept add a column of ones to x, and for other utilities use ``SubsampledSVI``.

    What is raised during the fit, also ``KeyboardInterrupt``, has the fit after the last good
    pass as its attribute ``result_so_far``, None where there is none yet.

    Cost: O(D) time per step (O(P) for sparse rows without a ridge; O(B (B + S) D) for a minibatch
    of B with S sampled classes, and the solver's products), and memory for w and u twice, so that
    a pass which fails leaves the one before. One loop is compiled for each form of rule, whatever
    its step size. Minibatches keep a second copy of x, in their order. A recorded loss costs
    O(N K D).

    Args:
        rng_key: A JAX random key.
        x: Features, shape (N, D), or ``SparseRows``. Rows of norm 1 make step sizes comparable.
        y: Labels, integers in [0, K), shape (N,).
        num_categories: Number of classes K, at least 2.
        rule: ``lc.double_sum.ImplicitSGD(step_size)``, ``UMax`` or ``Vanilla``. A step size is that
            of the mean over the N observations, N times the paper's: 1 is a good start for
            implicit steps and rows of norm 1, which move the gap of two utilities by about 2. A
            minibatch moves its rows once for ``batch_size`` observations, so give it a step size
            that many times as large.
        ridge: Precision of the weights' prior, at least 0.
        num_passes: Visits of each observation, at least 1.
        batch_size: Observations in a step, in [1, N]; above 1 for ``ImplicitSGD`` only.
        num_sampled: Other classes in a step, in [1, K - batch_size]; above 1 likewise.
        start: An earlier fit of the same observations, to go on from; None for w = 0, u = log K.
            Step sizes are those of the passes after its own. With the key of that fit, both
            together are one longer fit.
        progress_bar: Show passes and speed.
        record_losses: Evaluate -L / N on all classes after each pass.
        checkpoints: Where and how often to write the fit to disk, ``lc.Checkpoints(folder)``; a
            step is a pass.
        resume: Go on from the newest checkpoint, if there is one, bit by bit as if the fit had not
            been interrupted. Without it the folder must have no checkpoints.

    Returns:
        A ``DoubleSumFit``; ``w`` and ``u`` have the float type of ``x``.

    Raises:
        ValueError: If shapes do not match, ``x`` is not finite, a label is out of range, ``ridge``
            is negative, or a step size is, or a checkpoint is of other data or arguments.
        TypeError: If labels are not integers, ``x`` is a function (utilities must be linear), or
            ``rule`` is not one of the double sum.
        FloatingPointError: If the weights are no longer finite after a pass.

    Warns:
        RuntimeWarning: If the solver of a minibatch stopped far from the solution, as it may in
            float32 at utilities or rates of several hundred.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import numpyro_largecat as lc
        >>> x, y = jnp.eye(4)[jnp.arange(200) % 4], jnp.arange(200) % 4
        >>> rule = lc.double_sum.ImplicitSGD(1.0)
        >>> fit = lc.fit_double_sum(
        ...     jax.random.key(0), x, y, 4, rule, num_passes=5, progress_bar=False
        ... )
        >>> (x @ fit.w.T).argmax(1)[:6].tolist()
        [0, 1, 2, 3, 0, 1]

    References:
        Unbiased scalable softmax optimization, Eqs. 2, 5 and 6 (whose beta lacks the inverse of
        K - 1), Algorithm 1.
    """
    check_key(rng_key)
    features, num_features, y = check_data(x, y, num_categories)
    num_passes = check_count("num_passes", num_passes, 1)
    check_interval("ridge", ridge, "[0, inf)", "a precision")
    rules = "a rule of the double sum, such as `lc.double_sum.ImplicitSGD(1.0)`"
    check_kind("rule", rule, DoubleSumRule, rules)
    _check_batches(rule, len(y), num_categories, batch_size, num_sampled)
    _check_start(start, (num_categories, num_features), len(y))
    goes_on = has_checkpoint(checkpoints, resume, KIND)
    with attach_result():
        settings = {}
        if checkpoints is not None:
            how = {"ridge": ridge, "batch_size": batch_size, "num_sampled": num_sampled}
            how["record_losses"] = record_losses
            settings = _settings(rng_key, features, y, num_categories, rule, start) | how
        problem = Linear(features, y, (num_categories, num_features), rule, ridge)
        batch_key = rng_key
        if not batch_size == num_sampled == 1:
            rng_key, batch_key = jax.random.split(rng_key)
        visits = problem.visits(batch_key, batch_size, num_sampled)
        dtype = jax.eval_shape(features.squared_norms).dtype
        now = AfterPass.begin(start, problem, dtype)
        if goes_on:
            assert checkpoints is not None
            saved = read_checkpoint(checkpoints, KIND, settings, num_passes)
            now = AfterPass.of_checkpoint(saved)
        now = now._replace(u=visits.arrange(now.u))
        first = 0 if start is None else start.num_passes
        sizes = step_sizes(rule.step_size, range(first, first + num_passes))
        learning = Learning(problem, visits, rng_key, first, sizes, record_losses, settings, now)
    so_far, to_write, num_done = learning.so_far, learning.to_write, now.num_done
    left, bar_options = range(num_done, num_passes), {"initial": num_done, "unit": "pass"}
    with (
        fit_in_progress(checkpoints, KIND, so_far, to_write, num_done) as writer,
        bar_of(left, total=num_passes, disable=not progress_bar, **bar_options) as bar,
    ):
        for _ in bar:
            learning.run_pass()
            writer.after_steps(learning.now.num_done)
        return learning.fit()


def _settings(
    rng_key: Array,
    features: FeatureRows,
    y: Array,
    num_categories: int,
    rule: DoubleSumRule,
    start: DoubleSumFit | None,
) -> dict[str, Any]:
    """What must be the same in a fit that goes on, besides plain numbers."""
    return {
        "rng_key": fingerprint(rng_key),
        "data": [len(y), num_categories, fingerprint((features, y))],
        "rule": type(rule).__name__,
        "step sizes": fingerprint(step_sizes(rule.step_size, range(10))),
        "start": None if start is None else fingerprint((start.w, start.u, start.num_passes)),
    }


def _check_start(start: Any, shape: tuple[int, int], num_rows: int) -> None:
    if start is None:
        return
    check_kind("start", start, DoubleSumFit, "an earlier fit, or None")
    check_shape("weights of `start`", start.w, shape, "classes and features of this fit")
    check_shape("local variables of `start`", start.u, (num_rows,), "observations of this fit")


def _check_batches(
    rule: DoubleSumRule, num_rows: int, num_categories: int, batch_size: Any, num_sampled: Any
) -> None:
    check_count("batch_size", batch_size, 1, num_rows, "number of observations")
    if batch_size >= num_categories:
        raise ValueError(
            f"`batch_size` must be below {num_categories}, the number of classes, so that others "
            f"can be drawn; got {batch_size}."
        )
    most, of_what = num_categories - batch_size, "number of classes less `batch_size`"
    check_count("num_sampled", num_sampled, 1, most, of_what)
    if (batch_size, num_sampled) != (1, 1) and not isinstance(rule, ImplicitSGD):
        got = f"batch_size={batch_size} and num_sampled={num_sampled}"
        raise ValueError(f"minibatches need `ImplicitSGD`; got {rule} with {got}.")
