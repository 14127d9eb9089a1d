# SPDX-License-Identifier: Apache-2.0
"""Compiled programs that take the arrays which their function closes over as arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_largecat.handlers.internals import (
    ClosedJaxpr,
    Jaxpr,
    closed_over,
    run_jaxpr,
    trace_state_clean,
)


def options_for_one_run() -> dict[str, str | bool] | None:
    """Options of XLA that compile in little more than half the time; elementwise code is slower.

    Products are as fast: the first run of 10^6 classes with 128 features still gains a second of
    five. Only on a CPU, where this was measured; other compilers may refuse the option.
    """
    return {"xla_backend_optimization_level": "0"} if jax.default_backend() == "cpu" else None


class compiled:
    """``jax.jit`` whose programs hold no array that ``fn`` closes over.

    ``jax.jit`` writes such an array, a table that a model refers to, say, into the program as a
    constant: a second copy, which the compiler reads and may compute with. Here it is one more
    argument. Like a constant it is what it was when ``fn`` was traced. An array that a function
    closes over which is itself under ``jax.jit`` stays a constant of that function.

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
        # By jaxpr. They are closures, so that they go when this object goes: what is a static
        # argument stays in JAX's caches, and a jaxpr may hold the arrays that were closed over.
        self._programs: dict[Any, Any] = {}

    def __call__(self, *args: Any) -> Any:
        """Compile if it is not yet done, and call."""
        return self.program(*args)(*self._arrays(args))

    def program(self, *args: Any) -> Callable[..., Any]:
        """The function traced for ``args``, to be called with others of their shapes and dtypes.

        Its arguments are those of ``fn`` without the static ones. Nothing is traced again for
        arguments like earlier ones.
        """
        evaluate, constants = self._parts(args)
        return lambda first=(), *rest: evaluate(
            constants, jax.tree.leaves(first), jax.tree.leaves(rest)
        )

    def lower(self, *args: Any) -> Any:
        """The lowered program, to be looked at."""
        evaluate, constants = self._parts(args)
        return evaluate.lower(constants, jax.tree.leaves(self._arrays(args)), [])

    def _parts(self, args: tuple[Any, ...]) -> tuple[Any, list[Array]]:
        traced = self._traced.trace(*args)
        jaxpr: Any = traced.jaxpr.jaxpr
        if jaxpr not in self._programs:
            donates = self._donate_first and not _calls_back(jaxpr)
            evaluate = _evaluation(jaxpr, jax.tree.structure(traced.out_info))
            options = None
            if self._runs_once and trace_state_clean():  # JAX has none for a part of a program
                options = options_for_one_run()
            self._programs[jaxpr] = jax.jit(
                evaluate, donate_argnums=1 if donates else (), compiler_options=options
            )
        constants = [self._array_of(value) for value in closed_over(traced)]
        return self._programs[jaxpr], constants

    def _array_of(self, constant: Any) -> Array:
        """A constant on the device, where one copy serves all programs of the function."""
        if isinstance(constant, Array):
            return constant
        if id(constant) not in self._copies:
            self._copies[id(constant)] = constant, jnp.asarray(constant)
        return self._copies[id(constant)][1]

    def _arrays(self, args: tuple[Any, ...]) -> list[Any]:
        return [arg for i, arg in enumerate(args) if i not in self._static_argnums]


def _evaluation(jaxpr: Any, structure: Any) -> Callable[..., Any]:
    """Function of constants and arguments that runs a jaxpr, and puts its results together."""

    def evaluate(constants: list[Array], first: list[Any], rest: list[Any]) -> Any:
        return jax.tree.unflatten(structure, run_jaxpr(jaxpr, constants, *first, *rest))

    return evaluate


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
