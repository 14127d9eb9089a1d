# SPDX-License-Identifier: Apache-2.0
"""The benchmark of unbiased steps: its shape, its rules, its tuning and its marks."""

from __future__ import annotations

import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import unbiased
from numpyro_largecat.double_sum.rules import Pair
from tests.benchmarks.test_benchmarks import run_quick

METHODS = {*unbiased.RULES, unbiased.MINIBATCH, *unbiased.SVI_METHODS}


@pytest.mark.slow
def test_unbiased(tmp_path: Path) -> None:
    """Each method has a curve, seconds and a factor; rules have speeds and losses at rates."""
    printed, records = run_quick("unbiased", tmp_path / "out.json", "--plot", str(tmp_path))
    metrics: dict[str, set[str]] = {}
    for r in records:
        metrics.setdefault(r["metric"], set()).add(r["method"])
    assert metrics["seconds"] == metrics["relative_loss"] == metrics["log_loss"] == METHODS
    assert metrics["loss_at_rate"] == set(unbiased.RULES)
    assert metrics["steps_per_second"] == metrics["observations_per_second"]
    for method in METHODS:
        curve = [r for r in records if (r["method"], r["metric"]) == (method, "log_loss")]
        assert [r["setting"]["epoch"] for r in curve] == unbiased.curve_epochs(unbiased.QUICK)
        assert 0 < curve[-1]["value"] < math.log(30)  # better than chance
    assert "Log-loss relative to Implicit SGD" in printed
    for name in ("log_loss.png", "sensitivity_quick.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def _pair(utility_y: jax.Array, utility_k: jax.Array, num_categories: int) -> Pair:
    zero = jnp.zeros(())
    log_others = jnp.log(num_categories - 1.0)
    one = jnp.ones(())
    return Pair(zero, utility_y, utility_k, one, one, log_others, zero, zero)


@pytest.mark.parametrize("method", unbiased.BIASED)
def test_biased_rules_follow_the_gradients_of_their_losses(method: str) -> None:
    """The losses as they are defined, differentiated by JAX."""
    others = 7

    def loss(utilities: jax.Array) -> jax.Array:
        y, k = utilities
        if method == "one-vs-each":
            return others * jnp.log1p(jnp.exp(k - y))
        if method == "importance sampling":
            return jnp.log(jnp.exp(y) + others * jnp.exp(k)) - y
        noise = 1 / others
        label = jnp.exp(y) / (jnp.exp(y) + noise)
        return -jnp.log(label) - jnp.log(noise / (jnp.exp(k) + noise))

    utilities = jnp.array([0.3, -0.8])
    move = unbiased.RULES[method](1.0).move(_pair(utilities[0], utilities[1], others + 1))
    moved = jnp.array([move.add_y, move.add_k])
    np.testing.assert_allclose(moved, -jax.grad(loss)(utilities), rtol=1e-5)


def test_tuning_goes_on_past_an_end() -> None:
    """The best rate is found outside the grid, and one that diverges is never taken."""
    tried = []

    def loss_of(rate: float) -> float:
        tried.append(rate)
        return math.inf if rate > 1e-4 else abs(math.log10(rate) + 5)

    assert unbiased.tune(loss_of, range(-3, 4), 3) == -5
    assert len(tried) == len(set(tried))


def test_stars_mark_what_misses_the_aim() -> None:
    """Bibtex: the paper's factor against one-vs-each is 29.03."""
    losses = dict.fromkeys(unbiased.RULES, 10.0) | {"implicit": 1.0, "one-vs-each": 30.0}
    cells = {method: unbiased.Result(1.0, [loss], 1.0) for method, loss in losses.items()}
    stars = {method for method in losses if unbiased.is_starred("bibtex", cells, method)}
    assert stars == {"NCE", "importance sampling"}
    cells["U-max"] = unbiased.Result(1.0, [0.9], 1.0)
    assert unbiased.is_starred("bibtex", cells, "implicit")
