# SPDX-License-Identifier: Apache-2.0
"""What a message or a site of a trace is, and the distribution under its wrappers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array
from numpyro.distributions import constraints
from numpyro.distributions.distribution import ExpandedDistribution, Independent, MaskedDistribution
from numpyro.handlers import condition

from numpyro_largecat.handlers.internals import mask_of, open_handlers

Site = dict[str, Any]  # NumPyro's message of one statement, as handlers and traces have it
Sites = dict[str, Site]  # a trace, by name


class ParamOptions(NamedTuple):
    """What a ``numpyro.param`` statement says of its parameter beyond its value."""

    constraint: Any
    event_dim: int | None  # number of axes after those of its plates, if it is stored by rows
    update_rule: Any  # moves the parameter in place of the optimiser; None if there is none
    statistic: Callable[..., Any] | None  # what an update rule needs
    follow: Any  # what a parameter with an update rule follows


def param_options(site: Site) -> ParamOptions:
    """Read the options of a ``numpyro.param`` statement."""
    known = site["kwargs"]
    return ParamOptions(
        known.get("constraint", constraints.real),
        known.get("event_dim"),
        known.get("update_rule"),
        known.get("statistic"),
        known.get("follow"),
    )


def rows_are_taken(msg: Site) -> bool:
    """Whether handlers took the rows of a parameter, so that its value is not whole."""
    return msg["kwargs"].get("event_dim", 0) is None


def tell_rows_are_taken(msg: Site) -> None:
    """Keep plates from taking rows of a parameter, in a message whose value is not whole."""
    msg["kwargs"] = {**msg["kwargs"], "event_dim": None}


def of_type(kind: str, sites: Sites) -> Sites:
    """The sites of a trace of one type, such as "param" or "plate"."""
    return {name: site for name, site in sites.items() if site["type"] == kind}


def mutable_values(sites: Sites) -> dict[str, Any]:
    """The values of ``mutable`` sites, which statements move in place, by name."""
    return {name: site["value"] for name, site in of_type("mutable", sites).items()}


def is_latent(site: Site) -> bool:
    """Whether this is a ``sample`` site that is not observed."""
    return site["type"] == "sample" and not site["is_observed"]


def is_observed(site: Site) -> bool:
    """Whether this is a ``sample`` site that is observed."""
    return site["type"] == "sample" and bool(site["is_observed"])


def log_factor(site: Site) -> Array | None:
    """The logarithm that ``numpyro.factor`` adds, before plates and masks; None for other sites."""
    fn = base_distribution(site["fn"]) if site["type"] == "sample" else None
    return jnp.asarray(fn.log_factor) if isinstance(fn, dist.Unit) else None


def is_continuous_latent(msg: Site) -> bool:
    """Whether a message of a ``sample`` statement is of a continuous site that nothing observes.

    What is discrete is a drawn outcome, or summed over for each row. The handler ``condition``,
    which comes after the plates, is asked what it will say.
    """
    support = msg["fn"].support
    if msg["is_observed"] or (support is not None and support.is_discrete):
        return False
    for handler in open_handlers():
        if isinstance(handler, condition):
            say = handler.condition_fn or (lambda msg, data=handler.data: data.get(msg["name"]))
            if say(msg) is not None:
                return False
    return True


def plates_of(site: Site) -> set[str]:
    """Names of the plates that a site is in."""
    return {frame.name for frame in site["cond_indep_stack"]}


def axes_after_plates(site: Site) -> int:
    """Number of axes of a deterministic value after those of its plates; below 0 if one lacks."""
    num_batch = max((-frame.dim for frame in site["cond_indep_stack"]), default=0)
    return jnp.ndim(site["value"]) - num_batch


def check_observed_shape(name: str, site: Site) -> None:
    """Refuse an observed value that does not go with the shape of its distribution and plates.

    Raises:
        ValueError: With the site and its plates, of which JAX and NumPyro would say nothing.
    """
    shape, batch_shape = jnp.shape(site["value"]), site["fn"].batch_shape
    given = shape[: len(shape) - len(site["fn"].event_shape)]
    ends = zip(batch_shape[::-1], given[::-1], strict=False)
    if all(1 in pair or pair[0] == pair[1] for pair in ends):
        return
    plates = ", ".join(f"'{frame.name}' of {frame.size}" for frame in site["cond_indep_stack"])
    raise ValueError(
        f"`obs` of site '{name}' must go with the shape {batch_shape} of its distribution, in "
        f"{f'plates {plates}' if plates else 'no plate'}; got {shape}. Give the model arrays of "
        "the same rows; for some of the rows of a plate, their row numbers too, as "
        "`lc.data_plate` takes them."
    )


def scale_of(site: Site) -> Any:
    """What the log density of a site is multiplied by."""
    return 1.0 if site["scale"] is None else site["scale"]


def site_of_plate(frame: Any, sites: Sites) -> Site:
    """The site of a plate, as others in it know the plate.

    Raises:
        ValueError: If it is not among the sites.
    """
    plate: Site | None = sites.get(frame.name)
    if plate is None:
        raise ValueError(
            f"plate '{frame.name}' is hidden by a handler, `block` with `expose` perhaps. Hide "
            "sites by their names, `numpyro.handlers.block(model, hide=[...])`."
        )
    return plate


def log_prob_of(site: Site) -> Array:
    """Log density of a site at each place of its batch, masked, without its scale."""
    intermediates = (site["intermediates"],) if site["intermediates"] else ()
    return jnp.asarray(site["fn"].log_prob(site["value"], *intermediates))


def base_distribution(fn: Any) -> Any:
    """The distribution under those that expand, mask or reinterpret it."""
    while hasattr(fn, "base_dist"):
        fn = fn.base_dist
    return fn


def estimates_classes(fn: Any) -> bool:
    """Whether a log density sums over drawn classes, so that it is right on average alone.

    No function of it but a linear one is right then, such as the log of a sum over components.
    """
    return bool(getattr(base_distribution(fn), "is_estimate", False))


def without_expand(fn: dist.Distribution) -> dist.Distribution:
    """The distribution under those that expand it."""
    while isinstance(fn, ExpandedDistribution):
        fn = fn.base_dist
    return fn


def without_axes(fn: Any) -> Any:
    """The distribution under those that expand it or count its axes differently."""
    while isinstance(fn, (ExpandedDistribution, Independent)):
        fn = fn.base_dist
    return fn


def unwrapped(fn: Any) -> Any:
    """The distribution under those that leave its values as they are: all but transformations."""
    while isinstance(fn, (ExpandedDistribution, Independent, MaskedDistribution)):
        fn = fn.base_dist
    return fn


def unmasked(fn: dist.Distribution) -> tuple[dist.Distribution, Any]:
    """The distribution without masks, and the mask: booleans that broadcast to its batch."""
    if isinstance(fn, ExpandedDistribution):
        base, mask = unmasked(fn.base_dist)
        return base.expand(fn.batch_shape), mask
    if isinstance(fn, MaskedDistribution):
        (base, mask), own = unmasked(fn.base_dist), mask_of(fn)
        if mask is True or own is False:
            return base, own
        return base, mask if own is True else jnp.logical_and(mask, own)
    return fn, True
