# SPDX-License-Identifier: Apache-2.0
"""Random effects that observations read by id, beside the exact posterior and beside NUTS.

``gaussian``: observations around the mean of their group, a million groups with five rows each on
average; with the mean of the groups learned and both standard deviations known, the posterior of
each group has a closed form. Here ``lc.SubsampledSVI`` with AutoNormal is compared with it: the
distance of the means in posterior standard deviations, and the ratio of standard deviations.

``swissmetro``, with ``--data``: a mixed logit. Each of 200 people chooses nine times between train,
Swissmetro and car, with tastes for time and cost of their own, Normal(mean, sd); mean and sd are
learned. NUTS (``nuts``) is the reference for ``lc.SubsampledSVI`` with AutoNormal (``mean_field``)
and with AutoRowNormal, which gives each person's two tastes a covariance, and the shared sites
another (``row_covariance``), and where people follow mean and sd besides (``following``). The
figures are ratios of the learned sd to that of NUTS, and distances of
the learned means in its standard deviations.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpy.typing import NDArray
from numpyro.infer import MCMC, NUTS, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoNormal

import numpyro_largecat as lc
from benchmarks.readers import ChoiceData, find_file, read_swissmetro
from benchmarks.records import Record, argument_parser, machine_record, print_table, write_json

NAME = "random_effects"
NOISE, SPREAD = 0.5, 0.7  # of observations, and of groups
TASTES = ("time", "cost")


class Size(NamedTuple):
    """Sizes of both studies and lengths of the runs."""

    num_groups: int = 10**6
    rows_per_group: int = 5
    batch_size: int = 5000
    steps: int = 30_000
    num_people: int = 200
    choice_batch: int = 500
    choice_steps: int = 20_000
    nuts_draws: int = 1000


QUICK = Size(200, 5, 100, 100, 6, 20, 50, 20)


class Groups(NamedTuple):
    """Observations, and the group of each."""

    of_row: NDArray[np.int32]  # (N,)
    x: NDArray[np.float32]  # (N,)
    counts: lc.EntityCounts


def draw_groups(size: Size) -> Groups:
    """Groups around 1, of which some have no observation."""
    rng = np.random.default_rng(0)
    num_rows = size.num_groups * size.rows_per_group
    groups = rng.integers(0, size.num_groups, num_rows).astype(np.int32)
    effects = rng.normal(1.0, SPREAD, size.num_groups)
    x = (effects[groups] + rng.normal(0, NOISE, num_rows)).astype(np.float32)
    return Groups(groups, x, lc.EntityCounts.of(size.num_groups, groups))


def gaussian_model(data: Groups, groups: Any, x: Any = None, rows: Any = None) -> None:
    """Observations around the mean of their group, and groups around a mean that is learned."""
    mean = numpyro.sample("mean", dist.Normal(0, 5))
    with lc.entity_plate("groups", len(data.counts.counts), groups, data.counts) as read:
        effect = numpyro.sample("effect", dist.Normal(mean, SPREAD))
    with lc.data_plate("data", len(data.x), rows):
        numpyro.sample("x", dist.Normal(read.rows_of(effect, groups), NOISE), obs=x)


def gaussian_figures(size: Size) -> dict[str, float]:
    """Fit, and compare with the closed form given the mean of the groups."""
    data = draw_groups(size)
    model = partial(gaussian_model, data)
    rate = optax.adam(optax.cosine_decay_schedule(0.1, size.steps))
    svi = lc.SubsampledSVI(model, AutoNormal(model), rate, TraceMeanField_ELBO())
    batches = lc.ArrayBatches(data.of_row, data.x, batch_size=size.batch_size)
    start = time.perf_counter()
    key = jax.random.key(0)
    params = svi.run(key, size.steps, batches=batches, progress_bar=False).params
    seconds = time.perf_counter() - start
    number = np.bincount(data.of_row, minlength=size.num_groups)
    sums = np.bincount(data.of_row, data.x, size.num_groups)
    precision = 1 / SPREAD**2 + number / NOISE**2
    mean = (float(params["mean_auto_loc"]) / SPREAD**2 + sums / NOISE**2) / precision
    seen = number > 0  # the others keep their start
    gaps = ((np.asarray(params["effect_auto_loc"]) - mean) * precision**0.5)[seen]
    ratios = (np.asarray(params["effect_auto_scale"]) * precision**0.5)[seen]
    return {
        "rms_mean_difference": float(np.sqrt((gaps**2).mean())),
        "geometric_mean_sd_ratio": float(np.exp(np.log(ratios).mean())),
        "rms_log_sd_ratio": float(np.sqrt((np.log(ratios) ** 2).mean())),
        "seconds": seconds,
    }


class Choices(NamedTuple):
    """What people chose among three ways to travel."""

    person: NDArray[np.int32]  # (N,)
    features: NDArray[np.float32]  # (N, 3, 2), time and cost
    available: NDArray[np.bool_]  # (N, 3)
    choice: NDArray[np.int32]  # (N,)
    num_people: int


def first_people(data: ChoiceData, num_people: int) -> Choices:
    """The choices of some people, who are counted from 0."""
    person = np.unique(data.person, return_inverse=True)[1].astype(np.int32)
    kept = person < num_people
    columns = [data.feature_names.index(name) for name in TASTES]
    features = data.features[kept][:, :, columns]
    return Choices(person[kept], features, data.available[kept], data.choice[kept], num_people)


def made_up_choices(num_people: int) -> Choices:
    """For a test of the benchmark."""
    rng = np.random.default_rng(0)
    person = np.repeat(np.arange(num_people, dtype=np.int32), 9)
    features = rng.random((len(person), 3, 2)).astype(np.float32)
    choice = rng.integers(0, 3, len(person)).astype(np.int32)
    return Choices(person, features, np.ones((len(person), 3), bool), choice, num_people)


def mixed_logit(
    data: Choices,
    counts: lc.EntityCounts | None,
    person: Any,
    features: Any,
    available: Any,
    choice: Any = None,
    rows: Any = None,
) -> None:
    """Tastes of each person, around a mean with a spread; all people if ``counts`` is None."""
    mean = numpyro.sample("mean", dist.Normal(0, 5).expand([2]).to_event(1))
    offset = numpyro.sample("offset", dist.Normal(0, 5).expand([2]).to_event(1))
    sd = numpyro.sample("sd", dist.HalfNormal(5).expand([2]).to_event(1))
    ids = None if counts is None else person
    with lc.entity_plate("people", data.num_people, ids, counts) as read:
        z = numpyro.sample("z", dist.Normal(0, 1).expand([2]).to_event(1))
    taste = read.rows_of(mean + sd * z, person)
    offsets = jnp.stack([offset[0], jnp.zeros(()), offset[1]])
    utilities = offsets + (features * taste[:, None]).sum(-1)
    with lc.data_plate("data", len(data.choice), rows):
        utilities = jnp.where(available, utilities, -jnp.inf)
        numpyro.sample("choice", lc.UtilityCategorical(utilities), obs=choice)


def fit_choices(data: Choices, size: Size, method: str) -> tuple[Any, Any, Any]:
    """Posterior means of mean and sd, and the posterior sd of the mean; each shape (2,)."""
    columns = (data.person, data.features, data.available, data.choice)
    if method == "nuts":
        kernel = NUTS(partial(mixed_logit, data, None))
        draws = size.nuts_draws
        mcmc = MCMC(kernel, num_warmup=draws, num_samples=draws, progress_bar=False)
        mcmc.run(jax.random.key(0), *columns)
        found = mcmc.get_samples()
    else:
        counts = lc.EntityCounts.of(data.num_people, data.person)
        model = partial(mixed_logit, data, counts)
        followed = ("mean", "sd") if method == "following" else ()
        is_mean_field = method == "mean_field"
        guide = AutoNormal(model) if is_mean_field else lc.AutoRowNormal(model, follow=followed)
        rate = optax.cosine_decay_schedule(0.02, size.choice_steps)
        svi = lc.SubsampledSVI(model, guide, optax.adam(rate), TraceMeanField_ELBO())
        batches = lc.ArrayBatches(*columns, batch_size=size.choice_batch)
        key = jax.random.key(0)
        run = svi.run(key, size.choice_steps, batches=batches, progress_bar=False)
        found = guide.sample_posterior(key, run.params, sample_shape=(1000,))
    return found["mean"].mean(0), found["sd"].mean(0), found["mean"].std(0)


def swissmetro_figures(data: Choices, size: Size) -> dict[str, dict[str, float]]:
    """Each method of SVI beside NUTS."""
    means, sds, errors = fit_choices(data, size, "nuts")
    figures = {}
    for method in ("mean_field", "row_covariance", "following"):
        own_means, own_sds, _ = fit_choices(data, size, method)
        figures[method] = {
            f"{what}_{name}": float(value)
            for what, values in (
                ("sd_ratio", own_sds / sds),
                ("mean_difference", jnp.abs(own_means - means) / errors),
            )
            for name, value in zip(TASTES, values, strict=True)
        }
    return figures


def records_of(setting: dict[str, Any], method: str, figures: dict[str, float]) -> list[Record]:
    """Records of one method."""
    units = {"seconds": "s", "rms_mean_difference": "sd", "rms_log_sd_ratio": "nats"}
    return [
        Record(
            benchmark=NAME,
            setting=setting,
            method=method,
            metric=metric,
            value=value,
            unit=units.get(metric, "sd" if metric.startswith("mean_") else "ratio"),
            better="higher" if "sd_ratio" in metric and "log" not in metric else "lower",
        )
        for metric, value in figures.items()
    ]


def main() -> None:
    """Run both studies and print them."""
    parser = argument_parser(__doc__)
    parser.add_argument("--data", type=Path, metavar="DIR", help="folder of choice/")
    args = parser.parse_args()
    size = QUICK if args.quick else Size()
    setting: dict[str, Any] = {"groups": size.num_groups, "B": size.batch_size}
    records = records_of({"study": "gaussian"} | setting, "subsampled", gaussian_figures(size))
    choices = made_up_choices(size.num_people) if args.quick else None
    if args.data is not None:
        path = find_file(args.data, "swissmetro.csv")
        choices = first_people(read_swissmetro(path), size.num_people)
    if choices is None:
        print("Without swissmetro: give the folder of its file, `--data DIR`.")
    else:
        setting = {"study": "swissmetro", "people": choices.num_people, "B": size.choice_batch}
        for method, figures in swissmetro_figures(choices, size).items():
            records += records_of(setting, method, figures)
    rows = [
        [r["setting"]["study"], r["method"], r["metric"], f"{r['value']:.3g} {r['unit']}"]
        for r in records
    ]
    print_table(["study", "method", "metric", "value"], rows)
    write_json(args.json, [*records, machine_record(NAME, jax.devices()[0].device_kind)])


if __name__ == "__main__":
    main()
