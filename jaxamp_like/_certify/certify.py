"""`certify`: compiles a function and compares the result with what was decided."""

import gc
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple

import jax
import jax.export

from .._errors import explaining_arguments, explaining_misfits
from .._hlo.devices import as_device, placed
from .._hlo.graph import program
from .._hlo.numbers import union
from .._hlo.text import Module, full_name, parse
from .._jax import compiling_by_names, hlo_printer, is_array_or_shape, traced_afresh
from .._policies.dictionary import REWRITTEN
from .._reports.call import flat_call, function_name
from .._reports.data.records import Phase
from .._reports.versions import versions
from .._rewrite.record import Recorder, recording
from .._rewrite.solvers import without_solver_scope
from .._structural import Step
from .._suggestions import closest
from . import lock as locks
from .arrays import LARGE
from .certificate import Certificate
from .drifts import (
    DUPLICATED,
    GONE,
    REDUCED_LOW,
    SUMS,
    UNDECIDED,
    adds_low,
    found,
    of_sending,
    together,
)
from .operations import Operation, Platform, operations
from .places import named, source_of
from .records import Certified, StoredArray
from .stored import CompiledArray, stored
from .tie import Tied, tie

HEAD_START = 0.1  # seconds that compiling has alone


def _instead(parameters: Mapping[str, Any], args: Any, kwargs: Any) -> list[str]:
    """What to write in the place of keywords that `certify` has not."""
    others = [name for name in kwargs if name not in parameters]
    close = [closest(name, parameters) for name in others]
    told = [f"Did you mean `{name}`?" for name in close if name]
    if others and not told:
        given = ", ".join(f"{name}=..." for name in others)
        told = [f"Keywords of the step: `certify(functools.partial(step, {given}))`."]
    return [*told, "Write `certify(amp(step, compute_dtype='bfloat16'), *arguments)`."]


@explaining_misfits("certify", _instead)
def certify(
    step: Any, *args: Any, device: Any = None, lock: str | Path | None = None
) -> Certificate:
    """Compiles `step` and says of every operation whether it runs as decided.

    What was decided is the program that JAX hands to XLA, with the casts that `amp` put
    there. XLA may leave casts out, add others, or run things twice. The certificate
    compares both programs: each contraction, sum, collective and rounding to 8 bits.
    Nothing is run.

    Args:
        step: a function, jitted or not, such as a whole training step with `amp` in it;
            or what its `lower(...)` gives, and then no `args`.
        args: its positional arguments; `jax.ShapeDtypeStruct`s will do for arrays.
            Models and other pytrees may hold what is no array. For keyword arguments,
            use `functools.partial`.
        device: the device to compile for, which may be one that is not there: as
            described by `jax.experimental.topologies`, or the name "h200", "b200",
            "v4", "v5e", "v5p", "v6e" or "tpu7x". Without it, that of the arguments'
            shardings, or JAX's default device.
        lock: a lock file that `Certificate.save` wrote, to be compared with.
    Returns:
        The certificate.
    Raises:
        TypeError: `step` is none of these, or is lowered and has `args`; or `device` is
            no device.
        ValueError: the compiled program can't be read, or `device` is no name that is
            known, or `lock` is no lock file of this function and these arguments.
        ImportError: the compiler for the named device is not installed.
        AmpError: something runs in another precision than `lock` says; the message is
            the difference, line by line.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> from jaxamp_like import amp
    >>> def loss(w, x):
    ...     with jax.named_scope("encoder"):
    ...         return jnp.mean(jnp.tanh(x @ w) ** 2)
    >>> w, x = jnp.ones((64, 32)), jnp.ones((16, 64))
    >>> certificate = certify(jax.grad(amp(loss, compute_dtype="bfloat16")), w, x)
    >>> certificate.is_as_decided
    True
    >>> certificate.operations[0].scope, certificate.operations[0].decided
    ('encoder', 'bfloat16 x bfloat16 -> bfloat16')
    """
    device = None if device is None else as_device(device, "device")
    if lock is not None:
        lock = locks.as_path(lock, "lock")
        locks.read(lock)  # raises before anything is compiled
    recorder = Recorder()
    if isinstance(step, jax.stages.Compiled):
        raise TypeError(
            "`step` is compiled already, and what was decided is not in it: give the "
            "function, or what its `lower(...)` gives."
        )
    if isinstance(step, jax.export.Exported):
        raise TypeError(
            "`step` is exported already, and the names of its equations are not in it: "
            "give the function that was exported."
        )
    if isinstance(step, jax.stages.Traced):
        step = step.lower()
    step = getattr(step, "lowered", step)  # as Equinox wraps it
    if isinstance(step, jax.stages.Lowered):
        if args or device is not None:
            raise TypeError(
                "`step` is lowered already, for its arguments and its device: leave "
                "out `args` and `device`."
            )
        lowered = step
    else:
        lowered = _lowered(step, args, device, recorder)
    decided, compiled = _both_programs(lowered)
    target = device or _device_of(compiled)
    certificate = compared(
        decided,
        compiled.as_text(),
        name=_name_of(step),
        device=target,
        steps=recorder.steps,
    )
    if lock is not None:
        certificate.check(lock)
    return certificate


@contextmanager
def uncollected() -> Iterator[None]:
    """Pauses Python's garbage collector.

    The instructions of two programs are so many objects that it would run again and
    again, each time over all that JAX holds, too: a third of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@uncollected()
def compared(
    decided: str | None,
    compiled: str | None,
    *,
    name: str,
    device: Any,
    steps: Sequence[Step] = (),
    large: int = LARGE,
) -> Certificate:
    """The certificate of two programs.

    Args:
        decided: what JAX hands to XLA, as HLO.
        compiled: what XLA makes of it.
        name: of the function.
        device: what it was compiled for.
        steps: the decisions, by the numbers that names in HLO have.
        large: how many bytes an array has that is compared."""
    before, after = program(_parsed(decided)), program(_parsed(compiled))
    platform = _platform(device)
    tied = tie(operations(before, platform), operations(after, platform))
    arrays = stored(before, after, platform, large)
    return Certificate(
        name=name or before.module.name.removeprefix("jit_"),
        platform=platform,
        device=device.device_kind,
        arguments=_arguments(before.module),
        operations=tuple(_certified(tied, steps)),
        arrays=tuple(_array(one, steps) for one in arrays.compiled),
        kept={full_name(dtype): size for dtype, size in arrays.decided.items()},
        versions=versions(),
        has_amp=REWRITTEN in (decided or ""),
    )


_JITTED = type(jax.jit(lambda: None))


def _lowered(step: Any, args: Any, device: Any, recorder: Recorder) -> Any:
    if not callable(step):
        is_later = any(map(callable, args))
        raise TypeError(
            f"`step` must be a function, or what its `lower(...)` gives, but got "
            f"{type(step).__name__}. Write `certify(step, x)`, not "
            f"`certify({'x, step' if is_later else 'step(x)'})`."
        )
    jitted: Any = step
    given = args
    if not isinstance(step, _JITTED):  # it may take what is no array
        call = flat_call(step, args, {}, (), _name_of(step))
        jitted, args = jax.jit(call.fn), call.arrays
    if device is not None:
        args = placed(args, device)
    can_be_called = explaining_arguments(
        step,
        given,
        f"`step` can't be called with {len(given)} arguments: {{why}}. Write "
        "`certify(step, *arguments)`, with arrays or their shapes "
        "(`jax.ShapeDtypeStruct`).",
    )
    for leaf in filter(is_array_or_shape, jax.tree.leaves(args)):
        if any(map(jax.export.is_symbolic_dim, leaf.shape)):
            raise ValueError(
                f"An argument has the symbolic shape {leaf.shape}, and XLA compiles "
                "for numbers: give arguments of the sizes that `step` is to run with."
            )
    with can_be_called, recording(recorder), traced_afresh():
        try:
            return jitted.lower(*args)
        except RuntimeError as error:
            if device is None or "Unknown backend" not in str(error):
                raise
            raise ValueError(
                "`step` calls Python back, as `jax.debug.print` and "
                "`jax.pure_callback` do, and JAX can't write that down for a "
                f"{device.platform} that is not there. Leave these calls out for a "
                "certificate."
            ) from error


def _both_programs(lowered: jax.stages.Lowered) -> tuple[str, jax.stages.Compiled]:
    """What JAX hands to XLA, as HLO, and what XLA makes of it.

    XLA takes a second to print a large program, and compiles in that time."""
    printer, has_compiled = hlo_printer(lowered), Event()

    def printed() -> str:
        # Printing holds Python's lock, and compiling needs it only to begin.
        has_compiled.wait(HEAD_START)
        return printer()

    with ThreadPoolExecutor(1) as pool:
        text = pool.submit(printed)
        try:
            with compiling_by_names():
                compiled = lowered.compile()
        finally:
            has_compiled.set()
        return text.result(), compiled


def _name_of(step: Any) -> str:
    """The name of a function; "" of what is lowered, whose program has it."""
    return "" if isinstance(step, jax.stages.Lowered) else function_name(step)


def _parsed(text: str | None) -> Module:
    if not text:
        raise ValueError("XLA does not give the text of the compiled program.")
    return parse(text)


def _device_of(compiled: Any) -> Any:
    shardings = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    devices = (one for sharding in shardings for one in sharding.device_set)
    return next(devices, jax.devices()[0])


def _platform(device: Any) -> Platform:
    if device.platform in ("gpu", "cuda", "rocm"):
        return "gpu"
    return "tpu" if device.platform == "tpu" else "cpu"


def _arguments(module: Module) -> tuple[str, ...]:
    entry = module.computations[module.entry].values()
    parameters = [one for one in entry if one.opcode == "parameter"]
    return tuple(
        f"{one.shape.dtype}[{','.join(map(str, one.shape.dims))}]"
        for one in sorted(parameters, key=lambda one: int(one.literal))
    )


# ------------------------------------------------------------------------- comparing


def _certified(tied: Tied, steps: Sequence[Step]) -> Iterator[Certified]:
    became: dict[Operation, list[Operation]] = defaultdict(list)
    for one, runs in tied.pairs:
        became[runs[0]].append(one)
    for one, runs in tied.pairs:
        others = [each for each in became[runs[0]] if each is not one]
        drifts = list(found(together(one, others), runs))
        if not tied.repeated.isdisjoint(runs):
            drifts.append(DUPLICATED)
        yield _record(one, one, runs, drifts, steps)
    for one in tied.gone:
        yield _record(one, one, [], (GONE,), steps)
    decided = [*tied.gone, *(one for one, _ in tied.pairs)]
    # XLA adds kernels of its own. They are reported only if a decided kernel is gone,
    # which one of them may stand in for.
    unknown = {one.kind for one in tied.gone if one.kind == "kernel"}
    for one in tied.others:
        if one.kind == "collective":  # by the partitioner, for an equation's sharding
            yield _record(one, None, [one], _of_partitioner(one, decided), steps)
        elif one.kind == "contraction" or one.kind in unknown or "fmha" in one.opcode:
            yield _record(one, None, [one], (UNDECIDED,), steps)


def _of_partitioner(one: Operation, decided: Iterable[Operation]) -> Iterator[str]:
    """The drifts of a collective that no equation asked for."""
    alike = (other for other in decided if other.op_name == one.op_name != "")
    returned = union(other.returns for other in alike)
    yield from of_sending(one, returned)
    if one.opcode in SUMS and not returned.are_in(union(one.reads)):
        yield REDUCED_LOW


def _record(
    place: Operation,
    decided: Operation | None,
    runs: Sequence[Operation],
    drifts: Iterable[str],
    steps: Sequence[Step],
) -> Certified:
    where, step = _place(place.op_name, steps)
    return Certified(
        kind=place.kind,
        scope=where.scope,
        phase=where.phase,
        primitive=where.primitive or place.opcode,
        source=place.source,
        decided=_signature(decided) if decided else "",
        compiled=tuple(dict.fromkeys(_compiled(run, decided) for run in runs)),
        stored=tuple(dict.fromkeys(map(_stored, runs))),
        arithmetic=next((run.arithmetic for run in runs), ""),
        opcodes=tuple(dict.fromkeys(run.opcode for run in runs)),
        drifts=tuple(dict.fromkeys(drifts)),
        work=place.flops * place.times,
        times=place.times,
        why=step.decision.why if step else "",
    )


def _array(one: CompiledArray, steps: Sequence[Step]) -> StoredArray:
    where, _ = _place(one.node.op_name, steps)
    return StoredArray(
        scope=where.scope,
        phase=where.phase,
        primitive=where.primitive or one.node.one.opcode,
        source=source_of(one.node),
        decided=full_name(one.decided.one.shape.dtype) if one.decided else "",
        stored=full_name(one.dtype),
        size=one.size,
        times=one.node.body.times,
        is_kept=one.is_kept,
        drift=one.drift,
    )


class _Place(NamedTuple):
    scope: str
    phase: Phase
    primitive: str


def _place(op_name: str, steps: Sequence[Step]) -> tuple[_Place, Step | None]:
    """Where an operation of this name stands, and the decision behind it."""
    names = named(op_name)
    number = names.step
    step = steps[number] if number is not None and number < len(steps) else None
    # In a checkpoint, JAX 0.6 names what comes of transposing a call as if it were
    # recomputed; only the decision tells that it is not.
    is_gradient = step is not None and step.backward and not names.is_transposed
    # The decision knows the author's scopes exactly.
    inner = without_solver_scope(step.scope) if step else names.inner
    scope = "/".join([*names.outer, *inner])
    phase: Phase = "backward" if is_gradient else names.phase
    return _Place(scope, phase, names.primitive), step


def _signature(one: Operation) -> str:
    """Such as "bfloat16 x bfloat16 -> float32"."""
    reads = " x ".join(numbers.name or "constants" for numbers in one.reads)
    return f"{reads or _stored(one)} -> {one.makes.name or 'constants'}"


def _compiled(run: Operation, decided: Operation | None) -> str:
    """The signature of what was compiled, and what it adds up if that is less."""
    adds = decided is not None and adds_low(decided, run)
    return _signature(run) + f", adding up {run.adds_in.name}" * adds


def _stored(one: Operation) -> str:
    """The dtypes of the operands, such as "float32 x float32"."""
    return " x ".join(map(full_name, one.stored))
