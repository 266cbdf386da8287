"""The global policy, and the settings that follow from the arguments of `amp`.

The global policy is read when a function is wrapped and never when one is called, so
that no program that was traced, compiled or cached before can depend on it."""

import atexit
import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
from jax.typing import DTypeLike

from .._blocks import Block
from .._dtypes import DType, as_compute_dtype
from .._errors import (
    AmpError,
    AmpWarning,
    explaining_misfits,
    place_of,
    showing_call,
    warn_or_raise,
)
from .._jax import has_computed
from .._within import within
from .dictionary import Lookup
from .frozen import checked_policy
from .mistakes import (
    instead_of_amp_policy,
    is_like_policy_name,
    is_map_of_keras,
    with_name,
)
from .named import Policy
from .names import get_policy
from .policy_map import PolicyMap, dtype_of
from .presets.common import dtype_of_lists

PolicyLike = Mapping[Any, Any] | Policy | PolicyMap | str


@dataclass(eq=False)
class _Using:
    """The policy of a block or of the process, and whether `amp` has asked for it."""

    policy: Policy | PolicyMap
    is_read: bool = False


_INITIAL = Policy("float16")
_global = _Using(_INITIAL)  # of the process
_block: ContextVar[_Using | None] = ContextVar("policy", default=None)


@contextlib.contextmanager
def reading_for_no_amp() -> Iterator[None]:
    """Within it, reading a block's policy does not count as using it."""
    using = _block.get() or _global
    was_read = using.is_read
    try:
        yield
    finally:
        using.is_read = was_read


# Functions that `amp` has wrapped before anything said a policy, and where they are.
_wrapped_before: WeakKeyDictionary[Callable[..., Any], str] = WeakKeyDictionary()


def note_wrapped(made: Callable[..., Any], fn: Callable[..., Any]) -> None:
    """Notes that `made` has the initial policy, if nobody has set another one yet."""
    if global_policy() is _INITIAL:
        _wrapped_before[made] = place_of(fn)


@explaining_misfits(
    "global_policy", lambda *_: ["To set it, write `set_global_policy(policy)`."]
)
def global_policy() -> Policy | PolicyMap:
    """The policy that `amp` uses if it is given none.

    Returns:
        The policy of the innermost `using_policy` block, else that of
        `set_global_policy`, else `Policy("float16")`.

    >>> global_policy()
    Policy(compute_dtype='float16')
    """
    using = _block.get() or _global
    using.is_read = True
    return using.policy


@showing_call("set_global_policy('mixed_bfloat16')")
def set_global_policy(policy: Policy | PolicyMap | str | None) -> None:
    """Sets the policy that `amp` uses if it is given none, in all threads.

    Functions that `amp` has wrapped already keep the policy that they have, of which
    the first call warns. If no `amp` asks for the policy, an `AmpWarning` says so at
    the end of the process, or when it is reset by `None`. A library should not call
    this; see `using_policy`.

    Args:
        policy: a `Policy`, a `PolicyMap` or a name; `None` restores the initial policy.
    Raises:
        TypeError, ValueError, AmpError: see `get_policy`.
        AmpError: within `using_policy`, whose policy would hide this one.

    >>> set_global_policy("mixed_bfloat16")
    >>> global_policy().compute_dtype.name
    'bfloat16'
    >>> set_global_policy(None)

    It is modelled on `keras.config.set_dtype_policy`."""
    global _global
    if _block.get() is not None:
        raise AmpError(
            "`set_global_policy` within `using_policy` would have no effect until the "
            "block ends. Call it outside, or nest another `using_policy`."
        )
    old, _global = _global, _Using(_INITIAL if policy is None else _as_policy(policy))
    if policy is None:  # another one may replace a default of the program
        _tell_if_unread(old)
    if _computes_otherwise(_global.policy) and (places := [*_wrapped_before.values()]):
        _wrapped_before.clear()
        warn_or_raise(
            f"`set_global_policy` comes after `amp` has wrapped {places[0]} without a "
            "policy, which goes on in float16. Call it first, before the import of "
            "modules that use `@amp`, or give the policy to `amp`.",
            strict=False,
        )


def _computes_otherwise(policy: Policy | PolicyMap) -> bool:
    """Whether `amp` does something else under a policy than under the initial one."""
    is_map = isinstance(policy, PolicyMap)
    return is_map or replace(policy, param_dtype=_INITIAL.param_dtype) != _INITIAL


def _tell_if_unread(using: _Using) -> None:
    """Warns of a global policy that has changed nothing, and is not the initial one."""
    if using.policy is _INITIAL or using.is_read:
        return
    warn_or_raise(
        "`set_global_policy` had no effect: nothing asked for the policy. It is what "
        "`amp` reads where it wraps a function and is given no policy; without `amp` "
        "nothing is lowered, in no framework. Write `mixed = amp(fn)` after it.",
        strict=False,
    )


@atexit.register
def _tell_at_the_end() -> None:
    """As above, if the program has computed anything, and no error stopped it."""
    if has_computed() and not hasattr(sys, "last_value"):
        try:
            _tell_if_unread(_global)
        except AmpWarning as told:  # where warnings are errors, which is too late
            print(told, file=sys.stderr)


@showing_call("using_policy(policy)")
def using_policy(policy: Policy | PolicyMap | str) -> Block[Policy | PolicyMap]:
    """Sets the global policy for a block, in this thread or task only.

    What counts is where a function is wrapped, not where it is called: a block in which
    nothing is wrapped has no effect, and says so by an `AmpWarning`.

    Args:
        policy: a `Policy`, a `PolicyMap` or a name.
    Returns:
        A context manager, which gives the policy; also a decorator.
    Raises:
        TypeError, ValueError, AmpError: see `get_policy`.

    >>> import jax, numpy as np
    >>> from jaxamp_like import amp
    >>> with using_policy("mixed_bfloat16"):
    ...     dot = amp(jax.numpy.dot)
    >>> float(dot(np.float32([1.001, 0]), np.eye(2, dtype="float32"))[0])
    1.0
    """
    return Block("using_policy(...)", partial(_using, _as_policy(policy)))


@contextlib.contextmanager
def _using(policy: Policy | PolicyMap) -> Iterator[Policy | PolicyMap]:
    outer, using = _block.get(), _Using(policy)
    with within(_block, using):
        yield policy
    if using.is_read:
        # Without this block, the outer policy would have been read.
        (outer or _global).is_read = True
    else:
        warn_or_raise(
            "`using_policy` had no effect: nothing in the block, in its own thread, "
            "asked for the policy. "
            "`amp` reads it where it wraps a function, not where that is called, and "
            "without `amp` nothing is lowered. Write `mixed = amp(fn)` in the block, "
            "or give `amp` the policy.",
            strict=False,
        )


def _as_policy(policy: Any) -> Policy | PolicyMap:
    if isinstance(policy, Mapping) and not isinstance(policy, PolicyMap):
        raise TypeError(
            "A global policy is a `Policy`, a `PolicyMap` or a name, but got a dict. "
            "Rules alone say no dtype: `Policy('bfloat16', rules=...)`."
        )
    return policy if isinstance(policy, PolicyMap) else get_policy(policy)


class Settings(NamedTuple):
    """What `amp` does, once its arguments are understood."""

    lookup: Lookup
    compute_dtype: DType
    output: Policy  # whose `cast_to_output` the results pass through
    is_by_default: bool = False  # nobody has said a compute dtype


def may_compute_in(settings: Settings, dtype: DType) -> bool:
    """Whether a compute dtype or a rule of the settings is `dtype`, anywhere."""
    rules = (value for _, value in settings.lookup.items())
    return any(_names(value, dtype) for value in (settings.compute_dtype, *rules))


def _names(value: Any, dtype: DType) -> bool:
    if is_dataclass(value) and not isinstance(value, type):
        return any(_names(getattr(value, one.name), dtype) for one in fields(value))
    if isinstance(value, tuple | list):
        return any(_names(one, dtype) for one in value)
    return isinstance(value, np.dtype) and value == dtype


def settings_of(
    amp_policy: PolicyLike | None, compute_dtype: DTypeLike | None
) -> Settings:
    """Understands the arguments of `amp`; the global policy fills in what is not said.

    Raises:
        TypeError, ValueError, AmpError: an argument is of the wrong kind, or they
            disagree.
    """
    given = None
    if compute_dtype is not None:
        given = _as_compute_dtype(compute_dtype)
    if amp_policy is None:
        return _by_global_policy(given)
    is_map = isinstance(amp_policy, PolicyMap) or is_map_of_keras(amp_policy)
    if isinstance(amp_policy, Mapping) and not is_map:
        settings = _by_global_policy(given, dtype_of_lists(amp_policy))
        return settings._replace(lookup=checked_policy(amp_policy))
    if not isinstance(amp_policy, str | Policy | PolicyMap):
        raise TypeError(
            "`amp_policy` must be a dict of rules, a `Policy`, a `PolicyMap` or a name "
            f"such as 'mixed_bfloat16', but got {with_name(amp_policy)}. "
            f"{instead_of_amp_policy(amp_policy)}"
        )
    policy = _as_policy(amp_policy)
    said = _default_of(policy).compute_dtype
    if given is None and isinstance(policy, Policy) and _only_casts_parameters(policy):
        warn_or_raise(
            f"`amp_policy={policy!r}` lowers nothing: it has neither a compute dtype "
            "nor rules, and `amp` does not look at `param_dtype`. To compute low, "
            "write `Policy('bfloat16', param_dtype=...)`; parameters are cast by "
            "`policy.cast_to_param(params)`.",
            strict=False,
        )
    if given is not None and said is not None and given != said:
        raise ValueError(
            f"`compute_dtype` is {given.name!r}, but `amp_policy` computes in "
            f"{said.name!r}. Give one of them, or a policy whose `compute_dtype` is "
            "`None`."
        )
    return _settings(policy, given)


def _only_casts_parameters(policy: Policy) -> bool:
    return replace(policy, param_dtype=None) == Policy() != policy


def _by_global_policy(given: DType | None, of_lists: DType | None = None) -> Settings:
    """What the global policy says; before that, `of_lists` counts if none was set."""
    policy = global_policy()
    is_by_default = given is None and policy is _INITIAL
    if is_by_default and of_lists not in (None, _INITIAL.compute_dtype):
        given, is_by_default = of_lists, False
    return _settings(policy, given)._replace(is_by_default=is_by_default)


def _as_compute_dtype(value: Any) -> DType:
    try:
        return as_compute_dtype(value, "compute_dtype")
    except TypeError as e:
        is_name = is_like_policy_name(value)
        if is_name or isinstance(value, Mapping | Policy | PolicyMap):
            shown = repr(value) if is_name else "..."
            raise TypeError(
                f"{e} Policies are given as `amp_policy={shown}`."
            ) from None
        raise


def _default_of(policy: Policy | PolicyMap) -> Policy:
    return policy.default_policy if isinstance(policy, PolicyMap) else policy


def _settings(policy: Policy | PolicyMap, given: DType | None) -> Settings:
    """The settings of a policy, computing in the dtype `given` if there is one."""
    default = _default_of(policy)
    if given is not None:
        default = replace(default, compute_dtype=given)
        is_map = isinstance(policy, PolicyMap)
        policy = PolicyMap(default, dict(policy.items())) if is_map else default
    return Settings(policy.lookup(), dtype_of(default), default)
