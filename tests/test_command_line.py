"""`python -m jaxamp_like`: what it prints, writes and ends with."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import jaxamp_like
from jaxamp_like import load
from jaxamp_like._convert import cli, folder
from jaxamp_like.inference import ArtifactError

MODEL = """
import jax, jax.numpy as jnp

def digits():
    def model(p, x):
        with jax.named_scope("head"):
            return jnp.tanh(x @ p["w"]) + p["b"]
    return model, {"w": jnp.ones((64, 10)), "b": jnp.ones(10)}, jnp.ones((2, 64))

def deep():
    def model(p, x):
        return sum(x @ w for w in p)
    return model, [jnp.ones((4, 4))] * 70, jnp.ones((2, 4))

def model(p, x):
    return x @ p

ready = digits()
number = 3
short = (number,)
def broken():
    return (lambda p, x: x @ p), 1.5, jnp.ones(2)
"""


@pytest.fixture
def run(tmp_path, monkeypatch, capfd):
    (tmp_path / "its_model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.delitem(sys.modules, "its_model", raising=False)

    def run(*args):
        monkeypatch.setattr(sys, "argv", ["jaxamp_like", *args])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capfd.readouterr()
        return ended.value.code or 0, out, err

    return run


LOW = ("--compute-dtype", "bfloat16")


@pytest.mark.rest
def test_convert_then_inspect_and_explain(run):
    code, out, _ = run("convert", "its_model:digits", "-o", "art", *LOW)
    assert code == 0 and "Saved to art, digest" in out
    assert "2.539 KiB of parameters stored in 1.289 KiB" in out
    digest = out.split()[-1]
    assert load("art", digest=digest).params["w"].dtype.name == "bfloat16"
    code, out, _ = run("inspect", "art", "--digest", digest, "--html", "a.html")
    assert code == 0 and "whole" in out and "float32[2, 64]" in out
    code, out, _ = run("explain", "art")
    assert code == 0 and out.startswith("bfloat16 x bfloat16 -> bfloat16  dot_general")
    code, out, _ = run("explain", "its_model:ready", *LOW, "--html", "b.html")
    assert code == 0 and "Scopes" in out


def test_json_is_all_that_is_printed(run):
    ours = (*LOW, "--keep-input", "w", "--json")
    code, out, err = run("convert", "its_model:ready", "-o", "art", *ours)
    data = json.loads(out)
    assert code == 0 and not err and data["bytes_now"] == data["bytes_before"]
    assert data["casts"][0]["name"] == "w"
    _, out, _ = run("inspect", "art", "--json")
    assert json.loads(out)["digest"] == data["digest"]
    _, out, _ = run("explain", "art", "--json")
    assert json.loads(out)[0]["reads"] == ["bfloat16", "bfloat16"]
    _, out, _ = run("explain", "its_model:digits", "--json")  # as `convert` by default
    assert json.loads(out)["settings"] == ["compute_dtype=float16"]
    _, out, _ = run(
        "explain", "its_model:digits", "--policy", "mixed_float16", "--json"
    )
    assert "float16" in json.dumps(json.loads(out))


def test_lists_and_platforms_are_handed_on(run):
    lists = ("--excluded-scope", "head", "--platform", "cpu", "--platform", "cuda")
    code, out, _ = run("convert", "its_model:digits", "-o", "a", *LOW, *lists, "--json")
    data = json.loads(out)
    assert code == 0 and data["contractions"][0]["reads"] == ["float32", "float32"]
    none = ("--conditional-float32-op", "dot_general:precision=null")
    _, out, _ = run("convert", "its_model:digits", "-o", "b", *LOW, *none, "--json")
    assert json.loads(out)["contractions"][0]["reads"] == ["float32", "float32"]
    _, out, _ = run("inspect", "a")
    assert "platforms cpu, cuda" in out


def test_a_bar_shows_long_conversions(run, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    code, _, err = run("convert", "its_model:deep", "-o", "art", *LOW)
    assert code == 0 and "writing parameters" in err and "70/70" in err


REFUSED = {
    ("convert", "its_model:digits", "-o", "a", "--excluded-scope", "hed"): "'head'",
    ("convert", "its_model:digits", "-o", "a", "--target-op", "exq"): "No primitive",
    (
        "convert",
        "its_model:digits",
        "-o",
        "a",
        "--compute-dtype",
        "f7",
    ): "compute_dtype",
    ("convert", "its_model:broken", "-o", "a"): "must be an array",
    ("convert", "its_model:digits", "-o", "its_model.py"): "is a file",
    ("inspect", "nowhere"): "There is no artifact",
}
WRONG = {
    ("convert", "its_model:digit", "-o", "a"): "has no 'digit'",
    ("convert", "its_model:digit", "-o", "b"): "its_model.py) has no 'digit'. Did you",
    ("convert", "its_model:elsewhere", "-o", "a"): "It has jax, jnp, digits, deep, mo",
    ("convert", "its_modle:digits", "-o", "a"): (
        "There is no module 'its_modle'. Did you mean 'its_model'?"
    ),
    ("convert", "far:digits", "-o", "a"): "run from the folder that it is in.",
    ("convert", "its_model.py:digits", "-o", "a"): "without .py: write `its_model`",
    ("convert", "./a/b.py:digits", "-o", "a"): "write `a.b`, from the folder",
    ("convert", "its_model", "-o", "a"): "Write MODULE:FACTORY",
    ("convert", "its_model.py", "-o", "a"): "such as `its_model:digits`",
    ("convert", "its_model:number", "-o", "a"): "but gave int",
    ("convert", "its_model:short", "-o", "a"): "but gave tuple of 1",
    ("convert", "its_model:digits"): "--output",
    ("convrt",): "There is no command 'convrt'. Did you mean 'convert'? The commands",
    ("export", "its_model:digits"): "The commands are convert, explain, inspect, check",
    ("convert", "its_model:model", "-o", "a"): (
        "its_model:model needs arguments, (p, x). Give a function without any, which "
        "returns (fn, params, *example_inputs)."
    ),
    tuple("convert its_model:digits -o a --conditional-float32-op tanh=1".split()): (
        "Write OP:PARAMETER=VALUE"
    ),
    tuple("convert its_model:digits -o a --conditional-float32-op tanh:y=x".split()): (
        "must be JSON"
    ),
}


@pytest.mark.parametrize("args", REFUSED)
def test_a_refusal_ends_with_one(run, args):
    code, out, err = run(*args)
    assert (code, out) == (1, "") and REFUSED[args] in err and "Traceback" not in err


@pytest.mark.parametrize("args", WRONG)
def test_a_wrong_call_ends_with_two(run, args):
    code, out, err = run(*args)
    assert (code, out) == (2, "") and WRONG[args] in err


def test_an_artifact_that_is_tampered_with_is_refused(run, tmp_path):
    run("convert", "its_model:digits", "-o", "art", *LOW)
    (file,) = (tmp_path / "art").glob("parameters-*")
    file.write_bytes(file.read_bytes()[:-1])
    for command in ("inspect", "explain"):
        code, _, err = run(command, "art")
        assert code == 1 and "is damaged" in err


def test_what_an_artifact_says_cannot_drive_the_terminal(run, tmp_path):
    run("convert", "its_model:digits", "-o", "art", *LOW)
    manifest = json.loads((tmp_path / "art/manifest.json").read_bytes())
    bad = "\x1b]0;mine\x07\x9b2J\u202e\r\n[link=https://a.b]digest 0[/link]"

    def spoilt(data):
        """With the string at the end of all of its own."""
        if isinstance(data, dict):
            return {key: spoilt(value) for key, value in data.items()}
        if isinstance(data, list):
            return list(map(spoilt, data))
        return data + bad if isinstance(data, str) else data

    for key in ("summary", "input_types", "written_by", "platforms"):
        manifest[key] = spoilt(manifest[key])
    manifest["written_by"][bad] = bad
    (tmp_path / "art/manifest.json").write_bytes(folder._encoded(manifest))
    for command in ("inspect", "explain"):
        code, out, err = run(command, "art")
        assert code == 0 and not err and "\\x1b]0;mine" in out and "[link" in out
        assert all(line.isprintable() for line in out.split("\n"))
        assert not any(line.startswith("[link") for line in out.split("\n"))
    with pytest.raises(ArtifactError) as refused:
        load("art")
    assert str(refused.value).isprintable()
    code, out, _ = run("inspect", "art", "--json")
    assert json.loads(out)["platforms"] == manifest["platforms"]


BY_ITSELF = [sys.executable, "-m", "jaxamp_like"]
MODELS = f"""{MODEL}
def training():
    return jax.grad(lambda p, x: jnp.mean(x @ p)), jnp.ones((4, 2)), jnp.ones((2, 4))
"""


@pytest.mark.sample(2)
@pytest.mark.parametrize("args", ((), ("--help",)), ids=("alone", "help"))
def test_the_examples_that_help_shows_run(args, run, tmp_path, monkeypatch):
    shown = subprocess.run(
        [*BY_ITSELF, *args], capture_output=True, text=True, check=True
    )
    commands = re.findall(r"python -m jaxamp_like ([a-z].*)", shown.stdout)
    assert sorted(line.split()[0] for line in commands) == sorted(
        ("convert", "explain", "inspect", "check")
    )
    (tmp_path / "models.py").write_text(MODELS)
    monkeypatch.delitem(sys.modules, "models", raising=False)
    for command in commands:
        status, out, err = run(*command.split())
        assert (status, err) == (0, "") and out, command
        _, help_of_one, _ = run(command.split()[0], "--help")
        assert f"python -m jaxamp_like {command}" in help_of_one


FAILING = """
import jax, jax.numpy as jnp
from jaxamp_like import amp

def fails():
    return helper({})

def helper(found):
    return found["missing"]  # the user's line

def refuses():
    raise ValueError("there is no data set")  # the user's line

def step():
    def loss(w, x):
        return jnp.sum(x @ w.T)  # the user's line
    low = amp(loss, compute_dtype="bfloat16")
    return jax.grad(low), jnp.ones((4, 3)), jnp.ones((2, 4))
"""
CALLS = {
    "check": ("a.lock", "--write"),
    "explain": (),
    "convert": ("-o", "artifact"),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("command", CALLS)
@pytest.mark.parametrize("factory", ("fails", "refuses", "step"))
def test_an_error_of_the_user_shows_the_users_frames(command, factory, tmp_path):
    (tmp_path / "failing.py").write_text(FAILING)
    args = (command, f"failing:{factory}", *CALLS[command])
    home = str(Path(jaxamp_like.__file__).parents[1])
    ran = subprocess.run(
        [*BY_ITSELF, *args],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": home},
    )
    assert ran.returncode == 1 and not ran.stdout
    lines = [line for line in ran.stderr.split("\n") if line.startswith("  File")]
    assert lines and all("failing.py" in line for line in lines), ran.stderr
    assert "# the user's line" in ran.stderr
    assert ran.stderr.startswith("Traceback (most recent call last)")


@pytest.mark.parametrize(
    ("code", "told"),
    (
        ("import no_such_package", "No module named 'no_such_package'"),
        ("1 / 0", "ZeroDivisionError"),
        ("def f(:", "SyntaxError"),
    ),
    ids=("import", "error", "syntax"),
)
def test_a_module_that_cannot_be_imported(code, told, run, tmp_path, monkeypatch):
    (tmp_path / "unreadable.py").write_text(code)
    monkeypatch.delitem(sys.modules, "unreadable", raising=False)
    status, out, err = run("check", "unreadable:f", "a.lock")
    assert (status, out) == (1, "")
    lines = [line for line in err.split("\n") if line.startswith("  File")]
    assert told in err and len(lines) == 1 and "unreadable.py" in lines[0]


def test_a_fault_of_the_package_keeps_its_frames(run, monkeypatch):
    def faulty(*_, **__):
        raise KeyError("of the package")

    faulty.__code__ = faulty.__code__.replace(co_filename=cli.__file__)
    monkeypatch.setattr(cli, "certify", faulty)
    monkeypatch.setattr(
        sys, "argv", "jaxamp_like check its_model:digits l --write".split()
    )
    with pytest.raises(KeyError, match="of the package"):
        cli.main()


STEP = """
import jax, jax.numpy as jnp
from jaxamp_like import amp

def loss(w, x):
    with jax.named_scope("head"):
        return jnp.mean(jnp.tanh(x @ w) ** 2)

arrays = jnp.ones((64, 8)), jnp.ones((4, 64))
number = 3

def low():
    return jax.grad(amp(loss, compute_dtype="bfloat16")), *arrays

def full():
    return jax.grad(loss), *arrays
"""


@pytest.fixture
def check(run, tmp_path, monkeypatch):
    (tmp_path / "its_step.py").write_text(STEP)
    monkeypatch.delitem(sys.modules, "its_step", raising=False)
    return lambda step, *rest: run("check", f"its_step:{step}", "a.lock", *rest)


def test_check_compares_with_the_lock_that_it_wrote(check, tmp_path):
    assert check("low", "--write")[0] == 0
    assert "head: forward dot_general" in (tmp_path / "a.lock").read_text()
    status, out, _ = check("low")
    assert status == 0
    assert "2 of 2 contractions run as decided" in out
    status, out, _ = check("low", "--json")
    assert json.loads(out)["is_as_decided"] is True
    assert "The precision is that of a.lock" in check("low")[1]


def test_check_fails_with_what_differs(check):
    check("low", "--write")
    status, _, err = check("full")
    assert status == 1
    assert "-head: forward dot_general: bfloat16 x bfloat16 -> bfloat16, x1" in err
    assert "+head: forward dot_general: float32 x float32 -> float32, x1" in err


def test_check_without_a_lock_says_how_to_write_one(check):
    status, _, err = check("low")
    assert status == 1
    assert "--write" in err


def test_check_says_which_devices_there_are(check):
    status, _, err = check("low", "--write", "--device", "abacus")
    assert status == 1
    assert "one of the names h200, b200, v4" in err


@pytest.mark.parametrize(
    ("made", "params"),
    (
        ("equinox.nn.Linear(2, 3, key=jax.random.key(0))", "None"),
        ("flax.linen.Dense(3)", "params"),
        ("haiku.transform(lambda x: haiku.Linear(3)(x))", "params"),
    ),
)
def test_a_model_in_place_of_a_function_that_makes_one(
    made, params, run, tmp_path, monkeypatch
):
    code = f"import equinox, flax.linen, haiku, jax\nnet = {made}\n"
    (tmp_path / "its_net.py").write_text(code)
    monkeypatch.delitem(sys.modules, "its_net", raising=False)
    for args in (("convert", "its_net:net", "-o", "art"), ("explain", "its_net:net")):
        status, _, err = run(*args)
        assert status == 2 and "its_net:net is a model (" in err
        assert f"`def factory(): return net, {params}, x`" in err
    status, _, err = run("check", "its_net:net", "a.lock")
    assert status == 2 and "returns (step, *arguments), and name that" in err


def test_check_says_what_a_factory_must_give(check):
    status, _, err = check("number")
    assert status == 2
    assert "its_step:number must give (step, *arguments), but gave int" in err
