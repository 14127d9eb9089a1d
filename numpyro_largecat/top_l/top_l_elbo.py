# SPDX-License-Identifier: Apache-2.0
"""An ELBO that sums over the L best values of each discrete latent site."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax, random
from numpyro import handlers
from numpyro.infer.elbo import ELBO
from numpyro.infer.util import compute_log_probs
from numpyro.util import check_model_guide_match

from numpyro_largecat._checks import check_random_key, is_concrete
from numpyro_largecat.handlers.internals import check_model_trace
from numpyro_largecat.handlers.sites import log_prob_of, mutable_values, scale_of
from numpyro_largecat.ops.top_l import log_sum
from numpyro_largecat.top_l.active_values import ActiveValues
from numpyro_largecat.top_l.discrete_sites import DiscreteSite, find_discrete_sites
from numpyro_largecat.top_l.model_at_values import ModelAtValues
from numpyro_largecat.top_l.top_l_categorical import TopLCategorical


class TopL_ELBO(ELBO):
    r"""ELBO that sums over the L best values of each discrete latent site, at each of its places.

    For a model with discrete sites that are marked as usual in NumPyro,
    ``infer={"enumerate": "parallel"}`` (``config_enumerate`` marks them too, and needs funsor), and
    a guide of all other latent sites. With the log weights of the values of a discrete site z at a
    place n of its plates,

    .. math:: W_{nk} = \log p(z_n = k) + \sum_s \log p(s \mid z_n = k),

    over all sites s that depend on z, it has the term
    :math:`\sum_n \log \sum_{k \in S_n} e^{W_{nk}}` with :math:`S_n` the L values of largest
    weight. That is the ELBO with the best posterior of each :math:`z_n` that has L outcomes, given
    the draw of the guide; at L = K it is the ELBO of the model with z summed out. All other terms
    are those of ``numpyro.infer.Trace_ELBO``. It needs no funsor.

    **What factorises.** There may be several discrete sites, each inside any plates, which may
    subsample; sites that depend on them may be of any kind, and may be inside more plates. But

    - a discrete site depends on no other discrete site,
    - a site depends on one discrete site at most,
    - it is inside all plates of that site, depends on its value at the same place alone, and has
      its scale,
    - it is no choice that a class plate estimates by drawn classes.

    All else is refused, except for one thing that shows in numbers only: if a site depends on
    values at other places (``z.mean()``, or ``z[::-1]``), the loss is NaN under ``jit``, and
    otherwise an error; two runs of the model in each step look for it. The loss is NaN too where
    scales that are traced differ.

    A model is run with one value of each discrete site at all places. It may be written for arrays
    of the plate's shape, as for ``Predictive``: no axis of values is put in front. First it is
    tried with arrays whose axes of plates have length one, with which ``covariances[z]`` is there
    once, not at every place; if they fit nowhere, with whole ones. So the number of observations
    is to be taken from the data, not from ``len(z)``.

    **Masks.** Where all that depends on a discrete site is masked, its value counts nothing. Where
    the site itself is masked, its value must not matter: what depends on it there is refused in the
    same way.

    **Guides.** ``AutoNormal(lc.hide_enumerated(model))`` leaves the discrete sites out; with the
    model itself NumPyro's guides ask for funsor.

    Cost: in each step, K runs of what depends on the discrete sites, without gradients, in chunks
    of values that have ``MAX_ENTRIES`` entries of it at most, and a selection; then L runs, which
    are differentiated. What the model gathers for one value at each place, such as (N, D, D) of
    covariances, is L times in memory: take minibatches, or ``TopLMixture``.

    Args:
        num_active: Number of values to keep L, a Python int in [1, K]; for sites with different
            numbers, a dict by the name of the site.
        num_particles: Number of draws of the guide in each step.
        vectorize_particles: Draws at once (True), one after the other (False), or by a function
            that takes the place of ``jax.vmap``.

    Raises:
        ValueError: At the first step: if ``num_active`` is outside [1, K] or names other sites
            than the model has, or if a discrete latent site is not marked; ``hide_enumerated``
            raises the latter before an automatic guide is made.
        NotImplementedError: At the first step: if the model does not factorise as above, if a site
            has no list of values, or if the guide draws a discrete site.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist, optax
        >>> from numpyro.infer import SVI
        >>> from numpyro.infer.autoguide import AutoDelta
        >>> import numpyro_largecat as lc
        >>> def model(x):
        ...     weights = numpyro.sample("weights", dist.Dirichlet(jnp.ones(3)))
        ...     with numpyro.plate("components", 3):
        ...         loc = numpyro.sample("loc", dist.Normal(0, 10))
        ...     with numpyro.plate("data", len(x)):
        ...         z = numpyro.sample("z", dist.Categorical(weights),
        ...                            infer={"enumerate": "parallel"})
        ...         numpyro.sample("x", dist.Normal(loc[z], 1), obs=x)
        >>> x = jnp.array([-9.0, -8.0, 0.0, 1.0, 9.0, 8.0])
        >>> start = numpyro.infer.init_to_value(values={"loc": jnp.array([-5.0, 0.0, 5.0])})
        >>> guide = AutoDelta(lc.hide_enumerated(model), init_loc_fn=start)
        >>> elbo = lc.TopL_ELBO(num_active=2)
        >>> svi = SVI(model, guide, optax.adam(0.1), elbo)
        >>> result = svi.run(jax.random.key(0), 300, x, progress_bar=False)
        >>> result.params["loc_auto_loc"].round(1).tolist()
        [-8.5, 0.5, 8.5]
        >>> z = elbo.responsibilities(jax.random.key(0), result.params, model, guide, x)["z"]
        >>> z.mode.tolist()
        [0, 0, 1, 1, 2, 2]

    References:
        Hughes and Sudderth, Fast Learning of Clusters and Topics via Sparse Posteriors, 2016,
        Eq. 3 and 8.
    """

    can_infer_discrete = True

    def __init__(
        self,
        num_active: int | dict[str, int],
        num_particles: int = 1,
        vectorize_particles: bool | Callable[..., Any] = True,
    ) -> None:
        self.num_active = num_active
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
        """Negative ELBO, and the values of mutable sites.

        Args:
            rng_key: A JAX random key.
            param_map: Values of the parameters, by name.
            model: NumPyro model.
            guide: NumPyro guide of its other latent sites.
            *args: Arguments of model and guide.
            **kwargs: Keyword arguments of model and guide.

        Returns:
            A dict of "loss" and "mutable_state".
        """

        def particle(rng_key: Array) -> tuple[Array, Any]:
            elbo, mutable = _Particle(rng_key, param_map, model, guide, args, kwargs).elbo(
                self.num_active
            )
            if mutable and self.num_particles > 1:
                warnings.warn("mutable state is ignored when num_particles > 1.", stacklevel=2)
            return elbo, mutable if mutable and self.num_particles == 1 else None

        if self.num_particles == 1:
            elbo, mutable_state = particle(rng_key)
        else:
            keys = random.split(rng_key, self.num_particles)
            elbo, mutable_state = self.vectorize_particles_fn(particle, keys)
        return {"loss": -jnp.mean(elbo), "mutable_state": mutable_state}

    def responsibilities(
        self,
        rng_key: Array,
        param_map: dict[str, Any],
        model: Callable[..., Any],
        guide: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> dict[str, TopLCategorical]:
        """Posterior of each discrete site at one draw of the guide.

        The outcomes are places in the support of the site, 0 its first value: of a ``Categorical``
        the values themselves.

        Args:
            rng_key: A JAX random key, for the draw of the guide.
            param_map: Values of the parameters, by name, such as ``result.params``.
            model: NumPyro model.
            guide: NumPyro guide of its other latent sites.
            *args: Arguments of model and guide.
            **kwargs: Keyword arguments of model and guide.

        Returns:
            A ``TopLCategorical`` for each discrete site, whose batch shape is that of the site.
        """
        check_random_key(rng_key)
        particle = _Particle(rng_key, param_map, model, guide, args, kwargs)
        discrete, are_apart = particle.discrete(self.num_active)
        found = {}
        for site, chosen, log_weights in discrete:
            chosen = jnp.broadcast_to(chosen, log_weights.shape)
            found[site.name] = TopLCategorical(
                jnp.moveaxis(chosen, 0, -1),
                jnp.moveaxis(jnp.where(are_apart, log_weights, jnp.nan), 0, -1),
                site.num_values,
                validate_args=False,
            )
        return found


class _Active(NamedTuple):
    """The best values of a discrete site."""

    site: DiscreteSite
    chosen: Array  # (L, ...), places in the support; broadcasts to the shape of the log weights
    log_weights: Array  # (L, *batch_shape)

    def bound(self) -> Array:
        """Log of the sum over the best values, at each place of the plates.

        Where the value says nothing of what is seen, its sum over all values is known, for the
        prior sums to one: the sum over the best ones is divided by their prior.
        """
        log_prior = self.site.log_prior_at(self.chosen)
        log_prior = jnp.broadcast_to(log_prior, self.log_weights.shape)
        bound, log_mass = (log_sum(jnp.moveaxis(x, 0, -1)) for x in (self.log_weights, log_prior))
        return bound - jnp.where(self.site.free, log_mass, 0)


class _Particle:
    """One draw of the guide, and the model at that draw."""

    def __init__(
        self,
        rng_key: Array,
        param_map: dict[str, Any],
        model: Callable[..., Any],
        guide: Callable[..., Any],
        args: Any,
        kwargs: Any,
    ) -> None:
        self.model_key, guide_key = random.split(rng_key)
        self.guide_log_probs, self.guide_trace = compute_log_probs(
            handlers.seed(guide, guide_key), args, kwargs, param_map
        )
        self.mutable = mutable_values(self.guide_trace)
        params = {**param_map, **self.mutable}
        model = handlers.seed(model, self.model_key)
        self.run = ModelAtValues(model, self.guide_trace, params, args, kwargs)
        self.model_trace = self.run.first_trace()
        self.mutable |= mutable_values(self.model_trace)

    def elbo(self, num_active: int | dict[str, int]) -> tuple[Array, dict[str, Any]]:
        """Evidence lower bound, and the values of mutable sites."""
        discrete, are_apart = self.discrete(num_active)
        check_model_guide_match(self.model_trace, self.guide_trace)
        check_model_trace(self.model_trace)
        summed = {name for found in discrete for name in (found.site.name, *found.site.dependents)}
        terms = [
            jnp.sum(scale_of(site) * log_prob_of(site))
            for name, site in self.model_trace.items()
            if site["type"] == "sample" and name not in summed
        ]
        terms += [jnp.sum(found.site.scale * found.bound()) for found in discrete]
        terms += [-log_prob for log_prob in self.guide_log_probs.values()]
        elbo = sum(terms, start=jnp.array(0.0))
        return jnp.where(are_apart, elbo, jnp.nan), self.mutable

    def discrete(self, num_active: int | dict[str, int]) -> tuple[list[_Active], Any]:
        """Each discrete site with its best values; and whether places depend on nothing else."""
        sites = find_discrete_sites(self.run, self.model_trace, num_active)
        if not sites:
            return [], True
        active = ActiveValues(self.run, sites, self.model_trace)
        index = active.best()
        weights = active.at(index)
        are_apart = active.are_apart(index, lax.stop_gradient(weights), self.model_key)
        if is_concrete(are_apart) and not are_apart:
            raise NotImplementedError(
                f"a site that depends on one of the discrete sites {sorted(index)} depends on its "
                "values at other places of its plates, or where the discrete site is masked; or on "
                "their shape, so that the posterior does not factorise. Use the value at the same "
                "place, mask both, and take sizes from the data."
            )
        return [_Active(s, index[s.name], weights[s.name]) for s in sites], are_apart
