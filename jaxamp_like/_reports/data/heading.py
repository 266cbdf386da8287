"""The head of a report: the function, and the settings of its `amp`, if it has one."""

from collections.abc import Sequence


def label(settings: Sequence[str], reporter: str) -> str:
    """The settings of each `amp`; where there is none, how to see what it would do."""
    return "; ".join(settings) or f"no amp: {without_amp(reporter)}"


def heading(name: str, settings: Sequence[str], reporter: str) -> list[str]:
    """The same as the first lines of a report of the function `name`."""
    lines = [f"{name} ({'; '.join(settings) or 'no amp'})"]
    return lines if settings else [*lines, f"  {without_amp(reporter)}"]


def without_amp(reporter: str) -> str:
    return (
        "no `amp` was found inside, so this is the function as it is. What `amp` "
        f"would make of it: `{reporter}(fn, compute_dtype='bfloat16')`"
    )
