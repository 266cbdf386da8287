"""What of a certificate is shown on the page: tiles, tables and bars."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from ..data.units import human_bytes
from .charts import bars
from .data import table


@runtime_checkable
class Compiled(Protocol):
    """A certificate, as far as the page shows it."""

    @property
    def device(self) -> str: ...
    @property
    def float32_runs_in(self) -> str: ...
    @property
    def operations(self) -> Sequence[Any]: ...
    @property
    def arrays(self) -> Sequence[Any]: ...
    @property
    def kept(self) -> Mapping[str, int]: ...
    @property
    def kept_compiled(self) -> Mapping[str, int]: ...


def tiles(compiled: Compiled) -> list[tuple[str, str, str]]:
    """The tiles of a certificate: label, figure, and a note."""
    rows = [*compiled.operations, *compiled.arrays]
    right = sum(one.is_as_decided for one in rows)
    found = [
        ("run as decided", f"{right} of {len(rows)}", "operations and large arrays"),
        (
            "float32 contractions multiply in",
            compiled.float32_runs_in,
            "as written, too, unless precision asks for more",
        ),
    ]
    if compiled.kept or compiled.kept_compiled:
        now, decided = (
            human_bytes(sum(kept.values()))
            for kept in (compiled.kept_compiled, compiled.kept)
        )
        found.append(("kept for the backward pass", now, f"decided {decided}"))
    return found


def tables(compiled: Compiled) -> dict[str, Any]:
    """A row for all operations, or arrays, that are alike."""
    named = {"compiled": compiled.operations, "arrays": compiled.arrays}
    return {name: table(type(rows[0]), rows) for name, rows in named.items() if rows}


def charts(compiled: Compiled) -> dict[str, Any]:
    """FLOPs and kept bytes by dtype, as decided and as compiled."""
    decided: Counter[str] = Counter()
    now: Counter[str] = Counter()
    for one in compiled.operations:
        if one.work and one.compiled:
            decided[_operands(one.decided or "undecided")] += one.work
            now[_operands(one.compiled[0])] += one.work
    found = {
        "compiledFlops": bars(
            {"decided": decided, "compiled": now}, "FLOPs of contractions", "FLOP"
        ),
        "compiledKept": bars(
            {"decided": compiled.kept, "compiled": compiled.kept_compiled},
            "bytes kept for the backward pass",
            "bytes",
        ),
    }
    return {name: spec for name, spec in found.items() if spec["data"]["values"]}


def _operands(signature: str) -> str:
    """The dtypes that a contraction reads, once if they are the same."""
    reads = signature.partition(" -> ")[0].split(" x ")
    return " x ".join(dict.fromkeys(reads))
