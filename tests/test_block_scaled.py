"""MXFP8 and NVFP4: the numbers, the three contractions, and where they are native."""

import json
from functools import partial

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from jax import lax

from jaxamp_like import (
    AmpWarning,
    Policy,
    amp,
    calibrate,
    explain,
    get_policy,
    trace_numerics,
)
from jaxamp_like._quantised.axes import Axes
from jaxamp_like._quantised.blocks import PowerOfTwoBlocks, TensorScaledBlocks
from jaxamp_like._quantised.nvfp4 import _SIGNS
from jaxamp_like.presets import quantised
from jaxamp_like.rules import mxfp8, nvfp4
from tests import blocks_in_numpy as reference
from tests.programs import error, values

pytestmark = [pytest.mark.rest, pytest.mark.sample(6)]

ROWS = Axes((1,), ((0, 0),))
MX, NV = mxfp8(where=None, emulate=True), nvfp4(where=None, emulate=True)
PLAIN_NV = nvfp4(
    where=None, emulate=True, square_weights=False, rotate=False, stochastic=False
)
both_formats = pytest.mark.parametrize("rule", (MX, NV), ids=("mxfp8", "nvfp4"))


def low(fn, rule, dtype="bfloat16", argnums=None):
    return amp(fn, compute_dtype=dtype, amp_policy=quantised(rule), argnums=argnums)


def bits(x):
    """What an array holds, of which all NaN are the same."""
    wide = np.asarray(x).astype(np.float32)
    return np.where(np.isnan(wide), np.float32(np.nan), wide).view(np.uint32)


# The numbers.


@st.composite
def arrays(draw, most_rows=3, most_columns=70):
    """Arrays whose blocks have all magnitudes, zeros, and now and then inf or NaN."""
    shape = draw(st.integers(1, most_rows)), draw(st.integers(1, most_columns))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    exponents = rng.integers(
        *sorted(draw(st.tuples(*[st.integers(-140, 126)] * 2))), shape, endpoint=True
    )
    x = np.ldexp(
        rng.choice([1, 1.125, 1.25, 1.5, 1.75, 1.96875, rng.uniform(1, 2)], shape),
        exponents,
    )
    x = (x * rng.choice([-1, 1], shape)).astype(np.float32)
    x[rng.random(shape) < draw(st.sampled_from([0, 0.2, 1]))] = 0
    special = draw(st.sampled_from([None, np.inf, -np.inf, np.nan]))
    if special is not None:
        x[rng.integers(shape[0]), rng.integers(shape[1])] = special
    return x


@partial(jax.jit, static_argnums=0)
def rounded(how, x):
    return how(x)


@settings(max_examples=60, deadline=None)
@given(arrays(), st.sampled_from(["float8_e4m3fn", "float8_e5m2"]), st.booleans())
def test_numbers_of_mxfp8(x, dtype, up):
    made = rounded(PowerOfTwoBlocks(jnp.dtype(dtype), ROWS, up), x)
    expected, scales = reference.mxfp8(x, jnp.dtype(dtype).type, up)
    np.testing.assert_array_equal(bits(made.scales[0]), bits(scales))
    known = np.repeat(~np.isnan(scales.astype(np.float32)), 32, axis=-1)
    flat = expected.reshape(len(x), -1)
    np.testing.assert_array_equal(bits(made.values[0])[known], bits(flat)[known])
    wanted = reference.restored(expected, scales, length=x.shape[1])
    np.testing.assert_array_equal(
        bits(made.restored()),
        bits(np.where(abs(wanted) < 2.0**-126, 0 * wanted, wanted)),
    )


@settings(max_examples=60, deadline=None)
@given(arrays(most_rows=35), st.booleans())
def test_numbers_of_nvfp4(x, square):
    made = rounded(TensorScaledBlocks(ROWS, square), x)
    expected, scales, tensor = reference.nvfp4(x, square=square)
    assert made.tensor_scale == tensor
    np.testing.assert_array_equal(bits(made.scales[0]), bits(scales))
    known = np.repeat(~np.isnan(scales.astype(np.float32)), 16, axis=-1)
    values = np.asarray(made.values[0]).astype(np.float32)[known]
    ends = [
        abs(one.astype(np.float32)).reshape(len(x), -1)[known] for one in expected[::2]
    ]
    assert ((ends[0] <= abs(values)) & (abs(values) <= ends[1])).all()
    padded = np.pad(x, [(0, 0), (0, -x.shape[1] % 16)])[known]
    assert (np.signbit(values) == np.signbit(padded)).all()
    assert np.sum(ends[0] != ends[1]) <= len(values) / 2


def test_a_scale_of_the_standard_saturates_where_ours_does_not():
    x = jnp.full((1, 32), 480.0)
    down, up = (
        PowerOfTwoBlocks(jnp.dtype("float8_e4m3fn"), ROWS, up)(x)
        for up in (False, True)
    )
    assert down.restored()[0, 0] == 448
    assert up.restored()[0, 0] == 480


def test_an_outlier_costs_its_own_block_alone():
    x = values(4, 64).at[0, 0].set(1e6)
    for how in (
        PowerOfTwoBlocks(jnp.dtype("float8_e4m3fn"), ROWS, True),
        TensorScaledBlocks(ROWS),
    ):
        rest = how(x).restored()[1:, 32:]
        most = 2**-4 if isinstance(how, PowerOfTwoBlocks) else 1
        assert error(rest, x[1:, 32:]) <= most
    assert (
        error(
            PowerOfTwoBlocks(jnp.dtype("float8_e4m3fn"), ROWS, True)(x).restored()[1:],
            x[1:],
        )
        < 2**-4
    )


def test_stochastic_rounding_keeps_the_mean_and_is_repeatable():
    x = jnp.linspace(-6, 6, 40)[:, None] * jnp.ones((1, 16 * 512))
    x = x.at[:, ::16].set(6)  # all blocks have a scale of 1
    how = TensorScaledBlocks(ROWS, seed=1)
    # The scale of the tensor, 6 / (448 * 6), and that of a block make 1 together.
    made = rounded(how, x).restored()
    free = np.arange(x.shape[1]) % 16 != 0
    spread = 2 / np.sqrt(free.sum()) / 2
    np.testing.assert_allclose(made[:, free].mean(1), x[:, 1], atol=5 * spread)
    np.testing.assert_array_equal(made, how(x).restored())
    other = how._replace(seed=2)(x).restored()
    assert (made != other).mean() > 0.1
    nearest = how._replace(seed=None)(x).restored()
    assert np.abs(nearest[:, free].mean(1) - x[:, 1]).max() > 0.2


def test_a_square_block_has_the_same_numbers_either_way():
    w = values(40, 56)
    across, along = (
        TensorScaledBlocks(axes, is_square=True)(w).restored()
        for axes in (Axes((0,), ((1, 0),)), ROWS)
    )
    np.testing.assert_array_equal(across, along)
    across, along = (
        TensorScaledBlocks(axes)(w).restored() for axes in (Axes((0,), ((1, 0),)), ROWS)
    )
    assert (across != along).any()


def test_a_rotation_leaves_products_as_they_were_and_spreads_outliers():
    x = values(8, 64).at[:, 3].multiply(1000)
    signs = (1, -1) * 8
    rotated = TensorScaledBlocks(ROWS, signs=signs)
    blocks = rotated(x)
    assert error(blocks.restored(), x) < 0.1
    plain = TensorScaledBlocks(ROWS)(x)
    rest = (slice(None), slice(0, 3))
    assert error(plain.restored()[rest], x[rest]) == 1  # flushed beside the outlier
    nonzero = [
        np.count_nonzero(np.asarray(b.values, np.float32)) for b in (blocks, plain)
    ]
    assert nonzero[0] > 1.2 * nonzero[1]


# The contractions.

DIMENSIONS = {
    "matrix": ("mk,kn->mn", (6, 40), (40, 24)),
    "sequences": ("btk,kn->btn", (2, 3, 32), (32, 4)),
    "two summed": ("mhk,hkn->mn", (6, 2, 20), (2, 20, 5)),
    "summed out of order": ("mhk,khn->mn", (6, 2, 20), (20, 2, 5)),
    "summed apart": ("hmk,hnk->mn", (3, 6, 16), (3, 5, 16)),
    "two free": ("mk,khd->mhd", (6, 8), (8, 2, 3)),
    "batch": ("emk,ekn->emn", (2, 6, 33), (2, 33, 4)),
    "batch in the middle": ("mek,kne->nme", (6, 2, 8), (8, 4, 2)),
    "transposed weight": ("mk,nk->mn", (6, 70), (9, 70)),
}
every_dimension = pytest.mark.parametrize(
    "spec, x, w", DIMENSIONS.values(), ids=DIMENSIONS
)


def in_blocks(x, kept, summed, rule, **options):
    """An operand `(kept axes, summed axes)` as the reference rounds it, in float64."""
    rows = np.asarray(x, np.float32).reshape(kept, summed)
    if rule is MX:
        return reference.restored(*reference.mxfp8(rows), length=summed)
    return reference.restored(*reference.nvfp4(rows, **options), length=summed)


def product(lhs, rhs, rule):
    """`(m, k) @ (k, n)` of operands in blocks along `k`."""
    (m, k), n = lhs.shape, rhs.shape[1]
    return in_blocks(lhs, m, k, rule) @ in_blocks(np.asarray(rhs).T, n, k, rule).T


@pytest.mark.parametrize("rule", (MX, PLAIN_NV), ids=("mxfp8", "nvfp4"))
def test_all_three_contractions_are_those_of_the_restored_numbers(rule):
    x, w, ct = values(24, 40), values(40, 56, seed=1), values(24, 56, seed=2)
    fn = low(lambda w, x: x @ w, rule, dtype="float32", argnums=0)
    out, back = jax.vjp(jax.jit(fn), w, x)
    dw, dx = back(ct)
    for made, expected in (
        (out, product(x, w, rule)),
        (dx, product(ct, w.T, rule)),
        (dw, product(x.T, ct, rule)),
    ):
        bound = 2**-20 * abs(expected).max()
        assert (abs(np.asarray(made, np.float64) - expected) <= bound).all()


def einsum(spec):
    return lambda ct, w, x: (
        jax.value_and_grad(lambda w, x: jnp.sum(ct * jnp.einsum(spec, x, w)), (0, 1))
    )(w, x)


@pytest.mark.sample(6)
@both_formats
@every_dimension
def test_dimensions_and_their_gradients(spec, x, w, rule):
    x, w = values(*x), values(*w, seed=1)
    ct = values(*jnp.einsum(spec, x, w).shape, seed=2)
    fn = partial(jnp.einsum, spec)
    made, grads = jax.jit(einsum_under(spec, rule))(ct, w, x)
    exact, plain = einsum(spec)(ct, w, x)
    most = 0.08 if rule is MX else 0.35
    scale = jnp.linalg.norm(ct) * jnp.linalg.norm(fn(x, w))
    assert abs(made - exact) <= most * scale
    for one, other in zip(grads, plain, strict=True):
        assert 1e-4 < error(one, other) <= most
    report = explain(einsum_under(spec, rule))(ct, w, x)
    sizes = [
        op.reads for op in report.now.ops if op.primitive == "amp_block_scaled_dot"
    ]
    assert sizes == [(rule.name,)] * 3


def einsum_under(spec, rule):
    mixed = low(lambda w, x: jnp.einsum(spec, x, w), rule, argnums=0)
    return lambda ct, w, x: (
        jax.value_and_grad(lambda w, x: jnp.sum(ct * mixed(w, x)), (0, 1))
    )(w, x)


def network(w, x):
    return jnp.mean(jnp.tanh(jax.nn.gelu(x @ w[0]) @ w[1]) ** 2)


def weights():
    return values(48, 64, seed=1) / 7, values(64, 32, seed=2) / 8


@both_formats
def test_elsewhere_the_compute_dtype_is_taken(rule):
    """Without `emulate`, a CPU computes what the default policy would, and says so."""
    plain = type(rule)(where=None)
    w, x = weights(), values(16, 48)
    with pytest.warns(AmpWarning, match=r"runs on a CPU, where the 2 contractions"):
        made = jax.jit(jax.grad(low(network, plain)))(w, x)
    expected = jax.jit(jax.grad(amp(network, compute_dtype="bfloat16")))(w, x)
    for one, other in zip(made, expected, strict=True):
        assert error(one, other) < 2**-7
    emulated = jax.jit(jax.grad(low(network, rule)))(w, x)
    assert error(made[0], emulated[0]) > 2**-7


# Transformations and programs within programs.


def scanned(w, x):
    def body(x, _):
        return jnp.tanh(jax.nn.gelu(x @ w[0]) @ w[1]), None

    return jnp.mean(lax.scan(body, x, None, length=3)[0] ** 2)


def remat(w, x):
    return jnp.mean(jax.checkpoint(lambda x: jnp.tanh(x @ w[0]) @ w[1])(x) ** 2)


def branches(w, x):
    return lax.cond(x[0, 0] > 0, network, lambda w, x: -network(w, x), w, x)


def looped(w, x):
    def body(_, x):
        return jnp.tanh(jax.nn.gelu(x @ w[0]) @ w[1])

    return jnp.mean(lax.fori_loop(0, 2, body, x) ** 2)


@jax.custom_vjp
def scaled(x):
    return 2 * x


scaled.defvjp(lambda x: (2 * x, None), lambda _, ct: (2 * ct,))


def authored(w, x):
    return jnp.mean(scaled(jnp.tanh(scaled(x @ w[0])) @ w[1]) ** 2)


def stacked(w, x):
    def body(x, w):
        return jnp.tanh(jax.nn.gelu(x @ w[0]) @ w[1]), None

    many = jax.tree.map(lambda one: jnp.stack([one, one * 0.9]), w)
    return jnp.mean(lax.scan(body, x, many)[0] ** 2)


def square():
    return values(48, 64, seed=1) / 7, values(64, 48, seed=2) / 8


@pytest.mark.sample(6)
@both_formats
@pytest.mark.parametrize(
    "fn", (network, scanned, remat, branches, looped, authored, stacked)
)
def test_programs_within_programs(fn, rule):
    w, x = square(), values(16, 48)
    made = jax.jit(jax.value_and_grad(low(fn, rule)))(w, x)
    eager = jax.value_and_grad(low(fn, rule))(w, x)
    exact = jax.jit(jax.value_and_grad(fn))(w, x)
    most = 0.12 if rule is MX else 0.6
    for one, two, other in zip(
        *map(jax.tree.leaves, (made, eager, exact)), strict=True
    ):
        assert error(one, other) < most
        assert error(one, two) < 0.05
    inside = jax.jit(low(jax.value_and_grad(fn), rule, argnums=0))(w, x)
    for one, other in zip(jax.tree.leaves(inside), jax.tree.leaves(exact), strict=True):
        assert error(one, other) < most


@pytest.mark.sample(6)
@both_formats
@pytest.mark.parametrize("in_axes", ((None, 0), (0, None), (0, 0)), ids=str)
def test_vmap_is_a_loop_over_examples(in_axes, rule):
    # Cotangents' chances depend on places, which `vmap` keeps.
    w, x = square(), values(16, 48)
    many_w = jax.tree.map(lambda one: jnp.stack([one, 1.5 * one, -one]), w)
    many_x = jnp.stack([x, 30 * x, x**2])
    args = (many_w if in_axes[0] == 0 else w, many_x if in_axes[1] == 0 else x)
    fn = jax.grad(low(network, rule), (0, 1))
    made = jax.jit(jax.vmap(fn, in_axes=in_axes))(*args)
    for i in range(3):
        one = [
            jax.tree.map(lambda a, i=i: a[i], arg) if axis == 0 else arg
            for arg, axis in zip(args, in_axes, strict=True)
        ]
        expected = jax.jit(fn)(*one)
        for a, b in zip(*map(jax.tree.leaves, (made, expected)), strict=True):
            assert error(a[i], b) < 0.02


@pytest.mark.sample(2)
@both_formats
def test_forward_mode_and_linearize(rule):
    w, x = square(), values(16, 48)
    fn = low(network, rule)
    moved = jax.jit(lambda *args: jax.jvp(fn, args, args))
    exact = jax.jit(lambda *args: jax.jvp(network, args, args))(w, x)
    out, tangent = moved(w, x)
    assert error(out, exact[0]) < 0.2
    assert error(tangent, exact[1]) < 0.4
    _, pushed = jax.linearize(jax.jit(fn), w, x)
    assert error(pushed(w, x), tangent) < 1e-2


@both_formats
def test_second_derivatives_are_those_of_contractions(rule):
    """What is kept is not rounded, so that it can be differentiated again."""
    w, x = square(), values(16, 48)

    def penalty(fn):
        return lambda w, x: jnp.sum(jax.grad(fn, 1)(w, x) ** 2)

    made = jax.grad(penalty(low(network, rule)))(w, x)
    for one, other in zip(made, jax.grad(penalty(network))(w, x), strict=True):
        assert error(one, other) < (0.2 if rule is MX else 0.9)


@both_formats
def test_inf_and_nan_are_seen(rule):
    w, x = weights(), values(16, 48)
    for bad in (jnp.inf, jnp.nan):
        out = jax.jit(low(lambda w, x: x @ w[0], rule))(w, x.at[3, 5].set(bad))
        assert jnp.isnan(out[3]).all()
        assert jnp.isfinite(out[4:]).all()


@both_formats
def test_zeros_and_nothing(rule):
    fn = jax.jit(jax.value_and_grad(low(lambda w, x: jnp.sum(x @ w), rule)))
    out, grad = fn(values(40, 8), jnp.zeros((4, 40)))
    assert out == 0
    assert (grad == 0).all()
    out, grad = fn(values(40, 8), jnp.zeros((0, 40)))
    assert out == 0
    assert grad.shape == (40, 8)


@both_formats
def test_no_examples(rule):
    w, x = values(40, 24), values(6, 40)
    gradient = jax.grad(low(lambda w, x: jnp.sum((x @ w) ** 2), rule, argnums=0))
    for in_axes in ((0, None), (None, 0), (0, 0)):
        args = [
            one if axis is None else jnp.zeros((0, *one.shape))
            for one, axis in zip((w, x), in_axes, strict=True)
        ]
        assert jax.vmap(gradient, in_axes)(*args).shape == (0, 40, 24)
    batch = low(
        jax.grad(lambda w, x: jnp.sum(jnp.einsum("emk,ekn->emn", x, w) ** 2)), rule
    )
    assert batch(jnp.zeros((0, 40, 24)), jnp.zeros((0, 6, 40))).shape == (0, 40, 24)


@both_formats
@pytest.mark.parametrize(
    "w_shape, x_shape, spec",
    (
        ("40, 24", "40, b", "km,kn->nm"),
        ("40, 24", "b, s, 40", "bsk,kn->bsn"),
        ("40, n", "6, 40", "mk,kn->mn"),
        ("e, 40, 24", "e, m, 40", "emk,ekn->emn"),
    ),
)
def test_symbolic_lengths(w_shape, x_shape, spec, rule):
    """Any axis but those that are summed over may have them."""

    def loss(w, x):
        return jnp.sum(jnp.tanh(jnp.einsum(spec, x, w) / 6) ** 2)

    fn = jax.jit(jax.grad(low(loss, rule, argnums=0), (0, 1)))
    scope = jax.export.SymbolicScope()
    shapes = [jax.export.symbolic_shape(one, scope=scope) for one in (w_shape, x_shape)]
    avals = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    exported = jax.export.export(fn)(*avals)
    lengths = {"b": 6, "s": 2, "n": 24, "e": 2, "m": 6}
    w, x = (
        values(*(lengths.get(str(length), length) for length in shape), seed=i)
        for i, shape in enumerate(shapes)
    )
    for one, other in zip(
        exported.call(w, x), jax.grad(loss, (0, 1))(w, x), strict=True
    ):
        assert error(one, other) < (0.12 if rule is MX else 0.4)


def test_a_rotation_in_float16_does_not_overflow():
    x = 6e4 * jnp.asarray(_SIGNS, jnp.float16)[None]
    made = TensorScaledBlocks(ROWS, signs=_SIGNS)(x).restored()
    assert error(made, x) < 1e-3


@pytest.mark.filterwarnings("ignore:JAX runs on a CPU")
@both_formats
def test_float16_elsewhere_has_the_precision_of_float16(rule):
    w, x = values(64, 32), values(16, 64)
    plain = type(rule)(where=None)
    made = low(jnp.matmul, plain, "float16")(x, w)
    np.testing.assert_array_equal(made, amp(jnp.matmul, compute_dtype="float16")(x, w))


@pytest.mark.skipif(not hasattr(jax, "set_mesh"), reason="this JAX has no `set_mesh`")
@both_formats
def test_examples_over_an_explicit_axis(rule):
    """`vmap` hides such an axis from what it maps."""
    P = jax.sharding.PartitionSpec
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    w, x = values(64, 24) / 8, values(4, 6, 64)
    loss = low(lambda w, x: jnp.sum(jnp.tanh(x @ w) ** 2), rule, argnums=0)

    def summed(w, x):
        return jnp.sum(jax.vmap(loss, (None, 0))(w, x))

    one_by_one = jax.vmap(jax.grad(loss, (0, 1)), (None, 0))
    together = jax.grad(summed, (0, 1))
    expected = jax.jit(one_by_one)(w, x)
    with jax.set_mesh(mesh):
        args = [
            jax.device_put(one, jax.sharding.NamedSharding(mesh, spec))
            for one, spec in ((w, P()), (x, P("data")))
        ]
        made, sums = (jax.jit(fn)(*args) for fn in (one_by_one, together))
    for one, other in zip(made, expected, strict=True):
        assert error(one, other) < 0.02
    exact = jax.grad(lambda w, x: jnp.sum(jnp.tanh(x @ w) ** 2), (0, 1))(w, x)
    for one, other in zip(sums, exact, strict=True):
        assert error(one, other) < (0.08 if rule is MX else 0.35)


def one_product(w, x):
    return jnp.sum(jnp.tanh(x @ w[0]) ** 2)


def layers_in_a_loop(w, x):
    layer = jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None))
    return jnp.sum(jax.lax.scan(layer, x, w)[0] ** 2)


def each_by_vmap(w, x):
    return jnp.sum(jax.vmap(lambda w: jnp.tanh(x @ w))(w) ** 2)


@pytest.mark.sample(8)
@pytest.mark.parametrize(
    ("fn", "weights"),
    [
        (one_product, ()),
        (one_product, (None, None, "model")),
        (layers_in_a_loop, ()),
        (layers_in_a_loop, (None, "model")),
        (each_by_vmap, ("model",)),
    ],
)
@both_formats
def test_arrays_split_along_explicit_axes(fn, weights, rule):
    """Results are those of one device, and split as those of the program as written."""
    P = jax.sharding.PartitionSpec
    kind = jax.sharding.AxisType.Explicit
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind, kind))
    # Each device has whole blocks: what is added up in another order rounds otherwise.
    w, x = values(2, 64, 64) / 8, values(64, 64)
    mixed = jax.value_and_grad(low(fn, rule, argnums=0))
    expected = jax.jit(mixed)(w, x)

    def placed(x, *spec):
        return jax.device_put(x, jax.sharding.NamedSharding(mesh, P(*spec)))

    if not hasattr(jax, "set_mesh"):
        with jax.sharding.use_mesh(mesh), pytest.warns(AmpWarning, match="JAX 0.7"):
            jax.jit(mixed)(placed(w, *weights), placed(x, "data"))
        return
    with jax.set_mesh(mesh):
        args = placed(w, *weights), placed(x, "data")
        made = jax.jit(mixed)(*args)
        written = jax.jit(jax.value_and_grad(fn))(*args)
        ops = explain(mixed)(*args).now.ops
    assert {op.reads for op in ops if op.flops} == {(rule.name,)}
    for one, other, plain in zip(made, expected, written, strict=True):
        assert error(one, other) < 1e-5
        assert one.sharding.is_equivalent_to(plain.sharding, plain.ndim)


def test_devices_of_a_mesh():
    """Data, tensor and both: results are those of one device."""
    kind = jax.sharding.AxisType.Auto
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind, kind))
    P = jax.sharding.PartitionSpec
    w, x = square(), values(16, 48)
    for rule in (MX, PLAIN_NV):
        fn = jax.jit(jax.value_and_grad(low(network, rule)))
        expected = fn(w, x)
        split = [
            jax.device_put(one, jax.sharding.NamedSharding(mesh, spec))
            for one, spec in zip(
                (*w, x), (P(None, "model"), P("model"), P("data")), strict=True
            )
        ]
        made = fn(tuple(split[:2]), split[2])
        for a, b in zip(*map(jax.tree.leaves, (made, expected)), strict=True):
            assert error(a, b) < 0.02


# What is told, and what may be said.


@both_formats
def test_a_name_and_a_saved_policy(rule):
    named = get_policy(f"{rule.name}_from_mixed_bfloat16")
    assert named == Policy("bfloat16", "float32", rules=quantised(type(rule)()))
    policy = Policy("bfloat16", rules=quantised(rule))
    assert Policy.from_dict(json.loads(json.dumps(policy.to_dict()))) == policy


@both_formats
def test_numerics_and_calibration_know_the_formats(rule):
    w, x = square(), values(16, 48)
    report = trace_numerics(low(network, rule))(w, x)
    assert "largest error" in str(report)
    # The policy is measured as it will run where the format is native.
    found = calibrate(network, [(w, x)], budget=0.9, candidates=(rule.name,))
    assert found.low_share == 1
    own = jax.jit(jax.grad(low(network, type(rule)(where=None, emulate=True))))(w, x)
    exact = jax.jit(jax.grad(network))(w, x)
    assert found.held_out.gradients == pytest.approx(error(own, exact), rel=0.1)


MISTAKES = {
    "a format of other formats": (lambda: mxfp8(grad_dtype="float16"), "grad_dtype"),
    "a rounding of scales": (lambda: mxfp8(scale_rounding="nearest"), "scale_rounding"),
    "float8 of a weight": (lambda: mxfp8(weight_gradient="float8"), "weight_gradient"),
    "a key for a seed": (lambda: nvfp4(seed=jax.random.key(0)), "seed"),
    "a flag": (lambda: nvfp4(rotate="yes"), "rotate"),
    "emulate": (lambda: nvfp4(emulate=1), "emulate"),
    "where": (lambda: nvfp4(where=3), "where"),
}


@pytest.mark.parametrize("make, name", MISTAKES.values(), ids=MISTAKES)
def test_mistakes_name_the_argument(make, name):
    with pytest.raises((TypeError, ValueError), match=f"`{name}`"):
        make()


def test_what_is_left_is_told():
    def fn(w, x):
        x = lax.conv_general_dilated(
            x, w["filter"], (1,), "SAME", dimension_numbers=("NHC", "HIO", "NHC")
        )
        return jnp.sum(x @ w["head"])

    w = {"filter": values(3, 16, 32), "head": values(32, 8)}
    ops = explain(low(fn, MX))(w, values(2, 10, 16)).now.ops
    (why,) = {op.why for op in ops if op.primitive == "conv_general_dilated"}
    assert "a convolution that pads its input" in why
