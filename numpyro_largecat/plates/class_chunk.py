# SPDX-License-Identifier: Apache-2.0
"""A handler that runs a model on some consecutive classes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax.typing import ArrayLike
from numpyro.primitives import Messenger

from numpyro_largecat._checks import check_count
from numpyro_largecat.handlers.plate_facts import choose_rows, plate_of, rows_request


class class_chunk(Messenger):
    """Run a model or guide on the classes [start, start + size) of one class plate.

    Everything in that plate then has rows for these classes alone, with weight 1 and no sampling,
    whatever labels and ``num_sampled`` the plate has: evaluated chunk by chunk this visits all K
    classes in bounded memory. Rows past the last class repeat it with weight 0. ``start=0`` and
    ``size=num_categories`` gives all classes at once. Classes that the model reads by id come after
    those of the chunk, with weight 0.

    Cost: O(size).

    Args:
        fn: Model or guide; it may be left out to use the handler in a ``with`` statement.
        name: Name of the class plate.
        start: First class, an int or a traced integer scalar, so that chunks can be scanned over.
        size: Number of classes, a Python int of at least 1.

    Raises:
        ValueError: If ``size`` is less than 1.

    Example:
        >>> import numpyro_largecat as lc
        >>> with lc.plates.class_chunk(name="classes", start=8, size=4):
        ...     classes = lc.class_plate("classes", 10).classes
        >>> classes.indices.tolist(), classes.weights.tolist()
        ([8, 9, 9, 9], [1.0, 1.0, 0.0, 0.0])
    """

    def __init__(
        self, fn: Callable[..., Any] | None = None, *, name: str, start: ArrayLike, size: int
    ) -> None:
        self.name = name
        self.start = start
        self.size = check_count("size", size, 1)
        super().__init__(fn)

    def process_message(self, msg: dict[str, Any]) -> None:
        """Answer the helper site of the class plate."""
        if rows_request(msg) is not None and plate_of(msg) == self.name:
            choose_rows(msg, jnp.asarray(self.start) + jnp.arange(self.size, dtype=jnp.int32))
