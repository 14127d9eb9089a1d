# SPDX-License-Identifier: Apache-2.0
"""Refuse bad data before the first step."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from numpyro_largecat._checks import check_finite, out_of_range
from numpyro_largecat.distributions.utility_categorical import UtilityCategorical
from numpyro_largecat.infer.batches import ArrayBatches
from numpyro_largecat.infer.row_step import SubsampledSVIState, find_rows

if TYPE_CHECKING:
    from numpyro_largecat.infer.subsampled_svi import SubsampledSVI


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


def check_sites(model_trace: Any, loss: Any) -> None:
    """Refuse observed classes unknown to their plate; warn of discrete latent sites."""
    for name, site in model_trace.items():
        if site["type"] != "sample":
            continue
        fn = _base(site["fn"])
        if site["is_observed"]:
            if isinstance(fn, UtilityCategorical):
                fn.check_value(f"obs of site '{name}'", site["value"])
        elif fn.support.is_discrete and not loss.can_infer_discrete:
            warnings.warn(
                f"site '{name}' is discrete and latent, which SVI with {type(loss).__name__} does "
                "not support.",
                stacklevel=3,
            )


def check_batches(
    svi: SubsampledSVI, state: SubsampledSVIState, batches: ArrayBatches, args: Any, kwargs: Any
) -> None:
    """Refuse arrays that are not finite, and labels out of range, anywhere in the data.

    The model itself says what its labels are: its plates are opened once on every row, in compiled
    chunks in which nothing but the labels is computed.

    Cost: O(N).
    """
    check_finite((f"array {i} of `batches`", array) for i, array in enumerate(batches.arrays))
    params = svi.optim.get_params(state.optim_state)
    sizes: dict[str, int] = {}

    def labels_of(rows: Array) -> dict[str, Array]:
        """Labels in one chunk, by plate or site."""
        _, model_trace = find_rows(
            svi, state, params, state.rng_key, (*args, *batches.take(rows)), kwargs
        )
        found = dict(_labels(model_trace))
        sizes.update({name: size for name, (_, size) in found.items()})
        return {name: labels for name, (labels, _) in found.items()}

    num_chunks = -(-batches.size // batches.batch_size)
    starts = jnp.arange(num_chunks) * batches.batch_size
    chunks = jnp.minimum(starts[:, None] + jnp.arange(batches.batch_size), batches.size - 1)
    for name, labels in jax.jit(lambda c: lax.map(labels_of, c))(chunks).items():
        values = np.asarray(labels)
        bad = (values < 0) | (values >= sizes[name])
        if bad.any():
            values = values.reshape(-1, *values.shape[2:])
            bad = bad.reshape(values.shape)
            raise out_of_range(f"labels of {name}", values, bad, sizes[name], "classes")


def _labels(model_trace: Any) -> Iterator[tuple[str, tuple[Array, int]]]:
    for name, site in model_trace.items():
        if site["type"] == "plate" and site["kwargs"].get("labels") is not None:
            yield f"plate '{name}'", (site["kwargs"]["labels"], site["args"][0])
        elif site["type"] == "sample" and site["is_observed"]:
            fn = _base(site["fn"])
            if isinstance(fn, UtilityCategorical):
                yield f"site '{name}'", (jnp.asarray(site["value"]), fn.num_categories)


def _base(fn: Any) -> Any:
    """The distribution under those that expand, mask or reinterpret it."""
    while hasattr(fn, "base_dist"):
        fn = fn.base_dist
    return fn
