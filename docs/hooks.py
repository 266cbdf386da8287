"""Makes pages of what stands outside of docs/: the README, examples, benchmarks.

There is one copy of each text. Links between files work in a clone; here those that
lead out of docs/ are led to the pages made of their targets, and a link to a file that
has no page becomes its text. A new guide is in the navigation by being there."""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
HOME = "index.md"
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
CORNER = re.compile(r"<th([^>]*)></th>")


def pages() -> dict[str, str]:
    """The path of each file in the repository that is made a page, and of the page."""
    found = {"README.md": HOME} | {text: text for text in TEXTS}
    for example in sorted((ROOT / "examples").glob("*.py")):
        found[f"examples/{example.name}"] = f"examples/{example.stem}.md"
    return found


def on_config(config: Any) -> Any:
    """Guides that the navigation doesn't name come after those that it does."""
    named = set(re.findall(r"[\w/]+\.md", str(config.nav)))
    sections = {title: part for entry in config.nav for title, part in entry.items()}
    guides = sorted(page.name for page in (ROOT / "docs").glob("*.md"))
    sections["Guides"] += [guide for guide in guides if guide not in named]
    return config


def on_files(files: Files, config: Any) -> Files:
    for source, page in pages().items():
        text = (ROOT / source).read_text()
        if source.endswith(".py"):
            text = f"# {source}\n\n```python\n{text}```\n"
        files.append(File.generated(config, page, content=text))
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

    pieces = FENCE.split(markdown)
    return "".join(
        piece if FENCE.match(piece) else LINK.sub(lead, piece) for piece in pieces
    )


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """An empty head of a column is none: a screen reader would announce it."""
    return CORNER.sub(r"<td\1></td>", html)
