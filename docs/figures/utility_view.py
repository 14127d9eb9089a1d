# SPDX-License-Identifier: Apache-2.0
"""Draw the figure of docs/utility_view.md: ``python docs/figures/utility_view.py``."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro.distributions as dist
from jax import Array, lax
from matplotlib.axes import Axes

import numpyro_largecat as lc
from numpyro_largecat.choices.error_families import FAMILIES
from numpyro_largecat.ops.gaussian_error import log_joint

UTILITIES = jnp.array([1.0, 0.2, -0.5, 1.4])
CHOSEN = 0
ERRORS = jnp.linspace(-3.0, 7.0, 500)


def draw_noisy_utilities(axes: Axes) -> None:
    """Density of each class's utility plus Gumbel error."""
    x = jnp.linspace(-3.5, 6.0, 400)
    for k, utility in enumerate(UTILITIES.tolist()):
        density = np.exp(FAMILIES["gumbel"].log_prob(x - utility))
        (line,) = axes.plot(x, density, label=f"class {k}")
        axes.axvline(utility, color=line.get_color(), linestyle=":", linewidth=1)
    axes.set(
        title="utility + error; the highest is chosen",
        xlabel=r"$\psi_k + \varepsilon_k$",
    )
    axes.legend(frameon=False)


def draw_posteriors(axes: Axes) -> None:
    """Posterior of the chosen class's error, and the q that ``sample_choice`` keeps."""
    for noise, color in (("gumbel", "C0"), ("normal", "C1"), ("logistic", "C2")):
        distances = UTILITIES[CHOSEN] - UTILITIES
        weights = (jnp.arange(len(UTILITIES)) != CHOSEN).astype(float)
        family = FAMILIES[noise]
        joint = log_joint(ERRORS, distances, weights, family.log_prob, family.log_cdf)
        posterior = np.exp(joint - joint.max())
        posterior /= np.trapezoid(posterior, ERRORS)
        axes.plot(ERRORS, posterior, color=color, label=noise)
        log_q = log_normal_q(noise) if noise == "normal" else log_largest_q(noise)
        axes.plot(ERRORS, np.exp(log_q), color=color, linestyle="--", linewidth=1)
    axes.set(title="error of the chosen class 0, and q", xlabel=r"$\varepsilon$")
    axes.legend(frameon=False)


def log_largest_q(noise: str) -> Array:
    """Log density of the largest of exp(u) errors, at the best u."""
    u = lc.UtilityCategorical(UTILITIES, noise=noise).optimal_u(jnp.array(CHOSEN))
    family = FAMILIES[noise]
    return u + family.log_prob(ERRORS) + jnp.expm1(u) * family.log_cdf(ERRORS)


def log_normal_q(noise: str) -> Array:
    """Log density of the Gaussian with the highest bound."""
    rule = lc.update_rules.GaussianNaturalGradient()

    def derivatives(q):
        d = lc.bounds.GaussianErrorBound(
            UTILITIES, noise=noise, loc=q[0], scale=jnp.exp(-0.5 * q[1])
        )
        return d.expected_derivatives(CHOSEN)

    q = lax.fori_loop(
        0, 10, lambda _, q: rule.update(q, jnp.array(0), derivatives)[0], jnp.zeros(2)
    )
    return dist.Normal(q[0], jnp.exp(-0.5 * q[1])).log_prob(ERRORS)


def draw_bound(axes: Axes) -> None:
    """The softmax bound as a function of u, exact and on subsets of two others."""
    log_prob = float(lc.UtilityCategorical(UTILITIES).log_prob(CHOSEN))
    u = jnp.linspace(0.0, 3.5, 200)
    others = [k for k in range(len(UTILITIES)) if k != CHOSEN]
    odds = {k: float(jnp.exp(UTILITIES[k] - UTILITIES[CHOSEN])) for k in others}
    for left_out in others:
        eta = 1 + 1.5 * sum(odds[k] for k in others if k != left_out)
        axes.plot(u, 1 - u - jnp.exp(-u) * eta, color="0.7", linewidth=1)
    eta = 1 + sum(odds.values())
    axes.plot(u, 1 - u - jnp.exp(-u) * eta, color="C0", label="bound; grey: on subsets")
    axes.axhline(log_prob, color="k", linestyle="--", linewidth=1, label="exact")
    axes.plot(-log_prob, log_prob, "ko", markersize=4)
    axes.set(title="softmax bound", xlabel="$u$", ylim=(log_prob - 1.5, log_prob + 1.0))
    axes.legend(frameon=False, loc="lower right")


def main() -> None:
    """Write utility_view.png beside this file."""
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.4), layout="constrained")
    draw_noisy_utilities(axes[0])
    draw_posteriors(axes[1])
    draw_bound(axes[2])
    figure.savefig(Path(__file__).with_suffix(".png"), dpi=90)


if __name__ == "__main__":
    main()
