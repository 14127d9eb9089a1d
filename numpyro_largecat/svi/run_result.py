# SPDX-License-Identifier: Apache-2.0
"""What ``SubsampledSVI.run`` returns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro.infer.svi import SVIRunResult

from numpyro_largecat._checks import is_concrete
from numpyro_largecat.svi.convergence import Convergence


class SubsampledSVIRunResult(SVIRunResult):
    """NumPyro's ``SVIRunResult``, three fields, with values that some parameters had on the way.

    Attributes:
        params: Constrained values of all parameters, stored whole, by name.
        state: The last state, to go on from.
        losses: Loss of each step, shape (steps,).
        iterates: Unconstrained values of a few entries of each parameter, shape (iterates,
            entries), evenly spaced over the steps. Empty where the fit ran inside a transformation.
        scores: Held-out scores: ``step``, the steps before each, and ``score``, shapes (scores,).
            Empty without ``held_out``.
    """

    iterates: Mapping[str, Any]
    scores: Mapping[str, Any]

    def __new__(
        cls,
        params: dict[str, Any],
        state: Any,
        losses: Array,
        iterates: Any = None,
        scores: Any = None,
    ) -> SubsampledSVIRunResult:
        """Make a result of three fields, and of ``iterates`` and ``scores``, none of its items."""
        result = super().__new__(cls, params, state, losses)
        result.iterates = {} if iterates is None else iterates
        result.scores = {} if scores is None else scores
        return result

    def __repr__(self) -> str:
        """How long the fit was, whether it has converged, and the shapes of its parameters."""
        shapes = {name: jax.tree.map(jnp.shape, value) for name, value in self.params.items()}
        lines = [f"{type(self).__name__}, {len(self.losses)} steps"]
        if is_concrete(self.losses):
            ended = len(self.losses) > 0 and not np.isfinite(self.losses[-1])
            lines[0] += "; the loss of the last is not finite" * ended + f"; {self.convergence}"
        return "\n".join([*lines, *(f"  {name} {shape}" for name, shape in shapes.items())])

    @property
    def convergence(self) -> Convergence:
        """Whether the fit still rises or drifts, and its noise; prints as one line."""
        return Convergence.of(self.losses, self.iterates)

    def _replace(self, **changes: Any) -> SubsampledSVIRunResult:
        """The result with some fields changed; its iterates and scores stay."""
        others = [changes.pop(name, getattr(self, name)) for name in ("iterates", "scores")]
        new = super()._replace(**changes)
        return SubsampledSVIRunResult(new.params, new.state, new.losses, *others)
