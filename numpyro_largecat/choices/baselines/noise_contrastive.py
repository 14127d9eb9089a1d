# SPDX-License-Identifier: Apache-2.0
"""Noise-contrastive estimation, a biased baseline for choices among many classes."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from numpyro_largecat._checks import check_count
from numpyro_largecat.choices.choice_distribution import ChoiceDistribution
from numpyro_largecat.ops.softmax_bound import take_row
from numpyro_largecat.plates.class_subset import ClassSubset


class NoiseContrastive(ChoiceDistribution):
    r"""Noise-contrastive estimation of a softmax: *biased, no bound, and no log probability*.

    Its value is the log likelihood of another task, to tell the observed class from S =
    ``num_noise`` classes drawn uniformly as noise. It is not in nats of the choice, so an ELBO
    that contains it bounds nothing, and posterior widths mean nothing. It is here as the baseline
    that papers compare with; for inference use ``sample_choice``.

    With Z the normaliser of the model and q = 1/K the probability of a class as noise,

    .. math:: P(\mathrm{observed} \mid k) = \sigma(a_k), \qquad
              a_k = \psi_k - \log Z - \log(S q),

    and ``log_prob`` is the expectation over the noise,

    .. math:: \log \sigma(a_y) + S \sum_k q \log \sigma(-a_k).

    This is a sum over all classes, the observed one included, since noise may hit it. On a
    weighted subset it is estimated without bias: the classes that the plate draws then are the
    noise, whatever their number, with S only the ratio of noise to observations.

    Z is held at 1, or is what ``log_normalizer`` says; no step computes it. Where the model can
    normalise itself, so that sum_k exp(psi_k) = Z can hold for every observation, the best
    utilities are those of maximum likelihood for any S. Elsewhere they differ, the less the larger
    S; as S grows the gradient becomes that of psi_y - log Z - sum_k exp(psi_k) / Z.

    Shapes: ``batch_shape`` is the broadcast of ``utilities.shape[:-1]`` and ``log_normalizer``'s
    shape; ``event_shape`` is ().

    Cost: O(K) time and memory per observation with all classes, O(M) with a subset.

    Args:
        utilities: Utilities psi in nats, shape (..., K), or (..., M) for ``classes``.
        classes: What ``with class_plate(...) as classes`` gives. None for all classes.
        num_noise: Number of noise samples S for each observation, a Python int of at least 1;
            the ``num_sampled`` of the plate, for the textbook's estimate.
        log_normalizer: log Z in nats, shape (...). None for 0.
        validate_args: Also check values, outside ``jit``. Shapes are always checked.

    Raises:
        ValueError: If ``num_noise`` is less than 1, or ``log_normalizer`` has not one entry for
            each observation; otherwise as ``UtilityCategorical``.
        TypeError: If ``num_noise`` is not a Python int; otherwise as ``UtilityCategorical``.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_largecat as lc
        >>> log_probs = jnp.log(jnp.array([0.5, 0.25, 0.25]))
        >>> d = lc.baselines.NoiseContrastive(log_probs, num_noise=3)
        >>> d.log_prob(0).round(3).item()  # log(1/3) + log(2/3) + 2 log(4/5)
        -1.95

    References:
        Gutmann and Hyvärinen, Noise-Contrastive Estimation, AISTATS 2010; Mnih and Teh, A Fast and
        Simple Algorithm for Training Neural Probabilistic Language Models, ICML 2012.
    """

    pytree_data_fields = ("utilities", "classes", "log_normalizer")
    pytree_aux_fields = ("num_noise",)
    log_normalizer: Array | None

    def __init__(
        self,
        utilities: ArrayLike,
        classes: ClassSubset | None = None,
        *,
        num_noise: int,
        log_normalizer: ArrayLike | None = None,
        validate_args: bool | None = None,
    ) -> None:
        self.num_noise = check_count("num_noise", num_noise, 1)
        super().__init__(
            utilities,
            classes,
            local={"log_normalizer": log_normalizer},
            validate_args=validate_args,
        )

    def _log_prob(self, value: Array) -> Array:
        utilities, rows = self.label_entries(value)
        noise = self.num_noise / self.num_categories  # expected number of draws of each class
        log_ratio = utilities - math.log(noise)
        if self.log_normalizer is not None:
            log_ratio = log_ratio - self.log_normalizer[..., None]
        weights = jnp.asarray(1.0) if self.classes is None else self.classes.weights
        in_noise = (weights.astype(utilities.dtype) * jax.nn.softplus(log_ratio)).sum(axis=-1)
        return jax.nn.log_sigmoid(take_row(log_ratio, rows)) - noise * in_noise
