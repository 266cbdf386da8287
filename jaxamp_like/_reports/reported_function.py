"""The subject of a report: a function, or `amp` of it if settings are given."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from jax.typing import DTypeLike

from .._amp import amp
from .._errors import hiding_frames
from .._frameworks.nnx import nnx_nodes
from .._jax import Jaxpr
from .._parameters import after_model, as_argnums, positions_of
from .._policies.mistakes import refuse_what_is_no_function
from .._rewrite.record import Recorder
from .call import FlatCall, flat_call


class ReportedFunction:
    """A function to be reported, with the settings that were given.

    Raises:
        TypeError, ValueError: `fn` is not callable, or as from `amp`."""

    def __init__(
        self,
        fn: Callable[..., Any],
        reporter: str,
        *,
        compute_dtype: DTypeLike | None,
        amp_policy: Any,
        strict: bool,
        lean: bool,
        argnums: int | Sequence[int] | None,
    ):
        refuse_what_is_no_function(fn, reporter)
        self.fn = fn
        self.is_given = (
            compute_dtype is not None or amp_policy is not None or strict or lean
        )
        self.argnums = (0,) if argnums is None else as_argnums(argnums)
        # NNX modules are taken out of the arguments before anything is traced, so a
        # module that is itself called must be made an argument.
        self.leading = (fn,) if nnx_nodes(fn) else ()
        if self.leading:
            argnums = after_model(() if argnums is None else self.argnums)
        self.mixed = amp(
            _apply if self.leading else fn,
            compute_dtype=compute_dtype,
            amp_policy=amp_policy,
            strict=strict,
            lean=lean,
            argnums=argnums,
        )

    @property
    def name(self) -> str:
        fn = self.fn
        while isinstance(fn, functools.partial):
            fn = fn.func
        name = getattr(fn, "__name__", None)  # of some callables, it is no string
        return name if isinstance(name, str) else type(fn).__name__

    def trace(
        self, args: Any, kwargs: Any, differentiates: bool = False
    ) -> tuple[FlatCall, Recorder, Jaxpr]:
        """Traces a call of the function as it is, or of `amp` of it if settings were
        given: without settings, the report is about what runs.

        Returns:
            The call, what was recorded meanwhile, and the program that comes of it."""
        argnums = self.argnums if differentiates else ()
        active = positions_of(argnums, len(args), self.name)
        fn = self.fn
        if self.is_given:
            fn, args = self.mixed, (*self.leading, *args)
            active = [i + len(self.leading) for i in active]
        call, recorder = flat_call(fn, args, kwargs, active, self.name), Recorder()
        return call, recorder, call.trace(recorder)

    def wraps(self, report: Callable[..., Any]) -> Callable[..., Any]:
        """`report`, with the name, the docstring and the signature of the function."""
        names = ("__module__", "__name__", "__qualname__", "__doc__")
        assigned = [n for n in names if isinstance(getattr(self.fn, n, None), str)]
        wrapper = functools.wraps(self.fn, assigned=assigned, updated=())
        return wrapper(hiding_frames(report))


def _apply(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return fn(*args, **kwargs)
