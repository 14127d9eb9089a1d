# SPDX-License-Identifier: Apache-2.0
"""Plate over the classes of a categorical, of which a step holds a weighted subset."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from numpyro_largecat._checks import check_count, check_in_range, check_integers
from numpyro_largecat._conversions import as_ids
from numpyro_largecat.handlers.internals import given_values
from numpyro_largecat.handlers.plate_facts import PlateFacts
from numpyro_largecat.handlers.sites import is_latent
from numpyro_largecat.plates.choose_classes import choose_classes
from numpyro_largecat.plates.class_proposal import ClassProposal
from numpyro_largecat.plates.class_subset import ClassSubset, Negatives
from numpyro_largecat.plates.indexed_plate import indexed_plate
from numpyro_largecat.plates.read_classes import checked_reads


class class_plate(indexed_plate):
    r"""Plate over the K classes of a categorical, of which each step touches a weighted subset.

    The subset holds the distinct ``labels`` of the batch, U of them, each with weight 1, and
    ``num_sampled`` = S classes of the other K - U: one from each of S intervals of them, with the
    length of the interval as its weight, (K - U) / S rounded up or down. The intervals start at a
    random class in each step, so that all classes are equally likely and any two may come together.
    Given the labels, for any f,

    .. math:: E\Big[\sum_m \mathrm{weights}_m \, f(\mathrm{indices}_m)\Big] = \sum_{k=1}^{K} f(k),

    so likelihoods that sum over classes, and the prior and KL terms of everything inside the
    plate, are estimated without bias with one set of weights. (If fewer than S classes remain, all
    of them are taken, with weight 1.)

    Without ``labels`` the S classes are drawn from all K. Without ``num_sampled`` the plate is
    full: all K classes in order, weight 1, and likelihoods over it are exact.

    Predictions evaluate the plate of the choice, a full one too, on a few consecutive classes at a
    time: index tables by ``indices``, and let utilities depend on their own class's rows and on
    sites outside.

    **Read by id.** One table may be scored against and read, as the words of a history are by tied
    embeddings: with ``reads=history`` the plate also holds these classes, and
    ``words.rows_of(w, history)`` are their rows. Only read, a class is no alternative of the
    choice: utilities are those of ``words.scored(w)``, the rows without it. Its prior and KL terms
    have weight 1, and a drawn class stands for those that are not read, so the sums stay unbiased.
    (Users, who are no classes, belong in an ``entity_plate``.)

    **Other draws.** A ``proposal`` replaces the uniform draw: ``FrequencyProposal`` draws by
    frequency, ``HeadProposal`` always takes the most frequent classes, and an object of your own
    does as ``ClassProposal`` says. Labels have weight 1 all the same, and the sums stay unbiased.

    **Negatives.** By default, ``negatives="batch"``, the label of an observation is compared with
    all that the plate holds, so that labels of others are exact negatives, in one matrix product of
    B and B + S rows. With "shared" it is compared with the S drawn classes alone, which then come
    from all K, with weights of about K / S (those of a proposal), and 0 where one is the label
    itself: B (1 + S) pairs, so that a step takes less time, with somewhat more noise. Prior and KL
    terms have weight 1 for labels, and a drawn class stands for those that are not labels. With
    "own" each observation n has, as in the paper, its label and S classes of its own, drawn from
    the K - 1 others, with weights 1 and about (K - 1) / S in its likelihood; prior and KL terms
    take the mean over observations of these estimates. It costs most and has the highest variance;
    see ``python -m benchmarks.proposals``. For "shared" and "own" the model says what the utility
    of one pair is, ``classes.utilities(lambda x, w, b: x @ w + b, (x,), (w, b))``, which serves for
    all three. A guide that opens the plate itself needs the same ``negatives``.

    **What a row may depend on:** its own rows of other sites and parameters, and what is outside of
    the plate. A place or a sum over the plate is one over the classes of the step: for a reference
    class write ``jnp.where(classes.indices == 0, 0, b)``, not ``b.at[0].set(0)``.

    Shapes: the plate has M = min(B, K) + S rows, B the number of labels, and min(R, K) more for R
    ids that are read. Repeated labels leave padded rows, which have weight 0 and repeat a valid
    class; nothing is written to them. With a ``proposal`` S is the number of classes that it
    returns, H more for a head of H. With "own" negatives the plate has M = B (1 + S) rows, in
    which a class may be several times.

    Cost: O((S + B) log B) time and O(S + B) memory, whatever ``num_categories``, and as much
    for R as for B; a proposal says its own. With "own" negatives O(B S) time and O(B S) memory.

    Args:
        name: Name of the plate.
        num_categories: Number of classes K, a Python int in [2, 2**31).
        labels: Classes that must be present, integers in [0, K), any shape, (B,) with "shared" and
            "own" negatives: the labels of the minibatch. Under ``jit`` their values cannot be
            checked; a bad label then makes the log probability NaN. For a choice that is missing
            give any class, and mask it: ``numpyro.handlers.mask`` around the choice.
        num_sampled: Number of other classes S, a Python int in [1, K - 1] (K without labels).
        proposal: How to draw the other classes, an object with the method of ``ClassProposal``.
            None draws uniformly. Not used where ``num_sampled`` is left out.
        reads: Classes that are read by id, integers in [0, K), or -1 for none: an array, or a tuple
            of arrays, of any shapes. A guide that opens the plate itself needs them too.
        negatives: What the label of an observation is compared with: "batch", "shared" or "own".
        dim: Batch dimension of the plate, negative; the rightmost free one by default.

    Raises:
        TypeError: If ``labels`` are not integers, a count is not a Python int, or ``proposal`` has
            no method ``draw``.
        ValueError: If a count or a label is out of range, if the guide opened a plate of the same
            name that holds other rows, if "shared" or "own" negatives come with ``reads``, without
            labels or with labels of several axes, or "own" ones with a ``proposal``.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro
        >>> import numpyro_largecat as lc
        >>> labels = jnp.array([4, 2, 4])
        >>> with numpyro.handlers.seed(rng_seed=0):
        ...     with lc.class_plate("classes", 10**6, labels, num_sampled=2) as classes:
        ...         pass
        >>> classes.indices[:2].tolist(), classes.weights.tolist()
        ([2, 4], [1.0, 1.0, 0.0, 499999.0, 499999.0])

    References:
        Ruiz, Titsias, Dieng and Blei, Augment and Reduce, ICML 2018, section 2.1 ("reduce"),
        and Algorithm 1 ("own" negatives).
    """

    def __init__(
        self,
        name: str,
        num_categories: int,
        labels: ArrayLike | None = None,
        num_sampled: int | None = None,
        *,
        proposal: ClassProposal | None = None,
        reads: ArrayLike | Sequence[ArrayLike] | None = None,
        negatives: Negatives = "batch",
        dim: int | None = None,
    ) -> None:
        num_categories = check_count("num_categories", num_categories, 2)
        _check_layout(name, labels, proposal, reads, negatives)
        if labels is not None:
            _check_labels(name, labels, num_categories)
            labels = jnp.ravel(as_ids(labels))
        if reads is not None:
            reads = checked_reads(name, reads, num_categories)
        if num_sampled is not None:
            num_sampled = _check_num_sampled(num_sampled, num_categories, labels)
        self.classes, is_shared = choose_classes(
            name, num_categories, labels, num_sampled, proposal, reads, negatives
        )
        self._is_drawn = self.classes.kind == "sample"
        is_full = self.classes.kind == "full"
        facts = PlateFacts(
            "classes",
            is_full=is_full,
            row_weights=None if is_full else self.classes.row_weights,
            repeats=self.classes.negatives == "own",
            num_scored=self.classes.weights.shape[0],
            is_sampled=num_sampled is not None,
            labels=labels,
            reads=reads,
        )
        indices = self.classes.indices
        super().__init__(name, num_categories, indices, dim, is_shared=is_shared, facts=facts)

    def __enter__(self) -> ClassSubset:
        """Open the plate and return its ``ClassSubset``."""
        super().__enter__()
        return self.classes

    def postprocess_message(self, msg: dict[str, Any]) -> None:
        """Also refuse values of sites that are those of other rows."""
        super().postprocess_message(msg)
        if msg["type"] == "sample" and self._is_drawn:
            self._refuse_table(msg)
        if is_latent(msg):
            self._check_rows(msg)

    def _refuse_table(self, msg: dict[str, Any]) -> None:
        """Refuse values of all classes from a handler, also where there are as many rows."""
        axis = self.dim - msg["fn"].event_dim
        for shape in map(jnp.shape, given_values(msg["name"])):
            if len(shape) >= -axis and shape[axis] == self.size:
                raise ValueError(
                    f"site '{msg['name']}' inside plate '{self.name}' gets a value of shape "
                    f"{shape} from a handler, `condition`, `do` or `substitute`, that does not "
                    "know which classes a step holds. Open the plate in full, `num_sampled=None`; "
                    "to start a fit at values, give `init_params` by the names of the guide's "
                    f"parameters, such as '{msg['name']}_auto_loc'."
                )

    def _check_rows(self, msg: dict[str, Any]) -> None:
        """Refuse values from elsewhere, such as a guide's, of other classes than the plate's."""
        shape, axis = jnp.shape(msg["value"]), self.dim - msg["fn"].event_dim
        if len(shape) >= -axis and shape[axis] not in (1, self.subsample_size):
            raise ValueError(
                f"site '{msg['name']}' inside plate '{self.name}' must have the plate's "
                f"{self.subsample_size} rows at axis {axis}; got a value of shape {shape}, as "
                "from `init_to_value`, for which take `init_params`, from a guide, or from draws "
                "for a plate that holds other rows. An automatic guide "
                "keeps the number of rows of its training: predict with "
                "`lc.Fitted(...).on(x).top_classes()`. Or, for `numpyro.infer.Predictive`, and for "
                "`median`, `quantiles` and `sample_posterior` where the model has deterministic "
                "sites, make the guide of the model without `num_sampled` and run it once with "
                "labels, `numpyro.handlers.seed(full_guide, 0)(x, y)`: it takes the same `params`."
            )


def _check_layout(
    name: str,
    labels: ArrayLike | None,
    proposal: ClassProposal | None,
    reads: Any,
    negatives: str,
) -> None:
    if negatives not in get_args(Negatives):
        raise ValueError(
            f'`negatives` of plate \'{name}\' must be "batch", "shared" or "own"; got '
            f"{negatives!r}."
        )
    if proposal is not None and (isinstance(proposal, type) or not hasattr(proposal, "draw")):
        got = f"the class {proposal.__name__}" if isinstance(proposal, type) else type(proposal)
        raise TypeError(
            f"`proposal` of plate '{name}' must be an object with a method `draw`, such as "
            f"lc.FrequencyProposal(counts); got {got}."
        )
    if negatives == "own" and proposal is not None:
        raise ValueError(
            f"plate '{name}': with negatives=\"own\" classes are drawn uniformly; leave out "
            f"`proposal`, or share the classes; got {proposal!r}."
        )
    if negatives != "batch" and reads is not None:
        raise ValueError(
            f"plate '{name}': `reads` need negatives=\"batch\"; leave out `negatives`, or read "
            "from an entity plate with a table of its own."
        )
    if negatives != "batch" and labels is not None and np.ndim(labels) != 1:
        raise ValueError(
            f"`labels` of plate '{name}' must have shape (B,) with negatives=\"{negatives}\"; "
            f"got shape {np.shape(labels)}."
        )


def _check_labels(name: str, labels: ArrayLike, num_categories: int) -> None:
    """Refuse labels of plate ``name`` that are no classes; values under ``jit`` pass."""
    check_integers("labels", labels)
    check_in_range(f"`labels` of plate '{name}'", labels, num_categories, "classes")


def _check_num_sampled(num_sampled: int, num_categories: int, labels: ArrayLike | None) -> int:
    """Return the number of drawn classes as an int in range, or raise."""
    most = num_categories if labels is None else num_categories - 1
    besides = "" if labels is None else " besides a label"
    of_what = f"number of classes{besides}; leave it out to have them all"
    return check_count("num_sampled", num_sampled, 1, most, of_what)
