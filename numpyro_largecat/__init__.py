# SPDX-License-Identifier: Apache-2.0
"""NumPyro models with huge categoricals, at a cost per step that does not depend on their size."""

from numpyro_largecat.arviz import to_arviz
from numpyro_largecat.diagnosis import Diagnosis, Finding, diagnose
from numpyro_largecat.distributions import (
    AugmentedCategorical,
    Bouchard,
    DocumentPosterior,
    ErrorFamily,
    GaussianErrorBound,
    GaussianUtilityBound,
    NoiseContrastive,
    OneVsEach,
    TopicDocument,
    TopLCategorical,
    TopLMixture,
    UtilityCategorical,
    error_distribution,
)
from numpyro_largecat.double_sum import DoubleSumFit, fit_double_sum
from numpyro_largecat.double_sum_rules import ImplicitSGD, UMax, Vanilla
from numpyro_largecat.guides import AmortizedErrors, AutoError, ErrorGuideList, LocalErrors
from numpyro_largecat.infer.adaptive_steps import adaptive_steps
from numpyro_largecat.infer.averaging import average_iterates, averaged_params
from numpyro_largecat.infer.batches import ArrayBatches
from numpyro_largecat.infer.hide_enumerated import hide_enumerated
from numpyro_largecat.infer.subsampled_svi import SubsampledSVI
from numpyro_largecat.infer.top_l_elbo import TopL_ELBO
from numpyro_largecat.infer.update_rules import (
    EtaEstimate,
    GaussianNaturalGradient,
    NaturalGradient,
)
from numpyro_largecat.metrics import score_predictions
from numpyro_largecat.mixtures import (
    ConjugateFamily,
    DiagonalGaussianFamily,
    DirichletMixing,
    GaussianFamily,
    MixingPrior,
    MixtureFit,
    MultinomialFamily,
    StickBreaking,
    ZeroMeanGaussianFamily,
    fit_mixture,
)
from numpyro_largecat.plates import class_chunk, class_plate, data_plate
from numpyro_largecat.plots import (
    plot_accuracy_by_frequency,
    plot_confusion,
    plot_elbo,
    plot_intervals,
    plot_reliability,
)
from numpyro_largecat.predict import TopClasses, draw_choices, log_likelihood, top_classes
from numpyro_largecat.primitives import sample_choice
from numpyro_largecat.proposals import ClassProposal, FrequencyProposal, HeadProposal
from numpyro_largecat.sparse_rows import SparseRows
from numpyro_largecat.subsets import ClassSubset, RowSubset
from numpyro_largecat.topics import TopicFit, TopWord, fit_topics
from numpyro_largecat.weights import GaussianWeights, gaussian_weights

__version__ = "0.1.0"

__all__ = [
    "AmortizedErrors",
    "ArrayBatches",
    "AugmentedCategorical",
    "AutoError",
    "Bouchard",
    "ClassProposal",
    "ClassSubset",
    "ConjugateFamily",
    "Diagnosis",
    "DiagonalGaussianFamily",
    "DirichletMixing",
    "DocumentPosterior",
    "DoubleSumFit",
    "ErrorFamily",
    "ErrorGuideList",
    "EtaEstimate",
    "Finding",
    "FrequencyProposal",
    "GaussianErrorBound",
    "GaussianFamily",
    "GaussianNaturalGradient",
    "GaussianUtilityBound",
    "GaussianWeights",
    "HeadProposal",
    "ImplicitSGD",
    "LocalErrors",
    "MixingPrior",
    "MixtureFit",
    "MultinomialFamily",
    "NaturalGradient",
    "NoiseContrastive",
    "OneVsEach",
    "RowSubset",
    "SparseRows",
    "StickBreaking",
    "SubsampledSVI",
    "TopClasses",
    "TopLCategorical",
    "TopLMixture",
    "TopL_ELBO",
    "TopWord",
    "TopicDocument",
    "TopicFit",
    "UMax",
    "UtilityCategorical",
    "Vanilla",
    "ZeroMeanGaussianFamily",
    "adaptive_steps",
    "average_iterates",
    "averaged_params",
    "class_chunk",
    "class_plate",
    "data_plate",
    "diagnose",
    "draw_choices",
    "error_distribution",
    "fit_double_sum",
    "fit_mixture",
    "fit_topics",
    "gaussian_weights",
    "hide_enumerated",
    "log_likelihood",
    "plot_accuracy_by_frequency",
    "plot_confusion",
    "plot_elbo",
    "plot_intervals",
    "plot_reliability",
    "sample_choice",
    "score_predictions",
    "to_arviz",
    "top_classes",
]
