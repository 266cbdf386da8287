"""What newcomers get wrong is answered by what to write instead."""

import contextlib
import copy
import re
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec as P

import jaxamp_like
from benchmarks.measure import operand_dtype, walk
from jaxamp_like import (
    AmpError,
    AmpWarning,
    Policy,
    PolicyMap,
    amp,
    amp_stop,
    default_amp_policy,
    explain,
    get_policy,
    scope_modules,
    trace_numerics,
)
from jaxamp_like.presets import full_precision, pytorch_autocast
from jaxamp_like.rules import (
    follow_inputs,
    keep_each_input,
    saving_low,
    sums_more_than,
    use_compute_precision,
    use_dot_algorithm,
    use_precision,
    use_precision_by_pass,
    when,
    wide,
)

from .test_structure import is_contraction

pytestmark = pytest.mark.quick

x = jnp.ones((4, 4))
scope = jax.named_scope


def net(x):
    with scope("net"):
        with scope("attention"):
            x = jnp.tanh(x @ x)  # the line that messages name
        return x @ x


@amp_stop
def stopped(x):
    with scope("kept"):
        return x @ x


LINE = f"{__file__}:{net.__code__.co_firstlineno + 3}"


def generator(x):
    yield x @ x


async def coroutine(x):
    return x @ x


managed = contextlib.contextmanager(generator)


class Generator:
    def __call__(self, x):
        yield x


def say(error, match, make):
    return pytest.param(make, error, match, id=match)


@pytest.mark.parametrize(
    ("make", "error", "match"),
    (
        # Arguments that don't fit.
        say(
            TypeError, "Write `compute_dtype='bfloat16'`", lambda: amp(net, "bfloat16")
        ),
        say(TypeError, "`compute_dtype='float16'`", lambda: amp(net, jnp.float16)),
        say(
            TypeError,
            "Write `amp_policy='mixed_float16'`",
            lambda: amp(net, "mixed_float16"),
        ),
        say(TypeError, "Write `amp_policy=...`", lambda: amp(net, default_amp_policy)),
        say(TypeError, r"comes after: `amp\(fn\)\(x\)`", lambda: amp(net, x)),
        say(TypeError, "Write the argument's name: one of", lambda: amp(net, True)),
        say(
            TypeError,
            "'dtype'. Did you mean `compute_dtype`",
            lambda: amp(net, dtype="bfloat16"),
        ),
        say(
            TypeError,
            "'policy'. Did you mean `amp_policy`",
            lambda: explain(net, policy={}),
        ),
        say(TypeError, "Did you mean `strict`", lambda: amp(net, stric=True)),
        say(TypeError, r"`explain\(fn\)\(x\)`", lambda: explain(net, x)),
        say(TypeError, r"`explain\(fn\)\(..., y=...\)`", lambda: explain(net, y=x)),
        say(TypeError, r"`trace_numerics\(fn\)\(x\)`", lambda: trace_numerics(net, x)),
        say(
            TypeError,
            "`Policy` .* Did you mean `output_dtype`",
            lambda: Policy(output="float32"),
        ),
        say(TypeError, "`strict` must be True or Fal", lambda: amp(net, strict="no")),
        say(TypeError, "`lean` must be True or False", lambda: amp(net, lean=None)),
        # What is no function to rewrite.
        say(TypeError, "a generator, `generator`.*one item", lambda: amp(generator)),
        say(TypeError, "a generator, `Generator`", lambda: amp(Generator())),
        say(TypeError, "an async function, `coroutine`", lambda: amp(coroutine)),
        say(TypeError, "the class 'MLP'.*an instance", lambda: amp(eqx.nn.MLP)),
        say(
            TypeError,
            "returns a generator.*Return",
            lambda: amp(lambda x: generator(x))(x),
        ),
        say(TypeError, "returns a map", lambda: amp(lambda x: [map(abs, x)])(x)),
        # What computes when `amp_stop` has been left.
        say(
            TypeError, "a generator, `generator`.*with amp", lambda: amp_stop(generator)
        ),
        say(TypeError, "an async function, `cor", lambda: amp_stop()(coroutine)),
        say(TypeError, "the class 'MLP'.*__call__", lambda: amp_stop(eqx.nn.MLP)),
        say(
            TypeError,
            "`generator` under `amp_stop` returns a _Gen.*with amp_stop",
            lambda: amp_stop(managed)(x),
        ),
        say(
            TypeError,
            "returns a generator, which runs later",
            lambda: amp_stop(lambda x: [generator(x)])(x),
        ),
        # Dtypes.
        say(
            AmpError,
            "needs? scales.*'bfloat16' or",
            lambda: amp(net, compute_dtype="float8_e4m3fn"),
        ),
        say(AmpError, r"the rule `float8\(\)`", lambda: Policy(jnp.float8_e5m2)),
        say(AmpError, "float8_from_mixed_b", lambda: Policy("float8_e4m3b11fnuz")),
        say(
            TypeError,
            "Did you mean 'bfloat16'",
            lambda: amp(net, compute_dtype="bfloat_16"),
        ),
        say(
            TypeError,
            "given as `amp_policy='mixed_bfloat16'`",
            lambda: amp(net, compute_dtype="mixed_bfloat16"),
        ),
        say(
            TypeError,
            "given as `amp_policy=...`",
            lambda: amp(net, compute_dtype={"a": "float32"}),
        ),
        # Policies.
        say(
            TypeError,
            r"Call it: `amp_policy=pytorch_autocast\(\)`",
            lambda: amp(net, amp_policy=pytorch_autocast),
        ),
        say(
            TypeError,
            r"Call it: `amp_policy=get_policy\(...\)`",
            lambda: amp(net, amp_policy=get_policy),
        ),
        say(
            TypeError,
            '`{"amp_default": rule}`',
            lambda: amp(net, amp_policy=use_compute_precision),
        ),
        say(
            TypeError,
            "A dtype: `compute_dtype='bfloat16'`",
            lambda: amp(net, amp_policy=jnp.bfloat16),
        ),
        say(
            TypeError,
            r"To compute .*: `Policy\('bfloat16'\)`",
            lambda: get_policy(jnp.bfloat16),
        ),
        say(
            TypeError,
            "part of a policy.*rules=",
            lambda: PolicyMap("float32", {"a": default_amp_policy}),
        ),
        say(
            TypeError,
            r"comes first.*`PolicyMap\('mixed_bfloat16'",
            lambda: PolicyMap({"a": "float32"}),
        ),
        say(
            TypeError,
            "no dict of rules.*rules=default_amp_policy",
            lambda: get_policy("float32") | {},
        ),
        say(
            TypeError,
            "no dict of rules",
            lambda: default_amp_policy | get_policy("float32"),
        ),
        say(
            TypeError,
            "same for all of the process",
            lambda: default_amp_policy.update(a="float32"),
        ),
        say(
            TypeError,
            "Make another: `default_amp",
            lambda: default_amp_policy.__setitem__("a", 1),
        ),
        say(
            TypeError,
            "`policy.where",
            lambda: get_policy("float16").only(lambda site: True),
        ),
        # Rules.
        say(
            TypeError,
            r"write `use_precision\(...\)`",
            lambda: amp(net, amp_policy={"a": use_precision}),
        ),
        say(
            TypeError,
            r"write `pytorch_autocast\(\)`",
            lambda: amp(net, amp_policy={"a": pytorch_autocast}),
        ),
        say(TypeError, r"write `saving_low\(...\)`", lambda: saving_low(saving_low)),
        say(
            TypeError,
            r"a rule already.* without `\(\)`",
            lambda: use_compute_precision(),
        ),
        say(
            TypeError,
            r"write `sums_more_than\(...\)`",
            lambda: when(sums_more_than, "float32", "float16"),
        ),
        say(
            TypeError,
            r"write `wide\(\)`",
            lambda: use_precision_by_pass(weight_gradient=wide),
        ),
        say(
            ValueError,
            "Did you mean 'TF32_TF32_F32'",
            lambda: use_dot_algorithm("tf32"),
        ),
        # Keys.
        say(
            TypeError,
            "binds: `jax.lax.dot_general_p`",
            lambda: amp(net, amp_policy={jnp.einsum: "float32"}),
        ),
        say(
            TypeError,
            "binds: `jax.lax.reduce_sum_p`",
            lambda: amp(net, amp_policy={jnp.sum: "float32"}),
        ),
        say(
            TypeError,
            "into a `jax.named_scope`",
            lambda: amp(net, amp_policy={jax.nn.softmax: "float32"}),
        ),
        say(TypeError, "got the class MLP", lambda: scope_modules(eqx.nn.MLP)),
    ),
)
def test_calls(make, error, match):
    with pytest.raises(error, match=f"(?s){match}"):
        make()


HALVES = "float16 f16 fp16 half".split()


@pytest.mark.parametrize("name", [*HALVES, "bf16", "f32", "fp32", "full"])
def test_short_names_of_dtypes_are_those_of_policies(name):
    """As a compute dtype, as a rule, in a string of a policy and as its name."""
    dtype = get_policy(name).compute_dtype

    def reads(**settings):
        jaxpr = jax.make_jaxpr(amp(net, **settings))(x)
        return {operand_dtype(e) for e, _ in walk(jaxpr) if is_contraction(e)}

    assert reads(compute_dtype=name) == reads(amp_policy=f"c={name}") == {dtype.name}
    policy = full_precision() | {"net": name}
    assert reads(amp_policy=policy, compute_dtype="bfloat16") == {dtype.name}
    assert use_precision(name) == use_precision(dtype)


@pytest.mark.parametrize(
    "fn",
    (
        lambda x: x if x.sum() > 0 else -x,
        lambda x: float(x.sum()),
        lambda x: x.sum().item(),
        lambda x: np.asarray(x) @ x,
        lambda x: range(10)[x.sum().astype(int)],
        lambda x: x[x > 0],
        amp(lambda x: int(x.sum())),
    ),
    ids=("if", "float", "item", "asarray", "index", "mask", "nested"),
)
@pytest.mark.parametrize("wrap", (lambda f: f, jax.jit), ids=("plain", "jit"))
def test_values_that_are_not_known(fn, wrap):
    with pytest.raises((TypeError, IndexError)) as info:
        wrap(amp(fn))(x)
    (note,) = (n for n in info.value.__notes__ if "`amp` traces" in n)
    for part in ("`jnp.where(x > 0, a, b)`", "convert the\nresult outside", "Python"):
        assert part in note


def test_errors_of_jax_name_the_function_and_its_line():
    def decide(x):
        return 1 if x.sum() > 0 else 2

    with pytest.raises(jax.errors.TracerBoolConversionError) as info:
        amp(decide)(x)
    line = decide.__code__.co_firstlineno
    assert f"the function decide at {__file__}:{line}" in str(info.value)


@pytest.mark.parametrize(
    ("key", "match"),
    (
        ("attentoin", f"Did you mean 'attention' ({LINE}"),
        ("net.attention", f"Did you mean 'net/attention' ({LINE}"),
        ("default", "Did you mean 'amp_default'?"),
        ("dot_general", "write `jax.lax.dot_general_p` as the key"),
        ("dot_general_p", "write `jax.lax.dot_general_p` as the key"),
        ("net/.*", "`re.compile('net/.*')`"),
        ("atten.*", "`re.compile('.*(atten.*).*')`"),
        ("(", "`re.compile('(')`"),
        ("zzz", "The scopes of the function are 'net', 'net/attention'."),
        (re.compile("attention"), "a part of 'net/attention', but"),
        (re.compile("zzz.*"), "The scopes of the function are"),
        (lax.conv_general_dilated_p, "has no such primitive"),
    ),
    ids=str,
)
def test_keys_that_match_nothing_name_what_would(key, match):
    policy = default_amp_policy | {key: "bfloat16"}
    with pytest.warns(AmpWarning, match=re.escape(match)) as warned:
        amp(net, amp_policy=policy)(x)
    assert warned[0].filename == __file__  # the user's line, not one of the library's
    with pytest.raises(AmpError, match=re.escape(match)):
        jax.jit(amp(net, amp_policy=policy, strict=True))(x)


def by_reverse_rule(fn):
    made = jax.custom_vjp(fn)

    def backward(kept, ct):
        with jax.named_scope("own/backward"):
            return jax.vjp(fn, *kept)[1](ct)

    made.defvjp(lambda *args: (fn(*args), args), backward)
    return made


def by_forward_rule(fn):
    made = jax.custom_jvp(fn)

    @made.defjvp
    def forward(primals, tangents):
        with jax.named_scope("own/backward"):
            return jax.jvp(fn, primals, tangents)

    return made


def over_devices(fn):
    specs = {"mesh": Mesh(jax.devices()[:1], ("d",)), "in_specs": P(), "out_specs": P()}
    return jax.shard_map(lambda w, x: lax.pmean(fn(w, x), "d"), **specs)


RULES = {"custom_vjp": by_reverse_rule, "custom_jvp": by_forward_rule}
AROUND = {
    "nothing": lambda fn: fn,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "scan": lambda fn: (
        lambda w, x: lax.scan(lambda x, _: (fn(w, x), None), x, None, 2)[0]
    ),
    "shard_map": over_devices,
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("around", AROUND)
def test_keys_that_match_in_a_derivative_rule_alone(around, rule):
    """It is planned when JAX asks for it: after the keys are judged, or never."""
    fn = AROUND[around](RULES[rule](lambda w, x: jnp.tanh(x @ w)))

    def loss(w, x):
        with jax.named_scope("net"):
            return jnp.sum(fn(w, x))

    def judged(*keys):
        policy = default_amp_policy | dict.fromkeys(keys, "float32")
        return amp(loss, amp_policy=policy, compute_dtype="bfloat16", strict=True)

    for key in ("backward", "net/own/backward", re.compile(".*/own/.*")):
        judged(key)(x, x)
        jax.grad(judged(key))(x, x)
    for key, match in (
        ("backwards", "Did you mean 'backward'"),
        (re.compile("own/.*"), "It matches a part of 'net/own/backward'"),
        (lax.conv_general_dilated_p, "has no such primitive"),
    ):
        with pytest.raises(AmpError, match=match):
            judged("backward", key)(x, x)


def test_a_derivative_rule_that_fails_is_not_the_mistake_of_a_key():
    made = by_reverse_rule(jnp.sin)
    made.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: 1 / 0)
    policy = default_amp_policy | {"zzz": "float32"}
    with pytest.raises(AmpError, match="'zzz' of `amp_policy` matched nothing"):
        amp(made, amp_policy=policy, strict=True)(x)


def test_keys_of_maps_and_limits_that_match_nothing():
    for policy in (
        PolicyMap("mixed_bfloat16", {"atention": "float32"}),
        get_policy("mixed_bfloat16").excluding("atention"),
        Policy("bfloat16", rules=default_amp_policy | {"atention": "float32"}),
    ):
        with pytest.raises(AmpError, match="Did you mean 'attention'"):
            amp(net, amp_policy=policy, strict=True)(x)


@pytest.mark.parametrize(
    ("policies", "match"),
    (
        ({"atten.*": "float32"}, "a part of 'net/attention'.*whole path"),
        ({"dot_general": "float32"}, "{jax.lax.dot_general_p: 'float32'}"),
        (
            {"net/att.*": "float32", "net/attention": "float32"},
            "'net/attention' comes first: .*ends innermost.*paths win over regular",
        ),
        ({"kept": "float32"}, "'amp_stop' comes first: of scopes the outermost wins"),
    ),
    ids=("part", "primitive", "hidden", "stopped"),
)
def test_keys_of_maps_say_what_is_true_of_maps(policies, match):
    with pytest.raises(AmpError, match=f"(?s){match}"):
        amp(
            lambda x: net(x) + stopped(x),
            amp_policy=PolicyMap("mixed_bfloat16", policies),
            strict=True,
        )(x)


def test_a_rule_may_name_the_parameters_of_its_primitive():
    def widening(compute_dtype, original_dtypes, a, b, *, dimension_numbers, **rest):
        return [a, b], {"dimension_numbers": dimension_numbers, **rest}

    amp(net, amp_policy=default_amp_policy | {lax.dot_general_p: widening})(x)

    def failing(compute_dtype, original_dtypes, *invars, **params):
        raise TypeError("its own")

    with pytest.raises(AmpError, match="its own"):
        amp(net, amp_policy=default_amp_policy | {"net": failing})(x)


@pytest.mark.parametrize(
    ("policy", "comes_first"),
    (
        ({"net": "float32", "attention": "float32"}, "only where 'net' .*`PolicyMap`"),
        ({"net": "float32", lax.tanh_p: "float32"}, "only where 'net' comes first"),
        (
            {"net": "float32", re.compile("net/att.*"): "float32"},
            "only where 'net' comes first",
        ),
    ),
    ids=("scope", "primitive", "expression"),
)
def test_keys_behind_others(policy, comes_first):
    with pytest.raises(AmpError, match=comes_first):
        amp(net, amp_policy=default_amp_policy | policy, strict=True)(x)


def test_functions_without_scopes():
    policy = default_amp_policy | {"mlp": "float32"}
    with pytest.raises(AmpError, match=r"no scopes: .*jax.named_scope.*scope_modules"):
        amp(jnp.dot, amp_policy=policy, strict=True)(x, x)


@pytest.mark.parametrize(
    "rules",
    (
        {"attention": "float32"},
        {lax.tanh_p: follow_inputs},
        {lax.dot_general_p: use_precision("float32"), "attention": "float32"},
    ),
    ids=("scope", "primitive", "both"),
)
def test_rules_that_extend_nothing(rules):
    """The likely mistake is to have forgotten `default_amp_policy |`."""
    match = r"lowers nothing: .*no \"amp_default\".*`default_amp_policy \| {...}`"
    for policy in (rules, Policy(rules=rules)):
        with pytest.raises(AmpError, match=match):
            amp(net, amp_policy=policy, compute_dtype="bfloat16", strict=True)
    with pytest.warns(AmpWarning, match=match) as warned:
        _ = amp(net, amp_policy=rules, compute_dtype="bfloat16")
    assert warned[0].filename == __file__


def test_rules_that_are_meant_alone():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for policy in (
            {},
            full_precision(),
            {"amp_default": "float32"},
            {"attention": use_compute_precision},
            {lax.dot_general_p: use_dot_algorithm("highest")},
            {lax.tanh_p: saving_low("float32")},
            {lax.dot_general_p: when(sums_more_than(9), "float16", "float32")},
        ):
            jax.make_jaxpr(amp(net, amp_policy=policy, strict=True))(x)
        amp(net, amp_policy={"net": "float32"}, compute_dtype="float32", strict=True)(x)


def test_a_rule_for_other_primitives():
    policy = default_amp_policy | {lax.mul_p: keep_each_input}
    match = r"`keep_each_input` is for .*`mul` makes 1 of 2.*`follow_inputs`"
    with pytest.raises(AmpError, match=re.compile(match, re.DOTALL)):
        jax.make_jaxpr(amp(lambda x: x * (x @ x), amp_policy=policy))(x)


def test_the_default_policy_is_a_dict():
    assert isinstance(default_amp_policy, dict)
    for policy in (
        default_amp_policy | {},
        {} | default_amp_policy,
        dict(default_amp_policy),
        default_amp_policy.copy(),
        copy.copy(default_amp_policy),
    ):
        assert type(policy) is dict
        assert [*policy] == [*default_amp_policy]
        policy["mine"] = "float32"
    assert "mine" not in jaxamp_like.default_amp_policy


@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
@pytest.mark.parametrize("backend", ("tpu", "gpu"))
def test_float16_is_no_format_of_tpus(backend, dtype, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)

    def fresh(x):
        return net(x) + {"tpu": 1, "gpu": 2}[backend]

    mixed = amp(fresh, compute_dtype=dtype)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mixed(x)
    told = [str(w.message) for w in caught if "JAX runs on a TPU" in str(w.message)]
    assert len(told) == (backend == "tpu" and dtype == "float16")
    assert all(LINE in message and "`fresh`" in message for message in told)
