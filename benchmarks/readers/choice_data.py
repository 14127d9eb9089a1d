# SPDX-License-Identifier: Apache-2.0
"""Discrete choice data sets, in which each alternative has features of its own."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from numpyro_largecat._conversions import LARGEST_ID
from numpyro_largecat.data.files import malformed, open_binary


class ChoiceData(NamedTuple):
    """Choices among J alternatives with F features each, one row for each choice ("wide" form).

    Example:
        >>> import numpy as np
        >>> data = ChoiceData(
        ...     features=np.array([[[0.5], [0.2]]], np.float32),
        ...     available=np.array([[True, True]]),
        ...     choice=np.array([1], np.int32),
        ...     covariates=np.array([[40.0]], np.float32),
        ...     person=np.array([7], np.int32),
        ...     feature_names=("time",),
        ...     alternative_names=("train", "car"),
        ...     covariate_names=("income",),
        ... )
        >>> data.features[0, data.choice[0], data.feature_names.index("time")].item()  # of "car"
        0.2...
    """

    features: NDArray[np.float32]  # (N, J, F), 0 where an alternative is not available
    available: NDArray[np.bool_]  # (N, J), whether an alternative could be chosen
    choice: NDArray[np.int32]  # (N,), the alternative chosen, in [0, J)
    covariates: NDArray[np.float32]  # (N, C), features of the person or of the trip
    person: NDArray[np.int32]  # (N,), who chose; rows of one person are not independent
    feature_names: tuple[str, ...]  # (F,), the last axis of `features`
    alternative_names: tuple[str, ...]  # (J,), the names of the alternatives
    covariate_names: tuple[str, ...]  # (C,), the columns of `covariates`


_SWISSMETRO_ALTERNATIVES = ("train", "swissmetro", "car")
_SWISSMETRO_COVARIATES = ("FIRST", "LUGGAGE", "AGE", "MALE", "INCOME", "GA")
_SWISSMETRO_COLUMNS = (
    *("PURPOSE", "CHOICE", "SP", "ID", "TRAIN_AV", "SM_AV", "CAR_AV", "TRAIN_TT", "SM_TT"),
    *("CAR_TT", "TRAIN_CO", "SM_CO", "CAR_CO", "TRAIN_HE", "SM_HE", "SM_SEATS"),
    *_SWISSMETRO_COVARIATES,
)
_CANADA_ALTERNATIVES = ("train", "air", "bus", "car")
_CANADA_FEATURES = ("cost", "freq", "ivt", "ovt")
_CANADA_COVARIATES = ("dist", "income", "urban")
_NUMBERS = ("ID", "case")  # columns of whole numbers
_LARGEST = float(np.finfo(np.float32).max)


def read_swissmetro(path: str | PathLike[str]) -> ChoiceData:
    r"""Read the Swissmetro data: stated choices between train, Swissmetro and car.

    The rows and variables are those of Bierlaire's examples, 6,768 of 10,728 choices, nine by each
    of 752 people:

    - Only commuting and business trips are kept (``PURPOSE`` 1 and 3), with a known ``CHOICE``.
    - ``time`` is the travel time in units of 100 minutes.
    - ``cost`` is in units of 100 francs. It is 0 for train and Swissmetro if the person has an
      annual season ticket (``GA`` 1), which covers both.
    - ``headway`` is the time between departures in units of 100 minutes, 0 for car.
    - ``seats`` is 1 for Swissmetro with airline seats.
    - Train is available if ``TRAIN_AV`` is 1 and car if ``CAR_AV`` is 1, both only in the stated
      choices (``SP`` 1), Swissmetro if ``SM_AV`` is 1.

    The covariates ``first`` (class), ``luggage``, ``age``, ``male``, ``income`` and ``ga`` have the
    codes of the file.

    Cost: O(rows); a fifth of a second.

    Args:
        path: The file, with a header and columns separated by commas or tabs; plain or compressed
            with gzip.

    Returns:
        The data, in the order of the file.

    Raises:
        ValueError: If a column is missing, a value is not a number, or a choice is not one of the
            available alternatives. The message has the file name and the line number.

    Example:
        >>> import pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "swissmetro.csv"
        >>> header = (
        ...     "PURPOSE,CHOICE,SP,ID,TRAIN_AV,SM_AV,CAR_AV,TRAIN_TT,SM_TT,CAR_TT,TRAIN_CO,SM_CO,"
        ...     "CAR_CO,TRAIN_HE,SM_HE,SM_SEATS,FIRST,LUGGAGE,AGE,MALE,INCOME,GA")
        >>> row = "1,2,1,1,1,1,0,112,63,0,48,52,0,120,20,0,0,0,3,0,2,1"
        >>> _ = path.write_text(f"{header}\n{row}\n")
        >>> data = read_swissmetro(path)
        >>> data.available.tolist(), data.choice.tolist()
        ([[True, True, False]], [1])
        >>> data.features[0, 1].astype(float).round(2).tolist()  # time, cost, headway, seats
        [0.63, 0.0, 0.2, 0.0]

    References:
        Bierlaire, Axhausen and Abay, The acceptance of modal innovation: the case of Swissmetro,
        Swiss Transport Research Conference 2001.
        Biogeme's example 01logit.
    """
    columns, lines = _read_columns(path, _SWISSMETRO_COLUMNS)
    kept = np.isin(columns["PURPOSE"], (1, 3)) & (columns["CHOICE"] != 0)
    columns = {name: values[kept] for name, values in columns.items()}
    pays, stated = columns["GA"] == 0, columns["SP"] != 0
    none = np.zeros(len(stated))
    train = [columns["TRAIN_TT"], columns["TRAIN_CO"] * pays, columns["TRAIN_HE"], none]
    metro = [columns["SM_TT"], columns["SM_CO"] * pays, columns["SM_HE"], 100 * columns["SM_SEATS"]]
    car = [columns["CAR_TT"], columns["CAR_CO"], none, none]
    features = np.stack([train, metro, car]).transpose(2, 0, 1) / 100
    can_take = {mode: columns[f"{mode}_AV"] != 0 for mode in ("TRAIN", "SM", "CAR")}
    available = [can_take["TRAIN"] & stated, can_take["SM"], can_take["CAR"] & stated]
    choice = columns["CHOICE"] - 1
    _check_choices(path, lines[kept], choice, np.stack(available, axis=1))
    return _choice_data(
        features,
        np.stack(available, axis=1),
        choice,
        np.stack([columns[name] for name in _SWISSMETRO_COVARIATES], axis=1),
        columns["ID"],
        ("time", "cost", "headway", "seats"),
        _SWISSMETRO_ALTERNATIVES,
        tuple(name.lower() for name in _SWISSMETRO_COVARIATES),
    )


def read_modecanada(path: str | PathLike[str], *, all_cases: bool = False) -> ChoiceData:
    r"""Read the ModeCanada data: trips between Montreal and Toronto by train, air, bus or car.

    The file has one row for each case and available alternative ("long" form). The features are
    ``cost`` in Canadian dollars, ``freq``, the departures per day, and ``ivt`` and ``ovt``, the
    minutes in and out of the vehicle. The covariates are ``dist``, the distance, ``income`` and
    ``urban``, which is 1 if the trip starts or ends in a large city; each is that of the first row
    of a case.

    The literature mostly uses the 2,779 cases in which all four alternatives are available, and
    these are read by default.

    Cost: O(rows); a fifth of a second.

    Args:
        path: The file, with a header and columns separated by commas or tabs; plain or compressed
            with gzip.
        all_cases: Also read the cases in which some alternatives are not available, 4,324 in all.

    Returns:
        The data, in the order in which the cases begin in the file; ``person`` is the case.

    Raises:
        ValueError: If a column is missing, a value is not a number, an alternative is not one of
            the four or occurs twice in a case, or if a case has not exactly one choice. The
            message has the file name and the line number.

    Example:
        >>> import pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "modecanada.csv"
        >>> _ = path.write_text(
        ...     "case,alt,choice,dist,cost,ivt,ovt,freq,income,urban\n"
        ...     "1,train,0,83,28.25,50,66,4,45,0\n"
        ...     "1,car,1,83,15.77,61,0,0,45,0\n")
        >>> data = read_modecanada(path, all_cases=True)
        >>> data.available.tolist(), data.alternative_names[data.choice[0]]
        ([[True, False, False, True]], 'car')
        >>> data.features[0, 3].astype(float).round(2).tolist()  # cost, freq, ivt, ovt
        [15.77, 0.0, 61.0, 0.0]

    References:
        Koppelman and Wen, The paired combinatorial logit model, Transportation Research B, 2000.
        Croissant, Estimation of random utility models in R: the mlogit package, 2020.
    """
    columns, lines = _read_columns(
        path,
        ("case", "alt", "choice", *_CANADA_FEATURES, *_CANADA_COVARIATES),
        codes={"alt": _CANADA_ALTERNATIVES},
    )
    first, case = _first_rows(columns["case"])
    row = _rows_of_cases(path, lines, case, columns["alt"].astype(int))
    available = row >= 0
    chosen = available & (columns["choice"] == 1)[row]
    wrong = chosen.sum(axis=1) != 1
    if wrong.any():
        line = lines[first[np.argmax(wrong)]]
        raise malformed(path, line, "one row with `choice` 1 in the case that begins here")
    kept = available.all(axis=1) | all_cases
    return _choice_data(
        np.stack([columns[name] for name in _CANADA_FEATURES], axis=1)[row[kept]],
        available[kept],
        chosen.argmax(axis=1)[kept],
        np.stack([columns[name] for name in _CANADA_COVARIATES], axis=1)[first[kept]],
        columns["case"][first[kept]],
        _CANADA_FEATURES,
        _CANADA_ALTERNATIVES,
        _CANADA_COVARIATES,
    )


def _choice_data(
    features: NDArray[np.float64],
    available: NDArray[np.bool_],
    choice: NDArray[Any],
    covariates: NDArray[np.float64],
    person: NDArray[np.float64],
    *names: tuple[str, ...],
) -> ChoiceData:
    return ChoiceData(
        np.where(available[:, :, None], features, 0).astype(np.float32),
        available,
        choice.astype(np.int32),
        covariates.astype(np.float32),
        person.astype(np.int32),
        *names,
    )


def _first_rows(cases: NDArray[np.float64]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """The row at which each case begins, and the number of each row's case in that order."""
    _, first, case = np.unique(cases, return_index=True, return_inverse=True)
    order = np.argsort(first)
    return first[order], np.argsort(order)[case]


def _rows_of_cases(
    path: str | PathLike[str],
    lines: NDArray[np.int64],
    case: NDArray[np.intp],
    alternative: NDArray[np.intp],
) -> NDArray[np.intp]:
    """The row of the file for each case and alternative, -1 where there is none."""
    shape = (case.max(initial=-1) + 1, len(_CANADA_ALTERNATIVES))
    numbers = np.arange(len(case))
    row = np.full(shape, -1)
    row[case, alternative] = numbers
    repeated = row[case, alternative] != numbers
    if repeated.any():
        at = np.argmax(repeated)
        need = "each alternative at most once in a case"
        got = f"{_CANADA_ALTERNATIVES[alternative[at]]} again later in the file"
        raise malformed(path, lines[at], f"{need}; got {got}")
    return row


def _check_choices(
    path: str | PathLike[str],
    lines: NDArray[np.int64],
    choice: NDArray[np.float64],
    available: NDArray[np.bool_],
) -> None:
    num_alternatives = available.shape[1]
    known = np.isin(choice, np.arange(num_alternatives))
    places = np.where(known, choice, 0).astype(int)
    wrong = ~known | ~available[np.arange(len(choice)), places]
    if wrong.any():
        at = np.argmax(wrong)
        need = f"`CHOICE` to be 0 or an available alternative, 1 to {num_alternatives}"
        raise malformed(path, lines[at], f"{need}; got {choice[at] + 1:g}")


def _read_columns(
    path: str | PathLike[str],
    names: Sequence[str],
    codes: Mapping[str, tuple[str, ...]] | None = None,
) -> tuple[dict[str, NDArray[np.float64]], NDArray[np.int64]]:
    """Read the named columns of a table with a header, and the line number of each row.

    A column in ``codes`` holds one of these words and is read as the place of the word.
    """
    words = codes or {}
    rows, lines = [], []
    for line, row in _read_rows(path, names):
        rows.append([_number(path, line, n, row[n], words.get(n)) for n in names])
        lines.append(line)
    table = np.array(rows, np.float64).reshape(-1, len(names))
    return dict(zip(names, table.T, strict=True)), np.array(lines, np.int64)


def _read_rows(
    path: str | PathLike[str], names: Sequence[str]
) -> Iterator[tuple[int, dict[str, str]]]:
    with open_binary(path) as file:
        text = io.TextIOWrapper(file, encoding="utf-8", errors="replace", newline="")
        header = text.readline()
        delimiter = "\t" if "\t" in header else ","
        columns = next(_cells(path, csv.reader([header], delimiter=delimiter)), [])
        missing = [name for name in names if name not in columns]
        if missing:
            need = f"a header with columns {', '.join(missing)}, separated by commas or tabs"
            raise malformed(path, 1, need, header)
        places = [columns.index(name) for name in names]
        reader = csv.reader(text, delimiter=delimiter)
        for cells in _cells(path, reader, 1):
            line = reader.line_num + 1
            if not cells:
                continue
            if len(cells) != len(columns):
                need = f"{len(columns)} columns, as in the header; got {len(cells)}"
                raise malformed(path, line, need)
            yield line, {n: cells[i].strip() for n, i in zip(names, places, strict=True)}


def _cells(path: str | PathLike[str], reader: Any, lines_before: int = 0) -> Iterator[list[str]]:
    try:
        yield from reader
    except csv.Error as error:
        need = f"cells that Python's csv can read; it says: {error}"
        raise malformed(path, reader.line_num + lines_before, need) from error


def _number(
    path: str | PathLike[str], line: int, name: str, cell: str, words: tuple[str, ...] | None
) -> float:
    if words is not None:
        if cell not in words:
            raise malformed(path, line, f"`{name}` to be one of {', '.join(words)}", cell)
        return words.index(cell)
    try:
        number = float(cell) if cell.isascii() and "_" not in cell else np.nan
    except ValueError:
        number = np.nan
    if not abs(number) <= _LARGEST:
        raise malformed(path, line, f"a number in column `{name}`", cell)
    if name in _NUMBERS and not (number.is_integer() and abs(number) <= LARGEST_ID):
        raise malformed(path, line, f"a whole number up to {LARGEST_ID} in column `{name}`", cell)
    return number
