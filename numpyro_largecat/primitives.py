# SPDX-License-Identifier: Apache-2.0
"""Statements for models: an observed choice together with the local state that it needs."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpyro
from jax import Array, lax
from jax.typing import ArrayLike
from numpyro.primitives import Messenger

from numpyro_largecat._checks import check_integers
from numpyro_largecat.distributions.utility_categorical import UtilityCategorical
from numpyro_largecat.infer.update_rules import NaturalGradient, UpdateRule
from numpyro_largecat.ops.softmax_bound import best_u_slope
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

    With a subsampled class plate the likelihood is the Augment & Reduce bound

    .. math:: 1 - u_n - e^{-u_n} \hat\eta_n

    of ``UtilityCategorical``. This statement declares u as the parameter ``name + "_u"`` inside
    the data plate, one entry for each of the N rows. ``SubsampledSVI`` moves the entries of the
    minibatch by ``update_rule``, before it takes the gradient of everything else; other inference
    treats u as any parameter. With all classes the likelihood is exact and nothing is kept, so the
    same model serves for training, exact or subsampled, and for prediction.

    **Under a posterior over the weights** no single u is best for all their draws, and a fixed one
    makes posterior standard deviations too small. ``SubsampledSVI`` therefore lets u follow the
    draw to first order in the utility of the observed class,

    .. math:: u_n + (e^{-u_n} - 1) \, (\psi_{n y_n} - \bar\psi_{n y_n}),

    with the utility at the centre of the guide as reference: this is a bound too, since any u
    gives one, and nearly as tight for each draw as if it had a u of its own. Gradients take the
    value as a constant, as they take u, so those of a guide's spread lack a term that vanishes
    where u is best for each draw. It takes one more evaluation of the utilities. Guides whose
    distributions have no mean keep u as it is.

    **Bias.** The step that moves u uses the classes of the same step, as in the paper. On its
    first visit an observation takes the best u for them, as in the stateless form, whose ELBO is
    too high; the bias fades with the step size of ``update_rule`` over later visits. Rows that a
    mask hides move their u all the same.

    Shapes: the choice has the shape of ``obs``, or ``utilities.shape[:-1]``.

    Cost: O(M) per observation and step; one float and the rule's state kept for each of N rows.

    Args:
        name: Name of the site.
        utilities: Mean utilities in nats, shape (..., M) for the M rows of ``classes``.
        classes: What ``with lc.class_plate(...) as classes`` gives. None for all classes.
        rows: What ``with lc.data_plate(...) as rows`` gives; the statement must be inside that
            plate. Needed with a subset of classes.
        noise: Distribution of the errors, see ``UtilityCategorical``.
        update_rule: How u moves, by default ``NaturalGradient()``.
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
        Ruiz, Titsias, Dieng and Blei, Augment and Reduce, ICML 2018, Algorithm 1.
    """
    choice = UtilityCategorical(utilities, classes, noise)
    if choice.classes is None or choice.classes.kind == "chunk":
        return numpyro.sample(name, choice, obs=obs)
    if obs is None:
        raise ValueError(
            f"site '{name}' needs `obs=` while the class plate holds a subset of the classes. To "
            "draw choices, leave `num_sampled` out of the plate; to predict, use "
            "`lc.predict_choice`."
        )
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
    with _open_plates() as plates:
        u = numpyro.param(
            f"{name}_u",
            jnp.full(whole, math.log(choice.num_categories), choice.utilities.dtype),
            event_dim=0,
            update_rule=update_rule,
            statistic=lax.stop_gradient(choice.optimal_u(obs)),
            follow=(choice.label_utility(obs), best_u_slope),
        )
    if rows.name not in plates or jnp.shape(u) != shape:
        raise ValueError(
            f"site '{name}' must be inside its data plate: `with lc.data_plate('{rows.name}', ...) "
            f"as rows:`; it is inside plates {sorted(plates)}, and its local variable has shape "
            f"{jnp.shape(u)}."
        )
    return numpyro.sample(name, UtilityCategorical(utilities, classes, noise, u=u), obs=obs)


class _open_plates(Messenger):
    """Find the plates that are open around a statement."""

    def __enter__(self) -> set[str]:
        self.plates: set[str] = set()
        super().__enter__()
        return self.plates

    def postprocess_message(self, msg: dict[str, Any]) -> None:
        """Handlers further out, the plates, have added themselves by now."""
        self.plates |= {frame.name for frame in msg["cond_indep_stack"]}


def _choice_shape(name: str, choice: UtilityCategorical, obs: ArrayLike) -> tuple[int, ...]:
    try:
        return lax.broadcast_shapes(jnp.shape(obs), choice.batch_shape)
    except ValueError:
        raise ValueError(
            f"site '{name}' must have one row of utilities for each observation; got "
            f"obs.shape={jnp.shape(obs)} and utilities.shape={choice.utilities.shape}."
        ) from None
