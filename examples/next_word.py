# SPDX-License-Identifier: Apache-2.0
"""Predict the next word of a text of yours, with a posterior over the weights of all words.

python examples/next_word.py --text FILE [--held-out FILE] --output DIR
"""

from __future__ import annotations

import argparse
import json
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from kneser_ney import KneserNey
from numpy.lib.stride_tricks import sliding_window_view
from numpyro.infer import TraceMeanField_ELBO, init_to_mean
from numpyro.infer.autoguide import AutoNormal
from sentences import END, Text, read_text

import numpyro_largecat as lc

NUM_LOGGED = 20  # lines of a fit
MOST_LOGGED = 5_000  # held-out words that are scored for a line
MIXED = "mean of the trigram and the posterior"


class Problem(NamedTuple):
    """Words to predict, each with those before it, the last one first."""

    text: Text
    before: np.ndarray  # (N, n), ids
    held_out_before: np.ndarray
    counts: np.ndarray  # (K,), how often each word is in the training text, plus one


def make_problem(text: Text, num_before: int) -> Problem:
    counts = np.bincount(text.train, minlength=len(text.words)) + 1
    before = (words_before(tokens, num_before) for tokens in (text.train, text.held_out))
    return Problem(text, *before, counts)


def words_before(tokens: np.ndarray, number: int) -> np.ndarray:
    """The words before each one, the last one first; before the text there are ends."""
    padded = np.concatenate([np.full(number, END, np.int32), tokens[:-1]])
    return sliding_window_view(padded, number)[:, ::-1].copy()


def encoder(args: argparse.Namespace) -> Callable[[jax.Array], jax.Array]:
    """From the features of the words before, (B, n, D), to what they say of the next, (B, D).

    It is a weighted sum of them, in which near words weigh more, plus a network of one layer.
    """
    rng = np.random.default_rng(args.seed)
    n, d, h = args.num_before, args.num_features, args.num_hidden
    start = {
        "into": rng.normal(0, (n * d) ** -0.5, (n * d, h)),
        "bias": np.zeros(h),
        "out": rng.normal(0, h**-0.5, (h, d)),
        "nearness": np.repeat(0.7 ** np.arange(n)[:, None], d, axis=1),
    }

    def encode(before: jax.Array) -> jax.Array:
        p = {name: numpyro.param(name, jnp.asarray(v, jnp.float32)) for name, v in start.items()}
        hidden = jnp.tanh(before.reshape(len(before), -1) @ p["into"] + p["bias"])
        return hidden @ p["out"] + (before * p["nearness"]).sum(axis=1)

    return encode


def make_model(problem: Problem, num_sampled: int | None, args: argparse.Namespace):
    """One table of words, read for those before and chosen from; None makes the softmax exact."""
    num_rows, num_words = len(problem.before), len(problem.counts)
    encode = encoder(args)
    log_frequency = jnp.asarray(np.log(problem.counts / problem.counts.sum()), jnp.float32)
    proposal = lc.FrequencyProposal(problem.counts)

    def model(before, y=None, rows=None):
        with lc.class_plate(
            "words", num_words, y, num_sampled, proposal=proposal, reads=before
        ) as words:
            prior = dist.Normal(0, args.prior_scale).expand([args.num_features]).to_event(1)
            weight = numpyro.sample("weight", prior)
            intercept = numpyro.sample("intercept", dist.Normal(0, 1))
        features = encode(words.rows_of(weight, before))
        utilities = features @ words.scored(weight).T
        utilities += words.scored(intercept + log_frequency[words.indices])
        with lc.data_plate("tokens", num_rows, rows) as rows:
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
            problem.before, problem.text.train, batch_size=args.batch_size, seed=args.seed
        )
        self.checkpoints = lc.Checkpoints(folder, every_minutes=args.checkpoint_minutes)
        self._score = jax.jit(lambda params, x, y: self._fitted(params).on(x).log_likelihood(y))

    def _fitted(self, params) -> lc.Fitted:
        return lc.Fitted(self.svi.model, self.svi.guide, params)

    def run_to(self, num_steps: int):
        """Take steps up to this number of them, from the newest checkpoint on."""
        shape = len(self.problem.counts), self.args.num_features
        start = 0.1 * jax.random.normal(jax.random.key(self.args.seed), shape)
        return self.svi.run(
            jax.random.key(self.args.seed + 1),
            num_steps,
            batches=self.batches,
            init_params={"weight_auto_loc": start},  # where all words start alike, none has a use
            checkpoints=self.checkpoints,
            resume=True,
            progress_bar=False,
        )

    def run(self) -> lc.Fitted:
        """Take all steps, and print how it goes."""
        started, taken, every = time.perf_counter(), 0, -(-self.num_steps // NUM_LOGGED)
        while taken < self.num_steps:
            result = self.run_to(min(self.num_steps, (taken // every + 1) * every))
            taken = len(result.losses)
            if not np.isfinite(result.losses[-1]):
                raise SystemExit("The fit has stopped: try a lower --learning-rate.")
            elbo = -np.mean(result.losses[-every:]) / len(self.problem.before)
            scored = perplexity(self.log_prob(result.params, MOST_LOGGED))
            passes = taken * self.args.batch_size / len(self.problem.before)
            print(
                f"step {taken} of {self.num_steps}, {passes:.1f} passes, ELBO per word {elbo:.3f}, "
                f"held-out perplexity of the first words {scored:.1f}, "
                f"{time.perf_counter() - started:.0f} s",
                flush=True,
            )
        return lc.Fitted.from_svi(self.svi, result)

    def log_prob(self, params, most: int | None = None, together: int = 500) -> np.ndarray:
        """Exact log probabilities of held-out words, over all words, at the posterior's centre."""
        x, y = self.problem.held_out_before[:most], self.problem.text.held_out[:most]
        parts = []
        for start in range(0, len(y), together):
            rows = np.minimum(np.arange(start, start + together), len(y) - 1)
            parts.append(np.asarray(self._score(params, x[rows], y[rows])))
        return np.concatenate(parts)[: len(y)]


def perplexity(log_prob: np.ndarray) -> float:
    return float(np.exp(-np.mean(log_prob, dtype=np.float64)))


def log_probs_without_fit(problem: Problem) -> dict[str, np.ndarray]:
    """Held-out log probabilities by counts alone."""
    words, held_out = problem.text.train, problem.text.held_out
    return {
        "unigram": np.log(problem.counts / problem.counts.sum())[held_out],
        "Kneser-Ney trigram": KneserNey(words, len(problem.counts), END).log_prob(held_out),
    }


def show_next_words(fitted: lc.Fitted, problem: Problem, args: argparse.Namespace) -> None:
    """Print the most probable words after some contexts, and how sure the model is of each."""
    words = np.array(problem.text.words)
    places = np.linspace(0, len(problem.held_out_before) - 1, args.num_shown + 2, dtype=int)[1:-1]
    before = problem.held_out_before[places]
    top = np.asarray(fitted.on(before).top_classes(5).classes)  # (contexts, 5)
    draws = fitted.on(np.repeat(before, 5, axis=0)).log_likelihood(
        top.ravel(), rng_key=jax.random.key(args.seed + 2), num_draws=50
    )
    ranges = np.quantile(np.exp(draws), [0.05, 0.5, 0.95], axis=0).reshape(3, *top.shape)
    print("\nThe most probable next words: median and 90 % interval of their probability")
    for context, best, (low, middle, high) in zip(before, top, ranges.swapaxes(0, 1), strict=True):
        shown = (
            f"{word} {m:.1%} ({a:.1%} to {b:.1%})"
            for word, m, a, b in zip(words[best], middle, low, high, strict=True)
        )
        print(f"  {' '.join(words[context[::-1]])} ...  {', '.join(shown)}")


def show_unsure_words(fitted: lc.Fitted, problem: Problem, args: argparse.Namespace) -> None:
    """Print how much of the prior's spread is left for words of each frequency."""
    left = np.asarray(fitted.params["weight_auto_scale"]).mean(axis=1) / args.prior_scale
    counts = problem.counts - 1
    print("\nStandard deviation of a word's weights, as a share of the prior's")
    for least in 10 ** np.arange(int(np.log10(counts.max())) + 1):
        of_range = (counts >= least) & (counts < 10 * least)
        if of_range.any():
            widest = np.flatnonzero(of_range)[np.argsort(-left[of_range])[:5]]
            print(
                f"  {of_range.sum():7d} words seen {least} to {10 * least - 1} times: "
                f"{left[of_range].mean():.2f}, most unsure: "
                f"{' '.join(problem.text.words[k] for k in widest)}"
            )


def keep_settings(folder: Path, problem: Problem, args: argparse.Namespace) -> None:
    """Write the settings beside the fit, or refuse to go on with others."""
    paths = ("text", "held_out", "output")
    settings = {name: value for name, value in vars(args).items() if name not in paths}
    settings["text"] = zlib.crc32(problem.text.train)
    file = folder / "settings.json"
    if file.exists():
        before = json.loads(file.read_text())
        differ = sorted(name for name in settings if settings[name] != before.get(name))
        if differ:
            raise SystemExit(
                f"{folder} holds a fit with another {', '.join(differ)}: {before}. Go on with "
                "these, or name another --output."
            )
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(settings, indent=1))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--text", type=Path, required=True, help="a sentence in each line, plain or .gz")
    add("--held-out", type=Path, help="another text to score; else the last tenth of the first")
    add("--output", type=Path, default=Path("next_word_output"), help="folder (%(default)s)")
    add("--least-count", type=int, default=1, help="rarer words are unknown (%(default)s)")
    add("--steps", type=int, default=40_000, help="steps of SVI (%(default)s)")
    add("--exact-steps", type=int, default=0, help="of the exact softmax, to compare; none if 0")
    add("--batch-size", type=int, default=300, help="words in a minibatch (%(default)s)")
    add("--num-sampled", type=int, default=300, help="words drawn beside them (%(default)s)")
    add("--num-before", type=int, default=5, help="words that are read (%(default)s)")
    add("--num-features", type=int, default=100, help="of each word (%(default)s)")
    add("--num-hidden", type=int, default=200, help="units of the network (%(default)s)")
    add("--prior-scale", type=float, default=0.2, help="sd of the features (%(default)s)")
    add("--learning-rate", type=float, default=0.004, help="of Adam, at first (%(default)s)")
    add("--checkpoint-minutes", type=float, default=2.0, help="between two (%(default)s)")
    add("--num-shown", type=int, default=6, help="contexts to show (%(default)s)")
    add("--seed", type=int, default=0)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Read, fit, score and show."""
    args = parse(argv)
    text = read_text(args.text, args.held_out, args.least_count)
    problem = make_problem(text, args.num_before)
    print(
        f"{len(text.train)} words to learn from, {len(text.held_out)} held out, with the ends of "
        f"sentences; {len(text.words)} different ones",
        flush=True,
    )
    keep_settings(args.output, problem, args)
    found = log_probs_without_fit(problem)
    num_sampled = min(args.num_sampled, len(text.words) - 1)
    fit = Fit(problem, args.output / "fit", num_sampled, args.steps, args)
    fitted = fit.run()
    found["posterior"] = fit.log_prob(fitted.params)
    found[MIXED] = np.logaddexp(found["Kneser-Ney trigram"], found["posterior"]) - np.log(2)
    if args.exact_steps:
        exact = Fit(problem, args.output / "exact", None, args.exact_steps, args)
        found["posterior, exact softmax"] = exact.log_prob(exact.run().params)
    show_next_words(fitted, problem, args)
    show_unsure_words(fitted, problem, args)
    scores = {name: perplexity(log_prob) for name, log_prob in found.items()}
    (args.output / "scores.json").write_text(json.dumps(scores, indent=1))
    (args.output / "words.txt").write_text("\n".join(text.words) + "\n", encoding="utf-8")
    print(
        f"\nPerplexity of {len(text.held_out)} held-out words, each end of a sentence one of them"
    )
    for name, score in scores.items():
        print(f"  {name:40s} {score:8.1f}")
    print(f"\nThe fit, its scores and its words are in {args.output}/")
    return scores


if __name__ == "__main__":
    main()
