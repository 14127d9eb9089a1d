# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import logging

import numpy as np
import pytest

from benchmarks.readers.python_names import load_names, read_names

SOURCE = "def f(x): return x\nclass A: pass\nimport b as c\nfor i in d: f(i)\n"


def write_tree(root, num_files=30, source=SOURCE):
    for i in range(num_files):
        (root / f"file{i:02d}.py").write_text(source)
    return root


def test_names_are_identifiers_and_keywords_in_order_by_path(tmp_path):
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "b.py").write_text("# c\nif u: v('w')\n")
    (tmp_path / "a.py").write_text("x = 1\n")
    files = read_names(tmp_path)
    assert files.paths == ("a.py", "pkg/b.py")
    assert files.names == (("x",), ("if", "u", "v"))
    assert files.skipped == ()


def test_installed_packages_are_left_out(tmp_path):
    for folder in ("site-packages", "lib/dist-packages/p"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "b.py").write_text("y = 1\n")
    (tmp_path / "a.py").write_text("x = 1\n")
    assert read_names(tmp_path).paths == ("a.py",)


def test_the_root_itself_may_be_in_site_packages(tmp_path):
    root = tmp_path / "site-packages"
    root.mkdir()
    (root / "a.py").write_text("x = 1\n")
    assert read_names(root).paths == ("a.py",)


@pytest.mark.parametrize(
    "content",
    [b"x = '\xff'\n", b"# coding: nope\n", b"(\n", b"  a\n b\n", b"'''a\n", b"#\n#\nx\n\xff\n"],
    ids=["utf8", "unknown_encoding", "open_bracket", "dedent", "open_string", "utf8_later"],
)
def test_unreadable_files_are_skipped_and_listed(tmp_path, content):
    (tmp_path / "a.py").write_text("x = 1\n")
    (tmp_path / "bad.py").write_bytes(content)
    files = read_names(tmp_path)
    assert files.paths == ("a.py",)
    assert files.skipped == ("bad.py",)


def test_declared_encoding_is_used(tmp_path):
    (tmp_path / "a.py").write_bytes(b"# coding: latin-1\n\xe9t\xe9 = 1\n")
    assert read_names(tmp_path).names == (("été",),)


@pytest.mark.parametrize("root", ["empty", "missing"])
def test_no_python_file_is_an_error_that_names_the_directory(tmp_path, root):
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=rf"`root`.*{root}"):
        read_names(tmp_path / root)


def test_whole_files_are_held_out(tmp_path):
    """Each file has its own name, repeated, so a class in train never occurs in test."""
    for i in range(40):
        (tmp_path / f"file{i:02d}.py").write_text(f"own{i} = f(x, y)\n" * 5)
    data = load_names(tmp_path, num_features=6)
    own = [data.class_names.index(name) for name in data.class_names if name.startswith("own")]
    assert 20 < len(own) < 40
    assert np.isin(own, data.y_train).all()
    assert not np.isin(own, data.y_test).any()
    assert len(data.y_test) == (40 - len(own)) * 5 * 3  # f, x and y; the own names are dropped


def test_held_out_files_do_not_depend_on_the_other_files(tmp_path):
    test_sizes = []
    for num_files in (30, 31):
        root = tmp_path / str(num_files)
        root.mkdir()
        write_tree(root, num_files)
        test_sizes.append(len(load_names(root, num_features=6).y_test))
    per_file = len(read_names(root).names[0])
    assert test_sizes[1] - test_sizes[0] in (0, per_file)
    assert test_sizes[0] % per_file == 0


def test_classes_are_the_names_with_min_count_in_training(tmp_path):
    write_tree(tmp_path)
    (tmp_path / "zz.py").write_text("twice, twice, thrice, thrice, thrice\n")
    data = load_names(tmp_path, num_features=6)
    assert data.class_names == tuple(sorted(data.class_names))
    assert "thrice" in data.class_names
    assert "twice" not in data.class_names
    assert "twice" in load_names(tmp_path, min_count=2, num_features=6).class_names


def test_dropped_observations_and_skipped_files_are_logged(tmp_path, caplog):
    write_tree(tmp_path)
    (tmp_path / "zz.py").write_text("once\n")
    (tmp_path / "bad.py").write_text("(\n")
    with caplog.at_level(logging.INFO, logger="benchmarks.readers"):
        load_names(tmp_path, num_features=6)
    assert "1 skipped" in caplog.text
    assert "1 dropped" in caplog.text


def test_loading_twice_gives_the_same_data(tmp_path):
    write_tree(tmp_path)
    first, second = load_names(tmp_path, num_features=8), load_names(tmp_path, num_features=8)
    np.testing.assert_array_equal(first.y_train, second.y_train)
    np.testing.assert_allclose(first.x_train, second.x_train, atol=1e-5)


def test_shapes_and_types(tmp_path):
    data = load_names(write_tree(tmp_path), num_features=9)
    assert data.x_train.dtype == data.x_test.dtype == np.float32
    assert data.y_train.dtype == data.y_test.dtype == np.int32
    assert data.x_train.shape == (len(data.y_train), 9)
    assert data.x_test.shape == (len(data.y_test), 9)
    assert len(data.feature_names) == len(set(data.feature_names)) == 9
    assert data.num_categories == len(data.class_names) == data.y_train.max() + 1


def test_a_tree_too_small_to_hold_out_a_file_is_an_error(tmp_path):
    (tmp_path / "a.py").write_text(SOURCE)
    with pytest.raises(ValueError, match=r"`root`.*got . to train on and . held out"):
        load_names(tmp_path)
