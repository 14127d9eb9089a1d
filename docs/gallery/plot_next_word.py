"""
What comes next?
================

The next word of a text: a small network reads the words before, and each word of the
vocabulary has weights with a posterior. How well does it predict, what do sampled
words save, and of which words is it unsure?

Real data: ``lm/ptb.train.txt.gz`` and ``lm/ptb.test.txt.gz``, the Penn Treebank with
10,000 words, as in `github.com/timbmg/RNNLM <https://github.com/timbmg/RNNLM>`__.
Without it we make 20,000 sentences about six places of work. The program takes its
model from the folder ``examples``: run it in ``docs/gallery`` of a clone, with Flax
(``pip install flax``).
"""

# sphinx_gallery_thumbnail_number = 2

import itertools
import os
import random
import sys
import tempfile
from argparse import Namespace
from pathlib import Path
from time import perf_counter

import jax
import matplotlib.pyplot as plt
import numpy as np
import optax
from numpyro.infer import TraceMeanField_ELBO, init_to_mean
from numpyro.infer.autoguide import AutoNormal

import numpyro_largecat as lc

sys.path.append("../../examples")
from kneser_ney import KneserNey
from next_word_model import make_model, make_problem, perplexity
from sentences import END, read_text

# %%
# The text
# --------
# One sentence in a line. In the text that we make, each of 8,400 people belongs to one
# place of work, which decides what is done there and to what; a few people are in many
# sentences, and most in few.

PLACES = {  # who or what is there; what they do; of which kind
    "court": (
        "judge jury trial verdict",
        "hears doubts opens ends",
        "long fair public",
    ),
    "market": ("bank trader bond price", "buys sells rates drops", "cheap risky solid"),
    "sea": ("sailor boat storm harbour", "sees leaves calls meets", "grey old heavy"),
    "clinic": (
        "doctor patient drug test",
        "helps treats tries checks",
        "sick new mild",
    ),
    "stage": ("actor film song scene", "plays writes praises cuts", "funny sad loud"),
    "farm": ("farmer field horse barn", "feeds ploughs paints owns", "green wide dry"),
}
SENTENCES = (
    "{name} {verb} the {kind} {thing}",
    "the {thing} {verb} {name} and {other}",
    "the {kind} {thing} of {name} {verb} a {thing2}",
    "{name} {verb} the {thing} but {other} {verb2} the {kind} {thing2}",
)


def made_lines(num_lines=20_000):
    rng = random.Random(0)
    syllables = "bdfgklmnprstvz", "aeiou", "lmnrst", "aeio", "dknrs"
    names = ["".join(letters) for letters in itertools.product(*syllables)]
    rng.shuffle(names)
    size = len(names) // len(PLACES)
    people = {place: names[i * size :][:size] for i, place in enumerate(PLACES)}
    shares = [1 / rank for rank in range(1, size + 1)]
    lines = []
    for place in rng.choices(list(PLACES), k=num_lines):
        things, verbs, kinds = (words.split() for words in PLACES[place])
        name, other = rng.choices(people[place], shares, k=2)
        (thing, thing2), (verb, verb2) = (
            rng.choices(things, k=2),
            rng.choices(verbs, k=2),
        )
        words = {"name": name, "other": other, "thing": thing, "thing2": thing2}
        words |= {"verb": verb, "verb2": verb2, "kind": rng.choice(kinds)}
        lines.append(rng.choice(SENTENCES).format(**words))
    return lines


folder = Path(os.environ.get("LARGECAT_DATA", "no folder")) / "lm"
if (folder / "ptb.train.txt.gz").is_file():
    text = read_text(folder / "ptb.train.txt.gz", folder / "ptb.test.txt.gz")
    settings, num_sampled = {"num_features": 32, "prior_scale": 0.15}, 500
    num_passes = 1
else:
    with tempfile.TemporaryDirectory() as made:
        path = Path(made) / "text.txt"
        path.write_text("\n".join(made_lines()))
        text = read_text(path)  # the last tenth is held out
    settings, num_sampled = {"num_features": 8, "prior_scale": 0.5}, 100
    num_passes = 1
settings = Namespace(**settings, num_before=4, num_hidden=64, seed=0)
problem = make_problem(text, settings.num_before)
counts = problem.counts - 1
print(f"{len(text.words)} words, {len(text.train)} to learn from, ", end="")
print(f"{len(text.held_out)} held out")

# %%
# The model
# ---------
# One table has a row of features for each word. The network reads the rows of the four
# words before; what it gives, times the row of each word, is that word's utility. The
# rows have a prior and a posterior. The network is a module of Flax, of which NumPyro's
# ``nnx_module`` makes a parameter; ``random_nnx_module`` would give it a posterior too.
# The table is both read and chosen from, so the class plate is told what is ``read``.
#
# .. literalinclude:: ../../examples/next_word_model.py
#    :pyobject: Encoder
#
# .. literalinclude:: ../../examples/next_word_model.py
#    :pyobject: make_model
#
# The fit
# -------
# With sampled words, and with all words in each step; all else is equal, and so is the
# number of passes. A word that few steps touch keeps the width that it started with. So
# each starts as wide as a rough count says: 20 uses know as much of it as the prior.

PART = 32  # held-out pieces that are scored at once
whole = len(problem.held_out_words) // PART * PART
held_out = [
    each[:whole].reshape(-1, PART, each.shape[1])
    for each in (problem.held_out_before, problem.held_out_words)
]
some = [each[:: max(1, len(each) // 8)] for each in held_out]


def fit(num_sampled):
    """The fit, its perplexity by seconds of steps, and held-out log probabilities."""
    model = make_model(problem, num_sampled, settings)
    guide = AutoNormal(model, init_loc_fn=init_to_mean)
    num_steps = num_passes * len(problem.words) // 20
    rate = optax.cosine_decay_schedule(0.01, num_steps, 0.02)
    svi = lc.SubsampledSVI(model, guide, optax.adam(rate), TraceMeanField_ELBO())
    batches = lc.ArrayBatches(problem.before, problem.words, batch_size=20)
    shape = len(counts), settings.num_features
    widths = settings.prior_scale / np.sqrt(1 + counts / 20)
    start = {
        "weight_auto_loc": 0.1 * jax.random.normal(jax.random.key(0), shape),
        "weight_auto_scale": np.broadcast_to(widths[:, None], shape),
    }

    @jax.jit
    def log_probs(params, before, words):
        """Exact, over all words, at the centre of the posterior."""
        fitted = lc.Fitted(model, guide, params)
        parts = before, words
        return jax.lax.map(
            lambda part: fitted.on(part[0]).log_likelihood(part[1]), parts
        )

    curve, scored = [], 0.0

    def score(result):
        nonlocal scored
        began = perf_counter()
        found = np.asarray(log_probs(result.params, *some))
        curve.append((began - started - scored, perplexity(found)))
        scored += perf_counter() - began
        return found.mean()

    options = {"batches": batches, "progress_bar": False}
    first = svi.run(jax.random.key(1), 2, init_params=start, **options)  # compiles
    started = perf_counter()
    while_it_fits = lc.HeldOut(score, every_steps=num_steps // 8)
    options |= {"init_state": first.state, "held_out": while_it_fits}
    result = svi.run(jax.random.key(2), num_steps - 2, **options)
    test = np.asarray(log_probs(result.params, *held_out))
    return lc.Fitted.from_svi(svi, result), np.array(curve), test


sampled, curve, test = fit(num_sampled)
_, exact_curve, exact_test = fit(None)
words = held_out[1].ravel()
unigram = perplexity(np.log(problem.counts / problem.counts.sum())[words])
trigram = perplexity(KneserNey(text.train, len(text.words), END).log_prob(words))
print(f"perplexity: unigram {unigram:.0f}, trigram {trigram:.0f}")
print(
    f"{num_sampled} drawn: {perplexity(test):.1f} after {curve[-1, 0]:.1f} s of steps"
)
print(f"all words: {perplexity(exact_test):.1f} after {exact_curve[-1, 0]:.1f} s")

# %%
# How well does it predict?
# -------------------------
# Perplexity is how many words there are to choose from, as it were: that of held-out
# words, exact over all words for both fits. The trigram is Kneser and Ney's. Both fits
# see the same text equally often, and steps with sampled words take less time.

figure, axes = plt.subplots(figsize=(6, 3.4))
axes.plot(*exact_curve.T, "o-", label="all words in each step")
axes.plot(*curve.T, "o-", label=f"{num_sampled} words drawn in each step")
axes.axhline(unigram, color="0.5", linestyle=":", label="unigram")
axes.axhline(trigram, color="0.5", linestyle="--", label="trigram")
axes.set(yscale="log", xlabel="seconds of steps", ylabel="held-out perplexity")
axes.yaxis.set_major_formatter("{x:.0f}")
axes.yaxis.set_minor_formatter("{x:.0f}")
axes.legend(fontsize=8)
figure.tight_layout()

# %%
# With fewer than 5,000 words there is little to save. On the Penn Treebank one pass of
# this small model ends behind the trigram; ``examples/next_word.py`` makes eight passes
# of a larger one in 13 minutes, and is ahead.
#
# After which words is it sure?
# -----------------------------
# The most probable next words at four places of the held-out text, with 90 % intervals
# of their probability over draws of all rows, read and chosen from. The word that came
# is blue; ``<eos>`` is the end of a sentence and ``<unk>`` any word that is not known.

pieces = np.linspace(0, len(problem.held_out_words) - 1, 6, dtype=int)[1:-1]
before = problem.held_out_before[pieces, : settings.num_before]
came = problem.held_out_words[pieces, 0]
top = np.asarray(sampled.on(before).top_classes(5).classes)[:, 0]
draws = sampled.on(np.repeat(before, 5, axis=0)).log_likelihood(
    top.reshape(-1, 1), rng_key=jax.random.key(2), num_draws=100
)
draws = np.exp(np.asarray(draws)).reshape(100, 4, 5)
figure, grid = plt.subplots(2, 2, figsize=(9, 4.6), sharex=True)
for i, axes in enumerate(grid.flat):
    low, middle, high = np.quantile(draws[:, i], [0.05, 0.5, 0.95], axis=0)
    colors = ["C0" if word == came[i] else "0.75" for word in top[i]]
    error = [middle - low, high - middle]
    axes.barh(range(5), middle, xerr=error, color=colors, ecolor="C1")
    axes.set_yticks(range(5), [text.words[word] for word in top[i]])
    context = " ".join(text.words[word] for word in before[i])
    axes.set_title(f"{context} ...", fontsize=10)
    axes.invert_yaxis()
for axes in grid[1]:
    axes.set_xlabel("probability")
figure.tight_layout()

# %%
# Of which words is it unsure?
# ----------------------------
# For some held-out words: how far their log probability moves from draw to draw, and
# what the mean over the posterior gives more than its centre. Each point is a twelfth
# of these words, from rare to frequent.

every = -(-len(test) // 12)
before, words, at_centre = (
    each[::every].reshape(-1, each.shape[-1]) for each in (*held_out, test)
)
draws = sampled.on(before).log_likelihood(
    words, rng_key=jax.random.key(3), num_draws=16
)
draws = np.asarray(draws)
averaged = np.logaddexp.reduce(draws) - np.log(len(draws))
print(f"perplexity of these: {perplexity(at_centre):.1f} at the centre, ", end="")
print(f"{perplexity(averaged):.1f} by the mean over the posterior")

often = counts[words]
groups = np.array_split(np.argsort(often, axis=None, kind="stable"), 12)
uses = [often.ravel()[group].mean() + 1 for group in groups]
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4))
for axes, of_words in ((left, draws.std(axis=0)), (right, averaged - at_centre)):
    axes.plot(uses, [of_words.ravel()[group].mean() for group in groups], "o-")
    axes.set(xscale="log", xlabel="uses of the word, and one")
left.set(ylabel="sd of the log probability", ylim=(0, None))
right.set_ylabel("nats gained over the centre")
right.axhline(0, color="0.5", linewidth=0.8)
figure.tight_layout()

# %%
# Of frequent words it is sure. Rare words have little but their prior, so draws differ
# most for these, and there the mean over the posterior is ahead of the centre; common
# words pay for it. Take the mean where rare words matter, and the centre for speed.
