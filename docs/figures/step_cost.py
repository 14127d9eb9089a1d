# SPDX-License-Identifier: Apache-2.0
"""Draw the README's picture of recorded figures: ``python docs/figures/step_cost.py``.

The figures are the medians that ``python -m benchmarks.step_cost`` printed on two CPU
cores with JAX 0.12, the table of docs/measured_steps.md.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt

CLASSES = [10**3, 10**4, 10**5, 10**6]
SUBSAMPLED = [2.5, 2.3, 2.4, 2.5]  # milliseconds per step
EXACT = [2.8, 36, 496]


def main() -> None:
    """Write ``step_cost.png`` beside this file."""
    figure, axes = plt.subplots(figsize=(6.4, 2.8), layout="constrained")
    axes.loglog(
        CLASSES[:3], EXACT, "o-", color="C7", label="numpyro.infer.SVI, all classes"
    )
    axes.loglog(
        CLASSES, SUBSAMPLED, "o-", color="C0", label="lc.SubsampledSVI, 100 sampled"
    )
    axes.set(xlabel="classes", ylabel="milliseconds per step", ylim=(1, 1000))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(Path(__file__).with_suffix(".png"), dpi=110)


if __name__ == "__main__":
    main()
