"""Cases: a program, transforms within and around `amp`, a policy, and settings of JAX.

A case prints as a file that runs by itself."""

import dataclasses
import functools
import inspect
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from . import forms, quantised, runtime
from .forms import Reads
from .generate import make_program
from .programs import Program
from .wide import OFFSETS, ReadOften, Wide

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

_PLAIN = frozenset(
    """grad value_and_grad vjp jitted remat vmapped scanned mapped in_cond closed_over
    partial_eval""".split()
)

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
    is_strict: bool = False  # held against the oracle leaf by leaf: see `checks`
    reads: tuple[Reads, ...] = ()  # what contractions must read
    container: str | None = None  # that all arguments but the first are handed over in
    tail: str | None = None  # code that makes the first result of the second

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
        is_bare = not self.inner and self.container is None
        return self.jitted and self.is_replayed and is_bare

    @property
    def is_value_or_gradient(self) -> bool:
        """Whether at most one derivative is taken, backwards."""
        names = [name_of(t) for t in self.transforms]
        return len([t for t in names if t in DERIVATIVES]) <= 1 and set(names) <= _PLAIN

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
        if self.container is None:
            yield "    f = wrap(f)"
        else:
            yield f"    f = in_container(wrap, f, {self.container!r})"
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
import re
from dataclasses import dataclass
from typing import Any

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
        if inspect.isfunction(fn) or inspect.isclass(fn)
        if fn.__module__ == runtime.__name__
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


def make_case(seed: int, kind: str | None = None) -> Case:
    """The case of a seed, of any kind or of one of `KINDS`.

    Seeds in a row share a program: see `make_cases`."""
    return make_cases(seed // SHARED, kind)[seed % SHARED]


@functools.lru_cache(maxsize=4)
def make_cases(number: int, kind: str | None = None) -> tuple[Case, ...]:
    """A program, with each of a few policies under each of a few transforms.

    Most of what a case takes is found out of the program, of its transforms as written
    or of what `amp` makes of it alone, and serves several cases. Every second program
    is of a wider kind, unless a `kind` is asked for: see `wide` and `forms`."""
    rng = random.Random(number)
    if kind is None and number % 2:
        (kind,) = rng.choices([*KINDS], [weight for weight, _ in KINDS.values()])
    if kind is not None:
        return tuple(KINDS[kind][1](rng))
    return tuple(_any(rng, number))


def _any(rng: random.Random, number: int, quantises: bool = False) -> list[Case]:
    """Of any statements. Of every fourth program one policy quantises; all, if so."""
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
    chosen: list[Transforms] = []
    while len(chosen) < TRANSFORMS:
        if is_reverse(transforms) == reverse:
            chosen.append(transforms)
        transforms = make_transforms(rng)
    cases = _all_of(rng, program, chosen, policies, is_whole=False)
    return [
        dataclasses.replace(
            case,
            x64=config < 0.03,
            leaks=0.03 < config < 0.042 and i % POLICIES == 0,
            checks=0.06 < config < 0.075,
        )
        for i, case in enumerate(cases)
    ]


Transforms = tuple[tuple[str, ...], tuple[str, ...]]


def _all_of(
    rng: random.Random,
    program: Program,
    transforms: Any,
    policies: Any,
    is_whole: bool = True,
) -> list[Case]:
    """A program with each of some policies under each of some transforms."""
    cases: list[Case] = []
    for both in transforms:
        inner, outer = (
            tuple(_with_options(t, program, rng, is_whole) for t in ts) for ts in both
        )
        for policy in policies:
            many = bool(cases)
            cases.append(Case(program, inner, outer, *policy, jitted=many, again=many))
    return cases


def _wide(rng: random.Random) -> list[Case]:
    """Of numbers that are far from 1, or are read often: see `wide`."""
    return _strict(rng, make_program(rng, True, rng.choice([1, 2, 2, 3, 4]), Wide))


def _read_often(rng: random.Random) -> list[Case]:
    """Of values with many readers, and little else."""
    return _strict(rng, make_program(rng, True, 1, ReadOften))


def _strict(rng: random.Random, program: Program) -> list[Case]:
    """Of a program whose gradients are checked leaf by leaf."""
    transforms = [make_gradient(rng) for _ in range(TRANSFORMS)]
    policies: list[tuple[str, str, str, bool]] = []
    while len(policies) < POLICIES:
        weights = [weight for weight, _, _ in _WIDE_POLICIES]
        _, policy, oracle = rng.choices(_WIDE_POLICIES, weights)[0]
        dtype, lean = rng.choice(["bfloat16", "float16"]), rng.random() < 0.1
        if (one := (dtype, policy, oracle, lean)) not in policies:
            policies.append(one)
    cases = _all_of(rng, program, transforms, policies)
    return [dataclasses.replace(case, is_strict=True) for case in cases]


# Weight, code, and what the error is held against: mostly the default.
_WIDE_POLICIES: list[tuple[float, str, str]] = [
    (8.0, "default_amp_policy", "default"),
    (3.0, _CONTRACTIONS, "contractions"),
    (0.3, "full_precision()", "none"),
    (0.2, "jmp()", "all"),
    (0.2, "pytorch_autocast()", "all"),
]


def _scoped(rng: random.Random) -> list[Case]:
    """Of rules for scopes in scopes, in every phase of a gradient."""
    program, layers = forms.make_scoped(rng)
    transforms = [make_gradient(rng, within=0.7) for _ in range(TRANSFORMS)]
    dtypes = [rng.choice(["bfloat16", "float16"]) for _ in range(POLICIES)]
    made = [forms.make_rules(rng, layers, dtype) for dtype in dtypes]
    policies = [
        (dtype, policy, "asked", rng.random() < 0.2)
        for dtype, (policy, _) in zip(dtypes, made, strict=True)
    ]
    cases = _all_of(rng, program, transforms, policies)
    return [
        dataclasses.replace(case, reads=reads)
        for case, (_, reads) in zip(cases, made * TRANSFORMS, strict=True)
    ]


def _ruled(rng: random.Random) -> list[Case]:
    """Of derivative rules by hand that contract in any order, in 8 bits."""
    program, reads = forms.make_ruled(rng)
    transforms = [make_gradient(rng) for _ in range(TRANSFORMS)]
    options = [
        "",
        ", parameters_only=False",
        ", keep='compute'",
        ", power_of_two=False",
    ]
    policies = [
        (
            rng.choice(["bfloat16", "bfloat16", "float16"]),
            f"quantised(float8(where=None{option}))",
            "quantised",
            rng.random() < 0.2,
        )
        for option in options
    ]
    cases = _all_of(rng, program, transforms, policies)
    return [dataclasses.replace(case, reads=reads) for case in cases]


def _contained(rng: random.Random) -> list[Case]:
    """Of batches in containers, under rules that ask which operand is the weight."""
    program = forms.make_batched(rng)
    transforms = [make_gradient(rng, within=0.0) for _ in range(TRANSFORMS)]
    rules = [
        "int8(where=None, weight_only=True)", "int8(where=None, migration=0.5)",
        "float8(where=None, weight_gradient='compute')", "int8(where=None)",
        "float8(where=None)", "float8(where=None, granularity='row')",
    ]  # fmt: skip
    policies = [
        ("bfloat16", f"quantised({rule})", "quantised", False)
        for rule in rng.sample(rules, POLICIES)
    ]
    cases = _all_of(rng, program, transforms, policies)
    containers = [rng.choice(forms.CONTAINERS) for _ in cases]
    return [
        dataclasses.replace(case, container=container)
        for case, container in zip(cases, containers, strict=True)
    ]


def _tailed(rng: random.Random) -> list[Case]:
    """Of two results that must agree, compiled as XLA would by itself."""
    program, tail = forms.make_tailed(rng, OFFSETS)
    transforms = [make_gradient(rng) for _ in range(TRANSFORMS)]
    policies = [
        ("bfloat16", "default_amp_policy", "default", False),
        ("float16", "default_amp_policy", "default", False),
        ("bfloat16", _CONTRACTIONS, "contractions", False),
        ("bfloat16", "default_amp_policy", "default", True),
    ]
    cases = _all_of(rng, program, transforms, policies)
    chosen = rng.choice([0, 0, 1, 3])  # to compile: what takes the longest
    return [
        dataclasses.replace(case, is_strict=True, tail=tail if i == chosen else None)
        for i, case in enumerate(cases)
    ]


def _quantised(rng: random.Random) -> list[Case]:
    return _any(rng, rng.randrange(2**32), quantises=True)


Make = Callable[[random.Random], list[Case]]
KINDS: dict[str, tuple[float, Make]] = {
    "wide": (0.62, _wide),
    "read_often": (0.08, _read_often),
    "scoped": (0.12, _scoped),
    "ruled": (0.1, _ruled),
    "contained": (0.03, _contained),
    "tailed": (0.05, _tailed),
    "quantised": (0.0, _quantised),
}
"""Kinds of programs, each with its share of those that are wider."""


def make_gradient(rng: random.Random, within: float = 0.3) -> Transforms:
    """Transforms of a step of training: a gradient, outside of `amp` or `within`."""
    if rng.random() < 0.1:
        inner, outer = make_transforms(rng)
        return (inner, outer) if within else ((), (*inner, *outer))
    chosen = rng.choices(["grad", "value_and_grad", "vjp", "jvp"], [5, 2, 1, 0.5])
    more = rng.choices([0, 1, 2], [5, 3, 1])[0]
    names, weights = [name for _, name in _AROUND], [weight for weight, _ in _AROUND]
    chosen += rng.choices(names, weights, k=more)
    rng.shuffle(chosen)
    count = rng.choice([1, len(chosen)]) if rng.random() < within else 0
    return tuple(chosen[:count]), tuple(chosen[count:])


_AROUND: list[tuple[float, str]] = [
    (3.0, "jitted"), (1.5, "remat"), (1.0, "vmapped"), (0.7, "scanned"),
    (0.5, "mapped"), (0.4, "in_cond"), (0.4, "closed_over"),
    (0.3, "partial_eval"), (0.2, "sharded"),
]  # fmt: skip


def is_reverse(transforms: Transforms) -> bool:
    inner, outer = transforms
    return any(name_of(t) in REVERSE for t in inner + outer)


def make_transforms(rng: random.Random) -> Transforms:
    names = [name for _, name, _ in _TRANSFORMS]
    weights = [weight for weight, _, _ in _TRANSFORMS]
    many = rng.choices([0, 1, 2, 3], [2, 5, 2, 0.6])[0]
    chosen = rng.choices(names, weights, k=many)
    inner = tuple(t for t in chosen if rng.random() < 0.3)
    outer = list(chosen)
    for t in inner:
        outer.remove(t)
    return inner, tuple(outer)


def _with_options(
    name: str, program: Program, rng: random.Random, is_whole: bool
) -> str:
    """A transform as a case names it; of gradients that are `whole`, all."""
    n = len(program.args)
    if name == "remat" and rng.random() < 0.5:
        return f"remat(policy={rng.choice(_REMAT_POLICIES)!r})"
    if name == "grad" and not is_whole and rng.random() < 0.4:
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
