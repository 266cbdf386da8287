"""Training steps that leave all of their state as it was when they are skipped."""

import functools
import re
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from .._dropped import warns_if_dropped
from .._dtypes import in_words
from .._errors import (
    calling_library,
    hiding_frames,
    place_of,
    showing_call,
    warn_or_raise,
)
from .._frameworks.nnx import (
    Snapshot,
    as_arrays,
    instances_in,
    is_node,
    nnx_nodes,
    nnx_states,
)
from .calls import difference, float_types
from .scaled import recording_misplaced
from .state import DynamicScalerState, NoScaler, is_scaler

_Step = TypeVar("_Step", bound=Callable[..., Any])


@warns_if_dropped("step = guard_step(step)")
@showing_call("guard_step(step)")
def guard_step(step: _Step) -> _Step:
    """A training step that leaves its state as it was if gradients overflowed.

    Parameters, moments, step counts, BatchNorm statistics, moving averages, PRNG keys:
    the whole state comes out bit for bit as it went in. Only the loss scale is updated.
    An optimizer that skips a step by itself protects only parameters and moments;
    BatchNorm statistics would stay inf or NaN.

    Other effects of the step can't be undone: what it writes to a `jax.Ref`, in its
    state or closed over, stays written, and callbacks have been run.

    Args:
        step: takes the state first, then anything else (a batch), and returns the next
            state, or a tuple that begins with it, as the body of `jax.lax.scan` does.
            The state is any pytree: a tuple, a `TrainState`, Equinox modules and
            `eqx.nn.State`. Somewhere it holds a loss scale, as a `DynamicScalerState`
            or in the state of a `loss_scale_optimizer`; if there are several, the step
            is skipped if any of them saw an overflow. It is skipped as a whole: guard
            the body of a loop over batches, not the loop. NNX objects are guarded in
            place and wherever they are among the arguments; a step of these alone may
            return what it likes.
    Returns:
        The guarded step, to be given to `jax.jit`, `eqx.filter_jit`, `nnx.jit` or
        `jax.lax.scan`.
    Raises:
        TypeError: `step` is not callable; when it is called, there is no loss scale, or
            it comes out as it went in, or the next state has another structure, shape
            or dtype than the state, or `jax.jit` would lose what it changes in NNX
            objects.

    >>> from jaxamp_like import DynamicScalerState, dynamic_scale_grad
    >>> @jax.jit
    ... @guard_step
    ... def step(state, x):
    ...     w, mean, scaler = state
    ...     scaler, grads = dynamic_scale_grad(lambda w: w * x)(
    ...         w, dynamic_scaler_state=scaler
    ...     )
    ...     return w - 0.1 * grads, 0.9 * mean + 0.1 * x, scaler
    >>> state = jnp.array(1.0), jnp.array(0.0), DynamicScalerState(scaler=1024)
    >>> w, mean, scaler = step(state, jnp.inf)
    >>> float(w), float(mean), float(scaler.scaler)
    (1.0, 0.0, 512.0)
    """
    if not callable(step):
        raise TypeError(
            f"`step` must be callable, but was given {type(step).__name__}.\nUse "
            "`@guard_step` above the training step, below `@jax.jit`."
        )

    @functools.wraps(step, updated=())
    @hiding_frames
    def guarded(state: Any, *args: Any, **kwargs: Any) -> Any:
        # The state is recorded before the step runs: an `eqx.nn.State` can be read only
        # once, and NNX objects are changed in place.
        old, tree = _flatten(state)
        nodes = nnx_nodes((state, args, kwargs))
        inner = _inner_scalers(nodes)
        before = Snapshot(nodes, but=jax.tree.leaves(inner, is_leaf=is_node))
        were = [x for _, x in old if is_scaler(x)] + as_arrays(inner)
        with recording_misplaced() as misplaced:
            out = step(state, *args, **kwargs)
        _refuse_lost_changes(nodes, before, out)
        if all(is_node(x) for _, x in old):
            old, new, rebuild = [], [], lambda _: out
        else:
            new, rebuild = _next_state(out, state, tree)
        are = [x for x in new if is_scaler(x)] + as_arrays(_inner_scalers(nodes))
        if not are:
            _refuse_no_scale(state, (args, kwargs))
        pairs = list(zip(old, new, strict=True))
        in_nodes = [(then, now) for _, then, now in before.changed()]
        is_update = _changes_floats(
            [(then, now) for (_, then), now in pairs] + in_nodes
        )
        skipped = _skipped(were, are, misplaced, is_update)
        if skipped is None:
            return out
        _warn_of_state_beside(step, args, out)
        before.rewrite(functools.partial(_keep, "an NNX variable", skipped))
        return rebuild([_keep(p, skipped, now, then) for (p, then), now in pairs])

    return guarded  # pyright: ignore[reportReturnType]


def _refuse_lost_changes(nodes: list[Any], before: Snapshot, out: Any) -> None:
    """Raises if a transform that knows no NNX objects runs a step which changes some.

    To such a transform they are pytrees: the step is given copies, and what it changes
    in these is only seen if it returns them."""
    around = calling_library(jax, eqx)
    if not nodes or around is None:
        return
    returned = {id(node) for node in nnx_nodes(out)}
    changed = {id(nodes[path[0]]): nodes[path[0]] for path, *_ in before.changed()}
    if lost := [x for key, x in changed.items() if key not in returned]:
        kinds = ", ".join(dict.fromkeys(type(x).__name__ for x in lost))
        raise TypeError(
            f"A guarded step changes NNX objects ({kinds}) under a transform of "
            f"{around}, such as `jit`, which gives it copies and drops what the step "
            "does not return: nothing would be trained.\nWrite `@nnx.jit` above "
            "`@guard_step`."
        )


def _is_complete(x: Any) -> bool:
    return is_scaler(x) or is_node(x)


def _flatten(state: Any) -> tuple[list[tuple[str, Any]], Any]:
    leaves, tree = jax.tree_util.tree_flatten_with_path(state, is_leaf=_is_complete)
    return [(jax.tree_util.keystr(path), x) for path, x in leaves], tree


_STATISTICS = frozenset(
    "mean means var variance stats statistics moving running average ema".split()
)


def _warn_of_state_beside(step: Any, args: tuple[Any, ...], out: Any) -> None:
    """Warns of statistics that are an argument and a result, but not in the state.

    The names of their arrays tell statistics from results that look like a batch, and
    so does their length: what is as long as another argument is a part of the batch."""
    results = out[1:] if isinstance(out, tuple) else ()
    for i, arg in enumerate(args, 2):
        kind = float_types(arg)
        paths, _ = jax.tree_util.tree_flatten_with_path(arg)
        names = [jax.tree_util.keystr(path) for path, _ in paths]
        if len(kind[1]) < 2 or is_node(arg) or not any(map(_is_statistic, names)):
            continue
        others = _batch_lengths([one for one in args if one is not arg])
        if _lengths(arg) and _lengths(arg) <= others:
            continue
        for result in results:
            leaves = zip(jax.tree.leaves(result), jax.tree.leaves(arg), strict=False)
            if float_types(result) == kind and any(x is not y for x, y in leaves):
                warn_or_raise(
                    f"A guarded step returns argument {i} anew, beside its state: "
                    "where gradients overflow, that keeps what the overflow made of "
                    f"it, such as NaN in the statistics of BatchNorm. {_FIRST} This "
                    f"is of {place_of(step)}.",
                    strict=False,
                )


def _is_statistic(path: str) -> bool:
    words = {*re.split("[^a-z]+", path.lower())}
    return bool(words & _STATISTICS) and "loss" not in words


def _lengths(tree: Any) -> set[int]:
    """How long the arrays of a tree are along their first axes."""
    return {x.shape[0] for x in jax.tree.leaves(tree) if getattr(x, "shape", ())}


def _batch_lengths(args: list[Any]) -> set[int]:
    """How many examples the arrays of a batch may hold, which have axes after that."""
    arrays = [x for x in jax.tree.leaves(args) if len(getattr(x, "shape", ())) > 1]
    return _lengths(arrays)


def _inner_scalers(nodes: list[Any]) -> list[Any]:
    """The scales in NNX objects, such as an `nnx.Optimizer`."""
    return instances_in(nodes, (DynamicScalerState, NoScaler))


def _next_state(
    out: Any, state: Any, tree: Any
) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """The leaves of the state that a step returns, and a function to replace them.

    Args:
        out: what the step returned.
        state: what it was given, of which `tree` is the structure."""
    leaves, structure = jax.tree.flatten(out, is_leaf=_is_complete)
    if structure == tree:
        return leaves, tree.unflatten
    if isinstance(out, tuple) and out:
        leaves, structure = jax.tree.flatten(out[0], is_leaf=_is_complete)
        if structure == tree:
            return leaves, lambda leaves: (tree.unflatten(leaves), *out[1:])
    differ = ""
    for next_state in (out, out[0] if isinstance(out, tuple) and out else out):
        if _outlined(next_state) == _outlined(state):
            names = "the next state", "the first argument"
            differ = difference(names[0], next_state, names[1], state)
    of_method = _OF_METHOD if _is_object(state) else ""
    raise TypeError(
        "A guarded step must return the next state, or a tuple that begins with it, in "
        f"the structure of its first argument.\n{_FIRST}{of_method}\nThe first "
        f"argument is {_outlined(state)}, but the step returned {_outlined(out)}."
        f"{differ and ' '}{differ}"
    )


def _is_object(state: Any) -> bool:
    """Whether a state is an object that JAX takes for a leaf, as `self` mostly is."""
    is_leaf = any(leaf is state for leaf in jax.tree.leaves(state))
    return is_leaf and not (is_node(state) or eqx.is_array_like(state))


def _outlined(x: Any) -> str:
    """The type of a tree, and of what a tuple, a list or a dict holds."""
    name = type(x).__name__
    if isinstance(x, dict):
        return f"a {name} of {_few(map(repr, x))}"
    if type(x) not in (tuple, list):
        return in_words(x)
    return f"a {name} of {_few(map(in_words, x))}"


def _few(names: Iterable[str]) -> str:
    names = [*names]
    return f"({', '.join(names[:6])}{', ...' * (len(names) > 6)})"


_FIRST = (
    "Put all that training changes into one first argument, and return it first; a "
    "batch comes after it. (Where only NNX objects change, begin with one of them.)"
)


_OF_METHOD = (
    " If the first argument is the `self` of a method, guard a function of the "
    "state: in `__init__`, `self.step = jax.jit(guard_step(self._step))`, where "
    "`_step(self, state, batch)` is the method."
)


def _refuse_no_scale(state: Any, others: Any) -> NoReturn:
    """Raises for a step without a loss scale in its state, but perhaps in `others`."""
    if any(map(is_scaler, jax.tree.leaves(others, is_leaf=is_scaler))):
        instead = f"It is in another argument. {_FIRST}"
    elif nnx_states(state):
        instead = (
            "An `nnx.State` holds arrays alone, not the objects that they belong to. "
            "Guard a function of the objects, and call it within: `model, optimizer = "
            "nnx.merge(graphdef, state)`, `guard_step(step)(model, optimizer, batch)`, "
            "`return nnx.state((model, optimizer))`."
        )
    else:
        instead = (
            "Put the `DynamicScalerState`, or the state of the `loss_scale_optimizer`, "
            "into its first argument. A step that scales no loss, as in bfloat16 with "
            "a plain optimizer, is never skipped: leave out `guard_step`."
        )
    raise TypeError(
        "No loss scale was found in the state of a guarded step, so that nothing "
        f"tells whether the step was skipped.\n{instead}"
    )


def _changes_floats(pairs: list[tuple[Any, Any]]) -> bool:
    """Whether a step has changed floating numbers: evaluating may use up a key only."""
    return any(
        then is not now and not is_scaler(now) and eqx.is_inexact_array(x)
        for then, now in pairs
        for x in jax.tree.leaves(now)
    )


def _skipped(
    were: list[Any], are: list[Any], misplaced: list[Any], is_update: bool
) -> Array | None:
    """Whether a step that led from `were` to `are` was skipped.

    Gradients of losses with the scales `misplaced` were given to another state. The
    result is `None` if no scale is dynamic, so that no overflow is looked for, and if
    the step is no update of the state, as one that evaluates by a static argument."""
    pairs = [
        (then, now)
        for then, now in zip(were, are, strict=True)
        if isinstance(now, DynamicScalerState)
    ]
    if pairs and all(now.skipped is then.skipped for then, now in pairs):
        if not is_update:
            return None
        raise TypeError(
            "The loss scale in the state of a guarded step came out as it went in, so "
            "that nothing tells whether the step was skipped.\nReturn it in the next "
            "state as it became: the `opt_state` that `tx.update` returns second, or "
            "the scaler that `dynamic_scale_grad` and its like return first."
        )
    if any(
        now.skipped is then.skipped and any(then.scaler is one for one in misplaced)
        for then, now in pairs
    ):
        warn_or_raise(
            "One of the loss scales in the state of a guarded step scaled a loss, but "
            "came out as it went in, so that it never changes: gradients were given to "
            "the `update` of another optimizer. Each loss wants the optimizer whose "
            "`value_and_grad` scaled it; for parts of the parameters there is "
            "`loss_scale_optimizer(optax.partition(...))`, with one scale for all.",
            strict=False,
        )
    grew = [now.skipped > then.skipped for then, now in pairs]
    return functools.reduce(jnp.logical_or, grew) if grew else None


def _keep(path: str, skipped: Array, now: Any, then: Any) -> Any:
    if now is then or _is_complete(now) or not eqx.is_array_like(now):
        return now
    if isinstance(then, np.ndarray | np.generic):
        then = jnp.asarray(then)  # as `jax.jit` takes it
    types = [in_words(x) for x in (then, now) if hasattr(x, "dtype")]
    if len({*types}) > 1:
        raise TypeError(
            f"A guarded step must keep the types of its state, but {path or 'it'} was "
            f"{types[0]} and is {types[1]}.\n"
            + ("Cast it back in the step." if now.shape == then.shape else _FIRST)
        )
    return jnp.where(skipped, then, now)
