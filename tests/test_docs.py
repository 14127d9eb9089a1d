# SPDX-License-Identifier: Apache-2.0
"""The documentation covers every public name, and what it shows runs."""

from __future__ import annotations

import doctest
import inspect
import re
from pathlib import Path

import pytest

import numpyro_largecat as lc

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
MOST_WORDS = 1_200  # of prose on a page: one sitting
GALLERY = sorted((ROOT / "docs" / "gallery").glob("plot_*.py"))
PUBLIC_NAMES = {f"numpyro_largecat.{name}": getattr(lc, name) for name in lc.__all__}
for path, module in list(PUBLIC_NAMES.items()):
    if inspect.ismodule(module):
        del PUBLIC_NAMES[path]
        inside = {name: getattr(module, name) for name in module.__all__ if name not in lc.__all__}
        PUBLIC_NAMES |= {f"{path}.{name}": value for name, value in inside.items()}


@pytest.mark.parametrize("name", PUBLIC_NAMES)
def test_public_name_is_in_the_api_page(name: str) -> None:
    api = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    assert name in re.findall(r"^\.\. auto\w+:: (\S+)$", api, re.MULTILINE)


@pytest.mark.parametrize("name", PUBLIC_NAMES)
def test_public_name_has_a_docstring_with_an_example(name: str) -> None:
    assert ">>> " in (inspect.getdoc(PUBLIC_NAMES[name]) or "")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ``python`` blocks of a page run in order, as one program, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    text = page.read_text(encoding="utf-8")
    names: dict[str, object] = {"__name__": page.stem}
    for block in re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        code, line = block[1], text.count("\n", 0, block.start(1))
        if code.startswith(">>> "):
            _run_doctest(code, names, page, line)
        else:
            exec(compile("\n" * line + code, str(page), "exec", dont_inherit=True), names)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page_is_read_in_one_sitting(page: Path) -> None:
    """Words outside of code, tables and equations."""
    text = page.read_text(encoding="utf-8")
    for other in (r"```.*?```", r"\$\$.*?\$\$", r"^\|.*?$", r"^    .*?$"):
        text = re.sub(other, "", text, flags=re.DOTALL | re.MULTILINE)
    assert len(re.findall(r"[A-Za-z][A-Za-z'-]*", text)) <= MOST_WORDS


@pytest.mark.parametrize("program", GALLERY, ids=lambda program: program.stem)
def test_gallery_program_is_on_the_first_page(program: Path) -> None:
    """The build of the documentation runs the programs; the first page names each."""
    first = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    assert f"(auto_gallery/{program.stem}.rst)" in first


def test_files_that_the_architecture_names_are_there() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    files = set(re.findall(r"`(\w+/[\w/]*\.py)`", page))
    roots = (ROOT, ROOT / "numpyro_largecat")
    missing = [f for f in files if not any((root / f).is_file() for root in roots)]
    assert len(files) > 10 and not missing


def _run_doctest(code: str, names: dict[str, object], page: Path, line: int) -> None:
    test = doctest.DocTestParser().get_doctest(code, names, page.name, str(page), line)
    report: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    failures = runner.run(test, out=report.append, clear_globs=False).failed
    names.update(test.globs)
    assert not failures, "".join(report)
