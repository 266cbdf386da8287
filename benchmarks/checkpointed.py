"""Transformers of which the author checkpoints every block, as large ones are trained.

    python -m benchmarks.roofline --checkpointed

Seven of them: blocks that are unrolled and blocks in a scan, each plain, with rotary
embeddings, and as in Llama (RMSNorm, grouped queries, SwiGLU); and one with a large
vocabulary, whose logits are larger than all the rest."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import jax.random as jr
from jax import Array, lax

from .workloads import (
    GPT_SIZES,
    HEADS,
    WORKLOADS,
    Attention,
    Params,
    Style,
    Workload,
    gpt_batch,
    init_blocks,
    loss_of,
    make_gpt,
    make_workload,
    normal,
    rope_tables,
    rotate,
    run_blocks,
)

GROUPS = 2  # heads of keys and values
LARGE = 4  # times the vocabulary of the others


def rms_norm(x: Array, scale: Array) -> Array:
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale


def attend(style: Style, attention: Attention, p: Params, x: Array) -> Array:
    """Groups of query heads share a head of keys and values."""
    batch, length, dim = x.shape
    assert attention.rope is not None
    tables, head_dim = attention.rope, dim // HEADS

    def heads(w: Array, number: int, turn: bool = True) -> Array:
        y = (x @ style.low(w)).reshape(batch, length, number, head_dim)
        return style.low(rotate(style.full(y), *tables)) if turn else y

    q = heads(p["q"], HEADS).reshape(batch, length, GROUPS, -1, head_dim)
    k, v = heads(p["k"], GROUPS), heads(p["v"], GROUPS, turn=False)
    scores = jnp.einsum("bqghd,bkgd->bghqk", q, k)
    weights = style.in_full(partial(attention.weights, head_dim=head_dim))(scores)
    mixed = jnp.einsum("bghqk,bkgd->bqghd", weights, v).reshape(batch, length, dim)
    return mixed @ style.low(p["mix"])


def block(style: Style, attention: Attention, p: Params, x: Array) -> Array:
    norm = style.in_full(rms_norm)
    x = x + attend(style, attention, p, norm(x, p["norm1"]))
    y = norm(x, p["norm2"])
    gate, up = y @ style.low(p["gate"]), y @ style.low(p["up"])
    hidden = style.cheap(lambda a, b: jax.nn.silu(a) * b)(gate, up)
    return x + hidden @ style.low(p["down"])


def init_block(key: Array, dim: int) -> Params:
    keys, hidden, shared = jr.split(key, 7), 3 * dim, dim * GROUPS // HEADS
    return {
        "norm1": jnp.ones(dim, jnp.float32),
        "q": normal(keys[0], dim, dim),
        "k": normal(keys[1], dim, shared),
        "v": normal(keys[2], dim, shared),
        "mix": normal(keys[3], dim, dim),
        "norm2": jnp.ones(dim, jnp.float32),
        "gate": normal(keys[4], dim, hidden),
        "up": normal(keys[5], dim, hidden),
        "down": normal(keys[6], hidden, dim),
    }


def llama(style: Style, params: Params, tokens: Array) -> Array:
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    x = style.low(params["embed"][inputs])
    length, dim = x.shape[1:]
    attention = Attention(-math.inf, rope_tables(length, dim // HEADS))
    fn = jax.checkpoint(partial(block, style, attention))
    x = style.in_full(rms_norm)(run_blocks(fn, params["blocks"], x), params["norm"])
    return loss_of(style, x @ style.low(params["head"]), targets)


def init_llama(key: Array, size: str, *, stacked: bool = False) -> Params:
    c = GPT_SIZES[size]
    keys = jr.split(key, 3)
    return {
        "embed": normal(keys[0], c["vocabulary"], c["dim"], fan_in=1),
        "blocks": init_blocks(keys[1], c["depth"], c["dim"], stacked, init_block),
        "norm": jnp.ones(c["dim"], jnp.float32),
        "head": normal(keys[2], c["dim"], c["vocabulary"]),
    }


def make_llama(name: str, *, stacked: bool) -> Workload:
    init = partial(init_llama, stacked=stacked)
    return make_workload(name, llama, init, gpt_batch, lean=False)


CHECKPOINTED = {
    one.name: one
    for one in (
        WORKLOADS["GPT remat"],
        make_gpt("GPT RoPE remat", rope=True, remat=True),
        make_llama("Llama remat", stacked=False),
        WORKLOADS["GPT scanned remat"],
        make_gpt("GPT scanned RoPE remat", rope=True, stacked=True, remat=True),
        make_llama("Llama scanned remat", stacked=True),
        make_gpt("GPT large vocabulary", stacked=True, remat=True, vocabularies=LARGE),
    )
}
