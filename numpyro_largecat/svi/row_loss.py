# SPDX-License-Identifier: Apache-2.0
"""The loss of a step as a function of gathered rows; on its way it moves local parameters."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax, random
from numpyro.handlers import block, substitute

from numpyro_largecat._checks import describe
from numpyro_largecat.choices.update_rules import Followed
from numpyro_largecat.handlers.both_words import draw_by_both_words
from numpyro_largecat.handlers.note_draws import Noted, note_draws, replay_keys
from numpyro_largecat.handlers.one_at_a_time import MODEL_RUNS
from numpyro_largecat.handlers.run_model import as_drawn, at_centre, at_values_of, sites_of
from numpyro_largecat.handlers.shared_rows import share_rows
from numpyro_largecat.handlers.single_entries import single_entries
from numpyro_largecat.handlers.sites import Site, Sites, mutable_values, param_options
from numpyro_largecat.handlers.touched_rows import TouchedRows
from numpyro_largecat.svi.plan import Plan
from numpyro_largecat.svi.state import RuledParam


@dataclass
class _Particle:
    """What one particle has on its way through guide and model."""

    values: dict[str, Any]  # of parameters and of mutable sites
    moved: dict[str, RuledParam]  # local parameters
    drawn: dict[str, Noted] = field(default_factory=dict)  # latent sites
    guide_keys: list[Array | None] = field(default_factory=list)  # of dropout and the like
    model_keys: list[Array | None] = field(default_factory=list)
    at_centre: dict[Any, dict[str, Array]] = field(default_factory=dict)

    def rows_of(self, plate: str) -> frozenset[str]:
        """Latent sites that are known to be in a plate so far."""
        return frozenset(name for name, site in self.drawn.items() if plate in site.plates)

    def seen(self, plate: str) -> tuple[Any, ...]:
        """Key of ``at_centre``: a class plate, its sites, and how much else has been drawn."""
        return plate, self.rows_of(plate), len(self.drawn), len(self.model_keys)


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
        values, model, guide = self.at_rows(params)
        run = partial(sites_of, args=self.args, kwargs=self.kwargs)
        guide_sites = run(guide, rng_key=guide_key, params=values, around=as_drawn)
        values |= mutable_values(guide_sites)
        around = at_values_of(guide_sites)
        return guide_sites, run(model, rng_key=model_key, params=values, around=around)

    def at_rows(self, params: Any) -> tuple[dict[str, Any], Any, Any]:
        """Values of parameters at these rows, and the model and the guide that take them."""
        values = self._values(params) | (self.mutable_state or {})
        return values, *self._around(_Particle(values, dict(self.local_rows)))

    def _particle(
        self, elbo: Any, values: dict[str, Any], rng_key: Array
    ) -> tuple[Array, tuple[Any, dict[str, RuledParam]]]:
        mutable_state = lax.stop_gradient(self.mutable_state or {})
        particle = _Particle(values | mutable_state, dict(self.local_rows))
        model, guide = self._around(particle)
        if not jax.tree.leaves(self.mutable_state):
            with MODEL_RUNS:
                loss = elbo.loss(rng_key, values, model, guide, *self.args, **self.kwargs)
            return loss, (self.mutable_state, particle.moved)
        with MODEL_RUNS:
            result = elbo.loss_with_mutable_state(
                rng_key, particle.values, model, guide, *self.args, **self.kwargs
            )
        return result["loss"], (result["mutable_state"], particle.moved)

    def _around(self, particle: _Particle) -> tuple[Any, Any]:
        """Model and guide, with handlers that move the local parameters and note what is drawn."""
        move = partial(self._move_local, particle)
        model, guide = (
            share_rows(
                note_draws(fn, particle.drawn, keys),
                self.touched,
                gathered=self.plan.stored.__contains__,
                lookup=move,
            )
            for fn, keys in (
                (self.plan.model, particle.model_keys),
                (self.plan.guide, particle.guide_keys),
            )
        )
        return model, draw_by_both_words(guide)

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
            need = "a function of the parameter and of a distance, for its update rule"
            raise TypeError(f"`statistic` of param '{name}' must be {need}; got {statistic!r}.")
        distance = jnp.zeros(())
        if follow is not None:
            # Constant for the gradient: the centre moves with the draw, so that only the distance
            # counts, and a parameter that lags must not push latent values through it.
            distance = lax.stop_gradient(self._distance(particle, name, follow))
            # There is none of a class that is not available, or around an infinite mean.
            distance = jnp.where(jnp.isfinite(distance), distance, 0)
        moved = param.rule.update(value, state, lambda value: statistic(value, distance))
        new = lax.stop_gradient(_checked_move(name, value, state, moved))
        particle.moved[name] = jax.tree.map(lambda x: param.merge(x, self.touched), new)
        return new.value if follow is None else follow.at_distance(new.value, distance)

    def _distance(self, particle: _Particle, name: str, follow: Followed) -> Array:
        """How far what a local parameter follows is from the centre of the guide."""
        own_at_centre: dict[str, Array] = {}
        if follow.own is not None:
            own_at_centre = self._own_at_centre(particle, follow.plate)
        at_centre = self._labels_at_centre(particle, follow.plate, own_at_centre)
        if name not in at_centre:
            return jnp.zeros(())
        drawn = jnp.take_along_axis(follow.values, follow.entry[..., None], axis=-1)
        distance = drawn[..., 0] - at_centre[name]
        if follow.own is None or name not in own_at_centre:
            return distance
        moved = follow.own.drawn - own_at_centre[name]
        return distance - (follow.own.slopes * moved).sum(axis=-1)

    def _labels_at_centre(
        self, particle: _Particle, plate: str, own_at_centre: dict[str, Array]
    ) -> dict[str, Array]:
        """Entries that local parameters follow, with a class plate and own values at the centre.

        All else stays as drawn: it may move all classes alike, which the likelihood does not see,
        so local parameters must not follow it.
        """

        def values_of(name: str, follow: Followed) -> Array:
            if follow.own is None or name not in own_at_centre:
                return follow.values
            return follow.own.values_at(own_at_centre[name])

        def entries(followed: Callable[[], dict[str, Followed]]) -> dict[str, Array]:
            return single_entries(
                lambda: {name: (values_of(name, f), f.entry) for name, f in followed().items()}
            )

        what = "labels", *own_at_centre
        return self._at_centre(particle, plate, what, particle.rows_of(plate), entries)

    def _own_at_centre(self, particle: _Particle, plate: str) -> dict[str, Array]:
        """Own values of observations that local parameters follow, with all at the centre."""

        def own(followed: Callable[[], dict[str, Followed]]) -> dict[str, Array]:
            return {name: f.own.drawn for name, f in followed().items() if f.own is not None}

        # Sites that have no centre stay as drawn.
        drawn = {name: site.value for name, site in particle.drawn.items()}
        moved = frozenset(drawn)
        return self._at_centre(particle, plate, ("own",), moved, own, otherwise=drawn)

    def _at_centre(
        self,
        particle: _Particle,
        plate: str,
        what: tuple[str, ...],
        moved: frozenset[str],
        read: Callable[[Callable[[], dict[str, Followed]]], dict[str, Array]],
        otherwise: dict[str, Any] | None = None,
    ) -> dict[str, Array]:
        """What is ``read`` of local parameters of a plate, with some sites at the guide's centre.

        Once for ``what`` that is. Nothing if one of these has no centre, and no value in
        ``otherwise``.
        """
        key = what, *particle.seen(plate)
        if key not in particle.at_centre:
            # What runs inside asks for keys too, and `block` lets these messages through.
            known = replace(particle, model_keys=[*particle.model_keys])
            try:
                followed = self._followed_at_centre(known, plate, moved, otherwise)
                particle.at_centre[key] = read(followed)
            except NotImplementedError:
                particle.at_centre[key] = {}
            particle.model_keys[:] = known.model_keys
        return particle.at_centre[key]

    def _followed_at_centre(
        self,
        particle: _Particle,
        plate: str,
        moved: frozenset[str],
        otherwise: dict[str, Any] | None,
    ) -> Callable[[], dict[str, Followed]]:
        """A function that runs the model, with some sites at the centre and others as drawn."""
        drawn = {name: site.value for name, site in particle.drawn.items()}
        # Statements move mutable values in place: start at those from before the step again.
        values = particle.values | (self.mutable_state or {})
        values, drawn = lax.stop_gradient((values, drawn))
        values = values | {n: self._spread(n, local.value) for n, local in self.local_rows.items()}
        others = {name: value for name, value in drawn.items() if name not in moved}

        def run(fn: Any, keys: list[Array | None], values: dict[str, Any], around: Any) -> Sites:
            fn = share_rows(fn, self.touched, gathered=self.plan.stored.__contains__)
            known = {"rng_key": self.step_key, "params": values, "around": around}
            with block():  # the model is running
                return sites_of(replay_keys(fn, keys), self.args, self.kwargs, **known)

        def some_at_centre(guide: Any) -> Any:
            guide = at_centre(guide, lambda site: site["name"] in moved, otherwise)
            return substitute(guide, data=others)

        guide_sites = run(self.plan.guide, particle.guide_keys, values, some_at_centre)
        values |= mutable_values(guide_sites)
        of_model = {name: value for name, value in drawn.items() if name not in guide_sites}

        def at_values(model: Any) -> Any:
            return substitute(at_values_of(guide_sites)(model), data=of_model)

        def followed() -> dict[str, Followed]:
            sites = run(self.plan.model, particle.model_keys, values, at_values)
            found = {name: param_options(sites[name]).follow for name in self.local_rows}
            return {n: f for n, f in found.items() if f is not None and f.plate == plate}

        return followed

    def _values(self, params: Any) -> dict[str, Any]:
        """Constrained values of rows, as model and guide see them."""
        return {n: self.plan.stored[n].value(rows, self.touched) for n, rows in params.items()}

    def _spread(self, name: str, stored: Array) -> Array:
        return self.plan.stored[name].spread(stored, self.touched)


def _checked_move(name: str, value: Array, state: Any, moved: Any) -> RuledParam:
    """What an update rule gave, which must have the form of what it got."""
    need = f"`update_rule` of param '{name}' must return the moved rows and their state"
    if not isinstance(moved, tuple | list) or len(moved) != 2:
        raise TypeError(f"{need}, a pair; got {describe(moved)}.")
    new = RuledParam(*moved)
    wanted, got = _form((value, state)), _form(tuple(new))
    if wanted != got:
        raise ValueError(f"{need} in the form that it got, {wanted}; got {got}.")
    return new


def _form(tree: Any) -> str:
    """Structure of a tree, and shapes and kinds of its leaves."""
    leaves, structure = jax.tree.flatten(tree)
    each = (f"{_kind(leaf)} {jnp.shape(leaf)}" for leaf in leaves)
    return f"{', '.join(each)} in {structure}"


def _kind(leaf: Any) -> str:
    dtype = jnp.result_type(leaf)
    kinds = {"floats": jnp.floating, "integers": jnp.integer}
    return next((name for name, of in kinds.items() if jnp.issubdtype(dtype, of)), str(dtype))


def _mean(values: Array) -> Array:
    """Mean over particles; the largest of integers, such as counts of visits."""
    is_integer = jnp.issubdtype(values.dtype, jnp.integer)
    return values.max(axis=0) if is_integer else values.mean(axis=0)
