# SPDX-License-Identifier: Apache-2.0
"""The choice given the error of the chosen class, whose log probability sums over the others."""

from __future__ import annotations

import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array
from jax.typing import ArrayLike
from numpyro.distributions import constraints

from numpyro_largecat.choices.choice_distribution import ChoiceDistribution, utility_vector
from numpyro_largecat.choices.error_families import ErrorFamily, error_family
from numpyro_largecat.plates.class_subset import ClassSubset


class AugmentedCategorical(ChoiceDistribution):
    r"""Choice among K classes, given the error of the chosen class, a latent site of its own.

    With the error epsilon of the class that is chosen, whose prior is the density phi of ``noise``,

    .. math:: \log p(y \mid \varepsilon, \psi)
              = \sum_{k \ne y} \log\Phi(\varepsilon + \psi_y - \psi_k),
              \qquad \int \phi(\varepsilon) \, p(y \mid \varepsilon, \psi) \, d\varepsilon
              = p(y \mid \psi),

    the exact probability under ``UtilityCategorical`` (for Gumbel errors the softmax). It is exact
    with all classes and, since it is a sum over classes, estimated without bias on a weighted
    subset of them, whatever the errors and whatever the guide of the error.

    It is one factor of the joint of y and *the error of class y*; it does not sum to 1 over y at a
    given error, and there is nothing to draw from it.

    For most models ``sample_choice`` does better: it keeps a distribution of the error for each
    observation by itself, and has no noise from draws of the error. Use this one to have the error
    as a site, with a guide of your choice (``ErrorGuideList``).

    Shapes: ``batch_shape`` is the broadcast of ``utilities.shape[:-1]`` and the shape of ``error``;
    ``event_shape`` is ().

    Cost: O(M) time and memory per observation, O(K) with all classes.

    Args:
        utilities: Mean utilities psi in nats, shape (..., K), or (..., M) for ``classes``.
        classes: What ``with class_plate(...) as classes`` gives. None for all classes.
        noise: Distribution of the errors, as in ``UtilityCategorical``: that of the error's site.
        error: Error of the chosen class, a real number, shape (...): the value of the site
            ``numpyro.sample("y_error", lc.error_distribution(noise))`` inside the data plate.
        validate_args: Also check values, outside ``jit``. Shapes are always checked.

    Raises:
        ValueError, TypeError: As ``UtilityCategorical``.
        NotImplementedError: On ``sample``.

    Example:
        >>> import jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> import numpyro_largecat as lc
        >>> def model(x, y=None, rows=None):
        ...     with lc.class_plate("classes", 10_000, labels=y, num_sampled=100) as classes:
        ...         w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
        ...     with lc.data_plate("data", 500, rows):
        ...         error = numpyro.sample("y_error", lc.error_distribution("logistic"))
        ...         choice = lc.AugmentedCategorical(x @ w.T, classes, "logistic", error=error)
        ...         numpyro.sample("y", choice, obs=y)
        >>> d = lc.AugmentedCategorical(jnp.zeros(3), noise="logistic", error=0.0)
        >>> round(jnp.exp(d.log_prob(0)).item(), 3)  # the other two are lower: 1/2 each
        0.25

    References:
        Ruiz, Titsias, Dieng and Blei, Augment and Reduce, ICML 2018, Eq. 6.
    """

    arg_constraints = {"utilities": utility_vector, "error": constraints.real}
    pytree_data_fields = ("utilities", "classes", "error")
    pytree_aux_fields = ("noise",)

    def __init__(
        self,
        utilities: ArrayLike,
        classes: ClassSubset | None = None,
        noise: str | ErrorFamily = "normal",
        *,
        error: ArrayLike,
        validate_args: bool | None = None,
    ) -> None:
        self.noise = error_family(noise)
        super().__init__(utilities, classes, local={"error": error}, validate_args=validate_args)

    def _log_prob(self, value: Array) -> Array:
        distances, weights = self.competitors(value)
        # At +inf log Phi is 0, as is its derivative.
        ahead = jnp.where(weights != 0, self.error[..., None] + distances, jnp.inf)
        return (weights * self.noise.log_cdf(ahead)).sum(axis=-1)

    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        """Refuse: the error belongs to the class that is chosen, so it cannot come first."""
        raise NotImplementedError(
            "AugmentedCategorical cannot draw a class: its `error` is that of the chosen class. "
            "Draw from `lc.UtilityCategorical(utilities, noise=...)`, or from a fit by "
            "`lc.Fitted(...).on(x).draw_choices(rng_key=key)`."
        )


def error_distribution(noise: str | ErrorFamily) -> dist.Distribution:
    """Return the standard distribution of the errors, the prior of the site of an explicit error.

    Args:
        noise: "gumbel", "normal", "logistic", or an ``ErrorFamily``.

    Raises:
        ValueError: If ``noise`` is unknown.

    Example:
        >>> import numpyro_largecat as lc
        >>> type(lc.error_distribution("logistic")).__name__
        'Logistic'

    References:
        Ruiz, Titsias, Dieng and Blei, Augment and Reduce, ICML 2018, Eq. 4.
    """
    return error_family(noise).distribution()
