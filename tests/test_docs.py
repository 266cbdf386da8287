"""The code of guides and notebooks runs, and each row of the migration tables holds."""

import json
import re
import textwrap
from pathlib import Path

import jax
import pytest

from jaxamp_like import set_global_policy

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text()
FIRST_STEPS = (DOCS / "first_steps.md").read_text()
MIGRATION = (DOCS / "migration.md").read_text()
SPAN = re.compile(r"`([^`]+)`")


CODE = re.compile(r"^<!-- code: (\S+) -->$", re.M)


def blocks(text):
    """The Python of a page, with that of the scripts which it names in comments."""
    text = CODE.sub(lambda at: f"```python\n{(ROOT / at[1]).read_text()}```", text)
    found = re.findall(r"^( *)```python\n(.*?)^\1```", text, re.M | re.S)
    return [textwrap.dedent(block) for _, block in found]


GUIDES = [page for page in sorted(DOCS.rglob("*.md")) if blocks(page.read_text())]


def tables(text):
    """The rows of each table by the heading above it, as code: to run, and to hold."""
    for section in re.split(r"^## ", text, flags=re.M)[1:]:
        rows = re.findall(r"^\| (.+) \|$", section, re.M)
        cells = [re.split(r"(?<!\\) \| ", row) for row in rows[1:]]
        if cells:
            yield (
                section.partition("\n")[0],
                [
                    tuple(SPAN.findall(cell.replace(r"\|", "|")) for cell in row[1:])
                    for row in cells
                    if len(row) == 3  # others compare, and are not run
                ],
            )


TABLES = dict(tables(MIGRATION))


def test_a_page_that_shows_a_script_on_the_site_links_to_it():
    """In the repository only the link is seen."""
    pages = [page for page in GUIDES if CODE.search(page.read_text())]
    assert len(pages) == 6
    for page in pages:
        text = page.read_text()
        for script in CODE.findall(text):
            assert f"[{script}](../../{script})" in text
            assert (ROOT / script).read_text() in blocks(text)


@pytest.fixture(autouse=True)
def forget_global_policy():
    yield
    set_global_policy(None)


@pytest.mark.rest
@pytest.mark.parametrize("guide", GUIDES, ids=lambda p: p.stem)
def test_the_code_of_guides_runs(guide, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where the pages and plots go
    monkeypatch.syspath_prepend(ROOT / "examples")  # what tutorials import
    names = {"__name__": "guide"}
    for block in blocks(guide.read_text()):
        exec(block, names)
    assert len(names) > 2


@pytest.mark.rest
@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
def test_the_training_step_of_the_readme_trains_from_the_first_step_on(dtype):
    names = {"__name__": "readme"}
    for block in blocks(README):
        exec(block.replace('"bfloat16"', f'"{dtype}"'), names)
        if "enable_amp" in block:
            break
    losses = names["losses"]
    assert losses[:20] == sorted(losses[:20], reverse=True)
    assert losses[-1] < losses[0] / 10
    if dtype == "float16":
        _, opt_state = names["state"]
        assert opt_state.scaler.skipped == 0 and opt_state.scaler.scaler == 2**15


NUMBER = re.compile(r"\d+(?:\.\d+)?")


@pytest.mark.rest
@pytest.mark.parametrize("page", (README, FIRST_STEPS), ids=("README", "first_steps"))
def test_the_first_outputs_are_those_that_are_shown(page, capsys):
    """A block without a language shows what the Python above it prints."""
    fences = re.findall(r"^```(\w*)\n(.*?)^```$", page, re.M | re.S)
    shown = [text for language, text in fences if not language]
    names = {"__name__": "page"}
    for block in blocks(page):
        exec(block, names)
        if "enable_amp" in block:
            break
    printed = capsys.readouterr().out
    assert len(shown) == 2
    assert NUMBER.sub("0", printed) == NUMBER.sub("0", "".join(shown))
    # Another version of JAX may add a cast, another processor round otherwise.
    numbers = [[float(n) for n in NUMBER.findall(t)] for t in (printed, "".join(shown))]
    # What JAX 0.12 keeps for `gelu` as written is a sixth less.
    rel = 0.05 if jax.__version_info__ < (0, 12) else 0.2
    assert numbers[0] == pytest.approx(numbers[1], rel=rel)


MAGIC = re.compile(r"^( *)%.*", re.M)
NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))


@pytest.mark.rest
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebooks_run_and_print_what_they_show(notebook, capsys):
    names = {"__name__": "notebook"}
    cells = json.loads(notebook.read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    for cell in code:
        exec(MAGIC.sub(r"\1pass", "".join(cell["source"])), names)
        shown = "".join(line for out in cell["outputs"] for line in out["text"])
        assert NUMBER.sub("0", capsys.readouterr().out) == NUMBER.sub("0", shown)
    assert len(code) > 3


def test_there_is_a_table_for_each_system():
    systems = ("Keras: DTypePolicy", "Keras: DTypePolicyMap", "jmp", "Haiku", "Flax")
    for system in (*systems, "PyTorch", "Axon", "MXNet"):
        assert any(heading.startswith(system) for heading in TABLES), system
    assert sum(map(len, TABLES.values())) > 80
    assert all(run and hold for rows in TABLES.values() for run, hold in rows)


@pytest.mark.sample(2)
@pytest.mark.parametrize("heading", TABLES)
@pytest.mark.filterwarnings("ignore:`set_global_policy` comes after")  # other rows
def test_each_row_of_the_migration_tables(heading, tmp_path, monkeypatch):
    """In order, since a row may go on from the one above it."""
    monkeypatch.chdir(tmp_path)  # where rows save
    names = {}
    for block in blocks(MIGRATION):
        exec(block, names)
    for run, hold in TABLES[heading]:
        exec("\n".join(run), names)
        for expression in hold:
            assert eval(expression, names) is True, (run, expression)
