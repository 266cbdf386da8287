"""Which values of a program are one and the same, told from the program alone.

Values get numbers as in `value_numbers`: equal values get the same number. So a value
of the forward pass keeps its number where the backward pass reads it or computes it
again, through loops and branches too. In the body of a scan, a number stands for one
value in each iteration."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from .._jax import Eqn, Literal
from .._primitives import IDENTITIES, WHOLE_VIEWS
from .._rewrite.value_numbers import operation_of, value_of

_NONE: frozenset[int] = frozenset()


class ValueNumbers:
    """The numbers of values, and the scans in whose iterations a value differs.

    A scan is named by its depth, the number of scans around its body: 1, 2, ..."""

    def __init__(self) -> None:
        self._known: dict[Hashable, int] = {}
        self._definitions: list[Any] = []
        self.varies: list[frozenset[int]] = []
        self._base: dict[int, int] = {}

    def of(self, made: Hashable, varies: frozenset[int] = _NONE) -> int:
        """The number of a value, by how it is made: equal values have one number."""
        number = self._known.setdefault(made, len(self._definitions))
        if number == len(self._definitions):
            self._definitions.append(made)
            self.varies.append(varies)
        return number

    def base_of(self, number: int) -> int:
        """The number of the value that a view shows; if it is no view, its own."""
        return self._base.get(number, number)

    def new(self, varies: frozenset[int] = _NONE) -> int:
        """The number of a value like no other."""
        return self.of(("new", len(self._definitions)), varies)

    def all_varies(self, numbers: Sequence[int]) -> frozenset[int]:
        return _NONE.union(*(self.varies[n] for n in numbers))

    def of_literal(self, atom: Literal) -> int:
        return self.of(value_of(atom))

    def of_results(self, eqn: Eqn, ins: Sequence[int]) -> list[int]:
        """The numbers of the results of an equation that holds no program."""
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
            self._base[outs[0]] = self.base_of(ins[0])
        return outs

    def _cast(self, eqn: Eqn, number: int) -> int:
        """The number of a cast value.

        What the body of a scan, a branch or a `shard_map` made gets the number that it
        would have if it were cast in there."""
        kind, *how = self._definitions[number]
        if kind == "stacked":
            return self.stacked(self._cast(eqn, how[1]), how[0])
        if kind == "global":
            return self.leaving_shard_map(self._cast(eqn, how[1]), how[0])
        if kind == "chosen":
            return self.chosen(how[0], tuple(self._cast(eqn, n) for n in how[1]))
        made = ("cast", *eqn.params.items(), number)
        out = self.of(made, self.varies[number])
        if number in self._base:
            self._base[out] = self._cast(eqn, self._base[number])
        return out

    # A value that came out of a scan, branch or `shard_map` and goes into a like one
    # gets the number there that it had inside.

    def sliced(self, number: int, depth: int) -> int:
        """What each iteration sees of a value that a scan slices."""

        def inside(n: int) -> int:
            return self.of(("sliced", depth, n), self.varies[n] | {depth})

        return self._entering(number, ("stacked", depth), inside)

    def stacked(self, number: int, depth: int) -> int:
        """What a scan stacks of the values of its iterations."""
        return self.of(("stacked", depth, number), self.varies[number] - {depth})

    def carried(
        self, how: tuple[Any, ...], init: Sequence[int], made: Sequence[int] = ()
    ) -> list[int]:
        """What each iteration sees of carries that begin as `init`.

        The carries of two loops get equal numbers if the loops begin and iterate alike.
        `how` is the depth, length and direction of the loop, and the scans by which its
        operands vary. To know how a loop iterates, its body is walked with the numbers
        that `carried` gives without `made`; `made` are the numbers that come out."""
        depth, *_, varies = how
        loop = "carried", *how, tuple(init), tuple(made)
        return [self.of((*loop, i), varies | {depth}) for i in range(len(init))]

    def last(self, number: int, depth: int) -> int:
        """The final value of a carry of a scan."""
        return self.of(("last", number), self.varies[number] - {depth})

    def in_branch(self, number: int, index: int, branch: int) -> int:
        """What a branch sees of a value that goes into it."""
        out = "chosen", index
        return self._entering(number, out, lambda n: n, lambda outs: outs[branch])

    def chosen(self, index: int, outs: tuple[int, ...]) -> int:
        """The result of branches that make `outs`."""
        varies = self.all_varies([index, *outs])
        return self.of(("chosen", index, outs), varies)

    def entering_shard_map(self, number: int, spec: Hashable) -> int:
        """What the body of a `shard_map` sees of a value."""

        def inside(n: int) -> int:
            return self.of(("local", spec, n), self.varies[n])

        return self._entering(number, ("global", spec), inside)

    def leaving_shard_map(self, number: int, spec: Hashable) -> int:
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

        If the value came `out` of such a body, it gets the number that it had there. If
        it is a cast of another value, it is numbered as if that were cast inside. For
        any other value, `inside` gives the number."""
        made = self._definitions[number]
        if made[:2] == out:
            return of_made(made[2])
        if made[0] != "cast":
            return inside(number)
        *how, before = made
        seen = self._entering(before, out, inside, of_made)
        return self.of((*how, seen), self.varies[seen])
