"""The subject of a report: a function, or `amp` of it if settings are given."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from jax.typing import DTypeLike

from .._amp import amp
from .._errors import hiding_frames
from .._frameworks.nnx import nnx_nodes
from .._jax import Jaxpr
from .._parameters import after_model, as_argnums, positions_of
from .._policies.mistakes import refuse_what_is_no_function
from .._policies.settings import reading_for_no_amp
from .._rewrite.record import Recorder
from .arguments import argument_records
from .call import FlatCall, flat_call, function_name
from .data.memory import ArgumentRecord

_Report = TypeVar("_Report")


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
        lean: bool | str,
        argnums: int | Sequence[int] | None,
    ):
        refuse_what_is_no_function(fn, reporter)
        self.fn, self.reporter = fn, reporter
        self.is_given = (
            compute_dtype is not None or amp_policy is not None or strict or lean
        )
        self.argnums = (0,) if argnums is None else as_argnums(argnums)
        self.are_told = argnums is not None
        # NNX modules are taken out of the arguments before anything is traced, so a
        # module that is itself called must be made an argument.
        self.leading = (fn,) if nnx_nodes(fn) else ()
        if self.leading:
            argnums = after_model(() if argnums is None else self.argnums)
        with contextlib.nullcontext() if self.is_given else reading_for_no_amp():
            self.mixed = amp(
                _apply if self.leading else fn,
                compute_dtype=compute_dtype,
                amp_policy=amp_policy,
                strict=strict,
                lean=lean,
                argnums=argnums,
            )
        if not self.is_given:  # the arguments have been checked, and no more is wanted
            self.mixed = fn

    @property
    def name(self) -> str:
        return function_name(self.fn)

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

    def arguments(
        self, args: Any, kwargs: Any, variables: Sequence[Any]
    ) -> tuple[ArgumentRecord, ...]:
        """What the arguments of a call hold.

        Args:
            args: positional ones.
            kwargs: keyword arguments.
            variables: the inputs of the program that `trace` returned."""
        told = []
        if self.are_told:
            told = positions_of(self.argnums, len(args), self.name)
        avals = [v.aval for v in variables]
        return argument_records(self.fn, args, kwargs, avals, told)

    def wraps(self, report: Callable[..., _Report]) -> Callable[..., _Report]:
        """`report`, with the name, the docstring and the signature of the function."""
        return _NotYetAReport(report, self.fn, self.name, self.reporter)


class _NotYetAReport(Generic[_Report]):
    """Makes a report when it is called; printed before, it says so."""

    def __init__(
        self,
        report: Callable[..., _Report],
        fn: Callable[..., Any],
        name: str,
        reporter: str,
    ):
        self._report = report
        names = ("__module__", "__name__", "__qualname__", "__doc__")
        assigned = [n for n in names if isinstance(getattr(fn, n, None), str)]
        functools.update_wrapper(self, fn, assigned=assigned, updated=())
        try:
            parameters = inspect.signature(fn).parameters.values()
            needed = [p.name for p in parameters if p.default is p.empty]
            arguments = ", ".join(needed)
        except (TypeError, ValueError):  # some builtins have none
            arguments = "..."
        made = f"{reporter}({name})"
        self._hint = f"{made} makes a report when it is called: {made}({arguments})"

    @hiding_frames
    def __call__(self, *args: Any, **kwargs: Any) -> _Report:
        return self._report(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<{self._hint}>"

    def __getattr__(self, name: str) -> Any:
        hint = "" if name.startswith("_") else f" {self._hint}"
        raise AttributeError(f"No report yet that has {name!r}.{hint}")


def _apply(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return fn(*args, **kwargs)
