# SPDX-License-Identifier: Apache-2.0
"""In which order the words of a topic say most about it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def relevance(
    probs: NDArray[np.floating], everywhere: NDArray[np.floating], weight: float
) -> NDArray[np.floating]:
    """Weight log phi + (1 - weight) log(phi / p), for words of a topic, (V,).

    Words without tokens anywhere are last, however rare. See ``TopicFit.top_words``.
    """
    is_used = everywhere > 0
    share = np.where(is_used, everywhere, 1)
    return np.where(is_used, np.log(probs) - (1 - weight) * np.log(share), -np.inf)


def frex(
    probs: NDArray[np.floating], exclusiveness: NDArray[np.floating], weight: float
) -> NDArray[np.floating]:
    """Harmonic mean of two ranks of words of a topic, (V,). See ``TopicFit.top_words``."""
    from scipy.stats import rankdata  # takes longer to import than all else of the package

    size = len(probs)
    ranks = (rankdata(values, "max") / size for values in (exclusiveness, probs))
    exclusive, frequent = ranks
    return 1 / (weight / exclusive + (1 - weight) / frequent)
