# SPDX-License-Identifier: Apache-2.0
"""A fit of ``SubsampledSVI`` as arrays with names and plain values, and back, checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from numpy.typing import NDArray

from numpyro_largecat.data.checkpoints import Reached, check_settings, fingerprint
from numpyro_largecat.data.fit_folders import FitFolder, SavedArrays
from numpyro_largecat.data.parts_of_fits import FolderOfParts, joined_fit, parts_of
from numpyro_largecat.data.versions import other_versions
from numpyro_largecat.svi.array_batches import ArrayBatches
from numpyro_largecat.svi.held_out import Scores
from numpyro_largecat.svi.iterates import Recorded
from numpyro_largecat.svi.plan import Plan
from numpyro_largecat.svi.state import SubsampledSVIState, type_names
from numpyro_largecat.svi.streamed_batches import StreamedBatches

KIND = "fit of SubsampledSVI"
_ITERATES = "iterates of "
_SCORES = "scores: "
_BEST = "best"  # before the names of the parts of the best state
_RUN_KEY = ".rng_key"  # of any kind and form: nothing else in the fit depends on them


class SavedRun(NamedTuple):
    """What a run has reached."""

    state: SubsampledSVIState
    losses: NDArray[Any]
    iterates: Mapping[str, NDArray[Any]]
    scores: Scores
    recorded: Recorded = {}  # what the iterates are the values of, if a run goes on from here
    place: Mapping[str, Any] = {}  # plain values that a run needs to go on


def settings_of(batches: Any, rng_key: Any, arguments: Any) -> dict[str, Any]:
    """What must be the same in a run that goes on, with one batch for all the data."""
    known: dict[str, Any] = {"rng_key": fingerprint(rng_key), "arguments": fingerprint(arguments)}
    if not isinstance(batches, ArrayBatches | StreamedBatches):
        return known | {"kind of batches": "none" if batches is None else "a stream"}
    return known | {
        "kind of batches": "rows",
        "number of rows": batches.size,
        "batch_size": batches.batch_size,
        "seed": fingerprint(batches.orders),
        "first batch": fingerprint(batches.batch(0)),
    }


def as_reached(plan: Plan, run: SavedRun, settings: Mapping[str, Any]) -> Reached:
    """A run to be written; none of its arrays is copied where it is in the host's memory."""
    leaves = _named_leaves(run.state)
    layouts = None if plan.layout is None else _named_leaves(plan.layout)
    scores = run.scores
    best = {} if scores.best is None else _named_leaves(scores.best)
    arrays: dict[str, Any] = {}
    for before, state in (("", leaves), (_BEST, best)):
        for name, leaf in state.items():
            sizes = {} if layouts is None else layouts[name].sizes
            arrays |= parts_of(before + name, _key_data(leaf), sizes)
    arrays["losses"] = run.losses
    arrays |= {_ITERATES + name: values for name, values in run.iterates.items()}
    arrays |= {_SCORES + name: values for name, values in scores.arrays().items()}
    about = {
        "keys": {
            n: (str(jax.random.key_impl(x)), _form(x)) for n, x in leaves.items() if is_key(x)
        },
        "recorded": {n: [_as_lists(i) for i in of] for n, of in run.recorded.items()},
        "place": run.place,
        "settings": settings and {**settings, **_loss_of(plan)},
        **_description(plan),
    }
    return Reached(len(run.losses), arrays, about)


def write_run(folder: FitFolder | FolderOfParts, plan: Plan, run: SavedRun) -> None:
    """Write a run as the newest fit of a folder; its number is that of its steps, or larger."""
    reached = as_reached(plan, run, {})
    number = max([reached.number, *(n + 1 for n in folder.numbers())])
    if not plan.spans_processes:
        folder.write(*reached._replace(number=number))
        return
    number = int(multihost_utils.broadcast_one_to_all(np.int32(number)))
    folder.write(*reached._replace(number=number))
    multihost_utils.sync_global_devices("saved")  # so that all know of it when the next is saved


def read_run(
    folder: FitFolder | FolderOfParts, plan: Plan, settings: Mapping[str, Any] | None = None
) -> SavedRun:
    """Read the newest run of a folder, of these settings if it is to go on with them.

    Raises:
        FileNotFoundError: If there is none.
        ValueError: If it is damaged, or of another model, guide or optimiser.
    """
    saved = joined_fit(folder.read())
    check_same_model(folder, saved, plan)
    if settings is not None:
        if not saved.about["settings"]:
            raise ValueError(
                f"`resume` needs a checkpoint; {folder.path} has what `svi.save` wrote. To go on "
                "from that, pass `init_state=svi.load(folder, ...).state`."
            )
        check_settings(folder, saved, {**settings, **_loss_of(plan)})
    assert plan.shapes is not None
    keys = saved.about["keys"]

    def value(name: str, before: str) -> Any:
        data = saved.arrays.pop(before + name)
        if name in keys:
            return jax.random.wrap_key_data(jnp.asarray(np.asarray(data)), impl=keys[name][0])
        return np.asarray(data) if plan.layout is None else data

    def state(before: str = "") -> SubsampledSVIState:
        values = [value(name, before) for name in _named_leaves(plan.shapes)]
        return plan.placed(jax.tree.unflatten(jax.tree.structure(plan.shapes), values))

    arrays = saved.arrays
    steps, scores = (arrays[_SCORES + name].tolist() for name in ("step", "score"))
    best = state(_BEST) if any(name.startswith(_BEST) for name in arrays) else None
    return SavedRun(
        state(),
        arrays["losses"],
        {n.removeprefix(_ITERATES): a for n, a in arrays.items() if n.startswith(_ITERATES)},
        Scores(steps, scores, best),
        {n: [_as_index(i) for i in of] for n, of in saved.about["recorded"].items()},
        saved.about["place"],
    )


def check_same_model(folder: FitFolder | FolderOfParts, saved: SavedArrays, plan: Plan) -> None:
    """Refuse a fit of another model, guide or optimiser than that of the plan.

    Raises:
        ValueError: With the first plate, parameter or part of the optimiser's state that differs.
    """
    for what, wanted in _description(plan).items():
        found = saved.about[what]
        if isinstance(wanted, dict):
            for name in sorted(wanted.keys() | found.keys()):
                got, want = found.get(name, "none"), wanted.get(name, "none")
                if got != want:
                    raise _differs(folder, saved, f"{what} '{name}'", got, want)
        elif found != wanted:
            raise _differs(folder, saved, what, found, wanted)
    leaves = _named_leaves(jax.eval_shape(plan.without_padding, plan.shapes))
    for name in sorted((leaves.keys() | saved.arrays.keys()) - {"losses", _RUN_KEY}):
        if name.startswith((_ITERATES, _SCORES, _BEST)):
            continue
        want = _form(leaves[name]) if name in leaves else "none"
        held = _form(saved.arrays[name]) if name in saved.arrays else "none"
        _, held = saved.about["keys"].get(name, (None, held))
        if held != want:
            raise _differs(folder, saved, f"state{name}", held, want)


def _differs(
    folder: FitFolder | FolderOfParts, saved: SavedArrays, what: str, got: Any, want: Any
) -> ValueError:
    others = other_versions(saved.versions)
    note = f" It was saved with other versions: {others}." if others else ""
    if str(got).replace("64[", "32[") == str(want).replace("64[", "32["):
        note += f" Set `jax_enable_x64` to {'64[' in str(got)}, as it was there."
    return ValueError(
        f"{folder.path} must hold a fit of this model, guide and optimiser, with the same sizes "
        f"and types; {what} differs: it is {got} in the saved fit, and here {want}.{note}"
    )


def _loss_of(plan: Plan) -> dict[str, str]:
    return {"loss": type(plan.loss).__name__}


def _description(plan: Plan) -> dict[str, Any]:
    """What makes a plan another, besides shapes and types of arrays; JSON can hold it."""
    assert plan.shapes is not None
    sizes: dict[str, Any] = {}
    params: dict[str, Any] = {}
    values = plan.optim.get_params(plan.computed) | {
        name: local.value for name, local in plan.shapes.local_state.items()
    }
    for name, site in plan.stored.items():
        params[name] = {
            "transform": type(site.transform).__name__,
            "rule": type(site.rule).__name__,
            "plates": {str(axis): plate for axis, plate in site.plates.items()},
        }
        for axis, plate in site.plates.items():
            rows = jax.tree.leaves(values[name])[0].shape[axis]
            sizes[plate] = rows - site.padding.get(axis, 0)
    types = type_names((plan.shapes.optim_state, plan.shapes.local_state))
    return {"parameter": params, "size of plate": sizes, "types of the optimiser's state": types}


def _named_leaves(tree: Any) -> dict[str, Any]:
    paths = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): leaf for path, leaf in paths}


def is_key(leaf: Any) -> bool:
    """Whether an array holds typed random keys, which no file can hold as they are."""
    return bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def _key_data(leaf: Any) -> Any:
    return jax.random.key_data(leaf) if is_key(leaf) else leaf


def _form(leaf: Any) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}"


def _as_lists(index: Any) -> Any:
    return None if index is None else [axis.tolist() for axis in index]


def _as_index(lists: Any) -> Any:
    return None if lists is None else tuple(np.array(axis, np.int64) for axis in lists)
