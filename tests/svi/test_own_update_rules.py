# SPDX-License-Identifier: Apache-2.0
"""What an update rule must give back, so that the rows that it moves are its own."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import jax.random as random
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer import Trace_ELBO

import numpyro_largecat as lc
from tests.models import class_points_of

N, K = 12, 50
X = np.random.default_rng(0).normal(size=N).astype(np.float32)
Y = np.array([3, 7, 7, 1, 9, 5, 8, 2, 6, 9, 1, 8])


class Rule:
    """Moves rows as a function says, and has the state that it is given."""

    def __init__(self, move, state=()):
        self.move, self.state = move, state

    def init(self, value):
        return self.state

    def update(self, value, state, statistic):
        return self.move(value, state)


def run_with_rule(rule):
    def model(x, y, rows):
        with lc.class_plate("classes", K, y, 5) as classes:
            w = numpyro.sample("w", dist.Normal(0, 1))
        with lc.data_plate("data", N, rows) as rows:
            how = {"classes": classes, "rows": rows, "update_rule": rule}
            lc.sample_choice("y", x[:, None] * w, obs=y, **how)

    batches = lc.ArrayBatches(X, Y, batch_size=4)
    svi = lc.SubsampledSVI(model, class_points_of(K, w=()), optax.sgd(0.1), Trace_ELBO())
    return svi.run(random.key(0), 1, batches=batches, progress_bar=False)


@pytest.mark.parametrize(
    ("move", "error", "message"),
    [
        (lambda value, state: value, TypeError, "the moved rows and their state, a pair; got"),
        (
            lambda value, state: (value[:1], state),
            ValueError,
            r"floats \(4,\).*; got floats \(1,\) ",
        ),
        (
            lambda value, state: (value, value),
            ValueError,
            r"; got floats \(4,\), floats",
        ),
        (lambda value, state: (jnp.int32(value), state), ValueError, r"; got integers \(4,\) "),
    ],
)
def test_a_rule_must_give_what_it_got(move, error, message):
    with pytest.raises(error, match=f"`update_rule` of param 'y_u' must return .*{message}"):
        run_with_rule(Rule(move))


def test_the_state_of_a_rule_may_be_any_tree():
    """Also one whose class does not compare, such as a partial function."""
    state = jax.tree_util.Partial(jnp.add, jnp.zeros(N))
    found = run_with_rule(Rule(lambda value, state: [value + 1, state], state))
    assert (found.params["y_u"] != 0).sum() >= 4
