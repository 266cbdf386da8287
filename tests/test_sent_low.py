"""What goes from device to device in a loop: low where a rule says so, and compiled."""

import jax
import jax.numpy as jnp
import jax.random as jr
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from benchmarks import collectives, roofline
from jaxamp_like import amp, default_amp_policy
from jaxamp_like._hlo import text as hlo
from jaxamp_like._jax import raw, subjaxprs
from jaxamp_like.rules import use_compute_precision
from tests.programs import eps, error

N, DIM = 8, 16


def on(x):
    return lax.ppermute(x, "data", [(i, (i + 1) % N) for i in range(N)])


# The permute at either end of the loop's body, on a stream and on what is not added up.
TICKS = {
    "stream, sent last": lambda s, w: on(s + jnp.tanh(s @ w)),
    "stream, sent first": lambda s, w: (lambda s: s + jnp.tanh(s @ w))(on(s)),
    "sum of what is sent": lambda s, w: s + on(jnp.tanh(s @ w)),
    "only read low": lambda s, w: jnp.tanh(on(s) @ w),
}
SENT_LOW = default_amp_policy | {lax.ppermute_p: use_compute_precision}


def in_turn(tick, mesh):
    """A loss of weights and rows: what `tick` makes goes around the devices."""

    def body(w, x):
        s = lax.scan(lambda s, _: (tick(s, w[0]), None), x, length=4)[0]
        return lax.pmean(jnp.mean(jnp.square(s)), "data")

    specs = P("data"), P("data")
    return jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P())


def mesh():
    return jax.make_mesh((N,), ("data",), axis_types=(AxisType.Auto,))


def shapes():
    return (N, DIM, DIM), (N * 4, DIM)


def drawn():
    w, x = (jr.normal(jr.key(len(s)), s) for s in shapes())
    return w / DIM**0.5, x


def bodies(jaxpr):
    """A program and all that it holds, each as a list of equations."""
    yield raw(jaxpr).eqns
    for eqn in raw(jaxpr).eqns:
        for inner in subjaxprs(eqn.params):
            yield from bodies(inner)


def sends(fn, *args):
    """Of each `ppermute`, its dtype and the primitives that make and read it."""
    for eqns in bodies(jax.make_jaxpr(fn)(*args)):
        for eqn in eqns:
            if eqn.primitive.name == "ppermute":
                (x,), (y,) = eqn.invars, eqn.outvars
                makers = [e.primitive.name for e in eqns if x in e.outvars]
                readers = [e.primitive.name for e in eqns if y in e.invars]
                yield x.aval.dtype.name, makers, readers


@pytest.mark.sample(2)
@pytest.mark.cross("tick", dtype=2)
@pytest.mark.parametrize("tick", TICKS)
@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
def test_by_a_rule_all_is_sent_low_and_adds_up_in_full(tick, dtype):
    plain = in_turn(TICKS[tick], mesh())
    low = amp(plain, compute_dtype=dtype, amp_policy=SENT_LOW)
    found = list(sends(jax.grad(low), *drawn()))
    assert len(found) == 2 and {sent for sent, _, _ in found} == {dtype}
    both = (jax.jit(jax.value_and_grad(fn))(*drawn()) for fn in (low, plain))
    assert error(*both) < 4 * eps(dtype)


FENCE = ["optimization_barrier"]


def test_what_is_sent_low_is_fenced_both_ways():
    low = amp(in_turn(TICKS["stream, sent last"], mesh()), amp_policy=SENT_LOW)
    fences = [
        (makers, readers) for _, makers, readers in sends(jax.grad(low), *drawn())
    ]
    assert fences == [(FENCE, FENCE)] * 2


def test_what_its_author_sends_is_left_alone():
    low = amp(in_turn(TICKS["stream, sent last"], mesh()))
    for dtype, makers, readers in sends(jax.grad(low), *drawn()):
        assert dtype == "float32"
        assert FENCE not in (makers, readers)


@pytest.mark.skipif(
    not roofline.has_plugin(), reason="XLA's compiler for NVIDIA GPUs is not installed"
)
@pytest.mark.parametrize(
    "policy", (default_amp_policy, SENT_LOW), ids=("default", "low")
)
@pytest.mark.parametrize("tick", ("stream, sent first", "only read low"))
def test_it_compiles_for_described_gpus(tick, policy):
    """XLA's pass collective-permute-motion has to leave such permutes in place."""
    described = collectives.described_devices(N)
    devices = collectives.mesh_of(lambda n: {"data": n}, described)
    where = NamedSharding(devices, P("data"))
    args = [jax.ShapeDtypeStruct(s, jnp.float32, sharding=where) for s in shapes()]
    low = amp(
        in_turn(TICKS[tick], devices), amp_policy=policy, compute_dtype="bfloat16"
    )
    text = jax.jit(jax.grad(low)).lower(*args).compile().as_text() or ""
    found = collectives.collectives(hlo.parse(text), N)
    sent = {one.dtype for one in found if one.kind == "collective-permute"}
    is_low = policy is SENT_LOW or tick == "only read low"
    assert sent == {"bf16" if is_low else "f32"}
