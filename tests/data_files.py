# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest

REAL_DATA = Path(__file__).parents[2] / "shared" / "data"


def real_data(path):
    """A file or folder of the real data, or a skip."""
    if not (REAL_DATA / path).exists():
        pytest.skip(f"needs the real data in {path}, which are not on this machine")
    return REAL_DATA / path
