"""What must hold of every case, whatever it computes."""

import contextlib
import dataclasses
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
from jaxamp_like._jax import register_rules_of_transforms

from . import quantised, runtime, structure
from .cases import DERIVATIVES, Case, name_of
from .oracle import (
    MAX_EQUATIONS,
    AddingLow,
    Dithered,
    DitheredProducts,
    Endless,
    Evaluator,
    Jitter,
    Rounding,
    RoundingEverything,
    RoundingProducts,
    TooLong,
    Undecided,
    as_numpy,
    follow,
)
from .replay import Replayed

FACTOR = 4.0  # that an error may be of the oracle's, or of its neighbours'
ULPS = 64  # of the largest element of a result, which the order of sums may cost
LEAF_FACTOR = 2.0  # that the error of a leaf may be of the largest of the oracle's
LEAF_FLOOR = 2e-5  # of the norm of a leaf, which may be added to it
ILL = 0.3  # of the norm of a leaf: an oracle that is so far off says nothing of it
DRAWS = 6  # of the oracle with its roundings moved, before something is called wrong
SECONDS = 60.0  # for one case


# The first call of `amp` registers these rules. Cases must not depend on their order.
register_rules_of_transforms()


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

    @functools.cached_property
    def contents(self) -> structure.Contents:
        return structure.Contents(self.jaxpr)

    @functools.cached_property
    def is_known(self) -> bool:
        """Whether JAX's own check of types knows all that is in it."""
        try:
            _check_types_of(self.jaxpr)
        except Exception:
            return False
        return True


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
    written = _as_written(case)
    plain = written.plain
    mixed = _rewritten(case, written)
    if mixed.contents.contracts and not plain.contents.contracts:
        raise Discard("of constants, and so computed while it is traced")
    _check_types(plain, mixed, weak=not case.is_differentiated)
    _check_jaxpr(case, written, mixed)
    _check_structure(case, written, mixed)
    _check_reads(case, mixed)
    if case.container is not None:
        _check_container(case, written, mixed)
    if compiled:
        _check_runs(plain, mixed)
    if case.tail is not None:
        _check_tail(case, written)
    return _check_values(case, written, mixed)


class Origin:
    """The program of a case, and what `amp` alone makes of it."""

    def __init__(self, case: Case):
        names = vars(runtime) | vars(presets) | vars(rules) | vars(jaxamp_like)
        self.names = {k: v for k, v in names.items() if not k.startswith("__")}
        exec("\n".join(case.program.lines()), self.names)
        self.program, self.args = self.names["program"], self.names["args"]
        self.replayed = Replayed(self.program)
        self._amps: dict[str, Any] = {}

    def amp(self, case: Case) -> Wrap:
        """How the function of a case is wrapped."""
        settings = eval(case.settings(), self.names)

        def wrap(f):
            f = jaxamp_like.amp(f, **settings)
            return jax.jit(f) if case.jitted else f

        def shared(f):
            if case.settings() not in self._amps:
                self._amps[case.settings()] = wrap(f)
            return self._amps[case.settings()]

        return shared if case.is_shared else wrap


class Written:
    """A case as written: what is the same whatever `amp` is asked for.

    Each part is found out when it is asked for first."""

    def __init__(self, case: Case, origin: Origin):
        self.origin = origin
        self.names = dict(origin.names)
        self._rounded: dict[Any, list[np.ndarray]] = {}
        exec(case.build_source(), self.names)
        self.plain = self.trace(case, lambda f: f)

    def trace(self, case: Case, wrap: Wrap) -> Traced:
        replayed, program = self.origin.replayed, self.origin.program
        self.names["program"] = replayed if case.is_replayed else program
        return _trace(self.names["build"], wrap)

    def seen_by_amp(self, case: Case) -> structure.Contents:
        """What `amp` is given: the program before the transforms around it."""
        names = dict(self.names)
        exec(dataclasses.replace(case, outer=()).build_source(), names)
        return _trace(names["build"], lambda f: f).contents

    def rebound(self, case: Case) -> Traced:
        """What JAX makes of the jaxpr that `amp` is given, bound again as it is."""

        def wrap(f):
            def bound(*args):
                jaxpr, out = jax.make_jaxpr(f, return_shape=True)(*args)
                outs = jax.extend.core.jaxpr_as_fun(jaxpr)(*jax.tree.leaves(args))
                return jax.tree.unflatten(jax.tree.structure(out), outs)

            return jax.jit(bound) if case.jitted else bound

        return self.trace(case, wrap)

    @functools.cached_property
    def results(self) -> list[np.ndarray]:
        try:
            return _run(Evaluator(), self.plain)
        except Exception as e:
            raise Discard(f"as written, {type(e).__name__}: {e}") from None

    @functools.cached_property
    def moved(self) -> tuple[np.ndarray, list[np.ndarray]] | None:
        """See `follow`; nothing if that can't be said."""
        try:
            with np.errstate(all="ignore"):
                return follow(self.plain.jaxpr, list(map(as_numpy, self.plain.args)))
        except (Undecided, Endless, TooLong):
            return None

    def rounded(
        self, kind: type[Rounding], dtype: str, seed: int | None
    ) -> list[np.ndarray]:
        """What an oracle makes of it."""
        key = kind, dtype, seed
        if key not in self._rounded:
            try:
                self._rounded[key] = _run(kind(dtype, seed), self.plain)
            except (Endless, TooLong) as e:  # any other fault is the oracle's own
                raise Discard(f"oracle, {type(e).__name__}: {e}") from None
        return self._rounded[key]


_last: dict[Any, Origin] = {}
_last_written: dict[Any, Written | Discard] = {}


def forget() -> None:
    """Lets go of what cases that come next might share."""
    _last.clear()
    _last_written.clear()


def _as_written(case: Case) -> Written:
    """The case as written, found out once for cases in a row that share it."""
    program = "\n".join(case.program.lines()), case.x64, case.checks
    key = *program, case.build_source()
    if key not in _last_written:
        _last_written.clear()
        try:
            if program not in _last:
                _last.clear()
                _last[program] = Origin(case)
            _last_written[key] = Written(case, _last[program])
        except OutOfTime:
            _last_written[key] = Discard("out of time as written")
        except Exception as e:
            _last_written[key] = Discard(f"{type(e).__name__}: {e}")
    known = _last_written[key]
    if isinstance(known, Discard):
        raise Discard(*known.args)
    return known


def _rewritten(case: Case, written: Written) -> Traced:
    leaks = jax.checking_leaks() if case.leaks else contextlib.nullcontext()
    wrap = written.origin.amp(case)
    try:
        with leaks:
            return written.trace(case, wrap)
    except Exception as e:
        _discard_if_ill_typed(written.plain)
        if _is_refused(case, e):
            raise Discard("a derivative that quantised contractions refuse") from None
        try:
            written.rebound(case)
        except Exception as of_jax:
            raise Discard(f"not even as written, {type(of_jax).__name__}") from None
        raise Broken("raise", _told(e)) from e


def _is_refused(case: Case, e: Exception) -> bool:
    """Whether it is of a derivative that a rule says to refuse: see `docs`.

    Of a second one where operands are kept in float8, and of a series (in a `jit`, it
    is JAX that can't take one of a function with a derivative of its own)."""
    is_series = any(name_of(t) == "jets" for t in case.outer)
    if is_series and case.oracle == "quantised":
        return "`jet` takes" in str(e) or "JetTracer" in str(e)
    is_twice = _derivatives(case.outer) > 1 or "grad" in case.source()
    return is_twice and "float8(keep='compute')" in str(e)


def _derivatives(transforms: Sequence[Any]) -> int:
    """How many derivatives transforms take."""
    return sum(2 if t in _TWICE else name_of(t) in DERIVATIVES for t in transforms)


_TWICE = ("hvp", "grad_of_grad")


def _discard_if_ill_typed(plain: Traced) -> None:
    """Not each jaxpr that JAX makes in a `shard_map` can be bound again as it is."""
    try:
        jax.make_jaxpr(jax.extend.core.jaxpr_as_fun(plain.jaxpr))(*plain.args)
    except Exception as e:
        raise Discard(f"ill-typed as written: {type(e).__name__}") from e


def _told(e: BaseException) -> str:
    lines = [line for line in str(e).splitlines() if line.strip()]
    return f"{type(e).__name__}: {' / '.join(lines[:3])[:400]}"


def _trace(build: Callable[[Wrap], Any], wrap: Wrap) -> Traced:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        f, args = build(wrap)
        try:
            jaxpr, out = jax.make_jaxpr(f, return_shape=True)(*args)
        except AssertionError as e:
            # So does `jax.vmap(jax.nn.relu)` of an array of NumPy, with JAX 0.10.
            if "non-canonical constant" in str(e):
                raise Discard("a constant of NumPy that is mapped over") from None
            raise
    leaves, tree = jax.tree.flatten(out)
    avals = [v.aval for v in getattr(jaxpr, "jaxpr", jaxpr).outvars]
    # How a scope is spelt is the caller's business, and some hold nothing.
    warned = {
        f"{w.category.__name__}: {w.message}"
        for w in caught
        if "matched nothing" not in str(w.message)
        # A rule of the user's that makes infinity of a literal.
        and "overflow encountered in cast" not in str(w.message)
        # Not each program has contractions of parameters.
        and "` would quantise" not in str(w.message)
        and "` could quantise" not in str(w.message)
        # In some, all are float16 before `amp` is asked for bfloat16.
        and "float16 as written" not in str(w.message)
        # In some, the author asks for the precision of all contractions.
        and "changes nothing: no contraction" not in str(w.message)
        # Some take a derivative by a weight that is in 4 bits.
        and "`int4` rounds a weight to 4 bits that a derivative" not in str(w.message)
        # In some, data come first and are contracted with what is given beside them.
        and "takes the first argument for the weight" not in str(w.message)
    }
    del leaves
    return Traced(jaxpr, jax.tree.leaves(args), tree, avals, warned)


def _check_types(plain: Traced, mixed: Traced, weak: bool) -> None:
    """The types of results; of derivatives that JAX takes of what `amp` made, the weak
    type depends on how JAX writes them down."""
    if plain.tree != mixed.tree:
        raise Broken("tree", f"{mixed.tree}, not {plain.tree}")
    for i, (want, got) in enumerate(zip(plain.avals, mixed.avals, strict=True)):
        if (want.shape, want.dtype) != (got.shape, got.dtype):
            raise Broken("type", f"result {i} is {got}, not {want}")
        is_weak, was_weak = (getattr(x, "weak_type", False) for x in (got, want))
        if weak and is_weak != was_weak:
            raise Broken("weak type", f"result {i}: {got.weak_type}, not written so")
        if want.sharding != got.sharding:
            raise Broken("type", f"result {i} is sharded {got.sharding}, not {want}")
    news = mixed.warned - plain.warned
    if plain.jaxpr.consts:  # a constant of the program may be what its data go through
        news = {one for one in news if "reads no other weight" not in one}
    if news:
        raise Broken("warning", "; ".join(sorted(news))[:400])


def _check_jaxpr(case: Case, written: Written, mixed: Traced) -> None:
    """JAX's own check of types; it does not know all that JAX itself makes."""
    if not written.plain.is_known:
        return
    try:
        _check_types_of(mixed.jaxpr)
    except Exception as e:
        # The checker of JAX 0.10 knows no `closed_call` with a name, which transposing
        # a checkpoint makes; it then fails itself, and says nothing of types.
        is_news = "unexpected keyword argument" not in str(e)
        if is_news and written.rebound(case).is_known:
            raise Broken("jaxpr", _told(e)) from e


def _check_types_of(jaxpr: Any) -> None:
    check = getattr(jax.extend.core, "check_jaxpr", None) or jax.core.check_jaxpr
    check(getattr(jaxpr, "jaxpr", jaxpr))


# Derivatives of what has no 16-bit kernel are contractions in full; so are solvers.
_IN_FULL = "amp_stop linalg cov solve cg( gmres kron fft".split()


def _check_structure(case: Case, written: Written, mixed: Traced) -> None:
    before, after = written.plain.contents, mixed.contents
    if not case.outer and (lost := structure.lost(before, after)):
        raise Broken("structure", f"lost: {lost}")
    # Derivatives that JAX takes of what is low are added up low.
    says_so = case.oracle == "asked" or case.policy in ("jaxamp()", "jmp()")
    if not case.outer and not says_so and not before.low_sum:
        if held := after.low_sum:
            raise Broken("low sum", held)
    if case.oracle not in ("default", "contractions"):
        return
    # Outside of `amp`, the derivative of a product may be a contraction, in full.
    if case.outer and before.has_products:
        return
    source = case.source()
    # JAX hands the backward rule in a forward rule on, for itself to run.
    if case.outer and "with_jvp(" in source and "with_vjp(" in source:
        return
    # The same of a contraction that is low by hand, with a wide result.
    if case.outer and "preferred_element_type=jnp.float32" in source:
        return
    if not any(word in source for word in _IN_FULL):
        left = structure.left_in_full(after)
        # Of what is an inner product for each example, `vmap` makes a contraction.
        if left and not (case.outer and written.seen_by_amp(case).has_products):
            raise Broken("left in full", left)


def _check_reads(case: Case, mixed: Traced) -> None:
    """What each contraction reads, where that is known beforehand.

    In a second derivative there are cotangents of all shapes."""
    is_twice = _derivatives(case.outer) + _derivatives(case.inner) > 1
    if case.oracle == "quantised" and is_twice:
        return
    for reads in case.reads:
        if wrong := mixed.contents.read_otherwise(reads):
            raise Broken("reads", wrong)


def _check_container(case: Case, written: Written, mixed: Traced) -> None:
    """What batches are handed over in changes no decision."""
    flat = dataclasses.replace(case, container=None, jitted=False, again=False)
    other = Written(flat, written.origin).trace(flat, written.origin.amp(flat))
    if news := mixed.contents.contractions - other.contents.contractions:
        raise Broken("container", f"{next(iter(news))} as a {case.container} alone")


def _check_tail(case: Case, written: Written) -> None:
    """A loss is that of the logits that are returned with it, also when compiled.

    With the flags that XLA has by itself, and with those that keep it from holding a
    number in more bits for one of its readers."""
    program, wrap = written.origin.program, written.origin.amp(case)
    tail = eval(f"lambda y: {case.tail}", dict(written.origin.names))

    def step(*args):
        def loss(*args):
            return wrap(program)(*args)

        value, grads = jax.value_and_grad(loss, has_aux=True, argnums=(0, 1))(*args)
        return *value, tail(value[1]), *grads

    lowered = jax.jit(step).lower(*written.origin.args)
    for flags in XLA_FLAGS:
        outs = lowered.compile(compiler_options=flags)(*written.origin.args)
        value, logits, again = map(np.asarray, outs[:3])
        exact = np.asarray(tail(jnp.asarray(logits)))
        size = float(jnp.sum(jnp.abs(logits))) + abs(float(value)) + 1.0
        allowed = ULPS * float(np.finfo(np.float32).eps) * size
        if not np.isfinite([value, again, exact]).all():
            continue
        if max(abs(value - again), abs(value - exact)) > allowed:
            raise Broken(
                "tail", f"{value}, but {again}, {exact} of its logits: {flags}"
            )


XLA_FLAGS: list[dict[str, Any]] = [{}, {"xla_allow_excess_precision": False}]


def _check_runs(plain: Traced, mixed: Traced) -> None:
    try:
        _compiled(mixed)
    except Exception as e:
        try:
            _compiled(plain)
        except Exception as e:
            raise Discard(f"compiled, {type(e).__name__}: {e}") from None
        raise Broken("compile", _told(e)) from e


def _compiled(traced: Traced) -> list[Any]:
    run = jax.core.eval_jaxpr
    inner, consts = getattr(traced.jaxpr, "jaxpr", traced.jaxpr), traced.jaxpr.consts
    return jax.jit(lambda *args: run(inner, consts, *args))(*traced.args)


def _check_values(case: Case, written: Written, mixed: Traced) -> bool:
    want = written.results
    try:
        # With casts, and with as many more steps as rounding may cost.
        got = _run(Evaluator(4 * MAX_EQUATIONS), mixed)
    except (Endless, TooLong) as e:
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
        if case.jitted and not all(_same_bits(x, y) for _, x, y in pairs):
            # A call's gradient may be added up in another order than its body's.
            want = _run(Evaluator(), written.trace(case, jax.jit))
        for i, (x, y) in enumerate(zip(want, got, strict=True)):
            if not _same_bits(x, y):
                raise Broken("identity", f"result {i}: {_differing(x, y)}")
        return True
    # The systems that other policies follow round what is moved beside something low.
    keeps_moved = ("default", "contractions", "quantised")
    if not case.is_placed and case.oracle in keeps_moved:
        _check_moved(written, got)
    _check_errors(case, written, want, got)
    is_known = case.oracle in ("default", "contractions") and not case.lean
    if case.is_strict and is_known and case.is_value_or_gradient:
        _check_leaves(case, written, want, got)
    return True


def _run(evaluator: Evaluator, traced: Traced) -> list[np.ndarray]:
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        args = evaluator.begin(list(map(as_numpy, traced.args)))
        outs = evaluator.end(evaluator.run(traced.jaxpr, args))
    return [_numbers(x) for x in outs]


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


def _check_moved(written: Written, got: Sequence[np.ndarray]) -> None:
    """What a program only moves keeps every bit."""
    if written.moved is None:
        return
    elements, ids = written.moved
    for i, (y, where) in enumerate(zip(got, ids, strict=True)):
        if y.dtype != np.float32 or not where.any():
            continue
        mask = where > 0
        x = elements[where[mask] - 1]
        if not _same_bits(x, y[mask]):
            raise Broken("moved", f"result {i}: {_differing(x, y[mask])}")


def _check_errors(
    case: Case, written: Written, want: Sequence[np.ndarray], got: Sequence[np.ndarray]
) -> None:
    oracles = _oracles(case)
    rounded = [written.rounded(*oracle, None) for oracle in oracles]
    # Tangents of what is low are added up low: there a sum may leave the range.
    is_narrow = jnp.finfo(case.dtype).maxexp < 128 and bool(case.outer)
    limit = float(jnp.finfo(case.dtype).max) / 16 if is_narrow else np.inf
    has_float16 = case.dtype == "float16" or '"float16"' in case.policy
    largest = float(jnp.finfo("float16").max) if has_float16 else np.inf

    def complaint(i):
        refs = [outs[i] for outs in rounded]
        return _complaint(want[i], got[i], refs, i, limit, largest)

    suspect = [i for i in range(len(want)) if complaint(i)]
    if not suspect:
        return
    # Neighbours of the oracle: is the program itself so easily turned?
    if oracles:
        oracles += [(Jitter, "float32"), *[(AddingLow, case.dtype)] * is_narrow]
    for seed in range(DRAWS):
        rounded += [written.rounded(*oracle, seed) for oracle in oracles]
    for i in suspect:
        if found := complaint(i):
            raise Broken(*found)


def _check_leaves(
    case: Case, written: Written, want: Sequence[np.ndarray], got: Sequence[np.ndarray]
) -> None:
    """Values and gradients, leaf by leaf and by their norms.

    The error of a leaf is at most `LEAF_FACTOR` times the oracle's, which rounds the
    operands and results of contractions and adds up all else in full: the largest of a
    few, whose roundings fall somewhat differently. `LEAF_FLOOR` is added, and what the
    float32 of the program as written costs. A leaf of which the oracle's error is more
    than `ILL` says nothing."""
    oracles = [(_DITHERED[kind], dtype) for kind, dtype in _oracles(case)]
    floats = [
        i for i, x in enumerate(want)
        if x.dtype == np.float32 and np.isfinite(x).all() and x.any()
    ]  # fmt: skip

    def errors(outs: Sequence[np.ndarray]) -> np.ndarray:
        return np.array([_relative_error(want[i], outs[i]) for i in floats])

    ours = errors(got)
    allowed = np.max([errors(written.rounded(*o, None)) for o in oracles], axis=0)
    if not floats or (ours <= LEAF_FACTOR * allowed + LEAF_FLOOR).all():
        return
    drawn = [errors(written.rounded(*o, k)) for o in oracles for k in range(DRAWS)]
    allowed = np.max([allowed, *drawn], axis=0)
    full = np.max(
        [errors(written.rounded(Jitter, "float32", k)) for k in range(DRAWS)], axis=0
    )
    said = allowed < ILL
    if not said.any():
        raise Discard("ill-conditioned")
    limit = LEAF_FACTOR * (allowed + full) + LEAF_FLOOR
    for k, i in enumerate(floats):
        if said[k] and not ours[k] <= limit[k]:
            raise Broken(
                "leaf",
                f"result {i}: {ours[k]:.3g} of its norm, the oracle's {allowed[k]:.3g}",
            )


_DITHERED: dict[type[Rounding], type[Rounding]] = {
    Rounding: Dithered,
    RoundingProducts: DitheredProducts,
}


def _relative_error(x: np.ndarray, y: np.ndarray) -> float:
    """Of the norm; infinite where `y` is not finite."""
    x, y = x.astype(np.float64), y.astype(np.float64)
    error = np.linalg.norm(x - y) / np.linalg.norm(x)
    return float(error) if np.isfinite(error) else np.inf


# Transforms of a case, and what programs hold of them.
_DERIVES = re.compile("grad|vjp|jvp|linearize|jac|hvp|jet|transpose|root|solve")


def _oracles(case: Case) -> list[tuple[type[Rounding], str]]:
    kind = case.oracle
    if kind == "quantised":
        is_derived = bool(_DERIVES.search(case.source()))
        others = quantised.oracles(case.policy, case.dtype, is_derived)
        return [*others, (RoundingProducts, case.dtype)]
    if kind == "default" and case.outer:
        # The derivative of a contraction is low, even where it is a product.
        kind = "contractions"
    kinds: dict[str, list[type[Rounding]]] = {
        "none": [],
        "default": [Rounding],
        "contractions": [RoundingProducts],
        "all": [RoundingProducts, RoundingEverything],
        "asked": [RoundingProducts, RoundingEverything],
    }
    # A rule that names a dtype means it, whatever the compute dtype.
    dtypes = ["bfloat16", "float16"] if kind == "asked" else [case.dtype]
    return [(make, dtype) for make in kinds[kind] for dtype in dtypes]


def _complaint(
    x: np.ndarray,
    y: np.ndarray,
    refs: Sequence[np.ndarray],
    i: int,
    limit: float,
    largest: float,
) -> tuple[str, str] | None:
    """What is wrong with result `i`, if its error is more than rounding explains.

    Beyond `limit` it may be infinite, and where an error that is allowed would take it
    beyond `largest`, the largest number of the narrowest format."""
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
        allowed = max((np.abs(x - ref)[known].max() for ref in refs), default=0.0)
        reached = np.abs(x) + FACTOR * allowed
        known &= np.isfinite(y) | ((np.abs(x) < limit) & (reached < largest))
        if not known.any():
            return None
        if not np.isfinite(y[known]).all():
            return "finite", f"result {i}: {_differing(x[known], y[known])}"
        error = np.abs(x - y)[known].max()
        floor = ULPS * np.finfo(np.float32).eps * np.abs(x[known]).max()
    if error <= FACTOR * allowed + floor + 1e-30:
        return None
    return "error", f"result {i}: {error:.3g}, the oracle's {allowed:.3g}"
