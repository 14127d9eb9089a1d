# SPDX-License-Identifier: Apache-2.0
"""The two ways to solve for documents, by name."""

from __future__ import annotations

from numpyro_largecat.topics.collapsed import Collapsed
from numpyro_largecat.topics.mean_field import MeanField

INFERENCE: dict[str, type[Collapsed | MeanField]] = {
    "collapsed": Collapsed,
    "mean_field": MeanField,
}
