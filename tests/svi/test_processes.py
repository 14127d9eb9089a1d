# SPDX-License-Identifier: Apache-2.0
"""Two processes on this machine fit one model; where one is lost, both go on from a checkpoint."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

SCRIPT = Path(__file__).parent / "fit_in_processes.py"
MOST_SECONDS = 300
pytestmark = pytest.mark.slow


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def start(number, folder, out, *kill_at):
    """Start the processes, which have four devices together."""
    port = free_port()
    flags = f"--xla_force_host_platform_device_count={4 // number}"
    environment = os.environ | {
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}",
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        "JAX_PLATFORMS": "cpu",
        "PYTHONWARNINGS": "ignore",
    }
    return [
        subprocess.Popen(
            [sys.executable, SCRIPT, *map(str, (i, number, port, folder, out, *kill_at))],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(number)
    ]


def fit(number, folder, out):
    """Let the processes end; return what they have found."""
    for process in start(number, folder, out):
        _, errors = process.communicate(timeout=MOST_SECONDS)
        assert process.returncode == 0, errors[-2000:]
    with np.load(out) as found:
        return dict(found)


def test_two_processes_lose_one_and_go_on_as_if_nothing_had_happened(tmp_path):
    folder, out = tmp_path / "fit", tmp_path / "found.npz"
    first, second = start(2, folder, out, 110)
    second.communicate(timeout=MOST_SECONDS)
    assert second.returncode == -signal.SIGKILL
    first.kill()  # it waits for the other; a cluster's scheduler ends it too
    first.communicate()
    numbers = [{p.name for p in part.iterdir()} for part in sorted(folder.iterdir())]
    assert len(numbers) == 2
    assert "100" in set.intersection(*numbers)
    found = fit(2, folder, out)

    whole = fit(2, tmp_path / "whole", out)
    assert len(found["losses"]) == 200
    for name, value in whole.items():
        rows = 2_001 if name.startswith("w_") else None  # past them is padding
        np.testing.assert_array_equal(found[name][:rows], value[:rows], err_msg=name)

    alone = fit(1, tmp_path / "alone", out)
    np.testing.assert_allclose(found["losses"], alone["losses"], rtol=1e-4)
    np.testing.assert_allclose(
        found["w_auto_loc"][:2_001], alone["w_auto_loc"][:2_001], rtol=1e-3, atol=1e-4
    )
    np.testing.assert_array_equal(found["classes"], alone["classes"])

    # One process reads the parts of two, and ends as they did.
    read = fit(1, folder, out)
    np.testing.assert_array_equal(read["losses"], found["losses"])
    np.testing.assert_allclose(read["log_probs"], found["log_probs"], rtol=1e-5)
