"""Which steps may be in one remat region: what flows between them, and their depth."""

from collections.abc import Iterable, Sequence
from typing import Any

from ..._dtypes import DType, has_range
from ..._jax import variables, varying_in
from ..._primitives import VIEWS
from ..._rules import Demand, Fact, RematSource
from ..._rules.low_bits import LowBits
from ..._structural import Plan
from ..shared import shared
from .cost import (
    Step,
    fact_dtype,
    has_sum,
    is_cheap_step,
    is_low,
    is_sharded,
    looks_up,
    mixes_rows,
    num_bytes,
    num_elements,
    only_saturates,
    readers_in,
    saved_bytes_for,
)
from .eight_bits import (
    is_centred,
    is_contraction_result,
    is_kept_anyway,
    reading_of,
    reduces_rows,
)

# Linear in all that they read: the backward pass keeps none of it.
_NO_RESIDUALS = VIEWS | {"add", "sub", "neg", "concatenate", "pad"}


class Grouping:
    """What flows through the steps of a jaxpr, and which of them may be in one region.

    Attributes:
        facts: of all variables.
        active: variables that a derivative may go through.
        free_vars: those that the backward pass has anyway: inputs, and what is made of
            inputs and constants by moving them.
        free: the steps that make these.
        shared: variables whose cotangents are sums of several.
        depth_of: the steps of regions, with the number of costly steps before them."""

    def __init__(self, plan: Plan):
        steps, facts = plan.steps, plan.facts
        self.facts, self.maker = facts, plan.makers
        self._saves = plan.saves
        self.free: set[Step] = set()
        self.depth_of: dict[Step, int] = {}
        self.number = {step: i for i, step in enumerate(steps)}
        self.readers = readers_in(steps)
        eqns: dict[Any, list[Any]] = {
            v: [step.eqn for step in read] for v, read in self.readers.items()
        }
        outs = variables(plan.outvars)
        self._outs = {*outs}
        for v in outs:
            eqns.setdefault(v, []).append(None)
        self.shared = shared(eqns)
        inputs = [v for v in facts if v not in self.maker]
        self.active = {v for v in inputs if _is_active(facts[v])}
        self.free_vars = {v for v in inputs if is_kept_anyway(facts[v])}
        self._is_split = any(map(is_sharded, facts.values())) or any(
            varying_in(v.aval) for v in facts
        )
        self._parent: dict[Step, Step] = {}
        self._saved_dtypes: dict[Any, DType | None] = {}
        self._depths = dict.fromkeys(inputs, 0)
        last_effect = 0
        for step in steps:
            depth = max((self._depths[v] for v in step.variables_read), default=0)
            if step.eqn.effects:
                depth = last_effect = max(depth, last_effect) + 1
            self._place(step, depth)

    def _place(self, step: Step, depth: int) -> None:
        operands, outs = step.variables_read, step.eqn.outvars
        is_active = any(v in self.active for v in operands)
        if is_active:
            self.active.update(outs)
        cheap = is_cheap_step(step) and not looks_up(step, self.facts)
        if not cheap or step.is_part_of_copy:
            depth += 1
        elif all(v in self.free_vars for v in operands) and (
            not is_active or step.eqn.primitive.name in VIEWS
        ):
            self.free.add(step)
            self.free_vars.update(outs)
        elif is_active and outs:
            makers = [self.maker[v] for v in operands if v in self.maker]
            inside = [s for s in makers if self.depth_of.get(s) == depth]
            is_joined = bool(inside) and not self._splits(step)
            if is_joined or not self._is_cheap_to_save(step):
                self.depth_of[step] = depth
                for other in {self._root(other) for other in inside}:
                    self._parent[other] = step
            elif inside:
                depth += 1  # its readers can't be in the region that it reads from
        self._depths |= dict.fromkeys(outs, depth)

    def _is_cheap_to_save(self, step: Step) -> bool:
        """Whether a step's result is as good to keep as what it is made of."""
        if saved_bytes_for(step, self.active) or has_sum(step):
            return False
        (out, *_), operands = step.eqn.outvars, step.variables_read
        if step.eqn.primitive.name not in _NO_RESIDUALS:
            masks = (v for v in operands if v.aval.ndim and v not in self.active)
            if any(self.maker.get(v) in self.free for v in masks):
                return False  # a region makes the mask for itself
        paid = [v for v in operands if v in self.active and v not in self.free_vars]
        total = sum(map(self.saved_bytes, paid))
        is_low = self.saved_dtype(out) is not None
        return self.saved_bytes(out) < total or (
            is_low and self.saved_bytes(out) == total
        )

    def is_rounded(self, v: Any) -> bool:
        """Whether a value is low, or has a low copy."""
        return self.saved_dtype(v) is not None or is_low(v, self.facts)

    def saved_bytes(self, v: Any) -> int:
        """The bytes that it takes to keep a value for a region that reads it."""
        return num_bytes(v.aval, self.saved_dtype(v) or fact_dtype(self.facts[v]))

    def saved_dtype(self, v: Any) -> DType | None:
        """The dtype in which a region's input is kept, if not in its own."""
        if v not in self._saved_dtypes:
            fact = self.facts[v]
            self._saved_dtypes[v] = (fact and fact.saved_dtype) or self._gate_dtype(v)
        return self._saved_dtypes[v]

    def _bits_for(self, v: Any, group: Iterable[Step]) -> LowBits | None:
        """How `lean` keeps what a region of some steps reads.

        On GPUs XLA makes a softmax or a norm of a row in one kernel. That also decodes
        the row if it has one scale, but not if it falls into blocks: the row would be
        stored in float32 first. What a norm takes the mean of stays as it is: its
        deviations from the mean may be smaller than a step between codes."""
        if (
            self._saves is None
            or not v.aval.ndim
            or is_centred(v, self.readers, self.number)
        ):
            return None
        length = v.aval.shape[-1]
        is_row = any(map(reduces_rows, group)) and isinstance(length, int)
        return LowBits("int8", max(length, 1) if is_row else self._saves.block)

    @property
    def keeps_reductions(self) -> bool:
        """Whether sums across rows are kept, so that the rest may be made again."""
        return self._saves is not None

    def saved_bits(self, v: Any, group: Sequence[Step]) -> LowBits | None:
        """How a region of some steps keeps an input in 8 bits, if it does.

        A user's rule holds for all that its steps read, the option `lean` only for
        what contractions made. That is kept in int8 whatever the format for operands
        of contractions: an exponential of a large number needs an absolute error that
        is small, and of two formats of 8 bits int8 has the smaller one. Neither holds
        where a pole or a jump would magnify the rounding."""
        asked = (s.match.saves for s in group if v in s.variables_read)
        asked = next(filter(None, asked), None)
        how, fact = asked or self._bits_for(v, group), self.facts[v]
        dtype = self.saved_dtype(v) or fact_dtype(fact)
        if how is None or dtype is None or not how.pays_for(v.aval, dtype):
            return None
        is_gate_sum = self._gate_dtype(v) is not None
        is_rounded = is_gate_sum or is_contraction_result(v, self.maker)
        if asked is None and not is_rounded:
            return None
        group = [step for step in group if self._is_used(step)]
        reading = reading_of([v], group)
        # A sum across rows is kept, and would not be that of the exponentials that are
        # made again: of a softmax the shares would not sum to 1.
        is_torn = reading.sums_made and mixes_rows(group)
        if reading.is_steep or is_torn:
            return None
        if not reading.rows:  # a norm of other rows may scale it
            made = {u for step in group for u in step.eqn.outvars}
            read = {u for step in group for u in step.variables_read} - made
            paid = (read & self.active) - self.free_vars
            reading.rows = reading_of(paid, group).rows
        return reading.fitting(how, v.aval.shape[-1])

    def _is_used(self, step: Step) -> bool:
        """Whether anything reads a result of a step, as nothing reads some signs."""
        return any(v in self.readers or v in self._outs for v in step.eqn.outvars)

    def _gate_dtype(self, v: Any) -> DType | None:
        """The dtype of a low copy of `v`, a sum of two products that only gates read.

        It is the sum of two contractions' results, as in an LSTM. Rounding it errs
        about as much as rounding these, and where the sum is large, a gate is
        saturated. What is made again from any other sum may be small beside the sum
        itself."""
        step = self.maker.get(v)
        if step is None or step.eqn.primitive.name != "add":
            return None
        operands = step.variables_read
        dtypes = {fact_dtype(self.facts[u]) for u in operands if is_low(u, self.facts)}
        is_once = all(
            is_low(u, self.facts) and len(self.readers[u]) == 1 for u in operands
        )
        if len(operands) != 2 or not is_once or len(dtypes) != 1:
            return None
        (low,) = dtypes
        if low is None or not has_range(low, v.aval.dtype):
            return None
        return low if only_saturates(v, self.readers) else None

    def roots_of(self, steps: Sequence[Step]) -> list[Step]:
        """The steps that lead from what is held low to what `steps` read.

        If one low value costs no more to keep than what is made of it alone (by adding
        a bias, by a constant factor, by a split), it is kept instead, and these steps
        are run again."""
        made = {v for step in steps for v in step.eqn.outvars}
        chains: dict[Any, tuple[int, dict[Step, None]]] = {}
        for v in dict.fromkeys(v for step in steps for v in step.variables_read):
            if v in made or v in self.free_vars or v not in self.active:
                continue
            if found := self._low_source(v):
                origin, chain = found
                total, others = chains.get(origin, (0, {}))
                chains[origin] = (
                    total + self.saved_bytes(v),
                    others | dict.fromkeys(chain),
                )
        lead: dict[Step, None] = {}
        for origin, (total, chain) in chains.items():
            if self.saved_bytes(origin) <= total:
                lead |= chain
        found = {*lead, *self.free_makers([*lead])} - {*steps}
        return sorted(found, key=self.number.__getitem__)

    def _low_source(self, v: Any) -> tuple[Any, list[Step]] | None:
        """The low value that `v` is made of, and by which steps."""
        chain: list[Step] = []
        while not self.is_rounded(v):
            step = self.maker.get(v)
            if step is None or not is_cheap_step(step) or looks_up(step, self.facts):
                return None
            paid = {
                u for u in step.variables_read if u not in self.free_vars
            } & self.active
            if len(paid) != 1:
                return None
            chain.append(step)
            (v,) = paid
        return (v, chain) if chain else None

    def rounded_cotangents(self) -> dict[Any, int | None]:
        """Variables whose cotangents are rounded once; see `Schedule`."""
        found: dict[Any, int | None] = {}
        for step in self.number:
            is_sent = step.eqn.primitive.name == "gather"
            if is_sent and looks_up(step, self.facts):
                # The cotangent of what is looked up in a table that lies on several
                # devices is sent to where the rows are, and added up there in full.
                found |= dict.fromkeys(step.eqn.outvars)
            elif self._adds_bias(step):
                found |= dict.fromkeys(step.eqn.outvars)
            elif (branch := self._branch(step)) is not None:
                found |= dict.fromkeys(step.eqn.outvars, branch)
        return found

    def _adds_bias(self, step: Step) -> bool:
        """Whether a step adds a bias to a product, or to a gate's sum of two products.

        Its cotangent is then that of the contraction's result, which is low anyway: the
        bias' gradient is better summed from that than from a second, wide array. It
        does not count if the result has other readers, whose cotangents are added
        first."""
        if step.eqn.primitive.name not in ("add", "sub") or not step.may_recompute:
            return False
        if Demand.FULL not in step.out_demands[0]:
            return False  # only contractions read it: its cotangent is low as it is
        (out,), operands = step.eqn.outvars, step.variables_read
        low = [v for v in operands if is_low(v, self.facts) or self._gate_dtype(v)]
        rest = [v for v in operands if v not in low]
        if len(low) != 1 or len(rest) != 1 or low[0].aval.shape != out.aval.shape:
            return False
        if low[0] in self.shared:
            return False
        (bias,) = rest
        fact = self.facts[bias]
        is_small = fact is not None and fact.is_broadcast
        is_small = is_small or num_elements(bias.aval) < num_elements(out.aval)
        return bias in self.free_vars and is_small

    def _branch(self, step: Step) -> int | None:
        """Which operand is a contraction's result that is added to a stream.

        The stream has other readers, too, so its cotangent is a sum in full; the
        cotangent of the contraction's result is low. XLA would store only the low one.
        To have the one of the stream, each kernel that adds to it would run the
        backward passes of all later regions again, and compiling would take two to
        three times as long. In code that is split over devices there is no such
        operand: it costs less to compute again than to store."""
        is_sum = step.eqn.primitive.name == "add" and step.may_recompute
        if self._is_split or not is_sum:
            return None
        if Demand.FULL not in step.out_demands[0]:
            return None
        operands = step.variables_read
        low = [v for v in operands if is_low(v, self.facts) or self._is_biased(v)]
        rest = [v for v in operands if v not in low]
        if len(low) != 1 or len(rest) != 1 or low[0].aval.shape != rest[0].aval.shape:
            return None
        if low[0] in self.shared:
            return None  # the cotangents of its other readers come first
        (stream,) = rest
        is_summed = stream in self.active and stream not in self.free_vars
        is_summed = is_summed and len(self.readers[stream]) > 1
        return operands.index(low[0]) if is_summed else None

    def _splits(self, step: Step) -> bool:
        """Whether a step adds to a stream, and its sum is kept between two regions.

        This is not so if the stream is still an input, as of a loop's body: that is
        kept anyway, and the region after the sum makes the sum again."""
        branch = self._branch(step)
        return branch is not None and step.eqn.invars[1 - branch] in self.maker

    def _is_biased(self, v: Any) -> bool:
        return v in self.maker and self._adds_bias(self.maker[v])

    def _root(self, step: Step) -> Step:
        root = step
        while root in self._parent:
            root = self._parent[root]
        while step is not root:  # so that the way is short the next time
            above = self._parent[step]
            self._parent[step] = root
            step = above
        return root

    def groups(self) -> dict[Step, list[Step]]:
        """The group of each step that is in one: a candidate for a region."""
        groups: dict[Step, list[Step]] = {}
        for step in self.depth_of:
            groups.setdefault(self._root(step), []).append(step)
        return {step: group for group in groups.values() for step in group}

    def free_makers(self, group: Sequence[Step]) -> list[Step]:
        """The free steps that make what a group reads."""
        found: set[Step] = set()
        pending = list(group)
        while pending:
            read = pending.pop().variables_read
            makers = {self.maker[v] for v in read if v in self.maker}
            new = (makers & self.free) - found
            found |= new
            pending += new
        return sorted(found, key=self.number.__getitem__)


def _is_active(fact: Fact | None) -> bool:
    return fact is not None and fact.remat_source != RematSource.CONSTANT
