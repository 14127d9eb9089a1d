# SPDX-License-Identifier: Apache-2.0
"""The versions of Python and of the packages that a saved fit was made with."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib.metadata import version

_PACKAGES = ("numpyro-largecat", "numpyro", "jax", "jaxlib", "optax")


def versions_here() -> dict[str, str]:
    """Those in use, by name."""
    return {"Python": platform.python_version(), **{name: version(name) for name in _PACKAGES}}


def other_versions(saved: Mapping[str, str]) -> str:
    """What differs between these and those in use, for people; nothing if all are the same."""
    here = versions_here()
    return ", ".join(f"{n} {v}, here {here[n]}" for n, v in saved.items() if here.get(n, v) != v)
