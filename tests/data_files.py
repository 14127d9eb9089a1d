# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
from pathlib import Path

import pytest

# The folder that LARGECAT_DATA names, or one beside the repository.
BESIDE = Path(__file__).parents[2] / "shared" / "data"
REAL_DATA = Path(os.environ.get("LARGECAT_DATA") or BESIDE)
WITHOUT_DATA = {name: value for name, value in os.environ.items() if name != "LARGECAT_DATA"}


def real_data(path):
    """A file or folder of the real data, or a skip."""
    if not (REAL_DATA / path).exists():
        pytest.skip(f"needs real data: set LARGECAT_DATA to a folder that holds {path}")
    return REAL_DATA / path
