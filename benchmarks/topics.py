# SPDX-License-Identifier: Apache-2.0
"""Topic models: speed of the local step in K, and held-out words against wall time.

Speed: 1000 synthetic documents with about 150 distinct words each, V = 6000, 100 sweeps for each
document, L = 8. Documents per second, with and without restart proposals, on all cores as
``lc.fit_topics`` uses them. And the mean total variation between topic frequencies with L = 8 and
with all topics, on documents broader than the fitted prior (their concentration is 8 over all
topics, the prior's 0.5; local optima differ then, by about a nat of the bound) and on narrower
ones (1).

Quality: for AP, 3,430 documents of 20 Newsgroups (as many as KOS has) and a tenth of the tokens of
NIPS, each number of topics and L, the document-completion log likelihood per word of held-out
documents after some passes, beside scikit-learn's online LDA, gensim's and tomotopy's. All are
scored in the same way from their point estimates of the topics, with a concentration of 0.5 / K for
each topic. The time is of the fit, with compilation, and for ours also that of the same fit again,
compiled already; ``compile_seconds`` is the difference. Peers run in one thread, as is their
default; in two, tomotopy took 0.82 of the time and scikit-learn as long. Those that are not
installed are left out (``pip install scikit-learn gensim tomotopy``).
"""

from __future__ import annotations

import gzip
import importlib
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix

import numpyro_largecat as lc
from benchmarks.records import (
    MachineRecord,
    Record,
    argument_parser,
    machine_record,
    print_table,
    write_json,
)
from numpyro_largecat.data import Corpus, read_lda_c, read_uci_bag_of_words
from numpyro_largecat.ops.topics.active_search import Effort
from numpyro_largecat.ops.topics.document_fit import (
    DocumentFit,
    Topics,
    least_size,
    prepare_topics,
    solve_documents,
    start_documents,
)
from numpyro_largecat.topics.document_chunks import CHUNK, Chunk, Shapes, chunks_of, on_all_cores
from numpyro_largecat.topics.topic_fit import completion_score

NAME = "topics"
ALPHA = 0.5
WORD_CONCENTRATION = 0.1
KOS_DOCUMENTS = 3430
BROAD, NARROW = 8.0, 1.0  # concentrations of synthetic documents, over all topics


class Size(NamedTuple):
    """How much to measure."""

    num_documents: int
    vocabulary: int
    speed_topics: tuple[int, ...]
    repeats: int
    quality_topics: tuple[int, ...]
    quality_active: tuple[int, ...]  # 0 for all topics
    passes: tuple[int, ...]  # of our fits
    peer_passes: tuple[int, ...]
    gibbs_passes: int


FULL = Size(
    num_documents=1000,
    vocabulary=6000,
    speed_topics=(200, 400, 800, 1600),
    repeats=5,
    quality_topics=(50, 100, 200, 400),
    quality_active=(1, 4, 8, 0),
    passes=(5, 20),
    peer_passes=(5, 20),
    gibbs_passes=200,
)
QUICK = Size(40, 200, (20, 40), 1, (4,), (1, 0), (2,), (2,), 5)


def synthetic_topics(
    num_topics: int, size: Size, concentration: float = BROAD
) -> tuple[NDArray[np.floating], Corpus]:
    """Topics (K, V) over words of Zipf-like frequencies, and documents of 180 tokens."""
    rng = np.random.default_rng(0)
    zipf = 1 / (np.arange(size.vocabulary) + 10)
    shape = 0.1 * zipf * size.vocabulary / zipf.sum() + 1e-3
    topics = rng.gamma(shape, size=(num_topics, size.vocabulary)) + 1e-12
    topics /= topics.sum(axis=1, keepdims=True)
    rows = []
    for _ in range(size.num_documents):
        probs = rng.dirichlet(np.full(num_topics, concentration / num_topics)) @ topics
        tokens = rng.choice(size.vocabulary, size=180, p=probs / probs.sum())
        rows.append(np.unique(tokens, return_counts=True))
    return topics, Corpus.from_rows(rows, size.vocabulary)


def measure_speed(size: Size) -> list[Record]:
    """Documents per second of the local step."""
    records, table = [], []
    for num_topics in size.speed_topics:
        topics, corpus = synthetic_topics(num_topics, size)
        smooth = 0.999 * topics + 0.001 / size.vocabulary
        log_probs = jnp.asarray(np.log(smooth).T, jnp.float32)
        concentration = jnp.full(num_topics, ALPHA / num_topics, jnp.float32)
        num_active = min(8, num_topics)
        shapes = Shapes((180,), CHUNK, size.vocabulary)  # documents are of about one length
        chunks = list(chunks_of(corpus, np.arange(corpus.num_documents), shapes))
        cells = {}
        for restarts in (0, 5):

            def solve(
                topics: Topics, num_active: int, chunk: Chunk, restarts: int = restarts
            ) -> DocumentFit:
                words, counts = jnp.asarray(chunk.words), jnp.asarray(chunk.counts)
                effort = Effort(100, 0.0, restarts)
                start = start_documents(topics, words, counts)
                shared, size = (topics, words, counts, start), least_size(start)
                return jax.block_until_ready(
                    solve_documents(*shared, num_active, effort, size=size)
                )

            solve(prepare_topics(log_probs, concentration), num_active, chunks[0]())  # compiles
            rates = []
            for _ in range(size.repeats):
                start = time.perf_counter()
                shared = prepare_topics(log_probs, concentration)
                on_all_cores(partial(solve, shared, num_active), iter(chunks))
                rates.append(corpus.num_documents / (time.perf_counter() - start))
            cells[restarts] = (statistics.median(rates), min(rates), max(rates))
        distances = {}
        for broadness in (BROAD, NARROW):
            some = synthetic_topics(num_topics, size, broadness)[1]
            chunk = next(chunks_of(some, np.arange(min(some.num_documents, CHUNK)), shapes))()
            used = slice(len(chunk.documents))
            both = [solve(shared, n, chunk).counts[used] for n in (num_active, num_topics)]
            shares = [np.asarray(n / n.sum(axis=1, keepdims=True)) for n in both]
            distances[broadness] = float((np.abs(shares[0] - shares[1]).sum(axis=1) / 2).mean())
        setting = {"K": num_topics, "L": num_active, "V": size.vocabulary, "sweeps": 100}
        for restarts, (middle, least, most) in cells.items():
            cell = partial(
                Record,
                benchmark=NAME,
                setting=setting,
                method=f"{restarts} restarts",
                unit="documents per second",
                better="higher",
            )
            records += [
                cell(metric="speed", value=middle),
                cell(metric="speed_min", value=least),
                cell(metric="speed_max", value=most),
            ]
            table.append([str(num_topics), str(restarts), f"{middle:.0f}", f"{least:.0f}"])
            table[-1] += [f"{most:.0f}"]
            table[-1] += [f"{d:.4f}" if restarts else "" for d in distances.values()]
        for broadness, distance in distances.items():
            records.append(
                Record(
                    benchmark=NAME,
                    setting={**setting, "document_concentration": broadness},
                    method="5 restarts",
                    metric="distance_to_dense",
                    value=distance,
                    unit="mean total variation",
                    better="lower",
                )
            )
    print("Documents per second, 100 sweeps each, L = 8")
    header = ["K", "restarts", "median", "least", "most", "to dense, broad", "to dense, narrow"]
    print_table(header, table)
    print()
    return records


def read_20news(path: Path, num_words: int = 2000) -> Corpus:
    """20 Newsgroups, ``label word:count word:count ...``; as many documents as KOS has, 3,430."""
    rows = []
    with gzip.open(path, "rt", encoding="utf-8") as file:
        for line in file:
            pairs = np.array([entry.split(":") for entry in line.split()[1:]], int).reshape(-1, 2)
            rows.append((pairs[:, 0] - 1, pairs[:, 1]))  # words count from 1
    some = np.random.default_rng(0).permutation(len(rows))[:KOS_DOCUMENTS]
    return Corpus.from_rows([rows[d] for d in some], num_words)


def read_corpora(folder: Path) -> dict[str, Corpus]:
    """The corpora of the folder: AP, a part of 20 Newsgroups, a tenth of the tokens of NIPS."""
    text = folder / "text"
    return {
        "20news": read_20news(text / "20news_train.feat.gz"),
        "AP": read_lda_c(text / "ap.dat.gz", text / "ap.vocab.txt.gz"),
        "NIPS": read_uci_bag_of_words(
            text / "docword.nips1-17_tenth.txt.gz", text / "vocab.nips1-17.txt.gz"
        ),
    }


class Split(NamedTuple):
    """Documents to fit, and others whose words are divided in two."""

    train: Corpus
    seen: Corpus
    unseen: Corpus


def split_corpus(corpus: Corpus) -> Split:
    """Hold out a tenth of the documents, and a fifth of the words of each of these."""
    order = np.random.default_rng(0).permutation(corpus.num_documents)
    cut = corpus.num_documents // 10
    seen, unseen = corpus.select(order[:cut]).split_words(seed=0)
    return Split(corpus.select(np.sort(order[cut:])), seen, unseen)


Fit = Callable[[Corpus, int, int], NDArray[np.floating]]  # corpus, topics, passes: topics (K, V)


def our_fit(num_active: int, corpus: Corpus, num_topics: int, num_passes: int) -> Any:
    """Memoized, with everything at its default."""
    return lc.fit_topics(
        jax.random.key(0),
        corpus,
        num_topics,
        concentration=ALPHA / num_topics,
        word_concentration=WORD_CONCENTRATION,
        num_active=num_active or num_topics,
        num_passes=num_passes,
        progress_bar=False,
    ).topics


def sklearn_fit(corpus: Corpus, num_topics: int, num_passes: int) -> Any:
    from sklearn.decomposition import LatentDirichletAllocation

    counts = csr_matrix(
        (corpus.counts, corpus.words, corpus.offsets), (corpus.num_documents, corpus.num_words)
    )
    found = LatentDirichletAllocation(
        num_topics,
        learning_method="online",
        batch_size=512,
        max_iter=num_passes,
        random_state=0,
        doc_topic_prior=ALPHA / num_topics,
        topic_word_prior=WORD_CONCENTRATION,
    ).fit(counts)
    return found.components_ / found.components_.sum(axis=1, keepdims=True)


def gensim_fit(corpus: Corpus, num_topics: int, num_passes: int) -> Any:
    from gensim.models import LdaModel

    rows = [
        list(zip(*(x.tolist() for x in corpus.document(d)), strict=True))
        for d in range(corpus.num_documents)
    ]
    return LdaModel(
        rows,
        num_topics=num_topics,
        id2word={i: str(i) for i in range(corpus.num_words)},
        passes=num_passes,
        chunksize=512,
        alpha=[ALPHA / num_topics] * num_topics,
        eta=WORD_CONCENTRATION,
        eval_every=None,
        random_state=0,
    ).get_topics()


def tomotopy_fit(corpus: Corpus, num_topics: int, num_passes: int) -> Any:
    import tomotopy

    model = tomotopy.LDAModel(
        k=num_topics, alpha=ALPHA / num_topics, eta=WORD_CONCENTRATION, seed=0
    )
    for d in range(corpus.num_documents):
        words, counts = corpus.document(d)
        model.add_doc(list(map(str, np.repeat(words, counts))))
    model.train(num_passes, workers=1)
    counts = np.full((num_topics, corpus.num_words), WORD_CONCENTRATION)
    columns = [int(word) for word in model.used_vocabs]
    weights = np.asarray(model.get_count_by_topics(), float)
    for k in range(num_topics):
        counts[k, columns] += model.get_topic_word_dist(k) * weights[k]
    return counts / counts.sum(axis=1, keepdims=True)


PEERS: dict[str, tuple[str, Fit]] = {
    "scikit-learn": ("sklearn", sklearn_fit),
    "gensim": ("gensim", gensim_fit),
    "tomotopy": ("tomotopy", tomotopy_fit),
}


def available_peers() -> dict[str, Fit]:
    """The peers that are installed; says which are not."""
    found = {}
    for name, (module, fit) in PEERS.items():
        try:
            importlib.import_module(module)
        except ImportError:
            print(f"{name} is not installed, and is left out: pip install {name}")
        else:
            found[name] = fit
    return found


def timed(
    fit: Fit, corpus: Corpus, num_topics: int, num_passes: int
) -> tuple[NDArray[np.floating], float]:
    """Topics, and the seconds that they took."""
    start = time.perf_counter()
    topics = fit(corpus, num_topics, num_passes)
    return topics, time.perf_counter() - start


def measure_quality(corpora: dict[str, Corpus], size: Size, peers: dict[str, Fit]) -> list[Record]:
    """Held-out log likelihood per word and seconds, of every method on the same split."""
    records: list[Record] = []
    for corpus_name, corpus in corpora.items():
        split = split_corpus(corpus)
        for num_topics in size.quality_topics:
            methods: dict[str, tuple[Fit, tuple[int, ...]]] = {
                f"L = {num_active or 'K'}": (partial(our_fit, num_active), size.passes)
                for num_active in size.quality_active
            }
            for name, fit in peers.items():
                gibbs = (min(10, size.gibbs_passes), size.gibbs_passes)
                methods[name] = (fit, gibbs if name == "tomotopy" else size.peer_passes)
            table = []
            for method, (fit, passes) in methods.items():
                for num_passes in passes:
                    cell = partial(
                        Record,
                        benchmark=NAME,
                        setting={"corpus": corpus_name, "K": num_topics, "passes": num_passes},
                        method=method,
                    )
                    jax.clear_caches()  # so that each of our fits compiles its code
                    topics, seconds = timed(fit, split.train, num_topics, num_passes)
                    records.append(cell(metric="seconds", value=seconds, unit="s", better="lower"))
                    row = [method, str(num_passes), f"{seconds:.1f}", ""]
                    if method not in peers:
                        again = timed(fit, split.train, num_topics, num_passes)[1]
                        lower = partial(cell, unit="s", better="lower")
                        records += [
                            lower(metric="seconds_again", value=again),
                            lower(metric="compile_seconds", value=seconds - again),
                        ]
                        row[-1] = f"{again:.1f}"
                    prior = np.full(num_topics, ALPHA / num_topics)
                    score = completion_score(topics, prior, split.seen, split.unseen)
                    unit = "nats per token"
                    records.append(cell(metric="score", value=score, unit=unit, better="higher"))
                    table.append([*row, f"{score:.4f}"])
            print(f"{corpus_name}, K = {num_topics}: held-out log likelihood per word")
            print_table(["", "passes", "seconds", "again", "score"], table)
            print(flush=True)
    return records


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--data", type=Path, help="the folder that holds text/, with the corpora")
    parser.add_argument("--only", choices=("speed", "quality"), help="measure one part only")
    parser.add_argument("--topics", type=int, nargs="+", help="numbers of topics for quality")
    parser.add_argument("--passes", type=int, nargs="+", help="of our fits, for quality")
    parser.add_argument(
        "--corpora", nargs="+", choices=("20news", "AP", "NIPS"), help="for quality"
    )
    arguments = parser.parse_args()
    size = QUICK if arguments.quick else FULL
    if arguments.topics:
        size = size._replace(quality_topics=tuple(arguments.topics))
    if arguments.passes:
        size = size._replace(passes=tuple(arguments.passes))
    records: list[Record | MachineRecord] = [machine_record(NAME, jax.devices()[0].device_kind)]
    if arguments.only != "quality":
        records += measure_speed(size)
    if arguments.only != "speed":
        if arguments.quick:
            corpora = {"synthetic": synthetic_topics(4, size)[1]}
            peers: dict[str, Fit] = {}
        elif arguments.data is None:
            parser.error("--data is needed for quality: the folder that holds text/")
        else:
            corpora = read_corpora(arguments.data)
            corpora = {n: c for n, c in corpora.items() if n in (arguments.corpora or corpora)}
            peers = available_peers()
        records += measure_quality(corpora, size, peers)
    write_json(arguments.json, records)


if __name__ == "__main__":
    main()
