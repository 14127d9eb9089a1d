# SPDX-License-Identifier: Apache-2.0
"""The discrete latent sites of a model, and what depends on each of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array

from numpyro_largecat.handlers.internals import eval_provenance
from numpyro_largecat.handlers.sites import log_prob_of, mutable_values, unmasked, without_expand
from numpyro_largecat.ops.top_l import take_last
from numpyro_largecat.top_l.discrete_checks import (
    check_active,
    check_dependencies,
    check_estimates,
    check_marks,
    check_plates,
    common_scale,
)
from numpyro_largecat.top_l.marked_sites import is_marked, support_of
from numpyro_largecat.top_l.model_at_values import ModelAtValues


@dataclass(frozen=True)
class DiscreteSite:
    """A discrete latent site z inside its plates, and the sites that depend on it."""

    name: str
    num_active: int
    support: Array  # (K,), its values
    log_prior: Array  # (..., K), log probabilities of the values; broadcasts to the batch in front
    batch_shape: tuple[int, ...]
    axes: frozenset[int]  # axes of its plates, counted from the right
    scale: Any  # of the site and of all that depend on it
    dependents: tuple[str, ...]  # sites whose log density depends on this one
    mask: Any  # broadcasts to the batch shape; False where the value must say nothing
    free: Any  # broadcasts to the batch shape; True where the value says nothing of what is seen

    @property
    def num_values(self) -> int:
        """Number of values K."""
        return self.support.shape[0]

    def log_prior_at(self, index: Array) -> Array:
        """Log prior of the values at ``index``, which broadcasts to the batch shape; masked."""
        log_prior = take_last(self.log_prior, index[..., None])[..., 0]
        return log_prior if self.mask is True else jnp.where(self.mask, log_prior, 0)

    def log_likelihood(self, model_trace: dict[str, Any]) -> Array:
        """Log density of all that depends on each z, shape ``batch_shape``."""
        terms = [self.sum_to_plates(log_prob_of(model_trace[name])) for name in self.dependents]
        return jnp.broadcast_to(sum(terms, start=jnp.zeros(())), self.batch_shape)

    def sum_to_plates(self, array: Array) -> Array:
        """Sum over all axes but those of the plates of z."""
        others = [i for i in range(array.ndim) if i - array.ndim not in self.axes]
        total = array.sum(axis=tuple(others), keepdims=True)
        return total.reshape(total.shape[max(0, array.ndim - len(self.batch_shape)) :])


def find_discrete_sites(
    run: ModelAtValues, model_trace: dict[str, Any], num_active: int | dict[str, int]
) -> list[DiscreteSite]:
    """Describe the discrete sites of a model, given its trace with each at its first value.

    Raises:
        NotImplementedError: If a discrete site cannot be enumerated, or depends on another, or if
            what depends on it does not factorise over the places of its plates.
        ValueError: If a discrete site is not marked, or ``num_active`` does not fit.
    """
    check_marks(model_trace, run.guide_trace)
    names = [name for name, site in model_trace.items() if is_marked(site)]
    supports = {name: support_of(model_trace[name]) for name in names}
    active = check_active(num_active, {name: len(values) for name, values in supports.items()})
    if not names:
        return []
    log_probs, masks = _dependencies(run, {name: model_trace[name]["value"] for name in names})
    check_dependencies(names, log_probs)
    sites = []
    for name in names:
        site = model_trace[name]
        dependents = [s for s, deps in log_probs.items() if name in deps and s != name]
        check_plates(site, [model_trace[s] for s in dependents])
        check_estimates(site, [model_trace[s] for s in dependents])
        fn, mask = unmasked(site["fn"])
        found = DiscreteSite(
            name=name,
            num_active=active[name],
            support=supports[name],
            log_prior=_log_prior(fn),
            batch_shape=fn.batch_shape,
            axes=frozenset(frame.dim for frame in site["cond_indep_stack"]),
            scale=common_scale(site, [model_trace[s] for s in dependents]),
            dependents=tuple(dependents),
            mask=mask,
            free=False,
        )
        seen = [_is_seen(found, model_trace[s]["fn"], masks[s]) for s in dependents]
        is_seen = reduce(jnp.logical_or, seen, jnp.array(False))
        sites.append(replace(found, free=~jnp.logical_and(is_seen, mask)))
    return sites


def _dependencies(
    run: ModelAtValues, values: dict[str, Array]
) -> tuple[dict[str, frozenset[str]], dict[str, frozenset[str]]]:
    """Which discrete sites the log density of each site depends on, and the mask of each."""

    def evaluate(**values: Array) -> tuple[dict[str, Array], dict[str, Any], dict[str, Any]]:
        sites = run.trace(values)
        samples = {name: site for name, site in sites.items() if site["type"] == "sample"}
        return (
            {name: log_prob_of(site) for name, site in samples.items()},
            {name: jnp.asarray(unmasked(site["fn"])[1]) for name, site in samples.items()},
            mutable_values(sites),
        )

    log_probs, masks, mutable = eval_provenance(evaluate, **values)
    for name, deps in mutable.items():
        if any(jax.tree.leaves(deps, is_leaf=lambda x: isinstance(x, frozenset))):
            raise NotImplementedError(
                f"mutable site '{name}' depends on a discrete site, so it has no single new value."
            )
    return log_probs, masks


def _log_prior(fn: dist.Distribution) -> Array:
    """Log probabilities of all values on the last axis, behind the batch of what is expanded."""
    fn = without_expand(fn)
    if isinstance(fn, dist.CategoricalProbs):
        return fn.logits
    if isinstance(fn, dist.CategoricalLogits):
        return jax.nn.log_softmax(fn.logits, axis=-1)
    return jnp.moveaxis(fn.log_prob(fn.enumerate_support(expand=False)), 0, -1)


def _is_seen(site: DiscreteSite, fn: dist.Distribution, mask_depends_on: frozenset[str]) -> Any:
    """Whether a dependent says anything of each z: False where its mask hides it."""
    mask = unmasked(fn)[1]
    if isinstance(mask, bool) or mask_depends_on:
        return mask is not False
    seen = jnp.broadcast_to(mask, fn.batch_shape).astype(jnp.int32)
    return site.sum_to_plates(seen) > 0
