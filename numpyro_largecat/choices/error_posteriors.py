# SPDX-License-Identifier: Apache-2.0
"""Posteriors of the error of the chosen class: parameters for each observation, or a network."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jax import Array
from numpyro.distributions import constraints

from numpyro_largecat._checks import check_count, check_interval, check_one_of, check_shape

POSTERIORS = {"gumbel": dist.Gumbel, "normal": dist.Normal, "logistic": dist.Logistic}
Locations = tuple[Array, Array]  # location and scale of the errors' distributions
Plates = Callable[[], AbstractContextManager[None]]  # opens the plates of the site


class ErrorSite(NamedTuple):
    """What the posterior of an error must know of its site."""

    name: str  # what names of parameters start with, "{site}_{prefix}"
    whole: tuple[int, ...]  # shape over all rows of the data
    event_dim: int
    start: float  # the error that one of K exceeds on average: suits K equal utilities


class ErrorPosterior(Protocol):
    """Locations and scales of the errors of a site; ``LocalErrors`` or ``AmortizedErrors``."""

    @property
    def family(self) -> str:
        """Name of the family in ``POSTERIORS``."""

    @property
    def needs_data(self) -> bool:
        """Whether locations and scales follow from the arguments of the model."""

    def loc_and_scale(self, site: ErrorSite, plates: Plates, args: Any, kwargs: Any) -> Locations:
        """Declare the parameters, those with rows inside ``plates()``, and use them."""


@dataclass(frozen=True)
class LocalErrors:
    r"""Posterior of the errors with a location and a scale of its own for each observation.

    .. math:: q(\varepsilon_n) = \mathrm{family}(\mathrm{loc}_n, \mathrm{scale}_n)

    The parameters "{site}_{prefix}_loc" and "{site}_{prefix}_scale" have one entry for each of the
    N rows of the data; ``SubsampledSVI`` moves those of the minibatch. So the data plate must
    carry true row ids, as ``lc.data_plate("data", N, rows)`` does. Locations start at the quantile
    1 - 1/K of the errors, which one of K errors exceeds on average: with K equal utilities the
    error of the chosen class is the largest of K.

    With Gumbel errors the exact posterior is ``Gumbel(log eta*, 1)``, and that of logistic errors
    is nearly a Gumbel. For Normal errors "normal" is the better one where K is small or the chosen
    class improbable. The page "Measured: bounds" has the gaps that each family leaves.

    Cost: O(B) per step; two floats for each of N rows, and the optimiser's state of them.

    Args:
        family: "gumbel", "normal" or "logistic".
        init_scale: Scale at the start, positive.

    Raises:
        ValueError: If ``family`` is unknown or ``init_scale`` is not positive.

    Example:
        >>> import numpyro_largecat as lc
        >>> lc.LocalErrors("normal")
        LocalErrors(family='normal', init_scale=0.5)

    References:
        Ruiz, Titsias, Dieng and Blei, Augment and Reduce, ICML 2018, Algorithm 2.
    """

    family: str = "gumbel"
    init_scale: float = 0.5
    needs_data: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _check_family(self.family, self.init_scale)

    def loc_and_scale(self, site: ErrorSite, plates: Plates, args: Any, kwargs: Any) -> Locations:
        """Declare a row for each observation, and give those that the plates hold."""
        del args, kwargs
        with plates():
            loc = numpyro.param(
                f"{site.name}_loc", jnp.full(site.whole, site.start), event_dim=site.event_dim
            )
            scale = numpyro.param(
                f"{site.name}_scale",
                jnp.full(site.whole, self.init_scale),
                constraint=constraints.softplus_positive,
                event_dim=site.event_dim,
            )
        return loc, scale


@dataclass(frozen=True)
class AmortizedErrors:
    r"""Posterior of the errors whose location and scale come from a network of features.

    .. math:: q(\varepsilon_n) = \mathrm{family}(\mathrm{start} + a_n,\;
              \mathrm{softplus}(b_n + c)), \qquad (a_n, b_n) = \mathrm{network}(x_n),

    where start is the quantile 1 - 1/K of the errors, and c such that the scale is ``init_scale``
    at b = 0. Nothing is kept per observation, so it serves data that stream past without ids.

    The error of the chosen class is larger the less probable that class was, so the *observed
    class* matters: features may include what is known of it, such as its log frequency.
    Give features of about unit size.

    Cost: O(B) per step times that of the network; nothing for each of N rows.

    Args:
        features: Function of the model's arguments that returns features, shape (B, F), or with
            the shape of the site in place of B; for a model ``model(x, y=None, rows=None)``, for
            example ``lambda x, y, rows: jnp.column_stack([x, log_frequency[y]])``.
        network: Sizes of hidden layers, with tanh between them, () for a linear map; or a function
            of the features that returns (a, b), shape (B, 2), and may declare parameters. The
            built-in one names its parameters "{site}_{prefix}_weight0", "{site}_{prefix}_bias0"
            and so on, and starts at a = b = 0.
        family: "gumbel", "normal" or "logistic".
        init_scale: Scale at b = 0, positive.

    Raises:
        ValueError: If ``family`` is unknown or a size is not positive; when the guide is run, if
            features or network give another shape.

    Example:
        >>> import numpyro_largecat as lc
        >>> errors = lc.AmortizedErrors(lambda x, y=None, rows=None: x, network=(32,))

    References:
        Ruiz, Titsias and Blei, Scalable Large-Scale Classification with Latent Variable
        Augmentation, sections 2.2 and 2.3 (recognition networks).
    """

    features: Callable[..., Array]
    network: Sequence[int] | Callable[[Array], Array] = (64,)
    family: str = "gumbel"
    init_scale: float = 0.5
    needs_data: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check_family(self.family, self.init_scale)
        if not callable(self.network):
            for i, size in enumerate(self.network):
                check_count(f"network[{i}]", size, 1)

    def loc_and_scale(self, site: ErrorSite, plates: Plates, args: Any, kwargs: Any) -> Locations:
        """Run the network on the rows in the arguments."""
        del plates  # what the network declares is shared by all rows
        features = jnp.asarray(self.features(*args, **kwargs))
        if callable(self.network):
            output = self.network(features)
        else:
            output = _perceptron(site.name, self.network, features)
        need = f"two numbers for each row of the features, of shape {features.shape}"
        check_shape("output of `network`", output, (..., 2), need)
        offset = self.init_scale + math.log(-math.expm1(-self.init_scale))  # inverse of softplus
        return site.start + output[..., 0], jax.nn.softplus(output[..., 1] + offset)


def _check_family(family: str, init_scale: float) -> None:
    check_one_of("family", family, tuple(POSTERIORS))
    check_interval("init_scale", init_scale, "(0, inf)")


def _perceptron(name: str, hidden: Sequence[int], features: Array) -> Array:
    """Map features (..., F) to (..., 2), with zeros at the start."""
    sizes = (features.shape[-1], *hidden, 2)
    value = features
    for i, shape in enumerate(pairwise(sizes)):
        is_last = i == len(hidden)
        start = jax.nn.initializers.zeros if is_last else jax.nn.initializers.glorot_normal()
        weight = numpyro.param(f"{name}_weight{i}", partial(start, shape=shape))
        bias = numpyro.param(f"{name}_bias{i}", jnp.zeros(shape[1]))
        value = value @ weight + bias
        value = value if is_last else jnp.tanh(value)
    return value
