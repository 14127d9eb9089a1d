# SPDX-License-Identifier: Apache-2.0
"""Compiled programs that take the arrays which their function closes over as arguments."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_largecat.handlers.internals import ClosedJaxpr, Jaxpr, run_jaxpr


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
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        static_argnums: tuple[int, ...] = (),
        donate_first: bool = False,
    ) -> None:
        self._traced = jax.jit(fn, static_argnums=static_argnums)
        self._static_argnums = static_argnums
        self._donate_first = donate_first
        self._copies: dict[int, tuple[Any, Array]] = {}  # of NumPy's arrays, kept with them
        # Functions of their own, so that programs go when this object goes.
        self._evaluate = jax.jit(partial(_evaluate), static_argnums=0)
        self._evaluate_donated = jax.jit(partial(_evaluate), static_argnums=0, donate_argnums=2)

    def __call__(self, *args: Any) -> Any:
        """Compile if it is not yet done, and call."""
        return self.program(*args)(*self._arrays(args))

    def program(self, *args: Any) -> Callable[..., Any]:
        """The function traced for ``args``, to be called with others of their shapes and dtypes.

        Its arguments are those of ``fn`` without the static ones. Nothing is traced again for
        arguments like earlier ones.
        """
        evaluate, form, constants = self._parts(args)
        return lambda first=(), *rest: evaluate(
            form, constants, jax.tree.leaves(first), jax.tree.leaves(rest)
        )

    def lower(self, *args: Any) -> Any:
        """The lowered program, to be looked at."""
        evaluate, form, constants = self._parts(args)
        return evaluate.lower(form, constants, jax.tree.leaves(self._arrays(args)), [])

    def _parts(self, args: tuple[Any, ...]) -> tuple[Any, _Form, list[Array]]:
        traced = self._traced.trace(*args)
        jaxpr: Any = traced.jaxpr.jaxpr
        form = _Form(jaxpr, jax.tree.structure(traced.out_info))
        donates = self._donate_first and not _calls_back(jaxpr)
        constants = [self._array_of(value) for value in traced.jaxpr.consts]
        return self._evaluate_donated if donates else self._evaluate, form, constants

    def _array_of(self, constant: Any) -> Array:
        """A constant on the device, where one copy serves all programs of the function."""
        if isinstance(constant, Array):
            return constant
        if id(constant) not in self._copies:
            self._copies[id(constant)] = constant, jnp.asarray(constant)
        return self._copies[id(constant)][1]

    def _arrays(self, args: tuple[Any, ...]) -> list[Any]:
        return [arg for i, arg in enumerate(args) if i not in self._static_argnums]


class _Form(NamedTuple):
    """What is fixed in a program."""

    jaxpr: Any
    result: Any  # structure of the result


def _evaluate(form: _Form, constants: list[Array], first: list[Any], rest: list[Any]) -> Any:
    leaves = run_jaxpr(form.jaxpr, constants, *first, *rest)
    return jax.tree.unflatten(form.result, leaves)


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
