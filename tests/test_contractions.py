"""Rules for contractions: dot algorithms, and a precision for each pass."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jax import export, lax
from jax.sharding import AxisType, PartitionSpec as P

from benchmarks.measure import CONTRACTIONS, saved, walk, weight_copies
from jaxamp_like import AmpError, amp, default_amp_policy
from jaxamp_like._rules import Demand
from jaxamp_like._rules.by_pass import PassPrecision
from jaxamp_like.rules import use_dot_algorithm, use_precision_by_pass, wide

pytestmark = pytest.mark.sample(6)

enable_x64 = (
    jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64
)

LOW, F32 = "bfloat16", "float32"
TF32 = lax.DotAlgorithmPreset.TF32_TF32_F32
HIGHEST = (lax.Precision.HIGHEST, lax.Precision.HIGHEST)


def contractions(fn: Callable[..., Any], *args: Any) -> list[Any]:
    """The contractions of a function, in the order in which they run."""
    jaxpr = jax.make_jaxpr(fn)(*args)
    return [eqn for eqn, _ in walk(jaxpr) if eqn.primitive.name in CONTRACTIONS]


def dtypes(fn: Callable[..., Any], *args: Any) -> list[str]:
    """For each contraction, the dtypes of its operands and of its result."""
    return [
        "{} {} -> {}".format(*(v.aval.dtype for v in (*eqn.invars[:2], eqn.outvars[0])))
        for eqn in contractions(fn, *args)
    ]


def precisions(fn: Callable[..., Any], *args: Any) -> list[Any]:
    return [eqn.params["precision"] for eqn in contractions(fn, *args)]


def shape_of(aval: Any) -> str:
    return f"{aval.dtype}{list(aval.shape)}"


# The kinds of contractions, each as a function of the weight and an input. Shapes of
# weights, inputs and results differ, so that a pass is told by the shape of its result.


def dot(w, x):
    return x @ w


def conv(w, x):
    numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, w, (2, 1), "SAME", dimension_numbers=numbers)


def ragged(w, x):
    return lax.ragged_dot(x, w, jnp.array([2, 3], jnp.int32))


def batched(w, x):
    return jnp.einsum("bij,bjk->bik", x, w)


KINDS: dict[str, tuple[Callable[..., Any], tuple[int, ...], tuple[int, ...]]] = {
    "dot": (dot, (8, 4), (5, 8)),
    "batched": (batched, (2, 8, 4), (2, 5, 8)),
    "conv": (conv, (3, 3, 4, 6), (2, 8, 8, 4)),
    "ragged": (ragged, (2, 8, 4), (5, 8)),
}
kinds = pytest.mark.parametrize("kind", KINDS)
with_vmap = pytest.mark.parametrize("kind", [k for k in KINDS if k != "ragged"])


def example(kind: str) -> tuple[Any, Any]:
    _, w, x = KINDS[kind]
    return jr.normal(jr.key(0), w), jr.normal(jr.key(1), x)


def squared(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The square sum of a contraction that stands in a scope."""

    def loss(w, x):
        with jax.named_scope("contraction"):
            y = fn(w, x)
        return jnp.sum(jnp.square(y))

    return loss


def by_hand(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The same contraction with a derivative rule of its author's."""
    made = jax.custom_vjp(fn)
    made.defvjp(lambda w, x: jax.vjp(fn, w, x), lambda back, ct: back(ct))
    return made


def scoped(kind: str, rule: Any, compute_dtype: Any = LOW) -> Callable[..., Any]:
    """The square sum of a contraction that is under a rule."""

    return under(rule, squared(KINDS[kind][0]), compute_dtype)


def under(rule: Any, fn: Callable[..., Any], compute_dtype: Any) -> Callable[..., Any]:
    policy = default_amp_policy | {"contraction": rule}
    return amp(fn, compute_dtype=compute_dtype, amp_policy=policy)


def differentiated(fn: Callable[..., Any]) -> Callable[..., Any]:
    return jax.value_and_grad(fn, (0, 1))


AROUND: dict[str, Callable[..., Any]] = {
    "grad(amp)": lambda kind, rule, low: differentiated(scoped(kind, rule, low)),
    "amp(grad)": lambda kind, rule, low: under(
        rule, differentiated(squared(KINDS[kind][0])), low
    ),
    "grad(amp), by hand": lambda kind, rule, low: differentiated(
        under(rule, squared(by_hand(KINDS[kind][0])), low)
    ),
    "amp(grad), by hand": lambda kind, rule, low: under(
        rule, differentiated(squared(by_hand(KINDS[kind][0]))), low
    ),
}


def by_shape(
    kind: str, rule: Any, *, dtype: Any = LOW, around: str = "grad(amp)"
) -> dict[str, str]:
    """The dtypes of each pass: forward, input gradient, weight gradient."""
    w, x = example(kind)
    step = AROUND[around](kind, rule, dtype)
    eqns = contractions(step, w, x)
    sizes = {w.size: "weight", x.size: "input"}
    passes = {}
    for eqn in eqns:
        name = sizes.get(eqn.outvars[0].aval.size, "forward")
        lhs, rhs, out = (v.aval.dtype for v in (*eqn.invars[:2], eqn.outvars[0]))
        assert lhs == rhs
        passes[name] = f"{lhs} -> {out}"
    assert len(passes) == len(eqns) == 3
    return passes


WIDE, LOWEST = f"{LOW} -> {F32}", f"{LOW} -> {LOW}"
FULL = f"{F32} -> {F32}"

CHOICES: dict[str, tuple[dict[str, Any], tuple[str, str, str]]] = {
    "all low": ({}, (LOWEST, LOWEST, LOWEST)),
    "wide weight gradient": ({"weight_gradient": wide()}, (LOWEST, LOWEST, WIDE)),
    "wide input gradient": ({"input_gradient": wide()}, (LOWEST, WIDE, LOWEST)),
    "wide forward": ({"forward": wide()}, (WIDE, LOWEST, LOWEST)),
    "all wide": (
        {"forward": wide(), "input_gradient": wide(), "weight_gradient": wide()},
        (WIDE, WIDE, WIDE),
    ),
    "full weight gradient": ({"weight_gradient": F32}, (LOWEST, LOWEST, FULL)),
    "full input gradient": ({"input_gradient": "float32"}, (LOWEST, FULL, LOWEST)),
    "full forward": ({"forward": jnp.float32}, (FULL, LOWEST, LOWEST)),
    "full backward": (
        {"input_gradient": F32, "weight_gradient": wide(F32)},
        (LOWEST, FULL, FULL),
    ),
    "full": (
        {"forward": F32, "input_gradient": F32, "weight_gradient": F32},
        (FULL, FULL, FULL),
    ),
    "float16 backward": (
        {"input_gradient": "float16", "weight_gradient": wide("float16")},
        (LOWEST, "float16 -> float16", "float16 -> float32"),
    ),
}
choices = pytest.mark.parametrize("choice", CHOICES)


@pytest.mark.cross("choice", kind=len(KINDS), around=4)
@kinds
@pytest.mark.parametrize("around", AROUND)
@choices
def test_each_pass_has_the_dtypes_chosen(kind, around, choice):
    kwargs, (forward, input_gradient, weight_gradient) = CHOICES[choice]
    assert by_shape(kind, use_precision_by_pass(**kwargs), around=around) == {
        "forward": forward,
        "input": input_gradient,
        "weight": weight_gradient,
    }


@pytest.mark.cross("choice", kind=len(KINDS))
@kinds
@choices
def test_values_and_gradients(kind, choice):
    w, x = example(kind)
    kwargs, _ = CHOICES[choice]
    fn = jax.value_and_grad(scoped(kind, use_precision_by_pass(**kwargs)), (0, 1))

    def reference(w, x):
        return jnp.sum(jnp.square(KINDS[kind][0](w, x)))

    with enable_x64(True):
        wide_args = (jnp.asarray(v, jnp.float64) for v in map(np.asarray, (w, x)))
        value, gradients = jax.value_and_grad(reference, (0, 1))(*wide_args)
        value, gradients = np.asarray(value), list(map(np.asarray, gradients))
    got, got_gradients = jax.jit(fn)(w, x)
    assert got.dtype == F32
    np.testing.assert_allclose(got, value, rtol=2e-2)
    for ours, exact in zip(got_gradients, gradients, strict=True):
        assert ours.dtype == F32
        assert relative(ours, exact) < 1.5e-2


def relative(x: Any, y: Any) -> float:
    x, y = (np.asarray(v, np.float64) for v in (x, y))
    return float(np.linalg.norm(x - y) / np.linalg.norm(y))


def test_a_wide_weight_gradient_is_not_rounded():
    w, x = jnp.zeros((8, 4)), jr.normal(jr.key(0), (512, 8)).astype(LOW).astype(F32)
    cts = jr.normal(jr.key(1), (512, 4)).astype(LOW).astype(F32)

    def error(rule):
        policy = default_amp_policy | {lax.dot_general_p: rule}
        fn = amp(lambda w: (x @ w) * cts, compute_dtype=LOW, amp_policy=policy)
        ours = jax.grad(lambda w: fn(w).sum())(w)
        exact = np.asarray(x, np.float64).T @ np.asarray(cts, np.float64)
        return relative(ours, exact)

    assert error(use_precision_by_pass(weight_gradient=wide())) < 1e-6
    assert error(use_precision_by_pass()) > 5e-4


@kinds
def test_float16(kind):
    passes = by_shape(
        kind, use_precision_by_pass(weight_gradient=wide()), dtype="float16"
    )
    low = "float16 -> float16"
    assert passes == {"forward": low, "input": low, "weight": "float16 -> float32"}


BY_PASS = use_precision_by_pass(weight_gradient=wide(), input_gradient=wide())


@kinds
def test_forward_mode(kind):
    w, x = example(kind)
    fn = scoped(kind, BY_PASS)
    tangents = (jnp.ones_like(w), x)
    (y, dy), (z, dz) = (
        jax.jvp(f, (w, x), tangents) for f in (fn, scoped(kind, use_precision_by_pass(
            forward=F32, input_gradient=F32, weight_gradient=F32)))
    )  # fmt: skip
    assert (y.dtype, dy.dtype) == (F32, F32)
    assert relative(y, z) < 1e-2 and relative(dy, dz) < 1e-2
    jitted = jax.jit(lambda *args: jax.jvp(fn, args, tangents)[1])(w, x)
    assert relative(jitted, dy) < 1e-2
    assert relative(jax.linearize(fn, w, x)[1](*tangents), dy) < 1e-2
    gradients = jax.grad(fn, (0, 1))(w, x)
    products = (
        jnp.vdot(g, t) for g, t in zip(gradients, tangents, strict=True)
    )  # reverse mode's answer to the same question
    assert relative(sum(products), dy) < 1e-2


@kinds
def test_second_order(kind):
    w, x = example(kind)

    def curvature(fn, *, reverse):
        if reverse:
            return jax.grad(lambda w: jnp.vdot(jax.grad(fn)(w, x), w))(w)
        return jax.jvp(lambda w: jax.grad(fn)(w, x), (w,), (w,))[1]

    full = scoped(kind, F32)
    # JAX has no transpose of the ragged contraction that makes a weight gradient.
    for reverse in (False,) if kind == "ragged" else (False, True):
        ours = curvature(scoped(kind, BY_PASS), reverse=reverse)
        assert ours.dtype == F32
        assert relative(ours, curvature(full, reverse=reverse)) < 2e-2


def test_forward_over_forward_and_jacobians():
    w, x = example("dot")
    fn = scoped("dot", BY_PASS)

    def slope(w):
        return jax.jvp(lambda w: fn(w, x), (w,), (w,))[1]

    ours = jax.jvp(slope, (w,), (w,))[1]
    assert relative(ours, 4 * fn(w, x)) < 2e-2
    forward, reverse = jax.jacfwd(fn)(w, x), jax.jacrev(fn)(w, x)
    assert relative(forward, reverse) < 1e-2


def test_terms_of_a_second_derivative_add_up_beyond_the_range_of_float16():
    policy = default_amp_policy | {
        lax.dot_general_p: use_precision_by_pass(forward="float32")
    }
    fn = amp(lambda x, w: x @ w, compute_dtype="float16", amp_policy=policy)
    args = jnp.full((2, 4), 50.0), jnp.full((4, 2), 200.0)

    def slope(*args):
        return jax.jvp(fn, args, args)[1]

    _, curvature = jax.jvp(slope, args, args)  # 160,000; float16 ends at 65,504
    np.testing.assert_allclose(curvature, 4 * fn(*args), rtol=1e-3)


@pytest.mark.sample(3)
@with_vmap
def test_vmap_sums_over_examples_inside_the_contraction(kind):
    w, x = example(kind)
    xs = jnp.stack([x, 2 * x, -x])
    fn = scoped(kind, use_precision_by_pass(weight_gradient=wide()))

    def loss(w, xs):
        return jnp.sum(jax.vmap(fn, (None, 0))(w, xs))

    eqns = contractions(jax.grad(loss), w, xs)
    assert [eqn.outvars[0].aval.dtype.name for eqn in eqns] == [LOW, F32]
    assert eqns[1].outvars[0].aval.size == w.size
    assert eqns[1].invars[0].aval.dtype == eqns[1].invars[1].aval.dtype == LOW
    each = jax.vmap(jax.grad(fn), (None, 0))(w, xs)
    assert each.shape == (3, *w.shape)
    assert relative(each.sum(0), jax.grad(loss)(w, xs)) < 1e-2
    one_by_one = sum(jax.grad(fn)(w, x) for x in xs)
    assert relative(one_by_one, jax.grad(loss)(w, xs)) < 1e-2


@with_vmap
def test_vmap_of_weights_and_of_both(kind):
    w, x = example(kind)
    ws, xs = jnp.stack([w, -w]), jnp.stack([x, 2 * x])
    gradient = jax.grad(scoped(kind, BY_PASS), (0, 1))
    for in_axes, args in [((0, None), (ws, x)), ((0, 0), (ws, xs))]:
        got = jax.jit(jax.vmap(gradient, in_axes))(*args)
        for i in (0, 1):
            w_i, x_i = ws[i], xs[i] if in_axes[1] == 0 else x
            for one, other in zip(got, gradient(w_i, x_i), strict=True):
                assert relative(one[i], other) < 1e-2
    batched = jax.vmap(lambda w: jax.jvp(scoped(kind, BY_PASS), (w, x), (w, x)))(ws)
    assert batched[1].shape == (2,)


def test_vmap_inside():
    w, x = example("dot")
    rule = use_precision_by_pass(weight_gradient=wide())
    policy = default_amp_policy | {lax.dot_general_p: rule}
    fn = amp(
        lambda w, x: jax.vmap(lambda x: jnp.tanh(x @ w))(x).sum(),
        compute_dtype=LOW,
        amp_policy=policy,
    )
    assert dtypes(jax.grad(fn), w, x) == [
        f"{LOW} {LOW} -> {LOW}",
        f"{LOW} {LOW} -> {F32}",
    ]


def scanned(w, x):
    return lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x, None, length=4)[0].sum()


def scanned_over(ws, x):
    return lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, ws)[0].sum()


def looped(ws, x):
    for i in range(4):
        x = jnp.tanh(x @ ws[i])
    return x.sum()


SQUARE = jnp.eye(8) + 0.1 * jr.normal(jr.key(0), (8, 8))
STACK = jnp.stack([SQUARE] * 4)
BLOCKS: dict[str, tuple[Callable[..., Any], Any]] = {
    "scan": (scanned, SQUARE),
    "scan over weights": (scanned_over, STACK),
    "remat of scan": (jax.checkpoint(scanned), SQUARE),
    "jit of scan": (jax.jit(scanned), SQUARE),
    "loop": (looped, STACK),
    "remat of loop": (jax.checkpoint(looped), STACK),
}


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint, jax.jit])
def test_loops_and_remat(name, wrap):
    fn, w = BLOCKS[name]
    x = jr.normal(jr.key(1), (5, 8))
    rule = use_precision_by_pass(weight_gradient=wide())
    policy = default_amp_policy | {lax.dot_general_p: rule}
    amped = wrap(amp(fn, compute_dtype=LOW, amp_policy=policy))
    found = set(dtypes(jax.grad(amped), w, x))
    assert found == {f"{LOW} {LOW} -> {LOW}", f"{LOW} {LOW} -> {F32}"}
    gradient = jax.jit(jax.grad(amped))(w, x)
    assert gradient.dtype == F32
    assert relative(gradient, jax.grad(fn)(w, x)) < 2e-2
    assert jax.jvp(amped, (w, x), (w, x))[1].dtype == F32


def test_no_low_copy_of_a_weight_is_kept():
    def mlp(ws, x):
        for w in ws:
            x = jnp.tanh(x @ w)
        return x.sum()

    ws = [jnp.ones((8, 16)), jnp.ones((16, 12)), jnp.ones((12, 4))]
    x = jnp.ones((5, 8))
    kept = {}
    for name, (kwargs, _) in CHOICES.items():
        policy = {lax.dot_general_p: use_precision_by_pass(**kwargs)}
        fn = amp(mlp, compute_dtype=LOW, amp_policy=default_amp_policy | policy)
        kept[name] = saved(fn, ws, x, argnums=[0])
        assert not weight_copies(ws, kept[name]), name
    by_shape = {name: sorted(map(shape_of, avals)) for name, avals in kept.items()}
    assert by_shape["wide weight gradient"] == by_shape["all low"]


def test_a_weight_used_twice_adds_up_in_full():
    w, x = example("dot")
    policy = default_amp_policy | {
        lax.dot_general_p: use_precision_by_pass(weight_gradient=wide())
    }
    fn = amp(
        lambda w: (x @ w).sum() + (2 * x @ w).sum(),
        compute_dtype=LOW,
        amp_policy=policy,
    )
    jaxpr = jax.make_jaxpr(jax.grad(fn))(w)
    sums = [eqn for eqn, _ in walk(jaxpr) if eqn.primitive.name == "add_any"]
    assert {eqn.outvars[0].aval.dtype.name for eqn in sums} == {F32}


@pytest.mark.parametrize("check_vma", [False, True])
def test_shard_map(check_vma):
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
    rule = use_precision_by_pass(weight_gradient=wide(), weight="rhs")

    def loss(w, x):
        return lax.psum(jnp.sum(jnp.tanh(x @ w)), "d")

    def sharded(fn):
        return jax.shard_map(
            fn,
            mesh=mesh,
            in_specs=(P(), P("d")),
            out_specs=P(),
            check_vma=check_vma,
        )

    options: dict[str, Any] = {
        "compute_dtype": LOW,
        "amp_policy": default_amp_policy | {lax.dot_general_p: rule},
    }
    w, x = jr.normal(jr.key(0), (8, 4)), jr.normal(jr.key(1), (16, 8))
    exact = jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w)
    for fn in (amp(sharded(loss), **options), sharded(amp(loss, **options))):
        gradient = jax.jit(jax.grad(fn))
        assert dtypes(gradient, w, x)[-1] == f"{LOW} {LOW} -> {F32}"
        assert relative(gradient(w, x), exact) < 1e-2


def test_export_and_nested_amp():
    w, x = example("dot")
    fn = scoped("dot", BY_PASS)
    gradient = jax.grad(fn, (0, 1))
    exported = export.export(jax.jit(gradient))(w, x)
    for one, other in zip(exported.call(w, x), gradient(w, x), strict=True):
        assert relative(one, other) < 1e-2

    def forward(w, x):
        return jax.jvp(fn, (w, x), (w, x))[1]

    for inner in (forward, jax.grad(fn)):
        outer = amp(inner, compute_dtype="float16", strict=True)
        assert relative(outer(w, x), inner(w, x)) < 1e-2
        assert dtypes(outer, w, x) == dtypes(inner, w, x)


# Which operand is the weight.

W_LOW, X_LOW = f"{LOW}[8, 4]", f"{LOW}[5, 8]"
W_WIDE, X_WIDE = f"{F32}[8, 4]", f"{F32}[5, 8]"


def gradient_shapes(
    fn: Callable[..., Any], rule: Any, *args: Any, argnums: Any = None
) -> set[str]:
    """The dtypes and (sorted) shapes of what the backward contractions make."""
    policy = default_amp_policy | {lax.dot_general_p: rule}
    amped = amp(fn, compute_dtype=LOW, amp_policy=policy, argnums=argnums)
    _, *backward = contractions(jax.grad(amped, (0, 1)), *args)
    return {shape_of(_sorted_like(eqn.outvars[0].aval, args)) for eqn in backward}


def _sorted_like(aval: Any, args: Any) -> Any:
    for arg in args:
        if sorted(arg.shape) == sorted(aval.shape):
            return jax.ShapeDtypeStruct(arg.shape, aval.dtype)
    raise AssertionError(aval)


def test_the_weight_is_the_operand_that_is_an_input():
    w, x = example("dot")
    rule = use_precision_by_pass(weight_gradient=wide())

    def right(w, x):
        return (jnp.tanh(x) @ w).sum()

    def left(w, x):
        return (w.T @ jnp.tanh(x).T).sum()  # a view of an input counts

    assert gradient_shapes(right, rule, w, x) == {W_WIDE, X_LOW}
    assert gradient_shapes(left, rule, w, x) == {W_WIDE, X_LOW}

    def both(w, x):
        return (w.T @ x.T).sum()

    assert gradient_shapes(both, rule, w, x) == {W_WIDE, X_LOW}
    assert gradient_shapes(both, rule, w, x, argnums=1) == {W_LOW, X_WIDE}
    # Of two parameters, the right one.
    assert gradient_shapes(both, rule, w, x, argnums=(0, 1)) == {W_LOW, X_WIDE}
    said = use_precision_by_pass(weight_gradient=wide(), weight="rhs")
    assert gradient_shapes(both, said, w, x) == {W_LOW, X_WIDE}


# What is left as written.


def test_the_authors_precision_wins_but_under_a_scope():
    w, x = example("dot")

    def careful(w, x):
        with jax.named_scope("layer"):
            return lax.dot(x, w, precision="highest").sum()

    for rule in (BY_PASS, use_dot_algorithm("TF32_TF32_F32")):
        by_primitive = amp(
            careful, compute_dtype=LOW, amp_policy={lax.dot_general_p: rule}
        )
        assert dtypes(by_primitive, w, x) == [f"{F32} {F32} -> {F32}"]
        assert precisions(by_primitive, w, x) == [HIGHEST]
    by_scope = amp(careful, compute_dtype=LOW, amp_policy={"layer": BY_PASS})
    assert dtypes(by_scope, w, x) == [f"{LOW} {LOW} -> {LOW}"]
    assert precisions(by_scope, w, x) == [HIGHEST]
    by_scope = amp(
        careful, compute_dtype=LOW, amp_policy={"layer": use_dot_algorithm(TF32)}
    )
    assert precisions(by_scope, w, x) == [TF32]


def test_an_authors_algorithm_goes_where_its_dtypes_go():
    w, x = example("dot")

    def careful(w, x):
        with jax.named_scope("layer"):
            return lax.dot(
                x, w, precision=lax.DotAlgorithmPreset.BF16_BF16_F32_X3
            ).sum()

    rule = use_precision_by_pass(weight_gradient=F32)
    fn = amp(careful, compute_dtype=LOW, amp_policy={"layer": rule})
    low, full = contractions(jax.grad(fn), w, x)
    assert low.params["precision"] == (lax.Precision.DEFAULT, lax.Precision.DEFAULT)
    assert full.params["precision"] == lax.DotAlgorithmPreset.BF16_BF16_F32_X3


@pytest.mark.filterwarnings("ignore:.*16 changes nothing")  # as tested here
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int32"])
def test_other_dtypes_are_left_alone(dtype):
    w, x = (jnp.ones(shape, dtype) for shape in ((8, 4), (5, 8)))
    for rule in (BY_PASS, use_dot_algorithm("highest")):
        fn = amp(dot, compute_dtype=LOW, amp_policy={lax.dot_general_p: rule})
        assert str(jax.make_jaxpr(fn)(w, x)) == str(jax.make_jaxpr(dot)(w, x))


def test_mixed_dtypes_are_lowered_each():
    w, x = jnp.ones((8, 4)), jnp.ones((5, 8), LOW)

    def mixed(w, x):
        return lax.dot_general(
            x, w, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32
        ).sum()

    rule = use_precision_by_pass(weight_gradient=wide())
    fn = amp(mixed, compute_dtype=LOW, amp_policy={lax.dot_general_p: rule})
    assert dtypes(jax.grad(fn), w, x) == [
        f"{LOW} {LOW} -> {LOW}",
        f"{LOW} {LOW} -> {F32}",
    ]
    w_bar, x_bar = jax.grad(fn, (0, 1))(w, x)
    assert (w_bar.dtype, x_bar.dtype) == (F32, LOW)


def test_complex_contractions_are_left_alone():
    w, x = jnp.ones((8, 4), "complex64"), jnp.ones((5, 8), "complex64")
    fn = amp(dot, compute_dtype=LOW, amp_policy={lax.dot_general_p: BY_PASS})
    assert str(jax.make_jaxpr(fn)(w, x)) == str(jax.make_jaxpr(dot)(w, x))


def test_a_scope_holds_other_ops_too():
    w, x = example("dot")

    def layer(w, x):
        with jax.named_scope("layer"):
            return jnp.tanh(x @ w)

    def tanh_dtype(rule):
        policy = default_amp_policy | {"layer": rule}
        jaxpr = jax.make_jaxpr(amp(layer, compute_dtype=LOW, amp_policy=policy))(w, x)
        (eqn,) = (eqn for eqn, _ in walk(jaxpr) if eqn.primitive.name == "tanh")
        return eqn.outvars[0].aval.dtype

    assert tanh_dtype(BY_PASS) == LOW
    assert tanh_dtype(use_precision_by_pass(forward=F32)) == F32
    assert tanh_dtype(use_dot_algorithm("highest")) == F32


def test_demand():
    def demand(**kwargs):
        return use_precision_by_pass(**kwargs).demand({}, Demand.NONE)

    assert demand() == Demand.LOW
    assert demand(weight_gradient=wide()) == Demand.LOW | Demand.WIDE
    assert demand(weight_gradient=F32) == Demand.LOW | Demand.FULL
    assert demand(forward=F32) == Demand.FULL
    assert use_precision_by_pass().is_compute
    assert not use_precision_by_pass(forward=F32).is_compute


def test_as_a_casting_callback():
    w, x = example("dot")
    operands, params = use_precision_by_pass(forward="float16")(
        jnp.dtype(LOW), (x.dtype, w.dtype), x, w
    )
    assert [v.dtype.name for v in operands] == ["float16", "float16"] and not params


def test_rules_are_equal_by_value():
    rules = [use_precision_by_pass(weight_gradient=wide("bfloat16")) for _ in range(2)]
    assert rules[0] == rules[1] and hash(rules[0]) == hash(rules[1])
    assert rules[0] != use_precision_by_pass(weight_gradient="bfloat16")
    assert use_dot_algorithm("highest") == use_dot_algorithm(lax.Precision.HIGHEST)
    assert wide(jnp.float16) == PassPrecision(jnp.dtype("float16"), True)


# Dot algorithms.


@pytest.mark.parametrize(
    "algorithm",
    ["TF32_TF32_F32", "TF32_TF32_F32_X3", "BF16_BF16_F32", "BF16_BF16_F32_X3",
     "BF16_BF16_F32_X9", "F32_F32_F32", "F16_F16_F32", TF32],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["dot", "batched", "ragged"])
def test_algorithms_change_no_dtype_and_reach_the_gradients(algorithm, kind):
    w, x = example(kind)
    preset = lax.DotAlgorithmPreset[getattr(algorithm, "name", algorithm)]

    def plain(w, x):
        return jnp.sum(jnp.square(KINDS[kind][0](w, x)))

    fn = scoped(kind, use_dot_algorithm(algorithm))
    gradient = jax.grad(fn, (0, 1))
    assert precisions(gradient, w, x) == [preset] * 3
    assert dtypes(gradient, w, x) == dtypes(jax.grad(plain, (0, 1)), w, x)
    jaxpr = jax.make_jaxpr(gradient)(w, x)
    assert not any(
        eqn.primitive.name == "convert_element_type" for eqn, _ in walk(jaxpr)
    )


@kinds
@pytest.mark.parametrize("algorithm", ["highest", "high", lax.Precision.HIGHEST])
def test_precisions(algorithm, kind):
    w, x = example(kind)
    fn = jax.grad(scoped(kind, use_dot_algorithm(algorithm)), (0, 1))
    asked = lax.Precision(getattr(algorithm, "name", algorithm).lower())
    assert precisions(fn, w, x) == [(asked, asked)] * 3
    exact = jax.grad(scoped(kind, F32), (0, 1))(w, x)
    for one, other in zip(fn(w, x), exact, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-4)


def test_an_algorithm_that_a_cpu_runs():
    w, x = jr.normal(jr.key(0), (64, 16)), jr.normal(jr.key(1), (32, 64))
    exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64)

    def error(algorithm):
        policy = {lax.dot_general_p: use_dot_algorithm(algorithm)}
        return relative(jax.jit(amp(dot, amp_policy=policy))(w, x), exact)

    assert error("F32_F32_F32") < 1e-6
    assert error("BF16_BF16_F32_X3") < 1e-4
    assert error("BF16_BF16_F32") < 1e-2


def test_a_convolution_takes_no_dot_algorithm():
    w, x = example("conv")
    rule = use_dot_algorithm("TF32_TF32_F32")
    fn = amp(conv, amp_policy={lax.conv_general_dilated_p: rule})
    message = "convolution takes no dot algorithm.*TF32_TF32_F32.*lax.Precision"
    with pytest.raises(AmpError, match=message):
        fn(w, x)
    # A scope may hold contractions of both kinds.
    assert precisions(scoped("conv", rule), w, x) == [None]


def test_beside_a_low_policy():
    w, x = jnp.ones((8, 8)), jnp.ones((5, 8))

    def layers(w, x):
        h = jnp.tanh(x @ w)
        with jax.named_scope("head"):
            return h @ w

    policy = default_amp_policy | {"head": use_dot_algorithm("F32_F32_F32")}
    fn = amp(layers, compute_dtype=LOW, amp_policy=policy)
    assert dtypes(fn, w, x) == [f"{LOW} {LOW} -> {LOW}", f"{F32} {F32} -> {F32}"]


# Bad input.


@pytest.mark.parametrize(
    ("name", "hint"),
    [("TF32_TF32_F16", "'TF32_TF32_F32'"), ("bf16_bf16_f32_x3", "'BF16_BF16_F32_X3'"),
     ("higest", "'highest'")],
)  # fmt: skip
def test_unknown_algorithms(name, hint):
    with pytest.raises(ValueError, match=f"no algorithm '{name}'.*Did you mean {hint}"):
        use_dot_algorithm(name)


def test_unknown_algorithm_without_a_hint():
    with pytest.raises(
        ValueError, match=r"no algorithm 'qqqqq' .*ons\. Known: DEFAULT"
    ):
        use_dot_algorithm("qqqqq")


@pytest.mark.parametrize(
    "algorithm", ["ANY_F8_ANY_F8_F32", lax.DotAlgorithmPreset.F64_F64_F64]
)
def test_algorithms_of_other_operands(algorithm):
    with pytest.raises(ValueError, match=r"does not take float32 operands.*TF32"):
        use_dot_algorithm(algorithm)


@pytest.mark.parametrize("algorithm", [None, 3, jnp.float32, ("highest", "highest")])
def test_no_algorithm(algorithm):
    with pytest.raises(TypeError, match=r"`algorithm` must be a `lax\.DotAlgorithm"):
        use_dot_algorithm(algorithm)


@pytest.mark.parametrize("choice", ["forward", "input_gradient", "weight_gradient"])
@pytest.mark.parametrize("value", ["int8", "floot16", 3.5, True])
def test_choices_that_are_no_floating_dtypes(choice, value):
    with pytest.raises(TypeError, match=f"`{choice}` must be a floating dtype"):
        use_precision_by_pass(**{choice: value})


def test_wide_of_no_floating_dtype():
    with pytest.raises(TypeError, match="`dtype` must be a floating dtype"):
        wide("int8")


def test_a_side_that_does_not_exist():
    with pytest.raises(
        ValueError, match=r"`weight` must be 'lhs', 'rhs' or None.*'left"
    ):
        use_precision_by_pass(weight="left")  # type: ignore[arg-type]


def test_the_transpose_of_a_zero_cotangent_is_zero():
    w, x = example("dot")
    fn = amp(dot, compute_dtype=LOW, amp_policy={lax.dot_general_p: BY_PASS})

    def pulled(w, x):
        y, pull = jax.vjp(fn, w, x)
        return pull(jnp.zeros_like(y))

    for leaf, like in zip(pulled(w, x), (w, x), strict=True):
        assert leaf.dtype == like.dtype and not np.any(leaf)


# Products that sum nothing, the gradients of which are contractions.

OUTER = {
    "einsum": lambda a, b: jnp.einsum("bi,bj->bij", a, b),
    "one example": lambda a, b: jnp.einsum("i,j->ij", a[0], b[0]),
    "axis of length 1": lambda a, b: a[:, :, None] @ b[:, None, :],
}
A, B = jr.normal(jr.key(1), (4, 8)), jr.normal(jr.key(2), (4, 6))


@pytest.mark.sample(2)
@pytest.mark.parametrize("lean", (False, True), ids=("amp", "lean"))
@pytest.mark.parametrize("product", OUTER.values(), ids=OUTER)
def test_gradients_of_outer_products_are_contractions(product, lean):
    def loss(a, b):
        return jnp.sum(jnp.sin(product(a, b)))

    low = amp(loss, compute_dtype=LOW, lean=lean)
    assert set(dtypes(low, A, B)) == {f"{F32} {F32} -> {F32}"}
    np.testing.assert_array_equal(jax.jit(low)(A, B), jax.jit(loss)(A, B))

    grad = jax.grad(low, (0, 1))
    back = [text for text in dtypes(grad, A, B) if LOW in text]
    assert back == [f"{LOW} {LOW} -> {LOW}"] * 2
    exact = jax.grad(loss, (0, 1))(A, B)
    for made, true in zip(jax.jit(grad)(A, B), exact, strict=True):
        assert made.dtype == F32
        np.testing.assert_allclose(made, true, atol=0.02 * jnp.abs(true).max())
    # As they are where the gradient is taken inside of `amp`.
    inside = amp(jax.grad(loss, (0, 1)), compute_dtype=LOW, lean=lean)
    told = [text for text in dtypes(inside, A, B) if LOW in text]
    assert told == back


@pytest.mark.parametrize(
    "product",
    (
        lambda a, b: jnp.einsum("bi,bi->b", a, a),
        lambda a, b: a[:, :1, None] @ b[:, None, :],
        lambda a, b: jnp.einsum("bi,bj->bij", a, b, precision="highest"),
    ),
    ids=("inner", "scaled", "asked for"),
)
def test_gradients_that_are_no_contractions_stay_in_full(product):
    low = amp(lambda a, b: jnp.sum(jnp.sin(product(a, b))), compute_dtype=LOW)
    assert LOW not in str(jax.make_jaxpr(jax.grad(low, (0, 1)))(A, B))
