"""What the arguments of a call are for: parameters, or the state of an optimizer.

Types say it: those of Optax and of this package are of states, and NNX has a type for
each kind of variable. Optax has none for parameters. They are told by their moments in
a state: a tree of arrays with the same paths and shapes. What can't be told so has no
kind."""

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.tree_util import keystr

from .._dtypes import is_float
from .._frameworks.nnx import FunctionalCall, is_node, variable_kind
from .._jax import is_array_or_shape
from .._loss_scale.optimizer_state import LossScaleState
from .._loss_scale.state import is_scaler
from .._storage.codes import LowBitArray
from .._storage.optimizer import LowBitState
from .._storage.updates import Float32UpdateState
from .data.memory import ArgumentKind, ArgumentRecord
from .walk import num_bytes

_OWN_STATES = (LossScaleState, LowBitState, Float32UpdateState)

_Path = tuple[Any, ...]
_Shapes = dict[_Path, tuple[int, ...]]


class _Leaf(NamedTuple):
    """A leaf of the arguments: an array, a node of NNX, or what is no array.

    Args:
        argument: the name of the argument that it is in.
        is_told: whether the user said that this argument holds parameters.
        path: where it stands among all arguments.
        value: itself.
        kind: what it is for, if it is a part of something whose type says so."""

    argument: str
    is_told: bool
    path: _Path
    value: Any
    kind: ArgumentKind


def argument_records(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    avals: Sequence[Any],
    told: Sequence[int],
) -> tuple[ArgumentRecord, ...]:
    """What each argument of `fn(*args, **kwargs)` holds of each kind.

    Args:
        fn: a function.
        args: its positional arguments.
        kwargs: its keyword arguments.
        avals: of all arrays among the arguments, in the order of `flat_call`.
        told: the positional arguments that hold parameters, if the user said so."""
    pairs = [*zip(_names(fn, len(args)), args, strict=True), *sorted(kwargs.items())]
    call = FunctionalCall(fn, args, kwargs)
    if call.nodes:  # the function may be one of them, or hold some
        pairs = [("the function itself", call.function), *pairs]
        told = [i + 1 for i in told]
    leaves = [
        leaf
        for i, (name, tree) in enumerate(pairs)
        for leaf in _leaves(name, tree, i, i in told)
    ]
    parameters = _parameters(leaves, [tree for _, tree in pairs])
    if call.nodes:
        held = [(leaves[i], variable, x) for i, variable, x in call.holders()]
    else:
        held = [(leaf, None, leaf.value) for leaf in leaves]
    arrays = [(leaf, v) for leaf, v, x in held if is_array_or_shape(x)]
    sizes: dict[tuple[str, ArgumentKind], list[tuple[_Leaf, int]]] = {}
    for (leaf, variable), aval in zip(arrays, avals, strict=True):
        kind = leaf.kind or variable_kind(variable)
        is_told = leaf.is_told and variable is None  # else its type would say it
        is_told &= is_float(getattr(aval, "dtype", None))
        if not kind and (is_told or leaf.path in parameters):
            kind = "parameters"
        sizes.setdefault((leaf.argument, kind), []).append((leaf, num_bytes(aval)))
    several = Counter(argument for argument, _ in sizes)
    records: dict[tuple[str, ArgumentKind], int] = {}
    for (argument, kind), parts in sizes.items():
        for leaf, size in parts:
            # Of a state that holds all, a row says which part of it is meant.
            part = keystr(leaf.path[1:2]) if several[argument] > 1 else ""
            key = argument + part, kind
            records[key] = records.get(key, 0) + size
    return tuple(ArgumentRecord(*key, size) for key, size in records.items() if size)


def _names(fn: Callable[..., Any], count: int) -> list[str]:
    """What the positional arguments of a function are called."""
    try:
        parameters = [*inspect.signature(fn).parameters.values()]
    except (TypeError, ValueError):  # of some callables they can't be known
        parameters = []
    named = [
        p.name
        for p in parameters
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    several = next((p.name for p in parameters if p.kind == p.VAR_POSITIONAL), "args")
    rest = range(count - len(named))
    return [*named[:count], *(f"{several}[{i}]" for i in rest)]


def _leaves(name: str, tree: Any, number: int, is_told: bool) -> Iterator[_Leaf]:
    paths = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_node)
    for (path, value), kind in zip(paths, _kinds(tree), strict=True):
        yield _Leaf(name, is_told, (number, *path), value, kind)


def _kinds(tree: Any) -> Iterator[ArgumentKind]:
    """For each leaf, what the outermost type around it says that it is for."""

    def is_whole(x: Any) -> bool:
        return is_node(x) or _is_state(x) or is_scaler(x)

    for x in jax.tree.leaves(tree, is_leaf=is_whole):
        kind: ArgumentKind = ""
        if _is_state(x):
            kind = "optimizer state"
        elif is_scaler(x):
            kind = "loss scale"
        for _ in jax.tree.leaves(x, is_leaf=is_node):
            yield kind


def _is_state(x: Any) -> bool:
    """Whether it is the state of an optimizer, and holds anything."""
    package = str(type(x).__module__).partition(".")[0]
    is_one = package == "optax" or isinstance(x, _OWN_STATES)
    return is_one and bool(jax.tree.leaves(x))


# Parameters, by their moments.


def _parameters(leaves: Sequence[_Leaf], arguments: Sequence[Any]) -> set[_Path]:
    """The paths of arrays that lie in the same tree as those which have moments."""
    shapes = {
        leaf.path: tuple(leaf.value.shape)
        for leaf in leaves
        if not leaf.kind and _is_float_array(leaf.value)
    }
    roots = {root for one in _moments(arguments) for root in _root(one, shapes)}
    return {path for path in shapes if any(path[: len(r)] == r for r in roots)}


def _is_float_array(x: Any) -> bool:
    # The type of an NNX variable says what it is for.
    return not is_node(x) and is_array_or_shape(x) and is_float(x.dtype)


def _moments(tree: Any) -> Iterator[_Shapes]:
    """The trees of arrays in states, such as Adam's `mu`: the shape at each path."""
    for state in jax.tree.leaves(tree, is_leaf=_is_state):
        if not _is_state(state):
            continue
        for part in jax.tree.leaves(
            state, is_leaf=lambda x, state=state: x is not state
        ):
            if any(map(_is_state, jax.tree.leaves(part, is_leaf=_is_state))):
                yield from _moments(part)
            else:
                yield _shapes(part)


def _shapes(tree: Any) -> _Shapes:
    def is_whole(x: Any) -> bool:
        return isinstance(x, LowBitArray) or is_node(x)

    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_whole)
    found: _Shapes = {}
    for path, x in leaves:
        if isinstance(x, LowBitArray):
            found[path] = x.decoded_shape
        elif _is_float_array(x):
            found[path] = tuple(x.shape)
    return found


def _root(moments: _Shapes, shapes: _Shapes) -> list[_Path]:
    """Where the only tree of arrays stands that has these paths and shapes.

    Of several, any might be the one that is trained; and a number that is alone, such
    as a learning rate, has nothing by which it would be told from others."""
    if not moments or moments == {(): ()}:
        return []
    first = max(moments, key=len)
    found = [
        path[: len(path) - len(first)]
        for path in shapes
        if path[len(path) - len(first) :] == first and len(path) > len(first)
    ]
    fitting = [
        root
        for root in found
        if all(shapes.get((*root, *rest)) == shape for rest, shape in moments.items())
    ]
    return fitting if len(fitting) == 1 else []
