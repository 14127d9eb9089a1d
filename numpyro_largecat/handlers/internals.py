# SPDX-License-Identifier: Apache-2.0
"""All that the package uses of what NumPyro and JAX do not document, each with its reason.

Checked with NumPyro 0.20.0 to 0.22.0 and JAX 0.8.2 to 0.12. What is here may move with any version:
``tests/handlers/test_internals.py`` says by name which did.
"""

from __future__ import annotations

import copy
from typing import Any

import numpyro
from numpyro.distributions.distribution import MaskedDistribution
from numpyro.distributions.transforms import Transform
from numpyro.primitives import _PYRO_STACK, Messenger
from numpyro.util import _validate_model


def open_handlers() -> list[Messenger]:
    """The handlers that are open, the outermost first.

    A plate must know what is around it when it opens, such as a ``scan``, and a statement which
    plates it is in; a handler sees only the messages that pass by it.
    """
    return list(_PYRO_STACK)


def open_plates() -> dict[str, numpyro.plate]:
    """The plates that are open, by name."""
    return {h.name: h for h in open_handlers() if isinstance(h, numpyro.plate)}


def mask_of(fn: MaskedDistribution) -> Any:
    """The mask of a distribution, a bool or an array, which it has no public name for."""
    return fn._mask


def copy_transform(transform: Transform, arrays: dict[str, Any]) -> Transform:
    """Copy a transform with other arrays, without the inverse of the old ones that it may keep.

    Its constructor may take other arguments, or compute the arrays from them. An inverse that is a
    transform is what it was made as, and stays.
    """
    new = copy.copy(transform)
    new._inv = transform._inv if isinstance(transform._inv, Transform) else None
    for name, array in arrays.items():
        setattr(new, name, array)
    return new


def is_inside_scan(site: dict[str, Any]) -> bool:
    """Whether a site of a trace comes from the body of a ``scan``, which marks it."""
    return bool(site.get("_control_flow_done"))


def check_model_trace(sites: dict[str, Any]) -> None:
    """Warn of plates that do not fit their sites, as NumPyro's own ELBOs do."""
    _validate_model(sites, plate_warning="loose")
