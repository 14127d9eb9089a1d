# SPDX-License-Identifier: Apache-2.0
"""All that the package uses of what NumPyro and JAX do not promise to keep, each with its reason.

Checked with NumPyro 0.20.0 to 0.22.0 and with JAX 0.8.2 to 0.12. Any later version may move what is
used here: ``tests/handlers/test_internals.py`` then fails with the name of what moved.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpyro
from jax import Array
from jax._src.core import trace_state_clean
from jax.example_libraries.optimizers import OptimizerState
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from numpyro.contrib.control_flow import scan
from numpyro.distributions.distribution import MaskedDistribution
from numpyro.distributions.transforms import Transform
from numpyro.handlers import block, infer_config, seed, substitute
from numpyro.infer import util as infer_util
from numpyro.infer.autoguide import AutoGuide
from numpyro.infer.util import helpful_support_errors
from numpyro.ops.provenance import eval_provenance
from numpyro.optim import _NumPyroOptim
from numpyro.primitives import _PYRO_STACK, Messenger, apply_stack
from numpyro.util import _validate_model

__all__ = [  # of NumPyro and JAX, as they are; what is defined below comes besides
    "ClosedJaxpr",
    "Jaxpr",
    "Literal",
    "OptimizerState",
    "apply_stack",
    "eval_provenance",
    "helpful_support_errors",
    "trace_state_clean",
]

# --- Handlers and messages -----------------------------------------------------------------------


def open_handlers() -> list[Messenger]:
    """The handlers that are open, the outermost first.

    A plate must know what is around it when it opens, and a statement which plates it is in; a
    handler of our own would only see the messages that pass by it.
    """
    return list(_PYRO_STACK)


def open_plates() -> list[numpyro.plate]:
    """The plates that are open, the outermost first; ``scope`` does not rename them."""
    return [handler for handler in _PYRO_STACK if isinstance(handler, numpyro.plate)]


def is_substituted(msg: dict[str, Any]) -> bool:
    """Whether a handler ``substitute`` that is open, or ``Predictive``, has a value for a site.

    ``Predictive`` hands its samples over by a function of its own, which has a name alone to be
    told by; functions of others, such as those that find start values, are none of these.
    """
    for handler in open_handlers():
        if not isinstance(handler, substitute):
            continue
        if msg["name"] in (handler.data or {}):
            return True
        fn = handler.substitute_fn
        if getattr(fn, "__name__", "") == "_samples_wo_deterministic" and fn(msg) is not None:
            return True
    return False


def is_scan_open() -> bool:
    """Whether the body of NumPyro's ``scan`` is being run, which opens a handler of its own."""
    return any(
        isinstance(handler, infer_config)
        and getattr(handler.config_fn, "__module__", None) == scan.__module__
        for handler in _PYRO_STACK
    )


def is_of_scan(site: dict[str, Any]) -> bool:
    """Whether a site of a trace comes from the body of a ``scan``, which leaves this mark on it."""
    return bool(site.get("_control_flow_done"))


def check_model_trace(sites: dict[str, Any]) -> None:
    """Warn of plates that do not fit their sites, as all ELBOs of NumPyro do."""
    _validate_model(sites, plate_warning="loose")


# --- Distributions -------------------------------------------------------------------------------


def mask_of(fn: MaskedDistribution) -> Any:
    """The mask of a distribution, a bool or an array, which has no public name."""
    return fn._mask


def copy_transform(transform: Transform, arrays: dict[str, Any]) -> Transform:
    """Copy a transform with other arrays, without the inverse of the old ones that it may keep.

    Its constructor may take other arguments, or compute the arrays from them. An inverse that is a
    transform is what it was made as, and stays.
    """
    new = copy.copy(transform)
    new._inv = transform._inv if isinstance(transform._inv, Transform) else None
    for name, array in arrays.items():
        setattr(new, name, array)
    return new


# --- Automatic guides ----------------------------------------------------------------------------


def has_seen_model(guide: AutoGuide) -> bool:
    """Whether an automatic guide has run its model once and knows its sites."""
    return guide.prototype_trace is not None


def forget_model(guide: AutoGuide) -> None:
    """Make an automatic guide run its model again at its next call."""
    guide.prototype_trace = None


def start_values(guide: AutoGuide) -> dict[str, Any]:
    """The start values that an ``AutoNormal`` or ``AutoDelta`` keeps, to be changed in place.

    They are tables as large as the parameters that are made from them, and needed no more after.
    """
    found: dict[str, Any] = getattr(guide, "_init_locs", {})
    return found


def learn_supports_late(guide: AutoGuide, args: Any, kwargs: Any) -> None:
    """Let a guide that has seen its model in a trace run it again when values are constrained.

    Its function for that closes over the arguments of the model, and so do those of the potential
    energy, which only Laplace's and DAIS guides call.
    """
    if not hasattr(guide, "_postprocess_fn"):  # one of ours that needs none
        return
    known: list[Any] = []

    def constrain(values: Any) -> Any:
        if known:
            return known[0](values)
        anew = copy.copy(guide)
        with block(), seed(rng_seed=0):
            AutoGuide._setup_prototype(anew, *args, **kwargs)
        if trace_state_clean():
            known.append(anew._postprocess_fn)
        return anew._postprocess_fn(values)

    guide._postprocess_fn = constrain
    guide._potential_fn = guide._potential_fn_gen = None


Search = Callable[[Array], Any]


@contextmanager
def search_for_start_values(wrapped: Callable[[Search], Search]) -> Iterator[None]:
    """Within, automatic guides look for valid start values by ``wrapped`` of NumPyro's search.

    The search is a function of a random key, and closes over the model's arguments, which may be
    traced. It returns the start values and whether they are valid. Like NumPyro's handlers, this is
    not made for several threads.
    """
    found = infer_util.find_valid_initial_params

    def find(rng_key: Array, model: Any, **options: Any) -> Any:
        def search(rng_key: Array) -> Any:
            return found(rng_key, model, **options)

        return wrapped(search)(rng_key)

    infer_util.find_valid_initial_params = find
    try:
        yield
    finally:
        infer_util.find_valid_initial_params = found


# --- Optimisers ----------------------------------------------------------------------------------


def takes_gradient_steps(optim: _NumPyroOptim) -> bool:
    """Whether an optimiser only needs gradients, and does not evaluate the loss on its own."""
    return type(optim).eval_and_update is _NumPyroOptim.eval_and_update


# --- JAX -----------------------------------------------------------------------------------------


def run_jaxpr(jaxpr: Any, constants: list[Any], *args: Any) -> list[Any]:
    """Evaluate a traced function with other values of the arrays that it closes over."""
    return jax.core.eval_jaxpr(jaxpr, constants, *args)


def run_equation(eqn: Any, values: list[Any]) -> list[Any]:
    """Evaluate one operation of a traced function; its results."""
    params = eqn.primitive.get_bind_params(eqn.params)
    if isinstance(params, tuple):  # before JAX 0.10
        values, params = [*params[0], *values], params[1]
    results = eqn.primitive.bind(*values, **params)
    return results if eqn.primitive.multiple_results else [results]


def addresses_of(array: Array) -> set[int]:
    """Where an array is in memory: arrays with an address in common cannot both be donated."""
    return {shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards}
