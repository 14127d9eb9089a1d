# SPDX-License-Identifier: Apache-2.0
"""The loss of a step as a function of gathered rows; on its way it moves local parameters."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax, random
from numpyro.handlers import block, substitute

from numpyro_largecat.handlers.note_latent import Noted, note_latent
from numpyro_largecat.handlers.run_model import as_drawn, at_centre, at_values_of, sites_of
from numpyro_largecat.handlers.shared_rows import share_rows
from numpyro_largecat.handlers.single_entries import single_entries
from numpyro_largecat.handlers.sites import Site, Sites, param_options
from numpyro_largecat.handlers.touched_rows import TouchedRows
from numpyro_largecat.svi.plan import Plan
from numpyro_largecat.svi.state import RuledParam


@dataclass
class _Particle:
    """What one particle has on its way through guide and model."""

    values: dict[str, Any]  # of parameters and of mutable sites
    moved: dict[str, RuledParam]  # local parameters
    noted: dict[str, Noted] = field(default_factory=dict)  # latent sites
    at_centre: dict[str, dict[str, Array]] = field(default_factory=dict)  # by class plate


@dataclass(frozen=True, eq=False)
class RowLoss:
    """Negative ELBO of one step, as a function of unconstrained rows of the parameters."""

    plan: Plan
    touched: TouchedRows
    step_key: Array
    args: Any
    kwargs: Any
    mutable_state: Any
    local_rows: dict[str, RuledParam]  # gathered rows of parameters with an update rule

    def __call__(self, params: Any) -> tuple[Array, tuple[Any, dict[str, RuledParam]]]:
        """Negative ELBO at these rows.

        Local parameters are moved by their rules on the way, before the likelihood uses them. Each
        particle moves them on its own, and the mean of the results is kept.

        Returns:
            The loss; and the new mutable state and the moved rows of the local parameters.
        """
        values = self._values(params)
        elbo = self.plan.loss
        if not self.local_rows or elbo.num_particles == 1:
            return self._particle(elbo, values, self.step_key)
        single = copy(elbo)
        single.num_particles = 1
        losses, (mutable_state, moved) = elbo.vectorize_particles_fn(
            partial(self._particle, single, values),
            random.split(self.step_key, elbo.num_particles),
        )
        moved = jax.tree.map(lambda x, old: _mean(x).astype(old.dtype), moved, self.local_rows)
        return losses.mean(), (jax.tree.map(lambda x: x[0], mutable_state), moved)

    def sites(self, params: Any) -> tuple[Sites, Sites]:
        """Sites of the guide and of the model in this step, at what the first particle draws."""
        num_particles = self.plan.loss.num_particles
        key = random.split(self.step_key, num_particles)[0] if num_particles > 1 else self.step_key
        model_key, guide_key = random.split(key)
        values = self._values(params) | (self.mutable_state or {})
        model, guide = self._around(_Particle(values, dict(self.local_rows)))
        run = partial(sites_of, args=self.args, kwargs=self.kwargs, params=values)
        guide_sites = run(guide, rng_key=guide_key, around=as_drawn)
        return guide_sites, run(model, rng_key=model_key, around=at_values_of(guide_sites))

    def _particle(
        self, elbo: Any, values: dict[str, Any], rng_key: Array
    ) -> tuple[Array, tuple[Any, dict[str, RuledParam]]]:
        mutable_state = lax.stop_gradient(self.mutable_state or {})
        particle = _Particle(values | mutable_state, dict(self.local_rows))
        model, guide = self._around(particle)
        if not jax.tree.leaves(self.mutable_state):
            loss = elbo.loss(rng_key, values, model, guide, *self.args, **self.kwargs)
            return loss, (self.mutable_state, particle.moved)
        result = elbo.loss_with_mutable_state(
            rng_key, particle.values, model, guide, *self.args, **self.kwargs
        )
        return result["loss"], (result["mutable_state"], particle.moved)

    def _around(self, particle: _Particle) -> tuple[Any, Any]:
        """Model and guide, with handlers that move the local parameters and note what is drawn."""
        move = partial(self._move_local, particle)
        model, guide = (
            share_rows(
                note_latent(fn, particle.noted),
                self.touched,
                gathered=self.plan.stored.__contains__,
                lookup=move,
            )
            for fn in (self.plan.model, self.plan.guide)
        )
        return model, guide

    def _move_local(self, particle: _Particle, msg: Site) -> Array | None:
        """Value of a local parameter for its ``numpyro.param`` statement, moved by its rule."""
        name = msg["name"]
        if name not in self.local_rows:
            return None
        param = self.plan.stored[name]
        assert param.rule is not None
        value, state = jax.tree.map(partial(self._spread, name), self.local_rows[name])
        _, _, _, statistic, follow = param_options(msg)
        if not callable(statistic):
            need = "a function of the parameter and of its shift, for its update rule"
            raise TypeError(f"`statistic` of param '{name}' must be {need}; got {statistic!r}.")
        shift = jnp.zeros_like(value)
        if follow is not None:
            at_centre = self._followed_at_centre(particle, follow.plate)
            if name in at_centre:
                # Constant for the gradient: the centre moves with the draw, so that only the
                # distance counts, and a parameter that lags must not push latent values through it.
                entry = follow.entry[..., None]
                drawn = jnp.take_along_axis(lax.stop_gradient(follow.values), entry, axis=-1)
                shift = follow.shift(value, drawn[..., 0] - at_centre[name])
        new = RuledParam(*param.rule.update(value, state, lambda value: statistic(value, shift)))
        new = lax.stop_gradient(new)
        particle.moved[name] = jax.tree.map(lambda x: param.merge(x, self.touched), new)
        return new.value + shift

    def _followed_at_centre(self, particle: _Particle, plate: str) -> dict[str, Array]:
        """What local parameters follow, with the rows of a class plate at the guide's centre.

        All else stays as drawn: it may move all classes alike, which the likelihood does not see,
        so local parameters must not follow it. Nothing if the rows have no centre.
        """
        if plate in particle.at_centre:
            return particle.at_centre[plate]
        noted = {name: site.value for name, site in particle.noted.items()}
        rows = {name for name, site in particle.noted.items() if plate in site.plates}
        values, noted = lax.stop_gradient((particle.values, noted))
        values = values | {n: self._spread(n, local.value) for n, local in self.local_rows.items()}
        others = {name: value for name, value in noted.items() if name not in rows}

        def run(fn: Any, around: Any) -> Sites:
            fn = share_rows(fn, self.touched, gathered=self.plan.stored.__contains__)
            known = {"rng_key": self.step_key, "params": values, "around": around}
            with block():  # the model is running
                return sites_of(fn, self.args, self.kwargs, **known)

        def rows_at_centre(guide: Any) -> Any:
            return substitute(at_centre(guide, lambda site: site["name"] in rows), data=others)

        def followed() -> dict[str, tuple[Array, Array]]:
            sites = run(self.plan.model, at_values_of(guide_sites))
            found = {name: param_options(sites[name]).follow for name in self.local_rows}
            of_plate = {n: f for n, f in found.items() if f is not None and f.plate == plate}
            return {name: (f.values, f.entry) for name, f in of_plate.items()}

        try:
            guide_sites = run(self.plan.guide, rows_at_centre)
        except NotImplementedError:
            particle.at_centre[plate] = {}
        else:
            particle.at_centre[plate] = single_entries(followed)
        return particle.at_centre[plate]

    def _values(self, params: Any) -> dict[str, Any]:
        """Constrained values of rows, as model and guide see them."""
        return {n: self.plan.stored[n].value(rows, self.touched) for n, rows in params.items()}

    def _spread(self, name: str, stored: Array) -> Array:
        return self.plan.stored[name].spread(stored, self.touched)


def _mean(values: Array) -> Array:
    """Mean over particles; the largest of integers, such as counts of visits."""
    is_integer = jnp.issubdtype(values.dtype, jnp.integer)
    return values.max(axis=0) if is_integer else values.mean(axis=0)
