"""Global settings are not the author's voice: what is low and what is full is decided
alike under each of them, and what stays as written is computed as they say."""

import functools
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from benchmarks.measure import operand_dtype, walk
from jaxamp_like import amp, amp_stop, explain
from jaxamp_like._primitives import CONTRACTIONS as COMPUTE
from jaxamp_like._primitives.matmul_precision import CONTRACTIONS
from jaxamp_like.rules import (
    saving_low,
    use_original_precision,
    use_precision_by_pass,
    wide,
)

from .constructs import CONSTRUCTS, identity
from .fuzz.runtime import with_backward
from .test_structure import is_contraction, left_behind, run_and_differentiate

pytestmark = pytest.mark.sample(5)

HIGHEST = (lax.Precision.HIGHEST, lax.Precision.HIGHEST)
DEFAULT = (lax.Precision.DEFAULT, lax.Precision.DEFAULT)
bf16 = functools.partial(amp, compute_dtype="bfloat16", strict=True)
w = x = jnp.eye(4)


every_construct = pytest.mark.parametrize("case", CONSTRUCTS, ids=str)


def precisions(fn, *args):
    """How many contractions there are in each dtype and `precision`."""
    return Counter(
        (operand_dtype(eqn), eqn.params["precision"])
        for eqn, _ in walk(jax.make_jaxpr(fn)(*args))
        if is_contraction(eqn)
    )


def by_dtype(counts):
    return Counter(dtype for dtype, _ in counts.elements())


def test_all_contractions_are_known_to_have_a_precision():
    assert CONTRACTIONS == COMPUTE


@pytest.mark.sample(6)
@every_construct
def test_what_is_low_does_not_depend_on_the_matmul_precision(case):
    fn = run_and_differentiate(case.build(bf16), case)
    before = precisions(fn, *case.args())
    with jax.default_matmul_precision("highest"):
        set_to = precisions(fn, *case.args())
    assert by_dtype(set_to) == by_dtype(before)
    assert precisions(fn, *case.args()) == before  # whatever was cached in between
    for (dtype, precision), count in set_to.items():
        assert precision == (DEFAULT if dtype == "bfloat16" else HIGHEST), count


@pytest.mark.sample(2)
@pytest.mark.cross("case", policy=2)
@pytest.mark.parametrize("policy", ({}, {"amp_default": use_original_precision}))
@every_construct
def test_what_stays_as_written_has_the_matmul_precision(case, policy):
    """Also in what is bound as it stands: nothing is less precise than it was."""
    with jax.default_matmul_precision("highest"):
        fn = run_and_differentiate(case.build(identity), case)
        written = precisions(fn, *case.args())
        fn = run_and_differentiate(amp(case.build(identity), amp_policy=policy), case)
        assert precisions(fn, *case.args()) == written


@pytest.mark.parametrize("inner", (jax.jit, jax.checkpoint, identity))
def test_stopped_programs_have_the_matmul_precision(inner):
    def stopped(w, x):
        return jnp.sum(amp_stop(inner(lambda w, x: jnp.tanh(x @ w) @ w))(w, x))

    with jax.default_matmul_precision("highest"):
        assert set(precisions(jax.grad(bf16(stopped)), w, x)) == {("float32", HIGHEST)}
    assert set(precisions(jax.grad(bf16(stopped)), w, x)) == {("float32", None)}


@jax.custom_jvp
def by_jvp(w, x):
    return jnp.tanh(x @ w)


by_jvp.defjvp(lambda xs, ts: (by_jvp(*xs), ts[1] @ xs[0] + xs[1] @ ts[0]))


@jax.custom_vjp
def by_vjp(w, x):
    return jnp.tanh(x @ w)


by_vjp.defvjp(
    lambda w, x: (jnp.tanh(x @ w), (w, x)), lambda wx, g: (wx[1].T @ g, g @ wx[0].T)
)


@pytest.mark.parametrize("rule", (by_jvp, by_vjp))
def test_a_rule_that_is_stopped_in_one_place_and_not_in_another(rule):
    """JAX remembers one trace of it, for all places where a function is called."""

    def both(value):
        fn = jax.jit(lambda w, x: rule(w, x))

        def loss(w, x):
            return jnp.sum(amp_stop(fn)(w, x) * fn(w, x))

        with jax.default_matmul_precision(value):
            return precisions(jax.grad(bf16(loss), (0, 1)), w, x)

    assert both(None) == {("bfloat16", DEFAULT): 3, ("float32", None): 3}
    assert both("highest") == {("bfloat16", DEFAULT): 3, ("float32", HIGHEST): 3}


def test_the_author_is_heard():
    def careful(w, x):
        x = lax.dot(x, w, precision="highest")
        with jax.default_matmul_precision("high"):
            x = x @ w
        return jnp.sum(x @ w)

    high = (lax.Precision.HIGH, lax.Precision.HIGH)
    for value in (None, "highest", "tensorfloat32"):
        with jax.default_matmul_precision(value):
            assert precisions(bf16(careful), w, x) == {
                ("float32", HIGHEST): 1,
                ("float32", high): 1,
                ("bfloat16", DEFAULT): 1,
            }


def test_a_dot_algorithm_as_the_setting_is_not_for_lowered_operands():
    preset = lax.DotAlgorithmPreset.F32_F32_F32

    def mixed(w, x):
        return jnp.sum(jnp.tanh(x @ w) @ amp_stop(jnp.dot)(w, w))

    fn = jax.grad(bf16(mixed), (0, 1))
    with jax.default_matmul_precision("F32_F32_F32"):
        counts = precisions(fn, w, x)
        assert set(counts) == {("float32", preset), ("bfloat16", DEFAULT)}
        jax.block_until_ready(jax.jit(fn)(w, x))


@pytest.mark.parametrize("setting", ("highest", None))
def test_amp_within_amp(setting):
    inner = amp(jnp.dot, compute_dtype="float16", amp_policy={"amp_default": "float16"})
    kept = amp(jnp.dot, compute_dtype="float16", amp_policy={"amp_default": "float32"})

    def fn(w, x):
        return jnp.sum(kept(inner(x, w), w) @ w)

    full = None if setting is None else HIGHEST
    with jax.default_matmul_precision(setting):
        counts = precisions(jax.grad(bf16(fn)), w, x)
        assert {key for key in counts if key[0] != "bfloat16"} == {
            ("float16", DEFAULT),
            ("float32", full),
        }
        assert set(precisions(bf16(jax.grad(fn)), w, x)) == set(counts)


def test_rules_that_bind_by_themselves():
    def callback(compute_dtype, original_dtypes, *invars, **bind_params):
        assert bind_params["precision"] is None
        return invars, bind_params

    def loss(w, x):
        return jnp.sum(jnp.tanh(x @ w))

    dot = lax.dot_general_p
    by_pass = use_precision_by_pass(weight_gradient="float32")
    with jax.default_matmul_precision("highest"):
        for rule, expected in (
            (callback, {("float32", HIGHEST): 2}),
            (saving_low("float32"), {("float32", HIGHEST): 2}),
            (by_pass, {("bfloat16", DEFAULT): 1, ("float32", HIGHEST): 1}),
            (use_precision_by_pass(weight_gradient=wide()), {("bfloat16", DEFAULT): 2}),
        ):
            fn = jax.grad(bf16(loss, amp_policy={dot: rule}))
            # Without what is traced and then not used.
            counts = precisions(lambda *args, fn=fn: jax.jit(fn)(*args), w, x)
            assert set(counts) == set(expected), rule


def test_rules_of_derivatives_that_are_traced_later():
    layer = with_backward(lambda w, x: x @ w, lambda w, x, ct: (x.T @ ct, ct @ w.T))
    gradient = jax.jit(jax.grad(bf16(lambda w, x: jnp.sum(layer(w, x) ** 2)), (0, 1)))
    with jax.default_matmul_precision("highest"):
        assert set(precisions(gradient, w, x)) == {("bfloat16", DEFAULT)}


def test_a_setting_that_changes_before_the_backward_pass():
    out, vjp = jax.vjp(bf16(lambda w: jnp.sum(jnp.tanh(x @ w) @ w)), w)
    with jax.default_matmul_precision("F32_F32_F32"):
        assert set(precisions(vjp, out)) == {("bfloat16", DEFAULT)}


def test_reports_decide_alike():
    def loss(w, x):
        return jnp.sum(jnp.tanh(x @ w) @ w)

    with jax.default_matmul_precision("highest"):
        report = explain(jax.grad(bf16(loss)))(w, x)
        assert report.now.totals.low_share == 1.0
        assert report.written.totals.low_share == 0.0


def test_float32_code_is_decided_alike_with_x64():
    def loss(w, x):
        return jnp.sum(jnp.tanh(2.0 * (x @ w) + jnp.arange(4.0, dtype=w.dtype)) @ w)

    def reads(fn):
        eqns = (eqn for eqn, _ in walk(jax.make_jaxpr(fn)(w, x)))
        dtypes = [
            (eqn.primitive.name, *(str(v.aval.dtype) for v in eqn.invars))
            for eqn in eqns
        ]
        return [d for d in dtypes if not any("int" in name for name in d)]

    fn = jax.value_and_grad(bf16(loss))
    before = reads(fn)
    with jax.enable_x64() if hasattr(jax, "enable_x64") else _x64():
        assert reads(fn) == before
        assert not left_behind(jax.make_jaxpr(fn)(w, x))


def _x64():
    from jax.experimental import enable_x64

    return enable_x64()


def test_the_default_device_is_kept():
    device = jax.devices()[1]

    def fn():
        w = jnp.eye(4)
        return w @ w + jnp.arange(4.0)

    with jax.default_device(device):
        assert fn().devices() == bf16(fn)().devices() == {device}
        assert jax.jit(bf16(fn))().devices() == {device}
