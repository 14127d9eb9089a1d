# SPDX-License-Identifier: Apache-2.0
"""Cases of a parametrised test that run with the slow ones, beside one that always runs."""

from __future__ import annotations

from typing import Any

import pytest


def slow_case(*values: Any) -> Any:
    """A case that ``make test`` leaves to ``make test-slow``."""
    return pytest.param(*values, marks=pytest.mark.slow)
