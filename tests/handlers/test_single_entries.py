# SPDX-License-Identifier: Apache-2.0
"""Single entries of results are those of the whole, and cost less."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_largecat.handlers.single_entries import single_entries

N, D, M = 5, 3, 7
RNG = np.random.default_rng(0)
X, W, B = (jnp.array(RNG.normal(size=shape), jnp.float32) for shape in ((N, D), (M, D), M))
MASK = jnp.array(RNG.random((N, M)) < 0.5)
ROWS = jnp.array([6, 0, 3, 3, 1])


def network(x):
    hidden = jax.nn.relu(x @ jnp.ones((D, 4)))
    return jnp.tanh(hidden @ jnp.ones((4, D)))


def gated():
    utilities = X @ W.T
    for _ in range(30):  # each value is used twice: without memory this takes 2**30 steps
        utilities = utilities + 0.1 * jnp.tanh(utilities)
    return utilities


UTILITIES = {
    "linear": lambda: X @ W.T,
    "intercept": lambda: X @ W.T + B,
    "einsum, which swaps the factors": lambda: jnp.einsum("nd,kd->nk", X, W),
    "transposed product": lambda: (W @ X.T).T - B[None, :],
    "scaled per row": lambda: jnp.exp(-jnp.arange(1.0, N + 1))[:, None] * (X @ W.T) / 2.0,
    "no rows": lambda: jnp.broadcast_to(B, (N, M)),
    "constant": lambda: jnp.broadcast_to(jnp.array(2.0), (N, M)),
    "masked": lambda: jnp.where(MASK, X @ W.T, -jnp.inf),
    "clipped": lambda: jnp.clip(X @ W.T, -1.0, 1.0),
    "inner function under jit": lambda: jax.jit(lambda a, b: a @ b.T + B)(X, W),
    "network": lambda: network(X) @ W.T + B,
    "batched product": lambda: jnp.einsum("nd,nkd->nk", X, X[:, None, :] + W),
    "two contracted axes": lambda: jnp.tensordot(
        X[:, :, None] * B[:2], W[:, :, None] * B[:2], axes=((1, 2), (1, 2))
    ),
    "normalised, which needs the whole": lambda: jax.nn.log_softmax(X @ W.T + B),
    "sorted, which needs the whole": lambda: jnp.sort(X @ W.T, axis=-1),
    "used many times": gated,
    "matrix and vector": lambda: jnp.tanh(jnp.einsum("nd,md->nmd", X, W)) @ B[:D],
    "matrix and vector by einsum": lambda: jnp.einsum("nmd,d->nm", X[:, None] * W, B[:D]),
    "vector and matrix": lambda: (B[:D] @ (X[:, None] * W).reshape(-1, D).T).reshape(N, M),
    "vmap over rows": lambda: jax.vmap(lambda x: W @ x)(X),
    "vmap over classes": lambda: jax.vmap(lambda w: X @ w, out_axes=1)(W),
    "vmap over both": lambda: jax.vmap(lambda x: jax.vmap(lambda w: w @ x)(W))(X),
    "joined": lambda: jnp.concatenate([(X @ W[:1].T), X @ W[1:4].T, X @ W[4:].T], axis=1),
    "joined from many parts": lambda: jnp.concatenate(
        [(X @ W.T[:, :1]) * (i + 1.0) if i % 2 else X @ W.T[:, :1] + i for i in range(M)], axis=1
    ),
    "joined rows": lambda: jnp.concatenate([X[:2], X[2:]]) @ W.T,
    "half precision": lambda: X.astype(jnp.bfloat16) @ W.T.astype(jnp.bfloat16),
}


@pytest.mark.parametrize("name", UTILITIES)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.some_cases(4)
def test_entries_are_those_of_the_whole(name, compiled):
    fn = UTILITIES[name]
    take = jax.jit(single_entries, static_argnums=0) if compiled else single_entries
    taken = take(lambda: {"y": (fn(), ROWS)})["y"]
    whole = jax.jit(fn)()
    assert taken.dtype == whole.dtype
    tolerance = 2e-2 if whole.dtype == jnp.bfloat16 else 1e-5
    expected = np.asarray(whole)[np.arange(N), ROWS]
    np.testing.assert_allclose(
        *(np.asarray(x, np.float32) for x in (taken, expected)), rtol=tolerance, atol=tolerance
    )


@pytest.mark.slow
def test_leading_axes_and_several_results():
    deep = jnp.stack([X, 2 * X])
    rows = jnp.stack([ROWS, ROWS[::-1]])
    taken = single_entries(
        lambda: {"deep": (deep @ W.T + B, rows), "one": (B, jnp.array(4)), "plain": (X, ROWS % D)}
    )
    expected = jnp.take_along_axis(deep @ W.T + B, rows[..., None], -1)[..., 0]
    np.testing.assert_allclose(taken["deep"], expected, rtol=1e-5)
    assert taken["one"] == B[4]
    np.testing.assert_array_equal(taken["plain"], X[jnp.arange(N), ROWS % D])


def test_works_on_traced_values():
    def total(x, w):
        return single_entries(lambda: {"y": (x @ w.T, ROWS)})["y"].sum()

    np.testing.assert_allclose(jax.jit(jax.grad(total))(X, W), W[ROWS], rtol=1e-5)
    many = jax.jit(jax.vmap(total, in_axes=(0, None)))(np.stack([X, X]), W)
    whole = np.asarray(X) @ np.asarray(W).T
    np.testing.assert_allclose(many, [whole[np.arange(N), ROWS].sum()] * 2, rtol=1e-5)


@pytest.mark.parametrize("name", ["linear", "intercept", "masked", "einsum", "joined"])
def test_a_linear_model_does_n_inner_products(name):
    """Counted operations: 2 N D and a little for each part that is joined, not 2 N M D."""
    n, d, m = 200, 64, 500
    x, w, b = np.ones((n, d), np.float32), np.ones((m, d), np.float32), np.ones(m, np.float32)
    fn = {
        "linear": lambda x, w: x @ w.T,
        "intercept": lambda x, w: x @ w.T + b,
        "masked": lambda x, w: jnp.where(x[:, :1] > w[:, 0], x @ w.T, -jnp.inf),
        "einsum": lambda x, w: jnp.einsum("nd,kd->nk", x, w),
        "joined": lambda x, w: jnp.concatenate([x @ w[:9].T, x @ w[9:].T], axis=1),
    }[name]
    rows = jnp.arange(n)
    num_parts = 2 if name == "joined" else 1
    taken = jax.jit(lambda x, w: single_entries(lambda: {"y": (fn(x, w), rows)}))
    assert taken.lower(x, w).compile().cost_analysis()["flops"] < 4 * n * d * num_parts
