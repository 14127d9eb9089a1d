# SPDX-License-Identifier: Apache-2.0
"""Topics of the Associated Press corpus: fit, read, score and draw them.

    python examples/topics.py --data FOLDER

The folder, or one inside it, must hold ``ap.dat`` and ``ap.vocab.txt`` of LDA-C, plain or with
``.gz``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
import matplotlib.pyplot as plt
import numpy as np

import numpyro_largecat as lc
from numpyro_largecat.data import Corpus, read_lda_c

sys.path.insert(0, str(Path(__file__).parents[1]))  # for `benchmarks`, beside this folder
from benchmarks.data_folder import add_data_argument, how_to_name_data
from benchmarks.readers import find_file

FILES = "ap.dat and ap.vocab.txt"


def draw(fit: lc.TopicFit, shown: Sequence[int], shares: np.ndarray, path: Path) -> None:
    """Bars of the top words of some topics, with the topic's share of all tokens."""
    tops = fit.top_words(8)
    titles = [f"topic {k}, {100 * shares[k]:.1f} % of the tokens" for k in shown]
    axes = lc.plots.topics([tops[k] for k in shown], titles)
    axes[0].figure.savefig(path, dpi=110)
    plt.close(axes[0].figure)


def main(arguments: Sequence[str] | None = None) -> lc.TopicFit:
    parser = argparse.ArgumentParser(description=__doc__)
    add_data_argument(parser, FILES)
    parser.add_argument("--topics", type=int, default=50)
    parser.add_argument("--output", type=Path, default=Path("topics.png"), help="the picture")
    options = parser.parse_args(arguments)
    if options.data is None:
        parser.error(how_to_name_data(FILES))

    corpus: Corpus = read_lda_c(
        find_file(options.data, "ap.dat"), find_file(options.data, "ap.vocab.txt")
    )
    order = np.random.default_rng(0).permutation(corpus.num_documents)
    cut = corpus.num_documents // 10
    train, held_out = corpus[np.sort(order[cut:])], corpus[np.sort(order[:cut])]

    fit = lc.fit_topics(jax.random.key(0), train, options.topics)
    lengths = np.bincount(
        np.repeat(np.arange(train.num_documents), np.diff(train.offsets)), train.counts
    )
    shares = lengths @ fit.proportions(train) / lengths.sum()
    coherence = fit.coherence(train)
    shown = np.argsort(-shares)[:12]
    print("The largest topics: number, share of the tokens, coherence, top words")
    tops = fit.top_words(8)
    for k in shown:
        words = " ".join(str(w.word) for w in tops[k])
        print(f"{k:5d}  {100 * shares[k]:5.1f} %  {coherence[k]:5.2f}  {words}")
    print(f"Held-out log likelihood per word: {fit.score(held_out):.3f}")
    draw(fit, shown.tolist(), shares, options.output)
    print(f"The picture is in {options.output}")
    return fit


if __name__ == "__main__":
    main()
