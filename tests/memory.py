# SPDX-License-Identifier: Apache-2.0
"""Scratch memory of compiled functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax


def temp_bytes(fn: Callable[..., Any], *args: Any, **jit_options: Any) -> int:
    """Scratch memory that XLA sets aside for ``fn(*args)``; nothing is run.

    Arguments may be arrays or ``jax.ShapeDtypeStruct``; arguments and results are not counted.
    """
    compiled = jax.jit(fn, **jit_options).lower(*args).compile()
    return int(compiled.memory_analysis().temp_size_in_bytes)
