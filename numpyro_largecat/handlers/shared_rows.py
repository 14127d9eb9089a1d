# SPDX-License-Identifier: Apache-2.0
"""A handler that makes the plates of one name hold the same rows, in model and guide."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array
from numpyro.primitives import Messenger

from numpyro_largecat.handlers.param_rows import check_param_rows
from numpyro_largecat.handlers.plate_facts import (
    PlateFacts,
    plate_facts,
    plate_of,
    rows_request,
    tell_plate_facts,
)
from numpyro_largecat.handlers.sites import (
    param_options,
    plates_of,
    scale_of,
    tell_rows_are_taken,
)
from numpyro_largecat.handlers.touched_rows import TouchedRows, rows_of_plate
from numpyro_largecat.ops.subsampling import draw_without_replacement


class share_rows(Messenger):
    """Make the plates of one name hold the same rows wherever they are opened.

    A plate that ``touched`` knows gets those rows, in the guide as in the model and in every
    particle; any other is recorded there. A plain NumPyro plate that subsamples has its rows drawn
    here, at a cost that follows the draws. A plain plate that stands for a class plate, as
    autoguides open them, gets the weights of the class plate's rows.

    With ``gathered``, the parameters of these names come as the rows they need, so the plates must
    not slice them again; ``lookup`` gives such values, or None to leave it to outer handlers.
    ``is_step`` unless the rows are those of a part of the classes that is read.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        touched: TouchedRows,
        *,
        gathered: Callable[[str], bool],
        lookup: Callable[[dict[str, Any]], Any] | None = None,
        is_step: bool = True,
    ) -> None:
        self.touched = touched
        self.is_step = is_step
        self.gathered = gathered
        self.lookup = lookup
        super().__init__(fn)

    def __enter__(self) -> None:
        self.plain_plates: set[str] = set()
        self.as_before: dict[str, Array] = {}  # whether a plate opened again holds the same rows
        self.frames: dict[str, set[str]] = {}  # plates of each parameter
        super().__enter__()

    def process_message(self, msg: dict[str, Any]) -> None:
        """Give plates their rows, sites their weights and parameters their gathered values."""
        if msg["type"] == "plate":
            self._process_plate(msg)
        elif msg["type"] in ("param", "sample"):
            self._weigh(msg)
        if msg["type"] == "param":
            self._refuse_other_plates(msg)
            if self.gathered(msg["name"]):
                tell_rows_are_taken(msg)
            if self.lookup is not None and msg["value"] is None:
                msg["value"] = self.lookup(msg)

    def postprocess_message(self, msg: dict[str, Any]) -> None:
        """Record the rows of a plate that is new; take the rows of a parameter that is whole."""
        if msg["type"] == "param":
            check_param_rows(msg, self.touched.plates, is_step=self.is_step)
            event_dim = param_options(msg).event_dim
            if event_dim is not None:
                self._take_rows(msg, event_dim)
        if msg["type"] != "plate":
            return
        if rows_request(msg) is not None:
            self.touched.helpers.setdefault(msg["name"], msg["value"])
        elif msg["name"] not in self.touched.plates:
            self.touched.plates[msg["name"]] = rows_of_plate(msg)

    def _take_rows(self, msg: dict[str, Any], event_dim: int) -> None:
        """Slice for the plates, since NumPyro's do not where they hold as many rows as there are.

        Handlers further out have seen the whole value and ``event_dim`` before.
        """
        for frame in msg["cond_indep_stack"]:
            plate = self.touched.plates[frame.name]
            axis = frame.dim - event_dim
            shape = jnp.shape(msg["value"])
            if plate.full or len(shape) < -axis or shape[axis] == 1:
                continue
            msg["value"] = jnp.take(msg["value"], plate.indices, axis=axis, mode="clip")
        tell_rows_are_taken(msg)

    def _refuse_other_plates(self, msg: dict[str, Any]) -> None:
        """A parameter is stored by the rows of its plates, so all statements must have the same."""
        if param_options(msg).event_dim is None and not self.gathered(msg["name"]):
            return
        plates = plates_of(msg)
        known = self.frames.setdefault(msg["name"], plates)
        if known != plates:
            raise ValueError(
                f"param '{msg['name']}' is used inside plates {sorted(known)} and inside plates "
                f"{sorted(plates)}. Use it in one set of plates, or outside of all without an "
                "`event_dim`."
            )

    def _process_plate(self, msg: dict[str, Any]) -> None:
        name, (size, subsample_size) = msg["name"], msg["args"]
        request = rows_request(msg)
        if request is not None:
            is_given = request.source in ("given rows", "read rows")
            if name in self.touched.helpers and (is_given or msg["value"] is None):
                if request.source == "given rows":  # by the user, as a new array in each run
                    self._compare(plate_of(msg), msg["value"])
                msg["value"] = self.touched.helpers[name]
        elif plate_facts(msg).kind != "plain":  # it follows its helper site
            self.plain_plates.discard(name)
            if name in self.touched.plates:
                self._compare(name, msg["value"], plate_facts(msg).row_weights)
        else:
            self.plain_plates.add(name)
            if name in self.touched.plates:
                msg["value"] = self.touched.plates[name].indices
                msg["args"] = (size, msg["value"].shape[0])
            elif msg["value"] is None:
                msg["fn"] = _draw_rows
                tell_plate_facts(msg, PlateFacts(is_distinct=True))
            elif subsample_size is None or subsample_size == size:
                tell_plate_facts(msg, PlateFacts(is_full=True))

    def _compare(self, name: str, indices: Array, weights: Array | None = None) -> None:
        """See whether a plate that is opened again holds the rows that it held before."""
        known, known_weights = self.touched.plates[name].indices, self.touched.plates[name].weights
        if known.shape != indices.shape:
            raise ValueError(
                f"plate '{name}' is opened twice in one step, with {known.shape[0]} rows and with "
                f"{indices.shape[0]}. If the guide opens it, give it the arguments that the model "
                "gives it, such as ids, `reads` and `negatives`; give other plates other names."
            )
        is_same = (known == indices).all()
        if weights is not None and known_weights is not None:
            is_same &= jnp.array_equal(known_weights, weights, equal_nan=True)
        self.as_before[name] = self.as_before.get(name, True) & is_same

    def _weigh(self, msg: dict[str, Any]) -> None:
        for frame in msg["cond_indep_stack"]:
            if msg["type"] == "sample" and frame.name in self.as_before:
                # The model draws other rows in each run, or opens the plate twice.
                msg["scale"] = jnp.where(self.as_before[frame.name], scale_of(msg), jnp.nan)
            if frame.name not in self.plain_plates:
                continue
            plate = self.touched.plates[frame.name]
            if plate.weights is None:
                continue
            uniform = plate.size / frame.size  # what the plain plate has scaled by
            weights = (plate.weights / uniform).reshape((-1,) + (1,) * (-1 - frame.dim))
            msg["scale"] = weights if msg["scale"] is None else msg["scale"] * weights


def _draw_rows(size: int, subsample_size: int, rng_key: Array | None = None, **_: Any) -> Array:
    if rng_key is None:
        raise ValueError(
            "A plate that subsamples needs a random key: run the model under "
            "`numpyro.handlers.seed`."
        )
    return draw_without_replacement(rng_key, size, subsample_size)
