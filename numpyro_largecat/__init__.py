# SPDX-License-Identifier: Apache-2.0
"""NumPyro models with huge categoricals, at a cost per step that does not depend on their size.

1. A plate says which rows exist this step. ``class_plate`` draws a small, weighted subset of the
   classes for each minibatch. Weights, priors and guides inside it have rows for these alone.
2. A likelihood is a distribution whose ``log_prob`` is a bound that sums over classes. So a
   weighted subset gives an unbiased estimate of it. ``sample_choice`` keeps the bound tight for
   each observation; ``bounds``, ``baselines`` and ``update_rules`` are there for experts.
3. SVI updates only the rows that were touched. ``SubsampledSVI`` stands in for NumPyro's ``SVI``.

Besides these there are sums over the L best values, and learners in closed form: ``mixtures``,
``topics`` and ``double_sum``.
"""

# First of all, and whole: ArviZ leaves a module in its place that loads only when it is looked at,
# and one of whose parts was loaded before it would never have that part as its attribute.
import numpyro as _numpyro  # noqa: F401

from numpyro_largecat import choices, data, double_sum, mixtures, plates, topics
from numpyro_largecat.choices import baselines, bounds, update_rules
from numpyro_largecat.choices.augmented_categorical import AugmentedCategorical, error_distribution
from numpyro_largecat.choices.error_guides import ErrorGuideList
from numpyro_largecat.choices.error_posteriors import AmortizedErrors, LocalErrors
from numpyro_largecat.choices.gaussian_weights import gaussian_weights
from numpyro_largecat.choices.sample_choice import sample_choice
from numpyro_largecat.choices.utility_categorical import UtilityCategorical
from numpyro_largecat.data.checkpoints import Checkpoints
from numpyro_largecat.data.sparse_rows import SparseRows
from numpyro_largecat.double_sum.double_sum_fit import DoubleSumFit
from numpyro_largecat.double_sum.fit_double_sum import fit_double_sum
from numpyro_largecat.guides.auto_row_normal import AutoRowNormal
from numpyro_largecat.guides.not_centred import not_centred
from numpyro_largecat.mixtures.fit_mixture import fit_mixture
from numpyro_largecat.mixtures.mixture_fit import MixtureFit
from numpyro_largecat.plates.class_plate import class_plate
from numpyro_largecat.plates.data_plate import data_plate
from numpyro_largecat.plates.entity_counts import EntityCounts
from numpyro_largecat.plates.entity_plate import entity_plate
from numpyro_largecat.plates.frequency_proposal import FrequencyProposal
from numpyro_largecat.plates.head_proposal import HeadProposal
from numpyro_largecat.reading import plots
from numpyro_largecat.reading.calibration import Calibration, simulation_based_calibration
from numpyro_largecat.reading.findings import Diagnosis
from numpyro_largecat.reading.fitted import Fitted
from numpyro_largecat.reading.metrics import score_predictions
from numpyro_largecat.reading.predictions import TopClasses
from numpyro_largecat.reading.save_netcdf import save_netcdf
from numpyro_largecat.reading.weighted_posterior import WeightedDraws, weighted_posterior
from numpyro_largecat.svi.adaptive_steps import adaptive_steps
from numpyro_largecat.svi.array_batches import ArrayBatches
from numpyro_largecat.svi.averaging import average_iterates, averaged_params
from numpyro_largecat.svi.callbacks import Callback, JsonLines, Progress
from numpyro_largecat.svi.held_out import HeldOut
from numpyro_largecat.svi.importance_weighted_elbo import ImportanceWeighted_ELBO
from numpyro_largecat.svi.streamed_batches import StreamedBatches
from numpyro_largecat.svi.subsampled_svi import SubsampledSVI
from numpyro_largecat.top_l.hide_enumerated import hide_enumerated
from numpyro_largecat.top_l.top_l_categorical import TopLCategorical
from numpyro_largecat.top_l.top_l_elbo import TopL_ELBO
from numpyro_largecat.top_l.top_l_mixture import TopLMixture
from numpyro_largecat.topics.fit_topics import fit_topics
from numpyro_largecat.topics.topic_document import TopicDocument
from numpyro_largecat.topics.topic_fit import TopicFit

__version__ = "0.1.0"

__all__ = [  # noqa: RUF022  grouped by idea
    # 1. which rows exist this step
    "class_plate",
    "data_plate",
    "entity_plate",
    "EntityCounts",
    "FrequencyProposal",
    "HeadProposal",
    "plates",
    # 2. likelihoods that sum over classes
    "sample_choice",
    "UtilityCategorical",
    "AugmentedCategorical",
    "error_distribution",
    "gaussian_weights",
    "SparseRows",
    "ErrorGuideList",
    "LocalErrors",
    "AmortizedErrors",
    "choices",
    "bounds",
    "baselines",
    "update_rules",
    # 3. only touched rows move
    "SubsampledSVI",
    "AutoRowNormal",
    "not_centred",
    "ImportanceWeighted_ELBO",
    "ArrayBatches",
    "StreamedBatches",
    "Checkpoints",
    "HeldOut",
    "Callback",
    "Progress",
    "JsonLines",
    "adaptive_steps",
    "average_iterates",
    "averaged_params",
    # what a fit says
    "Fitted",
    "weighted_posterior",
    "WeightedDraws",
    "TopClasses",
    "Diagnosis",
    "simulation_based_calibration",
    "Calibration",
    "score_predictions",
    "save_netcdf",
    "plots",
    # sums over the L best values
    "TopLCategorical",
    "TopLMixture",
    "TopL_ELBO",
    "hide_enumerated",
    # learners in closed form
    "fit_mixture",
    "MixtureFit",
    "mixtures",
    "fit_topics",
    "TopicFit",
    "TopicDocument",
    "topics",
    "fit_double_sum",
    "DoubleSumFit",
    "double_sum",
    # documents, and file formats that users have
    "data",
]
