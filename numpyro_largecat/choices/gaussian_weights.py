# SPDX-License-Identifier: Apache-2.0
"""Weights of the classes with a Gaussian posterior that is never drawn from."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array
from jax.typing import ArrayLike
from numpyro.distributions import constraints
from numpyro.distributions.kl import kl_divergence

from numpyro_largecat._checks import (
    check_broadcasts,
    check_count,
    check_kind,
    is_concrete,
    refuse_entries,
)
from numpyro_largecat.handlers.internals import open_plates
from numpyro_largecat.plates.class_plate import class_plate
from numpyro_largecat.plates.class_subset import ClassSubset, check_class_subset


class GaussianWeights(NamedTuple):
    """Means and variances of the weights of the classes that exist this step.

    Attributes:
        loc: Posterior means, shape (M,) + event_shape.
        variance: Posterior variances, shape (M,) + event_shape.

    Example:
        >>> import numpyro_largecat as lc
        >>> lc.choices.GaussianWeights._fields
        ('loc', 'variance')
    """

    loc: Array
    variance: Array


def gaussian_weights(
    name: str,
    classes: ClassSubset,
    event_shape: tuple[int, ...] = (),
    *,
    prior_loc: ArrayLike = 0.0,
    prior_scale: ArrayLike = 1.0,
    init_scale: float = 0.1,
) -> GaussianWeights:
    r"""Declare weights of the classes by their Gaussian posterior, and its divergence to the prior.

    It takes the place of ``numpyro.sample(name, dist.Normal(prior_loc, prior_scale))`` inside the
    class plate, for weights that the likelihood needs the means and variances of, and no draw:

    .. math:: q(w) = N(\mathrm{loc}, \mathrm{scale}^2), \qquad
              \mathrm{ELBO} = E_q[\log p(y \mid w)]
              - \mathrm{KL}\big(q(w) \,\|\, N(\mathrm{prior\_loc}, \mathrm{prior\_scale}^2)\big).

    The parameters are ``name + "_auto_loc"`` and ``name + "_auto_scale"``, with the names, shapes
    and constraints of ``AutoNormal``: its guide of a model that draws the weights instead can take
    them, for ArviZ or posterior draws. Here the guide has no site for the weights; it is
    ``lambda *args, **kwargs: None`` where the model has no other latent site. The divergence is the
    factor ``name + "_kl"``, which the plate weighs as the prior of a drawn site.

    Linear utilities of independent Gaussian weights are Gaussian and independent over classes, with
    means ``x @ w.loc.T`` and variances ``x**2 @ w.variance.T``; ``sample_choice(...,
    variances=...)`` takes both. With products of weights, or weights that several classes share,
    they are not, and the bound does not hold: draw these.

    **What it changes.** Gradients have no noise from draws of the weights, only that of rows and
    classes. The bound is, on average, that of drawn weights: there u follows the draw, here it does
    so in closed form. With one u for all draws, as in the paper, the bound would be looser and the
    posterior more over-confident; "Measured: bounds" has figures.

    Deviations are too small where classes are few and likely, since u does not follow the utilities
    of the other classes; with drawn weights just as much.

    Shapes: parameters (K,) + event_shape, stored whole; results (M,) + event_shape for the M rows
    of the plate. Plates around the class plate add their axes in front, as everywhere.

    Cost: O(M) per step with ``SubsampledSVI``; the tables are made once, at its ``init``. The
    utilities take two products of features and weights, where drawn weights take one.

    Args:
        name: Name of the weights.
        classes: What ``with lc.class_plate(...) as classes`` gives; the statement must be inside
            that plate.
        event_shape: Shape of the weights of one class.
        prior_loc: Mean of the prior, broadcast with (M,) + event_shape. It may be latent.
        prior_scale: Standard deviation of the prior, positive, broadcast in the same way. It may be
            the value of a latent site, as in a hierarchical model.
        init_scale: Posterior standard deviation to start from, positive. Means start at 0; give
            others to ``init`` or ``run`` with ``init_params=``.

    Returns:
        Means and variances of the weights that exist this step.

    Raises:
        ValueError: If ``classes`` is not of an open class plate, the prior has another shape, or a
            scale is not positive.
        TypeError: If ``event_shape`` is not a tuple of Python ints.

    Example:
        >>> import jax, jax.numpy as jnp, optax
        >>> from numpyro.infer import Trace_ELBO
        >>> import numpyro_largecat as lc
        >>> def model(x, y=None, rows=None):
        ...     with lc.class_plate("classes", 1000, labels=y, num_sampled=20) as classes:
        ...         w = lc.gaussian_weights("w", classes, (2,))
        ...         b = lc.gaussian_weights("b", classes)
        ...     means = x @ w.loc.T + b.loc
        ...     variances = x**2 @ w.variance.T + b.variance
        ...     with lc.data_plate("data", 300, rows) as rows:
        ...         lc.sample_choice("y", means, variances=variances, classes=classes, rows=rows,
        ...                          obs=y)
        >>> def guide(*args, **kwargs):
        ...     pass
        >>> x = jax.random.normal(jax.random.key(0), (300, 2))
        >>> batches = lc.ArrayBatches(x, (jnp.abs(x[:, 0]) * 100).astype(int), batch_size=50)
        >>> svi = lc.SubsampledSVI(model, guide, optax.adagrad(0.1), Trace_ELBO())
        >>> result = svi.run(jax.random.key(1), 20, batches=batches, progress_bar=False)
        >>> result.params["w_auto_scale"].shape
        (1000, 2)

    References:
        Ruiz, Titsias, Dieng and Blei, Augment and Reduce, ICML 2018, end of section 3.1.
    """
    check_kind("event_shape", event_shape, (tuple, list), "a tuple of Python ints, of one class")
    event_shape = tuple(check_count("event_shape", size, 1) for size in event_shape)
    for argument, value in (("init_scale", init_scale), ("prior_scale", prior_scale)):
        if is_concrete(value):
            refuse_entries(f"`{argument}`", value, ~(np.asarray(value) > 0), "positive")
    shape = (*_whole_batch_shape(name, classes), *event_shape)
    event_dim = len(event_shape)
    loc = numpyro.param(f"{name}_auto_loc", lambda _: jnp.zeros(shape), event_dim=event_dim)
    scale = numpyro.param(
        f"{name}_auto_scale",
        lambda _: jnp.full(shape, init_scale, jnp.result_type(float)),
        constraint=constraints.softplus_positive,
        event_dim=event_dim,
    )
    for argument, value in (("prior_loc", prior_loc), ("prior_scale", prior_scale)):
        of = f"`{argument}` of weights '{name}'"
        check_broadcasts(of, value, jnp.shape(loc), "of the rows that exist this step")
    divergence = kl_divergence(dist.Normal(loc, scale), dist.Normal(prior_loc, prior_scale))
    numpyro.factor(f"{name}_kl", -divergence.sum(axis=tuple(range(-event_dim, 0))))
    return GaussianWeights(loc, scale**2)


def _whole_batch_shape(name: str, classes: ClassSubset) -> tuple[int, ...]:
    """Sizes of all rows of the open plates, by their dims."""
    check_class_subset(classes)
    plates = open_plates()
    if not any(isinstance(plate, class_plate) and plate.classes is classes for plate in plates):
        raise ValueError(
            f"weights '{name}' must be inside the plate of `classes`, `with lc.class_plate(...) as "
            f"classes:`; they are inside plates {sorted(plate.name for plate in plates)}."
        )
    sizes = {plate.dim: plate.size for plate in plates}
    return tuple(sizes.get(dim, 1) for dim in range(min(sizes), 0))
