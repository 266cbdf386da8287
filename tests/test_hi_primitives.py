"""Whichever way JAX writes a checkpoint or a derivative rule, amp makes the same of it.

Under its flags, JAX writes them as hi-primitives: equations of one primitive, whose
only parameter is an object. Users can write classes of such objects, too."""

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import io_callback

from benchmarks.measure import casts, walk
from jaxamp_like import AmpError, amp, amp_stop, explain
from jaxamp_like._jax import raw, to_classic

from .constructs import CONSTRUCTS, arrays
from .hi_primitives import FLAGS, flags, unknown
from .test_structure import (
    assert_same_bits,
    contractions,
    loss,
    place,
    quick,
    run_and_differentiate,
)

hijax: Any = pytest.importorskip("jax.experimental.hijax")

if unknown(FLAGS[:1]):
    pytest.skip("this JAX has no flag for hi-primitives", allow_module_level=True)

# Before, some programs fail as they are written, and checkpoints keep other values.
needs_whole_flags = pytest.mark.skipif(
    jax.__version_info__ < (0, 12), reason="before JAX 0.12 the flags are not finished"
)


def hi_classes(jaxpr: Any) -> Counter[str]:
    """How many hi-primitives of each class a program holds."""
    eqns = [eqn for eqn, _ in walk(jaxpr)]
    objects = [
        e.params["_prim"] for e in eqns if e.primitive.name.startswith("call_hi")
    ]
    return Counter(type(hi).__name__ for hi in objects)


@pytest.fixture(params=[*((flag,) for flag in FLAGS), FLAGS], ids="+".join)
def flagged(request):
    """The flags of a run; one that this JAX does not have is skipped by its name."""
    if missing := unknown(request.param):
        pytest.skip(f"this JAX has no flag {', '.join(missing)}")
    return request.param


# The new checkpoint's policy is not asked of what stands in a checkpoint of the old
# kind, as `amp` makes one for each contraction: computed again (docs/limits.md).
_COMPUTED_AGAIN = {("remat_dots_saveable", "inside")}


@needs_whole_flags
@pytest.mark.sample(4)
@pytest.mark.parametrize("placement", ["inside", "outside"])
@pytest.mark.parametrize("case", CONSTRUCTS, ids=str)
def test_flags_change_nothing(case, placement, flagged):
    """Contractions, casts, and results and gradients to the bit, are the same.

    Under `jax_custom_jvp3`, JAX makes a cast of zeros where a tangent is not read."""

    def made() -> tuple[Any, Any]:
        fn = run_and_differentiate(place(case, placement), case)
        traced = quick(fn).trace(*case.args())
        counts: tuple[Any, ...] = (contractions(traced.jaxpr),)
        if "jax_custom_jvp3" not in flagged:
            counts = (*counts, casts(traced.jaxpr))
        return counts, traced.lower().compile()(*case.args())

    with flags():
        counts, results = made()
    with flags(*flagged):
        flagged_counts, flagged_results = made()
    if "jax_remat3" not in flagged or (case.name, placement) not in _COMPUTED_AGAIN:
        assert flagged_counts == counts
    assert_same_bits(flagged_results, results)


@needs_whole_flags
def test_second_derivatives_are_those_without_flags(flagged):
    """A low copy that two contractions read has a derivative of its own."""

    def loss(w, x):
        q = x @ w
        return jnp.sum(q @ q.T)

    def second():
        mixed = amp(loss, compute_dtype="bfloat16")
        return jax.hessian(mixed)(jnp.ones((2, 2)), jnp.eye(2))

    with flags():
        expected = second()
    with flags(*flagged):
        found = second()
    assert_same_bits(found, expected)
    assert (jnp.diag(found.reshape(4, 4)) == 2).all()


def net(x, w):
    return jnp.tanh(jax.nn.gelu(x @ w) @ w.T)


@jax.custom_vjp
def ruled(x, w):
    return jnp.sin(x @ w)


def _forward(x, w):
    return jnp.sin(x @ w), (x, w)


def _backward(residuals, ct):
    x, w = residuals
    ct = ct * jnp.cos(x @ w)
    return ct @ w.T, x.T @ ct


ruled.defvjp(_forward, _backward)


@jax.custom_jvp
def ruled_forward(x, w):
    return jnp.tanh(x @ w)


@ruled_forward.defjvp
def _(primals, tangents):
    (x, w), (dx, dw) = primals, tangents
    y = jnp.tanh(x @ w)
    return y, (1 - y * y) * (dx @ w + x @ dw)


def named(x, w):
    return jnp.sin(checkpoint_name(x @ w, "kept")) @ w


PROGRAMS = {
    "checkpoint": jax.checkpoint(net),
    "without_prevent_cse": jax.checkpoint(net, prevent_cse=False),
    "policy": jax.checkpoint(
        named, policy=jax.checkpoint_policies.save_only_these_names("kept")
    ),
    "custom_vjp": ruled,
    "custom_jvp": ruled_forward,
    "checkpointed_rule": jax.checkpoint(ruled),
    "scanned": lambda x, w: lax.scan(
        lambda h, _: (jax.checkpoint(net)(h, w), None), x, length=3
    )[0],
}


@needs_whole_flags
@pytest.mark.parametrize("program", PROGRAMS)
def test_as_much_is_kept_and_cast(program, flagged):
    """The same bytes for the backward pass, the same casts, and the same report."""

    def made() -> tuple[Any, ...]:
        fn = amp(PROGRAMS[program], compute_dtype="bfloat16")
        x, w = arrays("x", "w")
        residuals = jax.tree.leaves(jax.vjp(fn, x, w)[1])
        kept = sum(leaf.nbytes for leaf in {id(x): x for x in residuals}.values())
        report = explain(fn, argnums=(0, 1))(x, w)
        ops = [(op.primitive, op.place.phase, op.dtype) for op in report.now.ops]
        saved = sum(one.num_bytes for one in report.now.saved)
        return kept, casts(jax.make_jaxpr(fn)(x, w)), Counter(ops), saved

    with flags():
        expected = made()
    with flags(*flagged):
        assert made() == expected


@needs_whole_flags
def test_a_rule_that_runs_its_function_reads_no_more_of_it():
    """The rule of `relu` reads the sign alone, so `relu` takes what is cast down."""

    def affine(x, w):
        return jax.nn.relu((x @ w) * w.sum(0)) @ w

    def operands() -> list[str]:
        jaxpr = jax.make_jaxpr(amp(affine, compute_dtype="bfloat16"))(*arrays("x", "w"))
        rules = [e for e, _ in walk(to_classic(jaxpr)) if "call_jaxpr" in e.params]
        return [str(v.aval.dtype) for v in rules[-1].invars]

    with flags():
        assert operands() == ["bfloat16"]
    with flags("jax_custom_jvp3"):
        assert operands() == ["bfloat16"]


@needs_whole_flags
def test_the_authors_hi_primitives_are_hi_primitives_again():
    """JAX's transforms find in a rewritten program what they know."""
    x, w = arrays("x", "w")
    with flags(*FLAGS):
        for name, fn in PROGRAMS.items():
            written = hi_classes(jax.make_jaxpr(fn)(x, w))
            made = hi_classes(jax.make_jaxpr(amp(fn))(x, w))
            # A derivative rule is rewritten when it is run: amp makes a rule around it.
            assert made == written, name


def test_a_policy_that_changes_nothing():
    """Under `amp_stop`, results and gradients are the author's to the bit."""
    x, w = arrays("x", "w")
    with flags(*FLAGS):
        for fn in PROGRAMS.values():
            stopped = amp(amp_stop(fn))
            assert_same_bits(
                jax.jit(jax.grad(lambda x, w, fn=stopped: loss(fn(x, w))))(x, w),
                jax.jit(jax.grad(lambda x, w, fn=fn: loss(fn(x, w))))(x, w),
            )


# Classes that users write.

Base: Any = getattr(hijax, "HiPrim", None) or getattr(hijax, "VJPHiPrimitive", None)


class Product(Base):
    """A layer as a class, without rules of its own."""

    def __init__(self, x, w):
        self.in_avals = (jax.typeof(x), jax.typeof(w))
        self.out_aval = jax.typeof(jax.eval_shape(self.expand, x, w))
        self.params = {}
        super().__init__()

    def expand(self, x, w):
        return jnp.tanh(x @ w)


class Backward(Product):
    """With a rule for the backward pass, which is three times the derivative."""

    def vjp_fwd(self, nzs_in, x, w):
        return self(x, w), (x, w)

    def vjp_bwd_retval(self, residuals, ct):
        x, w = residuals
        ct = 3 * ct * (1 - jnp.tanh(x @ w) ** 2)
        return ct @ w.T, x.T @ ct


class Forward(Product):
    """With a rule for the forward pass, which is twice the derivative."""

    def jvp(self, primals, tangents):
        moved = [t for t in map(hijax.instantiate_zeros, tangents)]
        (x, w), (dx, dw) = primals, moved
        y = jnp.tanh(x @ w)
        return self(x, w), 2 * (1 - y * y) * (dx @ w + x @ dw)

    if hasattr(hijax, "linearize_from_jvp"):
        lin, linearized = hijax.linearize_from_jvp
        vjp_fwd, vjp_bwd_retval = hijax.vjp_from_jvp


class Both(Backward):
    """With rules for both, which no classic primitive can hold."""

    def jvp(self, primals, tangents):
        raise AssertionError("not used")


class Closed(Product):
    """One whose meaning can't be traced: it computes with NumPy."""

    def __init__(self, x, w):
        self.in_avals = (jax.typeof(x), jax.typeof(w))
        self.out_aval = jax.typeof(x)
        self.params = {}
        Base.__init__(self)

    def expand(self, x, w):
        return jnp.asarray(np.tanh(np.asarray(x) @ np.asarray(w)))


class Effectful(Product):
    """With an ordered effect."""

    def __init__(self, x, w):
        self.effects = frozenset(jax.make_jaxpr(self.expand)(x, w).effects)
        super().__init__(x, w)

    def expand(self, x, w):
        io_callback(lambda x: None, None, x, ordered=True)
        return jnp.tanh(x @ w)


class Transposed(Product):
    """With a rule for transposition."""

    def transpose(self, ct, *operands):
        raise AssertionError("not used")


class Tracing(Product):
    """With fields of the names that JAX's own classes have, of another meaning."""

    def __init__(self, x, w):
        self.traced = jax.jit(lambda x, w: x).trace(x, w)
        self.with_logs = "yes"
        super().__init__(x, w)


class Linear(Product):
    """With a rule for linearisation, from which only the backward pass is derived."""

    def lin(self, nzs_in, x, w):
        y = jnp.tanh(x @ w)
        return y, (x, w, y)

    def linearized(self, residuals, *tangents):
        x, w, y = residuals
        dx, dw = map(hijax.instantiate_zeros, tangents)
        return 4 * (1 - y * y) * (dx @ w + x @ dw)

    if hasattr(hijax, "vjp_from_lin"):
        vjp_fwd, vjp_bwd_retval = hijax.vjp_from_lin


DERIVES_RULES = hasattr(hijax, "vjp_from_lin")


def call(cls):
    return lambda x, w: cls(x, w)(x, w) @ w


@pytest.mark.parametrize(
    "cls", [Product, Tracing, Backward, Forward, Linear], ids=lambda c: c.__name__
)
def test_classes_of_users_are_opened(cls):
    """What the class expands to is low, and its own rule is what differentiates it."""
    x, w = arrays("x", "w")
    fn = amp(call(cls), compute_dtype="bfloat16")
    assert set(contractions(to_classic(jax.make_jaxpr(fn)(x, w)))) == {"bfloat16"}
    np.testing.assert_allclose(fn(x, w), call(Product)(x, w), atol=0.05)
    if cls in (Product, Tracing) or (cls is not Backward and not DERIVES_RULES):
        return  # JAX has no derivative of it, with amp or without
    factor = {Backward: 3, Forward: 2, Linear: 4}[cls]

    def plain(x, w):
        return loss(jnp.tanh(x @ w) @ w)

    inner = jax.grad(plain)(x, w)
    for grad in (
        jax.grad(lambda x, w: loss(fn(x, w))),
        amp(jax.grad(lambda x, w: loss(call(cls)(x, w))), compute_dtype="bfloat16"),
    ):
        count = contractions(to_classic(jax.make_jaxpr(grad)(x, w)))
        assert set(count) == {"bfloat16"}
        np.testing.assert_allclose(grad(x, w), factor * inner, atol=0.1)


@pytest.mark.parametrize(
    "cls", [Both, Closed, Effectful, Transposed], ids=lambda c: c.__name__
)
def test_what_cannot_be_opened_is_told_of(cls):
    """A warning names the class and the line; with `strict` it is an error."""
    x, w = arrays("x", "w")
    name = cls.__name__
    told = rf"(?s){name}.*can't be opened.*test_hi_prim"
    with pytest.warns(UserWarning, match=told):
        out = amp(call(cls))(x, w)
    np.testing.assert_allclose(out, call(Product)(x, w), atol=0.05)
    with pytest.raises(AmpError, match=rf"{name}.*can't be opened"):
        amp(call(cls), strict=True)(x, w)
    with jax.default_matmul_precision("highest"):
        with pytest.raises(AmpError, match=rf"{name}.*hides its program"):
            amp(lambda x, w: amp_stop(cls(x, w))(x, w), strict=True)(x, w)
    # That it is meant can be said.
    amp(lambda x, w: amp_stop(cls(x, w))(x, w) @ w, strict=True)(x, w)


def test_programs_are_shown_without_being_changed():
    """What is shown is a copy, and one without hi-primitives is the same program."""
    x, w = arrays("x", "w")
    with flags():
        classic = jax.make_jaxpr(jax.checkpoint(net))(x, w)
    assert to_classic(classic) is classic
    with flags(*FLAGS):
        program = jax.make_jaxpr(jax.checkpoint(net))(x, w)
    names = [eqn.primitive.name for eqn in raw(program).eqns]
    assert names == ["call_hi_primitive"]
    assert raw(to_classic(program)).eqns[0].primitive is raw(classic).eqns[0].primitive
    assert [eqn.primitive.name for eqn in raw(program).eqns] == names
    assert to_classic(program) is to_classic(program)
