"""
What is the news about?
=======================

Topics of short news, from counts of their words: how many there are, what they are
about, how sure a document is of its topics, and how they come and go.

Real data: ``text/ap.dat.gz`` and ``text/ap.vocab.txt.gz``, 2,246 articles of the
Associated Press, from `github.com/blei-lab/lda-c
<https://github.com/blei-lab/lda-c>`__. Without them we make 600 articles on eight
subjects ourselves. The last picture is one to click through, by Altair
(``pip install altair``).
"""

# sphinx_gallery_thumbnail_number = 2

import os
from pathlib import Path

import altair as alt
import jax
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

import numpyro_largecat as lc
from numpyro_largecat.data import Corpus, read_lda_c

# %%
# The documents
# -------------
# A corpus has the words of each document and how often each occurs. Common and rare
# words leave.

SUBJECTS = {
    "court": "judge trial lawyer jury prison appeal sentence evidence guilty verdict",
    "market": "stock bond price dollar profit trade share bank index investor",
    "weather": "storm rain wind flood snow temperature coast forecast damage river",
    "space": "rocket orbit launch satellite astronaut shuttle crew moon engine mission",
    "film": "actor film director award scene music theater song studio show",
    "health": "patient doctor virus drug hospital disease cell study cancer test",
    "election": "vote party campaign candidate poll senate mayor debate seat ballot",
    "sport": "team game season coach player score league win match title",
}


def made_news(num_documents=600):
    """Articles of 40 words on one to three of the subjects, and a few others."""
    rng = np.random.default_rng(0)
    words = [text.split() for text in SUBJECTS.values()]
    weights = 1 / np.arange(1, 11)
    probs = 0.9 * np.kron(np.eye(8), weights / weights.sum()) + 0.1 / 80
    names = [word for own in words for word in own]
    shares = rng.dirichlet(np.full(8, 0.15), num_documents)
    return Corpus.from_documents(
        [[names[v] for v in rng.choice(80, 40, p=own @ probs)] for own in shares], names
    )


folder = Path(os.environ.get("LARGECAT_DATA", "no folder")) / "text"
if (folder / "ap.dat.gz").is_file():
    corpus = read_lda_c(folder / "ap.dat.gz", folder / "ap.vocab.txt.gz")
    corpus, sizes = corpus.prune(min_df=5, max_df=0.3), (25, 50, 100)
else:
    corpus, sizes = made_news(), (4, 8, 16)
train, held_out = corpus[: len(corpus) * 4 // 5], corpus[len(corpus) * 4 // 5 :]
print(train, held_out)

# %%
# How many topics?
# ----------------
# As many as the evidence lower bound is largest with. Words of documents that were not
# fitted agree: the score is their mean log probability, given the other words of the
# same document, and other numbers have a lower one, or hardly a higher one.

fit = lc.fit_topics(jax.random.key(0), train, "learned", progress_bar=False)
num_topics = len(fit.topics)
fits = {
    k: lc.fit_topics(jax.random.key(0), train, k, progress_bar=False) for k in sizes
}
scores = {k: fit.score(held_out) for k, fit in fits.items()}
frequencies = np.bincount(train.words, train.counts, train.num_words) + 1.0
frequencies /= frequencies.sum()
alone = np.log(frequencies[held_out.words]) @ held_out.counts / held_out.num_tokens

figure, axes = plt.subplots(figsize=(6, 3))
axes.plot(list(scores), list(scores.values()), "o-", label="a number of topics")
axes.plot(num_topics, fit.score(held_out), "C2*", markersize=12, label="learned")
axes.axhline(alone, color="C1", linestyle="--", label="word frequencies alone")
axes.set(xscale="log", xticks=list(scores), xticklabels=list(scores))
axes.minorticks_off()
axes.set(xlabel="topics", ylabel="log probability of a held-out word")
axes.legend()
figure.tight_layout()

# %%
# What are they about?
# --------------------
# Words in the order of their relevance, which puts those first that other topics
# lack.

coherence = fit.coherence(train)
largest = np.argsort(-fit.proportions(train).mean(axis=0))[:8]
tops = fit.top_words(8, by="relevance")
names = [" ".join(top.word for top in words[:3]) for words in tops]

lc.plots.topics(
    [tops[k] for k in largest],
    [f"topic {k}, coherence {coherence[k]:.2f}" for k in largest],
)

# %%
# How sure is a document?
# -----------------------
# A document of 40 words uses few topics. With fewer of its words we know less, which
# the Dirichlet of its proportions says: here the largest share by how many words were
# read.

longest = int(np.argmax(np.diff(train.offsets)))
words, counts = train[longest]
order = np.random.default_rng(1).permutation(np.repeat(words, counts))
lengths = [n for n in (1, 2, 5, 10, 20, 40, 80) if n <= len(order)]
parts = [np.unique(order[:n], return_counts=True) for n in lengths]
shares = fit.proportions(Corpus.from_rows(parts, train.num_words, train.vocabulary))

figure, axes = plt.subplots(figsize=(6, 3))
for k in np.argsort(-shares[-1])[:4]:
    axes.plot(lengths, shares[:, k], "o-", label=names[k])
axes.set(xscale="log", xlabel="words read", ylabel="share of the topic")
axes.legend(fontsize=8)
figure.tight_layout()

# %%
# Which documents are about it?
# -----------------------------
# The shares of topics in some documents, coloured by topic; each topic has its three
# most relevant words.

some = train[:12]
lc.plots.responsibilities(
    fit.proportions(some),
    [f"document {d}" for d in range(len(some))],
    dict(enumerate(names)),
)

# %%
# A page to click through
# -----------------------
# As in LDAvis, topics that share words are close, and the area of a topic is its share
# of all tokens. The page holds the words that come first at some weight of probability
# in relevance.

numbers = fit.for_pyldavis(train)
vocabulary, occurs = np.array(numbers["vocab"]), numbers["term_frequency"]
sizes = numbers["doc_lengths"] @ numbers["doc_topic_dists"]
tokens = sizes[:, None] * numbers["topic_term_dists"]
share = tokens / tokens.sum(axis=0)
is_first = np.zeros(tokens.shape, bool)
for lack in np.linspace(0, 1, 11):
    order = np.argsort(lack * np.log(occurs) - np.log(tokens), axis=1)
    np.put_along_axis(is_first, order[:, :10], True, axis=1)
k, v = np.nonzero(is_first.any(axis=0) & (is_first | (share > 0.02)))
roots = np.sqrt(numbers["topic_term_dists"])  # as far apart as by Hellinger
u, scale, _ = np.linalg.svd(roots - roots.mean(axis=0), full_matrices=False)
x, y = (u * scale)[:, :2].T

labels = np.array([f"{n}: {name}" for n, name in enumerate(names)])
topics = pd.DataFrame({"topic": labels, "x": x, "y": y, "tokens": sizes})
words = pd.DataFrame({"topic": labels[k], "word": vocabulary[v], "all": occurs[v]})
words = words.assign(tokens=tokens[k, v].round(3), share=share[k, v].round(3))

# %%
# `Altair <https://altair-viz.github.io>`__ draws it, into a file that needs no network.
# Pick a topic to read its first words, and in grey how often they occur in all. A lower
# weight puts words first that other topics lack. Point at a word to see which topics
# have it.

menu = alt.binding_select(options=labels.tolist(), name="topic ")
picked = alt.selection_point(
    fields=["topic"], value=labels[largest[0]], bind=menu, on="symbol:click"
)
pointed = alt.selection_point(
    fields=["word"], on="pointerover", clear="pointerout", empty=False
)
slider = alt.binding_range(min=0, max=1, step=0.1, name="weight of probability ")
weight = alt.param("weight", value=0.6, bind=slider)
blue, grey, orange = (alt.value(c) for c in ("#1f77b4", "#c3cbd4", "#ff7f0e"))

place = alt.Chart(topics, width=340, height=330).mark_circle(stroke="white")
place = place.encode(
    alt.X("x:Q").axis(None),
    alt.Y("y:Q").axis(None),
    alt.Size("tokens:Q").scale(range=[0, 3000]),
    tooltip="topic",
)
having = place.properties(data=words).transform_filter(pointed)
looked_up = alt.LookupData(topics, "topic", ["x", "y", "tokens"])
having = having.transform_lookup("topic", looked_up)
first = alt.Chart(words, width=230, height=330).mark_bar().transform_filter(picked)
first = first.transform_calculate(
    order="(1 - weight) * log(datum.all) - log(datum.tokens)"
)
first = first.transform_window(rank="row_number()", sort=[{"field": "order"}])
first = first.transform_filter("datum.rank <= 10")
first = first.encode(alt.Y("word:N", title=None).sort(field="rank"))
page = alt.layer(
    place.encode(color=alt.when(picked).then(blue).otherwise(grey)).add_params(picked),
    having.encode(color=orange, opacity="share:Q"),
) | alt.layer(
    first.encode(alt.X("all:Q", title="tokens in the topic, and in all"), color=grey),
    first.encode(x="tokens:Q", color=alt.when(pointed).then(orange).otherwise(blue)),
).add_params(weight, pointed)
page = page.configure_legend(disable=True).configure_view(stroke=None)
style = "#vis {flex-direction: column-reverse} form {font: 14px sans-serif}"
options = {"actions": False, "defaultStyle": style}
page.save("topics.html", inline=True, embed_options=options)
