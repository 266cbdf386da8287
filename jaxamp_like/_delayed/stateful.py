"""`amp_with_state`: mixed precision by rules that remember what they saw."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.typing import DTypeLike

from .._amp import TracedCall, amp_by, run_by_plan
from .._errors import AmpError, hiding_frames, place_of, warn_or_raise
from .._jax import are_differentiated, to_classic, trace
from .._parameters import Argnums, as_argnums
from .._policies.mistakes import naming_mistakes
from .._policies.settings import PolicyLike, Settings, settings_of
from .._quantised.delayed import OUTSIDE
from .._reports.call import flat_call
from .._rewrite.planner import Planner
from .._rules.user_rules import as_bool
from .residuals import with_fewer_residuals
from .state import State, as_state, checked, first_state, next_state, scales_of
from .tensors import Tensor, TensorFinder
from .threaded import StatefulEvaluator

_INIT = "_init_amp_state"


@naming_mistakes
def amp_with_state(
    fn: Callable[..., Any] | None = None,
    *,
    compute_dtype: DTypeLike | None = None,
    amp_policy: PolicyLike | None = None,
    strict: bool = False,
    argnums: int | Sequence[int] | None = None,
) -> Any:
    """As `amp`, for policies with rules that remember: `float8(delayed=True)`.

    Put it around all that a step differentiates: `jax.value_and_grad(loss)`, or a whole
    training step. Then the backward pass is ordinary code inside of it, and the largest
    cotangents are ordinary results.

    The state is a dict of arrays, kept besides parameters and optimizer state, and
    never a part of them. Each tensor that a quantised contraction reads has an entry,
    named by the scopes of the contraction. It holds the scale of the last step and the
    largest magnitudes of the steps before, as Flax orders them: the newest first, then
    from the oldest on. In a `lax.scan` over layers, each layer has a scale and a
    history of its own, along one more axis of the entry. Where iterations share an
    operand, as in a recurrence or over microbatches, they share the entry, and the
    largest magnitude counts. The devices of a `shard_map` share it, too. A tensor keeps
    its entry if it was not made, as in a branch that was not taken, or if it held an
    inf or NaN.

    A step that is called for each microbatch, with one state, returns states that
    differ in their newest maxima only: `jax.tree.map(jnp.maximum, a, b)` is the state
    after both. Likewise, take the maximum over the first axis after a `jax.vmap` over
    examples.

    Args:
        fn: as of `amp`. Without `fn`, returns a decorator.
        compute_dtype: as of `amp`.
        amp_policy: as of `amp`.
        strict: as of `amp`; it also raises an error if no tensor has an entry.
        argnums: as of `amp`, without the state: 0 is the first argument of `fn`.
    Returns:
        A function `(state, *args, **kwargs) -> (out, new_state)`, where `out` is what
        `amp(fn)` would return.
    Raises:
        TypeError, ValueError, AmpError: as of `amp`; and when it is called, if the
            state is not that of the function, or if it is differentiated: the largest
            cotangents would be lost.

    >>> import jax, jax.numpy as jnp
    >>> from jaxamp_like import Policy
    >>> from jaxamp_like.presets import quantised
    >>> from jaxamp_like.rules import float8
    >>> rule = float8(delayed=True, amax_history_length=16, where=None)
    >>> policy = Policy("bfloat16", rules=quantised(rule))
    >>> def loss(w, x):
    ...     with jax.named_scope("dense"):
    ...         return jnp.mean((x @ w) ** 2)
    >>> w, x = jnp.ones((8, 4)), jnp.full((2, 8), 3.0)
    >>> step = jax.jit(amp_with_state(jax.value_and_grad(loss), amp_policy=policy))
    >>> state = init_amp_state(step, w, x)
    >>> (value, grads), state = step(state, w, x)
    >>> for name, tensor in state.items():
    ...     print(name, tensor.history[:2])
    dense/dot_general/cotangent [6. 0.]
    dense/dot_general/lhs [3. 0.]
    dense/dot_general/rhs [1. 0.]

    This is delayed scaling as in NVIDIA's Transformer Engine and Flax's `fp8_ops`."""
    settings = settings_of(amp_policy, compute_dtype)
    strict = as_bool(strict, "strict")
    argnums = None if argnums is None else as_argnums(argnums)
    if fn is None:
        return functools.partial(
            amp_with_state,
            compute_dtype=compute_dtype,
            amp_policy=amp_policy,
            strict=strict,
            argnums=argnums,
        )
    if not callable(fn):
        raise TypeError(
            f"`fn` must be callable, but got {type(fn).__name__}. Write "
            "`amp_with_state(fn)(state, x)`, not `amp_with_state(fn(x))`."
        )
    return _stateful(settings, fn, strict, argnums)


def _stateful(
    settings: Settings, fn: Callable[..., Any], strict: bool, argnums: Argnums | None
) -> Any:
    def mixed(step: "StatefulCall") -> Callable[..., Any]:
        return amp_by(settings, fn, strict=strict, argnums=argnums, run=step.run)

    @hiding_frames
    def wrapped(state: State, /, *args: Any, **kwargs: Any) -> tuple[Any, State]:
        if are_differentiated(jax.tree.leaves(state)):  # the first argument
            raise AmpError(OUTSIDE)
        step = StatefulCall(as_state(state), strict)
        out = mixed(step)(*args, **kwargs)
        return out, step.state

    def init(*args: Any, **kwargs: Any) -> State:
        step = StatefulCall(None, strict)
        call = flat_call(mixed(step), args, kwargs, (), _name(fn))
        trace(call.fn, call.arrays)
        return first_state(step.tensors)

    setattr(wrapped, _INIT, init)
    return _with_signature(fn, wrapped)


@hiding_frames
def init_amp_state(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> State:
    """The state that training with a function of `amp_with_state` begins with.

    Nothing is run. The scales are 1 and the histories 0: the first step scales by the
    maxima that it sees itself.

    Args:
        fn: what `amp_with_state` returned; `jax.jit` may be around it.
        args: the arguments that it will be called with after the state, or their shapes
            (`jax.ShapeDtypeStruct`).
        kwargs: its keyword arguments, or their shapes.
    Returns:
        A state. Optimizers never see it; save it beside theirs.
    Raises:
        TypeError: `fn` was not made by `amp_with_state`.

    >>> import jax, jax.numpy as jnp
    >>> from jaxamp_like import get_policy
    >>> policy = get_policy("float8_from_float32", amax_history_length=16)
    >>> step = amp_with_state(jnp.matmul, amp_policy=policy)
    >>> x = jax.ShapeDtypeStruct((4096, 4096), "float32")
    >>> state = init_amp_state(step, x, x)
    >>> {name: tensor.history.shape for name, tensor in state.items()}
    {'dot_general/lhs': (16,), 'dot_general/rhs': (16,)}
    """
    made: Any = fn
    while not hasattr(made, _INIT) and hasattr(made, "__wrapped__"):
        made = made.__wrapped__
    init = getattr(made, _INIT, None)
    if init is None:
        raise TypeError(
            "`fn` must be what `amp_with_state` returned, which knows the policy, but "
            f"got {_name(fn)!r}. Write `step = amp_with_state("
            "jax.value_and_grad(loss), amp_policy=...)` and "
            "`init_amp_state(step, *args)`."
        )
    return init(*args, **kwargs)


class StatefulCall:
    """One call: how its program is run, and the state before and after.

    Args:
        state: the state before the call; `None` for the one that training begins with.
        strict: whether it is an error if no tensor has an entry in the state."""

    def __init__(self, state: Any, strict: bool):
        self.state = state
        self.strict = strict
        self.tensors: dict[str, Tensor] = {}

    def run(self, planner: Planner, call: TracedCall) -> list[Any]:
        def rewritten(*arrays):
            again = call._replace(arrays=list(arrays))
            return run_by_plan(planner, again, has_state=True)

        made = to_classic(trace(rewritten, call.arrays))
        finder = TensorFinder()
        sites = finder.scale_uses(made)
        self.tensors = finder.tensors
        if not self.tensors:
            warn_or_raise(f"{_NOTHING} This is of {place_of(call.fn)}.", self.strict)
        given = self.state
        state = first_state(self.tensors) if given is None else given
        state = checked(state, self.tensors)
        scales = scales_of(self.tensors, state)

        def threaded(scales, arrays):
            return StatefulEvaluator(self.tensors).run(made, sites, scales, arrays)

        outs, maxima = with_fewer_residuals(threaded, scales, call.arrays)
        self.state = next_state(self.tensors, state, scales, maxima)
        return outs


_NOTHING = (
    "`amp_with_state` has nothing to remember: no contraction of the function is "
    "scaled by `float8(delayed=True)`. If that is meant, `amp` does as well; else see "
    "`explain`, or give the rule `where=None`."
)


def _name(fn: Any) -> str:
    name = getattr(fn, "__name__", None)
    return name if isinstance(name, str) else type(fn).__name__


def _with_signature(fn: Callable[..., Any], wrapped: Any) -> Any:
    """`wrapped`, with the names of `fn`, and with its signature after a `state`."""
    for name in ("__module__", "__name__", "__qualname__", "__doc__"):
        if isinstance(getattr(fn, name, None), str):
            setattr(wrapped, name, getattr(fn, name))
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # some callables don't tell their signature
        return wrapped
    state = inspect.Parameter("state", inspect.Parameter.POSITIONAL_ONLY)
    parameters = [state, *signature.parameters.values()]
    wrapped.__signature__ = signature.replace(
        parameters=parameters, return_annotation=inspect.Signature.empty
    )
    return wrapped
