# SPDX-License-Identifier: Apache-2.0
"""A fitted mixture: its posterior, and what it says of data."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property, partial
from os import PathLike
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array, lax
from jax.typing import ArrayLike

from numpyro_largecat._checks import check_finite, check_num_active, is_concrete, is_traced
from numpyro_largecat.data.fit_values import load_fit, save_fit
from numpyro_largecat.mixtures.conjugate_family import ConjugateFamily
from numpyro_largecat.mixtures.global_step import GlobalStep, Objective, Statistics, global_step
from numpyro_largecat.mixtures.hyperparameters import from_values, to_values
from numpyro_largecat.mixtures.local_step import (
    Globals,
    Responsibilities,
    chunk_rows,
    log_weights_of,
    sparse_step,
)
from numpyro_largecat.mixtures.mixing_priors import MixingPrior
from numpyro_largecat.mixtures.row_stream import as_rows, padded
from numpyro_largecat.top_l.top_l_categorical import TopLCategorical

USED = 1.0  # observations in a component that counts as used


@dataclass(frozen=True, repr=False, eq=False)
class MixtureFit:
    """A mixture with conjugate posteriors, as ``fit_mixture`` returns it.

    Point estimates are posterior means, so that ``mixing()`` and ``components()`` are ordinary
    NumPyro distributions, and ``lc.TopLMixture`` puts them together for every family. Rows are
    shape (N, ...), as in the fit, and are treated in chunks.

    Attributes:
        family: The family of the components, with its prior.
        mixing_prior: The prior of the mixing weights.
        objective: "variational" or "map".
        num_active: Components L that carry mass for an observation.
        counts: Expected observations in each component, float64 of shape (K,).
        statistics: Weighted sums of features of each component, float64 of shape (K, P).
        bounds: Objective after each pass in nats, over all rows, shape (passes,).
        dtype: Float type of computations with rows.
        num_steps: Stochastic steps that were taken, also in earlier fits that it went on from;
            memoized visits are none.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import numpyro.distributions as dist
        >>> import numpyro_largecat as lc
        >>> x = dist.Normal(jnp.array([[0.0], [9.0]]), 1).sample(jax.random.key(0), (99,))
        >>> x = x.swapaxes(0, 1).reshape(198, 1)  # 99 rows of one component, then of the other
        >>> family = lc.mixtures.GaussianFamily(x.mean(0), jnp.eye(1))
        >>> fit = lc.fit_mixture(jax.random.key(0), x, 2, family, progress_bar=False)
        >>> mixture = lc.TopLMixture(fit.mixing(), fit.components(), num_active=2)
        >>> bool(jnp.allclose(mixture.log_prob(x), fit.log_likelihood(x), atol=1e-3))
        True
        >>> jnp.unique(fit.assign(x)[:99]).size, fit.num_used
        (1, 2)
        >>> print(fit)  # doctest: +ELLIPSIS
        MixtureFit, 2 components of GaussianFamily, 2 used; the last of 20 passes changed ...
    """

    family: ConjugateFamily
    mixing_prior: MixingPrior
    objective: Objective
    num_active: int
    counts: np.ndarray
    statistics: np.ndarray
    bounds: np.ndarray
    dtype: np.dtype
    num_steps: int = 0

    def __repr__(self) -> str:
        """How large it is, and how far it came."""
        text = (
            f"MixtureFit, {self.num_components} components of {type(self.family).__name__}, "
            f"{self.num_used} used"
        )
        if len(self.bounds) < 2:
            return text
        change = (self.bounds[-1] - self.bounds[-2]) / self.counts.sum()
        return (
            f"{text}; the last of {len(self.bounds)} passes changed the objective by {change:+.5f} "
            "nats per row"
        )

    def save(self, path: str | PathLike[str]) -> None:
        """Write the fit to a folder of its own, in place of one there, for ``load`` to read.

        Raises:
            OSError: If it cannot be written. What was there before is there still.
            ValueError: If the folder holds anything but fits.
            TypeError: If an attribute of the family or the mixing prior is neither a number, a
                string, None nor an array of numbers. Nothing is written then.
        """
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        own |= {"dtype": str(self.dtype)} | to_values("family", self.family)
        own |= to_values("mixing_prior", self.mixing_prior)
        save_fit(path, "MixtureFit", own, self.dtype)

    @classmethod
    def load(cls, path: str | PathLike[str]) -> MixtureFit:
        """Read a fit that ``save`` wrote. A family of your own must be defined before.

        Its arrays come back as NumPy's, with the types that they had.

        Raises:
            ValueError: If the folder holds something else, or a fit that is damaged, has a family
                that is not defined in the module that it had, or a ``dtype`` of float64 where 64
                bits are not enabled.
            OSError: If there is none, or it cannot be read.
        """
        values = load_fit(path, "MixtureFit", {field.name for field in fields(cls)})
        family = from_values("family", ConjugateFamily, values)
        mixing_prior = from_values("mixing_prior", MixingPrior, values)
        values |= {"dtype": np.dtype(values["dtype"])}
        values |= {"family": family, "mixing_prior": mixing_prior}
        return cls(**{field.name: values[field.name] for field in fields(cls)})

    @property
    def num_components(self) -> int:
        """K, used or not."""
        return len(self.counts)

    @property
    def num_used(self) -> int:
        """Components with an expected count of at least one observation."""
        return int((self.counts >= USED).sum())

    @cached_property
    def natural_parameters(self) -> np.ndarray:
        """Natural parameters of the posterior, prior plus statistics, float64 of shape (K, P)."""
        with jax.ensure_compile_time_eval(), jax.enable_x64(True):
            return np.asarray(self.family.prior()) + self.statistics

    def posterior(self) -> Any:
        """The posterior in the family's usual parameters, such as ``NormalWishart``."""
        return self._in_float64(self.family.posterior)

    def components(self) -> dist.Distribution:
        """The components at the posterior means, a distribution of batch shape (K,).

        ``dist.MixtureSameFamily`` takes no components whose support depends on parameters, such as
        multinomials, whose counts have a total; ``lc.TopLMixture`` takes them too.
        """
        return self._in_float64(self.family.components)

    def mixing(self) -> dist.Distribution:
        """Categorical over the components with the posterior means of the mixing weights."""
        log_weights = _normalised(self._step("map").log_weights)
        return dist.CategoricalLogits(jnp.asarray(log_weights, self.dtype))

    def log_likelihood(self, x: ArrayLike) -> Array:
        """Log density of each row under the posterior means, over all K components, shape (N,).

        Cost: O(N K P), one product of matrices, in chunks of bounded memory.
        """
        return self._of_rows(_log_likelihood, x, self._mean_globals)

    def score(self, x: ArrayLike) -> float:
        """Mean of ``log_likelihood`` over rows, nats per row: higher is better, on new rows.

        Raises:
            ValueError: If there are no rows, or one is not finite.
        """
        if len(values := self.log_likelihood(x)) == 0:
            raise ValueError(f"`x` must hold at least one row; got shape {np.shape(x)}.")
        return float(values.mean())

    def responsibilities(self, x: ArrayLike, num_active: int | None = None) -> TopLCategorical:
        """Soft assignments of rows under the posterior, the best L-sparse ones, batch shape (N,).

        Args:
            x: Rows, shape (N, ...).
            num_active: L in [1, K]; that of the fit by default.
        """
        active = self.num_active if num_active is None else num_active
        active = check_num_active(active, self.num_components, "components")
        run = partial(_responsibilities, num_active=active)
        sparse: Responsibilities = self._of_rows(run, x, self._own_globals)
        return TopLCategorical(sparse.indices, jnp.log(sparse.probs), self.num_components)

    def assign(self, x: ArrayLike) -> Array:
        """Most probable component of each row, integers of shape (N,)."""
        return self.responsibilities(x, num_active=1).indices[:, 0]

    def _step(self, objective: Objective) -> GlobalStep:
        statistics = Statistics(self.counts, self.statistics)
        return global_step(self.family, self.mixing_prior, statistics, objective)

    @cached_property
    def _own_globals(self) -> Globals:
        """By the objective of the fit."""
        if self.objective == "map":
            return self._mean_globals
        with jax.ensure_compile_time_eval():  # what is kept must not be of a trace
            return self._step(self.objective).parameters(self.dtype)

    @cached_property
    def _mean_globals(self) -> Globals:
        """At the posterior means."""
        with jax.ensure_compile_time_eval():
            step = self._step("map")
            step = step._replace(log_weights=_normalised(step.log_weights))
            return step.parameters(self.dtype)

    def _in_float64(self, of_natural: Any) -> Any:
        """Compute in float64, then give floats the type of the fit."""
        with jax.enable_x64(True):
            result = of_natural(jnp.asarray(self.natural_parameters))
            leaves, structure = jax.tree.flatten(result)
            leaves = [np.asarray(leaf) for leaf in leaves]
        is_float = [np.issubdtype(leaf.dtype, np.floating) for leaf in leaves]
        leaves = [
            jnp.asarray(a, self.dtype if f else None) for a, f in zip(leaves, is_float, strict=True)
        ]
        return jax.tree.unflatten(structure, leaves)

    def _of_rows(self, run: Any, x: ArrayLike, parameters: Globals) -> Any:
        x = np.asarray(x) if isinstance(x, (list, tuple)) else as_rows(x)
        if is_concrete(x):
            x = np.asarray(x)
            check_finite([("`x`", x)])
            self.family.check_rows(x)
        num_rows, *shape = np.shape(x)
        family, offset = self.family.without_offset()
        chunk = chunk_rows(num_rows, self.statistics.shape[1], self.num_components)
        rows, _ = padded(x, self.dtype, chunk, offset=offset)
        result = run(family, rows.reshape(-1, chunk, *shape), parameters)
        if not is_traced(result):
            # JAX would compile the rest anew for each number of rows.
            result = jax.tree.map(np.asarray, result)
        return jax.tree.map(lambda a: jnp.asarray(a.reshape(-1, *a.shape[2:])[:num_rows]), result)


def _normalised(log_weights: np.ndarray) -> np.ndarray:
    """Divide what is left to components that the posterior does not have."""
    return log_weights - np.logaddexp.reduce(log_weights)


@jax.jit
def _log_likelihood(family: ConjugateFamily, chunks: Array, parameters: Globals) -> Array:
    def one(rows: Array) -> Array:
        log_weights = log_weights_of(family, rows, parameters)
        return jax.nn.logsumexp(log_weights, axis=-1) + family.log_base(rows)

    return lax.map(one, chunks)


@partial(jax.jit, static_argnames="num_active")
def _responsibilities(
    family: ConjugateFamily, chunks: Array, parameters: Globals, *, num_active: int
) -> Responsibilities:
    def one(rows: Array) -> Responsibilities:
        return sparse_step(log_weights_of(family, rows, parameters), num_active)[0]

    return lax.map(one, chunks)
