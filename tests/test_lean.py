"""Regions: what the backward pass keeps, and that nothing else changes.

The default policy has them by itself, others by `amp(fn, lean=True)`."""

import itertools

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax import export, lax
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun
from jax.sharding import AxisType, PartitionSpec as P

from benchmarks import measure
from benchmarks.rewrite import AS_WRITTEN
from benchmarks.workloads import WORKLOADS
from jaxamp_like import amp
from jaxamp_like._jax import raw, to_classic
from tests.programs import error

from .following import FOLLOWING

pytestmark = pytest.mark.sample(5)

BF16 = "bfloat16"
REGIONS = ("checkpoint", "remat2", "custom_jvp_call")  # this one keeps its inputs low
every_workload = pytest.mark.parametrize("name", WORKLOADS)


def default(fn, dtype=BF16):
    return amp(fn, compute_dtype=dtype)


def asked_for(fn, dtype=BF16):
    return amp(fn, compute_dtype=dtype, amp_policy=FOLLOWING, lean=True)


def lean_default(fn, dtype=BF16):
    return amp(fn, compute_dtype=dtype, lean=True)


@pytest.fixture(params=(default, asked_for, lean_default))
def lean(request):
    return request.param


def quick(fn):
    """Compiled without optimisation, which takes most of a test's time."""
    return jax.jit(fn, compiler_options={"xla_backend_optimization_level": 0})


def regions(fn, *args):
    """The regions of a program: what is run again as a whole, without contractions."""

    def find(jaxpr):
        for eqn in jaxpr.eqns:
            subs = [getattr(sub, "jaxpr", sub) for sub in measure.subjaxprs(eqn.params)]
            inside = [e.primitive.name for sub in subs for e, _ in measure.walk(sub)]
            # One that holds nothing stands for a rounding of its cotangent.
            if eqn.primitive.name in REGIONS and inside and "dot_general" not in inside:
                yield eqn, inside
            else:
                for sub in subs:
                    yield from find(sub)

    return list(find(raw(to_classic(jax.make_jaxpr(fn)(*args)))))


def kept(fn, *args):
    avals = measure.saved(fn, *args)
    return sorted((aval.dtype.name, aval.shape) for aval in avals)


W, X = jnp.ones((8, 8)) / 8, jnp.linspace(-1, 1, 32).reshape(4, 8)
LOW = (BF16, (4, 8))


def test_a_region_is_low_at_its_borders(lean):
    def fn(w, x):
        return jnp.sum(jax.nn.softmax(x @ w) @ w)

    ((eqn, inside),) = regions(lean(fn), W, X)
    assert "exp" in inside and "div" in inside
    assert [v.aval.dtype for v in eqn.invars] == [jnp.bfloat16]
    assert [v.aval.dtype for v in eqn.outvars] == [jnp.bfloat16]
    # The scores, the weights and the operand of the first product's weight gradient.
    assert kept(lean(fn), W, X) == [LOW] * 2
    following = amp(fn, compute_dtype=BF16, amp_policy=FOLLOWING)
    assert len(kept(following, W, X)) > 2


@pytest.mark.parametrize("function", (jnp.abs, lambda y: jnp.maximum(y, 0.5)))
def test_a_choice_alone_is_no_region(function, lean):
    """Its argument is no cheaper to keep than what it keeps by itself."""

    def fn(w, x):
        return jnp.sum(function(x @ w) @ w)

    assert regions(lean(fn), W, X) == []


def test_one_function_that_is_computed_low_is_no_region():
    def fn(w, x):
        return jnp.sum(jnp.tanh(x @ w) @ w)

    assert regions(asked_for(fn), W, X) == []


def test_linear_steps_lead_to_a_region(lean):
    def fn(w, b, x):
        y = x @ w
        z = y + (y @ w + b)  # a residual and a bias: only their sum is kept
        return jnp.sum(jax.nn.gelu(z) @ w)

    ((_, inside),) = regions(lean(fn), W, W[0], X)
    assert "tanh" in inside and "dot_general" not in inside
    # y is the operand of a product; z and gelu(z).
    assert kept(lean(fn), W, W[0], X) == [LOW] * 3


def test_a_region_makes_its_mask(lean):
    def fn(w, x):
        scores = x @ w
        causal = jnp.tril(jnp.ones(scores.shape, bool))
        return jnp.sum(jax.nn.softmax(jnp.where(causal, scores, -1e9)) @ w)

    ((_, inside),) = regions(lean(fn), W, X)
    assert "iota" in inside
    assert kept(lean(fn), W, X) == [LOW] * 2


def test_random_numbers_are_drawn_once(lean):
    def fn(w, x, key):
        mask = jr.bernoulli(key, 0.5, x.shape)
        return jnp.sum(jax.nn.softmax(jnp.where(mask, x @ w, 0)) @ w)

    grad = jax.make_jaxpr(jax.grad(lean(fn)))(W, X, jr.key(0))
    drawn = [e.primitive.name for e, _ in measure.walk(grad)]
    assert drawn.count("random_bits") == 1


def test_what_is_read_in_full_enters_in_full(lean):
    def fn(w, x):
        y = jnp.cumsum(x @ w, axis=0)  # float32, and costly
        return jnp.sum(jnp.exp(y) * jnp.sin(y @ w))

    ((eqn, _),) = regions(lean(fn), W, X)
    assert {v.aval.dtype.name for v in eqn.invars} == {"float32", BF16}


def test_what_is_as_its_author_wrote_it_stays_so(lean):
    def fn(w, x):
        y = jnp.cumsum(x @ w, axis=0)
        return jnp.sum(jnp.exp(y) * jnp.sin(y) + jnp.exp(-y))

    assert regions(lean(fn), W, X) == []


@pytest.mark.parametrize("lean", (default, lean_default))
def test_a_residual_stream_adds_up_in_full_and_is_kept_so(lean):
    def fn(ws, x):
        def block(x, w):
            return x + jax.nn.softmax(x, axis=-1) @ w, None

        return jnp.sum(lax.scan(block, x, ws)[0])

    ws = jnp.stack([W] * 3)
    (scan,) = (
        eqn
        for eqn, _ in measure.walk(jax.make_jaxpr(lean(fn))(ws, X))
        if eqn.primitive.name == "scan"
    )
    assert scan.outvars[0].aval.dtype == jnp.float32
    stream, softmax = ("float32", (3, 4, 8)), (BF16, (3, 4, 8))
    assert set(kept(lean(fn), ws, X)) == {stream, softmax}


def test_the_authors_checkpoint_stays_whole(lean):
    @jax.checkpoint
    def block(w, x):
        return jax.nn.softmax(x @ w) @ w

    def fn(w, x):
        return jnp.sum(block(w, x) @ w)

    jaxpr = to_classic(jax.make_jaxpr(lean(fn))(W, X))
    (written,) = (
        e
        for e, _ in measure.walk(jaxpr)
        if e.primitive.name in ("checkpoint", "remat2") and e.params["prevent_cse"]
    )
    assert measure.contraction_flops(written.params["jaxpr"])[BF16] > 0
    assert regions(lean(fn), W, X) == []


@pytest.mark.parametrize("wrap", (lambda fn: fn, jax.jit, jax.checkpoint))
def test_a_bias_sums_up_what_the_contraction_before_it_reads(wrap, lean):
    @wrap
    def dense(params, x):
        w, b = params
        return (x @ w + b) ** 2

    def fn(params, x, weight):
        return jnp.sum(dense(params, x) * weight)

    params, weight = (W, jnp.linspace(-1, 1, 8)), jr.normal(jr.key(0), X.shape)
    gradient = jax.jit(jax.grad(lean(fn), (0, 1)), compiler_options=AS_WRITTEN)
    (_, bias), _ = gradient(params, X, weight)
    low = jnp.bfloat16
    hidden = (X.astype(low) @ W.astype(low)).astype(jnp.float32) + params[1]
    cotangent = 2 * hidden * weight
    rounded = cotangent.astype(low).astype(jnp.float32)
    close = dict(rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(bias, jnp.sum(rounded, 0), **close)
    assert not np.allclose(bias, jnp.sum(cotangent, 0), **close)


@pytest.mark.parametrize("wrap", (lambda fn: fn, jax.jit))
def test_a_bias_of_gates_sums_up_what_their_contractions_read(wrap, lean):
    """As in an LSTM, whose gates add up two products."""

    @wrap
    def gates(params, x):
        w, b = params
        return jax.nn.sigmoid(x @ w + jnp.tanh(x) @ w + b)

    def fn(params, x, weight):
        return jnp.sum(gates(params, x) * weight)

    params, weight = (W, jnp.linspace(-1, 1, 8)), jr.normal(jr.key(0), X.shape)
    gradient = jax.jit(jax.grad(lean(fn)), compiler_options=AS_WRITTEN)
    (_, bias) = gradient(params, X, weight)
    low = jnp.bfloat16
    products = (x.astype(low) @ W.astype(low) for x in (X, jnp.tanh(X)))
    summed = sum(y.astype(jnp.float32) for y in products)
    kept = summed.astype(low).astype(jnp.float32) + params[1]
    gate = jax.nn.sigmoid(kept)
    cotangent = weight * gate * (1 - gate)
    rounded = cotangent.astype(low).astype(jnp.float32)
    close = dict(rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(bias, jnp.sum(rounded, 0), **close)
    assert not np.allclose(bias, jnp.sum(cotangent, 0), **close)


def residual_layers(ws, x):
    for w, v, b in ws:
        x = x + (jnp.tanh(jax.nn.standardize(x) @ w) @ v + b)
    return jnp.mean(x**2)


LAYERS = [(W + 0.1 * i, W.T - 0.1 * i, jnp.linspace(-1, 1, 8)) for i in range(3)]


@pytest.mark.parametrize("dtype", (BF16, "float16"))
def test_the_cotangent_of_a_stream_is_stored_where_it_adds_up(dtype):
    jaxpr = jax.make_jaxpr(jax.grad(default(residual_layers, dtype)))(LAYERS, X)
    stored = [
        eqn.outvars[0].aval.dtype.name
        for eqn in jaxpr.jaxpr.eqns
        if eqn.primitive.name == "amp_apart" and eqn.outvars[0].aval.shape == X.shape
    ]
    # For what is before the first sum nobody asks.
    both = list(itertools.pairwise(stored))
    assert both.count(("float32", dtype)) == len(LAYERS) - 1


@pytest.mark.rest
@pytest.mark.parametrize("dtype", (BF16, "float16"))
@pytest.mark.parametrize("layer", range(3))
def test_one_layer_of_a_stream_is_differentiated_alone(layer, dtype):
    fn = default(residual_layers, dtype)

    def of_one(given, x):
        return fn([*LAYERS[:layer], given, *LAYERS[layer + 1 :]], x)

    whole = jax.grad(fn)(LAYERS, X)[layer]
    for transform in (jax.grad, jax.jacrev):
        alone = transform(of_one)(LAYERS[layer], X)
        for got, want in zip(alone, whole, strict=True):
            np.testing.assert_allclose(got, want, rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("dtype", (BF16, "float16"))
def test_what_only_contractions_read_is_stacked_up_low(dtype):
    def fn(w, xs, reader):
        def step(h, x):
            h = jnp.tanh(x @ w + 0.5 * h)
            return h, jnp.sin(h) * h

        last, ys = lax.scan(step, xs[0], xs)
        return reader(jnp.moveaxis(ys, 0, 1), w), last

    def stacked(reader):
        jaxpr = jax.make_jaxpr(default(lambda w, xs: fn(w, xs, reader), dtype))(W, xs)
        scans = [e for e, _ in measure.walk(jaxpr) if e.primitive.name == "scan"]
        return {v.aval.dtype.name for e in scans for v in e.outvars if v.aval.ndim == 3}

    xs = jr.normal(jr.key(0), (5, 4, 8))
    assert stacked(lambda ys, w: (ys @ w, ys @ w.T)) == {dtype}
    assert stacked(lambda ys, w: (ys @ w, jnp.sin(ys))) == {"float32"}
    assert stacked(lambda ys, w: (ys @ w, ys)) == {"float32"}
    (got, _), last = quick(
        default(lambda *args: fn(*args, lambda y, w: (y @ w, y)), dtype)
    )(W, xs)
    alone, same = quick(default(lambda *args: fn(*args, lambda y, w: y @ w), dtype))(
        W, xs
    )
    np.testing.assert_array_equal(alone, got)
    np.testing.assert_array_equal(same, last)


def test_checkpoints_in_a_loop_are_not_overruled(lean):
    """A weight that every iteration reads, beside a checkpoint of the author."""

    def fn(w, xs):
        @jax.checkpoint
        def cell(h, x):
            for _ in range(4):
                h = jnp.sin(h @ w * x)
            return h

        def step(h, x):
            return cell(h, x) @ w, None

        return jnp.sum(lax.scan(step, xs[0], xs)[0])

    xs = jnp.stack([X] * 10)

    def size(fn):
        return sum(measure.saved_bytes(fn, W, xs, argnums=(0,)).values())

    assert size(lean(fn)) <= size(fn) / 2


def test_lean_loops_keep_no_copy_of_a_weight(lean):
    def fn(w, xs):
        def step(h, x):
            return jax.nn.softmax(h @ w.T + x), None

        return jnp.sum(lax.scan(step, X, xs)[0] @ w)

    xs = jnp.stack([X] * 10)
    saved = measure.saved(lean(fn), W, xs)
    assert measure.weight_copies(W, saved) == []
    assert max(aval.size for aval in saved) <= 10 * X.size


@pytest.mark.sample(3)
def test_sharded_code_keeps_no_copy_of_a_weight(lean):
    """There a weight is marked as varying over the mesh before it is read."""
    mesh = jax.make_mesh((2,), ("i",), axis_types=(AxisType.Auto,))

    @jax.shard_map(mesh=mesh, in_specs=(P(), P("i")), out_specs=P())
    def fn(w, x):
        return lax.pmean(jnp.sum(jnp.sin(jnp.tanh(x @ w) @ w)), "i")

    mixed = lean(fn)
    saved = measure.saved(mixed, W, X, argnums=(0,))
    assert measure.weight_copies(W, saved) == []
    grads, true = jax.jit(jax.grad(mixed))(W, X), jax.jit(jax.grad(fn))(W, X)
    np.testing.assert_allclose(grads, true, atol=0.02 * float(jnp.abs(true).max()))


@pytest.mark.sample(3)
@every_workload
def test_keeps_no_more_than_by_hand(name):
    workload = WORKLOADS[name]
    params, batch = workload.shapes("real")

    def size(loss):
        return sum(measure.saved_bytes(loss, params, batch, argnums=(0,)).values())

    saved = measure.saved(default(workload.loss), params, batch, argnums=(0,))
    assert measure.weight_copies(params, saved) == []
    ours, full = sum(map(measure.size_in_bytes, saved)), size(workload.loss)
    by_hand = workload.lean or workload.hand
    bound = size(by_hand(BF16))
    if name == "CNN":
        # Its last relu is read by a mean, in full; JAX keeps the zeros of a relu's
        # derivative in the dtype of its operand, which XLA makes constants of.
        bound += 2 * 128 * 8 * 8 * 256
    if name == "ViT":
        # The stream between its 12 branches, which its expert rounds: made again of
        # that, a gradient would be the one of another value.
        bound += 2 * 12 * 64 * 256 * 384
    assert ours <= bound
    if workload.lean is not None:
        assert ours < 0.33 * full


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("name", "dtype"), (("GPT scanned", BF16), ("LSTM", "float16"))
)
def test_gradients_are_near_those_that_keep_all(name, dtype):
    workload = WORKLOADS[name]
    params = workload.init(jr.key(0), "toy")
    batch = workload.batch(jr.key(1), "toy")

    def grads(fn):
        scaled = quick(jax.grad(lambda *args: 2.0**10 * fn(*args)))
        leaves = jax.tree.leaves(scaled(params, batch))
        return np.concatenate([np.ravel(x) for x in leaves])

    true = grads(workload.loss)
    error, usual = (
        np.linalg.norm(grads(amp(workload.loss, compute_dtype=dtype, lean=x)) - true)
        for x in (True, False)
    )
    assert error <= 1.2 * usual


def attention(w, x):
    q, k, v = (x @ w[i] for i in range(3))
    y = jax.nn.softmax(q @ k.T / 3) @ v
    return jnp.sum(jax.nn.gelu(y + x) @ w[3])


ARGS = (jr.normal(jr.key(2), (4, 8, 8)) / 3, jr.normal(jr.key(3), (4, 8)))
TRANSFORMS = {
    "jvp": lambda fn: lambda w, x: jax.jvp(fn, (w, x), (w, x)),
    "linearize": lambda fn: lambda w, x: jax.linearize(fn, w, x)[1](w, x),
    "vmap of grad": lambda fn: (
        lambda w, x: jax.vmap(jax.grad(fn), (None, 0))(w, jnp.stack([x, -x]))
    ),
    "grad of vmap": lambda fn: jax.grad(
        lambda w, x: jnp.sum(jax.vmap(fn, (None, 0))(w, jnp.stack([x, -x])))
    ),
    "checkpoint": lambda fn: jax.grad(jax.checkpoint(fn)),
    "jit": lambda fn: jax.grad(jax.jit(fn)),
    "hessian": lambda fn: lambda w, x: jax.jvp(jax.grad(fn), (w, x), (w, x))[1],
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_composes(transform):
    ours = quick(transform(default(attention)))(*ARGS)
    true = quick(transform(attention))(*ARGS)
    assert jax.tree.structure(ours) == jax.tree.structure(true)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(true), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        bound = 0.1 * float(jnp.max(jnp.abs(b)))
        np.testing.assert_allclose(a, b, rtol=0, atol=bound)


OPS = {
    "dot": lambda a, b: a @ b,
    "add": lambda a, b: a + b,
    "mul": lambda a, b: a * b,
    "sub": lambda a, b: a - b,
    "tanh": lambda a, b: jnp.tanh(a),
    "gelu": lambda a, b: jax.nn.gelu(a),
    "softmax": lambda a, b: jax.nn.softmax(a),
    "norm": lambda a, b: a - a.mean(axis=0),
    "mask": lambda a, b: jnp.where(jnp.tri(3) > 0, a, b),
    "select": lambda a, b: jnp.where(a > b, a, b),
    "cumsum": lambda a, b: jnp.cumsum(a, axis=0) / 3,
    "turn": lambda a, b: a.T,
    "jit": lambda a, b: jax.jit(lambda a, b: jnp.sin(a) * jnp.cos(b))(a, b),
}


@st.composite
def programs(draw):
    """A function of two matrices: each op reads any two of the values so far."""
    steps = []
    for i in range(draw(st.integers(3, 14))):
        pick = st.integers(0, i + 1)
        steps.append((draw(st.sampled_from(sorted(OPS))), draw(pick), draw(pick)))

    def program(a, b):
        values = [a, b]
        for name, i, j in steps:
            values.append(OPS[name](values[i], values[j]) / 2)
        return values[-1], jnp.sum(values[len(values) // 2])

    return program


def test_a_call_without_results(lean):
    """A jitted function of which a derivative leaves nothing to compute."""

    def fn(w, x):
        jax.jit(lambda y: ())(x @ w)
        return x @ w

    np.testing.assert_array_equal(lean(fn)(W, X), amp(fn, compute_dtype=BF16)(W, X))


def test_what_leads_to_a_region_reads_what_it_makes():
    """The second derivative of a layer, all of it inside of `amp`."""

    def fn(w, x):
        return jnp.sum(jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w) ** 2)

    grads = jax.grad(fn)
    ours = amp(grads, compute_dtype=BF16)(W, X)
    np.testing.assert_allclose(ours, grads(W, X), rtol=0.05, atol=0.05)


@pytest.mark.sample(3)
def test_long_chains(lean):
    """A region whose steps stand far apart, with thousands of others between."""

    def fn(w, x):
        early = jnp.exp(x @ w)
        late = x
        for _ in range(3000):
            late = late + x
        return jnp.sum((early * late) @ w)

    np.testing.assert_allclose(lean(fn)(W, X), fn(W, X), rtol=0.05)


@pytest.mark.rest
@settings(max_examples=25, deadline=None)
@given(programs())
def test_any_program_computes_the_same(program):
    """Whatever the regions are, they change neither values nor gradients."""
    a, b = jr.normal(jr.key(0), (2, 3, 3))

    def total(fn):
        return jax.grad(lambda a, b: sum(map(jnp.sum, fn(a, b))), argnums=(0, 1))

    ours = amp(program, compute_dtype="float32", lean=True)
    with jax.disable_jit():
        for x, y in zip(ours(a, b), program(a, b), strict=True):
            np.testing.assert_array_equal(x, y)
    grads, true = (jax.make_jaxpr(total(fn))(a, b) for fn in (ours, program))
    for x, y in zip(jaxpr_as_fun(grads)(a, b), jaxpr_as_fun(true)(a, b), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5)


# ---------------------------------------------------------------- one for each platform

WIDE = jr.normal(jr.key(1), (4, 64))
MIXING = [jr.normal(jr.key(i), (64, 64)) / 8 for i in range(2)]


def attention_like(ws, x):
    for w in ws:
        x = x + jax.nn.softmax(jax.nn.standardize(x) @ w) @ w
    return jnp.mean(x**2)


@pytest.mark.parametrize("platforms", (("cpu",), ("cuda",), ("tpu",), ("cuda", "tpu")))
def test_what_is_made_again_is_fenced_but_on_tpus(platforms):
    traced = jax.jit(jax.grad(default(attention_like))).trace(MIXING, WIDE)
    text = traced.lower(lowering_platforms=platforms).as_text()
    assert ("optimization_barrier" in text) == (platforms != ("tpu",))


@pytest.mark.parametrize("vocabulary", (16384, 24576))
def test_a_loss_of_many_classes_is_not_made_apart(vocabulary):
    """A GPU reduces and reads again long rows in several kernels, in whichever pass."""

    def loss(w, x):
        return -jnp.mean(jax.nn.log_softmax(x @ w)[:, 0])

    w = jax.ShapeDtypeStruct((64, vocabulary), jnp.float32)
    gradient = jax.make_jaxpr(jax.grad(default(loss)))(w, WIDE)
    fences = [e for e, _ in measure.walk(gradient) if e.primitive.name == "amp_apart"]
    assert bool(fences) == (vocabulary == 16384)


def evaluated(jaxpr, args, taken):
    """Values of a closed jaxpr, where of what is kept or made the one is `taken`."""
    env = dict(zip(jaxpr.jaxpr.constvars, jaxpr.consts, strict=True))
    env |= zip(jaxpr.jaxpr.invars, args, strict=True)

    def read(atom):
        return atom.val if isinstance(atom, Literal) else env[atom]

    for eqn in jaxpr.jaxpr.eqns:
        values = [*map(read, eqn.invars)]
        subs = measure.subjaxprs(eqn.params)
        if eqn.primitive.name == "amp_kept_or_made":
            outs = [values[taken]]
        elif sub := next(iter(subs), None):
            closed = sub if hasattr(sub, "consts") else ClosedJaxpr(sub, ())
            outs = evaluated(closed, values, taken)
        else:
            outs = eqn.primitive.bind(*values, **eqn.params)
            outs = outs if eqn.primitive.multiple_results else [outs]
        env |= zip(eqn.outvars, outs, strict=True)
    return [*map(read, jaxpr.jaxpr.outvars)]


def test_a_statistic_is_the_same_kept_and_made_again():
    gradient = jax.grad(default(attention_like))
    jaxpr = jax.make_jaxpr(gradient)(MIXING, WIDE)
    found = [
        e for e, _ in measure.walk(jaxpr) if e.primitive.name == "amp_kept_or_made"
    ]
    # Mean and deviation, largest and sum of exponentials, of two layers.
    assert [e.outvars[0].aval.shape for e in found].count((4,)) >= 6
    ones = (evaluated(jaxpr, [*MIXING, WIDE], taken) for taken in (0, 1))
    for kept_one, made in zip(*ones, strict=True):
        np.testing.assert_array_equal(kept_one, made)
    # It costs the backward pass next to nothing.
    stored = measure.saved(default(attention_like), MIXING, WIDE)
    small = [v for v in stored if v.shape == (4,)]
    assert sum(map(measure.size_in_bytes, small)) < 0.1 * sum(
        map(measure.size_in_bytes, stored)
    )


@pytest.mark.parametrize("axis", [0, -1])
def test_a_gradient_is_exported_for_sizes_that_are_not_known(axis):
    """Also where it sums over an axis of such a size."""

    def loss(w, x):
        return jnp.mean(jax.nn.log_softmax(jnp.tanh(x @ w) @ x.T, axis) ** 2)

    shapes = (
        jax.ShapeDtypeStruct((4, 4), jnp.float32),
        jax.ShapeDtypeStruct(export.symbolic_shape("n, 4"), jnp.float32),
    )
    gradient = jax.jit(jax.grad(amp(loss, compute_dtype="bfloat16")))
    exported = export.export(gradient)(*shapes)
    for n in (2, 40):
        w, x = jnp.eye(4), jnp.sin(jnp.arange(4.0 * n)).reshape(n, 4)
        exact = jax.grad(loss)(w, x)
        np.testing.assert_allclose(
            exported.call(w, x), exact, atol=0.05 * abs(exact).max()
        )


def test_views_of_views_do_not_make_the_program_quadratic():
    """Layers that are sliced off the front of what is left of one vector."""

    def loss(p, x):
        while p.size:
            w, p = p[:64].reshape(8, 8), p[64:]
            x = jnp.tanh(x @ w)
        return jnp.mean(x)

    def equations(layers: int) -> int:
        args = jnp.full(64 * layers, 0.1), jnp.ones((4, 8))
        jaxpr = jax.make_jaxpr(jax.grad(amp(loss, compute_dtype="bfloat16")))(*args)
        return sum(1 for _ in measure.walk(jaxpr))

    assert equations(80) < 2.2 * equations(40)


def test_what_many_views_lead_to_is_kept_low():
    def loss(w, x):
        for i in range(60):
            w = w.T
            x = jnp.tanh(x @ w) if i > 57 else x
        return jnp.sum(x)

    mixed = amp(loss, compute_dtype="bfloat16")
    w, x = jnp.full((32, 32), 0.02), jnp.ones((4, 32))
    kept = jax.tree.leaves(jax.vjp(mixed, w, x)[1])
    square = {id(leaf): leaf for leaf in kept if leaf.shape == w.shape}.values()
    assert (
        sum(leaf.nbytes for leaf in square if leaf is not w) <= w.nbytes
    )  # two, of 16 bits
    exact = jax.grad(loss)(w, x)
    np.testing.assert_allclose(
        jax.grad(mixed)(w, x), exact, atol=0.03 * abs(exact).max()
    )


@pytest.mark.parametrize(
    "branches",
    (
        lambda w, i: (lambda x: x, lambda x: x + jnp.tanh(x @ w[i])),
        lambda w, i: tuple(lambda x, k=k: x + jnp.tanh(x @ w[k]) for k in range(3)),
        lambda w, i: (lambda x: x, lambda x: jnp.tanh(x @ w[2] ** 2)),
        lambda w, i: (lambda x: x, jax.jit(lambda x: jnp.sin(x @ w[i]) * w[i, 0] ** 2)),
    ),
)
def test_a_branch_in_a_loop_keeps_no_more_than_as_written(branches):
    """Up to JAX 0.11, what a branch reads again is copied for each iteration."""

    def loss(w, x):
        def body(x, i):
            choices = branches(w, i)
            return lax.switch(i % len(choices), choices, x), None

        return jnp.mean(lax.scan(body, x, jnp.arange(8))[0] ** 2)

    w, x = jnp.full((8, 16, 16), 0.02), jnp.ones((4, 16))
    mixed = amp(loss, compute_dtype="bfloat16")

    def size(fn):
        return sum(measure.saved_bytes(fn, w, x).values())

    assert size(mixed) <= size(loss)
    assert error(jax.grad(mixed)(w, x), jax.grad(loss)(w, x)) < 0.02


def test_what_is_split_into_many_parts_does_not_make_the_program_quadratic():
    def loss(p, x):
        for w in jnp.split(p, p.size // 64):
            x = jnp.tanh(x @ w.reshape(8, 8))
        return jnp.mean(x)

    def equations(layers: int) -> int:
        args = jnp.full(64 * layers, 0.1), jnp.ones((4, 8))
        jaxpr = jax.make_jaxpr(jax.grad(amp(loss, compute_dtype="bfloat16")))(*args)
        return sum(len(eqn.outvars) for eqn, _ in measure.walk(jaxpr))

    assert equations(80) < 2.2 * equations(40)


def test_an_index_of_a_view_is_no_number_to_cast():
    """The table's cast is made before the loop, and sliced in it at literal indices."""
    table = jr.normal(jr.key(0), (6, 4))

    def loss(table):
        def body(total, i):
            rows = jax.lax.dynamic_slice(table, (i, 0), (2, 4))
            return total + rows[1] @ table.T, None

        total, _ = jax.lax.scan(body, jnp.zeros(6), jnp.arange(3))
        return jnp.sum(jnp.square(total))

    mixed = amp(loss, compute_dtype="bfloat16")
    assert error(mixed(table), loss(table)) < 0.02
    assert error(jax.grad(mixed)(table), jax.grad(loss)(table)) < 0.02


def test_a_chain_of_views_longer_than_pythons_stack():
    def fn(w, x):
        for _ in range(1100):
            w = w[1:]
        return jnp.sum(jnp.tanh(x @ w))

    program = jax.make_jaxpr(amp(fn, compute_dtype="bfloat16"))
    args = jnp.ones((1108, 8)), jnp.ones((4, 8))
    assert measure.low_share(program(*args)) == 1
