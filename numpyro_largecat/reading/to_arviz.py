# SPDX-License-Identifier: Apache-2.0
"""Posterior draws of a variational fit as an ArviZ object."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike
from numpy.typing import NDArray

from numpyro_largecat._checks import check_count, check_in_range, check_integers
from numpyro_largecat.choices.choice_distribution import is_choice
from numpyro_largecat.choices.error_guides import without_errors
from numpyro_largecat.handlers.chosen_rows import hold_rows, without_training_rows
from numpyro_largecat.handlers.closed_over_arrays import compiled
from numpyro_largecat.handlers.run_model import sites_of
from numpyro_largecat.handlers.sites import is_latent
from numpyro_largecat.handlers.static_arguments import with_jax_arrays
from numpyro_largecat.handlers.touched_rows import PlateRows, TouchedRows
from numpyro_largecat.reading.chunk_checks import check_guide_has_run
from numpyro_largecat.reading.chunked_utilities import ChunkedUtilities, rows_of_whole
from numpyro_largecat.reading.model_layout import LatentSite, ModelLayout, latent_site, layout_of
from numpyro_largecat.reading.predictions import draw_choices_of, labels_of_rows, log_likelihood_of
from numpyro_largecat.svi.stored_params import check_params

SMALL_PLATE = 1000  # plates of at most this many rows are shown whole
NUM_FREQUENT = 10  # classes that are shown of a larger plate where none is named


def to_arviz(
    rng_key: Array,
    model: Callable[..., Any],
    guide: Callable[..., Any],
    params: dict[str, Any],
    *args: Any,
    obs: ArrayLike | None = None,
    site: str = "y",
    plate: str = "classes",
    rows: Mapping[str, ArrayLike | Sequence[Any]] | None = None,
    coords: Mapping[str, Sequence[Any]] | None = None,
    dims: Mapping[str, Sequence[str]] | None = None,
    constant_data: Mapping[str, ArrayLike] | None = None,
    losses: ArrayLike | None = None,
    num_draws: int = 500,
    chunk_size: int = 1024,
    progress_bar: bool = False,
    **kwargs: Any,
) -> Any:
    """Draw from the guide and make an ArviZ object, for all small sites and the rows that you name.

    Plates of at most 1000 rows are shown whole, unless ``rows`` names some. Of a site inside a
    larger plate, such as the weights of 10**6 classes, only the rows that ``rows`` names are drawn;
    if it names none, those of the ten classes that are most frequent in ``obs``, and without
    ``obs`` none. No large table is ever drawn whole.

    **With** ``obs``, the choices of the rows that ``args`` describe, there are also the groups
    ``log_likelihood``, exact and for each observation, ``posterior_predictive`` and
    ``observed_data``, from the same draws as ``posterior``. So ``az.loo``, ``az.compare`` and
    ``az.plot_ppc`` work. ``args`` are then those of ``top_classes``, without observed choices. They
    may describe rows of the training data or others: the coordinate of a data plate holds the ids
    that it is given, and 0, 1, ... without.

    Shapes: the group ``posterior`` has variables of shape (1, num_draws, plates..., event...). The
    dimension of a plate has the plate's name, and its coordinate the names that ``coords`` gives,
    else the row ids. The group ``constant_data`` holds what is given, and ``elbo``, shape (steps,),
    if ``losses`` are given.

    Cost: O(num_draws * rows) time and memory; with ``obs`` O(num_draws * K) time for each
    observation, and memory as ``top_classes`` beside the result.

    Args:
        rng_key: A JAX random key.
        model: The model that was fitted.
        guide: Its guide.
        params: Parameters, as ``SubsampledSVI.get_params`` gives them.
        *args: Arguments of model and guide, such as one batch.
        obs: Observed classes, integers in [0, K).
        site: Name of the choice that ``obs`` observes.
        plate: Name of its class plate.
        rows: The rows to show of a plate, by id, such as ``{"classes": [17, 3]}``, or by label, if
            ``coords`` has one for each row of the plate.
        coords: Labels of dimensions, by name. For the dimension of a plate those of all its rows,
            or of the rows shown; with ``obs`` and without ids, those of the rows of ``obs``.
        dims: Names of the event dimensions of a site, such as ``{"w": ["feature"]}``; also of
            ``constant_data``, for all their dimensions.
        constant_data: Data to keep beside the posterior, such as ``{"x": x}``.
        losses: Losses of the fit, shape (steps,), to keep beside the posterior.
        num_draws: Number of posterior draws.
        chunk_size: Number of classes evaluated at once, with ``obs``.
        progress_bar: Whether to show the chunks done, with ``obs``.
        **kwargs: Keyword arguments of model and guide.

    Returns:
        ``arviz.InferenceData`` with ArviZ 0.23, ``xarray.DataTree`` with ArviZ 1; both have
        ``to_netcdf``.

    Raises:
        ValueError: If ``rows`` names an unknown plate or label, holds ids out of range or those of
            the plate of ``obs``; if ``coords`` names an unknown dimension or has too many or too
            few labels; if ``params`` lacks a parameter of the guide, ``losses`` are no array of one
            axis, no site is left to show, or as ``log_likelihood``.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist, optax
        >>> import numpyro_largecat as lc
        >>> from numpyro.infer import Trace_ELBO
        >>> from numpyro.infer.autoguide import AutoNormal
        >>> def model(y):
        ...     with lc.class_plate("classes", 1000, y, num_sampled=5) as classes:
        ...         b = numpyro.sample("b", dist.Normal(0, 1))
        ...     with numpyro.plate("data", 3):
        ...         numpyro.sample("y", lc.UtilityCategorical(b, classes), obs=y)
        >>> svi = lc.SubsampledSVI(model, AutoNormal(model), optax.adam(0.1), Trace_ELBO())
        >>> y = jnp.array([7, 7, 3])
        >>> params = svi.run(jax.random.key(0), 10, y, progress_bar=False).params
        >>> data = lc.to_arviz(jax.random.key(1), model, svi.guide, params, y,
        ...                    rows={"classes": [7, 3]}, coords={"classes": ["seven", "three"]})
        >>> data["posterior"]["b"].sel(classes="three").shape
        (1, 500)
    """
    num_draws = check_count("num_draws", num_draws, 1)
    args, kwargs = with_jax_arrays((args, kwargs))
    check_guide_has_run(guide)
    constants = _constants(constant_data, losses)
    layout = layout_of(model, guide, args, kwargs, params)
    sizes = layout.sizes
    labels = {name: np.asarray(values) for name, values in (coords or {}).items()}
    ids = {name: _ids_of(name, given, sizes, labels) for name, given in (rows or {}).items()}
    chosen, observed, unknown = None, {}, set()
    small = {name: size for name, size in sizes.items() if size <= SMALL_PLATE}
    if obs is not None:
        also = {name: jnp.arange(size) for name, size in small.items()} | ids
        fit = (model, guide, params, args, kwargs)
        chosen = ChunkedUtilities(*fit, site, plate, chunk_size, also)
        shape = labels_of_rows(obs, chosen).shape
        observed = _observed_rows(shape, chosen, layout, ids)
        unknown = {n for n, i in observed.items() if n not in layout.row_ids and len(i) != sizes[n]}
        if sizes[plate] > SMALL_PLATE and plate not in ids:
            ids[plate] = _most_frequent(obs, NUM_FREQUENT)
    shown = {n: observed.get(n, jnp.arange(s)) for n, s in small.items() if n not in unknown}
    ids = shown | ids
    shown_guide = guide
    if unknown:  # new rows, which have no errors
        shown_guide = without_training_rows(without_errors(model, guide)[1], is_choice=is_choice)
    site_dims: dict[str, list[str]] = {}

    def draw(rng_key: Array) -> dict[str, Array]:
        sites = _guide_sites(rng_key, shown_guide, params, args, kwargs, ids, layout)
        if chosen is not None:
            sites |= _sites_of_choice(rng_key, chosen, ids, sites)
        site_dims.update({name: _dims_of(name, site, dims or {}) for name, site in sites.items()})
        return {name: site.value for name, site in sites.items()}

    drawn = jax.eval_shape(draw, rng_key)
    if not drawn:
        raise ValueError(
            f"the guide has no latent site to show: those in plates of over {SMALL_PLATE} rows "
            "are left out, unless `rows` names some of their rows, as in "
            f"`rows={{'classes': [0, 1]}}`; the model's plates have {sizes} rows."
        )
    shapes = {name: value.shape for name, value in {**drawn, **constants}.items()}
    site_dims |= {name: list(names) for name, names in (dims or {}).items() if name in constants}
    if losses is not None:
        site_dims["elbo"] = ["step"]
    if chosen is not None:
        site_dims[site] = [dim or f"{site}_dim_{i}" for i, dim in enumerate(chosen.dims)]
        shapes[site] = shape
    lengths = _lengths(site_dims, shapes, dims or {})
    by_id = {n for n, given in (rows or {}).items() if not _are_labels(given)}
    _refuse_two_readings(labels, sizes, {name: ids[name] for name in by_id})
    labels = _labels_of_shown(labels, sizes, ids | observed, unknown, lengths)
    draws = compiled(lambda keys: lax.map(draw, keys))(jax.random.split(rng_key, num_draws))
    groups: dict[str, Any] = {"posterior": {n: np.asarray(v)[None] for n, v in draws.items()}}
    if chosen is not None and obs is not None:
        groups |= _choice_groups(rng_key, num_draws, chosen, obs, progress_bar)
    if constants:
        groups["constant_data"] = constants
    return _from_groups(groups, labels, site_dims)


def _choice_groups(
    rng_key: Array, num_draws: int, chosen: ChunkedUtilities, obs: ArrayLike, progress_bar: bool
) -> dict[str, dict[str, NDArray[Any]]]:
    """The groups about the observed choice."""
    keys = jax.random.split(rng_key, num_draws)
    log_probs = log_likelihood_of(chosen, obs, keys, progress_bar)
    predicted = draw_choices_of(chosen, keys, np.shape(obs), progress_bar)
    return {
        "log_likelihood": {chosen.site: np.asarray(log_probs)[None]},
        "posterior_predictive": {chosen.site: np.asarray(predicted)[None]},
        "observed_data": {chosen.site: np.asarray(obs)},
    }


def _ids_of(name: str, given: Any, sizes: dict[str, int], labels: dict[str, NDArray[Any]]) -> Array:
    """Row ids of plate ``name``, of which rows are given by id or by label."""
    if name not in sizes:
        raise ValueError(
            f"`rows` names plate '{name}', but the plates of the model are {sorted(sizes)}."
        )
    wanted = np.asarray(given)
    if _are_labels(wanted):
        known = labels.get(name, np.empty(0, wanted.dtype))
        places = np.flatnonzero(np.isin(known, wanted))  # no table of all labels
        found = {label: i for i, label in zip(places.tolist(), known[places].tolist(), strict=True)}
        unknown = [label for label in wanted.tolist() if label not in found]
        if len(known) != sizes[name] or unknown or len(found) != len(places):
            raise ValueError(
                f"`rows['{name}']` names rows by label; for that `coords['{name}']` must have all "
                f"{sizes[name]} labels, and these among them, each once. It has {len(known)}, "
                f"without {unknown[:3]}."
            )
        wanted = np.array([found[label] for label in wanted.tolist()])
    check_integers(f"rows[{name!r}]", wanted)
    check_in_range(f"`rows[{name!r}]`", wanted, sizes[name], "row ids")
    return jnp.asarray(wanted)


def _most_frequent(obs: ArrayLike, number: int) -> Array:
    classes, counts = np.unique(np.asarray(obs), return_counts=True)
    return jnp.asarray(np.sort(classes[np.argsort(-counts, kind="stable")[:number]]))


def _sites_of_choice(
    rng_key: Array, chosen: ChunkedUtilities, ids: dict[str, Array], shown: dict[str, LatentSite]
) -> dict[str, LatentSite]:
    """The draws that ``log_likelihood`` uses, of the rows shown."""

    def draw(class_id: Array, in_plate: bool) -> dict[str, Array]:
        sites, touched = chosen.latent_sites(class_id // chosen.chunk_size, rng_key)
        values = {}
        for name in shown.keys() & sites.keys():
            axes, value = shown[name].axes(), sites[name]["value"]
            own_axis = axes.pop(chosen.plate, None)
            others = {n: axis for n, axis in axes.items() if n not in chosen.choice_plates}
            if (own_axis is None) == in_plate:
                continue
            held = {plate: touched.plates[plate] for plate in others}
            if not all(rows.full or _are_labels_of_all(rows) for rows in held.values()):
                continue  # rows that are drawn, or in no order
            for plate, axis in others.items():
                place = jnp.searchsorted(held[plate].indices, ids[plate])
                value = jnp.take(value, place, axis=axis)
            if own_axis is not None:
                value = jnp.take(value, class_id % chosen.chunk_size, axis=own_axis)
            values[name] = value
        return values

    found = draw(ids[chosen.plate][0], False)
    for name, values in lax.map(lambda i: draw(i, True), ids[chosen.plate]).items():
        found[name] = jnp.moveaxis(values, 0, shown[name].axes()[chosen.plate] + values.ndim)
    return {name: shown[name]._replace(value=value) for name, value in found.items()}


def _are_labels_of_all(rows: PlateRows) -> bool:
    """Whether the rows are those of a class plate which all observations share, in order."""
    return rows.weights is not None and rows.position is None


def _observed_rows(
    shape: tuple[int, ...], chosen: ChunkedUtilities, layout: ModelLayout, named: dict[str, Array]
) -> dict[str, Array]:
    """Row ids of the observations in each plate of the choice; 0, 1, ... where none are given."""
    found = {}
    for name, number in zip(chosen.dims, shape, strict=True):
        if name is None:
            continue
        if name in named:
            raise ValueError(
                f"`rows` names rows of plate '{name}', but with `obs` these are the rows that the "
                "arguments of the model describe. Leave it out."
            )
        found[name] = layout.row_ids.get(name, jnp.arange(number))
    return found


def _constants(given: Mapping[str, ArrayLike] | None, losses: Any) -> dict[str, NDArray[Any]]:
    constants = {name: np.asarray(value) for name, value in (given or {}).items()}
    if losses is None:
        return constants
    is_result = hasattr(losses, "losses")
    if is_result or np.ndim(losses) != 1:
        got = type(losses).__name__ if is_result else f"shape {np.shape(losses)}"
        raise ValueError(
            "`losses` must have shape (steps,), one loss of each step, such as `result.losses`; "
            f"got {got}."
        )
    return constants | {"elbo": -np.asarray(losses)}


def _lengths(
    site_dims: Mapping[str, list[str]],
    shapes: dict[str, tuple[int, ...]],
    dims: Mapping[str, Sequence[str]],
) -> dict[str, set[int]]:
    """Lengths of each dimension; none of those that are named for sites which are left out."""
    lengths: dict[str, set[int]] = {dim: set() for names in dims.values() for dim in names}
    for name, shape in shapes.items():
        default = [f"{name}_dim_{i}" for i in range(len(shape))]
        for dim, length in zip(site_dims.get(name, default), shape, strict=False):
            lengths.setdefault(dim, set()).add(length)
    return lengths


def _are_labels(given: Any) -> bool:
    return np.asarray(given).dtype.kind in "OUS"


def _refuse_two_readings(
    given: dict[str, NDArray[Any]], sizes: dict[str, int], by_id: dict[str, Array]
) -> None:
    """Refuse labels that may be those of all rows in order, or of the rows as they are named."""
    for name, rows in by_id.items():
        in_order = np.arange(sizes[name])
        if len(given.get(name, ())) == len(rows) == sizes[name] and (rows != in_order).any():
            raise ValueError(
                f"`coords['{name}']` may be the labels of all rows in their order, or of the rows "
                f"that `rows['{name}']` names in another. Give `rows` by label: then `coords` are "
                "those of all rows in their order."
            )


def _labels_of_shown(
    given: dict[str, NDArray[Any]],
    sizes: dict[str, int],
    shown: dict[str, Array],
    unknown: set[str],
    lengths: dict[str, set[int]],
) -> dict[str, NDArray[Any]]:
    """Labels of the rows shown, by default their ids, and of the other dimensions."""
    others = lengths.keys() - sizes.keys()
    if not given.keys() <= sizes.keys() | others:
        raise ValueError(
            f"`coords` names {sorted(given.keys() - sizes.keys() - others)}, but the plates of the "
            f"model are {sorted(sizes)}, and its other dimensions {sorted(others)}."
        )
    for name, labels in given.items():
        allowed = {len(shown[name])} if name in shown else lengths.get(name, set())
        if name in shown and name not in unknown:
            allowed |= {sizes[name]}
        if allowed and len(labels) not in allowed:
            raise ValueError(
                f"`coords['{name}']` must have {' or '.join(map(str, sorted(allowed)))} labels, "
                f"one for each row{' or row shown' * (len(allowed) > 1)}; got {len(labels)}."
            )
    found = dict(given)
    for name, rows in shown.items():
        labels = given.get(name, np.asarray(rows))
        is_whole = name in given and name not in unknown and len(labels) == sizes[name]
        found[name] = labels[np.asarray(rows)] if is_whole else labels
    return found


def _guide_sites(
    rng_key: Array,
    guide: Any,
    params: Any,
    args: Any,
    kwargs: Any,
    ids: dict[str, Array],
    layout: ModelLayout,
) -> dict[str, LatentSite]:
    """Draw the sites of the guide whose plates in the model are all shown."""
    sites = sites_of(
        guide,
        args,
        kwargs,
        rng_key=rng_key,
        params=params,
        touched=TouchedRows(),
        around=partial(hold_rows, rows=ids),
    )
    check_params(params, sites)
    found = {}
    for name, drawn in sites.items():
        if not is_latent(drawn):
            continue
        site = layout.sites.get(name, latent_site(drawn))
        if drawn["infer"].get("is_auxiliary") or not site.axes().keys() <= ids.keys():
            continue
        own = {frame.name for frame in drawn["cond_indep_stack"]}
        for plate, axis in site.axes().items():
            if plate not in own:  # a joint guide draws the site in no plate
                value = rows_of_whole(drawn, axis, ids[plate], layout.sizes[plate])
                drawn = {**drawn, "value": value}
        found[name] = site._replace(value=drawn["value"])
    return found


def _dims_of(name: str, site: LatentSite, dims: Mapping[str, Sequence[str]]) -> list[str]:
    """Names of the axes of a site: its plates, then its event."""
    event_dim = site.event_dim
    num_batch = jnp.ndim(site.value) - event_dim
    plates = {frame.dim: frame.name for frame in site.frames}
    batch = [plates.get(i - num_batch, f"{name}_batch_{i}") for i in range(num_batch)]
    event = list(dims.get(name, [f"{name}_dim_{i}" for i in range(event_dim)]))
    if len(event) != event_dim:
        raise ValueError(
            f"`dims` of site '{name}' must name its {event_dim} event dimensions; got {event}."
        )
    return batch + event


def _from_groups(groups: dict[str, Any], coords: Any, dims: Any) -> Any:
    """Make the object of the installed ArviZ, whose signature changed with version 1."""
    import arviz as az  # slow to import, so only where it is used

    used = {dim for site_dims in dims.values() for dim in site_dims}
    coords = {name: values for name, values in coords.items() if name in used}
    if int(az.__version__.split(".")[0]) >= 1:
        return az.from_dict(groups, coords=coords, dims=dims)
    return az.from_dict(**groups, coords=coords, dims=dims)
