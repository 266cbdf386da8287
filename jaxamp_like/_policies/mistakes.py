"""Finds policies and other arguments that don't fit, and says what to write instead."""

import contextlib
import functools
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ParamSpec, TypeVar

import jax
import jax.extend.core.primitives as jax_primitives
import jax.numpy as jnp

from .._dtypes import DType, as_compute_dtype, as_float_dtype, bits
from .._errors import AmpError, explaining_misfits
from .._jax import Primitive, is_array
from .._primitives import FIXED
from .._rules import (
    Rule,
    UseOriginalPrecision,
    UsePrecision,
    follow_inputs,
    keep_each_input,
    keep_inputs,
    send_low,
    use_original_precision,
    use_original_precision_locally,
    use_widest_precision,
)
from .._rules.user_rules import display_name, is_dtype, is_made_by_calling
from .._structural import STRUCTURAL
from .._suggestions import closest
from .classes import CLASSES
from .dictionary import AMP_DEFAULT, Lookup, show_key

_P = ParamSpec("_P")
_R = TypeVar("_R")

# Names that other libraries give to the arguments.
_ELSEWHERE = {
    "dtype": "compute_dtype",
    "precision": "compute_dtype",
    "compute": "compute_dtype",
    "half_dtype": "compute_dtype",
    "policy": "amp_policy",
    "rules": "amp_policy",
    "param": "param_dtype",
    "params": "param_dtype",
    "output": "output_dtype",
}


_SCALED_BY = "Loss scaling comes with an optimizer: `enable_amp(loss, optimizer)`."
# Arguments that PyTorch's `autocast`, Apex and others have instead.
_OF_AMP = {
    "enabled": "`with disable_amp():` around the code that calls `amp` turns it off.",
    "opt_level": "'O1' is `amp_policy='mixed_float16'`.",
    "cast_model_outputs": "Results are cast by `Policy(output_dtype=...)`.",
    "device_type": "A device is not told: `amp` rewrites for all of them.",
    **dict.fromkeys(
        ("static_argnums", "static_argnames"),
        "Nothing is needed: what is no array is handed to the function as it is. Give "
        "it to the `jax.jit` around `amp`.",
    ),
    **dict.fromkeys(
        ("donate_argnums", "donate_argnames"), "Give it to the `jax.jit` around `amp`."
    ),
    **dict.fromkeys(("loss_scale", "scaler", "optimizer"), _SCALED_BY),
}
# Arguments that converters of other libraries have.
_NO_CALIBRATION = (
    "8 bits need no data: activations are scaled by the numbers of each call, or by "
    "`int8(activation_max=...)`."
)
_OF_CONVERT = dict.fromkeys(
    ("calibration_data", "calibration_dataset", "representative_dataset"),
    _NO_CALIBRATION,
)
_MADE_ELSEWHERE = {"amp": _OF_AMP, "convert": _OF_CONVERT}


def naming_mistakes(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """`function`, with errors that say what to write if its arguments don't fit."""
    name = function.__qualname__.removesuffix(".__init__")

    def hints(
        parameters: Mapping[str, Any], args: Any, kwargs: dict[str, Any]
    ) -> list[str]:
        taken = [p for p in parameters.values() if p.kind == p.POSITIONAL_OR_KEYWORD]
        known = {k: v for k, v in parameters.items() if k != "self"}
        takes_more = any(p.kind == p.VAR_POSITIONAL for p in parameters.values())
        more = () if takes_more else args[len(taken) :]
        places = [_by_place(name, known, x) for x in more]
        names = [_by_name(name, known, given) for given in kwargs]
        return [*dict.fromkeys(filter(None, places + names))]

    return explaining_misfits(name, hints)(function)


def refusing_order_of_jmp(init: Callable[_P, None]) -> Callable[_P, None]:
    """`Policy.__init__`, with an error for dtypes in the order of `jmp.Policy`.

    That is `param_dtype`, `compute_dtype`, `output_dtype`. It shows by a compute dtype
    with more bits than `param_dtype`, which is accepted where the names are written."""

    @functools.wraps(init)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> None:
        dtypes: Any = args[1:3]
        with contextlib.suppress(TypeError):  # `init` says what is no dtype
            if len(dtypes) == 2 and None not in dtypes:
                compute, param = (as_float_dtype(x, "") for x in dtypes)
                _refuse_order_of_jmp(compute, param)
        init(*args, **kwargs)

    return checked


def _refuse_order_of_jmp(compute: DType, param: DType) -> None:
    if bits(compute) > bits(param):
        raise ValueError(
            f"`Policy({compute.name!r}, {param.name!r}, ...)` computes in "
            f"{compute.name} and stores parameters in {param.name}. The order is "
            "`compute_dtype`, `param_dtype`, `output_dtype`; in `jmp.Policy`, "
            "`param_dtype` comes first. Write the names: "
            f"`Policy(compute_dtype={param.name!r}, param_dtype={compute.name!r})`, or "
            "the other way round if you mean that."
        )


def _by_place(caller: str, parameters: Mapping[str, Any], value: Any) -> str:
    """What to write instead of an argument that is given without its name."""
    if "fn" not in parameters:
        return f"Give arguments by their names: {', '.join(parameters)}."
    is_name = isinstance(value, str)
    if is_dtype(value) or (is_name and not is_like_policy_name(value)):
        return f"Write `compute_dtype={_show(value)}`."
    if is_name or isinstance(value, Mapping) or hasattr(value, "compute_dtype"):
        return f"Write `amp_policy={_show(value) if is_name else '...'}`."
    if isinstance(value, bool):
        return f"Write the argument's name: one of {', '.join(parameters)}."
    return f"What the function itself is called with comes after: `{caller}(fn)(x)`."


def _by_name(caller: str, parameters: Mapping[str, Any], name: str) -> str:
    """What to write instead of a keyword argument that does not exist."""
    if name in parameters:
        return ""
    if instead := _MADE_ELSEWHERE.get(caller, {}).get(name):
        return instead
    known = _ELSEWHERE.get(name)
    if close := known if known in parameters else closest(name, parameters):
        return f"Did you mean `{close}`?"
    hint = f"The arguments are {', '.join(parameters)}."
    if "fn" in parameters and caller != "convert":
        hint += f" Those of the function come after: `{caller}(fn)(..., {name}=...)`."
    return hint


def _show(value: Any) -> str:
    return repr(getattr(value, "__name__", None) or str(value))


def is_like_policy_name(value: Any) -> bool:
    """Whether `value` may be meant as the name of a policy, rather than of a dtype."""
    return isinstance(value, str) and ("_" in value or "=" in value)


def instead_of_policy(value: Any) -> str:
    """What to write instead of `value`, which is no policy."""
    if is_dtype(value):
        return f" To compute in a dtype: `Policy({jnp.dtype(value).name!r})`."
    if isinstance(value, Mapping | Rule):
        return " Rules are a part of a policy: `Policy('bfloat16', rules={...})`."
    if fields := _fields_of_policy(value):
        return f" Write it as one of here: `Policy({fields})`."
    return ""


def is_dict_of_rules(value: Any) -> bool:
    """Whether `value` can only be a dict of rules, and not one of policies by scope."""
    if not isinstance(value, Mapping):
        return False
    keys = any(isinstance(key, Primitive) or key == AMP_DEFAULT for key in value)
    return keys or any(isinstance(rule, Rule) for rule in value.values())


def instead_of_primitive(name: str) -> str:
    """What to write instead of a primitive as a key of a `PolicyMap`."""
    is_known = hasattr(jax.lax, f"{name}_p")
    return (
        "A primitive has a rule, which is a part of a policy: `Policy('bfloat16', "
        f"rules=default_amp_policy | {{{f'jax.lax.{name}_p' if is_known else '...'}: "
        "'float32'})`."
    )


def instead_of_expression(key: str) -> str:
    """What to write instead of `key`, which is no valid regular expression."""
    of_glob = re.sub(r"(?<![.)\]}\\])\*+", ".*", key)
    with contextlib.suppress(re.error):
        re.compile(of_glob)
        return f"It is not read as a glob: write the expression {of_glob!r}."
    return f"If it is meant as a plain path, escape it: `re.escape({key!r})`."


def instead_of_amp_policy(value: Any) -> str:
    """What to write instead of `value`, which `amp` can't take as its policy."""
    if isinstance(value, Rule):
        return 'A rule for everything: `{"amp_default": rule}`.'
    if is_dtype(value):
        return f"A dtype: `compute_dtype={jnp.dtype(value).name!r}`."
    if is_made_by_calling(value):
        return f"Call it: `amp_policy={display_name(value)}`."
    if hasattr(policy := getattr(value, "policy", None), "lookup"):
        return f"It holds a {type(policy).__name__}: give its `.policy`."
    if is_map_of_keras(value):
        return (
            f"It is Keras' {type(value).__name__}: give its names to `PolicyMap("
            "'mixed_bfloat16', {'encoder/attention': 'float32'})`."
        )
    if fields := _fields_of_policy(value):
        return f"It is a policy of another library: write `Policy({fields})`."
    if hasattr(value, "compute_dtype") and hasattr(value, "variable_dtype"):
        return f"It is a policy of Keras: give its name, `{value.name!r}`."
    if callable(value):
        return 'A rule of your own for everything: `{"amp_default": rule}`.'
    return 'For example: `default_amp_policy | {"attention": "float32"}`.'


def is_map_of_keras(value: Any) -> bool:
    """Whether `value` is a `DTypePolicyMap`, which is a mapping, but none of rules."""
    return isinstance(value, Mapping) and type(value).__module__.startswith("keras.")


def _fields_of_policy(value: Any) -> str:
    """The arguments of a `Policy` that means what another library's means, or ""."""
    fields = ("compute_dtype", "param_dtype", "output_dtype")  # as of jmp and Haiku
    given = {field: getattr(value, field, None) for field in fields}
    named = {k: str(jnp.dtype(x)) for k, x in given.items() if is_dtype(x)}
    if "compute_dtype" not in named:
        return ""
    return ", ".join(f"{field}={name!r}" for field, name in named.items())


def with_name(value: Any) -> str:
    """The type of a value, and the name that it has."""
    name = getattr(value, "__name__", None)
    kind = type(value)
    # Of a class of another library that is called as one of ours, say whose it is.
    other = f"{kind.__module__.partition('.')[0]}." * (kind.__name__ == "Policy")
    return f"{other}{kind.__name__}" + (f" {name!r}" if isinstance(name, str) else "")


def refuse_what_is_no_function(fn: Any, caller: str) -> None:
    """Raises for what stands in the place of a function, and says where it belongs."""
    if callable(fn) and not is_dtype(fn) and not isinstance(fn, Rule):
        return
    got, argument = type(fn).__name__, ""
    if isinstance(fn, classmethod | property):
        raise TypeError(
            f"`fn` is a {got}, which is no function yet. Write `@{got}` above "
            f"`@{caller}`."
        )
    if isinstance(fn, str):
        got, is_policy = f"str {fn!r}", is_like_policy_name(fn)
        if is_policy or _names_dtype(fn):
            argument = f"{'amp_policy' if is_policy else 'compute_dtype'}={fn!r}"
    elif is_dtype(fn):
        got, argument = f"the dtype {_show(fn)}", f"compute_dtype={_show(fn)}"
    elif isinstance(fn, Rule):
        got = f"the rule {fn!r}"
        argument = 'amp_policy=default_amp_policy | {"encoder": rule}'
    elif _is_like_policy(fn):
        got, argument = "a policy", "amp_policy=..."
    instead = f"`{caller}(fn)(x)`, not `{caller}(fn(x))`"
    if argument:
        instead = f"`{caller}(fn, {argument})`"
        if caller == "amp":
            instead += f", or `@amp({argument})` above its definition"
    raise TypeError(f"`fn` must be callable, but got {got}. Write {instead}.")


def _names_dtype(name: str) -> bool:
    try:
        as_compute_dtype(name, "fn")
    except TypeError:
        return False
    except (AmpError, ValueError):  # float8, and float64 without x64
        pass
    return True


def _is_like_policy(value: Any) -> bool:
    if isinstance(value, Mapping):  # unless it holds parameters
        return not any(map(is_array, jax.tree.leaves([*value.values()])))
    return hasattr(value, "compute_dtype")


# Rules that make nothing low unless an operand is low already.
_PASSIVE = (
    follow_inputs,
    keep_each_input,
    keep_inputs,
    send_low,
    use_original_precision,
    use_original_precision_locally,
    use_widest_precision,
)


def lowers_nothing(policy: Lookup, compute_dtype: DType) -> bool:
    """Whether a policy only names parts that are to stay in full precision."""
    rules = dict(policy.items())
    if not rules or AMP_DEFAULT in rules or bits(compute_dtype) >= 32:
        return False
    return all(
        rule in _PASSIVE or (isinstance(rule, UsePrecision) and not rule.is_compute)
        for rule in rules.values()
    )


def report_of_no_lowering(policy: Lookup) -> str:
    """The message for a policy that lowers nothing."""
    keys = [show_key(key) for key, _ in policy.items()]
    more = ", ..." * (len(keys) > 8)
    return (
        "`amp_policy` lowers nothing: it keeps what its keys match as written, "
        f'{", ".join(keys[:8])}{more}, and has no "amp_default" for all else. To '
        "change single rules of the default policy, write `default_amp_policy | "
        "{...}`; to keep all as written, `full_precision()`."
    )


def refuse_under_primitive(primitive: Primitive, rule: Rule) -> None:
    """Raises for a rule that can't be followed for the primitive that is its key."""
    is_original = isinstance(rule, UseOriginalPrecision)
    if not rule.is_for(primitive.name):
        raise AmpError(
            f"`{rule!r}` is a rule for contractions, and `{primitive}` is none. Its "
            "keys are `jax.lax.dot_general_p`, `jax.lax.conv_general_dilated_p` or the "
            f"name of a scope; {AMP_DEFAULT!r} leaves all else to the default policy."
        )
    if primitive.name in STRUCTURAL and not is_original:
        raise AmpError(
            f"`{primitive}` holds a whole program, so a casting rule can't stand for "
            "it. Put rules on the primitives inside, or on a `jax.named_scope` around "
            "it; only `use_original_precision` leaves all that is inside as written."
        )
    if (
        primitive.name in FIXED
        and not is_original
        and rule != CLASSES.get(primitive.name)
    ):
        raise AmpError(
            f"`{primitive}` only exists in the dtypes that it was traced with: it has "
            "no low-precision kernel, or carries code in these dtypes. Remove the key."
        )


def refuse_bad_key(key: Any, argument: str) -> None:
    """Raises for what can't be a key of a policy dict."""
    is_scope = isinstance(key, str) and key.strip("/") != ""
    is_pattern = isinstance(key, re.Pattern) and isinstance(key.pattern, str)
    if is_scope or is_pattern or isinstance(key, Primitive):
        return
    hint = ""
    if callable(key):
        hint = _FOR_CLASS if isinstance(key, type) else _for_function(key)
    raise TypeError(
        f"A key of `{argument}` must be a primitive (`jax.lax.dot_general_p`), the "
        "name of a `jax.named_scope`, a path of such names joined by '/', a compiled "
        f"regular expression, or {AMP_DEFAULT!r}, but got {show_key(key)}.{hint}"
    )


# The primitives of functions of `jax.numpy` that have another name than these.
_BINDS = {
    **dict.fromkeys("dot matmul vdot tensordot einsum vecdot".split(), "dot_general"),
    **dict.fromkeys("conv convolve".split(), "conv_general_dilated"),
    **dict.fromkeys("sum prod max min".split(), "reduce_{}"),
    **{"power": "pow", "arctan2": "atan2", "multiply": "mul", "subtract": "sub"},
}


_FOR_CLASS = (
    " A class is none: modules of Linen and Haiku have names, such as 'Dense_0', and "
    "`scope_modules(model)` names those of Equinox and NNX by their fields."
)


def _for_function(key: Any) -> str:
    """What to write instead of a function as a key."""
    if primitive := _bound_by(getattr(key, "__name__", "")):
        return f" Use the primitive that it binds: `jax.lax.{primitive}_p`."
    return (
        " Put the calls of the function into a `jax.named_scope`, and use its name; or "
        "see by `jax.make_jaxpr` which primitives it binds."
    )


def _bound_by(function: str) -> str | None:
    """The primitive that a function of `jax.numpy` of this name binds, if it is one."""
    name = _BINDS.get(function, function).format(function)
    is_one = isinstance(getattr(jax_primitives, f"{name}_p", None), Primitive)
    return name if is_one else None


def instead_of_function_name(name: str) -> str | None:
    """What to write instead of a function's name in the place of a primitive's.

    `None` if JAX has no function of this name."""
    found = (getattr(module, name, None) for module in (jnp, jax.nn, jnp.linalg))
    if not any(callable(x) and not isinstance(x, type) for x in found):
        return None
    if primitive := _bound_by(name):
        return (
            f"{name!r} is a function of JAX: write the primitive that it binds, "
            f"`jax.lax.{primitive}_p`."
        )
    return (
        f"{name!r} is a function of JAX, and binds several primitives: put its calls "
        "into a `jax.named_scope`, and give the name of that a rule: "
        '`default_amp_policy | {name: "float32"}`.'
    )


def refuse_unhashable(rules: Iterable[Rule], argument: str) -> None:
    """Raises for rules without a hash, by which programs of a policy are cached."""
    unhashable = [rule for rule in rules if not is_hashable(rule)]
    if unhashable:
        raise TypeError(
            f"Every rule of `{argument}` must be hashable, since the policy is part of "
            f"the key of caches. Unhashable: {unhashable}."
        )


def is_hashable(x: Any) -> bool:
    try:
        hash(x)
    except TypeError:
        return False
    return True
