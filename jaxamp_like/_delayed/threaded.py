"""Runs a program with marks (see `tensors`): scales come in, and maxima go out.

An equation whose programs hold marks is bound anew, so that scales and maxima are
handed through. A scan slices scales and stacks maxima. A `while` loop returns the
largest maxima of its iterations, and a `shard_map` the largest over its axes. All
branches of a `cond` take the same scales and return the same maxima. All other
equations are bound as they are.

The handlers of `_structural` can't be used here: they bind what a plan says, while here
every body takes scales and returns maxima besides what it takes and returns as
written."""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jax.sharding import PartitionSpec, Sharding

from .._errors import AmpError
from .._jax import (
    Eqn,
    Jaxpr,
    bind,
    eqn_context,
    evaluate,
    open_jaxpr,
    rebind,
    scan_like,
    scan_operands,
    shard_map_options,
    source_line,
    subjaxprs,
    trace,
    typeof,
    varying_axes,
    varying_over,
    while_operands,
)
from .._quantised.delayed import NOT_SEEN, measured, not_differentiated
from .._quantised.scaled import largest_of
from .._structural.base import REMAT
from .tensors import ScaleUse, ScaleUses, Tensor, mapped_axes

Arrays = dict[str, Any]  # by the key of a tensor


class StatefulEvaluator:
    """Evaluates programs with marks.

    Args:
        tensors: the tensors that have a history, by key.
        depth: how many scans are around.
        axes: the mesh axes of the `shard_map`s around."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        depth: int = 0,
        axes: frozenset[str] = frozenset(),
    ):
        self.tensors = tensors
        self.depth = depth
        self.axes = axes

    def run(
        self, jaxpr: Jaxpr, sites: ScaleUses, scales: Arrays, args: Sequence[Any]
    ) -> tuple[list[Any], Arrays]:
        """What `jaxpr` gives for `args`, and the maxima that are taken in it."""
        scales, maxima = dict(scales), {}

        def bind(eqn: Eqn, values: list[Any]) -> Sequence[Any]:
            if id(eqn) not in sites and not _is_plain_checkpoint(eqn):
                return rebind(eqn, values)
            found = sites.get(id(eqn), ({},))
            with eqn_context(eqn):
                outs, made = self._eqn(eqn, found, scales, values)
            maxima.update(larger(maxima, made))
            # All later readers, such as the backward pass, divide by the same scales.
            if isinstance(found, ScaleUse):
                scales[found.tensor.key] = outs[0]
                return outs
            for key in made:
                if key in scales:
                    scales[key] = self.measured(key, scales[key], maxima[key])
            return outs

        return evaluate(jaxpr, args, bind), maxima

    def _eqn(
        self, eqn: Eqn, found: Any, scales: Arrays, values: list[Any]
    ) -> tuple[Sequence[Any], Arrays]:
        if not isinstance(found, ScaleUse):
            handler = _HANDLERS.get(eqn.primitive.name, _call)
            return handler(self, eqn, found, scales, values)
        key = found.tensor.key
        scale = varying_over(scales[key], sorted(found.tensor.axes))
        if differs := varying_axes(scale) - found.tensor.axes:
            raise AmpError(_SEVERAL.format(found.tensor.name, (*sorted(differs),)))
        if not found.records:
            return [scale], {}
        amax = largest_of(not_differentiated(values[0]))
        shape = found.tensor.shape(self.depth)
        assert not shape, "a history that is stacked more often than it is read"
        return [self.measured(key, scale, amax)], {key: amax}

    def measured(self, key: str, scale: Any, amax: Any) -> Any:
        """The scale of a tensor whose maximum is known by now."""
        fmt = self.tensors[key].request.fmt
        axes = sorted({*varying_axes(scale), *varying_axes(amax)})
        scale, amax = (varying_over(x, axes) for x in (scale, amax))
        return measured(scale, amax, fmt)

    def unseen_maxima(self, keys: Iterable[str]) -> Arrays:
        """Maxima for tensors that are not made, smaller than any that is measured."""

        def like(tensor: Tensor) -> Any:
            # A `shard_map` inside returns maxima over all its devices, which are equal.
            axes = tensor.axes - (tensor.around.axes - self.axes)
            none = jnp.full(tensor.shape(self.depth), NOT_SEEN, jnp.float32)
            return varying_over(none, sorted(axes))

        return {key: like(self.tensors[key]) for key in keys}


_SEVERAL = (
    "The state differs between the devices of a `shard_map`, and what {!r} is of does "
    "not. Give all devices one state: `jax.tree.map(lambda x: jax.lax.pmax(x, {}), "
    "state)`."
)


def larger(a: Arrays, b: Arrays) -> Arrays:
    both = {key: jnp.maximum(x, b[key]) for key, x in a.items() if key in b}
    return a | b | both


def uses(sites: ScaleUses) -> Iterator[ScaleUse]:
    """The marks of a program, at any depth."""
    for found in sites.values():
        if isinstance(found, ScaleUse):
            yield found
        else:
            for inner in found:
                yield from uses(inner)


def read_in(sites: ScaleUses) -> list[str]:
    """The keys of tensors whose scales a program reads."""
    return sorted({use.tensor.key for use in uses(sites)})


def recorded_in(sites: Iterable[ScaleUses]) -> list[str]:
    """The keys of tensors whose maxima are taken in some programs."""
    found = {use.tensor.key for s in sites for use in uses(s) if use.records}
    return sorted(found)


def _call(
    self: StatefulEvaluator, eqn: Eqn, found: Any, scales: Arrays, values: list[Any]
):
    """Runs the program of a call in its place, with the shardings of a `jit`."""
    (jaxpr,) = subjaxprs(eqn.params)
    values = _sharded(values, eqn.params.get("in_shardings"))
    outs, maxima = self.run(jaxpr, found[0], scales, values)
    return _sharded(outs, eqn.params.get("out_shardings")), maxima


def _is_plain_checkpoint(eqn: Eqn) -> bool:
    """Whether an equation is a checkpoint that is not differentiated: only a group."""
    return eqn.primitive.name in REMAT and not eqn.params["differentiated"]


def _sharded(values: list[Any], shardings: Sequence[Any] | None) -> list[Any]:
    if shardings is None:
        return values
    return [
        lax.with_sharding_constraint(x, s) if isinstance(s, Sharding) else x
        for x, s in zip(values, shardings, strict=True)
    ]


def _custom_vmap(
    self: StatefulEvaluator, eqn: Eqn, found: Any, scales: Arrays, values: list[Any]
):
    """Binds a `custom_vmap` call without its rule, which knows nothing of maxima."""

    @custom_vmap
    def call(scales, *operands):
        return self.run(eqn.params["call"], found[0], scales, operands)

    @call.def_vmap
    def _(*_):
        raise AmpError(
            "A function of `amp_with_state` that holds a `custom_vmap` "
            f"({source_line(eqn)}) can't be mapped from outside: the author's rule "
            "says nothing of maxima. Put `amp_with_state` around the mapped function: "
            "`amp_with_state(jax.vmap(fn))`."
        )

    return call({key: scales[key] for key in read_in(found[0])}, *values)


def _remat(
    self: StatefulEvaluator, eqn: Eqn, found: Any, scales: Arrays, values: list[Any]
):
    """Binds a checkpoint of the backward pass as a checkpoint, and others as a call.

    So XLA does not run the equations in it before the backward pass."""
    params, (sites,) = eqn.params, found
    if not params["differentiated"]:
        return _call(self, eqn, found, scales, values)
    read, made = read_in(sites), recorded_in(found)

    def body(*args):
        given = dict(zip(read, args, strict=False))
        outs, maxima = self.run(params["jaxpr"], sites, given, args[len(read) :])
        return [*outs, *(maxima[key] for key in made)]

    operands = [*(scales[key] for key in read), *values]
    inner, held = open_jaxpr(trace(body, list(map(typeof, operands))))
    prevent_cse = params["prevent_cse"]
    if isinstance(prevent_cse, tuple):  # for each operand, since JAX 0.9
        added = len(held) + len(read)
        prevent_cse = (any(prevent_cse),) * added + prevent_cse
    params = params | {"jaxpr": inner, "prevent_cse": prevent_cse}
    outs = bind(eqn.primitive, [*held, *operands], params)
    last = len(outs) - len(made)
    return outs[:last], dict(zip(made, outs[last:], strict=True))


def _scan(
    self: StatefulEvaluator, eqn: Eqn, found: Any, scales: Arrays, values: list[Any]
):
    (sites,) = found
    fixed, carry, xs = scan_operands(eqn, values)
    num_carry = len(carry)
    inner = StatefulEvaluator(self.tensors, self.depth + 1, self.axes)
    read = read_in(sites)
    own = {key for key in read if inner.depth in self.tensors[key].lengths}
    sliced = {key: scales[key] for key in read if key in own}
    shared = {key: scales[key] for key in read if key not in own}

    def body(carry, slices):
        x, sliced = slices
        args = [*fixed, *carry, *x]
        outs, maxima = inner.run(eqn.params["jaxpr"], sites, shared | sliced, args)
        return outs[:num_carry], (outs[num_carry:], maxima)

    carry, (ys, maxima) = scan_like(eqn, body, carry, (xs, sliced))
    made = {
        key: x if key in own else jnp.max(x, axis=0, initial=NOT_SEEN)
        for key, x in maxima.items()
    }
    return [*carry, *ys], made


def _while(
    self: StatefulEvaluator, eqn: Eqn, found: Any, scales: Arrays, values: list[Any]
):
    for_test, for_step = found
    params = eqn.params
    for_cond, for_body, carry = while_operands(eqn, values)
    none = self.unseen_maxima(recorded_in(found))

    def tested(carry, maxima):
        """A carry, whether to go on from it, and all maxima up to here."""
        args = [*for_cond, *carry]
        (goes_on,), made = self.run(params["cond_jaxpr"], for_test, scales, args)
        return carry, goes_on, larger(maxima, made)

    def step(state):
        carry, _, maxima = state
        args = [*for_body, *carry]
        carry, made = self.run(params["body_jaxpr"], for_step, scales, args)
        return tested(carry, larger(maxima, made))

    carry, _, maxima = lax.while_loop(lambda s: s[1], step, tested(carry, none))
    return carry, maxima


def _cond(
    self: StatefulEvaluator, eqn: Eqn, found: Any, scales: Arrays, values: list[Any]
):
    none = self.unseen_maxima(recorded_in(found))

    def branch(jaxpr, sites, *operands):
        outs, maxima = self.run(jaxpr, sites, scales, operands)
        return outs, none | maxima

    pairs = zip(eqn.params["branches"], found, strict=True)
    branches: list[Callable[..., Any]] = [functools.partial(branch, *p) for p in pairs]
    index = lax.convert_element_type(values[0], "int32")
    return lax.switch(index, branches, *values[1:])


def _shard_map(
    self: StatefulEvaluator, eqn: Eqn, found: Any, scales: Arrays, values: list[Any]
):
    options = shard_map_options(eqn.params)
    # In JAX 0.6, a `shard_map` within another one may name the axes of both.
    axes = sorted(mapped_axes(options) - self.axes)
    known = axes if options["check_vma"] else []
    inner = StatefulEvaluator(self.tensors, self.depth, self.axes.union(axes))
    options["in_specs"] = (PartitionSpec(), *options["in_specs"])
    options["out_specs"] = (options["out_specs"], PartitionSpec())
    shard_map: Any = jax.shard_map

    def body(scales, *operands):
        outs, maxima = inner.run(eqn.params["jaxpr"], found[0], scales, operands)
        return outs, {
            key: lax.pmax(varying_over(x, known), tuple(axes))
            for key, x in maxima.items()
        }

    return shard_map(body, **options)(scales, *values)


_HANDLERS = {
    **dict.fromkeys(REMAT, _remat),
    "custom_vmap_call": _custom_vmap,
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "shard_map": _shard_map,
}
