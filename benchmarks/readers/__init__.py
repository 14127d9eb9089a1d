# SPDX-License-Identifier: Apache-2.0
"""Readers of the papers' data sets, for the benchmarks and examples. Nothing is downloaded."""

from benchmarks.readers.choice_data import ChoiceData, read_modecanada, read_swissmetro
from benchmarks.readers.classification_data import ClassificationData
from benchmarks.readers.find_file import find_file
from benchmarks.readers.load import load

__all__ = [
    "ChoiceData",
    "ClassificationData",
    "find_file",
    "load",
    "read_modecanada",
    "read_swissmetro",
]
