"""A cache for what follows from a jaxpr or a plan, while that lives.

Remembering is not only for speed: JAX finds compiled code by the identity of inner
jaxprs, so a jitted function must be rewritten to the same jaxpr every time."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

_T = TypeVar("_T")


@dataclass(eq=False)
class Memo:
    """Keeps the answers to one question about programs, by what else they depend on.

    A program is a jaxpr or a plan. No answer may hold the program that it is about: it
    would keep that alive for ever."""

    _known: Any = field(default_factory=WeakKeyDictionary)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()  # a rewritten function is pickled without its programs

    def of(self, program: Any) -> dict[Any, Any]:
        """The answers about one program.

        A question that asks itself about inner programs uses this instead of a call, so
        that programs deep in calls take fewer frames of Python for each level."""
        return self._known.setdefault(program, {})

    def __call__(self, program: Any, key: Hashable, find: Callable[[], _T]) -> _T:
        known = self.of(program)
        if key not in known:
            known[key] = find()
        return known[key]
