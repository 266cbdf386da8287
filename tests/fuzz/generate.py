"""Random programs: structures that hold programs, nested, and a function of it all."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from .maker import SHAPES, Maker, places
from .programs import Body, Program, Type, Var


class Structures(Maker):
    """Writes statements that hold programs, too."""

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

    def results(self, made: Sequence[Var]) -> list[Var]:
        """Of what a program has made, what it returns."""
        rng = self.rng
        floats = [v for v in made if v.type.kind == "f"] or made
        results = [made[-1], rng.choice(floats)]
        results += rng.sample(made, min(len(made), rng.randrange(3)))
        if rng.random() < 0.4:
            results.append(rng.choice(self.frames[0]))  # handed on as it came
        return results

    def moved(self, value: Any) -> Any:
        """An argument, perhaps somewhere else."""
        return value

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
        axes = (self.rng.randrange(2), None)
        code = f"jax.vmap({{f0}}, in_axes={axes})({{0}}, {{1}})"
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
        xs = [
            Type("f", self.rng.choice([(), (3,), (3, 3)]))
            for _ in range(self.rng.randrange(3))
        ]
        ys = self.types(1) if self.rng.random() < 0.6 else []
        ys = [t for t in ys if len(t.shape) < 3]
        ins = self.operands(carry)
        stacked = [Type("f", (length, *t.shape)) for t in xs]
        ins += [self.pick("f", t.shape) for t in stacked]
        body = self.body([*carry, *xs], [*carry, *ys], 4)
        n, m = len(carry), len(ins)
        options = self.rng.choice(
            ["", "", ", reverse=True", ", unroll=2", ", reverse=True, unroll=2"]
        )
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
        outs = [
            Type("f", (3, 3)),
            *([self.pick("f").type] if self.rng.random() < 0.4 else []),
        ]
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


_TREES = [
    "({all})",
    "({all})",
    "[{all}]",
    "{{'out': ({all}), 'none': None}}",
    "({all}), {{'more': {0}}}",
]


def make_program(
    rng: random.Random,
    reverse: bool,
    size: int | None = None,
    kind: type[Structures] = Structures,
) -> Program:
    """A random program; `reverse` says that it will be differentiated backwards."""
    maker = kind(rng, reverse=reverse)
    maker.budget = size or rng.choice([3, 4, 5, 6, 8, 12])
    values_rng = np.random.default_rng(rng.randrange(2**32))
    args = [Type("f", (3, 3)), Type("f", (3, 3))]
    args += [Type("f", rng.choice(SHAPES)) for _ in range(rng.randrange(3))]
    if rng.random() < 0.3:
        args.append(Type(rng.choice("iibhe"), rng.choice([(), (3,)])))
    variables = [maker.fresh(t, "a") for t in args]
    values = [maker.moved(_value(values_rng, t, rng)) for t in args]
    consts: list[tuple[Var, str]] = []
    for _ in range(rng.choice([0, 0, 1, 2])):
        t = Type("f", rng.choice(SHAPES))
        var = maker.fresh(t, "k")
        consts.append((var, _const(values_rng, t, rng)))
    maker.frames = [[v for v, _ in consts] + variables]
    maker.stmts = [[]]
    while maker.budget > 0:
        maker.statement()
    made = [v for stmt in maker.stmts[0] for v in stmt.outs]
    results = list(dict.fromkeys(maker.results(made)))
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
