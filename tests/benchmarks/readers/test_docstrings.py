# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import benchmarks.readers

MODULES = [module.name for module in pkgutil.iter_modules(benchmarks.readers.__path__)]
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_run(name: str) -> None:
    module = importlib.import_module(f"benchmarks.readers.{name}")
    assert not doctest.testmod(module, optionflags=OPTIONS).failed
