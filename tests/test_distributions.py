# SPDX-License-Identifier: Apache-2.0
"""What every distribution of the package must do: one line each in a table, and generic tests.

A distribution over a choice is a line of ``CHOICES``: how it is made, and its equation by NumPy. It
is evaluated on all of six classes and on a weighted subset of 50. Any other distribution is a line
of ``OTHERS``. What only one of them does is tested in the file of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax, logsumexp

import numpyro_largecat as lc
from numpyro_largecat.choices.error_families import FAMILIES
from tests import reference, reference_topics
from tests.choices.subsets import CHUNK, INDICES, SUBSET, WEIGHTS
from tests.slow_cases import slow_case

rng = np.random.default_rng(0)
UTILITIES = rng.normal(size=(3, 6)).astype(np.float32) * 2
LOCAL = np.array([0.5, 2.5, 1.5], np.float32)  # one number for each observation
VARIANCES = rng.exponential(size=(3, 6)).astype(np.float32)
SLOPE = np.array([0.0, -0.6, -1.0], np.float32)
MARKS = np.array([1, 1, 0, 1, 1, 0], bool)


class Choice(NamedTuple):
    """A distribution over K classes, on all of them and on a subset."""

    make: Callable[..., Any]  # of utilities (..., 6), classes, and what is in `local`
    reference: Callable[..., float]  # of utilities (6,), a row, weights (6,), and a row of `local`
    local: tuple[np.ndarray, ...] = ()  # arrays with one row for each observation
    far: tuple[np.ndarray, ...] = ()  # the same for six observations, at the limits
    on: tuple[str, ...] = ("all", "subset")
    unbiased: bool = True  # on a subset, given `local`
    draws: bool = False  # with all classes
    by_quadrature: bool = False  # the reference, on all classes: slow, and not to the last digit


def softmax_bound(psi, row, weights, u):
    return 1 - u - math.exp(-u) * reference.weighted_eta(psi, range(6), weights, row)


def logistic_bound(psi, row, weights, u):
    """With three Gauss-Laguerre nodes for the error."""
    nodes, node_weights = np.polynomial.laguerre.laggauss(3)
    error = -np.log(np.expm1(nodes * math.exp(-u)))
    log_cdfs = [-np.logaddexp(0, -(error + psi[row] - other)) for other in psi]
    terms = [w * node_weights @ part for w, part in zip(weights, log_cdfs, strict=True)]
    return 1 - u - math.exp(-u) + sum(terms) - terms[row]


def best_logistic(psi, row, weights):
    def loss(u):
        return -logistic_bound(psi, row, weights, u)

    return -minimize_scalar(loss, bounds=(0, 20), method="bounded", options={"xatol": 1e-9}).fun


def augmented(noise, psi, row, weights, error):
    others = np.delete(weights * reference.LOG_CDFS[noise](error + psi[row] - psi), row)
    return others.sum()


def gaussian_error(noise, psi, row, weights, loc):
    """E_q of the log joint at three Gauss-Hermite nodes, and the entropy of q = N(loc, 1/4)."""
    nodes, node_weights = np.polynomial.hermite_e.hermegauss(3)
    error = loc + 0.5 * nodes
    joint = [
        augmented(noise, psi, row, weights, e) + reference.LOG_DENSITIES[noise](e) for e in error
    ]
    return node_weights @ joint / node_weights.sum() + 0.5 * math.log(0.25 * 2 * math.pi * math.e)


def gaussian_eta(means, row, weights, variances, slope):
    """Sum of w_k E[exp(psi_k - psi_y - slope (psi_y - m_y))]."""
    exponents = means - means[row] + variances / 2 + (1 + slope) ** 2 * variances[row] / 2
    others = np.delete(weights * np.exp(exponents), row)
    return math.exp(slope**2 * variances[row] / 2) + others.sum()


def gaussian_utilities(means, row, weights, variances, slope, u):
    return 1 - u - math.exp(-u) * gaussian_eta(means, row, weights, variances, slope)


def some_together(psi, row, weights):
    """On a subset only classes of weight 1 are surely there."""
    return reference.one_vs_each(psi, row, weights, np.flatnonzero(MARKS & (weights == 1)))


def exact(noise, psi, row, weights):
    del weights
    return reference.choice_log_prob(psi, row, noise)


def stateless(psi, row, weights):
    return -math.log(reference.weighted_eta(psi, range(6), weights, row))


def bouchard(psi, row, weights, alpha):
    return reference.bouchard_bound(psi, row, alpha, weights)


def best_bouchard(psi, row, weights):
    return bouchard(psi, row, weights, reference.best_alpha(psi))


def contrastive(psi, row, weights, log_normalizer):
    noise = 3 / (6 if weights.max() == 1 else 50)
    return reference.noise_contrastive(psi, row, noise, log_normalizer, weights)


def make_categorical(noise, psi, classes, u=None):
    return lc.UtilityCategorical(psi, classes, noise, u=u)


def make_augmented(noise, psi, classes, error):
    return lc.AugmentedCategorical(psi, classes, noise, error=error)


def make_one_vs_each_together(psi, classes):
    return lc.bounds.OneVsEach(psi, classes, together=np.resize(MARKS, psi.shape[-1]))


def make_bouchard(psi, classes, alpha):
    return lc.bounds.Bouchard(psi, classes, alpha=alpha)


def make_gaussian_error(noise, psi, classes, loc):
    return lc.bounds.GaussianErrorBound(psi, classes, noise, loc=loc, scale=0.5)


def make_gaussian_utilities(psi, classes, variances, slope, u=None):
    return lc.bounds.GaussianUtilityBound(psi, variances, classes, slope=slope, u=u)


def make_contrastive(psi, classes, z):
    return lc.baselines.NoiseContrastive(psi, classes, num_noise=3, log_normalizer=z)


def best_gaussian_utilities(*arguments):
    return -math.log(gaussian_eta(*arguments))


FAR = np.array([-1e4, -5e3, 0.0, 5e3, 1e4, 1.0], np.float32)
FAR_MOMENTS = (np.full((6, 6), 1e4, np.float32), np.resize(SLOPE, 6))
ALL, SUBSET_ONLY = ("all",), ("subset",)
CHOICES = {
    "softmax": Choice(partial(make_categorical, "gumbel"), stateless, unbiased=False, draws=True),
    "softmax, u": Choice(
        partial(make_categorical, "gumbel"), softmax_bound, (LOCAL,), (FAR,), SUBSET_ONLY
    ),
    "logistic": Choice(
        partial(make_categorical, "logistic"),
        partial(exact, "logistic"),
        on=ALL,
        draws=True,
        by_quadrature=True,
    ),
    "logistic, u": Choice(
        partial(make_categorical, "logistic"), logistic_bound, (LOCAL,), (np.abs(FAR),), SUBSET_ONLY
    ),
    "logistic at the best": Choice(
        partial(make_categorical, "logistic"), best_logistic, on=SUBSET_ONLY, unbiased=False
    ),
    "probit": Choice(
        partial(make_categorical, "normal"),
        partial(exact, "normal"),
        on=ALL,
        draws=True,
        by_quadrature=True,
    ),
    "one-vs-each": Choice(lc.bounds.OneVsEach, reference.one_vs_each),
    "one-vs-each, together": Choice(make_one_vs_each_together, some_together, unbiased=False),
    "Bouchard": Choice(make_bouchard, bouchard, (LOCAL,), (FAR,)),
    "Bouchard at the best": Choice(lc.bounds.Bouchard, best_bouchard, on=ALL),
    "Gaussian utilities": Choice(
        make_gaussian_utilities,
        gaussian_utilities,
        (VARIANCES, SLOPE, LOCAL),
        (*FAR_MOMENTS, FAR),
        draws=True,
    ),
    "Gaussian utilities at the best": Choice(
        make_gaussian_utilities,
        best_gaussian_utilities,
        (VARIANCES, SLOPE),
        FAR_MOMENTS,
        unbiased=False,
        draws=True,
    ),
    "noise contrastive": Choice(make_contrastive, contrastive, (LOCAL,), (FAR,)),
}
for noise in FAMILIES:
    CHOICES[f"augmented {noise}"] = Choice(
        partial(make_augmented, noise), partial(augmented, noise), (LOCAL,), (0 * FAR,)
    )
    CHOICES[f"Gaussian error, {noise}"] = Choice(
        partial(make_gaussian_error, noise), partial(gaussian_error, noise), (LOCAL,), (0 * FAR,)
    )
MAY_OVERFLOW = ("augmented gumbel", "Gaussian error, gumbel")  # towards -inf, the right value


class Case(NamedTuple):
    """A distribution of batch shape (3,) as a function of arrays with three rows."""

    make: Callable[..., Any]
    arguments: tuple[np.ndarray, ...]
    values: np.ndarray  # one for each row
    expected: Callable[[], np.ndarray]  # log probabilities of `values`, in float64
    event_shape: tuple[int, ...] = ()
    draws: bool = True
    accuracy: float = 1e-12  # relative, of log probabilities in float64


ROWS = {"all": np.array([0, 5, 2]), "subset": np.array([1, 0, 1])}


def choice_case(choice: Choice, on: str) -> Case:
    """A choice with all classes, or on the subset."""
    classes, weights = (None, np.ones(6)) if on == "all" else (SUBSET, WEIGHTS)

    def expected():
        of_each = [np.float64(x) for x in choice.local]
        rows = zip(np.float64(UTILITIES), ROWS[on], *of_each, strict=True)
        return np.array([choice.reference(psi, row, weights, *own) for psi, row, *own in rows])

    return Case(
        lambda psi, *local: choice.make(psi, classes, *local),
        (UTILITIES, *choice.local),
        ROWS[on] if on == "all" else INDICES[ROWS[on]],
        expected,
        draws=choice.draws and on == "all",
        accuracy=1e-10 if choice.by_quadrature else 1e-12,
    )


STORED = np.array([[4, 0, 2], [5, 1, 3], [2, 3, 0]])  # outcomes of six
LOGITS = np.array([[0.3, -1.0, 2.0], [1.0, 0.0, -2.0], [0.0, 0.5, 0.1]], np.float32)
POINTS = np.array([0.3, -1.0, 2.0], np.float32)
TOPICS = np.log(rng.dirichlet(np.full(8, 0.3), size=(3, 4)) + 1e-3).astype(np.float32)
CONCENTRATION = np.full((3, 4), 0.3, np.float32)
DOCUMENTS = np.stack([rng.permutation(8)[:5] for _ in range(3)])
DOCUMENTS = np.stack([DOCUMENTS, rng.integers(0, 5, size=(3, 5))], axis=-1)


def best_two_of_the_mixture():
    log_weights = log_softmax(np.float64(UTILITIES), axis=1)
    log_weights += -0.5 * (POINTS[:, None] - np.float64(VARIANCES)) ** 2 - math.log(2 * math.pi) / 2
    return logsumexp(np.sort(log_weights, axis=1)[:, -2:], axis=1)


def document_bounds():
    bounds = []
    for topics, (words, counts), alpha in zip(
        np.float64(TOPICS), DOCUMENTS.transpose(0, 2, 1), np.float64(CONCENTRATION), strict=True
    ):
        solved = reference_topics.solve_document(
            topics.T[words], counts, alpha, num_active=4, num_sweeps=300
        )
        bounds.append(solved[2][-1])
    return np.array(bounds)


def make_document(topics, concentration):
    exact = {"max_sweeps": 2000, "tolerance": 1e-12, "num_restarts": 0}
    return lc.TopicDocument(topics, concentration, 4, **exact)


OTHERS = {
    "top L categorical": Case(
        lambda indices, logits: lc.TopLCategorical(indices, logits, 6),
        (STORED, LOGITS),
        np.array([2, 1, 0]),
        lambda: log_softmax(np.float64(LOGITS), axis=1)[np.arange(3), [2, 1, 2]],
    ),
    "top L mixture": Case(
        lambda w, loc: lc.TopLMixture(dist.Categorical(logits=w), dist.Normal(loc, 1.0), 2),
        (UTILITIES, VARIANCES),
        POINTS,
        best_two_of_the_mixture,
    ),
    "document": Case(make_document, (TOPICS, CONCENTRATION), DOCUMENTS, document_bounds, (1, 2)),
}
CASES = {
    f"{name}, {on}": choice_case(choice, on) for name, choice in CHOICES.items() for on in choice.on
} | OTHERS
cases = pytest.mark.parametrize("name", CASES)
# Six quadratures in one program take eight seconds to compile.
quadratures_slowly = pytest.mark.parametrize(
    "name",
    [slow_case(n) if n in ("logistic, all", "probit, all") else n for n in CASES],
)


# What NumPyro asks of a distribution.

MASK = np.array([True, False, True])


@cache
def found(name):
    """Log probabilities of one case, called in several ways, by one compiled program."""
    case = CASES[name]
    one = case.values[1].tolist() if case.values.ndim == 1 else case.values[1]  # a Python number

    @jax.jit
    def log_probs(arguments, values):
        d = case.make(*arguments)
        again = jax.tree.unflatten(jax.tree.structure(d), jax.tree.leaves(d))
        first = case.make(*(x[:1] for x in arguments))
        many = jax.vmap(case.make)(*arguments)
        twice = jnp.broadcast_to(values, (2, *values.shape))
        return {
            "pytree and mask": again.mask(MASK).log_prob(values),
            "vmap": jax.vmap(lambda d, value: d.log_prob(value))(many, values),
            "one value": d.log_prob(one),
            "values with more axes": d.log_prob(twice),
            "expand one row": first.expand((3,)).log_prob(values),
            "expand_by and to_event": d.expand_by((2,)).to_event(1).log_prob(twice),
        }

    arguments, values = (jax.tree.map(jnp.asarray, x) for x in (case.arguments, case.values))
    with jax.enable_x64(False):
        return log_probs(arguments, values)


EXPECTED = {  # NaN where `expected` does not say it
    "pytree and mask": lambda x: np.where(MASK, x, 0),
    "vmap": lambda x: x,
    "one value": lambda x: np.array([np.nan, x[1], np.nan]),
    "values with more axes": lambda x: np.broadcast_to(x, (2, 3)),
    "expand one row": lambda x: np.array([x[0], np.nan, np.nan]),
    "expand_by and to_event": lambda x: np.broadcast_to(x.sum(), 2),
}


@pytest.mark.smoke
@quadratures_slowly
@pytest.mark.some_cases(9)
def test_log_prob_is_the_equation_however_it_is_called(name):
    expected = CASES[name].expected()
    for way, of in EXPECTED.items():
        wanted, log_prob = of(expected), np.asarray(found(name)[way])
        assert log_prob.shape == wanted.shape, way
        is_known = ~np.isnan(wanted)
        np.testing.assert_allclose(log_prob[is_known], wanted[is_known], rtol=1e-5, err_msg=way)


@cases
@pytest.mark.some_cases(2)
def test_shapes_of_the_distribution_and_of_its_pytree(name):
    case = CASES[name]
    d = case.make(*case.arguments)
    assert (d.batch_shape, d.event_shape) == ((3,), case.event_shape)
    assert (d.expand((2, 3)).batch_shape, d.to_event(1).batch_shape) == ((2, 3), ())
    assert d.to_event(1).event_shape == (3, *case.event_shape)
    again = jax.tree.unflatten(jax.tree.structure(d), jax.tree.leaves(d))
    for what in ("batch_shape", "event_shape", *d.pytree_aux_fields):
        assert getattr(again, what) == getattr(d, what)
    np.testing.assert_allclose(d.log_prob(case.values), case.expected(), rtol=1e-5)  # not jitted


@cases
@pytest.mark.some_cases(8)
def test_gradient_in_float64_is_that_of_finite_differences(name, x64):
    case = CASES[name]
    random, size = np.random.default_rng(1), 1e-6
    is_float = [x.dtype == np.float32 for x in case.arguments]
    weights = random.uniform(0.5, 1, size=3)

    @jax.jit
    @partial(jax.value_and_grad, has_aux=True)
    def total(values):
        rest = iter(values)
        both = zip(is_float, case.arguments, strict=True)
        log_prob = case.make(*(next(rest) if f else x for f, x in both)).log_prob(case.values)
        return weights @ log_prob, log_prob

    arguments = [np.array(x, float) for x, f in zip(case.arguments, is_float, strict=True) if f]
    directions = [random.normal(size=x.shape) for x in arguments]
    (_, log_prob), gradient = total(arguments)
    moved = [
        total([a + s * size * d for a, d in zip(arguments, directions, strict=True)])[0][0]
        for s in (1, -1)
    ]
    slope = sum(np.vdot(g, d) for g, d in zip(gradient, directions, strict=True))
    difference = float(moved[0] - moved[1]) / (2 * size)
    assert log_prob.dtype == jnp.float64
    np.testing.assert_allclose(log_prob, case.expected(), rtol=case.accuracy)
    np.testing.assert_allclose(slope, difference, rtol=1e-6, atol=1e-8)


@cases
def test_draws_have_the_shape_of_the_batch_or_are_refused(name):
    case = CASES[name]
    d, key = case.make(*case.arguments), jax.random.key(0)
    if case.draws:
        draws = jax.jit(lambda d, key: d.sample(key, (2,)))(d, key)
        assert draws.shape[:2] == (2, 3)
        assert len(draws.shape) == 2 + len(case.event_shape)
        assert not np.isnan(draws).any()
    else:
        with pytest.raises(NotImplementedError):
            d.sample(key)


# What is asked of a distribution over a choice.

PAIRS = {f"{name}, {on}": (choice, on) for name, choice in CHOICES.items() for on in choice.on}
QUICK = {id: pair for id, pair in PAIRS.items() if not pair[0].by_quadrature}
on_each = pytest.mark.parametrize(("choice", "on"), PAIRS.values(), ids=PAIRS)
on_each_quick = pytest.mark.parametrize(("choice", "on"), QUICK.values(), ids=QUICK)


def of_rows(choice, rows):
    """The rows of what is local to each observation."""
    return [jnp.asarray(x)[jnp.array(rows)] for x in choice.local]


@on_each
def test_bad_input_is_refused(choice, on):
    classes = None if on == "all" else SUBSET
    make = partial(choice.make, UTILITIES)
    with pytest.raises(TypeError, match="`classes` must be what `with lc"):
        make(jnp.arange(6), *choice.local)
    d = make(classes, *choice.local)
    with pytest.raises(ValueError, match=rf"`value` must be classes.*got {d.num_categories} at"):
        d.log_prob(np.array([0, d.num_categories, 1]))
    with pytest.raises(ValueError, match=r"`value` must be classes.*got -2 at position 2"):
        d.log_prob(np.array([0, 1, -2]))
    with pytest.raises(TypeError, match="`value` must be integers; got dtype float"):
        d.log_prob(np.zeros(3))
    if on == "subset":
        narrow = [x[:, :5] if x.ndim == 2 else x for x in choice.local]
        match = r"\(\.\.\., 6\), one column for each row of the class plate; got shape \(3, 5"
        with pytest.raises(ValueError, match=match):
            choice.make(UTILITIES[:, :5], SUBSET, *narrow)
    else:
        with pytest.raises(NotImplementedError, match=r"log_prob needs all classes.*holds some"):
            make(CHUNK, *choice.local).log_prob(np.array([0, 1, 2]))
        narrow = [x[:, :1] if x.ndim == 2 else x for x in choice.local]
        with pytest.raises(ValueError, match=r"K at least 2.*got shape \(3, 1\)"):
            choice.make(np.zeros((3, 1)), None, *narrow)


@on_each
def test_local_arrays_of_another_shape_are_refused(choice, on):
    for i, own in enumerate(choice.local):
        wrong = [*choice.local[:i], own[:2], *choice.local[i + 1 :]]
        with pytest.raises(
            ValueError, match=r"must have a shape that broadcasts|`variances` must broadcast"
        ):
            choice.make(UTILITIES, None if on == "all" else SUBSET, *wrong)


@on_each
@pytest.mark.some_cases(4)
def test_bad_values_under_jit_are_nan(choice, on):
    """Values that are no classes, and on a subset classes that are no labels, also drawn ones."""
    case = choice_case(choice, on)
    bad = [-1, 6, 99] if on == "all" else [-1, 50, 2, 8, 49]
    values = np.array([case.values, *np.broadcast_to(np.array(bad)[:, None], (len(bad), 3))])
    log_prob = jax.jit(lambda args, values: case.make(*args).log_prob(values))
    is_nan = np.isnan(log_prob(case.arguments, values))
    assert not is_nan[0].any()
    assert is_nan[1:].all()


@pytest.mark.parametrize("dtype", ["float32", slow_case("float64")])
@on_each_quick
@pytest.mark.some_cases(8)
def test_huge_utilities_give_finite_values_and_gradients(choice, on, dtype):
    """Utilities in [-1e4, 1e4], of 10**5 classes where all are there, far from what is kept."""
    psi = np.array([[1e4, -1e4, 0, 1e4, 1e4, -1e4], [-1e4, 1e4, 1e4, -1e4, 0, 0]])
    psi = np.concatenate([psi, -psi, np.full((2, 6), 1e4)])
    case = choice_case(choice, on)

    def total(arguments):
        if on == "all":
            arguments = [jnp.tile(x, 10**5 // 6) if x.ndim == 2 else x for x in arguments]
        log_prob = case.make(*arguments).log_prob(jnp.array(case.values)[:2, None])
        return log_prob.sum(), log_prob

    with jax.enable_x64(dtype == "float64"):
        arguments = [jnp.array(x, dtype) for x in (psi, *choice.far)]
        (_, log_prob), gradients = jax.jit(jax.value_and_grad(total, has_aux=True))(arguments)
    assert log_prob.dtype == dtype
    if choice in (CHOICES[name] for name in MAY_OVERFLOW):
        assert not jnp.isnan(log_prob).any()
    else:
        assert jnp.isfinite(log_prob).all()
        assert all(jnp.isfinite(gradient).all() for gradient in gradients)


@on_each_quick
@pytest.mark.some_cases(8)
def test_classes_that_are_not_available(choice, on):
    """They change nothing but the value of their own choice, -inf, which moves no array."""
    rows = ROWS[on]
    weights = np.ones(6) if on == "all" else WEIGHTS
    psi = np.concatenate([UTILITIES, np.full((1, 6), -np.inf, np.float32)])
    psi[:, 4] = -np.inf  # another class
    psi[2, rows[2]] = -np.inf  # the chosen class
    values = choice_case(choice, on).values[[0, 1, 2, 0]]

    @jax.jit
    def with_gradients(*arguments):
        def log_prob(psi, *local):
            return choice.make(psi, None if on == "all" else SUBSET, *local).log_prob(values)

        value, pull_back = jax.vjp(log_prob, *arguments)
        return value, pull_back(jnp.ones(4))

    value, gradients = with_gradients(jnp.asarray(psi), *of_rows(choice, [0, 1, 2, 0]))
    is_there = np.arange(6) != 4
    far = np.where(is_there, UTILITIES, -500.0)
    expected = [
        choice.reference(
            far[n], rows[n], weights * is_there, *(np.float64(x[n]) for x in choice.local)
        )
        for n in range(2)
    ]
    np.testing.assert_allclose(value, [*expected, -np.inf, -np.inf], rtol=1e-5)
    for gradient in gradients:
        assert jnp.isfinite(gradient).all()
        assert (gradient[2:] == 0).all()
        if gradient.ndim == 2:  # of each class
            assert (gradient[:2, 4] == 0).all()


LABELS = np.array([4, 1, 4])
TABLE = np.random.default_rng(1).normal(size=9) * 2  # utilities of nine classes
UNBIASED = {n: c for n, c in CHOICES.items() if c.unbiased and "subset" in c.on}


@pytest.mark.parametrize("choice", UNBIASED.values(), ids=UNBIASED)
@pytest.mark.some_cases(3)
def test_mean_over_every_subset_is_the_value_on_all_classes_and_its_gradient(choice, x64):
    """Over all that a class plate may draw: of value, and of its gradient in all that is given."""
    of_classes = [x.ndim == 2 for x in choice.local]
    table = [jnp.array(TABLE)]
    table += [jnp.array(np.resize(x[0], 9), float) for x in choice.local if x.ndim == 2]
    own = [jnp.array(x, float) for x in choice.local if x.ndim == 1]

    def total(arguments, indices, weights, distinct):
        table, own = arguments
        psi, *tables = (jnp.broadcast_to(x[indices], (3, len(indices))) for x in table)
        tables, rest = iter(tables), iter(own)
        local = [next(tables) if of_class else next(rest) for of_class in of_classes]
        classes = lc.plates.ClassSubset(indices, weights, distinct, 9, "sample")
        return choice.make(psi, classes, *local).log_prob(jnp.array(LABELS)).sum()

    @jax.jit
    def mean(indices, weights, distinct):
        """Of subsets, one in each row."""
        values, gradients = jax.vmap(jax.value_and_grad(total), (None, 0, 0, None))(
            (table, own), indices, weights, distinct
        )
        leaves = [x.mean(axis=0).ravel() for x in (values, *jax.tree.leaves(gradients))]
        return jnp.concatenate(leaves)

    everything = jnp.arange(9)[None]  # all are labels, so that nothing is drawn
    full = mean(everything, jnp.ones((1, 9)), everything[0])
    for num_sampled in (1, 3):
        subsets = list(reference.weighted_subsets(LABELS, 9, num_sampled))
        indices, weights = (jnp.array(part) for part in zip(*subsets, strict=True))
        distinct = jnp.array([1, 4])
        np.testing.assert_allclose(mean(indices, weights, distinct), full, rtol=1e-11, atol=1e-11)


# A correct program fails the next test, in about 100 comparisons with means of draws, each at 5.5
# standard errors, with probability below this.
STANDARD_ERRORS = 5.5
FALSE_ALARM = 1e-5
PLATES = [([1, 4], 2), ([3], 1), ([0, 2], 4)]  # labels, and how many of the others of six are drawn


@pytest.mark.slow  # over every subset it is tested exactly, above
@pytest.mark.parametrize("name", [n for n in UNBIASED if n.startswith(("Bouchard", "Gaussian e"))])
def test_mean_over_draws_of_a_class_plate_is_the_value_on_all_classes_and_its_gradient(name, x64):
    def value_and_gradient(labels, classes):
        def total(table, own):
            psi = table if classes is None else table[classes.indices]
            psi = jnp.broadcast_to(psi, (len(labels), *psi.shape))
            return CHOICES[name].make(psi, classes, own).log_prob(labels).sum()

        arguments = jnp.array(TABLE[:6]), jnp.array(LOCAL[: len(labels)], float)
        value, gradients = jax.value_and_grad(total, (0, 1))(*arguments)
        return jnp.concatenate([value[None], *gradients])

    def of_draw(rng_key):
        found = []
        for labels, num_sampled in PLATES:
            with handlers.seed(rng_seed=rng_key):
                classes = lc.class_plate("classes", 6, jnp.array(labels), num_sampled).classes
            found.append(value_and_gradient(jnp.array(labels), classes))
        return jnp.concatenate(found)

    @jax.jit
    def program(keys):
        full = [value_and_gradient(jnp.array(labels), None) for labels, _ in PLATES]
        return jax.vmap(of_draw)(keys), jnp.concatenate(full)

    draws, full = map(np.asarray, program(jax.random.split(jax.random.key(0), 4000)))
    error = draws.std(axis=0, ddof=1) / math.sqrt(len(draws))
    assert (error > 0).sum() > 10  # where not all classes are drawn
    assert (np.abs(draws.mean(axis=0) - full) <= STANDARD_ERRORS * error + 1e-9).all()
