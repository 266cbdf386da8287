"""Which tensors of a program have a history, and what they are called.

A mark is an equation that a rule put where it wants the scale of an operand (see
`_quantised/delayed.py`). A tensor that marks read has one history, however many
contractions read it: the backward pass uses the scale of the forward pass, also for a
tensor that it computes again. A view shares the history of its tensor: what is reshaped
or transposed before it is read has the same maximum. In a scan, each iteration has a
history of its own (layers), unless one of the two operands is the same in all of them
(steps of a recurrence, microbatches): then all iterations share one, and the largest
maximum counts.

Programs are walked twice, here and in `threaded`: before anything is bound, it must be
known which scales a loop takes and which maxima the branches of a `cond` return."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from .._errors import AmpError
from .._jax import (
    Eqn,
    Jaxpr,
    consts,
    evaluate,
    holds,
    raw,
    scan_operands,
    shard_map_options,
    source_line,
    subjaxprs,
    varying_in,
    while_operands,
)
from .._quantised.delayed import SCALE, ScaleRequest
from .._structural import CALLS
from .value_numbering import ValueNumbers

INLINED = CALLS - {"linear_call"}
"""Calls whose programs are walked as if their equations stood in place of the call."""


class Enclosing(NamedTuple):
    """What stands around an equation.

    Args:
        lengths: the lengths of the scans, the outermost first.
        context: the branches and `while` loops, the outermost first.
        axes: the mesh axes of the `shard_map`s."""

    lengths: tuple[int, ...] = ()
    context: tuple[Any, ...] = ()
    axes: frozenset[str] = frozenset()

    def within(self, block: Any) -> "Enclosing":
        return self._replace(context=(*self.context, block))


@dataclass(eq=False)
class Tensor:
    """A tensor that has a history.

    Args:
        key: its name in the program.
        name: its name in the state.
        place: the contraction that it is named after.
        request: what the first mark that reads it says.
        lengths: by depth (1 for an outermost scan), the lengths of the scans whose
            iterations each have a history.
        around: what stands around the first mark that reads it.
        axes: the mesh axes that its type says it varies over."""

    key: str
    name: str
    place: str
    request: ScaleRequest
    lengths: dict[int, int]
    around: Enclosing
    axes: frozenset[str]

    def shape(self, depth: int = 0) -> tuple[int, ...]:
        """The shape of its scale as seen from within `depth` scans."""
        return tuple(n for d, n in sorted(self.lengths.items()) if d > depth)


class ScaleUse(NamedTuple):
    """A mark: the tensor that it reads, and whether its maximum is taken here."""

    tensor: Tensor
    records: bool


ScaleUses = dict[int, Any]
"""By the `id` of an equation: a `ScaleUse`, or the `ScaleUses` of its programs."""


@dataclass
class TensorFinder:
    """Finds the tensors of a program."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    numbers: ValueNumbers = field(default_factory=ValueNumbers)
    _by_number: dict[int, list[Tensor]] = field(default_factory=dict)
    _places: Counter[str] = field(default_factory=Counter)
    _roles: Counter[str] = field(default_factory=Counter)
    _place: str | None = None  # of the contraction whose marks are being read

    def scale_uses(self, jaxpr: Jaxpr) -> ScaleUses:
        ins = [self.numbers.new() for _ in raw(jaxpr).invars]
        return self._walk(jaxpr, ins, Enclosing())[1]

    def _walk(
        self, jaxpr: Jaxpr, ins: Sequence[int], around: Enclosing
    ) -> tuple[list[int], ScaleUses]:
        sites: ScaleUses = {}

        def number(eqn: Eqn, ins: list[int]) -> list[int]:
            outs, found = self._eqn(eqn, ins, around)
            if found:
                sites[id(eqn)] = found
            return outs

        constants = [self.numbers.of(("constant", id(x))) for x in consts(jaxpr)]
        outs = evaluate(jaxpr, ins, number, constants, self.numbers.of_literal)
        return outs, sites

    def _eqn(
        self, eqn: Eqn, ins: list[int], around: Enclosing
    ) -> tuple[list[int], Any]:
        name = eqn.primitive.name
        if eqn.primitive is SCALE:
            return self.numbers.of_results(eqn, ins), self._use(eqn, ins, around)
        handler = _call if name in INLINED else _HANDLERS.get(name)
        if handler is not None:
            outs, inner = handler(self, eqn, ins, around)
            return outs, inner if any(inner) else None
        programs = list(subjaxprs(eqn.params))
        if any(holds(inner, SCALE) for inner in programs):
            raise AmpError(
                f"`amp_with_state` can't keep histories within `{name}` "
                f"({source_line(eqn)}), which holds contractions of a rule "
                f"`float8(delayed=True)`. {_INSTEAD.get(name, _OTHERWISE)}"
            )
        if programs:
            varies = self.numbers.all_varies(ins)
            return [self.numbers.new(varies) for _ in eqn.outvars], None
        return self.numbers.of_results(eqn, ins), None

    # Marks.

    def _use(self, eqn: Eqn, ins: list[int], around: Enclosing) -> ScaleUse:
        request: ScaleRequest = eqn.params["of"]
        number, other = map(self.numbers.base_of, ins)
        axes = varying_in(eqn.outvars[0].aval)
        if request.side == 0:
            self._place = None
        alike = [
            tensor
            for tensor in self._by_number.get(number, ())
            if (tensor.request.fmt, tensor.request.length) == request[-2:]
        ]
        for tensor in alike:
            if tensor.axes == axes:
                # Outside of the branch or loop of the first mark, that one may not have
                # run, so the maximum is taken again.
                context = tensor.around.context
                return ScaleUse(tensor, around.context[: len(context)] != context)
        if alike:
            # It is one tensor, but read with two types, which say that it varies over
            # different mesh axes. A scale that is measured for one type does not fit
            # the other.
            key = f"{alike[0].name} over {sorted(axes)}"
            tensor = replace(alike[0], key=key, axes=axes, around=around)
        else:
            tensor = self._tensor(request, number, other, around, axes)
        self.tensors[tensor.key] = tensor
        self._by_number.setdefault(number, []).append(tensor)
        return ScaleUse(tensor, True)

    def _tensor(
        self,
        request: ScaleRequest,
        number: int,
        other: int,
        around: Enclosing,
        axes: frozenset[str],
    ) -> Tensor:
        varies = self.numbers.varies
        own = varies[number] & varies[other]
        for known in self._by_number.get(other, ()):
            own -= varies[other] - known.lengths.keys()
        place = self._contraction_name(request, other)
        role = "cotangent" if request.cotangent else ("lhs", "rhs")[request.side]
        key = f"{place}/{role}"
        n = self._roles[key]
        self._roles[key] += 1
        name = f"{key}#{n}" if n else key
        lengths = {d: around.lengths[d - 1] for d in own}
        return Tensor(name, name, place, request, lengths, around, axes)

    def _contraction_name(self, request: ScaleRequest, other: int) -> str:
        """The name of the contraction.

        For a cotangent, it is that of the forward contraction in the same scope."""
        if request.cotangent:
            for known in self._by_number.get(other, ()):
                if known.request.scope == request.scope:
                    return known.place
        if self._place is None:
            base = "/".join((*request.scope, request.primitive))
            n = self._places[base]
            # A contraction of a backward pass takes the next number and does not count:
            # a function and its gradient then give tensors the same names.
            self._places[base] += not request.backward
            self._place = f"{base}.{n}" if n else base
        return self._place


_OTHERWISE = (
    "Put the call that makes it under `amp_stop()`, or give its scope a rule without "
    "state, such as `float8()`."
)
_INSTEAD = {"xla_pmap": "Use `jax.shard_map` instead of `jax.pmap`."}

# How numbers flow through equations that hold programs: each function returns the
# numbers of the results, and the sites of the programs.

_Walked = tuple[list[int], tuple[ScaleUses, ...]]


def _call(self: TensorFinder, eqn: Eqn, ins: list[int], around: Enclosing) -> _Walked:
    (jaxpr,) = subjaxprs(eqn.params)
    outs, sites = self._walk(jaxpr, ins, around)
    return outs, (sites,)


def _scan(self: TensorFinder, eqn: Eqn, ins: list[int], around: Enclosing) -> _Walked:
    numbers = self.numbers
    fixed, carry, xs = scan_operands(eqn, ins)
    num_carry = len(carry)
    around = around._replace(lengths=(*around.lengths, eqn.params["length"]))
    depth = len(around.lengths)
    slices = [numbers.sliced(n, depth) for n in xs]

    def walk(finder: TensorFinder, carry: Sequence[int]) -> tuple[list[int], ScaleUses]:
        given = [*fixed, *carry, *slices]
        return finder._walk(eqn.params["jaxpr"], given, around)

    how = depth, eqn.params["length"], eqn.params["reverse"], numbers.all_varies(ins)
    # A first walk tells what becomes of the carry; nothing else of it is kept.
    entering = numbers.carried(how, carry)
    made, _ = walk(TensorFinder(numbers=numbers), entering)
    now = numbers.carried(how, entering, made[:num_carry])
    outs, sites = walk(self, now)
    last = [numbers.last(n, depth) for n in now]
    return [*last, *(numbers.stacked(n, depth) for n in outs[num_carry:])], (sites,)


def _while(self: TensorFinder, eqn: Eqn, ins: list[int], around: Enclosing) -> _Walked:
    params = eqn.params
    for_cond, for_body, _ = while_operands(eqn, ins)
    anything = self.numbers.all_varies(ins)
    carry = [self.numbers.new(anything) for _ in eqn.outvars]
    around = around.within(("while", carry[0]))
    _, cond = self._walk(params["cond_jaxpr"], [*for_cond, *carry], around)
    _, body = self._walk(params["body_jaxpr"], [*for_body, *carry], around)
    return [self.numbers.new(anything) for _ in eqn.outvars], (cond, body)


def _cond(self: TensorFinder, eqn: Eqn, ins: list[int], around: Enclosing) -> _Walked:
    index, *operands = ins
    made = []
    for i, branch in enumerate(eqn.params["branches"]):
        given = [self.numbers.in_branch(n, index, i) for n in operands]
        made.append(self._walk(branch, given, around.within(("cond", index, i))))
    outs = zip(*(outs for outs, _ in made), strict=True)
    return [self.numbers.chosen(index, out) for out in outs], tuple(
        sites for _, sites in made
    )


def _shard_map(
    self: TensorFinder, eqn: Eqn, ins: list[int], around: Enclosing
) -> _Walked:
    options = shard_map_options(eqn.params)

    def of(specs: Any, numbers: list[int], function: Any) -> list[int]:
        pairs = zip(numbers, specs, strict=True)
        return [function(n, (options["mesh"], str(spec))) for n, spec in pairs]

    given = of(options["in_specs"], ins, self.numbers.entering_shard_map)
    around = around._replace(axes=around.axes | mapped_axes(options))
    outs, sites = self._walk(eqn.params["jaxpr"], given, around)
    return of(options["out_specs"], outs, self.numbers.leaving_shard_map), (sites,)


def mapped_axes(shard_map: Mapping[str, Any]) -> frozenset[str]:
    """The mesh axes that a `shard_map` with these options maps over."""
    return frozenset(shard_map["axis_names"] or shard_map["mesh"].axis_names)


_HANDLERS = {"scan": _scan, "while": _while, "cond": _cond, "shard_map": _shard_map}
