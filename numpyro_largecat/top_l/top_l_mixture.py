# SPDX-License-Identifier: Apache-2.0
"""A mixture whose log density is the bound of its L best components for each observation."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array, lax, random
from jax.typing import ArrayLike
from numpyro.distributions import constraints
from numpyro.distributions.util import validate_sample

from numpyro_largecat._checks import (
    check_count,
    check_finite,
    check_kind,
    check_log_weights,
    check_shape,
    is_concrete,
)
from numpyro_largecat._conversions import as_jax_array
from numpyro_largecat.ops.noisy_max import noisy_max
from numpyro_largecat.ops.top_l import log_sum
from numpyro_largecat.top_l.component_weights import Components, ComponentWeights
from numpyro_largecat.top_l.top_l_categorical import TopLCategorical
from numpyro_largecat.top_l.whitened_normal import whiten


class TopLMixture(dist.MixtureSameFamily):
    r"""Mixture of K components that keeps the L best ones of each observation.

    With log weights :math:`W_{nk} = \log \pi_k + \log F(x_n \mid \phi_k)`,

    .. math:: \log p(x_n) \ge \max_{|S| = L} \log \sum_{k \in S} e^{W_{nk}},

    which is the evidence lower bound of an observation whose posterior over components has L
    outcomes, at the best such posterior. It rises with L, to the log density of the mixture itself
    at L = K. The mass that is lost is that of the components left out: a few suffice wherever few
    components explain an observation.

    In place of ``numpyro.distributions.MixtureSameFamily``: the same arguments, methods and
    samples, and one argument more. Only ``log_prob`` is another, and only it depends on L.

    **Components** are any batch of distributions of one family with the components on its last
    batch axis: ``Normal(loc, scale).to_event(1)``, ``MultivariateNormal``, ``Poisson``, expanded,
    masked, transformed. Parameters may differ between observations (shape (N, K), a mixture of
    regressions) or be shared by components. Distributions of your own work if their arrays are
    their ``arg_constraints``. What single components cannot be taken from is refused; for it,
    write the component as a discrete site and use ``TopL_ELBO``. The support must be the same for
    all components.

    Shapes: as ``MixtureSameFamily``: ``batch_shape`` is the broadcast of that of ``mixing`` and of
    ``components`` without its last axis; ``event_shape`` is that of ``components``.

    Cost: for each observation, K log densities and a selection, without gradients; then L log
    densities, which are differentiated. Memory for chunks of observations, of which no array has
    more than ``MAX_ENTRIES`` entries, so that none has shape (N, K, D), and the gathered parameters
    of L components: of large ones, such as covariances, once for a block of observations that have
    a component in common. With L = K there is no selection.

    Args:
        mixing: ``Categorical`` over the components, K on its last axis.
        components: Distribution whose last batch axis has length K.
        num_active: Number of components to keep for each observation L, a Python int in [1, K].
        validate_args: Also check that values are in the support, as NumPyro does.

    Raises:
        ValueError: If ``num_active`` is outside [1, K], or K differs between ``mixing`` and
            ``components``; if the components differ in support; or, with its position, if a logit
            of ``mixing``, or in ``log_prob`` a value, is NaN or infinite.
        TypeError: If ``mixing`` is no ``Categorical``, or ``components`` are no distribution.
        NotImplementedError: If single components cannot be taken from ``components``.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro.distributions as dist
        >>> import numpyro_largecat as lc
        >>> components = dist.Normal(jnp.array([-4.0, 0.0, 1.0]), 1.0)
        >>> x = jnp.array([-4.0, 0.6])
        >>> mixing = dist.Categorical(probs=jnp.ones(3) / 3)
        >>> mixture = lc.TopLMixture(mixing, components, num_active=2)
        >>> mixture.log_prob(x).round(3).tolist()
        [-2.017, -1.453]
        >>> mixture.responsibilities(x).indices.tolist()
        [[0, 1], [2, 1]]

    References:
        Hughes and Sudderth, Fast Learning of Clusters and Topics via Sparse Posteriors, 2016,
        Eq. 4, 5 and 8.
    """

    pytree_aux_fields = ("num_active",)

    def __init__(
        self,
        mixing: dist.CategoricalProbs | dist.CategoricalLogits,
        components: dist.Distribution,
        num_active: int,
        *,
        validate_args: bool | None = None,
    ) -> None:
        categorical = (dist.CategoricalProbs, dist.CategoricalLogits)
        check_kind("mixing", mixing, categorical, "a Categorical over the components")
        check_kind("components", components, dist.Distribution, "one distribution of them all")
        check_log_weights("logits of `mixing`", mixing.logits)
        num_components = jnp.shape(mixing.logits)[-1]
        if components.batch_shape[-1:] != (num_components,):
            raise ValueError(
                f"`components` must have batch shape (..., {num_components}), as `mixing`; "
                f"got batch shape {components.batch_shape}. Axes of an observation are marked by "
                "`.to_event`, that of the components is not."
            )
        self.num_active = check_count(
            "num_active", num_active, 1, num_components, "number of components"
        )
        self._mixing_distribution = mixing
        self._component_distribution = components
        self._mixture_size = num_components
        _common_support(components)
        batch_shape = lax.broadcast_shapes(mixing.batch_shape, components.batch_shape[:-1])
        Components(components, batch_shape)  # both refuse what cannot be
        dist.Distribution.__init__(
            self, batch_shape, components.event_shape, validate_args=validate_args
        )

    @constraints.dependent_property
    def support(self) -> constraints.Constraint:
        """The support of every component."""
        return _common_support(self.component_distribution)

    @validate_sample
    def log_prob(self, value: ArrayLike, intermediates: Any = None) -> Array:
        """Bound of the log density of each observation, that of its L best components."""
        del intermediates
        weights, shape = self._weights(value)
        if self.num_active == self.mixture_size:
            log_prob = log_sum(weights.all())
        else:
            log_prob = log_sum(weights.at(weights.best(self.num_active)))
        _check_result(log_prob, weights, shape)
        return log_prob.reshape(shape)

    def responsibilities(self, value: ArrayLike) -> TopLCategorical:
        """Posterior of the component of each observation, its L best components.

        Batch shape: the broadcast of ``value``'s shape, without the event, and ``batch_shape``.

        Cost: as ``log_prob``.
        """
        weights, shape = self._weights(value)
        best = weights.best(self.num_active)
        return TopLCategorical(
            best.reshape(*shape, self.num_active),
            weights.at(best).reshape(*shape, self.num_active),
            self.mixture_size,
            validate_args=False,
        )

    def sample_with_intermediates(
        self, key: Array, sample_shape: tuple[int, ...] = ()
    ) -> tuple[Array, list[Array]]:
        """Draw observations, and the component of each.

        Cost: O(K) time for each draw, to choose its component; memory as ``log_prob``.
        """
        shape = sample_shape + self.batch_shape
        choice_key, draw_key = random.split(key)
        logits = jnp.asarray(self.mixing_distribution.logits)  # of NumPy they may be wider
        if logits.ndim > 1:
            logits = jnp.broadcast_to(logits, (*self.batch_shape, self.mixture_size))
        own = logits.ndim - 1  # batch axes of the logits; the others are independent draws
        chosen = noisy_max(choice_key, logits, sample_shape=shape[: len(shape) - own])
        components = Components(self.component_distribution, shape)
        draws = components.draw(draw_key, chosen.reshape(-1))
        return draws.reshape(shape + self.event_shape), [chosen]

    def _weights(self, value: ArrayLike) -> tuple[ComponentWeights, tuple[int, ...]]:
        """Log weights of the observations, one after the other, and their shape."""
        check_finite([("`value`", value)])
        value = as_jax_array(value)
        cut = value.ndim - self.event_dim
        check_shape("`value`", value, (..., *self.event_shape), "events of the components")
        shape = lax.broadcast_shapes(value.shape[:cut], self.batch_shape)
        values = jnp.broadcast_to(value, shape + self.event_shape)
        log_pi = jax.nn.log_softmax(self.mixing_distribution.logits, axis=-1)
        num_values = math.prod(shape) * self.mixture_size
        components = Components(whiten(self.component_distribution, num_values), shape)
        flat = values.reshape(math.prod(shape), *self.event_shape)
        return ComponentWeights(log_pi, components, flat), shape


def _check_result(log_prob: Array, weights: ComponentWeights, shape: tuple[int, ...]) -> None:
    """Name the observation and the component whose log weight is NaN; tracers pass."""
    if not is_concrete(log_prob) or not np.isnan(log_prob).any():
        return
    row = int(np.argmax(np.isnan(log_prob)))
    component = int(np.argmax(np.isnan(weights.of(jnp.array([row]))[0])))
    place = tuple(int(i) for i in np.unravel_index(row, shape))
    raise ValueError(
        f"the log weight of component {component} is NaN for the observation at position {place}; "
        "look at its parameters."
    )


def _common_support(components: dist.Distribution) -> constraints.Constraint:
    """Support of any component, without the axis of the components."""
    support = components.support
    inner = getattr(support, "reinterpreted_batch_ndims", 0)  # of a `constraints.independent`

    def of_any(bound: Any) -> Any:
        if jnp.ndim(bound) <= inner:
            return bound
        if jnp.shape(bound)[-1 - inner] != 1:
            raise ValueError(
                f"`components` must have the same support; got {support}. Give bounds as scalars."
            )
        return jnp.squeeze(bound, -1 - inner)

    return jax.tree.map(of_any, support)
