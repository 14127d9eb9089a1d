# SPDX-License-Identifier: Apache-2.0
"""The text format of the Extreme Classification Repository."""

from __future__ import annotations

from array import array
from collections import Counter
from os import PathLike

import numpy as np
from scipy.sparse import csr_array

from numpyro_largecat._conversions import LARGEST_ID
from numpyro_largecat.data.files import malformed, open_binary, without_underscores

LINE = "`l1,l2 idx:value idx:value ...`, or a space first for a point without labels"
_LARGEST = float(np.finfo(np.float32).max)


def read_xml_classification(path: str | PathLike[str]) -> tuple[csr_array, csr_array]:
    r"""Read a data file of the Extreme Classification Repository.

    The first line is ``points features labels``. Each further line is one point,
    ``l1,l2 idx:value idx:value ...``, with 0-based labels and feature indices; the line of a
    point without labels starts with a space.

    Shapes: features (points, features), labels (points, labels).

    Cost: O(entries) time and memory; about a second per million feature entries.

    Args:
        path: The file, plain or compressed with gzip.

    Returns:
        The features as float32, and the labels as 0 and 1 in int8. Both keep the order of the
        file within a row, so the first label of a point ``i`` that has one is
        ``labels.indices[labels.indptr[i]]``.

    Raises:
        ValueError: If the file does not follow the format. The message has the file name and
            the line number.

    Example:
        >>> import pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "train.txt"
        >>> _ = path.write_text("2 4 3\n2,0 0:1.5 3:1\n 1:2\n")
        >>> features, labels = read_xml_classification(path)
        >>> features.toarray().tolist()
        [[1.5, 0.0, 0.0, 1.0], [0.0, 2.0, 0.0, 0.0]]
        >>> labels.toarray().tolist()
        [[1, 0, 1], [0, 0, 0]]

    References:
        Bhatia et al., The extreme classification repository: multi-label datasets and code, 2016.
    """
    ids, values, ends = array("q"), array("f"), array("q", [0])
    label_ids, label_ends = array("q"), array("q", [0])
    with open_binary(path) as file:
        num_points, num_features, num_labels = _xml_header(path, file.readline())
        line_number = 1
        for line_number, line in enumerate(file, start=2):
            if line_number - 1 > num_points:
                if line.strip():
                    need = f"no line after the {num_points} points of the header"
                    raise malformed(path, line_number, need)
                continue
            try:
                point_labels, point_ids, point_values = _point(line)
            except ValueError as error:
                raise malformed(path, line_number, LINE, line) from error
            _check_ids(path, line_number, "labels", point_labels, num_labels)
            _check_ids(path, line_number, "feature indices", point_ids, num_features)
            bad = next((v for v in point_values if not abs(v) <= _LARGEST), None)
            if bad is not None:
                raise malformed(path, line_number, f"values that are finite in float32; got {bad}")
            values.extend(point_values)
            label_ids.extend(point_labels)
            label_ends.append(len(label_ids))
            ids.extend(point_ids)
            ends.append(len(ids))
    if len(ends) - 1 < num_points:
        need = f"{num_points} points, as the header says, but it ends after {len(ends) - 1}"
        raise malformed(path, line_number, need)
    features = csr_array(
        (np.asarray(values, np.float32), np.asarray(ids), np.asarray(ends)),
        shape=(num_points, num_features),
    )
    labels = csr_array(
        (np.ones(len(label_ids), np.int8), np.asarray(label_ids), np.asarray(label_ends)),
        shape=(num_points, num_labels),
    )
    return features, labels


def _point(line: bytes) -> tuple[list[int], list[int], list[float]]:
    """Labels, features and their values."""
    label_part, _, feature_part = without_underscores(line).rstrip().partition(b" ")
    labels = [int(label) for label in label_part.split(b",")] if label_part else []
    pairs = [pair.split(b":") for pair in feature_part.split()]
    return labels, [int(index) for index, _ in pairs], [float(value) for _, value in pairs]


def _xml_header(path: str | PathLike[str], line: bytes) -> tuple[int, int, int]:
    need = f"the header `points features labels`, three whole numbers in [0, {LARGEST_ID}]"
    try:
        num_points, num_features, num_labels = (
            int(word) for word in without_underscores(line).split()
        )
    except ValueError as error:
        raise malformed(path, 1, need, line) from error
    sizes = (num_points, num_features, num_labels)
    if not all(0 <= size <= LARGEST_ID for size in sizes):
        raise malformed(path, 1, need, line)
    return sizes


def _check_ids(
    path: str | PathLike[str], line_number: int, what: str, ids: list[int], size: int
) -> None:
    if ids and not 0 <= min(ids) <= max(ids) < size:
        need = f"{what} in [0, {size}), as the header says; got {min(ids)} to {max(ids)}"
        raise malformed(path, line_number, need)
    if len(set(ids)) < len(ids):
        repeated = next(i for i, count in Counter(ids).items() if count > 1)
        raise malformed(path, line_number, f"different {what}; got {repeated} more than once")
