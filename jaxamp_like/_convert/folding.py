"""Parameters that are stored as what is made of them, such as int8 numbers and scales.

A rule that quantises applies several operations to a weight before it multiplies. All
that depends on parameters alone can be computed once. So a program is split in two
(`splitting`): `prepare` runs the part that depends on parameters alone offline, and
`run` runs the rest on what was prepared.

A parameter is folded (stored in this way) if all that is made of it takes fewer bytes
together than the parameter would, and includes numbers of 8 bits."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from .._errors import AmpError, without_derivative
from .._jax import Eqn, Jaxpr, eqn_context, evaluate, is_array_or_shape, raw, rebind
from .._structural.running import run_programs
from .models import parameters_in
from .splitting import CONSTANT, INPUT, Owners, Split, is_call, split
from .traced import traced
from .uses import bodies


def prepare(split: Split, args: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Computes what is made of parameters alone.

    Args:
        split: the program.
        args: its inputs; `None` for those that are only known at a call.
    Returns:
        The results that are made of parameters alone (`None` for others), and all that
        the rest of the program needs."""
    made = dict(zip(raw(split.jaxpr).invars, args, strict=True))
    in_programs: list[Any] = []

    def bind(eqn: Eqn, values: list[Any]) -> Sequence[Any]:
        outs: Sequence[Any] = [None] * len(eqn.outvars)
        if (inner := split.inner.get(id(eqn))) is not None:
            for one, body in zip(inner, bodies(eqn), strict=True):
                results, needed = _prepare_program(one, [values[j] for j in body.ins])
                in_programs.extend(needed)
                outs = results if is_call(eqn) else outs
        elif not eqn.effects and not any(split.of(v) & INPUT for v in eqn.outvars):
            outs = rebind(eqn, values)
        made.update(zip(eqn.outvars, outs, strict=True))
        return outs

    results = evaluate(split.jaxpr, args, bind)
    return results, [*(made[v] for v in split.needed), *in_programs]


def _prepare_program(one: Split, args: list[Any]) -> tuple[list[Any], list[Any]]:
    """Does as `prepare` does for a program in an equation, on all slices of a scan."""
    if one.length is None:
        return prepare(one, args)
    inputs = zip(raw(one.jaxpr).invars, args, strict=True)
    stacks = [x if v in one.sliced else None for v, x in inputs]

    def needed(slices: Sequence[Any]) -> list[Any]:
        return prepare(one, _sliced(args, slices))[1]

    if all(x is None for x in stacks):
        return [], needed(stacks)
    axes = [0 if moves else None for moves in one.slices()]
    return [], jax.vmap(needed, out_axes=axes)(stacks)


def run(split: Split, args: Sequence[Any], parts: Sequence[Any]) -> list[Any]:
    """Computes the rest of a program.

    Args:
        split: the program.
        args: its inputs; `None` for parameters that are folded.
        parts: what `prepare` has made of these."""
    given = dict(zip(split.needed, parts, strict=False))
    rest = iter(parts[len(given) :])

    def or_given(variables: Sequence[Any], values: Sequence[Any]) -> list[Any]:
        return [given.get(v, x) for v, x in zip(variables, values, strict=True)]

    def bind(eqn: Eqn, values: list[Any]) -> Sequence[Any]:
        if (inner := split.inner.get(id(eqn))) is not None:
            mine = [list(itertools.islice(rest, len(one.slices()))) for one in inner]
            with eqn_context(eqn):
                return or_given(eqn.outvars, _run_programs(inner, eqn, values, mine))
        if id(eqn) in split.recomputed or not any(map(split.is_prepared, eqn.outvars)):
            return rebind(eqn, values)
        return or_given(eqn.outvars, [None] * len(eqn.outvars))

    args = or_given(raw(split.jaxpr).invars, args)
    return evaluate(split.jaxpr, args, bind)


def _run_programs(
    inner: list[Split], eqn: Eqn, values: list[Any], parts: list[list[Any]]
) -> list[Any]:
    """Runs a loop, a branch or a call on the parts of each of its programs."""

    if inner[0].length is None:
        return run_programs(
            eqn, values, lambda i, args, _: run(inner[i], args, parts[i])
        )
    (body,), (mine,) = inner, parts
    stacks = [
        x if moves else None for x, moves in zip(mine, body.slices(), strict=True)
    ]

    def run_body(_: int, args: list[Any], slices: Sequence[Any]) -> list[Any]:
        return run(body, args, _sliced(mine, slices))

    return run_programs(eqn, values, run_body, stacks)


def _sliced(whole: Sequence[Any], slices: Sequence[Any]) -> list[Any]:
    """`slices`, with `None` replaced by what is the same in all iterations."""
    pairs = zip(whole, slices, strict=True)
    return [x if one is None else one for x, one in pairs]


def foldable(
    jaxpr: Jaxpr, bytes_now: Sequence[int | None], first: Sequence[int]
) -> list[int]:
    """The parameters to fold: what is made of each is smaller, and has 8-bit numbers.

    Parameters without 8-bit numbers are stored whole: what is made of them may depend
    on the shapes of inputs, as where a table of positions is cut to a text's length.

    Args:
        jaxpr: the program, whose first inputs are the parameters.
        bytes_now: the bytes of each parameter if it is not folded; `None` if it must
            not be folded.
        first: for each parameter, where the same array stands first. It is folded in
            all places in which it stands, or in none."""
    num_inputs = len(raw(jaxpr).invars)
    wanted = [i for i, size in enumerate(bytes_now) if size is not None]
    while wanted:
        sizes = dict.fromkeys(wanted, 0)
        narrow: set[int] = set()
        for piece in split(jaxpr, owners_of(num_inputs, wanted)).parts():
            narrow |= piece.owners if piece.is_8_bit else CONSTANT
            for i in piece.owners:
                sizes[i] += piece.size
        keep = [i for i in wanted if i in narrow and sizes[i] < (bytes_now[i] or 0)]
        if keep == wanted:
            whole = {j for i, j in enumerate(first) if i not in keep}
            keep = [i for i in keep if first[i] not in whole]
        if keep == wanted:
            break
        wanted = keep
    return wanted


def owners_of(num: int, folded: Sequence[int]) -> list[Owners]:
    """The owners of each input: a parameter in `folded` is its own, others `INPUT`."""
    return [frozenset({i}) if i in folded else INPUT for i in range(num)]


def needed_owners(split: Split) -> list[int]:
    """For each part that the rest needs, the parameter that it is made of."""
    return [next(iter(piece.owners)) for piece in split.parts()]


def folded(
    mixed: Callable[..., Any], authors: Any, which: Sequence[int]
) -> Callable[..., Any]:
    """`mixed`, as a function that takes some parameters as tuples of their parts."""
    tree = jax.tree.structure(authors)

    def call(params: Any, *inputs: Any) -> Any:
        program = traced(mixed, authors, inputs)
        leaves = [
            x
            for x, author in zip(
                tree.flatten_up_to(params), jax.tree.leaves(authors), strict=True
            )
            if is_array_or_shape(author)
        ]
        # What quantised products read has no derivative, so that results alone, made
        # of nothing else, would not tell that one is taken.
        arrays = _not_differentiated(parameters_in(inputs))
        given = enumerate((*leaves, *arrays))
        args = [None if i in which else x for i, x in given]
        rest = split(program.jaxpr, owners_of(len(args), which))
        parts = [iter(leaf if i in which else ()) for i, leaf in enumerate(leaves)]
        mine = [next(parts[i], None) for i in needed_owners(rest)]
        _check_parts(rest, mine)
        outs = run(rest, args, mine)
        return program.merge(_not_differentiated(outs))

    return call


_not_differentiated = without_derivative(
    "A converted function whose weights are stored quantised can't be differentiated. "
    "Differentiate `amp(fn)` with the parameters in full."
)


def _check_parts(rest: Split, parts: Sequence[Any]) -> None:
    sizes = [piece.size for piece in rest.parts()]
    found = [None if x is None else x.size * x.dtype.itemsize for x in parts]
    if sizes != found:
        raise AmpError(
            "For inputs of these shapes, other things are made of the parameters than "
            "were stored. A rule may go by shapes, as `int8()` does that leaves small "
            "contractions alone (`where=None` quantises them, too), and no rule "
            "quantises a product whose result is one number, as of one row by a layer "
            "with one output. Convert with such inputs as examples, or call with two "
            "rows and take the first."
        )


_All = dict[int, tuple[Any, ...]]


def parts_of(program: Any, leaves: Sequence[Any], which: Sequence[int]) -> _All:
    """The parts that are made of each of the parameters at the positions `which`."""
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


def deduplicated(parts: _All, first: Sequence[int]) -> _All:
    """`parts`, with one array for all equal parts that are made of one parameter.

    `first` says for each parameter where the same array stands first."""
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
