# SPDX-License-Identifier: Apache-2.0
"""Collections of documents, and readers of file formats that users have. Nothing is downloaded."""

from numpyro_largecat.data.corpus import Corpus
from numpyro_largecat.data.corpus_files import (
    read_lda_c,
    read_uci_bag_of_words,
    read_vocabulary,
)
from numpyro_largecat.data.csr_rows import CsrRows
from numpyro_largecat.data.extreme_classification import read_xml_classification
from numpyro_largecat.data.padded_lists import padded_lists
from numpyro_largecat.data.shards import Shards

__all__ = [
    "Corpus",
    "CsrRows",
    "Shards",
    "padded_lists",
    "read_lda_c",
    "read_uci_bag_of_words",
    "read_vocabulary",
    "read_xml_classification",
]
