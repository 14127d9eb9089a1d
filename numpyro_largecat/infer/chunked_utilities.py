# SPDX-License-Identifier: Apache-2.0
"""The utilities that a fitted model gives to all classes of a choice, one chunk at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike
from numpyro.handlers import replay, seed, substitute, trace
from numpyro.primitives import Messenger

from numpyro_largecat._checks import check_count
from numpyro_largecat.distributions.choice import ChoiceDistribution, base_distribution
from numpyro_largecat.distributions.errors import GUMBEL, ErrorFamily
from numpyro_largecat.guides.error_guides import without_errors
from numpyro_largecat.infer.latent_values import at_centre, at_feasible_values
from numpyro_largecat.infer.param_sites import check_params
from numpyro_largecat.infer.static_arguments import with_jax_arrays
from numpyro_largecat.infer.touched_rows import TouchedRows, share_rows
from numpyro_largecat.plates import class_chunk


class ChunkedUtilities:
    """Run model and guide on one chunk of classes after another.

    With a key the latent sites are drawn from the guide: those in the class plate with noise of
    their own in each chunk, and all others alike, whichever the chunk, so that the chunks together
    are one draw. Without one they are at the centre of the guide.

    Args:
        model: The model that was fitted.
        guide: Its guide.
        params: Their parameters.
        args: Positional arguments of the model.
        kwargs: Keyword arguments of the model.
        site: Name of the choice.
        plate: Name of its class plate.
        chunk_size: Number of classes in a chunk; fewer if there are fewer classes.

    Attributes:
        num_categories: Number of classes K.
        family: Distribution of the errors.
        batch_shape: Shape of the choice.
        dtype: Type of the utilities.
        num_chunks: Number of chunks.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        guide: Callable[..., Any],
        params: dict[str, Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        site: str,
        plate: str,
        chunk_size: int,
    ) -> None:
        if not isinstance(params, dict):
            raise TypeError(
                "`params` must be a dict of the fit's parameters, such as `result.params`; "
                f"got {type(params).__name__}."
            )
        self._model, self._guide = without_errors(model, guide)
        self._args, self._kwargs = with_jax_arrays((args, kwargs))
        self._params, self._site, self._plate = params, site, plate
        chunk_size = check_count("chunk_size", chunk_size, 1)

        def look() -> tuple[int, ErrorFamily, tuple[int, ...], Any]:
            choice, num_categories = self._choice(0, 2, None)
            family = getattr(choice, "noise", GUMBEL)
            psi = choice.utilities
            return num_categories, family, psi.shape[:-1], psi.dtype

        self.num_categories, self.family, self.batch_shape, self.dtype = _static_result(look)
        self.chunk_size = min(chunk_size, self.num_categories)
        self.num_chunks = -(-self.num_categories // self.chunk_size)

    def of_chunk(self, chunk: ArrayLike, key: Array | None) -> tuple[Array, Array]:
        """Utilities (..., chunk_size), -inf past the last class, and the classes (chunk_size,)."""
        classes = self.classes_of(chunk)
        psi = self._choice(classes[0], self.chunk_size, key)[0].utilities
        return jnp.where(classes < self.num_categories, psi, -jnp.inf), classes

    def classes_of(self, chunk: ArrayLike) -> Array:
        """Classes of a chunk; those of the last one may be K or more."""
        return jnp.asarray(chunk) * self.chunk_size + jnp.arange(self.chunk_size)

    def of_all_classes(self, key: Array | None) -> Array:
        """Utilities of all classes, shape (..., K); O(K) memory for each row."""
        chunks = jnp.arange(self.num_chunks)
        by_chunk = lax.map(lambda chunk: self.of_chunk(chunk, key)[0], chunks)
        psi = jnp.moveaxis(by_chunk, 0, -2)
        return psi.reshape((*psi.shape[:-2], -1))[..., : self.num_categories]

    def _choice(
        self, start: ArrayLike, size: int, key: Array | None
    ) -> tuple[ChoiceDistribution, int]:
        """The choice among classes [start, start + size), and the number of all."""
        touched = TouchedRows()
        rng_key = jax.random.key(0) if key is None else key

        def on_chunk(fn: Any) -> Any:
            fn = class_chunk(share_rows(fn, touched), name=self._plate, start=start, size=size)
            fn = _noise_of_chunk(seed(fn, rng_key), self._plate, start)
            return _without_training_rows(substitute(fn, data=self._params))

        args, kwargs = self._args, self._kwargs
        trace(at_feasible_values(on_chunk(self._model))).get_trace(*args, **kwargs)
        guide = on_chunk(self._guide)
        guide_trace = trace(at_centre(guide) if key is None else guide).get_trace(*args, **kwargs)
        sites = trace(replay(on_chunk(self._model), guide_trace)).get_trace(*args, **kwargs)
        check_params(self._params, guide_trace | sites)
        choice = _choice_at(sites, self._site, self._plate)
        if self._plate not in touched.plates:
            raise ValueError(
                f"`plate` must name a class plate of the model; got '{self._plate}', and the "
                f"model's plates are {sorted(touched.plates)}."
            )
        return choice, touched.plates[self._plate].size


class _noise_of_chunk(Messenger):
    """Give latent sites inside the class plate a key of their own in each chunk."""

    def __init__(self, fn: Callable[..., Any], plate: str, start: ArrayLike) -> None:
        self.plate = plate
        self.start = start
        super().__init__(fn)

    def process_message(self, msg: dict[str, Any]) -> None:
        key = msg["kwargs"].get("rng_key") if msg["type"] == "sample" else None
        if key is not None and any(f.name == self.plate for f in msg["cond_indep_stack"]):
            msg["kwargs"]["rng_key"] = jax.random.fold_in(key, self.start)


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
        choices = [
            name
            for name, s in sites.items()
            if s["type"] == "sample" and isinstance(base_distribution(s["fn"]), ChoiceDistribution)
        ]
        raise ValueError(
            f"`site` must name a UtilityCategorical site over class plate '{plate}', with "
            f"`classes=` from that plate; got '{site}', and the choices of the model are "
            f"{choices}."
        )
    return fn


def _static_result(fn: Callable[[], Any]) -> Any:
    """What ``fn`` returns that is not an array, without computing arrays."""
    result: list[Any] = []

    def run() -> None:
        result.append(fn())

    jax.eval_shape(run)
    return result[0]
