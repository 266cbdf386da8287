"""The columns of the table of primitives, beside what JAX itself does.

A primitive that takes nothing but arrays needs no program here: it is tried with one,
two and three of them. So a new one comes with its test, once it is in the table."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Literal, Primitive
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxamp_like import amp
from jaxamp_like._jax import subjaxprs
from jaxamp_like._primitives import TABLE, Kind

from .hi_primitives import flags

X = jnp.asarray([[0.25, 0.5, 0.75], [0.125, 0.375, 0.625]])
Y = X + 0.03125
SAME = "SAME"
EVERYWHERE = NamedSharding(Mesh(jax.devices()[:1], "i"), PartitionSpec())
CHOICE = np.asarray([[True, False, True]] * 2)

PROGRAMS: dict[str, Callable[..., Any]] = {
    "dot_general": lambda x, y: x @ y.T,
    "conv_general_dilated": lambda x, y: lax.conv(x[None], y.T[..., None], (1,), SAME),
    "convert_element_type": lambda x: x.astype(jnp.bfloat16),
    "reshape": lambda x: x.reshape(6),
    "squeeze": lambda x: lax.squeeze(x[None], (0,)),
    "transpose": lambda x: x.T,
    "rev": lambda x: lax.rev(x, (0,)),
    "slice": lambda x: lax.slice(x, (0, 1), (2, 3)),
    "dynamic_slice": lambda x: lax.dynamic_slice(x, (0, 1), (2, 2)),
    "dynamic_update_slice": lambda x, y: lax.dynamic_update_slice(x, y[:1], (1, 0)),
    "split": lambda x: lax.split(x, (1, 2), 1),
    "broadcast_in_dim": lambda x: lax.broadcast_in_dim(x, (4, 2, 3), (1, 2)),
    "gather": lambda x: x[jnp.asarray([1, 0, 1])],
    "scatter": lambda x, y: x.at[jnp.asarray([1])].set(y[:1]),
    "select_n": lambda x, y: lax.select_n(CHOICE, x, y),
    "concatenate": lambda x, y: jnp.concatenate([x, y]),
    "pad": lambda x: lax.pad(x, np.float32(0.25), ((0, 1, 0), (0, 0, 0))),
    "copy": lambda x: jnp.copy(x),
    "name": lambda x: jax.ad_checkpoint.checkpoint_name(x, "x"),
    "optimization_barrier": lambda x: lax.optimization_barrier(x),
    "device_put": lambda x: jax.device_put(x, jax.devices()[0]),
    "reduce_sum": lambda x: jnp.sum(x, 0),
    "reduce_prod": lambda x: lax.reduce_prod(x, (0,)),
    "reduce_max": lambda x: jnp.max(x, 0),
    "reduce_min": lambda x: jnp.min(x, 0),
    "cumsum": lambda x: jnp.cumsum(x, 0),
    "cumprod": lambda x: lax.cumprod(x, 0),
    "cumlogsumexp": lambda x: lax.cumlogsumexp(x, 0),
    "cummax": lambda x: lax.cummax(x, 0),
    "cummin": lambda x: lax.cummin(x, 0),
    "reduce_window_sum": lambda x: lax.reduce_window(
        x, 0.0, lax.add, (1, 2), (1, 1), "VALID"
    ),
    "reduce_window_max": lambda x: lax.reduce_window(
        x, -jnp.inf, lax.max, (1, 2), (1, 1), "VALID"
    ),
    "reduce_window_min": lambda x: lax.reduce_window(
        x, jnp.inf, lax.min, (1, 2), (1, 1), "VALID"
    ),
    "approx_top_k": lambda x: lax.approx_max_k(x, 2),
    "sharding_constraint": lambda x: lax.with_sharding_constraint(x, EVERYWHERE),
    "polynomial": lambda x: lax.polynomial(x, [1.0, 2.0, 3.0]),
    "integer_pow": lambda x: x**3,
    "round": lambda x: lax.round(x),
    "argmax": lambda x: jnp.argmax(x, 0),
    "argmin": lambda x: jnp.argmin(x, 0),
    "top_k": lambda x: lax.top_k(x, 2),
    "sort": lambda x: jnp.sort(x, 0),
    "pow": lambda x: lax.pow(x, np.float32(1.5)),
    "scatter-add": lambda x, y: x.at[jnp.asarray([1])].add(y[:1]),
    "scatter-mul": lambda x, y: x.at[jnp.asarray([1])].mul(y[:1]),
    "iota": lambda x: lax.iota(jnp.float32, 3) + x,
    "and": lambda x: (x > 0) & (x < 1),
    "or": lambda x: (x > 0) | (x < 1),
    "xor": lambda x: (x > 0) ^ (x < 1),
    "not": lambda x: ~(x > 0),
}  # fmt: skip


def primitives() -> dict[str, Primitive]:
    """Those that JAX exports and that somebody may give a rule."""
    exported = vars(jax.extend.core.primitives).values()
    found = {p.name: p for p in exported if isinstance(p, Primitive)}
    return {
        name: found[name]
        for name, row in TABLE.items()
        if name in found and row.kind not in (Kind.FIXED, Kind.SOLVER)
    }


def traced(fn: Callable[..., Any], number: int) -> Any:
    return jax.make_jaxpr(fn)(*[X, Y, X * Y][:number])


def program(name: str) -> tuple[Callable[..., Any], int] | None:
    """A program of one primitive, and the number of its operands."""
    if name in PROGRAMS:
        fn = PROGRAMS[name]
        return fn, fn.__code__.co_argcount
    fn = getattr(lax, name, primitives()[name].bind)
    for number in (1, 2, 3):
        try:
            traced(fn, number)
        except Exception:  # whatever JAX says of operands that it does not take
            continue
        return fn, number
    return None


KNOWN = {name: found for name in primitives() if (found := program(name))}

# What names axes of devices, and what JAX makes for itself: for the second derivative
# of a pooling, and for tangents that are zero.
WITHOUT = {
    *"psum pmax pmin ppermute all_gather all_to_all ragged_all_to_all".split(),
    *"select_and_gather_add zeros_like".split(),
}

each = pytest.mark.parametrize("name", KNOWN)


def those(column: str) -> Any:
    rows = [name for name in KNOWN if getattr(TABLE[name], column)]
    return pytest.mark.parametrize("name", rows)


def test_most_primitives_have_a_program():
    assert len(KNOWN) > 80
    lacking = primitives().keys() - KNOWN.keys() - WITHOUT
    assert not lacking, "give these a program"


@each
def test_a_program_is_of_its_primitive(name):
    fn, number = KNOWN[name]
    with flags():
        eqns = traced(fn, number).jaxpr.eqns
    inner = [e for eqn in eqns for sub in subjaxprs(eqn.params) for e in sub.eqns]
    assert name in {e.primitive.name for e in [*eqns, *inner]}


def numbers(values: Any) -> set[float]:
    return {float(n) for x in jax.tree.leaves(values) for n in np.ravel(x)}


@those("moves")
def test_what_moves_makes_no_numbers(name):
    fn, number = KNOWN[name]
    operands = [X, Y][:number]
    assert numbers(fn(*operands)) <= numbers(operands)
    halves = [x.astype(jnp.bfloat16) for x in operands]
    if name not in ("pad", "select_n"):  # which hold an array of a dtype of its own
        assert all(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(fn(*halves)))


@those("whole")
def test_what_shows_all_loses_no_number(name):
    fn, number = KNOWN[name]
    assert number == 1
    assert numbers(fn(X)) == numbers(X)


@those("view")
def test_a_view_has_one_operand(name):
    assert KNOWN[name][1] == 1


@those("identity")
def test_an_identity_hands_on(name):
    fn, _ = KNOWN[name]
    np.testing.assert_array_equal(jax.tree.leaves(fn(X))[0], X)


def reads_of_derivative(name: str) -> tuple[bool, bool]:
    """Whether the tangent is made of the operands, and of the primitive's result."""
    fn, number = KNOWN[name]
    operands = [X, Y, X * Y][:number]

    def both(*args):
        return jax.jvp(fn, args[:number], args[number:])

    jaxpr = jax.make_jaxpr(both)(*operands, *operands).jaxpr
    half = len(jaxpr.outvars) // 2
    results = {v for v in jaxpr.outvars[:half] if not isinstance(v, Literal)}
    used = {v for v in jaxpr.outvars[half:] if not isinstance(v, Literal)}
    for eqn in reversed(jaxpr.eqns):
        # Where a result is read, what the result is made of does not count.
        if used & {*eqn.outvars} - results:
            used |= {v for v in eqn.invars if not isinstance(v, Literal)}
    return bool(used & {*jaxpr.invars[:number]}), bool(used & results)


@those("linear")
def test_the_derivative_of_a_linear_primitive_reads_nothing(name):
    assert reads_of_derivative(name) == (False, False)


@those("keeps_inputs")
def test_a_derivative_reads_the_operands_alone(name):
    reads_operands, reads_result = reads_of_derivative(name)
    assert reads_operands and not reads_result


@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
@each
def test_types_are_those_of_the_author(name, dtype):
    fn, number = KNOWN[name]
    operands = [X, Y, X * Y][:number]
    mixed = jax.eval_shape(amp(fn, compute_dtype=dtype), *operands)
    assert mixed == jax.eval_shape(fn, *operands)
