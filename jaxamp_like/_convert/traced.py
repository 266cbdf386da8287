"""A mixed function, traced for parameters and inputs of certain shapes."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from .._dtypes import cast_all
from .._errors import AmpError
from .._jax import Jaxpr, consts, raw, shown, trace, typeof
from .._quantised.linear import without_transposes
from .models import is_parameter
from .rewriting import run_stored
from .storage import Stored, narrower, storage
from .uses import Uses, uses_of_inputs


class Outs(NamedTuple):
    """What a function returns, beside its arrays."""

    leaves: list[Any]  # `None` where there is an array
    is_array: list[bool]
    tree: Any

    def merge(self, arrays: Sequence[Any]) -> Any:
        rest = iter(arrays)
        pairs = zip(self.leaves, self.is_array, strict=True)
        leaves = [next(rest) if is_array else leaf for leaf, is_array in pairs]
        return jax.tree.unflatten(self.tree, leaves)


class Traced(NamedTuple):
    """The program of a mixed function, and how its constants and inputs are read.

    Its inputs are the arrays among the parameters, then those among the inputs."""

    jaxpr: Jaxpr
    outs: Outs
    uses_of_constants: list[Uses]
    uses: list[Uses]

    def constants(self) -> list[Any]:
        """The arrays that the function closes over, as they are stored."""
        dtypes = [narrower(x, s) for x, s in zip(*self._constants(), strict=True)]
        return cast_all(consts(self.jaxpr), dtypes)

    def stored_constants(self) -> tuple[Stored, ...]:
        """How they are stored."""
        return tuple(self._constants()[1])

    def _constants(self) -> tuple[list[Any], list[Stored]]:
        values = [jax.numpy.asarray(x) for x in consts(self.jaxpr)]
        pairs = enumerate(zip(values, self.uses_of_constants, strict=True))
        return values, [storage(f"constant {i}", x, u) for i, (x, u) in pairs]

    def run(self, constants: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        """The flat results, for constants and parameters as they are stored."""
        return run_stored(self.jaxpr, constants, args)

    def check(self, stored: Sequence[Stored]) -> None:
        """Sees to it that parameters that are stored so will do for this program.

        They were stored for inputs of other shapes, where another rule may hold.

        Raises:
            AmpError: a parameter is read in more bits than it has."""
        for leaf, uses in zip(stored, self.uses, strict=False):
            needs = {use.dtype for use in uses} - {leaf.now}
            if leaf.is_changed and needs and not leaf.folded:
                use = next(
                    use for use in sorted(uses, key=str) if use.dtype != leaf.now
                )
                raise AmpError(
                    f"The parameter {leaf.name!r} is stored in {leaf.now}, but for "
                    f"inputs of these shapes it is also read by {use}. Convert with "
                    "such inputs as examples, or give it in `keep_inputs`."
                )


def traced(mixed: Callable[..., Any], params: Any, inputs: Sequence[Any]) -> Traced:
    """Traces `mixed(params, *inputs)`; arrays may be `jax.ShapeDtypeStruct`s."""
    leaves, tree = jax.tree.flatten((params, tuple(inputs)))
    dynamic = [is_parameter(x) for x in leaves]
    result: list[Outs] = []

    def flat(*arrays: Any) -> list[Any]:
        rest = iter(arrays)
        pairs = zip(leaves, dynamic, strict=True)
        merged = [next(rest) if d else leaf for leaf, d in pairs]
        params, inputs = jax.tree.unflatten(tree, merged)
        outs, out_tree = jax.tree.flatten(mixed(params, *inputs))
        is_array = [isinstance(x, jax.Array) for x in outs]
        pairs = list(zip(outs, is_array, strict=True))
        result.append(Outs([None if a else x for x, a in pairs], is_array, out_tree))
        return [x for x, a in pairs if a]

    arrays = [x for x, d in zip(leaves, dynamic, strict=True) if d]
    jaxpr = without_transposes(shown(trace(flat, [_aval(x) for x in arrays])))
    uses = uses_of_inputs(jaxpr)
    num_constants = len(raw(jaxpr).constvars)
    return Traced(jaxpr, result[-1], uses[:num_constants], uses[num_constants:])


def _aval(x: Any) -> Any:
    return x if isinstance(x, jax.ShapeDtypeStruct) else typeof(x)
