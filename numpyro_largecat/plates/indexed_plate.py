# SPDX-License-Identifier: Apache-2.0
"""A plate whose rows are given, on which class, data and entity plates build."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpyro
from jax import Array
from numpyro.primitives import Messenger

from numpyro_largecat._checks import is_concrete
from numpyro_largecat.handlers.internals import is_of_a_chain, is_scan_open
from numpyro_largecat.handlers.plate_facts import PlateFacts, tell_plate_facts
from numpyro_largecat.handlers.sites import param_options


class indexed_plate(numpyro.plate):
    """A plate whose rows are given, and which slices every parameter inside it by them."""

    def __new__(cls, *args: Any, **kwargs: Any) -> indexed_plate:
        """Make one of this class, also after NumPyro's enumeration, which replaces that of plates.

        (``TraceEnum_ELBO`` leaves a function behind that makes ``numpyro.plate`` of all of them.)
        """
        return object.__new__(cls)

    def __init__(
        self,
        name: str,
        size: int,
        indices: Array,
        dim: int | None,
        *,
        is_shared: bool,
        facts: PlateFacts,
    ) -> None:
        self._indices: Array
        if not facts.is_full:
            _refuse_scan(name)
        with _answer_plate(name, indices, facts):
            super().__init__(name, size, subsample_size=indices.shape[0], dim=dim)
        if not (is_shared or facts.is_full or _are_same(self._indices, indices)):
            raise ValueError(
                f"plate '{name}': the guide opened a plate of that name with rows of its own. Fit "
                "with lc.SubsampledSVI, or give the guide `create_plates=`, which returns this "
                "plate."
            )
        self._indices = indices
        self.subsample_size = indices.shape[0]
        self._is_full = facts.is_full
        self._row_weights = facts.row_weights

    def process_message(self, msg: dict[str, Any]) -> None:
        """Scale each row by its own weight, if it has one, where NumPyro's plate scales alike."""
        scale = msg.get("scale")
        super().process_message(msg)
        if msg["type"] not in ("param", "sample") or self._row_weights is None:
            return
        if any(frame.name == self.name for frame in msg["cond_indep_stack"]):
            weights = self._row_weights.reshape((-1,) + (1,) * (-1 - self.dim))
            msg["scale"] = weights if scale is None else scale * weights

    def postprocess_message(self, msg: dict[str, Any]) -> None:
        """Slice a parameter that is stored whole, also where the rows are a permutation."""
        if msg["type"] not in ("param", "subsample") or self._is_full:
            return
        event_dim = param_options(msg).event_dim
        if event_dim is None:
            return
        axis = self.dim - event_dim
        shape = jnp.shape(msg["value"])
        if len(shape) < -axis or shape[axis] == 1:
            return
        if shape[axis] != self.size:
            raise ValueError(
                f"{msg['type']} site '{msg.get('name')}' inside plate '{self.name}' must have "
                f"{self.size} rows at axis {axis} (dim {self.dim} less event_dim {event_dim}); got "
                f"shape {shape}."
            )
        msg["value"] = jnp.take(msg["value"], self._indices, axis=axis, mode="clip")


class _answer_plate(Messenger):
    """Give the plate ``name`` its rows, and tell outer handlers what they are."""

    def __init__(self, name: str, indices: Array, facts: PlateFacts) -> None:
        self.name = name
        self.indices = indices
        self.facts = facts
        super().__init__()

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "plate" and msg["name"] == self.name:
            msg["value"] = self.indices
            tell_plate_facts(msg, self.facts)


def refuse_chain(name: str, held: str) -> None:
    """Refuse a minibatch in the potential energy of a Markov chain, which sees no other rows.

    Raises:
        ValueError: If the model is run for one.
    """
    if is_of_a_chain():
        raise ValueError(
            f"plate '{name}' holds {held}, which HMC and NUTS would take for all the data, each "
            "many times. Give the model all rows, or fit by `SubsampledSVI`."
        )


def _refuse_scan(name: str) -> None:
    """Refuse a plate that holds some of its rows inside NumPyro's ``scan``, whose steps are traced.

    Raises:
        NotImplementedError: If the body of a scan opens it.
    """
    if is_scan_open():
        raise NotImplementedError(
            f"plate '{name}' holds some of its rows and is opened inside of NumPyro's `scan`, "
            "where nothing can learn which. Open it before the scan, draw its sites there and use "
            "them in the body; observe what belongs to its rows after the scan."
        )


def _are_same(a: Array, b: Array) -> bool:
    """Whether two arrays of row ids are known to be equal."""
    if a is b or a.shape != b.shape:
        return a is b
    return is_concrete(a) and is_concrete(b) and bool((a == b).all())
