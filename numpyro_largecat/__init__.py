# SPDX-License-Identifier: Apache-2.0
"""NumPyro models with huge categoricals, at a cost per step that does not depend on their size."""

from numpyro_largecat.arviz import to_arviz
from numpyro_largecat.distributions import (
    AugmentedCategorical,
    Bouchard,
    ErrorFamily,
    GaussianErrorBound,
    GaussianUtilityBound,
    NoiseContrastive,
    OneVsEach,
    TopLCategorical,
    TopLMixture,
    UtilityCategorical,
    error_distribution,
)
from numpyro_largecat.double_sum import DoubleSumFit, fit_double_sum
from numpyro_largecat.double_sum_rules import ImplicitSGD, UMax, Vanilla
from numpyro_largecat.guides import AmortizedErrors, AutoError, ErrorGuideList, LocalErrors
from numpyro_largecat.infer.batches import ArrayBatches
from numpyro_largecat.infer.hide_enumerated import hide_enumerated
from numpyro_largecat.infer.subsampled_svi import SubsampledSVI
from numpyro_largecat.infer.top_l_elbo import TopL_ELBO
from numpyro_largecat.infer.update_rules import GaussianNaturalGradient, NaturalGradient
from numpyro_largecat.plates import class_chunk, class_plate, data_plate
from numpyro_largecat.plots import plot_elbo, plot_intervals, plot_reliability
from numpyro_largecat.predict import Prediction, predict_choice
from numpyro_largecat.primitives import sample_choice
from numpyro_largecat.proposals import ClassProposal, FrequencyProposal, HeadProposal
from numpyro_largecat.sparse_rows import SparseRows
from numpyro_largecat.subsets import ClassSubset, RowSubset
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
    "DoubleSumFit",
    "ErrorFamily",
    "ErrorGuideList",
    "FrequencyProposal",
    "GaussianErrorBound",
    "GaussianNaturalGradient",
    "GaussianUtilityBound",
    "GaussianWeights",
    "HeadProposal",
    "ImplicitSGD",
    "LocalErrors",
    "NaturalGradient",
    "NoiseContrastive",
    "OneVsEach",
    "Prediction",
    "RowSubset",
    "SparseRows",
    "SubsampledSVI",
    "TopLCategorical",
    "TopLMixture",
    "TopL_ELBO",
    "UMax",
    "UtilityCategorical",
    "Vanilla",
    "class_chunk",
    "class_plate",
    "data_plate",
    "error_distribution",
    "fit_double_sum",
    "gaussian_weights",
    "hide_enumerated",
    "plot_elbo",
    "plot_intervals",
    "plot_reliability",
    "predict_choice",
    "sample_choice",
    "to_arviz",
]
