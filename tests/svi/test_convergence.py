# SPDX-License-Identifier: Apache-2.0
"""What a fit says of its convergence at its end."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.diagnostics import split_gelman_rubin
from numpyro.infer import Trace_ELBO, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoNormal

import numpyro_largecat as lc
from numpyro_largecat.svi.convergence import Convergence

RNG = np.random.default_rng(0)
LEVEL = 100 + RNG.normal(size=2_000)


def test_a_level_fit_has_r_hats_near_one_and_the_noise_of_its_steps():
    found = Convergence.of(LEVEL, {"w": RNG.normal(size=(800, 3))})
    assert found.elbo_r_hat == pytest.approx(1, abs=0.02) and not found.elbo_rises
    assert found.r_hats["w"] == pytest.approx(1, abs=0.05) and not found.drifts("w")
    assert found.noise == pytest.approx(0.01, rel=0.1)
    assert "run longer" not in str(found)


def test_a_trend_is_told_and_is_no_noise():
    trend = np.linspace(300, 0, 2_000)
    found = Convergence.of(LEVEL + trend, {"w": trend[:, None], "still": np.ones((2_000, 1))})
    assert found.elbo_rises and found.drifts("w")
    assert found.r_hats.keys() == {"w"}
    assert found.noise == pytest.approx(1 / np.mean((LEVEL + trend)[1_000:]), rel=0.1)
    assert str(found).count("run longer") == 2


def test_a_rise_that_the_noise_of_steps_hides_from_r_hat_is_seen():
    """Six standard errors of the difference of two quarters, of 500 steps each."""
    slope = -(6 * np.sqrt(2 / 500)) / 500
    found = Convergence.of(LEVEL + slope * np.arange(2_000), {})
    assert found.elbo_r_hat < 1.05 and found.elbo_rises
    assert found.rise / found.rise_error == pytest.approx(6, abs=4)  # within four errors of it


def test_level_fits_are_hardly_ever_said_to_rise():
    """One in 740 for each of 1,000: more than 8 of them in one of 10,000 such tests."""
    losses = np.random.default_rng(1).normal(size=(1_000, 400)) + 50
    assert sum(Convergence.of(one, {}).elbo_rises for one in losses) <= 8


def test_r_hat_is_numpyros_of_the_last_half():
    expected = split_gelman_rubin(LEVEL[1_000:].reshape(4, 250))
    assert Convergence.of(LEVEL, {}).elbo_r_hat == pytest.approx(float(expected))


def of_normal_guide(loc, scale):
    """Iterates of the parameters of an automatic guide; ``scale`` is optimised before softplus."""
    iterates = {"w_auto_loc": loc, "w_auto_scale": np.log(np.expm1(scale))}
    return Convergence.of(LEVEL, {name: values[:, None] for name, values in iterates.items()})


def test_a_parameter_that_stands_still_next_to_its_sd_does_not_drift():
    """Whatever its R-hat, which is that of a trend without noise."""
    trend = np.linspace(0, 1, 800)  # moves by a quarter from the third quarter to the last
    found = of_normal_guide(0.3 * 3 * trend, np.full(800, 3.0))
    assert found.r_hats["w_auto_loc"] > 2 and not found.drifts("w_auto_loc")
    assert found.moved["w_auto_loc"] == pytest.approx(0.3 / 4, rel=0.01)
    assert "no parameter drifts" in str(found)
    found = of_normal_guide(0.5 * 3 * trend, np.exp(0.3 * trend))
    assert found.drifts("w_auto_loc") and not found.drifts("w_auto_scale")
    assert found.moved["w_auto_scale"] == pytest.approx(0.3 / 4, rel=0.01)
    assert "w_auto_loc drifts" in str(found)
    found = of_normal_guide(0.5 * 3 * trend, np.exp(0.5 * trend))
    assert "and 1 more drift" in str(found)


def test_losses_that_stay_or_jump_are_no_error():
    """One that has come to its end exactly, and one that has jumped; warnings are errors."""
    assert Convergence.of(np.ones(100), {}).elbo_r_hat == 1
    jumps = np.repeat([0.0, 1.0, 2.0, 3.0], 25)
    found = Convergence.of(np.concatenate([np.zeros(100), jumps]), {"w": jumps[:, None]})
    assert found.elbo_falls and found.drifts("w")


def test_a_fit_that_gets_worse_is_not_told_to_run_longer():
    """Whatever else drifts: a rate that is too high moves parameters too."""
    falling = LEVEL + 0.01 * np.arange(2_000)
    found = Convergence.of(falling, {"w": falling[:, None]})
    assert found.elbo_falls and not found.elbo_rises and found.elbo_r_hat > 1.05
    assert "the ELBO fell by 4." in str(found) and "lower the rate" in str(found)
    assert "run longer" not in str(found)


def test_an_optimiser_that_moves_nothing_is_told():
    stays = np.ones((200, 3))
    found = Convergence.of(LEVEL, {"a": stays, "b": stays})
    assert found.has_ended and "no number on record moved: if the rate is at 0" in str(found)
    moves = np.where(np.arange(200) < 1, 0.0, stays.T).T
    assert not Convergence.of(LEVEL, {"a": stays, "b": moves}).has_ended
    assert not Convergence.of(LEVEL, {}).has_ended


def test_an_exhausted_schedule_is_told_at_the_end_of_the_run():
    def model(x, y=None, rows=None):
        with lc.class_plate("classes", 9, y, 3) as classes:
            w = numpyro.sample("w", dist.Normal(0, 1))
        with lc.data_plate("data", 40, rows) as rows:
            lc.sample_choice("y", x[:, None] * w, classes=classes, rows=rows, obs=y)

    rate = optax.cosine_decay_schedule(0.1, 100)
    svi = lc.SubsampledSVI(model, AutoNormal(model), optax.adam(rate), TraceMeanField_ELBO())
    batches = lc.ArrayBatches(RNG.normal(size=40), np.arange(40) % 9, batch_size=20)
    first = svi.run(jax.random.key(0), 100, batches=batches, progress_bar=False)
    again = svi.run(
        jax.random.key(1), 100, batches=batches, init_state=first.state, progress_bar=False
    )
    assert [result.convergence.has_ended for result in (first, again)] == [False, True]


@pytest.mark.parametrize("losses", [[], [1.0], [np.nan] * 50])
def test_too_few_steps_say_so(losses):
    assert str(Convergence.of(losses, {})).startswith("too few steps")


def quadratic():
    a = numpyro.param("a", jnp.zeros(2), event_dim=1)
    numpyro.factor("loss", -((a - 1) ** 2).sum())


@pytest.mark.parametrize("progress_bar", [False, True])
def test_a_line_at_the_end_goes_with_the_bar(progress_bar, capsys):
    svi = lc.SubsampledSVI(quadratic, lambda: None, optax.adam(0.01), Trace_ELBO())
    result = svi.run(jax.random.key(0), 100, progress_bar=progress_bar)
    said = [line for line in capsys.readouterr().err.splitlines() if "the ELBO rose" in line]
    assert len(said) == progress_bar
    assert result.convergence.elbo_rises
    assert all(line.strip() == str(result.convergence) for line in said)
