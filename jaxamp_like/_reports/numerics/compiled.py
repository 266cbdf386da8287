"""The compiled code of single equations, and the memory that it writes results into.

Equal equations share their code. An array that nothing reads any more is donated to a
later result of its type: new memory comes page by page from the operating system, which
takes ten times as long as the arithmetic of most equations."""

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import SingleDeviceSharding

from ..._dtypes import cast
from ..._jax import Eqn, Literal, eqn_context, rebind
from . import pairs as p
from .pairs import Pair, Role, Value
from .statistics import measure

# By default XLA may skip roundings inside of a fused kernel, and with them overflows.
OPTIONS = {"xla_allow_excess_precision": False}

_LARGE = 2**20  # bytes; less comes from memory that the process has already

_CHUNK = 2**16  # elements; what a step touches fits into the cache of a core


class Memory:
    """Counts the readers of arrays, and keeps those without any for later results.

    Only arrays that were made here are kept and donated, never an argument or constant
    of the program, and only those on a CPU: other devices reuse memory by themselves.
    """

    def __init__(self) -> None:
        self._made: dict[int, Any] = {}
        self._readers: Counter[int] = Counter()
        self._spare: dict[_Form, list[Any]] = {}  # the latest used form is last
        self._in_use = self._most_in_use = self._kept = 0  # bytes

    def made(self, arrays: Iterable[Any]) -> None:
        """Registers arrays that were made here, and that nobody else refers to."""
        for x in arrays:
            if _is_large(x) and _is_on_cpu([x]):
                self._made[id(x)] = x
                self._in_use += x.nbytes
        self._most_in_use = max(self._most_in_use, self._in_use)

    def hold(self, arrays: Iterable[Any]) -> None:
        """Adds a reader to each of these arrays."""
        self._readers.update(map(id, arrays))

    def release(self, arrays: Iterable[Any], reuse: bool = True) -> None:
        """Removes a reader from each of these arrays.

        Those without readers are kept for reuse. Without `reuse` they are not, since
        another reader is about to be added."""
        for x in arrays:
            self._readers[id(x)] -= 1
            if reuse and self._readers[id(x)] == 0:
                del self._readers[id(x)]
                if self._forget(x):
                    self._keep(x)

    def transfer(self, arrays: Sequence[Any], instead_of: Iterable[Any]) -> None:
        """Releases `instead_of`, except for `arrays`, which others will hold soon."""
        self.hold(arrays)
        self.release(instead_of)
        self.release(arrays, reuse=False)

    def discard(self, arrays: Sequence[Any]) -> None:
        """Releases arrays that nobody is going to read."""
        self.hold(arrays)
        self.release(arrays)

    def _forget(self, x: Any) -> bool:
        """Stops tracking an array; returns whether it was tracked."""
        is_ours = self._made.pop(id(x), None) is not None
        self._in_use -= x.nbytes if is_ours else 0
        return is_ours

    def _keep(self, x: Any) -> None:
        form = _Form.of(x)
        self._spare[form] = [*self._spare.pop(form, ()), x]
        self._kept += x.nbytes
        while self._kept and self._in_use + self._kept > _MOST * self._most_in_use:
            self._reuse(next(iter(self._spare)))

    def _reuse(self, form: "_Form") -> Any:
        *others, x = self._spare.pop(form)
        if others:
            self._spare[form] = others
        self._kept -= x.nbytes
        return x

    def donors(
        self, wanted: Sequence[Any], operands: Sequence[Any], dying: Sequence[Any]
    ) -> list[Any]:
        """Arrays to write results of the types `wanted` into.

        Args:
            operands: the arrays that they are computed from.
            dying: those operands that are read for the last time, once for each reader.
        Returns:
            One array for each result: one of `dying`, or one that is no operand. The
            list is empty if the operands are not on one CPU device."""
        operands = [x for x in operands if isinstance(x, jax.Array)]
        if not wanted or not _is_on_cpu(operands):
            return []
        is_committed = any(x.committed for x in operands)
        place = operands[0].sharding
        times, last = Counter(map(id, operands)), Counter(map(id, dying))
        over = [
            self._made[key]
            for key in last
            if key in self._made and times[key] == 1 and last[key] == self._readers[key]
        ]
        found = []
        for like in wanted:
            form = _Form(like.shape, like.dtype, place, is_committed)
            fitting = [x for x in over if _Form.of(x) == form]
            if fitting:
                found.append(fitting[0])
                over = [x for x in over if x is not fitting[0]]
                self._forget(fitting[0])
            elif form in self._spare:
                found.append(self._reuse(form))
            else:
                device = place if is_committed else None
                found.append(jnp.empty(like.shape, like.dtype, device=device))
        return found


_MOST = 1.5  # times the most memory that was in use at once


class _Form(NamedTuple):
    """What an array and the one that is written over it have in common."""

    shape: tuple[int, ...]
    dtype: Any
    place: Any
    is_committed: bool  # to its place, by whoever made the arguments

    @staticmethod
    def of(x: Any) -> "_Form":
        return _Form(x.shape, x.dtype, x.sharding, x.committed)


def _is_large(x: Any) -> bool:
    is_plain = isinstance(x.dtype, np.dtype)  # no random key
    return is_plain and x.size * x.dtype.itemsize >= _LARGE


def _is_on_cpu(arrays: Sequence[Any]) -> bool:
    """Whether all are on one CPU device."""
    places = {x.sharding for x in arrays if isinstance(x, jax.Array)}
    return len(places) == 1 and all(
        isinstance(place, SingleDeviceSharding)
        and next(iter(place.device_set)).platform == "cpu"
        for place in places
    )


class Compiled:
    """A function, compiled for arguments of the types of `args`."""

    def __init__(self, fn: Callable[..., Any], *args: Any):
        self.fn = fn
        program, result = jax.make_jaxpr(fn, return_shape=True)(*args)
        self.inputs = jax.tree.structure(args)
        self.outputs = jax.tree.structure(result)
        invars, outvars = program.jaxpr.invars, program.jaxpr.outvars
        # Inputs that are returned as they are need not be copied.
        self.through = {
            i: invars.index(v) for i, v in enumerate(outvars) if v in invars
        }
        self.computed = [i for i in range(len(outvars)) if i not in self.through]
        avals = [outvars[i].aval for i in self.computed]
        self.wanted = [aval for aval in avals if _is_large(aval)]
        # An operand is only written over if all arrays but scalars have one shape.
        variables: list[Any] = [*invars, *outvars]
        shapes = {v.aval.shape for v in variables} - {()}
        self.is_in_place = len(shapes) == 1
        self.code = functools.lru_cache(self._code)

    def _code(self, over: tuple[int, ...]) -> Callable[..., Any]:
        """The code that writes over the operands of these numbers."""

        def compute(kept, donated):
            rest = iter(kept)
            given = dict(zip(over, donated, strict=False))
            leaves = [
                given[i] if i in given else next(rest)
                for i in range(self.inputs.num_leaves)
            ]
            args = jax.tree.unflatten(self.inputs, leaves)
            results = jax.tree.leaves(self.fn(*args))
            return [results[i] for i in self.computed]

        return jax.jit(
            compute, donate_argnums=1, keep_unused=True, compiler_options=OPTIONS
        )

    def __call__(self, memory: Memory, *args: Any, dying: Sequence[Any] = ()) -> Any:
        operands = jax.tree.leaves(args)
        kept_on = {id(operands[i]) for i in self.through.values()}
        free = [x for x in dying if self.is_in_place and id(x) not in kept_on]
        donors = memory.donors(self.wanted, operands, free)
        numbers = {id(x): i for i, x in enumerate(operands)}
        donors.sort(key=lambda x: id(x) not in numbers)
        over = tuple(numbers[id(x)] for x in donors if id(x) in numbers)
        kept = [x for i, x in enumerate(operands) if i not in over]
        computed = self.code(over)(kept, donors)
        memory.made(computed)
        results = dict(zip(self.computed, computed, strict=True))
        results |= {i: operands[j] for i, j in self.through.items()}
        return jax.tree.unflatten(
            self.outputs, [results[i] for i in range(len(results))]
        )


def run_compiled(
    memory: Memory, fn: Callable[..., Any], *args: Any, dying: Sequence[Any] = ()
) -> Any:
    """`fn(*args)` by compiled code, which all arguments of the same types share."""
    leaves, tree = jax.tree.flatten(args)
    key = fn, tree, *((x.shape, x.dtype) for x in leaves)
    try:
        code = _of_types(*key)
    except TypeError:  # of an equation, one of whose parameters has no hash
        code = _of_types.__wrapped__(*key)
    return code(memory, *args, dying=dying)


@functools.lru_cache(maxsize=2048)
def _of_types(fn: Callable[..., Any], tree: Any, *types: Any) -> Compiled:
    leaves = [jax.ShapeDtypeStruct(*one) for one in types]
    return Compiled(fn, *jax.tree.unflatten(tree, leaves))


def taken(memory: Memory, stacked: list[Pair], i: int) -> list[Pair]:
    """The slices of all arrays at index `i` of their first axis."""
    return run_compiled(memory, _take, stacked, np.int32(i))


def _take(stacked: list[Pair], i: Any) -> list[Pair]:
    def one(x):
        return lax.dynamic_index_in_dim(x, i, keepdims=False)

    return jax.tree.map(one, stacked)


def joined(memory: Memory, value: Value) -> Pair:
    """A value as one array."""
    if isinstance(value, Pair):
        return value
    return run_compiled(memory, _join, value.pairs)


def _join(slices: list[Pair]) -> Pair:
    return jax.tree.map(lambda *xs: jnp.stack(xs), *slices)


def measured(memory: Memory, pair: Pair) -> tuple[Any, Any]:
    """What `measure` finds out about an array of floats."""
    run = jnp.asarray(pair.run)
    arrays = [run] if pair.true is None else [run, pair.true]
    measuring = _measure_by_chunks if _is_on_cpu(arrays) else measure
    row, codes, scratch = run_compiled(memory, measuring, run, pair.true)
    memory.discard(scratch)
    return row, codes


_measure_by_chunks = functools.partial(measure, chunk=_CHUNK)


def evaluated(
    memory: Memory, eqn: Eqn, role: Role, operands: list[Pair], dying: Sequence[Any]
) -> list[Pair]:
    """The results of an equation; the arrays `dying` are not read after it."""
    wide = _widened(memory, eqn, operands)
    fn = _EquationFunction(eqn, role)
    outs, scratch = run_compiled(memory, fn, operands, wide, dying=dying)
    memory.discard([*wide, *scratch])
    return outs


class _EquationFunction:
    """A function of an equation's operands; equal for equations that do the same."""

    def __init__(self, eqn: Eqn, role: Role):
        self.eqn, self.role = eqn, role
        literals = tuple(
            (i, str(atom.val), str(atom.aval))
            for i, atom in enumerate(eqn.invars)
            if isinstance(atom, Literal)
        )
        # `mul a a` is another equation than `mul a b`.
        atoms = [id(atom) for atom in eqn.invars]
        same = tuple(map(atoms.index, atoms))
        params = tuple(sorted(eqn.params.items(), key=lambda item: item[0]))
        self.key = eqn.primitive, params, role, literals, same

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _EquationFunction) and self.key == other.key

    def __call__(
        self, operands: list[Pair], wide: list[Any]
    ) -> tuple[list[Pair], list[Any]]:
        scratch: list[Any] = []

        def run(eqn, values):
            if not wide:
                return rebind(eqn, values)
            params = eqn.params | {"preferred_element_type": wide[0].dtype}
            with eqn_context(eqn):
                scratch.append(eqn.primitive.bind(*wide, **params))
            return [cast(scratch[0], eqn.outvars[0].aval.dtype)]

        return p.rebind_pairs(self.eqn, self.role, operands, run), scratch


def _widened(memory: Memory, eqn: Eqn, operands: Sequence[Pair]) -> list[Any]:
    """The operands of a contraction of 16-bit floats in float32; none for others.

    XLA's CPU backend computes such a contraction in float32, and would cast operands in
    new memory each time. Here they are cast in memory that is reused."""
    types = {atom.aval.dtype for atom in (*eqn.invars, *eqn.outvars)}
    if eqn.primitive.name != "dot_general" or not types <= _NARROW:
        return []
    values = [pair.run for pair in operands]
    if eqn.params["precision"] is not None or not _is_on_cpu(values):
        return []
    return [run_compiled(memory, _widen, x) for x in values]


_NARROW = {jnp.dtype("bfloat16"), jnp.dtype("float16")}


_widen = functools.partial(cast, dtype=jnp.dtype(jnp.float32))
