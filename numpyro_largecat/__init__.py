# SPDX-License-Identifier: Apache-2.0
"""NumPyro models with huge categoricals, at a cost per step that does not depend on their size."""

from numpyro_largecat.arviz import to_arviz
from numpyro_largecat.distributions import UtilityCategorical
from numpyro_largecat.infer.batches import ArrayBatches
from numpyro_largecat.infer.subsampled_svi import SubsampledSVI
from numpyro_largecat.infer.update_rules import NaturalGradient
from numpyro_largecat.plates import ClassSubset, RowSubset, class_chunk, class_plate, data_plate
from numpyro_largecat.plots import plot_elbo, plot_intervals, plot_reliability
from numpyro_largecat.predict import Prediction, predict_choice
from numpyro_largecat.primitives import sample_choice

__version__ = "0.1.0"

__all__ = [
    "ArrayBatches",
    "ClassSubset",
    "NaturalGradient",
    "Prediction",
    "RowSubset",
    "SubsampledSVI",
    "UtilityCategorical",
    "class_chunk",
    "class_plate",
    "data_plate",
    "plot_elbo",
    "plot_intervals",
    "plot_reliability",
    "predict_choice",
    "sample_choice",
    "to_arviz",
]
