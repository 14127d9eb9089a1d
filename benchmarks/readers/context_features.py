# SPDX-License-Identifier: Apache-2.0
"""Predicting the next token of a sequence: classes, contexts and dense context features."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array
from scipy.sparse.linalg import svds

from benchmarks.readers.classification_data import ClassificationData

_logger = logging.getLogger(__name__)

_CONTEXT_LENGTH = 3


def context_features(
    contexts_train: NDArray[np.integer],
    labels_train: NDArray[np.integer],
    contexts_test: NDArray[np.integer],
    *,
    num_tokens: int,
    num_categories: int,
    num_features: int = 128,
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    r"""Dense features of the previous tokens, for a linear softmax over the next one.

    Each context position has its own block of columns. With ``n[v, k]`` the number of training
    observations of class k that have token v at that position, token v is described by the
    largest left singular vectors, times their singular values, of

    .. math:: M_{vk} = \sqrt{n_{vk}} \, / \, \bigl(\sum_u n_{uk}\bigr)^{1/4},

    scaled to length one per token, so that a rare and a frequent token with the same successors
    get the same features. The square root keeps the large counts from taking all the columns
    and the division does the same for the frequent classes. The columns are then shifted and
    scaled to mean zero and variance one over the training observations.

    Each position p = 1 .. C, the nearest first, gets two columns and a share of the others
    proportional to C + 1 - p: 63, 43 and 22 of 128 columns for C = 3. The labels of the test
    part are not used. A token that has not been seen at a position in training gets the zero
    vector before the shift, and a column that is constant in training becomes zero.

    The result is the same on each run, up to the rounding of the linear algebra library.

    Shapes: the results are (N, num_features) and (N_test, num_features).

    Cost: C truncated singular value decompositions of sparse matrices with at most N entries,
    and O(N * num_features) memory for the result.

    Args:
        contexts_train: Token ids in [0, num_tokens), the nearest first, shape (N, C).
        labels_train: Classes in [0, num_categories), shape (N,).
        contexts_test: Token ids in [0, num_tokens), shape (N_test, C).
        num_tokens: Number of different tokens in contexts.
        num_categories: Number of classes K.
        num_features: Number of features D, at least 2 C.

    Returns:
        The features of the training and of the test observations, float32.

    Raises:
        ValueError: If the shapes do not fit together, if ``num_features`` is less than 2 C, or if
            the training data have too few different tokens or classes for that many features.

    Example:
        >>> contexts = np.array([[0], [1], [2], [0], [1], [2]])
        >>> labels = np.array([0, 1, 2, 0, 1, 1])
        >>> x_train, x_test = context_features(
        ...     contexts, labels, contexts[:1], num_tokens=3, num_categories=3, num_features=2)
        >>> x_train.shape, x_test.shape
        ((6, 2), (1, 2))
        >>> bool(np.all(x_train[0] == x_test[0]))
        True
    """
    if (
        contexts_train.ndim != 2
        or contexts_test.ndim != 2
        or contexts_test.shape[1] != contexts_train.shape[1]
        or labels_train.shape != contexts_train.shape[:1]
    ):
        raise ValueError(
            "`contexts_train`, `labels_train` and `contexts_test` must have shapes (N, C), (N,) "
            f"and (N_test, C); got {contexts_train.shape}, {labels_train.shape} and "
            f"{contexts_test.shape}."
        )
    length = contexts_train.shape[1]
    if num_features < 2 * length:
        raise ValueError(
            f"`num_features` must be at least {2 * length}, two for each context position; "
            f"got {num_features}."
        )
    ends = _block_ends(length, num_features)
    x_train = np.empty((len(contexts_train), num_features), np.float32)
    x_test = np.empty((len(contexts_test), num_features), np.float32)
    for p, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        tokens = contexts_train[:, p]
        counts = csr_array(
            (np.ones(len(tokens)), (tokens, labels_train)), shape=(num_tokens, num_categories)
        )
        table = _embed_tokens(counts, end - start)
        x_train[:, start:end] = table[tokens]
        x_test[:, start:end] = table[contexts_test[:, p]]
    return x_train, x_test


def next_token_classification(
    train: Sequence[Sequence[str]],
    test: Sequence[Sequence[str]],
    *,
    min_count: int,
    num_features: int,
) -> ClassificationData:
    """Turn token sequences into the task of predicting a token from the three before it.

    The classes are the tokens seen at least ``min_count`` times in ``train``, sorted. Places
    where the next token is not a class are dropped; their numbers are logged at level INFO.
    In contexts, all tokens that are not classes share one "rare" id, and the places before
    the start of a sequence have the "start" id. Features: :func:`context_features`.

    Args:
        train: Token sequences to learn classes and features from.
        test: Held-out token sequences.
        min_count: Number of occurrences in ``train`` that makes a token a class, at least 1.
        num_features: Number of features D.

    Returns:
        The data set; the observations are in the order of the sequences.

    Raises:
        ValueError: If there are too few classes for ``num_features``.

    Example:
        >>> train, test = [list("abcabdacbd") * 3], [list("abxa")]
        >>> data = next_token_classification(train, test, min_count=2, num_features=6)
        >>> data.class_names, data.y_test.tolist()
        (('a', 'b', 'c', 'd'), [0, 1, 0])
    """
    counts = Counter(token for sequence in train for token in sequence)
    class_names = sorted(token for token, count in counts.items() if count >= min_count)
    ids = {token: i for i, token in enumerate(class_names)}
    contexts_train, y_train = _observations(train, ids, "training")
    contexts_test, y_test = _observations(test, ids, "test")
    x_train, x_test = context_features(
        contexts_train,
        y_train,
        contexts_test,
        num_tokens=len(class_names) + 2,
        num_categories=len(class_names),
        num_features=num_features,
    )
    ends = _block_ends(_CONTEXT_LENGTH, num_features)
    feature_names = tuple(
        f"previous{p}_{j}"
        for p, (start, end) in enumerate(zip([0, *ends], ends, strict=False), start=1)
        for j in range(end - start)
    )
    return ClassificationData(x_train, y_train, x_test, y_test, tuple(class_names), feature_names)


def _block_ends(length: int, num_features: int) -> list[int]:
    """Where the columns of each context position end."""
    # Two columns each at least: a vector of one column, scaled to length one, says nothing.
    shares = np.cumsum(np.arange(length, 0, -1))
    rest = np.rint((num_features - 2 * length) * shares / shares[-1]).astype(int)
    return [int(end) for end in 2 * np.arange(1, length + 1) + rest]


def _observations(
    sequences: Sequence[Sequence[str]], ids: Mapping[str, int], part: str
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Contexts (N, C), the nearest token first, and classes (N,) of all places with a class."""
    rare, start = len(ids), len(ids) + 1
    before = [start] * _CONTEXT_LENGTH
    # One long sequence: the padding is dropped as a label, because `start` is not a class.
    stream = np.array(
        [i for s in sequences for i in [*before, *(ids.get(token, rare) for token in s)]],
        np.int32,
    )
    place = np.flatnonzero(stream < rare)
    _logger.info(
        "%s part: %d observations, %d dropped because the next token is not a class",
        part,
        len(place),
        np.count_nonzero(stream == rare),
    )
    contexts = np.stack([stream[place - p] for p in range(1, _CONTEXT_LENGTH + 1)], axis=1)
    return contexts, stream[place]


def _embed_tokens(counts: csr_array, size: int) -> NDArray[np.float32]:
    """Standardised embedding (num_tokens, size) from counts n (num_tokens, num_categories)."""
    if size >= min(counts.shape):
        raise ValueError(
            "`num_features` must leave fewer columns for each context position than there are "
            f"tokens ({counts.shape[0]}) and classes ({counts.shape[1]}); got {size} columns for "
            "one position. Use fewer features or more data."
        )
    counts_coo = counts.tocoo()
    per_category = counts.sum(axis=0)
    weighted = csr_array(
        (
            np.sqrt(counts_coo.data) / per_category[counts_coo.col] ** 0.25,
            (counts_coo.row, counts_coo.col),
        ),
        shape=counts.shape,
    )
    # A fixed start vector, so that the result does not change from run to run.
    v0 = np.random.default_rng(0).standard_normal(min(counts.shape))
    _, singular, right = svds(weighted, k=size, v0=v0)
    if singular.min() < 1e-6 * singular.max():
        raise ValueError(
            "`num_features` must not exceed what the training contexts can tell apart; got "
            f"{size} columns for a context position whose co-occurrence matrix has a lower rank. "
            "Use fewer features or more data."
        )
    largest_first = np.argsort(-singular)
    # Not the left vectors: here a token without counts is zero exactly, with no rounding.
    table = weighted @ right[largest_first].T
    # The sign of a singular vector is arbitrary; fix it, for the same result on each machine.
    table *= np.sign(table[np.abs(table).argmax(axis=0), np.arange(size)])
    length = np.linalg.norm(table, axis=1, keepdims=True)
    table = np.divide(table, length, out=np.zeros_like(table), where=length > 0)
    frequency = counts.sum(axis=1) / counts.sum()
    table -= frequency @ table
    scale = np.sqrt(frequency @ table**2)
    return np.asarray(table / np.where(scale > 1e-6, scale, 1.0), np.float32)
