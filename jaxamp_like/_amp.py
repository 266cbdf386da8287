"""`amp`: pytrees in, pytrees out."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from itertools import compress
from typing import Any, NamedTuple, ParamSpec, TypeVar, overload
from weakref import WeakKeyDictionary, WeakSet

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ._amp_mistakes import (
    FLOAT16_BY_DEFAULT,
    Decorator,
    explaining_tracing,
    is_lazy,
    refuse_lazy_results,
    refuse_unbound,
    refuse_what_cannot_be_rewritten,
    report_of_amp_stopped,
    report_of_amp_twice,
    report_of_hidden_parameters,
)
from ._amp_stop import names_of
from ._dropped import warns_if_dropped
from ._dtypes import DType, cast_as
from ._errors import hiding_frames, place_of, warn_or_raise
from ._frameworks.mixed import ModuleLike, holds_arrays, is_model, mixed_model
from ._frameworks.modules import (
    explain_methods_of_keras,
    refuse_loops_of_keras,
    warn_if_untracked,
)
from ._frameworks.nnx import call_with_nodes
from ._frameworks.written import holders, refusing_to_write, taking_over_compact
from ._jax import (
    are_differentiated_again,
    are_partly_mapped,
    consts,
    has_hi_type,
    is_array,
    is_array_aval,
    is_differentiated,
    merged,
    raw,
    register_rules_of_transforms,
    trace,
)
from ._parameters import (
    Argnums,
    after_model,
    argnums_of,
    as_argnums,
    origins_of,
    returns_tree_like,
)
from ._policies.dictionary import REWRITTEN, Lookup
from ._policies.frozen import FrozenRules
from ._policies.mistakes import (
    lowers_nothing,
    naming_mistakes,
    refuse_what_is_no_function,
    report_of_no_lowering,
)
from ._policies.policy_map import PolicyMap
from ._policies.presets.common import dtype_of_lists
from ._policies.settings import (
    PolicyLike,
    Settings,
    global_policy,
    note_wrapped,
    settings_of,
    using_policy,
)
from ._primitives.matmul_precision import without_setting
from ._recording import is_recorded
from ._rewrite.bind import Binder
from ._rewrite.findings import refuse_rules_with_state, warn_of_findings
from ._rewrite.planner import Planner
from ._rewrite.record import amp_is_off, planner_in_force, record_plan
from ._rewrite.rounded_losses import warn_of_rounded_losses
from ._rewrite.switch import (
    is_amp_disabled,
    is_in_amp_stop,
    is_in_scaled_loss,
    is_traced_by_amp,
    losses_scaled,
    tracing_by_amp,
)
from ._rewrite.traced_call import TracedCall
from ._rules.user_rules import as_bool, as_lean
from ._structural import steps_of
from ._structural.remat_mode import RematMode

_P = ParamSpec("_P")
_R = TypeVar("_R")
_F = TypeVar("_F", bound=Callable[..., Any])
_Model = TypeVar("_Model", bound=ModuleLike)


Run = Callable[[Planner, TracedCall], list[Any]]
# The compute dtypes of functions that `amp` has made. (An attribute would be taken over
# by `functools.wraps`.)
_COMPUTE_DTYPES: WeakKeyDictionary[Callable[..., Any], DType] = WeakKeyDictionary()
# Functions as written that any `amp` has rewritten.
_CALLED: WeakSet[Callable[..., Any]] = WeakSet()


@overload
def amp(
    fn: _Model,
    *,
    compute_dtype: DTypeLike | None = ...,
    amp_policy: PolicyLike | None = ...,
    strict: bool = ...,
    lean: bool | str = ...,
    gather_once: bool | None = ...,
    argnums: int | Sequence[int] | None = ...,
) -> _Model: ...
@overload
def amp(
    fn: Callable[_P, _R],
    *,
    compute_dtype: DTypeLike | None = ...,
    amp_policy: PolicyLike | None = ...,
    strict: bool = ...,
    lean: bool | str = ...,
    gather_once: bool | None = ...,
    argnums: int | Sequence[int] | None = ...,
) -> Callable[_P, _R]: ...
@overload
def amp(
    fn: None = None,
    *,
    compute_dtype: DTypeLike | None = ...,
    amp_policy: PolicyLike | None = ...,
    strict: bool = ...,
    lean: bool | str = ...,
    gather_once: bool | None = ...,
    argnums: int | Sequence[int] | None = ...,
) -> Callable[[_F], _F]: ...
@warns_if_dropped("mixed = amp(loss_fn)")
@naming_mistakes
def amp(
    fn: Any = None,
    *,
    compute_dtype: DTypeLike | None = None,
    amp_policy: PolicyLike | None = None,
    strict: bool = False,
    lean: bool | str = False,
    gather_once: bool | None = None,
    argnums: int | Sequence[int] | None = None,
) -> Any:
    """Computes what `fn` computes in mixed precision.

    `fn` is traced to a jaxpr. Every equation, at any depth (also in the bodies of jit,
    scan, while, cond, remat, custom derivative rules, shard_map), is looked up in the
    policy and bound again with its inputs cast as the rule says. What goes in and out
    of the function keeps its structure, shapes and dtypes, and so do gradients.

    Only float32 values (and 16-bit ones, for 8-bit rules) are lowered; float64, complex
    numbers, integers and PRNG keys never are, and no equation runs in more bits than
    its author wrote.

    Args:
        fn: any function of pytrees: a loss, a model, a whole training step, a callable
            module or a bound method. Leaves that are no arrays (Python numbers too) are
            passed through as they are. Without `fn`, returns a decorator.
            For a model of Equinox or NNX the result is a model: it has the same
            parameters, which transforms and optimizers find, and its methods compute in
            mixed precision.
        compute_dtype: the dtype that contractions compute in; by default that of the
            policy, or else that of the global policy, which is float16 until it is set.
            bfloat16 needs no loss scaling. None is the default, and does not turn
            `amp` off: `disable_amp` does.
        amp_policy: a dict of rules, a `Policy`, the name of one ("mixed_bfloat16") or a
            `PolicyMap`; if not given, `global_policy()`, now and not when the function
            is called. A dict maps primitives, names of `jax.named_scope`s, paths of
            such names ("encoder/attention"), compiled regular expressions of paths, or
            "amp_default" to casting rules. A scope wins over a primitive, and among
            nested scopes the outermost. A dtype stands for the rule
            `use_precision(dtype)`.
        strict: raise instead of warn where an equation holds a program that amp can't
            rewrite, or where a key of the policy matches nothing.
        lean: under any policy, keep as little for the backward pass as the default
            policy does: what stands between contractions (norm, softmax, activation,
            gate) is run again there, whatever its rule. "int8", "float8" (which is
            "float8_e4m3fn") and "float8_e5m2" also keep values in 8 bits, with a scale
            for every 32 neighbours: what contractions read, and those of their results
            that a softmax, activation or gate is run again from. Sums, such as residual
            streams, stay as they are. `saving_low` does so for single scopes, and for
            all that they read.
        gather_once: whether the backward pass keeps the low copy of a parameter that
            the forward pass read, instead of casting it once more, so that what lies on
            several devices is sent once. By default the copy is kept where types, a
            sharding constraint or `in_shardings` inside of `fn` show that the parameter
            lies on several. If only the `in_shardings` of a `jit` around `amp` place
            it, equal casts are merged when that is lowered, but not those in loops or
            in an inner `jit`: give True there.
        argnums: the positions of the arguments that hold parameters, as of `jax.grad`:
            by default the first one, or none where `fn` is a module that holds its own
            parameters, or a method of one. It matters to rules that treat weights
            unlike activations (`float8`, `int8`, `use_precision_by_pass`). Values that
            are made from parameters alone (cast, concatenated, masked) count as
            weights, too, and so do arrays that `fn` closes over where they are
            contracted with computed values; pass `()` where they hold all of the
            parameters.
    Returns:
        A function with the signature of `fn`; of a model, a model. Floating results are
        cast if the policy has an output dtype.
    Raises:
        TypeError, ValueError: an argument is of the wrong kind, or `compute_dtype` and
            the policy disagree.
        AmpError: the policy can't be followed, or `strict` forbids to go on.

    >>> def loss(w, x):
    ...     return jnp.mean(jnp.tanh(x @ w) ** 2)
    >>> w, x = jnp.ones((4, 3)), jnp.ones((2, 4))
    >>> grads = jax.jit(jax.grad(amp(loss, compute_dtype="bfloat16")))(w, x)
    >>> grads.dtype
    dtype('float32')

    Casting by op is due to Micikevicius et al., "Mixed Precision Training",
    arXiv:1710.03740."""
    settings = settings_of(amp_policy, compute_dtype)
    strict, lean = as_bool(strict, "strict"), as_lean(lean)
    argnums = None if argnums is None else as_argnums(argnums)
    if gather_once is not None:
        gather_once = as_bool(gather_once, "gather_once")
    if fn is None:
        return Decorator(
            amp,
            compute_dtype=compute_dtype,
            amp_policy=amp_policy,
            strict=strict,
            lean=lean,
            gather_once=gather_once,
            argnums=argnums,
        )
    refuse_unbound(fn)
    refuse_what_is_no_function(fn, "amp")
    is_said = compute_dtype is not None or amp_policy is not None
    if is_said:
        warn_of_amp_twice(fn, settings.compute_dtype, strict)
    options = _Options(settings, strict, lean, gather_once, argnums)
    if is_amp_disabled():
        return options.mix(fn)
    if isinstance(fn, jax.tree_util.Partial):
        made = options.mix(fn.func)
        return jax.tree_util.Partial(made, *fn.args, **fn.keywords)
    if not is_model(fn):
        if holds_arrays(fn):
            warn_or_raise(report_of_hidden_parameters(fn), strict)
        made = options.mix(fn)
        explain_methods_of_keras(made, fn)
        if not is_said:
            note_wrapped(made, fn)
        return made
    refuse_what_cannot_be_rewritten(fn)
    if compute_dtype is None and dtype_of_lists(amp_policy) is not None:
        compute_dtype = settings.compute_dtype  # which pickled rules don't say
    given = {"compute_dtype": compute_dtype, "amp_policy": _saved(amp_policy)}
    # Equal policies give one object. A pickled model is given its policy explicitly, so
    # here, too, the policy does not count as the default.
    settings = settings_of(**given)._replace(is_by_default=False)
    if argnums is not None:
        options = options._replace(argnums=after_model(argnums))
    options = options._replace(settings=settings)
    given |= {"strict": strict, "lean": lean, "gather_once": gather_once}
    given["argnums"] = argnums
    again = functools.partial(_amp_again, global_policy(), given)
    return mixed_model(fn, options, options.mix, again)


def warn_of_amp_twice(fn: Any, asked: DType, strict: bool) -> None:
    """Warns if `amp` has made a function already, in another dtype than is asked."""
    inner = compute_dtype_of(fn)
    if inner not in (None, asked):
        report = report_of_amp_twice(inner, asked)
        warn_or_raise(f"{report} This is of {place_of(fn)}.", strict)


def _note_called(fn: Callable[..., Any]) -> None:
    if inspect.isfunction(one := inspect.unwrap(fn)):
        _CALLED.add(one)


def was_called(fn: Callable[..., Any]) -> bool:
    """Whether any `amp` has rewritten a function, which is given as written."""
    return fn in _CALLED


def compute_dtype_of(fn: Any) -> DType | None:
    """The compute dtype of a function that `amp` has made; `None` for others."""
    return _COMPUTE_DTYPES.get(fn) if inspect.isfunction(fn) else None


class _Options(NamedTuple):
    """The arguments of `amp`, once they are checked: equal ones mean the same."""

    settings: Settings
    strict: bool
    lean: bool | str
    gather_once: bool | None
    argnums: Argnums | None

    def mix(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        return amp_by(
            self.settings,
            fn,
            strict=self.strict,
            lean=self.lean,
            gather_once=self.gather_once,
            argnums=self.argnums,
        )


def _saved(policy: Any) -> Any:
    """A policy as it can be pickled."""
    is_dict = isinstance(policy, Mapping) and not isinstance(policy, PolicyMap)
    return FrozenRules(policy) if is_dict else policy


def _amp_again(policy: Any, given: dict[str, Any], model: Any) -> Any:
    """Applies `amp` to a model under the global policy of its first wrapping."""
    with using_policy(policy):
        return amp(model, **given)


def amp_by(
    settings: Settings,
    fn: Callable[..., Any],
    *,
    strict: bool,
    lean: bool | str = False,
    gather_once: bool | None = None,
    argnums: Argnums | None = None,
    run: Run | None = None,
) -> Callable[..., Any]:
    """Applies `amp` to a function, by settings that are checked already.

    `run` plans and binds the traced program; it is given where that needs a state."""
    refuse_what_cannot_be_rewritten(fn)
    refuse_loops_of_keras(fn)
    if is_amp_disabled():
        return fn
    if lowers_nothing(settings.lookup, settings.compute_dtype):
        warn_or_raise(report_of_no_lowering(settings.lookup), strict)
    of_policy = settings.lookup, settings.compute_dtype
    planner = _planner(*of_policy, strict, lean, gather_once)
    argnums = argnums_of(fn) if argnums is None else argnums
    is_float16 = settings.compute_dtype == jnp.float16
    of_enable_amp = is_in_scaled_loss()
    warns_of_float16 = is_float16 and settings.is_by_default and not of_enable_amp
    lacks_scale = is_float16 and (settings.is_by_default or of_enable_amp)
    rewritten = functools.partial(
        _rewritten, planner, run or run_by_plan, fn, argnums, lacks_scale, of_enable_amp
    )

    @functools.wraps(fn, assigned=names_of(fn), updated=())
    def wrapped(*args, **kwargs):
        with hiding_frames:
            warn_if_untracked(fn, "amp")
            return mixed(args, kwargs)

    def mixed(args, kwargs):
        _note_called(fn)
        if is_amp_disabled():
            warn_or_raise(
                f"A function was wrapped by `amp` before `disable_amp()`, and is still "
                f"rewritten: {fn!r}. Call `amp` within the block.",
                strict=False,
            )
        # While an outer `amp` traces, `amp_stop` is meant for that one.
        if is_in_amp_stop() and not is_traced_by_amp():
            warn_or_raise(report_of_amp_stopped(fn), strict=False)
        # A report may take a derivative that nobody else takes.
        if warns_of_float16 and not (is_in_scaled_loss() or is_recorded()):
            if any(map(is_differentiated, jax.tree.leaves((args, kwargs)))):
                warn_or_raise(FLOAT16_BY_DEFAULT, strict=False)
        held = holders(fn, args, kwargs)
        # `init` is run as it is: it must return its new parameters, not tracers.
        is_off = amp_is_off() or any(holder.is_initialising for holder in held)
        if is_off:
            return call_with_nodes(_as_it_is, fn, args, kwargs)
        with refusing_to_write(held):
            return returned(call_with_nodes(rewritten, fn, args, kwargs))

    def returned(out):
        if settings.output.output_dtype is None:
            return out
        out = warn_of_rounded_losses(out, settings.output.output_dtype, fn, strict)
        return settings.output.cast_to_output(out)

    _COMPUTE_DTYPES[wrapped] = settings.compute_dtype
    return taking_over_compact(fn, wrapped)


def _as_it_is(fn: _F) -> _F:
    return fn


@functools.lru_cache(maxsize=128)
def _planner(
    policy: Lookup,
    dtype: DType,
    strict: bool,
    lean: bool | str,
    gather_once: bool | None,
) -> Planner:
    """One planner for equal settings, since it remembers what it has rewritten."""
    return Planner(policy, dtype, strict, lean, gather_once)


def _rewritten(
    planner: Planner,
    run: Run,
    given: Callable[..., Any],
    argnums: tuple[int, ...],
    lacks_scale: bool,
    of_enable_amp: bool,
    fn: Callable[..., Any],
) -> Callable[..., Any]:
    """`fn`, rewritten when it is called; `given` is how the user knows it."""

    def rewritten(*args, **kwargs):
        register_rules_of_transforms()
        in_force = planner_in_force(planner)
        leaves, tree = jax.tree.flatten((args, kwargs))
        dynamic = [is_array(x) for x in leaves]
        arrays = list(compress(leaves, dynamic))
        result = []

        def flat(*arrays):
            args, kwargs = jax.tree.unflatten(tree, merged(leaves, dynamic, arrays))
            outs, out_tree = jax.tree.flatten(fn(*args, **kwargs), is_leaf=is_lazy)
            refuse_lazy_results(fn, outs)
            is_out = [isinstance(x, jax.Array) or has_hi_type(x) for x in outs]
            # The arrays among `outs` are tracers, which must not outlive this trace.
            static = [
                None if is_array else x
                for x, is_array in zip(outs, is_out, strict=True)
            ]
            result.append((static, out_tree, is_out))
            return [x for x, is_array in zip(outs, is_out, strict=True) if is_array]

        # Errors of JAX name the function that they arose in.
        vars(flat).update(__signature__=inspect.signature(flat), __wrapped__=fn)
        with explaining_tracing(), without_setting(), tracing_by_amp():
            jaxpr = trace(flat, arrays)
        if are_partly_mapped([*arrays, *consts(jaxpr)]):
            in_force = in_force.of_partly_mapped
        if in_force.may_keep_in_8_bits:
            if are_differentiated_again([*arrays, *consts(jaxpr)]):
                in_force = in_force.of_second_derivative
        outs, out_tree, is_out = result[0]
        origins = list(compress(origins_of(fn, args, kwargs, argnums), dynamic))
        with explaining_tracing():
            made = merged(outs, is_out, [v.aval for v in raw(jaxpr).outvars])
            # Any loss that was scaled so far counts: one in a `jit` that is cached is
            # not traced again, and so not seen.
            call = TracedCall(
                given,
                jaxpr,
                arrays,
                origins,
                is_scaled=not lacks_scale
                or losses_scaled() > 0
                or (of_enable_amp and _begins_with_number(jaxpr)),
                has_gradients=lambda: returns_tree_like(
                    args, jax.tree.unflatten(out_tree, made)
                ),
            )
            values = run(in_force, call)
        return jax.tree.unflatten(out_tree, merged(outs, is_out, values))

    return rewritten


def _begins_with_number(jaxpr: Any) -> bool:
    """Whether the first result is one number, as that of a loss, whatever follows."""
    first = next(iter(raw(jaxpr).outvars), None)
    return first is not None and getattr(first.aval, "shape", None) == ()


def run_by_plan(
    planner: Planner, call: TracedCall, has_state: bool = False
) -> list[Any]:
    """Plans a freshly traced jaxpr and binds it on the arguments.

    Rules that need a state are refused, unless there is one or the call is recorded."""
    jaxpr = planner.prepared(call.jaxpr)
    inner = raw(jaxpr)
    avals = (v.aval for v in inner.invars)
    plan = planner.plan(jaxpr, tuple(map(planner.input_fact, avals, call.origins)))
    steps = list(steps_of(plan))
    warn_of_findings(call, planner, plan, steps)
    record_plan(planner, plan, steps)
    if not (has_state or is_recorded()):
        refuse_rules_with_state(steps)
    # The scope tells an outer `amp` that precision is decided here.
    with jax.named_scope(REWRITTEN):
        outs = Binder(planner, {}, RematMode.REGIONS).run(
            plan, consts(jaxpr), call.arrays
        )
        return [
            _as_author_typed(x, v.aval)
            for x, v in zip(outs, inner.outvars, strict=True)
        ]


def _as_author_typed(x: Any, aval: Any) -> Any:
    """`x` in the author's dtype, weakly typed if the author's value was."""
    if not is_array_aval(aval):
        return x
    x = x if isinstance(x, jax.Array) else jnp.asarray(x)  # a literal
    return cast_as(x, aval)
