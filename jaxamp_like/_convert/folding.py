"""Parameters that are stored as what is made of them, such as int8 numbers and scales.

A rule that quantises makes several operations of a weight before it multiplies. All
that depends on parameters alone can be computed once: a program is split into that,
which `prepare` runs offline, and the rest, which `run` runs on what was prepared. What
only widens or moves numbers (int8 cast to the dtype that is multiplied in) is left to
the rest, since it is the narrow numbers that are to be stored.

A parameter is folded so if what is made of it, all in all, takes fewer bytes than it
would otherwise, and holds numbers of 8 bits. Scans are split too: what their body makes
of a slice is made of all slices at once. Code in `jit`, `jax.checkpoint` and derivative
rules is gone through as if it stood there."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
from jax import lax

from .._errors import AmpError
from .._jax import (
    Eqn,
    Jaxpr,
    Literal,
    consts,
    eqn_context,
    raw,
    reemit,
    scan_arity,
    subjaxprs,
)
from .._primitives import VIEWS
from .models import is_parameter
from .rewriting import BOUND_CALLS
from .traced import traced

_Owners = frozenset[int]
_INPUT: _Owners = frozenset({-1})  # depends on an input, or on what is not to be folded
_CONSTANT: _Owners = frozenset()


class Piece(NamedTuple):
    """Something that is made of parameters, and needed by the rest.

    Args:
        owners: the positions of these parameters.
        size: in bytes.
        is_sliced: whether it is another one in each iteration of the loop around.
        is_8_bit: whether its numbers have 8 bits."""

    owners: _Owners
    size: int
    is_sliced: bool
    is_8_bit: bool


@dataclass
class Split:
    """A program, and for each variable the parameters that it is made of alone.

    Args:
        jaxpr: the program, open.
        values: its constants.
        owners: of each variable: positions of parameters, nothing for what depends on
            no input at all, or `_INPUT`.
        sliced: variables that are another one in each iteration of the loop around.
        needed: what is made of parameters and read by the rest, in order.
        inner: the same for the programs that equations hold, by their position.
        again: positions of equations that the rest computes, although it need not."""

    jaxpr: Jaxpr
    values: Sequence[Any]
    owners: dict[Any, _Owners]
    sliced: set[Any]
    needed: dict[Any, None] = field(default_factory=dict)
    inner: dict[int, "Split"] = field(default_factory=dict)
    again: set[int] = field(default_factory=set)

    def of(self, atom: Any) -> _Owners:
        return _CONSTANT if isinstance(atom, Literal) else self.owners[atom]

    def is_prepared(self, atom: Any) -> bool:
        """Whether it is made of parameters, and so not there at a call."""
        owners = self.of(atom)
        return owners != _CONSTANT and not owners & _INPUT

    def pieces(self) -> Iterator["Piece"]:
        """What is needed, in order."""
        for v in self.needed:
            is_8_bit = v.aval.dtype.itemsize == 1 and v.aval.dtype != bool
            yield Piece(self.owners[v], _bytes(v), v in self.sliced, is_8_bit)
        for i, inner in self.inner.items():
            eqn = self.jaxpr.eqns[i]
            for piece in inner.pieces():
                if _is_scan(eqn):
                    times = eqn.params["length"] if piece.is_sliced else 1
                    piece = piece._replace(size=piece.size * times, is_sliced=False)
                yield piece

    def slices(self) -> list[bool]:
        return [piece.is_sliced for piece in self.pieces()]


def _is_scan(eqn: Eqn) -> bool:
    return eqn.primitive.name == "scan"


def split(
    jaxpr: Jaxpr,
    owners: Sequence[_Owners],
    sliced: Sequence[bool] = (),
    is_outermost: bool = True,
) -> Split:
    """Splits a program, given what its inputs are made of."""
    inner = raw(jaxpr)
    known = dict(zip(inner.invars, owners, strict=True))
    known |= dict.fromkeys(inner.constvars, _CONSTANT)
    slices = {v for v, is_one in zip(inner.invars, sliced, strict=False) if is_one}
    made = Split(inner, consts(jaxpr), known, slices)
    for i, eqn in enumerate(inner.eqns):
        _split_eqn(made, i, eqn)
    if is_outermost:
        made.needed |= {v: None for v in inner.outvars if made.is_prepared(v)}
    _leave_widening(made)
    return made


def _hand_over(made: Split, eqn: Eqn, inner: Split) -> None:
    """What a body needs of its inputs as they are is handed to it, as ever."""
    for v, operand in zip(inner.jaxpr.invars, eqn.invars, strict=True):
        if v in inner.needed:
            del inner.needed[v]
            made.needed[operand] = None


def _leave_widening(made: Split) -> None:
    """Takes the narrowest of what is only cast and moved until it is needed."""
    makers = {v: i for i, eqn in enumerate(made.jaxpr.eqns) for v in eqn.outvars}
    for needed in list(made.needed):
        chain, v = [needed], needed
        while (i := makers.get(v)) is not None and _only_shows(made.jaxpr.eqns[i]):
            v = made.jaxpr.eqns[i].invars[0]
            chain.append(v)
        best = min(chain, key=_bytes)
        if _bytes(best) < _bytes(needed):
            made.again |= {makers[v] for v in chain[: chain.index(best)]}
            del made.needed[needed]
            made.needed[best] = None


def _only_shows(eqn: Eqn) -> bool:
    return eqn.primitive.name in VIEWS and len(eqn.invars) == 1


def _bytes(var: Any) -> int:
    return var.aval.size * var.aval.dtype.itemsize


def _split_eqn(made: Split, i: int, eqn: Eqn) -> None:
    owners = [made.of(v) for v in eqn.invars]
    together = frozenset().union(*owners)
    variables = [v for v in eqn.invars if not isinstance(v, Literal)]
    is_sliced = any(v in made.sliced for v in variables)
    if -1 not in together and not eqn.effects:
        made.owners |= dict.fromkeys(eqn.outvars, together)
        made.sliced |= set(eqn.outvars) if is_sliced else set()
        return
    made.owners |= dict.fromkeys(eqn.outvars, _INPUT)
    has_parameters = any(map(made.is_prepared, eqn.invars))
    if has_parameters and eqn.primitive.name in BOUND_CALLS:
        (body,) = subjaxprs(eqn.params)
        slices = [not isinstance(v, Literal) and v in made.sliced for v in eqn.invars]
        inner = made.inner[i] = split(body, owners, slices, is_outermost=False)
        _hand_over(made, eqn, inner)
        for v, out in zip(eqn.outvars, inner.jaxpr.outvars, strict=True):
            made.owners[v] = inner.of(out)
            if not isinstance(out, Literal) and out in inner.sliced:
                made.sliced.add(v)
    elif has_parameters and _is_scan(eqn) and not eqn.effects and not is_sliced:
        num_consts, num_carry = scan_arity(eqn)
        first = num_consts + num_carry
        carry = range(num_consts, first)
        inside = [_INPUT if j in carry else o for j, o in enumerate(owners)]
        slices = [j >= first for j in range(len(owners))]
        inner = made.inner[i] = split(eqn.params["jaxpr"], inside, slices)
        _hand_over(made, eqn, inner)
        made.needed |= {
            v: None for v in eqn.invars[num_consts:first] if made.is_prepared(v)
        }
    else:
        made.needed |= {v: None for v in eqn.invars if made.is_prepared(v)}


def prepare(split: Split, args: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """What is made of parameters alone: the results, and all that is needed.

    `args` are the inputs, `None` where they are not there."""
    jaxpr = split.jaxpr
    env = dict(zip(jaxpr.invars, args, strict=True))
    env |= zip(jaxpr.constvars, split.values, strict=True)

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else env.get(atom)

    found = []
    for i, eqn in enumerate(jaxpr.eqns):
        values = list(map(read, eqn.invars))
        if i not in split.inner:
            if all(not split.of(v) & _INPUT for v in eqn.invars) and not eqn.effects:
                env |= zip(eqn.outvars, reemit(eqn, values), strict=True)
            continue
        inner = split.inner[i]
        if _is_scan(eqn):
            found += _prepare_slices(inner, eqn, values)
            continue
        outs, needed = prepare(inner, values)
        env |= zip(eqn.outvars, outs, strict=True)
        found += needed
    return list(map(read, jaxpr.outvars)), [*(env[v] for v in split.needed), *found]


def _prepare_slices(inner: Split, eqn: Eqn, values: list[Any]) -> list[Any]:
    num_consts, num_carry = scan_arity(eqn)
    first = num_consts + num_carry
    fixed, slices = values[:num_consts], values[first:]

    def one(slices: list[Any]) -> list[Any]:
        return prepare(inner, [*fixed, *[None] * num_carry, *slices])[1]

    axes = [0 if is_sliced else None for is_sliced in inner.slices()]
    if not any(x is not None for x in slices):
        return one(slices)
    return jax.vmap(one, out_axes=axes)(slices)


def run(
    split: Split, bind: Callable[..., Any], args: Sequence[Any], parts: Sequence[Any]
) -> list[Any]:
    """Computes the rest, on what was prepared; `args` are `None` for parameters."""
    jaxpr, parts = split.jaxpr, list(parts)
    env = dict(zip(jaxpr.invars, args, strict=True))
    env |= zip(jaxpr.constvars, split.values, strict=True)
    num = len(split.needed)
    env |= zip(split.needed, parts[:num], strict=True)
    parts = parts[num:]

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else env.get(atom)

    for i, eqn in enumerate(jaxpr.eqns):
        inner = split.inner.get(i)
        values = list(map(read, eqn.invars))
        if inner is None:
            if i in split.again or not any(map(split.is_prepared, eqn.outvars)):
                env |= zip(eqn.outvars, bind(eqn, values), strict=True)
            continue
        num = len(inner.slices())
        mine, parts = parts[:num], parts[num:]
        with eqn_context(eqn):
            if _is_scan(eqn):
                outs = _run_scan(inner, bind, eqn, values, mine)
            else:
                outs = run(inner, bind, values, mine)
        pairs = zip(eqn.outvars, outs, strict=True)
        env |= {v: x for v, x in pairs if v not in env}
    return list(map(read, jaxpr.outvars))


def _run_scan(
    inner: Split, bind: Any, eqn: Eqn, values: list[Any], parts: list[Any]
) -> list[Any]:
    num_consts, num_carry = scan_arity(eqn)
    first = num_consts + num_carry
    fixed, carry, slices = values[:num_consts], values[num_consts:first], values[first:]
    is_sliced = inner.slices()
    moving = [x for x, is_one in zip(parts, is_sliced, strict=True) if is_one]

    def body(carry: list[Any], given: Any) -> Any:
        slices, moving = given
        rest = iter(moving)
        pairs = zip(parts, is_sliced, strict=True)
        mine = [next(rest) if is_one else x for x, is_one in pairs]
        outs = run(inner, bind, [*fixed, *carry, *slices], mine)
        return outs[:num_carry], outs[num_carry:]

    options = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
    carry, made = lax.scan(body, list(carry), (slices, moving), **options)
    return [*carry, *made]


def foldable(jaxpr: Jaxpr, bytes_now: Sequence[int | None]) -> list[int]:
    """Parameters that take fewer bytes as what is made of them, 8-bit numbers mostly.

    Others are left whole, for it may hang on the inputs what is made of them: a table
    of positions is cut to the length of a text.

    `bytes_now` says of each input what it would take else; `None` if it is to stay."""
    inner = raw(jaxpr)
    wanted = [i for i, size in enumerate(bytes_now) if size is not None]
    while wanted:
        sizes = dict.fromkeys(wanted, 0)
        whole = split(jaxpr, owners_of(len(inner.invars), wanted))
        bad: set[int] = set()
        narrow: set[int] = set()
        for piece in whole.pieces():
            bad |= piece.owners if len(piece.owners) > 1 else _CONSTANT
            narrow |= piece.owners if piece.is_8_bit else _CONSTANT
            for i in piece.owners:
                sizes[i] += piece.size
        keep = [
            i for i in wanted if i in narrow - bad and sizes[i] < (bytes_now[i] or 0)
        ]
        if keep == wanted:
            break
        wanted = keep
    return wanted


def owners_of(num: int, folded: Sequence[int]) -> list[_Owners]:
    """What the inputs are made of, if some of them are parameters to be folded."""
    return [frozenset({i}) if i in folded else _INPUT for i in range(num)]


def needed_owners(split: Split) -> list[int]:
    """The parameter that each part is made of."""
    return [next(iter(piece.owners)) for piece in split.pieces()]


def folded(
    mixed: Callable[..., Any], authors: Any, which: Sequence[int]
) -> Callable[..., Any]:
    """`mixed` for parameters of which some are tuples of what was made of them."""
    tree = jax.tree.structure(authors)

    def call(params: Any, *inputs: Any) -> Any:
        program = traced(mixed, authors, inputs)
        leaves = [
            x
            for x, author in zip(
                tree.flatten_up_to(params), jax.tree.leaves(authors), strict=True
            )
            if is_parameter(author)
        ]
        given = [x for x in jax.tree.leaves(inputs) if is_parameter(x)]
        args = [None if i in which else x for i, x in enumerate((*leaves, *given))]
        rest = split(program.jaxpr, owners_of(len(args), which))
        parts = [iter(leaf if i in which else ()) for i, leaf in enumerate(leaves)]
        mine = [next(parts[i], None) for i in needed_owners(rest)]
        _check_parts(rest, mine)
        outs = run(rest, reemit, args, mine)
        return program.outs.merge(without_derivative(outs))

    return call


def _check_parts(rest: Split, parts: Sequence[Any]) -> None:
    sizes = [piece.size for piece in rest.pieces()]
    found = [None if x is None else x.size * x.dtype.itemsize for x in parts]
    if sizes != found:
        raise AmpError(
            "For inputs of these shapes, other things are made of the parameters than "
            "were stored. Convert with such inputs as examples."
        )


def parts_of(program: Any, leaves: Sequence[Any], which: Sequence[int]) -> Any:
    """What is made of each of the parameters `which`, by their positions."""
    num = len(raw(program.jaxpr).invars)
    whole = split(program.jaxpr, owners_of(num, which))

    def make(leaves: list[Any]) -> list[Any]:
        args = dict(zip(which, leaves, strict=True))
        return prepare(whole, [args.get(i) for i in range(num)])[1]

    mine = [leaves[i] for i in which]
    is_abstract = any(isinstance(x, jax.ShapeDtypeStruct) for x in mine)
    made = jax.eval_shape(make, mine) if is_abstract else jax.jit(make)(mine)
    owners = needed_owners(whole)
    pairs = list(zip(owners, made, strict=True))
    return {i: tuple(x for j, x in pairs if j == i) for i in which}


@jax.custom_jvp
def without_derivative(args: Any) -> Any:
    """Its argument, which can't be differentiated."""
    return args


@without_derivative.defjvp
def _(primals: Any, tangents: Any) -> Any:
    raise AmpError(
        "A converted function whose weights are stored quantised can't be "
        "differentiated. Differentiate `amp(fn)` with the parameters in full."
    )
