"""The one cache of the rewrite: what was found out of a jaxpr, while the jaxpr lives.

Remembering is not only for speed: JAX finds compiled code by the identity of inner
jaxprs, so a jitted function must be rewritten to the same jaxpr every time."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from .._jax import Jaxpr

_T = TypeVar("_T")


@dataclass(eq=False)
class Memo:
    """Answers to one question about jaxprs, by whatever else they depend on."""

    _known: Any = field(default_factory=WeakKeyDictionary)

    def of(self, jaxpr: Jaxpr) -> dict[Any, Any]:
        """The answers about one jaxpr.

        For questions that are asked of programs in programs: what is deep in calls can
        be asked with few frames of Python for each."""
        return self._known.setdefault(jaxpr, {})

    def __call__(self, jaxpr: Jaxpr, key: Hashable, find: Callable[[], _T]) -> _T:
        known = self.of(jaxpr)
        if key not in known:
            known[key] = find()
        return known[key]
