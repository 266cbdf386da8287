"""Which rule an equation gets: the policy dict, checked and looked up."""

import functools
import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

import jax.extend.core.primitives as jax_primitives

from .._errors import AmpError
from .._jax import Primitive
from .._primitives import FIXED
from .._rules import (
    Decision,
    Demand,
    Match,
    Rule,
    Site,
    UseOriginalPrecision,
    use_original_precision,
)
from .._rules.given import as_rule
from .._structural import STRUCTURAL
from .classes import CLASSES

AMP_DEFAULT = "amp_default"
AMP_STOP = ("amp_stop", "amp_step")
REWRITTEN = "amp_rewritten"
"""The scope around what `amp` has made: an outer `amp` leaves it as it is."""

_STOPS = frozenset({*AMP_STOP, REWRITTEN})

Scope = tuple[str, ...]
Key = Any  # a primitive, a scope, a path of scopes or a compiled regular expression


@dataclass(frozen=True)
class ByName(Rule):
    """Looks the primitive up by its name; unknown ones keep the author's dtypes."""

    rules: tuple[tuple[str, Rule], ...] = field(repr=False)

    @functools.cached_property
    def _table(self) -> dict[str, Rule]:
        return dict(self.rules)

    def rule_of(self, name: str) -> Rule:
        return self._table.get(name, use_original_precision)

    def demand(self, params: dict[str, Any], wanted: Demand) -> Demand:
        return wanted

    def decide(self, site: Site) -> Decision:
        return self.rule_of(site.primitive.name).decide(site)


def policy_by_name(table: Mapping[str, Rule]) -> dict[Any, Any]:
    """The policy dict of a table of rules by the names of primitives.

    Its keys are the primitives that JAX exports. Those that it does not export, and
    later ones, are looked up by name: under the key "amp_default"."""
    exported = [p for p in vars(jax_primitives).values() if isinstance(p, Primitive)]
    rules = {p: table[p.name] for p in exported if p.name in table}
    return {**rules, AMP_DEFAULT: ByName(tuple(table.items()))}


by_class = ByName(tuple(CLASSES.items()))


class _Given(dict[Any, Any]):
    """A dict that can't be changed by accident, for everyone in the process."""

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError(
            "`default_amp_policy` is the same for all of the process, and is not "
            "changed in place. Make another: `default_amp_policy | {key: rule}`."
        )

    __setitem__: Any = _refuse
    __delitem__: Any = _refuse
    __ior__: Any = _refuse
    update: Any = _refuse
    setdefault: Any = _refuse
    pop: Any = _refuse
    popitem: Any = _refuse
    clear: Any = _refuse

    def __reduce__(self) -> Any:  # a copy is a dict like any other
        return dict, (dict(self),)


default_amp_policy: dict[Any, Any] = _Given(policy_by_name(CLASSES))
"""The policy that `amp` uses if none is given: a plain dict, to be extended by `|`.

Contractions read the compute dtype and give results in it; all else is computed as
written, from these results, and data moves in the precision that it has. See
`docs/default_policy.md`."""


class Lookup(Protocol):
    """What finds the rule of an equation: a policy, checked."""

    def find(self, primitive: Primitive, scope: tuple[str, ...]) -> Match:
        """The rule of an equation of `primitive` in `scope`."""
        ...

    def own_keys(self) -> list[Key]:
        """The keys that the user gave: each should match some equation."""
        ...

    def items(self) -> list[tuple[Key, Any]]:
        """All keys, with the rule, limit or policy that stands under each."""
        ...


def is_stopped(scope: tuple[str, ...]) -> bool:
    """Whether `amp_stop` or an inner `amp` stands in the name stack."""
    return not _STOPS.isdisjoint(scope)


def is_program(primitive: Primitive) -> bool:
    """Whether what is inside of `primitive` is decided, equation by equation."""
    return primitive.name in STRUCTURAL and primitive.name not in CLASSES


_LAYER_CLASS = "eqx.nn."  # Equinox's layers put the name of their class in the stack


def paths_to(scope: Scope) -> list[Scope]:
    """The path of a scope: as it stands, and as a user may write it.

    The class names that Equinox's layers add stand between the names of modules, so the
    path without them is a path too: "attn/query_proj"."""
    if not scope or scope[-1].startswith(_LAYER_CLASS):
        return [scope]
    short: Scope = tuple(x for x in scope if not x.startswith(_LAYER_CLASS))
    return [scope] if short == scope else [scope, short]


def endings(path: Scope) -> Iterator[Scope]:
    """What a key may be that matches at the end of `path`, the longest first."""
    return (path[start:] for start in range(len(path)))


_STOPPED = Match(AMP_STOP[0], use_original_precision, by_scope=True)
_UNNAMED = Match(None, use_original_precision)


@dataclass(frozen=True, eq=False)
class CheckedPolicy:
    """A policy dict after its checks, as a hashable value (by identity)."""

    primitives: dict[Primitive, Rule] = field(default_factory=dict)
    paths: dict[tuple[str, ...], Rule] = field(default_factory=dict)
    patterns: dict[re.Pattern[str], Rule] = field(default_factory=dict)
    default: Rule | None = None

    def find(self, primitive: Primitive, scope: tuple[str, ...]) -> Match:
        """The rule of an equation: by scope (outermost first), primitive, default."""
        if is_stopped(scope):
            return _STOPPED
        found = self.match(primitive, scope)
        if found is None:
            if self.default is None:
                return _UNNAMED
            is_for = self.default.is_for(primitive.name)
            found = Match(AMP_DEFAULT, self.default if is_for else by_class)
        is_table = isinstance(found.rule, ByName) or found.key == AMP_DEFAULT
        if is_table and is_program(primitive):
            return _UNNAMED
        if isinstance(found.rule, ByName):
            # A rule for each primitive: no word on what the author asked for here.
            return Match(found.key, found.rule.rule_of(primitive.name))
        return found

    def match(self, primitive: Primitive, scope: tuple[str, ...]) -> Match | None:
        """What is said of the scope or, if nothing is, of the primitive."""
        found = self.find_scope(primitive, scope)
        if found is None and primitive in self.primitives:
            found = Match(primitive, self.primitives[primitive])
        return found

    def find_scope(self, primitive: Primitive, scope: tuple[str, ...]) -> Match | None:
        """What is said of the scope, by rules that are for such a primitive."""
        for depth in range(1, len(scope) + 1):
            paths = paths_to(scope[:depth])
            for part in itertools.chain.from_iterable(map(endings, paths)):
                rule = self.paths.get(part)  # of those that end here, the longest
                if rule is not None and rule.is_for(primitive.name):
                    return Match("/".join(part), rule, by_scope=True)
            for pattern, rule in self.patterns.items():
                if rule.is_for(primitive.name) and any(
                    pattern.fullmatch("/".join(path)) for path in paths
                ):
                    return Match(pattern, rule, by_scope=True)
        return None

    def items(self) -> list[tuple[Key, Rule]]:
        """The policy's keys and rules, as they were given."""
        paths = {"/".join(parts): rule for parts, rule in self.paths.items()}
        default = {} if self.default is None else {AMP_DEFAULT: self.default}
        tables = (self.primitives, paths, self.patterns, default)
        return [item for table in tables for item in table.items()]

    def own_keys(self) -> list[Key]:
        """The keys that the user added: not those of the policy that was extended.

        What that one says of a primitive, it says by name too."""
        base = self.default if isinstance(self.default, ByName) else by_class
        own = [p for p, rule in self.primitives.items() if rule != base.rule_of(p.name)]
        return [*own, *map("/".join, self.paths), *self.patterns]


def checked_policy(policy: Any, argument: str = "amp_policy") -> CheckedPolicy:
    """Checks a policy dict: every key and every rule, before anything is traced.

    Equal policies give one object, since rewritten programs are remembered by it."""
    if not isinstance(policy, Mapping):
        raise TypeError(
            f"`{argument}` must be a dict that maps primitives or scope names to "
            f"rules, but got {type(policy).__name__}. For example: "
            '`default_amp_policy | {"attention": "float32"}`.'
        )
    items = tuple(
        (_checked_key(key, argument), as_rule(value, f"{argument}[{show_key(key)}]"))
        for key, value in policy.items()
    )
    try:
        return _checked(items)
    except TypeError as e:
        if "unhashable" not in str(e):
            raise
    raise TypeError(
        f"Every rule of `{argument}` must be hashable, since the policy is part of the "
        f"key of caches. Unhashable: {[r for _, r in items if not _is_hashable(r)]}."
    )


def _is_hashable(rule: Rule) -> bool:
    try:
        hash(rule)
    except TypeError:
        return False
    return True


@functools.lru_cache(maxsize=128)
def _checked(items: tuple[tuple[Key, Rule], ...]) -> CheckedPolicy:
    checked = CheckedPolicy()
    for key, rule in items:
        if isinstance(key, Primitive):
            _check_primitive_rule(key, rule)
            checked.primitives[key] = rule
        elif isinstance(key, re.Pattern):
            checked.patterns[key] = rule
        elif key == AMP_DEFAULT:
            object.__setattr__(checked, "default", rule)
        elif key in AMP_STOP:
            if not isinstance(rule, UseOriginalPrecision):
                raise AmpError(
                    f"{key!r} always means the author's dtypes; remove the key."
                )
        else:
            path = tuple(filter(None, key.split("/")))
            checked.paths[path] = rule
    return checked


def _checked_key(key: Key, argument: str) -> Key:
    is_scope = isinstance(key, str) and key.strip("/") != ""
    is_pattern = isinstance(key, re.Pattern) and isinstance(key.pattern, str)
    if is_scope or is_pattern or isinstance(key, Primitive):
        return key
    raise _bad_key(key, argument)


def _check_primitive_rule(primitive: Primitive, rule: Rule) -> None:
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


def _bad_key(key: Key, argument: str) -> TypeError:
    hint = _for_function(key) if callable(key) and not isinstance(key, type) else ""
    return TypeError(
        f"A key of `{argument}` must be a primitive (`jax.lax.dot_general_p`), the "
        "name of a `jax.named_scope`, a path of such names joined by '/', a compiled "
        f"regular expression, or {AMP_DEFAULT!r}, but got {show_key(key)}.{hint}"
    )


# What functions of `jax.numpy` bind that are not called as their primitives are.
_BINDS = {
    **dict.fromkeys("dot matmul vdot tensordot einsum vecdot".split(), "dot_general"),
    **dict.fromkeys("conv convolve".split(), "conv_general_dilated"),
    **dict.fromkeys("sum prod max min".split(), "reduce_{}"),
    **{"power": "pow", "arctan2": "atan2", "multiply": "mul", "subtract": "sub"},
}


def _for_function(key: Any) -> str:
    """What to write instead of a function as a key."""
    name = getattr(key, "__name__", "")
    primitive = _BINDS.get(name, name).format(name)
    if isinstance(getattr(jax_primitives, f"{primitive}_p", None), Primitive):
        return f" Use the primitive that it binds: `jax.lax.{primitive}_p`."
    return (
        " Put the calls of the function into a `jax.named_scope`, and use its name; or "
        "see by `jax.make_jaxpr` which primitives it binds."
    )


def show_key(key: Key) -> str:
    return str(key) if isinstance(key, Primitive) else repr(key)
