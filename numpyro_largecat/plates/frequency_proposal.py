# SPDX-License-Identifier: Apache-2.0
"""Draw classes in proportion to a power of their counts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from numpyro_largecat._conversions import LARGEST_ID
from numpyro_largecat.ops.subsampling import draw_by_mass
from numpyro_largecat.plates.class_proposal import known
from numpyro_largecat.plates.uniform_classes import DrawnClasses


@jax.tree_util.register_pytree_node_class
class FrequencyProposal:
    r"""Draw classes in proportion to a power of their counts.

    Of the classes that are not labels, S draws have probabilities and weights

    .. math:: q_k = \frac{\mathrm{counts}_k^{\mathrm{power}}}
                         {\sum_{j \notin \mathrm{labels}} \mathrm{counts}_j^{\mathrm{power}}},
              \qquad w_k = \frac{\mathrm{number\ of\ draws\ of\ } k}{S \, q_k},

    which is unbiased for the sum over all classes. The draws are spread evenly: one comes from each
    of S intervals of equal probability, which the classes fill in their order. So a frequent class
    comes S q_k times, give or take two, and but for rounding no sum has a higher variance than
    under independent draws. (Probabilities are rounded to multiples of about ``2**-31``, at least
    one for each class; weights are those of the rounded ones.)

    The sum over classes in a likelihood has least variance if q is about proportional to its terms,
    as it is for frequent classes. Terms that do not follow the counts, such as the prior or KL of
    each class, get a higher variance than under uniform draws: rare classes have large weights. See
    ``python -m benchmarks.proposals``.

    Cost: O(S log(B K)) time per step. O(K) once, and one integer kept for each of K classes.

    Args:
        counts: Frequency of each class, such as its number of training labels, shape (K,),
            non-negative. Known outside ``jit``.
        power: Exponent in [0, inf); 0 draws uniformly.

    Raises:
        ValueError: If ``counts`` has not one axis with at least two classes, if a count is negative
            or not finite, if ``counts ** power`` is zero for some class, which then could never be
            drawn, or if ``power`` is out of range; in a class plate, if K differs.
        TypeError: If ``counts`` is traced.

    Example:
        >>> import jax.numpy as jnp, numpyro
        >>> import numpyro_largecat as lc
        >>> proposal = FrequencyProposal(jnp.array([90, 0, 6, 3, 1]) + 1)
        >>> with numpyro.handlers.seed(rng_seed=0):
        ...     plate = lc.class_plate("k", 5, jnp.array([0]), num_sampled=2, proposal=proposal)
        >>> plate.classes.indices.shape
        (3,)

    References:
        Ruiz, Titsias, Dieng and Blei, Augment and Reduce, ICML 2018, section 2.1, footnote 2
        (importance sampling by class frequency).
        Mikolov, Sutskever, Chen, Corrado and Dean, Distributed Representations of Words and
        Phrases and their Compositionality, NIPS 2013, section 2.2 (the power 3/4).
    """

    ends: Array  # (K,), int32, cumulative integer masses

    def __init__(self, counts: ArrayLike, power: float = 0.75) -> None:
        mass = _relative_mass(known("counts", counts), power)
        units = 1 + np.floor(mass * (LARGEST_ID - 1 - len(mass))).astype(np.int64)
        with jax.ensure_compile_time_eval():
            self.ends = jnp.asarray(np.cumsum(units), jnp.int32)

    def draw(
        self, rng_key: Array, labels: Array, num_categories: int, num_sampled: int
    ) -> DrawnClasses:
        """Draw classes, see ``ClassProposal``."""
        if self.ends.shape[0] != num_categories:
            raise ValueError(
                f"`counts` of FrequencyProposal must have one entry for each of {num_categories} "
                f"classes; got {self.ends.shape[0]}."
            )
        return DrawnClasses(*draw_by_mass(rng_key, self.ends, labels, num_sampled))

    def tree_flatten(self) -> tuple[tuple[Array], None]:
        """The table is data, so that a model may take the proposal as an argument."""
        return (self.ends,), None

    @classmethod
    def tree_unflatten(cls, _: None, children: tuple[Array]) -> FrequencyProposal:
        """Undo ``tree_flatten``."""
        proposal = object.__new__(cls)
        (proposal.ends,) = children
        return proposal

    def __repr__(self) -> str:
        """Show the number of classes, not the table."""
        return f"FrequencyProposal(<{np.shape(self.ends)[0]} classes>)"


def _relative_mass(counts: np.ndarray, power: float) -> np.ndarray:
    """Check ``counts`` and ``power``, and return probabilities in float64."""
    if counts.ndim != 1 or len(counts) < 2:
        raise ValueError(
            "`counts` of FrequencyProposal must have shape (K,), one entry for each of at least "
            f"two classes; got shape {counts.shape}."
        )
    if not 0 <= power < np.inf:
        raise ValueError(f"`power` must be in [0, inf); got {power}.")
    counts = counts.astype(np.float64)
    bad = ~(np.isfinite(counts) & (counts >= 0))
    if bad.any():
        first = int(np.argmax(bad))
        raise ValueError(
            f"`counts` must be finite and non-negative; got {counts[first]} at position {first}."
        )
    mass = (counts / max(counts.max(), 1e-300)) ** power
    if not mass.all():
        raise ValueError(
            "`counts ** power` must be positive for each class, since one that is never drawn "
            f"would be missing from every sum; got 0 at position {int(np.argmin(mass))}, and "
            f"{int((mass == 0).sum())} of {len(mass)} are 0. Use `counts + 1`."
        )
    return mass / mass.sum()
