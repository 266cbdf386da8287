"""Flax NNX: objects that are changed by the functions they are passed to.

A *node* is what NNX knows by its identity: a module, a variable, `nnx.Rngs`, a metric,
an optimizer. A call is taken apart: what its nodes hold becomes an argument, and what
the call leaves in them a result, so that transforms see arrays only. Flax is not
imported unless the user has done so."""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
from jax import Array

from .._jax import is_array


def _nnx() -> Any:
    return sys.modules.get("flax.nnx")


def is_node(x: Any) -> bool:
    nnx = _nnx()
    if nnx is None:
        return False
    # An array reference is a node for NNX, but JAX itself traces what is done to it.
    return isinstance(x, nnx.Variable) or (
        nnx.graph.is_graph_node(x) and not is_array(x)
    )


def is_nnx_module(x: Any) -> bool:
    nnx = _nnx()
    return nnx is not None and isinstance(x, nnx.Module)


def nnx_nodes(tree: Any) -> list[Any]:
    """The nodes in a pytree, each once, the owners of bound methods included."""
    if _nnx() is None:
        return []
    return _distinct(jax.tree.leaves(tree, is_leaf=is_node))


def nnx_states(tree: Any) -> list[Any]:
    """The `nnx.State`s in a pytree."""
    nnx = _nnx()
    return [] if nnx is None else instances_in(tree, nnx.State)


def _distinct(leaves: Sequence[Any]) -> list[Any]:
    owners = map(_owner, leaves)
    return list({id(x): x for x in owners if x is not None}.values())


def _owner(leaf: Any) -> Any:
    """The node that a leaf is, or is a bound method of."""
    holder = None if isinstance(leaf, Array) else getattr(leaf, "__self__", None)
    return next(filter(is_node, (leaf, holder)), None)


def instances_in(tree: Any, cls: type | tuple[type, ...]) -> list[Any]:
    """The instances of `cls` anywhere in a pytree, or in the nodes that it holds."""

    def is_leaf(x: Any) -> bool:
        return isinstance(x, cls) or is_node(x)

    found = {}
    for leaf in jax.tree.leaves(tree, is_leaf=is_leaf):
        inner = [leaf]
        if is_node(leaf) and not isinstance(leaf, cls):
            inner = [value for _, value in _nnx().iter_graph(leaf)]
        found |= {id(x): x for x in inner if isinstance(x, cls)}
    return list(found.values())


def as_arrays(tree: Any) -> Any:
    """`tree` with every NNX variable replaced by what it holds."""
    nnx = _nnx()
    if nnx is None:
        return tree
    return jax.tree.map(raw_value, tree, is_leaf=lambda x: isinstance(x, nnx.Variable))


def raw_value(x: Any) -> Any:
    """What a variable holds; anything else as it is."""
    if not isinstance(x, _nnx().Variable):
        return x
    # A method since Flax 0.12, an attribute before.
    return x.get_raw_value() if hasattr(x, "get_raw_value") else x.raw_value


def is_variable(x: Any) -> bool:
    nnx = _nnx()
    return nnx is not None and isinstance(x, nnx.Variable)


def variable_kind(x: Any) -> Literal["parameters", "optimizer state", ""]:
    """What the type of an NNX variable says that it is for; "" if it is none."""
    if not is_variable(x):
        return ""
    nnx = _nnx()
    if isinstance(x, getattr(nnx.optimizer, "OptState", ())):
        return "optimizer state"
    return "parameters" if isinstance(x, nnx.Param) else ""


def in_variable_like(x: Any, value: Any) -> Any:
    """`value` in a copy of the variable `x`; alone if `x` is none."""
    return x.replace(value) if is_variable(x) else value


def without_filters(argnums: Any) -> tuple[Any, dict[int, Any]]:
    """`argnums` as JAX takes them, and the filters in them, by position.

    An `nnx.DiffState` names an argument and a filter of its variables."""
    nnx = _nnx()
    if nnx is None:
        return argnums, {}
    is_several = isinstance(argnums, tuple | list)
    given = argnums if is_several else (argnums,)
    filters = {x.argnum: x.filter for x in given if isinstance(x, nnx.DiffState)}
    plain = tuple(x.argnum if isinstance(x, nnx.DiffState) else x for x in given)
    return (plain if is_several else plain[0]), filters


def named_submodules(model: Any) -> list[tuple[tuple[Any, ...], Any]]:
    """The modules inside of a module, each once, with the path to it."""
    nnx = _nnx()
    # A function since Flax 0.12, a method before.
    modules = getattr(nnx, "iter_modules", None) or type(model).iter_modules
    return [(path, module) for path, module in modules(model) if path]


def nnx_options(cls: type) -> dict[str, Any]:
    """The keywords that a subclass of `cls` is made with, if that is an NNX class."""
    options = "_pytree__is_pytree"  # whether its instances are pytrees, since Flax 0.12
    return {"pytree": getattr(cls, options)} if hasattr(cls, options) else {}


@dataclass(frozen=True)
class _NodeSlot:
    """A leaf that stands for a node among the results of a call."""

    number: int


@dataclass(frozen=True)
class _Static:
    """A leaf that holds something which is no array."""

    value: Any


class NodeChanges(NamedTuple):
    """What a call has left in its nodes, as a pytree.

    Args:
        values: the arrays (and other values) that were written.
        where: their places; or the new graph, if the call has changed that.
        made: the graph of the nodes among the results."""

    values: list[Any]
    where: _Static
    made: _Static


class FunctionalCall:
    """A call as a function of what its nodes hold.

    The nodes are split together, so that what they share stays shared.

    Args:
        fn: what is called; also a node, a method of one, or a partial application.
        args: its positional arguments.
        kwargs: its keyword arguments.
        first: nodes among these to which shared variables are to belong."""

    def __init__(
        self,
        fn: Callable[..., Any],
        args: Any,
        kwargs: Any,
        first: Sequence[Any] = (),
    ):
        self.nodes: list[Any] = []
        if _nnx() is None:
            return
        if isinstance(fn, functools.partial):
            fn = jax.tree_util.Partial(fn.func, *fn.args, **fn.keywords)
        leaves, self._tree = jax.tree.flatten((fn, args, kwargs), is_leaf=is_node)
        self.nodes = _distinct([*first, *leaves])
        self._leaves = leaves
        if self.nodes:
            self._numbers = {id(node): i for i, node in enumerate(self.nodes)}
            self._is_node = [id(_owner(x)) in self._numbers for x in leaves]
            graph = _nnx().graph
            self._refs = graph.RefMap()
            self._graph, held = graph.flatten(self.nodes, ref_index=self._refs)
            self.by_path = dict(held)
            self.held = _nnx().from_flat_state([*held])

    @property
    def others(self) -> list[Any]:
        """The leaves of the arguments that are no nodes."""
        pairs = zip(self._leaves, self._is_node, strict=True)
        return [x for x, is_place in pairs if not is_place]

    @property
    def function(self) -> Any:
        """What is called; a partial application as a pytree."""
        return jax.tree.unflatten(self._tree, self._leaves)[0]

    def holders(self) -> list[tuple[int, Any, Any]]:
        """Where each leaf of what the nodes hold, and then of `others`, is found.

        Returns:
            For each, the number of the leaf of `fn`, its arguments and its keyword
            arguments in which it is; the variable or array that a node holds it in,
            `None` if no node does; and the leaf itself."""
        first: dict[int, int] = {}
        for i, leaf in enumerate(self._leaves):
            if self._is_node[i]:
                first.setdefault(self._numbers[id(_owner(leaf))], i)
        place = {id(x): first[path[0]] for path, x in self.by_path.items()}
        held = jax.tree.leaves(self.held, is_leaf=lambda x: id(x) in place)
        pairs = zip(range(len(self._leaves)), self._is_node, strict=True)
        others = [i for i, is_place in pairs if not is_place]
        return [
            *((place[id(x)], x, leaf) for x in held for leaf in jax.tree.leaves(x)),
            *((i, None, self._leaves[i]) for i in others),
        ]

    def labels(self, label: Callable[..., list[Any]], other: Any) -> list[Any]:
        """A label for each leaf of what the nodes hold, and then of `others`.

        Args:
            label: a function of `fn`, its arguments, its keyword arguments and
                `is_leaf`, which returns a label for each leaf. Of several labels for
                one variable the largest is taken.
            other: the label of variables of another kind than `nnx.Param`, such as a
                cache or statistics."""
        nnx = _nnx()
        call = jax.tree.unflatten(self._tree, self._leaves)
        made = label(*call, is_leaf=is_node)
        of_node: dict[int, Any] = {}
        for leaf, one in zip(self._leaves, made, strict=True):
            number = self._numbers.get(id(_owner(leaf)))
            if number is not None:
                of_node[number] = max(one, of_node.get(number, one))
        of_leaf: dict[int, Any] = {}
        for (number, *_), x in self.by_path.items():
            is_other = isinstance(x, nnx.Variable) and not isinstance(x, nnx.Param)
            one = other if is_other else of_node.get(number, other)
            of_leaf[id(x)] = max(one, of_leaf.get(id(x), one))
        held = jax.tree.leaves(self.held, is_leaf=lambda x: id(x) in of_leaf)
        pairs = zip(made, self._is_node, strict=True)
        return [
            *(of_leaf[id(x)] for x in held for _ in jax.tree.leaves(x)),
            *(one for one, is_place in pairs if not is_place),
        ]

    def parameters(self, node: Any, wanted: Any = None) -> Any:
        """What derivatives are taken by: a variable itself, or some of a node's.

        These come as a state: the variables for which a filter `wanted` of NNX holds,
        by default `nnx.Param`s."""
        nnx, number = _nnx(), self._numbers[id(node)]
        holds = nnx.filterlib.to_predicate(nnx.Param if wanted is None else wanted)
        if isinstance(node, nnx.Variable):
            return node
        return nnx.from_flat_state(
            [
                (path[1:], x)
                for path, x in self.by_path.items()
                if path[0] == number and holds(path[1:], x)
            ]
        )

    def with_parameters(self, node: Any, parameters: Any) -> dict[Any, Any]:
        """Parameters of a node by their paths, as `run` takes them."""
        nnx, number = _nnx(), self._numbers[id(node)]
        if isinstance(node, nnx.Variable):
            return {(number,): parameters}
        return {(number, *path): x for path, x in nnx.to_flat_state(parameters)}

    def __call__(self, held: Any, others: Sequence[Any]) -> tuple[Any, NodeChanges]:
        """Calls the function on nodes that hold `held`.

        Returns:
            Its result, for `put_back`, and what it left in the nodes."""
        found: list[Any] = []

        def body(fn: Any, args: Any, kwargs: Any) -> Any:
            leaves, tree = jax.tree.flatten(fn(*args, **kwargs), is_leaf=is_node)
            found.extend(_distinct([x for x in leaves if is_node(x)]))
            numbers = {id(node): i for i, node in enumerate(found)}
            leaves = [_NodeSlot(numbers[id(x)]) if is_node(x) else x for x in leaves]
            return tree.unflatten(leaves)

        by_path = dict(_nnx().to_flat_state(held))
        return self.run(body, by_path, others, found)

    def run(
        self,
        body: Callable[[Callable[..., Any], Any, Any], Any],
        by_path: dict[Any, Any] | None = None,
        others: Sequence[Any] | None = None,
        found: Sequence[Any] = (),
    ) -> tuple[Any, NodeChanges]:
        """Calls `body(fn, args, kwargs)` on nodes of the current trace.

        Args:
            body: what is called instead of `fn`.
            by_path: what the nodes hold, if it is not what they hold now.
            others: leaves of the arguments, if they are not those of the call.
            found: a list to which `body` adds the nodes among its results; without it,
                nodes stay there as they are."""
        nnx = _nnx()
        by_path = self.by_path | (by_path or {})
        others = self.others if others is None else others
        before = [raw_value(by_path[path]) for path in self.by_path]
        known = nnx.graph.IndexMap()
        nodes = nnx.graph.unflatten(self._graph, before, index_ref=known)
        classes = {i: type(node) for i, node in known.items()}

        def substitute(leaf: Any) -> Any:
            node = nodes[self._numbers[id(_owner(leaf))]]
            return node if is_node(leaf) else getattr(node, leaf.__name__)

        rest = iter(others)
        full = [
            substitute(x) if is_place else next(rest)
            for x, is_place in zip(self._leaves, self._is_node, strict=True)
        ]
        out = body(*jax.tree.unflatten(self._tree, full))
        for i, node in known.items():
            if type(node) is not classes[i]:  # `scope_modules`, for this call only
                object.__setattr__(node, "__class__", classes[i])
        return out, self._left(nodes, known, before, [*found])

    def _left(
        self, nodes: list[Any], known: Any, before: list[Any], found: list[Any]
    ) -> NodeChanges:
        graph = _nnx().graph
        refs = graph.RefMap()
        now, after = graph.flatten(nodes, ref_index=refs, with_paths=False)
        if now == self._graph:
            places = [i for i, x in enumerate(before) if not _is_same(x, after[i])]
            values, where = [after[i] for i in places], places
        else:  # attributes were added, removed or replaced
            refs, outer = graph.RefMap(), graph.RefMap.from_indexmap(known)
            where, values = graph.flatten(
                nodes, ref_index=refs, ref_outer_index=outer, with_paths=False
            )
        # As one list, so that what they share with the arguments stays shared too.
        made, made_values = graph.flatten(found, ref_index=refs, with_paths=False)
        return NodeChanges([*values, *made_values], _Static(where), _Static(made))

    def put_back(self, out: Any, left: NodeChanges) -> Any:
        """Writes what a call has left into the nodes themselves.

        What was not written to is left alone: a node made outside the current trace may
        be read, but Flax forbids to write to it.

        Returns:
            The result of the call, with the nodes that are in it."""
        graph = _nnx().graph
        where, values = left.where.value, iter(left.values)
        if isinstance(where, list):
            paths = [*self.by_path]
            items = [(paths[i], next(values)) for i in where]
            if items:
                _write(self.nodes, items)
            known = graph.IndexMap.from_refmap(self._refs)
        else:
            known = graph.IndexMap()
            graph.unflatten(
                where,
                [next(values) for _ in range(where.num_leaves)],
                index_ref=known,
                outer_index_outer_ref=graph.IndexMap.from_refmap(self._refs),
            )
        found = graph.unflatten(left.made.value, [*values], index_ref=known)

        def put(leaf: Any) -> Any:
            return found[leaf.number] if isinstance(leaf, _NodeSlot) else leaf

        return jax.tree.map(put, out)


def _is_same(x: Any, y: Any) -> bool:
    return [*map(id, jax.tree.leaves(x))] == [*map(id, jax.tree.leaves(y))]


def _write(nodes: list[Any], items: list[tuple[Any, Any]]) -> None:
    nnx = _nnx()
    now = dict(nnx.graph.flatten(nodes)[1])
    for path, value in items:
        variable = now[path]
        if not isinstance(variable, nnx.Variable):
            nnx.update(nodes, nnx.from_flat_state([(path, value)]))
        elif hasattr(variable, "set_raw_value"):  # since Flax 0.12
            variable.set_raw_value(value)
        else:
            variable.raw_value = value


class Snapshot:
    """What nodes hold now, to be given back to them later.

    Args:
        nodes: modules, variables, metrics, `nnx.Rngs`, optimizers.
        but: variables and other objects that are left out."""

    def __init__(self, nodes: list[Any], but: Sequence[Any] = ()):
        self.nodes = nodes
        self._but = {id(x) for x in but}
        self._values = dict(self._held())

    def _held(self) -> Iterator[tuple[Any, Any]]:
        held = _nnx().graph.flatten(self.nodes)[1] if self.nodes else ()
        for path, leaf in held:
            if id(leaf) not in self._but:
                yield path, raw_value(leaf)

    def changed(self) -> list[tuple[Any, Any, Any]]:
        """The path, old value and new value of each variable that was written to."""
        return [
            (path, self._values[path], now)
            for path, now in self._held()
            if path in self._values and not _is_same(self._values[path], now)
        ]

    def rewrite(self, choose: Callable[[Any, Any], Any]) -> None:
        """Replaces each array that was written to by `choose(now, before)`.

        Values whose tree structure has changed are left alone."""
        items = [
            (path, jax.tree.map(choose, now, old))
            for path, old, now in self.changed()
            if jax.tree.structure(now) == jax.tree.structure(old)
        ]
        if items:
            _write(self.nodes, items)


def call_with_nodes(
    rewrite: Callable[[Callable[..., Any]], Callable[..., Any]],
    fn: Callable[..., Any],
    args: Any,
    kwargs: Any,
) -> Any:
    """`rewrite(fn)(*args, **kwargs)`, if `rewrite` only takes functions of arrays."""
    with with_nnx_advice():
        call = FunctionalCall(fn, args, kwargs)
        if not call.nodes:
            return rewrite(fn)(*args, **kwargs)
        return call.put_back(*rewrite(call)(call.held, call.others))


@contextlib.contextmanager
def with_nnx_advice() -> Iterator[None]:
    """Adds advice to Flax's error if a node of another trace is written to."""
    errors = sys.modules.get("flax.errors")
    try:
        yield
    except Exception as error:
        if errors is not None and isinstance(error, errors.TraceContextError):
            error.add_note(
                "The function changes an NNX object that it closes over (or that a "
                "transform around it knows nothing of), and the change would be lost. "
                "Make the object an argument: what a call changes in these is kept."
            )
        raise
