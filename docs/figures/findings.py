# SPDX-License-Identifier: Apache-2.0
"""Draw the picture of docs/diagnosis.md: ``python docs/figures/findings.py``.

It makes two fits, in a minute of two cores.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from matplotlib.patches import Ellipse
from numpyro.infer import TraceMeanField_ELBO

import numpyro_largecat as lc

K, N, D, STEPS = 5000, 4000, 10, 3000  # 600 of the classes occur
RNG = np.random.default_rng(0)
X = RNG.normal(1.0, 0.5, size=(N, D)).astype(np.float32)
Y = (X @ RNG.normal(size=(D, K)) + RNG.gumbel(size=(N, K))).argmax(axis=1)


def model(x: Any, y: Any = None, rows: Any = None) -> None:
    """Softmax regression with a scale that is learned, 1 in truth."""
    tau = numpyro.sample("tau", dist.HalfNormal(2.0))
    with lc.class_plate("classes", K, y, num_sampled=100) as classes:
        w = numpyro.sample("w", dist.Normal(0, tau).expand([D]).to_event(1))
    with lc.data_plate("data", N, rows) as rows:
        lc.sample_choice("y", x @ w.T, classes=classes, rows=rows, obs=y)


def fit(form: Any) -> tuple[Any, list[float]]:
    """Fit a form of the model, and note the scale on the way."""
    guide = lc.AutoRowNormal(form)
    svi = lc.SubsampledSVI(
        form,
        guide,
        optax.adam(optax.cosine_decay_schedule(0.03, STEPS)),
        TraceMeanField_ELBO(),
    )
    noted: list[float] = []

    def note(progress: lc.Progress) -> None:
        noted.append(float(guide.median(progress.result().params)["tau"]))

    batches = lc.ArrayBatches(X, Y, batch_size=200)
    options = {
        "batches": batches,
        "callbacks": [lc.Callback(note)],
        "progress_bar": False,
    }
    return svi.run(jax.random.key(0), STEPS, **options), noted


def draw_ellipses(ax: Any) -> None:
    """A posterior of two values and the best mean-field guide of it."""
    for name, covariance, colour in (
        ("posterior", np.array([[1, 0.85], [0.85, 1]]), "C0"),
        ("AutoNormal", (1 - 0.85**2) * np.eye(2), "C1"),
    ):
        sizes, axes = np.linalg.eigh(covariance)
        angle = np.degrees(np.arctan2(*axes[::-1, 1]))
        shape = Ellipse(
            (0, 0),
            *(4 * np.sqrt(sizes[::-1])),
            angle=angle,
            fill=False,
            color=colour,
            label=name,
        )
        ax.add_patch(shape)
    ax.set(
        xlim=(-2.6, 2.6),
        ylim=(-2.6, 2.6),
        aspect="equal",
        xlabel="one value",
        ylabel="another",
    )
    ax.legend(frameon=False, loc="upper left")


def main() -> None:
    """Write ``findings.png`` beside this file."""
    figure, axes = plt.subplots(2, 2, figsize=(8, 6), layout="constrained")
    centred, collapsed = fit(model)
    _, learned = fit(lc.not_centred(model))
    lc.plots.elbo(centred.losses[:1500], ax=axes[0, 0])
    axes[0, 0].set_title("the ELBO still rises")
    drifting = np.asarray(centred.iterates["w_auto_scale"]).reshape(
        len(centred.iterates["w_auto_scale"]), -1
    )[:, :6]
    axes[0, 1].plot(
        np.linspace(0, STEPS, len(drifting)), drifting, color="C0", linewidth=0.7
    )
    axes[0, 1].set(
        title="a parameter drifts", xlabel="step", ylabel="free values of six sds"
    )
    draw_ellipses(axes[1, 0])
    axes[1, 0].set_title("sds are too narrow")
    steps = 100 * (1 + np.arange(len(learned)))
    axes[1, 1].axhline(1.0, color="0.7", linewidth=1, label="truth")
    axes[1, 1].plot(steps, collapsed, color="C1", label="centred")
    axes[1, 1].plot(steps, learned, color="C0", label="lc.not_centred")
    axes[1, 1].set(
        title="a learned scale collapses", xlabel="step", ylabel="scale", ylim=(0, None)
    )
    axes[1, 1].legend(frameon=False, loc="upper right", bbox_to_anchor=(1, 0.72))
    for ax in axes.flat:
        ax.spines[["top", "right"]].set_visible(False)
    figure.savefig(Path(__file__).with_suffix(".png"), dpi=110)


if __name__ == "__main__":
    main()
