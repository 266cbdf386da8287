"""A program for a process of its own: is a NaN or an inf lost on the way, anywhere?

XLA's flags are read once in a process, and with those of the tests it computes maxima
of large arrays otherwise than users' processes do."""

from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import optax

from jaxamp_like import DynamicScalerState, amp, dynamic_scale_grad
from jaxamp_like.presets import quantised
from jaxamp_like.rules import float8, int4, int8, mxfp8, nvfp4
from jaxamp_like.storage import low_bit_state, to_full_state

BAD = (jnp.nan, -jnp.nan, jnp.inf, -jnp.inf)
RULES = {
    "float8": float8(where=None),
    "float8 by row": float8(where=None, granularity="row"),
    "int8": int8(where=None),
    "int8 weights": int8(where=None, weight_only=True),
    "int4": int4(),
    "int4, zero points": int4(zero_point=True),
    "mxfp8": mxfp8(where=None, emulate=True),
    "nvfp4": nvfp4(where=None, emulate=True),
    "nvfp4, in rows": nvfp4(where=None, emulate=True, square_weights=False),
}
FORMATS = ("int8", "int4", "float8", "bfloat16")


def lost(x: Any) -> bool:
    return bool(jnp.isfinite(x).all())


def in_contractions(w: Any, x: Any) -> list[str]:
    """Each output that reads the bad number is to be bad."""
    found = []
    for name, rule in RULES.items():
        fn = jax.jit(amp(lambda w, x: x @ w, amp_policy=quantised(rule)))
        for bad in BAD:
            by_weight = fn(w.at[3, 5].set(bad), x)[:, 5]
            by_input = fn(w, x.at[3, 5].set(bad))[3]
            if jnp.isfinite(by_weight).any() or jnp.isfinite(by_input).any():
                found.append(f"{name}: {bad}")
    return found


def in_states(params: Any) -> list[str]:
    found = []
    for name in FORMATS:
        tx = low_bit_state(optax.adam(1e-3), name)
        update = jax.jit(tx.update)
        for bad in BAD:
            grads = params.at[3, 5].set(bad)
            _, state = update(grads, tx.init(params), params)
            _, mu, nu = jax.tree.leaves(to_full_state(state))
            if lost(mu) or lost(nu):
                found.append(f"{name} state: {bad}")
    return found


def in_scaled_gradients(w: Any, x: Any) -> list[str]:
    grad = jax.jit(dynamic_scale_grad(amp(lambda w, x: (x @ w).sum())))
    state = DynamicScalerState()
    new, _ = grad(w, x.at[3, 5].set(BAD[0]), dynamic_scaler_state=state)
    return [] if new.scaler < state.scaler else ["dynamic_scale_grad"]


if __name__ == "__main__":
    w, x = jr.normal(jr.key(0), (512, 256)), jr.normal(jr.key(1), (64, 512))
    found = [*in_contractions(w, x), *in_states(w), *in_scaled_gradients(w, x)]
    print(*found, sep="\n")
