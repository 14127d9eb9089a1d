# SPDX-License-Identifier: Apache-2.0
"""The most probable classes without those that a user has, or among some candidates."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy.special import log_softmax

import numpyro_largecat as lc
from tests.models import normals_of

K, N, D = 23, 6, 3
RNG = np.random.default_rng(0)
X, W = RNG.normal(size=(N, D)), RNG.normal(size=(K, D))
HAS = np.full((N, 5), -1)  # ragged
for n, number in enumerate([0, 1, 5, 3, 4, 5]):
    HAS[n, :number] = RNG.permutation(K)[:number]
CANDIDATES = np.array([RNG.permutation(K)[:4] for _ in range(N)])
CANDIDATES[2, 1:] = -1


def linear(x, y=None, *, noise="gumbel"):
    with lc.class_plate("classes", K, y, num_sampled=4) as classes:
        w = numpyro.sample("w", dist.Normal(0, 1).expand([D]).to_event(1))
    with lc.data_plate("data", N) as rows:
        lc.sample_choice("y", x @ w.T, classes=classes, rows=rows, noise=noise, obs=y)


def fitted(noise="gumbel", chunk_size=5):
    model, guide = partial(linear, noise=noise), normals_of(classes=(K, {"w": (D,)}))
    params = {"w_auto_loc": jnp.asarray(W), "w_auto_scale": jnp.full(W.shape, 0.1)}
    return lc.Fitted(model, guide, params, chunk_size=chunk_size)


def expected(order, allowed, num_top):
    """The first classes of each order that are allowed, padded with -1."""
    rows = [
        [k for k in row if is_allowed[k]] for row, is_allowed in zip(order, allowed, strict=True)
    ]
    return np.array([(row + [-1] * num_top)[:num_top] for row in rows])


def allowed_by(exclude=None, among=None):
    allowed = np.ones((N, K), bool)
    for n in range(N):
        if among is not None:
            allowed[n] = np.isin(np.arange(K), among[n])
        if exclude is not None:
            allowed[n, exclude[n][exclude[n] >= 0]] = False
    return allowed


LISTS = {
    "exclude": {"exclude": HAS},
    "among": {"among": CANDIDATES},
    "both": {"exclude": CANDIDATES[:, :2], "among": CANDIDATES},
}


@pytest.mark.parametrize("chunk_size", [5, 8192])
@pytest.mark.parametrize("lists", LISTS.values(), ids=LISTS)
@pytest.mark.some_cases(1)
def test_top_classes_are_the_first_that_may_be_named(lists, chunk_size) -> None:
    """Their probabilities are among all classes, and -inf where there are no more."""
    top = fitted(chunk_size=chunk_size).on(X).top_classes(6, **lists)
    log_probs = log_softmax(X @ W.T, axis=1)
    wanted = expected(np.argsort(-log_probs, axis=1), allowed_by(**lists), 6)
    np.testing.assert_array_equal(top.classes, wanted)
    values = np.where(wanted < 0, -np.inf, np.take_along_axis(log_probs, wanted.clip(0), 1))
    np.testing.assert_allclose(top.log_probs, values, rtol=1e-5)


@pytest.mark.parametrize("options", [{}, {"rng_key": jax.random.key(1), "num_draws": 3}])
@pytest.mark.parametrize("noise", ["gumbel", "logistic"])
@pytest.mark.some_cases(1)
def test_lists_only_leave_classes_out(noise: str, options) -> None:
    """The others keep their order and probabilities, at the centre and over draws."""
    new = fitted(noise).on(X)
    every = new.top_classes(K, **options)
    top = new.top_classes(6, exclude=HAS, **options)
    wanted = expected(np.asarray(every.classes), allowed_by(HAS), 6)
    np.testing.assert_array_equal(top.classes, wanted)
    found = [row[classes] for row, classes in zip(_by_class(every), wanted, strict=True)]
    np.testing.assert_allclose(top.log_probs, found, rtol=1e-4)


@pytest.mark.parametrize("chunk_size", [200, 256])
@pytest.mark.parametrize("names", LISTS)
@pytest.mark.some_cases(2)
def test_few_listed_of_many_classes_are_left_out_in_one_pass(names, chunk_size) -> None:
    """Also the highest, which matter to the sums. Of the rest the mean is taken, off by 1e-3."""
    num_classes, options = 600, {"rng_key": jax.random.key(1), "num_draws": 40}

    def model(x, y=None):
        with lc.class_plate("classes", num_classes, y, num_sampled=4) as classes:
            w = numpyro.sample("w", dist.Normal(0, 1).expand([D]).to_event(1))
        with lc.data_plate("data", N) as rows:
            lc.sample_choice("y", x @ w.T, classes=classes, rows=rows, obs=y)

    w = jnp.asarray(1.5 * np.random.default_rng(2).normal(size=(num_classes, D)))
    params = {"w_auto_loc": w, "w_auto_scale": jnp.full(w.shape, 0.3)}
    guide = normals_of(classes=(num_classes, {"w": (D,)}))
    new = lc.Fitted(model, guide, params, chunk_size=chunk_size).on(X)
    every = new.top_classes(num_classes, **options)
    order = np.asarray(every.classes)
    exclude = np.where(np.arange(10) < 7, order[:, :10], -1)
    among = np.concatenate([order[:, 3:10], order[:, 500:503], order[:, :1]], 1)
    both = {"exclude": exclude, "among": among}
    lists = both if names == "both" else {names: both[names]}
    top = new.top_classes(6, **lists, **options)
    allowed = np.ones((N, num_classes), bool)
    if "among" in lists:
        allowed[:] = [np.isin(np.arange(num_classes), row) for row in among]
    if "exclude" in lists:
        np.put_along_axis(allowed, order[:, :7], False, 1)
    wanted = expected(order, allowed, 6)
    np.testing.assert_array_equal(top.classes, wanted)
    log_probs = np.empty((N, num_classes))
    np.put_along_axis(log_probs, order, np.asarray(every.log_probs), 1)
    values = np.where(wanted < 0, -np.inf, np.take_along_axis(log_probs, wanted.clip(0), 1))
    np.testing.assert_allclose(top.log_probs, values, atol=1e-3)


def _by_class(top):
    by_class = np.empty((N, K))
    np.put_along_axis(by_class, np.asarray(top.classes), np.asarray(top.log_probs), 1)
    return by_class


def test_lists_are_taken_under_jit_and_in_a_loop_over_users() -> None:
    """Where what is no class leaves its observation without a name."""
    fit = fitted()
    wanted = fit.on(X).top_classes(3, exclude=HAS).classes

    @jax.jit
    def in_batches(x, has):
        def of_batch(batch):
            return fit.on(batch[0]).top_classes(3, exclude=batch[1]).classes

        return jax.lax.map(of_batch, (x.reshape(3, 2, D), has.reshape(3, 2, 5))).reshape(N, 3)

    np.testing.assert_array_equal(in_batches(X, HAS), wanted)
    bad = HAS.copy()
    bad[3, 4] = K
    found = in_batches(X, bad)
    np.testing.assert_array_equal(found[3], -1)
    np.testing.assert_array_equal(np.delete(found, 3, 0), np.delete(wanted, 3, 0))


@pytest.mark.parametrize("options", [{}, {"rng_key": jax.random.key(1), "num_draws": 2}])
@pytest.mark.some_cases(1)
def test_an_integral_does_not_hide_a_bad_list(options) -> None:
    """Of errors whose probabilities are integrals: NaN too, and of no class."""
    bad = HAS.copy()
    bad[3, 4] = K
    fit = fitted("logistic")
    top = jax.jit(lambda has: fit.on(X).top_classes(2, exclude=has, **options))(bad)
    assert (top.classes[3] == -1).all() and np.isnan(top.log_probs[3]).all()
    assert (np.delete(top.classes, 3, 0) >= 0).all()


@pytest.mark.parametrize(
    "lists, error, message",
    [
        ({"exclude": HAS[:2]}, ValueError, r"`exclude` must.*\(2, 5\)"),
        ({"among": HAS[0]}, ValueError, r"`among` must.*a list of classes for each observation"),
        ({"among": HAS + 0.5}, TypeError, "`among`.*integers"),
        ({"exclude": HAS + K}, ValueError, r"`exclude` must be classes.*in \[0, 23\), or -1"),
    ],
)
def test_bad_lists_are_refused(lists, error, message) -> None:
    with pytest.raises(error, match=message):
        fitted().on(X).top_classes(2, **lists)
