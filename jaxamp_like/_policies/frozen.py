"""The policy dict as a checked, hashable and picklable value that finds rules."""

import functools
import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from .._errors import AmpError
from .._jax import Primitive, is_copy
from .._rules import Match, Rule, UseOriginalPrecision, use_original_precision
from .._rules.user_rules import as_rule
from .dictionary import (
    AMP_DEFAULT,
    AMP_STOP,
    EXPORTED,
    ByName,
    Key,
    Scope,
    by_class,
    endings,
    is_program,
    is_stopped,
    paths_to,
    show_key,
)
from .mistakes import refuse_bad_key, refuse_under_primitive, refuse_unhashable

_STOPPED = Match(AMP_STOP[0], use_original_precision, by_scope=True)
_UNNAMED = Match(None, use_original_precision)


class FrozenRules(Mapping[Key, Rule]):
    """A policy dict that is checked and can't change, and finds an equation's rule.

    Its keys are in normal form: "/a/b/" is "a/b". Two are equal if they have the same
    items, with keys of one kind in the same order. Order matters for regular
    expressions, of which the first that matches is taken.

    Args:
        rules: a policy dict.
        argument: the name that errors give to it.
        in_order: whether to sort the keys that are no regular expressions.
    Raises:
        TypeError, ValueError: a key or a rule is of the wrong kind.
        AmpError: a rule can't be followed for the primitive that is its key."""

    def __init__(self, rules: Any, argument: str = "rules", in_order: bool = False):
        if not isinstance(rules, Mapping):
            raise TypeError(
                f"`{argument}` must be a dict that maps primitives or scope names to "
                f"rules, but got {type(rules).__name__}. For example: "
                '`default_amp_policy | {"attention": "float32"}`.'
            )
        self._primitives: dict[Primitive, Rule] = {}
        self._paths: dict[Scope, Rule] = {}
        self._patterns: dict[re.Pattern[str], Rule] = {}
        self._default: Rule | None = None
        self._saves = False  # whether any rule says how values are kept
        checked = []
        for key, value in rules.items():
            refuse_bad_key(key, argument)
            key = original_of(key) if isinstance(key, Primitive) else key
            checked.append((key, as_rule(value, f"{argument}[{show_key(key)}]")))
        if in_order:
            checked.sort(key=lambda item: _order(normal_key(item[0])))
        for key, rule in checked:
            self._add(key, rule)
            self._saves |= rule.saves is not None
        paths = {"/".join(parts): rule for parts, rule in self._paths.items()}
        default = {} if self._default is None else {AMP_DEFAULT: self._default}
        self._rules = {**self._primitives, **paths, **self._patterns, **default}
        try:
            self._hash = hash(tuple(self._rules.items()))
        except TypeError:
            refuse_unhashable(self._rules.values(), argument)
            raise

    def _add(self, key: Key, rule: Rule) -> None:
        if isinstance(key, Primitive):
            refuse_under_primitive(key, rule)
            self._primitives[key] = rule
        elif isinstance(key, re.Pattern):
            self._patterns[key] = rule
        elif key == AMP_DEFAULT:
            self._default = rule
        elif key not in AMP_STOP:
            self._paths[tuple(filter(None, key.split("/")))] = rule
        elif not isinstance(rule, UseOriginalPrecision):
            raise AmpError(f"{key!r} always means the author's dtypes; remove the key.")

    def __getitem__(self, key: Key) -> Rule:
        return self._rules[normal_key(key)]

    def __iter__(self) -> Iterator[Key]:
        return iter(self._rules)

    def __len__(self) -> int:
        return len(self._rules)

    def __or__(self, other: Mapping[Any, Any]) -> "FrozenRules":
        return FrozenRules(self._rules | dict(other), in_order=True)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, FrozenRules):
            return NotImplemented
        return tuple(self._rules.items()) == tuple(other._rules.items())

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return repr(self._rules)

    def __reduce__(self) -> Any:
        rows = [(PickledKey(key), rule) for key, rule in self._rules.items()]
        return _unpickle, (rows,)

    # What `amp` asks.

    def find(self, primitive: Primitive, scope: tuple[str, ...]) -> Match:
        """The rule of an equation: by scope (outermost first), primitive, default."""
        if is_stopped(scope):
            return _STOPPED
        found = self._find(primitive, scope)
        if not self._saves:
            return found
        saving = self._match(primitive, scope, saving=True)
        if saving is None and self._default is not None:
            saving = Match(AMP_DEFAULT, self._default)
        if saving is None or saving.rule.saves is None:
            return found
        also = (*found.also, saving.key)
        return replace(found, also=also, saves=saving.rule.saves)

    def _find(self, primitive: Primitive, scope: tuple[str, ...]) -> Match:
        match = self.match(primitive, scope)
        if match is None:
            if self._default is None:
                return _UNNAMED
            is_for = self._default.is_for(primitive.name)
            is_for &= self._default.saves is None
            match = Match(AMP_DEFAULT, self._default if is_for else by_class)
        is_table = isinstance(match.rule, ByName) or match.key == AMP_DEFAULT
        if is_table and is_program(primitive):
            return _UNNAMED
        if isinstance(match.rule, ByName):
            # A table has a rule for every primitive. That it was found by scope does
            # not mean that it overrides what the author asked for here.
            return Match(match.key, match.rule.rule_of(primitive.name))
        return match

    def match(self, primitive: Primitive, scope: tuple[str, ...]) -> Match | None:
        """The rule for the scope or, if there is none, for the primitive.

        Those that only say how values are kept are left out."""
        return self._match(primitive, scope, saving=False)

    def _match(
        self, primitive: Primitive, scope: tuple[str, ...], saving: bool
    ) -> Match | None:
        found = self.find_scope(primitive, scope, saving)
        rule = self._primitives.get(primitive)
        if found is None and rule is not None:
            if (rule.saves is not None) == saving:
                found = Match(primitive, rule)
        return found

    def find_scope(
        self, primitive: Primitive, scope: tuple[str, ...], saving: bool = False
    ) -> Match | None:
        """The rule for the scope, among the rules that are for such a primitive.

        With `saving` it is one that only says how values are kept, else none such."""

        def is_for(rule: Rule) -> bool:
            says_how_kept = rule.saves is not None
            return says_how_kept == saving and rule.is_for(primitive.name)

        for depth in range(1, len(scope) + 1):
            paths = paths_to(scope[:depth])
            for part in itertools.chain.from_iterable(map(endings, paths)):
                rule = self._paths.get(part)  # the longest part comes first
                if rule is not None and is_for(rule):
                    return Match("/".join(part), rule, by_scope=True)
            for pattern, rule in self._patterns.items():
                if is_for(rule) and any(
                    pattern.fullmatch("/".join(path)) for path in paths
                ):
                    return Match(pattern, rule, by_scope=True)
        return None

    def own_keys(self) -> list[Key]:
        """The keys that the user added to the policy that was extended.

        A primitive counts if its rule differs from the one that it has in the table
        of that policy."""
        base = self._default if isinstance(self._default, ByName) else by_class
        own = [
            p for p, rule in self._primitives.items() if rule != base.rule_of(p.name)
        ]
        return [*own, *map("/".join, self._paths), *self._patterns]


def checked_policy(policy: Any, argument: str = "amp_policy") -> FrozenRules:
    """Checks a policy dict: every key and every rule, before anything is traced.

    Equal policies give one object, since rewritten programs are remembered by it."""
    is_checked = isinstance(policy, FrozenRules)
    return _once(policy if is_checked else FrozenRules(policy, argument))


@functools.lru_cache(maxsize=128)
def _once(policy: FrozenRules) -> FrozenRules:
    return policy


def _unpickle(rows: list[tuple["PickledKey", Rule]]) -> FrozenRules:
    return FrozenRules({key.key: rule for key, rule in rows})


class PickledKey:
    """A key that pickles a primitive by name, since a copy would be another one."""

    def __init__(self, key: Key):
        self.key = key

    def __reduce__(self) -> Any:
        if isinstance(self.key, Primitive):
            return _pickled_primitive, (primitive_name(self.key),)
        return PickledKey, (self.key,)


def _pickled_primitive(name: str) -> PickledKey:
    return PickledKey(primitive_by_name(name))


def normal_key(key: Key) -> Key:
    if isinstance(key, str):
        return "/".join(filter(None, key.split("/")))
    if not is_path(key) or EXPRESSION.search("".join(key)):
        return key
    return "/".join(key)


def is_path(key: Any) -> bool:
    """Whether a key is a path as a tuple, whose names stand for themselves."""
    is_tuple = isinstance(key, tuple) and bool(key)
    return is_tuple and all(isinstance(x, str) and x and "/" not in x for x in key)


EXPRESSION = re.compile(r"[*+?^$|()\[\]{}\\]")
"""Finds a character by which a string may be meant as a regular expression."""


def _order(key: Key) -> tuple[int, str]:
    if isinstance(key, re.Pattern):
        return 2, ""  # sorting is stable: they keep their order
    if isinstance(key, str):
        return (3, "") if key == AMP_DEFAULT else (1, key)
    return 0, key.name


def original_of(primitive: Primitive) -> Primitive:
    """JAX's own primitive, of a copy as `deepcopy` and `cloudpickle` make one."""
    known = EXPORTED.get(primitive.name, primitive)
    return known if is_copy(primitive, known) else primitive


def primitive_name(primitive: Primitive) -> str:
    """The name by which `primitive_by_name` finds it, in other JAX versions too."""
    if EXPORTED.get(primitive.name) is primitive:
        return primitive.name
    raise AmpError(
        f"The primitive `{primitive}` can't be saved: JAX does not export it, so it "
        "can't be found by its name again. Put its rule under a `jax.named_scope` "
        "around it instead."
    )


def primitive_by_name(name: str) -> Primitive:
    """The primitive of this name among those that JAX exports."""
    known = name if name in EXPORTED else _RENAMED.get(name, name)
    if known not in EXPORTED:
        raise AmpError(
            f"This version of JAX exports no primitive called {name!r}. Remove its "
            "rule from the saved policy, or load it with the JAX that it was saved by."
        )
    return EXPORTED[known]


_RENAMED = {"pjit": "jit", "jit": "pjit", "remat2": "checkpoint"}  # between versions
