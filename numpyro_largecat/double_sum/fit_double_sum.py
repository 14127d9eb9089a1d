# SPDX-License-Identifier: Apache-2.0
"""Fit the weights of a linear softmax by tiny unbiased steps, in one compiled loop."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

from numpyro_largecat._checks import as_ids, check_count, check_in_range, check_integers
from numpyro_largecat._result_so_far import attach_result, held_signals
from numpyro_largecat.data.sparse_rows import SparseRows
from numpyro_largecat.double_sum.feature_rows import (
    FeatureRows,
    PaddedRows,
    dense_rows,
    padded_rows,
    take_one,
)
from numpyro_largecat.double_sum.rules import (
    DoubleSumRule,
    ImplicitSGD,
    Move,
    Pair,
    Radii,
    UMax,
    step_sizes,
)
from numpyro_largecat.ops.double_sum.fixed_batches import (
    FixedBatches,
    batch_touch_probability,
    draw_other_classes,
    fixed_batches,
)
from numpyro_largecat.ops.double_sum.implicit_batch import implicit_batch_step
from numpyro_largecat.ops.subsampling import draw_integers

LARGEST_RESIDUAL = 1e-2  # of a minibatch, relative to its step, without a warning
LOSS_ENTRIES = 2**22  # utilities that are held at once where the loss is evaluated


class DoubleSumFit(NamedTuple):
    """What ``fit_double_sum`` returns.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import numpyro_largecat as lc
        >>> rule = lc.ImplicitSGD(1.0)
        >>> fit = lc.fit_double_sum(jax.random.key(0), jnp.eye(3), jnp.arange(3), 3, rule)
        >>> fit.w.shape, fit.u.shape, fit.losses
        ((3, 3), (3,), None)
    """

    w: Array  # (K, D), weights
    u: Array  # (N,), local variable of each observation
    losses: Array | None  # (num_epochs,), penalised log-loss per observation, where asked for


def fit_double_sum(
    rng_key: Array,
    x: ArrayLike | SparseRows,
    y: ArrayLike,
    num_categories: int,
    rule: DoubleSumRule,
    *,
    num_epochs: int = 50,
    batch_size: int = 1,
    num_sampled: int = 1,
    ridge: float = 0.0,
    record_losses: bool = False,
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

    An epoch visits each observation once, in a random order. Utilities must be ``x @ w.T``; for an
    intercept add a column of ones to x, and for other utilities use ``SubsampledSVI``.

    What is raised during the fit, also ``KeyboardInterrupt``, has the fit after the last good
    epoch as its attribute ``result_so_far``.

    Cost: O(D) time per step (O(P) for sparse rows without a ridge; O(B (B + S) D) for a minibatch
    of B with S sampled classes, and the solver's products), and memory for w and u twice, so that
    an epoch which fails leaves the one before. One loop is compiled for each form of rule, whatever
    its step size. Minibatches keep a second copy of x, in their order. A recorded loss costs
    O(N K D).

    Args:
        rng_key: A JAX random key.
        x: Features, shape (N, D), or ``SparseRows``. Rows of norm 1 make step sizes comparable.
        y: Labels, integers in [0, K), shape (N,).
        num_categories: Number of classes K, at least 2.
        rule: ``ImplicitSGD(step_size)``, ``UMax(step_size)`` or ``Vanilla(step_size)``. A step size
            is that of the mean over the N observations, N times the paper's: 1 is a good start for
            implicit steps and rows of norm 1, which move the gap of two utilities by about 2. A
            minibatch moves its rows once for ``batch_size`` observations, so give it a step size
            that many times as large.
        num_epochs: Number of epochs, at least 1.
        batch_size: Observations in a step, in [1, N]; above 1 for ``ImplicitSGD`` only.
        num_sampled: Other classes in a step, in [1, K - batch_size]; above 1 likewise.
        ridge: Precision of the weights' prior, at least 0.
        record_losses: Evaluate -L / N on all classes after each epoch.

    Returns:
        A ``DoubleSumFit``; ``w`` and ``u`` have the float type of ``x``.

    Raises:
        ValueError: If shapes do not match, ``x`` is not finite, a label is out of range, ``ridge``
            is negative, or a step size is.
        TypeError: If labels are not integers, ``x`` is a function (utilities must be linear), or
            ``rule`` is not one of the double sum.
        FloatingPointError: If the weights are no longer finite after an epoch.

    Warns:
        RuntimeWarning: If the solver of a minibatch stopped far from the solution, as it may in
            float32 at utilities or rates of several hundred.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import numpyro_largecat as lc
        >>> x, y = jnp.eye(4)[jnp.arange(200) % 4], jnp.arange(200) % 4
        >>> fit = lc.fit_double_sum(jax.random.key(0), x, y, 4, lc.ImplicitSGD(1.0), num_epochs=5)
        >>> (x @ fit.w.T).argmax(1)[:6].tolist()
        [0, 1, 2, 3, 0, 1]

    References:
        Unbiased scalable softmax optimization, Eqs. 2, 5 and 6 (whose beta lacks the inverse of
        K - 1), Algorithm 1.
    """
    features, num_features, y = _check_data(x, y, num_categories)
    num_epochs = check_count("num_epochs", num_epochs, 1)
    if not 0 <= ridge < math.inf:
        raise ValueError(f"`ridge` must be finite and at least 0, a precision; got {ridge}.")
    if not isinstance(rule, DoubleSumRule):
        raise TypeError(
            "`rule` must be a rule of the double sum, such as `lc.ImplicitSGD(1.0)`; got "
            f"{rule!r} of type {type(rule).__name__}."
        )
    is_pair = batch_size == num_sampled == 1
    _check_batches(rule, len(y), num_categories, batch_size, num_sampled)
    data = _collect(features, y, num_categories, rule, ridge)
    if not is_pair:
        rng_key, batch_key = jax.random.split(rng_key)
        batches = fixed_batches(batch_key, y, batch_size=batch_size, num_categories=num_categories)
        betas = 1 / batch_touch_probability(
            batches, num_sampled=num_sampled, num_categories=num_categories
        )
        if ridge:
            data = data._replace(penalties=ridge / len(y) * betas.astype(data.log_others.dtype))
        x_batches = features.take_batches(batches.rows)
    sizes = step_sizes(rule.step_size, num_epochs)
    kernel = replace(rule, step_size=1.0)  # compiled for any size
    dtype = data.squared_norms.dtype
    w = jnp.zeros((num_categories, num_features), dtype)
    u = jnp.full(y.shape if is_pair else batches.rows.shape, math.log(num_categories), dtype)
    losses: list[Array] = []
    num_done = 0

    def fit() -> DoubleSumFit:
        by_row = u if is_pair else jnp.zeros(y.shape, dtype).at[batches.rows].set(u, mode="drop")
        return DoubleSumFit(w, by_row, jnp.array(losses) if record_losses else None)

    with attach_result(lambda: (fit(), f"{num_done} of {num_epochs} epochs")):
        for epoch, epoch_key in enumerate(jax.random.split(rng_key, num_epochs)):
            # Nothing is donated: an epoch that is interrupted or overflows leaves the last one.
            size = jnp.asarray(sizes[epoch], dtype)
            if is_pair:
                new_w, new_u = _run_epoch(w, u, epoch_key, data, size, rule=kernel)
            else:
                new_w, new_u, residual = _run_batches(
                    w, u, epoch_key, data, batches, x_batches, size, num_sampled=num_sampled
                )
                _warn_of_residual(float(residual), epoch)
            _check_weights(new_w, new_u, epoch, rule)
            new_losses = losses
            if record_losses:
                loss = _log_loss(features, y, new_w)
                new_losses = [*losses, loss + ridge / (2 * len(y)) * jnp.vdot(new_w, new_w)]
            with held_signals():
                w, u, losses, num_done = new_w, new_u, new_losses, epoch + 1
        return fit()


class _Data(NamedTuple):
    """What every step reads from."""

    features: FeatureRows
    y: Array  # (N,)
    squared_norms: Array  # (N,), of the rows of x
    log_others: Array  # log(K - 1)
    penalties: Array | None  # (K,), ridge * beta / N, None without a ridge
    radii: Radii | None  # for U-max


def _collect(
    features: FeatureRows, y: Array, num_categories: int, rule: DoubleSumRule, ridge: float
) -> _Data:
    squared_norms = features.squared_norms()
    dtype = squared_norms.dtype
    radii = None
    if isinstance(rule, UMax):
        longest = math.sqrt(float(squared_norms.max()))
        radii = rule.radii(len(y), num_categories, ridge, longest)
    betas = ridge / len(y) * inverse_touch_probability(y, num_categories).astype(dtype)
    log_others = jnp.asarray(math.log(num_categories - 1), dtype)
    return _Data(features, y, squared_norms, log_others, betas if ridge else None, radii)


def inverse_touch_probability(y: Array, num_categories: int) -> Array:
    """Beta of Eq. 6: one over the probability that a step touches the row of each class, (K,)."""
    counts = jnp.bincount(y, length=num_categories)
    return len(y) / (counts + (len(y) - counts) / (num_categories - 1))


@partial(jax.jit, static_argnames="rule")
def _run_epoch(
    w: Array, u: Array, rng_key: Array, data: _Data, step_size: Array, *, rule: DoubleSumRule
) -> tuple[Array, Array]:
    """Visit every observation once, in a random order."""
    row_key, class_key = jax.random.split(rng_key)
    rows = jax.random.permutation(row_key, u.shape[0])
    labels = data.y[rows]
    others = draw_integers(class_key, len(rows), jnp.asarray(w.shape[0] - 1))
    others += others >= labels

    def step(tables: tuple[Array, Array], draw: Any) -> tuple[tuple[Array, Array], None]:
        return _step(tables, draw, data, step_size, rule), None

    tables, _ = lax.scan(step, (w, u), (rows, labels, others))
    return tables


def _step(
    tables: tuple[Array, Array],
    draw: tuple[Array, Array, Array],
    data: _Data,
    step_size: Array,
    rule: DoubleSumRule,
) -> tuple[Array, Array]:
    """Move w[y], w[k] and u[i], for a draw of (i, y, k)."""
    (w, u), (i, y, k) = tables, draw
    x, squared_norm = data.features.take(i), data.squared_norms[i]
    penalties = data.penalties
    none = jnp.zeros_like(step_size)
    pair = Pair(
        u=u[i],
        utility_y=x.product(w, y),
        utility_k=x.product(w, k),
        squared_norm=squared_norm,
        rate=step_size,
        log_others=data.log_others,
        penalty_y=none if penalties is None else step_size * penalties[y],
        penalty_k=none if penalties is None else step_size * penalties[k],
    )
    move = rule.move(pair)
    if data.radii is not None:
        move = move._replace(u=jnp.clip(move.u, data.radii.u_low, data.radii.u_high))
    if data.radii is not None and penalties is not None:
        move = _project(move, pair, w, y, k, data.radii.w)
    # No number is above infinity, but XLA does not know. So the first write waits for all reads of
    # the table, and it can be made in place.
    y += (jnp.asarray(sum(move)) > jnp.inf).astype(y.dtype)
    keep_y, keep_k = (None, None) if penalties is None else (move.keep_y, move.keep_k)
    w = x.add(w, y, keep_y, move.add_y)
    w = x.add(w, k, keep_k, move.add_k)
    return w, u.at[i].set(move.u)


def _project(move: Move, pair: Pair, w: Array, y: Array, k: Array, radius: float) -> Move:
    """Shorten the new rows to ``radius``; their norms follow from those of the old ones."""

    def share(keep: Array, add: Array, utility: Array, row: Array) -> Array:
        squares = keep**2 * (row @ row) + 2 * keep * add * utility + add**2 * pair.squared_norm
        return radius / jnp.sqrt(jnp.maximum(squares, radius**2))

    share_y = share(move.keep_y, move.add_y, pair.utility_y, take_one(w, y))
    share_k = share(move.keep_k, move.add_k, pair.utility_k, take_one(w, k))
    return Move(
        move.u,
        share_y * move.keep_y,
        share_y * move.add_y,
        share_k * move.keep_k,
        share_k * move.add_k,
    )


@partial(jax.jit, static_argnames="num_sampled")
def _run_batches(
    w: Array,
    u: Array,
    rng_key: Array,
    data: _Data,
    batches: FixedBatches,
    x_batches: FeatureRows,
    step_size: Array,
    *,
    num_sampled: int,
) -> tuple[Array, Array, Array]:
    """Take an implicit step on every minibatch, in a random order; also the largest residual.

    Both u and ``x_batches`` have leading axes (J, B): the rows of a minibatch lie side by side,
    which takes half the time of gathering them from all over memory.
    """
    order_key, class_key = jax.random.split(rng_key)
    others = draw_other_classes(
        class_key, batches, num_sampled=num_sampled, num_categories=w.shape[0]
    )
    order = jax.random.permutation(order_key, len(others))

    def step(tables: tuple[Array, Array], j: Array) -> tuple[tuple[Array, Array], Array]:
        batch, x = jax.tree.map(lambda a: a[j], (batches, x_batches))
        return _batch_step(tables, j, batch, x, others[j], data, step_size)

    (w, u), residuals = lax.scan(step, (w, u), order)
    return w, u, residuals.max()


def _batch_step(
    tables: tuple[Array, Array],
    j: Array,
    batch: FixedBatches,
    rows: FeatureRows,
    others: Array,
    data: _Data,
    step_size: Array,
) -> tuple[tuple[Array, Array], Array]:
    """Move the rows of minibatch j and its u; also the residual of its step."""
    w, u = tables
    num_categories, num_rows, num_batches = w.shape[0], len(data.y), len(u)
    x = rows.dense(w.shape[1])
    classes = jnp.concatenate([batch.labels, others])
    weight = (num_categories - batch.num_labels) / len(others)
    is_label = (batch.labels < num_categories).astype(w.dtype)
    weights = jnp.concatenate([is_label, jnp.full(len(others), weight, w.dtype)])
    keep = jnp.ones_like(weights)
    if data.penalties is not None:
        keep = 1 / (1 + step_size * data.penalties.at[classes].get(mode="clip"))
    shrunk = keep[:, None] * w.at[classes].get(mode="clip")
    rates = jnp.where(batch.rows < num_rows, step_size * num_batches / num_rows, 0)
    utilities, gram = _matmul(x, shrunk.T), _matmul(x, x.T)
    step = implicit_batch_step(u[j], utilities, gram, batch.label_rows, weights, keep, rates)
    moved = shrunk - keep[:, None] * _matmul(step.forces.T, x)
    w = w.at[classes].set(moved, mode="drop", unique_indices=True)
    return (w, u.at[j].set(step.u)), step.residual


_matmul = partial(jnp.matmul, precision=lax.Precision.HIGHEST)  # as the solver's tolerance needs


@jax.jit
def _log_loss(features: FeatureRows, y: Array, w: Array) -> Array:
    """Mean over the observations of -log p(y | x), a few of them at a time."""

    def one_chunk(rows: tuple[FeatureRows, Array]) -> Array:
        utilities = rows[0].utilities(w)
        own = jnp.take_along_axis(utilities, rows[1][:, None], axis=1)[:, 0]
        return jax.nn.logsumexp(utilities, axis=1) - own

    width = w.shape[0] * (features[1].shape[1] if isinstance(features, PaddedRows) else 1)
    size = max(1, min(len(y), LOSS_ENTRIES // width))
    whole = len(y) - len(y) % size
    chunks = jax.tree.map(lambda a: a[:whole].reshape(-1, size, *a.shape[1:]), (features, y))
    total = lax.map(one_chunk, chunks).sum()
    rest = jax.tree.map(lambda a: a[whole:], (features, y))
    return (total + one_chunk(rest).sum()) / len(y)


def _check_batches(
    rule: DoubleSumRule, num_rows: int, num_categories: int, batch_size: Any, num_sampled: Any
) -> None:
    check_count("batch_size", batch_size, 1)
    check_count("num_sampled", num_sampled, 1)
    if batch_size > num_rows or batch_size + num_sampled > num_categories:
        raise ValueError(
            f"`batch_size` must be at most the {num_rows} observations, and `batch_size` + "
            f"`num_sampled` at most the {num_categories} classes; got {batch_size} and "
            f"{num_sampled}. With so few classes, take a smaller batch."
        )
    if (batch_size, num_sampled) != (1, 1) and not isinstance(rule, ImplicitSGD):
        raise ValueError(
            f"minibatches need `ImplicitSGD`; got {rule} with batch_size={batch_size} and "
            f"num_sampled={num_sampled}. Leave both at 1."
        )


def _check_weights(w: Array, u: Array, epoch: int, rule: DoubleSumRule) -> None:
    if not bool(jnp.isfinite(jnp.vdot(w, w)) & jnp.isfinite(u).all()):
        raise FloatingPointError(
            f"the weights or local variables overflowed in epoch {epoch} of {rule}. Take a smaller "
            "`step_size`, or `ImplicitSGD`, which cannot overflow."
        )


def _warn_of_residual(residual: float, epoch: int) -> None:
    if not residual <= LARGEST_RESIDUAL:
        warnings.warn(
            f"a minibatch of epoch {epoch} was not solved: its step is off by {residual:.2g} of "
            "its length. Take a smaller `step_size`, rows of norm 1, float64, or `batch_size=1`.",
            RuntimeWarning,
            stacklevel=3,
        )


def _check_data(x: Any, y: Any, num_categories: Any) -> tuple[FeatureRows, int, Array]:
    check_count("num_categories", num_categories, 2)
    features: FeatureRows
    if isinstance(x, SparseRows):
        features, num_features = padded_rows(x), x.num_features
        num_rows = len(features.values)
    else:
        if callable(x):
            raise TypeError(
                "`x` must be an array or SparseRows, since the utilities are `x @ w.T`; got a "
                "function. For a network or other utilities that are not linear use "
                "`lc.SubsampledSVI`, with the same rule as `update_rule=` of `lc.sample_choice`."
            )
        if hasattr(x, "tocsr"):
            raise TypeError(
                f"`x` must be an array or SparseRows; got {type(x).__name__}. Convert it with "
                "`lc.SparseRows.from_scipy(x)`."
            )
        features = dense_rows(x)
        num_rows, num_features = features.x.shape
    check_integers("y", y)
    if np.shape(y) != (num_rows,):
        raise ValueError(
            f"`y` must hold one label for each of the {num_rows} rows of `x`, shape ({num_rows},); "
            f"got shape {np.shape(y)}."
        )
    check_in_range("`y`", y, num_categories, "labels")
    return features, num_features, as_ids(y)
