# SPDX-License-Identifier: Apache-2.0
"""Whether two jaxprs compute the same, so that one need not be compiled again."""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import jax
import numpy as np

from numpyro_largecat.handlers.internals import ClosedJaxpr, Jaxpr, Literal

LARGEST_CONSTANT = 2**16  # bytes of an array inside of a jaxpr that is compared
# Their functions say how they are differentiated; what they compute is a jaxpr.
WITH_RULES = "custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"
# Their parameters are functions, or compare equal where they are not.
NOT_COMPARED = "callback", "custom_vmap_call", "ffi_call", "composite"
# Whose objects are equal only where they are the same, or say the same to the compiler.
KNOWN_MODULES = {"builtins", "enum", "functools", "jax", "jaxlib", "ml_dtypes", "numpy"}


def key_of(jaxpr: Any) -> Hashable | None:
    """What is equal for jaxprs that compute the same; None where that cannot be told.

    That is primitives, parameters, shapes and types, and the values of constants. Names of
    variables, and how the jaxpr is differentiated, have no part in it. It cannot be told of jaxprs
    that call functions of Python, or hold large arrays or parameters that are not of JAX.

    Cost: O(equations), those of a jaxpr that is there many times once; a tenth of tracing them.
    """
    inner = _InnerJaxprs({}, {})
    try:
        return inner.key(jaxpr), tuple(inner.numbers)
    except _CannotBeTold:
        return None


class _CannotBeTold(Exception):
    """What a parameter is, cannot be compared by its value."""


class _InnerJaxprs(NamedTuple):
    """The jaxprs inside of one, numbered as they come: equal ones have one number."""

    numbers: dict[Hashable, int]  # by key
    known: dict[int, int]  # the same by object, all of which are alive meanwhile

    def number(self, closed: Any) -> int:
        """That of a jaxpr with its constants."""
        if id(closed) not in self.known:
            key = self.key(closed.jaxpr), tuple(map(_of_array, closed.consts))
            self.known[id(closed)] = self.numbers.setdefault(key, len(self.numbers))
        return self.known[id(closed)]

    def key(self, jaxpr: Any) -> Hashable:
        """The equations of a jaxpr, without the constants that it may hold."""
        variables: dict[Any, int] = {}

        def made(variable: Any) -> Hashable:
            variables[variable] = len(variables)
            return variable.aval

        def used(atom: Any) -> Hashable:
            if isinstance(atom, Literal):
                return _of_array(atom.val), atom.aval
            return variables[atom]

        def of_equation(equation: Any) -> Hashable:
            taken, parameters = tuple(map(used, equation.invars)), self._of_equation(equation)
            given = tuple(map(made, equation.outvars))
            return equation.primitive, taken, given, parameters, str(equation.ctx)

        constants, inputs = (tuple(map(made, vs)) for vs in (jaxpr.constvars, jaxpr.invars))
        equations = tuple(map(of_equation, jaxpr.eqns))
        return constants, inputs, equations, tuple(map(used, jaxpr.outvars))

    def _of_equation(self, equation: Any) -> Hashable:
        name, parameters = equation.primitive.name, equation.params
        if any(part in name for part in NOT_COMPARED):
            raise _CannotBeTold
        if name in WITH_RULES:
            parameters = {k: v for k, v in parameters.items() if isinstance(v, int | ClosedJaxpr)}
            if not any(isinstance(value, ClosedJaxpr) for value in parameters.values()):
                raise _CannotBeTold
        return self._of_value(parameters)

    def _of_value(self, value: Any) -> Hashable:
        """Of a parameter of an equation."""
        if isinstance(value, ClosedJaxpr):
            return ClosedJaxpr, self.number(value)
        if isinstance(value, Jaxpr):
            return Jaxpr, self.key(value)
        if isinstance(value, tuple | list):
            return type(value), tuple(map(self._of_value, value))
        if isinstance(value, dict):
            return tuple((name, self._of_value(of_name)) for name, of_name in value.items())
        if isinstance(value, float | complex | np.ndarray | np.generic | jax.Array):
            return _of_array(value)
        is_function = isinstance(value, FunctionType | MethodType | partial)
        if is_function and not _is_of_module(value):
            raise _CannotBeTold
        if not is_function and type(value).__module__.split(".")[0] not in KNOWN_MODULES:
            raise _CannotBeTold
        try:
            hash(value)
        except TypeError:
            raise _CannotBeTold from None
        return type(value), value


def _is_of_module(value: Any) -> bool:
    """Whether a function is always the same: nothing that it closes over can be another."""
    return isinstance(value, FunctionType) and "<locals>" not in value.__qualname__


def _of_array(value: Any) -> Hashable:
    """Of a constant: by its bits, so that -0 is not 0, and NaN is NaN."""
    try:
        array = np.asarray(value)
    except TypeError:  # random keys
        raise _CannotBeTold from None
    if array.nbytes > LARGEST_CONSTANT or array.dtype == object:
        raise _CannotBeTold
    return type(value).__name__, array.dtype.name, array.shape, array.tobytes()
