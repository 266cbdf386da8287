"""What a user of `amp` relies on: nothing but the precision of a function changes.

Tolerances come from the format: one rounding to a dtype of `eps` is a relative error of
at most `eps / 2`."""

import functools
import inspect
import itertools
import logging
import re
from collections import Counter

import equinox as eqx
import hypothesis
import hypothesis.strategies as st
import jax
import jax.extend.source_info_util as source_info
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jax import lax

from benchmarks.measure import (
    casts,
    operand_dtype,
    saved,
    subjaxprs,
    walk,
    weight_copies,
)
from jaxamp_like import amp, default_amp_policy
from jaxamp_like.rules import use_compute_precision, use_precision

pytestmark = pytest.mark.sample(8)

BF16 = jnp.bfloat16
HIGHEST = lax.Precision.HIGHEST


def equations(fn, *args, **kwargs):
    return [eqn for eqn, _ in walk(jax.make_jaxpr(fn)(*args, **kwargs))]


def dots(fn, *args, **kwargs):
    """The dtype that each matrix product computes in, in program order."""
    eqns = equations(fn, *args, **kwargs)
    return [operand_dtype(e) for e in eqns if e.primitive is lax.dot_general_p]


def text(fn, *args):
    """The jaxpr as text, without the addresses of functions among its parameters."""
    return re.sub(r" at 0x\w+", "", str(jax.make_jaxpr(fn)(*args)))


def assert_same_bits(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        assert (a == b).all()


def error(actual, exact):
    """The relative error of an array, in the Frobenius norm."""
    actual, exact = np.asarray(actual, np.float64), np.asarray(exact, np.float64)
    return np.linalg.norm(actual - exact) / np.linalg.norm(exact)


@pytest.fixture
def x64():
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


@pytest.fixture
def w(getkey):
    return jr.normal(getkey(), (8, 8)) / 3


@pytest.fixture
def x(getkey):
    return jr.normal(getkey(), (4, 8))


@jax.jit
def project(h, w):
    return h @ w


def mlp(w, x):
    with jax.named_scope("block"):
        with jax.named_scope("hidden"):
            h = jnp.tanh(x @ w)
        h, _ = lax.scan(lambda h, _: (jax.nn.gelu(h @ w), None), h, None, length=2)
    with jax.named_scope("head"):
        return jax.nn.log_softmax(2 * jnp.tanh(project(h, w)))


# The function that comes back.


def test_signature_is_kept():
    def model(w, /, x: jax.Array, *rest, scale: float = 2.0, **options) -> jax.Array:
        """A model."""
        return scale * x @ w

    wrapped = amp(model, compute_dtype="bfloat16")
    assert inspect.signature(wrapped) == inspect.signature(model)
    assert (wrapped.__name__, wrapped.__doc__) == ("model", "A model.")
    assert wrapped.__wrapped__ is model


@pytest.mark.parametrize(
    "decorator, dtype",
    (
        (amp, "float16"),
        (amp(), "float16"),
        (amp(None, compute_dtype=jnp.bfloat16), "bfloat16"),
        (amp(compute_dtype=np.float16, amp_policy=None), "float16"),
        (amp(compute_dtype=jnp.dtype("bfloat16"), strict=True), "bfloat16"),
        (functools.partial(amp, compute_dtype="bfloat16"), "bfloat16"),
        (amp(amp_policy={}), "float32"),
    ),
)
def test_forms_of_the_decorator(decorator, dtype, w, x):
    @decorator
    def fn(w, *, x):
        return x @ w

    assert dots(fn, w, x=x) == [dtype]
    assert fn(w, x=x).dtype == jnp.float32


class Scale:
    """Neither a pytree nor a module: arrays in attributes are closed over."""

    def __init__(self, w):
        self.w = w

    def __call__(self, x):
        return x @ self.w

    def method(self, x, times=1):
        return times * self(x)


def linear(w):
    return eqx.tree_at(lambda m: m.weight, eqx.nn.Linear(8, 8, key=jr.key(0)), w)


@pytest.mark.parametrize(
    "make",
    (
        Scale,
        lambda w: Scale(w).method,
        lambda w: functools.partial(Scale(w).method, times=3),
        lambda w: jax.jit(Scale(w)),
        lambda w: jax.vmap(linear(w)),
        lambda w: eqx.filter_vmap(linear(w)),
        lambda w: eqx.filter_jit(jax.vmap(lambda x: linear(w)(x))),
        lambda w: eqx.filter_jit(eqx.filter_vmap(linear(w))),
        lambda w: jax.tree_util.Partial(jnp.matmul, b=w),
    ),
    ids=(
        "instance", "method", "partial", "jit", "vmap", "filter_vmap", "filter_jit",
        "filter_jit of filter_vmap", "Partial",
    ),
)  # fmt: skip
def test_callables_of_every_kind(make, w, x):
    fn = make(w)
    low = amp(fn)
    # Some objects of Equinox have a name that `jax.jit` does not take.
    assert dots(lambda x: low(x), x) == ["float16"]
    assert error(low(x), fn(x)) < 4 * float(jnp.finfo("float16").eps)


def test_equinox_modules_and_state_as_arguments(getkey):
    make = eqx.nn.make_with_state(eqx.nn.BatchNorm)
    norm, state = make(8, axis_name="batch", mode="batch")
    model = eqx.nn.MLP(8, 8, 8, 1, key=getkey())
    x = jr.normal(getkey(), (16, 8))

    def fn(model, norm, state, x):
        def one(x, state):
            return norm(model(x), state)

        batched = jax.vmap(one, (0, None), (0, None), axis_name="batch")
        y, state = batched(x, state)
        return jnp.mean(y**2 * jnp.arange(8.0)), state

    low = amp(fn, compute_dtype="bfloat16")
    grad = eqx.filter_jit(eqx.filter_grad(low, has_aux=True))
    grads, after = grad(model, norm, state, x)
    _, expected = fn(model, norm, state, x)
    states = (jax.tree.leaves(s) for s in (state, after, expected))
    for old, new, true in zip(*states, strict=True):
        assert (new != old).any() and new.dtype == true.dtype
        np.testing.assert_allclose(new, true, atol=0.02)  # some roundings to bfloat16
    assert {g.dtype for g in jax.tree.leaves(grads)} == {jnp.dtype("float32")}
    arrays, static = eqx.partition((model, norm, state), eqx.is_array)
    split = lambda arrays, x: low(*eqx.combine(arrays, static), x)[0]  # noqa: E731
    assert dots(split, arrays, x) == ["bfloat16"] * 2


# Leaves that are none of its business.


def test_other_leaves_pass_untouched(x):
    given = []

    @amp
    def fn(x, number, text, nothing, *, options, flag):
        given.append((number, text, nothing, options["fn"], flag))
        assert isinstance(options["array"], jax.core.Tracer)
        return {
            "y": (x @ options["array"], None),
            "kept": [number, text, flag, options["fn"], np.arange(3)],
        }

    array = np.ones((8, 2), np.float32)
    out = fn(x, 3, "a", None, options={"array": array, "fn": abs}, flag=True)
    assert given == [(3, "a", None, abs, True)]
    assert type(given[0][0]) is int and given[0][-1] is True
    assert out["kept"][:4] == [3, "a", True, abs]
    assert type(out["kept"][4]) is np.ndarray
    y, nothing = out["y"]
    assert (y.dtype, y.shape, nothing) == (jnp.float32, (4, 2), None)


def draw(key):
    keys = jr.split(key, 3)
    return jr.bits(keys[0]), jr.key_data(jr.fold_in(keys[1], 7)), keys[2]


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "fn, make",
    (
        (lambda x: (x @ x.T, x.sum(), x // 2), lambda: jnp.arange(6).reshape(2, 3)),
        (lambda x: (x.any(), ~x, x[0] & x[1]), lambda: jnp.eye(3, dtype=bool)),
        (lambda x: (x @ x, jnp.exp(x).real), lambda: jnp.eye(3) * (1 + 2j)),
        (lambda x: jnp.tanh(x @ x), lambda: jnp.eye(3, dtype="float16") / 3),
        (lambda x: (jnp.tanh(x @ x), x + 1), lambda: np.eye(3) / 3),
        (lambda x: (x.astype(int), x > 1, x * 1j), lambda: np.eye(3) * 2.5),
        (lambda x: (x > 1).astype("float64") @ x, lambda: np.eye(3) * 2.5),
        (draw, lambda: jr.key(1)),
    ),
    ids=("int", "bool", "complex", "float16", "float64", "casts", "mask", "key"),
)
@pytest.mark.filterwarnings("ignore:float16 changes nothing")  # as tested here
def test_dtypes_that_are_never_lowered(fn, make, x64):
    x = make()
    assert text(amp(fn), x) == text(fn, x)
    assert_same_bits(amp(fn)(x), fn(x))


def test_float0():
    @amp
    def fn(x, tangent):
        return jnp.tanh(x @ x), tangent

    zero = np.zeros((3,), jax.dtypes.float0)
    assert fn(jnp.eye(3), zero)[1].dtype == jax.dtypes.float0
    primals, tangents = (jnp.eye(3), jnp.arange(3)), (jnp.eye(3), zero)
    _, (_, out) = jax.jvp(amp(lambda x, n: (x @ x, n)), primals, tangents)
    assert out.dtype == jax.dtypes.float0


def test_outputs_keep_weak_types(x):
    def fn(weak, x):
        total, _ = lax.scan(lambda c, v: (c * 2.0, (v @ x.T).sum()), weak, x)
        return weak + 1.0, x * weak, x @ x.T, jnp.full((), 2.0), total, 3 * weak

    avals = jax.make_jaxpr(amp(fn))(2.0, x).out_avals
    assert avals == jax.make_jaxpr(fn)(2.0, x).out_avals
    assert [aval.weak_type for aval in avals] == [1, 0, 0, 1, 1, 1]


# What is closed over.


def test_closures_over_outer_tracers(w, x):
    """A function inside of grad, vmap and scan reads what belongs to these."""

    def loss(wrap, w):
        def row(x):
            step = wrap(lambda h: jnp.tanh(h @ w) * x)
            h, _ = lax.scan(lambda h, _: (step(h), None), x, None, length=2)
            return wrap(lambda: h @ w)()

        return jnp.sum(jax.vmap(row)(x) ** 2)

    fn = functools.partial(loss, amp(compute_dtype="bfloat16"))
    plain = jax.grad(functools.partial(loss, lambda f: f))(w)
    grad = jax.jit(jax.grad(fn))(w)
    assert grad.dtype == w.dtype
    assert error(grad, plain) < 6 * float(jnp.finfo(BF16).eps)  # six products
    assert set(dots(jax.grad(fn), w)) == {"bfloat16"}


class TestNNX:
    @pytest.fixture
    def nnx(self):
        return pytest.importorskip("flax.nnx")

    @pytest.fixture
    def model(self, nnx):
        class Model(nnx.Module):
            def __init__(self, rngs):
                self.first = nnx.Linear(8, 8, rngs=rngs)
                self.norm = nnx.BatchNorm(8, rngs=rngs)
                self.dropout = nnx.Dropout(0.5, rngs=rngs)
                self.second = self.first  # shared

            def __call__(self, x):
                h = self.dropout(self.norm(self.first(x)))
                return self.second(h)

            def pure(self, x):
                return jnp.tanh(self.second(self.first(x)))

        return lambda: Model(nnx.Rngs(0))

    @pytest.mark.parametrize("form", ("argument", "module", "method"))
    def test_state_is_updated(self, nnx, model, form, x):
        model, twin = model(), model()
        call = {
            "argument": lambda x: amp(lambda m, x: m(x))(model, x),
            "module": amp(model),
            "method": amp(model.__call__),
        }[form]
        for step in (1, 2):
            out, expected = call(x), twin(x)
            assert out.dtype == expected.dtype
            assert model.dropout.rngs.count[...] == step
            # The same elements are dropped. What is left went through two products.
            np.testing.assert_allclose(out, expected, atol=0.02)
            mean, true_mean = model.norm.mean[...], twin.norm.mean[...]
            np.testing.assert_allclose(mean, true_mean, atol=2e-3)
            assert (mean != 0).all()
        assert model.second is model.first
        assert model.first.kernel[...].dtype == jnp.float32

    def test_a_closed_over_module_is_not_written_to_in_silence(self, model, x):
        """Its state can't be split from the function, and Flax forbids to write."""
        errors = pytest.importorskip("flax.errors")
        model = model()
        with pytest.raises(errors.TraceContextError):
            amp(lambda x: model(x))(x)

    def test_gradients(self, nnx, model, x):
        model = model()
        loss = amp(lambda model, x: jnp.sum(model(x) ** 2), compute_dtype=BF16)
        grads = nnx.jit(nnx.grad(loss))(model, x)
        leaves = jax.tree.leaves(grads)
        assert len(leaves) == 4  # the shared submodule counts once
        assert {g.dtype for g in leaves} == {jnp.dtype("float32")}
        assert model.dropout.rngs.count[...] == 1

    @pytest.mark.parametrize("form", ("module", "method", "closure"))
    def test_closed_over_under_an_outer_trace(self, nnx, model, form, x):
        model = model()
        fns = {
            "module": lambda x: amp(lambda m, x: m.pure(x))(model, x),
            "method": amp(model.pure),
            "closure": amp(lambda x: model.pure(x)),
        }
        fn = fns[form]
        assert dots(fn, x) == ["float16"] * 2
        plain = jax.grad(lambda x: model.pure(x).sum())(x)
        grad = jax.jit(jax.vmap(jax.grad(lambda x: fn(x[None]).sum())))(x)
        assert error(grad, plain) < 6 * float(jnp.finfo("float16").eps)


# No more bits than the author wrote.


@pytest.mark.filterwarnings("ignore:.*16 changes nothing")  # as tested here
@pytest.mark.parametrize(
    "half, compute_dtype",
    (("float16", BF16), (BF16, "float16"), (BF16, BF16), (BF16, "float32")),
)
def test_half_precision_by_hand_is_untouched(half, compute_dtype, w, x):
    def norm(w, x):
        wide = mlp(w, x).astype(jnp.float32)
        wide = wide / jnp.sqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + 1e-6)
        return jnp.matmul(wide.astype(half), w)

    w, x = w.astype(half), x.astype(half)
    for fn in (mlp, norm, jax.grad(lambda w, x: norm(w, x).sum())):
        assert text(amp(fn, compute_dtype=compute_dtype), w, x) == text(fn, w, x)


@pytest.mark.filterwarnings("ignore:.*float16 changes nothing")  # as is tested
def test_mixed_precision_by_hand_gets_no_more_casts(w, x):
    def fn(w, x):
        h = x.astype(BF16) @ w.astype(BF16)
        x = x + jnp.tanh(h).astype(jnp.float32)
        return x + (x.astype(BF16) @ w.astype(BF16)).astype(jnp.float32)

    low = amp(fn, compute_dtype=BF16)
    assert casts(jax.make_jaxpr(low)(w, x)) <= casts(jax.make_jaxpr(fn)(w, x))
    assert dots(low, w, x) == ["bfloat16"] * 2
    assert_same_bits(jax.jit(low)(w, x), jax.jit(fn)(w, x))


# Amp in amp.


@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
def test_idempotent(dtype, w, x):
    wrap = amp(compute_dtype=dtype)
    assert text(wrap(wrap(mlp)), w, x) == text(wrap(mlp), w, x)
    assert_same_bits(wrap(wrap(mlp))(w, x), wrap(mlp)(w, x))


@pytest.mark.parametrize("inner", (amp(compute_dtype=BF16), amp(amp_policy={})))
@pytest.mark.parametrize("jit", (lambda fn: fn, jax.jit), ids=("plain", "jit"))
def test_the_inner_amp_wins(inner, jit, w, x):
    part = jit(inner(lambda w, x: x @ w))
    part(w, x)  # traced already, outside of the outer amp
    outer = amp(lambda w, x: part(w, x @ w) @ w)
    (alone,) = dots(part, w, x)
    assert alone in ("bfloat16", "float32")
    assert dots(outer, w, x) == ["float16", alone, "float16"]
    grad = jax.grad(lambda w: outer(w, x).sum())
    assert Counter(dots(grad, w)) == Counter(3 * ["float16", "float16", alone]) - (
        Counter(["float16"])  # the data need no gradient
    )


# Traced once, and each policy for itself.


def test_traced_once(w, x, caplog):
    traced = []

    @jax.jit
    def fn(w, x):
        traced.append(1)
        return mlp(w, x)

    low, grad = amp(fn), jax.jit(jax.grad(amp(lambda w, x: fn(w, x).sum())))
    low(w, x), grad(w, x)
    with caplog.at_level(logging.DEBUG), jax.log_compiles():
        low(w, x), grad(w, x)  # eager too: JAX finds the compiled `fn` in its cache
        assert not any("Compiling" in r.message for r in caplog.records)
        amp(fn, compute_dtype=BF16)(w, x)  # or nothing would be logged at all
        assert any("Compiling" in r.message for r in caplog.records)
    assert len(traced) == 1


POLICIES = {
    "float16": (amp, ["float16"] * 3),
    "bfloat16": (amp(compute_dtype=BF16), ["bfloat16"] * 3),
    "nothing": (amp(amp_policy={}), ["float32"] * 3),
    "scope": (
        amp(amp_policy=default_amp_policy | {"head": "float32"}),
        ["float16", "float16", "float32"],
    ),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("order", [*itertools.permutations(POLICIES)][::7])
@pytest.mark.parametrize("cold", (False, True), ids=("warm", "cold"))
def test_policies_share_no_state(order, cold, w, x):
    model = jax.jit(mlp)
    model(w, x)
    for name in (*order, order[0]):
        if cold:
            jax.clear_caches()
        wrap, expected = POLICIES[name]
        assert dots(wrap(model), w, x) == expected
        assert dots(jax.jit(wrap(model)), w, x) == expected


# Where the code came from.


def in_scopes(jaxpr, outer=""):
    """Yields `(eqn, names of the scopes and transforms around it)`, at any depth."""
    for eqn in jaxpr.eqns:
        path = f"{outer}/{eqn.source_info.name_stack}"
        yield eqn, path
        for body in subjaxprs(eqn.params):
            yield from in_scopes(body, path)


@pytest.mark.parametrize("transform", (amp, lambda f: jax.grad(amp(f))))
def test_scopes_and_source_lines_survive(transform, w, x):
    def places(fn):
        found = [*in_scopes(jax.make_jaxpr(fn)(w, x).jaxpr)]
        lines = [source_info.summarize(eqn.source_info) for eqn, _ in found]
        # What is cached inside of JAX, such as the body of `jnp.matmul`, has none.
        assert all(line.startswith(__file__) for line in lines if ":" in line)
        return {
            (eqn.primitive.name, line, scope)
            for (eqn, path), line in zip(found, lines, strict=True)
            if eqn.primitive in (lax.dot_general_p, lax.tanh_p, lax.exp_p)
            for scope in ("block/hidden", "block", "head")
            if scope in path
        }

    expected = places(mlp)
    assert {scope for _, _, scope in expected} == {"block/hidden", "block", "head"}
    assert expected <= places(transform(lambda w, x: mlp(w, x).sum()))


# Gradients.


def hand_cast(fn):
    """What one would write first: the parameter is cast once, for all of its uses."""
    low = functools.partial(jax.tree.map, lambda x: x.astype(BF16))
    return lambda w, xs: fn(low(w), low(xs)).astype(jnp.float32)


def used_in_64_places(w, xs):
    return jnp.sum(functools.reduce(jnp.add, [x @ w for x in xs]))


def used_in_512_steps(w, xs):
    xs = jnp.concatenate(xs)[:, None]
    step = lambda total, x: (total + jnp.sum(x @ w), None)  # noqa: E731
    return lax.scan(step, jnp.zeros((), xs.dtype), xs)[0]


def with_own_rule(fn):
    """As JAX would do it, but by a rule that JAX transposes."""
    wrapped = jax.custom_jvp(fn)
    wrapped.defjvp(lambda primals, tangents: jax.jvp(fn, primals, tangents))
    return wrapped


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "fn, wrap",
    (
        (used_in_64_places, lambda fn: fn),
        (used_in_64_places, jax.checkpoint),
        (used_in_64_places, with_own_rule),
        (used_in_512_steps, lambda fn: fn),
        (used_in_512_steps, jax.checkpoint),
    ),
)
def test_gradients_accumulate_in_float32(fn, wrap, getkey):
    w, key = jnp.eye(8), getkey()
    xs = list(jr.uniform(key, (64, 8, 8), minval=0.5))
    exact = np.asarray(xs, np.float64).sum((0, 1))[:, None].repeat(8, 1)
    low = jax.jit(jax.grad(amp(wrap(fn), compute_dtype=BF16)))(w, xs)
    naive = jax.grad(hand_cast(wrap(fn)))(w, xs)
    # Every term is rounded, by eps / 2 at most and up as often as down; over 64 terms,
    # which are sums of 8 or less, the errors cancel.
    eps = float(jnp.finfo(BF16).eps)
    assert error(low, exact) < eps / 4
    assert error(naive, exact) > eps / 2


def unrolled(ws, x):
    for i in range(len(ws)):
        x = x + jnp.tanh(x @ ws[i])
    return jnp.sum(x**2)


def scanned(ws, x):
    x, _ = lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, ws)
    return jnp.sum(x**2)


@pytest.mark.parametrize(
    "fn, stacked",
    ((unrolled, False), (jax.jit(unrolled), False), (unrolled, True), (scanned, True)),
)
def test_no_second_copy_of_a_parameter_is_saved(fn, stacked, x, getkey):
    ws = jr.normal(getkey(), (3, 8, 8))
    params = ws if stacked else list(ws)
    low = amp(fn, compute_dtype=BF16)
    assert weight_copies([ws, ws[0]], saved(low, params, x, argnums=[0])) == []
    by_hand = hand_cast(fn)
    assert weight_copies([ws, ws[0]], saved(by_hand, params, x, argnums=[0])) != []


# What the author asked for.


@pytest.mark.parametrize(
    "precision",
    (
        HIGHEST,
        "high",
        (HIGHEST, lax.Precision.DEFAULT),
        lax.DotAlgorithmPreset.F32_F32_F32,
        lax.DotAlgorithmPreset.BF16_BF16_F32_X3,
    ),
    ids=str,
)
def test_explicit_precision_wins_but_not_over_a_scope(precision, w, x):
    @jax.named_scope("fast")
    def fn(w, x):
        return lax.dot(x @ w, w, precision=precision)

    def second(policy):
        eqns = equations(amp(fn, amp_policy=policy), w, x)
        eqn = [e for e in eqns if e.primitive is lax.dot_general_p][1]
        return operand_dtype(eqn), eqn.params["precision"]

    asked = equations(fn, w, x)[-1].params["precision"]
    assert second(default_amp_policy) == ("float32", asked)
    dtype, precision = second(default_amp_policy | {"fast": use_compute_precision})
    assert dtype == "float16"
    # The name of an algorithm says which dtypes it reads, which would be false now.
    assert not isinstance(precision, lax.DotAlgorithmPreset)


@pytest.mark.filterwarnings("ignore:.*float16 changes nothing")  # as is tested
@pytest.mark.parametrize("rule", (None, use_precision("bfloat16")))
def test_wider_preferred_element_type_wins(rule, w, x):
    """Wider than the operands as written; `jnp.matmul` fills in their dtype itself."""
    fn = functools.partial(jnp.matmul, preferred_element_type=jnp.float32)
    policy = default_amp_policy | ({lax.dot_general_p: rule} if rule else {})
    low = amp(fn, compute_dtype=BF16, amp_policy=policy)
    eqns = equations(low, x.astype(BF16), w.astype(BF16))
    (eqn,) = (e for e in eqns if e.primitive is lax.dot_general_p)
    assert eqn.outvars[0].aval.dtype == jnp.float32


def test_visible_casts_win(w, x):
    def fn(w, x):
        h = (x @ w).astype(BF16)  # to another low precision
        up = h.astype(jnp.float32)  # and up again, for what follows
        return h, up * jnp.sin(x), (up + up) @ w

    eqns = equations(amp(fn), w, x)
    named = {e.primitive.name: e.outvars[0].aval.dtype.name for e in eqns}
    assert (named["mul"], named["add"]) == ("float32", "float32")
    assert dots(amp(fn), w, x) == ["float16", "float16"]
    h, *_ = amp(fn)(w, x)
    rounded = (x.astype("float16") @ w.astype("float16")).astype(BF16)
    assert_same_bits(h, rounded)


# Random programs. Values stay within [-2, 2], up to contractions of them.

UNARY = {
    "tanh": jnp.tanh,
    "softmax": jax.nn.softmax,
    "gelu": jax.nn.gelu,
    "norm": lambda x: (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var() + 1e-2),
    "clip": lambda x: jnp.clip(x, -2.0, 2.0),
    "mask": lambda x: jnp.where(x > 1e9, -1e9, x.T),
    "decay": lambda x: 0.999 * x + 1e-3,
    "cumsum": lambda x: jnp.tanh(jnp.cumsum(x, axis=0)),
    "swap": lambda x: jnp.concatenate([x[2:], x[:2]]),
}
BINARY = {
    "add": lambda x, w: x + w / 2,
    "mul": lambda x, w: x * jnp.sin(w),
    "matmul": lambda x, w: jnp.tanh(x @ w),
    "vecmul": lambda x, w: x + jnp.tanh(w[0] @ x),
    "bias": lambda x, w: jnp.tanh(x + w[0]),
    "einsum": lambda x, w: jnp.tanh(jnp.einsum("ab,cb->ac", w, x)),
}
WRAPPERS = {
    "plain": lambda f: f,
    "jit": jax.jit,
    "remat": jax.checkpoint,
    "scan": lambda f: (
        lambda x, w: lax.scan(lambda x, w: (f(x, w), None), x, jnp.stack([w, w / 2]))[0]
    ),
    "cond": lambda f: lambda x, w: lax.cond(w.shape[0] > 2, f, lambda x, w: x, x, w),
    "map": lambda f: lambda x, w: lax.map(lambda w: f(x, w), w[None])[0],
    "grad": lambda f: lambda x, w: jax.grad(lambda x: jnp.sum(f(x, w) ** 2) / 9)(x),
}
BLOCK = st.tuples(
    st.sampled_from(sorted(WRAPPERS)),
    st.lists(st.sampled_from(sorted(UNARY | BINARY)), min_size=1, max_size=3),
)


def compose(blocks):
    """A function of `x` and `w`, both (4, 4), from names of operations."""

    def block(wrapper, names):
        def ops(x, w):
            for name in names:
                x = UNARY[name](x) if name in UNARY else BINARY[name](x, w)
            return x

        return WRAPPERS[wrapper](ops)

    parts = [block(*b) for b in blocks]

    def program(x, w):
        for part in parts:
            x = part(x, w)
        return x

    return program


programs = st.lists(BLOCK, min_size=1, max_size=3).map(compose)
some = functools.partial(
    hypothesis.settings, deadline=None, derandomize=True, database=None
)


def inputs(*batch):
    kx, kw = jr.split(jr.key(5))
    return jr.uniform(kx, (*batch, 4, 4), minval=-1), jr.uniform(kw, (4, 4), minval=-1)


def with_gradients(fn):
    def both(x, w):
        out, pull = jax.vjp(fn, x, w)
        return out, pull(jnp.linspace(0.5, 1.5, out.size).reshape(out.shape))

    return both


@some(max_examples=8)
@hypothesis.given(
    programs, st.sampled_from(({"amp_policy": {}}, {"compute_dtype": "float32"}))
)
def test_a_policy_that_changes_nothing(fn, options):
    """Not one bit, of the outputs and of the gradients."""
    low = amp(fn, **options)
    actual = jax.jit(with_gradients(low))(*inputs())
    assert_same_bits(actual, jax.jit(with_gradients(fn))(*inputs()))


@some(max_examples=20)
@hypothesis.given(programs, st.sampled_from(("float16", "bfloat16")))
def test_avals_do_not_change(fn, dtype):
    low = amp(fn, compute_dtype=dtype)
    for f, g in ((low, fn), (with_gradients(low), with_gradients(fn))):
        actual = jax.make_jaxpr(f)(*inputs())
        assert actual.out_avals == jax.make_jaxpr(g)(*inputs()).out_avals


@some(max_examples=8)
@hypothesis.given(programs, st.sampled_from(("float16", "bfloat16")))
def test_commutes_with_transforms(fn, dtype):
    wrap = amp(compute_dtype=dtype)
    x, w = inputs()
    low = jax.jit(wrap(fn))(x, w)
    # The same equations in the same dtypes, in one compiled program.
    assert_same_bits(jax.jit(wrap(jax.jit(fn)))(x, w), low)
    assert_same_bits(jax.jit(wrap(jax.checkpoint(fn)))(x, w), low)
    # Under vmap `w` is smaller than what it meets, and a smaller input does not decide
    # on precision: other values may be rounded. 32 roundings, as many as there may be
    # operations; the values are of order one.
    xs, _ = inputs(3)
    inside = jax.jit(jax.vmap(wrap(fn), (0, None)))(xs, w)
    outside = jax.jit(wrap(jax.vmap(fn, (0, None))))(xs, w)
    assert inside.dtype == outside.dtype
    bound = 32 * float(jnp.finfo(dtype).eps) / 2
    np.testing.assert_allclose(inside, outside, rtol=bound, atol=bound)
