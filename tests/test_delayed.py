"""Delayed scaling: a state that goes in and out, through every construct of JAX."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen import fp8_ops

from jaxamp_like import (
    Policy,
    amp_with_state,
    init_amp_state,
)
from jaxamp_like.presets import quantised
from jaxamp_like.rules import float8
from tests.programs import values

LENGTH = 4


def policy(dtype="bfloat16", **options):
    rule = float8(delayed=True, amax_history_length=LENGTH, where=None, **options)
    return Policy(dtype, rules=quantised(rule))


POLICY = policy()


# Agreement with Flax.


class MLP(nn.Module):
    dense: type[nn.Module]

    @nn.compact
    def __call__(self, x):
        x = self.dense(16, name="up")(x).astype(jnp.float32)
        return self.dense(4, name="down")(nn.gelu(x)).astype(jnp.float32)


def squares(model, x, y):
    return lambda variables: jnp.mean((model.apply(variables, x) - y) ** 2)


FLAX_NAMES = {
    "input": "lhs",
    "kernel": "rhs",
    "output_grad": "cotangent",
}


def train_by_flax(dtype, batches, params):
    """Each step: loss, gradients, scales and histories, by Flax's own layers."""
    dense = functools.partial(
        nn.Dense,
        use_bias=False,
        dtype=dtype,
        dot_general_cls=functools.partial(
            fp8_ops.Fp8DirectDotGeneralOp, amax_history_length=LENGTH
        ),
    )
    model = MLP(dense)
    meta = model.init(jax.random.key(0), batches[0][0])["_overwrite_with_gradient"]

    @jax.jit
    def step(params, meta, x, y):
        def loss(params, meta):
            variables = {"params": params, "_overwrite_with_gradient": meta}
            return squares(model, x, y)(variables)

        value, (grads, meta) = jax.value_and_grad(loss, (0, 1))(params, meta)
        return value, grads, meta

    for x, y in batches:
        value, grads, meta = step(params, meta, x, y)
        state = {}
        for layer, ((_, held),) in ((k, v.items()) for k, v in meta.items()):
            for theirs, ours in FLAX_NAMES.items():
                scale, history = (
                    held[f"{theirs}_{what}"] for what in ("scale", "amax_history")
                )
                state[layer, ours] = scale[0], history
        yield value, grads, state
        params = jax.tree.map(lambda p, g: p - 0.01 * g, params, grads)


def train_with_state(dtype, batches, params):
    model = MLP(functools.partial(nn.Dense, use_bias=False))

    def loss(params, x, y):
        return squares(model, x, y)({"params": params})

    by = policy(dtype, power_of_two=False)
    step = jax.jit(amp_with_state(jax.value_and_grad(loss), amp_policy=by))
    state = init_amp_state(step, params, *batches[0])
    for x, y in batches:
        (value, grads), state = step(state, params, x, y)
        found = {}
        for key, tensor in state.items():
            *_, scope, _, role = key.split("/")
            found[scope.partition(".")[0], role] = tuple(tensor)
        yield value, grads, found
        params = jax.tree.map(lambda p, g: p - 0.01 * g, params, grads)


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
def test_agrees_with_flax_step_by_step(dtype):
    # Magnitudes come and go, so that scales follow and values are clipped meanwhile.
    batches = [
        (values(8, 12, seed=i) * 2.0 ** (i * 7 % 5), values(8, 4, seed=100 + i))
        for i in range(20)
    ]
    params = {
        "up": {"kernel": values(12, 16) / 4},
        "down": {"kernel": values(16, 4, seed=1) / 4},
    }
    flax, ours = (
        train(dtype, batches, params) for train in (train_by_flax, train_with_state)
    )
    for i, (step, own) in enumerate(zip(flax, ours, strict=True)):
        same = jax.tree.map(lambda x, y: bool(np.all(x == y)), step, own)
        assert all(jax.tree.leaves(same)), (i, same)
    assert i == 19
