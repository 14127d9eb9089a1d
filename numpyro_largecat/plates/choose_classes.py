# SPDX-License-Identifier: Apache-2.0
"""Which classes a plate holds in a step: all, a weighted sample, or what a handler asks for."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_largecat._conversions import as_ids
from numpyro_largecat.handlers.plate_facts import RowsReply, ask_for_rows
from numpyro_largecat.ops.subsampling import is_among, place_among, sorted_distinct
from numpyro_largecat.plates.class_proposal import ClassProposal, draw_others
from numpyro_largecat.plates.class_subset import ClassSubset, Negatives, SharedNegatives
from numpyro_largecat.plates.read_classes import with_read_rows
from numpyro_largecat.plates.rows_by_id import KnownIds, ReadRows, reverse_if
from numpyro_largecat.plates.uniform_classes import DrawnClasses, draw_own


def choose_classes(
    name: str,
    num_categories: int,
    labels: Array | None,
    num_sampled: int | None,
    proposal: ClassProposal | None,
    reads: Array | None,
    negatives: Negatives,
) -> tuple[ClassSubset, bool]:
    """The classes that a plate holds, and whether a handler gave what is random of them.

    These are all classes without ``num_sampled``, a weighted sample with it, see ``class_plate``,
    or those that a handler asks for, as predictions do.

    Raises:
        ValueError: If classes are drawn without a random key, or ``negatives`` need labels.
    """
    if num_sampled is None:
        subset = _full_subset(num_categories)
        reply = ask_for_rows(name, num_categories, subset.indices, source="all classes")
        if reply.request.is_chosen:
            return _chosen_subset(name, reply, num_categories, reads), True
        return replace(subset, name=name, outer_name=reply.plate), reply.is_shared
    none = jnp.zeros(0, jnp.int32)
    given = none if labels is None else as_ids(labels)
    present = sorted_distinct(given, num_categories)[:num_categories]  # K at most

    def draw(rng_key: Array | None) -> DrawnClasses:
        if rng_key is None:
            raise _no_key(name)
        if given.size == 0 and negatives != "batch":
            raise _no_labels(name, negatives, labels)
        if negatives == "own":
            return draw_own(rng_key, given, num_categories, num_sampled)
        taken = present if negatives == "batch" else none
        return draw_others(proposal, rng_key, taken, num_categories, num_sampled)

    reply = ask_for_rows(name, num_categories, None, draw, source="drawn classes")
    if reply.request.is_chosen:
        return _chosen_subset(name, reply, num_categories, reads), True
    if reply.request.is_read:
        also = reply.request.also
        subset = _read_subset(labels, reads, also, num_categories, negatives)
        return replace(subset, name=name, outer_name=reply.plate), True
    drawn, is_reversed = DrawnClasses(*reply.value), reply.request.is_reversed
    drawn = DrawnClasses(*reverse_if(is_reversed, *drawn))
    if negatives == "shared":
        subset = _shared_subset(given, present, drawn, num_categories)
    else:
        join, own = (_batch_subset, present) if negatives == "batch" else (_own_subset, given)
        subset = join(own, drawn, num_categories)
    if reads is not None:
        subset = with_read_rows(subset, reads, is_reversed=is_reversed)
    return replace(subset, name=name, outer_name=reply.plate), reply.is_shared


def _chosen_subset(
    name: str, reply: RowsReply, num_categories: int, reads: Array | None
) -> ClassSubset:
    """The rows that a handler chose, and those that the model reads, if it lets them be."""
    chunk = replace(_chunk_subset(reply.value, num_categories), name=name, outer_name=reply.plate)
    if reply.request.weights is not None:
        chunk = replace(chunk, weights=reply.request.weights)
    if reads is None or reply.request.is_alone:
        return chunk
    return with_read_rows(chunk, reads)


def _read_subset(
    labels: Array | None,
    reads: Array | None,
    also: Array | None,
    num_categories: int,
    negatives: Negatives,
) -> ClassSubset:
    """The classes that a model asks for by its labels or by id, or all classes."""
    if labels is None and reads is None:
        return _full_subset(num_categories)
    asked = jnp.concatenate([ids for ids in (labels, reads, also) if ids is not None])
    if labels is not None and negatives != "batch":
        return _label_first_subset(labels, asked, num_categories)
    subset = _labels_subset(asked, num_categories)
    if reads is None or subset.labels is None:
        return subset
    known = KnownIds(subset.labels, None)  # in order, before the row that stands for all others
    return replace(subset, reads=ReadRows(known, subset.weights))


def _no_key(name: str) -> ValueError:
    return ValueError(
        f"plate '{name}' draws classes and needs a random key: run the model under "
        "`numpyro.handlers.seed`, or leave `num_sampled` out (HMC and NUTS cannot subsample)."
    )


def _no_labels(name: str, negatives: str, labels: Array | None) -> ValueError:
    got = None if labels is None else f"shape {labels.shape}"
    return ValueError(
        f"`labels` of plate '{name}' are needed with negatives=\"{negatives}\", one for each "
        f"observation; got {got}."
    )


@partial(jax.jit, static_argnums=2)
def _batch_subset(present: Array, others: DrawnClasses, num_categories: int) -> ClassSubset:
    """Join sorted distinct labels, of weight 1, and drawn classes, which stand for all others."""
    weights = (present < num_categories).astype(others.weights.dtype)
    indices = jnp.concatenate([present, others.classes])
    return ClassSubset(
        jnp.minimum(indices, num_categories - 1),
        jnp.concatenate([weights, others.weights]),
        present,
        num_categories,
        "sample",
    )


@partial(jax.jit, static_argnums=3)
def _shared_subset(
    labels: Array, present: Array, drawn: DrawnClasses, num_categories: int
) -> ClassSubset:
    r"""Compare each label with the same classes, drawn from all K.

    With drawn classes d and their weights v, the sum over the classes other than the label y of an
    observation, and that over all classes in prior and KL terms, for the distinct labels L, are

    .. math::
        \sum_{k \ne y} f(k) = E \sum_s v_s \, [d_s \ne y] \, f(d_s), \qquad
        \sum_k f(k) = \sum_{k \in L} f(k) + E \sum_s v_s \, [d_s \notin L] \, f(d_s).

    A class that is drawn and a label has one row. ``present`` are the sorted distinct labels.
    """
    rows = _batch_subset(present, drawn, num_categories)
    is_label = is_among(drawn.classes, present)
    places = present.shape[0] + jnp.arange(drawn.classes.shape[0], dtype=jnp.int32)
    shared = SharedNegatives(
        place_among(labels, present),
        jnp.where(is_label, place_among(drawn.classes, present), places),
        rows.weights.at[present.shape[0] :].multiply(~is_label),
    )
    weights = jnp.append(jnp.ones(1, drawn.weights.dtype), drawn.weights)
    return replace(rows, weights=weights, labels=labels, negatives="shared", shared=shared)


@partial(jax.jit, static_argnums=2)
def _own_subset(labels: Array, others: DrawnClasses, num_categories: int) -> ClassSubset:
    """Join each label, of weight 1, and the classes drawn for its observation, shape (B, S)."""
    indices = jnp.concatenate([labels[:, None], others.classes], axis=1)
    return ClassSubset(
        jnp.clip(indices, 0, num_categories - 1).reshape(-1),
        jnp.concatenate([jnp.ones(1, others.weights.dtype), others.weights]),
        labels,
        num_categories,
        "sample",
        negatives="own",
    )


def _labels_subset(asked: Array, num_categories: int) -> ClassSubset:
    """Hold the distinct classes among those that are asked for, and one row for all others.

    The weight of that row is NaN, unless there are no others: sums over all classes are not known.
    """
    present = sorted_distinct(asked, num_categories)[:num_categories]
    is_whole = (present < num_categories).sum() == num_categories
    others = DrawnClasses(
        jnp.full(1, num_categories - 1), jnp.where(is_whole, 0.0, jnp.full(1, jnp.nan))
    )
    return replace(_batch_subset(present, others, num_categories), kind="labels")


def _label_first_subset(labels: Array, asked: Array, num_categories: int) -> ClassSubset:
    """Hold the distinct classes asked for, of which an observation sees its label and the last.

    As with "shared" and "own" ``negatives`` the label is first. The last row is for all others, of
    weight NaN.
    """
    rows = _labels_subset(asked, num_categories)
    assert rows.labels is not None
    last = jnp.array([rows.indices.shape[0] - 1], jnp.int32)
    shared = SharedNegatives(place_among(labels, rows.labels), last, rows.weights)
    weights = jnp.array([1.0, jnp.nan], rows.weights.dtype)
    return replace(rows, weights=weights, labels=labels, negatives="shared", shared=shared)


def _chunk_subset(classes: Array, num_categories: int) -> ClassSubset:
    """Hold consecutive classes; those past the last one are padding."""
    weights = (classes < num_categories).astype(jnp.result_type(float))
    indices = jnp.minimum(classes, num_categories - 1)
    return ClassSubset(indices, weights, None, num_categories, "chunk")


def _full_subset(num_categories: int) -> ClassSubset:
    """Hold all classes in order."""
    weights = jnp.ones(num_categories)
    indices = jnp.arange(num_categories, dtype=jnp.int32)
    return ClassSubset(indices, weights, None, num_categories, "full")
