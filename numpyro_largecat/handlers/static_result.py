# SPDX-License-Identifier: Apache-2.0
"""What a function says of arrays, without computing them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax

Static = TypeVar("Static")  # no array


def static_result(fn: Callable[[], Static]) -> Static:
    """What ``fn`` returns that is not an array, without computing arrays."""
    result: list[Static] = []

    def run() -> None:
        result.append(fn())

    jax.eval_shape(run)
    return result[0]
