# SPDX-License-Identifier: Apache-2.0
"""Posterior draws of a variational fit as an ArviZ object."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike
from numpy.typing import NDArray

from numpyro_largecat.handlers.closed_over_arrays import compiled
from numpyro_largecat.reading.arviz_coords import (
    dims_of,
    labels_of_shown,
    lengths_of,
    refuse_two_readings,
    refuse_unknown_dims,
)
from numpyro_largecat.reading.bound_fit import BoundFit
from numpyro_largecat.reading.chunked_utilities import ChunkedUtilities
from numpyro_largecat.reading.deterministic_sites import DeterministicSites
from numpyro_largecat.reading.model_layout import ModelLayout, layout_of_model
from numpyro_largecat.reading.posterior_draws import draw_sites
from numpyro_largecat.reading.predictions import draw_choices, labels_of_rows, log_likelihood
from numpyro_largecat.reading.shown_rows import (
    SMALL_PLATE,
    ShownRows,
    are_labels,
    named_rows,
    rows_to_show,
    rows_to_show_with,
    small_plates,
)

Groups = dict[str, dict[str, NDArray[Any]]]


def to_arviz(
    fit: BoundFit,
    keys: Array,
    obs: ArrayLike | None,
    *,
    rows: Mapping[str, Any],
    coords: Mapping[str, Sequence[Any]],
    dims: Mapping[str, Sequence[str]],
    constant_data: Mapping[str, ArrayLike],
    losses: ArrayLike | None,
) -> Any:
    """Make the object, with one draw for each key; see ``Reading.to_arviz``."""
    layout = layout_of_model(fit)
    labels = {name: np.asarray(values) for name, values in coords.items()}
    named = named_rows(rows, layout.sizes, labels)
    choice, shown = _choice_and_rows(fit, obs, named, layout)
    constants, constant_dims = _constants(constant_data, losses, dims)
    site_dims: dict[str, list[str]] = {}

    draw_latent = partial(draw_sites, fit, layout, shown, choice)
    computed = DeterministicSites.of(fit, layout, shown.ids, draw_latent, keys[0])

    def draw(key: Array) -> dict[str, Array]:
        sites = draw_latent(key)
        sites |= computed.values(sites, names=computed.names)
        site_dims.update({name: dims_of(name, site, dims) for name, site in sites.items()})
        return {name: site.value for name, site in sites.items()}

    drawn = jax.eval_shape(draw, keys[0])
    if not drawn:
        raise ValueError(_nothing_to_show(layout))
    refuse_unknown_dims(dims, {*layout.sites, *drawn, *constants})
    shapes = {name: value.shape for name, value in {**drawn, **constants}.items()}
    site_dims |= constant_dims
    if choice is not None and obs is not None:
        site_dims[choice.site] = [n or f"{choice.site}_dim_{i}" for i, n in enumerate(choice.dims)]
        shapes[choice.site] = np.shape(obs)
    by_id = {name: ids for name, ids in named.items() if not are_labels(rows[name])}
    refuse_two_readings(labels, layout.sizes, by_id)
    labels = labels_of_shown(labels, layout.sizes, shown, lengths_of(site_dims, shapes, dims))
    posterior = compiled(lambda keys: lax.map(draw, keys))(keys)
    groups: Groups = {"posterior": {n: np.asarray(v)[None] for n, v in posterior.items()}}
    if choice is not None and obs is not None:
        groups |= _groups_of_choice(choice, obs, keys)
    if constants:
        groups["constant_data"] = constants
    return arviz_from_groups(groups, labels, site_dims)


def _choice_and_rows(
    fit: BoundFit, obs: ArrayLike | None, named: dict[str, Array], layout: ModelLayout
) -> tuple[ChunkedUtilities | None, ShownRows]:
    """The choice that is observed, if one is, and the rows to show."""
    if obs is None:
        return None, rows_to_show(named, layout)
    whole = {name: jnp.arange(size) for name, size in small_plates(layout.sizes).items()}
    choice = ChunkedUtilities.of(fit, whole | named, is_drawn=True)
    return choice, rows_to_show_with(obs, choice, named, layout)


def _nothing_to_show(layout: ModelLayout) -> str:
    sizes = layout.sizes
    of_latent = {frame.name for site in layout.sites.values() for frame in site.frames}
    large = max(of_latent or sizes, key=lambda name: sizes.get(name, 0), default="classes")
    return (
        f"the guide has no latent site to show: those in plates of over {SMALL_PLATE} rows are "
        f"left out, unless `rows` names some, `rows={{'{large}': [0, 1]}}`; they have {sizes}."
    )


def _groups_of_choice(choice: ChunkedUtilities, obs: ArrayLike, keys: Array) -> Groups:
    log_probs = log_likelihood(choice, labels_of_rows(obs, choice), keys)
    predicted = draw_choices(choice, keys, np.shape(obs))
    return {
        "log_likelihood": {choice.site: np.asarray(log_probs)[None]},
        "posterior_predictive": {choice.site: np.asarray(predicted)[None]},
        "observed_data": {choice.site: np.asarray(obs)},
    }


def _constants(
    given: Mapping[str, ArrayLike], losses: ArrayLike | None, dims: Mapping[str, Sequence[str]]
) -> tuple[dict[str, NDArray[Any]], dict[str, list[str]]]:
    """The group of constants, and the names of their dimensions."""
    constants = {name: np.asarray(value) for name, value in given.items()}
    names = {name: list(dims[name]) for name in constants if name in dims}
    if losses is None:
        return constants, names
    return constants | {"elbo": -np.asarray(losses)}, names | {"elbo": ["step"]}


def arviz_from_groups(groups: Any, coords: Any, dims: Any) -> Any:
    """Make the object of the installed ArviZ, whose signature changed with version 1."""
    import arviz as az  # slow to import, so only where it is used

    used = {dim for site_dims in dims.values() for dim in site_dims}
    coords = {name: values for name, values in coords.items() if name in used}
    if int(az.__version__.split(".")[0]) >= 1:
        return az.from_dict(groups, coords=coords, dims=dims)
    return az.from_dict(**groups, coords=coords, dims=dims)
