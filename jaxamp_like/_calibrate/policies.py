"""Writes choices of precision as a policy."""

import functools
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from .._jax import Primitive
from .._policies.dictionary import AMP_DEFAULT, default_amp_policy
from .._policies.frozen import normal_key
from .._policies.measured import Measured
from .._policies.named import Policy
from .._policies.policy_map import PolicyMap
from .._rules import Rule, use_precision
from .._rules.by_shapes import ByShapes
from .._rules.contracting import Contract
from .._rules.low_bits import LowBits
from .._rules.saving_low import SavingLowBits
from .._rules.storing import compute_in_full
from .candidates import EIGHT_BITS, FULL, Candidate, compute_of
from .marks import Contraction
from .program import MarkedProgram
from .search import Choices


@dataclass(frozen=True)
class Writer:
    """Writes policies, as short as they can be.

    Where the granularity is "equation", patterns of shapes tell the contractions of one
    scope apart, and tell them from contractions that were not measured.

    Args:
        program: the program that the policies are for."""

    program: MarkedProgram

    def policy(self, choices: Choices) -> Policy | PolicyMap:
        """The policy that gives each contraction the precision that was chosen.

        It has the default's rules everywhere. So a scope that stays in full computes
        its contractions in float32, and keeps as little for the backward pass as other
        scopes do. What was not measured stays as written."""
        names = self.program.precisions(choices)
        policy = self._policy(names)
        if isinstance(policy, Policy):
            return self._measured_on(policy, names)
        of: dict[Any, list[Contraction]] = {key: [] for key in (None, *policy)}
        for one in names:
            of[policy.key_of(one.scope)].append(one)
        entries = {key: self._measured_on(policy[key], of[key]) for key in policy}
        return PolicyMap(self._measured_on(policy.default_policy, of[None]), entries)

    def _policy(self, names: Mapping[Contraction, str]) -> Policy | PolicyMap:
        scopes: dict[tuple[str, ...], dict[Contraction, str]] = {}
        for one, name in names.items():
            scopes.setdefault(one.scope, {})[one] = name
        usual = Counter(names.values()).most_common(1)[0][0] if names else FULL
        kinds = {(one.primitive, name) for one, name in names.items()}
        kept = {self._saves(name) for name in names.values()}
        is_by_primitive = len(kinds) == len({primitive for primitive, _ in kinds})
        if is_by_primitive and len(kept) <= 1:
            return self._of_scope(names, usual)
        default = self._of_scope(scopes.pop((), {}), usual)
        wanted = {scope: self._of_scope(some, None) for scope, some in scopes.items()}
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
            # The outermost scope comes first: its policy may hold for those inside it.
            scope = min(wrong, key=len)
            entries[_key(scope)] = wanted[scope]

    def _of_scope(self, names: Mapping[Contraction, str], usual: str | None) -> Policy:
        """The policy of one scope, or of all if each primitive has one precision."""
        count = Counter(names.values())
        if usual is None or (count and usual not in count):
            usual = count.most_common(1)[0][0]
        if (saves := self._saves(usual)) is not None:
            # Such candidates are for whole scopes: all in it has the same.
            policy = Policy(compute_of(usual))
            rule = SavingLowBits(saves.format, saves.block)
            return replace(policy, rules={AMP_DEFAULT: rule})
        computes = [self._by_name[name].compute for name in count if name in EIGHT_BITS]
        if usual == FULL and computes:
            usual = computes[0].name  # 8-bit rules need a low compute dtype beside them
        rules: dict[Any, Rule] = {}
        if usual in EIGHT_BITS:
            rule = EIGHT_BITS[usual]
            known = [n for n in rule.primitives if n in self.primitives]
            rules = {self.primitives[name]: rule for name in known}
        for name in dict.fromkeys(one.primitive for one in names):
            some = {one: n for one, n in names.items() if one.primitive == name}
            if (rule := self._of_primitive(some, usual)) is not None:
                rules[self.primitives[name]] = rule
        compute = self._by_name[usual].compute.name if usual in EIGHT_BITS else usual
        if not rules:
            return Policy(compute)
        return Policy(compute, rules=default_amp_policy | rules)

    def _of_primitive(
        self, names: Mapping[Contraction, str], usual: str
    ) -> Rule | None:
        """The rule of a primitive in one scope; `None` if it computes in `usual`."""
        found = set(names.values())
        if found == {usual}:
            return None
        if len(found) == 1:
            return _rule(*found)
        primitive = self.primitives[next(iter(names)).primitive]
        as_default = default_amp_policy[primitive]
        rows = {
            self.program.patterns.get(one, one.shapes): as_default
            if n == usual and n not in EIGHT_BITS
            else _rule(n)
            for one, n in names.items()
        }
        return ByShapes(tuple(rows.items()), _rule(FULL))

    def _measured_on(
        self, policy: Policy, contractions: Iterable[Contraction]
    ) -> Policy:
        found = Measured.of(
            (one.scope, one.primitive, self.program.patterns.get(one))
            for one in contractions
        )
        return replace(policy, measured=found)

    def _saves(self, name: str) -> LowBits | None:
        """How values are kept with a candidate, if in 8 bits."""
        return None if name == FULL else self._by_name[name].saves

    @property
    def primitives(self) -> Mapping[str, Primitive]:
        return self.program.contractions.primitives

    @functools.cached_property
    def _by_name(self) -> dict[str, Candidate]:
        return {one.name: one for one in self.program.candidates}


def _rule(name: str) -> Rule:
    if name in EIGHT_BITS:
        return EIGHT_BITS[name]
    return Contract(use_precision(name), compute_in_full)


def _key(scope: tuple[str, ...]) -> Any:
    # Joined to a string, names with brackets would be an expression and match others.
    return normal_key(scope)
