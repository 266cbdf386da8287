"""Makes pages of what stands outside of docs/: the README, examples, benchmarks, and
the table of primitives. Notebooks become pages, too.

There is one copy of each text. Links between files work in a clone; here those that
lead out of docs/ are led to the pages made of their targets, and a link to a file that
has no page becomes its text. A new guide is in the navigation by being there."""

import json
import posixpath
import re
import tomllib
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from jaxamp_like._primitives import TABLE, Kind

ROOT = Path(__file__).parents[1]
HOME = "index.md"
PRIMITIVES = "primitives.md"
DONE = {
    Kind.CONTRACTION: "Computed in the compute dtype.",
    Kind.FUNCTION: "Computed in the author's dtypes.",
    Kind.CONVERSION: "Made as written; where only contractions read it, low at once.",
    Kind.MOVEMENT: "Moved in the precision at hand.",
    Kind.EXTREME: "Taken in the precision at hand, or in full where that is read.",
    Kind.CHOICE: "Made on the numbers that are not rounded.",
    Kind.SORT: "Made on the numbers that are not rounded.",
    Kind.SEVERAL: "Handed on in the precision at hand.",
    Kind.SENDING: "Sent low where only contractions read it.",
    Kind.SUM_OVER_DEVICES: "Summed as a contraction's result would be.",
    Kind.SOLVER: "Left as written.",
    Kind.FIXED: "Left as written.",
}
TEXTS = (
    "CONTRIBUTING.md",
    "SECURITY.md",
    "CODE_OF_CONDUCT.md",
    "benchmarks/README.md",
    "benchmarks/results/curves.md",
    "jaxamp_like/CHANGELOG.md",
)
PICTURES = (
    "benchmarks/results/curves.png",
    "benchmarks/results/curves-long.png",
    "benchmarks/results/front-all-bfloat16.png",
    "benchmarks/results/front-all-float16.png",
)
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")
FENCE = re.compile(r"^( *```.*?^ *```)", re.M | re.S)
# README's picture in two versions; GitHub shows the one for the reader's colours.
BOTH = re.compile(
    r'<picture><source media="[^"]*dark[^"]*" srcset="([^"]+)">\s*'
    r'<img src="([^"]+)"[^>]* alt="([^"]+)"></picture>'
)
# A page in the repository links to a script; on the site its code follows.
CODE = re.compile(r"^<!-- code: (\S+\.py) -->$", re.M)
CORNER = re.compile(r"<th([^>]*)></th>")


def pages() -> dict[str, str]:
    """The path of each file in the repository that is made a page, and of the page."""
    found = {"README.md": HOME} | {text: text for text in TEXTS}
    for example in sorted((ROOT / "examples").glob("*.py")):
        found[f"examples/{example.name}"] = f"examples/{example.stem}.md"
    return found


def version() -> str:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def with_code(markdown: str) -> str:
    """A page with the code of the scripts that it names in comments."""

    def block(match: re.Match[str]) -> str:
        return f"```python\n{(ROOT / match[1]).read_text()}```"

    return CODE.sub(block, markdown)


def on_config(config: Any) -> Any:
    """Guides that the navigation doesn't name come after those that it does."""
    config.copyright = f"{config.site_name} {version()}"
    named = set(re.findall(r"[\w/]+\.md", str(config.nav)))
    sections = {title: part for entry in config.nav for title, part in entry.items()}
    guides = sorted(page.name for page in (ROOT / "docs").glob("*.md"))
    sections["Guides"] += [guide for guide in guides if guide not in named]
    sections["Guides"].append(PRIMITIVES)
    return config


def primitives_page() -> str:
    """What the default policy does with each primitive, from the table."""
    lines = [
        "# Primitives",
        "",
        "What the [default policy](default_policy.md) does depends on the kind of a",
        "primitive. One that is not here is left in the author's dtypes. Those that",
        "hold programs, such as `jit` and `scan`, are rewritten inside.",
    ]
    for kind in Kind:
        found = sorted(name for name, row in TABLE.items() if row.kind == kind)
        lines += ["", f"## {kind.name.replace('_', ' ').capitalize()}", ""]
        lines += [f"{DONE[kind]} It {kind.value}.", ""]
        lines += [", ".join(f"`{name}`" for name in found)]
    return "\n".join(lines) + "\n"


def notebook_page(path: Path) -> str:
    """A notebook as it was run: its texts, its code, and what that printed."""
    pieces = []
    for cell in json.loads(path.read_text())["cells"]:
        source = "".join(cell["source"])
        code = cell["cell_type"] == "code"
        pieces.append(f"```python\n{source}\n```" if code else source)
        for output in cell.get("outputs", ()):
            pieces.append(f"```\n{''.join(output['text'])}```")
    link = f"To run this page in Jupyter or Colab, take [the notebook]({path.name})."
    return "\n\n".join([*pieces[:1], link, *pieces[1:]]) + "\n"


def on_files(files: Files, config: Any) -> Files:
    for source, page in pages().items():
        text = (ROOT / source).read_text()
        if source.endswith(".py"):
            text = f"# {source}\n\n```python\n{text}```\n"
        files.append(File.generated(config, page, content=text))
    files.append(File.generated(config, PRIMITIVES, content=primitives_page()))
    for notebook in sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")):
        page, content = f"notebooks/{notebook.stem}.md", notebook_page(notebook)
        files.append(File.generated(config, page, content=content))
    for picture in PICTURES:
        content = (ROOT / picture).read_bytes()
        files.append(File.generated(config, picture, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links as they are in the repository, made links between pages."""
    made = {target: source for source, target in pages().items()}
    here = made.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def lead(match: re.Match[str]) -> str:
        mark, text, target = match.groups()
        path, hash_, anchor = target.partition("#")
        if not path or ":" in path:
            return match[0]
        repo_path = posixpath.normpath(posixpath.join(posixpath.dirname(here), path))
        site_path = pages().get(repo_path, repo_path.removeprefix("docs/"))
        if files.get_file_from_path(site_path) is None:
            if not (ROOT / repo_path).exists():
                return match[0]  # mkdocs tells of it
            return text
        folder = posixpath.dirname(page.file.src_uri)
        relative = posixpath.relpath(site_path, folder or ".")
        return f"{mark}[{text}]({relative}{hash_}{anchor})"

    if page.file.src_uri == HOME:
        title, rest = markdown.split("\n", 1)
        changes = "jaxamp_like/CHANGELOG.md"
        markdown = f"{title}\n\nVersion {version()} ([changes]({changes}))\n{rest}"
    # Here the reader may choose other colours than those of the system.
    markdown = BOTH.sub(r"![\3](\2#only-light)\n![\3](\1#only-dark)", markdown)
    pieces = FENCE.split(with_code(markdown))
    return "".join(
        piece if FENCE.match(piece) else LINK.sub(lead, piece) for piece in pieces
    )


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """An empty head of a column is none: a screen reader would announce it."""
    return CORNER.sub(r"<td\1></td>", html)
