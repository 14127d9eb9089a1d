# SPDX-License-Identifier: Apache-2.0
"""The example of the next word: reading a text, trigrams, and a fit that survives being ended."""

from __future__ import annotations

import gzip
import json
import runpy
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from numpyro_largecat.data.fit_folders import FitFolder
from numpyro_largecat.svi.saved_run import KIND

EXAMPLES = Path(__file__).parents[1] / "examples"
KneserNey = runpy.run_path(str(EXAMPLES / "kneser_ney.py"))["KneserNey"]
read_text = runpy.run_path(str(EXAMPLES / "sentences.py"))["read_text"]


class TestReadText:
    @pytest.mark.parametrize("suffix", [".txt", ".txt.gz"])
    def test_words_are_numbered_by_frequency_after_the_marks(self, tmp_path, suffix):
        path, held_out = tmp_path / f"train{suffix}", tmp_path / "other.txt"
        text = " the cat \n\nthe café the <unk>\n".encode()
        path.write_bytes(gzip.compress(text) if suffix.endswith("gz") else text)
        held_out.write_text("a cat\n")
        found = read_text(path, held_out)
        assert found.words == ["<eos>", "<unk>", "the", "cat", "café"]
        assert found.train.tolist() == [2, 3, 0, 2, 4, 2, 1, 0]
        assert found.held_out.tolist() == [1, 3, 0]

    def test_the_last_tenth_of_sentences_is_held_out_and_adds_no_words(self, tmp_path):
        path = tmp_path / "text.txt"
        path.write_text("a b\n" * 18 + "\n" + "a c\n" * 2)
        found = read_text(path)
        assert found.words == ["<eos>", "<unk>", "a", "b"]
        assert found.train.tolist() == [2, 3, 0] * 18
        assert found.held_out.tolist() == [2, 1, 0] * 2

    def test_rare_words_are_unknown(self, tmp_path):
        path = tmp_path / "text.txt"
        path.write_text("a b\na c\n")
        found = read_text(path, path, least_count=2)
        assert found.words == ["<eos>", "<unk>", "a"]
        assert found.train.tolist() == found.held_out.tolist() == [2, 1, 0, 2, 1, 0]

    @pytest.mark.parametrize(("text", "need"), [("a <eos> b\n" * 20, "<eos>"), ("\n", "words")])
    def test_refuses(self, tmp_path, text, need):
        path = tmp_path / "text.txt"
        path.write_text(text)
        with pytest.raises(ValueError, match=need):
            read_text(path)


def kneser_ney_by_definition(tokens, num_words, before):
    """Probability of a word after two others as a function, by loops: Chen and Goodman (1998)."""
    tokens = [before, before, *tokens.tolist()]
    trigrams = Counter(zip(tokens, tokens[1:], tokens[2:], strict=False))
    bigrams = Counter(gram[1:] for gram in trigrams)  # different words before, not occurrences
    unigrams = Counter(gram[1:] for gram in bigrams)

    def mixed(counts, shorter):
        n = Counter(counts.values())
        y = n[1] / (n[1] + 2 * n[2])
        discounts = [0, *(i - (i + 1) * y * n[i + 1] / n[i] for i in (1, 2, 3))]

        def prob(context, word):
            of_context = [c for gram, c in counts.items() if gram[:-1] == context]
            less = shorter(context[1:], word)
            if not of_context:
                return less
            count = counts[(*context, word)]
            given_back = sum(discounts[min(c, 3)] for c in of_context) * less
            return (count - discounts[min(count, 3)] + given_back) / sum(of_context)

        return prob

    one = mixed(unigrams, lambda context, word: 1 / num_words)
    return mixed(trigrams, mixed(bigrams, one))


K = 90  # words, of which the last two are in no text


@pytest.fixture(scope="module")
def tokens():
    """Words of which few are frequent and many are rare, as in any text."""
    words = np.random.default_rng(0).zipf(1.4, size=2_000)
    return words[words <= K - 2].astype(np.int32) - 1


class TestKneserNey:
    def test_agrees_with_its_definition(self, tokens):
        train, held_out = tokens[:1_200], np.append(tokens[1_200:1_250], [K - 1, K - 2, 3, K - 1])
        prob = kneser_ney_by_definition(train, K, 0)
        padded = [0, 0, *held_out.tolist()]
        expected = [prob(tuple(padded[i : i + 2]), padded[i + 2]) for i in range(len(held_out))]
        found = KneserNey(train, K, 0).log_prob(held_out)
        np.testing.assert_allclose(np.exp(found), expected, rtol=1e-12)

    @pytest.mark.parametrize("num_tokens", [1, 20, 1_200])
    def test_sums_to_one_after_any_two_words(self, tokens, num_tokens):
        """Also after words that the text does not have, and where discounts cannot be estimated."""
        fit = KneserNey(tokens[:num_tokens], K, 0)
        contexts = np.arange(K**2)[:, None] * K
        prob = fit.prob(contexts + np.arange(K))
        assert (prob > 0).all()
        np.testing.assert_allclose(prob.sum(axis=1), 1, rtol=1e-12)

    def test_refuses_more_words_than_integers_can_number(self, tokens):
        with pytest.raises(ValueError, match=r"below 2\*\*21"):
            KneserNey(tokens, 2**21, 0)


def write_text(path, num_sentences=150):
    """Sentences in which a word nearly determines the next one."""
    rng = np.random.default_rng(0)
    lines = []
    for _ in range(num_sentences):
        words = [int(rng.integers(20))]
        for _ in range(rng.integers(3, 9)):
            words.append(int(7 * words[-1] + rng.integers(2)) % 20)
        lines.append(" ".join(f"word{i}" for i in words))
    path.write_text("\n".join(lines) + "\n")


SMALL = "--steps 2000 --exact-steps 30 --batch-size 4 --num-sampled 5 --num-before 2 --num-shown 2"
SMALL += " --num-lines 4 --num-features 8 --num-hidden 4 --prior-scale 1 --learning-rate 0.03"


def start(text, output, *options):
    """Start the script; its lines can be read as they come."""
    command = [sys.executable, str(EXAMPLES / "next_word.py"), *SMALL.split(), *options]
    command += ["--text", str(text), "--output", str(output)]
    return subprocess.Popen(
        command,
        cwd=EXAMPLES.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def end_early(text, output):
    """Start the script and end it, as a queue of jobs does, once it has printed two scores.

    The signal may come before the second has been counted as printed; it is then printed again.
    """
    with start(text, output) as process:
        for line in process.stdout:
            if line.startswith("step 1000 "):
                process.terminate()
        assert process.wait(timeout=120) == 128 + signal.SIGTERM


def finish(text, output, *options):
    with start(text, output, *options) as process:
        printed = process.communicate(timeout=300)[0]
    assert process.returncode == 0, printed
    return printed


@pytest.mark.slow
def test_ended_and_run_again_it_ends_as_if_it_had_not_been(tmp_path):
    """Scores, parameters and the optimiser's state are the same to the last bit."""
    text, whole, parts = tmp_path / "text.txt", tmp_path / "whole", tmp_path / "parts"
    write_text(text)
    printed = finish(text, whole)
    end_early(text, parts)
    at_last = finish(text, parts)
    assert "step 500 of 2000" in printed and "step 500 of 2000" not in at_last

    shown = "The most probable next words"
    assert at_last.split(shown)[1].replace("parts", "whole") == printed.split(shown)[1]
    for name in ("fit", "exact_30"):
        found, expected = (FitFolder(at / name, KIND).read().arrays for at in (parts, whole))
        assert found.keys() == expected.keys()
        for key in expected:
            np.testing.assert_array_equal(found[key], expected[key], err_msg=key)

    scores = json.loads((parts / "scores.json").read_text())
    assert scores == json.loads((whole / "scores.json").read_text())
    assert scores["posterior"] < scores["posterior, exact softmax"] < scores["unigram"]
    assert scores["posterior"] < 0.7 * scores["unigram"]
    assert (whole / "words.txt").read_text().splitlines()[:2] == ["<eos>", "<unk>"]
    with start(text, whole, "--steps", "30") as process:
        assert "a fit with another steps" in process.communicate(timeout=120)[0]
    assert process.returncode == 1
