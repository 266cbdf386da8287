"""`PolicyMap`: different policies for different scopes."""

import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, NoReturn

import jax
import numpy as np

from .._dtypes import DType
from .._errors import AmpError, showing_call
from .._jax import Primitive
from .._rules import Match
from .._rules.user_rules import short
from .codec import decode_key, encode_key
from .dictionary import Key, Lookup, Scope, endings, is_stopped, paths_to, show_key
from .frozen import EXPRESSION, is_path, normal_key
from .mistakes import instead_of_expression, instead_of_primitive, is_dict_of_rules
from .named import Policy
from .names import get_policy


@jax.tree_util.register_static
class PolicyMap(Mapping[Any, Policy]):
    """Policies by scope, and one for all else: a dict that can't change.

    An entry holds for the scope that it names and for all that is inside. A key is a
    path of scopes or a regular expression. A path ("encoder/attention", or one name)
    matches wherever it stands in the name stack; if it is a tuple, as in
    `("layer[0]", "mlp")`, its names are never read as a regular expression. A regular
    expression, compiled or as a string, matches a whole path from the outermost scope
    on. Of the paths that match, the one that ends innermost is taken, and of several
    that end there the longest. Regular expressions count only if no path matches, and
    only one of them may match.

    `policies[path]` is the policy of a path, or the default if no entry matches; `amp`
    looks up the policy of every equation so. The output and param dtypes of an entry
    have no effect: values are cast where they are read, so that a scope has no output
    dtype, and parameters are cast by `cast_to_param`.

    Args:
        default_policy: a `Policy` or the name of one, for what no entry matches.
        policy_map: maps paths or regular expressions to policies or their names.
    Raises:
        TypeError, ValueError: a key or a policy is of the wrong kind, or unknown.

    >>> policies = PolicyMap(
    ...     "mixed_bfloat16", {"attention": "float32", r"head_\\d+": "mixed_float16"}
    ... )
    >>> policies["encoder/attention/query"].compute_dtype.name
    'float32'
    >>> policies["head_3"].compute_dtype.name, policies["mlp"].compute_dtype.name
    ('float16', 'bfloat16')

    It is modelled on Keras' `DTypePolicyMap`."""

    @showing_call("PolicyMap('mixed_bfloat16', {path: policy})")
    def __init__(
        self,
        default_policy: Policy | str,
        policy_map: Mapping[Any, Policy | str] | None = None,
    ):
        if isinstance(default_policy, PolicyMap):
            raise TypeError(
                "`default_policy` must be a `Policy` or the name of one, but got a "
                "`PolicyMap`. Give its `default_policy`, or extend it: `policies | "
                "{path: policy}`."
            )
        if is_dict_of_rules(default_policy):
            raise TypeError(
                "`default_policy` must be a `Policy` or the name of one, but got a "
                "dict of rules. Put it into a policy: "
                "`PolicyMap(Policy('bfloat16', rules=...), {path: policy})`."
            )
        if isinstance(default_policy, Mapping):
            raise TypeError(
                "`default_policy` comes first, for what no entry matches: "
                "`PolicyMap('mixed_bfloat16', {path: policy})`. But got "
                f"{short(default_policy)}."
            )
        self.default_policy: Policy = get_policy(default_policy)
        if not isinstance(policy_map, Mapping | None):
            raise TypeError(
                "`policy_map` must be a dict of paths or regular expressions to "
                f"policies, but got {type(policy_map).__name__}."
            )
        self._policies: dict[Key, Policy] = {}
        self._paths: dict[Scope, Key] = {}
        self._patterns: dict[Key, re.Pattern[str]] = {}
        for given, value in (policy_map or {}).items():
            self._add(given, value)

    def _add(self, given: Any, value: Any) -> None:
        is_pattern = isinstance(given, re.Pattern) and isinstance(given.pattern, str)
        key = normal_key(given)
        is_name = isinstance(key, str) and key
        if not (is_pattern or is_name or is_path(key)):
            is_primitive = isinstance(given, Primitive)
            hint = f" {instead_of_primitive(given.name)}" if is_primitive else ""
            raise TypeError(
                "A key of `policy_map` must be a path of scopes, as a string or as a "
                "tuple of names, or a regular expression, but got "
                f"{show_key(given)}.{hint}"
            )
        parts = tuple(key.split("/")) if isinstance(key, str) else key
        if key in self._policies or parts in self._paths:
            raise ValueError(f"The path {key!r} is given twice in `policy_map`.")
        try:
            self._policies[key] = get_policy(value)
        except (TypeError, ValueError, AmpError) as e:
            raise type(e)(f"In `policy_map[{given!r}]`: {e}") from e
        if isinstance(key, re.Pattern):
            self._patterns[key] = key
        else:
            self._paths[parts] = key
        if isinstance(key, str) and EXPRESSION.search(key):
            try:
                self._patterns[key] = re.compile(key)
            except re.error as e:
                raise ValueError(
                    f"The key {key!r} of `policy_map` is no valid regular "
                    f"expression: {e}. {instead_of_expression(key)}"
                ) from e

    def __getitem__(self, key: Any) -> Policy:
        if isinstance(key, re.Pattern):
            return self._policies[key]
        if isinstance(key, tuple):
            return self._at(self.key_of(key))
        if not isinstance(key, str):
            raise TypeError(f"A path of scopes must be a string, but got {key!r}.")
        return self._at(self.key_of(tuple(filter(None, key.split("/")))))

    def _at(self, key: Key | None) -> Policy:
        return self.default_policy if key is None else self._policies[key]

    def key_of(self, scope: Scope) -> Key | None:
        """The key of the entry that holds in `scope`; `None` for the default.

        Args:
            scope: the components of a path, outermost first.
        Returns:
            A key of this map.
        Raises:
            AmpError: two regular expressions match.
        """
        paths = [
            path for end in range(1, len(scope) + 1) for path in paths_to(scope[:end])
        ]
        for path in reversed(paths):
            for part in endings(path):
                if part in self._paths:
                    return self._paths[part]
        names = ["/".join(path) for path in paths]
        found = [k for k, p in self._patterns.items() if any(map(p.fullmatch, names))]
        if len(found) > 1:
            raise AmpError(
                f"Two regular expressions of a `PolicyMap` match the scope "
                f"{'/'.join(scope)!r}: {found[0]!r} and {found[1]!r}. Make them "
                "exclude each other, or name the scope by its path, which goes first."
            )
        return found[0] if found else None

    def __contains__(self, key: object) -> bool:
        return normal_key(key) in self._policies

    def __iter__(self) -> Iterator[Any]:
        return iter(self._policies)

    def __len__(self) -> int:
        return len(self._policies)

    def __setitem__(self, key: Any, policy: Any) -> NoReturn:
        raise TypeError(
            "A `PolicyMap` does not change. Write `policies | {key: policy}`, which "
            "makes another one."
        )

    def __or__(self, other: Mapping[Any, Policy | str]) -> "PolicyMap":
        """This map with the entries of `other`, which replace those of equal keys."""
        if is_dict_of_rules(other):
            self.__ror__(other)
        entries = {normal_key(key): policy for key, policy in other.items()}
        return PolicyMap(self.default_policy, self._policies | entries)

    def __ror__(self, other: Any) -> NoReturn:
        raise TypeError(
            "A `PolicyMap` is no dict of rules, and can't be joined with one. Write "
            "`policies | {path: policy}` to add entries. Rules are a part of a policy: "
            "`PolicyMap(Policy('bfloat16', rules=default_amp_policy | {...}), {path: "
            "policy})`."
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PolicyMap):
            return NotImplemented
        same = self.default_policy == other.default_policy
        return same and self._policies == other._policies

    def __hash__(self) -> int:
        return hash((self.default_policy, frozenset(self._policies.items())))

    def __repr__(self) -> str:
        return f"PolicyMap({self.default_policy!r}, {self._policies!r})"

    def to_dict(self) -> dict[str, Any]:
        """The map as plain data that `json.dumps` takes; see `Policy.to_dict`.

        >>> PolicyMap("float32", {"mlp": "bfloat16"}).to_dict()["policies"][0]["scope"]
        'mlp'
        """
        rows = [
            encode_key(key) | {"policy": policy.to_dict()}
            for key, policy in self._policies.items()
        ]
        return {"default_policy": self.default_policy.to_dict(), "policies": rows}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "PolicyMap":
        """The map of which `data` is the `to_dict`; see `Policy.from_dict`."""
        if not isinstance(data, Mapping) or set(data) != {"default_policy", "policies"}:
            is_policy = isinstance(data, Mapping) and "compute_dtype" in data
            hint = " It is that of one policy: read it by `Policy.from_dict(data)`."
            raise ValueError(
                "The data of a map is a dict with the keys default_policy and "
                f"policies, but got {data!r}.{hint * is_policy}"
            )
        try:
            entries = {
                decode_key(row): Policy.from_dict(row["policy"])
                for row in data["policies"]
            }
        except KeyError as e:
            raise ValueError(
                f"The data of a map is malformed: {e!r} in {data['policies']!r}. Use "
                "what `to_dict` gave."
            ) from e
        return cls(Policy.from_dict(data["default_policy"]), entries)

    def lookup(self) -> Lookup:
        """The checked map, which finds rules; one object for equal maps."""
        return _mapped(self)


@dataclass(frozen=True, eq=False)
class MappedPolicy:
    """Checked policies by scope."""

    policies: PolicyMap
    lookups: dict[Key | None, Lookup]
    compute_dtypes: dict[Key | None, DType | None]
    _keys: dict[Scope, Key | None] = field(default_factory=dict)

    def find(self, primitive: Primitive, scope: Scope) -> Match:
        key = self._key_of(scope)
        match = self.lookups[key].find(primitive, scope)
        if key is None or is_stopped(scope):
            return match
        dtype = self.compute_dtypes[key]
        return replace(match, compute_dtype=dtype, also=(*match.also, key))

    def _key_of(self, scope: Scope) -> Key | None:
        if scope not in self._keys:
            self._keys[scope] = self.policies.key_of(scope)
        return self._keys[scope]

    def own_keys(self) -> list[Key]:
        inner = (lookup.own_keys() for lookup in self.lookups.values())
        return list(dict.fromkeys([*self.policies, *chain.from_iterable(inner)]))

    def items(self) -> list[tuple[Key, Any]]:
        inner = (lookup.items() for lookup in self.lookups.values())
        return [*chain.from_iterable(inner), *self.policies.items()]


@functools.lru_cache(maxsize=128)
def _mapped(policies: PolicyMap) -> Lookup:
    lookups: dict[Key | None, Lookup] = {None: policies.default_policy.lookup()}
    dtypes: dict[Key | None, DType | None] = {}
    main = dtype_of(policies.default_policy)
    for key, policy in policies.items():
        lookups[key] = policy.lookup()
        dtype = dtype_of(policy)
        dtypes[key] = None if dtype == main else dtype
    return MappedPolicy(policies, lookups, dtypes)


def dtype_of(policy: Policy) -> DType:
    """The compute dtype; float32, which lowers nothing, if the policy names none."""
    return policy.compute_dtype or np.dtype(np.float32)
