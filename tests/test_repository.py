# SPDX-License-Identifier: Apache-2.0
"""Files in git say nothing of the machine on which they were written."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OF_A_MACHINE = re.compile(rb"(?<![\w.~-])/(root|home|work)/|\.\./shared")


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs a checkout by git")
def test_no_file_names_a_folder_of_one_machine() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    paths = [ROOT / name for name in listed.stdout.decode().split("\0") if name]
    assert ROOT / "README.md" in paths
    found = {
        str(path.relative_to(ROOT)): [match[0] for match in OF_A_MACHINE.finditer(content)]
        for path in paths
        if path.is_file() and b"\0" not in (content := path.read_bytes())
    }
    assert {name: words for name, words in found.items() if words} == {}
