# SPDX-License-Identifier: Apache-2.0
"""No program holds a chain of gathers that newer XLA inlines into code of exponential size.

``python -m benchmarks.compile`` prints the seconds of the same entry points and of more.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer.autoguide import AutoDelta
from numpyro.infer.util import log_density

import numpyro_largecat as lc
from numpyro_largecat.choices.error_families import FAMILIES
from numpyro_largecat.double_sum import ImplicitSGD, UMax
from numpyro_largecat.double_sum.feature_rows import check_data
from numpyro_largecat.double_sum.pair_steps import collect, run_pairs
from numpyro_largecat.ops.topics.document_fit import fit_documents
from tests.gather_chains import inlined_gathers

NUM_CATEGORIES = 10**6
BATCH, SAMPLED, FEATURES = 50, 10, 2
MOST = 2**11  # an unrolled search over the classes has 2**19, and others multiply


def shape(*sizes, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(sizes, dtype)


X, Y = shape(BATCH, FEATURES), shape(BATCH, dtype=jnp.int32)
KEY = jax.random.key(0)


def test_an_unrolled_search_is_found():
    """The chain that newer XLA compiles for minutes, and the loop that it compiles at once."""

    def search(method):
        return inlined_gathers(
            lambda table, values: jnp.searchsorted(table, values, method=method),
            shape(NUM_CATEGORIES, dtype=jnp.int32),
            Y,
        )

    assert search("scan_unrolled") == 2**19
    assert search("scan") <= 1


def choice_model(noise="gumbel", **options):
    def model(x, y=None, rows=None):
        options.setdefault("num_sampled", SAMPLED)
        with lc.class_plate("classes", NUM_CATEGORIES, y, **options) as classes:
            w = numpyro.sample("w", dist.Normal(0, 1).expand([FEATURES]).to_event(1))
        with lc.data_plate("data", 10**6, rows) as rows:
            utilities = classes.utilities(jnp.dot, (x,), (w,))
            lc.sample_choice("y", utilities, classes=classes, rows=rows, noise=noise, obs=y)

    return model


def proposals():
    counts = np.arange(1, NUM_CATEGORIES + 1)
    return {
        "uniform": {},
        "frequency": {"proposal": lc.FrequencyProposal(counts)},
        "head": {"proposal": lc.HeadProposal(counts[:20])},
        "shared": {"negatives": "shared"},
        "own": {"negatives": "own"},
    }


@pytest.mark.parametrize("noise", sorted(FAMILIES))
@pytest.mark.parametrize("proposal", ["uniform", "frequency", "head", "shared", "own"])
@pytest.mark.some_cases(5)
def test_of_a_step(proposal, noise):
    model = choice_model(noise, **proposals()[proposal])

    def density(x, y, rows):
        return log_density(numpyro.handlers.seed(model, KEY), (x, y, rows), {}, {})[0]

    assert inlined_gathers(density, X, Y, Y) <= MOST


@pytest.mark.parametrize("method", ["top_classes", "log_likelihood", "draw_choices"])
@pytest.mark.slow
def test_of_predictions(method):
    model = choice_model()
    guide = AutoDelta(model)
    numpyro.handlers.seed(guide, KEY)(
        jnp.zeros((1, FEATURES)), jnp.zeros(1, int), jnp.zeros(1, int)
    )

    def predict(table, x, y):
        options = {"log_likelihood": {"obs": y}, "draw_choices": {"rng_key": KEY}}.get(method, {})
        return getattr(lc.Fitted(model, guide, {"w_auto_loc": table}).on(x), method)(**options)

    assert inlined_gathers(predict, shape(NUM_CATEGORIES, FEATURES), X, Y) <= MOST


def test_of_documents():
    """A thousand topics of a thousand words."""

    def fit(log_probs, words, counts):
        return fit_documents(log_probs, jnp.full(1000, 0.1), words, counts, num_active=8)

    arguments = shape(1000, 1000), shape(8, 64, dtype=jnp.int32), shape(8, 64)
    assert inlined_gathers(fit, *arguments) <= MOST


def test_of_a_mixture():
    """A thousand components."""

    def density(locs, x):
        mixing = dist.Categorical(logits=jnp.zeros(1000))
        return lc.TopLMixture(mixing, dist.Normal(locs, 1.0), num_active=8).log_prob(x).sum()

    assert inlined_gathers(jax.grad(density), shape(1000), shape(BATCH)) <= MOST


@pytest.mark.parametrize("rule", [ImplicitSGD(1.0), UMax(1.0)], ids=repr)
def test_of_a_double_sum(rule):
    x, y = np.ones((BATCH, FEATURES), np.float32), np.arange(BATCH)
    features, _, y = check_data(x, y, NUM_CATEGORIES)
    data = collect(features, y, NUM_CATEGORIES, rule, 0.0)

    def one_pass(w, u, data):
        return run_pairs(w, u, KEY, data, jnp.float32(1e-3), rule=rule)

    tables = shape(NUM_CATEGORIES, FEATURES), shape(BATCH)
    assert inlined_gathers(one_pass, *tables, data) <= MOST
