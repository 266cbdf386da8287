"""Programs that equations hold, run with pairs: loops, branches, manual sharding.

Each handler here takes a function that runs such a program, an equation, its place and
its operands. It returns the results of the equation and the tables of its bodies. A
loop carries the tables of its body from one iteration to the next.

The handlers of `_structural` can't be used here: they bind what a plan says, while
every body here also returns tables."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from ..._jax import (
    Eqn,
    Jaxpr,
    raw,
    run_jaxpr,
    scan_operands,
    shard_map_options,
    subjaxprs,
    while_operands,
)
from ..._structural import CALLS
from . import pairs as p
from .blocks import Location, Loop, Tables
from .compiled import Memory, joined, taken
from .pairs import Pair
from .statistics import at_iteration, merge, merge_parts, no_runs

Run = Callable[..., tuple[list[Pair], Tables]]
"""Runs a program that an equation holds; see `Interpreter.body`."""


# Loops. A carry has a value in the author's dtype if any iteration gives it one.


def _shapes(where: Location, fn: Callable[..., Any], *args: Any) -> Any:
    """What `fn` returns, for its shapes and structure only.

    In a `shard_map`, `jax.eval_shape` up to JAX 0.6 forgets over which axes its
    arguments vary; there `fn` is traced in place, and the compiler drops it."""
    return fn(*args) if where.block.axes else jax.eval_shape(fn, *args)


def _settled(
    where: Location,
    step: Callable[[list[Pair]], tuple[list[Pair], Tables]],
    carry: list[Pair],
) -> tuple[list[Pair], Tables]:
    """The carry in a form that the body preserves, and the types of its tables."""
    while True:
        outs, found = _shapes(where, step, carry)
        forms = [p.common(a, b) for a, b in zip(carry, outs, strict=True)]
        settled = p.pinned(carry, forms)
        if _form(settled) == _form(carry):
            return carry, found
        carry = settled


def _form(carry: list[Pair]) -> list[Any]:
    return [pair.true is not None and pair.true.dtype for pair in carry]


def _none_yet(where: Location, found: Tables) -> Tables:
    """Tables for a loop's carry, of which `found` are the body's."""
    tables = jax.eval_shape(_outside, found, 0)
    return _varying(where, {key: no_runs(table) for key, table in tables.items()})


def _varying(where: Location, found: Tables) -> Tables:
    """The same tables, typed as different on every device of a `shard_map`.

    What a loop carries, and what branches return, must have one such type."""
    for axis in where.block.axes:
        index = lax.axis_index(axis)
        found = jax.tree.map(lambda x, i=index: x + (0 * i).astype(x.dtype), found)
    return found


def _outside(found: Tables, i: Any) -> Tables:
    """Tables as seen from outside of a loop, of which `i` is the iteration."""
    return {key: at_iteration(table, i) for key, table in found.items()}


def _merged(found: Tables, new: Tables, i: Any) -> Tables:
    new = _outside(new, i)
    return {key: merge(table, new[key]) for key, table in found.items()}


def _scan(run: Run, eqn: Eqn, where: Location, operands: list[Pair]):
    fixed, given, xs = scan_operands(eqn, operands)
    num_carry = len(given)
    length, reverse = eqn.params["length"], eqn.params["reverse"]
    loop = Loop(reverse, length, len(where.path))

    def body(carry, slices):
        args = [*fixed, *carry, *slices]
        return run(eqn.params["jaxpr"], args, eqn, where, 0, loop)

    def first(x):
        return jnp.zeros(x.shape[1:], x.dtype) if length == 0 else x[0]

    slices = jax.tree.map(first, xs)

    def one_step(carry):
        outs, found = body(carry, slices)
        return outs[:num_carry], found

    carry, found = _settled(where, one_step, given)

    def step(state, slices):
        time, carry, found = state
        outs, new = body(carry, slices)
        i = length - 1 - time if reverse else time
        kept = p.pinned(outs[:num_carry], carry)
        return (time + 1, kept, _merged(found, new, i)), outs[num_carry:]

    state = (jnp.int32(0), carry, _none_yet(where, found))
    (_, carry, found), ys = lax.scan(step, state, xs, length=length, reverse=reverse)
    return [*carry, *ys], found


def _while(run: Run, eqn: Eqn, where: Location, operands: list[Pair]):
    params = eqn.params
    cond_consts, body_consts, given = while_operands(eqn, operands)
    cond = params["cond_jaxpr"]
    loop = Loop(False, 0, len(where.path))

    def body(carry):
        args = [*body_consts, *carry]
        return run(params["body_jaxpr"], args, eqn, where, 1, loop)

    carry, found = _settled(where, body, given)

    def goes_on(state):
        args = [pair.run for pair in (*cond_consts, *state[1])]
        return run_jaxpr(cond, args)[0]

    def step(state):
        i, carry, found = state
        outs, new = body(carry)
        return i + 1, p.pinned(outs, carry), _merged(found, new, i)

    state = (jnp.int32(0), carry, _none_yet(where, found))
    _, carry, found = lax.while_loop(goes_on, step, state)
    return carry, found


def _cond(run: Run, eqn: Eqn, where: Location, operands: list[Pair]):
    def branch(k, operands):
        return run(eqn.params["branches"][k], operands, eqn, where, k)

    count = len(eqn.params["branches"])
    fns = [functools.partial(branch, k) for k in range(count)]
    each = [_shapes(where, fn, operands[1:]) for fn in fns]
    forms = [p.common(*outs) for outs in zip(*(outs for outs, _ in each), strict=True)]
    tables = {key: table for _, found in each for key, table in found.items()}

    def taken(fn, operands):
        outs, found = fn(operands)
        idle = {key: no_runs(t) for key, t in tables.items() if key not in found}
        return p.pinned(outs, forms), _varying(where, found | idle)

    index = jnp.asarray(operands[0].run, jnp.int32)
    return lax.switch(index, [functools.partial(taken, fn) for fn in fns], operands[1:])


# Manual sharding: each device measures its own part; the parts are merged outside.


def _shard_map(run: Run, eqn: Eqn, where: Location, operands: list[Pair]):
    options = shard_map_options(eqn.params)
    shard_map: Any = jax.shard_map
    axes = tuple(options["axis_names"]) or tuple(options["mesh"].axis_names)
    forms: list[list[Pair]] = []

    def body(operands):
        outs, found = run(eqn.params["jaxpr"], operands, eqn, where, 0, axes=axes)
        forms.append([Pair(True, None if out.true is None else True) for out in outs])
        return outs, jax.tree.map(lambda x: x[None], found)

    def specs(specs, pairs):
        return [
            jax.tree.map(lambda _, spec=spec: spec, pair)
            for spec, pair in zip(specs, pairs, strict=True)
        ]

    by_device = PartitionSpec(axes)
    options["in_specs"] = (specs(options["in_specs"], operands),)
    # A dry run tells which results have a value of their own in the author's dtype.
    dry = shard_map(lambda x: body(x)[1], **options | {"out_specs": by_device})
    jax.eval_shape(dry, operands)
    out_specs = (specs(options["out_specs"], forms[-1]), by_device)
    outs, parts = shard_map(body, **options | {"out_specs": out_specs})(operands)
    return outs, {key: merge_parts(table) for key, table in parts.items()}


HANDLERS = {"scan": _scan, "while": _while, "cond": _cond, "shard_map": _shard_map}


# Outside of compiled code, a short loop is run like all else: its iterations share the
# code of their equations, which costs far less to compile than the whole loop.

_MOST_EQUATIONS = 20_000  # run one by one; beyond, compiling the loop pays


def _scan_one_by_one(
    run: Run, eqn: Eqn, where: Location, operands: list[Pair]
) -> tuple[list[Pair], Tables] | None:
    jaxpr, length = eqn.params["jaxpr"], eqn.params["length"]
    if not 0 < length * num_ticks(jaxpr) <= _MOST_EQUATIONS:
        return None
    fixed, given, xs = scan_operands(eqn, operands)
    num_carry = len(given)
    memory = where.block.memory
    carry = [joined(memory, value) for value in given]
    reverse = eqn.params["reverse"]
    loop = Loop(reverse, length, len(where.path))
    found: Tables = {}
    ys: list[list[Pair]] = []
    for i in reversed(range(length)) if reverse else range(length):
        args = [*fixed, *carry, *_taken(memory, xs, i)]
        outs, new = run(jaxpr, args, eqn, where, 0, loop, compiled=False)
        for key, table in _deeper(new, i).items():
            found[key] = _merge(found[key], table) if key in found else table
        carry = outs[:num_carry]
        ys.append(outs[num_carry:])
        memory.hold(p.arrays_of(ys[-1]))
    outs = [*carry, *map(_slices, zip(*(ys[::-1] if reverse else ys), strict=True))]
    as_they_came = p.arrays_of([pair for pairs in ys for pair in pairs])
    memory.transfer(p.arrays_of(outs), instead_of=as_they_came)
    return outs, found


def _slices(pairs: Sequence[Pair]) -> p.Slices:
    return p.Slices(p.pinned(pairs, [p.common(*pairs)] * len(pairs)))


def _taken(memory: Memory, xs: list[Any], i: int) -> list[Pair]:
    whole = [x for x in xs if isinstance(x, Pair)]
    parts = iter(taken(memory, whole, i) if whole else ())
    return [next(parts) if isinstance(x, Pair) else x.pairs[i] for x in xs]


_merge = jax.jit(merge)


_deeper = jax.jit(_outside)


def _cond_one_by_one(
    run: Run, eqn: Eqn, where: Location, operands: list[Pair]
) -> tuple[list[Pair], Tables]:
    branches = eqn.params["branches"]
    k = min(max(int(operands[0].run), 0), len(branches) - 1)
    return run(branches[k], operands[1:], eqn, where, k, compiled=False)


ONE_BY_ONE = {"scan": _scan_one_by_one, "cond": _cond_one_by_one}


def num_ticks(jaxpr: Jaxpr) -> int:
    """How many equations of a program run outside of loops."""
    return sum(
        sum(map(num_ticks, subjaxprs(eqn.params))) if eqn.primitive.name in CALLS else 1
        for eqn in raw(jaxpr).eqns
    )
