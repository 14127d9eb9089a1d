# SPDX-License-Identifier: Apache-2.0
r"""Priors of rows whose location or scale is learned, written around values of a fixed prior.

Let :math:`w_k \sim N(0, \tau^2)` for K rows, of which a step touches few, and let the guide of row
k be :math:`N(m_k, s_k^2)`, with m = 0 and s = 0.1, say, where nothing has touched it.

**Centred.** The divergences sum to :math:`\sum_k \log(\tau / s_k) + (s_k^2 + m_k^2) / 2 \tau^2` and
a constant, which is least at :math:`\tau^2 = \mathrm{mean}_k (s_k^2 + m_k^2)`. The rows that have
hardly been touched say that the scale is 0.1, and :math:`\tau`, which moves in every step, follows
at once; then the prior holds the others at that scale too. There is nothing wrong with the point
where this ends, only with how long it takes: rows move at their visits, and those of few data only
repeat the scale that they were told.

**Not centred**, :math:`w_k = \tau z_k` with :math:`z_k \sim N(0, 1)`. The divergence of a row has
no :math:`\tau` in it, wherever its guide starts, so rows that no step touches do not pull. Only the
likelihood moves :math:`\tau`. What bias is left comes from there:

- Untouched rows are alternatives of all observations, and add :math:`E \exp(\tau z_k x) =
  \exp(\tau m_k x + \tau^2 s_k^2 x^2 / 2)` to their sums over classes. From a narrow start that is
  1, whatever :math:`\tau`: large scales seem cheap, and :math:`\tau` is too large at first. From
  a start at the prior, s = 1, it is what a row of no data should add; but no class is of no data:
  each observation says that the others were not chosen. All that noise is paid for with a small
  :math:`\tau`, out of which it comes slowly, at the visits. Measured, the narrow start is better
  (``python -m benchmarks.scales``).
- The guide of a row with correlated values is too narrow under mean field, the more so the larger
  :math:`\tau`, which comes out too small; ``AutoRowNormal`` has the covariance. Its ``follow``
  widens the guide of :math:`\tau`, which else is that of :math:`\tau` given all rows.
- The bound of a softmax under a posterior has the log of an expected sum in the place of the
  expected log. The difference grows with the variance of utilities, so :math:`\tau` is a little
  too small.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, update_wrapper
from typing import Any

import jax
import numpyro
import numpyro.distributions as dist
from jax import Array
from numpyro.handlers import block, reparam
from numpyro.infer.reparam import Reparam

from numpyro_largecat.guides.joint_sites import holds_rows
from numpyro_largecat.handlers.learned_parts import learned_parts
from numpyro_largecat.handlers.run_model import sites_of
from numpyro_largecat.handlers.sites import (
    Site,
    Sites,
    is_continuous_latent,
    is_latent,
    is_observed,
    without_axes,
)
from numpyro_largecat.handlers.static_result import static_result
from numpyro_largecat.ops.lower_triangle import apply

# By location and scale, and what else they have.
LOCATION_SCALE_PRIORS: dict[type, tuple[str, ...]] = {
    dist.Normal: (),
    dist.Laplace: (),
    dist.Logistic: (),
    dist.Gumbel: (),
    dist.Cauchy: (),
    dist.StudentT: ("df",),
}


class not_centred:
    r"""Write learned priors of rows around values whose prior is fixed.

    A latent site w in a plate of rows, such as a class plate or entity plate, whose location or
    scale depends on other latent sites or on parameters, becomes

    .. math:: w = \mathrm{loc} + \mathrm{scale} \cdot z,

    with a latent site ``w_decentered``, z, of the same family with location 0 and scale 1, as by
    NumPyro's ``LocScaleReparam``; w is then deterministic, and ArviZ shows both. A multivariate
    normal becomes :math:`w = \mathrm{loc} + L z` with the factor L of its covariance. Sites with
    fixed priors, dense and discrete sites stay as they are.

    Where steps touch some of the rows, those that are rarely touched pull a scale of the centred
    form to where they start, and those around them with it; here they do not. Keep the guide's
    usual narrow start. ``AutoRowNormal(model, follow=["tau"])`` lets rows move with the scale.
    Where each row has ten observations or more the centred form, with that guide, learns sooner.

    In an ``AutoGuideList`` hide the deterministic w from all parts, as NumPyro asks. A guide draws
    z; NumPyro's ``Predictive(model, draws, return_sites=["w"])`` has w, called with the arguments
    of a full model.

    The object is the model in that form, for guides, SVI and predictions alike. Which priors are
    learned it sees at its first run that observes something, whose arguments must be those of
    training, as they are where a guide or SVI is started; until then, as in draws from the prior,
    at each run. What such a run draws and others observe is written in that form too.

    Cost: two more traces of the model, once; steps cost the same.

    Args:
        model: The model.

    Raises:
        NotImplementedError: When it is run, if a learned prior is of another family, or its degrees
            of freedom are learned.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> import numpyro_largecat as lc
        >>> @lc.not_centred
        ... def model(y=None):
        ...     tau = numpyro.sample("tau", dist.HalfNormal(1))
        ...     with lc.class_plate("classes", 1000, y, num_sampled=2) as classes:
        ...         b = numpyro.sample("b", dist.Normal(0, tau))
        ...         c = numpyro.sample("c", dist.Normal(0, 1))
        ...     with lc.data_plate("data", 2) as rows:
        ...         lc.sample_choice("y", b + c[None], classes=classes, rows=rows, obs=y)
        >>> with numpyro.handlers.seed(rng_seed=0), numpyro.handlers.trace() as sites:
        ...     model(jnp.array([3, 7]))
        >>> [name for name in sites if sites[name]["type"] == "sample"]
        ['tau', 'b_decentered', 'c', 'y']

    References:
        Papaspiliopoulos, Roberts and Sköld, A general framework for the parametrization of
        hierarchical models, Statistical Science 2007.
    """

    def __init__(self, model: Callable[..., Any]) -> None:
        self.model = model
        self._learned: dict[str, Any] | None = None  # priors, once a run has observed something
        update_wrapper(self, model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model.

        Args:
            *args: Its arguments.
            **kwargs: Its keyword arguments.
        """
        if self._learned is not None:
            return self._in_form(self._learned, True, args, kwargs)
        learned = learned_priors(self.model, args, kwargs)
        observes = _observes(self.model, args, kwargs)
        if observes:
            self._learned = learned
        return self._in_form(learned, observes, args, kwargs)

    def _in_form(self, learned: dict[str, Any], observes: bool, args: Any, kwargs: Any) -> Any:
        return reparam(self.model, config=partial(_form, learned, observes))(*args, **kwargs)


def learned_priors(
    model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Of each latent site in a plate of rows, whether the arrays of its prior are learned.

    They come in two lists: all of them, and those that the form above would leave as they are.
    """
    return dict(learned_parts(model, args, kwargs, _priors_of_rows))


def _priors_of_rows(sites: Sites) -> dict[str, Any]:
    """The arrays of the priors of rows, and those alone that this form would leave learned."""
    found = {}
    for name, site in sites.items():
        if is_latent(site) and any(holds_rows(f, sites) for f in site["cond_indep_stack"]):
            fn = without_axes(site["fn"])
            kept = [getattr(fn, what) for what in LOCATION_SCALE_PRIORS.get(type(fn), ())]
            found[name] = jax.tree.leaves(site["fn"]), kept
    return found


def _observes(model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a run with these arguments observes anything."""

    def look() -> bool:
        return any(is_observed(site) for site in sites_of(model, args, kwargs).values())

    with block():
        return static_result(look)


def _form(learned: dict[str, Any], observes: bool, site: Site) -> Reparam | None:
    """How a site is written, as a handler ``reparam`` asks; None if it stays as it is.

    In a run that ``observes`` nothing the families that have no such form stay too, which may be
    those of what is observed in others.
    """
    parts, kept = learned.get(site["name"], ([], []))
    if not any(parts) or not is_continuous_latent(site):
        return None
    fn = without_axes(site["fn"])
    if type(fn) in (*LOCATION_SCALE_PRIORS, dist.MultivariateNormal) and not any(kept):
        return _Standard()
    if observes:
        raise _no_form(site["name"], fn, any(kept))
    return None


class _Standard(Reparam):
    """A value as its location and its scale, or the factor of its covariance, times z."""

    def __call__(self, name: str, fn: Any, obs: Any) -> tuple[None, Array]:
        fn, batch_shape, event_dim = self._unwrap(fn)
        if type(fn) is dist.MultivariateNormal:
            standard = dist.Normal(0, 1).expand(fn.event_shape).to_event(1)
        else:
            kept = {what: getattr(fn, what) for what in LOCATION_SCALE_PRIORS[type(fn)]}
            standard = type(fn)(**kept, loc=0.0, scale=1.0)
        standard = self._wrap(standard, batch_shape, event_dim)
        z = numpyro.sample(f"{name}_decentered", standard)
        if type(fn) is dist.MultivariateNormal:
            return None, fn.loc + apply(fn.scale_tril, z)
        return None, fn.loc + fn.scale * z


def _no_form(name: str, fn: Any, has_learned_shape: bool) -> NotImplementedError:
    family = type(fn).__name__
    if has_learned_shape:
        return NotImplementedError(
            f"`df` of site '{name}' is learned: untouched rows would move it, whatever the form. "
            "Fix it, or learn it with all rows in each step."
        )
    known = ", ".join(kind.__name__ for kind in (*LOCATION_SCALE_PRIORS, dist.MultivariateNormal))
    return NotImplementedError(
        f"the prior of site '{name}' is learned and is a {family}; not_centred knows {known}. "
        "Write the site around one of a fixed prior, as `tau * numpyro.sample(name, "
        "dist.HalfNormal(1))` for HalfNormal(tau), or `jnp.exp` of a Normal for a LogNormal."
    )
