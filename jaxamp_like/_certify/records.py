"""What a certificate says of one operation."""

from dataclasses import dataclass

from .._reports.data.records import Phase
from .drifts import EMULATED, NOT_DRIFTS, UNDECIDED, WIDE
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

    kind: Kind
    scope: str
    phase: Phase
    primitive: str
    source: str
    decided: str
    compiled: tuple[str, ...]
    stored: tuple[str, ...]
    arithmetic: str
    opcodes: tuple[str, ...]
    drifts: tuple[str, ...]
    work: int
    times: int
    why: str = ""

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

    scope: str
    phase: Phase
    primitive: str
    source: str
    decided: str
    stored: str
    size: int
    times: int
    is_kept: bool
    drift: str

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
        return f"{text}compiled {self.stored}, {self.size / 1e6:.1f} MB"
