# SPDX-License-Identifier: Apache-2.0
r"""The means and variances of utilities where the guide draws the row of each class by itself.

Utilities that are affine in the values of a class's own row, with slopes that all classes share,

.. math:: \psi_{nk} = c_{nk} + \sum_p a_{np} \theta_{kp}, \qquad
          \theta_k \sim N(\mu_k, \Sigma_k)

are Gaussian and, given what is drawn outside of the class plate, independent over classes, with

.. math:: E \psi_{nk} = c_{nk} + \sum_p a_{np} \mu_{kp}, \qquad
          \mathrm{Var}\, \psi_{nk} = a_n^T \Sigma_k a_n .

Of a mean field :math:`\Sigma_k` is diagonal, and the variance a product with the slopes' squares.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array
from jax.typing import ArrayLike
from numpyro.handlers import substitute

from numpyro_largecat._checks import is_concrete
from numpyro_largecat.guides.correlated_normal import CorrelatedNormal
from numpyro_largecat.handlers.closed_over_arrays import run_compiled
from numpyro_largecat.handlers.run_model import (
    Around,
    as_drawn,
    at_centre,
    at_feasible_values,
    at_values_of,
    at_values_or_centre,
)
from numpyro_largecat.handlers.sites import (
    Site,
    Sites,
    base_distribution,
    is_latent,
    plates_of,
    unwrapped,
)
from numpyro_largecat.handlers.static_result import static_result
from numpyro_largecat.handlers.touched_rows import TouchedRows
from numpyro_largecat.reading.chunked_utilities import ChunkedUtilities, declared_variances
from numpyro_largecat.reading.row_factors import (
    by_row,
    of_site,
    own_factor,
    row_factors,
    variances,
)
from numpyro_largecat.reading.rows_held import take_rows_held

FEW_CLASSES, NEAR = 32, 1e-3  # classes looked at, and error of utilities for their size
Slopes = Mapping[str, Array]  # of the utilities (..., P) in the P values of a row, by site


class Moments(NamedTuple):
    """Means and variances of the utilities of some classes, shape (..., M)."""

    mean: Array
    variance: Array


class GaussianUtilities(NamedTuple):
    """The moments of the utilities of all classes, one chunk at a time.

    Attributes:
        utilities: The utilities.
        names: Sites in the class plate that the guide draws.
        are_correlated: Whether values of a row are.
        is_drawn_outside: Whether something that is outside of the class plate is drawn too.
        is_affine: Whether utilities beside the centre are as slopes say; a tracer in ``jit``.
        slopes_at_centre: The slopes with all that is drawn outside at its centre.
    """

    utilities: ChunkedUtilities
    names: list[str]
    are_correlated: bool
    is_drawn_outside: bool
    is_affine: ArrayLike = True
    slopes_at_centre: Slopes = MappingProxyType({})

    @classmethod
    def of(cls, utilities: ChunkedUtilities) -> GaussianUtilities | None:
        """The moments of these utilities; None if they are not Gaussian.

        That follows from the structure of model and guide. In the class plate the guide must draw
        each site of the model from a Normal distribution, or hold it at a point, and these must not
        depend on each other, but as ``AutoRowNormal`` has it; the utilities must be as above. A
        model that declares the variances of its utilities may have no such site. Where the
        derivative does not say how utilities change, as of a step, they are seen to be no such
        function at the values of a few classes; under ``jit`` their variances are NaN then.
        """
        rows = None if utilities.has_reads else static_result(lambda: _normal_rows(utilities))
        if rows is None:
            return None
        names, are_correlated = rows
        if not (_are_affine(utilities, names) if names else _declare_variances(utilities)):
            return None
        is_drawn_outside = utilities.runs.draws_outside
        found = cls(utilities, names, are_correlated, is_drawn_outside)
        if not names:
            return found
        is_affine, slopes = run_compiled(found._look)
        if is_concrete(is_affine) and not is_affine:
            return None
        return found._replace(is_affine=is_affine, slopes_at_centre=slopes)

    def with_progress(self, num_passes: int) -> GaussianUtilities:
        """The same with a progress bar, if one is asked for, of passes over all chunks."""
        return self._replace(utilities=self.utilities.with_progress(num_passes))

    def slopes(self, key: Array | None) -> Slopes:
        """Slopes of the utilities in the values of a class's row, which all classes share.

        Cost: O(P) runs of the model with one class; at the centre they are known.
        """
        is_known = key is None or not self.names
        found = self.slopes_at_centre if is_known else self._slopes_at(key)
        return {name: jnp.where(self.is_affine, slope, jnp.nan) for name, slope in found.items()}

    def _slopes_at(self, key: Array | None) -> Slopes:
        return _slopes(self.utilities, self.names, jnp.array(0), None, key)

    def _look(self) -> tuple[Array, Slopes]:
        """Whether some classes change as the slopes say, two sds to each side, and these."""
        num, slopes = min(FEW_CLASSES, self.utilities.num_categories), self._slopes_at(None)
        drawn, run_model = _run(self.utilities, 0, num, None, _centre_of_rows(self.utilities, None))
        sds = {name: jnp.sqrt(drawn[name]["fn"].variance) for name in self.names}

        def utilities_at(step: float) -> Array:
            moved = {
                name: {**drawn[name], "value": drawn[name]["value"] + step * sd}
                for name, sd in sds.items()
            }
            return _choice(self.utilities, run_model(drawn | moved)).utilities

        plate, centre = self.utilities.plate, utilities_at(0.0)
        rises = [slopes[name] @ by_row(sd, drawn[name], plate).T for name, sd in sds.items()]
        rise = jnp.sum(jnp.stack(rises), axis=0)
        size = jnp.where(jnp.isfinite(centre), abs(centre), 0).max() + abs(rise).max()
        off = [abs(utilities_at(step) - centre - step * rise) for step in (-2.0, 2.0)]
        near = max(NEAR, 32 * float(jnp.finfo(centre.dtype).eps)) * size
        return ~jnp.any(jnp.where(centre > -jnp.inf, jnp.stack(off), 0) > near), slopes

    def of_chunk(
        self, part: ChunkedUtilities, chunk: ArrayLike, key: Array | None, slopes: Slopes
    ) -> tuple[Moments, Array]:
        """Moments of the utilities of a chunk, and its classes; ``part`` is the utilities' own.

        Sites outside of the class plate are drawn with the key or, without one, at their centre.
        """
        classes = part.classes_of(chunk)
        drawn, sites = _at_centre_of_rows(part, classes[0], part.chunk_size, key)
        mean = part.known_utilities(sites, classes)
        declared = declared_variances(_choice(part, sites))
        variance = jnp.asarray(0.0 if declared is None else declared, mean.dtype)
        if self.are_correlated:
            factors = self._factors(part, classes[0], drawn, key)
            found = variances([slopes[name] for name in self.names], factors)
            variance += found.astype(mean.dtype)
        else:
            for name in self.names:
                of_rows = by_row(drawn[name]["fn"].variance, drawn[name], part.plate)
                variance += slopes[name] ** 2 @ of_rows.T
        return Moments(mean, jnp.broadcast_to(variance, mean.shape)), classes

    def _factors(
        self, part: ChunkedUtilities, start: ArrayLike, drawn: Sites, key: Array | None
    ) -> Array:
        """Of the covariances of rows of a chunk, all values one after the other, (M, P, P)."""
        sites = {name: drawn[name] for name in self.names}

        def means_at(values: dict[str, Array]) -> dict[str, Array]:
            data = {name: of_site(x, sites[name], part.plate) for name, x in values.items()}
            centre = _centre_of_rows(part, key)

            def around(guide: Any) -> Any:
                return substitute(centre(guide), data=data)

            moved, _ = _run(part, start, part.chunk_size, key, around)
            return {name: by_row(moved[name]["fn"].mean, moved[name], part.plate) for name in sites}

        own = {name: own_factor(site, part.plate) for name, site in sites.items()}
        centre = {name: by_row(site["value"], site, part.plate) for name, site in sites.items()}
        return row_factors(own, means_at, centre)


def _are_affine(utilities: ChunkedUtilities, names: list[str]) -> bool:
    """Whether utilities are affine in a class's own values, with slopes that all classes share."""

    def look(class_id: Array, values: dict[str, Array]) -> Any:
        shared = _slopes(utilities, names, class_id, values, jax.random.key(0))
        return shared, _beside_own_values(utilities, values)

    def of_two_classes() -> None:
        drawn, _ = _at_centre_of_rows(utilities, 0, 1, jax.random.key(0))
        values = {name: jnp.stack([drawn[name]["value"]] * 2) for name in names}
        jax.vmap(look, out_axes=None)(jnp.arange(2), values)

    try:
        static_result(of_two_classes)
    except ValueError as error:
        if "out_axes" in str(error):  # what should be shared depends on the class or its values
            return False
        raise
    return True


def _normal_rows(utilities: ChunkedUtilities) -> tuple[list[str], bool] | None:
    """Sites in the class plate that the guide draws, in its order; whether values of a row covary.

    None unless guide and model have the same sites there, each Normal or at a point.
    """
    drawn, run_model = _run(utilities, 0, 2, jax.random.key(0), as_drawn)
    kinds = {name: type(unwrapped(site["fn"])) for name, site in _of_rows(utilities, drawn).items()}
    if kinds.keys() != _of_rows(utilities, run_model(drawn)).keys():
        return None
    if not set(kinds.values()) <= {dist.Normal, CorrelatedNormal, dist.Delta}:
        return None
    names = [name for name, kind in kinds.items() if kind is not dist.Delta]
    return names, CorrelatedNormal in kinds.values()


def _declare_variances(utilities: ChunkedUtilities) -> bool:
    def look() -> bool:
        _, sites = _at_centre_of_rows(utilities, 0, 2, jax.random.key(0))
        return declared_variances(_choice(utilities, sites)) is not None

    return static_result(look)


def _slopes(
    utilities: ChunkedUtilities,
    names: list[str],
    class_id: Array,
    values: dict[str, Array] | None,
    key: Array | None,
) -> Slopes:
    """Slopes of the utility of one class in its own values, at its centre or at these values."""
    drawn, run_model = _run(utilities, class_id, 1, key, _centre_of_rows(utilities, key))
    own = {name: drawn[name]["value"] for name in names} if values is None else values

    def utility(values: dict[str, Array]) -> Array:
        at_values = {name: {**drawn[name], "value": value} for name, value in values.items()}
        psi = _choice(utilities, run_model(drawn | at_values)).utilities
        return jnp.broadcast_to(psi, (*utilities.batch_shape, 1))[..., 0]

    return {
        name: slope.reshape(*utilities.batch_shape, own[name].size)
        for name, slope in jax.jacfwd(utility)(own).items()
    }


def _beside_own_values(utilities: ChunkedUtilities, values: dict[str, Array]) -> Any:
    """What the guide has beside the values of a class's row, which these must not move."""
    around = partial(substitute, data=values)
    drawn, _ = _run(utilities, 0, 1, jax.random.key(0), around)
    of_rows = _of_rows(utilities, drawn)
    outside = [site["value"] for name, site in drawn.items() if name not in of_rows]
    return outside, [_fixed_of_row(site) for site in of_rows.values()]


def _fixed_of_row(site: Site) -> Any:
    """What must be the same wherever the values of a row are; some means follow, as is known."""
    fn = unwrapped(site["fn"])
    if isinstance(fn, CorrelatedNormal):
        return fn.scale, fn.lower
    return site["fn"].mean, site["fn"].variance


def _at_centre_of_rows(
    utilities: ChunkedUtilities, start: ArrayLike, size: int, key: Array | None
) -> tuple[Sites, Sites]:
    """The sites of guide and model, those in the class plate at their centre."""
    drawn, run_model = _run(utilities, start, size, key, _centre_of_rows(utilities, key))
    return drawn, run_model(drawn)


def _run(
    utilities: ChunkedUtilities, start: ArrayLike, size: int, key: Array | None, around: Around
) -> tuple[Sites, Callable[[Sites], Sites]]:
    """The sites of the guide with these classes, and a function that runs the model at others."""
    touched, rng_key = TouchedRows(), jax.random.key(0) if key is None else key
    run = partial(utilities.runs.run, start=start, size=size, rng_key=rng_key, touched=touched)
    sites = run(utilities.runs.model, latent_values=at_feasible_values)
    drawn = run(utilities.runs.guide, latent_values=around)
    take_rows_held(drawn, sites, touched)
    values = at_values_or_centre if key is None else at_values_of
    return drawn, lambda drawn: run(utilities.runs.model, latent_values=values(drawn))


def _centre_of_rows(utilities: ChunkedUtilities, key: Array | None) -> Around:
    """Sites in the class plate at their mean, and others too if there is no key to draw them."""

    def mean(msg: Site) -> Any:
        if not _is_of_row(utilities, msg):
            return None
        return jnp.asarray(msg["fn"].mean, jnp.result_type(float, msg["fn"].mean))

    return at_centre if key is None else partial(substitute, substitute_fn=mean)


def _of_rows(utilities: ChunkedUtilities, sites: Sites) -> Sites:
    """The latent sites in the class plate."""
    return {name: site for name, site in sites.items() if _is_of_row(utilities, site)}


def _is_of_row(utilities: ChunkedUtilities, site: Site) -> bool:
    return is_latent(site) and utilities.plate in plates_of(site)


def _choice(utilities: ChunkedUtilities, sites: Sites) -> Any:
    return base_distribution(sites[utilities.site]["fn"])
