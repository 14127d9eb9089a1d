# SPDX-License-Identifier: Apache-2.0
"""NumPyro distributions, one per file."""

from numpyro_largecat.distributions.utility_categorical import UtilityCategorical

__all__ = ["UtilityCategorical"]
