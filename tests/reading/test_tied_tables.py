# SPDX-License-Identifier: Apache-2.0
"""Predictions of a model that reads the table of its classes by id: tied embeddings."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer.autoguide import AutoLowRankMultivariateNormal, AutoNormal

import numpyro_largecat as lc
from tests.models import normals_of
from tests.slow_cases import slow_case

K, D, N = 23, 3, 200
RNG = np.random.default_rng(0)
HISTORY = np.where(RNG.random((N, 4)) < 0.3, -1, RNG.integers(0, K, (N, 4)))
OBS = RNG.integers(0, K, N)
TABLES = {"w": RNG.normal(size=(K, D)), "b": RNG.normal(size=K)}


def next_word(history, y=None, rows=None, num_sampled=4):
    """The words before, and a bias of each word."""
    with lc.class_plate("words", K, y, num_sampled, reads=history) as words:
        w = numpyro.sample("w", dist.Normal(0, 1).expand([D]).to_event(1))
        b = numpyro.sample("b", dist.Normal(0, 1))
    before = words.rows_of(w, history).mean(1)
    psi = before @ words.scored(w).T + words.scored(b)
    with lc.data_plate("data", N, rows) as rows:
        lc.sample_choice("y", psi, classes=words, rows=rows, obs=y)


def log_probs(w, b, history=HISTORY):
    """Of all words, (..., N, K), by plain NumPy."""
    w, b = np.asarray(w, np.float64), np.asarray(b, np.float64)
    before = np.where((history == -1)[..., None], 0, w[..., history, :]).mean(-2)
    psi = before @ np.swapaxes(w, -1, -2) + b[..., None, :]
    largest = psi.max(-1, keepdims=True)
    return psi - largest - np.log(np.exp(psi - largest).sum(-1, keepdims=True))


BY_HAND = normals_of(words=(K, {"w": (D,), "b": ()}))


def fitted(guide=BY_HAND, **options):
    params = {f"{name}_auto_loc": jnp.asarray(table) for name, table in TABLES.items()}
    params |= {f"{name}_auto_scale": jnp.full(table.shape, 0.3) for name, table in TABLES.items()}
    return lc.Fitted(next_word, guide, params, **options)


@pytest.mark.slow
@pytest.mark.parametrize("chunk_size", [5, 23, 8192])
def test_log_likelihood_is_that_of_numpy(chunk_size: int) -> None:
    """In and out of `jit`, where such tables were once read from the wrong rows."""
    fit = fitted(chunk_size=chunk_size)
    expected = log_probs(**TABLES)[np.arange(N), OBS]
    np.testing.assert_allclose(fit.on(HISTORY).log_likelihood(OBS), expected, atol=1e-5)
    under_jit = jax.jit(lambda history: fit.on(history).log_likelihood(OBS))
    np.testing.assert_allclose(under_jit(HISTORY), expected, atol=1e-5)


def test_top_classes_are_those_of_numpy() -> None:
    top = fitted(chunk_size=5).on(HISTORY).top_classes(3)
    order = np.argsort(-log_probs(**TABLES), axis=1)[:, :3]
    np.testing.assert_array_equal(top.classes, order)


@pytest.mark.parametrize("chunk_size", [5, slow_case(8192)])
def test_likelihood_over_draws_is_that_of_numpy_at_the_same_draws(chunk_size: int) -> None:
    """The draw of a word is one, whether it is scored in its chunk or read in any other."""
    fit = fitted(chunk_size=chunk_size)
    shown = fit.on(HISTORY).to_arviz(rng_key=jax.random.key(0), obs=OBS, num_draws=3)
    w, b = (shown["posterior"][name].values[0] for name in ("w", "b"))
    assert w.shape == (3, K, D) and np.ptp(w, axis=0).min() > 0
    expected = log_probs(w, b)[:, np.arange(N), OBS]
    np.testing.assert_allclose(shown["log_likelihood"]["y"][0], expected, atol=1e-5)


@pytest.mark.slow
def test_draws_do_not_depend_on_the_size_of_chunks() -> None:
    guide = AutoNormal(next_word)
    numpyro.handlers.seed(guide, 0)(HISTORY[:2], OBS[:2], np.arange(2))
    at = {"rng_key": jax.random.key(1), "num_draws": 3}
    found = [
        fitted(guide, chunk_size=size).on(HISTORY[:9]).log_likelihood(OBS[:9], **at)
        for size in (4, 23)
    ]
    np.testing.assert_allclose(found[0], found[1], atol=1e-5)


def test_words_out_of_range_are_refused_and_nan_under_jit() -> None:
    fit = fitted(chunk_size=5)
    history = HISTORY.copy()
    history[3, 1] = K
    with pytest.raises(ValueError, match=r"`reads` of plate 'words' must be classes.*got 23 at"):
        fit.on(history).log_likelihood(OBS)
    found = jax.jit(lambda history: fit.on(history).log_likelihood(OBS))(history)
    assert np.isnan(found[3]) and np.isfinite(np.delete(found, 3)).all()


@pytest.mark.slow
def test_a_guide_of_all_words_at_once_is_read_too() -> None:
    """It draws the whole tables, outside of the plate."""

    def full(history, y=None, rows=None):
        next_word(history, y, rows, num_sampled=None)

    guide = AutoLowRankMultivariateNormal(full, init_scale=0.3, rank=2)
    with numpyro.handlers.seed(rng_seed=0), numpyro.handlers.trace() as sites:
        guide(HISTORY, OBS, np.arange(N))
    params = {name: site["value"] for name, site in sites.items() if site["type"] == "param"}
    fit = lc.Fitted(full, guide, params, chunk_size=7)
    shown = fit.on(HISTORY).to_arviz(rng_key=jax.random.key(0), obs=OBS, num_draws=2)
    w, b = (shown["posterior"][name].values[0] for name in ("w", "b"))
    expected = log_probs(w, b)[:, np.arange(N), OBS]
    np.testing.assert_allclose(shown["log_likelihood"]["y"][0], expected, atol=1e-5)


def test_diagnose_leaves_out_ratios_of_single_words() -> None:
    """Since a word moves the utilities of those that follow it."""
    at = {"rng_key": jax.random.key(0), "num_draws": 100, "num_repeats": 3}
    new = fitted(chunk_size=5).on(HISTORY[:50], OBS[:50], np.arange(50))
    diagnosis = new.diagnose(**at)
    assert not [finding for finding in diagnosis.findings if "Pareto k of" in finding.name]
