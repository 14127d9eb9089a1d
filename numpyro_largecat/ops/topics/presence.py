# SPDX-License-Identifier: Apache-2.0
r"""Expected counts of tokens, and how likely there are any.

Counts n of draws from a Dirichlet of concentrations a have a log probability with the sum of
log(Gamma(a[k] + n[k]) / Gamma(a[k])), which is 0 for n = 0, steep up to 1, and convex: expected
counts well below 1 say how likely one token is, not that there is a little of one. With P the
probability that there is any, and n / P the expected count in that case, Jensen's inequality is
applied in that case alone,

    E log(Gamma(a + n) / Gamma(a)) >= P log(Gamma(a + E n / P) / Gamma(a)),

which is at least as large as the same at E n. Teh, Newman and Welling, A Collapsed Variational
Bayesian Inference Algorithm for LDA, 2007, treat counts above 0 so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import digamma, gammaln, xlog1py

NO_DIGITS = 1e8  # concentrations whose log Gamma has few digits for single tokens
MOST_SHARE = 1 - 1e-6  # of a token, whose complement has a logarithm in float32


def log_absence(shares: NDArray[np.floating]) -> NDArray[np.floating]:
    """Log probability that a token is not of a topic."""
    return np.log1p(-np.minimum(shares, MOST_SHARE))


def expected_topics(concentration: NDArray[np.floating], num_tokens: int) -> float:
    r"""How many topics a document of so many tokens has under its prior.

    .. math:: \sum_k \Big(1 - \frac{\Gamma(A)}{\Gamma(A + n)}
              \frac{\Gamma(A - a_k + n)}{\Gamma(A - a_k)}\Big), \qquad A = \sum_k a_k
    """
    a = np.asarray(concentration, np.float64)
    total, others = a.sum(), a.sum() - a
    if total > NO_DIGITS:  # a token hardly moves the next
        log_none = xlog1py(num_tokens, -a / total)
    else:
        log_none = gammaln(total) - gammaln(total + num_tokens)
        log_none = log_none + gammaln(others + num_tokens) - gammaln(others)
    return float(-np.expm1(np.minimum(log_none, 0)).sum())


def log_rises(
    counts: NDArray[np.floating],
    log_absence: NDArray[np.floating],
    concentration: NDArray[np.floating] | float,
    which: NDArray[np.integer] | tuple[()] = (),
) -> NDArray[np.floating]:
    """P log(Gamma(a + n / P) / Gamma(a)), for each count above 0.

    ``which`` is the place of its a among fewer concentrations, if there are fewer.
    """
    return _rise_of(gammaln, counts, log_absence, concentration, which)


def rises(
    counts: NDArray[np.floating],
    log_absence: NDArray[np.floating],
    concentration: NDArray[np.floating] | float,
    which: NDArray[np.integer] | tuple[()] = (),
) -> NDArray[np.floating]:
    """Their derivatives, P (digamma(a + n / P) - digamma(a))."""
    return _rise_of(digamma, counts, log_absence, concentration, which)


def _rise_of(
    function: Callable[..., Any],
    counts: NDArray[np.floating],
    log_absence: NDArray[np.floating],
    concentration: NDArray[np.floating] | float,
    which: NDArray[np.integer] | tuple[()],
) -> Any:
    presence = -np.expm1(log_absence)
    if_any = np.maximum(counts / presence, 1)  # but for rounding
    each = np.asarray(concentration)
    return presence * (function(each[which] + if_any) - function(each)[which])
