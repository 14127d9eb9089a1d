# SPDX-License-Identifier: Apache-2.0
"""Keep what a guide draws, for later in the same run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numpyro.primitives import Messenger

from numpyro_largecat.handlers.sites import Site, is_latent


class note_values(Messenger):
    """Write the values of some latent sites of ``fn`` into a dictionary, by name."""

    def __init__(
        self, fn: Callable[..., Any], is_noted: Callable[[Site], bool], noted: dict[str, Any]
    ) -> None:
        self.is_noted = is_noted
        self.noted = noted
        super().__init__(fn)

    def postprocess_message(self, msg: Site) -> None:
        """Note the value of a message that all handlers have seen."""
        if is_latent(msg) and self.is_noted(msg):
            self.noted[msg["name"]] = msg["value"]
