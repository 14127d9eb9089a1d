# SPDX-License-Identifier: Apache-2.0
"""Scales of weights that are learned, where each step touches some of the classes.

A softmax regression whose weights have a scale tau that is learned is fitted by
``lc.SubsampledSVI`` with ``lc.AutoRowNormal`` in three forms: ``centred``; ``not centred``, by
``lc.not_centred``, with rows of the guide that start at a sd of 0.1 as usual; and ``at prior``,
where they start at their prior, at a sd of 1.

Priors are normal, Laplace, Student with 4 degrees of freedom, a horseshoe, and normal ones whose
mean is learned too, with a mean for each of 10 groups of classes, with a tau for each feature
(their mean is shown), and with an unknown correlation of features besides.

``scale_ratio`` is the posterior median of tau divided by that of a reference: NUTS for 300 classes;
for 5,000 the same guide, at its prior, with all classes in each step (``all classes``), which is
no truth either. ``scale`` is the median. Each form is fitted by few steps, in which rows of no data
hardly leave their start, and by many.
``heldout_log_likelihood`` is that of new observations, in nats for each, over 1,000 draws of the
posterior (with 30 it is .02 less where classes have two observations each, and differs by .01 from
key to key), over all of NUTS's, and for ``truth`` that of the weights that made the data. ``best
fixed``, of the normal prior, is the scale of a few that predicts these very observations best, and
is not learned.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpy.typing import NDArray
from numpyro.handlers import condition, seed, substitute
from numpyro.infer import MCMC, NUTS, TraceMeanField_ELBO

import numpyro_largecat as lc
from benchmarks.records import (
    Record,
    argument_parser,
    machine_record,
    print_table,
    record,
    write_json,
)

NAME = "scales"
NUM_DRAWS = 1000
NUM_GROUPS = 10
FIXED = (0.25, 0.5, 0.7, 1.0, 1.4, 2.0)  # times the scale in truth
Rows = tuple[Any, Any]  # what a class plate gives, and the weights of its rows


def _scale() -> Any:
    return numpyro.sample("tau", dist.HalfNormal(2.0))


def _rows_of(family: Callable[..., Any], num_features: int, plate: Any) -> Rows:
    tau = _scale()
    with plate as classes:
        return classes, numpyro.sample("w", family(0.0, tau).expand([num_features]).to_event(1))


def _rows_with_mean(num_features: int, plate: Any) -> Rows:
    tau, mean = (
        _scale(),
        numpyro.sample("mean", dist.Normal(0, 2).expand([num_features]).to_event(1)),
    )
    with plate as classes:
        return classes, numpyro.sample("w", dist.Normal(mean, tau).to_event(1))


def _rows_in_groups(num_features: int, plate: Any) -> Rows:
    """Class k is in group k modulo the number of groups, which have means of their own."""
    shape = [NUM_GROUPS, num_features]
    tau, means = _scale(), numpyro.sample("means", dist.Normal(0, 1).expand(shape).to_event(2))
    with plate as classes:
        of_class = means[classes.indices % NUM_GROUPS]
        return classes, numpyro.sample("w", dist.Normal(of_class, tau).to_event(1))


def _rows_by_feature(num_features: int, plate: Any) -> Rows:
    tau = numpyro.sample("tau", dist.HalfNormal(2.0).expand([num_features]).to_event(1))
    with plate as classes:
        return classes, numpyro.sample("w", dist.Normal(0.0, tau).to_event(1))


def _correlated_rows(num_features: int, plate: Any) -> Rows:
    tau = numpyro.sample("tau", dist.HalfNormal(2.0).expand([num_features]).to_event(1))
    lower = numpyro.sample("correlation", dist.LKJCholesky(num_features, 1.0))
    with plate as classes:
        fn = dist.MultivariateNormal(jnp.zeros(num_features), scale_tril=tau[:, None] * lower)
        return classes, numpyro.sample("w", fn)


def _horseshoe_rows(num_features: int, plate: Any) -> Rows:
    tau = _scale()
    with plate as classes:
        spread = numpyro.sample("spread", dist.HalfCauchy(1.0).expand([num_features]).to_event(1))
        return classes, numpyro.sample("w", dist.Normal(0.0, tau * spread).to_event(1))


# The scale in truth, and the statements.
PRIORS: dict[str, tuple[float, Callable[[int, Any], Rows]]] = {
    "normal": (1.0, partial(_rows_of, dist.Normal)),
    "Laplace": (1.0, partial(_rows_of, dist.Laplace)),
    "Student": (1.0, partial(_rows_of, partial(dist.StudentT, 4.0))),
    "horseshoe": (0.2, _horseshoe_rows),
    "mean too": (1.0, _rows_with_mean),
    "groups": (1.0, _rows_in_groups),
    "each feature": (1.0, _rows_by_feature),
    "correlated": (1.0, _correlated_rows),
}
FORMS = ("centred", "not centred", "at prior")


class Size(NamedTuple):
    """Sizes of the data and lengths of the runs."""

    num_categories: int
    num_rows: int
    num_sampled: int
    steps: tuple[int, ...]  # a fit of each length
    nuts_draws: int = 0  # and as many before; 0 for the reference with all classes
    all_classes_steps: int = 0  # each of which moves all rows
    num_features: int = 3
    batch_size: int = 200
    num_held_out: int = 2000
    feature_mean: float = 0.0  # makes some classes popular with all observations
    feature_sd: float = 1.0


SMALL = Size(300, 3000, 50, (1000, 30_000), nuts_draws=300)
BUSY = Size(100, 3000, 50, (1000, 10_000), nuts_draws=300)  # thirty observations of each class
# A class is drawn 60 times, and 2,000 times.
LARGE = Size(5000, 10_000, 100, (3000, 30_000, 100_000), all_classes_steps=20_000)
# 600 of the classes occur; the others are known by not being chosen.
POPULAR = Size(
    5000,
    4000,
    100,
    (1500, 8000),
    all_classes_steps=3000,
    num_features=10,
    feature_mean=1.0,
    feature_sd=0.5,
)
QUICK = (Size(20, 60, 5, (20,), 5, 0, 2, 20, 30),)


class Data(NamedTuple):
    """Observations to learn from, others to score, and the weights that made them."""

    x: NDArray[np.float32]  # (N, D)
    y: NDArray[np.int64]  # (N,)
    held_out_x: NDArray[np.float32]
    held_out_y: NDArray[np.int64]
    w: NDArray[np.float32]  # (K, D)


class Found(NamedTuple):
    """What a method finds."""

    method: str
    steps: int | None
    scale: float
    held_out: float  # log likelihood of one observation


def _true_scale(truth: float, site: dict[str, Any]) -> Any:
    return jnp.full(site["fn"].shape(), truth) if site["name"] == "tau" else None


def draw_data(size: Size, prior: str) -> Data:
    """Weights from the prior with its true scale, and choices by them."""
    rng = np.random.default_rng(0)
    truth, rows_of = PRIORS[prior]
    plate = lc.class_plate("classes", size.num_categories)
    statements = substitute(rows_of, substitute_fn=partial(_true_scale, truth))
    w = np.asarray(seed(statements, 0)(size.num_features, plate)[1])
    noise = rng.normal(size=(size.num_rows + size.num_held_out, size.num_features))
    x = (size.feature_mean + size.feature_sd * noise).astype(np.float32)
    y = (x @ w.T + rng.gumbel(size=(len(x), size.num_categories))).argmax(axis=1)
    n = size.num_rows
    return Data(x[:n], y[:n], x[n:], y[n:], w)


def make_model(size: Size, prior: str, num_sampled: int | None) -> Callable[..., None]:
    """Weights of the classes around 0 with a scale that is learned."""

    def model(x: Any, y: Any = None, rows: Any = None) -> None:
        labels = None if num_sampled is None else y
        plate = lc.class_plate("classes", size.num_categories, labels, num_sampled)
        classes, w = PRIORS[prior][1](size.num_features, plate)
        with lc.data_plate("data", size.num_rows, rows) as rows:
            lc.sample_choice("y", x @ w.T, classes=classes, rows=rows, obs=y)

    return model


def fit(
    size: Size,
    prior: str,
    data: Data,
    form: str,
    steps: int | None,
    scale: float | None = None,
) -> Found:
    """Fit one form on some of the classes in each step; on all of them if ``steps`` is None.

    With ``scale`` nothing is learned of it.
    """
    num_sampled = None if steps is None else size.num_sampled
    model = make_model(size, prior, num_sampled)
    if form != "centred":
        model = lc.not_centred(model)
    if scale is not None:
        model = condition(model, {"tau": jnp.asarray(scale)})
    guide = lc.AutoRowNormal(model)
    start = None
    if form == "at prior":
        shape = size.num_categories, size.num_features
        start = {"w_decentered_auto_scale": jnp.ones(shape)}
    num_steps = size.all_classes_steps if steps is None else steps
    rate = optax.adam(optax.cosine_decay_schedule(0.03, num_steps))
    svi = lc.SubsampledSVI(model, guide, rate, TraceMeanField_ELBO())
    batches = lc.ArrayBatches(data.x, data.y, batch_size=size.batch_size)
    options: dict[str, Any] = {"batches": batches, "init_params": start, "progress_bar": False}
    result = svi.run(jax.random.key(1), num_steps, **options)
    new = lc.Fitted.from_svi(svi, result).on(data.held_out_x)
    key = jax.random.key(2)
    log_probs = new.log_likelihood(data.held_out_y, rng_key=key, num_draws=NUM_DRAWS)
    method = "all classes" if steps is None else form
    if scale is None:
        scale = float(guide.median(result.params)["tau"].mean())
    return Found(method, steps, scale, _average(log_probs))


def fit_best_fixed(size: Size, prior: str, data: Data) -> Found:
    """The fixed scale that predicts the held-out observations best."""
    scales = [PRIORS[prior][0] * factor for factor in FIXED]
    found = [fit(size, prior, data, "not centred", size.steps[-1], scale) for scale in scales]
    return max(found, key=lambda one: one.held_out)._replace(method="best fixed")


def run_nuts(size: Size, prior: str, data: Data) -> Found:
    """The posterior that all others approximate."""
    model = lc.not_centred(make_model(size, prior, None))
    draws = size.nuts_draws
    mcmc = MCMC(NUTS(model), num_warmup=draws, num_samples=draws, progress_bar=False)
    mcmc.run(jax.random.key(0), data.x, data.y)
    found = mcmc.get_samples()
    log_probs = jax.lax.map(partial(_log_likelihood, data), found["w"])
    return Found("NUTS", None, float(jnp.median(found["tau"], axis=0).mean()), _average(log_probs))


def _log_likelihood(data: Data, w: Any) -> Any:
    log_p = jax.nn.log_softmax(data.held_out_x @ w.T, axis=-1)
    return log_p[jnp.arange(len(data.held_out_y)), data.held_out_y]


def _average(log_probs: Any) -> float:
    """Of predictive densities, which average over the draws on the first axis."""
    return float((jax.nn.logsumexp(log_probs, axis=0) - np.log(len(log_probs))).mean())


def compare(size: Size, prior: str) -> list[Found]:
    """All methods of one setting, the reference first."""
    data = draw_data(size, prior)
    if size.nuts_draws:
        found = [run_nuts(size, prior, data)]
    else:
        found = [fit(size, prior, data, "at prior", None)]
    forms = FORMS if prior == "normal" else FORMS[:2]
    found += [fit(size, prior, data, form, steps) for steps in size.steps for form in forms]
    if prior == "normal":
        found.append(fit_best_fixed(size, prior, data))
    return [
        *found,
        Found("truth", None, PRIORS[prior][0], _average(_log_likelihood(data, data.w)[None])),
    ]


def records_of(size: Size, prior: str, found: list[Found]) -> list[Record]:
    """Records of one setting."""
    setting: dict[str, Any] = {"prior": prior, "K": size.num_categories, "N": size.num_rows}
    setting["D"] = size.num_features
    setting |= {"num_sampled": size.num_sampled, "reference": found[0].method}
    return [
        record(NAME, setting | {"steps": one.steps}, one.method, metric, value, unit, "higher")
        for one in found
        for metric, value, unit in (
            ("scale_ratio", one.scale / found[0].scale, "ratio"),
            ("scale", one.scale, "1"),
            ("heldout_log_likelihood", one.held_out, "nats"),
        )
    ]


def main() -> None:
    """Run all settings and print them."""
    parser = argument_parser(__doc__)
    parser.add_argument("--prior", choices=PRIORS, action="append", help="of 300 classes")
    args = parser.parse_args()
    small, *large = QUICK if args.quick else (SMALL, BUSY, LARGE, POPULAR)
    priors = args.prior or (["normal"] if args.quick else list(PRIORS))
    records: list[Any] = [machine_record(NAME, jax.devices()[0].device_kind)]
    rows = []
    settings = [(small, prior) for prior in priors] + [(size, "normal") for size in large]
    for size, prior in settings:
        found = compare(size, prior)
        records += records_of(size, prior, found)
        write_json(args.json, records)
        for one in found:
            steps = "" if one.steps is None else str(one.steps)
            figures = (one.scale, one.scale / found[0].scale, one.held_out)
            cells = [one.method, steps, *(f"{figure:.3f}" for figure in figures)]
            name = f"K = {size.num_categories}, D = {size.num_features}, {prior}"
            rows.append([name, *cells])
    print_table(["setting", "method", "steps", "scale", "ratio", "held out"], rows)


if __name__ == "__main__":
    main()
