# SPDX-License-Identifier: Apache-2.0
"""A model run again and again, with other values of its discrete sites each time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from numpyro import handlers

from numpyro_largecat._checks import is_concrete
from numpyro_largecat.top_l.marked_sites import first_value, is_marked


@dataclass(frozen=True)
class ModelAtValues:
    """A seeded model, with everything given but its discrete sites."""

    model: Callable[..., Any]
    guide_trace: dict[str, Any]
    params: dict[str, Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def trace(self, values: dict[str, Any]) -> dict[str, Any]:
        """Run the model with the discrete sites at ``values``."""
        return self._trace(lambda msg: values.get(msg["name"]))

    def first_trace(self) -> dict[str, Any]:
        """Run the model with every marked site at the first value of its support."""
        return self._trace(lambda msg: first_value(msg) if is_marked(msg) else None)

    def without_gradients(self) -> ModelAtValues:
        """The same model, with all that it is given constant for the gradient."""

        def constant(tree: Any) -> Any:
            # Nothing else is touched: plates tell rows that model and guide share by identity.
            return jax.tree.map(lambda x: lax.stop_gradient(x) if _has_slope(x) else x, tree)

        guide_trace = {
            name: {**site, "value": constant(site["value"])}
            for name, site in self.guide_trace.items()
        }
        params, args, kwargs = constant((self.params, self.args, self.kwargs))
        return replace(self, guide_trace=guide_trace, params=params, args=args, kwargs=kwargs)

    def _trace(self, value_of: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
        # Outside of the seed, so that the other sites draw with the same keys in every run.
        model = handlers.replay(self.model, self.guide_trace)
        own = jax.tree.map(lambda x: x, self.params)  # models write into what is mutable
        model = handlers.substitute(model, data=own)
        model = handlers.substitute(model, substitute_fn=value_of)
        return handlers.trace(model).get_trace(*self.args, **self.kwargs)


def _has_slope(x: Any) -> bool:
    return not is_concrete(x) and jnp.issubdtype(x.dtype, jnp.inexact)
