"""`convert`: makes a mixed model of a float32 one, with its parameters stored low."""

import dataclasses
import functools
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax.typing import DTypeLike

from .._amp import amp_by, warn_of_amp_twice
from .._dtypes import cast, is_float
from .._errors import AmpError, warn_or_raise
from .._jax import is_array_or_shape, to_classic, trace
from .._policies.mistakes import naming_mistakes
from .._policies.presets.common import Op
from .._policies.settings import PolicyLike, settings_of
from .._suggestions import did_you_mean
from .converted import Converted, type_of
from .examples import explaining_examples, refuse_bad_shapes
from .folding import deduplicated, foldable, folded, parts_of
from .lists import ListedPolicy, check_matches, listed_policy
from .models import (
    as_jax_has_them,
    check_leaves,
    distinct,
    first_positions,
    map_parameters,
    parameters_in,
    path_name,
    take_apart,
)
from .notes import (
    of_changed_states,
    of_left_contractions,
    of_random_numbers,
    of_rounded_weights,
)
from .progress import ticked
from .records import casts_of, contractions_of
from .storage import Stored, narrower, storage
from .summary import Summary
from .traced import TracedModel, returns_gradients, traced
from .uses import Uses, uses_of_inputs

_AS_GIVEN = "`cast_params` is False"
_KEPT = "`keep_inputs` names it"


@naming_mistakes
def convert(
    fn: Any,
    params: Any,
    *example_inputs: Any,
    amp_policy: PolicyLike | None = None,
    compute_dtype: DTypeLike | None = None,
    target_ops: Sequence[Op] = (),
    float32_ops: Sequence[Op] = (),
    widest_ops: Sequence[Op] = (),
    conditional_float32_ops: Sequence[tuple[Op, str, Sequence[Any]]] = (),
    excluded_scopes: Sequence[Any] = (),
    keep_inputs: Sequence[Any] = (),
    cast_params: bool = True,
    strict: bool = False,
) -> Converted:
    """Converts a trained model to mixed precision, and stores its parameters low.

    The model is rewritten as by `amp`. A parameter that is only ever cast to one
    narrower dtype, wherever it is read (inside of jit, loops, branches, slice by slice
    of a stack), is cast once, here; the converted function no longer has this cast. A
    weight that a rule rounds to 8 bits is stored as the numbers and scales that the
    rule makes of it, if these take fewer bytes. All other parameters stay as they are,
    and `summary` says why. Under `jax.jit` the results are those of `amp(fn)`, bit for
    bit.

    Args:
        fn: the model: a function of parameters and inputs, a Linen module or a Haiku
            transform (whose `apply` is meant), or a model that holds its parameters:
            a module of Equinox or NNX, a model or layer of Keras.
        params: the tree of parameters, the first argument of `fn`; `None` where `fn`
            holds them.
        *example_inputs: the other arguments of `fn`: arrays, `jax.ShapeDtypeStruct`s
            (also with the symbolic dimensions of `jax.export.symbolic_shape`), and
            values that are no arrays, which become part of the function.
        amp_policy: as for `amp`.
        compute_dtype: as for `amp`.
        target_ops: primitives, or names of them, that run in the compute dtype whatever
            the policy says of them. What it says of scopes still comes first.
        float32_ops: primitives that run as their author wrote them.
        widest_ops: primitives that run in the widest dtype among their inputs.
        conditional_float32_ops: tuples `(op, parameter, values)`: the op runs as
            written where its parameter has one of the values, else by the policy.
        excluded_scopes: names and paths of `jax.named_scope`s, or compiled regular
            expressions of paths, in which everything runs as written.
        keep_inputs: parameters that are stored as they are, whoever reads them: their
            paths ("encoder/0/kernel"), a leading part of paths, compiled regular
            expressions of paths, or their positions among the leaves. The inputs that
            are no parameters always keep their dtypes.
        cast_params: whether parameters are stored in the dtype that they are read in;
            if not, they are cast at each call.
        strict: as for `amp`.
    Returns:
        A `Converted`. It is called with the inputs alone, as a model that holds its
        parameters, or with other parameters by `apply(params, *inputs)`.
    Raises:
        TypeError, ValueError: an argument is of the wrong kind, or `params` don't fit
            the function.
        AmpError: an op is in two lists; an op, a scope or a kept input matches nothing;
            or as from `amp`.

    >>> def model(params, x):
    ...     return jax.numpy.tanh(x @ params["w"]) + params["b"]
    >>> params = {"w": jax.numpy.ones((64, 32)), "b": jax.numpy.ones(32)}
    >>> x = jax.numpy.ones((8, 64))
    >>> low = convert(model, params, x, compute_dtype="bfloat16")
    >>> low.params["w"].dtype, low.params["b"].dtype, low(x).dtype
    (dtype(bfloat16), dtype('float32'), dtype('float32'))

    This follows `amp.convert_model` of MXNet, which casts parameters offline, and the
    converters of TensorRT and ONNX, which keep what float32 ops read."""
    _check_bool(cast_params, "cast_params")
    _check_bool(strict, "strict")
    # Of gradients in float16, `amp` speaks of training.
    settings = settings_of(amp_policy, compute_dtype)._replace(is_by_default=False)
    listed = listed_policy(
        settings.lookup,
        target_ops,
        float32_ops,
        widest_ops,
        conditional_float32_ops,
        excluded_scopes,
    )
    model = take_apart(fn, params)
    if compute_dtype is not None or amp_policy is not None:
        warn_of_amp_twice(model.call, settings.compute_dtype, strict)
    check_leaves(model.params)
    model = model._replace(params=as_jax_has_them(model.params))
    refuse_bad_shapes(example_inputs)
    told = functools.partial(explaining_examples, fn, params, example_inputs)
    if listed != ListedPolicy(settings.lookup):
        with told():
            as_written = traced(model.call, model.params, example_inputs)
        check_matches(listed, as_written.jaxpr)
        settings = settings._replace(lookup=listed)
    # There is no backward pass, which would read a gathered parameter again.
    mixed = amp_by(settings, model.call, strict=strict, gather_once=False, argnums=(0,))
    with told():
        program = traced(mixed, model.params, example_inputs)
    leaves, names = _parameters(model.params)
    first = first_positions(leaves)
    kept = dict.fromkeys(_with_tied(_kept(keep_inputs, names), first), _KEPT)
    if not cast_params:
        kept = dict.fromkeys(range(len(names)), _AS_GIVEN)
    again = functools.partial(traced, mixed, model.params, example_inputs)
    left = list(of_left_contractions(program.jaxpr, again))
    of = list(range(len(leaves)))
    stored = _stored(program, model.params, [kept.get(i) for i in of])
    times = Counter(first)
    sizes = [
        None if i in kept else stored[j].bytes_now // times[j]
        for i, j in enumerate(first)
    ]
    authors = jax.tree.map(type_of, model.params)
    if which := foldable(program.jaxpr, sizes, first):
        parts = deduplicated(parts_of(program, leaves, which), first)
        mixed = folded(mixed, authors, which)
        model = model._replace(params=_with_parts(model.params, parts), rebuild=None)
        authors = jax.tree.map(type_of, model.params)
        program = traced(mixed, model.params, example_inputs)
        of = [i for i in range(len(leaves)) for _ in parts.get(i, (None,))]
        origins = [stored[i] if i in parts else None for i in of]
        stored = _stored(program, model.params, [kept.get(i) for i in of], origins)
    storable = [i not in kept for i in of]
    summary = _summary(
        model.name, program, stored, model.params, example_inputs, storable
    )
    summary = dataclasses.replace(summary, notes=(*left, *summary.notes))
    if cast_params and not kept and _saves_nothing(summary):
        warn_or_raise(_SAVES_NOTHING.format(model.name), strict=False)
    elif returns_gradients(program, model.params):
        warn_or_raise(_OF_TRAINING.format(model.name), strict=False)
    return Converted(
        model=model._replace(params=None),  # so that those in full are not kept alive
        mixed=mixed,
        authors=authors,
        params=_cast(model.params, stored),
        example_inputs=example_inputs,
        summary=summary,
    )


def _saves_nothing(summary: Summary) -> bool:
    """Whether contractions are low, and their parameters are stored as before."""
    are_low = any("float32" not in one.reads for one in summary.contractions)
    were_full = any(
        one.before in ("float32", "float64") and len(one.shape) > 1
        for one in summary.parameters
    )
    return are_low and were_full and not summary.changed


_SAVES_NOTHING = (
    "No parameter of {!r} is stored in fewer bits: each is read in full, too, as "
    "`summary` of what `convert` returns says. A gradient or a training step reads all "
    "of its parameters so: give the function that computes the model's outputs."
)


_OF_TRAINING = (
    "{!r} returns a tree like its parameters, as a gradient or a training step does, "
    "and what `convert` makes is for inference: nothing in it scales a loss, and its "
    "parameters are low. Give the function that computes the model's outputs; to train "
    "in mixed precision, use `enable_amp`."
)


def _stored(
    program: TracedModel,
    params: Any,
    keeps: Sequence[str | None],
    origins: Sequence[Stored | None] | None = None,
) -> tuple[Stored, ...]:
    """How each parameter is stored.

    Args:
        program: the program that reads the parameters.
        params: the tree of parameters.
        keeps: for each, the reason to leave it as it is, if there is one.
        origins: for each that replaces a parameter, because it is made of that, the row
            of that parameter; `None` for others."""
    leaves, names = _parameters(params)
    first = first_positions(leaves)
    uses: dict[int, Uses] = {}  # by an array's first place: its uses in all places
    for i, one in zip(first, program.uses, strict=False):
        uses[i] = uses.get(i, frozenset()) | one
    origins = [None] * len(leaves) if origins is None else origins
    made: list[Stored] = []
    for i, (name, leaf, origin) in enumerate(zip(names, leaves, origins, strict=True)):
        row = storage(name, leaf, uses[first[i]], keeps[i])
        if first[i] != i:
            why = f"the same array as {names[first[i]]}"
            row = row._replace(bytes_before=0, bytes_now=0, why=why)
        if origin is not None:
            is_first = i == 0 or origins[i - 1] is not origin
            holds = {use.holds for use in uses[first[i]]} - {""}
            made_of = f"made of {origin.name}, which nothing else reads"
            why = ", ".join([*sorted(holds), made_of])
            row = row._replace(
                before=origin.before,
                bytes_before=origin.bytes_before if is_first else 0,
                why=why if row.bytes_now else row.why,
                folded=True,
            )
        made.append(row)
    return tuple(made)


def _with_tied(which: Iterable[int], first: Sequence[int]) -> set[int]:
    """`which`, and the other places in which the same arrays stand."""
    wanted = {first[i] for i in which}
    return {i for i, j in enumerate(first) if j in wanted}


def _with_parts(params: Any, parts: dict[int, tuple[Any, ...]]) -> Any:
    places = itertools.count()

    def with_parts(leaf: Any) -> Any:
        return parts.get(next(places), leaf) if is_array_or_shape(leaf) else leaf

    return jax.tree.map(with_parts, params)


def _check_bool(value: Any, argument: str) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"`{argument}` must be a bool, but got {value!r}.")


def _parameters(params: Any) -> tuple[list[Any], list[str]]:
    """The arrays of a tree of parameters, with their paths."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    found = [(x, path_name(path)) for path, x in leaves if is_array_or_shape(x)]
    return [x for x, _ in found], distinct([name or "params" for _, name in found])


def _kept(keys: Sequence[Any], names: Sequence[str]) -> list[int]:
    """The positions of the parameters that `keep_inputs` names."""
    if isinstance(keys, str | re.Pattern) or not isinstance(keys, Sequence | set):
        raise TypeError(
            "`keep_inputs` must be a sequence of paths of parameters, of positions or "
            f"of compiled regular expressions, such as ['head'], but got {keys!r}."
        )
    found: list[int] = []
    for key in keys:
        matches = [i for i, name in enumerate(names) if _matches(key, i, name)]
        if not matches:
            hint = did_you_mean(key, names) if isinstance(key, str) else ""
            raise AmpError(
                f"{key!r} of `keep_inputs` is no parameter.{hint} There are "
                f"{len(names)}: {', '.join(names[:8])}{', ...' * (len(names) > 8)}."
            )
        found += matches
    return found


def _matches(key: Any, i: int, name: str) -> bool:
    if isinstance(key, re.Pattern):
        return key.fullmatch(name) is not None
    if isinstance(key, str):
        parts, path = key.strip("/").split("/"), name.split("/")
        return path[: len(parts)] == parts
    if isinstance(key, int) and not isinstance(key, bool):
        return key == i
    raise TypeError(
        "`keep_inputs` must hold paths, positions or compiled regular expressions, but "
        f"holds {key!r}."
    )


def _cast(params: Any, stored: Sequence[Stored]) -> Any:
    """The parameters as they are stored, in arrays that share nothing with them.

    A model that is trained on may be given to its next step for good, by donation."""
    copies: dict[int, Any] = {}  # of tied parameters, one

    def as_stored(leaf: Any, row: Stored) -> Any:
        dtype = narrower(leaf, row)
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf if dtype is None else leaf.update(dtype=dtype)
        if dtype is None:
            if id(leaf) not in copies:
                is_jax = isinstance(leaf, jax.Array)
                copies[id(leaf)] = jax.numpy.copy(leaf) if is_jax else leaf
            return copies[id(leaf)]
        made = cast(jax.numpy.asarray(leaf), dtype)
        if _overflows(leaf, made):
            warn_or_raise(_OVERFLOW.format(row.name, dtype.name), strict=False)
        return made

    rows = ticked("casting parameters", stored)
    stored_params = map_parameters(as_stored, params, rows)
    next(rows, None)  # tells that all are done
    return stored_params


def _overflows(leaf: Any, made: jax.Array) -> bool:
    """Whether a number of a parameter is finite, and infinite as it is stored."""
    if not is_float(made.dtype):
        return False
    if jax.numpy.finfo(made.dtype).maxexp >= jax.numpy.finfo(leaf.dtype).maxexp:
        return False
    of_both = jax.numpy.isfinite(leaf) & ~jax.numpy.isfinite(made)
    return bool(jax.numpy.any(of_both))


_OVERFLOW = (
    "The parameter {} holds numbers that are too large for {}: they are stored as "
    "infinity, as `amp` reads them. Convert in bfloat16 (`compute_dtype='bfloat16'`), "
    "or keep the scope that reads it in float32 (`excluded_scopes`)."
)


def _summary(
    name: str,
    program: TracedModel,
    stored: Sequence[Stored],
    params: Any,
    inputs: Any,
    storable: Sequence[bool],
) -> Summary:
    """The summary; casts and contractions are those that the converted program runs.

    `storable` says of each parameter whether it may be stored in another form."""
    constants, of_constants = program.constants(), program.stored_constants()
    leaves = parameters_in((params, inputs))
    avals = [
        x if (d := narrower(x, s)) is None else jax.ShapeDtypeStruct(x.shape, d)
        for x, s in zip(leaves, stored, strict=False)
    ]

    def run(*args: Any) -> list[Any]:
        return program.run(args[: len(constants)], args[len(constants) :])

    jaxpr = to_classic(trace(run, [*constants, *avals, *leaves[len(avals) :]]))
    uses = uses_of_inputs(jaxpr)[-(len(constants) + len(leaves)) :]
    told = [*of_constants, *stored]
    casts = [c for s, u in zip(told, uses, strict=False) for c in casts_of(s.name, u)]
    may_be = [*[True] * len(constants), *storable]
    may_be += [False] * (len(leaves) - len(storable))
    notes = [
        *of_rounded_weights(jaxpr, may_be),
        *of_random_numbers(jaxpr),
        *of_changed_states(jaxpr, program.merge, params, inputs),
    ]
    return Summary(
        name=name,
        parameters=tuple(stored),
        constants=of_constants,
        casts=tuple(casts),
        contractions=contractions_of(jaxpr),
        notes=tuple(notes),
    )
