"""Policies by scope: which entry is taken, and what that makes of a program."""

import json
import re

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from flax import linen, nnx
from hypothesis import given, strategies as st
from jax import lax

from benchmarks.measure import CONTRACTIONS, operand_dtype, walk
from jaxamp_like import (
    AmpError,
    AmpWarning,
    Policy,
    PolicyMap,
    amp,
    amp_stop,
    default_amp_policy,
    get_policy,
    scope_modules,
)
from jaxamp_like.rules import use_compute_precision, use_widest_precision

pytestmark = pytest.mark.quick

F32, F16, BF16 = "float32", "float16", "bfloat16"
scope = jax.named_scope


@pytest.fixture
def w():
    return jnp.eye(4) + 0.1


def equations(fn, *args):
    return [eqn for eqn, _ in walk(jax.make_jaxpr(fn)(*args))]


def dots(fn, *args):
    eqns = equations(fn, *args)
    return [operand_dtype(e) for e in eqns if e.primitive.name in CONTRACTIONS]


def reads(name, fn, *args):
    """The dtypes that a primitive reads, operand by operand."""
    eqns = (e for e in equations(fn, *args) if e.primitive.name == name)
    return [v.aval.dtype.name for e in eqns for v in e.invars]


@scope("net")
def net(w):
    with scope("encoder"):
        with scope("attention"):
            h = jnp.tanh(w @ w)
        with scope("mlp"):
            h = jnp.tanh(h @ w)
    with scope("decoder"), scope("attention"):
        return h @ w


# Which entry.


@pytest.mark.parametrize(
    "entries, expected",
    (
        ({}, [BF16] * 3),
        ({"attention": F32}, [F32, BF16, F32]),
        ({"net": F32}, [F32] * 3),
        ({"encoder/attention": F16}, [F16, BF16, BF16]),
        ({"/net/encoder/": F16}, [F16, F16, BF16]),
        ({re.compile(".*/(mlp|decoder)"): F16}, [BF16, F16, F16]),
        ({".*/(mlp|decoder)": F16}, [BF16, F16, F16]),
        ({r"net/\w+/attention": F16}, [F16, BF16, F16]),
        # The innermost of nested scopes, and the longest of the paths to it.
        ({"encoder": F16, "attention": F32}, [F32, F16, F32]),
        ({"attention": F32, "decoder/attention": F16}, [F32, BF16, F16]),
        # Paths before expressions, wherever they end.
        ({"encoder": F16, ".*attention": F32}, [F16, F16, F32]),
    ),
    ids=str,
)
def test_entries(entries, expected, w):
    policies = PolicyMap("mixed_bfloat16", entries)
    paths = ("net/encoder/attention", "net/encoder/mlp", "net/decoder/attention")
    assert [policies[path].compute_dtype.name for path in paths] == expected
    low = amp(net, amp_policy=policies)
    assert dots(low, w) == expected
    grad = jax.grad(lambda w: low(w).sum())
    inside = amp(jax.grad(lambda w: net(w).sum()), amp_policy=policies)
    for fn in (grad, inside, jax.jit(grad)):
        assert sorted(dots(fn, w)) == sorted(expected * 3)


names = st.sampled_from(("a", "b", "c", "a.b", "x[0]", "(y"))
scopes_of = st.lists(names, min_size=1, max_size=4).map("/".join)
policy_names = st.sampled_from((F32, "mixed_float16", "mixed_bfloat16"))


@given(scopes_of, st.dictionaries(scopes_of.map(re.escape), policy_names, max_size=3))
def test_lookup_is_that_of_a_dict_where_paths_are_keys(path, entries):
    """The path itself, if it is there; else nothing but what is in the map."""
    entries = {key.replace("\\", ""): value for key, value in entries.items()}
    plain = {k: v for k, v in entries.items() if not re.search(r"[\[(]", k)}
    policies = PolicyMap("c=bf16", plain)
    if path in plain:
        assert policies[path] == get_policy(plain[path])
    assert policies[path] in (*policies.values(), policies.default_policy)
    ends = [path.split("/")[:n] for n in range(1, path.count("/") + 2)]
    covered = any(
        end[-len(key.split("/")) :] == key.split("/") for end in ends for key in plain
    )
    assert covered or policies[path] == policies.default_policy
    assert dict(policies) == {key: get_policy(v) for key, v in plain.items()}


def test_like_a_dict():
    pattern = re.compile("a/.*")
    policies = PolicyMap(F32, {"/x/": BF16, pattern: F16, "y.*": F32})
    assert [*policies] == ["x", pattern, "y.*"]
    assert "x" in policies and "/x" in policies and pattern in policies
    assert "a/b" not in policies and 3 not in policies
    assert policies[pattern] == policies["a/b"] == get_policy(F16)
    assert policies.get("nothing") == policies.default_policy
    assert [*policies.values()] == [get_policy(name) for name in (BF16, F16, F32)]
    more = policies | {"x": F32, "z": BF16}
    assert len(more) == 4 and more["x"] == get_policy(F32)
    assert policies["x"] == get_policy(BF16)
    with pytest.raises(KeyError):
        policies[re.compile("other")]
    with pytest.raises(TypeError, match="must be a string, but got 3"):
        policies[3]


@pytest.mark.parametrize(
    "make, error, match",
    (
        (lambda: PolicyMap("flaot32"), ValueError, "Did you mean 'float32'"),
        (lambda: PolicyMap(3), TypeError, "but got 3"),
        (lambda: PolicyMap(PolicyMap(F32)), TypeError, "but got a `PolicyMap`"),
        (lambda: PolicyMap(F32, ["a"]), TypeError, "must be a dict .* got list"),
        (
            lambda: PolicyMap(F32, {"a": "flaot16"}),
            ValueError,
            r"`policy_map\['a'\]`: T",
        ),
        (lambda: PolicyMap(F32, {"a": {"b": F32}}), TypeError, r"`policy_map\['a'\]`"),
        (lambda: PolicyMap(F32, {"a": "int8"}), ValueError, r"\['a'\].*int8_from_mix"),
        (lambda: PolicyMap(F32, {"": F32}), TypeError, "must be a path .* but got ''"),
        (lambda: PolicyMap(F32, {("a", "b/c"): F32}), TypeError, "must be a path"),
        (lambda: PolicyMap(F32, {("a", 1): F32}), TypeError, "must be a path"),
        (lambda: PolicyMap(F32, {(): F32}), TypeError, "must be a path"),
        (
            lambda: PolicyMap(F32, {"a[0]": F32, ("a[0]",): F16}),
            ValueError,
            "given twice",
        ),
        (lambda: PolicyMap(F32, {lax.exp_p: F32}), TypeError, "but got exp"),
        (lambda: PolicyMap(F32, {re.compile(b"a"): F32}), TypeError, "must be a path"),
        (
            lambda: PolicyMap(F32, {"a": F32, "/a": F16}),
            ValueError,
            "'a' is given twice",
        ),
        (
            lambda: PolicyMap(F32, {"a(": F32}),
            ValueError,
            r"'a\(' .* no valid regular .*: .* position 1.*`re.escape\('a\('\)`",
        ),
        (lambda: PolicyMap(F32, {"*": F32}), ValueError, "no valid regular expression"),
        (
            lambda: PolicyMap.from_dict(Policy("bfloat16").to_dict()),
            ValueError,
            r"read it by `Policy\.from_dict\(data\)`",
        ),
        (
            lambda: PolicyMap.from_dict({}),
            ValueError,
            "keys default_policy and policies",
        ),
        (
            lambda: PolicyMap.from_dict({"default_policy": {}, "policies": [{}]}),
            ValueError,
            "is malformed: KeyError",
        ),
        (lambda: PolicyMap(F32, {"a.*": F16, ".*b": F32})["a/b"], AmpError, "Two"),
    ),
)
def test_bad_maps(make, error, match):
    with pytest.raises(error, match=match):
        make()


def test_two_expressions_that_match(w):
    """Both are named, with the scope, when a function is traced."""
    policies = PolicyMap(
        F32, {"net/.*/attention": BF16, re.compile(".*encoder/.*"): F16}
    )
    with pytest.raises(AmpError) as info:
        amp(net, amp_policy=policies)(w)
    for part in ("'net/.*/attention'", "'.*encoder/.*'", "'net/encoder/attention'"):
        assert part in str(info.value)
    with pytest.warns(AmpWarning, match="matched nothing"):
        low = amp(net, amp_policy=policies | {"encoder": F32})  # a path goes first
        assert dots(low, w) == [F32, F32, BF16]


def test_names_of_a_path_as_a_tuple_stand_for_themselves(w):
    """Brackets in them are no expression; what is inside goes first, as for paths."""
    policies = PolicyMap(F32, {("layer[0]",): BF16, ("layer[0]", "f(x)"): F16})
    for path, dtype in (
        ("net/layer[0]/mlp", BF16),
        ("layer[0]/f(x)/y", F16),
        (("net", "layer[0]", "f(x)"), F16),
        ("layer0", F32),
    ):
        assert policies[path].compute_dtype == dtype
    data = json.loads(json.dumps(policies.to_dict()))
    assert PolicyMap.from_dict(data) == policies
    assert PolicyMap(F32, {("net", "mlp"): BF16}) == PolicyMap(F32, {"net/mlp": BF16})
    low = amp(net, amp_policy=PolicyMap(F32, {("encoder", "mlp[0]"): BF16}))
    with pytest.warns(AmpWarning, match="matched nothing.*Did you mean 'encoder/mlp'"):
        assert dots(low, w) == [F32] * 3


def test_entries_that_match_nothing(w):
    for entries in (
        {"attentoin": F32},
        {"attention/mlp": F32},
        {"enc.*x": F32},
        {"attention": Policy(BF16, rules=default_amp_policy | {"softmax": F32})},
        {"attention": Policy(BF16).excluding("softmax")},
    ):
        policies = PolicyMap("mixed_bfloat16", entries)
        with pytest.raises(AmpError, match="matched nothing"):
            amp(net, amp_policy=policies, strict=True)(w)
    low = amp(net, amp_policy=PolicyMap(BF16, {"attentoin": F32}))
    with pytest.warns(AmpWarning, match="attentoin"):
        assert dots(low, w) == [BF16] * 3
    amp(net, amp_policy=PolicyMap(BF16, {"mlp": F32}), strict=True)(w)


# What an entry makes of a program.


def test_a_whole_policy_and_not_one_rule(w):
    """In the scope each primitive follows its own rule, in the scope's dtype."""

    def fn(w):
        with scope("low"):
            h = jnp.exp(jnp.tanh(w @ w))
            h = h @ w
            return lax.dot(h, w, precision="highest")

    low = amp(fn, amp_policy=PolicyMap(F32, {"low": Policy(F16)}))
    assert reads("exp", low, w) == [F32]
    assert reads("tanh", low, w) == [F32]  # only `exp` reads it
    assert dots(low, w) == [F16, F16, F32]  # the author's precision wins


def test_rules_of_an_entry(w):
    def fn(w):
        with scope("low"):
            h = w @ w
            with scope("head"):
                return lax.dot(h, w, precision="highest")

    rules = default_amp_policy | {"head": use_compute_precision}
    low = amp(fn, amp_policy=PolicyMap(F32, {"low": Policy(BF16, rules=rules)}))
    assert dots(low, w) == [BF16, BF16]  # a rule for the scope goes before the author


def test_nothing_in_a_float32_scope_is_low(w):
    """Not even what low values come into."""

    def fn(w):
        h = w @ w
        with scope("full"):
            h = jnp.tanh(h * h) + h
            h = h @ w
            h = jnp.tanh(h) * w
        return h @ w

    low = amp(fn, amp_policy=PolicyMap(BF16, {"full": F32}))
    assert dots(low, w) == [BF16, F32, BF16]
    for name in ("mul", "tanh", "add"):
        assert set(reads(name, low, w)) == {F32}
    grads = equations(jax.grad(lambda w: low(w).astype(F32).sum()), w)
    inside = [e for e in grads if "full" in str(e.source_info.name_stack)]
    for eqn in inside:
        if eqn.primitive.name not in ("convert_element_type", "transpose"):
            assert {getattr(v.aval, "dtype", F32) for v in eqn.outvars} <= {
                jnp.dtype(F32)
            }, eqn


def test_amp_stop_goes_before_a_map(w):
    def fn(w):
        with scope("low"), amp_stop():
            return w @ w

    low = amp(fn, amp_policy=PolicyMap(F32, {".*": F16}))
    with pytest.warns(AmpWarning, match="matched nothing"):
        assert dots(low, w) == [F32]


@pytest.mark.parametrize("main, other", ((BF16, F16), (F16, BF16)))
def test_values_are_not_rounded_on_the_way_to_another_dtype(main, other):
    """A value for a float16 scope is not cast to bfloat16 before it is moved there.

    Between the two, 1e5 would overflow, and 1 + 2**-10 lose its last bit."""

    def fn(x):
        x = x - lax.stop_gradient(x).mean()  # in full, fit to be read low
        x = jnp.transpose(x.reshape(4, 4))
        with scope("other"):
            return jax.jit(lambda x: x @ jnp.eye(4))(x)

    policies = PolicyMap(Policy(main), {"other": Policy(other)})
    for eqn in equations(amp(fn, amp_policy=policies), jnp.ones(16)):
        for v in (*eqn.invars, *eqn.outvars):
            assert getattr(v.aval, "dtype", None) != main, eqn


def test_two_formats_of_16_bits_meet_in_float32(w):
    def fn(w, c):
        with scope("a"):
            a = w @ w
        with scope("b"):
            b = w @ w
        h = (a + b) @ w
        return jnp.where(c, a, b) @ w, lax.max(a, b) @ w, h

    policies = PolicyMap(BF16, {"a": Policy(F16)})
    low = amp(fn, amp_policy=policies)
    assert set(reads("add", low, w, True)) == {F32}
    assert set(reads("max", low, w, True)) == {F32}
    assert dots(low, w, True)[:2] == [F16, BF16]
    widest = amp(
        fn,
        amp_policy=PolicyMap(
            Policy(BF16, rules=default_amp_policy | {lax.add_p: use_widest_precision}),
            {"a": Policy(F16)},
        ),
    )
    assert set(reads("add", widest, w, True)) == {F32}


def test_branches_in_different_formats(w):
    def fn(w):
        return (
            lax.cond(w[0, 0] > 0, scope("a")(lambda w: w @ w), lambda w: w @ w, w) @ w
        )

    low = amp(fn, amp_policy=PolicyMap(BF16, {"a": Policy(F16)}))
    (cond,) = (e for e in equations(low, w) if e.primitive.name == "cond")
    assert cond.outvars[0].aval.dtype == F32  # holds both
    assert sorted(dots(low, w)) == [BF16, BF16, F16]


@pytest.mark.parametrize("inside", (True, False), ids=("body", "loop"))
def test_carries_of_a_loop_in_another_format(inside, w):
    """A carry that is read in another format than the function's holds both."""

    def body(h, _):
        return h @ w, None

    def loop(w):
        fn = scope("low")(body) if inside else body
        return lax.scan(fn, w, length=3)[0]

    def fn(w):
        return scope("low")(lambda w: loop(w) @ w)(w) if not inside else loop(w) @ w

    low = amp(fn, amp_policy=PolicyMap(BF16, {"low": Policy(F16)}))
    (scan,) = (e for e in equations(low, w) if e.primitive.name == "scan")
    assert scan.outvars[0].aval.dtype == F32
    np.testing.assert_allclose(low(w), fn(w), rtol=0.02)


def test_one_map_several_programs(w):
    """One function under several maps, in any order, warm or cold."""
    jitted = jax.jit(net)
    maps = [PolicyMap(BF16, {"attention": name}) for name in (F32, F16, BF16)]
    for policies in (*maps, *reversed(maps)):
        name = policies["attention"].compute_dtype.name
        assert dots(amp(jitted, amp_policy=policies), w) == [name, BF16, name]


def test_amp_in_amp(w):
    """The innermost wins for its own part; twice the same is the same as once.

    The inner one has matched the key, so nothing is said of the outer one."""
    policies = PolicyMap("mixed_bfloat16", {"attention": F32})
    once = amp(net, amp_policy=policies)
    twice = amp(once, amp_policy=policies)
    assert dots(twice, w) == dots(once, w)
    np.testing.assert_array_equal(jax.jit(twice)(w), jax.jit(once)(w))


# One attention layer of a model of each framework.

WIDTH = 8


def quick(fn):
    """Compiled without optimisation, which takes most of a test's time."""
    return jax.jit(fn, compiler_options={"xla_backend_optimization_level": 0})


class EquinoxBlock(eqx.Module):
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP

    def __init__(self, key):
        self.attention = eqx.nn.MultiheadAttention(2, WIDTH, key=key)
        self.mlp = eqx.nn.MLP(WIDTH, WIDTH, WIDTH, depth=1, key=key)

    def __call__(self, x):
        x = x + self.attention(x, x, x)
        return x + jax.vmap(self.mlp)(x)


class EquinoxNet(eqx.Module):
    blocks: list[EquinoxBlock]

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def equinox_net():
    model = EquinoxNet([EquinoxBlock(jr.key(0)), EquinoxBlock(jr.key(1))])
    params, static = eqx.partition(model, eqx.is_array)

    def apply(params, x):
        return scope_modules(eqx.combine(params, static))(x)

    return apply, params, "blocks/1/attention"


class LinenBlock(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = x + linen.MultiHeadDotProductAttention(2, name="attention")(x)
        return x + linen.Dense(WIDTH)(linen.Dense(WIDTH)(x))


class LinenNet(linen.Module):
    @linen.compact
    def __call__(self, x):
        for i in range(2):
            x = LinenBlock(name=f"block_{i}")(x)
        return x


def linen_net():
    params = quick(LinenNet().init)(jr.key(0), jnp.ones((4, WIDTH)))
    return LinenNet().apply, params, "LinenNet/block_1/attention"


class NNXBlock(nnx.Module):
    def __init__(self, rngs):
        self.attention = nnx.MultiHeadAttention(2, WIDTH, decode=False, rngs=rngs)
        self.first = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.second = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(x)
        return x + self.second(self.first(x))


class NNXNet(nnx.Module):
    def __init__(self, rngs):
        self.block_0, self.block_1 = NNXBlock(rngs), NNXBlock(rngs)

    def __call__(self, x):
        return self.block_1(self.block_0(x))


def nnx_net():
    graph, state = nnx.split(NNXNet(nnx.Rngs(0)))

    def apply(state, x):
        return scope_modules(nnx.merge(graph, state))(x)

    return apply, state, "block_1/attention"


def haiku_net():
    class Block(hk.Module):
        def __call__(self, x):
            attention = hk.MultiHeadAttention(
                2, WIDTH // 2, w_init=hk.initializers.Constant(0.1), name="attention"
            )
            x = x + attention(x, x, x)
            return x + hk.Linear(WIDTH)(hk.Linear(WIDTH)(x))

    def forward(x):
        for i in range(2):
            x = Block(name=f"block_{i}")(x)
        return x

    net = hk.without_apply_rng(hk.transform(forward))
    params = quick(net.init)(jr.key(0), jnp.ones((4, WIDTH)))
    return net.apply, params, "block_1/attention"


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "make", (equinox_net, linen_net, nnx_net, haiku_net), ids=lambda f: f.__name__
)
def test_one_attention_layer_in_float32(make):
    """By its path: four projections and two products of it, and of nothing else."""
    apply, params, path = make()
    x = jr.normal(jr.key(1), (4, WIDTH))
    policies = PolicyMap("mixed_bfloat16", {path: F32})
    low = amp(apply, amp_policy=policies, strict=True)
    found = dots(low, params, x)
    assert len(found) == 2 * (6 + 2)
    assert found == [BF16] * 8 + [F32] * 6 + [BF16] * 2
    grad = jax.grad(lambda params: low(params, x).sum(), allow_int=True)
    backward = dots(grad, params)
    assert backward.count(F32) == 3 * 6  # two more of each, and none of the others
    assert len(backward) >= 3 * 16 - 3  # the input of the first three has no gradient
    out, expected = quick(low)(params, x), quick(apply)(params, x)
    np.testing.assert_allclose(out, expected, rtol=0.1, atol=0.1)
