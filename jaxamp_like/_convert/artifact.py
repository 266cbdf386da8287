"""`save` and `load`: a converted model as a folder that needs no code of the model."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import jax
from jax import export

from .._dtypes import in_words
from .._errors import AmpError, showing_call
from .._jax import is_array_or_shape, lowering_without_folders
from .._reports.versions import versions
from .._suggestions import did_you_mean, no_attribute
from . import summary as summaries
from .examples import outlined, several_scopes
from .extra import needed
from .folder import ArtifactError, Opened, open_folder, well_formed, write_folder
from .models import canonical_dtype, distinct, parameters_in
from .native import check_calls
from .printable import printable
from .tensors import all_described, described, read_tensors, write_tensors
from .traced import TracedModel
from .trees import decode, encode

_PLATFORMS = "cpu", "cuda", "rocm", "tpu"


def save_converted(
    converted: Any, path: str | Path, platforms: Sequence[str] | None
) -> str:
    """Writes a `Converted` to a folder; see `Converted.save`."""
    for module in ("safetensors.numpy", "flatbuffers"):
        needed(module)  # before anything is made
    if isinstance(platforms, str):
        raise TypeError(
            "`platforms` must be a sequence such as ['cpu', 'cuda'], but got "
            f"{platforms!r}."
        )
    if "gpu" in (platforms or ()):
        raise ValueError(
            f"`platforms` is {platforms!r}, but a program is for GPUs of one maker: "
            "write 'cuda' or 'rocm' for 'gpu'."
        )
    known = *_PLATFORMS, jax.default_backend()
    if unknown := [name for name in platforms or () if name not in known]:
        raise ValueError(
            f"`platforms` names {unknown[0]!r}, but must be some of "
            f"{', '.join(map(repr, _PLATFORMS))}.{did_you_mean(unknown[0], known)}"
        )
    program: TracedModel = converted.trace(converted.example_inputs)
    params = parameters_in(converted.params)
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in params):
        raise ValueError(
            "The parameters are shapes only: convert real ones to save them."
        )
    leaves = [*params, *program.constants()]
    names = distinct([stored.name for stored in converted.summary.leaves])
    inputs = list(map(_shape, parameters_in(converted.example_inputs)))

    def run(leaves: list[Any], inputs: list[Any]) -> list[Any]:
        num = len(params)
        return program.run(leaves[num:], [*leaves[:num], *inputs])

    name = converted.summary.name
    if told := several_scopes(inputs):
        raise ValueError(told)
    exported = _exported(run, name, platforms, list(map(_shape, leaves)), inputs)
    code = exported.serialize()
    results = program.merge([_PLACE] * len(exported.out_avals))
    rows = all_described(names, leaves)
    manifest = {
        "written_by": versions(),
        "platforms": list(exported.platforms),
        "calling_convention": exported.calling_convention_version,
        "inputs": encode(list(converted.example_inputs), is_array_or_shape, "Inputs"),
        "input_types": [described("", x) for x in inputs],
        "outputs": encode(results, lambda x: x is _PLACE, "Results"),
        "parameters": rows,
        "summary": converted.summary.to_dict(),
    }
    return write_folder(
        path,
        manifest,
        {
            "parameters": lambda file: write_tensors(file, rows, leaves),
            "program": lambda file: file.write_bytes(code),
        },
    )


def _exported(run: Any, name: str, platforms: Sequence[str] | None, *shapes: Any):
    try:
        with lowering_without_folders():  # an artifact names no folders of its builder
            return export.export(jax.jit(run), platforms=platforms)(*shapes)
    except NotImplementedError as e:
        raise ValueError(
            f"{name} can't be saved, since JAX can't export it: {e}. An artifact holds "
            "no Python: take out what calls it (`jax.debug.print`, `pure_callback`)."
        ) from e


_PLACE = object()  # stands for an array among the results


def _shape(x: Any) -> Any:
    if isinstance(x, jax.ShapeDtypeStruct):
        return x
    return jax.ShapeDtypeStruct(x.shape, canonical_dtype(x.dtype))


class Artifact:
    """A model that was saved: called with its inputs, without the code that made it.

    Args:
        params: its parameters by their names, as they are stored.
        summary: what `convert` stored and why, and the precision of each contraction.
        digest: the SHA-256 that stands for the whole artifact.
        platforms: the platforms that it can run on.
        versions: the versions of the packages that wrote it."""

    def __init__(self, opened: Opened, is_trusted: bool):
        manifest = opened.manifest
        self.digest: str = opened.digest
        self.platforms: tuple[str, ...] = tuple(printable(manifest["platforms"]))
        self.versions: dict[str, str] = printable(manifest["written_by"])
        self.summary: summaries.Summary = summaries.from_dict(
            printable(manifest["summary"])
        )
        self._types = printable(manifest["input_types"])
        self._check_platform()
        code = opened.files["program"]
        self._exported = _deserialized(code, self.versions, is_trusted)
        rows = manifest["parameters"]
        self._leaves = read_tensors(opened.files["parameters"], rows)
        _check_types(self._exported, self._leaves, self._types)
        names = (row["name"] for row in rows)
        self.params: dict[str, Any] = dict(zip(names, self._leaves, strict=True))
        self._inputs, self._outputs = manifest["inputs"], manifest["outputs"]
        self._shown = tuple(decode(self._inputs, [short(t) for t in self._types]))
        self._call = jax.jit(_without_derivative(self._exported.call))

    def __call__(self, *inputs: Any) -> Any:
        """Calls the model.

        Args:
            *inputs: inputs like those of the saved model: trees of the same structure,
                with arrays of the same dtypes and shapes. A symbolic dimension takes
                any size.
        Returns:
            What the model returns.
        Raises:
            TypeError, ValueError: an input has another structure, dtype or shape; the
                message names it."""
        arrays = self._checked(list(inputs))
        try:
            results = self._call(self._leaves, arrays)
        except NotImplementedError as e:
            if "atching rule" not in str(e):
                raise
            raise TypeError(
                "A loaded model can't be mapped by `jax.vmap`: its program is for the "
                "shapes that it was saved with. Write `jax.lax.map(model, xs)`, or "
                "save it with a symbolic batch: `jax.export.symbolic_shape('n, ...')`."
            ) from e
        return decode(self._outputs, results)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise no_attribute(self, name, _HOLDS if name == "apply" else "")

    def __repr__(self) -> str:
        types = ", ".join(map(short, self._types))
        where = "/".join(self.platforms)
        return f"Artifact({types}) for {where}: {self.summary}"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "A loaded model can't be pickled, since its program is compiled here. Hand "
            "on the path of its folder, and its `digest`, and write `load(path, "
            "digest=digest)` where it is to be read."
        )

    # Nothing of it changes. (`copy` would ask `__reduce_ex__`, as `pickle` does.)

    def __copy__(self) -> "Artifact":
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "Artifact":
        return self

    def explain(self) -> str:
        """The precision of each contraction, as a text of one line each."""
        return explained(self.summary)

    def stablehlo(self) -> str:
        """The program as StableHLO."""
        return str(self._exported.mlir_module())

    def _checked(self, inputs: list[Any]) -> list[Any]:
        try:
            given = encode(inputs, _is_array_like, "Inputs")
        except TypeError:
            given = None
        if json.dumps(given) != json.dumps(self._inputs):  # 1 is neither 1.0 nor True
            told = ", ".join(map(outlined, inputs))
            hint = f" {_HOLDS}" * (len(inputs) == len(self._shown) + 1)
            if any(isinstance(x, list) and _is_of_numbers(x) for x in inputs):
                hint = " Make arrays of lists: `np.asarray(x, 'float32')`."
            raise TypeError(
                f"The inputs must be like {self._shown}, but are ({told}).{hint}"
            )
        arrays = [x for x in jax.tree.leaves(inputs) if _is_array_like(x)]
        for i, (x, type_) in enumerate(zip(arrays, self._types, strict=True)):
            _check_input(i, x, type_)
        return arrays

    def _check_platform(self) -> None:
        here = export.default_export_platform()
        if here not in self.platforms:
            raise ArtifactError(
                f"The artifact is for {' and '.join(self.platforms)}, but JAX runs on "
                f"{here} here. Save it with `platforms=['{here}', ...]`."
            )


@showing_call("load(path, digest=digest)")
def load(path: str | Path, *, digest: str | None = None) -> Artifact:
    """Loads a model that `Converted.save` has written.

    All of it is checked before it is used: a byte that was changed is an error. This
    finds damage, but no forgery: whoever can write to the folder can write a whole new
    artifact. If the artifact comes from elsewhere, give the digest that `save`
    returned.

    Without the digest, a program that calls native code is refused, unless JAX itself
    would make the same calls, to LAPACK or to its counterpart on a GPU. So kernels of
    Pallas, factorisations of a symbolic size and forged calls are refused. A forged
    program can still take long, ask for much memory or exploit a fault in XLA.

    Args:
        path: the folder.
        digest: what `save` returned, if the artifact must be that one.
    Returns:
        An `Artifact`, called like the model.
    Raises:
        ArtifactError: there is no artifact, or it is damaged, of a newer format, for
            another platform or not the one of `digest`; or it calls native code.
        ImportError: flatbuffers, of the extra "convert", is not installed.

    >>> import tempfile
    >>> from jaxamp_like import convert
    >>> w, x = jax.numpy.ones((4, 3)), jax.numpy.ones((2, 4))
    >>> low = convert(jax.numpy.dot, w.T, x.T, compute_dtype="bfloat16")
    >>> folder = tempfile.mkdtemp()
    >>> digest = low.save(folder)
    >>> load(folder, digest=digest)(x.T).dtype
    dtype('float32')

    The program is StableHLO as `jax.export` writes it. Later versions of JAX can read
    it for as long as `jax.export` promises."""
    needed("flatbuffers")
    opened = open_folder(path, digest)
    with well_formed(path):
        return Artifact(opened, is_trusted=digest is not None)


def explained(summary: summaries.Summary) -> str:
    """One line for each contraction: what it reads and makes, and where it stands."""
    lines = [
        f"{' x '.join(c.reads)} -> {c.makes}  {c.primitive}"
        f"[{', '.join(c.shape)}]{f' x {c.times}' * (c.times > 1)}  "
        f"{c.scope or '(no scope)'}  {c.line}"
        for c in summary.contractions
    ]
    return "\n".join(lines) or "The program has no contractions."


def _deserialized(
    code: bytes, versions: dict[str, str], is_trusted: bool
) -> export.Exported:
    try:
        exported = export.deserialize(bytearray(code))
        if not is_trusted:
            check_calls(exported)
    except ArtifactError:
        raise
    except Exception as e:
        raise ArtifactError(
            f"JAX {jax.__version__} can't read the program, which JAX "
            f"{versions['jax']} wrote: {printable(str(e))}\nLoad it with a version "
            "nearer to that (one reads what is up to six months older), or save the "
            "model again with this one."
        ) from e
    effects = (*exported.ordered_effects, *exported.unordered_effects)
    if exported.has_vjp() or effects or exported.disabled_safety_checks:
        raise ArtifactError(
            "The artifact's program has a derivative, an effect or a check that is "
            "disabled, which none that `Converted.save` writes has. It is not run."
        )
    return exported


def _check_types(
    exported: export.Exported, leaves: Sequence[Any], inputs: Sequence[Any]
) -> None:
    if len(exported.in_avals) != len(leaves) + len(inputs):
        raise ArtifactError(
            f"The artifact is damaged: its program takes {len(exported.in_avals)} "
            f"arrays, and not {len(leaves)} parameters and {len(inputs)} inputs."
        )
    for aval, leaf in zip(exported.in_avals, leaves, strict=False):
        if (aval.dtype, aval.shape) != (leaf.dtype, leaf.shape):
            raise ArtifactError(
                f"The artifact is damaged: its program takes {aval}, and not a "
                f"parameter that is {in_words(leaf)}."
            )


def _is_array_like(x: Any) -> bool:
    return hasattr(x, "shape") and hasattr(x, "dtype")


def _is_of_numbers(x: Any) -> bool:
    return all(isinstance(leaf, int | float) for leaf in jax.tree.leaves(x))


_HOLDS = "A loaded model holds its parameters: leave them out, `model(x)`."
_NO_DERIVATIVE = (
    "A loaded model has no derivative: its program was saved without one. Take it of "
    "the model that was converted."
)


def _without_derivative(call: Callable[..., Any]) -> Callable[..., Any]:
    """`call`, with an error that says so where a gradient is taken of it."""
    called = jax.custom_vjp(call)

    def refuse(*_: Any) -> NoReturn:
        raise AmpError(_NO_DERIVATIVE)

    called.defvjp(lambda *args: (call(*args), None), refuse)
    return called


def short(type_: dict[str, Any]) -> str:
    """The type of an array as it is shown."""
    return f"{type_['dtype']}[{', '.join(type_['shape'])}]"


def _check_input(i: int, x: Any, type_: dict[str, Any]) -> None:
    dtype = str(canonical_dtype(x.dtype))
    if dtype != type_["dtype"]:
        raise TypeError(
            f"Array {i} of the inputs must be {short(type_)}, but its dtype is {dtype}."
            f" Write `x.astype({type_['dtype']!r})`."
        )
    fits = len(x.shape) == len(type_["shape"]) and all(
        not want.isdigit() or int(want) == size
        for want, size in zip(type_["shape"], x.shape, strict=True)
    )
    if not fits:
        sizes = zip(type_["shape"], map(str, x.shape), strict=False)
        is_batch = [want == size for want, size in sizes] == [False] + [True] * (
            len(x.shape) - 1
        )
        hint = " Give what the model was converted for, or convert it for this shape."
        if is_batch and len(x.shape) == len(type_["shape"]):
            hint = (
                " To take any batch, convert with symbolic shapes: "
                "`jax.export.symbolic_shape('batch, ...')`."
            )
        raise ValueError(
            f"Array {i} of the inputs must be {short(type_)}, but its shape is "
            f"{list(x.shape)}.{hint}"
        )
