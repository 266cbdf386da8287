"""Parameters that are stored as what is made of them, such as int8 numbers and scales.

A rule that quantises makes several operations of a weight before it multiplies. All
that depends on parameters alone can be computed once: a program is split (`splitting`)
into that, which `prepare` runs offline, and the rest, which `run` runs on what was
prepared.

A parameter is folded so if what is made of it, all in all, takes fewer bytes than it
would otherwise, and holds numbers of 8 bits."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from .._errors import AmpError, without_derivative
from .._jax import (
    Eqn,
    Jaxpr,
    Literal,
    eqn_context,
    raw,
    reemit,
    scan_like,
    scan_operands,
)
from .models import is_parameter
from .splitting import (
    CONSTANT,
    INPUT,
    Owners,
    Split,
    carried_operands,
    is_call,
    is_scan,
    split,
)
from .traced import traced
from .uses import bodies


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
            if all(not split.of(v) & INPUT for v in eqn.outvars) and not eqn.effects:
                env |= zip(eqn.outvars, reemit(eqn, values), strict=True)
            continue
        inner = split.inner[i]
        if is_scan(eqn):
            found += _prepare_slices(inner[0], eqn, values)
        elif is_call(eqn):
            outs, needed = prepare(inner[0], values)
            env |= zip(eqn.outvars, outs, strict=True)
            found += needed
        else:
            for one, body in zip(inner, bodies(eqn), strict=True):
                found += prepare(one, [values[j] for j in body.ins])[1]
    return list(map(read, jaxpr.outvars)), [*(env[v] for v in split.needed), *found]


def _prepare_slices(inner: Split, eqn: Eqn, values: list[Any]) -> list[Any]:
    fixed, carry, slices = scan_operands(eqn, values)

    def one(slices: Sequence[Any]) -> list[Any]:
        return prepare(inner, [*fixed, *[None] * len(carry), *slices])[1]

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
        mine = []
        for one in inner:
            num = len(one.slices())
            mine.append(parts[:num])
            parts = parts[num:]
        with eqn_context(eqn):
            run_eqn = _RUN.get(eqn.primitive.name, _run_call)
            outs = run_eqn(inner, bind, eqn, values, mine)
        pairs = zip(eqn.outvars, outs, strict=True)
        env |= {v: x for v, x in pairs if v not in env}
    return list(map(read, jaxpr.outvars))


_Bind = Callable[..., Any]
_Parts = list[list[Any]]


def _run_call(inner: list[Split], bind: _Bind, eqn: Eqn, values: Any, mine: _Parts):
    return run(inner[0], bind, values, mine[0])


def _run_cond(inner: list[Split], bind: _Bind, eqn: Eqn, values: Any, mine: _Parts):
    index, *operands = values
    branches = [
        functools.partial(run, one, bind, operands, parts)
        for one, parts in zip(inner, mine, strict=True)
    ]
    return lax.switch(index, branches)


def _run_while(inner: list[Split], bind: _Bind, eqn: Eqn, values: Any, mine: _Parts):
    all_bodies = bodies(eqn)
    carried = sorted(carried_operands(all_bodies))

    def call(which: int, carry: Sequence[Any]) -> list[Any]:
        now = [*values]
        for j, x in zip(carried, carry, strict=True):
            now[j] = x
        args = [now[j] for j in all_bodies[which].ins]
        return run(inner[which], bind, args, mine[which])

    return lax.while_loop(
        lambda carry: call(0, carry)[0],
        lambda carry: call(1, carry),
        [values[j] for j in carried],
    )


def _run_scan(inner: list[Split], bind: _Bind, eqn: Eqn, values: Any, mine: _Parts):
    (body,), (parts,) = inner, mine
    fixed, carry, slices = scan_operands(eqn, values)
    num_carry = len(carry)
    is_sliced = body.slices()
    moving = [x for x, is_one in zip(parts, is_sliced, strict=True) if is_one]

    def step(carry: list[Any], given: Any) -> Any:
        slices, moving = given
        rest = iter(moving)
        pairs = zip(parts, is_sliced, strict=True)
        mine = [next(rest) if is_one else x for x, is_one in pairs]
        outs = run(body, bind, [*fixed, *carry, *slices], mine)
        return outs[:num_carry], outs[num_carry:]

    carry, made = scan_like(eqn, step, list(carry), (slices, moving))
    return [*carry, *made]


_RUN = {"scan": _run_scan, "while": _run_while, "cond": _run_cond}


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
        narrow: set[int] = set()
        for piece in whole.pieces():
            narrow |= piece.owners if piece.is_8_bit else CONSTANT
            for i in piece.owners:
                sizes[i] += piece.size
        keep = [i for i in wanted if i in narrow and sizes[i] < (bytes_now[i] or 0)]
        if keep == wanted:
            break
        wanted = keep
    return wanted


def owners_of(num: int, folded: Sequence[int]) -> list[Owners]:
    """What the inputs are made of, if some of them are parameters to be folded."""
    return [frozenset({i}) if i in folded else INPUT for i in range(num)]


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
        return program.outs.merge(_not_differentiated(outs))

    return call


_not_differentiated = without_derivative(
    "A converted function whose weights are stored quantised can't be differentiated. "
    "Differentiate `amp(fn)` with the parameters in full."
)


def _check_parts(rest: Split, parts: Sequence[Any]) -> None:
    sizes = [piece.size for piece in rest.pieces()]
    found = [None if x is None else x.size * x.dtype.itemsize for x in parts]
    if sizes != found:
        raise AmpError(
            "For inputs of these shapes, other things are made of the parameters than "
            "were stored: a rule may go by shapes, as `int8()` does that leaves small "
            "contractions alone. Convert with such inputs as examples, or give the "
            "rule `where=None`."
        )


_All = dict[int, tuple[Any, ...]]


def parts_of(program: Any, leaves: Sequence[Any], which: Sequence[int]) -> _All:
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


def each_once(parts: _All, first: Sequence[int]) -> _All:
    """`parts`, where what several readers make alike of one array is one array.

    `first` says of each parameter where the same array stands first."""
    known: dict[Any, list[Any]] = {}

    def once(i: int, part: Any) -> Any:
        if isinstance(part, jax.ShapeDtypeStruct):
            return part
        alike = known.setdefault((first[i], part.dtype, part.shape), [])
        found = next((x for x in alike if jax.numpy.array_equal(x, part)), None)
        if found is None:
            alike.append(part)
        return part if found is None else found

    return {i: tuple(once(i, part) for part in made) for i, made in parts.items()}
