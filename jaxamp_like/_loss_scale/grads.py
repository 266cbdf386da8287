"""Gradient transforms with loss scaling: the state goes in and out of each step."""

import functools
import inspect
import operator
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
from jax import Array

from .._errors import hiding_frames, place_of, warn_or_raise
from .._frameworks.nnx import nnx_nodes, without_filters
from .._jax import is_jitted
from .._recording import is_recorded
from .._rewrite.switch import is_traced_by_amp, scaling_loss
from .agree import OF_TRANSFORM, AxisName, all_agree, warn_of_unnamed_axes
from .arithmetic import checked_loss
from .calls import explaining_models, instead_of_loss, with_call_hints
from .fields import known
from .groups import merge_groups, split_groups
from .nodes import Filters, NnxCall, is_of_arrays, of_nodes
from .packing import ScaledAux, pack, unpack
from .retry import retry
from .scaled import note_unscaled, refusing_scaled
from .state import DynamicScalerState, NoScaler, Scaler, is_scaler


def _scale_loss(
    fun: Callable[..., Any], scaler: Scaler, has_aux: bool
) -> Callable[..., Any]:
    name = getattr(fun, "__qualname__", type(fun).__name__)

    @functools.wraps(fun, updated=())
    def scaled(*args: Any, **kwargs: Any) -> tuple[Array, ScaledAux]:
        with refusing_scaled() as returned, explaining_models(fun, args):
            out = fun(*args, **kwargs)
            returned += jax.tree.leaves(out)
        if has_aux and not (isinstance(out, tuple) and len(out) == 2):
            given = "one array" if eqx.is_array(out) else type(out).__name__
            raise TypeError(
                f"With `has_aux=True`, `{name}` must return a pair `(loss, aux)`, but "
                f"it returned {given}."
            )
        loss, aux = out if has_aux else (out, None)
        loss = checked_loss(loss, name, instead_of_loss(fun, out, args))
        return scaler.scale(loss), ScaledAux(loss, pack(aux))

    return scaled


def _split(results: Any, has_aux: bool) -> tuple[Any, Callable[[Any], Any]]:
    """The gradients, and a function that puts others in their place in the results.

    The results have the form that they would have without scaling."""
    match results:
        case (grads, ScaledAux(_, aux)):  # like `jax.grad`
            return grads, lambda g: (g, unpack(*aux)) if has_aux else g
        case ((_, ScaledAux(value, aux)), grads):  # like `jax.value_and_grad`
            out = (value, unpack(*aux)) if has_aux else value
            return grads, lambda g: (out, g)
    raise TypeError(
        "`transform(fun, has_aux=True)` must make a function that returns "
        "`(grads, aux)` or `((value, aux), grads)`, but it returned a "
        f"{type(results).__name__}.\nWrap `transform` so that it follows "
        "`jax.grad` or `jax.value_and_grad`."
    )


@with_call_hints("dynamic_scale_tx(jax.value_and_grad)")
def dynamic_scale_tx(
    transform: Callable[..., Any], redo_on_nan: int = 0, *, axis_name: AxisName = None
) -> Callable[..., Any]:
    r"""Adds dynamic loss scaling to a transform that computes gradients.

    For a function with loss `L`, and a state with scale `s`, the gradients are
    `grad(s * L) / s`. Both products are made in float32, or float64 where that is the
    dtype of the loss or gradient; each gradient keeps its dtype. The value is `L` as it
    was computed. Only the gradients decide whether a step was finite.

    Changes that the function makes to NNX objects among its arguments are kept, unless
    the step was skipped. If the step was repeated, those of the last attempt are kept.

    Args:
        transform: `transform(fun, has_aux=True, **kwargs)` must make a function that
            returns `(grads, aux)`, like `jax.grad` and `jax.jacrev`, or
            `((value, aux), grads)`, like `jax.value_and_grad`. For functions of NNX
            objects, it is `nnx.grad` or `nnx.value_and_grad`, or one of JAX or Equinox,
            which then differentiates by an object's `nnx.Param`s, or by the variables
            that an `nnx.DiffState` in `argnums` names.
        redo_on_nan: how many times a step with non-finite gradients is repeated with a
            smaller scale. If none of them helps, the last results are returned and the
            scale falls by one step only. The gradient code is compiled once; callbacks,
            ordered ones too, are called at every attempt. With 0, what is made can be
            differentiated again; a repetition is a loop, and JAX has no gradient of it.
        axis_name: axes of `jax.shard_map` or `jax.pmap` over which all devices take,
            repeat or skip a step together. Where `shard_map` keeps track of what varies
            (`check_vma=True`), the axes need not be named. Under plain `jax.jit`
            devices agree anyway. `()` is for devices that train models of their own.
    Returns:
        A transform `scaled(fun, *, has_aux=False, **kwargs)`, to be used as `transform`
        is. The function that it makes takes one more keyword, `dynamic_scaler_state`,
        and returns `(next_state, results)`. The state may also be `NoScaler()`, or a
        tree of states that is a prefix of the gradients' tree (`{"encoder": s1, "head":
        s2}`): then each group has its own scale, and its own backward pass.
    Raises:
        TypeError: `transform` or `fun` is not callable, `redo_on_nan` not an integer,
            the state missing or of another type, the loss not a floating-point scalar.
        ValueError: `redo_on_nan` is negative, an axis is not bound, a tree of states is
            no prefix of the gradients, or a retry would make devices wait for others
            or write to a `jax.Ref` again.
        AmpError: `transform` loses what the function changes in NNX objects.

    >>> grad = dynamic_scale_tx(jax.grad)(lambda x, y: x * y, argnums=(0, 1))
    >>> state, grads = grad(2.0, 3.0, dynamic_scaler_state=DynamicScalerState())
    >>> [float(g) for g in grads], int(state.count)
    ([3.0, 2.0], 1)

    See Micikevicius et al., "Mixed Precision Training" (arXiv:1710.03740)."""
    return scaled_by_state(transform, redo_on_nan, axis_name)


def scaled_by_state(
    transform: Callable[..., Any],
    redo_on_nan: int,
    axis_name: AxisName,
    *,
    is_of_optimizer: bool = False,
) -> Callable[..., Any]:
    """What `dynamic_scale_tx` returns.

    With `is_of_optimizer`, it is `update` that warns of axes without a name: devices
    may average the gradients before they are given to it."""
    _check_callable("transform", transform)
    redo = _check_redo(redo_on_nan)

    @hiding_frames
    def scaled_transform(
        fun: Callable[..., Any], *, has_aux: bool = False, **kwargs: Any
    ) -> Callable[..., Any]:
        _check_callable("fun", fun)
        filters: Filters = {}
        if is_of_arrays(transform) and "argnums" in kwargs:
            argnums, filters = without_filters(kwargs["argnums"])
            if transform in _FILTERED and [*filters] == [argnums] == [0]:
                del kwargs["argnums"]  # they differentiate by the first one anyway
            elif transform not in _FILTERED:
                kwargs["argnums"] = argnums
        differentiate = of_nodes(transform, filters)
        if transform in _FILTERED and kwargs.get("argnums") is not None:
            raise ValueError(_ARGNUMS.format(kwargs["argnums"]))
        try:  # a wrong keyword fails now, not later
            # Equinox hands keywords on to `jax.grad`, and only when it is called.
            (jax.grad if transform in _FILTERED else transform)(
                fun, has_aux=True, **kwargs
            )
        except TypeError as e:
            raise TypeError(
                "`transform(fun, has_aux=True"
                f"{''.join(f', {name}=...' for name in kwargs)})` fails: {e}.\nGive a "
                "transform that is called as `jax.grad` is, and keywords that it takes."
            ) from None

        @functools.wraps(fun, updated=())
        @hiding_frames
        def step(
            *args: Any, dynamic_scaler_state: Any = None, **fun_kwargs: Any
        ) -> Any:
            _warn_of_constants(dynamic_scaler_state, args, fun, redo)
            states, structure = split_groups(_check_state(dynamic_scaler_state))
            is_scaled = not all(isinstance(state, NoScaler) for state in states)
            if is_scaled and not is_of_optimizer:
                warn_of_unnamed_axes(axis_name, OF_TRANSFORM)
            call = NnxCall(fun, args, fun_kwargs)
            if transform in _FILTERED and args:
                _refuse_without_floats(args[0])

            def backward_pass(state: Scaler) -> tuple[Any, Callable[..., Any], Any]:
                def scaled(fun: Callable[..., Any]) -> Callable[..., Any]:
                    scaled = _scale_loss(fun, state, has_aux)
                    return differentiate(scaled, has_aux=True, **kwargs)

                with scaling_loss():
                    results, left = call.run(scaled)
                grads, rebuild = _split(results, has_aux)
                return state.unscale(grads), rebuild, left

            def attempt(states: list[Scaler]) -> tuple[list[Array], Any]:
                # Each group has a pass of its own, from the same NNX objects.
                passes = [backward_pass(state) for state in states]
                grads_of, rebuilds, lefts = zip(*passes, strict=True)
                grads, finite_of = merge_groups(structure, grads_of)
                finite_of = [
                    all_agree(finite, axis_name, like=getattr(state, "scaler", None))
                    for finite, state in zip(finite_of, states, strict=True)
                ]
                return finite_of, (rebuilds[-1](grads), lefts[-1])

            if redo and any(isinstance(s, DynamicScalerState) for s in states):
                following, (results, left) = retry(attempt, states, redo, axis_name)
            else:
                finite_of, (results, left) = attempt(states)
                following = [
                    s.update(finite)
                    for s, finite in zip(states, finite_of, strict=True)
                ]
            call.put_back(left, following)
            if is_scaled and not is_of_optimizer:
                note_unscaled(results)
            return jax.tree.unflatten(structure, following), results

        vars(step)["__signature__"] = _step_signature(fun)
        return step

    return scaled_transform


@with_call_hints("dynamic_scale_grad(loss_fn)")
def dynamic_scale_grad(
    fun: Callable[..., Any],
    *,
    has_aux: bool = False,
    redo_on_nan: int = 0,
    filter: bool = True,
    axis_name: AxisName = None,
    **kwargs: Any,
) -> Callable[..., Any]:
    """Like `jax.grad`, with dynamic loss scaling; `dynamic_scale_tx` says what that is.

    Args:
        fun: returns a scalar loss, or `(loss, aux)` if `has_aux`.
        has_aux: whether there is `aux`, which is returned as it is.
        redo_on_nan: how often a non-finite step is repeated with a smaller scale.
        filter: use `equinox.filter_grad`, which differentiates by every floating-point
            array in the first argument, whatever else that holds. The derivative by an
            NNX object is a state of its `nnx.Param`s, either way.
        axis_name: the axes of `shard_map` or `pmap` over which devices agree.
        kwargs: for `jax.grad`: `holomorphic`, `allow_int`; `argnums` if not `filter`,
            or an `nnx.DiffState` of the first argument.
    Returns:
        A function of the arguments of `fun` and the keyword `dynamic_scaler_state`. It
        returns `(next_state, grads)`, or `(next_state, (grads, aux))` if `has_aux`.
        Gradients of a step that overflowed are not finite, and it is the caller who
        skips it: by `guard_step` around the step, or by `next_state.accept(new, old)`.
    Raises:
        TypeError, ValueError: see `dynamic_scale_tx`.

    >>> import jax.numpy as jnp
    >>> grad = jax.jit(dynamic_scale_grad(lambda w: w**2 * 1e-6))
    >>> w = jnp.array(0.5, jnp.float16)
    >>> state, g = grad(w, dynamic_scaler_state=DynamicScalerState(scaler=2**10))
    >>> g.dtype, int(state.count)
    (dtype('float16'), 1)

    See Micikevicius et al., "Mixed Precision Training" (arXiv:1710.03740)."""
    transform = eqx.filter_grad if filter else jax.grad
    scaled = dynamic_scale_tx(transform, redo_on_nan, axis_name=axis_name)
    return scaled(fun, has_aux=has_aux, **kwargs)


@with_call_hints("dynamic_scale_value_and_grad(loss_fn)")
def dynamic_scale_value_and_grad(
    fun: Callable[..., Any],
    *,
    has_aux: bool = False,
    redo_on_nan: int = 0,
    filter: bool = True,
    axis_name: AxisName = None,
    **kwargs: Any,
) -> Callable[..., Any]:
    """Like `jax.value_and_grad`, with dynamic loss scaling; see `dynamic_scale_tx`.

    Args:
        fun, has_aux, redo_on_nan, filter, axis_name, kwargs: as for
            `dynamic_scale_grad`.
    Returns:
        A function of the arguments of `fun` and the keyword `dynamic_scaler_state`. It
        returns `(next_state, (value, grads))`, or `(next_state, ((value, aux), grads))`
        if `has_aux`. The value is the loss as `fun` computed it.
        A step that overflowed is skipped by the caller, as for `dynamic_scale_grad`.
    Raises:
        TypeError, ValueError: see `dynamic_scale_tx`.

    >>> import jax.numpy as jnp
    >>> step = dynamic_scale_value_and_grad(lambda w: 3 * w**2, redo_on_nan=2)
    >>> state = DynamicScalerState(patience=100)
    >>> state, (value, g) = step(jnp.array(2.0), dynamic_scaler_state=state)
    >>> float(value), float(g), float(state.scaler)
    (12.0, 12.0, 32768.0)

    See Micikevicius et al., "Mixed Precision Training" (arXiv:1710.03740)."""
    transform = eqx.filter_value_and_grad if filter else jax.value_and_grad
    scaled = dynamic_scale_tx(transform, redo_on_nan, axis_name=axis_name)
    return scaled(fun, has_aux=has_aux, **kwargs)


_FILTERED = eqx.filter_grad, eqx.filter_value_and_grad
_ARGNUMS = (
    "`argnums` was given as {}, but with `filter=True` the derivative is taken by the "
    "first argument.\nPass `filter=False` (to `dynamic_scale_tx`, give `jax.grad`), or "
    "put what to differentiate by into one tuple, the first argument."
)


def _refuse_without_floats(params: Any) -> None:
    """Raises where Equinox would silently find nothing to differentiate by."""
    leaves = jax.tree.leaves(params)
    if nnx_nodes(params) or not leaves or any(map(eqx.is_inexact_array, leaves)):
        return
    kinds = dict.fromkeys(
        x.dtype.name if hasattr(x, "dtype") else type(x).__name__ for x in leaves
    )
    are_numbers = any(isinstance(x, float | complex) for x in leaves)
    raise TypeError(
        "The first argument holds no floating-point array to differentiate by, but "
        f"{', '.join(kinds)}.\n"
        + (
            "Make arrays of Python numbers: `jnp.asarray(x)`."
            if are_numbers
            else "Parameters that are to be trained are floating-point: "
            "`jnp.asarray(x, jnp.float32)`. For integers as they are, `filter=False, "
            "allow_int=True` gives gradients of `float0`, as `jax.grad` does."
        )
    )


def _step_signature(fun: Callable[..., Any]) -> inspect.Signature:
    """The signature of `fun` with the state, by which `eqx.filter_jit` binds."""
    try:
        signature = inspect.signature(fun)
    except (TypeError, ValueError):  # some builtins have none
        signature = inspect.signature(lambda *args, **kwargs: None)
    state = inspect.Parameter("dynamic_scaler_state", inspect.Parameter.KEYWORD_ONLY)
    parameters = sorted([*signature.parameters.values(), state], key=lambda p: p.kind)
    return signature.replace(parameters=parameters)


def _check_callable(name: str, x: Any) -> None:
    if callable(x):
        return
    if hasattr(x, "init") and hasattr(x, "update"):
        instead = "An optimizer is wrapped by `loss_scale_optimizer(optimizer)`."
    elif name == "transform":
        instead = "Give a transform, such as `jax.grad`."
    else:
        instead = "Give the loss itself, not what it returns."
    raise TypeError(f"`{name}` must be callable, but was given {x!r}.\n{instead}")


def _check_redo(redo_on_nan: Any) -> int:
    is_integer = hasattr(redo_on_nan, "__index__") and not isinstance(redo_on_nan, bool)
    if is_integer and redo_on_nan >= 0:
        return operator.index(redo_on_nan)
    error, wanted = (
        (ValueError, "0 or more") if is_integer else (TypeError, "an integer")
    )
    raise error(
        f"`redo_on_nan` must be {wanted}, but was given {redo_on_nan!r}.\nIt says how "
        "many times a step may be repeated; 0 is never."
    )


def _check_state(state: Any) -> Any:
    """A state, or a tree of states, with fields of the right types."""
    if state is None:
        raise TypeError(
            "The keyword `dynamic_scaler_state` is missing.\nBegin with "
            "`DynamicScalerState()`, then pass on the state that each step returns. It "
            "is given by its name: `step(params, batch, dynamic_scaler_state=state)`."
        )
    leaves = jax.tree.leaves(state, is_leaf=is_scaler)
    if not leaves or not all(map(is_scaler, leaves)):
        raise TypeError(
            "`dynamic_scaler_state` must be a `DynamicScalerState`, but was given a "
            f"{type(state).__name__}.\n"
            + "It holds one: give its `.scaler`. "
            * hasattr(state, "inner_state")
            + "If that is all that a step returned, take its "
            "first part: a step returns `(next_state, results)`. If it comes from a "
            "checkpoint, `restore_scaler` makes a state of it."
        )
    return jax.tree.map(_rebuilt, state, is_leaf=is_scaler)


def _warn_of_constants(state: Any, args: Any, fun: Any, redo: int) -> None:
    """Warns of a scale that does not change in the program that is being traced.

    `amp` traces at each call; what it closes over may well change from call to call. A
    report traces and runs nothing."""
    if is_traced_by_amp() or is_recorded():
        return
    if not any(map(is_jitted, jax.tree.leaves(args))):
        return
    for one in jax.tree.leaves(state, is_leaf=is_scaler):
        if isinstance(one, DynamicScalerState) and len(one) == len(one._fields):
            if one.is_begun_in_trace and not redo:
                warn_or_raise(f"{_ANEW} This is of {place_of(fun)}.", strict=False)
            least, most = (known(x) for x in (one.min_scaler, one.max_scaler))
            if known(one.scaler) is not None and (least is None or least != most):
                warn_or_raise(_CONSTANT, strict=False)


_CONSTANT = (
    "The loss scale is a constant of the program that is being traced: the state was "
    "made outside of the step, which does not take it as an argument. All calls of the "
    "program would scale alike, and where gradients overflow all of them would be "
    "skipped. Give the state to the function that `jax.jit` compiles, and return the "
    "next one from it."
)


_ANEW = (
    "The state of the loss scale is made in the program that is being traced. If that "
    "is a step, each call begins with the same scale, and where gradients overflow all "
    "of them are skipped: make the state once, outside of the step, which takes it as "
    "an argument and returns the next one."
)


def _rebuilt(state: Scaler) -> Scaler:
    if isinstance(state, NoScaler):
        return state
    if len(state) != len(state._fields):
        raise TypeError(
            f"`dynamic_scaler_state` has {len(state)} fields, but a "
            f"`DynamicScalerState` has {len(state._fields)}: it was saved by another "
            "version.\n`restore_scaler` fills in what is missing."
        )
    return DynamicScalerState(*state).clipped()
