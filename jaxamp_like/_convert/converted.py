"""What `convert` returns: a function, its parameters as they are stored, a summary."""

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import equinox as eqx
import jax
import numpy as np

from .._dtypes import in_words, is_float
from .._errors import AmpError
from .._jax import is_array_or_shape
from .._rewrite.record import not_as_written
from .._suggestions import no_attribute
from .examples import FAILURES, outlined
from .models import Model, parameters_in, path_name
from .summary import Summary
from .traced import TracedModel, traced


@dataclass(frozen=True, eq=False, repr=False)
class Converted:
    """A mixed model whose parameters are stored in the dtypes that they are read in.

    Args:
        params: the parameters as they are stored, in the tree that they came in.
        summary: how each parameter was stored, and why.
        example_inputs: the inputs that it was converted with."""

    model: Model
    mixed: Callable[..., Any]
    authors: Any  # the types of the parameters before they were cast
    params: Any
    example_inputs: Sequence[Any]
    summary: Summary

    def __call__(self, *inputs: Any) -> Any:
        """Calls the model on inputs, compiled for their shapes.

        Args:
            *inputs: what the model takes after its parameters, of any shapes that the
                original takes.
        Returns:
            What the original returns.
        Raises:
            AmpError: with inputs of these shapes, a parameter is read in another dtype
                than it is stored in."""
        with self._explaining(inputs):
            return self._run(self.params, inputs)

    def apply(self, params: Any, *inputs: Any) -> Any:
        """Calls the model with the caller's parameters, for use inside of `jax.jit`.

        Args:
            params: a tree like `params` of this object, in the same dtypes.
            *inputs: as for a call.
        Returns:
            What the original returns.
        Raises:
            ValueError: `params` are not like those that are stored.
            AmpError: as from a call."""
        self._check(params)
        return self._run(params, inputs)

    def __repr__(self) -> str:
        return f"Converted: {self.summary}"

    # `pickle` and `copy` ask the same method, so that copies have methods of their own.

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "What `convert` returns can't be pickled, since a traced function can't "
            "be. Write `digest = model.save(path)`, and `load(path, digest=digest)` "
            "where it is to be read, which needs none of the model's code."
        )

    def __copy__(self) -> "Converted":
        return replace(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Converted":
        return replace(self, params=copy.deepcopy(self.params, memo))

    def module(self) -> Any:
        """The model as a module of its own class, with its parameters stored low.

        It is for code that works with the class: `amp(converted.module())` computes
        what this object does. This holds if layers promote the dtypes of what they
        multiply. Where a low parameter would make what is computed from it low as well
        (as a table that is looked up), it does not hold, and no module is returned.

        Returns:
            The module.
        Raises:
            TypeError: the model did not come as a module of Equinox or NNX.
            ValueError: an example has a dimension such as `2*n`.
            AmpError: the module would compute something else."""
        if self.model.rebuild is None:
            raise TypeError(
                f"{self.summary.name} is no module that holds its parameters. Use "
                "`converted.params` with `converted.apply`."
            )
        inputs = jax.tree.map(_example, tuple(self.example_inputs))
        mine, its = self(*inputs), eqx.filter_jit(self.mixed)(self.params, *inputs)
        if not eqx.tree_equal(mine, its, typematch=True):
            raise AmpError(
                f"With its parameters stored in low precision, {self.summary.name} "
                "would compute something else: some layer goes on in the dtype of "
                "its parameter. "
                "Call the converted object, or keep that parameter by `keep_inputs`."
            )
        return self.model.rebuild(self.params)

    def save(self, path: str | Path, *, platforms: Sequence[str] | None = None) -> str:
        """Writes the model to a folder, for `load`.

        The program is exported by `jax.export` for inputs like the examples, and the
        parameters are written beside it as safetensors. A dimension of an example that
        is symbolic can have any size later. An artifact that is in the folder already
        is replaced in one step: whatever happens meanwhile, the folder holds the old
        one or the new one.

        Args:
            path: a new folder, or one that holds an artifact.
            platforms: the platforms that it is to run on ("cpu", "cuda", "rocm",
                "tpu"); if not given, the one that JAX runs on now.
        Returns:
            The digest of the artifact, to be given to `load` if nothing else may be
            loaded.
        Raises:
            TypeError: inputs or results are no plain trees.
            ValueError: the parameters are shapes only.
            ImportError: safetensors or flatbuffers is not installed.
            OSError: the folder can't be written to, or holds something else."""
        from .artifact import save_converted

        return save_converted(self, path, platforms)

    def save_parameters(self, path: str | Path) -> None:
        """Writes the parameters alone, as a checkpoint of Orbax.

        Args:
            path: a new folder.
        Raises:
            ImportError: Orbax is not installed.
            ValueError: the folder is there already."""
        from .checkpoint import save_parameters

        save_parameters(path, self.params)

    def load_parameters(self, path: str | Path) -> Any:
        """Reads what `save_parameters` wrote for a model that was converted like this.

        Args:
            path: the folder.
        Returns:
            A tree like `params`, for `apply`.
        Raises:
            ImportError: Orbax is not installed.
            ValueError: the checkpoint holds other parameters."""
        from .checkpoint import load_parameters

        params = load_parameters(path, self.params)
        self._check(params)
        return params

    def trace(self, inputs: Sequence[Any]) -> TracedModel:
        """The mixed program for inputs of these shapes; it must fit what is stored."""
        with not_as_written():
            program = traced(self.mixed, self.authors, inputs)
        program.check(self.summary.parameters)
        return program

    @functools.cached_property
    def _run(self) -> Callable[..., Any]:
        return eqx.filter_jit(self._uncompiled)

    def _uncompiled(self, params: Any, inputs: Sequence[Any]) -> Any:
        program = self.trace(inputs)
        args = parameters_in((params, tuple(inputs)))
        return program.merge(program.run(program.constants(), args))

    @contextmanager
    def _explaining(self, inputs: Sequence[Any]) -> Iterator[None]:
        """Raises another error if the model fails, given other inputs than examples."""
        try:
            yield
        except FAILURES as e:
            if _is_like(inputs, self.example_inputs):
                raise
            if inputs and not self.example_inputs:
                raise TypeError(
                    f"{self.summary.name} was converted without example inputs, and is "
                    "called with some. Write `convert(fn, params, *example_inputs)`: "
                    "the parameters come second, and are an argument of `fn`."
                ) from e
            has_params = bool(inputs) and _is_like(inputs[0], self.params)
            holds = has_params and len(inputs) == len(self.example_inputs) + 1
            examples = ", ".join(map(outlined, self.example_inputs))
            raise TypeError(
                f"{self.summary.name} was converted with inputs like ({examples}), but "
                f"is called with ({', '.join(map(outlined, inputs))}). "
                + (_HOLDS if holds else _FIRST)
            ) from e

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise no_attribute(self, name, _ELSEWHERE.get(name, ""))

    def _check(self, params: Any) -> None:
        known, tree = jax.tree_util.tree_flatten_with_path(self.params)
        leaves, given = jax.tree.flatten(params)
        if given != tree:
            raise ValueError(
                f"`params` has the structure {given}, but the parameters that are "
                f"stored have {tree}. Give `converted.params`, or a tree like it."
            )
        for (path, mine), leaf in zip(known, leaves, strict=True):
            if not is_array_or_shape(mine):
                continue
            now, expected = in_words(leaf), in_words(mine)
            if now != expected and _is_of_bytes(leaf):
                name = path_name(path)
                raise ValueError(
                    f"The parameter `{name}` is {now}, but is stored as {expected}. "
                    "NumPy's files don't hold this dtype, only its bytes: "
                    f"`leaf.view({mine.dtype.name!r})` reads them. `model."
                    "save_parameters(path)` and `model.load_parameters(path)` keep it."
                )
            if now != expected:
                raise ValueError(
                    f"The parameter `{path_name(path)}` is {now}, but is stored as "
                    f"{expected}. Give `converted.params`, or convert these."
                )


_HOLDS = (
    "It holds its parameters: leave them out, `model(x)`. Others are given by "
    "`model.apply(params, x)`."
)
_FIRST = (
    "If parameters are among its inputs, they were not the first argument of `fn` when "
    "it was converted: write `convert(lambda params, x: ..., params, x)`."
)
_LOW = "Write `convert(fn, params, x, compute_dtype='bfloat16')`."
_SAVE = "Write `model.save(path)`, and `load(path)` later."
# What models of other libraries, and what is exported, have instead.
_ELSEWHERE = {
    **dict.fromkeys(("astype", "half", "bfloat16", "to"), _LOW),
    **dict.fromkeys(("export", "serialize", "save_pretrained", "state_dict"), _SAVE),
    **dict.fromkeys(("predict", "stateless_call", "forward"), "Write `model(x)`."),
}


def _is_of_bytes(leaf: Any) -> bool:
    """Whether an array has lost its dtype, as in a file that `np.save` wrote."""
    return isinstance(leaf, np.ndarray) and leaf.dtype.type is np.void


def _is_like(one: Any, other: Any) -> bool:
    """Whether two trees have the same structure, and arrays of as many axes."""
    leaves, structure = jax.tree.flatten(one)
    others, other_structure = jax.tree.flatten(other)
    ranks, other_ranks = (
        [getattr(x, "ndim", None) for x in each] for each in (leaves, others)
    )
    return structure == other_structure and ranks == other_ranks


def _example(leaf: Any) -> Any:
    """`leaf`, or an example of an array where only its shape is known."""
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    shape = tuple(d if isinstance(d, int) else _size(d) for d in leaf.shape)
    if is_float(leaf.dtype):
        return jax.random.normal(jax.random.key(0), shape, leaf.dtype)
    return jax.numpy.zeros(shape, leaf.dtype)


def _size(dim: Any) -> int:
    """A size for a symbolic dimension: any will do if it is a single symbol."""
    if not str(dim).isidentifier():
        raise ValueError(
            f"A module is tried on an example, and the dimension `{dim}` could be "
            "any. Convert with inputs of certain shapes."
        )
    return 3


def type_of(leaf: Any) -> Any:
    if not is_array_or_shape(leaf) or isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    is_weak = getattr(leaf, "weak_type", False)  # promotion of dtypes depends on it
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=is_weak)
