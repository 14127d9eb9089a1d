# SPDX-License-Identifier: Apache-2.0
"""What messages and distributions under their wrappers are found to be."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.handlers import condition, seed, trace

from numpyro_largecat.handlers import sites

MASK = jnp.array([True, False, True])
NORMAL = dist.Normal(jnp.arange(3.0), 1)
MASKED = {
    "none": (NORMAL, True),
    "one": (NORMAL.mask(MASK), MASK),
    "all": (NORMAL.mask(False), False),
    "nothing hidden": (NORMAL.mask(True), True),
    "two": (NORMAL.mask(MASK).mask(~MASK), [False] * 3),
    "one under an expansion": (NORMAL.mask(MASK).expand([2, 3]), MASK),
}


@pytest.mark.parametrize(("fn", "expected"), MASKED.values(), ids=MASKED)
def test_masks_are_taken_off_and_joined(fn, expected):
    base, mask = sites.unmasked(fn)
    np.testing.assert_array_equal(mask, expected)
    assert base.batch_shape == fn.batch_shape
    log_prob = jnp.where(jnp.asarray(mask), base.log_prob(0.5), 0)
    np.testing.assert_allclose(fn.log_prob(0.5), log_prob)


def test_the_distribution_under_its_wrappers():
    normal = dist.Normal(0, 1)
    assert sites.base_distribution(normal.expand([2]).to_event(1).mask(True)) is normal
    assert sites.without_expand(normal.expand([2]).expand([3, 2])) is normal
    assert sites.without_expand(normal) is normal


def model():
    numpyro.param("p", jnp.zeros(3), constraint=dist.constraints.positive, event_dim=0, follow=7)
    with numpyro.handlers.scale(scale=2.0), numpyro.plate("rows", 3):
        numpyro.sample("w", dist.Normal(0, 1))
    numpyro.sample("k", dist.Bernoulli(0.5))
    numpyro.sample("y", dist.Normal(0, 1), obs=0.5)
    numpyro.deterministic("d", 1.0)


def test_what_a_site_is():
    found = trace(seed(model, 0)).get_trace()
    assert [name for name, site in found.items() if sites.is_latent(site)] == ["w", "k"]
    assert [name for name, site in found.items() if sites.is_observed(site)] == ["y"]
    assert list(sites.of_type("param", found)) == ["p"]
    assert sites.plates_of(found["w"]) == {"rows"}
    assert (sites.scale_of(found["w"]), sites.scale_of(found["y"])) == (2.0, 1.0)
    np.testing.assert_allclose(sites.log_prob_of(found["y"]), dist.Normal(0, 1).log_prob(0.5))
    options = sites.param_options(found["p"])
    assert (options.constraint, options.event_dim) == (dist.constraints.positive, 0)
    assert (options.update_rule, options.follow) == (None, 7)


def test_a_site_that_will_be_conditioned_on_is_not_latent():
    """``condition`` comes after the plates, which must know it before."""
    latent = {}

    class ask(numpyro.primitives.Messenger):
        def process_message(self, msg):
            if msg["type"] == "sample":
                latent[msg["name"]] = sites.is_continuous_latent(msg)

    seed(condition(ask(model), {"w": jnp.zeros(3)}), 0)()
    assert latent == {"w": False, "k": False, "y": False}
    seed(ask(model), 0)()
    assert latent == {"w": True, "k": False, "y": False}
