"""README's first screen shows what was recorded, and the reference has every name."""

import re
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

import jaxamp_like
from benchmarks import first_screen

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SUBJECTS = ("rules", "presets", "scaling", "storage", "reports", "inference")


def described(page):
    """The names on a page of the reference, each with what it is."""
    text = (ROOT / "docs" / "api" / f"{page}.md").read_text()
    paths = re.findall(r"^::: (\S+)$", text, re.M)
    pairs = [path.rpartition(".") for path in paths]
    found = {n: getattr(import_module(module), n) for module, _, n in pairs}
    assert len(found) == len(paths)
    for (module, _, name), one in zip(pairs, found.values(), strict=True):
        # Whoever reads the sources alone takes a module for what it is named after.
        home = getattr(one, "__module__", "")
        assert module == home or not home.endswith(f".{name}"), f"write {home}.{name}"
    return found


COMPARISON = (ROOT / "docs" / "comparison.md").read_text()


def test_what_the_readme_and_the_comparison_tell_is_that_of_the_record():
    results = first_screen.read()
    assert first_screen.short_table(results) in README
    assert first_screen.on_tpus(results, first_screen.OURS) in README
    assert first_screen.table(results) in COMPARISON
    for path in first_screen.PICTURES.values():
        assert path.relative_to(ROOT).as_posix() in README


def test_the_first_screen_fits_a_screen():
    before, heading, _ = README.partition("\n## Try it\n")
    assert heading and "\n## " not in before
    assert len(before.splitlines()) <= 60


@pytest.mark.parametrize("scheme", first_screen.PICTURES)
def test_the_picture_is_made_of_the_record(scheme, tmp_path):
    first_screen.picture(first_screen.read(), scheme, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000


@pytest.mark.parametrize("subject", SUBJECTS)
def test_the_reference_describes_every_name_of_a_subject(subject):
    home = getattr(jaxamp_like, subject)
    assert described(subject) == {name: getattr(home, name) for name in home.__all__}


def test_the_reference_describes_every_main_name():
    elsewhere = {name for subject in SUBJECTS for name in described(subject)}
    main = described("main")
    assert set(jaxamp_like.__all__) <= main.keys() | elsewhere
    assert all(getattr(jaxamp_like, name) is one for name, one in main.items())


def test_the_version_is_one():
    citation = (ROOT / "CITATION.cff").read_text()
    assert re.search(r"^version: (.+)$", citation, re.M)[1] == PROJECT["version"]


def test_types_are_shipped():
    assert (Path(jaxamp_like.__file__).parent / "py.typed").exists()


def test_the_job_and_the_tests_are_a_command_each():
    commands = re.findall(r"^```sh\n(python3 -m venv .+)\n```$", README, re.M)
    assert [command.split()[-1] for command in commands] == [
        "examples/train_digits.py",
        "2",
    ]
