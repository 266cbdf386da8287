"""Arrays in a safetensors file, with descriptions that tell what the file can't."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._dtypes import in_words
from .extra import needed
from .folder import ArtifactError
from .models import first_positions
from .printable import printable
from .progress import ticked

# Arrays of these dtypes are stored as safetensors has them, others as their bytes.
_DTYPES = {"BOOL": "bool", "BF16": "bfloat16", "C64": "complex64"}
_DTYPES |= {f"F{bits}": f"float{bits}" for bits in (16, 32, 64)}
_DTYPES |= {f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)}
_DTYPES |= {f"U{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)}
_KNOWN = frozenset(_DTYPES.values())
_KEY = re.compile(r"key<.*>")


def described(name: str, leaf: Any) -> dict[str, Any]:
    """What must be known of an array to restore it."""
    dtype = str(leaf.dtype)
    row = {"name": name, "dtype": dtype, "shape": list(map(str, leaf.shape))}
    if _KEY.fullmatch(dtype):
        row["key"] = _implementation(leaf)
    return row


def _implementation(keys: Any) -> str:
    """The name of the algorithm of PRNG keys, which may be given as a shape alone."""
    found: list[str] = []
    # `jax.random.key_impl` takes arrays, traced ones too, but no shapes.
    jax.eval_shape(lambda x: found.append(str(jax.random.key_impl(x))), keys)
    return found[0]


def all_described(names: Sequence[str], leaves: Sequence[Any]) -> list[dict[str, Any]]:
    """Describes arrays so that one that stands in several places is written once."""
    rows = [described(*pair) for pair in zip(names, leaves, strict=True)]
    for i, first in enumerate(first_positions(leaves)):
        if first != i:
            rows[i]["same_as"] = rows[first]["name"]
    return rows


def write_tensors(path: Path, rows: Sequence[dict[str, Any]], leaves: Any) -> None:
    """Writes arrays under their names."""
    pairs = list(zip(rows, leaves, strict=True))
    written = ticked("writing parameters", pairs)
    data = {row["name"]: _plain(x, row) for row, x in written if "same_as" not in row}
    needed("safetensors.numpy").save_file(data, path)


def read_tensors(data: bytes, rows: Sequence[dict[str, Any]]) -> list[Any]:
    """Reads the arrays of a safetensors file, and checks them by their descriptions.

    The bytes are parsed here. The safetensors package would read the file again, which
    may have changed since it was checked, or copy all of the arrays at once.

    Raises:
        ArtifactError: the file holds other arrays than the descriptions say."""
    held = _views(data)
    found: dict[str, Any] = {}
    names = [row["name"] for row in rows if "same_as" not in row]
    if sorted(held) != sorted(names):
        raise ArtifactError(
            "The artifact is damaged: it holds other parameters than its manifest says."
        )
    for row in ticked("reading parameters", rows):
        known, name = row.get("same_as"), row["name"]
        found[name] = _array(held[name], row) if known is None else found[known]
    return [found[row["name"]] for row in rows]


def _views(data: bytes) -> dict[str, np.ndarray]:
    """The arrays by their names: views of the bytes, so that nothing is copied."""
    start = 8 + int.from_bytes(data[:8], "little")
    entries = json.loads(data[8:start])
    entries.pop("__metadata__", None)
    found = {}
    for name, entry in entries.items():
        begin, end = (start + offset for offset in entry["data_offsets"])
        part = memoryview(data)[begin:end]
        flat = np.frombuffer(part, jnp.dtype(_DTYPES[entry["dtype"]]))
        found[name] = flat.reshape(entry["shape"])
    return found


def _plain(leaf: Any, row: dict[str, Any]) -> np.ndarray:
    x = np.asarray(jax.random.key_data(leaf) if "key" in row else leaf)
    x = np.ascontiguousarray(x).reshape(x.shape)
    return x if x.dtype.name in _KNOWN else np.frombuffer(x.tobytes(), np.uint8)


def _array(x: np.ndarray, row: dict[str, Any]) -> Any:
    shape = tuple(map(int, row["shape"]))
    if "key" in row:
        made = jax.random.wrap_key_data(jnp.asarray(x), impl=row["key"])
    elif row["dtype"] in _KNOWN:
        made = jnp.asarray(x)
    else:
        made = jnp.asarray(np.frombuffer(x.tobytes(), row["dtype"]).reshape(shape))
    if (str(made.dtype), made.shape) != (row["dtype"], shape):
        raise ArtifactError(
            f"The parameter {row['name']!r} is {in_words(made)} here, "
            f"but was saved as {printable(row['dtype'])}{list(shape)}."
            + (" Set `jax_enable_x64`." if "64" in row["dtype"] else "")
        )
    return made
