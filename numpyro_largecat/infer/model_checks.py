# SPDX-License-Identifier: Apache-2.0
"""Refuse bad data before the first step."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array, lax
from numpyro.handlers import seed, trace
from numpyro.ops.provenance import eval_provenance

from numpyro_largecat._checks import check_finite, check_in_range, check_known, is_concrete
from numpyro_largecat.distributions.choice import ChoiceDistribution, base_distribution
from numpyro_largecat.infer.batches import ArrayBatches
from numpyro_largecat.infer.latent_values import at_feasible_values
from numpyro_largecat.infer.scale_checks import refuse_without_rows, sites_without_rows
from numpyro_largecat.infer.touched_rows import TouchedRows, share_rows
from numpyro_largecat.subsets import refuse_repeated_rows

CATEGORICALS = (dist.CategoricalLogits, dist.CategoricalProbs)


def check_arguments(model: Callable[..., Any], args: Any, kwargs: Any) -> None:
    """Refuse arrays among the arguments of the model that are not finite, by name."""
    try:
        bound = inspect.signature(model).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):  # no signature, or one that the model itself will refuse
        bound = {**{f"argument {i}": a for i, a in enumerate(args)}, **kwargs}
    check_finite(
        (f"`{name}{jax.tree_util.keystr(path)}`", leaf)
        for name, value in bound.items()
        for path, leaf in jax.tree_util.tree_leaves_with_path(value)
        if isinstance(leaf, (np.ndarray, jax.Array, float))
    )


def warn_of_discrete_sites(model_trace: Any, loss: Any) -> None:
    """Warn, as NumPyro does, of latent sites that the loss cannot handle."""
    for name, site in model_trace.items():
        if site["type"] != "sample" or site["is_observed"]:
            continue
        if site["fn"].support.is_discrete and not loss.can_infer_discrete:
            warnings.warn(
                f"site '{name}' is discrete and latent, which SVI with {type(loss).__name__} does "
                "not support.",
                stacklevel=2,
            )


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("values", "known"),
    meta_fields=("size", "meaning", "plate", "latent"),
)
@dataclass(frozen=True)
class Labels:
    """Classes or row ids that a model was given, at a plate or an observed site."""

    values: Array  # classes or row ids, any shape
    size: int  # number of classes K, or of rows N
    meaning: str = "classes"  # what the values are, for messages
    known: Array | None = None  # the classes of a subset that can be observed, padded with K
    plate: str = ""  # the plate whose rows must not repeat, since it holds a latent site
    latent: str | None = None  # that site


def observed_labels(model_trace: Any) -> dict[str, Labels]:
    """Find the labels that a model gives to its class plates and observes at its sites."""
    found = {}
    for name, site in model_trace.items():
        if site["type"] == "plate" and site["kwargs"].get("labels") is not None:
            found[f"`labels` of plate '{name}'"] = Labels(site["kwargs"]["labels"], site["args"][0])
        elif site["type"] == "plate" and site["kwargs"].get("row_ids") is not None:
            found[f"`rows` of plate '{name}'"] = Labels(
                site["kwargs"]["row_ids"],
                site["args"][0],
                "row ids",
                plate=name,
                latent=_latent_site(model_trace, name),
            )
        elif site["type"] == "sample" and site["is_observed"]:
            fn = base_distribution(site["fn"])
            if isinstance(fn, ChoiceDistribution):
                _refuse_forgotten_classes(name, fn, model_trace)
                known = None if fn.classes is None else fn.classes.labels
                value = jnp.asarray(site["value"])
                found[f"`obs` of site '{name}'"] = Labels(value, fn.num_categories, known=known)
    return found


def _latent_site(model_trace: Any, plate: str) -> str | None:
    """A continuous latent site inside this plate, if there is one."""
    for name, site in model_trace.items():
        if site["type"] == "sample" and not (site["is_observed"] or site["fn"].support.is_discrete):
            if any(frame.name == plate for frame in site["cond_indep_stack"]):
                return str(name)
    return None


class _SampledPlate(NamedTuple):
    """A class plate that holds a subset in this step."""

    name: str
    num_categories: int  # number of classes K
    num_together: int  # classes of one observation: columns of utilities
    labels: Array | None


def _sampled_plates(model_trace: Any) -> list[_SampledPlate]:
    found = []
    for name, site in model_trace.items():
        known = site["kwargs"] if site["type"] == "plate" else {}
        if known.get("row_weights") is not None:
            labels, num_together = known["labels"], known["row_weights"].shape[0]
            if known["repeats"]:
                num_together //= labels.shape[0]
            found.append(_SampledPlate(name, site["args"][0], num_together, labels))
    return found


def _refuse_forgotten_classes(name: str, fn: ChoiceDistribution, model_trace: Any) -> None:
    """Refuse utilities of a subset of classes that are taken for those of all."""
    for plate in _sampled_plates(model_trace) if fn.classes is None else ():
        if plate.num_together == fn.num_categories != plate.num_categories:
            raise ValueError(
                f"site '{name}' has utilities of {fn.num_categories} classes, as many as plate "
                f"'{plate.name}' holds of its {plate.num_categories}, but no `classes`. Pass "
                f"`classes=` from `with lc.class_plate('{plate.name}', ...) as classes`."
            )


def labels_as_columns(model_trace: Any) -> dict[str, Array]:
    """Find NumPyro's own categoricals over the classes that a subsampled plate holds.

    Returns:
        For each such site, under what to say of it, whether it observes labels of the plate, rather
        than their places among its columns, as a softmax written by hand may do.
    """
    found = {}
    for name, site in model_trace.items():
        fn = base_distribution(site["fn"]) if site["type"] == "sample" else None
        if not isinstance(fn, CATEGORICALS) or not site["is_observed"]:
            continue
        size = jnp.shape(fn.logits if isinstance(fn, dist.CategoricalLogits) else fn.probs)[-1]
        for plate in _sampled_plates(model_trace):
            if plate.num_together != size or size == plate.num_categories:
                continue
            message = (
                f"site '{name}' is a Categorical of {size} outcomes, as many as plate "
                f"'{plate.name}' holds of its {plate.num_categories} classes, and observes labels, "
                "which would be taken for columns of that subset. Use `lc.sample_choice`, or "
                "`lc.UtilityCategorical(utilities, classes)` with the `classes` that the plate "
                "gives."
            )
            value = jnp.asarray(site["value"])
            if plate.labels is None:
                found[message] = jnp.any(value >= size)
            else:
                found[message] = jnp.isin(value, plate.labels).all()
    return found


def check_columns(labels_as_columns: dict[str, Array]) -> None:
    """Refuse what ``labels_as_columns`` has found; tracers pass.

    Raises:
        ValueError: If labels are observed as columns of a subset of the classes.
    """
    for message, is_wrong in labels_as_columns.items():
        if is_concrete(is_wrong) and is_wrong:
            raise ValueError(message)


def check_labels(labels: dict[str, Labels]) -> None:
    """Refuse labels out of range or unknown to the class plate, and repeated rows; tracers pass.

    Raises:
        ValueError: With the position and value of the first bad label.
    """
    for name, found in labels.items():
        check_in_range(name, found.values, found.size, found.meaning)
        if found.known is not None:
            check_known(name, found.values, found.known)
        if found.latent is not None and found.values.ndim == 1:
            refuse_repeated_rows(found.plate, found.latent, found.values)


def _check_size(name: str, rows: Labels, batches: ArrayBatches) -> None:
    """Refuse a data plate with the rows of ``batches`` as its ids and another number of rows."""
    if rows.meaning != "row ids" or rows.size <= batches.size or rows.values.ndim != 1:
        return
    if (rows.values == jnp.arange(batches.size)).all():
        raise ValueError(
            f"{name} are those of `batches`, so the size of the plate must be {batches.size}, "
            f"their number of rows; got {rows.size}, which would scale the likelihood by "
            f"{rows.size} / {batches.batch_size}."
        )


def check_batches(model: Callable[..., Any], batches: ArrayBatches, args: Any, kwargs: Any) -> None:
    """Refuse arrays that are not finite, bad labels, and likelihoods not scaled to all rows.

    The model itself says what its labels are: its plates are opened on every row, in compiled
    chunks in which nothing but labels and scales is computed.

    Cost: O(N).
    """
    check_finite((f"array {i} of `batches`", array) for i, array in enumerate(batches.arrays))

    def sites_of(rows: Array) -> Any:
        run = at_feasible_values(share_rows(seed(model, 0), TouchedRows()))
        return trace(run).get_trace(*args, *batches.take(rows), **kwargs)

    def look_at(rows: Array) -> tuple[dict[str, Labels], dict[str, Array]]:
        sites = sites_of(rows)
        labels = {n: replace(found, known=None) for n, found in observed_labels(sites).items()}
        is_whole = batches.batch_size == batches.size
        return labels, {} if is_whole else sites_without_rows(sites, batches.batch_size)

    num_chunks = -(-batches.size // batches.batch_size)
    starts = jnp.arange(num_chunks) * batches.batch_size
    chunks = jnp.minimum(starts[:, None] + jnp.arange(batches.batch_size), batches.size - 1)
    by_chunk, without_rows = jax.jit(lambda chunks: lax.map(look_at, chunks))(chunks)
    for name, found in by_chunk.items():
        values = found.values
        if values.shape[1:2] == (batches.batch_size,):  # one for each row of the data
            values = values.reshape(-1, *values.shape[2:])[: batches.size]
            _check_size(name, replace(found, values=values), batches)
        check_labels({name: replace(found, values=values)})
    suspects = [name for name, is_wrong in without_rows.items() if is_wrong.all()]

    def observed(rows: Array) -> list[Array]:
        sites = sites_of(rows)
        return [jnp.asarray(sites[name]["value"]) for name in suspects]

    if not suspects:
        return
    for name, inputs in zip(suspects, eval_provenance(observed, rows=chunks[0]), strict=True):
        if inputs:  # what it observes is the minibatch's own, not the same in each step
            refuse_without_rows(name, batches.size, batches.batch_size)
