# SPDX-License-Identifier: Apache-2.0
"""One name is one thing in the whole package."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import numpyro_largecat

PACKAGE = Path(numpyro_largecat.__file__).parent
# What each fit that can go on has of its own, and each learner that goes batch by batch.
OF_EACH_LEARNER = {
    "Learning",
    "Options",
    "arrays_of",
    "memoized_steps",
    "settings_of",
    "stochastic_steps",
}
# Names that two learners, or an array function and a plot, have by chance.
LEFT = {"padded_rows", "responsibilities"}


def public_names(path: Path) -> set[str]:
    """Functions and classes of a file that have no underscore in front."""
    kinds = (ast.FunctionDef, ast.ClassDef)
    found = {node.name for node in ast.parse(path.read_text()).body if isinstance(node, kinds)}
    return {name for name in found if not name.startswith("_")}


def test_a_public_function_or_class_has_a_name_that_no_other_file_gives():
    counts = Counter(name for path in PACKAGE.rglob("*.py") for name in public_names(path))
    assert {name for name, count in counts.items() if count > 1} <= OF_EACH_LEARNER | LEFT
