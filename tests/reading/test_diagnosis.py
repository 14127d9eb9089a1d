# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer import Trace_ELBO, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoDelta, AutoNormal

import numpyro_largecat as lc
from numpyro_largecat.reading.bound_gap import advice_of_gap
from numpyro_largecat.reading.findings import Finding
from numpyro_largecat.reading.gradient_signal import signal_to_noise
from numpyro_largecat.reading.parts_check import PartsCheck
from numpyro_largecat.reading.remedies import Remedies
from tests import reference
from tests.models import (
    NUM_CATEGORIES,
    NUM_ROWS,
    class_points_of,
    hierarchical,
    make_data,
    normals_of,
    point_guide,
)

X, Y = make_data()
ROWS = np.arange(NUM_ROWS)


def diagnose(fitted, **options):
    options = {"rng_key": jax.random.key(2), "num_draws": 0} | options
    found = fitted.on(X, Y, ROWS).diagnose(**options)
    return {finding.name: finding for finding in found.findings}, str(found)


@pytest.fixture(scope="module")
def svi():
    model = hierarchical(num_sampled=4)
    return lc.SubsampledSVI(model, point_guide, optax.adam(0.02), TraceMeanField_ELBO())


@pytest.fixture(scope="module")
def short(svi):
    """A short fit, and what is found of it, also with labels that are given."""
    result = svi.run(jax.random.key(0), 60, X, Y, ROWS, progress_bar=False)
    labels = np.array([3, 3, 3, 3, 7, 7, 9, 9])
    return result, *diagnose(
        lc.Fitted.from_svi(svi, result), num_repeats=6, num_draws=100, labels=labels
    )


@pytest.mark.slow
def test_a_short_fit_is_told_to_run_longer(short):
    _, found, printed = short
    assert found["R-hat of the ELBO"].value > 1.2
    advice = found["R-hat of the ELBO"].advice
    assert advice.startswith("it rose by") and advice.endswith("in the last quarter: run longer")
    assert found["R-hat of w_auto_loc"].value > 1.2
    assert found["R-hat of w_auto_loc"].advice.startswith("drifts: run longer")
    assert "run longer" in printed.splitlines()[0]


@pytest.mark.parametrize(
    ("signal", "mean_square", "ratio"),
    [
        (3.0, 4.0, 3.0),
        (4.0, 4.0, np.inf),
        (0.0, 0.0, 0.0),
        (np.nan, np.nan, np.nan),
        (-np.inf, np.inf, np.nan),
    ],
    ids=["noise", "no noise", "no gradient", "not finite", "overflow"],
)
def test_a_ratio_of_signal_to_noise(signal, mean_square, ratio):
    np.testing.assert_equal(signal_to_noise(signal, mean_square), ratio)


def test_labels_that_are_no_classes_are_refused(svi):
    state = svi.init(jax.random.key(0), X, Y, ROWS)
    fitted = lc.Fitted(svi.model, svi.guide, svi.get_params(state))
    with pytest.raises(ValueError, match=r"`labels` must .*integers in \[0, "):
        diagnose(fitted, num_repeats=2, labels=np.array([3, -1]))


def test_findings_of_many_parameters_print_as_one_line():
    """With those that are advised about first, and errors that are rounding as 0."""
    found = [
        Finding("R-hat of a", 2.5, group="R-hat"),
        Finding("R-hat of b", 1.6, advice="run longer", group="R-hat"),
        Finding("R-hat of c", 1.5, advice="run longer", group="R-hat"),
        Finding("R-hat of d", 1.4, advice="run longer", group="R-hat"),
        Finding("noise of e", 2.0, group="noise"),
        Finding("gap", 0.5, 8e-20),
    ]
    assert [" ".join(line.split()) for line in str(lc.Diagnosis(found)).splitlines()] == [
        "R-hat, worst of 4 1.6 3 of them, as b and c: run longer",
        "noise of e 2",
        "gap 0.5 ± 0",
    ]


@pytest.mark.slow
def test_arguments_beside_those_of_batches_get_the_way_to_call_it(svi, short):
    fitted, batches = lc.Fitted.from_svi(svi, short[0]), lc.ArrayBatches(X, Y, batch_size=8)
    for new in (fitted.on(X, Y, rows=ROWS), fitted.on(X, Y, ROWS)):
        with pytest.raises(TypeError, match=r"same in each step.*`fitted\.on\(\)\.diagnose\(bat"):
            new.diagnose(rng_key=jax.random.key(0), batches=batches)


def test_a_reading_without_the_arguments_of_the_model_says_where_they_go(svi, short):
    """Also where the batches are forgotten that would have them."""
    without = lc.Fitted.from_svi(svi, short[0]).on()
    needed = r"`fitted\.on\(\.\.\.\)`.*missing a required argument: 'x'"
    with pytest.raises(TypeError, match=needed):
        without.diagnose(rng_key=jax.random.key(0))
    with pytest.raises(TypeError, match=needed):
        without.top_classes(2)


def test_a_guide_of_points_has_no_importance_ratios(short):
    assert not any("Pareto" in name for name in short[1])


def test_local_variables_that_lag_show_in_the_gap(svi):
    """u one nat off its best value costs e - 2 = 0.72, or 1 / e = 0.37."""
    result = svi.run(jax.random.key(0), 1500, X, Y, ROWS, progress_bar=False)

    def gap_of(params):
        found, _ = diagnose(lc.Fitted(svi.model, svi.guide, params), num_repeats=200)
        return found["exact log likelihood less bound"]

    gap = gap_of(result.params)
    assert abs(gap.value) < 0.02 + 3 * gap.error
    assert gap.advice == ""
    psi = X @ result.params["w_auto_loc"].T + result.params["b_auto_loc"]
    best = -reference.softmax_log_probs(psi, Y)
    for off, cost in ((-1.0, np.e - 2), (1.0, np.exp(-1))):
        gap = gap_of(result.params | {"y_u": jnp.asarray(best + off, jnp.float32)})
        assert abs(gap.value - cost) < 0.01 + 3 * gap.error
        assert gap.advice.startswith("take more steps") and "without `y_u`" in gap.advice


def test_a_gap_that_is_large_is_one_however_uncertain():
    """Where few classes are all of a sum the error is as large as the gap."""
    assert advice_of_gap(1900.0, 1400.0, {"y_u"}).startswith("take more steps")
    assert advice_of_gap(0.5, 0.4, set()) == "" and advice_of_gap(0.5, 0.1, set())
    assert advice_of_gap(-0.5, 0.1, set()).startswith("seldom drawn classes")


def test_a_fit_that_gets_worse_is_told_so_and_nothing_else(svi, short):
    result, *_ = short
    assert any(finding.advice for finding in short[1].values())
    worse = result._replace(losses=jnp.arange(60.0) + 100)
    found, _ = diagnose(lc.Fitted.from_svi(svi, worse), num_repeats=6)
    assert "fell" in found["R-hat of the ELBO"].advice
    assert [name for name, finding in found.items() if finding.advice] == ["R-hat of the ELBO"]


def test_signal_to_noise_is_that_of_the_gradients(svi, short):
    """By autodiff of the ELBO of the same draws, in one table."""
    result, found, _ = short
    plain = lc.SubsampledSVI(svi.model, svi.guide, optax.sgd(1.0), svi.loss)
    state = plain.init(jax.random.key(0), X, Y, ROWS, init_params=result.params)
    state = state._replace(local_state=result.state.local_state)
    before = plain.optim.get_params(state.optim_state)

    def gradient(key):
        new, _ = plain.update(state._replace(rng_key=key), X, Y, ROWS)
        return jax.tree.map(jnp.subtract, before, plain.optim.get_params(new.optim_state))

    grads = jax.jit(jax.vmap(gradient))(jax.random.split(jax.random.key(2), 6))
    for name, values in grads.items():
        flat = np.asarray(values, np.float64).reshape(6, -1)
        pairs = [flat[i] @ flat[j] for i in range(6) for j in range(6) if i != j]
        signal = np.mean(pairs)
        noise = np.square(flat).sum(1).mean() - signal
        value = found[f"gradient signal to noise, {name}"].value
        if noise < 1e-5 * signal:  # rounding
            assert value == np.inf
        else:
            np.testing.assert_allclose(value, signal / noise, rtol=2e-2)


def test_classes_are_counted(short):
    found = short[1]
    assert found[f"classes seen, of {NUM_CATEGORIES}"].value == 3
    entropy = 0.5 * np.log(2) + 0.5 * np.log(4)
    assert found["classes seen, effectively"].value == pytest.approx(np.exp(entropy))


def test_a_model_without_the_choice_is_refused(svi, short):
    result = short[0]
    with pytest.raises(ValueError, match=r"`site` must name.*got 'z', and the choices.*\['y'\]"):
        diagnose(lc.Fitted.from_svi(svi, result, site="z"))
    with pytest.raises(ValueError, match=r"`plate` must name.*\['classes'\]; got 'nope'"):
        diagnose(lc.Fitted.from_svi(svi, result, plate="nope"))
    with pytest.raises(ValueError, match=r"must observe choice 'y'.*`batches`"):
        lc.Fitted.from_svi(svi, result).on(X).diagnose(rng_key=jax.random.key(0))


@pytest.mark.slow
def test_any_likelihood_and_layout_can_be_looked_at():
    """One-vs-each, no local variable, classes of each observation, and rows that are masked."""

    def model(x, y, rows):
        plate = lc.class_plate("classes", NUM_CATEGORIES, y, 3, negatives="own")
        with plate as classes:
            w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
        with lc.data_plate("data", NUM_ROWS, rows):
            psi = classes.utilities(jnp.dot, (x,), (w,))
            with numpyro.handlers.mask(mask=rows % 2 == 0):
                numpyro.sample("y", lc.bounds.OneVsEach(psi, classes), obs=y)

    svi = lc.SubsampledSVI(model, AutoDelta(model), optax.adam(0.05), Trace_ELBO())
    result = svi.run(jax.random.key(0), 100, X, Y, ROWS, progress_bar=False)
    found, _ = diagnose(lc.Fitted.from_svi(svi, result), num_repeats=5)
    gap = found["exact log likelihood less bound"]
    assert gap.value > 0.5  # what the bound costs
    assert gap.advice.endswith("or a larger `num_sampled`")  # nothing is kept that could lag


def test_an_error_that_is_kept_is_named_where_it_lags():
    def model(x, y, rows):
        with lc.class_plate("classes", NUM_CATEGORIES, y, 3) as classes:
            w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
        with lc.data_plate("data", NUM_ROWS, rows) as rows:
            lc.sample_choice("y", x @ w.T, classes=classes, rows=rows, noise="normal", obs=y)

    error = np.tile([4.4, 0.0], (NUM_ROWS, 1))  # 3 from where it starts
    lagging = {"w_auto_loc": np.zeros((NUM_CATEGORIES, 3)), "y_error": error}
    guide = class_points_of(NUM_CATEGORIES, w=(3,))
    found, _ = diagnose(lc.Fitted(model, guide, lagging), num_repeats=2)
    assert "without `y_error`" in found["exact log likelihood less bound"].advice


def test_what_the_guide_leaves_to_the_model_makes_no_gap():
    """With all classes the bound is the log likelihood, at one value of it."""

    def model(x, y, rows):
        size = numpyro.sample("size", dist.LogNormal(0, 1))
        with lc.class_plate("classes", NUM_CATEGORIES) as classes:
            w = numpyro.sample("w", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
        with lc.data_plate("data", NUM_ROWS, rows) as rows:
            lc.sample_choice("y", size * (x @ w.T), classes=classes, rows=rows, obs=y)

    w = np.random.default_rng(0).normal(size=(NUM_CATEGORIES, X.shape[1])).astype(np.float32)

    def guide(x, y, rows):
        with lc.class_plate("classes", NUM_CATEGORIES):
            numpyro.sample("w", dist.Delta(numpyro.param("loc", w, event_dim=1)).to_event(1))

    found, _ = diagnose(lc.Fitted(model, guide, {"loc": w}), num_repeats=3)
    assert abs(found["exact log likelihood less bound"].value) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("length", "dim"),
    [
        (3, -1),
        (20, -1),
        (20, -2),
    ],
)
def test_rows_of_several_choices_are_looked_at_row_by_row(length, dim):
    """All rows of batches, where each has a sequence of choices, say what they say at once."""
    num_rows = 20
    x = np.random.default_rng(0).normal(size=(num_rows, length, 2)).astype(np.float32)
    y = np.random.default_rng(1).integers(0, NUM_CATEGORIES, (num_rows, length))

    def model(x, y=None, rows=None):
        b = numpyro.sample("b", dist.Normal(0, 1).expand([2]).to_event(1))
        with lc.class_plate("classes", NUM_CATEGORIES, y, 4) as classes:
            w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
        if dim == -1:
            x, y = jnp.swapaxes(x, 0, 1), jnp.swapaxes(y, 0, 1)
        time = numpyro.plate("time", length, dim=-3 - dim)
        with lc.data_plate("data", num_rows, rows, dim=dim) as rows, time:
            lc.sample_choice("y", (x + b) @ w.T, classes=classes, rows=rows, obs=y)

    params = {"b_auto_loc": np.zeros(2), "b_auto_scale": np.full(2, 0.1)}
    w = np.random.default_rng(2).normal(size=(NUM_CATEGORIES, 2))
    params |= {"w_auto_loc": w, "w_auto_scale": np.full(w.shape, 0.3)}
    params["y_u"] = np.zeros((length, num_rows) if dim == -1 else (num_rows, length))
    guide = normals_of({"b": (2,)}, classes=(NUM_CATEGORIES, {"w": (2,)}))
    fitted, batches = lc.Fitted(model, guide, params), lc.ArrayBatches(x, y, batch_size=5)
    how = {"rng_key": jax.random.key(1), "num_draws": 100, "num_repeats": 2}
    of_batches = fitted.on().diagnose(batches=batches, num_rows=num_rows * length, **how)
    at_once = fitted.on(x, y, np.arange(num_rows)).diagnose(**how)

    def of_parts(found):
        parts = [f for f in found.findings if f.name.startswith(("Pareto", "sd ", "share of cl"))]
        return [f.name for f in parts], [f.value for f in parts]

    names, values = of_parts(of_batches)
    assert "Pareto k of the small sites" in names
    assert names == of_parts(at_once)[0] and np.isfinite(values).all()
    np.testing.assert_allclose(values, of_parts(at_once)[1], rtol=0.02)
    few = fitted.on().diagnose(batches=batches, num_rows=5, **how)  # a sample of the rows
    assert any(finding.name == "Pareto k of the small sites" for finding in few.findings)


def test_the_bound_of_gaussian_utilities_is_not_compared_with_the_centre():
    """It is an expectation over the posterior, so what is between them is no lag of u."""

    def model(x, y, rows):
        with lc.class_plate("classes", NUM_CATEGORIES, y, 4) as classes:
            w = lc.gaussian_weights("w", classes, (x.shape[1],))
        with lc.data_plate("data", NUM_ROWS, rows) as rows:
            how = {"classes": classes, "rows": rows, "obs": y}
            lc.sample_choice("y", x @ w.loc.T, variances=x**2 @ w.variance.T, **how)

    w = np.ones((NUM_CATEGORIES, 3))
    params = {"w_auto_loc": w, "w_auto_scale": w, "y_u": np.zeros(NUM_ROWS)}
    found, _ = diagnose(lc.Fitted(model, lambda *_: None, params), num_repeats=2)
    assert "exact log likelihood less bound" not in found


@pytest.mark.parametrize("kind", ["error site", "noise contrast"])
def test_what_is_no_bound_of_the_log_probability_is_not_compared_with_it(kind):
    def model(x, y, rows):
        with lc.class_plate("classes", NUM_CATEGORIES, y, 4) as classes:
            w = numpyro.sample("w", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
        with lc.data_plate("data", NUM_ROWS, rows):
            if kind == "error site":
                error = numpyro.sample("y_error", lc.error_distribution("gumbel"))
                choice = lc.AugmentedCategorical(x @ w.T, classes, "gumbel", error=error)
            else:
                choice = lc.baselines.NoiseContrastive(x @ w.T, classes, num_noise=4)
            numpyro.sample("y", choice, obs=y)

    of_class = partial(AutoNormal, init_scale=0.1)
    errors = {"y_error": lc.LocalErrors()}
    guide = of_class(model)
    if kind == "error site":
        guide = lc.ErrorGuideList(model, of_class, errors=errors)
    svi = lc.SubsampledSVI(model, guide, optax.adam(0.01), Trace_ELBO())
    result = svi.run(jax.random.key(0), 1, X, Y, ROWS, progress_bar=False)
    found, _ = diagnose(lc.Fitted.from_svi(svi, result), num_repeats=2)
    assert found and "exact log likelihood less bound" not in found


def test_pareto_k_says_what_to_do():
    check = PartsCheck(0.2, np.array([0.9, 0.8, np.nan, 0.1]))
    own = Remedies.of(None)
    small, median, share = check.findings("give more rows", own)
    assert small == Finding("Pareto k of the small sites", 0.2)
    assert median[:2] == ("Pareto k of 3 classes, median", 0.8)
    assert median.advice.startswith("run longer, or start the guide wider")
    assert share.value == pytest.approx(2 / 3)
    unknown = PartsCheck(float("nan"), np.array([np.nan])).findings("give more rows", own)
    advice = "too few rows to tell: give more rows"
    assert [finding.advice for finding in unknown] == [advice, advice, ""]
    assert PartsCheck().findings("give more rows", own) == []


def test_small_sites_of_a_fit_that_weighs_rows_are_not_compared_at_one_draw_of_these():
    """Their posterior has what the rows leave open, which would look too wide."""
    x = np.tile(np.arange(3.0), (8, 1))

    def random_slopes(x, y=None):
        sd = numpyro.sample("sd", dist.HalfNormal(1))
        with lc.entity_plate(
            "people", 8, np.arange(8), lc.EntityCounts.of(8, np.arange(8))
        ) as read:
            slope = numpyro.sample("slope", dist.Normal(0, 1))
        with lc.class_plate("offers", 3) as classes:
            x = x[:, classes.indices]
        with lc.data_plate("data", 8):
            utilities = x * read.rows_of(sd * slope, np.arange(8))[:, None]
            numpyro.sample("y", lc.UtilityCategorical(utilities, classes), obs=y)

    loss = lc.ImportanceWeighted_ELBO("people", 4)
    svi = lc.SubsampledSVI(random_slopes, AutoNormal(random_slopes), optax.adam(0.05), loss)
    y = np.arange(8) % 3
    result = svi.run(jax.random.key(0), 50, x, y, progress_bar=False)
    reading = lc.Fitted.from_svi(svi, result).on(x, y)
    found = reading.diagnose(rng_key=jax.random.key(1), num_draws=100).findings
    (pareto,) = (finding for finding in found if "Pareto k of the small" in finding.name)
    assert np.isnan(pareto.value) and "weighs draws of rows" in pareto.advice
    assert not any("best Gaussian" in finding.name for finding in found)
