# SPDX-License-Identifier: Apache-2.0
"""Averages of the iterates of a fit, row by row."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from numpyro_largecat._checks import check_count
from numpyro_largecat.svi.narrow_tables import widen
from numpyro_largecat.svi.state import SubsampledSVIState
from numpyro_largecat.svi.subsampled_svi import SubsampledSVI


class AveragedState(NamedTuple):
    """State of ``average_iterates``."""

    inner: Any  # of the optimiser
    average: Any  # like the parameters
    visits: Any  # steps that each element has seen, like the parameters


def average_iterates(
    optimiser: optax.GradientTransformation, burn_in: int = 0
) -> optax.GradientTransformation:
    r"""Average what an optimiser visits, after Polyak: the noise of its last steps averages out.

    .. math:: \bar\theta_v = \frac{1}{v - b} \sum_{s=b+1}^{v} \theta_s

    over the visits of each element after the first b, its last value until then. An element is
    visited in the steps that touch its row, so that a rare class keeps its few values, and no
    step costs more than its rows. The fit itself is the same; ``averaged_params`` reads the
    averages, of unconstrained parameters. Parameters that an update rule moves are not averaged.

    Cost: two numbers more kept for each parameter.

    Args:
        optimiser: An elementwise optax optimiser.
        burn_in: Visits of an element that are left out, at least 0.

    Raises:
        ValueError: If ``burn_in`` is negative.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> import numpyro_largecat as lc
        >>> optimiser = lc.average_iterates(optax.sgd(1.0))
        >>> params = jnp.zeros(1)
        >>> state = optimiser.init(params)
        >>> for grad in (-1.0, -3.0):  # visits 1 and 4
        ...     step, state = optimiser.update(jnp.array([grad]), state, params)
        ...     params = optax.apply_updates(params, step)
        >>> state.average.tolist()
        [2.5]

    References:
        Polyak and Juditsky, Acceleration of stochastic approximation by averaging, 1992.
    """
    burn_in = check_count("burn_in", burn_in, 0)

    def init(params: Any) -> AveragedState:
        visits = jax.tree.map(lambda p: jnp.zeros(jnp.shape(p), jnp.int32), params)
        return AveragedState(optimiser.init(params), jax.tree.map(jnp.array, params), visits)

    def update(
        grads: Any, state: AveragedState, params: Any = None, **extra: Any
    ) -> tuple[Any, AveragedState]:
        if params is None:
            raise ValueError("`average_iterates` needs the parameters: `update(g, state, params)`.")
        steps, inner = optax.with_extra_args_support(optimiser).update(
            grads, state.inner, params, **extra
        )
        visits = jax.tree.map(lambda v: v + 1, state.visits)

        def mean(average: Array, param: Array, step: Array, visits: Array) -> Array:
            number = jnp.maximum(visits - burn_in, 1)
            return average + (param + step - average) / number

        average = jax.tree.map(mean, state.average, params, steps, visits)
        return steps, AveragedState(inner, average, visits)

    return optax.GradientTransformationExtraArgs(init, update)


def averaged_params(svi: SubsampledSVI, state: SubsampledSVIState) -> dict[str, Any]:
    """Parameters with the averages of ``average_iterates`` in the place of the last iterates.

    Cost: O(table) time and memory.

    Args:
        svi: The ``SubsampledSVI`` of the fit, whose optimiser is ``average_iterates(...)``.
        state: Its state, such as ``result.state``.

    Raises:
        ValueError: If the optimiser keeps no averages.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, optax
        >>> import numpyro_largecat as lc
        >>> from numpyro.infer import Trace_ELBO
        >>> def model():
        ...     a = numpyro.param("a", 0.0)
        ...     numpyro.factor("loss", -((a - 1) ** 2))
        >>> optimiser = lc.average_iterates(optax.adam(0.1), burn_in=300)
        >>> svi = lc.SubsampledSVI(model, lambda: None, optimiser, Trace_ELBO())
        >>> result = svi.run(jax.random.key(0), 400, progress_bar=False)
        >>> lc.averaged_params(svi, result.state)["a"].round(2).item()
        1.0
    """
    params = svi.get_params(state)
    averages, computed = (_averages(s) for s in (state.optim_state, svi.plan.computed))
    return params | svi.plan.constrain(widen(averages, computed))


def _averages(optim_state: Any) -> dict[str, Any]:
    found = optax.tree_utils.tree_get_all_with_path(optim_state, "average")
    averages = [value for path, value in found if isinstance(value, dict)]
    if len(averages) != 1:
        raise ValueError(
            "the optimiser of this fit keeps no averages; use `lc.average_iterates(...)` for that."
        )
    return averages[0]
