# SPDX-License-Identifier: Apache-2.0
"""A fit over several processes, for ``test_processes``: PROCESS NUMBER PORT FOLDER OUT [KILL_AT].

Process 0 writes what the fit has found to OUT. At step KILL_AT, if given, process 1 kills itself.
"""

from __future__ import annotations

import os
import signal
import sys

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from jax.experimental import multihost_utils
from numpyro.infer import TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoNormal

import numpyro_largecat as lc

NUM_CLASSES, NUM_FEATURES, NUM_ROWS, NUM_STEPS = 2_001, 4, 100, 200


def model(x, y=None, rows=None):
    with lc.class_plate("classes", NUM_CLASSES, y, num_sampled=10) as classes:
        w = numpyro.sample("w", dist.Normal(0, 1).expand([NUM_FEATURES]).to_event(1))
    with lc.data_plate("data", NUM_ROWS, rows) as batch:
        lc.sample_choice("y", x @ w.T, classes=classes, rows=batch, obs=y)


def main():
    process, number, port, folder, out, *kill_at = sys.argv[1:]
    if int(number) > 1:
        jax.distributed.initialize(f"127.0.0.1:{port}", int(number), int(process))
    x = np.random.default_rng(0).standard_normal((NUM_ROWS, NUM_FEATURES)).astype(np.float32)
    y = np.arange(NUM_ROWS) * 20

    def look(progress):
        if kill_at and process == "1" and progress.step >= int(kill_at[0]):
            os.kill(os.getpid(), signal.SIGKILL)

    svi = lc.SubsampledSVI(
        model,
        AutoNormal(model),
        optax.adam(0.05),
        TraceMeanField_ELBO(),
        mesh=jax.make_mesh((2, 2), ("batch", "model")),  # a host has half of the rows of a batch
        sharding={"classes": "model", "data": "batch"},
    )
    result = svi.run(
        jax.random.key(0),
        NUM_STEPS,
        batches=lc.StreamedBatches(x, y, batch_size=20),
        checkpoints=lc.Checkpoints(folder, every_steps=20),
        resume=True,
        callbacks=[lc.Callback(look, every_steps=10)],
        progress_bar=False,
    )
    reading = lc.Fitted.from_svi(svi, result).on(x[:5], rows=np.arange(5))
    top = reading.top_classes(5)
    found = {name: gathered(value) for name, value in result.params.items()}
    if process == "0":
        found |= {"classes": top.classes, "log_probs": top.log_probs, "losses": result.losses}
        np.savez(out, **found)


def gathered(value):
    """An array that is spread over processes, whole."""
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        return multihost_utils.process_allgather(value, tiled=True)
    return jnp.asarray(value)


main()
