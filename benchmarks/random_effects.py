# SPDX-License-Identifier: Apache-2.0
"""Random effects that observations read by id, beside the exact posterior and beside NUTS.

``gaussian``: observations around the mean of their group, a million groups with five rows each on
average; with the mean of the groups learned and both standard deviations known, the posterior of
each group has a closed form. Here ``lc.SubsampledSVI`` with AutoNormal is compared with it: the
distance of the means in posterior standard deviations, and the ratio of standard deviations.

Two mixed logits: people choose several times, with tastes of their own, Normal(mean, sd), of which
mean and sd are learned. In ``made`` 361 people choose twelve times among four, and have six tastes;
in ``swissmetro``, with ``--data``, 200 choose nine times between train, Swissmetro and car, with
tastes for time and cost. NUTS (``nuts``; ``least_ess`` is its least effective sample size of a mean
or sd) is the reference for ``lc.SubsampledSVI`` with AutoNormal (``mean_field``) and with
AutoRowNormal, which gives each person's tastes a covariance, and the shared sites another
(``row_covariance``), where people follow mean and sd besides (``following``), and where each person
is drawn 16 times (``importance_weighted``). The figures are ratios of the learned sd to that of
NUTS, distances of the learned means in its standard deviations, and ratios of the posterior
standard deviations of both; of each person's own tastes the median of these ratios, and the root
mean square of the distances.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpy.typing import NDArray
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC, NUTS, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoNormal

import numpyro_largecat as lc
from benchmarks.data_folder import add_data_argument, how_to_name_data
from benchmarks.readers import ChoiceData, find_file, read_swissmetro
from benchmarks.records import Record, argument_parser, machine_record, print_table, write_json

NAME = "random_effects"
NOISE, SPREAD = 0.5, 0.7  # of observations, and of groups
HIGHER = "geometric_mean_sd_ratio", "least_ess"
TASTES = ("time", "cost")
METHODS = "mean_field", "row_covariance", "following", "importance_weighted"
MADE_MEANS = -1.0, 0.5, -0.5, 1.0, 2.0, -2.0
MADE_SDS = 0.3, 0.6, 1.0, 1.5, 2.0, 1.2


class Size(NamedTuple):
    """Sizes of both studies and lengths of the runs."""

    num_groups: int = 10**6
    rows_per_group: int = 5
    batch_size: int = 5000
    steps: int = 30_000
    num_people: int = 200
    made_people: int = 361
    people_batch: int = 42
    choice_steps: int = 20_000
    nuts_draws: int = 8000


QUICK = Size(200, 5, 100, 100, 6, 6, 3, 50, 20)


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
    """What P people chose, T times each, among A things of F features."""

    features: NDArray[np.float32]  # (P, T, A, F)
    available: NDArray[np.bool_]  # (P, T, A)
    choice: NDArray[np.int32]  # (P, T)
    tastes: tuple[str, ...]  # names of the F features

    @property
    def people(self) -> NDArray[np.int32]:
        """All of them."""
        return np.arange(len(self.choice), dtype=np.int32)


def first_people(data: ChoiceData, num_people: int) -> Choices:
    """The choices of some people, each of whom made as many."""
    person = np.unique(data.person, return_inverse=True)[1]
    order = np.argsort(person, kind="stable")
    kept = order[person[order] < num_people]
    columns = [data.feature_names.index(name) for name in TASTES]
    arrays = data.features[..., columns], data.available, data.choice
    features, available, choice = (a[kept].reshape(num_people, -1, *a.shape[1:]) for a in arrays)
    return Choices(features, available, choice, TASTES)


def made_choices(num_people: int) -> Choices:
    """Twelve of each person, among four things of six features."""
    rng = np.random.default_rng(0)
    names = tuple(f"{sd:g}" for sd in MADE_SDS)
    tastes = rng.normal(MADE_MEANS, MADE_SDS, (num_people, len(names)))
    features = rng.normal(size=(num_people, 12, 4, len(names))).astype(np.float32)
    utilities = (features * tastes[:, None, None]).sum(-1)
    choice = (utilities + rng.gumbel(size=utilities.shape)).argmax(-1).astype(np.int32)
    return Choices(features, np.ones(utilities.shape, bool), choice, names)


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
    num_people, num_times, num_things, num_tastes = data.features.shape
    mean = numpyro.sample("mean", dist.Normal(0, 5).expand([num_tastes]).to_event(1))
    offset = numpyro.sample("offset", dist.Normal(0, 5).expand([num_things - 1]).to_event(1))
    sd = numpyro.sample("sd", dist.HalfNormal(5).expand([num_tastes]).to_event(1))
    ids = None if counts is None else person
    with lc.entity_plate("people", num_people, ids, counts) as read:
        z = numpyro.sample("z", dist.Normal(0, 1).expand([num_tastes]).to_event(1))
    taste = read.rows_of(mean + sd * z, person)[:, None, None]
    utilities = jnp.insert(offset, 1, 0) + (features * taste).sum(-1)
    utilities = jnp.where(available, utilities, -jnp.inf)
    with lc.data_plate("data", num_people, rows, dim=-2), numpyro.plate("times", num_times):
        numpyro.sample("choice", lc.UtilityCategorical(utilities), obs=choice)


def nuts_draws_of(data: Choices, num_draws: int) -> dict[str, Any]:
    """Of all sites, those of people of shape (num_draws, P, F)."""
    kernel = NUTS(partial(mixed_logit, data, None))
    mcmc = MCMC(kernel, num_warmup=num_draws // 2, num_samples=num_draws, progress_bar=False)
    mcmc.run(jax.random.key(0), data.people, data.features, data.available, data.choice)
    return mcmc.get_samples()


def fitted_draws_of(data: Choices, size: Size, method: str) -> dict[str, Any]:
    """Of all sites, those of people of shape (1000, P, F)."""
    columns = (data.people, data.features, data.available, data.choice)
    model = partial(mixed_logit, data, lc.EntityCounts.of(len(data.people), data.people))
    followed = ("mean", "sd") if method == "following" else ()
    is_mean_field = method == "mean_field"
    guide = AutoNormal(model) if is_mean_field else lc.AutoRowNormal(model, follow=followed)
    is_weighted = method == "importance_weighted"
    loss = lc.ImportanceWeighted_ELBO("people") if is_weighted else TraceMeanField_ELBO()
    rate = optax.cosine_decay_schedule(0.02, size.choice_steps)
    svi = lc.SubsampledSVI(model, guide, optax.adam(rate), loss)
    batches = lc.ArrayBatches(*columns, batch_size=size.people_batch)
    key = jax.random.key(0)
    run = svi.run(key, size.choice_steps, batches=batches, progress_bar=False)
    if is_weighted:
        return lc.weighted_posterior(key, svi, run.state, *columns, num_samples=1000).values
    return guide.sample_posterior(key, run.params, sample_shape=(1000,))


def people_figures(found: dict[str, Any], exact: dict[str, Any]) -> dict[str, float]:
    """Each person's own tastes beside those of NUTS."""
    own, wanted = (
        draws["mean"][:, None] + draws["sd"][:, None] * draws["z"] for draws in (found, exact)
    )
    sd = wanted.std(0)
    return {
        "sd_ratio_of_people": float(jnp.median(own.std(0) / sd)),
        "mean_difference_of_people": float(
            jnp.sqrt((((own.mean(0) - wanted.mean(0)) / sd) ** 2).mean())
        ),
    }


def choice_figures(data: Choices, size: Size) -> dict[str, dict[str, float]]:
    """Each method of SVI beside NUTS, and how many draws that is worth."""
    exact = nuts_draws_of(data, size.nuts_draws)
    sizes = [effective_sample_size(np.asarray(exact[name])[None]) for name in ("mean", "sd")]
    figures = {"nuts": {"least_ess": float(np.min(sizes))}}
    for method in METHODS:
        start = time.perf_counter()
        found = fitted_draws_of(data, size, method)
        seconds = time.perf_counter() - start
        gaps = jnp.abs(found["mean"].mean(0) - exact["mean"].mean(0)) / exact["mean"].std(0)
        whats = {
            "sd_ratio": found["sd"].mean(0) / exact["sd"].mean(0),
            "sd_ratio_of_sd": found["sd"].std(0) / exact["sd"].std(0),
            "sd_ratio_of_mean": found["mean"].std(0) / exact["mean"].std(0),
            "mean_difference": gaps,
        }
        figures[method] = (
            {"seconds": seconds}
            | people_figures(found, exact)
            | {
                f"{what}_{name}": float(value)
                for what, values in whats.items()
                for name, value in zip(data.tastes, values, strict=True)
            }
        )
    return figures


def records_of(setting: dict[str, Any], method: str, figures: dict[str, float]) -> list[Record]:
    """Records of one method."""
    units = {
        "seconds": "s",
        "least_ess": "draws",
        "rms_mean_difference": "sd",
        "rms_log_sd_ratio": "nats",
    }
    return [
        Record(
            benchmark=NAME,
            setting=setting,
            method=method,
            metric=metric,
            value=value,
            unit=units.get(metric, "sd" if metric.startswith("mean_") else "ratio"),
            better="higher" if metric in HIGHER or metric.startswith("sd_ratio") else "lower",
        )
        for metric, value in figures.items()
    ]


def main() -> None:
    """Run all studies and print them."""
    parser = argument_parser(__doc__)
    add_data_argument(parser, "choice/swissmetro.csv.gz")
    args = parser.parse_args()
    size = QUICK if args.quick else Size()
    setting: dict[str, Any] = {"groups": size.num_groups, "B": size.batch_size}
    records = records_of({"study": "gaussian"} | setting, "subsampled", gaussian_figures(size))
    studies = {"made": made_choices(size.made_people)}
    if args.data is None:
        print(f"Without swissmetro: {how_to_name_data('choice/swissmetro.csv.gz')}.")
    else:
        path = find_file(args.data, "swissmetro.csv")
        studies["swissmetro"] = first_people(read_swissmetro(path), size.num_people)
    for study, choices in studies.items():
        setting = {"study": study, "people": len(choices.people), "B": size.people_batch}
        for method, figures in choice_figures(choices, size).items():
            records += records_of(setting, method, figures)
    rows = [
        [r["setting"]["study"], r["method"], r["metric"], f"{r['value']:.3g} {r['unit']}"]
        for r in records
    ]
    print_table(["study", "method", "metric", "value"], rows)
    write_json(args.json, [*records, machine_record(NAME, jax.devices()[0].device_kind)])


if __name__ == "__main__":
    main()
