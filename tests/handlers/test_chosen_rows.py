# SPDX-License-Identifier: Apache-2.0
"""Plates that hold the rows which a handler names, or those that a prediction reads."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import numpyro_largecat as lc
from numpyro_largecat.choices.choice_distribution import is_choice
from numpyro_largecat.handlers.chosen_rows import (
    RowsNeeded,
    hold_rows,
    only_read,
    without_training_rows,
)
from numpyro_largecat.handlers.run_model import as_drawn, sites_of
from numpyro_largecat.handlers.touched_rows import TouchedRows

PLATES = {
    "all classes": lambda: lc.class_plate("rows", 10),
    "drawn classes": lambda: lc.class_plate("rows", 10, np.array([4, 2]), 3),
    "all rows": lambda: lc.data_plate("rows", 10),
    "given rows": lambda: lc.data_plate("rows", 10, np.array([4, 2])),
    "plain": lambda: numpyro.plate("rows", 10),
    "plain, some": lambda: numpyro.plate("rows", 10, subsample_size=3),
}
plates = pytest.mark.parametrize("plate", PLATES.values(), ids=PLATES)


def model_of(plate):
    def model():
        with plate():
            table = numpyro.param("table", 10.0 * jnp.arange(10), event_dim=0)
            numpyro.sample("w", dist.Normal(0, 1))
        numpyro.deterministic("read", table)

    return model


@plates
def test_any_plate_holds_the_rows_that_are_named(plate):
    def values(rows):
        def around(fn):
            return hold_rows(fn, rows={"rows": rows})

        sites = sites_of(model_of(plate), touched=TouchedRows(), around=around)
        return sites["read"]["value"], sites["w"]["value"]

    read, w = jax.jit(values)(np.array([7, 1, 8]))
    assert read.tolist() == [70, 10, 80]
    assert w.shape == (3,)


@plates
@pytest.mark.some_cases(1)
def test_other_plates_hold_what_they_would(plate):
    alone = sites_of(model_of(plate), touched=TouchedRows())
    other = {"others": jnp.array([0])}
    sites = sites_of(
        model_of(plate), touched=TouchedRows(), around=lambda fn: hold_rows(fn, rows=other)
    )
    assert sites["w"]["value"].shape == alone["w"]["value"].shape


@pytest.mark.parametrize("also", [None, [9]])
def test_a_class_plate_that_is_read_holds_its_labels_and_what_is_asked_for(also):
    asked = {"rows": jnp.array(also)} if also else None

    def around(fn):
        return only_read(fn, is_choice=is_choice, also=asked)

    sites = sites_of(model_of(PLATES["drawn classes"]), touched=TouchedRows(), around=around)
    assert set(sites["read"]["value"][:-1].tolist()) == {20, 40, *(90 for _ in also or [])}
    assert np.isnan(sites["w"]["scale"][-1])


def test_choices_that_are_read_are_not_drawn_and_other_sites_are():
    def model():
        numpyro.sample("y", lc.UtilityCategorical(jnp.zeros((2, 5))))
        numpyro.sample("z", dist.Normal(0, 1))

    sites = sites_of(
        model, rng_key=1, around=lambda fn: only_read(as_drawn(fn), is_choice=is_choice)
    )
    assert sites["y"]["value"].tolist() == [0, 0]
    assert sites["z"]["value"] != 0


def test_rows_that_the_fit_has_not_seen_have_no_latent_values():
    def around(fn):
        return without_training_rows(fn, is_choice=is_choice)

    with pytest.raises(RowsNeeded, match="site 'table' has a value for each row of plate 'rows'"):
        sites_of(model_of(PLATES["all rows"]), around=around)
    sites = sites_of(model_of(PLATES["given rows"]), around=around)
    assert sites["read"]["value"].tolist() == [40, 20]


@pytest.mark.parametrize("negatives", ["batch", "shared", "own"])
def test_labels_that_are_read_alone_are_a_kind_of_their_own(negatives):
    """They are no chunk: a label is found among them, but no sum over classes is known."""
    labels = np.array([4, 2, 4])

    def model():
        own = lc.class_plate("rows", 10, labels, 3, negatives=negatives).classes
        return own, lc.class_plate("rows", 10, None, 3).classes

    classes, whole = only_read(model, is_choice=is_choice)()
    assert (classes.kind, whole.kind) == ("labels", "full")
    assert classes.is_part and not whole.is_part
    assert classes.holds(labels).all() and np.isnan(classes.weights).any()
