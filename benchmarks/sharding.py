# SPDX-License-Identifier: Apache-2.0
"""What a step costs where the tables are spread over devices: bytes sent, memory and time.

The devices are emulated on the cores of this machine, so that time says nothing of real ones;
bytes and memory are those of as many accelerators.

``bytes_per_step``
    bytes of all that the compiled step sends: the results of its collectives.
``predicted_to_measured_bytes``
    what ``predicted_bytes`` says, over that.
``table_memory_share``
    the part of the tables and of their optimiser's state that the fullest device holds, times the
    number of devices over which classes are spread: 1 is a fair share.
``ms_per_step``
    milliseconds per step.

    python -m benchmarks.sharding [--max-classes K] [--json OUT]

Ten million classes need 4 GB, forty million 16.
"""

from __future__ import annotations

import gc
import math
import os
import re
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoNormal
from numpyro.infer.initialization import init_to_mean

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

NAME = "sharding"
NUM_DEVICES = 8
MESHES = {"1": (1, 1), "2": (2, 1), "4": (4, 1), "8": (8, 1), "4 x 2": (4, 2)}  # classes, rows
BATCH_SIZE, NUM_SAMPLED, NUM_FEATURES = 500, 100, 16
NUM_TABLES = 6  # location and scale, each with the two moments of Adam
SIZES = {"s32": 4, "u32": 4, "f32": 4, "pred": 1}  # bytes of a number
COLLECTIVES = "all-reduce|all-gather|collective-permute|all-to-all|reduce-scatter"


class Measured(NamedTuple):
    """A step over one mesh."""

    bytes_per_step: int
    table_memory_share: float
    ms_per_step: float


def predicted_bytes(class_devices: int, row_devices: int) -> int:
    """What a step sends, in bytes: M = B + S rows of D features.

    Spread classes: M D numbers of each of the 6 tables, each from the device that has it. Rows of a
    batch that are spread besides: M D numbers of the gradient, which is summed; and twice the B
    labels, which each device needs all.
    """
    touched = (BATCH_SIZE + NUM_SAMPLED) * NUM_FEATURES
    numbers = 0
    if class_devices > 1:
        numbers += NUM_TABLES * touched
    if row_devices > 1:
        numbers += touched + 2 * BATCH_SIZE
    return 4 * numbers


def sent_bytes(program: Any) -> int:
    """Bytes of the results of all collectives of a compiled program."""
    total = 0
    for result in re.findall(rf"= (.*) (?:{COLLECTIVES})(?:-start)?\(", program.as_text()):
        for dtype, shape in re.findall(r"(\w+)\[([\d,]*)\]", result):
            total += SIZES[dtype] * math.prod(int(n) for n in shape.split(",") if n)
    return total


def make_svi(num_categories: int, mesh: Any, row_devices: int) -> lc.SubsampledSVI:
    """A posterior over all weights of a softmax regression."""

    def model(x: Any, y: Any, rows: Any) -> None:
        with lc.class_plate("classes", num_categories, y, num_sampled=NUM_SAMPLED) as classes:
            w = numpyro.sample("w", dist.Normal(0, 1).expand([NUM_FEATURES]).to_event(1))
        with lc.data_plate("data", 8 * BATCH_SIZE, rows):
            numpyro.sample("y", lc.UtilityCategorical(x @ w.T, classes), obs=y)

    sharding = {"classes": "model"} | ({"data": "batch"} if row_devices > 1 else {})
    guide, loss = AutoNormal(model, init_loc_fn=init_to_mean), TraceMeanField_ELBO()
    return lc.SubsampledSVI(model, guide, optax.adam(0.01), loss, mesh=mesh, sharding=sharding)


def measure(num_categories: int, sizes: tuple[int, int], num_steps: int) -> Measured:
    """Compile and run a step over one mesh."""
    devices = jax.devices()[: math.prod(sizes)]
    mesh = jax.make_mesh(sizes, ("model", "batch"), devices=devices)
    svi = make_svi(num_categories, mesh, sizes[1])
    place = svi.plan.sharding
    assert place is not None
    by_row = place.spec({0: "data"})
    x = jax.device_put(jax.random.normal(jax.random.key(0), (BATCH_SIZE, NUM_FEATURES)), by_row)
    y = jax.device_put(jnp.arange(BATCH_SIZE) * (num_categories // BATCH_SIZE), by_row)
    rows = jax.device_put(jnp.arange(BATCH_SIZE), by_row)
    state = svi.init(jax.random.key(0), x, y, rows)
    tables = [leaf for leaf in jax.tree.leaves(state) if leaf.ndim == 2]
    fullest = max(
        sum(s.data.nbytes for table in tables for s in table.addressable_shards if s.device == d)
        for d in devices
    )
    share = fullest * sizes[0] / sum(table.nbytes for table in tables)
    step = jax.jit(svi.update, donate_argnums=0).lower(state, x, y, rows).compile()
    state, _ = step(state, x, y, rows)
    jax.block_until_ready(state)
    start = time.perf_counter()
    for _ in range(num_steps):
        state, _ = jax.block_until_ready(step(state, x, y, rows))  # emulated devices share threads
    seconds = (time.perf_counter() - start) / num_steps
    return Measured(sent_bytes(step), share, 1e3 * seconds)


def main() -> None:
    """Measure, print and write."""
    parser = argument_parser(__doc__)
    parser.add_argument("--max-classes", type=int, default=10**7, metavar="K")
    options = parser.parse_args()
    emulated = f"--xla_force_host_platform_device_count={NUM_DEVICES}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {emulated}"  # JAX is not yet up
    sizes = [10**4] if options.quick else [10**6, 10**7, 4 * 10**7]
    num_steps = 2 if options.quick else 50
    records: list[Record | MachineRecord] = [machine_record(NAME, jax.devices()[0].device_kind)]
    rows = []
    for num_categories in sizes:
        if num_categories > options.max_classes:
            continue
        for name, mesh in MESHES.items():
            found = measure(num_categories, mesh, num_steps)
            gc.collect()
            values = found._asdict()
            if found.bytes_per_step:  # one device sends nothing
                ratio = predicted_bytes(*mesh) / found.bytes_per_step
                values["predicted_to_measured_bytes"] = ratio
            rows.append(
                [
                    f"{num_categories:,}",
                    name,
                    f"{found.bytes_per_step:,}",
                    f"{ratio:.3f}" if found.bytes_per_step else "-",
                    f"{found.table_memory_share:.3f}",
                    f"{found.ms_per_step:.1f}",
                ]
            )
            setting = {"K": num_categories, "D": NUM_FEATURES, "devices": name}
            units = {"bytes_per_step": "bytes", "ms_per_step": "ms"}
            for metric, value in values.items():
                unit = units.get(metric, "ratio")
                records.append(record(NAME, setting, "SubsampledSVI", metric, value, unit))
    print_table(["classes", "devices", "bytes sent", "predicted", "share", "ms"], rows)
    write_json(options.json, records)


if __name__ == "__main__":
    main()
