# SPDX-License-Identifier: Apache-2.0
"""A model without its discrete latent sites, for automatic guides."""

from __future__ import annotations

from typing import Any

from numpyro.primitives import Messenger

from numpyro_largecat.handlers.sites import is_latent
from numpyro_largecat.top_l.discrete_checks import not_marked
from numpyro_largecat.top_l.marked_sites import first_value, is_marked


class hide_enumerated(Messenger):
    """Hide the sites of a model that are marked to be enumerated, so that a guide leaves them out.

    ``AutoNormal(lc.hide_enumerated(model))`` is the guide for ``TopL_ELBO``, which finds the
    posterior of discrete sites itself. A hidden site has the first value of its support.

    Args:
        fn: NumPyro model, whose discrete latent sites are all marked.

    Raises:
        ValueError: When the model runs, if a discrete latent site is not marked: an automatic guide
            has no place for it.

    Example:
        >>> import numpyro
        >>> import numpyro.distributions as dist
        >>> import numpyro_largecat as lc
        >>> from numpyro.infer.autoguide import AutoNormal
        >>> def model():
        ...     loc = numpyro.sample("loc", dist.Normal(0, 1))
        ...     z = numpyro.sample("z", dist.Bernoulli(0.5), infer={"enumerate": "parallel"})
        ...     numpyro.sample("x", dist.Normal(loc * z, 1), obs=0.3)
        >>> guide = AutoNormal(lc.hide_enumerated(model))
        >>> with numpyro.handlers.seed(rng_seed=0):
        ...     sorted(guide())
        ['loc']
    """

    def process_message(self, msg: dict[str, Any]) -> None:
        """Give marked sites a value, and keep them from handlers further out."""
        if is_marked(msg):
            msg["value"] = first_value(msg)
            msg["stop"] = msg["_hidden"] = True

    def postprocess_message(self, msg: dict[str, Any]) -> None:
        """Refuse discrete sites that were not marked, and that no handler further out observes."""
        if is_latent(msg) and not msg.get("_hidden") and msg["fn"].is_discrete:
            raise not_marked(msg["name"])
