"""Loops that stop without an end: from then on, they hand a carry on as it is.

    z = jnp.where(done, z, step(z))
    done = done | (error(z) < tolerance)

A loop with a bound is written so, by `cond` or by `where`, and so is one that is mapped
over a batch. That a carry is handed on once is no such thing: a recurrent network skips
the steps that a mask leaves out, and a training step whose gradient is too large. What
decides must decide the same from then on: so its way through one iteration is followed
under the assumption that it has decided."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from .._dtypes import is_float
from .._jax import Literal, raw, scopes
from .._structural import Body
from .flow import NONE, Flow, Flows, Indices, Scope, is_ref
from .value_numbers import CHOICE, INPUT, LITERAL, Inlined, Made, hands_on, is_call

# What is known of a truth value is known of it in another shape or type.
_PASSING = frozenset("broadcast_in_dim convert_element_type reshape squeeze".split())

Sign = tuple[int, Any]  # a value by its number, and what it is assumed to be


class Value(NamedTuple):
    """What is known of a value in one iteration.

    Attributes:
        inputs: of the body, those that it is made of.
        is_low: whether anything low was on the way.
        source: the input that it is, as it came in.
        new: what it is made of where it is no input as it came in.
        known: what it is, if that is known."""

    inputs: Indices = NONE
    is_low: bool = False
    source: int | None = None
    new: Indices = NONE
    known: Any = None


def stops(flows: Flows, body: Body, scope: Scope, fixed: Indices) -> bool:
    """Whether what low numbers are compared with keeps carries as they are for good.

    Args:
        flows: by which comparisons are known.
        body: of a loop.
        scope: of the loop.
        fixed: inputs of the body that are the same in all iterations."""
    if not _may_hand_on(flows, body, scope):
        return False
    loop = _Loop(flows, body, scope, fixed)
    return any(loop.stops_by(*sign, kept) for sign, kept in loop.signs().items())


def _may_hand_on(flows: Flows, body: Body, scope: Scope) -> bool:
    """Whether a result that becomes an input is chosen: told without a look inside."""

    def is_chosen(jaxpr: Any, v: Any) -> bool:
        index = flows.index(jaxpr)
        if isinstance(v, Literal) or v not in index.makers:
            return False
        place, i = index.makers[v]
        eqn = raw(jaxpr).eqns[place]
        if eqn.primitive.name in ("cond", "select_n"):
            return True
        bodies = flows.bodies(eqn, scope + scopes(eqn))
        if is_call(bodies):
            (inner,) = bodies
            outs = dict(zip(inner.outs, raw(inner.jaxpr).outvars, strict=True))
            return is_chosen(inner.jaxpr, outs[i])
        return hands_on(eqn) and is_chosen(jaxpr, eqn.invars[i])

    results = raw(body.jaxpr).outvars
    return any(is_chosen(body.jaxpr, results[out]) for out, _ in body.loop)


class _Loop:
    def __init__(self, flows: Flows, body: Body, scope: Scope, fixed: Indices):
        self.flows, self.body, self.scope = flows, body, scope
        self.invars = raw(body.jaxpr).invars
        self.fixed = frozenset(i for i in fixed if not is_ref(self.invars[i]))
        self.program = Inlined(flows, body.jaxpr, scope)
        self.next_of = {i: self.program.outs[out] for out, i in body.loop}
        self.values = self._values(range(len(self.program.made)), {})

    def signs(self) -> dict[Sign, set[int]]:
        """What may decide that carries are handed on, each enough by itself: which."""
        found: dict[Sign, set[int]] = {}
        for made in self.program.made:
            if made.by == CHOICE:
                which, *cases = made.of
                for k, case in enumerate(cases):
                    source = self.values[case].source
                    if source is None or source not in self.next_of:
                        continue
                    picks = bool(k) if len(cases) == 2 else k
                    for sign in self._parts(which, picks):
                        found.setdefault(sign, set()).add(source)
        return found

    def _parts(self, n: int, value: Any) -> Iterator[Sign]:
        made = self.program.made[n]
        if made.by == "not":
            yield from self._parts(made.of[0], not value)
        elif made.by in _PASSING:
            yield from self._parts(made.of[0], value)
        elif made.by == ("or" if value else "and"):
            for operand in made.of:
                yield from self._parts(operand, value)
        else:
            yield n, value

    def stops_by(self, n: int, value: Any, kept: set[int]) -> bool:
        """Whether carries of those that are `kept` are so from then on.

        From where the value `n` is what says so."""
        read = self.values[n].inputs - self.fixed
        if not read or not read <= self.next_of.keys():
            return False
        if not (self.values[n].is_low or self._before(read).is_low):
            return False
        assumed: dict[int, Any] = {}
        self._assume(n, value, assumed)
        next_of = {i: self.next_of[i] for i in self._reached({*read, *kept})}
        then = self._values(self.program.slice(next_of.values()), assumed)
        return read <= self._settled(next_of, then, assumed) and any(
            then[next_of[i]].source == i and self._iterates(i) for i in kept
        )

    def _reached(self, carries: set[int]) -> set[int]:
        """With what these carries are made of, through any number of iterations."""
        reached, found = set[int](), carries
        while found:
            reached |= found
            made_of = (self.values[self.next_of[i]].inputs for i in found)
            found = self.next_of.keys() & NONE.union(*made_of) - reached
        return reached

    def _before(self, inputs: Indices) -> Flow:
        """What inputs are made of, through any number of iterations."""
        operands = frozenset(self.body.ins[i] for i in inputs)
        return self.flows.through([self.body], self.scope, Flow(operands))

    def _iterates(self, i: int) -> bool:
        """Whether a carry is a float that is made of itself, if it is not handed on."""
        aval: Any = self.invars[i].aval
        value = self.values[self.next_of[i]]
        if value.source == i or not is_float(aval.dtype):
            return False
        return self.body.ins[i] in self._before(value.new).inputs

    def _assume(self, n: int, value: Any, assumed: dict[int, Any]) -> None:
        """Adds what is known if a value is."""
        assumed[n] = value
        made = self.program.made[n]
        if made.by == "not":
            self._assume(made.of[0], not value, assumed)
        elif made.by in (*_PASSING, "reduce_and" if value else "reduce_or"):
            self._assume(made.of[0], value, assumed)
        elif made.by == ("and" if value else "or"):
            for operand in made.of:
                self._assume(operand, value, assumed)

    def _settled(
        self,
        next_of: dict[int, int],
        then: dict[int, Value],
        assumed: dict[int, Any],
    ) -> set[int]:
        """The carries that decide the same in the next iteration as in this one.

        Those that are handed on, and what is made of such alone. What is made of itself
        may go on to anything: a counter, the key of random numbers."""
        settled: set[int] = set()
        size = -1
        while len(settled) != size:
            size = len(settled)
            for i, out in next_of.items():
                value, before = then[out], assumed.get(i)
                if value.source == i:
                    stays = True
                elif value.known is not None:
                    stays = before is None or before == value.known
                else:
                    stays = value.source is None and value.inputs <= (
                        settled | self.fixed
                    )
                if stays:
                    settled.add(i)
        return settled

    def _values(
        self, numbers: Iterable[int], assumed: dict[int, Any]
    ) -> dict[int, Value]:
        values: dict[int, Value] = {}
        for n in numbers:
            made = self.program.made[n]
            value = _value(made, [values[k] for k in made.of])
            known = n in assumed
            values[n] = value._replace(known=assumed[n]) if known else value
        return values


def _value(made: Made, operands: list[Value]) -> Value:
    if made.by == INPUT:
        return Value(frozenset([made.value]), source=made.value)
    if made.by == LITERAL:
        return Value(known=made.value)
    if made.ends:
        return Value()
    inputs = NONE.union(*(x.inputs for x in operands))
    is_low = made.is_low or any(x.is_low for x in operands)
    if made.by != CHOICE:
        known = _known(made.by, [x.known for x in operands])
        return Value(inputs, is_low, new=inputs, known=known)
    which, *cases = operands
    if which.known is not None and int(which.known) < len(cases):
        return cases[int(which.known)]
    return Value(inputs, is_low, new=NONE.union(*(x.new for x in cases)))


def _known(by: str, operands: list[Any]) -> Any:
    """What an operation makes of truth values, of which some are known."""
    if by == "not":
        return None if operands[0] is None else not operands[0]
    if by in _PASSING or by in ("reduce_and", "reduce_or"):
        return operands[0]
    if by in ("and", "or"):
        decides = by == "or"
        if any(x is decides for x in operands):
            return decides
        return None if None in operands else not decides
    return None
