# SPDX-License-Identifier: Apache-2.0
"""Simulation-based calibration of posteriors over the weights of a softmax with 50 classes.

Weights are drawn from the prior, labels from the model, and the model is fitted to them, for one
data set after another by ``lc.simulation_based_calibration``. ``coverage_50`` and ``coverage_90``
are how often central intervals hold the true value: of single weights (``weight``), and of the
differences of two classes' weights (``contrast``), which are all that the choices depend on.
``rank_spread`` is the standard deviation of the ranks over that of uniform ones, above 1 for
posteriors that are too narrow.

Steps take minibatches, and 10 of the classes besides their labels unless it says ``all classes``.
Full covariance is NumPyro's ``AutoMultivariateNormal``, of all weights. ``with the common shift``
adds to the draws of the row covariance what is unknown of all classes' weights together. Choices do
not depend on such a shift c. Given covariances S_k of the rows and a standard normal prior, the
ELBO of a guide w_k = row_k + c has the terms log det(I + C P) / 2 - K tr(C) / 2 in the covariance
C of c, with P the sum of the inverses of the S_k; they are largest at C = I / K - P^-1.

Each method takes 2 to 4 minutes of two cores; with fewer ``--sets`` the errors grow.

Reference: Talts, Betancourt, Simpson, Vehtari and Gelman, Validating Bayesian Inference Algorithms
with Simulation-Based Calibration, 2018.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
import optax
from jax import Array
from numpyro.infer import Trace_ELBO, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoMultivariateNormal, AutoNormal

import numpyro_largecat as lc
from benchmarks.records import Record, argument_parser, machine_record, print_table, write_json

NAME = "calibration"
NUM_DRAWS = 99


class Sizes(NamedTuple):
    """Of the simulation."""

    num_sets: int = 40
    num_rows: int = 1500
    num_categories: int = 50
    num_features: int = 3
    num_sampled: int = 10
    batch_size: int = 200
    num_steps: int = 10_000


class Method(NamedTuple):
    """How the weights are fitted."""

    make_guide: Callable[..., Any]
    has_all_classes: bool = False
    has_shift: bool = False


QUICK = Sizes(num_sets=3, num_rows=30, num_categories=6, num_sampled=2, batch_size=10, num_steps=10)
METHODS = {
    "mean field, all classes": Method(AutoNormal, has_all_classes=True),
    "mean field": Method(AutoNormal),
    "row covariance, all classes": Method(lc.AutoRowNormal, has_all_classes=True),
    "row covariance": Method(lc.AutoRowNormal),
    "row covariance, with the common shift": Method(lc.AutoRowNormal, has_shift=True),
    "full covariance": Method(AutoMultivariateNormal, has_all_classes=True),
}


def softmax_regression(
    sizes: Sizes, num_sampled: int | None, x: Array, y: Any = None, rows: Any = None
) -> None:
    """Softmax regression with a standard normal prior; all classes if ``num_sampled`` is None."""
    labels = None if num_sampled is None else y
    with lc.class_plate("classes", sizes.num_categories, labels, num_sampled) as classes:
        prior = dist.Normal(0, 1).expand([sizes.num_features]).to_event(1)
        w = numpyro.sample("w", prior)
    with lc.data_plate("data", sizes.num_rows, rows) as rows:
        lc.sample_choice("y", x @ w.T, classes=classes, rows=rows, obs=y)


def calibrate(method: Method, sizes: Sizes, progress_bar: bool = True) -> lc.Calibration:
    """Ranks of weights and of differences of two classes' weights."""
    x = jax.random.normal(jax.random.key(1), (sizes.num_rows, sizes.num_features))
    whole = partial(softmax_regression, sizes, None)
    model = partial(softmax_regression, sizes, sizes.num_sampled)
    if method.has_all_classes:
        model = whole
    guide, whole_guide = method.make_guide(model), method.make_guide(whole)
    numpyro.handlers.seed(whole_guide, 0)(x, jnp.zeros(sizes.num_rows, int))
    loss = Trace_ELBO() if method.make_guide is AutoMultivariateNormal else TraceMeanField_ELBO()
    rate = optax.cosine_decay_schedule(0.03, sizes.num_steps)
    svi = lc.SubsampledSVI(model, guide, optax.adam(rate), loss)

    def fit(rng_key: Array, made: dict[str, Any]) -> dict[str, Any]:
        keys = jax.random.split(rng_key, 3)
        batches = lc.ArrayBatches(x, made["y"], batch_size=sizes.batch_size)
        result = svi.run(keys[0], sizes.num_steps, batches=batches, progress_bar=False)
        drawn = whole_guide.sample_posterior(keys[1], result.params, sample_shape=(NUM_DRAWS,))
        if not method.has_shift:
            return {"w": drawn["w"]}
        precisions = jnp.linalg.inv(guide.covariances(result.params)["classes"])
        size = sizes.num_features
        shift = jnp.eye(size) / sizes.num_categories - jnp.linalg.inv(precisions.sum(0))
        zeros = jnp.zeros(size)
        shifts = jax.random.multivariate_normal(keys[2], zeros, shift, (NUM_DRAWS, 1))
        return {"w": drawn["w"] + shifts}

    return lc.simulation_based_calibration(
        whole,
        fit,
        x,
        rng_key=jax.random.key(0),
        num_sets=sizes.num_sets,
        quantities=lambda v, _: {"weight": v["w"], "contrast": v["w"][1:] - v["w"][:-1]},
        progress_bar=progress_bar,
    )


def records_of(sizes: Sizes, name: str, found: lc.Calibration) -> list[Record]:
    """Records of one method."""
    figures = {f"coverage_{100 * level:.0f}": found.coverage(level) for level in (0.5, 0.9)}
    figures["rank_spread"] = found.spread()
    return [
        Record(
            benchmark=NAME,
            setting=sizes._asdict() | {"quantity": quantity},
            method=name,
            metric=metric,
            value=value,
            unit="ratio" if metric == "rank_spread" else "fraction",
            better="lower" if metric == "rank_spread" else "higher",
        )
        for metric, by_quantity in figures.items()
        for quantity, (value, _) in by_quantity.items()
    ]


def main() -> None:
    """Calibrate all methods and print them."""
    parser = argument_parser(__doc__)
    parser.add_argument("--sets", type=int, help="data sets to simulate")
    args = parser.parse_args()
    sizes = QUICK if args.quick else Sizes()
    if args.sets is not None:
        sizes = sizes._replace(num_sets=args.sets)
    records: list[Any] = [machine_record(NAME, jax.devices()[0].device_kind)]
    rows = []
    # Most of a quick run is compilation.
    names = ["row covariance, with the common shift"] if args.quick else list(METHODS)
    for name in names:
        found = calibrate(METHODS[name], sizes, progress_bar=not args.quick)
        records += records_of(sizes, name, found)
        write_json(args.json, records)
        columns = [found.coverage(0.5), found.coverage(0.9), found.spread()]
        for quantity in found.ranks:
            cells = (column[quantity] for column in columns)
            rows.append([name, quantity, *(f"{value:.3f} ± {error:.3f}" for value, error in cells)])
    print_table(["guide", "quantity", "50%", "90%", "spread of ranks"], rows)


if __name__ == "__main__":
    main()
