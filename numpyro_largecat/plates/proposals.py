# SPDX-License-Identifier: Apache-2.0
"""Ways to draw the classes that stand for all classes which are not labels of the batch."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from numpyro_largecat._checks import (
    MOST,
    as_ids,
    check_in_range,
    check_integers,
    describe,
    is_concrete,
)
from numpyro_largecat.ops.subsampling import (
    draw_by_mass,
    draw_without_replacement,
    is_among,
    skip_labels,
    sorted_distinct,
)
from numpyro_largecat.ops.table_rows import merge_repeats


class DrawnClasses(NamedTuple):
    """Classes that were drawn, and their weights."""

    classes: Array  # (S,), integers in [0, K); any where the weight is 0
    weights: Array  # (S,), 0 for padding


class ClassProposal(Protocol):
    r"""How a class plate draws classes besides the labels of the batch: an object with ``draw``.

    The weighted sums over a plate are unbiased for the sum over all classes if the weights that a
    class gets add up to one on average, for each class k that is not a label:

    .. math:: E\Big[\sum_s \mathrm{weights}_s \, [\mathrm{classes}_s = k]\Big] = 1.

    So S independent draws from probabilities q have weights ``1 / (S * q[classes])``. The plate
    adds up the weights of repeated classes and gives weight 0 to drawn classes that are labels,
    which it has already, so a proposal need not know the labels. A class out of range makes the
    log probability NaN.

    **A proposal keeps no state.** Its arrays are those of the first run: ``SubsampledSVI`` compiles
    its steps with them. A table that changes between runs is a pytree that is passed to the model
    as an argument, as ``FrequencyProposal`` and ``HeadProposal`` may be: register its class with
    ``jax.tree_util.register_pytree_node_class``.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro
        >>> import numpyro_largecat as lc
        >>> class EvenClasses:
        ...     '''Draw even classes three times as often as odd ones.'''
        ...     def draw(self, rng_key, labels, num_categories, num_sampled):
        ...         q = jnp.where(jnp.arange(num_categories) % 2 == 0, 3.0, 1.0)
        ...         q = q / q.sum()
        ...         classes = jax.random.choice(rng_key, num_categories, (num_sampled,), p=q)
        ...         return classes, 1 / (num_sampled * q[classes])
        >>> with numpyro.handlers.seed(rng_seed=0):
        ...     plate = lc.class_plate("classes", 10, num_sampled=5, proposal=EvenClasses())

        Nothing can tell wrong weights in a fit, which then goes to the wrong place. So try your
        own before: the weights that classes get must have mean one.

        >>> def weights_of_classes(rng_key):
        ...     drawn, weights = EvenClasses().draw(rng_key, jnp.array([10]), 10, 5)
        ...     return jnp.zeros(10).at[drawn].add(weights)
        >>> means = jax.vmap(weights_of_classes)(jax.random.split(jax.random.key(0), 4000)).mean(0)
        >>> bool((abs(means - 1) < 0.1).all())
        True
    """

    def draw(
        self, rng_key: Array, labels: Array, num_categories: int, num_sampled: int
    ) -> tuple[Array, Array]:
        """Draw classes.

        Args:
            rng_key: A JAX random key.
            labels: Sorted distinct labels, then padding equal to K, shape (min(B, K),).
            num_categories: Number of classes K, a Python int.
            num_sampled: The plate's argument, a Python int.

        Returns:
            Classes, integers in [0, K), and their weights; both shape (L,) of any fixed length.
        """
        ...


@partial(jax.jit, static_argnums=(2, 3))
def draw_uniform(
    rng_key: Array, present: Array, num_categories: int, num_sampled: int
) -> DrawnClasses:
    """Draw uniformly without replacement from the classes that are not present.

    If fewer than ``num_sampled`` remain, all of them come, with weight 1, and then padding.

    Cost: O(S log S + B log B).

    Args:
        rng_key: A JAX random key.
        present: Sorted distinct classes, then padding equal to K, shape (B,).
        num_categories: Number of classes K.
        num_sampled: Number of draws S.
    """
    num_others = num_categories - (present < num_categories).sum(dtype=jnp.int32)
    ranks = draw_without_replacement(
        rng_key,
        num_others,
        num_sampled,
        min_population=num_categories - min(present.shape[0], num_categories),
        max_population=num_categories,
    )
    num_drawn = jnp.minimum(num_sampled, num_others)
    is_drawn = jnp.arange(num_sampled) < num_drawn
    weight = num_others.astype(jnp.result_type(float)) / jnp.maximum(num_drawn, 1)
    classes = skip_labels(ranks, present, num_categories)
    return DrawnClasses(jnp.where(is_drawn, classes, 0), jnp.where(is_drawn, weight, 0))


@partial(jax.jit, static_argnums=(2, 3))
def draw_per_observation(
    rng_key: Array, labels: Array, num_categories: int, num_sampled: int
) -> DrawnClasses:
    """Draw for each label, uniformly without replacement, from the other K - 1 classes.

    Shapes: classes (B, S); weights (S,), the same for each observation.

    Cost: O(B S log S).
    """
    num_others = num_categories - 1

    def draw(rng_key: Array) -> Array:
        return draw_without_replacement(
            rng_key, num_others, num_sampled, min_population=num_others, max_population=num_others
        )

    ranks = jax.vmap(draw)(jax.random.split(rng_key, labels.shape[0]))
    weights = jnp.full(num_sampled, num_others / num_sampled)
    return DrawnClasses(ranks + (ranks >= labels[:, None]), weights)


def draw_others(
    proposal: ClassProposal | None,
    rng_key: Array,
    labels: Array,
    num_categories: int,
    num_sampled: int,
) -> DrawnClasses:
    """Draw distinct classes that are not among the sorted distinct ``labels``."""
    if proposal is None:
        return draw_uniform(rng_key, labels, num_categories, num_sampled)
    drawn: Any = proposal.draw(rng_key, labels, num_categories, num_sampled)
    if not isinstance(drawn, tuple | list) or len(drawn) != 2:
        raise TypeError(
            "`proposal.draw` must return a pair, the classes and their weights; got "
            f"{describe(drawn)}."
        )
    classes, weights = drawn
    check_integers("classes of proposal.draw", classes)
    classes, weights = as_ids(classes), jnp.asarray(weights)
    if classes.ndim != 1 or classes.shape != weights.shape:
        raise ValueError(
            "`proposal.draw` must return classes and weights, both of one shape (L,); "
            f"got shapes {classes.shape} and {weights.shape}."
        )
    return _merge_draws(classes, weights, labels, num_categories)


@partial(jax.jit, static_argnums=3)
def _merge_draws(
    classes: Array, weights: Array, labels: Array, num_categories: int
) -> DrawnClasses:
    """Add up the weights of each class that is not a label; the rest is padding."""
    weights = weights.astype(jnp.result_type(float))
    in_range = (classes >= 0) & (classes < num_categories)
    valid = (in_range | (weights == 0)).all()
    counts = in_range & (weights != 0) & ~is_among(classes, labels)
    distinct, position = merge_repeats(jnp.where(counts, classes, num_categories), num_categories)
    sums = jnp.zeros_like(weights).at[position].add(jnp.where(counts, weights, 0))
    return DrawnClasses(distinct, jnp.where(valid, sums, jnp.nan))


@jax.tree_util.register_pytree_node_class
class FrequencyProposal:
    r"""Draw classes with replacement, in proportion to a power of their counts.

    Of the classes that are not labels, S independent draws have probabilities and weights

    .. math:: q_k = \frac{\mathrm{counts}_k^{\mathrm{power}}}
                         {\sum_{j \notin \mathrm{labels}} \mathrm{counts}_j^{\mathrm{power}}},
              \qquad w_k = \frac{\mathrm{number\ of\ draws\ of\ } k}{S \, q_k},

    which is unbiased for the sum over all classes. (Probabilities are rounded to multiples of about
    ``2**-31``, at least one for each class; weights are those of the rounded ones.)

    The sum over classes in a likelihood has least variance if q is about proportional to its terms,
    as it is for frequent classes. Terms that do not follow the counts, such as the prior or KL of
    each class, get a higher variance than under uniform draws: rare classes have large weights. See
    ``python -m benchmarks.proposals``.

    Cost: O(S log(B K)) time per step. O(K) once, and one integer kept for each of K classes.

    Args:
        counts: Frequency of each class, such as its number of training labels, shape (K,),
            non-negative. Known outside ``jit``.
        power: Exponent in [0, inf); 0 draws uniformly, with replacement.

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
        mass = _relative_mass(_known("counts", counts), power)
        units = 1 + np.floor(mass * (MOST - 1 - len(mass))).astype(np.int64)
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
        classes, inverse = draw_by_mass(rng_key, self.ends, labels, num_sampled)
        return DrawnClasses(classes, inverse / num_sampled)

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


def _known(name: str, values: ArrayLike) -> np.ndarray:
    if not is_concrete(values):
        raise TypeError(
            f"`{name}` must be known; got an array that is traced. Make the proposal once, outside "
            "of the compiled function and the model."
        )
    return np.asarray(values)


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


@jax.tree_util.register_pytree_node_class
class HeadProposal:
    r"""Take some classes in each step, and draw uniformly without replacement from the others.

    Labels of the batch and the H classes of the head have weight 1; S of the other R classes have
    weight R / S. For problems in which a few classes hold most of the probability: their terms are
    then summed exactly.

    Cost: O(S log S + (B + H) log(B + H)) time and H more rows of the plate.

    Args:
        head: Ids of the classes to take in each step, distinct integers in [0, K), shape (H,);
            the H most frequent are ``np.argsort(-counts)[:H]``.

    Raises:
        ValueError: If ``head`` has not one axis, or holds a repeated or negative id; in a class
            plate, if it holds an id of K or more.
        TypeError: If ``head`` is traced or is not integers.

    Example:
        >>> import jax.numpy as jnp, numpyro
        >>> import numpyro_largecat as lc
        >>> head = HeadProposal(jnp.array([0, 1, 2]))
        >>> with numpyro.handlers.seed(rng_seed=0):
        ...     plate = lc.class_plate("k", 10, jnp.array([1]), num_sampled=2, proposal=head)
        >>> plate.classes.indices[:3].tolist(), plate.classes.weights.tolist()
        ([1, 0, 2], [1.0, 1.0, 1.0, 3.5, 3.5, 0.0])
    """

    head: Array  # (H,), int32

    def __init__(self, head: ArrayLike) -> None:
        ids = _known("head", head)
        check_integers("head", ids)
        if ids.ndim != 1:
            raise ValueError(f"`head` must have shape (H,), ids of classes; got shape {ids.shape}.")
        check_in_range("`head`", ids, MOST, "classes")
        if len(np.unique(ids)) < len(ids):
            raise ValueError("`head` must hold each class once; use `np.unique(head)`.")
        with jax.ensure_compile_time_eval():
            self.head = as_ids(ids)

    def draw(
        self, rng_key: Array, labels: Array, num_categories: int, num_sampled: int
    ) -> DrawnClasses:
        """Take the head and draw classes, see ``ClassProposal``."""
        check_in_range("`head` of HeadProposal", self.head, num_categories, "classes")
        present = sorted_distinct(jnp.concatenate([self.head, labels]), num_categories)
        rest = draw_uniform(rng_key, present, num_categories, num_sampled)
        ones = jnp.ones(self.head.shape, rest.weights.dtype)
        return DrawnClasses(
            jnp.concatenate([self.head, rest.classes]), jnp.concatenate([ones, rest.weights])
        )

    def tree_flatten(self) -> tuple[tuple[Array], None]:
        """The ids are data, so that a model may take the proposal as an argument."""
        return (self.head,), None

    @classmethod
    def tree_unflatten(cls, _: None, children: tuple[Array]) -> HeadProposal:
        """Undo ``tree_flatten``."""
        proposal = object.__new__(cls)
        (proposal.head,) = children
        return proposal

    def __repr__(self) -> str:
        """Show the number of classes, not their ids."""
        return f"HeadProposal(<{np.shape(self.head)[0]} classes>)"
