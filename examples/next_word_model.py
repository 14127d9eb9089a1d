# SPDX-License-Identifier: Apache-2.0
"""A model of the next word with a posterior over one table of words, and its fit, step by step."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from flax import nnx
from numpy.lib.stride_tricks import sliding_window_view
from numpyro.contrib.module import nnx_module
from numpyro.infer import TraceMeanField_ELBO, init_to_mean
from numpyro.infer.autoguide import AutoNormal
from sentences import END, Text

import numpyro_largecat as lc

LENGTH = 16  # words of a piece: words that follow each other read the same ones
MOST_LOGGED = 300  # held-out pieces that are scored for a line about the fit


class Problem(NamedTuple):
    """A text in pieces of ``LENGTH`` words, each with the words that are read to predict them."""

    text: Text
    before: np.ndarray  # (N, num_before + LENGTH - 1), ids
    words: np.ndarray  # (N, LENGTH)
    held_out_before: np.ndarray
    held_out_words: np.ndarray  # the last piece filled up with ends of sentences
    counts: np.ndarray  # (K,), how often each word is in the training text, plus one


def make_problem(text: Text, num_before: int) -> Problem:
    whole = text.train[: len(text.train) // LENGTH * LENGTH]
    pieces = (*in_pieces(whole, num_before), *in_pieces(text.held_out, num_before))
    return Problem(text, *pieces, np.bincount(text.train, minlength=len(text.words)) + 1)


def in_pieces(tokens: np.ndarray, num_before: int) -> tuple[np.ndarray, np.ndarray]:
    """The words that each piece reads, and its own; before the text there are ends."""
    start, rest = np.full(num_before, END), np.full(-len(tokens) % LENGTH, END)
    tokens = np.concatenate([start, tokens, rest]).astype(np.int32)
    before = sliding_window_view(tokens[:-1], num_before + LENGTH - 1)[::LENGTH].copy()
    return before, tokens[num_before:].reshape(-1, LENGTH)


class Encoder(nnx.Module):
    """From features of words that are read, (B, n + T - 1, D), to those of T next ones.

    They are a weighted sum of those of the n words before, plus a network of one layer.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        rng = np.random.default_rng(args.seed)
        n, d, h = args.num_before, args.num_features, args.num_hidden
        self.into = nnx.Param(jnp.float32(rng.normal(0, (n * d) ** -0.5, (n * d, h))))
        self.bias = nnx.Param(jnp.zeros(h))
        self.out = nnx.Param(jnp.float32(rng.normal(0, h**-0.5, (h, d))))
        self.nearness = nnx.Param(jnp.full((n, d), 0.7) ** np.arange(n)[:, None])

    def __call__(self, read: jax.Array) -> jax.Array:
        n = len(self.nearness[...])
        num_places = read.shape[1] - n + 1
        places = np.arange(num_places)[:, None] + np.arange(n)[::-1]
        before = read[:, places]  # (B, T, n, D)
        flat = before.reshape(len(read), num_places, -1)
        hidden = jnp.tanh(flat @ self.into[...] + self.bias[...])
        return hidden @ self.out[...] + (before * self.nearness[...]).sum(axis=2)


def make_model(problem: Problem, num_sampled: int | None, args: argparse.Namespace):
    """One table of words, read for those before and chosen from; None: exact softmax."""
    num_rows, num_words = len(problem.before), len(problem.counts)
    network = Encoder(args)
    shares = problem.counts / problem.counts.sum()
    log_frequency = jnp.asarray(np.log(shares), jnp.float32)
    proposal = lc.FrequencyProposal(problem.counts)

    def model(before, y=None, rows=None):
        with lc.class_plate(
            "words", num_words, y, num_sampled, proposal=proposal, reads=before
        ) as words:
            prior = dist.Normal(0, args.prior_scale).expand([args.num_features])
            weight = numpyro.sample("weight", prior.to_event(1))
            intercept = numpyro.sample("intercept", dist.Normal(0, 1))
        encode = nnx_module("encoder", network)  # its parameters are points
        features = encode(words.rows_of(weight, before))
        utilities = features @ words.scored(weight).T
        utilities += words.scored(intercept + log_frequency[words.indices])
        places = numpyro.plate("places", utilities.shape[1], dim=-1)
        with places, lc.data_plate("pieces", num_rows, rows, dim=-2) as rows:
            lc.sample_choice("y", utilities, classes=words, rows=rows, obs=y)

    return model


class Fit:
    """A fit of the model that is written to its folder, and goes on from there."""

    def __init__(
        self, problem: Problem, folder: Path, num_sampled: int | None, num_steps: int, args
    ):
        self.problem, self.num_steps, self.args = problem, num_steps, args
        model = make_model(problem, num_sampled, args)
        guide = AutoNormal(model, init_loc_fn=init_to_mean, init_scale=0.02)
        optimiser = optax.adam(optax.cosine_decay_schedule(args.learning_rate, num_steps, 0.02))
        self.svi = lc.SubsampledSVI(model, guide, optimiser, TraceMeanField_ELBO())
        self.batches = lc.ArrayBatches(
            problem.before, problem.words, batch_size=args.batch_size, seed=args.seed
        )
        self.checkpoints = lc.Checkpoints(folder, every_minutes=args.checkpoint_minutes)
        self._score = jax.jit(lambda params, x, y: self._fitted(params).on(x).log_likelihood(y))

    def _fitted(self, params) -> lc.Fitted:
        return lc.Fitted(self.svi.model, self.svi.guide, params)

    def run(self) -> lc.Fitted:
        """Take all steps, from the newest checkpoint on, and print how it goes."""
        shape = len(self.problem.counts), self.args.num_features
        start = 0.1 * jax.random.normal(jax.random.key(self.args.seed), shape)
        result = self.svi.run(
            jax.random.key(self.args.seed + 1),
            self.num_steps,
            batches=self.batches,
            init_params={"weight_auto_loc": start},  # where all words start alike, none has a use
            callbacks=[lc.Callback(self.show, -(-self.num_steps // self.args.num_lines))],
            checkpoints=self.checkpoints,
            resume=True,
            progress_bar=False,
        )
        if not np.isfinite(result.losses[-1]):
            raise SystemExit("The fit has stopped: try a lower --learning-rate.")
        return lc.Fitted.from_svi(self.svi, result)

    def show(self, progress: lc.Progress) -> None:
        """Print a line about the fit, with the held-out perplexity of some words."""
        some = -(-len(self.problem.held_out_words) // MOST_LOGGED)
        scored = perplexity(self.log_prob(progress.result().params, every=some))
        passes = progress.step * self.args.batch_size / len(self.problem.before)
        elbo = progress.metrics["elbo"] / self.problem.words.size
        print(
            f"step {progress.step} of {progress.num_steps}, {passes:.1f} passes, ELBO per word "
            f"{elbo:.3f}, held-out perplexity of some words {scored:.1f}, "
            f"{progress.metrics['steps_per_second']:.0f} steps/s",
            flush=True,
        )

    def log_prob(self, params, every: int = 1, together: int = 32) -> np.ndarray:
        """Exact log probabilities of held-out words, over all words, at the posterior's centre."""
        x, y = self.problem.held_out_before[::every], self.problem.held_out_words[::every]
        parts = []
        for start in range(0, len(y), together):
            rows = np.minimum(np.arange(start, start + together), len(y) - 1)
            parts.append(np.asarray(self._score(params, x[rows], y[rows])))
        is_word = np.arange(self.problem.held_out_words.size) < len(self.problem.text.held_out)
        return np.concatenate(parts)[: len(y)][is_word.reshape(-1, LENGTH)[::every]]


def perplexity(log_prob: np.ndarray) -> float:
    return float(np.exp(-np.mean(log_prob, dtype=np.float64)))
