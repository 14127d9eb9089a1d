# SPDX-License-Identifier: Apache-2.0
"""How large the code of a program becomes if a compiler inlines every gather into its readers.

XLA fuses a gather with what reads it and computes its indices anew for each place that reads it.
Where the index of each gather of a chain depends on several gathers before it, as in a binary
search whose loop is unrolled, the code doubles with each of them: JAX 0.11 and 0.12 compile such a
search over ten thousand entries for minutes. Loops, sorts, products and sums end a chain. Nothing
is compiled here, so that a test which finds such a chain fails, and does not hang.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

READS = ("stablehlo.gather", "stablehlo.dynamic_slice")
ENDS = (
    "chlo.top_k",
    "stablehlo.case",
    "stablehlo.composite",
    "stablehlo.convolution",
    "stablehlo.custom_call",
    "stablehlo.dot_general",
    "stablehlo.reduce",
    "stablehlo.reduce_window",
    "stablehlo.scatter",
    "stablehlo.sort",
    "stablehlo.while",
)

Gathers = frozenset[int]  # those that are read to compute one entry of a value


def inlined_gathers(fn: Callable[..., Any], *args: Any) -> int:
    """Most gathers that stand in the code of one value of a program, if all are inlined.

    ``args`` may be arrays or ``jax.ShapeDtypeStruct``; nothing is run.
    """
    module: Any = jax.jit(fn).lower(*args).compiler_ir("stablehlo")
    functions = {op.name.value: op for op in module.body.operations}
    walk = _Walk(functions)
    walk.call("main", [frozenset[int]()] * len(functions["main"].arguments))
    return max(walk.counts, default=0)


class _Walk:
    """Follows a program from its arguments to its results."""

    def __init__(self, functions: dict[str, Any]) -> None:
        self.functions = functions
        self.counts: list[int] = []  # of gathers in the code of each gather, itself among them

    def call(self, name: str, inputs: Sequence[Gathers]) -> list[Gathers]:
        """What the results of a function read."""
        return self._run(self.functions[name].regions[0].blocks[0], inputs, {})

    def _run(self, block: Any, inputs: Sequence[Gathers], outer: dict[Any, Gathers]) -> Any:
        reads = outer | dict(zip(block.arguments, inputs, strict=True))
        for op in block.operations:
            operands = [reads[value] for value in op.operands]
            if op.operation.name in ("func.return", "stablehlo.return"):
                return operands
            reads.update(zip(op.results, self._of(op, operands, reads), strict=True))
        raise AssertionError("a block without a return")

    def _of(self, op: Any, operands: list[Gathers], reads: dict[Any, Gathers]) -> Any:
        name, together = op.operation.name, frozenset[int]().union(*operands)
        if name == "func.call":
            return self.call(op.attributes["callee"].value, operands)
        if name in READS:
            self.counts.append(1 + sum(self.counts[i] for i in together))
            return [frozenset({len(self.counts) - 1})]
        for region in op.regions:  # whose arguments are computed before it
            block = region.blocks[0]
            self._run(block, [frozenset()] * len(block.arguments), reads)
        return [frozenset() if name in ENDS else together] * len(op.results)
