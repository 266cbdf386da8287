"""`certify`: compiles a function and compares the result with what was decided."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax

from .._hlo.numbers import Numbers, union
from .._hlo.text import Module, parse
from .._jax import traced_afresh
from .._reports.versions import versions
from .._rewrite.record import Recorder, recording
from .certificate import Certificate, Certified
from .drifts import GONE, REDUCED_LOW, SUMS, UNDECIDED, found, of_sending
from .operations import Operation, Platform, operations
from .places import named, source_of
from .tie import tie


def certify(step: Any, *args: Any, device: Any = None) -> Certificate:
    """Compiles `step` and says of every operation whether it runs as decided.

    What was decided is the program that JAX hands to XLA, with the casts that `amp` put
    there. XLA may leave casts out, add others, or run things twice. The certificate
    compares both programs: each contraction, sum, collective and rounding to 8 bits.

    Args:
        step: a function, jitted or not, such as a whole training step with `amp` in it;
            or what its `lower(...)` gives, and then no `args`.
        args: its positional arguments: arrays, or `jax.ShapeDtypeStruct`s.
        device: the device to compile for, which may be a described one that
            `jax.experimental.topologies` gives. Without, that of the arguments' shardings,
            or JAX's default device.
    Returns:
        The certificate.
    Raises:
        TypeError: `step` is none of these, or `args` are given to what is lowered.
        ValueError: the compiled program can't be read.

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
    recorder = Recorder()
    if isinstance(step, jax.stages.Lowered):
        if args or device is not None:
            raise TypeError(
                "`step` is lowered already, for its arguments and device: leave out "
                "`args` and `device`."
            )
        lowered, name = step, ""
    else:
        lowered, name = _lowered(step, args, device, recorder), _name_of(step)
    before = parse(_text(lowered.as_text(dialect="hlo", debug_info=True)))
    compiled = lowered.compile()
    after = parse(_text(compiled.as_text()))
    target = _device_of(compiled, device)
    platform = _platform(target)
    decided, run = operations(before, platform), operations(after, platform)
    return Certificate(
        name=name or before.entry,
        platform=platform,
        device=target.device_kind,
        arguments=_arguments(before),
        operations=tuple(_certified(decided, run, recorder)),
        versions=versions(),
    )


def _lowered(step: Any, args: Any, device: Any, recorder: Recorder) -> Any:
    if not callable(step):
        raise TypeError(
            f"`step` must be a function, or what its `lower(...)` gives, but got "
            f"{type(step).__name__}. Write `certify(step, x)`, not `certify(step(x))`."
        )
    if device is not None:
        args = _placed(args, device)
    jitted = step if hasattr(step, "lower") else jax.jit(step)
    with recording(recorder), traced_afresh():
        return jitted.lower(*args)


def _placed(args: Any, device: Any) -> Any:
    """The shapes of all arrays, on a device."""
    sharding = jax.sharding.SingleDeviceSharding(device)

    def place(x: Any) -> Any:
        if not hasattr(x, "shape") or not hasattr(x, "dtype"):
            return x
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree.map(place, args)


def _name_of(step: Callable[..., Any]) -> str:
    name = getattr(step, "__name__", None)
    return name if isinstance(name, str) else type(step).__name__


def _text(text: str | None) -> str:
    if not text:
        raise ValueError("XLA does not give the text of the compiled program.")
    return text


def _device_of(compiled: Any, device: Any) -> Any:
    shardings = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    devices = [one for sharding in shardings for one in sharding.device_set]
    return device or next(iter(devices), jax.devices()[0])


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


def _certified(
    decided: list[Operation], compiled: list[Operation], recorder: Recorder
) -> Iterable[Certified]:
    tied = tie(decided, compiled)
    for one, runs in tied.pairs:
        yield _record(one, one, runs, tuple(dict.fromkeys(found(one, runs))), recorder)
    for one in tied.gone:
        yield _record(one, one, [], (GONE,), recorder)
    for one in tied.others:
        if one.kind == "collective":  # by the partitioner, for an equation's sharding
            yield _record(one, None, [one], tuple(dict.fromkeys(_of_partitioner(one, decided))), recorder)
        elif one.kind == "contraction":
            yield _record(one, None, [one], (UNDECIDED,), recorder)


def _of_partitioner(one: Operation, decided: list[Operation]) -> Iterator[str]:
    """The drifts of a collective that no equation asked for."""
    yield from of_sending(one)
    sums = [other for other in decided if other.op_name == one.op_name]
    if sums and one.opcode in SUMS and not union(
        other.makes for other in sums
    ).are_in(union(one.reads)):
        yield REDUCED_LOW


def _record(
    place: Operation,
    decided: Operation | None,
    runs: list[Operation],
    drifts: tuple[str, ...],
    recorder: Recorder,
) -> Certified:
    names = named(place.op_name)
    step = None if names.step is None else recorder.steps[names.step]
    return Certified(
        kind=place.kind,
        scope=names.scope,
        phase=names.phase,
        primitive=names.primitive or place.opcode,
        source=source_of(place.node),
        decided=_signature(decided) if decided else "",
        compiled=tuple(dict.fromkeys(map(_signature, runs))),
        stored=tuple(dict.fromkeys(" x ".join(run.stored) for run in runs)),
        arithmetic=next((run.arithmetic for run in runs), ""),
        opcodes=tuple(dict.fromkeys(run.opcode for run in runs)),
        drifts=drifts,
        work=place.work if place.kind in ("contraction", "collective") else 0,
        times=place.times,
        why=step.decision.why if step else "",
    )


def _signature(one: Operation) -> str:
    """Such as "bfloat16 x bfloat16 -> float32"."""
    reads = " x ".join(map(_shown, one.reads or map(_named, one.stored)))
    return f"{reads} -> {_shown(one.makes)}"


def _shown(numbers: Numbers) -> str:
    return numbers.name or "constants"


def _named(dtype: str) -> Numbers:
    return Numbers(0, 0, dtype)
