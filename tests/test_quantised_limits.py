"""Quantised contractions at the ends of ranges, and where JAX or a user is unusual."""

import importlib
import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.jet import jet

from jaxamp_like import (
    AmpError,
    AmpWarning,
    DynamicScalerState,
    Policy,
    amp,
    default_amp_policy,
    dynamic_scale_grad,
    explain,
    get_policy,
)
from jaxamp_like._rules.by_shapes import ByShapes
from jaxamp_like.presets import quantised
from jaxamp_like.rules import (
    float8,
    int8,
    sums_more_than,
    use_dot_algorithm,
    when,
    worth_eight_bits,
)
from tests.programs import error, values


@pytest.mark.parametrize("rule", (int8, float8), ids=("int8", "float8"))
def test_ragged_contractions_alone_are_told(rule):
    def experts(p, x):
        return lax.ragged_dot(x, p, jnp.array([2, 4]))

    policy = quantised(rule(where=None))
    low = amp(experts, compute_dtype="bfloat16", amp_policy=policy)
    with pytest.warns(AmpWarning, match="is for dense ones, and leaves the 1 of `ragg"):
        low(jnp.ones((2, 16, 32)), jnp.ones((6, 16)))


pytestmark = pytest.mark.rest

FLOAT8, INT8 = float8(where=None), int8(where=None)
BY_ROW = float8(where=None, granularity="row")
either = pytest.mark.parametrize("rule", (FLOAT8, INT8), ids=("float8", "int8"))


def low(fn, rule=FLOAT8, dtype="bfloat16", argnums=None):
    return amp(fn, compute_dtype=dtype, amp_policy=quantised(rule), argnums=argnums)


def product(w, x):
    return x @ w


def reasons(fn, *args):
    """The operands' dtype of each contraction, and why it is made so."""
    ops = explain(fn)(*args).now.ops
    return [(op.reads[0], op.why) for op in ops if op.flops]


# ----------------------------------------------------------------------------- ranges


@pytest.mark.parametrize("rule", (FLOAT8, BY_ROW, float8(where=None, keep="compute")))
def test_float8_over_the_range_of_float32(rule):
    """Results and gradients are right, whatever size numbers and cotangents have."""
    x, w = values(4, 8), values(8, 4, seed=1)
    grads = jax.jit(jax.grad(low(lambda w, x, s: jnp.sum(s * (x @ w)), rule), (0, 1)))
    fn = jax.jit(low(product, rule))
    for size in (1e-34, 1e-25, 1e25, 1e35):
        assert error(fn(w, x * size) / size, x @ w) < 0.1
        assert error(fn(w * size, x) / size, x @ w) < 0.1
        made = [one / size for one in grads(w, x, size)]
        assert (
            error(made, jax.grad(lambda *a: jnp.sum(a[1] @ a[0]), (0, 1))(w, x)) < 0.1
        )


def test_large_times_small():
    """Of many scales, a product may leave the range that the result is in."""
    x, w = values(4, 8), values(8, 4, seed=1)
    fn = jax.jit(low(product, BY_ROW))
    for size in (1e-34, 1e34):
        assert error(fn(w / size, x * size), x @ w) < 0.1
    rows = jnp.array([1e-30, 1.0, 1e30])[:, None, None]
    ct = values(4, 4, seed=2)
    loss = low(lambda w, x: jnp.sum(ct * (x @ w)))
    each = jax.jit(jax.vmap(jax.grad(loss), (None, 0)))(w, x * rows) / rows
    assert error(each, jnp.stack([x.T @ ct] * 3)) < 0.1


@pytest.mark.parametrize("power", (15, 80, 120))
def test_a_large_loss_scale(power):
    """It doubles while nothing overflows; gradients must not be cut off."""
    x, w = values(4, 8), values(8, 4, seed=1)
    loss = lambda w, x: jnp.sum(jnp.sin(x @ w))  # noqa: E731
    scaler = DynamicScalerState(scaler=2.0**power)
    scaled = jax.jit(dynamic_scale_grad(low(loss)))
    scaler, grads = scaled(w, x, dynamic_scaler_state=scaler)
    assert scaler.overflows == 0
    # Scales are powers of two: not a bit is another.
    np.testing.assert_array_equal(grads, jax.jit(jax.grad(low(loss)))(w, x))


def test_sums_of_integers_fit_int32():
    """More terms than that are summed in the compute dtype, and `explain` says so."""
    most = (2**31 - 1) // 127**2
    x, w = jnp.ones((2, most + 1)), jnp.ones((most + 1, 2))
    fn = low(product, INT8, "float32")
    with pytest.warns(AmpWarning, match=f"sums of {most + 1} terms"):
        assert error(fn(w, x), x @ w) < 1e-3
    ((dtype, why),) = reasons(fn, w, x)
    assert dtype == "float32" and "int32" in why
    assert error(fn(w[1:], x[:, 1:]), (x @ w) - 1) < 1e-3  # as many as fit
    ((dtype, _),) = reasons(fn, w[1:], x[:, 1:])
    assert dtype == "int8"
    ((dtype, _),) = reasons(low(product, int8(where=None, weight_only=True)), w, x)
    assert dtype == "bfloat16"

    def conv(w, x):
        return lax.conv(x, w, (1, 1), "VALID")

    shapes = [jax.ShapeDtypeStruct((2, 9, 130, 130), "float32")] * 2
    with pytest.warns(AmpWarning, match="sums of 152100 terms"):
        ((dtype, why),) = reasons(low(conv, INT8), *shapes)
    assert dtype == "bfloat16" and "int32" in why


def test_int8_of_tiny_numbers():
    x, w = values(4, 8), values(8, 4, seed=1)
    fn = jax.jit(low(product, int8(where=None, epsilon=0), "float32"))
    assert error(fn(w, x * 1e-32) / 1e-32, x @ w) < 0.02
    assert (fn(w, x * 1e-42) == 0).all()


# ------------------------------------------------------------------- modes of JAX


RULES = (
    FLOAT8,
    BY_ROW,
    float8(where=None, power_of_two=False),
    INT8,
    int8(where=None, migration=0.5),
    int8(where=None, weight_only=True),
)


@pytest.mark.sample(3)
@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_under_strict_promotion_and_x64(rule):
    loss = lambda w, x: jnp.sum(jnp.tanh(jnp.tanh(x) @ w))  # noqa: E731
    x, w = values(4, 8), values(8, 4, seed=1)
    step = jax.jit(jax.value_and_grad(low(loss, rule)))
    expected = step(w, x)
    with jax.numpy_dtype_promotion("strict"):
        strict = step(w, x)
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else _x64():
        wide = step(w, x)
    assert error(strict, expected) < 1e-6
    assert error(wide, expected) < 2**-7
    assert wide[1].dtype == jnp.float32


def _x64():
    return importlib.import_module("jax.experimental").enable_x64()


@either
def test_partners_of_64_bits_stay_as_written(rule):
    x, w = values(4, 8), values(8, 4, seed=1)
    fn = low(lambda w, x: x.astype(jnp.complex64) @ w + x @ w, rule)
    found = reasons(fn, w, x)
    assert ["complex64" in why for _, why in found] == [True, False]
    algorithm = default_amp_policy | {lax.dot_general_p: use_dot_algorithm("highest")}
    by_algorithm = lambda w, x: x.astype(jnp.complex64) @ w  # noqa: E731
    fn = amp(by_algorithm, compute_dtype="bfloat16", amp_policy=algorithm)
    ((_, why),) = reasons(fn, w, x)
    assert "complex64" in why


# ------------------------------------------------------------------------- transposes


@either
@pytest.mark.parametrize("side", (0, 1))
def test_a_transpose_is_that_of_the_contraction(rule, side):
    args = [values(8, 4), values(6, 8, seed=1)]
    ct = values(6, 4, seed=2)

    def transposed(fn):
        def linear(x):
            return fn(*args[:side], x, *args[side + 1 :])

        return jax.jit(jax.linear_transpose(linear, args[side]))(ct)

    assert error(transposed(low(product, rule)), transposed(product)) < 0.02


@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize("around", (lambda fn: fn, jax.jit, jax.checkpoint))
def test_a_series_is_refused(rule, around):
    w, x = values(8, 4), values(6, 8, seed=1)

    def series(fn):
        return lambda w, x: jet(lambda x: fn(w, x), (x,), ((x,),))

    with pytest.raises(AmpError, match="`jet` takes"):
        series(around(low(product, rule)))(w, x)
    assert error(low(series(product), rule)(w, x), series(product)(w, x)) < 0.1


@either
def test_a_transpose_under_vmap(rule):
    w, xs, cts = values(8, 4), values(3, 6, 8, seed=1), values(3, 6, 4, seed=2)

    def transposed(fn):
        over = lambda xs: jax.vmap(fn, (None, 0))(w, xs)  # noqa: E731
        return jax.linear_transpose(over, xs)(cts)

    assert error(transposed(low(product, rule)), transposed(product)) < 0.02


@either
def test_contractions_of_tangents(rule):
    """In a derivative rule by the author: transposed, though never differentiated."""

    @jax.custom_jvp
    def layer(w, x):
        return jnp.tanh(x @ w)

    @layer.defjvp
    def jvp(primals, tangents):
        (w, x), (dw, dx) = primals, tangents
        y = layer(w, x)
        return y, (1 - y**2) * (dx @ w + x @ dw)

    loss = lambda w, x: jnp.sum(layer(w, x) ** 2)  # noqa: E731
    w, x = values(8, 4), values(6, 8, seed=1)
    made = jax.jit(jax.grad(low(loss, rule), (0, 1)))(w, x)
    assert error(made, jax.grad(loss, (0, 1))(w, x)) < 0.1
    forward = jax.jvp(low(loss, rule), (w, x), (w, x))
    assert error(forward, jax.jvp(loss, (w, x), (w, x))) < 0.1


# ------------------------------------------------------------------ what is a parameter


def test_weights_that_are_closed_over():
    model = eqx.nn.MLP(16, 16, 16, 3, key=jax.random.key(0))
    x = values(8, 16)
    given = low(lambda model, x: jax.vmap(model)(x), INT8)
    held = low(lambda x: jax.vmap(model)(x), INT8, argnums=())
    assert [dtype for dtype, _ in reasons(held, x)] == ["int8"] * 4
    np.testing.assert_array_equal(held(x), given(model, x))


def adapted(ws, x):
    """Weights that change with the data, but for the first."""
    x = x @ ws[0]
    for w in ws[1:]:
        x = jnp.tanh(x @ (w + x[:, None, 0] * 0.1))
    return x


def test_weights_that_are_made_of_data_are_told_of():
    """They stay in 16 bits, for they might be attention's; but not in silence."""
    ws, x = values(4, 8, 8), values(8, 8)
    with pytest.warns(AmpWarning, match=r"Only 1 of .* of 3 no operand.*parameters_o"):
        low(adapted)(ws, x)
    with pytest.raises(AmpError, match="hold that `argnums` names"):
        amp(
            adapted,
            compute_dtype="bfloat16",
            amp_policy=quantised(FLOAT8),
            strict=True,
        )(ws, x)
    everything = float8(where=None, parameters_only=False)
    low(adapted, everything)(ws, x)  # without a warning, which is an error here
    small = float8(where=worth_eight_bits(side=16))
    with pytest.warns(AmpWarning, match="No contraction is quantised"):
        low(adapted, small)(ws, x)


def by_shapes(rule):
    return ByShapes((("1x1+,1+x1", rule),), rule)


def on_condition(rule):
    return when(sums_more_than(4), rule, "bfloat16")


@pytest.mark.parametrize("wrap", (by_shapes, on_condition))
def test_rules_within_rules_are_told_of_too(wrap):
    ws, x = values(4, 8, 8), values(8, 8)

    def said(rule):
        policy = default_amp_policy | {lax.dot_general_p: wrap(rule)}
        with pytest.warns(AmpWarning) as caught:
            amp(adapted, amp_policy=policy)(ws, x)
        return [str(one.message) for one in caught]

    assert any("Only 1 of" in text for text in said(FLOAT8))
    small = said(float8(where=worth_eight_bits(side=16)))
    told = [text for text in small if "No contraction is quantised" in text]
    assert "where=worth_eight_bits" in told[0]


def test_a_condition_that_never_holds_is_told():
    policy = default_amp_policy | {
        lax.dot_general_p: when(sums_more_than(64), FLOAT8, "bfloat16")
    }
    with pytest.warns(AmpWarning, match=r"No contraction.*\(not sums_more_than\(64\)"):
        amp(product, amp_policy=policy)(values(8, 8), values(4, 8))


def says_nothing(site):
    return None


def divides_by_zero(site):
    return 1 / 0


@pytest.mark.parametrize("rule", (float8, int8))
def test_where_must_say_yes_or_no(rule):
    w, x = values(8, 8), values(4, 8)
    name = rule.__name__
    for where, what in (
        (says_nothing, "must return a bool, but returned NoneType"),
        (divides_by_zero, "failed. ZeroDivisionError: division"),
    ):
        said = rf"`{where.__name__}` of `{name}\(where=...\)` {what}"
        with pytest.raises(AmpError, match=rf"{said}(.|\n)*test_quantised_limits.py"):
            low(product, rule(where=where))(w, x)
    low(product, rule(where=lambda site: np.bool_(site.avals[0].ndim == 2)))(w, x)


# ------------------------------------------------------------------------ what is said


def test_a_rule_for_all_that_is_not_named():
    """Of what is no contraction, it leaves the default policy's word."""
    fn = lambda w, x: jnp.exp(x @ w)  # noqa: E731
    x, w = values(4, 8), values(8, 4, seed=1)
    named = amp(fn, compute_dtype="bfloat16", amp_policy={"amp_default": FLOAT8})
    policy = default_amp_policy | {lax.dot_general_p: FLOAT8}
    plain = amp(fn, compute_dtype="bfloat16", amp_policy=policy)
    programs = [str(jax.make_jaxpr(one)(w, x)) for one in (named, plain)]
    # JAX 0.6 prints where functions are in memory.
    first, second = (re.sub("0x[0-9a-f]+", "", program) for program in programs)
    assert first == second


def test_a_rule_under_a_key_that_is_no_contraction():
    with pytest.raises(
        AmpError, match=r"`tanh` is none\. Its keys are .*dot_general_p"
    ):
        amp(jnp.tanh, amp_policy={lax.tanh_p: FLOAT8})


def test_a_condition_that_leads_to_one():
    """Where it is under the key of a scope, other ops have the other rule."""

    def fn(w, x):
        with jax.named_scope("mlp"):
            y = jnp.tanh(x @ w)
            return y[jnp.array([1, 0])] + lax.top_k(y, 2)[0][:2, :1]

    rule = when(worth_eight_bits(side=2, volume=4, multiple_of=2), FLOAT8, "float32")
    policy = default_amp_policy | {"mlp": rule}
    found = reasons(
        amp(fn, compute_dtype="bfloat16", amp_policy=policy),
        values(8, 4),
        values(4, 8),
    )
    assert found[0][0] == "float8_e4m3fn"
    only = Policy("bfloat16", rules={"mlp": when(_always, FLOAT8, INT8)})
    assert reasons(amp(fn, amp_policy=only), values(8, 4), values(4, 8))
    with pytest.raises(AmpError, match="is a rule for contractions"):
        amp(jnp.tanh, amp_policy={lax.tanh_p: when(_always, FLOAT8, INT8)})


def _always(site):
    return True


def test_numbers_of_numpy():
    largest: Any = np.float32(6)
    epsilon: Any = np.int32(0)
    rule = int8(activation_max=largest, epsilon=epsilon, migration=np.float64(0.5))
    assert rule == int8(activation_max=6.0, epsilon=0, migration=0.5)
    length: Any = np.int64(4)
    delayed = float8(delayed=True, amax_history_length=length)
    assert delayed == float8(delayed=True, amax_history_length=4)


@pytest.mark.parametrize("inner", ("int8", "float8"))
@pytest.mark.parametrize("outer", ("int8", "float8"))
def test_a_name_of_two_rules(outer, inner):
    name = f"{outer}_from_{inner}_from_mixed_bfloat16"
    with pytest.raises(ValueError, match=f"two rules.*'{outer}_from_mixed_bfloat16'"):
        get_policy(name)


@pytest.mark.sample(2)
@pytest.mark.parametrize("policy", ("everything_saveable", "dots_saveable"))
def test_what_a_checkpoint_keeps_has_the_range_of_its_format(policy):
    """JAX rounds it by formats with infinities, in which there is no 256 to 448."""
    saved = getattr(jax.checkpoint_policies, policy)

    def loss(ws, x):
        layer = jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None), policy=saved)
        return jnp.mean(lax.scan(layer, x, ws)[0] ** 2)

    # As numbers of 8 bits, up to 384.
    ws, x = (x / abs(x).max() * 1.5 for x in (values(2, 16, 16), values(4, 16, seed=1)))
    made = jax.jit(jax.grad(amp(loss, amp_policy=quantised(FLOAT8))))(ws, x)
    assert error(made, jax.grad(loss)(ws, x)) < 0.15
