# SPDX-License-Identifier: Apache-2.0
"""Slow, obvious readers of the bytes of files, which say ``Refused`` where a file is malformed."""

from __future__ import annotations

import csv
import math
import re
from typing import Any

import numpy as np

MOST = 2**31 - 1
LARGEST = float(np.finfo(np.float32).max)
WHOLE = r"[+-]?[0-9]+"
DECIMAL = r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?"


class Refused(Exception):
    """The file does not follow the format."""


def need(holds: object) -> None:
    if not holds:
        raise Refused


def whole(token: bytes, least: int, most: int) -> int:
    text = token.decode("latin-1")
    need(len(text) < 4000 and re.fullmatch(WHOLE, text) and least <= int(text) <= most)
    return int(text)


def decimal(text: str) -> float:
    need(re.fullmatch(DECIMAL, text) and abs(float(text)) <= LARGEST)
    return float(text)


def decoded(line: bytes) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise Refused from error


def lines_of(content: bytes) -> list[bytes]:
    lines = content.split(b"\n")
    return lines if lines[-1] else lines[:-1]


def without_blank_end(lines: list[bytes]) -> list[bytes]:
    while lines and not lines[-1].strip():
        lines = lines[:-1]
    return lines


def pair(token: bytes) -> list[bytes]:
    parts = token.split(b":")
    need(len(parts) == 2)
    return parts


def vocabulary(content: bytes) -> list[str]:
    words = [decoded(line).rstrip("\r\n") for line in lines_of(content)]
    while words and words[-1] == "":
        words.pop()
    need("" not in words and len(set(words)) == len(words))
    return words


def lda_c(content: bytes, num_words: int) -> Any:
    """Number of documents, number of words, and the words and counts of documents by number."""
    documents = {}
    lines = without_blank_end(lines_of(content))
    for d, line in enumerate(lines):
        need(line.split())
        size, *tokens = line.split()
        need(whole(size, 0, MOST) == len(tokens))
        pairs = [pair(token) for token in tokens]
        words = [whole(word, 0, num_words - 1) for word, _ in pairs]
        need(len(set(words)) == len(words))
        if words:
            documents[d] = (words, [whole(count, 1, MOST) for _, count in pairs])
    return len(lines), num_words, in_order(documents)


def in_order(documents: Any) -> Any:
    """With the words of each document ascending, and their counts."""
    return {
        d: tuple(map(list, zip(*sorted(zip(*document, strict=True)), strict=True)))
        for d, document in documents.items()
    }


def uci(content: bytes) -> Any:
    """As ``lda_c``."""
    lines = lines_of(content)
    need(len(lines) >= 3)
    sizes = []
    for line in lines[:3]:
        need(len(line.split()) == 1)
        sizes.append(whole(line.strip(), 0, MOST))
    num_documents, num_words, num_entries = sizes
    documents: dict[int, tuple[list[int], list[int]]] = {}
    last, entries = 1, without_blank_end(lines[3:])
    for line in entries:
        need(len(line.split()) == 3)
        document, word, count = line.split()
        last = whole(document, last, num_documents)
        words, counts = documents.setdefault(last - 1, ([], []))
        words.append(whole(word, 1, num_words) - 1)
        counts.append(whole(count, 1, MOST))
        need(len(set(words)) == len(words))
    need(len(entries) == num_entries and num_documents - num_entries <= 2**20)
    return num_documents, num_words, in_order(documents)


def xml(content: bytes) -> Any:
    """Sizes, labels, features and values."""
    lines = lines_of(content)
    need(lines and len(lines[0].split()) == 3)
    sizes = [whole(token, 0, MOST) for token in lines[0].split()]
    num_points, num_features, num_labels = sizes
    need(len(lines) - 1 >= num_points and not b"".join(lines[1 + num_points :]).strip())
    points = []
    for line in lines[1 : 1 + num_points]:
        first, _, rest = line.rstrip().partition(b" ")
        tokens = first.split(b",") if first else []
        labels = [whole(token.strip(), 0, num_labels - 1) for token in tokens]
        pairs = [pair(token) for token in rest.split()]
        ids = [whole(index, 0, num_features - 1) for index, _ in pairs]
        need(len(set(ids)) == len(ids) and len(set(labels)) == len(labels))
        values = [float(np.float32(decimal(value.decode("latin-1")))) for _, value in pairs]
        points.append((labels, ids, values))
    return sizes, points


def tokens(content: bytes) -> list[str]:
    words: list[str] = []
    for line in lines_of(content):
        own = decoded(line).split()
        need("<eos>" not in own)
        words += [*own, "<eos>"]
    return words


def interactions(content: bytes) -> list[tuple[int, int]]:
    pairs = []
    for line in lines_of(content):
        numbers = []
        for token in line.split():
            need(re.fullmatch(rb"[0-9]{1,9}", token))
            numbers.append(int(token))
        pairs += [(numbers[0], item) for item in numbers[1:]]
    return pairs


def idx(content: bytes) -> tuple[list[int], bytes]:
    need(len(content) >= 4 and content[:3] == b"\0\0\x08")
    header, body = content[4 : 4 + 4 * content[3]], content[4 + 4 * content[3] :]
    need(len(header) == 4 * content[3])
    shape = [int.from_bytes(header[i : i + 4], "big") for i in range(0, len(header), 4)]
    need(len(shape) <= 64 and math.prod(shape) == len(body))
    need(math.prod(size for size in shape if size) < 2**63)  # NumPy's arrays, also empty ones
    return shape, body


def table(content: bytes, names: list[str], word_columns: tuple[str, ...] = ()) -> list[dict]:
    text = content.decode("utf-8", errors="replace")
    lines = re.findall(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+", text) or [""]
    delimiter = "\t" if "\t" in lines[0] else ","
    try:
        columns = next(csv.reader(lines[:1], delimiter=delimiter), [])
        rows = [row for row in csv.reader(lines[1:], delimiter=delimiter) if row]
    except csv.Error as error:
        raise Refused from error
    need(set(names) <= set(columns))
    found = []
    for row in rows:
        need(len(row) == len(columns))
        cells = {name: row[columns.index(name)].strip() for name in names}
        values = {n: c if n in word_columns else decimal(c) for n, c in cells.items()}
        for name in {"ID", "case"} & values.keys():
            need(values[name].is_integer() and abs(values[name]) <= MOST)
        found.append(values)
    return found


def swissmetro(content: bytes) -> Any:
    """For each choice: features, availability, choice, covariates and person."""
    covariates = ["FIRST", "LUGGAGE", "AGE", "MALE", "INCOME", "GA"]
    names = ["PURPOSE", "CHOICE", "SP", "ID", "TRAIN_AV", "SM_AV", "CAR_AV", "TRAIN_TT", "SM_TT"]
    names += ["CAR_TT", "TRAIN_CO", "SM_CO", "CAR_CO", "TRAIN_HE", "SM_HE", "SM_SEATS", *covariates]
    choices = []
    for row in table(content, names):
        if row["PURPOSE"] not in (1, 3) or row["CHOICE"] == 0:
            continue
        pays, stated = row["GA"] == 0, row["SP"] != 0
        features = [
            [row["TRAIN_TT"] / 100, row["TRAIN_CO"] * pays / 100, row["TRAIN_HE"] / 100, 0],
            [row["SM_TT"] / 100, row["SM_CO"] * pays / 100, row["SM_HE"] / 100, row["SM_SEATS"]],
            [row["CAR_TT"] / 100, row["CAR_CO"] / 100, 0, 0],
        ]
        can = [row["TRAIN_AV"] != 0 and stated, row["SM_AV"] != 0, row["CAR_AV"] != 0 and stated]
        need(row["CHOICE"] in (1, 2, 3) and can[int(row["CHOICE"]) - 1])
        shown = [own if there else [0] * 4 for own, there in zip(features, can, strict=True)]
        own = [row[name] for name in covariates]
        choices.append((shown, can, int(row["CHOICE"]) - 1, own, int(row["ID"])))
    return choices


def modecanada(content: bytes, all_cases: bool) -> Any:
    """As ``swissmetro``."""
    modes = ["train", "air", "bus", "car"]
    features, covariates = ["cost", "freq", "ivt", "ovt"], ["dist", "income", "urban"]
    names = ["case", "alt", "choice", *features, *covariates]
    cases: dict[float, list[dict]] = {}
    for row in table(content, names, ("alt",)):
        need(row["alt"] in modes)
        cases.setdefault(row["case"], []).append(row)
    choices = []
    for case, rows in cases.items():
        by_mode = {row["alt"]: row for row in rows}
        chosen = [row["alt"] for row in rows if row["choice"] == 1]
        need(len(by_mode) == len(rows) and len(chosen) == 1)
        if len(by_mode) == 4 or all_cases:
            shown = [[by_mode[m][f] for f in features] if m in by_mode else [0] * 4 for m in modes]
            own = [rows[0][name] for name in covariates]
            can = [mode in by_mode for mode in modes]
            choices.append((shown, can, modes.index(chosen[0]), own, int(case)))
    return choices
