"""`saving_low`: a rule by which an op keeps low copies for its backward pass."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .._dtypes import lowered
from .._errors import AmpError
from .._primitives.matmul_precision import settled_bind
from . import Decision, Rule, Site
from .base import DelegatingRule
from .callback import Callback
from .low_bits import BLOCK, FORMATS, SHORT_FORMATS, LowBits, as_low_bits
from .low_residuals import low_copies, with_low_residuals
from .user_rules import as_rule, is_dtype, short


@dataclass(frozen=True)
class SavingLow(DelegatingRule):
    """Decides as another rule; see `saving_low`."""

    rule: Rule

    @property
    def parts(self) -> tuple[Rule, ...]:
        return (self.rule,)

    def for_equation(self, params: dict[str, Any], avals: Sequence[Any]) -> Rule:
        return SavingLow(self.rule.for_equation(params, avals))

    def decide(self, site: Site) -> Decision:
        decision = self.rule.decide(site)
        if decision.bind is not None or site.primitive is None:
            return decision  # has a derivative of its own
        low = [read and lowered(read, site.compute_dtype) for read in decision.reads]
        if low == list(decision.reads):
            return decision
        is_low = decision.reads != site.authors
        op = settled_bind(site.primitive, decision.params, is_low)
        keeping = with_low_residuals(op, op)

        def bind(*operands):
            return keeping(operands, low_copies(operands, low))

        why = f"{decision.why}; keeps its inputs in {site.compute_dtype.name}"
        return decision._replace(bind=bind, why=why)


@dataclass(frozen=True)
class SavingLowBits(Rule):
    """Leaves the decision to the other rules of a policy; see `saving_low`.

    A policy looks these rules up apart from others, so that `decide` is never asked."""

    format: str
    block: int

    def __post_init__(self) -> None:
        super().__post_init__()
        as_low_bits(self.format, self.block, "format")

    @property
    def saves(self) -> LowBits:
        return LowBits(self.format, self.block)

    def decide(self, site: Site) -> Decision:
        raise AmpError(
            f"`saving_low({self.format!r})` says what is kept for the backward pass, "
            "and not how an operation computes: it can't be a part of another rule. "
            "Put it into a policy itself, under the name of a scope or a primitive."
        )


def saving_low(rule: Any, block: int | None = None) -> Rule:
    """Keeps low copies of what ops read for their backward pass.

    With the name of a format of 8 bits, `saving_low("int8")`, all that ops of a scope
    keep for their backward pass is kept in 8 bits: what contractions read, and what
    norms, softmax and activations are run again from. How they compute is as the policy
    says without the rule, and so are their values and forward-mode derivatives, to the
    bit; the backward pass reads the rounded values. Blocks of `block` neighbours along
    the last axis share a scale. int8 errs least, by about 0.6 % of a block's numbers,
    float8_e4m3fn by 2.6 % of each, float8_e5m2 by 5 %. Under the name of a scope it
    also holds for sums, such as a residual stream, which `amp(fn, lean="int8")` leaves
    alone. Arrays of less than 32 numbers stay as they are. So does what something with
    a pole or a jump reads, such as `log`, a denominator or `round`, or something whose
    derivative jumps elsewhere than at 0, such as a maximum or a clip; and what
    contractions of rules such as `float8` keep in 8 bits already. What is kept so can't
    be differentiated again: where `amp` sees a second derivative, it keeps 16 bits.

    With a rule, it computes by `rule`, and keeps low copies in the compute dtype. The
    value is that of `rule`, to the bit; its derivative is that at inputs which were
    rounded to the compute dtype, computed again in the backward pass. It suits ops that
    compute in full and are cheap to run twice. What several ops share is better left to
    `amp(fn, lean=True)`, which keeps one low input for a whole remat region of them.

    Args:
        rule: "int8", "float8_e4m3fn" (or "float8") or "float8_e5m2"; or a rule or a
            dtype, as in a policy, but no casting callback of your own.
        block: with a format, how many numbers share a scale, by default 32. Where an
            axis is no multiple, a divisor near it is taken.
    Returns:
        A rule to put in a policy.
    Raises:
        TypeError: `rule` is no rule, or is a function, or `block` is no integer, or is
            given with a rule.
        ValueError: `rule` is no format that there is, or `block` is not positive.

    >>> from jax import lax
    >>> from jaxamp_like import default_amp_policy
    >>> from jaxamp_like.rules import use_original_precision
    >>> policy = default_amp_policy | {"encoder": saving_low("int8", block=32)}
    >>> policy = default_amp_policy | {lax.exp_p: saving_low(use_original_precision)}

    Activations stored in few bits are due to Chakrabarti and Moseley, "Backprop with
    Approximate Activations for Memory-efficient Network Training", arXiv:1901.07988."""
    if _is_format(rule):
        bits = as_low_bits(rule, BLOCK if block is None else block, "rule")
        return SavingLowBits(bits.format, bits.block)
    inner = as_rule(rule, "rule")
    if isinstance(inner, Callback):
        raise TypeError(
            f"`rule` is the function {short(rule)}. `saving_low` wraps no function "
            "that computes: it makes a rule, which goes into a policy under the name "
            'of a scope, `default_amp_policy | {"encoder": saving_low("int8")}`, and '
            "the policy into `amp(fn, amp_policy=policy)`. Nor does it keep anything "
            "for a casting callback, which casts by itself: give it a rule of this "
            "library, or a dtype."
        )
    if block is not None:
        raise TypeError(
            "`block` is given, which only formats of 8 bits have, but `rule` is none "
            f"of them: {rule!r}. Leave `block` out, or give 'int8' for `rule`."
        )
    return SavingLow(inner)


def _is_format(value: Any) -> bool:
    """Whether a user meant a format of few bits: an unknown one is refused as such."""
    name = value if isinstance(value, str) else str(getattr(value, "__name__", value))
    if not isinstance(value, str) and not is_dtype(value):
        return False
    few = ("float8", "float4", "int", "uint", "fp8", "fp4", "mxfp", "nvfp")
    return name in (*FORMATS, *SHORT_FORMATS) or name.startswith(few)
