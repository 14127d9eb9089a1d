# SPDX-License-Identifier: Apache-2.0
"""The named data sets of the examples and benchmarks, in one form."""

from __future__ import annotations

import logging
from os import PathLike
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from benchmarks.readers.classification_data import ClassificationData
from benchmarks.readers.context_features import next_token_classification
from benchmarks.readers.find_file import find_file
from benchmarks.readers.images import load_mnist, load_mnist100, load_omniglot
from benchmarks.readers.python_names import load_names
from benchmarks.readers.tokens import read_tokens
from numpyro_largecat.data.extreme_classification import read_xml_classification

_logger = logging.getLogger(__name__)

_IMAGES = {"mnist": load_mnist, "mnist100": load_mnist100, "omniglot": load_omniglot}
_NAMES = ("names", "bibtex", "delicious", *_IMAGES, "ptb")


def load(name: str, directory: str | PathLike[str] | None = None) -> ClassificationData:
    r"""Load a data set by name.

    - ``"names"``: see :func:`~benchmarks.readers.python_names.load_names`; the only one that needs
      no files. ``directory`` is its ``root``.
    - ``"bibtex"``, ``"delicious"``: files ``bibtex_train.txt`` and ``bibtex_test.txt``, or
      likewise, in the format of :func:`~numpyro_largecat.data.read_xml_classification`.
      The class of a point is its first label, and the classes are those seen in the training
      part: 148 for Bibtex, 352 for Delicious. Points without a label are dropped (none in
      Bibtex; 10 and 4 in Delicious), and so are test points whose first label is not a class
      (none in Bibtex, 21 in Delicious).
    - ``"mnist"``: the four files such as ``train-images-idx3-ubyte``; pixels are divided by 255.
    - ``"mnist100"``: the same files, with 100 classes. Training and test rows are divided at random
      into ten groups, and each group has its own random permutation of the pixels; class
      ``10 * group + digit`` is a digit of one group.
    - ``"omniglot"``: file ``omniglot_28x28.npz``, with arrays ``images``, unsigned bytes of shape
      (K, 20, 28, 28), ``character_alphabet``, shape (K,), and ``alphabet_names``. Of the 20
      drawings of each of 1,623 characters, 16 are in the training and 4 in the test part, chosen
      at random; pixels are divided by 255, and ink is 1.
    - ``"ptb"``: files ``ptb.train.txt`` and ``ptb.test.txt``. Predict the next of 10,000 words
      from the three before it, across line ends, which are the word ``<eos>``; the features
      are those of ``"names"``. A test word that is not in the training part is dropped.

    Each file but an npz file may also be compressed with gzip and end in ``.gz``. What is random is
    the same in each call and on each machine. The numbers dropped are logged at level INFO.

    Cost: the features are dense, O(N * D) memory: 0.1 GB for ``"omniglot"``, 0.5 GB for ``"ptb"``,
    0.8 GB for ``"names"``.

    Args:
        name: One of the names above.
        directory: The folder that holds the files themselves, needed for all but ``"names"``.

    Returns:
        The data set.

    Raises:
        ValueError: If ``name`` is unknown, if ``directory`` is needed and not given, or if a file
            is malformed.
        FileNotFoundError: If a file is missing.

    Example:
        >>> import pathlib, tempfile
        >>> directory = pathlib.Path(tempfile.mkdtemp())
        >>> _ = (directory / "bibtex_train.txt").write_text("2 2 9\n7,8 0:1\n3 1:1\n")
        >>> _ = (directory / "bibtex_test.txt").write_text("1 2 9\n7 0:1 1:1\n")
        >>> data = load("bibtex", directory)
        >>> data.class_names, data.y_train.tolist(), data.y_test.tolist()
        (('3', '7'), [1, 0], [1])

    References:
        Ruiz, Titsias and Blei, Scalable Large-Scale Classification with Latent Variable
        Augmentation, workshop paper, section 3 (``"mnist100"``).
        Ruiz, Titsias, Dieng and Blei, Augment and Reduce, ICML 2018, Table 1 (Bibtex, MNIST, and
        the sizes of ``"omniglot"``).
    """
    if name not in _NAMES:
        raise ValueError(f"`name` must be one of {', '.join(_NAMES)}; got {name!r}.")
    if name == "names":
        return load_names(directory)
    if directory is None:
        raise ValueError(
            f"`directory` must be the folder that holds the files of {name!r}; got None. "
            "Only load('names') needs no files."
        )
    directory = Path(directory)
    if name in _IMAGES:
        return _IMAGES[name](directory)
    if name == "ptb":
        return next_token_classification(
            [read_tokens(find_file(directory, "ptb.train.txt"))],
            [read_tokens(find_file(directory, "ptb.test.txt"))],
            min_count=1,
            num_features=128,
        )
    return _load_first_label(name, directory)


def _load_first_label(name: str, directory: Path) -> ClassificationData:
    train_path, test_path = (
        find_file(directory, f"{name}_{part}.txt") for part in ("train", "test")
    )
    features_train, labels_train = read_xml_classification(train_path)
    features_test, labels_test = read_xml_classification(test_path)
    if features_train.shape[1] != features_test.shape[1]:
        raise ValueError(
            f"{train_path} and {test_path} must have the same number of features; got "
            f"{features_train.shape[1]} and {features_test.shape[1]}."
        )
    labelled_train, first_train = _first_labels(labels_train)
    labelled_test, first_test = _first_labels(labels_test)
    classes, y_train = np.unique(first_train, return_inverse=True)
    known = np.isin(first_test, classes)
    _logger.info(
        "%s: dropped %d training and %d test points without a label, and %d test points whose "
        "first label is not the first label of a training point",
        name,
        features_train.shape[0] - len(labelled_train),
        features_test.shape[0] - len(labelled_test),
        len(known) - np.count_nonzero(known),
    )
    return ClassificationData(
        features_train[labelled_train].toarray(),
        y_train.astype(np.int32),
        features_test[labelled_test[known]].toarray(),
        np.searchsorted(classes, first_test[known]).astype(np.int32),
        class_names=tuple(str(label) for label in classes),
        feature_names=tuple(f"feature{i}" for i in range(features_train.shape[1])),
    )


def _first_labels(labels: csr_array) -> tuple[NDArray[np.intp], NDArray[np.int32]]:
    """The points that have a label, and the first label of each, in the order of the file."""
    labelled = np.flatnonzero(np.diff(labels.indptr))
    return labelled, labels.indices[labels.indptr[labelled]]
