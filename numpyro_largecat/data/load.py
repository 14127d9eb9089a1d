# SPDX-License-Identifier: Apache-2.0
"""The named data sets of the examples and benchmarks, in one form."""

from __future__ import annotations

import logging
from os import PathLike
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from numpyro_largecat.data.classification import ClassificationData
from numpyro_largecat.data.context import next_token_classification
from numpyro_largecat.data.names import load_names
from numpyro_largecat.data.readers import read_idx, read_tokens, read_xml_classification

_logger = logging.getLogger(__name__)

_NAMES = ("names", "bibtex", "delicious", "mnist", "ptb")


def load(name: str, directory: str | PathLike[str] | None = None) -> ClassificationData:
    r"""Load a data set by name.

    - ``"names"``: see :func:`~numpyro_largecat.data.names.load_names`; the only one that needs
      no files. ``directory`` is its ``root``.
    - ``"bibtex"``, ``"delicious"``: files ``bibtex_train.txt`` and ``bibtex_test.txt``, or
      likewise, in the format of :func:`~numpyro_largecat.data.readers.read_xml_classification`.
      The class of a point is its first label, and the classes are those seen in the training
      part: 148 for Bibtex, 352 for Delicious. Points without a label are dropped (none in
      Bibtex; 10 and 4 in Delicious), and so are test points whose first label is not a class
      (none in Bibtex, 21 in Delicious).
    - ``"mnist"``: the four files such as ``train-images-idx3-ubyte``; pixels are divided by 255.
    - ``"ptb"``: files ``ptb.train.txt`` and ``ptb.test.txt``. Predict the next of 10,000 words
      from the three before it, across line ends, which are the word ``<eos>``; the features
      are those of ``"names"``. A test word that is not in the training part is dropped.

    Each file may also be compressed with gzip and end in ``.gz``. The numbers dropped are
    logged at level INFO.

    Cost: the features are dense, O(N * D) memory: 0.5 GB for ``"ptb"``, 0.8 GB for ``"names"``.

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
    if name == "mnist":
        return _load_mnist(directory)
    if name == "ptb":
        return next_token_classification(
            [read_tokens(_find(directory, "ptb.train.txt"))],
            [read_tokens(_find(directory, "ptb.test.txt"))],
            min_count=1,
            num_features=128,
        )
    return _load_first_label(name, directory)


def _find(directory: Path, file_name: str) -> Path:
    """The path of a file or of its compressed form, in a directory or a folder inside it."""
    for name in (file_name, f"{file_name}.gz"):
        for path in (directory / name, *sorted(directory.glob(f"*/{name}"))):
            if path.is_file():
                return path
    raise FileNotFoundError(
        f"Found neither {directory / file_name} nor the same with .gz at the end, nor either in a "
        "folder of that directory. Pass the folder that holds the file as `directory`, as in "
        "load(name, directory)."
    )


def _load_mnist(directory: Path) -> ClassificationData:
    x_train, y_train = _read_mnist_part(directory, "train")
    x_test, y_test = _read_mnist_part(directory, "t10k")
    return ClassificationData(
        x_train,
        y_train,
        x_test,
        y_test,
        class_names=tuple(str(digit) for digit in range(10)),
        feature_names=tuple(f"pixel{row}_{column}" for row in range(28) for column in range(28)),
    )


def _read_mnist_part(directory: Path, part: str) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    image_path = _find(directory, f"{part}-images-idx3-ubyte")
    label_path = _find(directory, f"{part}-labels-idx1-ubyte")
    images, labels = read_idx(image_path), read_idx(label_path)
    if images.shape != (len(labels), 28, 28) or labels.ndim != 1 or np.any(labels > 9):
        raise ValueError(
            f"{image_path} and {label_path} must hold N images of 28 x 28 pixels and N labels from "
            f"0 to 9; got shapes {images.shape} and {labels.shape}, and labels up to "
            f"{labels.max(initial=0)}."
        )
    pixels = images.reshape(-1, 28 * 28).astype(np.float32)
    pixels /= 255
    return pixels, labels.astype(np.int32)


def _load_first_label(name: str, directory: Path) -> ClassificationData:
    train_path, test_path = (_find(directory, f"{name}_{part}.txt") for part in ("train", "test"))
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
