# SPDX-License-Identifier: Apache-2.0
"""All that the package uses of what NumPyro and JAX do not promise to keep, each with its reason.

Checked with NumPyro 0.20.0 to 0.22.0 and with JAX 0.8.2 to 0.12. Any later version may move what is
used here: ``tests/handlers/test_internals.py`` then fails with the name of what moved.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import jax
import numpyro
from jax import Array
from jax._src.core import trace_state_clean
from jax.example_libraries.optimizers import OptimizerState
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from numpyro.contrib.control_flow import scan
from numpyro.distributions.distribution import MaskedDistribution
from numpyro.distributions.transforms import Transform, biject_to
from numpyro.handlers import condition, do, infer_config, seed, substitute
from numpyro.infer import util as infer_util
from numpyro.infer.autoguide import AutoGuide
from numpyro.infer.util import (
    constrain_fn,
    helpful_support_errors,
    potential_energy,
    transform_fn,
)
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


@contextmanager
def outermost(handler: Messenger) -> Iterator[None]:
    """Within, a handler that sees messages last, though it is opened inside of others.

    The ELBOs of NumPyro seed the guide that they are given, and only what is further out than that
    sees the key of a site.
    """
    _PYRO_STACK.insert(0, handler)
    try:
        yield
    finally:
        _PYRO_STACK.remove(handler)


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


def given_values(name: str) -> list[Any]:
    """What open handlers ``condition``, ``do`` and ``substitute`` have by this name."""
    known = [h.data or {} for h in _PYRO_STACK if isinstance(h, (condition, do, substitute))]
    return [data[name] for data in known if name in data]


def is_of_a_chain() -> bool:
    """Whether the model is run for the potential energy of a Markov chain.

    ``potential_energy`` substitutes by a function of its own. Guides that use it inside of an ELBO
    have a random key.
    """
    return any(
        getattr(getattr(handler, "substitute_fn", None), "func", None)
        is infer_util._unconstrain_reparam
        for handler in _PYRO_STACK
    ) and not any(isinstance(handler, seed) for handler in _PYRO_STACK)


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


def close_over(guide: AutoGuide, args: Any, kwargs: Any) -> None:
    """Make anew what a guide keeps as functions that close over the arguments of its model.

    One brings free values into their supports and adds deterministic sites, as ``median`` and
    ``quantiles`` need it; the others are potential energies, for Laplace's and DAIS guides.
    """
    sites = guide.prototype_trace
    known = {n: s["value"] for n, s in sites.items() if s["type"] in ("param", "mutable")}
    supports = {
        name: site["fn"].support
        for name, site in sites.items()
        if site["type"] == "sample" and not site["is_observed"] and not _is_discrete(site)
    }
    model = substitute(guide.model, data=known)
    if any(site["type"] == "deterministic" for site in sites.values()) or any(
        not isinstance(bound, (int, float)) for s in supports.values() for bound in _bounds(s)
    ):
        constrain = partial(constrain_fn, model, args, kwargs, return_deterministic=True)
    else:
        constrain = partial(transform_fn, {n: biject_to(s) for n, s in supports.items()})
    guide._postprocess_fn = seed(constrain, rng_seed=0)
    guide._potential_fn = partial(potential_energy, model, args, kwargs)
    guide._potential_fn_gen = lambda *args, **kwargs: partial(potential_energy, model, args, kwargs)


def _is_discrete(site: dict[str, Any]) -> bool:
    return bool(site["fn"].support.is_discrete)


def _bounds(support: Any) -> list[Any]:
    """The bounds of a support of NumPyro's, which may follow from values that are drawn before."""
    names = ("lower_bound", "upper_bound")
    return [getattr(support, name) for name in names if hasattr(support, name)]


class LetGo(NamedTuple):
    """What a guide has learned of its model."""

    sites: dict[str, Any] | None  # of the model; None if it has not been run
    start: dict[str, Any] | None  # start values; a guide of ours may have none, and no functions


def let_go(guide: AutoGuide) -> LetGo:
    """Take out of a guide all that it has learned of its model, but for names and sizes."""
    of_arguments = ("_postprocess_fn", "_potential_fn", "_potential_fn_gen")
    for name in of_arguments:
        vars(guide).pop(name, None)
    taken = LetGo(guide.prototype_trace, vars(guide).pop("_init_locs", None))
    guide.prototype_trace = None
    return taken


def take_back(guide: AutoGuide, learned: LetGo, args: Any, kwargs: Any) -> None:
    """Give a guide what ``let_go`` took, and make its functions with these arguments."""
    guide.prototype_trace = learned.sites
    if learned.start is not None:
        guide._init_locs = learned.start
        close_over(guide, args, kwargs)


Search = Callable[[Array], Any]
_ONE_SEARCH = threading.RLock()  # held while NumPyro's is another


@contextmanager
def search_for_start_values(wrapped: Callable[[Search], Search]) -> Iterator[None]:
    """Within, automatic guides look for valid start values by ``wrapped`` of NumPyro's search.

    The search is a function of a random key, and closes over the model's arguments, which may be
    traced. It returns the start values and whether they are valid. Of two threads one waits for the
    other, since NumPyro has one search for all; what a thread does outside is left to NumPyro.
    """
    thread = threading.get_ident()
    with _ONE_SEARCH:
        found = infer_util.find_valid_initial_params

        def find(rng_key: Array, model: Any, **options: Any) -> Any:
            def search(rng_key: Array) -> Any:
                return found(rng_key, model, **options)

            return (wrapped(search) if threading.get_ident() == thread else search)(rng_key)

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


def closed_over(traced: Any) -> list[Any]:
    """What a traced function closes over: arrays, and then tracers of transformations around it."""
    return [*traced.jaxpr.consts, *traced._consts]


def without_constants(jaxpr: Any) -> Any:
    """A jaxpr without the arrays that its function closed over, which those of JAX 0.12 hold."""
    return jaxpr.with_consts(()) if hasattr(jaxpr, "with_consts") else jaxpr


def run_jaxpr(jaxpr: Any, constants: list[Any], *args: Any) -> list[Any]:
    """Evaluate a traced function with other values of what it closes over."""
    num_arrays = len(jaxpr.constvars)  # tracers are arguments of the jaxpr
    return jax.core.eval_jaxpr(jaxpr, constants[:num_arrays], *constants[num_arrays:], *args)


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
