# SPDX-License-Identifier: Apache-2.0
"""Whether distributions were given what they can take, where values are traced.

NumPyro looks at this operation by operation, as it makes a distribution, and not in a trace.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from numpyro.distributions import Distribution
from numpyro.distributions.constraints import is_dependent
from numpyro.distributions.util import lazy_property

from numpyro_largecat.handlers.sites import Sites, of_type


def have_valid_arguments(sites: Sites) -> Array:
    """Whether the arguments of all distributions in a trace are within their constraints.

    Cost: as that of the checks which NumPyro makes with ``validate_args``.
    """
    fns = (site["fn"] for site in of_type("sample", sites).values())
    checks = [check for fn in fns for part in _with_parts(fn) for check in _checks(part)]
    return jnp.stack([jnp.array(True), *checks]).all()


def _with_parts(fn: Any) -> Iterator[Distribution]:
    """A distribution, and those that it is made of."""
    if not isinstance(fn, Distribution):
        return
    yield fn
    inside = jax.tree.leaves(fn, is_leaf=lambda x: x is not fn and isinstance(x, Distribution))
    for part in inside:
        yield from _with_parts(part)


def _checks(fn: Distribution) -> Iterator[Array]:
    for name, constraint in fn.arg_constraints.items():
        is_derived = isinstance(getattr(type(fn), name, None), lazy_property)
        if (is_derived and name not in vars(fn)) or is_dependent(constraint):
            continue
        yield jnp.all(constraint(getattr(fn, name)))
