# SPDX-License-Identifier: Apache-2.0
"""Simulation-based calibration: whether a way of fitting recovers what its model has drawn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray
from numpyro.handlers import seed, trace

from numpyro_largecat._checks import check_count, check_interval, check_random_key, describe
from numpyro_largecat._progress_bar import progress_bar as open_bar
from numpyro_largecat._result_so_far import attach_result
from numpyro_largecat.handlers.one_at_a_time import MODEL_RUNS
from numpyro_largecat.handlers.sites import (
    Site,
    Sites,
    log_factor,
    log_prob_of,
    of_type,
    scale_of,
)

Values = dict[str, Any]  # of sites, by name
LEVELS = (0.5, 0.9)  # of the intervals that are printed
LOOKS = 8  # draws of the model, to see what depends on them


class Calibration(NamedTuple):
    r"""Ranks of true values among draws of their posterior; prints as a table.

    If the posterior is right, the rank of each value is uniform on 0, ..., S for S draws. Printed
    are, for each quantity, how often central intervals of 50 and 90 percent hold the true value,
    and the spread of the ranks: their standard deviation about the middle, over that of uniform
    ones. It is above 1 where posteriors are too narrow (or beside the truth), and below 1 where
    they are too wide.
    Errors are standard errors over data sets; values of one data set are not independent.

    Example:
        >>> import numpy as np
        >>> import numpyro_largecat as lc
        >>> ranks = np.random.default_rng(0).integers(0, 100, (200, 5))
        >>> print(lc.Calibration({"w": ranks}, 99))
                       50% interval     90% interval   spread of ranks
        w     ...
    """

    ranks: dict[str, NDArray[np.int64]]  # of each quantity (num_sets, ...), in [0, num_draws]
    num_draws: int  # S

    def coverage(self, level: float) -> dict[str, tuple[float, float]]:
        """How often the central interval of each quantity holds it, and the standard error.

        Args:
            level: Probability of the interval, in (0, 1).
        """
        check_interval("level", level, "(0, 1)")
        return {
            name: _mean_and_error(np.abs(uniform - 0.5) < level / 2)
            for name, uniform in self._uniform().items()
        }

    def spread(self) -> dict[str, tuple[float, float]]:
        """Standard deviation of the ranks about the middle over that of uniform ones; its error."""
        found = {}
        for name, uniform in self._uniform().items():
            square, error = _mean_and_error(12 * (uniform - 0.5) ** 2)
            found[name] = square**0.5, error / (2 * square**0.5)
        return found

    def to_arviz(self) -> Any:
        """An ArviZ object whose group ``prior_sbc`` has the ranks as fractions in (0, 1).

        With ArviZ 1 ``az.plot_ecdf_pit(found.to_arviz())`` draws them. Its data sets are the draws
        of one chain.

        Returns:
            ``arviz.InferenceData`` with ArviZ 0.23, ``xarray.DataTree`` with ArviZ 1.
        """
        import arviz as az  # slow to import, so only where it is used

        values = {name: uniform[None] for name, uniform in self._uniform().items()}
        if int(az.__version__.split(".")[0]) >= 1:
            return az.from_dict({"prior_sbc": values})
        convert: Any = az.convert_to_dataset
        groups = {"prior_sbc": convert(values)}
        return az.InferenceData(**groups, warn_on_custom_groups=False)

    def __str__(self) -> str:
        """One line for each quantity."""
        columns = [*(self.coverage(level) for level in LEVELS), self.spread()]
        titles = [*(f"{level:.0%} interval" for level in LEVELS), "spread of ranks"]
        width = max(map(len, self.ranks))
        lines = [" " * width + "".join(f"{title:>18s}" for title in titles)]
        for name in self.ranks:
            cells = (f"{value:.3f} ± {error:.3f}" for value, error in (c[name] for c in columns))
            lines.append(f"{name:{width}s}" + "".join(f"{cell:>18s}" for cell in cells))
        return "\n".join(lines)

    def _uniform(self) -> dict[str, NDArray[np.float64]]:
        """Ranks as fractions: the middles of S + 1 equal parts of (0, 1)."""
        return {name: (ranks + 0.5) / (self.num_draws + 1) for name, ranks in self.ranks.items()}


def simulation_based_calibration(
    model: Callable[..., Any],
    fit: Callable[[Array, Values], Mapping[str, Any]],
    *args: Any,
    rng_key: Array,
    num_sets: int = 50,
    quantities: Callable[[Values, Values], Values] | None = None,
    progress_bar: bool = True,
    **kwargs: Any,
) -> Calibration:
    """Fit data that the model has made, many times, and rank its true values in their posteriors.

    A set of values is drawn from the prior, and observations from these; ``fit`` fits them as you
    would fit your own. If its posteriors are right, true values have uniform ranks among their
    draws, whatever the model. So small sizes tell whether guide, loss, optimiser and number of
    steps are up to the task; they must be those that you use, on as many observations for each
    latent value as you have.

    What the data do not determine, such as the mean of all classes' weights in a softmax, has a
    right posterior only if the guide holds dependence between classes. ``quantities`` ranks what
    matters, such as differences.

    Cost: ``num_sets`` fits, one after another, and for each the ranks of all values, so keep K
    small. An ``SVI`` that is made outside of ``fit`` compiles its steps once.

    Args:
        model: The model, drawing what it observes where it is not given, as ``functools.partial(
            model, num_sampled=None)``.
        fit: Called with a random key and the values of all sites by name, true latent values among
            them. It returns draws of latent sites by name, with S draws on their first axis, as
            ``get_samples`` of MCMC and ``sample_posterior`` of a guide with full plates do; 99
            draws give 100 ranks. Deterministic sites may be among them, such as w of a
            ``not_centred`` model, by NumPyro's ``Predictive(model, draws, return_sites=["w"])``.
        *args: Arguments of ``model``, without observations.
        rng_key: A JAX random key.
        num_sets: Number of data sets, at least 2.
        quantities: What to rank: from one draw of the sites that ``fit`` draws, by name, and from
            what ``fit`` got, with the data that were made, the values of quantities, by name. One
            that reads both, such as the log likelihood, sees posteriors that leave out data. By
            default all latent sites that ``fit`` draws.
        progress_bar: Whether to show the sets done.
        **kwargs: Keyword arguments of ``model``.

    Returns:
        A ``Calibration``; print it, or see ``plots.coverage``. What ends the fits early has those
        done so far as ``result_so_far``.

    Raises:
        ValueError: If the model is given observations of what it draws, or has factors or scales of
            it, as of a minibatch, so that its draws are not those that it describes; if ``fit``
            draws what is no site of the model, or another number of draws than before; if a
            quantity is not finite, or has another shape than that of the truth; if ``num_sets`` is
            below 2.
        TypeError: If ``fit`` or ``quantities`` returns no mapping.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> import numpyro_largecat as lc
        >>> def model(x=None):
        ...     mean = numpyro.sample("mean", dist.Normal(0, 1))
        ...     with numpyro.plate("data", 3):
        ...         numpyro.sample("x", dist.Normal(mean, 1), obs=x)
        >>> def fit(rng_key, made):  # the posterior is known here
        ...     noise = jax.random.normal(rng_key, (99,))
        ...     return {"mean": made["x"].sum() / 4 + 0.5 * noise}
        >>> found = lc.simulation_based_calibration(
        ...     model, fit, rng_key=jax.random.key(0), num_sets=20, progress_bar=False)
        >>> found.ranks["mean"].shape
        (20,)

    References:
        Talts, Betancourt, Simpson, Vehtari and Gelman, Validating Bayesian Inference Algorithms
        with Simulation-Based Calibration, 2018; Modrák, Moon, Kim, Bürkner, Huurre, Faltejsková,
        Gelman and Vehtari, Simulation-Based Calibration Checking for Bayesian Computation: The
        Choice of Test Quantities Shapes Sensitivity, Bayesian Analysis 2025.
    """
    check_random_key(rng_key)
    num_sets = check_count("num_sets", num_sets, 2)
    _refuse_what_is_given(model, rng_key, args, kwargs)
    done: list[Calibration] = []  # of one data set each

    def so_far() -> tuple[Calibration, str] | None:
        return (_joined(done), f"{len(done)} data sets") if done else None

    with attach_result(so_far):
        bar = open_bar(jax.random.split(rng_key, num_sets), unit=" sets", disable=not progress_bar)
        for key in bar:
            made_key, fit_key, tie_key = jax.random.split(key, 3)
            made, known = _made_up(model, made_key, args, kwargs)
            draws = fit(fit_key, dict(made))
            _check_draws(draws, known, done[0].num_draws if done else None)
            truth = {name: made[name] for name in draws}
            if quantities is not None:
                truth, draws = _quantities_of(quantities, truth, dict(draws), made)
            number = len(next(iter(draws.values())))
            ranks = {
                name: _ranks(name, value, draws[name], tie_key) for name, value in truth.items()
            }
            done.append(Calibration(ranks, number))
    return _joined(done)


def _refuse_what_is_given(
    model: Callable[..., Any], rng_key: Array, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Refuse observations, factors and scales of what is drawn, which draws do not heed.

    Observations and factors of what is drawn have another log probability in another draw; that of
    covariates is always the same.
    """
    sites: Sites = {}
    before: Values = {}
    for key in jax.random.split(rng_key, LOOKS):
        sites = of_type("sample", _run(model, key, args, kwargs))
        _refuse_scales(sites)
        found = {
            name: np.asarray(log_prob_of(site), float)
            for name, site in sites.items()
            if site["is_observed"]
        }
        if not found:
            return
        for name, value in found.items():
            if not np.array_equal(value, before.get(name, value), equal_nan=True):
                raise _given(name, sites[name])
        before = found


def _refuse_scales(sites: Sites) -> None:
    """Refuse sites that are drawn as if they counted once, and count more or less often."""
    for name, site in sites.items():
        if not site["is_observed"] and not np.all(np.asarray(scale_of(site)) == 1):
            scales = np.unique(np.asarray(scale_of(site)))
            raise ValueError(
                f"site '{name}' of the model is drawn, so its log density must count once; it is "
                f"scaled by {' to '.join(f'{s:.4g}' for s in scales[[0, -1][: len(scales)]])}. "
                "Open all plates in full, and leave out `numpyro.handlers.scale`: draws do not "
                "heed it, so ranks would not be uniform."
            )


def _given(name: str, site: Site) -> ValueError:
    if log_factor(site) is None:
        return ValueError(
            f"site '{name}' of the model is given what it observes, and must be drawn: leave out "
            "its observations."
        )
    return ValueError(
        f"site '{name}' of the model is a factor of what it draws, which draws from its prior do "
        "not heed, so ranks would not be uniform. Write it as a `numpyro.sample` statement; or "
        "compare the fit with MCMC."
    )


def _quantities_of(
    quantities: Callable[[Values, Values], Values], truth: Values, draws: Values, made: Values
) -> tuple[Values, Values]:
    """Quantities of the truth and of the draws."""
    found = quantities(truth, dict(made))
    if not isinstance(found, Mapping) or not found:
        raise TypeError(f"`quantities` must return values by name; got {describe(found)}.")
    return dict(found), jax.vmap(lambda draw: quantities(draw, dict(made)))(draws)


def _run(
    model: Callable[..., Any], rng_key: Array, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Sites:
    with MODEL_RUNS:
        found: Sites = trace(seed(model, rng_key)).get_trace(*args, **kwargs)
    return found


def _made_up(
    model: Callable[..., Any], rng_key: Array, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Values, list[str]]:
    """A draw of all sites from the model, and the names of those that a fit may draw."""
    found = _run(model, rng_key, args, kwargs)
    sites = of_type("sample", found) | of_type("deterministic", found)
    known = [name for name, site in sites.items() if not site.get("is_observed")]
    return {name: site["value"] for name, site in sites.items()}, known


def _check_draws(draws: Any, known: list[str], num_draws: int | None) -> None:
    if not isinstance(draws, Mapping) or not draws:
        raise TypeError(
            "`fit` must return draws of latent sites by name, with draws on their first axis; got "
            f"{describe(draws)}."
        )
    if unknown := sorted(draws.keys() - set(known)):
        raise ValueError(
            f"`fit` must return draws of sites that the model draws, {known}; it has {unknown} "
            "besides. Give the model in the form that is fitted, and without observations."
        )
    numbers = {name: next(iter(jnp.shape(value)), 0) for name, value in draws.items()}
    wanted = max(numbers.values()) if num_draws is None else num_draws
    if set(numbers.values()) != {max(wanted, 1)}:
        raise ValueError(f"`fit` must return {max(wanted, 1)} draws of each site; got {numbers}.")


def _ranks(name: str, truth: Any, draws: Any, key: Array) -> NDArray[np.int64]:
    """Ranks (1, ...) of values (...) among draws (S, ...), equal ones in random order."""
    if jnp.shape(draws)[1:] != jnp.shape(truth):
        raise ValueError(
            f"draws of '{name}' must have the shape of the truth after their first axis, "
            f"{jnp.shape(truth)}; got {jnp.shape(draws)[1:]}."
        )
    if not (np.isfinite(truth).all() and np.isfinite(draws).all()):
        raise ValueError(f"'{name}' must be finite, to be ranked; its truth or a draw is not.")
    below, equal = ((op(draws, truth)).sum(axis=0) for op in (jnp.less, jnp.equal))
    ties = jax.random.randint(key, jnp.shape(truth), 0, equal + 1)
    return np.asarray(below + ties, np.int64)[None]


def _joined(done: list[Calibration]) -> Calibration:
    ranks = {n: np.concatenate([one.ranks[n] for one in done]) for n in done[0].ranks}
    return Calibration(ranks, done[0].num_draws)


def _mean_and_error(values: NDArray[Any]) -> tuple[float, float]:
    """Mean over all, and its standard error from the spread over data sets."""
    by_set = values.reshape(len(values), -1).mean(axis=1)
    if len(by_set) < 2:
        return float(by_set.mean()), float("nan")
    return float(by_set.mean()), float(by_set.std(ddof=1) / len(by_set) ** 0.5)
