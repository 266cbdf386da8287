"""What a program calls that is not StableHLO: checked before anything is compiled.

A custom call hands the addresses of arrays to native code by a name, and such code
trusts that they are as large as JAX makes them. Whoever writes an artifact can write
any name and any sizes. So a call is let through if XLA's own compiler expands it, or if
JAX makes the very same call, in operands, results and options, of such operands."""

import contextlib
import functools
import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax import export, lax
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import mlir

from .folder import ArtifactError
from .printable import printable

# What XLA's compiler expands itself, after checks of its own.
_EXPANDED = frozenset(
    """AllocateBuffer ApproxTopK Eigh LuDecomposition Qr shape_assertion
    ProductOfElementaryHouseholderReflectors stablehlo.dynamic_approx_top_k
    stablehlo.dynamic_reduce_window stablehlo.dynamic_rng_bit_generator
    stablehlo.dynamic_top_k""".split()
)
# What it takes for its first operand, without a look whether that is there.
_HANDED_ON = frozenset("Sharding annotate_device_placement".split())
_RESHARDED = frozenset("SPMDFullToShardShape SPMDShardToFullShape".split())

_DIALECTS = ("builtin.", "chlo.", "func.", "sdy.", "stablehlo.")
_TO_HOST = frozenset(f"stablehlo.{op}" for op in "infeed outfeed recv send".split())

_PLATFORMS = {"lapack": "cpu", "cu": "cuda", "hip": "rocm"}
_LINEAR_ALGEBRA = re.compile(
    r"(lapack|cu|hip)(?:_[sdcz]|solver_|sparse_|_)([a-z_]+?)(?:j|2)?(?:_ffi)?"
)


def _each(fn: Callable[..., Any], *options: str) -> list[Callable[..., Any]]:
    """A function with each combination of flags."""
    flags = itertools.product((True, False), repeat=len(options))
    pairs = (dict(zip(options, values, strict=True)) for values in flags)
    return [functools.partial(fn, **given) for given in pairs]


_linalg = lax.linalg
_MADE_BY: dict[str, list[Callable[..., Any]]] = {
    "potrf": [functools.partial(_linalg.cholesky, symmetrize_input=False)],
    "getrf": [_linalg.lu],
    "geqrf": _each(_linalg.qr, "full_matrices"),
    "orgqr": [_linalg.householder_product],
    "syevd": _each(_linalg.eigh, "lower", "symmetrize_input"),
    "geev": _each(
        _linalg.eig, "compute_left_eigenvectors", "compute_right_eigenvectors"
    ),
    "gesdd": _each(_linalg.svd, "full_matrices", "compute_uv"),
    "sytrd": _each(_linalg.tridiagonal, "lower"),
    "gehrd": [_linalg.hessenberg],
    "gees": _each(_linalg.schur, "compute_schur_vectors"),
    "trsm": _each(
        _linalg.triangular_solve,
        "left_side",
        "lower",
        "transpose_a",
        "conjugate_a",
        "unit_diagonal",
    ),
    "gtsv": [_linalg.tridiagonal_solve],
}
"""Which functions of JAX call a routine of LAPACK, by its name without the dtype."""
_MADE_BY |= {
    "ungqr": _MADE_BY["orgqr"],
    "heevd": _MADE_BY["syevd"],
    "hetrd": _MADE_BY["sytrd"],
    "gesvd": _MADE_BY["gesdd"],
}

_DTYPES = {
    "f32": "float32",
    "f64": "float64",
    "i32": "int32",
    "complex<f32>": "complex64",
    "complex<f64>": "complex128",
}


def check_calls(exported: export.Exported) -> None:
    """Sees to it that a program calls no native code but as JAX does.

    Raises:
        ArtifactError: it calls other code, or talks to the host."""
    with _operations(exported) as ops:
        for op in ops:
            if not op.name.startswith(_DIALECTS) or op.name in _TO_HOST:
                raise ArtifactError(
                    f"The artifact's program holds `{printable(op.name)}`, which none "
                    "that `Converted.save` writes does. It is not run."
                )
            if op.name == "stablehlo.custom_call" and not _is_known(op):
                raise ArtifactError(
                    f"The artifact's program calls native code, {_shown(op)}, and it "
                    "can't be told that JAX would call it so. It is not run, since "
                    "such code can do anything to this process. If you know who saved "
                    "it, give `digest`, what `Converted.save` returned there."
                )


@contextlib.contextmanager
def _operations(exported: export.Exported) -> Iterator[list[Any]]:
    """All operations of a program, at any depth, for as long as their module lives."""
    found: list[Any] = []

    def add(op: Any) -> Any:
        found.append(op)
        return ir.WalkResult.ADVANCE

    code = exported.mlir_module_serialized
    with mlir.make_ir_context() as context:
        module = stablehlo.deserialize_portable_artifact(context, code)
        module.operation.walk(add)
        yield found
        found.clear()


def _is_known(op: Any) -> bool:
    name = _target(op)
    operands, results = ([str(x.type) for x in xs] for xs in (op.operands, op.results))
    if name in _HANDED_ON:
        return len(operands) == 1 and operands == results
    if name in _RESHARDED:
        return len(operands) == len(results) == 1
    is_expanded = name in _EXPANDED or name.startswith(("mhlo.", "xla.sdy."))
    return is_expanded or _is_as_jax_calls(op)


def _is_as_jax_calls(op: Any) -> bool:
    """Whether some function of JAX makes this very call, of operands like its own."""
    match = _LINEAR_ALGEBRA.fullmatch(_target(op))
    operands, results = (
        tuple(_shape(x.type) for x in xs) for xs in (op.operands, op.results)
    )
    if match is None or None in operands + results:
        return False  # of sizes that are not known before the program is called
    library, routine = match.groups()
    signature, functions = _signature(op), _MADE_BY.get(routine, [])
    if routine == "lu_pivots_to_permutation":
        size = results[0].shape[-1] if results and results[0].shape else 0
        functions = [
            functools.partial(_linalg.lu_pivots_to_permutation, permutation_size=size)
        ]
    return any(signature in _calls(fn, library, operands) for fn in functions)


@functools.lru_cache(maxsize=1024)
def _calls(fn: Callable[..., Any], library: str, shapes: Any) -> list[Any]:
    """The signatures of the custom calls that a function of JAX makes."""
    try:
        exported = export.export(jax.jit(fn), platforms=[_PLATFORMS[library]])(*shapes)
    except Exception:  # it doesn't take such operands
        return []
    with _operations(exported) as ops:
        return [_signature(op) for op in ops if op.name == "stablehlo.custom_call"]


def _signature(op: Any) -> tuple[Any, ...]:
    """All that native code is told; attributes for partitioners are no part of it."""
    attributes = {
        x.name: str(x.attr)
        for x in _attributes(op)
        if x.name not in ("mhlo.frontend_attributes", "sdy.sharding_rule")
    }
    types = [[str(x.type) for x in xs] for xs in (op.operands, op.results)]
    return types, attributes


def _attributes(op: Any) -> Iterator[Any]:
    attributes = op.attributes
    return (attributes[i] for i in range(len(attributes)))


def _target(op: Any) -> str:
    return ir.StringAttr(op.attributes["call_target_name"]).value


def _shape(type_: Any) -> jax.ShapeDtypeStruct | None:
    """The shape of an operand, if it is known."""
    match = re.fullmatch(r"tensor<((?:\d+x)*)([^x]+|complex<.*>)>", str(type_))
    dtype = _DTYPES.get(match[2]) if match else None
    if match is None or dtype is None or jax.dtypes.canonicalize_dtype(dtype) != dtype:
        return None
    return jax.ShapeDtypeStruct(tuple(map(int, match[1].split("x")[:-1])), dtype)


def _shown(op: Any) -> str:
    operands, results = (
        ", ".join(str(x.type) for x in xs) for xs in (op.operands, op.results)
    )
    return printable(f"{_target(op)!r} of ({operands}) -> ({results})")
