# SPDX-License-Identifier: Apache-2.0
"""Handlers under which a model is read: nothing is drawn of classes, choices or training rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from jax import Array
from numpyro.primitives import Messenger

from numpyro_largecat.choices.choice_distribution import ChoiceDistribution, base_distribution


class only_read(Messenger):
    """Let plates hold the rows that a model reads, and draw neither classes nor choices.

    A class plate that would draw classes holds those of its labels and of ``also``, by plate name;
    without labels, which new rows lack, it holds all.
    """

    def __init__(
        self, fn: Callable[..., Any] | None = None, *, also: Mapping[str, Array] | None = None
    ) -> None:
        self.also = also or {}
        super().__init__(fn)

    def process_message(self, msg: dict[str, Any]) -> None:
        """Answer the helper sites of plates, and the choices."""
        if msg["type"] == "plate" and msg["kwargs"].get("is_helper"):
            also = self.also.get(msg["name"].removesuffix("_rows"))
            msg["kwargs"].update(is_read=True, also=also)
            if msg["kwargs"]["draws_classes"] and msg["value"] is None:
                msg["value"] = ()
        elif is_choice(msg) and msg["value"] is None:
            msg["value"] = jnp.zeros(msg["fn"].batch_shape, jnp.int32)


class RowsNeeded(NotImplementedError):
    """A latent site has a value for each row of the training data."""


class without_training_rows(Messenger):
    """Let data plates without ``rows`` hold rows that the fit has not seen."""

    def __enter__(self) -> None:
        self.plates: set[str] = set()
        super().__enter__()

    def process_message(self, msg: dict[str, Any]) -> None:
        """Answer the helper sites of these plates, and refuse latent sites inside them."""
        if msg["type"] == "plate" and msg["kwargs"].get("all_rows"):
            self.plates.add(msg["name"].removesuffix("_rows"))
            msg["value"] = jnp.zeros(1, jnp.int32)  # one row, which any number of rows broadcasts
        elif msg["type"] in ("sample", "param") and not (msg.get("is_observed") or is_choice(msg)):
            frames = {frame.name for frame in msg["cond_indep_stack"]} & self.plates
            if frames:
                raise RowsNeeded(
                    f"site '{msg['name']}' has a value for each row of plate '{frames.pop()}', "
                    "which rows that the model was not fitted to lack. Give the plate the ids of "
                    "training rows, `data_plate(..., rows=ids)`, to predict for these."
                )


def is_choice(msg: dict[str, Any]) -> bool:
    """Whether a message, or a site of a trace, is a choice."""
    return msg["type"] == "sample" and isinstance(base_distribution(msg["fn"]), ChoiceDistribution)


def class_plates_of(sites: dict[str, Any]) -> dict[str, int]:
    """The class plates of a trace, and their sizes."""
    return {
        name: int(site["args"][0])
        for name, site in sites.items()
        if site["type"] == "plate" and "labels" in site["kwargs"]
    }
