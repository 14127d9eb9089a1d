# SPDX-License-Identifier: Apache-2.0
"""Texts of tokens with spaces between, such as the Penn Treebank."""

from __future__ import annotations

from os import PathLike

from numpyro_largecat.data.files import malformed, open_binary


def read_tokens(path: str | PathLike[str]) -> list[str]:
    r"""Read a text of space-separated tokens and end each line with the token ``<eos>``.

    This is how the Penn Treebank files of language modelling are read.

    Args:
        path: The UTF-8 file, plain or compressed with gzip.

    Returns:
        All tokens in order, one ``<eos>`` after the tokens of each line.

    Raises:
        ValueError: If a line is not UTF-8 or already holds ``<eos>``. The message has the file
            name and the line number.

    Example:
        >>> import pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "text.txt"
        >>> _ = path.write_text(" no it was n't \n but N \n")
        >>> read_tokens(path)
        ['no', 'it', 'was', "n't", '<eos>', 'but', 'N', '<eos>']
    """
    tokens: list[str] = []
    with open_binary(path) as file:
        for line_number, line in enumerate(file, start=1):
            try:
                words = line.decode().split()
            except UnicodeDecodeError as error:
                raise malformed(path, line_number, "UTF-8 text", line) from error
            if "<eos>" in words:
                raise malformed(
                    path, line_number, "no `<eos>`, since one is added after each line", line
                )
            tokens += words
            tokens.append("<eos>")
    return tokens
