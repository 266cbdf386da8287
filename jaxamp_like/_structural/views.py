"""Views: what moves an input about, such as a slice or a transpose of a parameter.

A view of an input is as good as the input: its cast can be made again from what is live
in the backward pass anyway, and need not be kept."""

from collections.abc import Callable, Sequence
from math import inf
from typing import Any

from .._dtypes import DType
from .._jax import Atom, Literal, bind_flat, eqn_context, variables, without_scopes
from .._rules import author_dtype
from .base import Plan, Step

# A longer chain of views is not made again for each of its readers: in a loop that
# slices what the last iteration has left of a parameter, tracing would be quadratic.
# So it would be for the parts into which a parameter is split, which are views each.
_MOST_VIEWS = 32


class Views:
    """The views that were made so far, each by the step that made it.

    Attributes:
        kept: the variables that views are made of, and so can't be forgotten."""

    def __init__(self) -> None:
        self.makers: dict[Any, Step] = {}
        self.kept: set[Any] = set()

    def remember(self, step: Step) -> None:
        is_known = any(fact and fact.remat_source for fact in step.decision.out_facts)
        if is_known and not step.is_part_of_copy:
            self.makers |= dict.fromkeys(step.eqn.outvars, step)
            self.kept.update(step.variables_read)

    def inputs_of(
        self,
        atoms: Sequence[Atom],
        follow: Callable[[Step], bool] = lambda view: True,
        most: float = _MOST_VIEWS,
    ) -> tuple[list[Any], list[Step]]:
        """The inputs that `atoms` are views of, and the steps that lead to them.

        Views that are not to be followed count as inputs. If more than `most` views for
        each of `atoms` lead to them, all `atoms` do. What is split counts as a view for
        each of its parts."""
        roots: dict[Any, None] = {}
        found: set[Step] = set()
        chain: list[Step] = []
        count = 0
        # A view comes after its operands.
        todo: list[Any] = [*reversed(atoms)]
        while todo:
            atom = todo.pop()
            if isinstance(atom, Step):
                chain.append(atom)
            elif not isinstance(atom, Literal):
                view = self.makers.get(atom)
                if view is None or not follow(view):
                    roots[atom] = None
                elif view not in found:
                    count += len(view.eqn.outvars)
                    if count > most * len(atoms):
                        return list(dict.fromkeys(variables(atoms))), []
                    found.add(view)
                    todo += view, *reversed(view.eqn.invars)
        return list(roots), chain

    def is_near(self, atom: Atom) -> bool:
        """Whether `atom` is an input, or a few views of one lead to it."""
        return atom not in self.makers or bool(self.inputs_of([atom])[1])


def rebind_view(view: Step, operands: list[Any]) -> list[Any]:
    """Makes the same view of other values, in the scopes of what is bound now."""
    with eqn_context(without_scopes(view.eqn)):
        return bind_flat(view.eqn.primitive, operands, view.eqn.params)


def contraction_input_casts(plan: Plan) -> list[tuple[Any, DType]]:
    """The inputs whose casts the contractions of a plan read, with the dtypes.

    Where an input is sliced at indices that are only known at run time, the slice
    stands for it."""
    views = Views()
    casts: dict[tuple[Any, DType], None] = {}
    for step in plan.steps:
        views.remember(step)
        for i in step.recomputed_casts if step.is_compute else ():
            dtype = step.decision.reads[i]
            if dtype is None:  # the rule's own `bind` casts it
                continue
            for root in views.inputs_of([step.eqn.invars[i]], _is_fixed, inf)[0]:
                if author_dtype(root.aval) is not None:
                    casts[root, dtype] = None
    return list(casts)


def _is_fixed(view: Step) -> bool:
    """Whether a view shows the same part of its operand whenever it is made."""
    return view.eqn.primitive.name != "dynamic_slice"
