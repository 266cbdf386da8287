"""The reports that a user gets: data, and the views of it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._files import write_text
from .data.explained import ReportData
from .data.numbers import NumericsData
from .page.compiled import Compiled
from .page.page import notebook_numerics, notebook_view, page
from .page.table import print_numerics, print_report


@dataclass(frozen=True, repr=False)
class NumericsReport(NumericsData):
    """What became of the numbers when a function ran in mixed precision.

    `print(report)` tells what went wrong first; `report.print()` is a table (rich);
    `to_json` gives everything; `save_html` writes a page.

    Args:
        name: of the function.
        settings: of each `amp` in it.
        nonfinite_arguments: the arguments that hold inf or NaN, as in `[0]['w']`. They
            are not blamed on the equations that read them.
        ops: every equation that makes floats, but those that only move data.
        versions: of the packages."""

    def print(self, n: int = 20) -> None:
        """Prints the summary and the `n` worst equations to the terminal.

        Raises:
            ImportError: rich is not installed."""
        print_numerics(self, n)

    def _repr_html_(self) -> str:
        return notebook_numerics(self)

    def save_html(self, path: str | Path) -> Path:
        """Writes one page that opens without a network.

        Args:
            path: where to; parent folders are made.
        Returns:
            The path.
        Raises:
            ImportError: the extra "report" is not installed.
            OSError: the path can't be written to; the message says why."""
        return write_text(path, page(None, numerics=self), "report")


@dataclass(frozen=True, repr=False)
class Report(ReportData):
    """What mixed precision makes of a function: data first, and views of it.

    `print(report)` gives a few lines of totals; `report.print()` a table (rich); in a
    notebook it shows itself; `to_json` gives everything; `save_html` writes a page.

    Args:
        name: of the function.
        settings: of each `amp` in it.
        now: the program that runs: its equations, casts and what it saves.
        written: the same of the function as its author wrote it.
        rules: the keys of the policy that decided something, most first, then those
            that never did.
        versions: of the packages.
        arguments: what the arguments hold: parameters, an optimizer's state, or what
            is of no known kind, each with its size. `memory` adds what else takes
            memory."""

    def print(self, *, depth: int = 3) -> None:
        """Prints tables of totals, scopes, casts and rules to the terminal.

        Args:
            depth: how many levels of scopes to show.
        Raises:
            ImportError: rich is not installed."""
        print_report(self, depth)

    def _repr_html_(self) -> str:
        return notebook_view(self)

    def save_html(
        self,
        path: str | Path,
        *,
        against: "Report | None" = None,
        numerics: NumericsReport | None = None,
        certificate: Compiled | None = None,
    ) -> Path:
        """Writes one page that opens without a network.

        Args:
            path: where to; parent folders are made.
            against: a report of the same function under another policy, to be shown
                beside this one.
            numerics: what `trace_numerics` found, to be shown too.
            certificate: what `certify` says of the same function or of a training step
                with it, to be shown as what was decided and what was compiled.
        Returns:
            The path.
        Raises:
            TypeError: `against`, `numerics` or `certificate` is something else.
            ImportError: the extra "report" is not installed.
            OSError: the path can't be written to; the message says why."""
        _check_kind("against", against, Report, "explain")
        _check_kind("numerics", numerics, NumericsReport, "trace_numerics")
        if certificate is not None and not isinstance(certificate, Compiled):
            raise TypeError(
                "`certificate` must be what `certify(step, *args)` gives, but got "
                f"{type(certificate).__name__}."
            )
        return write_text(path, page(self, against, numerics, certificate), "report")


def _check_kind(name: str, given: Any, kind: type, maker: str) -> None:
    if given is not None and not isinstance(given, kind):
        raise TypeError(
            f"`{name}` must be the report that `{maker}(fn)(*args)` gives, but got "
            f"{type(given).__name__}."
        )
