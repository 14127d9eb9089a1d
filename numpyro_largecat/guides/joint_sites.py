# SPDX-License-Identifier: Apache-2.0
"""Which latent sites of a model a guide draws together: those of one row, and those of no row."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array
from numpyro.distributions import constraints
from numpyro.distributions.transforms import Transform, biject_to

from numpyro_largecat.handlers.internals import helpful_support_errors
from numpyro_largecat.handlers.plate_facts import plate_facts
from numpyro_largecat.handlers.sites import Site, Sites, is_latent, site_of_plate


class JointSite(NamedTuple):
    """A latent site, of which one row, or all of it, is drawn together with other sites."""

    name: str
    rows: str | None  # the plate that it has a value for each row of; None if it is dense
    plates: tuple[str, ...]  # all its plates
    shape: tuple[int, ...]  # of the free values that are drawn together: of a row, or of all
    event_dim: int  # of its free values
    transform: Transform | None  # from free values to its own; None if they are the same

    @property
    def size(self) -> int:
        """Number of free values that are drawn together."""
        return math.prod(self.shape)

    def constrained(self, free: Array) -> Array:
        """Values of the site from free ones."""
        return free if self.transform is None else self.transform(free)

    def free(self, value: Array) -> Array:
        """Free values from values of the site."""
        return value if self.transform is None else self.transform.inv(value)

    def joined(self, values: Array) -> Array:
        """The free values of a row, or of all, as one axis."""
        return values.reshape(*values.shape[: values.ndim - len(self.shape)], self.size)


def joint_sites(sites: Sites, start_values: dict[str, Any]) -> list[JointSite]:
    """The latent sites of a model in its order.

    Args:
        sites: A trace of the model.
        start_values: Free values of its latent sites, by name.

    Raises:
        NotImplementedError: If a site is in a plate of rows and in another plate.
        ValueError: If a site in a plate of rows has an axis for no plate.
    """
    return [
        _joint_site(site, sites, jnp.shape(start_values[name]))
        for name, site in sites.items()
        if is_latent(site)
    ]


def _joint_site(site: Site, sites: Sites, free_shape: tuple[int, ...]) -> JointSite:
    name, fn, frames = site["name"], site["fn"], site["cond_indep_stack"]
    event_dim = fn.event_dim + len(free_shape) - jnp.ndim(site["value"])
    support = getattr(fn.support, "base_constraint", fn.support)
    with helpful_support_errors(site):
        transform = None if support is constraints.real else biject_to(fn.support)
    plates = tuple(frame.name for frame in frames)
    rows = [frame for frame in frames if holds_rows(frame, sites)]
    if not rows:
        return JointSite(name, None, plates, free_shape, event_dim, transform)
    if len(frames) > 1:
        raise NotImplementedError(
            f"site '{name}' is inside plates {sorted(plates)}: AutoRowNormal draws the values of "
            f"one row of '{rows[0].name}' together, and needs that plate alone around them. Make "
            "the other axis one of the event, `dist.Normal(0, 1).expand([D]).to_event(1)`; or "
            f"hide it here, `numpyro.handlers.block(model, hide=['{name}'])`, and give it a guide "
            "of its own, such as AutoNormal, both as parts of an AutoGuideList."
        )
    batch = free_shape[: len(free_shape) - event_dim]
    if math.prod(batch) != rows[0].size:
        raise ValueError(
            f"site '{name}' inside plate '{rows[0].name}' must have no axes besides the plate's "
            f"{rows[0].size} rows and its event; got batch shape {batch}. Say that they belong to "
            "a row, by `to_event`."
        )
    shape = free_shape[len(batch) :]
    return JointSite(name, rows[0].name, plates, shape, event_dim, transform)


def holds_rows(frame: Any, sites: Sites) -> bool:
    """Whether a plate is one of ours, or one of NumPyro's that subsamples.

    Args:
        frame: The plate as its sites know it.
        sites: A trace that holds the plate.

    Raises:
        ValueError: If it does not.
    """
    plate = site_of_plate(frame, sites)
    return plate_facts(plate).kind != "plain" or plate["args"][0] != frame.size
