# SPDX-License-Identifier: Apache-2.0
"""Which users have taken which items, as recommenders learn from."""

from __future__ import annotations

from os import PathLike
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from numpyro_largecat.data.files import malformed, open_binary


class Interactions(NamedTuple):
    """Pairs of a user and an item, in the order of the file."""

    users: NDArray[np.int32]  # (N,)
    items: NDArray[np.int32]  # (N,)


def read_interactions(path: str | PathLike[str]) -> Interactions:
    """Read lines of ``user item item ...``, whole numbers from 0 on; the file may be compressed.

    Raises:
        ValueError: If a line has a token that is no such number, with the file and the line.
    """
    users: list[NDArray[np.int32]] = []
    items: list[NDArray[np.int32]] = []
    with open_binary(path) as file:
        for number, line in enumerate(file, start=1):
            tokens = line.split()
            if not all(token.isdigit() and len(token) < 10 for token in tokens):
                raise malformed(path, number, "whole numbers from 0 on", line)
            if len(tokens) > 1:
                own = np.array(tokens, np.int32)
                users.append(np.full(len(own) - 1, own[0], np.int32))
                items.append(own[1:])
    none = np.zeros(0, np.int32)
    return Interactions(np.concatenate([none, *users]), np.concatenate([none, *items]))
