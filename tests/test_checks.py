# SPDX-License-Identifier: Apache-2.0
"""Ids that 32 bits cannot hold are refused, or NaN; checks of large data take little memory."""

from __future__ import annotations

import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import numpyro_largecat as lc
from numpyro_largecat._checks import check_finite, check_no_overflow
from numpyro_largecat._conversions import as_ids
from numpyro_largecat.svi.batch_checks import RowLooks, check_batches

LARGE = 2_999_999_999  # int32 wraps it to -1_294_967_297
MOST = 2**31 - 1


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (np.array([LARGE, 2**32 + 5, 7]), [-1, -1, 7]),
        (np.array([LARGE, 7], np.uint32), [-1, 7]),
        (np.array([2**63 + 5, 7], np.uint64), [-1, 7]),
        ([MOST, MOST + 1], [MOST, -1]),
        (LARGE, -1),
        (np.array([200, 7], np.uint8), [200, 7]),
        (np.array([-3, 7], np.int8), [-3, 7]),
    ],
)
def test_ids_keep_their_value_or_become_none(values, expected, x64):
    with jax.enable_x64(x64):
        ids = as_ids(values)
        assert ids.dtype == jnp.int32 and ids.tolist() == expected
        if x64:  # without it the caller's `jit` has cut them off
            assert jax.jit(as_ids)(np.asarray(values)).tolist() == expected


IMPLICIT = lc.double_sum.ImplicitSGD(1.0)
SIZES = {
    "class_plate": lambda size: lc.class_plate("k", size, jnp.array([1]), 2),
    "a full class_plate": lambda size: lc.class_plate("k", size),
    "data_plate": lambda size: lc.data_plate("n", size, jnp.array([1])),
    "fit_double_sum": lambda size: lc.fit_double_sum(
        jax.random.key(0), jnp.eye(2), jnp.arange(2), size, IMPLICIT
    ),
    "TopLCategorical": lambda size: lc.TopLCategorical(jnp.arange(2), jnp.zeros(2), size),
}


@pytest.mark.parametrize("what", SIZES)
def test_sizes_that_32_bits_cannot_hold_are_refused(what):
    with numpyro.handlers.seed(rng_seed=0), pytest.raises(ValueError, match="at most 2147483647"):
        SIZES[what](2**31)


def test_the_largest_size_works():
    """Classes and rows up to the last one, whose ids are int32."""
    labels = jnp.array([MOST - 1, 0, 5])
    with numpyro.handlers.seed(rng_seed=0):
        plate = lc.class_plate("k", MOST, labels, 4)
        rows = lc.data_plate("n", MOST, [0, MOST - 1]).rows
    drawn = np.asarray(plate.classes.indices)
    assert drawn[:3].tolist() == [0, 5, MOST - 1] and len(set(drawn)) == 7 and drawn.min() >= 0
    assert plate.classes.weights.sum() == pytest.approx(MOST, rel=1e-6)
    assert rows.indices.tolist() == [0, MOST - 1]


IDS = {
    "int64": np.array([1, LARGE]),
    "uint32": np.array([1, LARGE], np.uint32),
    "list": [1, LARGE],
    "wraps to a row": np.array([1, 2**32 + 3]),
}


@pytest.mark.parametrize("ids", IDS)
def test_large_ids_and_labels_are_refused_as_they_are(ids):
    """Not as what 32 bits make of them."""
    shown = str(np.asarray(IDS[ids])[1])
    uses = [
        lambda ids: lc.data_plate("n", MOST, ids),
        lambda ids: lc.class_plate("k", 10, ids, 2),
        lambda ids: lc.HeadProposal(ids),
        lambda ids: lc.UtilityCategorical(jnp.zeros(10)).log_prob(ids),
        lambda ids: lc.fit_double_sum(jax.random.key(0), np.eye(2), ids, 9, IMPLICIT),
    ]
    for use in uses:
        with pytest.raises(ValueError, match=f"got {shown} at position 1"):
            use(IDS[ids])


@pytest.mark.parametrize("dtype", [jnp.uint32, jnp.int64, jnp.uint64])
@pytest.mark.some_cases(1)
def test_traced_ids_of_wide_types_are_right_or_nan(dtype):
    """An id that 32 bits would wrap to row 3 makes the log density NaN, as any out of range."""

    def density(ids):
        def model():
            with lc.class_plate("k", 10, ids, 2) as classes:
                b = numpyro.deterministic("b", classes.indices * 0.1)
            with lc.data_plate("n", 20, ids):
                numpyro.sample("y", lc.UtilityCategorical(b[None], classes), obs=ids)

        model = numpyro.handlers.seed(model, 0)
        return numpyro.infer.util.log_density(model, (), {}, {})[0]

    with jax.enable_x64(True):
        good = jax.jit(density)(jnp.array([3, 4], jnp.int32))
        assert jax.jit(density)(jnp.array([3, 4], dtype)) == good
        wrapped = 2**32 - 3 if dtype == jnp.uint32 else 2**32 + 3
        assert jnp.isnan(jax.jit(density)(jnp.array([3, wrapped], dtype)))
        rows = jax.jit(lambda ids: lc.data_plate("n", 20, ids).rows.indices)
        assert rows(jnp.array([3, wrapped], dtype)).tolist() == [3, -1]


def test_a_proposal_that_returns_large_ids_makes_the_weights_nan():
    class Far:
        def draw(self, rng_key, labels, num_categories, num_sampled):
            return np.array([2**32 + 3]), np.ones(1)

    with numpyro.handlers.seed(rng_seed=0):
        plate = lc.class_plate("k", 10, jnp.array([1]), 1, proposal=Far())
    assert jnp.isnan(plate.classes.weights).any()


def test_a_stream_names_the_argument_whose_ids_are_too_large():
    """NumPy's int64 would lose its upper half on the way into a compiled step."""

    def model(x, rows):
        with lc.data_plate("n", MOST, rows):
            numpyro.sample("x", dist.Normal(numpyro.param("m", 0.0), 1), obs=x)

    svi = lc.SubsampledSVI(
        model, lambda *args: None, numpyro.optim.SGD(0.1), numpyro.infer.Trace_ELBO()
    )
    far = np.ones(2, np.float32), np.array([1, LARGE])
    with pytest.raises(ValueError, match=r"`rows` holds integers in \[1, 2999999999\]"):
        svi.init(jax.random.key(0), *far)


def peak_bytes(use):
    """Most memory that NumPy and Python had at once."""
    tracemalloc.start()
    try:
        use()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("asarray", [np.asarray, jnp.asarray])
def test_looking_for_bad_numbers_copies_no_data(asarray):
    """A few megabytes for data of 64, and the message of a whole look."""
    x = np.zeros((2**18, 64), np.float32)
    x[200_003, 7], x[-1, 0] = np.nan, np.inf
    x = asarray(x)
    with pytest.raises(ValueError, match=r"nan at position \(200003, 7\), and 2 of 16777216 are"):
        check_finite([("x", x)])
    assert peak_bytes(lambda: check_finite([("x", x[:200_000])])) < 8e6


def test_batches_check_integers_without_a_copy():
    y = np.arange(10**6)
    y[70] = 2**40
    with pytest.raises(ValueError, match=r"array 0 holds integers in \[0, 1099511627776\]"):
        lc.ArrayBatches(y, batch_size=5)
    y[70] = 70
    assert peak_bytes(lambda: check_no_overflow([("y", y)])) < 1e5
    with pytest.raises(ValueError, match=r"array 0 holds integers in \[-2147483649, 0\]"):
        lc.ArrayBatches(np.array([0, -(2**31) - 1]), batch_size=1)


def labelled(x, y, rows):
    with lc.class_plate("classes", 50, y, num_sampled=3) as classes:
        b = numpyro.sample("b", dist.Normal(0, 1))
    with lc.data_plate("data", 20_000, rows) as rows:
        lc.sample_choice("y", x[:, :1] * b, classes=classes, rows=rows, obs=y)


def test_looking_at_labels_of_all_rows_takes_memory_for_a_few_of_them():
    """Beside its arguments the compiled program has a few numbers for each chunk."""
    batches = lc.ArrayBatches(np.zeros((20_000, 8)), np.arange(20_000) % 50, batch_size=100)
    check_batches(labelled, batches, (), {})
    looks = RowLooks(labelled, batches, (), {})
    program = looks.look.lower(jnp.arange(looks.num_chunks)).compile()
    memory = program.memory_analysis()
    assert memory.argument_size_in_bytes >= 20_000 * 4  # the labels, which are no constant
    assert memory.temp_size_in_bytes + memory.output_size_in_bytes < 20_000


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (19_999, 50, r"\[0, 50\); got 50 at position 19999, and 1 of 20000 are not"),
        (slice(150, 250), -1, "got -1 at position 150, and 100 of 20000 are not"),
    ],
)
def test_bad_labels_are_counted_in_all_chunks(place, value, message):
    y = np.arange(20_000) % 50
    y[place] = value
    batches = lc.ArrayBatches(np.zeros((20_000, 8)), y, batch_size=99)
    with pytest.raises(ValueError, match=message):
        check_batches(labelled, batches, (), {})
