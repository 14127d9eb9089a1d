# SPDX-License-Identifier: Apache-2.0
"""Two processes on this machine fit one model; where one is lost, both go on from a checkpoint."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from numpyro_largecat.data.parts_of_fits import fit_folder, joined_fit
from numpyro_largecat.svi.saved_run import KIND

SCRIPT = Path(__file__).parents[1] / "examples" / "many_devices.py"
NUM_CLASSES, NUM_STEPS = 2_001, 200
MOST_SECONDS = 300
SAID = ("devices, each with", "log probability of a class", "checksum of the best classes")
pytestmark = pytest.mark.slow


@pytest.fixture
def port():
    """A free port, which is held so that no other program takes it before process 0 does.

    gRPC shares its ports, ``SO_REUSEPORT``, and only what listens gets connections.
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def start(number, folder, port):
    """Start the processes, which have four devices together."""
    fixed = [SCRIPT, "--output", folder, "--classes", NUM_CLASSES, "--steps", NUM_STEPS]
    fixed += ["--every-steps", 20, "--emulate", 4 // number]
    if number > 1:
        fixed += ["--coordinator", f"127.0.0.1:{port}", "--num-processes", number]
    return start_each([[*fixed, "--process", i] for i in range(number)])


def start_each(arguments):
    """Start a process of Python with each of these."""
    return [
        subprocess.Popen(
            [sys.executable, *map(str, own)],
            env=os.environ | {"PYTHONPATH": str(SCRIPT.parent)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for own in arguments
    ]


def printed(processes):
    """What process 0 says at its end, among messages of Gloo; all must end well."""
    texts, errors = zip(*(p.communicate(timeout=MOST_SECONDS) for p in processes), strict=True)
    for process, error in zip(processes, errors, strict=True):
        assert process.returncode == 0, error[-2000:]
    found = [re.search(rf"{what} (\S+)", texts[0]) for what in SAID]
    assert all(found), texts[0]
    return [match[1] for match in found if match]


def saved(folder):
    """The arrays of the newest checkpoint, without padding."""
    found = joined_fit(fit_folder(folder, KIND).read())
    assert found.number == NUM_STEPS
    return found.arrays


def test_two_processes_lose_one_and_go_on_as_if_nothing_had_happened(tmp_path, port):
    whole = printed(start(2, tmp_path / "whole", port))
    folder = tmp_path / "fit"
    first, second = start(2, folder, port)
    for line in first.stdout:
        if "step 120\n" in line:
            break
    second.send_signal(signal.SIGKILL)
    first.kill()  # it waits for the other; a cluster's scheduler ends it too
    for process in (first, second):
        process.communicate(timeout=MOST_SECONDS)
    assert max(fit_folder(folder, KIND).numbers()) in (100, 120, 140)

    assert printed(start(2, folder, port)) == whole
    arrays, expected = saved(folder), saved(tmp_path / "whole")
    assert arrays.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(arrays[name], value, err_msg=name)

    # One process reads the parts of two. A fit of its own is the same but for the order of sums.
    assert printed(start(1, folder, port)) == whole
    assert printed(start(1, tmp_path / "alone", port))[-1] == whole[-1]
    alone = saved(tmp_path / "alone")
    np.testing.assert_allclose(alone["losses"], expected["losses"], rtol=1e-4)


WITH_A_BAD_ROW = """
import sys, argparse, warnings, jax, numpy as np
import numpyro_largecat as lc
from many_devices import make_data, make_svi, start_devices

port, process, folder = sys.argv[1:]
start_devices(argparse.Namespace(emulate=2, cluster=False, coordinator=f"127.0.0.1:{port}",
                                 num_processes=2, process=int(process)))
x, y = make_data(500)
x[BAD_ROW] = np.nan
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    result = make_svi(500).run(
        jax.random.key(0), 150, batches=lc.StreamedBatches(x, y, batch_size=200),
        checkpoints=lc.Checkpoints(folder, every_steps=10), progress_bar=False)
said = [str(w.message) for w in caught if "SubsampledSVI.run ended" in str(w.message)]
print("steps", len(result.losses), "warnings", len(said), flush=True)
"""


def test_a_row_that_is_not_finite_ends_the_fit_in_all_processes(tmp_path, port):
    """It is read by one of them alone. The state before its step is written by both."""
    script = WITH_A_BAD_ROW.replace("BAD_ROW", "7")
    processes = start_each([["-c", script, port, i, tmp_path] for i in range(2)])
    said = []
    for process in processes:
        text, error = process.communicate(timeout=MOST_SECONDS)
        assert process.returncode == 0, error[-2000:]
        said.append(re.search(r"steps (\d+) warnings (\d+)", text).groups())
    steps, warnings = map(int, said[0])
    assert said[0] == said[1]
    assert warnings == 1
    found = joined_fit(fit_folder(tmp_path, KIND).read())
    assert 0 < found.number <= steps < 150
    for name, value in found.arrays.items():
        if name.startswith(".optim_state"):
            assert np.isfinite(np.asarray(value, float)).all(), name
