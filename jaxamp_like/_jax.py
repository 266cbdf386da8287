"""The one door to the parts of JAX that are not promised to stay.

Every name below was checked on JAX 0.6.2, 0.8.3, 0.10.2 and 0.12.0. What is used beside
the documented API, and why:

- attributes of equations (`source_info`, `ctx.manager`, `effects`, `replace`) and of
  programs (`replace`): an equation that is bound again must keep its name scopes, its
  source line and the context (compute_on, XLA metadata, abstract mesh) that its author
  gave it, and one that is found to be a solver is marked by a name scope;
- the parameters of structural primitives, where their names changed between versions;
- the class names of references and of symbolic zeros, where they moved, and of the
  tracer of `jet`, which has no public name;
- the traces of tracers (`_trace`, `parent_trace`, `tag`, and of what they trace `val`,
  `batch_dim` and `primal`; the class names `BatchTrace` and `DynamicJaxprTrace`): which
  values a `vmap` around maps. The class names `JVPTrace` and `LinearizeTrace`: whether
  a derivative is taken. A trace's `frame.debug_info.traced_for`: whether `jax.jit`
  traces a program, a loop traces its body ("scan", "fori_loop", "while_body"), the
  body of a loop is traced anew, or up to JAX 0.7 `jax.pmap`
  traces its body, whose axis `get_axis_env` tells (an axis without a name is of the
  class `_TempAxisName`); `trace_ctx.trace` is the trace around;
- the name that JAX gives to the axis of a `pmap` without one (`UNNAMED_PMAP`), which is
  not to be named to users;
- `use_abstract_mesh` (JAX 0.6 does not export it): a cast of what lies in another mesh
  than the context's, as JAX's own `auto_axes` enters it;
- the flag `jax_xla_profile_version` up to JAX 0.7: the one context of a trace that can
  be changed without changing the trace (later, `jax.make_user_context` is for that);
- the flag `jax_hlo_source_file_canonicalization_regex` as a context: what is exported
  must not name the folders that it was made in;
- the flag `jax_remat3` as a context: checkpoints that `amp` makes by itself stand in
  what JAX differentiates, where those of the new kind can't be transposed;
- `jaxpr_as_fun` and `zeros_like_aval` (not documented): zeros that vary over the mesh
  axes that an aval names;
- the rule table of `checkify` (`error_checks`), its `Error` and `checkify_jaxpr`: its
  own rule for `jax.checkpoint` fails for checks of indices in all these versions;
- the rule tables of `jet` and `sparsify`, which lack one for `jax.checkpoint`, and how
  `jet` calls functions with a derivative rule, which `amp` makes: `jet` leaves its own
  trace there (so that `jet` of `jax.nn.relu` fails in all these versions), and
  `set_current_trace` enters it again;
- the `axis_context` of a lowering, which says for how many devices it compiles, that a
  lowering rule is not `cacheable`, and `cached_primitive_lowerings`, a dict that all
  lowering rules of a program share;
- the rule tables of `partial_eval` by which JAX leaves equations out (`dce_rules`), and
  by which a `jax.checkpoint` runs them again (`partial_eval_jaxpr_custom_rules`);
- the set `prim_requires_devices_during_lowering`: `jax.nn.scaled_matmul` partitions
  itself, and needs the devices of a program when it is lowered, which JAX does not
  notice within the lowering of another primitive;
- `all_gather_invariant`, before `all_gather` itself could say that all devices have the
  same result;
- `backends_are_initialized`: whether a program has computed anything, which must not
  start a device only to ask;
- `eval_jaxpr_p`, since JAX 0.12: what hi-primitives expand to, for those two tables;
- the flag `jax_compilation_cache_include_metadata_in_key` as a context: otherwise JAX's
  cache of compiled programs gives one with the names of another function's equations;
- `mlir_module_to_xla_computation` and `HloPrintOptions` of jaxlib, of which
  `Lowered.as_text` is made: it reads MLIR's module, which has to be read before XLA
  compiles that in another thread.

What is private about hi-primitives is in `_hi_primitives`, what is private about name
stacks in `_name_stacks`, and what is done with operations of MLIR in `_merged_reads`.
"""

import contextlib
import functools
import inspect
import io
import itertools
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

import jax
import jax.core
import jax.extend.core as jex
import jax.extend.source_info_util as source_info
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import jaxpr_as_fun
from jax.interpreters import ad, batching, mlir, partial_eval
from jax.interpreters.ad import Zero, zeros_like_aval
from jax.lax import reduce_precision_p
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ._hi_primitives import (
    bind,
    describe,
    from_classic,
    from_classic_eqn,
    hi_params,
    is_hi,
    is_hi_type,
    is_opaque_hi,
    to_classic,
)
from ._merged_reads import CAN_MERGE, Reads
from ._name_stacks import (
    as_recomputed,
    in_scope,
    names,
    scope_frames,
    scopes,
    with_frames,
    without_scopes,
)
from ._programs import (
    Eqn,
    Jaxpr,
    closed,
    is_jaxpr,
    jaxprs_in,
    raw,
    with_eqns,
    with_jaxprs,
)

try:
    from jax.sharding import use_abstract_mesh as _use_abstract_mesh
except ImportError:  # JAX 0.6
    from jax._src.mesh import (  # pyright: ignore[reportMissingImports]
        use_abstract_mesh as _use_abstract_mesh,
    )

from jax._src import lib as _lib
from jax._src.config import (
    compilation_cache_include_metadata_in_key as _names_in_cache,
    # A regular expression: what it matches of the name of a source file is left out.
    hlo_source_file_canonicalization_regex as _left_out,
)

# Primitives whose lowering asks on which devices a program will run.
from jax._src.dispatch import prim_requires_devices_during_lowering as _needs_devices

Atom = Any  # a variable or a literal
Literal = jex.Literal
Primitive = jex.Primitive

# For other modules.
__all__ = [
    "SymbolicZero",
    "Zero",
    "as_recomputed",
    "bind",
    "closed",
    "describe",
    "in_scope",
    "is_hi_type",
    "is_jaxpr",
    "is_opaque_hi",
    "jaxpr_as_fun",
    "names",
    "raw",
    "scope_frames",
    "scopes",
    "to_classic",
    "with_eqns",
    "with_frames",
    "with_jaxprs",
    "without_scopes",
    "zeros_like_aval",
]


def consts(jaxpr: Jaxpr) -> Sequence[Any]:
    """The constants of a closed jaxpr; none of an open one's are known."""
    return getattr(jaxpr, "consts", ())


def variables(atoms: Iterable[Atom]) -> list[Any]:
    """Those of some atoms that are no literals."""
    return [atom for atom in atoms if not isinstance(atom, Literal)]


def is_copy(primitive: Primitive, known: Primitive) -> bool:
    """Whether a primitive of the name of one of JAX's has its implementation, too."""
    impls = [getattr(p.impl, "func", p.impl) for p in (primitive, known)]
    return impls[0] is impls[1]


def subjaxprs(params: dict[str, Any]) -> Iterator[Jaxpr]:
    """The jaxprs among an equation's parameters."""
    return jaxprs_in(hi_params(params))


def equations(jaxpr: Jaxpr) -> Iterator[Eqn]:
    """The equations of a program, at any depth."""
    for eqn in raw(jaxpr).eqns:
        yield eqn
        for inner in subjaxprs(eqn.params):
            yield from equations(inner)


def holds(jaxpr: Jaxpr, primitive: Primitive) -> bool:
    """Whether an equation of a program, at any depth, is one of `primitive`."""
    return any(eqn.primitive is primitive for eqn in equations(jaxpr))


def typeof(x: Any) -> Any:
    """The aval of a value (`jax.typeof` has a type without dtype and shape)."""
    return jax.typeof(x)


def varying_axes(x: Any) -> frozenset[Any]:
    """The named axes of a `shard_map` along which `x` is known to differ.

    None are known with `check_vma=False`, nor of a `pmap`."""
    return varying_in(jax.typeof(x))


def varying_in(aval: Any) -> frozenset[Any]:
    """The same of a type; none of a type that is no array's."""
    if not is_array_aval(aval):
        return frozenset()
    if hasattr(aval, "mat"):
        return aval.mat.varying
    return getattr(aval, "vma", frozenset())  # JAX < 0.10


def collective_axes(params: dict[str, Any]) -> frozenset[Any]:
    """The axes of a collective: names, or positions where `jax.vmap` was inside."""
    axes = params.get("axes", params.get("axis_name", ()))
    return frozenset(axes if isinstance(axes, tuple | list) else (axes,))


UNNAMED_PMAP = "_internal_pmap_axis_name"
"""The axis of a `pmap` without a name, where JAX makes a `shard_map` of it."""


def device_axes(eqn: Eqn | None = None) -> frozenset[Any]:
    """The axes of devices that a mapped program may name: of `eqn`, or around here."""
    if eqn is None:
        return frozenset(jax.sharding.get_abstract_mesh().manual_axes) | _of_pmap()
    if eqn.primitive.name == "xla_pmap":
        return frozenset([eqn.params["axis_name"]])
    return frozenset(_manual_axes(eqn.params) or ())


def _of_pmap() -> frozenset[Any]:
    """The named axis of a `pmap` whose body is traced here.

    Up to JAX 0.7, no `shard_map` is made of it."""
    from jax._src.core import get_axis_env, trace_ctx

    if _traced_for(trace_ctx.trace) != "pmap":
        return frozenset()
    axes = get_axis_env().axis_sizes
    return frozenset(axis for axis in axes if type(axis).__name__ != "_TempAxisName")


def _manual_axes(params: dict[str, Any]) -> Any:
    # `manual_axes` is called `newly_manual_axes` since JAX 0.10.
    return params.get("newly_manual_axes", params.get("manual_axes"))


COND_FORWARDS_INPUTS = jax.__version_info__ >= (0, 12)
"""Whether the backward pass of a `cond` reads inputs of the forward pass themselves."""


def varying_over(x: Any, axes: Sequence[str]) -> Any:
    """`x`, marked as varying over `axes`, where it is not already."""
    missing = tuple(axis for axis in axes if axis not in varying_axes(x))
    if not missing:
        return x
    if hasattr(jax.lax, "pcast"):
        return jax.lax.pcast(x, missing, to="varying")
    # JAX < 0.8.
    return jax.lax.pvary(x, missing)  # pyright: ignore


def gathered_alike(x: Any, axes: tuple[Any, ...]) -> Any:
    """The rows of all devices, with a type that says that all devices have the same.

    In older versions of JAX `lax.all_gather` can't say so."""
    if not {*axes} <= varying_axes(x):
        return jax.lax.all_gather(x, axes, tiled=True)
    if "to" in inspect.signature(jax.lax.all_gather).parameters:
        return jax.lax.all_gather(x, axes, tiled=True, to="invarying")
    from jax._src.lax.parallel import all_gather_invariant

    return all_gather_invariant(x, axes, tiled=True)


def is_on_mesh(aval: Any) -> bool:
    """Whether an array is laid over several devices, as far as its type tells.

    Along an `Explicit` axis of the mesh the type says if it is split; along an `Auto`
    one XLA decides. Inside of a `shard_map` an array is one device's own."""
    sharding = getattr(aval, "sharding", None)
    mesh = getattr(sharding, "mesh", None)
    if mesh is None or mesh.empty:
        return False
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    named = {
        axis
        for part in _parts(sharding.spec)  # pyright: ignore
        if part is not None
        for axis in (part if isinstance(part, tuple) else (part,))
    }
    return aval.ndim > 0 and any(
        mesh.shape[axis] > 1
        and (kind == AxisType.Auto or (kind == AxisType.Explicit and axis in named))
        for axis, kind in kinds.items()
    )


def is_pending_sum(aval: Any) -> bool:
    """Whether a sum over devices, of it or of its cotangents, is still to be made."""
    spec = getattr(getattr(aval, "sharding", None), "spec", None)
    return bool(getattr(spec, "unreduced", None) or getattr(spec, "reduced", None))


def _parts(spec: PartitionSpec) -> tuple[Any, ...]:
    """The axes of the mesh that each dimension is split along.

    A spec that also has unreduced axes can't be iterated."""
    return spec.partitions if hasattr(spec, "partitions") else tuple(spec)


def is_explicitly_sharded(aval: Any) -> bool:
    """Whether an array is split along an `Explicit` axis of a mesh."""
    sharding = getattr(aval, "sharding", None)
    return sharding is not None and any(_parts(sharding.spec))


def explicit_axes(aval: Any) -> frozenset[str]:
    """The `Explicit` axes of the mesh in the type of an array, split or not."""
    sharding = getattr(aval, "sharding", None)
    mesh = None if sharding is None else sharding.mesh
    if mesh is None or mesh.empty:
        return frozenset()
    pairs = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return frozenset(name for name, kind in pairs if kind == AxisType.Explicit)


def has_auto_axes() -> bool:
    """Whether `in_auto_axes` can be used: what JAX 0.6 has fails in loops."""
    return hasattr(jax.sharding, "auto_axes")


def in_auto_axes(fn: Callable[..., Any], axes: frozenset[str], out: Any) -> Any:
    """`fn`, within which some axes of the mesh are Auto, so that XLA shards.

    Args:
        fn: returns one array.
        axes: names of axes that are Explicit outside.
        out: the type of the result outside."""
    names = tuple(sorted(axes))
    return jax.sharding.auto_axes(fn, axes=names, out_sharding=out.sharding)


def sharded_like(x: Any, other: Any) -> Any:
    """`x`, which multiplies `other`, sharded along `Explicit` axes as `other` is.

    The product is then sharded as `other`, too. Axes of length 1 are not split."""
    now, sharding = jax.typeof(x).sharding, jax.typeof(other).sharding
    if not any((*_parts(now.spec), *_parts(sharding.spec))):
        return x
    lengths = zip(_parts(sharding.spec), x.shape, strict=True)
    spec = PartitionSpec(*(None if n == 1 else part for part, n in lengths))
    if _parts(spec) == _parts(now.spec):
        return x
    mesh = now.mesh if sharding.mesh.empty else sharding.mesh
    return _reshard(x, NamedSharding(mesh, spec))


def whole(x: Any) -> Any:
    """`x`, gathered along the `Explicit` axes that it is sharded along."""
    sharding = jax.typeof(x).sharding
    if not any(_parts(sharding.spec)):
        return x
    return _reshard(x, NamedSharding(sharding.mesh, PartitionSpec(*(None,) * x.ndim)))


def _reshard(x: Any, sharding: NamedSharding) -> Any:
    if hasattr(jax.sharding, "reshard"):
        return jax.sharding.reshard(x, sharding)
    # JAX < 0.7.
    from jax.experimental.shard import reshard  # pyright: ignore

    return reshard(x, sharding)


def on_mesh_of(x: Any) -> contextlib.AbstractContextManager[Any]:
    """A context with the mesh of the type of `x`, for what is bound on `x` alone.

    What enters or leaves `jax.sharding.auto_axes` is read in the context of one mesh
    and has the type of another: the same devices, along axes of another kind."""
    sharding = getattr(jax.typeof(x), "sharding", None)
    mesh = None if sharding is None else sharding.mesh
    here = jax.sharding.get_abstract_mesh()
    if mesh is None or mesh.empty or here.empty or mesh == here:
        return contextlib.nullcontext()
    if {*mesh.axis_types, *here.axis_types} == {AxisType.Auto}:
        return contextlib.nullcontext()
    return _use_abstract_mesh(mesh)


def is_split(sharding: Any) -> bool:
    """Whether a sharding that the user gave puts parts on several devices."""
    given = isinstance(sharding, jax.sharding.Sharding)
    return given and not sharding.is_fully_replicated


def has_computed() -> bool:
    """Whether JAX has started a device in this process."""
    from jax._src.xla_bridge import backends_are_initialized

    return backends_are_initialized()


def is_tracer(x: Any) -> bool:
    return isinstance(x, jax.core.Tracer)


def is_array_aval(aval: Any) -> bool:
    """Whether `aval` is a plain array's: not that of a reference, a token or a key."""
    return type(aval) is jax.core.ShapedArray


def is_inexact(aval: Any) -> bool:
    """Whether it is the aval of an array, not of a reference, that has a derivative.

    One extended dtype has derivatives, too: Flax's dtype of float8 scales, whose
    cotangents are "added" by taking the larger."""
    if not is_array_aval(aval):
        return False
    if jnp.issubdtype(aval.dtype, jax.dtypes.extended):
        return aval.to_tangent_aval().dtype != jax.dtypes.float0
    return jnp.issubdtype(aval.dtype, jnp.inexact)


def empty_aval(shape: tuple[int, ...], dtype: Any) -> Any:
    """The aval of an array that is the same on all devices."""
    return jax.core.ShapedArray(shape, dtype)


def trace(fn: Callable[..., Any], avals: Sequence[Any]) -> Jaxpr:
    """Traces `fn`, which takes and returns flat lists, to a closed jaxpr.

    `jax.make_jaxpr` and not `jax.jit(fn).trace`: the latter turns tracers that `fn`
    closes over into hidden leading arguments."""
    return jax.make_jaxpr(fn)(*avals)


def result_aval(fn: Callable[..., Any], avals: Sequence[Any]) -> Any:
    """The aval of the one result of `fn`, which takes operands of some avals."""
    return raw(trace(fn, avals)).outvars[0].aval


def variables_read(jaxpr: Jaxpr) -> set[Any]:
    """The variables that the results of a program, or its effects, depend on."""
    inner = raw(jaxpr)
    read = set(variables(inner.outvars))
    for eqn in reversed(inner.eqns):
        if eqn.effects or not read.isdisjoint(eqn.outvars):
            read.update(variables(eqn.invars))
    return read


def eqns_read(jaxpr: Jaxpr) -> list[Eqn]:
    """The equations that the results of a program depend on, and those with effects."""
    read = variables_read(jaxpr)
    eqns = raw(jaxpr).eqns
    return [eqn for eqn in eqns if eqn.effects or not read.isdisjoint(eqn.outvars)]


def run_jaxpr(jaxpr: Jaxpr, args: Sequence[Any]) -> list[Any]:
    """Evaluates a closed jaxpr."""
    return jax.core.eval_jaxpr(raw(from_classic(jaxpr)), consts(jaxpr), *args)


def evaluate(
    jaxpr: Jaxpr,
    args: Sequence[Any],
    bind: Callable[[Eqn, list[Any]], Sequence[Any]],
    constants: Sequence[Any] | None = None,
    literal: Callable[[Literal], Any] = lambda atom: atom.val,
) -> list[Any]:
    """Evaluates a jaxpr, on arrays or on whatever stands for them.

    Args:
        args: what stands for its inputs.
        bind: gives the results of an equation, by what stands for its operands.
        constants: what stands for its constants; if not given, these themselves.
        literal: gives what stands for a literal; if not given, its value."""
    inner = raw(jaxpr)
    constants = consts(jaxpr) if constants is None else constants
    env = dict(zip(inner.constvars, constants, strict=True))
    env |= zip(inner.invars, args, strict=True)

    def read(atom: Any) -> Any:
        return literal(atom) if isinstance(atom, Literal) else env[atom]

    for eqn in inner.eqns:
        outs = bind(eqn, list(map(read, eqn.invars)))
        env |= zip(eqn.outvars, outs, strict=True)
    return list(map(read, inner.outvars))


def open_jaxpr(jaxpr: Jaxpr) -> tuple[Jaxpr, Sequence[Any]]:
    """Splits a freshly traced jaxpr into one without constants, and its constants.

    Some primitives (remat) hold an open jaxpr and have no room for constants: these
    become leading inputs."""
    values = list(consts(jaxpr))
    if not values:
        return raw(jaxpr), values
    avals = [*map(jax.typeof, values), *(v.aval for v in raw(jaxpr).invars)]

    def opened(*args):
        n = len(values)
        return jax.core.eval_jaxpr(raw(jaxpr), args[:n], *args[n:])

    return raw(trace(opened, avals)), values


# Of each primitive of `amp`, the function whose Taylor series `jet` takes.
_SERIES: dict[Primitive, Callable[..., Any]] = {}


def _examples_first(args: Any, dims: Any) -> list[Any]:
    """Operands whose examples lie along the first axis, also if they share a value."""
    (size,) = {x.shape[i] for x, i in zip(args, dims, strict=True) if i is not None}
    return [
        jnp.broadcast_to(x, (size, *x.shape)) if i is None else jnp.moveaxis(x, i, 0)
        for x, i in zip(args, dims, strict=True)
    ]


def new_primitive(
    name: str,
    *,
    compute: Callable[..., Any],
    aval: Callable[..., Any],
    jvp: Callable[..., Any],
    transpose: Callable[..., Any],
    batch: Callable[..., Any] | None = None,
    on: Mapping[str, Callable[..., Any]] = MappingProxyType({}),
    needs_devices: bool = False,
    series: Callable[..., Any] | None = None,
) -> Primitive:
    """A primitive with one result, which `compute` computes.

    On a platform that is a key of `on`, such as "tpu", the function there does; it
    `needs_devices` if it calls one of JAX's that partitions itself. Its Taylor series
    is that of `series`, or else of `compute`. Without `batch`, the examples of a `vmap`
    lie along the first axis of all operands and of the result. For what no composition
    of JAX's own primitives can express; `jax.interpreters` is where JAX's guide to
    writing primitives sends one."""
    primitive = jex.Primitive(name)

    def examples_first(args: Any, dims: Any, **params: Any) -> tuple[Any, int]:
        return primitive.bind(*_examples_first(args, dims), **params), 0

    primitive.def_impl(compute)
    primitive.def_abstract_eval(aval)
    ad.primitive_jvps[primitive] = jvp
    ad.primitive_transposes[primitive] = transpose
    batching.primitive_batchers[primitive] = batch or examples_first
    _SERIES[primitive] = series or compute
    mlir.register_lowering(primitive, mlir.lower_fun(compute, multiple_results=False))
    for platform, compute in on.items():
        lowering = mlir.lower_fun(compute, multiple_results=False)
        mlir.register_lowering(primitive, lowering, platform=platform)
    if needs_devices:
        _needs_devices.add(primitive)
    return primitive


def new_identity(name: str, **rules: Any) -> Primitive:
    """A primitive whose result is its first operand, which others may stand beside.

    `rules` are those of `new_primitive`. It may have parameters, which change nothing
    unless a rule reads them."""
    primitive = new_primitive(
        name,
        **{"compute": lambda x, *_, **__: x, **rules},
        aval=lambda x, *_, **__: x,
        batch=lambda args, dims, **params: (primitive.bind(*args, **params), dims[0]),
    )
    return primitive


def new_note(name: str) -> Primitive:
    """A primitive without results, which stays in the program all the same.

    It tells of its operand, and its parameters, to what reads the program. It has no
    lowering yet: that is where it is read."""

    def again(args: Any, others: Any, **params: Any) -> tuple[list[Any], list[Any]]:
        primitive.bind(*args, **params)
        return [], []

    primitive = jex.Primitive(name)
    primitive.multiple_results = True
    primitive.def_impl(lambda x, **_: [])
    primitive.def_abstract_eval(lambda x, **_: [])
    ad.primitive_jvps[primitive] = again
    ad.primitive_transposes[primitive] = lambda cts, x, **_: [None]
    batching.primitive_batchers[primitive] = again
    partial_eval.partial_eval_jaxpr_custom_rules[primitive] = _run_once
    # What it is given beside the equation depends on the version of JAX.
    partial_eval.dce_rules[primitive] = lambda *given: ([True], given[-1])
    _SERIES[primitive] = lambda x, **_: []
    return primitive


def _run_once(
    saveable: Any, unknown: Sequence[bool], instantiated: Sequence[bool], eqn: Eqn
) -> Any:
    """Has a `jax.checkpoint` not run a note again, for which it would keep a value."""
    del saveable
    if not any(unknown):
        return eqn, None, [], [], []
    pairs = zip(eqn.invars, instantiated, strict=True)
    return None, eqn, [], [], variables([v for v, is_there in pairs if not is_there])


def merging_reads(note: Primitive, cotangent: Primitive) -> None:
    """Has a program that is lowered for several devices merge the reads of a value.

    An equation of `note` says whose reads these are, and one of `cotangent`, which is
    an identity and has the same `tag`, that all of them are there. JAX lowers most
    equations once for all that are alike, in a function of their own, where other
    readers of a value don't show: these are lowered where they stand."""

    def noting(ctx: Any, x: Any, *, tag: Any) -> list[Any]:
        if (reads := _reads_of(ctx)) is not None:
            reads.note(tag, x)
        return []

    def merging(ctx: Any, ct: Any, *, tag: Any) -> list[Any]:
        if (reads := _reads_of(ctx)) is not None:
            reads.merge(tag)
        return [ct]

    may_share = "cacheable" in inspect.signature(mlir.register_lowering).parameters
    options: dict[str, Any] = {"cacheable": False} if may_share else {}
    mlir.register_lowering(note, noting, **options)
    mlir.register_lowering(cotangent, merging, **options)


def _reads_of(ctx: Any) -> Reads | None:
    """The reads in a program, if it is lowered for several devices."""
    context = ctx.module_context
    if not CAN_MERGE or (getattr(context.axis_context, "num_devices", None) or 1) == 1:
        return None
    shared = context.cached_primitive_lowerings
    if Reads not in shared:
        shared[Reads] = Reads()
    return shared[Reads]


def recomputed_as(
    primitive: Primitive, other: Primitive, operands: Sequence[int]
) -> None:
    """Has a `jax.checkpoint` run `other` again where its code holds `primitive`.

    `other` is given the parameters of `primitive` and the named ones of its `operands`:
    the rest of them are not kept for it."""

    def rule(saveable, unknown, instantiated, eqn):
        del saveable
        atoms = [*zip(eqn.invars, unknown, instantiated, strict=True)]
        if any(unknown):  # all of it is run in the backward pass alone
            kept = [v for v, is_unknown, is_there in atoms if not is_there]
            return None, eqn, [True], [True], variables(kept)
        some = [atoms[i] for i in operands]
        again = eqn.replace(primitive=other, invars=[v for v, *_ in some])
        kept = [v for v, _, is_there in some if not is_there]
        return eqn, again, [False], [True], variables(kept)

    partial_eval.partial_eval_jaxpr_custom_rules[primitive] = rule


def are_partly_mapped(values: Sequence[Any]) -> bool:
    """Whether the examples of a `jax.vmap` share some of the values that it is given.

    Only floats that are differentiated outside of the `vmap` count: their cotangents
    are sums over the examples."""
    chains = [(_traces(x), is_inexact(typeof(x))) for x in values if is_tracer(x)]
    mapped = {_tag(t) for traces, _ in chains for t in traces if _is_of_vmap(t)}
    return any(
        has_cotangents and _is_shared(traces, tag)
        for traces, has_cotangents in chains
        for tag in mapped
    )


def are_differentiated_again(values: Sequence[Any]) -> bool:
    """Whether derivatives of derivatives are taken of some values, as far as it shows.

    A Taylor series counts as such. What stands in a `jit` doesn't show what is done to
    the `jit` itself."""
    for x in filter(is_tracer, values):
        found = {_tag(t): type(t).__name__ for t in _traces(x)}
        names = list(found.values())
        if "JetTrace" in names or sum(map(names.count, _DIFFERENTIATING)) > 1:
            return True
    return False


_DIFFERENTIATING = ("JVPTrace", "LinearizeTrace")


def is_differentiated(x: Any) -> bool:
    """Whether a derivative by a value is being taken, as far as it shows."""
    return any(type(trace).__name__ in _DIFFERENTIATING for trace in _traces(x))


_PROGRAMS = ("jit", "scan", "fori_loop", "while_body", "cond")


def has_backward_pass(x: Any) -> bool:
    """Whether what `jit` traces, or a loop in that, has a backward pass by a value.

    A program that JAX transposes as a whole is none, such as that of a linear solve.
    JAX 0.6 does not show whether a tangent will be transposed: there, none is."""
    traces = _traces(x)
    is_linearized = any(type(trace).__name__ == "LinearizeTrace" for trace in traces)
    return is_linearized and _traced_for(traces[-1]) in _PROGRAMS


def is_jitted(x: Any) -> bool:
    """Whether a value belongs to a program that `jax.jit` is tracing.

    What the bodies of loops close over may be other values at each call, and what a
    `jit` closes over is the same for good."""
    traces = [each for trace in _traces(x) for each in (trace, *_around(trace))]
    return "jit" in map(_traced_for, traces)


def is_exported_in_full(eqn: Eqn) -> bool:
    """Whether a program of `jax.export` has contractions, and nothing in 16 bits."""
    text = eqn.params["exported"].mlir_module()
    contracts = "stablehlo.dot_general" in text or "stablehlo.convolution" in text
    return contracts and "f16>" not in text  # nor "bf16>"


def is_partly_manual_on_cpu(aval: Any) -> bool:
    """Whether an array is in a `shard_map` over some axes of a mesh of CPUs.

    The other axes are left to the compiler. XLA for CPUs then aborts at a sum over
    devices of 16 bits (checked on JAX 0.10.2 and 0.12.0)."""
    mesh = getattr(getattr(aval, "sharding", None), "mesh", None)
    kinds = {*(getattr(mesh, "axis_types", None) or ())}
    if AxisType.Manual not in kinds or len(kinds) == 1:
        return False
    return (getattr(mesh, "platform", None) or jax.default_backend()) == "cpu"


def is_closed_over_by_loop(x: Any, inside: Sequence[Any]) -> bool:
    """Whether a value comes from outside of a loop whose body others belong to."""
    outside = {id(t) for trace in _traces(x) for t in (trace, *_around(trace))}
    traces = {id(t): t for value in inside for t in _traces(value)}
    between = (t for i, t in traces.items() if i not in outside)
    return any(_traced_for(t) in ("scan", "fori_loop", "while_body") for t in between)


def _traced_for(trace: Any) -> str | None:
    """What a transformation traces a program for, such as "jit" or "scan"."""
    frame = getattr(trace, "frame", None)
    return getattr(getattr(frame, "debug_info", None), "traced_for", None)


def are_differentiated(values: Sequence[Any]) -> bool:
    """Whether a derivative is taken by some values, as far as it shows."""
    traces = [t for x in values if is_tracer(x) for t in _traces(x)]
    return any(type(t).__name__ in _DIFFERENTIATING for t in traces)


def _is_shared(traces: Sequence[Any], tag: int) -> bool:
    """Whether a value comes from outside of a `vmap`, which does not map it.

    If it is differentiated inside of the `vmap`, and outside is only traced to a jaxpr,
    it doesn't count: its cotangents are no sums over the examples."""
    if any(_tag(trace) == tag for trace in traces):
        return False
    outside = [t for t in traces if all(_tag(other) != tag for other in _around(t))]
    if len(outside) == len(traces):
        return bool(outside)
    return any(type(trace).__name__ != "DynamicJaxprTrace" for trace in outside)


def _traces(x: Any) -> list[Any]:
    """The transformations that trace a value, the innermost first.

    A `vmap` that knows the value and does not map it is left out."""
    found = []
    while is_tracer(x):
        is_of_vmap = _is_of_vmap(x._trace)
        if not is_of_vmap or x.batch_dim is not None:
            found.append(x._trace)
        x = getattr(x, "val" if is_of_vmap else "primal", None)
    return found


def _around(trace: Any) -> Iterator[Any]:
    """The transformations that a transformation stands in."""
    while (trace := getattr(trace, "parent_trace", None)) is not None:
        yield trace


def _is_of_vmap(trace: Any) -> bool:
    return type(trace).__name__ == "BatchTrace"


def _tag(trace: Any) -> int:
    """What is the same for all objects that stand for one transformation.

    Tags are compared by identity: to `==`, all of them are equal."""
    tag = getattr(trace, "tag", None)
    return id(trace if tag is None else tag)


def is_jet_tracer(x: Any) -> bool:
    """Whether `jax.experimental.jet` is taking a Taylor series of what is computed.

    Its tracer has no public name."""
    return type(x).__name__ == "JetTracer"


def hands_on_what_is_unread() -> bool:
    """Whether `jax.vjp` may return residuals that the backward pass does not read.

    JAX removes those, but where a `custom_jvp` function is a hi-primitive (checked on
    JAX 0.12): it hands a residual on whose derivative is zero."""
    return getattr(jax.config, "jax_custom_jvp3", False)


def tangent_aval(x: Any) -> Any:
    """The aval of an array's tangents: of float0 if its numbers have no derivative."""
    return jax.typeof(x).to_tangent_aval()


def is_linear_operand(x: Any) -> bool:
    """Whether `x` is an operand whose cotangent a transpose rule is to compute."""
    return ad.is_undefined_primal(x)


def replace_subjaxprs(eqn: Eqn, new: dict[int, Jaxpr]) -> Eqn:
    """`eqn` with other programs, by the `id` of those that they take the place of."""

    def replaced(value: Any) -> Any:
        if isinstance(value, tuple | list) and not hasattr(value, "_fields"):
            return type(value)(map(replaced, value))
        return new.get(id(value), value)

    params = {name: replaced(value) for name, value in eqn.params.items()}
    return eqn.replace(params=params)


def checkpoint(fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """`jax.checkpoint` of the classic kind, whichever the user's flags ask for."""
    with _without_remat3():  # JAX 0.10 asks for the flag here, JAX 0.12 below
        marked = jax.checkpoint(fn, **options)

    def run(*args: Any) -> Any:
        with _without_remat3():
            return marked(*args)

    return run


def _without_remat3() -> contextlib.AbstractContextManager[Any]:
    try:
        from jax._src.config import remat3  # pyright: ignore[reportAttributeAccessIssue]
    except ImportError:  # JAX without the flag
        return contextlib.nullcontext()
    return remat3(False)


@functools.cache
def _grouping_primitives() -> tuple[Primitive, ...]:
    """`jax.checkpoint`, and what hi-primitives expand to."""
    # JAX exports the first since 0.8; it has the second, without a public name, since
    # 0.12, where `custom_jvp` is a hi-primitive under a flag.
    from jax._src import core

    first = raw(jax.make_jaxpr(checkpoint(lambda: ()))()).eqns[0].primitive
    second = getattr(core, "eval_jaxpr_p", None)
    return (first,) if second is None else (first, second)


def register_rules_of_transforms() -> None:
    """Gives `jet`, `sparsify` and `checkify` rules for what `amp` makes, if in use.

    `amp` makes checkpoints where its user made none. For `jet` and `sparsify` they mean
    nothing: what is inside is gone through as if it stood there; in `jet` the same
    holds of functions with a derivative rule. Roundings are linear to `jet`, as to
    `jvp`. The rule that `checkify` has for checkpoints of the classic kind fails if its
    checks hold a constant, as those of a lookup do. It is replaced for all of them."""
    if "jax.experimental.checkify" in sys.modules:
        from jax._src.checkify import error_checks

        (primitive, *_) = _grouping_primitives()
        error_checks[primitive] = functools.partial(_checked_checkpoint, primitive)
    jet = sys.modules.get("jax.experimental.jet")
    if jet is not None:
        if reduce_precision_p not in jet.jet_rules:
            jet.deflinear(reduce_precision_p)
        calls = dict.fromkeys(_grouping_primitives(), _run_call)
        for primitive, fn in (_SERIES | calls).items():
            jet.jet_rules.setdefault(primitive, functools.partial(_jet_of, fn))
        jet.JetTrace.process_custom_jvp_call = _jet_of_custom_jvp
    sparse = sys.modules.get("jax.experimental.sparse.transform")
    if sparse is not None:
        for rules in (sparse.sparse_rules_bcoo, sparse.sparse_rules_bcsr):
            for primitive in _grouping_primitives():
                rules.setdefault(primitive, _sparse_call)


def _jet_of(fn: Any, primals: Any, series: Any, **params: Any) -> Any:
    from jax.experimental import jet

    fn = functools.partial(fn, **params)
    return jet.jet(fn, primals, series, factorial_scaled=False)


def _run_call(*args: Any, **params: Any) -> list[Any]:
    (jaxpr,) = subjaxprs(params)
    return run_jaxpr(jaxpr, args)


def _jet_of_custom_jvp(
    self: Any, primitive: Primitive, fun: Any, jvp: Any, tracers: Any, **_: Any
) -> Any:
    from jax._src.core import set_current_trace

    del primitive, jvp  # Taylor series are those of the function, as in JAX
    with set_current_trace(self):
        return fun.call_wrapped(*tracers)


def _checked_checkpoint(
    primitive: Primitive, *args: Any, jaxpr: Jaxpr, **params: Any
) -> Any:
    from jax._src.checkify import Error, checkify_jaxpr

    # Since JAX 0.12 a context comes first.
    at = next(i for i, x in enumerate(args) if isinstance(x, Error))
    context, (error, enabled, *values) = args[:at], args[at:]
    leaves, tree = jax.tree.flatten(error)
    result = []

    def run(*xs: Any) -> list[Any]:
        error = jax.tree.unflatten(tree, xs[: len(leaves)])
        checked = checkify_jaxpr(
            *context, closed(jaxpr, ()), enabled, error, *xs[len(leaves) :]
        )
        outs, out_tree = jax.tree.flatten(checked)
        result.append(out_tree)
        return outs

    operands = [*leaves, *values]
    program, constants = open_jaxpr(trace(run, list(map(jax.typeof, operands))))
    if isinstance(prevented := params.get("prevent_cse"), tuple):  # one an operand
        new = len(constants) + len(leaves)
        params["prevent_cse"] = (False,) * new + prevented
    outs = primitive.bind(*constants, *operands, jaxpr=program, **params)
    return jax.tree.unflatten(result[0], outs)


def _sparse_call(env: Any, *values: Any, **params: Any) -> Any:
    from jax.experimental.sparse import transform

    (jaxpr,) = subjaxprs(params)
    return transform.eval_sparse(raw(jaxpr), consts(jaxpr), values, env)


@contextlib.contextmanager
def eqn_context(eqn: Eqn) -> Iterator[None]:
    """Binds under the name scopes, the source line and the context of `eqn`."""
    info = eqn.source_info
    stack = source_info.current_name_stack() + info.name_stack
    with source_info.user_context(info.traceback, name_stack=stack), eqn.ctx.manager:
        yield


class EqnContext:
    """Where an equation stands: its lines, name scopes and context, to be compared."""

    def __init__(self, eqn: Eqn):
        self._info, self._context = eqn.source_info, eqn.ctx

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, EqnContext)
            and self._info.name_stack == other._info.name_stack
            and self._info.traceback == other._info.traceback
            and _are_equal(self._context, other._context)
        )

    def __hash__(self) -> int:
        return hash(self._info.name_stack)  # equal tracebacks may have other hashes


def _are_equal(context: Any, other: Any) -> bool:
    """Whether two contexts are equal; in JAX 0.6 they have no `==` of their own."""
    names = [name for name in type(context).__slots__ if not name.startswith("__")]
    return context is other or all(
        getattr(context, name, None) == getattr(other, name, None) for name in names
    )


def rebind(
    eqn: Eqn, values: Sequence[Any], params: dict[str, Any] | None = None
) -> Any:
    """Binds `eqn` again as it stands, on values of the dtypes that it was traced with.

    Through a jaxpr of this one equation: `jax.core.eval_jaxpr` knows how each JAX
    version takes a primitive's parameters apart."""
    if params is not None:
        eqn = eqn.replace(params=params)
    if is_hi(eqn):  # it takes arrays only, where others take literals, too
        with eqn_context(eqn):
            return bind_flat(eqn.primitive, list(map(as_array, values)), eqn.params)
    env = {
        atom: value
        for atom, value in zip(eqn.invars, values, strict=True)
        if not isinstance(atom, Literal)
    }
    eqn = from_classic_eqn(eqn)
    with warnings.catch_warnings():
        # A jaxpr of one equation has no names of arguments to show; JAX 0.7 asks for
        # them.
        warnings.filterwarnings("ignore", message=".*debug_info.*")
        jaxpr = jex.Jaxpr([], list(env), list(eqn.outvars), [eqn], eqn.effects)
    return jax.core.eval_jaxpr(jaxpr, [], *env.values())


def as_array(x: Any) -> Any:
    """`x`, as an array if it is a number of Python, which has no dtype."""
    return jnp.asarray(x) if isinstance(x, bool | int | float | complex) else x


def bind_flat(
    primitive: Primitive, values: Sequence[Any], params: dict[str, Any]
) -> list[Any]:
    """Binds a primitive; a list of its results, if there is one as well."""
    outs = bind(primitive, values, params)
    return list(outs) if primitive.multiple_results else [outs]


def traceback_of(eqn: Eqn) -> Any:
    """The calls that led to `eqn`; the same object in all that comes of an equation."""
    return eqn.source_info.traceback


# Since JAX 0.8.
_user_context = jax.make_user_context() if hasattr(jax, "make_user_context") else None
_fresh_traces = itertools.count(1)


@contextlib.contextmanager
def traced_afresh() -> Iterator[None]:
    """Functions that `jax.jit` has traced before are traced again in here.

    JAX finds earlier traces by a context that includes what this changes."""
    number = next(_fresh_traces)
    if _user_context is not None:
        with _user_context(number):
            yield
        return
    before = jax.config.jax_xla_profile_version  # type: ignore[attr-defined]
    jax.config.update("jax_xla_profile_version", number)
    try:
        yield
    finally:
        jax.config.update("jax_xla_profile_version", before)


def has_effect(eqn: Eqn) -> bool:
    """Whether binding `eqn` does something beside computing, such as a callback.

    Collectives have an effect too, but only that of naming a mesh axis."""
    return any(type(e).__name__ != "NamedAxisEffect" for e in eqn.effects)


def writes_references(jaxpr: Jaxpr) -> bool:
    """Whether a program writes to a `jax.Ref` that it was given or closes over.

    The classes of these effects are private. A reference that the program makes itself
    has an effect of another class."""
    return any(
        type(e).__name__ in ("WriteEffect", "AccumEffect") for e in jaxpr.effects
    )


def references_used(jaxpr: Jaxpr) -> list[int]:
    """The inputs of a program that are references with a derivative, and that it uses.

    That an effect names its reference as `input`, and that the aval of a reference has
    an `inner_aval`, is private to JAX (checked on 0.10 and 0.12). On JAX 0.6 nothing is
    found: it refuses derivative rules that use a reference."""
    used = {getattr(effect, "input", None) for effect in jaxpr.effects}
    inputs: Sequence[Any] = raw(jaxpr).invars
    return [i for i, v in enumerate(inputs) if v in used and _moves(v)]


def _moves(reference: Any) -> bool:
    aval = reference.aval
    return hasattr(aval, "inner_aval") and is_inexact(aval.inner_aval)


def new_reference(x: Any) -> Any:
    if hasattr(jax, "new_ref"):
        return jax.new_ref(x)
    # JAX < 0.8.
    from jax.experimental import mutable_array  # pyright: ignore

    return mutable_array(x)


def source_line(eqn: Eqn) -> str:
    """Where the author wrote `eqn`: file, line and function."""
    return source_info.summarize(eqn.source_info)


_FOLDERS = r".*[/\\]"


def without_folders(line: str) -> str:
    """A line of `source_line`, of which the file is named without its folders."""
    return re.sub(_FOLDERS, "", line)


def lowering_without_folders() -> Any:
    """A context in which programs are lowered so that they name files likewise."""
    return _left_out(_FOLDERS)


def compiling_by_names() -> Any:
    """A context in which what JAX's cache gives has the names of what is compiled."""
    return _names_in_cache(True)


def hlo_printer(lowered: jax.stages.Lowered) -> Callable[[], str]:
    """What gives `lowered.as_text("hlo", debug_info=True)`.

    What is returned may be called in another thread, also while `lowered` compiles:
    the module is read here, and it has a context of its own."""
    module, lib = io.BytesIO(), cast(Any, _lib)
    cast(Any, lowered.compiler_ir("stablehlo")).operation.write_bytecode(file=module)
    # JAX 0.6 has no module for the options.
    options = getattr(lib, "hlo", lib._jax).HloPrintOptions.short_parsable()
    options.print_metadata = True
    in_a_tuple = lowered._lowering.compile_args["tuple_args"]

    def print_hlo() -> str:
        hlo = lib._jax.mlir.mlir_module_to_xla_computation(
            module.getvalue(), use_tuple_args=in_a_tuple
        )
        return hlo.as_hlo_module().to_string(options)

    return print_hlo


def scan_arity(eqn: Eqn) -> tuple[int, int]:
    """The numbers of constants and carries of a scan.

    Read off the ranks (a body sees slices of the `xs` and makes slices of the `ys`):
    the parameters that say it changed from `num_consts` and `num_carry` to pytrees in
    JAX 0.11."""
    body = raw(eqn.params["jaxpr"])
    num_carry = sum(
        not _is_slice(inner.aval, outer.aval)
        for outer, inner in zip(eqn.outvars, body.outvars, strict=True)
    )
    num_xs = sum(
        _is_slice(inner.aval, outer.aval)
        for outer, inner in zip(eqn.invars, body.invars, strict=True)
    )
    return len(eqn.invars) - num_carry - num_xs, num_carry


def _is_slice(inner: Any, outer: Any) -> bool:
    """Whether one type is that of a slice of the other, and not the same."""
    if hasattr(inner, "ndim") and hasattr(outer, "ndim"):
        return outer.ndim == inner.ndim + 1
    return inner != outer  # of a reference, or a hi-type


_Values = list[Any]


def scan_operands(eqn: Eqn, values: _Values) -> tuple[_Values, _Values, _Values]:
    """The constants, the carry and the `xs` among the operands of a scan."""
    num_consts, num_carry = scan_arity(eqn)
    first = num_consts + num_carry
    return values[:num_consts], values[num_consts:first], values[first:]


def scan_like(eqn: Eqn, body: Callable[..., Any], init: Any, xs: Any) -> Any:
    """`lax.scan` with the length, the unrolling and the direction of a scan `eqn`.

    `lax.scan` takes a symbolic length from its `xs`, and from there alone: so numbers
    are put beside the `xs`, which nothing reads."""
    options = {name: eqn.params[name] for name in ("reverse", "unroll")}
    if isinstance(length := eqn.params["length"], int):
        return jax.lax.scan(body, init, xs, length, **options)

    def without_number(carry: Any, x: Any) -> Any:
        return body(carry, x[0])

    return jax.lax.scan(without_number, init, (xs, jnp.arange(length)), **options)


def while_operands(eqn: Eqn, values: _Values) -> tuple[_Values, _Values, _Values]:
    """The constants of the test, those of the body and the carry of a `while`."""
    first = eqn.params["cond_nconsts"]
    last = first + eqn.params["body_nconsts"]
    return values[:first], values[first:last], values[last:]


def shard_map_options(params: dict[str, Any]) -> dict[str, Any]:
    """The keywords of `jax.shard_map` for a `shard_map` equation's parameters."""
    axes = _manual_axes(params)
    return {
        "mesh": params["mesh"],
        "in_specs": tuple(params["in_specs"]),
        "out_specs": list(params["out_specs"]),
        "check_vma": params["check_vma"],
        "axis_names": set(axes) if axes is not None else set(),
    }


def call_vmap_rule(
    eqn: Eqn, axis_size: int, batched: Sequence[bool], args: Sequence[Any]
) -> tuple[list[Any], list[bool]]:
    """Runs the rule of a `custom_vmap` equation: results, and which are batched.

    `jax.vmap` of the equation would run it too, but not tell which are batched."""
    tree = eqn.params["in_tree"]
    rule = eqn.params["rule"]
    outs = rule(axis_size, list(tree.unflatten(batched)), *tree.unflatten(args))
    results, are_batched = map(jax.tree.leaves, outs)
    return results, are_batched


def merged(
    leaves: Sequence[Any], dynamic: Sequence[bool], arrays: Sequence[Any]
) -> list[Any]:
    """`leaves`, with those that are `dynamic` taken from `arrays`."""
    rest = iter(arrays)
    return [next(rest) if d else leaf for leaf, d in zip(leaves, dynamic, strict=True)]


def is_array_or_shape(leaf: Any) -> bool:
    """Whether a leaf is an array, or stands for one as a `jax.ShapeDtypeStruct`."""
    return is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)


def is_array(leaf: Any) -> bool:
    """Whether a leaf of the arguments is traced.

    These are JAX's and NumPy's arrays, references, and values of hi-types."""
    if isinstance(leaf, jax.Array | np.ndarray | np.generic):
        # NumPy's strings, objects and dates are none of JAX's business.
        return (
            not isinstance(leaf, np.ndarray | np.generic) or leaf.dtype.kind in "biufcV"
        )
    is_ref = type(leaf).__name__ in ("Ref", "MutableArray", "ArrayRef")
    return is_ref or has_hi_type(leaf)


def has_hi_type(x: Any) -> bool:
    """Whether a value is of a class that JAX lowers to arrays (`HiType`)."""
    try:
        return is_hi_type(jax.typeof(x))
    except TypeError:  # of no type that JAX knows
        return False
