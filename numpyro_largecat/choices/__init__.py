# SPDX-License-Identifier: Apache-2.0
"""Idea 2: a likelihood is a distribution whose log density is a bound that sums over classes.

``bounds`` holds the bounds of the softmax, ``baselines`` the biased estimators that the papers
compare with, ``update_rules`` the ways to move what ``sample_choice`` keeps for each observation.
"""

from numpyro_largecat.choices.choice_distribution import ChoiceDistribution
from numpyro_largecat.choices.error_families import ErrorFamily
from numpyro_largecat.choices.error_guides import AutoError
from numpyro_largecat.choices.gaussian_weights import GaussianWeights

__all__ = ["AutoError", "ChoiceDistribution", "ErrorFamily", "GaussianWeights"]
