"""`calibrate`: what it keeps, what it lowers, and what it says of bad input."""

import functools
import itertools
import json
import math
import pickle
import warnings

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from jaxamp_like import (
    AmpError,
    AmpWarning,
    Budget,
    Policy,
    PolicyMap,
    amp,
    amp_stop,
    calibrate,
)
from jaxamp_like._calibrate import deciding, runs
from jaxamp_like._calibrate.budget import Errors
from jaxamp_like._calibrate.candidates import as_candidates
from jaxamp_like._calibrate.costs import ContractionCost
from jaxamp_like._calibrate.groups import grouped
from jaxamp_like._calibrate.marks import Contraction
from jaxamp_like._calibrate.prices import Prices, prices
from jaxamp_like._calibrate.rounding import rounded
from jaxamp_like._calibrate.search import Ranking, search, sensitivities
from jaxamp_like._calibrate.state import MeasurementStore
from jaxamp_like._reports.walk import CONTRACTIONS, walk
from jaxamp_like.reports import Calibration, Device

from .planted import KINDS, planted

pytestmark = pytest.mark.rest

# What `amp` is to do with it.


def weights(*names, dim=8):
    rng = np.random.default_rng(0)
    return {n: rng.normal(size=(dim, dim)).astype("float32") / 3 for n in names}


def data(count=4, dim=8):
    rng = np.random.default_rng(1)
    return [rng.normal(size=(5, dim)).astype("float32") for _ in range(count)]


def branches(w, x):
    """Three scopes, of which `steep` is the most sensitive."""
    with jax.named_scope("flat"):
        total = jnp.mean(jnp.tanh(x @ w["flat"]))
    with jax.named_scope("steep"):
        total += jnp.mean(jnp.sin(40 * x @ w["steep"]))
    with jax.named_scope("plain"):
        return total + jnp.mean((x @ w["plain"]) ** 2)


NAMES = ("flat", "steep", "plain")
BATCHES = [(weights(*NAMES), x) for x in data()]


@pytest.fixture(scope="module")
def found():
    return calibrate(branches, BATCHES, budget=0.02)


def contractions(fn, *args):
    """Scope and equation of each contraction."""
    found = walk(jax.make_jaxpr(fn)(*args), ())
    return [(at.scope, e) for e, at, _ in found if e.primitive.name in CONTRACTIONS]


def operand_dtypes(fn, *args):
    """The dtype that the contractions of each scope read."""
    found = contractions(fn, *args)
    return {scope[-1]: e.invars[0].aval.dtype.name for scope, e in found if scope}


def error_of(policy, fn, batch):
    true = jax.grad(fn)(*batch)
    got = jax.jit(jax.grad(amp(fn, amp_policy=policy)))(*batch)
    pairs = [*zip(jax.tree.leaves(true), jax.tree.leaves(got), strict=True)]
    error = sum(float(jnp.sum((a - b) ** 2)) for a, b in pairs)
    return math.sqrt(error / sum(float(jnp.sum(a**2)) for a, _ in pairs))


def test_the_policy_lowers_all_but_what_is_sensitive(found):
    low = operand_dtypes(amp(branches, amp_policy=found.policy), *BATCHES[0])
    assert low == {"flat": "bfloat16", "steep": "float32", "plain": "bfloat16"}
    assert [group.name for group in found.kept_full] == ["steep"]
    assert found.low_share == pytest.approx(2 / 3)


def test_the_policy_meets_the_budget_on_data_that_it_was_not_chosen_on(found):
    assert found.met and 0 < found.held_out.gradients <= 0.02
    fresh = np.random.default_rng(5).normal(size=(5, 8)).astype("float32")
    assert error_of(found.policy, branches, (BATCHES[0][0], fresh)) < 0.04


@pytest.mark.parametrize("count", (1, 4))
def test_a_policy_is_checked_at_the_parameters_as_given(count, monkeypatch):
    checked = []

    def seen(self, policy, name, point):
        if policy != Policy("float32"):
            checked.append((point.batch, point.spread))
        return Errors(gradients=0.01)

    monkeypatch.setattr(runs.Runs, "mixed", seen)
    calibrate(branches, BATCHES[:count], budget=0.02)
    held_out = [(0, 0.0), (1, 0.01)] if count == 1 else [(2, 0.0), (2, 0.01), (3, 0.0)]
    assert checked[-len(held_out) :] == held_out
    chosen_on = [(0, 0.0)] if count == 1 else [(0, 0.0), (1, 0.01)]
    assert {*chosen_on} <= {*checked}


def test_few_passes_and_compilations(found):
    assert found.compilations <= 3 and found.passes <= 22


def test_it_is_deterministic(found):
    again = calibrate(branches, BATCHES, budget=0.02)
    assert again == found


def test_it_comes_back_from_json_and_prints(found, capsys):
    assert Calibration.from_dict(json.loads(found.to_json())) == found
    assert "steep: alone" in str(found)
    found.print()
    assert "steep" in capsys.readouterr().out
    with pytest.raises(ValueError, match="malformed"):
        Calibration.from_dict({"policy": {}})


def test_the_front_falls(found):
    costs, errors = zip(*((one.cost, one.error) for one in found.front), strict=True)
    assert list(costs) == sorted(costs) and list(errors) == sorted(errors)[::-1]


def test_the_page_shows_the_groups(found, tmp_path):
    page = found.save_html(tmp_path / "new" / "page.html").read_text()
    assert all(name in page for name in NAMES) and "alone, " in page


# The answers are known.


@pytest.mark.sample(6)
@pytest.mark.parametrize("seed", range(len(KINDS)), ids=[k.__name__ for k in KINDS])
def test_exactly_the_planted_scope_is_kept(seed):
    model = planted(seed)
    found = calibrate(
        model.loss,
        model.batches,
        budget=Budget(worst_leaf=0.05),
        candidates=("float16",),
        perturbation=1e-5,
    )
    assert [group.name for group in found.kept_full] == [model.answer]


# What was not measured.


def grown(w, x):
    """`branches` with a new scope, one within a known one, and none."""
    total = branches(w, x)
    with jax.named_scope("new"):
        total += jnp.mean(jnp.sin(40 * x @ w["steep"]))
    with jax.named_scope("flat"), jax.named_scope("inner"):
        total += jnp.mean(x @ w["flat"])
    return total + jnp.mean((x @ w["plain"]) @ w["flat"])


@pytest.mark.parametrize(
    ("granularity", "budget"),
    (("scope", 0.02), ("primitive", Budget(loss=9)), ("equation", 0.02)),
)
def test_what_was_not_measured_stays_as_written(granularity, budget):
    found = calibrate(branches, BATCHES, budget=budget, granularity=granularity)
    loaded = Calibration.from_dict(json.loads(found.to_json())).policy
    assert loaded == found.policy
    known = contractions(jax.grad(amp(branches, amp_policy=loaded)), *BATCHES[0])
    low = amp(grown, amp_policy=loaded)
    with pytest.warns(AmpWarning, match="computed as written") as told:
        read = contractions(jax.grad(low), *BATCHES[0])
    said = "".join(str(one.message) for one in told)
    for scope in ("scope 'new'", "scope 'flat/inner'", "no scope"):
        assert f"`dot_general` in {scope}" in said
    dtypes = [eqn.invars[0].aval.dtype for _, eqn in read]
    assert dtypes.count("bfloat16") == sum(
        eqn.invars[0].aval.dtype == "bfloat16" for _, eqn in known
    )
    with pytest.raises(AmpError, match="computed as written"):
        amp(grown, amp_policy=loaded, strict=True)(*BATCHES[0])


@pytest.mark.parametrize("granularity", ("scope", "primitive", "equation"))
def test_gradients_of_products_that_sum_nothing_were_not_measured(granularity):
    def fn(w, x):
        h = jnp.tanh(x @ w["flat"])
        return jnp.mean(jnp.sin(jnp.einsum("bi,bj->bij", h, x)))

    batches = [(weights("flat"), x) for x in data()]
    policy = calibrate(fn, batches, budget=0.1, granularity=granularity).policy
    read = contractions(jax.grad(amp(fn, amp_policy=policy)), *batches[0])
    low = [e for _, e in read if e.invars[0].aval.dtype == "bfloat16"]
    assert low and len(low) < len(read)
    assert all(v.aval.ndim == 2 for e in low for v in (*e.invars, *e.outvars))


def test_a_primitive_that_is_new_in_a_scope_was_not_measured(found):
    def loss(w, x):
        with jax.named_scope("flat"):
            kernel = w["flat"][None, None, :3, :3]
            y = lax.conv_general_dilated(x[None, None], kernel, (1, 1), "SAME")
            total = jnp.mean(jnp.tanh(y[0, 0] @ w["flat"]))
        with jax.named_scope("steep"):
            return total + jnp.mean(x @ w["steep"])

    low = amp(loss, amp_policy=found.policy)
    with pytest.warns(AmpWarning, match="`conv_general_dilated` in scope 'flat'"):
        read = contractions(low, *BATCHES[0])
    assert [eqn.invars[0].aval.dtype.name for _, eqn in read] == [
        "float32",
        "bfloat16",
        "float32",
    ]


def test_what_was_measured_is_known_in_a_step_and_in_its_gradient(found):
    def step(w, x):
        with jax.named_scope("step"):
            return jax.grad(branches)(w, x)

    def checkpointed(w, x):
        return jax.checkpoint(branches)(w, x)

    w, x = BATCHES[0]
    for fn, batch in (
        (step, x),
        (jax.jit(jax.value_and_grad(checkpointed)), x),
        (jax.vmap(branches, (None, 0)), x[:, None]),
    ):
        amp(fn, amp_policy=found.policy, strict=True)(w, batch)


def test_a_function_with_a_derivative_rule_is_measured_by_the_rule():
    def product(scope, x, w):
        with jax.named_scope(scope):
            return x @ w

    ruled = jax.custom_vjp(functools.partial(product, "alone"))
    ruled.defvjp(
        lambda x, w: (product("forward", x, w), (x, w)),
        lambda kept, g: (g @ kept[1].T, product("backward", kept[0].T, g)),
    )

    def loss(w, x):
        return jnp.mean(jnp.tanh(ruled(x, w["flat"])))

    found = calibrate(loss, BATCHES[:2], budget=0.05)
    low = amp(loss, amp_policy=found.policy, strict=True)
    assert set(operand_dtypes(jax.grad(low), *BATCHES[0]).values()) == {"bfloat16"}
    assert operand_dtypes(low, *BATCHES[0]) == {"alone": "float32"}


def test_a_new_scope_may_be_given_a_policy(found):
    for policy in (found.policy | {"new": "bfloat16"}, found.policy):
        with pytest.warns(AmpWarning, match="in scope 'flat/inner'") as told:
            low = operand_dtypes(amp(grown, amp_policy=policy), *BATCHES[0])
        is_said = policy is not found.policy
        assert ("'new'" in str(told[0].message)) == (not is_said)
        assert low["new"] == ("bfloat16" if is_said else "float32")


def test_policies_that_were_saved_without_what_was_measured_still_load(found):
    def without(data):
        if not isinstance(data, dict):
            return [*map(without, data)] if isinstance(data, list) else data
        return {k: without(v) for k, v in data.items() if k != "measured"}

    data = json.loads(json.dumps(found.policy.to_dict()))
    old = PolicyMap.from_dict(without(data))
    assert old == PolicyMap("c=bf16", {"steep": "c=f32"})
    low = operand_dtypes(amp(grown, amp_policy=old), *BATCHES[0])
    assert low["new"] == "bfloat16"
    with pytest.raises(AmpError, match="maps paths of scopes to lists"):
        Policy.from_dict({"compute_dtype": "bfloat16", "measured": {"a": ["exp"]}})
    policy = Policy("bfloat16", measured={"a": ["dot_general"], "": ()})
    assert eval(repr(policy)) == policy and hash(policy) == hash(eval(repr(policy)))
    assert pickle.loads(pickle.dumps(policy)) == policy != Policy("bfloat16")


# Granularity, objectives, candidates.


def test_by_equation_contractions_of_one_scope_are_told_apart():
    def loss(w, x):
        return jnp.mean(jnp.sin(40 * x @ w["a"])) + jnp.mean(jnp.tanh(x @ w["b"]))

    rng = np.random.default_rng(0)
    shapes = {"a": (8, 8), "b": (8, 4)}
    w = {n: rng.normal(size=s).astype("float32") / 3 for n, s in shapes.items()}
    batches = [(w, x) for x in data()]
    found = calibrate(loss, batches, budget=0.02, granularity="equation")
    assert [g.name for g in found.kept_full] == ["dot_general *x8+,8+x8"]
    dots = contractions(amp(loss, amp_policy=found.policy), *batches[0])
    weights = (eqn.invars[1].aval for _, eqn in dots)
    low = {aval.shape: aval.dtype.name for aval in weights}
    assert low == {(8, 8): "float32", (8, 4): "bfloat16"}
    assert Calibration.from_dict(json.loads(found.to_json())).policy == found.policy


def test_by_primitive():
    def loss(w, x):
        y = lax.conv_general_dilated(x[None, None], w["conv"], (1, 1), "SAME")
        return jnp.mean(jnp.sin(60 * y)) + jnp.mean(jnp.tanh(x @ w["dot"]))

    rng = np.random.default_rng(0)
    w = {"dot": weights("dot")["dot"], "conv": rng.normal(size=(1, 1, 3, 3))}
    w["conv"] = w["conv"].astype("float32") / 3
    batches = [(w, x) for x in data()]
    found = calibrate(loss, batches, budget=0.02, granularity="primitive")
    dtypes = {group.name: group.dtype for group in found.groups}
    assert dtypes == {"conv_general_dilated": "float32", "dot_general": "bfloat16"}
    found_in = contractions(amp(loss, amp_policy=found.policy), *batches[0])
    read = {eqn.primitive.name: eqn.invars[0].aval.dtype.name for _, eqn in found_in}
    assert read == dtypes


@pytest.mark.parametrize("names", (("block", "inner"), ("block[0]", "inner(a|b)")))
def test_nested_scopes_get_what_was_decided_on_each(names):
    def loss(w, x):
        with jax.named_scope(names[0]):
            y = jnp.sin(40 * x @ w["steep"])
            with jax.named_scope(names[1]):
                return jnp.mean(y) + jnp.mean(jnp.tanh(x @ w["flat"]))

    found = calibrate(loss, BATCHES, budget=0.02)
    assert [(g.name, g.dtype) for g in found.groups] == [
        (names[0], "float32"),
        ("/".join(names), "bfloat16"),
    ]
    low = operand_dtypes(amp(loss, amp_policy=found.policy), *BATCHES[0])
    assert low == {names[0]: "float32", names[1]: "bfloat16"}
    again = PolicyMap.from_dict(json.loads(json.dumps(found.policy.to_dict())))
    assert again == found.policy


def test_each_group_gets_the_candidate_that_it_bears():
    def loss(w, x):
        with jax.named_scope("large"):  # beyond 65504
            y = jnp.mean(jnp.tanh(x @ (1e5 * w["flat"]) / 3e5))
        with jax.named_scope("fine"):  # more than 8 bits
            return y + jnp.mean(jnp.sin(20 * x @ w["steep"]))

    both = ("bfloat16", "float16")
    found = calibrate(loss, BATCHES, budget=0.02, candidates=both)
    assert [(g.name, g.dtype) for g in found.groups] == [
        ("large", "bfloat16"),
        ("fine", "float16"),
    ]
    assert isinstance(found.policy, PolicyMap) and found.low_share == 1


def test_the_objective_decides_between_what_does_not_fit_together():
    # Alike but for size: much is computed here, much is kept there.
    def loss(w, x):
        with jax.named_scope("computes"):
            y = jnp.mean(jnp.sin(x[:2] @ w["wide"]))
        with jax.named_scope("keeps"):
            return y + 10 * jnp.mean(jnp.sin(x[:, :2] @ w["thin"]))

    rng = np.random.default_rng(0)
    w = {"wide": rng.normal(size=(64, 128)) / 8, "thin": rng.normal(size=(2, 8)) / 4}
    w = {name: x.astype("float32") for name, x in w.items()}
    batches = [(w, rng.normal(size=(160, 64)).astype("float32"))]
    profile = {
        "computes": {"float32": 1.0, "bfloat16": 1.0},
        "keeps": {"float32": 9.0, "bfloat16": 1.0},
    }
    with pytest.warns(AmpWarning, match="left everything as written"):
        either = calibrate(loss, batches, budget=1e-4)
    budget = 1.05e-4 * max(g.sensitivity["bfloat16"] for g in either.groups)
    for options, low in (
        ({"objective": "flops"}, "computes"),
        ({"objective": "bytes"}, "keeps"),
        ({"objective": "time", "device": profile}, "keeps"),
    ):
        found = calibrate(loss, batches, budget=budget, perturbation=0, **options)
        assert [g.name for g in found.groups if g.dtype == "bfloat16"] == [low]


def test_time_is_that_of_a_roofline():
    device = Device({"float32": 1e3, "float16": 4e3}, bandwidth=1e2)
    of = Contraction(("here",), "dot_general", "8x16+,16+x4")
    work = {of: [ContractionCost(1024, 128 + 64, 32), ContractionCost(16384, 8, 0)]}
    groups, low = grouped(work, "scope"), as_candidates("bfloat16")
    found = prices(groups, low, "time", device)
    # The first is bound by traffic, the second by arithmetic; bfloat16 is as float16.
    assert found.full == [pytest.approx(4 * 224 / 1e2 + 16384 / 1e3)]
    assert found.low == [[pytest.approx(2 * 224 / 1e2 + 16384 / 4e3)]]
    assert found.of((0,)) == found.full[0] and found.of((1,)) == found.low[0][0]
    with pytest.raises(ValueError, match="float32"):
        Device({"float16": 1.0}, 1.0)
    with pytest.raises(ValueError, match="positive"):
        Device({"float32": 1.0}, 0.0)


def test_a_decision_holds_for_all_iterations_of_a_loop():
    def loss(w, x):
        def body(x, w):
            with jax.named_scope("step"):
                return jnp.tanh(x @ w), None

        x, _ = lax.scan(body, x, jnp.stack([w["flat"]] * 6))
        with jax.named_scope("head"):
            return jnp.mean(jnp.sin(40 * x @ w["steep"]))

    found = calibrate(loss, BATCHES, budget=0.5)
    step, head = found.groups
    assert (step.name, head.name) == ("step", "head")
    assert step.flops == 6 * head.flops == 6 * 3 * 2 * 5 * 8 * 8


@pytest.mark.parametrize("construct", ("cond", "while", "remat", "custom_vjp", "vmap"))
def test_the_choice_reaches_into(construct):
    @jax.custom_vjp
    def ruled(x, w):
        return x @ w

    ruled.defvjp(lambda x, w: (x @ w, (x, w)), lambda r, g: (g @ r[1].T, r[0].T @ g))

    def inner(x, w):
        return jnp.sin(40 * x @ w)

    ways = {
        "cond": lambda x, w: lax.cond(x[0, 0] > 9, lambda: x, lambda: inner(x, w)),
        "while": lambda x, w: lax.fori_loop(0, 2, lambda i, x: jnp.sin(9 * x @ w), x),
        "remat": lambda x, w: jax.checkpoint(inner)(x, w),
        "custom_vjp": lambda x, w: jnp.sin(40 * ruled(x, w)),
        "vmap": lambda x, w: jax.vmap(inner, (0, None))(x, w),
    }

    def loss(w, x):
        with jax.named_scope("inside"):
            y = jnp.mean(ways[construct](x, w["steep"]))
        with jax.named_scope("outside"):
            return y + jnp.mean(jnp.tanh(x @ w["flat"]))

    limit = Budget(loss=0.01) if construct == "while" else Budget(gradients=0.02)
    found = calibrate(loss, BATCHES[:2], budget=limit)
    assert [g.name for g in found.kept_full] == ["inside"]


def test_the_choice_reaches_into_a_shard_map():
    mesh = jax.make_mesh((4,), ("devices",), axis_types=(AxisType.Auto,))
    rows = PartitionSpec("devices")

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(PartitionSpec(), rows), out_specs=rows
    )
    def inside(w, x):
        with jax.named_scope("inside"):
            return jnp.sin(40 * x @ w)

    def loss(w, x):
        y = jnp.mean(inside(w["steep"], x[:4]))
        with jax.named_scope("outside"):
            return y + jnp.mean(jnp.tanh(x @ w["flat"]))

    found = calibrate(loss, BATCHES[:2], budget=0.02)
    assert [g.name for g in found.kept_full] == ["inside"]


def test_a_function_that_is_another_when_compiled_again_says_so(monkeypatch):
    # As one is that subtracts large numbers: what is left depends on the compiler.
    def another(self, policy, name, point):
        return Errors(gradients=0.5)

    monkeypatch.setattr(runs.Runs, "mixed", another)
    with pytest.raises(AmpError, match=r"compiled in two ways.* gradients 0\.5"):
        calibrate(branches, BATCHES[:2], budget=0.02)


def test_what_amp_leaves_as_written_is_no_group():
    def loss(w, x):
        with jax.named_scope("exact"):
            y = jnp.matmul(x, w["flat"], precision="highest")
        with amp_stop():
            y = y @ w["steep"]
        with jax.named_scope("low"):
            return jnp.mean(jnp.tanh(y @ w["plain"]))

    found = calibrate(loss, BATCHES[:2], budget=0.1)
    assert [g.name for g in found.groups] == ["low"]
    assert found.low_share == pytest.approx(3 / 8)


def test_a_function_that_is_no_loss_is_measured_by_its_results():
    gradient = jax.grad(branches)
    found = calibrate(gradient, BATCHES, budget=0.02)
    assert found.budget == Budget(outputs=0.02)
    assert "steep" in [g.name for g in found.kept_full]


def test_nnx_modules_are_arguments_like_any_other():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.flat = nnx.Linear(8, 8, rngs=rngs)
            self.norm = nnx.BatchNorm(8, rngs=rngs)

        def __call__(self, x):
            with jax.named_scope("flat"):
                return jnp.tanh(self.norm(self.flat(x)))

    def loss(net, x):
        y = net(x)
        with jax.named_scope("steep"):
            return jnp.mean(jnp.sin(y @ y.T))

    net = Net(nnx.Rngs(0))
    before = np.asarray(net.norm.mean[...])
    found = calibrate(loss, [(net, x) for x in data()], budget=0.1)
    assert [g.name for g in found.groups] == ["flat", "steep"]
    assert (np.asarray(net.norm.mean[...]) == before).all()


# Bad input.


def test_a_budget_that_nothing_meets_leaves_all_as_written():
    with pytest.warns(AmpWarning, match="left everything as written"):
        found = calibrate(branches, BATCHES, budget=1e-9)
    assert found.met and found.low_share == 0 and len(found.kept_full) == 3


def test_a_budget_of_zero_is_only_met_by_what_is_exact():
    limit = Budget(gradients=0)
    with pytest.warns(AmpWarning, match="left everything as written"):
        found = calibrate(branches, BATCHES, budget=limit)
    assert {group.why for group in found.groups} == {
        "rounds in low precision, and the budget allows none of that"
    }
    ones = jnp.ones((2, 2))

    def exact(w, x):
        return jnp.sum(x @ w)

    assert calibrate(exact, [(ones, ones), (ones, 2 * ones)], budget=limit).met


@pytest.mark.parametrize(
    ("batches", "held_out"),
    (
        (BATCHES[:1], None),
        (BATCHES[:1] * 2, None),
        (BATCHES[:2], [(weights(*NAMES), BATCHES[1][1])]),
    ),
    ids=("one", "equal", "given twice"),
)
def test_a_check_on_batches_that_decided_is_told(batches, held_out):
    found = calibrate(branches, batches, budget=0.02, held_out=held_out)
    assert sum("nothing was held out" in note for note in found.notes) == 1


def test_a_check_on_other_batches_is_not_told(found):
    assert not any("held out" in note for note in found.notes)


@pytest.mark.parametrize(
    ("fn", "what"),
    (
        (lambda w, x: jnp.sum((x @ w["flat"]) ** 2), "the gradient is zero in each"),
        (lambda w, x: x @ w["flat"], "all results are zero in each"),
    ),
)
def test_batches_that_measure_nothing_are_told(fn, what):
    nothing = [(w, 0 * x) for w, x in BATCHES]
    with pytest.warns(AmpWarning, match=f"measured nothing: .*{what}"):
        calibrate(fn, nothing, budget=0.02)
    some = [nothing[0], *BATCHES[1:]]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        calibrate(fn, some, budget=0.5)


def test_gradients_that_vanish_in_float16_are_told_of_the_loss_scale():
    def small(w, x):
        return 1e-7 * branches(w, x)

    low = {"budget": 0.02, "candidates": "float16"}
    with pytest.warns(AmpWarning, match="without a loss scale.*`loss_scale=2.0"):
        assert calibrate(small, BATCHES, **low).low_share == 0
    scaled = calibrate(small, BATCHES, **low, loss_scale=2.0**20)
    assert scaled.low_share > 0 and not any("loss scale" in n for n in scaled.notes)
    some = calibrate(branches, BATCHES, **low | {"budget": 0.0025})
    is_told = any("`loss_scale=2.0**15`" in note for note in some.notes)
    assert 0 < some.low_share < 1 and is_told


def test_a_function_without_contractions():
    with pytest.warns(AmpWarning, match="nothing to decide"):
        found = calibrate(lambda w, x: jnp.sum(w["flat"] * 2), BATCHES, budget=0.1)
    assert found.groups == () and found.met


def test_nan_in_the_reference_is_an_error_that_says_where():
    def loss(w, x):
        return jnp.mean(jnp.log(x @ w["flat"]))

    with pytest.raises(AmpError, match=r"batch 0 gives .* the loss \(1 NaN\)"):
        calibrate(loss, BATCHES, budget=0.1)


def test_a_function_that_is_not_deterministic_says_by_how_much():
    count = itertools.count()

    def loss(w, x):
        noise = jax.pure_callback(
            lambda: np.float32(next(count)), jax.ShapeDtypeStruct((), "float32")
        )
        return jnp.mean(jnp.tanh(x @ w["flat"])) * (1 + noise)

    with pytest.raises(AmpError, match="two runs on the same batch differ"):
        calibrate(loss, BATCHES, budget=0.1)


@pytest.mark.parametrize(
    ("batches", "options", "error", "match"),
    [
        ([], {}, ValueError, "`batches` is empty"),
        (BATCHES, {"held_out": []}, ValueError, "`held_out` is empty"),
        ([[1, 2]], {}, TypeError, "must be a tuple"),
        (BATCHES[0], {}, TypeError, "must be a tuple"),
        (3, {}, TypeError, "a list of tuples"),
        (BATCHES, {"budget": -1}, ValueError, "at least 0"),
        (BATCHES, {"budget": 0}, ValueError, r"One percent is 0.01.*\(gradients=0\)"),
        (BATCHES, {"budget": "1%"}, TypeError, "relative error"),
        (BATCHES, {"candidates": ()}, ValueError, "each once"),
        (BATCHES, {"candidates": ("float32",)}, ValueError, "no low precision"),
        (BATCHES, {"candidates": ("int16",)}, TypeError, "floating dtype"),
        (BATCHES, {"objective": "speed"}, ValueError, "`objective` must be one of"),
        (BATCHES, {"granularity": "layer"}, ValueError, "`granularity` must be"),
        (BATCHES, {"max_passes": 3}, ValueError, "at least 8"),
        (BATCHES, {"seed": -1}, ValueError, r"from 0 to 2\*\*32 - 1, but got -1"),
        (BATCHES, {"seed": 2**32}, ValueError, "`seed` must be"),
        (BATCHES, {"seed": 1.5}, ValueError, "`seed` must be"),
        (BATCHES, {"budget": True}, TypeError, "relative error"),
        (BATCHES, {"loss_scale": 0}, ValueError, "`loss_scale` must be"),
        (BATCHES, {"argnums": 5}, ValueError, "has 2 arguments"),
        (BATCHES, {"argnums": -3}, ValueError, "`argnums` is -3, but .* 2 arguments"),
        (BATCHES, {"argnums": "w"}, TypeError, "`argnums` must be an integer"),
        ([*BATCHES, (BATCHES[0][0], np.ones((4, 8)))], {}, ValueError, "Batch 4"),
        (BATCHES, {"objective": "time", "device": {}}, ValueError, "'bfloat16': 1"),
    ],
)
def test_bad_arguments_are_named(batches, options, error, match):
    with pytest.raises(error, match=match):
        calibrate(branches, batches, **{"budget": 0.02} | options)


def test_gradients_of_what_is_no_loss_and_by_what_is_no_float():
    limit = Budget(gradients=0.1)
    with pytest.raises(ValueError, match="no floating scalar"):
        calibrate(lambda w, x: x @ w["flat"], BATCHES, budget=limit)
    with pytest.raises(ValueError, match="no floating arrays"):
        calibrate(lambda i, w, x: branches(w, x), [(1, *BATCHES[0])], budget=limit)
    with pytest.raises(TypeError, match="must be callable"):
        calibrate(3, BATCHES, budget=0.1)


def test_a_batch_without_parameters_says_what_a_batch_holds():
    def loss(w, batch):
        return jnp.mean((batch[0] @ w["a"]) ** 2)

    with pytest.raises(TypeError, match="string indexing") as raised:
        calibrate(loss, [(np.ones((4, 8)), np.ones(4))] * 2, budget=0.1)
    (note,) = (n for n in raised.value.__notes__ if "calibrate" in n)
    assert "which is ('float64[4, 8]', 'float64[4]')" in note
    assert "parameters included: `[(params, x, y), ...]`" in note


def test_numbers_of_numpy_are_numbers(found):
    options = {"loss_scale": np.float32(1), "seed": np.int64(0), "argnums": np.int32(0)}
    limit = np.float64(0.02)
    same = calibrate(branches, BATCHES, budget=limit, **options)
    assert same == found and json.loads(same.to_json())
    assert repr(Budget(loss=np.float32(0.5))) == "Budget(loss=0.5)"


def test_arguments_are_counted_from_the_end_too(found):
    assert calibrate(branches, BATCHES, budget=0.02, argnums=-2) == found


def test_the_last_seed_is_one():
    found = calibrate(branches, BATCHES[:3], budget=Budget(gradients=9), seed=2**32 - 1)
    assert found.low_share == 1


@pytest.mark.parametrize("limits", ({}, {"overflow": 0.1}, {"loss": math.nan}))
def test_a_budget_needs_numbers(limits):
    with pytest.raises(ValueError, match="Budget"):
        Budget(**limits)


# A kill.


class Killed(BaseException):
    pass


@pytest.mark.sample(3)
@pytest.mark.parametrize("when", (0, 5, -2))
def test_a_kill_loses_no_pass_but_its_own(when, found, tmp_path, monkeypatch):
    path, count = tmp_path / "state.json", itertools.count()
    run, done = runs.Runs._timed, when % found.passes

    def dying(self, program, *args):
        if next(count) == done:
            raise Killed
        return run(self, program, *args)

    with monkeypatch.context() as patch:
        patch.setattr(runs.Runs, "_timed", dying)
        with pytest.raises(Killed):
            calibrate(branches, BATCHES, budget=0.02, state=path)
    resumed = calibrate(branches, BATCHES, budget=0.02, state=path)
    assert resumed.policy == found.policy and resumed.tried == found.tried
    assert resumed.passes == found.passes - done
    again = calibrate(branches, BATCHES, budget=0.02, state=path)
    assert again.passes == 0 and again.policy == found.policy
    assert [file.name for file in tmp_path.iterdir()] == ["state.json"]


def test_the_state_of_another_calibration_is_refused(tmp_path):
    path = tmp_path / "state.json"
    calibrate(branches, BATCHES[:2], budget=0.5, state=path)
    with pytest.raises(AmpError, match="differs in budget"):
        calibrate(branches, BATCHES[:2], budget=0.4, state=path)
    with pytest.raises(AmpError, match="differs in batches"):
        calibrate(branches, BATCHES[1:3], budget=0.5, state=path)
    path.write_text("{")
    with pytest.raises(AmpError, match="no state of a calibration"):
        calibrate(branches, BATCHES[:2], budget=0.5, state=path)


def test_the_state_of_a_function_that_holds_other_numbers_is_refused(tmp_path):
    path = tmp_path / "state.json"

    def scaled(factor):
        held = jnp.full(8, factor)  # printed as an array of eight numbers

        @jax.jit
        def inner(x, w):
            return jnp.sin(x @ w * held)

        return lambda w, x: jnp.mean(jax.checkpoint(inner)(x, w["flat"]))

    calibrate(scaled(1.0), BATCHES[:2], budget=0.5, state=path)
    again = calibrate(scaled(1.0), BATCHES[:2], budget=0.5, state=path)
    assert again.passes == 0
    with pytest.raises(AmpError, match="differs in function"):
        calibrate(scaled(3.0), BATCHES[:2], budget=0.5, state=path)


def test_results_come_back_from_the_disk_as_they_were(tmp_path):
    arrays = [[jnp.arange(6, dtype="bfloat16").reshape(2, 3), jnp.float32(1.5)], []]
    state = MeasurementStore(tmp_path / "state.json", {"seed": 0})
    assert state.kept(3) is None
    state.keep(2, arrays, beside=[])
    state.keep(3, arrays, beside=[])
    assert state.kept(2) is None
    jax.tree.map(np.testing.assert_array_equal, state.kept(3), arrays)
    assert MeasurementStore(tmp_path / "state.json", {"seed": 1}).kept(3) is None
    file = tmp_path / "state.json.3"
    file.write_bytes(file.read_bytes()[:-2])
    assert state.kept(3) is None
    state.clear()
    assert [*tmp_path.iterdir()] == []


# The parts.


@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
def test_rounding_is_that_of_a_cast(dtype):
    rng = np.random.default_rng(0)
    exponents = rng.uniform(-140, 127, 4000)
    x = (rng.choice([-1, 1], 4000) * 2.0**exponents).astype("float32")
    edges = [0.0, -0.0, 65504, 65519.9, 65520, 6e-8, 2.9e-8, 3.1e-8, 6.1e-5, np.inf]
    x = np.concatenate([x[np.abs(x) > 1.2e-38], np.float32(edges)])
    with np.errstate(over="ignore"):
        expected = x.astype(jnp.dtype(dtype)).astype("float32")
    got = jax.jit(lambda x: rounded(x, jnp.dtype(dtype)))(x)
    np.testing.assert_array_equal(got, expected)


rows = st.lists(st.floats(0, 3) | st.just(math.inf), min_size=1, max_size=12)


@given(rows, st.data())
@settings(max_examples=60)
def test_a_search_meets_its_limit_if_squares_add_up(errors, draw):
    sizes = st.lists(st.floats(0.1, 9), min_size=len(errors), max_size=len(errors))
    full = draw.draw(sizes)
    ranking = Ranking([[e] for e in errors], Prices(full, [[0.0]] * len(full)))

    def measure(choices):
        low = [e for e, c in zip(errors, choices, strict=True) if c]
        return math.hypot(*low) if low else 0.0

    choices = search(measure, ranking, 1.0, 8)
    assert measure(choices) <= 1
    # Nothing that could be added was left out.
    left = 1 - measure(choices) ** 2
    assert not any(
        c == 0 and e**2 <= left * 0.9 for e, c in zip(errors, choices, strict=True)
    )


@given(st.integers(30, 200), st.data())
@settings(max_examples=30)
def test_few_passes_find_the_sensitive_one_of_many(count, draw):
    culprit, calls = draw.draw(st.integers(0, count - 1)), []

    def measure(groups):
        calls.append(groups)
        return 0.01 * math.sqrt(len(groups)) + 10 * (culprit in groups)

    found = sensitivities(measure, count, 20)
    assert len(calls) <= 20
    assert max(range(count), key=found.__getitem__) == culprit
    assert all(error < 1 for i, error in enumerate(found) if i != culprit)


def test_sets_are_measured_on_a_few_of_many_batches():
    found = calibrate(branches, [BATCHES[0]] * 10, budget=0.02)
    assert any(f"first {deciding.MOST_POINTS} batches" in n for n in found.notes)
