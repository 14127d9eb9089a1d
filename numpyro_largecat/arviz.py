# SPDX-License-Identifier: Apache-2.0
"""Posterior draws of a variational fit as an ArviZ object."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike
from numpyro.handlers import seed, substitute, trace
from numpyro.primitives import Messenger

from numpyro_largecat._checks import check_count, check_in_range, check_integers
from numpyro_largecat.infer.latent_values import at_feasible_values
from numpyro_largecat.infer.param_sites import check_params
from numpyro_largecat.infer.static_arguments import with_jax_arrays
from numpyro_largecat.infer.touched_rows import TouchedRows, share_rows

SMALL_PLATE = 1000  # plates of at most this many rows are shown whole


def to_arviz(
    rng_key: Array,
    model: Callable[..., Any],
    guide: Callable[..., Any],
    params: dict[str, Any],
    *args: Any,
    rows: Mapping[str, ArrayLike] | None = None,
    coords: Mapping[str, Sequence[Any]] | None = None,
    dims: Mapping[str, Sequence[str]] | None = None,
    losses: ArrayLike | None = None,
    num_draws: int = 500,
    **kwargs: Any,
) -> Any:
    """Draw from the guide and make an ArviZ object, for all small sites and the rows that you name.

    Plates of at most 1000 rows are shown whole, unless ``rows`` names some. Of a site inside a
    larger plate, such as the weights of 10**6 classes, only the rows that ``rows`` names are drawn;
    if it names none, the site is left out. No large table is ever drawn whole.

    Shapes: the group ``posterior`` has variables of shape (1, num_draws, plates..., event...). The
    dimension of a plate has the plate's name, and its coordinate the names that ``coords`` gives,
    else the row ids. The group ``constant_data`` holds ``elbo``, shape (steps,), if ``losses`` are
    given.

    Cost: O(num_draws * rows) time and memory.

    Args:
        rng_key: A JAX random key.
        model: The model that was fitted.
        guide: Its guide.
        params: Parameters, as ``SubsampledSVI.get_params`` gives them.
        *args: Arguments of model and guide, such as one batch.
        rows: The ids of the rows to show of a plate, such as ``{"classes": [17, 3]}``.
        coords: Labels of dimensions, by name: of the rows shown, for the dimension of a plate.
        dims: Names of the event dimensions of a site, such as ``{"w": ["feature"]}``.
        losses: Losses of the fit, shape (steps,), to keep beside the posterior.
        num_draws: Number of posterior draws.
        **kwargs: Keyword arguments of model and guide.

    Returns:
        ``arviz.InferenceData`` with ArviZ 0.23, ``xarray.DataTree`` with ArviZ 1; both have
        ``to_netcdf``.

    Raises:
        ValueError: If ``rows`` names an unknown plate or holds ids out of range, ``params`` lacks a
            parameter of the guide, or no site is left to show.

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
    ids = {name: jnp.asarray(i) for name, i in (rows or {}).items()}
    for name, i in ids.items():
        check_integers(f"rows[{name!r}]", i)
    sizes = _plate_sizes(model, args, kwargs, params)
    for name, i in ids.items():
        if name not in sizes:
            raise ValueError(
                f"`rows` names plate '{name}', but the plates of the model are {sorted(sizes)}."
            )
        check_in_range(f"`rows[{name!r}]`", i, sizes[name], "row ids")
    ids |= {n: jnp.arange(s) for n, s in sizes.items() if s <= SMALL_PLATE and n not in ids}
    site_dims: dict[str, list[str]] = {}

    def draw(rng_key: Array) -> dict[str, Array]:
        sites = _guide_sites(rng_key, guide, params, args, kwargs, ids)
        site_dims.update({name: _dims_of(name, site, dims or {}) for name, site in sites.items()})
        return {name: site["value"] for name, site in sites.items()}

    if not jax.eval_shape(draw, rng_key):
        raise ValueError(
            f"the guide has no latent site to show: those in plates of over {SMALL_PLATE} rows "
            "are left out, unless `rows` names some of their rows, as in "
            f"`rows={{'classes': [0, 1]}}`; the model's plates have {sizes} rows."
        )
    draws = jax.jit(lambda keys: lax.map(draw, keys))(jax.random.split(rng_key, num_draws))
    groups: dict[str, Any] = {"posterior": {n: np.asarray(v)[None] for n, v in draws.items()}}
    if losses is not None:
        groups["constant_data"] = {"elbo": -np.asarray(losses)}
        site_dims["elbo"] = ["step"]
    labels = {name: np.asarray(i) for name, i in ids.items()}
    labels |= {name: np.asarray(values) for name, values in (coords or {}).items()}
    return _from_groups(groups, labels, site_dims)


def _plate_sizes(model: Any, args: Any, kwargs: Any, params: Any) -> dict[str, int]:
    """Number of rows of each plate of the model; nothing is computed."""
    touched = TouchedRows()

    def run() -> None:
        shared = share_rows(substitute(seed(model, 0), data=params), touched)
        at_feasible_values(shared)(*args, **kwargs)

    jax.eval_shape(run)
    return {name: plate.size for name, plate in touched.plates.items()}


class _show_rows(Messenger):
    """Make the plates named in ``ids`` hold these rows."""

    def __init__(self, fn: Callable[..., Any], ids: dict[str, Array]) -> None:
        self.ids = ids
        super().__init__(fn)

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] != "plate":
            return
        name = msg["name"].removesuffix("_rows") if msg["kwargs"].get("is_helper") else msg["name"]
        if name in self.ids:
            msg["value"] = self.ids[name]
            msg["args"] = (msg["args"][0], self.ids[name].shape[0])
            msg["kwargs"].update(is_chunk=True, full=False, distinct=True)


def _guide_sites(
    rng_key: Array, guide: Any, params: Any, args: Any, kwargs: Any, ids: dict[str, Array]
) -> dict[str, Any]:
    """Draw the sites of the guide whose plates are all shown."""
    show = _show_rows(share_rows(substitute(seed(guide, rng_key), data=params), TouchedRows()), ids)
    sites = trace(show).get_trace(*args, **kwargs)
    check_params(params, sites)
    return {
        name: site
        for name, site in sites.items()
        if site["type"] == "sample"
        and not site["is_observed"]
        and not site["infer"].get("is_auxiliary")
        and {frame.name for frame in site["cond_indep_stack"]} <= ids.keys()
    }


def _dims_of(name: str, site: Any, dims: Mapping[str, Sequence[str]]) -> list[str]:
    """Names of the axes of a site: its plates, then its event."""
    event_dim = site["fn"].event_dim
    num_batch = jnp.ndim(site["value"]) - event_dim
    plates = {frame.dim: frame.name for frame in site["cond_indep_stack"]}
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
