# SPDX-License-Identifier: Apache-2.0
"""Batches that are read while steps run are those of arrays in memory, bit by bit."""

from __future__ import annotations

import threading

import h5py
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.sparse
import zarr
from numpyro.infer import TraceMeanField_ELBO

import numpyro_largecat as lc
from numpyro_largecat.svi import streamed_batches
from tests.models import hierarchical, make_data, point_guide

KEY = jax.random.key(0)
X, Y = (np.asarray(a) for a in make_data())
QUIET = {"progress_bar": False}


class Items:
    """A dataset that gives one row at a time."""

    def __init__(self, array):
        self.array = array

    def __len__(self):
        return len(self.array)

    def __getitem__(self, i):
        assert isinstance(i, int)
        return self.array[i]


def memory_map(array, path):
    np.save(path / "array.npy", array)
    return np.load(path / "array.npy", mmap_mode="r")


def hdf5(array, path):
    file = h5py.File(path / "array.h5", "w")
    return file.create_dataset("array", data=array)


SOURCES = {
    "array": lambda array, path: array,
    "memory map": memory_map,
    "hdf5": hdf5,
    "zarr": lambda array, path: zarr.array(array, chunks=(3, *array.shape[1:])),
    "shards": lambda array, path: lc.data.Shards([array[:7], array[7:30], array[30:]]),
    "list": lambda array, path: list(array),
    "items": lambda array, path: Items(array),
    "jax": lambda array, path: jnp.asarray(array),
}


def svi_of(**options):
    return lc.SubsampledSVI(
        hierarchical(4), point_guide, optax.adam(0.05), TraceMeanField_ELBO(), **options
    )


@pytest.fixture(scope="module")
def svi():
    """One SVI object, each of whose fits starts by ``init``: its programs are kept."""
    return svi_of()


@pytest.fixture(params=[1, 7, 100])
def in_stack(request, monkeypatch):
    """Batches that are read at once."""
    monkeypatch.setattr(streamed_batches, "MOST_IN_STACK", request.param)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.some_cases(1)
def test_batches_are_those_of_arrays(source, tmp_path):
    """Of three passes, with a last batch that others' rows fill up."""
    streamed = lc.StreamedBatches(SOURCES[source](X, tmp_path), Y, batch_size=7, seed=3)
    arrays = lc.ArrayBatches(X, Y, batch_size=7, seed=3)
    for step in range(18):
        for got, want in zip(streamed.batch(step), arrays.batch(step), strict=True):
            np.testing.assert_array_equal(got, want, strict=True)


def test_tuples_of_a_source_are_an_argument_for_each_value():
    """As a dataset of PyTorch or a source of Grain gives rows; beside a source of arrays."""
    z = np.arange(len(X))
    pairs = Items(list(zip(X, map(int, Y), strict=True)))
    streamed = lc.StreamedBatches(pairs, z, batch_size=7)
    arrays = lc.ArrayBatches(X, Y, z, batch_size=7)
    for got, want in zip(streamed.batch(2), arrays.batch(2), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.usefixtures("x64")
def test_types_follow_the_setting_of_the_caller():
    streamed = lc.StreamedBatches(np.arange(6.0), batch_size=2)
    stacks = streamed.stacks(0, 10)
    assert next(stacks).arrays[0].dtype == jnp.float64
    stacks.close()


@pytest.mark.usefixtures("in_stack")
@pytest.mark.slow
def test_a_fit_is_that_from_arrays(svi):
    streamed = lc.StreamedBatches(X, Y, batch_size=8)
    arrays = lc.ArrayBatches(X, Y, batch_size=8)
    got, want = (svi.run(KEY, 30, batches=b, **QUIET) for b in (streamed, arrays))
    np.testing.assert_allclose(got.losses, want.losses, rtol=1e-5)  # of programs compiled apart
    for name, values in want.params.items():
        np.testing.assert_allclose(got.params[name], values, atol=1e-5)


@pytest.mark.slow
def test_a_fit_goes_on_from_a_state_and_from_a_checkpoint(svi, tmp_path):
    streamed = lc.StreamedBatches(X, Y, batch_size=8)
    whole = svi.run(KEY, 30, batches=streamed, **QUIET)
    first = svi.run(KEY, 13, batches=streamed, **QUIET)
    rest = svi.run(KEY, 17, batches=streamed, init_state=first.state, **QUIET)
    np.testing.assert_array_equal(np.r_[first.losses, rest.losses], whole.losses)
    saved = {"checkpoints": lc.Checkpoints(tmp_path, every_steps=5), "resume": True}
    svi.run(KEY, 13, batches=streamed, **saved, **QUIET)
    resumed = svi.run(KEY, 30, batches=streamed, **saved, **QUIET)
    np.testing.assert_array_equal(resumed.losses, whole.losses)


@pytest.mark.usefixtures("in_stack")
@pytest.mark.some_cases(1)
def test_a_bad_row_ends_the_fit_at_its_step(svi):
    bad = X.copy()
    bad[int(lc.StreamedBatches(X, batch_size=8).batch(2)[1][0]), 1] = np.nan
    streamed = lc.StreamedBatches(bad, Y, batch_size=8)
    with pytest.warns(RuntimeWarning, match=r"step 2 of 30: .*`x` must be finite.*nan"):
        result = svi.run(KEY, 30, batches=streamed, **QUIET)
    assert np.isnan(result.losses).tolist() == [False, False, True]


def test_what_a_source_raises_has_the_fit_so_far(svi):
    class Failing(Items):
        def __getitem__(self, i):
            if len(read) > 50:
                raise OSError("the disk is gone")
            read.append(i)
            return self.array[i]

    read = []
    streamed = lc.StreamedBatches(Failing(X), Y, batch_size=8)
    streamed.num_in_stack = 1
    with pytest.raises(OSError, match="the disk is gone") as error:
        svi.run(KEY, 30, batches=streamed, **QUIET)
    assert len(error.value.result_so_far.losses) > 0
    for thread in threading.enumerate():
        if thread.name.startswith("batches"):
            thread.join(timeout=10)
            assert not thread.is_alive()


def test_no_thread_is_left(svi):
    svi.run(KEY, 3, batches=lc.StreamedBatches(X, Y, batch_size=8), **QUIET)
    for thread in threading.enumerate():
        if thread.name.startswith("batches"):
            thread.join(timeout=10)
            assert not thread.is_alive()


def test_only_the_batches_of_the_fit_are_read(svi):
    class Counting(Items):
        def __getitem__(self, i):
            read.append(i)
            return self.array[i]

    read = []
    streamed = lc.StreamedBatches(Counting(X), Y, batch_size=8)
    svi.run(KEY, 3, batches=streamed, **QUIET)
    found, read = set(read), []
    assert found == {0}.union(*(streamed.batch(t)[2].tolist() for t in range(3)))


def test_rows_of_another_type_are_refused(svi):
    class Mixed(Items):
        def __getitem__(self, i):
            return self.array[i] if i < 30 else self.array[i].astype(np.float64)

    with pytest.raises(
        TypeError, match="array 0 of a batch must have rows of one dtype; row 0 has float32"
    ):
        svi.run(KEY, 10, batches=lc.StreamedBatches(Mixed(X), Y, batch_size=8), **QUIET)


def test_large_batches_are_read_one_by_one():
    """16 MB together, or one."""
    wide = np.broadcast_to(np.zeros(1, np.float32), (100, 10**6))
    assert lc.StreamedBatches(wide, batch_size=50).num_in_stack == 1
    assert lc.StreamedBatches(wide[:, :1000], batch_size=50).num_in_stack == 83


@pytest.mark.parametrize(
    ("sources", "error", "match"),
    [
        ((), ValueError, "at least one source"),
        ((X, Y[:5]), ValueError, r"same number of rows; got \[40, 5\]"),
        ((X, iter([1, 2])), TypeError, "source 1 must have a length and rows by number"),
        (({"x": X},), TypeError, "source 0 must have a length"),
        ((scipy.sparse.csr_array(X),), TypeError, "CsrRows"),
        ((["a", "b"] * 4,), TypeError, "array 0 of a batch must hold real numbers; got <U1"),
        (
            (np.arange(8) * 1j,),
            TypeError,
            "array 0 of a batch must hold real numbers; got complex128",
        ),
        ((X[:8], [{"y": 1, "x": 2}] * 8), TypeError, r"source 1 .*dicts of \['x', 'y'\]. Map them"),
        ((np.zeros((0, 2)),), ValueError, "source 0 must have a row"),
    ],
)
def test_what_is_no_source_is_refused(sources, error, match):
    with pytest.raises(error, match=match):
        lc.StreamedBatches(*sources, batch_size=4)


def test_batches_larger_than_the_data_are_refused():
    with pytest.raises(ValueError, match="`batch_size` must be at most 40, the number of rows"):
        lc.StreamedBatches(X, batch_size=41)
