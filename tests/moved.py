"""What moved in JAX between two versions, of what this library stands on.

    python -m tests.moved save FILE           in an environment with one JAX
    python -m tests.moved compare FILE        in one with the other

Three things have broken libraries of this kind: names that went away, primitives that
were added, and parameters of primitives that got other names. `compare` tells them as
Markdown, and ends with 0: whether anything is broken is for the tests to say."""

import ast
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

import jaxamp_like
from benchmarks.measure import walk

from .constructs import CONSTRUCTS, identity
from .test_primitives import found_primitives

Surface = dict[str, list[str]]

PACKAGE = Path(jaxamp_like.__file__).parent
NAMES, PRIMITIVES = "names that are used", "primitives"


def aliases(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """The names that a module binds by imports of JAX, and what each stands for."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                if name.name.split(".")[0] == "jax":
                    whole = name.name if name.asname else "jax"
                    yield name.asname or "jax", whole
        elif isinstance(node, ast.ImportFrom) and not node.level:
            if (node.module or "").split(".")[0] == "jax":
                for name in node.names:
                    yield name.asname or name.name, f"{node.module}.{name.name}"


def chain(node: ast.AST) -> list[str]:
    """`["a", "b", "c"]` of the expression a.b.c, and nothing of any other."""
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute):
        before = chain(node.value)
        return [*before, node.attr] if before else []
    return []


def used_names() -> set[str]:
    """Every dotted name of JAX that the package spells out."""
    found = set()
    for file in PACKAGE.rglob("*.py"):
        tree = ast.parse(file.read_text())
        known = dict(aliases(tree))
        found |= set(known.values())
        for node in ast.walk(tree):
            names = chain(node)
            if names and names[0] in known:
                found.add(".".join([known[names[0]], *names[1:]]))
    return found


def exists(name: str) -> bool:
    """Whether a dotted name can be imported, or read off what can be."""
    parts = name.split(".")
    value: Any = None
    for i, part in enumerate(parts):
        if value is not None and hasattr(value, part):
            value = getattr(value, part)
            continue
        try:
            value = importlib.import_module(".".join(parts[: i + 1]))
        except (ImportError, AttributeError):
            return False
    return True


def parameters() -> dict[str, set[str]]:
    """The parameters of each primitive that the constructs of the tests contain."""
    found: dict[str, set[str]] = {}
    for construct in CONSTRUCTS:
        try:
            jaxpr = jax.make_jaxpr(construct.build(identity))(*construct.args())
        except Exception as error:  # told as a difference, if the other JAX takes it
            found.setdefault(f"{construct} fails", set()).add(type(error).__name__)
            continue
        for eqn, _ in walk(jaxpr):
            found.setdefault(eqn.primitive.name, set()).update(eqn.params)
    return found


def surface() -> Surface:
    found = {
        NAMES: sorted(filter(exists, used_names())),
        PRIMITIVES: sorted(found_primitives()),
    }
    params = {f"parameters of {k}": sorted(v) for k, v in parameters().items()}
    return found | dict(sorted(params.items()))


def differences(before: Surface, now: Surface) -> Iterator[str]:
    """A line for each thing of which something came or went.

    A primitive that only one of them traces has no parameters to compare."""
    for key in sorted(
        before.keys() & now.keys(), key=lambda k: (k.startswith("pa"), k)
    ):
        gone = [x for x in before[key] if x not in now[key]]
        new = [x for x in now[key] if x not in before[key]]
        parts = []
        if gone:
            parts.append("gone " + ", ".join(f"`{x}`" for x in gone))
        if new and key != NAMES:  # a name that came has a branch by versions
            parts.append("new " + ", ".join(f"`{x}`" for x in new))
        if parts:
            yield f"- {key}: {'; '.join(parts)}"
    for key in sorted(k for k in now.keys() - before.keys() if k.endswith(" fails")):
        yield f"- {key.removeprefix('parameters of ')}: {', '.join(now[key])}"


def report(saved: dict[str, Any], now: Surface) -> str:
    lines = list(differences(saved["surface"], now))
    title = f"### JAX {saved['jax']} to {jax.__version__}"
    return "\n".join([title, "", *(lines or ["- nothing that is used here moved"])])


def main(argv: list[str]) -> int:
    if len(argv) != 2 or argv[0] not in ("save", "compare"):
        print(__doc__, file=sys.stderr)
        return 2
    file = Path(argv[1])
    if argv[0] == "save":
        data = {"jax": jax.__version__, "surface": surface()}
        file.write_text(json.dumps(data, indent=1) + "\n")
    else:
        print(report(json.loads(file.read_text()), surface()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
