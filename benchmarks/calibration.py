# SPDX-License-Identifier: Apache-2.0
"""Simulation-based calibration of posteriors over the weights of a softmax with 30 classes.

Weights are drawn from the prior, labels from the model, and the model is fitted to them, for many
data sets at once. If the posterior were exact, the rank of a true weight among draws from its
posterior would be uniform. Printed are how often central intervals hold the true weight, the
standard deviation of the ranks over that of uniform ones (above 1: the posterior is too narrow),
and the same for differences of two classes' weights, which the data determine, whereas only the
prior holds the mean over classes. The guides are NumPyro's: mean field, low rank, full covariance;
and mean field with 10 of the classes drawn in each step. The full size takes about 5 minutes of
one core; with fewer ``--sets`` the errors grow.

Reference: Talts, Betancourt, Simpson, Vehtari and Gelman, Validating Bayesian Inference Algorithms
with Simulation-Based Calibration, 2018.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from jax import Array, lax
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import (
    AutoLowRankMultivariateNormal,
    AutoMultivariateNormal,
    AutoNormal,
)

import numpyro_largecat as lc
from benchmarks.records import (
    MachineRecord,
    Record,
    argument_parser,
    machine_record,
    print_table,
    write_json,
)

NAME = "calibration"
COVERAGE = (0.5, 0.9)
NUM_DRAWS = 99


class Sizes(NamedTuple):
    """Of the simulation."""

    num_sets: int = 100
    num_rows: int = 300
    num_categories: int = 30
    num_features: int = 2
    num_steps: int = 3000


QUICK = Sizes(num_sets=3, num_rows=30, num_categories=6, num_steps=10)
GUIDES: dict[str, tuple[Callable[..., Any], int | None]] = {
    "mean field": (AutoNormal, None),
    "mean field, 10 classes a step": (AutoNormal, 10),
    "rank 10": (partial(AutoLowRankMultivariateNormal, rank=10), None),
    "full covariance": (AutoMultivariateNormal, None),
}


def make_model(sizes: Sizes, num_sampled: int | None) -> Callable[..., None]:
    """Softmax regression with a standard normal prior."""

    def model(x: Array, y: Array) -> None:
        labels = None if num_sampled is None else y
        with lc.class_plate("classes", sizes.num_categories, labels, num_sampled) as classes:
            prior = dist.Normal(0, 1).expand([sizes.num_features]).to_event(1)
            w = numpyro.sample("w", prior)
        with lc.data_plate("data", sizes.num_rows) as rows:
            lc.sample_choice("y", x @ w.T, classes=classes, rows=rows, obs=y)

    return model


def simulate(rng_key: Array, sizes: Sizes) -> tuple[Array, Array, Array]:
    """Weights, features and labels of one data set."""
    keys = jax.random.split(rng_key, 3)
    w = jax.random.normal(keys[0], (sizes.num_categories, sizes.num_features))
    x = jax.random.normal(keys[1], (sizes.num_rows, sizes.num_features))
    return w, x, jax.random.categorical(keys[2], x @ w.T)


def fit_and_draw(
    make_guide: Callable[..., Any], num_sampled: int | None, sizes: Sizes, rng_key: Array
) -> tuple[Array, Array]:
    """True weights and posterior draws of one data set."""
    w, x, y = simulate(rng_key, sizes)
    num_sampled = None if num_sampled is None else min(num_sampled, sizes.num_categories - 1)
    model = make_model(sizes, num_sampled)
    guide = make_guide(model, init_scale=0.1)
    optimiser = optax.adam(optax.cosine_decay_schedule(0.02, sizes.num_steps))
    engine = SVI if num_sampled is None else lc.SubsampledSVI
    svi = engine(model, guide, optimiser, Trace_ELBO(num_particles=4))
    state = svi.init(jax.random.fold_in(rng_key, 1), x, y)
    state, _ = lax.scan(lambda s, _: svi.update(s, x, y), state, length=sizes.num_steps)
    params = svi.get_params(state)
    key = jax.random.fold_in(rng_key, 2)
    if num_sampled is not None:  # all classes, where the guide's plate would subsample
        loc, scale = params["w_auto_loc"], params["w_auto_scale"]
        return w, loc + scale * jax.random.normal(key, (NUM_DRAWS, *loc.shape))
    return w, guide.sample_posterior(key, params, x, y, sample_shape=(NUM_DRAWS,))["w"]


def measures(true: Array, draws: Array) -> dict[str, tuple[float, float]]:
    """Coverage and spread of the ranks of ``true`` (S, K, D) among ``draws`` (S, T, K, D).

    Each with its standard error, from the spread over data sets, whose ranks are not independent.
    """
    found = {}
    forms = {"weights": lambda w: w, "contrasts": lambda w: w[..., 1:, :] - w[..., :-1, :]}
    for name, form in forms.items():
        ranks = (np.asarray(form(draws)) < np.asarray(form(true))[:, None]).sum(axis=1)
        uniform = (ranks + 0.5) / (NUM_DRAWS + 1)
        for level in COVERAGE:
            inside = np.abs(uniform - 0.5) < level / 2
            found[f"{name}, coverage of {level:.0%}"] = _mean_and_error(inside)
        square, error = _mean_and_error(12 * (uniform - 0.5) ** 2)
        found[f"{name}, spread of ranks"] = square**0.5, error / (2 * square**0.5)
    return found


def _mean_and_error(values: np.ndarray) -> tuple[float, float]:
    by_set = values.reshape(len(values), -1).mean(axis=1)
    return float(by_set.mean()), float(by_set.std(ddof=1) / len(by_set) ** 0.5)


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--sets", type=int, help="data sets to simulate")
    args = parser.parse_args()
    sizes = QUICK if args.quick else Sizes()
    if args.sets is not None:
        sizes = sizes._replace(num_sets=args.sets)
    keys = jax.random.split(jax.random.key(0), sizes.num_sets)
    records: list[Record | MachineRecord] = [machine_record(NAME, jax.devices()[0].device_kind)]
    rows = []
    guides = dict(list(GUIDES.items())[:1]) if args.quick else GUIDES  # most of it is compilation
    for method, (make_guide, num_sampled) in guides.items():
        run = jax.jit(jax.vmap(partial(fit_and_draw, make_guide, num_sampled, sizes)))
        found = measures(*run(keys))
        rows.append([method, *(f"{value:.3f} ± {error:.3f}" for value, error in found.values())])
        for metric, (value, _) in found.items():
            records.append(
                Record(
                    benchmark=NAME,
                    setting=sizes._asdict(),
                    method=method,
                    metric=metric,
                    value=value,
                    unit="fraction" if "coverage" in metric else "ratio",
                    better="higher" if "coverage" in metric else "lower",
                )
            )
        write_json(args.json, records)
    print_table(["guide", *found], rows)


if __name__ == "__main__":
    main()
