"""Models to measure, each written once and told in three styles.

A `Style` says what a careful author would add by hand to the float32 code: casts before
contractions, float32 between them, and in the lean version a `jax.checkpoint` around
what is cheap to recompute. The float32 style adds nothing, so that what `amp` receives
is the code that a user writes; no framework stands between."""

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike

Params = dict[str, Any]
Loss = Callable[[Any, Any], Array]

# The same at every size, so that a loss needs no configuration beside its parameters.
HEADS = 8
PATCH = 4


@dataclass(frozen=True)
class Style:
    """What an author adds to float32 code to make it mixed precision.

    Args:
        dtype: the low precision; None is the float32 style, in which every method hands
            back what it was given.
        lean: recompute what is cheap in the backward pass instead of saving what it
            holds."""

    dtype: DTypeLike | None = None
    lean: bool = False

    def _to(self, dtype: DTypeLike, tree: Any) -> Any:
        def cast(x):
            is_float = jnp.issubdtype(x.dtype, jnp.floating)
            return x.astype(dtype) if is_float else x

        return tree if self.dtype is None else jax.tree.map(cast, tree)

    def low(self, tree: Any) -> Any:
        return self._to(self.dtype or jnp.float32, tree)

    def full(self, tree: Any) -> Any:
        return self._to(jnp.float32, tree)

    def spread(self, bias: Array, like: Array) -> Array:
        """A low copy of `bias`, cast after the fan-out.

        The gradient of a bias is a sum over all rows; a cast before the broadcast would
        make that sum accumulate in 16 bits."""
        if self.dtype is None:
            return bias
        return self.low(jnp.broadcast_to(bias, like.shape))

    def cheap(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Marks what costs less to recompute than to keep."""
        return jax.checkpoint(fn) if self.lean else fn

    def in_full(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Runs `fn` in full between low neighbours."""
        if self.dtype is None:
            return fn
        return self.cheap(lambda *args: self.low(fn(*self.full(args))))


FLOAT32 = Style()


@dataclass(frozen=True)
class Model:
    """A model with its loss, in float32.

    Args:
        name: what tables call it.
        loss: `loss(params, batch)` as a user writes it.
        init: `init(key, size)` gives the parameters; sizes are "toy" and "real", for
            the transformers here also "moderate".
        batch: `batch(key, size)` gives random data."""

    name: str
    loss: Loss
    init: Callable[[Array, str], Any]
    batch: Callable[[Array, str], Any]

    def shapes(self, size: str) -> tuple[Any, Any]:
        """Parameters and batch as shapes, for tracing what would not fit or not run."""

        def draw(key):
            return self.init(key, size), self.batch(key, size)

        return jax.eval_shape(draw, jr.key(0))


@dataclass(frozen=True)
class Workload(Model):
    """A model as an expert would write it, too.

    Args:
        hand: given a dtype, the loss in mixed precision by hand: contractions,
            activations and residual stream low; norm, softmax, gates and loss full.
        lean: given a dtype, the same with `jax.checkpoint` around norm, softmax,
            activation, gates and loss; None where there is little to gain, or where the
            model checkpoints whole blocks.
        styled: the loss in any style."""

    hand: Callable[[DTypeLike], Loss]
    lean: Callable[[DTypeLike], Loss] | None
    styled: Callable[[Style], Loss]


# ---------------------------------------------------------------------------- layers


def layer_norm(x: Array, p: Params) -> Array:
    mean = jnp.mean(x, axis=-1, keepdims=True)
    var = jnp.var(x, axis=-1, keepdims=True)
    return (x - mean) * lax.rsqrt(var + 1e-5) * p["scale"] + p["bias"]


def batch_norm(x: Array, p: Params) -> Array:
    mean = jnp.mean(x, axis=(0, 1, 2))
    var = jnp.var(x, axis=(0, 1, 2))
    return (x - mean) / jnp.sqrt(var + 1e-5) * p["scale"] + p["bias"]


def cross_entropy(logits: Array, labels: Array) -> Array:
    log_probs = jax.nn.log_softmax(logits)
    return -jnp.mean(jnp.take_along_axis(log_probs, labels[..., None], axis=-1))


def dense(style: Style, p: Params, x: Array) -> Array:
    y = x @ style.low(p["w"])
    return y + style.spread(p["b"], y)


def loss_of(style: Style, logits: Array, labels: Array) -> Array:
    """The loss and its result, both in full."""
    fn = style.cheap(lambda logits: cross_entropy(style.full(logits), labels))
    return fn(logits)


def normal(key: Array, *shape: int, fan_in: int | None = None) -> Array:
    # The dtype is spelled out because a reference may be computed with x64 on.
    return jr.normal(key, shape, jnp.float32) / math.sqrt(fan_in or shape[0])


def init_dense(key: Array, num_in: int, num_out: int) -> Params:
    w_key, b_key = jr.split(key)
    return {
        "w": normal(w_key, num_in, num_out),
        "b": 0.1 * normal(b_key, num_out, fan_in=1),
    }


def init_norm(dim: int) -> Params:
    return {
        "scale": jnp.ones(dim, jnp.float32),
        "bias": jnp.zeros(dim, jnp.float32),
    }


# ------------------------------------------------------------------------------- MLP


def mlp(style: Style, params: Params, batch: Any) -> Array:
    x, labels = batch
    x = style.low(x)
    for p in params["hidden"]:
        x = style.cheap(jax.nn.gelu)(dense(style, p, x))
    return loss_of(style, dense(style, params["out"], x), labels)


MLP_SIZES = {
    "toy": dict(batch=32, num_in=24, hidden=48, depth=3, classes=10),
    "real": dict(batch=4096, num_in=1024, hidden=2048, depth=4, classes=1000),
}


def init_mlp(key: Array, size: str) -> Params:
    c = MLP_SIZES[size]
    widths = [c["num_in"], *[c["hidden"]] * c["depth"]]
    keys = jr.split(key, c["depth"] + 1)
    hidden = [init_dense(keys[i], *widths[i : i + 2]) for i in range(c["depth"])]
    return {"hidden": hidden, "out": init_dense(keys[-1], c["hidden"], c["classes"])}


def mlp_batch(key: Array, size: str) -> tuple[Array, Array]:
    c = MLP_SIZES[size]
    x_key, y_key = jr.split(key)
    x = jr.normal(x_key, (c["batch"], c["num_in"]), jnp.float32)
    return x, jr.randint(y_key, (c["batch"],), 0, c["classes"], jnp.int32)


# ---------------------------------------------------------------------- transformers


@dataclass(frozen=True)
class Attention:
    """How a block attends: behind which mask, and with which rotary tables."""

    mask_value: float | None = None
    rope: tuple[np.ndarray, np.ndarray] | None = None

    def weights(self, scores: Array, head_dim: int) -> Array:
        scores = scores / math.sqrt(head_dim)
        if self.mask_value is not None:
            causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
            scores = jnp.where(causal, scores, self.mask_value)
        return jax.nn.softmax(scores, axis=-1)


def rope_tables(length: int, head_dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines as NumPy constants, the way models keep them."""
    frequencies = 10000.0 ** (-np.arange(0, head_dim, 2) / head_dim)
    angles = np.arange(length)[:, None, None] * frequencies
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def rotate(x: Array, cos: np.ndarray, sin: np.ndarray) -> Array:
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def attend(style: Style, attention: Attention, p: Params, x: Array) -> Array:
    batch, length, dim = x.shape
    qkv = dense(style, p["qkv"], x).reshape(batch, length, 3, HEADS, dim // HEADS)
    q, k, v = (qkv[:, :, i] for i in range(3))
    if attention.rope is not None:
        # Linear, with constants: nothing to save, so no need of a region.
        q, k = (style.low(rotate(style.full(y), *attention.rope)) for y in (q, k))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    weights = style.in_full(partial(attention.weights, head_dim=dim // HEADS))(scores)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
    return dense(style, p["mix"], mixed.reshape(batch, length, dim))


def block(style: Style, attention: Attention, p: Params, x: Array) -> Array:
    x = x + attend(style, attention, p, style.in_full(layer_norm)(x, p["norm1"]))
    hidden = dense(style, p["up"], style.in_full(layer_norm)(x, p["norm2"]))
    return x + dense(style, p["down"], style.cheap(jax.nn.gelu)(hidden))


def init_block(key: Array, dim: int) -> Params:
    keys = jr.split(key, 4)
    return {
        "norm1": init_norm(dim),
        "qkv": init_dense(keys[0], dim, 3 * dim),
        "mix": init_dense(keys[1], dim, dim),
        "norm2": init_norm(dim),
        "up": init_dense(keys[2], dim, 4 * dim),
        "down": init_dense(keys[3], 4 * dim, dim),
    }


def init_blocks(
    key: Array,
    depth: int,
    dim: int,
    stacked: bool = False,
    init: Callable[[Array, int], Params] = init_block,
) -> Any:
    blocks = [init(k, dim) for k in jr.split(key, depth)]
    return jax.tree.map(lambda *xs: jnp.stack(xs), *blocks) if stacked else blocks


def run_blocks(
    fn: Callable[[Params, Array], Array],
    blocks: Any,
    x: Array,
    scoped: bool = False,
) -> Array:
    """Applies the blocks one after the other: a list unrolled, a stack by a scan.

    Those of a list may have scopes: "block_0" and so on."""
    if isinstance(blocks, list):
        for i, p in enumerate(blocks):
            with jax.named_scope(f"block_{i}") if scoped else nullcontext():
                x = fn(p, x)
        return x
    return lax.scan(lambda x, p: (fn(p, x), None), x, blocks)[0]


def gpt(
    style: Style,
    params: Params,
    tokens: Array,
    *,
    rope: bool = False,
    remat: bool = False,
    scoped: bool = False,
) -> Array:
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    x = params["embed"][inputs]
    length, dim = x.shape[1:]
    if rope:
        attention = Attention(-jnp.inf, rope_tables(length, dim // HEADS))
    else:
        attention = Attention(-1e9)
        x = x + params["position"][:length]
    # Cast after the lookup and the broadcast: both sum their gradients.
    x = style.low(x)
    fn = partial(block, style, attention)
    x = run_blocks(jax.checkpoint(fn) if remat else fn, params["blocks"], x, scoped)
    x = style.in_full(layer_norm)(x, params["norm"])
    return loss_of(style, x @ style.low(params["head"]), targets)


GPT_SIZES = {
    "toy": dict(batch=3, length=24, dim=64, depth=2, vocabulary=80),
    # For step times on a CPU: as many operations for each parameter as a GPU sees.
    "moderate": dict(batch=8, length=128, dim=256, depth=2, vocabulary=2048),
    "real": dict(batch=8, length=512, dim=512, depth=4, vocabulary=8192),
}


def init_gpt(
    key: Array,
    size: str,
    *,
    rope: bool = False,
    stacked: bool = False,
    vocabularies: int = 1,
) -> Params:
    c = GPT_SIZES[size]
    vocabulary = c["vocabulary"] * vocabularies
    keys = jr.split(key, 4)
    params = {
        "embed": normal(keys[0], vocabulary, c["dim"], fan_in=1),
        "blocks": init_blocks(keys[1], c["depth"], c["dim"], stacked),
        "norm": init_norm(c["dim"]),
        "head": normal(keys[2], c["dim"], vocabulary),
    }
    if not rope:
        params["position"] = 0.1 * normal(keys[3], c["length"], c["dim"], fan_in=1)
    return params


def gpt_batch(key: Array, size: str, *, vocabularies: int = 1) -> Array:
    c = GPT_SIZES[size]
    shape = (c["batch"], c["length"] + 1)
    return jr.randint(key, shape, 0, c["vocabulary"] * vocabularies, jnp.int32)


def vit(style: Style, params: Params, batch: Any) -> Array:
    images, labels = batch
    x = dense(style, params["embed"], style.low(patches(images)))
    x = x + style.spread(params["position"], x)
    x = run_blocks(partial(block, style, Attention()), params["blocks"], x)
    pooled = style.in_full(lambda x, p: jnp.mean(layer_norm(x, p), axis=1))
    x = pooled(x, params["norm"])
    return loss_of(style, dense(style, params["head"], x), labels)


def patches(images: Array) -> Array:
    batch, height, width, channels = images.shape
    rows, columns = height // PATCH, width // PATCH
    x = images.reshape(batch, rows, PATCH, columns, PATCH, channels)
    x = x.transpose(0, 1, 3, 2, 4, 5)
    return x.reshape(batch, rows * columns, PATCH * PATCH * channels)


VIT_SIZES = {
    "toy": dict(batch=6, side=16, dim=64, depth=2, classes=10),
    "real": dict(batch=64, side=64, dim=384, depth=6, classes=1000),
}


def init_vit(key: Array, size: str) -> Params:
    c = VIT_SIZES[size]
    keys = jr.split(key, 4)
    length = (c["side"] // PATCH) ** 2
    return {
        "embed": init_dense(keys[0], PATCH * PATCH * 3, c["dim"]),
        "position": 0.1 * normal(keys[1], length, c["dim"], fan_in=1),
        "blocks": init_blocks(keys[2], c["depth"], c["dim"]),
        "norm": init_norm(c["dim"]),
        "head": init_dense(keys[3], c["dim"], c["classes"]),
    }


def image_batch(key: Array, size: str, sizes: Mapping[str, Any]) -> tuple[Array, Array]:
    c = sizes[size]
    x_key, y_key = jr.split(key)
    x = jr.normal(x_key, (c["batch"], c["side"], c["side"], 3), jnp.float32)
    return x, jr.randint(y_key, (c["batch"],), 0, c["classes"], jnp.int32)


# ------------------------------------------------------------------------------- CNN


def conv(style: Style, kernel: Array, x: Array, stride: int = 1) -> Array:
    return lax.conv_general_dilated(
        x,
        style.low(kernel),
        (stride, stride),
        "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )


def residual_block(style: Style, p: Params, x: Array, stride: int) -> Array:
    norm = style.in_full(batch_norm)
    y = jax.nn.relu(norm(conv(style, p["conv1"], x, stride), p["norm1"]))
    y = norm(conv(style, p["conv2"], y), p["norm2"])
    return jax.nn.relu(y + conv(style, p["skip"], x, stride))


def cnn(style: Style, params: Params, batch: Any) -> Array:
    images, labels = batch
    x = conv(style, params["stem"], style.low(images))
    x = jax.nn.relu(style.in_full(batch_norm)(x, params["norm"]))
    for i, p in enumerate(params["blocks"]):
        x = residual_block(style, p, x, stride=1 if i == 0 else 2)
    x = style.low(jnp.mean(style.full(x), axis=(1, 2)))
    return loss_of(style, dense(style, params["head"], x), labels)


CNN_SIZES = {
    "toy": dict(batch=6, side=16, widths=(8, 16), classes=10),
    "real": dict(batch=128, side=32, widths=(64, 128, 256), classes=100),
}


def init_conv(key: Array, side: int, num_in: int, num_out: int) -> Array:
    return normal(key, side, side, num_in, num_out, fan_in=side * side * num_in)


def init_cnn(key: Array, size: str) -> Params:
    c = CNN_SIZES[size]
    stem_key, head_key, key = jr.split(key, 3)
    first, last = c["widths"][0], c["widths"][-1]
    blocks = []
    for num_in, num_out in zip((first, *c["widths"]), c["widths"], strict=False):
        key, *keys = jr.split(key, 4)
        blocks.append(
            {
                "conv1": init_conv(keys[0], 3, num_in, num_out),
                "norm1": init_norm(num_out),
                "conv2": init_conv(keys[1], 3, num_out, num_out),
                "norm2": init_norm(num_out),
                "skip": init_conv(keys[2], 1, num_in, num_out),
            }
        )
    return {
        "stem": init_conv(stem_key, 3, 3, first),
        "norm": init_norm(first),
        "blocks": blocks,
        "head": init_dense(head_key, last, c["classes"]),
    }


# ------------------------------------------------------------------------------ LSTM


def lstm_update(style: Style, gates: Array, cell: Array) -> tuple[Array, Array]:
    """Gates in low precision; the cell, a running sum over time, in full."""
    i, f, g, o = jnp.split(gates, 4, axis=-1)
    keep, write = jax.nn.sigmoid(f + 1.0), jax.nn.sigmoid(i) * jnp.tanh(g)
    cell = style.full(keep) * cell + style.full(write)
    return jax.nn.sigmoid(o) * style.low(jnp.tanh(cell)), cell


def lstm(style: Style, params: Params, tokens: Array) -> Array:
    inputs, targets = tokens[:-1], tokens[1:]
    p = params["cell"]
    update = style.cheap(partial(lstm_update, style))

    def step(carry, x):
        hidden, cell = carry
        # The weights are cast inside the loop: their gradients add up over time, and
        # a cast outside would make them do so in 16 bits.
        gates = x @ style.low(p["input"]) + hidden @ style.low(p["hidden"])
        gates = gates + style.spread(p["bias"], gates)
        hidden, cell = update(gates, cell)
        return (hidden, cell), hidden

    zeros = jnp.zeros((tokens.shape[1], p["hidden"].shape[0]))
    xs = style.low(params["embed"][inputs])
    _, hidden = lax.scan(step, (style.low(zeros), zeros), xs)
    return loss_of(style, dense(style, params["head"], hidden), targets)


LSTM_SIZES = {
    "toy": dict(batch=6, length=20, dim=24, hidden=32, vocabulary=40),
    "real": dict(batch=64, length=256, dim=512, hidden=1024, vocabulary=256),
}


def init_lstm(key: Array, size: str) -> Params:
    c = LSTM_SIZES[size]
    keys = jr.split(key, 5)
    hidden = c["hidden"]
    return {
        "embed": normal(keys[0], c["vocabulary"], c["dim"], fan_in=1),
        "cell": {
            "input": normal(keys[1], c["dim"], 4 * hidden),
            "hidden": normal(keys[2], hidden, 4 * hidden),
            "bias": 0.1 * normal(keys[3], 4 * hidden, fan_in=1),
        },
        "head": init_dense(keys[4], hidden, c["vocabulary"]),
    }


def lstm_batch(key: Array, size: str) -> Array:
    c = LSTM_SIZES[size]
    shape = (c["length"] + 1, c["batch"])  # time first, as the scan wants it
    return jr.randint(key, shape, 0, c["vocabulary"], jnp.int32)


# ------------------------------------------------------------------------- the table


def make_workload(
    name: str,
    model: Callable[[Style, Any, Any], Array],
    init: Callable[..., Params],
    batch: Callable[..., Any],
    lean: bool = True,
) -> Workload:
    def styled(style: Style) -> Loss:
        def loss(params, batch):
            return model(style, params, batch)

        return loss

    return Workload(
        name=name,
        loss=styled(FLOAT32),
        hand=lambda dtype: styled(Style(dtype)),
        lean=(lambda dtype: styled(Style(dtype, lean=True))) if lean else None,
        styled=styled,
        init=init,
        batch=batch,
    )


def make_gpt(
    name: str,
    *,
    rope: bool = False,
    stacked: bool = False,
    remat: bool = False,
    vocabularies: int = 1,
) -> Workload:
    return make_workload(
        name,
        partial(gpt, rope=rope, remat=remat),
        partial(init_gpt, rope=rope, stacked=stacked, vocabularies=vocabularies),
        partial(gpt_batch, vocabularies=vocabularies),
        lean=not remat,  # a block that is recomputed as a whole has little left to save
    )


WORKLOADS = {
    workload.name: workload
    for workload in (
        make_workload("MLP", mlp, init_mlp, mlp_batch, lean=False),
        make_gpt("GPT unrolled"),
        make_gpt("GPT RoPE", rope=True),
        make_gpt("GPT scanned", stacked=True),
        make_gpt("GPT remat", remat=True),
        make_gpt("GPT scanned remat", stacked=True, remat=True),
        make_workload(
            "CNN", cnn, init_cnn, partial(image_batch, sizes=CNN_SIZES), lean=False
        ),
        make_workload("ViT", vit, init_vit, partial(image_batch, sizes=VIT_SIZES)),
        make_workload("LSTM", lstm, init_lstm, lstm_batch),
    )
}
