"""Which rule an equation gets, and what is said of a policy that can't be followed."""

import asyncio
import copy
import re
import warnings
from contextvars import ContextVar

import cloudpickle
import jax
import jax.extend as jex
import jax.extend.core.primitives as primitives
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest
from jax import lax

from benchmarks.measure import CONTRACTIONS, casts, operand_dtype, walk
from jaxamp_like import (
    AmpError,
    AmpWarning,
    DynamicScalerState,
    Policy,
    PolicyMap,
    _errors,
    amp,
    amp_stop,
    default_amp_policy,
    disable_amp,
    dynamic_scale_grad,
    enable_amp,
    explain,
    global_policy,
    loss_scale_optimizer,
    set_global_policy,
    using_policy,
)
from jaxamp_like._rewrite import switch
from jaxamp_like.rules import (
    use_compute_precision,
    use_original_precision,
    use_precision,
    use_widest_precision,
)

pytestmark = pytest.mark.quick

DOT = lax.dot_general_p
LOW, FULL, HALF = "float16", "float32", "bfloat16"  # HALF: by a rule
scope = jax.named_scope


@pytest.fixture
def w(getkey):
    return jr.normal(getkey(), (4, 4)) / 2


def dots(fn, *args):
    """The dtype that each matrix product computes in, in program order."""
    eqns = (eqn for eqn, _ in walk(jax.make_jaxpr(fn)(*args)))
    return [operand_dtype(e) for e in eqns if e.primitive.name in CONTRACTIONS]


def with_policy(fn, extra):
    return amp(fn, amp_policy=default_amp_policy | extra)


@scope("net")
def net(w):
    with scope("encoder"):
        with scope("attention"):
            h = w @ w
        with scope("mlp"):
            h = h @ w
    with scope("decoder"), scope("attention"):
        return h @ w


# Keys and their order.


@pytest.mark.parametrize(
    "extra, expected",
    (
        ({}, [LOW, LOW, LOW]),
        ({DOT: HALF}, [HALF, HALF, HALF]),
        ({"attention": HALF}, [HALF, LOW, HALF]),
        ({"net": "float32"}, [FULL, FULL, FULL]),
        ({"encoder/attention": HALF}, [HALF, LOW, LOW]),
        ({"net/encoder": HALF}, [HALF, HALF, LOW]),
        ({"/decoder/attention/": HALF}, [LOW, LOW, HALF]),
        ({re.compile(".*/(mlp|decoder)"): HALF}, [LOW, HALF, HALF]),
        ({re.compile("net/encoder/.*"): HALF}, [HALF, HALF, LOW]),
        # Dtypes are short for rules, in every form that NumPy and JAX take.
        ({"mlp": jnp.bfloat16, DOT: np.float32}, [FULL, HALF, FULL]),
        ({"mlp": np.dtype("bfloat16"), DOT: jnp.dtype(FULL)}, [FULL, HALF, FULL]),
        ({"mlp": use_precision("bfloat16")}, [LOW, HALF, LOW]),
        # A scope goes before a primitive, and the outermost scope before others.
        ({DOT: "float32", "attention": HALF}, [HALF, FULL, HALF]),
        ({"encoder": HALF, "attention": "float32"}, [HALF, HALF, FULL]),
        ({"attention": "float32", "encoder": HALF}, [HALF, HALF, FULL]),
        ({"encoder": HALF, re.compile(".*attention"): FULL}, [HALF, HALF, FULL]),
        # Where both end at the same scope, the longer path.
        ({"attention": "float32", "decoder/attention": HALF}, [FULL, LOW, HALF]),
    ),
    ids=str,
)
def test_keys(extra, expected, w):
    assert dots(with_policy(net, extra), w) == expected
    grad = jax.grad(lambda w: with_policy(net, extra)(w).sum())
    inside = with_policy(jax.grad(lambda w: net(w).sum()), extra)
    for fn in (grad, inside):  # forward, then backward in reverse: two for each
        assert sorted(dots(fn, w)) == sorted(expected * 3)


def test_default_key(w):
    def fn(w):
        return jnp.tanh(w @ w) + lax.erf(w)

    low = amp(fn, amp_policy={"amp_default": HALF, lax.tanh_p: "float32"})
    read = {
        eqn.primitive.name: eqn.invars[0].aval.dtype.name
        for eqn, _ in walk(jax.make_jaxpr(low)(w))
    }
    assert [read[k] for k in ("dot_general", "erf", "tanh")] == [HALF, HALF, FULL]
    only = amp(fn, amp_policy={DOT: use_compute_precision})
    jaxpr = jax.make_jaxpr(only)(w)
    assert dots(only, w) == [LOW]
    assert casts(jaxpr) == 3  # two operands and one result: nothing else is touched


def test_parts_of_a_name_are_no_match(w):
    """Keys are whole components; a misspelt one matches nothing and says so."""
    for key in ("attent", "encoder/mlp/attention", re.compile("net/enc"), "Net"):
        low = with_policy(net, {key: HALF})
        with pytest.warns(AmpWarning, match="matched nothing"):
            assert dots(low, w) == [LOW] * 3


NESTINGS = {
    "scan": lambda f: lambda w: lax.scan(lambda h, _: (f(h), None), w, length=2)[0],
    "fori": lambda f: lambda w: lax.fori_loop(0, 2, lambda _, h: f(h), w),
    "jit": jax.jit,
    "remat": jax.checkpoint,
    "cond": lambda f: lambda w: lax.cond(w[0, 0] > 0, f, lambda w: w, w),
    "vmap": lambda f: lambda w: jax.vmap(f, axis_size=2, in_axes=None)(w)[0],
}


def with_vjp(f):
    """A function whose backward rule was written by its author."""
    fn = jax.custom_vjp(f)
    fn.defvjp(lambda w: (fn(w), w), lambda w, g: jax.vjp(f, w)[1](g))
    return fn


NESTINGS |= {"custom_vjp": with_vjp, "twice": lambda f: jax.jit(NESTINGS["scan"](f))}


@pytest.mark.parametrize("wrap", NESTINGS.values(), ids=NESTINGS.keys())
@pytest.mark.parametrize("stop", (amp_stop, scope("around")), ids=("stop", "scope"))
def test_scopes_reach_into_bodies(wrap, stop, w):
    """From around of a construct and from inside of it, forward and backward."""

    def product(w):
        return jnp.tanh(w @ w)

    extra = {} if stop is amp_stop else {"around": use_original_precision}
    for fn in (stop(wrap(product)), wrap(stop(product))):
        for differentiated in (
            with_policy(fn, extra),
            jax.grad(lambda w, fn=fn: with_policy(fn, extra)(w).sum()),
            with_policy(jax.grad(lambda w, fn=fn: fn(w).sum()), extra),
        ):
            found = dots(differentiated, w)
            assert set(found) == {FULL}
    assert set(dots(amp(jax.grad(lambda w: wrap(product)(w).sum())), w)) == {LOW}


@pytest.mark.parametrize(
    "transform",
    (
        lambda f: lambda w: jax.jvp(f, (w,), (w,))[1],
        lambda f: lambda w: jax.vjp(f, w)[1](w),
        lambda f: jax.vmap(f, axis_size=2, in_axes=None),
        lambda f: jax.vmap(jax.grad(lambda w: f(w).sum()), axis_size=2, in_axes=None),
        lambda f: lambda w: jax.linearize(f, w)[1](w),
        lambda f: jax.jacfwd(lambda s: f(s * jnp.eye(4)).sum()),
    ),
    ids=("jvp", "vjp", "vmap", "vmap of grad", "linearize", "jacfwd"),
)
def test_transforms_do_not_hide_scopes(transform, w):
    arg = w[0, 0] if "jacfwd" in str(transform.__code__.co_names) else w
    inside = transform(scope("block")(lambda w: w @ w))
    low = with_policy(inside, {"block": HALF})
    assert set(dots(low, arg)) == {HALF}
    around = scope("outer")(inside)
    assert set(dots(with_policy(around, {"outer/block": HALF}), arg)) == {HALF}


# amp_stop.


@amp_stop
def stopped(w):
    return w @ w


@pytest.mark.parametrize(
    "copied", (copy.deepcopy, lambda x: cloudpickle.loads(cloudpickle.dumps(x)))
)
def test_copies_of_a_policy_are_for_the_same_primitives(copied):
    policy = default_amp_policy | {lax.exp_p: use_compute_precision}

    def program(policy):
        mixed = amp(jnp.exp, compute_dtype="bfloat16", amp_policy=policy)
        return str(jax.make_jaxpr(mixed)(jnp.ones(3)))

    assert "bf16[3] = exp" in program(policy)
    assert program(copied(policy)) == program(policy)


def test_another_primitive_of_the_same_name_is_no_copy():
    mine = jex.core.Primitive("exp")
    mine.def_impl(jnp.exp)
    mine.def_abstract_eval(lambda x: x)
    rules = {mine: use_compute_precision}
    with pytest.warns(AmpWarning, match="exp"):
        mixed = amp(jnp.exp, compute_dtype="bfloat16", amp_policy=rules)
        assert "bf16" not in str(jax.make_jaxpr(mixed)(jnp.ones(3)))


@pytest.mark.parametrize(
    "policy",
    (
        lambda key: default_amp_policy | {key: "float32"},
        lambda key: PolicyMap("mixed_bfloat16", {key: "float32"}),
    ),
    ids=("rules", "map"),
)
def test_float32_for_what_is_low_as_written_is_told(policy):
    def net(w):
        with jax.named_scope("low"):
            x = w.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)
        with jax.named_scope("full"):
            return x.astype(jnp.float32) @ w

    def run(key):
        rules = policy(key)
        dtype = None if isinstance(rules, PolicyMap) else jnp.bfloat16
        amp(net, compute_dtype=dtype, amp_policy=rules)(jnp.ones((2, 2)))

    run("full")
    with pytest.warns(AmpWarning, match="'low' .* float32, but .* bfloat16 as wri"):
        run("low")


def test_a_gradient_in_float16_that_nobody_asked_for_is_told(monkeypatch):
    monkeypatch.setattr(_errors, "_seen", set())

    def loss(w):
        return jnp.sum(w @ w)

    w = jnp.ones((2, 2))
    for asked in (
        amp(loss, compute_dtype="float16"),
        amp(loss, amp_policy="mixed_float16"),
        amp(loss, compute_dtype="bfloat16"),
        enable_amp(loss, optax.sgd(0.1))[0],  # whose optimizer sees to the scale
    ):
        jax.grad(asked)(w)
    amp(loss)(w)  # no gradient
    explain(amp(loss))(w)  # the report's own gradient
    explain(lambda w: 2 * amp(loss)(w))(w)
    scaled = dynamic_scale_grad(amp(loss))
    scaled(w, dynamic_scaler_state=DynamicScalerState())
    with using_policy("mixed_float16"):
        jax.grad(amp(loss))(w)
    with pytest.warns(AmpWarning, match="float16, since nothing says a dtype, and is"):
        jax.jit(jax.grad(amp(loss)))(w)
    jax.grad(amp(lambda w: loss(w)))(w)  # told once


def test_float16_that_nobody_asked_for_around_a_gradient_is_told(w, monkeypatch):
    monkeypatch.setattr(_errors, "_seen", set())
    monkeypatch.setattr(switch, "_losses_scaled", ContextVar("scaled", default=0))
    w = {"in": w, "out": w}

    def loss(w):
        return jnp.sum(jnp.tanh(w["in"] @ w["in"]) @ w["out"])

    def step(w):
        return jax.tree.map(lambda w, g: w - 0.1 * g, w, jax.grad(loss)(w))

    def forces(w, x):
        return jax.grad(lambda x: jnp.sum(jnp.tanh(x @ w["in"])))(x)

    amp(step, compute_dtype="float16")(w)
    amp(step, compute_dtype="bfloat16")(w)
    amp(forces)(w, w["in"])
    amp(lambda w: jax.jvp(loss, (w,), (w,))[1])(w)  # no backward pass
    told = "float16 and stands around a gradient.*step"
    with pytest.warns(AmpWarning, match=told):
        jax.jit(amp(step))(w)
    amp(jax.grad(loss))(w)  # told once
    monkeypatch.setattr(_errors, "_seen", set())
    tx = loss_scale_optimizer(optax.sgd(0.1))
    scaled = jax.jit(lambda w, state: tx.value_and_grad(loss, state)(w)[1])
    for _ in range(2):  # at the second call, `jit` has it in its cache
        amp(lambda w: scaled(w, tx.init(w)))(w)


def test_float32_around_another_amp_is_told(w):
    def net(w):
        return jnp.tanh(w @ w)

    low, full = amp(net, compute_dtype="bfloat16"), amp(net, amp_policy="float32")
    told = "float32 is asked for around another `amp`, .* in bfloat16, .*test_policy.py"
    with pytest.warns(AmpWarning, match=told):
        amp(lambda w: low(w) + 1, amp_policy="float32")(w)
    with pytest.warns(AmpWarning, match=told):
        jax.grad(amp(lambda w: lax.map(low, w[None]).sum(), amp_policy="float32"))(w)
    amp(lambda w: full(w) + 1, amp_policy="float32")(w)
    amp(lambda w: low(w) + 1, amp_policy={})(w)  # asks for nothing
    mixed = default_amp_policy | {"elsewhere": HALF}
    with pytest.warns(AmpWarning, match="'elsewhere' .* matched nothing"):
        amp(lambda w: low(w) + 1, compute_dtype="float32", amp_policy=mixed)(w)
    amp(lambda w: low(w) + 1, compute_dtype="bfloat16")(w)


def test_a_global_policy_that_nothing_asks_for_is_told(w):
    try:
        set_global_policy("mixed_bfloat16")
        explain(amp(lambda w: w @ w, amp_policy="float32"))(w)
        with pytest.warns(AmpWarning, match="`set_global_policy` had no effect"):
            set_global_policy(None)
        set_global_policy("mixed_bfloat16")
        set_global_policy("mixed_float16")  # such as that of a flag
        with using_policy("float32"):
            amp(lambda w: w @ w)(w)
    finally:
        set_global_policy(None)


def test_a_report_of_a_wrapped_function_does_not_use_the_policy_of_a_block(w):
    mixed = amp(lambda w: w @ w, compute_dtype="bfloat16")
    with pytest.warns(AmpWarning, match="`using_policy` had no effect"):
        with using_policy("mixed_float16"):
            explain(mixed)(w)
    with using_policy("mixed_bfloat16"):
        assert explain(lambda w: w @ w, lean=True)(w).now.totals.low_share == 1


def test_tasks_may_be_within_one_block_at_the_same_time():
    block = using_policy("mixed_bfloat16")

    async def wrapping(place):
        with block:
            for _ in range(place):  # the first to enter is the first to leave
                await asyncio.sleep(0)
            policy = global_policy()
        return policy.compute_dtype, global_policy().compute_dtype

    async def together():
        return await asyncio.gather(*map(wrapping, range(1, 4)))

    assert asyncio.run(together()) == [(jnp.bfloat16, jnp.float16)] * 3
    with block, block:
        assert global_policy().compute_dtype == jnp.bfloat16


@pytest.mark.parametrize("wrap", (jax.jit, lambda fn: fn), ids=("jitted", "eager"))
def test_amp_stop_around_what_amp_has_made_is_told(wrap):
    def net(w):
        return w @ w

    low = wrap(amp(net, compute_dtype=jnp.bfloat16))
    with pytest.warns(AmpWarning, match="`amp_stop` stands around `net`.*not reach"):
        amp_stop(low)(jnp.ones((2, 2)))
    with amp_stop(), warnings.catch_warnings():  # told once
        warnings.simplefilter("error")
        low(jnp.ones((3, 3)))


def test_amp_stop_around_a_library_that_uses_amp_is_not_told():
    library = amp(jnp.matmul, compute_dtype=jnp.bfloat16)
    kept = amp_stop(lambda w: library(w, w) + jnp.tanh(w))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        amp(lambda w: kept(w) @ w, compute_dtype=jnp.bfloat16)(jnp.ones((2, 2)))


@pytest.mark.parametrize(
    "make",
    (amp_stop, disable_amp, lambda: using_policy("mixed_bfloat16")),
    ids=("amp_stop", "disable_amp", "using_policy"),
)
def test_a_block_that_is_not_entered_is_told(make):
    with pytest.warns(AmpWarning, match="by itself does nothing. Write `with "):
        make()
    with warnings.catch_warnings():
        warnings.simplefilter("error")

        @make()
        def decorated():
            return amp(abs)

        decorated()
        with make():
            _ = amp(abs)


@amp_stop()
def stopped_by_call(w):
    return w @ w


def stopped_inside(w):
    with amp_stop():
        return w @ w


@scope("amp_step")
def stopped_by_its_other_name(w):
    return w @ w


@pytest.mark.parametrize(
    "stop", (stopped, stopped_by_call, stopped_inside, stopped_by_its_other_name)
)
@pytest.mark.parametrize("extra", ({}, {"outer": HALF}, {DOT: HALF}), ids=str)
def test_amp_stop_goes_before_all(stop, extra, w):
    @scope("outer")
    def fn(w):
        return stop(w @ w) @ w

    around = extra.get(DOT, extra.get("outer", LOW))
    assert dots(with_policy(fn, extra), w) == [around, FULL, around]
    grad = jax.grad(lambda w: with_policy(fn, extra)(w).sum())
    assert sorted(dots(grad, w)) == sorted([around] * 6 + [FULL] * 3)


def test_what_comes_into_amp_stop_is_cast_back(w):
    dtypes = []

    def fn(w):
        h = w @ w

        @amp_stop
        def norm(h):
            dtypes.append(h.dtype)
            return h / jnp.sqrt(jnp.sum(h * h))

        return norm(h) @ w

    eqns = [eqn for eqn, _ in walk(jax.make_jaxpr(amp(fn))(w))]
    read = {v.aval.dtype for e in eqns if e.primitive.name == "mul" for v in e.invars}
    assert read == {jnp.dtype("float32")}
    assert dtypes == [jnp.float32]
    assert amp_stop(net).__name__ == "net"


# Callbacks.


def test_callbacks_are_given_what_they_need(w):
    calls = []

    def rule(compute_dtype, original_dtypes, *invars, **bind_params):
        calls.append((compute_dtype, original_dtypes, invars, bind_params))
        return [x.astype("bfloat16") for x in invars], bind_params | {
            "preferred_element_type": jnp.dtype("float32")
        }

    def fn(w):
        h = jnp.maximum(w @ w, 0.0)
        with scope("mine"):
            h = lax.dot(h, w, precision="highest")
        return h @ w

    low = with_policy(fn, {"mine": rule})
    out = jax.make_jaxpr(low)(w)
    compute_dtype, original_dtypes, invars, params = calls[-1]
    assert (compute_dtype, original_dtypes) == (LOW, (FULL, FULL))
    assert [x.shape for x in invars] == [(4, 4), (4, 4)]
    assert invars[0].dtype == LOW  # as it is now: handed on as it was made
    assert params["precision"] == (lax.Precision.HIGHEST,) * 2
    _, mine, _ = (e for e, _ in walk(out) if e.primitive is DOT)
    assert [v.aval.dtype.name for v in mine.invars] == [HALF, HALF]
    assert mine.outvars[0].aval.dtype == jnp.float32
    assert low(w).dtype == jnp.float32


@pytest.mark.parametrize(
    "inner, expected",
    (
        (use_compute_precision, LOW),
        (use_original_precision, FULL),
        (use_precision("bfloat16"), HALF),
        (use_widest_precision, FULL),
    ),
)
def test_library_rules_in_callbacks(inner, expected, w):
    """Products, and data movement, which has integers among its operands."""

    def rule(compute_dtype, original_dtypes, *invars, **bind_params):
        return inner(compute_dtype, original_dtypes, *invars, **bind_params)

    def fn(w, i):
        return (w @ w)[i] @ w

    low = amp(fn, amp_policy={DOT: rule, lax.gather_p: rule})
    i = jnp.array([2, 0])
    assert dots(low, w, i) == [expected] * 2
    bound = 8 * float(jnp.finfo(expected).eps)
    np.testing.assert_allclose(low(w, i), fn(w, i), atol=bound, rtol=bound)


def test_callbacks_never_get_more_bits_than_the_author(w):
    def rule(compute_dtype, original_dtypes, *invars, **bind_params):
        return [x.astype("float32") for x in invars], bind_params | {
            "preferred_element_type": jnp.dtype("float32")
        }

    fn = amp(lambda w: (w @ w) * w, amp_policy={DOT: rule})
    assert fn(w.astype(HALF)).dtype == HALF
    eqns = [eqn for eqn, _ in walk(jax.make_jaxpr(fn)(w.astype(HALF)))]
    assert eqns[-1].invars[0].aval.dtype == HALF


# Bad input.


class Unhashable:
    __hash__ = None

    def __call__(self, compute_dtype, original_dtypes, *invars, **bind_params):
        return invars, bind_params


JIT = getattr(primitives, "jit_p", None) or primitives.pjit_p


@pytest.mark.parametrize(
    "policy, error, match",
    (
        ([("a", "float32")], TypeError, "must be a dict .* got list"),
        (3, TypeError, "must be a dict .* got int"),
        ("flaot32", ValueError, "no policy called 'flaot32'. Did you mean 'float32'"),
        ({3: "float32"}, TypeError, "key of `amp_policy` must be .* but got 3"),
        ({lax.dot_general: "float32"}, TypeError, "Use .*: `jax.lax.dot_general_p`"),
        ({jnp.tanh: "float32"}, TypeError, "Use .*: `jax.lax.tanh_p`"),
        ({"": "float32"}, TypeError, "must be .* but got ''"),
        ({"//": "float32"}, TypeError, "must be .* but got '//'"),
        ({("a", "b"): "float32"}, TypeError, r"but got \('a', 'b'\)"),
        ({"a": 3}, TypeError, r"`amp_policy\['a'\]` must be a rule .* but got 3"),
        ({DOT: None}, TypeError, r"`amp_policy\[dot_general\]` must be a rule"),
        ({"a": "flaot32"}, TypeError, "'flaot32', .* Did you mean 'float32'"),
        ({"a": "int8"}, TypeError, "'int8', which is no floating dtype"),
        ({"a": jnp.int32}, TypeError, "which is no floating dtype"),
        ({"a": "float64"}, ValueError, "float64, which JAX only has with x64"),
        ({"a": Unhashable()}, TypeError, "must be hashable.*Unhashable"),
        ({JIT: "float16"}, AmpError, "holds a whole program.*named_scope"),
        ({primitives.scan_p: use_widest_precision}, AmpError, "`scan` holds a whole"),
        ({primitives.cholesky_p: "float16"}, AmpError, "`cholesky` only exists in the"),
        ({"amp_stop": "float16"}, AmpError, "'amp_stop' always means"),
        ({"amp_step": use_compute_precision}, AmpError, "'amp_step' always means"),
    ),
)
@pytest.mark.parametrize("form", (lambda **k: amp(net, **k), amp), ids=("fn", "none"))
def test_bad_policies(policy, error, match, form):
    """Known, and said, when `amp` is called: before anything is traced."""
    with pytest.raises(error, match=match):
        form(amp_policy=policy)


@pytest.mark.parametrize(
    "make, error, match",
    (
        (lambda: amp(3), TypeError, "`fn` must be callable, but got int"),
        (lambda: amp(jnp.ones(3)), TypeError, r"not `amp\(fn\(x\)\)`"),
        (lambda: amp()("net"), TypeError, "`fn` must be callable, but got str"),
        (lambda: amp_stop(3), TypeError, "`amp_stop` takes a function.*got int"),
        (lambda: amp(net, compute_dtype="int8"), TypeError, "`compute_dtype` must be"),
        (lambda: amp(compute_dtype="half-ish"), TypeError, "but got 'half-ish'"),
        (lambda: amp(compute_dtype=jnp.complex64), TypeError, "floating dtype"),
        (lambda: amp(compute_dtype="float64"), ValueError, "only has with x64"),
        (lambda: use_precision("bool"), TypeError, "`dtype` must be a floating"),
        (lambda: use_precision("float64"), ValueError, "only has with x64"),
    ),
)
def test_bad_arguments(make, error, match):
    with pytest.raises(error, match=match):
        make()


@pytest.mark.parametrize(
    "rule, match",
    (
        (lambda c, o, *xs, **p: (xs[:1], p), "given 2 inputs .* returned 1"),
        (lambda c, o, *xs, **p: (3, p), "given 2 inputs .* returned 3"),
        (lambda c, o, *xs, **p: xs[0], r"must return `\(invars, bind_params\)`"),
        (lambda c, o, *xs, **p: None, "but returned NoneType"),
        (lambda c, o, *xs, **p: (p, xs), "must return"),
        (lambda c, o, *xs, **p: {}["missing"], "KeyError: 'missing'"),
        (lambda c, o, x: ((x,), {}), "as one: too many positional arg"),
    ),
)
def test_rules_that_fail(rule, match, w):
    """The message names the rule, the primitive, its scope and its source line."""
    low = amp(net, amp_policy={DOT: rule})
    with pytest.raises(AmpError, match=match) as info:
        low(w)
    message = str(info.value)
    assert "`dot_general` in scope 'net/encoder/attention'" in message
    assert f"{__file__}:{net.__wrapped__.__code__.co_firstlineno + 4}" in message


# Nothing is skipped in silence.

toy_p = jex.core.Primitive("toy_program")
toy_p.multiple_results = True


@toy_p.def_impl
def _toy_impl(*args, jaxpr):
    return jex.core.jaxpr_as_fun(jaxpr)(*args)


@toy_p.def_abstract_eval
def _toy_avals(*avals, jaxpr):
    return list(jaxpr.out_avals)


def toy(w):
    """An equation with a program inside that nobody has heard of."""
    program = jax.make_jaxpr(lambda w: w @ w)(w)
    with scope("odd"):
        return toy_p.bind(w @ w, jaxpr=program)[0] @ w


def test_unknown_programs_run_as_written_and_warn_once(w):
    with pytest.warns(AmpWarning) as warned:
        out = amp(toy)(w)
    (warning,) = warned
    for part in ("`toy_program` holds a program", "scope 'odd'", f"{__file__}:"):
        assert part in str(warning.message)
    amp(toy, compute_dtype=HALF)(w)  # given once: the same place again says nothing
    np.testing.assert_allclose(out, toy(w), rtol=0.02, atol=0.02)
    assert dots(amp(toy), w) == [LOW, FULL, LOW]


def test_strict_raises_for_unknown_programs(w):
    with pytest.raises(AmpError, match="`toy_program` holds a program"):
        amp(toy, strict=True)(w)


@pytest.mark.parametrize(
    "fn, extra",
    ((amp_stop(toy), {}), (toy, {toy_p: use_original_precision})),
    ids=("amp_stop", "policy"),
)
@pytest.mark.parametrize("strict", (False, True))
def test_unknown_programs_that_are_meant_to_be_full(fn, extra, strict, w):
    """The two ways that the message names: nothing more is said."""
    low = amp(fn, strict=strict, amp_policy=default_amp_policy | extra)
    np.testing.assert_allclose(low(w), toy(w), rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    "key",
    ("attentoin", "encoder/head", re.compile("net/x.*"), lax.conv_general_dilated_p),
    ids=str,
)
def test_keys_that_match_nothing(key, w):
    low = amp(net, amp_policy=default_amp_policy | {key: "bfloat16"})
    name = re.escape(key.pattern if isinstance(key, re.Pattern) else str(key))
    with pytest.warns(AmpWarning, match=f"key .*{name}.* matched nothing"):
        low(w)
    low(w)  # warned of already
    policy = default_amp_policy | {key: "bfloat16"}
    with pytest.raises(AmpError, match="matched nothing"):
        amp(net, amp_policy=policy, strict=True)(w)


@pytest.mark.parametrize(
    "make",
    (
        lambda key: default_amp_policy | {key: "float32"},
        lambda key: PolicyMap("mixed_float16", {key: "float32"}),
        lambda key: Policy("float16").excluding(key),
    ),
    ids=("dict", "map", "limit"),
)
def test_a_key_that_matches_nothing_is_told_once_of_a_policy(make, w):
    def told(policy, *functions):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for fn in functions:
                amp(fn, amp_policy=policy)(w)
        return len(caught)

    other, third = (lambda w: jnp.tanh(w @ w)), jax.grad(lambda w: jnp.sum(w @ w))
    assert told(make("attentoin"), net, other, third, net) == 1
    assert told(make("attentoin"), other) == 0  # an equal policy is the same
    assert told(make("atention"), net, other) == 1


def test_keys_of_the_default_policy_may_match_nothing(w):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for extra in (
            {},
            {"mlp": HALF},  # found inside
            {"amp_default": "float32"},
            {"amp_stop": use_original_precision},
        ):
            amp(net, strict=True, amp_policy=default_amp_policy | extra)(w)


def test_a_key_inside_of_a_body_has_matched(w):
    fn = jax.jit(NESTINGS["scan"](scope("deep")(lambda h: h @ h)))
    low = amp(fn, strict=True, amp_policy=default_amp_policy | {"deep": HALF})
    assert dots(low, w) == [HALF]
