"""README's first screen shows what was recorded, and the reference has every name."""

import re
import tomllib
from pathlib import Path

import pytest

import jaxamp_like
from benchmarks import first_screen

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SUBJECTS = ("rules", "presets", "scaling", "reports", "inference")


def described(page):
    text = (ROOT / "docs" / "api" / f"{page}.md").read_text()
    return re.findall(r"^::: jaxamp_like\.([\w.]+)$", text, re.M)


def test_the_table_of_the_readme_is_that_of_the_record():
    results = first_screen.read()
    assert first_screen.table(results) in README
    assert first_screen.PICTURE.relative_to(ROOT).as_posix() in README


def test_the_picture_is_made_of_the_record(tmp_path):
    first_screen.picture(first_screen.read(), tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000


@pytest.mark.parametrize("subject", SUBJECTS)
def test_the_reference_describes_every_name_of_a_subject(subject):
    names = {f"{subject}.{name}" for name in getattr(jaxamp_like, subject).__all__}
    assert sorted(described(subject)) == sorted(names)


def test_the_reference_describes_every_main_name():
    elsewhere = {name.partition(".")[2] for s in SUBJECTS for name in described(s)}
    names = described("main")
    assert len(set(names)) == len(names)
    assert set(jaxamp_like.__all__) <= {*names, *elsewhere}
    assert all(hasattr(jaxamp_like, name) for name in names)


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
