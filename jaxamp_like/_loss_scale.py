"""Dynamic loss scaling: the cure for gradients that underflow in float16.

The loss is multiplied by a scale before differentiation, and the gradients are divided
by it afterwards, both in float32. The scale is a small state that goes in and out of
each step: it falls when gradients overflow, and creeps up while they don't. A step is a
pure function of the state and keeps its types, so a jitted step compiles once.

The scheme is that of Micikevicius et al., "Mixed Precision Training"
(arXiv:1710.03740), section 3.2."""

import functools
import inspect
import operator
import warnings
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Self

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from ._jax import jaxpr_as_fun, zeros_like_aval

# Beyond these, the scale or its reciprocal is subnormal in float32, which XLA flushes
# to zero: the gradients would vanish, and still be called finite.
SMALLEST, LARGEST = 2.0**-126, 2.0**126
_COUNTS = {"patience", "count", "total_resets", "stuck"}


def _canonical(name: str, x: ArrayLike) -> Array:
    """The field `name` as a strongly typed scalar, or an error that names it."""
    kinds, kind, dtype = (jnp.integer,), "an integer", jnp.int32
    if name not in _COUNTS:
        kinds, kind, dtype = (jnp.integer, jnp.floating), "a real", jnp.float32
        # `2**126` is a fair way to write a bound, but too large for an integer array.
        x = float(x) if isinstance(x, int) and not isinstance(x, bool) else x
    given = jnp.result_type(x) if eqx.is_array_like(x) else object
    if not any(jnp.issubdtype(given, k) for k in kinds):
        raise TypeError(
            f"`{name}` of a `DynamicScalerState` must be {kind} scalar, but was given "
            f"{x!r}.\nGive a Python number or an array of shape ()."
        )
    if jnp.shape(x) != ():
        raise ValueError(
            f"`{name}` of a `DynamicScalerState` must be a scalar, but was given shape "
            f"{jnp.shape(x)}.\nTo take a step with several states, `jax.vmap` the step."
        )
    return jnp.asarray(x, dtype)


class _Fields(NamedTuple):
    patience: Array
    adjust_factor: Array
    scaler: Array
    count: Array  # pyright: ignore[reportIncompatibleMethodOverride]
    total_resets: Array
    min_scaler: Array
    max_scaler: Array
    stuck: Array


class DynamicScalerState(_Fields):
    r"""The loss scale and what it remembers: a named tuple of scalar arrays.

    Python numbers become arrays at once, so the first jitted step compiles for the very
    types of all later ones.

    Args:
        patience: finite steps that must have gone by before the scale may grow.
        adjust_factor: what the scale is multiplied or divided by.
        scaler: the scale itself.
        count: finite steps since the scale last changed.
        total_resets: how many times the scale was lowered.
        min_scaler: the scale never falls below this, nor below $2^{-126}$.
        max_scaler: the scale never grows above this, nor above $2^{126}$.
        stuck: latest non-finite steps in a row that began at the minimum.
    Raises:
        TypeError: a field is not a number, or a count is not an integer.
        ValueError: a field is not a scalar.

    >>> state = DynamicScalerState(patience=1, scaler=1024)
    >>> float(state.update(False).scaler)
    512.0
    >>> float(state.update(True).update(True).scaler)
    2048.0

    See Micikevicius et al., "Mixed Precision Training" (arXiv:1710.03740)."""

    __slots__ = ()

    def __new__(
        cls,
        patience: ArrayLike = 2000,
        adjust_factor: ArrayLike = 2.0,
        scaler: ArrayLike = 2.0**15,
        count: ArrayLike = 0,
        total_resets: ArrayLike = 0,
        min_scaler: ArrayLike = SMALLEST,
        max_scaler: ArrayLike = LARGEST,
        stuck: ArrayLike = 0,
    ) -> Self:
        moving = scaler, count, total_resets
        fields = patience, adjust_factor, *moving, min_scaler, max_scaler, stuck
        return super().__new__(cls, *map(_canonical, cls._fields, fields))

    @classmethod
    def _make(cls, iterable: Iterable[Any]) -> Self:  # pyright: ignore
        return cls(*iterable)  # so that `_replace` makes arrays of numbers too

    @property
    def bounds(self) -> tuple[Array, Array]:
        """The least and the greatest scale that this state can reach."""
        least = jnp.clip(self.min_scaler, SMALLEST, LARGEST)
        return least, jnp.clip(self.max_scaler, least, LARGEST)

    def update(self, finite: ArrayLike) -> Self:
        """The state after a step whose gradients were all finite, or were not.

        Args:
            finite: a boolean scalar.
        Returns:
            The next state, of the same types.

        >>> int(DynamicScalerState(count=7).update(True).count)
        8
        """
        finite = jnp.asarray(finite, bool)
        grow = finite & (self.count >= self.patience)
        higher, lower = (
            self.scaler * self.adjust_factor,
            self.scaler / self.adjust_factor,
        )
        scaler = jnp.where(grow, higher, jnp.where(finite, self.scaler, lower))
        in_vain = ~finite & (self.scaler <= self.bounds[0])
        return self._replace(
            scaler=jnp.clip(scaler, *self.bounds),
            count=jnp.where(finite & ~grow, self.count + 1, 0),
            total_resets=self.total_resets + jnp.where(finite, 0, 1),
            stuck=jnp.where(in_vain, self.stuck + 1, 0),
        )


# By itself JAX rebuilds a named tuple through its constructor, and this one would try
# to make arrays of whatever a tree of this shape holds: axes, specs, None.
jax.tree_util.register_pytree_with_keys(
    DynamicScalerState,
    lambda s: ([(jax.tree_util.GetAttrKey(k), getattr(s, k)) for k in s._fields], None),
    lambda _, leaves: tuple.__new__(DynamicScalerState, leaves),
    lambda s: (tuple(s), None),
)


def check_scaler(
    state: DynamicScalerState, *, tolerate: int = 0, warn: bool = False
) -> None:
    """Complains, on the host, about a scale that can't fall and still overflows.

    Args:
        state: a state outside `jax.jit`. This waits for the step that makes it; once in
            a hundred steps will do.
        tolerate: how many non-finite steps in a row at the minimum are still fine.
        warn: give a `RuntimeWarning` in place of the error.
    Raises:
        FloatingPointError: there were more than `tolerate`.

    >>> state = DynamicScalerState(scaler=1, min_scaler=1)
    >>> check_scaler(state)
    >>> check_scaler(state.update(False))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    FloatingPointError: The loss scale is at its minimum, 1.0, and yet the last 1 ...
    """
    stuck = int(jnp.max(state.stuck))
    if stuck <= tolerate:
        return
    message = (
        f"The loss scale is at its minimum, {float(jnp.min(state.scaler))}, and yet "
        f"the last {stuck} step(s) had gradients that are not finite.\nNo scale will "
        "cure this: look for NaN or inf in the batch, the loss and the parameters."
    )
    if not warn:
        raise FloatingPointError(message)
    warnings.warn(message, RuntimeWarning, stacklevel=2)


def all_finite(tree: Any) -> Array:
    """Whether every floating-point or complex number in a pytree is finite.

    Args:
        tree: any pytree; what is no such number is passed over.
    Returns:
        A boolean scalar, true for a tree without any.

    >>> bool(all_finite({"w": jnp.ones(3), "step": 7, "name": "mlp"}))
    True
    >>> bool(all_finite([jnp.ones(3), float("inf")]))
    False
    """
    leaves = jax.tree.leaves(tree)
    numbers = [x for x in leaves if eqx.is_inexact_array(x) or _is_python_inexact(x)]
    finite = (jnp.isfinite(x).all() for x in numbers)
    return functools.reduce(operator.and_, finite, jnp.array(True))


def _is_python_inexact(x: Any) -> bool:
    return isinstance(x, float | complex)


@jax.tree_util.register_static
class _Static:
    """Keeps what is no array in the tree's structure, out of sight of transforms."""

    def __init__(self, tree: Any):
        self.tree = tree


def _pack(tree: Any) -> tuple[Any, _Static]:
    arrays, static = eqx.partition(tree, lambda x: isinstance(x, Array))
    return arrays, _Static(static)


def _unpack(arrays: Any, static: _Static) -> Any:
    return eqx.combine(arrays, static.tree)


class _Carried(NamedTuple):
    """What travels beside the scaled loss, and marks where a transform puts its aux."""

    value: Array
    aux: tuple[Any, _Static]


def _times(x: Array, factor: Array) -> Array:
    """`x * factor` in float32, or in float64 where `x` has that."""
    x = x if jnp.finfo(x.dtype).bits >= 32 else x.astype(jnp.float32)
    factor = factor.astype(x.real.dtype)
    if jnp.iscomplexobj(x):  # as a complex product, inf * (s + 0i) would be NaN
        return lax.complex(x.real * factor, x.imag * factor)
    return x * factor


def _unscale(grads: Any, scaler: Array) -> Any:
    def unscale(g: Any) -> Any:
        # The gradient of an integer is a float0 array: nothing to unscale.
        return _times(g, 1 / scaler).astype(g.dtype) if eqx.is_inexact_array(g) else g

    return jax.tree.map(unscale, grads)


def _scale_loss(fun: Callable, scaler: Array, has_aux: bool) -> Callable:
    name = getattr(fun, "__qualname__", repr(fun))

    @functools.wraps(fun, updated=())
    def scaled(*args: Any, **kwargs: Any) -> tuple[Array, _Carried]:
        out = fun(*args, **kwargs)
        if has_aux and not (isinstance(out, tuple) and len(out) == 2):
            raise TypeError(
                f"With `has_aux=True`, `{name}` must return a pair `(loss, aux)`, but "
                f"it returned a {type(out).__name__}."
            )
        loss, aux = out if has_aux else (out, None)
        _check_loss(name, loss)
        loss = jnp.asarray(loss)
        return _times(loss, scaler), _Carried(loss, _pack(aux))

    return scaled


def _unscale_results(results: Any, scaler: Array, has_aux: bool) -> tuple[Array, Any]:
    """Whether the gradients are finite; the results as if nothing had been scaled."""
    match results:
        case (grads, _Carried(_, aux)):  # like `jax.grad`
            grads = _unscale(grads, scaler)
            unscaled = (grads, _unpack(*aux)) if has_aux else grads
        case ((_, _Carried(value, aux)), grads):  # like `jax.value_and_grad`
            grads = _unscale(grads, scaler)
            unscaled = ((value, _unpack(*aux)) if has_aux else value), grads
        case _:
            raise TypeError(
                "`transform(fun, has_aux=True)` must make a function that returns "
                "`(grads, aux)` or `((value, aux), grads)`, but it returned a "
                f"{type(results).__name__}.\nWrap `transform` so that it follows "
                "`jax.grad` or `jax.value_and_grad`."
            )
    return all_finite(grads), unscaled


def _retry(
    attempt: Callable[[Array], tuple[Array, Any]], state: DynamicScalerState, redo: int
) -> tuple[DynamicScalerState, Any]:
    def packed_attempt(scaler: Array) -> tuple[Array, Any, _Static]:
        finite, results = attempt(scaler)
        return finite, *_pack(results)

    # Traced ahead of the loop, which wants to know the types of what it carries.
    program, outs = jax.make_jaxpr(packed_attempt, return_shape=True)(state.scaler)
    unflatten = functools.partial(jax.tree.unflatten, jax.tree.structure(outs))
    blank = unflatten(map(_zeros, program.out_avals))

    def body(carry: Any) -> Any:
        _, tries, state, _ = carry
        outs = unflatten(jaxpr_as_fun(program)(state.scaler))
        lower = state.update(False)
        # At the minimum another attempt would only repeat this one.
        again = ~outs[0] & (tries < redo) & (lower.scaler < state.scaler)
        return again, tries + 1, _select(again, lower, state), outs

    start = jnp.array(True), jnp.int32(0), state, blank
    _, _, last, outs = lax.while_loop(lambda carry: carry[0], body, start)
    finite, *results = outs
    # A batch that fails at every scale is not the scale's fault. It costs one step from
    # where it began, or a few such batches would use up the whole range.
    return _select(finite, last, state).update(finite), _unpack(*results)


def _zeros(aval: Any) -> Array:
    if jnp.issubdtype(aval.dtype, jax.dtypes.extended):  # a PRNG key has no zero to AD
        return jnp.zeros(aval.shape, aval.dtype)
    return zeros_like_aval(aval)  # with its sharding, varying over its mesh axes


def _select(pred: Array, x: Any, y: Any) -> Any:
    return jax.tree.map(functools.partial(jnp.where, pred), x, y)


def dynamic_scale_tx(transform: Callable, redo_on_nan: int = 0) -> Callable:
    r"""Adds dynamic loss scaling to a transform that takes gradients.

    For a function with loss $L$, and a state with scale $s$, the gradients are
    $\nabla (s L) / s$. Both products are made in float32, or float64 where that is the
    dtype of the loss or gradient; each gradient keeps its dtype. The value is $L$ as it
    was computed. Only the gradients decide whether a step was finite.

    Args:
        transform: `transform(fun, has_aux=True, **kwargs)` must make a function that
            returns `(grads, aux)`, like `jax.grad` and `jax.jacrev`, or
            `((value, aux), grads)`, like `jax.value_and_grad`.
        redo_on_nan: how many times a step with non-finite gradients is repeated with a
            smaller scale. If none of them helps, the last results are returned and the
            scale falls by one step only. The gradient code is compiled once.
    Returns:
        A transform `scaled(fun, *, has_aux=False, **kwargs)`, to be used as `transform`
        is. The function that it makes takes one more keyword, `dynamic_scaler_state`,
        and returns `(next_state, results)`.
    Raises:
        TypeError: `transform` or `fun` is not callable, `redo_on_nan` not an integer,
            the state missing or of another type, the loss not a floating-point scalar.
        ValueError: `redo_on_nan` is negative.

    >>> grad = dynamic_scale_tx(jax.grad)(lambda x, y: x * y, argnums=(0, 1))
    >>> state, grads = grad(2.0, 3.0, dynamic_scaler_state=DynamicScalerState())
    >>> [float(g) for g in grads], int(state.count)
    ([3.0, 2.0], 1)

    See Micikevicius et al., "Mixed Precision Training" (arXiv:1710.03740)."""
    _check_callable("transform", transform)
    redo = _check_redo(redo_on_nan)

    def scaled_transform(
        fun: Callable, *, has_aux: bool = False, **kwargs: Any
    ) -> Callable:
        _check_callable("fun", fun)
        transform(fun, has_aux=True, **kwargs)  # a wrong keyword fails now, not later

        @functools.wraps(fun, updated=())
        def step(
            *args: Any, dynamic_scaler_state: Any = None, **fun_kwargs: Any
        ) -> Any:
            state = _check_state(dynamic_scaler_state)

            def attempt(scaler: Array) -> tuple[Array, Any]:
                scaled = _scale_loss(fun, scaler, has_aux)
                results = transform(scaled, has_aux=True, **kwargs)(*args, **fun_kwargs)
                return _unscale_results(results, scaler, has_aux)

            if redo:
                return _retry(attempt, state, redo)
            finite, results = attempt(state.scaler)
            return state.update(finite), results

        vars(step)["__signature__"] = _step_signature(fun)
        return step

    return scaled_transform


def dynamic_scale_grad(
    fun: Callable,
    *,
    has_aux: bool = False,
    redo_on_nan: int = 0,
    filter: bool = True,
    **kwargs: Any,
) -> Callable:
    """Like `jax.grad`, with dynamic loss scaling; `dynamic_scale_tx` says what that is.

    Args:
        fun: returns a scalar loss, or `(loss, aux)` if `has_aux`.
        has_aux: whether there is `aux`, which is returned as it is.
        redo_on_nan: how often a non-finite step is repeated with a smaller scale.
        filter: use `equinox.filter_grad`, which differentiates by every floating-point
            array in the first argument, whatever else that holds.
        kwargs: for `jax.grad`: `holomorphic`, `allow_int`; `argnums` if not `filter`.
    Returns:
        A function of the arguments of `fun` and the keyword `dynamic_scaler_state`. It
        returns `(next_state, grads)`, or `(next_state, (grads, aux))` if `has_aux`.
    Raises:
        TypeError, ValueError: see `dynamic_scale_tx`.

    >>> grad = jax.jit(dynamic_scale_grad(lambda w: w**2 * 1e-6))
    >>> w = jnp.array(0.5, jnp.float16)
    >>> state, g = grad(w, dynamic_scaler_state=DynamicScalerState(scaler=2**10))
    >>> g.dtype, int(state.count)
    (dtype('float16'), 1)

    See Micikevicius et al., "Mixed Precision Training" (arXiv:1710.03740)."""
    transform = eqx.filter_grad if filter else jax.grad
    return dynamic_scale_tx(transform, redo_on_nan)(fun, has_aux=has_aux, **kwargs)


def dynamic_scale_value_and_grad(
    fun: Callable,
    *,
    has_aux: bool = False,
    redo_on_nan: int = 0,
    filter: bool = True,
    **kwargs: Any,
) -> Callable:
    """Like `jax.value_and_grad`, with dynamic loss scaling; see `dynamic_scale_tx`.

    Args:
        fun, has_aux, redo_on_nan, filter, kwargs: as of `dynamic_scale_grad`.
    Returns:
        A function of the arguments of `fun` and the keyword `dynamic_scaler_state`. It
        returns `(next_state, (value, grads))`, or `(next_state, ((value, aux), grads))`
        if `has_aux`. The value is the loss as `fun` computed it.
    Raises:
        TypeError, ValueError: see `dynamic_scale_tx`.

    >>> step = dynamic_scale_value_and_grad(lambda w: 3 * w**2, redo_on_nan=2)
    >>> state = DynamicScalerState(patience=100)
    >>> state, (value, g) = step(jnp.array(2.0), dynamic_scaler_state=state)
    >>> float(value), float(g), float(state.scaler)
    (12.0, 12.0, 32768.0)

    See Micikevicius et al., "Mixed Precision Training" (arXiv:1710.03740)."""
    transform = eqx.filter_value_and_grad if filter else jax.value_and_grad
    return dynamic_scale_tx(transform, redo_on_nan)(fun, has_aux=has_aux, **kwargs)


def _step_signature(fun: Callable) -> inspect.Signature:
    """That of `fun`, and the state. `equinox.filter_jit` binds arguments by it."""
    try:
        signature = inspect.signature(fun)
    except (TypeError, ValueError):  # some builtins have none
        signature = inspect.signature(lambda *args, **kwargs: None)
    state = inspect.Parameter("dynamic_scaler_state", inspect.Parameter.KEYWORD_ONLY)
    parameters = sorted([*signature.parameters.values(), state], key=lambda p: p.kind)
    return signature.replace(parameters=parameters)


def _check_callable(name: str, x: Any) -> None:
    if not callable(x):
        raise TypeError(f"`{name}` must be callable, but was given {x!r}.")


def _check_redo(redo_on_nan: Any) -> int:
    if isinstance(redo_on_nan, bool) or not hasattr(redo_on_nan, "__index__"):
        raise TypeError(
            f"`redo_on_nan` must be an integer, but was given {redo_on_nan!r}.\n"
            "It says how many times a step may be repeated; 0 is never."
        )
    if redo_on_nan < 0:
        raise ValueError(
            f"`redo_on_nan` must be 0 or more, but was given {redo_on_nan!r}.\n"
            "It says how many times a step may be repeated; 0 is never."
        )
    return operator.index(redo_on_nan)


def _check_state(state: Any) -> DynamicScalerState:
    if state is None:
        raise TypeError(
            "The keyword `dynamic_scaler_state` is missing.\nBegin with "
            "`DynamicScalerState()`, then pass on the state that each step returns."
        )
    if not isinstance(state, DynamicScalerState):
        raise TypeError(
            "`dynamic_scaler_state` must be a `DynamicScalerState`, but was given a "
            f"{type(state).__name__}.\nIf that is all that a step returned, take its "
            "first part: a step returns `(next_state, results)`."
        )
    state = DynamicScalerState(*state)
    return state._replace(scaler=jnp.clip(state.scaler, *state.bounds))


def _check_loss(name: str, loss: Any) -> None:
    is_array = eqx.is_array_like(loss)
    dtype, shape = (
        (jnp.result_type(loss), jnp.shape(loss)) if is_array else (None, None)
    )
    if dtype is None or shape != () or not jnp.issubdtype(dtype, jnp.inexact):
        given = f"{dtype}{list(shape or ())}" if is_array else type(loss).__name__
        raise TypeError(
            f"`{name}` must return a floating-point scalar as its loss, but returned "
            f"{given}.\nReduce an array to one number, for example by `.mean()`; for a "
            "function that returns `(loss, aux)`, pass `has_aux=True`."
        )
