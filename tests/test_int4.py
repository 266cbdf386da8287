"""int4 by groups: the numbers, what `convert` stores of them, and what is read."""

from functools import partial

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from jax import export, lax

from benchmarks import curves, inference, roofline
from jaxamp_like import (
    AmpError,
    AmpWarning,
    DynamicScalerState,
    Policy,
    amp,
    convert,
    explain,
    get_policy,
    load,
    trace_numerics,
)
from jaxamp_like._hlo.devices import described
from jaxamp_like._hlo.text import parse
from jaxamp_like._quantised.axes import Axes
from jaxamp_like._quantised.int4 import AsInt4
from jaxamp_like.presets import quantised
from jaxamp_like.rules import int4
from tests import int4_in_numpy as reference
from tests.programs import error, values
from tests.test_block_scaled import arrays, bits
from tests.test_convert import ONE, check, randoms, same_bits

pytestmark = pytest.mark.sample(6)

ROWS = Axes((1,), ((0, 0),))
RULES = {
    "groups of 32": int4(),
    "groups of 64": int4(group_size=64),
    "zero points": int4(zero_point=True),
}
each_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())


def low(fn, rule):
    return amp(fn, compute_dtype="bfloat16", amp_policy=quantised(rule))


# The numbers.


@partial(jax.jit, static_argnums=0)
def rounded(how, x):
    made = how(x)
    return made, made.restored()


def unpacked(packed):
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)


def check_numbers(x, size, zero_point):
    made, restored = rounded(AsInt4(ROWS, size, zero_point), x)
    codes, scales, zeros = reference.int4(x, size, zero_point)
    np.testing.assert_array_equal(bits(made.scales[0]), bits(scales))
    known = ~np.isnan(scales.astype(np.float32))
    packed = unpacked(np.asarray(made.codes[0])).reshape(codes.shape)
    np.testing.assert_array_equal(packed[known], codes[known])
    if zero_point:
        packed = unpacked(np.asarray(made.zero_points[0]))[:, : zeros.shape[1]]
        np.testing.assert_array_equal(packed[known], zeros[known])
    else:
        assert made.zero_points is None
    wanted = reference.restored(codes, scales, zeros, x.shape[1])
    np.testing.assert_array_equal(bits(restored), bits(reference.flushed(wanted)))


@pytest.mark.rest
@settings(max_examples=60, deadline=None)
@given(arrays(most_columns=140), st.sampled_from([32, 64, 128]), st.booleans())
def test_numbers_of_any_magnitude(x, size, zero_point):
    check_numbers(x, size, zero_point)


@pytest.mark.parametrize("zero_point", (False, True))
@pytest.mark.parametrize("size", (32, 64, 128))
def test_numbers_of_weights(size, zero_point):
    rng = np.random.default_rng(size)
    heavy = rng.standard_t(3, (24, 300)) + 0.3 * rng.normal(size=(24, 1))
    check_numbers(heavy.astype(np.float32), size, zero_point)


def test_a_group_that_is_not_finite_is_nan_and_zeros_stay_zeros():
    x = jnp.ones((1, 96)).at[0, 40].set(jnp.inf).at[0, 64:].set(0)
    for zero_point in (False, True):
        _, restored = rounded(AsInt4(ROWS, 32, zero_point), x)
        assert np.isnan(restored[0, 32:64]).all()
        assert (restored[0, 64:] == 0).all()
        np.testing.assert_allclose(restored[0, :32], 1, rtol=2**-8)


def test_zero_points_err_less_where_weights_are_not_about_zero():
    w = jnp.asarray(np.random.default_rng(0).uniform(0, 1, (8, 256)), jnp.float32)
    errors = [
        float(jnp.linalg.norm(rounded(AsInt4(ROWS, 32, zero), w)[1] - w))
        for zero in (False, True)
    ]
    assert errors[1] < 0.6 * errors[0]


# In `amp`.


def dense(p, x):
    return jnp.tanh(x @ p["w"]) @ p["v"]


def dense_args(rows=3):
    w, v, x = randoms((64, 128), (128, 64), (rows, 64))
    return {"w": w / 8, "v": v / 11}, x


def restored_weights(p, rule):
    """The weights that `dense` reads, in float32."""
    how = AsInt4(Axes((0,), ((1, 1),)), rule.group_size, rule.zero_point)
    return {name: rounded(how, w)[1] for name, w in p.items()}


@each_rule
def test_a_product_reads_the_rounded_weight_and_the_other_operand_as_it_is(rule):
    p, x = dense_args()
    plain = amp(dense, compute_dtype="bfloat16")
    np.testing.assert_array_equal(
        jax.jit(low(dense, rule))(p, x), jax.jit(plain)(restored_weights(p, rule), x)
    )


@each_rule
@pytest.mark.filterwarnings("ignore:`int4` rounds a weight to 4 bits that a deriv")
def test_gradients_are_those_of_the_compute_dtype(rule):
    """By the weight of one layer, they don't depend on the weight at all."""

    def loss(w, x):
        return jnp.sum((x @ w) * jnp.arange(128.0))

    p, x = dense_args()
    made = [
        jax.jit(jax.grad(fn))(p["w"], x)
        for fn in (low(loss, rule), amp(loss, compute_dtype="bfloat16"))
    ]
    np.testing.assert_array_equal(*made)


@pytest.mark.rest
@each_rule
def test_examples_of_vmap_are_as_alone(rule):
    p, x = dense_args(4)
    one = low(dense, rule)
    alone = jnp.stack([one(p, x[i : i + 1])[0] for i in range(4)])
    mapped = jax.vmap(one, in_axes=(None, 0))(p, x[:, None])[:, 0]
    np.testing.assert_allclose(mapped, alone, rtol=2**-7, atol=2**-7)
    many = jax.tree.map(lambda w: jnp.stack([w, 2 * w]), p)
    both = jax.vmap(one, in_axes=(0, None))(many, x)
    np.testing.assert_allclose(both[0], one(p, x), rtol=2**-7, atol=2**-7)


def test_a_convolution_reads_groups_of_its_kernel():
    def conv(k, x):
        return lax.conv_general_dilated(x, k, (1, 1), "SAME")

    k, x = randoms((8, 6, 3, 3), (2, 6, 8, 8))
    rule = int4()
    assert "reads weights in int4" in str(
        [one.why for one in explain(low(conv, rule))(k, x).now.ops]
    )
    how = AsInt4(Axes((1, 2, 3), ((0, 1),)), 32, False)
    plain = jax.jit(amp(conv, compute_dtype="bfloat16"))
    np.testing.assert_array_equal(
        jax.jit(low(conv, rule))(k, x), plain(rounded(how, k)[1], x)
    )


@pytest.mark.rest
def test_reports_name_it():
    p, x = dense_args()
    rule = int4(group_size=64, zero_point=True)
    report = explain(low(dense, rule))(p, x)
    whys = {one.why for one in report.now.ops if one.flops}
    assert whys == {
        "reads weights in int4, a scale and a zero point for each 64 numbers of a sum, "
        "and bfloat16; gradients in bfloat16"
    }
    found = trace_numerics(low(dense, rule))(p, x)
    (worst,) = {one.primitive for one in found.ops if one.error > 0.03} - {
        *"dot_general convert_element_type amp_result_8bit reduce_precision".split(),
        *"tanh".split(),
    }
    assert worst == "amp_rounded"
    assert max(one.error for one in found.ops) < 0.2


def test_it_has_a_name_and_is_saved_with_a_policy():
    policy = get_policy("int4_from_mixed_bfloat16")
    assert policy == Policy("bfloat16", "float32", rules=quantised(int4()))
    mine = Policy("bfloat16", "float32", rules=quantised(int4(zero_point=True)))
    assert Policy.from_dict(mine.to_dict()) == mine != policy
    assert repr(int4(group_size=128)) == "int4(group_size=128)"


@pytest.mark.parametrize(
    ("arguments", "told"),
    (
        ({"group_size": 48}, "`group_size` must be one of 32, 64, 128, but got 48"),
        ({"group_size": "32"}, "`group_size` must be one of 32, 64, 128, but got '32'"),
        ({"zero_point": 3}, "`zero_point` must be a bool, but got 3"),
        ({"size": 32}, "group_size"),
        ({"leave": "head"}, "`leave` must be a sequence"),
    ),
)
def test_bad_arguments_are_told(arguments, told):
    with pytest.raises((TypeError, ValueError), match=told):
        int4(**arguments)


def test_sums_of_unknown_length_are_left():
    length = jax.ShapeDtypeStruct(export.symbolic_shape("k, 8"), jnp.float32)
    x = jax.ShapeDtypeStruct((2, length.shape[0]), jnp.float32)
    with pytest.warns(AmpWarning, match="No contraction is quantised"):
        report = explain(low(lambda w, x: x @ w, int4()))(length, x)
    assert any("can't be cut into groups" in one.why for one in report.now.ops)


# In `convert`.


def in_scan(p, x):
    return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, p)[0]


def in_cond(p, x):
    return lax.cond(x[0, 0] > 0, lambda w: x @ w, lambda w: jnp.tanh(x @ w), p)


def in_checkpoint(p, x):
    return jax.checkpoint(lambda w, x: jnp.tanh(x @ w))(p, x)


PLACES = {
    "plain": (ONE["plain"], (64, 64)),
    "scan": (in_scan, (3, 64, 64)),
    "cond": (in_cond, (64, 64)),
    "checkpoint": (in_checkpoint, (64, 64)),
    "jit": (lambda p, x: jax.jit(lambda w: x @ w)(p), (64, 64)),
    "padded": (lambda p, x: x[:, :40] @ p, (40, 64)),
}


@pytest.mark.sample(6)
@each_rule
@pytest.mark.parametrize("rows", (1, 4))
@pytest.mark.parametrize("place", PLACES)
def test_weights_are_stored_in_int4_anywhere(place, rows, rule):
    """With the bits of `amp`, and 0.15 of float32's bytes where groups are whole."""
    fn, shape = PLACES[place]
    p, x = randoms(shape, (rows, 64))
    made = check(fn, p / 8, x, amp_policy=quantised(rule))
    # A sum of 40 takes as much as one of 64.
    assert made.summary.share <= (0.15 if shape[-2] == 64 else 0.15 * 64 / 40)
    readers = 2 if place == "cond" else 1  # of the same arrays
    dtypes = [part.dtype.name for part in made.params]
    assert dtypes == ["uint8", "bfloat16", *["uint8"] * rule.zero_point] * readers
    whys = [row.why for row in made.summary.parameters]
    assert whys[0].startswith("two int4 numbers to a byte, made of ")
    assert whys[1].startswith("scales of int4 numbers, made of ")


@pytest.mark.filterwarnings("ignore:No parameter of .* is stored in fewer")
def test_a_weight_that_others_read_in_full_stays_whole():
    def both(w, x):
        return x @ w + jnp.sum(w * x[0, 0])

    w, x = randoms((64, 64), (4, 64))
    made = convert(both, w, x, amp_policy=quantised(int4()))
    assert made.summary.share == 1


def test_an_artifact_holds_packed_numbers(tmp_path):
    p, x = dense_args()
    rows = jax.ShapeDtypeStruct(export.symbolic_shape("n, 64"), jnp.float32)
    policy = quantised(int4())
    made = convert(dense, p, rows, compute_dtype="bfloat16", amp_policy=policy)
    made.save(tmp_path / "a")
    loaded = load(tmp_path / "a")
    assert same_bits(loaded(x), made(x))
    assert {one.dtype.name for one in loaded.params.values()} == {"uint8", "bfloat16"}
    with pytest.raises(AmpError, match="can't be differentiated"):
        jax.grad(lambda x: made(x).sum())(x)


# A language model.


@pytest.mark.nightly
def test_a_language_model_keeps_its_perplexity_and_loses_its_bytes(tmp_path):
    """The GPT of characters of `benchmarks.curves`, after 300 steps."""
    (task,) = (one for one in curves.TASKS if one.name == "character GPT")
    tx = curves.make_optimiser(300)
    step = curves.make_step(task.loss, "float32", tx)
    params, rng = task.init(jax.random.key(0)), np.random.default_rng(0)
    state = curves.State(params, tx.init(params), DynamicScalerState())
    for _ in range(300):
        state, _ = step(state, task.batch(rng))
    tokens = jnp.stack([task.batch(rng) for _ in range(64)])

    def loss(params, tokens):
        return jnp.mean(lax.map(lambda one: task.loss(params, one), tokens))

    full = float(jax.jit(loss)(state.params, tokens))
    assert full < 2.5  # an even guess among ASCII is 4.85
    made = convert(
        loss,
        state.params,
        tokens,
        compute_dtype="bfloat16",
        amp_policy=quantised(int4()),
    )
    assert np.exp(float(made(tokens)) - full) <= 1.02
    weights = [row for row in made.summary.parameters if row.folded]
    before = sum(row.bytes_before for row in weights)
    assert sum(row.bytes_now for row in weights) <= 0.15 * before
    made.save(tmp_path / "a")
    (file,) = (tmp_path / "a").glob("parameters-*.safetensors")
    # Tables, biases and norms stay as they are; names of arrays take some kilobytes.
    rest = sum(row.bytes_now for row in made.summary.leaves if not row.folded)
    assert file.stat().st_size <= rest + 0.15 * before + 8192


# On a GPU that isn't there.

needs_compiler = pytest.mark.skipif(
    not roofline.has_plugin(), reason="XLA's compiler for NVIDIA GPUs is not installed"
)


def compiled(made, *inputs):
    """The kernels that a converted function runs on an H200."""
    one = jax.sharding.SingleDeviceSharding(described("h200"))
    fn = jax.jit(made.apply, in_shardings=one, out_shardings=one)
    text = fn.lower(made.params, *inputs).compile().as_text()
    return roofline.kernels(parse(text or ""))


@needs_compiler
@each_rule
@pytest.mark.parametrize("shape", ((1024, 4096), (4096, 8192)))
def test_a_single_row_reads_packed_bytes_and_writes_no_weight(shape, rule):
    """Also where the weight is so large that XLA makes a product of matrices."""
    x, w = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((1, shape[0]), shape))
    policy = quantised(rule)
    made = convert(
        lambda w, x: x @ w, w, x, compute_dtype="bfloat16", amp_policy=policy
    )
    packed = sum(part.size * part.dtype.itemsize for part in made.params)
    moved = sum(kernel.bytes * kernel.times for kernel in compiled(made, x))
    # Zero points of large weights are unpacked by a kernel of their own.
    assert moved <= (1.15 if rule.zero_point else 1.05) * packed


@needs_compiler
@pytest.mark.rest
def test_decoding_one_text_reads_packed_bytes():
    """The GPT-like model of `benchmarks.inference`, its layers in a scan."""
    c = inference.SIZES["real"] | {"depth": 4, "batches": (1,)}
    params = jax.eval_shape(lambda key: inference.init(key, c), jax.random.key(0))
    task = inference.tasks(c)["decode, batch 1"]
    fn, inputs = inference.styled(task, inference.FLOAT32), task.inputs("bfloat16")
    made = convert(
        fn, params, *inputs, compute_dtype="bfloat16", amp_policy=quantised(int4())
    )
    rows = [row for row in made.summary.parameters if row.folded]
    packed = sum(row.bytes_now for row in rows)
    assert packed <= 0.15 * sum(row.bytes_before for row in rows)
    kernels = compiled(made, *inputs)
    # A copy of one layer's smallest weight in 16 bits would be 2 MiB.
    readers = [one for one in kernels if "reduce" in one.name and one.bytes > 2**19]
    assert sum(one.bytes * one.times for one in readers) >= packed
    cache = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(inputs[0]))
    table = params["embed"].size * 2  # the cast of the table that rows are taken of
    moved = sum(one.bytes * one.times for one in kernels)
    assert moved <= 1.1 * packed + 3 * cache + 2 * table


@pytest.mark.skipif(not hasattr(jax, "set_mesh"), reason="this JAX has no `set_mesh`")
@pytest.mark.parametrize(
    "spec", ((None, "model"), ("model", None), ("data", "model")), ids=str
)
@each_rule
def test_weights_that_are_split_along_explicit_axes(rule, spec):
    """Results are those of one device, and split as those of the program as written."""
    P, kind = jax.sharding.PartitionSpec, jax.sharding.AxisType.Explicit
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind, kind))

    def fn(out_sharding):
        product = partial(jnp.einsum, "bk,kn->bn", out_sharding=out_sharding)
        return lambda w, x: jnp.tanh(product(x, w))

    w, x = values(256, 64, seed=1) / 16, values(8, 256)
    expected = jax.jit(low(fn(None), rule))(w, x)

    def placed(x, *spec):
        return jax.device_put(x, jax.sharding.NamedSharding(mesh, P(*spec)))

    with jax.set_mesh(mesh):
        args, split = (placed(w, *spec), placed(x)), fn(P(None, spec[1]))
        made, as_written = jax.jit(low(split, rule))(*args), jax.jit(split)(*args)
    assert made.sharding == as_written.sharding
    assert error(made, expected) < 2**-7
    assert error(made, as_written) > 0.01
