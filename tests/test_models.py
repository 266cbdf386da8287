"""Models of real packages, unchanged: nearly all of their contractions become low.

Each model is a training step as its package teaches it, written once; amp is put around
its loss function. What is counted is the whole program, forward and backward, loops as
often as they run."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax import lax

from benchmarks.measure import contraction_flops
from jaxamp_like import amp

from .constructs import identity

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


class Step(NamedTuple):
    """A training step `run(*args) -> (loss, grads, state)`.

    `changed` finds, in the arguments and in what came out, state that every step must
    change: a model whose mutation is lost runs without an error."""

    run: Callable[..., tuple[jax.Array, Any, Any]]
    args: tuple[Any, ...]
    changed: Callable[[Any], list[Any]] = lambda state: []
    state: Any = None


def data(seed: int, *shape: int) -> jax.Array:
    return jr.normal(jr.key(seed), shape)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def quick(fn: Callable[..., Any]) -> Any:
    """Compiled without optimisation, which takes most of a test's time."""
    return jax.jit(fn, compiler_options={"xla_backend_optimization_level": 0})


@functools.cache
def initial(model: Any, *shape: int, **static: Any) -> Any:
    """What a Linen module or a Haiku transform starts from, for inputs of a shape."""
    integers = isinstance(model, Transformer)
    inputs = jnp.zeros(shape, jnp.int32 if integers else jnp.float32)
    return quick(functools.partial(model.init, **static))(jr.key(0), inputs)


# Equinox.


def equinox_mlp(wrap: Wrap) -> Step:
    model = eqx.nn.MLP(8, 4, width_size=32, depth=3, key=jr.key(0))
    params, static = eqx.partition(model, eqx.is_inexact_array)

    @wrap
    def loss(model, x, labels):
        return cross_entropy(jax.vmap(model)(x), labels)

    def run(params, x, labels):
        model = eqx.combine(params, static)
        value, grads = eqx.filter_value_and_grad(loss)(model, x, labels)
        return value, grads, None

    return Step(run, (params, data(1, 16, 8), jnp.arange(16) % 4))


class AttentionBlock(eqx.Module):
    attention: eqx.nn.MultiheadAttention
    norms: list[eqx.nn.LayerNorm]
    dropout: eqx.nn.Dropout
    mlp: eqx.nn.MLP

    def __init__(self, width, heads, *, key):
        keys = jr.split(key)
        self.attention = eqx.nn.MultiheadAttention(
            heads, width, use_query_bias=True, dropout_p=0.1, key=keys[0]
        )
        self.norms = [eqx.nn.LayerNorm(width) for _ in range(2)]
        self.dropout = eqx.nn.Dropout(0.1)
        self.mlp = eqx.nn.MLP(
            width, width, 2 * width, depth=1, activation=jax.nn.gelu, key=keys[1]
        )

    def __call__(self, x, *, key):
        keys = jr.split(key)
        mask = jnp.tril(jnp.ones((len(x), len(x)), bool))
        h = jax.vmap(self.norms[0])(x)
        x = x + self.attention(h, h, h, mask=mask, key=keys[0])
        h = jax.vmap(self.mlp)(jax.vmap(self.norms[1])(x))
        return x + self.dropout(h, key=keys[1])


def equinox_attention(wrap: Wrap) -> Step:
    model = AttentionBlock(16, 2, key=jr.key(0))
    params, static = eqx.partition(model, eqx.is_inexact_array)

    @wrap
    def loss(model, x, y, key):
        keys = jr.split(key, len(x))
        out = jax.vmap(lambda x, key: model(x, key=key))(x, keys)
        return jnp.mean((out - y) ** 2)

    def run(params, x, y, key):
        model = eqx.combine(params, static)
        value, grads = eqx.filter_value_and_grad(loss)(model, x, y, key)
        return value, grads, None

    x, y = data(1, 4, 6, 16), data(2, 4, 6, 16)
    return Step(run, (params, x, y, jr.key(3)))


class ConvNet(eqx.Module):
    conv: eqx.nn.Conv2d
    norm: eqx.nn.BatchNorm
    head: eqx.nn.Linear

    def __init__(self, *, key):
        keys = jr.split(key)
        self.conv = eqx.nn.Conv2d(3, 16, 3, padding=1, key=keys[0])
        self.norm = eqx.nn.BatchNorm(16, axis_name="batch", mode="batch")
        self.head = eqx.nn.Linear(16, 10, key=keys[1])

    def __call__(self, x, state):
        h, state = self.norm(self.conv(x), state)
        return self.head(jnp.mean(jax.nn.relu(h), axis=(1, 2))), state


def equinox_batch_norm(wrap: Wrap) -> Step:
    """State is passed in and out, and amp'd code sits under the filtered transforms."""
    model, state = eqx.nn.make_with_state(ConvNet)(key=jr.key(0))
    params, static = eqx.partition(model, eqx.is_inexact_array)

    @wrap
    def loss(model, state, x, labels):
        batched = eqx.filter_vmap(
            model, axis_name="batch", in_axes=(0, None), out_axes=(0, None)
        )
        logits, state = batched(x, state)
        return cross_entropy(logits, labels), state

    @eqx.filter_jit
    def run(params, state, x, labels):
        model = eqx.combine(params, static)
        (value, state), grads = eqx.filter_value_and_grad(loss, has_aux=True)(
            model, state, x, labels
        )
        return value, grads, state

    def running_statistics(state):
        return [x for x in jax.tree.leaves(state) if jnp.ndim(x) == 1]

    args = (params, state, data(1, 8, 3, 8, 8), jnp.arange(8))
    return Step(run, args, running_statistics, state)


# Flax Linen.


class Recurrent(linen.Module):
    @linen.compact
    def __call__(self, x, *, train):
        x = linen.Dense(16)(x)
        x = linen.BatchNorm(use_running_average=not train)(x)
        x = linen.RNN(linen.OptimizedLSTMCell(16))(x)
        x = linen.RNN(linen.GRUCell(16), reverse=True, keep_order=True)(x)
        return linen.Dense(5)(x[:, -1])


def linen_recurrent(wrap: Wrap) -> Step:
    """Scans of cells between layers whose collections change."""
    model = Recurrent()
    x, labels = data(1, 4, 12, 8), jnp.arange(4)
    variables = initial(model, *x.shape, train=False)

    @wrap
    def loss(params, statistics, x, labels):
        logits, updated = model.apply(
            {"params": params, "batch_stats": statistics},
            x,
            train=True,
            mutable=["batch_stats"],
        )
        return cross_entropy(logits, labels), updated["batch_stats"]

    def run(params, statistics, x, labels):
        grad = jax.value_and_grad(loss, has_aux=True)
        (value, statistics), grads = grad(params, statistics, x, labels)
        return value, grads, statistics

    statistics = variables["batch_stats"]
    args = (variables["params"], statistics, x, labels)
    return Step(run, args, jax.tree.leaves, statistics)


class Layer(linen.Module):
    @linen.compact
    def __call__(self, x, mask):
        h = linen.LayerNorm()(x)
        x = x + linen.MultiHeadDotProductAttention(
            2, dropout_rate=0.1, deterministic=False
        )(h, mask=mask)
        h = linen.Dense(32)(linen.LayerNorm()(x))
        h = linen.Dropout(0.1, deterministic=False)(linen.gelu(h))
        return x + linen.Dense(16)(h), None


class Transformer(linen.Module):
    @linen.compact
    def __call__(self, tokens):
        embed = linen.Embed(11, 16)
        mask = linen.make_causal_mask(tokens)
        layers = linen.scan(
            linen.remat(Layer, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            in_axes=linen.broadcast,
            length=3,
        )
        x, _ = layers(name="layers")(embed(tokens), mask)
        return embed.attend(linen.LayerNorm()(x))


def linen_transformer(wrap: Wrap) -> Step:
    """Lifted scan of a lifted remat, with tied embeddings."""
    model = Transformer()
    tokens = jr.randint(jr.key(1), (4, 9), 0, 11)
    params = initial(model, 4, 8)

    @wrap
    def loss(params, tokens, key):
        logits = model.apply(params, tokens[:, :-1], rngs={"dropout": key})
        return cross_entropy(logits, tokens[:, 1:])

    def run(params, tokens, key):
        value, grads = jax.value_and_grad(loss)(params, tokens, key)
        return value, grads, None

    return Step(run, (params, tokens, jr.key(3)))


# Flax NNX.


class Block(nnx.Module):
    def __init__(self, width, *, rngs):
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            num_heads=2, in_features=width, decode=False, rngs=rngs
        )
        self.batch_norm = nnx.BatchNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 2 * width, rngs=rngs)
        self.down = nnx.Linear(2 * width, width, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm(x))
        h = self.down(nnx.gelu(self.up(self.batch_norm(x))))
        return x + self.dropout(h)


def nnx_block(wrap: Wrap) -> Step:
    """The module is an argument, and a call changes it: statistics, dropout's count."""
    graph, variables = nnx.split(Block(16, rngs=nnx.Rngs(0)))

    @wrap
    def loss(model, x, y):
        return jnp.mean((model(x) - y) ** 2)

    def run(variables, x, y):
        model = nnx.merge(graph, variables)
        value, grads = nnx.value_and_grad(loss)(model, x, y)
        return value, grads, nnx.state(model, nnx.Not(nnx.Param))

    def counts_and_statistics(state):
        pure = nnx.to_pure_dict(state)
        return [
            pure["batch_norm"]["mean"],
            pure["batch_norm"]["var"],
            pure["dropout"]["rngs"]["count"],
        ]

    args = (variables, data(1, 4, 6, 16), data(2, 4, 6, 16))
    return Step(run, args, counts_and_statistics, variables)


# Haiku.


@hk.transform_with_state
def shallow_resnet(images):
    net = hk.nets.ResNet(
        blocks_per_group=(1, 1, 1, 1),
        num_classes=10,
        bottleneck=False,
        channels_per_group=(8, 16, 16, 32),
        use_projection=(True, True, True, True),
    )
    return net(images, is_training=True)


@hk.transform_with_state
def resnet18(images):
    return hk.nets.ResNet18(10, resnet_v2=True)(images, is_training=True)


def haiku_step(model: Any, wrap: Wrap) -> Step:
    images, labels = data(1, 16, 32, 32, 3), jnp.arange(16) % 10
    params, state = initial(model, *images.shape)
    # Haiku starts the last layer at zero, through which no gradient passes.
    (name,) = (name for name in params if name.endswith("/logits"))
    shape = params[name]["w"].shape
    params = params | {name: params[name] | {"w": 0.02 * data(2, *shape)}}

    @wrap
    def loss(params, state, images, labels):
        logits, state = model.apply(params, state, None, images)
        return cross_entropy(logits, labels), state

    def run(params, state, images, labels):
        grad = jax.value_and_grad(loss, has_aux=True)
        (value, state), grads = grad(params, state, images, labels)
        return value, grads, state

    def counters(state):
        return [leaves["counter"] for leaves in state.values() if "counter" in leaves]

    return Step(run, (params, state, images, labels), counters, state)


def haiku_resnet(wrap: Wrap) -> Step:
    """A shallow ResNet, the ten layers of which are few enough for bfloat16.

    A rounding flips the sign before a ReLU for one unit in a hundred in each layer. At
    random weights that turns the gradient of these ten layers by a cosine of 0.984, and
    that of eighteen by 0.95, if nothing but the operands and results of convolutions
    and their cotangents are rounded to bfloat16."""
    return haiku_step(shallow_resnet, wrap)


@hk.transform
def lstm(x):
    core = hk.LSTM(16)
    out, _ = hk.dynamic_unroll(core, x, core.initial_state(x.shape[1]))
    return hk.Linear(4)(hk.LayerNorm(-1, True, True)(out[-1]))


def haiku_lstm(wrap: Wrap) -> Step:
    x, labels = data(1, 12, 4, 8), jnp.arange(4)
    params = initial(lstm, *x.shape)

    @wrap
    def loss(params, x, labels):
        return cross_entropy(lstm.apply(params, None, x), labels)

    def run(params, x, labels):
        value, grads = jax.value_and_grad(loss)(params, x, labels)
        return value, grads, None

    return Step(run, (params, x, labels))


# JAX alone.


def checkpointed_scan(wrap: Wrap) -> Step:
    params = {
        "up": data(0, 6, 16, 32) / 4,
        "down": data(1, 6, 32, 16) / 16,
        "scale": jnp.ones((6, 16)),
    }

    @jax.checkpoint
    def layer(x, params):
        centred = x - x.mean(-1, keepdims=True)
        normed = centred * lax.rsqrt(jnp.mean(centred**2, -1, keepdims=True) + 1e-5)
        hidden = jax.nn.gelu(params["scale"] * normed @ params["up"])
        return x + hidden @ params["down"], None

    @wrap
    def loss(params, x, y):
        whole = jax.checkpoint(lambda x, params: lax.scan(layer, x, params)[0])
        return jnp.mean((whole(x, params) - y) ** 2)

    def run(params, x, y):
        value, grads = jax.value_and_grad(loss)(params, x, y)
        return value, grads, None

    return Step(run, (params, data(2, 8, 16), data(3, 8, 16)))


MODELS = (
    equinox_mlp,
    equinox_attention,
    equinox_batch_norm,
    linen_recurrent,
    linen_transformer,
    nnx_block,
    haiku_resnet,
    haiku_lstm,
    checkpointed_scan,
)


def floats(tree: Any) -> list[np.ndarray]:
    leaves = [x for x in jax.tree.leaves(tree) if eqx.is_inexact_array(x)]
    return [np.asarray(x, np.float64) for x in leaves]


def cosine_similarity(a: Any, b: Any) -> float:
    a, b = (np.concatenate([x.ravel() for x in floats(tree)]) for tree in (a, b))
    return float(a @ b / np.sqrt((a @ a) * (b @ b)))


def signature(tree: Any) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(x.shape, x.dtype) for x in leaves]


@functools.cache
def as_written(model: Callable[[Wrap], Step]) -> Any:
    run, args, *_ = model(identity)
    return quick(run)(*args)


@pytest.mark.sample(4)
@pytest.mark.cross("model", dtype=2)
@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_models_run_unchanged(model, dtype):
    run, args, changed, old_state = model(functools.partial(amp, compute_dtype=dtype))
    traced = quick(run).trace(*args)
    flops = contraction_flops(traced.jaxpr)
    assert flops[dtype] >= 0.95 * sum(flops.values()), flops

    value, grads, state = traced.lower().compile()(*args)
    true_value, true_grads, true_state = as_written(model)
    assert signature((value, grads, state)) == signature(as_written(model))
    eps = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(value, true_value, rtol=16 * eps)
    flips = model is haiku_resnet and dtype == "bfloat16"
    assert cosine_similarity(grads, true_grads) > (0.98 if flips else 0.99)

    # Statistics are means over a batch of what a few layers made.
    for a, b in zip(floats(state), floats(true_state), strict=True):
        assert np.max(np.abs(a - b), initial=0) <= 16 * eps * max(1, np.abs(b).max())
    for old, new in zip(changed(old_state), changed(state), strict=True):
        assert not np.array_equal(old, new)


@pytest.mark.rest
def test_resnet18_is_low_throughout():
    """Traced only: to compile it takes as long as all the other models."""
    jaxprs = {}
    for wrap in (identity, amp):
        run, args, *_ = haiku_step(resnet18, wrap)
        jaxprs[wrap], out = jax.make_jaxpr(run, return_shape=True)(*args)
        assert signature(out[1]) == signature(args[0])
    written, flops = (contraction_flops(jaxpr) for jaxpr in jaxprs.values())
    assert flops["float16"] >= 0.95 * flops.total()
    assert flops.total() == written.total()


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "model",
    (equinox_batch_norm, linen_recurrent, nnx_block, checkpointed_scan),
    ids=lambda model: model.__name__,
)
def test_a_policy_that_changes_nothing(model):
    run, args, *_ = model(functools.partial(amp, amp_policy={}))
    actual = quick(run)(*args)
    for a, b in zip(floats(actual), floats(as_written(model)), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.sample(2)
@pytest.mark.parametrize("transform", (nnx.jit, identity), ids=("jit", "eager"))
def test_a_module_that_changes_is_changed_in_place(transform):
    """As a user calls it: no split and no merge."""

    def loss(model, x):
        return jnp.mean(model(x) ** 2)

    step = transform(nnx.value_and_grad(amp(loss)))
    model, x = Block(16, rngs=nnx.Rngs(0)), data(1, 4, 6, 16)
    mean, count = model.batch_norm.mean[...], model.dropout.rngs.count[...]
    step(model, x)
    step(model, x)
    assert not np.array_equal(model.batch_norm.mean[...], mean)
    assert model.batch_norm.mean[...].dtype == jnp.float32
    assert model.dropout.rngs.count[...] == count + 2
