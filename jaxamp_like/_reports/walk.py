"""Reading a traced program: every equation, at any depth, with where it stands."""

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from .._dtypes import bits, is_float
from .._jax import (
    Atom,
    Eqn,
    Jaxpr,
    Literal,
    eqns_read,
    names,
    raw,
    source_line,
    subjaxprs,
    variables,
)
from .._policies.dictionary import REWRITTEN
from .._primitives import CONTRACTIONS
from .._primitives.contractions import summed_axes
from .._quantised.block_dot import BLOCK_DOT
from .._rewrite.record import number_in
from .._rewrite.solvers import without_solver_scope
from .._structural import SOLVER, STRUCTURAL, Step
from .._structural.saved import is_marked_saved
from .convolutions import multiply_adds
from .data.records import Phase, Place, SavedRecord, widest

_PACKAGE = str(Path(__file__).parent.parent)


@dataclass(frozen=True, slots=True)
class ReportContext:
    """What is known of the surroundings of an equation, or of the equations inside it.

    `step` is the step of a plan that the equation was bound for, `base` the scope
    around the `amp` that planned it, and `source` the line of the call that it is in:
    inside of JAX's own jitted functions (`jnp.linalg.norm`), JAX knows of no line."""

    scope: tuple[str, ...] = ()
    inside: tuple[str, ...] = ()
    phase: Phase = "forward"
    times: int = 1
    step: Step | None = None
    in_amp: bool = False
    base: tuple[str, ...] = ()
    source: str = ""

    def at(self, eqn: Eqn, steps: Sequence[Step]) -> "ReportContext":
        """The same for the equation itself, by its own name stack."""
        own = names(eqn)
        phase, step, in_amp, base = self.phase, self.step, self.in_amp, self.base
        scope = self.scope
        for name in own.scopes:
            if name == REWRITTEN:
                in_amp, base = True, scope
            elif (number := number_in(name)) is not None:
                step = steps[number] if number < len(steps) else step
            elif name != SOLVER:
                scope = (*scope, name)
        if step is not None and step is not self.step:
            # The name stack of what JAX moves out of a loop lacks the scopes around it.
            scope = (*base, *without_solver_scope(step.scope))
        if own.backward and phase == "forward":
            phase = "backward"
        # In a checkpoint, JAX 0.6 names what comes of transposing a call as if it were
        # recomputed; only the plan tells that it is not.
        is_gradient = step is not None and step.backward and not own.backward
        if own.recomputed and not is_gradient:
            phase = "recomputed"
        return dataclasses.replace(
            self, scope=scope, phase=phase, step=step, in_amp=in_amp, base=base
        )

    def within(self, eqn: Eqn) -> "ReportContext":
        """The same for the programs that the equation holds."""
        params, name = eqn.params, eqn.primitive.name
        label = f"{name} {params['name']}" if name in ("jit", "pjit") else name
        times = self.times * params["length"] if name == "scan" else self.times
        inside, source = (*self.inside, label), self.source_of(eqn)
        return dataclasses.replace(self, inside=inside, times=times, source=source)

    def place(self, eqn: Eqn) -> Place:
        scope = "/".join(self.scope)
        return Place(scope, self.inside, self.phase, self.source_of(eqn), self.times)

    def source_of(self, eqn: Eqn) -> str:
        """Where the author wrote it, or the call that led to it."""
        return source_of(eqn) or self.source


def walk(
    jaxpr: Jaxpr, steps: Sequence[Step], around: ReportContext | None = None
) -> Iterator[tuple[Eqn, ReportContext, bool]]:
    """Yields every equation with what is around it, and whether it holds programs.

    Of code that amp does not look into (reducers, kernels), only casts and contractions
    are yielded."""
    around = around or ReportContext()
    for eqn in raw(jaxpr).eqns:
        at = around.at(eqn, steps)
        inner = list(subjaxprs(eqn.params))
        is_structural = bool(inner) and eqn.primitive.name in STRUCTURAL
        yield eqn, at, is_structural
        within = at.within(eqn) if inner else at
        for sub in inner:
            for found in walk(sub, steps, within):
                if is_structural or is_float_cast(found[0]) or flops(found[0]):
                    yield found


@functools.lru_cache(maxsize=4096)
def _short(summary: str) -> str:
    # The casts of results come from no equation of the author's: their line is amp's.
    return "" if summary.startswith(_PACKAGE) else summary


def source_of(eqn: Eqn) -> str:
    """Where the author wrote it: file, line and function."""
    return _short(source_line(eqn))


def flops(eqn: Eqn) -> int:
    """Multiply-adds of a contraction, times two; 0 of anything else.

    Of a convolution, those that XLA counts: none with padding or holes."""
    if eqn.primitive.name not in CONTRACTIONS and eqn.primitive is not BLOCK_DOT:
        return 0
    lhs, rhs = (atom.aval for atom in eqn.invars[:2])
    size = size_of(eqn.outvars[0].aval)
    if eqn.primitive.name == "conv_general_dilated":
        out = eqn.outvars[0].aval.shape
        return 2 * multiply_adds(eqn.params, lhs.shape, rhs.shape, out)
    return 2 * size * prod(summed_axes(eqn.params, [lhs, rhs]))


def is_float_cast(eqn: Eqn) -> bool:
    if eqn.primitive.name != "convert_element_type":
        return False
    old, new = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
    return old != new and is_float(old) and is_float(new)


def dtype_names(atoms: Sequence[Atom]) -> tuple[str, ...]:
    """The names of the floating dtypes among the atoms' dtypes."""
    return dtype_names_of(atom.aval for atom in atoms)


def dtype_names_of(values: Iterable[Any]) -> tuple[str, ...]:
    """The names of the floating dtypes among the values' dtypes."""
    dtypes = (getattr(x, "dtype", None) for x in values)
    return tuple(d.name for d in dtypes if d is not None and is_float(d))


def contraction_dtypes(eqn: Eqn) -> tuple[str, ...]:
    """The dtype that a contraction computes in, integers too: the wider operand's.

    Of operands in blocks it is the name of their format."""
    if eqn.primitive is BLOCK_DOT:
        return (eqn.params["format"],)
    return (widest(atom.aval.dtype.name for atom in eqn.invars[:2]),)


# What the backward pass reads of the forward one.


def saved_residuals(jaxpr: Jaxpr, steps: Sequence[Step]) -> tuple[SavedRecord, ...]:
    """What a program with a backward pass keeps for it.

    That is what forward equations make and backward ones read, at every level. Inputs
    of the program are live anyway and are left out. For a value that is cast up or
    copied, the value before that counts: the cast is made again, and the compiler
    removes the copy."""
    return _handed_over(jaxpr, steps, to_backward=True)


def gradients(jaxpr: Jaxpr, steps: Sequence[Step]) -> tuple[SavedRecord, ...]:
    """What a backward pass makes and something else reads or returns, at every level.

    That is all that is left of it: gradients of parameters, and of whatever else the
    function is differentiated by."""
    return _handed_over(jaxpr, steps, to_backward=False)


def _handed_over(
    jaxpr: Jaxpr, steps: Sequence[Step], to_backward: bool
) -> tuple[SavedRecord, ...]:
    """What one pass makes and the other reads: the backward pass, or all else."""
    found: list[SavedRecord] = []

    def visit(jaxpr: Jaxpr, around: ReportContext) -> None:
        made: dict[Any, tuple[Eqn, ReportContext]] = {}
        live: dict[Any, None] = {}
        for eqn in eqns_read(jaxpr):
            at = around.at(eqn, steps)
            is_forward = at.phase == "forward"
            if is_forward == to_backward:
                made |= dict.fromkeys(eqn.outvars, (eqn, at))
            elif to_backward:
                live |= dict.fromkeys(_before_upcast(atom, made) for atom in eqn.invars)
            else:
                live |= dict.fromkeys(variables(eqn.invars))
            if is_forward:
                for sub in subjaxprs(eqn.params):
                    visit(sub, at.within(eqn))
        if not to_backward:
            live |= dict.fromkeys(variables(raw(jaxpr).outvars))
        found.extend(_saved(var, *made[var], steps) for var in live if var in made)

    visit(jaxpr, ReportContext())
    return tuple(one for one in found if one.num_bytes)


def _before_upcast(atom: Atom, made: dict[Any, tuple[Eqn, ReportContext]]) -> Any:
    """What a value was before it was cast up or copied; `None` for a literal."""
    if isinstance(atom, Literal):
        return None
    eqn = made[atom][0] if atom in made else None
    if eqn is None or not (is_marked_saved(eqn.primitive) or _is_cast_up(eqn)):
        return atom
    return _before_upcast(eqn.invars[0], made)


def _is_cast_up(eqn: Eqn) -> bool:
    if not is_float_cast(eqn):
        return False
    old, new = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
    return bits(new) > bits(old)


def residuals(
    jaxpr: Jaxpr, num_outs: int, steps: Sequence[Step]
) -> tuple[SavedRecord, ...]:
    """What a forward pass keeps, if its results after `num_outs` are its residuals.

    Inputs of the program are live anyway and are left out."""
    inner = raw(jaxpr)
    made = {v: eqn for eqn in inner.eqns for v in eqn.outvars}
    kept = dict.fromkeys(variables(inner.outvars[num_outs:]))
    live = [v for v in kept if v in made]
    return tuple(
        _saved(v, made[v], ReportContext().at(made[v], steps), steps) for v in live
    )


def _saved(var: Any, eqn: Eqn, at: ReportContext, steps: Sequence[Step]) -> SavedRecord:
    scope, primitive = _maker(var, eqn, at, steps)
    aval: Any = var.aval
    return SavedRecord(
        "/".join(scope),
        primitive,
        str(getattr(aval, "dtype", aval)),
        tuple(getattr(aval, "shape", ())),
        num_bytes(aval),
    )


def _maker(var: Any, eqn: Eqn, at: ReportContext, steps: Sequence[Step]):
    """The scope and the primitive that made a value, at the innermost level."""
    for sub in subjaxprs(eqn.params):
        if eqn.primitive.name not in STRUCTURAL:
            break
        outs = raw(sub).outvars
        if len(outs) != len(eqn.outvars):
            continue
        inner_var = outs[list(eqn.outvars).index(var)]
        for inner in raw(sub).eqns:
            if inner_var in list(inner.outvars):
                inner_at = at.within(eqn).at(inner, steps)
                return _maker(inner_var, inner, inner_at, steps)
    return at.scope, eqn.primitive.name


def num_bytes(aval: Any) -> int:
    """The size of an array; two numbers of 4 bits are one byte, as XLA stores them."""
    dtype = getattr(aval, "dtype", None)
    if dtype is None:  # a token
        return 0
    is_half = "int4" in dtype.name or "float4" in dtype.name
    return -(-size_of(aval) * dtype.itemsize // (2 if is_half else 1))


def size_of(aval: Any) -> int:
    shape = getattr(aval, "shape", ())
    # Symbolic dimensions (jax.export) have no number: counted once.
    return prod(d if isinstance(d, int) else 1 for d in shape)
