# SPDX-License-Identifier: Apache-2.0
"""Draw the README's picture of recorded figures: ``python docs/figures/step_cost.py``.

The figures are the medians that one run of ``python -m benchmarks.step_cost`` printed
on two CPU cores, JAX 0.12 and PyTorch 2.13: the table of docs/measured_steps.md.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt

CLASSES = [10**3, 10**4, 10**5, 10**6]
MILLISECONDS = {  # of a step, from the least number of classes on
    "numpyro.infer.SVI, all classes": ("C7", "-", [1.84, 24.6, 384]),
    "PyTorch, all classes, a point": ("C1", "-", [1.95, 23.2, 404]),
    "PyTorch, 100 sampled, a point": ("C1", ":", [0.81, 1.02, 1.07, 1.28]),
    "lc.SubsampledSVI, 100 sampled": ("C0", "-", [1.61, 1.30, 1.38, 1.51]),
}


def main() -> None:
    """Write ``step_cost.png`` beside this file."""
    figure, axes = plt.subplots(figsize=(6.4, 3.2), layout="constrained")
    for label, (color, style, times) in MILLISECONDS.items():
        axes.loglog(
            CLASSES[: len(times)], times, style, marker="o", color=color, label=label
        )
    axes.set(xlabel="classes", ylabel="milliseconds per step", ylim=(0.7, 1000))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize="small")
    figure.savefig(Path(__file__).with_suffix(".png"), dpi=110)


if __name__ == "__main__":
    main()
