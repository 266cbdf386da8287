"""`when` and its predicates: which rule is picked, for which equation."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax

from benchmarks.measure import walk
from jaxamp_like import AmpError, amp, default_amp_policy
from jaxamp_like._rules import Demand, Site
from jaxamp_like._rules.conditions import (
    not_divisible_by,
    param_is,
    smaller_than,
    sums_more_than,
    when,
)
from jaxamp_like.rules import (
    follow_inputs,
    use_compute_precision,
    use_original_precision,
)

LOW, F32 = "bfloat16", "float32"


def struct(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def picked(primitive: Any, predicate: Any, fn: Callable[..., Any], *args: Any) -> bool:
    """Whether the rule is picked: it computes in full, and the other one low."""
    policy = {primitive: when(predicate, use_original_precision, use_compute_precision)}
    amped = amp(fn, compute_dtype=LOW, amp_policy=policy)
    jaxpr = jax.make_jaxpr(amped)(*args)
    (dtype,) = {
        eqn.invars[0].aval.dtype.name
        for eqn, _ in walk(jaxpr)
        if eqn.primitive is primitive
    }
    return dtype == F32


def dot(x, y):
    return x @ y


def conv(x, y):
    return lax.conv(x, y, (1, 1), "SAME")


def grouped_conv(x, y):
    return lax.conv_general_dilated(x, y, (1, 1), "SAME", feature_group_count=4)


def ragged(x, y):
    return lax.ragged_dot(x, y, jnp.array([2, 6], jnp.int32))


# How many terms each element of the result sums.
TERMS: dict[str, tuple[Any, Callable[..., Any], tuple[Any, ...], int]] = {
    "matrix": (lax.dot_general_p, dot, (struct(3, 16), struct(16, 5)), 16),
    "batched": (lax.dot_general_p, dot, (struct(7, 3, 16), struct(7, 16, 5)), 16),
    "two axes": (
        lax.dot_general_p,
        lambda x, y: jnp.einsum("abc,bcd->ad", x, y),
        (struct(3, 2, 8), struct(2, 8, 5)),
        16,
    ),
    "conv": (
        lax.conv_general_dilated_p,
        conv,
        (struct(1, 4, 9, 9), struct(6, 4, 3, 3)),
        36,
    ),
    "grouped conv": (
        lax.conv_general_dilated_p,
        grouped_conv,
        (struct(1, 8, 9, 9), struct(12, 2, 3, 3)),
        18,
    ),
    "sum": (lax.reduce_sum_p, lambda x: jnp.sum(x, (0, 2)), (struct(2, 3, 8),), 16),
    "prod": (lax.reduce_prod_p, lambda x: jnp.prod(x, 1), (struct(2, 16),), 16),
    "cumsum": (lax.cumsum_p, lambda x: lax.cumsum(x, 1), (struct(2, 16),), 16),
    "pooling": (
        lax.reduce_window_sum_p,
        lambda x: lax.reduce_window(x, 0.0, lax.add, (4, 4), (4, 4), "VALID"),
        (struct(8, 8),),
        16,
    ),
}


@pytest.mark.parametrize("case", TERMS.values(), ids=TERMS)
def test_sums_more_than(case):
    primitive, fn, args, terms = case
    assert not picked(primitive, sums_more_than(terms), fn, *args)
    assert picked(primitive, sums_more_than(terms - 1), fn, *args)


def test_what_sums_nothing_has_no_length():
    assert not picked(lax.tanh_p, sums_more_than(1), jnp.tanh, struct(100))
    assert not picked(lax.reduce_max_p, sums_more_than(1), jnp.max, struct(100))


def test_ragged_contractions():
    args = struct(8, 16), struct(2, 16, 8)
    primitives = {e.primitive for e, _ in walk(jax.make_jaxpr(ragged)(*args))}
    (primitive,) = (p for p in primitives if p.name == "ragged_dot_general")
    assert not picked(primitive, sums_more_than(16), ragged, *args)
    assert picked(primitive, sums_more_than(15), ragged, *args)
    assert not picked(primitive, not_divisible_by(8), ragged, *args)
    odd = struct(8, 16), struct(2, 16, 9)
    assert picked(primitive, not_divisible_by(8), ragged, *odd)


def test_smaller_than():
    args = struct(4, 2), struct(2, 8)  # the result is the largest: 32
    assert picked(lax.dot_general_p, smaller_than(33), dot, *args)
    assert not picked(lax.dot_general_p, smaller_than(32), dot, *args)
    assert not picked(lax.reduce_sum_p, smaller_than(32), jnp.sum, struct(32))


@pytest.mark.parametrize(
    ("shapes", "divisible"),
    [
        (((8, 16), (16, 24)), True),
        (((3, 8, 16), (3, 16, 8)), True),  # batches are no sides
        (((7, 16), (16, 24)), False),
        (((8, 15), (15, 24)), False),
        (((8, 16), (16, 23)), False),
        (((16,), (16, 8)), False),  # one row
    ],
)
def test_not_divisible_by(shapes, divisible):
    args = [struct(*shape) for shape in shapes]
    assert picked(lax.dot_general_p, not_divisible_by(8), dot, *args) != divisible


@pytest.mark.parametrize(
    ("into", "out", "divisible"), [(8, 16, True), (3, 16, False), (8, 10, False)]
)
def test_channels_not_divisible_by(into, out, divisible):
    args = struct(1, into, 9, 9), struct(out, into, 3, 3)
    primitive = lax.conv_general_dilated_p
    assert picked(primitive, not_divisible_by(8), conv, *args) != divisible


def test_ops_without_sides_are_never_indivisible():
    assert not picked(lax.tanh_p, not_divisible_by(8), jnp.tanh, struct(7))


def test_symbolic_dimensions_are_long_large_and_divisible():
    n, m = export.symbolic_shape("n, m")
    x = jax.ShapeDtypeStruct((4, n), jnp.float32)
    y = jax.ShapeDtypeStruct((n, m), jnp.float32)

    def is_low(predicate):
        rule = when(predicate, use_original_precision, use_compute_precision)
        policy = {lax.dot_general_p: rule}
        exported = export.export(
            jax.jit(amp(dot, compute_dtype=LOW, amp_policy=policy))
        )
        return "bf16" in exported(x, y).mlir_module()

    assert not is_low(sums_more_than(10**9))
    assert is_low(smaller_than(10**9))
    assert is_low(not_divisible_by(4))
    assert not is_low(not_divisible_by(8))  # there are 4 rows


def test_param_is():
    def cube(x):
        return lax.integer_pow(x, 3)

    assert picked(lax.integer_pow_p, param_is("y", 3), cube, struct(4))
    assert picked(lax.integer_pow_p, param_is("y", 2, 3), cube, struct(4))
    assert not picked(lax.integer_pow_p, param_is("y", 2), cube, struct(4))


def test_a_parameter_that_the_primitive_does_not_have():
    with pytest.raises(AmpError, match=r"no parameter 'axis'.*Did you mean 'axes'"):
        picked(lax.reduce_max_p, param_is("axis", 0), jnp.max, struct(4))


def test_under_a_scope_ops_without_the_parameter_are_passed_over():
    def fn(x):
        with jax.named_scope("norm"):
            return jnp.tanh(x) * lax.integer_pow(x, 3)

    rule = when(param_is("y", 3), "float32", LOW)
    jaxpr = jax.make_jaxpr(amp(fn, compute_dtype=LOW, amp_policy={"norm": rule}))
    dtypes = {
        eqn.primitive.name: eqn.invars[0].aval.dtype.name
        for eqn, _ in walk(jaxpr(struct(4)))
    }
    assert dtypes["integer_pow"] == F32
    assert dtypes["tanh"] == dtypes["mul"] == LOW


# Predicates of one's own.


def test_what_a_predicate_sees():
    seen: list[Site] = []

    def look(site: Site) -> bool:
        seen.append(site)
        return np.bool_(True)  # as good as a bool

    def fn(x, w):
        with jax.named_scope("net"), jax.named_scope("layer"):
            return x @ w

    assert picked(lax.dot_general_p, look, fn, struct(2, 3), struct(3, 4))
    (site,) = seen
    assert site.primitive is lax.dot_general_p
    assert site.scope == ("net", "layer")
    assert site.params["dimension_numbers"] == (((1,), (0,)), ((), ()))
    assert [aval.shape for aval in site.avals] == [(2, 3), (3, 4)]
    assert [aval.shape for aval in site.out_avals] == [(2, 4)]
    assert site.authors == (jnp.float32, jnp.float32)
    assert site.compute_dtype == jnp.bfloat16


def returns_none(site):
    return None


def returns_an_array(site):
    return jnp.array(True)


def divides_by_zero(site):
    return 1 / 0


@pytest.mark.parametrize(
    ("predicate", "what"),
    [
        (returns_none, "`returns_none` .* must return a bool, but returned NoneType"),
        (returns_an_array, "`returns_an_array` .* must return a bool"),
        (divides_by_zero, "`divides_by_zero` .* failed. ZeroDivisionError: division"),
    ],
)
def test_predicates_that_fail(predicate, what):
    def fn(x, w):
        with jax.named_scope("net"), jax.named_scope("layer"):
            return x @ w

    with pytest.raises(AmpError, match=what) as error:
        picked(lax.dot_general_p, predicate, fn, struct(2, 2), struct(2, 2))
    assert "`dot_general` in scope 'net/layer'" in str(error.value)
    assert "test_conditions.py" in str(error.value)


def test_the_exception_of_a_predicate_is_kept():
    with pytest.raises(AmpError) as error:
        picked(lax.tanh_p, divides_by_zero, jnp.tanh, struct(2))
    causes = []
    cause: BaseException | None = error.value
    while cause := cause and cause.__cause__:
        causes.append(type(cause))
    assert ZeroDivisionError in causes


# The rule.


def test_conditions_are_equal_by_value():
    def rule(terms):
        return when(sums_more_than(terms), "float32", use_compute_precision)

    assert rule(8) == rule(8)
    assert hash(rule(8)) == hash(rule(8))
    assert rule(8) != rule(9)


def test_rules_may_be_dtypes_and_callbacks():
    def careful(compute_dtype, dtypes, *invars, **params):
        return [x.astype(jnp.float16) for x in invars], params

    rule = when(sums_more_than(8), careful, "float32")
    policy = {lax.reduce_sum_p: rule}

    def fn(x):
        return jnp.sum(x, 0), jnp.sum(x, 1)

    jaxpr = jax.make_jaxpr(amp(fn, compute_dtype=LOW, amp_policy=policy))(struct(16, 8))
    dtypes = [
        eqn.invars[0].aval.dtype.name
        for eqn, _ in walk(jaxpr)
        if eqn.primitive is lax.reduce_sum_p
    ]
    assert dtypes == ["float16", "float32"]


def test_conditions_nest():
    inner = when(sums_more_than(32), "float32", "float16")
    rule = when(sums_more_than(8), inner, "bfloat16")
    policy = {lax.dot_general_p: rule}
    amped = amp(dot, compute_dtype="float16", amp_policy=policy)

    def dtype(n):
        (eqn,) = (
            eqn
            for eqn, _ in walk(jax.make_jaxpr(amped)(struct(4, n), struct(n, 4)))
            if eqn.primitive is lax.dot_general_p
        )
        return eqn.invars[0].aval.dtype.name

    assert [dtype(n) for n in (8, 32, 33)] == ["bfloat16", "float16", "float32"]


def test_each_of_several_equations_is_asked():
    def fn(x, w, v):
        y = jnp.tanh(x @ w)
        return y @ v

    rule = when(sums_more_than(16), "float32", use_compute_precision)
    policy = default_amp_policy | {lax.dot_general_p: rule}
    amped = amp(fn, compute_dtype=LOW, amp_policy=policy)
    args = struct(4, 32), struct(32, 8), struct(8, 4)
    dtypes = [
        eqn.invars[0].aval.dtype.name
        for eqn, _ in walk(jax.make_jaxpr(amped)(*args))
        if eqn.primitive is lax.dot_general_p
    ]
    assert dtypes == [F32, LOW]


def test_what_a_condition_demands_of_its_operands():
    compute, follow = use_compute_precision, follow_inputs
    full = use_original_precision
    always = sums_more_than(1)
    for rule, otherwise, expected in [
        (compute, compute, Demand.LOW),
        (full, full, Demand.FULL),
        (compute, full, Demand.LOW | Demand.FULL),
        (full, follow, Demand.FULL),
    ]:
        assert when(always, rule, otherwise).demand({}, Demand.FULL) == expected
    assert when(always, full, follow).demand({}, Demand.LOW) == Demand.LOW | Demand.FULL


def test_a_condition_computes_only_if_both_rules_do():
    always = sums_more_than(1)
    assert when(always, use_compute_precision, "float16").is_compute
    assert not when(always, use_compute_precision, "float32").is_compute
    assert not when(always, follow_inputs, use_compute_precision).is_compute


def test_a_running_sum_through_a_condition_stays_full():
    """The carry of a loop: low only if both rules make it by a contraction."""

    def fn(x, w):
        return lax.scan(lambda x, _: (x @ w, None), x, length=3)[0] @ w

    def carry(otherwise):
        rule = when(sums_more_than(10**6), otherwise, use_compute_precision)
        policy = default_amp_policy | {lax.dot_general_p: rule}
        jaxpr = jax.make_jaxpr(amp(fn, compute_dtype=LOW, amp_policy=policy))
        (eqn,) = (
            eqn
            for eqn, _ in walk(jaxpr(struct(4, 4), struct(4, 4)))
            if eqn.primitive.name == "scan"
        )
        return eqn.outvars[0].aval.dtype.name

    assert carry("float16") == LOW
    assert carry("float32") == F32


def test_the_values_are_those_of_the_rule_picked():
    x, w = jnp.linspace(0, 1, 64).reshape(8, 8), jnp.linspace(1, 2, 64).reshape(8, 8)
    rule = when(smaller_than(1000), use_original_precision, use_compute_precision)
    small = amp(dot, compute_dtype=LOW, amp_policy={lax.dot_general_p: rule})
    np.testing.assert_array_equal(small(x, w), x @ w)
    grads = jax.grad(lambda w: jnp.sum(small(x, w)))(w)
    np.testing.assert_array_equal(grads, jax.grad(lambda w: jnp.sum(x @ w))(w))


# Bad input.


@pytest.mark.parametrize("make", [sums_more_than, smaller_than, not_divisible_by])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "8", None])
def test_thresholds_must_be_positive_integers(make, value):
    with pytest.raises(ValueError, match="must be a positive integer"):
        make(value)


def test_param_is_needs_a_name_and_values():
    with pytest.raises(TypeError, match="`name` must be a string"):
        param_is(2, "y")
    with pytest.raises(ValueError, match="needs a value"):
        param_is("y")


def test_when_needs_a_predicate_and_two_rules():
    with pytest.raises(TypeError, match="`predicate` must be callable"):
        when(True, "float32", "float16")
    with pytest.raises(TypeError, match=r"`rule` is 'flaot32'.*'float32'"):
        when(returns_none, "flaot32", "float16")
    with pytest.raises(TypeError, match="`otherwise` must be a rule"):
        when(returns_none, "float32", 3)


def test_a_predicate_must_be_hashable():
    class Unhashable:
        __hash__ = None

        def __call__(self, site):
            return True

    rule = when(Unhashable(), "float32", "float16")
    with pytest.raises(TypeError, match="must be hashable"):
        amp(jnp.tanh, amp_policy={lax.tanh_p: rule})
