"""Eight devices: what `amp` adds to a step sends nothing that the step did not send.

Each way to split a small model: the collectives of the compiled step beside those of
the float32 step, its results beside those of one device."""

import re
from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from jaxamp_like import amp
from jaxamp_like._jax import raw, subjaxprs

N, VOCABULARY, DIM, HIDDEN = 8, 64, 32, 128
DTYPES = ("bfloat16", "float16")


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


TOKENS = np.arange(N * 4, dtype=np.int32).reshape(N, 4) * 7 % VOCABULARY


def make_mesh(kind=AxisType.Auto, **axes):
    axes = axes or {"data": N}
    kinds = (kind,) * len(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=kinds)


def in_mesh(mesh):
    # JAX < 0.7 has it in `jax.sharding` only.
    return (
        jax.set_mesh(mesh) if hasattr(jax, "set_mesh") else jax.sharding.use_mesh(mesh)
    )


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
    """How many arrays each kind of collective is given, of a compiled step."""
    found = Counter()
    for line in compiled.as_text().splitlines():
        match = re.search(rf"= (.*?) ({KINDS})(?:-start)?\(", line)
        if match:
            found[match[2]] += match[1].count("[")
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


@pytest.mark.parametrize("once", (True, None), ids=("told", "placed"))
@pytest.mark.parametrize("way", WAYS)
def test_nothing_more_is_sent(way, once):
    """`placed`: nothing but where the arguments lie tells that they are sharded."""
    axes, spec = WAYS[way]
    mesh, w = make_mesh(**axes), init()
    where = shardings(mesh, spec, w), NamedSharding(mesh, P("data"))
    args = (w, TOKENS) if once else jax.device_put((w, TOKENS), where)

    def compiled(fn):
        step = jax.jit(
            jax.value_and_grad(fn),
            in_shardings=where if once else None,
            out_shardings=(NamedSharding(mesh, P()), where[0]),
        )
        return step.lower(*args).compile()

    mixed = partial(amp, compute_dtype="bfloat16", gather_once=once)
    plain, ours = sent(compiled(loss)), sent(compiled(mixed(loss)))
    assert plain
    assert not ours - plain, (plain, ours)
