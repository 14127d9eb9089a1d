# SPDX-License-Identifier: Apache-2.0
"""Limits of floating point types."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

finfo: Any = jnp.finfo  # JAX gives it no types
