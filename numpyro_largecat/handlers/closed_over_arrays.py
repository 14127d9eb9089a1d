# SPDX-License-Identifier: Apache-2.0
"""Compiled programs that take the arrays which their function closes over as arguments."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_largecat.handlers.internals import (
    ClosedJaxpr,
    Jaxpr,
    closed_over,
    run_jaxpr,
    trace_state_clean,
    without_constants,
)
from numpyro_largecat.handlers.same_programs import key_of

MOST_KEPT = 64  # programs


def options_for_one_run() -> dict[str, str | bool] | None:
    """Options of XLA that compile in little more than half the time; elementwise code is slower.

    Products are as fast: the first run of 10^6 classes with 128 features still gains a second of
    five. Only on a CPU, where this was measured; other compilers may refuse the option.
    """
    return {"xla_backend_optimization_level": "0"} if jax.default_backend() == "cpu" else None


class compiled:
    """``jax.jit`` whose programs hold no array that ``fn`` closes over, and are compiled once.

    ``jax.jit`` writes such an array, a table that a model refers to, say, into the program as a
    constant: a second copy, which the compiler reads and may compute with. Here it is one more
    argument. Like a constant it is what it was when ``fn`` was traced. An array that a function
    closes over which is itself under ``jax.jit`` stays a constant of that function.

    What another object has compiled is not compiled again, if ``fn`` has the same trace: so a
    function can be made and traced anew wherever what it closes over may have changed. The
    ``MOST_KEPT`` programs that were used last are kept; they hold no array but small constants of
    functions under ``jax.jit``.

    Args:
        fn: Function of pytrees of arrays.
        static_argnums: Positions of arguments that are not arrays, hashable.
        donate_first: Whether the program may use the memory of its first argument. A program that
            calls back into Python does not: what is raised there would leave neither that argument
            nor a result.
        runs_once: Whether programs are hardly run again, and are to be compiled in less time.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        static_argnums: tuple[int, ...] = (),
        donate_first: bool = False,
        runs_once: bool = False,
    ) -> None:
        self._traced = jax.jit(fn, static_argnums=static_argnums)
        self._static_argnums = static_argnums
        self._donate_first = donate_first
        self._runs_once = runs_once
        self._copies: dict[int, tuple[Any, Array]] = {}  # of NumPy's arrays, kept with them
        self._programs: dict[Any, Any] = {}  # by jaxpr, and whether they are part of another

    def __call__(self, *args: Any) -> Any:
        """Compile if it is not yet done, and call."""
        return self.program(*args)(*self._arrays(args))

    def program(self, *args: Any) -> Callable[..., Any]:
        """The function traced for ``args``, to be called with others of their shapes and dtypes.

        Its arguments are those of ``fn`` without the static ones. Nothing is traced again for
        arguments like earlier ones. It is a part of another program only if it was made as one.
        """
        evaluate, constants, structure = self._parts(args)

        def call(first: Any = (), *rest: Any) -> Any:
            found = evaluate(constants, jax.tree.leaves(first), jax.tree.leaves(rest))
            return jax.tree.unflatten(structure, found)

        return call

    def lower(self, *args: Any) -> Any:
        """The lowered program, to be looked at."""
        evaluate, constants, _ = self._parts(args)
        return evaluate.lower(constants, jax.tree.leaves(self._arrays(args)), [])

    def on_its_own(self, *args: Any) -> Any:
        """Call a program of its own with arrays, also while something else is being traced."""
        evaluate, constants, structure = self._parts(args, is_part=False)
        arrays = constants, jax.tree.leaves(self._arrays(args)), list[Array]()
        return jax.tree.unflatten(structure, evaluate.lower(*arrays).compile()(*arrays))

    def _parts(
        self, args: tuple[Any, ...], *, is_part: bool | None = None
    ) -> tuple[Any, list[Array], Any]:
        traced = self._traced.trace(*args)
        jaxpr: Any = traced.jaxpr.jaxpr
        is_part = not trace_state_clean() if is_part is None else is_part
        if (jaxpr, is_part) not in self._programs:
            donates = self._donate_first and not _calls_back(jaxpr)
            # JAX has no options for a part of a program.
            runs_once = self._runs_once and not is_part
            how = {"donates": donates, "runs_once": runs_once}
            self._programs[jaxpr, is_part] = _program(jaxpr, is_part=is_part, **how)
        constants = [self._array_of(value) for value in closed_over(traced)]
        return self._programs[jaxpr, is_part], constants, jax.tree.structure(traced.out_info)

    def _array_of(self, constant: Any) -> Array:
        """A constant on the device, where one copy serves all programs of the function."""
        if not isinstance(constant, np.ndarray | np.generic):
            return constant  # an array of JAX, or a reference to one
        if id(constant) not in self._copies:
            with jax.ensure_compile_time_eval():
                self._copies[id(constant)] = constant, jnp.asarray(constant)
        return self._copies[id(constant)][1]

    def _arrays(self, args: tuple[Any, ...]) -> list[Any]:
        return [arg for i, arg in enumerate(args) if i not in self._static_argnums]


def run_compiled(fn: Callable[..., Any], *args: Any) -> Any:
    """``fn(*args)`` as one program or, where something is being traced, as a part of it."""
    return compiled(fn)(*args) if trace_state_clean() else fn(*args)


def _program(jaxpr: Any, *, is_part: bool, donates: bool, runs_once: bool) -> Any:
    """A function of constants and arguments that runs a jaxpr: one that is kept, if it can be.

    Part of another program, it may be differentiated, of which ``key_of`` knows nothing.
    """
    key, jaxpr = None if is_part else key_of(jaxpr), without_constants(jaxpr)
    make = partial(_make_program, jaxpr, donates=donates, runs_once=runs_once)
    return make() if key is None else _kept_program(_Keyed((key, donates, runs_once), make))


@dataclass(frozen=True)
class _Keyed:
    """How a program is made; those with equal keys are the same."""

    key: Hashable
    make: Callable[[], Any] = field(compare=False)


@lru_cache(maxsize=MOST_KEPT)
def _kept_program(keyed: _Keyed) -> Any:
    return keyed.make()


def _make_program(jaxpr: Any, *, donates: bool, runs_once: bool) -> Any:
    def evaluate(constants: list[Array], first: list[Any], rest: list[Any]) -> list[Any]:
        return run_jaxpr(jaxpr, constants, *first, *rest)

    options = options_for_one_run() if runs_once else None
    return jax.jit(evaluate, donate_argnums=1 if donates else (), compiler_options=options)


def _calls_back(jaxpr: Any) -> bool:
    """Whether a program, or one inside of it, runs Python code on its way."""
    for eqn in jaxpr.eqns:
        if "callback" in eqn.primitive.name:
            return True
        for parameter in jax.tree.leaves(list(eqn.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(parameter) and _calls_back(getattr(parameter, "jaxpr", parameter)):
                return True
    return False


def _is_jaxpr(value: Any) -> bool:
    return isinstance(value, (Jaxpr, ClosedJaxpr))
