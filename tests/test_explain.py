"""`explain`: what it counts is what runs, and its reasons are those of the plan."""

import dataclasses
import functools
import importlib.metadata
import json
import re
from collections import Counter

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import optax
import pytest
from jax import lax

import jaxamp_like._reports.extras
from benchmarks import measure
from benchmarks.workloads import WORKLOADS
from jaxamp_like import (
    AmpError,
    AmpWarning,
    Policy,
    PolicyMap,
    amp,
    amp_stop,
    amp_with_state,
    default_amp_policy,
    explain,
    get_policy,
    init_amp_state,
    scope_modules,
    trace_numerics,
    using_policy,
)
from jaxamp_like._reports.data.records import scope_tree
from jaxamp_like.presets import quantised
from jaxamp_like.rules import float8, smaller_than

pytestmark = pytest.mark.sample(5)

BF16 = {"compute_dtype": "bfloat16"}


@pytest.fixture(autouse=True)
def users_promotion():
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture
def w(getkey):
    return jr.normal(getkey(), (8, 8)) / 3


@pytest.fixture
def x(getkey):
    return jr.normal(getkey(), (4, 8))


def loss(w, x):
    with jax.named_scope("layers"):
        for i in range(2):
            with jax.named_scope(f"layer_{i}"):
                x = jnp.tanh(x @ w)
    with jax.named_scope("head"):
        return jnp.mean(jnp.exp(x) ** 2)


# Counts of convolutions, against XLA's.

CONVOLUTIONS = {
    "plain": {},
    "padded": {"padding": ((2, 2), (0, 3))},
    "cropped": {"padding": ((-1, 2), (0, -2))},
    "strided": {"window_strides": (2, 3), "padding": "SAME"},
    "of holes": {"lhs_dilation": (2, 3), "padding": ((1, 2), (2, 2))},
    "strided, of holes": {"window_strides": (2, 4), "lhs_dilation": (6, 2)},
    "with holes": {"rhs_dilation": (2, 3)},
    "all of it": {
        "window_strides": (3, 2),
        "padding": ((3, 1), (-2, 4)),
        "lhs_dilation": (2, 4),
        "rhs_dilation": (3, 2),
        "feature_group_count": 2,
    },
    "by groups": {"window_strides": (2, 2), "feature_group_count": 3},
    "by groups of the batch": {"batch_group_count": 2},
    "of padding alone": {"window_strides": (9, 9), "padding": ((9, 0), (9, 0))},
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("options", CONVOLUTIONS.values(), ids=list(CONVOLUTIONS))
def test_flops_of_a_convolution_are_those_of_xla(options):
    options = {"window_strides": (1, 1), "padding": [(0, 0)] * 2} | options
    numbers = {"dimension_numbers": ("NHWC", "HWIO", "NHWC")}
    x = jnp.ones((2, 9, 11, 2 * options.get("feature_group_count", 1)))
    kernel = jnp.ones((3, 4, 2, 12))

    def convolve(x, kernel):
        return lax.conv_general_dilated(x, kernel, **options, **numbers)

    def backward(x, kernel):
        out, vjp = jax.vjp(convolve, x, kernel)
        return vjp(out)

    for fn in (convolve, backward):
        cost = jax.jit(fn).lower(x, kernel).compile().cost_analysis()
        found = explain(fn, amp_policy={})(x, kernel).now.totals.flops_by_dtype
        assert sum(found.values()) == cost.get("flops", 0)
        assert found == measure.contraction_flops(jax.make_jaxpr(fn)(x, kernel))


# Counts, against those of the benchmarks, which share no code with the package: of
# every workload, with and without a backward pass of its own, plain and lean.

SETTINGS = pytest.mark.parametrize(
    "settings", (BF16, BF16 | {"lean": True}), ids=("plain", "lean")
)
ALL_WORKLOADS = pytest.mark.parametrize(
    "workload", WORKLOADS.values(), ids=list(WORKLOADS)
)


def assert_counts(program, jaxpr, saved):
    totals = program.totals
    assert totals.flops_by_dtype == measure.contraction_flops(jaxpr)
    assert totals.low_share == measure.low_share(jaxpr)
    assert totals.casts == measure.casts(jaxpr)
    assert totals.saved == saved


@pytest.mark.sample(6)
@pytest.mark.cross("workload", settings=2)
@SETTINGS
@ALL_WORKLOADS
def test_counts_of_a_loss(workload, settings):
    args = workload.shapes("toy")
    report = explain(workload.loss, **settings)(*args)
    low = amp(workload.loss, **settings)
    for program, fn in ((report.now, low), (report.written, workload.loss)):
        saved = measure.saved_bytes(fn, *args, argnums=(0,))
        assert_counts(program, jax.make_jaxpr(fn)(*args), saved)


@pytest.mark.sample(6)
@pytest.mark.cross("workload", settings=2)
@SETTINGS
@ALL_WORKLOADS
def test_counts_of_a_gradient(workload, settings):
    args = workload.shapes("toy")
    low = amp(workload.loss, **settings)
    report = explain(jax.value_and_grad(low))(*args)
    for program, fn in ((report.now, low), (report.written, workload.loss)):
        jaxpr = jax.make_jaxpr(jax.value_and_grad(fn))(*args)
        assert_counts(program, jaxpr, bytes_read_backward(fn, *args))


def bytes_read_backward(fn, params, *args):
    """Bytes that a forward pass makes and the backward pass of it reads, by dtype.

    Less than is handed on: of the zeros that the derivative of a ReLU selects, or that
    an LSTM begins with, the backward pass reads none."""
    trees = []

    def forward(params, *args):
        out, vjp = jax.vjp(lambda params: fn(params, *args), params)
        leaves, tree = jax.tree.flatten(vjp)
        trees.append(tree)
        return out, leaves

    def backward(leaves, cotangent):
        return jax.tree.unflatten(trees[-1], leaves)(cotangent)

    made, (out, leaves) = jax.make_jaxpr(forward, return_shape=True)(params, *args)
    used = jax.make_jaxpr(backward)(leaves, out)
    made, used = (getattr(jaxpr, "jaxpr", jaxpr) for jaxpr in (made, used))
    read = {id(v) for eqn in used.eqns for v in eqn.invars}
    handed = zip(made.outvars[1:], used.invars[:-1], strict=True)
    kept = {id(v): v.aval for v, inner in handed if id(inner) in read}
    is_made = {id(v) for eqn in made.eqns for v in eqn.outvars}
    count = Counter()
    for aval in (kept[i] for i in kept if i in is_made):
        count[aval.dtype.name] += measure.size_in_bytes(aval)
    return count


def test_scopes_add_up_to_the_totals():
    report = explain(jax.grad(amp(loss, **BF16)))(jnp.ones((8, 8)), jnp.ones((4, 8)))
    root, totals = report.scopes(), report.now.totals
    assert root.flops == totals.flops_by_dtype
    assert (root.casts, root.ops) == (totals.casts, len(report.now.ops))
    assert sum(root.saved.values()) == totals.saved_bytes
    inner = {child.name: child for child in root.children}
    assert inner.keys() >= {"layers", "head"}
    layers = {child.path for child in inner["layers"].children}
    assert layers == {"layers/layer_0", "layers/layer_1"}
    assert report.scopes(1).children[0].children == ()


# What it explains.


def test_the_rule_and_the_reason_of_an_equation(w, x):
    policy = default_amp_policy | {"layer_1": "float32"}
    report = explain(loss, amp_policy=policy, **BF16)(w, x)
    first, second = (op for op in report.now.ops if op.primitive == "dot_general")
    assert (first.key, first.rule) == ("dot_general", "use_compute_precision")
    assert (first.dtype, first.written) == ("bfloat16", ("float32",) * 3)
    assert first.why == "computes in bfloat16"
    assert first.place.scope == "layers/layer_0"
    assert re.fullmatch(r".*test_explain\.py:\d+(:\d+)? \(loss\)", first.place.source)
    assert (second.key, second.rule) == ("layer_1", "use_precision('float32')")
    assert second.dtype == "float32"


def test_code_of_jax_has_the_line_that_called_it(w):
    def fn(w):
        with amp_stop():
            return w / jnp.linalg.norm(w)  # jitted: JAX knows no lines inside

    ops = explain(jax.grad(lambda w: jnp.sum(amp(fn)(w))))(w).now.ops
    assert {"sqrt", "reduce_sum"} <= {op.primitive for op in ops}
    assert all(re.search(r"test_explain\.py:\d+", op.place.source) for op in ops)


def test_rules_that_fired_and_those_that_never_did(w, x):
    policy = default_amp_policy | {"nowhere": "float32", lax.exp_p: "bfloat16"}
    with pytest.warns(AmpWarning, match="nowhere"):
        report = explain(loss, amp_policy=policy, **BF16)(w, x)
    rules = {rule.key: rule for rule in report.rules}
    assert rules["dot_general"].count == 2 and not rules["dot_general"].own
    assert (rules["exp"].count, rules["exp"].own) == (1, True)
    assert (rules["nowhere"].count, rules["nowhere"].own) == (0, True)
    assert rules["sin"].count == 0
    assert [rule.count for rule in report.rules] == sorted(
        (rule.count for rule in report.rules), reverse=True
    )


def test_entries_of_a_map_are_credited(w, x):
    entries = {"layers/layer_1": "float32", r"he\w+": "mixed_float16"}
    policies = PolicyMap("mixed_bfloat16", entries)
    report = explain(loss, amp_policy=policies)(w, x)
    count = {rule.key: rule.count for rule in report.rules if rule.own}
    assert count == {"layers/layer_1": 2, r"he\w+": 4}
    keys = {op.key for op in report.now.ops if op.primitive == "dot_general"}
    assert keys == {"dot_general", "layers/layer_1: dot_general"}
    never = [rule for rule in report.rules if not rule.count]
    assert not any(rule.own for rule in never)


@pytest.mark.parametrize(
    ("limit", "rules"),
    (
        (lambda p: p.only("layer_0"), {"layer_0": ("only", 2)}),
        (lambda p: p.excluding("layer_0"), {"layer_0": ("excluding", 2)}),
        (
            lambda p: p.only(lax.dot_general_p),
            {"dot_general": ("contract, only", 2)},
        ),
    ),
)
def test_limits_are_credited(w, x, limit, rules):
    report = explain(loss, amp_policy=limit(get_policy("mixed_bfloat16")))(w, x)
    own = {rule.key: (rule.rule, rule.count) for rule in report.rules if rule.own}
    assert own == rules


def test_a_predicate_is_among_the_settings(w, x):
    policy = get_policy("mixed_bfloat16").where(smaller_than(2**16))
    (settings,) = explain(loss, amp_policy=policy)(w, x).settings
    assert settings.startswith("compute_dtype=bfloat16, where(")


def test_the_authors_casts_are_told_from_inserted_ones():
    def fn(w, x):
        return (x @ w).astype(jnp.float16).astype(jnp.float32) @ w

    report = explain(fn, **BF16)(jnp.ones((8, 8)), jnp.ones((4, 8)))
    by_author = [cast for cast in report.now.casts if not cast.inserted]
    assert [cast.target_dtype for cast in by_author] == ["float16", "float32"]
    assert all(cast.why == "a cast that the author wrote" for cast in by_author)
    inserted = [cast for cast in report.now.casts if cast.inserted]
    assert inserted[0].why == "dot_general reads bfloat16: computes in bfloat16"
    assert inserted[-1].why == "dot_general hands on float32: computes in bfloat16"
    assert report.written.totals.casts == 2


def test_phases_and_what_is_inside_of_what(w, x):
    def fn(w, x):
        body = jax.checkpoint(lambda x, _: (jnp.tanh(x @ w), None))
        return jnp.sum(lax.scan(body, x, None, length=3)[0])

    report = explain(jax.grad(amp(fn, **BF16)))(w, x)
    dots = [op for op in report.now.ops if op.primitive == "dot_general"]
    assert [op.place.phase for op in dots].count("forward") == 1
    assert [op.place.phase for op in dots].count("backward") == 2
    assert [op.place.phase for op in dots].count("recomputed") == 1
    assert {op.place.times for op in dots} == {3}
    assert all("scan" in op.place.inside for op in dots)
    assert all(op.author == "dot_general" for op in dots)


def test_a_whole_training_step(w, x):
    tx = optax.adamw(1e-3)

    @jax.jit
    def step(w, state, x):
        grads = jax.grad(amp(loss, **BF16))(w, x)
        updates, state = tx.update(grads, state, w)
        return optax.apply_updates(w, updates), state

    state = tx.init(w)
    step(w, state, x)  # traced and compiled before anybody asks
    report = explain(step)(w, state, x)
    assert report.settings == ("compute_dtype=bfloat16",)
    assert report.now.totals.low_share == 1.0
    outside = [op for op in report.now.ops if op.why == "outside of amp"]
    assert outside and all(op.key == "" for op in outside)
    jaxpr = jax.make_jaxpr(step)(w, state, x)
    assert report.now.totals.casts == measure.casts(jaxpr)
    assert report.now.totals.saved is not None


def test_a_gradient_inside_of_amp_is_noted(w, x):
    inside = explain(amp(jax.grad(loss), **BF16))(w, x)
    (note,) = inside.notes
    assert note.startswith("3 of 5 contractions") and note in str(inside)
    assert explain(jax.grad(amp(loss, **BF16)))(w, x).notes == ()
    assert explain(jax.grad(loss))(w, x).notes == ()


def test_a_setting_of_jax_that_amp_overrules_is_noted(w, x):
    with jax.default_matmul_precision("highest"):
        (note,) = explain(amp(loss, **BF16))(w, x).notes
        assert "'highest'" in note and note.endswith("computes in bfloat16")
        assert explain(amp(loss, amp_policy="float32"))(w, x).notes == ()


def test_modules_and_shapes_are_taken_as_arguments(getkey):
    model = eqx.nn.MLP(4, 2, 8, 1, key=getkey())

    def fn(model, x):
        return jnp.mean(jax.vmap(model)(x) ** 2)

    x = jax.ShapeDtypeStruct((3, 4), jnp.float32)
    report = explain(eqx.filter_value_and_grad(amp(fn, **BF16)))(model, x)
    assert report.now.totals.low_share == 1.0


def test_nnx_modules():
    from flax import nnx

    model = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
    report = explain(lambda model, x: jnp.sum(model(x)), **BF16)(
        model, jnp.ones((3, 4))
    )
    assert report.now.totals.low_share == 1.0
    assert report.written.totals.low_share == 0.0


@pytest.mark.sample(2)
@pytest.mark.parametrize("report", (explain, trace_numerics))
def test_nnx_modules_that_are_scoped_inside(report):
    """Of the program as written too, whose modules change their classes."""
    from flax import nnx

    model = nnx.Sequential(
        nnx.Linear(8, 4, rngs=nnx.Rngs(0)), nnx.BatchNorm(4, rngs=nnx.Rngs(0))
    )

    def loss(model, x):
        return jnp.mean(scope_modules(model)(x) ** 2)

    reported = report(nnx.grad(amp(loss, **BF16)))(model, jnp.ones((2, 8)))
    assert "compute_dtype=bfloat16" in str(reported)
    assert type(model.layers[0]) is nnx.Linear


@pytest.mark.parametrize("report", (explain, trace_numerics))
def test_a_package_that_is_not_installed_but_on_the_path(report, monkeypatch, w, x):
    find = importlib.metadata.distribution

    def distribution(name):
        if name == "jaxamp_like":
            raise importlib.metadata.PackageNotFoundError(name)
        return find(name)

    monkeypatch.setattr(importlib.metadata, "distribution", distribution)
    versions = report(loss, **BF16)(w, x).versions
    assert versions["jaxamp_like"] == jaxamp_like.__version__
    assert versions["jax"] == find("jax").version


def test_nnx_modules_that_change_are_called_themselves(x):
    from flax import nnx

    model = nnx.Sequential(
        nnx.Linear(8, 4, rngs=nnx.Rngs(0)), nnx.BatchNorm(4, rngs=nnx.Rngs(0))
    )
    mean = model.layers[1].mean
    for fn, name in ((model, "Sequential"), (model.__call__, "__call__")):
        report = explain(fn, **BF16)(x)
        assert report.name == name
        assert report.now.totals.low_share == 1.0
    assert (mean[...] == 0).all()


@pytest.mark.parametrize(
    ("fn", "name"),
    (
        (loss, "loss"),
        (functools.partial(loss), "loss"),
        (jax.jit(loss), "loss"),
        (eqx.nn.Lambda(jnp.sin), "Lambda"),
    ),
)
def test_a_report_has_the_name_of_the_function(fn, name, w, x):
    args = (x,) if name == "Lambda" else (w, x)
    assert explain(fn, **BF16)(*args).name == name


def test_a_report_leaves_no_trace(w, x):
    def text():
        return str(jax.make_jaxpr(jax.grad(amp(loss, **BF16)))(w, x))

    before = text()
    explain(jax.grad(amp(loss, **BF16)))(w, x)
    assert text() == before
    names = [
        str(eqn.source_info.name_stack)
        for eqn, _ in measure.walk(jax.make_jaxpr(amp(loss, **BF16))(w, x))
    ]
    assert not any("amp_equation" in name for name in names)


# Settings and bad input.


@pytest.mark.parametrize(
    "forgotten",
    (
        loss,
        jax.grad(loss),
        jax.jit(jax.value_and_grad(lambda w, x: loss(w, x))),
        lambda w, x: loss(x=x, w=w),
    ),
    ids=("loss", "gradient", "jitted step", "lambda"),
)
def test_a_step_in_which_amp_was_forgotten_is_reported_as_it_runs(forgotten, w, x):
    with pytest.warns(AmpWarning, match="`using_policy` had no effect"):
        with using_policy("mixed_float16"):  # which nothing in it has asked for
            report = explain(forgotten)(w, x)
    assert report.settings == () and report.now.totals.low_share == 0
    assert report.now.totals == report.written.totals
    said = str(report)
    assert "100.0 % float32 (as written: 100.0 % float32)" in said
    assert "no `amp` was found" in said
    assert "`explain(fn, compute_dtype='bfloat16')`" in said
    assert "no `amp` was found" in report._repr_html_()
    numerics = trace_numerics(forgotten)(w, x)
    assert "no `amp` was found" in str(numerics)
    assert {op.dtype for op in numerics.ops} == {"float32"}
    assert max(op.error for op in numerics.ops) == 0


def test_settings_tell_what_amp_would_do(w, x):
    report = explain(loss, **BF16)(w, x)
    assert report.settings == ("compute_dtype=bfloat16",)
    assert report.now.totals.low_share == 1
    assert "no `amp`" not in str(report)
    assert explain(loss, lean=True)(w, x).settings == ("compute_dtype=float16, lean",)


def test_what_an_inner_gradient_makes_is_not_of_the_forward_pass():
    """Training within a loss: the marks of what is kept there are no forward values."""

    def fit(w, x):
        for _ in range(4):
            x = x + jax.nn.gelu(x @ w) @ w.T
        return jnp.mean(x**2)

    def loss(w, x):
        def step(w, _):
            return w - 0.1 * jax.grad(fit)(w, x), None

        return fit(lax.scan(step, w, None, length=5)[0], x)

    w, x = jnp.eye(16) / 4, jnp.ones((8, 16))
    report = explain(jax.grad(amp(loss, compute_dtype="bfloat16")))(w, x)
    now, written = report.now.totals, report.written.totals
    assert 0 < now.saved_bytes < written.saved_bytes


def test_no_derivative_no_saved_bytes(x):
    def fn(x):
        return jax.pure_callback(lambda x: x, jax.typeof(x), x)

    report = explain(fn, **BF16)(x)
    assert report.now.totals.saved is None
    said = "saved for backward: unknown, there is no derivative: "
    assert f"{said}ValueError: Pure callbacks do not support JVP" in str(report)
    of_integers = explain(fn, argnums=(), **BF16)(x)
    assert f"{said}no argument that `argnums` names holds" in str(of_integers)


def test_what_to_explain_under_delayed_scales(w, x):
    rule = float8(delayed=True, where=None)
    policy = Policy("bfloat16", rules=quantised(rule))
    report = explain(loss, amp_policy=policy)(w, x)
    assert "Put it around the gradient: `amp_with_state(" in str(report)
    assert report.written.totals.saved and not report.written.why_unknown
    step = amp_with_state(jax.grad(loss), amp_policy=policy)
    known = explain(step)(init_amp_state(step, w, x), w, x)
    assert "saved for backward: unknown" not in str(known)


def test_a_function_that_fails_to_trace(x):
    def broken(x):
        return x @ x

    with pytest.raises(TypeError, match="dot_general") as info:
        explain(broken)(x)
    assert any("While tracing 'broken'" in note for note in info.value.__notes__)


def test_an_empty_function():
    report = explain(lambda: None, **BF16)()
    assert report.now.ops == () and "computes nothing" in str(report)
    assert report.scopes().ops == 0
    report.print()
    assert "<pre>" in report._repr_html_()


def test_arguments_are_checked(w, x):
    with pytest.raises(TypeError, match="compute_dtype"):
        explain(loss, compute_dtype="int8")
    with pytest.raises(TypeError, match="callable"):
        explain(loss(w, x))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="callable"):
        explain(None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="argnums"):
        explain(loss, argnums=5)(w, x)
    for argnums in ("w", 1.5, (0, None)):
        with pytest.raises(TypeError, match="`argnums` must be an integer"):
            explain(loss, argnums=argnums)
    with pytest.raises(AmpError, match="nowhere"):
        policy = default_amp_policy | {"nowhere": "float32"}
        explain(loss, amp_policy=policy, strict=True)(w, x)


# Views.


def test_json_holds_everything(w, x):
    report = explain(jax.grad(amp(loss, **BF16)))(w, x)
    data = json.loads(report.to_json())
    assert data["now"]["totals"]["casts"] == report.now.totals.casts
    assert len(data["now"]["ops"]) == len(report.now.ops)
    op = data["now"]["ops"][0]
    assert op.keys() == {f.name for f in dataclasses.fields(report.now.ops[0])}


def test_print_needs_nothing_and_the_table_shows_all(w, x, capsys):
    report = explain(jax.grad(amp(loss, **BF16)))(w, x)
    assert "contractions: 100.0 % bfloat16 (as written: 100.0 % float32)" in str(report)
    report.print()
    out = capsys.readouterr().out
    for words in ("Scopes", "layers", "Casts", "dot_general reads", "Rules", "exp"):
        assert words in out
    assert "bfloat16" in report._repr_html_()


def test_a_missing_extra_is_named(w, x, monkeypatch, tmp_path):
    def missing(name):
        raise ImportError(name)

    report = explain(loss, **BF16)(w, x)
    monkeypatch.setattr(jaxamp_like._reports.extras.importlib, "import_module", missing)
    for view in (report.print, lambda: report.save_html(tmp_path / "page.html")):
        with pytest.raises(ImportError, match=r"pip install 'jaxamp_like\[report\]'"):
            view()
    assert "casts" in str(report)


def test_a_tree_of_one_program_is_that_of_its_scopes(w, x):
    report = explain(loss, **BF16)(w, x)
    assert scope_tree(report.now) == report.scopes()


def test_contractions_outside_of_what_amp_has_wrapped():
    criterion = amp(lambda p, y: jnp.mean((p - y) ** 2), compute_dtype="bfloat16")
    outside = "    none is in a function that `amp` has wrapped: put `amp` around what"
    w, x, y = jnp.ones((4, 3)), jnp.ones((2, 4)), jnp.ones((2, 3))

    def loss(w, x, y):
        return criterion(x @ w, y)

    def lines(fn, *args):
        return str(explain(fn)(*args)).splitlines()

    found = lines(jax.grad(loss), w, x, y)
    assert [line for line in found if line.startswith(outside)]
    assert found[1].startswith("  contractions: 100.0 % float32")
    assert "  contractions: none (as written: none)" in lines(criterion, y, y)
    for fn, args in (
        (criterion, (y, y)),
        (jax.grad(amp(loss, compute_dtype="bfloat16")), (w, x, y)),
        (lambda w, x: amp(jnp.matmul, compute_dtype="bfloat16")(x, w) @ w.T, (w, x)),
        (lambda w, x: x @ w, (w, x)),  # without `amp`, which is told already
    ):
        assert not any(outside in line for line in lines(fn, *args))
