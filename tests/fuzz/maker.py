"""Random statements: what a program computes, one step after the other."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .programs import DTYPES, Body, Shape, Stmt, Type, Var
from .templates import (
    BINARY,
    BOOL,
    INT,
    LARGE,
    LITERALS,
    NEEDS_AXIS,
    REDUCE,
    SQUARE,
    TO_BOOL,
    TO_INT,
    UNARY,
)

SHAPES: list[Shape] = [
    (), (3,), (2,), (3, 3), (3, 3), (3, 3), (2, 3), (3, 2), (1, 3), (3, 1), (2, 3, 3),
    (2, 2, 3),
]  # fmt: skip

SCOPES = ("alpha", "beta", "amp_stop")


@dataclass
class Maker:
    """Writes the statements of one program, inside out.

    Every list of statements that is being written has a frame of its own; what is made
    in an outer frame may be read in an inner one."""

    rng: random.Random
    max_depth: int = 3
    budget: int = 8  # statements that are left to write
    reverse: bool = True  # a derivative is to be taken backwards
    counter: int = 0
    frames: list[list[Var]] = field(default_factory=list)
    stmts: list[list[Stmt]] = field(default_factory=list)

    # Variables

    def fresh(self, type: Type, prefix: str = "v") -> Var:
        self.counter += 1
        return Var(f"{prefix}{self.counter}", type)

    def visible(self) -> list[Var]:
        return [v for frame in self.frames for v in frame]

    def emit(self, code: str, ins: Sequence[Var], type: Type, **options: Any) -> Var:
        (out,) = self.emit_many(code, ins, [type], many=False, **options)
        return out

    def emit_many(
        self,
        code: str,
        ins: Sequence[Var],
        types: Sequence[Type],
        bodies: Sequence[Body] = (),
        many: bool = True,
    ) -> tuple[Var, ...]:
        outs = tuple(self.fresh(t) for t in types)
        scope = None
        if self.rng.random() < 0.1:
            scope = self.rng.choice(SCOPES)
        self.stmts[-1].append(Stmt(outs, code, tuple(ins), tuple(bodies), scope, many))
        self.frames[-1].extend(outs)
        return outs

    def pick(self, kind: str = "f", shape: Shape | None = None) -> Var:
        """A variable of a type, rather a late one; made if there is none."""
        found = [
            v
            for v in self.visible()
            if v.type.kind == kind and shape in (None, v.type.shape)
        ]
        if not found:
            return self.make(
                Type(kind, self.rng.choice(SHAPES) if shape is None else shape)
            )
        if self.rng.random() < 0.5:
            return found[-1 - self.rng.randrange(min(3, len(found)))]
        return self.rng.choice(found)

    def make(self, type: Type) -> Var:
        """A variable of a type that is made of another's, or of nothing."""
        kind, shape = type.kind, type.shape
        floats = [v for v in self.visible() if v.type.kind == "f"]
        if kind == "f":
            if floats and self.rng.random() < 0.85:
                v = self.rng.choice(floats)
                same_size = v.type.size == type.size
                if same_size:
                    return self.emit(f"{{0}}.reshape({shape})", [v], type)
                if broadcasts(v.type.shape, shape):
                    return self.emit(f"jnp.broadcast_to({{0}}, {shape})", [v], type)
                return self.emit(f"jnp.resize({{0}}, {shape})", [v], type)
            code = self.rng.choice(
                [f"jnp.ones({shape})", f"jnp.full({shape}, 0.3)", f"jnp.zeros({shape})",
                 f"jnp.linspace(-1.0, 1.0, {type.size}).reshape({shape})",
                 f"jax.random.normal(jax.random.key(3), {shape})",
                 f"lax.broadcasted_iota(jnp.float32, {shape or (1,)}, 0).reshape({shape})"]
            )  # fmt: skip
            return self.emit(code, [], type)
        source = self.make_or_pick_float(shape)
        if kind == "i":
            if shape == () and self.rng.random() < 0.5:
                return self.emit(self.rng.choice(TO_INT), [self.pick("f")], type)
            return self.emit("({0} * 2).astype(jnp.int32)", [source], type)
        if kind == "b":
            return self.emit(self.rng.choice(TO_BOOL), [source], type)
        if kind == "c":
            return self.emit("lax.complex({0}, {0})", [source], type)
        return self.emit(f"{{0}}.astype({DTYPES[kind]})", [source], type)

    def make_or_pick_float(self, shape: Shape) -> Var:
        return self.pick("f", shape)

    # Statements

    def statement(self) -> None:
        self.budget -= 1
        kinds = self.kinds()
        if len(self.frames) <= self.max_depth:
            kinds += [(w * 0.45, fn) for w, fn in self.structures()]
        weights = [w for w, _ in kinds]
        self.rng.choices([fn for _, fn in kinds], weights)[0]()

    def kinds(self) -> list[tuple[float, Callable[[], Any]]]:
        """Statements that hold no program, with weights."""
        return [
            (3.0, self.unary),
            (2.5, self.binary),
            (4.0, self.square),
            (1.0, self.literal),
            (0.8, self.reduce),
            (1.2, self.move),
            (0.6, self.integer),
            (0.4, self.boolean),
            (0.4, self.low),
            (0.4, self.random),
            (0.3, self.accumulate),
        ]

    def unary(self) -> None:
        v = self.pick("f")
        code = self.rng.choice(UNARY)
        rank = 2 if "@" in code else 1 if any(x in code for x in NEEDS_AXIS) else 0
        if len(v.type.shape) < rank or (rank == 2 and len(v.type.shape) != 2):
            v = self.pick("f", (3, 3))
        self.emit(code, [v], v.type)

    def binary(self) -> None:
        a = self.pick("f")
        if self.rng.random() < 0.7:
            b = self.pick("f", a.type.shape)
        else:
            others = [
                v for v in self.visible()
                if v.type.kind == "f" and broadcasts(v.type.shape, a.type.shape)
            ]  # fmt: skip
            b = self.rng.choice(others)
        code = self.rng.choice(BINARY)
        if "lax." in code and b.type != a.type:
            code = "{0} + {1}"
        if b.type.shape != a.type.shape and "barrier" in code:
            code = "{0} * {1}"
        ins = [a, b]
        if self.rng.random() < 0.5 and "barrier" not in code:
            ins.reverse()
        self.emit(code, ins, a.type)

    def square(self) -> None:
        self.emit(
            self.rng.choice(SQUARE),
            [self.pick("f", (3, 3)), self.pick("f", (3, 3))],
            Type("f", (3, 3)),
        )

    def literal(self) -> None:
        v = self.pick("f")
        lit = self.rng.choice(LITERALS)
        forms = [
            "{{0}} * {}",
            "{{0}} + {}",
            "{} - {{0}}",
            "{{0}} / ({} + 0.5)",
            "jnp.maximum({{0}}, {})",
        ]
        if self.rng.random() < 0.2:
            lit = self.rng.choice(LARGE)
            forms = [
                "jnp.where({{0}} > 0, {{0}}, {})",
                "jnp.minimum({{0}}, {})",
                "{{0}} + {}",
            ]
        shape = v.type.shape
        if "(1,)" in lit and shape == ():
            shape = (1,)
        self.emit(self.rng.choice(forms).format(lit), [v], Type("f", shape))

    def reduce(self) -> None:
        v = self.pick("f")
        code = self.rng.choice(REDUCE)
        shape: Shape = ()
        axis = ""
        if v.type.shape and self.rng.random() < 0.6:
            keep = self.rng.random() < 0.4
            axis = f", axis=0, keepdims={keep}"
            shape = ((1,) if keep else ()) + v.type.shape[1:]
        elif len(v.type.shape) > 2 and "norm" in code:
            axis, shape = ", axis=-1", v.type.shape[:-1]
        self.emit(code.replace("{a}", axis), [v], Type("f", shape))

    def move(self) -> None:
        v = self.pick("f")
        shape, size = v.type.shape, v.type.size
        n = len(shape)
        moves: list[tuple[str, Shape]] = [("{0}.reshape(-1)", (size,))]
        moves.append(("{0}[None]", (1, *shape)))
        moves.append(("jnp.stack([{0}, {0} * 0.5])", (2, *shape)))
        if n:
            k = shape[0]
            moves += [
                ("{0}[0]", shape[1:]),
                ("{0}[-1]", shape[1:]),
                ("{0}[::-1]", shape),
                ("{0}[:1]", (1, *shape[1:])),
                ("jnp.concatenate([{0}, {0}[:1]])", (k + 1, *shape[1:])),
                (
                    "jnp.pad({0}, [(1, 0)] + [(0, 0)] * ({0}.ndim - 1))",
                    (k + 1, *shape[1:]),
                ),
                ("jnp.take({0}, jnp.array([0, 0]), axis=0)", (2, *shape[1:])),
                ("lax.dynamic_slice_in_dim({0}, 0, 1)", (1, *shape[1:])),
                (f"lax.dynamic_slice_in_dim({{0}}, 1, {k})", shape),
                ("{0}.at[0].set(5.0)", shape),
                ("{0}.at[0].add(1.0)", shape),
                ("jnp.tile({0}, 2)", (*shape[:-1], 2 * shape[-1])),
                ("jnp.repeat({0}, 2, axis=0)", (2 * k, *shape[1:])),
            ]
            i = [x for x in self.visible() if x.type == Type("i")]
            if i:
                index = self.rng.choice(i)
                self.emit("lax.dynamic_index_in_dim({0}, {1}, keepdims=False)",
                          [v, index], Type("f", shape[1:]))  # fmt: skip
                return
        if n >= 2:
            moves.append(("jnp.swapaxes({0}, 0, 1)", (shape[1], shape[0], *shape[2:])))
            moves.append(("jnp.moveaxis({0}, 0, -1)", (*shape[1:], shape[0])))
        fits = [m for m in moves if int(np.prod(m[1])) <= 36 and len(m[1]) <= 3]
        if fits:
            code, out = self.rng.choice(fits)
            self.emit(code, [v], Type("f", out))

    def integer(self) -> None:
        v = self.pick("i")
        if self.rng.random() < 0.6:
            self.emit(self.rng.choice(INT), [v], v.type)
        else:
            self.emit("{0}.astype(jnp.float32) * 0.25", [v], Type("f", v.type.shape))

    def boolean(self) -> None:
        v = self.pick("b")
        if self.rng.random() < 0.4:
            self.emit(self.rng.choice(BOOL), [v], v.type)
        else:
            a, b = self.pick("f", v.type.shape), self.pick("f", v.type.shape)
            self.emit("jnp.where({0}, {1}, {2})", [v, a, b], Type("f", v.type.shape))

    def low(self) -> None:
        """Code that is low by its author's hand."""
        kind = self.rng.choice("he")
        v = self.pick(kind)
        choice = self.rng.random()
        if choice < 0.4:
            self.emit("{0}.astype(jnp.float32)", [v], Type("f", v.type.shape))
        elif choice < 0.7:
            code = self.rng.choice(["{0} * {1}", "{0} + {1}", "jnp.maximum({0}, {1})"])
            self.emit(code, [v, self.pick("f", v.type.shape)], Type("f", v.type.shape))
        else:
            code = self.rng.choice(["{0} * 2", "jnp.tanh({0})", "{0} + {0}", "-{0}"])
            self.emit(code, [v], v.type)

    def random(self) -> None:
        v = self.pick("f")
        shape = v.type.shape
        key = f"jax.random.key({self.rng.randrange(9)})"
        code = self.rng.choice(
            [
                f"{{0}} + 0.1 * jax.random.normal({key}, {shape})",
                f"jnp.where(jax.random.bernoulli({key}, 0.5, {shape}), {{0}} / 0.5, 0.0)",
                f"{{0}} * jax.random.uniform({key}, {shape})",
                f"{{0}} + jax.random.gumbel({key}, {shape})",
                f"{{0}} + jax.random.normal(jax.random.fold_in({key}, 1), {shape})",
                f"{{0}} * jax.random.truncated_normal({key}, -1.0, 1.0, {shape})",
            ]
        )
        self.emit(code, [v], v.type)

    def accumulate(self) -> None:
        """A loop that adds a little to what it keeps, written out or as a loop."""
        a, w = self.pick("f", (3, 3)), self.pick("f", (3, 3))
        step = self.rng.choice(
            ["y + 1e-3 * jnp.tanh(y @ w)", "jax.nn.sigmoid(7 + y @ w) * y + 0.1",
             "y - 0.01 * jax.grad(lambda y: jnp.sum((y @ w) ** 2))(y)", "0.999 * y + w",
             "jnp.maximum(y, 0.9 * (y @ w))", "y.at[0].set((y @ w)[1])"]
        )  # fmt: skip
        loop, steps = self.rng.choice(
            [("functools.reduce(lambda y, _, w={{1}}: {}, range({}), {{0}})", (3, 10)),
             ("lax.fori_loop(0, {1}, lambda _, y, w={{1}}: {0}, {{0}})", (10, 60)),
             ("lax.scan(lambda y, _, w={{1}}: ({}, None), {{0}}, length={})[0]", (10, 60))]
        )  # fmt: skip
        code = loop.format(step, self.rng.choice(steps))
        if self.rng.random() < 0.4:  # nothing else reads what has added up
            code = f"{code} @ {{1}}"
        self.emit(code, [a, w], a.type)

    def structures(self) -> list[tuple[float, Callable[[], Any]]]:
        """What holds programs of its own, with weights."""
        return []


def places(n: int, start: int = 0) -> str:
    return "".join(f"{{{i}}}, " for i in range(start, start + n))


def broadcasts(shape: Shape, to: Shape) -> bool:
    if len(shape) > len(to):
        return False
    return all(a in (1, b) for a, b in zip(reversed(shape), reversed(to), strict=False))
