"""Models as their packages write them: Equinox, Flax Linen and NNX, Haiku, JAX alone.

None knows of mixed precision. Each shows something that `amp` has to get right beyond
the workloads: dropout, gates, statistics over a batch, masks on weights, a gradient
inside a loss, a choice by rank. Where a model draws random numbers, its batch brings
the key."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
from flax import linen as nn, nnx
from jax import Array, lax
from jax.flatten_util import ravel_pytree

from .workloads import HEADS, Model, Params, normal, rope_tables, rotate

INTEGERS = jnp.int32  # spelled out, so that x64 changes nothing


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["params"],
    meta_fields=["module"],
)
@dataclass(frozen=True)
class Net:
    """Parameters, and what they are parameters of: how large a model is, and made how.

    Args:
        params: a pytree of arrays.
        module: static and hashable, whatever the package has."""

    params: Any
    module: Any = field(default=None)


def cross_entropy(logits: Array, labels: Array) -> Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def tokens(key: Array, *shape: int, below: int) -> Array:
    return jr.randint(key, shape, 0, below, INTEGERS)


def initialised(module: nn.Module, key: Array, *args: Any) -> Net:
    """A Linen module with its parameters, for arguments of these shapes."""
    return Net(module.init(key, *args), module)


# -------------------------------------------------------------------- GPT-2 (Equinox)

GPT2 = {
    "toy": dict(batch=3, length=24, dim=64, depth=2, vocabulary=80),
    "real": dict(batch=8, length=512, dim=768, depth=2, vocabulary=8192),
}


class GPT2Block(eqx.Module):
    norms: list[eqx.nn.LayerNorm]
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP

    def __init__(self, dim: int, *, key: Array):
        keys = jr.split(key)
        self.norms = [eqx.nn.LayerNorm(dim) for _ in range(2)]
        self.attention = eqx.nn.MultiheadAttention(HEADS, dim, key=keys[0])
        self.mlp = eqx.nn.MLP(dim, dim, 4 * dim, 1, jax.nn.gelu, key=keys[1])

    def __call__(self, x: Array) -> Array:
        causal = jnp.tril(jnp.ones((len(x), len(x)), bool))
        h = jax.vmap(self.norms[0])(x)
        x = x + self.attention(h, h, h, mask=causal)
        return x + jax.vmap(self.mlp)(jax.vmap(self.norms[1])(x))


class GPT2Model(eqx.Module):
    embed: eqx.nn.Embedding
    position: eqx.nn.Embedding
    blocks: list[GPT2Block]
    norm: eqx.nn.LayerNorm

    def __init__(self, c: dict[str, int], *, key: Array):
        keys = jr.split(key, c["depth"] + 2)
        self.embed = eqx.nn.Embedding(c["vocabulary"], c["dim"], key=keys[0])
        self.position = eqx.nn.Embedding(c["length"], c["dim"], key=keys[1])
        self.blocks = [GPT2Block(c["dim"], key=key) for key in keys[2:]]
        self.norm = eqx.nn.LayerNorm(c["dim"])

    def __call__(self, ids: Array) -> Array:
        x = jax.vmap(self.embed)(ids) + self.position.weight[: len(ids)]
        for block in self.blocks:
            x = block(x)
        x = jax.vmap(self.norm)(x) / math.sqrt(x.shape[-1])
        return x @ self.embed.weight.T  # tied to the embedding


def init_gpt2(key: Array, size: str) -> Net:
    return Net(*eqx.partition(GPT2Model(GPT2[size], key=key), eqx.is_inexact_array))


def gpt2_batch(key: Array, size: str) -> Array:
    c = GPT2[size]
    return tokens(key, c["batch"], c["length"] + 1, below=c["vocabulary"])


def gpt2_loss(net: Net, ids: Array) -> Array:
    model = eqx.combine(net.params, net.module)
    return cross_entropy(jax.vmap(model)(ids[:, :-1]), ids[:, 1:])


# ---------------------------------------------------------------------- Llama (NNX)

LLAMA = {
    "toy": dict(batch=3, length=24, dim=64, depth=2, vocabulary=80),
    "real": dict(batch=8, length=512, dim=768, depth=2, vocabulary=8192),
}


class LlamaBlock(nnx.Module):
    """RMSNorm, rotary positions, four queries to a key, SwiGLU; no bias anywhere."""

    def __init__(self, dim: int, *, rngs: nnx.Rngs):
        linear = functools.partial(nnx.Linear, use_bias=False, rngs=rngs)
        self.norm1 = nnx.RMSNorm(dim, rngs=rngs)
        self.norm2 = nnx.RMSNorm(dim, rngs=rngs)
        self.query, self.mix = linear(dim, dim), linear(dim, dim)
        self.key, self.value = linear(dim, dim // 4), linear(dim, dim // 4)
        self.gate, self.up = linear(dim, 3 * dim), linear(dim, 3 * dim)
        self.down = linear(3 * dim, dim)

    def attend(self, x: Array) -> Array:
        length, head_dim = x.shape[1], x.shape[2] // HEADS
        q, k, v = (
            y.reshape(*x.shape[:2], -1, head_dim)
            for y in (self.query(x), self.key(x), self.value(x))
        )
        tables = rope_tables(length, head_dim)
        q, k = rotate(q, *tables), rotate(k, *tables)
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        return self.mix(y.reshape(x.shape))

    def __call__(self, x: Array) -> Array:
        x = x + self.attend(self.norm1(x))
        y = self.norm2(x)
        return x + self.down(jax.nn.silu(self.gate(y)) * self.up(y))


class LlamaModel(nnx.Module):
    def __init__(self, c: dict[str, int], *, rngs: nnx.Rngs):
        dim = c["dim"]
        self.embed = nnx.Embed(c["vocabulary"], dim, rngs=rngs)
        blocks = (LlamaBlock(dim, rngs=rngs) for _ in range(c["depth"]))
        self.blocks = nnx.Sequential(*blocks)
        self.norm = nnx.RMSNorm(dim, rngs=rngs)
        self.head = nnx.Linear(dim, c["vocabulary"], use_bias=False, rngs=rngs)

    def __call__(self, ids: Array) -> Array:
        return self.head(self.norm(self.blocks(self.embed(ids))))


def init_llama(key: Array, size: str) -> Net:
    graph, state = nnx.split(LlamaModel(LLAMA[size], rngs=nnx.Rngs(key)))
    return Net(state, graph)


def llama_batch(key: Array, size: str) -> Array:
    c = LLAMA[size]
    return tokens(key, c["batch"], c["length"] + 1, below=c["vocabulary"])


def llama_loss(net: Net, ids: Array) -> Array:
    model = nnx.merge(net.module, net.params)
    return cross_entropy(model(ids[:, :-1]), ids[:, 1:])


# --------------------------------------------------------------------- BERT (Linen)

BERT = {
    "toy": dict(batch=4, length=20, dim=64, depth=2, vocabulary=80),
    "real": dict(batch=16, length=256, dim=768, depth=2, vocabulary=8192),
}
MASKED = 0  # the token that hides another


class BertLayer(nn.Module):
    @nn.compact
    def __call__(self, x: Array) -> Array:
        def dropout(x):
            return nn.Dropout(0.1, deterministic=False)(x)

        dim = x.shape[-1]
        y = nn.MultiHeadDotProductAttention(
            HEADS, dropout_rate=0.1, deterministic=False
        )(x)
        x = nn.LayerNorm()(x + dropout(y))
        y = nn.Dense(dim)(nn.gelu(nn.Dense(4 * dim)(x)))
        return nn.LayerNorm()(x + dropout(y))


class Bert(nn.Module):
    vocabulary: int
    dim: int
    depth: int

    @nn.compact
    def __call__(self, ids: Array) -> Array:
        embed = nn.Embed(self.vocabulary, self.dim)
        place = self.param("place", nn.initializers.normal(), (ids.shape[1], self.dim))
        x = nn.LayerNorm()(embed(ids) + place)
        x = nn.Dropout(0.1, deterministic=False)(x)
        for _ in range(self.depth):
            x = BertLayer()(x)
        return embed.attend(nn.LayerNorm()(nn.gelu(nn.Dense(self.dim)(x))))


def init_bert(key: Array, size: str) -> Net:
    c = BERT[size]
    ids = jnp.zeros((1, c["length"]), INTEGERS)
    keys = jr.split(key)
    module = Bert(c["vocabulary"], c["dim"], c["depth"])
    return Net(module.init({"params": keys[0], "dropout": keys[1]}, ids), module)


def bert_batch(key: Array, size: str) -> tuple[Array, Array, Array]:
    c = BERT[size]
    keys = jr.split(key, 3)
    ids = tokens(keys[0], c["batch"], c["length"], below=c["vocabulary"])
    return ids, jr.bernoulli(keys[1], 0.15, ids.shape), keys[2]


def bert_loss(net: Net, batch: Any) -> Array:
    ids, hidden, key = batch
    seen = jnp.where(hidden, MASKED, ids)
    logits = net.module.apply(net.params, seen, rngs={"dropout": key})
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, ids)
    return jnp.sum(losses * hidden) / jnp.maximum(jnp.sum(hidden), 1)


# ----------------------------------------------------------------- ConvNeXt (Linen)

CONVNEXT = {
    "toy": dict(batch=4, side=16, widths=(16, 32), depth=1, classes=10),
    "real": dict(batch=64, side=128, widths=(96, 192), depth=2, classes=1000),
}


class ConvNeXtBlock(nn.Module):
    @nn.compact
    def __call__(self, x: Array) -> Array:
        dim = x.shape[-1]
        y = nn.Conv(dim, (7, 7), feature_group_count=dim)(x)
        y = nn.Dense(4 * dim)(nn.LayerNorm(epsilon=1e-6)(y))
        y = nn.Dense(dim)(nn.gelu(y))
        return x + self.param("scale", nn.initializers.constant(0.1), (dim,)) * y


class ConvNeXt(nn.Module):
    widths: tuple[int, ...]
    depth: int
    classes: int

    @nn.compact
    def __call__(self, x: Array) -> Array:
        for i, dim in enumerate(self.widths):
            side = 2 if i else 4
            x = nn.LayerNorm()(x) if i else x
            x = nn.Conv(dim, (side, side), strides=(side, side))(x)
            for _ in range(self.depth):
                x = ConvNeXtBlock()(x)
        return nn.Dense(self.classes)(nn.LayerNorm()(jnp.mean(x, axis=(1, 2))))


def init_convnext(key: Array, size: str) -> Net:
    c = CONVNEXT[size]
    module = ConvNeXt(c["widths"], c["depth"], c["classes"])
    return initialised(module, key, jnp.zeros((1, c["side"], c["side"], 3)))


def images(key: Array, c: dict[str, Any]) -> tuple[Array, Array]:
    keys = jr.split(key)
    x = jr.normal(keys[0], (c["batch"], c["side"], c["side"], 3), jnp.float32)
    return x, tokens(keys[1], c["batch"], below=c["classes"])


def convnext_loss(net: Net, batch: Any) -> Array:
    x, labels = batch
    return cross_entropy(net.module.apply(net.params, x), labels)


# ------------------------------------------------------------------ ResNet (Haiku)

RESNET = {
    "toy": dict(batch=8, side=32, widths=(8, 16, 16, 32), classes=10),
    "real": dict(batch=64, side=128, widths=(64, 128, 256, 512), classes=1000),
}


@functools.cache
def resnet(size: str) -> hk.TransformedWithState:
    def forward(x):
        net = hk.nets.ResNet(
            blocks_per_group=(1, 1, 1, 1),
            num_classes=RESNET[size]["classes"],
            bottleneck=False,
            channels_per_group=RESNET[size]["widths"],
            use_projection=(True, True, True, True),
        )
        return net(x, is_training=True)

    return hk.transform_with_state(forward)


def start_resnet(key: Array, size: str) -> tuple[Any, Any]:
    side = RESNET[size]["side"]
    return resnet(size).init(key, jnp.zeros((1, side, side, 3)))


def init_resnet(key: Array, size: str) -> Net:
    """Past the zeros that branches and logits start from: they stop all gradients."""
    init_key, noise_key = jr.split(key)
    params, _ = start_resnet(init_key, size)
    flat, unravel = ravel_pytree(params)
    noise = 0.02 * jr.normal(noise_key, flat.shape, jnp.float32)
    return Net(unravel(flat + noise), size)


def resnet_batch(key: Array, size: str) -> Any:
    """Moving averages go in and out beside the data; here they go in only."""
    _, state = start_resnet(key, size)
    return state, images(key, RESNET[size])


def resnet_loss(net: Net, batch: Any) -> Array:
    state, (x, labels) = batch
    logits, _ = resnet(net.module).apply(net.params, state, None, x)
    return cross_entropy(logits, labels)


# ------------------------------------------------------------ Mamba-2 (JAX alone)

MAMBA = {
    "toy": dict(batch=2, length=32, dim=32, state=8, depth=2, vocabulary=40),
    "real": dict(batch=4, length=512, dim=512, state=16, depth=2, vocabulary=4096),
}
REACH = 4  # of the convolution along time


def rms_norm(x: Array, scale: Array) -> Array:
    mean = jnp.mean(x**2, axis=-1, keepdims=True)
    return x * lax.rsqrt(mean + 1e-6) * scale


def selective_scan(decay: Array, x: Array) -> Array:
    """`h[t] = decay[t] * h[t - 1] + x[t]` along axis 1, in parallel."""

    def join(left, right):
        return left[0] * right[0], right[0] * left[1] + right[1]

    decay = jnp.broadcast_to(decay, x.shape)
    return lax.associative_scan(join, (decay, x), axis=1)[1]


def mamba_block(p: Params, x: Array) -> Array:
    value, gate = jnp.split(rms_norm(x, p["norm"]) @ p["in"], 2, axis=-1)
    shifts = [jnp.pad(value, ((0, 0), (i, 0), (0, 0))) for i in range(REACH)]
    length = value.shape[1]
    value = sum(y[:, :length] * w for y, w in zip(shifts, p["reach"], strict=True))
    value = jax.nn.silu(value)
    step = jax.nn.softplus(value @ p["step"] + p["step_bias"])  # one for each head
    write, read = value @ p["write"], value @ p["read"]
    heads = value.reshape(*value.shape[:2], HEADS, -1)
    decay = jnp.exp(-step * jnp.exp(p["log_rate"]))[..., None, None]
    added = (step[..., None] * heads)[..., None] * write[:, :, None, None]
    state = selective_scan(decay, added)
    y = jnp.einsum("blhpn,bln->blhp", state, read) + p["skip"][:, None] * heads
    y = rms_norm(y.reshape(value.shape) * jax.nn.silu(gate), p["out_norm"])
    return x + y @ p["out"]


def init_mamba_block(key: Array, dim: int, num_state: int) -> Params:
    keys, inner = jr.split(key, 6), 2 * dim
    return {
        "norm": jnp.ones(dim, jnp.float32),
        "in": normal(keys[0], dim, 2 * inner),
        "reach": normal(keys[1], REACH, inner),
        "step": 0.1 * normal(keys[2], inner, HEADS),
        "step_bias": jnp.linspace(-6.0, -2.0, HEADS, dtype=jnp.float32),
        "write": normal(keys[3], inner, num_state),
        "read": normal(keys[4], inner, num_state),
        "log_rate": jnp.log(jnp.linspace(1.0, 16.0, HEADS, dtype=jnp.float32)),
        "skip": jnp.ones(HEADS, jnp.float32),
        "out_norm": jnp.ones(inner, jnp.float32),
        "out": normal(keys[5], inner, dim),
    }


def init_mamba(key: Array, size: str) -> Params:
    c = MAMBA[size]
    keys = jr.split(key, c["depth"] + 1)
    return {
        "embed": normal(keys[0], c["vocabulary"], c["dim"], fan_in=1),
        "blocks": [init_mamba_block(k, c["dim"], c["state"]) for k in keys[1:]],
        "norm": jnp.ones(c["dim"], jnp.float32),
    }


def mamba_batch(key: Array, size: str) -> Array:
    c = MAMBA[size]
    return tokens(key, c["batch"], c["length"] + 1, below=c["vocabulary"])


def mamba_loss(params: Params, ids: Array) -> Array:
    x = params["embed"][ids[:, :-1]]
    for p in params["blocks"]:
        x = mamba_block(p, x)
    x = rms_norm(x, params["norm"]) / math.sqrt(x.shape[-1])
    return cross_entropy(x @ params["embed"].T, ids[:, 1:])


# ------------------------------------------------------------- masked flow (Haiku)

FLOW = {
    "toy": dict(batch=64, dim=8, hidden=48, depth=3),
    "real": dict(batch=4096, dim=64, hidden=1024, depth=3),
}


class MaskedLinear(hk.Module):
    """A layer whose weights are zero where an output must not see an input."""

    def __init__(self, mask: np.ndarray, name: str | None = None):
        super().__init__(name=name)
        self.mask = mask

    def __call__(self, x: Array) -> Array:
        num_in, num_out = self.mask.shape
        w_init = hk.initializers.RandomNormal(num_in**-0.5)
        w = hk.get_parameter("w", self.mask.shape, init=w_init)
        b = hk.get_parameter("b", [num_out], init=jnp.zeros)
        return x @ (w * self.mask) + b


def autoregressive(x: Array, hidden: int) -> tuple[Array, Array]:
    """Shift and log scale of every number, made of those before it."""
    dim = x.shape[-1]
    places, units = np.arange(dim), np.arange(hidden) % (dim - 1)
    first = (places[:, None] <= units).astype(np.float32)
    inner = (units[:, None] <= units).astype(np.float32)
    last = np.tile(units[:, None] < places, 2).astype(np.float32)
    h = jax.nn.relu(MaskedLinear(first)(x))
    h = jax.nn.relu(MaskedLinear(inner)(h))
    shift, log_scale = jnp.split(MaskedLinear(last)(h), 2, axis=-1)
    return shift, jnp.tanh(log_scale)


@functools.cache
def flow(size: str) -> hk.Transformed:
    def log_prob(x):
        total = jnp.zeros(len(x), x.dtype)
        for _ in range(FLOW[size]["depth"]):
            shift, log_scale = autoregressive(x, FLOW[size]["hidden"])
            x = ((x - shift) * jnp.exp(-log_scale))[:, ::-1]
            total = total - jnp.sum(log_scale, axis=-1)
        normal = -0.5 * (x**2 + math.log(2 * math.pi))
        return total + jnp.sum(normal, axis=-1)

    return hk.without_apply_rng(hk.transform(log_prob))


def init_flow(key: Array, size: str) -> Net:
    return Net(flow(size).init(key, jnp.zeros((1, FLOW[size]["dim"]))), size)


def flow_batch(key: Array, size: str) -> Array:
    return jr.normal(key, (FLOW[size]["batch"], FLOW[size]["dim"]), jnp.float32)


def flow_loss(net: Net, x: Array) -> Array:
    return -jnp.mean(flow(net.module).apply(net.params, x))


# ---------------------------------------------------------- force field (JAX alone)

FORCES = {
    "toy": dict(atoms=12, neighbours=6, dim=32, depth=2, species=4),
    "real": dict(atoms=1024, neighbours=24, dim=128, depth=3, species=16),
}
WAVES = 16  # radial functions
CUTOFF = 5.0


def perceptron(p: Params, x: Array) -> Array:
    return jax.nn.silu(x @ p["up"] + p["bias"]) @ p["down"]


def init_perceptron(key: Array, num_in: int, width: int, num_out: int) -> Params:
    keys = jr.split(key)
    return {
        "up": normal(keys[0], num_in, width),
        "bias": jnp.zeros(width, jnp.float32),
        "down": normal(keys[1], width, num_out),
    }


def pass_messages(
    p: Params, scalars: Array, vectors: Array, wave: Array, unit: Array, edges: Array
) -> tuple[Array, Array]:
    """Scalars and vectors of every atom, changed by those of its neighbours."""
    source, target = edges
    message = perceptron(p["message"], scalars)[source] * (wave @ p["radial"])
    scalar, along, kept = jnp.split(message, 3, axis=-1)
    # Vectors turn as the molecule turns: they are scaled and added up, nothing else.
    vector = along[:, None] * unit[..., None] + kept[:, None] * vectors[source]
    count = len(scalars)
    scalars = scalars + jax.ops.segment_sum(scalar, target, count)
    vectors = vectors + jax.ops.segment_sum(vector, target, count)
    mixed = vectors @ p["mix"]
    length = jnp.sqrt(jnp.sum(mixed**2, axis=1) + 1e-8)
    update = perceptron(p["update"], jnp.concatenate([scalars, length], axis=-1))
    scalar, gate = jnp.split(update, 2, axis=-1)
    return scalars + scalar, vectors + gate[:, None] * mixed


def energy(params: Params, places: Array, species: Array, edges: Array) -> Array:
    source, target = edges
    way = places[source] - places[target]
    distance = jnp.sqrt(jnp.sum(way**2, axis=-1, keepdims=True) + 1e-12)
    frequencies = jnp.arange(1, WAVES + 1) * (math.pi / CUTOFF)
    fade = 0.5 * (1.0 + jnp.cos(math.pi * jnp.minimum(distance / CUTOFF, 1.0)))
    wave = fade * jnp.sin(frequencies * distance) / distance
    scalars = params["embed"][species]
    vectors = jnp.zeros((len(scalars), 3, scalars.shape[-1]), scalars.dtype)
    for p in params["layers"]:
        scalars, vectors = pass_messages(
            p, scalars, vectors, wave, way / distance, edges
        )
    return jnp.sum(perceptron(params["head"], scalars))


def force_loss(params: Params, batch: Any) -> Array:
    """Forces are a gradient, so training takes a gradient of a gradient."""
    places, species, edges, true_energy, true_forces = batch
    value, slope = jax.value_and_grad(energy, argnums=1)(params, places, species, edges)
    of_energy = ((value - true_energy) / len(places)) ** 2
    return of_energy + jnp.mean((true_forces + slope) ** 2)


def init_forces(key: Array, size: str) -> Params:
    c, keys = FORCES[size], jr.split(key, FORCES[size]["depth"] + 2)
    dim = c["dim"]

    def layer(key):
        keys = jr.split(key, 4)
        return {
            "message": init_perceptron(keys[0], dim, dim, 3 * dim),
            "radial": normal(keys[1], WAVES, 3 * dim),
            "mix": normal(keys[2], dim, dim),
            "update": init_perceptron(keys[3], 2 * dim, dim, 2 * dim),
        }

    return {
        "embed": normal(keys[0], c["species"], dim, fan_in=1),
        "layers": [layer(key) for key in keys[2:]],
        "head": init_perceptron(keys[1], dim, dim, 1),
    }


def forces_batch(key: Array, size: str) -> Any:
    """Atoms near the points of a grid, each with its neighbours on a ring."""
    c, keys = FORCES[size], jr.split(key, 4)
    count = c["atoms"]
    side = math.ceil(count ** (1 / 3))
    grid = np.stack(np.meshgrid(*[np.arange(side)] * 3, indexing="ij"), -1)
    grid = grid.reshape(-1, 3)[:count].astype(np.float32)
    places = 1.5 * grid + 0.2 * jr.normal(keys[0], grid.shape, jnp.float32)
    near = ((grid[:, None] - grid) ** 2).sum(-1)
    near = np.argsort(near, axis=1, kind="stable")[:, 1 : 1 + c["neighbours"]]
    target = np.repeat(np.arange(count), c["neighbours"])
    edges = jnp.asarray(np.stack([near.ravel(), target]), INTEGERS)
    species = tokens(keys[1], count, below=c["species"])
    true_forces = jr.normal(keys[2], places.shape, jnp.float32)
    return places, species, edges, jr.normal(keys[3], (), jnp.float32), true_forces


# --------------------------------------------------------- speech, GRU and CTC (Linen)

SPEECH = {
    "toy": dict(batch=3, length=24, dim=16, hidden=32, labels=6, letters=12),
    "real": dict(batch=32, length=512, dim=80, hidden=512, labels=64, letters=64),
}


class Listener(nn.Module):
    hidden: int
    letters: int

    @nn.compact
    def __call__(self, x: Array) -> Array:
        x = nn.relu(nn.Conv(self.hidden, (5,), strides=(2,))(x))
        forward, backward = (nn.RNN(nn.GRUCell(self.hidden)) for _ in range(2))
        x = nn.LayerNorm()(nn.Bidirectional(forward, backward)(x))
        return nn.Dense(self.letters)(x)


def init_speech(key: Array, size: str) -> Net:
    c = SPEECH[size]
    module = Listener(c["hidden"], c["letters"])
    return initialised(module, key, jnp.zeros((1, c["length"], c["dim"])))


def speech_batch(key: Array, size: str) -> tuple[Array, Array]:
    c, keys = SPEECH[size], jr.split(key)
    x = jr.normal(keys[0], (c["batch"], c["length"], c["dim"]), jnp.float32)
    labels = tokens(keys[1], c["batch"], c["labels"], below=c["letters"] - 1)
    return x, labels + 1  # 0 is the blank


def speech_loss(net: Net, batch: Any) -> Array:
    x, labels = batch
    logits = net.module.apply(net.params, x)
    padding = jnp.zeros(logits.shape[:2], jnp.float32)
    none = jnp.zeros(labels.shape, jnp.float32)
    return jnp.mean(optax.ctc_loss(logits, padding, labels, none)) / labels.shape[1]


# ------------------------------------------------------------ diffusion U-Net (Linen)

UNET = {
    "toy": dict(batch=4, side=8, width=16),
    "real": dict(batch=32, side=64, width=128),
}


class UNetBlock(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x: Array, time: Array) -> Array:
        y = nn.Conv(self.width, (3, 3))(nn.swish(nn.GroupNorm(8)(x)))
        y = y + nn.Dense(self.width)(nn.swish(time))[:, None, None]
        y = nn.Conv(self.width, (3, 3))(nn.swish(nn.GroupNorm(8)(y)))
        return y + (x if x.shape == y.shape else nn.Conv(self.width, (1, 1))(x))


class UNet(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x: Array, level: Array) -> Array:
        angles = level[:, None] * 2.0 ** jnp.arange(8)
        time = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)
        time = nn.Dense(2 * self.width)(nn.swish(nn.Dense(2 * self.width)(time)))
        fine = UNetBlock(self.width)(nn.Conv(self.width, (3, 3))(x), time)
        coarse = nn.Conv(2 * self.width, (3, 3), strides=(2, 2))(fine)
        coarse = UNetBlock(2 * self.width)(coarse, time)
        batch, height, width, _ = fine.shape
        raised = jax.image.resize(
            coarse, (batch, height, width, 2 * self.width), "nearest"
        )
        y = UNetBlock(self.width)(jnp.concatenate([fine, raised], axis=-1), time)
        return nn.Conv(x.shape[-1], (3, 3))(nn.swish(nn.GroupNorm(8)(y)))


def init_unet(key: Array, size: str) -> Net:
    x = jnp.zeros((1, UNET[size]["side"], UNET[size]["side"], 3))
    return initialised(UNet(UNET[size]["width"]), key, x, jnp.zeros(1))


def unet_batch(key: Array, size: str) -> tuple[Array, Array]:
    c, keys = UNET[size], jr.split(key)
    shape = (c["batch"], c["side"], c["side"], 3)
    return jr.normal(keys[0], shape, jnp.float32), keys[1]


def unet_loss(net: Net, batch: Any) -> Array:
    """The noise is to be told from a noisy image and how noisy it is."""
    x, key = batch
    level_key, noise_key = jr.split(key)
    level = jr.uniform(level_key, x.shape[:1], jnp.float32)
    noise = jr.normal(noise_key, x.shape, jnp.float32)
    angle = (math.pi / 2) * level[:, None, None, None]
    noisy = jnp.cos(angle) * x + jnp.sin(angle) * noise
    return jnp.mean((net.module.apply(net.params, noisy, level) - noise) ** 2)


# ---------------------------------------------------- mixture of experts (JAX alone)

EXPERTS = {
    "toy": dict(tokens=64, dim=32, experts=4, depth=2, classes=10),
    "real": dict(tokens=4096, dim=512, experts=8, depth=2, classes=1000),
}
CHOSEN = 2  # experts for each token
ROOM = 1.25  # for more tokens than an expert would get if all got as many


def expert_layer(p: Params, x: Array) -> tuple[Array, Array]:
    """Each token's best experts, and how far their load is from even.

    A token for which an expert has no room left is passed on as it is."""
    count, num_experts = len(x), p["router"].shape[-1]
    room = int(ROOM * CHOSEN * count / num_experts)
    shares = jax.nn.softmax(x @ p["router"])
    best, experts = lax.top_k(shares, CHOSEN)
    best = best / jnp.sum(best, axis=-1, keepdims=True)
    picks = jax.nn.one_hot(experts, num_experts, dtype=INTEGERS)
    places = jnp.cumsum(picks.reshape(-1, num_experts), axis=0).reshape(picks.shape)
    slots = jax.nn.one_hot(jnp.sum(picks * places, axis=-1) - 1, room)
    picks = picks.astype(x.dtype)
    give = jnp.einsum("tke,tkr->ter", picks, slots)
    take = jnp.einsum("tke,tkr,tk->ter", picks, slots, best)
    inside = jnp.einsum("ter,td->erd", give, rms_norm(x, p["norm"]))
    hidden = jax.nn.gelu(jnp.einsum("erd,edf->erf", inside, p["up"]))
    outside = jnp.einsum("erf,efd->erd", hidden, p["down"])
    load = jnp.mean(picks[:, 0], axis=0) * jnp.mean(shares, axis=0)
    return x + jnp.einsum("ter,erd->td", take, outside), num_experts * jnp.sum(load)


def init_experts(key: Array, size: str) -> Params:
    c, keys = EXPERTS[size], jr.split(key, EXPERTS[size]["depth"] + 1)
    dim, num_experts = c["dim"], c["experts"]

    def layer(key):
        keys = jr.split(key, 3)
        return {
            "norm": jnp.ones(dim, jnp.float32),
            "router": normal(keys[0], dim, num_experts),
            "up": normal(keys[1], num_experts, dim, 2 * dim, fan_in=dim),
            "down": normal(keys[2], num_experts, 2 * dim, dim, fan_in=2 * dim),
        }

    head = normal(keys[0], dim, c["classes"])
    return {"layers": [layer(key) for key in keys[1:]], "head": head}


def experts_batch(key: Array, size: str) -> tuple[Array, Array]:
    c, keys = EXPERTS[size], jr.split(key)
    x = jr.normal(keys[0], (c["tokens"], c["dim"]), jnp.float32)
    return x, tokens(keys[1], c["tokens"], below=c["classes"])


def experts_loss(params: Params, batch: Any) -> Array:
    x, labels = batch
    uneven = 0.0
    for p in params["layers"]:
        x, load = expert_layer(p, x)
        uneven = uneven + load
    return cross_entropy(x @ params["head"], labels) + 0.01 * uneven


# ------------------------------------------------------------------------- the table


def of_images(c: dict[str, Any]) -> Callable[[Array, str], Any]:
    return lambda key, size: images(key, c[size])


ZOO = {
    model.name: model
    for model in (
        Model("GPT-2 (Equinox)", gpt2_loss, init_gpt2, gpt2_batch),
        Model("Llama (NNX)", llama_loss, init_llama, llama_batch),
        Model("BERT (Linen)", bert_loss, init_bert, bert_batch),
        Model("ConvNeXt (Linen)", convnext_loss, init_convnext, of_images(CONVNEXT)),
        Model("ResNet (Haiku)", resnet_loss, init_resnet, resnet_batch),
        Model("Mamba-2", mamba_loss, init_mamba, mamba_batch),
        Model("masked flow (Haiku)", flow_loss, init_flow, flow_batch),
        Model("force field", force_loss, init_forces, forces_batch),
        Model("speech (Linen)", speech_loss, init_speech, speech_batch),
        Model("U-Net (Linen)", unet_loss, init_unet, unet_batch),
        Model("experts", experts_loss, init_experts, experts_batch),
    )
}
