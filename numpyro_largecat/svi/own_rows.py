# SPDX-License-Identifier: Apache-2.0
"""Whether values change with rows of plates that they are not in, by draws of half of the rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

import jax
import jax.numpy as jnp
from jax import Array, random

from numpyro_largecat.handlers.sites import Site, Sites, plates_of
from numpyro_largecat.svi.weighted_rows import as_number, axis_of

Values = dict[str, Array]  # by site


def moved_by_other_rows(
    rng_key: Array,
    sizes: dict[str, int],
    latent: Sites,
    drawn: Values,
    computed: Sites,
    sites_at: Callable[[Values], Sites],
) -> dict[str, Array]:
    """Of each computed site, whether rows of some plates that are not its own move it.

    A random half of the rows of each plate gets other values, and then the other half.

    Args:
        rng_key: Of the halves.
        sizes: Numbers of rows of the plates, by name.
        latent: Sites in these plates, at their values.
        drawn: Other values of them.
        computed: Sites whose values are asked for.
        sites_at: The sites of the model at such values.
    """
    if not computed or not latent:
        return dict.fromkeys(computed, jnp.array(False))
    keys = random.split(rng_key, len(sizes))
    are_kept = {
        plate: random.permutation(key, jnp.arange(size) < size // 2)
        for key, (plate, size) in zip(keys, sizes.items(), strict=True)
    }
    everything = {plate: jnp.ones_like(half) for plate, half in are_kept.items()}
    others = {plate: ~half for plate, half in are_kept.items()}
    kept = jax.tree.map(lambda *x: jnp.stack(x), everything, are_kept, others)

    def values(kept: dict[str, Array]) -> Values:
        mixed = {
            name: jnp.where(_at(site, kept), site["value"], drawn[name])
            for name, site in latent.items()
        }
        sites = sites_at(mixed)
        return {name: as_number(sites[name]["value"]) for name in computed}

    found = jax.vmap(values)(kept)  # the same arithmetic for all
    moved = {}
    for name, site in computed.items():
        first, *mixed = found[name]
        asked = [_at(site, half) for half in (are_kept, others)]
        differs = [_differ(first, x) & where for x, where in zip(mixed, asked, strict=True)]
        moved[name] = jnp.stack([x.any() for x in differs]).any()
    return moved


def _at(site: Site, kept: dict[str, Array]) -> Array:
    """Where the rows of a site are kept in all of its plates; broadcasts to its values."""
    of_plates = [
        rows.reshape(-1, *(1,) * (-1 - axis_of(site, plate)))
        for plate, rows in kept.items()
        if plate in plates_of(site)
    ]
    return reduce(jnp.logical_and, of_plates, jnp.array(True))


def _differ(a: Array, b: Array) -> Array:
    are_same = (a == b) | ((a != a) & (b != b))
    if not jnp.issubdtype(a.dtype, jnp.inexact):
        return ~are_same
    gap, size = jnp.abs(a - b), jnp.minimum(jnp.abs(a), jnp.abs(b))
    return ~(are_same | (gap <= 100 * jnp.finfo(gap.dtype).eps * size))
