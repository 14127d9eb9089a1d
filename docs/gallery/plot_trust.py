"""
From prior to trust
===================

Before data are real: simulate from the prior, fit, and see whether what was
simulated comes back; then compare with NUTS on a problem that is small enough for
it, and read what ``diagnose`` says.
"""

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import MCMC, NUTS, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoNormal
from numpyro.infer.initialization import init_to_mean

import numpyro_largecat as lc

N, K, D = 1_500, 40, 3

# %%
# A model, and data from its prior
# --------------------------------


def model(x, y=None, rows=None, num_sampled=15):
    with lc.class_plate("classes", K, y, num_sampled) as classes:
        w = numpyro.sample("w", dist.Normal(0, 1).expand([D]).to_event(1))
    with lc.data_plate("data", N, rows) as rows:
        lc.sample_choice("y", x @ w.T, classes=classes, rows=rows, obs=y)


keys = jax.random.split(jax.random.key(0), 4)
x = jax.random.normal(keys[0], (N, D))
true_w = jax.random.normal(keys[1], (K, D))
y = jax.random.categorical(keys[2], x @ true_w.T)

# %%
# Two guides
# ----------
# ``AutoNormal`` has a sd for each value, ``AutoRowNormal`` a covariance for the
# values of each class.


def fit(guide):
    rate = optax.cosine_decay_schedule(0.05, 4_000)
    svi = lc.SubsampledSVI(model, guide, optax.adam(rate), TraceMeanField_ELBO())
    batches = lc.ArrayBatches(x, y, batch_size=200)
    result = svi.run(jax.random.key(1), 4_000, batches=batches, progress_bar=False)
    return lc.Fitted.from_svi(svi, result), batches


by_value, batches = fit(AutoNormal(model, init_loc_fn=init_to_mean, init_scale=0.1))
by_row, _ = fit(lc.AutoRowNormal(model))

# %%
# Does the truth come back?
# -------------------------
# Only differences between classes are identified, so we look at contrasts with the
# mean of all classes. Of intervals that hold 90 % of the posterior, 90 % should hold
# the truth.


def contrasts(w):
    return np.asarray(w) - np.asarray(w).mean(axis=-2, keepdims=True)


def draws_of(fitted):
    everything = fitted.on(x[:1], y[:1], jnp.arange(1))
    found = everything.to_arviz(rng_key=jax.random.key(2), num_draws=400)
    return contrasts(np.asarray(found["posterior"]["w"])[0])


approximate = {"AutoNormal": draws_of(by_value), "AutoRowNormal": draws_of(by_row)}
levels = np.linspace(0.1, 0.95, 18)


def covered(draws):
    tails = (1 - levels) / 2
    low, high = (np.quantile(draws, q, axis=0) for q in (tails, 1 - tails))
    return ((low <= contrasts(true_w)) & (contrasts(true_w) <= high)).mean(axis=(1, 2))


# %%
# And beside NUTS
# ---------------
# With all classes the likelihood is exact; 120 weights are few enough for NUTS. It is
# right on average over data sets; its line shows how far a single one, of 120
# contrasts that hang together, may be off by chance. What counts is how near to it
# the guides are.


def exact(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([K, D]).to_event(2))
    numpyro.sample("y", dist.Categorical(logits=x @ w.T), obs=y)


mcmc = MCMC(NUTS(exact), num_warmup=200, num_samples=400, progress_bar=False)
mcmc.run(keys[3], x, y)
nuts = contrasts(mcmc.get_samples()["w"])

figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4))
left.plot([0, 1], [0, 1], color="grey", linewidth=1)
for name, draws in {"NUTS": nuts, **approximate}.items():
    left.plot(levels, covered(draws), label=name)
left.set(xlabel="probability of the interval", ylabel="share that holds the truth")
left.legend()
for name, draws in approximate.items():
    right.scatter(nuts.std(axis=0), draws.std(axis=0), s=10, label=name)
widest = nuts.std(axis=0).max()
right.plot([0, widest], [0, widest], color="grey", linewidth=1)
right.set(xlabel="sd by NUTS", ylabel="sd by the guide")
right.legend()
figure.tight_layout()

# %%
# Without NUTS
# ------------
# Where the problem is too large for it, ``diagnose`` says what it can: has the ELBO
# settled, is the bound near the exact likelihood, is the guide too narrow.

print(by_value.on().diagnose(rng_key=jax.random.key(4), batches=batches))

# %%

print(by_row.on().diagnose(rng_key=jax.random.key(4), batches=batches))
