"""
What to recommend?
==================

Two tables, of users and of places, each with a posterior: what a user goes to next,
and which places we know too little about to say.

Real data: ``choice/gowalla_train.txt.gz`` and ``choice/gowalla_test.txt.gz``,
30,000 users and 41,000 places, from `github.com/geon0325/LightGCNpp
<https://github.com/geon0325/LightGCNpp>`__. Without them we make 1,000 users and
2,000 places.
"""

# sphinx_gallery_thumbnail_number = 3

import gzip
import importlib.util
import os
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoNormal
from numpyro.infer.initialization import init_to_mean

import numpyro_largecat as lc

# %%
# Visits
# ------


def made_visits(num_users=1_000, num_places=2_000, num_tastes=4):
    """Twenty places of each user, the last four for the test; some are popular."""
    rng = np.random.default_rng(0)
    taste, offer = (
        rng.normal(size=(num_users, num_tastes)),
        rng.normal(size=(num_places, num_tastes)),
    )
    popular = np.sort(rng.gumbel(size=num_places))[::-1]
    noise = rng.gumbel(size=(num_users, num_places))
    order = np.argsort(-(1.3 * taste @ offer.T + popular + noise), axis=1)[:, :20]
    order = rng.permuted(order, axis=1)
    return list(order[:, :16]), list(order[:, 16:])


def read_visits(path):
    with gzip.open(path, "rt") as file:
        return [np.array(line.split()[1:], int) for line in file]


folder = Path(os.environ.get("LARGECAT_DATA", "no folder")) / "choice"
if (folder / "gowalla_train.txt.gz").is_file():
    train, test = (
        read_visits(folder / f"gowalla_{part}.txt.gz") for part in ("train", "test")
    )
    D, num_steps, rows, rates = 32, 20_000, 500, (0.001, 0.003, 0.01)
else:
    (train, test), (D, num_steps, rows) = made_visits(), (4, 3_000, 200)
    rates = (0.01, 0.03, 0.1)
U, K = (
    len(train),
    1 + max(max(own.max(initial=0) for own in part) for part in (train, test)),
)
users, places = (
    np.repeat(np.arange(U), [len(own) for own in train]),
    np.concatenate(train),
)
visits = np.bincount(places, minlength=K)
print(f"{U} users, {K} places, {len(users)} visits")

# %%
# The model
# ---------
# A user's row and a place's row make a utility; popular places have a constant of
# their own. A step touches the users of its minibatch, their places and 100 others.
# The steps are few, so that the page is soon made, and the fit says that more would
# gain.

counts = lc.EntityCounts.of(U, users)
proposal = lc.FrequencyProposal(visits + 1)


def model(users, places=None, rows=None):
    with lc.entity_plate("users", U, users, counts) as read:
        v = numpyro.sample("v", dist.Normal(0, 1).expand([D]).to_event(1))
    with lc.class_plate(
        "places", K, places, num_sampled=100, proposal=proposal
    ) as classes:
        w = numpyro.sample("w", dist.Normal(0, 1).expand([D]).to_event(1))
        b = numpyro.sample("b", dist.Normal(0, 2))
    own = read.rows_of(v, users)
    with lc.data_plate("data", counts.num_ids, rows) as rows:
        lc.sample_choice(
            "y",
            lambda own: own @ w.T + b,
            follow=own,
            classes=classes,
            rows=rows,
            obs=places,
        )


guide = AutoNormal(model, init_loc_fn=init_to_mean, init_scale=0.1)
rate = optax.cosine_decay_schedule(0.03, num_steps)
svi = lc.SubsampledSVI(model, guide, optax.adam(rate), TraceMeanField_ELBO())
keys = jax.random.split(jax.random.key(0))
start = {  # products of two tables that start at 0 move slowly at first
    "v_auto_loc": 0.1 * jax.random.normal(keys[0], (U, D)),
    "w_auto_loc": 0.1 * jax.random.normal(keys[1], (K, D)),
}
batches = lc.ArrayBatches(users, places, batch_size=rows)
result = svi.run(
    jax.random.key(1), num_steps, batches=batches, init_params=start, progress_bar=False
)
print(result.convergence)
lc.plots.elbo(result.losses)

# %%
# Does it find where users go next?
# ---------------------------------
# The share of the test's places among the best 20 that the user has not been to,
# beside the most popular.

fitted = lc.Fitted.from_svi(svi, result)
some = np.flatnonzero([len(own) for own in test])  # users who went anywhere later
some = np.random.default_rng(0).permutation(some)[:1_000]
been = lc.data.padded_lists(users, places, U)[some]
later = lc.data.padded_lists(
    np.repeat(np.arange(U), [len(own) for own in test]), np.concatenate(test), U
)[some]
top = fitted.on(some).top_classes(20, exclude=been)
ours = lc.score_predictions(top, later, at=[20])["recall at 20"]
order = np.argsort(-visits, kind="stable")
found = []
for own, next_places in zip(been, later, strict=True):
    best = order[~np.isin(order, own)][:20]
    found.append(np.isin(next_places[next_places >= 0], best).mean())
popularity = float(np.mean(found))
chance = 20 / K


# %%
# A point estimate by as many steps, in PyTorch with sparse embeddings, if it is there:
# utilities of drawn classes lose the log of how often they are drawn, and there is no
# prior. Its best rate of three, by this very score of the same users.


def recall_in_torch(rate):
    import torch

    torch.set_num_threads(1)  # more wait for each other where cores are busy
    torch.manual_seed(0)
    v, w, b = (
        torch.nn.Embedding(n, d, sparse=True) for n, d in ((U, D), (K, D), (K, 1))
    )
    for table in (v, w):
        torch.nn.init.normal_(table.weight, std=0.1)
    share = torch.tensor((visits + 1) / (visits + 1).sum(), dtype=torch.float32)
    b.weight.data = share.log()[:, None]
    parameters = [*v.parameters(), *w.parameters(), *b.parameters()]
    optimizer = torch.optim.SparseAdam(parameters, rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)
    user_ids, place_ids = torch.tensor(users), torch.tensor(places)
    for _ in range(num_steps):
        batch = torch.randint(len(users), (rows,))
        u, own = user_ids[batch], place_ids[batch]
        drawn = torch.multinomial(share, 100, replacement=True)
        x = v(u)
        of_own = (x * w(own)).sum(1) + b(own)[:, 0]
        shift = (100 * share[drawn]).log()
        of_drawn = x @ w(drawn).T + b(drawn)[:, 0] - shift
        of_drawn = of_drawn.masked_fill(drawn == own[:, None], -torch.inf)
        loss = torch.logsumexp(torch.cat([of_own[:, None], of_drawn], 1), 1) - of_own
        optimizer.zero_grad()
        loss.mean().backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        scores = v.weight[some] @ w.weight.T + b.weight[:, 0]
    for n, own in enumerate(been):
        scores[n, own[own >= 0]] = -torch.inf
    best = scores.topk(20).indices.numpy()
    hits = [np.isin(own[own >= 0], top) for own, top in zip(later, best, strict=True)]
    return float(np.mean([hit.mean() for hit in hits]))


recalls = {"chance": chance, "popularity": popularity}
if importlib.util.find_spec("torch") is not None:
    by_rate = {rate: recall_in_torch(rate) for rate in rates}
    print("PyTorch by rate:", {rate: round(by_rate[rate], 3) for rate in rates})
    recalls["PyTorch"] = max(by_rate.values())
recalls["two tables"] = ours
figure, axes = plt.subplots(figsize=(5, 2.6))
axes.barh(list(recalls), list(recalls.values()))
axes.set(xlabel="recall at 20")
figure.tight_layout()
print(
    "recall at 20:", {name: round(float(value), 3) for name, value in recalls.items()}
)

# %%
# Which places do we know?
# ------------------------
# The posterior's width of a place's row shrinks with its visits. A place with few is
# not bad, it is unknown: recommend it where its upper end is high, if you want to
# learn about it.

sd = np.asarray(result.params["w_auto_scale"]).mean(axis=1)
figure, axes = plt.subplots(figsize=(6, 3.2))
axes.scatter(visits + 1, sd, s=4, alpha=0.4)
axes.set(
    xscale="log",
    xlabel="visits of the place, and one",
    ylabel="posterior sd of its features",
)
figure.tight_layout()

# %%
# Which places are alike?
# -----------------------
# Places that the same people go to have similar rows: here the most visited, on the
# plane that holds most of what differs between them, with their numbers.

often = np.argsort(-visits)[:400]
w = np.asarray(result.params["w_auto_loc"])[often]
lc.plots.class_map(
    w, {k: str(often[k]) for k in range(12)}, color=np.log(visits[often] + 1)
)

# %%
# Saved and served
# ----------------
# A fit is saved in a folder. A program that has the model and the guide reads it, and
# answers for one user or for many.

with tempfile.TemporaryDirectory() as folder:
    svi.save(folder + "/fit", result)
    loaded = svi.load(folder + "/fit", users[:2], places[:2], jnp.arange(2))
served = lc.Fitted.from_svi(svi, loaded)
print(served.on(some[:2]).top_classes(5, exclude=been[:2]).classes)
