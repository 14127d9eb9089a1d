# SPDX-License-Identifier: Apache-2.0
"""Start an automatic guide at the prior of rows, so that rows of no data are as they should be."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from numpyro.infer.autoguide import AutoGuide, AutoGuideList
from numpyro.primitives import Messenger

from numpyro_largecat._checks import check_kind
from numpyro_largecat.guides.joint_sites import holds_rows
from numpyro_largecat.guides.not_centred import FAMILIES, family, learned_priors
from numpyro_largecat.handlers.automatic_guides import guide_parts
from numpyro_largecat.handlers.internals import has_seen_model, prototype_sites, start_values
from numpyro_largecat.handlers.sites import Site, Sites


class start_at_prior(AutoGuideList):
    r"""An automatic guide whose rows start at their prior.

    The posterior of a row that the data say nothing of is its prior, and a row that no step touches
    keeps its start. So the rows of all sites in class plates and entity plates start with the
    location and scale of their prior, where that is a normal or another family of location and
    scale; all other sites start as the guide has them.

    Rows whose prior is learned have none to start at, and pull it to where they start: write the
    model by ``lc.not_centred`` first.

    The guide is the one that is given, with its parameters and their names.

    Args:
        guide: ``lc.AutoRowNormal(model)``, ``AutoNormal(model)``, or an ``AutoGuideList`` of such.

    Raises:
        TypeError: If ``guide`` is not automatic.
        ValueError: When it is first run, if the prior of rows is learned.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> import numpyro_largecat as lc
        >>> @lc.not_centred
        ... def model(y=None):
        ...     tau = numpyro.sample("tau", dist.HalfNormal(1))
        ...     with lc.class_plate("classes", 1000, y, num_sampled=2) as classes:
        ...         b = numpyro.sample("b", dist.Normal(0, tau))
        ...     with lc.data_plate("data", 2) as rows:
        ...         lc.sample_choice("y", b[None], classes=classes, rows=rows, obs=y)
        >>> guide = lc.start_at_prior(lc.AutoRowNormal(model))
        >>> with numpyro.handlers.seed(rng_seed=0), numpyro.handlers.trace() as sites:
        ...     _ = guide(jnp.array([3, 7]))
        >>> sites["b_decentered_auto_scale"]["value"].tolist()
        [1.0, 1.0, 1.0, 1.0]
    """

    def __init__(self, guide: AutoGuide) -> None:
        check_kind("guide", guide, AutoGuide, "an automatic guide, such as lc.AutoRowNormal(model)")
        super().__init__(guide.model, prefix=guide.prefix)
        self.append(guide)

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Array]:
        """Sample all latent sites.

        Args:
            *args: Arguments of the model.
            **kwargs: Keyword arguments of the model.

        Returns:
            The values of the sites, by name.
        """
        parts = [part for part in guide_parts(self[0]) if not isinstance(part, AutoGuideList)]
        if not all(map(has_seen_model, parts)):
            _refuse_learned_priors(learned_priors(self.model, args, kwargs))
        with _starts(parts):
            values: dict[str, Array] = self[0](*args, **kwargs)
        return values


class _starts(Messenger):
    """Give the locations and scales of rows other start values than their guides do."""

    def __init__(self, parts: list[AutoGuide]) -> None:
        self.parts = parts
        super().__init__()

    def process_message(self, msg: Site) -> None:
        """Replace what a parameter starts at, which its value, if there is one, goes before."""
        if msg["type"] != "param":
            return
        for part in self.parts:
            for what in ("loc", "scale"):
                site, ending = msg["name"], f"_{part.prefix}_{what}"
                if not site.endswith(ending):
                    continue
                sites, site = prototype_sites(part), site.removesuffix(ending)
                start = _of_prior(sites, site, what) if site in sites else None
                if start is not None:
                    like = start_values(part)[site]
                    start = jnp.broadcast_to(start, jnp.shape(like)).astype(jnp.result_type(like))
                    msg["fn"], msg["args"] = _itself, (start,)


def _itself(value: Array, *args: Any, **kwargs: Any) -> Array:
    del args, kwargs
    return value


def _of_prior(sites: Sites, name: str, what: str) -> Array | None:
    """Location or scale of the prior of rows; None if it has none, or others for each row."""
    site = sites[name]
    rows = [frame for frame in site["cond_indep_stack"] if holds_rows(frame, sites)]
    fn = family(site["fn"])
    if not rows or type(fn) not in FAMILIES:
        return None
    loc, scale = jnp.broadcast_arrays(fn.loc, fn.scale)
    axis = rows[0].dim - site["fn"].event_dim
    if loc.ndim >= -axis and loc.shape[axis] != 1:
        return None
    return loc if what == "loc" else scale


def _refuse_learned_priors(learned: dict[str, Any]) -> None:
    for name, parts in learned.items():
        if any(jax.tree.leaves(parts)):
            raise ValueError(
                f"the prior of site '{name}' is learned, so its rows have no prior to start at: "
                "rows that no step touches would pull it to their start. Write the model as "
                "`model = lc.not_centred(model)`, for guide and SVI."
            )
