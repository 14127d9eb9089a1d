# SPDX-License-Identifier: Apache-2.0
"""A fit of topics between its first batch and its last."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax import Array
from jax.sharding import Mesh

from numpyro_largecat.data.checkpoints import Checkpoints, Reached, read_checkpoint
from numpyro_largecat.data.corpus import Corpus
from numpyro_largecat.ops.numpy_generator import numpy_generator
from numpyro_largecat.ops.threads import meanwhile
from numpyro_largecat.topics.asked import Asked
from numpyro_largecat.topics.beginning import Beginning, begin, first_counts
from numpyro_largecat.topics.compile_ahead import compilations
from numpyro_largecat.topics.document_chunks import Batch, Shapes, read_shapes
from numpyro_largecat.topics.document_layout import PARTS, Demand
from numpyro_largecat.topics.inference import INFERENCE
from numpyro_largecat.topics.memory import Memory
from numpyro_largecat.topics.passes import memoized_steps, stochastic_steps
from numpyro_largecat.topics.problem import Candidates, Problem
from numpyro_largecat.topics.saved_memory import KIND, arrays_of, read_memory, settings_of
from numpyro_largecat.topics.topic_fit import TopicFit
from numpyro_largecat.topics.visits import make_batches


@dataclass(frozen=True)
class Learning:
    """What is learned, from what, and what was reached, which is ``memory``.

    Attributes:
        rng_key: Of the fit.
        asked: What ``fit_topics`` is asked for.
        beginning: What the passes begin with.
        shapes: Of what is compiled.
        problem: What does not change.
        batches: Of the documents.
        memory: What was learned; changed in place.
        settings: What must be the same in a fit that goes on; None if nothing is written to disk.
    """

    rng_key: Array
    asked: Asked
    beginning: Beginning
    shapes: Shapes
    problem: Problem
    batches: list[Batch]
    memory: Memory
    settings: dict[str, Any] | None

    @classmethod
    def begin(
        cls,
        rng_key: Array,
        corpus: Corpus,
        asked: Asked,
        mesh: Mesh | None,
        checkpoints: Checkpoints | None,
        *,
        resumes: bool,
    ) -> Learning:
        """Before the first batch or, if it ``resumes``, after the newest checkpoint."""
        beginning = begin(asked, corpus)
        asked = asked.with_num_active(len(beginning.priors.topics))
        batches = make_batches(numpy_generator(rng_key, 0), beginning.corpus, asked.batch_size)
        _check_batches(asked, beginning.corpus, len(batches))
        settings = None if checkpoints is None else settings_of(rng_key, asked, beginning)
        if resumes:
            assert checkpoints is not None and settings is not None
            most = asked.num_passes * len(batches)
            saved = read_checkpoint(checkpoints, KIND, settings, most)
            shapes = read_shapes(saved.about["shapes"], INFERENCE[asked.inference].layout)
            candidates = Candidates(*saved.about["candidates"])  # of its number of passes
            beginning = beginning._replace(candidates=candidates)
            problem = _problem(asked, beginning, shapes, mesh)
            dtype = beginning.priors.topics.dtype
            memory = read_memory(saved.arrays, saved.number, dtype, mesh)
        else:
            shapes = _shapes(asked, beginning, batches)
            problem = _problem(asked, beginning, shapes, mesh)
            calls = compilations(problem, shapes.num_rows, beginning.priors)
            with meanwhile(calls) as wait_for_code:
                counts = first_counts(numpy_generator(rng_key), asked, beginning)
                wait_for_code()
            memory = beginning.memory(counts, len(batches), mesh)
        return cls(rng_key, asked, beginning, shapes, problem, batches, memory, settings)

    @property
    def num_done(self) -> int:
        """Batches that were visited."""
        return self.memory.table.changes

    @property
    def total(self) -> int:
        """Batches of all passes; there are more where the number of topics is learned."""
        return self.asked.num_passes * len(self.batches)

    @property
    def is_after_pass(self) -> bool:
        """Whether the last batch was that of a pass."""
        return self.num_done % len(self.batches) == 0

    def steps(self) -> Iterator[float | None]:
        """Visit the batches that are left, see ``memoized_steps`` and ``stochastic_steps``."""
        shared = self.problem, self.batches, self.memory, self.asked.num_passes
        if self.asked.method == "memoized":
            return memoized_steps(*shared, self.rng_key)
        return stochastic_steps(*shared, self.asked.options, self.rng_key, self._num_before)

    def warn_of_candidates(self) -> None:
        """Where a fit ends while it has more topics than it is to have."""
        num_topics, number = self.problem.candidates.num_topics, self.memory.table.shape[1]
        if self.memory.next_choice >= 0:
            asked = "a learned number" if num_topics is None else f"the {num_topics} asked for"
            warnings.warn(
                f"the fit ends before topics are chosen, with {number} candidates for {asked}: "
                "end it after its first passes, or set `num_candidates` of `lc.topics.Options`.",
                stacklevel=4,
            )

    def fit(self) -> TopicFit:
        """What was learned so far."""
        memory, table, before = self.memory, self.memory.table, self.beginning.before
        concentration, words = memory.priors
        rise = memory.last_rise(self.beginning.candidates.num_passes)
        return TopicFit(
            np.ascontiguousarray(table.numpy().T) + words.each.T.astype(table.dtype),
            concentration,
            words.as_given if before is None else before,
            min(self.asked.num_active, len(concentration)),
            self.problem.corpus.vocabulary,
            np.array(memory.bounds),
            self.asked.inference,
            self._num_before + table.changes * (self.asked.method == "stochastic"),
            self.shapes,
            None if rise is None else rise / self.problem.corpus.num_tokens,
        )

    def so_far(self) -> tuple[TopicFit, str]:
        """The same, and how far it is."""
        return self.fit(), f"{self.num_done} of {self.total} batches"

    def to_write(self) -> Reached:
        """What is written to disk."""
        about = {
            "settings": self.settings,
            "shapes": self.shapes,
            "candidates": self.beginning.candidates,
        }
        return Reached(self.num_done, arrays_of(self.memory), about)

    @property
    def _num_before(self) -> int:
        """Stochastic steps of an earlier fit."""
        start = self.asked.start
        return start.num_steps if isinstance(start, TopicFit) else 0


def _problem(asked: Asked, beginning: Beginning, shapes: Shapes, mesh: Mesh | None) -> Problem:
    effort = asked.options.effort(asked.inference)
    topics, layout = beginning.priors.topics, shapes.layout
    return Problem(
        beginning.corpus,
        INFERENCE[asked.inference](asked.num_active, effort, mesh, asked.is_warm),
        layout if mesh is None else layout.over(mesh.size, asked.batch_size),
        beginning.learns,
        asked.goes_on,
        beginning.candidates,
        topics if np.ptp(topics) > 0 and not beginning.learns.topics else None,
    )


def _shapes(asked: Asked, beginning: Beginning, batches: list[Batch]) -> Shapes:
    """For all topics of a fit, and then for those that remain."""
    candidates = beginning.candidates
    first = candidates.num_first
    last = candidates.num_topics if candidates.num_passes else first
    demand = Demand(len(batches[0].documents), asked.num_passes, PARTS, first, last)
    layout = INFERENCE[asked.inference].layout
    return Shapes(layout.of(beginning.corpus, demand), len(batches[0].rows))


def _check_batches(asked: Asked, corpus: Corpus, num_batches: int) -> None:
    """Warn of stochastic steps that all see the whole corpus, unless their sizes are given."""
    is_new = not asked.goes_on and asked.options.delay is None
    if asked.method == "stochastic" and is_new and num_batches == 1:
        warnings.warn(
            f"`method='stochastic'` has all {len(corpus)} documents in one batch, and fits far "
            'worse than with ten or more: set `batch_size` lower, or take "memoized".',
            stacklevel=4,
        )
