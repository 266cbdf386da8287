"""The interpreter behind `trace_numerics`: programs, loops and branches of pairs.

Outside of loops, every equation is compiled with its statistics and run at once; equal
ones share their code, so that unrolled layers cost no more to compile than one. A loop
is compiled as a whole, with the statistics of its body among its carries."""

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from .._jax import (
    Eqn,
    Jaxpr,
    Literal,
    consts,
    is_array_aval,
    raw,
    scan_arity,
    shard_map_options,
    subjaxprs,
)
from .._plan import Step
from . import pairs as p, walk
from .pairs import Pair, Role
from .statistics import (
    Table,
    at_iteration,
    combined,
    histograms,
    measure,
    merge,
    merge_parts,
    no_row,
    no_runs,
    tabulate,
)

Path = tuple[int, ...]
Found = dict[Path, Table]  # of blocks


class Loop(NamedTuple):
    """A loop around an equation."""

    reverse: bool
    length: int  # 0 if it is not known beforehand
    depth: int  # how much of the paths of its equations is its own


Loops = tuple[Loop, ...]

# XLA may skip roundings inside of a fused kernel, and with them what overflows.
_OPTIONS = {"xla_allow_excess_precision": False}

_CALLS = frozenset(
    "jit pjit closed_call core_call call eval_jaxpr custom_jvp_call custom_vjp_call "
    "checkpoint remat2".split()
)


@dataclass(frozen=True)
class Seen:
    """An equation that was measured.

    Args:
        eqn: the equation.
        at: what is around it.
        path: where it stands: the number of each equation around it, and of the
            program within that.
        loops: the loops around it, outermost first.
        written: the dtypes that its float results have as written.
        sizes: their numbers of elements."""

    eqn: Eqn
    at: walk.Around
    path: Path
    loops: Loops
    written: tuple[str, ...]
    sizes: tuple[int, ...]


@dataclass(eq=False)
class Block:
    """Equations that run equally often: the body of a loop, or all outside of loops.

    `compiled` says that they are being traced, rather than run one by one."""

    path: Path
    loops: Loops
    compiled: bool
    seen: list[Seen] = field(default_factory=list)
    rows: list[Any] = field(default_factory=list)
    inputs: list[list[Any]] = field(default_factory=list)
    codes: list[Any] = field(default_factory=list)

    def measure(self, pair: Pair) -> tuple[Any, Any]:
        fn = measure if self.compiled else _measure
        return fn(jnp.asarray(pair.run), pair.true)

    def add(self, seen: Seen, outs: list[tuple[Any, Any]], inputs: list[Any]) -> None:
        self.seen.append(seen)
        self.rows.append(combined([row for row, _ in outs], seen.sizes))
        self.inputs.append(inputs)
        codes = [codes for _, codes in outs]
        self.codes.append(codes[0] if len(codes) == 1 else jnp.concatenate(codes))
        if not self.compiled:  # at once: the codes of all equations are a lot to keep
            self.codes[-1] = _histogram(self.codes[-1])

    def table(self) -> Table | None:
        if not self.rows:
            return None
        none = no_row()
        most = max(map(len, self.inputs))
        padded = [[*rows, *[none] * (most - len(rows))] for rows in self.inputs]
        if self.compiled:
            return _table(self.rows, padded, histograms(self.codes))
        return _table_at_once(self.rows, padded, jnp.stack(self.codes))


def _table(rows: list[Any], inputs: list[list[Any]], histogram: Any) -> Table:
    each = [row for rows in inputs for row in rows]
    read = jnp.stack(each) if each else jnp.zeros((0, rows[0].size), rows[0].dtype)
    read = read.reshape(len(rows), -1, rows[0].size)
    return tabulate(jnp.stack(rows), read, histogram)


# Compiled once for every shape and dtype, whatever the equation.
_measure = jax.jit(measure, compiler_options=_OPTIONS)
_table_at_once = jax.jit(_table)


@jax.jit
def _histogram(codes: Any) -> Any:
    return histograms([codes])[0]


@dataclass(eq=False)
class Interpreter:
    """Runs programs of pairs and collects tables of statistics.

    `tick` is called with every equation that is about to run outside of loops."""

    steps: Sequence[Step]
    tick: Callable[[Eqn, walk.Around], None]
    seen: dict[Path, list[Seen]] = field(default_factory=dict)

    def run(self, jaxpr: Jaxpr, args: Sequence[Pair]) -> tuple[list[Pair], Found]:
        """Runs a whole program."""
        block = Block((), (), compiled=False)
        outs, found = self._run(jaxpr, args, walk.Around(), (), block)
        return outs, found | self._close(block)

    def body(
        self,
        jaxpr: Jaxpr,
        args: Sequence[Pair],
        eqn: Eqn,
        where: "_Where",
        index: int,
        loop: Loop | None = None,
        compiled: bool = True,
    ) -> tuple[list[Pair], Found]:
        """Runs a program that an equation holds, as a block of its own."""
        path, loops = (*where.path, index), where.block.loops
        loops = loops if loop is None else (*loops, loop)
        block = Block(path, loops, compiled)
        outs, found = self._run(jaxpr, args, where.at.within(eqn), path, block)
        return [pair.bare() for pair in outs], found | self._close(block)

    def _close(self, block: Block) -> Found:
        table = block.table()
        self.seen[block.path] = block.seen
        return {} if table is None else {block.path: table}

    def _run(
        self,
        jaxpr: Jaxpr,
        args: Sequence[Pair],
        around: walk.Around,
        path: Path,
        block: Block,
    ) -> tuple[list[Pair], Found]:
        inner = raw(jaxpr)
        env: dict[Any, Pair] = dict(zip(inner.invars, args, strict=True))
        env |= zip(inner.constvars, map(Pair, consts(jaxpr)), strict=True)
        last = {a: i for i, e in enumerate(inner.eqns) for a in _variables(e.invars)}
        last |= dict.fromkeys(_variables(inner.outvars), len(inner.eqns))
        found: Found = {}
        for i, eqn in enumerate(inner.eqns):
            where = _Where(around.at(eqn, self.steps), (*path, i), block)
            outs, new = self._equation(eqn, env, where)
            found |= new
            env |= zip(eqn.outvars, outs, strict=True)
            for v in {*_variables(eqn.invars), *eqn.outvars}:
                if last.get(v, -1) <= i:
                    del env[v]
        return [
            p.literal_pair(atom, None) if isinstance(atom, Literal) else env[atom]
            for atom in inner.outvars
        ], found

    def _equation(
        self, eqn: Eqn, env: dict[Any, Pair], where: "_Where"
    ) -> tuple[list[Pair], Found]:
        _check(eqn)
        name, block = eqn.primitive.name, where.block
        role = p.role_of(eqn, where.at)
        is_leaf = name not in _CALLS and name not in _HANDLERS
        operands = []
        for atom, written in zip(eqn.invars, role.literals, strict=True):
            if isinstance(atom, Literal):
                pair = p.literal_pair(atom, written)
            else:
                pair = env[atom]
            if is_leaf and not p.is_move(eqn) and pair.is_float and pair.row is None:
                pair = pair._replace(row=block.measure(pair)[0])
                if not isinstance(atom, Literal):
                    env[atom] = pair  # known to whatever reads it next
            operands.append(pair)
        if name in _CALLS:
            (body,) = subjaxprs(eqn.params)
            path = (*where.path, 0)
            return self._run(body, operands, where.at.within(eqn), path, block)
        if not block.compiled:
            self.tick(eqn, where.at)
        bare = [pair.bare() for pair in operands]
        if not block.compiled and name in _ONE_BY_ONE:
            result = _ONE_BY_ONE[name](self, eqn, where, bare)
            if result is not None:
                return result
        if name in _HANDLERS:
            handle = functools.partial(_HANDLERS[name], self, eqn, where)
            if block.compiled:
                return handle(bare)
            return jax.jit(handle, compiler_options=_OPTIONS)(bare)
        evaluate = (
            _compiled(eqn, role)
            if not block.compiled
            else functools.partial(p.evaluate, eqn, role)
        )
        return self._measured(eqn, operands, evaluate(bare), where), {}

    def _measured(
        self, eqn: Eqn, operands: list[Pair], outs: list[Pair], where: "_Where"
    ) -> list[Pair]:
        if p.is_move(eqn):
            return p.with_rows(operands, outs)
        floats = [i for i, out in enumerate(outs) if out.is_float]
        if not floats:
            return outs
        block = where.block
        measured = [block.measure(outs[i]) for i in floats]
        for i, (row, _) in zip(floats, measured, strict=True):
            outs[i] = outs[i]._replace(row=row)
        sizes = tuple(int(outs[i].run.size) for i in floats)
        written = walk.dtype_names_of(outs[i].exact for i in floats)
        seen = Seen(eqn, where.at, where.path, block.loops, written, sizes)
        block.add(seen, measured, [pair.row for pair in operands if pair.is_float])
        return outs


class _Where(NamedTuple):
    at: walk.Around
    path: Path
    block: Block


def _variables(atoms: Sequence[Any]) -> list[Any]:
    return [atom for atom in atoms if not isinstance(atom, Literal)]


def _check(eqn: Eqn) -> None:
    for atom in (*eqn.invars, *eqn.outvars):
        if "Ref" in type(atom.aval).__name__ and not is_array_aval(atom.aval):
            raise NotImplementedError(
                f"`trace_numerics` can't follow mutable arrays, but {eqn.primitive} "
                f"({walk.source_of(eqn)}) works on one. Trace the part of the function "
                "that has none, or pass the arrays' values instead."
            )


# Equal equations share their code.


def _compiled(eqn: Eqn, role: Role) -> Callable[..., Any]:
    literals = tuple(
        (i, str(atom.val), atom.aval.dtype.name)
        for i, atom in enumerate(eqn.invars)
        if isinstance(atom, Literal)
    )
    params = tuple(sorted(eqn.params.items(), key=lambda item: item[0]))
    try:
        return _shared(_Key((eqn.primitive, params, role, literals), eqn))
    except TypeError:  # a parameter that has no hash
        return _compile(eqn, role)


class _Key:
    """Equal for equations that do the same; carries one of them."""

    def __init__(self, key: Any, eqn: Eqn):
        self.key, self.eqn, self.role = key, eqn, key[2]
        self.hash = hash(key)

    def __hash__(self) -> int:
        return self.hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self.key == other.key


@functools.lru_cache(maxsize=1024)
def _shared(key: _Key) -> Callable[..., Any]:
    return _compile(key.eqn, key.role)


def _compile(eqn: Eqn, role: Role) -> Callable[..., Any]:
    fn = functools.partial(p.evaluate, eqn, role)
    return jax.jit(fn, compiler_options=_OPTIONS)


# Loops. A carry has a value in the author's dtype if any iteration gives it one.


def _settled(
    step: Callable[[list[Pair]], tuple[list[Pair], Found]], carry: list[Pair]
) -> tuple[list[Pair], Found]:
    """The carry in a form that the loop's body keeps, and its statistics' types."""
    while True:
        outs, found = jax.eval_shape(step, carry)
        forms = [p.common(a, b) for a, b in zip(carry, outs, strict=True)]
        settled = [
            p.joined(pair, form) for pair, form in zip(carry, forms, strict=True)
        ]
        if _form(settled) == _form(carry):
            return carry, found
        carry = settled


def _form(carry: list[Pair]) -> list[Any]:
    return [pair.true is not None and pair.true.dtype for pair in carry]


def _none_yet(found: Found) -> Found:
    """Tables for a loop's carry, of which `found` are the body's."""

    def deeper(found):
        return {path: at_iteration(table, 0) for path, table in found.items()}

    return {k: no_runs(t) for k, t in jax.eval_shape(deeper, found).items()}


def _merged(found: Found, new: Found, i: Any) -> Found:
    return {k: merge(table, at_iteration(new[k], i)) for k, table in found.items()}


def _pinned(outs: Sequence[Pair], carry: Sequence[Pair]) -> list[Pair]:
    return [p.joined(out, like) for out, like in zip(outs, carry, strict=True)]


def _scan(self: Interpreter, eqn: Eqn, where: _Where, operands: list[Pair]):
    num_consts, num_carry = scan_arity(eqn)
    fixed, carry = operands[:num_consts], operands[num_consts:][:num_carry]
    xs = operands[num_consts + num_carry :]
    length, reverse = eqn.params["length"], eqn.params["reverse"]
    loop = Loop(reverse, length, len(where.path))

    def body(carry, slices):
        args = [*fixed, *carry, *slices]
        return self.body(eqn.params["jaxpr"], args, eqn, where, 0, loop)

    slices = jax.eval_shape(lambda xs: jax.tree.map(operator.itemgetter(0), xs), xs)

    def one_step(carry):
        outs, found = jax.eval_shape(body, carry, slices)
        return outs[:num_carry], found

    carry, found = _settled(one_step, carry)

    def step(state, slices):
        time, carry, found = state
        outs, new = body(carry, slices)
        i = length - 1 - time if reverse else time
        kept = _pinned(outs[:num_carry], carry)
        return (time + 1, kept, _merged(found, new, i)), outs[num_carry:]

    state = (jnp.int32(0), carry, _none_yet(found))
    (_, carry, found), ys = lax.scan(step, state, xs, length=length, reverse=reverse)
    return [*carry, *ys], found


def _while(self: Interpreter, eqn: Eqn, where: _Where, operands: list[Pair]):
    params = eqn.params
    num_cond, num_body = params["cond_nconsts"], params["body_nconsts"]
    cond_consts, rest = operands[:num_cond], operands[num_cond:]
    body_consts, carry = rest[:num_body], rest[num_body:]
    cond = params["cond_jaxpr"]
    loop = Loop(False, 0, len(where.path))

    def body(carry):
        args = [*body_consts, *carry]
        return self.body(params["body_jaxpr"], args, eqn, where, 1, loop)

    carry, found = _settled(lambda carry: jax.eval_shape(body, carry), carry)

    def goes_on(state):
        args = [pair.run for pair in (*cond_consts, *state[1])]
        return jax.core.eval_jaxpr(raw(cond), consts(cond), *args)[0]

    def step(state):
        i, carry, found = state
        outs, new = body(carry)
        return i + 1, _pinned(outs, carry), _merged(found, new, i)

    state = (jnp.int32(0), carry, _none_yet(found))
    _, carry, found = lax.while_loop(goes_on, step, state)
    return carry, found


def _cond(self: Interpreter, eqn: Eqn, where: _Where, operands: list[Pair]):
    def branch(k, operands):
        return self.body(eqn.params["branches"][k], operands, eqn, where, k)

    count = len(eqn.params["branches"])
    fns = [functools.partial(branch, k) for k in range(count)]
    each = [jax.eval_shape(fn, operands[1:]) for fn in fns]
    forms = [p.common(*outs) for outs in zip(*(outs for outs, _ in each), strict=True)]
    tables = {path: table for _, found in each for path, table in found.items()}

    def taken(fn, operands):
        outs, found = fn(operands)
        idle = {path: no_runs(t) for path, t in tables.items() if path not in found}
        return _pinned(outs, forms), found | idle

    index = jnp.asarray(operands[0].run, jnp.int32)
    return lax.switch(index, [functools.partial(taken, fn) for fn in fns], operands[1:])


# Manual sharding: each device measures its own part; the parts are merged outside.


def _shard_map(self: Interpreter, eqn: Eqn, where: _Where, operands: list[Pair]):
    options = shard_map_options(eqn.params)
    axes = tuple(options["axis_names"]) or tuple(options["mesh"].axis_names)
    forms: list[list[Pair]] = []

    def body(operands):
        outs, found = self.body(eqn.params["jaxpr"], operands, eqn, where, 0)
        forms.append([Pair(True, None if out.true is None else True) for out in outs])
        return outs, jax.tree.map(lambda x: x[None], found)

    def specs(specs, pairs):
        return [
            jax.tree.map(lambda _, spec=spec: spec, pair)
            for spec, pair in zip(specs, pairs, strict=True)
        ]

    by_device = PartitionSpec(axes)
    options |= {
        "in_specs": (specs(options["in_specs"], operands),),
        "check_vma": False,  # a table that starts as zeros is the same everywhere
    }
    # A dry run tells which results have a value of their own in the author's dtype.
    dry = jax.shard_map(lambda x: body(x)[1], **options | {"out_specs": by_device})
    jax.eval_shape(dry, operands)
    out_specs = (specs(options["out_specs"], forms[-1]), by_device)
    outs, parts = jax.shard_map(body, **options | {"out_specs": out_specs})(operands)
    return outs, {path: merge_parts(table) for path, table in parts.items()}


_HANDLERS = {
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "shard_map": _shard_map,
}


# Outside of compiled code, a short loop is run like all else: its iterations share the
# code of their equations, which costs far less to compile than the whole loop.

_MOST_EQUATIONS = 20_000  # run one by one; beyond, compiling the loop pays


def _scan_one_by_one(
    self: Interpreter, eqn: Eqn, where: _Where, operands: list[Pair]
) -> tuple[list[Pair], Found] | None:
    jaxpr, length = eqn.params["jaxpr"], eqn.params["length"]
    if not 0 < length * num_ticks(jaxpr) <= _MOST_EQUATIONS:
        return None
    num_consts, num_carry = scan_arity(eqn)
    fixed, carry = operands[:num_consts], operands[num_consts:][:num_carry]
    xs = operands[num_consts + num_carry :]
    reverse = eqn.params["reverse"]
    loop = Loop(reverse, length, len(where.path))
    found: Found = {}
    ys = []
    for i in reversed(range(length)) if reverse else range(length):
        args = [*fixed, *carry, *_slice(xs, i)]
        outs, new = self.body(jaxpr, args, eqn, where, 0, loop, compiled=False)
        for path, table in _deeper(new, i).items():
            found[path] = _merge(found[path], table) if path in found else table
        carry = outs[:num_carry]
        ys.append(outs[num_carry:])
    ys = reversed(ys) if reverse else ys
    return [*carry, *map(_stack, zip(*ys, strict=True))], found


@jax.jit
def _slice(xs: list[Pair], i: Any) -> list[Pair]:
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, keepdims=False), xs)


_merge = jax.jit(merge)


@jax.jit
def _deeper(found: Found, i: Any) -> Found:
    return {path: at_iteration(table, i) for path, table in found.items()}


def _stack(slices: Sequence[Pair]) -> Pair:
    form = p.common(*slices)
    pinned = [p.joined(one, form) for one in slices]
    return jax.tree.map(lambda *xs: jnp.stack(xs), *pinned)


def _cond_one_by_one(
    self: Interpreter, eqn: Eqn, where: _Where, operands: list[Pair]
) -> tuple[list[Pair], Found]:
    branches = eqn.params["branches"]
    k = min(max(int(operands[0].run), 0), len(branches) - 1)
    return self.body(branches[k], operands[1:], eqn, where, k, compiled=False)


_ONE_BY_ONE = {"scan": _scan_one_by_one, "cond": _cond_one_by_one}


def num_ticks(jaxpr: Jaxpr) -> int:
    """How many equations of a program run outside of loops."""
    return sum(
        sum(map(num_ticks, subjaxprs(eqn.params)))
        if eqn.primitive.name in _CALLS
        else 1
        for eqn in raw(jaxpr).eqns
    )
