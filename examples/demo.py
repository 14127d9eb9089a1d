# SPDX-License-Identifier: Apache-2.0
"""Predict the next name in Python code: a Bayesian softmax regression over about 15,000 classes.

Each class has a weight for each of the features of the names before it, and an intercept; the
posterior over all of them (about two million numbers) is fitted by SVI whose cost per step does not
depend on the number of classes. Run it with ``make demo``, or

    python examples/demo.py --dataset bibtex --data FOLDER

where DIR holds the files of one of the data sets that do not come with Python: bibtex, delicious,
mnist or ptb.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoNormal

import numpyro_largecat as lc

sys.path.insert(0, str(Path(__file__).parents[1]))  # for `benchmarks`, beside this folder
matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmarks.data_folder import add_data_argument, how_to_name_data
from benchmarks.readers import ClassificationData, load


class Predicted(NamedTuple):
    """Predictions of the held-out rows."""

    top: lc.TopClasses
    log_prob: np.ndarray  # of the observed classes


class HeldOut(NamedTuple):
    """Predictions at the centre of the posterior, and averaged over it."""

    centre: Predicted
    average: Predicted


def make_model(data: ClassificationData, num_sampled: int | None, prior_scale: float):
    """Softmax regression; ``num_sampled=None`` makes the likelihood exact."""
    num_rows, num_features = data.x_train.shape
    counts = np.bincount(data.y_train, minlength=data.num_categories)
    log_frequency = jnp.asarray(np.log((counts + 1) / (counts + 1).sum()), jnp.float32)
    proposal = lc.FrequencyProposal(counts + 1)  # frequent classes compete with every name

    def model(x, y=None, rows=None):
        plate = lc.class_plate("classes", data.num_categories, y, num_sampled, proposal=proposal)
        with plate as classes:
            prior = dist.Normal(0, prior_scale).expand([num_features]).to_event(1)
            weight = numpyro.sample("weight", prior)
            intercept = numpyro.sample("intercept", dist.Normal(0, 1))
        utilities = x @ weight.T + intercept + log_frequency[classes.indices]
        with lc.data_plate("data", num_rows, rows) as rows:
            lc.sample_choice("y", utilities, classes=classes, rows=rows, obs=y)

    return model


def fit(model, data: ClassificationData, args: argparse.Namespace):
    """Fit the posterior of all weights."""
    guide = AutoNormal(model, init_loc_fn=numpyro.infer.init_to_feasible, init_scale=0.05)
    optimiser = optax.adagrad(args.learning_rate)
    svi = lc.SubsampledSVI(model, guide, optimiser, TraceMeanField_ELBO())
    batches = lc.ArrayBatches(data.x_train, data.y_train, batch_size=args.batch_size)
    result = svi.run(jax.random.key(args.seed), args.steps, batches=batches)
    return lc.Fitted.from_svi(svi, result)


def evaluate(fitted: lc.Fitted, data: ClassificationData, num_rows: int = 500):
    """Predict all held-out rows, over all classes."""
    num_top = min(10, data.num_categories)
    draws = {"rng_key": jax.random.key(1), "num_draws": 4}  # of utilities

    @jax.jit
    def predict(params, x, y):
        new = lc.Fitted(fitted.model, fitted.guide, params).on(x)
        return HeldOut(
            Predicted(new.top_classes(num_top), new.log_likelihood(y)),
            Predicted(new.top_classes(num_top, **draws), new.log_predictive(y, **draws)),
        )

    parts = []
    for start in range(0, len(data.y_test), num_rows):
        rows = np.minimum(np.arange(start, start + num_rows), len(data.y_test) - 1)
        new = predict(fitted.params, data.x_test[rows], data.y_test[rows])
        parts.append(jax.device_get(new))
    return jax.tree.map(lambda *leaves: np.concatenate(leaves)[: len(data.y_test)], *parts)


def report(data: ClassificationData, prediction: HeldOut) -> None:
    """Print held-out scores beside those of class frequencies alone."""
    counts = np.bincount(data.y_train, minlength=data.num_categories) + 1
    log_frequency = np.log(counts / counts.sum())
    centre, average = prediction
    num_top = centre.top.classes.shape[1]
    by_count = np.argsort(-counts)[:num_top]
    y = data.y_test[:, None]
    print(f"\nheld-out, {len(y)} observations    log likelihood   top 1   top {num_top}")
    for name, log_prob, top in (
        ("class frequencies", log_frequency[data.y_test], np.broadcast_to(by_count, (1, num_top))),
        ("centre of the posterior", centre.log_prob, centre.top.classes),
        ("mean over the posterior", average.log_prob, average.top.classes),
    ):
        first, any_of_top = (top[:, :1] == y).mean(), (top == y).any(axis=1).mean()
        print(f"  {name:28s}    {log_prob.mean():10.4f}     {first:5.1%}   {any_of_top:5.1%}")


def save(fitted: lc.Fitted, data: ClassificationData, prediction: HeldOut, args) -> None:
    """Write the posterior of the classes with the largest weights, and three pictures."""
    folder = Path(args.output)
    folder.mkdir(parents=True, exist_ok=True)
    location = np.asarray(fitted.params["weight_auto_loc"])
    largest = np.argsort(-np.abs(location), axis=None)[:16]
    classes, features = np.unravel_index(largest, location.shape)
    shown = np.unique(classes)
    posterior = fitted.on(data.x_train[:2], data.y_train[:2], jnp.arange(2)).to_arviz(
        rng_key=jax.random.key(args.seed + 1),
        rows={"classes": shown},
        coords={
            "classes": [data.class_names[k] for k in shown],
            "feature": list(data.feature_names),
        },
        dims={"weight": ["feature"]},
    )
    lc.save_netcdf(posterior, folder / "posterior.nc")

    axes = lc.plots.elbo(fitted.losses / len(data.y_train))
    axes.set_ylabel("ELBO per training observation (nats)")
    axes.figure.savefig(folder / "elbo.png", dpi=150)

    draws = np.asarray(posterior["posterior"]["weight"])[0]
    places = np.searchsorted(shown, classes)
    labels = [
        f"{data.class_names[k]} | {data.feature_names[d]}"
        for k, d in zip(classes, features, strict=True)
    ]
    axes = lc.plots.intervals(draws[:, places, features], labels)
    axes.set_title("the largest weights: class | feature")
    axes.figure.savefig(folder / "weights.png", dpi=150)

    axes = None
    for name, predicted in zip(("centre", "mean over the posterior"), prediction, strict=True):
        best, log_probs = predicted.top.classes[:, 0], predicted.top.log_probs[:, 0]
        axes = lc.plots.reliability(np.exp(log_probs), best == data.y_test, ax=axes, label=name)
    axes.set_title("calibration of the most probable class")
    axes.figure.savefig(folder / "calibration.png", dpi=150)

    counts = np.bincount(data.y_train, minlength=data.num_categories)
    axes = lc.plots.accuracy_by_frequency(best, data.y_test, counts)
    axes.set_title("accuracy by how frequent a class is")
    axes.figure.savefig(folder / "accuracy.png", dpi=150)

    axes = lc.plots.confusion(best, data.y_test, data.class_names)
    axes.set_title("the classes in most errors")
    axes.figure.savefig(folder / "confusion.png", dpi=150)
    plt.close("all")
    pictures = ", ".join(sorted(path.name for path in folder.glob("*.png")))
    print(f"\nwritten to {folder}/: posterior.nc (ArviZ), {pictures}")


def main(argv: list[str] | None = None) -> HeldOut:
    """Load, fit, score and save."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--dataset", default="names", choices=["names", "bibtex", "delicious", "mnist", "ptb"])
    add_data_argument(parser, "the files of the data set; names needs none")
    add("--steps", type=int, default=25_000, help="steps of SVI (%(default)s)")
    add("--batch-size", type=int, default=200, help="rows in a minibatch (%(default)s)")
    add(
        "--num-sampled", type=int, default=200, help="classes drawn beside the labels (%(default)s)"
    )
    add("--exact", action="store_true", help="use all classes in each step")
    add("--learning-rate", type=float, default=0.05, help="of Adagrad (%(default)s)")
    add("--prior-scale", type=float, default=0.1, help="sd of the weights (%(default)s)")
    add("--seed", type=int, default=0)
    add("--output", default="demo_output", help="folder for results (%(default)s)")
    args = parser.parse_args(argv)
    if args.data is None and args.dataset != "names":
        parser.error(how_to_name_data(f"the files of {args.dataset}"))

    start = time.perf_counter()
    data = load(args.dataset, None if args.dataset == "names" else args.data)
    num_rows, num_features = data.x_train.shape
    print(
        f"{args.dataset}: {num_rows} observations, {num_features} features, "
        f"{data.num_categories} classes ({time.perf_counter() - start:.0f} s)"
    )
    num_sampled = None if args.exact else min(args.num_sampled, data.num_categories - 1)
    model = make_model(data, num_sampled, args.prior_scale)
    fitted = fit(model, data, args)
    prediction = evaluate(fitted, data)
    report(data, prediction)
    save(fitted, data, prediction, args)
    print(f"{time.perf_counter() - start:.0f} s in all")
    return prediction


if __name__ == "__main__":
    main()
