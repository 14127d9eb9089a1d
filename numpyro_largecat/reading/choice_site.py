# SPDX-License-Identifier: Apache-2.0
"""Which choice of a model is read, and over which class plate."""

from __future__ import annotations

from typing import Any, NamedTuple

from numpyro_largecat._checks import why_not_taken
from numpyro_largecat.choices.choice_distribution import is_choice
from numpyro_largecat.choices.error_guides import without_errors
from numpyro_largecat.handlers.chosen_rows import only_read, without_training_rows
from numpyro_largecat.handlers.plate_facts import class_plates
from numpyro_largecat.handlers.run_model import at_feasible_values
from numpyro_largecat.handlers.sites import base_distribution
from numpyro_largecat.handlers.static_result import static_result
from numpyro_largecat.plates.class_chunk import class_chunk
from numpyro_largecat.reading.bound_fit import BoundFit


class ChoiceSite(NamedTuple):
    """A choice and its class plate."""

    site: str
    plate: str
    num_categories: int


def find_choice(fit: BoundFit) -> ChoiceSite:
    """The choice to read: the one that is named, or the only one of the model.

    A choice is over the class plate that has as many classes; among several of these, over that
    which gives it a chunk of its classes when it is told to. Nothing is computed.

    Raises:
        ValueError: If a name is not one of the model's, or there are several choices to read.
        TypeError: If the arguments are none of the model.
    """
    _check_takes(fit)
    model, _ = without_errors(fit.model, fit.guide)
    plates, choices = _look(fit, model)
    if not choices:
        raise ValueError(
            "the model has no choice to read, no site with UtilityCategorical or one of its "
            "bounds. Other outcomes are predicted by NumPyro's `Predictive`, and scored by its "
            "`log_likelihood`, from guide and model with full plates; `to_arviz` without `obs` "
            "shows the posterior, and `diagnose` of a fit `from_svi` looks at its steps."
        )
    if not plates:
        raise ValueError(
            f"the choices of the model, {list(choices)}, are over no class plate, whose classes "
            "predictions go through. Open one, `lc.class_plate('alternatives', K)`, and give "
            "`classes=` to the choice; or predict by NumPyro's `Predictive`, from guide and model "
            "with full plates."
        )
    if fit.plate is not None and fit.plate not in plates:
        raise ValueError(
            f"`plate` must name a class plate of the model, {list(plates)}; got '{fit.plate}'."
        )
    if fit.site is not None and fit.site not in choices:
        raise ValueError(
            "`site` must name a UtilityCategorical site of the model, or one of its bounds; got "
            f"'{fit.site}', and the choices of the model are {list(choices)}."
        )
    found = [
        ChoiceSite(site, plate, size)
        for plate, size in plates.items()
        for site, choice in choices.items()
        if choice.num_categories == size and fit.plate in (None, plate) and fit.site in (None, site)
    ]
    if len(found) > 1:
        found = [choice for choice in found if _is_over(fit, model, choice)]
    if len(found) != 1:
        raise ValueError(
            "say which choice to read, `lc.Fitted(..., site='y', plate='classes')`: the choices of "
            f"the model are {list(choices)}, and its class plates {list(plates)}."
        )
    return found[0]


def has_choices(fit: BoundFit) -> bool:
    """Whether the model has choices at all."""
    _check_takes(fit)
    return bool(_look(fit, without_errors(fit.model, fit.guide)[0])[1])


def _check_takes(fit: BoundFit) -> None:
    """Refuse arguments that the model does not take, saying where they are given."""
    reason = why_not_taken(fit.model, *fit.args, **fit.kwargs)
    if reason is not None:
        raise TypeError(
            "the arguments of `fitted.on(...)` must be those of the model, most often without the "
            f"observed choices; its signature says: {reason}. (Batches of a fit are given to "
            "`diagnose(batches=batches, ...)`.)"
        )


def _look(fit: BoundFit, model: Any) -> tuple[dict[str, int], dict[str, Any]]:
    """The class plates of a model with their sizes, and its choices over class plates."""

    def around(model: Any) -> Any:
        model = only_read(at_feasible_values(model), is_choice=is_choice)
        return without_training_rows(model, is_choice=is_choice)

    def found() -> tuple[dict[str, int], dict[str, Any]]:
        sites = fit.sites(model, around=around)
        choices = {name: site for name, site in sites.items() if is_choice(site)}
        return (
            {name: sites[name]["args"][0] for name in class_plates(sites)},
            {name: base_distribution(site["fn"]) for name, site in choices.items()},
        )

    return static_result(found)


def _is_over(fit: BoundFit, model: Any, choice: ChoiceSite) -> bool:
    chunk = class_chunk(model, name=choice.plate, start=0, size=1)
    try:
        classes = _look(fit, chunk)[1][choice.site].classes
    except (TypeError, ValueError):  # rows that are read by id have no chunks
        return False
    return classes is not None and classes.kind == "chunk"
