# SPDX-License-Identifier: Apache-2.0
"""An ELBO in which the rows of one plate are drawn often, and weighted by how well they do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax, random
from jax.scipy.special import logsumexp
from numpyro.infer.elbo import ELBO
from numpyro.util import check_model_guide_match

from numpyro_largecat._checks import BadDataError, check_count, check_kind, is_concrete
from numpyro_largecat.handlers.internals import check_model_trace
from numpyro_largecat.handlers.new_draws_of_rows import new_draws_of_rows
from numpyro_largecat.handlers.run_model import Around, as_drawn, at_values_of, sites_of
from numpyro_largecat.handlers.sites import Sites
from numpyro_largecat.svi.rows_of_plate import rows_of_plate


class ImportanceWeighted_ELBO(ELBO):
    r"""ELBO in which each row of a plate has the importance-weighted bound of M draws.

    For people, users or groups e whose latent values z_e are independent of each other given the
    dense sites :math:`\theta`, those outside of the plate:

    .. math:: E_{q(\theta)} \left[ \log \frac{p(\theta)}{q(\theta)} + \sum_e E \log \frac{1}{M}
              \sum_{m=1}^M \frac{p(y_e, z_e^m \mid \theta)}{q(z_e^m \mid \theta)} \right] \le
              \log p(y),

    with y_e all that is observed of row e. At M = 1 it is the ELBO; it rises with M, to that of a
    guide which has the exact posterior of each row given :math:`\theta`. So what is learned of the
    dense sites depends little on the form of the guide of the rows: **standard deviations of random
    coefficients, and their intervals, that a usual ELBO makes too small**. A minibatch estimates it
    without bias, if it has all that is observed of its rows.

    The guide of rows is then a proposal. Its draws are nearer to the posterior when weighted; it is
    mostly somewhat wider than the guide that the ELBO finds.

    **The plate** is an ``entity_plate``, whose observations are in a plate with one id for each, or
    a ``data_plate`` or plain plate with the observations inside. Where a minibatch has some of the
    people, it must have all observations of each of these: give the model arrays with a row for
    each person, padded and masked.

    **What is refused.** Rows that depend on each other, in the model or in the guide; observations
    of several entities each; class plates of which a step holds a sample, since the exponential of
    an unbiased estimate is biased. Two kinds show in numbers only: dependence on other rows, looked
    for in each step by one run more with rows of two draws mixed at random, and people of whom a
    minibatch lacks observations. Then the loss is NaN under ``jit`` (``SubsampledSVI.run`` says
    why), and otherwise there is an error.

    Cost: M + 1 runs of the model in each step and M of the guide, in one; what they make of a
    minibatch is M times in memory.

    Args:
        plate: Name of the plate.
        num_draws: Number of draws of each row M, 1 or more. The gap falls as 1 / M; 16 was enough
            for tastes in six dimensions.
        num_particles: Number of draws of the dense sites in each step.
        vectorize_particles: Draws of the dense sites at once (True), one after the other (False),
            or by a function that takes the place of ``jax.vmap``.

    Raises:
        TypeError: If ``plate`` is not a string.
        ValueError: If ``num_draws`` is below 1. At the first step: if the model has no such plate,
            it is a class plate, or the guide draws its sites outside of it; and as above.
        NotImplementedError: At the first step: if a class plate is sampled, or a site is mutable.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist, optax
        >>> import numpyro_largecat as lc
        >>> def model(x, rows=None):
        ...     sd = numpyro.sample("sd", dist.HalfNormal(2))
        ...     with lc.data_plate("people", 100, rows):
        ...         z = numpyro.sample("z", dist.Normal(0, sd))
        ...         numpyro.sample("x", dist.Normal(z, 1.0), obs=x)
        >>> x = 2.0 * jax.random.normal(jax.random.key(0), (100,))
        >>> guide = numpyro.infer.autoguide.AutoNormal(model)
        >>> elbo = lc.ImportanceWeighted_ELBO("people", num_draws=8)
        >>> svi = lc.SubsampledSVI(model, guide, optax.adam(0.03), elbo)
        >>> batches = lc.ArrayBatches(x, batch_size=25)
        >>> result = svi.run(jax.random.key(1), 500, batches=batches, progress_bar=False)
        >>> bool(jnp.isfinite(result.losses[-1]))
        True

    References:
        Burda, Grosse and Salakhutdinov, Importance Weighted Autoencoders, 2016, Eq. 8; Geffner and
        Domke, Variational Inference with Locally Enhanced Bounds for Hierarchical Models, 2022.
    """

    def __init__(
        self,
        plate: str,
        num_draws: int = 16,
        num_particles: int = 1,
        vectorize_particles: bool | Callable[..., Any] = True,
    ) -> None:
        check_kind("plate", plate, str, "the name of a plate")
        self.plate = plate
        self.num_draws = check_count("num_draws", num_draws, 1)
        super().__init__(num_particles=num_particles, vectorize_particles=vectorize_particles)

    def loss_with_mutable_state(
        self,
        rng_key: Array,
        param_map: dict[str, Any],
        model: Callable[..., Any],
        guide: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Negative ELBO; there is no mutable state.

        Args:
            rng_key: A JAX random key.
            param_map: Values of the parameters, by name.
            model: NumPyro model.
            guide: NumPyro guide of its latent sites.
            *args: Arguments of model and guide.
            **kwargs: Keyword arguments of model and guide.

        Returns:
            A dict of "loss" and "mutable_state", which is None.
        """

        def particle(rng_key: Array) -> tuple[Array, _Bad]:
            run = _Particle(self.plate, rng_key, param_map, model, guide, args, kwargs)
            return run.elbo(self.num_draws)

        if self.num_particles == 1:
            elbo, bad = particle(rng_key)
        else:
            keys = random.split(rng_key, self.num_particles)
            elbo, bad = self.vectorize_particles_fn(particle, keys)
        _refuse(self.plate, bad)
        return {"loss": -jnp.mean(elbo), "mutable_state": None}


class _Bad(NamedTuple):
    """What the numbers show of a model that the bound is not for."""

    are_scaled: Array
    follows_rows: Array  # in the model
    guide_follows_rows: Array


def _refuse(plate: str, bad: _Bad) -> None:
    """Say what is bad, where it is known."""
    found = {
        "are_scaled": f"rows of plate '{plate}' have not the weight of a minibatch with all of "
        "their observations: it lacks some, or a handler `scale` is around. Give the model arrays "
        "with one row for each row of the plate, padded and masked.",
        "follows_rows": f"something of a row of plate '{plate}' depends on other rows, or what is "
        "outside depends on any, so that rows cannot be weighted one by one. Observations must be "
        "in a plate with one id for each, in the order of the `ids` of the plate.",
        "guide_follows_rows": f"the guide draws rows of plate '{plate}' that depend on each other, "
        "or what is outside depends on them, so that rows cannot be weighted one by one.",
    }
    for what, is_bad in bad._asdict().items():
        if is_concrete(is_bad) and is_bad.any():
            raise BadDataError(found[what])


class _Draws(NamedTuple):
    """Draws of the rows."""

    values: dict[str, Array]  # of the sites in the plate, (M + 1, ...)
    of_rows: Array  # log densities, (M + 1, R)
    others: dict[str, Array]  # values of the sites outside, which are to be the same, (M + 1, ...)


class _Densities(NamedTuple):
    """Log densities of the model at draws of the rows."""

    of_rows: Array  # (M + 1, R)
    elsewhere: Array  # (M + 1,)


class _Particle:
    """One draw of the dense sites, and M + 1 of the rows, the last of them for a check."""

    def __init__(
        self,
        plate: str,
        rng_key: Array,
        params: dict[str, Any],
        model: Callable[..., Any],
        guide: Callable[..., Any],
        args: Any,
        kwargs: Any,
    ) -> None:
        self.plate, self.params = plate, params
        self.model, self.guide, self.args, self.kwargs = model, guide, args, kwargs
        self.model_key, self.guide_key, self.row_key, self.mix_key = random.split(rng_key, 4)
        self.first = self._guide_sites(self.row_key)
        model_sites = self._model_sites({})
        self.rows = rows_of_plate(plate, model_sites, self.first)
        check_model_guide_match(model_sites, self.first)
        check_model_trace(model_sites)
        self.are_scaled = self.rows.are_scaled(model_sites)

    def elbo(self, num_draws: int) -> tuple[Array, _Bad]:
        """The bound at this draw of the dense sites, NaN if something is bad; and what is."""
        draws = jax.vmap(self._draw)(random.split(self.row_key, num_draws + 1))
        is_first = random.bernoulli(self.mix_key, 0.5, (self.rows.num_rows,))
        mixed = self._mixed(draws.values, is_first)
        found = jax.vmap(self._at)(mixed)
        bounds = logsumexp((found.of_rows - draws.of_rows)[:-1], axis=0) - jnp.log(num_draws)
        dense = found.elsewhere[0] - self.rows.log_densities(self.first)[1]
        elbo = dense + self.rows.scale * bounds.sum()
        bad = self._bad(draws, found, mixed, is_first)
        return jnp.where(jnp.stack(bad).any(), jnp.nan, elbo), bad

    def _bad(
        self, draws: _Draws, found: _Densities, mixed: dict[str, Array], is_first: Array
    ) -> _Bad:
        """Compare the last draw with the first, in the rows ``is_first`` that they share."""
        close = float(jnp.finfo(found.of_rows.dtype).eps) ** 0.5
        last = self._at_rows({name: values[-1] for name, values in mixed.items()})
        of_guide, _ = self.rows.log_densities(self._guide_sites(self.row_key, last))
        others_differ = [_differs(values, values[0], close) for values in draws.others.values()]
        return _Bad(
            self.are_scaled,
            _differs(found.of_rows[-1], found.of_rows[0], close, is_first)
            | _differs(found.elsewhere, found.elsewhere[0], close),
            # Drawn values are transformed back here, which rounds them.
            _differs(of_guide, draws.of_rows[0], 100 * close, is_first)
            | jnp.array(others_differ, bool).any(),
        )

    def _draw(self, row_key: Array) -> _Draws:
        sites = self._guide_sites(row_key)
        inside, outside = self.rows.latent_values(sites)
        return _Draws(inside, self.rows.log_densities(sites)[0], outside)

    def _at(self, values: dict[str, Array]) -> _Densities:
        return _Densities(*self.rows.log_densities(self._model_sites(values)))

    def _mixed(self, values: dict[str, Array], is_first: Array) -> dict[str, Array]:
        """The same draws, but that the last has the rows of the first where ``is_first``."""
        return {
            name: draws.at[-1].set(self.rows.where(is_first, self.first[name], draws[0], draws[-1]))
            for name, draws in values.items()
        }

    def _guide_sites(self, row_key: Array, around: Around = as_drawn) -> Sites:
        """Sites of the guide, the rows drawn by a key of their own."""
        fn = new_draws_of_rows(self.guide, self.plate, row_key)
        given = {"rng_key": self.guide_key, "params": self.params}
        return sites_of(fn, self.args, self.kwargs, **given, around=around)

    def _model_sites(self, values: dict[str, Array]) -> Sites:
        """Sites of the model at the draw of the guide, but for these values of rows."""
        given = {"rng_key": self.model_key, "params": self.params}
        around = self._at_rows(values)
        return sites_of(self.model, self.args, self.kwargs, **given, around=around)

    def _at_rows(self, values: dict[str, Array]) -> Around:
        drawn = {name: {**self.first[name], "value": value} for name, value in values.items()}
        return at_values_of(self.first | drawn)


def _differs(a: Array, b: Array, tolerance: float, where: Array | bool = True) -> Array:
    """Whether finite log densities differ by more than rounding."""
    a, b = lax.stop_gradient((a, b))
    apart = jnp.abs(a - b) > tolerance * (1 + jnp.abs(a) + jnp.abs(b))
    return (apart & jnp.isfinite(a) & jnp.isfinite(b) & where).any()
