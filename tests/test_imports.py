# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import warnings
with warnings.catch_warnings():
    warnings.simplefilter("ignore", FutureWarning)
    import {}
    import {}
import numpyro
from numpyro.handlers import trace
assert trace(lambda: numpyro.factor("f", 0.0)).get_trace()
"""


@pytest.mark.smoke
@pytest.mark.parametrize("modules", [("arviz", "numpyro_largecat"), ("numpyro_largecat", "arviz")])
def test_numpyro_is_whole_whatever_is_imported_first(modules):
    """ArviZ 1.3 imports it lazily, which parts of it that are imported before it do not survive."""
    subprocess.run([sys.executable, "-c", PROGRAM.format(*modules)], check=True)
