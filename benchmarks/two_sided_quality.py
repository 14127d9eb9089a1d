# SPDX-License-Identifier: Apache-2.0
"""What ``two_sided`` recommends on Gowalla: ours, PyTorch's matrix factorisation, popularity.

All but popularity have utilities ``v[user] @ w.T + b`` with D = 32 features; b starts at the log
frequency of each item. Ours is a posterior (AutoNormal), read at its centre. The scores are those
of tables v, w and b, whoever has learned them: the log likelihood of each held-out pair over all
items, and the share of a user's held-out items among the 20 best of those that the user lacks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from jax import lax, random
from numpy.typing import NDArray
from numpyro.infer import TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoNormal

import numpyro_largecat as lc
from benchmarks.readers import find_file
from benchmarks.readers.interactions import Interactions, read_interactions
from numpyro_largecat.data import padded_lists

NUM_FEATURES = 32
START = 0.1  # standard deviation of the embeddings where they start
INIT_SCALE = 0.05  # of the posterior where it starts
NUM_RECOMMENDED = 20
USERS_TOGETHER = 500
SCORED_USERS = 6000  # a fixed subset
HELD_BACK = 0.1  # of the training pairs, to tune on
STEPS_PER_CHUNK = 100


class Setting(NamedTuple):
    """How a method takes its steps, and what holds its tables near 0."""

    learning_rate: float
    batch_size: int
    num_sampled: int
    shrinkage: float  # ours: prior standard deviation; PyTorch's: L2 of the rows of a step


SETTINGS = {
    "subsampled": Setting(0.01, 500, 100, 1.0),
    "torch": Setting(0.003, 1000, 200, 0.03),
}
TRIED = {
    "subsampled": [
        *(Setting(rate, 500, 100, 1.0) for rate in (0.005, 0.01, 0.02)),
        *(Setting(0.01, 500, 100, scale) for scale in (0.5, 2.0)),
    ],
    "torch": [
        Setting(rate, 1000, 200, l2)
        for rate in (0.001, 0.003, 0.01)
        for l2 in (0.0, 0.01, 0.03, 0.1)
    ],
}


class Tables(NamedTuple):
    """What a method has learned."""

    v: NDArray[np.floating]  # (U, D)
    w: NDArray[np.floating]  # (K, D)
    b: NDArray[np.floating]  # (K,)


class Problem(NamedTuple):
    """Pairs to learn from, pairs to score, and the sizes of both tables."""

    train: Interactions
    scored: Interactions
    num_users: int
    num_items: int

    def log_frequencies(self) -> NDArray[np.float32]:
        """Log frequency of each item among the training pairs; one half is added to each count."""
        counts = np.bincount(self.train.items, minlength=self.num_items) + 0.5
        return np.log(counts / counts.sum()).astype(np.float32)


class Scores(NamedTuple):
    """Means over pairs and users, with standard errors over users."""

    log_likelihood: float
    log_likelihood_error: float
    recall: float
    recall_error: float


class Method(Protocol):
    """What learns tables."""

    def run(self, num_steps: int) -> None:
        """Take some steps."""

    def tables(self) -> Tables:
        """The tables as they are now."""


def gowalla(folder: Path, *, held_back: bool) -> Problem:
    """Read the data; ``held_back`` scores a tenth of the training pairs in place of the test's."""
    train = read_interactions(find_file(folder, "gowalla_train.txt"))
    test = read_interactions(find_file(folder, "gowalla_test.txt"))
    sizes = [1 + max(int(a.max()), int(b.max())) for a, b in zip(train, test, strict=True)]
    if held_back:
        is_scored = np.random.default_rng(0).random(len(train.users)) < HELD_BACK
        train, test = (Interactions(*(x[m] for x in train)) for m in (~is_scored, is_scored))
    return Problem(train, test, *sizes)


def synthetic() -> Problem:
    """Few users and items, for a test of the benchmark."""
    rng = np.random.default_rng(0)
    users, items = rng.integers(50, size=2000), rng.integers(30, size=2000)
    pairs = Interactions(users.astype(np.int32), items.astype(np.int32))
    parts = [Interactions(*(x[rows] for x in pairs)) for rows in (slice(1600), slice(1600, None))]
    return Problem(*parts, 50, 30)


class Ours:
    """A posterior over both tables and the biases."""

    def __init__(self, problem: Problem, setting: Setting) -> None:
        counts = lc.EntityCounts.of(problem.num_users, problem.train.users)
        model = partial(_model, problem, setting)
        guide = AutoNormal(model, init_scale=INIT_SCALE)
        optimizer = optax.adam(setting.learning_rate)
        svi = lc.SubsampledSVI(model, guide, optimizer, TraceMeanField_ELBO())
        batches = lc.ArrayBatches(*problem.train, batch_size=setting.batch_size)
        keys = random.split(random.key(0), 3)
        sizes = {"v": problem.num_users, "w": problem.num_items}
        start = {
            f"{name}_auto_loc": START * random.normal(key, (size, NUM_FEATURES))
            for key, (name, size) in zip(keys, sizes.items(), strict=False)
        }
        start["b_auto_loc"] = jnp.asarray(problem.log_frequencies())
        first = batches.draw(keys[2])
        self._svi, self._key, self._inputs = svi, keys[2], (batches, counts)
        self._state = svi.init(keys[2], counts, *first, init_params=start)

        def steps(state: Any, key: Any, batches: Any, counts: Any) -> Any:
            def step(state: Any, key: Any) -> Any:
                return svi.update(state, counts, *batches.draw(key))

            return lax.scan(step, state, random.split(key, STEPS_PER_CHUNK))

        self._steps = jax.jit(steps, donate_argnums=0)

    def run(self, num_steps: int) -> None:
        """Take some steps, a multiple of a chunk."""
        for _ in range(num_steps // STEPS_PER_CHUNK):
            self._key, key = random.split(self._key)
            self._state, losses = self._steps(self._state, key, *self._inputs)
        losses.block_until_ready()

    def tables(self) -> Tables:
        """The centre of the posterior."""
        params = self._svi.get_params(self._state)
        return Tables(*(np.asarray(params[f"{name}_auto_loc"]) for name in "vwb"))


def _model(
    problem: Problem, setting: Setting, counts: Any, users: Any, items: Any, rows: Any
) -> None:
    prior = dist.Normal(0, setting.shrinkage).expand([NUM_FEATURES]).to_event(1)
    with lc.entity_plate("users", problem.num_users, users, counts) as read:
        v = numpyro.sample("v", prior)
    drawn = min(setting.num_sampled, problem.num_items - 1)
    with lc.class_plate("items", problem.num_items, items, num_sampled=drawn) as classes:
        w = numpyro.sample("w", prior)
        b = numpyro.sample("b", dist.Normal(0, 10))
    with lc.data_plate("data", len(problem.train.users), rows) as batch:
        utilities = read.rows_of(v, users) @ w.T + b
        lc.sample_choice("y", utilities, classes=classes, rows=batch, obs=items)


class Popularity:
    """The frequency of each item, for all users alike."""

    def __init__(self, problem: Problem) -> None:
        self._tables = Tables(
            np.zeros((problem.num_users, 1)),
            np.zeros((problem.num_items, 1)),
            problem.log_frequencies(),
        )

    def run(self, num_steps: int) -> None:
        """Nothing is learned by steps."""

    def tables(self) -> Tables:
        """Biases alone."""
        return self._tables


def make_method(name: str, problem: Problem, setting: Setting) -> Method:
    """The method of this name, before its first step."""
    if name == "popularity":
        return Popularity(problem)
    if name == "torch":
        from benchmarks.two_sided_torch import Factorisation

        return Factorisation(problem, setting, NUM_FEATURES, START)
    return Ours(problem, setting)


def score_tables(tables: Tables, problem: Problem) -> Scores:
    """Scores by matrix products in NumPy, the same for every method."""
    has, wanted = (
        padded_lists(*pairs, problem.num_users) for pairs in (problem.train, problem.scored)
    )
    users = np.flatnonzero((wanted >= 0).any(axis=1))
    users = np.random.default_rng(1).permutation(users)[:SCORED_USERS]
    found = [
        _score_users(tables, users[i : i + USERS_TOGETHER], has, wanted)
        for i in range(0, len(users), USERS_TOGETHER)
    ]
    sums, numbers, recalls = (np.concatenate(parts) for parts in zip(*found, strict=True))
    mean = sums.sum() / numbers.sum()
    # A ratio of sums over users, who are independent where the pairs of one user are not.
    error = np.sqrt(((sums - mean * numbers) ** 2).sum()) / numbers.sum()
    recall_error = recalls.std() / np.sqrt(len(recalls))
    return Scores(float(mean), float(error), float(recalls.mean()), float(recall_error))


def _score_users(
    tables: Tables, users: NDArray[Any], has: NDArray[Any], wanted: NDArray[Any]
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Sum of log likelihoods, number of held-out items and recall of each user."""
    utilities = tables.v[users] @ tables.w.T + tables.b
    largest = utilities.max(axis=1, keepdims=True)
    log_sums = largest[:, 0] + np.log(np.exp(utilities - largest).sum(axis=1))
    own = wanted[users]
    is_item = own >= 0
    rows = np.arange(len(users))[:, None]
    log_probs = utilities[rows, own] - log_sums[:, None]
    kept = has[users]
    utilities[np.nonzero(kept >= 0)[0], kept[kept >= 0]] = -np.inf
    number = min(NUM_RECOMMENDED, utilities.shape[1])
    best = np.argpartition(-utilities, number - 1, axis=1)[:, :number]
    hits = (best[:, :, None] == own[:, None, :]).any(axis=1) & is_item
    numbers = is_item.sum(axis=1)
    return (log_probs * is_item).sum(axis=1), numbers, hits.sum(axis=1) / numbers


def compare(
    methods: dict[str, Method],
    problem: Problem,
    check_points: list[float],
    say: Callable[[str, float, Scores], None],
) -> dict[str, list[tuple[float, Scores]]]:
    """Let the methods take turns, and score each whenever it has had so many seconds of steps."""
    curves: dict[str, list[tuple[float, Scores]]] = {name: [] for name in methods}
    clocks = dict.fromkeys(methods, 0.0)
    for method in methods.values():
        method.run(STEPS_PER_CHUNK)  # compiles, and is not counted
    for check_point in check_points:
        for name, method in methods.items():
            while clocks[name] < check_point and not isinstance(method, Popularity):
                start = time.perf_counter()
                method.run(STEPS_PER_CHUNK)
                clocks[name] += time.perf_counter() - start
            scores = score_tables(Tables(*method.tables()), problem)
            curves[name].append((clocks[name], scores))
            say(name, clocks[name], scores)
    return curves
