"""The house in one picture: which package imports which, drawn from the imports.

    python -m tests.layout        # draws it anew into CONTRIBUTING.md

An arrow goes from what imports to what is imported; one that follows from two others is
left out. `test_layout.py` checks that the picture is up to date."""

import ast
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import jaxamp_like

ROOT = Path(__file__).parents[1]
PACKAGE = "jaxamp_like"
HOME = Path(jaxamp_like.__file__).parent
GUIDE = ROOT / "CONTRIBUTING.md"
_PICTURE = re.compile(r"```mermaid\n.*?```", re.DOTALL)

Graph = dict[str, set[str]]


def modules() -> dict[str, Path]:
    """Every module of the package, by its dotted name without the package's."""
    return {_name(file.relative_to(HOME)): file for file in HOME.rglob("*.py")}


def _name(file: Path) -> str:
    parts = file.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports() -> Graph:
    """Which modules each module imports, wherever in it they are imported."""
    known = modules()
    return {name: set(_imported(name, file, known)) for name, file in known.items()}


def _imported(name: str, file: Path, known: dict[str, Path]) -> Iterator[str]:
    package = [part for part in name.split(".") if part]
    if file.name != "__init__.py":
        package.pop()
    for node in ast.walk(ast.parse(file.read_text())):
        if not isinstance(node, ast.ImportFrom) or not node.level:
            continue
        base = package[: len(package) + 1 - node.level]
        source = ".".join([*base, *(node.module or "").split(".")]).strip(".")
        for alias in node.names:
            inner = f"{source}.{alias.name}".strip(".")
            found = inner if inner in known else source
            if found != name:
                yield found


def packages() -> Graph:
    """Which packages, or modules of the root, each of them imports."""
    graph: Graph = {}
    for name, imported in imports().items():
        home = _home(name)
        graph.setdefault(home, set()).update(set(map(_home, imported)) - {home})
    return graph


def _home(module: str) -> str:
    return module.partition(".")[0]


def order(graph: Graph) -> list[str]:
    """The nodes, what is imported first; raises `CycleError` if there is a circle."""
    return list(TopologicalSorter(graph).static_order())


def reduced(graph: Graph) -> Graph:
    """The graph without arrows that follow from others."""
    below: Graph = {}
    for node in order(graph):
        below[node] = set().union(*({n} | below[n] for n in graph.get(node, ())))
    return {
        node: {n for n in given if not any(n in below[other] for other in given)}
        for node, given in graph.items()
    }


def mermaid() -> str:
    """The picture, as GitHub draws it."""
    graph = packages()
    graph.pop("")  # `__init__`, which imports all that is public
    lines = [
        f"    {node} --> {below}"
        for node, given in sorted(reduced(graph).items())
        for below in sorted(given)
    ]
    return "\n".join(["```mermaid", "flowchart TD", *lines, "```"])


def picture_in_guide() -> str:
    found = _PICTURE.search(GUIDE.read_text())
    return found[0] if found else ""


if __name__ == "__main__":
    GUIDE.write_text(_PICTURE.sub(lambda _: mermaid(), GUIDE.read_text(), count=1))
