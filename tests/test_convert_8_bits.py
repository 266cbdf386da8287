"""Weights that a rule reads in 8 bits are stored so, wherever they are read."""

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import export, lax

from benchmarks import inference
from jaxamp_like import AmpError, AmpWarning, amp, convert, load
from jaxamp_like.presets import quantised
from jaxamp_like.rules import float8, int8
from tests.programs import eps, values
from tests.test_convert import BF16, ONE, carried, check, randoms, same_bits

pytestmark = pytest.mark.sample(5)

EIGHT = quantised(int8(weight_only=True, where=None))
INT8 = {"weights alone": EIGHT, "both": quantised(int8(where=None))}


def looped_while_small(p, x):
    step = lambda c: (c[0] + 1, jnp.tanh(c[1] @ p))  # noqa: E731
    return lax.while_loop(lambda c: c[0] < 3, step, (0, x))[1]


def looped_in_slices(p, x):
    """Slices of a stack are read in a while loop in a scan."""
    return lax.scan(lambda x, w: (looped_while_small(w, x), None), x, p)[0]


def picked(p, x):
    branches = [lambda x: x @ p, lambda x: jnp.tanh(x @ p), lambda x: x]
    return lax.switch((x[0] > 0).sum() % 3, branches, x)


EIGHTS = ONE.keys() - {"a branch", "moved", "indexed", "carry"}
WITH_8_BITS = {name: ONE[name] for name in sorted(EIGHTS)}
WITH_8_BITS |= {"while": looped_while_small, "in slices": looped_in_slices}
WITH_8_BITS |= {"switch": picked, "carry": carried}


@pytest.mark.parametrize("case", WITH_8_BITS)
def test_weights_of_the_int8_rule_are_stored_in_8_bits_anywhere(case):
    p, x = randoms((2, 64, 64) if case == "in slices" else (64, 64), (4, 64))
    low = check(WITH_8_BITS[case], p, x, amp_policy=EIGHT)
    # Two readings along different axes are two arrays.
    assert low.summary.share <= (0.54 if case == "branches" else 0.27)
    assert "int8" in {x.dtype.name for x in low.params}


def test_a_derivative_by_inputs_is_refused():
    """Also where nothing but quantised products read them, whose derivative is lost."""
    p, x = randoms((64, 64), (4, 64))
    low = convert(ONE["plain"], p, x, amp_policy=EIGHT, **BF16)
    with pytest.raises(AmpError, match="can't be differentiated"):
        jax.grad(lambda x: low(x).sum())(x)


def test_one_row_and_many_read_the_same_numbers():
    """A prompt and then a token at a time: the weight is stored once."""
    p, x = randoms((256, 48), (4, 256))

    def fn(p, x):
        return x @ p, x[:1] @ p, x[0] @ p, jnp.tensordot(p, x[0], (0, 0))

    low = check(fn, p, x, amp_policy=EIGHT, share=0.27)
    many, *ones = low(x)
    for one in ones:
        # Of the same sums in float32, in another order.
        np.testing.assert_allclose(one.ravel(), many[0], rtol=2**-7, atol=1e-5)
    batch = jax.vmap(lambda x: low(x)[2])(jnp.stack([x, 2 * x]))
    np.testing.assert_allclose(batch, jnp.stack([ones[1], 2 * ones[1]]), rtol=2**-7)


def steered(p, x):
    """Parameters say whether, how often and from where on; one of them is a result."""

    def step(c):
        return c[0] + 1, jnp.tanh(c[1] @ p["w"] + p["start"])

    begin = 0, jnp.broadcast_to(p["start"], x.shape)
    n, y = lax.while_loop(lambda c: c[0] < p["n"], step, begin)
    y = lax.cond(p["flag"], lambda y: y @ p["v"], lambda y: y, x + y)
    return n, y, lax.scan(lambda c, _: (c, p["w"][0]), y, None, length=2)


def test_parameters_that_steer_loops_and_branches():
    w, v, start, x = randoms((64, 64), (64, 64), (64,), (2, 64))
    p = {"w": w, "v": v, "start": start, "n": jnp.array(3), "flag": jnp.array(True)}
    check(steered, p, x, amp_policy=EIGHT, share=0.3)


@pytest.mark.rest
@pytest.mark.parametrize("rule", INT8)
def test_models_with_the_int8_rule(rule):
    """At most 0.27 of float32's, and the bits of `amp`."""
    (x,) = randoms((4, 128))
    options = {"amp_policy": INT8[rule], "share": 0.27}
    linen = nn.Sequential([nn.Dense(128), nn.tanh, nn.Dense(128)])
    check(linen, jax.jit(linen.init)(jax.random.key(0), x), x, **options)
    haiku = hk.transform(lambda x: hk.nets.MLP([128, 128])(x))
    check(haiku, haiku.init(jax.random.key(0), x), None, x, **options)
    equinox = eqx.nn.MLP(128, 128, 128, 1, key=jax.random.key(0))
    check(lambda model, x: jax.vmap(model)(x), equinox, x, **options)
    low = check(nnx.Linear(128, 128, rngs=nnx.Rngs(0)), None, x, **options)
    assert {s.now for s in low.summary.parameters} == {"int8", "float32"}


@pytest.mark.filterwarnings("ignore")
def test_keras_with_the_int8_rule():
    import keras

    model, (x,) = keras.Sequential([keras.layers.Dense(128)]), randoms((4, 128))
    model.build((None, 128))
    check(model, None, x, amp_policy=EIGHT, share=0.27)


@pytest.mark.rest
def test_decoding_with_weights_in_8_bits(tmp_path):
    """The GPT-like model of the benchmark, its layers in a scan, with a cache."""
    c = inference.SIZES["toy"] | {"dim": 128, "vocabulary": 256}
    params = jax.jit(lambda key: inference.init(key, c))(jax.random.key(0))
    fn = inference.styled(inference.tasks(c)["decode, batch 2"], inference.FLOAT32)
    cache = jnp.zeros((2, 2, 32, inference.HEADS, 128 // inference.HEADS), "bfloat16")
    inputs = (cache, cache), jnp.array([3, 4]), jnp.array(5)
    low = check(fn, params, *inputs, amp_policy=EIGHT)
    weights = [s for s in low.summary.parameters if "int8" in s.now or s.folded]
    before = sum(s.bytes_before for s in weights)
    assert sum(s.bytes_now for s in weights) <= 0.27 * before
    assert before > 0.8 * low.summary.bytes_before  # the tables are looked up
    low.save(tmp_path / "a")
    assert same_bits(load(tmp_path / "a")(*inputs), low(*inputs))


def test_8_bits_for_any_number_of_rows(tmp_path):
    rows = jax.ShapeDtypeStruct(export.symbolic_shape("n, 64"), "float32")
    w, x = randoms((64, 64), (3, 64))
    low = convert(ONE["plain"], w, rows, amp_policy="int8_from_mixed_bfloat16")
    assert low.summary.share < 0.27  # any number may be large
    told = pytest.warns(AmpWarning, match="No contraction is quantised")
    with told, pytest.raises(AmpError, match=r"may go by shapes, .*`where=None`"):
        low(x)
    low.save(tmp_path / "a")
    mixed = jax.jit(amp(ONE["plain"], amp_policy=INT8["both"], **BF16))
    assert same_bits(load(tmp_path / "a")(x), mixed(w, x))


@pytest.mark.parametrize("rule", INT8)
def test_8_bits_for_any_number_of_steps(rule):
    def recurrent(w, xs):
        h = jnp.zeros((4, 64))
        return lax.scan(lambda h, x: (jnp.tanh(h @ w + x),) * 2, h, xs)[1]

    steps = jax.ShapeDtypeStruct(export.symbolic_shape("n, 4, 64"), "float32")
    w, xs = randoms((64, 64), (3, 4, 64))
    w = w / 8  # so that steps don't enlarge what differs
    low = convert(recurrent, w, steps, amp_policy=INT8[rule])
    assert low.summary.share < 0.27
    mixed = jax.jit(amp(recurrent, amp_policy=INT8[rule], **BF16))(w, xs)
    atol = 3 * eps("bfloat16")  # a rounding in each step, which XLA may leave out
    np.testing.assert_allclose(low(xs), mixed, atol=atol)


@pytest.mark.filterwarnings("ignore:No parameter of .* is stored in fewer")
def test_tied_arrays_are_stored_once(tmp_path):
    w, x = randoms((64, 64), (4, 64))

    def fn(p, x):
        return jnp.tanh(x @ p["a"]) @ p["b"]

    low = check_tied(fn, {"a": w, "b": w}, x, tmp_path / "low")
    assert low.params["a"] is low.params["b"] and low.summary.bytes_now == w.nbytes / 2
    low = check_tied(fn, {"a": w, "b": w}, x, tmp_path / "eight", amp_policy=EIGHT)
    assert low.summary.share < 0.27
    low = check_tied(fn, {"a": w, "b": w}, x, tmp_path / "kept", keep_inputs=["b"])
    assert low.params["a"] is low.params["b"] and len(low.summary.casts) == 2

    def looked_up(p, x):
        return p["a"][x.argmax(-1)] @ p["b"].T

    for name, options in {"table": {}, "eight table": {"amp_policy": EIGHT}}.items():
        tied = {"a": w, "b": w}
        low = check_tied(looked_up, tied, x, tmp_path / name, **options)
    assert low.summary.share == 1 and low.params["a"] is low.params["b"]
    assert low.summary.parameters[1].why == "the same array as a"


def check_tied(fn, p, x, path, keep_inputs=(), **options):
    options = BF16 | options
    low = convert(fn, p, x, keep_inputs=keep_inputs, **options)
    assert same_bits(low(x), jax.jit(amp(fn, **options))(p, x))
    assert low.summary.bytes_before == p["a"].nbytes
    low.save(path)
    (file,) = path.glob("parameters-*")
    assert 0 < file.stat().st_size - low.summary.bytes_now < 1024
    assert same_bits(load(path)(x), low(x))
    return low


@pytest.mark.rest
@pytest.mark.parametrize(
    "rule",
    [
        int8(where=None),
        int8(where=None, weight_only=True),
        float8(where=None, granularity="row"),
    ],
    ids=repr,
)
def test_inputs_may_have_another_rank_than_the_example(rule):
    """What multiplies a result is stored without the axes that the example has."""
    policy = quantised(rule)
    w, x = values(40, 24), values(9, 40)

    def fn(w, x):
        return jnp.tanh(x @ w)

    mixed = jax.jit(amp(fn, compute_dtype="bfloat16", amp_policy=policy))
    for example in (x, x[0], x[None]):
        low = convert(fn, w, example, compute_dtype="bfloat16", amp_policy=policy)
        for some in (x, x[:1], x[0], x[None], x.reshape(3, 3, 40)):
            np.testing.assert_array_equal(low(some), mixed(w, some))
        np.testing.assert_array_equal(
            jax.vmap(low)(x), jax.vmap(mixed, (None, 0))(w, x)
        )
