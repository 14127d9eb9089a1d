# SPDX-License-Identifier: Apache-2.0
"""Learning of topics in closed form over batches of documents: memoized and stochastic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
from jax import Array
from jax.sharding import Mesh
from numpy.typing import ArrayLike

from numpyro_largecat._checks import check_key, describe
from numpyro_largecat._progress_bar import progress_bar as bar_of
from numpyro_largecat._result_so_far import attach_result
from numpyro_largecat.data.checkpoints import Checkpoints, has_checkpoint
from numpyro_largecat.data.corpus import Corpus
from numpyro_largecat.data.fit_in_progress import fit_in_progress
from numpyro_largecat.ops.rows_by_device import mesh_of_one_process
from numpyro_largecat.topics.asked import Asked
from numpyro_largecat.topics.learning import Learning
from numpyro_largecat.topics.options import Options
from numpyro_largecat.topics.saved_memory import KIND
from numpyro_largecat.topics.topic_fit import TopicFit, check_corpus

DEFAULTS = Options()


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
            "memoized" topics, K of them, are chosen from more, they go on before the fifth pass by
            one and a half times what they moved in the fourth. That pass may lower the bound. Few
            long documents need more: see ``last_rise`` of the fit.
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
            ``lc.topics.Options``. ``StopIteration`` ends the fit, which is then returned, with a
            warning if it has more topics; of what else it raises it is the ``result_so_far``.
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
    asked = Asked(
        num_topics,
        concentration,
        word_concentration,
        num_active,
        inference,
        method,
        num_passes,
        batch_size,
        start,
        prior,
        options,
    ).checked(len(corpus))
    if after_pass is not None and not callable(after_pass):
        raise TypeError(
            f"`after_pass` must be a function of the fit so far; got {describe(after_pass)}."
        )
    with attach_result():
        devices = mesh_of_one_process(mesh)
        resumes = has_checkpoint(checkpoints, resume, KIND)
        learning = Learning.begin(rng_key, corpus, asked, devices, checkpoints, resumes=resumes)
    so_far, to_write, num_done = learning.so_far, learning.to_write, learning.num_done
    total = None if num_topics == "learned" else learning.total
    with (
        fit_in_progress(checkpoints, KIND, so_far, to_write, num_done) as writer,
        bar_of(
            learning.steps(),
            total=total,
            initial=num_done,
            disable=not progress_bar,
            unit="batch",
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
            if learning.is_after_pass and _is_enough(after_pass, learning.fit):
                learning.warn_of_candidates()
                break
            writer.after_steps(learning.num_done)
        return learning.fit()


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
