"""Steers precision without touching the model: scopes, primitives, rules, `amp_stop`.

Prints in which dtype each operation of one small function reads its input: as written,
under the default policy, and under a policy of our own.

    python examples/custom_policy.py
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxamp_like import amp, amp_stop, default_amp_policy
from jaxamp_like.rules import use_compute_precision


@amp_stop
def centred(x):
    """Stays in float32 under every policy, backward pass included."""
    return x - x.mean(axis=-1, keepdims=True)


def attention(x, w, out):
    x = centred(x)
    with jax.named_scope("attention"):
        scores = x @ w @ x.T
    weights = jnp.exp(jnp.tanh(scores))
    mixed = weights @ x
    with amp_stop():
        mixed = mixed / jnp.sqrt(mixed.size)
    return mixed @ out


def float32_where_long(compute_dtype, original_dtypes, *invars, **bind_params):
    """Contractions of more than 64 terms keep the dtypes that their author wrote."""
    (lhs_contracting, _), _ = bind_params["dimension_numbers"]
    terms = max(invars[0].shape[axis] for axis in lhs_contracting)
    dtypes = original_dtypes if terms > 64 else [compute_dtype] * len(invars)
    invars = [x.astype(dtype) for x, dtype in zip(invars, dtypes, strict=True)]
    if terms <= 64:
        bind_params = bind_params | {"preferred_element_type": compute_dtype}
    return invars, bind_params


policy = default_amp_policy | {
    "attention": "float32",  # every equation under `jax.named_scope("attention")`
    lax.exp_p: use_compute_precision,  # `exp` runs in float32 by default
    lax.dot_general_p: float32_where_long,  # a rule of our own
}

SHOWN = ("dot_general", "exp", "tanh", "sub", "div")


def equations(jaxpr):
    """The equations to show, those in nested programs (jit, checkpoint) included."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in SHOWN:
            yield eqn
        for param in eqn.params.values():
            if hasattr(inner := getattr(param, "jaxpr", param), "eqns"):
                yield from equations(inner)


def trace(fn, *args) -> list[Any]:
    return list(equations(jax.make_jaxpr(fn)(*args).jaxpr))


if __name__ == "__main__":
    args = jnp.ones((128, 32)), jnp.ones((32, 32)), jnp.ones((32, 8))
    steered = amp(attention, compute_dtype="bfloat16", amp_policy=policy)
    written = trace(attention, *args)
    default = trace(amp(attention, compute_dtype="bfloat16"), *args)
    own = trace(steered, *args)
    print(f"{'':24}{'as written':12}{'default':12}{'own policy':12}")
    for eqns in zip(written, default, own, strict=True):
        name = f"{eqns[0].source_info.name_stack} {eqns[0].primitive}".strip()
        dtypes = (eqn.invars[0].aval.dtype.name for eqn in eqns)
        print(f"{name:24}" + "".join(f"{dtype:12}" for dtype in dtypes))
