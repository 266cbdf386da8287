"""What pyright's strict mode says of the public names, and of the code in the docs.

`python -m tests.strict_types` writes two kinds of files and runs pyright on them:

- A file that reads every public name, and every public attribute of public classes. No
  type in it may be unknown, not even in part.
- A file for each page, of all its Python blocks. Those that read JAX, Optax, Flax or
  Keras see types that these packages leave unknown, and the docs leave out annotations
  for brevity: so here the rules about unknown types are off. All others must hold."""

import inspect
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import jaxamp_like
from jaxamp_like import inference, presets, reports, rules, scaling

from .test_docs import DOCS, ROOT, blocks

MODULES = jaxamp_like, inference, presets, reports, rules, scaling
OFF_IN_PAGES = (
    "reportMissingParameterType",
    "reportMissingTypeArgument",
    "reportMissingTypeStubs",
    "reportUnknownArgumentType",
    "reportUnknownLambdaType",
    "reportUnknownMemberType",
    "reportUnknownParameterType",
    "reportUnknownVariableType",
    # A page is many blocks, which import anew what they need, and go on from others.
    "reportDuplicateImport",
    "reportRedeclaration",
    "reportUnusedImport",
)
# Keras declares `verbose` of `fit` as a string, and documents 0.
EXCLUDED = {("keras.md", "reportArgumentType")}


def names() -> str:
    """Code that reads every public name, and the public attributes of classes."""
    lines: list[str] = []
    for module in MODULES:
        short = module.__name__.rpartition(".")[2]
        lines += [f"import {module.__name__} as _{short}"]
        for name in module.__all__:
            lines += [f"print(_{short}.{name})"]
            found = getattr(module, name)
            if inspect.isclass(found):
                of_class = [n for n in vars(found) if not n.startswith("_")]
                lines += [f"print(_{short}.{name}.{n})" for n in of_class]
    return "\n".join([*lines, MADE])


# What only a value has: the optimizer of `enable_amp`, a state, a model.
MADE = """
import equinox, jax, optax
def loss(w: jax.Array, x: float) -> jax.Array:
    return w * x
mixed, tx = _jaxamp_like.enable_amp(loss, optax.sgd(0.1))
opt_state = tx.init(jax.numpy.float32(1))
print(float(opt_state.scaler.scaler), int(opt_state.scaler.skipped))
value, grads = tx.value_and_grad(mixed, opt_state)(jax.numpy.float32(1), 2.0)
updates, opt_state = tx.update(grads, opt_state)
same: jax.Array = _jaxamp_like.amp(compute_dtype="float16")(loss)(value, 2.0)
model = _jaxamp_like.amp(equinox.nn.Linear(2, 2, key=jax.random.key(0)))
print(model.weight, _jaxamp_like.guard_step(loss)(value, 2.0))
print(_jaxamp_like.amp_stop(loss)(value, 2.0), _jaxamp_like.__version__.split("."))
"""


def pages() -> dict[str, str]:
    """The Python blocks of the README and of each page, by the name of the page."""
    found = {
        path.name: "\n".join(blocks(path.read_text()))
        for path in [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
    }
    return {name: code for name, code in found.items() if code}


def problems(files: dict[str, str], off: tuple[str, ...] = ()) -> list[str]:
    """What pyright says of files in strict mode, with the rules `off` switched off."""
    with tempfile.TemporaryDirectory() as folder:
        # The names that pages have are names of packages, such as `equinox`.
        paths = {f"page_{Path(name).stem}.py": name for name in files}
        for path, name in paths.items():
            Path(folder, path).write_text(files[name])
        config = {
            "typeCheckingMode": "strict",
            "pythonVersion": "3.11",
            "extraPaths": [str(ROOT), str(ROOT / "examples")],
            **dict.fromkeys(off, False),
        }
        Path(folder, "pyrightconfig.json").write_text(json.dumps(config))
        command = ["pyright", "--outputjson", "--pythonpath", sys.executable]
        ran = subprocess.run(
            [*command, "-p", folder], capture_output=True, text=True, check=False
        )
    report = json.loads(ran.stdout)
    assert report["summary"]["filesAnalyzed"] == len(files), ran.stderr
    told: list[str] = []
    for one in report["generalDiagnostics"]:
        name, rule = paths[Path(one["file"]).name], one.get("rule", "")
        line = one["range"]["start"]["line"]
        code = files[name].split("\n")[line].strip()
        if (name, rule) not in EXCLUDED:
            told.append(f"{name}: {one['message']} ({rule})\n    {code}")
    return told


def main() -> None:
    told = [
        *problems({"names.py": names()}, ("reportMissingTypeStubs",)),
        *problems(pages(), OFF_IN_PAGES),
    ]
    print("\n".join(told))
    sys.exit(bool(told))


if __name__ == "__main__":
    main()
