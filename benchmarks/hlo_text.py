# SPDX-License-Identifier: Apache-2.0
"""What the text of a compiled program says of its instructions."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\(")
_ARRAY = re.compile(r"\b[a-z]\w*\[([\d,]*)\]")
_CALLED = re.compile(r"\bcalls=%?([\w.\-]+)")
_OP_NAME = re.compile(r'\bop_name="([^"]*)"')
_FRAME = re.compile(r"\bstack_frame_id=(\d+)")


@dataclass(frozen=True)
class Instruction:
    """One instruction, and where it comes from."""

    name: str
    opcode: str
    num_elements: int  # of its result
    op_name: str  # JAX's name of what became this instruction, such as jit(step)/jit(_normal)/mul
    files: tuple[str, ...]  # of the lines that asked for it, the innermost first, JAX's left out
    called: str | None  # the computation with the inside of a fusion


@dataclass(frozen=True)
class Program:
    """The instructions of a compiled program."""

    name: str
    instructions: dict[str, Instruction]  # by name, of all computations
    computations: dict[str, list[Instruction]]  # by the computation's name

    def inside(self, instruction: Instruction) -> list[Instruction]:
        """What is fused into an instruction, however deep; itself, if it is no fusion."""
        if instruction.opcode != "fusion" or instruction.called is None:
            return [instruction]
        parts = self.computations[instruction.called]
        return [leaf for part in parts for leaf in self.inside(part)]


def read_program(text: str) -> Program:
    """Read the text of a compiled program, as ``Compiled.as_text`` gives it."""
    header = re.match(r"HloModule ([\w.\-]+)", text)
    if header is None:
        raise ValueError(f"`text` must be that of an HLO module; got {text[:40]!r}.")
    files_of = _files_of_frames(text)
    computations: dict[str, list[Instruction]] = {}
    for line in text.splitlines():
        if opened := _COMPUTATION.match(line):
            current = computations.setdefault(opened[1], [])
        elif found := _INSTRUCTION.match(line):
            current.append(_read_instruction(line, found, files_of))
    instructions = {i.name: i for parts in computations.values() for i in parts}
    return Program(header[1], instructions, computations)


def _read_instruction(
    line: str, found: re.Match[str], files_of: dict[str, tuple[str, ...]]
) -> Instruction:
    name, result, opcode = found.groups()
    sizes = [[int(n) for n in shape.split(",") if n] for shape in _ARRAY.findall(result)]
    op_name, frame, called = (p.search(line) for p in (_OP_NAME, _FRAME, _CALLED))
    return Instruction(
        name=name,
        opcode=opcode,
        num_elements=sum(map(math.prod, sizes)),
        op_name=op_name[1] if op_name else "",
        files=files_of[frame[1]] if frame else (),
        called=called[1] if called else None,
    )


def _files_of_frames(text: str) -> dict[str, tuple[str, ...]]:
    """The files of each stack frame and of its callers, from the tables at the top of the text."""
    file_names = {k: v.strip('"') for k, v in _table(text, "FileNames")}
    locations = {k: dict(re.findall(r"(\w+)=(\d+)", v)) for k, v in _table(text, "FileLocations")}
    files: dict[str, tuple[str, ...]] = {}
    for key, value in _table(text, "StackFrames"):  # a caller stands above what it calls
        frame = dict(re.findall(r"(\w+)=(\d+)", value))
        file = file_names[locations[frame["file_location_id"]]["file_name_id"]]
        caller = str(int(frame["parent_frame_id"]) - 1)  # "0" if there is none
        files[key] = (file, *files.get(caller, ()))
    return files


def _table(text: str, name: str) -> list[tuple[str, str]]:
    found = re.search(rf"^{name}\n((?:\d+ .*\n)*)", text, re.MULTILINE)
    lines = found[1].splitlines() if found else []
    return [(key, value) for key, _, value in (line.partition(" ") for line in lines)]
