# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
from collections.abc import Iterator

import jax
import pytest
from hypothesis import settings

os.environ.setdefault("MPLBACKEND", "Agg")  # tests open no windows

# A first call compiles, so its time says nothing; the same examples every time.
settings.register_profile("numpyro_largecat", deadline=None, derandomize=True)
settings.load_profile("numpyro_largecat")


@pytest.fixture
def x64() -> Iterator[None]:
    """Run one test in float64."""
    with jax.enable_x64(True):
        yield
