"""What must hold of every case, whatever it computes."""

import contextlib
import functools
import re
import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxamp_like
from jaxamp_like import presets, rules

from . import runtime, structure
from .cases import Case
from .oracle import (
    Endless,
    Evaluator,
    Rounding,
    RoundingEverything,
    Undecided,
    as_numpy,
    follow,
)

FACTOR = 4.0  # that an error may be of the oracle's, or of its neighbours'
ULPS = 64  # of the largest element of a result, which the order of sums may cost
DRAWS = 6  # of the oracle with its roundings moved, before something is called wrong
SECONDS = 60.0  # for one case


class Discard(Exception):
    """A case says nothing: it fails as written, too."""


@dataclass(frozen=True)
class Failure:
    """A check that a case breaks, and how."""

    check: str
    what: str

    @property
    def kind(self) -> str:
        """What makes two failures the same: the check, and an error that is raised."""
        return (
            f"{self.check}: {re.sub(r'[0-9]+', '', self.what)[:60]}"
            if (self.check in ("raise", "run", "jaxpr", "compile"))
            else self.check
        )

    def __str__(self) -> str:
        return f"{self.check}: {self.what}"


class Broken(Exception):
    def __init__(self, check: str, what: str):
        super().__init__(f"{check}: {what}")
        self.failure = Failure(check, what)


class OutOfTime(BaseException):
    """Not an `Exception`, so that nothing on the way takes it for one of its own."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises `OutOfTime` in the main thread; elsewhere there is no limit.

    Time of the processor: how busy a machine is says nothing of a case."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def expire(signum, frame):
        raise OutOfTime

    before = signal.signal(signal.SIGPROF, expire)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


Wrap = Callable[[Any], Any]


@dataclass
class Traced:
    jaxpr: Any
    args: list[Any]  # the leaves of the arguments
    tree: Any
    avals: list[Any]
    warned: set[str]


@dataclass(frozen=True)
class Outcome:
    """What came of a case: nothing to say, a broken check, or neither."""

    discarded: str | None = None
    failure: Failure | None = None
    numbers: bool = False  # values were compared, not types alone


def check(case: Case, *, compiled: bool = False) -> Outcome:
    """Puts a case to every check; `compiled` runs it compiled as well."""
    try:
        with _configured(case), time_limit(SECONDS):
            return Outcome(numbers=_check(case, compiled))
    except Discard as e:
        return Outcome(discarded=str(e))
    except Broken as e:
        return Outcome(failure=e.failure)
    except OutOfTime:
        return Outcome(failure=Failure("time", f"more than {SECONDS:.0f} s"))


@contextlib.contextmanager
def _configured(case: Case) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        if case.x64:
            stack.enter_context(_flag("jax_enable_x64"))
        if case.checks:
            stack.enter_context(_flag("jax_enable_checks"))
        if case.has_mesh:
            stack.enter_context(runtime.in_mesh())
        yield


@contextlib.contextmanager
def _flag(name: str) -> Iterator[None]:
    jax.config.update(name, True)
    try:
        yield
    finally:
        jax.config.update(name, False)


def _check(case: Case, compiled: bool) -> bool:
    names = vars(runtime) | vars(presets) | vars(rules) | vars(jaxamp_like)
    names = {k: v for k, v in names.items() if not k.startswith("__")}
    try:
        exec(case.source(), names)
        plain = _trace(names["build"], lambda f: f)
    except OutOfTime:
        raise Discard("out of time as written") from None
    except Exception as e:
        raise Discard(f"{type(e).__name__}: {e}") from None
    leaks = jax.checking_leaks() if case.leaks else contextlib.nullcontext()
    try:
        with leaks:
            mixed = _trace(
                names["build"], lambda f: jaxamp_like.amp(f, **names["settings"])
            )
    except Exception as e:
        raise Broken("raise", _told(e)) from e
    _check_types(plain, mixed)
    _check_jaxpr(plain.jaxpr, mixed.jaxpr)
    _check_structure(case, plain, mixed)
    if compiled:
        _check_runs(plain, mixed)
    return _check_values(case, plain, mixed)


def _told(e: BaseException) -> str:
    lines = [line for line in str(e).splitlines() if line.strip()]
    return f"{type(e).__name__}: {' / '.join(lines[:3])[:400]}"


def _trace(build: Callable[[Wrap], Any], wrap: Wrap) -> Traced:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        f, args = build(wrap)
        jaxpr, out = jax.make_jaxpr(f, return_shape=True)(*args)
    leaves, tree = jax.tree.flatten(out)
    avals = [v.aval for v in getattr(jaxpr, "jaxpr", jaxpr).outvars]
    # How a scope is spelt is the caller's business, and some hold nothing.
    warned = {
        f"{w.category.__name__}: {w.message}"
        for w in caught
        if "matched nothing" not in str(w.message)
        # A rule of the user's that makes infinity of a literal.
        and "overflow encountered in cast" not in str(w.message)
    }
    del leaves
    return Traced(jaxpr, jax.tree.leaves(args), tree, avals, warned)


def _check_types(plain: Traced, mixed: Traced) -> None:
    if plain.tree != mixed.tree:
        raise Broken("tree", f"{mixed.tree}, not {plain.tree}")
    for i, (want, got) in enumerate(zip(plain.avals, mixed.avals, strict=True)):
        if (want.shape, want.dtype) != (got.shape, got.dtype):
            raise Broken("type", f"result {i} is {got}, not {want}")
        if getattr(want, "weak_type", False) != getattr(got, "weak_type", False):
            raise Broken("weak type", f"result {i}: {got.weak_type}, not written so")
        if want.sharding != got.sharding:
            raise Broken("type", f"result {i} is sharded {got.sharding}, not {want}")
    if news := mixed.warned - plain.warned:
        raise Broken("warning", "; ".join(sorted(news))[:400])


def _check_jaxpr(plain: Any, mixed: Any) -> None:
    """JAX's own check of types; it does not know all that JAX itself makes."""
    check = getattr(jax.extend.core, "check_jaxpr", None) or jax.core.check_jaxpr
    try:
        check(getattr(plain, "jaxpr", plain))
    except Exception:
        return
    try:
        check(getattr(mixed, "jaxpr", mixed))
    except Exception as e:
        raise Broken("jaxpr", _told(e)) from e


# Derivatives of what has no 16-bit kernel are contractions in full; so are solvers.
_IN_FULL = "amp_stop linalg cov solve cg( gmres kron fft".split()


def _check_structure(case: Case, plain: Traced, mixed: Traced) -> None:
    if not case.outer and (lost := structure.lost(plain.jaxpr, mixed.jaxpr)):
        raise Broken("structure", f"lost: {lost}")
    if case.oracle not in ("default", "contractions"):
        return
    source = case.source()
    if not any(word in source for word in _IN_FULL):
        if left := structure.left_in_full(mixed.jaxpr):
            raise Broken("left in full", left)


def _check_runs(plain: Traced, mixed: Traced) -> None:
    try:
        _compiled(plain)
    except Exception as e:
        raise Discard(f"compiled, {type(e).__name__}: {e}") from None
    try:
        _compiled(mixed)
    except Exception as e:
        raise Broken("compile", _told(e)) from e


def _compiled(traced: Traced) -> list[Any]:
    run = jax.core.eval_jaxpr
    inner, consts = getattr(traced.jaxpr, "jaxpr", traced.jaxpr), traced.jaxpr.consts
    return jax.jit(lambda *args: run(inner, consts, *args))(*traced.args)


def _check_values(case: Case, plain: Traced, mixed: Traced) -> bool:
    with _or_discard("as written"):
        want = _run(case, Evaluator(), plain)
    try:
        got = _run(case, Evaluator(), mixed)
    except Endless as e:
        raise Broken("endless", str(e)) from e
    except Exception as e:
        raise Broken("run", _told(e)) from e
    pairs = [(i, x, y) for i, (x, y) in enumerate(zip(want, got, strict=True))]
    for i, x, y in pairs:
        if x.shape != y.shape or x.dtype != y.dtype:
            raise Broken(
                "run", f"result {i} is {y.dtype}{y.shape}, not {x.dtype}{x.shape}"
            )
    if case.oracle == "none" and not case.lean:
        for i, x, y in pairs:
            if not _same_bits(x, y):
                raise Broken("identity", f"result {i}: {_differing(x, y)}")
        return True
    # The systems that other policies follow round what is moved beside something low.
    if not case.is_compiled and case.oracle in ("default", "contractions"):
        _check_moved(plain, got)
    _check_errors(case, plain, want, got)
    return True


@contextlib.contextmanager
def _or_discard(where: str) -> Iterator[None]:
    try:
        yield
    except Exception as e:
        raise Discard(f"{where}, {type(e).__name__}: {e}") from None


def _run(case: Case, evaluator: Evaluator, traced: Traced) -> list[np.ndarray]:
    def run(*args):
        return evaluator.end(evaluator.run(traced.jaxpr, evaluator.begin(args)))

    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if not case.is_compiled:
            outs = run(*map(as_numpy, traced.args))
        elif type(evaluator) is Evaluator:
            outs = _compiled(traced)
        else:
            outs = jax.jit(run)(*traced.args)
    return [_numbers(x) for x in outs]


def _oracle(case: Case, evaluator: Evaluator, plain: Traced) -> list[np.ndarray]:
    with _or_discard("oracle"):
        return _run(case, evaluator, plain)


def _numbers(x: Any) -> np.ndarray:
    if jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x)


def _same_bits(x: np.ndarray, y: np.ndarray) -> bool:
    return x.tobytes() == y.tobytes() or np.array_equal(
        x.astype(np.complex128), y.astype(np.complex128), equal_nan=True
    )


def _differing(x: np.ndarray, y: np.ndarray) -> str:
    where = tuple(np.argwhere(~((x == y) | ((x != x) & (y != y))))[0])
    return f"{y[where]!r}, not {x[where]!r} at {tuple(map(int, where))}"


def _check_moved(plain: Traced, got: Sequence[np.ndarray]) -> None:
    """What a program only moves keeps every bit."""
    try:
        with np.errstate(all="ignore"):
            elements, ids = follow(plain.jaxpr, list(map(as_numpy, plain.args)))
    except (Undecided, Endless):
        return
    for i, (y, where) in enumerate(zip(got, ids, strict=True)):
        if y.dtype != np.float32 or not where.any():
            continue
        mask = where > 0
        x = elements[where[mask] - 1]
        if not _same_bits(x, y[mask]):
            raise Broken("moved", f"result {i}: {_differing(x, y[mask])}")


def _check_errors(
    case: Case, plain: Traced, want: Sequence[np.ndarray], got: Sequence[np.ndarray]
) -> None:
    makers = _oracles(case)
    rounded = [_oracle(case, make(None), plain) for make in makers]
    # Tangents of what is low are added up low: there a sum may leave the range.
    is_narrow = jnp.finfo(case.dtype).maxexp < 128 and bool(case.outer)
    limit = float(jnp.finfo(case.dtype).max) / 16 if is_narrow else np.inf

    def complaint(i):
        return _complaint(want[i], got[i], [outs[i] for outs in rounded], i, limit)

    suspect = [i for i in range(len(want)) if complaint(i)]
    if not suspect:
        return
    if not case.is_compiled:
        # Neighbours of the oracle: is the program itself so easily turned?
        for seed in range(DRAWS):
            rounded += [_oracle(case, make(seed), plain) for make in makers]
    for i in suspect:
        if found := complaint(i):
            raise Broken(*found)


DEFAULT_ORACLE = "contractions"  # what the default policy is held against


def _oracles(case: Case) -> list[Callable[[int | None], Rounding]]:
    kind = DEFAULT_ORACLE if case.oracle == "default" else case.oracle
    kinds = {
        "none": [],
        "contractions": [Rounding],
        "all": [Rounding, RoundingEverything],
        "asked": [Rounding, RoundingEverything],
    }
    # A rule that names a dtype means it, whatever the compute dtype.
    dtypes = ["bfloat16", "float16"] if kind == "asked" else [case.dtype]
    return [functools.partial(make, dtype) for make in kinds[kind] for dtype in dtypes]


def _complaint(
    x: np.ndarray, y: np.ndarray, refs: Sequence[np.ndarray], i: int, limit: float
) -> tuple[str, str] | None:
    """What is wrong with result `i`, if its error is more than rounding explains.

    Beyond `limit` it may be infinite."""
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        wrong = x != y
        for ref in refs:
            wrong &= x == ref  # a choice that rounding turns is none to look at
        if wrong.any():
            return "integers", f"result {i}: {_differing(x, np.where(wrong, y, x))}"
        return None
    x, y = x.astype(np.complex128), y.astype(np.complex128)
    refs = [ref.astype(np.complex128) for ref in refs]
    with np.errstate(all="ignore"):
        known = np.isfinite(x)
        for ref in refs:
            known &= np.isfinite(ref)
        if not known.any():
            return None
        known &= np.isfinite(y) | (np.abs(x) < limit)
        if not known.any():
            return None
        if not np.isfinite(y[known]).all():
            return "finite", f"result {i}: {_differing(x[known], y[known])}"
        error = np.abs(x - y)[known].max()
        allowed = max((np.abs(x - ref)[known].max() for ref in refs), default=0.0)
        floor = ULPS * np.finfo(np.float32).eps * np.abs(x[known]).max()
    if error <= FACTOR * allowed + floor + 1e-30:
        return None
    return "error", f"result {i}: {error:.3g}, the oracle's {allowed:.3g}"
