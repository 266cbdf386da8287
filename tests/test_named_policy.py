"""Policies with names: made, limited, saved, set for a whole program, and followed."""

import copy
import dataclasses
import functools
import json
import pickle
import re
import threading

import cloudpickle
import equinox as eqx
import jax
import jax.extend.core.primitives as primitives
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st
from jax import lax

from benchmarks.measure import CONTRACTIONS, operand_dtype, walk
from jaxamp_like import (
    AmpError,
    AmpWarning,
    Policy,
    PolicyMap,
    amp,
    default_amp_policy,
    get_policy,
    global_policy,
    set_global_policy,
    using_policy,
)
from jaxamp_like._rules.by_shapes import ByShapes
from jaxamp_like.presets import jmp, pytorch_autocast
from jaxamp_like.rules import (
    float8,
    int8,
    keep_inputs,
    not_divisible_by,
    saving_low,
    sums_more_than,
    use_compute_precision,
    use_compute_precision_wide_result,
    use_dot_algorithm,
    use_original_precision,
    use_precision,
    use_precision_by_pass,
    when,
    wide,
)

pytestmark = pytest.mark.quick

DOT = lax.dot_general_p
F32, F16, BF16 = "float32", "float16", "bfloat16"
scope = jax.named_scope


@pytest.fixture(autouse=True)
def as_at_the_start():
    yield
    set_global_policy(None)


@pytest.fixture
def w():
    return jnp.eye(4) + 0.1


def dots(fn, *args):
    eqns = (eqn for eqn, _ in walk(jax.make_jaxpr(fn)(*args)))
    return [operand_dtype(e) for e in eqns if e.primitive.name in CONTRACTIONS]


def net(w):
    with scope("encoder"):
        h = w @ w
        with scope("attention"):
            h = jnp.tanh(h @ w)
    with scope("head"):
        return h @ w


# Made from names and strings.


@pytest.mark.parametrize(
    "spec, compute, param, output",
    (
        ("float32", F32, F32, F32),
        ("bfloat16", BF16, BF16, BF16),
        ("f16", F16, F16, F16),
        ("full", F32, F32, F32),
        (" mixed_float16 ", F16, F32, None),
        ("mixed_bfloat16", BF16, F32, None),
        ("params=float32,compute=bfloat16,output=float32", BF16, F32, F32),
        ("p=f32,c=bf16,o=f32", BF16, F32, F32),
        ("output=f16 , compute = bf16", BF16, None, F16),
        ("p=full", None, F32, None),
        ("c=half", F16, None, None),  # on a CPU
    ),
)
def test_names_and_strings(spec, compute, param, output):
    policy = get_policy(spec)
    assert policy == Policy(
        compute_dtype=compute, param_dtype=param, output_dtype=output
    )
    assert policy.compute_dtype == (compute and jnp.dtype(compute))
    assert get_policy(policy) is policy


@pytest.mark.parametrize(
    "spec, error, match",
    (
        ("mixed_flaot16", ValueError, "Did you mean 'mixed_float16'.*Known names are"),
        ("int8", ValueError, "no policy called 'int8'.*'int8_from_mixed_bfloat16'"),
        (
            "int2_from_float32",
            ValueError,
            "by 'int8', 'float8', 'mxfp8', 'nvfp4', 'int4' and the policy",
        ),
        ("", ValueError, "no policy called ''"),
        ("p=f32,c", ValueError, r"position 6: expected `key=dtype`[^\n]*\n.*\n {8}\^$"),
        ("p=f32,,c=f16", ValueError, "position 6: expected `key=dtype`"),
        ("p=f32, x=bf16", ValueError, r"position 7: .*known key.*\n.*\n {9}\^$"),
        ("c=bfloat6", ValueError, r"position 2: .*'bfloat16'\?\n.*\n {4}\^{7}$"),
        ("c=int8", ValueError, "position 2: expected a dtype"),
        ("c=f16,compute=f16", ValueError, "position 6: `compute_dtype` is given twice"),
        ("c=f16=f32", ValueError, "position 2: expected a dtype"),
        ("float64", ValueError, "only has with x64"),
        ("p=f64", ValueError, "`param_dtype` is float64, which JAX only has with x64"),
        ("int8_from_nothing", ValueError, "no policy called 'nothing'"),
        (None, TypeError, "but got None"),
        (jnp.float32, TypeError, "a name such as 'mixed_bfloat16'"),
    ),
)
def test_bad_names_and_strings(spec, error, match):
    with pytest.raises(error, match=f"(?s){match}"):
        get_policy(spec)


@pytest.mark.parametrize(
    "make, error, match",
    (
        (lambda: Policy("int8"), TypeError, "`compute_dtype` must be a floating"),
        (lambda: Policy(param_dtype="float128"), TypeError, "`param_dtype` must be"),
        (lambda: Policy(output_dtype="float64"), ValueError, "with x64"),
        (lambda: Policy("mixed_float16"), TypeError, "by `get_policy`"),
        (lambda: Policy("p=f32"), TypeError, "by `get_policy`"),
        (lambda: Policy(rules=[1]), TypeError, "`rules` must be a dict .* got list"),
        (lambda: Policy(rules={3: F32}), TypeError, "key of `rules` must be .* got 3"),
        (lambda: Policy(rules={"a": 3}), TypeError, r"`rules\['a'\]` must be a rule"),
        (lambda: Policy(rules={re.compile(b"a"): F32}), TypeError, "key of `rules`"),
        (lambda: Policy(rules={"a": "mixed_float16"}), TypeError, "`PolicyMap` gives"),
        (lambda: Policy(rules={"a": Policy()}), TypeError, "`PolicyMap` gives"),
        (lambda: Policy.from_dict({"compute": F32}), ValueError, "keys compute_dtype"),
        (lambda: Policy.from_dict("float32"), ValueError, "data of a policy"),
        (
            lambda: Policy.from_dict(PolicyMap("float32").to_dict()),
            ValueError,
            r"read it by `PolicyMap\.from_dict\(data\)`",
        ),
        (lambda: Policy.from_dict({"rules": [{"a": 1}]}), ValueError, "is malformed"),
        (lambda: Policy.from_dict({"limit": {}}), ValueError, "is malformed: KeyError"),
        (lambda: Policy().only(), ValueError, "`only` needs a key"),
        (lambda: Policy().excluding(["a"]), TypeError, "one by one"),
        (lambda: Policy().only(3), TypeError, "must be a primitive .* got 3"),
        (lambda: Policy().only(primitives.scan_p), ValueError, "a whole program"),
        (lambda: Policy().where("norm"), TypeError, "`predicate` must be callable"),
        (lambda: Policy().only("a").excluding("b"), ValueError, "limited by `only`"),
        (lambda: Policy().excluding("a").excluding("b"), ValueError, "at once"),
        (lambda: Policy().where(bool).only("b"), ValueError, "limited by `where`"),
        (lambda: set_global_policy({"a": F32}), TypeError, "Rules alone say no dtype"),
        (lambda: set_global_policy(3), TypeError, "but got 3"),
    ),
)
def test_bad_arguments(make, error, match):
    with pytest.raises(error, match=match):
        make()


def test_unhashable_predicates():
    class Unhashable:
        __hash__ = None

        def __call__(self, site):
            return True

    with pytest.raises(TypeError, match="must be hashable"):
        Policy().where(Unhashable())


# Casts of trees.


def test_casts_touch_floats_only():
    tree = {
        "w": jnp.ones(2),
        "np": np.ones(2),
        "scalar": np.float64(1.5),
        "struct": jax.ShapeDtypeStruct((2,), F32),
        "half": jnp.ones(2, F16),
        "int": jnp.arange(2),
        "np_int": np.arange(2),
        "bool": np.array([True]),
        "complex": jnp.ones(2, "complex64"),
        "key": jax.random.key(0),
        "int_struct": jax.ShapeDtypeStruct((2,), jnp.int32),
        "python": 1.5,
        "text": "a",
        "none": None,
        "float0": np.zeros(2, jax.dtypes.float0),
    }
    policy = Policy(F16, BF16)
    cast = policy.cast_to_param(tree)
    assert jax.tree.structure(cast) == jax.tree.structure(tree)
    for name in ("w", "np", "scalar", "struct", "half"):
        assert cast[name].dtype == BF16, name
    rest = [name for name in tree if getattr(cast[name], "dtype", None) != BF16]
    assert len(rest) == len(tree) - 5
    assert all(cast[name] is tree[name] for name in rest)
    assert policy.cast_to_output(tree) is tree  # None: as it is
    assert policy.cast_to_compute(tree)["w"].dtype == F16
    model = eqx.nn.Linear(2, 2, key=jax.random.key(0))
    assert policy.cast_to_param(model).weight.dtype == BF16


# As an argument of amp.


@pytest.mark.parametrize(
    "policy, expected",
    (
        ("mixed_bfloat16", [BF16] * 3),
        ("c=f16", [F16] * 3),
        (Policy(BF16), [BF16] * 3),
        (
            Policy(BF16, rules={"head": F16, DOT: use_compute_precision}),
            [BF16] * 2 + [F16],
        ),
        (Policy(), [F32] * 3),  # as it is
        (Policy(rules=default_amp_policy | {"head": F16}), [F32] * 2 + [F16]),
        ("float32", [F32] * 3),
        (Policy(BF16).only("attention"), [F32, BF16, F32]),
        (Policy(BF16).only("encoder/attention", re.compile("head")), [F32, BF16, BF16]),
        (Policy(BF16).only(DOT), [BF16] * 3),
        (Policy(BF16).excluding("encoder"), [F32, F32, BF16]),
        (Policy(BF16).excluding(DOT), [F32] * 3),
        (Policy(BF16).where(lambda site: "head" in site.scope), [F32, F32, BF16]),
        (Policy(BF16).where(sums_more_than(3)), [BF16] * 3),
    ),
)
def test_amp_takes_policies(policy, expected, w):
    low = amp(net, amp_policy=policy, strict=True)
    assert dots(low, w) == expected
    assert dots(amp(amp_policy=policy)(net), w) == expected
    assert dots(jax.jit(low), w) == expected
    grad = jax.grad(lambda w: low(w).astype(F32).sum())
    assert sorted(dots(grad, w)) == sorted(expected * 3)


def test_a_limit_leaves_ops_as_written(w):
    """Of primitives only contractions: `tanh` and what moves data are in float32."""
    eqns = [
        e
        for e, _ in walk(jax.make_jaxpr(amp(net, amp_policy=Policy(BF16).only(DOT)))(w))
    ]
    (tanh,) = (e for e in eqns if e.primitive is lax.tanh_p)
    assert tanh.invars[0].aval.dtype == F32
    excluding = amp(net, amp_policy=Policy(BF16).excluding(lax.tanh_p))
    eqns = [e for e, _ in walk(jax.make_jaxpr(excluding)(w))]
    (tanh,) = (e for e in eqns if e.primitive is lax.tanh_p)
    assert tanh.invars[0].aval.dtype == F32
    assert dots(excluding, w) == [BF16] * 3


@pytest.mark.parametrize("wrap", (jax.jit, jax.checkpoint), ids=("jit", "remat"))
def test_limits_reach_into_programs(wrap, w):
    fn = wrap(lambda w: lax.scan(lambda h, _: (net(h), None), w, length=2)[0])
    for policy, expected in (
        (Policy(BF16).only("attention"), [F32, BF16, F32]),
        (Policy(BF16).excluding("attention"), [BF16, F32, BF16]),
        (Policy(BF16).where(lambda s: "head" not in s.scope), [BF16, BF16, F32]),
    ):
        assert dots(amp(fn, amp_policy=policy), w) == expected


def test_limits_with_typos_are_reported(w):
    for policy in (Policy(BF16).excluding("haed"), Policy(BF16).only("net", lax.exp_p)):
        with pytest.raises(AmpError, match="matched nothing"):
            amp(net, amp_policy=policy, strict=True)(w)
    with pytest.warns(AmpWarning, match="haed"):
        amp(net, amp_policy=Policy(BF16).excluding("haed"))(w)


def test_output_dtype(w):
    """Floating results are cast, whatever dtype their author gave them."""

    def fn(w):
        return {
            "y": net(w),
            "i": jnp.arange(2),
            "half": w.astype(F16),
            "n": 3,
            "f": 1.5,
        }

    low = amp(fn, amp_policy="p=f32,c=bf16,o=bf16")
    for out in (low(w), jax.jit(low)(w)):
        assert out["y"].dtype == out["half"].dtype == BF16
        assert out["i"].dtype == jnp.arange(2).dtype
    assert low(w)["n"] == 3 and low(w)["f"] == 1.5
    assert amp(fn, amp_policy=Policy(BF16))(w)["y"].dtype == F32
    assert amp(fn, amp_policy=Policy(BF16))(w)["half"].dtype == F16
    grad = jax.grad(lambda w: low(w)["y"].sum())(w)
    assert grad.dtype == F32  # of what it is a gradient of


@pytest.mark.parametrize(
    "policy", (Policy(), "float32", Policy(BF16).excluding(re.compile(".*"))), ids=str
)
def test_a_policy_that_changes_nothing(policy, w):
    @scope("all")
    def loss(x):
        return (jnp.tanh(x @ w) @ w).sum()

    low = amp(loss, amp_policy=policy)
    # Compiled: run op by op, `jnp.tanh` and its derivative are fused in one of the two.
    for transform in (jax.jit, lambda fn: jax.jit(jax.grad(fn))):
        np.testing.assert_array_equal(transform(low)(w), transform(loss)(w))


@pytest.mark.parametrize(
    "policy, dtype",
    (("mixed_bfloat16", F16), (Policy(F16), BF16), (PolicyMap(BF16, {"a": F16}), F16)),
)
def test_two_compute_dtypes_that_disagree(policy, dtype):
    with pytest.raises(ValueError, match=r"`compute_dtype` is .* computes in"):
        amp(net, compute_dtype=dtype, amp_policy=policy)


def test_compute_dtype_fills_in_what_a_policy_leaves_open(w):
    assert dots(amp(net, compute_dtype=BF16, amp_policy=Policy()), w) == [BF16] * 3
    assert dots(amp(net, compute_dtype=BF16, amp_policy=Policy(BF16)), w) == [BF16] * 3
    policies = PolicyMap(Policy(), {"head": "float32"})
    assert dots(amp(net, compute_dtype=F16, amp_policy=policies), w) == [F16, F16, F32]


# For a whole program.


def test_each_wrap_gets_the_global_policy_of_its_time(w):
    """Jitted or not, called before or after: nothing is read at call time."""
    wrapped = {}
    for name in ("mixed_bfloat16", "mixed_float16", "float32"):
        set_global_policy(name)
        wrapped[name] = amp(net)
        wrapped[f"{name} jitted"] = jax.jit(amp(net))
        if name == "mixed_float16":
            wrapped[f"{name} jitted"](w)  # compiled before the next one is set
    set_global_policy("c=f16")
    for name, fn in wrapped.items():
        expected = str(get_policy(name.removesuffix(" jitted")).compute_dtype)
        assert dots(fn, w) == [expected] * 3, name
        out = amp(net, amp_policy=name.split()[0])(w)
        np.testing.assert_allclose(fn(w), out, rtol=0.02)  # 2 eps of bfloat16
    assert dots(amp(net), w) == [F16] * 3


def test_a_decorator_reads_where_it_is_applied(w):
    with using_policy("float32"):
        decorator = amp()
    with using_policy("mixed_bfloat16"):
        low = decorator(net)
    assert dots(low, w) == [BF16] * 3


def test_arguments_go_before_the_global_policy(w):
    rules = default_amp_policy | {"head": F32}
    set_global_policy(Policy(BF16, output_dtype=BF16, rules=rules))
    assert dots(amp(net), w) == [BF16, BF16, F32]
    assert amp(net)(w).dtype == BF16
    assert dots(amp(net, compute_dtype=F16), w) == [F16, F16, F32]
    assert dots(amp(net, amp_policy={DOT: use_compute_precision}), w) == [BF16] * 3
    assert dots(amp(net, amp_policy="mixed_float16"), w) == [F16] * 3
    assert amp(net, amp_policy="mixed_float16")(w).dtype == F32
    set_global_policy(PolicyMap(BF16, {"head": F32}))
    assert dots(amp(net), w) == [BF16, BF16, F32]
    assert dots(amp(net, compute_dtype=F16), w) == [F16, F16, F32]
    set_global_policy(PolicyMap(BF16))  # empty, but a map
    assert global_policy() == PolicyMap(BF16)


def test_blocks_nest_and_belong_to_their_thread():
    seen = []
    set_global_policy("mixed_bfloat16")
    with using_policy("float32") as outer:
        assert global_policy() == outer == get_policy("float32")
        with pytest.raises(RuntimeError, match="inside"):
            with using_policy(Policy(F16)):
                assert global_policy() == Policy(F16)
                raise RuntimeError("inside")
        assert global_policy() == outer
        thread = threading.Thread(target=lambda: seen.append(global_policy()))
        thread.start()
        thread.join()
        with pytest.raises(AmpError, match="within `using_policy`"):
            set_global_policy("mixed_float16")
    assert seen == [get_policy("mixed_bfloat16")] == [global_policy()]
    set_global_policy(None)
    assert global_policy() == Policy(F16)


# Values: compared, printed and saved.

dtypes = st.sampled_from((None, F16, BF16, F32))
patterns = st.builds(
    re.compile,
    st.sampled_from((r".*/norm_\d+", "a|b", "layers/[01]/.*", "(?i)Head")),
    st.sampled_from((re.NOFLAG, re.IGNORECASE, re.DOTALL)),
)
paths = st.sampled_from(("head", "encoder/attention", "/layers/0/", "ünïcode", "a.b"))
keys = st.one_of(
    paths, patterns, st.sampled_from((DOT, lax.exp_p, lax.tanh_p, lax.scatter_add_p))
)
rules = st.sampled_from(
    (
        use_compute_precision,
        use_original_precision,
        use_precision(BF16),
        F32,
        jnp.float16,
        keep_inputs,
        when(sums_more_than(16), F32, use_compute_precision),
        when(not_divisible_by(), "float32", when(sums_more_than(4), F16, BF16)),
    )
)
bases = st.sampled_from(({}, default_amp_policy, jmp(), pytorch_autocast("cpu")))
rule_dicts = st.builds(
    lambda a, b: a | b,
    bases,
    st.dictionaries(
        keys.filter(lambda key: key is not lax.scatter_add_p), rules, max_size=3
    ),
)


def limit(policy, kind, keys):
    if kind == "where":
        return policy.where(sums_more_than(len(keys) + 1))
    return policy if kind is None or not keys else getattr(policy, kind)(*keys)


policies = st.builds(
    limit,
    st.builds(
        Policy,
        compute_dtype=dtypes,
        param_dtype=dtypes,
        output_dtype=dtypes,
        rules=st.none() | rule_dicts,
    ),
    st.sampled_from((None, "only", "excluding", "where")),
    st.lists(keys, max_size=3),
)
maps = st.builds(
    PolicyMap,
    policies,
    st.dictionaries(
        (paths | patterns).map(lambda k: k.strip("/") if isinstance(k, str) else k),
        policies,
        max_size=3,
    ),
)


def test_a_block_in_which_nothing_is_wrapped_is_told():
    low = amp(jnp.dot)
    with pytest.warns(AmpWarning, match="had no effect: nothing in the block, in its"):
        with using_policy("mixed_bfloat16"):
            low(jnp.ones(2), jnp.ones(2))
    with pytest.raises(ZeroDivisionError):  # an error says enough
        with using_policy("mixed_bfloat16"):
            raise ZeroDivisionError


@given(policies | maps)
def test_round_trips(policy):
    names = {"Policy": Policy, "PolicyMap": PolicyMap, "re": re}
    data = policy.to_dict()
    for again in (
        type(policy).from_dict(data),
        type(policy).from_dict(json.loads(json.dumps(data))),
        eval(repr(policy), names),
        pickle.loads(pickle.dumps(policy)),
        copy.deepcopy(policy),
    ):
        assert again == policy
        assert hash(again) == hash(policy)
        assert repr(again) == repr(policy)
        assert again.to_dict() == data
        assert again.lookup() is policy.lookup()


@given(policies, policies)
def test_equal_means_the_same(one, other):
    assert (one == other) == (one.to_dict() == other.to_dict())
    assert (one != other) or hash(one) == hash(other)
    assert one != 3 and PolicyMap(one) != one


def test_normal_form():
    a, b = re.compile("a.*"), re.compile(".*b")
    one = Policy(rules={"x": F32, DOT: F16, "/p/q/": BF16, a: F32})
    assert one == Policy(rules={a: F32, "p/q": BF16, DOT: use_precision(F16), "x": F32})
    assert Policy(rules={a: F32, b: F16}) != Policy(
        rules={b: F16, a: F32}
    )  # first wins
    assert Policy(rules=dict(default_amp_policy)) == Policy()
    assert Policy(BF16).only("a", "b") == Policy(BF16).only("b", "a")
    assert PolicyMap(F32, {"a": BF16, "b": F16}) == PolicyMap(
        F32, {"b": F16, "a": BF16}
    )
    extended = Policy(rules=one.rules | {"x": BF16})
    assert (
        extended.rules["x"] == use_precision(BF16)
        and one.rules["x"] != extended.rules["x"]
    )


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Policy().compute_dtype = jnp.dtype(F32)
    with pytest.raises(TypeError):
        Policy(rules={"a": F32}).rules["a"] = F16
    with pytest.raises(TypeError):
        PolicyMap(F32)["a"] = F16


def rule_of_mine(compute_dtype, original_dtypes, *invars, **bind_params):
    return invars, bind_params


def predicate_of_mine(site):
    return True


mine = jax.extend.core.Primitive("mine")


@pytest.mark.parametrize(
    "policy, match",
    (
        (Policy(rules={"a": rule_of_mine}), "rule_of_mine.*is a function of yours"),
        (
            Policy().where(predicate_of_mine),
            "predicate_of_mine.*is a function of yours",
        ),
        (
            Policy(rules={"a": when(predicate_of_mine, F16, F32)}),
            r"`rules\['a'\]` can't be saved",
        ),
        (Policy(rules={mine: F32}), "primitive `mine` can't be saved"),
        (PolicyMap(F32, {"a": Policy(rules={"b": rule_of_mine})}), "function of yours"),
    ),
)
def test_what_can_not_be_saved(policy, match):
    with pytest.raises(AmpError, match=match):
        policy.to_dict()
    assert "_of_mine" in repr(policy) or "mine" in repr(policy)
    assert hash(policy) == hash(copy.copy(policy))


def test_functions_made_by_amp_are_pickled_as_those_of_jit_are():
    """Such as to be sent to another process, by what runs jobs on a cluster."""
    mixed = amp(lambda x, w: jnp.sum(x @ w), compute_dtype="bfloat16")
    args = jnp.ones((2, 4)), jnp.ones((4, 3))
    for fn in (mixed, jax.jit(jax.grad(mixed))):
        expected = fn(*args)  # what was traced is left behind
        again = cloudpickle.loads(cloudpickle.dumps(fn))
        np.testing.assert_array_equal(again(*args), expected)
        assert "bf16" in str(jax.make_jaxpr(again)(*args))


def test_functions_of_a_module_pickle():
    policy = Policy(BF16, rules=default_amp_policy | {"a": rule_of_mine})
    assert pickle.loads(pickle.dumps(policy)) == policy


@pytest.mark.parametrize(
    "row, match",
    (
        (
            {"primitive": "dot_generel", "rule": F32},
            "no primitive called 'dot_generel'",
        ),
        ({"scope": "a", "rule": {"class": "Nope"}}, "no rule of the class 'Nope'"),
    ),
)
def test_saved_by_another_version(row, match):
    with pytest.raises(AmpError, match=match):
        Policy.from_dict({"rules": [row]})


def saved(rule):
    """A policy of one rule, as JSON gives it back."""
    rules = {"a": rule}
    return json.loads(json.dumps(Policy(BF16, rules=rules).to_dict()))


def pred(name, *args):
    return {"predicate": {"name": name, "args": list(args)}}


RULES = {
    "float8": float8(where=None),
    "int8": int8(where=None),
    "when": when(sums_more_than(8), F32, BF16),
    "by pass": use_precision_by_pass(weight_gradient=wide()),
    "algorithm": use_dot_algorithm("highest"),
    "wide": use_compute_precision_wide_result,
    "saving": saving_low(F32),
    "saving bits": saving_low("float8_e5m2", block=16),
    "shapes": ByShapes((("*x16+,16+x4", use_compute_precision),), use_precision(F32)),
}


@pytest.mark.parametrize(
    "rule, field, value, match",
    (
        ("float8", "weight_gradient", "flaot8", "'float8' or 'compute'.*'flaot8'.*Did"),
        ("float8", "grad_dtype", {"dtype": "bfloat16"}, "'float8_e5m2', but got dtype"),
        ("float8", "keep", None, "'float8' or 'compute', but got None"),
        ("float8", "granularity", "rows", "'tensor' or 'row'.*Did you mean 'row'"),
        ("float8", "power_of_two", 1, "True or False, but got 1"),
        ("float8", "amax_history_length", 2.5, "an integer, but got 2.5"),
        ("float8", "amax_history_length", 7, "`delayed=True` too"),
        ("float8", "leave", "head", "a sequence of regular expressions"),
        ("float8", "leave", ["("], "regular expressions as strings, but holds"),
        ("float8", "where", 3, "must be callable"),
        ("int8", "migration", 40, "from 0 to 1, but got 40"),
        ("int8", "migration", "0.5", "finite number of 0 or more, but got '0.5'"),
        ("int8", "activation_max", -1, "above 0, but got -1"),
        ("int8", "epsilon", True, "of 0 or more, but got True"),
        ("int8", "weight_only", "no", "True or False, but got 'no'"),
        ("int8", "migratoin", 0.5, "no field 'migratoin'. Did you mean 'migration'"),
        ("when", "rule", 3, "a Rule, but got 3"),
        ("when", "otherwise", {"rule": "flaot16"}, "'flaot16', which is no floating"),
        ("when", "predicate", pred("dataclass"), "no predicate 'datac"),
        ("when", "predicate", pred("sums_more_than", 0), "`terms` must"),
        ("by pass", "weight", "left", "'lhs', 'rhs' or None, but got 'left'"),
        ("by pass", "forward", [{"dtype": "int8"}, False], "`forward` must be a float"),
        ("by pass", "forward", [None, "yes"], "`wide` must be True or False"),
        ("algorithm", "algorithm", "hihgest", "must be a `lax.DotAlg.*'hihgest'"),
        (
            "algorithm",
            "algorithm",
            {"enum": "Precision", "name": "HIHGEST"},
            r"no `lax.Precision.HIHGEST`",
        ),
        ("wide", "wide_result", 2, "True or False, but got 2"),
        ("wide", "dtype", {"dtype": "int8"}, "`dtype` must be a floating dtype"),
        ("saving", "rule", None, "`rule` must be a Rule, but got None"),
        ("shapes", "rules", [["*", {"rule": F32}]], "shapes of both operands.*'\\*'"),
        (
            "shapes",
            "rules",
            [["8,8", 3]],
            r"`rules\[0\]\[1\]` must be a Rule, but got 3",
        ),
    ),
)
def test_nonsense_in_saved_rules_is_refused(rule, field, value, match):
    data = saved(RULES[rule])
    assert Policy.from_dict(data) == Policy(BF16, rules={"a": RULES[rule]})
    (row,) = data["rules"]
    if isinstance(row["rule"], str):  # known by its name: written out here
        row["rule"] = {"class": "UsePrecision"}
    row["rule"] |= {field: value}
    with pytest.raises((TypeError, ValueError), match=rf"`rules\['a'\]`.*{match}"):
        Policy.from_dict(data)


def test_nonsense_in_saved_limits_is_refused():
    data = {"limit": {"kind": "onyl", "keys": [{"scope": "a"}]}}
    match = "`kind` must be 'only', 'excluding' or 'where', but got 'onyl'. Did"
    with pytest.raises(ValueError, match=match):
        Policy.from_dict(data)
    with pytest.raises(ValueError, match=r"'\(' is no regular expression"):
        Policy.from_dict({"rules": [{"regex": "(", "rule": F32}]})


def test_a_saved_choice_by_pass_still_decides(w):
    """It came back as a tuple without a name, which no rule could read."""
    data = saved(use_precision_by_pass(weight_gradient=wide()))
    data["rules"][0]["rule"] |= {"weight": "rhs"}  # equal to no policy that was made
    low = amp(scope("a")(lambda w: (w @ w).sum()), amp_policy=Policy.from_dict(data))
    assert dots(jax.grad(low), w) == [BF16] * 3


def test_data_is_short():
    """A policy that extends another says by how much, not all of it."""
    policy = Policy(BF16, rules=default_amp_policy | {"head": F32, lax.exp_p: BF16})
    assert policy.to_dict()["rules"] == [
        {"extends": "default_amp_policy"},
        {"primitive": "exp", "rule": BF16},
        {"scope": "head", "rule": F32},
    ]
    assert Policy(rules=jmp()).to_dict() == {"rules": [{"extends": "jmp()"}]}


def test_static_arguments_of_jit(w):
    traced = []

    def apply(policy, w):
        traced.append(policy)
        return amp(net, amp_policy=policy)(w)

    static = jax.jit(apply, static_argnums=0)
    as_argument = jax.jit(apply)  # a pytree without leaves
    policies = [Policy(BF16), PolicyMap(BF16, {"head": F32}), Policy(BF16).only("head")]
    for policy in policies:
        for fn in (static, as_argument):
            traced.clear()
            first = fn(policy, w)
            second = fn(copy.deepcopy(policy), w)
            assert traced == [policy]  # an equal one is not traced again
            np.testing.assert_array_equal(first, second)
        low = amp(net, amp_policy=policy)
        assert dots(functools.partial(as_argument, policy), w) == dots(low, w)


class Module(eqx.Module):
    weight: jax.Array
    static: Policy | PolicyMap = eqx.field(static=True)
    dynamic: Policy | PolicyMap

    def __call__(self, x):
        with_scope = scope("head")(jnp.matmul)
        return amp(with_scope, amp_policy=self.static)(x, self.weight)


@pytest.mark.parametrize("policy", (Policy(F16), PolicyMap(BF16, {"head": F16})))
def test_fields_of_modules(policy, w):
    module = Module(w, policy, policy)
    assert jax.tree.leaves(module) == [w]
    fn = eqx.filter_jit(lambda module, x: module(x))
    grads = eqx.filter_grad(lambda module, x: fn(module, x).sum())(module, w)
    assert grads.static == grads.dynamic == policy
    assert dots(module, w) == [F16]


@pytest.mark.parametrize(
    ("name", "meant"),
    (
        ("fp8", "float8_from_mixed_bfloat16"),
        ("mixed_float8", "float8_from_mixed_bfloat16"),
        ("mixed_int8", "int8_from_mixed_bfloat16"),
    ),
)
def test_names_of_8_bits_that_are_none_lead_to_those_that_are(name, meant):
    with pytest.raises(ValueError, match=f"Did you mean '{meant}'"):
        amp(jnp.dot, amp_policy=name)
    get_policy(meant)


def test_tf32_is_no_dtype():
    with pytest.raises(TypeError, match=r"TF32 is a way to multiply.*use_dot_algorith"):
        amp(jnp.dot, compute_dtype="tf32")
