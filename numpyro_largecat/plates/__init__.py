# SPDX-License-Identifier: Apache-2.0
"""Which rows exist this step: plates over the classes and over the data."""

from numpyro_largecat.plates.class_chunk import class_chunk
from numpyro_largecat.plates.class_plate import class_plate
from numpyro_largecat.plates.class_proposal import ClassProposal
from numpyro_largecat.plates.class_subset import ClassSubset
from numpyro_largecat.plates.data_plate import data_plate
from numpyro_largecat.plates.entity_counts import EntityCounts
from numpyro_largecat.plates.entity_plate import entity_plate
from numpyro_largecat.plates.entity_subset import EntitySubset
from numpyro_largecat.plates.frequency_proposal import FrequencyProposal
from numpyro_largecat.plates.head_proposal import HeadProposal
from numpyro_largecat.plates.row_subset import RowSubset

__all__ = [
    "ClassProposal",
    "ClassSubset",
    "EntityCounts",
    "EntitySubset",
    "FrequencyProposal",
    "HeadProposal",
    "RowSubset",
    "class_chunk",
    "class_plate",
    "data_plate",
    "entity_plate",
]
