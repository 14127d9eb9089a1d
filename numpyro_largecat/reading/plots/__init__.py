# SPDX-License-Identifier: Apache-2.0
"""Pictures of a fit; each function draws on matplotlib axes and returns them."""

from numpyro_largecat.reading.plots.class_map import class_map
from numpyro_largecat.reading.plots.elbo import elbo
from numpyro_largecat.reading.plots.intervals import coverage, intervals
from numpyro_largecat.reading.plots.predictions import accuracy_by_frequency, confusion, reliability
from numpyro_largecat.reading.plots.responsibilities import responsibilities
from numpyro_largecat.reading.plots.topics import topics

__all__ = [
    "accuracy_by_frequency",
    "class_map",
    "confusion",
    "coverage",
    "elbo",
    "intervals",
    "reliability",
    "responsibilities",
    "topics",
]
