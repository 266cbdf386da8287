"""Lists of ops and scopes on top of any policy, as MXNet's converters take them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax import lax

from .._errors import AmpError
from .._jax import Jaxpr, Primitive, raw, scopes, subjaxprs
from .._policies.dictionary import Key, Lookup, is_program, is_stopped, show_key
from .._policies.frozen import FrozenRules, checked_policy
from .._policies.presets.common import Op
from .._policies.presets.user_lists import check_disjoint, conditions_of, names_of
from .._rules import (
    Match,
    Rule,
    use_compute_precision,
    use_original_precision,
    use_widest_precision,
)
from .._rules.conditions import param_is, when
from .._suggestions import did_you_mean


@dataclass(frozen=True)
class ListedPolicy:
    """A checked policy with lists of ops and scopes that come first.

    A scope of the policy wins over a list of ops, as it wins over primitives.

    Args:
        policy: the policy that decides where the lists do not.
        rules: the rule of each op that is in a list, by its name.
        conditional: ops that run as written if a parameter has one of some values, as
            `(op, parameter, values)`.
        excluded: a policy for the scopes that stay as written; `None` if there are
            none."""

    policy: Lookup
    rules: tuple[tuple[str, Rule], ...] = ()
    conditional: tuple[tuple[str, str, tuple[Any, ...]], ...] = ()
    excluded: FrozenRules | None = None

    def find(self, primitive: Primitive, scope: tuple[str, ...]) -> Match:
        found = self.policy.find(primitive, scope)
        if is_stopped(scope):
            return found
        if self.excluded is not None:
            excluded = self.excluded.find_scope(primitive, scope)
            if excluded is not None:
                return excluded
        if found.by_scope or is_program(primitive):
            return found
        rule = dict(self.rules).get(primitive.name)
        if rule is not None:
            found = replace(found, key=primitive, rule=rule)
        for op, parameter, values in self.conditional:
            if op == primitive.name:
                holds = param_is(parameter, *values)
                rule = when(holds, use_original_precision, found.rule)
                found = replace(found, key=primitive, rule=rule)
        return found

    def own_keys(self) -> list[Key]:
        return self.policy.own_keys()

    def items(self) -> list[tuple[Key, Any]]:
        excluded = () if self.excluded is None else self.excluded.items()
        return [*excluded, *self.rules, *self.policy.items()]


def listed_policy(
    policy: Lookup,
    target: Sequence[Op],
    float32: Sequence[Op],
    widest: Sequence[Op],
    conditional: Sequence[tuple[Op, str, Sequence[Any]]],
    excluded: Sequence[Any],
) -> ListedPolicy:
    """Checks the lists that `convert` was given; errors name its arguments.

    No op may be in two lists. In the conditional list, an op may stand several times,
    with different conditions."""
    given = {
        "target_ops": (names_of(target, "target_ops"), use_compute_precision),
        "float32_ops": (
            names_of(float32, "float32_ops", may_be_fixed=True),
            use_original_precision,
        ),
        "widest_ops": (names_of(widest, "widest_ops"), use_widest_precision),
    }
    triples = conditions_of(conditional, "conditional_float32_ops")
    check_disjoint(
        {argument: ops for argument, (ops, _) in given.items()}
        | {"conditional_float32_ops": frozenset(op for op, _, _ in triples)},
        "Remove it from one of them.",
    )
    rules = [(op, rule) for ops, rule in given.values() for op in sorted(ops)]
    return ListedPolicy(policy, tuple(rules), tuple(triples), _excluded(excluded))


def _excluded(scopes: Sequence[Any]) -> FrozenRules | None:
    is_one = isinstance(scopes, str | re.Pattern)
    if is_one or not isinstance(scopes, Sequence | set | frozenset):
        raise TypeError(
            "`excluded_scopes` must be a sequence of names or paths of scopes, or of "
            "compiled regular expressions, such as ['decoder/head'], but got "
            f"{scopes!r}."
        )
    for key in scopes:
        if not isinstance(key, str | re.Pattern):
            raise TypeError(
                "`excluded_scopes` must hold names of scopes, paths of them, or "
                f"compiled regular expressions, but holds {key!r}. To keep an op in "
                "float32 everywhere, put it into `float32_ops`."
            )
    if not scopes:
        return None
    rules = dict.fromkeys(scopes, use_original_precision)
    return checked_policy(rules, "excluded_scopes")


def check_matches(listed: ListedPolicy, jaxpr: Jaxpr) -> None:
    """Checks that each op and each scope of the lists is in the program.

    Raises:
        AmpError: an op or a scope matches nothing; the message names what is there."""
    ops: set[str] = set()
    paths: set[tuple[str, ...]] = set()
    _collect(jaxpr, (), ops, paths)
    named = [op for op, *_ in (*listed.rules, *listed.conditional)]
    for op in sorted({*named} - ops):
        raise AmpError(
            f"The op {op!r} of the lists is not in the function."
            f"{did_you_mean(op, ops)} Its ops are {', '.join(sorted(ops))}."
        )
    excluded = listed.excluded
    if excluded is None:
        return
    matched = {show_key(found.key) for path in paths if (found := _at(excluded, path))}
    known = sorted("/".join(path) for path in paths if path)
    for key, _ in excluded.items():
        # The outermost scope that matches wins, so an inner one is tried alone.
        alone = checked_policy({key: use_original_precision})
        if show_key(key) in matched or any(_at(alone, path) for path in paths):
            continue
        names = {name for path in paths for name in path}
        shown = ", ".join(map(repr, known[:8])) + ", ..." * (len(known) > 8)
        hint = did_you_mean(key, [*names, *known]) if isinstance(key, str) else ""
        raise AmpError(
            f"{show_key(key)} of `excluded_scopes` matches no scope of the function."
            f"{hint} " + (f"Its scopes are {shown}." if known else "It has no scopes.")
        )


def _at(excluded: FrozenRules, path: tuple[str, ...]) -> Match | None:
    """What excludes a scope. Any primitive could be asked for: the keys are scopes."""
    return excluded.find_scope(lax.dot_general_p, path)


def _collect(
    jaxpr: Jaxpr, scope: tuple[str, ...], ops: set[str], paths: set[tuple[str, ...]]
) -> None:
    for eqn in raw(jaxpr).eqns:
        inner = scope + scopes(eqn)
        ops.add(eqn.primitive.name)
        paths.add(inner)
        for sub in subjaxprs(eqn.params):
            _collect(sub, inner, ops, paths)
