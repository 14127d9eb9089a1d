# SPDX-License-Identifier: Apache-2.0
"""Predictions over all K classes beside the matrix product that they cannot do without.

``top_classes`` and ``log_likelihood`` of ``lc.Fitted`` at the centre of the guide, for rows with D
features, against ``x @ w.T`` in the same chunks of classes, of which the largest values are kept
alone. The share is the product's time over ours, of runs that alternate: 1 would be the speed of
the product alone. And ``top_classes`` and ``log_predictive`` averaged over few draws of the
utilities, with what they cost to the same at the centre (``log_likelihood``). The scratch memory is
what XLA allocates besides the tables and the result.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jax import Array, lax
from numpyro.infer.autoguide import AutoNormal

import numpyro_largecat as lc
from benchmarks.records import (
    MachineRecord,
    Record,
    argument_parser,
    machine_record,
    print_table,
    record,
    write_json,
)

NAME = "predict"
CHUNK = 4096
NUM_DRAWS = 4
AT_CENTRE = {"top_classes over draws": "top_classes", "log_predictive": "log_likelihood"}


def make_problem(num_categories: int, num_features: int, num_rows: int) -> tuple[Any, ...]:
    """A linear softmax with a Gaussian guide, its parameters, rows and labels."""

    def model(x: Array, y: Array | None = None) -> None:
        with lc.class_plate("classes", num_categories, y, 10) as classes:
            w = numpyro.sample("w", dist.Normal(0, 1).expand([num_features]).to_event(1))
        with lc.data_plate("data", num_rows) as rows:
            lc.sample_choice("y", x @ w.T, classes=classes, rows=rows, obs=y)

    guide = AutoNormal(model)
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (num_rows, num_features))
    y = jax.random.randint(keys[1], (num_rows,), 0, num_categories)
    numpyro.handlers.seed(guide, 0)(x, y)
    table = 0.1 * jax.random.normal(keys[2], (num_categories, num_features))
    params = {"w_auto_loc": table, "w_auto_scale": jnp.full_like(table, 0.05)}
    return model, guide, params, x, y


def product(params: dict[str, Array], x: Array) -> Array:
    """Sum over the classes of each chunk of ``x @ w.T``, rows by rows."""
    w = params["w_auto_loc"]
    num_chunks = w.shape[0] // CHUNK

    def add(chunk: Array, total: Array) -> Array:
        part = lax.dynamic_slice_in_dim(w, chunk * CHUNK, CHUNK)
        return jnp.maximum(total, x @ part.T)

    start = jnp.full((x.shape[0], CHUNK), -jnp.inf)
    return lax.fori_loop(0, num_chunks, add, start)


def measure(sizes: argparse.Namespace) -> dict[str, tuple[list[float], int]]:
    """Seconds of each repeat, and scratch bytes, of each function."""
    model, guide, params, x, y = make_problem(sizes.categories, sizes.features, sizes.rows)
    fitted = partial(lc.Fitted, model, guide, chunk_size=CHUNK)
    draws = {"rng_key": jax.random.key(1), "num_draws": NUM_DRAWS}
    functions: dict[str, Callable[..., Any]] = {
        "matrix product": product,
        "top_classes": lambda params, x: fitted(params).on(x).top_classes(),
        "log_likelihood": lambda params, x: fitted(params).on(x).log_likelihood(y),
        "top_classes over draws": lambda params, x: fitted(params).on(x).top_classes(**draws),
        "log_predictive": lambda params, x: fitted(params).on(x).log_predictive(y, **draws),
    }
    compiled = {name: jax.jit(fn).lower(params, x).compile() for name, fn in functions.items()}
    found: dict[str, tuple[list[float], int]] = {}
    for name, run in compiled.items():
        jax.block_until_ready(run(params, x))
        memory: Any = run.memory_analysis()
        found[name] = [], int(memory.temp_size_in_bytes)
    for _ in range(sizes.repeats):
        for name, run in compiled.items():
            start = time.perf_counter()
            jax.block_until_ready(run(params, x))
            found[name][0].append(time.perf_counter() - start)
    return found


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--categories", type=int, default=100_000)
    parser.add_argument("--features", type=int, default=128)
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=7)
    sizes = parser.parse_args()
    if sizes.quick:
        sizes.categories, sizes.rows, sizes.repeats = 3 * CHUNK, 20, 2
    found = measure(sizes)
    product_times = found["matrix product"][0]
    records: list[Record | MachineRecord] = [machine_record(NAME, jax.devices()[0].device_kind)]
    setting = {"K": sizes.categories, "D": sizes.features, "rows": sizes.rows}
    setting |= {"chunk": CHUNK, "draws": NUM_DRAWS}
    rows = []
    for name, (times, scratch) in found.items():
        shares = [p / t for p, t in zip(product_times, times, strict=True)]
        at_centre = found[AT_CENTRE.get(name, name)][0]
        to_centre = [t / c for t, c in zip(times, at_centre, strict=True)]
        figures = {
            "ms": (1e3 * statistics.median(times), "ms", "lower"),
            "share_of_product_speed": (statistics.median(shares), "ratio", "higher"),
            "scratch": (scratch / 1e6, "MB", "lower"),
            "ratio_to_centre": (statistics.median(to_centre), "ratio", "lower"),
        }
        for metric, (value, unit, better) in figures.items():
            records.append(record(NAME, setting, name, metric, value, unit, better))
        spread = f"{min(shares):.2f} to {max(shares):.2f}"
        values = [f"{value:.3g}" for value, _, _ in figures.values()]
        rows.append([name, *values, spread])
    columns = ["ms", "share of the product's speed", "scratch MB", "to the centre"]
    print_table(["", *columns, "spread of share"], rows)
    write_json(sizes.json, records)


if __name__ == "__main__":
    main()
