"""Checks which native code a program calls, before anything is compiled.

A custom call names native code and hands it the addresses of arrays. Such code trusts
that the arrays are as large as JAX makes them. Whoever writes an artifact can write any
name and any sizes. So a call is let through only if XLA's own compiler expands it, or
if JAX, given operands of the same types, makes the very same call: with the same
operands, results and options."""

import functools
import itertools
import re
from collections.abc import Callable
from typing import Any

import jax
from jax import export, lax
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import mlir

from .folder import ArtifactError
from .printable import printable

# XLA's compiler expands these calls itself, after checks of its own, if they have an
# operand. Older versions of StableHLO write some operations as such calls too, with
# names that begin with "mhlo.".
_EXPANDED = frozenset(
    """ApproxTopK shape_assertion stablehlo.dynamic_approx_top_k
    stablehlo.dynamic_reduce_window stablehlo.dynamic_rng_bit_generator
    stablehlo.dynamic_top_k""".split()
)
# XLA replaces these calls by their first operand, without checking that there is one.
_IDENTITIES = frozenset("Sharding annotate_device_placement".split())
_RESHARDED = frozenset("SPMDFullToShardShape SPMDShardToFullShape".split())

_DIALECTS = ("builtin.", "chlo.", "func.", "sdy.", "stablehlo.")
_TO_HOST = frozenset(f"stablehlo.{op}" for op in "infeed outfeed recv send".split())

_PLATFORMS = {"lapack": "cpu", "cu": "cuda", "hip": "rocm", "tpu": "tpu"}
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
    "syevd": _each(_linalg.eigh, "lower", "symmetrize_input", "sort_eigenvalues"),
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
"""The functions of JAX that call a routine of LAPACK, by its name without the dtype."""
_MADE_BY |= {
    "ungqr": _MADE_BY["orgqr"],
    "heevd": _MADE_BY["syevd"],
    "hetrd": _MADE_BY["sytrd"],
    "gesvd": _MADE_BY["gesdd"],
}

_ON_TPU = {
    "Eigh": "syevd",
    "LuDecomposition": "getrf",
    "ProductOfElementaryHouseholderReflectors": "orgqr",
    "Qr": "geqrf",
}

_DTYPES = {
    "f32": "float32",
    "f64": "float64",
    "i32": "int32",
    "complex<f32>": "complex64",
    "complex<f64>": "complex128",
}


def check_calls(exported: export.Exported) -> None:
    """Checks that a program calls native code only as JAX does.

    Raises:
        ArtifactError: it calls other code, or talks to the host."""
    with mlir.make_ir_context() as context:
        module = _parsed(exported.mlir_module_serialized, context)
        for op in _operations(module):
            is_elsewhere = op.name == "func.func" and not list(op.regions[0])
            is_other = not op.name.startswith(_DIALECTS) or op.name in _TO_HOST
            if is_elsewhere or is_other:
                what = f"`{printable(op.name)}`{' without a body' * is_elsewhere}"
                raise ArtifactError(
                    f"The artifact's program holds {what}, which none that "
                    "`Converted.save` writes does. It is not run."
                )
            if op.name == "stablehlo.custom_call" and not _is_known(op):
                raise ArtifactError(
                    f"The artifact's program calls native code, {_shown(op)}, and it "
                    "can't be told that JAX would call it so. It is not run, since "
                    "such code can do anything to this process. If you know who saved "
                    "it, give `digest`, what `Converted.save` returned there."
                )


def _parsed(code: bytes, context: Any) -> Any:
    return stablehlo.deserialize_portable_artifact(context, code)


def _operations(module: Any) -> list[Any]:
    """All operations of a module, at any depth, which live as long as the module."""
    found: list[Any] = []

    def add(op: Any) -> Any:
        found.append(op)
        return ir.WalkResult.ADVANCE

    module.operation.walk(add)
    return found


def _is_known(op: Any) -> bool:
    name = _target(op)
    operands, results = _types(op)
    if name in _IDENTITIES:
        return len(operands) == 1 and operands == results
    if name in _RESHARDED:
        return len(operands) == len(results) == 1
    if name in _EXPANDED or name.startswith("mhlo."):
        return bool(operands)
    return (name == "AllocateBuffer" and not operands) or _is_as_jax_calls(op)


def _is_as_jax_calls(op: Any) -> bool:
    """Whether some function of JAX makes this very call, of operands like its own."""
    library, routine = _routine(_target(op))
    operands, results = (
        tuple(_shape(x.type) for x in xs) for xs in (op.operands, op.results)
    )
    if None in operands + results:
        return False  # a dtype is unknown, or a size until the program is called
    functions = _MADE_BY.get(routine, [])
    if routine == "lu_pivots_to_permutation":
        size = next((x.shape[-1] for x in results if x and x.shape), 0)
        functions = [
            functools.partial(_linalg.lu_pivots_to_permutation, permutation_size=size)
        ]
    for fn in functions:
        code = _program_of(fn, library, operands)
        module = code and _parsed(code, op.context)
        if module and any(_is_same(op, own) for own in _operations(module)):
            return True
    return False


def _routine(target: str) -> tuple[str, str]:
    """The library of a call's target, and the routine of LAPACK that it stands for."""
    if target in _ON_TPU:
        return "tpu", _ON_TPU[target]
    match = _LINEAR_ALGEBRA.fullmatch(target)
    return (match[1], match[2]) if match else ("", "")


@functools.lru_cache(maxsize=1024)
def _program_of(fn: Callable[..., Any], library: str, shapes: Any) -> bytes | None:
    """The program that JAX exports for a function, if it takes operands like these."""
    try:
        exported = export.export(jax.jit(fn), platforms=[_PLATFORMS[library]])(*shapes)
    except Exception:
        return None
    return exported.mlir_module_serialized


# Attributes of a call that only partitioners read.
_NOT_PASSED = ("mhlo.frontend_attributes", "sdy.sharding_rule")


def _is_same(op: Any, own: Any) -> bool:
    """Whether two operations of one context tell native code the same.

    The names of attributes are listed only for JAX's `own` operation; `op` is asked
    whether it has them. To list those of `op` would end the process if one is no
    valid text."""
    if own.name != op.name:
        return False
    names = [own.attributes[i].name for i in range(len(own.attributes))]
    passed = [name for name in names if name not in _NOT_PASSED]
    others = [name for name in _NOT_PASSED if name in op.attributes]
    return (
        _types(op) == _types(own)
        and len(op.attributes) == len(passed) + len(others)
        and all(name in op.attributes for name in passed)
        and all(op.attributes[name] == own.attributes[name] for name in passed)
    )


def _types(op: Any) -> list[list[str]]:
    return [[str(x.type) for x in xs] for xs in (op.operands, op.results)]


def _target(op: Any) -> str:
    return ir.StringAttr(op.attributes["call_target_name"]).value


def _shape(type_: Any) -> jax.ShapeDtypeStruct | None:
    """The shape and dtype of an operand or a result, if JAX knows both."""
    match = re.fullmatch(r"tensor<((?:\d+x)*)([^x]+|complex<.*>)>", str(type_))
    dtype = _DTYPES.get(match[2]) if match else None
    if match is None or dtype is None or jax.dtypes.canonicalize_dtype(dtype) != dtype:
        return None
    return jax.ShapeDtypeStruct(tuple(map(int, match[1].split("x")[:-1])), dtype)


def _shown(op: Any) -> str:
    operands, results = map(", ".join, _types(op))
    return printable(f"{_target(op)!r} of ({operands}) -> ({results})")
