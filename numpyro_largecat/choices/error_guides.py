# SPDX-License-Identifier: Apache-2.0
"""Guides of the error of the chosen class, alone or with a guide of all other sites."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpyro
from jax import Array, random
from numpyro.handlers import block, substitute
from numpyro.infer.autoguide import AutoGuide, AutoGuideList

from numpyro_largecat._checks import check_shape
from numpyro_largecat.choices.augmented_categorical import AugmentedCategorical
from numpyro_largecat.choices.error_posteriors import (
    POSTERIORS,
    ErrorPosterior,
    ErrorSite,
    LocalErrors,
    Locations,
)
from numpyro_largecat.choices.kept_per_row import upper_quantile
from numpyro_largecat.handlers.internals import has_seen_model
from numpyro_largecat.handlers.run_model import sites_of
from numpyro_largecat.handlers.sites import base_distribution, is_latent
from numpyro_largecat.handlers.static_result import static_result


class AutoError(AutoGuide):
    """Guide of one error site, a part for NumPyro's ``AutoGuideList``.

    ``ErrorGuideList`` makes a whole guide with such parts in one line; use this one to put a list
    together by hand. The error is independent of all other sites in the guide.

    Args:
        model: The model, as it is: other sites need not be blocked.
        site: Name of the error's site.
        posterior: ``LocalErrors(...)`` or ``AmortizedErrors(...)``; by default ``LocalErrors()``.
        prefix: Middle of the names of parameters, "{site}_{prefix}_loc" and so on.
        create_plates: As in NumPyro's autoguides; not needed with ``SubsampledSVI``.

    Raises:
        ValueError: When it is first run, if the model has no such latent site, observes no
            ``AugmentedCategorical``, or gives the site another family than its choice's ``noise``.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro
        >>> import numpyro_largecat as lc
        >>> def model(y=None):
        ...     with lc.data_plate("data", 2):
        ...         error = numpyro.sample("y_error", lc.error_distribution("gumbel"))
        ...         choice = lc.AugmentedCategorical(jnp.zeros((2, 5)), error=error, noise="gumbel")
        ...         numpyro.sample("y", choice, obs=y)
        >>> guide = lc.choices.AutoError(model, "y_error", lc.LocalErrors("gumbel"))
        >>> with numpyro.handlers.seed(rng_seed=0):
        ...     error = guide(jnp.array([0, 3]))["y_error"]
        >>> error.shape
        (2,)

    References:
        Ruiz, Titsias, Dieng and Blei, Augment and Reduce, ICML 2018, Eq. 7.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        site: str,
        posterior: ErrorPosterior | None = None,
        *,
        prefix: str = "auto",
        create_plates: Callable[..., Any] | None = None,
    ) -> None:
        self.site = site
        self.posterior = LocalErrors() if posterior is None else posterior
        self._described: ErrorSite
        super().__init__(model, prefix=prefix, create_plates=create_plates)

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Array]:
        """Sample the error.

        Args:
            *args: Arguments of the model.
            **kwargs: Keyword arguments of the model.

        Returns:
            The value of the site, by name.
        """
        if not has_seen_model(self):
            self._setup_prototype(*args, **kwargs)
        created = self._create_plates(*args, **kwargs)
        plates = partial(_opened, [created[name] for name in self._prototype_frames])
        loc, scale = self.posterior.loc_and_scale(self._described, plates, args, kwargs)
        self._check_shape(loc, created)
        with plates():
            fn = self._family(loc, scale).to_event(self._described.event_dim)
            return {self.site: numpyro.sample(self.site, fn)}

    def sample_posterior(
        self,
        rng_key: Array,
        params: dict[str, Any],
        *args: Any,
        sample_shape: tuple[int, ...] = (),
        **kwargs: Any,
    ) -> dict[str, Array]:
        """Draw errors: of all rows, or with ``AmortizedErrors`` of the rows in the arguments.

        Args:
            rng_key: A JAX random key.
            params: Parameters, as ``get_params`` gives them.
            *args: Arguments of the model.
            sample_shape: Shape of the draws.
            **kwargs: Keyword arguments of the model.
        """
        loc, scale = self._read(params, args, kwargs)
        return {self.site: self._family(loc, scale).sample(rng_key, sample_shape)}

    def median(self, params: dict[str, Any]) -> dict[str, Array]:
        """Medians of the errors of all rows; nothing with ``AmortizedErrors``, which needs data."""
        return self.quantiles(params, 0.5)

    def quantiles(self, params: dict[str, Any], quantiles: Any) -> dict[str, Array]:
        """Quantiles of the errors of all rows; nothing with ``AmortizedErrors``.

        Args:
            params: Parameters, as ``get_params`` gives them.
            quantiles: Probabilities in (0, 1); their axes come first in the result.
        """
        if self.posterior.needs_data:
            return {}
        loc, scale = self._read(params, (), {})
        quantiles = jnp.asarray(quantiles)
        quantiles = quantiles.reshape(quantiles.shape + (1,) * jnp.ndim(loc))
        return {self.site: self._family(loc, scale).icdf(quantiles)}

    def _read(self, params: dict[str, Any], args: Any, kwargs: Any) -> Locations:
        """Give the locations and scales that parameters hold, of whole tables."""
        if not has_seen_model(self):
            raise RuntimeError("The guide has not been run yet: fit it first.")
        with substitute(data=params):
            return self.posterior.loc_and_scale(self._described, nullcontext, args, kwargs)

    def _check_shape(self, loc: Array, plates: dict[str, Any]) -> None:
        shape = list(self._described.whole)
        for name, frame in self._prototype_frames.items():
            shape[frame.dim - self._described.event_dim] = plates[name].subsample_size
        fix = "Features need one row for each row of the data plate."
        check_shape(
            f"locations of '{self.site}'", loc, tuple(shape), "as the site in this step", fix
        )

    @property
    def _family(self) -> Callable[..., Any]:
        return POSTERIORS[self.posterior.family]

    def _setup_prototype(self, *args: Any, **kwargs: Any) -> None:
        """Learn the plates and shape of the site; nothing is computed."""
        with block():
            found = static_result(lambda: self._describe(sites_of(self.model, args, kwargs)))
        self._described, self._prototype_frames, self._prototype_frame_full_sizes = found
        self.prototype_trace: dict[str, Any] = {}  # no arrays of the model are kept

    def _describe(self, sites: dict[str, Any]) -> tuple[ErrorSite, dict[str, Any], dict[str, int]]:
        latent = [name for name, site in sites.items() if is_latent(site)]
        if self.site not in latent:
            raise ValueError(
                f"`site` must name a latent site of the model; got '{self.site}', and the "
                f"latent sites are {latent}."
            )
        site = sites[self.site]
        frames = {frame.name: frame for frame in site["cond_indep_stack"]}
        sizes = {name: sites[name]["args"][0] for name in frames}
        whole = list(jnp.shape(site["value"]))
        for name, frame in frames.items():
            whole[frame.dim - site["fn"].event_dim] = sizes[name]
        choice = _choice_of(self.site, site, sites)
        return (
            ErrorSite(
                name=f"{self.site}_{self.prefix}",
                whole=tuple(whole),
                event_dim=site["fn"].event_dim,
                start=upper_quantile(choice.noise, choice.num_categories),
            ),
            frames,
            sizes,
        )


class ErrorGuideList(AutoGuideList):
    """Guide of a model with explicit errors: theirs, and any guide for the rest.

    It is NumPyro's ``AutoGuideList`` of ``rest``, made for the model with its errors hidden, and of
    an ``AutoError`` for each error.

    With ``TraceMeanField_ELBO`` put the errors behind all other latent sites of the model, in the
    order of ``errors``: NumPyro warns of sites that the guide has in another order.

    Args:
        model: The model.
        rest: Function of a model that makes the guide of all other sites, such as ``AutoNormal``,
            or ``functools.partial(AutoNormal, init_scale=0.01)``. None if there are no other
            latent sites.
        errors: ``LocalErrors(...)`` or ``AmortizedErrors(...)`` for each error, by site.
        prefix: Middle of the names of the errors' parameters, "{site}_{prefix}_loc" and so on.
        create_plates: As in NumPyro's autoguides, for the errors; not needed with
            ``SubsampledSVI``.

    Raises:
        ValueError: If ``errors`` is empty; when it is first run, as ``AutoError``.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist, optax
        >>> import numpyro_largecat as lc
        >>> from numpyro.infer import TraceMeanField_ELBO
        >>> from numpyro.infer.autoguide import AutoNormal
        >>> def model(x, y=None, rows=None):
        ...     with lc.class_plate("classes", 1000, labels=y, num_sampled=20) as classes:
        ...         w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
        ...     with lc.data_plate("data", 300, rows):
        ...         error = numpyro.sample("y_error", lc.error_distribution("normal"))
        ...         choice = lc.AugmentedCategorical(x @ w.T, classes, "normal", error=error)
        ...         numpyro.sample("y", choice, obs=y)
        >>> guide = lc.ErrorGuideList(model, AutoNormal, errors={"y_error": lc.LocalErrors()})
        >>> svi = lc.SubsampledSVI(model, guide, optax.adagrad(0.1), TraceMeanField_ELBO())
        >>> x = jax.random.normal(jax.random.key(0), (300, 2))
        >>> y = (jnp.abs(x[:, 0]) * 100).astype(int)
        >>> batches = lc.ArrayBatches(x, y, batch_size=50)
        >>> result = svi.run(jax.random.key(1), 20, batches=batches, progress_bar=False)
        >>> result.params["y_error_auto_loc"].shape
        (300,)

    References:
        Ruiz, Titsias, Dieng and Blei, Augment and Reduce, ICML 2018, Algorithm 2.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        rest: Callable[[Callable[..., Any]], AutoGuide] | None,
        *,
        errors: Mapping[str, ErrorPosterior],
        prefix: str = "auto",
        create_plates: Callable[..., Any] | None = None,
    ) -> None:
        if not errors:
            need = 'a posterior for an error site, such as {"y_error": lc.LocalErrors()}'
            raise ValueError(f"`errors` must have {need}; got none.")
        super().__init__(model, prefix=prefix, create_plates=create_plates)
        self.errors = dict(errors)
        self.rest = None if rest is None else rest(_without_errors(model, self.errors))
        if self.rest is not None:
            self.append(self.rest)
        for site, posterior in self.errors.items():
            part = AutoError(model, site, posterior, prefix=prefix, create_plates=create_plates)
            self.append(part)

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Array]:
        """Sample all latent sites.

        Args:
            *args: Arguments of the model.
            **kwargs: Keyword arguments of the model.

        Returns:
            The values of the sites, by name.
        """
        return _run_parts(self, *args, **kwargs)

    def sample_posterior(
        self,
        rng_key: Array,
        params: dict[str, Any],
        *args: Any,
        sample_shape: tuple[int, ...] = (),
        **kwargs: Any,
    ) -> dict[str, Array]:
        """Draw all latent sites, see ``AutoError.sample_posterior``.

        Args:
            rng_key: A JAX random key.
            params: Parameters, as ``get_params`` gives them.
            *args: Arguments of the model.
            sample_shape: Shape of the draws.
            **kwargs: Keyword arguments of the model.
        """
        draws: dict[str, Array] = {}
        for part, key in zip(self, random.split(rng_key, len(self)), strict=True):
            draws |= part.sample_posterior(key, params, *args, sample_shape=sample_shape, **kwargs)
        return draws


def without_errors(model: Callable[..., Any], guide: Any) -> tuple[Any, Any]:
    """Return model and guide with their errors hidden; a guide without ``AutoError`` stays as is.

    This serves predictions, which depend on utilities alone and must not ask for errors of new
    rows.
    """
    parts = list(guide) if isinstance(guide, AutoGuideList) else [guide]
    errors = [part.site for part in parts if isinstance(part, AutoError)]
    if not errors:
        return model, guide
    rest = [part for part in parts if not isinstance(part, AutoError)]
    return _without_errors(model, errors), partial(_run_parts, rest)


def _run_parts(parts: Iterable[Callable[..., Any]], *args: Any, **kwargs: Any) -> dict[str, Array]:
    return {name: value for part in parts for name, value in part(*args, **kwargs).items()}


def _choice_of(name: str, site: dict[str, Any], sites: dict[str, Any]) -> AugmentedCategorical:
    """Find the choice that an error belongs to, or else one that it may belong to."""
    found = [base_distribution(s["fn"]) for s in sites.values() if s["type"] == "sample"]
    choices = [fn for fn in found if isinstance(fn, AugmentedCategorical)]
    if not choices:
        need = "the `error=` of a site with an `lc.AugmentedCategorical`"
        raise ValueError(f"site '{name}' must be {need}; the model has none.")
    own = next((fn for fn in choices if fn.error is site["value"]), None)
    if own is None:  # the model computes `error=` from the site
        return choices[0]
    prior, needed = (type(base_distribution(fn)) for fn in (site["fn"], own.noise.distribution()))
    if prior is not needed:
        raise ValueError(
            f"site '{name}' must have the errors of its choice, whose `noise` is {own.noise} "
            f"({needed.__name__}); got {prior.__name__}. Draw it by "
            f'`numpyro.sample("{name}", lc.error_distribution(noise))`.'
        )
    return own


def _without_errors(model: Callable[..., Any], errors: Container[Any]) -> block:
    """Hide error sites, whose value is then 0, and what may be computed from them."""

    def value(msg: dict[str, Any]) -> Array | None:
        is_error = msg["type"] == "sample" and msg["name"] in errors
        return jnp.zeros(msg["fn"].shape()) if is_error else None

    def is_hidden(msg: dict[str, Any]) -> bool:
        return msg.get("name") in errors or msg["type"] == "deterministic"

    return block(substitute(model, substitute_fn=value), hide_fn=is_hidden)


@contextmanager
def _opened(plates: Iterable[numpyro.plate]) -> Iterator[None]:
    with ExitStack() as stack:
        for plate in plates:
            stack.enter_context(plate)
        yield
