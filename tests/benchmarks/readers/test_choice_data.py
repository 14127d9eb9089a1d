# SPDX-License-Identifier: Apache-2.0
"""Readers of discrete choice data; on the real files, published estimates come out."""

from __future__ import annotations

import gzip

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import numpyro_largecat as lc
from benchmarks.readers import ChoiceData, read_modecanada, read_swissmetro
from tests.data_files import real_data

SWISSMETRO = {  # one row of the file, and its order of columns
    **{"GROUP": 2, "SURVEY": 0, "SP": 1, "ID": 5, "PURPOSE": 1, "FIRST": 0, "TICKET": 1, "WHO": 1},
    **{"LUGGAGE": 1, "AGE": 3, "MALE": 1, "INCOME": 2, "GA": 0, "ORIGIN": 2, "DEST": 1},
    **{"TRAIN_AV": 1, "CAR_AV": 1, "SM_AV": 1, "TRAIN_TT": 112, "TRAIN_CO": 48, "TRAIN_HE": 120},
    **{"SM_TT": 63, "SM_CO": 52, "SM_HE": 20, "SM_SEATS": 1, "CAR_TT": 117, "CAR_CO": 65},
    "CHOICE": 2,
}
CANADA = """,case,alt,choice,dist,cost,ivt,ovt,freq,income,urban,noalt
1,9,train,0,83,28.25,50,66,4,45,0,2
2,9,car,1,83,15.77,61,0,0,45,0,2
3,4,car,0,300,80,200,0,0,70,1,4
4,4,air,1,300,120,60,70,20,70,1,4
5,4,bus,0,300,30,250,40,3,70,1,4
6,4,train,0,300,60,220,50,5,70,1,4
"""


def swissmetro(tmp_path, *changes, separator=","):
    """A file with one row for each of ``changes``."""
    rows = [SWISSMETRO | change for change in changes]
    lines = [separator.join(map(str, row)) for row in (SWISSMETRO, *(r.values() for r in rows))]
    path = tmp_path / "swissmetro.csv"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def canada(tmp_path, text):
    path = tmp_path / "modecanada.csv.gz"
    path.write_bytes(gzip.compress(text.encode()))
    return path


def check(data):
    """What holds for every data set."""
    assert isinstance(data, ChoiceData)
    shape = (len(data.choice), len(data.alternative_names))
    assert data.features.shape == (*shape, len(data.feature_names))
    assert data.available.shape == shape
    assert data.covariates.shape == (shape[0], len(data.covariate_names))
    assert data.person.shape == shape[:1]
    assert [array.dtype for array in data[:5]] == ["f4", bool, "i4", "f4", "i4"]
    assert data.available[np.arange(shape[0]), data.choice].all()
    assert (data.features[~data.available] == 0).all()


@pytest.mark.parametrize("separator", [",", "\t"])
def test_swissmetro_units_and_names(tmp_path, separator):
    data = read_swissmetro(swissmetro(tmp_path, {}, separator=separator))
    check(data)
    assert data.feature_names == ("time", "cost", "headway", "seats")
    expected = [[1.12, 0.48, 1.2, 0], [0.63, 0.52, 0.2, 1], [1.17, 0.65, 0, 0]]
    np.testing.assert_allclose(data.features[0], expected, rtol=1e-6)
    assert data.alternative_names[data.choice[0]] == "swissmetro"
    assert data.covariate_names == ("first", "luggage", "age", "male", "income", "ga")
    assert data.covariates.tolist() == [[0, 1, 3, 1, 2, 0]]
    assert data.person.tolist() == [5]


def test_swissmetro_keeps_known_choices_of_commuting_and_business_trips(tmp_path):
    changes = [{"PURPOSE": p, "ID": p} for p in range(1, 10)] + [{"CHOICE": 0, "ID": 0}]
    assert read_swissmetro(swissmetro(tmp_path, *changes)).person.tolist() == [1, 3]


def test_season_ticket_covers_train_and_swissmetro(tmp_path):
    data = read_swissmetro(swissmetro(tmp_path, {"GA": 1}))
    np.testing.assert_allclose(data.features[0, :, 1], [0, 0, 0.65])


@pytest.mark.parametrize(
    ("change", "available"),
    [
        ({"CAR_AV": 0}, [True, True, False]),
        ({"TRAIN_AV": 0}, [False, True, True]),
        ({"SP": 0}, [False, True, False]),
        ({"SM_AV": 0, "CHOICE": 3}, [True, False, True]),
    ],
)
def test_swissmetro_availability(tmp_path, change, available):
    data = read_swissmetro(swissmetro(tmp_path, change))
    check(data)
    assert data.available[0].tolist() == available


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"CHOICE": 4}, "available alternative, 1 to 3; got 4"),
        ({"CHOICE": 1.5}, "available alternative, 1 to 3; got 1.5"),
        ({"CHOICE": 3, "CAR_AV": 0}, "available alternative, 1 to 3; got 3"),
        ({"CAR_TT": "long"}, "a number in column `CAR_TT`; got 'long'"),
        ({"CAR_TT": "nan"}, "a number in column `CAR_TT`; got 'nan'"),
        ({"CAR_TT": "1e39"}, "a number in column `CAR_TT`; got '1e39'"),
        ({"CAR_TT": "1_0"}, "a number in column `CAR_TT`; got '1_0'"),
        ({"CAR_TT": "٣"}, "a number in column `CAR_TT`; got '٣'"),
        ({"ID": 1.5}, "a whole number up to 2147483647 in column `ID`; got '1.5'"),
        ({"ID": 3_000_000_000}, "a whole number up to 2147483647 in column `ID`; got '3000000000'"),
        ({"CAR_TT": "1" * 200_000}, "cells that Python's csv can read; it says: field larger"),
        ({"CAR_TT": "1,2"}, "28 columns, as in the header; got 29"),
    ],
)
def test_bad_swissmetro_row_is_an_error_with_file_and_line(tmp_path, change, message):
    path = swissmetro(tmp_path, {}, {"PURPOSE": 9}, change)
    with pytest.raises(ValueError, match=rf"swissmetro\.csv, line 4: need .*{message}"):
        read_swissmetro(path)


def test_missing_columns_are_an_error_that_names_them(tmp_path):
    path = canada(tmp_path, CANADA)
    with pytest.raises(ValueError, match="line 1: need a header with columns PURPOSE, CHOICE, SP"):
        read_swissmetro(path)


def test_modecanada_reads_cases_with_all_alternatives(tmp_path):
    data = read_modecanada(canada(tmp_path, CANADA))
    check(data)
    assert data.available.tolist() == [[True] * 4]
    assert data.alternative_names == ("train", "air", "bus", "car")
    assert data.feature_names == ("cost", "freq", "ivt", "ovt")
    expected = [[60, 5, 220, 50], [120, 20, 60, 70], [30, 3, 250, 40], [80, 0, 200, 0]]
    assert data.features[0].tolist() == expected
    assert data.choice.tolist() == [1]
    assert dict(zip(data.covariate_names, data.covariates[0], strict=True)) == {
        "dist": 300,
        "income": 70,
        "urban": 1,
    }


def test_modecanada_with_all_cases_says_what_is_available(tmp_path):
    data = read_modecanada(canada(tmp_path, CANADA), all_cases=True)
    check(data)
    assert data.person.tolist() == [9, 4]
    assert data.available.tolist() == [[True, False, False, True], [True] * 4]
    assert data.choice.tolist() == [3, 1]


@pytest.mark.parametrize(
    ("old", "new", "line", "message"),
    [
        ("9,car,1", "9,ship,1", 3, "`alt` to be one of train, air, bus, car; got 'ship'"),
        ("9,car,1", "9,car,0", 2, "one row with `choice` 1 in the case that begins here"),
        ("4,bus,0", "4,bus,1", 4, "one row with `choice` 1 in the case that begins here"),
        ("4,bus,0", "4,air,0", 5, "at most once in a case; got air again"),
        ("4,bus,0", "4,bus,?", 6, "a number in column `choice`; got '?'"),
    ],
)
def test_bad_modecanada_row_is_an_error_with_file_and_line(tmp_path, old, new, line, message):
    path = canada(tmp_path, CANADA.replace(old, new))
    with pytest.raises(ValueError) as error:
        read_modecanada(path)
    assert f"modecanada.csv.gz, line {line}: need " in str(error.value)
    assert message in str(error.value)


def test_real_sizes():
    data = read_swissmetro(real_data("choice/swissmetro.csv.gz"))
    check(data)
    assert (len(data.choice), len(set(data.person))) == (6768, 752)
    path = real_data("choice/modecanada.csv.gz")
    four, every = read_modecanada(path), read_modecanada(path, all_cases=True)
    check(four)
    check(every)
    assert four.available.all()
    assert (len(four.choice), len(every.choice)) == (2779, 4324)


def maximum_likelihood(design, available, choice):
    """Coefficients and log likelihood of the logit, by Newton's method from 0."""
    design = jnp.asarray(design, float)

    def log_likelihood(b):
        utilities = jnp.where(available, design @ b, -jnp.inf)
        return lc.UtilityCategorical(utilities).log_prob(choice).sum()

    def step(_, b):
        gradient = jax.grad(log_likelihood)(b)
        return b - jnp.linalg.solve(jax.hessian(log_likelihood)(b), gradient)

    b = jax.lax.fori_loop(0, 10, step, jnp.zeros(design.shape[-1]))
    return b, float(log_likelihood(b))


def constants(num_rows, num_alternatives, without):
    """Constants of all alternatives but one, shape (N, J, J - 1)."""
    eye = np.delete(np.eye(num_alternatives), without, axis=1)
    return np.broadcast_to(eye, (num_rows, *eye.shape))


@pytest.mark.slow
def test_swissmetro_logit_has_the_published_estimates(x64):
    """ASC_TRAIN, ASC_CAR, B_TIME, B_COST and the log likelihood of Biogeme's 01logit."""
    data = read_swissmetro(real_data("choice/swissmetro.csv.gz"))
    asc = constants(len(data.choice), 3, without=1)
    design = np.concatenate([asc, data.features[..., :2]], axis=-1)
    b, value = maximum_likelihood(design, data.available, data.choice)
    np.testing.assert_allclose(b, [-0.701187, -0.154633, -1.27786, -1.08379], atol=1e-5)
    assert abs(value - -5331.252) < 1e-3


@pytest.mark.slow
def test_modecanada_logit_has_the_published_estimates(x64):
    """Estimates of R's ``mlogit(choice ~ cost + freq + ovt | income | ivt)``, noalt == 4.

    They are the intercepts of train, bus and car, cost, freq, ovt, income of train, bus and car,
    and ivt of train, air, bus and car.
    """
    data = read_modecanada(real_data("choice/modecanada.csv.gz"))
    cost, freq, ivt, ovt = np.split(data.features.astype(float), 4, axis=-1)
    asc = constants(len(data.choice), 4, without=1)
    income = data.covariates[:, data.covariate_names.index("income"), None, None]
    design = np.concatenate([asc, cost, freq, ovt, income * asc, ivt * np.eye(4)], axis=-1)
    b, value = maximum_likelihood(design, data.available, data.choice)
    published = [
        *(3.2741952, 0.6983743, 1.8441138, -0.0333389, 0.0925297, -0.0430036),
        *(-0.0381466, -0.0890869, -0.0279930, -0.0014504, 0.0595097, -0.0067837, -0.0064603),
    ]
    np.testing.assert_allclose(b, published, rtol=1e-4)
    assert abs(value - -1874.3) < 0.05
