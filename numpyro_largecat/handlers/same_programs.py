# SPDX-License-Identifier: Apache-2.0
"""Whether two jaxprs compute the same, so that one need not be compiled again."""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import jax
import numpy as np

from numpyro_largecat.handlers.internals import ClosedJaxpr, Jaxpr, Literal

LARGEST_CONSTANT = 2**16  # bytes of an array inside of a jaxpr that is compared
# Their functions say how they are differentiated; what they compute is a jaxpr.
WITH_RULES = "custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"


def key_of(jaxpr: Any) -> Hashable | None:
    """What is equal for jaxprs that compute the same; None where that cannot be told.

    That is primitives, parameters, shapes and types, and the values of constants. Names of
    variables, and how the jaxpr is differentiated, have no part in it. It cannot be told of jaxprs
    that call functions of Python, or hold large arrays.

    Cost: O(equations); a tenth of tracing them.
    """
    try:
        return _of_jaxpr(jaxpr)
    except _CannotBeTold:
        return None


class _CannotBeTold(Exception):
    """What a parameter is, cannot be compared by its value."""


def _of_jaxpr(jaxpr: Any) -> Hashable:
    numbers: dict[Any, int] = {}

    def made(variable: Any) -> Hashable:
        numbers[variable] = len(numbers)
        return variable.aval

    def used(atom: Any) -> Hashable:
        if isinstance(atom, Literal):
            return _of_array(atom.val), atom.aval
        return numbers[atom]

    def of_equation(equation: Any) -> Hashable:
        taken = tuple(map(used, equation.invars))
        name, parameters = equation.primitive.name, equation.params
        if "callback" in name:
            raise _CannotBeTold
        if name in WITH_RULES:
            parameters = {k: v for k, v in parameters.items() if isinstance(v, int | ClosedJaxpr)}
            if not any(isinstance(value, ClosedJaxpr) for value in parameters.values()):
                raise _CannotBeTold
        given = tuple(map(made, equation.outvars))
        return equation.primitive, taken, given, _of_value(parameters), str(equation.ctx)

    begin = tuple(map(made, (*jaxpr.constvars, *jaxpr.invars)))
    return begin, tuple(map(of_equation, jaxpr.eqns)), tuple(map(used, jaxpr.outvars))


def _of_value(value: Any) -> Hashable:
    """Of a parameter of an equation."""
    if isinstance(value, ClosedJaxpr):
        return _of_jaxpr(value.jaxpr), tuple(map(_of_array, value.consts))
    if isinstance(value, Jaxpr):
        return _of_jaxpr(value)
    if isinstance(value, tuple | list):
        return type(value), tuple(map(_of_value, value))
    if isinstance(value, dict):
        return tuple((name, _of_value(of_name)) for name, of_name in value.items())
    if isinstance(value, float | complex | np.ndarray | np.generic | jax.Array):
        return _of_array(value)
    if isinstance(value, FunctionType | MethodType | partial) and not _is_of_module(value):
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
