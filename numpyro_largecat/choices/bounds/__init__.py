# SPDX-License-Identifier: Apache-2.0
"""Bounds of the log probability of a choice, to compare with or to build models of."""

from numpyro_largecat.choices.bounds.bouchard import Bouchard
from numpyro_largecat.choices.bounds.gaussian_error_bound import GaussianErrorBound
from numpyro_largecat.choices.bounds.gaussian_utility_bound import GaussianUtilityBound
from numpyro_largecat.choices.bounds.one_vs_each import OneVsEach

__all__ = ["Bouchard", "GaussianErrorBound", "GaussianUtilityBound", "OneVsEach"]
