# SPDX-License-Identifier: Apache-2.0
"""Guide and model at one draw of the dense sites, and any draws of the rows of a plate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, random
from jax.scipy.special import logsumexp
from numpyro.util import check_model_guide_match

from numpyro_largecat._checks import UnsuitedModelError, is_concrete
from numpyro_largecat.handlers.internals import check_model_trace
from numpyro_largecat.handlers.new_draws_of_rows import new_draws_of_rows
from numpyro_largecat.handlers.run_model import Around, as_drawn, at_values_of, sites_of
from numpyro_largecat.handlers.sites import Sites, is_latent, plates_of
from numpyro_largecat.svi.own_rows import Values, moved_by_other_rows
from numpyro_largecat.svi.weighted_rows import Terms, as_number, terms_of, weighted_rows


class Bad(NamedTuple):
    """What the numbers show of a model that the bound is not for."""

    are_scaled: Array
    follows_rows: Array  # in the model
    guide_follows_rows: Array

    @property
    def any(self) -> Array:
        """Whether anything is bad."""
        return jnp.stack(self).any()

    def refuse(self, plate: str) -> None:
        """Say what is bad, where it is known.

        Raises:
            UnsuitedModelError: If anything is, outside of ``jit``.
        """
        found = {
            "are_scaled": f"something of the rows of plate '{plate}' has not the weight of a "
            "minibatch with all that is observed of them: it lacks some, has one of them in "
            "several rows, or is in no plate that says how many there are; or a handler `scale` is "
            "around. Give the model arrays with one row for each row of the plate, padded and "
            "masked, in an `lc.data_plate`.",
            "follows_rows": f"something of a row of plate '{plate}' depends on other rows, or what "
            "is outside depends on any, so that rows cannot be weighted one by one. Observations "
            "must be inside of the plate or, of an entity plate, in one with a single id for each "
            "row, in the order of its `ids`.",
            "guide_follows_rows": f"the guide draws rows of plate '{plate}' that depend on each "
            "other, or what is outside depends on them, so that rows cannot be weighted one by "
            "one. Take AutoNormal; or AutoRowNormal with an `lc.entity_plate`, since values of "
            "plain plates that hold all of their rows are dense to it.",
        }
        for what, is_bad in self._asdict().items():
            if is_concrete(is_bad) and is_bad.any():
                raise UnsuitedModelError(found[what])


class WeightedRun:
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
        keys = random.split(rng_key, 5)
        self.model_key, self.guide_key, self.row_key, self.half_key, first_key = keys
        self.of_guide = self._guide_sites(first_key)
        self.of_model = self._model_sites({})
        self.rows = weighted_rows(plate, self.of_model, self.of_guide)
        check_model_guide_match(self.of_model, self.of_guide)
        check_model_trace(self.of_model)

    def elbo(self, num_draws: int) -> Array:
        """The bound at this draw of the dense sites."""
        weights, dense, _ = self._weighted_draws(num_draws)
        bounds = logsumexp(weights, axis=0) - jnp.log(num_draws)
        return dense[0] + self.rows.scale * bounds.sum()

    def resampled(self, rng_key: Array, num_draws: int) -> tuple[Values, Array, dict[str, Array]]:
        """This draw of the dense sites, and of each row one of several, by its weight.

        Returns:
            Values of the latent and deterministic sites by name; how many of the draws count, of
            each row; and of each deterministic site whether rows that are not its own move it.

        Raises:
            ValueError: If the plate draws its rows.
        """
        self.rows.check_are_given()
        weights, _, draws = self._weighted_draws(num_draws)
        draw_of_row = random.categorical(rng_key, weights, axis=0)
        are_known = jnp.isfinite(logsumexp(weights, axis=0))
        inside = {
            name: self.rows.each_from(draw_of_row, self.of_guide[name], of_site)
            for name, of_site in draws.items()
        }
        sites = self._model_sites(inside)
        latent = {n: s for n, s in sites.items() if is_latent(s) and n in self.of_guide}
        computed = self.rows.deterministic(sites)
        moved = self._moved(computed, sites, [self.plate])
        if self.rows.are_all_in_order:
            moved = {name: moves & ~are_known.all() for name, moves in moved.items()}
        by_others = self._moved(computed, sites, self.rows.others_in_part(sites))
        moved = {name: moves | by_others[name] for name, moves in moved.items()}
        values = {
            name: self.rows.as_read(are_known, site, as_number(site["value"]))
            for name, site in (latent | computed).items()
        }
        effective = 1 / (jax.nn.softmax(weights, axis=0) ** 2).sum(axis=0)
        read = self.rows.read.get(self.plate)
        return values, effective if read is None else read.in_order(effective, 0), moved

    def _moved(self, computed: Sites, sites: Sites, plates: list[str]) -> dict[str, Array]:
        """Whether deterministic sites change with rows of these plates that they are not in."""
        draw_key, half_key = random.split(self.half_key)
        fn = self.guide
        for i, plate in enumerate(plates):
            fn = new_draws_of_rows(fn, plate, random.fold_in(draw_key, i))
        known = {n: s for n, s in sites.items() if is_latent(s) and n in self.of_guide}
        latent = {n: s for n, s in known.items() if plates_of(s) & set(plates)}
        again = self._sites(fn, self.guide_key, as_drawn)
        drawn = {name: again[name]["value"] for name in latent}
        sizes = {plate: len(sites[plate]["value"]) for plate in plates}
        given = {name: site["value"] for name, site in known.items()}

        def sites_at(values: Values) -> Sites:
            return self._model_sites(given | values)

        return moved_by_other_rows(half_key, sizes, latent, drawn, computed, sites_at)

    def _half_of_rows(self) -> Array:
        num_rows = self.rows.num_rows
        return random.permutation(self.half_key, jnp.arange(num_rows) < num_rows // 2)

    def bad(self) -> Bad:
        """Compare two draws of the rows that have half of them in common.

        What belongs to these, and to no row, must be the same.
        """
        inside, outside = jax.vmap(self._draw)(random.split(self.row_key))
        is_same = self._half_of_rows()
        for name, (first, other) in inside.items():
            mixed = self.rows.choose(is_same, self.of_guide[name], first, other)
            inside[name] = jnp.stack([first, mixed])
        of_guide, of_model = jax.vmap(self._terms)(inside)
        outside_moves = [(value[0] != value[1]).any() for value in outside.values()]
        return Bad(
            self.rows.are_scaled(self.of_model) | self.rows.are_scaled(self.of_guide),
            self.rows.differ(self.of_model, of_model, is_same),
            self.rows.differ(self.of_guide, of_guide, is_same)
            | jnp.array(outside_moves, bool).any(),
        )

    def _draw(self, row_key: Array) -> tuple[dict[str, Array], dict[str, Array]]:
        """What the guide draws inside of the plate, and outside."""
        return self.rows.latent_values(self._guide_sites(row_key))

    def _weighted_draws(self, num_draws: int) -> tuple[Array, Array, dict[str, Array]]:
        """Log weights of the rows, (M, R), log ratios of the dense sites, and the draws."""
        return jax.vmap(self._weighted_draw)(random.split(self.row_key, num_draws))

    def _weighted_draw(self, row_key: Array) -> tuple[Array, Array, dict[str, Array]]:
        drawn = self._guide_sites(row_key)
        inside, _ = self.rows.latent_values(drawn)
        sites = self._model_sites(inside)
        of_model, of_guide = (terms_of(s) for s in (sites, drawn))
        weights = self.rows.of_rows(sites, of_model) - self.rows.of_rows(drawn, of_guide)
        dense = self.rows.elsewhere(sites, of_model) - self.rows.elsewhere(drawn, of_guide)
        return weights, dense, inside

    def _terms(self, values: dict[str, Array]) -> tuple[Terms, Terms]:
        """Log densities of guide and model at these rows."""
        guide_sites = self._guide_sites(self.row_key, self._at_rows(values))
        return terms_of(guide_sites), terms_of(self._model_sites(values))

    def _guide_sites(self, row_key: Array, around: Around = as_drawn) -> Sites:
        """Sites of the guide, the rows drawn by a key of their own."""
        fn = new_draws_of_rows(self.guide, self.plate, row_key)
        return self._sites(fn, self.guide_key, around)

    def _model_sites(self, values: dict[str, Array]) -> Sites:
        """Sites of the model at the draw of the guide, but for these values of rows."""
        return self._sites(self.model, self.model_key, self._at_rows(values))

    def _sites(self, fn: Callable[..., Any], key: Array, around: Around) -> Sites:
        params = self.params
        return sites_of(fn, self.args, self.kwargs, rng_key=key, params=params, around=around)

    def _at_rows(self, values: dict[str, Array]) -> Around:
        drawn = {name: {**self.of_guide[name], "value": value} for name, value in values.items()}
        return at_values_of(self.of_guide | drawn)
