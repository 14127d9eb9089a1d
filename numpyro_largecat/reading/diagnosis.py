# SPDX-License-Identifier: Apache-2.0
"""What may be wrong with a variational fit, in a table that says what to do about it."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike
from numpyro.diagnostics import split_gelman_rubin
from numpyro.handlers import replay

from numpyro_largecat._checks import check_count, check_integers
from numpyro_largecat.handlers.closed_over_arrays import compiled
from numpyro_largecat.handlers.run_model import at_centre, sites_of
from numpyro_largecat.handlers.sites import is_observed, unmasked
from numpyro_largecat.handlers.static_arguments import with_jax_arrays
from numpyro_largecat.handlers.touched_rows import TouchedRows
from numpyro_largecat.reading.pareto_check import (
    Fitted,
    ParetoCheck,
    check_batches,
    check_rows,
)
from numpyro_largecat.reading.predictions import log_likelihood
from numpyro_largecat.svi.array_batches import ArrayBatches
from numpyro_largecat.svi.row_optimizer import Rows
from numpyro_largecat.svi.run_result import SubsampledSVIRunResult
from numpyro_largecat.svi.step import gather_step
from numpyro_largecat.svi.subsampled_svi import SubsampledSVI

MOST_R_HAT = 1.05
MOST_DRIFT = 1.2
MOST_PARETO_K = 0.7
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
        R-hat of the ELBO     1.31            run longer
    """

    findings: list[Finding]

    def __str__(self) -> str:
        """One line for each finding: name, value, its error, and what to do."""
        lines = []
        width = max(len(finding.name) for finding in self.findings)
        for name, value, error, advice in self.findings:
            spread = "" if error is None else f"± {error:.2g}"
            lines.append(f"{name:{width}s} {value:>8.3g} {spread:10s} {advice}".rstrip())
        return "\n".join(lines)


def diagnose(
    rng_key: Array,
    svi: SubsampledSVI,
    result: SubsampledSVIRunResult,
    *args: Any,
    batches: ArrayBatches | None = None,
    labels: ArrayLike | None = None,
    site: str = "y",
    plate: str = "classes",
    num_repeats: int = 30,
    num_draws: int = 200,
    num_rows: int = 1000,
    chunk_size: int = 4096,
    **kwargs: Any,
) -> Diagnosis:
    r"""Look for what is wrong with a fit, since SVI always returns something.

    - **R-hat of the ELBO** over four segments of the last half of its steps: well above 1 while the
      ELBO still rises. **R-hat of a parameter**: the same of up to 16 of its numbers that the fit
      recorded, in rows that its first batch touched, the median of those that moved.
    - **Bound below exact log likelihood**, in nats per observation of the batch, at the centre of
      the guide: :math:`\frac1B \sum_n \log p(y_n) - \bar b_n`, with the mean :math:`\bar b` of the
      bound over draws of classes. What is left when the local variables have converged is what the
      bound costs; more means that they lag.
    - **Gradient signal to noise** of each parameter, :math:`\|E g\|^2 / \mathrm{tr\,Var}\,g` over
      draws of latent values and classes for this batch, without bias: about 0, and possibly below,
      where nothing is left to learn from the batch.
    - **Pareto k** of parts of the guide, for the softmax: of all small sites together, and of the
      weights of each of 20 classes. A part a of the latent values is drawn from the guide, and the
      tail of its importance ratios tells how well its draws cover the model,

      .. math:: \log w(a) = E_{q(r)}[\log p(a, r, y) - \log q(a, r)],

      with the same 4 draws of the rest r for all draws of a. Below 0.7 the draws of a could be
      reweighted to the model's; above, the guide of a is too narrow, or lies elsewhere. All ratios
      are equal if q(a) is the best factor given the others. So k sees a fit that is not done, rows
      that were never visited, and a wrong shape; it does *not* see a guide that is too wide, nor
      dependence between parts, which a mean-field guide lacks. ``batches`` are needed, or all rows
      in ``args``: a class is compared on all rows of its own and on ``num_rows`` others, weighted
      to stand for all others, and k is NaN if these decide the ratios only up to noise.
    - **Classes seen**: how many of the K classes have labels, and how many equally frequent ones
      would have as high an entropy.

    Cost: ``num_repeats`` steps; O(K) time for each observation of the batch; and O(table) time and
    memory for the gradients. For Pareto k 4 passes over all classes with ``num_rows`` rows, and
    another 4 ``num_draws`` if the model has small sites, which form the utilities only if these
    sites move them.

    Args:
        rng_key: A JAX random key.
        svi: The ``SubsampledSVI`` of the fit.
        result: What its ``run`` returned.
        *args: Arguments of model and guide, with observed choices, such as one minibatch.
        batches: The ``ArrayBatches`` of the fit, whose arrays come after ``args``, as in ``run``.
        labels: All labels of the training data, for the classes seen; by default those of
            ``batches``, or of the batch.
        site: Name of the choice.
        plate: Name of its class plate.
        num_repeats: Draws of classes and latent values, at least 2.
        num_draws: Draws of each part of the guide for Pareto k, at least 100; 0 leaves it out.
        num_rows: Rows, beside those of the classes looked at, for Pareto k.
        chunk_size: Number of classes evaluated at once.
        **kwargs: Keyword arguments of model and guide.

    Returns:
        A ``Diagnosis``; print it.

    Raises:
        ValueError: If the model observes no choice of that name, or a number is too small.

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
        >>> found = lc.diagnose(jax.random.key(1), svi, result, y, rows, num_repeats=5, num_draws=0)
        >>> print(found)
        R-hat of the ELBO ...
        classes seen, of 50                               9
        classes seen, effectively                         9

    References:
        Yao, Vehtari, Simpson and Gelman, Yes, but Did It Work?: Evaluating Variational Inference,
        2018 (Pareto k). Dhaka, Catalina, Andersen, Magnusson, Huggins and Vehtari, Robust, Accurate
        Stochastic Optimization for Variational Inference, 2020 (R-hat of iterates).
    """
    num_repeats = check_count("num_repeats", num_repeats, 2)
    num_draws = check_count("num_draws", num_draws, 100) if num_draws else 0
    num_rows = check_count("num_rows", num_rows, 1)
    given, kwargs = with_jax_arrays((args, {**kwargs, **svi.static_kwargs}))
    args = given if batches is None else (*given, *batches.draw(rng_key))
    findings, drifts = _convergence(result)
    keys = jax.random.split(rng_key, num_repeats)
    fitted = Fitted(svi.model, svi.guide, result.params, kwargs, site, plate, chunk_size)
    gap, obs, num_categories = _gap(keys, fitted, args)
    findings.append(gap)
    for name, signal in _signals(keys, svi, result.state, args, kwargs).items():
        is_lost = drifts.get(name, False) and signal < LEAST_SIGNAL
        advice = "raise batch size, num_sampled or num_particles" if is_lost else ""
        findings.append(Finding(f"gradient signal to noise, {name}", signal, None, advice))
    if batches is not None:
        obs, _ = fitted.observed((*given, *batches.take(jnp.arange(batches.size))))
    if num_draws and batches is None:
        fix = "give `batches`, and more `num_rows`"
        findings += _pareto_findings(check_rows(rng_key, fitted, args, num_draws), fix)
    elif num_draws and batches is not None:
        sizes = (num_draws, num_rows)
        found = check_batches(rng_key, fitted, given, batches, *sizes)
        findings += _pareto_findings(found, "give more `num_rows`")
    labels = obs if labels is None else _checked(labels)
    return Diagnosis(findings + _classes_seen(np.ravel(labels), num_categories))


def _convergence(result: SubsampledSVIRunResult) -> tuple[list[Finding], dict[str, bool]]:
    """R-hat of the ELBO and of the parameters, and which of these still drift."""
    r_hat = _r_hat(np.asarray(result.losses))
    is_done = not r_hat > MOST_R_HAT
    findings = [Finding("R-hat of the ELBO", r_hat, None, "" if is_done else "run longer")]
    r_hats = _r_hats(result.iterates)
    drifts = dict.fromkeys(result.params, not is_done)
    for name, r_hat in r_hats.items():
        drifts[name] = r_hat > MOST_DRIFT
        advice = "drifts: run longer, or average_iterates" if drifts[name] else ""
        findings.append(Finding(f"R-hat of {name}", r_hat, None, advice))
    return findings, drifts


def _gap(keys: Array, fitted: Fitted, args: Any) -> tuple[Finding, Array, int]:
    """How far the bound is below the exact log likelihood; the labels, and the number of classes.

    Both at the centre of the guide, for the observations that are not masked.
    """
    bounds, obs, mask, num_categories = _bounds(keys, fitted, args)
    model, guide, params, kwargs, site, plate, chunk_size = fitted
    options: dict[str, Any] = {"site": site, "plate": plate, "chunk_size": chunk_size}
    exact = log_likelihood(model, guide, params, *args, obs=obs, **options, **kwargs)
    shape = jnp.broadcast_shapes(exact.shape, bounds.shape[1:])
    counts = np.broadcast_to(mask, shape)
    gaps = np.where(counts, np.broadcast_to(exact, shape) - np.asarray(bounds, np.float64), 0)
    by_draw = gaps.reshape(len(keys), -1).sum(axis=1) / counts.sum()
    gap, error = by_draw.mean(), by_draw.std(ddof=1) / len(keys) ** 0.5
    lags = gap - 2 * error > MOST_GAP
    advice = "visit rows more often, or take a tighter bound" if lags else ""
    return Finding("exact log likelihood less bound", gap, error, advice), obs, num_categories


def _classes_seen(labels: np.ndarray, num_categories: int) -> list[Finding]:
    counts = np.bincount(labels)
    shares = counts[counts > 0] / counts.sum()
    effective = float(np.exp(-(shares * np.log(shares)).sum()))
    return [
        Finding(f"classes seen, of {num_categories}", float(len(shares)), None, ""),
        Finding("classes seen, effectively", effective, None, ""),
    ]


def _r_hat(values: np.ndarray, part: float = 0.5) -> float:
    """Split R-hat over segments of the last part of some values."""
    finite = values[np.isfinite(values)]
    last = finite[len(finite) - round(part * len(finite)) :]
    length = len(last) // SEGMENTS
    if length < 4:
        return float("nan")
    segments = last[len(last) - SEGMENTS * length :].reshape(SEGMENTS, length)
    return float(split_gelman_rubin(segments))


def _r_hats(iterates: dict[str, Any]) -> dict[str, float]:
    """Median R-hat of the recorded numbers of each parameter that moved in the last half."""
    found = {}
    for name, values in iterates.items():
        last = values[len(values) // 2 :]
        moved = last[:, np.ptp(last, axis=0) > 0].astype(np.float64)
        r_hats = [_r_hat(column, part=1.0) for column in moved.T]
        if r_hats:
            found[name] = float(np.median(r_hats))
    return found


def _pareto_findings(found: ParetoCheck | None, if_unknown: str) -> list[Finding]:
    findings: list[Finding] = []
    if found is None:
        return findings

    def advice(k: float, what: str) -> str:
        if np.isnan(k):
            return f"too few rows to tell: {if_unknown}"
        return f"run longer, or {what}" if k > MOST_PARETO_K else ""

    if found.small_sites is not None:
        k = found.small_sites
        fix = "give these sites an AutoMultivariateNormal"
        findings.append(Finding("Pareto k of the small sites", k, None, advice(k, fix)))
    if found.classes is not None:
        known = found.classes[~np.isnan(found.classes)]
        k = float(np.median(known)) if known.size else float("nan")
        fix = "start the guide wider (`init_scale`)"
        findings.append(
            Finding(f"Pareto k of {known.size} classes, median", k, None, advice(k, fix))
        )
        share = float((known > MOST_PARETO_K).mean()) if known.size else float("nan")
        findings.append(Finding(f"share of classes above {MOST_PARETO_K}", share, None, ""))
    return findings


def _bounds(keys: Array, fitted: Fitted, args: Any) -> tuple[Array, Array, Array, int]:
    """The site's log probability at the centre of the guide, (T, ...), its labels and its mask."""
    model, guide, params, kwargs, site, plate, _ = fitted
    static: dict[str, Any] = {}

    def of_draw(key: Array) -> tuple[Array, Array, Any]:
        touched = TouchedRows()
        run: dict[str, Any] = {"rng_key": key, "params": params, "touched": touched}
        sites_of(model, args, kwargs, **run)
        guide_sites = sites_of(guide, args, kwargs, **run, around=at_centre)
        sites = sites_of(model, args, kwargs, **run, around=partial(replay, trace=guide_sites))
        observed = [name for name, s in sites.items() if is_observed(s)]
        if site not in observed or plate not in touched.plates:
            raise ValueError(
                f"`site` and `plate` must name a choice that the model observes, and its class "
                f"plate; got '{site}' and '{plate}', of the sites {observed} and the plates "
                f"{sorted(touched.plates)}."
            )
        static["num_categories"] = touched.plates[plate].size
        fn, value = sites[site]["fn"], sites[site]["value"]
        mask = jnp.broadcast_to(unmasked(fn)[1], jnp.shape(value))
        return fn.log_prob(value), value, mask

    log_probs, values, mask = lax.map(of_draw, keys)
    return log_probs, values[0], mask[0], static["num_categories"]


def _signals(
    keys: Array, svi: SubsampledSVI, state: Any, args: Any, kwargs: Any
) -> dict[str, float]:
    """Squared norm of the mean gradient over the variance, for each parameter."""
    tables = svi.optim.get_params(state.optim_state)
    zeros = jax.tree.map(jnp.zeros_like, tables)

    def add(carry: Any, key: Array) -> tuple[Any, dict[str, Array]]:
        step = gather_step(svi.plan, state._replace(rng_key=key), args, kwargs)
        grads, _ = jax.grad(step.loss, has_aux=True)(step.params)
        squares = {name: _square(grad) for name, grad in grads.items()}
        return {n: _add_rows(carry[n], grads[n], step.rows, n) for n in grads}, squares

    sums, squares = compiled(lambda keys: lax.scan(add, zeros, keys))(keys)
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
