# SPDX-License-Identifier: Apache-2.0
"""What may be wrong with a variational fit, in a table that says what to do about it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike
from numpyro.diagnostics import split_gelman_rubin
from numpyro.handlers import replay, seed, substitute, trace
from numpyro.infer.svi import SVIRunResult

from numpyro_largecat._checks import check_count, check_integers
from numpyro_largecat.infer.latent_values import at_centre, at_feasible_values
from numpyro_largecat.infer.row_optimizer import Rows
from numpyro_largecat.infer.static_arguments import with_jax_arrays
from numpyro_largecat.infer.subsampled_svi import SubsampledSVI
from numpyro_largecat.infer.touched_rows import TouchedRows, share_rows
from numpyro_largecat.predict import log_likelihood

MOST_R_HAT = 1.05
MOST_GAP = 0.05  # nats per observation
LEAST_SIGNAL = 0.1  # of a gradient that still has far to go
SEGMENTS = 4  # of the last half of the losses


class Finding(NamedTuple):
    """One line of a diagnosis.

    Example:
        >>> import numpyro_largecat as lc
        >>> lc.Finding("R-hat of the ELBO", 1.01, None, "").value
        1.01
    """

    name: str
    value: float
    error: float | None  # Monte Carlo standard error
    advice: str  # what to do; empty if nothing


class Diagnosis(NamedTuple):
    """What ``diagnose`` found; prints as a table.

    Example:
        >>> import numpyro_largecat as lc
        >>> print(lc.Diagnosis([lc.Finding("R-hat of the ELBO", 1.31, None, "run longer")]))
        R-hat of the ELBO                       1.31            run longer
    """

    findings: list[Finding]

    def __str__(self) -> str:
        """One line for each finding: name, value, its error, and what to do."""
        lines = []
        for name, value, error, advice in self.findings:
            spread = "" if error is None else f"± {error:.2g}"
            lines.append(f"{name:36s}{value:>8.4g} {spread:10s} {advice}".rstrip())
        return "\n".join(lines)


def diagnose(
    rng_key: Array,
    svi: SubsampledSVI,
    result: SVIRunResult,
    *args: Any,
    labels: ArrayLike | None = None,
    site: str = "y",
    plate: str = "classes",
    num_repeats: int = 30,
    chunk_size: int = 4096,
    **kwargs: Any,
) -> Diagnosis:
    r"""Look for what is wrong with a fit, since SVI always returns something.

    - **R-hat of the ELBO** over four segments of the last half of its steps: well above 1 while the
      ELBO still rises.
    - **Bound below exact log likelihood**, in nats per observation of the batch, at the centre of
      the guide: :math:`\frac1B \sum_n \log p(y_n) - \bar b_n`, with the mean :math:`\bar b` of the
      bound over draws of classes. What is left when the local variables have converged is what the
      bound costs; more means that they lag.
    - **Gradient signal to noise** of each parameter, :math:`\|E g\|^2 / \mathrm{tr\,Var}\,g` over
      draws of latent values and classes for this batch, without bias: about 0, and possibly below,
      where nothing is left to learn from the batch.
    - **Classes seen**: how many of the K classes have labels, and how many equally frequent ones
      would have as high an entropy.

    Cost: ``num_repeats`` steps; O(K) time for each observation of the batch; and O(table) time and
    memory for the gradients.

    Args:
        rng_key: A JAX random key.
        svi: The ``SubsampledSVI`` of the fit.
        result: What its ``run`` returned.
        *args: Arguments of model and guide, with observed choices, such as one minibatch.
        labels: All labels of the training data, for the classes seen; those of the batch by
            default.
        site: Name of the choice.
        plate: Name of its class plate.
        num_repeats: Draws of classes and latent values, at least 2.
        chunk_size: Number of classes evaluated at once.
        **kwargs: Keyword arguments of model and guide.

    Returns:
        A ``Diagnosis``; print it.

    Raises:
        ValueError: If the model observes no choice of that name, or ``num_repeats`` is below 2.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist, optax
        >>> import numpyro_largecat as lc
        >>> from numpyro.infer import TraceMeanField_ELBO
        >>> from numpyro.infer.autoguide import AutoNormal
        >>> def model(y, rows):
        ...     with lc.class_plate("classes", 50, y, num_sampled=5) as classes:
        ...         b = numpyro.sample("b", dist.Normal(0, 1))
        ...     with lc.data_plate("data", 90, rows) as rows:
        ...         psi = jnp.broadcast_to(b, (len(y), *b.shape))
        ...         lc.sample_choice("y", psi, classes=classes, rows=rows, obs=y)
        >>> svi = lc.SubsampledSVI(model, AutoNormal(model), optax.adam(0.1), TraceMeanField_ELBO())
        >>> y, rows = jnp.arange(90) % 9, jnp.arange(90)
        >>> result = svi.run(jax.random.key(0), 300, y, rows, progress_bar=False)
        >>> print(lc.diagnose(jax.random.key(1), svi, result, y, rows))  # doctest: +ELLIPSIS
        R-hat of the ELBO ...
        classes seen, of 50                        9
        classes seen, effectively                  9
    """
    num_repeats = check_count("num_repeats", num_repeats, 2)
    args, kwargs = with_jax_arrays((args, kwargs))
    r_hat = _r_hat(np.asarray(result.losses))
    is_done = not r_hat > MOST_R_HAT
    findings = [Finding("R-hat of the ELBO", r_hat, None, "" if is_done else "run longer")]
    keys = jax.random.split(rng_key, num_repeats)
    bounds, obs, num_categories = _bounds(keys, svi, result.params, args, kwargs, site, plate)
    options: dict[str, Any] = {"site": site, "plate": plate, "chunk_size": chunk_size}
    exact = log_likelihood(svi.model, svi.guide, result.params, *args, obs=obs, **options, **kwargs)
    by_draw = np.asarray(exact.mean() - bounds.reshape(num_repeats, -1).mean(axis=1), np.float64)
    gap, error = by_draw.mean(), by_draw.std(ddof=1) / num_repeats**0.5
    lags = gap - 2 * error > MOST_GAP
    advice = "visit rows more often, or take a tighter bound" if lags else ""
    findings.append(Finding("exact log likelihood less bound", gap, error, advice))
    for name, signal in _signals(keys, svi, result.state, args, kwargs).items():
        is_lost = not is_done and signal < LEAST_SIGNAL
        advice = "raise batch size or num_sampled" if is_lost else ""
        findings.append(Finding(f"gradient signal to noise, {name}", signal, None, advice))
    counts = np.bincount(np.ravel(obs if labels is None else _checked(labels)))
    shares = counts[counts > 0] / counts.sum()
    effective = float(np.exp(-(shares * np.log(shares)).sum()))
    findings.append(Finding(f"classes seen, of {num_categories}", float(len(shares)), None, ""))
    findings.append(Finding("classes seen, effectively", effective, None, ""))
    return Diagnosis(findings)


def _r_hat(losses: np.ndarray) -> float:
    last = losses[np.isfinite(losses)][len(losses) // 2 :]
    length = len(last) // SEGMENTS
    if length < 4:
        return float("nan")
    segments = last[len(last) - SEGMENTS * length :].reshape(SEGMENTS, length)
    return float(split_gelman_rubin(segments))


def _bounds(
    keys: Array, svi: SubsampledSVI, params: Any, args: Any, kwargs: Any, site: str, plate: str
) -> tuple[Array, Array, int]:
    """The site's log probability at the centre of the guide, (T, ...), and its observed classes."""
    static: dict[str, Any] = {}

    def of_draw(key: Array) -> tuple[Array, Array]:
        touched = TouchedRows()

        def run(fn: Callable[..., Any]) -> Any:
            return substitute(seed(share_rows(fn, touched), key), data=params)

        trace(at_feasible_values(run(svi.model))).get_trace(*args, **kwargs)
        guide_sites = trace(at_centre(run(svi.guide))).get_trace(*args, **kwargs)
        sites = trace(replay(run(svi.model), guide_sites)).get_trace(*args, **kwargs)
        if site not in sites or not sites[site].get("is_observed") or plate not in touched.plates:
            observed = [name for name, s in sites.items() if s.get("is_observed")]
            raise ValueError(
                f"`site` and `plate` must name a choice that the model observes, and its class "
                f"plate; got '{site}' and '{plate}', of the sites {observed} and the plates "
                f"{sorted(touched.plates)}."
            )
        static["num_categories"] = touched.plates[plate].size
        return sites[site]["fn"].log_prob(sites[site]["value"]), sites[site]["value"]

    log_probs, values = jax.jit(lambda keys: lax.map(of_draw, keys))(keys)
    return log_probs, values[0], static["num_categories"]


def _signals(
    keys: Array, svi: SubsampledSVI, state: Any, args: Any, kwargs: Any
) -> dict[str, float]:
    """Squared norm of the mean gradient over the variance, for each parameter."""
    tables = svi.optim.get_params(state.optim_state)
    zeros = jax.tree.map(jnp.zeros_like, tables)

    def add(carry: Any, key: Array) -> tuple[Any, dict[str, Array]]:
        step = svi._gather(state._replace(rng_key=key), args, kwargs)
        params = svi.optim.get_params(step.optim_rows)
        grads, _ = jax.grad(step.loss, has_aux=True)(params)
        squares = {name: _square(grad) for name, grad in grads.items()}
        return {n: _add_rows(carry[n], grads[n], step.rows, n) for n in grads}, squares

    sums, squares = jax.jit(lambda keys: lax.scan(add, zeros, keys))(keys)
    num = len(keys)
    signals = {}
    for name, total in sums.items():
        of_sum = float(_square(total))
        mean_square = float(squares[name].mean())
        signal = (of_sum - num * mean_square) / (num * (num - 1))  # mean of g_i @ g_j, i != j
        noise = mean_square - signal
        is_noisy = noise > 1e-5 * mean_square  # more than rounding
        signals[name] = signal / noise if is_noisy else float("inf")
    return signals


def _square(tree: Any) -> Array:
    return jnp.stack([jnp.vdot(leaf, leaf) for leaf in jax.tree.leaves(tree)]).sum()


def _add_rows(table: Any, grads: Any, rows: Rows, name: str) -> Any:
    if name not in rows:
        return jax.tree.map(jnp.add, table, grads)
    index: tuple[Any, ...] = ()
    by_axis = rows[name]
    for axis in range(max(by_axis) + 1):
        ids = by_axis.get(axis, jnp.arange(table.shape[axis]))
        index += (ids.reshape((-1,) + (1,) * (max(by_axis) - axis)),)
    return table.at[index].add(grads, mode="drop")


def _checked(labels: ArrayLike) -> ArrayLike:
    check_integers("labels", labels)
    return labels
