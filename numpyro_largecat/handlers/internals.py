# SPDX-License-Identifier: Apache-2.0
"""All that the package uses of what NumPyro and JAX do not document, each with its reason.

Checked with NumPyro 0.20.0 to 0.22.0 and JAX 0.8.2 to 0.12. What is here may move with any version:
``tests/handlers/test_internals.py`` says by name which did.
"""

from __future__ import annotations

from typing import Any

from numpyro.distributions.distribution import MaskedDistribution
from numpyro.primitives import _PYRO_STACK, Messenger
from numpyro.util import _validate_model


def open_handlers() -> list[Messenger]:
    """The handlers that are open, the outermost first.

    A plate must know what is around it when it opens, such as a ``scan``, and a statement which
    plates it is in; a handler sees only the messages that pass by it.
    """
    return list(_PYRO_STACK)


def mask_of(fn: MaskedDistribution) -> Any:
    """The mask of a distribution, a bool or an array, which it has no public name for."""
    return fn._mask


def is_inside_scan(site: dict[str, Any]) -> bool:
    """Whether a site of a trace comes from the body of a ``scan``, which marks it."""
    return bool(site.get("_control_flow_done"))


def check_model_trace(sites: dict[str, Any]) -> None:
    """Warn of plates that do not fit their sites, as NumPyro's own ELBOs do."""
    _validate_model(sites, plate_warning="loose")
