"""Eight devices: what `amp` adds to a step sends nothing that the step did not send.

Each way to split a small model: the collectives of the compiled step beside those of
the float32 step, its results beside those of one device."""

import contextlib
import re
from collections import Counter
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jaxamp_like._jax
import jaxamp_like._merged_reads
from benchmarks.measure import low_share, saved
from jaxamp_like import AmpWarning, Policy, amp, default_amp_policy
from jaxamp_like._jax import CAN_MERGE, raw, subjaxprs
from jaxamp_like.inference import convert
from jaxamp_like.presets import full_sums_over_devices, pytorch_autocast, quantised
from jaxamp_like.rules import (
    float8,
    int8,
    use_compute_precision,
    use_precision_by_pass,
    wide,
)
from tests.programs import eps, error

pytestmark = pytest.mark.sample(5)

N, VOCABULARY, DIM, HIDDEN = 8, 64, 32, 128
DTYPES = ("bfloat16", "float16")
needs_order = pytest.mark.skipif(
    not CAN_MERGE, reason="this JAX does not tell which operation comes first"
)


def norm(x, scale):
    x = x - jnp.mean(x, axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-5) * scale


def loss(w, tokens):
    x = w["embed"][tokens]
    for p in w["blocks"]:
        hidden = norm(x, p["scale"]) @ p["up"] + p["bias"]
        x = x + jax.nn.gelu(hidden) @ p["down"]
    return jnp.mean(jnp.square(x @ w["head"]))


def normal(i, *shape):
    return jr.normal(jr.key(i), shape, jnp.float32) / shape[0] ** 0.5


def init(depth=2):
    def block(i):
        return {
            "scale": jnp.ones(DIM),
            "up": normal(3 * i, DIM, HIDDEN),
            "bias": normal(3 * i + 1, HIDDEN),
            "down": normal(3 * i + 2, HIDDEN, DIM),
        }

    w = {"embed": normal(100, VOCABULARY, DIM), "head": normal(101, DIM, VOCABULARY)}
    return w | {"blocks": [block(i) for i in range(depth)]}


# So many that it is the weights that are sent, and not the activations.
TOKENS = np.arange(N * 128, dtype=np.int32).reshape(N, 128) * 7 % VOCABULARY


def make_mesh(kind=AxisType.Auto, **axes):
    axes = axes or {"data": N}
    kinds = (kind,) * len(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=kinds)


def in_mesh(mesh):
    # JAX < 0.7 has it in `jax.sharding` only.
    return (
        jax.set_mesh(mesh) if hasattr(jax, "set_mesh") else jax.sharding.use_mesh(mesh)
    )


def reshard(x, spec):
    if hasattr(jax.sharding, "reshard"):
        return jax.sharding.reshard(x, spec)
    from jax.experimental.shard import reshard  # JAX < 0.7

    return reshard(x, spec)


def in_auto_axes(fn):
    """`fn` where XLA decides how arrays are split; its result is so by rows."""
    if hasattr(jax.sharding, "auto_axes"):
        return jax.sharding.auto_axes(fn, out_sharding=P("data"))
    from jax.experimental.shard import auto_axes  # JAX < 0.7

    return auto_axes(fn, out_sharding=P("data"))


def along_longest(x):
    axis = int(np.argmax(x.shape))
    return P(*("data" if i == axis else None for i in range(x.ndim)))


def columns_and_rows(path, x):
    name = jax.tree_util.keystr(path)
    if "up" in name or "head" in name:
        return P(None, "model")
    return P("model", None) if "down" in name else P()


WAYS = {
    "data parallel": ({"data": N}, lambda path, x: P()),
    "fully sharded": ({"data": N}, lambda path, x: along_longest(x)),
    "tensor parallel": ({"data": 1, "model": N}, columns_and_rows),
    "both": ({"data": 4, "model": 2}, columns_and_rows),
}


def shardings(mesh, spec, w):
    return jax.tree_util.tree_map_with_path(
        lambda path, x: NamedSharding(mesh, spec(path, x)), w
    )


KINDS = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"


def sent(compiled):
    """How many arrays each kind of collective is given, of a compiled step.

    Vectors aside: what is run again in the backward pass has biases gathered again."""
    found = Counter()
    for line in compiled.as_text().splitlines():
        match = re.search(rf"= (.*?) ({KINDS})(?:-start)?\(", line)
        if match:
            found[match[2]] += len(re.findall(r"\[\d+,", match[1]))
    return found


def eqns(jaxpr):
    for eqn in raw(jaxpr).eqns:
        yield eqn
        for inner in subjaxprs(eqn.params):
            yield from eqns(inner)


def weight_casts(fn, *args, shape=(DIM, HIDDEN)):
    """How often a float32 array of this shape is cast, forward and backward."""
    return sum(
        eqn.primitive.name == "convert_element_type"
        and eqn.invars[0].aval.shape == shape
        and eqn.invars[0].aval.dtype == jnp.float32
        for eqn in eqns(jax.make_jaxpr(jax.grad(fn, argnums=(0, 1)))(*args))
    )


# ------------------------------------------------------------------- what is known


def product(w, x):
    return jnp.sum(jnp.tanh(x @ w))


def placed(mesh, *spec):
    return jax.device_put(jnp.ones((DIM, HIDDEN)), NamedSharding(mesh, P(*spec)))


def rows():
    return jnp.ones((N, DIM))


def cast_once(fn, w, **settings):
    mixed = amp(fn, compute_dtype="bfloat16", **settings)
    return weight_casts(mixed, w, rows()) == 1


def test_on_one_device_the_cast_is_made_again():
    assert not cast_once(product, jnp.ones((DIM, HIDDEN)))


def test_on_a_mesh_it_is_made_once():
    w = placed(make_mesh(), "data")
    assert cast_once(product, w)
    assert not cast_once(product, w, gather_once=False)


def test_one_that_shows_its_type_as_whole_is_not_sharded():
    mesh = make_mesh(AxisType.Explicit)
    with in_mesh(mesh):
        assert not cast_once(product, placed(mesh))
        assert cast_once(product, placed(mesh, "data", None))


# Weights, inputs, result: split along what is summed over, or one of them gathered.
SPLIT = {
    "rows of weights": (P("data"), P(), None),
    "columns of inputs": (P(), P(None, "data"), None),
    "both, gathered": (P(None, "data"), P("data"), P("data")),
}


def in_layers(for_x=None, for_result=None):
    def layers(ws, x):
        def layer(x, w):
            y = jnp.tanh(jnp.dot(x, w, out_sharding=for_result))
            return y if for_x is None else reshard(y, for_x), None

        return jnp.mean(jnp.square(jax.lax.scan(layer, x, ws)[0]))

    return layers


@pytest.mark.sample(6)
@pytest.mark.parametrize("split", SPLIT)
@pytest.mark.parametrize("rule", [float8, int8], ids=["float8", "int8"])
def test_scales_of_rows_leave_a_product_where_it_lies(rule, split):
    options = {"granularity": "row"} if rule is float8 else {"migration": 0.5}
    policy = quantised(rule(where=None, **options))

    def gradients(fn, args):
        low = amp(fn, compute_dtype="bfloat16", amp_policy=policy)
        return jax.jit(jax.value_and_grad(low, argnums=(0, 1)))(*args)

    args = normal(0, 2, DIM, DIM), normal(1, DIM, DIM)
    alone = gradients(in_layers(), args)
    (for_w, for_x, for_result), mesh = SPLIT[split], make_mesh(AxisType.Explicit)
    with in_mesh(mesh):
        places = NamedSharding(mesh, P(None, *for_w)), NamedSharding(mesh, for_x)
        args = jax.device_put(args, places)
        value, grads = gradients(in_layers(for_x, for_result), args)
    for grad, place in zip(grads, places, strict=True):
        assert grad.sharding.is_equivalent_to(place, grad.ndim)
    assert error(jax.device_get((value, grads)), alone) < eps("bfloat16")


def test_a_sharding_constraint_is_known():
    sharding = NamedSharding(make_mesh(), P("data"))

    def constrained(w, x):
        return product(jax.lax.with_sharding_constraint(w, sharding), x)

    w = jnp.ones((DIM, HIDDEN))
    assert cast_once(constrained, w)
    assert not cast_once(product, w)


def test_a_gather_that_the_author_asks_for_brings_the_compute_dtype():
    whole = NamedSharding(make_mesh(), P())

    def gathered(w, x):
        return product(jax.lax.with_sharding_constraint(w, whole), x)

    fn = jax.grad(amp(gathered, compute_dtype="bfloat16"), argnums=(0, 1))
    used = [
        eqn.invars[0].aval.dtype.name
        for eqn in eqns(jax.make_jaxpr(fn)(placed(make_mesh(), "data"), rows()))
        if eqn.primitive.name == "sharding_constraint"
    ]
    assert "bfloat16" in used


def test_shardings_of_a_jit_inside_are_known():
    mesh = make_mesh()
    split, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    w = jnp.ones((DIM, HIDDEN))
    assert cast_once(jax.jit(product, in_shardings=(split, whole)), w)
    assert not cast_once(jax.jit(product, in_shardings=(whole, split)), w)


def test_where_nothing_shows_it_the_user_says_so():
    w = jnp.ones((DIM, HIDDEN))
    assert cast_once(product, w, gather_once=True)


def test_the_gradient_of_a_weight_that_is_read_twice_adds_up_in_full():
    def twice(w, x):
        return jnp.sum(jnp.tanh(x @ w)) + 1e-3 * jnp.sum(jnp.sin(x @ w))

    w, x = normal(0, DIM, HIDDEN), normal(1, N, DIM)
    grads = [
        jax.grad(amp(twice, compute_dtype="bfloat16", gather_once=once))(w, x)
        for once in (False, True)
    ]
    np.testing.assert_array_equal(*grads)


@pytest.mark.parametrize("value", ("yes", 1, 0))
def test_what_is_no_bool_is_refused(value):
    with pytest.raises(TypeError, match="gather_once"):
        amp(product, gather_once=value)


# ----------------------------------------------------------------- what is compiled


@pytest.mark.sample(6)
@pytest.mark.parametrize(
    "once, is_placed",
    ((True, False), (None, True), pytest.param(None, False, marks=needs_order)),
    ids=("told", "placed", "in_shardings"),
)
@pytest.mark.parametrize("way", WAYS)
def test_nothing_more_is_sent(way, once, is_placed):
    """Also where only the `in_shardings` tell how the arguments lie."""
    axes, spec = WAYS[way]
    mesh, w = make_mesh(**axes), init()
    where = shardings(mesh, spec, w), NamedSharding(mesh, P("data"))
    args = jax.device_put((w, TOKENS), where) if is_placed else (w, TOKENS)

    def compiled(fn):
        step = jax.jit(
            jax.value_and_grad(fn),
            in_shardings=None if is_placed else where,
            out_shardings=(NamedSharding(mesh, P()), where[0]),
        )
        return step.lower(*args).compile()

    mixed = partial(amp, compute_dtype="bfloat16", gather_once=once)
    plain, ours = sent(compiled(loss)), sent(compiled(mixed(loss)))
    assert not ours - plain, (plain, ours)
    if way == "fully sharded":
        twice = sent(compiled(partial(mixed, gather_once=False)(loss)))
        assert twice["all-gather"] > plain["all-gather"] > 0


@needs_order
def test_reads_of_an_input_are_merged_for_several_devices_alone():
    w, x, mesh = normal(0, DIM, HIDDEN), normal(1, N, DIM), make_mesh()
    split = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())

    def lowered(once, where):
        mixed = amp(product, compute_dtype="bfloat16", gather_once=once)
        fn = jax.grad(mixed, argnums=(0, 1))
        return jax.jit(fn, in_shardings=where).lower(w, x).as_text()

    def casts_that_are_read(text):
        made = re.findall(r"(%\d+) = stablehlo.convert %arg0 ", text)
        return sum(len(re.findall(rf"{name}\b", text)) > 1 for name in made)

    assert lowered(None, None) == lowered(False, None)
    assert casts_that_are_read(lowered(False, split)) == 2
    assert casts_that_are_read(lowered(None, split)) == 1


def quadratic(w):
    return 0.5 * jnp.sum(jnp.square(jnp.eye(w.shape[0]) @ w))


@pytest.mark.parametrize("around", (lambda fn: fn, jax.jit), ids=("plain", "jit"))
def test_a_gradient_that_is_linear_is_transposed(around):
    """Both the cotangent and the input are linear there."""
    w = normal(0, 8, 8)
    gradient = around(jax.grad(amp(quadratic, compute_dtype="bfloat16")))
    np.testing.assert_array_equal(jax.linear_transpose(gradient, w)(w)[0], gradient(w))


LINEAR_IN_THE_INPUT = {
    "gradient times input": lambda mixed, w, along: jnp.sum(
        jax.grad(mixed("linear"))(w) * w
    ),
    "second derivative times input": lambda mixed, w, along: jnp.sum(
        jax.jvp(jax.grad(mixed("quadratic")), (w,), (along,))[1] * w
    ),
}


@pytest.mark.parametrize("around", (lambda fn: fn, jax.jit), ids=("plain", "jit"))
@pytest.mark.parametrize("name", LINEAR_IN_THE_INPUT)
def test_a_gradient_does_not_depend_on_more_than_as_written(name, around):
    """Else what is made of it would not be linear in the input for JAX."""
    w, along = normal(0, 8, 8), normal(1, 8, 8)
    written = {"linear": lambda w: jnp.sum(along @ w), "quadratic": quadratic}

    def transposed(wrap):
        fn = partial(LINEAR_IN_THE_INPUT[name], lambda fn: wrap(written[fn]))
        return jax.linear_transpose(around(lambda w: fn(w, along)), w)(1.0)[0]

    found = transposed(partial(amp, compute_dtype="bfloat16"))
    expected = transposed(lambda fn: fn)
    assert np.abs(found - expected).max() < 0.02 * np.abs(expected).max()


@pytest.mark.parametrize("around", (lambda fn: fn, jax.jit), ids=("plain", "jit"))
def test_a_tangent_that_is_linear_in_the_input_is_transposed(around):
    w, along = normal(0, 8, 8), normal(1, 8, 8)
    mixed = amp(quadratic, compute_dtype="bfloat16")

    def tangent(w):
        return jax.jvp(mixed, (w,), (along,))[1]

    (found,) = jax.linear_transpose(around(tangent), w)(1.0)
    np.testing.assert_allclose(found, along, rtol=2**-7)


def test_a_gradient_is_the_matrix_of_a_linear_solve():
    mixed = jax.grad(amp(quadratic, compute_dtype="bfloat16"))
    b = normal(0, 8, 8)

    def solved(b):
        return jnp.sum(
            jax.lax.custom_linear_solve(
                lambda v: mixed(v) + v,
                b,
                lambda product, b: b / 2,
                transpose_solve=lambda product, b: b / 2,
            )
        )

    np.testing.assert_array_equal(jax.grad(solved)(b), jnp.full_like(b, 0.5))


@needs_order
def test_reads_are_merged_once_for_each_input(monkeypatch):
    """Layers that are slices of one array, as many as there are."""
    merged = []
    monkeypatch.setattr(
        jaxamp_like._jax.Reads, "merge", lambda reads, tag: merged.append(tag)
    )
    split = NamedSharding(make_mesh(), P(None, "data")), NamedSharding(make_mesh(), P())

    def fn(w, x):
        for i in range(len(w)):
            x = x + jnp.tanh(x @ w[i])
        return jnp.sum(x)

    args = normal(0, 6, DIM, DIM), normal(1, N, DIM)
    mixed = jax.grad(amp(fn, compute_dtype="bfloat16"), argnums=(0, 1))
    jax.jit(mixed, in_shardings=split).lower(*args)
    assert 1 <= len(merged) <= 2


def rows_and_rows() -> tuple[NamedSharding, ...]:
    return (NamedSharding(make_mesh(), P("data")),) * 2


@needs_order
def test_each_read_is_looked_at_once_however_many_pullbacks(monkeypatch):
    keys = []
    key = jaxamp_like._merged_reads._key
    monkeypatch.setattr(
        jaxamp_like._merged_reads, "_key", lambda *args: keys.append(0) or key(*args)
    )
    args = normal(0, DIM, DIM), normal(1, N, DIM)

    def looked_at(count: int) -> int:
        def fn(w, x):
            loss = amp(lambda w, x: jnp.mean(jnp.tanh(x @ w)), compute_dtype="bfloat16")
            back = jax.vjp(loss, w, x)[1]
            return [back(jnp.float32(i)) for i in range(count)]

        keys.clear()
        jax.jit(fn, in_shardings=rows_and_rows()).lower(*args)
        return len(keys)

    assert 10 < looked_at(40) <= 4.2 * looked_at(10)


@needs_order
def test_merged_reads_behind_more_views_than_pythons_stack():
    def fn(w, x):
        for _ in range(1500):
            w = w.T
        return jnp.mean(jnp.tanh(x @ w) @ w)

    gradient = jax.grad(amp(fn, compute_dtype="bfloat16"))
    args = normal(0, DIM, DIM), normal(1, N, DIM)
    jax.jit(gradient, in_shardings=rows_and_rows()).lower(*args)


@needs_order
def test_a_value_of_a_gradient_that_is_inlined_is_noted_once(monkeypatch):
    noted = []
    note = jaxamp_like._jax.Reads.note

    def noting(reads, tag, value):
        note(reads, tag, value)
        noted.append(len(reads._values[tag]))

    monkeypatch.setattr(jaxamp_like._jax.Reads, "note", noting)
    gradient = jax.jit(jax.grad(amp(product, compute_dtype="bfloat16")), inline=True)
    mesh = make_mesh()
    split = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())

    def step(w, x):
        return sum(gradient(w, part) for part in jnp.split(x, 4))

    jax.jit(step, in_shardings=split).lower(normal(0, DIM, HIDDEN), normal(1, N, DIM))
    assert noted and {*noted} == {1}


def test_a_checkpoint_keeps_nothing_for_what_is_noted():
    w, x = normal(0, DIM, HIDDEN), normal(1, N, DIM)

    def kept(once):
        mixed = amp(product, compute_dtype="bfloat16", gather_once=once)

        @partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)
        def block(w, x):
            inner = jax.jit(jax.grad(mixed, argnums=1))(w, jnp.tanh(x @ w @ w.T))
            return jnp.sum(jnp.sin(x) * jnp.sign(inner))

        return [r.aval.shape for r in jax.tree.leaves(jax.vjp(block, w, x)[1])]

    assert sorted(kept(None)) == sorted(kept(False))


@pytest.mark.parametrize("transform", ("grad", "hessian", "vmap", "jvp"))
def test_merged_reads_change_no_number(transform):
    def fn(w, x):
        return jnp.mean(jnp.square(jnp.tanh(x @ w[TOKENS[0]].T) @ w[TOKENS[0]]))

    w, x = normal(0, VOCABULARY, DIM), normal(1, N, DIM)
    mesh = make_mesh()
    split = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())

    def run(once):
        mixed = amp(fn, compute_dtype="bfloat16", gather_once=once)
        made = {
            "grad": jax.grad(mixed),
            "hessian": jax.grad(lambda w, x: jnp.sum(jnp.sin(jax.grad(mixed)(w, x)))),
            "vmap": jax.vmap(jax.grad(mixed), (None, 0)),
            "jvp": lambda w, x: jax.jvp(mixed, (w, x), (jnp.cos(w), jnp.sin(x)))[1],
        }[transform]
        args = (w, x[:, None]) if transform == "vmap" else (w, x)
        return np.asarray(jax.jit(made, in_shardings=split)(*args))

    np.testing.assert_allclose(run(None), run(False), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("several", (False, True))
def test_on_several_devices_the_loss_shares_with_its_backward_pass(several):
    """Run apart, XLA puts off the first run and holds the logits all the while."""

    def loss(w, x):
        log_chances = jax.nn.log_softmax(jnp.tanh(x @ w["up"]) @ w["down"])
        return -jnp.mean(jnp.take_along_axis(log_chances, TOKENS[:, :1], axis=-1))

    w = {"up": normal(0, DIM, HIDDEN), "down": normal(1, HIDDEN, VOCABULARY)}
    if several:
        w = jax.device_put(w, NamedSharding(make_mesh(), P()))
    gradient = jax.grad(amp(loss, compute_dtype="bfloat16"))
    fenced = [
        eqn.invars[0].aval.shape[-1:]
        for eqn in eqns(jax.make_jaxpr(gradient)(w, rows()))
        if eqn.primitive.name == "amp_apart"
    ]
    assert ((VOCABULARY,) in fenced) == (not several)


# ------------------------------------------------------- each form, inside and outside


class Form(NamedTuple):
    """A way to run a loss on eight devices: `run(wrap)` gives it wrapped inside."""

    run: object
    args: tuple
    mesh: object = None


def mlp(w, x):
    hidden = jax.nn.gelu(norm(x, w["scale"]) @ w["up"] + w["bias"])
    return jnp.mean(jnp.square(hidden @ w["down"]))


def mlp_args():
    w = init(1)["blocks"][0]
    return w, normal(9, 4 * N, DIM)


def by_jit(spec, axes=None):
    def form():
        mesh, args = make_mesh(**(axes or {})), mlp_args()
        where = shardings(mesh, spec, args[0]), NamedSharding(mesh, P("data"))
        return Form(lambda wrap: wrap(mlp), jax.device_put(args, where))

    return form


def by_in_shardings():
    mesh, args = make_mesh(), mlp_args()
    where = shardings(mesh, WAYS["fully sharded"][1], args[0])
    rows = NamedSharding(mesh, P("data"))
    return Form(lambda wrap: jax.jit(wrap(mlp), in_shardings=(where, rows)), args)


def by_constraints():
    mesh, args = make_mesh(), mlp_args()
    split, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())

    def fn(w, x):
        x = jax.lax.with_sharding_constraint(x, split)
        return mlp(jax.lax.with_sharding_constraint(w, whole), x)

    return Form(lambda wrap: wrap(fn), args)


def by_types(spec):
    def form():
        mesh, args = make_mesh(AxisType.Explicit), mlp_args()

        def whole(x):
            return reshard(x, P())

        def fn(w, x):
            return mlp(jax.tree.map(whole, w), x)

        where = shardings(mesh, spec, args[0]), NamedSharding(mesh, P("data"))
        return Form(lambda wrap: wrap(fn), jax.device_put(args, where), mesh)

    return form


def by_shard_map(body, spec, check_vma=True):
    def form():
        mesh, args = make_mesh(), mlp_args()
        specs = jax.tree_util.tree_map_with_path(spec, args[0])

        def run(wrap):
            options = dict(mesh=mesh, out_specs=P(), check_vma=check_vma)
            return jax.shard_map(wrap(body), in_specs=(specs, P("data")), **options)

        return Form(run, args)

    return form


def mean_of_rows(w, x):
    return jax.lax.pmean(mlp(w, x), "data")


def mean_of_rows_gathered(w, x):
    def gather(path, x):
        axis = along_longest_of(mlp_args()[0], path)
        return jax.lax.all_gather(x, "data", axis=axis, tiled=True)

    return mean_of_rows(jax.tree_util.tree_map_with_path(gather, w), x)


def along_longest_of(w, path):
    (shape,) = {x.shape for p, x in jax.tree_util.tree_leaves_with_path(w) if p == path}
    return int(np.argmax(shape))


def columns_then_rows(w, x):
    """Every device has all rows, some columns of the one and rows of the other."""
    x = jax.lax.all_gather(x, "data", tiled=True)
    hidden = jax.nn.gelu(norm(x, w["scale"]) @ w["up"] + w["bias"])
    return jnp.mean(jnp.square(jax.lax.psum(hidden @ w["down"], "data")))


def columns_of_block(path, x):
    name = jax.tree_util.keystr(path)
    if "scale" in name:
        return P()
    return P(None, "data") if "up" in name else P("data")


FORMS = {
    "data parallel": by_jit(WAYS["data parallel"][1]),
    "fully sharded": by_jit(WAYS["fully sharded"][1]),
    "tensor parallel": by_jit(*reversed(WAYS["tensor parallel"])),
    "both": by_jit(*reversed(WAYS["both"])),
    "in_shardings": by_in_shardings,
    "constraints": by_constraints,
    "types, whole": by_types(WAYS["data parallel"][1]),
    "types, split": by_types(WAYS["fully sharded"][1]),
    "shard_map": by_shard_map(mean_of_rows, lambda path, x: P()),
    "shard_map, unchecked": by_shard_map(mean_of_rows, lambda path, x: P(), False),
    "shard_map, fully sharded": by_shard_map(
        mean_of_rows_gathered, lambda path, x: along_longest(x)
    ),
    "shard_map, tensor parallel": by_shard_map(
        columns_then_rows, columns_of_block, False
    ),
}


@pytest.mark.cross("name", dtype=2, where=2)
@pytest.mark.parametrize("where", ("inside", "outside"))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMS)
def test_as_on_one_device(name, dtype, where):
    form = FORMS[name]()
    mixed = partial(amp, compute_dtype=dtype)
    fn = form.run(mixed) if where == "inside" else mixed(form.run(lambda fn: fn))
    plain = jax.value_and_grad(form.run(lambda fn: fn))
    with contextlib.nullcontext() if form.mesh is None else in_mesh(form.mesh):
        step = jax.value_and_grad(fn)
        assert low_share(jax.make_jaxpr(step)(*form.args)) == 1
        ours = jax.jit(step).lower(*form.args).compile()
        sends = sent(jax.jit(plain).lower(*form.args).compile())
        assert not sent(ours) - sends
        out = jax.device_get(ours(*form.args))
    alone = jax.jit(jax.value_and_grad(mixed(mlp)))(*mlp_args())
    assert error(out, jax.device_get(alone)) < 4 * eps(dtype)


# ------------------------------------------- values of one mesh, read in another


def looked_up(w, v):
    ids = reshard(jnp.arange(N), P("data"))
    return w.at[ids].get(out_sharding=P("data")) @ v


def made_inside(w, v):
    return in_auto_axes(lambda w: w + 1)(w) @ v


def read_inside(w, v):
    return in_auto_axes(lambda w, v: w @ v)(w, v.T)


def there_and_back(w, v):
    h = in_auto_axes(lambda h: jnp.tanh(h) * h)(w @ v)
    return jnp.tanh(h) @ v


@pytest.mark.cross("fn", dtype=2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "fn",
    (looked_up, made_inside, read_inside, there_and_back),
    ids=lambda f: f.__name__,
)
def test_axes_may_be_automatic_for_a_part_of_the_function(fn, dtype):
    mesh, mixed = make_mesh(AxisType.Explicit), partial(amp, compute_dtype=dtype)
    rows, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    w = jax.device_put(normal(0, VOCABULARY, DIM), rows)
    v = jax.device_put(normal(1, DIM, DIM), whole)

    def loss(w, v):
        return jnp.mean(jnp.square(fn(w, v)))

    with in_mesh(mesh):
        for once in (None, False):
            out = mixed(fn, gather_once=once)
            inside = jax.value_and_grad(mixed(loss, gather_once=once), argnums=(0, 1))
            outside = mixed(jax.value_and_grad(loss, argnums=(0, 1)), gather_once=once)
            assert low_share(jax.make_jaxpr(out)(w, v)) == 1
            assert jax.eval_shape(out, w, v) == jax.eval_shape(fn, w, v)
            jax.eval_shape(outside, w, v)
            jax.eval_shape(inside, w, v)
        ours = jax.device_get(jax.jit(lambda w, v: (inside(w, v), outside(w, v)))(w, v))
        plain = jax.device_get(jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(w, v))
    assert all(error(x, plain) < 4 * eps(dtype) for x in ours)


# ------------------------------------------------------- what is sent in a shard_map


def test_the_cotangent_of_an_activation_is_summed_low():
    """Of what all devices read, in a product that is split by columns."""

    def body(w, x):
        h = norm(x, 1.0)
        return jax.lax.pmean(jnp.sum(jnp.tanh(h @ w)), "data")

    specs = dict(in_specs=(P(None, "data"), P()), out_specs=P())
    fn = jax.shard_map(body, mesh=make_mesh(), **specs)
    args = normal(0, DIM, HIDDEN), normal(1, N, DIM)
    for dtype in DTYPES:
        gradient = jax.grad(amp(fn, compute_dtype=dtype), argnums=1)
        assert sent_dtypes(gradient, *args) == {("psum_invariant", dtype)}


def sent_dtypes(fn, *args):
    kinds = "all_gather", "reduce_scatter", "psum_invariant"
    return {
        (eqn.primitive.name, eqn.invars[0].aval.dtype.name)
        for eqn in eqns(jax.make_jaxpr(fn)(*args))
        if eqn.primitive.name in kinds and eqn.invars[0].aval.ndim
    }


def gathered_and_whole(w, v, x):
    w = jax.lax.all_gather(w, "data", tiled=True)
    return jax.lax.pmean(jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ v)), "data")


UNROUNDED = default_amp_policy | {
    jax.lax.dot_general_p: use_precision_by_pass(weight_gradient=wide())
}


@pytest.mark.parametrize(
    "dtype, policy, summed_in",
    [
        ("bfloat16", None, "bfloat16"),
        ("float16", None, "float16"),
        ("bfloat16", UNROUNDED, "float32"),
        ("float16", UNROUNDED, "float32"),
        ("bfloat16", full_sums_over_devices(), "float32"),
        ("float16", full_sums_over_devices(), "float32"),
    ],
)
def test_gathers_are_low_and_gradients_are_summed_as_asked(dtype, policy, summed_in):
    fn = jax.shard_map(
        gathered_and_whole,
        mesh=make_mesh(),
        in_specs=(P("data"), P(), P("data")),
        out_specs=P(),
    )
    args = normal(0, DIM, HIDDEN), normal(1, HIDDEN, DIM), normal(2, N, DIM)
    mixed = amp(fn, compute_dtype=dtype, amp_policy=policy)
    found = sent_dtypes(jax.grad(mixed, argnums=(0, 1)), *args)
    assert found == {
        ("all_gather", dtype),
        ("reduce_scatter", summed_in),
        ("psum_invariant", summed_in),
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_types", (True, False), ids=("typed", "untyped"))
@pytest.mark.parametrize("is_full", (False, True), ids=("default", "full"))
def test_a_product_of_split_rows_is_summed_in_the_dtype_it_has(
    dtype, has_types, is_full
):
    def body(w, x):
        return jnp.tanh(jax.lax.psum(x @ w, "data"))

    specs = dict(in_specs=(P("data"), P(None, "data")), out_specs=P())
    fn = jax.shard_map(body, mesh=make_mesh(), **specs, check_vma=has_types)
    args = normal(0, HIDDEN, DIM), normal(1, N, HIDDEN)
    policy = full_sums_over_devices() if is_full else None
    mixed = amp(fn, compute_dtype=dtype, amp_policy=policy)
    is_low = not is_full and (has_types or dtype == "bfloat16")
    assert {
        eqn.invars[0].aval.dtype.name
        for eqn in eqns(jax.make_jaxpr(mixed)(*args))
        if eqn.primitive.name.startswith("psum") and eqn.invars[0].aval.ndim
    } == {dtype if is_low else "float32"}


def test_a_float16_sum_over_a_mapped_axis_does_not_overflow():
    """It is one of many terms, and on one device."""

    def total(x, w):
        return jax.lax.psum(x @ w, "rows")

    x, w = jnp.full((512, 16), 8.0), jnp.full((16, 4), 8.0)
    mapped = jax.vmap(amp(total), (0, None), axis_name="rows")
    assert (mapped(x, w) == 512 * 1024).all()


@pytest.mark.parametrize("name", ("all_gather_p", "all_to_all_p", "ppermute_p"))
def test_a_casting_callback_decides_what_is_sent(name):
    """Though no axis is bound while it is asked."""

    def body(w, x):
        y = jnp.tanh(x @ w)
        parts = (
            jax.lax.all_gather(y, "data", tiled=True),
            jax.lax.all_to_all(y, "data", 1, 1, tiled=True),
            jax.lax.ppermute(y, "data", [(i, (i + 1) % N) for i in range(N)]),
        )
        return jax.lax.pmean(sum(map(jnp.sum, parts)), "data")

    def low(dtype, author_dtypes, x, **params):
        return (x.astype(dtype),), params

    specs = dict(in_specs=(P(), P("data")), out_specs=P())
    fn = jax.shard_map(body, mesh=make_mesh(), **specs)
    args = normal(0, DIM, DIM), normal(1, N * 2, DIM)
    primitive = getattr(jax.lax, name)
    mixed = amp(
        fn, compute_dtype="bfloat16", amp_policy=default_amp_policy | {primitive: low}
    )
    assert {
        eqn.primitive.name
        for eqn in eqns(jax.make_jaxpr(mixed)(*args))
        if eqn.primitive.name in ("all_gather", "all_to_all", "ppermute")
        and eqn.invars[0].aval.dtype == jnp.bfloat16
    } == {primitive.name}
    exact = jax.jit(jax.grad(fn))(*args)
    for gradient in (jax.grad(mixed), amp(jax.grad(fn), compute_dtype="bfloat16")):
        assert error(jax.jit(gradient)(*args), exact) < 4 * eps("bfloat16")


def heads(read):
    """A loss whose heads, of one per device, all read what every device has."""

    def fn(w, x):
        shared = read(jax.lax.pcast(x, "data", to="varying"))
        made = [jnp.tanh(shared @ (k * w[0])) for k in (1.0, 2.0, 3.0)]
        return jax.lax.psum(jnp.sum(jnp.square(sum(made))), "data")

    specs = P("data"), P()
    return jax.shard_map(fn, mesh=make_mesh(), in_specs=specs, out_specs=P())


def in_a_loop(fn):
    def looped(w, x):
        step = lambda total, w: (total + fn(w, x), None)  # noqa: E731
        return jax.lax.scan(step, 0.0, jnp.stack([w, w]))[0]

    return looped


READS = {
    "alone": lambda x: x,
    "moved": lambda x: x.reshape(2, 4, DIM).transpose(1, 0, 2).reshape(8, DIM),
}
AROUND = {"plain": lambda f: f, "jit": jax.jit, "remat": jax.checkpoint}
AROUND |= {"scan": in_a_loop}


@pytest.mark.skipif(not hasattr(jax.lax, "pcast"), reason="marks are made by JAX")
@pytest.mark.cross("around", how=5, read=2)
@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("how", ("bfloat16", "float16", "lean", "full", "autocast"))
def test_cotangents_of_all_readers_are_summed_over_devices_once(how, around, read):
    options = {
        "float16": {},
        "lean": {"compute_dtype": "bfloat16", "lean": True},
        "full": {"amp_policy": full_sums_over_devices()},
        "autocast": {"compute_dtype": "bfloat16", "amp_policy": pytorch_autocast()},
    }.get(how, {"compute_dtype": how})
    fn, args = heads(READS[read]), (normal(0, N, DIM, DIM), normal(1, 8, DIM))
    gradient = jax.grad(AROUND[around](amp(fn, **options)), 1)
    sums = [
        eqn.invars[0].aval.dtype.name
        for eqn in eqns(jax.make_jaxpr(gradient)(*args))
        if eqn.primitive.name == "psum_invariant" and eqn.invars[0].aval.ndim
    ]
    low = "float16" if how == "float16" else "bfloat16"
    # What autocast moves it has not rounded.
    is_full = how == "full" or (how == "autocast" and read == "moved")
    assert sums == ["float32" if is_full else low]
    want = jax.jit(jax.grad(AROUND[around](fn), 1))(*args)
    assert error(jax.jit(gradient)(*args), want) < 8 * eps(low)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "move", (jnp.transpose, jnp.ravel, lambda x: jnp.where(1, x, 0))
)
def test_shares_that_no_product_makes_are_not_rounded_for_a_reader(move, dtype):
    def fn(x, w):
        total = jax.lax.psum(move(x[0] * 1.5), "data")
        return total.reshape(-1, DIM) @ w

    mapped = jax.shard_map(
        fn, mesh=make_mesh(), in_specs=(P("data"), P()), out_specs=P()
    )
    # All but a small part of each share is taken away by another.
    x = normal(0, N, DIM, DIM) + 1e5 * jnp.array([1.0, -1.0] * 4)[:, None, None]
    args = x, normal(1, DIM, DIM)
    mixed = amp(mapped, compute_dtype=dtype)
    assert error(jax.jit(mixed)(*args), jax.jit(mapped)(*args)) < 8 * eps(dtype)


RULES = {"default": {}, "int8": {"amp_policy": quantised(int8(where=None))}}
RULES |= {"float8": {"amp_policy": quantised(float8(where=None))}}


@pytest.mark.skipif(not hasattr(jax, "set_mesh"), reason="no types of pending sums")
@pytest.mark.parametrize("rule", RULES)
def test_types_that_tell_of_sums_to_be_made(rule):
    mesh = make_mesh(AxisType.Explicit, a=2, b=4)

    def pending(x, w):
        y = jnp.dot(x, w, out_sharding=P("a", None, unreduced={"b"}))
        return jnp.mean(jax.sharding.reshard(y, P("a", None)) ** 2)

    def marked(x, w):
        return jnp.mean(jnp.dot(x, w, out_sharding=P("a", None)) ** 2)

    with jax.set_mesh(mesh):
        x, w = normal(0, 16, DIM), normal(1, DIM, DIM)
        split = jax.device_put((x, w), (P("a", "b"), P("b", None)))
        told = pytest.warns(AmpWarning, match="still to be summed over devices")
        with told if rule != "default" else contextlib.nullcontext():
            mixed = jax.jit(jax.grad(amp(pending, **RULES[rule]), (0, 1)))(*split)
        plain = jax.jit(jax.grad(pending, (0, 1)))(*split)
        assert error(mixed, plain) < 8 * eps("float16")
        spec = P(None, None, reduced={"a"})
        w = jax.jit(lambda w: jax.sharding.reshard(w, spec))(w)
        x = jax.device_put(x, P("a", None))
        with told if rule != "default" else contextlib.nullcontext():
            mixed = jax.jit(amp(marked, **RULES[rule]))(x, w)
        assert error(mixed, jax.jit(marked)(x, w)) < 8 * eps("float16")


def test_full_sums_keep_what_else_a_policy_says():
    mine = default_amp_policy | {"head": "float32", jax.lax.psum_p: "bfloat16"}
    full = full_sums_over_devices(mine)
    assert full["head"] == "float32" and full[jax.lax.psum_p] == "bfloat16"
    assert full_sums_over_devices(full) == full
    for other in ({"head": "float32"}, pytorch_autocast()):
        with pytest.raises(TypeError, match="must be a dict of rules that extends"):
            full_sums_over_devices(other)
    policy = Policy("float16", rules=full)
    assert Policy.from_dict(policy.to_dict()) == policy
    assert policy.to_dict()["rules"][0] == {"extends": "full_sums_over_devices()"}


@pytest.mark.parametrize(
    "rule, dtype", [(None, "float32"), (use_compute_precision, "bfloat16")]
)
def test_a_stream_is_sent_as_it_adds_up_or_as_a_rule_says(rule, dtype):
    def body(w, x):
        def tick(x, _):
            y = jnp.tanh(norm(x, 1.0) @ w[0])
            with jax.named_scope("residual"):
                x = x + y
            on = [(i, (i + 1) % N) for i in range(N)]
            return jax.lax.ppermute(x, "data", on), None

        x = jax.lax.scan(tick, x, length=3)[0]
        return jax.lax.pmean(jnp.sum(x), "data")

    fn = jax.shard_map(
        body, mesh=make_mesh(), in_specs=(P("data"), P("data")), out_specs=P()
    )
    policy = default_amp_policy | ({} if rule is None else {"residual": rule})
    mixed = amp(fn, compute_dtype="bfloat16", amp_policy=policy)
    args = normal(0, N, DIM, DIM), rows()
    sends = [
        eqn.invars[0].aval.dtype.name
        for eqn in eqns(jax.make_jaxpr(jax.grad(mixed))(*args))
        if eqn.primitive.name == "ppermute"
    ]
    assert len(sends) == 2 and set(sends) == {dtype}


def test_a_shard_map_keeps_what_one_device_keeps():
    """Marks that a value varies are in the midst of a norm, and send nothing."""

    def stream(w, x):
        for p in w:
            hidden = (jax.nn.standardize(x) * p["scale"]) @ p["up"]
            x = x + jax.nn.gelu(hidden) @ p["down"]
        return jnp.mean(jnp.square(x))

    def per_device(w, x):
        return jax.lax.pmean(stream(w, x), "data")

    specs = P(), P("data")
    mapped = jax.shard_map(per_device, mesh=make_mesh(), in_specs=specs, out_specs=P())
    w, x = init()["blocks"], normal(0, N * 16, DIM)

    def kept(fn):
        found = saved(amp(fn, compute_dtype="bfloat16"), w, x, argnums=(0,))
        return Counter(aval.str_short() for aval in found if aval.size >= x.size)

    assert kept(mapped) == kept(stream)


def test_what_is_converted_is_stored_low_on_a_mesh_too():
    w, x = jax.device_put(mlp_args(), NamedSharding(make_mesh(), P()))

    def project(w, x):
        return norm(x, w["scale"]) @ w["up"]

    converted = convert(project, w, x, compute_dtype="bfloat16")
    assert converted.params["up"].dtype == jnp.bfloat16
