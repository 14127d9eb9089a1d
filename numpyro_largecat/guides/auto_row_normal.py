# SPDX-License-Identifier: Apache-2.0
"""An automatic guide with a covariance for the values of each row, and one for dense sites."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array, random
from jax.scipy.special import ndtri
from numpyro.distributions import constraints
from numpyro.distributions.util import periodic_repeat
from numpyro.handlers import seed, substitute
from numpyro.infer.autoguide import AutoGuide
from numpyro.infer.initialization import init_to_mean, init_to_median

from numpyro_largecat._checks import check_count, is_concrete, refuse_entries
from numpyro_largecat.guides.correlated_normal import CorrelatedNormal
from numpyro_largecat.guides.joint_sites import JointSite, joint_sites
from numpyro_largecat.handlers.internals import has_seen_model, start_values
from numpyro_largecat.ops.lower_triangle import (
    FullTriangle,
    LowRankTriangle,
    apply,
    num_below_diagonal,
)


def init_to_finite_mean(site: Any = None) -> Any:
    """Start at the mean of the prior, and at the median of draws where it has none, as Cauchy's."""
    if site is None:
        return partial(init_to_finite_mean)
    mean = init_to_mean(site)
    if mean is None or (is_concrete(mean) and jnp.isfinite(mean).all()):
        return mean
    return jnp.where(jnp.isfinite(mean), mean, init_to_median(site))


class AutoRowNormal(AutoGuide):
    r"""Guide in which the values of one row are jointly normal, with a covariance of their own.

    All latent values of row k of a plate of rows, those of all features of all its sites, have one
    normal: of class plates, entity plates, data plates, and plates of NumPyro's own of which a step
    holds some rows. All other latent values, the dense sites, such as scales and regression
    coefficients, have another. Rows are independent of each other and, but
    for ``follow``, of the dense sites. A value that is constrained is one of a free value, which is
    normal, by NumPyro's ``biject_to`` of its support. With the free values x of a row in the order
    of the model,

    .. math:: x = \mathrm{loc} + \mathrm{scale} \cdot z, \qquad
              z_s = A_s z_{<s} + (I + L_s) \, \epsilon_s, \qquad \epsilon_s \sim N(0, I)

    for each site s, where :math:`z_{<s}` are those of the earlier sites of the row, and
    :math:`L_s` is strictly lower triangular. That is any covariance, once. It starts as that of
    ``AutoNormal``: A = L = 0. With ``follow``, :math:`z_{<s}` has those of these dense sites too,
    so that rows move with them.

    Parameters of site s, with D values in a row and E in the earlier sites:
    ``{site}_auto_loc`` and ``{site}_auto_scale``, as those of ``AutoNormal``,
    ``{site}_auto_lower``, shape (K, D (D - 1) / 2), and ``{site}_auto_follow``, A, shape (K, D, E).
    With ``rank`` R in place of the lower triangle ``{site}_auto_left`` and ``{site}_auto_right``, U
    and V, shape (K, D, R).
    All are rows of the plate, so ``SubsampledSVI`` takes and moves those that a step touches.

    **Losses.** Each site is drawn given those before it, so any loss will do.
    ``TraceMeanField_ELBO`` has the divergence to normal priors in closed form, given the draw of
    the row's earlier sites; that of other priors comes from the draw, as with ``Trace_ELBO``.

    **What it does not hold:** dependence of rows on each other, other than by dense sites that they
    follow, and on other dense sites.

    Cost: O(D_row^2) for each touched row in a step, time and memory, with D_row the values of a
    row; the tables have (D_row + 3) / 2 times as many numbers as those of a point estimate, where
    ``AutoNormal`` has twice. For 10**6 classes of 32 values that is 2.2 GB, and three times that
    with Adam. ``rank`` R has 2 + 2 R times as many for the one site of a row; how sites follow
    each other stays full. ``quantiles`` and ``covariances`` make D_row^2 numbers for each row of
    the table. O(D_dense^2) for the dense sites.

    Args:
        model: The model.
        prefix: Middle of the names of parameters.
        init_loc_fn: NumPyro's function for start values; the mean of the prior by default, since
            rows that nothing touches stay there, and the median of draws where it has no mean.
        init_scale: Standard deviation of free values to start from, positive.
        follow: Names of dense sites of this guide that rows follow: the mean of a row is then
            linear in their free values, as where the mean or scale of random effects is learned.
            The model must draw them before the rows.
        rank: R, of the lower triangles of sites of rows: those below the diagonal of
            :math:`U V^T`, with 2 D R numbers, where these are fewer and R^2 is at most D. With the
            scales that is any diagonal and a matrix of rank R, and more. None for full ones.
        create_plates: As in NumPyro's autoguides; not needed with ``SubsampledSVI``.

    Raises:
        ValueError: If ``init_scale`` is not positive, or ``rank`` below 1; when it is first run, if
            a site in a plate of rows has an axis that is neither the plate's nor of its event, or
            ``follow`` names what is no dense site or comes after rows.
        NotImplementedError: When it is first run, if a site in such a plate is in another plate
            too, or a site is discrete.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist, optax
        >>> import numpyro_largecat as lc
        >>> from numpyro.infer import TraceMeanField_ELBO
        >>> def model(x, y=None, rows=None):
        ...     with lc.class_plate("classes", 1000, labels=y, num_sampled=20) as classes:
        ...         w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
        ...         b = numpyro.sample("b", dist.Normal(0, 1))
        ...     with lc.data_plate("data", 300, rows) as rows:
        ...         lc.sample_choice("y", x @ w.T + b, classes=classes, rows=rows, obs=y)
        >>> guide = lc.AutoRowNormal(model)
        >>> svi = lc.SubsampledSVI(model, guide, optax.adagrad(0.1), TraceMeanField_ELBO())
        >>> x = jax.random.normal(jax.random.key(0), (300, 2))
        >>> y = (jnp.abs(x[:, 0]) * 100).astype(int)
        >>> batches = lc.ArrayBatches(x, y, batch_size=50)
        >>> result = svi.run(jax.random.key(1), 20, batches=batches, progress_bar=False)
        >>> guide.covariances(result.params)["classes"].shape  # of w and b of each class
        (1000, 3, 3)

    References:
        Pourahmadi, Joint mean-covariance models with applications to longitudinal data:
        unconstrained parameterisation, Biometrika 1999.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        *,
        prefix: str = "auto",
        init_loc_fn: Callable[..., Any] = init_to_finite_mean,
        init_scale: float = 0.1,
        follow: Sequence[str] = (),
        rank: int | None = None,
        create_plates: Callable[..., Any] | None = None,
    ) -> None:
        self._rank = None if rank is None else check_count("rank", rank, 1)
        refuse_entries("`init_scale`", init_scale, ~(np.asarray(init_scale) > 0), "positive")
        self._init_scale = init_scale
        self.follow = tuple(follow)
        self._sites: list[JointSite] = []
        self._before: dict[str, list[str]] = {}  # the sites that each follows
        super().__init__(model, prefix=prefix, init_loc_fn=init_loc_fn, create_plates=create_plates)

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Array]:
        """Sample all latent sites.

        Args:
            *args: Arguments of the model.
            **kwargs: Keyword arguments of the model.

        Returns:
            The values of the sites, by name.
        """
        if not has_seen_model(self):
            self._setup_prototype(*args, **kwargs)
        return self._draw(self._create_plates(*args, **kwargs))

    def sample_posterior(
        self,
        rng_key: Array,
        params: dict[str, Any],
        *args: Any,
        sample_shape: tuple[int, ...] = (),
        **kwargs: Any,
    ) -> dict[str, Array]:
        """Draw all latent sites, with all rows: O(rows) memory for each draw.

        Args:
            rng_key: A JAX random key.
            params: Parameters, as ``get_params`` gives them.
            *args: Not needed.
            sample_shape: Shape of the draws.
            **kwargs: Not needed.
        """
        del args, kwargs

        def draw(key: Array) -> dict[str, Array]:
            return substitute(seed(self._draw, key), data=params)(None)

        draws = jax.vmap(draw)(random.split(rng_key, math.prod(sample_shape)))
        return {name: v.reshape(*sample_shape, *v.shape[1:]) for name, v in draws.items()}

    def median(self, params: dict[str, Any]) -> dict[str, Array]:
        """Medians of all sites, by name."""
        return {s.name: s.constrained(params[self._param(s, "loc")]) for s in self._sites}

    def quantiles(self, params: dict[str, Any], quantiles: Any) -> dict[str, Array]:
        """Quantiles of each value on its own, with all rows.

        Args:
            params: Parameters, as ``get_params`` gives them.
            quantiles: Probabilities in (0, 1); their axes come first in the result.
        """
        normal = ndtri(jnp.asarray(quantiles, jnp.result_type(float)))
        factors, found = self._factors(params), {}
        for site in self._sites:
            loc = params[self._param(site, "loc")]
            sd = jnp.linalg.norm(factors[site.name], axis=-1).reshape(loc.shape)
            step = normal.reshape(normal.shape + (1,) * loc.ndim) * sd
            rises = site.constrained(loc + sd) >= site.constrained(loc - sd)
            found[site.name] = jnp.where(
                rises, site.constrained(loc + step), site.constrained(loc - step)
            )
        return found

    def covariances(self, params: dict[str, Any]) -> dict[str | None, Array]:
        """Covariances of the free values of each row, by plate; those of dense sites under None.

        The values of a row are those of its sites in the order of the model.

        Args:
            params: Parameters, as ``get_params`` gives them.

        Returns:
            Arrays of shape (K, D_row, D_row), and (D_dense, D_dense).
        """
        factors = self._factors(params)
        together: dict[str | None, list[Array]] = {}
        for site in self._sites:
            together.setdefault(site.rows, []).append(factors[site.name])
        whole = {rows: jnp.concatenate(parts, axis=-2) for rows, parts in together.items()}
        return {rows: f @ jnp.swapaxes(f, -1, -2) for rows, f in whole.items()}

    def _setup_prototype(self, *args: Any, **kwargs: Any) -> None:
        """Learn the sites, and give rows that a first step lacks the start values of its rows."""
        super()._setup_prototype(*args, **kwargs)
        start = start_values(self)
        self._sites = joint_sites(self.prototype_trace, start)
        self._before = _before(self._sites, self.follow)
        for site in self._sites:
            for name in site.plates:
                frame, size = self._prototype_frames[name], self._prototype_frame_full_sizes[name]
                if frame.size != size:
                    axis = frame.dim - site.event_dim
                    start[site.name] = periodic_repeat(start[site.name], size, axis)

    def _draw(self, plates: Mapping[str, numpyro.plate] | None) -> dict[str, Array]:
        """Sample the sites in these plates; without plates, with all rows."""
        values: dict[str, Array] = {}
        standard: dict[str, Array] = {}  # z of each site
        for site in self._sites:
            with _opened(plates, () if site.rows is None else (site.rows,)):
                loc, scale, lower = self._own_params(site)
                mean = loc
                if self._before[site.name]:
                    before = [standard[name] for name in self._before[site.name]]
                    z = _joined(before, site.joined(loc))
                    follow = self._table(site, "follow", jnp.zeros((site.size, z.shape[-1])))
                    mean = loc + scale * apply(follow, z).reshape(loc.shape)
            fn = CorrelatedNormal(
                mean, scale, lower, event_dim=site.event_dim, joint_dim=len(site.shape)
            )
            if site.transform is not None:
                fn = dist.TransformedDistribution(fn, site.transform)
            with _opened(plates, site.plates):
                values[site.name] = numpyro.sample(site.name, fn)
            standard[site.name] = site.joined((site.free(values[site.name]) - loc) / scale)
        return values

    def _own_params(self, site: JointSite) -> tuple[Array, Array, FullTriangle | LowRankTriangle]:
        """Location, scale and lower triangle of a site, apart from how it follows others."""
        start, event_dim = start_values(self)[site.name], len(site.shape)
        loc = numpyro.param(self._param(site, "loc"), start, event_dim=event_dim)
        scale = numpyro.param(
            self._param(site, "scale"),
            lambda _: jnp.full(jnp.shape(start), self._init_scale, jnp.result_type(start)),
            constraint=constraints.softplus_positive,
            event_dim=event_dim,
        )
        return loc, scale, self._lower(site, site.joined(loc))

    def _lower(self, site: JointSite, loc: Array) -> FullTriangle | LowRankTriangle:
        """How the values of a site follow those before them; ``loc`` has their shape."""
        if site.size == 1:
            return FullTriangle(jnp.zeros_like(loc)[..., None])
        if self._is_low_rank(site):
            shape = (site.size, self._rank)
            # Waves, which differ from column to column; with zeros on both sides none would move.
            places, columns = (jnp.arange(size, dtype=loc.dtype) for size in shape)
            waves = jnp.cos(math.pi * (places[:, None] + 0.5) * columns / site.size)
            return LowRankTriangle(
                self._table(site, "left", waves), self._table(site, "right", jnp.zeros(shape))
            )
        packed = self._table(site, "lower", jnp.zeros(num_below_diagonal(site.size)))
        return FullTriangle.of_packed(packed, site.size)

    def _is_low_rank(self, site: JointSite) -> bool:
        """Whether the site is in a plate of rows, and low rank takes less memory than full."""
        if self._rank is None or site.rows is None or self._rank**2 > site.size:
            return False
        return 2 * self._rank * site.size < num_below_diagonal(site.size)

    def _table(self, site: JointSite, what: str, row: Array) -> Array:
        """A parameter that starts as ``row`` in each row."""
        start = start_values(self)[site.name]
        rows = jnp.shape(start)[: jnp.ndim(start) - len(site.shape)]
        of_row = row.astype(jnp.result_type(start))
        return numpyro.param(
            self._param(site, what),
            lambda _: jnp.broadcast_to(of_row, (*rows, *row.shape)),
            event_dim=row.ndim,
        )

    def _param(self, site: JointSite, what: str) -> str:
        return f"{site.name}_{self.prefix}_{what}"

    def _check_params(self, params: Mapping[str, Any]) -> None:
        """Refuse parameters of a guide with another ``rank`` or ``follow``."""
        for site in self._sites:
            own = ["left", "right"] if self._is_low_rank(site) else ["lower"] * (site.size > 1)
            before = ["follow"] * bool(self._before[site.name])
            wanted = [self._param(site, what) for what in ("loc", "scale", *own, *before)]
            if missing := [name for name in wanted if name not in params]:
                raise ValueError(
                    f"`params` must be those of this guide; they lack {missing}. Make the guide "
                    "with the `rank` and `follow` of the fit."
                )

    def _factors(self, params: dict[str, Any]) -> dict[str, Array]:
        """Factors of the covariances, the values of each site by the noise that they are made of.

        Dense noise comes first, if rows follow dense sites, and then that of the row.
        """
        self._check_params(params)
        sizes: dict[str | None, int] = {}
        places = {}
        for site in self._sites:
            places[site.name] = sizes.get(site.rows, 0)
            sizes[site.rows] = places[site.name] + site.size
        num_dense = sizes.get(None, 0) if self.follow else 0
        standard: dict[str, Array] = {}
        factors = {}
        for site in self._sites:
            _, scale, lower = substitute(self._own_params, data=params)(site)
            first = 0 if site.rows is None else num_dense
            width, place = first + sizes[site.rows], first + places[site.name]
            matrix = lower.matrix
            own = matrix + jnp.eye(site.size, dtype=matrix.dtype)
            factor = _with_columns(own, place, width)
            before = [_with_columns(standard[name], 0, width) for name in self._before[site.name]]
            if before:
                whole = [jnp.broadcast_to(f, (*own.shape[:-2], *f.shape[-2:])) for f in before]
                follow = params[self._param(site, "follow")]
                factor += follow @ jnp.concatenate(whole, axis=-2)
            standard[site.name] = factor
            factors[site.name] = site.joined(scale)[..., None] * factor
        return factors


def _before(sites: list[JointSite], followed: Sequence[str]) -> dict[str, list[str]]:
    """The sites that each site follows: dense ones that are named, and the earlier of its row.

    Raises:
        ValueError: If what is named is no dense site, or comes after the rows that follow it.
    """
    found: dict[str, list[str]] = {}
    dense = [site.name for site in sites if site.rows is None]
    for name in set(followed) - set(dense):
        raise ValueError(
            f"`follow` must name dense sites that this guide draws, {dense}; got '{name}'. What a "
            "model's `block` hides, as from a part of an AutoGuideList, no row here can follow."
        )
    for site in sites:
        own = [other.name for other in sites if other.rows == site.rows and other.name in found]
        late = [name for name in followed if name not in found]
        if site.rows is not None and late:
            raise ValueError(
                f"`follow` names site '{late[0]}', which the model draws after site '{site.name}' "
                "of rows. Draw it before."
            )
        found[site.name] = own if site.rows is None else [*followed, *own]
    return found


def _with_columns(factor: Array, place: int, width: int) -> Array:
    """The same with as many columns of zeros before, and after up to ``width``."""
    after = width - place - factor.shape[-1]
    return jnp.pad(factor, [(0, 0)] * (factor.ndim - 1) + [(place, after)])


def _joined(values: list[Array], like: Array) -> Array:
    """Values of several sites on one axis; what has no rows is repeated for those of ``like``."""
    rows = like.shape[:-1]
    return jnp.concatenate([jnp.broadcast_to(z, (*rows, z.shape[-1])) for z in values], axis=-1)


@contextmanager
def _opened(plates: Mapping[str, numpyro.plate] | None, names: tuple[str, ...]) -> Iterator[None]:
    """Inside of these plates, if there are any."""
    with ExitStack() as stack:
        for plate in [] if plates is None else [plates[name] for name in names]:
            stack.enter_context(plate)
        yield
