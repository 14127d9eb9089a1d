# SPDX-License-Identifier: Apache-2.0
"""Topic models: speed of the local step in K, and held-out words against wall time.

Speed: 1000 synthetic documents with about 150 distinct words each, V = 6000, 100 sweeps for each
document, L = 8. Documents per second, with and without restart proposals, on all cores as
``lc.fit_topics`` uses them. And the mean total variation between topic frequencies with L = 8 and
with all topics, on documents broader than the fitted prior (their concentration is 8 over all
topics, the prior's 0.5; local optima differ then, by about a nat of the bound) and on narrower
ones (1).

Quality: for AP, 3,430 documents of 20 Newsgroups (as many as KOS has), a tenth of the tokens of
NIPS and Reuters-21578, each number of topics and seed, held-out tokens and held-out words, and
coherence and diversity of the top words, beside scikit-learn's online LDA, gensim's and tomotopy's,
each at its own defaults and with the priors that ours starts from. All are scored from their point
estimates of the topics by ``benchmarks.topic_scores``, which favours none. Seconds are of the fit,
with compilation, and processor seconds beside them; for ours also of the same fit again, compiled
already: ``compile_seconds`` is the difference. Libraries are started before. Peers run in one
thread, as is their default. Those that are not installed are left out (``pip install scikit-learn
gensim tomotopy``).
"""

from __future__ import annotations

import gzip
import html
import importlib
import re
import statistics
import tarfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix

import numpyro_largecat as lc
from benchmarks.data_folder import add_data_argument, how_to_name_data
from benchmarks.records import (
    MachineRecord,
    Record,
    argument_parser,
    machine_record,
    print_table,
    write_json,
)
from benchmarks.topic_scores import coherence, diversity, held_out_score, split_corpus
from numpyro_largecat.data import Corpus, read_lda_c, read_uci_bag_of_words
from numpyro_largecat.ops.threads import on_all_cores
from numpyro_largecat.ops.topics.active_search import Effort
from numpyro_largecat.ops.topics.document_fit import (
    DocumentFit,
    Topics,
    least_size,
    prepare_topics,
    solve_documents,
    start_documents,
)
from numpyro_largecat.topics.document_layout import Chunk
from numpyro_largecat.topics.whole_documents import CHUNK, WholeDocuments

NAME = "topics"
ALPHA = 0.5
WORD_CONCENTRATION = 0.1
GIBBS_PASSES = 200
KOS_DOCUMENTS = 3430
BROAD, NARROW = 8.0, 1.0  # concentrations of synthetic documents, over all topics


class Size(NamedTuple):
    """How much to measure."""

    num_documents: int
    vocabulary: int
    speed_topics: tuple[int, ...]
    repeats: int
    quality_topics: tuple[int, ...]
    seeds: int


FULL = Size(
    num_documents=1000,
    vocabulary=6000,
    speed_topics=(200, 400, 800, 1600),
    repeats=5,
    quality_topics=(50, 100, 200, 400),
    seeds=3,
)
QUICK = Size(40, 200, (20, 40), 1, (4,), 1)


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
        layout = WholeDocuments((180,), CHUNK)  # documents are of about one length
        chunks = list(layout.chunks(corpus, np.arange(corpus.num_documents)))
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
            chunk = next(layout.chunks(some, np.arange(min(some.num_documents, CHUNK))))()
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


def read_reuters(path: Path) -> Corpus:
    """Reuters-21578: bodies of articles, words of three letters or more in 5 of them to 25 %."""
    from sklearn.feature_extraction.text import CountVectorizer

    with tarfile.open(path) as archive:
        names = sorted(name for name in archive.getnames() if name.endswith(".sgm"))
        text = "".join(archive.extractfile(name).read().decode("latin-1") for name in names)
    bodies = re.findall(r"<BODY>(.*?)</BODY>", text, re.DOTALL)
    vectorizer = CountVectorizer(
        token_pattern="[a-z]{3,}", min_df=5, max_df=0.25, stop_words="english"
    )
    counts = vectorizer.fit_transform(html.unescape(body) for body in bodies)
    return Corpus.from_csr(counts, vectorizer.get_feature_names_out())


def read_corpora(folder: Path) -> dict[str, Corpus]:
    """AP, a part of 20 Newsgroups, a tenth of the tokens of NIPS, and Reuters-21578."""
    text = folder / "text"
    return {
        "20news": read_20news(text / "20news_train.feat.gz"),
        "AP": read_lda_c(text / "ap.dat.gz", text / "ap.vocab.txt.gz"),
        "NIPS": read_uci_bag_of_words(
            text / "docword.nips1-17_tenth.txt.gz", text / "vocab.nips1-17.txt.gz"
        ),
        "Reuters": read_reuters(text / "reuters21578_sgml.tar.xz"),
    }


Found = NDArray[np.floating]  # topics, (K, V)
Fit = Callable[[Corpus, int, int], Found]  # corpus, topics, seed


def our_fit(inference: Any, corpus: Corpus, num_topics: int, seed: int, **options: Any) -> Any:
    """Memoized, with everything else at its default."""
    key = jax.random.key(seed)
    options |= {"inference": inference, "progress_bar": False}
    return lc.fit_topics(key, corpus, num_topics, **options).topics


def sklearn_fit(is_tuned: bool, corpus: Corpus, num_topics: int, seed: int) -> Any:
    from sklearn.decomposition import LatentDirichletAllocation

    counts = csr_matrix(
        (corpus.counts, corpus.words, corpus.offsets), (corpus.num_documents, corpus.num_words)
    )
    tuned = {
        "learning_method": "online",
        "batch_size": 512,
        "max_iter": 20,
        "doc_topic_prior": ALPHA / num_topics,
        "topic_word_prior": WORD_CONCENTRATION,
    }
    model = LatentDirichletAllocation(num_topics, random_state=seed, **tuned if is_tuned else {})
    found = model.fit(counts).components_
    return found / found.sum(axis=1, keepdims=True)


def gensim_fit(is_tuned: bool, corpus: Corpus, num_topics: int, seed: int) -> Any:
    from gensim.models import LdaModel

    rows = [
        list(zip(*(x.tolist() for x in corpus[d]), strict=True))
        for d in range(corpus.num_documents)
    ]
    words = {i: str(i) for i in range(corpus.num_words)}
    tuned = {
        "passes": 20,
        "chunksize": 512,
        "alpha": [ALPHA / num_topics] * num_topics,
        "eta": WORD_CONCENTRATION,
        "eval_every": None,
    }
    shared = {"num_topics": num_topics, "id2word": words, "random_state": seed}
    return LdaModel(rows, **shared, **tuned if is_tuned else {}).get_topics()


def tomotopy_fit(is_tuned: bool, corpus: Corpus, num_topics: int, seed: int) -> Any:
    """200 passes; it learns the concentrations of topics, also where it starts from ours."""
    import tomotopy

    priors = {"alpha": ALPHA / num_topics, "eta": WORD_CONCENTRATION}
    model = tomotopy.LDAModel(k=num_topics, seed=seed, **priors if is_tuned else {})
    for d in range(corpus.num_documents):
        words, counts = corpus[d]
        model.add_doc(list(map(str, np.repeat(words, counts))))
    model.train(GIBBS_PASSES, workers=1)
    topics = np.full((num_topics, corpus.num_words), model.eta)
    columns = [int(word) for word in model.used_vocabs]
    weights = np.asarray(model.get_count_by_topics(), float) + model.eta * len(columns)
    for k in range(num_topics):
        topics[k, columns] = model.get_topic_word_dist(k) * weights[k]
    return topics / topics.sum(axis=1, keepdims=True)


OURS: dict[str, Fit] = {name: partial(our_fit, name) for name in ("collapsed", "mean_field")}
OURS["eight passes"] = partial(our_fit, "collapsed", num_passes=8)
PEERS: dict[str, tuple[str, Callable[[bool, Corpus, int, int], Found]]] = {
    "scikit-learn": ("sklearn", sklearn_fit),
    "gensim": ("gensim", gensim_fit),
    "tomotopy": ("tomotopy", tomotopy_fit),
}


def available_peers() -> dict[str, Fit]:
    """The peers that are installed, at their defaults and with our priors; says which are not."""
    found: dict[str, Fit] = {}
    for name, (module, fit) in PEERS.items():
        try:
            importlib.import_module(module)
        except ImportError:
            print(f"{name} is not installed, and is left out: pip install {name}")
        else:
            found[f"{name}, its defaults"] = partial(fit, False)
            found[f"{name}, our priors"] = partial(fit, True)
    return found


class Timed(NamedTuple):
    """Topics, and what they took."""

    topics: Found
    seconds: float
    processor_seconds: float


def timed(fit: Fit, corpus: Corpus, num_topics: int, seed: int) -> Timed:
    """Fit, and take the time."""
    start, processor = time.perf_counter(), time.process_time()
    topics = fit(corpus, num_topics, seed)
    return Timed(topics, time.perf_counter() - start, time.process_time() - processor)


def measure_quality(
    corpora: dict[str, Corpus], all_topics: Sequence[int], seeds: int, methods: dict[str, Fit]
) -> list[Record]:
    """Scores and seconds of every method, on the same splits."""
    records: list[Record] = []
    for corpus_name, corpus in corpora.items():
        for num_topics in all_topics:
            print(f"{corpus_name}, K = {num_topics}")
            for method, fit in methods.items():
                rows = []
                for seed in range(seeds):
                    split = split_corpus(corpus, seed)
                    setting = {"corpus": corpus_name, "K": num_topics, "seed": seed}
                    cell = partial(Record, benchmark=NAME, setting=setting, method=method)
                    jax.clear_caches()  # so that each of our fits compiles its code
                    found = timed(fit, split.train, num_topics, seed)
                    lower = partial(cell, unit="s", better="lower")
                    records += [
                        lower(metric="seconds", value=found.seconds),
                        lower(metric="processor_seconds", value=found.processor_seconds),
                    ]
                    if method in OURS:
                        again = timed(fit, split.train, num_topics, seed).seconds
                        records.append(lower(metric="compile_seconds", value=found.seconds - again))
                    scores = {
                        "heldout_tokens": held_out_score(found.topics, *split.tokens),
                        "heldout_words": held_out_score(found.topics, *split.words),
                        "npmi": coherence(found.topics, split.train),
                        "diversity": diversity(found.topics),
                    }
                    for metric, value in scores.items():
                        unit = "nats per token" if metric.startswith("held") else "1"
                        records.append(cell(metric=metric, value=value, unit=unit, better="higher"))
                    rows.append([*scores.values(), found.seconds])
                means, spreads = np.mean(rows, axis=0), np.ptp(rows, axis=0)
                text = "  ".join(
                    f"{m:8.3f} ± {s / 2:.3f}" for m, s in zip(means, spreads, strict=True)
                )
                print(f"  {method:24s} {text}", flush=True)
            print("  tokens, words, coherence, diversity, seconds: mean, and half of the range")
    return records


def main() -> None:
    parser = argument_parser(__doc__)
    add_data_argument(parser, "text/, with the corpora")
    parser.add_argument("--only", choices=("speed", "quality"), help="measure one part only")
    parser.add_argument("--topics", type=int, nargs="+", help="numbers of topics for quality")
    parser.add_argument("--seeds", type=int, help="of splits and fits, for quality")
    parser.add_argument(
        "--corpora", nargs="+", choices=("20news", "AP", "NIPS", "Reuters"), help="for quality"
    )
    parser.add_argument("--methods", nargs="+", choices=(*OURS, *PEERS), help="for quality")
    arguments = parser.parse_args()
    size = QUICK if arguments.quick else FULL
    if arguments.topics:
        size = size._replace(quality_topics=tuple(arguments.topics))
    if arguments.seeds:
        size = size._replace(seeds=arguments.seeds)
    records: list[Record | MachineRecord] = [machine_record(NAME, jax.devices()[0].device_kind)]
    if arguments.only != "quality":
        records += measure_speed(size)
    if arguments.only != "speed":
        if arguments.quick:
            corpora = {"synthetic": synthetic_topics(4, size)[1]}
            methods = OURS
        elif arguments.data is None:
            parser.error(f"for quality, {how_to_name_data('text/')}")
        else:
            corpora = read_corpora(arguments.data)
            corpora = {n: c for n, c in corpora.items() if n in (arguments.corpora or corpora)}
            methods = OURS | available_peers()
            asked = tuple(arguments.methods or methods)
            methods = {name: fit for name, fit in methods.items() if name.startswith(asked)}
        jnp.zeros(1).block_until_ready()  # JAX is started, as peers are imported by now
        records += measure_quality(corpora, size.quality_topics, size.seeds, methods)
    write_json(arguments.json, records)


if __name__ == "__main__":
    main()
