# SPDX-License-Identifier: Apache-2.0
"""The names in Python's own standard library: real data that is on every machine."""

from __future__ import annotations

import hashlib
import logging
import sysconfig
import tokenize
from os import PathLike
from pathlib import Path
from typing import NamedTuple

from benchmarks.readers.classification_data import ClassificationData
from benchmarks.readers.context_features import next_token_classification

_logger = logging.getLogger(__name__)

# Folders that are not installed everywhere, or hold what was installed later.
_LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})


class NameFiles(NamedTuple):
    """The NAME tokens of a tree of Python files, one entry per file, sorted by path.

    Example:
        >>> NameFiles(paths=("a.py",), names=(("import", "os"),), skipped=()).names[0]
        ('import', 'os')
    """

    paths: tuple[str, ...]  # (F,), file paths relative to the root, with "/"
    names: tuple[tuple[str, ...], ...]  # (F,), the NAME tokens of each file in order
    skipped: tuple[str, ...]  # relative paths of the files that tokenize cannot read


def read_names(root: str | PathLike[str] | None = None) -> NameFiles:
    """Read the NAME tokens of all Python files below a directory with ``tokenize``.

    A NAME token is an identifier or a keyword. Files below a ``site-packages`` or
    ``dist-packages`` directory are left out, and so are the folders of tests, which some systems do
    not install. A file that cannot be decoded or tokenized is listed in ``skipped``.

    From Python 3.12 on, ``tokenize`` also reports the names inside f-strings.

    Cost: one pass of ``tokenize`` in one process; the whole standard library takes two to five
    seconds.

    Args:
        root: Directory to read; by default the standard library of the running Python.

    Returns:
        The tokens per file, and the files skipped.

    Raises:
        FileNotFoundError: If there is no Python file below ``root``.

    Example:
        >>> import pathlib, tempfile
        >>> root = pathlib.Path(tempfile.mkdtemp())
        >>> _ = (root / "a.py").write_text("def f(x): return x + 1")
        >>> _ = (root / "broken.py").write_text("(")
        >>> files = read_names(root)
        >>> files.names
        (('def', 'f', 'x', 'return', 'x'),)
        >>> files.skipped
        ('broken.py',)
    """
    root = Path(sysconfig.get_paths()["stdlib"] if root is None else root)
    relative = [path.relative_to(root) for path in root.rglob("*.py") if path.is_file()]
    ours = sorted(p.as_posix() for p in relative if _LEFT_OUT.isdisjoint(p.parts))
    if not ours:
        raise FileNotFoundError(
            f"`root` must be a directory with Python files below it; got {str(root)!r}, "
            "which has none."
        )
    paths, names, skipped = [], [], []
    for path in ours:
        try:
            with tokenize.open(root / path) as file:
                tokens = tokenize.generate_tokens(file.readline)
                names.append(tuple(t.string for t in tokens if t.type == tokenize.NAME))
        except (SyntaxError, UnicodeDecodeError, tokenize.TokenError):
            skipped.append(path)
        else:
            paths.append(path)
    return NameFiles(tuple(paths), tuple(names), tuple(skipped))


def load_names(
    root: str | PathLike[str] | None = None, *, min_count: int = 3, num_features: int = 128
) -> ClassificationData:
    r"""Predict the next name in Python source code from the three names before it.

    The data are the NAME tokens (identifiers and keywords) of Python's standard library, so
    they need no download, and they differ a little from one Python version to the next.

    - Whole files are held out: about one in ten, chosen by a hash of the path relative to
      ``root``, so the choice does not depend on the machine or on the other files.
    - The classes are the names seen at least ``min_count`` times in the training files, sorted.
    - Observations whose next name is not a class are dropped, in both parts; how many is
      logged at level INFO, as is the number of files that could not be tokenized.
    - The features are those of :func:`~benchmarks.readers.context_features.context_features`. Names
      that are not classes count as one "rare" name there, and the places before the start of a
      file as a "start" name.

    Shapes: on CPython 3.11.7, N is 461,945 and K is 14,739, with 47,185 held-out observations.

    Cost: about 10 seconds on one core, and O(N * num_features) memory, 0.24 GB for the sizes above.

    Args:
        root: Directory of Python files; by default the standard library of the running Python.
        min_count: Number of occurrences in the training files that makes a name a class, >= 1.
        num_features: Number of features D.

    Returns:
        The data set, with float32 features of mean zero and variance one on the training part.

    Raises:
        FileNotFoundError: If there is no Python file below ``root``.
        ValueError: If the hash leaves no file for training or none for testing, or if there are
            too few classes for ``num_features``.

    Example:
        >>> import pathlib, tempfile
        >>> root = pathlib.Path(tempfile.mkdtemp())
        >>> source = "def f(x): return x\nclass A: pass\nimport b as c\nfor i in d: f(i)"
        >>> for i in range(30):
        ...     _ = (root / f"file{i}.py").write_text(source)
        >>> data = load_names(root, num_features=6)
        >>> data.class_names[:4]
        ('A', 'as', 'b', 'c')
        >>> data.x_train.shape[1]
        6
    """
    files = read_names(root)
    train: list[tuple[str, ...]] = []
    test: list[tuple[str, ...]] = []
    for path, names in zip(files.paths, files.names, strict=True):
        (test if _is_held_out(path) else train).append(names)
    _logger.info(
        "names: %d training files, %d held-out files, %d skipped because they cannot be tokenized",
        len(train),
        len(test),
        len(files.skipped),
    )
    if not train or not test:
        raise ValueError(
            "`root` must have enough Python files to train on and to hold out about one in ten; "
            f"got {len(train)} to train on and {len(test)} held out. Use a larger tree."
        )
    return next_token_classification(train, test, min_count=min_count, num_features=num_features)


def _is_held_out(path: str) -> bool:
    # Python's own hash() of a string changes from run to run.
    return int(hashlib.sha256(path.encode()).hexdigest(), 16) % 10 == 0
