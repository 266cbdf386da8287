"""Arrays in a safetensors file, and what it can't tell of them beside it."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .folder import ArtifactError
from .models import first_places
from .progress import ticked

# Those that safetensors reads as NumPy arrays; others are kept as their bytes.
_KNOWN = frozenset(
    """bool uint8 int8 uint16 int16 uint32 int32 uint64 int64 float16 bfloat16 float32
    float64 complex64""".split()
)
_KEY = re.compile(r"key<.*>")


def safetensors() -> Any:
    """The package, or an error that says how to get it."""
    try:
        import safetensors
        import safetensors.numpy
    except ImportError as e:
        raise ImportError(
            "Artifacts hold their parameters in safetensors, which is not installed. "
            "Run `pip install 'jaxamp_like[convert]'`."
        ) from e
    return safetensors


def described(name: str, leaf: Any) -> dict[str, Any]:
    """What is to be known of an array to have it again."""
    dtype = str(leaf.dtype)
    row = {"name": name, "dtype": dtype, "shape": list(map(str, leaf.shape))}
    if _KEY.fullmatch(dtype):
        row["key"] = _implementation(leaf)
    return row


def _implementation(keys: Any) -> str:
    """The name of the algorithm of PRNG keys, or of their shape alone."""
    found: list[str] = []
    # JAX tells it of arrays, traced ones too, and not of shapes.
    jax.eval_shape(lambda x: found.append(str(jax.random.key_impl(x))), keys)
    return found[0]


def all_described(names: Sequence[str], leaves: Sequence[Any]) -> list[dict[str, Any]]:
    """The same of many; an array that stands in several places is written once."""
    rows = [described(*pair) for pair in zip(names, leaves, strict=True)]
    for i, first in enumerate(first_places(leaves)):
        if first != i:
            rows[i]["same_as"] = rows[first]["name"]
    return rows


def write_tensors(path: Path, rows: Sequence[dict[str, Any]], leaves: Any) -> None:
    """Writes arrays under their names."""
    pairs = list(zip(rows, leaves, strict=True))
    written = ticked("writing parameters", pairs)
    data = {row["name"]: _plain(x, row) for row, x in written if "same_as" not in row}
    safetensors().numpy.save_file(data, path)


def read_tensors(path: Path, rows: Sequence[dict[str, Any]]) -> list[Any]:
    """Reads arrays that are as described.

    Raises:
        ArtifactError: the file holds others."""
    package = safetensors()
    found: dict[str, Any] = {}
    with package.safe_open(path, "numpy") as file:
        names = [row["name"] for row in rows if "same_as" not in row]
        if sorted(file.keys()) != sorted(names):
            raise ArtifactError(
                f"{path} is damaged: it holds other parameters than its manifest says."
            )
        for row in ticked("reading parameters", rows):
            name = row["name"]
            found[name] = (
                found[row["same_as"]]
                if "same_as" in row
                else _array(file.get_tensor(name), row, path)
            )
    return [found[row["name"]] for row in rows]


def _plain(leaf: Any, row: dict[str, Any]) -> np.ndarray:
    x = np.asarray(jax.random.key_data(leaf) if "key" in row else leaf)
    x = np.ascontiguousarray(x).reshape(x.shape)
    return x if x.dtype.name in _KNOWN else np.frombuffer(x.tobytes(), np.uint8)


def _array(x: np.ndarray, row: dict[str, Any], path: Path) -> Any:
    shape = tuple(map(int, row["shape"]))
    if "key" in row:
        made = jax.random.wrap_key_data(jnp.asarray(x), impl=row["key"])
    elif row["dtype"] in _KNOWN:
        made = jnp.asarray(x)
    else:
        made = jnp.asarray(np.frombuffer(x.tobytes(), row["dtype"]).reshape(shape))
    if (str(made.dtype), made.shape) != (row["dtype"], shape):
        raise ArtifactError(
            f"The parameter {row['name']!r} in {path} is {made.dtype}"
            f"{list(made.shape)} here, but was saved as {row['dtype']}{list(shape)}."
            + (" Set `jax_enable_x64`." if "64" in row["dtype"] else "")
        )
    return made
