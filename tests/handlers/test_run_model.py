# SPDX-License-Identifier: Apache-2.0
"""Models run to learn their sites, at latent values that are chosen for them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import numpyro_largecat as lc
from numpyro_largecat.handlers.run_model import as_drawn, at_centre, at_values_of, sites_of
from numpyro_largecat.handlers.touched_rows import TouchedRows


def model(y=None, *, scale=1.0):
    with lc.class_plate("classes", 10, y, 2):
        table = numpyro.param("table", jnp.arange(10.0), event_dim=0)
        numpyro.sample("w", dist.LogNormal(3.0, scale))
    numpyro.deterministic("read", table)
    numpyro.sample("flat", dist.ImproperUniform(dist.constraints.positive, (), (2,)))


def test_by_default_nothing_latent_is_drawn():
    """Improper priors, from which nothing can be drawn, do not matter."""
    sites = sites_of(model, (np.array([4, 2]),), {"scale": 2.0})
    np.testing.assert_array_equal(sites["w"]["value"], np.ones(4))
    np.testing.assert_array_equal(sites["flat"]["value"], np.ones(2))
    assert sites["w"]["fn"].base_dist.scale == 2


def test_parameters_and_rows_are_those_that_are_given():
    touched = TouchedRows()
    labels = (np.array([4, 2]),)
    first = sites_of(model, labels, touched=touched)
    again = sites_of(
        model, labels, touched=touched, rng_key=1, params={"table": 2 * jnp.arange(10.0)}
    )
    rows = touched.plates["classes"].indices
    np.testing.assert_array_equal(first["read"]["value"], rows)
    np.testing.assert_array_equal(again["read"]["value"], 2.0 * rows)
    other = sites_of(model, labels, touched=TouchedRows(), rng_key=jax.random.key(1))
    assert set(other["read"]["value"].tolist()) != set(rows.tolist())


def test_the_centre_of_whole_numbers_is_transformed_as_a_float():
    """The mean of Normal(0, 1) is an integer, which a sigmoid refuses."""
    share = dist.TransformedDistribution(dist.Normal(0, 1), dist.transforms.SigmoidTransform())
    central = sites_of(lambda: numpyro.sample("share", share), around=at_centre)
    assert central["share"]["value"] == 0.5


def test_latent_values_are_drawn_central_or_those_of_another_run():
    def normal():
        numpyro.sample(
            "a", dist.TransformedDistribution(dist.Normal(2.0, 1), dist.transforms.ExpTransform())
        )
        numpyro.sample("b", dist.Normal(3.0, 1).expand([2]).to_event(1).mask(True))

    central = sites_of(normal, around=at_centre)
    np.testing.assert_allclose(central["a"]["value"], np.exp(2.0), rtol=1e-6)
    np.testing.assert_array_equal(central["b"]["value"], [3.0, 3.0])
    drawn = sites_of(normal, rng_key=3, around=as_drawn)
    assert drawn["b"]["value"].tolist() != [3.0, 3.0]
    replayed = sites_of(normal, around=at_values_of(drawn))
    np.testing.assert_array_equal(replayed["b"]["value"], drawn["b"]["value"])


def test_what_is_discrete_has_no_centre():
    with pytest.raises(NotImplementedError, match="site 'z' is discrete and has no centre"):
        sites_of(lambda: numpyro.sample("z", dist.Bernoulli(0.5)), around=at_centre)
