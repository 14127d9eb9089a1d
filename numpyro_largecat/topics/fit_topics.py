# SPDX-License-Identifier: Apache-2.0
"""Learning of topics in closed form over batches of documents: memoized and stochastic."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from jax import Array
from jax.sharding import Mesh
from numpy.typing import ArrayLike

from numpyro_largecat._checks import (
    check_count,
    check_key,
    check_kind,
    check_num_active,
    check_one_of,
    describe,
)
from numpyro_largecat._progress_bar import progress_bar as bar_of
from numpyro_largecat._result_so_far import attach_result
from numpyro_largecat.data.checkpoints import Checkpoints, Reached, has_checkpoint, read_checkpoint
from numpyro_largecat.data.corpus import Corpus
from numpyro_largecat.data.fit_in_progress import fit_in_progress
from numpyro_largecat.ops.numpy_generator import numpy_generator
from numpyro_largecat.ops.rows_by_device import mesh_of_one_process
from numpyro_largecat.ops.threads import meanwhile
from numpyro_largecat.topics.beginning import Asked, Beginning, begin, first_counts, learns_of
from numpyro_largecat.topics.compile_ahead import compilations
from numpyro_largecat.topics.document_chunks import Batch, Shapes, read_shapes
from numpyro_largecat.topics.document_layout import PARTS, Demand
from numpyro_largecat.topics.inference import INFERENCE
from numpyro_largecat.topics.local_step import LocalStep
from numpyro_largecat.topics.options import Options
from numpyro_largecat.topics.passes import memoized_steps, stochastic_steps
from numpyro_largecat.topics.problem import Candidates, Problem
from numpyro_largecat.topics.saved_memory import KIND, arrays_of, read_memory, settings_of
from numpyro_largecat.topics.topic_fit import TopicFit, check_corpus
from numpyro_largecat.topics.visits import make_batches

DEFAULTS = Options()
BATCH_SIZE = 512
FEW_DOCUMENTS, LEAST_BATCHES = 1000, 15  # of so few documents there are so many


def fit_topics(
    rng_key: Array,
    corpus: Corpus,
    num_topics: int | Literal["learned"],
    *,
    concentration: ArrayLike | Literal["learned"] | None = None,
    word_concentration: ArrayLike | Literal["learned"] | None = None,
    num_active: int | None = None,
    inference: Literal["collapsed", "mean_field"] = "collapsed",
    method: Literal["memoized", "stochastic"] = "memoized",
    num_passes: int | None = None,
    batch_size: int | None = None,
    start: Literal["documents", "random"] | TopicFit | None = None,
    prior: TopicFit | None = None,
    progress_bar: bool = True,
    after_pass: Callable[[TopicFit], object] | None = None,
    options: Options = DEFAULTS,
    checkpoints: Checkpoints | None = None,
    resume: bool = False,
    mesh: Mesh | None = None,
) -> TopicFit:
    r"""Fit topics with Dirichlet posteriors by closed-form steps, a batch of documents at a time.

    .. math:: \phi_k \sim \mathrm{Dirichlet}_V(\bar\lambda), \quad
              \pi_d \sim \mathrm{Dirichlet}_K(a), \quad
              \hat\lambda_{kv} = \bar\lambda + S_{kv}

    with S the expected tokens of each word in each topic, of which each word of a document has at
    most L. "memoized" keeps each batch's share of S, sparse, and replaces it when the batch is
    visited again. "stochastic" steps towards the S that a batch of B documents suggests,

    .. math:: S \leftarrow (1 - \rho_t) S + \rho_t \frac{N}{B} S_{\mathrm{batch}}, \qquad
              \rho_t = (\mathrm{delay} + t)^{-\mathrm{forgetting}}, \quad t = 1, 2, \ldots

    What is raised during the fit, also ``KeyboardInterrupt``, has the fit so far as its attribute
    ``result_so_far``, or None while code is compiled and the first topics are found. One that ends
    in its first two passes has more topics, see ``num_candidates`` of ``lc.topics.Options``.

    Cost: per document of U words O(U K) for ten first sweeps over all topics, one at later visits,
    and O(U A) for each further one on its A largest, of which it then has no more: 32 or a
    sixteenth of the words of the longest documents, whichever is more, doubled until A is 1.5 times
    the number that the concentration expects of such a document ("mean_field": as
    ``TopicDocument``); per batch O(R K) for the R different words in it; per pass O(V K). Documents
    are read as they are needed, so the corpus may be on disk. "memoized" keeps at most L numbers
    for each entry of the corpus, and "collapsed" as many again and L topics and shares besides. A
    number of topics that is learned is tried on a copy of the table, and on what is kept of
    documents, which trials share.

    Args:
        rng_key: A JAX random key.
        corpus: The documents.
        num_topics: Number of topics K, at least 1; or "learned", for the number with the largest
            bound. Two passes have 300 topics, or one for each document with words, or
            ``num_candidates`` of ``lc.topics.Options``. From there some smaller numbers have four
            passes each, and the best, at least half, goes on with those topics that the others are
            mixtures of. After two passes more smaller ones are tried again, as long as the number
            falls by 3 %. So it takes five to ten times as long as if K had been given, and up to
            thirty on small corpora. A warning if all topics of the first passes are best.
        concentration: a, positive: the same for all topics, as for ``TopicDocument`` and like
            scikit-learn's ``doc_topic_prior``, or one number for each, shape (K,). Where topics
            are chosen from more (see ``num_candidates`` of ``lc.topics.Options``) the larger ones
            go to those of more tokens; topics whose prior favours some words, and all topics
            elsewhere, have theirs from the start. None for 0.5 / K, the
            paper's choice: the smaller, the fewer topics in a document. "learned" for one of each
            topic, from the data: common words then have a few topics of their own. Where documents
            have many topics it takes forty passes to settle. None or "learned" where the number of
            topics is.
        word_concentration: Prior :math:`\bar\lambda` of words in topics, positive: one number, one
            for each word, (V,), or for each topic and word, (K, V); a topic with words that it is
            larger for starts with them. "learned", and None where it can be: in proportion to the
            root of the number of documents that have a word, at a level that is 0.1 on average in
            the first six passes, or one more than half of them, in which topics part, and then
            makes a step of Minka's fixed point after each. What is learned needs "collapsed" and
            "memoized".
        num_active: Largest number L of topics of a word in a document, in [1, K]; None for 8, or
            K if that is less.
        inference: "collapsed": a token's topics follow from what all others, in its document and
            of its word, say of them (CVB0, Asuncion et al.), which gives better topics of texts.
            "mean_field": from the best q(pi) q(phi), which is the paper's; better where words are
            few and repeat in each document.
        method: "memoized" or "stochastic".
        num_passes: Visits of each document, at least 1; two more each time that a learned number
            of topics falls. None for 8, or 5 where there is a longer step: where new "collapsed",
            "memoized" topics, K of them, are chosen from more, they go on before the fifth pass as
            far again as in the fourth. That pass may lower the bound. Few long documents need
            more: see ``last_rise`` of the fit.
        batch_size: Documents in a batch, at least 1. None for 512, or where there are fewer than
            1,000 documents for a fifteenth of them: with few visits of all batches some topics may
            be mixed, if a topic has few documents.
        start: "documents", also None: each topic from a document, drawn by the k-means++ rule with
            a Bregman divergence; "random": words divided at random; or an earlier fit of as many
            topics, to go on from, also from its concentrations where none are given: those of
            words are learned from there, if it has not one for each topic and word. Its words need
            not be those of the corpus. Stochastic steps are then counted on from those that
            it took; memoized visits are none, so after a memoized fit they begin at t = 1.
        prior: An earlier fit of other documents and as many topics, whose posterior is the prior of
            this one: what is returned has learned from both, and has the words of both. Its
            ``word_concentration`` is that of the earlier fit, and of new words the least in each
            topic; its ``inference`` and ``num_active`` are not taken over. A corpus on disk with
            words of its own is read into memory for new numbers; one with the fit's is not.
        progress_bar: Show batches, speed, time left and the bound.
        after_pass: Called with the fit so far after each pass, such as to print its ``score`` or
            keep its topics. In the first two passes it has more topics, see ``num_candidates`` of
            ``lc.topics.Options``. ``StopIteration`` ends the fit, which is then returned; of what
            else it raises it is the ``result_so_far``.
        options: See ``lc.topics.Options``.
        checkpoints: Where and how often to write the fit to disk, ``lc.Checkpoints(folder)``; a
            step is a batch. They hold the table and what is kept of each batch.
        resume: Go on from the newest checkpoint, if there is one, bit by bit as if the fit had not
            been interrupted, given the same ``num_passes``. With more of them, a fit that began
            with fewer than four keeps its shorter, or no, first passes with more topics, and may
            end worse than a whole one; with fewer than ten it learns concentrations of words
            sooner. With fewer than it had taken, it is returned as it was. Without it the folder
            must have no checkpoints.
        mesh: Devices of this process, ``jax.make_mesh(sizes, names)``, over all of which documents
            and the words of the table of topics are spread; per batch they send O(R K) numbers.
            Each solves for a block of documents at once, some 2,000 words, so batches should have
            many times as many. None for one device, or all cores.

    Returns:
        A ``TopicFit``.

    Raises:
        ValueError: If an argument is out of range, a concentration is to be learned where it cannot
            be, no document has words, or a checkpoint is of another corpus or other arguments.
        TypeError: If ``corpus`` is no ``Corpus``, or ``rng_key`` no key.

    Example:
        >>> import jax, numpyro_largecat as lc
        >>> from numpyro_largecat.data import Corpus
        >>> corpus = Corpus.from_documents([["sea", "ship"], ["moon", "star"]] * 10)
        >>> fit = lc.fit_topics(jax.random.key(0), corpus, num_topics=2, progress_bar=False)
        >>> fit.topics.shape
        (2, 4)

    References:
        Hughes and Sudderth, Fast Learning of Clusters and Topics via Sparse Posteriors, 2016,
        arXiv:1609.07521, sections 3.4 and 5, Eqs. 35 and 41 to 49. Asuncion, Welling, Smyth and
        Teh, On Smoothing and Inference for Topic Models, 2009.
    """
    check_key(rng_key)
    check_corpus(corpus)
    if isinstance(num_topics, str):
        check_one_of("num_topics", num_topics, ("learned",), or_else=" or a number")
    else:
        num_topics = check_count("num_topics", num_topics, 1)
    if num_passes is not None:
        check_count("num_passes", num_passes, 1)
    batch_size = _batch_size(batch_size, len(corpus))
    check_one_of("inference", inference, tuple(INFERENCE))
    _check_options(options, method)
    if after_pass is not None and not callable(after_pass):
        raise TypeError(
            f"`after_pass` must be a function of the fit so far; got {describe(after_pass)}."
        )
    asked = Asked(num_topics, concentration, word_concentration, start, prior)
    if num_passes is None:
        num_passes = _default_passes(asked, inference, method, options)
    with attach_result():
        learns = learns_of(asked, inference, method)
        beginning = begin(asked, learns, corpus, options, num_passes)
        corpus, priors = beginning.corpus, beginning.priors
        active = check_num_active(num_active, len(priors.topics), "topics")
        devices = mesh_of_one_process(mesh)
        goes_on = has_checkpoint(checkpoints, resume, KIND)
        batches = make_batches(numpy_generator(rng_key, 0), corpus, batch_size)
        if method == "stochastic" and not beginning.goes_on and options.delay is None:
            _warn_of_one_batch(corpus, len(batches))
        shapes = _shapes(inference, beginning, batches, num_passes)
        settings = None
        if checkpoints is not None:
            settings = settings_of(
                rng_key,
                corpus,
                priors,
                learns,
                num_topics=num_topics,
                num_active=active,
                batch_size=batch_size,
                inference=inference,
                method=method,
                options=options,
                start=start,
                prior=prior,
            )
        saved = None
        if goes_on:
            assert checkpoints is not None and settings is not None
            saved = read_checkpoint(checkpoints, KIND, settings)
            shapes = read_shapes(saved.about["shapes"], INFERENCE[inference].layout)
            candidates = Candidates(*saved.about["candidates"])  # of its number of passes
            beginning = beginning._replace(candidates=candidates)
        problem = Problem(
            corpus,
            _local_step(inference, active, options, devices),
            shapes.layout if devices is None else shapes.layout.over(devices.size, batch_size),
            learns,
            beginning.goes_on,
            beginning.candidates,
            priors.topics if np.ptp(priors.topics) > 0 and not learns.topics else None,
        )
        if saved is not None:
            memory = read_memory(saved.arrays, saved.number, priors.topics.dtype, devices)
        else:
            with meanwhile(compilations(problem, shapes.num_rows, priors)) as wait_for_code:
                counts = first_counts(numpy_generator(rng_key), asked, beginning)
                wait_for_code()
            memory = beginning.memory(counts, len(batches), devices)
    table, candidates = memory.table, beginning.candidates
    num_done, total = table.changes, num_passes * len(batches)
    in_all = None if candidates.num_topics is None else total  # more where topics are counted
    num_before = start.num_steps if isinstance(start, TopicFit) else 0

    def fit() -> TopicFit:
        concentration, words = memory.priors
        rise = memory.last_rise(candidates.num_passes)
        return TopicFit(
            np.ascontiguousarray(table.numpy().T) + words.each.T.astype(table.dtype),
            concentration,
            words.as_given if beginning.before is None else beginning.before,
            min(active, len(concentration)),
            corpus.vocabulary,
            np.array(memory.bounds),
            inference,
            num_before + table.changes * (method == "stochastic"),
            shapes,
            None if rise is None else rise / corpus.num_tokens,
        )

    def so_far() -> tuple[TopicFit, str]:
        return fit(), f"{table.changes} of {total} batches"

    def reached() -> Reached:
        about = {"settings": settings, "shapes": shapes, "candidates": candidates}
        return Reached(table.changes, arrays_of(memory), about)

    if method == "memoized":
        steps = memoized_steps(problem, batches, memory, num_passes, rng_key)
    else:
        shared = problem, batches, memory, num_passes, options, rng_key
        steps = stochastic_steps(*shared, num_before)
    with (
        fit_in_progress(checkpoints, KIND, so_far, reached, num_done) as writer,
        bar_of(
            steps, total=in_all, initial=num_done, disable=not progress_bar, unit="batch"
        ) as bar,
    ):
        for bound in bar:
            if bound is None:
                bar.set_postfix_str("trying a number of topics", refresh=False)
                continue
            if np.isfinite(bound):
                bar.set_postfix_str(
                    f"bound per word {bound / corpus.num_tokens:.6g}", refresh=False
                )
            # Before it is on disk, so that whoever goes on has seen each pass.
            if table.changes % len(batches) == 0 and _is_enough(after_pass, fit):
                break
            writer.after_steps(table.changes)
        return fit()


def _shapes(inference: str, beginning: Beginning, batches: list[Batch], num_passes: int) -> Shapes:
    """For all topics of a fit, and then for those that remain."""
    candidates = beginning.candidates
    first = candidates.num_first
    last = candidates.num_topics if candidates.num_passes else first
    demand = Demand(len(batches[0].documents), num_passes, PARTS, first, last)
    layout = INFERENCE[inference].layout
    return Shapes(layout.of(beginning.corpus, demand), len(batches[0].rows))


def _local_step(inference: str, active: int, options: Options, devices: Mesh | None) -> LocalStep:
    """By default only collapsed documents start from their last visit."""
    is_warm = inference == "collapsed" if options.warm_start is None else options.warm_start
    return INFERENCE[inference](active, options.effort(inference), devices, is_warm)


def _is_enough(
    after_pass: Callable[[TopicFit], object] | None, fit: Callable[[], TopicFit]
) -> bool:
    """Show the fit after a pass, and whether it is to end there."""
    if after_pass is not None:
        try:
            after_pass(fit())
        except StopIteration:
            return True
    return False


def _batch_size(asked: int | None, num_documents: int) -> int:
    if asked is not None:
        return check_count("batch_size", asked, 1)
    if num_documents >= FEW_DOCUMENTS:
        return BATCH_SIZE
    return max(1, -(-num_documents // LEAST_BATCHES))


def _default_passes(asked: Asked, inference: str, method: str, options: Options) -> int:
    """Fewer where a longer step spares some of them, see ``passes``."""
    goes_on = asked.prior is not None or isinstance(asked.start, TopicFit)
    is_chosen = asked.num_topics not in ("learned", options.num_candidates)
    has_step = inference == "collapsed" and method == "memoized" and is_chosen and not goes_on
    return 5 if has_step else 8


def _warn_of_one_batch(corpus: Corpus, num_batches: int) -> None:
    if num_batches == 1:
        warnings.warn(
            f"`method='stochastic'` has all {len(corpus)} documents in one batch, and fits far "
            'worse than with ten or more: set `batch_size` lower, or take "memoized".',
            stacklevel=3,
        )


def _check_options(options: Any, method: Any) -> None:
    check_kind("options", options, Options, "lc.topics.Options(...)")
    check_one_of("method", method, ("memoized", "stochastic"))
    if options.warm_start and method != "memoized":
        raise ValueError("`warm_start` needs `method='memoized'`, which keeps what it visited.")
