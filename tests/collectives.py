# SPDX-License-Identifier: Apache-2.0
"""What compiled programs send from device to device."""

from __future__ import annotations

import re
from typing import Any

KINDS = "all-reduce|all-gather|collective-permute|all-to-all|reduce-scatter"


def shapes_sent(program: Any) -> list[tuple[int, ...]]:
    """The shapes of all arrays that a compiled program sends; () for a number."""
    results = re.findall(rf"= (.*) (?:{KINDS})(?:-start)?\(", program.as_text())
    shapes = re.findall(r"\w\[([\d,]*)\]", "".join(results))
    return [tuple(int(size) for size in shape.split(",") if size) for shape in shapes]
