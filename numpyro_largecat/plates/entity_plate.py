# SPDX-License-Identifier: Apache-2.0
"""Plate over entities, such as users or groups, that observations read by id."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from numpyro_largecat._checks import (
    BadDataError,
    check_count,
    check_ids_or_none,
    check_integers,
    check_kind,
    is_concrete,
)
from numpyro_largecat._conversions import NO_ID, as_ids_or_none
from numpyro_largecat.handlers.internals import is_substituted, open_plates
from numpyro_largecat.handlers.plate_facts import PlateFacts, RowsReply, ask_for_rows
from numpyro_largecat.handlers.sites import is_latent
from numpyro_largecat.plates.class_plate import class_plate
from numpyro_largecat.plates.entity_counts import EntityCounts
from numpyro_largecat.plates.entity_subset import (
    EntitySubset,
    all_entities,
    chosen_entities,
    entities_of_ids,
)
from numpyro_largecat.plates.indexed_plate import indexed_plate, refuse_chain


class entity_plate(indexed_plate):
    r"""Plate over U entities (users, customers, groups, input words) that are read by id.

    A step holds the distinct entities that its minibatch reads, however often. The prior and KL
    terms of entity e have the weight

    .. math:: \mathrm{weight}_e = \frac{N}{B} \, \frac{c_e}{n_e},

    where B of the N observations are in the minibatch, which read e c_e times, and all observations
    read it n_e times. Of rows drawn uniformly, as ``SubsampledSVI.run`` and ``data_plate`` have
    them, c_e is B n_e / N on average, so each entity counts once, in value and gradient. (A data
    plate over such ids would weigh an entity by how often it occurs.)

    **Reading.** ``users.rows_of(v, ids)`` gives each observation the rows of its entities, in
    training as in prediction. A model may read by several arrays of any shapes, such as the user
    and the last 20 items of each observation, if ``ids`` and ``counts`` have them all; -1 stands
    for none. It composes with class plates: a two-sided model scores ``users.rows_of(v, u) @ w.T``.

    **Entities without observations** are never touched: their guide stays as it was initialised,
    not at the prior. Fold them in by their first rows, see the page on entities.

    **A site is in no other plate of a minibatch.** Of two entity plates, entities that are read
    together would come together, and rows come with the entities that they read, so that the
    product of two weights is not 1 on average: give pairs a plate of their own. (Classes that a
    class plate draws are drawn anew for each minibatch, so that sites of both are right.)

    Without ``ids`` the plate is full: all entities in order, weight 1, as MCMC needs them.

    Shapes: the plate has M = min(number of ids, U) rows, of which repeated ids leave some padded,
    with weight 0.

    Cost: O(M log M) time and O(M) memory, whatever U; O(U) once, for ``counts``.

    Args:
        name: Name of the plate.
        size: Number of entities U, a Python int in [1, 2**31).
        ids: Entities that the minibatch reads, integers in [0, U), or -1 for none: an array with a
            row for each observation, or a tuple of such arrays. None for all entities.
        counts: ``lc.EntityCounts.of(size, *all_ids)``, with as many arrays of the same shapes but
            for the number of observations. Needed with ``ids``.
        dim: Batch dimension of the plate, negative; the rightmost free one by default.

    Raises:
        TypeError: If ``ids`` are not integers, or ``counts`` are no ``EntityCounts``.
        ValueError: If an id is out of range, if ``counts`` are of another number of entities, or if
            the guide opened a plate of the same name that holds other rows, or if a site is in this
            plate and in another one of a minibatch's entities or rows. (Under ``jit``, where ids
            are not known, the log density is NaN. It is NaN for an entity that has no count too, as
            one of held-out rows may have none.)

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_largecat as lc
        >>> counts = lc.EntityCounts.of(1000, jnp.array([7, 3, 7, 5, 7, 3]))  # 6 observations
        >>> with lc.entity_plate("users", 1000, jnp.array([7, 3, 7]), counts) as users:
        ...     print(users.indices[:2], users.weights)
        [3 7] [1.        1.3333334 0.       ]
    """

    def __init__(
        self,
        name: str,
        size: int,
        ids: ArrayLike | Sequence[ArrayLike] | None = None,
        counts: EntityCounts | None = None,
        *,
        dim: int | None = None,
    ) -> None:
        size = check_count("size", size, 1)
        given = None if ids is None else _checked(name, size, ids, counts)
        self.entities, reply = _choose_entities(name, size, given, counts)
        is_chosen = reply.request.is_chosen
        labels = None if given is None else jnp.concatenate([ids.ravel() for ids in given])
        facts = PlateFacts(
            "entities",
            is_full=given is None and not is_chosen,
            is_distinct=is_chosen,
            row_weights=None if given is None or is_chosen else self.entities.weights,
            # With entity 0 in the place of none.
            labels=None if labels is None else jnp.where(labels == NO_ID, 0, labels),
            are_nobody=None if labels is None else labels == NO_ID,
            stands_for=None if given is None else _ratio(given, counts),
        )
        self._is_own = not (facts.is_full or is_chosen or reply.is_shared)
        self._is_part = self._is_own and facts.stands_for != 1
        rows = self.entities.indices
        super().__init__(name, size, rows, dim, is_shared=reply.is_shared, facts=facts)

    def __enter__(self) -> EntitySubset:
        """Open the plate and return its ``EntitySubset``."""
        super().__enter__()
        return self.entities

    def postprocess_message(self, msg: dict[str, Any]) -> None:
        """Also refuse values from elsewhere, and sites of another plate of a minibatch."""
        super().postprocess_message(msg)
        if self._is_part and msg["type"] == "sample":
            refuse_chain(self.name, "the entities of some of the observations")
            self._refuse_pairs(msg)
        if self._is_own and is_latent(msg) and is_substituted(msg):
            raise ValueError(
                f"site '{msg['name']}' inside plate '{self.name}' gets its value from a handler, "
                "such as `Predictive`, that does not know which entities the plate holds. Predict "
                "by `lc.Fitted`; or run guide and model with a full plate, "
                f"`lc.entity_plate('{self.name}', {self.size})`, which `rows_of` reads by the same "
                "ids."
            )

    def _refuse_pairs(self, msg: dict[str, Any]) -> None:
        """Refuse a site of pairs of which those that are read together come together."""
        for plate in open_plates():
            if plate is self or isinstance(plate, class_plate):
                continue
            if isinstance(plate, entity_plate):
                if plate._is_part:
                    raise ValueError(
                        f"site '{msg['name']}' is inside the entity plates '{self.name}' and "
                        f"'{plate.name}', whose weights would count pairs that are read together "
                        "too often. Number the pairs that occur, and give these an entity plate of "
                        "their own."
                    )
            elif plate.subsample_size != plate.size:
                raise ValueError(
                    f"site '{msg['name']}' is inside the entity plate '{self.name}' and the plate "
                    f"'{plate.name}', which holds {plate.subsample_size} of {plate.size} rows, so "
                    "that entities would count too often with the rows that read them. Leave one "
                    "of them before the statement: rows have the values of their entities by "
                    "`rows_of`."
                )


def _choose_entities(
    name: str, size: int, ids: list[Array] | None, counts: EntityCounts | None
) -> tuple[EntitySubset, RowsReply]:
    """Make the subset, or take the rows that a handler has."""
    if ids is None or counts is None:
        entities = all_entities(name, size)
        reply = ask_for_rows(name, size, entities.indices, source="all classes")
    else:
        entities = entities_of_ids(name, size, ids, counts, None)
        reply = ask_for_rows(name, size, entities.indices, source="read rows")
        if not reply.request.is_read:
            _check_counted(name, entities)
        if reply.request.also is not None:
            entities = entities_of_ids(name, size, ids, counts, reply.request.also)
        entities = entities.reversed_if(reply.request.is_reversed)
    if reply.request.is_chosen:
        return chosen_entities(reply.plate, size, reply.value), reply
    return entities, reply


def _checked(
    name: str, size: int, ids: ArrayLike | Sequence[ArrayLike], counts: EntityCounts | None
) -> list[Array]:
    """The arrays of ids; those that int32 cannot hold become ids out of range."""
    own: list[Any] = list(ids) if isinstance(ids, (tuple, list)) else [ids]
    for given in own:
        check_integers("ids", given)
        check_ids_or_none(f"`ids` of plate '{name}'", given, size, "entities")
    form = "lc.EntityCounts.of(size, *all_ids), or left out like `ids` to hold all entities"
    check_kind("counts", counts, EntityCounts, form)
    assert counts is not None
    if counts.counts.shape != (size,):
        raise ValueError(
            f"`counts` of plate '{name}' must have one entry for each of {size} entities; got "
            f"{counts.counts.shape[0]}. Make them by `lc.EntityCounts.of({size}, *all_ids)`."
        )
    if sum(np.size(given) for given in own) == 0:
        raise ValueError(f"`ids` of plate '{name}' must not be empty.")
    return [as_ids_or_none(given) for given in own]


def _check_counted(name: str, entities: EntitySubset) -> None:
    """Refuse entities that no observation was counted for; tracers pass."""
    if is_concrete(entities.weights):
        weights = np.asarray(entities.weights)
        if np.isnan(weights).any():
            unknown = np.asarray(entities.indices)[np.isnan(weights)]
            raise BadDataError(
                f"`counts` of plate '{name}' must count the ids of all observations, those of "
                f"each minibatch too; {len(unknown)} entities have no count, {unknown[0]} for one."
            )


def _ratio(ids: list[Array], counts: EntityCounts | None) -> float:
    """Ids of the whole data for each id of the minibatch, N / B."""
    assert counts is not None
    return counts.num_ids / sum(given.size for given in ids)
