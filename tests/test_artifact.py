"""Artifacts: the same bits elsewhere, and nothing is loaded that is not whole."""

import collections
import copy as copies
import dataclasses
import fcntl
import hashlib
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import tomllib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings, strategies as st
from jax import export
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import mlir

from jaxamp_like import AmpError, convert, load
from jaxamp_like._convert import artifact as artifacts, folder as folders
from jaxamp_like.inference import ArtifactError
from tests import across

pytestmark = pytest.mark.rest

BF16 = {"compute_dtype": "bfloat16"}
Answer = collections.namedtuple("Answer", "scores best")


def classify(params, batch, note=None):
    x = jnp.tanh(batch["image"] @ params["w"]) + params["b"]
    scores = jax.nn.softmax(x @ params["v"] @ MIX)
    return {
        "answer": Answer(scores, jnp.argmax(scores, -1)),
        "note": note,
        "none": None,
    }


def randoms(*shapes):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=s).astype("float32")) for s in shapes]


MIX, *_ = randoms((4, 4))


def params():
    w, b, v = randoms((8, 16), (16,), (16, 4))
    return {"w": w, "b": b, "v": v}


def any_batch():
    return {"image": jax.ShapeDtypeStruct(export.symbolic_shape("b, 8"), "float32")}


@pytest.fixture(scope="module")
def converted():
    return convert(classify, params(), any_batch(), "a note", **BF16)


@pytest.fixture(scope="module")
def saved(converted, tmp_path_factory):
    path = tmp_path_factory.mktemp("artifacts") / "new" / "digits"
    return path, converted.save(path)


def same_bits(a, b):
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in pairs)


# ------------------------------------------------------------------------- round trip


def test_what_is_loaded_answers_the_same_for_any_batch(converted, saved):
    path, digest = saved
    loaded = load(path, digest=digest)
    for n in (1, 5):
        (image,) = randoms((n, 8))
        want = converted({"image": image}, "a note")
        got = loaded({"image": np.asarray(image)}, "a note")
        assert same_bits((want["answer"]), got["answer"])
        assert type(got["answer"]).__name__ == "Answer" and got["answer"]._fields
        assert (got["note"], got["none"]) == ("a note", None)
    assert {name: x.dtype.name for name, x in loaded.params.items()} == {
        "b": "float32",
        "v": "bfloat16",
        "w": "bfloat16",
        "constant 0": "bfloat16",
    }
    assert loaded.summary == converted.summary
    assert loaded.summary.share < 0.6


def test_a_fresh_process_without_the_source_has_the_same_bits(
    converted, saved, tmp_path
):
    (image,) = randoms((3, 8))
    np.save(tmp_path / "image.npy", image)
    code = f"""
        import numpy as np
        from jaxamp_like import load
        out = load({str(saved[0])!r})(
            {{"image": np.load("image.npy")}}, "a note")
        np.save("out.npy", out["answer"].scores)
    """
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=tmp_path, env=env, check=True
    )
    want = converted({"image": image}, "a note")["answer"].scores
    assert same_bits(np.load(tmp_path / "out.npy"), want)


def test_explain_shows_what_the_program_contracts(saved):
    loaded = load(saved[0])
    text = loaded.explain()
    assert text.count("bfloat16 x bfloat16 -> bfloat16  dot_general[b, ") == 3
    assert "test_artifact.py" in text
    # The program says the same.
    dots = [s for s in loaded.stablehlo().splitlines() if "stablehlo.dot_general" in s]
    assert len(dots) == 3 and all(dot.count("xbf16>") == 3 for dot in dots)


def test_unusual_parameters_come_back(tmp_path):
    def fn(p, x):
        noise = jax.random.normal(p["key"], x.shape)
        small = p["int4"].astype("float32") + p["float8"].astype("float32")
        return x @ p["w"] + noise + small + p["empty"].sum() + p["a/b"] + p["a"]["b"]

    (w,) = randoms((4, 4))
    p = {"w": w, "key": jax.random.key(3), "empty": jnp.zeros((0, 3))}
    p |= {"int4": jnp.arange(4).astype("int4"), "a/b": w[0], "a": {"b": w[1]}}
    p |= {"float8": jnp.arange(4).astype("float8_e4m3fn")}
    low = convert(fn, p, w, **BF16)
    low.save(tmp_path / "a")
    loaded = load(tmp_path / "a")
    assert same_bits(loaded(w), low(w))
    assert {"a/b", "a/b~2"} <= loaded.params.keys()


@pytest.mark.parametrize("impl", ("threefry2x32", "rbg"))
def test_a_prng_key_is_an_input(tmp_path, impl):
    """As of a model of Haiku, or one that samples."""

    def fn(p, key, x):
        return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x, 0) @ p

    w, x = randoms((4, 4), (2, 4))
    key = jax.random.key(1, impl=impl)
    low = convert(fn, w, jax.eval_shape(lambda: key), x, **BF16)
    low.save(tmp_path / "a")
    loaded = load(tmp_path / "a")
    assert same_bits(loaded(key, x), low(key, x))
    with pytest.raises(TypeError, match=r"must be key<.*but its dtype is uint32"):
        loaded(jax.random.key_data(key), x)


def test_settings_and_names_that_files_cannot_hold(tmp_path):
    """Infinities in JSON, safetensors' own name, a parameter named as a constant is."""

    def fn(p, x, n, limit):
        return Answer((x @ p["__metadata__"] + p["constant 0"]) @ MIX * n, limit)

    (w,) = randoms((4, 4))
    inputs = w, 2, float("inf")
    low = convert(fn, {"__metadata__": w, "constant 0": w[0]}, *inputs, **BF16)
    low.save(tmp_path / "a")
    loaded = load(tmp_path / "a")
    assert same_bits(loaded(*inputs), low(*inputs)) and loaded(*inputs).best > 1e300
    for other in (2.0, True, 3):
        with pytest.raises(TypeError, match="must be like"):
            loaded(w, other, float("inf"))
    # Trees of two calls, of two artifacts even, go together.
    jax.tree.map(jnp.subtract, loaded(*inputs), load(tmp_path / "a")(*inputs))


def test_what_the_lowest_jax_saved_is_loaded():
    """Made by `python -m tests.across save tests/artifacts`, on the lowest JAX."""
    folder, root = Path(__file__).parent / "artifacts", Path(__file__).parents[1]
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    (lowest,) = (d for d in project["dependencies"] if d.startswith("jax>="))
    lowest = lowest.removeprefix("jax>=")
    if jax.__version_info__ >= (0, 11):  # which reads what is up to six months older
        with pytest.raises(ArtifactError, match=f"can't read .* JAX {lowest} wrote"):
            load(folder / "model")
        return
    assert load(folder / "model").versions["jax"] == lowest
    assert "the same to the bit" in across.check(folder)


def test_a_module_and_orbax(tmp_path):
    model = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
    (x,) = randoms((2, 8))
    low = convert(model, None, x, **BF16)
    low.save(tmp_path / "a", platforms=["cpu", "cuda"])
    assert same_bits(load(tmp_path / "a")(x), low(x))
    low.save_parameters(tmp_path / "orbax")
    again = low.load_parameters(tmp_path / "orbax")
    assert same_bits(low.apply(again, x), low(x))
    other = convert(model, None, x, compute_dtype="float16")
    with pytest.raises(ValueError, match="kernel"):
        other.load_parameters(tmp_path / "orbax")
    with pytest.raises(
        FileNotFoundError, match=r"nowhere holds no parameters.*save_par"
    ):
        low.load_parameters(tmp_path / "nowhere")


def test_saving_again_replaces_all_of_it(converted, tmp_path):
    converted.save(tmp_path / "a")
    first = set(os.listdir(tmp_path / "a"))
    p = jax.tree.map(lambda x: x + 1, params())
    other = convert(classify, p, any_batch(), "b", **BF16)
    other.save(tmp_path / "a")
    second = set(os.listdir(tmp_path / "a"))
    assert len(second) == 3 and first & second == {"manifest.json"}
    (image,) = randoms((2, 8))
    assert load(tmp_path / "a")({"image": image}, "b")["note"] == "b"


# ------------------------------------------------------------------------- bad inputs


def test_calls_that_do_not_fit_are_told(saved):
    loaded = load(saved[0])
    (image,) = randoms((2, 8))
    for inputs, error, message in [
        (
            (image,),
            TypeError,
            r"must be like \({'image': 'float32\[b, 8\]'}, 'a note'\)",
        ),
        (({"image": image}, "other"), TypeError, "must be like"),
        (({"image": image.astype(int)}, "a note"), TypeError, "its dtype is int32"),
        (({"image": image[:, :7]}, "a note"), ValueError, r"its shape is \[2, 7\]"),
        (({"image": image[0]}, "a note"), ValueError, r"must be float32\[b, 8\]"),
    ]:
        with pytest.raises(error, match=message):
            loaded(*inputs)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    (
        (lambda f, x: f({}, x), TypeError, "holds its parameters: leave them out"),
        (lambda f, x: f(x[:1]), ValueError, "To take any batch, convert with symb"),
        (
            lambda f, x: f(x[:, :3]),
            ValueError,
            r"\[2, 3\]. Give what the model was con",
        ),
        (lambda f, x: f(x[0]), ValueError, r"\[4\]. Give what the model was converted"),
        (lambda f, x: f(x.astype("uint8")), TypeError, r"`x.astype\('float32'\)`"),
        (lambda f, x: f(x.tolist()), TypeError, r"\(a list of 2 lists\). Make arrays"),
        (lambda f, x: f.apply({}, x), AttributeError, "holds its parameters"),
        (lambda f, x: f.nothing, AttributeError, "no attribute 'nothing'"),
        (lambda f, x: jax.vmap(f)(x[None]), TypeError, r"`jax.lax.map\(model, xs\)`"),
        (
            lambda f, x: jax.grad(lambda x: f(x).sum())(x),
            AmpError,
            "A loaded model has no derivative",
        ),
        (
            lambda f, x: jax.jit(jax.grad(lambda x: jax.jit(f)(x).sum()))(x),
            AmpError,
            "A loaded model has no derivative",
        ),
    ),
)
def test_what_a_loaded_model_cannot_do_is_told(tmp_path, call, error, message):
    w, x = randoms((4, 4), (2, 4))
    convert(lambda w, x: x @ w, w, x, **BF16).save(tmp_path / "a")
    loaded = load(tmp_path / "a")
    with pytest.raises(error, match=message):
        call(loaded, x)
    frozen = jax.grad(lambda x: jnp.sum(x * jax.lax.stop_gradient(loaded(x))))(x)
    np.testing.assert_array_equal(frozen, loaded(x))  # of what is a constant, no error
    each = jax.lax.map(loaded, x[None])
    assert (each[0] == loaded(x)).all()


def test_a_checkpoint_of_parameters_is_no_artifact(tmp_path):
    pytest.importorskip("orbax.checkpoint")
    w, x = randoms((4, 4), (2, 4))
    convert(lambda w, x: x @ w, w, x).save_parameters(tmp_path / "a")
    with pytest.raises(
        ArtifactError, match=r"`converted.load_parameters\(path\)` reads"
    ):
        load(tmp_path / "a")


def test_what_cannot_be_saved_is_told(converted, tmp_path):
    w, x = randoms((4, 4), (2, 4))

    class Own:
        pass

    jax.tree_util.register_pytree_node(
        Own, lambda o: ((o.x,), None), lambda _, c: setattr(o := Own(), "x", *c) or o
    )

    def fn(w, x):
        out = Own()
        out.x = x @ w
        return {"a": [out]}

    path = tmp_path / "a"
    with pytest.raises(TypeError, match=r"Results .* but \['a'\]\[0\] is a Own"):
        convert(fn, w, x, **BF16).save(path)
    with pytest.raises(TypeError, match="`platforms` must be a sequence"):
        converted.save(path, platforms="cpu")
    with pytest.raises(ValueError, match="names 'gpuu', but must be some of 'cpu', "):
        converted.save(path, platforms=["cpu", "gpuu"])
    printing = convert(lambda w, x: (x @ w, jax.debug.print("{}", x))[0], w, x)
    with pytest.raises(ValueError, match=r"can't export it.*take out what calls"):
        printing.save(path)
    shapes = convert(lambda w, x: x @ w, jax.ShapeDtypeStruct((4, 4), "float32"), x)
    with pytest.raises(ValueError, match="shapes only"):
        shapes.save(path)
    assert not path.exists()
    path.mkdir()
    (path / "thesis.tex").write_text("mine")
    with pytest.raises(FileExistsError, match=r"holds thesis\.tex"):
        converted.save(path)
    with pytest.raises(FileExistsError, match="is a file"):
        converted.save(path / "thesis.tex")
    assert os.listdir(path) == ["thesis.tex"]


def forge(path, **changes):
    """An artifact with another manifest, whose digest fits."""
    manifest = json.loads((path / "manifest.json").read_bytes()) | changes
    (path / "manifest.json").write_bytes(folders._encoded(manifest))


def test_they_are_copied_and_not_pickled(converted, saved):
    path, digest = saved
    for model, instead in (
        (converted, r"Write `digest = model.save\(path\)`, and `load\(path, digest"),
        (
            load(path, digest=digest),
            r"Hand on the path .* `load\(path, digest=digest\)",
        ),
    ):
        with pytest.raises(TypeError, match=instead):
            pickle.dumps({"model": model})
        (image,) = randoms((3, 8))
        expected = model({"image": image}, "a note")["answer"]
        for made in (copies.copy(model), copies.deepcopy({"a": model})["a"]):
            assert same_bits(made({"image": image}, "a note")["answer"], expected)


@pytest.fixture
def copy(saved, tmp_path):
    shutil.copytree(saved[0], tmp_path / "copy")
    return tmp_path / "copy"


def test_foreign_artifacts_are_refused(saved, copy, tmp_path):
    with pytest.raises(ArtifactError, match="There is no artifact"):
        load(tmp_path / "nowhere")
    with pytest.raises(ArtifactError, match=r"its digest is \w+, and not `digest`"):
        load(copy, digest="0" * 64)
    forge(copy, format=2)
    with pytest.raises(ArtifactError, match=r"has format 2; .* Update jaxamp_like"):
        load(copy)
    forge(copy, format=1, platforms=["tpu"])
    with pytest.raises(ArtifactError, match=r"for tpu, but JAX runs on cpu"):
        load(copy)
    forge(copy, platforms=["cpu"], inputs=None)
    with pytest.raises(ArtifactError, match="is malformed"):
        load(copy)
    forge(copy, parameters=None)
    with pytest.raises(ArtifactError, match="is malformed"):
        load(copy)
    forge(copy, kind="a recipe")
    with pytest.raises(ArtifactError, match="of another kind"):
        load(copy)


def test_no_path_leads_out_of_the_folder(saved, copy):
    manifest = json.loads((copy / "manifest.json").read_bytes())
    entry = manifest["files"]["program"]
    for name in ("../secret", "/etc/passwd", "manifest.json", "", None, 3):
        forged = manifest["files"] | {"program": entry | {"name": name}}
        forge(copy, files=forged)
        with pytest.raises(ArtifactError, match="the name of its program is"):
            load(copy)
    forge(copy, files=manifest["files"])
    file = copy / entry["name"]
    file.unlink()
    file.symlink_to(saved[0] / entry["name"])
    with pytest.raises(ArtifactError, match="is no plain file"):
        load(copy)
    file.unlink()
    os.mkfifo(file)  # nobody ever writes to it
    with pytest.raises(ArtifactError, match="is no plain file"):
        load(copy)
    file.unlink()
    with pytest.raises(ArtifactError, match="is missing"):
        load(copy)


FILES = ("manifest.json", "program", "parameters")


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(FILES), st.floats(0, 1), st.integers(1, 255), st.sampled_from("xdi")
)
def test_any_byte_that_is_another_is_found(saved, which, where, mask, how):
    """Changed, deleted or inserted, anywhere."""
    path = saved[0]
    (file,) = (f for f in path.iterdir() if f.name.startswith(which))
    before = file.read_bytes()
    i = min(int(where * len(before)), len(before) - 1)
    changed = bytearray(before)
    if how == "x":
        changed[i] ^= mask
    elif how == "d":
        del changed[i : i + mask]
    else:
        changed[i:i] = bytes([mask])
    try:
        file.write_bytes(changed)
        with pytest.raises(ArtifactError):
            folders.open_folder(path)
    finally:
        file.write_bytes(before)


# ------------------------------------------------------------------------ bad programs


def reforge(path, code):
    """The artifact with another program, all of whose digests fit."""
    sha = hashlib.sha256(code).hexdigest()
    name = f"program-{sha[:16]}.jax_export"
    (path / name).write_bytes(code)
    manifest = json.loads((path / "manifest.json").read_bytes())
    entry = {"name": name, "bytes": len(code), "sha256": sha}
    forge(path, files=manifest["files"] | {"program": entry})


def exported_in(path):
    return export.deserialize(bytearray(next(path.glob("program-*")).read_bytes()))


def with_code(exported, text):
    """An export whose program is other StableHLO."""
    with mlir.make_ir_context():
        module = ir.Module.parse(text)
        version = stablehlo.get_current_version()
        code = stablehlo.serialize_portable_artifact(module, version)
    return dataclasses.replace(exported, mlir_module_serialized=code)


SQUARE = "tensor<8x8xf32>"


def program(line):
    """A program of one operation on a matrix, which hands the matrix back."""
    return f"""module @forged {{
      func.func public @main(%w: {SQUARE}, %x: {SQUARE}) -> {SQUARE} {{
        {line}
        return %x : {SQUARE}
      }} }}"""


def call(target, types):
    names = "%x" * types.startswith(f"({SQUARE})")
    return program(f"%y = stablehlo.custom_call @{target}({names}) : {types}")


LAYOUTS = "operand_layouts = [dense<[0, 1]> : tensor<2xindex>], api_version = 4 : i32"
FORGED = {
    "any name": call("free", f"({SQUARE}) -> {SQUARE}"),
    "callback": call("xla_ffi_python_cpu_callback", f"({SQUARE}) -> {SQUARE}"),
    "pallas": call("tpu_custom_call", f"({SQUARE}) -> {SQUARE}"),
    "old LAPACK": call("lapack_spotrf", f"({SQUARE}) -> {SQUARE}"),
    "few results": call("lapack_spotrf_ffi", f"({SQUARE}) -> {SQUARE}"),
    "small results": program(
        f"%y:2 = stablehlo.custom_call @lapack_spotrf_ffi(%x) {{{LAYOUTS}, "
        "mhlo.backend_config = {uplo = 76 : ui8}, result_layouts = [dense<[0, 1]> : "
        "tensor<2xindex>, dense<> : tensor<0xindex>]} : "
        f"({SQUARE}) -> (tensor<1x1xf32>, tensor<i32>)"
    ),
    "wrong dtypes": call("lapack_dpotrf_ffi", f"({SQUARE}) -> {SQUARE}"),
    "other options": program(
        f"%y:2 = stablehlo.custom_call @lapack_spotrf_ffi(%x) {{{LAYOUTS}, "
        "mhlo.backend_config = {uplo = 77 : ui8}, result_layouts = [dense<[0, 1]> : "
        "tensor<2xindex>, dense<> : tensor<0xindex>], output_operand_aliases = "
        "[#stablehlo.output_operand_alias<output_tuple_indices = [0], operand_index = "
        "0, operand_tuple_indices = []>]} : "
        f"({SQUARE}) -> ({SQUARE}, tensor<i32>)"
    ),
    "GPU": call("cusolver_getrf_ffi", f"({SQUARE}) -> {SQUARE}"),
    "no operand": call("Sharding", f"() -> {SQUARE}"),
    "TPU": call("ProductOfElementaryHouseholderReflectors", f"({SQUARE}) -> {SQUARE}"),
    "other shape": call("Sharding", f"({SQUARE}) -> tensor<800x8xf32>"),
    "in a branch": program(
        "%c = stablehlo.constant dense<0> : tensor<i32>\n"
        '%y = "stablehlo.case"(%c) ({ %z = stablehlo.custom_call @free(%x) : '
        f"({SQUARE}) -> {SQUARE}\n stablehlo.return %z : {SQUARE} }}) : "
        f"(tensor<i32>) -> {SQUARE}"
    ),
    "elsewhere": program("func.call @free() : () -> ()").replace(
        "func.func public", "func.func private @free()\n func.func public"
    ),
    "escapes": call('"free\\1B[2J"', f"({SQUARE}) -> {SQUARE}"),
    "host": program(
        "%t = stablehlo.create_token : !stablehlo.token\n"
        '%y:2 = "stablehlo.infeed"(%t) {infeed_config = "", layout = [[0, 1]]} : '
        f"(!stablehlo.token) -> ({SQUARE}, !stablehlo.token)"
    ),
}


@pytest.fixture(scope="module")
def product(tmp_path_factory):
    w, x = randoms((8, 8), (8, 8))
    path = tmp_path_factory.mktemp("product") / "a"
    convert(jnp.matmul, w, x, **BF16).save(path)
    return path


@pytest.mark.parametrize("text", FORGED.values(), ids=FORGED.keys())
def test_native_code_that_a_forged_program_names_is_not_called(product, tmp_path, text):
    shutil.copytree(product, tmp_path / "a")
    reforge(tmp_path / "a", with_code(exported_in(product), text).serialize())
    reason = "calls native code|holds `(stablehlo.infeed|func.func` without a body)"
    with pytest.raises(ArtifactError, match=reason) as refused:
        load(tmp_path / "a")
    assert str(refused.value).isprintable()


def factor(w, x):
    return jnp.linalg.cholesky(x @ x.T + 9 * jnp.eye(8)) @ w


LINEAR_ALGEBRA = {
    "cholesky": factor,
    "solve": lambda w, x: jnp.linalg.solve(x, w),
    "svd": lambda w, x: jnp.linalg.svd(x @ w)[1],
    "eigh": lambda w, x: jnp.linalg.eigh(x @ w + (x @ w).T)[0],
    "qr": lambda w, x: jnp.linalg.qr(x @ w)[1],
}


@pytest.mark.parametrize("fn", LINEAR_ALGEBRA.values(), ids=LINEAR_ALGEBRA.keys())
def test_linear_algebra_is_called_as_jax_does(tmp_path, fn):
    w, x = randoms((8, 8), (8, 8))
    low = convert(fn, w, x, compute_dtype="float32")
    low.save(tmp_path / "a", platforms=["cpu", "cuda", "tpu"])
    loaded = load(tmp_path / "a")
    assert "lapack_s" in loaded.stablehlo()
    np.testing.assert_allclose(loaded(x), low(x), rtol=1e-4, atol=1e-3)


def test_the_digest_vouches_for_native_code(tmp_path):
    """Of a size that is not known, nobody can tell what LAPACK would write."""
    (n,) = export.symbolic_shape("n")
    w, xs = randoms((8, 8), (3, 8, 8))
    shape = jax.ShapeDtypeStruct((n, 8, 8), "float32")
    low = convert(lambda w, xs: jax.vmap(lambda x: factor(w, x))(xs), w, shape, **BF16)
    digest = low.save(tmp_path / "a")
    with pytest.raises(ArtifactError, match=r"lapack_spotrf_ffi.*give `digest`"):
        load(tmp_path / "a")
    loaded = load(tmp_path / "a", digest=digest)
    np.testing.assert_allclose(loaded(xs), low(xs), rtol=2**-6, atol=2**-4)


def test_programs_that_save_does_not_write_are_refused(product, tmp_path):
    shutil.copytree(product, tmp_path / "a")
    path, exported = tmp_path / "a", exported_in(product)
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in exported.in_avals]
    unchecked = [export.DisabledSafetyCheck.platform()]

    def again(**settings):
        run = jax.jit(lambda leaves, inputs: [leaves[0] @ inputs[0].astype("bfloat16")])
        return export.export(run, **settings)(shapes[:1], shapes[1:])

    for code, match in (
        (again().serialize(vjp_order=1), "has a derivative"),
        (again(disabled_checks=unchecked).serialize(), "a check that is disabled"),
        (export.export(jax.jit(jnp.sin))(shapes[0]).serialize(), "takes 1 arrays"),
    ):
        reforge(path, code)
        with pytest.raises(ArtifactError, match=match):
            load(path)
    reforge(path, again().serialize())
    load(path)


@pytest.mark.parametrize("given", (True, False), ids=("digest", "none"))
def test_the_bytes_that_were_checked_are_used(converted, tmp_path, monkeypatch, given):
    """Whatever somebody writes to the folder as soon as it has been checked."""
    digest = converted.save(tmp_path / "a")
    p = jax.tree.map(lambda x: x + 1, params())
    convert(classify, p, any_batch(), "b", **BF16).save(tmp_path / "b")
    check = artifacts.open_folder

    def check_and_overwrite(*args, **kwargs):
        opened = check(*args, **kwargs)
        for file in (tmp_path / "a").iterdir():
            (other,) = (tmp_path / "b").glob(f"{file.name.partition('-')[0]}*")
            file.write_bytes(other.read_bytes())
        return opened

    monkeypatch.setattr(artifacts, "open_folder", check_and_overwrite)
    loaded = load(tmp_path / "a", digest=digest if given else None)
    (image,) = randoms((2, 8))
    got, want = (
        loaded({"image": image}, "a note"),
        converted({"image": image}, "a note"),
    )
    assert same_bits(got["answer"], want["answer"]) and loaded.digest == digest


@pytest.mark.parametrize("module", ("flatbuffers", "safetensors.numpy"))
def test_what_has_to_be_installed_is_told(
    converted, copy, tmp_path, monkeypatch, module
):
    monkeypatch.setitem(sys.modules, module, None)
    how = rf"{module.partition('.')[0]} is not installed.*jaxamp_like\[convert\]'.*-e "
    with pytest.raises(ImportError, match=how):
        converted.save(tmp_path / "a")
    if module == "flatbuffers":
        with pytest.raises(ImportError, match=how):
            load(copy)
    else:  # its files are read without it
        assert load(copy).params


def test_no_folder_of_the_builder_is_shipped(saved):
    held = b"".join(file.read_bytes() for file in saved[0].iterdir())
    folders_of = {Path(__file__), Path(jax.__file__), Path(pytest.__file__)}
    for folder in {parent for file in folders_of for parent in file.parents}:
        if len(folder.parts) > 2:  # "/usr" may be part of anything
            assert f"{folder}/".encode() not in held
    assert b"test_artifact.py" in held


# ------------------------------------------------------------------------------ kills


class Killed(BaseException):
    pass


OPERATIONS = ["replace", "fsync", "open", "close"]


class Kills:
    """Ends the program at the nth operation on files: nothing works any more."""

    def __init__(self, monkeypatch, nth):
        self.left = nth
        for name in OPERATIONS:
            self._patch(monkeypatch, os, name)
        for name in ("write_bytes", "unlink", "mkdir"):
            self._patch(monkeypatch, Path, name)
        self._patch(monkeypatch, folders, "_hash")
        # A lock ends with its process, and this one goes on.
        monkeypatch.setattr(fcntl, "flock", lambda *args: None)

    def _patch(self, monkeypatch, owner, name):
        original = getattr(owner, name)

        def operation(*args, **kwargs):
            if self.left == 0:
                # Half of the bytes have been written.
                if name == "write_bytes":
                    original(args[0], args[1][: len(args[1]) // 2])
                raise Killed
            self.left -= 1
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, operation)


def contents(n):
    """An artifact of the n-th content, without a model."""
    return {"n": n}, {
        "program": lambda path: path.write_bytes(b"program %d" % n),
        "parameters": lambda path: path.write_bytes(b"parameters %d" % n),
    }


def number_in(path):
    """Which content an artifact has, checked; none, if there is none."""
    try:
        opened = folders.open_folder(path)
    except ArtifactError as e:
        assert "There is no artifact" in str(e)
        return None
    n = opened.manifest["n"]
    for role, file in opened.files.items():
        assert file == b"%s %d" % (role.encode(), n)
    return n


def test_a_kill_at_any_operation_leaves_the_old_or_none(tmp_path):
    outcomes, tries = [], 0
    for before in (None, 1):
        for nth in range(100):
            path = tmp_path / f"{before}-{nth}"
            if before is not None:
                folders.write_folder(path, *contents(before))
            with pytest.MonkeyPatch.context() as patches:
                Kills(patches, nth)
                try:
                    folders.write_folder(path, *contents(2))
                except Killed:
                    tries += 1
                else:
                    break
            outcomes.append(number_in(path))
            assert outcomes[-1] in (before, 2)
            # The next one goes through, and leaves nothing behind.
            folders.write_folder(path, *contents(3))
            assert number_in(path) == 3 and len(os.listdir(path)) == 3
        assert number_in(path) == 2
    assert tries > 30 and {None, 1, 2} == set(outcomes)


def test_a_process_that_is_killed_leaves_a_whole_artifact(tmp_path):
    """One hundred kills, of a process that saves in an endless loop."""
    code = textwrap.dedent(
        """
        import os, sys, time
        sys.path.insert(0, sys.argv[3])
        from jaxamp_like._convert import folder
        def contents(n):
            return {"n": n}, {
                role: lambda p, role=role: p.write_bytes(b"%s %d" % (role.encode(), n))
                for role in ("program", "parameters")
            }
        # A child for each kill, since the imports take long.
        for _ in range(100):
            read, write = os.pipe()
            child = os.fork()
            if not child:
                n = int(sys.argv[2])
                os.write(write, b".")
                while True:
                    n += 1
                    folder.write_folder(sys.argv[1], *contents(n))
            os.read(read, 1)
            print(child, flush=True)
            os.waitpid(child, 0)
            os.close(read), os.close(write)
        """
    )
    path, rng = tmp_path / "a", np.random.default_rng(0)
    root = str(Path(__file__).parents[1])
    found = []
    with subprocess.Popen(
        [sys.executable, "-c", code, str(path), "0", root],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": root},
    ) as parent:
        assert parent.stdout is not None
        for line in parent.stdout:
            time.sleep(rng.uniform(0, 0.02))
            os.kill(int(line), signal.SIGKILL)
            found.append(number_in(path))
    assert parent.returncode == 0 and len(found) == 100
    assert len(set(found)) > 1


def test_an_error_of_the_disk_leaves_nothing_behind(converted, tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        converted.save(tmp_path / "a")
    assert os.listdir(tmp_path / "a") == []


def test_any_error_leaves_the_artifact_that_was_there(tmp_path):
    folders.write_folder(tmp_path, *contents(1))
    files = set(os.listdir(tmp_path))
    manifest, writers = contents(2)
    for fails in ("program", "parameters"):
        with pytest.raises(ZeroDivisionError):
            folders.write_folder(tmp_path, manifest, writers | {fails: lambda p: 1 / 0})
    with pytest.raises(ValueError, match="JSON"):
        folders.write_folder(tmp_path, {"n": float("nan")}, writers)
    assert set(os.listdir(tmp_path)) == files and number_in(tmp_path) == 1


def test_one_writes_at_a_time(tmp_path):
    """A second writer would remove what the first has not referred to yet."""
    manifest, writers = contents(1)

    def during(path):
        with pytest.raises(OSError, match="Somebody else is saving to"):
            folders.write_folder(tmp_path, *contents(2))
        path.write_bytes(b"program 1")

    folders.write_folder(tmp_path, manifest, writers | {"program": during})
    assert number_in(tmp_path) == 1
