"""Contractions of quantised operands: their patterns, their numbers, their limits."""

import json
import warnings
from functools import partial

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from jax import lax

from benchmarks.measure import subjaxprs
from jaxamp_like import (
    AmpError,
    AmpWarning,
    Policy,
    PolicyMap,
    amp,
    amp_with_state,
    default_amp_policy,
    explain,
    get_policy,
    init_amp_state,
)
from jaxamp_like._reports.page.table import tables
from jaxamp_like.presets import quantised
from jaxamp_like.rules import float8, int8, worth_eight_bits
from tests.programs import error, values

pytestmark = pytest.mark.sample(9)

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
FLOAT8, INT8 = float8(where=None), int8(where=None)
MOVES = ("transpose", "reshape", "squeeze", "copy")


def low(fn, rule=FLOAT8, dtype="bfloat16", argnums=None):
    return amp(fn, compute_dtype=dtype, amp_policy=quantised(rule), argnums=argnums)


def programs(jaxpr):
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    yield jaxpr
    for eqn in jaxpr.eqns:
        for sub in subjaxprs(eqn.params):
            yield from programs(sub)


def next_op(jaxpr, eqn):
    """What reads the result of an equation, once it is moved to its place."""
    (out,) = eqn.outvars
    for reader in jaxpr.eqns:
        if any(atom is out for atom in reader.invars):
            return next_op(jaxpr, reader) if reader.primitive.name in MOVES else reader
    return None


def contractions(fn, *args):
    """Of each contraction: dtypes of operands, of the result, and what comes next."""
    found = []
    for jaxpr in programs(jax.make_jaxpr(fn)(*args)):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name in ("dot_general", "conv_general_dilated"):
                after = next_op(jaxpr, eqn)
                found.append(
                    (
                        *(atom.aval.dtype.name for atom in eqn.invars),
                        eqn.outvars[0].aval.dtype.name,
                        after and after.primitive.name,
                        after and min(atom.aval.size for atom in after.invars),
                    )
                )
    return sorted(found, key=lambda row: ("float8" not in row[0], row[2] != "int32"))


def dtypes_of(fn, *args):
    return [row[:3] for row in contractions(fn, *args)]


FORWARD = (E4M3, E4M3, "bfloat16", "mul", 1)
BACKWARD = (E5M2, E4M3, "bfloat16", "mul", 1)
DIMENSIONS = {
    "matrix": ("mk,kn->mn", (6, 8), (8, 4)),
    "sequences": ("btk,kn->btn", (2, 3, 8), (8, 4)),
    "two summed": ("mhk,hkn->mn", (6, 2, 4), (2, 4, 5)),
    "two free": ("mk,khd->mhd", (6, 8), (8, 2, 3)),
    "batch": ("emk,ekn->emn", (2, 6, 8), (2, 8, 4)),
    "batch in the middle": ("mek,kne->nme", (6, 2, 8), (8, 4, 2)),
}
every_dimension = pytest.mark.parametrize(
    "spec, x, w", DIMENSIONS.values(), ids=DIMENSIONS
)


def einsum(spec):
    """A contraction and its gradients, as a function of all that they read."""
    return lambda ct, w, x: (
        jax.value_and_grad(lambda w, x: jnp.sum(ct * jnp.einsum(spec, x, w)), (0, 1))
    )(w, x)


def roundings(spec, ct, w, x, forward, backward):
    """Bounds of the errors of both gradients, for relative errors of operands."""
    largest = einsum(spec)(abs(ct), abs(w), abs(x))[1]
    both = (1 + backward) * (1 + forward) * (1 + 2**-8) ** 3 - 1
    return [both * one + 1e-3 * jnp.max(one) for one in largest]


def check(spec, ct, w, x, made, forward, backward):
    exact = einsum(spec)(ct, w, x)[1]
    bounds = roundings(spec, ct, w, x, forward, backward)
    for one, plain, bound in zip(made, exact, bounds, strict=True):
        assert (abs(one - plain) <= bound).all()


def scaled(spec):
    return lambda w, x, ct: jnp.sum(ct * jnp.einsum(spec, x, w))


@pytest.mark.sample(6)
@every_dimension
def test_patterns_of_float8(spec, x, w):
    """Direct contractions, one scalar after each: what XLA has native kernels for."""
    x, w = values(*x), values(*w, seed=1)
    ct = values(*jnp.einsum(spec, x, w).shape, seed=2)
    grads = jax.grad(low(scaled(spec)), (0, 1))
    assert contractions(grads, w, x, ct) == [FORWARD, BACKWARD, BACKWARD]
    check(spec, ct, w, x, jax.jit(grads)(w, x, ct), 2**-4, 2**-3)
    by_row = float8(where=None, granularity="row")
    grads = jax.grad(low(scaled(spec), by_row), (0, 1))
    eight = [row[:3] for row in (FORWARD, BACKWARD, BACKWARD)]
    assert dtypes_of(grads, w, x, ct) == eight
    check(spec, ct, w, x, jax.jit(grads)(w, x, ct), 2**-4, 2**-3)


def test_a_gradient_that_sums_nothing_is_not_rounded_to_8_bits():
    """A single row: its weight's gradient is a product of two vectors."""
    x, w, ct = values(8), values(8, 4, seed=1), values(4, seed=2)
    for rule in (float8(where=None), float8(where=None, granularity="row")):
        grads = jax.grad(low(scaled("k,kn->n"), rule), (0, 1))
        *eight, outer = dtypes_of(grads, w, x, ct)
        assert eight == [FORWARD[:3], BACKWARD[:3]] and outer == ("bfloat16",) * 3
        of_weight, of_input = jax.jit(grads)(w, x, ct)
        assert error(of_weight, jnp.outer(x, ct)) < 2**-8
        assert 2**-8 < error(of_input, w @ ct) < 0.15


@pytest.mark.parametrize(
    "spec, x, w",
    [*DIMENSIONS.values(), ("k,kn->n", (8,), (8, 4))],
    ids=[*DIMENSIONS, "vector"],
)
def test_patterns_of_int8(spec, x, w):
    x, w = values(*x), values(*w, seed=1)
    ct = values(*jnp.einsum(spec, x, w).shape, seed=2)
    grads = jax.grad(low(scaled(spec), INT8), (0, 1))
    first, *others = contractions(grads, w, x, ct)
    assert first[:4] == ("int8", "int8", "int32", "convert_element_type")
    assert [row[:3] for row in others] == [("bfloat16",) * 3] * 2
    check(spec, ct, w, x, jax.jit(grads)(w, x, ct), 2**-8, 2**-8)


def test_parameters_are_read_as_they_are_and_nothing_is_cast_twice():
    x, w = values(4, 8), values(8, 4, seed=1)
    jaxpr = jax.make_jaxpr(low(lambda w, x: jnp.sin(x) @ w))(w, x)
    casts = [
        (eqn.invars[0].aval.shape, eqn.outvars[0].aval.dtype.name)
        for one in programs(jaxpr)
        for eqn in one.eqns
        if eqn.primitive.name == "convert_element_type"
    ]
    assert ((8, 4), "bfloat16") not in casts
    assert casts.count(((8, 4), E4M3)) == casts.count(((4, 8), E4M3)) == 1


@pytest.mark.sample(6)
@pytest.mark.parametrize("dtype", ("float16", "bfloat16", "float32"))
def test_results_are_never_made_in_float16(dtype):
    x, w = values(4, 8), values(8, 4, seed=1)
    made = "float32" if dtype == "float32" else "bfloat16"
    fn = low(lambda w, x: x @ w, dtype=dtype)
    assert dtypes_of(fn, w, x) == [(E4M3, E4M3, made)]
    assert fn(w, x).dtype == "float32"
    grads = jax.grad(low(lambda w: jnp.sum((x @ w) ** 2), dtype=dtype))(w)
    assert error(grads, jax.grad(lambda w: jnp.sum((x @ w) ** 2))(w)) < 0.15


def test_options_of_float8():
    def loss(w, x):
        return jnp.sum(jnp.sin(jnp.cos(x) @ w))

    x, w = values(4, 8), values(8, 4, seed=1)

    def patterns(**options):
        grads = jax.grad(low(loss, float8(where=None, **options)), (0, 1))
        return dtypes_of(grads, w, x)

    forward, backward = FORWARD[:3], BACKWARD[:3]
    assert patterns(grad_dtype=E4M3) == [forward] * 3
    # The weight's gradient is made first: that of the right operand.
    low_rows = patterns(weight_gradient="compute")
    assert sorted(low_rows) == sorted([forward, backward, ("bfloat16",) * 3])
    assert patterns(keep="compute") == [forward, backward, backward]
    assert patterns(power_of_two=False) == [forward, backward, backward]


def test_what_is_kept_for_the_backward_pass_is_float8():
    def loss(w, x):
        for one in w:
            x = jnp.tanh(x @ one)
        return jnp.sum(x)

    w, x = values(3, 64, 64), values(32, 64)
    saved = explain(low(loss))(w, x).now.totals.saved
    assert saved[E4M3] == 2 * 64 * 64 + 3 * 32 * 64  # the input has no gradient
    kept = explain(low(loss, float8(where=None, keep="compute")))(w, x)
    assert E4M3 not in kept.now.totals.saved


# ---------------------------------------------------------------------------- numbers


@pytest.mark.parametrize(
    "rule",
    (FLOAT8, INT8, int8(where=None, migration=0.5), int8(where=None, epsilon=0)),
    ids=repr,
)
def test_tensors_of_one_number(rule):
    fn = jax.jit(low(lambda x, w: x @ w, rule))
    w = abs(values(8, 4))
    for number in (1.0, -3.0, 1e-30, 1e30):
        x = jnp.full((4, 8), number)
        is_lost = abs(number) < 1e-7 and getattr(rule, "epsilon", 0) > 0
        expected = jnp.zeros((4, 4)) if is_lost else number * (jnp.ones((4, 8)) @ w)
        size = 1 if is_lost else abs(number)
        assert error(fn(x, w) / size + 1, expected / size + 1) < 0.05
    np.testing.assert_array_equal(fn(jnp.zeros((4, 8)), w), 0)
    np.testing.assert_array_equal(fn(values(4, 8), jnp.zeros((8, 4))), 0)


@pytest.mark.sample(6)
@pytest.mark.parametrize("rule", (FLOAT8, INT8, int8(where=None, activation_max=9.0)))
@pytest.mark.parametrize("bad", (np.nan, np.inf, -np.inf))
def test_what_is_no_number_stays_seen(rule, bad):
    """A loss scaler must see an overflow; other rows are as they were."""
    x, w = values(4, 8).at[1, 2].set(bad), values(8, 4)
    loss = low(lambda w, x: jnp.sum(jnp.sin(x @ w)), rule)
    out = jax.jit(low(lambda x, w: x @ w, rule))(x, w)
    assert np.isnan(out[1]).all()
    assert np.isfinite(out[jnp.array([0, 2, 3])]).all()
    assert np.isnan(jax.jit(jax.grad(loss))(w, x)).any()


def test_a_cotangent_that_overflows_is_seen():
    def loss(w):
        return jnp.sum(jnp.exp(100 * (jnp.ones((4, 8)) @ w)))

    grads = jax.grad(low(loss))(jnp.ones((8, 4)))
    assert not np.isfinite(grads).any()


@given(
    amax=st.floats(2.0**-126, float(np.finfo("float32").max), width=32),
    dtype=st.sampled_from((E4M3, E5M2)),
)
def test_scales_are_powers_of_two_that_fit(amax, dtype):
    from jaxamp_like._quantised.scaled import scale_of

    largest = float(jnp.finfo(dtype).max)
    scale = float(scale_of(jnp.float32(amax), largest))
    assert np.log2(scale) == round(np.log2(scale))
    if amax > 2.0**-90:
        assert amax / scale <= largest < 2.001 * amax / scale


in_int8 = jax.jit(low(lambda x, w: x @ w, INT8, "float32"))
shapes = st.sampled_from([(5, 9, 3), (1, 64, 2)])  # each is compiled


@settings(max_examples=20)
@given(shapes, st.integers(0, 99), st.sampled_from((1.0, 30.0, 1e6)))
def test_errors_of_int8_are_within_its_steps(shape, seed, outlier):
    """Half a step for each operand: a step is a row's maximum, by 127."""
    m, k, n = shape
    rng = np.random.default_rng(seed)
    x, w = (np.float32(rng.normal(size=size)) for size in ((m, k), (k, n)))
    x[:, 0] *= outlier
    y = in_int8(x, w)
    x, w = np.float64(x), np.float64(w)
    steps = (abs(x).max(1, keepdims=True) + 1e-7) / 127
    columns = (abs(w).max(0, keepdims=True) + 1e-7) / 127
    bound = (steps / 2) * abs(w).sum(0) + (columns / 2) * abs(x).sum(1, keepdims=True)
    bound += k * steps * columns / 4
    assert (abs(np.float64(y) - x @ w) <= 1.001 * bound).all()


@pytest.mark.rest
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_int8_agrees_with_keras():
    keras = pytest.importorskip("keras")
    x, layer = values(6, 16), keras.layers.Dense(8)
    layer.build(x.shape)
    w, b = (jnp.asarray(v.value) for v in layer.weights)
    mine = low(lambda x, w, b: x @ w + b, INT8, "float32")(x, w, b)
    layer.quantize("int8")
    np.testing.assert_array_equal(mine, np.asarray(layer(x)))


def outliers():
    """Activations with three channels that are far larger, and what reads them."""
    x = values(64, 48).at[:, :3].mul(60)
    w = values(48, 32, seed=1).at[:3].mul(1 / 8)
    return x, w, lambda w, x: jnp.sum(jnp.sin(jnp.tanh(x / 50) * 50 @ w))


def test_migration_brings_outliers_down():
    x, w, _ = outliers()
    exact = x @ w
    plain, moved = (
        error(low(lambda x, w: x @ w, int8(where=None, migration=m))(x, w), exact)
        for m in (None, 0.5)
    )
    assert moved < plain / 3


def test_migration_changes_no_product():
    from jaxamp_like._quantised.migration import migrated

    x, w = values(2, 5, 3, 4), values(3, 4, 6, seed=1)
    numbers = ((((2, 3), (0, 1))), ((), ()))
    params = {"dimension_numbers": numbers}
    for weight in (0, 1):
        a, b = migrated((x, w), params, weight, 0.5)
        assert error(jnp.tensordot(a, b, 2), jnp.tensordot(x, w, 2)) < 1e-6


WEIGHTS = {
    "right": (lambda w, x: x @ w, (2, 8)),
    "right, and smaller": (lambda w, x: x @ w, (64, 8)),
    "left of a vector": (lambda w, x: w.T @ x, (8,)),
    "left under vmap": (lambda w, x: jax.vmap(lambda x: w.T @ x)(x), (2, 8)),
}


@pytest.mark.parametrize("case", WEIGHTS)
def test_which_operand_is_the_weight(case):
    """In a first layer both operands are inputs."""
    fn, shape = WEIGHTS[case]
    model = low(fn, int8(where=None, weight_only=True))
    jaxpr = jax.make_jaxpr(model)(jnp.ones((8, 6)), jnp.ones(shape))
    made = [v.aval for one in programs(jaxpr) for e in one.eqns for v in e.outvars]
    int8s = [aval.shape for aval in made if aval.dtype == jnp.int8]
    assert {tuple(sorted(d for d in shape if d > 1)) for shape in int8s} == {(6, 8)}


HELD = {
    "left": (lambda p, x: p["w"].T @ x.T, (8, 6)),
    "scaled": (lambda p, x: x @ (p["w"] * p["scale"]), (8, 6)),
    "transposed, in a jit": (lambda p, x: jax.jit(jnp.dot)(x, p["w"].T), (6, 8)),
    "of a stack, in a checkpoint": (
        lambda p, x: jax.checkpoint(jnp.dot)(x, p["w"][1]),
        (3, 8, 6),
    ),
}


@pytest.mark.parametrize("case", HELD)
def test_the_weight_is_what_an_argument_holds_among_others(case):
    """Where both operands are inputs, and the order tells nothing."""
    fn, shape = HELD[case]
    params = {"w": values(*shape, seed=1) / 100, "scale": values(6) + 3.0}
    x = values(4, 8) * 10
    # A weight that was taken for an activation would be rounded to zeros.
    model = low(fn, int8(where=None, activation_max=100.0), "float32")
    assert error(model(params, x), fn(params, x)) < 0.05


def test_weights_alone():
    def loss(w, x):
        return jnp.sum(jnp.sin(jnp.cos(x) @ w))

    x, w = values(4, 8), values(8, 4, seed=1)
    rule = int8(where=None, weight_only=True)
    bf16 = ("bfloat16",) * 2
    assert dtypes_of(low(loss, rule), w, x) == [(*bf16, "float32")]
    assert error(jax.grad(low(loss, rule))(w, x), jax.grad(loss)(w, x)) < 0.02


@pytest.mark.parametrize("rule", (FLOAT8, INT8, int8(where=None, migration=0.5)))
@pytest.mark.parametrize("groups", (1, 2))
def test_convolutions(rule, groups):
    def loss(w, x):
        y = lax.conv_general_dilated(
            jnp.sin(x),
            w,
            (2, 1),
            "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=groups,
        )
        return jnp.sum(jnp.sin(y))

    x, w = values(2, 5, 6, 4), values(3, 3, 4 // groups, 6, seed=1)
    grads = jax.grad(low(loss, rule), (0, 1))
    eight = (E4M3, E4M3, "bfloat16") if rule is FLOAT8 else ("int8", "int8", "int32")
    limit = 0.2 if rule is FLOAT8 else 0.1
    assert dtypes_of(grads, w, x) == [eight, *[("bfloat16",) * 3] * 2]
    assert error(jax.jit(grads)(w, x), jax.grad(loss, (0, 1))(w, x)) < limit


# ------------------------------------------------------------------------- transforms


def net(ws, x):
    for w in ws:
        x = jnp.tanh(x @ w)
    return x


def scanned(ws, x):
    return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0]


def rematted(ws, x):
    block = jax.checkpoint(lambda x, w: jnp.tanh(x @ w))
    return lax.scan(lambda x, w: (block(x, w), None), x, ws)[0]


def branched(ws, x):
    return lax.cond(x[0, 0] < 9, net, lambda ws, x: x, ws, x)


def repeated(ws, x):
    return lax.while_loop(
        lambda state: state[0] < 2, lambda s: (s[0] + 1, jnp.tanh(s[1] @ ws[0])), (0, x)
    )[1]


@pytest.mark.sample(6)
@pytest.mark.parametrize("rule", (FLOAT8, float8(where=None, granularity="row"), INT8))
@pytest.mark.parametrize("fn", (scanned, rematted, branched))
def test_structural_primitives(fn, rule):
    """Every one gives what straight code gives; gradients up to roundings."""
    ws, x = values(2, 8, 8), values(4, 8)
    loss = lambda f: lambda ws: jnp.sum(jnp.sin(f(ws, x)))  # noqa: E731
    expected, wanted = jax.jit(jax.value_and_grad(low(loss(net), rule)))(ws)
    made, grads = jax.jit(jax.value_and_grad(low(loss(fn), rule)))(ws)
    assert error(made, expected) < 1e-5
    assert error(grads, wanted) < 2**-7
    forward = {row[:2] for row in dtypes_of(low(loss(fn), rule), ws)}
    assert forward == {(E4M3, E4M3) if rule != INT8 else ("int8", "int8")}


def test_while_loops_and_forward_mode():
    """A loop gives what straight code gives, tangents too."""
    ws, x = values(1, 8, 8), values(4, 8)
    loop = lambda ws: jnp.sum(repeated(ws, x))  # noqa: E731
    straight = lambda ws: jnp.sum(net([ws[0], ws[0]], x))  # noqa: E731
    made = jax.jvp(jax.jit(low(loop)), (ws,), (ws,))
    assert error(made, jax.jvp(jax.jit(low(straight)), (ws,), (ws,))) < 1e-5
    assert {row[:2] for row in dtypes_of(low(loop), ws)} == {(E4M3, E4M3)}


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "rule", (FLOAT8, float8(where=None, keep="compute"), INT8), ids=repr
)
def test_vmap_inside_and_outside(rule):
    sizes = jnp.array([1, 10, 100.0])[:, None, None]
    w, xs = values(8, 4), values(3, 5, 8, seed=1) * sizes

    ct = values(5, 4, seed=2)

    def loss(w, x):
        return jnp.sum(ct * (x @ w))

    def total(fn):
        return jax.jit(jax.grad(lambda w: jnp.sum(jax.vmap(fn, (None, 0))(w, xs))))(w)

    grad = jax.jit(jax.grad(low(loss, rule)))
    each = [grad(w, x) for x in xs]
    per_example = jax.jit(jax.vmap(jax.grad(low(loss, rule)), (None, 0)))(w, xs)
    assert error(per_example, jnp.stack(each)) < 2**-7
    assert error(total(low(loss, rule)), total(loss)) < 0.15
    inside = jax.grad(low(lambda w: jnp.sum(jax.vmap(loss, (None, 0))(w, xs)), rule))(w)
    assert error(inside, total(loss)) < 0.15


def test_mapped_weights():
    ws, x = values(3, 8, 4), values(5, 8)
    loss = low(lambda w: jnp.sum(jnp.sin(x @ w)))
    grads = jax.jit(jax.grad(lambda ws: jnp.sum(jax.vmap(loss)(ws))))(ws)
    grad = jax.jit(jax.grad(loss))
    assert error(grads, [np.stack([grad(w) for w in ws])]) < 2**-7


@pytest.mark.rest
def test_second_derivatives():
    x = values(5, 8)

    def loss(w):
        return jnp.sum(jnp.sin(jnp.tanh(x @ w[0]) @ w[1]))

    def derivatives(fn):
        grad = jax.grad(fn)
        twice = jax.grad(lambda w: jnp.sum(grad(w)[0] ** 2))
        return jax.jit(lambda w: (jax.jvp(grad, (w,), (w,))[1], twice(w)))

    ws = (values(8, 6), values(6, 4, seed=1))
    with pytest.raises(AmpError, match=r"second derivative.*keep='compute'"):
        jax.make_jaxpr(derivatives(low(loss)))(ws)
    exact = derivatives(loss)(ws)
    for rule in (float8(where=None, keep="compute"), INT8):
        assert error(derivatives(low(loss, rule))(ws), exact) < 0.3


def test_a_gradient_of_a_gradient_of_what_is_kept_is_refused():
    """In reverse over reverse too, where a derivative of 0 would go unseen."""
    ws, x = values(2, 8, 8), values(4, 8)
    for fn in (net, scanned):
        grad = jax.grad(low(lambda ws, fn=fn: jnp.sum(jnp.sin(fn(ws, x)))))
        with pytest.raises(AmpError, match="second derivative"):
            jax.make_jaxpr(jax.grad(lambda ws, grad=grad: jnp.sum(grad(ws) ** 2)))(ws)


SECOND = {
    "hessian": jax.hessian,
    "reverse over reverse": lambda fn: jax.jacrev(jax.jacrev(fn)),
    "forward over forward": lambda fn: jax.jacfwd(jax.jacfwd(fn)),
    "gradient of a gradient": lambda fn: jax.grad(
        lambda w: jnp.sum(jax.grad(fn)(w) ** 2)
    ),
}


NESTS = {
    "nothing": lambda layer: layer,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "scan": lambda layer: (
        lambda x: lax.scan(lambda x, _: (layer(x), None), x, None, 2)[0]
    ),
    "scan of checkpoints": lambda layer: (
        lambda x: lax.scan(jax.checkpoint(lambda x, _: (layer(x), None)), x, None, 2)[0]
    ),
    "map": lambda layer: lambda x: lax.map(layer, x.reshape(2, 2, 8)),
    "cond": lambda layer: lambda x: lax.cond(x[0, 0] < 9, layer, lambda x: x, x),
    "vmap": lambda layer: lambda x: jax.vmap(layer)(x.reshape(2, 2, 8)),
}


@pytest.mark.rest
@pytest.mark.parametrize("name", SECOND)
def test_second_derivatives_are_right_or_refused(name):
    """Whatever modes they are made by: refused where they go through what is kept."""
    x, ws = values(5, 8), values(2, 8, 8, seed=1) / 4

    def layer(w):
        return jnp.sum(jnp.tanh(x @ w) ** 2)

    def layers(ws):
        return jnp.sum(jnp.tanh(jnp.tanh(x @ ws[0]) @ ws[1]) ** 2)

    def tied(w):
        return jnp.sum((jnp.tanh(x @ w) @ w.T) ** 2)

    def second(fn, **options):
        return jax.jit(SECOND[name](low(fn, float8(where=None, **options))))

    made = second(layer)(ws[0])
    assert error(made, SECOND[name](layer)(ws[0])) < 0.5
    assert error(made, second(layer, keep="compute")(ws[0])) < 1e-5
    for fn, w in ((layers, ws), (tied, ws[0])):
        with pytest.raises(AmpError, match=r"second derivative.*keep='compute'"):
            second(fn)(w)
        assert error(second(fn, keep="compute")(w), SECOND[name](fn)(w)) < 0.5


@pytest.mark.parametrize("rule", (FLOAT8, INT8), ids=repr)
@pytest.mark.parametrize("mode", (jax.jacfwd, jax.jacrev))
@pytest.mark.parametrize("nest", NESTS)
def test_second_derivatives_by_what_is_not_kept(nest, mode, rule):
    """By an input alone: nothing that is kept depends on it.

    Of what a loop runs forward, JAX forgets derivative rules."""
    w, x = values(8, 8) / 2, values(4, 8)
    layer = NESTS[nest](lambda x: jnp.tanh(x @ w))

    def second(wrap):
        grad = jax.grad(wrap(lambda x: jnp.sum(layer(x) ** 2)))
        return jax.jit(mode(lambda t: grad(x + t * x)))(0.0)

    assert error(second(lambda fn: low(fn, rule)), second(lambda fn: fn)) < 0.25


def test_in_shard_map():
    mesh = jax.sharding.Mesh(jax.devices()[:4], ("d",))
    spec = jax.sharding.PartitionSpec
    x, w = values(8, 16), values(16, 4, seed=1)

    def local(w, x):
        return jnp.sin(x @ w)

    def loss(w, x):
        fn = jax.shard_map(
            local, mesh=mesh, in_specs=(spec(), spec("d")), out_specs=spec("d")
        )
        return jnp.sum(fn(w, x))

    grads = jax.jit(jax.grad(low(loss)))(w, x)
    expected = jax.jit(jax.grad(low(lambda w, x: jnp.sum(local(w, x)))))(w, x)
    assert error(grads, expected) < 0.05
    assert dtypes_of(jax.grad(low(loss)), w, x)[0] == FORWARD[:3]


@pytest.mark.parametrize("in_loop", (False, True), ids=("layers", "scan"))
def test_weights_that_are_gathered_in_a_shard_map(in_loop):
    """They are parameters still, and are rounded before they are sent."""
    mesh = jax.sharding.Mesh(jax.devices()[:4], ("d",))
    spec = jax.sharding.PartitionSpec
    params, x = {"layers": values(3, 16, 16) / 4}, values(8, 16, seed=1)

    def layer(x, part):
        w = lax.all_gather(part, "d", axis=1, tiled=True)
        return x + jnp.tanh(x @ w), None

    def local(params, x):
        layers = params["layers"]
        if in_loop:
            x, _ = lax.scan(jax.checkpoint(layer), x, layers)
        else:
            for i in range(3):
                x, _ = layer(x, layers[i])
        return lax.pmean(jnp.mean(x**2), "d")

    specs = {"in_specs": ({"layers": spec(None, None, "d")}, spec("d"))}
    loss = jax.shard_map(local, mesh=mesh, **specs, out_specs=spec())
    grad = jax.grad(low(loss))
    rows = [row[:2] for row in dtypes_of(grad, params, x)]
    assert rows.count((E4M3, E4M3)) >= (1 if in_loop else 3)
    assert ("bfloat16", "bfloat16") not in rows
    inside = programs(jax.make_jaxpr(grad)(params, x))
    eqns = [eqn for jaxpr in inside for eqn in jaxpr.eqns]
    sent = [eqn for eqn in eqns if eqn.primitive.name == "all_gather"]
    assert sent and {e.invars[0].aval.dtype.name for e in sent} == {"float8_e4m3fn"}
    expected = jax.jit(jax.grad(loss))(params, x)["layers"]
    assert error(jax.jit(grad)(params, x)["layers"], expected) < 0.1


@pytest.mark.parametrize("rule", ({"weight_only": True}, {"activation_max": 4.0}))
def test_data_beside_a_weight_that_is_gathered_is_no_weight(rule):
    mesh = jax.sharding.Mesh(jax.devices()[:4], ("d",))
    spec = jax.sharding.PartitionSpec
    params, x = {"w": values(16, 8), "b": jnp.zeros(8)}, values(8, 16, seed=1)

    def local(params, x):
        w = lax.all_gather(params["w"], "d", axis=1, tiled=True)
        return x @ w + params["b"]

    specs = {"in_specs": ({"w": spec(None, "d"), "b": spec()}, spec("d"))}
    fn = jax.shard_map(local, mesh=mesh, **specs, out_specs=spec("d"))
    by = {
        "amp_policy": quantised(int8(where=None, **rule)),
        "compute_dtype": "bfloat16",
    }
    whole = amp(lambda params, x: x @ params["w"] + params["b"], **by)
    # Weights are rounded to int8 on the devices that hold them, and sent so.
    np.testing.assert_array_equal(
        jax.jit(amp(fn, **by))(params, x), jax.jit(whole)(params, x)
    )


def test_around_a_whole_step():
    """Where `amp` is outside of `grad`, cotangents are e5m2 too."""

    def loss(w, x):
        return jnp.sum(jnp.sin(jnp.cos(x) @ w))

    x, w = values(4, 8), values(8, 4, seed=1)
    grads = low(jax.grad(loss, (0, 1)))
    assert dtypes_of(grads, w, x) == [FORWARD[:3], BACKWARD[:3], BACKWARD[:3]]
    expected = jax.grad(low(loss), (0, 1))(w, x)
    assert error(grads(w, x), expected) < 0.01


@pytest.mark.parametrize("fn", (scanned, rematted, branched))
def test_around_a_whole_step_with_programs_inside(fn):
    """What holds of a loop holds inside: its name stack begins anew there."""
    ws, x = values(2, 8, 8), values(4, 8)
    grads = jax.grad(lambda ws: jnp.sum(jnp.sin(fn(ws, x))))
    backward = [(E5M2, E4M3), (E4M3, E5M2)]
    rows = {row[:2] for row in dtypes_of(low(grads), ws)}
    assert (E4M3, E4M3) in rows and rows <= {(E4M3, E4M3), *backward}
    assert rows & set(backward)
    made = [row[:2] for row in dtypes_of(low(grads, INT8), ws)]
    assert {("int8", "int8"), ("bfloat16", "bfloat16")} == set(made)
    assert made.count(("bfloat16", "bfloat16")) >= 2  # of the gradients


CHECKPOINTS = {
    "a checkpoint": jax.checkpoint,
    "in a checkpoint": lambda fn: jax.checkpoint(jax.checkpoint(fn)),
    "a jit in one": lambda fn: jax.checkpoint(jax.jit(fn)),
    "one in a jit": lambda fn: jax.jit(jax.checkpoint(fn)),
    "one in a jit in one": lambda fn: jax.checkpoint(jax.jit(jax.checkpoint(fn))),
}
COMPUTE = float8(where=None, weight_gradient="compute")
DELAYED = float8(where=None, delayed=True)


@pytest.mark.sample(10)
@pytest.mark.parametrize(
    "rule, dtype",
    (
        (FLOAT8, E5M2),
        (COMPUTE, "bfloat16"),
        (INT8, "bfloat16"),
        (DELAYED, E5M2),
    ),
    ids=("float8", "compute", "int8", "delayed"),
)
@pytest.mark.parametrize("around", CHECKPOINTS)
def test_gradients_beside_what_is_made_again(around, rule, dtype):
    """JAX 0.6 names what it transposes in a checkpoint as what is made again there."""
    layer = CHECKPOINTS[around](lambda w, x: jnp.tanh(x @ w["in"]))

    def loss(w, x):
        return jnp.mean((layer(w, x) @ w["out"]) ** 2)

    w = {"in": values(16, 32) / 4, "out": values(32, 8, seed=1) / 4}
    args = (w, values(24, 16, seed=2))
    by = {"compute_dtype": "bfloat16", "amp_policy": quantised(rule)}
    if rule is DELAYED:
        mixed = amp_with_state(jax.grad(loss), **by)
        args = (init_amp_state(mixed, *args), *args)
    else:
        mixed = amp(jax.grad(loss), **by)
    ops = [op for op in explain(mixed)(*args).now.ops if op.flops]
    # Of `w["in"]`; the other contractions make other shapes.
    (found,) = (op for op in ops if op.shape in ((16, 32), (32, 16)))
    assert (found.place.phase, found.dtype) == ("backward", dtype)
    again = [op for op in ops if op.place.phase == "recomputed"]
    assert [op.shape for op in again] == [(24, 32)]
    assert again[0].dtype == ("int8" if rule is INT8 else E4M3)


@pytest.mark.parametrize("rule", (FLOAT8, INT8), ids=("float8", "int8"))
def test_a_gradient_that_is_made_again_hands_on_no_cotangent(rule):
    """What a checkpoint makes of it again is rounded as in the forward pass."""

    def step(w, x):
        gradient = jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w) ** 2))(w)
        return jnp.tanh(jnp.sin(gradient) @ w)

    def loss(w, x):
        return jnp.mean(jax.checkpoint(step)(w, x) ** 2)

    ops = explain(low(jax.grad(loss), rule))(values(8, 8), values(8, 8)).now.ops
    reads = {"forward": [], "backward": [], "recomputed": []}
    for op in ops:
        if op.flops:
            reads[op.place.phase].append(op.operands or op.reads)
    # The first product, the gradient, the second product.
    assert reads["recomputed"][::2] == reads["forward"]


# ------------------------------------------------------ which operand is a cotangent


def dense_by_rule(backward):
    """`tanh(x @ w)` with a backward rule of its author's: `backward(x, w, ct)`."""

    @jax.custom_vjp
    def dense(x, w):
        return jnp.tanh(x @ w)

    def bwd(kept, ct):
        x, w = kept
        return backward(x, w, ct * (1 - jnp.tanh(x @ w) ** 2))

    dense.defvjp(lambda x, w: (dense(x, w), (x, w)), bwd)
    return dense


RULES = {
    "cotangents left": lambda x, w, ct: (ct @ w.T, (ct.T @ x).T),
    "cotangents right": lambda x, w, ct: ((w @ ct.T).T, x.T @ ct),
}
AROUND = {
    "nothing": lambda dense: lambda w, x: dense(dense(x, w), w),
    "jit": lambda dense: jax.jit(lambda w, x: dense(dense(x, w), w)),
    "checkpoint": lambda dense: jax.checkpoint(lambda w, x: dense(dense(x, w), w)),
    "scan": lambda dense: (
        lambda w, x: lax.scan(lambda x, _: (dense(x, w), None), x, None, 2)[0]
    ),
    "scan of checkpoints": lambda dense: (
        lambda w, x: lax.scan(
            jax.checkpoint(lambda x, _: (dense(x, w), None)), x, None, 2
        )[0]
    ),
    "cond": lambda dense: (
        lambda w, x: lax.cond(x[0, 0] < 9, lambda x: dense(x, w), lambda x: x, x)
    ),
    "vmap": lambda dense: (
        lambda w, x: jax.vmap(lambda x: dense(x, w))(x.reshape(2, 2, 8))
    ),
}


@pytest.mark.sample(12)
@pytest.mark.parametrize("is_outside", (False, True), ids=("grad(amp)", "amp(grad)"))
@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("order", RULES)
def test_cotangents_are_known_in_either_order(order, around, is_outside):
    fn = AROUND[around](dense_by_rule(RULES[order]))

    def loss(w, x):
        return jnp.mean(fn(w, x) ** 2)

    w, x = values(8, 8) / 4, values(4, 8, seed=1)
    grad = low(jax.grad(loss)) if is_outside else jax.grad(low(loss))
    backward = (E5M2, E4M3) if order == "cotangents left" else (E4M3, E5M2)
    found = [row[:2] for row in dtypes_of(grad, w, x)]
    eight = [pair for pair in found if "float8" in pair[0]]
    assert set(eight) == {(E4M3, E4M3), backward}
    said = {op.why.partition(",")[0] for op in explain(grad)(w, x).now.ops if op.flops}
    assert {f"computes in {a} x {b}" for a, b in eight} <= said
    swapped = "computes in {} x {}".format(*reversed(backward))
    assert swapped not in said
    assert error(jax.jit(grad)(w, x), jax.grad(loss)(w, x)) < 0.15


@pytest.mark.parametrize("is_outside", (False, True), ids=("grad(amp)", "amp(grad)"))
def test_cotangents_that_a_rule_makes_are_known(is_outside):
    """A rule that takes another gradient inside, by a cotangent of its own."""

    def dense(x, w):
        return jnp.tanh(x @ w)

    def backward(operands, ct):
        pull = jax.vjp(dense, *operands)[1]
        pairs = zip(pull(jnp.ones_like(ct)), pull(ct), strict=True)
        return tuple(0.1 * a + b for a, b in pairs)

    ruled = jax.custom_vjp(dense)
    ruled.defvjp(lambda x, w: (dense(x, w), (x, w)), backward)

    def loss(w, x):
        return jnp.sum(jnp.sin(ruled(x, w)))

    w, x = values(16, 16) / 4, values(8, 16, seed=1)
    grad = low(jax.grad(loss, (0, 1))) if is_outside else jax.grad(low(loss), (0, 1))
    found = [row[:2] for row in dtypes_of(grad, w, x)]
    assert found.count((E5M2, E4M3)) == 4
    assert error(jax.jit(grad)(w, x), jax.grad(loss, (0, 1))(w, x)) < 0.15


def by_rule_of(kept, backward):
    """`x @ w` whose author keeps `kept(x)` for the backward pass."""
    dense = jax.custom_vjp(lambda w, x: x @ w)
    dense.defvjp(
        lambda w, x: (x @ w, (w, kept(x))),
        lambda both, ct: (backward(both[1], ct), ct @ both[0].T),
    )
    return dense


MOVED = {
    "an operand": by_rule_of(lambda x: x, lambda x, ct: (ct.T @ x).T),
    "made for the backward pass": by_rule_of(
        lambda x: 2 * x, lambda x, ct: (ct.T @ (x / 2)).T
    ),
    "out of a call": jax.jit(lambda w, x: (w.T @ x.T).T),
}


@pytest.mark.parametrize("is_known", (False, True))
@pytest.mark.parametrize("case", MOVED)
def test_what_jax_moves_out_of_a_loop_is_no_cotangent(case, is_known):
    """What is the same in all iterations is computed before a loop, in no scope."""
    x = values(4, 8, seed=1)

    def product(w, x):
        return lax.map(lambda i: MOVED[case](w, x), jnp.arange(2))

    def loss(w, x):
        return jnp.mean(jnp.sin(product(w, jnp.full_like(x, 0.5) if is_known else x)))

    def pulled(w, ct):
        return jax.vjp(lambda w: product(w, x), w)[1](jnp.sin(ct))

    for fn, args in (
        (jax.grad(loss), (values(8, 8) / 4, x)),
        (pulled, (values(8, 8) / 4, values(2, 4, 8))),
    ):
        found = dtypes_of(low(fn), *args)
        assert {row[:2] for row in found} == {(E4M3, E4M3), (E5M2, E4M3)}


@pytest.mark.parametrize("is_outside", (False, True), ids=("grad(amp)", "amp(grad)"))
def test_small_cotangents_are_not_lost_in_a_rule(is_outside):
    """e4m3 has 2^18 of range, and e5m2 has 2^32: columns must not become zero."""
    sizes = 2.0 ** -jnp.arange(0.0, 28.0)
    dense = dense_by_rule(RULES["cotangents right"])

    def loss(w, x):
        return jnp.sum(dense(x, w) * sizes)

    w, x = values(8, 28) / 8, values(16, 8, seed=1)
    grad = low(jax.grad(loss)) if is_outside else jax.grad(low(loss))
    made, exact = jax.jit(grad)(w, x), jax.grad(loss)(w, x)
    assert (jnp.linalg.norm(made - exact, axis=0) < 0.2 * abs(sizes) * 16).all()
    assert (jnp.linalg.norm(made, axis=0) > 0.5 * jnp.linalg.norm(exact, axis=0)).all()


def pulled_back(w, x, ct):
    made, back = jax.vjp(lambda w: jnp.tanh(x @ w) @ w, w)
    return back(made - ct)[0]


def by_what_is_closed_over(w, x, ct):
    closed = values(4, 8, seed=7)
    return jax.vjp(lambda w: jnp.tanh(x @ w) @ w, w)[1](closed)[0]


def by_the_value_itself(w, x, ct):
    made, back = jax.vjp(lambda w: jnp.tanh(x @ w) @ w, w)
    return back(made)[0]


@pytest.mark.parametrize(
    "fn", (pulled_back, by_what_is_closed_over, by_the_value_itself)
)
def test_a_cotangent_may_come_from_outside(fn):
    args = values(8, 8), values(4, 8, seed=1), values(4, 8, seed=2)
    rule = float8(where=None, parameters_only=False)
    for step in (low(fn, rule), low(jax.jit(fn), rule)):
        found = [row[:2] for row in dtypes_of(step, *args)]
        assert sorted(found) == [(E4M3, E4M3)] * 2 + [(E5M2, E4M3)] * 3


def test_what_is_made_of_two_cotangents_has_their_range():
    """And what a rule makes of none of them is none, such as scores made again."""

    def backward(x, w, ct):
        return ct @ w.T, x.T @ ct + (x.T @ x) @ w + w @ (ct.T @ ct) @ jnp.eye(8)

    dense = dense_by_rule(backward)

    def loss(w, x):
        return jnp.mean(dense(x, w) ** 2)

    w, x = values(8, 8), values(4, 8, seed=1)
    for grad in (low(jax.grad(loss)), jax.grad(low(loss))):
        found = [row[:2] for row in dtypes_of(grad, w, x)]
        assert found.count((E5M2, E5M2)) == 1  # ct.T @ ct
        assert found.count((E4M3, E5M2)) == 2  # x.T @ ct, w @ (ct.T @ ct)
        # x @ w, forward and again; x.T @ x, and that @ w.
        assert found.count((E4M3, E4M3)) == 4
        assert found.count((E5M2, E4M3)) == 2


@pytest.mark.parametrize("is_left", (False, True))
def test_weight_gradients_are_told_in_either_order(is_left):
    def backward(x, w, ct):
        return ct @ w.T, (ct.T @ x).T if is_left else x.T @ ct

    dense = dense_by_rule(backward)

    def loss(w, x):
        return jnp.mean(dense(jnp.sin(x), w) ** 2)

    w, x = values(8, 8), values(4, 8, seed=1)
    rule = float8(where=None, weight_gradient="compute")
    grad = low(jax.grad(loss, (0, 1)), rule)
    # Forward, made again by the rule, and for `x`.
    made = sorted(row[:2] for row in dtypes_of(grad, w, x))
    eight = [(E4M3, E4M3)] * 2 + [(E5M2, E4M3)]
    assert made == [("bfloat16", "bfloat16"), *eight]


FORMS = {
    **RULES,
    "inputs left": lambda x, w, ct: ((w @ ct.T).T, (ct.T @ x).T),
    "inputs right": lambda x, w, ct: (ct @ w.T, x.T @ ct),
    "by einsum": lambda x, w, ct: (
        jnp.einsum("...o,io->...i", ct, w),
        jnp.einsum("...o,...i->io", ct, x),
    ),
}


def of_gradients(fn, *args):
    """Of each contraction of a backward pass, its shape, what it reads, and why."""
    ops = [op for op in explain(fn)(*args).now.ops if op.flops]
    return [
        (tuple(sorted(op.shape)), op.dtype, op.why)
        for op in ops
        if op.place.phase == "backward"
        and "float8_e4m3fn x float8_e4m3fn" not in op.why
    ]


@pytest.mark.sample(8)
@pytest.mark.parametrize("is_outside", (False, True), ids=("grad(amp)", "amp(grad)"))
@pytest.mark.parametrize("around", [name for name in AROUND if name != "vmap"])
@pytest.mark.parametrize("form", FORMS)
def test_gradients_of_inputs_in_a_rule_are_quantised(form, around, is_outside):
    """And those of weights are not; the option says so, and so does `explain`."""
    fn = AROUND[around](dense_by_rule(FORMS[form]))

    def loss(w, x):
        return jnp.mean(fn(w, x) ** 2)

    args = values(8, 8) / 4, values(4, 8, seed=1)
    grad = low(jax.grad(loss), COMPUTE) if is_outside else jax.grad(low(loss, COMPUTE))
    found = of_gradients(grad, *args)
    said = {(dtype, "a weight gradient, by the" in why) for _, dtype, why in found}
    assert ("bfloat16", True) in said and len(said) == 2
    assert said < {("bfloat16", True), (E5M2, False), (E4M3, False)}
    weights = {shape for shape, dtype, _ in found if dtype == "bfloat16"}
    assert weights == {(8, 8)}
    assert (4, 8) in {shape for shape, dtype, _ in found if dtype != "bfloat16"}


def by_left(w, x):
    return (w.T @ x.T).T


def by_einsum(w, x):
    return jnp.einsum("bi,io->ob", x, w).T


def by_right(w, x):
    return x @ w


@pytest.mark.parametrize(
    "batch, is_outside",
    (
        ("closed over", False),
        ("closed over", True),
        ("an argument", False),
        ("an argument", True),
        ("of the state", True),
    ),
)
@pytest.mark.parametrize("product", (by_left, by_einsum, by_right))
def test_gradients_of_weights_in_any_layout(product, batch, is_outside):
    """Also where the batch is closed over, or is said to be a parameter."""
    x = values(24, 16, seed=1)
    w = {"in": values(16, 12) / 4, "out": values(12, 8, seed=2) / 4}

    def loss(w, x):
        return jnp.mean(product(w["out"], jnp.tanh(product(w["in"], x))) ** 2)

    fn, args = {
        "closed over": (lambda w: loss(w, x), (w,)),
        "an argument": (loss, (w, x)),
        "of the state": (lambda state: loss(*state), ((w, x),)),
    }[batch]
    grad = low(jax.grad(fn), COMPUTE) if is_outside else jax.grad(low(fn, COMPUTE))
    ops = [op for op in explain(grad)(*args).now.ops if op.place.phase == "backward"]
    found = {tuple(sorted(op.shape)): op for op in ops if op.flops}
    assert found[8, 12].dtype == found[12, 16].dtype == "bfloat16"
    assert found[12, 24].dtype == E5M2  # of what is between the layers
    if is_outside:
        perhaps = "perhaps " * (batch == "of the state")
        assert f": {perhaps}a weight gradient" in found[12, 16].why


def in_a_loop(layer):
    return lambda ws, x: lax.scan(lambda x, w: (layer(w, x), None), x, ws)[0]


@pytest.mark.parametrize("rule, numbers", ((FLOAT8, E4M3), (INT8, "int8")))
@pytest.mark.parametrize("around", (None, in_a_loop, jax.checkpoint, jax.jit))
def test_an_operand_of_many_readers_is_rounded_once(around, rule, numbers):
    """As queries, keys and values are made of one; and it is kept once."""

    def layer(w, x):
        x = jnp.tanh(x)
        q, k, v = (x @ w[name] for name in "qkv")
        return x + jnp.sin(q) * jnp.cos(k) * v

    w = {name: values(16, 16, seed=i) for i, name in enumerate("qkv")}
    x = values(64, 16, seed=3)
    fn = layer if around is None else around(layer)
    if around is in_a_loop:
        w = jax.tree.map(lambda w: jnp.stack([w, w]), w)
    quantised = low(fn, rule)
    made = [
        eqn
        for jaxpr in programs(jax.make_jaxpr(quantised)(w, x))
        for eqn in jaxpr.eqns
        if eqn.primitive.name == "convert_element_type"
        and eqn.outvars[0].aval.dtype == numbers
        and eqn.outvars[0].aval.shape == x.shape
    ]
    assert len(made) == 1
    if numbers == E4M3 and around is not jax.checkpoint:
        _, pull = jax.vjp(quantised, w, x)
        leaves = [leaf for leaf in jax.tree.leaves(pull) if hasattr(leaf, "dtype")]
        assert sum(leaf.dtype == numbers for leaf in leaves) == 4


@pytest.mark.parametrize("around", (lambda fn: fn, jax.checkpoint))
def test_gradients_beside_weights_that_are_closed_over(around):
    """They are gradients of inputs."""
    frozen, x = values(12, 8, seed=2) / 4, values(24, 16, seed=1)
    fn = around(lambda w, x: jnp.tanh(x @ w) @ frozen)
    grad = low(jax.grad(lambda w, x: jnp.mean(fn(w, x) ** 2)), COMPUTE)
    ops = [op for op in explain(grad)(values(16, 12) / 4, x).now.ops if op.flops]
    (op,) = (op for op in ops if op.place.phase == "backward" and 24 in op.shape)
    assert op.dtype == E5M2


@pytest.mark.parametrize("is_outside", (False, True), ids=("grad(amp)", "amp(grad)"))
@pytest.mark.parametrize("around", (None, in_a_loop, jax.checkpoint, jax.jit))
def test_gradients_beside_what_weights_and_data_are_multiplied_with(around, is_outside):
    """A memory that is read without a projection: its scores have 16 bits both ways."""

    def layer(w, x):
        keys = jnp.tanh(x @ w["keys"])
        scores = jax.nn.softmax(x @ keys.T)
        return jnp.tanh(x @ w["values"]) + jnp.tanh(scores @ jnp.sin(x))

    w = {"keys": values(16, 16), "values": values(16, 16, seed=1)}
    if around is in_a_loop:
        w = jax.tree.map(lambda w: w[None], w)
    fn = layer if around is None else around(layer)
    x = values(24, 16, seed=2)

    def loss(w, x):
        return jnp.mean(fn(w, x) ** 2)

    grad = low(jax.grad(loss, (0, 1)), FLOAT8)
    if not is_outside:
        grad = jax.grad(low(loss, FLOAT8), (0, 1))
    ops = [op for op in explain(grad)(w, x).now.ops if op.flops]
    of_data = [op for op in ops if op.flops == 2 * 24 * 24 * 16]
    of_weights = [op for op in ops if op.flops == 2 * 24 * 16 * 16]
    assert {op.dtype for op in of_data} == {"bfloat16"}
    assert {op.dtype for op in of_weights} == {E4M3, E5M2}
    assert len(of_data) >= 2 * 3 and len(of_weights) >= 2 * 3


def test_gradients_of_a_convolution_are_made_in_the_compute_dtype():
    def loss(w, x):
        return jnp.sum(jnp.sin(lax.conv(x, w, (1, 1), "SAME")))

    w, x = values(4, 3, 3, 3), values(2, 3, 8, 8, seed=1)
    for grad in (low(jax.grad(loss, (0, 1))), jax.grad(low(loss), (0, 1))):
        found = sorted(row[:2] for row in dtypes_of(grad, w, x))
        assert found == [("bfloat16", "bfloat16")] * 2 + [(E4M3, E4M3)]


# ---------------------------------------------------------- what is left alone, and why


def attention(params, x):
    with jax.named_scope("attention"):
        q, k, v = (x @ params[name] for name in "qkv")
        scores = jax.nn.softmax(jnp.einsum("btd,bsd->bts", q, k))
        x = jnp.einsum("bts,bsd->btd", scores, v)
    with jax.named_scope("lm_head"):
        return x @ params["head"]


def attention_args():
    params = {name: values(16, 16, seed=i) for i, name in enumerate("qkv")}
    return params | {"head": values(16, 32, seed=5)}, values(2, 16, 16)


def whys(fn, *args):
    ops = explain(fn)(*args).now.ops
    return [(op.reads[0], op.why) for op in ops if op.flops]


def test_scores_and_heads_are_left_alone():
    found = whys(low(attention), *attention_args())
    assert [dtype for dtype, _ in found] == [E4M3] * 3 + ["bfloat16"] * 3
    reasons = [why for _, why in found]
    assert "float8_e4m3fn" in reasons[0]
    assert "no operand is a parameter" in reasons[3]
    assert "'lm_head' is a head" in reasons[5]


@pytest.mark.parametrize(
    "name", ("head", "lm_head", "logits", "embed", "token_embedding", "wte", "Embed_0")
)
def test_names_of_heads_and_embeddings(name):
    def model(w, v, x):
        with jax.named_scope(name):
            x = x @ w
        return jnp.sin(x) @ v

    args = values(8, 8), values(8, 4), values(4, 8)
    found = whys(low(model, argnums=(0, 1)), *args)
    assert [dtype for dtype, _ in found] == ["bfloat16", E4M3]


@pytest.mark.parametrize("name", ("multi_head", "attention_heads", "mlp", "header"))
def test_other_names(name):
    def model(w, x):
        with jax.named_scope(name):
            return x @ w

    assert whys(low(model), values(8, 8), values(4, 8))[0][0] == E4M3


def test_what_is_too_small_or_odd():
    def model(w, v, x):
        return jnp.sin(x @ w) @ v

    rule = float8(where=worth_eight_bits(side=16, volume=1, multiple_of=16))
    args = values(16, 32), values(32, 20), values(16, 16)
    found = whys(low(model, rule, argnums=(0, 1)), *args)
    assert found[0][0] == E4M3
    assert found[1][0] == "bfloat16"
    assert (
        "16 x 20 x 32 does not meet `where=worth_eight_bits(16, 1, 16)`" in found[1][1]
    )


@pytest.mark.parametrize("equation", ("bed,edf->bef", "ebd,edf->ebf", "bde,edf->bfe"))
def test_batch_axes_may_stand_anywhere(equation):
    def model(w, x):
        return jnp.einsum(equation, x, w)

    left = equation.split(",")[0]
    x = values(*({"b": 16, "e": 4, "d": 32}[axis] for axis in left))
    w = values(4, 32, 8)
    for rule in (int8(where=None, weight_only=True), INT8, FLOAT8):
        made = jax.jit(low(model, rule))(w, x)
        np.testing.assert_allclose(made, model(w, x), atol=0.15 * float(jnp.max(made)))


def test_what_explain_shows():
    loss = lambda *args: jnp.sum(low(attention)(*args))  # noqa: E731
    report = explain(jax.grad(loss))(*attention_args())
    ops = [op for op in report.now.ops if op.operands]
    assert {op.operands for op in ops} == {(E4M3, E4M3), (E5M2, E4M3)}
    assert len(ops) == 6  # three, and the gradients of their weights
    assert {op.scales for op in ops} == {"tensor x tensor"}
    assert all("Hopper" in op.runs for op in ops)
    (table,) = (t for t in tables(report, 1) if t.title == "Quantised contractions")
    assert "no operand is a parameter" in " ".join(map(str, table.columns[2]._cells))
    shares = report.now.totals.flops_by_dtype
    assert shares.keys() == {E4M3, E5M2, "bfloat16"}
    report = explain(low(attention, INT8))(*attention_args())
    (op, *_) = (op for op in report.now.ops if op.operands)
    assert op.operands == ("int8", "int8") and op.scales == "row x output"
    assert any(op["runs"] for op in json.loads(report.to_json())["now"]["ops"])


def test_other_options_of_what_is_left_alone():
    rule = float8(where=None, leave=("attention",), parameters_only=False)
    found = whys(low(attention, rule), *attention_args())
    assert [dtype for dtype, _ in found] == ["bfloat16"] * 5 + [E4M3]
    everything = float8(where=None, leave=(), parameters_only=False)
    found = whys(low(attention, everything), *attention_args())
    assert {dtype for dtype, _ in found} == {E4M3}


def test_nothing_quantised_is_told():
    args = attention_args()
    fn = amp(attention, amp_policy="float8_from_mixed_bfloat16")
    said = r"No contraction is quantised.*3 since .*where=worth_eight_bits.*1 since"
    with pytest.warns(AmpWarning, match=said):
        fn(*args)
    strict = amp(attention, amp_policy="int8_from_float32", strict=True)
    with pytest.raises(AmpError, match="No contraction is quantised"):
        strict(*args)


def test_each_function_and_rule_is_told_of_once():
    def one(w, x):
        return jnp.tanh(x @ w)

    class Other:
        def __call__(self, w, x):
            return jnp.sin(x @ w)

    def said(fn, policy="int8_from_float32"):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            amp(fn, amp_policy=policy)(values(8, 8), values(8, 8))
        return [str(warning.message) for warning in caught]

    (told,) = said(one)
    assert "that `int8()` could quantise" in told
    assert f"`one` ({__file__}:{one.__code__.co_firstlineno})" in told
    assert said(one) == said(jax.jit(one)) == said(partial(one)) == []
    (told,) = said(Other())
    assert f"`Other` ({__file__}:" in told
    (told,) = said(one, "float8_from_float32")
    assert "that `float8()` could quantise" in told
    misspelt = default_amp_policy | {"attentoin": "bfloat16"}
    assert [len(said(fn, misspelt)) for fn in (one, one, Other())] == [1, 0, 0]


def test_what_its_author_gave_a_precision_stays():
    def model(w, v, x):
        return jnp.dot(jnp.sin(x @ w), v, precision="highest")

    found = whys(low(model), values(8, 8), values(8, 8), values(8, 8))
    assert [dtype for dtype, _ in found] == [E4M3, "float32"]


def test_products_that_are_none():
    def model(w, x):
        outer = jnp.einsum("i,j->ij", x[0], x[1])
        return jnp.sin(x @ w) * jnp.vdot(x, x) + outer

    found = whys(low(model), values(8, 8), values(8, 8))
    assert sorted(dtype for dtype, _ in found) == ["float32", "float32", E4M3]


def test_under_the_key_of_a_scope():
    """Other ops in it are what the policy says elsewhere."""

    def model(w, v, x):
        with jax.named_scope("mlp"):
            x = jnp.exp(x @ w)
            with jax.named_scope("norm"):
                x = x / jnp.sum(x)
        return x @ v

    args = values(8, 8), values(8, 8), values(8, 8)
    policy = default_amp_policy | {"mlp": FLOAT8}
    fn = amp(model, compute_dtype="bfloat16", amp_policy=policy)
    assert [dtype for dtype, _ in whys(fn, *args)] == [E4M3, "bfloat16"]
    ops = explain(fn)(*args).now.ops
    assert {op.dtype for op in ops if op.primitive in ("exp", "reduce_sum")} == {
        "float32"
    }
    nested = default_amp_policy | {"mlp": FLOAT8, "norm": "bfloat16"}
    ops = explain(model, compute_dtype="bfloat16", amp_policy=nested)(*args).now.ops
    (divided,) = (op for op in ops if op.key == "norm" and op.primitive == "div")
    assert divided.dtype == "bfloat16"


# ------------------------------------------------------------------------------ names

NAMES = [
    f"{mode}_from_{source}"
    for mode in ("int8", "float8")
    for source in ("float32", "bfloat16", "float16", "mixed_bfloat16", "mixed_float16")
]


@pytest.mark.parametrize("name", NAMES)
def test_names_of_policies(name):
    mode, _, source = name.partition("_from_")
    policy, base = get_policy(name), get_policy(source)
    rule = {"int8": int8(), "float8": float8()}[mode]
    fields = base.compute_dtype, base.param_dtype, base.output_dtype
    assert policy == Policy(*fields, rules=quantised(rule))
    assert policy != base
    assert Policy.from_dict(json.loads(json.dumps(policy.to_dict()))) == policy
    assert len(repr(policy)) < 200


@pytest.mark.parametrize(
    "rule",
    (
        float8(where=None, grad_dtype=E4M3, granularity="row", leave=("a", "b")),
        float8(where=worth_eight_bits(4), weight_gradient="compute", keep="compute"),
        int8(migration=0.25, epsilon=0),
        int8(activation_max=3, parameters_only=False),
        int8(weight_only=True),
    ),
    ids=repr,
)
def test_rules_are_saved(rule):
    for rules in (quantised(rule), default_amp_policy | {lax.dot_general_p: rule}):
        policy = Policy("bfloat16", rules=rules)
        assert Policy.from_dict(json.loads(json.dumps(policy.to_dict()))) == policy


def test_policies_by_scope():
    def model(w, v, x):
        with jax.named_scope("mlp"):
            x = jnp.sin(x @ w)
        return x @ v

    low_mlp = Policy("bfloat16", rules=quantised(FLOAT8))
    policies = PolicyMap("mixed_bfloat16", {"mlp": low_mlp})
    found = whys(
        amp(model, amp_policy=policies), values(8, 8), values(8, 8), values(8, 8)
    )
    assert [dtype for dtype, _ in found] == [E4M3, "bfloat16"]


@pytest.mark.parametrize(
    "make, error, match",
    (
        (lambda: get_policy("int8_from_float64"), ValueError, "with x64"),
        (lambda: get_policy("int8_from_nothing"), ValueError, "called 'nothing'"),
        (lambda: get_policy("float8"), ValueError, "'int8_from_mixed_bfloat16'"),
        (lambda: quantised("float8"), TypeError, r"such as `float8\(\)`"),
        (lambda: amp(abs, compute_dtype=E4M3), AmpError, "'float8_from_mixed_bf"),
        (lambda: float8(grad_dtype="bfloat16"), ValueError, "'float8_e5m2', but got"),
        (lambda: float8(grad_dtype="nonsense"), ValueError, "but got 'nonsense'"),
        (lambda: float8(granularity="rows"), ValueError, "Did you mean 'row'"),
        (lambda: float8(keep=8), ValueError, "`keep` must be .* got 8"),
        (lambda: float8(weight_gradient="low"), ValueError, "'compute', but got 'low'"),
        (lambda: float8(power_of_two=1), TypeError, "True or False, but got 1"),
        (lambda: float8(where=worth_eight_bits), TypeError, r"`worth_eight_bits\(\)`"),
        (lambda: float8(where=1024), TypeError, "callable with a `Site`"),
        (lambda: float8(leave="head"), TypeError, "a sequence of regular"),
        (lambda: int8(leave=("(",)), ValueError, r"holds '\('"),
        (lambda: int8(migration=2), ValueError, "from 0 to 1"),
        (lambda: int8(migration=np.nan), ValueError, "finite number of 0 or more"),
        (lambda: int8(activation_max=0), ValueError, "above 0, but got 0"),
        (lambda: int8(weight_only=True, migration=0.5), ValueError, "one of the two"),
        (lambda: int8(weight_only="yes"), TypeError, "True or False"),
        (lambda: worth_eight_bits(side=0), ValueError, "`side` must be a positive"),
        (lambda: FLOAT8("bfloat16", []), AmpError, "Put it into a policy"),
    ),
)
def test_bad_arguments(make, error, match):
    with pytest.raises(error, match=match):
        make()
