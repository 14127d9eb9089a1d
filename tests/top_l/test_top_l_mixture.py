# SPDX-License-Identifier: Apache-2.0
"""An L-sparse mixture is the dense one over the L best components of each observation."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from jax.test_util import check_grads
from numpyro.distributions import transforms
from scipy.special import expit, softmax
from scipy.stats import chisquare, multivariate_normal, norm

import numpyro_largecat as lc
from numpyro_largecat.top_l import component_weights
from tests import reference_top_l as reference

FALSE_ALARM = 1e-5
N, K, D = 12, 5, 3
FIRST_SEED = 4
rng = np.random.default_rng(FIRST_SEED - 1)


def normal(*shape):
    return rng.normal(size=shape).astype(np.float32)


def positive(*shape):
    return np.exp(normal(*shape) / 2)


def factor(*shape):
    return np.tril(normal(*shape, D, D) / 2, -1) + np.eye(D, dtype="f4") * positive(*shape, D, 1)


def covariance(*shape):
    root = factor(*shape)
    return root @ root.swapaxes(-1, -2)


COUNTS = rng.poisson(2, N).astype(np.int32)
BITS = rng.integers(2, size=(N, D), dtype=np.int32)
CODES = rng.integers(4, size=N, dtype=np.int32)
WORDS = rng.multinomial(6, np.ones(4) / 4, size=N).astype(np.int32)
POSITIVE, POINTS, SHARE = positive(N), normal(N, D), expit(normal(N))


LOGITS = np.array([0.3, -1.0, 0.5, 0.0, 0.8], np.float32)


class Case(NamedTuple):
    """Components, and observations (N, ...)."""

    components: dist.Distribution
    values: Any
    mixing: dist.Distribution = dist.Categorical(logits=LOGITS)


FAMILIES = {
    "normal": lambda: Case(dist.Normal(normal(K), positive(K)), normal(N)),
    "one scale": lambda: Case(dist.Normal(normal(K), 1.5), normal(N)),
    "all alike": lambda: Case(dist.Normal(0.5, 1.5).expand([K]), normal(N)),
    "diagonal": lambda: Case(dist.Normal(normal(K, D), positive(K, 1)).to_event(1), POINTS),
    "expanded": lambda: Case(dist.Normal(normal(K, 1), 2.0).expand([K, D]).to_event(1), POINTS),
    "event parameters": lambda: Case(
        dist.Normal(normal(D), 2.0).expand([K, D]).to_event(1), POINTS
    ),
    "covariance": lambda: Case(dist.MultivariateNormal(normal(K, D), covariance(K)), POINTS),
    "zero mean": lambda: Case(dist.MultivariateNormal(jnp.zeros((K, D)), covariance(K)), POINTS),
    "one covariance": lambda: Case(
        dist.MultivariateNormal(normal(K, D), scale_tril=factor()), POINTS
    ),
    "regressions": lambda: Case(dist.Normal(normal(N, K), positive(K)), normal(N)),
    "regressions with covariances": lambda: Case(
        dist.MultivariateNormal(normal(N, K, D), scale_tril=factor(K)), POINTS
    ),
    "own covariances": lambda: Case(
        dist.MultivariateNormal(normal(N, K, D), scale_tril=factor(N, K)), POINTS
    ),
    "low rank": lambda: Case(
        dist.LowRankMultivariateNormal(normal(K, D), normal(K, D, 2), positive(K, D)), POINTS
    ),
    "heavy tails": lambda: Case(dist.MultivariateStudentT(4.0, normal(K, D), factor(K)), POINTS),
    "poisson": lambda: Case(dist.Poisson(positive(K)), COUNTS),
    "bernoulli": lambda: Case(dist.Bernoulli(logits=normal(K, D)).to_event(1), BITS),
    "beta": lambda: Case(dist.Beta(positive(K), positive(K)), SHARE),
    "negative binomial": lambda: Case(dist.NegativeBinomial2(positive(K), positive(K)), COUNTS),
    "zero inflated": lambda: Case(dist.ZeroInflatedPoisson(expit(normal(K)), positive(K)), COUNTS),
    "categorical": lambda: Case(dist.Categorical(logits=normal(K, 4)), CODES),
    "multinomial": lambda: Case(dist.Multinomial(6, logits=normal(K, 4)), WORDS),
    "log normal": lambda: Case(dist.LogNormal(normal(K), positive(K)), POSITIVE),
    "transforms": lambda: Case(
        dist.TransformedDistribution(
            dist.Normal(normal(K, D), 1.0),
            [transforms.AffineTransform(normal(K, D), positive(K, 1)), transforms.ExpTransform()],
        ).to_event(1),
        np.exp(POINTS),
    ),
    "affine map of a vector": lambda: Case(
        dist.TransformedDistribution(
            dist.Normal(0.0, 1.0).expand([D]).to_event(1),
            transforms.LowerCholeskyAffine(normal(K, D), factor()),
        ),
        POINTS,
    ),
    "masked": lambda: Case(
        dist.Normal(normal(K, D), 1.0).mask(np.arange(D) != 1).to_event(1), POINTS
    ),
    "groups": lambda: Case(dist.Normal(normal(4, K), positive(K)), normal(3, 4)),
    "own weights": lambda: Case(
        dist.Normal(normal(K), 1.0), normal(N), dist.Categorical(logits=normal(N, K))
    ),
    "probabilities": lambda: Case(
        dist.Normal(normal(K), 1.0),
        normal(N),
        dist.Categorical(probs=np.full(K, 1 / K, np.float32)),
    ),
}


def family(name):
    """Made where a test asks for it: NumPyro's checks of its parameters are compiled."""
    global rng
    rng = np.random.default_rng(FIRST_SEED + list(FAMILIES).index(name))
    return FAMILIES[name]()


def dense_weights(mixing, components, values):
    """Log weights (..., K) through NumPyro's log_prob of all components."""
    values = jnp.expand_dims(values, jnp.ndim(values) - components.event_dim)
    return jax.nn.log_softmax(mixing.logits) + components.log_prob(values)


def dense_bound(mixing, components, values, num_active):
    best = jax.lax.top_k(dense_weights(mixing, components, values), num_active)[0]
    return jax.nn.logsumexp(best, axis=-1)


def sparse_bound(mixing, components, values, num_active):
    return lc.TopLMixture(mixing, components, num_active).log_prob(values)


@jax.jit(static_argnums=(1, 2))
def slopes(case, bound, num_active):
    """Bound, and slopes in all floats of the mixing weights, the components and the values."""
    leaves, tree = jax.tree.flatten(case)
    leaves = [jnp.asarray(leaf) for leaf in leaves]
    floats = [jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves]

    def total(values):
        rest = iter(values)
        new = [next(rest) if f else leaf for f, leaf in zip(floats, leaves, strict=True)]
        components, data, mixing = jax.tree.unflatten(tree, new)
        value = bound(mixing, components, data, num_active)
        return value.sum(), value

    chosen = [leaf for f, leaf in zip(floats, leaves, strict=True) if f]
    (_, value), slope = jax.value_and_grad(total, has_aux=True)(chosen)
    return value, slope


def check_against_dense(case, num_active, bound=sparse_bound):
    value, slope = slopes(case, bound, num_active)
    expected, expected_slope = slopes(case, dense_bound, num_active)
    np.testing.assert_allclose(value, expected, rtol=2e-5, atol=1e-5)
    for found, wanted in zip(slope, expected_slope, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.some_cases(9)
def test_bound_and_gradients_are_those_of_the_best_components(name):
    """Through NumPyro's log_prob of all components, differentiated whole."""
    check_against_dense(family(name), 2)


@pytest.mark.smoke
@pytest.mark.parametrize("name", ["covariance", "poisson", "regressions", "own weights", "beta"])
@pytest.mark.some_cases(2)
def test_all_components_are_the_dense_mixture(name):
    """L = K is NumPyro's MixtureSameFamily, in value and gradients."""

    def dense(mixing, components, values, num_active):
        del num_active
        return dist.MixtureSameFamily(mixing, components).log_prob(values)

    case = family(name)
    value, slope = slopes(case, sparse_bound, K)
    expected, expected_slope = slopes(case, dense, K)
    np.testing.assert_allclose(value, expected, rtol=2e-5)
    for found, wanted in zip(slope, expected_slope, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize(
    "name", ["covariance", "one covariance", "regressions with covariances", "groups", "transforms"]
)
@pytest.mark.slow
def test_large_parameters_are_gathered_by_blocks(name, monkeypatch):
    """Of observations that share a component; here vectors, or matrices, are large."""
    components, values, mixing = family(name)
    large = D * D if name == "regressions with covariances" else 1
    monkeypatch.setattr(component_weights, "MATRIX_ENTRIES", large)
    if name not in ("regressions with covariances", "groups"):
        values = jnp.concatenate([values + 0.1 * i for i in range(4)])  # 19 pairs for a component
    blocks = []
    by_blocks = component_weights.ComponentWeights._by_blocks
    monkeypatch.setattr(
        component_weights.ComponentWeights,
        "_by_blocks",
        lambda *args: blocks.append(args[-1]) or by_blocks(*args),
    )

    def bound(*args):
        return sparse_bound(*args)

    check_against_dense(Case(components, values, mixing), 2, bound)
    assert bool(blocks) == (name != "groups")


@pytest.mark.parametrize("name", ["covariance", "regressions", "groups", "own weights"])
@pytest.mark.parametrize("num_active", [2, K])
@pytest.mark.some_cases(2)
def test_chunks_of_observations_change_nothing(name, num_active, monkeypatch):
    """Chunks of five observations, of which the last is not full."""
    case = family(name)
    event = max(1, int(np.prod(case.components.event_shape)))
    monkeypatch.setattr(component_weights, "MAX_ENTRIES", 5 * num_active * event)

    def bound(*args):
        return sparse_bound(*args)

    check_against_dense(case, num_active, bound)


def test_bound_by_brute_force(x64):
    """Over every set of L components, through SciPy's densities."""
    own = family("covariance").components
    # So near that each component weighs more than rounding.
    means, points = (np.asarray(x, np.float64) / 4 for x in (own.loc, POINTS))
    roots = np.asarray(own.scale_tril, np.float64)
    log_prior = np.log(np.array([0.1, 0.3, 0.2, 0.15, 0.25]))
    log_densities = np.array(
        [
            multivariate_normal(mean, root @ root.T).logpdf(points)
            for mean, root in zip(means, roots, strict=True)
        ]
    ).T
    components = dist.MultivariateNormal(means, scale_tril=roots)
    mixing, bounds = dist.Categorical(logits=log_prior), []
    for num_active in range(1, K + 1):
        bound = jax.jit(lc.TopLMixture(mixing, components, num_active).log_prob)
        expected = reference.mixture_bound(log_prior, log_densities, num_active)
        bounds.append(np.asarray(bound(points)))
        np.testing.assert_allclose(bounds[-1], expected, rtol=1e-10)
    assert (np.diff(bounds, axis=0) >= 0).all()


def test_parameters_of_numpy_are_gathered_under_jit():
    """A mixture that a compiled function closes over: NumPy cannot be indexed by what is traced."""
    loc, values = np.arange(K, dtype=np.float32), POINTS[:, 0]
    mixture = lc.TopLMixture(dist.Categorical(logits=LOGITS), dist.Normal(loc, 1.0), 2)
    log_weights = np.log(softmax(LOGITS)) + norm.logpdf(values[:, None], loc)
    best = np.sort(log_weights)[:, -2:]
    np.testing.assert_allclose(jax.jit(mixture.log_prob)(values), np.logaddexp(*best.T), rtol=1e-5)


def test_responsibilities_are_the_best_sparse_posterior(x64):
    case = family("regressions")
    weights = np.asarray(
        jax.jit(dense_weights)(case.mixing, case.components, case.values), np.float64
    )
    mixture = lc.TopLMixture(case.mixing, case.components, 3)
    found = jax.jit(lambda m, x: m.responsibilities(x))(mixture, case.values)
    assert found.batch_shape == (N,)
    for n in range(N):
        expected = reference.best_sparse(weights[n], 3)[0]
        found_dense = np.zeros(K)
        found_dense[found.indices[n]] = found.probs[n]
        np.testing.assert_allclose(found_dense, expected, atol=1e-6)


def test_responsibilities_are_the_derivative_in_the_log_weights():
    """So that a step on the mixing weights is a step of EM."""
    components, values, _ = family("diagonal")

    @jax.jit
    @partial(jax.grad, has_aux=True)
    def found(logits, components):
        mixture = lc.TopLMixture(dist.Categorical(logits=logits), components, 2)
        return mixture.log_prob(values).sum(), mixture.responsibilities(values)

    gradient, posterior = found(LOGITS, components)
    counts = np.zeros(K)
    np.add.at(counts, np.asarray(posterior.indices), np.asarray(posterior.probs))
    expected = counts - N * softmax(LOGITS)
    np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_double_precision(x64):
    own = family("covariance").components
    components = dist.MultivariateNormal(
        np.asarray(own.loc, np.float64), scale_tril=np.asarray(own.scale_tril, np.float64)
    )
    mixing = dist.Categorical(logits=np.zeros(K))

    def total(loc, points):
        components.loc = loc
        return lc.TopLMixture(mixing, components, 2).log_prob(points).sum()

    arguments = jnp.asarray(components.loc), jnp.asarray(POINTS, jnp.float64)
    check_grads(jax.jit(total), arguments, order=1, modes=["rev", "fwd"], rtol=1e-6)
    assert total(*arguments).dtype == jnp.float64


@pytest.mark.parametrize(
    "mixing",
    [
        lambda probs: dist.Categorical(probs=probs),
        lambda probs: dist.CategoricalLogits(jnp.log(probs), validate_args=False),
    ],
    ids=["probs", "logits"],
)
@pytest.mark.some_cases(1)
def test_weights_of_zero(mixing):
    """With fewer components of positive weight than are kept."""
    loc, values = np.linspace(-1, 1, K, dtype="f4"), POINTS[:, 0]
    probs = np.array([0.25, 0.0, 0.0, 0.0, 0.75], np.float32)

    @jax.jit
    @jax.value_and_grad
    def total(loc):
        return lc.TopLMixture(mixing(probs), dist.Normal(loc, 1.0), 3).log_prob(values).sum()

    value, slope = total(loc)
    densities = norm(loc[[0, 4]], 1).pdf(values[:, None])
    np.testing.assert_allclose(value, np.log(densities @ probs[[0, 4]]).sum(), rtol=1e-5)
    assert np.isfinite(slope).all()


# What else a MixtureSameFamily does.


@pytest.mark.parametrize(
    "name", ["diagonal", "covariance", "poisson", "beta", "own weights", "groups", "multinomial"]
)
@pytest.mark.some_cases(2)
def test_draws_have_the_mean_of_the_mixture(name):
    """5.5 standard errors; at most 20 means each, so a correct sampler fails below FALSE_ALARM."""
    case = family(name)
    mixture = lc.TopLMixture(case.mixing, case.components, 2)
    draws = np.asarray(jax.jit(lambda m, key: m.sample(key, (3000,)))(mixture, jax.random.key(5)))
    assert draws.shape == (3000, *mixture.batch_shape, *mixture.event_shape)
    error = draws.std(0) / np.sqrt(3000)
    assert (np.abs(draws.mean(0) - mixture.mean) < 5.5 * error).all()


def test_draws_come_from_their_components(monkeypatch):
    """Also in chunks. A correct sampler fails with probability FALSE_ALARM."""
    monkeypatch.setattr(component_weights, "MAX_ENTRIES", 700)
    probs = np.array([0.1, 0.5, 0.15, 0.25])
    components = dist.Normal(100 * np.arange(4, dtype="f4"), 1.0)
    mixture = lc.TopLMixture(dist.Categorical(probs=probs), components, 1)
    draw = jax.jit(lambda m, key: m.sample_with_intermediates(key, (3000,)))
    draws, chosen = map(np.asarray, jax.tree.leaves(draw(mixture, jax.random.key(0))))
    np.testing.assert_array_equal(np.round(draws / 100), chosen)
    assert chisquare(np.bincount(chosen), 3000 * probs).pvalue > FALSE_ALARM / 2
    residuals = draws - 100 * chosen
    assert len(np.unique(residuals)) > 2900  # chunks do not repeat their draws
    assert abs(residuals.var() - 1) < 4.5 * np.sqrt(2 / 3000)  # 7e-6 for a standard normal


def test_it_is_a_mixture_of_numpyro():
    case = family("covariance")
    sparse = lc.TopLMixture(case.mixing, case.components, 2)
    dense = dist.MixtureSameFamily(case.mixing, case.components)
    assert isinstance(sparse, dist.MixtureSameFamily)
    assert (sparse.batch_shape, sparse.event_shape) == ((), (D,))
    assert sparse.mixture_size == K
    assert sparse.mixing_distribution is case.mixing
    assert sparse.component_distribution is case.components
    assert sparse.support.event_dim == 1
    assert not sparse.is_discrete

    def read(mixture):
        return mixture.mean, mixture.variance, mixture.component_log_probs(POINTS)

    (found, expected) = jax.jit(lambda ms: [read(m) for m in ms])((sparse, dense))
    for own, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(own, wanted, rtol=1e-6)


@pytest.mark.slow
def test_jit_vmap_expand_mask_and_pytree_round_trip():
    case = family("diagonal")
    mixture = lc.TopLMixture(case.mixing, case.components, 2)
    expected = jax.jit(dense_bound, static_argnums=3)(case.mixing, case.components, POINTS, 2)
    leaves, tree = jax.tree.flatten(mixture)
    again = jax.tree.unflatten(tree, map(jnp.asarray, leaves))
    assert again.num_active == 2
    one_by_one = jax.jit(jax.vmap(lambda m, x: m.log_prob(x), in_axes=(None, 0)))(again, POINTS)
    np.testing.assert_allclose(one_by_one, expected, rtol=1e-5)
    _, in_scan = jax.lax.scan(lambda c, x: (c, again.log_prob(x)), 0, POINTS.reshape(4, 3, D))
    np.testing.assert_allclose(in_scan.reshape(-1), expected, rtol=1e-5)
    many = mixture.expand((2, N)).log_prob(POINTS)
    np.testing.assert_allclose(many, [expected, expected], rtol=1e-5)
    mask = np.arange(N) % 2 == 0
    holes = jnp.where(mask[:, None], POINTS, jnp.nan)  # what is masked is not looked at
    found = mixture.mask(mask).log_prob(holes)
    np.testing.assert_allclose(found, jnp.where(mask, expected, 0), rtol=1e-5)


def test_values_outside_the_support_have_density_zero():
    case = family("poisson")
    mixture = lc.TopLMixture(case.mixing, case.components, 2, validate_args=True)
    with pytest.warns(UserWarning, match="Out-of-support"):
        assert mixture.log_prob(-1) == -np.inf


@pytest.mark.parametrize("num_active", [2, K])
@pytest.mark.some_cases(1)
def test_no_observation_at_all(num_active):
    """As in MixtureSameFamily: results of length zero, with large parameters too."""
    one = dist.Normal(np.zeros(K, "f4"), 1.0)
    large = dist.MultivariateNormal(np.zeros((K, 20), "f4"), scale_tril=np.eye(20, dtype="f4"))
    for components, event in ((one, ()), (large, (20,))):
        # NumPyro's own check of vectors fails where there are none.
        mixture = lc.TopLMixture(
            dist.Categorical(logits=LOGITS), components, num_active, validate_args=False
        )
        none = np.zeros((0, *event), np.float32)
        assert mixture.log_prob(none).shape == (0,)
        responsibilities, draws = jax.jit(
            lambda m, x: (m.responsibilities(x), m.sample(jax.random.key(0), (0,)))
        )(mixture, none)
        assert responsibilities.probs.shape == (0, num_active)
        assert draws.shape == (0, *event)


ZEROS = np.zeros((3, 3), np.float32)
MIXING = dist.Categorical(logits=ZEROS[0])
THREE = dist.Normal(ZEROS[0], 1.0)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((MIXING, THREE, 0), ValueError, "`num_active` must be at least 1; got 0"),
        ((MIXING, THREE, 4), ValueError, "at most 3, the number of components; got 4"),
        ((MIXING, THREE, 2.0), TypeError, "`num_active` must be a Python int"),
        ((MIXING, dist.Normal(np.zeros(4)), 2), ValueError, r"3\), as `mixing`; got .*\(4,\)"),
        ((MIXING, dist.Normal(0.0), 2), ValueError, r"got batch shape \(\)"),
        ((MIXING, [THREE] * 3, 2), TypeError, "one distribution .*, of type list"),
        ((THREE, THREE, 2), TypeError, "must be a .*Categorical .*; got a Normal"),
        (
            (MIXING, dist.Uniform(ZEROS[0], np.arange(1.0, 4)), 2),
            ValueError,
            "must have the same support",
        ),
        (
            (dist.Categorical(logits=np.array([0, np.nan, 0]), validate_args=False), THREE, 2),
            ValueError,
            "logits of `mixing` must be .* got nan at position 1",
        ),
        (
            (MIXING, dist.MixtureSameFamily(MIXING, dist.Normal(ZEROS)), 2),
            NotImplementedError,
            "fit with `lc.TopL_ELBO`",
        ),
    ],
)
def test_bad_input_is_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        lc.TopLMixture(*arguments)


def test_bad_values_are_refused():
    case = family("diagonal")
    mixture = lc.TopLMixture(case.mixing, case.components, 2)
    holes = POINTS.copy()
    holes[7, 1] = np.nan
    with pytest.raises(ValueError, match=r"`value` must be finite; got nan at position \(7, 1\)"):
        mixture.log_prob(holes)
    with pytest.raises(
        ValueError, match=r"shape \(\.\.\., 3\), events of the components.*got shape \(2,\)"
    ):
        mixture.responsibilities(np.zeros(2))


@pytest.mark.slow
def test_a_component_without_a_density_is_named():
    loc = jnp.array([0.0, jnp.nan, 1.0])
    mixture = lc.TopLMixture(MIXING, dist.Normal(loc, 1.0, validate_args=False), 2)
    with pytest.raises(ValueError, match=r"component 1 is NaN .* at position \(0, 0\)"):
        mixture.log_prob(jnp.zeros((2, 3)))
    assert np.isnan(jax.jit(mixture.log_prob)(jnp.zeros(2))).all()


class OfMyOwn(dist.Distribution):
    """A distribution that declares what its subclasses say."""

    support = dist.constraints.real

    def __init__(self, loc, *, validate_args=None):
        self.loc = loc
        super().__init__(jnp.shape(loc), (), validate_args=validate_args)

    def log_prob(self, value):
        return -((value - self.loc) ** 2)


class Unflattened(OfMyOwn):
    pytree_data_fields = ("loc",)


class Declared(OfMyOwn):
    arg_constraints = {"loc": dist.constraints.real}


@pytest.mark.parametrize(("kind", "what"), [(OfMyOwn, "declare"), (Unflattened, "which axes")])
def test_a_distribution_that_does_not_declare_its_arrays_is_told_how(kind, what):
    with pytest.raises(NotImplementedError, match=f"{kind.__name__}.*{what}.*'loc': constraints"):
        lc.TopLMixture(MIXING, kind(np.arange(3.0)), 2)


def test_a_distribution_that_declares_its_arrays_is_taken_apart():
    mixture = lc.TopLMixture(MIXING, Declared(np.arange(3.0)), 1)
    log_prob = jax.jit(lambda m: m.log_prob(np.array([2.0])))(mixture)
    np.testing.assert_allclose(log_prob, -np.log(3), rtol=1e-5)
