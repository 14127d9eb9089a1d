# SPDX-License-Identifier: Apache-2.0
"""The folder of the data sets: ``--data FOLDER``, or the environment variable LARGECAT_DATA."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

VARIABLE = "LARGECAT_DATA"


def add_data_argument(parser: argparse.ArgumentParser, holds: str) -> None:
    """Add ``--data FOLDER``, a folder that holds something; None where nothing says which."""
    parser.add_argument(
        "--data",
        type=Path,
        metavar="FOLDER",
        default=os.environ.get(VARIABLE) or None,
        help=f"folder that holds {holds}; by default what {VARIABLE} is set to",
    )


def how_to_name_data(holds: str) -> str:
    """What to do where there is no such folder."""
    return f"set {VARIABLE} to a folder that holds {holds}, or give it as --data FOLDER"
