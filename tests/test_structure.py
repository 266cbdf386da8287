"""amp reaches every construct of JAX, and composes with every transform, both ways.

Each check looks at the program first (which contractions are low, which dtypes come
out), then at the values. The tolerance comes from the format: a contraction rounds its
two operands and its result, 1.5 eps of a sum of absolute values that is at most four
times the largest result here; so 6 eps for each contraction that runs."""

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jax import export, lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jax.experimental import checkify
from jax.sharding import Mesh, PartitionSpec as P

from benchmarks.measure import (
    CONTRACTIONS,
    casts,
    contraction_flops,
    operand_dtype,
    subjaxprs,
    walk,
)
from jaxamp_like import amp

from . import constructs
from .constructs import CONSTRUCTS, Construct, Fn, identity, is_float, named

pytestmark = pytest.mark.sample(9)

DTYPES = ("float16", "bfloat16")
PLACEMENTS = ("inside", "outside", "both")

every_construct = pytest.mark.parametrize("case", CONSTRUCTS, ids=str)
every_dtype = pytest.mark.parametrize("dtype", DTYPES)
every_placement = pytest.mark.parametrize("placement", PLACEMENTS)


@pytest.fixture(autouse=True)
def strict_promotion():
    """Users may forbid implicit promotion: what amp casts, it must cast explicitly."""
    with jax.numpy_dtype_promotion("strict"):
        yield


# What is looked at.


def place(case: Construct, placement: str, **options: Any) -> Fn:
    wrap = functools.partial(amp, **options)
    fn = case.build(identity if placement == "outside" else wrap)
    return fn if placement == "inside" else wrap(fn)


def loss(out: Any) -> jax.Array:
    """A sum with a different weight, and so a different cotangent, for each element."""
    total = jnp.float32(0)
    for leaf in jax.tree.leaves(out):
        if is_float(leaf):
            weight = jnp.linspace(0.5, 1.5, leaf.size, dtype=leaf.dtype)
            total += jnp.sum(leaf * weight.reshape(leaf.shape)).astype(jnp.float32)
    return total


def run_and_differentiate(fn: Fn, case: Construct) -> Fn:
    """`fn`'s results, and its gradients where it has any."""

    def with_loss(*args):
        out = fn(*args)
        return loss(out), out

    if case.differentiable:
        grad = jax.grad(with_loss, case.argnums(), has_aux=True)
        return lambda *args: grad(*args)[::-1]
    return lambda *args: (fn(*args), ())


def is_contraction(eqn: Any) -> bool:
    """A `dot_general` without an axis to sum over is a multiplication."""
    if eqn.primitive.name not in CONTRACTIONS or not is_float(eqn.invars[0].aval):
        return False
    if eqn.primitive.name != "dot_general":
        return True
    (summed, _), _ = eqn.params["dimension_numbers"]
    return bool(summed)


def contractions(jaxpr: Any) -> Counter[str]:
    """How many float contractions there are, by the dtype that they compute in."""
    eqns = (eqn for eqn, _ in walk(jaxpr))
    return Counter(operand_dtype(eqn) for eqn in eqns if is_contraction(eqn))


def left_behind(jaxpr: Any) -> list[str]:
    """The float32 contractions that the author didn't ask for by their precision."""
    return [
        str(eqn)
        for eqn, _ in walk(jaxpr)
        if is_contraction(eqn)
        and operand_dtype(eqn) == "float32"
        and eqn.params["precision"] is None
    ]


def runs(jaxpr: Any) -> int:
    return sum(times for eqn, times in walk(jaxpr) if is_contraction(eqn))


def signature(tree: Any) -> Any:
    """Structure, shapes and dtypes."""
    leaves, structure = jax.tree.flatten(tree)
    avals = [(x.shape, x.dtype) if hasattr(x, "dtype") else x for x in leaves]
    return structure, avals


def as_numpy(x: Any) -> np.ndarray:
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jr.key_data(x)
    return np.asarray(x)


def assert_near(actual: Any, expected: Any, dtype: str, times: float) -> None:
    """Equal but for `times` roundings to `dtype`; integers and keys are equal."""
    assert signature(actual) == signature(expected)
    eps = float(jnp.finfo(dtype).eps)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        a, b = as_numpy(a), as_numpy(b)
        if not jnp.issubdtype(b.dtype, jnp.floating):
            np.testing.assert_array_equal(a, b)
            continue
        a, b = a.astype(np.float64), b.astype(np.float64)
        bound = 6 * eps * times * max(1.0, float(np.max(np.abs(b), initial=0)))
        np.testing.assert_allclose(a, b, rtol=0, atol=bound)


def assert_same_bits(actual: Any, expected: Any) -> None:
    assert signature(actual) == signature(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(as_numpy(a), as_numpy(b))


def quick(fn: Fn) -> Fn:
    """Compiled without optimisation, which takes most of a test's time."""
    return jax.jit(fn, compiler_options={"xla_backend_optimization_level": 0})


@functools.cache
def plain(case: Construct) -> tuple[Any, float]:
    """Results and gradients as written, and how many contractions make them."""
    fn = run_and_differentiate(case.build(identity), case)
    jaxpr = jax.make_jaxpr(fn)(*case.args())
    return quick(fn)(*case.args()), case.condition * runs(jaxpr)


# Every construct.


@every_construct
def test_constructs_are_what_the_table_says(case):
    count = contractions(jax.make_jaxpr(case.build(identity))(*case.args()))
    assert count == {"float32": case.low + case.kept}
    names = [other.name for other in CONSTRUCTS]
    assert len(set(names)) == len(names)


@pytest.mark.sample(6)
@pytest.mark.cross("case", placement=3, dtype=2)
@every_placement
@every_dtype
@every_construct
def test_reached(case, dtype, placement):
    """The contractions inside are low, forward and backward; nothing else changes.

    Values and gradients are near those of the function as written, whose derivative
    rules may be deliberately false."""
    fn = place(case, placement, compute_dtype=dtype)
    solved = case.in_solver if placement == "outside" else 0
    expected = Counter({dtype: case.low - solved, "float32": case.kept + solved})
    forward = jax.make_jaxpr(fn)(*case.args())
    assert Counter(contractions(forward)) == expected
    traced = quick(run_and_differentiate(fn, case)).trace(*case.args())
    if case.differentiable and not case.opaque_gradient:
        assert left_behind(traced.jaxpr) == []
    actual = traced.lower().compile()(*case.args())
    expected, times = plain(case)
    assert_near(actual, expected, dtype, times)


@pytest.mark.sample(6)
@every_construct
def test_eager(case):
    actual = amp(case.build(identity))(*case.args())
    (expected, _), times = plain(case)
    assert_near(actual, expected, "float16", times)


@pytest.mark.sample(8)
@pytest.mark.cross("case", placement=2)
@pytest.mark.parametrize(
    ("placement", "options"),
    (("outside", {"amp_policy": {}}), ("both", {"compute_dtype": "float32"})),
    ids=("empty", "float32"),
)
@every_construct
def test_a_policy_that_changes_nothing(case, placement, options):
    fn = place(case, placement, **options)
    jaxpr = jax.make_jaxpr(fn)(*case.args())
    assert casts(jaxpr) == casts(jax.make_jaxpr(case.build(identity))(*case.args()))
    actual = quick(run_and_differentiate(fn, case))(*case.args())
    assert_same_bits(actual, plain(case)[0])


@every_construct
def test_idempotent(case):
    """`amp(amp(fn))` computes what `amp(fn)` computes, in the same dtypes."""

    def operations(fn):
        count: Counter[Any] = Counter()
        for eqn, times in walk(jax.make_jaxpr(fn)(*case.args())):
            inputs = tuple(str(getattr(v.aval, "dtype", "")) for v in eqn.invars)
            count[eqn.primitive.name, inputs] += times
        return count

    fn = case.build(identity)
    assert operations(amp(amp(fn))) == operations(amp(fn))


def what_a_rule_is_told(wrap: Fn, wrap_all: Fn) -> set[Any]:
    """Which arguments of its function are perturbed, which results unused."""
    told = set()

    @jax.custom_vjp
    def fn(x, w):
        return x @ w, x

    def fwd(x, w):
        told.add(("perturbed", x.perturbed, w.perturbed))
        return fn(x.value, w.value), w.value

    def bwd(w, g):
        told.add(("zero", *(isinstance(ct, SymbolicZero) for ct in g)))
        return constructs.dense(g[0]) @ w.T, None

    fn.defvjp(fwd, bwd, symbolic_zeros=True)
    wrapped = wrap(fn)
    x, w = named("plain").args()
    jax.grad(wrap_all(lambda x: loss(wrapped(x, w)[0])))(x)
    return told


def test_custom_vjp_is_told_of_symbolic_zeros():
    plainly = what_a_rule_is_told(identity, identity)
    assert plainly == {("perturbed", True, False), ("zero", False, True)}
    assert what_a_rule_is_told(amp, identity) == plainly
    assert what_a_rule_is_told(identity, amp) == plainly


@pytest.mark.parametrize(
    "case", [case for case in CONSTRUCTS if case.false_gradient], ids=str
)
def test_false_rules_are_false(case):
    """Otherwise near gradients would not show that the author's rule made them."""

    def finite_difference(fn, args, direction):
        def at(step):
            moved = (args[0] + step * direction, *args[1:])
            return loss(fn(*moved))

        return (at(0.01) - at(-0.01)) / 0.02

    fn, args = case.build(identity), case.args()
    direction = jnp.cos(jnp.arange(args[0].size, dtype=jnp.float32))
    direction = direction.reshape(args[0].shape)
    derivative = jnp.sum(plain(case)[0][1][0] * direction)
    true_derivative = finite_difference(fn, args, direction)
    assert abs(derivative - true_derivative) > 0.5 * abs(true_derivative)


# Names, source lines and parameters.


def scope_names(eqn: Any) -> tuple[str, ...]:
    """The names given to `jax.named_scope`, without the frames of transforms."""
    stack = eqn.source_info.name_stack.stack
    return tuple(frame.name for frame in stack if type(frame).__name__ == "Scope")


def scoped(jaxpr: Any, outer: tuple[str, ...] = ()) -> Iterator[tuple[Any, Any]]:
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        path = outer + scope_names(eqn)
        yield eqn, path
        for sub in subjaxprs(eqn.params):
            yield from scoped(sub, path)


def source_line(eqn: Any) -> int:
    """The line of the table, or of its caller, that an equation comes from."""
    for frame in eqn.source_info.traceback.frames:
        if frame.file_name.endswith("constructs.py"):
            return frame.line_num
    return 0


@every_construct
def test_scopes_and_source_lines_survive(case):
    def in_scopes(fn):
        with_scope = jax.named_scope("body")(fn)
        return lambda *args, **kwargs: with_scope(*args, **kwargs)

    fn = case.build(in_scopes)
    written = jax.make_jaxpr(fn)(*case.args())
    paths = {path for _, path in scoped(written)}
    names = {name for path in paths for name in path}
    assert "body" in names

    def authors(path):
        """Without the marks that amp itself puts into the stack."""
        return tuple(name for name in path if name in names)

    rewritten = jax.make_jaxpr(amp(fn))(*case.args())
    # A cast of a result feeds no operation, so it has no scope.
    found = {authors(path) for _, path in scoped(rewritten)}
    assert found - {()} == paths - {()}

    def lines(jaxpr):
        return Counter(
            (authors(path), source_line(eqn))
            for eqn, path in scoped(jaxpr)
            if is_contraction(eqn)
        )

    assert lines(rewritten) == lines(written)


# What must be as the author wrote it, wherever an equation has it.
SURVIVING = frozenset(
    "name donated_invars keep_unused inline length reverse unroll policy prevent_cse "
    "mesh in_specs out_specs check_vma axis_name axes ordered effect "
    "window_strides padding lhs_dilation rhs_dilation dimension_numbers "
    "feature_group_count precision dimension num_keys is_stable k fft_type "
    "fft_lengths indices_are_sorted unique_indices mode operand "
    "_split_transpose compiler_options_kvs ctx_mesh global_axis_size".split()
)
# What nobody asked for. A lowered contraction says so, to be left alone by settings.
DEFAULT = (lax.Precision.DEFAULT, lax.Precision.DEFAULT)
# Here the rewrite may put an equation in another's place.
REBUILT = frozenset(["custom_jvp_call", "custom_vjp_call", "convert_element_type"])


@every_construct
def test_parameters_survive(case):
    def parameters(jaxpr):
        return Counter(
            (eqn.primitive.name, key, repr(None if value == DEFAULT else value))
            for eqn, _ in walk(jaxpr)
            if eqn.primitive.name not in REBUILT
            for key, value in eqn.params.items()
            if key in SURVIVING
        )

    fn = case.build(identity)
    written = parameters(jax.make_jaxpr(fn)(*case.args()))
    rewritten = parameters(jax.make_jaxpr(amp(fn))(*case.args()))
    # amp may add equations of its own (a cast that is recomputed); none may be lost.
    assert written - rewritten == Counter()


def test_donation_survives():
    def is_deleted(fn):
        x, w = named("jit_donated").args()
        jax.block_until_ready(fn(x, w))
        return x.is_deleted()

    fn = named("jit_donated").build(identity)
    assert is_deleted(amp(fn)) == is_deleted(fn)
    assert is_deleted(jax.jit(amp(fn), donate_argnums=0)) == is_deleted(fn)


# Transforms.


def split(fn: Fn, args: tuple[Any, ...]) -> tuple[Fn, list[Any]]:
    """`fn` as a function of its float arguments, and those."""
    floats = [n for n, arg in enumerate(args) if is_float(arg)]

    def of_floats(*values):
        full = list(args)
        for n, value in zip(floats, values, strict=True):
            full[n] = value
        return fn(*full)

    return of_floats, [args[n] for n in floats]


def tangents(args: list[Any]) -> tuple[Any, ...]:
    return tuple(jnp.cos(3 * x) for x in args)


def t_grad(fn, argnums=(0, 1)):
    return jax.grad(lambda *args: loss(fn(*args)), argnums)


def t_value_and_grad(fn):
    return jax.value_and_grad(lambda *args: loss(fn(*args)), (0, 1))


def t_jvp(fn):
    def transformed(*args):
        of_floats, floats = split(fn, args)
        return jax.jvp(of_floats, tuple(floats), tangents(floats))

    return transformed


def t_vjp(fn):
    def transformed(*args):
        of_floats, floats = split(fn, args)
        out, pull = jax.vjp(of_floats, *floats)
        return out, pull(jax.tree.map(jnp.sin, out))

    return transformed


def t_linearize(fn):
    def transformed(*args):
        of_floats, floats = split(fn, args)
        out, push = jax.linearize(of_floats, *floats)
        return out, push(*tangents(floats)), push(*floats)

    return transformed


def t_hessian_product(fn):
    gradient = t_grad(fn)

    def transformed(*args):
        of_floats, floats = split(gradient, args)
        return jax.jvp(of_floats, tuple(floats), tangents(floats))

    return transformed


def t_jacrev(fn):
    def floats(*args):
        return [x for x in jax.tree.leaves(fn(*args)) if is_float(x)]

    return jax.jacrev(floats)


def t_vmap(fn):
    def transformed(x, *args):
        stack = jnp.stack([x, -x])
        return jax.vmap(fn, in_axes=(0, *[None for _ in args]))(stack, *args)

    return transformed


def t_vmap_of_grad(fn):
    return t_vmap(t_grad(fn))


def t_scan(fn):
    def transformed(x, *args):
        def step(carry, scale):
            return carry + scale, fn(x * scale, *args)

        return lax.scan(step, jnp.float32(0), jnp.array([1.0, 0.5]))

    return transformed


def t_shard_map(fn):
    def transformed(*args):
        mesh = Mesh(np.array(jax.devices()), ("devices",))
        mapped = jax.shard_map(fn, mesh=mesh, in_specs=P(), out_specs=P())
        return mapped(*args)

    return transformed


def t_pmap(fn):
    def transformed(x, *args):
        axes = (0, *[None for _ in args])
        mapped = jax.pmap(fn, in_axes=axes, devices=jax.devices()[:1])
        return mapped(x[None], *args)

    return transformed


def t_filtered(fn):
    gradient = eqx.filter_grad(lambda args: loss(fn(*args)))
    return eqx.filter_jit(lambda *args: gradient(args))


TRANSFORMS: dict[str, Callable[[Fn], Fn]] = {
    "jit": jax.jit,
    "grad": t_grad,
    "value_and_grad": t_value_and_grad,
    "jvp": t_jvp,
    "vjp": t_vjp,
    "linearize": t_linearize,
    "hessian_product": t_hessian_product,
    "jacrev": t_jacrev,
    "vmap": t_vmap,
    "vmap_of_grad": t_vmap_of_grad,
    "remat": jax.checkpoint,
    "remat_of_grad": lambda fn: jax.checkpoint(t_grad(fn)),
    "scan": t_scan,
    "shard_map": t_shard_map,
    "pmap": t_pmap,
    "filtered": t_filtered,
}
REPRESENTATIVES = (
    "plain_twice",
    "jit_nested",
    "scan",
    "cond",
    "remat_saved_names",
    "custom_jvp",
    "custom_vjp",
)
# `jax.custom_vjp` functions have no forward derivative, so these raise without amp too.
FORWARD = ("jvp", "linearize", "hessian_product")


def names_can_be_batched() -> bool:
    """Whether `jax.vmap` takes `checkpoint_name`: not in JAX 0.10 with `jax_remat3`."""
    try:
        jax.eval_shape(jax.vmap(lambda x: checkpoint_name(x, "x")), jnp.ones(2))
    except NotImplementedError:
        return False
    return True


def raises_without_amp(transform: str, name: str) -> bool:
    if name == "custom_vjp":
        return transform in FORWARD
    return (
        name == "remat_saved_names"
        and transform in ("vmap", "vmap_of_grad")
        and not names_can_be_batched()
    )


COMBINATIONS = [
    (transform, name)
    for transform in TRANSFORMS
    for name in REPRESENTATIVES
    if not raises_without_amp(transform, name)
]


@functools.cache
def transformed_plain(transform: str, name: str) -> tuple[Any, int]:
    case = named(name)
    fn = TRANSFORMS[transform](case.build(identity))
    jaxpr = jax.make_jaxpr(fn)(*case.args())
    return quick(fn)(*case.args()), runs(jaxpr)


@pytest.mark.sample(9)
@pytest.mark.cross("transform", placement=3, dtype=2)
@every_placement
@every_dtype
@pytest.mark.parametrize(("transform", "name"), COMBINATIONS)
def test_transforms(transform, name, dtype, placement):
    case, apply = named(name), TRANSFORMS[transform]
    wrap = functools.partial(amp, compute_dtype=dtype)
    fn = case.build(identity)
    fn = apply(fn if placement == "outside" else wrap(fn))
    fn = fn if placement == "inside" else wrap(fn)
    jaxpr, out = jax.make_jaxpr(fn, return_shape=True)(*case.args())
    expected, times = transformed_plain(transform, name)
    assert set(contraction_flops(jaxpr)) == {dtype}
    assert signature(out) == signature(expected)
    if dtype == "float16" and placement != "both":  # a compilation is slow
        assert_near(quick(fn)(*case.args()), expected, dtype, times)


@every_construct
def test_eval_shape(case):
    fn = case.build(identity)
    actual = jax.eval_shape(amp(fn), *case.args())
    assert signature(actual) == signature(jax.eval_shape(fn, *case.args()))


@pytest.mark.sample(3)
@every_dtype
@pytest.mark.parametrize("name", REPRESENTATIVES)
def test_export(name, dtype):
    """The exported program is the mixed one, and amp leaves it as it is."""
    case = named(name)
    fn = jax.jit(amp(case.build(identity), compute_dtype=dtype))
    exported = export.export(fn)(*case.args())
    element = {"float16": "f16", "bfloat16": "bf16"}[dtype]
    lines = exported.mlir_module().splitlines()
    dots = [line for line in lines if "stablehlo.dot_general" in line]
    assert dots and all(line.count(f"x{element}>") == 3 for line in dots)
    expected = quick(fn)(*case.args())
    for call in (exported.call, amp(exported.call, compute_dtype=dtype)):
        assert_same_bits(quick(call)(*case.args()), expected)


def test_export_survives_its_bytes():
    case = named("remat_saved_names")
    fn = jax.jit(amp(case.build(identity)))
    exported = export.export(fn)(*case.args())
    data = exported.serialize(vjp_order=1)
    loaded = export.deserialize(data)
    assert_same_bits(loaded.call(*case.args()), fn(*case.args()))
    both = run_and_differentiate(loaded.call, case)
    expected, times = plain(case)
    assert_near(quick(both)(*case.args()), expected, "float16", times)


@pytest.mark.sample(2)
@every_dtype
@pytest.mark.parametrize("name", REPRESENTATIVES)
def test_closures_over_outer_tracers(name, dtype):
    case = named(name)
    fn = case.build(identity)

    def closed(x, *args):
        return amp(lambda x: fn(x, *args), compute_dtype=dtype)(x)

    both = run_and_differentiate(closed, case)
    assert left_behind(jax.make_jaxpr(both)(*case.args())) == []
    expected, times = plain(case)
    assert_near(quick(both)(*case.args()), expected, dtype, times)


def test_traces_once_under_jit():
    traces = []

    @jax.jit
    @amp
    def fn(x, w):
        traces.append(x.shape)
        return x @ w

    for _ in range(3):
        fn(*named("plain").args())
    assert len(traces) == 1


@pytest.mark.parametrize("name", REPRESENTATIVES)
def test_precisions_share_no_state(name):
    """The same function under several policies, in any order, with warm caches."""
    case = named(name)
    fn = case.build(identity)  # one function: its inner jits have been traced
    for dtype in ("bfloat16", "float32", "float16", "bfloat16", "float16", "float32"):
        both = run_and_differentiate(amp(fn, compute_dtype=dtype), case)
        assert set(contractions(jax.make_jaxpr(both)(*case.args()))) == {dtype}
    both = run_and_differentiate(fn, case)
    assert set(contractions(jax.make_jaxpr(both)(*case.args()))) == {"float32"}


@every_placement
def test_ordered_effects_keep_their_order(placement):
    case = named("ordered_io_callback")
    fn = place(case, placement)
    for call in (fn, jax.jit(fn)):
        constructs.SEEN.clear()
        jax.block_until_ready(call(*case.args()))
        jax.effects_barrier()
        assert constructs.SEEN == [0, 1, 2]


def test_checks_still_fail():
    def fn(x, w):
        h = x @ w
        checkify.check(jnp.all(h < -100), "too large: {}", h[0, 0])
        return h

    args = named("plain").args()
    for checked in (checkify.checkify(amp(fn)), amp(checkify.checkify(fn))):
        error, _ = jax.jit(checked)(*args)
        with pytest.raises(checkify.JaxRuntimeError, match="too large"):
            error.throw()


@pytest.mark.parametrize("index, error", [(3.0, None), (8.0, "out-of-bounds")])
def test_lookups_are_checked_in_the_checkpoints_of_amp(index, error):
    """JAX's own rule fails for a checkpoint that holds such a check."""

    def fn(w, i):
        return jnp.mean(w[i.astype(int)] @ w)

    args = jnp.eye(8), jnp.full(4, index)
    by_operand = functools.partial(jax.checkpoint, prevent_cse=(True, False))
    wraps = [amp, lambda fn: jax.checkpoint(amp(fn))]
    if jax.__version_info__ >= (0, 10):
        wraps.append(lambda fn: by_operand(amp(fn)))
    for wrap in wraps:
        gradient = jax.grad(wrap(fn))
        checked = checkify.checkify(gradient, errors=checkify.all_checks)
        found, grads = jax.jit(checked)(*args)
        assert (found.get() is None) if error is None else (error in found.get())
        if error is None:
            np.testing.assert_array_equal(grads, gradient(*args))


def test_mutated_references_outside_of_the_function():
    """A reference keeps its dtype, and what is stored in it is seen after the call."""

    @amp
    def fn(ref, x, w):
        ref[...] += x @ w
        return ref[...].sum()

    x, w = named("plain").args()
    ref = constructs.new_ref(jnp.zeros_like(x))
    fn(ref, x, w)
    jax.jit(fn)(ref, x, w)
    assert ref[...].dtype == jnp.float32
    assert_near(ref[...], 2 * (x @ w), "float16", 1)


@jax.custom_vjp
def logged(log, x):
    return x


def _logged_bwd(log, ct):
    log["cotangent"][...] = ct
    log["calls"][...] += 1
    return None, ct


logged.defvjp(lambda log, x: (x, log), _logged_bwd)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "derivative",
    (
        jax.grad,
        lambda fn: jax.jit(jax.grad(fn)),
        lambda fn: jax.grad(jax.jit(fn)),
    ),
)
@pytest.mark.parametrize("outside", (True, False))
def test_references_get_values_out_of_a_backward_pass(derivative, outside, dtype):
    """As JAX's guide to `jax.Ref` has it: a rule that writes to what it was given."""
    x, w = named("plain").args()

    def loss(w, x, log):
        return jnp.sum(logged(log, jnp.tanh(x @ w)) ** 2)

    def run(transform):
        log = {"cotangent": jnp.zeros(x.shape[:-1] + w.shape[1:]), "calls": 0.0}
        log = jax.tree.map(lambda x: constructs.new_ref(jnp.asarray(x)), log)
        grad = transform(loss)(w, x, log)
        return grad, log["cotangent"][...], log["calls"][...]

    low = functools.partial(amp, compute_dtype=dtype)
    ours = run(lambda fn: derivative(low(fn)) if outside else low(derivative(fn)))
    grad, cotangent, calls = run(derivative)
    assert calls == ours[2] == 1
    assert_near(ours[0], grad, dtype, 3)
    assert_near(ours[1], cotangent, dtype, 3)


@pytest.mark.parametrize("differentiated", ("no", "outside", "inside"))
def test_calls_may_be_nested_as_deep_as_without_amp(differentiated):
    """Python has a thousand frames, and JAX's tracing takes nine for each call."""

    def fn(w, x):
        return jnp.sum(x @ w)

    for _ in range(64):
        fn = jax.jit(lambda w, x, inner=fn: inner(w, x) * 1.0)
    low = functools.partial(amp, compute_dtype="bfloat16")
    step = {
        "no": low(fn),
        "outside": jax.grad(low(fn)),
        "inside": low(jax.grad(fn)),
    }[differentiated]
    jaxpr = jax.make_jaxpr(step)(jnp.eye(3), jnp.ones((2, 3)))
    dots = [e for e, _ in walk(jaxpr) if e.primitive.name in CONTRACTIONS]
    assert dots and {operand_dtype(eqn) for eqn in dots} == {"bfloat16"}


@pytest.mark.parametrize("loop", ["while", "scan"])
def test_what_leaves_a_loop_is_not_rounded_with_its_carry(loop):
    """Every step reads the carry low; the last result is 0.3 to its last bit."""
    w, z = 50 * jnp.eye(3), jnp.ones((3, 3))

    def step(z):
        return 0.3 * jnp.tanh(z @ w)

    def fn(z):
        if loop == "scan":
            return lax.scan(lambda z, _: (step(z), None), z, None, length=3)[0]
        return lax.while_loop(
            lambda c: c[0] < 3, lambda c: (c[0] + 1, step(c[1])), (0, z)
        )[1]

    np.testing.assert_array_equal(amp(fn, compute_dtype="float16")(z), fn(z))


def test_what_enters_a_loop_is_not_rounded_with_its_carry():
    """It may leave the loop as it came, and the first step may read it in full."""
    x, w = jnp.full((3, 3), 1.2345678), jnp.eye(3)

    def looped(n, x):
        return lax.fori_loop(0, n, lambda _, x: x @ w, x)

    def scanned(x):
        return lax.scan(lambda x, _: (x @ w, jnp.sin(x)), x, None, length=2)[1][0]

    np.testing.assert_array_equal(amp(looped, compute_dtype="bfloat16")(0, x), x)
    np.testing.assert_array_equal(amp(scanned, compute_dtype="bfloat16")(x), scanned(x))


@pytest.mark.parametrize("around", ["nothing", "vmap", "scan", "remat", "jit"])
def test_a_backward_rule_holds_inside_any_transform(around):
    """A gradient through a batch, or a loop, of what `amp` has made of a rule."""

    @jax.custom_vjp
    def twice(x):
        return x

    twice.defvjp(lambda x: (x, None), lambda _, ct: (2 * ct,))
    fn = amp(twice, compute_dtype="bfloat16")
    wrapped = {
        "nothing": fn,
        "vmap": jax.vmap(fn),
        "scan": lambda x: lax.scan(lambda c, x: (c, fn(x)), 0, x)[1],
        "remat": jax.checkpoint(fn),
        "jit": jax.jit(fn),
    }[around]
    grad = jax.grad(lambda x: wrapped(x).sum())(jnp.ones((2, 3)))
    np.testing.assert_array_equal(grad, 2 * jnp.ones((2, 3)))
