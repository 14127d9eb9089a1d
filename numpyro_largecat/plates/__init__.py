# SPDX-License-Identifier: Apache-2.0
"""Idea 1: a plate says which rows exist this step."""

from numpyro_largecat.plates.class_plate import class_chunk
from numpyro_largecat.plates.class_subset import ClassSubset, RowSubset
from numpyro_largecat.plates.proposals import ClassProposal

__all__ = ["ClassProposal", "ClassSubset", "RowSubset", "class_chunk"]
