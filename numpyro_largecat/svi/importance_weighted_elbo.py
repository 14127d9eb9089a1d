# SPDX-License-Identifier: Apache-2.0
"""An ELBO in which the rows of one plate are drawn often, and weighted by how well they do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax, random
from numpyro.infer.elbo import ELBO

from numpyro_largecat._checks import check_count, check_kind
from numpyro_largecat.svi.weighted_run import Bad, WeightedRun


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

    **Read it by** ``weighted_posterior``. What the guide has for the rows is a proposal, a tenth to
    a half wider than their posterior, some rows twice, and so is what ``sample_posterior`` and
    ``lc.Fitted`` say of them, which warns.

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
        num_draws: Number of draws of each row M, 1 or more. The gap falls as 1 / M. With 16,
            posterior standard deviations were 0.65 to 0.92 of NUTS's for learned scales, and 0.75
            to 0.96 for means.
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

        def particle(rng_key: Array) -> tuple[Array, Bad]:
            run_key, check_key = random.split(rng_key)
            run = WeightedRun(self.plate, run_key, param_map, model, guide, args, kwargs)
            constant = lax.stop_gradient(param_map)
            bad = WeightedRun(self.plate, check_key, constant, model, guide, args, kwargs).bad()
            # As a factor, so that gradients are NaN too.
            return run.elbo(self.num_draws) * jnp.where(bad.any, jnp.nan, 1.0), bad

        if self.num_particles == 1:
            elbo, bad = particle(rng_key)
        else:
            keys = random.split(rng_key, self.num_particles)
            elbo, bad = self.vectorize_particles_fn(particle, keys)
        bad.refuse(self.plate)
        return {"loss": -jnp.mean(elbo), "mutable_state": None}
