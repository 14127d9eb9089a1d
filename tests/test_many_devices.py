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

from numpyro_largecat.data.parts_of_fits import fit_folder, joined
from numpyro_largecat.svi.saved_run import KIND

SCRIPT = Path(__file__).parents[1] / "examples" / "many_devices.py"
NUM_CLASSES, NUM_STEPS = 2_001, 200
MOST_SECONDS = 300
SAID = ("devices, each with", "log probability of a class", "checksum of the best classes")
pytestmark = pytest.mark.slow


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def start(number, folder):
    """Start the processes, which have four devices together."""
    fixed = ["--output", folder, "--classes", NUM_CLASSES, "--steps", NUM_STEPS]
    fixed += ["--every-steps", 20, "--emulate", 4 // number]
    if number > 1:
        fixed += ["--coordinator", f"127.0.0.1:{free_port()}", "--num-processes", number]
    return [
        subprocess.Popen(
            [sys.executable, SCRIPT, *map(str, [*fixed, "--process", i])],
            env=os.environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(number)
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
    found = joined(fit_folder(folder, KIND).read())
    assert found.number == NUM_STEPS
    return found.arrays


def test_two_processes_lose_one_and_go_on_as_if_nothing_had_happened(tmp_path):
    whole = printed(start(2, tmp_path / "whole"))
    folder = tmp_path / "fit"
    first, second = start(2, folder)
    for line in first.stdout:
        if "step 120\n" in line:
            break
    second.send_signal(signal.SIGKILL)
    first.kill()  # it waits for the other; a cluster's scheduler ends it too
    for process in (first, second):
        process.communicate(timeout=MOST_SECONDS)
    assert max(fit_folder(folder, KIND).numbers()) in (100, 120, 140)

    assert printed(start(2, folder)) == whole
    arrays, expected = saved(folder), saved(tmp_path / "whole")
    assert arrays.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(arrays[name], value, err_msg=name)

    # One process reads the parts of two. A fit of its own is the same but for the order of sums.
    assert printed(start(1, folder)) == whole
    assert printed(start(1, tmp_path / "alone"))[-1] == whole[-1]
    alone = saved(tmp_path / "alone")
    np.testing.assert_allclose(alone["losses"], expected["losses"], rtol=1e-4)
