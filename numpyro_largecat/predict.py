# SPDX-License-Identifier: Apache-2.0
"""Probabilities of all classes from the user's own model and guide, chunk of classes by chunk."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike
from numpyro.handlers import replay, seed, substitute, trace
from numpyro.primitives import Messenger

from numpyro_largecat._checks import check_count, check_in_range, check_integers
from numpyro_largecat.distributions.choice import ChoiceDistribution, base_distribution
from numpyro_largecat.distributions.errors import GUMBEL, ErrorFamily
from numpyro_largecat.guides.error_guides import without_errors
from numpyro_largecat.infer.latent_values import at_centre, at_feasible_values
from numpyro_largecat.infer.param_sites import check_params
from numpyro_largecat.infer.static_arguments import with_jax_arrays
from numpyro_largecat.infer.touched_rows import TouchedRows, share_rows
from numpyro_largecat.ops.choice_quadrature import choice_log_prob
from numpyro_largecat.ops.softmax_bound import take_row
from numpyro_largecat.plates import class_chunk


class Prediction(NamedTuple):
    """Probabilities of the most probable classes, and of the observed ones.

    Attributes:
        top_classes: The most probable classes, best first, shape (..., num_top).
        top_log_probs: Their log probabilities in nats, normalised over all K classes, shape
            (..., num_top).
        log_prob: Log probability of ``obs``, shape (...), or None if it was not given.

    Example:
        >>> import numpyro_largecat as lc
        >>> lc.Prediction._fields
        ('top_classes', 'top_log_probs', 'log_prob')
    """

    top_classes: Array
    top_log_probs: Array
    log_prob: Array | None


def predict_choice(
    model: Callable[..., Any],
    guide: Callable[..., Any],
    params: dict[str, Any],
    *args: Any,
    site: str = "y",
    plate: str = "classes",
    obs: ArrayLike | None = None,
    num_top: int = 10,
    chunk_size: int = 4096,
    **kwargs: Any,
) -> Prediction:
    r"""Predict a choice exactly over all K classes, at the location of the guide.

    Each latent site is set to the centre of its distribution in the guide: its mean or, where the
    guide transforms a distribution, the transformed mean of that (the median, for ``AutoNormal``).
    With utilities psi of the site there,

    .. math:: \log p(k) = \psi_k - \log \sum_{j=1}^{K} \exp \psi_j ,

    where the sum is accumulated over chunks of classes. For other errors than Gumbel's the most
    probable classes are those of highest utility too, and each probability is an integral, see
    ``UtilityCategorical``.

    Data plates without ``rows`` stand for new data, of any length. The function is pure, so it
    can be compiled: ``jax.jit(functools.partial(lc.predict_choice, model, guide, num_top=5))``.

    Shapes: ``...`` is the batch shape of the site.

    Cost: O(K) time per row, and memory for ``chunk_size`` utilities per row beside the tables. For
    other errors than Gumbel's O(K) memory per row, and O(K) time for each of the ``num_top`` + 1
    probabilities.

    Args:
        model: The model that was fitted.
        guide: Its guide.
        params: Parameters, as ``SubsampledSVI.get_params`` gives them.
        *args: Arguments of the model, without observed choices.
        site: Name of the choice, a site over ``plate`` with ``UtilityCategorical`` or one of its
            bounds.
        plate: Name of its class plate.
        obs: Observed classes, to get their log probability; shape (...).
        num_top: Number of most probable classes, in [1, K].
        chunk_size: Number of classes evaluated at once.
        **kwargs: Keyword arguments of the model.

    Raises:
        ValueError: If the model has no such site or plate, a parameter is missing, or ``obs`` is
            out of range.
        TypeError: If ``params`` is not a dict.
        NotImplementedError: If a latent site has one value for each row of the training data, which
            new rows lack.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist, optax
        >>> import numpyro_largecat as lc
        >>> from numpyro.infer import Trace_ELBO
        >>> from numpyro.infer.autoguide import AutoDelta
        >>> def model(x, y=None):
        ...     with lc.class_plate("classes", 50, y, num_sampled=5) as classes:
        ...         w = numpyro.sample("w", dist.Normal(0, 1))
        ...     with lc.data_plate("data", 3) as rows:
        ...         lc.sample_choice("y", x[:, None] * w, classes=classes, rows=rows, obs=y)
        >>> svi = lc.SubsampledSVI(model, AutoDelta(model), optax.sgd(0.1), Trace_ELBO())
        >>> x, y = jnp.ones(3), jnp.array([7, 7, 3])
        >>> params = svi.run(jax.random.key(0), 100, x, y, progress_bar=False).params
        >>> new = lc.predict_choice(model, svi.guide, params, jnp.ones(2), num_top=2)
        >>> new.top_classes.tolist()
        [[7, 3], [7, 3]]
    """
    if not isinstance(params, dict):
        raise TypeError(
            "`params` must be a dict of the fit's parameters, such as `result.params`; "
            f"got {type(params).__name__}."
        )
    model, guide = without_errors(model, guide)
    args, kwargs = with_jax_arrays((args, kwargs))
    num_top = check_count("num_top", num_top, 1)
    chunk_size = check_count("chunk_size", chunk_size, 1)

    def utilities(start: ArrayLike, size: int) -> tuple[Array, int, ErrorFamily]:
        """Utilities of classes [start, start + size), K, and the distribution of errors."""
        touched = TouchedRows()

        def on_chunk(fn: Any) -> Any:
            fn = class_chunk(share_rows(fn, touched), name=plate, start=start, size=size)
            return _without_training_rows(substitute(seed(fn, 0), data=params))

        trace(at_feasible_values(on_chunk(model))).get_trace(*args, **kwargs)
        guide_trace = trace(at_centre(on_chunk(guide))).get_trace(*args, **kwargs)
        sites = trace(replay(on_chunk(model), guide_trace)).get_trace(*args, **kwargs)
        check_params(params, guide_trace | sites)
        choice = _choice_at(sites, site, plate)
        if plate not in touched.plates:
            raise ValueError(
                f"`plate` must name a class plate of the model; got '{plate}', and the model's "
                f"plates are {sorted(touched.plates)}."
            )
        return choice.utilities, touched.plates[plate].size, getattr(choice, "noise", GUMBEL)

    num_categories, family = _static_result(lambda: utilities(0, 2)[1:])
    if num_top > num_categories:
        raise ValueError(
            f"`num_top` must be at most the number of classes, {num_categories}; got {num_top}."
        )
    if obs is not None:
        check_integers("obs", obs)
        check_in_range("`obs`", obs, num_categories, "classes")
    size = min(chunk_size, num_categories)
    if family is not GUMBEL:
        chunks = jnp.arange(-(-num_categories // size))
        by_chunk = lax.map(lambda chunk: utilities(chunk * size, size)[0], chunks)
        psi = jnp.moveaxis(by_chunk, 0, -2).reshape((*by_chunk.shape[1:-1], -1))
        return _by_quadrature(psi[..., :num_categories], family, obs, num_top)

    def visit(chunk: Array, best: _Running) -> _Running:
        psi = utilities(chunk * size, size)[0]
        classes = chunk * size + jnp.arange(size)
        psi = jnp.where(classes < num_categories, psi, -jnp.inf)
        return best.include(psi, classes, obs)

    shape, dtype = _static_result(lambda: (utilities(0, 2)[0].shape[:-1], utilities(0, 2)[0].dtype))
    nothing = _Running.start(shape, num_top, dtype)
    found = lax.fori_loop(0, -(-num_categories // size), visit, nothing)
    log_prob = None if obs is None else found.observed - found.log_sum
    return Prediction(found.classes, found.utilities - found.log_sum[..., None], log_prob)


def _by_quadrature(
    psi: Array, family: ErrorFamily, obs: ArrayLike | None, num_top: int
) -> Prediction:
    """Predict from the utilities of all classes, shape (..., K)."""
    _, top = lax.top_k(psi, num_top)
    log_prob = partial(choice_log_prob, log_density=family.log_prob, log_cdf=family.log_cdf)
    by_rank = lax.map(lambda labels: log_prob(psi, labels), jnp.moveaxis(top, -1, 0))
    observed = None if obs is None else log_prob(psi, jnp.asarray(obs))
    return Prediction(top.astype(jnp.int32), jnp.moveaxis(by_rank, 0, -1), observed)


class _Running(NamedTuple):
    """What is known after some of the chunks."""

    log_sum: Array  # (...), log of the sum of exp(utility) so far
    utilities: Array  # (..., num_top), highest utilities so far
    classes: Array  # (..., num_top), their classes
    observed: Array  # (...), utility of the observed class, -inf before its chunk

    @staticmethod
    def start(shape: tuple[int, ...], num_top: int, dtype: Any) -> _Running:
        nothing = jnp.full(shape, -jnp.inf, dtype)
        best = jnp.full((*shape, num_top), -jnp.inf, dtype)
        return _Running(nothing, best, jnp.zeros(best.shape, jnp.int32), nothing)

    def include(self, psi: Array, classes: Array, obs: ArrayLike | None) -> _Running:
        log_sum = jnp.logaddexp(self.log_sum, jax.nn.logsumexp(psi, axis=-1))
        candidates = jnp.concatenate([self.utilities, psi], axis=-1)
        utilities, place = lax.top_k(candidates, self.utilities.shape[-1])
        ids = jnp.broadcast_to(classes.astype(jnp.int32), psi.shape)
        ids = jnp.concatenate([self.classes, ids], axis=-1)
        observed = self.observed
        if obs is not None:
            row = jnp.asarray(obs) - classes[0]
            inside = (row >= 0) & (row < psi.shape[-1])
            observed = jnp.where(inside, take_row(psi, row), observed)
        return _Running(log_sum, utilities, jnp.take_along_axis(ids, place, axis=-1), observed)


class _without_training_rows(Messenger):
    """Let data plates without ``rows`` hold rows that the fit has not seen, and draw no choice."""

    def __enter__(self) -> None:
        self.plates: set[str] = set()
        super().__enter__()

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "plate" and msg["kwargs"].get("all_rows"):
            self.plates.add(msg["name"].removesuffix("_rows"))
            msg["value"] = jnp.zeros(1, jnp.int32)  # one row, which any number of rows broadcasts
        elif msg["type"] == "plate" and msg["kwargs"].get("draws_classes"):
            if not msg["kwargs"].get("is_chunk"):
                # Another class plate: two of its classes will do, for they are not used.
                msg["value"] = jnp.arange(2, dtype=jnp.int32)
                msg["kwargs"]["is_chunk"] = True
        elif msg["type"] == "sample" and isinstance(
            base_distribution(msg["fn"]), ChoiceDistribution
        ):
            msg["value"] = jnp.zeros(msg["fn"].batch_shape, jnp.int32)
        elif msg["type"] in ("sample", "param") and not msg.get("is_observed"):
            frames = {frame.name for frame in msg["cond_indep_stack"]} & self.plates
            if frames:
                raise NotImplementedError(
                    f"site '{msg['name']}' has a value for each row of plate '{frames.pop()}', "
                    "which rows that the model was not fitted to lack. Give the plate the ids of "
                    "training rows, `data_plate(..., rows=ids)`, to predict for these."
                )


def _choice_at(sites: Any, site: str, plate: str) -> ChoiceDistribution:
    fn = base_distribution(sites[site]["fn"]) if site in sites else None
    if not isinstance(fn, ChoiceDistribution) or fn.classes is None:
        raise ValueError(
            f"`site` must name a UtilityCategorical site over class plate '{plate}', with "
            f"`classes=` from that plate; got '{site}', and the model's sites are "
            f"{[n for n, s in sites.items() if s['type'] == 'sample']}."
        )
    return fn


def _static_result(fn: Callable[[], Any]) -> Any:
    """What ``fn`` returns that is not an array, without computing arrays."""
    result: list[Any] = []

    def run() -> None:
        result.append(fn())

    jax.eval_shape(run)
    return result[0]
