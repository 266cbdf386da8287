"""Cases: a program, transforms within and around `amp`, a policy, and settings of JAX.

A case prints as a file that runs by itself."""

import functools
import inspect
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from . import quantised, runtime
from .generate import make_program
from .programs import Program

# Weight, code, and whether derivatives are taken backwards.
_TRANSFORMS: list[tuple[float, str, bool]] = [
    (3.0, "jitted", False),
    (4.0, "grad", True),
    (2.0, "value_and_grad", True),
    (1.5, "vjp", True),
    (2.0, "jvp", False),
    (1.0, "linearized", False),
    (0.5, "jacfwd", False),
    (0.7, "hvp", True),
    (0.4, "grad_of_grad", True),
    (2.0, "vmapped", False),
    (0.7, "mapped", False),
    (0.8, "scanned", False),
    (0.5, "in_cond", False),
    (1.5, "remat", False),
    (0.6, "closed_over", False),
    (0.5, "partial_eval", False),
    (0.3, "linear_transposed", False),
    (0.3, "jets", False),
    (0.1, "exported", False),
    (0.35, "sharded", False),
    (0.15, "explicit", False),
]

REVERSE = frozenset(name for _, name, reverse in _TRANSFORMS if reverse)
DERIVATIVES = REVERSE | frozenset(
    "jvp linearized jacfwd jets linear_transposed".split()
)
PLACED = frozenset(["sharded", "explicit"])
"""Transforms that say where values are."""

TRANSFORMS, POLICIES = 4, 4
SHARED = TRANSFORMS * POLICIES  # cases of one program

_REMAT_POLICIES = """everything_saveable nothing_saveable dots_saveable
    dots_with_no_batch_dims_saveable names""".split()

_RULES = """"float32" use_original_precision use_original_precision_locally
    use_compute_precision use_widest_precision keep_inputs follow_inputs
    use_compute_precision_wide_result "float16" "bfloat16" """.split()

_CONTRACTIONS = (
    "full_precision() | dict.fromkeys([lax.dot_general_p, lax.conv_general_dilated_p], "
    "use_compute_precision)"
)

# Weight, code of a policy, and what its error is held against: `contractions`, `all`
# (whatever is computed may be rounded), `asked` (a rule may make low whatever there is,
# also what is only moved), `none` (nothing changes) or `quantised` (see that module).
_POLICIES: list[tuple[float, str, str]] = [
    (6.0, "default_amp_policy", "default"),
    (3.0, _CONTRACTIONS, "contractions"),
    (1.0, "full_precision()", "none"),
    (1.0, "jmp()", "all"),
    (1.0, "jaxamp()", "all"),
    (1.0, "pytorch_autocast()", "all"),
    (0.5, 'pytorch_autocast("cpu")', "all"),
    (1.0, "tensorflow_graph_rewrite()", "all"),
    (1.0, "mxnet()", "all"),
]


@dataclass(frozen=True)
class Case:
    """What is to be tried: one program in one setting."""

    program: Program
    inner: tuple[str, ...] = ()  # transforms that `amp` is put around
    outer: tuple[str, ...] = ()  # transforms around `amp`
    dtype: str = "bfloat16"
    policy: str = "default_amp_policy"
    oracle: str = "default"
    lean: bool = False
    x64: bool = False
    leaks: bool = False
    checks: bool = False
    jitted: bool = False  # `amp` by itself, before transforms around it
    again: bool = False  # other cases have the same program

    @property
    def transforms(self) -> tuple[str, ...]:
        return self.inner + self.outer

    @property
    def is_differentiated(self) -> bool:
        """Whether JAX takes derivatives of what `amp` made."""
        return any(name_of(t) in DERIVATIVES for t in self.outer)

    @property
    def is_placed(self) -> bool:
        return any(name_of(t) in PLACED for t in self.transforms)

    @property
    def has_mesh(self) -> bool:
        return any(name_of(t) == "explicit" for t in self.transforms)

    @property
    def is_replayed(self) -> bool:
        """Whether to spare the program's Python: see `replay`."""
        return self.again and not (self.is_placed or self.leaks)

    @property
    def is_shared(self) -> bool:
        """Whether what `amp` makes is another case's, under other transforms."""
        return self.jitted and self.is_replayed and not self.inner

    def settings(self) -> str:
        lean = ", lean=True" if self.lean else ""
        return f"dict(compute_dtype={self.dtype!r}, amp_policy={self.policy}{lean})"

    def source(self) -> str:
        """Defines `program`, `args`, `settings` and `build(wrap)`."""
        parts = [*self.program.lines(), "", "", self.build_source()]
        return "\n".join([*parts, "", "", f"settings = {self.settings()}"])

    def build_source(self) -> str:
        """Defines `build(wrap)`."""
        return "\n".join(self._build_lines())

    def _build_lines(self) -> Iterator[str]:
        yield "def build(wrap):"
        yield "    f, a = program, args"
        for transform in self.inner:
            yield f"    f, a = {call_code(transform)}"
        yield "    f = wrap(f)"
        for transform in self.outer:
            yield f"    f, a = {call_code(transform)}"
        yield "    return f, a"

    def file(self, what: str = "") -> str:
        """A Python file that shows what becomes of this case."""
        return "\n".join(self._file_lines(what))

    def _file_lines(self, what: str) -> Iterator[str]:
        for line in what.splitlines():
            yield f"# {line}".rstrip()
        yield _IMPORTS
        if self.x64:
            yield 'jax.config.update("jax_enable_x64", True)'
        if self.checks:
            yield 'jax.config.update("jax_enable_checks", True)'
        source = self.source()
        yield ""
        for code in _helpers(source + self._context()):
            yield f"\n{code}"
        yield ""
        yield source
        amp = "jax.jit(amp(f, **settings))" if self.jitted else "amp(f, **settings)"
        yield _SHOW.replace("CONTEXT", self._context()).replace("AMP", amp)

    def _context(self) -> str:
        if self.has_mesh:
            return "in_mesh()"
        return "jax.checking_leaks()" if self.leaks else "contextlib.nullcontext()"


def name_of(transform: str) -> str:
    return transform.split("(")[0]


def call_code(transform: str) -> str:
    name, _, options = transform.partition("(")
    options = options.removesuffix(")")
    return f"{name}(f, a{', ' if options else ''}{options})"


_IMPORTS = """\
import contextlib
import functools
import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_batching import custom_vmap
from jax.experimental.jet import jet
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from jaxamp_like import *
from jaxamp_like.presets import *
from jaxamp_like.rules import *"""


_SHOW = """

if __name__ == "__main__":
    np.set_printoptions(linewidth=88)
    with CONTEXT:
        f, a = build(lambda f: f)
        want = jax.tree.leaves(jax.jit(f)(*a))
        f, a = build(lambda f: AMP)
        got = jax.tree.leaves(jax.jit(f)(*a))
    for i, (x, y) in enumerate(zip(want, got, strict=True)):
        print(f"result {i}: {jax.typeof(x)} as written, {jax.typeof(y)} with amp")
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            print(x, y, sep="\\n")
            continue
        print(np.asarray(x), np.asarray(y), sep="\\n")
        print("difference", np.max(np.abs(np.asarray(x) - np.asarray(y)), initial=0))
"""


def _helpers(source: str) -> list[str]:
    """The source of what a case uses of `runtime`, and what that uses, in order."""
    functions = {
        name: inspect.getsource(fn)
        for name, fn in vars(runtime).items()
        if inspect.isfunction(fn) and fn.__module__ == runtime.__name__
    }
    needed: set[str] = set()
    pending = [source]
    while pending:
        text = pending.pop()
        for name, code in functions.items():
            if (name not in needed and f"{name}(" in text) or f"map({name}" in text:
                if name not in needed:
                    needed.add(name)
                    pending.append(code)
    return [code for name, code in functions.items() if name in needed]


def make_case(seed: int, quantises: bool = False) -> Case:
    """The case of a seed; of one of a policy that `quantises`, if so.

    Seeds in a row share a program: see `make_cases`."""
    return make_cases(seed // SHARED, quantises)[seed % SHARED]


@functools.lru_cache(maxsize=4)
def make_cases(number: int, quantises: bool = False) -> tuple[Case, ...]:
    """A program, with each of a few policies under each of a few transforms.

    Most of what a case takes is found out of the program, of its transforms as written
    or of what `amp` makes of it alone, and serves several cases. Of every fourth
    program one policy quantises; all of them, if `quantises`."""
    rng = random.Random(number)
    transforms = make_transforms(rng)
    reverse = is_reverse(transforms)
    program = make_program(rng, reverse)
    policies: list[tuple[str, str, str, bool]] = []
    while len(policies) < POLICIES:
        policy = make_policy(rng, program)
        if policy not in policies:
            policies.append(policy)
    own = random.Random(f"quantised {number}")  # the others stay what they were
    if quantises or own.random() < 0.25:
        for i in range(POLICIES) if quantises else [POLICIES - 1]:
            policies[i] = make_quantising_policy(own, program)
    config = rng.random()
    cases: list[Case] = []
    while len(cases) < SHARED:
        if is_reverse(transforms) == reverse:
            inner, outer = (
                tuple(_with_options(t, program, rng) for t in ts) for ts in transforms
            )
            cases += [
                Case(
                    program,
                    inner,
                    outer,
                    *policy,
                    x64=config < 0.03,
                    leaks=0.03 < config < 0.042 and i == 0,
                    checks=0.06 < config < 0.075,
                    jitted=bool(cases or i),
                    again=bool(cases or i),
                )
                for i, policy in enumerate(policies)
            ]
        transforms = make_transforms(rng)
    return tuple(cases)


def is_reverse(transforms: tuple[tuple[str, ...], tuple[str, ...]]) -> bool:
    inner, outer = transforms
    return any(name_of(t) in REVERSE for t in inner + outer)


def make_transforms(rng: random.Random) -> tuple[tuple[str, ...], tuple[str, ...]]:
    names = [name for _, name, _ in _TRANSFORMS]
    weights = [weight for weight, _, _ in _TRANSFORMS]
    many = rng.choices([0, 1, 2, 3], [2, 5, 2, 0.6])[0]
    chosen = rng.choices(names, weights, k=many)
    inner = tuple(t for t in chosen if rng.random() < 0.3)
    outer = list(chosen)
    for t in inner:
        outer.remove(t)
    return inner, tuple(outer)


def _with_options(name: str, program: Program, rng: random.Random) -> str:
    n = len(program.args)
    if name == "remat" and rng.random() < 0.5:
        return f"remat(policy={rng.choice(_REMAT_POLICIES)!r})"
    if name == "grad" and rng.random() < 0.4:
        return "grad(argnums=(0,))"
    if name == "vmapped" and rng.random() < 0.5:
        axes = [0] + [rng.choice([0, None]) for _ in range(n - 1)]
        rng.shuffle(axes)
        return f"vmapped(axes={tuple(axes)})"
    if name == "sharded":
        specs = [True] + [rng.random() < 0.5 for _ in range(n - 1)]
        devices = rng.choice([1, 2, 2])
        check = rng.random() < 0.75
        return f"sharded(specs={tuple(specs)}, devices={devices}, check_vma={check})"
    return name


def make_policy(rng: random.Random, program: Program) -> tuple[str, str, str, bool]:
    dtype = rng.choice(["bfloat16", "float16"])
    weights = [weight for weight, _, _ in _POLICIES]
    _, policy, oracle = rng.choices(_POLICIES, weights)[0]
    lean = rng.random() < 0.25
    if rng.random() < 0.05:
        return "float32", policy, "none", lean
    scopes = sorted(scopes_of(program) - {"amp_stop"})
    if scopes and rng.random() < 0.5 and oracle != "none":
        chosen = {s: rng.choice(_RULES) for s in scopes if rng.random() < 0.8}
        rows = ", ".join(f"{s!r}: {rule}" for s, rule in chosen.items())
        policy = f"{policy} | {{{rows}}}"
        oracle = "asked"
    return dtype, policy, oracle, lean


def make_quantising_policy(
    rng: random.Random, program: Program
) -> tuple[str, str, str, bool]:
    dtype = rng.choice(["bfloat16", "bfloat16", "float16"])
    scopes = sorted(scopes_of(program) - {"amp_stop"})
    policy = quantised.make_policy(rng, scopes)
    return dtype, policy, "quantised", rng.random() < 0.25


def scopes_of(program: Program) -> set[str]:
    def visit(stmts: Any) -> Iterator[str]:
        for stmt in stmts:
            if stmt.scope is not None:
                yield stmt.scope
            for body in stmt.bodies:
                yield from visit(body.stmts)

    return set(visit(program.stmts))
