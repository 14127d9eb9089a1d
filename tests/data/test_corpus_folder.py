# SPDX-License-Identifier: Apache-2.0
"""Saved corpora: one whole corpus, whatever goes wrong while another takes its place."""

from __future__ import annotations

import io
import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from numpyro_largecat.data import Corpus
from tests.full_disk import full_disk

OLD = Corpus.from_documents([["a", "b", "a"], [], ["c"]])
NEW = Corpus.from_documents([["z"], ["x", "y", "y"]])


def same(a: Corpus, b: Corpus) -> bool:
    pairs = ((getattr(a, name), getattr(b, name)) for name in ("words", "counts", "offsets"))
    sizes = (a.num_words, a.vocabulary) == (b.num_words, b.vocabulary)
    return sizes and all(np.array_equal(*pair) for pair in pairs)


def file_names(folder: Path) -> list[str]:
    """Names of all files, without the part that is new for each save."""
    paths = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return sorted(str(path.parent)[:7].rstrip(".") + path.name for path in paths)


WHOLE = ["arrays-counts.npy", "arrays-offsets.npy", "arrays-words.npy", "corpus.json"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    OLD.save(tmp_path / "corpus")
    return tmp_path / "corpus"


@pytest.fixture
def arrays(folder: Path) -> Path:
    """The folder of the arrays."""
    return next(folder.glob("arrays-*"))


def test_a_corpus_takes_the_place_of_another(folder: Path) -> None:
    NEW.save(folder)
    assert same(Corpus.open(folder), NEW) and file_names(folder) == WHOLE


def test_an_open_corpus_stays_as_it_is(folder: Path) -> None:
    opened = Corpus.open(folder)
    NEW.save(folder)
    assert isinstance(opened.words, np.memmap) and same(opened, OLD)


def test_a_corpus_is_saved_where_it_is_open(folder: Path) -> None:
    Corpus.open(folder).save(folder)
    assert same(Corpus.open(folder), OLD) and file_names(folder) == WHOLE


def test_a_corpus_without_words_is_saved(tmp_path: Path) -> None:
    Corpus.from_documents([[], []], ["a"]).save(tmp_path)
    assert Corpus.open(tmp_path).num_documents == 2


def test_a_folder_with_other_files_is_refused(folder: Path) -> None:
    """But for hidden ones, which file managers write; the corpus that is there stays."""
    (folder / ".DS_Store").touch()
    NEW.save(folder)
    (folder / "arrays-of-mine").mkdir()
    with pytest.raises(ValueError, match="nothing else; it has 'arrays-of-mine'"):
        OLD.save(folder)
    assert same(Corpus.open(folder), NEW)


def test_a_word_in_two_entries_is_not_looked_for_on_disk(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is anything else but checksums: what was saved had been checked."""
    monkeypatch.setattr(Corpus, "__post_init__", None)
    assert same(Corpus.open(folder), OLD)


def break_step(patch: pytest.MonkeyPatch, broken: int, error: BaseException) -> list[str]:
    """Raise an error in place of one of the calls that change a disk; return those there were."""
    taken: list[str] = []

    def breaking(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if name != "open" or str(args[1]).startswith("w"):
                taken.append(name)
                if len(taken) == broken + 1:
                    raise error
            return real(*args, **kwargs)

        return call

    for name in ("mkdir", "replace", "fsync"):
        patch.setattr(os, name, breaking(name, getattr(os, name)))
    patch.setattr(io, "open", breaking("open", io.open))
    return taken


@pytest.mark.parametrize(
    "error",
    [OSError(28, "No space left on device"), PermissionError(13, "no"), KeyboardInterrupt()],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("there", [True, False], ids=["old", "none"])
def test_a_save_that_fails_anywhere_leaves_the_old_corpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bool, error: BaseException
) -> None:
    """Each step that changes the disk fails once: folders, files, their writing, the rename."""
    for broken in itertools.count():
        folder = tmp_path / str(broken)
        if there:
            OLD.save(folder)
        with monkeypatch.context() as patch:
            taken = break_step(patch, broken, error)
            try:
                NEW.save(folder)
            except KeyboardInterrupt as raised:
                assert raised is error
            except OSError as raised:
                assert f"could not be written into {folder}: [Errno" in str(raised)
            else:
                if len(taken) > broken:
                    continue  # a folder that could not be made and was there already
                break
        if there:
            assert same(Corpus.open(folder), OLD) and file_names(folder) == WHOLE
        else:
            assert file_names(tmp_path) == []
            with pytest.raises(FileNotFoundError):
                Corpus.open(folder)
    assert {*taken} == {"mkdir", "open", "fsync", "replace"} and len(taken) > 10
    assert same(Corpus.open(folder), NEW)


def test_ctrl_c_after_the_last_step_leaves_the_new_corpus(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.replace

    def interrupted(*args: Any) -> None:
        real(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        NEW.save(folder)
    assert same(Corpus.open(folder), NEW) and file_names(folder) == WHOLE


@pytest.mark.parametrize("size", [0, 1, 127, 128, 130, 140])
def test_a_full_disk_leaves_the_old_corpus(folder: Path, size: int) -> None:
    with full_disk(size), pytest.raises(OSError, match=r"could not be written into .*too large"):
        NEW.save(folder)
    assert same(Corpus.open(folder), OLD) and file_names(folder) == WHOLE


KILLED = """
import os, signal, sys
from pathlib import Path
from numpyro_largecat.data import corpus_folder
from tests.data.test_corpus_folder import NEW, OLD, WHOLE, Corpus, file_names, same

os.fsync = lambda file: None  # no power fails here, and it takes most of the time
folder, ends = Path(sys.argv[1]), []
while True:
    OLD.save(folder)
    assert file_names(folder) == WHOLE  # nothing is left of what was killed before
    child = os.fork()
    if not child:
        def trace(frame, event, argument, lines=[0]):
            if frame.f_code.co_filename != corpus_folder.__file__:
                return None
            if event == "line":
                lines[0] += 1
                if lines[0] > 3 * len(ends):
                    os.kill(os.getpid(), signal.SIGKILL)
            return trace
        sys.settrace(trace)
        NEW.save(folder)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    found = Corpus.open(folder)
    ends.append("old" if same(found, OLD) else "new" if same(found, NEW) else "neither")
    if status == 0:
        break
    assert os.WTERMSIG(status) == signal.SIGKILL
print(len(ends), *sorted(set(ends)), ends[-1], ends == sorted(ends, reverse=True))
"""


@pytest.mark.slow
def test_a_process_killed_at_any_moment_leaves_one_whole_corpus(tmp_path: Path) -> None:
    """At each third line: the old one first, then the new; the next save leaves no parts."""
    arguments = [sys.executable, "-c", KILLED, str(tmp_path / "corpus")]
    root = Path(__file__).parents[2]
    result = subprocess.run(arguments, capture_output=True, text=True, cwd=root)
    assert result.returncode == 0, result.stderr
    lines, *rest = result.stdout.split()
    assert int(lines) > 20 and rest == ["new", "old", "new", "True"]


def test_a_corpus_that_is_replaced_while_it_is_opened_is_opened_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The arrays that were named a moment ago are gone."""
    real = np.lib.format.open_memmap

    def replaced(*args: Any, **kwargs: Any) -> Any:
        monkeypatch.setattr(np.lib.format, "open_memmap", real)
        NEW.save(folder)
        return real(*args, **kwargs)

    monkeypatch.setattr(np.lib.format, "open_memmap", replaced)
    assert same(Corpus.open(folder), NEW)


@pytest.mark.parametrize("name", ["words.npy", "counts.npy", "offsets.npy"])
def test_arrays_of_another_corpus_are_refused(arrays: Path, tmp_path: Path, name: str) -> None:
    NEW.save(tmp_path / "other")
    next((tmp_path / "other").glob(f"arrays-*/{name}")).replace(arrays / name)
    with pytest.raises(ValueError, match=rf"{name} must .* or of another corpus than corpus.json"):
        Corpus.open(arrays.parent)


def test_arrays_of_another_type_are_refused(arrays: Path) -> None:
    """The same bytes would be other numbers."""
    path = arrays / "words.npy"
    content = path.read_bytes()
    assert b"'<i4'" in content
    path.write_bytes(content.replace(b"'<i4'", b"'>i4'"))
    with pytest.raises(ValueError, match=r"words\.npy must .* or of another corpus"):
        Corpus.open(arrays.parent)


def test_another_description_is_refused(folder: Path) -> None:
    path = folder / "corpus.json"
    path.write_text(path.read_text().replace('"b"', '"d"'))
    with pytest.raises(ValueError, match=r"corpus\.json must be what `Corpus\.save` writes"):
        Corpus.open(folder)


def test_missing_arrays_are_named(arrays: Path) -> None:
    (arrays / "counts.npy").unlink()
    with pytest.raises(ValueError, match=r"arrays-.* must be .*counts\.npy is not there"):
        Corpus.open(arrays.parent)


@pytest.mark.parametrize("size", [0, 5, 100, -1])
@pytest.mark.parametrize("name", ["words.npy", "corpus.json"])
def test_files_cut_short_are_named(arrays: Path, name: str, size: int) -> None:
    path = (arrays.parent if name == "corpus.json" else arrays) / name
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ValueError, match=rf"{name} must be .* cut short") as error:
        Corpus.open(arrays.parent)
    assert "allow_pickle" not in f"{error.value}{error.value.__cause__}"


@pytest.mark.parametrize("text", ["", "{}", "[]", "3", "[" * 100_000, '{"crc32": 0}'])
def test_a_corpus_is_saved_in_place_of_a_damaged_one(folder: Path, text: str) -> None:
    """As the message says."""
    (folder / "corpus.json").write_text(text)
    with pytest.raises(ValueError, match=r"corpus\.json must be .* Save the corpus again"):
        Corpus.open(folder)
    NEW.save(folder)
    assert same(Corpus.open(folder), NEW) and file_names(folder) == WHOLE
