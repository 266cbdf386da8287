"""Faults to plant into the rewrite, each of which the fuzzer must find."""

from collections.abc import Callable

FAULTS: dict[str, Callable[[], None]] = {}


def plant(name: str) -> None:
    FAULTS[name]()
