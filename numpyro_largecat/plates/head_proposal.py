# SPDX-License-Identifier: Apache-2.0
"""Take some classes in each step, and draw from the others."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from numpyro_largecat._checks import check_in_range, check_integers
from numpyro_largecat._conversions import LARGEST_ID, as_ids
from numpyro_largecat.ops.subsampling import sorted_distinct
from numpyro_largecat.plates.class_proposal import known
from numpyro_largecat.plates.uniform_classes import DrawnClasses, draw_uniform


@jax.tree_util.register_pytree_node_class
class HeadProposal:
    r"""Take some classes in each step, and draw uniformly from the others.

    Labels of the batch and the H classes of the head have weight 1; S of the other R classes have
    weight R / S, rounded up or down. For problems in which a few classes hold most of the
    probability: their terms are then summed exactly.

    Cost: O((B + H + S) log(B + H)) time and H more rows of the plate.

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
        ([1, 0, 2], [1.0, 1.0, 1.0, 3.0, 4.0, 0.0])
    """

    head: Array  # (H,), int32

    def __init__(self, head: ArrayLike) -> None:
        ids = known("head", head)
        check_integers("head", ids)
        if ids.ndim != 1:
            raise ValueError(f"`head` must have shape (H,), ids of classes; got shape {ids.shape}.")
        check_in_range("`head`", ids, LARGEST_ID, "classes")
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
