"""A mixed function, traced for parameters and inputs of certain shapes."""

from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any, NamedTuple

import jax

from .._dtypes import cast_all
from .._errors import AmpError
from .._jax import (
    Jaxpr,
    consts,
    equations,
    is_array_or_shape,
    merged,
    raw,
    to_classic,
    trace,
    typeof,
)
from .._name_stacks import names
from .._parameters import returns_tree_like
from .._quantised.linear import without_transposes
from .rewriting import run_stored
from .storage import Stored, narrower, storage
from .uses import Uses, uses_of_inputs


class TracedModel(NamedTuple):
    """The program of a mixed function, and how its constants and inputs are read.

    Its inputs are the arrays among the function's parameters, then those among the
    function's inputs."""

    jaxpr: Jaxpr
    out_tree: Any  # the structure of the results
    static_leaves: list[Any]  # the leaves of the results, `None` in place of an array
    are_arrays: list[bool]  # which leaves of the results are arrays
    uses_of_constants: list[Uses]
    uses: list[Uses]

    def merge(self, arrays: Sequence[Any]) -> Any:
        """What the function returns, made of the flat results of its program."""
        leaves = merged(self.static_leaves, self.are_arrays, arrays)
        return jax.tree.unflatten(self.out_tree, leaves)

    def constants(self) -> list[Any]:
        """The arrays that the function closes over, as they are stored."""
        dtypes = [narrower(x, s) for x, s in zip(*self._constants(), strict=True)]
        return cast_all(consts(self.jaxpr), dtypes)

    def stored_constants(self) -> tuple[Stored, ...]:
        """How the arrays that the function closes over are stored."""
        return tuple(self._constants()[1])

    def _constants(self) -> tuple[list[Any], list[Stored]]:
        values = [jax.numpy.asarray(x) for x in consts(self.jaxpr)]
        pairs = enumerate(zip(values, self.uses_of_constants, strict=True))
        return values, [storage(f"constant {i}", x, u) for i, (x, u) in pairs]

    def run(self, constants: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        """The flat results, for constants and parameters as they are stored."""
        return run_stored(self.jaxpr, constants, args)

    def check(self, stored: Sequence[Stored]) -> None:
        """Checks that this program reads each parameter in the dtype it is stored in.

        Parameters may have been stored for inputs of other shapes, where a rule that
        goes by shapes decided otherwise. A product that is no contraction for these
        shapes, as where its result is one number, may read them so.

        Raises:
            AmpError: a parameter is read in another dtype, too."""
        for leaf, uses in zip(stored, self.uses, strict=False):
            others = sorted(
                (u for u in uses if u.dtype != leaf.now and not u.is_inner),
                key=str,
            )
            if others and leaf.is_changed and not leaf.folded:
                raise AmpError(
                    f"The parameter {leaf.name!r} is stored in {leaf.now}, but for "
                    f"inputs of these shapes it is also read by {others[0]}. Convert "
                    "with such inputs as examples, or give it in `keep_inputs`."
                )


def traced(
    mixed: Callable[..., Any], params: Any, inputs: Sequence[Any]
) -> TracedModel:
    """Traces `mixed(params, *inputs)`; arrays may be `jax.ShapeDtypeStruct`s."""
    leaves, tree = jax.tree.flatten((params, tuple(inputs)))
    dynamic = list(map(is_array_or_shape, leaves))
    returned: list[Any] = []

    # A user's class may look at its children when it is made: it gets all of them.
    def flat(*arrays: Any) -> list[Any]:
        params, inputs = jax.tree.unflatten(tree, merged(leaves, dynamic, arrays))
        outs, out_tree = jax.tree.flatten(mixed(params, *inputs))
        are_arrays = [isinstance(x, jax.Array) for x in outs]
        others = [
            None if is_array else x
            for x, is_array in zip(outs, are_arrays, strict=True)
        ]
        returned[:] = out_tree, others, are_arrays
        return list(compress(outs, are_arrays))

    avals = map(_aval, compress(leaves, dynamic))
    jaxpr = without_transposes(to_classic(trace(flat, list(avals))))
    uses = uses_of_inputs(jaxpr)
    out_tree, others, are_arrays = returned
    num = len(raw(jaxpr).constvars)
    return TracedModel(jaxpr, out_tree, others, are_arrays, uses[:num], uses[num:])


def _aval(x: Any) -> Any:
    return x if isinstance(x, jax.ShapeDtypeStruct) else typeof(x)


def returns_gradients(program: TracedModel, params: Any) -> bool:
    """Whether a result is a tree like `params`, in a program with a backward pass."""
    jaxpr = raw(program.jaxpr)
    outs = program.merge([out.aval for out in jaxpr.outvars])
    return returns_tree_like((params,), outs) and any(
        names(eqn).backward for eqn in equations(jaxpr)
    )
