# SPDX-License-Identifier: Apache-2.0
"""What chooses the classes that a class plate draws besides the labels of a batch."""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from numpyro_largecat._checks import check_integers, describe, is_concrete
from numpyro_largecat._conversions import as_ids
from numpyro_largecat.ops.subsampling import is_among
from numpyro_largecat.ops.table_rows import merge_repeats
from numpyro_largecat.plates.uniform_classes import DrawnClasses, draw_uniform


class ClassProposal(Protocol):
    r"""How a class plate draws classes besides the labels of the batch: an object with ``draw``.

    The weighted sums over a plate are unbiased for the sum over all classes if the weights that a
    class gets add up to one on average, for each class k that is not a label:

    .. math:: E\Big[\sum_s \mathrm{weights}_s \, [\mathrm{classes}_s = k]\Big] = 1.

    So S independent draws from probabilities q have weights ``1 / (S * q[classes])``. The plate
    adds up the weights of repeated classes and gives weight 0 to drawn classes that are labels,
    which it has already, so a proposal need not know the labels. A class out of range, or a
    negative weight, makes the log probability NaN.

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
            labels: Sorted distinct labels, then padding equal to K, shape (min(B, K),); of shape
                (0,) with "shared" ``negatives``, which are drawn from all K.
            num_categories: Number of classes K, a Python int.
            num_sampled: The plate's argument, a Python int.

        Returns:
            Classes, integers in [0, K), and their weights, 0 or above; both shape (L,) of any fixed
            length. Draw them apart from each other, or spread more evenly: of neighbours that come
            together ``NaturalGradient`` takes the noise for less than it is.
        """
        ...


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
    valid = ((in_range | (weights == 0)) & (weights >= 0)).all()
    counts = in_range & (weights != 0) & ~is_among(classes, labels)
    distinct, position = merge_repeats(jnp.where(counts, classes, num_categories), num_categories)
    sums = jnp.zeros_like(weights).at[position].add(jnp.where(counts, weights, 0))
    return DrawnClasses(distinct, jnp.where(valid, sums, jnp.nan))


def known(name: str, values: ArrayLike) -> np.ndarray:
    """Values of an array that a proposal is made of, or raise."""
    if not is_concrete(values):
        raise TypeError(
            f"`{name}` must be known; got an array that is traced. Make the proposal once, outside "
            "of the compiled function and the model."
        )
    return np.asarray(values)
