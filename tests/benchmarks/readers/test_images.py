# SPDX-License-Identifier: Apache-2.0
"""Data sets of pictures, from small files in the format of the real ones."""

from __future__ import annotations

import gzip

import numpy as np
import pytest

from benchmarks.readers import load


def write_idx(path, array):
    header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
    path.write_bytes(gzip.compress(header + array.astype(np.uint8).tobytes()))


def write_mnist(directory, num_train=200, num_test=50):
    """Images whose pixels are their digit, plus a different number at each pixel of one row."""
    for part, num_rows in (("train", num_train), ("t10k", num_test)):
        digits = np.arange(num_rows) // 3 % 10
        images = np.full((num_rows, 28, 28), 0)
        images[:, 0, :10] = np.arange(10) + 1
        images[:, 1, 0] = 100 + digits
        write_idx(directory / f"{part}-images-idx3-ubyte.gz", images)
        write_idx(directory / f"{part}-labels-idx1-ubyte.gz", digits)


def write_omniglot(directory, num_classes=5, **changes):
    """Drawing ``d`` of class ``k`` has ``k`` in its first and ``d`` in its last pixel."""
    images = np.zeros((num_classes, 20, 28, 28), np.uint8)
    images[:, :, 0, 0] = np.arange(num_classes)[:, None]
    images[:, :, 27, 27] = np.arange(20)
    arrays = {
        "images": images,
        "character_alphabet": (np.arange(num_classes) >= 3).astype(np.uint8),
        "alphabet_names": np.array(["Greek", "Korean"]),
    }
    arrays = {name: a for name, a in (arrays | changes).items() if a is not None}
    np.savez_compressed(directory / "omniglot_28x28.npz", **arrays)


@pytest.fixture
def mnist(tmp_path):
    write_mnist(tmp_path)
    return load("mnist", tmp_path), load("mnist100", tmp_path)


def parts(data):
    return ((data.x_train, data.y_train), (data.x_test, data.y_test))


def test_mnist100_class_is_group_and_digit(mnist):
    for (_, digits), (_, classes) in zip(*map(parts, mnist), strict=True):
        np.testing.assert_array_equal(classes % 10, digits)
        assert classes.dtype == np.int32
    assert mnist[1].class_names[37] == "group3_digit7"
    assert mnist[1].num_categories == 100


def test_mnist100_groups_are_of_equal_size(mnist):
    for _, classes in parts(mnist[1]):
        assert (np.bincount(classes // 10) == len(classes) // 10).all()


def test_mnist100_permutes_the_pixels_of_each_group_in_its_own_way(mnist):
    found = np.zeros((10, 10), int)  # where each of ten pixels went, for each group
    for (x, _), (permuted, classes) in zip(*map(parts, mnist), strict=True):
        np.testing.assert_array_equal(np.sort(permuted, axis=1), np.sort(x, axis=1))
        for group in range(10):
            rows = permuted[classes // 10 == group]
            places = np.isclose(rows[:, None], x[0, :10, None]).argmax(axis=-1)
            assert (places == places[0]).all()
            if found[group].any():  # training and test rows have the same permutation
                np.testing.assert_array_equal(places[0], found[group])
            found[group] = places[0]
    assert len(np.unique(found, axis=0)) == 10


def test_mnist100_is_always_the_same(mnist, tmp_path):
    again = load("mnist100", tmp_path)
    for x, y in zip(mnist[1][:4], again[:4], strict=True):
        np.testing.assert_array_equal(x, y)
    assert (mnist[1].y_train[:8] // 10).tolist() == [0, 6, 6, 7, 7, 8, 4, 6]


def test_omniglot_takes_sixteen_drawings_of_each_class_to_train_on(tmp_path):
    write_omniglot(tmp_path)
    data = load("omniglot", tmp_path)
    assert np.bincount(data.y_train).tolist() == [16] * 5
    assert np.bincount(data.y_test).tolist() == [4] * 5
    pairs = []
    for x, y in parts(data):
        assert x.dtype == np.float32
        assert y.dtype == np.int32
        np.testing.assert_allclose(x[:, 0] * 255, y, rtol=1e-6)
        pairs += [(k, round(float(d))) for k, d in zip(y, x[:, 783] * 255, strict=True)]
    assert sorted(pairs) == [(k, d) for k in range(5) for d in range(20)]


def test_omniglot_drawings_held_out_differ_between_classes_but_not_between_calls(tmp_path):
    write_omniglot(tmp_path)
    held_out = np.round(load("omniglot", tmp_path).x_test[:, 783] * 255).astype(int).reshape(5, 4)
    assert held_out[0].tolist() == [0, 3, 12, 15]
    assert len(np.unique(held_out, axis=0)) > 1


def test_omniglot_classes_are_named_by_alphabet_and_number(tmp_path):
    write_omniglot(tmp_path)
    names = load("omniglot", tmp_path).class_names
    assert names == ("Greek/01", "Greek/02", "Greek/03", "Korean/01", "Korean/02")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"images": np.zeros((5, 19, 28, 28), np.uint8)}, r"uint8 of shape \(5, 19, 28, 28\)"),
        ({"images": np.zeros((5, 20, 28, 28))}, "array of float64 of shape"),
        ({"images": np.zeros((4, 20, 28, 28), np.uint8)}, r"\(4, 20, .* of shape \(5,\)"),
        ({"alphabet_names": np.array(["Greek"])}, "below 1, the number of `alphabet_names`"),
        ({"alphabet_names": None}, "npz file with arrays images, .*alphabet_names"),
    ],
)
def test_a_malformed_omniglot_file_is_an_error_that_names_it(tmp_path, changes, message):
    write_omniglot(tmp_path, **changes)
    with pytest.raises(ValueError, match=rf"omniglot_28x28\.npz must .*{message}"):
        load("omniglot", tmp_path)


def test_a_file_that_is_no_npz_is_not_said_to_need_pickles(tmp_path):
    (tmp_path / "omniglot_28x28.npz").write_bytes(b"not a file of arrays")
    with pytest.raises(ValueError, match=r"npz must be a complete npz file") as error:
        load("omniglot", tmp_path)
    assert "pickle" not in str(error.value) and error.value.__suppress_context__


def test_a_cut_omniglot_file_is_an_error_that_names_it(tmp_path):
    write_omniglot(tmp_path)
    path = tmp_path / "omniglot_28x28.npz"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"omniglot_28x28\.npz must be a complete npz file"):
        load("omniglot", tmp_path)
