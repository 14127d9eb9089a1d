# SPDX-License-Identifier: Apache-2.0
"""Step sizes of learners that take natural gradient steps: mixtures and topics."""

from __future__ import annotations


def step_size(t: int, delay: float, forgetting: float) -> float:
    r"""Size of step t = 1, 2, ...

    .. math:: \rho_t = (\mathrm{delay} + t)^{-\mathrm{forgetting}}

    What was known at the start is step 0. With ``delay`` 0 the first step replaces it; with the
    number of steps that a fit took, it goes on as it would have done.

    References:
        Hoffman, Blei, Wang and Paisley, Stochastic variational inference, 2013, Eq. 26.
    """
    return float((delay + t) ** -forgetting)


def check_step_sizes(delay: float, forgetting: float) -> None:
    """Raise ValueError unless all sizes are in (0, 1]."""
    if not (0 <= delay < float("inf") and 0 <= forgetting <= 1):
        raise ValueError(
            "the step sizes (delay + t) ** -forgetting need `delay` of at least 0 and `forgetting` "
            f"in [0, 1], above 0.5 to converge; got {delay} and {forgetting}."
        )
