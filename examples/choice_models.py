# SPDX-License-Identifier: Apache-2.0
"""Which way to travel: multinomial logit beside multinomial probit, with a posterior for both.

Each alternative has features of its own, such as its time and its cost, and some alternatives are
not available to everybody. The logit and the probit are one model function that differs in
``noise=``. The data are Swissmetro and ModeCanada, as ``swissmetro.csv`` and ``modecanada.csv``,
plain or compressed with gzip, in FOLDER or one inside it:

    python examples/choice_models.py --data FOLDER

For each it prints the logit's maximum likelihood estimates beside published ones, posteriors from
SVI and NUTS, values of time, and held-out scores, and it draws the coefficients.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import MCMC, NUTS, Trace_ELBO, init_to_feasible
from numpyro.infer.autoguide import AutoMultivariateNormal

import numpyro_largecat as lc

sys.path.insert(0, str(Path(__file__).parents[1]))  # for `benchmarks`, beside this folder
matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmarks.data_folder import add_data_argument, how_to_name_data
from benchmarks.readers import ChoiceData, read_modecanada, read_swissmetro

FILES = "swissmetro.csv or modecanada.csv"
PRIOR_SCALE = 5.0
LEARNING_RATE = 0.005
# A standard Gumbel error has standard deviation pi / sqrt(6), a standard normal one 1.
TO_LOGIT_SCALE = {"gumbel": 1.0, "normal": math.pi / math.sqrt(6)}
NAMES = {"gumbel": "logit", "normal": "probit"}


class Problem(NamedTuple):
    """Utilities that are linear in coefficients, and what is known about these."""

    design: np.ndarray  # (N, J, P), utilities are design @ coefficients
    available: np.ndarray  # (N, J)
    choice: np.ndarray  # (N,)
    person: np.ndarray  # (N,), who chose
    coefficients: tuple[str, ...]  # (P,), names
    published: tuple[float, ...]  # (P,), maximum likelihood estimates of the logit
    published_log_likelihood: float
    cost: str  # name of the coefficient of cost
    values_of_time: dict[str, float]  # coefficient of a time: its ratio to cost, per hour
    currency: str


def linear_problem(data: ChoiceData, columns: dict[str, np.ndarray], **known) -> Problem:
    """Put the columns of the design side by side; each is (N, J) or broadcasts to it."""
    shape = data.available.shape
    design = np.stack([np.broadcast_to(c, shape) for c in columns.values()], axis=-1)
    design = design.astype(np.float32)
    rows = data.available, data.choice, data.person
    return Problem(design, *rows, coefficients=tuple(columns), **known)


def swissmetro(path: Path) -> Problem:
    """Time and cost with the same coefficient for each alternative: Biogeme's example 01logit."""
    data = read_swissmetro(path)
    feature = dict(zip(data.feature_names, np.moveaxis(data.features, -1, 0), strict=True))
    is_mode = dict(zip(data.alternative_names, np.eye(3), strict=True))
    columns = {
        "train": is_mode["train"],
        "car": is_mode["car"],
        "time (100 min)": feature["time"],
        "cost (100 CHF)": feature["cost"],
    }
    return linear_problem(
        data,
        columns,
        published=(-0.701, -0.155, -1.278, -1.084),
        published_log_likelihood=-5331.252,
        cost="cost (100 CHF)",
        values_of_time={"time (100 min)": 60.0},
        currency="CHF",
    )


def modecanada(path: Path) -> Problem:
    """Income and time in vehicle with a coefficient for each alternative, and generic features.

    The estimates are those of ``mlogit(choice ~ cost + freq + ovt | income | ivt)`` in R.
    """
    data = read_modecanada(path)
    feature = dict(zip(data.feature_names, np.moveaxis(data.features, -1, 0), strict=True))
    is_mode = dict(zip(data.alternative_names, np.eye(4), strict=True))
    income = data.covariates[:, [data.covariate_names.index("income")]]
    others = ("train", "bus", "car")  # beside air
    columns = {mode: is_mode[mode] for mode in others}
    columns["cost (10 $)"] = feature["cost"] / 10
    columns["frequency (10 a day)"] = feature["freq"] / 10
    columns["out of vehicle (h)"] = feature["ovt"] / 60
    columns |= {f"income (10), {mode}": income / 10 * is_mode[mode] for mode in others}
    hours = feature["ivt"] / 60
    columns |= {f"in vehicle (h), {mode}": hours * is_mode[mode] for mode in is_mode}
    per_hour = {n: 10.0 for n in columns if n.endswith("(h)") or n.startswith("in vehicle")}
    return linear_problem(
        data,
        columns,
        published=(
            *(3.274, 0.698, 1.844, -0.333, 0.925, -2.580, -0.381, -0.891, -0.280),
            *(-0.087, 3.571, -0.407, -0.388),
        ),
        published_log_likelihood=-1874.3,
        cost="cost (10 $)",
        values_of_time=per_hour,
        currency="$",
    )


def model(design, available, choice=None, rows=None, *, noise: str, num_rows: int):
    """Observe the alternative of the highest noisy utility; -inf marks those not available."""
    prior = dist.Normal(0, PRIOR_SCALE).expand([design.shape[-1]]).to_event(1)
    coefficients = numpyro.sample("coefficients", prior)
    utilities = jnp.where(available, design @ coefficients, -jnp.inf)
    with lc.data_plate("data", num_rows, rows):
        numpyro.sample("choice", lc.UtilityCategorical(utilities, noise=noise), obs=choice)


def log_likelihoods(utilities, problem: Problem, noise: str):
    """Exact log probability of each choice, shape (N,)."""
    utilities = jnp.where(problem.available, utilities, -jnp.inf)
    return lc.UtilityCategorical(utilities, noise=noise).log_prob(problem.choice)


class Estimates(NamedTuple):
    """What maximum likelihood gives."""

    coefficients: np.ndarray  # (P,)
    covariance: np.ndarray  # (P, P), inverse of the sum of outer products of gradients
    log_likelihood: float


def maximum_likelihood(problem: Problem, noise: str, tolerance: float = 1e-8) -> Estimates:
    """Find the maximum likelihood estimates by the method of Berndt, Hall, Hall and Hausman.

    Its steps are Newton's with the sum of outer products of the choices' gradients in place of the
    Hessian; the last promises to gain less than ``tolerance`` in log likelihood.
    """

    @jax.jit
    def log_likelihood_and_gradients(coefficients, design):
        def log_likelihood(utilities):
            return log_likelihoods(utilities, problem, noise).sum()

        value, slopes = jax.value_and_grad(log_likelihood)(design @ coefficients)
        return value, jnp.einsum("njp,nj->np", design, slopes)

    with jax.enable_x64(True):
        design = jnp.asarray(problem.design, float)
        best = jnp.zeros(design.shape[-1])
        for _ in range(100):
            value, gradients = log_likelihood_and_gradients(best, design)
            information, gradient = gradients.T @ gradients, gradients.sum(axis=0)
            step = jnp.linalg.solve(information, gradient)
            if gradient @ step < tolerance:
                break
            best = best + step
        return Estimates(np.asarray(best), np.linalg.inv(information), float(value))


def split_by_person(problem: Problem) -> tuple[Problem, Problem]:
    """Hold out all choices of a fifth of the people."""
    people = np.unique(problem.person)
    held_out = np.random.RandomState(0).permutation(people)[: len(people) // 5]
    is_test = np.isin(problem.person, held_out)

    def part(rows):
        arrays = problem.design, problem.available, problem.choice, problem.person
        return Problem(*(a[rows] for a in arrays), *problem[4:])

    return part(~is_test), part(is_test)


def draw_svi(train: Problem, noise: str, num_steps: int, num_draws: int) -> np.ndarray:
    """Fit a multivariate normal posterior on minibatches, and draw from it.

    Coefficients are far from independent of each other, which gradients take long to learn, so the
    fit starts near the maximum likelihood estimates, with their covariance.
    """
    num_rows = len(train.choice)
    start = maximum_likelihood(train, noise, tolerance=0.01)
    init_params = {
        "auto_loc": jnp.asarray(start.coefficients, jnp.float32),
        "auto_scale_tril": jnp.asarray(np.linalg.cholesky(start.covariance), jnp.float32),
    }
    fitted = partial(model, noise=noise, num_rows=num_rows)
    guide = AutoMultivariateNormal(fitted, init_loc_fn=init_to_feasible)
    schedule = optax.cosine_decay_schedule(LEARNING_RATE, num_steps)
    svi = lc.SubsampledSVI(fitted, guide, optax.adam(schedule), Trace_ELBO())
    arrays = train.design, train.available, train.choice
    batches = lc.ArrayBatches(*arrays, batch_size=min(500, num_rows))
    result = svi.run(
        jax.random.key(0), num_steps, batches=batches, init_params=init_params, progress_bar=False
    )
    draws = guide.sample_posterior(jax.random.key(1), result.params, sample_shape=(num_draws,))
    return np.asarray(draws["coefficients"])


def draw_nuts(train: Problem, noise: str, num_draws: int) -> np.ndarray:
    """Draw from the posterior by NUTS, on all rows at once."""
    kernel = NUTS(model, init_strategy=init_to_feasible)
    mcmc = MCMC(kernel, num_warmup=num_draws // 2, num_samples=num_draws, progress_bar=False)
    arrays = train.design, train.available, train.choice
    mcmc.run(jax.random.key(2), *arrays, noise=noise, num_rows=len(train.choice))
    return np.asarray(mcmc.get_samples()["coefficients"])


def held_out(draws: np.ndarray, test: Problem, noise: str) -> np.ndarray:
    """Log of the posterior mean probability of each held-out choice."""

    @jax.jit
    def by_draw(draws):
        return jax.lax.map(lambda b: log_likelihoods(test.design @ b, test, noise), draws)

    log_probs = by_draw(jnp.asarray(draws))
    return np.asarray(jax.nn.logsumexp(log_probs, axis=0) - math.log(len(draws)))


def print_table(rows: list[str], columns: list[tuple[str, list[str]]]) -> None:
    """Print a table with named rows, and columns that are pairs of a name and cells."""
    width = max(map(len, rows)) + 2
    for i, row in enumerate(["", *rows]):
        cells = [
            [name, *column][i].rjust(max(map(len, [name, *column]))) for name, column in columns
        ]
        print("  ".join([row.ljust(width), *cells]))


def report_posteriors(problem: Problem, draws: dict[str, np.ndarray]) -> None:
    """Print means, standard deviations and central 94% intervals of the coefficients of each fit.

    A value of time is a ratio, whose mean need not exist: its median is printed.
    """
    columns, values = [], []
    cost = problem.coefficients.index(problem.cost)
    times = [problem.coefficients.index(name) for name in problem.values_of_time]
    factors = np.array(list(problem.values_of_time.values()))
    for name, drawn in draws.items():
        columns += [
            (name, [f"{v:.3f}" for v in drawn.mean(axis=0)]),
            ("sd", [f"{v:.3f}" for v in drawn.std(axis=0)]),
            ("94%", intervals(drawn, digits=3)),
        ]
        value = factors * drawn[:, times] / drawn[:, [cost]]
        values += [
            (name, [f"{v:.1f}" for v in np.median(value, axis=0)]),
            ("94%", intervals(value, digits=1)),
        ]
    print("\nposterior mean, on the scale of the logit")
    print_table(list(problem.coefficients), columns)
    print(f"\nvalue of time, posterior median, {problem.currency} per hour")
    print_table(list(problem.values_of_time), values)


def intervals(draws: np.ndarray, digits: int) -> list[str]:
    """Central 94% intervals, as text."""
    low, high = np.quantile(draws, [0.03, 0.97], axis=0)
    return [f"[{a:.{digits}f}, {b:.{digits}f}]" for a, b in zip(low, high, strict=True)]


def report_scores(scores: dict[str, np.ndarray], person: np.ndarray) -> None:
    """Print mean held-out scores, and their difference with a standard error over people."""
    print("\nheld-out log likelihood per choice, and the lowest of a choice")
    for name, score in scores.items():
        print(f"  {name:8s}{score.mean():8.4f}{score.min():8.2f}")
    first, last = next(iter(scores)), list(scores)[-1]
    difference = scores[last] - scores[first]
    sums = np.bincount(np.unique(person, return_inverse=True)[1], weights=difference)
    error = np.sqrt(len(sums)) * sums.std() / len(person)
    print(f"  {last} - {first}: {difference.mean():.4f}, standard error {error:.4f}")


def draw_forest(problem: Problem, draws: dict[str, np.ndarray], title: str, path: Path) -> None:
    """Draw posterior medians and 94% intervals of all fits side by side."""
    num_rows = len(problem.coefficients)
    _, ax = plt.subplots(figsize=(6.4, 0.4 * num_rows + 1.2), layout="constrained")
    for i, (name, drawn) in enumerate(draws.items()):
        low, middle, high = np.quantile(drawn, [0.03, 0.5, 0.97], axis=0)
        places = np.arange(num_rows) + 0.2 * (i - (len(draws) - 1) / 2)
        error = [middle - low, high - middle]
        ax.errorbar(middle, places, xerr=error, fmt="o", markersize=4, label=name)
    ax.axvline(0, color="0.7", linewidth=0.8, zorder=0)
    ax.set_yticks(np.arange(num_rows), problem.coefficients)
    ax.invert_yaxis()
    ax.set(title=title, xlabel="posterior median and 94% interval, on the scale of the logit")
    ax.figure.legend(loc="outside lower center", ncols=len(draws))
    ax.figure.savefig(path, dpi=150)
    plt.close(ax.figure)


def study(name: str, problem: Problem, args: argparse.Namespace) -> dict[str, np.ndarray]:
    """Fit one data set by all methods and report; return the draws on the logit's scale."""
    train, test = split_by_person(problem)
    people = len(np.unique(problem.person))
    print(f"\n== {name}: {len(problem.choice)} choices of {people} people")
    found = maximum_likelihood(problem, "gumbel")
    columns = [
        ("estimate", [f"{v:.3f}" for v in found.coefficients]),
        ("published", [f"{v:.3f}" for v in problem.published]),
    ]
    print("\nmaximum likelihood of the logit, all choices")
    print_table(list(problem.coefficients), columns)
    print(
        f"log likelihood {found.log_likelihood:.3f}, published {problem.published_log_likelihood}"
    )
    draws, scores = {}, {}
    for noise, label in NAMES.items():
        drawn = draw_svi(train, noise, args.steps, args.draws)
        draws[label] = TO_LOGIT_SCALE[noise] * drawn
        scores[label] = held_out(drawn[:200], test, noise)
    draws["logit by NUTS"] = draw_nuts(train, "gumbel", args.draws)
    report_posteriors(problem, draws)
    report_scores(scores, test.person)
    draw_forest(problem, draws, name, Path(args.output) / f"{name}.png")
    return draws


def main(argv: list[str] | None = None) -> dict[str, dict[str, np.ndarray]]:
    """Study each data set that is there."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add_data_argument(parser, FILES)
    add("--output", default="choice_output", help="folder for pictures (%(default)s)")
    add("--quick", action="store_true", help="short fits, to see that it runs")
    args = parser.parse_args(argv)
    if args.data is None:
        parser.error(how_to_name_data(FILES))
    args.steps, args.draws = (100, 40) if args.quick else (2000, 1000)

    start = time.perf_counter()
    found = {}
    for name, build in (("swissmetro", swissmetro), ("modecanada", modecanada)):
        paths = sorted(args.data.glob(f"**/{name}.csv*"))
        if not paths:
            print(f"skipping {name}: found no {name}.csv or {name}.csv.gz in {args.data}")
            continue
        Path(args.output).mkdir(parents=True, exist_ok=True)
        found[name] = study(name, build(paths[0]), args)
    print(f"\n{time.perf_counter() - start:.0f} s in all; pictures are in {args.output}/")
    return found


if __name__ == "__main__":
    main()
