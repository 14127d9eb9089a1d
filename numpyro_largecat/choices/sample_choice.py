# SPDX-License-Identifier: Apache-2.0
"""A statement for models: an observed choice together with what it keeps for each row."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpyro
from jax import Array
from jax.typing import ArrayLike

from numpyro_largecat._checks import check_integers, fits
from numpyro_largecat.choices.bounds.gaussian_utility_bound import GaussianUtilityBound
from numpyro_largecat.choices.choice_distribution import ChoiceDistribution
from numpyro_largecat.choices.error_families import GUMBEL, ErrorFamily, error_family
from numpyro_largecat.choices.kept_per_row import KeptPerRow, kept_per_row, on_all_classes
from numpyro_largecat.choices.own_values import (
    OwnValues,
    Utilities,
    check_takes_one,
    no_statements,
    refuse_names,
)
from numpyro_largecat.choices.update_rules import (
    Followed,
    GaussianNaturalGradient,
    MeanOfVisits,
    NaturalGradient,
    Own,
    UpdateRule,
)
from numpyro_largecat.choices.utility_categorical import UtilityCategorical
from numpyro_largecat.handlers.internals import open_plates
from numpyro_largecat.plates.class_subset import ClassSubset, check_class_subset
from numpyro_largecat.plates.data_plate import data_plate
from numpyro_largecat.plates.row_subset import RowSubset, check_row_subset


def sample_choice(
    name: str,
    utilities: ArrayLike | Utilities,
    *,
    classes: ClassSubset | None = None,
    rows: RowSubset | None = None,
    follow: Any = None,
    noise: str | ErrorFamily = "gumbel",
    variances: ArrayLike | None = None,
    update_rule: UpdateRule | None = None,
    obs: ArrayLike | None = None,
) -> Array:
    r"""Observe (or draw) a choice among K classes, and keep a local variable for each row.

    With a subsampled class plate the likelihood is the Augment & Reduce bound. For the softmax
    (``noise="gumbel"``) it is

    .. math:: 1 - u_n - e^{-u_n} \hat\eta_n

    of ``UtilityCategorical``. This statement declares u as the parameter ``name + "_u"`` inside
    the data plate, one entry for each of the N rows, and for logistic errors too. For other errors
    it is that of ``GaussianErrorBound``, and the parameter ``name + "_error"`` holds the location
    and the log precision of the Gaussian of each row, shape (N, 2). ``SubsampledSVI`` moves the
    entries of the minibatch by ``update_rule``, before it takes the gradient of everything else;
    other inference treats them as any parameter. With all classes the likelihood is exact and
    nothing is kept, so the same model serves for training, exact or subsampled, and for prediction.

    **Under a posterior over the weights** no single u is best for all their draws, and a fixed one
    makes posterior standard deviations too small. Where the classes of a step say nearly all that
    can be known of the best u, ``NaturalGradient`` takes it from them, at the draw of that step.
    What it keeps from earlier visits ``SubsampledSVI`` lets follow the utility of the observed
    class in each draw,

    .. math:: u_n(\delta) = \log\big(1 + (e^{u_n} - 1) \, e^{-\delta}\big), \qquad
              \delta = \psi_{n y_n} - \bar\psi_{n y_n},

    where the reference has the rows of the class plate at the centre of the guide, and all other
    latent values as they are drawn. This is a bound too, since any u gives one. Where rows are
    independent and steps of u go to 0, :math:`e^{u_n} - 1` goes to the mean of
    :math:`\sum_{k \ne y_n} e^{\psi_{nk} - \bar\psi_{n y_n}}`, and the expected bound to
    :math:`-E \, u_n(\delta)`, which by Jensen's inequality is at least that of the best fixed u.
    The location of a Gaussian error follows to first order. Gradients take the value as a constant,
    as they take u, so those of a guide's spread lack a term that vanishes where u is best for each
    draw. It takes one more evaluation of the utilities, for the observed classes only where they
    are a matrix product. Guides whose distributions have no finite mean keep u as it is, and so do
    rows that a guide makes of noise that it draws outside of the class plate.

    **Latent values that move all classes**, such as the row of a user, the mean of rows that are
    read, or tastes that all share: u must know by how much. Give those that an observation depends
    on as ``follow``, and the utilities as a function of them. Then

    .. math:: \delta = \psi_{n y_n} - \bar\psi_{n y_n} - s_n^\top (v_n - \bar v_n), \qquad
              s_n = \sum_{k \ne y_n} q_{nk} \, \nabla_v \psi_{nk}, \quad
              q_{nk} \propto e^{\psi_{nk}},

    with the reference at the centre of these values too, and slopes s that are kept for each row,
    ``name + "_slopes"``, as the mean of what its visits estimate. With the best slopes the bound is
    exact to second order in v, with any others it is one still. **Without it their posterior
    standard deviations may be 0.7 of what they should be**, if the classes that are drawn are few
    and of very different utilities: at a fixed u the bound has about twice the curvature of the
    softmax. Not for values that the guide lets rows of the class plate move with, as
    ``AutoRowNormal(follow=...)`` does: the slopes are those at fixed rows. Normal and logistic
    errors have the same defect, and no such remedy: draw more classes, or take all of them.

    **With** ``variances`` the utilities are Gaussian under a posterior that is not drawn from, see
    ``gaussian_weights``, and the likelihood is the expectation of the bound over them, that of
    ``GaussianUtilityBound`` with the slope ``expm1(-u)``: u follows the utility of the observed
    class in closed form. Latent values that are drawn are followed as above, through the means.
    With all classes that bound is taken at its best u, and nothing is kept; it is not exact, since
    the expected log softmax has no closed form. Draws of the choice are exact. In
    ``lc.Fitted`` the utilities are at their means.

    **Bias.** The step that moves u uses the classes of the same step, as in the paper. On its
    first visit an observation takes the best u for them, as in the stateless form, whose ELBO is
    too high. The bias is in proportion to the noise of the drawn classes, and fades with the number
    of visits to what ``NaturalGradient`` allows for, by default 0.002 nats for each observation.
    Rows that a mask hides move their u all the same.

    Shapes: the choice has the shape of ``obs``, or ``utilities.shape[:-1]``.

    Cost: O(M) per observation and step, a few times the softmax's for other errors; one float (two
    for a Gaussian error) and the rule's state kept for each of N rows. With D numbers to follow, D
    more floats and an integer, one more gradient of the utilities, and one more run of guide and
    model up to these values.

    Args:
        name: Name of the site.
        utilities: Mean utilities in nats, shape (..., M) for the M rows of ``classes``; with
            ``follow`` a function that makes them of its values, those of an observation of its own
            values alone. It is called several times, so it holds no statements of NumPyro.
        classes: What ``with lc.class_plate(...) as classes`` gives. None for all classes.
        rows: What ``with lc.data_plate(...) as rows`` gives; the statement must be inside that
            plate. Needed with a subset of classes.
        follow: Latent values of each observation that u follows, an array or a tree of arrays that
            have the axes of the observations in front: rows of an entity plate by its ``rows_of``,
            and what all observations share by ``jnp.broadcast_to``. A tree is one argument of the
            function; of a sum that utilities depend on the sum will do. For the softmax. The
            utilities must depend on each.
        noise: Distribution of the errors, see ``UtilityCategorical``.
        variances: Variances of the utilities under their Gaussian posterior, at least 0, of the
            shape of ``utilities``; for the softmax only. None for utilities that are as they are.
        update_rule: How the local variable moves. One of ``lc.update_rules``, by default
            ``NaturalGradient()`` for u, with ``newton_steps`` where eta_hat depends on u (logistic
            errors, ``variances``), and ``GaussianNaturalGradient()`` for a Gaussian error.
        obs: Observed classes, integers in [0, K). None to draw them, which needs all classes.

    Returns:
        The observed or drawn classes.

    Raises:
        ValueError: If a subset of classes is used without ``rows``, outside their plate, or with
            shapes that do not match; if ``variances`` or ``follow`` are given with another
            ``noise`` than "gumbel", or both; if the utilities do not depend on a value to follow;
            if ``update_rule`` is one of the other kind of local variable.
        TypeError: If ``obs`` are not integers, or ``classes`` or ``rows`` not what their plates
            give; if ``follow`` is given without a function, a function without it, or one that
            holds statements or takes several arguments, or has names.

    Example:
        >>> import jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> import numpyro_largecat as lc
        >>> def model(x, y=None, rows=None):
        ...     with lc.class_plate("classes", 10_000, labels=y, num_sampled=100) as classes:
        ...         w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
        ...     with lc.data_plate("data", 500, rows) as rows:
        ...         lc.sample_choice("y", x @ w.T, classes=classes, rows=rows, obs=y)

        Choices by what persons like of the features z of classes:

        >>> def tastes(person, counts, z, y=None, rows=None):
        ...     with lc.entity_plate("people", 40, person, counts) as people:
        ...         g = numpyro.sample("g", dist.Normal(0, 1).expand([3]).to_event(1))
        ...     with lc.class_plate("classes", 10_000, labels=y, num_sampled=100) as classes:
        ...         features = z[classes.indices]
        ...     own = people.rows_of(g, person)
        ...     with lc.data_plate("data", 500, rows) as rows:
        ...         how = {"classes": classes, "rows": rows, "obs": y}
        ...         lc.sample_choice("y", lambda own: own @ features.T, follow=own, **how)

    References:
        Ruiz, Titsias, Dieng and Blei, Augment and Reduce, ICML 2018, Algorithm 1.
    """
    check_class_subset(classes)
    family = error_family(noise)
    _check_utilities(name, utilities, variances, family, follow)
    of_values = utilities if callable(utilities) else None
    if callable(utilities):
        refuse_names(name, follow)
        check_takes_one(name, utilities)
        with no_statements(name):
            utilities = utilities(follow)
    if classes is None or classes.kind != "sample":
        choice = _with_all_classes(name, utilities, variances, classes, family, obs)
        if obs is not None and (classes is None or classes.kind == "full"):
            _refuse_more_axes(name, choice.batch_shape, obs)
        return numpyro.sample(name, choice, obs=obs)
    choice = ChoiceDistribution(utilities, classes)
    if obs is None:
        raise ValueError(
            f"site '{name}' needs `obs=` while the class plate holds a subset of the classes. To "
            "draw choices leave out `num_sampled`; to predict, use `lc.Fitted(...).on(x)`."
        )
    check_integers("obs", obs)
    shape = _choice_shape(name, choice, obs)
    rows = _checked_rows(name, rows, shape)
    kept = kept_per_row(choice.utilities, classes, family, obs, variances)
    _check_rule(name, update_rule, kept)
    whole = list(shape)
    whole[rows.dim] = rows.size
    followed = Followed(classes.outer_name, *choice.label_entries(obs), kept.at_distance)
    if of_values is not None:
        own = _own_of_rows(name, of_values, follow, classes, obs, shape, whole)
        followed = followed._replace(own=own)
    value = numpyro.param(
        f"{name}_{kept.suffix}",
        jnp.broadcast_to(kept.start, (*whole, *kept.start.shape)),
        event_dim=kept.start.ndim,
        update_rule=kept.update_rule if update_rule is None else update_rule,
        statistic=kept.statistic,
        follow=followed,
    )
    if jnp.shape(value) != (*shape, *kept.start.shape):
        raise _outside_of_plate(name, rows, jnp.shape(value))
    return numpyro.sample(name, kept.bound(value), obs=obs)


def _check_utilities(
    name: str, utilities: Any, variances: Any, family: ErrorFamily, follow: Any
) -> None:
    """Refuse what goes with no other errors than those of the softmax, or not together."""
    if variances is not None and family is not GUMBEL:
        raise ValueError(
            f"site '{name}': `variances` need the softmax, noise=\"gumbel\"; got noise={family}. "
            "Draw the weights instead."
        )
    if (follow is not None) != callable(utilities):
        raise TypeError(
            f"site '{name}': with `follow` the `utilities` must be a function of its values, and "
            f"without it an array; got {'a function' if callable(utilities) else 'an array'} and "
            f"`follow={'None' if follow is None else '...'}`."
        )
    if follow is not None and (family is not GUMBEL or variances is not None):
        raise ValueError(
            f"site '{name}': `follow` needs the softmax, noise=\"gumbel\", without `variances`; "
            f"got noise={family}."
        )


def _own_of_rows(
    name: str,
    utilities: Utilities,
    follow: Any,
    classes: ClassSubset,
    obs: ArrayLike,
    shape: tuple[int, ...],
    whole: list[int],
) -> Own:
    """The values to follow of each observation, with their slopes, which are kept for all rows."""
    own = OwnValues.of(name, utilities, follow, shape)
    slopes = numpyro.param(
        f"{name}_slopes",
        jnp.zeros((*whole, own.joined.shape[-1]), own.joined.dtype),
        event_dim=1,
        update_rule=MeanOfVisits(),
        statistic=lambda *_: own.estimated_slopes(classes, obs),
    )

    def values_at(joined: Array) -> Array:
        return ChoiceDistribution(own.utilities_at(joined), classes).label_entries(obs)[0]

    return Own(own.joined, slopes, values_at)


def _checked_rows(name: str, rows: RowSubset | None, shape: tuple[int, ...]) -> RowSubset:
    """The rows that choices of ``shape`` belong to; their plate must be open."""
    if rows is None:
        raise ValueError(
            f"site '{name}' keeps a local variable for each row of the data, but has no `rows`. "
            'Pass those of `with lc.data_plate("data", N, rows=ids) as rows`; or use '
            "`numpyro.sample(name, lc.UtilityCategorical(utilities, classes), obs=y)`, with a bias."
        )
    check_row_subset(rows)
    if len(shape) < -rows.dim or shape[rows.dim] != rows.indices.shape[0]:
        raise ValueError(
            f"site '{name}' must have the {rows.indices.shape[0]} rows of plate '{rows.name}' at "
            f"axis {rows.dim}; got choices of shape {shape}. Of a minibatch give the plate its row "
            f"numbers, `lc.data_plate('{rows.name}', {rows.size}, rows)`; where rows have several "
            "choices each, (B, T), give it `dim=-2` and these a plate of their own, `dim=-1`."
        )
    plates = open_plates()
    if not any(isinstance(p, data_plate) and p.rows.name == rows.name for p in plates):
        raise _outside_of_plate(name, rows, shape)
    return rows


def _outside_of_plate(name: str, rows: RowSubset, shape: tuple[int, ...]) -> ValueError:
    around = sorted(plate.name for plate in open_plates())
    return ValueError(
        f"site '{name}' must be inside its data plate: `with lc.data_plate('{rows.name}', ...) "
        f"as rows:`; it is inside plates {around}, and its local variable has shape {shape}."
    )


def _check_rule(name: str, rule: UpdateRule | None, kept: KeptPerRow) -> None:
    """Refuse a rule of this package for a local variable of the other kind."""
    wanted = type(kept.update_rule)
    if isinstance(rule, NaturalGradient | GaussianNaturalGradient) and not isinstance(rule, wanted):
        raise ValueError(
            f"`update_rule` of site '{name}' must move its '{kept.suffix}', as "
            f"`lc.update_rules.{wanted.__name__}()` does with these errors; got {rule!r}."
        )


def _with_all_classes(
    name: str,
    utilities: ArrayLike,
    variances: ArrayLike | None,
    classes: ClassSubset | None,
    family: ErrorFamily,
    obs: ArrayLike | None,
) -> ChoiceDistribution:
    """The likelihood of all classes, or utilities of a chunk of them, where nothing is kept."""
    if variances is None:
        return UtilityCategorical(utilities, classes, family)
    if classes is not None and classes.is_part:
        return GaussianUtilityBound(utilities, variances, classes)
    if obs is not None:
        check_integers("obs", obs)
        _choice_shape(name, ChoiceDistribution(utilities, classes), obs)
    return on_all_classes(utilities, variances, classes, obs)


def _refuse_more_axes(name: str, batch_shape: tuple[int, ...], obs: ArrayLike) -> None:
    """Refuse observations that broadcast over their own axes, as (B, T) ones do where B == T."""
    shape = jnp.shape(obs)
    if len(shape) > len(batch_shape) and math.prod(batch_shape) > 1:
        raise ValueError(
            f"site '{name}' must have an axis of utilities for each axis of the observations; got "
            f"obs.shape={shape} and {batch_shape} before the classes. If labels are a column, pass "
            "`y.squeeze(-1)`; if choices share utilities, `utilities[..., None, :]`."
        )


def _choice_shape(name: str, choice: ChoiceDistribution, obs: ArrayLike) -> tuple[int, ...]:
    _refuse_more_axes(name, choice.batch_shape, obs)
    shapes = (jnp.shape(obs), choice.batch_shape)
    shape = max(shapes, key=lambda shape: (len(shape), math.prod(shape)))
    if not all(fits(own, shape) for own in shapes):  # a column of labels would broadcast with rows
        raise ValueError(
            f"site '{name}' must have one row of utilities for each observation; got "
            f"obs.shape={jnp.shape(obs)} and utilities.shape={choice.utilities.shape}. If labels "
            "are a column, pass `y.squeeze(-1)`; if the utilities are of all rows of an entity "
            "plate, take those of the observations by `rows_of`."
        )
    return shape
