"""Which operand of a contraction is the weight: what is said, and what comes of it."""

import contextlib
import functools
import warnings

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

from benchmarks.measure import subjaxprs
from jaxamp_like import (
    AmpWarning,
    amp,
    amp_with_state,
    convert,
    enable_amp,
    explain,
    scope_modules,
    trace_numerics,
)
from jaxamp_like.presets import quantised
from jaxamp_like.rules import float8, int8, use_precision_by_pass, wide
from tests.programs import error, values

FLOAT8 = quantised(float8(where=None))
INT8 = quantised(int8(where=None))
WEIGHT_ONLY = quantised(int8(where=None, weight_only=True))
ROWS, INS, OUTS = 6, 8, 12
W, X = values(INS, OUTS, seed=1), values(ROWS, INS, seed=2)


def arrays_of(dtype, jaxpr):
    """The sorted shapes of all arrays of a dtype that a program makes, at any depth."""
    jaxpr, found = getattr(jaxpr, "jaxpr", jaxpr), set()
    for eqn in jaxpr.eqns:
        for sub in subjaxprs(eqn.params):
            found |= arrays_of(dtype, sub)
        avals = (v.aval for v in eqn.outvars)
        found |= {tuple(sorted(a.shape)) for a in avals if a.dtype == dtype}
    return found


def rounded(fn, *args, policy=WEIGHT_ONLY, **options):
    """The shapes of what a rule that rounds weights alone has rounded."""
    low = amp(fn, compute_dtype="bfloat16", amp_policy=policy, **options)
    return arrays_of(jnp.int8, jax.make_jaxpr(low)(*args))


# ------------------------------------------------------------- what weights are made of


def scanned(made):
    def fn(p, x):
        step = lambda x, p: (jnp.tanh(x @ made(p)) @ W.T, None)  # noqa: E731
        return lax.scan(step, x, jax.tree.map(lambda w: jnp.stack([w, w]), p))[0]

    return fn


def in_while(made):
    def fn(p, x):
        def step(c):
            i, p, x = c
            return i + 1, p, jnp.tanh(x @ made(p)) @ W.T

        return lax.while_loop(lambda c: c[0] < 2, step, (0, p, x))[2]

    return fn


def averaged_in_a_loop(made):
    """A moving average of weights, before they are read."""

    def fn(p, x):
        step = lambda w, _: (0.9 * w + 0.1 * made(p), None)  # noqa: E731
        return x @ lax.scan(step, jnp.zeros_like(W), None, 3)[0]

    return fn


def in_branches(made):
    return lambda p, x: x @ lax.cond(x[0, 0] > 0, made, lambda p: -made(p), p)


def with_rule(made):
    product = jax.custom_jvp(lambda p, x: x @ made(p))
    product.defjvp(lambda ps, ts: jax.jvp(lambda p, x: x @ made(p), ps, ts))
    return lambda p, x: product(p, x)


def plainly(made):
    return lambda p, x: x @ made(p)


NESTS = {
    "plain": plainly,
    "jit": lambda made: jax.jit(plainly(made)),
    "jitted maker": lambda made: plainly(jax.jit(made)),
    "remat": lambda made: jax.checkpoint(plainly(made)),
    "scan": scanned,
    "while": in_while,
    "average in a loop": averaged_in_a_loop,
    "cond": in_branches,
    "custom_jvp": with_rule,
    "on the left": lambda made: lambda p, x: (made(p).T @ x.T).T,
    "vmap": lambda made: lambda p, x: jax.vmap(lambda x: made(p).T @ x)(x),
}

MASK = (np.arange(INS * OUTS).reshape(INS, OUTS) % 3 > 0).astype(np.float32)


def bf16(w):
    return w.astype(jnp.bfloat16)


MADE = {
    "as it is": (lambda p: p, W),
    "cast by its author": (lambda p: bf16(p).astype(jnp.float32), W),
    "moved": (lambda p: p.T.reshape(-1)[::-1].reshape(OUTS, INS).T, W),
    "side by side": (
        lambda p: jnp.concatenate([p["q"], p["k"], p["v"]], 1),
        dict(zip("qkv", jnp.split(W, 3, 1), strict=True)),
    ),
    "masked": (lambda p: p * MASK, W),
    "masked by truth values": (lambda p: p * (MASK > 0), W),
    "chosen": (lambda p: jnp.where(MASK > 0, p, 0), W),
    "pruned": (lambda p: p * (abs(p) > 0.1), W),
    "a triangle": (lambda p: jnp.tril(p), W),
    "averaged": (lambda p: (p["a"] + p["b"]) / 2, {"a": W, "b": W}),
    "a mean": (lambda p: p.mean(0), jnp.stack([W, W])),
    "normalised": (lambda p: p / jnp.linalg.norm(p, axis=0, keepdims=True), W),
    "scaled": (lambda p: p["g"] * p["w"], {"w": W, "g": jnp.ones(OUTS)}),
    "with a product of factors": (
        lambda p: p["w"] + 0.5 * p["a"] @ p["b"],
        {"w": W, "a": values(INS, 2), "b": values(2, OUTS)},
    ),
}


@pytest.mark.sample(6)
@pytest.mark.parametrize("nest", NESTS)
@pytest.mark.parametrize("case", MADE)
def test_what_is_made_of_parameters_alone_is_a_weight(case, nest):
    made, p = MADE[case]
    shapes = rounded(NESTS[nest](made), p, X)
    shapes = {shape[-2:] for shape in shapes}  # of a stack, or of one in it
    assert shapes - {(2, OUTS)} == {(INS, OUTS)}  # a factor is one, too


def kept_alive(p, x):
    p, x = lax.optimization_barrier((p, x))
    return x @ p


def test_a_barrier_hands_each_on():
    assert rounded(kept_alive, W, X) == {(INS, OUTS)}


def test_gradients_read_what_was_made():
    """In a whole step, the backward pass reads the weight as the forward pass did."""

    def loss(p, x):
        qkv = jnp.concatenate([bf16(p[name]) for name in "qkv"], 1)
        return jnp.sum((jnp.sin(bf16(x)) @ qkv).astype(jnp.float32) ** 2)

    report = explain(jax.grad(loss, (0, 1)), amp_policy=FLOAT8)(
        MADE["side by side"][1], X
    )
    assert len(report.now.ops) and all(op.operands for op in report.now.ops if op.flops)


NO_WEIGHTS = {
    "looked up": lambda p, x: x @ p[jnp.argsort(x[0])],
    "with data": lambda p, x: x @ (p + x.T @ jnp.ones((ROWS, OUTS))),
    "changed in a loop": lambda p, x: lax.scan(
        lambda p, x: (p + x[0][:, None], x @ p), p, jnp.stack([x, x])
    )[1],
    "scores": lambda p, x: jnp.einsum("ik,jk->ij", x @ p, x @ p),
}


@pytest.mark.parametrize("case", NO_WEIGHTS)
def test_what_is_made_of_data_is_none(case):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AmpWarning)  # that nothing is quantised
        report = explain(NO_WEIGHTS[case], amp_policy=FLOAT8)(W, X)
    ops = [op for op in report.now.ops if op.flops]
    assert "no operand is a parameter" in ops[-1].why


# ------------------------------------------------------------------ which ones are said

BATCHES = {
    "an array": (lambda b: b, X),
    "a dict of one": (lambda b: b["x"], {"x": X}),
    "a dict": (lambda b: b["x"], {"x": X, "y": X}),
    "a list": (lambda b: b[0], [X, X]),
    "nested": (lambda b: b["images"][0], {"images": (X, X), "labels": X}),
    "larger than the weight": (lambda b: jnp.concatenate([b[0]] * 99), (X, X)),
}
PARAMETERS = {"an array": (lambda p: p, W), "a dict": (lambda p: p["w"], {"w": W})}


@pytest.mark.sample(4)
@pytest.mark.parametrize("params", PARAMETERS)
@pytest.mark.parametrize("batch", BATCHES)
def test_the_container_of_the_batch_decides_nothing(batch, params):
    (x_of, b), (w_of, p) = BATCHES[batch], PARAMETERS[params]

    def model(p, b):
        return x_of(b) @ w_of(p)

    def left(p, b):
        return w_of(p).T @ x_of(b).T

    for fn in (model, left):
        assert rounded(fn, p, b) == {(INS, OUTS)}
        low = convert(fn, p, b, amp_policy=WEIGHT_ONLY, compute_dtype="bfloat16")
        stored = {x.dtype.name for x in jax.tree.leaves(low.params) if x.ndim == 2}
        assert "int8" in stored
        exact = np.float64(fn(p, b))
        assert error(low(b), exact) < 0.02


@pytest.mark.rest
def test_a_known_range_of_activations_is_theirs_in_any_layout():
    """`eqx.nn.Linear` under `vmap` has its weight on the left."""
    model = eqx.nn.MLP(32, 32, 64, 2, key=jax.random.key(0))
    x = jnp.clip(jax.random.normal(jax.random.key(1), (256, 32)), -6, 6)
    rule = quantised(int8(where=None, activation_max=6.0))

    def plain(layers, x):
        for w, b in layers[:-1]:
            x = jax.nn.relu(x @ w + b)
        return x @ layers[-1][0] + layers[-1][1]

    def modules(model, x):
        return jax.vmap(model)(x)

    layers = [(one.weight.T, one.bias) for one in model.layers]
    exact = plain(layers, x)
    mixed = functools.partial(amp, compute_dtype="bfloat16", amp_policy=rule)
    worst = 1.1 * error(mixed(plain)(layers, x), exact)
    for out in (
        mixed(modules)(model, x),
        mixed(lambda model, batch: modules(model, batch["x"]))(model, {"x": x, "y": x}),
        mixed(jax.vmap(model))(x),
    ):
        assert error(out, exact) < worst


def swapped(x, w):
    return x @ w


def test_argnums_say_which():
    assert rounded(swapped, X, W) == {(ROWS, INS)}  # as `jax.grad` has it
    for argnums in (1, -1, (1,), [1], np.int64(1)):
        assert rounded(swapped, X, W, argnums=argnums) == {(INS, OUTS)}
    assert rounded(lambda x: swapped(x, W), X, argnums=()) == {(INS, OUTS)}
    decorated = amp(amp_policy=WEIGHT_ONLY, compute_dtype="bfloat16", argnums=1)
    made = jax.make_jaxpr(decorated(swapped))(X, W)
    assert arrays_of(jnp.int8, made) == {(INS, OUTS)}


def test_arguments_that_are_given_by_name_have_their_places():
    low = amp(swapped, amp_policy=WEIGHT_ONLY, argnums=1)
    made = jax.make_jaxpr(lambda x, w: low(w=w, x=x))(X, W)
    assert arrays_of(jnp.int8, made) == {(INS, OUTS)}
    made = jax.make_jaxpr(lambda x, w: low(x, w=w))(X, W)
    assert arrays_of(jnp.int8, made) == {(INS, OUTS)}

    @functools.partial(amp, amp_policy=WEIGHT_ONLY)
    def by_name_alone(*, w, x):
        return x @ w

    made = jax.make_jaxpr(lambda x, w: by_name_alone(x=x, w=w))(X, W)
    assert arrays_of(jnp.int8, made) == {(INS, OUTS)}


def test_argnums_are_checked():
    with pytest.raises(TypeError, match="`argnums` must be an integer or a tuple"):
        amp(swapped, argnums="w")
    with pytest.raises(ValueError, match="`argnums` names argument 2, but 'swapped'"):
        amp(swapped, argnums=2)(X, W)


@pytest.mark.rest
def test_all_that_ask_take_argnums():
    rule = {"compute_dtype": "bfloat16", "amp_policy": WEIGHT_ONLY, "argnums": 1}
    (op,) = (op for op in explain(swapped, **rule)(X, W).now.ops if op.flops)
    assert "int8" in op.why
    assert trace_numerics(swapped, **rule)(X, W).ops
    import optax

    mixed, _ = enable_amp(swapped, optax.sgd(1.0), **rule)
    assert arrays_of(jnp.int8, jax.make_jaxpr(mixed)(X, W)) == {(INS, OUTS)}
    mixed = amp_with_state(swapped, **rule)
    with pytest.warns(AmpWarning, match="nothing to remember"):
        made = jax.make_jaxpr(lambda *a: mixed({}, *a)[0])(X, W)
    assert arrays_of(jnp.int8, made) == {(INS, OUTS)}


def test_caches_of_other_arguments_are_none():
    def decode(p, cache, x):
        q, k = x @ p["q"], x @ p["k"]
        keys = lax.dynamic_update_slice(cache["k"], k, (0, 0))
        return jax.nn.softmax(q @ keys.T) @ cache["v"]

    p = {"q": values(16, 16, seed=1), "k": values(16, 16, seed=2)}
    cache = {"k": values(32, 16, seed=3), "v": values(32, 16, seed=4)}
    assert rounded(decode, p, cache, values(4, 16)) == {(16, 16)}


class Held(eqx.Module):
    layers: tuple

    def __call__(self, x):
        return self.twice(x)

    def twice(self, x):
        for layer in self.layers:
            x = jnp.tanh(jax.vmap(layer)(x))
        return x


HELD = Held(tuple(eqx.nn.Linear(INS, INS, key=jax.random.key(i)) for i in range(2)))
CALLS = {
    "the model": HELD,
    "a method": HELD.twice,
    "filter_jit": eqx.filter_jit(HELD),
    "vmap": jax.vmap(HELD),
    "partial": functools.partial(HELD),
}


@pytest.mark.parametrize("case", CALLS)
def test_a_model_that_is_called_itself_holds_the_weights(case):
    x = X[None] if case == "vmap" else X
    assert rounded(CALLS[case], x) == {(INS, INS)}


def test_a_function_that_closes_over_its_weights_is_told_of():
    with pytest.warns(AmpWarning, match=r"of 1 contractions are closed.*argnums=\(\)"):
        rounded(lambda x: HELD(x), X)
    assert rounded(lambda x: HELD(x), X, argnums=()) == {(INS, INS)}
    # Not where the batch is closed over; nor is it a weight beside one.
    assert rounded(lambda model: model(X), HELD) == {(INS, INS)}
    # Nor where an outer transformation differentiates them.
    grads = jax.grad(lambda m: jnp.sum(amp(m, amp_policy=WEIGHT_ONLY)(X)))
    assert arrays_of(jnp.int8, jax.make_jaxpr(grads)(HELD)) == {(INS, INS)}


# ------------------------------------------------------------------- models as they are


class Attention(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(16, dtype=jnp.bfloat16)(x)
        x = nn.MultiHeadDotProductAttention(2, dtype=jnp.bfloat16)(x)
        return nn.Dense(16, dtype=jnp.bfloat16, name="head")(x)


class Classifier(Attention):
    """A whole network, not a head."""


class Embedder(Attention):
    """Another."""


class Net(nnx.Module):
    def __init__(self, rngs):
        options = {"dtype": jnp.bfloat16, "rngs": rngs}
        self.dense = nnx.Linear(16, 16, **options)
        self.attention = nnx.MultiHeadAttention(
            num_heads=2, in_features=16, decode=False, **options
        )
        self.keys = nnx.Cache(values(12, 16))

    def __call__(self, x):
        x = self.attention(self.dense(x))
        return jax.nn.softmax(x @ self.keys[...].T)


def of_linen(model):
    x = values(2, 4, 16)
    return model.apply, (model.init(jax.random.key(0), x), x)


def of_nnx(call):
    net = Net(nnx.Rngs(0))
    x = values(2, 4, 16)
    return (net, (x,)) if call is None else (call, (net, x))


MODELS = {
    "Linen": (lambda: of_linen(Attention()), 5, 3),
    "Classifier": (lambda: of_linen(Classifier()), 5, 3),
    "Embedder": (lambda: of_linen(Embedder()), 5, 3),
    "NNX": (lambda: of_nnx(lambda net, x: net(x)), 5, 3),
    "NNX itself": (lambda: of_nnx(None), 5, 3),
    "NNX in a dict": (
        lambda: (
            lambda p, b: p["net"](b[0]),
            ({"net": Net(nnx.Rngs(0))}, [values(2, 4, 16)] * 2),
        ),
        5,
        3,
    ),
}


@pytest.mark.sample(5)
@pytest.mark.parametrize("rule", (INT8, FLOAT8), ids=("int8", "float8"))
@pytest.mark.parametrize("name", MODELS)
def test_models_with_a_dtype_of_their_own(name, rule):
    """All but scores, heads and caches."""
    make, count, others = MODELS[name]
    fn, args = make()
    ops = explain(fn, compute_dtype="bfloat16", amp_policy=rule)(*args).now.ops
    ops = [op for op in ops if op.flops]
    assert sum(bool(op.operands) for op in ops) == count
    assert len(ops) == count + others


@pytest.mark.rest
def test_keras_layers_of_a_mixed_policy():
    import keras

    layers = [keras.layers.Dense(8, dtype="mixed_bfloat16") for _ in range(2)]
    model = keras.Sequential(layers)
    model.build((None, INS))
    variables = [v.value for v in model.trainable_variables]
    assert rounded(
        lambda v, b: model.stateless_call(v, [], b["x"])[0],
        variables,
        {
            "x": X,
            "y": X,
        },
    ) == {(8, 8)}
    assert rounded(model, X) == {(8, 8)}


HEADS = {
    "head": True,
    "head/0": True,
    "Embed_0.attend": True,
    "model/lm_head": True,
    "classifier/dense": False,
    "embedder/block/dense": False,
    "Classifier": False,
    "Classifier/Dense_0": False,
}


@pytest.mark.parametrize("path", HEADS)
def test_heads_are_told_by_the_layer_not_by_what_it_is_in(path):
    def model(w, x):
        with jax.named_scope(path):
            return x @ w

    is_head = HEADS[path]
    told = pytest.warns(AmpWarning, match="is a head or an embedding")
    with told if is_head else contextlib.nullcontext():
        report = explain(model, amp_policy=INT8)(W, X)
    (op,) = (op for op in report.now.ops if op.flops)
    assert bool(op.operands) != is_head


def test_names_that_the_user_gives_hold_for_all_inside():
    def model(w, x):
        with jax.named_scope("decoder/block/dense"):
            return x @ w

    rule = quantised(int8(where=None, leave=("decoder",)))
    with pytest.warns(AmpWarning, match="'decoder' is a head"):
        rounded(model, W, X, policy=rule)


class Headed(eqx.Module):
    body: eqx.nn.MLP
    head: eqx.nn.Linear

    def __call__(self, x):
        return self.head(self.body(x))


def test_the_head_of_a_scoped_equinox_model_is_one():
    key = jax.random.key(0)
    model = Headed(eqx.nn.MLP(8, 8, 8, 1, key=key), eqx.nn.Linear(8, 12, key=key))
    fn = lambda x: jax.vmap(scope_modules(model))(x)  # noqa: E731
    assert rounded(fn, X, argnums=()) == {(8, 8)}


def test_weight_gradients_are_those_of_what_is_said():
    rule = {lax.dot_general_p: use_precision_by_pass(weight_gradient=wide())}

    def shapes(**options):
        fn = amp(swapped, compute_dtype="bfloat16", amp_policy=rule, **options)
        loss = lambda x, w: fn(x, w).sum()  # noqa: E731
        jaxpr = jax.make_jaxpr(jax.grad(loss, (0, 1)))(X, W)
        made = [e for e in walked(jaxpr) if e.primitive is lax.dot_general_p]
        return {
            tuple(sorted(e.outvars[0].aval.shape))
            for e in made
            if e.outvars[0].aval.dtype == jnp.float32
        }

    assert shapes() == {(ROWS, INS)}
    assert shapes(argnums=1) == {(INS, OUTS)}


def linear(x, w, numbers="nd,df->nf"):
    with jax.named_scope("linear"):
        return jnp.einsum(numbers, x, w)


def attend(p, x):
    """Attention of one sequence: its products have no batch axes."""
    q, k, v = (linear(x, p[name]) for name in "qkv")
    with jax.named_scope("products"):
        mixed = jax.nn.softmax(q @ k.T) @ v
    return x + linear(mixed, p["o"])


def experts(p, x):
    """Each expert has its weights: their products have batch axes."""
    made = jax.nn.gelu(linear(x, p["q"], "end,edf->enf"))
    return x + linear(made, p["o"], "enf,efd->end")


def with_backward_rule(layer):
    ruled = jax.custom_vjp(layer)
    ruled.defvjp(functools.partial(jax.vjp, layer), lambda pull, ct: pull(ct))
    return ruled


def stacked(tree):
    return jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), tree)


def over_layers(layer):
    def layers(p, x):
        return lax.scan(lambda x, p: (layer(p, x), None), x, stacked(p))[0]

    return layers


LAYERS = {
    "plain": lambda layer: layer,
    "jit": jax.jit,
    "scan": over_layers,
    "loop": lambda layer: lambda p, x: lax.fori_loop(0, 2, lambda i, x: layer(p, x), x),
    "vmap": lambda layer: lambda p, x: jax.vmap(layer)(stacked(p), stacked(x)),
    "custom_vjp": with_backward_rule,
    "remat": jax.checkpoint,
    "scan, remat": lambda layer: over_layers(jax.checkpoint(layer)),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("nest", LAYERS)
@pytest.mark.parametrize("layer", [attend, experts])
def test_all_passes_of_a_contraction_are_quantised_or_none(layer, nest):
    shape = (3, 16, 16) if layer is experts else (16, 16)
    params = {name: values(*shape, seed=i) for i, name in enumerate("qkvo")}
    x = values(*shape[:-2], 8, 16, seed=9)

    def loss(p):
        return jnp.mean(LAYERS[nest](layer)(p, x) ** 2)

    report = explain(
        jax.value_and_grad(loss), compute_dtype="bfloat16", amp_policy=FLOAT8
    )(params)
    found = {
        (op.place.scope.split("/")[-1], op.place.phase, op.dtype)
        for op in report.now.ops
        if op.flops
    }
    quantised, low = ("float8_e4m3fn", "float8_e5m2"), "bfloat16"
    expected = {("linear", phase, dtype) for phase, dtype in zip(
        ("forward", "backward"), quantised, strict=True
    )}  # fmt: skip
    if layer is attend:
        expected |= {("products", phase, low) for phase in ("forward", "backward")}
    if "remat" in nest:
        again = {s for s, phase, _ in found if phase == "recomputed"}
        dtypes = {"linear": quantised[0], "products": low}
        expected |= {(scope, "recomputed", dtypes[scope]) for scope in again}
        assert again == {scope for scope, *_ in expected}
        if layer is experts:  # what the last product reads is made again, it is not
            expected |= {("linear", "backward", low)}
    assert found == expected


def trained(layers):
    def steps(p, batches):
        def step(p, x):
            gradient = jax.grad(lambda p: jnp.mean((layers(p, x) - x) ** 2))(p)
            return p - 0.1 * gradient, None

        return lax.scan(step, p, batches)[0]

    return steps


@pytest.mark.parametrize("is_scanned", [False, True])
def test_parameters_that_a_loop_updates_are_none_in_its_gradients_either(is_scanned):
    def net(p, x):
        if is_scanned:
            return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, p)[0]
        return jnp.tanh(x @ p[0]) @ p[1]

    p, batches = values(2, 8, 8, seed=1), values(3, 6, 8, seed=2)
    with pytest.warns(AmpWarning, match=r"No contraction is .*parameters_only=False"):
        report = explain(trained(net), compute_dtype="bfloat16", amp_policy=FLOAT8)(
            p, batches
        )
    assert {op.dtype for op in report.now.ops if op.flops} == {"bfloat16"}


def walked(jaxpr):
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield eqn
        for sub in subjaxprs(eqn.params):
            yield from walked(sub)
