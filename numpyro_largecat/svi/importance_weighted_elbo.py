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

from numpyro_largecat._checks import UnsuitedModelError, check_count, check_kind, is_concrete
from numpyro_largecat.handlers.internals import check_model_trace
from numpyro_largecat.handlers.new_draws_of_rows import new_draws_of_rows
from numpyro_largecat.handlers.run_model import Around, as_drawn, at_values_of, sites_of
from numpyro_largecat.handlers.sites import Sites
from numpyro_largecat.svi.weighted_rows import Terms, weighted_rows


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

    **One table is weighted.** What is learned of the scale of another one, which is drawn once, is
    as too sure as with any ELBO. A small one is best in a plain plate that holds all of its rows:
    ``AutoRowNormal`` takes its values for dense, together with their scale.

    **Read the dense sites.** What the fit has for the rows is a proposal, a tenth to a half wider
    than their posterior, some rows twice, and so is what ``sample_posterior`` and ``lc.Fitted`` say
    of these people; predict them by a fit with another loss.

    **The plate** is an ``entity_plate`` that observations read by one id each, or a ``data_plate``
    or plain plate with the observations inside. Where a minibatch has some of the people, it must
    have each of them in one row: give the model arrays with a row for each person, padded and
    masked, and all rows alike likely.

    **What is refused.** Rows that depend on each other, in the model or in the guide; observations
    of several entities each; class plates of which a step holds a sample, since the exponential of
    an unbiased estimate is biased. Three kinds show in numbers only: dependence on other rows,
    looked for in each step by two more draws, which have a random half of the rows in common;
    people of whom a minibatch lacks observations; and weights of ``numpyro.handlers.scale``. Then
    the loss is NaN under ``jit``, and otherwise there is an error; ``SubsampledSVI.run`` has the
    error at its first step, and ends with a warning that says the same at a later one. A draw of no
    density (-inf) is a weight of 0, and its gradient is NaN.

    Cost: in each step M runs of guide and model, in one, which are differentiated, and two more,
    which are not; what they make of a minibatch is M times in memory.

    Args:
        plate: Name of the plate.
        num_draws: Number of draws of each row M, 1 or more. The gap falls as 1 / M. With 16
            posterior standard deviations were 0.8 to 0.95 of NUTS's, with 64 0.9 to 1.
        num_particles: Number of draws of the dense sites in each step.
        vectorize_particles: Draws of the dense sites at once (True), one after the other (False),
            or by a function that takes the place of ``jax.vmap``.

    Raises:
        TypeError: If ``plate`` is not a string.
        ValueError: If ``num_draws`` is below 1. At the first step: if the model has no such plate,
            it is a class plate, nothing that is observed is known to belong to its rows, or the
            guide draws its sites outside of it; and as above.
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
        check_kind("plate", plate, str, "the name of the one plate whose rows are weighted")
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
            run_key, check_key = random.split(rng_key)
            run = _Run(self.plate, run_key, param_map, model, guide, args, kwargs)
            constant = lax.stop_gradient(param_map)
            bad = _Run(self.plate, check_key, constant, model, guide, args, kwargs).bad()
            # As a factor, so that gradients are NaN too.
            return run.elbo(self.num_draws) * jnp.where(jnp.stack(bad).any(), jnp.nan, 1.0), bad

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
        "are_scaled": f"something of the rows of plate '{plate}' has not the weight of a minibatch "
        "with all that is observed of them: it lacks some, has one of them in several rows, or is "
        "in no plate that says how many there are; or a handler `scale` is around. Give the model "
        "arrays with one row for each row of the plate, padded and masked, in an `lc.data_plate`.",
        "follows_rows": f"something of a row of plate '{plate}' depends on other rows, or what is "
        "outside depends on any, so that rows cannot be weighted one by one. Observations must be "
        "inside of the plate or, of an entity plate, in one with a single id for each row, in the "
        "order of its `ids`.",
        "guide_follows_rows": f"the guide draws rows of plate '{plate}' that depend on each other, "
        "or what is outside depends on them, so that rows cannot be weighted one by one. Take "
        "AutoNormal; or AutoRowNormal with an `lc.entity_plate`, since values of plain plates that "
        "hold all of their rows are dense to it.",
    }
    for what, is_bad in bad._asdict().items():
        if is_concrete(is_bad) and is_bad.any():
            raise UnsuitedModelError(found[what])


class _Run:
    """Guide and model at one draw of the dense sites, and any draws of the rows."""

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
        self.model_key, self.guide_key, self.row_key, first_key = random.split(rng_key, 4)
        self.of_guide = self._guide_sites(first_key)
        self.of_model = self._model_sites({})
        self.rows = weighted_rows(plate, self.of_model, self.of_guide)
        check_model_guide_match(self.of_model, self.of_guide)
        check_model_trace(self.of_model)

    def elbo(self, num_draws: int) -> Array:
        """The bound at this draw of the dense sites."""
        weights, dense = jax.vmap(self._log_weights)(random.split(self.row_key, num_draws))
        bounds = logsumexp(weights, axis=0) - jnp.log(num_draws)
        return dense[0] + self.rows.scale * bounds.sum()

    def bad(self) -> _Bad:
        """Compare two draws of the rows that have half of them in common.

        What belongs to these, and to no row, must be the same.
        """
        draw_key, half_key = random.split(self.row_key)
        inside, outside = jax.vmap(self._draw)(random.split(draw_key))
        num_rows = self.rows.num_rows
        is_same = random.permutation(half_key, jnp.arange(num_rows) < (num_rows + 1) // 2)
        for name, (first, other) in inside.items():
            mixed = self.rows.choose(is_same, self.of_guide[name], first, other)
            inside[name] = jnp.stack([first, mixed])
        of_guide, of_model = jax.vmap(self._terms)(inside)
        outside_moves = [(value[0] != value[1]).any() for value in outside.values()]
        return _Bad(
            self.rows.are_scaled(self.of_model) | self.rows.are_scaled(self.of_guide),
            self.rows.differ(self.of_model, of_model, is_same),
            self.rows.differ(self.of_guide, of_guide, is_same)
            | jnp.array(outside_moves, bool).any(),
        )

    def _draw(self, row_key: Array) -> tuple[dict[str, Array], dict[str, Array]]:
        """What the guide draws inside of the plate, and outside."""
        return self.rows.latent_values(self._guide_sites(row_key))

    def _log_weights(self, row_key: Array) -> tuple[Array, Array]:
        """Log weight of each row at a draw, (R,), and the log ratio of the dense sites."""
        drawn = self._guide_sites(row_key)
        inside, _ = self.rows.latent_values(drawn)
        sites = self._model_sites(inside)
        of_model, of_guide = (self.rows.terms(s) for s in (sites, drawn))
        weights = self.rows.of_rows(sites, of_model) - self.rows.of_rows(drawn, of_guide)
        dense = self.rows.elsewhere(sites, of_model) - self.rows.elsewhere(drawn, of_guide)
        return weights, dense

    def _terms(self, values: dict[str, Array]) -> tuple[Terms, Terms]:
        """Log densities of guide and model at these rows."""
        guide_sites = self._guide_sites(self.row_key, self._at_rows(values))
        return self.rows.terms(guide_sites), self.rows.terms(self._model_sites(values))

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
        drawn = {name: {**self.of_guide[name], "value": value} for name, value in values.items()}
        return at_values_of(self.of_guide | drawn)
