"""Statistics of the results of equations, on the device, in one pass over the data.

Every array becomes one row of numbers, and codes of a sample of its elements. The rows
of a block of equations (the body of a loop, or all that is outside of loops) are then
made one table, with a row for each equation. It tells which of them made inf of finite
inputs, and which lost numbers that their inputs still had. The tables of a loop's
iterations are merged, and the worst iteration of each equation is remembered. So the
device does little more than read the data, and only the tables leave it."""

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ..._dtypes import bits, is_float

FORMATS = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")

SAMPLE = 2**15
"""Elements that histograms are made of at most; ranges and counts see every element."""

# A code is the exponent and the first four bits of the mantissa of a float32.
_MANTISSA = 4
BINS = 2 ** (8 + _MANTISSA)

# Beyond this, a value is a mask; its rounding would drown all other errors.
_MASK = 2.0**100


class Statistics(NamedTuple):
    """Measurements of one array: magnitudes, and shares of elements.

    Those called `exact` are of the values in the author's dtypes."""

    largest: Any  # of the finite
    smallest: Any  # of those that are not zero; inf if there are none
    nonfinite: Any
    nan: Any
    zero: Any
    gone: Any  # zero here, and not in the author's dtype
    lost: Any  # as `gone`, if the author's value is below the normal range of the dtype
    exact_largest: Any
    exact_smallest: Any
    exact_nonfinite: Any
    deviation: Any  # sum of |run - exact|
    magnitude: Any  # sum of |exact|
    clipped: Any = 0.0  # of the operand, if it is rounded to 8 bits; see `rounding`
    flushed: Any = 0.0


_NUM_RANGE = 5  # columns that tell what an operand was like
_SUMS = (
    "nonfinite",
    "nan",
    "zero",
    "gone",
    "lost",
    "exact_nonfinite",
    "clipped",
    "flushed",
    "deviation",
    "magnitude",
)
_SHARES = _SUMS[:8]
_LEAST = ("smallest", "exact_smallest")


class Extreme(NamedTuple):
    """The largest amount of something in one run, and the first run that had as much.

    One row for each equation. Iterations of loops are columns of indices, outermost
    loop first."""

    amount: Array
    iteration: Array
    read: Array  # measurements of the operands in that run


class Table(NamedTuple):
    """Measurements of the float results of equations, over all their runs so far.

    One row for each equation."""

    runs: Array
    rows: Array  # `Statistics`: extremes, and sums and shares of all runs together
    error: Extreme  # sum |run - exact| / sum |exact|, see `_errors`; operands' largest
    made_nonfinite: Extreme  # 1 if inf of finite, or NaN of no NaN; operands' ranges
    vanished: Extreme  # the share lost beyond what operands had lost; their ranges
    histogram: Array  # of the codes of sampled exact magnitudes


_EXTREMES = ("error", "made_nonfinite", "vanished")


def row_dtype() -> Any:
    """The dtype of statistics: the widest that there is."""
    return jax.dtypes.canonicalize_dtype(float)


def measure(
    run: Array, exact: Array | None, chunk: int | None = None
) -> tuple[Array, Array, list[Array]]:
    """Measures one float array.

    Args:
        run: the array as the program computes it.
        exact: in the author's dtype; `None` where it is the same.
        chunk: how many elements to reduce at a time, a multiple of 256; all at once if
            not given.
    Returns:
        The `Statistics` as a vector, codes of sampled elements of `exact`, and
        temporary arrays, whose memory can be used again."""
    if run.size == 0:
        return no_row(), _codes(jnp.zeros(1)), []
    arrays = [run] if exact is None else [run, exact]
    tiny = float(jnp.finfo(run.dtype).tiny) if is_float(run.dtype) else 0.0
    find = functools.partial(_of_elements, tiny)
    if chunk is None or not chunk <= run.size < 2**31:  # starts are of 32 bits
        reduced, scratch = _reduced(find(*arrays)), []
    else:
        reduced, scratch = _reduced_by_chunks(find, arrays, chunk)
    reduced |= {k: v / run.size for k, v in reduced.items() if k in _SHARES}
    if exact is None:
        same = {f"exact_{k}": reduced[k] for k in ("largest", "smallest", "nonfinite")}
        zero = jnp.zeros((), row_dtype())
        reduced |= same | dict.fromkeys(
            ("gone", "lost", "deviation", "magnitude"), zero
        )
    none = dict.fromkeys(("clipped", "flushed"), jnp.zeros((), row_dtype()))
    return (
        jnp.stack(Statistics(**reduced, **none)),
        _codes(run if exact is None else exact),
        scratch,
    )


def rounded(row: Array, clipped: Any, flushed: Any) -> Array:
    """The `Statistics` of a result whose operand is rounded to 8 bits.

    Before a cast to integers, numbers are rounded as floats. The range of these floats
    holds the numbers that become zero, so `lost` would not count them."""
    one = Statistics(*row)
    lost = jnp.where(flushed > 0, one.gone, one.lost)
    return jnp.stack(one._replace(lost=lost, clipped=clipped, flushed=flushed))


def _of_elements(tiny: float, run: Array, exact: Array | None = None) -> dict[str, Any]:
    """What each element adds to the statistics: a number, or whether it is counted."""
    x = run.astype(row_dtype())
    a = jnp.abs(x)
    found = {
        "largest": jnp.where(a < jnp.inf, a, 0),
        "smallest": jnp.where(a > 0, a, jnp.inf),
        "nonfinite": ~(a < jnp.inf),
        "nan": x != x,
        "zero": x == 0,
    }
    if exact is None:
        return found
    y = exact.astype(row_dtype())
    b = jnp.abs(y)
    is_gone = (x == 0) & (b > 0)
    is_counted = b < _MASK
    deviation = jnp.where(x == x, jnp.abs(x - y), jnp.inf)
    return found | {
        "gone": is_gone,
        "lost": is_gone & (b < tiny),
        "exact_largest": jnp.where(b < jnp.inf, b, 0),
        "exact_smallest": jnp.where(b > 0, b, jnp.inf),
        "exact_nonfinite": ~(b < jnp.inf),
        "deviation": jnp.where(is_counted, deviation, 0),
        "magnitude": jnp.where(is_counted, b, 0),
    }


def _operation(name: str) -> Callable[[Any, Any], Any]:
    return lax.add if name in _SUMS else lax.min if name in _LEAST else lax.max


def _neutral(name: str) -> float:
    """The neutral element: merging it with a statistic of this name changes nothing."""
    return np.inf if name in _LEAST else 0.0


def _initial(name: str) -> Array:
    return jnp.asarray(_neutral(name), row_dtype())


def _reduced(arrays: dict[str, Array]) -> dict[str, Array]:
    """Reduces arrays of one shape in one pass, first each row, for accurate sums."""
    names = list(arrays)
    values = [x.astype(row_dtype()) for x in arrays.values()]
    shape = values[0].shape
    values = [v.reshape(-1, shape[-1] if shape else 1) for v in values]
    ops, inits = [_operation(k) for k in names], tuple(_initial(k) for k in names)

    def combine(xs, ys):
        return tuple(op(x, y) for op, x, y in zip(ops, xs, ys, strict=True))

    for axis in (1, 0):
        values = lax.reduce(tuple(values), inits, combine, (axis,))
    return dict(zip(names, values, strict=True))


def _reduced_by_chunks(
    find: Callable[..., dict[str, Array]], arrays: Sequence[Array], chunk: int
) -> tuple[dict[str, Array], list[Array]]:
    """Reduces what `find` makes of arrays, with accumulators as long as a chunk.

    XLA's CPU backend compiles a reduction of many arrays to a scalar loop. It compiles
    this to vector code, and chunks stay in the cache. Shares are first counted together
    in one integer, which has a few bits for each."""
    # To slice a narrow float array, XLA would first copy all of it to float32.
    read = [_as_bits(x.ravel()) for x in arrays]
    count, rest = divmod(arrays[0].size, chunk)

    def found(start, length):
        parts = (lax.dynamic_slice(x, (start,), (length,)) for x in read)
        pairs = zip(parts, arrays, strict=True)
        return find(*(lax.bitcast_convert_type(part, x.dtype) for part, x in pairs))

    def step(i, state):
        columns, counts = state
        new = found(i * chunk, chunk)
        for flag, unit in zip(shares, units, strict=True):
            counts += jnp.where(new[flag], unit, np.int32(0))
        return {k: _operation(k)(x, new[k]) for k, x in columns.items()}, counts

    def some_steps(i, columns):
        first = i * _MOST_COUNTED
        last = jnp.minimum(first + _MOST_COUNTED, count)
        counted = {k: columns[k] for k in shares}
        others = {k: x for k, x in columns.items() if k not in shares}
        state = others, jnp.zeros(chunk, jnp.int32)
        others, counts = lax.fori_loop(first, last, step, state)
        for flag, unit in zip(shares, units, strict=True):
            counted[flag] += (counts // unit & _MOST_COUNTED).astype(row_dtype())
        return others | counted

    columns = found(count * chunk, rest)
    shares = [k for k, x in columns.items() if x.dtype == bool]
    units = [np.int32((_MOST_COUNTED + 1) ** i) for i in range(len(shares))]
    columns = {
        k: jnp.pad(
            x.astype(row_dtype()), (0, chunk - rest), constant_values=_initial(k)
        )
        for k, x in columns.items()
    }
    columns = lax.fori_loop(0, -(-count // _MOST_COUNTED), some_steps, columns)
    scratch = [x for x, y in zip(read, arrays, strict=True) if x.dtype != y.dtype]
    return _reduced({k: x.reshape(-1, 256) for k, x in columns.items()}), scratch


_MOST_COUNTED = 31  # six such counts fit into an integer


def _as_bits(x: Array) -> Array:
    if not is_float(x.dtype):
        return x
    return lax.bitcast_convert_type(x, _BITS.get(bits(x.dtype), x.dtype))


_BITS = {8: jnp.uint8, 16: jnp.uint16}


def _codes(x: Array) -> Array:
    """Codes of at most `SAMPLE` elements, evenly spread, whatever the shape."""
    flat = x.ravel()
    stride = max(-(-flat.size // SAMPLE), 1)
    # The stride is coprime to the size, or it could only see a few columns.
    while stride > 1 and math.gcd(stride, flat.size) > 1:
        stride += 1
    sample = jnp.abs(flat[::stride].astype(jnp.float32))
    return lax.bitcast_convert_type(sample, jnp.int32) >> (23 - _MANTISSA)


def histograms(codes: Sequence[Array]) -> Array:
    """One histogram for each array of codes, by one scatter."""
    owner = np.repeat(np.arange(len(codes)), [c.size for c in codes])
    counts = jnp.zeros((len(codes), BINS), jnp.float32)
    return counts.at[owner, jnp.concatenate(codes)].add(1, mode="promise_in_bounds")


def bin_edges() -> np.ndarray:
    """The smallest magnitude of each bin."""
    bits = np.arange(BINS, dtype=np.int32) << (23 - _MANTISSA)
    return bits.view(np.float32)


def limits(name: str) -> tuple[float, float]:
    """The least magnitude that overflows in a format, and the largest that is flushed.

    To overflow is to round beyond the largest number, to be flushed to round to zero.
    """
    info = jnp.finfo(name)
    largest = float(info.max)
    half_ulp = 2.0 ** (math.floor(math.log2(largest)) - info.nmant - 1)
    return largest + half_ulp, float(info.smallest_subnormal) / 2


def combined(rows: Sequence[Array], sizes: Sequence[int]) -> Array:
    """One row for several results of an equation."""
    if len(rows) == 1:
        return rows[0]
    parts = [Statistics(*row) for row in rows]
    weights = np.asarray(sizes) / max(sum(sizes), 1)

    def of(name):
        values = jnp.stack([getattr(part, name) for part in parts])
        if name in _SHARES:
            return jnp.sum(values * jnp.asarray(weights, values.dtype))
        if name in _SUMS:
            return jnp.sum(values)
        return (jnp.min if name in _LEAST else jnp.max)(values)

    return jnp.stack([of(name) for name in Statistics._fields])


def tabulate(rows: Array, inputs: Array, adds_up: Array, histogram: Array) -> Table:
    """The table of one run of some equations.

    Args:
        rows: one for each equation.
        inputs: the rows of its operands, as many for each; see `no_row`.
        adds_up: whether each is a sum, which may cancel.
        histogram: of the codes of its results."""
    row, read = Statistics(*rows.T), Statistics(*jnp.moveaxis(inputs, -1, 0))
    made = (row.nonfinite > 0) & ~(read.nonfinite > 0).any(-1)
    made |= (row.nan > 0) & ~(read.nan > 0).any(-1)
    terms = read.magnitude.max(-1, initial=0)
    is_noise = adds_up & (row.magnitude < _NOISE * terms)
    nowhere = jnp.zeros((len(rows), 0), jnp.int32)
    ranges = inputs[..., :_NUM_RANGE]
    return Table(
        runs=jnp.ones(len(rows), jnp.int32),
        rows=rows,
        error=Extreme(
            _errors(row.deviation, jnp.where(is_noise, terms, row.magnitude)),
            nowhere,
            _errors(read.deviation, read.magnitude).max(-1, initial=0),
        ),
        made_nonfinite=Extreme(made.astype(jnp.int32), nowhere, ranges),
        vanished=Extreme(
            jnp.maximum(row.lost - read.gone.max(-1, initial=0), 0), nowhere, ranges
        ),
        histogram=histogram,
    )


# If a sum is smaller than this fraction of its terms in the author's dtypes, it is only
# their rounding error: the gradient of a bias before a softmax, say, which is zero.
_NOISE = 2.0**-17


def _errors(deviation: Array, scale: Array) -> Array:
    """Deviations divided by `scale`; inf where that gives NaN."""
    error = jnp.where(deviation == 0, 0, deviation / scale)
    return jnp.where(jnp.isnan(error), jnp.inf, error)


def no_row() -> Array:
    """The row of an empty array."""
    # As one array: each that JAX makes outside of a trace takes 100 microseconds.
    return jnp.asarray(np.asarray([*map(_neutral, Statistics._fields)]), row_dtype())


def at_iteration(table: Table, i: Any) -> Table:
    """The table as seen from outside of a loop, of which `i` is the iteration."""

    def deeper(one):
        ahead = jnp.full((one.iteration.shape[0], 1), i, jnp.int32)
        return one._replace(iteration=jnp.concatenate([ahead, one.iteration], axis=1))

    return table._replace(**{k: deeper(getattr(table, k)) for k in _EXTREMES})


def no_runs(like: Any) -> Table:
    """A table of no run yet, of the types that `like` has."""
    zeros: Table = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
    # Less than the error of any run, so that the first one counts as the worst.
    error = zeros.error._replace(amount=zeros.error.amount - 1)
    return zeros._replace(rows=zeros.rows + no_row(), error=error)


def merge(a: Table, b: Table) -> Table:
    """The table of the runs of `a`, followed by those of `b`."""

    def larger(x: Extreme, y: Extreme) -> Extreme:
        def pick(p, q):
            return jnp.where(is_y.reshape(-1, *[1] * (p.ndim - 1)), q, p)

        is_y = y.amount > x.amount
        return jax.tree.map(pick, x, y)

    rows = [
        _operation(name)(x, y)
        for name, x, y in zip(Statistics._fields, a.rows.T, b.rows.T, strict=True)
    ]
    return Table(
        runs=a.runs + b.runs,
        rows=jnp.stack(rows, axis=1),
        histogram=a.histogram + b.histogram,
        **{k: larger(getattr(a, k), getattr(b, k)) for k in _EXTREMES},
    )


def merge_parts(stacked: Table) -> Table:
    """The table of one run whose parts ran side by side, from their stacked tables."""
    parts = stacked.runs.shape[0]
    each = [jax.tree.map(operator.itemgetter(i), stacked) for i in range(parts)]
    merged = functools.reduce(merge, each)
    shares = np.asarray(
        [1 / parts if n in _SHARES else 1.0 for n in Statistics._fields]
    )
    rows = merged.rows * jnp.asarray(shares, merged.rows.dtype)
    return merged._replace(runs=each[0].runs, rows=rows)
