"""What to know of a converted program besides its parameters.

Which weights it still rounds at each call, which contractions a rule that quantises has
left alone, and what shows that a model was converted as it is called for training."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from .._jax import (
    Eqn,
    Jaxpr,
    Literal,
    is_array_or_shape,
    raw,
    source_line,
    without_folders,
)
from .._quantised.rule import HEAD_OR_EMBEDDING, NO_PARAMETER, unmet
from .._reports import walk
from .._rewrite.findings.unmatched import without_amp_scopes
from .._rewrite.findings.unquantised import asked_of, rules_of, why_not_quantised
from .._rewrite.record import Recorder, recording
from .._structural import Step, steps_of
from .splitting import INPUT, Split, is_call, split
from .uses import bodies

_DRAWS = frozenset("random_bits rng_bit_generator rng_uniform threefry2x32".split())
"""The primitives that make random numbers, and not only keys for others that do."""


def of_rounded_weights(jaxpr: Jaxpr, storable: Sequence[bool]) -> Iterator[str]:
    """What to say of weights that a program rounds at each call.

    Args:
        jaxpr: the program.
        storable: for each of its inputs, whether it is known before a call and may be
            stored in another form."""
    # What is stored in 8 bits already was rounded before.
    pairs = zip(storable, raw(jaxpr).invars, strict=True)
    owners = [
        frozenset({0}) if is_one and not _is_8_bit(v) else INPUT for is_one, v in pairs
    ]
    makers = set(_makers_of_8_bits(split(jaxpr, owners)))
    places = [_place(e, at) for e, at, _ in walk.walk(jaxpr, ()) if id(e) in makers]
    if not places:
        return
    weights = "the weight of a quantised product"
    if len(places) > 1:
        weights = f"the weights of {len(places)} quantised products, the first"
    yield (
        f"Rounded at each call, which is slow: {weights} ({places[0]}). `convert` "
        "stores a weight rounded if it is computed from one parameter alone, and gets "
        "smaller by that. Store weights that are put side by side, such as QKV, as one "
        "parameter."
    )


def _makers_of_8_bits(one: Split) -> Iterator[int]:
    """The `id`s of equations that make numbers of 8 bits out of parameters alone."""
    needed = {v for v in one.needed if _is_8_bit(v)}
    for eqn in raw(one.jaxpr).eqns:
        inner = one.inner.get(id(eqn), [])
        if not inner and not needed.isdisjoint(eqn.outvars):
            yield id(eqn)
        for program in inner:
            yield from _makers_of_8_bits(program)


def _is_8_bit(atom: Any) -> bool:
    dtype = getattr(atom.aval, "dtype", None)
    return dtype is not None and dtype.itemsize == 1 and dtype.kind != "b"


def of_left_contractions(jaxpr: Jaxpr, trace_again: Callable[[], Any]) -> Iterator[str]:
    """What to say of contractions that a rule that quantises has left alone.

    Args:
        jaxpr: the program; without numbers of 8 bits, no rule has quantised anything,
            and `amp` has said so.
        trace_again: traces the mixed function, which tells its decisions."""
    made = (v for eqn, *_ in walk.walk(jaxpr, ()) for v in eqn.outvars)
    if not any(map(_is_8_bit, made)):
        return
    with recording(Recorder()) as recorder:
        trace_again()
    steps = [
        step
        for _, plan in recorder.plans
        for step in steps_of(plan)
        if asked_of(step) and not step.backward
    ]
    left = [step for step in steps if _is_left(step)]
    if left:
        first, hints = left[0], dict.fromkeys(filter(None, map(_hint, left)))
        scope = "/".join(without_amp_scopes(first.scope))
        line = without_folders(source_line(first.eqn))
        verb = "is" if len(left) == 1 else "are"
        yield (
            f"{len(left)} of {len(steps)} contractions that {rules_of(left)} may "
            f"quantise {verb} left alone, the first since {why_not_quantised(first)} "
            f"({_in(scope, line)}).{''.join(f' {hint}' for hint in hints)}"
        )


def _is_left(step: Step) -> bool:
    """Whether a weight is not quantised: what reads none, as attention, has none."""
    return not step.decision.eight_bits and NO_PARAMETER not in step.decision.why


def _hint(step: Step) -> str:
    """What to write for a contraction to be quantised, if that is known."""
    (rule, *_), why = asked_of(step), why_not_quantised(step)
    if why.endswith(HEAD_OR_EMBEDDING):
        return "With `leave=()`, the rule takes layers of any name."
    if rule.where is not None and why.endswith(unmet(rule.where)):
        return "With `where=None`, it takes contractions of any size."
    return ""


def of_random_numbers(jaxpr: Jaxpr) -> Iterator[str]:
    """What to say of a program that draws random numbers."""
    places = [
        _place(eqn, at)
        for eqn, at, _ in walk.walk(jaxpr, ())
        if eqn.primitive.name in _DRAWS
    ]
    if places:
        yield (
            f"Random numbers are drawn at each call (the first {places[0]}). If that "
            "is dropout, convert the model as it is called for inference."
        )


def of_changed_states(
    jaxpr: Jaxpr, merge: Callable[[Sequence[Any]], Any], params: Any, inputs: Any
) -> Iterator[str]:
    """What to say of a program that returns a state which it has changed.

    A state is one of several results, and a dict or another tree like an input, or like
    a part of the parameters, as in Linen.

    Args:
        jaxpr: the program. Its last inputs are the arrays of parameters and inputs.
        merge: makes what the model returns out of the results of the program.
        params: the tree of parameters.
        inputs: the other arguments of the model."""
    outs = raw(jaxpr).outvars
    # A user's class may look at its children when it is made: not at variables.
    shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in outs]
    made = {id(x): v for x, v in zip(shapes, outs, strict=True)}
    results = merge(shapes)
    for part in results if isinstance(results, tuple | list) else ():
        atoms = [made.get(id(x)) for x in jax.tree.leaves(part)]
        news = [_passed_on(jaxpr, x) for x in atoms if x is not None]
        changed = {
            name: sum(new not in variables for new in news)
            for name, argument, variables in _arguments(jaxpr, params, inputs, part)
            if not jax.tree_util.all_leaves([argument])
            and _types(argument) == _types(part)
        }
        if all(changed.values()):  # else it is one of them, as it was given
            for name, number in [*changed.items()][:1]:
                yield (
                    f"A result is like {name}, with {number} of its {len(news)} arrays "
                    "changed: a cache, or a state. If these are statistics, as "
                    "BatchNorm's, convert the model as it is called for inference."
                )


def _arguments(
    jaxpr: Jaxpr, params: Any, inputs: Any, part: Any
) -> Iterator[tuple[str, Any, list[Any]]]:
    """What a result may be like: its name, itself, and the variables of its arrays."""
    leaves, _ = jax.tree_util.tree_flatten_with_path((params, *inputs))
    paths = [path for path, x in leaves if is_array_or_shape(x)]
    variables = raw(jaxpr).invars[len(raw(jaxpr).invars) - len(paths) :]
    pairs = list(zip(paths, variables, strict=True))
    for i, given in enumerate(inputs):
        mine = [v for path, v in pairs if path[0].idx == i + 1]
        yield f"input {i}", given, mine
    if isinstance(part, Mapping) and isinstance(params, Mapping):
        if part.keys() < params.keys():
            ours = [(path[1], v) for path, v in pairs if path[0].idx == 0]
            mine = [v for entry, v in ours if getattr(entry, "key", None) in part]
            yield "a part of `params`", {key: params[key] for key in part}, mine


def _types(tree: Any) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    return structure, [
        (x.shape, x.dtype) if is_array_or_shape(x) else x for x in leaves
    ]


def _passed_on(jaxpr: Jaxpr, atom: Any) -> Any:
    """The input that a value is, perhaps handed through calls; else the value."""
    makers = {v: eqn for eqn in raw(jaxpr).eqns for v in eqn.outvars}
    while not isinstance(atom, Literal):
        eqn = makers.get(atom)
        if eqn is None or not is_call(eqn):
            break
        (body,) = bodies(eqn)
        inner = raw(body.jaxpr)
        source = _passed_on(body.jaxpr, inner.outvars[eqn.outvars.index(atom)])
        places = [i for i, v in zip(body.ins, inner.invars, strict=True) if v is source]
        if not places:
            break
        atom = eqn.invars[places[0]]
    return atom


def _place(eqn: Eqn, at: walk.ReportContext) -> str:
    place = at.place(eqn)
    return _in(place.scope, without_folders(place.source))


def _in(scope: str, line: str) -> str:
    found = ", ".join(filter(None, (scope and f"in {scope}", line)))
    return found or "in no scope"
