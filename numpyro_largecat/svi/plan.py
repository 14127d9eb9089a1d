# SPDX-License-Identifier: Apache-2.0
"""What ``SubsampledSVI.init`` learns: all that a step and the loop need besides their state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

from numpyro.infer.elbo import ELBO
from numpyro.infer.util import transform_fn

from numpyro_largecat.handlers.touched_rows import TouchedRows
from numpyro_largecat.svi.iterates import Recorded
from numpyro_largecat.svi.row_optimizer import RowAxes, Rows, check_row_wise, find_owners
from numpyro_largecat.svi.state import SubsampledSVIState, check_state, shapes_of
from numpyro_largecat.svi.stored_params import StoredParam


@dataclass(frozen=True)
class Plan:
    """Model, guide and optimiser, and what their first run has shown of them; nothing changes it.

    Plans compare by what a compiled step depends on, so that a later run whose plan is equal uses
    the programs of an earlier one. ``recorded`` is no part of that: it goes into them as arrays.
    """

    model: Callable[..., Any]
    guide: Callable[..., Any]
    optim: Any  # a NumPyro optimiser
    loss: ELBO
    static_kwargs: Mapping[str, Any]  # passed to model and guide in each call

    # Learned by `init`; empty before.
    stored: Mapping[str, StoredParam] = field(default_factory=dict)  # all parameters, by name
    shapes: SubsampledSVIState | None = None  # of the state: shapes and dtypes for arrays
    recorded: Recorded = field(default_factory=dict, compare=False)  # entries seen in each step
    owners: Callable[[RowAxes], list[str | None]] | None = field(default=None, compare=False)

    def __hash__(self) -> int:
        """Of names alone, since models, guides and arguments need not be hashable."""
        return hash(tuple(self.stored))

    def learned(
        self, stored: Mapping[str, StoredParam], state: SubsampledSVIState, recorded: Recorded
    ) -> Plan:
        """The plan after a first run that found these parameters and made this state."""
        shapes, owners = shapes_of(state), self.owners
        if owners is None or shapes != self.shapes:
            # A pure function, whose answers are kept for each set of plates held in part.
            owners = cache(partial(_checked_owners, self.optim, shapes.optim_state))
        return replace(self, stored=stored, shapes=shapes, recorded=recorded, owners=owners)

    def check(self, state: Any) -> None:
        """Refuse what is not the state of this model and optimiser."""
        if self.shapes is None:
            raise RuntimeError(
                "SubsampledSVI learns the sites of model and guide in `init`: call it once before "
                "`update`, `evaluate` or `run(init_state=...)`, with arguments like theirs."
            )
        check_state(self.shapes, state, self.optim)

    def rows(self, touched: TouchedRows) -> Rows:
        """The rows that a step reads and writes of each parameter that it does not take whole."""
        rows = {name: param.rows(touched) for name, param in self.stored.items()}
        return {name: by_axis for name, by_axis in rows.items() if by_axis}

    def row_owners(self, rows: Rows) -> list[str | None]:
        """Whose rows each leaf of the optimiser's state holds; the optimiser is checked once.

        Raises:
            ValueError: If the optimiser mixes rows.
        """
        assert self.owners is not None
        optimised = [name for name in sorted(rows) if self.stored[name].rule is None]
        return self.owners(tuple((name, tuple(rows[name])) for name in optimised))

    def constrain(self, optimised: dict[str, Any]) -> dict[str, Any]:
        """Constrained values of parameters that the optimiser moves, stored whole."""
        constrained: dict[str, Any] = transform_fn(
            {name: self.stored[name].transform for name in optimised}, optimised
        )
        return constrained

    def params(self, state: SubsampledSVIState) -> dict[str, Any]:
        """Constrained values of all parameters, stored whole: O(table)."""
        optimised = self.constrain(self.optim.get_params(state.optim_state))
        return optimised | {name: local.value for name, local in state.local_state.items()}


def _checked_owners(optim: Any, optim_state: Any, axes: RowAxes) -> list[str | None]:
    params = optim.get_params(optim_state)
    owners = find_owners(optim, params, dict(axes))
    check_row_wise(optim, params, dict(axes))
    return owners
