# SPDX-License-Identifier: Apache-2.0
"""Processes that would wait for each other for ever are refused, in all of them."""

from __future__ import annotations

import numpy as np
import pytest

import numpyro_largecat as lc
from numpyro_largecat.svi import processes
from numpyro_largecat.svi.callback_calls import CallbackCalls


@pytest.fixture
def other(monkeypatch):
    """Another process, which holds what is set here in the place of what this one holds."""
    held = {"gathered": []}

    def gather(own):
        held["gathered"].append(int(own))
        return np.stack([own, held.get("other", own)])

    monkeypatch.setattr(processes.multihost_utils, "process_allgather", gather)
    return held


def calls(*every):
    return CallbackCalls([lc.Callback(print, every_steps=n) for n in every], None, 10)


def test_the_same_settings_are_taken_and_others_refused(other):
    processes.check_same_in_all(10, calls(5), None)
    other["other"] = np.uint32(0)
    with pytest.raises(ValueError, match="same number of `callbacks` with the same `every_steps`"):
        processes.check_same_in_all(10, calls(5), None)


def test_what_processes_must_share_makes_a_difference(other):
    processes.check_same_in_all(10, calls(5), None)
    processes.check_same_in_all(11, calls(5), None)
    processes.check_same_in_all(10, calls(4), None)
    processes.check_same_in_all(10, calls(5, 5), None)
    processes.check_same_in_all(10, calls(5), lc.Checkpoints("folder", every_steps=3))
    assert len(set(other["gathered"])) == 5


def test_other_checkpoints_are_refused(other):
    processes.check_same_checkpoint(200)
    other["other"] = np.int32(-1)
    with pytest.raises(ValueError, match=r"newest steps are \[200, -1\], -1 for none"):
        processes.check_same_checkpoint(200)


def test_what_ends_one_process_ends_all(other):
    assert not processes.is_over_in_any(False)
    other["other"] = np.int32(1)
    assert processes.is_over_in_any(False)


def test_what_one_cannot_read_stops_all(other):
    def read():
        raise OSError("no such part")

    assert processes.in_all(lambda: "fit") == "fit"
    with pytest.raises(OSError, match="no such part"):
        processes.in_all(read)
    assert other["gathered"] == [0, 1]  # the others were told before it was raised
    other["other"] = np.int32(1)
    with pytest.raises(RuntimeError, match="process 1 could not read its part of the fit"):
        processes.in_all(lambda: "fit")
