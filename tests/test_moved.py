"""What moved in JAX is named: names, primitives, and parameters of primitives."""

import json

import pytest

from . import moved

pytestmark = pytest.mark.quick


def test_used_names_are_those_of_the_package():
    names = moved.used_names()
    assert {"jax.interpreters.mlir", "jax.extend.core.Primitive"} <= names
    assert all(name.split(".")[0] == "jax" for name in names)


@pytest.mark.parametrize(
    ("name", "there"),
    (
        ("jax.numpy.dot", True),
        ("jax.experimental.pallas", True),
        ("jax.lax.scan_pp", False),
        ("jax.no_such_module.name", False),
    ),
)
def test_names_are_looked_up(name, there):
    assert moved.exists(name) is there


def test_what_came_and_went_is_told():
    before = {
        moved.NAMES: ["jax.a", "jax.b"],
        moved.PRIMITIVES: ["pjit", "scan"],
        "parameters of scan": ["jaxpr", "num_consts"],
        "parameters of pjit": ["jaxpr"],
    }
    now = {
        moved.NAMES: ["jax.a", "jax.c"],
        moved.PRIMITIVES: ["jit", "scan"],
        "parameters of scan": ["ft_in", "jaxpr"],
        "parameters of remat fails": ["TypeError"],
    }
    assert list(moved.differences(before, now)) == [
        "- names that are used: gone `jax.b`",
        "- primitives: gone `pjit`; new `jit`",
        "- parameters of scan: gone `num_consts`; new `ft_in`",
        "- remat fails: TypeError",
    ]


@pytest.mark.rest
def test_nothing_moves_from_a_version_to_itself(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(moved, "CONSTRUCTS", moved.CONSTRUCTS[:6])
    file = tmp_path / "surface.json"
    assert moved.main(["save", str(file)]) == 0
    assert moved.main(["compare", str(file)]) == 0
    assert "nothing that is used here moved" in capsys.readouterr().out
    saved = json.loads(file.read_text())
    assert "parameters of dot_general" in saved["surface"]
    assert moved.main(["look"]) == 2
