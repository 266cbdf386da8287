"""Rules, and the keys they stand under, as plain data that JSON can hold.

Primitives, the library's rules and predicates are saved by name. What a user wrote in
Python (a casting callback, a predicate, a primitive of their own) has no name that
another process could look up, so saving it raises an error."""

import enum
import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import numpy as np
from jax import lax

from .. import _rules
from .._errors import AmpError
from .._jax import Primitive
from .._quantised import FORMATS, worth_eight_bits
from .._rules import Callback, Rule, UsePrecision
from .._rules.base import PACKAGE, RULE_CLASSES
from .._rules.conditions import (
    Predicate,
    not_divisible_by,
    param_is,
    smaller_than,
    sums_more_than,
)
from .._rules.user_rules import as_rule
from .._suggestions import did_you_mean
from .dictionary import (
    AMP_DEFAULT,
    ByName,
    Key,
    default_amp_policy,
    policy_by_name,
    show_key,
)
from .frozen import FrozenRules, primitive_by_name, primitive_name
from .over_devices import full_sums_over_devices
from .presets import (
    full_precision,
    jaxamp,
    jmp,
    mxnet,
    pytorch_autocast,
    tensorflow_graph_rewrite,
)
from .quantised import quantised

Data = dict[str, Any]


# Keys.


def encode_key(key: Key) -> Data:
    """A key as data: a primitive's name, a scope, a path or a regular expression."""
    if isinstance(key, Primitive):
        return {"primitive": primitive_name(key)}
    if isinstance(key, tuple):
        return {"path": list(key)}
    if not isinstance(key, re.Pattern):
        return {"scope": key}
    flags = key.flags & ~re.UNICODE  # every pattern of strings has this flag
    return {"regex": key.pattern} | ({"flags": flags} if flags else {})


def decode_key(data: Data) -> Key:
    if "primitive" in data:
        return primitive_by_name(data["primitive"])
    if "regex" in data:
        try:
            return re.compile(data["regex"], data.get("flags", 0))
        except re.error as e:
            raise ValueError(f"{data['regex']!r} is no regular expression: {e}.") from e
    return tuple(data["path"]) if "path" in data else data["scope"]


# Rules of a policy.


def encode_rules(rules: FrozenRules) -> list[Data]:
    """The policy that the rules extend, and a row for each rule that differs."""
    base, own = _base_and_own(rules)
    rows = [] if base is None else [{"extends": base}]
    for key, rule in own.items():
        what = encode_rule(rule, f"rules[{show_key(key)}]")
        rows.append(encode_key(key) | {"rule": what})
    return rows


def decode_rules(rows: list[Data]) -> dict[Key, Rule]:
    rules: dict[Key, Rule] = {}
    for row in rows:
        if "extends" in row:
            base = row["extends"]
            is_name = isinstance(base, str)
            rules |= _bases()[base] if is_name else policy_by_name(dict(_decode(base)))
        else:
            key = decode_key(row)
            try:
                rules[key] = decode_rule(row["rule"])
            except (TypeError, ValueError) as e:
                kind = TypeError if isinstance(e, TypeError) else ValueError
                raise kind(f"`rules[{show_key(key)}]` is no rule: {e}") from e
    return rules


def own_rules(rules: FrozenRules) -> tuple[str | None, dict[Key, Rule]]:
    """The name of the policy that the rules extend, and what they add to it."""
    base, own = _base_and_own(rules)
    return base if isinstance(base, str) else None, own


def _base_and_own(rules: FrozenRules) -> tuple[Any, dict[Key, Rule]]:
    """The policy that the rules extend, by its name or as data, and what they add.

    That policy is made of the table under "amp_default". The rules extend no policy if
    they lack such a table, or one of the keys of its policy."""
    table = rules.get(AMP_DEFAULT)
    if isinstance(table, ByName):
        base = policy_by_name(dict(table.rules))
        if base.keys() <= rules.keys():
            own = {key: rule for key, rule in rules.items() if base.get(key) != rule}
            return _base_name(table), own
    return None, dict(rules)


def _base_name(table: ByName) -> Any:
    for name, policy in _bases().items():
        if policy[AMP_DEFAULT] == table:
            return name
    return _encode(table.rules, "a table of rules")


@functools.cache
def _bases() -> dict[str, Mapping[Key, Rule]]:
    """The library's own policies, which a saved policy names."""
    calls: list[tuple[Callable[..., Any], *tuple[str, ...]]] = [
        (full_precision,),
        (full_sums_over_devices,),
        (jmp,),
        (jaxamp,),
        *((pytorch_autocast, device) for device in ("cuda", "cpu")),
        *((tensorflow_graph_rewrite, dtype) for dtype in ("float16", "bfloat16")),
        *((mxnet, dtype) for dtype in ("float16", "bfloat16")),
    ]
    return {
        "default_amp_policy": default_amp_policy,
        **{
            f"{preset.__name__}({', '.join(map(repr, args))})": preset(*args)
            for preset, *args in calls
        },
        **{f"quantised({mode}())": quantised(make()) for mode, make in FORMATS.items()},
    }


# One rule: a dtype, a name, or the name of its class and what its fields hold.

_NAMED: dict[str, Rule] = {
    name: getattr(_rules, name)
    for name in """
        choose_exactly compute_in_full contract convert_exactly follow_inputs in_solver
        keep_each_input keep_inputs move_exactly send_low sort_exactly sum_over_devices
        take_extremes use_compute_precision use_compute_precision_wide_result
        use_original_precision use_original_precision_locally use_widest_precision
    """.split()
}
RULE_NAMES = {rule: name for name, rule in _NAMED.items()}


def encode_rule(rule: Rule, where: str) -> Any:
    if isinstance(rule, Callback):
        raise AmpError(
            f"The rule {rule.fn!r} of `{where}` can't be saved: it is a function of "
            "yours. Use one of the library's rules, or add it to the policy after "
            "loading."
        )
    if rule in RULE_NAMES:
        return RULE_NAMES[rule]
    if isinstance(rule, UsePrecision) and rule.dtype and not rule.wide_result:
        return rule.dtype.name
    values = {f.name: _encode(getattr(rule, f.name), where) for f in fields(rule)}
    return {"class": type(rule).__name__} | values


def decode_rule(data: Any) -> Rule:
    if isinstance(data, str):
        return _NAMED[data] if data in _NAMED else as_rule(data, "rule")
    values = {name: _decode(value) for name, value in data.items() if name != "class"}
    cls = _class(data["class"])
    known = [field.name for field in fields(cls)]
    for name in values:
        if name not in known:
            raise ValueError(
                f"{cls.__name__} has no field {name!r}.{did_you_mean(name, known)} Its "
                f"fields: {', '.join(known) or 'none'}."
            )
    return cls(**values)


def _class(name: str) -> type[Rule]:
    if name not in RULE_CLASSES:
        raise AmpError(
            f"This version of {PACKAGE} has no rule of the class {name!r}, which the "
            "saved policy holds."
        )
    return RULE_CLASSES[name]


def _encode(value: Any, where: str) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        if not isinstance(value, enum.Enum):
            return value
    if isinstance(value, tuple):
        return [_encode(item, where) for item in value]
    if isinstance(value, Rule):
        return {"rule": encode_rule(value, where)}
    if isinstance(value, np.dtype):
        return {"dtype": value.name}
    if isinstance(value, Predicate):
        return {"predicate": encode_predicate(value, where)}
    if isinstance(value, enum.Enum) and hasattr(lax, type(value).__name__):
        return {"enum": type(value).__name__, "name": value.name}
    raise AmpError(
        f"`{where}` can't be saved: it holds {value!r}, which has no name that could "
        "be looked up when it is loaded."
    )


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(map(_decode, value))
    if not isinstance(value, dict):
        return value
    if "rule" in value:
        return decode_rule(value["rule"])
    if "dtype" in value:
        return np.dtype(value["dtype"])
    if "predicate" in value:
        return decode_predicate(value["predicate"])
    return _member(value["enum"], value["name"])


def _member(kind: str, name: str) -> enum.Enum:
    known = {cls.__name__: cls for cls in (lax.Precision, lax.DotAlgorithmPreset)}
    if kind in known and name in known[kind].__members__:
        return known[kind][name]
    raise ValueError(f"This version of JAX has no `lax.{kind}.{name}`.")


def encode_predicate(predicate: Callable[..., Any], where: str) -> Data:
    if not isinstance(predicate, Predicate):
        raise AmpError(
            f"The predicate {predicate!r} of `{where}` can't be saved: it is a "
            "function of yours. Use a ready one, such as `sums_more_than(4096)`, or "
            "add it to the policy after loading."
        )
    name = predicate.test.__name__.lstrip("_")
    return {"name": name, "args": _encode(predicate.args, where)}


def decode_predicate(data: Data) -> Predicate:
    name, args = data["name"], _decode(data["args"])
    if name not in _PREDICATES:
        raise ValueError(
            f"There is no predicate {name!r}.{did_you_mean(name, _PREDICATES)} Known: "
            f"{', '.join(_PREDICATES)}."
        )
    return _PREDICATES[name](*args)


_PREDICATES: dict[str, Callable[..., Predicate]] = {
    fn.__name__: fn
    for fn in (
        sums_more_than,
        smaller_than,
        not_divisible_by,
        param_is,
        worth_eight_bits,
    )
}
"""The functions that make the predicates which a saved policy may name."""
