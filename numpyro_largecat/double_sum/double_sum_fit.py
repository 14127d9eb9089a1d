# SPDX-License-Identifier: Apache-2.0
"""A fitted linear softmax, and how well it predicts."""

from __future__ import annotations

from dataclasses import dataclass, fields
from os import PathLike

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

from numpyro_largecat.data.fit_values import load_fit, save_fit
from numpyro_largecat.data.sparse_rows import SparseRows
from numpyro_largecat.double_sum.feature_rows import FeatureRows, PaddedRows, check_data

LOSS_ENTRIES = 2**22  # utilities that are held at once where the loss is evaluated


@dataclass(frozen=True, repr=False, eq=False)
class DoubleSumFit:
    """Weights of a linear softmax, as ``fit_double_sum`` returns them.

    Attributes:
        w: Weights, shape (K, D).
        u: Local variable of each observation, shape (N,).
        losses: Penalised log-loss per observation after each pass, shape (passes,); None unless
            ``record_losses`` asked for it.
        num_passes: Passes that were made, also in earlier fits that it went on from.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import numpyro_largecat as lc
        >>> x, y, rule = jnp.eye(3), jnp.arange(3), lc.double_sum.ImplicitSGD(1.0)
        >>> fit = lc.fit_double_sum(jax.random.key(0), x, y, 3, rule, progress_bar=False)
        >>> fit
        DoubleSumFit, 3 classes of 3 features, 3 observations, 50 passes
        >>> fit.w.shape, fit.u.shape, fit.losses
        ((3, 3), (3,), None)
    """

    w: Array
    u: Array
    losses: Array | None
    num_passes: int

    def __repr__(self) -> str:
        """How large it is."""
        num_classes, num_features = self.w.shape
        return (
            f"DoubleSumFit, {num_classes} classes of {num_features} features, {len(self.u)} "
            f"observations, {self.num_passes} passes"
        )

    def score(self, x: ArrayLike | SparseRows, y: ArrayLike) -> float:
        """Mean log likelihood of labels under all classes, nats per observation; O(N K D).

        Args:
            x: Features, shape (N, D), or ``SparseRows``, of any observations.
            y: Labels, integers in [0, K), shape (N,).
        """
        features, num_features, y = check_data(x, y, len(self.w))
        if num_features != self.w.shape[1]:
            need = f"the {self.w.shape[1]} features of the fit"
            raise ValueError(f"`x` must have {need}; got {num_features}.")
        return -float(log_loss(features, y, self.w))

    def save(self, path: str | PathLike[str]) -> None:
        """Write the fit to a folder of its own, in place of one there, for ``load`` to read.

        Raises:
            OSError: If it cannot be written. What was there before is there still.
            ValueError: If the folder holds anything but fits.
        """
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values = {k: np.asarray(v) if isinstance(v, Array) else v for k, v in values.items()}
        save_fit(path, "DoubleSumFit", values, self.w.dtype)

    @classmethod
    def load(cls, path: str | PathLike[str]) -> DoubleSumFit:
        """Read a fit that ``save`` wrote.

        Raises:
            ValueError: If the folder holds something else, or a fit that is damaged, or one of
                float64 where 64 bits are not enabled.
            OSError: If there is none, or it cannot be read.
        """
        values = load_fit(path, "DoubleSumFit", {field.name for field in fields(cls)})
        arrays = {k: jnp.asarray(v) for k, v in values.items() if isinstance(v, np.ndarray)}
        return cls(**(values | arrays))


@jax.jit
def log_loss(features: FeatureRows, y: Array, w: Array) -> Array:
    """Mean over the observations of -log p(y | x), a few of them at a time."""

    def one_chunk(rows: tuple[FeatureRows, Array]) -> Array:
        utilities = rows[0].utilities(w)
        own = jnp.take_along_axis(utilities, rows[1][:, None], axis=1)[:, 0]
        return jax.nn.logsumexp(utilities, axis=1) - own

    width = w.shape[0] * (features[1].shape[1] if isinstance(features, PaddedRows) else 1)
    size = max(1, min(len(y), LOSS_ENTRIES // width))
    whole = len(y) - len(y) % size
    chunks = jax.tree.map(lambda a: a[:whole].reshape(-1, size, *a.shape[1:]), (features, y))
    total = lax.map(one_chunk, chunks).sum()
    rest = jax.tree.map(lambda a: a[whole:], (features, y))
    return (total + one_chunk(rest).sum()) / len(y)
