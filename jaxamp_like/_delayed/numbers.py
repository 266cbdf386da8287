"""Which values of a program are one and the same, told from the program alone.

Values get numbers as in `value_numbers`. So a value of the forward pass has one number
where the backward pass keeps it or makes it again, through loops and branches too. A
number in the body of a scan stands for a value of each iteration, by its place in what
the scan reads and makes."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from .._jax import Eqn, Literal
from .._primitives import IDENTITIES, WHOLE_VIEWS
from .._rewrite.value_numbers import operation_of, value_of

_NONE: frozenset[int] = frozenset()


class Numbers:
    """The numbers of values, and by which loops a value varies.

    Loops are named by how many are around their body: 1, 2, ..."""

    def __init__(self) -> None:
        self._known: dict[Hashable, int] = {}
        self._made: list[Any] = []
        self.varies: list[frozenset[int]] = []
        self._shown: dict[int, int] = {}

    def of(self, made: Hashable, varies: frozenset[int] = _NONE) -> int:
        """The number of a value, by how it is made: equal values have one number."""
        number = self._known.setdefault(made, len(self._made))
        if number == len(self._made):
            self._made.append(made)
            self.varies.append(varies)
        return number

    def shown(self, number: int) -> int:
        """The number of the value that a view shows; if it is no view, its own."""
        return self._shown.get(number, number)

    def new(self, varies: frozenset[int] = _NONE) -> int:
        """The number of a value like no other."""
        return self.of(("new", len(self._made)), varies)

    def all_varies(self, numbers: Sequence[int]) -> frozenset[int]:
        return _NONE.union(*(self.varies[n] for n in numbers))

    def of_literal(self, atom: Literal) -> int:
        return self.of(value_of(atom))

    def of_results(self, eqn: Eqn, ins: Sequence[int]) -> list[int]:
        """The numbers of what an equation makes that holds no program."""
        name = eqn.primitive.name
        if name in IDENTITIES:
            return list(ins)
        varies = self.all_varies(ins)
        if name == "convert_element_type":
            return [self._cast(eqn, ins[0])]
        made = operation_of(eqn)
        if made is None:
            return [self.new(varies) for _ in eqn.outvars]
        outs = [self.of((i, made, *ins), varies) for i in range(len(eqn.outvars))]
        if name in WHOLE_VIEWS:
            self._shown[outs[0]] = self.shown(ins[0])
        return outs

    def _cast(self, eqn: Eqn, number: int) -> int:
        """The number of a cast; what a body made is numbered as if cast in there."""
        kind, *how = self._made[number]
        if kind == "stacked":
            return self.stacked(self._cast(eqn, how[1]), how[0])
        if kind == "global":
            return self.whole(self._cast(eqn, how[1]), how[0])
        if kind == "chosen":
            return self.chosen(how[0], tuple(self._cast(eqn, n) for n in how[1]))
        made = ("cast", *eqn.params.items(), number)
        out = self.of(made, self.varies[number])
        if number in self._shown:
            self._shown[out] = self._cast(eqn, self._shown[number])
        return out

    # Loops, branches, shards: what came out of one has its old number if it goes in.

    def sliced(self, number: int, depth: int) -> int:
        """What each iteration sees of a value that a scan goes through."""

        def inside(n: int) -> int:
            return self.of(("sliced", depth, n), self.varies[n] | {depth})

        return self._entering(number, ("stacked", depth), inside)

    def stacked(self, number: int, depth: int) -> int:
        """What a scan makes of the values of its iterations."""
        return self.of(("stacked", depth, number), self.varies[number] - {depth})

    def carried(
        self, how: tuple[Any, ...], init: Sequence[int], made: Sequence[int] = ()
    ) -> list[int]:
        """What each iteration sees of carries that begin as `init`.

        Carries of loops that go on in the same way get equal numbers. `how` is the
        depth, length and direction of the loop, and what it varies by. `made` is what
        an iteration makes of carries that have the numbers which `carried` gives
        without `made`."""
        depth, *_, varies = how
        loop = "carried", *how, tuple(init), tuple(made)
        return [self.of((*loop, i), varies | {depth}) for i in range(len(init))]

    def last(self, number: int, depth: int) -> int:
        """What a scan makes of a carry."""
        return self.of(("last", number), self.varies[number] - {depth})

    def in_branch(self, number: int, index: int, branch: int) -> int:
        """What a branch gets if it is given `number`."""
        out = "chosen", index
        return self._entering(number, out, lambda n: n, lambda outs: outs[branch])

    def chosen(self, index: int, outs: tuple[int, ...]) -> int:
        """What comes of branches that make `outs`."""
        varies = self.all_varies([index, *outs])
        return self.of(("chosen", index, outs), varies)

    def local(self, number: int, spec: Hashable) -> int:
        """What the body of a `shard_map` gets of a value."""

        def inside(n: int) -> int:
            return self.of(("local", spec, n), self.varies[n])

        return self._entering(number, ("global", spec), inside)

    def whole(self, number: int, spec: Hashable) -> int:
        """What comes out of the body of a `shard_map`."""
        return self.of(("global", spec, number), self.varies[number])

    def _entering(
        self,
        number: int,
        out: tuple[str, Hashable],
        inside: Callable[[int], int],
        of_made: Callable[[Any], int] = lambda made: made,
    ) -> int:
        """What a body sees of a value that goes in.

        If the value came `out` of such a body, its number is the one that it had there.
        The number of a cast is that of a cast inside of the body. For any other value,
        `inside` gives the number."""
        made = self._made[number]
        if made[:2] == out:
            return of_made(made[2])
        if made[0] != "cast":
            return inside(number)
        *how, before = made
        seen = self._entering(before, out, inside, of_made)
        return self.of((*how, seen), self.varies[seen])
