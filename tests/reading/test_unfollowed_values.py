# SPDX-License-Identifier: Apache-2.0
"""A diagnosis names latent values that move the utilities and that u does not follow."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer import TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoDelta, AutoNormal

import numpyro_largecat as lc
from numpyro_largecat.reading.unfollowed_values import unfollowed_values
from tests.models import normals_of

NUM_USERS, K, D, N = 6, 30, 2, 60
RNG = np.random.default_rng(0)
USERS, Y = RNG.integers(0, NUM_USERS, N), RNG.integers(0, K, N)
COUNTS = lc.EntityCounts.of(NUM_USERS, USERS)


def model(users, y=None, rows=None, num_sampled=5, how="nothing"):
    """Utilities of users' rows v, shared slopes b, and weights of classes around a scale tau."""
    b = numpyro.sample("b", dist.Normal(0, 1).expand([D]).to_event(1))
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    with lc.entity_plate("users", NUM_USERS, users, COUNTS) as read:
        v = numpyro.sample("v", dist.Normal(0, 1).expand([D]).to_event(1))
    with lc.class_plate("classes", K, y, num_sampled) as classes:
        w = numpyro.sample("w", dist.Normal(0, 1).expand([D]).to_event(1))
    own = read.rows_of(v, users)
    utilities, follow = {
        "nothing": ((own + b) @ w.T, None),
        "a part": (lambda x: (x + b) @ w.T, own),
        "half": (lambda x: (0.5 * x + 0.5 * own) @ w.T, own),
        "a sum": (lambda x: x @ w.T, own + b),
        "all but a scale": (lambda x: tau * (x @ w.T), own + b),
        "all": (
            lambda x: x[1][:, None] * (x[0] @ w.T),
            (own + b, jnp.broadcast_to(tau, users.shape)),
        ),
    }[how]
    with lc.data_plate("data", N, rows) as rows:
        lc.sample_choice("y", utilities, follow=follow, classes=classes, rows=rows, obs=y)


SHARED = normals_of({"b": (D,)})
TABLES = normals_of(users=(NUM_USERS, {"v": (D,)}), classes=(K, {"w": (D,)}))
SHAPES = {"b": (D,), "v": (NUM_USERS, D), "w": (K, D)}
PARAMS = {f"{site}_auto_{of}": np.ones(SHAPES[site]) for site in SHAPES for of in ("loc", "scale")}


def guide(*args, **kwargs):
    """Normals by hand, that of log tau too."""
    SHARED()
    numpyro.sample("tau", dist.LogNormal(0.0, 0.1))
    TABLES()


def findings_of(state, **options):
    """Of a fit whose last state this is."""
    params = PARAMS | {"y_u": np.zeros(N)}
    fit = lc.Fitted(partial(model, **options), guide, params).on(USERS, Y, np.arange(N))
    return unfollowed_values(fit._fit, "y", state)


@pytest.mark.parametrize(
    ("options", "sites"),
    [
        ({}, ["b", "v"]),
        ({"how": "a part"}, ["b"]),
        ({"how": "half"}, ["v"]),
        ({"how": "a sum"}, []),
        ({"how": "all but a scale"}, ["tau"]),
        ({"how": "all"}, []),
    ],
    ids=["nothing", "a part", "half", "a sum", "all but a scale", "all"],
)
def test_what_moves_utilities_around_the_values_to_follow_is_named(options, sites):
    findings = findings_of(None, **options)
    assert [finding.name for finding in findings] == [
        f"share of draws that u follows, {site}" for site in sites
    ]
    assert all(np.isnan(finding.value) and not finding.advice for finding in findings)


def test_values_that_the_guide_moves_rows_of_classes_with_are_not_named():
    """Their widths are those of the guide, and a choice cannot follow them besides."""
    row_guide = lc.AutoRowNormal(model, follow=["b"])
    svi = lc.SubsampledSVI(model, row_guide, optax.adam(0.1), TraceMeanField_ELBO())
    data = USERS, Y, np.arange(N)
    params = svi.get_params(svi.init(jax.random.key(0), *data))
    fit = lc.Fitted(model, row_guide, params).on(*data)
    assert [found.name.split()[-1] for found in unfollowed_values(fit._fit, "y", None)] == ["v"]


def test_the_share_is_that_of_observations_that_have_been_visited():
    """Half of them, four times each: some by noisy draws, and some by draws that u is all of."""
    known = lc.update_rules.NaturalGradient().init(jnp.zeros(N))
    number = np.arange(N)
    visits, noise = np.where(number % 2, 4, 0), np.where(number < N // 2, 1e3, 0.0)
    known = known._replace(visits=jnp.asarray(visits), noise=jnp.asarray(noise))
    state = SimpleNamespace(local_state={"y_u": SimpleNamespace(rule_state=known)})
    (finding,) = findings_of(state, how="a part")
    assert finding.value == pytest.approx((4**-0.9 + 1) / 2, rel=1e-5) and finding.advice


def run(make_guide, **options):
    """A fit of the model with these options, and its batches."""
    own_model = partial(model, **options)
    loss = TraceMeanField_ELBO()
    svi = lc.SubsampledSVI(own_model, make_guide(own_model), optax.adam(0.01), loss)
    batches = lc.ArrayBatches(USERS, Y, batch_size=20)
    return svi, svi.run(jax.random.key(0), 30, batches=batches, progress_bar=False), batches


def found(svi, result, batches):
    how = {"rng_key": jax.random.key(1), "num_draws": 0, "num_repeats": 2}
    findings = lc.Fitted.from_svi(svi, result).on().diagnose(batches=batches, **how).findings
    return [finding for finding in findings if "u follows" in finding.name]


@pytest.mark.slow
def test_where_all_classes_are_at_hand_u_is_that_of_each_draw():
    findings = found(*run(AutoNormal, num_sampled=K - 1))
    assert [finding.value for finding in findings] == [1.0, 1.0]
    assert not any(finding.advice for finding in findings)


@pytest.mark.slow
def test_a_short_fit_of_few_classes_is_advised():
    (finding,) = found(*run(AutoNormal, how="a part"))
    assert 0 < finding.value < 0.7 and finding.advice


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make_guide", "options"),
    [(AutoDelta, {}), (AutoNormal, {"num_sampled": None})],
    ids=["points", "all classes"],
)
def test_a_fit_without_widths_or_without_u_has_no_shares(make_guide, options):
    assert found(*run(make_guide, **options)) == []
