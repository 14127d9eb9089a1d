# SPDX-License-Identifier: Apache-2.0
"""Each thing of NumPyro and JAX that may move with a version is where the package looks for it.

A test that fails here names what moved: mend ``numpyro_largecat/handlers/internals.py`` alone.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import lax
from numpyro.contrib.control_flow import scan
from numpyro.distributions import transforms
from numpyro.handlers import block, seed, substitute, trace
from numpyro.infer import Predictive, init_to_uniform
from numpyro.infer import util as infer_util
from numpyro.infer.autoguide import AutoDelta, AutoGuideList, AutoNormal
from numpyro.optim import Adam, Minimize, optax_to_numpyro

import numpyro_largecat
from numpyro_largecat.handlers import internals

pytestmark = pytest.mark.smoke  # so that the oldest versions are looked at too

PACKAGE = Path(numpyro_largecat.__file__).parent
OF_OTHERS = ("_replace", "_asdict", "_fields")  # of `NamedTuple`: documented
BY_NAME = ("getattr", "hasattr", "setattr", "delattr")


def model():
    with numpyro.plate("rows", 3):
        numpyro.sample("w", dist.Normal(0, 1))


def test_the_open_handlers_are_known_in_order():
    with numpyro.plate("outer", 2), numpyro.plate("inner", 3), block():
        assert [plate.name for plate in internals.open_plates()] == ["outer", "inner"]
        assert isinstance(internals.open_handlers()[-1], block)
    assert internals.open_handlers() == []


def test_a_message_of_our_own_goes_through_the_handlers():
    """A plate asks for its rows with one."""
    msg = {"type": "plate", "fn": None, "name": "p_rows", "args": (3, 1), "kwargs": {}}
    msg |= {"value": jnp.zeros(1), "scale": 1.0, "cond_indep_stack": []}
    with substitute(data={"p_rows": jnp.ones(1)}), trace() as sites:
        assert internals.apply_stack(msg)["value"].item() == 1
    assert "p_rows" in sites


def test_the_body_of_a_scan_is_told_from_other_places():
    found = []

    def body(carry, x):
        found.append(internals.is_scan_open())
        return carry, numpyro.sample("z", dist.Normal(0, 1))

    sites = trace(seed(lambda: scan(body, 0.0, jnp.arange(2.0)), 0)).get_trace()
    assert found and all(found) and not internals.is_scan_open()
    assert internals.is_of_scan(sites["z"])
    assert not internals.is_of_scan(trace(seed(model, 0)).get_trace()["w"])


def test_numpyros_check_of_plates_is_there():
    def without_plate():
        with numpyro.plate("rows", 3):
            numpyro.sample("w", dist.Normal(jnp.zeros((2, 3)), 1))

    internals.check_model_trace(trace(seed(model, 0)).get_trace())
    with pytest.warns(UserWarning, match="Missing a plate"):
        internals.check_model_trace(trace(seed(without_plate, 0)).get_trace())


def test_the_mask_of_a_distribution_is_found():
    mask = jnp.array([True, False])
    assert internals.mask_of(dist.Normal(jnp.zeros(2), 1).mask(mask)) is mask
    assert internals.mask_of(dist.Normal(0, 1).mask(False)) is False


def test_the_inverse_of_a_transform_is_not_shared_by_its_copy():
    affine = transforms.AffineTransform(1.0, 2.0)
    assert affine.inv(5.0) == 2.0  # now it remembers its inverse
    assert internals.copy_transform(affine, {"scale": 4.0}).inv(5.0) == 1.0
    assert internals.copy_transform(affine.inv, {})(5.0) == 2.0


def test_a_distribution_is_a_pytree_of_fields_that_it_names():
    """``top_l`` takes single components by them."""
    normal = dist.Normal(jnp.arange(4.0), jnp.ones(4))
    data, aux = normal.tree_flatten()
    fields = dict(zip(normal.gather_pytree_data_fields(), data, strict=True))
    assert fields["loc"] is normal.loc and fields["scale"] is normal.scale
    part = dist.Normal.tree_unflatten(aux, [x if x is None else x[2:] for x in data])
    dist.Distribution.__init__(part, (2,), (), validate_args=False)
    np.testing.assert_allclose(part.log_prob(2.0), normal.log_prob(2.0)[2:])


def test_an_independent_constraint_says_how_many_axes_it_holds():
    support = dist.Gamma(jnp.ones((2, 3)), 1.0).to_event(1).support
    assert support.reinterpreted_batch_ndims == 1


@pytest.mark.parametrize("kind", [AutoNormal, AutoDelta])
def test_start_values_of_an_automatic_guide_are_freed_and_found_again(kind):
    guide = kind(model)
    assert not internals.has_seen_model(guide)
    trace(seed(guide, 0)).get_trace()
    assert internals.has_seen_model(guide)
    values = internals.start_values(guide)
    assert values["w"].shape == (3,)
    values["w"] = np.broadcast_to(np.zeros(1), 3)
    assert trace(seed(guide, 0)).get_trace()["w_auto_loc"]["value"].shape == (3,)
    internals.forget_model(guide)
    trace(seed(guide, 0)).get_trace()
    assert isinstance(internals.start_values(guide)["w"], jax.Array)


def test_a_guide_of_our_own_can_be_a_part_of_numpyros_list():
    """``AutoError`` uses these parts of ``AutoGuide``, which are there for subclasses."""
    guide = AutoGuideList(model)
    guide.append(AutoNormal(model))
    trace(seed(guide, 0)).get_trace()
    part = guide[0]
    assert callable(part._setup_prototype)
    assert set(part._prototype_frames) == set(part._prototype_frame_full_sizes) == {"rows"}
    assert part._create_plates()["rows"].subsample_size == 3


def positive_model(y):
    tau = numpyro.sample("tau", dist.LogNormal(0, 1))
    numpyro.deterministic("total", tau * y.sum())
    numpyro.sample("y", dist.Normal(0, tau), obs=y)


def test_a_guide_looks_for_the_same_start_values_by_a_search_that_is_wrapped():
    own = infer_util.find_valid_initial_params
    wrapped = []

    def jitted(search):
        wrapped.append(search)
        return jax.jit(search)

    def start():
        sites = trace(seed(AutoNormal(model, init_loc_fn=init_to_uniform), 0)).get_trace()
        return sites["w_auto_loc"]["value"]

    before = start()
    with internals.search_for_start_values(jitted):
        np.testing.assert_allclose(start(), before, rtol=1e-6)
    assert len(wrapped) == 1 and infer_util.find_valid_initial_params is own


def test_searches_of_two_threads_leave_numpyros_as_it_was():
    """The second begins within the first, and waits for its end; its guide alone is wrapped."""
    own = infer_util.find_valid_initial_params
    begun, is_first_done = threading.Event(), []
    wrapped = []

    def as_it_is(search):
        wrapped.append(search)
        return search

    def second():
        seed(AutoNormal(model, init_loc_fn=init_to_uniform), 0)()  # outside: by NumPyro's own
        begun.set()
        with internals.search_for_start_values(as_it_is):
            return len(is_first_done), infer_util.find_valid_initial_params is not own

    with ThreadPoolExecutor(1) as pool:
        with internals.search_for_start_values(as_it_is):
            done = pool.submit(second)
            assert begun.wait(60)
            is_first_done.append(True)
        assert done.result(60) == (1, True)
    assert not wrapped and infer_util.find_valid_initial_params is own


def test_what_a_guide_computes_with_arguments_is_made_with_others():
    guide = AutoNormal(positive_model)
    trace(seed(guide, 0)).get_trace(jnp.ones(3))
    params = {"tau_auto_loc": jnp.array(0.7), "tau_auto_scale": jnp.array(1.0)}
    free = {"tau": params["tau_auto_loc"]}
    energy = guide._potential_fn(free)
    np.testing.assert_allclose(guide.median(params)["total"], 3 * np.exp(0.7), rtol=1e-6)
    internals.close_over(guide, (jnp.ones(5),), {})
    np.testing.assert_allclose(guide.median(params)["total"], 5 * np.exp(0.7), rtol=1e-6)
    internals.close_over(guide, (jnp.ones(3),), {})
    np.testing.assert_allclose(guide._potential_fn(free), energy, rtol=1e-6)
    np.testing.assert_allclose(guide._potential_fn_gen(jnp.ones(3))(free), energy, rtol=1e-6)


def test_a_guide_lets_go_of_all_that_it_has_learned():
    guide = AutoNormal(positive_model)
    new = set(vars(guide))
    trace(seed(guide, 0)).get_trace(jnp.ones(3))
    taken = internals.let_go(guide)
    assert list(taken.sites) == ["tau", "total", "y"] and guide.prototype_trace is None
    assert set(vars(guide)) - new <= {"_prototype_plate_sizes"}
    internals.take_back(guide, taken, (jnp.ones(3),), {})
    free = {"tau_auto_loc": jnp.array(0.7)}
    np.testing.assert_allclose(guide.median(free)["tau"], np.exp(0.7), rtol=1e-6)


def test_the_outermost_handler_sees_a_message_last():
    seen = []

    class Notes(internals.Messenger):
        def process_message(self, msg):
            seen.append(msg["kwargs"]["rng_key"] is not None)

    def fn():
        with internals.outermost(Notes()):
            return numpyro.sample("a", dist.Normal())

    seed(fn, 0)()
    assert seen == [True]
    assert not internals.open_handlers()


def test_optimisers_that_evaluate_the_loss_are_known():
    assert internals.takes_gradient_steps(Adam(0.1))
    assert internals.takes_gradient_steps(optax_to_numpyro(optax.adam(0.1)))
    assert not internals.takes_gradient_steps(Minimize())


def test_the_state_of_numpyros_optimisers_is_packed_as_jaxs_examples_do():
    _, state = Adam(0.1).init({"w": jnp.zeros(3)})
    assert isinstance(state, internals.OptimizerState)
    assert jax.tree.unflatten(state.tree_def, state.packed_state) is not None


def test_what_a_result_depends_on_is_found():
    def fn(a, b):
        return {"a": 2 * a, "both": a * b}

    found = internals.eval_provenance(fn, a=jnp.ones(()), b=jnp.ones(()))
    assert {name: set(inputs) for name, inputs in found.items()} == {"a": {"a"}, "both": {"a", "b"}}


def test_errors_about_supports_are_explained():
    site = {"name": "w", "fn": dist.Poisson(1.0), "type": "sample"}
    with pytest.raises(ValueError, match="cannot handle discrete sample site 'w'"):
        with internals.helpful_support_errors(site):
            raise NotImplementedError


def test_a_traced_function_is_run_with_other_arrays_and_step_by_step():
    table = np.arange(3.0, dtype=np.float32)

    @jax.jit
    def inner(x):
        return jnp.sin(x) * 2

    def fn(x):
        return inner(x) + table, lax.top_k(x, 1)[0]

    closed = jax.make_jaxpr(fn)(jnp.ones(3))
    assert isinstance(closed, internals.ClosedJaxpr)
    assert isinstance(closed.jaxpr, internals.Jaxpr)
    x = jnp.array([1.0, 2.0, 3.0])
    moved = [jnp.zeros_like(constant) for constant in closed.consts]
    np.testing.assert_allclose(internals.run_jaxpr(closed.jaxpr, moved, x)[0], inner(x))
    known = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    known |= dict(zip(closed.jaxpr.invars, [x], strict=True))

    def read(atom):
        return atom.val if isinstance(atom, internals.Literal) else known[atom]

    for eqn in closed.jaxpr.eqns:
        results = internals.run_equation(eqn, [read(atom) for atom in eqn.invars])
        known |= dict(zip(eqn.outvars, results, strict=True))
    outputs = [known[var] for var in closed.jaxpr.outvars]
    jax.tree.map(np.testing.assert_allclose, outputs, list(fn(x)))


def test_arrays_that_share_memory_are_known():
    a = jnp.arange(5.0)
    assert internals.addresses_of(a) == internals.addresses_of(jnp.asarray(a))
    assert not internals.addresses_of(a) & internals.addresses_of(jnp.copy(a))


def test_no_other_file_uses_privates_of_numpyro_or_jax():
    """Private are names that start with one underscore and that the package does not define."""
    trees = {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}
    nodes = {path: list(ast.walk(tree)) for path, tree in trees.items()}
    own = {name for found in nodes.values() for name in _defined(found)}
    found = [
        f"{path.relative_to(PACKAGE)}: {use}"
        for path in trees
        for use in _privates_of_others(nodes[path], own)
        if path.name != "internals.py"
    ]
    assert found == []


def test_privates_are_seen_however_they_are_reached():
    uses = [
        "from jax._src import core",
        "from numpyro.primitives import _PYRO_STACK",
        "guide._init_locs",
        "getattr(guide, '_init_locs', {})",
        "setattr(guide, '_init_locs', {})",
    ]
    fine = ["guide._own", "getattr(guide, '_own')", "getattr(guide, 'loc')", "x.__len__()"]
    fine += ["from numpyro_largecat._checks import check_count", "pair._replace(a='_b')"]
    tree = ast.parse("\n".join(uses + fine))
    assert sorted(_privates_of_others(ast.walk(tree), {"_own"})) == sorted(uses)


def _defined(nodes):
    yield from (n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.ClassDef))
    yield from (n.attr for n in nodes if isinstance(n, ast.Attribute) and _is_self(n.value))


def _privates_of_others(nodes, own):
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and not str(node.module).startswith("numpyro_largecat"):
            names = [*str(node.module).split("."), *(alias.name for alias in node.names)]
            if any(map(_is_private, names)) or "example_libraries" in names:
                yield f"from {node.module} import {', '.join(a.name for a in node.names)}"
        elif isinstance(node, ast.Attribute) and _is_private(node.attr):
            if node.attr not in own and node.attr not in OF_OTHERS:
                yield ast.unparse(node)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", None) in BY_NAME:
            if any(_is_private(name) and name not in own for name in _texts(node.args)):
                yield ast.unparse(node)


def _texts(nodes):
    return [n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)]


def _is_private(name):
    return name.startswith("_") and not name.startswith("__")


def _is_self(node):
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


@pytest.mark.parametrize("give", [Predictive, lambda fn, data: seed(substitute(fn, data=data), 0)])
def test_samples_of_predictive_are_told_from_start_values(give) -> None:
    """By the name of the function that hands them over, or by the data of a handler."""
    found = []

    def looks():
        found.append(internals.is_substituted({"type": "sample", "name": "w"}))
        numpyro.sample("w", dist.Normal(0, 1))

    seed(AutoNormal(looks), 0)()
    Predictive(looks, num_samples=1)(jax.random.key(0))  # of the prior
    assert found and not any(found)
    run = give(looks, {"w": jnp.zeros(2)})
    run(jax.random.key(0)) if give is Predictive else run()
    assert found[-1]


AFTER_ENUMERATION = """
import numpyro, numpyro.distributions as dist
import numpyro_largecat as lc

# As NumPyro leaves it after TraceEnum_ELBO has run, which needs funsor.
numpyro.plate.__new__ = lambda *args, **kwargs: object.__new__(numpyro.plate)
with numpyro.handlers.seed(rng_seed=0), lc.class_plate("classes", 9, num_sampled=2) as classes:
    w = numpyro.sample("w", dist.Normal(0, 1))
assert w.shape == classes.indices.shape == (2,)
"""


@pytest.mark.slow
def test_plates_are_of_their_own_class_after_enumeration():
    """In a process of its own: Python cannot undo that a class has had a ``__new__``."""
    done = subprocess.run(
        [sys.executable, "-c", AFTER_ENUMERATION], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
