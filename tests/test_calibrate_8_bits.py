"""`calibrate` with candidates of 8 bits: who may have them, and who gets them."""

import json
import math

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from jax import lax

from jaxamp_like import AmpWarning, Budget, Policy, PolicyMap, amp, calibrate
from jaxamp_like._calibrate.candidates import as_candidates
from jaxamp_like._calibrate.costs import ContractionCost
from jaxamp_like._calibrate.marks import shadow
from jaxamp_like._calibrate.measured_function import measured_function, points_of
from jaxamp_like._calibrate.policies import Writer
from jaxamp_like._calibrate.prices import Prices
from jaxamp_like._calibrate.program import MarkedProgram
from jaxamp_like._calibrate.rounding import RoundingSteps
from jaxamp_like._calibrate.runs import Runs
from jaxamp_like._calibrate.search import Ranking
from jaxamp_like._calibrate.state import MeasurementStore
from jaxamp_like._quantised.int8 import AsInt8
from jaxamp_like._quantised.scaled import AsFloat8
from jaxamp_like._reports.walk import CONTRACTIONS, walk
from jaxamp_like.reports import Calibration, Device
from jaxamp_like.rules import float8

pytestmark = [pytest.mark.rest, pytest.mark.sample(6)]

DIM = 16
LOUD = np.ones(DIM, "float32")
LOUD[0] = 2.0**20  # beside it, all else is nothing in 8 bits with one scale
BUDGETS = {"float8": 0.4, "int8": 0.08}


def loss(w, x):
    with jax.named_scope("first"):
        h = jnp.tanh(x @ w["first"])
    with jax.named_scope("loud"):
        h = jnp.tanh((h * LOUD) @ w["loud"])
    with jax.named_scope("last"):
        return jnp.mean((h @ w["last"]) ** 2)


def weights(*names):
    rng = np.random.default_rng(0)
    return {n: rng.normal(size=(DIM, DIM)).astype("float32") / 4 for n in names}


rng = np.random.default_rng(1)
W = weights("first", "loud", "last")
W["loud"] /= LOUD[:, None]
BATCHES = [(W, rng.normal(size=(8, DIM)).astype("float32")) for _ in range(3)]


@pytest.fixture(scope="module", params=BUDGETS)
def found(request):
    budget, low = BUDGETS[request.param], ("bfloat16", request.param)
    return calibrate(loss, BATCHES, budget=budget, candidates=low)


def reads(policy, fn, batch):
    """The dtypes that contractions of each scope read in the forward pass."""
    eqns = walk(jax.make_jaxpr(amp(fn, amp_policy=policy))(*batch), ())
    return {
        at.scope[0]: e.invars[0].aval.dtype.name
        for at, e, _ in ((at, e, n) for e, at, n in eqns)
        if e.primitive.name in CONTRACTIONS
    }


# What is found.


def test_what_8_bits_ruin_is_kept_in_16(found):
    name = found.candidates[1]
    dtypes = {group.name: group.dtype for group in found.groups}
    assert dtypes == {"first": name, "loud": "bfloat16", "last": name}
    assert found.low_share == 1 and found.kept_full == ()
    loud = found.groups[1].sensitivity
    assert loud["bfloat16"] < 1 < loud[name]


def test_what_was_measured_is_what_runs(found):
    eight = {"float8": "float8_e4m3fn", "int8": "int8"}[found.candidates[1]]
    assert reads(found.policy, loss, BATCHES[0]) == {
        "first": eight,
        "loud": "bfloat16",
        "last": eight,
    }


def test_it_meets_the_budget_on_data_that_it_was_not_chosen_on(found):
    assert found.met
    fresh = np.random.default_rng(9).normal(size=(8, DIM)).astype("float32")
    true = jax.grad(loss)(W, fresh)
    got = jax.jit(jax.grad(amp(loss, amp_policy=found.policy)))(W, fresh)
    assert 0 < relative(got, true) <= found.budget.gradients


def test_it_says_so(found, tmp_path, capsys):
    name = found.candidates[1]
    assert f"2 in {name}, 1 in bfloat16" in str(found)
    found.print()
    assert name in capsys.readouterr().out
    page = found.save_html(tmp_path / "page.html").read_text()
    assert f'"{name}"' in page and "first, last in" not in page
    assert any(f"bfloat16 (1) and {name} (2)" in one.what for one in found.tried)


def test_it_comes_back_from_json(found):
    again = Calibration.from_dict(json.loads(found.to_json()))
    assert again == found and hash(again.policy) == hash(found.policy)
    assert isinstance(again.policy, PolicyMap)


def test_few_passes_and_compilations(found):
    assert found.passes <= 40 and found.compilations <= 5


def test_it_is_deterministic_and_goes_on_after_a_kill(tmp_path):
    options = {"budget": 0.4, "candidates": ("float8", "bfloat16")}
    path = tmp_path / "state.json"
    one = calibrate(loss, BATCHES, state=path, **options)
    rows = json.loads(path.read_text())
    rows["measured"].popitem()  # the pass that was cut
    path.write_text(json.dumps(rows))
    again = calibrate(loss, BATCHES, state=path, **options)
    assert again.passes <= 2  # with the reference of what it is compared with
    assert (again.policy, again.groups) == (one.policy, one.groups)
    assert (again.tried, again.held_out) == (one.tried, one.held_out)


def test_of_8_bits_alone_the_rest_stays_as_written():
    found = calibrate(loss, BATCHES[:1], budget=0.4, candidates="float8")
    dtypes = {group.name: group.dtype for group in found.groups}
    assert dtypes == {"first": "float8", "loud": "float32", "last": "float8"}
    assert reads(found.policy, loss, BATCHES[0]) == {
        "first": "float8_e4m3fn",
        "loud": "float32",
        "last": "float8_e4m3fn",
    }


def test_by_equation_one_scope_holds_several_precisions():
    def one_scope(w, x):
        h = jnp.tanh(x @ w["first"])
        h = jnp.tanh((h * LOUD) @ w["wide"])
        return jnp.mean(h**2)

    w = {"first": W["first"], "wide": np.tile(W["loud"], (1, 2))}
    found = calibrate(
        one_scope,
        [(w, x) for _, x in BATCHES[:2]],
        budget=0.4,
        candidates=("bfloat16", "int8"),
        granularity="equation",
    )
    assert [g.dtype for g in found.groups] == ["int8", "bfloat16"]
    assert isinstance(found.policy, Policy)
    assert Policy.from_dict(json.loads(json.dumps(found.policy.to_dict()))) == (
        found.policy
    )
    eqns = walk(jax.make_jaxpr(amp(one_scope, amp_policy=found.policy))(w, x), ())
    dots = [e for e, _, _ in eqns if e.primitive.name in CONTRACTIONS]
    assert [e.invars[1].aval.dtype.name for e in dots] == ["int8", "bfloat16"]


x = BATCHES[0][1]


def test_what_a_rule_does_not_take_never_gets_it():
    def attends(w, x):
        with jax.named_scope("scores"):  # no operand is a parameter
            h = jax.nn.softmax(jnp.tanh(x) @ jnp.tanh(x).T)
        with jax.named_scope("values"):
            h = jnp.tanh((h @ jnp.tanh(x)) @ w["first"])
        with jax.named_scope("head"):
            return jnp.mean((h @ w["last"]) ** 2)

    for low, rest in (("int8", "float32"), (("float16", "int8"), "float16")):
        found = calibrate(attends, BATCHES[:1], budget=0.5, candidates=low)
        dtypes = {group.name: group.dtype for group in found.groups}
        assert dtypes == {"scores": rest, "values": "int8", "head": rest}
        ran = reads(found.policy, attends, BATCHES[0])
        assert (ran["scores"], ran["values"], ran["head"]) == (rest, "int8", rest)


def test_where_no_candidate_is_for_anything_it_says_so():
    def scores(w, x):
        h = jnp.tanh(x * w["first"][0])
        return jnp.mean(jnp.tanh(h @ h.T))

    with pytest.warns(AmpWarning, match="leave all of its contractions to 16 bits"):
        found = calibrate(scores, BATCHES[:1], budget=0.5, candidates="int8")
    assert "no candidate is for it" in found.groups[0].why and found.low_share == 0


# Roundings are those of the rules.


def relative(got, true):
    a, b = (
        np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(some)])
        for some in (got, true)
    )
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def convolution(w, x):
    # Rows and columns of images with a channel for each of the features.
    images = (x[:, None] * jnp.cos(x)).transpose(2, 0, 1)[None]
    y = lax.conv_general_dilated(images, w["filters"], (1, 1), "SAME")
    return jnp.mean(jnp.tanh(y) ** 2)


def checkpointed_loop(w, x):
    def body(x, w):
        return jnp.tanh(x @ w), None

    x, _ = lax.scan(jax.checkpoint(body), x, w["stack"])
    return jnp.mean(x**2)


def dense(w, x):
    return jnp.mean((jnp.tanh(x @ w["first"]) @ w["last"]) ** 2)


@pytest.mark.parametrize("name", BUDGETS)
@pytest.mark.parametrize("fn", (dense, convolution, checkpointed_loop))
def test_roundings_are_those_of_the_rule(fn, name):
    w = weights("first", "last") | {"stack": np.stack([W["first"], W["last"]])}
    w["filters"] = np.tile(w["first"][..., None, None], (1, 1, 3, 3)) / 3
    lows = as_candidates(name)
    subject = measured_function(fn, (w, x), 0, 1.0, 0.1)
    points, _ = points_of(subject.call, [(w, x)], [(w, x)], 0.0, 0)
    program = MarkedProgram(subject, points[0], lows, "scope")
    runs = Runs(program, MeasurementStore(None, {}), print)
    low = (1,) * len(program.groups)
    policy = Writer(program).policy(low)
    true = runs._run(points[0], program.nothing).grads
    rounded = runs._run(points[0], low).grads
    mixed = jax.jit(jax.grad(amp(fn, amp_policy=policy)))(w, x)
    mixed = [mixed[k] for k in sorted(mixed)]
    assert program.contractions.fixed_flops == 0
    assert relative(rounded, mixed) <= 0.7 * relative(mixed, true)
    assert relative(rounded, true) == pytest.approx(relative(mixed, true), rel=0.3)


@pytest.mark.parametrize(
    "eight", (AsFloat8(jnp.dtype("float8_e4m3fn")), AsInt8((1,), 1e-7))
)
def test_a_batch_of_arrays_is_rounded_one_by_one(eight):
    xs = rng.normal(size=(3, 4, 5)) * 10.0 ** np.arange(3)[:, None, None]
    xs = xs.astype("float32")
    how = RoundingSteps((), eight)
    single = jax.jit(lambda x: how(x))
    one_by_one = np.stack([single(one) for one in xs])
    together = jax.jit(lambda xs: how.batched(2)(xs))(xs)
    np.testing.assert_array_equal(one_by_one, together)
    assert 0 < relative(one_by_one, xs) < 0.05


# Costs, and the order of steps.


def test_prices_of_8_bits():
    run = ContractionCost(
        1e6,
        read=400,
        made=100,
        saved_read=30,
        saved_made=10,
        quantised_by=frozenset(["float8"]),
    )
    assert [run.bits(n) for n in ("float32", "float16", "float8", "int8")] == [
        32,
        16,
        8,
        16,  # which its rule leaves
    ]
    assert run.saved_bytes("float8") == 30 + 2 * 10
    assert run._replace(quantised_by=frozenset(["int8"])).saved_bytes("int8") == 2 * 40
    device = Device({"float32": 1e3, "float16": 2e3, "float8": 4e3}, bandwidth=1e3)
    assert run.seconds("float8", device) == pytest.approx(1e6 / 4e3 + 5 * 400 / 1e3)
    assert run.seconds("int8", device) == pytest.approx(1e6 / 2e3)
    assert device.speed("int8") == 2e3  # not that of float8


errors = st.floats(0, 3) | st.just(math.inf)
rows = st.lists(st.tuples(errors, errors, errors), min_size=1, max_size=8)


@given(rows, st.floats(0.01, 9))
@settings(max_examples=60)
def test_groups_are_lowered_step_by_step_within_the_budget(rows, budget):
    full = [4.0 * (i + 1) for i in range(len(rows))]
    low = [[price / 2, price / 2, price / 4] for price in full]
    ranking = Ranking(rows, Prices(full, low))
    choices = ranking.choose(budget)
    pairs = [*zip(rows, choices, strict=True)]
    assert math.hypot(*(row[c - 1] for row, c in pairs if c)) <= budget * 1.0001
    lowest = ranking.choose(math.inf)
    for row, c in zip(rows, lowest, strict=True):
        assert bool(c) == (min(row) < math.inf)
        assert c == 3 or row[2] == math.inf
        assert not c or row[c - 1] < math.inf


# Bad input.


@pytest.mark.parametrize(
    ("candidates", "error", "match"),
    [
        (("bfloat16", "flaot8"), ValueError, "Did you mean 'float8'"),
        ("float8_e4m3fn", ValueError, "Write 'float8': operands in float8_e4m3fn"),
        ((jnp.float8_e5m2,), ValueError, "names 'float8_e5m2'"),
        (("float8", "float8"), ValueError, "each once"),
        (("int8", jnp.int8), ValueError, "each once"),
        ((float8(),), TypeError, "Name it: 'float8' stands for"),
        (("float8", "float32"), ValueError, "no low precision"),
        (("float8", "int16"), TypeError, "floating dtype"),
        (("int2",), TypeError, "'float16', or one of 'float8', 'int4', 'int8', "),
        (("fp8",), ValueError, "'mxfp8', 'nvfp4', but got 'fp8'"),
        (("float4_e2m1fn",), TypeError, "or one of 'float8', 'int4', 'int8', "),
        (None, TypeError, "Each of `candidates` must be .*, but got None.$"),
        ((jnp.float64,), ValueError, "names float64, which is no low precision"),
        (("float8", 3), TypeError, "'mxfp8', 'nvfp4', but got 3"),
        (("float8", ["int8"]), TypeError, "candidates"),
        ((), ValueError, "each once"),
    ],
)
def test_candidates_are_checked(candidates, error, match):
    with pytest.raises(error, match=match):
        calibrate(loss, BATCHES, budget=0.1, candidates=candidates)


def test_a_profile_needs_a_time_in_8_bits():
    profile = {name: {"float32": 2.0, "bfloat16": 1.0} for name in W}
    with pytest.raises(ValueError, match="no time of 'first' in float8"):
        calibrate(
            loss,
            BATCHES,
            budget=Budget(gradients=0.1),
            candidates=("bfloat16", "float8"),
            objective="time",
            device=profile,
        )


def test_marks_change_no_number():
    with_marks = shadow(loss, as_candidates(("bfloat16", "float8", "int8")), (0,))
    for got, true in zip(
        jax.tree.leaves(jax.grad(with_marks)(*BATCHES[0])),
        jax.tree.leaves(jax.grad(loss)(*BATCHES[0])),
        strict=True,
    ):
        np.testing.assert_allclose(got, true, rtol=1e-5, atol=1e-7)
