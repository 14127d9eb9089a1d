# SPDX-License-Identifier: Apache-2.0
"""Readers of choices, classes and documents. NumPy and SciPy only; nothing is downloaded."""

from numpyro_largecat.data.choice import ChoiceData, read_modecanada, read_swissmetro
from numpyro_largecat.data.classification import ClassificationData
from numpyro_largecat.data.context import context_features, next_token_classification
from numpyro_largecat.data.corpus import Corpus
from numpyro_largecat.data.corpus_files import (
    read_lda_c,
    read_uci_bag_of_words,
    read_vocabulary,
)
from numpyro_largecat.data.load import load
from numpyro_largecat.data.names import NameFiles, load_names, read_names
from numpyro_largecat.data.readers import read_idx, read_tokens, read_xml_classification

__all__ = [
    "ChoiceData",
    "ClassificationData",
    "Corpus",
    "NameFiles",
    "context_features",
    "load",
    "load_names",
    "next_token_classification",
    "read_idx",
    "read_lda_c",
    "read_modecanada",
    "read_names",
    "read_swissmetro",
    "read_tokens",
    "read_uci_bag_of_words",
    "read_vocabulary",
    "read_xml_classification",
]
