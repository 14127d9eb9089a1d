# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import gzip
import logging

import numpy as np
import pytest

from benchmarks.readers import ClassificationData, load
from tests.data_files import real_data


def write_idx(path, array):
    header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
    path.write_bytes(gzip.compress(header + array.astype(np.uint8).tobytes()))


def write_mnist(directory, num_labels=4):
    for part in ("train", "t10k"):
        images = np.full((4, 28, 28), 255)
        images[:, 0, 1] = 51
        write_idx(directory / f"{part}-images-idx3-ubyte.gz", images)
        write_idx(directory / f"{part}-labels-idx1-ubyte.gz", np.arange(num_labels))


def check(data):
    """What holds for every data set."""
    assert isinstance(data, ClassificationData)
    for x, y in ((data.x_train, data.y_train), (data.x_test, data.y_test)):
        assert x.dtype == np.float32
        assert y.dtype == np.int32
        assert x.shape == (len(y), len(data.feature_names))
        assert np.isfinite(x).all()
        assert 0 <= y.min() <= y.max() < data.num_categories
    assert data.num_categories == len(set(data.class_names))


@pytest.mark.parametrize("name", ["bibtex", "delicious"])
def test_first_labels_are_the_classes(tmp_path, caplog, name):
    (tmp_path / f"{name}_train.txt").write_text("4 2 9\n7,3 0:1\n 0:5\n2 1:0.5\n7 0:2\n")
    (tmp_path / f"{name}_test.txt").write_text("4 2 9\n3 0:9\n7,2 1:1\n 0:1\n2,3 0:4\n")
    with caplog.at_level(logging.INFO, logger="benchmarks.readers"):
        data = load(name, tmp_path)
    check(data)
    assert data.class_names == ("2", "7")
    assert data.y_train.tolist() == [1, 0, 1]
    assert data.x_train.tolist() == [[1, 0], [0, 0.5], [2, 0]]
    assert data.y_test.tolist() == [1, 0]
    assert data.x_test.tolist() == [[0, 1], [4, 0]]
    assert "dropped 1 training and 1 test points without a label, and 1 test" in caplog.text


def test_train_and_test_with_different_numbers_of_features_is_an_error(tmp_path):
    (tmp_path / "bibtex_train.txt").write_text("1 2 2\n0 0:1\n")
    (tmp_path / "bibtex_test.txt").write_text("1 3 2\n0 0:1\n")
    with pytest.raises(ValueError, match=r"bibtex_test.*same number of features; got 2 and 3"):
        load("bibtex", tmp_path)


def test_mnist_pixels_are_scaled_to_one(tmp_path):
    write_mnist(tmp_path)
    data = load("mnist", tmp_path)
    check(data)
    assert data.class_names == tuple("0123456789")
    assert data.y_test.tolist() == [0, 1, 2, 3]
    np.testing.assert_allclose(data.x_train[:, :3], [[1, 0.2, 1]] * 4, rtol=1e-6)
    assert data.feature_names[29] == "pixel1_1"


def test_mnist_images_and_labels_that_do_not_match_are_an_error(tmp_path):
    write_mnist(tmp_path, num_labels=5)
    with pytest.raises(ValueError, match=r"train-labels.*\(4, 28, 28\) and \(5,\)"):
        load("mnist", tmp_path)


def test_ptb_predicts_the_next_word_across_lines(tmp_path):
    rng = np.random.default_rng(0)
    words = [f"w{i}" for i in range(80)]
    lines = [" ".join(rng.choice(words, 10)) for _ in range(400)]
    (tmp_path / "ptb.train.txt").write_text("\n".join(lines) + "\n")
    (tmp_path / "ptb.test.txt").write_text("w3 unseen w5\nw7\n")
    data = load("ptb", tmp_path)
    check(data)
    assert data.class_names == tuple(sorted(["<eos>", *words]))
    assert data.x_train.shape == (400 * 11, 128)
    assert [data.class_names[i] for i in data.y_test] == ["w3", "w5", "<eos>", "w7", "<eos>"]


def test_names_reads_the_directory_given(tmp_path):
    rng = np.random.default_rng(0)
    for i in range(30):
        source = " + ".join(rng.choice([f"name{j}" for j in range(70)], 150))
        (tmp_path / f"file{i}.py").write_text(f"x = {source}\n")
    data = load("names", tmp_path)
    check(data)
    assert set(data.class_names) == {"x", *(f"name{j}" for j in range(70))}
    assert data.x_train.shape[1] == 128


def test_unknown_name_is_an_error_that_lists_the_names():
    with pytest.raises(
        ValueError, match=r"names, bibtex, delicious, mnist, mnist100, omniglot, ptb; got 'cifar'"
    ):
        load("cifar")


@pytest.mark.parametrize("name", ["bibtex", "delicious", "mnist", "mnist100", "omniglot", "ptb"])
def test_no_directory_is_an_error(name):
    with pytest.raises(ValueError, match=f"`directory` must be the folder.*'{name}'; got None"):
        load(name)


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("bibtex", "bibtex_train.txt"),
        ("delicious", "delicious_train.txt"),
        ("mnist", "train-images-idx3-ubyte"),
        ("mnist100", "train-images-idx3-ubyte"),
        ("omniglot", "omniglot_28x28.npz"),
        ("ptb", "ptb.train.txt"),
    ],
)
@pytest.mark.parametrize("directory", ["empty", "missing"])
def test_a_missing_file_is_an_error_that_names_it(tmp_path, name, file, directory):
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=rf"{directory}.{file} .*`directory`"):
        load(name, tmp_path / directory)


@pytest.mark.parametrize(
    ("name", "folder", "num_categories", "num_train", "num_test"),
    [
        ("bibtex", "xml", 148, 4880, 2515),
        ("delicious", "xml", 352, 12_910, 3_160),
        ("mnist", "mnist", 10, 60_000, 10_000),
        ("mnist100", "mnist", 100, 60_000, 10_000),
        ("omniglot", "images", 1623, 25_968, 6_492),
    ],
)
@pytest.mark.slow
def test_real_sizes(name, folder, num_categories, num_train, num_test):
    data = load(name, real_data(folder))
    check(data)
    assert data.num_categories == num_categories
    assert (len(data.y_train), len(data.y_test)) == (num_train, num_test)


def test_files_are_found_in_a_folder_of_the_directory(tmp_path):
    (tmp_path / "xml").mkdir()
    for part in ("train", "test"):
        (tmp_path / "xml" / f"bibtex_{part}.txt").write_text("2 2 9\n7 0:1\n3 1:1\n")
    assert load("bibtex", tmp_path).class_names == ("3", "7")
