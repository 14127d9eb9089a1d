"""
Which tags fit?
===============

Tags for documents, from the words that a document has: which ones, how probable each
is, and whether such a probability can be believed.

Real data: ``xml/bibtex_train.txt.gz`` and ``xml/bibtex_test.txt.gz``, 7,395 papers with
159 tags in the format of the `Extreme Classification Repository
<http://manikvarma.org/downloads/XC/XMLRepository.html>`__, made from the file in
`github.com/Shashankaubaru/MLGT <https://github.com/Shashankaubaru/MLGT>`__. It has
numbers in place of words and tags. Without it we make 2,500 documents with 24 tags.
"""

# sphinx_gallery_thumbnail_number = 2

import os
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import TraceMeanField_ELBO, init_to_mean
from numpyro.infer.autoguide import AutoNormal
from scipy.sparse import csr_array

import numpyro_largecat as lc

# %%
# The documents
# -------------
# Which words a document has, as a sparse matrix, and which tags, as another. Tags that
# we make share some of their words, as real ones do.

WORDS = {
    "bayes": "prior posterior evidence belief sampling chain inference model",
    "monte carlo": "sampling chain random walk step burn model proposal",
    "networks": "node edge graph path degree community hub link",
    "web": "page link search query site browser user click",
    "retrieval": "search query ranking index document relevance user term",
    "language": "word sentence grammar corpus parser term translation document",
    "speech": "sound voice phoneme recording word microphone accent pitch",
    "vision": "image pixel camera edge object scene depth texture",
    "robots": "arm sensor camera path motor grasp map motion",
    "control": "feedback motor state stable delay motion signal gain",
    "genes": "gene sequence protein expression cell mutation genome sample",
    "medicine": "patient dose trial cell symptom drug hospital sample",
    "brain": "neuron cortex signal memory spike cell stimulus attention",
    "learning": "student teacher class memory course lesson test school",
    "economics": "price market demand trade wage bank growth policy",
    "games": "player strategy payoff move turn market bid equilibrium",
    "climate": "temperature rain ocean ice carbon season model policy",
    "physics": "particle energy field mass quantum wave charge spin",
    "chemistry": "molecule bond acid reaction energy solvent metal charge",
    "software": "code bug test module version user interface release",
    "databases": "table query index row join schema transaction storage",
    "security": "attack key password secret network protocol user signature",
    "history": "war king archive letter century city trade church",
    "maps": "city road region border map location distance river",
}
COMMON = "paper result method new show use data study approach problem time large"


def made_documents(num_documents=2_500):
    """Documents of eight words and one to three tags, of which the first are common."""
    rng = np.random.default_rng(0)
    names = sorted({word for own in WORDS.values() for word in own.split()})
    names += COMMON.split()
    number = {word: i for i, word in enumerate(names)}
    own = [[number[word] for word in words.split()] for words in WORDS.values()]
    common = [number[word] for word in COMMON.split()]
    shares = 1 / np.arange(2, len(own) + 2)
    x = np.zeros((num_documents, len(names)), np.float32)
    has = np.zeros((num_documents, len(own)), np.int8)
    for words_of, tags_of in zip(x, has, strict=True):
        num_tags = rng.choice([1, 1, 1, 2, 2, 3])
        tags = rng.choice(len(own), num_tags, False, shares / shares.sum())
        tags_of[tags] = 1
        for tag in rng.choice(tags, 8):
            words_of[rng.choice(own[tag] if rng.random() < 0.3 else common)] = 1
    return csr_array(x), csr_array(has)


path = (
    Path(os.environ.get("LARGECAT_DATA", "no folder")) / "xml" / "bibtex_train.txt.gz"
)
if path.is_file():
    x, has = lc.data.read_xml_classification(path)
    new_x, new_has = lc.data.read_xml_classification(
        path.with_name("bibtex_test.txt.gz")
    )
    tag_names = [f"tag {k}" for k in range(has.shape[1])]
else:
    x, has = made_documents()
    x, new_x, has, new_has = x[:2_000], x[2_000:], has[:2_000], has[2_000:]
    tag_names = list(WORDS)
new_x, new_has = new_x[:1_000], new_has[:1_000].toarray()
D, K = x.shape[1], has.shape[1]
print(f"{x.shape[0]} documents, {D} words, {K} tags, {has.nnz} pairs of the two")

# %%
# One observation for each pair
# -----------------------------
# A document with three tags gives three observations: its words, and one of the tags.
# So the model is of *one tag that is drawn from those of the document*. Probabilities
# of all tags sum to 1, and of a document with three tags each has 1/3 at best. It does
# not say how many tags there are, and documents with many of them count more.


def features(x):
    """Numbers of the words of each document, and their values, of length 1 in all."""
    lengths = np.sqrt(x.multiply(x).sum(axis=1))
    rows = lc.SparseRows.from_scipy(x.multiply(1 / np.maximum(lengths, 1)[:, None]))
    return rows.indices, rows.values


document, tag_of_pair = has.nonzero()
ids, values = (of_document[document] for of_document in features(x))
counts = np.bincount(tag_of_pair, minlength=K)
log_frequency = jnp.log((counts + 1) / (counts + 1).sum())

# %%
# The model
# ---------
# Each tag has a weight for each word. How large weights are is learned: with a scale
# that is too large the model believes chance, with one that is too small it believes
# nothing. ``not_centred`` writes ``w`` as the scale times values of a fixed prior, so
# that rare tags do not pull the scale to where they started.


@lc.not_centred
def model(ids, values, tag=None, rows=None):
    scale = numpyro.sample("scale", dist.HalfNormal(2))
    with lc.class_plate("tags", K, tag) as tags:
        w = numpyro.sample("w", dist.Normal(0, scale).expand([D]).to_event(1))
        b = numpyro.sample("b", dist.Normal(0, 1))
    utilities = lc.SparseRows(ids, values, D).utilities(w)
    utilities += b + log_frequency[tags.indices]
    with lc.data_plate("pairs", len(tag_of_pair), rows) as rows:
        lc.sample_choice("y", utilities, classes=tags, rows=rows, obs=tag)


num_steps = 1_500
guide = AutoNormal(model, init_loc_fn=init_to_mean, init_scale=0.1)
rate = optax.cosine_decay_schedule(0.03, num_steps)
svi = lc.SubsampledSVI(model, guide, optax.adam(rate), TraceMeanField_ELBO())
batches = lc.ArrayBatches(ids, values, tag_of_pair, batch_size=200)
result = svi.run(jax.random.key(0), num_steps, batches=batches, progress_bar=False)
fitted = lc.Fitted.from_svi(svi, result)
# No interval: that of `AutoNormal` is a third as wide as it should be.
print(f"scale of the weights: {np.exp(result.params['scale_auto_loc']):.2f}")

# %%
# Can the probabilities be believed?
# ----------------------------------
# Of documents that were not fitted, the five most probable tags. Where the model says
# 0.3, three in ten should be the tag that was drawn: points on the line. Below it the
# model is too sure, above it too careful. The centre of the posterior takes the weights
# for known; the mean over it also counts what is not known of them.

new = fitted.on(*features(new_x))
at_centre = new.top_classes(5)
averaged = new.top_classes(5, rng_key=jax.random.key(1), num_draws=16)
new_document, new_tag = new_has.nonzero()
figure, axes = plt.subplots(figsize=(5, 4.2))
for label, top in {"centre": at_centre, "mean over the posterior": averaged}.items():
    probabilities = np.exp(np.asarray(top.log_probs))[new_document]
    is_drawn = np.asarray(top.classes)[new_document] == new_tag[:, None]
    lc.plots.reliability(probabilities, is_drawn, num_bins=20, ax=axes, label=label)
    sure = probabilities > 0.5
    said, came = probabilities[sure].mean(), is_drawn[sure].mean()
    print(f"{label}: above 0.5 it says {said:.2f} on average, and {came:.2f} come true")
figure.tight_layout()

# %%
# Small probabilities are too careful, and the winner of a document gets too much; the
# mean over the posterior gives it less of that than the centre. Some of it stays: a
# model of one tag at a time does not know that tags go together.
#
# What does it say of a document?
# -------------------------------
# The five most probable tags of four documents, with 90 % intervals of the probability.
# Tags that the document has are blue. A long bar with a wide interval is a guess.

shown = np.linspace(0, len(new_has) - 1, 6, dtype=int)[1:-1]
tags = np.asarray(averaged.classes)[shown]
repeated = features(new_x[np.repeat(shown, 5)])
draws = fitted.on(*repeated).log_likelihood(
    tags.ravel(), rng_key=jax.random.key(2), num_draws=100
)
draws = np.exp(np.asarray(draws)).reshape(100, 4, 5)
figure, grid = plt.subplots(2, 2, figsize=(9, 4.6), sharex=True)
for i, axes in enumerate(grid.flat):
    low, high = np.quantile(draws[:, i], [0.05, 0.95], axis=0)
    mean = draws[:, i].mean(axis=0)
    colors = ["C0" if has_it else "0.75" for has_it in new_has[shown[i], tags[i]]]
    error = np.maximum([mean - low, high - mean], 0)
    axes.barh(range(5), mean, xerr=error, color=colors, ecolor="C1")
    axes.set_yticks(range(5), [tag_names[k] for k in tags[i]])
    axes.set_title(f"document {shown[i]}, tags: {new_has[shown[i]].sum()}", fontsize=10)
    axes.invert_yaxis()
for axes in grid[1]:
    axes.set_xlabel("probability")
figure.tight_layout()

# %%
# When to suggest a tag?
# ----------------------
# Suggest the best tag of the documents where its probability is high, and leave the
# others to people. The fewer documents get one, the more of the tags are right.

best = np.take_along_axis(new_has, np.asarray(averaged.classes[:, :1]), axis=1)[:, 0]
order = np.argsort(-np.asarray(averaged.log_probs[:, 0]))
number = np.arange(1, len(order) + 1)
right = best[order].cumsum() / number
figure, axes = plt.subplots(figsize=(6, 3.2))
axes.plot(number[19:] / len(order), right[19:])
axes.set(
    xlabel="share of documents that get a suggestion",
    ylabel="share that the document has",
    ylim=(0, 1.03),
)
figure.tight_layout()
for share in (0.25, 0.5, 1.0):
    count = round(share * len(order))
    print(f"{share:.0%} of the documents: {right[count - 1]:.0%} right")

# %%
# So few tags are all in each step. With 5,000 or more only the class plate changes:
# ``lc.class_plate("tags", K, tag, num_sampled=200)``, and
# ``proposal=lc.FrequencyProposal(counts + 1)`` draws common tags more often.
