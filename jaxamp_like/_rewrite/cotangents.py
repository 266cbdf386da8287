"""Which operands of an equation are cotangents, in which a backward pass is linear.

Rules may round cotangents differently from other operands: float8 has a dtype of wider
range for them. The place of an operand does not tell. JAX puts the cotangent first in
a contraction that it transposes, but the author of a derivative rule may put it
anywhere. So cotangents are followed through the program, from where they begin.

How they spread: if an equation of a backward pass reads a cotangent, the floats that it
makes are cotangents, whatever else it reads, since they have a cotangent's range. What
a backward pass makes of other values alone is not one, such as the attention scores
that a derivative rule computes again. Masks and indices are no floats, and so never
are. What `jax.checkpoint` runs again is a forward pass, and reads no cotangents.

Where they begin:

- In a backward rule that an author wrote, they are inputs of the rule.
- In a program that is part of a backward pass, the caller says which inputs are
  cotangents; then no other input is one.
- In code that JAX has transposed already, the name stack of each equation tells whether
  it is of a forward pass (`jvp`), of its backward pass (`transpose(jvp)`) or of
  neither. A cotangent is the 1 that `jax.grad` begins with, or a value that is made
  outside of the forward pass and not read by it, such as the argument of a function
  that `jax.vjp` returned. If there is no such value, it is the first operand of the
  backward pass's first linear equation."""

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .._jax import Eqn, Jaxpr, Literal, names, raw, subjaxprs
from .._primitives import CONTRACTIONS, EACH_ALONE, IDENTITIES, LINEAR
from .._rules import author_dtype
from .._structural import STRUCTURAL, Scope
from .memo import Memo
from .reach import Reach, ReachAnalysis, of_input, union

Flags = tuple[bool, ...]
"""Of each input or operand, whether it is a cotangent; `()` if none is."""

Phases = tuple[str, ...]

_BACKWARD = "transpose"

# Primitives that may read the 1 that JAX begins with. Where JAX adds, it binds
# `add_any`, so that `add` is none of them.
_LINEAR = CONTRACTIONS | (LINEAR - {"add", "sub"}) | set(
    "mul div add_any scatter-add scatter_add".split()
)  # fmt: skip


class _FromCotangents(ReachAnalysis):
    """What is made of a cotangent, by way of floats alone."""

    reads_scopes = False

    def __init__(self) -> None:
        super().__init__(lambda eqn, scope: STRUCTURAL.get(eqn.primitive.name))

    def of_leaf(
        self, eqn: Eqn, scope: Scope, operands: Sequence[Reach]
    ) -> Sequence[Reach]:
        outs = [union(operands)] * len(eqn.outvars)
        if eqn.primitive.name in EACH_ALONE and len(operands) == len(outs):
            outs = operands
        pairs = zip(eqn.outvars, outs, strict=True)
        return [reach if author_dtype(v.aval) else 0 for v, reach in pairs]


@dataclass(eq=False)
class Cotangents:
    """Finds the cotangents of programs, and remembers them while these live."""

    _reaches: _FromCotangents = field(default_factory=_FromCotangents)
    _found: Memo = field(default_factory=Memo)
    _contracting: Memo = field(default_factory=Memo)

    def of(
        self, jaxpr: Jaxpr, given: Flags, is_backward: bool, is_rule: bool = False
    ) -> Sequence[Flags]:
        """For each equation of `jaxpr`, which of its operands are cotangents.

        `given` says which inputs are cotangents, `is_backward` whether all of the
        program is part of a backward pass, and `is_rule` whether it is an author's
        backward rule."""
        key = given, is_backward, is_rule
        return self._found(jaxpr, key, lambda: self._find(raw(jaxpr), *key))

    def inside(self, eqn: Eqn, which: Flags) -> dict[Jaxpr, Flags]:
        """Which inputs of programs in `eqn` are cotangents, if `which` operands are.

        Programs without a contraction are left out, so that they have the same plan
        wherever they are called."""
        if not any(which):
            return {}
        found: dict[Jaxpr, Flags] = {}
        bodies = self._reaches.bodies(eqn, ())
        now = self._reaches.of_operands(
            eqn, bodies, (), [of_input(0) * x for x in which]
        )
        for body in bodies:
            if self._contracts(body.jaxpr):
                inner = tuple(bool(now[i]) for i in body.ins)
                before = found.get(body.jaxpr, (False,) * len(inner))
                pairs = zip(inner, before, strict=True)
                found[body.jaxpr] = tuple(x or y for x, y in pairs)
        return found

    def _find(
        self, jaxpr: Any, given: Flags, is_backward: bool, is_rule: bool
    ) -> Sequence[Flags]:
        starts = _CotangentSources(jaxpr, is_rule, are_given=is_backward and any(given))
        known = {jaxpr.invars[i] for i, is_one in enumerate(given) if is_one}
        if is_backward:
            outer = set(known)  # made of cotangents that came in
            found = []
            for k, eqn in enumerate(jaxpr.eqns):
                which = self._propagate(eqn, _those_in(outer, eqn), outer)
                is_part = any(which) or not starts.are_recomputed_at(k)
                found.append(self._which(starts, k, known) if is_part else ())
            return found
        found: list[Flags] = [()] * len(jaxpr.eqns)
        for run in starts.runs():
            rows = [self._which(starts, k, known) for k in run]
            if not any(rows):
                rows = [self._which(starts, k, known, perhaps=True) for k in run]
            if not any(rows) and (first := starts.first_of(run)) is not None:
                known.add(first)
                rows = [self._which(starts, k, known) for k in run]
                known.remove(first)
            for k, row in zip(run, rows, strict=True):
                found[k] = row
        return found

    def _which(
        self,
        starts: "_CotangentSources",
        k: int,
        known: set[Any],
        perhaps: bool = False,
    ) -> Flags:
        """Which operands of equation `k` are cotangents; adds to those `known`."""
        eqn = starts.eqns[k]
        which = _those_in(known, eqn)
        if starts.are_possible_at(k) and (
            not any(which) or self._reaches.bodies(eqn, ())
        ):
            for i in starts.of(k, perhaps):
                which[i] = True
        return self._propagate(eqn, which, known)

    def _propagate(self, eqn: Eqn, which: Sequence[bool], known: set[Any]) -> Flags:
        """Returns `which` or `()`; adds those, and what they make, to `known`."""
        if not any(which):
            return ()
        pairs = zip(eqn.invars, which, strict=True)
        known |= {x for x, is_one in pairs if is_one and _is_var(x)}
        made = self._reaches.of_equation(eqn, (), [of_input(0) * x for x in which])
        pairs = zip(eqn.outvars, made, strict=True)
        known |= {v for v, reach in pairs if reach}
        return tuple(which)

    def _contracts(self, jaxpr: Jaxpr) -> bool:
        def find() -> bool:
            return any(
                eqn.primitive.name in CONTRACTIONS
                or any(map(self._contracts, subjaxprs(eqn.params)))
                for eqn in raw(jaxpr).eqns
            )

        return self._contracting(jaxpr, (), find)


class _CotangentSources:
    """Where cotangents begin, in a program that JAX has transposed."""

    def __init__(self, jaxpr: Any, is_rule: bool, are_given: bool):
        self.eqns = jaxpr.eqns
        self.phases = [_phases(eqn, is_rule) for eqn in jaxpr.eqns]
        # A backward rule may hold a backward pass alone, whose residuals it is handed.
        self.has_forwards = not is_rule or any(
            "jvp" in phases and _BACKWARD not in phases for phases in self.phases
        )
        given = (*jaxpr.invars, *jaxpr.constvars)
        self.made: dict[Any, Phases] = dict.fromkeys(given, ())
        # Where some inputs are cotangents, the others are known to be none.
        self.forwarded = set(given) if are_given else set()
        self.read: dict[Any, set[Phases]] = defaultdict(set)
        # For each value: the phases that read every float that it is made of, either
        # that itself or what it is made of in turn.
        self.made_of: dict[Any, set[Phases]] = defaultdict(set)
        if not any(_BACKWARD in phases for phases in self.phases):
            return
        for eqn, phases in zip(jaxpr.eqns, self.phases, strict=True):
            if eqn.primitive.name in IDENTITIES:
                pairs = zip(eqn.invars, eqn.outvars, strict=True)
                self.forwarded |= {
                    v for x, v in pairs if _is_var(x) and x in self.forwarded
                }
            self.made |= dict.fromkeys(eqn.outvars, phases)
            for atom in filter(_is_var, eqn.invars):
                self.read[atom].add(phases)
        # JAX moves what is the same in all iterations of a forward pass out of its
        # loop, with what the backward pass reads of that. So a value counts as read
        # wherever something that is made of it is read.
        forwards = [
            eqn
            for eqn, phases in zip(jaxpr.eqns, self.phases, strict=True)
            if _BACKWARD not in phases
        ]
        for eqn in reversed(forwards):
            later = set().union(*(self.read[v] for v in eqn.outvars))
            for atom in (*filter(_is_var, eqn.invars), *eqn.outvars):
                self.read[atom] |= later
        for eqn in forwards:
            atoms = [x for x in filter(_is_var, eqn.invars) if author_dtype(x.aval)]
            of = [self.read[x] | self.made_of[x] for x in atoms]
            for v in eqn.outvars:
                self.made_of[v] = set.intersection(*of) if of else set()

    def are_possible_at(self, k: int) -> bool:
        return _BACKWARD in self.phases[k]

    def are_recomputed_at(self, k: int) -> bool:
        """Whether an equation of a backward pass is named as one of a forward pass.

        JAX 0.6 also gives this name to what it transposed of a call in a checkpoint."""
        return names(self.eqns[k]).recomputed and not self.are_possible_at(k)

    def runs(self) -> Iterator[list[int]]:
        """The runs of equations, one after the other, that are of a backward pass."""
        ks = range(len(self.eqns))
        for is_backward, run in itertools.groupby(ks, self.are_possible_at):
            if is_backward:
                yield list(run)

    def first_of(self, run: list[int]) -> Any:
        """The cotangent that a run begins with, if the forward pass makes or reads it.

        A result of a function may be handed to what `jax.vjp` returns, as it is. JAX
        reads it as the first operand of the first linear equation that it makes."""
        first = (
            e.invars[0] for k in run if (e := self.eqns[k]).primitive.name in _LINEAR
        )
        return next((x for x in first if _is_var(x) and author_dtype(x.aval)), None)

    def of(self, k: int, perhaps: bool) -> list[int]:
        """The operands of an equation at which a cotangent begins.

        With `perhaps`, these may be made of values that a forward pass reads: this is
        asked if nothing else is found."""
        eqn, phases = self.eqns[k], self.phases[k]
        before = phases[: phases.index(_BACKWARD)]
        found = [
            i
            for i, atom in enumerate(eqn.invars)
            if author_dtype(atom.aval)
            and (
                self._is_outside(atom, before, perhaps)
                if _is_var(atom)
                else _is_one(eqn, i)
            )
        ]
        # In a contraction, JAX puts the cotangent first.
        return found[:1] if eqn.primitive.name in CONTRACTIONS else found

    def _is_outside(self, var: Any, before: Phases, perhaps: bool) -> bool:
        """Whether a value is made outside of a forward pass, which doesn't read it."""
        made = self.made[var]
        if made != before[: len(made)] or not self.has_forwards:
            return False
        if var in self.forwarded:
            return False
        forward = (*before, "jvp")
        read = self.read[var] if perhaps else self.read[var] | self.made_of[var]
        return not any(by[: len(forward)] == forward for by in read)


def _phases(eqn: Eqn, is_rule: bool) -> Phases:
    """The derivatives that an equation is part of, the outermost first.

    In an author's backward rule, the derivative that it is the rule of, and those
    around that, are left out."""
    phases = names(eqn).phases
    if is_rule and _BACKWARD in phases:
        return phases[phases.index(_BACKWARD) + 2 :]
    return phases


def _is_one(eqn: Eqn, i: int) -> bool:
    """Whether a literal may be the 1 that `jax.grad` begins with."""
    atom, name = eqn.invars[i], eqn.primitive.name
    is_linear = name in _LINEAR and (name != "div" or i == 0)
    is_linear |= any(True for _ in subjaxprs(eqn.params))
    is_weak = getattr(atom.aval, "weak_type", False)  # written by an author
    return is_linear and not is_weak and np.ndim(atom.val) == 0 and atom.val == 1


def _those_in(known: set[Any], eqn: Eqn) -> list[bool]:
    return [_is_var(x) and x in known for x in eqn.invars]


def _is_var(atom: Any) -> bool:
    return not isinstance(atom, Literal)
