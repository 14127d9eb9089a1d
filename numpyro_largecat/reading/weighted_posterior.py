# SPDX-License-Identifier: Apache-2.0
"""Draws of the posterior of a fit by ``ImportanceWeighted_ELBO``, each row by its weight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax, random

from numpyro_largecat._checks import (
    check_arguments,
    check_count,
    check_kind,
    check_random_key,
)
from numpyro_largecat._conversions import list_as_array, with_arrays
from numpyro_largecat.handlers.closed_over_arrays import compiled
from numpyro_largecat.handlers.static_arguments import with_jax_arrays
from numpyro_largecat.reading.to_arviz import arviz_from_groups
from numpyro_largecat.svi.importance_weighted_elbo import ImportanceWeighted_ELBO
from numpyro_largecat.svi.state import SubsampledSVIState
from numpyro_largecat.svi.step import gather_step
from numpyro_largecat.svi.subsampled_svi import SubsampledSVI
from numpyro_largecat.svi.weighted_rows import unknown_as
from numpyro_largecat.svi.weighted_run import Bad, WeightedRun


class WeightedDraws(NamedTuple):
    """Draws of the posterior, with rows that are weighted; ``weighted_posterior`` makes them.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_largecat as lc
        >>> draws = lc.WeightedDraws({"z": jnp.zeros((100, 3))}, 64 * jnp.ones((100, 3)))
        >>> posterior = draws.to_arviz(coords={"people": ["a", "b", "c"]}, dims={"z": ["people"]})
        >>> posterior.posterior["z"].sel(people="b").shape
        (1, 100)
    """

    values: dict[str, Array]  # by latent or deterministic site, (num_samples, ...)
    effective_draws: Array  # of each row, of those it is chosen from, (num_samples, R)

    def to_arviz(
        self,
        *,
        coords: Mapping[str, Sequence[Any]] = MappingProxyType({}),
        dims: Mapping[str, Sequence[str]] = MappingProxyType({}),
    ) -> Any:
        """The values as the posterior of an ArviZ object, of one chain.

        Args:
            coords: Labels by name of a dimension.
            dims: Names of the dimensions of a site, besides those of the draws.
        """
        posterior = {name: np.asarray(value)[None] for name, value in self.values.items()}
        return arviz_from_groups({"posterior": posterior}, dict(coords), dict(dims))


def weighted_posterior(
    rng_key: Array,
    svi: SubsampledSVI,
    state: SubsampledSVIState,
    /,
    *args: Any,
    num_samples: int,
    num_draws: int = 64,
    **kwargs: Any,
) -> WeightedDraws:
    r"""Draw from the posterior of a fit by ``ImportanceWeighted_ELBO``, its rows by their weights.

    For each of the draws of the dense sites :math:`\theta`, each row e is drawn M times by the
    guide, and one of them is chosen, by sampling importance resampling,

    .. math:: z_e = z_e^m \ \text{with probability} \propto
              \frac{p(y_e, z_e^m \mid \theta)}{q(z_e^m \mid \theta)} .

    What the guide has for the rows is a proposal, wider than their posterior; what is chosen is the
    posterior of each row given :math:`\theta`, all that is drawn outside of the plate, up to a bias
    of the order of 1 / M.

    Cost: for each sample M + 12 runs of guide and model on the rows given, in memory at once.

    Args:
        rng_key: A JAX random key.
        svi: The ``SubsampledSVI`` of the fit.
        state: Its state, such as ``result.state``; for the averages of ``average_iterates``,
            ``svi.init(..., init_params=lc.averaged_params(svi, result.state))``.
        *args: Arguments of the model as in training, with all that is observed of the rows to draw:
            some or all of them (all, where several rows of the data have the same id). For some,
            their places in the data too, as the argument of the model that ``lc.data_plate`` takes.
        num_samples: Number of samples.
        num_draws: Number of draws M that each row of a sample is chosen from.
        **kwargs: Keyword arguments of the model.

    Returns:
        ``values`` of the latent sites, shape (num_samples, ...), and of the deterministic sites in
        no plate but those of latent ones. Rows of entity plates are in the order of the ids, others
        in that of the plate's rows. They are NaN (integers and booleans -1) where an id is that of
        nobody, or where no draw has a density. So are all of a deterministic site if rows that it
        is not in move it in any sample, unless the arguments have all rows, by no ids. A single row
        cannot show that others move what is in its plate.

        ``effective_draws`` of each row, between 1 and M: where they are a few, raise ``num_draws``.
        That they are many does not show that the guide is wide enough: one that is too narrow, as
        of rows that training has not met, has many too.

    Raises:
        TypeError: If ``svi`` or ``state`` is of another type.
        ValueError: If the loss of the fit is another one, or the plate draws its rows. As the loss
            does, of a model or of arguments that it is not for; under ``jit`` the values are NaN
            then.

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
        >>> svi = lc.SubsampledSVI(
        ...     model, guide, optax.adam(0.03), lc.ImportanceWeighted_ELBO("people")
        ... )
        >>> batches = lc.ArrayBatches(x, batch_size=25)
        >>> state = svi.run(jax.random.key(1), 500, batches=batches, progress_bar=False).state
        >>> some = x[:5], jnp.arange(5)
        >>> draws = lc.weighted_posterior(jax.random.key(2), svi, state, *some, num_samples=200)
        >>> draws.values["z"].shape
        (200, 5)

    References:
        Rubin, Using the SIR algorithm to simulate posterior distributions, 1988.
    """
    check_kind("svi", svi, SubsampledSVI, "the `lc.SubsampledSVI` of the fit")
    check_kind("state", state, SubsampledSVIState, "that of the fit, such as `result.state`")
    loss, plan = svi.loss, svi.plan
    if not isinstance(loss, ImportanceWeighted_ELBO):
        raise ValueError(
            "`svi` must be of a fit by `lc.ImportanceWeighted_ELBO`, whose rows are a proposal; "
            f"its loss is {type(loss).__name__}. Take `guide.sample_posterior`."
        )
    check_random_key(rng_key)
    check_count("num_samples", num_samples, 1)
    check_count("num_draws", num_draws, 1)
    args, kwargs = with_arrays((tuple(map(list_as_array, args)), kwargs))
    check_arguments(svi.model, args, kwargs)
    args, kwargs = with_jax_arrays((args, kwargs))

    def draw(rng_key: Array) -> tuple[WeightedDraws, dict[str, Array], Bad]:
        gather_key, run_key, chosen_key, check_key = random.split(rng_key, 4)
        step = gather_step(plan, state._replace(rng_key=gather_key), args, kwargs)
        values, model, guide = step.loss.at_rows(step.params)

        def run(rng_key: Array) -> WeightedRun:
            return WeightedRun(loss.plate, rng_key, values, model, guide, args, step.loss.kwargs)

        drawn, effective, moved = run(run_key).resampled(chosen_key, num_draws)
        return WeightedDraws(drawn, effective), moved, run(check_key).bad()

    keys = random.split(rng_key, num_samples)
    draws, moved, bad = compiled(lambda keys: lax.map(draw, keys))(keys)
    bad.refuse(loss.plate)
    values = {
        name: jnp.where(moved[name].any(), unknown_as(value), value) if name in moved else value
        for name, value in draws.values.items()
    }
    draws = draws._replace(values=values)
    return jax.tree.map(lambda x: jnp.where(bad.any, unknown_as(x), x), draws)
