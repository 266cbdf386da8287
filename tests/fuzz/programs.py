"""Random programs as data: statements of Python, typed enough to fit together.

A program prints as the source of a function, and that source is what is run: what is
seen to fail can be printed as it ran. A seed makes the same program every time."""

import dataclasses
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Shape = tuple[int, ...]

DTYPES = {
    "f": "jnp.float32",
    "i": "jnp.int32",
    "b": "jnp.bool_",
    "h": "jnp.bfloat16",  # low by the author's hand
    "e": "jnp.float16",
    "c": "jnp.complex64",
}


@dataclass(frozen=True)
class Type:
    kind: str  # a key of `DTYPES`
    shape: Shape = ()

    @property
    def size(self) -> int:
        return int(np.prod(self.shape))


@dataclass(frozen=True)
class Var:
    name: str
    type: Type


@dataclass(frozen=True)
class Body:
    """A function inside of a program. It may read what is around it."""

    name: str
    params: tuple[Var, ...]
    stmts: tuple["Stmt", ...]
    results: tuple[Var, ...]

    def lines(self) -> Iterator[str]:
        yield f"def {self.name}({', '.join(p.name for p in self.params)}):"
        for stmt in self.stmts:
            yield from indented(stmt.lines())
        yield f"    return {_tuple(self.results)}"


@dataclass(frozen=True)
class Stmt:
    """`outs = code`, where `{0}`, `{1}`, ... in the code stand for what is read, and
    `{f0}`, `{f1}`, ... for the names of its bodies."""

    outs: tuple[Var, ...]
    code: str
    ins: tuple[Var, ...] = ()
    bodies: tuple[Body, ...] = ()
    scope: str | None = None
    many: bool = False  # the code is a pytree whose leaves are the results

    def lines(self) -> Iterator[str]:
        for body in self.bodies:
            yield from body.lines()
        names = {f"f{i}": body.name for i, body in enumerate(self.bodies)}
        code = self.code.format(*(v.name for v in self.ins), **names)
        line = f"{self.outs[0].name} = {code}"
        if self.many:
            line = f"{_tuple(self.outs)} = jax.tree.leaves({code})"
        if self.scope is None:
            yield line
        else:
            yield f"with jax.named_scope({self.scope!r}):"
            yield f"    {line}"

    def reads(self) -> set[str]:
        """The names that are read, also by its bodies."""
        found = {v.name for v in self.ins}
        for body in self.bodies:
            inner = {v.name for v in body.results}
            for stmt in body.stmts:
                inner |= stmt.reads()
            found |= inner
        return found


@dataclass(frozen=True)
class Program:
    args: tuple[Var, ...]
    values: tuple[Any, ...]  # of the arguments
    consts: tuple[tuple[Var, str], ...]  # closed over, with the code that makes them
    stmts: tuple[Stmt, ...]
    results: tuple[Var, ...]
    tree: str  # the code of the result, of the names in `results`

    def lines(self) -> Iterator[str]:
        for var, code in self.consts:
            yield f"{var.name} = {code}"
        yield ""
        yield ""
        yield from self.function_lines()
        yield ""
        yield ""
        yield "args = ("
        for x in self.values:
            yield f"    {value_code(x)},"
        yield ")"

    def function_lines(self) -> Iterator[str]:
        yield f"def program({', '.join(v.name for v in self.args)}):"
        for stmt in self.stmts:
            yield from indented(stmt.lines())
        yield f"    return {self.result_code()}"

    def function_code(self) -> str:
        return "\n".join(self.function_lines())

    def result_code(self) -> str:
        names = [v.name for v in self.results]
        return self.tree.format(*names, all=_names(names))

    def without_dead_code(self) -> "Program":
        needed = {v.name for v in self.results}
        stmts = _live(self.stmts, needed)
        return dataclasses.replace(self, stmts=stmts)


def _live(stmts: Sequence[Stmt], needed: set[str]) -> tuple[Stmt, ...]:
    kept: list[Stmt] = []
    for stmt in reversed(stmts):
        if any(v.name in needed for v in stmt.outs):
            bodies = tuple(
                dataclasses.replace(
                    body, stmts=_live(body.stmts, {v.name for v in body.results})
                )
                for body in stmt.bodies
            )
            stmt = dataclasses.replace(stmt, bodies=bodies)
            needed = needed | stmt.reads()
            kept.append(stmt)
    return tuple(reversed(kept))


def value_code(x: Any) -> str:
    if not isinstance(x, np.ndarray):
        return repr(x)
    name = "bool_" if x.dtype == bool else x.dtype.name
    module = "jnp" if name == "bfloat16" else "np"
    return f"np.array({x.tolist()}, {module}.{name})".replace("inf", "np.inf")


def indented(lines: Iterator[str]) -> Iterator[str]:
    return (f"    {line}" for line in lines)


def _names(names: Sequence[str]) -> str:
    return ", ".join(names) + ("," if len(names) == 1 else "")


def _tuple(variables: Sequence[Var]) -> str:
    return f"({_names([v.name for v in variables])})"


# Making programs

_SHAPES: list[Shape] = [
    (), (3,), (2,), (3, 3), (3, 3), (3, 3), (2, 3), (3, 2), (1, 3), (3, 1), (2, 3, 3),
    (2, 2, 3),
]  # fmt: skip

_LITERALS = """0.5 2.0 3.0 1.0 0.0 -1.0 1e-3 1e-6 0.999 7.0 1.5 100.0 2 3
    jnp.float32(0.25) np.float32(1.25) jnp.ones((1,)) jnp.asarray(0.75)""".split()
_LARGE = ["1e5", "-1e9", "123456.78", "1e-8", "jnp.finfo(jnp.float32).min"]

# On floats of any size, to floats of the same shape.
_UNARY = """
    jnp.tanh({0})|jnp.tanh({0})|jnp.sin({0})|jnp.cos({0})|jnp.exp(-jnp.abs({0}))
    jnp.exp(jnp.minimum({0}, 3.0))|jax.nn.sigmoid({0})|jax.nn.relu({0})|jax.nn.gelu({0})
    jax.nn.silu({0})|jax.nn.softplus({0})|jax.nn.leaky_relu({0})|lax.erf({0})
    lax.erfc({0})|jnp.sqrt(jnp.abs({0}) + 0.1)|lax.rsqrt({0} * {0} + 1e-6)|{0} * {0}
    jnp.square({0})|{0} ** 3|lax.integer_pow({0}, 2)|-{0}|jnp.abs({0})|jnp.sign({0})
    jnp.floor({0})|jnp.ceil({0})|jnp.round({0})|jnp.log(jnp.abs({0}) + 0.1)
    jnp.log1p(jnp.abs({0}))|jnp.log2({0} * {0} + 1.0)|jnp.expm1(jnp.minimum({0}, 2.0))
    jnp.exp2(jnp.minimum({0}, 2.0))|lax.cbrt({0})|jnp.arcsin(jnp.clip({0}, -0.9, 0.9))
    jnp.arccos(jnp.clip({0}, -0.9, 0.9))|jnp.arctan({0})|jnp.arcsinh({0})
    jnp.arccosh(1.5 + jnp.abs({0}))|jnp.arctanh(jnp.clip({0}, -0.9, 0.9))
    jnp.sinh(jnp.clip({0}, -2, 2))|jnp.cosh(jnp.clip({0}, -2, 2))|jnp.tan(jnp.tanh({0}))
    lax.lgamma(jnp.abs({0}) + 0.5)|lax.digamma(jnp.abs({0}) + 0.5)
    lax.erf_inv(jnp.clip({0}, -0.9, 0.9))|lax.bessel_i0e({0})|lax.bessel_i1e({0})
    lax.reduce_precision({0}, 8, 12)|lax.stop_gradient({0})|lax.round({0})
    checkpoint_name({0}, "saved")|lax.optimization_barrier({0})|jnp.copy({0})
    jnp.nan_to_num({0})|{0}.astype(jnp.bfloat16).astype(jnp.float32)
    {0}.astype(jnp.float16).astype(jnp.float32)|jax.nn.softmax({0}, -1)
    jax.nn.log_softmax({0}, -1)|jax.nn.standardize({0}, -1)|jnp.cumsum({0}, -1)
    lax.cumlogsumexp({0}, {0}.ndim - 1)|lax.cummax({0}, {0}.ndim - 1)
    lax.cummin({0}, {0}.ndim - 1, reverse=True)|lax.cumprod({0}, {0}.ndim - 1)
    lax.rev({0}, ({0}.ndim - 1,))|jnp.roll({0}, 1, -1)|jnp.sort({0}, -1)
    jnp.flip({0}, 0)|{0} - {0}.mean(-1, keepdims=True)|{0} - {0}.max(-1, keepdims=True)
    {0} / ({0}.sum() ** 2 + 1.0)|{0} / (jnp.linalg.norm({0}) + 1e-3)
    {0} / jnp.sqrt(jnp.vdot({0}, {0}) + 1e-6)|{0} * lax.rsqrt(jnp.var({0}) + 1e-5)
    jax.nn.one_hot(jnp.argmax({0}, -1), {0}.shape[-1])|{0} + lax.stop_gradient({0})
    jnp.real({0} * 1j + {0})|lax.real(lax.fft(lax.complex({0}, {0}), "FFT", {0}.shape[-1:]))
    lax.bitcast_convert_type(lax.bitcast_convert_type({0}, jnp.int32), jnp.float32)
    jnp.where({0} > 0, {0}, 0.0)|jnp.clip({0}, -1.0, 1.0)|lax.clamp(-1.0, {0}, 1.0)
    jnp.maximum({0}, 0.0)|jnp.minimum({0}, 0.5)|jnp.zeros_like({0})|jnp.ones_like({0})
    jnp.full_like({0}, 0.5)|jnp.sinc({0})|jnp.hypot({0}, 1.0)|jnp.logaddexp({0}, 0.0)
    jnp.log(jnp.cosh(jnp.clip({0}, -5, 5)))|{0} % 1.0|jnp.diff({0}, prepend=0.0)
    lax.square({0})|jnp.exp({0} - jax.nn.logsumexp({0}, -1, keepdims=True))
    jnp.trunc({0})|jnp.deg2rad({0})|jax.nn.hard_swish({0})|jax.nn.elu({0})
    jax.nn.relu6({0})|jax.nn.log_sigmoid({0})|lax.logistic({0})|jax.nn.glu(jnp.concatenate([{0}, {0}], -1))
    jnp.linalg.qr({0} @ {0}.T + 3 * jnp.eye({0}.shape[0]))[1].sum() * {0}
    jnp.vectorize(jnp.sin)({0})|lax.nextafter({0}, jnp.ones_like({0}))
    lax.top_k({0}, {0}.shape[-1])[0]|jnp.sort_complex({0} + 0j).real.reshape({0}.shape)
    """  # fmt: skip

# Unary code that wants at least one, or two, axes.
_NEEDS_AXIS = (
    "-1", "ndim - 1", ".shape[", "argmax", "diff", "concatenate", "flip", "FFT", "sort",
)  # fmt: skip

_BINARY = """
    {0} + {1}|{0} + {1}|{0} - {1}|{0} * {1}|{0} * {1}|{0} / (jnp.abs({1}) + 0.5)
    jnp.maximum({0}, {1})|jnp.minimum({0}, {1})|jnp.arctan2({0}, {1} + 2.0)
    jnp.power(jnp.abs({0}) + 0.1, jnp.tanh({1}))|lax.rem({0}, jnp.abs({1}) + 0.5)
    jnp.where({0} > {1}, {0}, {1})|jnp.where({1} > 0, {0}, {1})|jnp.where({0} < 0, {1}, 7.0)
    lax.select({0} >= {1}, {0}, {1})|{0} + 1e-3 * jnp.tanh({1})|{0} * jax.nn.sigmoid(5 + {1})
    jax.nn.sigmoid({0}) * {1} + (1 - jax.nn.sigmoid({0})) * {0}|jnp.hypot({0}, {1})
    jnp.logaddexp({0}, {1})|lax.optimization_barrier(({0}, {1}))[0]|jnp.float_power(2.0, jnp.tanh({0})).astype(jnp.float32) * {1}
    jnp.copysign({0}, {1})|jax.scipy.special.xlogy(jnp.abs({0}), jnp.abs({1}) + 0.1)
    {0} + jnp.asarray(0.5) * {1}|lax.add({0}, {1})|lax.mul({0}, lax.neg({1}))
    """  # fmt: skip

# Float matrices (3, 3) only.
_SQUARE = """
    {0} @ {1}|{0} @ {1}|{0} @ {1}|{0} @ {1}.T|{0}.T @ {1}|jnp.tanh({0} @ {1})
    0.5 * ({0} @ {1}) + {0}|jnp.einsum("ij,kj->ik", {0}, {1})|jnp.einsum("ij,ij->i", {0}, {1})[:, None] * {0}
    jnp.einsum("ij,ij->ij", {0}, {1})|jnp.matmul({0}, {1}, precision="highest")
    lax.dot_general({0}, {1}, (((1,), (0,)), ((), ())))|lax.dot_general({0}, {1}, (((0,), (1,)), ((), ())))
    lax.dot_general({0}, {1}, (((1,), (1,)), ((0,), (0,))))[:, None] + {0}
    lax.dot_general({0}, {1}, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
    {0} @ {0}|{0} @ {0}.T|({0} @ {1}) @ {1}|jax.nn.softmax({0} @ {1}.T) @ {1}
    {0}.at[:1].set({1}[:1] @ {0})|{0}.at[1].set(({0} @ {1})[0])|{0}.at[jnp.array([0, 2])].add({1}[:2])
    lax.dynamic_update_slice({0}, {1}[:1] @ {0}, (1, 0))|jnp.concatenate([({0} @ {1})[:1], {0}[1:]])
    jnp.stack([{0}[0], ({0} @ {1})[1], {1}[2]])|jnp.where(jnp.eye(3) > 0, {0} @ {1}, {0})
    jnp.linalg.solve({0} + 9 * jnp.eye(3), {1})|lax.linalg.triangular_solve({0} + 9 * jnp.eye(3), {1}, left_side=True, lower=True)
    jnp.linalg.cholesky({0} @ {0}.T + 3 * jnp.eye(3))|jnp.linalg.inv({0} + 9 * jnp.eye(3))
    {0} + jnp.linalg.det({1})|jnp.kron({0}, {1})[:3, :3]|jnp.cov({0})|jnp.outer({0}[0], {1}[1])
    jnp.einsum("i,j->ij", {0}[0], {1}[:, 0])|jnp.linalg.multi_dot([{0}, {1}, {0}])
    jnp.matmul({0}.astype(jnp.bfloat16), {1}.astype(jnp.bfloat16)).astype(jnp.float32)
    jnp.matmul({0}.astype(jnp.bfloat16), {1}.astype(jnp.bfloat16), preferred_element_type=jnp.float32)
    lax.conv_general_dilated({0}[None, None], {1}[None, None], (1, 1), "SAME")[0, 0]
    lax.conv_general_dilated({0}[None], {1}[:, :, None], (1,), "VALID", dimension_numbers=("NCH", "OIH", "NCH"))[0] * {0}
    lax.conv_general_dilated({0}[None, :, None, :], {1}[:, None, None, :], (1, 1), "SAME", rhs_dilation=(2, 1), dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=3)[0, :, 0, :]
    lax.ragged_dot({0}, jnp.stack([{1}, {0}]), jnp.array([1, 2], jnp.int32))
    jnp.triu({0}) + jnp.tril({1}, -1)|lax.reduce_window({0}, 0.0, lax.add, (2, 2), (1, 1), "SAME") * {1}
    lax.reduce_window({0}, -jnp.inf, lax.max, (2, 1), (1, 1), "SAME") + {1}
    jnp.take_along_axis({0}, jnp.argsort({1}, axis=-1), -1)|{0}[jnp.argmax({1}, -1)]|{0}[:, jnp.array([2, 0, 1])] * {1}
    lax.associative_scan(jnp.add, {0}) * {1}|lax.associative_scan(lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1]), (jax.nn.sigmoid(7 + {0}), {1}))[1]
    jax.nn.dot_product_attention({0}[:, None], {1}[:, None], {0}[:, None])[:, 0]
    jnp.einsum("ij,jk,kl->il", {0}, {1}, {0})|jnp.tensordot({0}, {1}, 1)|jnp.inner({0}, {1})
    jax.vmap(jnp.dot)({0}, {1})[:, None] * {0}|jax.vmap(lambda r: r @ {1})({0})|jax.vmap(jnp.outer)({0}, {1})[:, 0]
    jax.grad(lambda w: jnp.sum(jnp.tanh({1} @ w)))({0})|jax.jvp(lambda w: {1} @ w, ({0},), ({1},))[1]
    jax.lax.reduce({0}, jnp.float32(0), lambda x, y: x + y, (1,))[:, None] * {1}
    lax.scatter_min({0}, jnp.array([[1]]), {1}[:1], lax.ScatterDimensionNumbers((1,), (0,), (0,)))
    {0}.at[0].max({1}[1])|{0}.at[:, 0].mul({1}[0])|jnp.histogram({0}, 3)[0].astype(jnp.float32) * {1}
    jnp.asarray(lax.batch_matmul(jnp.stack([{0}, {1}]), jnp.stack([{1}, {0}])))[0]
    jax.nn.logsumexp({0} @ {1}, axis=-1, keepdims=True, b=jnp.abs({0}) + 0.1) + {1}
    jnp.einsum("ij,ij->", {0}, {0}) * {1}|{0} / jnp.sqrt(jnp.einsum("ij,ij->", {0}, {0}) + 1e-6)
    """  # fmt: skip

_TO_INT = """
    jnp.argmax({0}).astype(jnp.int32)|jnp.sum({0} > 0)|jnp.argmin({0}).astype(jnp.int32)
    ({0}.sum() * 10).astype(jnp.int32)|jnp.count_nonzero({0}).astype(jnp.int32)
    """

_INT = """
    {0} + 1|{0} * 2|{0} % 3|{0} // 2|{0} & 3|{0} ^ 5|{0} << 1|{0} >> 1|jnp.abs({0})|-{0}
    lax.population_count({0})|lax.clz({0})|jnp.minimum({0}, 2)|jnp.clip({0}, 0, 2)|~{0}
    jnp.where({0} > 1, {0}, 7)|lax.rem({0}, jnp.int32(5))|jnp.maximum({0}, jnp.int32(1))
    """

_TO_BOOL = "{0} > 0|{0} <= 0.5|jnp.isfinite({0})|{0} != 0|jnp.isnan({0})|{0} == 0|{0} < 1e5"

_REDUCE = """
    jnp.sum({0}{a})|jnp.mean({0}{a})|jnp.max({0}{a})|jnp.min({0}{a})|jnp.var({0}{a})
    jnp.prod({0}{a})|jax.nn.logsumexp({0}{a})|jnp.linalg.norm({0}{a})|jnp.std({0}{a})
    """

_COMPUTES = ("dot", "@", "einsum", "conv", "matmul", "tensordot", "vdot", "cov", "kron")


def _codes(table: str) -> list[str]:
    return [code.strip() for row in table.strip().splitlines() for code in row.split("|")
            if code.strip()]  # fmt: skip


UNARY, BINARY, SQUARE = _codes(_UNARY), _codes(_BINARY), _codes(_SQUARE)
INT, TO_INT, REDUCE = _codes(_INT), _codes(_TO_INT), _codes(_REDUCE)
BOOL = ["~{0}", "jnp.logical_xor({0}, True)", "{0} & True", "jnp.logical_or({0}, False)"]
TO_BOOL = _codes(_TO_BOOL)

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
        self.stmts[-1].append(
            Stmt(outs, code, tuple(ins), tuple(bodies), scope, many)
        )
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
            return self.make(Type(kind, self.rng.choice(_SHAPES) if shape is None else shape))
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
                if _broadcasts(v.type.shape, shape):
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
        depth = len(self.frames)
        kinds: list[tuple[float, Callable[[], Any]]] = [
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
        if depth <= self.max_depth:
            kinds += [(w * 0.45, fn) for w, fn in self.structures()]
        weights = [w for w, _ in kinds]
        self.rng.choices([fn for _, fn in kinds], weights)[0]()

    def unary(self) -> None:
        v = self.pick("f")
        code = self.rng.choice(UNARY)
        rank = 2 if "@" in code else 1 if any(x in code for x in _NEEDS_AXIS) else 0
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
                if v.type.kind == "f" and _broadcasts(v.type.shape, a.type.shape)
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
        lit = self.rng.choice(_LITERALS)
        forms = ["{{0}} * {}", "{{0}} + {}", "{} - {{0}}", "{{0}} / ({} + 0.5)", "jnp.maximum({{0}}, {})"]
        if self.rng.random() < 0.2:
            lit = self.rng.choice(_LARGE)
            forms = ["jnp.where({{0}} > 0, {{0}}, {})", "jnp.minimum({{0}}, {})", "{{0}} + {}"]
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
                ("jnp.pad({0}, [(1, 0)] + [(0, 0)] * ({0}.ndim - 1))", (k + 1, *shape[1:])),
                ("jnp.take({0}, jnp.array([0, 0]), axis=0)", (2, *shape[1:])),
                ("lax.dynamic_slice_in_dim({0}, 0, 1)", (1, *shape[1:])),
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
        """A Python loop that adds a little to what it keeps."""
        a, w = self.pick("f", (3, 3)), self.pick("f", (3, 3))
        steps = self.rng.choice([3, 10])
        step = self.rng.choice(
            ["y + 1e-3 * jnp.tanh(y @ w)", "jax.nn.sigmoid(7 + y @ w) * y + 0.1",
             "y - 0.01 * jax.grad(lambda y: jnp.sum((y @ w) ** 2))(y)", "0.999 * y + w"]
        )  # fmt: skip
        self.emit(
            f"functools.reduce(lambda y, _, w={{1}}: {step}, range({steps}), {{0}})",
            [a, w], a.type,
        )  # fmt: skip

    # Structures

    def structures(self) -> list[tuple[float, Callable[[], Any]]]:
        return [
            (1.5, self.jit),
            (2.0, self.scan),
            (1.0, self.fori),
            (0.3 if self.reverse else 1.0, self.while_loop),
            (1.5, self.cond),
            (1.0, self.remat),
            (1.0, self.custom_jvp),
            (1.0, self.custom_vjp),
            (0.7, self.vmap),
            (0.7, self.gradient),
            (0.5, self.map),
            (0.4, self.custom_vmap),
            (0.4, self.linear_solve),
            (0.4, self.called_twice),
            (0.3, self.callback),
            (0.3, self.linear_call),
            (0.3, self.custom_root),
            (0.4, self.checkpointed_scan),
        ]

    def body(
        self, params: Sequence[Type], results: Sequence[Type], most: int = 3
    ) -> Body:
        """A function of its own, made of a few statements."""
        variables = tuple(self.fresh(t, "p") for t in params)
        self.frames.append(list(variables))
        self.stmts.append([])
        for _ in range(self.rng.randint(1, most)):
            if self.budget > 0:
                self.statement()
        outs = tuple(self.result(t) for t in results)
        self.frames.pop()
        stmts = tuple(self.stmts.pop())
        self.counter += 1
        return Body(f"f{self.counter}", variables, stmts, outs)

    def result(self, type: Type) -> Var:
        """A result of a body: rather something that the body has made."""
        inner = [v for v in self.frames[-1] if v.type == type]
        if inner and self.rng.random() < 0.9:
            return self.rng.choice(inner[-3:])
        if type.kind == "f" and self.rng.random() < 0.6:
            made = [v for v in self.frames[-1] if v.type.kind == "f"]
            if made:
                v = self.rng.choice(made[-3:])
                if v.type == type:
                    return v
                return self.emit(f"jnp.resize({{0}}, {type.shape})", [v], type)
        return self.pick(type.kind, type.shape)

    def types(self, most: int = 2) -> list[Type]:
        """Types of what a structure takes or gives: those of variables, mostly."""
        chosen = [self.pick("f").type for _ in range(self.rng.randint(1, most))]
        if self.rng.random() < 0.6:
            chosen[0] = Type("f", (3, 3))
        if self.rng.random() < 0.12:
            chosen.append(self.pick(self.rng.choice("ib")).type)
        if self.rng.random() < 0.08:
            chosen.append(self.pick(self.rng.choice("he")).type)
        return chosen

    def operands(self, types: Sequence[Type]) -> list[Var]:
        return [self.pick(t.kind, t.shape) for t in types]

    def called(self, wrapper: str, types: Any = None, outs: Any = None) -> None:
        types, outs = types or self.types(), outs or self.types()
        ins = self.operands(types)
        body = self.body(types, outs)
        self.emit_many(f"{wrapper}({places(len(ins))})", ins, outs, [body])

    def jit(self) -> None:
        wrapper = ["jax.jit({f0})"] * 4 + [
            "jax.jit({f0}, inline=True)",
            "jax.named_call({f0}, name='called')",
            "jax.jit(jax.jit({f0}))",
        ]
        self.called(self.rng.choice(wrapper))

    def called_twice(self) -> None:
        """One jitted function, called on two sets of operands."""
        types, outs = self.types(), self.types()
        ins = self.operands(types) + self.operands(types)
        n = len(types)
        body = self.body(types, outs)
        code = f"(lambda f: (f({places(n)}), f({places(n, n)})))(jax.jit({{f0}}))"
        self.emit_many(code, ins, [*outs, *outs], [body])

    def remat(self) -> None:
        policy = self.rng.choice(
            ["", "", ", policy=jax.checkpoint_policies.dots_saveable",
             ", policy=jax.checkpoint_policies.nothing_saveable",
             ", policy=jax.checkpoint_policies.everything_saveable",
             ", policy=jax.checkpoint_policies.save_only_these_names('saved')",
             ", prevent_cse=False"]
        )  # fmt: skip
        self.called(f"jax.checkpoint({{f0}}{policy})")

    def vmap(self) -> None:
        types = [Type("f", (3,)), Type("f", self.rng.choice([(), (3,), (3, 3)]))]
        outs = [Type("f", self.rng.choice([(), (3,)]))]
        ins = [self.pick("f", (3, 3)), self.pick("f", types[1].shape)]
        body = self.body(types, outs)
        batched = Type("f", (3, *outs[0].shape))
        code = "jax.vmap({f0}, in_axes=(%d, None))({0}, {1})" % self.rng.randrange(2)
        self.emit_many(code, ins, [batched], [body])

    def map(self) -> None:
        ins = [self.pick("f", (3, 3))]
        body = self.body([Type("f", (3,))], [Type("f", (3,))])
        self.emit_many("lax.map({f0}, {0})", ins, [Type("f", (3, 3))], [body])

    def gradient(self) -> None:
        types = [Type("f", (3, 3)), Type("f", self.rng.choice([(), (3,), (3, 3)]))]
        ins = self.operands(types)
        was, self.reverse = self.reverse, True
        body = self.body(types, [Type("f", (3, 3))])
        self.reverse = was
        code = self.rng.choice(
            ["jax.grad(lambda *a: jnp.sum({f0}(*a)[0] * 0.5), (0, 1))({0}, {1})",
             "jax.jvp(lambda a: {f0}(a, {1})[0], ({0},), ({0},))",
             "jax.vjp(lambda a: {f0}(a, {1})[0], {0})[1]({0})",
             "jax.linearize(lambda a: {f0}(a, {1})[0], {0})[1]({0})"]
        )  # fmt: skip
        square = Type("f", (3, 3))
        outs = {"gr": types, "jv": [square] * 2}.get(code[4:6], [square])
        self.emit_many(code, ins, outs, [body])

    def scan(self, wrap: str = "{f0}") -> None:
        carry = self.types()
        length = self.rng.choice([1, 2, 3, 3])
        xs = [Type("f", self.rng.choice([(), (3,), (3, 3)])) for _ in range(self.rng.randrange(3))]
        ys = self.types(1) if self.rng.random() < 0.6 else []
        ys = [t for t in ys if len(t.shape) < 3]
        ins = self.operands(carry)
        stacked = [Type("f", (length, *t.shape)) for t in xs]
        ins += [self.pick("f", t.shape) for t in stacked]
        body = self.body([*carry, *xs], [*carry, *ys], 4)
        n, m = len(carry), len(ins)
        options = self.rng.choice(["", "", ", reverse=True", ", unroll=2", ", reverse=True, unroll=2"])
        code = (
            f"lax.scan(lambda c, x: split({wrap}(*c, *x), {n}), ({places(n)}), "
            f"({places(m - n, n)}), length={length}{options})"
        )
        outs = [*carry, *(Type(t.kind, (length, *t.shape)) for t in ys)]
        self.emit_many(code, ins, outs, [body])

    def checkpointed_scan(self) -> None:
        self.scan("jax.checkpoint({f0})")

    def fori(self) -> None:
        carry = self.types()
        ins = self.operands(carry)
        body = self.body([Type("i"), *carry], carry, 4)
        bound = "3"
        if not self.reverse and self.rng.random() < 0.5:
            bound = f"{{{len(ins)}}} % 4"
            ins.append(self.pick("i", ()))
        n = len(carry)
        code = (
            f"lax.fori_loop(0, {bound}, lambda i, c: {{f0}}(jnp.asarray(i, jnp.int32), *c)"
            f", ({places(n)}))"
        )
        self.emit_many(code, ins, carry, [body])

    def while_loop(self) -> None:
        carry = self.types()
        ins = self.operands(carry)
        body = self.body(carry, carry)
        n = len(carry)
        go = "c[0] < 3"
        if self.rng.random() < 0.4:
            go = "(c[0] < 40) & (jnp.sum(jnp.abs(c[1])) > 1e-3)"
        shrink = self.rng.random() < 0.4 and carry[0].kind == "f"
        update = "{f0}(*c[1:])"
        if shrink:  # to a fixed point
            update = "(lambda o: (0.3 * jnp.tanh(o[0]), *o[1:]))({f0}(*c[1:]))"
        code = (
            f"lax.while_loop(lambda c: {go}, lambda c: (c[0] + 1, *{update}), "
            f"(jnp.int32(0), {places(n)}))[1:]"
        )
        self.emit_many(code, ins, carry, [body])

    def cond(self) -> None:
        types, outs = self.types(), self.types()
        ins = self.operands(types)
        n = len(types)
        if self.rng.random() < 0.7:
            bodies = [self.body(types, outs, 2), self.body(types, outs, 2)]
            pred = self.pick("b", ())
            code = f"lax.cond({{{n}}}, {{f0}}, {{f1}}, {places(n)})"
        else:
            bodies = [self.body(types, outs, 2) for _ in range(3)]
            pred = self.pick("i", ())
            code = f"lax.switch({{{n}}} % 3, [{{f0}}, {{f1}}, {{f2}}], {places(n)})"
        self.emit_many(code, [*ins, pred], outs, bodies)

    def custom_jvp(self) -> None:
        types = [Type("f", (3, 3)), self.pick("f").type]
        ins = self.operands(types)
        outs = [Type("f", (3, 3))]
        body = self.isolated(types, outs)
        code = (
            "with_jvp({f0})({0}, {1})"
            if self.rng.random() < 0.5
            else "with_jvp({f0}, jitted=True)({0}, {1})"
        )
        self.emit_many(code, ins, outs, [body])

    def custom_vjp(self) -> None:
        types = [Type("f", (3, 3)), self.pick("f").type]
        ins = self.operands(types)
        outs = [Type("f", (3, 3)), *([self.pick("f").type] if self.rng.random() < 0.4 else [])]
        body = self.isolated(types, outs)
        code = self.rng.choice(
            ["with_vjp({f0})({0}, {1})", "with_vjp({f0}, scale=2.0)({0}, {1})",
             "with_vjp(jax.jit({f0}))({0}, {1})"]
        )  # fmt: skip
        self.emit_many(code, ins, outs, [body])

    def isolated(self, types: Sequence[Type], outs: Sequence[Type]) -> Body:
        """A body that reads nothing around it: rules may not close over tracers."""
        frames, self.frames = self.frames, [[] for _ in self.frames]
        body = self.body(types, outs)
        self.frames = frames
        return body

    def custom_vmap(self) -> None:
        types = [Type("f", (3,)), Type("f", (3, 3))]
        ins = [self.pick("f", (3, 3)), self.pick("f", (3, 3))]
        body = self.isolated(types, [Type("f", (3,))])
        code = "jax.vmap(with_vmap({f0}), (0, None))({0}, {1})"
        if self.rng.random() < 0.4:
            code = "with_vmap({f0})({0}[0], {1}) * jnp.ones((3, 1))"
        self.emit_many(code, ins, [Type("f", (3, 3))], [body])

    def linear_solve(self) -> None:
        ins = [self.pick("f", (3, 3)), self.pick("f", (3,))]
        code = self.rng.choice(
            ["jax.scipy.sparse.linalg.cg(lambda v: ({0}.T @ ({0} @ v)) * 0.1 + 2 * v, {1}, maxiter=5)[0]",
             "jax.scipy.linalg.solve({0} @ {0}.T + 3 * jnp.eye(3), {1}, assume_a='pos')",
             "lax.custom_linear_solve(lambda v: 0.1 * ({0} @ v) + 4 * v, {1}, lambda mv, b: b / 4, lambda mv, b: b / 4)",
             "jax.scipy.sparse.linalg.gmres(lambda v: 0.1 * ({0} @ v) + 4 * v, {1}, maxiter=2)[0]"]
        )  # fmt: skip
        self.emit(code, ins, Type("f", (3,)))

    def callback(self) -> None:
        v = self.pick("f")
        shape = v.type.shape
        code = self.rng.choice(
            [f"jax.pure_callback(np.tanh, jax.ShapeDtypeStruct({shape}, jnp.float32), "
             "lax.stop_gradient({0}), vmap_method='sequential')",
             "(jax.debug.callback(lambda x: None, {0}), {0} * 2)[1]"]
        )  # fmt: skip
        self.emit(code, [v], v.type)

    def linear_call(self) -> None:
        ins = [self.pick("f", (3, 3)), self.pick("f", (3,))]
        code = (
            "jax.custom_derivatives.linear_call(lambda r, x: r @ x, lambda r, t: r.T @ t, "
            "{0}, {1})"
        )
        self.emit(code, ins, Type("f", (3,)))

    def custom_root(self) -> None:
        ins = [self.pick("f", (3, 3)), self.pick("f", (3,))]
        code = (
            "lax.custom_root(lambda z: z - jnp.tanh(0.1 * ({0} @ z) + {1}), jnp.zeros(3), "
            "lambda f, z: lax.fori_loop(0, 5, lambda _, z: z - f(z), z), "
            "lambda g, y: jnp.linalg.solve(jax.jacobian(g)(y), y))"
        )
        self.emit(code, ins, Type("f", (3,)))


def places(n: int, start: int = 0) -> str:
    return "".join(f"{{{i}}}, " for i in range(start, start + n))


def _broadcasts(shape: Shape, to: Shape) -> bool:
    if len(shape) > len(to):
        return False
    return all(a in (1, b) for a, b in zip(reversed(shape), reversed(to), strict=False))


_TREES = ["({all})", "({all})", "[{all}]", "{{'out': ({all}), 'none': None}}", "({all}), {{'more': {0}}}"]


def make_program(rng: random.Random, reverse: bool, size: int | None = None) -> Program:
    """A random program; `reverse` says that it will be differentiated backwards."""
    maker = Maker(rng, reverse=reverse)
    maker.budget = size or rng.choice([3, 4, 5, 6, 8, 12])
    values_rng = np.random.default_rng(rng.randrange(2**32))
    args = [Type("f", (3, 3)), Type("f", (3, 3))]
    args += [Type("f", rng.choice(_SHAPES)) for _ in range(rng.randrange(3))]
    if rng.random() < 0.3:
        args.append(Type(rng.choice("iibhe"), rng.choice([(), (3,)])))
    variables = [maker.fresh(t, "a") for t in args]
    values = [_value(values_rng, t, rng) for t in args]
    consts: list[tuple[Var, str]] = []
    for _ in range(rng.choice([0, 0, 1, 2])):
        t = Type("f", rng.choice(_SHAPES))
        var = maker.fresh(t, "k")
        consts.append((var, _const(values_rng, t, rng)))
    maker.frames = [[v for v, _ in consts] + variables]
    maker.stmts = [[]]
    while maker.budget > 0:
        maker.statement()
    made = [v for stmt in maker.stmts[0] for v in stmt.outs]
    floats = [v for v in made if v.type.kind == "f"] or made
    results = [made[-1], rng.choice(floats)]
    results += rng.sample(made, min(len(made), rng.randrange(3)))
    if rng.random() < 0.4:
        results.append(rng.choice(maker.frames[0]))  # handed on as it came
    results = list(dict.fromkeys(results))
    return Program(
        tuple(variables),
        tuple(values),
        tuple(consts),
        tuple(maker.stmts[0]),
        tuple(results),
        rng.choice(_TREES),
    ).without_dead_code()


def _value(values: np.random.Generator, t: Type, rng: random.Random) -> Any:
    if t.kind == "i":
        return np.asarray(values.integers(0, 5, t.shape), np.int32)
    if t.kind == "b":
        return np.asarray(values.integers(0, 2, t.shape), np.bool_)
    x = np.asarray(values.normal(size=t.shape), np.float32)
    if t.kind in "he":
        import ml_dtypes

        return x.astype(ml_dtypes.bfloat16 if t.kind == "h" else np.float16)
    scale = rng.choice([1.0] * 12 + [30.0, 1e-3, 1e5])
    if t.shape == () and rng.random() < 0.2:
        return float(x)  # a Python number, weakly typed where it is traced
    return np.asarray(x * np.float32(scale), np.float32)


def _const(values: np.random.Generator, t: Type, rng: random.Random) -> str:
    x = np.asarray(values.normal(size=t.shape), np.float32)
    if rng.random() < 0.15:
        x = np.asarray(x * 1e5, np.float32)
    module = rng.choice(["jnp", "jnp", "np"])
    return f"{module}.array({x.tolist()}, {module}.float32)"
