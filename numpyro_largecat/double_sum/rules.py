# SPDX-License-Identifier: Apache-2.0
"""Rules of the double sum, vanilla, U-max and implicit: for one pair of classes, or for u alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from numpyro_largecat._checks import as_positive, check_one_of, describe
from numpyro_largecat.choices.update_rules import EtaEstimate
from numpyro_largecat.ops.double_sum.implicit_step import best_u, implicit_step

Schedule = Callable[[int], float]  # of the number of passes before, such as an optax schedule
DoubleSum = Literal["gaps", "utilities"]
DECAY = 0.9  # of the step size, in each pass


class Pair(NamedTuple):
    """One observation with its label y and another class k, before a step; all scalars."""

    u: Array  # local variable of the observation
    utility_y: Array  # x @ w[y]
    utility_k: Array  # x @ w[k]
    squared_norm: Array  # of x
    rate: Array  # step size
    log_others: Array  # log(K - 1)
    penalty_y: Array  # step size * ridge * beta[y] / N
    penalty_k: Array  # step size * ridge * beta[k] / N


class Move(NamedTuple):
    """A step: rows become ``keep * w[j] + add * x``; all scalars."""

    u: Array
    keep_y: Array
    add_y: Array
    keep_k: Array
    add_k: Array


class Radii(NamedTuple):
    """Where the optimum of a ridge-regularised double sum must lie."""

    w: float  # at least the norm of all weights together
    u_low: float
    u_high: float


@dataclass(frozen=True)
class DoubleSumRule:
    """A rule of the double sum: a frozen dataclass with this field, ``move`` and ``move_u``.

    ``fit_double_sum`` moves u and two rows of w by ``move``, which is compiled once for any step
    size and so takes it from ``pair`` alone. ``SubsampledSVI``, where the rule is the
    ``update_rule=`` of ``sample_choice``, moves u by ``move_u``, for utilities of any form, and w
    by its optimiser.

    Example:
        >>> import numpyro_largecat as lc
        >>> isinstance(lc.double_sum.UMax(0.1), lc.double_sum.DoubleSumRule)
        True
    """

    step_size: float | Schedule

    def __post_init__(self) -> None:
        """Refuse a step size that is none."""
        if callable(self.step_size):
            return
        if np.ndim(self.step_size) or np.asarray(self.step_size).dtype.kind not in "iuf":
            need = "a number, or a schedule of the pass"
            raise TypeError(f"`step_size` must be {need}; got {describe(self.step_size)}.")
        as_positive("step_size", self.step_size, "or a schedule of the pass")

    def move(self, pair: Pair) -> Move:
        """Take one step."""
        raise NotImplementedError(f"{type(self).__name__} has no step for `fit_double_sum`.")

    def move_u(self, u: Array, estimate: EtaEstimate, rate: Array) -> Array:
        """Take one step of u by its own term, ``u + exp(-u) * eta_hat``."""
        raise NotImplementedError(f"{type(self).__name__} has no step for `SubsampledSVI`.")

    def init(self, value: Array) -> Array:
        """No observation has been visited."""
        return jnp.zeros(value.shape, jnp.int32)

    def update(
        self, value: Array, state: Array, statistic: Callable[[Array], EtaEstimate]
    ) -> tuple[Array, Array]:
        """Move u = ``value``; ``state`` counts visits, of which there is one in each pass."""
        visits: Any = state
        size = (
            self.step_size(visits) if callable(self.step_size) else self.step_size * DECAY**visits
        )
        moved = self.move_u(value, statistic(value), jnp.asarray(size, value.dtype))
        return moved.astype(value.dtype), state + 1


@dataclass(frozen=True)
class Vanilla(DoubleSumRule):
    r"""Plain SGD on the double sum.

    With ``force = step_size * (K - 1) * exp(x @ (w[k] - w[y]) - u)``,

    .. math:: u &\leftarrow u - \mathrm{step}\,(1 - e^{-u}) + \mathrm{force}, \\
              w_k &\leftarrow w_k - \mathrm{force}\,x, \qquad
              w_y \leftarrow w_y + \mathrm{force}\,x

    and the ridge. The force is exponential in the utilities: it overflows unless the step size is
    tiny, and ``fit_double_sum`` then says in which pass. Use it to compare with. In
    ``SubsampledSVI`` u moves by ``-step_size * (1 - exp(-u) * eta_hat)``.

    Args:
        step_size: Step size of the first pass, above 0, and 0.9 times that of the pass before in
            each other; or a schedule of the number of passes before, such as
            ``optax.cosine_decay_schedule(1.0, 50)``. It is N times the paper's eta, and so that of
            the mean over the observations. In ``SubsampledSVI`` the earlier visits of each
            observation count as passes.
        double_sum: "gaps" for f of Eq. 6, or "utilities" for that of Raman et al., Eq. 8, whose
            ``u`` estimates log sum_k exp(x @ w[k]).

    Raises:
        ValueError: If ``step_size`` is not above 0 and finite, or ``double_sum`` has another value.

    Example:
        >>> import numpyro_largecat as lc
        >>> lc.double_sum.Vanilla(0.1)
        Vanilla(step_size=0.1, double_sum='gaps')

    References:
        Unbiased scalable softmax optimization, Eq. 7; Raman et al., DS-MLR, arXiv:1604.04706.
    """

    double_sum: DoubleSum = "gaps"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_one_of("double_sum", self.double_sum, ("gaps", "utilities"))

    def move(self, pair: Pair) -> Move:
        """Take one step."""
        return _explicit_move(pair, self.double_sum)

    def move_u(self, u: Array, estimate: EtaEstimate, rate: Array) -> Array:
        """Take one step of u."""
        _refuse_other_u(self.double_sum)
        return _explicit_move_u(u, estimate, rate)


@dataclass(frozen=True)
class UMax(DoubleSumRule):
    r"""U-max: plain SGD that first raises a u that is far too low, so that gradients are bounded.

    .. math:: u \leftarrow \log(1 + e^{x^\top (w_k - w_y)})
              \quad\text{if } u < \log(1 + e^{x^\top (w_k - w_y)}) - \delta,

    then the step of ``Vanilla``, whose force is at most ``step_size * (K - 1) * exp(delta)``; then
    u is projected on the interval, and each row of w on the ball, that hold the optimum. The upper
    end and the ball need a ridge: the norm of the best w is at most sqrt(2 N log(K) / ridge). A u
    that is too high comes down by the step size at most, so small ones are slow where utilities
    start far apart.

    Args:
        step_size: See ``Vanilla``.
        delta: Threshold in nats, above 0.
        double_sum: See ``Vanilla``. For "utilities", u is raised to the log of the two terms.

    Raises:
        ValueError: If ``step_size`` or ``delta`` is not above 0 and finite, or ``double_sum`` has
            another value.

    Example:
        >>> import numpyro_largecat as lc
        >>> lc.double_sum.UMax(0.1)
        UMax(step_size=0.1, delta=1.0, double_sum='gaps')

    References:
        Unbiased scalable softmax optimization, Algorithm 1 and Theorem 1.
    """

    delta: float = 1.0
    double_sum: DoubleSum = "gaps"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_one_of("double_sum", self.double_sum, ("gaps", "utilities"))
        as_positive("delta", self.delta, "a threshold in nats; the paper uses 1")

    def move(self, pair: Pair) -> Move:
        """Take one step."""
        if self.double_sum == "gaps":
            least = jnp.logaddexp(0, pair.utility_k - pair.utility_y)
        else:
            least = jnp.logaddexp(pair.utility_k, pair.utility_y)
        raised = jnp.where(pair.u < least - self.delta, least, pair.u)
        return _explicit_move(pair._replace(u=raised), self.double_sum)

    def move_u(self, u: Array, estimate: EtaEstimate, rate: Array) -> Array:
        """Take one step of u."""
        _refuse_other_u(self.double_sum)
        raised = jnp.where(u < estimate.log_least - self.delta, estimate.log_least, u)
        return jnp.maximum(_explicit_move_u(raised, estimate, rate), 0)

    def radii(self, num_rows: int, num_categories: int, ridge: float, longest: float) -> Radii:
        """Where the optimum lies; ``longest`` is the largest norm of a row of x."""
        if ridge == 0:
            return Radii(math.inf, 0.0 if self.double_sum == "gaps" else -math.inf, math.inf)
        radius = math.sqrt(2 * num_rows * math.log(num_categories) / ridge)
        if self.double_sum == "utilities":
            middle, reach = math.log(num_categories), longest * radius
            return Radii(radius, middle - reach, middle + reach)
        farthest = math.sqrt(2) * longest * radius  # two rows share the norm
        return Radii(radius, 0.0, float(np.logaddexp(0, math.log(num_categories - 1) + farthest)))


@dataclass(frozen=True)
class ImplicitSGD(DoubleSumRule):
    r"""Implicit SGD: each step minimises its term of the double sum, plus a squared distance.

    .. math:: \theta \leftarrow \operatorname*{argmin}_{\theta'}
              \; \eta f_{ik}(\theta') + \tfrac12 \|\theta' - \theta\|^2

    It is solved to rounding by ``ops.implicit_step``. Its length grows only linearly in the
    utilities, so that it cannot overflow, and u stays at 0 or above.

    In ``SubsampledSVI`` theta is u alone, for which the step has a closed form with the Wright
    omega function: omega + log omega = z,

    .. math:: u \leftarrow u - \eta + \omega(\eta - u + \log(\eta\,\hat\eta_n)).

    Args:
        step_size: See ``Vanilla``; sizes a hundred times too large do little harm.

    Raises:
        ValueError: If ``step_size`` is not above 0 and finite.

    Example:
        >>> import numpyro_largecat as lc
        >>> lc.double_sum.ImplicitSGD(1.0)
        ImplicitSGD(step_size=1.0)

    References:
        Unbiased scalable softmax optimization, section 3.2 and Appendix F.
    """

    def move(self, pair: Pair) -> Move:
        """Take one step."""
        keep_y, keep_k = 1 / (1 + pair.penalty_y), 1 / (1 + pair.penalty_k)
        u, force = implicit_step(
            pair.u,
            keep_k * pair.utility_k - keep_y * pair.utility_y,
            pair.squared_norm * (keep_k + keep_y),
            pair.rate,
            pair.log_others,
        )
        return Move(u, keep_y, force * keep_y, keep_k, -force * keep_k)

    def move_u(self, u: Array, estimate: EtaEstimate, rate: Array) -> Array:
        """Take one step of u."""
        return best_u(estimate.log_eta_hat, u, rate).u


def _explicit_move(pair: Pair, double_sum: DoubleSum) -> Move:
    """Step of ``Vanilla`` from ``pair.u``."""
    if double_sum == "gaps":
        own = jnp.exp(-pair.u)
        others = jnp.exp(pair.log_others + pair.utility_k - pair.utility_y - pair.u)
        lift = others
    else:
        own = jnp.exp(pair.utility_y - pair.u)
        others = jnp.exp(pair.log_others + pair.utility_k - pair.u)
        lift = 1 - own
    u = pair.u - pair.rate * (1 - own - others)
    return Move(u, 1 - pair.penalty_y, pair.rate * lift, 1 - pair.penalty_k, -pair.rate * others)


def _explicit_move_u(u: Array, estimate: EtaEstimate, rate: Array) -> Array:
    return u + rate * jnp.expm1(estimate.log_eta_hat - u)


def step_sizes(step_size: float | Schedule, passes: range) -> NDArray[np.float64]:
    """Step size of each pass.

    Raises:
        ValueError: If one that a schedule gives is negative or not finite.
    """
    if not callable(step_size):
        return np.array([step_size * DECAY**i for i in passes])
    sizes = np.array([float(step_size(i)) for i in passes])
    bad = ~(sizes >= 0) | ~np.isfinite(sizes)
    if bad.any():
        first = int(np.argmax(bad))
        need = "finite step sizes of at least 0"
        raise ValueError(
            f"`step_size` must give {need}; got {sizes[first]} for pass {passes[first]}."
        )
    return sizes


def _refuse_other_u(double_sum: str) -> None:
    if double_sum != "gaps":
        raise ValueError(
            '`double_sum="utilities"` is for `fit_double_sum`; leave it out for `sample_choice`.'
        )
