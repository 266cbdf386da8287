"""Loss scaling as a wrapper around an Optax optimizer."""

import functools
import sys
import types
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.typing import ArrayLike

from .._errors import calling_library, hiding_frames, warn_or_raise
from .._frameworks.nnx import instances_in, is_node
from .._frameworks.serialization import save_with_flax
from .._jax import is_closed_over_by_loop
from .._suggestions import no_attribute
from .agree import OF_OPTIMIZER, AxisName, all_agree, warn_of_unnamed_axes
from .arithmetic import all_finite, chosen
from .by_hand import scaling_by, verdict_on
from .calls import GRADIENT, UPDATE, with_call_hints
from .grads import scaled_by_state
from .initialising import explaining_other_parameters, initialised, warn_of_float16
from .marks import (
    marked,
    read,
    refuse_other_results,
    refuse_unmarked,
    scales_of,
    unmarked,
)
from .optimizer_state import LossScaleState, checked_state, scale_states, scaler_of
from .scaled import note_update
from .state import (
    DynamicScalerState,
    NoScaler,
    Scaler,
    begun,
    is_scaler,
    static_scaler,
)


class Watch(Protocol):
    """Looks at what an optimizer is given; `loss` is the loss of `enable_amp`."""

    loss: Any

    def __call__(
        self, fun: Callable[..., Any], args: Any, kwargs: Any
    ) -> AbstractContextManager[None]:
        """A context for a call of a loss."""
        ...

    def expect_use(self) -> None:
        """Is called when gradients are handed in."""
        ...


class LossScaleOptimizer(optax.GradientTransformationExtraArgs):
    """What `loss_scale_optimizer` makes: an Optax optimizer that computes gradients.

    Its `update` only takes gradients of its `value_and_grad` or `grad`."""

    if TYPE_CHECKING:  # the fields of Optax, with the type that the state has here

        def init(self, params: Any) -> LossScaleState: ...  # pyright: ignore

        def update(  # pyright: ignore
            self, updates: Any, state: Any, params: Any = None, **extra_args: Any
        ) -> tuple[Any, LossScaleState]: ...

    axis_name: AxisName = None
    scales: bool = True
    watch: "Watch | None" = None

    def __repr__(self) -> str:
        # An error of Keras shows what it can't take.
        keras = sys.modules.get("keras")
        is_shown = keras is not None and calling_library(keras) is not None
        return super().__repr__() + _IN_KERAS * is_shown

    def __getattr__(self, name: str) -> Any:
        hint = _ELSEWHERE.get(name)
        raise no_attribute(self, name, f"Write `{hint}`." if hint else "")

    @with_call_hints("tx.value_and_grad(loss_fn, opt_state)(params, batch)")
    def value_and_grad(
        self,
        fun: Callable[..., Any],
        opt_state: Any,
        *,
        has_aux: bool = False,
        filter: bool = True,
        **kwargs: Any,
    ) -> Callable[..., tuple[Any, Any]]:
        """Like `jax.value_and_grad`, with the loss scaled by the scale in `opt_state`.

        Value and gradients are true ones: the loss as `fun` computed it, and its
        gradients unscaled, each in its own dtype. If any number in any of them is not
        finite, all are NaN. So `update` skips the step even if it is given only some of
        them, or if they were clipped before. What `fun` changes in NNX objects among
        its arguments is kept, unless gradients overflowed.

        Args:
            fun: returns a scalar loss, or `(loss, aux)` if `has_aux`.
            opt_state: the state of this optimizer, or any tree that holds it: of a
                chain, a `TrainState`, an `nnx.Optimizer`.
            has_aux: whether there is `aux`, which is returned as it is.
            filter: use `equinox.filter_value_and_grad`, which differentiates by every
                floating-point array in the first argument, whatever else that holds.
            kwargs: for `jax.value_and_grad`: `holomorphic`, `allow_int`; `argnums` if
                not `filter`, or an `nnx.DiffState` of the first argument.
        Returns:
            A function of the arguments of `fun` that returns `(value, grads)`, or
            `((value, aux), grads)`. Each gradient is an `Unscaled`, as `update` takes
            it; the derivative by an NNX object is a state of its `nnx.Param`s, or of
            the variables that `argnums=nnx.DiffState(0, ...)` names.
        Raises:
            TypeError: `fun` is not callable, or its loss no floating-point scalar.
            ValueError: `opt_state` holds no scale, several, or one in the wrong place;
                `argnums` is given with `filter`.

        >>> tx = loss_scale_optimizer(optax.sgd(0.5))
        >>> w = {"a": jnp.array(3.0)}
        >>> value, grads = tx.value_and_grad(lambda w: w["a"] ** 2, tx.init(w))(w)
        >>> float(value), grads
        (9.0, {'a': Unscaled(6.0)})
        """
        transform = eqx.filter_value_and_grad if filter else jax.value_and_grad
        return self._scaled(transform, fun, opt_state, has_aux, kwargs, 1)

    @with_call_hints("tx.grad(loss_fn, opt_state)(params, batch)")
    def grad(
        self,
        fun: Callable[..., Any],
        opt_state: Any,
        *,
        has_aux: bool = False,
        filter: bool = True,
        **kwargs: Any,
    ) -> Callable[..., Any]:
        """Like `jax.grad`, with the loss scaled; see `value_and_grad`.

        Args:
            fun, opt_state, has_aux, filter, kwargs: as for `value_and_grad`.
        Returns:
            A function that returns `grads`, or `(grads, aux)`.
        Raises:
            TypeError, ValueError: as for `value_and_grad`.

        >>> tx = loss_scale_optimizer(optax.sgd(0.5))
        >>> w = jnp.array(3.0)
        >>> tx.grad(lambda w: w**2, tx.init(w))(w)
        Unscaled(6.0)
        """
        transform = eqx.filter_grad if filter else jax.grad
        place = 0 if has_aux else None
        return self._scaled(transform, fun, opt_state, has_aux, kwargs, place)

    def _scaled(
        self,
        transform: Callable[..., Any],
        fun: Callable[..., Any],
        opt_state: Any,
        has_aux: bool,
        options: dict[str, Any],
        place: int | None,
    ) -> Callable[..., Any]:
        """`transform(fun, **options)` of the scaled loss, with marked gradients.

        The gradients are at index `place` of the results; if `place` is `None`, they
        are the only result."""
        if not callable(fun) and callable(opt_state) and scale_states(fun):
            raise TypeError(
                "`fun` and `opt_state` have changed places: the loss comes first.\n"
                "Write `tx.value_and_grad(loss_fn, opt_state)(params, batch)`, and "
                "`tx.grad` likewise."
            )
        if "redo_on_nan" in options:
            raise TypeError(
                "`redo_on_nan` belongs to `dynamic_scale_value_and_grad`. This "
                "optimizer repeats no step: it skips one that overflows, and lowers "
                "the scale."
            )
        scaler = scaler_of(opt_state)
        if eqx.is_array_like(scaler):
            raise TypeError(
                "`opt_state.scaler` is a number, but must be a state. To change the "
                "scale, write `opt_state._replace(scaler=opt_state.scaler._replace("
                "scaler=1024.0))`."
            )
        if isinstance(scaler, Mapping) and not self.scales:
            raise TypeError(_SCALE_OF_ANOTHER_RUN)
        if self.scales and isinstance(scaler, NoScaler):
            warn_or_raise(_NO_LONGER, strict=False)
        scaled = scaled_by_state(transform, 0, self.axis_name, is_of_optimizer=True)
        step = scaled(fun, has_aux=has_aux, **options)

        @functools.wraps(fun, updated=())
        @hiding_frames
        def judged(*args: Any, **kwargs: Any) -> Any:
            watch = self.watch or (lambda *call: nullcontext())
            with scaling_by(scaler), watch(fun, args, kwargs):
                following, out = step(*args, dynamic_scaler_state=scaler, **kwargs)
            # `update` makes the next state; of this one only the verdict is wanted.
            verdict = verdict_on(scaler, following, self.axis_name)
            if place is None:
                return marked(out, verdict)
            return *out[:place], marked(out[place], verdict), *out[place + 1 :]

        return judged


@with_call_hints("loss_scale_optimizer(optax.adam(1e-3), scaler='dynamic')")
def loss_scale_optimizer(
    optimizer: optax.GradientTransformation,
    scaler: str | ArrayLike | Scaler | None = "dynamic",
    *,
    axis_name: AxisName = None,
) -> LossScaleOptimizer:
    """Wraps an optimizer so that the loss is scaled before it is differentiated.

    Its `value_and_grad` scales the loss and unscales the gradients, and `update` adapts
    the scale. Where gradients are not finite it skips the step: updates are zero, and
    the wrapped optimizer's state (moments, step count) stays as it is, bit for bit. For
    whatever else the step changes there is `guard_step`. Gradients that come from
    elsewhere, and may have underflown, are refused when the step is traced.

    Clipping and the like may be inside of it or come before it. What keeps a state of
    gradients (`optax.ema`, `optax.trace`) must be inside. So must `optax.MultiSteps`,
    `optax.apply_if_finite` and `optax.zero_nans`: outside, they would hide overflows or
    keep a NaN. If `MultiSteps` is inside, a microbatch that overflows is dropped and
    lowers the scale at once; the scale only grows at the end of an optimizer step.

    Args:
        optimizer: any Optax optimizer; extra arguments of `update` are handed on.
        scaler: "dynamic"; a number, for a scale that never changes; a state, which may
            be dynamic with settings of your own; or None to scale and skip nothing.
        axis_name: axes of `jax.shard_map` or `jax.pmap` whose devices hold different
            gradients, so that all of them skip a step, or none. Where `shard_map` keeps
            track of what varies (`check_vma=True`), they need not be named.
    Returns:
        An optimizer whose state is a `LossScaleState`, with the methods
        `value_and_grad` and `grad`.
    Raises:
        TypeError: an argument is of another kind.
        ValueError: the optimizer scales the loss already, or (which `init` finds) one
            inside of it does.

    >>> tx = loss_scale_optimizer(optax.sgd(0.5))
    >>> w = jnp.array(3.0)
    >>> opt_state = tx.init(w)
    >>> loss, grads = tx.value_and_grad(lambda w: w**2, opt_state)(w)
    >>> updates, opt_state = tx.update(grads, opt_state, w)
    >>> float(loss), float(updates)
    (9.0, -3.0)

    It is modelled on Keras' `LossScaleOptimizer`. The method is that of Micikevicius et
    al., arXiv:1710.03740."""
    if isinstance(optimizer, LossScaleOptimizer):
        raise ValueError(_TWICE)
    if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        of_nnx = is_node(optimizer) and hasattr(optimizer, "tx")
        name = getattr(optimizer, "__name__", "" if of_nnx else repr(optimizer)[:40])
        raise TypeError(
            "`optimizer` must be an Optax optimizer (a `GradientTransformation`), but "
            f"was given {type(optimizer).__name__}{name and f' {name}'}.\n"
            "Give what is made by a call such as `optax.adam(1e-3)`."
            + " Loss and optimizer together are for `enable_amp(loss_fn, optimizer)`."
            * isinstance(optimizer, types.FunctionType)
            + " The `nnx.Optimizer` is made of what comes back: "
            "`nnx.Optimizer(model, tx, wrt=nnx.Param)`." * of_nnx
        )
    first = _first_state(scaler)
    inner_update = optax.with_extra_args_support(
        optax.GradientTransformationExtraArgs(optimizer.init, optimizer.update)
        if not isinstance(optimizer, optax.GradientTransformation)
        else optimizer
    ).update

    @with_call_hints("tx.init(params)")
    def init(params: Any) -> LossScaleState:
        # What another run saved in its place is kept, for `update` to tell of.
        save_with_flax(NoScaler, lambda _: {}, lambda mine, saved: saved or mine)
        inner_state = initialised(optimizer, params)
        if scale_states(inner_state):
            raise ValueError(_TWICE)
        # New arrays for each run: a jitted step may have had the last ones donated.
        return LossScaleState(begun(first), inner_state)

    @with_call_hints("tx.update(grads, opt_state, params)")
    def update(
        grads: Any, state: Any, params: Any = None, **extra: Any
    ) -> tuple[Any, LossScaleState]:
        scaler, inner_state = checked_state(state, params)
        refuse_other_results(grads)
        if isinstance(scaler, DynamicScalerState):
            refuse_unmarked(grads)
            note_update(scales_of(grads), scaler.scaler)
        grads, finite = read(grads, axis_name)
        if isinstance(scaler, DynamicScalerState):
            warn_of_float16(grads, params)
            # Parameters that a loop does not carry begin anew in each iteration.
            if is_closed_over_by_loop(scaler.scaler, jax.tree.leaves(params)):
                warn_or_raise(_OUTSIDE_OF_LOOP, strict=False)
        if wrapped.watch is not None:
            wrapped.watch.expect_use()
        # A line search is given the gradients a second time, by name.
        extra = unmarked(extra)
        with explaining_other_parameters(optimizer, grads, inner_state, params):
            updates, new_inner = inner_update(grads, inner_state, params, **extra)
        if isinstance(scaler, NoScaler):
            return updates, LossScaleState(scaler, new_inner)
        if finite is None:  # something was done to them: they may have been averaged
            finite = all_agree(all_finite(grads), axis_name, like=scaler.scaler)
        else:
            warn_of_unnamed_axes(axis_name, OF_OPTIMIZER, scaler.scaler)
        following = scaler.update(finite)
        # This selects rather than branches: before a branch, all gradients would have
        # to be written to memory, while XLA fuses these selections with the update.
        # They read the state and not the flag, which is an `and` over all leaves that
        # XLA would copy into each selection. Adding -0.0 leaves even -0.0 as it is.
        zeros = jax.tree.map(lambda u: jnp.full_like(u, -0.0), updates)
        updates = following.accept(updates, zeros)
        new_inner = _accepted(following, new_inner, inner_state)
        is_due = (following.overflows > 0) | _is_step(new_inner)
        # A finite microbatch within a step only ends a row of overflows.
        waiting = scaler._with(overflows=0, stuck=0)
        following = chosen(is_due, following, waiting)
        return updates, LossScaleState(following, new_inner)

    wrapped = LossScaleOptimizer(init, update)  # pyright: ignore
    wrapped.axis_name = axis_name
    wrapped.scales = isinstance(first, DynamicScalerState)
    return wrapped


_OUTSIDE_OF_LOOP = (
    "`tx.update` is called in the body of a loop with a state from outside of it: each "
    "iteration begins with the same scale and the same moments, and what `update` "
    "returns is lost. Put `opt_state` into what the loop carries, and return the next "
    "one from the body."
)


_IN_KERAS = (
    " (an Optax optimizer of `jaxamp_like`, for a training loop of your own; `compile` "
    "takes optimizers of Keras, and for float16 `keras.optimizers.LossScaleOptimizer`: "
    "see the tutorial on Keras)"
)
_NO_LONGER = (
    "`opt_state` has no loss scale, as that of a run in bfloat16, but this optimizer "
    "was made to scale: gradients below 6e-8 become zero in float16. To go on in "
    "float16, take `opt_state._replace(scaler=DynamicScalerState())`; to go on without "
    "a scale, give the optimizer `scaler=None`."
)
_SCALE_OF_ANOTHER_RUN = (
    "`opt_state` was read from a checkpoint that holds a loss scale, as of a run in "
    "float16, and this optimizer has none, as for bfloat16.\nTo go on without a scale, "
    "take `opt_state._replace(scaler=NoScaler())` (`NoScaler` is in "
    "`jaxamp_like.scaling`). To go on in float16, make the optimizer for float16, and "
    "read the checkpoint into the types of its `tx.init(params)`."
)
# What PyTorch's scaler and the optimizers of PyTorch, Flax and Keras have instead.
_ELSEWHERE = {
    **dict.fromkeys(("step", "apply_gradients", "apply", "apply_gradient"), UPDATE),
    "zero_grad": GRADIENT,
    **dict.fromkeys(
        ("get_scale", "loss_scale"), "jaxamp_like.reports.amp_metrics(opt_state)"
    ),
    "apply_updates": "params = optax.apply_updates(params, updates)",
    **dict.fromkeys(("scale", "unscale_", "backward", "minimize", "target"), GRADIENT),
}
_TWICE = (
    "`optimizer` already scales the loss: a second `loss_scale_optimizer` would "
    "unscale the gradients twice.\nWrap the outermost optimizer only, and once."
)


def _accepted(following: DynamicScalerState, new: Any, old: Any) -> Any:
    """The state of the optimizer: `new`, or `old` if the step was skipped.

    A part of it may get its structure from the first gradients, as the measurements of
    `optax.monitor` do. That part is new anyway."""
    if jax.tree.structure(new) == jax.tree.structure(old):
        return following.accept(new, old)
    news, node = eqx.tree_flatten_one_level(new)
    olds, other = eqx.tree_flatten_one_level(old)
    if node != other or len(news) < 1:
        return new
    pairs = zip(news, olds, strict=True)
    return node.unflatten([_accepted(following, *pair) for pair in pairs])


def _is_step(inner_state: Any) -> Array:
    """Whether a step of the optimizer is complete, as `optax.MultiSteps` counts."""
    done = jnp.array(True)
    for one in instances_in(inner_state, optax.MultiStepsState):
        done &= one.mini_step == 0
    return done


def _first_state(scaler: Any) -> Scaler:
    if is_scaler(scaler):
        return scaler
    if scaler is None:
        return NoScaler()
    if isinstance(scaler, str) and scaler == "dynamic":
        return DynamicScalerState()
    if scaler is DynamicScalerState or scaler is NoScaler:
        raise TypeError(
            f"`scaler` must be a state, but was given the class `{scaler.__name__}`.\n"
            f"Call it: `{scaler.__name__}()`."
        )
    if type(scaler).__module__.startswith("flax."):
        raise TypeError(
            f"`scaler` was given Flax' {type(scaler).__name__}.\nWrite "
            "`DynamicScalerState(scaler=2.0**15, patience=2000)`, or leave it out."
        )
    of_jmp = type(scaler).__module__.split(".")[0] == "jmp"
    if of_jmp or isinstance(scaler, bool | str):
        error = ValueError if isinstance(scaler, str) else TypeError
        raise error(
            '`scaler` must be "dynamic", a number, a state or None, but was given '
            f'{scaler!r}. Write "dynamic" for a scale that adapts, and None for none. '
            '(`enable_amp` also takes "auto": a scale in float16 alone.)'
        )
    if isinstance(scaler, dict | list | tuple):
        raise TypeError(
            f"`scaler` must be one state, but was given a {type(scaler).__name__}.\n"
            "An optimizer sees gradients of one scaled loss; scales by group are for "
            "`dynamic_scale_grad`."
        )
    return static_scaler(scaler)
