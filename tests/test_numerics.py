"""`trace_numerics`: what it runs is the program, what it tells of numbers is true."""

import json
import math
import re
from functools import partial

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import jax.random as jr
import ml_dtypes
import numpy as np
import pytest
from flax import linen
from jax import lax

from jaxamp_like import amp, trace_numerics
from jaxamp_like._dtypes import holds
from jaxamp_like._reports.call import flat_call
from jaxamp_like._reports.numerics import compiled, statistics
from jaxamp_like._reports.numerics.blocks import PART
from jaxamp_like._reports.numerics.compiled import OPTIONS, Memory
from jaxamp_like._reports.numerics.interpret import Interpreter
from jaxamp_like._reports.numerics.pairs import Pair
from jaxamp_like._rewrite.record import Recorder

from .constructs import CONSTRUCTS, identity, is_float
from .following import FOLLOWING

MEASURE = jax.jit(statistics.measure)


@pytest.fixture(autouse=True)
def quick_compilation(monkeypatch):
    """Most of a test's time is the compiler's."""
    monkeypatch.setitem(OPTIONS, "xla_backend_optimization_level", 0)


# The interpreter: it runs the rewritten program, and beside it the one as written.


def run_pairs(fn, *args):
    recorder = Recorder()
    call = flat_call(fn, args, {}, (), "fn")
    interpreter = Interpreter(recorder.steps, lambda eqn, at: None)
    jaxpr = call.trace(recorder)
    pairs, _ = interpreter.run(jaxpr, [Pair(x) for x in call.arrays])
    return pairs


def arrays(tree):
    return [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]


def assert_near(actual, expected, tolerance):
    if not jnp.issubdtype(actual.dtype, jnp.number):
        return
    assert actual.dtype == expected.dtype
    a, b = (np.asarray(x, np.complex128) for x in (actual, expected))
    np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * abs(b).max())


def gradient(fn, argnums):
    def total(*args):
        floats = [x for x in jax.tree.leaves(fn(*args)) if is_float(x)]
        return sum(jnp.sum(jnp.sin(x.astype(jnp.float32))) for x in floats)

    return jax.grad(total, argnums)


# One of each kind; the others are built of the same primitives.
BOTH_PASSES = (
    "scan_of_length_zero", "scan", "cond", "remat_dots_saveable",
    "custom_jvp", "custom_vjp_in_scan", "linear", "embedding",
)  # fmt: skip
FORWARD = (
    "precision_highest", "while_loop", 
    "shard_map_remat_scan", "pure_callback", "pallas", "custom_reduction",
    "mixed_arguments", "custom_vmap_batched",
)  # fmt: skip
BY_NAME = {construct.name: construct for construct in CONSTRUCTS}


@pytest.fixture
def recycling(monkeypatch):
    """Every array that nothing reads any more is written over, however small."""
    forget = compiled._of_types.cache_clear
    forget()
    monkeypatch.setattr(compiled, "_LARGE", 0)
    yield
    forget()


@pytest.mark.sample(12)
@pytest.mark.parametrize("name", (*BOTH_PASSES, *FORWARD))
def test_it_runs_the_program_beside_the_one_as_written(name, recycling):
    construct = BY_NAME[name]
    written = construct.build(identity)
    low = amp(written)
    if name in BOTH_PASSES:
        argnums = construct.argnums()
        low, written = gradient(low, argnums), gradient(written, argnums)
    pairs = run_pairs(low, *construct.args())
    results = arrays(low(*construct.args())), arrays(written(*construct.args()))
    for pair, now, then in zip(pairs, *results, strict=True):
        # Compiled one by one or as a whole: what is fused may skip a rounding.
        assert_near(pair.run, now, 2e-3)
        assert_near(pair.exact, then, 1e-5)


def test_no_argument_nor_constant_is_written_over(recycling):
    table = jnp.arange(12.0).reshape(3, 4)

    def body(carry, x):
        carry = jnp.sin(carry) + x
        return carry, (carry, carry * 2.0, x)

    def fn(x, y):
        last, (carries, doubled, same) = jax.lax.scan(body, x[0], x)
        z = jax.jit(lambda a: (jnp.exp(a), a, a))(y + table)
        return last, carries, doubled, same, *z, x, -y, y, jax.jit(jnp.tanh)(y) + y

    args = [jnp.linspace(0.0, 1.0, 12).reshape(3, 4) + i for i in range(2)]
    before = [np.array(x) for x in (*args, table)]
    expected = fn(*args)
    for _ in range(2):
        pairs = run_pairs(fn, *args)
        for pair, then in zip(pairs, expected, strict=True):
            np.testing.assert_allclose(np.asarray(pair.run), then, rtol=1e-6)
    for x, then in zip((*args, table), before, strict=True):
        assert (np.asarray(x) == then).all()


def test_what_nothing_reads_is_written_over(recycling):
    memory, x = Memory(), jnp.ones((4, 4))
    double = compiled.Compiled(lambda x: x * 2.0, x)
    first = double(memory, x)
    memory.hold([first])
    place = first.unsafe_buffer_pointer()
    second = double(memory, first, dying=[first])  # in place
    assert first.is_deleted() and second.unsafe_buffer_pointer() == place
    memory.hold([second, second])
    third = double(memory, second, dying=[second])  # it has another reader
    assert not second.is_deleted() and (third == 8 * x).all()
    memory.release([second, second])
    assert double(memory, third).unsafe_buffer_pointer() == place
    assert not x.is_deleted()


def test_equal_equations_share_code_and_others_do_not():
    def fn(x, y):
        return x * x, x * y, x * 2.0, x * 3.0, y * x

    x, y = jnp.arange(1.0, 4.0), jnp.arange(4.0, 7.0)
    values = [np.asarray(pair.run) for pair in run_pairs(fn, x, y)]
    for value, expected in zip(values, fn(x, y), strict=True):
        assert (value == expected).all()


# Statistics, against NumPy.


# Few shapes: each is compiled.
SHAPES = st.sampled_from(((), (0,), (7,), (3, 5)))
FLOATS = st.floats(width=32, allow_subnormal=False)


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(hnp.arrays(np.float32, SHAPES, elements=FLOATS))
def test_rows_and_histograms(x):
    row, codes, _ = MEASURE(jnp.asarray(x), None)
    row = statistics.Statistics(*np.asarray(row))
    a = np.abs(x)
    good = a[np.isfinite(a)]
    assert row.largest == max(good, default=0)
    assert row.smallest == min(good[good > 0], default=np.inf)
    assert row.nonfinite == pytest.approx(np.mean(~np.isfinite(x)) if x.size else 0)
    assert row.nan == pytest.approx(np.mean(np.isnan(x)) if x.size else 0)
    counts = np.asarray(statistics.histograms([codes])[0])
    assert counts.sum() == max(x.size, 1)
    edges = statistics.bin_edges()
    for value in good[good > 0]:
        (inside,) = np.nonzero((edges <= value) & (value < np.roll(edges, -1)))
        assert counts[inside].sum() >= 1


@pytest.mark.sample(4)
@pytest.mark.parametrize("size", (255, 256, 700, 256 * 70 + 3))
@pytest.mark.parametrize("dtype", ("bfloat16", "float16", "float32", "float8_e5m2"))
def test_rows_by_chunks_are_those_of_the_whole(dtype, size):
    exact = np.random.default_rng(size).normal(size=size).astype(np.float32)
    exact *= np.geomspace(1e-9, 1e9, size, dtype=np.float32)
    exact[::7], exact[3::50], exact[5::90] = 0, np.inf, np.nan
    run = (1.01 * jnp.asarray(exact)).astype(dtype).at[::11].set(0)
    for true in (None, jnp.asarray(exact)):
        whole, codes, _ = MEASURE(run, true)
        parts, same, _ = jax.jit(partial(statistics.measure, chunk=256))(run, true)
        assert (codes == same).all()
        row = statistics.Statistics(*np.asarray(parts))
        assert row.nonfinite > row.nan > 0 and row.largest > row.smallest > 0
        assert row == pytest.approx(statistics.Statistics(*np.asarray(whole)), rel=1e-5)


@pytest.mark.parametrize("name", statistics.FORMATS)
def test_limits_are_where_rounding_loses_a_number(name):
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    most, least = statistics.limits(name)
    edges = np.asarray([0.99 * most, 1.01 * most, 1.01 * least, 0.99 * least])
    with np.errstate(over="ignore"):
        large, beyond, small, below = edges.astype(dtype).astype(np.float64)
    assert np.isfinite(large) and not np.isfinite(beyond)
    assert small > 0 and below == 0


def test_a_sample_sees_every_column():
    x = jnp.broadcast_to(2.0 ** jnp.arange(8), (2**15, 8))
    _, codes, _ = statistics.measure(x, None)
    assert codes.size <= statistics.SAMPLE
    counts = np.asarray(statistics.histograms([codes])[0])
    assert np.allclose(counts[counts > 0], codes.size / 8, rtol=0.01)


def test_ranges_shares_and_errors():
    def fn(x):
        return x * 3.0

    x = jnp.asarray([1e-9, 1.0, 100.0, 1e5])
    (op,) = trace_numerics(fn, amp_policy={})(x).ops
    assert (op.primitive, op.dtype, op.written) == ("mul", "float32", "float32")
    assert op.largest == pytest.approx(3e5) and op.smallest == pytest.approx(3e-9)
    assert op.overflow["float16"] == 0.25 and op.underflow["float16"] == 0.25
    assert op.overflow["bfloat16"] == 0 and op.underflow["bfloat16"] == 0
    assert op.overflow["float8_e4m3fn"] == 0.25
    assert op.histogram == {-29: 0.25, 1: 0.25, 8: 0.25, 18: 0.25}
    assert (op.error, op.lost, op.nonfinite) == (0, 0, 0)


@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
def test_the_error_is_that_of_the_format(dtype, getkey):
    w, x = jr.normal(getkey(), (32, 32)), jr.normal(getkey(), (8, 32))
    report = trace_numerics(lambda w, x: x @ w, compute_dtype=dtype)(w, x)
    dot = next(op for op in report.ops if op.primitive == "dot_general")
    assert (dot.dtype, dot.written) == (dtype, "float32")
    exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
    actual = np.asarray(amp(jnp.matmul, compute_dtype=dtype)(x, w), np.float64)
    expected = abs(actual - exact).sum() / abs(exact).sum()
    assert dot.error == pytest.approx(expected, rel=0.02)


def test_a_rounded_literal_is_an_error_too():
    def fn(w, x):
        return jnp.sum(jnp.tanh(0.1 * (x @ w)) @ w)

    ones = jnp.ones((4, 4))
    options = {"compute_dtype": "bfloat16", "amp_policy": FOLLOWING}
    report = trace_numerics(fn, **options)(ones, ones)
    (scaled,) = (op for op in report.ops if op.primitive == "mul")
    expected = abs(float(jnp.bfloat16(0.1)) / 0.1 - 1)
    assert scaled.dtype == "bfloat16"
    assert scaled.error == pytest.approx(expected, rel=0.01)


@pytest.mark.rest
def test_a_sum_that_is_nothing_but_rounding_is_not_blamed(getkey):
    def fn(w, x, bias):
        x = x @ w
        scores = jax.nn.softmax(x[:, None] * x + bias)  # which no bias changes
        return jnp.sum(jnp.sin(scores @ x))

    def step(w, x, bias):
        grad = jax.grad(amp(fn, compute_dtype="bfloat16"), argnums=2)(w, x, bias)
        return grad / jnp.sqrt(grad**2 + 1e-30)

    w, x = jr.normal(getkey(), (8, 8)), jr.normal(getkey(), (8, 8))
    with jax.numpy_rank_promotion("allow"):
        report = trace_numerics(step)(w, x[0], jnp.zeros((8, 1)))
    by_name = {(op.primitive, op.place.phase): op for op in report.ops}
    total = by_name["reduce_sum", "backward"]
    assert total.written_largest < 1e-6 and total.error < 0.1
    after = by_name["sqrt", "forward"]
    assert after.read_error > 0.5 and after in report.worst(1000)[-5:]
    assert report.worst(1)[0].error < 0.5


def test_scopes_hold_what_is_in_them():
    def fn(x):
        with jax.named_scope("outer"):
            with jax.named_scope("inner"):
                x = x * 1e5
            return x * 1e-10

    report = trace_numerics(fn, amp_policy={})(jnp.ones(3))
    scopes = {one.scope: one for one in report.by_scope()}
    assert list(scopes) == ["", "outer", "outer/inner"]
    assert [one.ops for one in scopes.values()] == [2, 2, 1]
    assert scopes["outer"].overflow["float16"] == 1.0
    assert scopes["outer/inner"].smallest == pytest.approx(1e5)
    assert scopes[""].smallest == pytest.approx(1e-5)


def test_tables_of_many_equations_are_made_in_parts():
    def chain(x):
        for i in range(3 * PART // 2):
            x = x * 2.0 if i % 2 else x + 1.0
        return x

    def looped(x):
        return lax.scan(lambda x, _: (chain(x) * 1e-30, None), x, None, length=2)[0]

    expected, x = [], np.float32(1)
    for i in range(3 * PART // 2):
        x = x * np.float32(2) if i % 2 else x + np.float32(1)
        expected.append(float(x))
    report = trace_numerics(chain, amp_policy={})(jnp.ones(3))
    assert [op.largest for op in report.ops] == expected
    report = trace_numerics(looped, amp_policy={})(jnp.ones(3))
    assert [op.largest for op in report.ops[:-1]] == expected
    assert {op.runs for op in report.ops} == {2}


# Loops.


@pytest.mark.rest
@pytest.mark.sample(2)
@pytest.mark.parametrize("reverse", (False, True))
@pytest.mark.parametrize("length", (6, 40_000))  # one by one, and compiled as a whole
def test_iterations_are_told_as_one_with_the_worst(reverse, length):
    def fn(xs):
        def body(carry, x):
            return carry, x * x

        return lax.scan(body, 0.0, xs, reverse=reverse)[1]

    xs = jnp.ones(length).at[2].set(1e3).at[4].set(1e4)
    report = trace_numerics(amp(fn, amp_policy={"amp_default": "float16"}))(xs)
    (square,) = (op for op in report.ops if op.primitive == "mul")
    assert square.runs == length
    assert square.nonfinite == pytest.approx(2 / length)
    first = 4 if reverse else 2  # the first to run
    assert square.made_nonfinite.iteration == (first,)
    assert square.made_nonfinite.inputs[0].largest == xs[first]
    assert report.first_nonfinite is square
    assert math.isinf(square.error) and square.worst == (first,)


def test_a_while_loop_counts_its_iterations():
    def fn(x):
        return lax.while_loop(lambda x: x < 1e5, lambda x: x * 10.0, x)

    report = trace_numerics(fn, amp_policy={})(jnp.float32(1))
    (op,) = (op for op in report.ops if op.primitive == "mul")
    assert (op.runs, op.largest, op.place.inside) == (5, 1e5, ("while",))


def test_a_cast_between_dtypes_of_one_width_may_overflow():
    def fn(x, w):
        with jax.named_scope("wide"):
            y = x * 1e3
        with jax.named_scope("narrow"):
            return y @ w

    policy = {"wide": "bfloat16", "narrow": "float16"}
    x, w = jnp.full((4, 4), 1e3), jnp.full((4, 4), 1e-6)
    culprit = trace_numerics(fn, amp_policy=policy)(x, w).first_nonfinite
    assert (culprit.primitive, culprit.dtype) == ("convert_element_type", "float16")
    assert culprit.nonfinite == 1 and culprit.made_nonfinite.inputs[0].largest > 9e5


@pytest.mark.parametrize(
    ("wide", "narrow"),
    (
        ("float32", "bfloat16"),
        ("float32", "float16"),
        ("float16", "float8_e5m2"),
        ("bfloat16", "float8_e4m3fn"),
    ),
)
def test_a_dtype_holds_what_it_has_range_and_digits_for(wide, narrow):
    wide, narrow = jnp.dtype(wide), jnp.dtype(narrow)
    assert holds(wide, narrow) and holds(wide, wide) and not holds(narrow, wide)
    half, brain = jnp.dtype("float16"), jnp.dtype("bfloat16")
    assert not holds(half, brain) and not holds(brain, half)


def test_only_the_branch_that_was_taken_is_measured():
    def fn(i, x):
        return lax.cond(i > 0, lambda x: jnp.sin(x), lambda x: jnp.cos(x), x)

    one = trace_numerics(fn, amp_policy={})(1, jnp.ones(3))
    assert [op.primitive for op in one.ops if op.runs] == ["sin"]

    def mapped(xs):
        return lax.map(lambda x: fn(x, x), xs)

    each = trace_numerics(mapped, amp_policy={})(jnp.asarray([1.0, 2.0, -1.0]))
    runs = {op.primitive: op.runs for op in each.ops if op.primitive in ("sin", "cos")}
    assert runs == {"sin": 2, "cos": 1}


# Faults planted in a model that was not written here: Flax's attention, in a block of
# our own so that it can be scanned, under remat.


class Block(linen.Module):
    @linen.compact
    def __call__(self, x, gain):
        attention = linen.MultiHeadDotProductAttention(num_heads=2, name="attention")
        x = x + attention(linen.LayerNorm()(x) * gain)
        return x + linen.Dense(16, name="mlp")(linen.LayerNorm()(x)), None


class Net(linen.Module):
    @linen.compact
    def __call__(self, x, gains):
        layers = linen.scan(
            linen.remat(Block, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=3,
        )
        return layers(name="layers")(x, gains)[0]


@pytest.fixture(scope="module")
def net():
    model, x = Net(), jr.normal(jr.key(0), (2, 6, 16))
    params = jax.jit(model.init)(jr.key(1), x, jnp.ones(3))

    def loss(params, x, scale=1.0):
        with jax.numpy_rank_promotion("allow"):
            out = model.apply(params, x, jnp.ones(3))
        return scale * jnp.mean(out**2)

    return loss, params, x


def planted(params, layer, **factors):
    """The parameters, with the kernels of one attention layer scaled."""
    attention = dict(params["params"]["layers"]["attention"])
    for name, factor in factors.items():
        kernel = attention[name]["kernel"].at[layer].multiply(factor)
        attention[name] = attention[name] | {"kernel": kernel}
    layers = params["params"]["layers"] | {"attention": attention}
    return {"params": {"layers": layers}}


@pytest.mark.rest
@pytest.mark.parametrize("backward", (True, False), ids=("gradient", "forward"))
def test_an_overflow_in_one_attention_layer_is_found(net, backward):
    loss, params, x = net
    low = amp(loss)
    fn = jax.grad(low) if backward else low
    # Queries and keys fit float16 one by one, and their products do not.
    report = trace_numerics(fn)(planted(params, 1, query=300.0, key=300.0), x)
    culprit = report.first_nonfinite
    assert culprit.primitive == "dot_general"
    assert culprit.place.scope == "Net/layers/attention"
    assert culprit.place.phase == "forward"
    assert "attention.py:" in culprit.place.source
    assert "dot_product_attention_weights" in culprit.place.source
    assert culprit.made_nonfinite.iteration == (1,)
    query, key = culprit.made_nonfinite.inputs
    assert max(query.largest, key.largest) < 65504 < query.largest * key.largest
    assert not culprit.nonfinite_as_written
    assert "first inf or NaN: dot_general in Net/layers/attention" in str(report)


@pytest.mark.rest
def test_an_overflow_in_the_backward_pass_is_found(net):
    loss, params, x = net
    report = trace_numerics(jax.grad(amp(loss)))(params, x, 2.0**26)
    culprit = report.first_nonfinite
    assert culprit.place.phase == "backward"
    assert culprit.made_nonfinite.inputs[0].largest > 65504
    assert (culprit.primitive, culprit.dtype) == ("convert_element_type", "float16")
    assert culprit.place.scope.startswith("Net/layers")
    assert culprit.made_nonfinite.iteration == (2,)  # the first to be differentiated
    assert trace_numerics(amp(loss))(params, x, 2.0**26).first_nonfinite is None


@pytest.mark.rest
def test_an_underflow_in_one_gradient_is_found(net):
    loss, params, x = net
    gradient = jax.grad(amp(loss))
    assert trace_numerics(gradient)(params, x).underflows(0.3) == []
    # Small weights after the attention of layer 0, which float16 can still hold: what
    # comes back through them is too small for it.
    report = trace_numerics(gradient)(planted(params, 0, out=3e-6), x)
    culprit = report.underflows(0.3)[0]
    assert culprit.place.phase == "backward"
    assert culprit.place.scope == "Net/layers/attention"
    # Of the scores, held as the product made them; a maximum reads them first.
    assert (culprit.primitive, culprit.author) == ("convert_element_type", "reduce_max")
    assert (culprit.dtype, culprit.written) == ("float16", "float32")
    assert "attention.py:" in culprit.place.source
    assert "dot_product_attention_weights" in culprit.place.source
    assert culprit.vanished_event.iteration == (0,)
    assert 0 < culprit.vanished_event.inputs[0].largest < 6.1e-5
    assert "worst underflow" in str(report)


# The same in the attention of Equinox and Haiku, as they are, the program being lean.


def equinox_layers():
    import equinox as eqx

    keys = jr.split(jr.key(0), 3)
    attention = eqx.filter_vmap(lambda k: eqx.nn.MultiheadAttention(2, 8, key=k))(keys)
    params, static = eqx.partition(attention, eqx.is_array)

    def loss(params, x):
        @jax.checkpoint
        def layer(x, params):
            return x + eqx.combine(params, static)(x, x, x), None

        return jnp.mean(lax.scan(layer, x, params)[0] ** 2)

    def scaled(params, layer, name, factor):
        def weight(params):
            return getattr(params, name).weight

        scaled = weight(params).at[layer].multiply(factor)
        return eqx.tree_at(weight, params, scaled)

    names = ("query_proj", "key_proj", "output_proj")
    return loss, params, scaled, names, "eqx.nn.MultiheadAttention", "_attention.py"


def haiku_layers():
    import haiku as hk

    init = hk.initializers.VarianceScaling(1.0)

    @hk.without_apply_rng
    @hk.transform
    def net(x):
        @hk.experimental.layer_stack(3)
        def layers(x):
            attention = hk.MultiHeadAttention(2, 4, w_init=init, model_size=8)
            return x + hk.remat(attention)(x, x, x)

        return layers(x)

    def loss(params, x):
        return jnp.mean(net.apply(params, x) ** 2)

    def scaled(params, layer, name, factor):
        (path,) = (path for path in params if path.endswith(name))
        w = params[path]["w"].at[layer].multiply(factor)
        return params | {path: params[path] | {"w": w}}

    params = net.init(jr.key(0), jnp.ones((6, 8)))
    names = ("query", "key", "linear")
    return loss, params, scaled, names, "multi_head_attention", "attention.py"


@pytest.mark.rest
@pytest.mark.parametrize("layers", (equinox_layers, haiku_layers))
def test_faults_in_attention_of_other_libraries(layers):
    with jax.numpy_rank_promotion("allow"):
        loss, params, scaled, (query, key, out), scope, file = layers()
        x = jr.normal(jr.key(2), (6, 8))
        low = amp(loss, lean=True)
        hot = scaled(scaled(params, 1, query, 500.0), 1, key, 500.0)
        faint = scaled(params, 0, out, 3e-6)
        forward = trace_numerics(low)(hot, x)
        backward = trace_numerics(jax.grad(low))(hot, x)
        underflow = trace_numerics(jax.grad(low))(faint, x)
    for culprit in (forward.first_nonfinite, backward.first_nonfinite):
        assert culprit.primitive == "dot_general"
        assert (culprit.place.scope, culprit.place.phase) == (scope, "forward")
        assert re.search(rf"/{file}:\d+", culprit.place.source)
        assert culprit.made_nonfinite.iteration == (1,)
    assert forward.underflows(0.3) == []
    culprit, *_ = underflow.underflows(0.3)
    assert (culprit.place.scope, culprit.place.phase) == (scope, "backward")
    assert (culprit.dtype, culprit.written) == ("float16", "float32")
    assert re.search(rf"/{file}:\d+", culprit.place.source)
    assert culprit.vanished_event.iteration == (0,)


def test_the_authors_own_infinity_is_not_blamed_on_precision():
    def fn(w, x):
        masked = jnp.log(jnp.zeros(3))
        with jax.named_scope("ours"):
            return masked, 1e3 * (x @ w)

    w, x = jnp.full((4, 3), 99.0), jnp.ones((2, 4))
    report = trace_numerics(fn, amp_policy={"ours": "float16"})(w, x)
    assert report.first_nonfinite.place.scope == "ours"
    alone = trace_numerics(fn, amp_policy={})(w, x)
    assert alone.first_nonfinite.primitive == "log"
    assert "(in the author's dtypes too)" in str(alone)


def test_infinities_that_are_given_are_not_kept_quiet():
    def fn(w, x):
        return jnp.sum(2.0 * x @ w["w"])

    w, x = {"w": jnp.ones((3, 3))}, jnp.ones((2, 3)).at[0, 0].set(jnp.nan)
    report = trace_numerics(amp(fn))(w, x=x)
    assert report.first_nonfinite is None
    assert report.nonfinite_arguments == ("['x']",)
    assert "(but there are some in the arguments: ['x'])" in str(report)
    report = trace_numerics(amp(fn))({"w": w["w"] * jnp.inf}, jnp.ones((2, 3)))
    assert report.nonfinite_arguments == ("[0]['w']",)


def test_a_mask_of_infinities_is_not_told(getkey):
    def fn(w, x):
        scores = x @ w
        mask = jnp.tril(jnp.ones(scores.shape, bool))
        return jnp.sum(jax.nn.softmax(jnp.where(mask, scores, -jnp.inf)))

    w, x = jr.normal(getkey(), (4, 4)), jr.normal(getkey(), (4, 4))
    report = trace_numerics(jax.grad(amp(fn)))(w, x)
    assert report.first_nonfinite is None and "arguments" not in str(report)


def test_zeros_among_the_operands_are_told():
    report = trace_numerics(lambda x, y: x / y, amp_policy={})(
        jnp.ones(4), jnp.asarray([0.0, 1.0, 2.0, 0.0])
    )
    one, other = report.first_nonfinite.made_nonfinite.inputs
    assert (one.zero, other.zero) == (0.0, 0.5)
    assert str(other) == "float32[4] in [1, 2], 50 % zero"


def test_an_empty_operand_has_no_zeros():
    def fn(x):
        return jnp.log(jnp.sum(x))

    (log,) = (op for op in trace_numerics(fn)(jnp.zeros((2, 0))).ops[1:])
    assert str(log.made_nonfinite.inputs[0]) == "float32[] in [0, 0], 100 % zero"
    (summed, _) = trace_numerics(fn)(jnp.zeros((2, 0))).ops
    assert (summed.nonfinite, summed.largest) == (0.0, 0.0)


def test_lean_programs_are_run_as_they_are():
    def fn(w, x):
        with jax.named_scope("head"):
            return jnp.sum(jnp.exp(jnp.tanh(x @ w) @ w))

    w, x = jnp.full((4, 4), 30.0), jnp.ones((2, 4))
    report = trace_numerics(jax.grad(amp(fn, lean=True)))(w, x)
    assert report.settings == ("compute_dtype=float16, lean",)
    assert "recomputed" in {op.place.phase for op in report.ops}
    given = trace_numerics(fn, lean=True)(w, x)
    assert given.settings == report.settings
    for one in (report, given):
        assert (one.first_nonfinite.primitive, one.first_nonfinite.place.scope) == (
            "exp",
            "head",
        )


# Bad input, and views.


def test_it_needs_arrays_with_values():
    with pytest.raises(TypeError, match=r"outside of `jax\.jit`"):
        jax.jit(trace_numerics(jnp.sin))(1.0 + jnp.zeros(2))
    with pytest.raises(TypeError, match="`explain` takes shapes"):
        trace_numerics(jnp.sin)(jax.ShapeDtypeStruct((2,), jnp.float32))


def test_mutable_arrays_are_refused():
    references = BY_NAME["references"]
    with pytest.raises(NotImplementedError, match="can't follow mutable arrays"):
        trace_numerics(references.build(identity))(*references.args())


def test_an_empty_function():
    report = trace_numerics(lambda: None)()
    assert report.ops == () and "makes no floats" in str(report)
    report.print()
    assert json.loads(report.to_json())["ops"] == []


def test_effects_happen_once():
    seen = []

    def fn(w, x):
        jax.debug.callback(lambda x: seen.append(x.dtype.name), x @ w)

    ones = jnp.ones((4, 4))
    trace_numerics(fn, compute_dtype="bfloat16")(ones, ones)
    jax.effects_barrier()
    assert seen == ["float32"]


def test_views(capsys):
    def fn(w, x):
        with jax.named_scope("head"):
            return 1e3 * (x @ w)

    w, x = jnp.full((4, 3), 99.0), jnp.ones((2, 4))
    report = trace_numerics(fn, amp_policy={"head": "float16"}, progress=True)(w, x)
    assert "Running" not in capsys.readouterr().out
    report.print()
    out = capsys.readouterr().out
    assert "first inf or NaN: mul in head, forward" in out and "Largest errors" in out
    data = json.loads(report.to_json())
    assert {op["error"] for op in data["ops"]} >= {"inf"}
    assert "first inf or NaN" in report._repr_html_()
