"""Programs of which it is known beforehand what each contraction must read.

Each layer has a size that no other has, so that its contractions are known by their
sizes wherever they stand: forward, made again, in loops, in rules and backward."""

import itertools
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .programs import Body, Program, Stmt, Type, Var

SIZES = (7, 11, 13, 17, 19, 23)
ROWS, WIDTH = 4, 5


@dataclass(frozen=True)
class Reads:
    """What contractions must read: those that have all of some sizes, and of these the
    operands that have all of some others."""

    among: frozenset[int]
    of: frozenset[int]
    dtypes: tuple[str, ...]


# Scopes


@dataclass
class Scoped:
    """Writes layers in scopes in scopes, within checkpoints, calls and loops."""

    rng: random.Random
    layers: list[tuple[int, tuple[str, ...]]]  # the size of each, and its scopes
    count: int = 0

    def var(self, prefix: str, *shape: int) -> Var:
        self.count += 1
        return Var(f"{prefix}{self.count}", Type("f", shape))

    def body(self, path: tuple[str, ...], depth: int) -> Body:
        y = self.var("p", ROWS, WIDTH)
        stmts: list[Stmt] = []
        last = y
        for _ in range(self.rng.choice([1, 2])):
            if len(self.layers) < len(SIZES):
                last = self.statement(stmts, last, path, depth)
        self.count += 1
        return Body(f"f{self.count}", (y,), tuple(stmts), (last,))

    def statement(
        self, stmts: list[Stmt], y: Var, path: tuple[str, ...], depth: int
    ) -> Var:
        scope = self.rng.choice([None, *_SCOPES, *_SCOPES])
        path = path if scope is None else (*path, scope)
        out = self.var("v", ROWS, WIDTH)
        if depth >= 4 or self.rng.random() < 0.35:
            size = SIZES[len(self.layers)]
            self.layers.append((size, path))
            w, u = (Var(f"{name}{size}", Type("f")) for name in "wu")
            code = self.rng.choice(_LAYERS)
            stmts.append(Stmt((out,), code, (y, w, u), scope=scope))
        else:
            code = self.rng.choice(_WRAPPERS)
            stmts.append(
                Stmt((out,), code, (y,), (self.body(path, depth + 1),), scope, True)
            )
        return out


_SCOPES = ("outer", "inner", "alpha")
_LAYERS = [
    "{0} + jnp.tanh({0} @ {1}) @ {2}",
    "{0} + jnp.sin({0} @ {1}) @ {2}",
    "{0} + 0.1 * (jax.nn.softmax({0} @ {1}) @ {2})",
    "jnp.einsum('ij,jk->ik', {0}, {1}) @ {2}",
]
_WRAPPERS = [
    "jax.checkpoint({f0})({0})", "jax.checkpoint({f0})({0})", "{f0}({0})",
    "jax.jit({f0})({0})", "jax.checkpoint(jax.jit({f0}))({0})",
    "jax.jit(jax.checkpoint({f0}))({0})",
    "jax.checkpoint({f0}, policy=jax.checkpoint_policies.dots_saveable)({0})",
    "lax.scan(lambda y, _: ({f0}(y)[0], None), {0}, length=2)[0]",
    "lax.scan(jax.checkpoint(lambda y, _: ({f0}(y)[0], None)), {0}, length=2)[0]",
    "jax.checkpoint(lambda y: lax.fori_loop(0, 2, lambda _, y: {f0}(y)[0], y))({0})",
    "lax.cond(jnp.asarray(True), lambda y: {f0}(y)[0], lambda y: y, {0})",
]  # fmt: skip


def make_scoped(
    rng: random.Random,
) -> tuple[Program, list[tuple[int, tuple[str, ...]]]]:
    """A program, and the size and the scopes of each of its layers."""
    maker = Scoped(rng, [])
    x = Var("x", Type("f", (ROWS, WIDTH)))
    stmts: list[Stmt] = []
    last = x
    for _ in range(rng.choice([1, 2])):
        if len(maker.layers) < len(SIZES):
            last = maker.statement(stmts, last, (), 0)
    shapes = {"x": (ROWS, WIDTH)}
    for size, _ in maker.layers:
        shapes |= {f"w{size}": (WIDTH, size), f"u{size}": (size, WIDTH)}
    return _program(rng, shapes, stmts, last), maker.layers


def _program(
    rng: random.Random, shapes: dict[str, tuple[int, ...]], stmts: Any, last: Var
) -> Program:
    values = np.random.default_rng(rng.randrange(2**32))
    arrays = [
        np.asarray(values.normal(size=s) / 2, np.float32) for s in shapes.values()
    ]
    args = tuple(Var(name, Type("f", shape)) for name, shape in shapes.items())
    return Program(args, tuple(arrays), (), tuple(stmts), (last,), "({all})")


def make_rules(
    rng: random.Random, layers: Sequence[tuple[int, tuple[str, ...]]], dtype: str
) -> tuple[str, tuple[Reads, ...]]:
    """The code of a policy with rules for scopes, and what it says of each layer."""
    keys = list(dict.fromkeys(_keys(rng, layers)))
    rows = {key: rng.choice(list(_DTYPES)) for key in keys}
    code = ", ".join(f"{key_code(key)}: {rule}" for key, rule in rows.items())
    reads = []
    for size, path in layers:
        found = _find(rows, path)
        low = _DTYPES[found] if found else None
        reads.append(Reads(frozenset([size]), frozenset(), (low or dtype,)))
    return f"default_amp_policy | {{{code}}}", tuple(reads)


# Of a rule, the dtype of contractions; `None`: the compute dtype.
_DTYPES: dict[str, str | None] = {
    '"float32"': "float32",
    "use_original_precision": "float32",
    "use_compute_precision": None,
    '"float16"': "float16",
    '"bfloat16"': "bfloat16",
}


def _keys(rng: random.Random, layers: Any) -> Iterator[tuple[str, str]]:
    """Kinds and texts of keys, each of which matches somewhere."""
    for _ in range(rng.choice([1, 1, 2, 3])):
        _, path = rng.choice(layers)
        if not path:
            continue
        end = rng.randint(1, len(path))
        start = rng.randrange(end)
        part = "/".join(path[start:end])
        whole = "/".join(path[:end])
        yield rng.choice(
            [("path", path[-1]), ("path", part), ("path", part),
             ("regex", whole), ("regex", f".*{path[end - 1]}"),
             ("regex", f"{path[0]}(/.*)?")]
        )  # fmt: skip


def key_code(key: tuple[str, str]) -> str:
    kind, text = key
    return repr(text) if kind == "path" else f"re.compile({text!r})"


def _find(rows: dict[tuple[str, str], str], path: tuple[str, ...]) -> str | None:
    """The rule of a scope: the outermost that matches, and of those the longest."""
    for end in range(1, len(path) + 1):
        for start in range(end):
            if rule := rows.get(("path", "/".join(path[start:end]))):
                return rule
        for (kind, text), rule in rows.items():
            if kind == "regex" and re.fullmatch(text, "/".join(path[:end])):
                return rule
    return None


# Derivative rules by hand, in 8 bits

_FORWARD = ["x @ w", "jnp.einsum('mk,kn->mn', x, w)", "(w.T @ x.T).T"]
_TO_INPUT = [
    "g @ w.T", "(w @ g.T).T", "jnp.einsum('mn,kn->mk', g, w)",
    "jnp.einsum('kn,mn->mk', w, g)",
]  # fmt: skip
_TO_WEIGHT = [
    "x.T @ g", "(g.T @ x).T", "jnp.einsum('mk,mn->kn', x, g)",
    "jnp.einsum('mn,mk->kn', g, x)",
]  # fmt: skip
_COTANGENTS = ["g", "g", "g * 1.0", "2.0 * g", "g * jnp.where(g > 0, 1.0, 0.9)"]
_BETWEEN = ["jnp.tanh({})", "jax.nn.gelu({})", "{}", "jax.nn.standardize({}, -1)"]
_AROUND = ["{}", "{}", "jax.checkpoint({})", "jax.jit({})"]


def make_ruled(rng: random.Random) -> tuple[Program, tuple[Reads, ...]]:
    """Layers with a derivative rule by hand, whose contractions are in any order."""
    many = rng.choice([1, 2, 2, 3])
    widths = rng.sample([8, 12, 16, 20, 24, 28], many + 1)
    rows = 6
    shapes = {"x": (rows, widths[0])}
    stmts: list[Stmt] = []
    reads: list[Reads] = []
    last = Var("x", Type("f", shapes["x"]))
    for i, (n, m) in enumerate(itertools.pairwise(widths)):
        w = Var(f"w{i}", Type("f", (n, m)))
        shapes[w.name] = w.type.shape
        out = Var(f"v{i}", Type("f", (rows, m)))
        stmts.append(Stmt((out,), _ruled_layer(rng), (last, w)))
        last = out
        for of, dtype in ({rows, m}, E5M2), ({rows, n}, E4M3), ({n, m}, E4M3):
            among = frozenset([rows, n, m])
            reads.append(Reads(among, frozenset(of), (dtype, *IN_FULL)))
    return _program(rng, shapes, stmts, last), tuple(reads)


E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
IN_FULL = ("float32", "bfloat16", "float16")


def _ruled_layer(rng: random.Random) -> str:
    forward = rng.choice(_FORWARD)
    if rng.random() < 0.25:
        layer = f"(lambda x, w: {forward})"
    else:
        g = rng.choice(_COTANGENTS)
        layer = (
            f"with_backward(lambda x, w: {forward}, lambda x, w, g: "
            f"(lambda g: ({rng.choice(_TO_INPUT)}, {rng.choice(_TO_WEIGHT)}))({g}))"
        )
    around = rng.choice(_AROUND).format(layer)
    return rng.choice(_BETWEEN).format(f"{around}({{0}}, {{1}})")


# Containers

CONTAINERS = ("tuple", "list", "dict", "record", "nested")


def make_batched(rng: random.Random) -> Program:
    """A function of weights, and of a batch of a few arrays."""
    k, n, m = rng.sample([8, 12, 16, 20, 24, 28], 3)
    rows = rng.choice([6, n])
    shapes = {"w": (k, n), "x": (rows, k), "z": (rows, k), "t": (rows, n)}
    names = {name: Var(name, Type("f", shape)) for name, shape in shapes.items()}
    out = Var("v", Type("f", (rows, n)))
    body = rng.choice(
        ["jnp.tanh({1} @ {0}) * {3} + jnp.sin({2} @ {0})",
         "jnp.tanh(({1} + {2}) @ {0}) - {3}",
         "jnp.einsum('mk,kn->mn', {1}, {0}) * {3} + {2}.sum()",
         "({0}.T @ {1}.T).T + {3} * ({2} @ {0})",
         "({1} @ {2}.T) @ jnp.tanh({1} @ {0}) + {3}"]
    )  # fmt: skip
    del m
    return _program(rng, shapes, [Stmt((out,), body, tuple(names.values()))], out)


# What is made again outside of `amp`, of what it returns

TAILS = [
    "-jnp.mean(jax.nn.log_softmax(y, -1)[jnp.arange(3), jnp.array([0, 2, 1])])",
    "jnp.mean(jax.nn.logsumexp(y, -1) - y[:, 0])",
    "jnp.mean((y - 0.5) ** 2)",
    "jnp.sum(jnp.sin(y))",
    "jnp.sum(y - jnp.max(y, -1, keepdims=True))",
    "jnp.mean(jnp.logaddexp(0.0, y) - 0.5 * y)",
    "jnp.sum(jnp.square(y - y.mean()))",
]
_LOGITS = [
    "{0} @ {1}", "OFFSET + {0} @ {1}", "jnp.tanh({0} @ {1}) @ {1}",
    "SCALE * (jnp.tanh({0} @ {1}) @ {1})", "jnp.sin({0}) @ {1} + {0}",
]  # fmt: skip


def make_tailed(rng: random.Random, offsets: Any) -> tuple[Program, str]:
    """A loss and the logits that it is made of, and the code that makes it of them."""
    code = rng.choice(_LOGITS).replace("OFFSET", rng.choice(offsets))
    code = code.replace("SCALE", rng.choice(["10.0", "30.0"]))
    tail = rng.choice(TAILS)
    square = Type("f", (3, 3))
    x, w, logits = Var("x", square), Var("w", square), Var("y", square)
    loss = Var("loss", Type("f"))
    stmts = [
        Stmt((logits,), code, (x, w)),
        Stmt((loss,), f"(lambda y: {tail})({{0}})", (logits,)),
    ]
    program = _program(rng, {"x": (3, 3), "w": (3, 3)}, stmts, loss)
    return Program(*program_parts(program), (loss, logits), "({all})"), tail


def program_parts(program: Program) -> tuple[Any, ...]:
    return program.args, program.values, program.consts, program.stmts
