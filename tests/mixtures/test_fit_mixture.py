# SPDX-License-Identifier: Apache-2.0
"""Whole fits: against a slow reference, by what the algorithms promise, and on bad input."""

from __future__ import annotations

import sys
from copy import copy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from scipy import stats
from scipy.sparse import csr_array
from scipy.special import gammaln, softmax

import numpyro_largecat as lc
from numpyro_largecat.mixtures import Options
from numpyro_largecat.mixtures.global_step import Statistics, global_step, map_in_groups
from numpyro_largecat.mixtures.hyperparameters import Hyperparameters, from_values, to_values
from numpyro_largecat.mixtures.passes import Model, memoized_steps, stochastic_steps
from numpyro_largecat.mixtures.row_stream import RowStream, look_at
from tests import reference_mixtures as reference
from tests.memory import temp_bytes
from tests.mixtures.cases import CASES, COVARIANCE, LOC, MIXING, ROWS, one_hot, summed

KEY = jax.random.key(0)
POINTS = CASES["gaussian"].x


def fit(*arguments: Any, **options: Any) -> lc.MixtureFit:
    rng_key = options.pop("rng_key", KEY)
    return lc.fit_mixture(rng_key, *arguments, progress_bar=False, **options)


@cache
def one_pass() -> lc.MixtureFit:
    """For tests that only read the fit."""
    return fit(POINTS, 3, CASES["gaussian"].family, start="random", num_passes=1)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("objective", ["variational", "map"])
@pytest.mark.parametrize(("mixing", "num_active"), [("dirichlet", 2), ("sticks", 4)])
@pytest.mark.usefixtures("x64")
@pytest.mark.some_cases(6)
def test_coordinate_ascent_is_that_of_loops(
    name: str, objective: Any, mixing: str, num_active: int
) -> None:
    """Four passes from the same start: responsibilities, log weights and objective.

    The second algorithm takes one batch of all rows at step size 1.
    """
    family, slow, x = CASES[name]
    prior, learn = MIXING[mixing]
    r = one_hot(len(x), 4)
    wanted = reference.coordinate_ascent(slow, learn, x, r, num_active, objective, 4)
    rng = np.random.default_rng(0)
    stream = RowStream(x, None, rng)
    model = Model(family, prior, objective, num_active, look_at(stream, family, 1, rng))
    start = summed(family, x, r)
    states = list(memoized_steps(model, start, stream, 4))
    others = list(stochastic_steps(model, start, stream, 5, Options(1.0, 0.0), KEY))
    for state, other in zip(wanted, states, strict=True):
        np.testing.assert_allclose(other.bound, state.objective, rtol=1e-9)
        sums = summed(family, x, state.responsibilities)
        np.testing.assert_allclose(other.statistics.counts, sums.counts, atol=1e-7)
        np.testing.assert_allclose(other.statistics.features, sums.features, atol=1e-6)
    for state, other in zip(states, others, strict=False):
        np.testing.assert_allclose(other.statistics.features, state.statistics.features, atol=1e-9)
    # An estimate of the bound from a batch is of the posterior before its step, at the best r.
    best = (reference.sparse_responsibilities(s.log_weights, num_active) for s in wanted)
    for state, after, other in zip(wanted, best, others[1:], strict=True):
        log_gain = np.log(np.where(after > 0, after, 1))
        before = state.responsibilities
        log_before = np.log(np.where(before > 0, before, 1))
        local = (after * (state.log_weights - log_gain)).sum()
        local -= (before * (state.log_weights - log_before)).sum()
        np.testing.assert_allclose(other.bound, state.objective + local, rtol=1e-9)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("num_active", [1, 2, 4])
@pytest.mark.parametrize("objective", ["variational", "map"])
@pytest.mark.some_cases(4)
def test_memoized_steps_never_lower_the_bound(name: str, num_active: int, objective: Any) -> None:
    """Not in any step of 20 passes over four batches after the first pass, in float32.

    Rounding is relative to the terms of the bound; of Poisson counts the log factorials are larger
    than their sum.
    """
    family, _, x = CASES[name]
    mixing = lc.mixtures.StickBreaking(0.5) if num_active == 2 else lc.mixtures.DirichletMixing(1.0)
    rng = np.random.default_rng(1)
    stream = RowStream(x.astype(np.float32), 16, rng)
    model = Model(family, mixing, objective, num_active, look_at(stream, family, 1, rng))
    start = summed(family, x, np.concatenate([np.eye(4), np.zeros((len(x) - 4, 4))]))
    bounds = np.array([step.bound for step in memoized_steps(model, start, stream, 20)][3:])
    assert model.look.dtype == np.float32
    assert bounds[-1] > bounds[0]
    size = np.abs(bounds).min() + (abs(log_factorials(x)) if name == "poisson" else 0)
    assert (np.diff(bounds) > -1e-6 * size).all()


def log_factorials(x: np.ndarray) -> float:
    """Sum over rows of log x!."""
    return float(gammaln(x + 1).sum())


def test_hard_em_is_brute_force() -> None:
    """L = 1 with known equal weights and nearly no prior: Lloyd's steps with full covariances."""
    x = np.concatenate([POINTS, POINTS * [1.0, -1] + 0.5])
    family = lc.mixtures.GaussianFamily(LOC, COVARIANCE, 1e-6, 1e-6)
    labels = np.arange(len(x)) % 3
    rng = np.random.default_rng(0)
    stream = RowStream(x, None, rng)
    model = Model(
        family, lc.mixtures.DirichletMixing(1e9), "map", 1, look_at(stream, family, 1, rng)
    )
    steps = memoized_steps(model, summed(family, x, np.eye(3)[labels]), stream, 6)
    for step in steps:
        densities = []
        for k in range(3):
            own = x[labels == k]
            normal = stats.multivariate_normal(own.mean(0), np.cov(own.T, ddof=0))
            densities.append(normal.logpdf(x))
        labels = np.argmax(densities, axis=0)
        np.testing.assert_allclose(step.statistics.counts, np.bincount(labels, minlength=3))


def test_the_start_stands_for_rows_that_are_not_yet_seen() -> None:
    """After 20 of 50 rows by three fifths of its weight, and at the end of the pass not at all."""
    family, _, x = CASES["poisson"]
    x = x[:50]
    rng = np.random.default_rng(0)
    stream = RowStream([x[:20], x[20:]], None, rng)
    model = Model(
        family, lc.mixtures.DirichletMixing(), "variational", 3, look_at(stream, family, 1, rng)
    )
    start = summed(family, x, one_hot(50, 3))
    steps = list(memoized_steps(model, start, stream, 1))
    total = 0.0
    posterior = global_step(family, model.mixing, start, "variational")
    for rows, unseen, step in zip((x[:20], x[20:]), (0.6, 0.0), steps, strict=True):
        total = total + np.asarray(model.sum_batch(rows, posterior).statistics, float)
        wanted = total + unseen * start.features
        np.testing.assert_allclose(step.statistics.features, wanted, rtol=1e-6)
        posterior = global_step(family, model.mixing, step.statistics, "variational")
    assert np.isnan(steps[0].bound) and np.isfinite(steps[1].bound)


def test_natural_gradient_steps_follow_their_schedule() -> None:
    """S <- (1 - rho) S + rho (N / B) S_batch with rho = (delay + t) ** -forgetting, t >= 1."""
    family, _, x = CASES["poisson"]
    x = x[:50]
    rng = np.random.default_rng(0)
    stream = RowStream([x[:20], x[20:]], None, rng)
    model = Model(
        family, lc.mixtures.DirichletMixing(), "variational", 3, look_at(stream, family, 1, rng)
    )
    old = summed(family, x, one_hot(50, 3))
    steps = list(stochastic_steps(model, old, stream, 2, Options(3.0, 0.7), KEY))
    for t, step in enumerate(steps, start=1):
        rows = (x[:20], x[20:])[(t - 1) % 2]
        posterior = global_step(family, model.mixing, old, "variational")
        batch = model.sum_batch(rows, posterior)
        rho, scale = (3.0 + t) ** -0.7, 50 / len(rows)
        wanted = (1 - rho) * old.features + rho * scale * np.asarray(batch.statistics)
        np.testing.assert_allclose(step.statistics.features, wanted, rtol=1e-5)
        old = step.statistics


@pytest.mark.slow
def test_stochastic_and_memoized_fits_agree() -> None:
    """On well separated clusters both find them, with their sizes."""
    x = (
        np.random.default_rng(0).normal(size=(1200, 1))
        + np.array([0, 20, 40, 40]).repeat(300)[:, None]
    )
    family = lc.mixtures.GaussianFamily(x.mean(0), np.eye(1))
    for method in ("memoized", "stochastic"):
        found = fit(x, 3, family, method=method, batch_size=200, num_passes=8, num_active=2)
        order = np.argsort(found.components().mean[:, 0])
        np.testing.assert_allclose(found.components().mean[order, 0], [0, 20, 40], atol=0.3)
        np.testing.assert_allclose(found.mixing().probs[order], [0.25, 0.25, 0.5], atol=0.02)
        assert found.bounds.shape == (8,)
        assert found.num_used == 3


@pytest.mark.parametrize("source", ["list", "function", "memmap", "frame"])
def test_sources_that_are_not_arrays(source: str, tmp_path: Path) -> None:
    """Batches of a list, a function or a mapped file, and a frame, give what the array gives."""
    x = POINTS.astype(np.float32)
    family = CASES["gaussian"].family
    wanted = fit(x, 3, family, start="random", num_passes=3)
    data: Any = [x]
    if source == "function":
        data = lambda: iter([x])  # noqa: E731
    if source == "memmap":
        np.save(tmp_path / "x.npy", x)
        data = np.load(tmp_path / "x.npy", mmap_mode="r")
    if source == "frame":
        data = Frame(x)
        np.testing.assert_array_equal(wanted.assign(data), wanted.assign(x.tolist()))
    found = fit(data, 3, family, start="random", num_passes=3)
    np.testing.assert_allclose(found.bounds, wanted.bounds, rtol=1e-6)


class Frame:
    """As pandas: iterated and indexed by names of columns."""

    iloc = None

    def __init__(self, x: np.ndarray) -> None:
        self.x, self.shape = x, x.shape

    def __iter__(self) -> Any:
        return iter(("first", "second"))

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return self.x


@pytest.mark.parametrize("mixing", MIXING)
@pytest.mark.slow
def test_a_fit_is_an_ordinary_mixture(mixing: str) -> None:
    """Held-out log likelihood, responsibilities and labels are those of NumPyro's mixture."""
    family, x = CASES["gaussian"].family, POINTS.astype(np.float32)
    found = fit(x, 4, family, mixing=MIXING[mixing][0], objective="map", num_passes=5)
    mixture = dist.MixtureSameFamily(found.mixing(), found.components())
    log_prob, logs = jax.jit(lambda x: (mixture.log_prob(x), mixture.component_log_probs(x)))(x)
    np.testing.assert_allclose(found.log_likelihood(x), log_prob, rtol=1e-4)
    dense = found.responsibilities(x, num_active=4)
    np.testing.assert_allclose(dense.probs, softmax(logs, axis=1), atol=1e-4)
    np.testing.assert_array_equal(found.assign(x), logs.argmax(1))
    sparse = found.responsibilities(x, num_active=2)
    assert sparse.probs.shape == sparse.indices.shape == (60, 2)
    np.testing.assert_allclose(sparse.probs.sum(1), 1, rtol=1e-5)
    np.testing.assert_allclose(found.mixing().probs.sum(), 1, rtol=1e-5)
    np.testing.assert_allclose(jax.jit(found.log_likelihood)(x), found.log_likelihood(x), rtol=1e-5)


@pytest.mark.slow
def test_multinomials_of_one_total_are_a_mixture() -> None:
    """``TopLMixture`` takes them, and rows of another total have no density in it."""
    x = np.random.default_rng(0).multinomial(5, [0.1, 0.2, 0.7], 30).astype(np.float32)
    family = lc.mixtures.MultinomialFamily(np.full(3, 0.5), total_count=5)
    found = fit(x, 3, family, start="random", num_passes=2)
    mixture = lc.TopLMixture(found.mixing(), found.components(), num_active=3)
    np.testing.assert_allclose(mixture.log_prob(x), found.log_likelihood(x), rtol=1e-5)
    other = x.copy()
    other[4, 1] += 1
    for use in (lambda x: fit(x, 3, family), found.log_likelihood):
        with pytest.raises(
            ValueError, match=r"sums of rows must be `total_count`, 5; got 6\.0 at position 4"
        ):
            use(other)
    with pytest.warns(UserWarning, match="Out-of-support"):
        scores = found.components().log_prob(other[:, None])
    assert np.flatnonzero(np.isinf(scores).all(axis=1)).tolist() == [4]


def test_posterior_in_usual_parameters() -> None:
    """Counts add to degrees of freedom, and the prior is there when no row is."""
    family, x = CASES["gaussian"].family, POINTS
    found = fit(x, 3, family, start="random", num_passes=2)
    posterior = found.posterior()
    np.testing.assert_allclose(posterior.dof, 1.5 + 3 + found.counts, rtol=1e-5)
    np.testing.assert_allclose(posterior.loc_strength, 0.2 + found.counts, rtol=1e-5)
    np.testing.assert_allclose(found.counts.sum(), len(x), rtol=1e-5)


@pytest.mark.usefixtures("x64")
def test_the_type_of_the_data_is_kept() -> None:
    """Where 64 bits are enabled, rows in float32 are still treated in float32."""
    for dtype in (np.float32, np.float64):
        x = POINTS.astype(dtype)
        found = fit(x, 3, CASES["gaussian"].family, start="random", num_passes=1)
        assert found.log_likelihood(POINTS).dtype == found.components().loc.dtype == dtype
        assert found.mixing().logits.dtype == found.responsibilities(POINTS).probs.dtype == dtype


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "dtype"),
    [(lc.mixtures.GaussianFamily, np.int64), (lc.mixtures.DiagonalGaussianFamily, np.float64)],
)
def test_rows_lose_a_common_offset_before_they_are_rounded(family: Any, dtype: Any) -> None:
    """Seconds since 1970 are no worse than those since the first row; float32 has five of them."""
    x = np.random.default_rng(0).normal([0.0, 600.0], 30, (200, 2)).T.reshape(-1, 1).round()
    variance = np.eye(1) * 900 if family is lc.mixtures.GaussianFamily else np.full(1, 900.0)
    offset, found = 1_700_000_000, {}
    for added in (0, offset):
        rows = (x + added).astype(dtype)
        fitted = fit(rows, 2, family(rows.mean(axis=0), variance), num_passes=5)
        found[added] = fitted.statistics, fitted.log_likelihood(rows), fitted.assign(rows)
    for own, moved in zip(found[0], found[offset], strict=True):
        np.testing.assert_allclose(own, moved, rtol=1e-5, atol=1e-5)


class LogNormal(lc.mixtures.DiagonalGaussianFamily):
    """Its features are not those of x less something."""

    def features(self, x: Any) -> Any:
        return super().features(jnp.log(x))

    def log_base(self, x: Any) -> Any:
        return super().log_base(jnp.log(x)) - jnp.log(x).sum(-1)


def test_a_family_with_features_of_its_own_gets_rows_as_they_are() -> None:
    logs = np.random.default_rng(0).normal([[1.0, 2.0]], 0.3, (60, 2)) + 2 * np.eye(2)[0]
    options = dict(start="random", num_passes=3)
    of_rows = fit(np.exp(logs), 2, LogNormal(logs.mean(0), np.ones(2)), **options)
    family = lc.mixtures.DiagonalGaussianFamily(logs.mean(0), np.ones(2))
    expected = fit(logs, 2, family, **options).log_likelihood(logs) - logs.sum(axis=1)
    np.testing.assert_allclose(of_rows.log_likelihood(np.exp(logs)), expected, rtol=1e-4)


@pytest.mark.parametrize(
    "first",
    [
        lambda fit, x: jax.jit(fit.log_likelihood)(x),
        lambda fit, x: jax.jit(lambda shift: fit.log_likelihood(x) + shift)(0.0),
        lambda fit, x: jax.vmap(lambda row: fit.log_likelihood(row[None])[0])(jnp.asarray(x)),
    ],
)
def test_a_fit_may_first_be_read_in_a_transformation(first: Any) -> None:
    """What it keeps for later is no array of the trace."""
    found = fit(POINTS, 3, CASES["gaussian"].family, start="random", num_passes=1)
    inside = first(found, POINTS.astype(np.float32))
    np.testing.assert_allclose(inside, found.log_likelihood(POINTS), rtol=1e-4)


def test_a_score_of_no_rows_is_refused() -> None:
    found = one_pass()
    with pytest.raises(ValueError, match=r"at least one row; got shape \(0, 2\)"):
        found.score(POINTS[:0])


def test_more_components_than_rows() -> None:
    """The rest keep the prior and are not counted as used."""
    family = lc.mixtures.GaussianFamily(LOC, COVARIANCE)
    found = fit(POINTS[:3], 7, family, num_passes=3)
    assert found.counts.shape == (7,)
    assert 1 <= found.num_used <= 3
    np.testing.assert_allclose(found.counts.sum(), 3, rtol=1e-5)
    assert np.isfinite(found.log_likelihood(POINTS)).all()


def test_a_fit_goes_on_from_another() -> None:
    """Three passes and two more are five, with one batch."""
    family = CASES["gaussian"].family
    whole = fit(POINTS, 3, family, start="random", num_passes=5)
    first = fit(POINTS, 3, family, start="random", num_passes=3)
    second = fit(POINTS, 3, family, num_passes=2, start=first)
    np.testing.assert_allclose(second.bounds[-1], whole.bounds[-1], rtol=1e-6)
    with pytest.raises(ValueError, match="4 components too; got 3"):
        fit(POINTS, 4, family, start=first)
    moved = lc.mixtures.GaussianFamily(LOC + 1, COVARIANCE)
    for other, differs in ((moved, "another `loc`"), (CASES["zero mean"].family, "")):
        with pytest.raises(ValueError, match=rf"has the same features.*{differs}"):
            fit(POINTS, 3, other, start=first)
    assert (first.num_steps, second.num_steps) == (0, 0)
    stronger = lc.mixtures.GaussianFamily(LOC, COVARIANCE, 50.0)
    assert fit(POINTS, 3, stronger, num_passes=1, start=first).family is stronger


def test_stochastic_steps_are_counted_on() -> None:
    """Three passes and two more are five, with one batch."""
    family, options = CASES["gaussian"].family, {"start": "random", "method": "stochastic"}
    whole = fit(POINTS, 3, family, num_passes=5, **options)
    first = fit(POINTS, 3, family, num_passes=3, **options)
    second = fit(POINTS, 3, family, num_passes=2, method="stochastic", start=first)
    np.testing.assert_allclose(second.statistics, whole.statistics, rtol=1e-4, atol=1e-4)
    assert (first.num_steps, second.num_steps) == (3, 5)


def test_stochastic_steps_after_a_memoized_fit_begin_at_one() -> None:
    """With delay 0 the first takes all from its batch, which is that of the memoized fit."""
    family = CASES["gaussian"].family
    first = fit(POINTS, 3, family, start="random", num_passes=20, batch_size=30)
    assert first.num_steps == 0
    again = fit(POINTS, 3, family, num_passes=1, start=first)
    options = Options(delay=0.0, forgetting=1.0)
    second = fit(POINTS, 3, family, num_passes=1, start=first, method="stochastic", options=options)
    assert second.num_steps == 1
    np.testing.assert_allclose(second.statistics, again.statistics, rtol=1e-4, atol=1e-4)
    third = fit(POINTS, 3, family, num_passes=1, start=second)
    assert third.num_steps == 1


@pytest.mark.parametrize("name", CASES)
def test_a_saved_fit_is_the_same(name: str, tmp_path: Path) -> None:
    """Of a user's own family and mixing prior too, which must be defined then."""
    family, _, x = CASES[name]
    mixing = lc.mixtures.StickBreaking(2.0)
    statistics = summed(family, x, one_hot(60, 4))
    known = family, mixing, "variational", 2
    found = lc.MixtureFit(*known, *statistics, np.array([-3.0, -2.0]), np.dtype(np.float32), 7)
    found.save(tmp_path / "fit")
    loaded = lc.MixtureFit.load(tmp_path / "fit")
    assert repr(loaded) == repr(found) and repr(loaded.family) == repr(family)
    for prior, wanted in ((loaded.family, family), (loaded.mixing_prior, mixing)):
        assert type(prior) is type(wanted) and vars(prior).keys() == vars(wanted).keys()
        for attribute, value in vars(wanted).items():
            np.testing.assert_array_equal(vars(prior)[attribute], value)
    for field in (
        "counts",
        "statistics",
        "bounds",
        "objective",
        "dtype",
        "num_active",
        "num_steps",
    ):
        np.testing.assert_array_equal(getattr(loaded, field), getattr(found, field))
    assert loaded.score(x) == found.score(x) == float(found.log_likelihood(x).mean())


@pytest.mark.parametrize(
    "value",
    [
        {"a": 1.0},
        np.exp,
        CASES["gaussian"].family,
        ["a", "b"],
        [[1.0], [1.0, 2.0]],
        np.array([1.0, None]),
        np.zeros(2, [("a", float)]),
        KEY,
    ],
    ids=str,
)
def test_an_attribute_that_no_file_can_hold_is_refused(value: Any, tmp_path: Path) -> None:
    """By name, before the file is written; the one that is there stays."""
    family, _, x = CASES["multinomial"]
    found = fit(x, 2, family, num_passes=1)
    found.save(tmp_path / "fit")
    before = sorted(tmp_path.rglob("*"))
    bad = copy(family)
    bad.table = value
    with pytest.raises(TypeError, match=r"`family\.table` must be a number, a string, None or an"):
        replace(found, family=bad).save(tmp_path / "fit")
    assert sorted(tmp_path.rglob("*")) == before


def test_attributes_of_all_kinds_are_saved(tmp_path: Path) -> None:
    """And a fit whose own float type is bfloat16."""
    family, _, x = CASES["multinomial"]
    mine = copy(family)
    values = {
        "some": None,
        "flag": True,
        "text": "a",
        "one": np.float32(0.1),
        "half": jnp.arange(3, dtype=jnp.bfloat16) / 3,
        "wide": np.arange(3) / 3,
        "listed": [0.1, 0.2],
        "truths": np.array([True, False]),
    }
    vars(mine).update(values)
    found = fit(x, 2, family, num_passes=1)
    found = replace(found, family=mine, dtype=np.dtype(jnp.bfloat16))
    found.save(tmp_path / "fit")
    loaded = lc.MixtureFit.load(tmp_path / "fit")
    assert loaded.dtype == jnp.bfloat16
    for name, value in values.items():
        again = getattr(loaded.family, name)
        assert np.asarray(again).dtype == np.asarray(value).dtype
        np.testing.assert_array_equal(np.asarray(again), np.asarray(value))


def test_a_family_that_is_not_defined_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a mine\.Nine, and no subclass of ConjugateFamily has"):
        from_values("family", lc.mixtures.ConjugateFamily, {"family": "mine.Nine"})


def prior_of(module: str, base: type[Hyperparameters]) -> Hyperparameters:
    """A prior whose class a module is to have defined under the name ``Mine``."""
    return type("Mine", (base,), {"__module__": module})()


def test_classes_of_one_name_in_two_modules_are_told_apart() -> None:
    class Prior(Hyperparameters):
        pass

    saved = to_values("prior", prior_of("first", Prior))
    prior_of("second", Prior)
    assert type(from_values("prior", Prior, saved)).__module__ == "first"
    third = r"a third\.Mine.*; it is not first\.Mine or second\.Mine"
    with pytest.raises(ValueError, match=third):
        from_values("prior", Prior, {"prior": "third.Mine"})


def test_of_classes_of_one_name_in_one_module_the_name_is_that_of_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A cell that ran again has defined it twice; without a name in the module none is meant."""

    class Prior(Hyperparameters):
        pass

    saved = to_values("prior", prior_of(__name__, Prior))
    last = type(prior_of(__name__, Prior))
    with pytest.raises(ValueError, match=r"several subclasses of Prior have that name"):
        from_values("prior", Prior, saved)
    monkeypatch.setattr(sys.modules[__name__], "Mine", last, raising=False)
    assert type(from_values("prior", Prior, saved)) is last


def test_our_own_classes_are_saved_by_their_public_names() -> None:
    """So that a fit can be read after a file of the package has another name."""
    saved = to_values("family", CASES["gaussian"].family)
    assert saved["family"] == "numpyro_largecat.mixtures.GaussianFamily"


def test_spread_seeds_are_in_different_clusters() -> None:
    """Of ten far clusters each gets a seed, where random seeds miss some."""
    x = 1000.0 * np.arange(10).repeat(30)[:, None] + np.random.default_rng(0).normal(size=(300, 1))
    family = lc.mixtures.GaussianFamily(x.mean(0), np.eye(1), loc_strength=1e-3)
    spread = fit(x, 10, family, num_passes=1)
    assert (np.sort(spread.counts).round() == 30).all()
    random = fit(x, 10, family, num_passes=1, start="random")
    assert not (np.sort(random.counts).round() == 30).all()


def test_rows_that_are_all_equal_can_be_fitted() -> None:
    """No divergence is left after the first seed."""
    found = fit(np.ones((20, 2)), 3, lc.mixtures.DiagonalGaussianFamily(np.zeros(2), np.ones(2)))
    np.testing.assert_allclose(found.counts.sum(), 20, rtol=1e-5)


def test_a_lost_covariance_names_the_component() -> None:
    """In float32, a cluster a million standard deviations from ``loc``."""
    x = np.random.default_rng(0).normal(size=(400, 2)) + np.array([0, 1e7]).repeat(200)[:, None]
    family = lc.mixtures.GaussianFamily(np.zeros(2), np.eye(2), 1e-3, 1e-3)
    with pytest.raises(FloatingPointError, match=r"component \d, with .* positive definite"):
        fit(x.astype(np.float32), 2, family)


@pytest.mark.parametrize("name", ["GaussianFamily", "DiagonalGaussianFamily"])
@pytest.mark.parametrize("distance", [100.0, 1000.0])
def test_components_of_which_rounding_has_taken_much_are_warned_of(name, distance) -> None:
    centres = np.repeat([-distance, distance], 200)[:, None]
    x = np.random.default_rng(0).normal(centres, 1, (400, 2))
    scale = np.eye(2) if name == "GaussianFamily" else np.ones(2)
    family = getattr(lc.mixtures, name)(np.zeros(2), scale, strength=20.0, loc_strength=1e-9)

    def fit() -> None:
        lc.fit_mixture(jax.random.key(0), x, 2, family, num_passes=3, progress_bar=False)

    if distance > 500:
        with pytest.warns(RuntimeWarning, match="2 components are so far from the `loc`"):
            fit()
    else:
        fit()


def test_statistics_of_no_proper_posterior_name_the_component() -> None:
    statistics = Statistics(np.array([1.0, 2.0]), np.array([[1.0, 1, 0, 1], [2.0, -9, 0, -9]]))
    family = lc.mixtures.ZeroMeanGaussianFamily(np.eye(2))
    with pytest.raises(FloatingPointError, match="component 1, with 2 of 3 observations"):
        global_step(family, lc.mixtures.DirichletMixing(), statistics, "map")


def with_nan() -> np.ndarray:
    x = POINTS.copy()
    x[17, 1] = np.nan
    return x


def test_posteriors_of_many_components_are_computed_in_groups() -> None:
    """Whatever their number, each row is its own; groups of full covariances hold few matrices."""
    found = map_in_groups(lambda row: {"sum": row.sum()}, jnp.arange(210.0).reshape(70, 3))
    np.testing.assert_allclose(found["sum"], np.arange(210.0).reshape(70, 3).sum(1))
    scratch = [temp_bytes(_potential_values, jnp.zeros((k, 1 + 300))) for k in (200, 400)]
    assert scratch[1] - scratch[0] < 200 * 4 * 24**2  # a matrix for each further component


def _potential_values(natural: Any) -> Any:
    family = lc.mixtures.ZeroMeanGaussianFamily(np.eye(24))
    return map_in_groups(lambda row: family.log_normalizer(family.prior() + row), natural)


GAUSSIAN = CASES["gaussian"].family
BAD: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    ((POINTS, 0, GAUSSIAN), {}, ValueError, "`num_components` must be at least 1; got 0"),
    ((POINTS, 3, GAUSSIAN), {"num_active": 0}, ValueError, "`num_active` must be at least 1"),
    (
        (POINTS, 3, GAUSSIAN),
        {"num_active": 4},
        ValueError,
        "at most 3, the number of components; got 4",
    ),
    ((with_nan(), 3, GAUSSIAN), {}, ValueError, "got nan at row 17, column 1"),
    (([POINTS, with_nan()], 3, GAUSSIAN), {}, ValueError, "batch 1 of `x` must be finite"),
    ((POINTS[:0], 3, GAUSSIAN), {}, ValueError, "at least one row"),
    (([POINTS, POINTS[:0]], 3, GAUSSIAN), {}, ValueError, "batch 1 of `x` must hold"),
    (([], 3, GAUSSIAN), {}, ValueError, "gave no batch"),
    ((iter([POINTS]), 3, GAUSSIAN), {}, TypeError, "batches again in each pass"),
    ((POINTS[:, :1], 3, GAUSSIAN), {}, ValueError, r"\(N, 2\), the columns"),
    (([POINTS, POINTS[:, :1]], 3, GAUSSIAN), {}, ValueError, r"shape \(B, 2\), rows like"),
    ((list(POINTS), 3, GAUSSIAN), {}, ValueError, r"batch 0 .* if they are rows, .*np\.stack"),
    ((list(ROWS["rates"]), 3, CASES["poisson"].family), {}, ValueError, r"stack them"),
    ((np.ma.masked_greater(POINTS, 4), 3, GAUSSIAN), {}, ValueError, "no masked entries; got"),
    (([np.ma.masked_greater(POINTS, 4)], 3, GAUSSIAN), {}, ValueError, "no masked entries; got"),
    (([POINTS], 3, GAUSSIAN), {"batch_size": 5}, ValueError, "list gives its own batches"),
    ((POINTS, 3, GAUSSIAN), {"batch_size": 0}, ValueError, "`batch_size` must be at least 1"),
    ((POINTS, 3, GAUSSIAN), {"num_passes": 0}, ValueError, "`num_passes` must be at least 1"),
    ((POINTS, 3, GAUSSIAN), {"objective": "ml"}, ValueError, "`objective` must be one of"),
    ((POINTS, 3, GAUSSIAN), {"method": "em"}, ValueError, "`method` must be one of"),
    ((POINTS, 3, GAUSSIAN), {"start": "k-means"}, ValueError, "`start` must be one of"),
    (
        (POINTS, 3, GAUSSIAN),
        {"start": POINTS},
        ValueError,
        r"fit; got an array of .* \(\d+, 2\)\.$",
    ),
    ((POINTS, 3, dist.Normal()), {}, TypeError, "a ConjugateFamily, .*; got a Normal"),
    ((POINTS, 3, POINTS), {}, TypeError, r"got an array of float64 of shape \(\d+, 2\)\.$"),
    ((POINTS, 3, GAUSSIAN), {"options": {}}, TypeError, r"must be lc\.mixtures\.Options"),
    ((POINTS, 3, GAUSSIAN), {"mixing": 1.0}, TypeError, "a MixingPrior, such"),
    (
        (POINTS, 3, GAUSSIAN),
        {"rng_key": 0},
        TypeError,
        "`rng_key` must be one JAX random key; got 0",
    ),
    ((POINTS.astype(str), 3, GAUSSIAN), {}, TypeError, "real numbers"),
    ((POINTS * 1e39, 3, GAUSSIAN), {}, ValueError, r"column \d\. In float32 it is not"),
    ((csr_array(POINTS), 3, GAUSSIAN), {}, TypeError, "rows must be dense; .*toarray"),
    ((-ROWS["counts"], 3, CASES["multinomial"].family), {}, ValueError, "counts must be"),
    ((ROWS["counts"] / 2, 3, CASES["multinomial"].family), {}, ValueError, "counts must be whole"),
    (
        (ROWS["counts"][:, :3], 3, CASES["multinomial"].family),
        {},
        ValueError,
        r"\(N, 5\), a count for each outcome",
    ),
]


@pytest.mark.parametrize(("arguments", "options", "kind", "message"), BAD)
def test_bad_input_is_refused(
    arguments: Any, options: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        fit(*arguments, **options)


def test_bad_options_are_refused() -> None:
    with pytest.raises(ValueError, match=r"`delay` of at least 0 .* got -1 and 0\.55"):
        Options(delay=-1)
    with pytest.raises(ValueError, match=r"`forgetting` in \[0, 1\]"):
        Options(forgetting=1.1)


def test_batches_that_change_are_refused() -> None:
    """A source that shuffles into other sizes, or ends early, would make cached sums wrong."""
    lengths = iter([(20, 40), (40, 20)])
    with pytest.raises(ValueError, match="batch 0 of pass 0 has 40 rows, and had 20 rows"):
        fit(lambda: np.split(POINTS, [next(lengths)[0]]), 2, GAUSSIAN)
    counts = iter([2, 1])
    with pytest.raises(ValueError, match="pass 0 ended after 1 batches, and there were 2"):
        fit(lambda: [POINTS] * next(counts), 2, GAUSSIAN)


def test_batches_that_are_shuffled_anew_are_refused_where_their_sums_are_kept() -> None:
    """Sums of other rows would be replaced; stochastic steps may take any."""
    rng = np.random.default_rng(0)

    def batches() -> Any:
        return iter(np.array_split(POINTS[rng.permutation(len(POINTS))], 3))

    family = CASES["gaussian"].family
    with pytest.raises(ValueError, match="batch 0 of pass 0 has other rows than before the fit"):
        fit(batches, 2, family, start="random", num_passes=2)
    fit(batches, 2, family, start="random", num_passes=1, method="stochastic")


def test_data_under_jit_are_refused() -> None:
    with pytest.raises(TypeError, match="outside `jit`"):
        jax.jit(lambda x: fit(x, 2, GAUSSIAN).bounds)(jnp.asarray(POINTS))


def test_rows_with_nan_are_refused_after_the_fit() -> None:
    found = one_pass()
    with pytest.raises(ValueError, match=r"`x` must be finite; got nan at position \(17, 1\)"):
        found.assign(with_nan())
    with pytest.raises(ValueError, match="at most 3, the number of components"):
        found.responsibilities(POINTS, num_active=4)
    with pytest.raises(ValueError, match="`num_active` must be at least 1"):
        found.responsibilities(POINTS, num_active=0)
