"""`trace_numerics`: runs a function once and tells what became of its numbers."""

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from ..._dtypes import is_float
from ..._jax import Eqn, Literal, consts, is_tracer
from ..._policies.mistakes import naming_mistakes
from .. import walk
from ..call import FlatCall
from ..data.numbers import Event, InputRange, OpNumerics
from ..extras import need, shows_progress
from ..report import NumericsReport
from ..reported_function import ReportedFunction
from ..settings import settings_of
from ..versions import versions
from .blocks import PART, MeasuredEqn
from .interpret import Interpreter
from .loops import num_ticks
from .pairs import Pair
from .statistics import FORMATS, Extreme, Statistics, Table, bin_edges, limits


@naming_mistakes
def trace_numerics(
    fn: Callable[..., Any],
    *,
    compute_dtype: DTypeLike | None = None,
    amp_policy: Any = None,
    strict: bool = False,
    lean: bool | str = False,
    argnums: int | Sequence[int] | None = None,
    progress: bool | None = None,
) -> Callable[..., NumericsReport]:
    """Runs `fn` in mixed precision and in its author's dtypes, and compares both.

    Every equation, forward and backward, at any depth, is measured: the range of its
    results, a histogram of exponents, the share that float16, bfloat16 and the 8-bit
    formats could not hold, the error against the author's dtypes at the same inputs,
    and where the first inf or NaN arises. All iterations of a loop are reported
    together, with the worst of them. This runs on the device, and only summaries leave
    it.

    Every equation rounds as the program says. When XLA compiles the program as a whole,
    it may skip roundings between equations that it fuses, so an overflow that is found
    here may occur on one device and not on another.

    Args:
        fn: what to run, such as the gradient of `amp(loss)` or a whole training step.
            Without settings it is run as it is, also where there is no `amp` inside,
            which tells the ranges as written; with settings, `amp(fn)` with these is
            run.
        compute_dtype: as for `amp`.
        amp_policy: as for `amp`.
        strict: as for `amp`.
        lean: as for `amp`.
        argnums: as for `amp`.
        progress: whether to show a progress bar; if not given, it is shown when rich is
            installed and the error stream is a terminal.
    Returns:
        A function with the signature of `fn` that returns a `NumericsReport`.
    Raises:
        TypeError, ValueError: an argument is of the wrong kind, or an array without
            values (a tracer or a shape).
        AmpError: as from `amp`. Whatever `fn` raises when it is traced is raised too.
        NotImplementedError: `fn` works on mutable arrays.

    >>> import jax.numpy as jnp
    >>> def loss(w, x):
    ...     with jax.named_scope("head"):
    ...         return jnp.sum(1e3 * (x @ w))
    >>> w, x = jnp.full((4, 3), 99.0), jnp.ones((2, 4))
    >>> report = trace_numerics(loss, amp_policy={"head": "float16"})(w, x)
    >>> culprit = report.first_nonfinite
    >>> culprit.primitive, culprit.place.scope, culprit.made_nonfinite.inputs[1].largest
    ('mul', 'head', 396.0)
    """
    subject = ReportedFunction(
        fn,
        "trace_numerics",
        compute_dtype=compute_dtype,
        amp_policy=amp_policy,
        strict=strict,
        lean=lean,
        argnums=argnums,
    )

    def traced(*args: Any, **kwargs: Any) -> NumericsReport:
        call, recorder, jaxpr = subject.trace(args, kwargs)
        _check_concrete([*call.arrays, *consts(jaxpr)], call.name)
        with _progress(progress, num_ticks(jaxpr)) as tick:
            interpreter = Interpreter(recorder.steps, tick)
            pairs = [Pair(x) for x in call.arrays]
            _, found = interpreter.run(jaxpr, pairs)
            found = jax.device_get(found)
        ops = [
            _op(seen, jax.tree.map(operator.itemgetter(i), table))
            for (path, part), table in found.items()
            for seen, i in zip(  # rows of a last part are padded
                interpreter.seen[path][part * PART :],
                range(len(table.runs)),
                strict=False,
            )
        ]
        return NumericsReport(
            name=call.name,
            nonfinite_arguments=_nonfinite(call),
            settings=settings_of(recorder),
            ops=tuple(sorted(ops, key=lambda op: op.order)),
            versions=versions(),
        )

    return subject.wraps(traced)


def _nonfinite(call: FlatCall) -> tuple[str, ...]:
    """Which of the arrays that a function is called on hold inf or NaN."""
    floats = [
        (n, x)
        for n, x in zip(call.names, call.arrays, strict=True)
        if is_float(x.dtype)
    ]
    finite = jax.device_get([jnp.isfinite(x).all() for _, x in floats])
    return tuple(n for (n, _), good in zip(floats, finite, strict=True) if not good)


def _check_concrete(arrays: Sequence[Any], name: str) -> None:
    for x in arrays:
        if is_tracer(x):
            raise TypeError(
                f"`trace_numerics` runs {name!r}, so it needs arrays with values, but "
                f"was given the tracer {x}. Call it outside of `jax.jit` and other "
                "transformations; what it is given may be jitted or a gradient."
            )
        if isinstance(x, jax.ShapeDtypeStruct):
            raise TypeError(
                f"`trace_numerics` runs {name!r}, so it needs arrays with values, but "
                f"was given {x}. `explain` takes shapes."
            )


@contextmanager
def _progress(
    wanted: bool | None, total: int
) -> Iterator[Callable[[Eqn, walk.ReportContext], None]]:
    if not shows_progress(wanted):
        yield lambda eqn, at: None
        return
    console = need("rich.console", "rich").Console(stderr=True)
    with need("rich.progress", "rich").Progress(console=console) as bar:
        task = bar.add_task("Running", total=total)

        def tick(eqn, at):
            what = f"{'/'.join(at.scope)} {eqn.primitive}"
            bar.update(task, advance=1, description=what[-40:].ljust(40))

        yield tick


# ------------------------------------------------------------------------- the records


def _op(seen: MeasuredEqn, one: Table) -> OpNumerics:
    """The record of one equation; `one` is its row of the table."""
    eqn, at, runs = seen.eqn, seen.at, int(one.runs)
    row = Statistics(*map(float, one.rows))
    largest, smallest = row.exact_largest, _smallest(row.exact_smallest)
    elements, counts = max(sum(seen.sizes) * runs, 1), np.asarray(one.histogram)
    counts = counts * _IS_COUNTED
    over, under = {}, {}
    for name in FORMATS:
        most, least = limits(name)
        over[name] = _share(counts, _EDGES >= most, largest >= most, elements)
        under[name] = _share(counts, _EDGES < least, 0 < smallest <= least, elements)
    made = one.made_nonfinite.amount > 0
    vanished = float(one.vanished.amount)
    worst = one.made_nonfinite if made else one.error
    of_all = ("nonfinite", "lost", "clipped", "flushed")
    return OpNumerics(
        place=at.place(eqn),
        primitive=eqn.primitive.name,
        author=at.step.eqn.primitive.name if at.step else "",
        dtype=seen.made[0].aval.dtype.name,
        written=seen.written[0],
        shape=tuple(seen.made[0].aval.shape),
        runs=runs,
        largest=row.largest,
        smallest=_smallest(row.smallest),
        **{k: getattr(row, k) / max(runs, 1) for k in of_all},
        written_largest=largest,
        written_smallest=smallest,
        histogram=_by_exponent(counts),
        overflow=over,
        underflow=under,
        error=max(float(one.error.amount), 0.0),
        read_error=float(one.error.read),
        worst=tuple(map(int, one.error.iteration)),
        made_nonfinite=_event(seen, one.made_nonfinite) if made else None,
        nonfinite_as_written=row.exact_nonfinite > 0,
        vanished=vanished,
        vanished_event=_event(seen, one.vanished) if vanished else None,
        order=_order(seen, worst.iteration),
    )


_EDGES = bin_edges()
_IS_COUNTED = (_EDGES > 0) & np.isfinite(_EDGES)  # neither zero, inf nor NaN


def _by_exponent(counts: np.ndarray) -> dict[int, float]:
    exponents = np.frexp(np.where(_IS_COUNTED, _EDGES, 1))[1] - 1
    total = max(counts.sum(), 1)
    used = np.unique(exponents[counts > 0])
    return {int(e): float(counts[exponents == e].sum() / total) for e in used}


def _smallest(x: Any) -> float:
    """`x`, or 0 if it is inf since there was no number to be the smallest."""
    return float(x) if np.isfinite(x) else 0.0


def _share(
    counts: np.ndarray, bins: np.ndarray, any_at_all: bool, elements: int
) -> float:
    # The range covers all elements, so it shows elements that the sample has missed.
    if not any_at_all:
        return 0.0
    return max(float(counts[bins].sum() / max(counts.sum(), 1)), 1 / elements)


def _event(seen: MeasuredEqn, one: Extreme) -> Event:
    return Event(
        iteration=tuple(map(int, one.iteration)),
        inputs=tuple(
            InputRange(
                dtype=atom.aval.dtype.name,
                shape=tuple(atom.aval.shape),
                largest=float(row[0]),
                smallest=_smallest(row[1]),
                nonfinite=float(row[2]),
                zero=float(row[4]),
                is_literal=isinstance(atom, Literal),
            )
            for atom, row in zip(seen.reads, one.read, strict=False)  # padded
        ),
    )


def _order(seen: MeasuredEqn, iteration: Any) -> tuple[int, ...]:
    """When it happened: equations and iterations as they follow each other."""
    order: list[int] = []
    start = 0
    for loop, i in zip(seen.loops, map(int, iteration), strict=True):
        time = loop.length - 1 - i if loop.reverse else i
        order += [*seen.path[start : loop.depth], time]
        start = loop.depth
    return (*order, *seen.path[start:])
