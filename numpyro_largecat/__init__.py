# SPDX-License-Identifier: Apache-2.0
"""NumPyro models with huge categoricals, at a cost per step that does not depend on their size."""

from numpyro_largecat import double_sum, mixtures, topics
from numpyro_largecat.choices.augmented_categorical import AugmentedCategorical, error_distribution
from numpyro_largecat.choices.baselines.noise_contrastive import NoiseContrastive
from numpyro_largecat.choices.bounds.bouchard import Bouchard
from numpyro_largecat.choices.bounds.gaussian_error_bound import GaussianErrorBound
from numpyro_largecat.choices.bounds.gaussian_utility_bound import GaussianUtilityBound
from numpyro_largecat.choices.bounds.one_vs_each import OneVsEach
from numpyro_largecat.choices.error_families import ErrorFamily
from numpyro_largecat.choices.error_guides import AutoError, ErrorGuideList
from numpyro_largecat.choices.error_posteriors import AmortizedErrors, LocalErrors
from numpyro_largecat.choices.gaussian_weights import GaussianWeights, gaussian_weights
from numpyro_largecat.choices.sample_choice import sample_choice
from numpyro_largecat.choices.update_rules import (
    EtaEstimate,
    GaussianNaturalGradient,
    NaturalGradient,
)
from numpyro_largecat.choices.utility_categorical import UtilityCategorical
from numpyro_largecat.data.sparse_rows import SparseRows
from numpyro_largecat.double_sum.double_sum_fit import DoubleSumFit
from numpyro_largecat.double_sum.fit_double_sum import fit_double_sum
from numpyro_largecat.mixtures.fit_mixture import fit_mixture
from numpyro_largecat.mixtures.mixture_fit import MixtureFit
from numpyro_largecat.plates import (
    ClassProposal,
    ClassSubset,
    FrequencyProposal,
    HeadProposal,
    RowSubset,
    class_chunk,
    class_plate,
    data_plate,
)
from numpyro_largecat.reading import plots
from numpyro_largecat.reading.findings import Diagnosis
from numpyro_largecat.reading.fitted import Fitted
from numpyro_largecat.reading.metrics import score_predictions
from numpyro_largecat.reading.predictions import TopClasses
from numpyro_largecat.svi.adaptive_steps import adaptive_steps
from numpyro_largecat.svi.array_batches import ArrayBatches
from numpyro_largecat.svi.averaging import average_iterates, averaged_params
from numpyro_largecat.svi.subsampled_svi import SubsampledSVI
from numpyro_largecat.top_l.hide_enumerated import hide_enumerated
from numpyro_largecat.top_l.top_l_categorical import TopLCategorical
from numpyro_largecat.top_l.top_l_elbo import TopL_ELBO
from numpyro_largecat.top_l.top_l_mixture import TopLMixture
from numpyro_largecat.topics.fit_topics import fit_topics
from numpyro_largecat.topics.topic_document import TopicDocument
from numpyro_largecat.topics.topic_fit import TopicFit

__version__ = "0.1.0"

__all__ = [
    "AmortizedErrors",
    "ArrayBatches",
    "AugmentedCategorical",
    "AutoError",
    "Bouchard",
    "ClassProposal",
    "ClassSubset",
    "Diagnosis",
    "DoubleSumFit",
    "ErrorFamily",
    "ErrorGuideList",
    "EtaEstimate",
    "Fitted",
    "FrequencyProposal",
    "GaussianErrorBound",
    "GaussianNaturalGradient",
    "GaussianUtilityBound",
    "GaussianWeights",
    "HeadProposal",
    "LocalErrors",
    "MixtureFit",
    "NaturalGradient",
    "NoiseContrastive",
    "OneVsEach",
    "RowSubset",
    "SparseRows",
    "SubsampledSVI",
    "TopClasses",
    "TopLCategorical",
    "TopLMixture",
    "TopL_ELBO",
    "TopicDocument",
    "TopicFit",
    "UtilityCategorical",
    "adaptive_steps",
    "average_iterates",
    "averaged_params",
    "class_chunk",
    "class_plate",
    "data_plate",
    "double_sum",
    "error_distribution",
    "fit_double_sum",
    "fit_mixture",
    "fit_topics",
    "gaussian_weights",
    "hide_enumerated",
    "mixtures",
    "plots",
    "sample_choice",
    "score_predictions",
    "topics",
]
