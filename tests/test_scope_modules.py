"""The submodules of a model name their scopes, and the model stays what it is."""

import copy
import functools
import io
import pickle

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax import lax

from benchmarks.measure import walk
from jaxamp_like import PolicyMap, amp, default_amp_policy, scope_modules

pytestmark = pytest.mark.rest

WIDTH = 4
linear = functools.partial(eqx.nn.Linear, WIDTH, WIDTH)


def stacks(fn, *args):
    """The name stacks of the matrix products, layers' class names left out."""
    eqns = [eqn for eqn, _ in walk(jax.make_jaxpr(fn)(*args))]
    frames = [
        [frame.name for frame in eqn.source_info.name_stack.stack]
        for eqn in eqns
        if eqn.primitive is lax.dot_general_p
    ]
    skipped = ("vmap", "eqx.nn.")
    return ["/".join(n for n in names if not n.startswith(skipped)) for names in frames]


class Gate(eqx.Module):
    inner: eqx.nn.Linear
    scale: float = eqx.field(static=True)

    def __call__(self, x):
        return self.gate(x) * self.scale

    def gate(self, x):
        return jnp.tanh(self.inner(x))

    @property
    def width(self):
        return self.inner.out_features

    @staticmethod
    def double(x):
        return 2 * x


class Wide(Gate):
    def __call__(self, x):
        return super().__call__(x) + 1


class Model(eqx.Module):
    gates: list[Gate]
    heads: dict[str, eqx.nn.Linear]
    pair: tuple
    ensemble: eqx.Module
    jitted: eqx.Module
    name: str = eqx.field(static=True)

    def __init__(self, key):
        keys = jr.split(key, 8)
        self.gates = [Gate(linear(key=keys[0]), 2.0), Wide(linear(key=keys[1]), 2.0)]
        self.heads = {"out": linear(key=keys[2])}
        self.pair = (None, (linear(key=keys[3]),))
        self.ensemble = eqx.filter_vmap(linear(key=keys[4]))
        self.jitted = eqx.filter_jit(linear(key=keys[5]))
        self.name = "model"

    def __call__(self, x):
        for gate in self.gates:
            x = gate(x)
        x = self.gates[0].gate(x)
        x = self.gates[1].inner(x)  # a submodule's submodule
        x = self.heads["out"](x)
        x = self.pair[1][0](x)
        x = self.ensemble(x[None])[0]
        return self.jitted(x)


@pytest.fixture(scope="module")
def model():
    return Model(jr.key(0))


x = jnp.ones(WIDTH)


def test_scopes_are_paths(model):
    assert set(stacks(model, x)) == {""}
    assert stacks(scope_modules(model), x)[:7] == [
        "gates/0/inner",
        "gates/1/inner",
        "gates/0/inner",  # by another method than `__call__`
        "gates/1/inner",  # and without one of its parent's
        "heads/out",
        "pair/1/0",
        "ensemble",
    ]


@pytest.mark.parametrize(
    "key, expected",
    (
        ("gates", 4),
        ("gates/0", 2),
        ("gates/1/inner", 2),
        ("inner", 4),
        ("heads/out", 1),
        ("jitted", 1),
        (r"(gates/\d|pair/1)/.*", 5),
    ),
)
def test_policies_find_them(model, key, expected):
    policies = PolicyMap("mixed_bfloat16", {key: "float32"})
    for fn in (scope_modules(model), lambda x: scope_modules(model)(x)):
        low = amp(fn, amp_policy=policies, strict=True)
        eqns = [e for e, _ in walk(jax.make_jaxpr(low)(x))]
        dots = [e for e in eqns if e.primitive is lax.dot_general_p]
        read = [str(e.invars[0].aval.dtype) for e in dots]
        assert read.count("float32") == expected
        assert len(read) == 8


def test_class_names_of_layers_may_be_left_out():
    attention = eqx.nn.MultiheadAttention(2, WIDTH, key=jr.key(0))
    model = scope_modules({"block": {"attention": attention}})
    h = jnp.ones((3, WIDTH))
    for key in (
        "attention/query_proj",
        "block/attention/query_proj",
        "eqx.nn.MultiheadAttention/query_proj",
        "query_proj/eqx.nn.Linear",
        "block/attention/eqx.nn.MultiheadAttention/query_proj/eqx.nn.Linear",
    ):
        for policy in (
            PolicyMap("mixed_bfloat16", {key: "float32"}),
            default_amp_policy | {key: "float32"},
        ):
            low = amp(
                lambda h: model["block"]["attention"](h, h, h),
                amp_policy=policy,
                strict=True,
            )
            eqns = [e for e, _ in walk(jax.make_jaxpr(low)(h))]
            dots = [e for e in eqns if e.primitive is lax.dot_general_p]
            read = [str(e.invars[0].aval.dtype) for e in dots]
            assert read.count("float32") == 1 and read[0] == "float32"


def test_it_stays_what_it_is(model):
    scoped = scope_modules(model)
    assert type(scoped) is Model
    gate = scoped.gates[1]
    assert isinstance(gate, Wide) and type(gate).__name__ == "Wide"
    assert (gate.width, gate.scale, gate.double(3)) == (WIDTH, 2.0, 6)
    assert gate.inner.weight is model.gates[1].inner.weight
    assert repr(scoped) == repr(model)
    paths = [
        [path for path, _ in jax.tree_util.tree_flatten_with_path(m)[0]]
        for m in (scoped, model)
    ]
    assert paths[0] == paths[1]
    assert type(model.gates[0]) is Gate  # untouched
    np.testing.assert_array_equal(scoped(x), model(x))
    np.testing.assert_array_equal(eqx.filter_jit(scoped)(x), eqx.filter_jit(model)(x))


def test_twice_is_once(model):
    once = scope_modules(model)
    assert jax.tree.structure(scope_modules(once)) == jax.tree.structure(once)
    part = scope_modules(once.gates)  # another model, with paths of its own
    assert stacks(part[1], x) == ["1/inner"]


def test_training(model):
    """Gradients and optimizer states have the structure of the scoped model."""
    scoped = scope_modules(model)
    policies = PolicyMap("mixed_bfloat16", {"heads": "float32"})
    loss = amp(lambda model, x: jnp.sum(model(x) ** 2), amp_policy=policies)
    tx = optax.adam(1e-3)
    params = eqx.filter(scoped, eqx.is_inexact_array)
    state = tx.init(params)

    @eqx.filter_jit
    def step(model, state):
        grads = eqx.filter_grad(loss)(model, x)
        updates, state = tx.update(grads, state)
        return eqx.apply_updates(model, updates), state, grads

    new, state, grads = step(scoped, state)
    assert jax.tree.structure(new) == jax.tree.structure(scoped)
    assert jax.tree.structure(grads) == jax.tree.structure(params)
    assert jax.tree.structure(state) == jax.tree.structure(tx.init(params))
    inside = eqx.filter_grad(
        amp(lambda m, x: jnp.sum(scope_modules(m)(x) ** 2), amp_policy=policies)
    )(model, x)
    plain = eqx.filter(model, eqx.is_inexact_array)
    assert jax.tree.structure(inside) == jax.tree.structure(plain)
    for one, other in zip(jax.tree.leaves(inside), jax.tree.leaves(grads), strict=True):
        np.testing.assert_allclose(one, other, rtol=0.1, atol=0.1)


def test_saved_leaves_and_surgery(model):
    scoped = scope_modules(model)
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, scoped)
    file.seek(0)
    assert eqx.tree_equal(eqx.tree_deserialise_leaves(file, model), model)
    zeros = jnp.zeros((WIDTH, WIDTH))
    edited = eqx.tree_at(lambda m: m.heads["out"].weight, scoped, zeros)
    assert "heads/out" in stacks(edited, x)
    for again in (
        copy.deepcopy(scoped.gates),
        pickle.loads(pickle.dumps(scoped.gates)),
    ):
        assert jax.tree.structure(again) == jax.tree.structure(scoped.gates)
        assert stacks(again[1], x) == ["gates/1/inner"]


def test_layers_that_a_scan_runs_over():
    class Scanned(eqx.Module):
        layers: Gate

        def __call__(self, x):
            arrays, static = eqx.partition(self.layers, eqx.is_array)

            def body(x, arrays):
                return eqx.combine(arrays, static)(x), None

            return lax.scan(body, x, arrays)[0]

    layers = eqx.filter_vmap(lambda key: Gate(linear(key=key), 1.0))(
        jr.split(jr.key(0))
    )
    model = Scanned(layers)
    assert stacks(scope_modules(model), x) == ["layers/inner"]
    np.testing.assert_array_equal(scope_modules(model)(x), model(x))
    low = amp(
        scope_modules(model), amp_policy=PolicyMap("c=bf16", {"layers": "float32"})
    )
    np.testing.assert_array_equal(low(x), model(x))


def test_layers_with_state_and_shared_weights():
    class Language(eqx.Module):
        shared: eqx.nn.Shared
        body: eqx.nn.Sequential

        def __init__(self, key):
            embedding = eqx.nn.Embedding(8, WIDTH, key=key)
            head = eqx.nn.Linear(WIDTH, 8, use_bias=False, key=key)
            self.shared = eqx.nn.Shared(
                (embedding, head),
                lambda pair: pair[1].weight,
                lambda pair: pair[0].weight,
            )
            norm = eqx.nn.BatchNorm(WIDTH, "batch", mode="batch")
            self.body = eqx.nn.Sequential(
                [linear(key=key), norm, eqx.nn.Lambda(jnp.tanh)]
            )

        def __call__(self, i, state):
            embedding, head = self.shared()
            h, state = self.body(embedding(i), state)
            return head(h), state

    model, state = eqx.nn.make_with_state(Language)(jr.key(0))

    def apply(model, i):
        batched = jax.vmap(
            model, in_axes=(0, None), out_axes=(0, None), axis_name="batch"
        )
        return batched(i, state)

    i = jnp.arange(3)
    scoped = scope_modules(model)
    assert stacks(lambda i: apply(scoped, i)[0], i) == [
        "body/layers/0",
        "shared/pytree/1",
    ]
    for one, other in zip(
        jax.tree.leaves(apply(scoped, i)), jax.tree.leaves(apply(model, i)), strict=True
    ):
        np.testing.assert_array_equal(one, other)


class Block(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)

    def __call__(self, x):
        return self.norm(self.project(x))

    def project(self, x):
        return self.first(x)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.block = Block(rngs)
        self.head = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return self.head(self.block.project(self.block(x)))


def test_nnx_modules_are_scoped_in_place():
    model = Net(nnx.Rngs(0))
    batch = jnp.ones((2, WIDTH))
    before = Net(nnx.Rngs(0))(batch)
    assert scope_modules(scope_modules(model)) is model
    assert type(model) is Net and isinstance(model.block, Block)
    graph, state = nnx.split(model)

    def apply(state):
        return nnx.merge(graph, state)(batch)

    assert stacks(apply, state) == ["block/first", "block/first", "head"]
    np.testing.assert_array_equal(nnx.jit(lambda m, x: m(x))(model, batch), before)


def test_nnx_modules_within_amp_keep_their_class_and_their_new_state():
    model = Net(nnx.Rngs(0))
    batch = jr.normal(jr.key(0), (2, WIDTH))
    plain = Net(nnx.Rngs(0))
    plain(batch)

    def loss(model, batch):
        return jnp.sum(scope_modules(model)(batch) ** 2)

    policies = PolicyMap("mixed_bfloat16", {"head": "float32"})
    grads = nnx.grad(amp(loss, amp_policy=policies, strict=True))(model, batch)
    assert type(model.block) is Block
    assert {leaf.dtype.name for leaf in jax.tree.leaves(grads)} == {"float32"}
    for one, other in zip(
        jax.tree.leaves(nnx.state(model, nnx.BatchStat)),
        jax.tree.leaves(nnx.state(plain, nnx.BatchStat)),
        strict=True,
    ):
        np.testing.assert_allclose(one, other, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("model", (3, {"w": x}, jnp.tanh, linen.Dense(3), None))
def test_what_is_no_model(model):
    with pytest.raises(TypeError, match=r"takes an Equinox module, .* but got "):
        scope_modules(model)


def test_scoping_within_a_transform_of_nnx_says_where_to_scope():
    model, x = nnx.Sequential(nnx.Linear(2, 2, rngs=nnx.Rngs(0))), jnp.ones((1, 2))

    def loss(model, x):
        return jnp.mean(model(x) ** 2)

    def scoped(model, x):
        return loss(scope_modules(model), x)

    def step(model, x):
        return nnx.value_and_grad(loss)(scope_modules(model), x)

    low = functools.partial(amp, compute_dtype="bfloat16")
    with pytest.raises(ValueError) as caught:
        low(nnx.value_and_grad(scoped))(model, x)
    assert any("around the transform" in note for note in caught.value.__notes__)
    value, _ = low(step)(model, x)
    assert value > 0
