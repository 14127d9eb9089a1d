# SPDX-License-Identifier: Apache-2.0
"""The L best values of each discrete site, and their log weights."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax, random

from numpyro_largecat.ops.row_chunks import map_rows
from numpyro_largecat.ops.top_l import largest, take_last
from numpyro_largecat.top_l.component_weights import MAX_ENTRIES
from numpyro_largecat.top_l.discrete_sites import DiscreteSite
from numpyro_largecat.top_l.model_at_values import ModelAtValues

LOG_WEIGHT_TOLERANCE = 1e-4  # relative to its size and to the usual size
OTHER_SHAPE = 0.05  # the same for runs whose arrays have other shapes, and so other rounding


class ActiveValues:
    r"""Log weights of the values of discrete sites, at places n of their plates.

    .. math:: W_{nk} = \log p(z_n = k) + \sum_s \log p(s \mid z_n = k)

    over the sites s that depend on z. Since each depends on one discrete site, one run of the model
    with every discrete site at its k-th value gives the k-th log weight of all of them.

    Args:
        run: The model.
        sites: Its discrete sites.
        model_trace: A trace of it.
    """

    def __init__(
        self, run: ModelAtValues, sites: list[DiscreteSite], model_trace: dict[str, Any]
    ) -> None:
        self.run = run
        self.sites = sites
        dependents = {name for site in sites for name in site.dependents}
        sizes = [jnp.size(model_trace[name]["value"]) for name in dependents]
        sizes += [math.prod(site.batch_shape) for site in sites]
        self.chunk = max(1, MAX_ENTRIES // max(sizes))  # values at once
        self.broadcasts = True
        self.broadcasts = self._can_broadcast()

    def best(self) -> dict[str, Array]:
        """Index of the L best values, shape (L, ...), which broadcasts to (L, *batch_shape)."""
        all_of_them = {
            site.name: self._everywhere(site, jnp.arange(site.num_values)) for site in self.sites
        }
        chosen = [site for site in self.sites if site.num_active < site.num_values]
        return all_of_them | (self._select(chosen) if chosen else {})

    def at(self, index: dict[str, Array]) -> dict[str, Array]:
        """Log weights (L, *batch_shape) of the values at the index (L, ...) of each site."""
        most = max(len(rows) for rows in index.values())

        def of_rows(rows: Array) -> dict[str, Array]:
            # Sites with fewer values than others repeat their last.
            taken = {name: x[jnp.minimum(rows, len(x) - 1)] for name, x in index.items()}
            return jax.vmap(lambda one: _log_weights(self.run, self.sites, one))(taken)

        weights = map_rows(of_rows, most, self.chunk)
        return {name: weights[name][: len(rows)] for name, rows in index.items()}

    def are_apart(
        self, index: dict[str, Array], weights: dict[str, Array], rng_key: Array
    ) -> Array:
        """Whether the log weights at one place depend on the value at that place alone.

        The values at about half of the places are changed, which must change nothing at the others,
        nor where the site is masked. ``weights`` (L, *batch_shape), those at ``index``, may be of
        values that were given with axes of length one; whole arrays must give about the same.

        Cost: two runs of the model, without gradients.
        """
        run, sites = self._constant()
        first, other, changed, found = {}, {}, {}, {}
        for site in sites:
            rng_key, change_key, value_key = random.split(rng_key, 3)
            changed[site.name] = random.bernoulli(change_key, 0.5, site.batch_shape)
            # Any of the values: the first may be impossible everywhere, which would hide all.
            kept = jnp.broadcast_to(index[site.name], (site.num_active, *site.batch_shape))
            row = random.randint(value_key, (1, *site.batch_shape), 0, site.num_active)
            values = first[site.name] = jnp.take_along_axis(kept, row, axis=0)[0]
            found[site.name] = jnp.take_along_axis(weights[site.name], row, axis=0)[0]
            moved = (values + 1) % site.num_values
            other[site.name] = jnp.where(changed[site.name], moved, values)
        before, after = (_log_weights(run, sites, values) for values in (first, other))
        apart = [
            (changed[s.name] & s.mask) | _is_close(before[s.name], after[s.name]) for s in sites
        ]
        apart += [_is_close(before[name], found[name], OTHER_SHAPE) for name in found]
        return jnp.stack([places.all() for places in apart]).all()

    def _constant(self) -> tuple[ModelAtValues, list[DiscreteSite]]:
        """The model and its sites, constant for the gradient."""
        sites = [replace(s, log_prior=lax.stop_gradient(s.log_prior)) for s in self.sites]
        return self.run.without_gradients(), sites

    def _select(self, chosen: list[DiscreteSite]) -> dict[str, Array]:
        """Go through the values by chunks, and keep the best so far for each z."""
        run, sites = self._constant()

        def weights_of(k: Array) -> dict[str, Array]:
            index = {s.name: jnp.minimum(k, s.num_values - 1) for s in sites}
            index = {s.name: self._everywhere(s, index[s.name][None])[0] for s in sites}
            weights = lax.stop_gradient(_log_weights(run, sites, index))
            return {s.name: _if_value(k < s.num_values, weights[s.name]) for s in chosen}

        def keep_best(best: dict[str, Any], ks: Array) -> tuple[dict[str, Any], None]:
            new = jax.vmap(weights_of)(ks)
            return {n: _merge(best[n], new[n], ks) for n in best}, None

        most = max(site.num_values for site in chosen)
        num_chunks = -(-most // self.chunk)
        ks = jnp.arange(num_chunks * -(-most // num_chunks), dtype=jnp.int32)
        dtypes = {n: w.dtype for n, w in jax.eval_shape(weights_of, ks[0]).items()}
        start = {
            s.name: (
                jnp.full((*s.batch_shape, s.num_active), -jnp.inf, dtypes[s.name]),
                jnp.zeros((*s.batch_shape, s.num_active), jnp.int32),
            )
            for s in chosen
        }
        best, _ = lax.scan(keep_best, start, ks.reshape(num_chunks, -1))
        return {name: jnp.moveaxis(index, -1, 0) for name, (_, index) in best.items()}

    def _everywhere(self, site: DiscreteSite, index: Array) -> Array:
        """Index (L,) of values that are the same at all places, for a run of the model."""
        shape = (1,) * len(site.batch_shape) if self.broadcasts else site.batch_shape
        return jnp.broadcast_to(index.reshape(-1, *(1,) * len(shape)), (len(index), *shape))

    def _can_broadcast(self) -> bool:
        """Whether the model takes values with axes of length one in place of plates.

        What a value needs, such as a covariance, is then there once, and not at every place.
        """
        first = {site.name: self._everywhere(site, jnp.zeros(1, int))[0] for site in self.sites}
        try:
            jax.eval_shape(lambda: _log_weights(self.run, self.sites, first))
        except Exception:
            # All of them: models and their libraries refuse shapes by exceptions of their own. They
            # are run with whole values then, where what is wrong with the model itself is raised.
            return False
        return True


def _log_weights(
    run: ModelAtValues, sites: list[DiscreteSite], index: dict[str, Array]
) -> dict[str, Array]:
    """Log weights (batch shape) of one value for each z, that at the index of its site."""
    model_trace = run.trace({site.name: site.support[index[site.name]] for site in sites})
    return {
        site.name: site.log_prior_at(index[site.name]) + site.log_likelihood(model_trace)
        for site in sites
    }


def _if_value(is_value: Array, weights: Array) -> Array:
    """Weights of a value; -inf, which is less than that of any value, where there is none."""
    return jnp.where(is_value, jnp.maximum(weights, float(np.finfo(weights.dtype).min)), -jnp.inf)


def _is_close(a: Array, b: Array, tolerance: float = LOG_WEIGHT_TOLERANCE) -> Array:
    """Whether log weights agree but for rounding; one that is NaN shows in the loss itself.

    The usual size is a geometric mean, so that a few outliers do not make all others agree.
    """
    size = jnp.where(jnp.isfinite(a), jnp.abs(a), 0)
    usual = jnp.exp(jnp.log1p(size).mean())
    is_near = jnp.abs(a - b) <= tolerance * (size + usual)
    return is_near | (a == b) | (jnp.isnan(a) & jnp.isnan(b))


def _merge(best: tuple[Array, Array], new: Array, ks: Array) -> tuple[Array, Array]:
    """Best of the best so far (..., L), and new weights (C, ...) of values ``ks`` (C,)."""
    new = jnp.moveaxis(new, 0, -1)
    weights = jnp.concatenate([new, best[0]], axis=-1)
    index = jnp.concatenate([jnp.broadcast_to(ks, new.shape), best[1]], axis=-1)
    kept = largest(weights, best[0].shape[-1])
    return take_last(weights, kept), take_last(index, kept)
