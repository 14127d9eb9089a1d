# SPDX-License-Identifier: Apache-2.0
"""Keep the latent values of a guide and a model that run, for a second look in the same run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from numpyro.primitives import Messenger

from numpyro_largecat.handlers.sites import Site, is_latent, plates_of


class Noted(NamedTuple):
    """A latent site as it was drawn."""

    value: Any
    plates: set[str]  # that the guide or the model has it in


class note_latent(Messenger):
    """Write the latent sites of ``fn`` into a dictionary, by name.

    The guide may draw a site in other plates than the model has it in, and sites of its own: give
    both the same dictionary.
    """

    def __init__(self, fn: Callable[..., Any], noted: dict[str, Noted]) -> None:
        self.noted = noted
        super().__init__(fn)

    def postprocess_message(self, msg: Site) -> None:
        """Note a message that all handlers have seen."""
        if is_latent(msg):
            name = msg["name"]
            before = self.noted[name].plates if name in self.noted else set()
            self.noted[name] = Noted(msg["value"], before | plates_of(msg))
