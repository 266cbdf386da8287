"""Fingerprints of rewritten programs: did a change of the code change what it makes?

    python -m benchmarks.jaxprs > before.txt    # at the one commit
    python -m benchmarks.jaxprs > after.txt     # at the other; then compare the two

A line for each construct of the tests and each workload, with its gradient, under
several settings: the hash of the jaxpr as text."""

import hashlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax

from jaxamp_like import amp
from jaxamp_like._jax import Literal, raw, subjaxprs
from tests.constructs import CONSTRUCTS, identity
from tests.test_structure import run_and_differentiate

from .workloads import WORKLOADS

SETTINGS: tuple[dict[str, Any], ...] = (
    {"compute_dtype": "bfloat16"},
    {"compute_dtype": "float16"},
    {"compute_dtype": "bfloat16", "lean": True},
)


def lines(jaxpr: Any) -> Iterator[str]:
    """A program as text, whatever is shared in it and however variables are called."""
    inner, numbers = raw(jaxpr), {}

    def show(atoms: Iterable[Any]) -> str:
        return " ".join(
            f"{atom.val}:{atom.aval}"
            if isinstance(atom, Literal)
            else f"{numbers.setdefault(atom, len(numbers))}:{atom.aval}"
            for atom in atoms
        )

    yield f"{show(inner.constvars)}; {show(inner.invars)} ->"
    for eqn in inner.eqns:
        held = {name: [*subjaxprs({name: x})] for name, x in eqn.params.items()}
        params = {name: x for name, x in eqn.params.items() if not held[name]}
        what = f"{eqn.primitive}{params} in {eqn.source_info.name_stack}"
        yield f"{show(eqn.outvars)} = {what} {show(eqn.invars)}"
        for name, programs in held.items():
            for program in programs:
                yield f"{name}:"
                yield from lines(program)
    yield f"-> {show(inner.outvars)}"


def fingerprint(fn: Callable[..., Any], *args: Any) -> str:
    """A hash of the program of `fn`, whatever the addresses of its functions."""
    text = "\n".join(lines(jax.make_jaxpr(fn)(*args)))
    text = re.sub(r" at 0x[0-9a-f]+", "", text)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def programs() -> Iterator[tuple[str, Callable[[Any], Any], tuple[Any, ...]]]:
    """Each program's name, itself with a wrapper put around, and its arguments."""
    for case in CONSTRUCTS:
        yield (
            case.name,
            lambda wrap, case=case: run_and_differentiate(
                wrap(case.build(identity)), case
            ),
            case.args(),
        )
    for name, workload in WORKLOADS.items():
        yield (
            name,
            lambda wrap, workload=workload: jax.value_and_grad(wrap(workload.loss)),
            workload.shapes("toy"),
        )


def main() -> None:
    for name, build, args in programs():
        for settings in SETTINGS:
            shown = " ".join(map(str, settings.values()))
            try:
                made = fingerprint(build(lambda fn, s=settings: amp(fn, **s)), *args)
            except Exception as e:  # some have no gradient
                made = type(e).__name__
            print(f"{name}, {shown}: {made}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
