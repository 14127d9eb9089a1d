# SPDX-License-Identifier: Apache-2.0
"""Data sets of small pictures: MNIST, MNIST with 100 classes, and Omniglot."""

from __future__ import annotations

import zipfile
import zlib
from collections import Counter
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.readers.classification_data import ClassificationData
from benchmarks.readers.find_file import find_file
from benchmarks.readers.idx import read_idx
from numpyro_largecat._checks import describe

_NUM_GROUPS = 10
_NUM_DRAWINGS = 20
_NUM_TRAIN_DRAWINGS = 16
_PIXEL_NAMES = tuple(f"pixel{row}_{column}" for row in range(28) for column in range(28))


def load_mnist(directory: Path) -> ClassificationData:
    """MNIST, with pixels divided by 255."""
    x_train, y_train = _read_mnist_part(directory, "train")
    x_test, y_test = _read_mnist_part(directory, "t10k")
    names = tuple(str(digit) for digit in range(10))
    return ClassificationData(x_train, y_train, x_test, y_test, names, _PIXEL_NAMES)


def load_mnist100(directory: Path) -> ClassificationData:
    """MNIST in ten groups, each with its own permutation of the pixels, which makes 100 classes.

    Training and test rows are divided at random into groups of a tenth each, and keep their order.
    Class ``10 * group + digit`` is a digit of one group. The permutation of a group is the same for
    training and test rows. Groups and permutations are always the same.

    References:
        Ruiz, Titsias and Blei, Scalable Large-Scale Classification with Latent Variable
        Augmentation, workshop paper, section 3.
    """
    data = load_mnist(directory)
    random = _fixed_random()
    permutations = [random.permutation(28 * 28) for _ in range(_NUM_GROUPS)]
    group_train, group_test = (
        random.permutation(len(y)).astype(np.int32) % _NUM_GROUPS
        for y in (data.y_train, data.y_test)
    )
    for x, group in ((data.x_train, group_train), (data.x_test, group_test)):
        for g, permutation in enumerate(permutations):
            x[group == g] = x[group == g][:, permutation]
    return data._replace(
        y_train=10 * group_train + data.y_train,
        y_test=10 * group_test + data.y_test,
        class_names=tuple(f"group{g}_digit{y}" for g in range(_NUM_GROUPS) for y in range(10)),
        feature_names=tuple(f"feature{i}" for i in range(28 * 28)),
    )


def load_omniglot(directory: Path) -> ClassificationData:
    """Omniglot: 20 drawings of each character, of which 16 chosen at random are trained on.

    The choice is always the same. The rows of a part are in the order of the classes.
    """
    images, names = _read_omniglot(find_file(directory, "omniglot_28x28.npz"))
    random = _fixed_random()
    order = np.array([random.permutation(_NUM_DRAWINGS) for _ in names])
    train, test = (np.sort(part) for part in np.split(order, [_NUM_TRAIN_DRAWINGS], axis=1))
    classes = np.arange(len(names), dtype=np.int32)
    return ClassificationData(
        _scaled_pixels(images[classes[:, None], train]),
        np.repeat(classes, train.shape[1]),
        _scaled_pixels(images[classes[:, None], test]),
        np.repeat(classes, test.shape[1]),
        names,
        _PIXEL_NAMES,
    )


def _read_mnist_part(directory: Path, part: str) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    image_path = find_file(directory, f"{part}-images-idx3-ubyte")
    label_path = find_file(directory, f"{part}-labels-idx1-ubyte")
    images, labels = read_idx(image_path), read_idx(label_path)
    if images.shape != (len(labels), 28, 28) or labels.ndim != 1 or np.any(labels > 9):
        raise ValueError(
            f"{image_path} and {label_path} must hold N images of 28 x 28 pixels and N labels from "
            f"0 to 9; got shapes {images.shape} and {labels.shape}, and labels up to "
            f"{labels.max(initial=0)}."
        )
    return _scaled_pixels(images), labels.astype(np.int32)


def _read_omniglot(path: Path) -> tuple[NDArray[np.uint8], tuple[str, ...]]:
    """Read the images, shape (K, 20, 28, 28), and a name for each class."""
    arrays = "images", "character_alphabet", "alphabet_names"
    try:
        with path.open("rb") as content, np.load(content, allow_pickle=False) as file:
            images, alphabets, alphabet_names = (file[name] for name in arrays)
    except (EOFError, KeyError, TypeError, ValueError, zipfile.BadZipFile, zlib.error):
        # What NumPy says, that the file may need pickles, is no help.
        need = f"must be a complete npz file with arrays {', '.join(arrays)}"
        raise ValueError(f"{path} {need}. It may be cut short.") from None
    shape = (alphabets.size, _NUM_DRAWINGS, 28, 28)
    known = alphabets.dtype.kind in "iu" and np.isin(alphabets, np.arange(alphabet_names.size))
    if not (
        images.dtype == np.uint8
        and images.shape == shape
        and alphabets.ndim == alphabet_names.ndim == 1
        and alphabet_names.dtype.kind == "U"
        and np.all(known)
    ):
        raise ValueError(
            f"{path} must hold `images`, unsigned bytes of shape (K, {_NUM_DRAWINGS}, 28, 28), and "
            f"`character_alphabet` of shape (K,), integers below {alphabet_names.size}, the number "
            f"of `alphabet_names`; got {describe(images)}, {describe(alphabets)} and "
            f"{describe(alphabet_names)}."
        )
    seen: Counter[str] = Counter()
    names = []
    for alphabet in alphabet_names[alphabets].tolist():
        seen[alphabet] += 1
        names.append(f"{alphabet}/{seen[alphabet]:02d}")
    return images, tuple(names)


def _scaled_pixels(images: NDArray[np.uint8]) -> NDArray[np.float32]:
    pixels = images.reshape(-1, 28 * 28).astype(np.float32)
    pixels /= 255
    return pixels


def _fixed_random() -> np.random.RandomState:
    """A stream that NumPy has frozen; that of ``default_rng`` may change with its version."""
    return np.random.RandomState(0)
