# SPDX-License-Identifier: Apache-2.0
"""What the model is given in a run: arguments and batches, and the batch to begin with."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any

import jax
import numpy as np

from numpyro_largecat._checks import BadDataError, describe, is_traced
from numpyro_largecat._conversions import with_arrays
from numpyro_largecat.svi.array_batches import ArrayBatches
from numpyro_largecat.svi.batch_checks import check_batches, check_scale
from numpyro_largecat.svi.loss_log import LossLog
from numpyro_largecat.svi.plan import Plan
from numpyro_largecat.svi.state import SubsampledSVIState
from numpyro_largecat.svi.streamed_batches import StreamedBatches

MOST_TRIES = 100  # draws of a first batch, where bad data is skipped


class RunData:
    """The arguments of a run, the same in each step, and its batches.

    Batches are ``drawn`` inside of compiled steps, ``read`` by a thread, or come from a ``stream``;
    the others are None, and all of them where the arguments are all the data.

    Args:
        args: Arguments of the model.
        kwargs: Keyword arguments of the model.
        batches: See ``SubsampledSVI.run``.

    Raises:
        TypeError: If ``batches`` are none of those, or among the arguments of the model, or a
            batch of a stream is no tuple.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], batches: Any) -> None:
        for position, arg in enumerate(args):
            if isinstance(arg, ArrayBatches | StreamedBatches):
                raise TypeError(
                    f"argument {position} of the model is {describe(arg)}; name batches, "
                    "`svi.run(rng_key, num_steps, batches=...)`."
                )
        self.args, self.kwargs, self.batches = args, kwargs, batches
        self.drawn = batches if isinstance(batches, ArrayBatches) else None
        self.read = batches if isinstance(batches, StreamedBatches) else None
        has_place = batches is None or isinstance(batches, ArrayBatches | StreamedBatches)
        self.stream = None if has_place else _stream_of(batches)

    @property
    def is_traced(self) -> bool:
        """Whether it comes from inside of a transformation."""
        return is_traced((self.args, self.kwargs, self.drawn))

    @property
    def is_read(self) -> bool:
        """Whether batches are read as steps run, so that no compiled loop has them."""
        return self.read is not None or self.stream is not None

    def check(self, plan: Plan, skip_bad: bool) -> None:
        """Check all rows that batches are drawn from, where they are known."""
        if self.drawn is None or is_traced((self.drawn, self.args)):
            return
        try:
            with jax.ensure_compile_time_eval():  # the run may be in `jit` while its data are known
                check_batches(plan.model, self.drawn, self.args, plan.with_static(self.kwargs))
        except BadDataError as error:
            if not skip_bad:
                raise
            warnings.warn(
                f"{error} Steps that draw such rows are skipped.", RuntimeWarning, stacklevel=5
            )

    def check_batch_size(self, plan: Plan) -> None:
        """Refuse batches of which the devices cannot have equal parts."""
        batches = self.drawn or self.read
        if batches is not None:
            plan.check_batch_size(batches.batch_size)

    def first_state(
        self, init: Callable[..., tuple[Plan, SubsampledSVIState]], log: LossLog
    ) -> tuple[Plan, SubsampledSVIState]:
        """What ``init`` makes of the first good batch, from which on a stream is then taken.

        Bad ones before it are skipped if bad steps are; those of a stream are steps that were
        skipped.
        """
        bad: BadDataError | None = None
        for batch in islice(self._first_batches(), log.num_steps):
            try:
                refuse_empty(batch)
                made = init(*batch)
                self._check_scale(made[0], batch)
            except BadDataError as error:
                if not log.skip_bad_steps:
                    raise
                bad = error
                if self.stream is not None:
                    log.skip_batch(error)
            else:
                if self.stream is not None:
                    self.stream = chain([batch], self.stream)
                return made
        raise bad or ValueError("`batches` gave no batch.")

    def _check_scale(self, plan: Plan, batch: Any) -> None:
        """Check by the first batch what ``check`` cannot check of all."""
        if not self.is_read:
            return
        sizes = None if self.read is None else (self.read.size, self.read.batch_size)
        check_scale(plan.model, batch, self.args, plan.with_static(self.kwargs), sizes)

    def pass_over(self, num_steps: int) -> None:
        """Leave out the batches of a stream on which steps were taken."""
        if self.stream is not None:
            self.stream = islice(self.stream, num_steps, None)

    def _first_batches(self) -> Iterator[Any]:
        """Batches to make the initial state from."""
        if self.stream is not None:
            return self.stream
        batches = self.drawn or self.read
        return iter([()]) if batches is None else map(batches.batch, range(MOST_TRIES))


def refuse_empty(batch: Any) -> None:
    """Refuse a batch of arrays without rows, as a filter may leave.

    Raises:
        BadDataError: With the shapes of its arrays.
    """
    shapes = [np.shape(x) for x in jax.tree.leaves(batch) if getattr(x, "shape", ())]
    if shapes and not any(shape[0] for shape in shapes):
        raise BadDataError(
            f"the batch is empty, with arrays of shapes {shapes}; leave out such batches"
        )


def _stream_of(batches: Any) -> Iterator[Any]:
    """The batches of an iterator, each a tuple of arrays, or of what NumPy makes into arrays.

    Raises:
        TypeError: If there is no iterator, or when a batch is no tuple.
    """
    fix = (
        "`batches` must be an `lc.ArrayBatches(x, y, batch_size=...)`, `lc.StreamedBatches`, or an "
        "iterator of tuples of arrays, whose arrays come after the arguments of the model"
    )
    if callable(batches) or not hasattr(batches, "__iter__"):
        raise TypeError(f"{fix}; got {describe(batches)}.")

    def checked(batch: Any) -> Any:
        if not isinstance(batch, tuple | list):
            raise TypeError(f"{fix}; got a batch that is {describe(batch)}.")
        return with_arrays(batch)

    return map(checked, batches)
