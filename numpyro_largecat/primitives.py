# SPDX-License-Identifier: Apache-2.0
"""Statements for models: an observed choice together with the local state that it needs."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpyro
from jax import Array, lax
from jax.typing import ArrayLike

from numpyro_largecat._checks import check_integers
from numpyro_largecat.distributions.utility_categorical import UtilityCategorical
from numpyro_largecat.infer.update_rules import NaturalGradient, UpdateRule
from numpyro_largecat.plates import ClassSubset, RowSubset

_DEFAULT_RULE = NaturalGradient()


def sample_choice(
    name: str,
    utilities: ArrayLike,
    *,
    classes: ClassSubset | None = None,
    rows: RowSubset | None = None,
    noise: str = "gumbel",
    update_rule: UpdateRule = _DEFAULT_RULE,
    obs: ArrayLike | None = None,
) -> Array:
    r"""Observe (or draw) a choice among K classes, and keep a local variable for each row.

    With a subsampled class plate the likelihood is the Augment & Reduce bound of
    ``UtilityCategorical`` at :math:`u_n = v_n - \psi_{n y_n}`, that is

    .. math:: \psi_{n y_n} + 1 - v_n - e^{-v_n} \sum_m w_m e^{\psi_{nm}}, \qquad
              v_n \approx \log \sum_k e^{\psi_{nk}} .

    The local variable v is the observation's log partition function. It is kept instead of u, to
    which it is equivalent at a point estimate, because the utility of the observed class is
    known in each step: when weights are drawn from a posterior, u then follows the draw, and the
    bound is tighter than at any fixed u (with u fixed, posterior standard deviations come out
    too small).

    The statement declares v as the parameter ``name + "_log_partition"`` inside the data plate,
    one entry for each of the N rows; ``SubsampledSVI`` moves the entries of the minibatch by
    ``update_rule``, before it takes the gradient of everything else. (Other inference treats v as
    any parameter.) With all classes the likelihood is exact and nothing is kept, so the same
    model serves for training, exact or subsampled, and for prediction.

    Shapes: the choice has the shape of ``obs``, or ``utilities.shape[:-1]``.

    Cost: O(M) per observation and step; one float and the rule's state kept for each of N rows.

    Args:
        name: Name of the site.
        utilities: Mean utilities in nats, shape (..., M) for the M rows of ``classes``.
        classes: What ``with lc.class_plate(...) as classes`` gives. None for all classes.
        rows: What ``with lc.data_plate(...) as rows`` gives; the statement must be inside that
            plate. Needed with a subset of classes.
        noise: Distribution of the errors, see ``UtilityCategorical``.
        update_rule: How v moves, by default ``NaturalGradient()``.
        obs: Observed classes, integers in [0, K). None to draw them, which needs all classes.

    Returns:
        The observed or drawn classes.

    Raises:
        ValueError: If a subset of classes is used without ``rows``, outside their plate, or with
            shapes that do not match.
        TypeError: If ``obs`` are not integers.

    Example:
        >>> import jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> import numpyro_largecat as lc
        >>> def model(x, y=None, rows=None):
        ...     with lc.class_plate("classes", 10_000, labels=y, num_sampled=100) as classes:
        ...         w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
        ...     with lc.data_plate("data", 500, rows) as rows:
        ...         lc.sample_choice("y", x @ w.T, classes=classes, rows=rows, obs=y)

    References:
        Ruiz, Titsias, Dieng and Blei, Augment and Reduce, ICML 2018, Algorithm 1; Eq. 8 with
        log eta = v - psi_y.
    """
    choice = UtilityCategorical(utilities, classes, noise)
    if obs is None or choice.classes is None or choice.classes.kind == "chunk":
        return numpyro.sample(name, choice, obs=obs)
    check_integers("obs", obs)
    shape = _choice_shape(name, choice, obs)
    if rows is None:
        raise ValueError(
            f"site '{name}' keeps a local variable for each row of the data, but has no `rows`. "
            'Pass `rows=` from `with lc.data_plate("data", N, rows=ids) as rows`, the true ids of '
            "the minibatch; or use the stateless form, `numpyro.sample(name, "
            "lc.UtilityCategorical(utilities, classes), obs=y)`, whose bias the docs explain."
        )
    whole = list(shape)
    if len(shape) < -rows.dim or shape[rows.dim] != rows.indices.shape[0]:
        raise ValueError(
            f"site '{name}' must have the {rows.indices.shape[0]} rows of plate '{rows.name}' at "
            f"axis {rows.dim}; got choices of shape {shape}."
        )
    whole[rows.dim] = rows.size
    label_utility = choice.label_utility(obs)
    log_partition = numpyro.param(
        f"{name}_log_partition",
        jnp.full(whole, math.log(choice.num_categories), choice.utilities.dtype),
        event_dim=0,
        update_rule=update_rule,
        statistic=lax.stop_gradient(choice.optimal_u(obs) + label_utility),
    )
    if jnp.shape(log_partition) != shape:
        raise ValueError(
            f"site '{name}' must be inside its data plate: `with lc.data_plate('{rows.name}', ...) "
            "as rows:`. Its local variable was not sliced to the rows of the minibatch."
        )
    u = log_partition - label_utility
    return numpyro.sample(name, UtilityCategorical(utilities, classes, noise, u=u), obs=obs)


def _choice_shape(name: str, choice: UtilityCategorical, obs: ArrayLike) -> tuple[int, ...]:
    try:
        return lax.broadcast_shapes(jnp.shape(obs), choice.batch_shape)
    except ValueError:
        raise ValueError(
            f"site '{name}' must have one row of utilities for each observation; got "
            f"obs.shape={jnp.shape(obs)} and utilities.shape={choice.utilities.shape}."
        ) from None
