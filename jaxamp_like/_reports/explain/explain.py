"""`explain`: traces a function and tells what the rewrite made of it."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from jax.typing import DTypeLike

from ..._errors import AmpError
from ..._hlo.devices import as_device
from ..._jax import Eqn, Jaxpr, raw
from ..._policies.mistakes import naming_mistakes
from ..._primitives.matmul_precision import setting
from ..._quantised.block_dot import BLOCK_DOT
from ..._rewrite.findings.inner_gradients import note_of_inner_gradients
from ..._rewrite.findings.unlowered import note_of_another_16_bits
from ..._rewrite.record import Recorder
from ..._rules import Match
from ..._structural import Step, steps_of
from .. import walk
from ..call import FlatCall
from ..data.records import CastRecord, OpRecord, Program, RuleRecord, SavedRecord
from ..report import Report
from ..reported_function import ReportedFunction
from ..settings import key_name, rule_name, settings_of
from ..versions import versions
from .compiled import compiled_memory


@naming_mistakes
def explain(
    fn: Callable[..., Any],
    *,
    compute_dtype: DTypeLike | None = None,
    amp_policy: Any = None,
    strict: bool = False,
    lean: bool | str = False,
    argnums: int | Sequence[int] | None = None,
    compile: Any = False,
) -> Callable[..., Report]:
    """Reports the precision of each part of `fn`, without running it.

    The report is made of the plan that `amp` followed and of the resulting program, so
    it tells what runs. Printed, it is a table; see `Report` for the rest.

    Args:
        fn: the function that runs, such as the gradient of `amp(loss)` or a whole
            training step. Without settings it is reported as it is, also where there
            is no `amp` inside, which the report then says; with settings, what
            `amp(fn)` with these would run is reported.
        compute_dtype: as for `amp`.
        amp_policy: as for `amp`.
        strict: as for `amp`.
        lean: as for `amp`.
        argnums: as for `amp`: the arguments that hold parameters. If `fn` has no
            backward pass of its own, the report tells what one would keep that
            differentiates by these, or by the first argument.
        compile: whether to compile the function too, as written and as it runs, so that
            the report tells what results and temporaries take: `True` for the devices
            of the arguments, or a device or the name of one, as for `certify`. It
            takes as long as compiling does, twice.
    Returns:
        A function with the signature of `fn` that returns a `Report`. Arrays among the
        arguments may be given as `jax.ShapeDtypeStruct`s.
    Raises:
        TypeError, ValueError: an argument is of the wrong kind.
        ImportError: the compiler for the device that `compile` names is not installed.
        AmpError: as from `amp`. Whatever `fn` raises when it is traced is raised too.

    >>> import jax.numpy as jnp
    >>> def loss(w, x):
    ...     return jnp.mean(jnp.tanh(x @ w) ** 2)
    >>> w, x = jnp.ones((4, 3)), jnp.ones((2, 4))
    >>> report = explain(loss, compute_dtype="bfloat16")(w, x)
    >>> report.now.totals.flops_by_dtype, report.now.totals.low_share
    ({'bfloat16': 48}, 1.0)
    >>> report.now.casts[0].why
    'dot_general reads bfloat16: computes in bfloat16'
    >>> [(one.name, one.num_bytes) for one in report.arguments]
    [('w', 48), ('x', 32)]
    """
    device = None
    if not isinstance(compile, bool):
        device = as_device(compile, "compile", "`True`, `False`, ")
    subject = ReportedFunction(
        fn,
        "explain",
        compute_dtype=compute_dtype,
        amp_policy=amp_policy,
        strict=strict,
        lean=lean,
        argnums=argnums,
    )

    def reported(*args: Any, **kwargs: Any) -> Report:
        call, recorder, jaxpr = subject.trace(args, kwargs, differentiates=True)
        now = _program(call, jaxpr, recorder)
        as_written = Recorder(as_written=True)
        written = _program(call, call.trace(as_written), as_written)
        if compile is not False:
            compiled = partial(compiled_memory, call, jaxpr, device)
            after = compiled(as_written=False)
            # Without any `amp` inside, both programs are the same.
            before = compiled(as_written=True) if recorder.plans else after
            now = replace(now, compiled=after)
            written = replace(written, compiled=before)
        return Report(
            name=call.name,
            settings=settings_of(recorder),
            now=now,
            written=written,
            rules=tuple(_rules_fired(recorder)),
            versions=versions(),
            arguments=subject.arguments(args, kwargs, raw(jaxpr).invars),
            notes=tuple(_notes(recorder)),
        )

    return subject.wraps(reported)


def _notes(recorder: Recorder) -> Iterator[str]:
    """What may be better written otherwise."""
    if note := note_of_inner_gradients(plan for _, plan in recorder.plans):
        yield note
    for planner, plan in recorder.plans:
        steps = list(steps_of(plan))
        if note := note_of_another_16_bits(planner.compute_dtype, steps):
            yield note
    dtypes = [planner.compute_dtype for planner, _ in recorder.plans]
    low = next((dtype.name for dtype in dtypes if dtype.itemsize < 4), None)
    if low and setting() in _FULL:
        yield (
            f"`jax_default_matmul_precision` is {setting()!r}, which holds of what "
            f"runs as written; what `amp` lowers computes in {low}"
        )


_FULL = ("highest", "float32")


# ------------------------------------------------------------------------- the program


def _program(call: FlatCall, jaxpr: Jaxpr, recorder: Recorder) -> Program:
    ops, casts = [], []
    is_step = False
    for eqn, at, is_structural in walk.walk(jaxpr, recorder.steps):
        is_step |= at.phase == "backward"
        if walk.is_float_cast(eqn):
            casts.append(_cast(eqn, at))
        if not is_structural:
            ops.append(_op(eqn, at))
    if is_step:
        saved = walk.saved_residuals(jaxpr, recorder.steps)
        made = walk.gradients(jaxpr, recorder.steps)
        return Program(tuple(ops), tuple(casts), saved, gradients=made)
    saved, why = _saved_by_derivative(call, recorder.as_written)
    return Program(tuple(ops), tuple(casts), saved, why)


def _saved_by_derivative(
    call: FlatCall, as_written: bool
) -> tuple[tuple[SavedRecord, ...] | None, str]:
    """What the derivative keeps, or why there is none."""
    if not call.active:
        return None, "no argument that `argnums` names holds floating arrays"
    recorder = Recorder(as_written)
    try:
        jaxpr, num_outs = call.trace_residuals(recorder)
    except Exception as e:
        # The function itself could be traced, so it has no derivative, as host
        # callbacks have none.
        what = "" if isinstance(e, AmpError) else f"{type(e).__name__}: "
        return None, what + next(iter(str(e).splitlines()), "")
    return walk.residuals(jaxpr, num_outs, recorder.steps), ""


def _op(eqn: Eqn, at: walk.ReportContext) -> OpRecord:
    step = at.step
    written = [*step.eqn.invars, *step.eqn.outvars] if step else []
    num_flops = walk.flops(eqn)
    reads = walk.contraction_dtypes(eqn) if num_flops else walk.dtype_names(eqn.invars)
    return OpRecord(
        place=at.place(eqn),
        primitive=eqn.primitive.name,
        author=step.eqn.primitive.name if step else "",
        written=walk.dtype_names(written),
        reads=reads,
        makes=walk.dtype_names(eqn.outvars),
        shape=tuple(getattr(eqn.outvars[0].aval, "shape", ())) if eqn.outvars else (),
        key=": ".join(_keys(step.match)) if step else "",
        rule=rule_name(step.match.rule) if step else "",
        why=_why(at),
        flops=num_flops,
        **_eight_bits(eqn, step),
    )


def _eight_bits(eqn: Eqn, step: Step | None) -> dict[str, Any]:
    """The fields of a record that only contractions in 8 bits have."""
    made = step.decision.eight_bits if step else None
    if made is None or not walk.flops(eqn):
        return {}
    # Operands in blocks stand after the same operands as they were before.
    read = eqn.invars[2:5:2] if eqn.primitive is BLOCK_DOT else eqn.invars[:2]
    dtypes = [atom.aval.dtype for atom in read]
    if all(dtype.itemsize > 1 for dtype in dtypes):
        return {}
    operands = tuple(dtype.name for dtype in dtypes)
    return {"operands": operands, "scales": made.scales, "runs": made.runs}


def _why(at: walk.ReportContext) -> str:
    if at.step is not None:
        return at.step.decision.why
    return "results are handed back as written" if at.in_amp else "outside of amp"


def _cast(eqn: Eqn, at: walk.ReportContext) -> CastRecord:
    old, new = eqn.invars[0].aval.dtype.name, eqn.outvars[0].aval
    inserted, why = _why_cast(at, new.dtype)
    shape = tuple(new.shape)
    return CastRecord(at.place(eqn), old, new.dtype.name, shape, inserted, why)


def _why_cast(at: walk.ReportContext, new: Any) -> tuple[bool, str]:
    """Whether `amp` made a cast, and what for."""
    step = at.step
    if step is None:
        return at.in_amp, _why(at)
    name, why = step.eqn.primitive.name, step.decision.why
    if name == "convert_element_type":
        return False, why
    if at.phase == "backward":
        return True, f"the derivative of {name}'s casts: {why}"
    is_read = new in step.decision.reads
    text = f"{name} {'reads' if is_read else 'hands on'} {new.name}: {why}"
    if at.phase == "recomputed":
        text += "; made again rather than saved"
    return True, text


# --------------------------------------------------------------------------- the rules


def _rules_fired(recorder: Recorder) -> Iterator[RuleRecord]:
    """The keys that decided something, most first; then those that never did."""
    own: set[str] = set()
    rules: dict[str, dict[str, None]] = defaultdict(dict)  # names of rules, in order
    for planner in dict.fromkeys(planner for planner, _ in recorder.plans):
        own |= set(map(key_name, planner.policy.own_keys()))
        for key, rule in planner.policy.items():
            rules[key_name(key)][rule_name(rule)] = None
    leaves = [step.match for step in recorder.steps if step.handler is None]
    count = Counter(key for found in leaves for key in _keys(found))
    for found in leaves:
        if key_name(found.key) not in rules:  # `amp_stop`, what is outside of a limit
            rules[key_name(found.key)][rule_name(found.rule)] = None
    for key in sorted(rules, key=lambda key: -count[key]):
        yield RuleRecord(key, ", ".join(rules[key]), count[key], key in own)


def _keys(match: Match) -> list[str]:
    """The keys that led to a rule: of a map, of a limit, and that of the rule."""
    return list(dict.fromkeys(map(key_name, (*reversed(match.also), match.key))))
