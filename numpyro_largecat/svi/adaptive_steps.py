# SPDX-License-Identifier: Apache-2.0
"""The optimiser of Augment & Reduce, whose steps shrink with the visits of each row."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from numpyro_largecat._checks import check_interval


class StepsOfElements(NamedTuple):
    """How often steps were taken."""

    num_steps: Array  # (), steps of the fit
    visits: Any  # steps that each element has seen, like the parameters


def adaptive_steps(step_size: float = 0.02) -> optax.GradientTransformation:
    r"""Step sizes that fall with the steps of each element and with its own gradients.

    .. math:: \theta \leftarrow \theta - \rho\, t^{-1/2} \, \frac{g_t}{1 + \sqrt{s_t}},
              \qquad s_t = 0.1 \, g_t^2 + 0.9 \, s_{t-1},

    where rho falls by the factor 0.9 every 2000 steps of the fit, and t counts the steps that the
    element has seen: with all rows in each step, the steps of the fit. It is meant for gradients of
    a sum over all rows of the data, as every ELBO gives them, for which sqrt(s) is far above 1 at
    first. After some 50,000 steps hardly anything moves.

    Cost: two numbers kept for each parameter.

    Args:
        step_size: rho of the first 2000 steps, above 0 and finite.

    Raises:
        ValueError: If ``step_size`` is not above 0 and finite.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_largecat as lc
        >>> optimiser = lc.adaptive_steps(0.02)
        >>> state = optimiser.init(jnp.zeros(1))
        >>> step, state = optimiser.update(jnp.array([1000.0]), state)
        >>> step.round(4).tolist()  # 0.02 * 1000 / (1 + sqrt(0.1) * 1000)
        [-0.0630...]

    References:
        Kucukelbir, Tran, Ranganath, Gelman and Blei, Automatic Differentiation Variational
        Inference, JMLR 2017, Eq. 10 and 11; Ruiz et al., Augment and Reduce, ICML 2018, section 4.
    """
    check_interval("step_size", step_size, "(0, inf)")

    by_gradients = optax.scale_by_rms(decay=0.9, eps=1.0, eps_in_sqrt=False)
    return optax.chain(by_gradients, _scale_by_steps(step_size))


def _scale_by_steps(step_size: float) -> optax.GradientTransformation:
    def init(params: Any) -> StepsOfElements:
        return StepsOfElements(jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, params))

    def update(
        scaled: Any, state: StepsOfElements, params: Any = None
    ) -> tuple[Any, StepsOfElements]:
        del params
        rate = step_size * 0.9 ** (state.num_steps // 2000)
        visits = jax.tree.map(lambda v: v + 1, state.visits)
        steps = jax.tree.map(lambda g, v: -rate * v**-0.5 * g, scaled, visits)
        return steps, StepsOfElements(state.num_steps + 1, visits)

    return optax.GradientTransformation(init, update)
