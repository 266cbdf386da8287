"""`convert`: the same bits with parameters stored as they are read."""

import copy
import functools
import gc
import json
import re
import weakref

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx, struct
from jax import export, lax

from jaxamp_like import (
    AmpError,
    AmpWarning,
    amp,
    amp_stop,
    convert,
    load,
    presets,
    rules,
)
from jaxamp_like._convert.models import take_apart
from jaxamp_like._jax import Literal, raw, subjaxprs
from jaxamp_like.presets import mxnet
from jaxamp_like.reports import explain

pytestmark = pytest.mark.sample(6)

BF16 = {"compute_dtype": "bfloat16"}


def randoms(*shapes, seed=0):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.normal(size=s).astype("float32")) for s in shapes]


def same_bits(a, b):
    leaves = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(
        np.asarray(x).dtype == np.asarray(y).dtype
        and np.asarray(x).tobytes() == np.asarray(y).tobytes()
        for x, y in leaves
    )


VIEWS = {"reshape", "transpose", "slice", "squeeze", "broadcast_in_dim", "concatenate"}
VIEWS |= {"dynamic_slice", "gather", "copy", "select_n", "pad", "rev", "split"}


def casts_of_inputs(jaxpr, tainted):
    """The inputs that a cast to fewer bits reads, directly or moved: another search."""
    jaxpr, found = raw(jaxpr), set()
    origin = {v: t for v, t in zip(jaxpr.invars, tainted, strict=True) if t}
    for eqn in jaxpr.eqns:
        froms = [
            set() if isinstance(v, Literal) else origin.get(v, set())
            for v in eqn.invars
        ]
        name = eqn.primitive.name
        if name == "convert_element_type":
            old, new = eqn.invars[0].aval.dtype, eqn.params["new_dtype"]
            if jnp.issubdtype(old, jnp.floating) and new.itemsize < old.itemsize:
                found |= froms[0]
        for sub in subjaxprs(eqn.params):
            inner = len(raw(sub).invars)
            found |= casts_of_inputs(sub, froms[len(froms) - inner :])
        if name in VIEWS:
            origin |= dict.fromkeys(eqn.outvars, set().union(*froms))
    return found


def check(fn, params, *inputs, share=None, **options):
    """Converts; the bits, the casts and the bytes are what they should be."""
    options = BF16 | options
    low = convert(fn, params, *inputs, **options)
    kept = {k: v for k, v in options.items() if k in ("compute_dtype", "amp_policy")}
    apart = take_apart(fn, params)
    mixed = eqx.filter_jit(amp(apart.call, **kept))
    assert same_bits(low(*inputs), mixed(apart.params, *inputs))
    leaves, rest = eqx.partition(low.params, eqx.is_array)

    def dynamic(leaves):
        return low._uncompiled(eqx.combine(leaves, rest), inputs)

    jaxpr = jax.make_jaxpr(dynamic)(leaves)
    leaves = jax.tree.leaves(leaves)
    names = [s.name for s in low.summary.parameters]
    left = casts_of_inputs(jaxpr, [{name} for name in names])
    assert left == {cast.name for cast in low.summary.casts if cast.name in names}
    for leaf, stored in zip(leaves, low.summary.parameters, strict=True):
        is_another = stored.why.startswith("the same array as ")
        assert str(leaf.dtype) == stored.now
        assert stored.bytes_now == (0 if is_another else leaf.nbytes)
    if share is not None:
        assert low.summary.share <= share, low.summary
    return low


# --------------------------------------------------------------- where leaves are read


def scanned(p, x):
    def layer(x, w):
        return jnp.tanh(x @ w), None

    return lax.scan(layer, x, p)[0]


def branched(p, x):
    return lax.cond(x[0, 0] > 0, lambda w: x @ w, lambda w: x @ w.T, p)


def switched(p, x):
    """One branch hands the parameter on, another computes what it returns."""
    w = lax.cond(
        x[0, 0] > 0, lambda w: w, lambda w: jnp.full((8, 8), jnp.sin(x[0, 0])), p
    )
    return x @ w


def looped(p, x):
    return lax.fori_loop(0, 3, lambda i, x: jnp.tanh(x @ p), x)


def carried(p, x):
    """As a carry that every iteration hands on."""
    body = lambda i, c: (jnp.tanh(c[0] @ c[1]), c[1])  # noqa: E731
    return lax.fori_loop(0, 3, body, (x, p))[0]


def rematted(p, x):
    return jax.checkpoint(lambda p, x: jnp.tanh(x @ p.T))(p, x)


@jax.custom_jvp
def product(p, x):
    return x @ p


product.defjvp(lambda primals, tangents: (product(*primals), tangents[1] @ primals[0]))


@jax.custom_vjp
def twice(p, x):
    return jnp.tanh(x @ p) @ p


twice.defvjp(lambda p, x: (twice(p, x), (p, x)), lambda r, g: r)


def mapped(p, x):
    return jax.vmap(jax.jit(lambda row: row @ p))(x)


def moved(p, x):
    both = jnp.concatenate([p, jnp.zeros_like(p)], axis=1)[:, :8]
    return x @ jnp.flip(jnp.roll(both, 1, 0), 1).reshape(8, 8)


def indexed(p, x):
    return x @ jnp.take(p, jnp.arange(8)[::-1], axis=0)


ONE = {
    "plain": lambda p, x: x @ p,
    "jit": jax.jit(lambda p, x: x @ p),
    "branches": branched,
    "a branch": switched,
    "loop": looped,
    "carry": carried,
    "remat": rematted,
    "custom_jvp": product,
    "custom_vjp": twice,
    "vmap": mapped,
    "moved": moved,
    "indexed": indexed,
}


@pytest.mark.parametrize("case", ONE)
def test_a_leaf_that_is_only_cast_is_stored_low(case):
    p, x = randoms((8, 8), (4, 8))
    low = check(ONE[case], p, x, share=0.5)
    assert low.params.dtype == jnp.bfloat16


@pytest.mark.filterwarnings("ignore:No parameter of")
def test_slices_of_a_stack_are_uses():
    p, x = randoms((3, 8, 8), (4, 8))
    check(scanned, p, x, share=0.5)

    def also_summed(p, x):
        return scanned(p, x) + p[0].sum()

    low = check(also_summed, p, x)
    assert low.params.dtype == jnp.float32
    (leaf,) = low.summary.parameters
    assert "read in float32 by reduce_sum" in leaf.why and "test_convert.py" in leaf.why
    assert low.summary.casts


def test_a_training_step_is_told_to_save_nothing():
    def step(w, x):
        grads = jax.grad(lambda w: jnp.mean((x @ w["a"]) ** 2))(w)
        return jax.tree.map(lambda w, g: w - 0.1 * g, w, grads)

    with pytest.warns(AmpWarning, match="No parameter of 'step' is stored in fewer b"):
        convert(step, {"a": jnp.ones((8, 8))}, jnp.ones((4, 8)))


def test_a_training_step_is_told_to_be_no_model():
    w, x = {"a": jnp.ones((8, 8)), "b": jnp.ones((8, 8))}, jnp.ones((4, 8))

    def loss(w, x):
        return jnp.mean((jnp.tanh(x @ w["a"]) @ w["b"]) ** 2)

    def gradient(w, x):
        return jax.grad(loss)(w, x)

    def step(w, x):
        return jax.value_and_grad(loss)(w, x)

    for fn in (gradient, step):
        told = f"'{fn.__name__}' returns a tree like its parameters"
        with pytest.warns(AmpWarning, match=told):
            convert(fn, w, x)

    def forces(w, x):  # of an energy, by positions
        return jax.value_and_grad(loss, argnums=1)(w, x)

    convert(forces, w, x)
    convert(lambda w, x: {"a": x @ w["a"], "b": x @ w["b"]}, w, jnp.ones((8, 8)))


def test_a_number_that_is_too_large_for_a_parameter_is_told():
    def fn(p, x):
        return jnp.tanh(x @ p["w"]) + p["b"]

    p, x = {"w": jnp.full((4, 4), 1e5), "b": jnp.ones(4)}, jnp.ones((2, 4))
    with pytest.warns(AmpWarning, match="The parameter w holds numbers .* for float16"):
        convert(fn, p, x)
    convert(fn, p, x, compute_dtype="bfloat16")
    convert(fn, p | {"w": jnp.full((4, 4), jnp.inf)}, x)  # is so as given


def test_a_converted_model_outlives_the_model_that_it_was_made_of():
    def fn(p, x):
        return jnp.tanh(x @ p["w"]) + p["b"]

    p = {"w": jnp.ones((4, 4)), "b": jnp.ones(4), "key": jax.random.key(0)}
    x = jnp.ones((2, 4))
    low = convert(fn, p, x)
    expected = low(x)
    update = jax.jit(lambda p: jax.tree.map(lambda x: x, p), donate_argnums=0)
    update({name: p[name] for name in "wb"})
    assert p["b"].is_deleted()
    np.testing.assert_array_equal(low(x), expected)


@pytest.mark.filterwarnings("ignore:No parameter of")
def test_a_leaf_read_in_two_precisions_is_stored_once_in_the_wider():
    def fn(p, x):
        with jax.named_scope("half"):
            y = x @ p["w"]
        return y @ p["w"] + p["b"]

    w, b, x = randoms((8, 8), (8,), (4, 8))
    policy = {"half": "float16", lax.dot_general_p: "bfloat16"}
    low = check(fn, {"w": w, "b": b}, x, amp_policy=policy)
    whys = {leaf.name: leaf.why for leaf in low.summary.parameters}
    assert whys["w"] == "cast to bfloat16 and float16: stored once, in the wider"
    assert whys["b"].startswith("read in float32 by add")
    assert {c.dtype for c in low.summary.casts} == {"bfloat16", "float16"}


def test_other_leaves_stay_as_they_are():
    def fn(p, x):
        with amp_stop():
            y = x @ p["stopped"]
        return y @ p["w"], p["table"][x[:, 0].astype(int)], jax.random.normal(p["key"])

    stopped, w, table, x = randoms((8, 8), (8, 8), (3, 2), (4, 8))
    params = {"stopped": stopped, "w": w, "table": table, "unread": w + 1}
    params |= {"key": jax.random.key(0), "low": w.astype(jnp.bfloat16)}
    low = check(fn, params, x)
    whys = {leaf.name: leaf.why for leaf in low.summary.parameters}
    assert low.params["w"].dtype == jnp.bfloat16
    assert whys["unread"] == whys["low"] == "nothing reads it"
    assert whys["key"] == "holds no real floats"
    assert "read in float32 by dot_general (in amp_stop" in whys["stopped"]
    assert "read in float32 by a result" in whys["table"]
    assert low.params["unread"].dtype == jnp.float32


def test_constants_that_the_function_closes_over_are_cast_too():
    w, x = randoms((8, 8), (4, 8))
    low = check(lambda p, x: x @ p @ w, w, x)
    assert [c.now for c in low.summary.constants] == ["bfloat16"]


def test_other_shapes_are_traced_again():
    p, x, more = randoms((8, 8), (4, 8), (7, 8))
    low = convert(ONE["plain"], p, x, **BF16)
    want = jax.jit(amp(ONE["plain"], **BF16))(p, more)
    assert same_bits(jax.jit(low.apply)(low.params, more), want)

    def summed_if_long(p, x):
        return x @ p if x.shape[0] < 5 else x @ p + p.sum()

    low = convert(summed_if_long, p, x, **BF16)
    with pytest.raises(AmpError, match=r"stored in bfloat16, but .* reduce_sum"):
        low(more)


def test_a_dimension_may_be_symbolic():
    def fn(p, x):
        x = jax.nn.gelu(x @ p["w"] + p["b"])
        x = (x - x.mean(0)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-6)
        return jax.nn.softmax(x @ p["w"] + p["b"], axis=0)

    w, b, x = randoms((8, 8), (8,), (5, 8))
    any_number = jax.ShapeDtypeStruct(export.symbolic_shape("n, 8"), "float32")
    low = convert(fn, {"w": w, "b": b}, any_number, **BF16)
    assert low.summary.contractions[0].shape == ("n", "8")
    assert low(x).shape == (5, 8) and low.params["w"].dtype == jnp.bfloat16


class Lookup(eqx.Module):
    table: jax.Array

    def __call__(self, i):
        return self.table[i] @ self.table.T


@pytest.mark.filterwarnings("ignore:No parameter of", "ignore:bfloat16 changes nothing")
def test_a_module_that_would_compute_something_else_is_refused():
    (table,) = randoms((8, 8))
    low = convert(Lookup(table), None, jnp.arange(3), **BF16)
    assert low.params.table.dtype == jnp.bfloat16
    with pytest.raises(AmpError, match="some layer goes on in the dtype"):
        low.module()
    with pytest.raises(TypeError, match="no module that holds its parameters"):
        convert(ONE["plain"], table, table, **BF16).module()


def test_numpys_float64_is_what_jax_makes_of_it(tmp_path):
    p, x = np.ones((8, 8)), np.ones((4, 8))
    low = convert(lambda p, x: x @ p["w"] + p["b"], {"w": p, "b": p[0]}, x, **BF16)
    assert {s.before for s in low.summary.parameters} == {"float32"}
    low.save(tmp_path / "a")
    assert same_bits(load(tmp_path / "a")(x), low(x))


def test_values_that_are_no_arrays_pass_through():
    def fn(p, x, name, n):
        return {"y": x @ p, "name": name, "n": n, "none": None}

    p, x = randoms((8, 8), (4, 8))
    low = convert(fn, p, x, "a", 3, **BF16)
    out = low(x, "b", 2)
    assert (out["name"], out["n"], out["none"]) == ("b", 2, None)


@struct.dataclass
class Batch:
    x: jax.Array
    scale: float | None = None

    def __post_init__(self):
        assert self.x.ndim == 2


def test_a_class_that_looks_at_its_children_is_made_of_all_of_them():
    def fn(p, batch):
        return batch.x @ p["w"] * batch.scale

    p, x = randoms((8, 8), (4, 8))
    low = convert(fn, {"w": p}, Batch(x, 2.0), **BF16)
    np.testing.assert_allclose(low(Batch(x, 2.0)), 2 * (x @ p), rtol=0.02, atol=0.02)


def test_parameters_may_be_shapes_only():
    p, x = jax.ShapeDtypeStruct((8, 8), "float32"), jnp.ones((4, 8))
    low = convert(ONE["plain"], p, x, **BF16)
    assert low.params.dtype == jnp.bfloat16 and low.summary.share == 0.5


def test_a_derivative_by_inputs_is_right_or_refused():
    p, x = randoms((8, 8), (4, 8))
    low = convert(lambda p, x: jnp.sum(jax.nn.relu(x @ p)), p, x, **BF16)
    want = jax.jit(jax.grad(amp(low.model.call, **BF16), 1))(p, x)
    assert same_bits(jax.jit(jax.grad(low))(x), want)
    with pytest.raises(AmpError, match="can't be differentiated here"):
        jax.grad(lambda x: convert(product, p, x, **BF16)(x).sum())(x)


def test_a_cast_is_cast_only_once_where_amp_is_nested():
    p, x = randoms((8, 8), (4, 8))
    inner = amp(lambda p, x: x @ p, compute_dtype="float16")
    check(lambda p, x: inner(p, x), p, x, share=0.5)


def test_a_weak_type_stays_one():
    p = {"w": randoms((8, 8))[0], "gain": jax.jit(lambda: 2.0)()}
    assert p["gain"].weak_type
    (x,) = randoms((4, 8))
    low = check(lambda p, x: (x @ p["w"]).astype("bfloat16") * p["gain"], p, x)
    assert low(x).dtype == jnp.bfloat16


def test_numpys_arrays_may_be_written_to_later():
    w = np.ones((8, 8), "float32")
    low = convert(lambda p, x: x @ p["w"] + p["b"], {"w": w, "b": w[0]}, w, **BF16)
    before = low(w)
    w_now = w.copy()
    w[:] = 0
    assert same_bits(low(w_now), before)


def test_a_module_with_a_computed_dimension_is_refused():
    model = eqx.nn.Linear(4, 4, key=jax.random.key(0))
    n, m = export.symbolic_shape("n, 2*n")
    shapes = [jax.ShapeDtypeStruct((size, 4), "float32") for size in (n, m)]

    class Both(eqx.Module):
        linear: eqx.nn.Linear

        def __call__(self, x, y):
            return jax.vmap(self.linear)(x) + y.reshape(2, -1, 4).sum(0)

    with pytest.raises(ValueError, match=r"the dimension `2\*n` could be any"):
        convert(Both(model), None, *shapes, **BF16).module()


# ------------------------------------------------------------------- 8-bit weights


@jax.custom_vjp
def quantised(x, w):
    """A product with an int8 weight, as a rule makes it: at each call, of float32."""
    scale = 127 / (jnp.abs(w).max(0, keepdims=True) + 1e-7)
    rounded = jnp.clip(jnp.round(w * scale), -127, 127).astype(jnp.int8)
    return (x @ rounded.astype(x.dtype)) / scale


quantised.defvjp(lambda x, w: (quantised(x, w), (x, w)), lambda r, g: (g @ r[1].T, g))


def of_8_bits(p, x):
    def layer(x, p):
        return jnp.tanh(quantised(x, p["w"])) + p["b"], None

    x, _ = lax.scan(jax.checkpoint(layer), x, p["layers"])
    return jax.jit(quantised)(x, p["head"]) + x @ p["plain"]


def test_what_has_8_bits_is_stored_so(tmp_path):
    w, b, head, plain, x = randoms((3, 64, 64), (3, 64), (64, 64), (64, 64), (4, 64))
    p = {"layers": {"w": w, "b": b}, "head": head, "plain": plain}
    low = convert(of_8_bits, p, x, **BF16)
    kinds = jax.tree.map(lambda x: (x.dtype.name, x.shape), low.params)
    assert set(kinds["layers"]["w"]) == {
        ("int8", (3, 64, 64)),
        ("float32", (3, 1, 64)),
    }
    assert set(kinds["head"]) == {("int8", (64, 64)), ("float32", (1, 64))}
    assert low.params["plain"].dtype == jnp.bfloat16
    low_share = low.summary.bytes_now - 64 * 64 * 2 - b.nbytes
    assert low_share <= 0.27 * (w.nbytes + head.nbytes)
    assert low.summary.bytes_before == sum(x.nbytes for x in jax.tree.leaves(p))
    # XLA takes a division by a quotient apart, if it sees both.
    want = jax.jit(amp(of_8_bits, **BF16))(p, x)
    np.testing.assert_allclose(low(x), want, rtol=1e-5, atol=1e-5)
    assert low(x[:2]).shape == (2, 64)
    # Nothing is made of weights at a call any more.
    text = str(jax.make_jaxpr(low._uncompiled)(low.params, (x,)))
    assert "round" not in text and "reduce_max" not in text
    low.save(tmp_path / "a")
    assert same_bits(load(tmp_path / "a")(x), low(x))
    with pytest.raises(AmpError, match="can't be differentiated"):
        jax.grad(lambda x: low(x).sum())(x)


@pytest.mark.filterwarnings("ignore:No parameter of")
def test_8_bits_are_not_stored_where_the_whole_is_kept():
    w, x = randoms((64, 64), (4, 64))
    for options in ({"cast_params": False}, {"keep_inputs": ["w"]}):
        low = convert(lambda p, x: quantised(x, p["w"]), {"w": w}, x, **BF16, **options)
        assert low.params["w"].dtype == jnp.float32
    low = convert(lambda w, x: quantised(x, w) + w.sum(), w, x, **BF16)
    assert low.summary.share < 0.27  # the sum is one number, made once

    def mixed(p, x):
        return quantised(x, p[0] + p[1])

    low = convert(mixed, [w, w], x, **BF16)
    assert low.summary.share == 1  # what is made of two is made at each call


# ------------------------------------------------------------------------- op lists


def net(p, x):
    with jax.named_scope("encoder"):
        x = jnp.tanh(x @ p["w"])
    with jax.named_scope("head"):
        return jnp.square(x @ p["v"]) ** 3


def dots(low):
    return [c.reads[0] for c in low.summary.contractions]


def net_args():
    w, v, x = randoms((8, 8), (8, 8), (4, 8))
    return net, {"w": w, "v": v}, x


def test_lists_override_the_policy():
    low = convert(*net_args(), **BF16, float32_ops=["dot_general"])
    assert dots(low) == ["float32", "float32"] and low.summary.share == 1
    low = convert(*net_args(), **BF16, excluded_scopes=["head"])
    assert dots(low) == ["bfloat16", "float32"] and low.summary.share == 0.75
    low = convert(*net_args(), **BF16, excluded_scopes=[re.compile("enc.*")])
    assert dots(low) == ["float32", "bfloat16"]
    low = convert(*net_args(), amp_policy={}, **BF16, target_ops=[lax.dot_general_p])
    assert dots(low) == ["bfloat16", "bfloat16"]


def test_lists_work_on_every_kind_of_policy():
    for policy in ("mixed_bfloat16", mxnet("bfloat16")):
        options = BF16 if isinstance(policy, dict) else {}
        low = convert(
            *net_args(), amp_policy=policy, **options, excluded_scopes=["encoder"]
        )
        assert dots(low) == ["float32", "bfloat16"]


def test_a_condition_goes_by_a_parameter():
    precise = ("dot_general", "precision", [None])
    low = convert(*net_args(), **BF16, conditional_float32_ops=[precise])
    assert dots(low) == ["float32", "float32"]
    other = ("dot_general", "precision", [lax.Precision.HIGHEST])
    low = convert(*net_args(), **BF16, conditional_float32_ops=[other])
    assert dots(low) == ["bfloat16", "bfloat16"]


def test_inputs_may_be_kept():
    for keep in (["w"], [1], [re.compile("w")]):
        low = convert(*net_args(), **BF16, keep_inputs=keep)
        assert low.params["w"].dtype == jnp.float32
        assert low.params["v"].dtype == jnp.bfloat16
        assert [c.name for c in low.summary.casts] == ["w"]
    low = convert(*net_args(), **BF16, cast_params=False)
    assert low.summary.share == 1 and len(low.summary.casts) == 2


MISTAKES = {
    "is in two lists: float32_ops and target_ops|in two lists: target_ops and": {
        "target_ops": ["tanh"],
        "float32_ops": ["tanh"],
    },
    "is in two lists: .* and conditional_float32_ops": {
        "widest_ops": ["square"],
        "conditional_float32_ops": [("square", "y", [2])],
    },
    "No primitive is called 'tahn'.* Did you mean .*'tanh'": {"target_ops": ["tahn"]},
    "'exp' of the lists is not in the function": {"float32_ops": ["exp"]},
    "'heed' of `excluded_scopes` matches no scope.*'head'": {
        "excluded_scopes": ["heed"]
    },
    "must be a sequence of names": {"excluded_scopes": "head"},
    "`excluded_scopes` must hold names": {"excluded_scopes": [lax.tanh_p]},
    "'x' of `keep_inputs` is no parameter": {"keep_inputs": ["x"]},
    "7 of `keep_inputs` is no parameter": {"keep_inputs": [7]},
    "`keep_inputs` must hold paths": {"keep_inputs": [1.5]},
    "`keep_inputs` must be a sequence": {"keep_inputs": "w"},
    "`cast_params` must be a bool": {"cast_params": 1},
    "`conditional_float32_ops` must hold tuples": {"conditional_float32_ops": ["tanh"]},
    "compute_dtype": {"dtype": "bfloat16"},
    r"scaled by .*`int8\(activation_max=": {"calibration_data": [1.0]},
    "'softmax' is a function of JAX, and binds several": {"float32_ops": ["softmax"]},
    "that it binds, `jax.lax.dot_general_p`": {"target_ops": ["matmul"]},
}


@pytest.mark.parametrize("message", MISTAKES)
def test_mistakes_are_told(message):
    with pytest.raises((AmpError, TypeError), match=message):
        convert(*net_args(), **MISTAKES[message])


def of_two(params, x, y):
    return (x + y) @ params["w"]


# JAX 0.12 refuses `None` itself, when the shape is made.
NO_SIZES = (-1, "n", *([None] if jax.__version_info__ < (0, 12) else []))
TWO = {"w": jnp.ones((4, 2))}
ROWS = jnp.ones((3, 4))


def open_shape(*shape, scope=None):
    text = ", ".join(map(str, shape))
    return jax.ShapeDtypeStruct(
        jax.export.symbolic_shape(text, scope=scope), jnp.float32
    )


@pytest.mark.parametrize(
    ("args", "message"),
    (
        (
            (TWO,),
            r"`params` \({'w': float32\[4, 2\]}\) and 0 example inputs: missing a requ",
        ),
        ((ROWS, ROWS), r"`params` \(float32\[3, 4\]\) and 1 example inputs: missing"),
        ((TWO, ROWS, ROWS, ROWS), r"`convert\(fn, params, \*example_inputs\)`"),
        ((TWO, (3, 4), ROWS), r"write `jax.ShapeDtypeStruct\(\(3, 4\), 'float32'\)`"),
        (
            (TWO, [ROWS], ROWS),
            r"is \[float32\[3, 4\]\]. If the model takes arrays, give",
        ),
        *(
            (
                (TWO, jax.ShapeDtypeStruct((size, 4), jnp.float32), ROWS),
                rf"`inputs\[0\]` has the shape .*but {size!r} is no size.*symbolic",
            )
            for size in NO_SIZES
        ),
        (
            (TWO, open_shape("n", 4), open_shape("n", 4)),
            r"Give the later ones the scope of the first: .*scope=scope",
        ),
    ),
)
def test_examples_that_do_not_fit_are_told(args, message):
    with pytest.raises((TypeError, ValueError), match=message):
        convert(of_two, *args, **BF16)


def test_examples_that_may_look_odd():
    scope = jax.export.SymbolicScope()
    both = [open_shape("n", 4, scope=scope) for _ in range(2)]
    assert convert(of_two, TWO, *both, **BF16)(ROWS, ROWS).shape == (3, 2)

    def reshaped(params, x, shape, others):
        return (x.reshape(shape) + others[0]) @ params["w"]

    low = convert(reshaped, TWO, jnp.ones(12), (3, 4), [ROWS], **BF16)
    assert low(jnp.ones(12), (3, 4), [ROWS]).shape == (3, 2)
    numpys = jax.ShapeDtypeStruct((np.int64(3), 4), jnp.float32)
    assert convert(of_two, TWO, numpys, ROWS, **BF16)(ROWS, ROWS).shape == (3, 2)
    with pytest.raises(ZeroDivisionError):
        convert(lambda params, x: 1 / 0, TWO, ROWS)


def test_calls_of_a_converted_model_that_do_not_fit_are_told(tmp_path):
    low = convert(of_two, TWO, ROWS, ROWS, **BF16)
    with pytest.raises(
        TypeError, match=r"called with \({'w': .* leave them out, `mode"
    ):
        low(TWO, ROWS, ROWS)
    with pytest.raises(TypeError, match=r"with inputs like \(float32\[3, 4\], float32"):
        low(ROWS)
    swapped = convert(lambda x, params: x @ params["w"], ROWS, TWO, **BF16)
    with pytest.raises(TypeError, match="they were not the first argument of `fn`"):
        swapped(ROWS)
    for name, instead in (
        ("astype", "compute_dtype='bfloat16'"),
        ("export", r"`model.save\(path\)`"),
        ("predict", r"`model\(x\)`"),
        ("nothing", "no attribute 'nothing'"),
    ):
        with pytest.raises(AttributeError, match=instead):
            getattr(low, name)
    assert copy.copy(low)(ROWS, ROWS).dtype == jnp.float32
    with pytest.raises(ValueError, match="write 'cuda' or 'rocm' for 'gpu'"):
        low.save(tmp_path / "a", platforms=["cpu", "gpu"])
    apart = [open_shape("n", 4), open_shape("m", 4)]
    with pytest.raises(ValueError, match="the scope of the first"):
        convert(lambda p, x, y: (x @ p["w"], y), TWO, *apart).save(tmp_path / "a")


def test_parameters_that_do_not_fit_are_told():
    fn, params, x = net_args()
    with pytest.raises(TypeError, match=r"`w` is float: 1.0"):
        convert(fn, params | {"w": 1.0}, x)
    with pytest.raises(ValueError, match="`params` is `None`"):
        convert(fn, None, x)
    with pytest.raises(TypeError, match="`fn` must be callable"):
        convert(3, params, x)
    with pytest.raises(KeyError):
        convert(fn, {"w": params["w"]}, x)
    low = convert(fn, params, x, **BF16)
    with pytest.raises(ValueError, match=r"`v` is float32\[8, 8\], but .* bfloat16"):
        low.apply(params, x)
    with pytest.raises(ValueError, match="has the structure"):
        low.apply({"w": params["w"]}, x)


# --------------------------------------------------------------------- of frameworks


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.BatchNorm(use_running_average=True)(nn.Dense(16)(x)))
        return nn.softmax(nn.Dense(4)(nn.LayerNorm()(x)))


def test_linen():
    model, (x,) = Linen(), randoms((4, 8))
    variables = jax.jit(model.init)(jax.random.key(0), x)
    low = check(model, variables, x)
    kernels = {s.name: s.now for s in low.summary.parameters}
    assert kernels["params/Dense_0/kernel"] == "bfloat16"
    assert kernels["params/LayerNorm_0/scale"] == "float32"
    assert kernels["batch_stats/BatchNorm_0/var"] == "float32"
    assert low.summary.contractions[0].scope == "Linen/Dense_0"


def test_haiku():
    model = hk.transform(lambda x: hk.nets.MLP([16, 4])(x))
    (x,) = randoms((4, 8))
    params = model.init(jax.random.key(0), x)
    low = check(model, params, None, x)
    assert low.params["mlp/~/linear_0"]["w"].dtype == jnp.bfloat16
    assert low.params["mlp/~/linear_0"]["b"].dtype == jnp.float32


def test_equinox():
    model = eqx.nn.MLP(8, 4, 16, 2, key=jax.random.key(0))
    (x,) = randoms((8,))
    low = check(model, None, x)
    assert isinstance(low.params, eqx.nn.MLP)
    assert low.params.layers[0].weight.dtype == jnp.bfloat16
    module, mixed = low.module(), eqx.filter_jit(amp(lambda m, x: m(x), **BF16))
    assert module.layers[0].weight.dtype == jnp.bfloat16
    assert same_bits(mixed(module, x), low(x))
    with pytest.raises(ValueError, match="give `None` as `params`"):
        convert(model, model, x)


class Block(nnx.Module):
    def __init__(self, rngs):
        self.first, self.norm = (
            nnx.Linear(8, 16, rngs=rngs),
            nnx.BatchNorm(16, rngs=rngs),
        )
        self.drop, self.last = nnx.Dropout(0.5, rngs=rngs), nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x):
        return self.last(self.drop(nnx.relu(self.norm(self.first(x)))))


def test_nnx():
    model, (x,) = Block(nnx.Rngs(0)), randoms((4, 8))
    with pytest.raises(AmpError, match=r"The call changes .*model\.eval"):
        convert(model, None, x, **BF16)
    model.eval()
    low = check(model, None, x)
    whys = {s.name: s.now for s in low.summary.parameters}
    assert {k: v for k, v in whys.items() if "kernel" in k} == {
        "first/kernel": "bfloat16",
        "last/kernel": "bfloat16",
    }
    assert model.first.kernel.dtype == jnp.float32
    assert low.module().first.kernel.dtype == jnp.bfloat16
    also = check(lambda model, x: model(x), model, x)
    assert whys == {s.name: s.now for s in also.summary.parameters}


class Recurrent(nnx.Module):
    def __init__(self, rngs):
        self.rnn = nnx.RNN(nnx.GRUCell(4, 8, rngs=rngs))

    def __call__(self, x, *, scale=1.0):
        return scale * self.rnn(x)


def test_nnx_that_counts_its_random_numbers():
    """An RNN draws its first carry, whatever it is set to."""
    model, (x,) = Recurrent(nnx.Rngs(0)), randoms((2, 3, 4))
    model.eval()
    low = convert(model, None, x, **BF16)
    np.testing.assert_allclose(low(x), model(x), atol=0.02)
    assert same_bits(low(x), low(x))


def test_keywords_are_bound_to_models_that_hold_their_parameters():
    model, (x,) = Recurrent(nnx.Rngs(0)), randoms((2, 3, 4))
    low = convert(functools.partial(model, scale=3.0), None, x, **BF16)
    np.testing.assert_allclose(low(x), model(x, scale=3.0), atol=0.05)

    class Scaled(eqx.Module):
        layer: eqx.nn.Linear

        def __call__(self, x, *, scale=1.0):
            return scale * self.layer(x)

    scaled = Scaled(eqx.nn.Linear(4, 8, key=jax.random.key(0)))
    low = convert(functools.partial(scaled, scale=3.0), None, x[0, 0], **BF16)
    assert isinstance(low.params, Scaled)
    np.testing.assert_allclose(low(x[0, 0]), scaled(x[0, 0], scale=3.0), atol=0.05)
    with pytest.raises(ValueError, match="to bind what is no array"):
        convert(functools.partial(lambda x, scale: x, scale=1.0), None, x)


@pytest.mark.filterwarnings("ignore")
def test_keras():
    import keras

    model = keras.Sequential(
        [keras.layers.Dense(16, activation="relu"), keras.layers.BatchNormalization()]
    )
    with pytest.raises(ValueError, match="has no variables yet"):
        convert(model, None, jnp.ones((4, 8)))
    model.build((None, 8))
    (x,) = randoms((4, 8))
    low = check(model, None, x)
    assert next(v for k, v in low.params.items() if "kernel" in k).dtype == jnp.bfloat16


# ----------------------------------------------------------------------- the summary


def test_the_summary_tells_all(tmp_path, capsys):
    low = convert(*net_args(), **BF16, excluded_scopes=["head"])
    text = str(low.summary)
    assert text.startswith("net: 512 B of parameters stored in 384 B (0.750), 1 of 2")
    assert "v float32[8, 8] stays: read in float32 by dot_general (in head, " in text
    data = json.loads(low.summary.to_json())
    assert data["bytes_now"] == 384 and data["parameters"][0]["name"] == "v"
    low.summary.print()
    assert "dot_general" in capsys.readouterr().out
    page = low.summary.save_html(tmp_path / "page.html").read_text()
    assert "Casts that are left" in page and '"384 B"' not in page and "384 B" in page


INT8 = presets.quantised(rules.int8(where=None))


def dense(w, x):
    return x @ w


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({}, "float16"),
        ({"compute_dtype": "bfloat16"}, "bfloat16"),
        ({"amp_policy": INT8}, "int8"),
    ],
)
def test_the_summary_names_the_dtype(options, dtype):
    low = convert(dense, jnp.ones((32, 32)), jnp.ones((4, 32)), **options)
    assert str(low.summary).splitlines()[0].endswith(f"narrower: {dtype}")


def test_the_summary_names_no_dtype_if_nothing_is_narrower():
    low = convert(dense, jnp.ones((32, 32)), jnp.ones((4, 32)), keep_inputs=["params"])
    assert str(low.summary).splitlines()[0].endswith("0 of 1 narrower")


# ------------------------------------------------------------------- what is kept alive


@pytest.mark.parametrize(
    "make",
    [
        lambda: eqx.nn.Linear(32, 32, key=jax.random.key(0)),
        lambda: nnx.Linear(32, 32, rngs=nnx.Rngs(0)),
    ],
)
def test_parameters_in_full_are_not_kept_alive(make):
    module, x = make(), jnp.ones(32)
    low, y = convert(module, None, x, **BF16), module(x)
    (kernel,) = [
        weakref.ref(leaf)
        for leaf in jax.tree.leaves(module)
        if getattr(leaf, "ndim", 0) == 2
    ]
    del module
    gc.collect()
    assert kernel() is None
    np.testing.assert_allclose(low.module()(x), y, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("policy", [None, INT8])
def test_explain_takes_what_convert_returns(policy):
    x = jnp.ones((4, 32))
    low = convert(
        dense, jnp.ones((32, 32)), x, compute_dtype="bfloat16", amp_policy=policy
    )
    report = explain(low)(x)
    (op,) = (op for op in report.now.ops if op.flops)
    assert set(op.reads) == {"bfloat16" if policy is None else "int8"}
    np.testing.assert_array_equal(low(x), jnp.full((4, 32), 32.0))
