# SPDX-License-Identifier: Apache-2.0
"""Fit one model over several devices, or over several processes that have some each.

On the devices that JAX finds, or on eight that are emulated on this machine:

    python examples/many_devices.py --output DIR [--emulate 8]

Over two processes on this machine, in two terminals:

    python examples/many_devices.py --output DIR --emulate 2 --coordinator 127.0.0.1:9876 \\
        --num-processes 2 --process 0
    python examples/many_devices.py --output DIR --emulate 2 --coordinator 127.0.0.1:9876 \\
        --num-processes 2 --process 1

On a cluster that JAX knows, such as Slurm's or Kubernetes', start one process for each host with
``--cluster`` alone. DIR is then on a file system that all see. The same command goes on after
whatever ended it, also with other numbers of processes and devices.
"""

from __future__ import annotations

import argparse
import os
import zlib
from pathlib import Path
from typing import Any

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoNormal
from numpyro.infer.initialization import init_to_mean

import numpyro_largecat as lc

NUM_ROWS, BATCH_SIZE, NUM_FEATURES, NUM_SAMPLED = 20_000, 200, 16, 100


def start_devices(args: argparse.Namespace) -> None:
    """Emulate devices, and find the other processes, before anything else of JAX is used."""
    if args.emulate:
        emulated = f"--xla_force_host_platform_device_count={args.emulate}"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {emulated}"
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if args.cluster:
        jax.distributed.initialize()
    elif args.coordinator:
        jax.distributed.initialize(args.coordinator, args.num_processes, args.process)


def make_data(num_classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Features, and classes that they say something of. Each process makes the same."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((NUM_ROWS, NUM_FEATURES)).astype(np.float32)
    place = (x[:, 0] > 0) + 2 * (x[:, 1] > 0) + rng.random(NUM_ROWS)
    return x, (place * num_classes / 4).astype(np.int32)


def make_svi(num_classes: int) -> lc.SubsampledSVI:
    """A posterior over all weights, classes spread over all devices but two parts of the rows."""

    def model(x: Any, y: Any = None, rows: Any = None) -> None:
        with lc.class_plate("classes", num_classes, y, num_sampled=NUM_SAMPLED) as classes:
            w = numpyro.sample("w", dist.Normal(0, 1).expand([NUM_FEATURES]).to_event(1))
        with lc.data_plate("data", NUM_ROWS, rows):
            numpyro.sample("y", lc.UtilityCategorical(x @ w.T, classes), obs=y)

    num_parts = 2 if len(jax.devices()) % 2 == 0 else 1
    mesh = jax.make_mesh((num_parts, len(jax.devices()) // num_parts), ("batch", "model"))
    return lc.SubsampledSVI(
        model,
        AutoNormal(model, init_loc_fn=init_to_mean, init_scale=0.1),
        optax.adam(0.05),
        TraceMeanField_ELBO(),
        mesh=mesh,
        sharding={"classes": "model", "data": "batch"},
    )


def main() -> None:
    """Fit, and say what each device holds and what the fit predicts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="a folder for the checkpoints")
    parser.add_argument("--classes", type=int, default=100_000)
    parser.add_argument("--steps", type=int, default=1_000)
    parser.add_argument("--every-steps", type=int, default=100, help="between checkpoints")
    parser.add_argument("--emulate", type=int, help="devices of each process")
    parser.add_argument("--cluster", action="store_true", help="JAX finds the other processes")
    parser.add_argument("--coordinator", help="address and port of process 0")
    parser.add_argument("--num-processes", type=int, default=1)
    parser.add_argument("--process", type=int, default=0)
    args = parser.parse_args()
    start_devices(args)

    def say(text: str) -> None:
        if jax.process_index() == 0:
            print(text, flush=True)

    x, y = make_data(args.classes)
    svi = make_svi(args.classes)
    result = svi.run(
        jax.random.key(0),
        args.steps,
        batches=lc.StreamedBatches(x, y, batch_size=BATCH_SIZE),  # a host reads its rows alone
        checkpoints=lc.Checkpoints(args.output, every_steps=args.every_steps),
        resume=True,
        callbacks=[lc.Callback(lambda p: say(f"step {p.step}"), every_steps=args.every_steps)],
        progress_bar=False,
    )
    table = result.params["w_auto_loc"]
    held = {shard.data.shape[0] for shard in table.addressable_shards}
    say(f"{len(jax.devices())} devices, each with {held} of {args.classes} rows")
    reading = lc.Fitted.from_svi(svi, result).on(x[:1_000], rows=np.arange(1_000))
    say(f"log probability of a class {reading.log_likelihood(y[:1_000]).mean():.4f}")
    top = np.asarray(reading.top_classes(5).classes)
    say(f"checksum of the best classes {zlib.crc32(top.tobytes()):08x}")


if __name__ == "__main__":
    main()
