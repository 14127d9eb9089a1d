# SPDX-License-Identifier: Apache-2.0
"""NumPyro distributions, one per file."""

from numpyro_largecat.distributions.augmented import AugmentedCategorical, error_distribution
from numpyro_largecat.distributions.bouchard import Bouchard
from numpyro_largecat.distributions.errors import ErrorFamily
from numpyro_largecat.distributions.gaussian_error_bound import GaussianErrorBound
from numpyro_largecat.distributions.gaussian_utility_bound import GaussianUtilityBound
from numpyro_largecat.distributions.noise_contrastive import NoiseContrastive
from numpyro_largecat.distributions.one_vs_each import OneVsEach
from numpyro_largecat.distributions.top_l_categorical import TopLCategorical
from numpyro_largecat.distributions.top_l_mixture import TopLMixture
from numpyro_largecat.distributions.topic_document import DocumentPosterior, TopicDocument
from numpyro_largecat.distributions.utility_categorical import UtilityCategorical

__all__ = [
    "AugmentedCategorical",
    "Bouchard",
    "DocumentPosterior",
    "ErrorFamily",
    "GaussianErrorBound",
    "GaussianUtilityBound",
    "NoiseContrastive",
    "OneVsEach",
    "TopLCategorical",
    "TopLMixture",
    "TopicDocument",
    "UtilityCategorical",
    "error_distribution",
]
