"""The package is built in one direction, and is what CONTRIBUTING says that it is."""

import pytest

import jaxamp_like
from jaxamp_like import inference, presets, reports, rules, scaling

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


def test_every_package_says_what_lives_in_it():
    packages = {n: f for n, f in layout.modules().items() if f.name == "__init__.py"}
    for name, file in packages.items():
        assert file.read_text().startswith('"""'), name
        assert f"{name.rpartition('.')[2]}/" in layout.GUIDE.read_text(), name


def test_two_doors_to_private_jax():
    named = {n for n, f in layout.modules().items() if PRIVATE_JAX in f.read_text()}
    assert named <= {"_jax", "_hi_primitives"}


def test_public_names():
    """Few at the top; the others in five modules, and within reach from the top."""
    assert len(jaxamp_like.__all__) <= 30
    for home in (rules, presets, scaling, reports, inference):
        assert home.__doc__
        for name in home.__all__:
            assert getattr(jaxamp_like, name) is getattr(home, name)
            assert getattr(home, name).__doc__, name


def test_a_star_import_shadows_no_package():
    bound: dict[str, object] = {}
    exec("from jaxamp_like import *", bound)
    assert not {"jmp", "mxnet", "jaxamp"} & bound.keys()
    assert {"amp", "explain"} <= bound.keys()
