"""What a certificate says of one operation."""

from dataclasses import dataclass
from typing import Annotated

from .._reports.data.columns import Column
from .._reports.data.records import Phase
from .drifts import EMULATED, KEPT_WIDE, NOT_DRIFTS, UNDECIDED, WIDE
from .operations import Kind


@dataclass(frozen=True, slots=True)
class Certified:
    """One operation of the program, as decided and as compiled.

    Args:
        kind: "contraction", "reduction", "collective", "quantisation" or "kernel".
        scope: names of `jax.named_scope`s, outermost first, joined by "/".
        phase: "forward", "backward" or "recomputed".
        primitive: of the equation.
        source: "file:line" of the author's, "" where none is known.
        decided: what it reads and makes in the program that JAX hands to XLA, as in
            "bfloat16 x bfloat16 -> float32"; "" if it is undecided.
        compiled: the same in the compiled program, for each way in which it runs there.
        stored: the dtypes in which the compiled program keeps its operands.
        arithmetic: what float32 operands are rounded to as they are multiplied.
        opcodes: what XLA calls it.
        drifts: how these differ, in the words of `MEANINGS`.
        work: FLOPs of all runs of a contraction, as decided or, if it is undecided, as
            compiled.
        times: how often it runs, as decided.
        why: the reason of the rule that decided, if it is known."""

    kind: Annotated[Kind, Column("kind", at=5)]
    scope: Annotated[str, Column("scope", at=10)]
    phase: Annotated[Phase, Column("phase", at=30)]
    primitive: Annotated[str, Column("primitive", at=20)]
    source: Annotated[str, Column("source", "line", at=80)]
    decided: Annotated[str, Column("decided", at=40)]
    compiled: tuple[str, ...]
    stored: tuple[str, ...]
    arithmetic: Annotated[str, Column("multiplies in", at=55)]
    opcodes: tuple[str, ...]
    drifts: tuple[str, ...]
    work: Annotated[int, Column("FLOPs", "flops", at=95, adds=True)]
    times: int
    why: Annotated[str, Column("why", at=70)] = ""

    @property
    def compiled_to(self) -> Annotated[str, Column("compiled", at=50)]:
        """What it reads and makes in the compiled program, in each way."""
        return "; ".join(self.compiled)

    @property
    def differs(self) -> Annotated[str, Column("differs", at=60)]:
        """How it differs from what was decided; "" if it doesn't."""
        return ", ".join(self.drifts)

    @property
    def count(self) -> Annotated[int, Column("count", "number", at=90, adds=True)]:
        """How many operations it stands for."""
        return 1

    @property
    def is_as_decided(self) -> bool:
        return not self.real_drifts

    @property
    def real_drifts(self) -> tuple[str, ...]:
        """The drifts that make `is_as_decided` false: all but those in `NOT_DRIFTS`."""
        return tuple(drift for drift in self.drifts if drift not in NOT_DRIFTS)

    def __str__(self) -> str:
        where = f" in {self.scope}" if self.scope else ""
        line = f" ({self.source})" if self.source else ""
        decided = f"decided {self.decided}, " if self.decided else ""
        compiled = "; ".join(self.compiled) or "nothing"
        kinds = ", ".join(self.drifts) or "as decided"
        text = f"{kinds}: {self.primitive}{where}, {self.phase}{line}: "
        text += f"{decided}compiled {compiled}"
        if {WIDE, EMULATED} & {*self.drifts}:
            text += f", stored as {' and '.join(self.stored)}"
        return f"{text} [{self.why}]" if self.why else text


@dataclass(frozen=True, slots=True)
class StoredArray:
    """A large array that the compiled program writes to memory.

    Or, if it is a drift, what a kernel computes on the way to one.

    Args:
        scope: names of `jax.named_scope`s, outermost first, joined by "/".
        phase: "forward", "backward" or "recomputed".
        primitive: of the equation that it is the result of.
        source: "file:line" of the author's, "" where none is known.
        decided: the dtype of that equation; "" if no equation is known.
        stored: the dtype in which it is compiled.
        size: in bytes.
        times: how often it is written.
        is_kept: whether the forward pass writes it and the backward pass reads it.
        drift: how both differ, in a word of `MEANINGS`; "" if they don't."""

    scope: Annotated[str, Column("scope", at=10)]
    phase: Annotated[Phase, Column("phase", at=30)]
    primitive: Annotated[str, Column("primitive", at=20)]
    source: Annotated[str, Column("source", "line", at=80)]
    decided: Annotated[str, Column("decided", at=40)]
    stored: Annotated[str, Column("compiled", at=50)]
    size: Annotated[int, Column("bytes", "bytes", at=95, adds=True)]
    times: int
    is_kept: Annotated[bool, Column("kept for the backward pass", "flag", at=70)]
    drift: Annotated[str, Column("differs", at=60)]

    @property
    def count(self) -> Annotated[int, Column("count", "number", at=90, adds=True)]:
        """How many arrays it stands for."""
        return 1

    @property
    def is_as_decided(self) -> bool:
        """Whether it is known to be, or the equation is not known."""
        return not self.drift or self.drift in NOT_DRIFTS or self.drift == UNDECIDED

    def __str__(self) -> str:
        where = f" in {self.scope}" if self.scope else ""
        line = f" ({self.source})" if self.source else ""
        text = f"{self.drift or 'as decided'}: array of {self.primitive}{where}, "
        text += f"{self.phase}{line}: "
        text += f"decided {self.decided}, " if self.decided else ""
        text += f"compiled {self.stored}, {self.size / 1e6:.1f} MB"
        is_before = self.drift == KEPT_WIDE and self.decided == self.stored
        return text + (", kept before it is rounded" if is_before else "")
