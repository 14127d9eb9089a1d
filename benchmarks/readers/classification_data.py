# SPDX-License-Identifier: Apache-2.0
"""The one form of every classification data set here."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class ClassificationData(NamedTuple):
    """A classification data set with K classes and D dense features, split in train and test.

    Example:
        >>> import numpy as np
        >>> x, y = np.zeros((2, 1), np.float32), np.array([0, 1], np.int32)
        >>> data = ClassificationData(x, y, x, y, ("no", "yes"), ("bias",))
        >>> data.num_categories
        2
    """

    x_train: NDArray[np.float32]  # (N, D), features of the training observations
    y_train: NDArray[np.int32]  # (N,), training classes in [0, K)
    x_test: NDArray[np.float32]  # (N_test, D), features of the held-out observations
    y_test: NDArray[np.int32]  # (N_test,), held-out classes in [0, K)
    class_names: tuple[str, ...]  # (K,), the name of each class
    feature_names: tuple[str, ...]  # (D,), the name of each column of x_train and x_test

    @property
    def num_categories(self) -> int:
        """Number of classes K, whether or not each of them occurs in the test part."""
        return len(self.class_names)
