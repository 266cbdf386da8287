"""`saving_low`: values as without it, derivatives at rounded inputs, less kept.

In 8 bits it is a rule for scopes, and an option of `amp`."""

import functools
import warnings

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jax import lax
from jax.experimental import jet

from benchmarks import measure
from benchmarks.workloads import WORKLOADS
from jaxamp_like import AmpError, amp, default_amp_policy, explain, trace_numerics
from jaxamp_like._rules import with_low_residuals
from jaxamp_like._rules.low_bits import BLOCK, LowBits, copy_of
from jaxamp_like.presets import quantised
from jaxamp_like.rules import (
    float8,
    int8 as int8_rule,
    saving_low,
    use_compute_precision,
    use_original_precision,
    use_precision_by_pass,
    when,
)

pytestmark = pytest.mark.rest

X = jr.normal(jr.key(0), (5, 7))
FULL = saving_low(use_original_precision)


def mixed(fn, *primitives):
    policy = default_amp_policy | dict.fromkeys(primitives, FULL)
    return amp(fn, compute_dtype="bfloat16", amp_policy=policy)


def rounded(x):
    return x.astype("bfloat16").astype("float32")


def test_values_are_exact_and_derivatives_are_those_at_rounded_inputs():
    def fn(x):
        return jnp.sin(x)

    ours = mixed(fn, lax.sin_p)
    np.testing.assert_array_equal(ours(X), jnp.sin(X))
    grads = jax.vmap(jax.vmap(jax.grad(ours)))(X)
    np.testing.assert_allclose(grads, jnp.cos(rounded(X)), rtol=1e-6)
    tangents = jax.jvp(ours, (X,), (X,))[1]
    np.testing.assert_allclose(tangents, jnp.cos(rounded(X)) * X, rtol=1e-6)


def test_keeps_low_copies():
    def fn(x):
        return jnp.sum(jnp.sin(jnp.cumsum(x, axis=0)))

    assert measure.saved_bytes(fn, X) == {"float32": 4 * X.size}
    assert measure.saved_bytes(mixed(fn, lax.sin_p), X) == {"bfloat16": 2 * X.size}


def test_several_operands_one_of_them_fixed():
    def fn(x, y):
        return jnp.sum(x * lax.stop_gradient(y) + x * y)

    dx, dy = jax.grad(mixed(fn, lax.mul_p), argnums=(0, 1))(X, X + 1)
    np.testing.assert_allclose(dx, 2 * rounded(X + 1), rtol=1e-6)
    np.testing.assert_allclose(dy, rounded(X), rtol=1e-6)


@pytest.mark.parametrize("wrap", (jax.jit, jax.checkpoint, jax.vmap))
def test_composes(wrap):
    def fn(x):
        body = wrap(lambda x: jnp.max(jnp.sin(x) * x, axis=-1))
        return jnp.sum(lax.scan(lambda c, x: (c + body(x), None), x[0, :, 0], x)[0])

    xs = jnp.stack([X, 2 * X, -X])
    ours = mixed(fn, lax.sin_p, lax.mul_p, lax.reduce_max_p)
    grads, true = jax.grad(ours)(xs), jax.grad(fn)(xs)
    np.testing.assert_allclose(grads, true, atol=0.05 * float(jnp.abs(true).max()))


def test_nothing_to_store_lower():
    rule = saving_low(use_compute_precision)
    policy = default_amp_policy | {lax.tanh_p: rule}

    def jaxpr(policy):
        fn = amp(jnp.tanh, compute_dtype="bfloat16", amp_policy=policy)
        return str(jax.make_jaxpr(fn)(X))

    assert jaxpr(policy) == jaxpr(default_amp_policy | {lax.tanh_p: rule.rule})
    assert rule.is_compute


def test_no_rule():
    with pytest.raises(TypeError, match="`rule` must be a rule"):
        saving_low(3)


# In 8 bits, with scales by block: the numbers of a copy.

FORMATS = ("int8", "float8_e4m3fn", "float8_e5m2")
# Half a step, of the largest number of a block or, for float8, of a number itself.
HALF_STEP = {"int8": 0.5 / 126, "float8_e4m3fn": 2.0**-4, "float8_e5m2": 2.0**-3}
formats = pytest.mark.parametrize("form", FORMATS)


def decoded(x, form="int8", block=BLOCK):
    """The numbers of a copy: what a backward pass reads in place of `x`."""
    reads = with_low_residuals(lambda x: x * x, lambda x: x * x, prevent_cse=False)

    def square(x):
        return jnp.sum(reads([x], [copy_of(x, LowBits(form, block))]))

    return jax.grad(square)(x) / 2


@pytest.mark.sample(4)
@formats
@pytest.mark.parametrize("shape, block", [((4, 64), 32), ((3, 7), 4), ((97,), 32)])
@pytest.mark.parametrize("scale", (1.0, 1e-20, 1e20))
def test_numbers_of_a_copy(form, shape, block, scale):
    x = jr.normal(jr.key(1), shape) * scale
    size = jnp.abs(x).max() if form == "int8" else jnp.abs(x)
    # A number far below the largest of its block is in the steps around zero.
    least = 0 if form == "int8" else jnp.abs(x).max() * 2.0**-9
    error = jnp.abs(decoded(x, form, block) - x)
    assert bool(jnp.all(error <= HALF_STEP[form] * jnp.maximum(size, least)))


def test_blocks_have_scales_of_their_own():
    x = jnp.concatenate([jnp.linspace(0, 1, 8), jnp.linspace(0, 1e4, 8)])
    error = jnp.abs(decoded(x, "int8", 8) - x)
    assert float(error[:8].max()) <= HALF_STEP["int8"]


@formats
@pytest.mark.parametrize("bad", (jnp.nan, jnp.inf, -jnp.inf))
def test_what_is_not_finite_stays_so(form, bad):
    x = jnp.arange(16.0).at[3].set(bad)
    numbers = decoded(x, form, 8)
    assert not bool(jnp.isfinite(numbers[3]))
    np.testing.assert_allclose(numbers[8:], x[8:], rtol=0.07 if "3" in form else 0.13)


@pytest.mark.parametrize("form", FORMATS[1:])
def test_numbers_of_float8_are_kept_exactly(form):
    x = jr.normal(jr.key(2), (8, 64)).astype(form).astype("float32")
    np.testing.assert_array_equal(decoded(x, form), x)
    np.testing.assert_array_equal(decoded(16 * x, form), 16 * x)


def test_zeros_and_nothing_at_all():
    np.testing.assert_array_equal(decoded(jnp.zeros((2, 8))), jnp.zeros((2, 8)))
    assert decoded(jnp.zeros((2, 0))).shape == (2, 0)


@pytest.mark.sample(4)
@formats
@pytest.mark.parametrize("axis", (0, 1, 2))
def test_examples_of_vmap_are_rounded_one_by_one(form, axis):
    xs = jr.normal(jr.key(3), (4, 6, 8))
    one = jax.vmap(functools.partial(decoded, form=form, block=4), axis, axis)
    each = [decoded(x, form, 4) for x in jnp.moveaxis(xs, axis, 0)]
    np.testing.assert_array_equal(one(xs), jnp.stack(each, axis))


# Programs, beside an oracle whose backward pass reads decoded values. They compute in
# float32, so that nothing but what is kept is rounded.

W = jr.normal(jr.key(4), (64, 64)) / 16
V = jr.normal(jr.key(5), (64, 64)) / 16
XS = jr.normal(jr.key(6), (32, 64))


def reading(fn, *forms, block=BLOCK):
    """`fn`, whose derivative is that at decoded operands; a form for each operand."""

    def read(x, form):
        return x if form is None else decoded(x, form, block)

    @jax.custom_vjp
    def op(*xs):
        return fn(*xs)

    def forward(*xs):
        return fn(*xs), [read(*pair) for pair in zip(xs, forms, strict=True)]

    op.defvjp(forward, lambda kept, ct: jax.vjp(fn, *kept)[1](ct))
    return op


class Plain:
    """The program as its author writes it."""

    @staticmethod
    def dot(x, w):
        return x @ w

    first = dot  # of an argument, which is live in the backward pass anyway

    @staticmethod
    def product(x, y):
        return x @ y

    tanh = staticmethod(lambda x: jnp.tanh(x * 1.5))


def oracle(form, nonlinear="int8"):
    """The same ops, which keep activations as `lean=form` does, and no weights."""
    made = type("Oracle", (), {})
    made.first = Plain.first
    made.dot = staticmethod(reading(Plain.dot, form, None))
    made.product = staticmethod(reading(Plain.product, form, form))
    made.tanh = staticmethod(reading(Plain.tanh, nonlinear))
    return made


def layer(ops, w, v, x):
    return ops.dot(ops.tanh(ops.dot(x, w)), v)


def plain(ops, w, v, x):
    return ops.dot(ops.tanh(ops.first(x, w)), v)


def jitted(ops, w, v, x):
    return jax.jit(functools.partial(plain, ops))(w, v, x)


def attending(ops, w, v, x):
    return ops.product(ops.first(x, w), ops.first(x, v).T)


def scanned(ops, w, v, x):
    def body(c, _):
        return layer(ops, w, v, c), jnp.sum(c)

    return lax.scan(body, ops.first(x, w), None, length=3)[0]


def in_branch(ops, w, v, x):
    h = ops.first(x, w)
    return lax.cond(x[0, 0] < 100, lambda h: layer(ops, w, v, h), lambda h: h, h)


def mapped(ops, w, v, x):
    return jax.vmap(lambda x: plain(ops, w, v, x))(x.reshape(4, 8, 64))


def sharded(ops, w, v, x):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("d",))
    spec, all_of_it = jax.sharding.PartitionSpec("d"), jax.sharding.PartitionSpec()
    fn = functools.partial(plain, ops)
    ins = (all_of_it, all_of_it, spec)
    return jax.shard_map(fn, mesh=mesh, in_specs=ins, out_specs=spec)(w, v, x)


def custom(ops, w, v, x):
    @jax.custom_vjp
    def double(x):
        return 2 * x

    double.defvjp(lambda x: (2 * x, None), lambda _, ct: (2 * ct,))
    return ops.dot(double(ops.tanh(ops.first(x, w))), v)


PROGRAMS = (plain, jitted, attending, scanned, in_branch, mapped, sharded, custom)
# What ends in a loop, a branch or a `shard_map` is not known to be contracted.
CONTRACTED = (plain, jitted, attending, mapped, custom)
programs = pytest.mark.parametrize("program", PROGRAMS, ids=lambda fn: fn.__name__)


def loss(program, ops=Plain):
    return lambda w, v, x: jnp.sum(jnp.sin(program(ops, w, v, x)))


def in_8_bits(fn, lean="int8", dtype="float32", **options):
    return amp(fn, compute_dtype=dtype, lean=lean, **options)


@pytest.mark.sample(4)
@formats
@programs
def test_gradients_are_those_at_decoded_values(program, form):
    ours = jax.jit(jax.grad(in_8_bits(loss(program), form), (0, 1)))(W, V, XS)
    without = jax.jit(jax.grad(loss(program), (0, 1)))(W, V, XS)
    # Of what the last contraction made. It is summed with its row, which has one scale.
    is_kept = program in CONTRACTED
    sine = reading(jnp.sin, "int8", block=64) if is_kept else jnp.sin

    def by_hand(w, v, x):
        return jnp.sum(sine(program(oracle(form), w, v, x)))

    hand = jax.jit(jax.grad(by_hand, (0, 1)))(W, V, XS)
    for one, other, true in zip(ours, hand, without, strict=True):
        size = float(jnp.linalg.norm(true))
        gap = float(jnp.linalg.norm(other - true)) / size
        assert gap > 1e-4  # the oracle's rounding shows
        assert float(jnp.linalg.norm(one - other)) / size < 0.02 * gap


@pytest.mark.sample(3)
@pytest.mark.parametrize("program", PROGRAMS[:-1], ids=lambda fn: fn.__name__)
def test_values_and_forward_mode_are_unaffected(program):
    fn, args, moves = loss(program), (W, V, XS), (V, W, XS)

    def both(fn):
        return jax.jit(lambda *args: jax.jvp(fn, args, moves))(*args)

    ours, true = both(in_8_bits(fn)), both(in_8_bits(fn, True))
    np.testing.assert_array_equal(ours[0], true[0])
    np.testing.assert_allclose(ours[1], true[1], rtol=1e-5)
    # What `linearize` keeps is what the backward pass keeps.
    linear = jax.linearize(jax.jit(in_8_bits(fn)), *args)[1](*moves)
    grads = jax.jit(jax.grad(in_8_bits(fn), (0, 1, 2)))(*args)
    products = [jnp.vdot(g, t) for g, t in zip(grads, moves, strict=True)]
    bound = 1e-4 * sum(map(abs, products))
    assert abs(linear - sum(products)) < bound


@programs
def test_what_is_kept(program):
    count = measure.saved_bytes(in_8_bits(loss(program)), W, V, XS, argnums=(0, 1))
    whole = measure.saved_bytes(
        in_8_bits(loss(program), True), W, V, XS, argnums=(0, 1)
    )
    assert count["int8"] > 0
    most = 0.5 if program in CONTRACTED else 0.75
    assert count.total() < most * whole.total()


@pytest.mark.sample(2)
@programs
def test_retracing_changes_nothing(program):
    grad = jax.grad(in_8_bits(loss(program)))
    one, other = (str(jax.make_jaxpr(grad)(W, V, XS)) for _ in range(2))
    again = jax.grad(in_8_bits(loss(program)))
    np.testing.assert_array_equal(jax.jit(grad)(W, V, XS), jax.jit(again)(W, V, XS))
    assert len(one) == len(other)


def test_a_while_loop_in_forward_mode():
    def fn(w):
        def body(state):
            i, x = state
            return i + 1, jnp.tanh(x @ w)

        return lax.while_loop(lambda state: state[0] < 3, body, (0, XS))[1]

    ours, true = (
        jax.jvp(in_8_bits(fn, lean), (W,), (V,))[1] for lean in ("int8", True)
    )
    np.testing.assert_array_equal(ours, true)


@pytest.mark.parametrize(
    "twice",
    (
        lambda fn, w: jax.jvp(jax.grad(fn), (w,), (V,))[1],
        lambda fn, w: jax.grad(lambda w: jnp.vdot(jax.grad(fn)(w), V))(w),
        lambda fn, w: jax.jit(lambda w: jax.jvp(jax.grad(fn), (w,), (V,))[1])(w),
        lambda fn, w: jax.vmap(lambda v: jax.jvp(jax.grad(fn), (w,), (v,))[1])(V[None]),
    ),
    ids=("forward over reverse", "reverse over reverse", "jit", "vmap"),
)
def test_second_derivatives_keep_16_bits(twice):
    def fn(w):
        return loss(plain)(w, V, XS)

    ours, true = (twice(in_8_bits(fn, lean), W) for lean in ("int8", True))
    np.testing.assert_allclose(ours, true, atol=1e-5 * float(jnp.abs(true).max()))


def test_a_taylor_series_keeps_16_bits():
    def fn(x):
        return loss(plain)(W, V, x)

    def terms(lean):
        return jet.jet(jax.grad(in_8_bits(fn, lean)), (XS,), ((XS, 0 * XS),))[1][0]

    ours, true = terms("int8"), terms(True)
    np.testing.assert_allclose(ours, true, atol=1e-5 * float(jnp.abs(true).max()))
    with pytest.raises(AmpError, match="series of what is kept in 8 bits"):
        jet.jet(jax.jit(in_8_bits(fn)), (XS,), ((XS, 0 * XS),))


def test_a_second_derivative_that_does_not_show_is_refused():
    inner = jax.jit(jax.grad(in_8_bits(lambda w: loss(plain)(w, V, XS))))
    with pytest.raises(AmpError, match=r"second derivative.*inside of the `jit`"):
        jax.jvp(inner, (W,), (V,))


# What is kept in 8 bits, and what is not.


def stream(w, v, x):
    h = x @ w + x
    for _ in range(3):
        with jax.named_scope("block"):
            h = h + jnp.tanh(h * 1.5) @ v
    return jnp.sum(jnp.sin(h))


def kept(fn, *args, argnums=(0, 1)):
    found = measure.saved(fn, *args, argnums=argnums)
    return [a.dtype.name for a in found if a.size == XS.size]


def named(rule, *scopes):
    return default_amp_policy | dict.fromkeys(scopes, rule)


def test_sums_are_kept_as_they_are_unless_a_user_names_their_scope():
    lean = amp(stream, compute_dtype="bfloat16", lean="int8")
    default = amp(stream, compute_dtype="bfloat16")
    of_stream = [kept(fn, W, V, XS).count("float32") for fn in (default, lean)]
    assert of_stream[0] == of_stream[1] > 1
    policy = named(saving_low("int8"), "block")
    ours = amp(stream, compute_dtype="bfloat16", amp_policy=policy)
    assert kept(ours, W, V, XS).count("float32") == 1  # of the sine, out of the scope
    grads, true = (jax.grad(fn)(W, V, XS) for fn in (ours, stream))
    assert float(jnp.linalg.norm(grads - true) / jnp.linalg.norm(true)) < 0.02


@pytest.mark.parametrize("loop", (False, True))
def test_the_boundaries_of_an_authors_checkpoint(loop):
    def fn(w, v, x):
        @jax.checkpoint
        def block(h):
            return h + jnp.tanh(h * 1.5) @ v

        h = x @ w + x
        with jax.named_scope("block"):
            if loop:
                h, _ = lax.scan(lambda h, _: (block(h), None), h, None, length=2)
            else:
                h = block(block(h))
        return jnp.sum(h)

    def sizes(**options):
        mixed = amp(fn, compute_dtype="bfloat16", **options)
        return measure.saved_bytes(mixed, W, V, XS, argnums=(0, 1))

    assert sizes() == sizes(lean="int8") == {"float32": 4 * 2 * XS.size}
    ours = sizes(amp_policy=named(saving_low("int8", block=16), "block"))
    assert ours == {"int8": 2 * XS.size, "bfloat16": 2 * 2 * XS.size // 16}


def test_a_checkpoint_reads_what_a_contraction_made():
    def fn(w, v, x):
        return jnp.sum(jax.checkpoint(lambda h: jnp.sin(h) @ v)(x @ w))

    mixed = amp(fn, compute_dtype="bfloat16", lean="float8")
    assert kept(mixed, W, V, XS) == ["int8"]


def test_one_copy_for_all_that_read_a_value():
    def fn(w, v, x):
        h = jnp.tanh(x @ w)
        return jnp.sum(jnp.sin((h @ v) + (h @ w) * (h @ v.T)))

    mixed = amp(fn, compute_dtype="bfloat16", lean="int8")
    # Of `x @ w`, of `h`, and of each product of `h` that is multiplied.
    assert kept(mixed, W, V, XS).count("int8") <= 5
    assert "bfloat16" not in kept(mixed, W, V, XS)


def test_what_does_not_vary_in_a_loop_is_kept_once():
    def fn(w, x):
        h = jnp.tanh(x @ w)

        def body(c, _):
            return jnp.tanh(h.T @ (h @ c) / 64), None

        return jnp.sum(lax.scan(body, w, None, length=5)[0])

    found = measure.saved(amp(fn, compute_dtype="bfloat16", lean="int8"), W, XS)
    assert not any(a.shape == (5, *XS.shape) and a.dtype != "int8" for a in found)
    assert sum(a.shape == (5, *XS.shape) for a in found) == 1  # of `h @ c`


@pytest.mark.parametrize("rule", (float8(where=None), int8_rule(where=None)))
def test_what_a_quantised_contraction_keeps_is_kept_once(rule):
    def fn(w, v, x):
        return jnp.sum(jnp.sin(jnp.tanh(x @ w) @ v))

    def sizes(**options):
        mixed = amp(fn, compute_dtype="bfloat16", amp_policy=quantised(rule), **options)
        return measure.saved_bytes(mixed, W, V, XS, argnums=(0, 1))

    before, ours = sizes(), sizes(lean="int8")
    assert ours.total() < before.total()
    # Each value of an activation's size: as codes of a contraction, or as a copy.
    assert ours.total() <= 3 * XS.size * (1 + 2 / BLOCK) + W.size * 2 + 1024


@pytest.mark.parametrize(
    "policy",
    (
        default_amp_policy | {"full": "float32"},
        default_amp_policy
        | {lax.dot_general_p: use_precision_by_pass(weight_gradient="float32")},
    ),
    ids=("a scope in float32", "a gradient in float32"),
)
def test_what_a_policy_asks_for_in_full_stays_so(policy):
    def fn(w, v, x):
        h = jnp.tanh(x @ w)
        with jax.named_scope("full"):
            return jnp.sum(jnp.sin(h @ v))

    def sizes(lean):
        mixed = amp(fn, compute_dtype="bfloat16", amp_policy=policy, lean=lean)
        return measure.saved_bytes(mixed, W, V, XS, argnums=(0, 1))

    assert sizes("int8")["float32"] == sizes(True)["float32"] > 0


def test_numerics_can_be_traced():
    report = trace_numerics(in_8_bits(loss(plain), dtype="bfloat16"))(W, V, XS)
    assert report.settings == ("compute_dtype=bfloat16, lean=int8",)


@pytest.mark.parametrize("axis", (0, 1), ids=("over rows", "of a row"))
def test_what_a_norm_takes_the_mean_of_stays_as_it_is(axis):
    def fn(w, v, x):
        h = (x + 3) @ w
        deviations = h - jnp.mean(h, axis, keepdims=True)
        scale = lax.rsqrt(jnp.mean(deviations**2, axis, keepdims=True) + 1e-5)
        return jnp.sum(jnp.sin(deviations * scale @ v))

    def error(lean):
        mixed = amp(fn, compute_dtype="bfloat16", lean=lean)
        pairs = zip(*(jax.grad(f, (0, 1))(W, V, XS) for f in (mixed, fn)), strict=True)
        sizes = [jnp.linalg.norm(a - b) / jnp.linalg.norm(b) for a, b in pairs]
        return float(max(sizes))

    assert error("int8") < 2.5 * error(True)
    lean = amp(fn, compute_dtype="bfloat16", lean="int8")
    # `h` in 16 bits, and what both contractions read or made in 8.
    assert kept(lean, W, V, XS).count("bfloat16") == 1


# In a block with large numbers, small ones are off by as much as the large ones.

BESIDE_LARGE = jnp.where(jnp.arange(64) % 32 == 0, 3000.0, 1.0)


def gradient_errors(fn, w, lean, **options):
    mixed = amp(fn, compute_dtype="bfloat16", lean=lean, **options)
    ours, true = jax.jit(jax.grad(mixed))(w), jax.jit(jax.grad(fn))(w)
    return float(jnp.linalg.norm(ours - true) / jnp.linalg.norm(true))


@pytest.mark.parametrize(
    "steep",
    (
        jnp.log,
        lambda h: jnp.log(h + 1e-6),
        lambda h: 1 / h,
        lambda h: 1 / (1e-6 + h * h),
        jnp.sqrt,
        lambda h: h**-0.5,
        lambda h: lax.integer_pow(h, -2),
        jax.checkpoint(jnp.log),
        jax.jit(jnp.log),
    ),
)
def test_what_a_pole_reads_is_not_rounded_to_8_bits(steep):
    w = jnp.abs(W) * BESIDE_LARGE

    def fn(w):
        return jnp.mean(steep(jnp.abs(XS) @ w) * V[:32])

    ours, true = (gradient_errors(fn, w, lean) for lean in ("int8", True))
    assert ours < 3 * true < 0.05


def test_nor_by_a_users_rule():
    def fn(w):
        with jax.named_scope("log"):
            return jnp.mean(jnp.log(jnp.abs(XS) @ w) * V[:32])

    policy = named(saving_low("int8"), "log")
    w = jnp.abs(W) * BESIDE_LARGE
    assert gradient_errors(fn, w, False, amp_policy=policy) < 0.01


@pytest.mark.parametrize("steep", (jnp.round, jnp.floor, lambda h: h % 1.0))
def test_what_jumps_is_run_again_from_what_the_forward_pass_read(steep):
    def fn(w):
        h = XS @ w
        return jnp.sum(jnp.sin(h * lax.stop_gradient(steep(h))))

    ours, true = (gradient_errors(fn, 8 * W, lean) for lean in ("int8", True))
    assert ours < 1.2 * true


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    "choice",
    (
        lambda h: jnp.max(h, -1),
        lambda h: jnp.min(jnp.tanh(h), 0),
        lambda h: jnp.max(jax.nn.gelu(h), -1),
        lambda h: lax.cummax(h, 1),
        lambda h: lax.reduce_window(h, -jnp.inf, lax.max, (1, 4), (1, 4), "VALID"),
        lambda h: jnp.maximum(h, h[::-1]),
        lambda h: jnp.clip(h, -0.5, 0.5),
        lambda h: jnp.clip(jax.nn.sigmoid(h), 0.2, 0.8),
        lambda h: jnp.where(h > 0.3, h, 0.0),
    ),
)
def test_a_choice_by_size_is_made_again_by_the_sizes_that_it_was_made_by(choice, form):
    """A rounding by 6 % makes ties, and another number the largest one."""

    def fn(w):
        with jax.named_scope("layer"):
            return jnp.mean(choice(XS @ w) ** 2)

    policy = named(saving_low(form), "layer")
    true = gradient_errors(fn, W, False)
    assert gradient_errors(fn, W, False, amp_policy=policy) < true + 0.05
    assert gradient_errors(fn, W, form) < true + 0.01


@pytest.mark.parametrize(
    "op",
    (
        lambda y: jax.nn.softmax(4 * y, axis=0),
        lambda y: (lambda e: e / e.sum(0))(jnp.exp(2 * y)),
        lambda y: y * jax.nn.logsumexp(4 * y, axis=0),
        lambda y: jax.nn.softmax(4 * y.reshape(4, 8, 64), -2).reshape(32, 64),
        lambda y: y * V[0][jnp.clip((y * 20).astype(int) + 32, 0, 63)],
        lambda y: jnp.where((y * 8).astype(int) % 2 == 0, y, -y),
        lambda y: jax.scipy.special.i0e(4 * y),
    ),
)
def test_what_is_made_again_agrees_with_what_is_kept(op):
    """A sum of exponentials across rows is kept, and so is what an integer was."""

    def fn(w):
        return jnp.mean((op(XS @ w) @ V + 3.0) ** 2)

    ours, true = (gradient_errors(fn, 4 * W, lean) for lean in ("int8", True))
    assert ours < 1.5 * true + 0.005  # the last contraction reads codes


@pytest.mark.parametrize(
    "fn",
    (
        jax.nn.softmax,
        lambda h: jax.nn.logsumexp(h, -1),
        jax.nn.log_softmax,
        jax.nn.relu,
        lambda h: jax.jit(jax.nn.logsumexp)(h),
    ),
)
def test_a_choice_that_nothing_differentiates_does_not_count(fn):
    def loss(w, xs):
        return jnp.sum(fn(xs @ w) * 1.5)

    low = amp(loss, compute_dtype="bfloat16", lean="int8")
    dtypes = kept(low, W, XS)
    assert "int8" in dtypes and "bfloat16" not in dtypes


@pytest.mark.parametrize("gate", (jax.nn.relu, jax.nn.leaky_relu, jnp.abs))
def test_signs_of_small_numbers_beside_large_ones(gate):
    def fn(w):
        return jnp.sum(gate(XS @ w) * V[:32])

    ours, true = (
        gradient_errors(fn, W * BESIDE_LARGE, lean) for lean in ("int8", True)
    )
    assert ours < 1.5 * true < 0.05


@pytest.mark.parametrize("form", FORMATS)
def test_no_number_but_zero_becomes_zero_where_signs_count(form):
    x = jnp.array([1e8, 1.0, -1.0, 0.0, -1e-20, 1e-20, 3e7, -1e8] * 8)
    how = LowBits(form, 32, keeps_signs=True)
    reads = with_low_residuals(lambda x: x * x, lambda x: x * x, prevent_cse=False)
    numbers = jax.grad(lambda x: jnp.sum(reads([x], [copy_of(x, how)])))(x)
    np.testing.assert_array_equal(jnp.sign(numbers), jnp.sign(x))


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "heads",
    (
        lambda h: h.reshape(32, 4, 16),
        lambda h: h.reshape(32, 4, 16).transpose(1, 0, 2),
        lambda h: h.reshape(32, 16, 4).transpose(0, 2, 1),
        lambda h: jnp.stack(jnp.split(h, 4, axis=-1)),
    ),
    ids=("rows", "heads first", "interleaved", "split"),
)
def test_norms_of_heads_of_different_sizes(heads):
    sizes = jnp.array([100.0, 1.0, 1.0, 0.1])
    is_interleaved = heads(jnp.arange(32 * 64.0).reshape(32, 64))[0, 1, 0] == 1
    sizes = jnp.tile(sizes, 16) if is_interleaved else jnp.repeat(sizes, 16)

    def fn(w):
        h = heads(XS @ w)
        h = h * lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-6)
        return jnp.sum(jnp.sin(3 * (h @ V[:16])))

    ours, true = (gradient_errors(fn, W * sizes, lean) for lean in ("int8", True))
    assert ours < 3 * true < 0.1


def test_what_is_scaled_by_the_norm_of_another_value():
    def fn(w):
        h, other = ((XS @ w).reshape(32, 4, 16) for _ in range(2))
        h = h * lax.rsqrt(jnp.mean(other * other, -1, keepdims=True) + 1e-6)
        return jnp.sum(jnp.sin(3 * (h @ V[:16])))

    w = W * jnp.repeat(jnp.array([100.0, 1.0, 1.0, 0.1]), 16)
    ours, true = (gradient_errors(fn, w, lean) for lean in ("int8", True))
    assert ours < 3 * true < 0.1


def test_a_norm_in_a_checkpoint_reads_16_bits():
    @jax.checkpoint
    def norm(h):
        deviations = h - jnp.mean(h, -1, keepdims=True)
        return deviations * lax.rsqrt(jnp.mean(deviations**2, -1, keepdims=True))

    def fn(w):
        return jnp.sum(jnp.sin(norm((XS + 30) @ (w + 0.5)) @ V))

    ours, true = (gradient_errors(fn, W, lean) for lean in ("int8", True))
    assert ours < 1.5 * true


def test_small_arrays_and_integers_stay_as_they_are():
    def fn(w, x, i):
        return jnp.sum(jnp.sin(x[:1, :3] @ w[:3, :3]) * i)

    before, ours = (
        measure.saved(amp(fn, compute_dtype="bfloat16", **o), W, XS, 3, argnums=(0,))
        for o in ({}, {"lean": "int8"})
    )
    assert [a.str_short() for a in before] == [a.str_short() for a in ours]


def test_a_primitive_as_the_key():
    def fn(x):
        return jnp.sum(jnp.sin(jnp.cumsum(x, axis=0)))

    policy = default_amp_policy | {lax.sin_p: saving_low("int8")}
    ours = amp(fn, compute_dtype="bfloat16", amp_policy=policy)
    x = jr.normal(jr.key(7), (8, 64))
    assert set(measure.saved_bytes(ours, x)) == {"int8", "bfloat16"}
    np.testing.assert_allclose(jax.grad(ours)(x), jax.grad(fn)(x), atol=0.3)


def test_other_rules_hold_beside_it():
    policy = named(saving_low("int8"), "all") | {"all/head": "float32"}

    @jax.named_scope("all")
    def fn(w, v, x):
        h = jnp.tanh(x @ w)
        with jax.named_scope("head"):
            return jnp.sum(jnp.sin(h @ v))

    jaxpr = jax.make_jaxpr(amp(fn, compute_dtype="bfloat16", amp_policy=policy))(
        W, V, XS
    )
    assert measure.contraction_flops(jaxpr).keys() == {"bfloat16", "float32"}
    found = kept(amp(fn, compute_dtype="bfloat16", amp_policy=policy), W, V, XS)
    assert set(found) == {"int8"}


@pytest.mark.parametrize(
    "policy",
    (
        None,
        jax.checkpoint_policies.dots_saveable,
        jax.checkpoint_policies.everything_saveable,
    ),
)
def test_inside_of_a_checkpoint_with_a_policy(policy):
    fn = loss(plain)
    around = jax.checkpoint(in_8_bits(fn), policy=policy)
    ours, true = jax.grad(around)(W, V, XS), jax.grad(fn)(W, V, XS)
    assert float(jnp.linalg.norm(ours - true) / jnp.linalg.norm(true)) < 0.02


def test_reports_tell_what_is_kept_in_8_bits():
    report = explain(loss(plain), compute_dtype="bfloat16", lean="int8")(W, V, XS)
    assert "in 8 bits (as written" in str(report)
    assert report.settings == ("compute_dtype=bfloat16, lean=int8",)
    whys = [op.why for op in report.now.ops if op.primitive == "dot_general"]
    assert any("what it reads is kept in int8" in why for why in whys)
    other = explain(loss(plain), compute_dtype="bfloat16", lean=True)(W, V, XS)
    assert "8 bits" not in str(other)


@pytest.mark.parametrize(
    "name, most", (("MLP", 0.54), ("GPT scanned", 0.57), ("CNN", 0.21))
)
def test_workloads_keep_little_more_than_half(name, most):
    workload = WORKLOADS[name]
    default, ours = (
        measure.saved_bytes(
            amp(workload.loss, compute_dtype="bfloat16", lean=lean),
            *workload.shapes("real"),
            argnums=(0,),
        ).total()
        for lean in (False, "float8")
    )
    assert ours <= most * default


@pytest.mark.parametrize(
    "error, match, make",
    (
        (ValueError, "`rule` is 'int4'.*one of 'float8'", lambda: saving_low("int4")),
        (ValueError, "Did you mean 'float8", lambda: saving_low("float8_e4m3")),
        (ValueError, "at least 1, but got 0", lambda: saving_low("int8", block=0)),
        (ValueError, "at least 1, but got -4", lambda: saving_low("int8", block=-4)),
        (TypeError, "a positive integer, but got 2.5", lambda: saving_low("int8", 2.5)),
        (TypeError, "integer, but got True", lambda: saving_low("int8", True)),
        (TypeError, "only formats of 8 bits have", lambda: saving_low("float32", 32)),
        (ValueError, "`lean` is 'int4'", lambda: amp(jnp.sin, lean="int4")),
        (
            ValueError,
            "`lean` is 'yes'.*True and False",
            lambda: amp(jnp.sin, lean="yes"),
        ),
        (TypeError, "`lean` must be True or False, or", lambda: amp(jnp.sin, lean=3)),
    ),
)
def test_mistakes(error, match, make):
    with pytest.raises(error, match=match):
        make()


def told_of(fn, policy):
    """What is told of a policy where `fn` is differentiated, and what is kept in it."""
    mixed = amp(fn, compute_dtype="bfloat16", amp_policy=policy)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = measure.saved(mixed, W, V, XS, argnums=(0, 1))
    return [str(w.message) for w in caught], [a.str_short() for a in found]


@pytest.mark.parametrize("in_jit", (False, True))
def test_a_scope_of_contractions_of_inputs_alone(in_jit):
    def fn(w, v, x):
        with jax.named_scope("first"):
            h = (jax.jit(jnp.matmul) if in_jit else jnp.matmul)(x, w)
        with jax.named_scope("second"):
            return jnp.sum(jnp.sin(jnp.tanh(h) @ v))

    (message,), still_kept = told_of(fn, named(saving_low("int8"), "first"))
    assert "The key 'first' of `amp_policy` keeps nothing in 8 bits" in message
    assert "test_saving_low.py" in message and "This is of `fn`" in message
    assert still_kept == told_of(fn, default_amp_policy)[1]
    # Where it keeps something, or might, nothing is said.
    for scopes in (("second",), ("unnamed",)):
        messages, _ = told_of(fn, named(saving_low("int8"), *scopes))
        assert not any("keeps nothing in 8 bits" in m for m in messages)
    everything = default_amp_policy | {"amp_default": saving_low("int8")}
    assert told_of(lambda w, v, x: jnp.sum(x @ w), everything)[0] == []


@pytest.mark.parametrize(
    "layer",
    (
        lambda w, v, x: jnp.sum((x @ w) @ v),
        lambda w, v, x: jnp.sum(x @ w + x),
        lambda w, v, x: jnp.sum(jnp.sin(x @ w)),
        lambda w, v, x: jnp.sum(jax.checkpoint(jnp.matmul)(jnp.sin(x), w)),
        lambda w, v, x: jnp.sum(lax.scan(lambda h, _: (h @ w, 0), x, None, 2)[0]),
    ),
    ids=("two", "sum", "sine", "checkpoint", "scan"),
)
def test_scopes_that_keep_something_or_might(layer):
    fn = jax.named_scope("layer")(layer)
    assert told_of(fn, named(saving_low("int8"), "layer"))[0] == []


def test_it_is_no_part_of_another_rule():
    rule = when(lambda site: True, saving_low("int8"), "float32")
    policy = default_amp_policy | {lax.sin_p: rule}
    with pytest.raises(AmpError, match="can't be a part of another rule"):
        amp(jnp.sin, compute_dtype="bfloat16", amp_policy=policy)(XS)


def test_formats_by_their_dtypes_and_short_names():
    assert saving_low(jnp.float8_e4m3fn) == saving_low("float8")
    assert saving_low(jnp.int8, block=np.int64(8)) == saving_low("int8", 8)
