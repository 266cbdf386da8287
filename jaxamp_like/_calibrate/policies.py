"""Choices of precision as a policy."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from .._dtypes import DType
from .._jax import Jaxpr, Primitive, raw, subjaxprs
from .._policies.dictionary import default_amp_policy
from .._policies.frozen import normal_key
from .._policies.named import Policy
from .._policies.policy_map import PolicyMap
from .._primitives import CONTRACTIONS
from .._rules import Rule, use_precision
from .._rules.by_shapes import ByShapes
from .._rules.contracting import Contract
from .._rules.storing import compute_in_full
from .groups import Group
from .marks import Contraction
from .search import Choices

FULL = "float32"


def dtypes_of(
    groups: Sequence[Group], choices: Choices, candidates: Sequence[DType]
) -> dict[Contraction, str]:
    """The name of the dtype of every contraction."""
    names = [FULL, *(dtype.name for dtype in candidates)]
    return {
        one: names[choice]
        for group, choice in zip(groups, choices, strict=True)
        for one in group.contractions
    }


def policy_of(
    dtypes: Mapping[Contraction, str],
    primitives: Mapping[str, Primitive],
    patterns: Mapping[Contraction, str],
) -> Policy | PolicyMap:
    """The policy that gives each contraction its dtype, as short as it can be.

    `patterns` are what the shapes of contractions are of, by which those of one scope
    are told apart.

    The default's rules everywhere: a scope that stays in full computes its
    contractions in float32, and keeps as little for the backward pass as elsewhere."""
    scopes: dict[tuple[str, ...], dict[Contraction, str]] = {}
    for one, dtype in dtypes.items():
        scopes.setdefault(one.scope, {})[one] = dtype
    usual = Counter(dtypes.values()).most_common(1)[0][0] if dtypes else FULL
    by_primitive = _by_primitive(dtypes, primitives, usual)
    if by_primitive is not None:
        return by_primitive
    of_shapes = {one: patterns.get(one, one.shapes) for one in dtypes}
    default = _policy(scopes.pop((), {}), primitives, of_shapes, usual)
    wanted = {
        scope: _policy(some, primitives, of_shapes, None)
        for scope, some in scopes.items()
    }
    entries: dict[Any, Policy] = {}
    while True:
        policies = PolicyMap(default, entries)
        wrong = [
            scope
            for scope, policy in wanted.items()
            if policies[scope] != policy and _key(scope) not in entries
        ]
        if not wrong:
            return policies if entries else default
        # The outermost first: it may hold for those that are inside.
        scope = min(wrong, key=len)
        entries[_key(scope)] = wanted[scope]


def _by_primitive(
    dtypes: Mapping[Contraction, str], primitives: Mapping[str, Primitive], usual: str
) -> Policy | None:
    """One policy for all scopes, if each primitive has one dtype everywhere."""
    found: dict[str, set[str]] = {}
    for one, dtype in dtypes.items():
        found.setdefault(one.primitive, set()).add(dtype)
    if any(len(some) > 1 for some in found.values()):
        return None
    rules = {
        primitives[name]: _rule(dtype)
        for name, (dtype,) in found.items()
        if dtype != usual
    }
    return Policy(usual, rules=default_amp_policy | rules) if rules else Policy(usual)


def _rule(dtype: str) -> Rule:
    return Contract(use_precision(dtype), compute_in_full)


def _key(scope: tuple[str, ...]) -> Any:
    # As a string a name with brackets is an expression too, which may match others.
    return normal_key(scope)


def _policy(
    dtypes: Mapping[Contraction, str],
    primitives: Mapping[str, Primitive],
    patterns: Mapping[Contraction, str],
    usual: str | None,
) -> Policy:
    """The policy of one scope."""
    count = Counter(dtypes.values())
    if usual is None or (count and usual not in count):
        usual = count.most_common(1)[0][0]
    if set(count) <= {usual}:
        return Policy(usual)
    rules = {}
    for name in dict.fromkeys(one.primitive for one in dtypes):
        some = {one: d for one, d in dtypes.items() if one.primitive == name}
        found = set(some.values())
        if len(found) == 1 and found != {usual}:
            rules[primitives[name]] = _rule(*found)
        elif len(found) > 1:
            as_usual = default_amp_policy[primitives[name]]
            rows = {
                patterns[one]: as_usual if d == usual else _rule(d)
                for one, d in some.items()
            }
            rules[primitives[name]] = ByShapes(tuple(rows.items()), _rule(FULL))
    return Policy(usual, rules=default_amp_policy | rules)


def primitives_in(jaxpr: Jaxpr) -> dict[str, Primitive]:
    """The contractions' primitives of a program, by name."""
    found: dict[str, Primitive] = {}
    for eqn in raw(jaxpr).eqns:
        if eqn.primitive.name in CONTRACTIONS:
            found[eqn.primitive.name] = eqn.primitive
        for sub in subjaxprs(eqn.params):
            found |= primitives_in(sub)
    return found
