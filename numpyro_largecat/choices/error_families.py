# SPDX-License-Identifier: Apache-2.0
"""Distributions of the errors in the utility view: Gumbel, Normal, logistic, or a user's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array

from numpyro_largecat._checks import check_one_of, is_concrete
from numpyro_largecat.ops.log_cdf import gumbel_log_cdf, logistic_log_cdf, normal_log_cdf


@dataclass(frozen=True)
class ErrorFamily:
    r"""Distribution of the errors of a utility model, with a log CDF that is right in both tails.

    A class is chosen if its utility plus error is highest,

    .. math:: y = \arg\max_k (\psi_k + \varepsilon_k), \qquad \varepsilon_k \sim \phi,

    so a model needs the log density of phi, draws from it, and the logarithm of its CDF Phi.
    ``noise="gumbel"``, ``"normal"`` and ``"logistic"`` name the three families that come with the
    package; pass an instance of your own as ``noise=`` in the same way.

    Attributes:
        name: Name, for messages.
        distribution: Function of no arguments that returns the standard distribution, a NumPyro
            distribution over the reals with ``log_prob`` and ``sample``. Its log density must be
            concave: that of Student's t is not. One with a kink, as Laplace's, costs accuracy:
            exact probabilities then have relative errors of up to 1e-3.
        log_cdf: Element-wise log Phi, twice differentiable, concave, finite for finite arguments as
            far as floating point allows, and 0 with derivative 0 at +inf.

    Raises:
        TypeError: If ``distribution`` is a distribution, not a function that returns one.
        ValueError: When it is first used as ``noise=``, if its log density is seen not to be
            concave, since integrals over it would be wrong.

    Example:
        >>> import jax.numpy as jnp, numpyro.distributions as dist
        >>> import numpyro_largecat as lc
        >>> def laplace_log_cdf(error):
        ...     above = jnp.log1p(-0.5 * jnp.exp(-jnp.maximum(error, 0)))
        ...     return jnp.where(error > 0, above, jnp.minimum(error, 0) - jnp.log(2.0))
        >>> family = lc.choices.ErrorFamily("laplace", lambda: dist.Laplace(0, 1), laplace_log_cdf)
        >>> d = lc.UtilityCategorical(jnp.array([0.0, 1.0]), noise=family)
        >>> bool(jnp.exp(d.log_prob(jnp.arange(2))).sum().round(4) == 1)
        True

    References:
        Ruiz, Titsias, Dieng and Blei, Augment and Reduce, ICML 2018, Eq. 4.
    """

    name: str
    distribution: Callable[[], dist.Distribution]
    log_cdf: Callable[[Array], Array]

    def __post_init__(self) -> None:
        """Refuse a distribution in place of a function that returns it."""
        if isinstance(self.distribution, dist.Distribution):
            need = "a function such as `lambda: dist.Laplace(0, 1)`"
            raise TypeError(f"`distribution` must be {need}; got {self.distribution!r}.")

    def log_prob(self, error: Array) -> Array:
        """Log density phi."""
        return self.distribution().log_prob(error)

    def sample(self, rng_key: Array, shape: tuple[int, ...]) -> Array:
        """Draw independent errors."""
        return self.distribution().sample(rng_key, shape)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle and copy the families of this package by name, so that they stay what they are."""
        if FAMILIES.get(self.name) is self:
            return error_family, (self.name,)
        return ErrorFamily, (self.name, self.distribution, self.log_cdf)

    def __str__(self) -> str:
        """Give the name."""
        return self.name


GUMBEL = ErrorFamily("gumbel", dist.Gumbel, gumbel_log_cdf)
NORMAL = ErrorFamily("normal", dist.Normal, normal_log_cdf)
LOGISTIC = ErrorFamily("logistic", dist.Logistic, logistic_log_cdf)
FAMILIES = {family.name: family for family in (GUMBEL, NORMAL, LOGISTIC)}


def error_family(noise: str | ErrorFamily) -> ErrorFamily:
    """Return the family that ``noise`` names, or ``noise`` itself if it is one."""
    if isinstance(noise, ErrorFamily):
        if FAMILIES.get(noise.name) is not noise:
            _check_concave(noise)
        return noise
    check_one_of("noise", noise, tuple(FAMILIES), or_else=" or an lc.choices.ErrorFamily")
    return FAMILIES[noise]


def _check_concave(family: ErrorFamily) -> None:
    """Refuse a log density with a positive second difference on a grid.

    NaN passes, and so does one that depends on a tracer, such as a scale that is drawn.
    """
    grid = np.linspace(-20.0, 20.0, 161)
    with jax.ensure_compile_time_eval():
        found = family.log_prob(jnp.asarray(grid))
    if not is_concrete(found):
        return
    log_prob = np.asarray(found, np.float64)
    with np.errstate(invalid="ignore"):
        bends = log_prob[2:] - 2 * log_prob[1:-1] + log_prob[:-2]
        size = np.abs(log_prob[2:]) + np.abs(log_prob[1:-1]) + np.abs(log_prob[:-2])
        is_bent = bends > 1e-5 * (1 + size)  # rounding in float32
    if is_bent.any():
        raise ValueError(
            f"the errors of family '{family.name}' must have a concave log density; it is not "
            f"concave at {grid[1 + int(np.argmax(is_bent))]:g}. Student's t and others with heavy "
            "tails are not; take Laplace or logistic errors."
        )
