# SPDX-License-Identifier: Apache-2.0
"""The one-vs-each bound of the softmax, and the tighter bounds above it in its hierarchy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike
from numpyro.distributions import constraints

from numpyro_largecat._checks import check_broadcasts
from numpyro_largecat.choices.choice_distribution import ChoiceDistribution, utility_vector
from numpyro_largecat.plates.class_subset import ClassSubset


class OneVsEach(ChoiceDistribution):
    r"""Bound on a softmax by the probabilities of the chosen class against each other one.

    .. math:: \log p(y \mid \psi) \ge \sum_{k \ne y} \log \sigma(\psi_y - \psi_k),
              \qquad \sigma(x) = \frac{1}{1 + e^{-x}}

    It has no local variable, and it is exact with two classes. On a weighted subset of classes the
    sum is estimated without bias. The price is a gap that grows with the number of classes that
    compete with the chosen one: with K equal utilities the bound is -(K - 1) log 2 for -log K.

    **Classes kept together.** With C the classes that ``together`` marks,

    .. math:: \log p(y \mid \psi) \ge
              - \log\Big(1 + \sum_{k \in C, k \ne y} e^{\psi_k - \psi_y}\Big)
              + \sum_{k \notin C, k \ne y} w_k \log \sigma(\psi_y - \psi_k).

    The more classes in C the tighter, up to the softmax itself with all of them. On a subset C
    holds only classes that are surely there, which have weight 1, since the logarithm of an
    estimated sum would be biased; marked classes of another weight stay in the second sum. Labels
    of all observations in the batch have weight 1, as has the head of a ``HeadProposal``. So
    ``together=True`` keeps these together: C then differs from batch to batch, and the bound holds
    with each. (Where less than twice ``num_sampled`` classes are left to draw from, some of those
    drawn have weight 1, which are surely there given where the intervals start; draws by frequency
    may have it by chance. To keep labels alone together, with "batch" ``negatives``, mark them:
    ``together=classes.holds(classes.indices)``.) With "shared" or "own" ones that is the label.

    Shapes: ``batch_shape`` is ``utilities.shape[:-1]``; ``event_shape`` is ().

    Cost: O(K) time and memory per observation with all classes, O(M) with a subset.

    Args:
        utilities: Mean utilities psi in nats, shape (..., K), or (..., M) for ``classes``.
        classes: What ``with class_plate(...) as classes`` gives. None for all classes.
        together: Which columns of ``utilities`` to keep together, booleans of a shape that
            broadcasts to that of ``utilities``: (M,) for one C, (..., M) for a C per observation.
            None for none of them.
        validate_args: Also check values, outside ``jit``. Shapes are always checked.

    Raises:
        ValueError: If ``together`` does not broadcast to the shape of ``utilities``; otherwise as
            ``UtilityCategorical``.
        TypeError: If ``together`` is not boolean; otherwise as ``UtilityCategorical``.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_largecat as lc
        >>> utilities = jnp.zeros(4)  # log p = -log 4 = -1.386
        >>> lc.bounds.OneVsEach(utilities).log_prob(0).round(3).item()  # -3 log 2
        -2.079
        >>> head = jnp.array([True, True, True, False])
        >>> d = lc.bounds.OneVsEach(utilities, together=head)
        >>> d.log_prob(0).round(3).item()  # -log 3 - log 2
        -1.792

    References:
        Titsias, One-vs-Each Approximation to Softmax, NIPS 2016, Eq. 4 and, for ``together``,
        Eq. 6.
    """

    arg_constraints = {
        "utilities": utility_vector,
        "together": constraints.dependent(is_discrete=True, event_dim=1),
    }
    pytree_data_fields = ("utilities", "classes", "together")

    def __init__(
        self,
        utilities: ArrayLike,
        classes: ClassSubset | None = None,
        *,
        together: ArrayLike | None = None,
        validate_args: bool | None = None,
    ) -> None:
        self.together = None if together is None else _marks(together, jnp.shape(utilities))
        super().__init__(utilities, classes, validate_args=validate_args)

    def _log_prob(self, value: Array) -> Array:
        utilities, rows = self.label_entries(value)
        distances, weights = self.competitors(value)
        terms = weights * jax.nn.log_sigmoid(distances)
        if self.together is None:
            return terms.sum(axis=-1)
        together = self.together & (weights == 1)
        is_own = jnp.arange(utilities.shape[-1]) == rows[..., None]
        below = jnp.where(together | is_own, -distances, -jnp.inf)
        return jnp.where(together, 0, terms).sum(axis=-1) - jax.nn.logsumexp(below, axis=-1)


def _marks(together: ArrayLike, shape: tuple[int, ...]) -> Array:
    marks = jnp.asarray(together)
    if marks.dtype != bool:
        raise TypeError(
            f"`together` must be booleans; got dtype {marks.dtype}. Mark the classes `ids` with "
            "`jnp.isin(classes.indices, ids)`."
        )
    check_broadcasts("`together`", marks, shape, "a mark for each column of `utilities`")
    return marks
