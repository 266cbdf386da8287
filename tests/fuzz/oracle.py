"""What mixed precision should give: a second implementation, with nothing in common.

A jaxpr is run equation by equation, in Python: loops are loops, branches are ifs, and
nothing is compiled but single primitives. What one equation does is left to a subclass,
which rounds the operands and results of contractions, and nothing else, or follows
values that are only moved."""

import functools
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .code import CONTRACTIONS, Step, code_of
from .devices import COLLECTIVES, Device, collective, shard_map

_CALLS = """jit pjit closed_call core_call checkpoint remat2 custom_jvp_call
    custom_vjp_call custom_vjp_call_jaxpr custom_lin custom_vmap_call eval_jaxpr"""

MAX_STEPS = 2000  # of one `while`, after which it counts as endless
MAX_EQUATIONS = 60_000  # of one run: loops in loops that all end take minutes


class Endless(Exception):
    """A loop did not end."""


class TooLong(Exception):
    """All loops may end, but nobody will wait for them."""


class Evaluator:
    """Runs a jaxpr as it stands."""

    def __init__(self, most: int = MAX_EQUATIONS):
        self.left = most  # equations
        self.device: Device | None = None  # in a `shard_map`

    def run(self, jaxpr: Any, args: Sequence[Any], consts: Any = None) -> list[Any]:
        """The results of a jaxpr, closed unless its constants are given."""
        code = code_of(getattr(jaxpr, "jaxpr", jaxpr))
        self.left -= len(code.steps)
        if self.left < 0:
            raise TooLong("more equations than anybody waits for")
        if consts is None:
            consts = map(self.literal, getattr(jaxpr, "consts", ()))
        values = code.start(self.literal, type(self))
        for place, x in zip(code.constvars, consts, strict=True):
            values[place] = x
        for place, x in zip(code.invars, args, strict=True):
            values[place] = x
        for step in code.steps:
            outs = self.step(step, [values[i] for i in step.ins])
            for place, x in zip(step.outs, outs, strict=True):
                values[place] = x
        return [values[i] for i in code.outvars]

    def begin(self, args: Sequence[Any]) -> list[Any]:
        """The arguments of the whole program, as it is to read them."""
        return list(args)

    def end(self, results: Sequence[Any]) -> list[Any]:
        """The results of the whole program, as they are to be seen."""
        return list(results)

    def step(self, step: Step, args: list[Any]) -> Sequence[Any]:
        structure = _STRUCTURES.get(step.name)
        if structure is not None:
            return structure(self, step.eqn, args)
        if step.name in COLLECTIVES and not is_traced(args):
            outs = collective(self, step.eqn, args)
            if outs is not None:
                return outs
        return self.apply(step, args)

    def apply(self, step: Step, args: list[Any]) -> Sequence[Any]:
        """The results of a primitive that holds no program."""
        return bind(step, args)

    # How loops and branches handle values; a value is an array unless overridden.

    def literal(self, value: Any) -> Any:
        return as_numpy(value)

    def concrete(self, value: Any) -> Any:
        return np.asarray(value)

    def index(self, value: Any, i: int) -> Any:
        x = value[i]
        return np.asarray(x) if isinstance(x, np.generic) else x

    def stack(self, values: list[Any], aval: Any) -> Any:
        if not values:
            return np.zeros(aval.shape, aval.dtype)
        in_numpy = all(isinstance(x, np.ndarray) for x in values)
        return np.stack(values) if in_numpy else jnp.stack(values)


def as_numpy(x: Any) -> Any:
    """Numbers as NumPy's; what is traced, or no number, as it is."""
    if isinstance(x, jax.core.Tracer) or not hasattr(x, "dtype"):
        return x if hasattr(x, "dtype") else np.asarray(x)
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):
        return x
    return np.asarray(x)


def is_traced(values: Sequence[Any]) -> bool:
    return any(isinstance(x, jax.core.Tracer) for x in values)


def bind(step: Step, args: Sequence[Any]) -> list[Any]:
    """Runs one equation on concrete values."""
    if step.in_numpy is not None and all(isinstance(x, np.ndarray) for x in args):
        known = step.in_numpy(*args)
        if known is not None:
            return list(map(np.asarray, known if isinstance(known, list) else [known]))
    eqn = step.eqn
    if step.holds_program:
        # Its programs may have to be handed over in another way than as parameters.
        return _bind_alone(eqn, args)
    with eqn.ctx.manager:
        outs = eqn.primitive.bind(*args, **eqn.params)
    return list(map(as_numpy, outs if eqn.primitive.multiple_results else [outs]))


def _bind_alone(eqn: Any, args: Sequence[Any]) -> list[Any]:
    given = {}
    for atom, x in zip(eqn.invars, args, strict=True):
        if not hasattr(atom, "val"):
            given[atom] = x
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # it has no debug info
        jaxpr = jax.extend.core.Jaxpr([], list(given), eqn.outvars, [eqn], eqn.effects)
    return list(map(as_numpy, jax.core.eval_jaxpr(jaxpr, [], *given.values())))


def _call(ev: Evaluator, eqn: Any, args: list[Any]) -> list[Any]:
    names = ("jaxpr", "call_jaxpr", "call", "fun_jaxpr")
    body = next((eqn.params[name] for name in names if name in eqn.params), None)
    if body is None:
        raise NotImplementedError(f"{eqn.primitive} with {sorted(eqn.params)}")
    return ev.run(body, args)


def _hi_primitive(ev: Evaluator, eqn: Any, args: list[Any]) -> list[Any]:
    """What stands for a program under some of JAX's flags."""
    hi = eqn.params["_prim"]
    body = _expansions.get(hi)
    if body is None:

        def flat(*operands: Any) -> Any:
            return jax.tree.leaves(hi.expand(*jax.tree.unflatten(hi.in_tree, operands)))

        body = jax.make_jaxpr(flat)(*(atom.aval for atom in eqn.invars))
        _expansions[hi] = body
    return ev.run(body, args)


# By objects that are alive.
_expansions: Any = weakref.WeakKeyDictionary()


def _run_flat(ev: Evaluator, jaxpr: Any, *args: Any) -> list[Any]:
    return ev.run(jaxpr, args)


def _cond(ev: Evaluator, eqn: Any, args: list[Any]) -> list[Any]:
    index, *operands = args
    branches = eqn.params["branches"]
    if is_traced(args):
        fns = [functools.partial(_run_flat, ev, branch) for branch in branches]
        return lax.switch(index.astype(np.int32), fns, *operands)
    i = int(np.clip(ev.concrete(index), 0, len(branches) - 1))
    return ev.run(branches[i], operands)


def _while(ev: Evaluator, eqn: Any, args: list[Any]) -> list[Any]:
    params = eqn.params
    n, m = params["cond_nconsts"], params["body_nconsts"]
    cond_consts, consts, carry = args[:n], args[n : n + m], args[n + m :]
    if is_traced(args):
        return lax.while_loop(
            lambda carry: ev.run(params["cond_jaxpr"], [*cond_consts, *carry])[0],
            lambda carry: ev.run(params["body_jaxpr"], [*consts, *carry]),
            carry,
        )
    for _ in range(MAX_STEPS):
        (go,) = ev.run(params["cond_jaxpr"], [*cond_consts, *carry])
        if not ev.concrete(go).any():
            return carry
        carry = ev.run(params["body_jaxpr"], [*consts, *carry])
    raise Endless(f"a loop of more than {MAX_STEPS} steps")


def scan_counts(eqn: Any) -> tuple[int, int]:
    """How many constants and carries a scan has, whatever version of JAX wrote it."""
    if "num_carry" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    body = eqn.params["jaxpr"]
    body = getattr(body, "jaxpr", body)
    ys = [
        len(out.aval.shape) > len(v.aval.shape)
        for out, v in zip(eqn.outvars, body.outvars, strict=True)
    ]
    xs = [
        len(x.aval.shape) > len(v.aval.shape)
        for x, v in zip(eqn.invars, body.invars, strict=True)
    ]
    num_carry = len(ys) - sum(ys)
    return len(xs) - sum(xs) - num_carry, num_carry


def _scan(ev: Evaluator, eqn: Any, args: list[Any]) -> list[Any]:
    num_consts, num_carry = scan_counts(eqn)
    length, reverse = eqn.params["length"], eqn.params["reverse"]
    consts, carry = args[:num_consts], args[num_consts : num_consts + num_carry]
    xs = args[num_consts + num_carry :]
    if is_traced(args):

        def step(carry, row):
            outs = ev.run(eqn.params["jaxpr"], [*consts, *carry, *row])
            return outs[:num_carry], outs[num_carry:]

        carry, ys = lax.scan(step, carry, xs, length=length, reverse=reverse)
        return [*carry, *ys]
    rows: list[list[Any]] = [[]] * length
    order = range(length)
    for i in reversed(order) if reverse else order:
        row = [ev.index(x, i) for x in xs]
        outs = ev.run(eqn.params["jaxpr"], [*consts, *carry, *row])
        carry, rows[i] = outs[:num_carry], outs[num_carry:]
    ys = [
        ev.stack([row[k] for row in rows], v.aval)
        for k, v in enumerate(eqn.outvars[num_carry:])
    ]
    return [*carry, *ys]


def _linear_solve(ev: Evaluator, eqn: Any, args: list[Any]) -> list[Any]:
    lengths, jaxprs = eqn.params["const_lengths"], eqn.params["jaxprs"]
    first = lengths.matvec + lengths.vecmat
    consts = args[first : first + lengths.solve]
    return ev.run(jaxprs.solve, [*consts, *args[sum(lengths) :]])


def _linear_call(ev: Evaluator, eqn: Any, args: list[Any]) -> list[Any]:
    return ev.run(eqn.params["callee"], args)


def _shard_map(ev: Evaluator, eqn: Any, args: list[Any]) -> Sequence[Any]:
    params = eqn.params
    if all(isinstance(x, np.ndarray) for x in args):
        return shard_map(ev, eqn, args)
    axes = params.get("newly_manual_axes", params.get("manual_axes"))
    return jax.shard_map(
        lambda *xs: ev.run(params["jaxpr"], xs),
        mesh=params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=list(params["out_specs"]),
        check_vma=params["check_vma"],
        axis_names=set(axes),
    )(*args)


_STRUCTURES: dict[str, Callable[[Evaluator, Any, list[Any]], Sequence[Any]]] = {
    **dict.fromkeys(_CALLS.split(), _call),
    "call_hi_primitive": _hi_primitive,
    "cond": _cond,
    "while": _while,
    "scan": _scan,
    "custom_linear_solve": _linear_solve,
    "linear_call": _linear_call,
    "shard_map": _shard_map,
}


class Rounding(Evaluator):
    """Rounds float32 operands and results of contractions, and nothing else.

    With a `seed`, each result is first moved at random by up to a unit in the last
    place: what comes of many seeds shows how much a program makes of a rounding."""

    def __init__(self, dtype: Any, seed: int | None = None):
        super().__init__()
        self.dtype = jnp.dtype(dtype)
        self.rng = None if seed is None else np.random.default_rng(seed)

    def is_rounded(self, step: Step) -> bool:
        return step.is_contraction

    def round(self, x: Any) -> Any:
        if getattr(x, "dtype", None) != np.float32:
            return x
        if isinstance(x, jax.core.Tracer):
            return lax.convert_element_type(
                lax.convert_element_type(x, self.dtype), np.float32
            )
        if self.rng is not None:
            x = self.shifted(x, float(jnp.finfo(self.dtype).eps))
        with np.errstate(over="ignore"):
            return np.asarray(x).astype(self.dtype).astype(np.float32)

    def shifted(self, x: Any, size: float) -> Any:
        """Each number at random by up to `size` of it."""
        assert self.rng is not None
        shift = self.rng.uniform(-size, size, np.shape(x)).astype(np.float32)
        return np.asarray(x * (1 + shift))

    def apply(self, step: Step, args: list[Any]) -> Sequence[Any]:
        if not self.is_rounded(step):
            return super().apply(step, args)
        outs = super().apply(step, [self.round(x) for x in args])
        return [self.round(x) for x in outs]


class RoundingProducts(Rounding):
    """Rounds every `dot_general`, whether or not it is a contraction."""

    def is_rounded(self, step: Step) -> bool:
        return step.name in CONTRACTIONS


class Dithered(Rounding):
    """Rounds somewhat elsewhere: with a `seed`, after a move of a quarter of a unit.

    The errors of many seeds are those that rounding may well make: they are an eighth
    larger than without the move."""

    def shifted(self, x: Any, size: float) -> Any:
        return super().shifted(x, size / 4)


class DitheredProducts(Dithered, RoundingProducts):
    """The same of every `dot_general`."""


class AddingLow(RoundingProducts):
    """Adds tangents in the range of the dtype, as JAX does those of what is low."""

    def apply(self, step: Step, args: list[Any]) -> Sequence[Any]:
        outs = super().apply(step, args)
        return list(map(self.clipped, outs)) if step.name == "add_any" else outs

    def clipped(self, x: Any) -> Any:
        if getattr(x, "dtype", None) != np.float32 or not isinstance(x, np.ndarray):
            return x
        most = float(jnp.finfo(self.dtype).max)
        return np.where(np.abs(x) > most, np.copysign(np.float32(np.inf), x), x)


class RoundingEverything(Rounding):
    """Rounds whatever goes in, is computed or moved: the worst that a policy may do."""

    def begin(self, args: Sequence[Any]) -> list[Any]:
        return [self.round(x) for x in args]

    end = begin

    def is_rounded(self, step: Step) -> bool:
        return True

    def apply(self, step: Step, args: list[Any]) -> Sequence[Any]:
        # XLA divides by the power, which in 16 bits may be out of range.
        if step.name == "integer_pow" and (y := step.eqn.params["y"]) < 0:
            (x,) = map(self.round, args)
            with np.errstate(all="ignore"):
                return [self.round(1 / self.round(x**-y))]
        return super().apply(step, args)


class Jitter(Rounding):
    """Moves what a program computes in float32 by about a unit in the last place.

    Sums in another order differ by that: what is 0 only where they are in this one is
    no number to hold a program to. So do sums of cotangents in a dtype that the author
    has chosen."""

    def round(self, x: Any) -> Any:
        return self._moved(x, "float32")

    def apply(self, step: Step, args: list[Any]) -> Sequence[Any]:
        outs = Evaluator.apply(self, step, args)
        if step.name == "add_any":
            return [self._moved(x, "float32", "float16", "bfloat16") for x in outs]
        return outs if step.name in _MOVES else [self.round(x) for x in outs]

    def _moved(self, x: Any, *dtypes: str) -> Any:
        name = getattr(getattr(x, "dtype", None), "name", None)
        if self.rng is None or name not in dtypes or isinstance(x, jax.core.Tracer):
            return x
        moved = self.shifted(np.asarray(x, np.float32), float(jnp.finfo(name).eps))
        return moved.astype(x.dtype)


class Trace:
    """A value, the numbers of the input elements that it shows, and whether rounding
    may have changed it.

    `ids` are 0 where an element is no mere copy of an input's."""

    def __init__(self, value: Any, ids: Any, tainted: bool):
        self.value, self.ids, self.tainted = value, ids, tainted


_MOVES = frozenset(
    """reshape squeeze expand_dims broadcast_in_dim transpose rev slice concatenate
    copy copy_p stop_gradient name split optimization_barrier unstack tile stack
    pvary pcast reshard mesh_cast""".split()
)
_INDEXED = frozenset("dynamic_slice dynamic_update_slice gather scatter".split())


class Following(Evaluator):
    """Follows the elements of inputs that are only moved, to the results."""

    def literal(self, value: Any) -> Trace:
        return Trace(value, _nothing(value), False)

    def concrete(self, value: Trace) -> Any:
        # A decision that rounding may turn ends what can be said.
        if value.tainted:
            raise Undecided
        return np.asarray(value.value)

    def index(self, value: Trace, i: int) -> Trace:
        x, ids = super().index(value.value, i), super().index(value.ids, i)
        return Trace(x, ids, value.tainted)

    def stack(self, values: list[Trace], aval: Any) -> Trace:
        stacked = super().stack([x.value for x in values], aval)
        ids = [x.ids for x in values]
        return Trace(
            stacked,
            np.stack(ids) if ids else _nothing(stacked),
            any(x.tainted for x in values),
        )

    def apply(self, step: Step, args: list[Trace]) -> list[Trace]:
        values = bind(step, [x.value for x in args])
        is_product = step.name in CONTRACTIONS
        tainted = is_product or any(x.tainted for x in args)
        ids = self._moved(step, args)
        if ids is None:
            ids = [_nothing(x) for x in values]
        return [Trace(x, i, tainted) for x, i in zip(values, ids, strict=True)]

    def _moved(self, step: Step, args: list[Trace]) -> list[Any] | None:
        name = step.name
        if all(not x.ids.any() for x in args):
            return None
        if name in _MOVES or name == "pad":
            return bind(step, [x.ids for x in args])
        if name == "select_n" and not args[0].tainted:
            return bind(step, [args[0].value, *(x.ids for x in args[1:])])
        if name in _INDEXED:
            return self._indexed(step, args)
        return None

    def _indexed(self, step: Step, args: list[Trace]) -> list[Any] | None:
        eqn, name = step.eqn, step.name
        moved = {"dynamic_update_slice": (0, 1), "scatter": (0, 2)}.get(name, (0,))
        where = [x for i, x in enumerate(args) if i not in moved]
        if any(x.tainted for x in where):
            return None
        # An element outside of a gather is filled in, by a number of another type.
        if name == "gather" and "FILL" in str(eqn.params["mode"]).upper():
            return None
        operands = [x.ids if i in moved else x.value for i, x in enumerate(args)]
        if name == "scatter":
            # The equation's own reducer is written for floats.
            names = "dimension_numbers indices_are_sorted unique_indices mode"
            options = {name: eqn.params[name] for name in names.split()}
            return [np.asarray(lax.scatter(*operands, **options))]
        return bind(step, operands)


class Undecided(Exception):
    """What is moved where hangs on numbers that may be rounded."""


def _nothing(value: Any) -> np.ndarray:
    return np.zeros(np.shape(value), np.int32)


def follow(jaxpr: Any, args: Sequence[Any]) -> tuple[np.ndarray, list[np.ndarray]]:
    """The elements of all float32 arguments; for each result the numbers of those that
    it shows, counted from 1."""
    elements = [np.zeros(0, np.float32)]
    traces = []
    count = 1
    for x in args:
        ids = _nothing(x)
        if getattr(x, "dtype", None) == np.float32:
            size = int(np.size(x))
            ids = np.arange(count, count + size, dtype=np.int32).reshape(np.shape(x))
            count += size
            elements.append(np.asarray(x).reshape(-1))
        traces.append(Trace(x, ids, False))
    outs = Following().run(jaxpr, traces)
    return np.concatenate(elements), [x.ids for x in outs]
