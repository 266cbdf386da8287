"""Limits: where a policy holds, and where code stays as its author wrote it."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from .._jax import Primitive
from .._rules import Match, Site, UseOriginalPrecision, use_original_precision
from .._rules.conditions import When
from .._rules.fields import check_fields
from .codec import decode_key, decode_predicate, encode_key, encode_predicate
from .dictionary import Key, Lookup, is_program, is_stopped
from .frozen import FrozenRules
from .mistakes import is_hashable

Kind = Literal["only", "excluding", "where"]


@dataclass(frozen=True)
class Limit:
    """Where a policy holds: by keys, or by a predicate of equations."""

    kind: Kind
    keys: FrozenRules | None = None  # a policy of which only the keys matter
    predicate: Callable[[Site], bool] | None = None

    def __post_init__(self) -> None:
        check_fields(self)

    @classmethod
    def by_keys(cls, kind: Kind, keys: tuple[Any, ...]) -> "Limit":
        if not keys:
            raise ValueError(
                f"`{kind}` needs a key: a primitive, a scope, a path or a compiled "
                "regular expression."
            )
        for key in keys:
            if isinstance(key, list | tuple | set | dict):
                raise TypeError(
                    f"The keys of `{kind}` are given one by one, "
                    f"`policy.{kind}('encoder', jax.lax.exp_p)`, but got {key!r}."
                )
            if callable(key) and not isinstance(key, Primitive | type):
                raise TypeError(
                    f"The keys of `{kind}` are primitives, scopes, paths or compiled "
                    f"regular expressions, but got {key!r}. To ask a predicate, use "
                    "`policy.where(predicate)`."
                )
        rules = FrozenRules(dict.fromkeys(keys, use_original_precision), in_order=True)
        if kind == "only":
            for key in rules:
                if isinstance(key, Primitive) and is_program(key):
                    raise ValueError(
                        f"`{key}` holds a whole program, which is decided op by op: "
                        "name the primitives inside, or a `jax.named_scope` around it."
                    )
        return cls(kind, keys=rules)

    @classmethod
    def by_predicate(cls, predicate: Callable[[Site], bool]) -> "Limit":
        if not callable(predicate):
            raise TypeError(
                "`predicate` must be callable with a `Site` and return a bool, but got "
                f"{predicate!r}. For scopes and primitives, use `only` or `excluding`."
            )
        if not is_hashable(predicate):
            raise TypeError(
                "`predicate` must be hashable, since the policy is part of the key of "
                f"caches, but got {predicate!r}."
            )
        return cls("where", predicate=predicate)

    def to_dict(self) -> dict[str, Any]:
        if self.predicate is not None:
            predicate = encode_predicate(self.predicate, "where")
            return {"kind": self.kind, "predicate": predicate}
        return {"kind": self.kind, "keys": list(map(encode_key, self.keys or ()))}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Limit":
        if data["kind"] == "where":
            return cls.by_predicate(decode_predicate(data["predicate"]))
        return cls.by_keys(data["kind"], tuple(map(decode_key, data["keys"])))

    def __repr__(self) -> str:
        what = [repr(self.predicate)] if self.keys is None else map(repr, self.keys)
        return f"{self.kind}({', '.join(what)})"


_OUTSIDE = Match("outside of the policy's limit", use_original_precision, by_scope=True)


@dataclass(frozen=True, eq=False)
class LimitedPolicy:
    """A policy that only holds within a limit."""

    policy: FrozenRules
    limit: Limit

    def find(self, primitive: Primitive, scope: tuple[str, ...]) -> Match:
        found = self.policy.find(primitive, scope)
        if is_stopped(scope):
            return found
        if self.limit.keys is None:
            return self._with_predicate(found, primitive)
        match = self.limit.keys.match(primitive, scope)
        if self.limit.kind == "excluding":
            return found if match is None else match
        if match is not None:
            return replace(found, also=(*found.also, match.key))
        return found if is_program(primitive) else _OUTSIDE

    def _with_predicate(self, found: Match, primitive: Primitive) -> Match:
        is_original = isinstance(found.rule, UseOriginalPrecision)
        predicate = self.limit.predicate
        if is_original or is_program(primitive) or predicate is None:
            return found
        rule = When(predicate, found.rule, use_original_precision)
        return replace(found, rule=rule)

    def own_keys(self) -> list[Key]:
        return [*self.policy.own_keys(), *(self.limit.keys or ())]

    def items(self) -> list[tuple[Key, Any]]:
        limits = [(key, self.limit.kind) for key in self.limit.keys or ()]
        return [*self.policy.items(), *limits]


@functools.lru_cache(maxsize=128)
def limited(policy: FrozenRules, limit: Limit) -> Lookup:
    """One object for equal settings, since rewritten programs are remembered by it."""
    return LimitedPolicy(policy, limit)
