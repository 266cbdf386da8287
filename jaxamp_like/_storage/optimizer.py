"""An optimizer whose state is stored in few bits."""

import inspect
import itertools
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .._errors import (
    calling_library,
    hiding_frames,
    length_of_state,
    showing_call,
    warn_or_raise,
)
from .._frameworks.nnx import as_arrays, in_variable_like, is_variable
from .._frameworks.serialization import save_with_flax
from .._jax import is_array_or_shape
from .._random_rounding import mixed
from .._suggestions import no_attribute
from .._tiles import tile_of
from .codes import Layout, LowBitArray, encoded, from_saved, layout_of, to_saved
from .formats import check_settings
from .moments import Where, stored_low
from .rounded_updates import warn_of_rounded_updates

Rounding = Literal["stochastic", "nearest"]


class LowBitState(NamedTuple):
    """The state of an optimizer that `low_bit_state` wrapped.

    Args:
        inner_state: the state of the wrapped optimizer, with a `LowBitArray` in the
            place of each array that is stored in few bits.
        seed: of the rounding of the next step, a uint32; it changes at each step. It
            is `None` where numbers are rounded to the nearest."""

    inner_state: Any
    seed: Any

    if not TYPE_CHECKING:

        def __len__(self) -> int:
            return length_of_state(self, calling_library(optax), "`low_bit_state`")


class LowBitOptimizer(optax.GradientTransformationExtraArgs):
    """What `low_bit_state` makes: an Optax optimizer with a `LowBitState`."""

    if TYPE_CHECKING:  # the fields of Optax, with the type that the state has here

        def init(self, params: Any) -> LowBitState: ...  # pyright: ignore

        def update(  # pyright: ignore
            self, updates: Any, state: Any, params: Any = None, **extra_args: Any
        ) -> tuple[Any, LowBitState]: ...

    else:

        def __getattr__(self, name: str) -> Any:
            hint = _INSIDE.format("low_bit_state") if name in _OF_SCALING else ""
            raise no_attribute(self, name, hint)


_OF_SCALING = "value_and_grad", "grad"
_INSIDE = (
    "What computes gradients is the optimizer of `enable_amp`, which comes outermost: "
    "`mixed, tx = enable_amp(loss_fn, {}(optimizer))`."
)


@showing_call("low_bit_state(optax.adam(1e-3), 'int8')")
def low_bit_state(
    optimizer: optax.GradientTransformation,
    format: str = "int8",
    *,
    block: int = 256,
    where: Where | None = None,
    min_size: int = 4096,
    rounding: Rounding = "stochastic",
    seed: int = 0,
) -> LowBitOptimizer:
    """Wraps an optimizer so that its state takes a quarter of the memory, or an eighth.

    An update decodes the state, runs the optimizer in float32, and encodes its new
    state. Stored in few bits is what is large, has the shape of a parameter and begins
    as one number everywhere: the moments of Adam and its kin, momentum, sums of
    squares. Copies of parameters (schedule-free, Prodigy), settings
    (`optax.inject_hyperparams`), the gradients that `optax.MultiSteps` adds up, factors
    of matrices and small arrays stay as they are. So do states whose numbers are
    subtracted from each other (`optax.lbfgs`, line searches, centered RMSProp) or make
    the parameters anew at each step (MADGRAD, COCOB).

    A block of numbers shares a scale, and an inf or a NaN makes the block NaN. Numbers
    are rounded by chance, so that a moment which changes by less than a step moves in
    the mean: rounded to the nearest, squares that decay by 0.999 would stand still. No
    derivative passes through what is stored in few bits, as through `stop_gradient`.

    Args:
        optimizer: any Optax optimizer; extra arguments of `update` are handed on.
        format: "int8" (codes closer to each other near zero), "int4" (the same in 4
            bits), "float8" (float8_e4m3fn) or "bfloat16" (no scales).
        block: how many numbers share a scale, at most. They are neighbours along the
            last axis, and along those before it where the last is shorter. A block
            doesn't cross from one device to another if the sharding of the parameters
            is known to `init`: of arrays that lie on devices, and in `jit` along axes
            of explicit sharding.
        where: from the path and the value of each floating-point leaf of the state,
            whether it is stored in few bits; `None` leaves it to the rule above.
        min_size: arrays of fewer numbers are left as they are.
        rounding: "stochastic", or "nearest".
        seed: of the stochastic rounding. Runs with equal seeds are equal, however
            `jit` lays the state over devices.
    Returns:
        An optimizer whose state is a `LowBitState`.
    Raises:
        TypeError: `optimizer` is none, `where` returns something else than `True`,
            `False` and `None`, or `update` gets another state.
        ValueError: an argument is out of its range; or, by `init`, the rule can't tell
            an array of the state; or, by `update`, the state has another format or
            rounding.

    >>> tx = low_bit_state(optax.adam(1e-3))
    >>> params = jnp.ones((128, 256))
    >>> state = tx.init(params)
    >>> state.inner_state[0].mu.codes.dtype, state.inner_state[0].mu.codes.shape
    (dtype('uint8'), (128, 256))
    >>> updates, state = tx.update(jnp.ones_like(params), state, params)
    >>> round(float(updates[0, 0]), 5)
    -0.001

    8-bit states are those of Dettmers et al. (arXiv:2110.02861), 4-bit states those of
    Li et al. (arXiv:2309.01507), as in bitsandbytes and torchao, which store the same
    arrays; the codes differ."""
    inner = checked_optimizer(optimizer, "low_bit_state")
    check_settings(format, block=(block, 16), min_size=(min_size, 0), seed=(seed, 0))
    if where is not None and not callable(where):
        raise TypeError(
            "`where` must be a function of the path and the value of a leaf of the "
            "state, which returns `True` (in few bits), `False` (as it is) or `None` "
            f"(by the rule), but was given {where!r}.\nSuch as `where=lambda path, x: "
            "False if '.nu' in path else None`; `None` leaves all to the rule."
        )
    check_rounding(rounding)

    @hiding_frames
    def init(params: Any) -> LowBitState:
        save_with_flax(LowBitArray, to_saved, from_saved)
        state = inner.init(params)
        warn_of_rounded_updates(inner, params, state)
        first = jnp.uint32(seed % 2**32) if rounding == "stochastic" else None
        leaves, structure = jax.tree.flatten(state, is_leaf=is_variable)
        is_low = stored_low(state, inner.init, params, min_size, where)
        # Without an array there is nothing to store: so `optax.tree_map_params` calls.
        if any(map(is_array_or_shape, jax.tree.leaves(params))) and not any(is_low):
            warn_or_raise(
                "`low_bit_state` stores nothing in few bits: no array of the state has "
                f"the shape of a parameter of at least `min_size={min_size}` numbers "
                "and begins as one number everywhere. Lower `min_size`, name arrays by "
                "`where`, or leave `low_bit_state` out.",
                strict=False,
            )

        # What is one number everywhere, as moments are at first, needs no chance.
        def low_of(x: Any) -> LowBitArray:
            array = as_arrays(x)
            # XLA would compute the codes of zeros, one by one, when it compiles `init`.
            x = jax.lax.optimization_barrier(x)
            return _stored(x, layout_of(array, format, tile_of(array, block)), None)

        low = [low_of(x) if this else x for x, this in zip(leaves, is_low, strict=True)]
        return LowBitState(jax.tree.unflatten(structure, low), first)

    @hiding_frames
    def update(
        updates: Any, state: Any, params: Any = None, **extra_args: Any
    ) -> tuple[Any, LowBitState]:
        save_with_flax(LowBitArray, to_saved, from_saved)  # it may have come since
        _check_state(state, format, block, rounding)
        full = _decoded(state.inner_state)
        updates, new = inner.update(updates, full, params, **extra_args)
        return updates, _like(state, new)

    return LowBitOptimizer(init, update)  # pyright: ignore


def to_full_state(state: Any) -> Any:
    """The state that the optimizer would have without `low_bit_state`.

    It is for checkpoints that are to be read without it, and to look at moments.

    Args:
        state: a `LowBitState`, or any tree that holds some.
    Returns:
        The tree, with the state of the wrapped optimizer, in its own dtypes, in the
        place of each `LowBitState`.

    >>> tx = low_bit_state(optax.sgd(0.1, momentum=0.9))
    >>> full = to_full_state(tx.init(jnp.ones((64, 64))))
    >>> full[0].trace.dtype.name
    'float32'
    """

    def full(x: Any) -> Any:
        return to_full_state(_decoded(x.inner_state)) if _is_state(x) else x

    return jax.tree.map(full, state, is_leaf=_is_state)


def to_low_bit_state(full: Any, like: Any) -> Any:
    """A state of an optimizer without `low_bit_state`, for the optimizer with it.

    Args:
        full: a state of the optimizer without `low_bit_state`, such as one that was
            read from a checkpoint.
        like: what `init` of the optimizer with `low_bit_state` returns. It says what is
            stored in few bits, and how.
    Returns:
        The numbers of `full` in a tree as `like`.
    Raises:
        ValueError: the trees, or the shapes of arrays, differ.

    >>> tx = optax.sgd(0.1, momentum=0.9)
    >>> full = tx.init(params := jnp.ones((64, 64)))
    >>> type(to_low_bit_state(full, like=low_bit_state(tx).init(params))).__name__
    'LowBitState'
    """

    def low(x: Any, part: Any) -> Any:
        return _like(x, part) if _is_state(x) else part

    return jax.tree.map(low, like, full, is_leaf=_is_state)


_encode = jax.jit(encoded, static_argnums=1)


def _stored(x: Any, layout: Layout, seed: Any) -> LowBitArray:
    """An array, or an NNX variable that holds one, in few bits.

    Codes and scales are in a variable each, and not both in one: `nnx.Optimizer` makes
    variables of single arrays."""
    low = _encode(as_arrays(x), layout, seed)
    return jax.tree.map(partial(in_variable_like, x), low)


def _decoded(tree: Any) -> Any:
    """`tree` with each `LowBitArray` in full, but those of a wrapper further inside."""

    def full(x: Any) -> Any:
        return in_variable_like(x.codes, x.decoded()) if _is_low(x) else x

    return jax.tree.map(full, tree, is_leaf=_is_stored)


def _like(state: LowBitState, full: Any) -> LowBitState:
    """A full state, stored as `state`, with the seed of the step after it."""
    # A seed of NumPy's, as from a checkpoint, would warn where it wraps around.
    first = None if state.seed is None else jnp.asarray(state.seed)
    numbers = itertools.count(1)

    def stored(path: Any, old: Any, new: Any) -> Any:
        if _is_state(old):  # that of a wrapper further inside, which has updated it
            return new if _is_state(new) else _like(old, new)
        if not _is_low(old):
            return new
        expected, shape = old.decoded_shape, jnp.shape(as_arrays(new))
        if shape != expected:
            raise ValueError(
                f"`state{jax.tree_util.keystr(path)}` is to be stored in few bits as "
                f"an array of the shape {expected}, but has the shape "
                f"{shape}.\nTake the `like` of the same parameters, or a "
                "`low_bit_state` whose `where` leaves this array as it is."
            )
        seed = None if first is None else mixed(first + np.uint32(next(numbers)))
        return _stored(new, old.layout, seed)

    inner = _mapped(stored, state.inner_state, full)
    seed = None if first is None else mixed(first + np.uint32(0x9E3779B9))
    return LowBitState(inner, seed)


def _mapped(fn: Any, like: Any, full: Any) -> Any:
    """`fn` of paths, leaves of `like`, and what `full` has in their places."""
    try:
        return jax.tree_util.tree_map_with_path(fn, like, full, is_leaf=_is_stored)
    except ValueError as e:
        if "state" in str(e).split("\n")[0]:
            raise
        raise ValueError(
            "The state is another tree than it was when the optimizer was initialised: "
            f"{e}\n`full` is the state of the same optimizer without `low_bit_state`, "
            "and `like` that of `init` with it."
        ) from e


def _is_low(x: Any) -> bool:
    return isinstance(x, LowBitArray)


def _is_state(x: Any) -> bool:
    return isinstance(x, LowBitState)


def _is_stored(x: Any) -> bool:
    return _is_low(x) or _is_state(x)


def check_rounding(rounding: Any) -> None:
    if rounding not in ("stochastic", "nearest"):
        raise ValueError(
            f'`rounding` must be "stochastic" or "nearest", but was given {rounding!r}.'
        )


def checked_optimizer(optimizer: Any, wrapper: str) -> Any:
    """An optimizer whose `update` takes extra arguments, or an error of `wrapper`."""
    if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        given = type(optimizer).__name__
        if given == "Enabled":
            raise TypeError(
                f"`{wrapper}` was given a pair, as `enable_amp` returns. It comes "
                f"within: `mixed, tx = enable_amp(loss_fn, {wrapper}(optimizer))`."
            )
        if isinstance(optimizer, str) or inspect.isroutine(optimizer):
            given = repr(optimizer)
        raise TypeError(
            "`optimizer` must be an Optax optimizer (a `GradientTransformation`), but "
            f"was given {given}.\nWrite `{wrapper}(optax.adam(1e-3))`, whose `init` "
            "makes the state."
        )
    if hasattr(optimizer, _OF_SCALING[0]):
        warn_or_raise(
            f"`{wrapper}` was given an optimizer that scales the loss, and what it "
            f"makes of that can't. {_INSIDE.format(wrapper)}",
            strict=False,
        )
    return optax.with_extra_args_support(optimizer)


def _check_state(state: Any, format: str, block: int, rounding: Rounding) -> None:
    if not _is_state(state):
        raise TypeError(
            "`state`, the second argument of `update` of a `low_bit_state`, is the "
            "`LowBitState` that its `init` or its last `update` returned, but it was "
            f"given a {type(state).__name__}.\nA state of the optimizer without "
            "`low_bit_state`, as from a checkpoint, becomes one by "
            "`to_low_bit_state(state, like=tx.init(params))`."
        )
    convert = (
        "convert it by `to_low_bit_state(to_full_state(state), like=tx.init(params))`."
    )
    if (state.seed is None) != (rounding == "nearest"):
        made = "nearest" if state.seed is None else "stochastic"
        raise ValueError(
            f"The state was made with `rounding={made!r}`, but this optimizer has "
            f"`rounding={rounding!r}`.\nGive `low_bit_state` that of the state, or "
            + convert
        )
    for x in jax.tree.leaves(state.inner_state, is_leaf=_is_stored):
        if not _is_low(x):
            continue
        layout: Layout = x.layout
        if layout.format != format or prod(layout.tile) > block:
            raise ValueError(
                f"The state is stored as {layout.format!r} in blocks of "
                f"{prod(layout.tile)}, but this optimizer stores {format!r} in blocks "
                f"of {block}.\nGive `low_bit_state` the `format` and `block` that the "
                "state was made with, or " + convert
            )
