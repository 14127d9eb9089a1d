# SPDX-License-Identifier: Apache-2.0
"""What our plates and the handlers around them say to each other, as typed facts in messages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
from jax import Array

from numpyro_largecat.handlers.internals import apply_stack
from numpyro_largecat.handlers.sites import Site, Sites

# Where the rows of a plate come from.
Source = Literal["all classes", "all rows", "given rows", "read rows", "drawn classes"]

_KEY = "numpyro_largecat"  # of what we put into the "kwargs" of a message
_HELPER = "_rows"  # how the names of helper sites end


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("row_weights", "labels", "are_nobody", "reads", "row_ids"),
    meta_fields=(
        "kind",
        "is_full",
        "is_distinct",
        "repeats",
        "num_scored",
        "is_sampled",
        "stands_for",
    ),
)
@dataclass(frozen=True)
class PlateFacts:
    """What a plate says of the M rows that it holds.

    Attributes:
        kind: "classes" for a class plate, "entities" for an entity plate, "data" for a data plate,
            "plain" for NumPyro's own.
        is_full: Whether they are all rows of the plate in order.
        is_distinct: Whether they are known to be rows of the plate, none of them twice.
        row_weights: Scale of each row, shape (M,), if the rows have one each: of class plates and
            entity plates.
        repeats: Whether a row may be there twice, as where each observation has its own classes.
        num_scored: Of a class plate, the number of utilities that it gives one observation.
        is_sampled: Of a class plate, whether steps of a fit hold some of its classes, also where it
            holds others now.
        labels: The classes, or entities, that a plate was asked for, as one axis; None if none
            were.
        are_nobody: Which of the labels of an entity plate stand for ids of -1, which read no row.
        reads: The classes that a class plate reads by id, as one axis, -1 for none; None if none
            were given.
        row_ids: The ids that a data plate was given, shape (M,); None if it was given none.
        stands_for: Of an entity plate, the ids of the whole data for each id of the minibatch.
    """

    kind: Literal["classes", "entities", "data", "plain"] = "plain"
    is_full: bool = False
    is_distinct: bool = False
    row_weights: Array | None = None
    repeats: bool = False
    num_scored: int | None = None
    is_sampled: bool = False
    labels: Array | None = None
    are_nobody: Array | None = None
    reads: Array | None = None
    row_ids: Array | None = None
    stands_for: float | None = None


_PLAIN = PlateFacts()


def plate_facts(msg: Site) -> PlateFacts:
    """Read the facts in the message of a plate; of any other message those of a plain plate."""
    facts = msg["kwargs"].get(_KEY) if msg["type"] == "plate" else None
    return facts if isinstance(facts, PlateFacts) else _PLAIN


def tell_plate_facts(msg: Site, facts: PlateFacts) -> None:
    """Put facts into the message of a plate, for handlers further out."""
    msg["kwargs"][_KEY] = facts


def class_plates(sites: Sites) -> dict[str, PlateFacts]:
    """The facts of the class plates of a trace, by name."""
    found = {name: plate_facts(site) for name, site in sites.items()}
    return {name: facts for name, facts in found.items() if facts.kind == "classes"}


def row_plates(sites: Sites) -> dict[str, PlateFacts]:
    """The facts of the plates whose rows may have weights of their own, of classes or entities."""
    found = {name: plate_facts(site) for name, site in sites.items()}
    return {name: facts for name, facts in found.items() if facts.kind in ("classes", "entities")}


@dataclass(frozen=True)
class RowsRequest:
    """What the helper site of a plate asks handlers, and what they answer besides its value.

    NumPyro replays the plates of the guide into the model by name. A plate of ours replays its
    helper site too, whereas a plain plate that a guide made for itself does not: that is how rows
    which the guide drew on its own are told from rows that model and guide share.

    Attributes:
        source: What the plate holds if no handler says otherwise: all rows in order of a class
            plate or of a data plate, rows with the ids of the user, or classes that it draws.
        is_chosen: Whether a handler gave the rows, which stand for no others.
        is_alone: Whether the plate holds those rows alone, without others that the model reads.
        is_read: Whether rows are only read, as predictions do: log densities mean nothing.
        is_reversed: Whether the plate holds what is drawn, and what is read by id, in the opposite
            order: a boolean that may be traced, or None for no.
        also: Classes to hold besides those of the labels, where classes are only read.
        weights: Of the classes that a handler gave; None for 1.
    """

    source: Source
    is_chosen: bool = False
    is_alone: bool = False
    is_read: bool = False
    is_reversed: Array | None = None
    also: Array | None = None
    weights: Array | None = None


class RowsReply(NamedTuple):
    """What the handlers made of a helper site."""

    plate: str  # name of the plate as handlers further out see it: `scope` renames it
    value: Any  # rows of the plate, or what was drawn
    is_shared: bool  # whether a handler gave the value, so that model and guide have the same
    request: RowsRequest


def rows_request(msg: Site) -> RowsRequest | None:
    """Read the request in the message of a helper site; None of any other message."""
    request = msg["kwargs"].get(_KEY) if msg["type"] == "plate" else None
    return request if isinstance(request, RowsRequest) else None


def choose_rows(
    msg: Site, rows: Array, *, is_alone: bool = False, weights: Array | None = None
) -> None:
    """Answer the helper site of a plate with the rows that it holds, which stand for no others.

    With ``is_alone`` they are only read, and no others are. Classes may have other weights than 1.
    """
    request = msg["kwargs"][_KEY]
    msg["value"] = rows
    is_read = is_alone or request.is_read
    msg["kwargs"][_KEY] = replace(
        request, is_chosen=True, is_alone=is_alone, is_read=is_read, weights=weights
    )


def reverse_read_rows(msg: Site, is_reversed: Array) -> None:
    """Tell the plate of a helper site whether to turn around what is drawn or read."""
    msg["kwargs"][_KEY] = replace(msg["kwargs"][_KEY], is_reversed=is_reversed)


def only_read_rows(msg: Site, also: Array | None) -> None:
    """Tell the plate of a helper site that its rows are only read, those of ``also`` too."""
    msg["kwargs"][_KEY] = replace(msg["kwargs"][_KEY], is_read=True, also=also)


def helper_of(plate: str) -> str:
    """Name of the helper site of a plate."""
    return plate + _HELPER


def plate_of(msg: Site) -> str:
    """Name of the plate that a message of a plate, or of its helper site, is about."""
    name = str(msg["name"])
    return name if rows_request(msg) is None else name.removesuffix(_HELPER)


def ask_for_rows(
    plate: str,
    size: int,
    value: Array | None,
    draw: Callable[[Array | None], Any] | None = None,
    *,
    source: Source,
) -> RowsReply:
    """Send the helper site of a plate through the handlers.

    Args:
        plate: Name of the plate.
        size: Number of its rows.
        value: Its rows, unless they are drawn.
        draw: Function of a key that draws them, where no handler gives them.
        source: See ``RowsRequest``.
    """
    own: list[Any] = [] if value is None else [value]

    def fn(*args: Any, rng_key: Array | None, **kwargs: Any) -> Any:
        del args, kwargs
        assert draw is not None
        own.append(draw(rng_key))
        return own[0]

    msg: Site = {
        "type": "plate",
        "fn": fn,
        "name": helper_of(plate),
        "args": (size, None if value is None else value.shape[0]),
        "kwargs": {"rng_key": None, _KEY: RowsRequest(source)},
        "value": value,
        "scale": 1.0,
        "cond_indep_stack": [],
    }
    msg = apply_stack(msg)
    request = rows_request(msg)
    assert request is not None
    is_shared = not own or msg["value"] is not own[0]
    return RowsReply(plate_of(msg), msg["value"], is_shared, request)
