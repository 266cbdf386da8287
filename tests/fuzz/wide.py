"""Random statements whose numbers are far from 1, are read often, or add up as logs.

An offset makes a rounding large: 2^-9 of a coordinate of 300 is more than a pixel. So
what tells small differences of large numbers (a phase, a deviation from a mean, a
distance, a probability out of its logarithm) shows which values a gradient was made
of, and how cotangents were added up."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .generate import Structures
from .programs import Type, Var

SQUARE = Type("f", (3, 3))

OFFSETS = "1e-4 0.03 1.0 30.0 60.0 180.0 300.0 300.0 1e3 1e4".split()
SCALES = "1e-4 1e-3 0.03 0.3 3.0 30.0 1e3 1e4".split()

# Of what an offset changes little or nothing in exact arithmetic: of `y`, (3, 3).
_READERS = """
    jnp.sin(y)|jnp.cos(y)|y - y.mean(-1, keepdims=True)|y - jnp.mean(y)|y % 1.0
    y - jnp.max(y, -1, keepdims=True)|jax.nn.softmax(y, -1)|jax.nn.log_softmax(y, -1)
    jax.nn.standardize(y, -1)|jax.nn.standardize(y, -1)|y - jnp.floor(y)
    y - jnp.roll(y, 1, -1)|y - jnp.roll(y, 1, 0)|distances(y)|interpolated(y)
    jnp.tanh(y - lax.stop_gradient(y.mean()))|y * lax.rsqrt(jnp.mean(y**2, -1, keepdims=True))
    jnp.exp(y - jax.nn.logsumexp(y, -1, keepdims=True))|jnp.std(y, -1, keepdims=True) * w
    jnp.exp(-jnp.square(y - y[:1]))|jnp.abs(y - y.T)|y - lax.stop_gradient(jnp.round(y))
    """  # fmt: skip
READERS = [code.strip() for code in _READERS.replace("\n", "|").split("|")
           if code.strip()]  # fmt: skip

ACTIVATIONS = ["{}", "jnp.tanh({})", "jnp.sin({})", "jax.nn.gelu({})", "0.1 * ({})"]

# A loop whose carry is `y`, written out or as a loop, of the step, the count, what it
# begins with and the matrix that it reads.
LOOPS = [
    "functools.reduce(lambda y, _, w={w}: {step}, range({n}), {init})",
    "lax.fori_loop(0, {n}, lambda _, y, w={w}: {step}, {init})",
    "lax.scan(lambda y, _, w={w}: ({step}, None), {init}, length={n})[0]",
    "lax.scan(jax.checkpoint(lambda y, _, w={w}: ({step}, None)), {init}, length={n})[0]",
    "functools.reduce(lambda y, _, w={w}: jax.checkpoint(lambda y, w: {step})(y, w), "
    "range({n}), {init})",
]

# A sum over `n` readers of `y`, each of which does `read` with a number `k` of its own.
SUMS = [
    "sum({read} for k in range(1, {n} + 1))",
    "lax.scan(lambda s, k: (s + {read}, None), jnp.zeros((3, 3)), "
    "jnp.arange(1.0, {n} + 1))[0]",
    "jax.vmap(lambda k: {read})(jnp.arange(1.0, {n} + 1)).sum(0)",
]

# Of a large `y` and a matrix `w`: what a product reads, and something else, too.
_OUT_OF_SIGHT = [
    # derivative rules that read what the function only multiplies
    "with_backward(lambda x, w: x @ w, lambda x, w, g: ((g @ w.T) * jnp.cos(x), "
    "x.T @ g))(y, w) / 300",
    "with_backward(lambda x, w: x @ w, lambda x, w, g: (g @ (w * jnp.sin(x)).T, "
    "jnp.cos(x).T @ g))(y, w) / 300",
    # numbers that are nearly equal
    "jnp.maximum(jax.nn.sigmoid(y @ w), jax.nn.sigmoid(y @ w + 0.01 * (y @ w.T))) @ w",
    "jnp.max(jnp.stack([jnp.cos(y) + 1e-3 * k * (y @ w) for k in range(4)]), 0) @ w",
    "lax.cummax(jax.nn.sigmoid(y @ w) + 1e-3 * w)[-1:] @ w * y",
    "jnp.clip(jnp.tanh(y @ w), jnp.sin(y) * 0.9, jnp.sin(y)) @ w",
    # a loop that starts from constants of which the largest is exact in 16 bits
    "lax.scan(lambda h, _: (h @ w, jnp.sin(h) * y), LARGE, None, length=2)[1].sum(0)",
    "jnp.sin(jnp.where(w > 0, y @ w, lax.convert_element_type(LARGE.astype(np.float16), "
    "jnp.float32))) * y",
    # a condition that ranks what the body multiplies
    "lax.while_loop(lambda c: (c[0] < 3) & (jnp.argmax(c[1][0]) == jnp.argmax(y[0])), "
    "lambda c: (c[0] + 1, c[1] @ lax.stop_gradient(jnp.eye(3) + 1e-4 * w)), "
    "(0, lax.stop_gradient(y)))[1] * 1e-3 @ w",
    # windows that overlap
    "lax.reduce_window(y @ w, -jnp.inf, lax.max, (3, 3), (1, 1), 'SAME') @ w",
]

# Of the rows of a product, which name the axis that they are mapped over.
_OVER_AN_AXIS = [
    "lax.pmean(r, 'rows')", "jnp.sin(lax.psum(r, 'rows')) * r", "r - lax.pmean(r, 'rows')",
    "(r - lax.pmean(r, 'rows')) * lax.rsqrt(1e-3 + lax.pmean(r * r, 'rows') "
    "- lax.pmean(r, 'rows') ** 2)",
    "lax.pmax(r, 'rows') - r", "jnp.sin(lax.all_gather(r, 'rows')).sum(0)",
]  # fmt: skip

_BY_NUMBER = [
    "jnp.sin(0.1 * k * y)", "jnp.tanh(y - 0.02 * k)", "y * jnp.cos(0.3 * k)",
    "jnp.exp(-0.01 * k * y**2)", "y / (1.0 + 0.1 * k)",
    "jax.nn.softmax(0.1 * k * y, -1)", "jnp.tanh(y @ (0.1 * k * w))",
    "(y + 0.1 * k) @ w", "jnp.sin(w.T @ (k * y))",
]  # fmt: skip


@dataclass
class Wide(Structures):
    """Writes such statements, and those of any program."""

    own: list[Var] = field(default_factory=list)  # what they made
    count: int = 0  # of arguments

    def kinds(self) -> list[tuple[float, Callable[[], Any]]]:
        own = [
            (3.0, self.shift),
            (8.0, self.stream),
            (3.0, self.in_logs),
            (4.0, self.read_often),
            (2.0, self.out_of_sight),
            (1.0, self.over_an_axis),
            (0.7, self.shift_low),
            (0.5, self.shift_integers),
        ]
        return own + [(0.25 * weight, fn) for weight, fn in super().kinds()]

    def structures(self) -> list[tuple[float, Callable[[], Any]]]:
        return [(0.5 * weight, fn) for weight, fn in super().structures()]

    def results(self, made: Sequence[Var]) -> list[Var]:
        """Those that statements of this kind made, rather than any."""
        own = [v for v in made if v in self.own] or list(made)
        # A result whose gradient is large hides those of others.
        more = self.rng.sample(made, min(len(made), self.rng.choice([0, 0, 0, 1, 2])))
        return [own[-1], *more]

    def matrix(self) -> Var:
        """Of weights: mostly the second argument, which is below 1."""
        return self.argument(1, 0.75)

    def argument(self, i: int, chance: float) -> Var:
        """Mostly an argument, which a gradient is taken of."""
        args = [v for v in self.visible() if v.name.startswith("a")]
        if len(args) > i and self.rng.random() < chance:
            return args[i]
        return self.pick("f", (3, 3))

    def interesting(self, code: str, ins: Sequence[Var], type: Type) -> None:
        self.own.append(self.emit(code, ins, type))

    def moved(self, value: Any) -> Any:
        choice = self.rng.random()
        self.count += 1
        if self.count == 2:  # see `matrix`
            return np.asarray(0.6 * value, np.float32)
        if not isinstance(value, np.ndarray) or choice > 0.3:
            return value
        by, scale = float(self.rng.choice(OFFSETS)), float(self.rng.choice(SCALES))
        if value.dtype == np.int32:
            return value + np.int32(by)
        if value.dtype != np.float32:
            return value
        moved = value * scale if choice < 0.1 else value + by
        return np.asarray(moved, np.float32)

    def offset(self) -> str:
        sign = "-" if self.rng.random() < 0.2 else ""
        return sign + self.rng.choice(OFFSETS)

    def shift(self) -> None:
        """Any value, somewhere else and in another size."""
        v = self.pick("f")
        code = self.rng.choice(
            ["{0} + OFFSET", "{0} + OFFSET", "{0} * SCALE", "OFFSET - {0}",
             "OFFSET + SCALE * {0}", "({0} + OFFSET) * SCALE", "{0} / SCALE"]
        )  # fmt: skip
        code = code.replace("OFFSET", self.offset())
        self.emit(code.replace("SCALE", self.rng.choice(SCALES)), [v], v.type)

    def shift_low(self) -> None:
        """Of 16 bits by its author's hand."""
        v = self.pick(self.rng.choice("he"))
        by = self.rng.choice(["0.03", "30.0", "300.0"])
        self.emit(f"{{0}} + {by}", [v], v.type)

    def shift_integers(self) -> None:
        """Indices that are large, as those of a long sequence are."""
        v = self.pick("i")
        by = self.rng.choice([100, 1000, 10_000])
        self.emit(f"({{0}} + {by}).astype(jnp.float32)", [v], Type("f", v.type.shape))

    def stream(self) -> None:
        """Steps that each add a contraction to a value whose differences are read."""
        y, w = self.argument(0, 0.4), self.matrix()
        reader = f"({self.rng.choice(READERS)})"
        read = f"({self.rng.choice(ACTIVATIONS).format(f'{reader} @ w')})"
        if self.rng.random() < 0.7:
            read = f"({read} @ w.T)"
        step = self.rng.choice([f"y + {read}"] * 3 + [f"y - 0.1 * {read}"])
        init = f"({self.offset()} + {self.rng.choice(['', '', '0.1 * '])}{{0}})"
        many = self.rng.choice([1, 2, 3, 4])
        loop = self.rng.choice(LOOPS)
        made = loop.format(step=step, n=many, init=init, w="{1}")
        if self.rng.random() < 0.25:
            made = f"({init} + {{1}} @ {{0}})"
        end = self.rng.choice([reader, reader, f"({self.rng.choice(READERS)})", "y"])
        self.interesting(f"(lambda y, w: {end})({made}, {{1}})", [y, w], SQUARE)

    def in_logs(self) -> None:
        """Recursions over logarithms of probabilities."""
        x, w = self.argument(0, 0.4), self.matrix()
        steps = self.rng.choice([3, 8, 20])
        drift = self.rng.choice(["0.0", "1.0", "10.0", "-30.0"])
        scores = (
            f"(jnp.sin(jnp.arange({3.0 * steps}).reshape(-1, 3)) @ {{1}} - {drift})"
        )
        moves = self.rng.choice(["jax.nn.log_softmax({0}, -1)", "{0}", "({0} @ {1})"])
        step = self.rng.choice(
            ["jax.nn.logsumexp(a[:, None] + t, 0) + e",
             "jnp.log(jnp.exp(a - a.max()) @ jnp.exp(t)) + a.max() + e",
             "jnp.logaddexp(a, jnp.roll(a, 1)) + e + 0.1 * t[0]",
             "jnp.max(a[:, None] + t, 0) + e"]
        )  # fmt: skip
        end = self.rng.choice(
            ["a", "jax.nn.logsumexp(a)", "a - jax.nn.logsumexp(a)", "jax.nn.softmax(a)"]
        )
        body = self.rng.choice(["{}", "jax.checkpoint({})"])
        body = body.format(f"lambda a, e: ({step}, None)")
        code = (
            f"(lambda t, x: (lambda a: {end} * jnp.ones(3))(lax.scan({body}, {{0}}[0], x)"
            f"[0]))({moves}, {scores})"
        )
        if self.rng.random() < 0.4:
            code = self.transported(steps)
        self.interesting(code, [x, w], Type("f", (3,)))

    def transported(self, steps: int) -> str:
        """Sinkhorn's algorithm, whose costs a contraction makes."""
        eps = self.rng.choice(["0.05", "0.3", "1.0"])
        f = f"-{eps} * jax.nn.logsumexp((g[None] - c) / {eps}, 1)"
        g = f"-{eps} * jax.nn.logsumexp((f[:, None] - c) / {eps}, 0)"
        both = f"(lambda f: (f, {g}))({f})"
        loops = [
            f"lax.scan(lambda fg, _: ((lambda f, g: {both})(*fg), None), s, "
            f"length={steps})[0]",
            f"functools.reduce(lambda fg, _: (lambda f, g: {both})(*fg), "
            f"range({min(steps, 5)}), s)",
        ]
        loop = self.rng.choice(loops)
        end = self.rng.choice(
            [
                "fg[0] - fg[0].mean()",
                "(jnp.exp((fg[0][:, None] + fg[1] - c) / EPS) * c)[0]",
            ]
        )
        end = end.replace("EPS", eps)
        costs = self.rng.choice(["{0} @ {1}.T", "jnp.tanh({0} @ {1})"])
        return (
            f"(lambda c, s: (lambda fg: {end})({loop}))({costs}, "
            "(jnp.zeros(3), jnp.zeros(3)))"
        )

    def read_often(self) -> None:
        """One value with many readers, contractions among them."""
        y, w = self.argument(0, 0.4), self.matrix()
        loop = self.rng.choice([*SUMS, SUMS[0]])
        n = round(2 * 50 ** self.rng.random())
        read = self.rng.choice(_BY_NUMBER)
        made = self.rng.choice(["{0} @ {1}", "{0} @ {1}", "{0}", "jnp.tanh({0} @ {1})"])
        if self.rng.random() < 0.3:
            made = f"{self.offset()} + {made}"
        total = loop.format(read=read, n=n)
        self.interesting(f"(lambda y, w: {total} / {n})({made}, {{1}})", [y, w], SQUARE)

    def out_of_sight(self) -> None:
        """A value that something reads which does not look like a reader."""
        y, w = self.argument(0, 0.4), self.matrix()
        scale = self.rng.choice(["", "30 * ", "0.1 * "])
        made = f"({self.offset()} + {scale}jnp.sin({{0}}))"
        end = self.rng.choice(_OUT_OF_SIGHT)
        self.interesting(f"(lambda y, w: {end})({made}, {{1}})", [y, w], SQUARE)

    def over_an_axis(self) -> None:
        """Collectives over an axis of `jax.vmap`."""
        y, w = self.argument(0, 0.4), self.matrix()
        read = self.rng.choice(_OVER_AN_AXIS)
        made = self.rng.choice(["{0} @ {1}", f"({self.offset()} + {{0}}) @ {{1}}"])
        code = f"jax.vmap(lambda r: {read}, axis_name='rows')({made})"
        self.interesting(f"{code} * {{0}}", [y, w], SQUARE)


class ReadOften(Wide):
    """Writes values with many readers alone."""

    def kinds(self) -> list[tuple[float, Callable[[], Any]]]:
        return [(3.0, self.read_often), (1.0, self.in_logs)]

    def structures(self) -> list[tuple[float, Callable[[], Any]]]:
        return [(0.3, self.scan), (0.3, self.remat), (0.2, self.jit)]
