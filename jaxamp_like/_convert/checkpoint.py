"""Parameters alone, as a checkpoint of Orbax."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import equinox as eqx
import jax

from .._dtypes import in_words
from .._errors import how_to_install
from .._jax import is_array_or_shape


def _checkpointer() -> Any:
    try:
        import orbax.checkpoint as ocp
    except ImportError as e:
        raise ImportError(
            "Parameters are saved by Orbax, which is not installed. "
            + how_to_install("orbax-checkpoint", "checkpoint")
        ) from e
    return ocp.StandardCheckpointer()


def _by_path(params: Any) -> dict[str, Any]:
    """The arrays by path, whatever the tree is made of."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    return {jax.tree_util.keystr(path): x for path, x in leaves if is_array_or_shape(x)}


def save_parameters(path: str | Path, params: Any) -> None:
    with _checkpointer() as checkpointer:
        checkpointer.save(Path(path).absolute(), _by_path(params))


def load_parameters(path: str | Path, like: Any) -> Any:
    known = _by_path(like)
    types = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in known.items()}
    if not Path(path).is_dir():
        raise FileNotFoundError(
            f"{path} holds no parameters: there is no such folder. Give the one that "
            "`save_parameters` wrote."
        )
    with _checkpointer() as checkpointer:
        _check(_metadata(checkpointer, path), types, path)
        found = checkpointer.restore(Path(path).absolute(), types)
    arrays, rest = eqx.partition(like, is_array_or_shape)
    tree = jax.tree.structure(arrays)
    return eqx.combine(jax.tree.unflatten(tree, [found[n] for n in known]), rest)


def _metadata(checkpointer: Any, path: str | Path) -> dict[str, Any]:
    data = checkpointer.metadata(Path(path).absolute())
    data = getattr(data, "item_metadata", data)
    data = getattr(data, "tree", data)
    if not isinstance(data, Mapping):
        raise ValueError(
            f"{path} holds no parameters: it is no checkpoint that Orbax can read, or "
            "a part of one. Give the folder that `save_parameters` wrote."
        )
    return dict(data)


def _check(found: dict[str, Any], wanted: dict[str, Any], path: str | Path) -> None:
    """Compares shapes and dtypes, since Orbax would cast arrays of another dtype."""
    for name in [*wanted, *found]:
        here, there = (
            in_words(x[name]) if name in x else "not there" for x in (wanted, found)
        )
        if here != there:
            raise ValueError(
                f"The parameter {name} is {here} in the model, but {there} in the "
                f"checkpoint {path}. Give that of a model that was converted alike."
            )
