# SPDX-License-Identifier: Apache-2.0
"""Latent sites inside of a mask."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.handlers import mask
from numpyro.infer import Trace_ELBO, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoDelta, AutoNormal

import numpyro_largecat as lc

N, K = 6, 5
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(2, N))
IS_SEEN = np.array([True, True, False, True, False, False])


def model_of(is_inside):
    """Rows, of which some have no measurement."""

    def model(x, is_seen, rows=None):
        with lc.data_plate("data", N, rows):
            with mask(mask=is_seen if is_inside else True):
                z = numpyro.sample("z", dist.Normal(0, 1))
            with mask(mask=is_seen):
                numpyro.sample("x", dist.Normal(z, 1), obs=x)

    return model


def masked_guide(x, is_seen, rows=None):
    with lc.data_plate("data", N, rows) as rows:
        loc = numpyro.param("loc", jnp.zeros(N), event_dim=0)
        with mask(mask=is_seen):
            numpyro.sample("z", dist.Normal(loc, 1))


def svi_of(model, guide, loss=None):
    return lc.SubsampledSVI(model, guide, optax.adam(0.1), loss or TraceMeanField_ELBO())


@pytest.mark.parametrize("guide", [AutoNormal, lc.AutoRowNormal])
@pytest.mark.parametrize("loss", [Trace_ELBO(), lc.ImportanceWeighted_ELBO("data", 2)])
def test_a_guide_that_a_mask_leaves_without_a_prior_is_refused(guide, loss):
    model = model_of(True)
    with pytest.raises(ValueError, match=r"'z' is inside of a mask .* Put what is observed alone"):
        svi_of(model, guide(model), loss).init(jax.random.key(0), X, IS_SEEN, np.arange(N))


def test_errors_inside_of_a_mask_are_refused():
    """Their guide draws those of all observations."""

    def model(x, is_seen, y=None, rows=None):
        with lc.class_plate("classes", K, y, 2) as classes:
            w = numpyro.sample("w", dist.Normal(0, 1))
        with lc.data_plate("data", N, rows) as rows, mask(mask=is_seen):
            error = numpyro.sample("e", dist.Gumbel())
            choice = lc.AugmentedCategorical(x[:, None] * w, classes, "gumbel", error=error)
            numpyro.sample("y", choice, obs=y)

    svi = svi_of(model, AutoNormal(model), Trace_ELBO())
    with pytest.raises(ValueError, match="latent site 'e' is inside of a mask"):
        svi.init(jax.random.key(0), X, IS_SEEN, np.arange(N) % K, np.arange(N))


@pytest.mark.parametrize(
    ("is_inside", "guide_of"),
    [
        pytest.param(False, AutoNormal, id="observations alone"),
        pytest.param(True, lambda _: masked_guide, id="guide masked too"),
        pytest.param(True, AutoDelta, id="points"),
    ],
)
def test_masks_that_do_no_harm_are_taken(is_inside, guide_of):
    """The exact evidence of what is seen is above the ELBO, also after many steps."""
    model = model_of(is_inside)
    svi = svi_of(model, guide_of(model))
    result = svi.run(jax.random.key(0), 300, X, IS_SEEN, np.arange(N), progress_bar=False)
    assert np.isfinite(result.losses).all()
    if guide_of is AutoNormal:
        exact = dist.Normal(0, 2**0.5).log_prob(X[IS_SEEN]).sum()
        # Six standard errors of the mean of 100 losses.
        assert -result.losses[-100:].mean() < exact + 0.6 * result.losses[-100:].std()
