"""What a backward pass computes again, instead of keeping it from the forward pass.

`amp_with_state` gets a program that is differentiated already: JAX has chosen what the
forward pass hands over, as if nothing in it were low. Here it is chosen once more. The
backward pass computes again what cheap equations make of smaller values, such as the
low result of a contraction, or of inputs of the program, such as a weight. Where the
backward pass of the program repeats an equation of the forward pass, such as a
rounding, it takes the result of that one."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._jax import (
    Eqn,
    Literal,
    as_recomputed,
    eqn_context,
    evaluate,
    has_effect,
    names,
    raw,
    rebind,
    subjaxprs,
    to_classic,
    trace,
    typeof,
    variables,
)
from .._primitives import is_cheap
from .._rewrite.value_numbers import operation_of, value_of
from .._structural import CALLS

SIXTEEN_BITS = (jnp.dtype("bfloat16"), jnp.dtype("float16"))
_MOST = 100  # the most equations that are run again for one value


def with_fewer_residuals(fn: Callable[..., Any], *args: Any) -> Any:
    """`fn(*args)`, with a backward pass inside of `fn` that keeps less."""
    values, tree = jax.tree.flatten(args)
    trees = []

    def flat(*values: Any) -> list[Any]:
        outs, out_tree = jax.tree.flatten(fn(*jax.tree.unflatten(tree, values)))
        trees.append(out_tree)
        return outs

    jaxpr = to_classic(trace(flat, list(map(typeof, values))))
    outs = evaluate(jaxpr, values, _Rebinder(_ResidualChoice(raw(jaxpr))))
    return jax.tree.unflatten(trees[0], outs)


class _ResidualChoice:
    """What the forward pass of a program hands over to its backward pass.

    Attributes:
        makers: the equations that make the values of the forward pass.
        same: for values of the backward pass, equal values of the forward pass.
        kept: the values of the forward pass that are kept for the backward pass."""

    def __init__(self, jaxpr: Any):
        self.makers: dict[Any, Eqn] = {}
        self.forward_values: dict[Any, Any] = {}
        self.residuals: set[Any] = set()
        made: dict[Hashable, Eqn] = {}
        read: dict[Any, None] = {}
        for eqn in jaxpr.eqns:
            operands = [self.forward_value(atom) for atom in eqn.invars]
            key = _key(eqn, operands) if _may_recompute(eqn) else None
            if not names(eqn).backward:
                self.makers |= dict.fromkeys(eqn.outvars, eqn)
                made.setdefault(key, eqn)
            elif key is not None and key in made:
                self.forward_values |= zip(eqn.outvars, made[key].outvars, strict=True)
            else:
                read |= dict.fromkeys(x for x in operands if self.is_forward_value(x))
        # The largest come first: smaller ones may be made of what is kept for these.
        made_at = {v: i for i, v in enumerate(self.makers)}
        for v in sorted(read, key=lambda v: (-_num_bytes(v), made_at[v])):
            self.residuals |= self._residuals_of(v, {})[0]

    def forward_value(self, atom: Any) -> Any:
        return (
            atom if isinstance(atom, Literal) else self.forward_values.get(atom, atom)
        )

    def is_forward_value(self, atom: Any) -> bool:
        return not isinstance(atom, Literal) and atom in self.makers

    def is_recomputed(self, atom: Any) -> bool:
        return self.is_forward_value(atom) and atom not in self.residuals

    def _residuals_of(
        self, v: Any, known: dict[Any, Any]
    ) -> tuple[frozenset[Any], int]:
        """The values to keep to have `v`, and how many equations make it of them.

        Unless they take fewer bytes than `v`, and few equations make it, they are `v`
        itself."""
        if not self.is_recomputed(v):
            return frozenset(), 0
        if v not in known:
            known[v] = frozenset([v]), 0
            eqn = self.makers[v]
            if _may_recompute(eqn) and v.aval.ndim:
                parts = [
                    self._residuals_of(x, known)
                    for x in dict.fromkeys(variables(eqn.invars))
                ]
                leaves = frozenset[Any]().union(*(some for some, _ in parts))
                size = 1 + sum(size for _, size in parts)
                if sum(map(_num_bytes, leaves)) < _num_bytes(v) and size <= _MOST:
                    known[v] = leaves, size
        return known[v]


class _Rebinder:
    """Binds the equations of a program, some of them again in its backward pass."""

    def __init__(self, choice: _ResidualChoice):
        self.choice = choice
        self.values: dict[Any, Any] = {}  # what has been read or made so far
        self.recomputed: dict[Any, Any] = {}
        self.behind_barrier: dict[Any, Any] = {}
        self.cotangents: set[Any] = set()  # what the backward pass has made

    def __call__(self, eqn: Eqn, values: list[Any]) -> Sequence[Any]:
        pairs = zip(eqn.invars, values, strict=True)
        self.values |= {v: x for v, x in pairs if not isinstance(v, Literal)}
        if not names(eqn).backward:
            outs = list(map(self._rounded_as_saved, eqn.outvars, rebind(eqn, values)))
        elif any(v in self.choice.forward_values for v in eqn.outvars):
            return [self.values[self.choice.forward_values[v]] for v in eqn.outvars]
        else:
            read = (x for x in variables(eqn.invars) if x in self.cotangents)
            after = [self.values[x] for x in read][:1]
            outs = rebind(
                eqn, [self._backward_operand(atom, after) for atom in eqn.invars]
            )
            self.cotangents.update(eqn.outvars)
        self.values |= zip(eqn.outvars, outs, strict=True)
        return outs

    def _rounded_as_saved(self, v: Any, value: Any) -> Any:
        """`value`; if it is kept in 16 bits, it is sure to be rounded to them.

        So the forward pass goes on with the number that is kept. Without this, XLA may
        leave out the rounding inside of a fusion."""
        if v not in self.choice.residuals or v.aval.dtype not in SIXTEEN_BITS:
            return value
        info = jnp.finfo(v.aval.dtype)
        return lax.reduce_precision(value, info.nexp, info.nmant)

    def _backward_operand(self, atom: Any, after: list[Any]) -> Any:
        """The value that an equation of the backward pass reads for `atom`."""
        atom = self.choice.forward_value(atom)
        if not self.choice.is_recomputed(atom):
            return atom.val if isinstance(atom, Literal) else self.values[atom]
        if atom not in self.recomputed:
            eqn = as_recomputed(self.choice.makers[atom])
            values = [self._behind_barrier(x, eqn, after) for x in eqn.invars]
            self.recomputed |= zip(eqn.outvars, rebind(eqn, values), strict=True)
        return self.recomputed[atom]

    def _behind_barrier(self, atom: Any, eqn: Eqn, after: list[Any]) -> Any:
        """An operand of an equation that is bound again, behind a barrier.

        So XLA neither reuses the result of the forward pass, nor runs the equation
        before the backward pass has made the values `after`."""
        value = self._backward_operand(atom, after)
        if self.choice.is_recomputed(atom) or isinstance(atom, Literal):
            return value
        if atom.aval.ndim and atom not in self.behind_barrier:
            with eqn_context(eqn):
                self.behind_barrier[atom] = lax.optimization_barrier([value, *after])[0]
        return self.behind_barrier.get(atom, value)


def _may_recompute(eqn: Eqn) -> bool:
    if eqn.primitive.name in CALLS:
        inner = (one for jaxpr in subjaxprs(eqn.params) for one in raw(jaxpr).eqns)
        return not has_effect(eqn) and all(map(_may_recompute, inner))
    return is_cheap(eqn) and not has_effect(eqn)


def _key(eqn: Eqn, operands: Sequence[Any]) -> Hashable:
    """A key, equal for equations of equal values; `None` if it can't be hashed."""
    made = operation_of(eqn)
    read = ((x.aval, value_of(x)) if isinstance(x, Literal) else x for x in operands)
    return None if made is None else (made, *read)


def _num_bytes(v: Any) -> int:
    return v.aval.size * v.aval.dtype.itemsize
