"""The benchmarks' own tests: a measure that lies would make every figure worthless."""

import json
import math

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jax import lax

from benchmarks import front, measure, rewrite, tpu
from benchmarks.roofline import parse
from benchmarks.workloads import FLOAT32, WORKLOADS, Style, make_workload
from benchmarks.zoo import ZOO

SHAPE = jax.ShapeDtypeStruct


@pytest.fixture(autouse=True)
def users_promotion():
    """The workloads are written as users write: `x + bias`, float32 by promotion."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


workloads = pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS)


def quick(fn, *args):
    """Runs `fn` compiled without optimisation, which takes most of a test's time."""
    options = {"xla_backend_optimization_level": 0}
    return jax.jit(fn, compiler_options=options)(*args)


def draw(workload):
    params_key, batch_key = jr.split(jr.key(0))
    return quick(
        lambda: (workload.init(params_key, "toy"), workload.batch(batch_key, "toy"))
    )


# --------------------------------------------------------------------------- measures


def dot(x, w):
    return x @ w


def test_flops_of_a_dot():
    x, w = SHAPE((5, 3, 4), jnp.float32), SHAPE((4, 7), jnp.float32)
    count = measure.contraction_flops(jax.make_jaxpr(dot)(x, w))
    assert count == {"float32": 2 * 5 * 3 * 4 * 7}


def test_flops_of_a_batched_dot():
    x, w = SHAPE((6, 3, 4), jnp.float32), SHAPE((6, 4, 7), jnp.float32)
    count = measure.contraction_flops(jax.make_jaxpr(dot)(x, w))
    assert count == {"float32": 2 * 6 * 3 * 4 * 7}


@pytest.mark.parametrize("groups", (1, 2))
def test_flops_of_a_convolution(groups):
    def conv(x, kernel):
        return lax.conv_general_dilated(
            x,
            kernel,
            (2, 2),
            "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=groups,
        )

    x = SHAPE((5, 8, 8, 6), jnp.bfloat16)
    kernel = SHAPE((3, 3, 6 // groups, 10), jnp.bfloat16)
    count = measure.contraction_flops(jax.make_jaxpr(conv)(x, kernel))
    # Along each axis four windows of three numbers, of which one is padding.
    assert count == {"bfloat16": 2 * (5 * 10 * 6 // groups) * 11 * 11}


def test_a_scan_multiplies_flops_but_not_casts():
    def step(x, w):
        return (x.astype(jnp.bfloat16) @ w).astype(jnp.float32), None

    def scanned(x, ws):
        return jax.jit(lambda x: lax.scan(step, x, ws)[0])(x)

    jaxpr = jax.make_jaxpr(scanned)(jnp.ones((2, 3)), jnp.ones((9, 3, 3), jnp.bfloat16))
    assert measure.contraction_flops(jaxpr) == {"bfloat16": 9 * 2 * 2 * 3 * 3}
    assert measure.casts(jaxpr) == 2


def test_low_share_counts_the_wider_operand():
    def fn(x, low):
        mixed = lax.dot(x, low, preferred_element_type=jnp.float32)
        return mixed, lax.dot(low, low)

    low = SHAPE((4, 4), jnp.bfloat16)
    jaxpr = jax.make_jaxpr(fn)(SHAPE((4, 4), jnp.float32), low)
    assert measure.low_share(jaxpr) == 0.5


def test_casts_are_between_floats_only():
    def fn(x, n):
        return (
            x.astype(jnp.float16),
            x.astype(jnp.int32),
            n.astype(jnp.float32),
            x * 2.0,
        )

    jaxpr = jax.make_jaxpr(fn)(jnp.ones(3), jnp.arange(3))
    assert measure.casts(jaxpr) == 1


def test_saved_bytes_leave_out_arguments():
    x, w = SHAPE((5, 3), jnp.float32), SHAPE((3, 7), jnp.float32)
    assert sum(measure.saved_bytes(dot, x, w).values()) == 0
    assert measure.saved_bytes(lambda x, w: jnp.sin(x) @ w, x, w) == {
        "float32": 2 * 4 * 5 * 3  # cos(x) for sin's derivative, sin(x) for that of w
    }


def test_saved_bytes_of_what_is_differentiated():
    def fn(w, x):
        return x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)

    w, x = SHAPE((3, 7), jnp.float32), SHAPE((5, 3), jnp.float32)
    assert measure.saved_bytes(fn, w, x) == {"bfloat16": 2 * (5 * 3 + 3 * 7)}
    assert measure.saved_bytes(fn, w, x, argnums=(0,)) == {"bfloat16": 2 * 5 * 3}
    saved = measure.saved(fn, w, x)
    assert [aval.shape for aval in measure.weight_copies(w, saved)] == [(3, 7)]


def test_saved_bytes_see_checkpoints():
    x = SHAPE((5, 3), jnp.float32)
    fn = jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)))
    assert sum(measure.saved_bytes(fn, x).values()) == 0


# -------------------------------------------------------------------------- workloads


@pytest.mark.sample(3)
@workloads
def test_float32_style_adds_nothing(workload):
    params, batch = workload.shapes("real")
    both = jax.make_jaxpr(jax.value_and_grad(workload.loss))(params, batch)
    dtypes = {
        v.aval.dtype.name
        for eqn, _ in measure.walk(both)
        for v in eqn.outvars
        if jnp.issubdtype(v.aval.dtype, jnp.floating)
    }
    assert (measure.casts(both), dtypes) == (0, {"float32"})


def test_float32_style_is_the_identity():
    def fn(x):
        return x

    x = {"a": jnp.ones(3), "b": jnp.arange(3)}
    assert FLOAT32.low(x) is x and FLOAT32.full(x) is x
    assert FLOAT32.spread(x["a"], jnp.ones((2, 3))) is x["a"]
    assert FLOAT32.in_full(fn) is fn and FLOAT32.cheap(fn) is fn


def test_low_style_leaves_integers_alone():
    low = Style("float16").low({"a": jnp.ones(3), "b": jnp.arange(3)})
    assert {k: v.dtype.name for k, v in low.items()} == {"a": "float16", "b": "int32"}


@pytest.mark.rest
@workloads
def test_experts_are_experts(workload):
    """All contractions low, no more saved than in float32, leaner when lean."""
    params, batch = workload.shapes("real")

    def saved(loss):
        return sum(measure.saved_bytes(loss, params, batch, argnums=(0,)).values())

    hand = workload.hand("bfloat16")
    both = jax.make_jaxpr(jax.value_and_grad(hand))(params, batch)
    assert measure.low_share(both) == 1.0
    ratio = saved(hand) / saved(workload.loss)
    assert ratio < 0.95
    if workload.lean is not None:
        assert saved(workload.lean("bfloat16")) / saved(workload.loss) < 0.4


@pytest.mark.rest
# One of a kind: the other transformers are made of the same blocks.
@pytest.mark.parametrize("name", ("MLP", "GPT scanned", "CNN", "LSTM"))
def test_hand_gradients_are_near_float32(name):
    workload = WORKLOADS[name]
    params, batch = draw(workload)
    losses = (workload.loss, workload.hand("bfloat16"))
    (value, grads), (hand_value, hand_grads) = (
        quick(jax.value_and_grad(loss), params, batch) for loss in losses
    )
    assert {g.dtype.name for g in jax.tree.leaves((grads, hand_grads))} == {"float32"}
    assert rewrite.relative_error(np.asarray(hand_value), np.asarray(value)) < 4e-3
    true, hand = rewrite.as_vector(grads), rewrite.as_vector(hand_grads)
    # ReLUs that flip and batch norm over few samples are why a CNN is worse.
    assert rewrite.relative_error(hand, true) < (0.15 if name == "CNN" else 0.02)


# ------------------------------------------------------------------------- the script


def tiny():
    def model(style, w, x):
        return style.full(jnp.tanh(style.low(x) @ style.low(w))).sum()

    def init(key, size):
        return jr.normal(key, (3, 5), jnp.float32)

    def batch(key, size):
        return jr.normal(key, (7, 3), jnp.float32)

    return make_workload("tiny", model, init, batch)


def test_compare_measures_every_contender():
    results = rewrite.compare(
        tiny(), "bfloat16", "toy", ["float32", "hand"], repeats=1, seeds=2
    )
    plain, hand = results["float32"], results["hand"]
    assert (plain.casts, plain.low_share, plain.loss_error < 1e-6) == (0, 0.0, True)
    assert (hand.casts_forward, hand.low_share) == (3, 1.0)
    assert 1e-5 < hand.gradient_error < 2e-2
    assert not jax.config.jax_enable_x64


def test_float16_is_judged_with_a_scaled_loss():
    def model(style, w, x):
        return style.full(style.low(x) @ style.low(w)).sum() * 1e-9

    scaled = rewrite.LOSS_SCALES["float16"]
    workload = make_workload("small", model, tiny().init, tiny().batch)
    samples = rewrite.references(workload, seeds=1)
    loss = workload.hand("float16")
    assert rewrite.errors(loss, samples)["gradient_error"] == 1.0  # all underflow
    assert rewrite.errors(loss, samples, scaled)["gradient_error"] < 0.1


def test_command_prints_tables_and_writes_a_record(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(rewrite, "WORKLOADS", {"tiny": tiny()})
    path = tmp_path / "record.json"
    options = "--size toy --repeats 1 --seeds 1 --contenders float32 hand --json"
    rewrite.main([*options.split(), str(path)])
    record = json.loads(path.read_text())
    assert record["versions"]["jax"] == jax.__version__
    assert record["workloads"]["tiny"]["hand"]["weight_copies"] == 0
    out = capsys.readouterr().out
    assert "Ratios" in out and "Figures" in out and "…" not in out


# ------------------------------------------------------------------------------ the zoo


@pytest.mark.sample(8)
@pytest.mark.parametrize("model", ZOO.values(), ids=ZOO)
def test_a_zoo_model_is_float32_and_has_a_gradient_everywhere(model):
    """Traced at the size that is compiled, for nothing there depends on values."""
    params, batch = model.shapes("real")
    loss, grads = jax.eval_shape(jax.value_and_grad(model.loss), params, batch)
    assert (loss.shape, loss.dtype) == ((), jnp.float32)
    assert jax.tree.structure(grads) == jax.tree.structure(params)
    both = jax.make_jaxpr(jax.value_and_grad(model.loss))(params, batch)
    assert measure.contraction_flops(both).keys() == {"float32"}


@pytest.mark.parametrize("name", ("GPT-2 (Equinox)", "Llama (NNX)", "BERT (Linen)"))
def test_equal_sizes_are_one_program(name):
    """Else every seed would be traced and compiled anew."""
    jax.clear_caches()
    first, second = (ZOO[name].shapes("toy")[0] for _ in range(2))
    assert first is not second
    assert jax.tree.structure(first) == jax.tree.structure(second)


# -------------------------------------------------------------------------- the front


def one(error, saved=1, step=1.0):
    return front.Figures(error, error, saved, 1.0, step, 1)


def test_who_beats_whom():
    ours = one(1.0, saved=100, step=1.0)
    assert front.beats(one(0.9, saved=90, step=0.9), ours)
    assert not front.beats(one(0.96, saved=90, step=0.9), ours)
    assert not front.beats(one(0.9, saved=99, step=0.9), ours)
    assert not front.beats(one(0.9, saved=90, step=0.99), ours)
    assert front.beats(one(0.9, saved=90, step=None), ours)  # not compiled for a GPU
    assert not front.beats(one(math.inf, saved=90, step=0.9), ours)


def test_findings():
    rows = {
        "float32": one(0.0, saved=200),
        "contractions": one(1.0, saved=150),
        "default": one(1.05, saved=100),
    }
    assert front.findings(rows) == []
    rows["jmp"] = one(0.3, saved=90, step=0.5)
    rows["lean"] = one(1.3, saved=50)
    assert front.findings(rows) == [
        "jmp beats default",
        "default has 3.5 times the error of jmp",
        "lean has 1.30 times the error of contractions",
        "lean has 4.3 times the error of jmp",
    ]


def test_a_record_is_resumed_where_it_fits(tmp_path):
    path, head = tmp_path / "record.json", {"sources": "a", "settings": {"seeds": 1}}
    results = {"tiny": {"jmp": one(math.inf, step=None)}}
    front.write_record(path, head, results)
    assert front.read_record(path, head) == results
    assert front.read_record(path, head | {"sources": "b"}) == {}
    assert front.read_record(tmp_path / "none.json", head) == {}


@pytest.mark.rest
def test_front_measures_what_is_missing(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(front, "MODELS", {"tiny": tiny(), "other": tiny()})
    record, picture = tmp_path / "record.json", tmp_path / "front.png"
    options = "--size toy --no-roofline --seeds 1 --repeats 1 --policies default hand"
    command = [*options.split(), "--json", str(record), "--plot", str(picture)]
    front.main([*command, "--workloads", "tiny"])
    rows = json.loads(record.read_text())["models"]["tiny"]
    assert list(rows) == ["float32", "hand", "default", "contractions"]
    assert rows["float32"]["error"] < 1e-6
    assert 1e-5 < rows["default"]["error"] < 2e-2
    assert rows["default"]["saved_bytes"] < rows["float32"]["saved_bytes"]
    assert picture.read_bytes().startswith(b"\x89PNG")

    measured = []
    original = front.measured
    monkeypatch.setattr(
        front, "measured", lambda *args: measured.append(args) or original(*args)
    )
    front.main([*command, "--workloads", "tiny", "other"])
    assert [(model.name, list(losses)) for model, _, losses, _ in measured] == [
        ("tiny", ["float32", "hand", "default", "contractions"])
    ]
    assert list(json.loads(record.read_text())["models"]) == ["tiny", "other"]
    out = capsys.readouterr().out
    assert "Error, memory and time" in out and "…" not in out


def test_an_overflow_is_an_infinite_error():
    samples = rewrite.references(tiny(), seeds=2, wide=False)
    found = front.mean_error(tiny().loss, samples, 1.0, {})
    assert front.EXACT <= found < 1e-6
    assert (
        front.mean_error(lambda w, x: jnp.inf * w.sum(), samples, 1.0, {}) == math.inf
    )


@pytest.mark.rest
def test_tpu_compiles_a_program_once(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tpu, "MODELS", {"tiny": tiny(), "other": tiny()})
    monkeypatch.setattr(tpu, "described", lambda name: jax.devices("cpu")[0])
    compiled = []

    def read_off(lowered, program, original=tpu.read_off):
        figures, text = original(lowered, program)
        compiled.append(figures.program)
        return figures, text

    monkeypatch.setattr(tpu, "read_off", read_off)
    record = tmp_path / "record.json"
    options = f"--size toy --devices v5e --contenders default hand --json {record}"
    tpu.main([*options.split(), "--models", "tiny"])
    assert len({*compiled}) == 2

    def rows(model):
        return json.loads(record.read_text())["devices"]["v5e"][model]

    assert [rows("tiny")[name]["program"] for name in rows("tiny")] == [*compiled][::-1]

    # What is known stays, another version of a model is compiled beside it.
    tpu.main([*options.split(), "--models", "tiny", "--contenders", "float32"])
    assert list(rows("tiny")) == ["float32", "hand", "default"] and len(compiled) == 3
    tpu.main([*options.split(), "--models", "tiny", "other"])
    assert list(rows("other")) == ["hand", "default"] and len(compiled) == 5

    # What changed, and what another compiler made, is compiled again.
    monkeypatch.setitem(tpu.CONTENDERS, "default", tpu.CONTENDERS["jmp"])
    tpu.main([*options.split(), "--models", "tiny"])
    assert len(compiled) == 6
    made = json.loads(record.read_text())
    made["versions"]["libtpu"] = "another"
    record.write_text(json.dumps(made))
    tpu.main([*options.split(), "--models", "tiny"])
    assert len(compiled) == 8
    assert "As compiled for a TPU" in capsys.readouterr().out


def test_cycles_count_as_often_as_they_run():
    def costs(cycles):
        return f'backend_config={{"estimated_cycles":"{cycles}"}}'

    trips = 'backend_config={"known_trip_count":{"n":"5"}}'
    text = f"""HloModule step

%body (x: f32[4]) -> f32[4] {{
  %x = f32[4] parameter(0)
  ROOT %y = f32[4] negate(%x), metadata={{op_name="inner"}}, {costs(7)}
}}

%cond (x: f32[4]) -> pred[] {{
  %x = f32[4] parameter(0)
  ROOT %p = pred[] constant(false)
}}

ENTRY %main (a: f32[4]) -> f32[4] {{
  %a = f32[4] parameter(0)
  %b = f32[4] exponential(%a), {costs(100)}
  %c = f32[4] negate(%b), {costs(2**63 - 1)}
  ROOT %w = f32[4] while(%c), condition=%cond, body=%body, {trips}
}}
"""
    found = tpu.pieces(parse(text))
    assert [(one.op, one.times, one.cycles) for one in found] == [
        ("", 1, 100),
        ("", 1, None),
        ("inner", 5, 7),
    ]
    assert tpu.total_cycles(found) == 135
