# SPDX-License-Identifier: Apache-2.0
"""What may be wrong with a variational fit, in a table that says what to do about it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from numpyro_largecat._checks import check_in_range, why_not_taken
from numpyro_largecat.reading.bound_fit import BoundFit
from numpyro_largecat.reading.bound_gap import bound_gap
from numpyro_largecat.reading.choice_site import find_choice, has_choices
from numpyro_largecat.reading.convergence_findings import elbo_convergence, parameter_convergence
from numpyro_largecat.reading.findings import Diagnosis, Finding
from numpyro_largecat.reading.gradient_signal import gradient_signals
from numpyro_largecat.reading.learned_rows import learned_priors_of_classes
from numpyro_largecat.reading.observed_choice import observed_choice, observed_in_batches
from numpyro_largecat.reading.parts_check import check_on_batches, check_on_rows
from numpyro_largecat.reading.remedies import Remedies
from numpyro_largecat.reading.unfollowed_values import unfollowed_values
from numpyro_largecat.svi.array_batches import ArrayBatches
from numpyro_largecat.svi.convergence import Convergence
from numpyro_largecat.svi.importance_weighted_elbo import ImportanceWeighted_ELBO
from numpyro_largecat.svi.plan import Plan


class Training(NamedTuple):
    """What is known of how a fit came about."""

    losses: ArrayLike | None = None  # (steps,)
    iterates: Mapping[str, Any] = {}  # earlier values of some entries of each parameter
    plan: Plan | None = None
    state: Any = None  # the last one

    @property
    def convergence(self) -> Convergence:
        """Whether the fit still rises, falls or drifts."""
        return Convergence.of([] if self.losses is None else self.losses, self.iterates)

    @property
    def weighs_rows(self) -> bool:
        """Whether the loss is known to have weighed draws of rows."""
        return self.plan is not None and isinstance(self.plan.loss, ImportanceWeighted_ELBO)


def diagnose(
    fit: BoundFit,
    training: Training,
    rng_key: Array,
    batches: ArrayBatches | None,
    labels: ArrayLike | None,
    num_repeats: int,
    num_draws: int,
    num_rows: int,
) -> Diagnosis:
    """Each finding from a function of its own, see ``Reading.diagnose``.

    Of a fit that gets worse step by step nothing else is worth advice.
    """
    if batches is not None:
        _check_followed(fit, batches)
    batch = fit if batches is None else fit.followed_by(batches.draw(rng_key))
    keys = jax.random.split(rng_key, num_repeats)
    if not has_choices(batch) and (of_steps := _of_steps(batch, training, keys)):
        return Diagnosis(_advised(of_steps, training))
    choice = find_choice(batch)
    observed = observed_choice(batch, choice.site)
    findings = [*_of_steps(batch, training, keys), *bound_gap(batch, observed, keys)]
    everything = observed
    if batches is not None:
        everything = observed_in_batches(fit, batches, choice.site)
    if num_draws:
        if_unknown = "give more `num_rows`"
        if batches is None:
            parts = check_on_rows(rng_key, batch, observed, num_draws)
            if_unknown = "give `batches`, and more `num_rows`"
        else:
            parts = check_on_batches(
                rng_key, fit, everything, choice.num_categories, batches, num_draws, num_rows
            )
        if training.weighs_rows:
            parts = parts.of_weighted_rows()
        findings += parts.findings(if_unknown, Remedies.of(fit.guide))
    if labels is None:
        labels = np.asarray(everything.labels)[np.asarray(everything.rows.weights) > 0]
    labels = np.ravel(labels)
    check_in_range("`labels`", labels, choice.num_categories, "classes")
    findings += unfollowed_values(batch, choice.site, training.state)
    findings += _classes_seen(labels, choice.num_categories)
    findings += learned_priors_of_classes(batch, choice.plate, labels, choice.num_categories)
    return Diagnosis(_advised(findings, training))


def _advised(findings: list[Finding], training: Training) -> list[Finding]:
    """The findings; if the ELBO falls, without advice but the first, which is of that."""
    if not training.convergence.elbo_falls:
        return findings
    return [findings[0], *(finding._replace(advice="") for finding in findings[1:])]


def _of_steps(batch: BoundFit, training: Training, keys: Array) -> list[Finding]:
    """What the steps of the fit say, of whatever model."""
    convergence = training.convergence
    findings = [] if training.losses is None else [elbo_convergence(convergence)]
    still_rises = any(finding.advice for finding in findings)
    r_hats = parameter_convergence(convergence)
    findings += r_hats.values()
    if training.plan is not None and training.state is not None:
        drifting = {name for name, finding in r_hats.items() if finding.advice}
        drifting |= batch.params.keys() - r_hats.keys() if still_rises else set()
        findings += gradient_signals(batch, training.plan, training.state, drifting, keys)
    return findings


def _check_followed(fit: BoundFit, batches: ArrayBatches) -> None:
    """Refuse arguments that leave no room for the arrays of batches.

    Raises:
        TypeError: With the way to call it.
    """
    reason = why_not_taken(fit.model, *fit.args, *batches.batch(0), **fit.kwargs)
    if reason is not None:
        raise TypeError(
            "with `batches` only the arguments that are the same in each step of the fit belong in "
            "`fitted.on(...)`, most often none, since the arrays of a batch come after them: "
            f"`fitted.on().diagnose(batches=batches, ...)`; the model's signature says: {reason}."
        )


def _classes_seen(labels: np.ndarray, num_categories: int) -> list[Finding]:
    counts = np.bincount(labels)
    shares = counts[counts > 0] / counts.sum()
    effective = float(np.exp(-(shares * np.log(shares)).sum()))
    return [
        Finding(f"classes seen, of {num_categories}", float(len(shares))),
        Finding("classes seen, effectively", effective),
    ]
