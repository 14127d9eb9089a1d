# SPDX-License-Identifier: Apache-2.0
"""Handlers that choose what plates hold: rows that are named, or those that a prediction reads."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax.numpy as jnp
from jax import Array
from numpyro.primitives import Messenger

from numpyro_largecat.handlers.plate_facts import (
    PlateFacts,
    choose_rows,
    only_read_rows,
    plate_facts,
    plate_of,
    reverse_read_rows,
    rows_request,
    tell_plate_facts,
)
from numpyro_largecat.handlers.sites import Site, is_latent, param_options, plates_of

IsChoice = Callable[[Site], bool]  # whether a message is of a choice


class hold_rows(Messenger):
    """Make plates hold these rows, which stand for no others, whatever they would hold.

    Args:
        fn: Model or guide.
        rows: Distinct rows of each plate, by name, shape (M,).
    """

    def __init__(self, fn: Callable[..., Any], *, rows: Mapping[str, Array]) -> None:
        self.rows = rows
        super().__init__(fn)

    def process_message(self, msg: Site) -> None:
        """Answer the helper sites of our plates, and plain plates."""
        if msg["type"] != "plate" or plate_of(msg) not in self.rows:
            return
        rows = self.rows[plate_of(msg)]
        if rows_request(msg) is not None:
            choose_rows(msg, rows, is_alone=True)
        elif plate_facts(msg).kind == "plain":
            msg["value"], msg["args"] = rows, (msg["args"][0], rows.shape[0])
            tell_plate_facts(msg, PlateFacts(is_distinct=True))


class only_read(Messenger):
    """Let plates hold the rows that a model reads, and draw neither classes nor choices.

    A class plate that would draw classes holds those of its labels and of ``also``, by plate name;
    without labels, which new rows lack, it holds all.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        is_choice: IsChoice,
        also: Mapping[str, Array] | None = None,
    ) -> None:
        self.is_choice = is_choice
        self.also = also or {}
        super().__init__(fn)

    def process_message(self, msg: Site) -> None:
        """Answer the helper sites of plates, and the choices."""
        request = rows_request(msg)
        if request is not None:
            only_read_rows(msg, self.also.get(plate_of(msg)))
            if request.source == "drawn classes" and msg["value"] is None:
                msg["value"] = ()
        elif msg["value"] is None and self.is_choice(msg):
            msg["value"] = jnp.zeros(msg["fn"].batch_shape, jnp.int32)


class reverse_rows(Messenger):
    """Let plates hold what is drawn or read in the opposite order, which nothing may depend on.

    Args:
        fn: Model or guide.
        plates: Names of the plates. In others the weights of classes may differ by place.
        is_reversed: Whether to do so, a boolean that may be traced.
    """

    def __init__(self, fn: Callable[..., Any], plates: Collection[str], is_reversed: Array) -> None:
        self.plates = plates
        self.is_reversed = is_reversed
        super().__init__(fn)

    def process_message(self, msg: Site) -> None:
        """Tell the plate."""
        if rows_request(msg) is not None and plate_of(msg) in self.plates:
            reverse_read_rows(msg, self.is_reversed)


class RowsNeeded(NotImplementedError):
    """A latent site has a value for each row of the training data."""


class without_training_rows(Messenger):
    """Let data plates without ``rows`` hold rows that the fit has not seen."""

    def __init__(self, fn: Callable[..., Any], *, is_choice: IsChoice) -> None:
        self.is_choice = is_choice
        super().__init__(fn)

    def __enter__(self) -> None:
        self.plates: set[str] = set()
        super().__enter__()

    def process_message(self, msg: Site) -> None:
        """Answer the helper sites of these plates, and refuse latent sites inside them."""
        request = rows_request(msg)
        if request is not None and request.source == "all rows":
            self.plates.add(plate_of(msg))
            msg["value"] = jnp.zeros(1, jnp.int32)  # one row, which any number of rows broadcasts
        elif _has_rows(msg) or (is_latent(msg) and not self.is_choice(msg)):
            frames = plates_of(msg) & self.plates
            if frames:
                raise RowsNeeded(
                    f"site '{msg['name']}' has a value for each row of plate '{frames.pop()}', "
                    "which new rows lack. Give the plate the ids of training rows, "
                    "`data_plate(..., rows=ids)`. An outcome that is no choice is predicted by "
                    "NumPyro's `Predictive`, from guide and model with full plates."
                )


def _has_rows(msg: Site) -> bool:
    """Whether this is a parameter with a row for each row of its plates, not one they share."""
    return msg["type"] == "param" and param_options(msg).event_dim is not None
