# SPDX-License-Identifier: Apache-2.0
"""Run a model or a guide to learn its sites, and choose the latent values that it is run at."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array
from jax.typing import ArrayLike
from numpyro.distributions.transforms import biject_to
from numpyro.handlers import replay, seed, substitute, trace

from numpyro_largecat.handlers.internals import helpful_support_errors, is_of_scan
from numpyro_largecat.handlers.one_at_a_time import MODEL_RUNS
from numpyro_largecat.handlers.shared_rows import share_rows
from numpyro_largecat.handlers.sites import (
    Site,
    Sites,
    check_observed_shape,
    is_latent,
    is_observed,
)
from numpyro_largecat.handlers.spread_tables import rows_of_tables, spread_tables
from numpyro_largecat.handlers.touched_rows import TouchedRows

Around = Callable[[Any], Any]  # puts a handler around a model or guide


def sites_of(
    fn: Callable[..., Any],
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    rng_key: ArrayLike = 0,
    params: Mapping[str, Any] | None = None,
    touched: TouchedRows | None = None,
    around: Around | None = None,
    is_step: bool = True,
) -> Sites:
    """Run a model or guide and return its sites.

    Args:
        fn: Model or guide, inside of whatever handlers must see its messages first.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        rng_key: Key, or seed, of all that it draws.
        params: Values of parameters, and of mutable sites, by name; the others start at their own.
            A ``SpreadTable`` needs ``touched``.
        touched: The rows of its plates: those that it knows are given to the plates, and others are
            recorded there. None leaves plates and parameters to NumPyro.
        around: Function that puts more handlers around it, outside of all others. By default
            ``at_feasible_values``: then nothing latent is drawn.
        is_step: Whether the rows are those of a step; else they are a part of the classes, to be
            read.

    Threads run one model at a time.

    Cost: that of the run; call it under ``jax.eval_shape`` to learn shapes and names alone.
    """
    whole, tables = dict(params or {}), spread_tables(dict(params or {}))
    # Statements move mutable values in place, and NumPyro 0.20 and 0.21 hand out these themselves.
    whole = {name: copy(x) if isinstance(x, dict) else x for name, x in whole.items()}
    if touched is not None:
        rows = partial(rows_of_tables, tables, touched)
        of_tables = tables.__contains__
        fn = share_rows(fn, touched, gathered=of_tables, lookup=rows, is_step=is_step)
        whole = {name: value for name, value in whole.items() if name not in tables}
    fn = substitute(seed(fn, rng_key), data=whole)
    fn = at_feasible_values(fn) if around is None else around(fn)
    try:
        with MODEL_RUNS:
            found: Sites = trace(fn).get_trace(*args, **(kwargs or {}))
    except jax.errors.TracerArrayConversionError as error:
        error.add_note(
            "The model is compiled. Arrays that it indexes by rows, such as `z[classes.indices]`, "
            "must be of JAX: write `z = jnp.asarray(z)` before."
        )
        raise
    except (TypeError, ValueError) as error:
        held = {} if touched is None else {n: r for n, r in touched.plates.items() if not r.full}
        if held and "ncompatible shapes" in str(error):
            which = ", ".join(f"'{name}' {len(of.indices)}" for name, of in held.items())
            error.add_note(
                f"Plates hold some of their rows, others in each step: {which}. Read arrays of all "
                "rows by `indices`, as `z[classes.indices]`, and declare tables of parameters "
                "inside of the plate, `numpyro.param(name, table, event_dim=1)`."
            )
        raise
    for name, site in found.items():
        if is_observed(site) and not is_of_scan(site):
            check_observed_shape(name, site)
    return found


def at_values_of(sites: Sites) -> Around:
    """Run a model at the latent values of other sites, such as those that a guide has drawn."""
    return partial(replay, trace=sites)


def at_values_or_centre(sites: Sites) -> Around:
    """Run a model at the latent values of a guide's sites, and at the centre of what this lacks.

    That is the centre of the prior; what has none is drawn.
    """

    def centre(msg: Site) -> Any:
        if not is_latent(msg) or msg["name"] in sites:
            return None
        try:
            return _centre_of_site(msg)
        except NotImplementedError:
            return None

    return lambda model: substitute(at_values_of(sites)(model), substitute_fn=centre)


def as_drawn(fn: Any) -> Any:
    """Run ``fn`` as it is, with what it draws."""
    return fn


def at_feasible_values(fn: Any) -> substitute:
    """Run ``fn`` with the image of zero at continuous latent sites, without drawing anything.

    This also serves for improper priors, which cannot be drawn from.
    """

    def feasible(msg: Site) -> Any:
        if not is_latent(msg) or msg["fn"].support.is_discrete:
            return None
        with helpful_support_errors(msg):
            transform = biject_to(msg["fn"].support)
        shape = msg["fn"].shape(msg["kwargs"].get("sample_shape", ()))
        return transform(jnp.zeros(transform.inverse_shape(shape)))

    return substitute(fn, substitute_fn=feasible)


def at_centre(
    guide: Callable[..., Any],
    is_moved: Callable[[Site], bool] = is_latent,
    otherwise: Mapping[str, Any] | None = None,
) -> substitute:
    """Run a guide with each latent site, or each of those asked for, at its centre.

    The centre is the mean or, of a transformed distribution, the transformed mean.

    Args:
        guide: The guide.
        is_moved: Whether a site is asked for.
        otherwise: Values of sites that have no centre, by name.

    Raises:
        NotImplementedError: If a distribution has no mean, or is discrete, and has no such value.
    """

    def centre(msg: Site) -> Any:
        if not (is_latent(msg) and is_moved(msg)):
            return None
        try:
            return _centre_of_site(msg)
        except NotImplementedError:
            if otherwise is None or msg["name"] not in otherwise:
                raise
            return otherwise[msg["name"]]

    return substitute(guide, substitute_fn=centre)


def _centre_of_site(msg: Site) -> Array:
    support = msg["fn"].support
    if support is not None and support.is_discrete:
        raise NotImplementedError(f"site '{msg['name']}' is discrete and has no centre.")
    return _centre(msg["fn"])


def _centre(fn: Any) -> Array:
    if isinstance(fn, dist.TransformedDistribution):
        value = _centre(fn.base_dist)
        for transform in fn.transforms:
            value = transform(value)
        return value
    if isinstance(fn, dist.ExpandedDistribution):
        return jnp.broadcast_to(_centre(fn.base_dist), fn.batch_shape + fn.event_shape)
    if isinstance(fn, (dist.Independent, dist.MaskedDistribution)):
        return _centre(fn.base_dist)
    if isinstance(fn, dist.Delta):
        return fn.mean
    return jnp.asarray(fn.mean, jnp.result_type(float, fn.mean))  # of Normal(0, 1) it is an integer
