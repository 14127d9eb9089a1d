# SPDX-License-Identifier: Apache-2.0
"""How much of the gradient of each parameter is signal, and how much the noise of its draws."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from numpyro_largecat.handlers.closed_over_arrays import compiled
from numpyro_largecat.ops.table_rows import add_rows
from numpyro_largecat.reading.bound_fit import BoundFit
from numpyro_largecat.reading.findings import Finding
from numpyro_largecat.svi.plan import Plan
from numpyro_largecat.svi.step import gather_step

LEAST_SIGNAL = 0.1  # of a gradient that still has far to go


def gradient_signals(
    fit: BoundFit, plan: Plan, state: Any, drifting: set[str], keys: Array
) -> list[Finding]:
    """Squared norm of the mean gradient over the variance, for each parameter, least first.

    Without bias: the mean of the products of gradients of different draws, over the mean square
    less this.
    """
    num = len(keys)
    findings = []
    for name, (of_sum, mean_square) in _squares(fit, plan, state, keys).items():
        signal = (of_sum - num * mean_square) / (num * (num - 1))  # mean of g_i @ g_j, i != j
        ratio = signal_to_noise(signal, mean_square)
        is_lost = name in drifting and ratio < LEAST_SIGNAL
        advice = "raise batch size, num_sampled or num_particles" if is_lost else ""
        advice = "it is not finite in some step: lower the rate" if math.isnan(ratio) else advice
        name = f"gradient signal to noise, {name}"
        findings.append(Finding(name, ratio, advice=advice, group="gradient signal to noise"))
    return sorted(findings, key=lambda finding: (not math.isnan(finding.value), finding.value))


def signal_to_noise(signal: float, mean_square: float) -> float:
    """Signal by noise: NaN if not known, 0 where there is no gradient, infinite without noise."""
    noise = mean_square - signal
    if mean_square == 0:
        return 0.0
    if not math.isfinite(noise):
        return math.nan
    return signal / noise if noise > 1e-5 * mean_square else math.inf  # less is rounding


def _squares(fit: BoundFit, plan: Plan, state: Any, keys: Array) -> dict[str, tuple[float, float]]:
    """Of each parameter the square of the sum of its gradients, and their mean square."""
    tables = plan.optim.get_params(plan.computed)
    kwargs = {n: value for n, value in fit.kwargs.items() if n not in plan.static_kwargs}

    def add(carry: Any, key: Array) -> tuple[Any, dict[str, Array]]:
        step = gather_step(plan, state._replace(rng_key=key), fit.args, kwargs)
        grads, _ = jax.grad(step.loss, has_aux=True)(step.params)
        squares = {name: _square(grad) for name, grad in grads.items()}
        return {n: _sum_with(carry[n], grads[n], step.rows.get(n)) for n in grads}, squares

    def squares(keys: Array) -> dict[str, tuple[Array, Array]]:
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tables)
        sums, squares = lax.scan(add, plan.pinned_params(zeros), keys)
        return {name: (_square(sums[name]), squares[name].mean()) for name in sums}

    found = compiled(squares, runs_once=True)(keys)
    return {name: (float(of_sum), float(mean)) for name, (of_sum, mean) in found.items()}


def _square(tree: Any) -> Array:
    return jnp.stack([jnp.vdot(leaf, leaf) for leaf in jax.tree.leaves(tree)]).sum()


def _sum_with(table: Any, grads: Any, rows: dict[int, Array] | None) -> Any:
    if rows is None:
        return jax.tree.map(jnp.add, table, grads)
    return add_rows(table, rows, grads)
