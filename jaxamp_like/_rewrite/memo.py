"""The one cache of the rewrite: what follows from a jaxpr or a plan, while that lives.

Remembering is not only for speed: JAX finds compiled code by the identity of inner
jaxprs, so a jitted function must be rewritten to the same jaxpr every time."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

_T = TypeVar("_T")


@dataclass(eq=False)
class Memo:
    """Answers to one question about programs, by whatever else they depend on.

    A program is a jaxpr or a plan. No answer may hold the program that it is about: it
    would keep that alive for ever."""

    _known: Any = field(default_factory=WeakKeyDictionary)

    def of(self, program: Any) -> dict[Any, Any]:
        """The answers about one program.

        For questions that are asked of programs in programs: what is deep in calls can
        be asked with few frames of Python for each."""
        return self._known.setdefault(program, {})

    def __call__(self, program: Any, key: Hashable, find: Callable[[], _T]) -> _T:
        known = self.of(program)
        if key not in known:
            known[key] = find()
        return known[key]
