# SPDX-License-Identifier: Apache-2.0
"""Keep what a guide and a model draw while they run, for a second look in the same run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from jax import Array
from numpyro.primitives import Messenger

from numpyro_largecat.handlers.sites import Site, is_latent, plates_of


class Noted(NamedTuple):
    """A latent site as it was drawn."""

    value: Any
    plates: set[str]  # that the guide or the model has it in


class note_draws(Messenger):
    """Write the latent sites of ``fn`` into a dictionary, by name, and its random keys into a list.

    The guide may draw a site in other plates than the model has it in, and sites of its own: give
    both the same dictionary. The keys are those of ``numpyro.prng_key``, such as of dropout.
    """

    def __init__(
        self, fn: Callable[..., Any], sites: dict[str, Noted], keys: list[Array | None]
    ) -> None:
        self.sites = sites
        self.keys = keys
        super().__init__(fn)

    def postprocess_message(self, msg: Site) -> None:
        """Note a message that all handlers have seen."""
        if msg["type"] == "prng_key":
            self.keys.append(msg["value"])
        elif is_latent(msg):
            name = msg["name"]
            before = self.sites[name].plates if name in self.sites else set()
            self.sites[name] = Noted(msg["value"], before | plates_of(msg))


class replay_keys(Messenger):
    """Give ``numpyro.prng_key`` these keys, in turn, and new ones after the last."""

    def __init__(self, fn: Callable[..., Any], keys: list[Array | None]) -> None:
        self.keys = keys
        super().__init__(fn)

    def __enter__(self) -> None:
        self.left = iter(self.keys)
        super().__enter__()

    def process_message(self, msg: Site) -> None:
        """Answer a statement that asks for a key."""
        if msg["type"] == "prng_key":
            msg["value"] = next(self.left, None)
