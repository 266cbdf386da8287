"""The package is built in one direction, and is what CONTRIBUTING says that it is."""

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import jaxamp_like
from jaxamp_like import _version, inference, presets, reports, rules, scaling, storage

from . import layout

pytestmark = pytest.mark.quick

PRIVATE_JAX = "jax._src"


def test_no_module_imports_what_is_built_on_it():
    assert layout.order(layout.imports())  # raises `CycleError`, with the circle


def test_packages_point_one_way():
    layers = """_errors _jax _dtypes _primitives _rules _quantised _structural _policies
        _rewrite _amp _reports _calibrate _convert""".split()
    place = {name: i for i, name in enumerate(layers)}
    graph = layout.packages()
    for name in layers:
        upwards = {n for n in graph[name] if place.get(n, -1) >= place[name]}
        assert not upwards, f"{name} imports {upwards}"
    assert layout.order(graph)


def test_the_picture_is_up_to_date():
    assert layout.picture_in_guide() == layout.mermaid(), "run `python -m tests.layout`"


def test_the_guide_names_every_module_and_package():
    folder = Path(jaxamp_like.__file__).parent
    guide, _, _ = layout.GUIDE.read_text().partition("```mermaid")
    names = {path.name for path in folder.glob("*.py")}
    names |= {f"{path.name}/" for path in folder.iterdir() if path.is_dir()}
    missing = {n for n in names if n not in guide and not n.startswith("__")}
    assert not missing, f"CONTRIBUTING.md does not say what {missing} are"


def test_every_package_says_what_lives_in_it():
    packages = {n: f for n, f in layout.modules().items() if f.name == "__init__.py"}
    for name, file in packages.items():
        assert file.read_text().startswith('"""'), name
        assert f"{name.rpartition('.')[2]}/" in layout.GUIDE.read_text(), name


def test_two_doors_to_private_jax():
    named = {n for n, f in layout.modules().items() if PRIVATE_JAX in f.read_text()}
    assert named <= {"_jax", "_hi_primitives"}


def test_public_names():
    """Few at the top; the others in six modules, and within reach from the top."""
    assert len(jaxamp_like.__all__) <= 30
    for home in HOMES:
        assert home.__doc__
        for name in home.__all__:
            assert getattr(jaxamp_like, name) is getattr(home, name)
            assert getattr(home, name).__doc__, name


HOMES = rules, presets, scaling, storage, reports, inference


@pytest.mark.parametrize("module", (jaxamp_like, *HOMES), ids=lambda m: m.__name__)
def test_tab_offers_public_names_only(module):
    shown = {name for name in dir(module) if not name.startswith("__")}
    modules = {home.__name__.removeprefix("jaxamp_like.") for home in HOMES}
    assert shown == {*module.__all__} | (modules if module is jaxamp_like else set())


PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"


def test_the_version_stands_in_one_place(monkeypatch, tmp_path):
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    assert jaxamp_like.__version__ == project["version"]
    version = _version.version.__wrapped__
    monkeypatch.setattr(_version, "installed_version", lambda name: "7.8")
    monkeypatch.setattr(_version, "__file__", str(tmp_path / "jaxamp_like/_version.py"))
    assert version() == "7.8"
    beside = tmp_path / "pyproject.toml"
    beside.write_text('[project]\nname = "other"\nversion = "5.6"')
    assert version() == "7.8"
    beside.write_text('[project]\nname = "jaxamp_like"\nversion = "9.10"')
    assert version() == "9.10"  # of a clone, whatever is installed beside it


def test_the_version_of_a_folder_that_was_copied(tmp_path):
    """No `pyproject.toml` is beside it, and nothing is installed."""
    shutil.copy(Path(_version.__file__), tmp_path / "_version.py")
    code = (
        "import _version; _version.NAME = 'no such package'; print(_version.version())"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert ran.stdout == "0+unknown\n", ran.stderr


def test_a_star_import_shadows_no_package():
    bound: dict[str, object] = {}
    exec("from jaxamp_like import *", bound)
    assert not {"jmp", "mxnet", "jaxamp"} & bound.keys()
    assert {"amp", "explain"} <= bound.keys()
