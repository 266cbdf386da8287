"""`calibrate(objective="memory")`: what is kept for the backward pass, and in what."""

import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxamp_like import (
    AmpWarning,
    Budget,
    Policy,
    PolicyMap,
    amp,
    calibrate,
    default_amp_policy,
    explain,
)
from jaxamp_like._calibrate import runs
from jaxamp_like._calibrate.candidates import as_candidates
from jaxamp_like._calibrate.costs import ContractionCost
from jaxamp_like.reports import Calibration
from jaxamp_like.rules import saving_low

pytestmark = pytest.mark.rest

INT8 = "bfloat16+int8"
RNG = np.random.default_rng(0)


def random(*shape):
    return RNG.normal(size=shape).astype("float32") / np.sqrt(shape[0])


def mlp(weights, x):
    """Residual blocks, and a last one that is sensitive to roundings."""
    for i in range(3):
        with jax.named_scope(f"block_{i}"):
            x = x + jax.nn.gelu(x @ weights[i])
    with jax.named_scope("waves"):
        x = x + jnp.sin(3 * x @ weights[3])
    return jnp.mean(x**2)


def attention(weights, x):
    """Softmax, a norm and a product that is reduced in rows."""
    with jax.named_scope("attention"):
        q, k, v = (x @ weights[name] for name in "qkv")
        x = x + jax.nn.softmax(q @ k.T / 8) @ v
    with jax.named_scope("mlp"):
        mean, deviation = x.mean(-1, keepdims=True), x.std(-1, keepdims=True)
        x = x + jax.nn.gelu((x - mean) / deviation @ weights["up"]) @ weights["down"]
    return jnp.mean((x @ weights["head"]) ** 2)


MLP = [random(64, 64) for _ in range(4)]
ATTENTION = {name: random(64, 64) for name in ("q", "k", "v", "up", "down", "head")}
MODELS = {
    "mlp": (mlp, [(MLP, 8 * random(32, 64)) for _ in range(3)]),
    "attention": (attention, [(ATTENTION, 8 * random(32, 64)) for _ in range(3)]),
}
models = pytest.mark.parametrize("fn, batches", MODELS.values(), ids=list(MODELS))


def error_of(fn, batches, **settings):
    """The largest error of the gradient, over the batches as they are given."""

    def one(batch):
        true, got = (
            jax.tree.leaves(jax.jit(jax.grad(f))(*batch))
            for f in (fn, amp(fn, **settings))
        )
        pairs = zip(true, got, strict=True)
        square = sum(float(jnp.sum((a - b) ** 2)) for a, b in pairs)
        return (square / sum(float(jnp.sum(a**2)) for a in true)) ** 0.5

    return max(map(one, batches))


def kept(fn, batch, **settings):
    return explain(jax.grad(amp(fn, **settings)))(*batch).now.totals.saved_bytes


@pytest.mark.sample(2)
@models
def test_with_room_all_is_kept_in_8_bits(fn, batches):
    found = calibrate(fn, batches, budget=0.2, objective="memory")
    assert found.met and found.held_out.gradients < 0.2
    assert {group.dtype for group in found.groups} == {INT8}
    assert found.candidates == ("bfloat16", INT8)
    assert isinstance(found.policy, Policy)
    # The same as a user would write, and counted as `explain` counts.
    policy = default_amp_policy | {"amp_default": saving_low("int8")}
    by_hand = kept(fn, batches[0], compute_dtype="bfloat16", amp_policy=policy)
    assert found.saved["chosen"] == by_hand
    assert found.saved["chosen"] == kept(fn, batches[0], amp_policy=found.policy)
    default = kept(fn, batches[0], compute_dtype="bfloat16")
    assert found.saved["default"] == default
    written = explain(jax.grad(fn))(*batches[0]).now.totals.saved_bytes
    assert found.saved["as written"] == written
    assert found.saved["chosen"] < 0.6 * default < 0.6 * written


@pytest.mark.sample(4)
@models
@pytest.mark.parametrize("room", (1.1, 1.5))
def test_where_the_default_fits_no_more_is_kept_than_by_it(fn, batches, room):
    budget = room * error_of(fn, batches, compute_dtype="bfloat16")
    # At parameters as they are given: at others, the default errs otherwise.
    options = dict(budget=budget, objective="memory", perturbation=0.0)
    found = calibrate(fn, batches, **options)
    assert found.met and found.held_out.gradients <= budget
    assert found.saved["chosen"] <= found.saved["default"]
    assert found.saved["chosen"] == kept(fn, batches[0], amp_policy=found.policy)
    assert error_of(fn, batches[-1:], amp_policy=found.policy) <= 1.02 * budget


def test_scopes_get_what_they_bear():
    fn, batches = MODELS["mlp"]
    budget = 1.1 * error_of(fn, batches, compute_dtype="bfloat16")
    options = dict(budget=budget, objective="memory", perturbation=0.0)
    found = calibrate(fn, batches, **options)
    chosen = {group.name: group.dtype for group in found.groups}
    assert chosen == {f"block_{i}": INT8 for i in range(3)} | {"waves": "bfloat16"}
    assert found.saved["chosen"] < found.saved["default"]
    assert isinstance(found.policy, PolicyMap)
    report = explain(jax.grad(amp(fn, amp_policy=found.policy)))(*batches[0])
    reads = {op.place.scope: op.why for op in report.now.ops if op.flops}
    assert "kept in int8" in reads["block_1"] and "kept" not in reads["waves"]
    # Sets of which some is kept in 8 bits are measured as policies.
    assert {one.is_real for one in found.tried if "+int8" in one.what} == {True}


def test_formats_are_chosen_from_by_their_errors():
    fn, batches = MODELS["mlp"]
    three = ("bfloat16+float8_e5m2", "bfloat16+float8", INT8)
    found = calibrate(fn, batches, budget=0.3, objective="memory", candidates=three)
    # All take the same bytes, and int8 errs least.
    assert {group.dtype for group in found.groups} == {INT8}
    assert found.candidates == ("bfloat16+float8_e5m2", "bfloat16+float8_e4m3fn", INT8)
    costs = [one.cost for one in found.tried if one.what.startswith("everything")]
    assert len({round(cost, 6) for cost in costs}) == 1


def test_the_function_as_written_is_told_too():
    fn, batches = MODELS["mlp"]
    with pytest.warns(AmpWarning, match="left everything as written"):
        found = calibrate(fn, batches, budget=1e-5, objective="memory")
    assert found.saved["chosen"] == found.saved["as written"]
    assert not any(group.dtype in found.candidates for group in found.groups)


def test_by_equation_16_bits_alone_are_candidates():
    fn, batches = MODELS["mlp"]
    options = dict(budget=0.2, objective="memory", granularity="equation")
    found = calibrate(fn, batches, **options)
    assert found.candidates == ("bfloat16",)
    assert found.saved["chosen"] == found.saved["default"]


def test_what_was_found_is_shown_and_saved(tmp_path):
    fn, batches = MODELS["attention"]
    found = calibrate(fn, batches, budget=0.2, objective="memory")
    assert Calibration.from_dict(json.loads(found.to_json())) == found
    assert "saved for the backward pass: " in str(found)
    assert " KiB as written, " in str(found) and " KiB chosen" in str(found)
    page = found.save_html(tmp_path / "page.html").read_text()
    assert "saved for the backward pass" in page
    other = calibrate(fn, batches, budget=0.2)
    assert other.saved == {} and "saved for" not in str(other)


class Killed(BaseException):
    pass


def test_a_kill_loses_no_pass_but_its_own(tmp_path, monkeypatch):
    fn, batches = MODELS["mlp"]
    budget = 1.1 * error_of(fn, batches, compute_dtype="bfloat16")
    options = dict(budget=budget, objective="memory")
    whole = calibrate(fn, batches, **options)
    options |= {"state": tmp_path / "state.json"}
    run, count, done = runs.Runs._timed, itertools.count(), 9

    def killed(self, *args):
        if next(count) == done:
            raise Killed
        return run(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(runs.Runs, "_timed", killed)
        with pytest.raises(Killed):
            calibrate(fn, batches, **options)
    again = calibrate(fn, batches, **options)
    assert (again.policy, again.saved) == (whole.policy, whole.saved)
    assert again.passes == whole.passes - done


def test_bytes_of_contractions_whose_values_are_kept_in_8_bits():
    run = ContractionCost(1.0, 1, 1, saved_read=64, saved_made=32)
    assert run.saved_bytes("bfloat16") == 2 * 96
    assert run.saved_bytes(INT8) == 96 + 2 * 96 / 32  # codes, and scales in bfloat16
    assert run.bits(INT8) == 16  # in which they are read


# Bad input.


@pytest.mark.quick
@pytest.mark.parametrize(
    "given, name",
    (
        ("bfloat16+int8", "bfloat16+int8"),
        ("bf16+float8", "bfloat16+float8_e4m3fn"),
        ("float16+float8_e5m2", "float16+float8_e5m2"),
    ),
)
def test_names_of_candidates(given, name):
    (candidate,) = as_candidates((given,))
    assert candidate.name == name
    assert candidate.compute == name.partition("+")[0]
    assert candidate.saves is not None and name.endswith(candidate.saves.format)


@pytest.mark.quick
@pytest.mark.parametrize(
    "options, error, message",
    (
        (
            {"objective": "memories"},
            ValueError,
            "`objective` must be one of .*'memory'",
        ),
        ({"candidates": "bfloat16+int4"}, ValueError, "'bfloat16[+]int4'.*'int8'"),
        ({"candidates": "bfloat16+in8"}, ValueError, "Did you mean 'int8'"),
        ({"candidates": "int8+int8"}, ValueError, "Before the plus"),
        ({"candidates": "float32+int8"}, ValueError, "no low precision"),
        ({"candidates": (INT8, INT8)}, ValueError, "each once"),
        ({"candidates": (saving_low("int8"),)}, TypeError, "'bfloat16[+]int8'"),
        ({"candidates": INT8, "granularity": "equation"}, ValueError, "by scope"),
        ({"candidates": INT8, "granularity": "primitive"}, ValueError, "by scope"),
        ({"candidates": INT8, "budget": Budget(loss=0.1)}, ValueError, "no gradients"),
        ({"budget": Budget(loss=0.1)}, ValueError, "names 'bfloat16[+]int8'"),
        (
            {"budget": Budget(loss=0.1), "candidates": "bfloat16"},
            ValueError,
            "`objective` is 'memory'.*no gradients",
        ),
    ),
)
def test_bad_input(options, error, message):
    fn, batches = MODELS["mlp"]
    options = {"budget": 0.1, "objective": "memory"} | options
    with pytest.raises(error, match=message):
        calibrate(fn, batches, **options)
