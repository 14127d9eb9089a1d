# SPDX-License-Identifier: Apache-2.0
"""What a fit of topics has learned after a batch as arrays with names, and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from jax import Array
from jax.sharding import Mesh
from numpy.typing import NDArray
from scipy.sparse import csr_array, vstack

from numpyro_largecat.data.checkpoints import fingerprint
from numpyro_largecat.topics.asked import Asked
from numpyro_largecat.topics.beginning import Beginning
from numpyro_largecat.topics.memory import Memory
from numpyro_largecat.topics.problem import Priors
from numpyro_largecat.topics.topic_fit import TopicFit
from numpyro_largecat.topics.topic_table import Table
from numpyro_largecat.topics.word_prior import WordPrior

KIND = "fit of fit_topics"


def settings_of(rng_key: Array, asked: Asked, beginning: Beginning) -> dict[str, Any]:
    """What must be the same in a fit that goes on. Reads the corpus once.

    What others follow from comes first: the first that differs is named.
    """
    corpus, priors, learns = beginning.corpus, beginning.priors, beginning.learns
    start, prior = asked.start, asked.prior
    entries = corpus.offsets, corpus.words, corpus.counts, "\n".join(corpus.vocabulary or ())
    return {
        "rng_key": fingerprint(rng_key),
        "corpus": [corpus.num_documents, corpus.num_words, fingerprint(entries)],
        "number of topics": asked.num_topics,
        "inference": asked.inference,
        "method": asked.method,
        "prior": None if prior is None else fingerprint(prior.posterior),
        "concentration": "learned" if learns.topics else fingerprint(priors.topics),
        "word_concentration": "learned" if learns.words else fingerprint(priors.words.each),
        "num_active": asked.num_active,
        "batch_size": asked.batch_size,
        "start": fingerprint(start.posterior) if isinstance(start, TopicFit) else start,
        "options": repr(asked.options),
        "dtype": str(priors.topics.dtype),
    }


def arrays_of(memory: Memory) -> dict[str, NDArray[Any]]:
    """All that the next batch needs, by name; the counts of batches and chunks are joined."""
    state = memory.table.state
    arrays = {
        "table": memory.table.unscaled(),
        "totals": np.asarray(state.totals),
        "scale": np.array(state.scale),
        "rest": memory.rest,
        "bounds": np.array(memory.bounds),
        "choice": np.array([memory.next_choice, memory.num_added]),
    }
    arrays |= {"concentration": memory.priors.topics, "rises": memory.rises}
    arrays |= {"word_concentration": np.array(memory.priors.words.as_given)}
    if memory.before is not None:
        arrays["before"] = memory.before
    arrays |= _joined("counts", memory.counts)
    arrays |= _joined("log_absence", memory.log_absence)
    arrays |= _joined("own", memory.own)
    return arrays


def read_memory(
    arrays: Mapping[str, NDArray[Any]], num_done: int, dtype: np.dtype, mesh: Mesh | None
) -> Memory:
    """What ``arrays_of`` made arrays of, after so many batches; the table over a mesh."""
    counts = arrays["table"]
    table = Table(counts, dtype, mesh)
    table.place(counts, arrays["totals"], float(arrays["scale"]))
    table.changes = num_done
    next_choice, num_added = arrays["choice"].tolist()
    return Memory(
        table,
        Priors(arrays["concentration"], WordPrior.of(arrays["word_concentration"], *counts.shape)),
        counts=list(_parts("counts", arrays)),
        own=list(_parts("own", arrays)),
        log_absence=list(_parts("log_absence", arrays)),
        rises=np.array(arrays["rises"]),
        rest=np.array(arrays["rest"]),
        bounds=arrays["bounds"].tolist(),
        next_choice=next_choice,
        num_added=num_added,
        before=arrays.get("before"),
    )


def _joined(name: str, parts: list[csr_array | None]) -> dict[str, NDArray[Any]]:
    """Sparse arrays, some of them missing, as one, and the rows of each; -1 for those missing."""
    rows = np.array([-1 if part is None else part.shape[0] for part in parts], np.int64)
    there = [part for part in parts if part is not None]
    found = {f"{name}: rows": rows}
    if there:
        joined = csr_array(vstack(there, format="csr"))
        found |= {
            f"{name}: data": joined.data,
            f"{name}: indices": joined.indices,
            f"{name}: indptr": joined.indptr,
            f"{name}: width": np.array(joined.shape[1]),
        }
    return found


def _parts(name: str, arrays: Mapping[str, NDArray[Any]]) -> Iterator[csr_array | None]:
    """What ``_joined`` joined."""
    first = 0
    for rows in arrays[f"{name}: rows"].tolist():
        if rows < 0:
            yield None
            continue
        indptr = arrays[f"{name}: indptr"][first : first + rows + 1]
        own = slice(indptr[0], indptr[-1])
        data, indices = (arrays[f"{name}: {what}"][own] for what in ("data", "indices"))
        shape = rows, int(arrays[f"{name}: width"])
        yield csr_array((data, indices, indptr - indptr[0]), shape)
        first += rows
