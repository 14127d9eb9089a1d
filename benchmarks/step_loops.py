# SPDX-License-Identifier: Apache-2.0
"""The compiled loops of steps that ``step_cost`` times and ``step_profile`` looks into."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoDelta, AutoNormal

import numpyro_largecat as lc
from benchmarks.compiled_loop import CompiledLoop
from benchmarks.step_cells import (
    BATCH_SIZE,
    LEARNING_RATE,
    NUM_ROWS,
    NUM_SAMPLED,
    POINT_METHODS,
    Cell,
    make_data,
)

NOISES = {
    "subsampled": "gumbel",
    "bfloat16": "gumbel",
    "delta": "gumbel",
    "shared": "gumbel",
    "shared_delta": "gumbel",
    "probit": "normal",
    "logistic": "logistic",
}
SHARED = ("shared", "shared_delta")  # the label against the sampled classes alone
METHODS = (*NOISES, "numpyro")


def make_step_loop(cell: Cell) -> CompiledLoop:
    """Make the loop of a cell."""
    batches = lc.ArrayBatches(*make_data(cell), batch_size=BATCH_SIZE)
    return CompiledLoop(cell, make_svi(cell), batches)


def make_svi(cell: Cell) -> SVI:
    """Make the SVI object of a cell."""
    optimizer = optax.adam(LEARNING_RATE)
    if cell.method == "numpyro":
        model = exact_model(cell.num_categories)
        return SVI(model, AutoNormal(model), optimizer, TraceMeanField_ELBO())
    negatives = "shared" if cell.method in SHARED else "batch"
    model = subsampled_model(cell.num_categories, NOISES[cell.method], negatives)
    if cell.method in POINT_METHODS:
        return lc.SubsampledSVI(model, AutoDelta(model), optimizer, Trace_ELBO())
    guide, loss = AutoNormal(model), TraceMeanField_ELBO()
    table_dtype = jnp.bfloat16 if cell.method == "bfloat16" else None
    return lc.SubsampledSVI(model, guide, optimizer, loss, table_dtype=table_dtype)


def exact_model(num_categories: int) -> Callable[..., None]:
    """Make the plain NumPyro model, whose softmax is over all classes."""

    def model(x: Any, y: Any, rows: Any) -> None:
        del rows
        with numpyro.plate("classes", num_categories):
            w = numpyro.sample("w", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
        with numpyro.plate("data", NUM_ROWS, subsample_size=len(x)):
            numpyro.sample("y", dist.Categorical(logits=x @ w.T), obs=y)

    return model


def subsampled_model(num_categories: int, noise: str, negatives: Any) -> Callable[..., None]:
    """Make the same model, or that of other errors, on a weighted subset of classes."""

    def model(x: Any, y: Any, rows: Any) -> None:
        plate = lc.class_plate("classes", num_categories, y, NUM_SAMPLED, negatives=negatives)
        with plate as classes:
            w = numpyro.sample("w", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
        with lc.data_plate("data", NUM_ROWS, rows) as batch:
            psi = classes.utilities(jnp.dot, (x,), (w,))
            lc.sample_choice("y", psi, classes=classes, rows=batch, noise=noise, obs=y)

    return model
